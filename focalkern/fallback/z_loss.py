"""The z-loss beside a row loss of the kernels, in torch operations (csrc/math/z_loss.h)."""

import torch
from torch import Tensor

from focalkern._types import REDUCTIONS

__all__ = ["z_loss"]


def z_loss(
    loss: Tensor,
    saved: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    soft: bool,
    reduction: int,
    coefficient: float,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The row loss plus c w lse^2 of each row, and the saved numbers for the gradient of both.

    Args:
        loss: the row loss of ``input`` and ``target``, in float32 or float64.
        saved: [3 N + 1], the numbers that its kernel saved.
        input, target, weight, ignore_index: arguments of the row loss.
        soft: whether it has label smoothing or class probabilities.
        reduction: the code of its reduction.
        coefficient: c.
        lse: [N], the log-sum-exp of each row; needed on CUDA with ``soft``.
    """
    class_dim = min(input.dim() - 1, 1)
    if not input.is_cpu:
        return _on_device(loss, saved, input.shape[class_dim], target, weight, soft, reduction, coefficient, lse)
    first, second, third = saved[:-1].double().view(3, -1).unbind()
    counts, row_weight = torch.ones_like(first, dtype=torch.bool), torch.ones_like(first)
    label = None
    if not target.is_floating_point():
        counts = target.long() != ignore_index
        label = torch.where(counts, target, 0).long()
        counts = counts.reshape(-1)
        if weight is not None:
            row_weight = weight.double()[label.reshape(-1)]
    if soft or label is None:
        lse = first + second.log1p()
        edited = _edited(saved, counts, second, third + 2.0 * coefficient * row_weight * lse)
    else:  # the backward pass multiplies with the weight
        z_y = input.gather(class_dim, label.unsqueeze(class_dim)).reshape(-1).double()
        of_label = (z_y - first).exp()
        lse = first + ((of_label - 1.0) - third).log1p()
        of_lse = 2.0 * coefficient * lse / (of_label - third)
        total = second + of_lse
        # Where the two terms cancel, the third number would be infinite. The least number has no name, because a graph
        # of dynamic shapes takes a named float as an input.
        if saved.dtype == torch.float64:
            total = torch.where(total.abs() < 1e-300, 1e-300, total)
        else:
            total = torch.where(total.abs() < 1e-30, 1e-30, total)
        edited = _edited(saved, counts, total, (second * third + of_lse * of_label) / total)
    terms = torch.where(counts, coefficient * row_weight * lse.square(), 0.0)
    return _sum(loss, terms, saved, reduction), edited


def _edited(saved: Tensor, counts: Tensor, second: Tensor, third: Tensor) -> Tensor:
    numbers = [torch.where(counts, number, 0.0).to(saved.dtype) for number in (second, third)]
    return torch.cat([saved[: counts.shape[0]], *numbers, saved[-1:]])


def _on_device(
    loss: Tensor,
    saved: Tensor,
    classes: int,
    target: Tensor,
    weight: Tensor | None,
    soft: bool,
    reduction: int,
    coefficient: float,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same on CUDA, in few operations: each is a launch. Ignored rows have a log-sum-exp of 0."""
    if lse is None:
        rows = saved.numel() // 3
        lse = saved[:rows] + saved[rows : 2 * rows]
    lse = lse.to(saved.dtype)
    slope = lse
    if weight is not None and not target.is_floating_point():
        # No error for a label out of range: the loss of its row is NaN.
        weighted = lse * weight.to(lse.dtype)[target.reshape(-1).long().clamp(0, classes - 1)]
        slope = weighted if soft else lse  # the backward pass of labels without smoothing multiplies with the weight
        terms = coefficient * weighted * lse
    else:
        terms = coefficient * lse.square()
    edited = torch.cat([saved[:-1], 2.0 * coefficient * slope, saved[-1:]])
    return _sum(loss, terms, saved, reduction), edited


def _sum(loss: Tensor, terms: Tensor, saved: Tensor, reduction: int) -> Tensor:
    """The loss with a term per row, reduced like it."""
    if REDUCTIONS[reduction] == "none":
        found = loss + terms.reshape(loss.shape)
    else:
        total = terms.sum(dtype=torch.float64)
        found = loss + (total / saved[-1] if REDUCTIONS[reduction] == "mean" else total)
    # Graphs of torch 2.11 lose the gradient of a tensor that has two names, as after a conversion to its own dtype.
    return found if found.dtype == loss.dtype else found.to(loss.dtype)
