"""linear_focal_loss as one custom operator, for compiled graphs."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from focalkern._types import HALVES, compute_dtype
from focalkern.ops._linear_chunks import default_chunk_rows
from focalkern.ops._linear_pass import (
    MEAN,
    NO_GRADIENTS,
    NONE,
    Options,
    Tensors,
    cast_gradient,
    divisor_of,
    loss_and_gradients,
    sum_gradients,
    total_of,
)
from focalkern.ops._loss_stats import no_statistics

__all__ = ["linear_operator"]


def linear_operator(tensors: Tensors, options: Options, return_stats: bool) -> tuple[Tensor, Any]:
    settings = (
        options.reduction,
        options.ignore_index,
        options.label_smoothing,
        options.detach_modulation,
        options.modulation,
        options.softcap,
        options.dtype,
        options.float64_loss,
        options.chunk_rows,
        options.z_loss,
    )
    found = torch.ops.focalkern.linear_focal_loss(*tensors, *settings, list(options.wanted), return_stats)
    return found[0], tuple(field.detach() for field in found[7:]) if return_stats else ()


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
    modulation: str | None,
    softcap: float,
    dtype: torch.dtype,
    float64_loss: bool,
    chunk_rows: int,
    z_loss: float,
    needed: list[bool],
    return_stats: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, reciprocal of the mean's divisor, gradients of input, weight, bias, target and gamma at the scale of the
    sum, the six statistics of the rows). Results that are not needed and all gradients of an unreduced loss are empty.
    """
    tensors: Tensors = (input, linear_weight, linear_bias, target, gamma, edges, weight)
    settings = (ignore_index, label_smoothing, detach_modulation, modulation, softcap, dtype, float64_loss)
    stats = no_statistics(input if return_stats else input[:0])
    chunk_rows = chunk_rows or default_chunk_rows(
        input.shape[0], input.shape[1], linear_weight.shape[0], dtype.itemsize
    )
    options = Options(reduction, *settings, chunk_rows, z_loss, stats=stats if return_stats else ())
    if reduction == NONE:
        losses = loss_and_gradients(tensors, options, None, NO_GRADIENTS)[0]
        return (losses, *(losses.new_empty(0) for _ in range(6)), *stats)  # type: ignore[return-value]
    losses, gradients = sum_gradients(tensors, replace(options, wanted=tuple(needed)))  # type: ignore[arg-type]
    total, scale = total_of(losses), losses.new_ones(())
    if reduction == MEAN:
        divisor, scale = divisor_of(target, weight, options)
        total = total / divisor
    found = (_or_empty(gradient, losses) for gradient in gradients)
    return (total.to(losses.dtype), scale, *found, *stats)  # type: ignore[return-value]


@_operator.register_fake
def _fake_operator(*given: Any) -> Any:
    input, linear_weight, _, target = given[:4]
    reduction, dtype, float64_loss, needed, return_stats = given[7], given[13], given[14], given[17], given[18]
    real = torch.float64 if float64_loss else compute_dtype(dtype)
    summed = torch.float32 if dtype in HALVES else dtype
    nothing = input.new_empty(0, dtype=real)
    stats = no_statistics(input if return_stats else input[:0])
    if reduction == NONE:
        losses = input.new_empty(input.shape[:1], dtype=real)
        return (losses, *(torch.empty_like(nothing) for _ in range(6)), *stats)
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
    return (input.new_empty((), dtype=real), input.new_empty((), dtype=real), *gradients, *stats)


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
    modulation: str | None,
    softcap: float,
    dtype: torch.dtype,
    float64_loss: bool,
    chunk_rows: int,
    z_loss: float,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``sum(upstream * losses)``, in the dtypes of their tensors, empty where not needed."""
    tensors: Tensors = (input, linear_weight, linear_bias, target, gamma, edges, weight)
    settings = (ignore_index, label_smoothing, detach_modulation, modulation, softcap, dtype, float64_loss)
    chunk_rows = chunk_rows or default_chunk_rows(
        input.shape[0], input.shape[1], linear_weight.shape[0], dtype.itemsize
    )
    options = Options(NONE, *settings, chunk_rows, z_loss)
    gradients = loss_and_gradients(tensors, options, upstream, tuple(needed))[1]  # type: ignore[arg-type]
    found = (cast_gradient(gradient, tensor) for gradient, tensor in zip(gradients, tensors[:5], strict=True))
    return tuple(_or_empty(gradient, upstream) for gradient in found)  # type: ignore[return-value]


@_gradient_operator.register_fake
def _fake_gradient_operator(upstream: Tensor, *given: Any) -> Any:
    return tuple(
        upstream.new_empty(0) if t is None or not need else t.new_empty(t.shape)
        for t, need in zip(given[:5], given[16], strict=True)
    )


def _setup_operator_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.settings, ctx.needed = inputs[7:17], inputs[17]
    ctx.save_for_backward(*inputs[:7], *output[1:7])


def _operator_backward(ctx: Any, upstream: Tensor, *unused: Any) -> Any:
    saved = ctx.saved_tensors  # checkpoints unpack them once
    tensors, scale, gradients = saved[:7], saved[7], saved[8:]
    reduction, *settings = ctx.settings
    if reduction == NONE:
        found = torch.ops.focalkern.linear_focal_loss_gradient(upstream, *tensors, *settings, ctx.needed)
        found = [gradient if need else None for gradient, need in zip(found, ctx.needed, strict=True)]
    else:
        factor = upstream * scale
        found = [
            cast_gradient(
                gradient * factor.to(gradient.dtype) if gradient.dtype == factor.dtype else gradient * factor, tensor
            )
            if need
            else None
            for gradient, tensor, need in zip(gradients, tensors[:5], ctx.needed, strict=True)
        ]
    return (*found, *(None for _ in range(14)))


_operator.register_autograd(_operator_backward, setup_context=_setup_operator_context)
