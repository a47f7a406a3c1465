"""The focal loss with classes split over ranks; :mod:`focalkern.ops._vocab_slices` describes the method."""

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor

from focalkern._checks import dense, finite, flag
from focalkern._devices import autocast_is_on, has_float64
from focalkern._tracing import is_exporting
from focalkern._types import FLOATS, HALVES, Reduction
from focalkern.gamma import GammaTable
from focalkern.ops._collectives import ALONE
from focalkern.ops._loss_stats import LossWithStats, packed_stats, stats_from
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
    weighted,
)
from focalkern.ops._vocab_soft import label_statistics, soft_losses_of_slices
from focalkern.ops.row_sums import row_sums

__all__ = [
    "extras_of",
    "focal_loss_vocab_parallel",
    "loss_of_slices",
    "plain_statistics",
    "reduced",
    "refuse_stats_of_probabilities",
    "statistics_of",
]

_OP = "focal_loss_vocab_parallel"
_FAR = 1e4  # e^-_FAR is 0, also in float64


@overload
def focal_loss_vocab_parallel(
    logits: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = ...,
    *,
    process_group: Any = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    label_smoothing: float = ...,
    detach_modulation: bool = ...,
    modulation: Modulation | None = ...,
    z_loss: float = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...
@overload
def focal_loss_vocab_parallel(
    logits: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = ...,
    *,
    process_group: Any = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    label_smoothing: float = ...,
    detach_modulation: bool = ...,
    modulation: Modulation | None = ...,
    z_loss: float = ...,
    return_stats: Literal[True],
) -> LossWithStats: ...
@overload
def focal_loss_vocab_parallel(
    logits: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = ...,
    *,
    process_group: Any = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    label_smoothing: float = ...,
    detach_modulation: bool = ...,
    modulation: Modulation | None = ...,
    z_loss: float = ...,
    return_stats: bool,
) -> Tensor | LossWithStats: ...
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
    z_loss: float = 0.0,
    return_stats: bool = False,
) -> Tensor | LossWithStats:
    r"""The focal loss of logits whose classes are split over the ranks of a process group.

    .. math:: L = -f(p_y) \log p_y, \qquad p = \mathrm{softmax}(z^{(1)}, \ldots, z^{(R)})

    with the slices z^(r) of R ranks and the factor f of :func:`focal_loss`, for example (1 - p)^gamma.
    Up to rounding it equals :func:`focal_loss` of all logits. Every rank passes its slice of the logits and otherwise
    the same arguments, and gets the same loss, bit by bit, and the gradient of its slice. Per row the ranks reduce 16
    bytes by MAX and 8 by SUM, for any number of classes; per call they exchange the sizes of their slices.

    Args:
        logits: [C_r], [N, C_r] or [B, S, C_r], classes last: this rank's slice, of any size, also 0. The classes of
            rank r follow those of rank r - 1. float16, bfloat16, float32 or float64. A logit of -inf is a class that
            cannot occur (padding). Or a DTensor that is sharded over its last dimension only, as
            ``ColwiseParallel(use_local_output=False)`` returns it; then ``process_group`` is the group of its mesh, and
            the loss is a plain tensor. (:func:`focal_loss` accepts DTensors of other placements too, and returns one.)
        target: labels of the leading shape, among all classes, int64, int32 or uint8; or this rank's slice of the class
            probabilities, of the shape of ``logits``, floating point.
        gamma: a number, a tensor broadcastable to the unreduced loss or a :class:`GammaTable`, as in
            :func:`focal_loss`. Tensors are differentiable, and every rank gets the whole gradient.
        process_group: the group of the ranks; None is the group of all ranks.
        weight: [C] weights of all classes; not differentiable.
        ignore_index, reduction: as in :func:`focal_loss`.
        label_smoothing: e in [0, 1], spread over the classes of all ranks, padding included. With it, and with class
            probabilities, the ranks gather 16 bytes per row of every rank and reduce 24 by SUM instead.
        detach_modulation, modulation: as in :func:`focal_loss`.
        z_loss: c >= 0: adds c lse^2 to the loss of each row, with the log-sum-exp of all classes, as in
            :func:`focal_loss`; it needs no further reduction.
        return_stats: return the :class:`LossStats` of all classes too, the same on every rank. Labels only. The
            forward pass computes both without another read of the slice, and reduces 24 more bytes per row, with
            ``label_smoothing`` 32.

    Returns:
        The loss, scalar or of the leading shape, in the dtype of ``logits`` (float32 for half-precision ones under
        autocast). Differentiable once, in ``logits``, ``gamma`` and class probabilities. ``torch.compile`` keeps it in
        one graph (``fullgraph=True``). With ``return_stats=True`` a :class:`LossWithStats` (loss, stats).

    Raises:
        TypeError, ValueError: as :func:`focal_loss`; on the CPU also a ValueError if ranks pass different shapes.
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
    found: Tensor | LossWithStats = loss_of_slices(
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
        z_loss=z_loss,
        return_stats=return_stats,
    )
    return found


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
    z_loss: float = 0.0,
    return_stats: bool = False,
) -> Any:
    """The row loss number ``kind`` from slices [..., C_r] of the classes, with return_stats a :class:`LossWithStats`;
    errors name ``op``."""
    if is_exporting() and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: torch.export records no gradients of a loss over several ranks; call torch.export.export under "
            "torch.no_grad() for the loss alone, and use torch.compile for training"
        )
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
            f"{op}: logits must be on a device with float64, the dtype of the sums over ranks, got {logits.device}"
        )
    if logits.dim() < 1:
        raise ValueError(f"{op}: logits must be [C_r], [N, C_r] or [B, S, C_r], got a single number")
    leading = logits.shape[:-1]
    classes, soft = logits.shape[-1], target.is_floating_point()
    z_loss, return_stats = extras_of(op, z_loss, return_stats)
    refuse_stats_of_probabilities(op, target, return_stats)
    options = (reduction, ignore_index, label_smoothing, detach_modulation, z_loss)
    settings = check_settings(op, kind, target, leading, classes, gamma, epsilon, *options)
    rows = logits.reshape(math.prod(leading), classes)
    # Class probabilities have no label; any label serves to exchange the sizes of the slices.
    labels = torch.zeros(rows.shape[0], dtype=torch.int64, device=target.device) if soft else target.reshape(-1)
    split = Split.of(op, labels, classes, settings, process_group, (rows.shape[0], 0))
    if weight is not None and not torch.compiler.is_compiling() and len(weight) != int(split.classes):
        raise ValueError(f"{op}: weight must be [C], with the classes of all ranks, got {list(weight.shape)}")
    gammas = gamma_rows(op, settings.gamma, leading)
    statistic = sums = None
    if soft or label_smoothing:
        of_rows = gammas if isinstance(gammas, Tensor) else None
        shares = target.reshape(rows.shape) if soft else None
        losses, softmax, sums = soft_losses_of_slices(rows, shares, of_rows, split, weight, settings)
        statistic = label_statistics(rows.detach(), split, softmax) if return_stats else None
    else:
        sums = row_sums(rows.detach()) if return_stats else None
        statistic = statistics_of(rows, op, split, z_loss != 0, sums)
        # Ignored rows may hold NaN, and the derivative of 0 * NaN would be NaN.
        losses = row_losses(torch.where(split.counts, statistic.margin, 0.0), gammas, settings)
        if z_loss:
            losses = losses + z_loss * torch.where(split.counts, statistic.lse, 0.0).square()
        losses = weighted(split.row_weights(weight, losses.dtype), losses)
    loss = reduced(losses, split, None if soft else weight, reduction)
    is_half = logits.dtype in HALVES and autocast_is_on(logits.device.type)
    loss = loss.to(torch.float32 if is_half else logits.dtype)
    loss = loss.reshape(leading) if reduction == "none" else loss
    if not return_stats or statistic is None or sums is None:
        return loss
    with torch.no_grad():
        packed = packed_stats(sums, split, statistic)
    return LossWithStats(loss, stats_from(packed, split, leading, logits.dtype))


def extras_of(op: str, z_loss: Any, return_stats: Any) -> tuple[float, bool]:
    """z_loss as a float and return_stats as a bool, both checked."""
    if not (torch.compiler.is_compiling() and type(z_loss) is float):  # a graph must not depend on the value
        z_loss = finite(op, "z_loss", z_loss)
        if z_loss < 0:
            raise ValueError(f"{op}: z_loss must be at least 0, got {z_loss:g}")
    return z_loss, flag(op, "return_stats", return_stats)


def refuse_stats_of_probabilities(op: str, target: Tensor, return_stats: bool) -> None:
    if return_stats and target.is_floating_point():
        raise ValueError(
            f"{op}: return_stats=True needs labels, got class probabilities, which have no single target; leave it out"
        )


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
        raise ValueError(
            f"{_OP}: process_group must be None for a DTensor, whose mesh gives the group, got a group; leave it out"
        )
    return logits.to_local(), target, logits.device_mesh.get_group(split[0])


def reduced(losses: Tensor, split: Split, weight: Tensor | None, reduction: str) -> Tensor:
    losses = torch.where(split.counts, losses, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    total, divisor = losses.sum(), split.row_weights(weight, losses.dtype).sum()
    # If no row counts: NaN with a gradient of 0.
    some = torch.where(split.counts.any(), divisor, 1.0)
    return total / some + torch.where(split.counts.any(), 0.0, torch.nan)


def plain_statistics(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp and d of whole rows [n, C] in torch operations, differentiable to any order."""
    z = logits.double() if has_float64(logits.device) else logits.float()
    is_label = torch.arange(z.shape[1], device=z.device) == label.unsqueeze(1)
    others = torch.where(is_label, -torch.inf, z)
    # If no other class can occur, p is 1 for any logit of the target.
    alone = (others.amax(1) == -torch.inf).unsqueeze(1)
    rest = torch.where(alone, 0.0, others).logsumexp(1)
    z_y = z.gather(1, label.unsqueeze(1)).squeeze(1)
    margin = torch.where(alone.squeeze(1), torch.where(z_y.isnan(), z_y, -_FAR), rest - z_y)
    return z.logsumexp(1), margin


