"""Soft targets over classes that are split over ranks: label smoothing and class probabilities.

With t the target probabilities, w the class weights and l(p) = -f(p) log p, a row's loss is
L = sum_i w_i t_i l(p_i), and

    dL/dz_j = s_j - p_j G,    s_j = w_j t_j dl/dlog p_j,    G = sum_i s_i

Every rank sums over its classes (:mod:`focalkern.ops.row_sums`, which also gives the statistics of the rows). Two
reductions give the softmax of all classes (MAX of the largest logit, SUM of the exponentials of the others), and a
third gives the loss, G and dL/dgamma. Each term l(p) is the loss of two classes with
the logits (log p - log(1 - p), 0), in float64, block by block. For the largest class, 1 - p is the sum of the other
probabilities, which does not cancel.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focalkern.gamma import GammaTable
from focalkern.ops._collectives import all_reduce
from focalkern.ops._linear_chunks import blocks
from focalkern.ops._row_kernels import Settings as KernelSettings
from focalkern.ops._row_kernels import losses_of_margins
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
            values = torch.zeros((), dtype=torch.float64) + values  # not a constant of the graph
        needs_gamma = needs_gamma and not settings.detach_modulation  # the derivative of a constant is 0
        return cls(values, edges, needs_gamma, settings.kind, settings.label_smoothing, settings.detach_modulation)

    def at(self, rows: slice | Tensor) -> "Terms":
        per_row = self.edges is None and self.gamma.dim() > 0
        return self._replace(gamma=self.gamma[rows]) if per_row else self

    def slopes(self, margin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """l, dl/dd and dl/dgamma, all [n, C_r], of classes with d = log(1 - p) - log p."""
        gamma: Tensor | GammaTable = self.gamma.detach()
        if self.edges is not None:
            gamma = GammaTable._unchecked(self.edges, self.gamma)
        elif self.needs_gamma or self.gamma.dim() > 0:
            of_row = self.gamma.detach().double()
            gamma = (of_row.unsqueeze(1) if of_row.dim() > 0 else of_row).expand_as(margin).reshape(-1)
        kernel = KernelSettings(-100, 0.0, self.detach_modulation, kind=self.kind)
        found = losses_of_margins(margin.reshape(-1), gamma, kernel, self.needs_gamma)
        return found[0].reshape(margin.shape), found[1].reshape(margin.shape), found[2].reshape(margin.shape)


class SoftRows(NamedTuple):
    """Float64 numbers [n] that the gradient needs of each row."""

    top: Tensor  # the largest logit of all ranks
    log_total: Tensor  # log sum_j exp(z_j - top)
    log_u_top: Tensor  # log(1 - p) of the largest logit
    slope: Tensor  # G

    def at(self, rows: slice | Tensor) -> "SoftRows":
        return SoftRows(*(values[rows] for values in self))


def soft_losses(
    z: Tensor, split: Split, shares: Shares, terms: Terms, z_loss: float
) -> tuple[Tensor, SoftRows, Tensor, tuple[Tensor, Tensor]]:
    """Losses, the numbers for the gradients, and dL/dgamma, all [n], of the rows [n, C_r] of a chunk; and what
    ``row_sums`` gives for it."""
    rows, found = _softmax(z, split.group)
    if torch.compiler.is_compiling():
        sums = torch.ops.focalkern.vocab_soft_sums(z, *_flat(split, shares, rows, terms))
    else:
        sums = _sums_of_slice(z, split, shares, rows, terms)
    losses, slope_sum, of_gamma = all_reduce(sums, "sum", split.group).unbind()
    if z_loss and shares.row_weight is not None:
        lse = torch.where(split.counts, rows.top + rows.log_total, 0.0)
        losses = losses + z_loss * shares.row_weight * lse.square()
        slope_sum = slope_sum - 2 * z_loss * shares.row_weight * lse
    return losses, SoftRows(*rows[:3], slope_sum), of_gamma, found


def _sums_of_slice(z: Tensor, split: Split, shares: Shares, rows: SoftRows, terms: Terms) -> Tensor:
    """The slice's part [3, n] of the losses, of G and of dL/dgamma."""
    sums = torch.zeros(3, len(z), dtype=torch.float64, device=z.device)
    for block in blocks(z) if z.shape[1] else ():
        of_block = (split.at(block), shares.at(block), rows.at(block), terms.at(block))
        sums[0, block], slope, _, sums[2, block] = _terms(z[block], *of_block)
        sums[1, block] = slope.sum(1)
    return sums


