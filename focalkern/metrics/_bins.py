"""Reliability bins by each estimator, and the errors as functions of the bins."""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import arrays_for_arrays
from focalkern.metrics._images import flattened
from focalkern.metrics._inputs import Estimator, MetricInput, check_bins, confidence_and_correct

__all__ = [
    "ReliabilityBins",
    "bins_of",
    "debiased_error",
    "equal_width_bin",
    "equal_width_edges",
    "equal_width_index",
    "expected_error",
    "interp_places",
    "maximum_error",
    "reliability_bins",
    "rms_error",
]

_FEW = 2048  # confidences, up to which one call that searches takes less time than ten that compute


@dataclass(frozen=True)
class ReliabilityBins:
    """Counts and means of each confidence bin. Shapes are [..., M] for M bins; "..." is the batch, usually empty.

    Attributes:
        lower, upper: float64, the edges of the bin (``equal_width``, ``equal_mass_interp``), or its smallest and
            largest confidence (``equal_mass``, NaN for an empty bin).
        count: int64, number of samples in the bin.
        confidence: float64, mean confidence of these samples, NaN for an empty bin.
        accuracy: float64, fraction of these samples that is correct, NaN for an empty bin.
        n_samples: N, the number of all samples, including samples in no bin.
        estimator: name of the binning.

    Example:
        >>> confidence, correct = torch.tensor([0.98, 0.98, 0.6, 0.6]), torch.tensor([1, 1, 1, 0])
        >>> bins = fk.metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=2, estimator="equal_mass")
        >>> bins.n_bins, bins.weight
        (2, tensor([0.5000, 0.5000], dtype=torch.float64))
        >>> bins.gap.round(decimals=4)  # the first bin is over-confident by 0.1
        tensor([-0.1000,  0.0200], dtype=torch.float64)
    """

    lower: Tensor
    upper: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor
    n_samples: int
    estimator: Estimator

    @property
    def n_bins(self) -> int:
        """M, the number of bins."""
        return self.count.shape[-1]

    @property
    def gap(self) -> Tensor:
        """accuracy - confidence, float64 [..., M]: negative for an over-confident bin, NaN for an empty bin."""
        return self.accuracy - self.confidence

    @property
    def weight(self) -> Tensor:
        """count / N, float64 [..., M]; NaN for N = 0."""
        count: Any = self.count  # NumPy arrays give a NumPy array
        return (count.to(torch.float64) if isinstance(count, Tensor) else count) / (self.n_samples or math.nan)


@arrays_for_arrays
def reliability_bins(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    confidence: Any = None,
    correct: Any = None,
    ignore_index: int | None = None,
) -> ReliabilityBins:
    r"""Count, mean confidence and accuracy of every bin: the numbers of a reliability diagram.

    .. math:: \text{conf}_b = \frac{1}{|B_b|} \sum_{i \in B_b} c_i, \qquad
        \text{acc}_b = \frac{1}{|B_b|} \sum_{i \in B_b} \text{correct}_i

    Args:
        probs, target, n_bins, estimator, confidence, correct, ignore_index: as :func:`expected_calibration_error`.

    Returns:
        :class:`ReliabilityBins` with M = ``n_bins`` bins.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`.

    Source: Guo et al. 2017 (arXiv 1706.04599), section 2; the estimators are named in :mod:`focalkern.metrics`.

    Example:
        >>> confidence, correct = torch.tensor([0.98, 0.98, 0.6, 0.6]), torch.tensor([1, 1, 1, 0])
        >>> bins = fk.metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=2, estimator="equal_mass")
        >>> bins.count, bins.accuracy
        (tensor([2, 2]), tensor([0.5000, 1.0000], dtype=torch.float64))
    """
    rows = flattened("reliability_bins", MetricInput(probs, target, confidence, correct), ignore_index)
    return bins_of("reliability_bins", rows, n_bins, estimator)


def expected_error(bins: ReliabilityBins) -> Tensor:
    return _nan_if_empty((bins.weight * bins.gap.abs()).nansum(-1), bins)


def maximum_error(bins: ReliabilityBins) -> Tensor:
    return _nan_if_empty(bins.gap.abs().nan_to_num(nan=0.0).amax(-1), bins)


def rms_error(bins: ReliabilityBins) -> Tensor:
    return _nan_if_empty((bins.weight * bins.gap.square()).nansum(-1).sqrt(), bins)


def debiased_error(bins: ReliabilityBins, norm: Literal["l1", "l2"] = "l2") -> Tensor:
    gap, n = bins.gap.nan_to_num(nan=0.0), bins.count.to(torch.float64)
    variance = (bins.accuracy * (1 - bins.accuracy)).nan_to_num(nan=0.0).clamp(min=0)
    if norm == "l2":
        square = torch.where(bins.count > 1, gap.square() - variance / (n - 1), 0.0)
        return _nan_if_empty((bins.weight * square).sum(-1).clamp(min=0).sqrt(), bins)
    deviation = (variance / n.clamp(min=1)).sqrt()
    # E|N(g, s^2)| = s sqrt(2 / pi) exp(-g^2 / 2 s^2) + g erf(g / s sqrt(2)), which is |g| at s = 0.
    ratio = torch.where(deviation > 0, gap / (deviation * math.sqrt(2)), torch.sign(gap) * math.inf).nan_to_num(nan=0.0)
    folded = deviation * math.sqrt(2 / math.pi) * (-ratio.square()).exp() + gap * ratio.erf()
    return _nan_if_empty((bins.weight * (2 * gap.abs() - folded)).sum(-1), bins)


