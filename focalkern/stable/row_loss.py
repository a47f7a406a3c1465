"""The losses of rows on the kernels of the stable module."""

from typing import Any

import torch
from torch import Tensor

from focalkern._types import compute_dtype
from focalkern.fallback._checks import check_same_device, scalar_name, values_may_be_read
from focalkern.fallback.focal_loss import check_arguments, check_range, host_numbers, promoted
from focalkern.reference._softmax_losses import number_of, row_loss_of
from focalkern.stable._autograd import (
    Operator,
    apply,
    backward_kernel,
    differentiable_gradients,
    needs_composite,
    parameter,
)

__all__ = ["OPERATORS", "SAVED_NUMBERS", "focal_loss", "mmce_loss", "row_loss"]

_NONE, _MEAN, _SUM = 0, 1, 2
SAVED_NUMBERS: dict[str, int] = {}  # per row, by the name of the loss; the stable module says them
_kernels = torch.ops.focalkern_stable


def focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
) -> Tensor:
    """As the compiled module's focal_loss."""
    options = (reduction, ignore_index, label_smoothing, detach_modulation)
    return row_loss(input, target, gamma, edges, weight, *options, number_of("focal_loss"), 0.0)


def row_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    kind: int,
    epsilon: float,
) -> Tensor:
    """As the compiled module's row_loss."""
    spec = row_loss_of(kind)
    ignore_index, label_smoothing = host_numbers(spec.name, weight, ignore_index, label_smoothing)
    if not isinstance(gamma, Tensor):
        gamma = torch.scalar_tensor(gamma, dtype=torch.float64)
    transformed = needs_composite(input, target, gamma)
    no_kernel = label_smoothing != 0 and not spec.soft_target
    if transformed or no_kernel:
        check_arguments(spec.name, input, target, gamma, edges, weight, ignore_index, label_smoothing)
        if not transformed:
            check_range(spec.name, target, input.shape[_class_dim(input)], ignore_index)
    input, dtype = promoted(input, target)
    float32_loss = dtype == torch.float32 != input.dtype
    options = (reduction, ignore_index, label_smoothing, detach_modulation, float32_loss, kind, epsilon)
    if transformed or no_kernel:
        return torch.ops.focalkern.focal_loss_composite(input, target, gamma, edges, weight, *options)
    loss: Tensor = apply("focal_loss_forward", _FORWARD, _BACKWARD, input, target, gamma, edges, weight, *options)[0]
    return loss


def mmce_loss(*arguments: Any) -> None:
    """No kernel: the loss is put together from torch's operations."""


# -- the operators ----------------------------------------------------------------------------------------------------


def _class_dim(input: Tensor) -> int:
    return 0 if input.dim() == 1 else 1


def _loss_shape(input: Tensor, reduction: int = _NONE) -> list[int]:
    if reduction != _NONE:
        return []
    d = _class_dim(input)
    return [*input.shape[:d], *input.shape[d + 1 :]]


def _check(
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    kind: int,
) -> str:
    """Checks all arguments, as the bindings of the compiled module do. Returns the name of the loss."""
    if not 0 <= kind < len(SAVED_NUMBERS):
        raise ValueError(f"focal_loss: kind must be in [0, {len(SAVED_NUMBERS)}), got {kind}")
    op = row_loss_of(kind).name
    check_arguments(op, input, target, gamma, edges, weight, ignore_index, label_smoothing)
    if edges is not None:
        if not edges.is_floating_point():
            raise TypeError(f"{op}: gamma.edges must be floating point, got {scalar_name(edges.dtype)}")
        if gamma.dim() != 1 or edges.dim() != 1 or len(gamma) < 1 or len(edges) != len(gamma) + 1:
            raise ValueError(
                f"{op}: gamma.edges must be [n_bins + 1] for gamma.gammas [n_bins], got {list(edges.shape)} and "
                f"{list(gamma.shape)}"
            )
    if not _NONE <= reduction <= _SUM:
        raise ValueError(f"{op}: reduction must be 0 (none), 1 (mean) or 2 (sum), got {reduction}")
    if target.is_floating_point() and not row_loss_of(kind).soft_target:
        raise TypeError(f"{op}: target must be labels, int64, int32 or uint8, got {scalar_name(target.dtype)}")
    return op


def _prepared(
    input: Tensor, target: Tensor, gamma: Tensor, edges: Tensor | None, weight: Tensor | None
) -> tuple[list[Tensor | None], float]:
    """Target, gamma, edges and weight as the kernels take them, and the number gamma."""
    real = compute_dtype(input.dtype)
    target = target.to(real) if target.is_floating_point() else target.contiguous()
    if edges is not None:
        table, number = gamma.to(real).contiguous(), 0.0
        return [target, table, edges.to(real).contiguous(), _as(weight, real)], number
    shape = None if gamma.numel() == 1 else _loss_shape(input)
    values, number = parameter(gamma, 0.0, real, shape)
    return [target, None if values is None else values.contiguous(), None, _as(weight, real)], number


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()


def _saved_size(input: Tensor, op: str) -> int:
    rows = input.numel() // input.shape[_class_dim(input)]
    return rows * SAVED_NUMBERS[op] + 1


