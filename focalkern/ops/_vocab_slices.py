"""A loss of rows whose classes are split over ranks: what the two losses over ranks share.

A row's loss depends on the logits z through d = (log-sum-exp of the other classes) - z_y alone: log p = -softplus(d),
log u = d - softplus(d). Two reductions of one or two numbers per row give every rank the same d, and each then writes
its slice of dL/dz_j = c (p_j - [j = y]) by itself:

    MAX   over ranks of (log-sum-exp of the rank's other classes; the target's logit, -inf where another rank has it)
    SUM   over ranks of exp(the rank's log-sum-exp - the largest)

The statistics and the gradient of a slice come from the kernels of :func:`focal_loss` with gamma = 0; the loss of d,
with every kind of gamma, is that of two classes with the logits (-d, 0), in float64.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from focalkern._checks import dense, finite, flag, label, label_range, reduction_code
from focalkern._types import FLOATS, LABELS
from focalkern.gamma import GammaTable
from focalkern.ops._linear_chunks import blocks, is_plain
from focalkern.ops._row_kernels import slice_gradient, slice_statistics
from focalkern.ops.focal_loss import Modulation, check_modulation, focal_loss

__all__ = [
    "RowStatistics",
    "Settings",
    "Split",
    "check_settings",
    "gamma_rows",
    "gradients",
    "outside_graphs",
    "refuse_second_derivatives",
    "row_losses",
    "statistics",
]

_FAR = 1e4  # e^-_FAR is 0, also in float64
_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_graphs(function: _Function) -> _Function:
    """Ends a compiled graph here. (The decorator torch.compiler.disable would import the compiler with this module.)"""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments, **options)
        return function(*arguments, **options)

    return cast(_Function, wrapper)


@dataclass(frozen=True)
class Settings:
    gamma: float | Tensor | GammaTable
    ignore_index: int
    detach_modulation: bool
    modulation: Modulation | None


def check_settings(
    op: str,
    target: Tensor,
    leading: torch.Size,
    gamma: float | Tensor | GammaTable,
    reduction: str,
    ignore_index: int,
    detach_modulation: bool,
    modulation: Modulation | None,
) -> Settings:
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{op}: torch.func does not transform a loss over several ranks")
    reduction_code(op, reduction)
    if target.is_floating_point():
        raise TypeError(f"{op}: target must be labels where the classes are split over ranks, got {target.dtype}")
    if target.dtype not in LABELS:
        raise TypeError(f"{op}: target must be int64, int32 or uint8, got {target.dtype}")
    if target.shape != leading:
        raise ValueError(f"{op}: target must be {list(leading)}, got {list(target.shape)}")
    if isinstance(gamma, Tensor):
        dense(op, "gamma", gamma)
        if gamma.dtype not in FLOATS:
            raise TypeError(f"{op}: gamma must be a float, a floating-point tensor or a GammaTable, got {gamma.dtype}")
        if gamma.device != target.device and not (gamma.dim() == 0 and gamma.device.type == "cpu"):
            raise ValueError(f"{op}: gamma must be on the device of target, {target.device}, got {gamma.device}")
    elif not isinstance(gamma, GammaTable):
        gamma = finite(op, "gamma", gamma, "a number, a tensor or a GammaTable")
    gamma = check_modulation(op, modulation, gamma)
    detach_modulation = flag(op, "detach_modulation", detach_modulation)
    return Settings(gamma, label(op, "ignore_index", ignore_index), detach_modulation, modulation)


@dataclass(frozen=True)
class Split:
    """Which of the rows' targets are in this rank's slice of the classes."""

    group: Any
    target: Tensor  # [N] among all classes
    label: Tensor  # [N] within the slice, 0 where another rank has it
    owned: Tensor  # [N] bool: whether the slice has it
    counts: Tensor  # [N] bool: not ignored
    legal: Tensor  # [N] bool: a class of any rank, or ignored

    @classmethod
    def of(
        cls, op: str, target: Tensor, classes: int, settings: Settings, group: Any, shape: tuple[int, int]
    ) -> "Split":
        """Tells the ranks the sizes of the slices. ``shape`` must be the same on all of them."""
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(f"{op}: torch.distributed has no process group; call init_process_group first")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"{op}: process_group must be a process group or None, got {type(group).__name__}")
        here = torch.tensor([classes, *shape], dtype=torch.int64, device=target.device)
        everywhere = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everywhere, here, group=group)
        sizes = torch.stack(everywhere)
        offset = sizes[: dist.get_rank(group), 0].sum()
        total = sizes[:, 0].sum()
        labels = target.long()
        counts = labels != settings.ignore_index
        legal = ~counts | ((labels >= 0) & (labels < total))
        if is_plain(target):
            if bool((sizes[:, 1:] != sizes[0, 1:]).any()):
                raise ValueError(
                    f"{op}: every rank must have the same rows and chunk_rows, got {sizes[:, 1:].tolist()} of them"
                )
            label_range(op, target, int(total), settings.ignore_index)
        local = labels - offset
        owned = counts & (local >= 0) & (local < classes)
        return cls(group, target, torch.where(owned, local, 0), owned, counts, legal)

    def at(self, rows: slice | Tensor) -> "Split":
        return Split(self.group, *(t[rows] for t in (self.target, self.label, self.owned, self.counts, self.legal)))

    def row_weights(self, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What each row [N] counts for in the loss and in the mean: 0 if it is ignored."""
        if weight is None:
            return self.counts.to(dtype)
        index = torch.where(self.counts & self.legal, self.target, 0).long()
        return torch.where(self.counts, weight.to(dtype)[index], 0.0)