@torch.no_grad()
def bins_of(op: str, rows: MetricInput, n_bins: int, estimator: Estimator) -> ReliabilityBins:
    n_bins = check_bins(op, n_bins, estimator)
    confidence, correct = confidence_and_correct(op, *rows)
    n_samples = confidence.shape[-1]
    device = confidence.device
    if estimator == "equal_mass":
        # The sort moves confidence and correctness, so the bin of a sample depends only on its place.
        confidence, order = confidence.sort(dim=-1, stable=True)
        correct = correct.gather(-1, order)
        sizes = torch.full((n_bins,), n_samples // n_bins, device=device)
        sizes[: n_samples % n_bins] += 1
        index = torch.repeat_interleave(torch.arange(n_bins, device=device), sizes, output_size=n_samples)
        last = sizes.cumsum(0) - 1
        padded = torch.nn.functional.pad(confidence.to(torch.float64), (0, 1), value=math.nan)
        upper = padded[..., torch.where(sizes > 0, last, n_samples)]
        lower = padded[..., torch.where(sizes > 0, last - sizes + 1, n_samples)]
        index = index.expand(confidence.shape) + 1
    else:
        # Bin (lo, hi] has the number i with edges[i - 1] < c <= edges[i].
        if estimator == "equal_width":
            edges = equal_width_edges(confidence, n_bins)
            index = equal_width_index(confidence, edges)
        else:
            edges = _interp_edges(confidence, n_bins)
            index = torch.searchsorted(edges, confidence)
        lower, upper = edges[..., :-1].to(torch.float64), edges[..., 1:].to(torch.float64)
    # Samples in no bin have index 0; this extra bin is summed first and dropped.
    shape = (*confidence.shape[:-1], n_bins + 1)

    def sums(values: Tensor) -> Tensor:
        return values.new_zeros(shape).scatter_add_(-1, index, values)[..., 1:]

    count = sums(index.new_ones(()).expand(index.shape))
    weight = torch.where(count > 0, count.to(torch.float64), math.nan)
    return ReliabilityBins(
        lower=lower.expand(count.shape),
        upper=upper.expand(count.shape),
        count=count,
        confidence=sums(confidence.to(torch.float64)) / weight,
        accuracy=sums(correct) / weight,
        n_samples=n_samples,
        estimator=estimator,
    )


def equal_width_edges(confidence: Tensor, n_bins: int) -> Tensor:
    """[M + 1]: k/M, rounded to the dtype of the confidence."""
    return (torch.arange(n_bins + 1, dtype=torch.float64, device=confidence.device) / n_bins).to(confidence.dtype)


def equal_width_bin(confidence: Tensor, n_bins: int) -> Tensor:
    """The bin of each confidence, from 0 to M - 1."""
    if confidence.numel() > _FEW:
        return equal_width_index(confidence, equal_width_edges(confidence, n_bins)).sub_(1)
    return torch.searchsorted(_inner_edges(n_bins, confidence.dtype, confidence.device), confidence)


@functools.lru_cache(maxsize=16)
def _inner_edges(n_bins: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return equal_width_edges(torch.empty(0, dtype=dtype, device=device), n_bins)[1:-1]


def equal_width_index(confidence: Tensor, edges: Tensor) -> Tensor:
    """The bin of each confidence, from 1 to M."""
    few = confidence.numel() <= _FEW
    index = torch.searchsorted(edges, confidence) if few else _equal_width_index(confidence, edges)
    return index.clamp_(1, len(edges) - 1)


def _equal_width_index(confidence: Tensor, edges: Tensor) -> Tensor:
    """Equals torch.searchsorted(edges, confidence) for equal widths, for many confidences in a third of the time."""
    n_bins = len(edges) - 1
    if confidence.dtype not in (torch.float32, torch.float64) or n_bins > 1024:
        return torch.searchsorted(edges, confidence)
    # The error of c M is less than one bin, so a comparison with k / M corrects it; k / M is rounded as the edges are.
    place = (confidence * n_bins).ceil_()
    place -= (confidence <= (place - 1) / n_bins).to(place.dtype)
    place += (confidence > place / n_bins).to(place.dtype)
    return place.to(torch.int64)


def _interp_edges(confidence: Tensor, n_bins: int) -> Tensor:
    """[..., M + 1]: numpy.interp(linspace(0, N, M + 1), arange(N), sorted), rounded to the dtype of the confidence."""
    n_samples = confidence.shape[-1]
    if n_samples == 0:
        return confidence.new_full((*confidence.shape[:-1], n_bins + 1), math.nan)
    left, right, fraction = interp_places(n_samples, n_bins, confidence.device)
    ordered = confidence.sort(dim=-1).values.to(torch.float64)
    slope = ordered[..., right] - ordered[..., left]
    return (slope * fraction + ordered[..., left]).to(confidence.dtype)


def interp_places(n_samples: int, n_bins: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the two sorted confidences around each edge, and the weight of the second, [M + 1] each."""
    # numpy's linspace, because k * N / M rounded differently could move a sample to another bin.
    place = torch.from_numpy(np.linspace(0, n_samples, n_bins + 1)).clamp_(max=n_samples - 1).to(device)
    left = place.floor().long()
    return left, (left + 1).clamp_(max=n_samples - 1), place - left


def _nan_if_empty(value: Tensor, bins: ReliabilityBins) -> Tensor:
    return value if bins.n_samples else torch.full_like(value, math.nan)
