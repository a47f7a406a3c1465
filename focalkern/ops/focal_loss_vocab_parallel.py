"""The focal loss where every rank has a slice of the classes; :mod:`focalkern.ops._vocab_slices` says how."""

from typing import Any

import torch
from torch import Tensor

from focalkern._checks import dense
from focalkern._devices import autocast_is_on, has_float64
from focalkern._types import FLOATS, HALVES, Reduction
from focalkern.gamma import GammaTable
from focalkern.ops._vocab_slices import (
    Split,
    check_settings,
    gamma_rows,
    gradients,
    outside_graphs,
    refuse_second_derivatives,
    row_losses,
    statistics,
)
from focalkern.ops.focal_loss import Modulation

__all__ = ["focal_loss_vocab_parallel"]

_OP = "focal_loss_vocab_parallel"


@outside_graphs
def focal_loss_vocab_parallel(
    logits: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = 2.0,
    *,
    process_group: Any = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    detach_modulation: bool = False,
    modulation: Modulation | None = None,
) -> Tensor:
    r"""The focal loss of logits whose classes are split over the ranks of a process group.

    It is :func:`focal_loss` of all logits to rounding. Every rank calls it with its slice of the classes and the same
    of everything else, and gets the same loss, bit by bit; the gradient of its slice stays with it. Per row 16 bytes
    are reduced by MAX and 8 by SUM, whatever the number of classes; one number per call tells the ranks the sizes of
    the slices.

    Args:
        logits: [C_r], [N, C_r] or [B, S, C_r], classes last: this rank's slice, of any size, also 0. The classes of
            rank r follow those of rank r - 1. float16, bfloat16, float32 or float64. Or a DTensor that is split
            (``Shard``) over its last dimension and nothing else, as ``ColwiseParallel(use_local_output=False)`` returns
            it; then ``process_group`` is its mesh's.
        target: labels of the leading shape, among all classes, int64, int32 or uint8.
        gamma: a number, a tensor broadcastable to the unreduced loss or a :class:`GammaTable`, as in
            :func:`focal_loss`. Tensors are differentiable, and every rank has the whole gradient.
        process_group: by default all ranks.
        weight: [C] weights of all classes; not differentiable.
        ignore_index, reduction, detach_modulation, modulation: as in :func:`focal_loss`. Label smoothing and class
            probabilities are not there: their loss is a sum over the classes of all ranks.

    Returns:
        The loss, scalar or of the leading shape, in the dtype of ``logits`` (float32 for half-precision ones under
        autocast). Differentiable once. Under ``torch.compile`` the graph ends here.

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
    for name, value in (("logits", logits), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{_OP}: {name} must be a tensor, got {type(value).__name__}")
        dense(_OP, name, value)
    if target.device != logits.device:
        raise ValueError(f"{_OP}: target must be on the device of logits, {logits.device}, got {target.device}")
    if weight is not None:
        if not isinstance(weight, Tensor):
            raise TypeError(f"{_OP}: weight must be a tensor, got {type(weight).__name__}")
        dense(_OP, "weight", weight)
        if weight.dtype not in FLOATS:
            raise TypeError(f"{_OP}: weight must be float16, bfloat16, float32 or float64, got {weight.dtype}")
        if weight.device != logits.device:
            raise ValueError(f"{_OP}: weight must be on the device of logits, {logits.device}, got {weight.device}")
        if weight.dim() != 1:
            raise ValueError(f"{_OP}: weight must be [C], got shape {list(weight.shape)}")
    if logits.dtype not in FLOATS:
        raise TypeError(f"{_OP}: logits must be float16, bfloat16, float32 or float64, got {logits.dtype}")
    if not has_float64(logits.device):
        raise TypeError(
            f"{_OP}: logits must be on a device with float64, in which the ranks' sums are, got {logits.device}"
        )
    if logits.dim() < 1:
        raise ValueError(f"{_OP}: logits must be [C_r], [N, C_r] or [B, S, C_r], got a single number")
    leading = logits.shape[:-1]
    settings = check_settings(_OP, target, leading, gamma, reduction, ignore_index, detach_modulation, modulation)
    rows = logits.reshape(target.numel(), logits.shape[-1])
    split = Split.of(_OP, target.reshape(-1), logits.shape[-1], settings, process_group, (len(rows), 0))
    margin = _Margin.apply(rows, split)  # type: ignore[no-untyped-call]
    gammas = gamma_rows(_OP, settings.gamma, leading)
    try:
        row_weights = split.row_weights(weight, margin.dtype)
    except IndexError:
        expected = "weight must be [C], with the classes of all ranks"
        raise ValueError(f"{_OP}: {expected}, got {list(weight.shape) if weight is not None else None}") from None
    losses = row_losses(margin, gammas, settings) * row_weights
    loss = _reduced(losses, split, weight, reduction)
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
    def forward(ctx: Any, logits: Tensor, split: Split) -> Tensor:
        rows = statistics(logits, split)
        ctx.save_for_backward(logits)
        ctx.split, ctx.rows = split, rows
        return rows.margin

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        refuse_second_derivatives(_OP)
        (logits,) = ctx.saved_tensors
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for block, grad in gradients(logits, ctx.split, ctx.rows, slope):
            result[block] = grad
        return result, None
