"""Soft targets over classes that are split over ranks: label smoothing and class probabilities.

With t the target probabilities, w the class weights and l(p) = -f(p) log p, a row's loss is
L = sum_i w_i t_i l(p_i), and

    dL/dz_j = s_j - p_j G,    s_j = w_j t_j dl/dlog p_j,    G = sum_i s_i

Every rank sums over its classes (:mod:`focalkern.ops.row_sums`, which also gives the statistics of the rows) and
gathers the sums of all ranks. A row of the slice then gets one more class, without a target: the classes of the other
ranks together. So the row loss of the slice has the softmax of all classes, and computes the slice's terms of L and
dL/dz, block by block. Only G lacks the terms of the other ranks. The gradient of the additional class, -p G, gives the
slice's part of G, and one reduction gives the sums of L, G and dL/dgamma.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focalkern._types import compute_dtype
from focalkern.gamma import GammaTable
from focalkern.ops._collectives import all_gather, all_reduce
from focalkern.ops._linear_chunks import blocks
from focalkern.ops._row_kernels import Block, gradients_of_rows, losses_of_rows
from focalkern.ops._row_kernels import Settings as KernelSettings
from focalkern.ops._row_loss import needs_float64
from focalkern.ops._vocab_slices import RowStatistics, Settings, Split, refuse_second_derivatives
from focalkern.ops.row_sums import row_sums

__all__ = [
    "Shares",
    "SoftRows",
    "Terms",
    "label_statistics",
    "soft_gradients",
    "soft_losses",
    "soft_losses_of_slices",
]


class Shares(NamedTuple):
    """Targets and weights of a slice, before smoothing."""

    target: Tensor | None  # [n, C_r] class probabilities; None for the labels of a Split
    weight: Tensor | None  # [C_r] class weights
    needs_target: bool  # whether the class probabilities need a gradient
    row_weight: Tensor | None  # [n] weights of the rows in the mean and in the z-loss

    @classmethod
    def of(
        cls, target: Tensor | None, weight: Tensor | None, classes: int, split: Split, needs_target: bool = False
    ) -> "Shares":
        """The shares of this rank's slice; ``weight`` [C] has the classes of all ranks."""
        rows = split.row_weights(None if target is not None else weight, torch.float64)
        if weight is None:
            return cls(target, None, needs_target, rows)
        here = weight[split.offset + torch.arange(classes, device=weight.device)]
        return cls(target, here, needs_target, rows)

    def at(self, rows: slice | Tensor) -> "Shares":
        target, weight = (None if t is None else t[rows] for t in (self.target, self.row_weight))
        return Shares(target, self.weight, self.needs_target, weight)


class Terms(NamedTuple):
    """The settings of the terms l(p)."""

    gamma: Tensor  # [], [n], or [n_bins] of a table
    edges: Tensor | None  # [n_bins + 1] of a table
    needs_gamma: bool  # whether the derivative in gamma is wanted
    kind: int
    label_smoothing: float
    detach_modulation: bool

    @classmethod
    def of(cls, settings: Settings, gamma: Tensor | None, needs_gamma: bool) -> "Terms":
        """``gamma`` [] or [n] replaces the gamma of the settings."""
        edges, values = None, settings.gamma if gamma is None else gamma
        if isinstance(values, GammaTable):
            edges, values = values.edges, values.gammas.detach()
        elif not isinstance(values, Tensor):
            values = torch.zeros((), dtype=torch.float64, device="cpu") + values  # not a constant of the graph
        needs_gamma = needs_gamma and not settings.detach_modulation  # the derivative of a constant is 0
        return cls(values, edges, needs_gamma, settings.kind, settings.label_smoothing, settings.detach_modulation)

    def at(self, rows: slice | Tensor) -> "Terms":
        per_row = self.edges is None and self.gamma.dim() > 0
        return self._replace(gamma=self.gamma[rows]) if per_row else self

    @property
    def settings(self) -> KernelSettings:
        return KernelSettings(-100, 0.0, self.detach_modulation, kind=self.kind)


class SoftRows(NamedTuple):
    """Float64 numbers [n] that the gradient needs of each row."""

    top: Tensor  # the largest logit of all ranks
    log_total: Tensor  # log sum_j exp(z_j - top)
    log_rest: Tensor  # the same of the classes of the other ranks
    slope: Tensor  # the part of G of the other ranks

    def at(self, rows: slice | Tensor) -> "SoftRows":
        return SoftRows(*(values[rows] for values in self))


