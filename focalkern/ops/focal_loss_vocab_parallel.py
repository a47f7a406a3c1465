"""The focal loss where every rank has a slice of the classes.

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
from focalkern._devices import autocast_is_on, has_float64
from focalkern._types import FLOATS, HALVES, LABELS, Reduction
from focalkern.gamma import GammaTable
from focalkern.ops._linear_chunks import FLOAT16_SCALE, Head, blocks, is_plain
from focalkern.ops._row_kernels import slice_gradient, slice_statistics
from focalkern.ops.focal_loss import focal_loss

__all__ = ["focal_loss_vocab_parallel"]

_OP = "focal_loss_vocab_parallel"
_FAR = 1e4  # e^-_FAR is 0, also in float64
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _outside_graphs(function: _Function) -> _Function:
    """Ends a compiled graph here. (The decorator torch.compiler.disable would import the compiler with this module.)"""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*arguments, **options)
        return function(*arguments, **options)

    return cast(_Function, wrapper)


@_outside_graphs
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
        ignore_index, reduction, detach_modulation: as in :func:`focal_loss`. Label smoothing and class probabilities
            are not there: their loss is a sum over the classes of all ranks.

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
    settings = check_settings(_OP, target, leading, gamma, reduction, ignore_index, detach_modulation)
    rows = logits.reshape(target.numel(), logits.shape[-1])
    split = Split.of(_OP, target.reshape(-1), logits.shape[-1], settings, process_group, (len(rows), 0))
    margin = _Margin.apply(rows, split)  # type: ignore[no-untyped-call]
    gammas = gamma_rows(settings.gamma, leading)
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


# ---- what both losses over ranks share -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    gamma: float | Tensor | GammaTable
    ignore_index: int
    detach_modulation: bool


def check_settings(
    op: str,
    target: Tensor,
    leading: torch.Size,
    gamma: float | Tensor | GammaTable,
    reduction: str,
    ignore_index: int,
    detach_modulation: bool,
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
    detach_modulation = flag(op, "detach_modulation", detach_modulation)
    return Settings(gamma, label(op, "ignore_index", ignore_index), detach_modulation)


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
class Rows:
    """Of each row, in float64: the slice's largest logit or its label's, log sum_j exp(z_j - that) of all classes, and
    d."""

    top: Tensor
    log_sum: Tensor
    margin: Tensor

    def at(self, rows: slice) -> "Rows":
        return Rows(self.top[rows], self.log_sum[rows], self.margin[rows])

    @classmethod
    def of(cls, parts: list["Rows"]) -> "Rows":
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("top", "log_sum", "margin")))


def statistics(z: Tensor, split: Split) -> Rows:
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
    return Rows(top, torch.where(margin > 0, of_rest, of_target), margin)


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
    return focal_loss(two, first, gamma, reduction="none", detach_modulation=settings.detach_modulation)


def gamma_rows(gamma: float | Tensor | GammaTable, leading: torch.Size) -> float | Tensor | GammaTable:
    """A gamma for the rows of the flattened batch."""
    if not isinstance(gamma, Tensor) or gamma.dim() == 0:
        return gamma
    try:
        return gamma.expand(leading).reshape(-1)
    except RuntimeError:
        raise ValueError(
            f"{_OP}: gamma must be broadcastable to the unreduced loss {list(leading)}, got {list(gamma.shape)}"
        ) from None


def gradients(z: Tensor, split: Split, rows: Rows, slope: Tensor) -> Iterator[tuple[slice, Tensor]]:
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
        # Rows without a target here were told class 0.
        own = grad[:, 0].double()
        p = ((part[:, 0].double() - top) - log_sum).exp()
        without = torch.where(scale_here == 0, 0.0, scale_here * p)
        grad[:, 0] = torch.where(owned, own, without).to(grad.dtype)
        yield block, grad


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


def _refuse_second_derivatives(op: str) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{op}: a loss over several ranks is differentiable once; leave create_graph out")


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
        _refuse_second_derivatives(_OP)
        (logits,) = ctx.saved_tensors
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for block, grad in gradients(logits, ctx.split, ctx.rows, slope):
            result[block] = grad
        return result, None


# ---- with the head ---------------------------------------------------------------------------------------------------


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


@_outside_graphs
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
    chunk_rows: int | None,
    softcap: float,
    dtype: torch.dtype,
    process_group: Any,
    reduce_input_grad: bool,
) -> Tensor:
    """:func:`focalkern.linear_focal_loss` with process_group=; the loss in float64."""
    op = "linear_focal_loss"
    leading = input.shape[:-1]
    settings = check_settings(op, target, leading, gamma, reduction, ignore_index, detach_modulation)
    rows = input.reshape(-1, input.shape[-1])
    # Not from the size of the slice, which is not everywhere the same: the ranks reduce chunk by chunk.
    size = max(64, min(1024, rows.shape[1] // 2)) if chunk_rows is None else int(chunk_rows)
    split = Split.of(op, target.reshape(-1), len(linear_weight), settings, process_group, (len(rows), size))
    of_row = gamma_rows(gamma, leading)
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
        ctx.rows = Rows.of(parts) if parts else None
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
        _refuse_second_derivatives("linear_focal_loss")
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


def _overwrite(z: Tensor, split: Split, rows: Rows, slope: Tensor, options: HeadOptions) -> None:
    """The gradient over the logits, for dL/dd = slope."""
    for block, grad in gradients(z, split, rows, slope * options.scale):
        if options.softcap:
            grad.mul_((z[block] / options.softcap).square_().neg_().add_(1))
        z[block] = grad
