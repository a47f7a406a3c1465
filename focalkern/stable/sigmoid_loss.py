"""The losses of independent logits on the kernels of the stable module."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focalkern._types import FLOATS, LABELS, compute_dtype
from focalkern.fallback._checks import autocasts, check_same_device, values_may_be_read
from focalkern.fallback.sigmoid_loss import NAMES, check_arguments, check_range, sigmoid_loss_composite
from focalkern.stable._autograd import Operator, apply, is_dense, parameter, reduced

__all__ = ["OPERATOR", "sigmoid_loss"]

_NONE, _MEAN = 0, 1
_ASYMMETRIC = 1
_ELEMENTS = (*FLOATS, *LABELS, torch.bool)  # targets of other dtypes are converted
_kernels = torch.ops.focalkern_stable


def sigmoid_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    second: float | Tensor | None,
    weight: Tensor | None,
    scores: Tensor | None,
    kind: int,
    constant: float,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """As the compiled module's sigmoid_loss. ``second`` is alpha, or gamma_positive."""
    options = _Options(kind, constant, reduction, ignore_index, autocasts(input))
    return apply(OPERATOR, _Inputs(input, target, gamma, second, weight, scores), options)


# -- the operators ----------------------------------------------------------------------------------------------------


class _Inputs(NamedTuple):
    input: Tensor
    target: Tensor
    gamma: float | Tensor
    second: float | Tensor | None
    weight: Tensor | None
    scores: Tensor | None


class _Options(NamedTuple):
    kind: int
    constant: float
    reduction: int
    ignore_index: int
    float32_loss: bool


def _check(inputs: _Inputs, options: _Options) -> None:
    check_arguments(*inputs, *options[:3])


def _label_dim(input: Tensor, target: Tensor) -> int:
    """The dimension of the classes where the target is labels, else -1."""
    integral = not target.is_floating_point() and target.dtype != torch.bool
    if target.dim() + 1 != input.dim() or not integral:
        return -1
    return 0 if input.dim() == 1 else 1


def _prepared(inputs: _Inputs, kind: int) -> tuple[list[Tensor | None], list[float], list[Any]]:
    """Input, target and parameters in the shape of the input; the numbers; classes, class_dim, has_alpha, kind."""
    input, target, gamma, second, weight, scores = inputs
    real, shape, class_dim = compute_dtype(input.dtype), input.shape, _label_dim(input, target)
    if target.dtype not in _ELEMENTS:
        target = target.to(torch.int64 if class_dim >= 0 else torch.float32)
    if class_dim >= 0:
        target = target.unsqueeze(class_dim)
    given = [parameter(value, absent, real, shape) for value, absent in ((gamma, 0.0), (second, 0.0), (weight, 1.0))]
    if scores is not None:
        scores = scores.unsqueeze(class_dim).expand(shape)
    tensors = [input, target.expand(shape), *(tensor for tensor, _ in given), scores]
    classes = shape[0 if input.dim() == 1 else 1] if input.dim() else 1
    return (
        tensors,
        [number for _, number in given],
        [classes, class_dim, kind != _ASYMMETRIC and second is not None, kind],
    )


def _forward(inputs: _Inputs, options: _Options) -> tuple[Tensor, ...]:
    input, target = inputs[:2]
    kind, constant, reduction, ignore_index, float32_loss = options
    if _label_dim(input, target) >= 0 and not input.is_cpu and values_may_be_read(target):
        check_range(input, target, kind, ignore_index)
    real = compute_dtype(input.dtype)
    stored = real if float32_loss else input.dtype
    divisor = input.new_empty(1, dtype=real)
    if reduction == _NONE:
        loss = torch.empty_like(input, dtype=stored)
    else:
        loss = input.new_empty((), dtype=stored if input.is_cpu else real)
    like = input if is_dense(input) else loss if reduction == _NONE else torch.empty_like(input)
    tensors, numbers, facts = _prepared(inputs, kind)
    settings = (constant, ignore_index, reduction != _NONE, reduction == _MEAN)
    if not _kernels.sigmoid_loss_forward_out(like, *tensors, loss, divisor, *numbers, *facts, *settings):
        check_range(input, target, kind, ignore_index)
    return loss.to(stored), divisor


def _forward_shapes(inputs: _Inputs, options: _Options) -> tuple[Tensor, ...]:
    input, real = inputs.input, compute_dtype(inputs.input.dtype)
    stored = real if options.float32_loss else input.dtype
    is_reduced = options.reduction != _NONE
    loss = input.new_empty((), dtype=stored) if is_reduced else torch.empty_like(input, dtype=stored)
    return loss, input.new_empty(1, dtype=real)


def _check_backward(
    grad: Tensor, inputs: _Inputs, saved: Sequence[Tensor], options: _Options, needed: Sequence[bool]
) -> None:
    op, input, divisor = NAMES[options.kind][0], inputs.input, saved[0]
    if grad.shape != (input.shape if options.reduction == _NONE else ()):
        raise ValueError(f"{op}: grad must have the shape of the loss, got {list(grad.shape)}")
    if divisor.numel() != 1 or divisor.dtype != compute_dtype(input.dtype):
        raise ValueError(f"{op}: divisor must be what the forward pass returned for this input")
    check_same_device(op, "grad", grad, input)
    check_same_device(op, "divisor", divisor, input)


def _backward(
    grad: Tensor, inputs: _Inputs, saved: Sequence[Tensor], options: _Options, needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    input, target, gamma, second = inputs[:4]
    kind, constant, reduction, ignore_index, _ = options
    real = compute_dtype(input.dtype)
    dtypes = (input.dtype, real, real, real)
    found = [torch.empty_like(input, dtype=dtype) if need else None for dtype, need in zip(dtypes, needed, strict=True)]
    like = next((gradient for gradient in found if gradient is not None), None)
    if like is None:
        return found
    tensors, numbers, facts = _prepared(inputs, kind)
    one = grad.numel() == 1 and grad.is_cpu
    upstream = None if one else grad.to(real).expand(input.shape)
    mean = saved[0] if reduction == _MEAN else None
    of_grad = grad.item() if one else 0.0
    settings = (constant, ignore_index)
    _kernels.sigmoid_loss_backward_out(like, *tensors, upstream, mean, *found, *numbers, of_grad, *facts, *settings)
    of_input, of_target, of_gamma, of_second = found
    of_target = None if of_target is None else of_target.to(target.dtype)
    return of_input, of_target, reduced(of_gamma, gamma), reduced(of_second, second)


def _backward_shapes(inputs: _Inputs, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    input, target, *parameters = inputs[:4]
    found = [torch.empty_like(input), torch.empty_like(input, dtype=target.dtype)]
    found += [p.new_empty(p.shape) if isinstance(p, Tensor) else input.new_empty(0) for p in parameters]
    return [gradient if need else None for gradient, need in zip(found, needed, strict=True)]


def _differentiable(inputs: _Inputs, options: _Options) -> Sequence[bool]:
    """Input, target, gamma, second."""
    return True, inputs.target.is_floating_point(), True, options.kind == _ASYMMETRIC


OPERATOR = Operator(
    "sigmoid_loss",
    _Inputs,
    _Options,
    _Options._fields.index("float32_loss"),
    _check,
    _forward,
    _forward_shapes,
    _check_backward,
    _backward,
    _backward_shapes,
    _differentiable,
    sigmoid_loss_composite,
)
