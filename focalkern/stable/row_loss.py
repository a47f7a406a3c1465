"""The losses of rows on the kernels of the stable module."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focalkern._types import compute_dtype
from focalkern.fallback._checks import autocasts, check_same_device, values_may_be_read
from focalkern.fallback.focal_loss import check_range, host_numbers, promoted
from focalkern.fallback.row_loss import check_operator, focal_loss_composite
from focalkern.fallback.row_loss import row_loss as plain_row_loss
from focalkern.reference._softmax_losses import number_of, row_loss_of
from focalkern.stable._autograd import Operator, apply, needs_composite, needs_dispatcher, parameter, reduced

__all__ = [
    "OPERATOR",
    "SAVED_NUMBERS",
    "empty_statistics",
    "focal_loss",
    "of_labels",
    "row_loss",
    "row_loss_with_statistics",
]

_NONE, _MEAN = 0, 1
SAVED_NUMBERS: dict[str, int] = {}  # per row, by the name of the loss; the stable module says them
_kernels = torch.ops.focalkern_stable


def focal_loss(*arguments: Any) -> Tensor:
    """As the compiled module's focal_loss."""
    kind_and_epsilon: Any = (number_of("focal_loss"), 0.0)
    return row_loss(*arguments, *kind_and_epsilon)


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
    options = (reduction, ignore_index, label_smoothing, detach_modulation)
    if not spec.has_kernel(label_smoothing, input.device.type):
        return plain_row_loss(input, target, gamma, edges, weight, *options, kind, epsilon)
    input, dtype = promoted(input, target)
    inputs = _Inputs(input, target, gamma, edges, weight)
    return apply(OPERATOR, inputs, _Options(*options, dtype == torch.float32 != input.dtype, kind, epsilon))


def row_loss_with_statistics(
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
    float32_loss: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]] | None:
    """As the compiled module's row_loss_with_statistics."""
    ignore_index, label_smoothing = host_numbers(row_loss_of(kind).name, weight, ignore_index, label_smoothing)
    inputs = _Inputs(input, target, gamma, edges, weight)
    if target.is_floating_point() or needs_composite(inputs) or needs_dispatcher(input):
        return None
    is_wide = float32_loss or autocasts(input)
    options = _Options(reduction, ignore_index, label_smoothing, detach_modulation, is_wide, kind)
    loss, saved, *of_rows = apply(_WITH_STATISTICS, inputs, options)
    return loss, saved, tuple(of_rows)


# -- the operators ----------------------------------------------------------------------------------------------------


class _Inputs(NamedTuple):
    input: Tensor
    target: Tensor
    gamma: float | Tensor
    edges: Tensor | None
    weight: Tensor | None


class _Options(NamedTuple):
    reduction: int
    ignore_index: int
    label_smoothing: float
    detach_modulation: bool
    float32_loss: bool
    kind: int = 0
    epsilon: float = 0.0


def of_labels(
    name: str, input: Tensor, target: Tensor, gamma: float | Tensor, reduction: int, ignore_index: int
) -> tuple[_Inputs, _Options]:
    """Arguments of the operator for labels without weights, whose loss is in the dtype of the computation."""
    options = _Options(reduction, ignore_index, 0.0, False, float32_loss=True, kind=number_of(name))
    return _Inputs(input, target, gamma, None, None), options


def _class_dim(input: Tensor) -> int:
    return 0 if input.dim() == 1 else 1


def _loss_shape(input: Tensor, reduction: int = _NONE) -> tuple[int, ...]:
    if reduction != _NONE:
        return ()
    d = _class_dim(input)
    return (*input.shape[:d], *input.shape[d + 1 :])


def _check(inputs: _Inputs, options: _Options) -> None:
    check_operator(row_loss_of(options.kind), *inputs, *options[:3])


def _prepared(inputs: _Inputs) -> tuple[list[Tensor | None], float]:
    """Input, target, gamma, edges and weight as the kernels take them, and the number gamma."""
    input, target, gamma, edges, weight = inputs
    real = compute_dtype(input.dtype)
    if not target.is_floating_point():
        target = target.contiguous()
    elif target.dtype != input.dtype:
        target = target.to(real)
    if edges is not None:
        assert isinstance(gamma, Tensor)
        values, number = gamma.to(real), 0.0
    else:
        is_one = not isinstance(gamma, Tensor) or gamma.numel() == 1
        values, number = parameter(gamma, 0.0, real, None if is_one else _loss_shape(input))  # type: ignore[assignment]
    given = [None if t is None else t.to(real).contiguous() for t in (values, edges, weight)]
    return [input, target, *given], number


