"""linear_focal_loss over ranks: its call, and the operators that replace its chunks in compiled graphs."""

from typing import Any

import torch
from torch import Tensor

from focalkern._tracing import needs_gradient
from focalkern._types import HALVES
from focalkern.gamma import GammaTable
from focalkern.ops._linear_vocab_parallel import (
    NOTHING,
    HeadOptions,
    HeadTensors,
    LinearParallel,
    cast_gradients,
    chunks_over_ranks,
    mean_scale,
)
from focalkern.ops._loss_stats import LossStats, stats_from
from focalkern.ops._row_loss import Modulation, kind_of
from focalkern.ops._vocab_slices import Settings, Split, check_settings, gamma_rows
from focalkern.ops._vocab_soft import Shares

__all__ = ["linear_focal_loss_over_ranks"]

_OP = "linear_focal_loss"


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
    label_smoothing: float,
    detach_modulation: bool,
    modulation: Modulation | None,
    chunk_rows: int | None,
    softcap: float,
    dtype: torch.dtype,
    process_group: Any,
    reduce_input_grad: bool,
    z_loss: float,
    return_stats: bool,
) -> tuple[Tensor, LossStats | None]:
    """:func:`focalkern.linear_focal_loss` over ``process_group``, with a float64 loss."""
    leading, classes = input.shape[:-1], len(linear_weight)
    options = (reduction, ignore_index, label_smoothing, detach_modulation, z_loss)
    settings = check_settings(_OP, kind_of(modulation), target, leading, classes, gamma, 0.0, *options)
    rows, soft = input.reshape(-1, input.shape[-1]), target.is_floating_point()
    # Ranks reduce chunk by chunk, so chunk_rows must not depend on the size of the slice, which differs between ranks.
    size = max(64, min(1024, rows.shape[1] // 2)) if chunk_rows is None else int(chunk_rows)
    # Class probabilities have no label; any label serves to exchange the sizes of the slices.
    labels = torch.zeros(len(rows), dtype=torch.int64, device=target.device) if soft else target.reshape(-1)
    split = Split.of(_OP, labels, classes, settings, process_group, (len(rows), size))
    spread = soft or label_smoothing > 0
    of_row = gamma_rows(_OP, settings.gamma, leading)
    tensors = HeadTensors(
        rows,
        linear_weight,
        linear_bias,
        target.reshape(len(rows), classes) if soft else None,
        of_row if isinstance(of_row, Tensor) else None,
        split.row_weights(None if soft else weight, torch.float64),
        Shares.of(None, weight, classes, split).weight if spread else None,
    )
    head = HeadOptions(dtype, size, softcap, reduction, reduce_input_grad, return_stats)
    if torch.compiler.is_compiling():
        loss, stats = _through_operator(tensors, split, settings, head)
    else:
        loss, stats = LinearParallel.apply(*tensors, split, settings, head)  # type: ignore[no-untyped-call]
    loss = loss.reshape(leading) if reduction == "none" else loss
    return loss, stats_from(stats, split, leading, input.dtype) if return_stats else None


def _through_operator(
    tensors: HeadTensors, split: Split, settings: Settings, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    gamma, edges = settings.gamma, None
    if isinstance(gamma, GammaTable):
        edges, gamma = gamma.edges, gamma.gammas.detach()
    elif not isinstance(gamma, Tensor):
        # A tensor, not a constant of the graph, so that another value does not compile again.
        gamma = torch.zeros((), dtype=torch.float64, device="cpu") + gamma
    else:
        gamma = tensors.gamma if tensors.gamma is not None else gamma
    needed = [needs_gradient(tensor) for tensor in tensors[:4]]
    found = torch.ops.focalkern.linear_focal_loss_over_ranks(
        *tensors[:4],
        gamma,
        edges,
        *tensors[5:],
        *split[1:],
        split.group.group_name,
        settings.kind,
        settings.ignore_index,
        settings.label_smoothing,
        settings.detach_modulation,
        options.dtype,
        options.chunk_rows,
        options.softcap,
        options.reduction,
        options.reduce_input_grad,
        options.return_stats,
        settings.z_loss,
        needed,
    )
    return found[0], found[-1]


def _arguments(*given: Any) -> tuple[HeadTensors, Split, Settings, HeadOptions, tuple[bool, ...]]:
    """Builds the objects of :func:`chunks_over_ranks` from the arguments of an operator."""
    resolve: Any = getattr(torch.distributed.distributed_c10d, "_resolve_process_group")  # noqa: B009  (not exported)
    gamma, edges = given[4], given[5]
    name, kind, ignore_index, label_smoothing, detach_modulation = given[15:20]
    table = None if edges is None else GammaTable._unchecked(edges, gamma)
    tensors = HeadTensors(given[0], given[1], given[2], given[3], gamma if table is None else None, given[6], given[7])
    split = Split(resolve(name), *given[8:15])
    values = gamma if table is None else table
    settings = Settings(_OP, kind, values, 0.0, ignore_index, label_smoothing, detach_modulation, given[26])
    return tensors, split, settings, HeadOptions(*given[20:26]), tuple(given[27])


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if tensor is None else tensor


@torch.library.custom_op("focalkern::linear_focal_loss_over_ranks", mutates_args=())
def _operator(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor | None,
    gamma: Tensor,
    edges: Tensor | None,
    row_weights: Tensor,
    class_weights: Tensor | None,
    labels: Tensor,
    label: Tensor,
    owned: Tensor,
    counts: Tensor,
    legal: Tensor,
    offset: Tensor,
    classes: Tensor,
    group: str,
    kind: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    dtype: torch.dtype,
    chunk_rows: int,
    softcap: float,
    reduction: str,
    reduce_input_grad: bool,
    return_stats: bool,
    z_loss: float,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, factor of the gradients, state, dL/dgamma, gradients of input, linear_weight, linear_bias and target at
    the scale of the sum, statistics). Gradients that are not needed and all gradients of an unreduced loss are empty.
    """
    given = (input, linear_weight, linear_bias, target, gamma, edges, row_weights, class_weights)
    given += (labels, label, owned, counts, legal, offset, classes, group, kind, ignore_index, label_smoothing)  # type: ignore[assignment]
    given += (detach_modulation, dtype, chunk_rows, softcap, reduction, reduce_input_grad)  # type: ignore[assignment]
    given += (return_stats, z_loss, needed)  # type: ignore[assignment]
    tensors, split, settings, options, wanted = _arguments(*given)
    early = reduction != "none"
    losses, state, of_gamma, found, stats = chunks_over_ranks(
        tensors,
        split,
        settings,
        options,
        wanted if early else NOTHING,  # type: ignore[arg-type]
    )
    total, scale = losses.sum() if early else losses, losses.new_ones(())
    if reduction == "mean":
        divisor, scale = mean_scale(row_weights, counts)
        total = total / divisor
    gradients = (_or_empty(gradient, losses) for gradient in found)
    return (total, scale, state, of_gamma, *gradients, stats)  # type: ignore[return-value]


@_operator.register_fake
def _fake_operator(*given: Any) -> Any:
    input, linear_weight, _, target = given[:4]
    dtype, reduction, needed = given[20], given[23], given[27]
    summed = torch.float32 if dtype in HALVES else dtype
    wide: dict[str, Any] = {"dtype": torch.float64}
    losses = input.new_empty(input.shape[:1], **wide)
    shapes: Any = (
        (input.shape, input.dtype),
        (linear_weight.shape, summed),
        (linear_weight.shape[:1], summed),
        (None if target is None else target.shape, torch.float64),
    )
    gradients = (
        input.new_empty(shape, dtype=kind) if need and reduction != "none" else input.new_empty(0, **wide)
        for (shape, kind), need in zip(shapes, needed, strict=True)
    )
    return (
        input.new_empty((), **wide) if reduction != "none" else losses,
        input.new_empty((), **wide),
        input.new_empty((4, input.shape[0]), **wide),
        torch.empty_like(losses),
        *gradients,
        input.new_empty((4, input.shape[0] if given[25] else 0), **wide),
    )


@torch.library.custom_op("focalkern::linear_focal_loss_over_ranks_gradient", mutates_args=())
def _gradient_operator(
    upstream: Tensor,
    state: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor | None,
    gamma: Tensor,
    edges: Tensor | None,
    row_weights: Tensor,
    class_weights: Tensor | None,
    labels: Tensor,
    label: Tensor,
    owned: Tensor,
    counts: Tensor,
    legal: Tensor,
    offset: Tensor,
    classes: Tensor,
    group: str,
    kind: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    dtype: torch.dtype,
    chunk_rows: int,
    softcap: float,
    reduction: str,
    reduce_input_grad: bool,
    return_stats: bool,
    z_loss: float,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``sum(upstream * losses)`` from the state of the forward pass, empty where not needed."""
    given = (input, linear_weight, linear_bias, target, gamma, edges, row_weights, class_weights)
    given += (labels, label, owned, counts, legal, offset, classes, group, kind, ignore_index, label_smoothing)  # type: ignore[assignment]
    given += (detach_modulation, dtype, chunk_rows, softcap, reduction, reduce_input_grad)  # type: ignore[assignment]
    given += (return_stats, z_loss, needed)  # type: ignore[assignment]
    tensors, split, settings, options, wanted = _arguments(*given)
    found = chunks_over_ranks(tensors, split, settings, options, wanted, upstream, state)[3]  # type: ignore[arg-type]
    return tuple(_or_empty(gradient, upstream) for gradient in cast_gradients(found, tensors))  # type: ignore[return-value]


@_gradient_operator.register_fake
def _fake_gradient_operator(upstream: Tensor, state: Tensor, *given: Any) -> Any:
    return tuple(
        upstream.new_empty(0) if t is None or not need else t.new_empty(t.shape)
        for t, need in zip(given[:4], given[27], strict=True)
    )


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.settings = inputs[15:]
    ctx.save_for_backward(*inputs[:15], *output[1:8])


def _backward(ctx: Any, upstream: Tensor, *unused: Any) -> Any:
    saved = ctx.saved_tensors  # checkpoints unpack them once
    tensors, (scale, state, of_gamma, *gradients) = saved[:15], saved[15:]
    needed, reduction = ctx.settings[-1], ctx.settings[8]
    factor = upstream * scale
    if reduction == "none":
        found = torch.ops.focalkern.linear_focal_loss_over_ranks_gradient(factor, state, *tensors, *ctx.settings)
    else:
        found = [
            gradient if not need else (gradient * factor).to(t.dtype)
            for gradient, t, need in zip(gradients, tensors[:4], needed, strict=True)
        ]
    of_tensors = [gradient if need else None for gradient, need in zip(found, needed, strict=True)]
    gamma = tensors[4]
    of_numbers = (factor * of_gamma).sum_to_size(gamma.shape).to(gamma.dtype) if ctx.needs_input_grad[4] else None
    return (*of_tensors, of_numbers, *(None for _ in range(23)))


_operator.register_autograd(_backward, setup_context=_setup_context)
