"""The losses of independent logits on the kernels of the stable module."""

from typing import Any

import torch
from torch import Tensor

from focalkern._types import FLOATS, LABELS, compute_dtype
from focalkern.fallback._checks import autocasts, check_same_device, values_may_be_read
from focalkern.fallback.sigmoid_loss import NAMES, check_arguments, check_range
from focalkern.stable._autograd import (
    Operator,
    apply,
    backward_kernel,
    differentiable_gradients,
    is_dense,
    needs_composite,
    parameter,
)

__all__ = ["OPERATORS", "sigmoid_loss"]

_NONE, _MEAN, _SUM = 0, 1, 2
_FOCAL, _ASYMMETRIC = 0, 1
_ELEMENTS = (*FLOATS, *LABELS, torch.bool)  # targets of other dtypes are converted
_kernels = torch.ops.focalkern_stable


def sigmoid_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    second: float | Tensor | None,
    weight: Tensor | None,
    kind: int,
    margin: float,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """As the compiled module's sigmoid_loss. ``second`` is alpha, or gamma_positive."""
    if not isinstance(gamma, Tensor):
        gamma = torch.scalar_tensor(gamma, dtype=torch.float64)
    if second is not None and not isinstance(second, Tensor):
        second = torch.scalar_tensor(second, dtype=torch.float64)
    options = (kind, margin, reduction, ignore_index, autocasts(input))
    if needs_composite(input, target, gamma, second, weight):
        loss: Tensor = torch.ops.focalkern.sigmoid_loss_composite(input, target, gamma, second, weight, *options)
        return loss
    loss = apply("sigmoid_loss_forward", _FORWARD, _BACKWARD, input, target, gamma, second, weight, *options)[0]
    return loss


# -- the operators ----------------------------------------------------------------------------------------------------


def _check(
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    second: Tensor | None,
    weight: Tensor | None,
    kind: int,
    margin: float,
    reduction: int,
) -> str:
    """Checks all arguments, as the bindings of the compiled module do. Returns the name of the loss."""
    if not 0 <= kind < len(NAMES):
        raise ValueError(f"sigmoid_loss: kind must be 0, 1 or 2, got {kind}")
    check_arguments(input, target, gamma, second, weight, kind)
    op = NAMES[kind][0]
    if kind != _FOCAL and (second is not None) != (kind == _ASYMMETRIC):
        raise ValueError(f"{op}: asymmetric_loss alone needs a second gamma")
    if not 0 <= margin < 1:
        raise ValueError(f"{op}: margin must be in [0, 1), got {margin:g}")
    if not _NONE <= reduction <= _SUM:
        raise ValueError(f"{op}: reduction must be 0 (none), 1 (mean) or 2 (sum), got {reduction}")
    return op


def _label_dim(input: Tensor, target: Tensor) -> int:
    """The dimension of the classes where the target is labels, else -1."""
    integral = not target.is_floating_point() and target.dtype != torch.bool
    if target.dim() + 1 != input.dim() or not integral:
        return -1
    return 0 if input.dim() == 1 else 1


def _prepared(
    input: Tensor, target: Tensor, gamma: Tensor, second: Tensor | None, weight: Tensor | None, kind: int
) -> tuple[list[Tensor | None], list[float], list[Any]]:
    """Input, target and parameters in the shape of the input; the numbers; classes, class_dim, has_alpha, kind."""
    real, shape, class_dim = compute_dtype(input.dtype), input.shape, _label_dim(input, target)
    if target.dtype not in _ELEMENTS:
        target = target.to(torch.int64 if class_dim >= 0 else torch.float32)
    if class_dim >= 0:
        target = target.unsqueeze(class_dim)
    given = [parameter(value, absent, real, shape) for value, absent in ((gamma, 0.0), (second, 0.0), (weight, 1.0))]
    tensors = [input.detach(), target.detach().expand(shape), *(tensor for tensor, _ in given)]
    classes = shape[0 if input.dim() == 1 else 1] if input.dim() else 1
    return tensors, [number for _, number in given], [classes, class_dim, kind == _FOCAL and second is not None, kind]


def _forward(
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    second: Tensor | None,
    weight: Tensor | None,
    kind: int,
    margin: float,
    reduction: int,
    ignore_index: int,
    float32_loss: bool,
) -> tuple[Tensor, Tensor]:
    _check(input, target, gamma, second, weight, kind, margin, reduction)
    labels = _label_dim(input, target) >= 0
    if labels and not input.is_cpu and values_may_be_read(target):
        check_range(input, target, kind, ignore_index)
    real = compute_dtype(input.dtype)
    stored = real if float32_loss else input.dtype
    divisor = input.new_empty(1, dtype=real)
    if reduction == _NONE:
        loss = torch.empty_like(input, dtype=stored)
    else:
        loss = input.new_empty((), dtype=stored if input.is_cpu else real)
    like = input if is_dense(input) else loss if reduction == _NONE else torch.empty_like(input)
    tensors, numbers, facts = _prepared(input, target, gamma, second, weight, kind)
    options = (margin, ignore_index, reduction != _NONE, reduction == _MEAN)
    if not _kernels.sigmoid_loss_forward(like.detach(), *tensors, loss, divisor, *numbers, *facts, *options):
        check_range(input, target, kind, ignore_index)
    return loss.to(stored), divisor