def soft_losses(
    z: Tensor, split: Split, shares: Shares, terms: Terms, z_loss: float
) -> tuple[Tensor, SoftRows, Tensor, tuple[Tensor, Tensor]]:
    """Losses, the numbers for the gradients, and dL/dgamma, all [n], of the rows [n, C_r] of a chunk; and what
    ``row_sums`` gives for it."""
    rows, found = _softmax(z, split.group, _dtype_of(z, shares, terms))
    if torch.compiler.is_compiling():
        sums = torch.ops.focalkern.vocab_soft_sums(z, *_flat(split, shares, rows, terms))
    else:
        sums = _sums_of_slice(z, split, shares, rows, terms)
    slope = sums[1].clone()
    losses, slope_sum, of_gamma = all_reduce(sums, "sum", split.group).unbind()
    if z_loss and shares.row_weight is not None:
        lse = torch.where(split.counts, rows.top + rows.log_total, 0.0)
        losses = losses + z_loss * shares.row_weight * lse.square()
        slope_sum = slope_sum - 2 * z_loss * shares.row_weight * lse
    return losses, rows._replace(slope=slope_sum - slope), of_gamma, found


def _sums_of_slice(z: Tensor, split: Split, shares: Shares, rows: SoftRows, terms: Terms) -> Tensor:
    """The slice's part [3, n] of the losses, of G and of dL/dgamma."""
    sums = torch.zeros(3, len(z), dtype=torch.float64, device=z.device)
    for block, here, inner in _whole_rows(z, split, shares, rows, terms):
        losses, saved = losses_of_rows(inner, terms.settings)
        needed = (True, False, terms.needs_gamma)
        grad, _, of_gamma = gradients_of_rows(torch.ones_like(losses), inner, terms.settings, saved, needed)
        p_rest = (here.log_rest - here.log_total).exp()
        sums[0, block] = losses.double()
        # Where p underflows, so do the probabilities of all classes of the other ranks, which G multiplies.
        sums[1, block] = torch.where(p_rest > 0, -grad[:, -1] / p_rest, 0.0)
        if terms.needs_gamma:
            sums[2, block] = of_gamma.double()
    nan = torch.where(split.legal, 0.0, torch.nan)  # a label out of range makes its row NaN
    return torch.where(split.counts, sums + nan, 0.0)


def _dtype_of(z: Tensor, shares: Shares, terms: Terms) -> torch.dtype:
    """The dtype of the computation."""
    target = z if shares.target is None else shares.target
    is_wide = target.dtype == torch.float64 or needs_float64(z, target, terms.label_smoothing)
    return torch.float64 if is_wide else compute_dtype(z.dtype)


def _whole_rows(
    z: Tensor, split: Split, shares: Shares, rows: SoftRows, terms: Terms
) -> Iterator[tuple[slice, SoftRows, Block]]:
    """Block by block, the log-probabilities of the slice's classes and of all other classes together, and their shares
    w t in the loss, both [n, C_r + 1] in the same buffer."""
    e, classes, real = terms.label_smoothing, z.shape[1], _dtype_of(z, shares, terms)
    of_all, buffer = e / split.classes.to(real), None
    for block in blocks(z) if classes else ():
        here, of_block = rows.at(block), split.at(block)
        n, shift = len(here.top), here.log_total.to(real)
        if buffer is None:  # no block is larger than the first
            buffer = torch.zeros(2, n, classes + 1, dtype=real, device=z.device)
        logits, share = buffer[:, :n]
        torch.sub(z[block], here.top.to(real).unsqueeze(1), out=logits[:, :-1]).sub_(shift.unsqueeze(1))
        logits[:, -1] = here.log_rest - shift
        if shares.target is None:
            share[:, :-1] = (of_all * of_block.counts).unsqueeze(1)
            share.scatter_add_(1, of_block.label.unsqueeze(1), (1.0 - e) * of_block.owned.to(real).unsqueeze(1))
        else:
            torch.mul(shares.target[block], 1.0 - e, out=share[:, :-1]).add_(of_all)
        if shares.weight is not None:
            share[:, :-1].mul_(shares.weight)
        gamma = terms.at(block).gamma.detach()
        if terms.needs_gamma and terms.edges is None:
            gamma = gamma.to(z.device).expand(n)
        yield block, here, Block(logits, share, gamma, terms.edges)


