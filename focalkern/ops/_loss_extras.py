"""focal_loss with z_loss or return_stats on one process.

The forward pass of labels by kernels gives the statistics too. Plain torch takes one more read of the logits for them
(:mod:`focalkern.ops.row_sums`). The kernels of the loss compute the z-loss, too
(:mod:`focalkern.ops._z_loss`). Elsewhere the z-loss of labels without smoothing is that of the loss over ranks, with
one process as the only rank, and other z-losses are added to the loss of the kernel or of plain torch; torch.func,
forward-mode derivatives, torch.export and devices without float64 take this sum in torch operations.
"""

from typing import Any

import torch
from torch import Tensor

from focalkern._checks import reduction_code
from focalkern._devices import has_float64
from focalkern._tracing import is_exporting
from focalkern._types import PLAIN_TENSORS, REDUCTIONS
from focalkern.fallback.focal_loss import check_arguments, check_range
from focalkern.gamma import GammaTable
from focalkern.ops._backend import backend_for, has_kernels
from focalkern.ops._collectives import ALONE
from focalkern.ops._loss_stats import LossWithStats, stats_of
from focalkern.ops._row_kernels import adds_z_loss
from focalkern.ops._row_loss import check_tensor, check_types, finite_number, needs_float64, row_loss
from focalkern.ops._z_loss import loss_plus_z_loss, loss_with_z_loss
from focalkern.ops.focal_loss_vocab_parallel import loss_of_slices, refuse_stats_of_probabilities
from focalkern.ops.row_sums import Statistics, statistics_of_input

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
    refuse_stats_of_probabilities(op, target, return_stats)
    transformed = torch._C._are_functorch_transforms_active()
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    apart = transformed or forward_mode or is_exporting() or not has_float64(input.device)
    arguments = (weight, ignore_index, reduction, label_smoothing, detach_modulation)
    if return_stats and not z_loss and not apart:
        found = _in_one_read(kind, input, target, gamma, *arguments)
        if found is not None:
            return found
    of_rows = None
    if not z_loss and (apart or not has_kernels(input)):
        loss = row_loss(op, kind, input, target, gamma, 0.0, *arguments)
    else:
        loss, of_rows = _with_extras(op, kind, input, target, gamma, *arguments, z_loss, return_stats, apart)
    if not return_stats:
        return loss
    if transformed:
        raise NotImplementedError(f"{op}: torch.func does not transform return_stats=True; leave it out")
    with torch.no_grad():
        if of_rows is None:
            of_rows = statistics_of_input(input.detach(), target, ignore_index)
        return LossWithStats(loss, stats_of(of_rows, target.shape))


def _in_one_read(
    kind: int,
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    detach_modulation: bool,
) -> LossWithStats | None:
    """The loss whose forward pass gives the statistics; None where it cannot, or where an argument is wrong."""
    are_plain = type(input) in PLAIN_TENSORS and type(target) in PLAIN_TENSORS
    if torch.compiler.is_compiling() or not are_plain or needs_float64(input, target, label_smoothing):
        return None
    together = getattr(backend_for(input), "row_loss_with_statistics", None)
    if together is None or reduction not in REDUCTIONS:
        return None
    edges = None
    if isinstance(gamma, GammaTable):
        edges, gamma = gamma.edges, gamma.gammas.detach()
    options = (REDUCTIONS.index(reduction), ignore_index, label_smoothing, detach_modulation, kind, False)
    try:
        found = together(input, target, gamma, edges, weight, *options)
    except (TypeError, ValueError, IndexError, RuntimeError):  # the loss alone raises an error that names the function
        return None
    return None if found is None else LossWithStats(found[0], stats_of(found[2], target.shape))


def _with_extras(
    op: str,
    kind: int,
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    detach_modulation: bool,
    z_loss: float,
    return_stats: bool,
    apart: bool,
) -> tuple[Any, Statistics | None]:
    """The loss, and the statistics where its kernel gives them, too."""
    reduction_code(op, reduction)
    check_types(op, weight, ignore_index, label_smoothing, detach_modulation)
    if not isinstance(gamma, Tensor | GammaTable):
        gamma = finite_number(op, "gamma", gamma)
    edges, values = (gamma.edges, gamma.gammas) if isinstance(gamma, GammaTable) else (None, gamma)
    check_arguments(op, input, target, values, edges, weight, ignore_index, label_smoothing)
    arguments = (weight, ignore_index, reduction, label_smoothing, detach_modulation)
    if not z_loss or (not apart and adds_z_loss(kind, input, target, label_smoothing)):
        try:
            return loss_with_z_loss(op, kind, input, target, gamma, *arguments, z_loss, return_stats)
        except IndexError:  # the kernel checks the labels, but names its own loss
            check_range(op, target, input.shape[min(input.dim() - 1, 1)], ignore_index)
            raise
    check_range(op, target, input.shape[min(input.dim() - 1, 1)], ignore_index)
    if apart or target.is_floating_point() or label_smoothing:
        return loss_plus_z_loss(op, kind, input, target, gamma, *arguments, z_loss, apart), None
    loss = loss_of_slices(
        op,
        kind,
        input.movedim(min(input.dim() - 1, 1), -1),
        target,
        gamma,
        process_group=ALONE,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        detach_modulation=detach_modulation,
        z_loss=z_loss,
    )
    return loss, None
