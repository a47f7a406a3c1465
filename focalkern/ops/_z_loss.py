"""The z-loss c w lse^2 in the passes of the row loss, where it has kernels.

The gradient of the row loss is c_f (p_j - t_j), and that of the z-loss k p_j with k = 2 c w lse. The backward pass gets
c_f, or a sum for it, from the numbers that the forward pass saves for each row. ``z_loss`` of the compiled module adds
k to them (of :mod:`focalkern.fallback`: in torch operations), so that the backward pass writes the gradient of both. On
CUDA k is a number of its own.
"""

import math
from typing import Any

import torch
from torch import Tensor

from focalkern._devices import autocast_is_on
from focalkern._types import HALVES, REDUCTIONS, compute_dtype
from focalkern.gamma import GammaTable
from focalkern.ops._row_kernels import Block, Settings, forward_with_extras
from focalkern.ops._row_loss import needs_float64, row_loss
from focalkern.ops._vocab_slices import Split
from focalkern.ops.focal_loss_vocab_parallel import plain_statistics, reduced, statistics_of
from focalkern.ops.row_sums import Statistics

__all__ = ["loss_plus_z_loss", "loss_with_z_loss"]


def loss_dtype(input: Tensor, target: Tensor) -> torch.dtype:
    """The dtype of the loss: that of the logits, promoted by class probabilities, or float32 under autocast."""
    dtype = torch.promote_types(input.dtype, target.dtype) if target.is_floating_point() else input.dtype
    is_wide = input.dtype in HALVES and autocast_is_on(input.device.type)
    return torch.promote_types(dtype, torch.float32) if is_wide else dtype


def loss_with_z_loss(
    op: str,
    kind: int,
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    detach_modulation: bool,
    z_loss: float,
    return_stats: bool,
) -> tuple[Tensor, Statistics | None]:
    """The row loss number ``kind`` plus the z-loss, of arguments that are checked; with ``return_stats`` also the
    statistics of the rows, where the forward pass gives them."""
    dtype, real = loss_dtype(input, target), compute_dtype(input.dtype)
    if dtype == torch.float64 or needs_float64(input, target, label_smoothing):
        input = input.double()
    edges = None
    if isinstance(gamma, GammaTable):
        edges, gamma = gamma.edges, gamma.gammas.detach()
    elif not isinstance(gamma, Tensor):
        # In a graph no constant, so that another value does not compile again.
        if torch.compiler.is_compiling():
            gamma = torch.zeros((), dtype=torch.float64, device="cpu") + gamma
        else:
            gamma = torch.tensor(gamma, dtype=torch.float64, device="cpu")
    options = (op, kind, REDUCTIONS.index(reduction), ignore_index, label_smoothing, detach_modulation, z_loss)
    found = _LossWithZLoss.apply(input, target, gamma, edges, weight, *options, return_stats)  # type: ignore[no-untyped-call]
    if isinstance(found, Tensor):
        return found.to(dtype), None
    log_p, entropy, lse = (values.to(real) for values in found[1:4])
    return found[0].to(dtype), (log_p, entropy, lse, *found[4:])


