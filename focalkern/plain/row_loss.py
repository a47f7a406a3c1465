"""The other losses of rows in plain torch: their definitions in :mod:`focalkern.reference`, with the compiled module's
arguments, checks and errors."""

import math

import torch
from torch import Tensor

from focalkern import reference
from focalkern.plain._checks import compute_dtype
from focalkern.plain.focal_loss import check_arguments, check_range, gammas_of, promoted

__all__ = ["row_loss"]

# The numbers of the compiled module. 0 is the focal loss, which has a function of its own.
_POLY_FOCAL, _DUAL_FOCAL = 1, 2
_NAMES = ("focal_loss", "poly_focal_loss", "DualFocalLoss", "BrierLoss")
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
    op = _NAMES[kind]
    check_arguments(op, input, target, gamma, edges, weight, ignore_index, label_smoothing)
    input, dtype = promoted(input, target)
    class_dim = 0 if input.dim() == 1 else 1
    z = input.to(compute_dtype(input.dtype))
    divisor: float | Tensor = math.prod(z.shape) / z.shape[class_dim]
    valid = in_range = None
    if not target.is_floating_point():
        check_range(op, target, z.shape[class_dim], ignore_index)
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
    options = {"weight": weight, "ignore_index": -1, "reduction": "none", "label_smoothing": label_smoothing}
    if kind == _POLY_FOCAL:
        loss = reference.poly_focal_loss(z, target, gammas_of(gamma, edges, z), epsilon, **options)  # type: ignore[arg-type]
    elif kind == _DUAL_FOCAL:
        loss = reference.dual_focal_loss(z, target, gamma, detach_modulation=detach_modulation, **options)  # type: ignore[arg-type]
    else:
        loss = reference.brier_loss(z, target, **options)  # type: ignore[arg-type]
    if valid is not None and in_range is not None:
        loss = torch.where(valid, torch.where(in_range, loss, math.nan), 0.0)
    if reduction != _NONE:
        loss = loss.sum()
    return (loss / divisor if reduction == _MEAN else loss).to(dtype)
