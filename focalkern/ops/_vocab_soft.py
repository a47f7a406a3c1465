"""Soft targets over classes that are split over ranks: label smoothing and class probabilities.

With t the target probabilities, w the class weights and l(p) = -f(p) log p, a row's loss is
L = sum_i w_i t_i l(p_i), and

    dL/dz_j = s_j - p_j G,    s_j = w_j t_j dl/dlog p_j,    G = sum_i s_i

Every rank sums over its classes. Two reductions give the softmax of all classes (MAX of the largest logit, SUM of the
exponentials of the others), and a third gives the loss, G and dL/dgamma. Each term l(p) is the loss of two classes with
the logits (log p - log(1 - p), 0), in float64, block by block. For the largest class, 1 - p is the sum of the other
probabilities, which does not cancel.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focalkern.ops._collectives import all_reduce
from focalkern.ops._linear_chunks import blocks
from focalkern.ops._vocab_slices import Settings, Split, refuse_second_derivatives, slopes

__all__ = ["Shares", "SoftLosses", "SoftRows", "soft_gradients", "soft_losses"]


class Shares(NamedTuple):
    """Targets and weights of a slice, before smoothing."""

    target: Tensor | None  # [n, C_r] class probabilities; None for the labels of a Split
    weight: Tensor | None  # [C_r] class weights
    needs_target: bool  # whether the class probabilities need a gradient
    row_weight: Tensor | None  # [n] weights of the rows in the mean and in the z-loss

    @classmethod
    def of(cls, target: Tensor | None, weight: Tensor | None, classes: int, split: Split) -> "Shares":
        """The shares of this rank's slice; ``weight`` [C] has the classes of all ranks."""
        rows = split.row_weights(None if target is not None else weight, torch.float64)
        if weight is None:
            return cls(target, None, False, rows)
        here = weight[split.offset + torch.arange(classes, device=weight.device)]
        return cls(target, here, False, rows)

    def at(self, rows: slice | Tensor) -> "Shares":
        target, weight = (None if t is None else t[rows] for t in (self.target, self.row_weight))
        return Shares(target, self.weight, self.needs_target, weight)


class SoftRows(NamedTuple):
    """Float64 numbers [n] that the gradient needs of each row."""

    top: Tensor  # the largest logit of all ranks
    log_total: Tensor  # log sum_j exp(z_j - top)
    log_u_top: Tensor  # log(1 - p) of the largest logit
    slope: Tensor  # G


def soft_losses(
    z: Tensor, split: Split, shares: Shares, gamma: Tensor | None, settings: Settings
) -> tuple[Tensor, SoftRows, Tensor]:
    """Losses, the numbers for the gradients, and dL/dgamma, all [n], of the rows [n, C_r] of a chunk. ``gamma``, [] or
    [n], replaces the gamma of the settings."""
    rows = _softmax(z, split.group)
    sums = torch.zeros(3, len(z), dtype=torch.float64, device=z.device)
    for block in blocks(z) if z.shape[1] else ():
        here = SoftRows(*(values[block] for values in rows))
        of_gamma = None if gamma is None else gamma.detach().expand(len(z))[block]
        sums[0, block], slope, _, sums[2, block] = _terms(
            z[block], split.at(block), shares.at(block), here, of_gamma, settings
        )
        sums[1, block] = slope.sum(1)
    losses, slope_sum, of_gamma = all_reduce(sums, "sum", split.group)
    if settings.z_loss and shares.row_weight is not None:
        lse = torch.where(split.counts, rows.top + rows.log_total, 0.0)
        losses = losses + settings.z_loss * shares.row_weight * lse.square()
        slope_sum = slope_sum - 2 * settings.z_loss * shares.row_weight * lse
    return losses, rows._replace(slope=slope_sum), of_gamma


