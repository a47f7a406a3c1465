"""The row losses other than the focal loss in plain torch: the definitions of :mod:`focalkern.reference` with the
arguments, checks and errors of the compiled module."""

import math

import torch
from torch import Tensor

from focalkern._types import compute_dtype
from focalkern.fallback._checks import check_reduction
from focalkern.fallback._compile import compilable
from focalkern.fallback.focal_loss import (
    check_arguments,
    check_range,
    focal_definition,
    gammas_of,
    host_numbers,
    promoted,
)
from focalkern.reference._log_space import exact_second_derivatives
from focalkern.reference._rows import weight_of_labels
from focalkern.reference._softmax_losses import RowLossSpec, row_loss_of

__all__ = ["check_operator", "focal_loss_composite", "row_loss"]

_NONE, _MEAN = 0, 1


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
    """The compiled module's row_loss in plain torch."""
    spec = row_loss_of(kind)
    ignore_index, label_smoothing = host_numbers(spec.name, weight, ignore_index, label_smoothing)
    check_operator(spec, input, target, gamma, edges, weight, reduction, ignore_index, label_smoothing)
    input, dtype = promoted(input, target)
    check_range(spec.name, target, input.shape[0 if input.dim() == 1 else 1], ignore_index)
    options = (reduction, ignore_index, label_smoothing, detach_modulation, epsilon)
    return _definition(spec, input, target, gamma, edges, weight, *options).to(dtype)


def focal_loss_composite(
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
) -> Tensor:
    """The operator ``focal_loss_composite``. ``float32_loss``: whether autocast makes the loss float32."""
    spec = row_loss_of(kind)
    check_operator(spec, input, target, gamma, edges, weight, reduction, ignore_index, label_smoothing)
    check_range(spec.name, target, input.shape[0 if input.dim() == 1 else 1], ignore_index)
    options = (reduction, ignore_index, label_smoothing, detach_modulation, epsilon)
    with exact_second_derivatives():
        loss = _definition(spec, input, target, gamma, edges, weight, *options)
    return loss if float32_loss else loss.to(input.dtype)


def check_operator(
    spec: RowLossSpec,
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """Checks all arguments except the range of the labels."""
    check_arguments(spec.name, input, target, gamma, edges, weight, ignore_index, label_smoothing)
    if target.is_floating_point() and not spec.soft_target:
        raise TypeError(f"{spec.name}: target must be labels, int64, int32 or uint8, got {target.dtype}")
    check_reduction(spec.name, reduction)


@compilable("gamma", "epsilon")
def _definition(
    spec: RowLossSpec,
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    epsilon: float,
) -> Tensor:
    """The loss of checked arguments in the dtype of the computation. It does not synchronise."""
    if "gamma" not in spec.parameters:
        gamma, edges = 0.0, None
    if spec.factor is not None:
        options = (reduction, ignore_index, label_smoothing, detach_modulation)
        return focal_definition(input, target, gamma, edges, weight, *options, spec)
    class_dim = 0 if input.dim() == 1 else 1
    z = input.to(compute_dtype(input.dtype))
    divisor: float | Tensor = math.prod(z.shape) / z.shape[class_dim]
    valid = in_range = None
    if not target.is_floating_point():
        labels = target.long()
        valid = labels != ignore_index
        in_range = (labels >= 0) & (labels < z.shape[class_dim])
        target = torch.where(in_range, labels, 0)
        row_weight = torch.ones(target.shape, dtype=z.dtype, device=z.device)
        if weight is not None:
            row_weight = weight_of_labels(weight.to(z.dtype), target)
        divisor = torch.where(valid, row_weight, 0.0).sum()
        # Ignored rows become 0 first, so that a NaN in them does not reach loss or gradient.
        z = torch.where(valid.unsqueeze(class_dim), z, 0.0)
    loss = spec.loss(
        z,
        target,
        gammas_of(gamma, edges, z),
        epsilon,
        detach_modulation,
        weight=weight,
        ignore_index=-1,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    if valid is not None and in_range is not None:
        loss = torch.where(valid, torch.where(in_range, loss, math.nan), 0.0)
    if reduction != _NONE:
        loss = loss.sum()
    return loss / divisor if reduction == _MEAN else loss
