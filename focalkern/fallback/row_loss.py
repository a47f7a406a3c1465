"""The other losses of rows in plain torch: their definitions in :mod:`focalkern.reference`, with the compiled module's
arguments, checks and errors."""

import math

import torch
from torch import Tensor

from focalkern import reference
from focalkern._types import ROW_LOSS_NAMES, RowLoss, compute_dtype
from focalkern.fallback.focal_loss import check_arguments, check_range, focal_definition, gammas_of, promoted

__all__ = ["focal_loss_composite", "row_loss"]

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
    """As the compiled module's row_loss."""
    check_arguments(ROW_LOSS_NAMES[kind], input, target, gamma, edges, weight, ignore_index, label_smoothing)
    input, dtype = promoted(input, target)
    check_range(ROW_LOSS_NAMES[kind], target, input.shape[0 if input.dim() == 1 else 1], ignore_index)
    options = (reduction, ignore_index, label_smoothing, detach_modulation, kind, epsilon)
    return _definition(input, target, gamma, edges, weight, *options).to(dtype)


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
    kind: int = RowLoss.FOCAL,
    epsilon: float = 0.0,
) -> Tensor:
    """The operator of this name. ``float32_loss``: under autocast, which the caller has looked at."""
    check_arguments(ROW_LOSS_NAMES[kind], input, target, gamma, edges, weight, ignore_index, label_smoothing)
    options = (reduction, ignore_index, label_smoothing, detach_modulation, kind, epsilon)
    loss = _definition(input, target, gamma, edges, weight, *options)
    return loss if float32_loss else loss.to(input.dtype)


def _definition(
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
    """The loss of checked arguments in the dtype of the computation. It reads no value of a tensor."""
    if kind in (RowLoss.FOCAL, RowLoss.MMCE):  # of MMCE the part beside the error of the batch, cross-entropy
        gamma = gamma if kind == RowLoss.FOCAL else 0.0
        options = (reduction, ignore_index, label_smoothing, detach_modulation)
        return focal_definition(input, target, gamma, edges, weight, *options)
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
            row_weight = weight.to(z.dtype)[target]
        divisor = torch.where(valid, row_weight, 0.0).sum()
        # Rows that do not count leave before anything is computed of them, so that a NaN in them stays there.
        z = torch.where(valid.unsqueeze(class_dim), z, 0.0)
    keywords = {"weight": weight, "ignore_index": -1, "reduction": "none", "label_smoothing": label_smoothing}
    gammas = gammas_of(gamma, edges, z)
    if kind == RowLoss.POLY_FOCAL:
        loss = reference.poly_focal_loss(z, target, gammas, epsilon, **keywords)  # type: ignore[arg-type]
    elif kind == RowLoss.DUAL_FOCAL:
        loss = reference.dual_focal_loss(z, target, gammas, detach_modulation=detach_modulation, **keywords)  # type: ignore[arg-type]
    else:
        assert kind == RowLoss.BRIER
        loss = reference.brier_loss(z, target, **keywords)  # type: ignore[arg-type]
    if valid is not None and in_range is not None:
        loss = torch.where(valid, torch.where(in_range, loss, math.nan), 0.0)
    if reduction != _NONE:
        loss = loss.sum()
    return loss / divisor if reduction == _MEAN else loss
