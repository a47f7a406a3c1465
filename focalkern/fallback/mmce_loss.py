"""Cross-entropy plus the maximum mean calibration error of the batch, in plain torch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from focalkern._devices import where_float64
from focalkern._types import compute_dtype
from focalkern.fallback.focal_loss import focal_definition

__all__ = ["batch_error", "mmce_loss_composite"]

_MEAN = 1  # the code of the compiled module
# Stands for log 0, because -inf - (-inf) would be NaN.
_NOTHING = -1e30


def mmce_loss_composite(
    input: Tensor,
    target: Tensor,
    coefficient: float,
    weighted: bool,
    bandwidth: float,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """The operator ``mmce_loss_composite``, in the dtype of the computation. A kernel has checked the labels."""
    z = input.to(compute_dtype(input.dtype)).movedim(0 if input.dim() == 1 else 1, -1)
    labels = target.long()
    valid = labels != ignore_index
    z = torch.where(valid.unsqueeze(-1), z, 0.0)
    top = z.detach().argmax(-1, keepdim=True)
    error, count = batch_error(z, top, top == labels.unsqueeze(-1), valid, weighted, bandwidth)
    if reduction != _MEAN:
        error = error * count
    cross_entropy = focal_definition(input, target, 0.0, None, None, reduction, ignore_index, 0.0, False)
    return cross_entropy + coefficient * error.to(cross_entropy)


def batch_error(
    z: Tensor, top: Tensor, correct: Tensor, valid: Tensor, weighted: bool, bandwidth: float
) -> tuple[Tensor, Tensor]:
    """The maximum mean calibration error in float64, and the number of valid samples.

    Args:
        z: logits [..., C].
        top: [..., 1] the top class.
        correct: [..., 1] the target probability of the top class.
        valid: [...] bool, whether the sample is not ignored.
        weighted: balance correct and incorrect samples.
        bandwidth: h of the kernel exp(-|r_i - r_j| / h).
    """
    # Sums over the batch are float64. A device without float64 copies the one number per row to the CPU.
    odds = where_float64(_odds_against(z, top).reshape(-1)).double()
    r, one_minus_r = odds.neg().sigmoid(), odds.sigmoid()
    correct = where_float64(correct.reshape(-1)).double()
    valid = where_float64(valid.reshape(-1))
    # c - r without cancellation: 1 - r for correct rows, -r for incorrect ones.
    lack = torch.where(valid, correct, 0.0) * one_minus_r
    excess = torch.where(valid, 1.0 - correct, 0.0) * r
    count = valid.sum()
    if weighted:
        n_correct = torch.where(valid, correct, 0.0).sum()
        both = (n_correct > 0) & (n_correct < count)
        a = lack / torch.where(both, n_correct, math.inf) - excess / torch.where(both, count - n_correct, math.inf)
    else:
        a = (lack - excess) / torch.where(count > 0, count, 1)
    squared = _laplacian_form(a, r, odds, bandwidth)
    # The derivative of the square root at 0 is defined as 0. Rounding may put the sum slightly below 0.
    positive = squared > 0
    return torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0), count


def _odds_against(z: Tensor, index: Tensor) -> Tensor:
    """Log-odds [...] against the class ``index`` [..., 1] for logits [..., C]: log-sum-exp of the others, minus z_i.

    With these log-odds s, p_i = sigmoid(-s) and 1 - p_i = sigmoid(s), both without cancellation.
    """
    others = z.scatter(-1, index, _NOTHING)
    # The difference of logits is computed first, because sums with large logits would round it away.
    top = others.detach().amax(-1, keepdim=True)
    return (others - top).exp().sum(-1).log() + (top - z.gather(-1, index)).squeeze(-1)


def _laplacian_form(a: Tensor, r: Tensor, odds: Tensor, h: float) -> Tensor:
    """sum_ij a_i a_j exp(-|r_i - r_j| / h) for r = sigmoid(-odds), float64, in O(N log N), without an [N, N] matrix.

    On either side of r_i the kernel is a product of two exponentials, so prefix sums over the sorted r give the sums of
    both sides. Samples with equal r are a third part without a derivative in r: |r_i - r_j| has none at 0.
    """
    # Compare the log-odds, because sigmoids of equal log-odds may differ in the last digit with the place in memory.
    against, order = odds.detach().neg().sort()
    r, a = r[order], a[order]
    first, behind = torch.searchsorted(against, against), torch.searchsorted(against, against, right=True)
    rise, fall = (r / h).exp(), (-r / h).exp()
    below = F.pad((a * rise).cumsum(0), (1, 0))[first] * fall
    above = F.pad((a * fall).flip(0).cumsum(0).flip(0), (0, 1))[behind] * rise
    mass = F.pad(a.cumsum(0), (1, 0))
    return (a * (below + (mass[behind] - mass[first]) + above)).sum()
