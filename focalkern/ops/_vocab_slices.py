"""Code shared by the two losses whose classes are split over ranks.

A row's loss depends on the logits z only through d = (log-sum-exp of the other classes) - z_y: log p = -softplus(d),
log u = d - softplus(d). Two reductions of one or two numbers per row give every rank the same d. Each rank then writes
its slice of dL/dz_j = c (p_j - [j = y]):

    MAX   over ranks of (log-sum-exp of the rank's other classes; the target's logit, -inf where another rank has it)
    SUM   over ranks of exp(the rank's log-sum-exp - the largest)

The kernels of :func:`focal_loss` with gamma = 0 compute the statistics and the gradient of a slice. The loss as a
function of d is the loss of two classes with the logits (-d, 0), in float64, for every kind of gamma.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focalkern._checks import dense, finite, flag, label, label_range, reduction_code, smoothing
from focalkern._types import FLOATS, LABELS
from focalkern.gamma import GammaTable
from focalkern.ops._collectives import ALONE, all_gather, all_reduce, group_of
from focalkern.ops._linear_chunks import blocks, is_plain
from focalkern.ops._row_kernels import Settings as KernelSettings
from focalkern.ops._row_kernels import losses_of_margins, slice_gradient, slice_statistics
from focalkern.ops._row_loss import row_loss, warn_if_steep

__all__ = [
    "RowStatistics",
    "Settings",
    "Split",
    "check_settings",
    "gamma_rows",
    "gradient",
    "gradients",
    "refuse_second_derivatives",
    "row_losses",
    "slice_of",
    "slopes",
    "statistics",
    "weighted",
]


@dataclass(frozen=True)
class Settings:
    op: str
    kind: int
    gamma: float | Tensor | GammaTable
    epsilon: float
    ignore_index: int
    label_smoothing: float
    detach_modulation: bool
    z_loss: float = 0.0


def check_settings(
    op: str,
    kind: int,
    target: Tensor,
    leading: torch.Size,
    classes: int,
    gamma: float | Tensor | GammaTable,
    epsilon: float,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    z_loss: float = 0.0,
) -> Settings:
    """Checks labels [...] or class probabilities [..., C_r], and every argument except the logits."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{op}: torch.func does not transform a loss over several ranks")
    reduction_code(op, reduction)
    soft = target.is_floating_point()
    if target.dtype not in (FLOATS if soft else LABELS):
        raise TypeError(
            f"{op}: target must be int64, int32 or uint8 labels or floating-point class probabilities, got "
            f"{target.dtype}"
        )
    expected = [*leading, classes] if soft else list(leading)
    if list(target.shape) != expected:
        raise ValueError(f"{op}: target must be {expected}, got {list(target.shape)}")
    if soft and ignore_index >= 0:
        raise ValueError(
            f"{op}: ignore_index must be negative (unused) for a target of class probabilities, got {ignore_index}"
        )
    smoothing(op, label_smoothing)
    if isinstance(gamma, Tensor):
        dense(op, "gamma", gamma)
        if gamma.dtype not in FLOATS:
            raise TypeError(f"{op}: gamma must be a float, a floating-point tensor or a GammaTable, got {gamma.dtype}")
        if gamma.device != target.device and not (gamma.dim() == 0 and gamma.device.type == "cpu"):
            raise ValueError(f"{op}: gamma must be on the device of target, {target.device}, got {gamma.device}")
    elif not isinstance(gamma, GammaTable) and not torch.compiler.is_compiling():  # whose graph has any value
        gamma = finite(op, "gamma", gamma, "a number, a tensor or a GammaTable")
        warn_if_steep(op, gamma, stacklevel=4)
    detach_modulation = flag(op, "detach_modulation", detach_modulation)
    ignore_index = label(op, "ignore_index", ignore_index)
    return Settings(op, kind, gamma, epsilon, ignore_index, float(label_smoothing), detach_modulation, z_loss)


