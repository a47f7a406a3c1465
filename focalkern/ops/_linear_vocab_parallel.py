"""linear_focal_loss whose classes are split over ranks: each has its rows of the head's weight."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from focalkern.gamma import GammaTable
from focalkern.ops._linear_chunks import FLOAT16_SCALE, Head, is_plain
from focalkern.ops._row_loss import Modulation, kind_of
from focalkern.ops._vocab_slices import (
    RowStatistics,
    Settings,
    Split,
    check_settings,
    gamma_rows,
    gradients,
    refuse_second_derivatives,
    row_losses,
    statistics,
)

__all__ = ["linear_focal_loss_over_ranks", "slice_of_dtensor"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_graphs(function: _Function) -> _Function:
    """Ends a compiled graph here. (The decorator torch.compiler.disable would import the compiler with this module.)"""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments, **options)
        return function(*arguments, **options)

    return cast(_Function, wrapper)


def slice_of_dtensor(linear_weight: Any) -> Any:
    """This rank's rows of a weight that is a DTensor split over its classes."""
    if not hasattr(linear_weight, "device_mesh"):
        return linear_weight
    split = [placement for placement in linear_weight.placements if not placement.is_replicate()]
    if len(split) != 1 or not split[0].is_shard(0):
        raise ValueError(
            "linear_focal_loss: linear_weight that is a DTensor must be split over its classes, Shard(0), and nothing "
            f"else, got {linear_weight.placements}"
        )
    return linear_weight.to_local()


