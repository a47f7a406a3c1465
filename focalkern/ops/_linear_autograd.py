"""The chunks of linear_focal_loss under autograd: one pass over them, what differentiates it, and the operator that
compiled graphs see.

Three ways into the same pass (:func:`_run`):
    ReducedLoss   mean and sum: the gradients are made with the losses
    RowLosses     losses per row, and everything under torch.func: the backward pass is
    _Gradient     the gradients as a function, which computes the logits anew, and which has a derivative of its own
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from focalkern._checks import label_range
from focalkern._devices import has_float64
from focalkern._types import HALVES, compute_dtype
from focalkern.gamma import GammaTable
from focalkern.ops._linear_chunks import FLOAT16_SCALE, Head, blocks, is_plain
from focalkern.ops._row_kernels import gradients_of_rows, losses_of_rows
from focalkern.ops.focal_loss import focal_loss

__all__ = ["MEAN", "NONE", "SUM", "Options", "capped", "loss_of"]

_OP = "linear_focal_loss"
NONE, MEAN, SUM = 0, 1, 2


@dataclass(frozen=True)
class Options:
    reduction: int
    ignore_index: int
    label_smoothing: float
    detach_modulation: bool
    softcap: float  # 0 for none
    dtype: torch.dtype  # of the products
    wide: bool  # the loss is computed in float64 from narrower logits, because the target probabilities are float64
    chunk_rows: int
    # Which gradients _Gradient returns: of input, linear_weight, linear_bias, target, gamma.
    wanted: tuple[bool, bool, bool, bool, bool] = (False, False, False, False, False)


# input [N, D], linear_weight [C, D], linear_bias [C], target [N] or [N, C], gamma [], [N] or [n_bins], edges, weight
_Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]
# of input, linear_weight, linear_bias, target, gamma
_Needed = tuple[bool, bool, bool, bool, bool]
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_NOTHING: _Needed = (False, False, False, False, False)


def loss_of(tensors: _Tensors, options: Options) -> Tensor:
    """The loss, [N] or reduced, by the road that fits."""
    requires = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors[:5]]
    options = replace(options, wanted=_needed(tensors, requires, options))
    if torch.compiler.is_compiling():
        return _through_operator(tensors, options)
    if options.reduction == NONE or torch._C._are_functorch_transforms_active() or _has_tangent(tensors):
        losses: Tensor = _RowLosses.apply(*tensors, options)  # type: ignore[no-untyped-call]
        return _reduce(losses, tensors[3], tensors[6], options)
    loss: Tensor = _ReducedLoss.apply(*tensors, options)  # type: ignore[no-untyped-call]
    return loss


def _check_labels(target: Tensor, classes: int, ignore_index: int) -> None:
    """Before any product, where the values can be looked at."""
    if target.is_floating_point() or not is_plain(target):
        return
    label_range(_OP, target, classes, ignore_index)


def _real(options: Options) -> torch.dtype:
    return torch.float64 if options.wide else compute_dtype(options.dtype)


def _needed(tensors: _Tensors, requires: Any, options: Options) -> _Needed:
    """Which gradients there are: labels, tabulated gammas and those of a detached factor have none."""
    gamma_is_variable = tensors[5] is None and not options.detach_modulation
    return (
        bool(requires[0]),
        bool(requires[1]),
        bool(requires[2]),
        bool(requires[3]) and tensors[3].is_floating_point(),
        bool(requires[4]) and gamma_is_variable,
    )


def _cap_(z: Tensor, softcap: float) -> None:
    if softcap:
        z.div_(softcap).tanh_().mul_(softcap)


def _uncap_(grad: Tensor, z: Tensor, softcap: float) -> None:
    """From the capped logits z to those before: d capped / d z = 1 - (capped / s)^2."""
    if softcap:
        slope = (z / softcap).square_().neg_().add_(1)
        grad.mul_(slope)


def _run(tensors: _Tensors, options: Options, upstream: Tensor | None, needed: _Needed) -> tuple[Tensor, _Gradients]:
    """Losses [N] per row, and the gradients of ``sum(upstream * losses)``, chunk by chunk; upstream is [N] or one
    number. Those of weight, bias and gamma are in the dtype they were summed in; gamma's is per row."""
    input, linear_weight, bias, target, gamma, edges, weight = tensors
    real, soft = _real(options), target.is_floating_point()
    n_rows, classes = input.shape[0], linear_weight.shape[0]
    _check_labels(target, classes, options.ignore_index)
    kept = None
    if not soft and is_plain(target) and is_plain(input):
        counts = target != options.ignore_index
        if not bool(counts.all()):
            kept = counts.nonzero().squeeze(1)
    any_needed = any(needed)
    scale = FLOAT16_SCALE if options.dtype == torch.float16 and any_needed else 1.0
    head = Head(input, linear_weight, bias, options.dtype, options.chunk_rows, needed[:3], kept, scale)
    losses = torch.zeros(n_rows, dtype=real, device=input.device)
    grad_target = torch.zeros(target.shape, dtype=real, device=input.device) if needed[3] else None
    grad_gamma = torch.zeros(n_rows, dtype=real, device=input.device) if needed[4] else None
    if upstream is not None:
        upstream = upstream.to(real)
        upstream = (upstream * scale if scale != 1 else upstream).expand(n_rows)
    per_row = edges is None and (gamma.dim() > 0 or needed[4])
    gamma_rows = gamma.expand(n_rows) if per_row else gamma
    for rows, z in head.chunks():
        for block in blocks(z):
            where = head.rows_of(slice(rows.start + block.start, rows.start + block.stop))
            part = z[block]
            _cap_(part, options.softcap)
            logits = part.to(real) if options.wide else part
            here = (logits, target[where], gamma_rows[where] if per_row else gamma, edges, weight)
            settings = (options.ignore_index, options.label_smoothing, options.detach_modulation)
            losses[where], saved = losses_of_rows(here, settings)
            if not any_needed:
                continue
            assert upstream is not None
            grad, of_target, of_gamma = gradients_of_rows(
                upstream[where], here, settings, saved, (any(needed[:3]), needed[3], needed[4])
            )
            if any(needed[:3]):
                _uncap_(grad, part, options.softcap)
                part.copy_(grad)
            if grad_target is not None:
                grad_target[where] = of_target.to(real)
            if grad_gamma is not None:
                grad_gamma[where] = of_gamma.to(real)
        if any(needed[:3]):
            head.accumulate(rows, z)
    if scale != 1:
        for total in (grad_target, grad_gamma):
            if total is not None:
                total.div_(scale)
    return losses, (*head.finish(), grad_target, grad_gamma)