def _forward(
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    float32_loss: bool,
    kind: int = 0,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    op = _check(input, target, gamma, edges, weight, reduction, ignore_index, label_smoothing, kind)
    classes = input.shape[_class_dim(input)]
    if not input.is_cpu and values_may_be_read(target):
        check_range(op, target, classes, ignore_index)
    real = compute_dtype(input.dtype)
    saved = input.new_empty(_saved_size(input, op), dtype=real)
    loss = input.new_empty(_loss_shape(input, reduction), dtype=real)
    (labels, gammas, table, weights), number = _prepared(input, target, gamma, edges, weight)
    invalid = _kernels.row_loss_forward(
        input.detach(),
        labels,
        gammas,
        table,
        weights,
        saved,
        loss,
        number,
        ignore_index,
        label_smoothing,
        detach_modulation,
        kind,
        epsilon,
        reduction != _NONE,
        reduction == _MEAN,
    )
    if invalid >= 0:
        check_range(op, target, classes, ignore_index)
    return loss.to(real if float32_loss else input.dtype), saved


def _forward_shapes(
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    float32_loss: bool,
    kind: int = 0,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    op = _check(input, target, gamma, edges, weight, reduction, ignore_index, label_smoothing, kind)
    real = compute_dtype(input.dtype)
    loss = input.new_empty(_loss_shape(input, reduction), dtype=real if float32_loss else input.dtype)
    return loss, input.new_empty(_saved_size(input, op), dtype=real)


def _backward(
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    saved: Tensor,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    needed: list[bool],
    kind: int = 0,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    op = _check(input, target, gamma, edges, weight, reduction, ignore_index, label_smoothing, kind)
    real, shape = compute_dtype(input.dtype), _loss_shape(input, reduction)
    if list(grad.shape) != shape:
        raise ValueError(f"{op}: grad must have the shape of the loss, {shape}, got {list(grad.shape)}")
    if saved.shape != (_saved_size(input, op),) or saved.dtype != real or not saved.is_contiguous():
        raise ValueError(f"{op}: saved must be what the forward pass returned for this input")
    if edges is not None and needed[2]:
        raise ValueError(f"{op}: the gammas of a table have no gradient, and needed[2] asks for it")
    check_same_device(op, "grad", grad, input)
    check_same_device(op, "saved", saved, input)
    (labels, gammas, table, weights), number = _prepared(input, target, gamma, edges, weight)
    assert labels is not None
    grad_input = torch.empty_like(input) if needed[0] else None
    grad_target = grad_gamma = None
    if needed[1]:
        # The kernel knows one layout for the target and its gradient, with classes or rows adjacent.
        if not labels.movedim(_class_dim(labels), -1).is_contiguous():
            labels = labels.contiguous()
        grad_target = torch.empty_like(labels)
    if needed[2]:
        grad_gamma = input.new_empty(_loss_shape(input), dtype=real)
    if input.numel() > 0:
        _kernels.row_loss_backward(
            grad.to(real).contiguous(),
            input.detach(),
            labels,
            gammas,
            table,
            weights,
            saved,
            grad_input,
            grad_target,
            grad_gamma,
            number,
            ignore_index,
            label_smoothing,
            detach_modulation,
            kind,
            epsilon,
            reduction == _MEAN,
        )
    if grad_target is not None:
        grad_target = torch.empty_like(target).copy_(grad_target)
    if grad_gamma is not None:
        grad_gamma = grad_gamma.sum_to_size(gamma.shape).to(gamma)
    none = input.new_empty(0, dtype=real)
    return (
        input.new_empty(0) if grad_input is None else grad_input,
        none if grad_target is None else grad_target,
        none.clone() if grad_gamma is None else grad_gamma,
    )


def _backward_shapes(
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    saved: Tensor,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    needed: list[bool],
    kind: int = 0,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    real = compute_dtype(input.dtype)
    return (
        torch.empty_like(input) if needed[0] else input.new_empty(0),
        torch.empty_like(target) if needed[1] else input.new_empty(0, dtype=real),
        torch.empty_like(gamma, memory_format=torch.contiguous_format) if needed[2] else input.new_empty(0, dtype=real),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, target, gamma, edges, weight, *options = inputs
    ctx.save_for_backward(input, target, gamma, edges, weight, output[1])
    ctx.options = options
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # or a zero gradient of `saved` would be filled in for every backward pass


def _derivative(ctx: Any, grad: Tensor | None, _of_saved: Tensor | None) -> tuple[Tensor | None, ...]:
    rest = (None,) * 9
    if grad is None:
        return (None, None, None, *rest)
    input, target, gamma, edges, weight, saved = ctx.saved_tensors
    reduction, ignore_index, label_smoothing, detach_modulation, float32_loss, kind, epsilon = ctx.options
    # A tabulated gamma and a detached factor are constants.
    needed = [
        ctx.needs_input_grad[0],
        ctx.needs_input_grad[1] and target.is_floating_point(),
        ctx.needs_input_grad[2] and edges is None and not detach_modulation,
    ]
    options = (reduction, ignore_index, label_smoothing, detach_modulation)
    if torch.is_grad_enabled():

        def composite(*variables: Tensor) -> Tensor:
            every = (*options, float32_loss, kind, epsilon)
            loss: Tensor = torch.ops.focalkern.focal_loss_composite(*variables, edges, weight, *every)
            return loss

        return (*differentiable_gradients((input, target, gamma), needed, grad, composite), *rest)
    kernel = backward_kernel(ctx, "focal_loss_backward", grad)
    found = kernel(grad, input, target, gamma, edges, weight, saved, *options, needed, kind, epsilon)
    return (*(gradient if need else None for gradient, need in zip(found, needed, strict=True)), *rest)


_FORWARD = Operator(_forward, _forward_shapes, _keep, _derivative)
_BACKWARD = Operator(_backward, _backward_shapes)
OPERATORS = {"focal_loss_forward": _FORWARD, "focal_loss_backward": _BACKWARD}
