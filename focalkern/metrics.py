"""How well probabilities are calibrated: named estimators, in plain torch.

Every figure is a fraction, never percent, and every ECE is told apart by the name of its estimator, because the three
in use differ by more than the effects they are used to compare:

``equal_width``
    Bins (k/M, (k + 1)/M]; a confidence of exactly 0 belongs to the first. The edges are rounded to the dtype of the
    confidence and compared there (Guo et al. 2017, arXiv 1706.04599; Mukhoti et al. 2020, arXiv 2002.09437).
``equal_mass``
    Confidences sorted ascending, ties in row order, split as ``numpy.array_split`` does: sizes differ by at most one.
``equal_mass_interp``
    Edges interpolated between the sorted confidences, ``interp(linspace(0, N, M + 1), arange(N), sorted)``, bins
    (lo, hi]. The lowest sample falls in no bin, as in the published AdaECE code of Mukhoti et al. 2020.

Inputs are tensors (CPU or CUDA, any floating dtype) or anything that NumPy makes an array of. Sums run in float64. The
rows are the last dimension but one of ``probs`` and the last of everything else; dimensions before that are a batch
of independent sets (bootstrap replicates, say), and results have the batch's shape. Nothing here is differentiable.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "ESTIMATORS",
    "ReliabilityBins",
    "accuracy",
    "auroc",
    "brier_score",
    "classwise_calibration_error",
    "expected_calibration_error",
    "maximum_calibration_error",
    "nll",
    "reliability_bins",
    "rms_calibration_error",
]

ESTIMATORS = ("equal_width", "equal_mass", "equal_mass_interp")

# Rows of probabilities are taken as normalised within this much everywhere in the library, so one entry may be above
# 1 by as much; it counts as 1 for the choice of its bin.
_ABOVE_ONE = 1e-3

# Probabilities that classwise_calibration_error looks at together: its work space is a few times as many numbers.
_CLASSWISE_BLOCK = 1 << 22


@dataclass(frozen=True)
class ReliabilityBins:
    """What happens in each confidence bin. Shapes are [..., M] for M bins; "..." is the batch, usually nothing.

    Attributes:
        lower, upper: float64, the cuts of the bin (``equal_width``, ``equal_mass_interp``), or its smallest and
            largest confidence (``equal_mass``, NaN for an empty bin).
        count: int64, samples in the bin.
        confidence: float64, their mean confidence, NaN for an empty bin.
        accuracy: float64, the fraction of them that is correct, NaN for an empty bin.
        n_samples: N, all samples, in a bin or not.
        estimator: name of the binning.
    """

    lower: Tensor
    upper: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor
    n_samples: int
    estimator: str

    @property
    def n_bins(self) -> int:
        return self.count.shape[-1]

    @property
    def gap(self) -> Tensor:
        """accuracy - confidence, float64 [..., M]: negative where the bin is over-confident, NaN where it is empty."""
        return self.accuracy - self.confidence

    @property
    def weight(self) -> Tensor:
        """count / N, float64 [..., M]; NaN for N = 0."""
        return self.count.to(torch.float64) / (self.n_samples or math.nan)


def expected_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: str = "equal_width",
    confidence: Any = None,
    correct: Any = None,
) -> Tensor:
    r"""Expected calibration error of the top class.

    .. math:: \text{ECE} = \sum_b \frac{|B_b|}{N} \, |\text{acc}_b - \text{conf}_b|

    A sample is what ``probs`` and ``target`` say: confidence = largest probability, correct = its class is the
    target. Either can be replaced: pass ``correct`` beside ``probs`` for calibrated probabilities, decided by the
    argmax of the logits they came from (a saturated row may tie in its probabilities and not in its logits), or pass
    ``confidence`` and ``correct`` and no probabilities at all.

    Args:
        probs: [..., N, C] probabilities, floating point.
        target: [..., N] class indices, integer. Not needed when ``correct`` is given.
        n_bins: M, at least 1.
        estimator: ``"equal_width"``, ``"equal_mass"`` or ``"equal_mass_interp"``; see the top of this module.
        confidence: [..., N] in [0, 1], floating point, in place of ``probs``.
        correct: [..., N], bool, or numbers in [0, 1].

    Returns:
        float64 tensor of the batch's shape (a 0-dim tensor without a batch), a fraction; NaN for N = 0.

    Raises:
        TypeError: probabilities that are not floating point, targets that are not integers.
        ValueError: shapes that do not fit; a confidence outside [0, 1] or NaN; an unknown estimator; n_bins < 1; too
            few or too many of the four inputs.
        IndexError: a target outside [0, C).

    Source: Guo et al. 2017 (arXiv 1706.04599), section 2; estimators as named at the top of this module.
    """
    bins = _bins("expected_calibration_error", probs, target, confidence, correct, n_bins, estimator)
    return _nan_if_empty((bins.weight * bins.gap.abs()).nansum(-1), bins)


def maximum_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: str = "equal_width",
    confidence: Any = None,
    correct: Any = None,
) -> Tensor:
    r"""Largest gap between accuracy and mean confidence over the bins that are not empty.

    .. math:: \text{MCE} = \max_b |\text{acc}_b - \text{conf}_b|

    Under ``equal_mass`` it depends on the order of tied confidences: compare it only where they are distinct.

    Args, Returns, Raises: as :func:`expected_calibration_error`.

    Source: Guo et al. 2017 (arXiv 1706.04599), section 2.
    """
    bins = _bins("maximum_calibration_error", probs, target, confidence, correct, n_bins, estimator)
    return _nan_if_empty(bins.gap.abs().nan_to_num(nan=0.0).amax(-1), bins)


def rms_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: str = "equal_width",
    confidence: Any = None,
    correct: Any = None,
) -> Tensor:
    r"""Root of the weighted mean of the squared gaps.

    .. math:: \text{RMSCE} = \sqrt{\sum_b \frac{|B_b|}{N} (\text{acc}_b - \text{conf}_b)^2}

    Args, Returns, Raises: as :func:`expected_calibration_error`.

    Source: Hendrycks, Mazeika, Dietterich 2019 (arXiv 1812.04606), section 5.
    """
    bins = _bins("rms_calibration_error", probs, target, confidence, correct, n_bins, estimator)
    return _nan_if_empty((bins.weight * bins.gap.square()).nansum(-1).sqrt(), bins)


@torch.no_grad()
def classwise_calibration_error(probs: Any, target: Any, *, n_bins: int = 15, estimator: str = "equal_width") -> Tensor:
    r"""Mean over the classes of the calibration error of that class's probability against [target = class].

    .. math:: \frac{1}{C} \sum_k \sum_b \frac{|B_{bk}|}{N} \, |\text{freq}_{bk} - \text{prob}_{bk}|

    Args:
        probs: [..., N, C] probabilities, floating point.
        target: [..., N] class indices, integer.
        n_bins: bins per class, at least 1.
        estimator: as :func:`expected_calibration_error`; the published figures are ``"equal_width"``.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN for N = 0.

    Raises: as :func:`expected_calibration_error`.

    Source: Kull et al. 2019 (arXiv 1910.12656), section 2; Mukhoti et al. 2020 (arXiv 2002.09437), table C.2.
    """
    name = "classwise_calibration_error"
    probs, target = _probs_and_target(name, probs, target)
    *batch, n_samples, n_classes = probs.shape
    total = torch.zeros(batch, dtype=torch.float64, device=probs.device)
    block = max(1, _CLASSWISE_BLOCK // max(1, n_samples * math.prod(batch)))
    for first in range(0, n_classes, block):
        classes = torch.arange(first, min(first + block, n_classes), device=probs.device)
        of_class = probs[..., first : first + block].transpose(-1, -2).contiguous()
        is_class = target.unsqueeze(-2) == classes.unsqueeze(-1)
        error = expected_calibration_error(confidence=of_class, correct=is_class, n_bins=n_bins, estimator=estimator)
        total += error.sum(-1)
    result: Tensor = total / n_classes
    return result


@torch.no_grad()
def nll(probs: Any, target: Any, *, log: bool = False) -> Tensor:
    r"""Mean negative log-likelihood of the target class, natural logarithm.

    .. math:: -\frac{1}{N} \sum_i \log p_{i, y_i}

    Args:
        probs: [..., N, C] probabilities, or log-probabilities with ``log=True`` (which keep the digits that a
            probability close to 1 has lost).
        target: [..., N] class indices, integer.
        log: what ``probs`` holds.

    Returns:
        float64 tensor of the batch's shape; infinite when a target has probability 0; NaN for N = 0.

    Raises: as :func:`expected_calibration_error`.
    """
    probs, target = _probs_and_target("nll", probs, target, log=log)
    of_target = probs.gather(-1, target.unsqueeze(-1)).squeeze(-1).to(torch.float64)
    # 0 - x, not -x: a perfect score prints as 0 and not as -0.
    log_probs = of_target if log else of_target.log()
    return torch.sub(0.0, log_probs).mean(-1)


@torch.no_grad()
def brier_score(probs: Any, target: Any) -> Tensor:
    r"""Mean squared distance between the probabilities and the one-hot target, summed over the classes.

    .. math:: \frac{1}{N} \sum_i \sum_k (p_{ik} - [k = y_i])^2

    Between 0 and 2. (The score of binary problems that counts one class only is half of this.)

    Args:
        probs: [..., N, C] probabilities, floating point.
        target: [..., N] class indices, integer.

    Returns:
        float64 tensor of the batch's shape; NaN for N = 0.

    Raises: as :func:`expected_calibration_error`.

    Source: Brier 1950, "Verification of forecasts expressed in terms of probability".
    """
    probs, target = _probs_and_target("brier_score", probs, target)
    index = target.unsqueeze(-1)
    residual = probs.to(torch.float64, copy=True)
    residual.scatter_add_(-1, index, residual.new_full((), -1.0).expand(index.shape))
    result: Tensor = residual.square_().sum(-1).mean(-1)
    return result


@torch.no_grad()
def accuracy(probs: Any = None, target: Any = None, *, correct: Any = None) -> Tensor:
    """Fraction of the rows whose largest entry is the target's; the first of several largest counts.

    Args:
        probs: [..., N, C] probabilities or logits, floating point.
        target: [..., N] class indices, integer.
        correct: [..., N], bool, in place of both.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN for N = 0.

    Raises: as :func:`expected_calibration_error`, but logits are as good as probabilities here.
    """
    if correct is None:
        if probs is None or target is None:
            raise ValueError("accuracy: expected probs and target, or correct")
        scores, target = _probs_and_target("accuracy", probs, target, log=True)
        result: Tensor = (scores.argmax(-1) == target).to(torch.float64).mean(-1)
        return result
    if probs is not None or target is not None:
        raise ValueError("accuracy: correct replaces probs and target, got both")
    return as_tensor(correct).to(torch.float64).mean(-1)


@torch.no_grad()
def auroc(confidence_in: Any, confidence_out: Any) -> Tensor:
    r"""Area under the ROC curve of confidence as a detector of out-of-distribution inputs.

    .. math:: P(\text{in} > \text{out}) + \tfrac{1}{2} P(\text{in} = \text{out})

    1 when every in-distribution sample is more confident than every other, 1/2 when confidence says nothing.

    Args:
        confidence_in: [N] confidences on in-distribution samples, floating point, any finite scale.
        confidence_out: [K] confidences on out-of-distribution samples, same dtype.

    Returns:
        float64 0-dim tensor, a fraction; NaN when either set is empty.

    Raises:
        TypeError: not floating point, or two dtypes.
        ValueError: not one-dimensional, two devices, or NaN.

    Source: Hanley & McNeil 1982, "The meaning and use of the area under a ROC curve".
    """
    sets = []
    for name, values in (("confidence_in", confidence_in), ("confidence_out", confidence_out)):
        values = as_tensor(values)
        if not values.is_floating_point():
            raise TypeError(f"auroc: {name} must be floating point, got {values.dtype}")
        if values.dim() != 1:
            raise ValueError(f"auroc: {name} must be one-dimensional, got shape {list(values.shape)}")
        if bool(values.isnan().any()):
            raise ValueError(f"auroc: {name} must not be NaN, got NaN at row {int(values.isnan().nonzero()[0])}")
        sets.append(values)
    inside, outside = sets
    if inside.dtype != outside.dtype:
        raise TypeError(
            f"auroc: confidence_out must have the dtype of confidence_in, {inside.dtype}, got {outside.dtype}"
        )
    if inside.device != outside.device:
        raise ValueError(
            f"auroc: confidence_out must be on the device of confidence_in, {inside.device}, got {outside.device}"
        )
    pairs = len(inside) * len(outside)
    if pairs == 0:
        return torch.full((), math.nan, dtype=torch.float64, device=inside.device)
    ordered = outside.sort().values
    below = torch.searchsorted(ordered, inside, right=False).sum()
    not_above = torch.searchsorted(ordered, inside, right=True).sum()
    # Both sums are int64 and exact: (wins + (wins + ties)) / 2.
    return (below + not_above).to(torch.float64) / (2 * pairs)


def reliability_bins(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: str = "equal_width",
    confidence: Any = None,
    correct: Any = None,
) -> ReliabilityBins:
    """Count, mean confidence and accuracy of every bin: the numbers of a reliability diagram.

    Args, Raises: as :func:`expected_calibration_error`.

    Returns:
        :class:`ReliabilityBins` with M = ``n_bins`` bins.

    Source: Guo et al. 2017 (arXiv 1706.04599), section 2; estimators as named at the top of this module.
    """
    return _bins("reliability_bins", probs, target, confidence, correct, n_bins, estimator)


def as_tensor(values: Any) -> Tensor:
    """A tensor as it is, detached; anything else through NumPy, without a copy where that is safe."""
    if isinstance(values, Tensor):
        return values.detach()
    array = np.ascontiguousarray(values)
    # torch has no other byte order than the machine's.
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # torch warns about memory that it could write to and must not.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


@torch.no_grad()
def _bins(
    op: str, probs: Any, target: Any, confidence: Any, correct: Any, n_bins: int, estimator: str
) -> ReliabilityBins:
    if estimator not in ESTIMATORS:
        raise ValueError(f"{op}: estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    if isinstance(n_bins, bool) or not isinstance(n_bins, int | np.integer):
        raise TypeError(f"{op}: n_bins must be an int, got {n_bins!r}")
    n_bins = int(n_bins)
    if n_bins < 1:
        raise ValueError(f"{op}: n_bins must be at least 1, got {n_bins}")
    confidence, correct = _confidence_and_correct(op, probs, target, confidence, correct)
    n_samples = confidence.shape[-1]
    device = confidence.device
    if estimator == "equal_mass":
        # Sorting moves the samples themselves, so the bin of a sample is a matter of its place only.
        confidence, order = confidence.sort(dim=-1, stable=True)
        correct = correct.gather(-1, order)
        sizes = torch.full((n_bins,), n_samples // n_bins, device=device)
        sizes[: n_samples % n_bins] += 1
        index = torch.repeat_interleave(torch.arange(n_bins, device=device), sizes, output_size=n_samples)
        last = sizes.cumsum(0) - 1
        padded = torch.nn.functional.pad(confidence.to(torch.float64), (0, 1), value=math.nan)
        upper = padded[..., torch.where(sizes > 0, last, n_samples)]
        lower = padded[..., torch.where(sizes > 0, last - sizes + 1, n_samples)]
        index = index.expand(confidence.shape)
    else:
        edges = (
            _equal_width_edges(confidence, n_bins) if estimator == "equal_width" else _interp_edges(confidence, n_bins)
        )
        # searchsorted finds edges[i - 1] < c <= edges[i], the bin (lo, hi] that wants the number i - 1.
        index = torch.searchsorted(edges, confidence) - 1
        if estimator == "equal_width":
            index = index.clamp_(0, n_bins - 1)
        lower, upper = edges[..., :-1].to(torch.float64), edges[..., 1:].to(torch.float64)
    # The bin -1, of the sample that belongs nowhere, is summed in front of the others and dropped.
    index = index + 1
    shape = (*confidence.shape[:-1], n_bins + 1)

    def sums(values: Tensor) -> Tensor:
        return values.new_zeros(shape).scatter_add_(-1, index, values)[..., 1:]

    count = sums(torch.ones_like(index))
    weight = torch.where(count > 0, count, math.nan).to(torch.float64)
    return ReliabilityBins(
        lower=lower.expand(count.shape),
        upper=upper.expand(count.shape),
        count=count,
        confidence=sums(confidence.to(torch.float64)) / weight,
        accuracy=sums(correct) / weight,
        n_samples=n_samples,
        estimator=estimator,
    )


def _equal_width_edges(confidence: Tensor, n_bins: int) -> Tensor:
    """[M + 1]: k/M, rounded to the dtype of the confidence."""
    return (torch.arange(n_bins + 1, dtype=torch.float64, device=confidence.device) / n_bins).to(confidence.dtype)


def _interp_edges(confidence: Tensor, n_bins: int) -> Tensor:
    """[..., M + 1]: numpy.interp(linspace(0, N, M + 1), arange(N), sorted), rounded to the dtype of the confidence."""
    n_samples = confidence.shape[-1]
    if n_samples == 0:
        return confidence.new_full((*confidence.shape[:-1], n_bins + 1), math.nan)
    left, right, fraction = _interp_places(n_samples, n_bins, confidence.device)
    ordered = confidence.sort(dim=-1).values.to(torch.float64)
    slope = ordered[..., right] - ordered[..., left]
    return (slope * fraction + ordered[..., left]).to(confidence.dtype)


def _interp_places(n_samples: int, n_bins: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Between which two of the sorted confidences each edge lies, and how far from the first; three times [M + 1]."""
    # numpy's own linspace: another way to round k * N / M would put a sample on the other side of a cut.
    place = torch.from_numpy(np.linspace(0, n_samples, n_bins + 1)).clamp_(max=n_samples - 1).to(device)
    left = place.floor().long()
    return left, (left + 1).clamp_(max=n_samples - 1), place - left