def soft_gradients(
    z: Tensor, split: Split, shares: Shares, rows: SoftRows, terms: Terms, upstream: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """The gradients of the slice's logits and class probabilities, block by block, in the dtype of the computation."""
    for block, here, inner in _whole_rows(z, split, shares, rows, terms):
        scale, real = upstream[block], inner.logits.dtype
        saved = losses_of_rows(inner, terms.settings)[1]
        needed = (True, shares.needs_target, False)
        grad, of_target, _ = gradients_of_rows(scale.to(real), inner, terms.settings, saved, needed)
        grad, p = grad[:, :-1], inner.logits[:, :-1].exp_()
        rounding = (here.log_total.to(real) - here.log_total).exp()  # p has the rounded log_total
        grad.addcmul_(p, (-scale * here.slope * rounding).to(real).unsqueeze(1))
        grad.masked_fill_((scale == 0).unsqueeze(1), 0.0)
        yield block, grad, _of_shares(of_target[:, :-1], shares, terms, scale) if shares.needs_target else None


def _of_shares(gradient: Tensor, shares: Shares, terms: Terms, scale: Tensor) -> Tensor:
    """The gradient of class probabilities from that of their shares."""
    factor = torch.full((gradient.shape[1],), 1.0 - terms.label_smoothing, dtype=gradient.dtype, device=gradient.device)
    if shares.weight is not None:
        factor.mul_(shares.weight)
    return torch.where((scale == 0).unsqueeze(1) | (factor == 0), 0.0, gradient * factor)


def label_statistics(z: Tensor, split: Split, rows: SoftRows) -> RowStatistics:
    """The statistics of the labels from the softmax of a loss: one reduction, and no pass over the classes."""
    z_y = z.gather(1, split.label.unsqueeze(1)).squeeze(1).double() if z.shape[1] else torch.zeros_like(rows.top)
    z_y = all_reduce(torch.where(split.owned, z_y, -torch.inf), "max", split.group)
    log_p = torch.where(split.legal, (z_y - rows.top) - rows.log_total, torch.nan)
    margin = torch.log(-torch.expm1(log_p)) - log_p
    return RowStatistics(rows.top, rows.log_total, margin, rows.top + rows.log_total)


def _softmax(z: Tensor, group: Any, real: torch.dtype) -> tuple[SoftRows, tuple[Tensor, Tensor]]:
    """The normalisation of the softmax over the classes of all ranks (``slope`` is 0), and the sums of the slice."""
    found = row_sums(z.double() if real == torch.float64 else z)
    everywhere = all_gather(found[0][:2].reshape(-1), group)
    tops, rests = everywhere.reshape(everywhere.shape[0], 2, z.shape[0]).unbind(1)
    top = tops.amax(0)
    # `rests` exclude the largest logit of a rank. Add it to the others unless it is the largest of all ranks.
    scale = torch.where(tops == -torch.inf, 0.0, (tops - top).exp())
    holds = tops == top
    others = (rests * scale + torch.where(holds, 0.0, scale)).sum(0) + (holds.sum(0) - 1)
    is_here = torch.arange(len(tops), device=z.device).unsqueeze(1) == group.rank()
    of_others = torch.where(is_here, 0.0, scale * (1.0 + rests)).sum(0)
    return SoftRows(top, others.log1p(), of_others.log(), torch.zeros_like(top)), found


def soft_losses_of_slices(
    logits: Tensor,
    target: Tensor | None,
    gamma: Tensor | None,
    split: Split,
    weight: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, SoftRows, tuple[Tensor, Tensor]]:
    """Losses [N] in float64 from this rank's slice of the logits, differentiable in logits, target and gamma; the
    softmax; and the ``row_sums`` of the slice. ``gamma`` [] or [N] replaces the gamma of the settings."""
    records = torch.is_grad_enabled()
    needs_target = records and target is not None and target.requires_grad
    shares = Shares.of(target, weight, logits.shape[1], split, needs_target)
    terms = Terms.of(settings, gamma, records and gamma is not None and gamma.requires_grad)
    # In single arguments, of which a compiled graph knows which are tensors.
    found = _SoftLosses.apply(logits, *shares, *terms, settings.op, settings.z_loss, *split)  # type: ignore[no-untyped-call]
    return found[0], SoftRows(*found[1:5]), found[5:]


class _SoftLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        shares, terms, (op, z_loss) = Shares(*arguments[:4]), Terms(*arguments[4:10]), arguments[10:12]
        split = Split(*arguments[12:])
        losses, rows, of_gamma, sums = soft_losses(logits, split, shares, terms, z_loss)
        ctx.save_for_backward(
            logits, shares.target, shares.weight, terms.gamma, terms.edges, of_gamma, *split[1:], *rows
        )
        ctx.op, ctx.needs_target, ctx.terms = op, shares.needs_target, tuple(terms[2:])
        ctx.mark_non_differentiable(*rows, *sums)
        return losses, *rows, *sums

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *unused: Tensor) -> Any:
        refuse_second_derivatives(ctx.op)
        logits, target, weight, gamma, edges, of_gamma, *others = ctx.saved_tensors
        split, rows = Split(None, *others[:7]), SoftRows(*others[7:])
        shares, terms = Shares(target, weight, ctx.needs_target, None), Terms(gamma, edges, *ctx.terms)
        if torch.compiler.is_compiling():
            flat = _flat(split, shares, rows, terms)
            grad, of_target = torch.ops.focalkern.vocab_soft_gradient(upstream, rows.slope, logits, *flat)
        else:
            grad, of_target = _gradients_of_slice(upstream, logits, split, shares, rows, terms)
        of_number = (upstream * of_gamma).sum_to_size(gamma.shape).to(gamma.dtype) if terms.needs_gamma else None
        return grad, of_target if ctx.needs_target else None, None, None, None, of_number, *(None for _ in range(15))


