"""Checks of the operators in plain torch; the errors have the words of the compiled module."""

import torch
from torch import Tensor

from focalkern._checks import check_floating as check_floating
from focalkern._checks import may_wait_for
from focalkern._devices import autocast_is_on, has_float64
from focalkern._tracing import has_values
from focalkern._types import HALVES, REDUCTIONS


def check_dense(op: str, tensor: Tensor, name: str = "input") -> None:
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").replace("_", " ").title().replace(" ", "")
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got layout {layout}")


def check_same_device(op: str, name: str, tensor: Tensor, input: Tensor) -> None:
    check_dense(op, tensor, name)
    if tensor.device != input.device:
        raise ValueError(f"{op}: {name} must be on the device of input, {input.device}, got {tensor.device}")


def check_reduction(op: str, reduction: int) -> None:
    if not 0 <= reduction < len(REDUCTIONS):
        raise ValueError(f"{op}: reduction must be 0 (none), 1 (mean) or 2 (sum), got {reduction}")


def widest_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of parameters: float64, or float32 on devices without float64."""
    return torch.float64 if has_float64(tensor.device) else torch.float32


def autocasts(input: Tensor) -> bool:
    """Whether autocast makes the result of this half-precision input float32."""
    return input.dtype in HALVES and autocast_is_on(input.device.type)


def values_may_be_read(tensor: Tensor) -> bool:
    """Whether invalid values raise: on the CPU, and with FOCALKERN_VALIDATE=1 on other devices too.

    Always False where values cannot be read: in graphs, under torch.func, on the meta device, of fake tensors.
    """
    return may_wait_for(tensor) and has_values(tensor)


def fits(parameter: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether the parameter broadcasts to ``shape`` without enlarging it."""
    pairs = zip(reversed(parameter.shape), reversed(shape), strict=False)
    return parameter.dim() <= len(shape) and all(size in (1, wanted) for size, wanted in pairs)


def sum_tolerance(dtype: torch.dtype) -> float:
    """The permitted difference to 1 of the sum of a row of probabilities of this dtype."""
    return 1e-3 + {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}.get(dtype, 0.0)