def _confidence_and_correct(op: str, probs: Any, target: Any, confidence: Any, correct: Any) -> tuple[Tensor, Tensor]:
    """confidence [..., N] in its own dtype, checked, and correct [..., N] as float64."""
    if (probs is None) == (confidence is None):
        found = "neither" if probs is None else "both"
        raise ValueError(f"{op}: expected either probs or confidence, got {found}")
    if (target is None) == (correct is None):
        found = "neither" if target is None else "both"
        raise ValueError(f"{op}: expected either target or correct, got {found}")
    if probs is not None:
        if target is not None:
            probs, target = _probs_and_target(op, probs, target)
            correct = probs.argmax(-1) == target
        else:
            probs = _as_probs(op, probs)
        confidence = probs.amax(-1)
    elif target is not None:
        raise ValueError(f"{op}: confidence goes with correct, got target")
    confidence = as_tensor(confidence)
    if not confidence.is_floating_point():
        raise TypeError(f"{op}: confidence must be floating point, got {confidence.dtype}")
    if confidence.dim() < 1:
        raise ValueError(f"{op}: confidence must be [N], got a single number")
    correct = as_tensor(correct)
    if correct.shape != confidence.shape:
        raise ValueError(f"{op}: correct must be [N] = {list(confidence.shape)}, got {list(correct.shape)}")
    if correct.device != confidence.device:
        raise ValueError(f"{op}: correct must be on {confidence.device}, got {correct.device}")
    correct = correct.to(torch.float64)
    # Written so that NaN fails too.
    for name, values in (("confidence", confidence), ("correct", correct)):
        inside = (values >= 0) & (values <= 1 + _ABOVE_ONE)
        if not bool(inside.all()):
            where = (~inside).nonzero()[0].tolist()
            raise ValueError(
                f"{op}: {name} must be in [0, 1], got {values[tuple(where)].item()} at row {where[-1]}"
                + ("; are these logits?" if name == "confidence" and probs is not None else "")
            )
    return confidence.contiguous(), correct


