"""The focal loss where every rank has a slice of the classes; :mod:`focalkern.ops._vocab_slices` says how."""

import math
from typing import Any

import torch
from torch import Tensor

from focalkern._checks import dense
from focalkern._devices import autocast_is_on, has_float64
from focalkern._types import FLOATS, HALVES, Reduction
from focalkern.gamma import GammaTable
from focalkern.ops._row_loss import Modulation, check_modulation, kind_of
from focalkern.ops._vocab_slices import (
    RowStatistics,
    Split,
    check_settings,
    gamma_rows,
    gradient,
    refuse_second_derivatives,
    row_losses,
    slice_of,
    statistics,
)
from focalkern.ops._vocab_soft import SoftLosses

__all__ = ["focal_loss_vocab_parallel", "loss_of_slices"]

_OP = "focal_loss_vocab_parallel"


def focal_loss_vocab_parallel(
    logits: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = 2.0,
    *,
    process_group: Any = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    detach_modulation: bool = False,
    modulation: Modulation | None = None,
) -> Tensor:
    r"""The focal loss of logits whose classes are split over the ranks of a process group.

    It is :func:`focal_loss` of all logits to rounding. Every rank calls it with its slice of the classes and the same
    of everything else, and gets the same loss, bit by bit; the gradient of its slice stays with it. Per row 16 bytes
    are reduced by MAX and 8 by SUM, for any number of classes; one number per call tells the ranks the sizes of the
    slices.

    Args:
        logits: [C_r], [N, C_r] or [B, S, C_r], classes last: this rank's slice, of any size, also 0. The classes of
            rank r follow those of rank r - 1. float16, bfloat16, float32 or float64. Or a DTensor that is split
            (``Shard``) over its last dimension and nothing else, as ``ColwiseParallel(use_local_output=False)`` returns
            it; then ``process_group`` is its mesh's, and the loss is a plain tensor. :func:`focal_loss` takes DTensors
            of other placements too, and returns one. A logit of -inf is a class that cannot occur (padding).
        target: labels of the leading shape, among all classes, int64, int32 or uint8; or this rank's slice of the class
            probabilities, of the shape of ``logits``, floating point.
        gamma: a number, a tensor broadcastable to the unreduced loss or a :class:`GammaTable`, as in
            :func:`focal_loss`. Tensors are differentiable, and every rank has the whole gradient.
        process_group: by default all ranks.
        weight: [C] weights of all classes; not differentiable.
        ignore_index, reduction: as in :func:`focal_loss`.
        label_smoothing: e in [0, 1], spread over the classes of all ranks, padding too. With it, and with class
            probabilities, the terms of all classes are computed by torch operations in float64, and 24 more bytes per
            row are reduced.
        detach_modulation, modulation: as in :func:`focal_loss`.

    Returns:
        The loss, scalar or of the leading shape, in the dtype of ``logits`` (float32 for half-precision ones under
        autocast). Differentiable once, in ``logits``, ``gamma`` and class probabilities. ``torch.compile`` takes it
        into one graph (``fullgraph=True``) for labels without smoothing, and ends the graph there for the others.

    Raises:
        TypeError, ValueError: as :func:`focal_loss`; on the CPU also ranks that were called with different shapes.
        IndexError: a label outside [0, C), on the CPU; elsewhere its row becomes NaN.
        RuntimeError: no process group; a rank that died or does not answer within the group's timeout.

    Source: the split of Megatron-LM's cross-entropy (Shoeybi et al. 2019, arXiv 1909.08053).

    Example:
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([1])
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> fk.focal_loss_vocab_parallel(logits, target, gamma=2.0)  # one rank, which has all classes
        tensor(1.7026)
        >>> fk.focal_loss(logits, target, gamma=2.0)
        tensor(1.7026)
        >>> torch.distributed.destroy_process_group()
    """
    logits, target, process_group = _without_dtensor(logits, target, process_group)
    gamma = check_modulation(_OP, modulation, gamma)
    return loss_of_slices(
        _OP,
        kind_of(modulation),
        logits,
        target,
        gamma,
        process_group=process_group,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        detach_modulation=detach_modulation,
    )


