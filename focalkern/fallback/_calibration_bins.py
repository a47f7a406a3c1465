"""Bins of confidences and their calibration errors in torch operations, as in the compiled calibration grid."""

import torch
from torch import Tensor

EQUAL_WIDTH, EQUAL_MASS, EQUAL_MASS_INTERP = 0, 1, 2


__all__ = ["bucket_sums", "calibration_error"]


# -- bins -------------------------------------------------------------------------------------------------------------
def calibration_error(confidence: Tensor, correct: Tensor, n_bins: int, estimator: int) -> tuple[Tensor, Tensor]:
    """ECE and MCE, [Gt, Gg], of confidences [Gt, Gg, rows]."""
    rows = confidence.shape[-1]
    if estimator == EQUAL_WIDTH:
        count, excess = _equal_width_bins(confidence, correct, n_bins)
    else:
        ordered, correct = _ordered(confidence, correct)
        running = (ordered.double() - correct).cumsum(-1)
        running = torch.nn.functional.pad(running, (1, 0))
        if estimator == EQUAL_MASS:
            larger = rows % n_bins
            bins = torch.arange(n_bins + 1, device=confidence.device)
            ends = (bins * (rows // n_bins) + bins.clamp(max=larger)).expand(*confidence.shape[:2], -1)
        else:
            edges = _interpolated_edges(ordered, n_bins)
            ends = torch.searchsorted(ordered, edges, right=True)
        excess, count = running.gather(-1, ends).diff(dim=-1), ends.diff(dim=-1)
    size = excess.abs()
    # The gap of an empty bin is 0.
    gaps = torch.where(count > 0, size / torch.where(count > 0, count, 1), 0.0)
    return size.sum(-1) / rows, gaps.amax(-1)


def _ordered(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Confidences in ascending order (ties in the order of the rows), and 1.0 for each correct row, 0.0 for others."""
    if confidence.dtype != torch.float32 or confidence.device.type != "cpu":
        ordered, order = confidence.sort(dim=-1, stable=True)
        return ordered, correct.double()[order]
    # One integer key per sample: the bits of the confidence (non-negative floats have the order of their bits), then
    # the row and the correctness. numpy sorts the keys several times faster than torch sorts with an index.
    rows = torch.arange(confidence.shape[-1], device="cpu")
    bits = confidence.view(torch.int32).to(torch.int64).bitwise_left_shift_(32)
    keys = bits.bitwise_or_(rows * 2 + correct).numpy()
    keys.sort(axis=-1)
    sorted_keys = torch.from_numpy(keys)
    ordered = sorted_keys.bitwise_right_shift(32).to(torch.int32).view(torch.float32)
    return ordered, sorted_keys.bitwise_and_(1).double()


def _equal_width_bins(confidence: Tensor, correct: Tensor, n_bins: int) -> tuple[Tensor, Tensor]:
    """The number of samples and the sum of confidence - correct per bin, [Gt, Gg, n_bins] each."""
    edges = torch.arange(1, n_bins, dtype=torch.float64, device=confidence.device) / n_bins
    bins = torch.bucketize(confidence, edges.to(confidence.dtype))
    shape = (*confidence.shape[:2], n_bins)
    count = torch.zeros(shape, dtype=torch.int64, device=confidence.device)
    count.scatter_add_(-1, bins, torch.ones_like(bins))
    excess = torch.zeros(shape, dtype=torch.float64, device=confidence.device)
    excess.scatter_add_(-1, bins, confidence.double() - correct.double())
    return count, excess


def _interpolated_edges(ordered: Tensor, n_bins: int) -> Tensor:
    """Edges [Gt, Gg, n_bins + 1]: sorted confidences interpolated at the ranks 0, rows / n_bins, ..., rows."""
    rows = ordered.shape[-1]
    place = torch.arange(n_bins + 1, dtype=torch.float64, device=ordered.device) * (rows / n_bins)
    place[-1] = rows - 1
    place = torch.where(place < rows - 1, place, float(rows - 1))
    low = place.long()
    lower, upper = ordered[..., low], ordered[..., torch.where(low + 1 < rows, low + 1, low)]
    edges = ((upper.double() - lower.double()) * (place - low) + lower.double()).to(ordered.dtype)
    # Rounding must not move an edge beyond the next sorted confidence.
    return torch.minimum(edges, upper)


def bucket_sums(
    confidence: Tensor, is_correct: Tensor, count: Tensor, total: Tensor, correct: Tensor, sketch: bool
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a sum [Gg, Gt, n_buckets] and the amount that the confidences [Gt, Gg, rows] add to it."""
    confidence = confidence.transpose(0, 1)
    n_buckets = count.shape[-1]
    if sketch:
        buckets = sketch_bucket(confidence, n_buckets)
    else:
        edges = torch.arange(1, n_buckets, dtype=torch.float64, device=confidence.device) / n_buckets
        buckets = torch.bucketize(confidence.contiguous(), edges.to(confidence.dtype))

    def summed(values: Tensor, like: Tensor) -> Tensor:
        values = values.to(like.dtype).expand(buckets.shape)
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device).scatter_add_(-1, buckets, values)

    ones = torch.ones((), device=confidence.device)
    return [
        (count, summed(ones, count)),
        (total, summed(confidence, total)),
        (correct, summed(is_correct, correct)),
    ]


def sketch_bucket(confidence: Tensor, n_buckets: int) -> Tensor:
    """The bucket of each confidence in the quantile sketch, as sketch_bucket of csrc/math/binning.h."""
    middle = n_buckets // 3
    low = ((confidence + confidence).sqrt() * (n_buckets / 3)).long().clamp(max=middle)
    u = 1 - confidence
    high = (n_buckets - (u + u).sqrt().sqrt() * (n_buckets * 2 / 3)).long().clamp(middle, n_buckets - 1)
    return torch.where(confidence <= 0.5, low, high)