def _row_weights(target: Tensor, weight: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """What each row [N] adds to the divisor of the mean, and whether it counts."""
    real = _real(options)
    if target.is_floating_point():
        every = torch.ones(target.shape[:1], dtype=real, device=target.device)
        return every, every > 0
    counts = target != options.ignore_index
    if weight is None:
        return counts.to(real), counts
    index = torch.where((target >= 0) & (target < len(weight)), target, 0).long()
    return torch.where(counts, weight.to(real)[index], 0.0), counts


def _total(losses: Tensor) -> Tensor:
    return losses.sum(dtype=torch.float64) if has_float64(losses.device) else losses.sum()


def _divisor(target: Tensor, weight: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """What the mean divides by, and its reciprocal for gradients: 0 where no row counts, whose gradient is 0."""
    row_weights, counts = _row_weights(target, weight, options)
    divisor = _total(row_weights)
    return divisor, torch.where(counts.any(), divisor.reciprocal(), 0.0).to(_real(options))


def _reduce(losses: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> Tensor:
    """In differentiable operations."""
    if options.reduction == NONE:
        return losses
    total = _total(losses)
    if options.reduction == MEAN:
        divisor, reciprocal = _divisor(target, weight, options)
        # Over no row at all: NaN with a gradient of 0.
        total = torch.where(divisor == 0, total.detach() / divisor + total * reciprocal, total * (1 / divisor))
    return total.to(losses.dtype)


def _as(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A gradient in the dtype and shape of its tensor; gamma's is summed to it."""
    if gradient is None or like is None:
        return None
    return gradient.sum_to_size(like.shape).to(like.dtype)


# ---- autograd --------------------------------------------------------------------------------------------------------


class _ReducedLoss(torch.autograd.Function):
    """Mean or sum, with the gradients made in the forward pass. They are held at the scale of the sum, where half
    types have most of their digits, and the first backward pass takes them over."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        tensors, options = arguments[:-1], arguments[-1]
        losses, ctx.gradients = _sum_gradients(tensors, options)
        total, ctx.scale = _total(losses), None
        if options.reduction == MEAN:
            divisor, ctx.scale = _divisor(tensors[3], tensors[6], options)
            total = total / divisor
        ctx.save_for_backward(*tensors)
        ctx.options = options
        return total.to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        tensors, options = ctx.saved_tensors, ctx.options
        g = upstream[0] if ctx.scale is None else upstream[0] * ctx.scale
        if torch.is_grad_enabled():  # the gradients are to be differentiated
            return (*_gradient(g.expand(len(tensors[0])), tensors, options, options.wanted), None, None, None)
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = _sum_gradients(tensors, options)[1]
        scaled = [_as(None if d is None else d.mul_(g), t) for d, t in zip(gradients, tensors[:5], strict=True)]
        return (*scaled, None, None, None)


def _sum_gradients(tensors: _Tensors, options: Options) -> tuple[Tensor, _Gradients]:
    """Losses per row and the gradients of their sum."""
    one = torch.ones((), dtype=_real(options), device=tensors[0].device) if any(options.wanted) else None
    return _run(tensors, options, one, options.wanted)


class _Transformable(torch.autograd.Function):
    """What the functions below share: torch.func may transform them."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"{_OP} has no forward-mode derivative; use focal_loss(torch.nn.functional.linear(...)) for it"
        )

    @classmethod
    def over_batch(cls, info: Any, in_dims: Any, arguments: Any) -> Any:
        """vmap as a loop: one element's chunks after the other's."""
        results = [
            cls.apply(  # type: ignore[no-untyped-call]
                *(a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims, strict=True))
            )
            for i in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(part) for part in zip(*results, strict=True)), (0,) * len(results[0])


class _RowLosses(_Transformable):
    """Losses per row. The backward pass computes the logits anew."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return _run(arguments[:-1], arguments[-1], None, _NOTHING)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:-1])
        ctx.options = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        tensors = ctx.saved_tensors
        needed = _needed(tensors, ctx.needs_input_grad, ctx.options)
        return (*_gradient(upstream[0], tensors, ctx.options, needed), None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _RowLosses.over_batch(info, in_dims, arguments)


class _Gradient(_Transformable):
    """The gradients that are needed, as a function of the upstream gradient per row and of everything else."""

    @staticmethod
    def forward(upstream: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, options = arguments
        gradients = _run(tuple(tensors), options, upstream, options.wanted)[1]
        found = (_as(gradient, tensor) for gradient, tensor in zip(gradients, tensors[:5], strict=True))
        return tuple(gradient for gradient in found if gradient is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return (*_second_order(ctx.saved_tensors, ctx.options, cotangents, ctx.needs_input_grad), None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _Gradient.over_batch(info, in_dims, arguments)


def _gradient(upstream: Tensor, tensors: Any, options: Options, needed: _Needed) -> _Gradients:
    """Gradients of ``sum(upstream * losses)``, themselves differentiable."""
    if not any(needed):
        return (None, None, None, None, None)
    found = iter(_Gradient.apply(upstream, *tensors, replace(options, wanted=needed)))  # type: ignore[no-untyped-call]
    return tuple(next(found) if need else None for need in needed)  # type: ignore[return-value]


def _second_order(saved: Any, options: Options, cotangents: Any, requires: Any) -> list[Tensor | None]:
    """The derivative of ``_Gradient``: a chunk of rows at a time, in differentiable operations, so that autograd can
    also take what comes out once more."""
    upstream, tensors = saved[0], saved[1:]
    input, linear_weight, bias, target, gamma, edges, weight = tensors
    wanted = options.wanted
    soft, per_row = target.is_floating_point(), edges is None and gamma.dim() > 0
    # Of upstream and the five; the places of those that have derivatives at all.
    variables = [True, *_needed(tensors, requires[1:6], options)]
    variables[0] = bool(requires[0])
    places = [i for i, is_variable in enumerate(variables) if is_variable]
    totals: list[Any] = [None] * 6
    row_parts: dict[int, list[Tensor]] = {0: [], 1: [], 4: []}
    if per_row:
        row_parts[5] = []
    # A differentiable chunk keeps some twenty tensors of the size of its logits.
    step = max(1, options.chunk_rows // 16)
    n_rows = len(upstream)
    for begin in range(0, max(1, n_rows), step):
        rows = slice(begin, min(n_rows, begin + step))
        of_chunk: list[Any] = [
            upstream[rows],
            input[rows],
            linear_weight,
            bias,
            target[rows],
            gamma[rows] if per_row else gamma,
        ]
        directions = []
        found = iter(cotangents)
        for place, is_wanted in enumerate(wanted, start=1):
            if is_wanted:
                v = next(found)
                directions.append(v[rows] if place in row_parts else v)

        def gradients_of_chunk(*values: Tensor, of_chunk: list[Any] = of_chunk) -> tuple[Tensor, ...]:
            full = list(of_chunk)
            for place, value in zip(places, values, strict=True):
                full[place] = value
            inner = [place for place, is_wanted in enumerate(wanted, start=1) if is_wanted]

            def losses(*variables: Tensor) -> Tensor:
                now = list(full)
                for place, value in zip(inner, variables, strict=True):
                    now[place] = value
                z = F.linear(now[1].to(options.dtype), now[2].to(options.dtype), _cast(now[3], options.dtype))
                z = capped(z, options.softcap).to(_real(options))
                table_or_gamma = now[5] if edges is None else GammaTable._unchecked(edges, now[5])
                return focal_loss(
                    z,
                    now[4].to(z.dtype) if soft else now[4],
                    table_or_gamma,
                    weight=weight,
                    ignore_index=options.ignore_index,
                    reduction="none",
                    label_smoothing=options.label_smoothing,
                    detach_modulation=options.detach_modulation,
                )

            pull: Any = torch.func.vjp(losses, *(full[place] for place in inner))[1]
            return tuple(pull(full[0].to(_real(options))))

        pull: Any = torch.func.vjp(gradients_of_chunk, *(of_chunk[place] for place in places))[1]
        for place, value in zip(places, pull(tuple(directions)), strict=True):
            if place in row_parts:
                row_parts[place].append(value)
            else:
                totals[place] = value if totals[place] is None else totals[place] + value
    for place, parts in row_parts.items():
        if parts:
            totals[place] = torch.cat(parts)
    return [*totals, None, None]


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def capped(z: Tensor, softcap: float | None) -> Tensor:
    return softcap * torch.tanh(z / softcap) if softcap else z


def _has_tangent(tensors: _Tensors) -> bool:
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    level = torch.autograd.forward_ad._current_level
    return level >= 0 and any(t is not None and unpack(t).tangent is not None for t in tensors)


# ---- the operator of compiled graphs ---------------------------------------------------------------------------------


def _through_operator(tensors: _Tensors, options: Options) -> Tensor:
    settings = (
        options.reduction,
        options.ignore_index,
        options.label_smoothing,
        options.detach_modulation,
        options.softcap,
        options.dtype,
        options.wide,
        options.chunk_rows,
    )
    loss: Tensor = torch.ops.focalkern.linear_focal_loss(*tensors, *settings, list(options.wanted))[0]
    return loss


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


@torch.library.custom_op("focalkern::linear_focal_loss", mutates_args=())
def _operator(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    softcap: float,
    dtype: torch.dtype,
    wide: bool,
    chunk_rows: int,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, reciprocal of the mean's divisor, gradients of input, weight, bias, target and gamma at the scale of the
    sum). Gradients that are not needed, and all of an unreduced loss, are empty."""
    tensors: _Tensors = (input, linear_weight, linear_bias, target, gamma, edges, weight)
    settings = (ignore_index, label_smoothing, detach_modulation, softcap, dtype, wide, chunk_rows)
    options = Options(reduction, *settings)
    if reduction == NONE:
        losses = _run(tensors, options, None, _NOTHING)[0]
        return (losses, *(losses.new_empty(0) for _ in range(6)))  # type: ignore[return-value]
    losses, gradients = _sum_gradients(tensors, replace(options, wanted=tuple(needed)))  # type: ignore[arg-type]
    total, scale = _total(losses), losses.new_ones(())
    if reduction == MEAN:
        divisor, scale = _divisor(target, weight, options)
        total = total / divisor
    found = (_or_empty(gradient, losses) for gradient in gradients)
    return (total.to(losses.dtype), scale, *found)  # type: ignore[return-value]


@_operator.register_fake
def _fake_operator(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    softcap: float,
    dtype: torch.dtype,
    wide: bool,
    chunk_rows: int,
    needed: list[bool],
) -> Any:
    options = Options(reduction, ignore_index, label_smoothing, detach_modulation, softcap, dtype, wide, chunk_rows)
    real = _real(options)
    summed = torch.float32 if dtype in HALVES else dtype
    nothing = input.new_empty(0, dtype=real)
    if reduction == NONE:
        return (input.new_empty(input.shape[:1], dtype=real), *(torch.empty_like(nothing) for _ in range(6)))
    shapes = (
        (input.shape, input.dtype),
        (linear_weight.shape, summed),
        (linear_weight.shape[:1], summed),
        (target.shape, real),
        (input.shape[:1], real),
    )
    gradients = (
        input.new_empty(shape, dtype=kind) if need else torch.empty_like(nothing)
        for (shape, kind), need in zip(shapes, needed, strict=True)
    )
    return (input.new_empty((), dtype=real), input.new_empty((), dtype=real), *gradients)


@torch.library.custom_op("focalkern::linear_focal_loss_gradient", mutates_args=())
def _gradient_operator(
    upstream: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    softcap: float,
    dtype: torch.dtype,
    wide: bool,
    chunk_rows: int,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``sum(upstream * losses)``, in the dtypes of their tensors, empty where not needed."""
    tensors: _Tensors = (input, linear_weight, linear_bias, target, gamma, edges, weight)
    settings = (ignore_index, label_smoothing, detach_modulation, softcap, dtype, wide, chunk_rows)
    options = Options(NONE, *settings)
    gradients = _run(tensors, options, upstream, tuple(needed))[1]  # type: ignore[arg-type]
    found = (_as(gradient, tensor) for gradient, tensor in zip(gradients, tensors[:5], strict=True))
    return tuple(_or_empty(gradient, upstream) for gradient in found)  # type: ignore[return-value]


@_gradient_operator.register_fake
def _fake_gradient_operator(
    upstream: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    softcap: float,
    dtype: torch.dtype,
    wide: bool,
    chunk_rows: int,
    needed: list[bool],
) -> Any:
    like = (input, linear_weight, linear_bias, target, gamma)
    return tuple(
        upstream.new_empty(0) if t is None or not need else t.new_empty(t.shape)
        for t, need in zip(like, needed, strict=True)
    )


def _setup_operator_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.settings, ctx.needed = inputs[7:15], inputs[15]
    ctx.save_for_backward(*inputs[:7], *output[1:])


def _operator_backward(ctx: Any, upstream: Tensor, *unused: Any) -> Any:
    tensors, scale, gradients = ctx.saved_tensors[:7], ctx.saved_tensors[7], ctx.saved_tensors[8:]
    reduction, *settings = ctx.settings
    if reduction == NONE:
        found = torch.ops.focalkern.linear_focal_loss_gradient(upstream, *tensors, *settings, ctx.needed)
        found = [gradient if need else None for gradient, need in zip(found, ctx.needed, strict=True)]
    else:
        factor = upstream * scale
        found = [
            _as(gradient * factor.to(gradient.dtype) if gradient.dtype == factor.dtype else gradient * factor, tensor)
            if need
            else None
            for gradient, tensor, need in zip(gradients, tensors[:5], ctx.needed, strict=True)
        ]
    return (*found, *(None for _ in range(11)))


_operator.register_autograd(_operator_backward, setup_context=_setup_operator_context)
