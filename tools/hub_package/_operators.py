"""Registers the operators of this kernel. Checks, shapes and derivatives are in Python, the kernels in C++."""

import ctypes
from pathlib import Path

import torch

from focalkern.fallback.row_loss import focal_loss_composite
from focalkern.fallback.sigmoid_loss import sigmoid_loss_composite
from focalkern.stable import row_loss, sigmoid_loss
from focalkern.stable._autograd import register

__all__ = ["DEVICES"]

_namespace = torch.ops.focalkern.name
DEVICES = ("cpu", "cuda") if "_cuda_" in _namespace else ("cpu",)


def _saved_numbers() -> dict[str, int]:
    """The count of numbers that each loss saves per row, as reported by the compiled module."""
    (module,) = Path(__file__).parent.glob(f"{_namespace}*.so")
    losses = ctypes.CDLL(str(module)).focalkern_row_losses
    losses.restype = ctypes.c_char_p
    return {name: int(saved) for name, saved in (entry.split(":") for entry in losses().decode().split())}


row_loss.SAVED_NUMBERS.update(_saved_numbers())
_library = torch.library.Library(_namespace, "IMPL")
for _operator in (row_loss.OPERATOR, sigmoid_loss.OPERATOR):
    register(_library, _operator, [device.upper() for device in DEVICES])
for _composite in (focal_loss_composite, sigmoid_loss_composite):
    _library.impl(_composite.__name__, _composite, "CompositeImplicitAutograd")
