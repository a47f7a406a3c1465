"""The calibration maps on the kernels of the stable module."""

import os
from typing import Any

import torch
from torch import Tensor

from focalkern._types import compute_dtype
from focalkern.fallback._checks import autocasts, check_same_device, values_may_be_read
from focalkern.fallback.calibration_map import check_arguments, raise_invalid_row
from focalkern.stable._autograd import (
    Operator,
    apply,
    backward_kernel,
    differentiable_gradients,
    needs_composite,
    parameter,
)

__all__ = ["OPERATORS", "calibration_map", "calibration_map_scalar"]

_LOGITS, _PROBS, _BINARY = 0, 1, 2
_kernels = torch.ops.focalkern_stable


def calibration_map_scalar(input: Tensor, gamma: float, temperature: float, kind: int, log: bool) -> Tensor:
    """The map with one gamma and one temperature, numbers of the host."""
    wide = torch.float64
    numbers = torch.scalar_tensor(gamma, dtype=wide), torch.scalar_tensor(temperature, dtype=wide)
    return calibration_map(input, *numbers, kind, log)


def calibration_map(input: Tensor, gamma: Tensor, temperature: Tensor, kind: int, log: bool) -> Tensor:
    """As the compiled module's calibration_map."""
    wide = autocasts(input)
    if needs_composite(input, gamma, temperature):
        output: Tensor = torch.ops.focalkern.calibration_map_composite(input, gamma, temperature, kind, log, wide)
        return output
    output = apply("calibration_map_forward", _FORWARD, _BACKWARD, input, gamma, temperature, kind, log, wide, True)
    return output


# -- the operators ----------------------------------------------------------------------------------------------------


def _check(input: Tensor, gamma: Tensor, temperature: Tensor, kind: int) -> None:
    if not _LOGITS <= kind <= _BINARY:
        raise ValueError(f"focal_calibration_map: kind must be 0, 1 or 2, got {kind}")
    check_arguments(input, gamma, temperature, kind)


def _prepared(
    input: Tensor, gamma: Tensor, temperature: Tensor, kind: int
) -> tuple[list[Tensor | None], tuple[float, float]]:
    """gamma and temperature in double, one per row, and the numbers of those that are numbers."""
    shape = _rows(input, kind)
    given = [
        parameter(value, 0.0, torch.float64, None if value.numel() == 1 else shape) for value in (gamma, temperature)
    ]
    tensors = [None if tensor is None else tensor.contiguous() for tensor, _ in given]
    return tensors, (given[0][1], given[1][1])


def _rows(input: Tensor, kind: int) -> torch.Size:
    return input.shape if kind == _BINARY else input.shape[:-1]


def _forward(
    input: Tensor, gamma: Tensor, temperature: Tensor, kind: int, log_output: bool, wide: bool, validate: bool
) -> Tensor:
    _check(input, gamma, temperature, kind)
    x = input.detach().contiguous()
    output = torch.empty_like(x, dtype=compute_dtype(x.dtype) if wide else x.dtype)
    tensors, numbers = _prepared(x, gamma, temperature, kind)
    first = _kernels.calibration_map_forward(x, *tensors, output, *numbers, kind, log_output)
    requested = os.environ.get("FOCALKERN_VALIDATE", "").startswith("1")
    if not x.is_cpu and requested and values_may_be_read(x):
        invalid = (output if kind == _BINARY else output[..., 0]).isnan().reshape(-1).nonzero()
        first = int(invalid[0]) if len(invalid) else -1
    if first >= 0 and (validate or requested):
        raise_invalid_row(x, gamma, temperature, kind, first)
    return output


def _forward_shapes(
    input: Tensor, gamma: Tensor, temperature: Tensor, kind: int, log_output: bool, wide: bool, validate: bool
) -> Tensor:
    _check(input, gamma, temperature, kind)
    return input.new_empty(input.shape, dtype=compute_dtype(input.dtype) if wide else input.dtype)


def _backward(
    grad: Tensor,
    input: Tensor,
    gamma: Tensor,
    temperature: Tensor,
    kind: int,
    log_output: bool,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    _check(input, gamma, temperature, kind)
    op = "binary_focal_calibration_map" if kind == _BINARY else "focal_calibration_map"
    if grad.shape != input.shape or not grad.is_floating_point():
        raise ValueError(f"{op}: grad must have the shape of the output, {list(input.shape)}, got {list(grad.shape)}")
    check_same_device(op, "grad", grad, input)
    x = input.detach().contiguous()
    tensors, numbers = _prepared(x, gamma, temperature, kind)
    upstream = (grad if grad.dtype == x.dtype else grad.to(compute_dtype(x.dtype))).contiguous()
    of_input = torch.empty_like(x) if needed[0] else None
    rows = [x.new_empty(_rows(x, kind), dtype=torch.float64) if need else None for need in needed[1:]]
    _kernels.calibration_map_backward(upstream, x, *tensors, of_input, *rows, *numbers, kind, log_output)
    return (
        x.new_empty(0) if of_input is None else of_input,
        _reduced(rows[0], gamma),
        _reduced(rows[1], temperature),
    )


def _reduced(rows: Tensor | None, value: Tensor) -> Tensor:
    """The gradient of a parameter, summed over the dimensions that were broadcast."""
    if rows is None:
        return value.new_empty(0)
    if value.numel() == 1 and rows.is_cpu:
        # One after the other: the order of torch's sum depends on the number of threads.
        total = rows.reshape(-1).cumsum(0)[-1:].sum()
        return total.to(value.dtype).expand(value.shape).clone()
    return rows.sum_to_size(value.shape).to(value)


def _backward_shapes(
    grad: Tensor,
    input: Tensor,
    gamma: Tensor,
    temperature: Tensor,
    kind: int,
    log_output: bool,
    needed: list[bool],
) -> tuple[Tensor, ...]:
    of = (input, gamma, temperature)
    return tuple(t.new_empty(t.shape if need else (0,)) for t, need in zip(of, needed, strict=True))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, gamma, temperature, *options = inputs
    ctx.save_for_backward(input, gamma, temperature)
    ctx.options = options[:3]
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    rest = (None,) * 4
    if grad is None:
        return (None, None, None, *rest)
    variables = ctx.saved_tensors
    kind, log_output, wide = ctx.options
    needed = list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled():

        def composite(*variables: Tensor) -> Tensor:
            output: Tensor = torch.ops.focalkern.calibration_map_composite(*variables, kind, log_output, wide)
            return output

        return (*differentiable_gradients(variables, needed, grad, composite), *rest)
    kernel = backward_kernel(ctx, "calibration_map_backward", grad)
    found = kernel(grad, *variables, kind, log_output, needed)
    return (*(gradient if need else None for gradient, need in zip(found, needed, strict=True)), *rest)


_FORWARD = Operator(_forward, _forward_shapes, _keep, _derivative)
_BACKWARD = Operator(_backward, _backward_shapes)
OPERATORS = {"calibration_map_forward": _FORWARD, "calibration_map_backward": _BACKWARD}
