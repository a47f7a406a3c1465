"""The kernels run on the devices of this build; other devices use plain torch."""

from types import SimpleNamespace

from torch import Tensor

from focalkern.fallback.row_loss import row_loss as plain_row_loss
from focalkern.fallback.sigmoid_loss import sigmoid_loss as plain_sigmoid_loss
from focalkern.stable.row_loss import row_loss
from focalkern.stable.sigmoid_loss import sigmoid_loss
from tools.hub_package._operators import DEVICES

__all__ = ["backend_for", "has_kernels"]

_KERNELS = SimpleNamespace(row_loss=row_loss, sigmoid_loss=sigmoid_loss)
_PLAIN = SimpleNamespace(row_loss=plain_row_loss, sigmoid_loss=plain_sigmoid_loss)


def has_kernels(input: Tensor) -> bool:
    return input.device.type in DEVICES


def backend_for(input: Tensor) -> SimpleNamespace:
    return _KERNELS if has_kernels(input) else _PLAIN