def _as_probs(op: str, probs: Any, *, log: bool = False) -> Tensor:
    probs = as_tensor(probs)
    if not probs.is_floating_point():
        raise TypeError(f"{op}: probs must be floating point, got {probs.dtype}")
    if probs.dim() < 2 or probs.shape[-1] < 1:
        raise ValueError(f"{op}: probs must be [N, C], got shape {list(probs.shape)}")
    if not log and probs.numel():
        low, high = probs.amin(), probs.amax()
        # Written so that NaN fails too.
        if not (bool(low >= 0) and bool(high <= 1 + _ABOVE_ONE)):
            inside = ((probs >= 0) & (probs <= 1 + _ABOVE_ONE)).all(-1)
            row = (~inside).nonzero()[0].tolist()
            raise ValueError(
                f"{op}: probs must be in [0, 1], got values from {probs[tuple(row)].amin().item()} to "
                f"{probs[tuple(row)].amax().item()} in row {row[-1]}; are these logits?"
            )
    result: Tensor = probs
    return result


def _probs_and_target(op: str, probs: Any, target: Any, *, log: bool = False) -> tuple[Tensor, Tensor]:
    probs = _as_probs(op, probs, log=log)
    target = as_tensor(target)
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"{op}: target must be integer, got {target.dtype}")
    if target.shape != probs.shape[:-1]:
        raise ValueError(f"{op}: target must be [N] = {list(probs.shape[:-1])}, got {list(target.shape)}")
    if target.device != probs.device:
        raise ValueError(f"{op}: target must be on the device of probs, {probs.device}, got {target.device}")
    target = target.to(torch.int64)
    outside = (target < 0) | (target >= probs.shape[-1])
    if bool(outside.any()):
        where = outside.nonzero()[0].tolist()
        raise IndexError(
            f"{op}: target must be in [0, {probs.shape[-1]}), got {target[tuple(where)].item()} at row {where[-1]}"
        )
    return probs, target


def _nan_if_empty(value: Tensor, bins: ReliabilityBins) -> Tensor:
    return value if bins.n_samples else torch.full_like(value, math.nan)
