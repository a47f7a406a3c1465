"""The z-loss beside a row loss of the CPU's kernels, in torch operations (csrc/math/z_loss.h)."""

import torch
from torch import Tensor

__all__ = ["z_loss"]


def z_loss(
    saved: Tensor,
    target_logit: Tensor | None,
    target: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    coefficient: float,
) -> tuple[Tensor, Tensor]:
    """c w lse^2 of each row, and the saved numbers of the sum of both losses.

    Args:
        saved: [3 N + 1], the numbers that the kernel of the row loss saved.
        target_logit: [N] float64 for labels without smoothing; None for smoothing and class probabilities.
        target: [N] labels; None for class probabilities.
        weight: [C] float64 class weights, or None.
        ignore_index: label of the rows that do not count.
        coefficient: c.

    Returns:
        The z-losses [N] in float64, 0 in ignored rows, and the numbers [3 N + 1].
    """
    first, second, third = saved[:-1].double().view(3, -1).unbind()
    counts, row_weight = torch.ones_like(first, dtype=torch.bool), torch.ones_like(first)
    if target is not None:
        counts = target != ignore_index
        if weight is not None:
            row_weight = weight[torch.where(counts, target, 0).long()]
    if target_logit is None:
        lse = first + second.log1p()
        third = third + 2.0 * coefficient * row_weight * lse
    else:  # the backward pass multiplies with the weight
        of_label = (target_logit - first).exp()
        lse = first + ((of_label - 1.0) - third).log1p()
        of_lse = 2.0 * coefficient * lse / (of_label - third)
        total = second + of_lse
        # Where the two terms cancel, the third number would be infinite. The least number has no name, because a graph
        # of dynamic shapes takes a named float as an input.
        if saved.dtype == torch.float64:
            total = torch.where(total.abs() < 1e-300, 1e-300, total)
        else:
            total = torch.where(total.abs() < 1e-30, 1e-30, total)
        second, third = total, (second * third + of_lse * of_label) / total
    loss = torch.where(counts, coefficient * row_weight * lse.square(), 0.0)
    second, third = torch.where(counts, second, 0.0), torch.where(counts, third, 0.0)
    return loss, torch.cat([first, second, third, saved[-1:].double()]).to(saved.dtype)