@dataclass(frozen=True)
class RowStatistics:
    """Of each row, in float64: the slice's largest logit or its label's, log sum_j exp(z_j - that) of all classes, and
    d."""

    top: Tensor
    log_sum: Tensor
    margin: Tensor

    def at(self, rows: slice) -> "RowStatistics":
        return RowStatistics(self.top[rows], self.log_sum[rows], self.margin[rows])

    @classmethod
    def of(cls, parts: list["RowStatistics"]) -> "RowStatistics":
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("top", "log_sum", "margin")))


def statistics(z: Tensor, split: Split) -> RowStatistics:
    """The two reductions, over the rows [n, C_r] of a chunk.

    A logarithm is added to differences of logits only: beside a logit of 1e20 it would be rounded away.
    """
    nothing = torch.full((len(z),), -torch.inf, dtype=torch.float64, device=z.device)
    parts = [_slice_statistics(z[block], split.at(block)) for block in blocks(z)] if z.shape[1] else []
    top, log_rest, own = (torch.cat(values) for values in zip(*parts, strict=True)) if parts else [nothing] * 3
    # A slice of which no class can occur.
    empty = log_rest == -torch.inf
    rest = torch.where(empty, -torch.inf, top + log_rest)
    # An ignored row has no target: any number will do. One out of range makes its row NaN.
    own = torch.where(split.legal, torch.maximum(own, torch.where(split.counts, -torch.inf, 0.0)), torch.nan)
    largest = torch.stack([rest, own])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=split.group)
    shift = torch.where(largest[0].isfinite(), largest[0], 0.0)
    total = torch.where(empty, 0.0, ((top - shift) + log_rest).exp())
    dist.all_reduce(total, group=split.group)
    log_rest = total.log()
    own = torch.where(split.legal, largest[1], torch.nan)
    # Nothing is left beside the target: its loss is 0, and a distance of infinity would make it NaN.
    alone = (total == 0) & own.isfinite()
    shift, log_rest = torch.where(alone, own, shift), torch.where(alone, -_FAR, log_rest)
    margin = (shift - own) + log_rest
    top = torch.where(top == -torch.inf, shift, top)
    # log-sum-exp of all classes minus `top`, from the larger of the target and the others.
    of_rest = (shift - top) + log_rest + torch.nn.functional.softplus(-margin)
    of_target = (own - top) + torch.nn.functional.softplus(margin)
    return RowStatistics(top, torch.where(margin > 0, of_rest, of_target), margin)


def _slice_statistics(z: Tensor, split: Split) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows of a block: the largest logit or that of the label, the logarithm of the sum of exp(z_j - that) over
    the classes beside the target, and the target's logit, -inf where the slice does not have it."""
    top, log_sum, log_u = slice_statistics(z, split.label)
    # The target is among the classes of the sum only where it lies in the slice; log u takes it out of there.
    log_rest = torch.where(split.owned, log_sum + log_u, log_sum)
    own = z.gather(1, split.label.unsqueeze(1)).squeeze(1).double()
    # A reduction by MAX may lose a NaN, one by SUM does not.
    log_rest = torch.where(split.owned & own.isnan(), torch.nan, log_rest)
    missing = top == -torch.inf
    if not is_plain(z) or bool(missing.any()):
        log_rest = torch.where(missing & (z.amax(1) == -torch.inf), -torch.inf, log_rest)  # amax keeps a NaN
    return top, log_rest, torch.where(split.owned, own, -torch.inf)


def row_losses(margin: Tensor, gamma: float | Tensor | GammaTable, settings: Settings) -> Tensor:
    """The loss of d [n] in float64, differentiable in d and gamma."""
    two = torch.stack([-margin, torch.zeros_like(margin)], dim=1)
    first = torch.zeros(len(margin), dtype=torch.int64, device=margin.device)
    return focal_loss(
        two,
        first,
        gamma,
        reduction="none",
        detach_modulation=settings.detach_modulation,
        modulation=settings.modulation,
    )


def gamma_rows(op: str, gamma: float | Tensor | GammaTable, leading: torch.Size) -> float | Tensor | GammaTable:
    """A gamma for the rows of the flattened batch."""
    if not isinstance(gamma, Tensor) or gamma.dim() == 0:
        return gamma
    try:
        return gamma.expand(leading).reshape(-1)
    except RuntimeError:
        raise ValueError(
            f"{op}: gamma must be broadcastable to the unreduced loss {list(leading)}, got {list(gamma.shape)}"
        ) from None


def gradients(z: Tensor, split: Split, rows: RowStatistics, slope: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The slice's gradients, block by block, for dL/dd = ``slope`` [n]."""
    if z.shape[1] == 0:
        return
    log_u = -torch.nn.functional.softplus(-rows.margin)
    u = log_u.exp()
    # c = dL/dd / u; where u vanishes, so does every p_j.
    scale = torch.where(u > 0, slope / u, torch.where(slope.isnan(), slope, 0.0))
    for block in blocks(z):
        part, label, owned = z[block], split.label[block], split.owned[block]
        top, log_sum, log_u_here, scale_here = (values[block] for values in (rows.top, rows.log_sum, log_u, scale))
        grad = slice_gradient(scale_here, part, label, top, log_sum, log_u_here)
        # RowStatistics without a target here were told class 0.
        own = grad[:, 0].double()
        p = ((part[:, 0].double() - top) - log_sum).exp()
        without = torch.where(scale_here == 0, 0.0, scale_here * p)
        grad[:, 0] = torch.where(owned, own, without).to(grad.dtype)
        yield block, grad


def refuse_second_derivatives(op: str) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{op}: a loss over several ranks is differentiable once; leave create_graph out")
