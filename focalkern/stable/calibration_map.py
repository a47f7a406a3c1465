"""The calibration maps on the kernels of the stable module."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from focalkern._types import compute_dtype
from focalkern.fallback._checks import autocasts, check_same_device, values_may_be_read
from focalkern.fallback.calibration_map import (
    calibration_map_composite,
    check_arguments,
    operator_name,
    raise_invalid_row,
)
from focalkern.stable._autograd import Operator, apply, parameter, reduced

__all__ = ["OPERATOR", "calibration_map", "calibration_map_scalar"]

_BINARY = 2
_kernels = torch.ops.focalkern_stable


def calibration_map(input: Tensor, gamma: float | Tensor, temperature: float | Tensor, kind: int, log: bool) -> Tensor:
    """As the compiled module's calibration_map."""
    return apply(OPERATOR, _Inputs(input, gamma, temperature), _Options(kind, log, autocasts(input), True))


calibration_map_scalar = calibration_map  # which takes numbers too


# -- the operators ----------------------------------------------------------------------------------------------------


class _Inputs(NamedTuple):
    input: Tensor
    gamma: float | Tensor
    temperature: float | Tensor


class _Options(NamedTuple):
    kind: int
    log_output: bool
    wide: bool
    validate: bool = True


def _check(inputs: _Inputs, options: _Options) -> None:
    check_arguments(*inputs, options.kind)


def _rows(input: Tensor, kind: int) -> torch.Size:
    return input.shape if kind == _BINARY else input.shape[:-1]


def _prepared(inputs: _Inputs, kind: int) -> tuple[list[Tensor | None], list[float]]:
    """Input, gamma and temperature (float64, one per row), and the parameters that are single numbers."""
    shape, wide = _rows(inputs.input, kind), torch.float64
    given = [
        parameter(value, 0.0, wide, shape if isinstance(value, Tensor) and value.numel() != 1 else None)
        for value in inputs[1:]
    ]
    tensors = [None if tensor is None else tensor.contiguous() for tensor, _ in given]
    return [inputs.input.contiguous(), *tensors], [number for _, number in given]


def _forward(inputs: _Inputs, options: _Options) -> tuple[Tensor, ...]:
    kind, log_output, _, validate = options
    (output,) = _forward_shapes(inputs, options)
    tensors, numbers = _prepared(inputs, kind)
    first = _kernels.calibration_map_forward_out(*tensors, output, *numbers, kind, log_output)
    requested = os.environ.get("FOCALKERN_VALIDATE", "").startswith("1")
    if not output.is_cpu and requested and values_may_be_read(output):
        invalid = (output if kind == _BINARY else output[..., 0]).isnan().reshape(-1).nonzero()
        first = int(invalid[0]) if len(invalid) else -1
    if first >= 0 and (validate or requested):
        raise_invalid_row(*inputs, kind, first)
    return (output,)


def _forward_shapes(inputs: _Inputs, options: _Options) -> tuple[Tensor, ...]:
    input = inputs.input
    return (input.new_empty(input.shape, dtype=compute_dtype(input.dtype) if options.wide else input.dtype),)


def _check_backward(
    grad: Tensor, inputs: _Inputs, saved: Sequence[Tensor], options: _Options, needed: Sequence[bool]
) -> None:
    op, shape = operator_name(options.kind), inputs.input.shape
    if grad.shape != shape or not grad.is_floating_point():
        raise ValueError(f"{op}: grad must have the shape of the output, {list(shape)}, got {list(grad.shape)}")
    check_same_device(op, "grad", grad, inputs.input)


def _backward(
    grad: Tensor, inputs: _Inputs, saved: Sequence[Tensor], options: _Options, needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    kind, log_output = options[:2]
    tensors, numbers = _prepared(inputs, kind)
    x, _, _ = tensors
    assert x is not None
    upstream = (grad if grad.dtype == x.dtype else grad.to(compute_dtype(x.dtype))).contiguous()
    of_input = torch.empty_like(x) if needed[0] else None
    rows = [x.new_empty(_rows(x, kind), dtype=torch.float64) if need else None for need in needed[1:]]
    _kernels.calibration_map_backward_out(upstream, *tensors, of_input, *rows, *numbers, kind, log_output)
    return of_input, _reduced(rows[0], inputs.gamma), _reduced(rows[1], inputs.temperature)


def _reduced(rows: Tensor | None, value: float | Tensor) -> Tensor | None:
    if rows is None or not isinstance(value, Tensor) or value.numel() != 1 or not rows.is_cpu:
        return reduced(rows, value)
    # One after the other: the order of torch's sum depends on the number of threads.
    total = rows.reshape(-1).cumsum(0)[-1:].sum()
    return total.to(value.dtype).expand(value.shape).clone()


def _backward_shapes(inputs: _Inputs, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    return [t.new_empty(t.shape) if need else None for t, need in zip(inputs, needed, strict=True)]  # type: ignore


def _differentiable(inputs: _Inputs, options: _Options) -> Sequence[bool]:
    return True, True, True


OPERATOR = Operator(
    "calibration_map",
    _Inputs,
    _Options,
    _Options._fields.index("wide"),
    _check,
    _forward,
    _forward_shapes,
    _check_backward,
    _backward,
    _backward_shapes,
    _differentiable,
    calibration_map_composite,
    n_saved=0,
    n_forward_only=1,
)