class _LossWithZLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        target: Tensor,
        gamma: Tensor,
        edges: Tensor | None,
        weight: Tensor | None,
        op: str,
        kind: int,
        reduction: int,
        ignore_index: int,
        label_smoothing: float,
        detach_modulation: bool,
        z_loss: float,
        return_stats: bool,
    ) -> Tensor | tuple[Tensor, ...]:
        tensors = Block(input, target, gamma, edges, weight)
        options = (ignore_index, label_smoothing, detach_modulation)
        settings = Settings(*options, True, kind, 0.0)  # in a graph of dynamic shapes a default would be an input
        loss, saved, of_rows = forward_with_extras(tensors, reduction, settings, z_loss, return_stats)
        ctx.save_for_backward(*tensors, saved.numbers, saved.of_gamma if ctx.needs_input_grad[2] else None)
        ctx.arguments = (op, kind, reduction, *options, z_loss)
        if not of_rows:
            return loss
        ctx.mark_non_differentiable(*of_rows)
        return loss, *of_rows

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> Any:
        *tensors, edited, saved = ctx.saved_tensors
        edges, apart = tensors[3], saved is not None
        _, kind, *options, _ = ctx.arguments
        of_input, of_target, of_gamma = ctx.needs_input_grad[:3]
        of_gamma = of_gamma and edges is None and not options[3]  # detach_modulation
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return *_differentiable(ctx, upstream, tensors, (of_input, of_target, of_gamma)), *_NO_GRADIENTS

        def gradients(numbers: Tensor, needed: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
            found: tuple[Tensor, Tensor, Tensor] = torch.ops.focalkern.focal_loss_backward(
                upstream, *tensors, numbers, *options, needed, kind, 0.0
            )
            return found

        found = list(gradients(edited, [of_input, of_target, of_gamma and not apart]))
        if of_gamma and apart:
            found[2] = gradients(saved, [False, False, True])[2]
        return *(
            gradient if needed else None
            for gradient, needed in zip(found, (of_input, of_target, of_gamma), strict=True)
        ), *_NO_GRADIENTS


_NO_GRADIENTS = (None,) * 10


def _differentiable(
    ctx: Any, upstream: Tensor, tensors: list[Tensor], needed: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """The gradients as differentiable torch operations, from aliases of the tensors, whose hooks fire once."""
    op, kind, reduction, ignore_index, label_smoothing, detach_modulation, z_loss = ctx.arguments
    input, target, gamma, edges, weight = tensors
    aliases = [tensor.view_as(tensor) for tensor in (input, target, gamma)]
    table = aliases[2] if edges is None else GammaTable._unchecked(edges, gamma)
    z, y = aliases[0].to(upstream.dtype), aliases[1]
    options = (weight, ignore_index, REDUCTIONS[reduction], label_smoothing, detach_modulation, z_loss)
    loss = loss_plus_z_loss(op, kind, z, y, table, *options, apart=True)
    wanted = [alias for alias, need in zip(aliases, needed, strict=True) if need]
    found = iter(torch.autograd.grad(loss.to(upstream.dtype), wanted, upstream, create_graph=True, allow_unused=True))
    return tuple(next(found) if need else None for need in needed)


def loss_plus_z_loss(
    op: str,
    kind: int,
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    detach_modulation: bool,
    z_loss: float,
    apart: bool,
) -> Tensor:
    """The sum of both losses, each of which autograd differentiates. With ``apart``, torch operations compute the
    z-loss."""
    soft, class_dim = target.is_floating_point(), min(input.dim() - 1, 1)
    dtype = loss_dtype(input, target)
    if input.dtype in HALVES:
        input = input.float()  # the sum of both gradients is rounded once
    z = input.movedim(class_dim, -1)
    leading, classes = z.shape[:-1], z.shape[-1]
    n = math.prod(leading)  # numel() would fix the number of rows of an exported graph
    rows = z.reshape(n, classes)
    labels = target.new_zeros(n, dtype=torch.int64) if soft else target.reshape(-1)
    split = Split.whole(labels, classes, -100 if soft else ignore_index)
    options = (weight, ignore_index, "none", label_smoothing, detach_modulation)
    losses = row_loss(op, kind, input, target, gamma, 0.0, *options).reshape(-1)
    row_weight = None if soft else weight
    if z_loss:
        lse = plain_statistics(rows, split.label)[0] if apart else statistics_of(rows, op, split, True).lse
        lse = torch.where(split.counts, lse, 0.0)
        losses = losses + z_loss * split.row_weights(row_weight, lse.dtype) * lse.square()
    loss = reduced(losses, split, row_weight, reduction).to(dtype)
    return loss.reshape(leading) if reduction == "none" else loss
