"""The map of spline scaling on the kernels of the stable module."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from focalkern._types import compute_dtype
from focalkern.fallback._checks import autocasts, values_may_be_read
from focalkern.fallback._spline_arguments import check_gradient, check_map
from focalkern.fallback.spline_map import all_in_order, raise_invalid_row, spline_map_composite
from focalkern.stable._autograd import Operator, apply

__all__ = ["OPERATOR", "spline_map"]

_kernels = torch.ops.focalkern_stable


def spline_map(
    input: Tensor,
    parameters: Tensor,
    knots: Tensor,
    coefficients: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
    keep_order: bool,
    log: bool,
) -> Tensor:
    """As the compiled module's spline_map."""
    inputs = _Inputs(input, parameters, knots, coefficients, weight, bias)
    return apply(OPERATOR, inputs, _Options(is_probs, keep_zeros, log, autocasts(input), keep_order, True))


# -- the operators ----------------------------------------------------------------------------------------------------


class _Inputs(NamedTuple):
    input: Tensor
    parameters: Tensor
    knots: Tensor
    coefficients: Tensor
    weight: Tensor | None
    bias: Tensor | None


class _Options(NamedTuple):
    is_probs: bool
    keep_zeros: bool
    log_output: bool
    wide: bool
    keep_order: bool = False
    validate: bool = True


def _check(inputs: _Inputs, options: _Options) -> None:
    check_map(*inputs)


def _prepared(inputs: _Inputs) -> list[Tensor | None]:
    input, parameters, *others = inputs
    of_rows = [None if one is None else one.detach().to(input.device).contiguous() for one in others]
    return [input.contiguous(), parameters.contiguous(), *of_rows]


def _forward(inputs: _Inputs, options: _Options) -> tuple[Tensor, ...]:
    is_probs, keep_zeros, log_output, _, keep_order, validate = options
    (output,) = _forward_shapes(inputs, options)
    first = _kernels.spline_map_forward_out(*_prepared(inputs), output, is_probs, keep_zeros, keep_order, log_output)
    requested = os.environ.get("FOCALKERN_VALIDATE", "").startswith("1")
    if not output.is_cpu and requested and values_may_be_read(output):
        invalid = output[..., 0].isnan().reshape(-1).nonzero()
        first = int(invalid[0]) if len(invalid) else -1
    if first >= 0 and (validate or requested):
        raise_invalid_row(inputs.input, is_probs, first)
    # The CUDA kernel keeps the order in steps, for which float64 is too fine.
    if keep_order and output.is_cuda and inputs.input.dtype == torch.float64:
        output = all_in_order(inputs.input, output)
    return (output,)


def _forward_shapes(inputs: _Inputs, options: _Options) -> tuple[Tensor, ...]:
    input = inputs.input
    return (input.new_empty(input.shape, dtype=compute_dtype(input.dtype) if options.wide else input.dtype),)


def _check_backward(
    grad: Tensor, inputs: _Inputs, saved: Sequence[Tensor], options: _Options, needed: Sequence[bool]
) -> None:
    check_gradient(grad, inputs.input)


def _backward(
    grad: Tensor, inputs: _Inputs, saved: Sequence[Tensor], options: _Options, needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    input = inputs.input
    of_input = input.new_empty(input.shape) if needed[0] else None
    settings = (options.is_probs, options.keep_zeros, options.log_output)
    found = _kernels.spline_map_backward_out(grad.contiguous(), *_prepared(inputs), of_input, *settings)
    return [of_input, *[one if need else None for one, need in zip(found, needed[1:], strict=True)]]


def _backward_shapes(inputs: _Inputs, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    like = [inputs.parameters[:0] if one is None else one for one in inputs]
    return [one.new_empty(one.shape) if need else None for one, need in zip(like, needed, strict=True)]


def _differentiable(inputs: _Inputs, options: _Options) -> Sequence[bool]:
    return [one is not None for one in inputs]


OPERATOR = Operator(
    "spline_map",
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
    spline_map_composite,
    n_saved=0,
    n_forward_only=2,
)
