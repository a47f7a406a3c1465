"""linear_focal_loss with classes split over ranks: each rank holds its rows of the head's weight."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focalkern.ops._collectives import all_reduce
from focalkern.ops._linear_chunks import FLOAT16_SCALE, Head, is_plain
from focalkern.ops._loss_stats import packed_stats
from focalkern.ops._vocab_slices import (
    RowStatistics,
    Settings,
    Split,
    gradients,
    refuse_second_derivatives,
    slopes,
    statistics,
    weighted,
)
from focalkern.ops._vocab_soft import Shares, SoftRows, Terms, label_statistics, soft_gradients, soft_losses
from focalkern.ops.row_sums import row_sums

__all__ = [
    "NOTHING",
    "HeadOptions",
    "HeadTensors",
    "LinearParallel",
    "Needed",
    "cast_gradients",
    "chunks_over_ranks",
    "mean_scale",
    "slice_of_dtensor",
]


def slice_of_dtensor(linear_weight: Any) -> Any:
    """This rank's rows of a DTensor weight that is sharded over its classes; other weights unchanged."""
    if not hasattr(linear_weight, "device_mesh"):
        return linear_weight
    split = [placement for placement in linear_weight.placements if not placement.is_replicate()]
    if len(split) != 1 or not split[0].is_shard(0):
        raise ValueError(
            "linear_focal_loss: linear_weight that is a DTensor must be split over its classes, Shard(0), and nothing "
            f"else, got {linear_weight.placements}"
        )
    return linear_weight.to_local()


class HeadTensors(NamedTuple):
    """The tensors of a call, of N rows or C_r classes."""

    input: Tensor  # [N, D]
    linear_weight: Tensor  # [C_r, D]
    linear_bias: Tensor | None  # [C_r]
    target: Tensor | None  # [N, C_r] class probabilities; None for the labels of the split
    gamma: Tensor | None  # [] or [N], instead of the gamma of the settings
    row_weights: Tensor  # [N] float64: weight of each row in the mean's divisor, and of its loss (labels)
    class_weights: Tensor | None  # [C_r]; None for labels without smoothing, which have row_weights


Needed = tuple[bool, bool, bool, bool]  # gradients of input, linear_weight, linear_bias and target
NOTHING: Needed = (False, False, False, False)
HeadGradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class HeadOptions:
    dtype: torch.dtype  # of the products
    chunk_rows: int
    softcap: float  # 0 for none
    reduction: str
    reduce_input_grad: bool
    return_stats: bool = False

    @property
    def scale(self) -> float:
        return FLOAT16_SCALE if self.dtype == torch.float16 else 1.0


def chunks_over_ranks(
    tensors: HeadTensors,
    split: Split,
    settings: Settings,
    options: HeadOptions,
    needed: Needed,
    upstream: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, HeadGradients, Tensor]:
    """One pass over the chunks: losses [N], the state [4, N], dL/dgamma [N], the gradients of
    ``sum(upstream * losses)`` (``upstream`` [N], default 1) and, with ``options.return_stats``, the statistics [4, N]
    of ``packed_stats``. Given the ``state`` of an earlier pass it computes only the gradients, and all-reduces only the
    gradient of the input."""
    input, linear_weight, linear_bias, target, gamma, row_weights, class_weights = tensors
    soft = target is not None or settings.label_smoothing > 0
    looks = is_plain(split.target) and is_plain(input)
    kept = split.counts.nonzero().squeeze(1) if looks and target is None else None
    head = Head(input, linear_weight, linear_bias, options.dtype, options.chunk_rows, needed[:3], kept, options.scale)
    shares, z_loss = Shares(target, class_weights, needed[3], row_weights), settings.z_loss
    terms = Terms.of(settings, gamma, gamma is not None) if soft else None
    losses = torch.zeros(len(input), dtype=torch.float64, device=input.device)
    of_gamma, upstream = torch.zeros_like(losses), torch.ones_like(losses) if upstream is None else upstream
    grad_target = None if target is None or not needed[3] else torch.zeros_like(target, dtype=torch.float64)
    result = torch.zeros(4, len(input), dtype=torch.float64, device=input.device) if state is None else state
    stats = losses.new_zeros(4, len(input) if options.return_stats and state is None else 0)
    stats[2] = -1  # no class
    for rows, z in head.chunks():
        where = head.rows_of(rows)
        here, some, per_row = split.at(where), shares.at(where), row_weights[where]
        _cap_(z, options.softcap)
        statistic: RowStatistics | None = None
        sums: tuple[Tensor, Tensor] | None = None
        if state is None:
            if terms is not None:
                losses[where], soft_rows, of_gamma[where], sums = soft_losses(z, here, some, terms.at(where), z_loss)
                result[:, where] = torch.stack(soft_rows)
                statistic = label_statistics(z, here, soft_rows) if options.return_stats else None
            else:
                sums = row_sums(z) if options.return_stats else None
                statistic = statistics(z, here, sums)
                of_row = gamma if gamma is None or gamma.dim() == 0 else gamma[where]
                loss, slope, rise = slopes(statistic.margin, of_row, settings)
                if z_loss:
                    loss = loss + z_loss * torch.where(here.counts, statistic.lse, 0.0).square()
                losses[where], of_gamma[where] = weighted(per_row, loss), rise * per_row
                result[:, where] = torch.stack([*statistic[:3], slope])
            if options.return_stats and statistic is not None and sums is not None:
                stats[:, where] = packed_stats(sums, here, statistic)
        if not any(needed):
            continue
        known, scaled = result[:, where], upstream[where] * options.scale
        if terms is not None:
            for block, grad, of_target in soft_gradients(z, here, some, SoftRows(*known), terms.at(where), scaled):
                if grad_target is not None and of_target is not None:
                    grad_target[where][block] = of_target.div_(options.scale)
                _overwrite(z, block, grad, options.softcap)
        else:
            statistic, scaled = RowStatistics.saved(*known[:3]), scaled * per_row
            of_lse = 2 * z_loss * scaled * torch.where(here.counts, statistic.lse, 0.0) if z_loss else None
            for block, grad in gradients(z, here, statistic, scaled * known[3], of_lse):
                _overwrite(z, block, grad, options.softcap)
        head.accumulate(rows, z)
    of_input, of_weight, of_bias = head.finish()
    if of_input is not None and options.reduce_input_grad:
        of_input = all_reduce(of_input, "sum", split.group)
    return losses, result, of_gamma, (of_input, of_weight, of_bias, grad_target), stats