def statistics_of(
    logits: Tensor, op: str, split: Split, needs_lse: bool = False, sums: tuple[Tensor, Tensor] | None = None
) -> RowStatistics:
    """The statistics of rows from this rank's slice [n, C_r] of their logits, or from the ``sums`` of ``row_sums``. d
    is differentiable, and with ``needs_lse`` the log-sum-exp."""
    found = _Statistics.apply(logits, op, needs_lse, sums, *split)  # type: ignore[no-untyped-call]
    return RowStatistics(*found)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        op: str,
        needs_lse: bool,
        sums: tuple[Tensor, Tensor] | None,
        group: Any,
        *parts: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        split = Split(group, *parts)
        rows = statistics(logits, split, sums)
        ctx.op, ctx.group, ctx.needs_lse = op, group, needs_lse
        ctx.save_for_backward(logits, split.label, split.owned, *rows[:3])
        ctx.mark_non_differentiable(rows.top, rows.log_sum, *(() if needs_lse else (rows.lse,)))
        return tuple(rows)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, of_top: Tensor, of_log_sum: Tensor, slope: Tensor, of_lse: Tensor) -> Any:
        logits, label, owned, *rows = ctx.saved_tensors
        if ctx.group is ALONE and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            values = plain_statistics(logits, label)
            (of_logits,) = torch.autograd.grad(values, logits, (of_lse, slope), create_graph=True)
            return of_logits, *(None for _ in range(11))
        refuse_second_derivatives(ctx.op)
        split = slice_of(label, owned)
        of_logits = gradient(logits, split, RowStatistics.saved(*rows), slope, of_lse if ctx.needs_lse else None)
        return of_logits, *(None for _ in range(11))