@outside_graphs
def linear_focal_loss_over_ranks(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable,
    *,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    detach_modulation: bool,
    modulation: Modulation | None,
    chunk_rows: int | None,
    softcap: float,
    dtype: torch.dtype,
    process_group: Any,
    reduce_input_grad: bool,
) -> Tensor:
    """:func:`focalkern.linear_focal_loss` with process_group=; the loss in float64."""
    op = "linear_focal_loss"
    leading = input.shape[:-1]
    if target.is_floating_point():
        raise TypeError(f"{op}: target must be labels where the classes are split over ranks, got {target.dtype}")
    kind = kind_of(modulation)
    options = (reduction, ignore_index, 0.0, detach_modulation)
    settings = check_settings(op, kind, target, leading, len(linear_weight), gamma, 0.0, *options)
    rows = input.reshape(-1, input.shape[-1])
    # Not from the size of the slice, which is not everywhere the same: the ranks reduce chunk by chunk.
    size = max(64, min(1024, rows.shape[1] // 2)) if chunk_rows is None else int(chunk_rows)
    split = Split.of(op, target.reshape(-1), len(linear_weight), settings, process_group, (len(rows), size))
    of_row = gamma_rows(op, gamma, leading)
    loss: Tensor = LinearParallel.apply(  # type: ignore[no-untyped-call]
        rows,
        linear_weight,
        linear_bias,
        of_row if isinstance(of_row, Tensor) else None,
        split.row_weights(weight, torch.float64),
        split,
        settings,
        HeadOptions(dtype, size, softcap, reduction, reduce_input_grad),
    )
    return loss.reshape(leading) if reduction == "none" else loss


@dataclass(frozen=True)
class HeadOptions:
    dtype: torch.dtype  # of the products
    chunk_rows: int
    softcap: float  # 0 for none
    reduction: str
    reduce_input_grad: bool

    @property
    def scale(self) -> float:
        return FLOAT16_SCALE if self.dtype == torch.float16 else 1.0


class LinearParallel(torch.autograd.Function):
    """Losses [N] (reduction "none"), their sum or their mean, from this rank's slice of the head."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        gamma: Tensor | None,
        row_weights: Tensor,
        split: Split,
        settings: Settings,
        options: HeadOptions,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        early = options.reduction != "none"
        wanted = (early and needs[0], early and needs[1], early and needs[2])
        ctx.save_for_backward(input, linear_weight, linear_bias, gamma)
        ctx.split, ctx.settings, ctx.options = split, settings, options
        ctx.kept = split.counts.nonzero().squeeze(1) if is_plain(split.target) and is_plain(input) else None
        head = Head(
            input, linear_weight, linear_bias, options.dtype, options.chunk_rows, wanted, ctx.kept, options.scale
        )
        losses = torch.zeros(len(input), dtype=torch.float64, device=input.device)
        slopes, gamma_slopes, parts = torch.zeros_like(losses), torch.zeros_like(losses), []
        for rows, z in head.chunks():
            where = head.rows_of(rows)
            here = split.at(where)
            _cap_(z, options.softcap)
            part = statistics(z, here)
            parts.append(part)
            of_row = gamma if gamma is None or gamma.dim() == 0 else gamma[where]
            losses[where], slopes[where], gamma_slopes[where] = _slopes(part.margin, of_row, settings)
            losses[where] *= row_weights[where]
            if any(wanted):
                _overwrite(z, here, part, slopes[where] * row_weights[where], options)
                head.accumulate(rows, z)
        ctx.rows = RowStatistics.of(parts) if parts else None
        ctx.row_weights, ctx.slopes, ctx.gamma_slopes = row_weights, slopes, gamma_slopes
        ctx.gradients = head.finish() if early else None
        total = losses if not early else losses.sum()
        ctx.scale = None
        if options.reduction == "mean":
            some = split.counts.any()
            ctx.scale = torch.where(some, row_weights.sum().reciprocal(), 0.0)
            total = total / torch.where(some, row_weights.sum(), torch.nan)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        refuse_second_derivatives("linear_focal_loss")
        input, linear_weight, linear_bias, gamma = ctx.saved_tensors
        upstream = g if ctx.scale is None else g * ctx.scale
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            per_row = upstream.expand(len(input)) * ctx.row_weights
            gradients = _gradients_again(ctx, per_row)
        else:
            gradients = tuple(None if d is None else d.mul_(upstream) for d in gradients)
        of_input, of_weight, of_bias = gradients
        if of_input is not None and ctx.options.reduce_input_grad:
            dist.all_reduce(of_input, group=ctx.split.group)
        of_gamma = None
        if gamma is not None and ctx.needs_input_grad[3]:
            of_gamma = (upstream * ctx.row_weights * ctx.gamma_slopes).sum_to_size(gamma.shape).to(gamma.dtype)
        return (
            None if of_input is None else of_input.to(input.dtype),
            None if of_weight is None else of_weight.to(linear_weight.dtype),
            None if of_bias is None else of_bias.to(linear_bias.dtype),
            of_gamma,
            *(None for _ in range(4)),
        )


def _gradients_again(ctx: Any, upstream: Tensor) -> Any:
    """The logits a second time, for an upstream gradient per row; the numbers per row are there."""
    input, linear_weight, linear_bias, _ = ctx.saved_tensors
    options, wanted = ctx.options, tuple(ctx.needs_input_grad[:3])
    head = Head(input, linear_weight, linear_bias, options.dtype, options.chunk_rows, wanted, ctx.kept, options.scale)
    for rows, z in head.chunks() if any(wanted) else ():
        where = head.rows_of(rows)
        _cap_(z, options.softcap)
        _overwrite(z, ctx.split.at(where), ctx.rows.at(rows), upstream[where] * ctx.slopes[where], options)
        head.accumulate(rows, z)
    return head.finish()


def _slopes(margin: Tensor, gamma: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dL/dd and dL/dgamma of each row."""
    with torch.enable_grad():
        d = margin.detach().requires_grad_()
        variables = [d]
        of_row: float | Tensor | GammaTable = settings.gamma
        if gamma is not None:
            # detach() of a constant: a factor that is detached has no derivative in gamma.
            of_row = gamma.detach().expand(len(d)).requires_grad_(not settings.detach_modulation)
            variables += [of_row] if of_row.requires_grad else []
        losses = row_losses(d, of_row, settings)
        found = torch.autograd.grad(losses.sum(), variables)
    of_gamma = found[1].double() if len(found) > 1 else torch.zeros_like(margin)
    return losses.detach(), found[0], of_gamma


def _cap_(z: Tensor, softcap: float) -> None:
    if softcap:
        z.div_(softcap).tanh_().mul_(softcap)


def _overwrite(z: Tensor, split: Split, rows: RowStatistics, slope: Tensor, options: HeadOptions) -> None:
    """The gradient over the logits, for dL/dd = slope."""
    for block, grad in gradients(z, split, rows, slope * options.scale):
        if options.softcap:
            grad.mul_((z[block] / options.softcap).square_().neg_().add_(1))
        z[block] = grad