def loss_of_slices(
    op: str,
    kind: int,
    logits: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable,
    *,
    process_group: Any,
    epsilon: float = 0.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    detach_modulation: bool = False,
) -> Tensor:
    """The loss of a number from slices [..., C_r] of the classes; ``op`` is who was called."""
    for name, value in (("logits", logits), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
        dense(op, name, value)
    if target.device != logits.device:
        raise ValueError(f"{op}: target must be on the device of logits, {logits.device}, got {target.device}")
    if weight is not None:
        if not isinstance(weight, Tensor):
            raise TypeError(f"{op}: weight must be a tensor, got {type(weight).__name__}")
        dense(op, "weight", weight)
        if weight.dtype not in FLOATS:
            raise TypeError(f"{op}: weight must be float16, bfloat16, float32 or float64, got {weight.dtype}")
        if weight.device != logits.device:
            raise ValueError(f"{op}: weight must be on the device of logits, {logits.device}, got {weight.device}")
        if weight.dim() != 1:
            raise ValueError(f"{op}: weight must be [C], got shape {list(weight.shape)}")
    if logits.dtype not in FLOATS:
        raise TypeError(f"{op}: logits must be float16, bfloat16, float32 or float64, got {logits.dtype}")
    if not has_float64(logits.device):
        raise TypeError(
            f"{op}: logits must be on a device with float64, in which the ranks' sums are, got {logits.device}"
        )
    if logits.dim() < 1:
        raise ValueError(f"{op}: logits must be [C_r], [N, C_r] or [B, S, C_r], got a single number")
    leading = logits.shape[:-1]
    classes, soft = logits.shape[-1], target.is_floating_point()
    options = (reduction, ignore_index, label_smoothing, detach_modulation)
    settings = check_settings(op, kind, target, leading, classes, gamma, epsilon, *options)
    rows = logits.reshape(math.prod(leading), classes)
    # Class probabilities have no label; any label serves to exchange the sizes of the slices.
    labels = torch.zeros(len(rows), dtype=torch.int64, device=target.device) if soft else target.reshape(-1)
    split = Split.of(op, labels, classes, settings, process_group, (len(rows), 0))
    if weight is not None and not torch.compiler.is_compiling() and len(weight) != int(split.classes):
        raise ValueError(f"{op}: weight must be [C], with the classes of all ranks, got {list(weight.shape)}")
    gammas = gamma_rows(op, settings.gamma, leading)
    if soft or label_smoothing:
        of_rows = gammas if isinstance(gammas, Tensor) else None
        shares = target.reshape(rows.shape) if soft else None
        apply: Any = SoftLosses.apply
        if torch.compiler.is_compiling():
            apply = torch.compiler.disable(apply)
        losses = apply(rows, shares, of_rows, split, weight, settings)
    else:
        margin = _Margin.apply(rows, op, *split)  # type: ignore[no-untyped-call]
        losses = row_losses(margin, gammas, settings) * split.row_weights(weight, margin.dtype)
    loss = _reduced(losses, split, None if soft else weight, reduction)
    is_half = logits.dtype in HALVES and autocast_is_on(logits.device.type)
    loss = loss.to(torch.float32 if is_half else logits.dtype)
    return loss.reshape(leading) if reduction == "none" else loss


def _without_dtensor(logits: Any, target: Any, process_group: Any) -> tuple[Any, Any, Any]:
    if hasattr(target, "device_mesh"):
        if any(not placement.is_replicate() for placement in target.placements):
            raise ValueError(f"{_OP}: target must be the same on every rank, got a DTensor of {target.placements}")
        target = target.to_local()
    if not hasattr(logits, "device_mesh"):
        return logits, target, process_group
    split = [i for i, placement in enumerate(logits.placements) if not placement.is_replicate()]
    if len(split) != 1 or not logits.placements[split[0]].is_shard(logits.dim() - 1):
        raise ValueError(
            f"{_OP}: logits that are a DTensor must be split over their last dimension, Shard({logits.dim() - 1}), and "
            f"nothing else, got {logits.placements}"
        )
    if process_group is not None:
        raise ValueError(f"{_OP}: process_group is that of the DTensor's mesh; leave it out")
    return logits.to_local(), target, logits.device_mesh.get_group(split[0])


def _reduced(losses: Tensor, split: Split, weight: Tensor | None, reduction: str) -> Tensor:
    losses = torch.where(split.counts, losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    total, divisor = losses.sum(), split.row_weights(weight, losses.dtype).sum()
    # Over no row at all: NaN with a gradient of 0.
    some = torch.where(split.counts.any(), divisor, 1.0)
    return total / some + torch.where(split.counts.any(), 0.0, torch.nan)


class _Margin(torch.autograd.Function):
    """d of every row, from this rank's slice of its logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, op: str, group: Any, *parts: Tensor) -> Tensor:
        split = Split(group, *parts)
        rows = statistics(logits, split)
        ctx.op = op
        ctx.save_for_backward(logits, split.label, split.owned, *rows)
        return rows.margin

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        refuse_second_derivatives(ctx.op)
        logits, label, owned, *rows = ctx.saved_tensors
        of_logits = gradient(logits, slice_of(label, owned), RowStatistics(*rows), slope)
        return of_logits, *(None for _ in range(9))
