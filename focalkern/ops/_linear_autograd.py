"""linear_focal_loss under autograd: derivatives of the pass over the chunks.

Three autograd functions call the same pass (:func:`focalkern.ops._linear_pass.loss_and_gradients`):
    _ReducedLoss  mean and sum: the forward pass also computes the gradients
    _RowLosses    losses per row, and everything under torch.func: its backward pass calls _Gradient
    _Gradient     the gradients as a differentiable function; it recomputes the logits
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from focalkern._tracing import are_kept, is_fake, needs_gradient
from focalkern.gamma import GammaTable
from focalkern.ops._linear_operator import linear_operator
from focalkern.ops._linear_pass import (
    MEAN,
    NO_GRADIENTS,
    NONE,
    OP,
    Gradients,
    Needed,
    Options,
    Tensors,
    capped,
    cast_gradient,
    divisor_of,
    gradients_needed,
    loss_and_gradients,
    loss_dtype,
    reduce_losses,
    sum_gradients,
    total_of,
)
from focalkern.ops._loss_stats import no_statistics
from focalkern.ops.focal_loss import focal_loss

__all__ = ["loss_of"]


def loss_of(tensors: Tensors, options: Options, return_stats: bool) -> tuple[Tensor, Any]:
    """The loss, [N] or reduced, by the path that fits; and the statistics of the rows, if asked for."""
    requires = [needs_gradient(t) for t in tensors[:5]]
    options = replace(options, wanted=gradients_needed(tensors, requires, options))
    compiling = torch.compiler.is_compiling()
    transformed = not compiling and (torch._C._are_functorch_transforms_active() or _has_tangent(tensors))
    fake = not compiling and any(t is not None and is_fake(t) for t in tensors)
    if compiling or (not transformed and (fake or are_kept())):
        return linear_operator(tensors, options, return_stats)
    if return_stats:
        options = replace(options, stats=no_statistics(tensors[0]))
    if options.reduction == NONE or transformed:
        losses: Tensor = _RowLosses.apply(*tensors, options)  # type: ignore[no-untyped-call]
        return reduce_losses(losses, tensors[3], tensors[6], options), options.stats
    loss: Tensor = _ReducedLoss.apply(*tensors, options)  # type: ignore[no-untyped-call]
    return loss, options.stats


class _ReducedLoss(torch.autograd.Function):
    """Mean or sum; the forward pass computes the gradients. They are kept at the scale of the sum, because the smaller
    scale of the mean would underflow in half types. The first backward pass scales them in place."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        tensors, options = arguments[:-1], arguments[-1]
        losses, ctx.gradients = sum_gradients(tensors, options)
        total, ctx.scale = total_of(losses), None
        if options.reduction == MEAN:
            divisor, ctx.scale = divisor_of(tensors[3], tensors[6], options)
            total = total / divisor
        ctx.save_for_backward(*tensors)
        ctx.options = replace(options, stats=())
        return total.to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        tensors, options = ctx.saved_tensors, ctx.options
        g = upstream[0] if ctx.scale is None else upstream[0] * ctx.scale
        if torch.is_grad_enabled():  # create_graph: the gradients must be differentiable
            return (*_gradient(g.expand(len(tensors[0])), tensors, options, options.wanted), None, None, None)
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = sum_gradients(tensors, options)[1]
        scaled = [
            cast_gradient(None if d is None else d.mul_(g), t) for d, t in zip(gradients, tensors[:5], strict=True)
        ]
        return (*scaled, None, None, None)


class _Transformable(torch.autograd.Function):
    """Base of the functions that torch.func may transform."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"{OP} has no forward-mode derivative; use focal_loss(torch.nn.functional.linear(...)) for it"
        )

    @classmethod
    def over_batch(cls, info: Any, in_dims: Any, arguments: Any) -> Any:
        """vmap as a loop over the elements of the batch."""
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
    """Losses per row. The backward pass recomputes the logits."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return loss_and_gradients(arguments[:-1], arguments[-1], None, NO_GRADIENTS)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:-1])
        ctx.options = replace(inputs[-1], stats=())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        tensors = ctx.saved_tensors
        needed = gradients_needed(tensors, ctx.needs_input_grad, ctx.options)
        return (*_gradient(upstream[0], tensors, ctx.options, needed), None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _RowLosses.over_batch(info, in_dims, arguments)


class _Gradient(_Transformable):
    """The needed gradients as a differentiable function of the upstream gradient per row and of the tensors."""

    @staticmethod
    def forward(upstream: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, options = arguments
        gradients = loss_and_gradients(tuple(tensors), options, upstream, options.wanted)[1]
        found = (cast_gradient(gradient, tensor) for gradient, tensor in zip(gradients, tensors[:5], strict=True))
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


def _gradient(upstream: Tensor, tensors: Any, options: Options, needed: Needed) -> Gradients:
    """Gradients of ``sum(upstream * losses)``, themselves differentiable."""
    if not any(needed):
        return (None, None, None, None, None)
    found = iter(_Gradient.apply(upstream, *tensors, replace(options, wanted=needed)))  # type: ignore[no-untyped-call]
    return tuple(next(found) if need else None for need in needed)  # type: ignore[return-value]


def _second_order(saved: Any, options: Options, cotangents: Any, requires: Any) -> list[Tensor | None]:
    """The derivative of ``_Gradient``, a chunk of rows at a time. Its operations are differentiable, so autograd can
    differentiate it again."""
    upstream, tensors = saved[0], saved[1:]
    input, linear_weight, bias, target, gamma, edges, weight = tensors
    wanted = options.wanted
    soft, per_row = target.is_floating_point(), edges is None and gamma.dim() > 0
    # Indices, among upstream and the five inputs, of those that have derivatives.
    variables = [True, *gradients_needed(tensors, requires[1:6], options)]
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
                z = capped(z, options.softcap).to(loss_dtype(options))
                table_or_gamma = now[5] if edges is None else GammaTable._unchecked(edges, now[5])
                modulation: Any = options.modulation
                return focal_loss(
                    z,
                    now[4].to(z.dtype) if soft else now[4],
                    table_or_gamma,
                    weight=weight,
                    ignore_index=options.ignore_index,
                    reduction="none",
                    label_smoothing=options.label_smoothing,
                    detach_modulation=options.detach_modulation,
                    modulation=modulation,
                    z_loss=options.z_loss,
                )

            pull: Any = torch.func.vjp(losses, *(full[place] for place in inner))[1]
            return tuple(pull(full[0].to(loss_dtype(options))))

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


def _has_tangent(tensors: Tensors) -> bool:
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    level = torch.autograd.forward_ad._current_level
    return level >= 0 and any(t is not None and unpack(t).tangent is not None for t in tensors)