def soft_gradients(
    z: Tensor, split: Split, shares: Shares, rows: SoftRows, terms: Terms, upstream: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """The gradients of the slice's logits and class probabilities, block by block, in float64."""
    for block in blocks(z) if z.shape[1] else ():
        here = rows.at(block)
        _, slope, of_target, _ = _terms(z[block], split.at(block), shares.at(block), here, terms.at(block))
        p = ((z[block].double() - here.top.unsqueeze(1)) - here.log_total.unsqueeze(1)).exp()
        scale = upstream[block].unsqueeze(1)
        grad = torch.where(scale == 0, 0.0, scale * (slope - p * here.slope.unsqueeze(1)))
        yield block, grad, None if of_target is None else torch.where(scale == 0, 0.0, scale * of_target)


def label_statistics(z: Tensor, split: Split, rows: SoftRows) -> RowStatistics:
    """The statistics of the labels from the softmax of a loss: one reduction, and no pass over the classes."""
    z_y = z.gather(1, split.label.unsqueeze(1)).squeeze(1).double() if z.shape[1] else torch.zeros_like(rows.top)
    z_y = all_reduce(torch.where(split.owned, z_y, -torch.inf), "max", split.group)
    log_p = torch.where(split.legal, (z_y - rows.top) - rows.log_total, torch.nan)
    log_u = torch.where(z_y == rows.top, rows.log_u_top, torch.log1p(-log_p.exp()))
    return RowStatistics(rows.top, rows.log_total, log_u - log_p, rows.top + rows.log_total)


def _softmax(z: Tensor, group: Any) -> tuple[SoftRows, tuple[Tensor, Tensor]]:
    """The normalisation of the softmax over the classes of all ranks (``slope`` is 0), and the sums of the slice."""
    local = torch.ops.focalkern.vocab_soft_softmax if torch.compiler.is_compiling() else _sums_in_float64
    sums_of_slice, index = local(z)
    top, rest, _ = sums_of_slice
    largest = all_reduce(top.clone(), "max", group)
    # `rest` excludes this rank's largest logit. Add it to the others unless it is the largest of all ranks.
    scale = torch.where(top == -torch.inf, 0.0, (top - largest).exp())
    holds = top == largest
    sums = torch.stack([rest * scale + torch.where(holds, 0.0, scale), holds.double()])
    others, holders = all_reduce(sums, "sum", group).unbind()
    others = others + (holders - 1.0)
    log_total = others.log1p()
    rows = SoftRows(largest, log_total, others.log() - log_total, torch.zeros_like(top))
    return rows, (sums_of_slice, index)


def _sums_in_float64(z: Tensor) -> tuple[Tensor, Tensor]:
    """``row_sums`` with terms in float64: for label smoothing near 1, p_j - t_j cancels."""
    found = [row_sums(z[block].double()) for block in blocks(z)]
    if not found:
        return row_sums(z.double())
    return torch.cat([sums for sums, _ in found], dim=1), torch.cat([index for _, index in found])


def _terms(
    z: Tensor, split: Split, shares: Shares, rows: SoftRows, terms: Terms
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """For a block: the slice's part of the losses [n], s [n, C_r], and the derivatives in the class probabilities
    [n, C_r] (None if not needed) and in gamma [n]."""
    top, log_total, log_u_top = (values.unsqueeze(1) for values in rows[:3])
    logits = z.double()
    log_p = (logits - top) - log_total
    log_u = torch.where(logits == top, log_u_top, torch.log1p(-log_p.exp()))
    loss, of_margin, of_gamma = terms.slopes(log_u - log_p)
    # d log p / dd = -u. If u underflows to 0, so do all other p_j, and s - p G cancels for any s.
    u = log_u.exp()
    of_log_p = torch.where(u > 0, -of_margin / u, torch.where(of_margin.isnan(), of_margin, 0.0))
    e, target = terms.label_smoothing, shares.target
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
    label, owned, counts, legal, classes, target, weight, needs_target, top, log_total, log_u_top, *of_terms = flat
    split = Split(None, label, label, owned, counts, legal, classes, classes)
    shares = Shares(target, weight, needs_target, None)
    return split, shares, SoftRows(top, log_total, log_u_top, top), Terms(*of_terms)


@torch.library.custom_op("focalkern::vocab_soft_softmax", mutates_args=())
def _softmax_operator(z: Tensor) -> tuple[Tensor, Tensor]:
    return _sums_in_float64(z)


@_softmax_operator.register_fake
def _(z: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(3, z.shape[0], dtype=torch.float64), z.new_empty(z.shape[:1], dtype=torch.int64)


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
    log_u_top: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    needs_gamma: bool,
    kind: int,
    label_smoothing: float,
    detach_modulation: bool,
) -> Tensor:
    of_split, of_rows = (label, owned, counts, legal, classes), (top, log_total, log_u_top)
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
    log_u_top: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    needs_gamma: bool,
    kind: int,
    label_smoothing: float,
    detach_modulation: bool,
) -> tuple[Tensor, Tensor]:
    of_split, of_rows = (label, owned, counts, legal, classes), (top, log_total, log_u_top)
    of_terms = (gamma, edges, needs_gamma, kind, label_smoothing, detach_modulation)
    split, shares, rows, terms = _unflat(*of_split, target, weight, needs_target, *of_rows, *of_terms)
    return _gradients_of_slice(upstream, z, split, shares, rows._replace(slope=slope), terms)


@_gradient_operator.register_fake
def _(upstream: Tensor, slope: Tensor, z: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    target, needs_target = flat[5], flat[7]
    of_target = z.new_empty(0) if target is None or not needs_target else torch.empty_like(target)
    return torch.empty_like(z, memory_format=torch.contiguous_format), of_target
