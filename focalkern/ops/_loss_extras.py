"""focal_loss with z_loss or return_stats: the loss over ranks, with one process as the only rank.

For labels without smoothing, one pass over the logits computes d and the log-sum-exp, and a second pass the gradient of
both terms (:mod:`focalkern.ops._vocab_slices`). For class probabilities, smoothing, torch.func, forward-mode
derivatives and devices without float64, the kernel or plain torch computes the loss, and the z-loss is added to it.
"""

from typing import Any

import torch
from torch import Tensor

from focalkern._devices import autocast_is_on, has_float64
from focalkern._types import HALVES
from focalkern.fallback.focal_loss import check_arguments, check_range
from focalkern.gamma import GammaTable
from focalkern.ops._collectives import ALONE
from focalkern.ops._loss_stats import LossWithStats, packed_stats, stats_from
from focalkern.ops._row_loss import check_tensor, check_types, row_loss
from focalkern.ops._vocab_slices import RowStatistics, Split
from focalkern.ops.focal_loss_vocab_parallel import (
    loss_of_slices,
    plain_statistics,
    reduced,
    refuse_stats_of_probabilities,
    statistics_of,
)

__all__ = ["loss_with_extras"]


def loss_with_extras(
    op: str,
    kind: int,
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable,
    *,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    detach_modulation: bool,
    z_loss: float,
    return_stats: bool,
) -> Any:
    """The row loss number ``kind`` of whole rows, input [C], [N, C] or [N, C, d1, ...]."""
    check_tensor(op, "input", input)
    check_tensor(op, "target", target)
    check_types(op, weight, ignore_index, label_smoothing, detach_modulation)
    refuse_stats_of_probabilities(op, target, return_stats)
    edges, values = (gamma.edges, gamma.gammas) if isinstance(gamma, GammaTable) else (None, gamma)
    check_arguments(op, input, target, values, edges, weight, ignore_index, label_smoothing)
    class_dim = min(input.dim() - 1, 1)
    transformed = torch._C._are_functorch_transforms_active()
    if not (transformed or torch.compiler.is_compiling()):
        check_range(op, target, input.shape[class_dim], ignore_index)
    soft = target.is_floating_point()
    options: dict[str, Any] = {
        "weight": weight,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "detach_modulation": detach_modulation,
    }
    apart = transformed or torch.autograd.forward_ad._current_level >= 0 or not has_float64(input.device)
    if apart or soft or label_smoothing:
        return _added(op, kind, input, target, gamma, reduction, z_loss, return_stats, apart, options)
    z = input.movedim(class_dim, -1)
    options |= {"process_group": ALONE, "z_loss": z_loss, "return_stats": return_stats, "reduction": reduction}
    return loss_of_slices(op, kind, z, target, gamma, **options)


def _added(
    op: str,
    kind: int,
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable,
    reduction: str,
    z_loss: float,
    return_stats: bool,
    apart: bool,
    options: dict[str, Any],
) -> Tensor | LossWithStats:
    """The row loss plus the z-loss. With ``apart``, only torch operations compute the z-loss."""
    if return_stats and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{op}: torch.func does not transform return_stats=True; leave it out")
    soft, class_dim = target.is_floating_point(), min(input.dim() - 1, 1)
    dtype = torch.promote_types(input.dtype, target.dtype) if soft else input.dtype
    if input.dtype in HALVES:
        dtype = torch.promote_types(dtype, torch.float32) if autocast_is_on(input.device.type) else dtype
        input = input.float()  # the sum of both gradients is rounded once
    z = input.movedim(class_dim, -1)
    leading, classes = z.shape[:-1], z.shape[-1]
    rows = z.reshape(leading.numel(), classes)
    labels = target.new_zeros(leading.numel(), dtype=torch.int64) if soft else target.reshape(-1)
    split = Split.whole(labels, classes, -100 if soft else options["ignore_index"])
    arguments = (options["weight"], options["ignore_index"], "none", options["label_smoothing"])
    losses = row_loss(op, kind, input, target, gamma, 0.0, *arguments, options["detach_modulation"]).reshape(-1)
    statistic = _plain(rows, split.label) if apart else statistics_of(rows, op, split, z_loss != 0)
    weight = None if soft else options["weight"]
    if z_loss:
        lse = torch.where(split.counts, statistic.lse, 0.0)
        losses = losses + z_loss * split.row_weights(weight, lse.dtype) * lse.square()
    loss = reduced(losses, split, weight, reduction).to(dtype)
    loss = loss.reshape(leading) if reduction == "none" else loss
    if not return_stats:
        return loss
    with torch.no_grad():
        packed = packed_stats(rows, split, RowStatistics(*(values.detach() for values in statistic)))
    return LossWithStats(loss, stats_from(packed, split, leading, input.dtype))


def _plain(rows: Tensor, label: Tensor) -> RowStatistics:
    lse, margin = plain_statistics(rows, label)
    top = rows.detach().amax(1).to(lse.dtype)
    shift = torch.where(top.isfinite(), top, 0.0)
    return RowStatistics(shift, lse - shift, margin, lse)
