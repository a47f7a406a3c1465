"""What a study asks of its rows, in memory or streamed: the figures of one calibrator on them."""

import torch
from torch import Tensor

from focalkern import metrics
from focalkern.calibrators import HistogramBinning
from focalkern.files import LogitSet
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.study.streamed import StreamedSet

__all__ = ["FIGURES", "Rows", "calibrated", "figures", "is_correct", "reliability"]

Rows = LogitSet | StreamedSet
FIGURES = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece_equal_width": "ECE\nequal_\nwidth",
    "ece_equal_mass": "ECE\nequal_\nmass",
    "ece_equal_mass_interp": "ECE\nequal_\nmass_\ninterp",
    "classwise_ece_equal_width": "classwise\nECE equal_\nwidth",
}
"""The figures of a table, by their name in CSV and JSON, with the heading they have in print."""


def figures(
    rows: Rows, gamma: float, temperature: float, n_bins: int, binning: HistogramBinning | None = None
) -> dict[str, float]:
    """The figures of one calibrator on one set, computed in float64; gamma = 0 and T = 1 is uncalibrated.

    Correct is what the largest *input* says: a calibrated row may saturate and tie, the input does not. Only bins
    change the predicted class.
    """
    if isinstance(rows, StreamedSet):
        rows.measure([(gamma, temperature)], n_bins)
        found = rows.measured(gamma, temperature, n_bins).figures
        return {name: found[name] for name in FIGURES}
    log_probs = calibrated(rows, gamma, temperature, binning)
    correct = is_correct(rows, binning)
    result = {"accuracy": metrics.accuracy(correct=correct), "nll": metrics.nll(log_probs, rows.labels, log=True)}
    probs = log_probs.exp_()
    result["brier"] = metrics.brier_score(probs, rows.labels)
    confidence = probs.amax(-1)
    for estimator in metrics.ESTIMATORS:
        result[f"ece_{estimator}"] = metrics.expected_calibration_error(
            confidence=confidence, correct=correct, n_bins=n_bins, estimator=estimator
        )
    result["classwise_ece_equal_width"] = metrics.classwise_calibration_error(probs, rows.labels, n_bins=n_bins)
    return {name: float(result[name]) for name in FIGURES}


def calibrated(rows: LogitSet, gamma: float, temperature: float, binning: HistogramBinning | None = None) -> Tensor:
    """Log-probabilities [N, C]; gamma and temperature are those of the scaling before the bins."""
    if binning is not None:
        log_probs: Tensor = binning.predict_log_proba(rows.input.to(torch.float64))
        return log_probs
    return focal_calibration_map(rows.input.to(torch.float64), gamma, temperature, input_kind=rows.kind, log=True)


def is_correct(rows: LogitSet, binning: HistogramBinning | None = None) -> Tensor:
    predicted = rows.input.argmax(-1) if binning is None else binning.predict(rows.input.to(torch.float64))
    return predicted == rows.labels


def reliability(
    rows: Rows, gamma: float, temperature: float, n_bins: int, binning: HistogramBinning | None = None
) -> metrics.ReliabilityBins:
    """Bins of equal width."""
    if isinstance(rows, StreamedSet):
        return rows.measured(gamma, temperature, n_bins).bins
    confidence = calibrated(rows, gamma, temperature, binning).amax(-1).exp()
    correct = is_correct(rows, binning)
    return metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=n_bins)