def mean_scale(row_weights: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The divisor of the mean and the factor of its gradient. If no row counts, they are NaN and 0."""
    some, divisor = counts.any(), row_weights.sum()
    return torch.where(some, divisor, torch.nan), torch.where(some, divisor.reciprocal(), 0.0)


class LinearParallel(torch.autograd.Function):
    """Losses [N] (reduction "none"), their sum or their mean, and the statistics [4, N], from this rank's slice of the
    head."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        tensors, (split, settings, options) = HeadTensors(*arguments[:7]), arguments[7:]
        early, needs = options.reduction != "none", ctx.needs_input_grad
        needed = (bool(needs[0]), bool(needs[1]), bool(needs[2]), bool(needs[3]))
        losses, state, of_gamma, found, stats = chunks_over_ranks(
            tensors, split, settings, options, needed if early else NOTHING
        )
        ctx.save_for_backward(*tensors, state, of_gamma)
        ctx.split, ctx.settings, ctx.options = split, settings, options
        ctx.gradients = found if early else None
        ctx.scale, total = None, losses.sum() if early else losses
        if options.reduction == "mean":
            divisor, ctx.scale = mean_scale(tensors.row_weights, split.counts)
            total = total / divisor
        ctx.mark_non_differentiable(stats)
        return total, stats

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:
        *saved, state, of_gamma = ctx.saved_tensors
        tensors, needs = HeadTensors(*saved), ctx.needs_input_grad
        upstream = g if ctx.scale is None else g * ctx.scale
        refuse_second_derivatives("linear_focal_loss")
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            needed = (bool(needs[0]), bool(needs[1]), bool(needs[2]), bool(needs[3]))
            rows = upstream.expand(len(tensors.input))
            found = chunks_over_ranks(tensors, ctx.split, ctx.settings, ctx.options, needed, rows, state)[3]
        else:
            found = tuple(None if d is None else d.mul_(upstream) for d in found)
        of_number = None
        if tensors.gamma is not None and needs[4]:
            of_number = (upstream * of_gamma).sum_to_size(tensors.gamma.shape).to(tensors.gamma.dtype)
        return (*cast_gradients(found, tensors), of_number, *_REST)


_REST = (None,) * 5  # no gradients of row_weights, class_weights and the three arguments that are not tensors


def cast_gradients(found: HeadGradients, tensors: HeadTensors) -> HeadGradients:
    """The gradients in the dtypes of their tensors."""
    cast = [None if d is None or t is None else d.to(t.dtype) for d, t in zip(found, tensors[:4], strict=True)]
    return cast[0], cast[1], cast[2], cast[3]


def _cap_(z: Tensor, softcap: float) -> None:
    if softcap:
        z.div_(softcap).tanh_().mul_(softcap)


def _overwrite(z: Tensor, block: slice, grad: Tensor, softcap: float) -> None:
    """Overwrites the logits of a block with their gradient."""
    if softcap:
        grad.mul_((z[block] / softcap).square_().neg_().add_(1))
    z[block] = grad