def _forward_shapes(
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    second: Tensor | None,
    weight: Tensor | None,
    kind: int,
    margin: float,
    reduction: int,
    ignore_index: int,
    float32_loss: bool,
) -> tuple[Tensor, Tensor]:
    _check(input, target, gamma, second, weight, kind, margin, reduction)
    real = compute_dtype(input.dtype)
    stored = real if float32_loss else input.dtype
    loss = torch.empty_like(input, dtype=stored) if reduction == _NONE else input.new_empty((), dtype=stored)
    return loss, input.new_empty(1, dtype=real)


def _backward(
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    second: Tensor | None,
    weight: Tensor | None,
    divisor: Tensor,
    kind: int,
    margin: float,
    reduction: int,
    ignore_index: int,
    needed: list[bool],
) -> tuple[Tensor, ...]:
    op = _check(input, target, gamma, second, weight, kind, margin, reduction)
    real = compute_dtype(input.dtype)
    if grad.shape != (input.shape if reduction == _NONE else ()):
        raise ValueError(f"{op}: grad must have the shape of the loss, got {list(grad.shape)}")
    if divisor.numel() != 1 or divisor.dtype != real:
        raise ValueError(f"{op}: divisor must be what the forward pass returned for this input")
    check_same_device(op, "grad", grad, input)
    check_same_device(op, "divisor", divisor, input)
    dtypes = (input.dtype, real, real, real)
    found = [torch.empty_like(input, dtype=dtype) if need else None for dtype, need in zip(dtypes, needed, strict=True)]
    like = next((gradient for gradient in found if gradient is not None), None)
    if like is not None:
        tensors, numbers, facts = _prepared(input, target, gamma, second, weight, kind)
        one = grad.numel() == 1 and grad.is_cpu
        upstream = None if one else grad.to(real).expand(input.shape)
        mean = divisor if reduction == _MEAN else None
        _kernels.sigmoid_loss_backward(
            like, *tensors, upstream, mean, *found, *numbers, grad.item() if one else 0.0, *facts, margin, ignore_index
        )
    of_input, of_target, of_gamma, of_second = found
    return (
        input.new_empty(0) if of_input is None else of_input,
        input.new_empty(0, dtype=real) if of_target is None else of_target.to(target.dtype),
        _reduced(of_gamma, gamma, real),
        _reduced(of_second, second, real),
    )


def _reduced(gradient: Tensor | None, value: Tensor | None, real: torch.dtype) -> Tensor:
    """The gradient of a parameter, summed over the dimensions that were broadcast."""
    if gradient is None or value is None:
        device = None if value is None else value.device
        return torch.empty(0, dtype=real, device=device)
    return gradient.sum_to_size(value.shape).to(value)


def _backward_shapes(
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    second: Tensor | None,
    weight: Tensor | None,
    divisor: Tensor,
    kind: int,
    margin: float,
    reduction: int,
    ignore_index: int,
    needed: list[bool],
) -> tuple[Tensor, ...]:
    _check(input, target, gamma, second, weight, kind, margin, reduction)
    real = compute_dtype(input.dtype)

    def like(value: Tensor | None, need: bool) -> Tensor:
        if value is None or not need:
            return input.new_empty(0, dtype=real)
        return torch.empty_like(value, memory_format=torch.contiguous_format)

    return (
        torch.empty_like(input) if needed[0] else input.new_empty(0),
        torch.empty_like(input, dtype=target.dtype) if needed[1] else input.new_empty(0, dtype=real),
        like(gamma, needed[2]),
        like(second, needed[3]),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, target, gamma, second, weight, *options = inputs
    ctx.save_for_backward(input, target, gamma, second, weight, output[1])
    ctx.options = options
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, grad: Tensor | None, _of_divisor: Tensor | None) -> tuple[Tensor | None, ...]:
    rest = (None,) * 6
    if grad is None:
        return (None, None, None, None, *rest)
    input, target, gamma, second, weight, divisor = ctx.saved_tensors
    kind, margin, reduction, ignore_index, float32_loss = ctx.options
    needed = [
        ctx.needs_input_grad[0],
        ctx.needs_input_grad[1] and target.is_floating_point(),
        ctx.needs_input_grad[2],
        ctx.needs_input_grad[3] and kind == _ASYMMETRIC,
    ]
    options = (kind, margin, reduction, ignore_index)
    if torch.is_grad_enabled():

        def composite(*variables: Tensor | None) -> Tensor:
            loss: Tensor = torch.ops.focalkern.sigmoid_loss_composite(*variables, weight, *options, float32_loss)
            return loss

        return (*differentiable_gradients((input, target, gamma, second), needed, grad, composite), *rest)
    kernel = backward_kernel(ctx, "sigmoid_loss_backward", grad)
    found = kernel(grad, input, target, gamma, second, weight, divisor, *options, needed)
    return (*(gradient if need else None for gradient, need in zip(found, needed, strict=True)), *rest)


_FORWARD = Operator(_forward, _forward_shapes, _keep, _derivative)
_BACKWARD = Operator(_backward, _backward_shapes)
OPERATORS = {"sigmoid_loss_forward": _FORWARD, "sigmoid_loss_backward": _BACKWARD}