class Split(NamedTuple):
    """The labels of the rows, relative to this rank's slice of the classes."""

    group: Any
    target: Tensor  # [N] labels among all classes
    label: Tensor  # [N] labels within the slice, 0 if another rank has the class
    owned: Tensor  # [N] bool: whether the slice contains the label
    counts: Tensor  # [N] bool: whether the label is not ignored
    legal: Tensor  # [N] bool: whether the label is a class of any rank, or ignored
    offset: Tensor  # [] index of the first class of the slice among all classes
    classes: Tensor  # [] number of classes of all ranks

    @classmethod
    def of(
        cls, op: str, target: Tensor, classes: int, settings: Settings, group: Any, shape: tuple[int, int]
    ) -> "Split":
        """Gathers the sizes of all slices. ``shape`` (rows, chunk_rows) must be the same on all ranks."""
        group = group_of(op, group)
        here = torch.tensor([classes, *shape], dtype=torch.int64, device=target.device)
        sizes = all_gather(here, group)
        offset = sizes[: group.rank(), 0].sum()
        total = sizes[:, 0].sum()
        labels = target.long()
        counts = labels != settings.ignore_index
        legal = ~counts | ((labels >= 0) & (labels < total))
        if _looks_at(target):
            if bool((sizes[:, 1:] != sizes[0, 1:]).any()):
                raise ValueError(
                    f"{op}: every rank must have the same rows and chunk_rows, got [rows, chunk_rows] of the ranks "
                    f"{sizes[:, 1:].tolist()}"
                )
            label_range(op, target, int(total), settings.ignore_index)
        local = labels - offset
        owned = counts & (local >= 0) & (local < classes)
        return cls(group, target, torch.where(owned, local, 0), owned, counts, legal, offset, total)

    @classmethod
    def whole(cls, target: Tensor, classes: int, ignore_index: int) -> "Split":
        """The split of a process that has all classes. It does not synchronise."""
        labels = target.long()
        counts = labels != ignore_index
        inside = (labels >= 0) & (labels < classes)
        first, total = (torch.full((), size, dtype=torch.int64, device=target.device) for size in (0, classes))
        owned = counts & inside
        return cls(ALONE, target, torch.where(owned, labels, 0), owned, counts, ~counts | inside, first, total)

    def at(self, rows: slice | Tensor) -> "Split":
        return Split(
            self.group,
            self.target[rows],
            self.label[rows],
            self.owned[rows],
            self.counts[rows],
            self.legal[rows],
            self.offset,
            self.classes,
        )

    def row_weights(self, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The weight of each row [N] in the loss and in the mean: 0 if it is ignored."""
        if weight is None:
            return self.counts.to(dtype)
        index = torch.where(self.counts & self.legal, self.target, 0).long()
        return torch.where(self.counts, weight.to(dtype)[index], 0.0)


def weighted(row_weights: Tensor, losses: Tensor) -> Tensor:
    """The losses times the weights of their rows; 0 for a weight of 0, even if the loss is infinite."""
    return torch.where((row_weights == 0) & (losses == torch.inf), 0.0, row_weights * losses)


def slice_of(label: Tensor, owned: Tensor) -> Split:
    """A Split with only the fields that the gradient of a slice needs."""
    return Split(None, label, label, owned, owned, owned, label, label)


class RowStatistics(NamedTuple):
    """Four float64 numbers per row: ``top``, the slice's largest logit or the label's logit; ``log_sum``, log of the
    sum of exp(z_j - top) over all classes; ``margin``, d; and ``lse``, the log-sum-exp. ``margin`` and ``lse`` have the
    same bits on every rank."""

    top: Tensor
    log_sum: Tensor
    margin: Tensor
    lse: Tensor

    @classmethod
    def saved(cls, top: Tensor, log_sum: Tensor, margin: Tensor) -> "RowStatistics":
        """The statistics from the three saved ones, for the gradient."""
        return cls(top, log_sum, margin, top + log_sum)


def statistics(z: Tensor, split: Split, sums: tuple[Tensor, Tensor] | None = None) -> RowStatistics:
    """The statistics of the rows [n, C_r] of a chunk, by two reductions over the ranks; ``sums`` are those of
    ``row_sums`` for the chunk.

    Logarithms are added only to differences of logits: added to a logit of 1e20, they would be rounded away.
    """
    if sums is not None:
        top, log_rest, z_y = _statistics_of_sums(z, split, sums[0])
    elif torch.compiler.is_compiling():
        top, log_rest, z_y = torch.ops.focalkern.vocab_slice_statistics(z, split.label, split.owned)
    else:
        top, log_rest, z_y = _statistics_of_slice(z, split.label, split.owned)
    # All classes of the slice, without the target, are -inf.
    empty = log_rest == -torch.inf
    rest = torch.where(empty, -torch.inf, top + log_rest)
    # A label out of range makes its row NaN.
    z_y = torch.where(split.legal, torch.maximum(z_y, torch.where(split.counts, -torch.inf, 0.0)), torch.nan)
    largest = all_reduce(torch.stack([rest, z_y]), "max", split.group)
    shift = torch.where(largest[0].isfinite(), largest[0], 0.0)
    total = all_reduce(torch.where(empty, 0.0, ((top - shift) + log_rest).exp()), "sum", split.group)
    log_rest = total.log()
    z_y = torch.where(split.legal, largest[1], torch.nan)
    # If the target is the only possible class, d is -inf and the loss would be NaN. With d = -1e4 the loss is 0. The
    # number has no name, because a graph of dynamic shapes takes a named float as an input.
    alone = (total == 0) & z_y.isfinite()
    shift, log_rest = torch.where(alone, z_y, shift), torch.where(alone, -1e4, log_rest)
    margin = (shift - z_y) + log_rest
    top = torch.where(top == -torch.inf, shift, top)
    # The log-sum-exp of all classes, and its difference to `top`. The larger of the target's logit and the log-sum-exp
    # of the others is the base, so that nothing cancels.
    softplus = torch.nn.functional.softplus
    of_rest = (shift - top) + log_rest + softplus(-margin)
    of_target = (z_y - top) + softplus(margin)
    log_sum = torch.where(margin > 0, of_rest, of_target)
    lse = torch.where(margin > 0, shift + (log_rest + softplus(-margin)), z_y + softplus(margin))
    return RowStatistics(top, log_sum, margin, lse)


def _statistics_of_slice(z: Tensor, label: Tensor, owned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three float64 numbers per row: m, the largest logit or the label's logit; the logarithm of the sum of
    exp(z_j - m) over the classes of the slice except the target; the target's logit, -inf if another slice has it."""
    parts = [_statistics_of_block(z[block], label[block], owned[block]) for block in blocks(z)] if z.shape[1] else []
    if not parts:
        nothing = torch.full(z.shape[:1], -torch.inf, dtype=torch.float64, device=z.device)
        return nothing, nothing.clone(), nothing.clone()
    top, log_rest, z_y = (torch.cat(values) for values in zip(*parts, strict=True))
    return top, log_rest, z_y


def _statistics_of_sums(z: Tensor, split: Split, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_statistics_of_slice`, without a pass over the classes."""
    top, rest, _ = sums
    z_y = z.gather(1, split.label.unsqueeze(1)).squeeze(1).double() if z.shape[1] else torch.full_like(top, -torch.inf)
    # 1 + rest has the terms of all classes. Without the label's it is at least 1, or the label is the largest class.
    others = rest + torch.where(split.owned, 1.0 - (z_y - top).exp(), 1.0)
    log_rest = torch.where(top == -torch.inf, -torch.inf, others.log())  # NaN in a row with NaN, as `rest`
    return top, log_rest, torch.where(split.owned, z_y, -torch.inf)


def _statistics_of_block(z: Tensor, label: Tensor, owned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    top, log_sum, log_u = slice_statistics(z, label)
    # In the slice with the target, adding log u removes the target from the sum.
    log_rest = torch.where(owned, log_sum + log_u, log_sum)
    z_y = z.gather(1, label.unsqueeze(1)).squeeze(1).double()
    # A NaN must reach the reduction by SUM, because a reduction by MAX may drop it.
    log_rest = torch.where(owned & z_y.isnan(), torch.nan, log_rest)
    missing = top == -torch.inf
    if not is_plain(z) or bool(missing.any()):
        log_rest = torch.where(missing & (z.amax(1) == -torch.inf), -torch.inf, log_rest)  # amax keeps a NaN
    return top, log_rest, torch.where(owned, z_y, -torch.inf)


def _looks_at(tensor: Tensor) -> bool:
    """Whether the host may read the tensor's values."""
    return is_plain(tensor)


def row_losses(margin: Tensor, gamma: float | Tensor | GammaTable, settings: Settings) -> Tensor:
    """The loss of d [n] in float64, differentiable in d and gamma."""
    two = torch.stack([-margin, torch.zeros_like(margin)], dim=1)
    first = torch.zeros(margin.shape[0], dtype=torch.int64, device=margin.device)
    return row_loss(
        settings.op,
        settings.kind,
        two,
        first,
        gamma,
        settings.epsilon,
        None,
        -100,
        "none",
        0.0,
        settings.detach_modulation,
    )


def slopes(margin: Tensor, gamma: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dL/dd and dL/dgamma of each row; ``gamma`` [] or [n] replaces the gamma of the settings."""
    kernel = KernelSettings(-100, 0.0, settings.detach_modulation, kind=settings.kind, epsilon=settings.epsilon)
    has_gamma = gamma is not None and not settings.detach_modulation  # the derivative of a constant is 0
    return losses_of_margins(margin, settings.gamma if gamma is None else gamma, kernel, has_gamma)


def gamma_rows(op: str, gamma: float | Tensor | GammaTable, leading: torch.Size) -> float | Tensor | GammaTable:
    """Gamma for each row of the flattened batch; numbers and tables unchanged."""
    if not isinstance(gamma, Tensor) or gamma.dim() == 0:
        return gamma
    try:
        return gamma.expand(leading).reshape(-1)
    except RuntimeError:
        raise ValueError(
            f"{op}: gamma must be broadcastable to the unreduced loss {list(leading)}, got {list(gamma.shape)}"
        ) from None


def gradients(
    z: Tensor, split: Split, rows: RowStatistics, slope: Tensor, of_lse: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """The gradient of the slice, block by block, from dL/dd = ``slope`` and dL/dlse = ``of_lse``, both [n]."""
    if z.shape[1] == 0:
        return
    log_u = torch.nn.functional.logsigmoid(rows.margin)  # not d - softplus(d): torch's softplus is linear above 20
    u = log_u.exp()
    # c = dL/dd / u. If u underflows to 0, so do the p_j of all other classes, and c may be 0.
    scale = torch.where(u > 0, slope / u, torch.where(slope.isnan(), slope, 0.0))
    if of_lse is not None:
        scale = scale + of_lse  # dlse/dz_j = p_j
    for block in blocks(z):
        part, label, owned = z[block], split.label[block], split.owned[block]
        top, log_sum, log_u_here, scale_here = (values[block] for values in (rows.top, rows.log_sum, log_u, scale))
        grad = slice_gradient(scale_here, part, label, top, log_sum, log_u_here)
        # The kernel took class 0 as the label of rows whose target is in another slice; correct that column.
        at = torch.zeros_like(label) if of_lse is None else label
        p = ((part.gather(1, at.unsqueeze(1)).squeeze(1).double() - top) - log_sum).exp()
        without = torch.where(scale_here == 0, 0.0, scale_here * p)
        if of_lse is None:
            of_label = grad[:, 0].double()
        else:
            # At the label dd/dz = -1 and dlse/dz = p.
            slope_here, of_lse_here = slope[block], of_lse[block]
            is_zero = (slope_here == 0) & (of_lse_here == 0)
            of_label = torch.where(is_zero, 0.0, of_lse_here * p - slope_here)
        grad.scatter_(1, at.unsqueeze(1), torch.where(owned, of_label, without).to(grad.dtype).unsqueeze(1))
        yield block, grad


def gradient(z: Tensor, split: Split, rows: RowStatistics, slope: Tensor, of_lse: Tensor | None = None) -> Tensor:
    """The gradient [n, C_r] of the slice."""
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.focalkern.vocab_slice_gradient(slope, of_lse, z, split.label, split.owned, *rows[:3])
        return found
    result = torch.empty_like(z, memory_format=torch.contiguous_format)
    for block, grad in gradients(z, split, rows, slope, of_lse):
        result[block] = grad
    return result


# ---- the computations of a slice as custom operators: a compiled graph does not trace their loops over blocks --------


@torch.library.custom_op("focalkern::vocab_slice_statistics", mutates_args=())
def _statistics_operator(z: Tensor, label: Tensor, owned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _statistics_of_slice(z, label, owned)


@_statistics_operator.register_fake
def _(z: Tensor, label: Tensor, owned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = z.new_empty(z.shape[:1], dtype=torch.float64)
    return rows, torch.empty_like(rows), torch.empty_like(rows)


@torch.library.custom_op("focalkern::vocab_slice_gradient", mutates_args=())
def _gradient_operator(
    slope: Tensor,
    of_lse: Tensor | None,
    z: Tensor,
    label: Tensor,
    owned: Tensor,
    top: Tensor,
    log_sum: Tensor,
    margin: Tensor,
) -> Tensor:
    split = slice_of(label, owned)
    return gradient(z, split, RowStatistics.saved(top, log_sum, margin), slope, of_lse)


@_gradient_operator.register_fake
def _(slope: Tensor, of_lse: Tensor | None, z: Tensor, *rows: Tensor) -> Tensor:
    return torch.empty_like(z, memory_format=torch.contiguous_format)


def refuse_second_derivatives(op: str) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(f"{op}: a loss over several ranks is differentiable once; leave create_graph out")