def _gradients_of_slice(
    upstream: Tensor, z: Tensor, split: Split, shares: Shares, rows: SoftRows, terms: Terms
) -> tuple[Tensor, Tensor]:
    """The gradients of logits and class probabilities; that of the latter is empty if it is not needed."""
    grad = torch.empty_like(z, memory_format=torch.contiguous_format)
    of_shares = z.new_empty(0) if shares.target is None or not shares.needs_target else torch.empty_like(shares.target)
    for block, part, of_target in soft_gradients(z, split, shares, rows, terms, upstream):
        grad[block] = part.to(grad.dtype)
        if of_target is not None:
            of_shares[block] = of_target.to(of_shares.dtype)
    return grad, of_shares


# ---- the parts of a slice as operators, which a compiled graph holds instead of their blocks -------------------------


def _flat(split: Split, shares: Shares, rows: SoftRows, terms: Terms) -> tuple[Any, ...]:
    """The arguments of the operators after the logits."""
    of_split = (split.label, split.owned, split.counts, split.legal, split.classes)
    return *of_split, *shares[:3], *rows[:3], *terms


def _unflat(*flat: Any) -> tuple[Split, Shares, SoftRows, Terms]:
    label, owned, counts, legal, classes, target, weight, needs_target, top, log_total, log_rest, *of_terms = flat
    split = Split(None, label, label, owned, counts, legal, classes, classes)
    shares = Shares(target, weight, needs_target, None)
    return split, shares, SoftRows(top, log_total, log_rest, top), Terms(*of_terms)


@torch.library.custom_op("focalkern::vocab_soft_sums", mutates_args=())
def _sums_operator(
    z: Tensor,
    label: Tensor,
    owned: Tensor,
    counts: Tensor,
    legal: Tensor,
    classes: Tensor,
    target: Tensor | None,
    weight: Tensor | None,
    needs_target: bool,
    top: Tensor,
    log_total: Tensor,
    log_rest: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    needs_gamma: bool,
    kind: int,
    label_smoothing: float,
    detach_modulation: bool,
) -> Tensor:
    of_split, of_rows = (label, owned, counts, legal, classes), (top, log_total, log_rest)
    of_terms = (gamma, edges, needs_gamma, kind, label_smoothing, detach_modulation)
    return _sums_of_slice(z, *_unflat(*of_split, target, weight, needs_target, *of_rows, *of_terms))


@_sums_operator.register_fake
def _(z: Tensor, *flat: Any) -> Tensor:
    return z.new_empty(3, z.shape[0], dtype=torch.float64)


@torch.library.custom_op("focalkern::vocab_soft_gradient", mutates_args=())
def _gradient_operator(
    upstream: Tensor,
    slope: Tensor,
    z: Tensor,
    label: Tensor,
    owned: Tensor,
    counts: Tensor,
    legal: Tensor,
    classes: Tensor,
    target: Tensor | None,
    weight: Tensor | None,
    needs_target: bool,
    top: Tensor,
    log_total: Tensor,
    log_rest: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    needs_gamma: bool,
    kind: int,
    label_smoothing: float,
    detach_modulation: bool,
) -> tuple[Tensor, Tensor]:
    of_split, of_rows = (label, owned, counts, legal, classes), (top, log_total, log_rest)
    of_terms = (gamma, edges, needs_gamma, kind, label_smoothing, detach_modulation)
    split, shares, rows, terms = _unflat(*of_split, target, weight, needs_target, *of_rows, *of_terms)
    return _gradients_of_slice(upstream, z, split, shares, rows._replace(slope=slope), terms)


@_gradient_operator.register_fake
def _(upstream: Tensor, slope: Tensor, z: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    target, needs_target = flat[5], flat[7]
    of_target = z.new_empty(0) if target is None or not needs_target else torch.empty_like(target)
    return torch.empty_like(z, memory_format=torch.contiguous_format), of_target
