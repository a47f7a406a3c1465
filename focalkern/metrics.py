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

What other libraries call it, where the rows tie nowhere and lie on no edge (``p`` probabilities, ``y`` labels):

=======================================================  =============================================================
there                                                    here
=======================================================  =============================================================
torchmetrics ``MulticlassCalibrationError(C, norm="l1",  ``expected_calibration_error(p, y)``; ``norm="l2"`` is
n_bins=15)``                                             ``rms_``, ``"max"`` is ``maximum_calibration_error``. Its
                                                         bins are [lo, hi), a confidence of exactly 1 is a bin of its
                                                         own, and all of it is float32.
netcal ``ECE(15).measure(p, y)``                         ``expected_calibration_error(p, y)``, ``MCE`` is
                                                         ``maximum_calibration_error``. Its bins are [lo, hi), the
                                                         last [lo, hi]. Two classes are measured on the second:
                                                         ``confidence=p[:, 1], correct=y`` here.
netcal ``ACE(15).measure(p, y)``                         ``reliability_bins(p, y).gap.abs().nanmean(-1)``: every bin
                                                         counts the same, whatever is in it
netcal ``ECE(15, equal_intervals=False)``                ``estimator="equal_mass"`` if N is a multiple of 15
scikit-learn ``calibration_curve(correct, confidence,    ``accuracy`` and ``confidence`` of ``reliability_bins``, less
n_bins=15)``                                             the empty bins; ``strategy="quantile"`` is ``"equal_mass"`` if
                                                         N is a multiple of 15, else a cut may be some rows elsewhere
relplot ``smECE(confidence, correct)``                   ``smooth_calibration_error`` within 0.002, where no row is
                                                         within 0.001 of 0 or 1: relplot counts those as half a row
uncertainty-calibration ``get_ece``, ``get_ece_em``      ``expected_calibration_error`` with ``"equal_width"``,
                                                         ``"equal_mass"``; ``mode="marginal"`` is classwise
uncertainty-calibration ``lower_bound_scaling_top_ce``   ``debiased_calibration_error(p, y, estimator="equal_mass")``
Mukhoti et al. ``ECELoss``, ``AdaptiveECELoss``,         ``expected_calibration_error``, the same with
``ClasswiseECELoss`` (on logits)                         ``"equal_mass_interp"``, ``classwise_calibration_error``
scikit-learn ``log_loss``, ``brier_score_loss``          ``nll`` (which does not replace a probability of 0), half of
                                                         ``brier_score`` for two classes
=======================================================  =============================================================

Inputs are tensors (CPU or CUDA, any floating dtype) or anything that NumPy makes an array of. Where none is a tensor,
the results are NumPy's too: arrays, and ``numpy.float64`` for a single figure. Sums run in float64. The rows are the
last dimension but one of ``probs`` and the last of everything else; dimensions before that are a batch of independent
sets (bootstrap replicates, say), and results have the batch's shape. Nothing here is differentiable.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import arrays_for_arrays
from focalkern._arrays import as_tensor as as_tensor
from focalkern._checks import MOST_BINS, flag, integer, number, one_of

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "ReliabilityBins",
    "accuracy",
    "aurc",
    "auroc",
    "brier_score",
    "classwise_calibration_error",
    "debiased_calibration_error",
    "expected_calibration_error",
    "maximum_calibration_error",
    "nll",
    "reliability_bins",
    "rms_calibration_error",
    "smooth_calibration_error",
]

Estimator = Literal["equal_width", "equal_mass", "equal_mass_interp"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)

# Rows of probabilities are taken as normalised within this much everywhere in the library, so one entry may be above
# 1 by as much; it counts as 1 for the choice of its bin.
_ABOVE_ONE = 1e-3

# Intervals between the grid points of smooth_calibration_error.
_SMOOTH_GRID = 1 << 13
# Sets that it looks at together: 128 KiB each, a few times over.
_SMOOTH_BLOCK = 64

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
        """accuracy - confidence, float64 [..., M]: negative where the bin is over-confident, NaN where it is empty."""
        return self.accuracy - self.confidence

    @property
    def weight(self) -> Tensor:
        """count / N, float64 [..., M]; NaN for N = 0."""
        count: Any = self.count  # an array for arrays
        return (count.to(torch.float64) if isinstance(count, Tensor) else count) / (self.n_samples or math.nan)