def _results(inputs: _Inputs, options: _Options, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Uninitialised tensors for the loss in this dtype and for the saved numbers."""
    input, device = inputs.input, inputs.input.device
    rows = input.numel() // input.shape[_class_dim(input)]
    n_saved = rows * SAVED_NUMBERS[row_loss_of(options.kind).name] + 1
    loss = torch.empty(_loss_shape(input, options.reduction), dtype=dtype, device=device)
    return loss, torch.empty(n_saved, dtype=compute_dtype(input.dtype), device=device)


def empty_statistics(input: Tensor, rows: int) -> tuple[Tensor, ...]:
    """Uninitialised results of row_statistics."""
    real = compute_dtype(input.dtype)
    dtypes = (real, real, real, torch.int64, torch.bool, torch.bool)
    return tuple(input.new_empty(rows, dtype=dtype) for dtype in dtypes)


def _forward(inputs: _Inputs, options: _Options, with_statistics: bool = False) -> tuple[Tensor, ...]:
    input, target = inputs.input, inputs.target
    reduction, ignore_index, label_smoothing, detach_modulation, float32_loss, kind, epsilon = options
    if not input.is_cpu and values_may_be_read(target):
        check_range(row_loss_of(kind).name, target, input.shape[_class_dim(input)], ignore_index)
    real = compute_dtype(input.dtype)
    loss, saved = _results(inputs, options, real)
    tensors, number = _prepared(inputs)
    settings = (ignore_index, label_smoothing, detach_modulation, kind, epsilon)
    reduce = (reduction != _NONE, reduction == _MEAN)
    statistics = empty_statistics(input, target.numel()) if with_statistics else ()
    run = _kernels.row_loss_with_statistics_out if with_statistics else _kernels.row_loss_forward_out
    if run(*tensors, saved, loss, number, *settings, *reduce, *statistics) >= 0:
        check_range(row_loss_of(kind).name, target, input.shape[_class_dim(input)], ignore_index)
    return loss if float32_loss or real == input.dtype else loss.to(input.dtype), saved, *statistics


def _forward_shapes(inputs: _Inputs, options: _Options) -> tuple[Tensor, ...]:
    dtype = inputs.input.dtype
    return _results(inputs, options, compute_dtype(dtype) if options.float32_loss else dtype)


def _check_backward(
    grad: Tensor, inputs: _Inputs, saved: Sequence[Tensor], options: _Options, needed: Sequence[bool]
) -> None:
    op, shape = row_loss_of(options.kind).name, list(_loss_shape(inputs.input, options.reduction))
    if list(grad.shape) != shape:
        raise ValueError(f"{op}: grad must have the shape of the loss, {shape}, got {list(grad.shape)}")
    like = _results(inputs, options, grad.dtype)[1]
    # On CUDA a number per row may precede the divisor: RowLossBackward in csrc/kernels/row_loss.h.
    more = math.prod(_loss_shape(inputs.input)) if inputs.input.is_cuda else 0
    if (
        saved[0].shape not in (like.shape, (like.numel() + more,))
        or saved[0].dtype != like.dtype
        or not saved[0].is_contiguous()
    ):
        raise ValueError(f"{op}: saved must be what the forward pass returned for this input")
    if inputs.edges is not None and needed[2]:
        raise ValueError(f"{op}: the gammas of a table have no gradient, and needed[2] asks for it")
    check_same_device(op, "grad", grad, inputs.input)
    check_same_device(op, "saved", saved[0], inputs.input)


def _backward(
    grad: Tensor, inputs: _Inputs, saved: Sequence[Tensor], options: _Options, needed: Sequence[bool]
) -> Sequence[Tensor | None]:
    reduction, ignore_index, label_smoothing, detach_modulation, _, kind, epsilon = options
    tensors, number = _prepared(inputs)
    input, labels = tensors[:2]
    assert input is not None and labels is not None
    real = compute_dtype(input.dtype)
    grad_input = torch.empty_like(input) if needed[0] else None
    grad_target = grad_gamma = None
    if needed[1]:
        # The kernel supports one layout of the target and its gradient: contiguous classes or contiguous rows.
        if not labels.movedim(_class_dim(labels), -1).is_contiguous():
            tensors[1] = labels = labels.contiguous()
        grad_target = torch.empty_like(labels, dtype=real)
    if needed[2]:
        grad_gamma = input.new_empty(_loss_shape(input), dtype=real)
    settings = (ignore_index, label_smoothing, detach_modulation, kind, epsilon, reduction == _MEAN)
    upstream = grad.to(real).contiguous()
    _kernels.row_loss_backward_out(upstream, *tensors, *saved, grad_input, grad_target, grad_gamma, number, *settings)
    if grad_target is not None:
        grad_target = torch.empty_like(inputs.target).copy_(grad_target)
    return grad_input, grad_target, reduced(grad_gamma, inputs.gamma)


def _backward_shapes(inputs: _Inputs, needed: Sequence[bool]) -> Sequence[Tensor | None]:
    input, target, gamma = inputs[:3]
    assert isinstance(gamma, Tensor)
    found = (torch.empty_like(input), torch.empty_like(target), gamma.new_empty(gamma.shape))
    return [gradient if need else None for gradient, need in zip(found, needed, strict=True)]


def _differentiable(inputs: _Inputs, options: _Options) -> Sequence[bool]:
    """Input, target, gamma. A tabulated gamma and a detached factor are constants."""
    return True, inputs.target.is_floating_point(), inputs.edges is None and not options.detach_modulation


OPERATOR = Operator(
    "focal_loss",
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
    focal_loss_composite,
)
_WITH_STATISTICS = OPERATOR._replace(forward=functools.partial(_forward, with_statistics=True), returns_all=True)
