"""Calibration errors and scores of probabilities: named estimators, in plain torch.

Every metric is a fraction, never percent. Every ECE carries the name of its estimator, because the three estimators
differ by more than the effects that papers compare with them:

``equal_width``
    Bins (k/M, (k + 1)/M]; a confidence of exactly 0 belongs to the first. The edges are rounded to the dtype of the
    confidence and compared there (Guo et al. 2017, arXiv 1706.04599; Mukhoti et al. 2020, arXiv 2002.09437).
``equal_mass``
    Confidences sorted ascending, ties in row order, split as ``numpy.array_split`` does: sizes differ by at most one.
``equal_mass_interp``
    Edges interpolated between the sorted confidences, ``interp(linspace(0, N, M + 1), arange(N), sorted)``, bins
    (lo, hi]. The lowest sample falls in no bin, as in the published AdaECE code of Mukhoti et al. 2020.

Equivalents in other libraries, for confidences without ties that lie on no edge (``p`` probabilities, ``y`` labels):

=======================================================  =============================================================
other library                                            focalkern
=======================================================  =============================================================
torchmetrics ``MulticlassCalibrationError(C, norm="l1",  ``expected_calibration_error(p, y)``; ``norm="l2"`` is
n_bins=15)``                                             ``rms_``, ``"max"`` is ``maximum_calibration_error``. Its
                                                         bins are [lo, hi), a confidence of exactly 1 has its own
                                                         bin, and it computes in float32.
netcal ``ECE(15).measure(p, y)``                         ``expected_calibration_error(p, y)``, ``MCE`` is
                                                         ``maximum_calibration_error``. Its bins are [lo, hi), the
                                                         last [lo, hi]. Two classes are measured on the second:
                                                         ``confidence=p[:, 1], correct=y`` here.
netcal ``ACE(15).measure(p, y)``                         ``reliability_bins(p, y).gap.abs().nanmean(-1)``: every bin
                                                         has the same weight
netcal ``ECE(15, equal_intervals=False)``                ``estimator="equal_mass"`` if N is a multiple of 15
scikit-learn ``calibration_curve(correct, confidence,    ``accuracy`` and ``confidence`` of ``reliability_bins``, less
n_bins=15)``                                             the empty bins; ``strategy="quantile"`` is ``"equal_mass"`` if
                                                         N is a multiple of 15, else edges may differ by some rows
relplot ``smECE(confidence, correct)``                   ``smooth_calibration_error`` within 0.002, if no row is
                                                         within 0.001 of 0 or 1: relplot counts those as half a row
uncertainty-calibration ``get_ece``, ``get_ece_em``      ``expected_calibration_error`` with ``"equal_width"``,
                                                         ``"equal_mass"``; ``mode="marginal"`` is classwise
uncertainty-calibration ``lower_bound_scaling_top_ce``   ``debiased_calibration_error(p, y, estimator="equal_mass")``
Mukhoti et al. ``ECELoss``, ``AdaptiveECELoss``,         ``expected_calibration_error``, the same with
``ClasswiseECELoss`` (on logits)                         ``"equal_mass_interp"``, ``classwise_calibration_error``
MONAI ``CalibrationErrorMetric(num_bins=15)``            ``classwise_calibration_error(p, y, per="image")``. Its
                                                         bins are [lo, hi), and it computes in float32.
scikit-learn ``log_loss``, ``brier_score_loss``          ``nll`` (which does not replace a probability of 0), half of
                                                         ``brier_score`` for two classes
=======================================================  =============================================================

Inputs are tensors (CPU or CUDA, any floating dtype) or anything that NumPy converts to an array. If no input is a
tensor, the results are NumPy's too: arrays, and ``numpy.float64`` for a single number. Sums are float64. Rows are the
second-last dimension of ``probs`` and the last dimension of all other inputs. Dimensions before that are a batch of
independent sets (for example bootstrap replicates), and results have the shape of the batch. No metric is
differentiable. A UserWarning says if rows do not sum to 1, as sigmoids in place of a softmax.

Predictions of pixels are rows too: with ``target`` [N, d1, ...], ``probs`` are [N, C, d1, ...], and the metric equals,
to the bit, the metric of the flattened rows without the rows labelled ``ignore_index``. ``per="image"`` is the mean of
the metrics of the N images, without images whose pixels are all ignored. The shape of ``target`` distinguishes pixels
from a batch of sets; shapes that fit both raise an error.
"""

from focalkern.metrics._bins import ReliabilityBins, reliability_bins
from focalkern.metrics._bins import debiased_error as debiased_error
from focalkern.metrics._bins import expected_error as expected_error
from focalkern.metrics._bins import maximum_error as maximum_error
from focalkern.metrics._bins import rms_error as rms_error
from focalkern.metrics._errors import (
    classwise_calibration_error,
    debiased_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
    rms_calibration_error,
)
from focalkern.metrics._inputs import ESTIMATORS, Estimator
from focalkern.metrics._risk import AcceptThreshold, RiskCoverage, accept_threshold, risk_coverage
from focalkern.metrics._scores import accuracy, aurc, auroc, brier_score, nll
from focalkern.metrics._smooth import smooth_calibration_error

__all__ = [
    "ESTIMATORS",
    "AcceptThreshold",
    "Estimator",
    "ReliabilityBins",
    "RiskCoverage",
    "accept_threshold",
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
    "risk_coverage",
    "rms_calibration_error",
    "smooth_calibration_error",
]
