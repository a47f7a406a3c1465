"""Sums over the classes of each row, for the statistics of a loss, in torch operations."""

from typing import Any

import torch
from torch import Tensor

from focalkern._devices import has_float64
from focalkern._types import compute_dtype

__all__ = ["has_label", "is_small_head", "row_statistics", "row_sums"]

# Logits per block: on the CPU as many as fit its caches, on other devices enough to bound the extra memory.
_BLOCK = {"cpu": 1 << 19}
_OTHER_BLOCK = 1 << 23


def has_label(target: Tensor, value: int) -> bool:
    """Whether a label equals ``value``."""
    return bool((target == value).any())


def is_small_head(*_: Any) -> bool:
    """Always False: plain torch takes longer than the checks in Python, which this answer saves."""
    return False


def row_sums(input: Tensor) -> tuple[Tensor, Tensor]:
    r"""For each row [N, C], with C >= 1, in float64 where the device has it:

    0. the largest logit m, NaN in rows with NaN;
    1. the sum of exp(z_j - m) over all classes but one of the largest;
    2. the sum of (m - z_j) exp(z_j - m).

    Rows of -inf have the sums 0.

    Returns:
        These numbers [3, N], and the first class with the largest logit [N], int64 (any class in rows with NaN).
    """
    rows, classes = input.shape
    real = torch.float64 if has_float64(input.device) else torch.float32
    sums = torch.empty(3, rows, dtype=real, device=input.device)
    index = torch.empty(rows, dtype=torch.int64, device=input.device)
    step = max(1, _BLOCK.get(input.device.type, _OTHER_BLOCK) // classes)
    for begin in range(0, rows, step):
        block = slice(begin, begin + step)
        z = input[block].to(compute_dtype(input.dtype))
        largest, index[block] = z.max(1)
        shift = torch.where(largest == -torch.inf, 0.0, largest)
        z = z - shift.unsqueeze(1)
        powers = z.exp()
        sums[0, block] = largest.to(real)
        sums[2, block] = (powers * z.clamp_(min=-1e4)).sum(1).neg().to(real)  # a class of -inf adds 0
        rest = powers.scatter_(1, index[block].unsqueeze(1), 0.0).sum(1)
        sums[1, block] = (rest + 0.0 * shift).to(real)  # NaN for a logit of infinity
    return sums, index


def row_statistics(
    input: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics of the rows [N, C] and their labels [N], each [N]; 0, False or -1 for ignored rows.

    Returns:
        log p, entropy and log-sum-exp, in float32, or float64 for float64 logits; the predicted class, int64, -1 in
        rows with NaN; whether it is the label; whether the row counts.
    """
    (largest, rest, fall), index = row_sums(input)
    counts = target.long() != ignore_index
    label = torch.where(counts, target, 0).long()
    legal = (label >= 0) & (label < input.shape[1])
    z_y = input.gather(1, torch.where(legal, label, 0).unsqueeze(1)).squeeze(1).to(largest.dtype)
    log_sum = rest.log1p()
    log_p = torch.where(legal, (z_y - largest) - log_sum, torch.nan)
    numbers = (log_p, log_sum + fall / (1.0 + rest), largest + log_sum)
    # The results of an operator share no memory.
    log_p, entropy, lse = (torch.where(counts, values, 0.0).to(compute_dtype(input.dtype)) for values in numbers)
    predicted = torch.where(counts & ~largest.isnan(), index, -1)
    return log_p, entropy, lse, predicted, counts & (predicted == target), counts