def soft_gradients(
    z: Tensor,
    split: Split,
    shares: Shares,
    rows: SoftRows,
    gamma: Tensor | None,
    settings: Settings,
    upstream: Tensor,
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """The gradients of the slice's logits and class probabilities, block by block, in float64."""
    for block in blocks(z) if z.shape[1] else ():
        here = SoftRows(*(values[block] for values in rows))
        of_gamma = None if gamma is None else gamma.detach().expand(len(z))[block]
        _, slope, of_target, _ = _terms(z[block], split.at(block), shares.at(block), here, of_gamma, settings)
        p = ((z[block].double() - here.top.unsqueeze(1)) - here.log_total.unsqueeze(1)).exp()
        scale = upstream[block].unsqueeze(1)
        grad = torch.where(scale == 0, 0.0, scale * (slope - p * here.slope.unsqueeze(1)))
        yield block, grad, None if of_target is None else torch.where(scale == 0, 0.0, scale * of_target)


def _softmax(z: Tensor, group: Any) -> SoftRows:
    """The normalisation of the softmax over the classes of all ranks (``slope`` is 0)."""
    top = torch.full((len(z),), -torch.inf, dtype=torch.float64, device=z.device)
    rest = torch.zeros_like(top)
    for block in blocks(z) if z.shape[1] else ():
        part = z[block].double()
        top[block], where = part.max(1)
        shifted = part - torch.where(top[block] == -torch.inf, 0.0, top[block]).unsqueeze(1)
        # top * 0 carries a NaN into the sum, because a reduction by MAX may drop it.
        rest[block] = shifted.scatter(1, where.unsqueeze(1), -torch.inf).exp().sum(1) + top[block] * 0.0
        rest[block] = torch.where(top[block] == -torch.inf, 0.0, rest[block])
    largest = all_reduce(top.clone(), "max", group)
    # `rest` excludes this rank's largest logit. Add it to the others unless it is the largest of all ranks.
    scale = torch.where(top == -torch.inf, 0.0, (top - largest).exp())
    holds = top == largest
    sums = torch.stack([rest * scale + torch.where(holds, 0.0, scale), holds.double()])
    others, holders = all_reduce(sums, "sum", group)
    others = others + (holders - 1.0)
    log_total = others.log1p()
    return SoftRows(largest, log_total, others.log() - log_total, torch.zeros_like(top))


def _terms(
    z: Tensor, split: Split, shares: Shares, rows: SoftRows, gamma: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """For a block: the slice's part of the losses [n], s [n, C_r], and the derivatives in the class probabilities
    [n, C_r] (None if not needed) and in gamma [n]."""
    top, log_total, log_u_top = (values.unsqueeze(1) for values in rows[:3])
    logits = z.double()
    log_p = (logits - top) - log_total
    log_u = torch.where(logits == top, log_u_top, torch.log1p(-log_p.exp()))
    of_class = None if gamma is None else gamma.double().unsqueeze(1).expand_as(log_p).reshape(-1)
    found = slopes((log_u - log_p).reshape(-1), of_class, settings)
    loss, of_margin, of_gamma = (values.reshape(log_p.shape) for values in found)
    # d log p / dd = -u. If u underflows to 0, so do all other p_j, and s - p G cancels for any s.
    u = log_u.exp()
    of_log_p = torch.where(u > 0, -of_margin / u, torch.where(of_margin.isnan(), of_margin, 0.0))
    e, target = settings.label_smoothing, shares.target
    if target is None:
        columns = torch.arange(z.shape[1], device=z.device)
        target = ((columns == split.label.unsqueeze(1)) & split.owned.unsqueeze(1)).double()
    weight = torch.ones_like(loss) if shares.weight is None else shares.weight.double().expand_as(loss)
    share = weight * ((1.0 - e) * target.double() + (e / split.classes.double() if e else 0.0))
    counts = split.counts.unsqueeze(1)
    # A class without target mass contributes 0, also if its logit is -inf.
    share, none = torch.where(counts, share, 0.0), (share == 0) | ~counts
    nan = torch.where(split.legal, 0.0, torch.nan)  # a label out of range makes its row NaN
    losses = torch.where(none & (loss == torch.inf), 0.0, share * loss).sum(1) + nan
    of_target = None
    if shares.needs_target:
        of_target = torch.where(weight == 0, 0.0, (1.0 - e) * weight * loss)
    sums = torch.where(none, 0.0, share * of_gamma).sum(1)
    return losses, torch.where(none & ~of_log_p.isnan(), 0.0, share * of_log_p) + nan.unsqueeze(1), of_target, sums


class SoftLosses(torch.autograd.Function):
    """Losses [N] in float64 from this rank's slice of the logits, for soft targets."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor | None,
        gamma: Tensor | None,
        split: Split,
        weight: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        shares = Shares.of(target, weight, logits.shape[1], split)
        losses, ctx.rows, of_gamma = soft_losses(logits, split, shares, gamma, settings)
        ctx.save_for_backward(logits, target, gamma, of_gamma)
        ctx.split, ctx.weight, ctx.settings = split, shares.weight, settings
        return losses

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        refuse_second_derivatives(ctx.settings.op)
        logits, target, gamma, of_gamma = ctx.saved_tensors
        needs_target = target is not None and ctx.needs_input_grad[1]
        shares = Shares(target, ctx.weight, needs_target, None)
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grad_target = torch.empty_like(target) if needs_target else None
        for block, part, of_target in soft_gradients(
            logits, ctx.split, shares, ctx.rows, gamma, ctx.settings, upstream
        ):
            grad[block] = part.to(grad.dtype)
            if grad_target is not None and of_target is not None:
                grad_target[block] = of_target.to(grad_target.dtype)
        grad_gamma = None
        if gamma is not None and ctx.needs_input_grad[2]:
            grad_gamma = (upstream * of_gamma).sum_to_size(gamma.shape).to(gamma.dtype)
        return grad, grad_target, grad_gamma, None, None, None