@arrays_for_arrays
def expected_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
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
        estimator: ``"equal_width"``, ``"equal_mass"`` or ``"equal_mass_interp"``; see :mod:`focalkern.metrics`.
        confidence: [..., N] in [0, 1], floating point, in place of ``probs``.
        correct: [..., N], bool, or numbers in [0, 1].

    Returns:
        float64 tensor of the batch's shape (a 0-dim tensor without a batch), a fraction; NaN for N = 0.

    Raises:
        TypeError: probabilities that are not floating point, targets that are not integers.
        ValueError: shapes that do not fit; a confidence outside [0, 1] or NaN; an unknown estimator; n_bins < 1; too
            few or too many of the four inputs.
        IndexError: a target outside [0, C).

    Source: Guo et al. 2017 (arXiv 1706.04599), section 2; the estimators are named in :mod:`focalkern.metrics`.

    Example:
        >>> probs = torch.tensor([[0.98, 0.02]]).repeat(10, 1)  # sure with 0.98
        >>> target = torch.tensor([0] * 8 + [1] * 2)  # and right in 8 of 10 rows
        >>> fk.metrics.expected_calibration_error(probs, target)
        tensor(0.1800, dtype=torch.float64)
        >>> fk.metrics.expected_calibration_error(confidence=probs[:, 0], correct=target == 0, n_bins=20)
        tensor(0.1800, dtype=torch.float64)
    """
    return expected_error(_bins("expected_calibration_error", probs, target, confidence, correct, n_bins, estimator))


@arrays_for_arrays
def maximum_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    confidence: Any = None,
    correct: Any = None,
) -> Tensor:
    r"""Largest gap between accuracy and mean confidence over the bins that are not empty.

    .. math:: \text{MCE} = \max_b |\text{acc}_b - \text{conf}_b|

    Under ``equal_mass`` it depends on the order of tied confidences: compare it only where they are distinct.

    Args:
        probs, target, n_bins, estimator, confidence, correct: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`.

    Source: Guo et al. 2017 (arXiv 1706.04599), section 2.

    Example:
        >>> confidence = torch.tensor([0.98, 0.98, 0.6, 0.6])
        >>> fk.metrics.maximum_calibration_error(confidence=confidence, correct=torch.tensor([1, 1, 1, 0]))
        tensor(0.1000, dtype=torch.float64)
    """
    return maximum_error(_bins("maximum_calibration_error", probs, target, confidence, correct, n_bins, estimator))


@arrays_for_arrays
def rms_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    confidence: Any = None,
    correct: Any = None,
) -> Tensor:
    r"""Root of the weighted mean of the squared gaps.

    .. math:: \text{RMSCE} = \sqrt{\sum_b \frac{|B_b|}{N} (\text{acc}_b - \text{conf}_b)^2}

    Args:
        probs, target, n_bins, estimator, confidence, correct: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`.

    Source: Hendrycks, Mazeika, Dietterich 2019 (arXiv 1812.04606), section 5.

    Example:
        >>> confidence = torch.tensor([0.98, 0.98, 0.6, 0.6])
        >>> fk.metrics.rms_calibration_error(confidence=confidence, correct=torch.tensor([1, 1, 1, 0]))
        tensor(0.0721, dtype=torch.float64)
    """
    return rms_error(_bins("rms_calibration_error", probs, target, confidence, correct, n_bins, estimator))


@arrays_for_arrays
def debiased_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    norm: Literal["l1", "l2"] = "l2",
    confidence: Any = None,
    correct: Any = None,
) -> Tensor:
    r"""Calibration error of the top class, less what the noise of the bins' accuracies adds to it.

    With g = acc - conf, n samples in the bin and :math:`v = \text{acc} (1 - \text{acc})`:

    .. math::
        \text{l2: } \sqrt{\max\Big(0, \sum_b \frac{|B_b|}{N} \big(g_b^2 - \tfrac{v_b}{n_b - 1}\big)\Big)}
        \qquad
        \text{l1: } 2\,\text{ECE} - \sum_b \frac{|B_b|}{N} \, \mathbb E\,|\mathcal N(g_b, v_b / n_b)|

    Under ``"l2"`` the sum is an unbiased estimate of the squared RMSCE of infinitely many rows in the same bins; a bin
    of one sample counts 0. Under ``"l1"`` it is an approximate correction of ECE: of the bias of a perfectly
    calibrated model it removes sqrt(2) - 1, about two fifths. It is not cut at 0: a negative value says that the ECE is
    smaller than noise alone makes it.

    Args:
        probs, target, n_bins, estimator: as :func:`expected_calibration_error`.
        norm: ``"l2"`` or ``"l1"``.
        confidence, correct: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`; ValueError also for another norm.

    Source: Kumar, Liang & Ma 2019 (arXiv 1909.10155), section 5, and their package uncertainty-calibration, which draws
    the normal variables of ``"l1"`` where this takes their mean in closed form; l2: Broecker 2012, "Estimating
    reliability and resolution of probability forecasts".

    Example:
        >>> confidence, correct = torch.full((10,), 0.98), torch.arange(10) < 8
        >>> fk.metrics.debiased_calibration_error(confidence=confidence, correct=correct)
        tensor(0.1209, dtype=torch.float64)
        >>> fk.metrics.rms_calibration_error(confidence=confidence, correct=correct)
        tensor(0.1800, dtype=torch.float64)
    """
    op = "debiased_calibration_error"
    one_of(op, "norm", norm, ("l1", "l2"))
    return debiased_error(_bins(op, probs, target, confidence, correct, n_bins, estimator), norm)


@arrays_for_arrays
@torch.no_grad()
def smooth_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    bandwidth: float | None = None,
    confidence: Any = None,
    correct: Any = None,
) -> Tensor:
    r"""Smooth ECE of the top class: no bins, and so no jumps where a confidence crosses a cut.

    .. math::
        \text{smECE}_\sigma = \int_0^1 \Big| \frac{1}{N} \sum_i (\text{correct}_i - c_i)\, K_\sigma(t, c_i) \Big| dt

    K is the Gaussian kernel of deviation :math:`\sigma`, reflected at 0 and at 1 as often as it takes. Without
    ``bandwidth`` the result is the :math:`\sigma` at which :math:`\text{smECE}_\sigma = \sigma`; there is exactly one,
    because smECE falls with :math:`\sigma`. It is a consistent measure of the distance to the nearest calibrated
    predictor: between a constant times that distance and a constant times its square root.

    The confidences are spread over a grid of 8193 points and :math:`\sigma` is found to 1e-7. A kernel as narrow as
    1e-3 is resolved to 1 %, one of 1e-2 to 1e-4.

    Args:
        probs, target: as :func:`expected_calibration_error`.
        bandwidth: :math:`\sigma` > 0, or None for the one that the data choose.
        confidence, correct: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`; ValueError also for a bandwidth that
            is not positive.

    Source: Blasiok & Nakkiran 2023 (arXiv 2309.12236), sections 3 and 4; their package relplot.

    Example:
        >>> confidence, correct = torch.full((10,), 0.9), torch.arange(10) < 6
        >>> fk.metrics.smooth_calibration_error(confidence=confidence, correct=correct).round(decimals=3)
        tensor(0.3000, dtype=torch.float64)
    """
    op = "smooth_calibration_error"
    if bandwidth is not None:
        bandwidth = number(op, "bandwidth", bandwidth, "a number or None")
        if not bandwidth > 0:
            raise ValueError(f"{op}: bandwidth must be positive, got {bandwidth}")
    confidence, correct = _confidence_and_correct(op, probs, target, confidence, correct)
    *batch, n_samples = confidence.shape
    result = torch.full((math.prod(batch),), math.nan, dtype=torch.float64, device=confidence.device)
    if n_samples:
        confidence, correct = confidence.view(-1, n_samples), correct.reshape(-1, n_samples)
        for first in range(0, len(result), _SMOOTH_BLOCK):
            part = slice(first, first + _SMOOTH_BLOCK)
            result[part] = _smooth_errors(confidence[part].to(torch.float64), correct[part], bandwidth)
    return result.view(batch)


def _smooth_errors(confidence: Tensor, correct: Tensor, bandwidth: float | None) -> Tensor:
    """[B] from [B, N] in float64."""
    confidence = confidence.clamp(max=1.0)
    # Each residual is shared between its two neighbours on the grid, in proportion to nearness.
    place = confidence * _SMOOTH_GRID
    left = place.long().clamp_(max=_SMOOTH_GRID - 1)
    residual = (correct - confidence) / confidence.shape[-1]
    to_right = residual * (place - left)
    grid = confidence.new_zeros(len(confidence), _SMOOTH_GRID + 1)
    grid.scatter_add_(-1, left, residual - to_right)
    grid.scatter_add_(-1, left + 1, to_right)
    # A Gaussian reflected at both ends is diagonal in the cosines: the transform of the even extension, of period 2.
    # There an end point lies on its own mirror image.
    grid[:, 0] *= 2
    grid[:, -1] *= 2
    spectrum = torch.fft.rfft(torch.cat([grid, grid[:, 1:-1].flip(-1)], -1))
    frequency = math.pi * torch.arange(_SMOOTH_GRID + 1, dtype=torch.float64, device=grid.device)

    def at(sigma: Tensor) -> Tensor:
        damping = (-0.5 * (sigma.unsqueeze(-1) * frequency).square()).exp()
        smoothed = torch.fft.irfft(spectrum * damping, 2 * _SMOOTH_GRID)[:, : _SMOOTH_GRID + 1].abs()
        # The trapezoidal rule; the step of the grid is in the values already.
        return smoothed.sum(-1) - 0.5 * (smoothed[:, 0] + smoothed[:, -1])

    low = grid.new_zeros(len(grid))
    if bandwidth is not None:
        return at(low + float(bandwidth))
    high = low + 1
    for _ in range(24):
        middle = 0.5 * (low + high)
        above = at(middle) > middle
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return torch.where(low > 0, 0.5 * (low + high), 0.0)


@arrays_for_arrays
@torch.no_grad()
def classwise_calibration_error(
    probs: Any,
    target: Any,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    r"""Mean over the classes of the calibration error of that class's probability against [target = class].

    .. math:: \frac{1}{C} \sum_k \sum_b \frac{|B_{bk}|}{N} \, |\text{freq}_{bk} - \text{prob}_{bk}|

    Args:
        probs: [..., N, C] probabilities, floating point.
        target: [..., N] class indices, integer.
        n_bins: bins per class, at least 1.
        estimator: as :func:`expected_calibration_error`; the published figures are ``"equal_width"``.
        reduction: ``"mean"`` over the classes, or ``"none"`` for the error of each.

    Returns:
        float64 tensor of the batch's shape, with ``"none"`` [..., C]; a fraction; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`; ValueError also for another reduction.

    Source: Kull et al. 2019 (arXiv 1910.12656), section 2; Mukhoti et al. 2020 (arXiv 2002.09437), table C.2.

    Example:
        >>> probs, target = torch.tensor([[0.9, 0.1, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1, 2])
        >>> fk.metrics.classwise_calibration_error(probs, target, reduction="none").round(decimals=4)
        tensor([0.1000, 0.0000, 0.1000], dtype=torch.float64)
        >>> fk.metrics.classwise_calibration_error(probs, target)
        tensor(0.0667, dtype=torch.float64)
    """
    name = "classwise_calibration_error"
    one_of(name, "reduction", reduction, ("mean", "none"))
    _check_bins(name, n_bins, estimator)
    probs, target = _probs_and_target(name, probs, target)
    *batch, n_samples, n_classes = probs.shape
    errors = torch.empty(*batch, n_classes, dtype=torch.float64, device=probs.device)
    block = max(1, _CLASSWISE_BLOCK // max(1, n_samples * math.prod(batch)))
    for first in range(0, n_classes, block):
        classes = torch.arange(first, min(first + block, n_classes), device=probs.device)
        of_class = probs[..., first : first + block].transpose(-1, -2).contiguous()
        is_class = target.unsqueeze(-2) == classes.unsqueeze(-1)
        errors[..., first : first + block] = expected_calibration_error(
            confidence=of_class, correct=is_class, n_bins=n_bins, estimator=estimator
        )
    return errors.mean(-1) if reduction == "mean" else errors


@arrays_for_arrays
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

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`.

    Example:
        >>> probs, target = torch.tensor([[0.8, 0.2]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> fk.metrics.nll(probs, target)
        tensor(0.5004, dtype=torch.float64)
    """
    log = flag("nll", "log", log)
    probs, target = _probs_and_target("nll", probs, target, log=log)
    of_target = probs.gather(-1, target.unsqueeze(-1)).squeeze(-1).to(torch.float64)
    # 0 - x, not -x: a perfect score prints as 0 and not as -0.
    log_probs = of_target if log else of_target.log()
    return torch.sub(0.0, log_probs).mean(-1)


@arrays_for_arrays
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

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`.

    Source: Brier 1950, "Verification of forecasts expressed in terms of probability".

    Example:
        >>> probs, target = torch.tensor([[0.8, 0.2]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> fk.metrics.brier_score(probs, target)
        tensor(0.3200, dtype=torch.float64)
    """
    probs, target = _probs_and_target("brier_score", probs, target)
    index = target.unsqueeze(-1)
    residual = probs.to(torch.float64, copy=True)
    residual.scatter_add_(-1, index, residual.new_full((), -1.0).expand(index.shape))
    result: Tensor = residual.square_().sum(-1).mean(-1)
    return result


@arrays_for_arrays
@torch.no_grad()
def accuracy(probs: Any = None, target: Any = None, *, correct: Any = None) -> Tensor:
    """Fraction of the rows whose largest entry is the target's; the first of several largest counts.

    Args:
        probs: [..., N, C] probabilities or logits, floating point.
        target: [..., N] class indices, integer.
        correct: [..., N], bool, in place of both.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`, but logits are as good as
            probabilities here.

    Example:
        >>> logits, target = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> fk.metrics.accuracy(logits, target)
        tensor(0.8000, dtype=torch.float64)
    """
    if correct is None:
        if probs is None or target is None:
            raise ValueError("accuracy: expected probs and target, or correct")
        scores, target = _probs_and_target("accuracy", probs, target, log=True)
        result: Tensor = (scores.argmax(-1) == target).to(torch.float64).mean(-1)
        return result
    if probs is not None or target is not None:
        raise ValueError("accuracy: correct replaces probs and target, got both")
    return as_tensor(correct, "accuracy: correct").to(torch.float64).mean(-1)


@arrays_for_arrays
@torch.no_grad()
def aurc(
    probs: Any = None,
    target: Any = None,
    *,
    excess: bool = False,
    confidence: Any = None,
    correct: Any = None,
) -> Tensor:
    r"""Area under the risk-coverage curve: the mean error rate when only the most confident samples are answered.

    .. math:: \frac{1}{N} \sum_{i=1}^{N} \frac{1}{i} \sum_{j \le i} (1 - \text{correct}_{(j)})

    with the samples in descending order of confidence. Among tied confidences it is the mean over all their orders, so
    it does not depend on the order of rows.

    Args:
        probs, target: as :func:`expected_calibration_error`.
        excess: take off what the best order of the same samples has (all that are correct first): what is left is due
            to the confidences, and is 0 if they rank every correct sample above every other.
        confidence, correct: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape, a fraction, lower is better; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`.

    Source: Geifman, Uziel & El-Yaniv 2019 (arXiv 1805.08206), section 3; their E-AURC takes off an approximation,
    e + (1 - e) log(1 - e) with the error rate e, where this takes off the area itself.

    Example:
        >>> confidence, correct = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([1, 1, 0, 1])
        >>> fk.metrics.aurc(confidence=confidence, correct=correct)
        tensor(0.1458, dtype=torch.float64)
        >>> fk.metrics.aurc(confidence=confidence, correct=correct, excess=True)
        tensor(0.0833, dtype=torch.float64)
    """
    excess = flag("aurc", "excess", excess)
    confidence, correct = _confidence_and_correct("aurc", probs, target, confidence, correct)
    n_samples = confidence.shape[-1]
    ordered, order = confidence.sort(dim=-1, descending=True)
    loss = 1 - correct.gather(-1, order)
    # Equal confidences share their mean loss: the mean over all orders, because the curve is linear in the losses.
    tied = torch.zeros_like(order)
    tied[..., 1:] = (ordered[..., 1:] != ordered[..., :-1]).cumsum(-1)
    total = torch.zeros_like(loss).scatter_add_(-1, tied, loss)
    count = torch.zeros_like(loss).scatter_add_(-1, tied, torch.ones_like(loss))
    loss = total.gather(-1, tied) / count.gather(-1, tied)
    coverage = torch.arange(1, n_samples + 1, device=confidence.device)
    area = (loss.cumsum(-1) / coverage).mean(-1)
    if excess:
        area = area - ((1 - correct).sort(dim=-1).values.cumsum(-1) / coverage).mean(-1)
    return area


@arrays_for_arrays
@torch.no_grad()
def auroc(confidence_in: Any, confidence_out: Any) -> Tensor:
    r"""Area under the ROC curve of confidence as a detector of out-of-distribution inputs.

    .. math:: P(\text{in} > \text{out}) + \tfrac{1}{2} P(\text{in} = \text{out})

    1 when every in-distribution sample is more confident than every other, 1/2 when confidence says nothing. With the
    confidences of correct and of wrong predictions it is the AUROC of failure prediction.

    Args:
        confidence_in: [..., N] confidences on in-distribution samples, floating point, any scale.
        confidence_out: [..., K] confidences on out-of-distribution samples, same dtype and batch.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN when either set is empty.

    Raises:
        TypeError: not floating point, or two dtypes.
        ValueError: a single number, two batches, two devices, or NaN.

    Source: Hanley & McNeil 1982, "The meaning and use of the area under a ROC curve".

    Example:
        >>> known, unknown = torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0.75, 0.4])
        >>> fk.metrics.auroc(known, unknown)  # 5 of 6 pairs are in order
        tensor(0.8333, dtype=torch.float64)
    """
    sets = []
    for name, values in (("confidence_in", confidence_in), ("confidence_out", confidence_out)):
        values = as_tensor(values, f"auroc: {name}")
        if not values.is_floating_point():
            raise TypeError(f"auroc: {name} must be floating point, got {values.dtype}")
        if values.dim() < 1:
            raise ValueError(f"auroc: {name} must be [N], got a single number")
        if bool(values.isnan().any()):
            raise ValueError(f"auroc: {name} must not be NaN, got NaN at row {int(values.isnan().nonzero()[0, -1])}")
        sets.append(values.contiguous())
    inside, outside = sets
    if inside.dtype != outside.dtype:
        raise TypeError(
            f"auroc: confidence_out must have the dtype of confidence_in, {inside.dtype}, got {outside.dtype}"
        )
    if inside.device != outside.device:
        raise ValueError(
            f"auroc: confidence_out must be on the device of confidence_in, {inside.device}, got {outside.device}"
        )
    if inside.shape[:-1] != outside.shape[:-1]:
        raise ValueError(
            f"auroc: confidence_out must have the batch of confidence_in, {list(inside.shape[:-1])}, "
            f"got {list(outside.shape[:-1])}"
        )
    ordered = outside.sort(dim=-1).values
    below = torch.searchsorted(ordered, inside, right=False).sum(-1)
    not_above = torch.searchsorted(ordered, inside, right=True).sum(-1)
    # Both sums are int64 and exact: (wins + (wins + ties)) / 2. Without pairs 0 / 0 is NaN.
    return (below + not_above).to(torch.float64) / (2 * inside.shape[-1] * outside.shape[-1])


@arrays_for_arrays
def reliability_bins(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    confidence: Any = None,
    correct: Any = None,
) -> ReliabilityBins:
    """Count, mean confidence and accuracy of every bin: the numbers of a reliability diagram.

    Args:
        probs, target, n_bins, estimator, confidence, correct: as :func:`expected_calibration_error`.

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
    return _bins("reliability_bins", probs, target, confidence, correct, n_bins, estimator)


# The errors as functions of the bins, for those who fill bins batch by batch.


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


def _check_bins(op: str, n_bins: object, estimator: object) -> int:
    one_of(op, "estimator", estimator, ESTIMATORS)
    return integer(op, "n_bins", n_bins, 1, MOST_BINS)


@torch.no_grad()
def _bins(
    op: str, probs: Any, target: Any, confidence: Any, correct: Any, n_bins: int, estimator: Estimator
) -> ReliabilityBins:
    n_bins = _check_bins(op, n_bins, estimator)
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
    confidence = as_tensor(confidence, f"{op}: confidence")
    if not confidence.is_floating_point():
        raise TypeError(f"{op}: confidence must be floating point, got {confidence.dtype}")
    if confidence.dim() < 1:
        raise ValueError(f"{op}: confidence must be [N], got a single number")
    correct = as_tensor(correct, f"{op}: correct")
    if correct.shape != confidence.shape:
        raise ValueError(f"{op}: correct must be [N] = {list(confidence.shape)}, got {list(correct.shape)}")
    if correct.device != confidence.device:
        raise ValueError(f"{op}: correct must be on {confidence.device}, got {correct.device}")
    if correct.is_complex():
        raise TypeError(f"{op}: correct must be bool or real, got {correct.dtype}")
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
    probs = as_tensor(probs, f"{op}: probs")
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
    target = as_tensor(target, f"{op}: target")
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
