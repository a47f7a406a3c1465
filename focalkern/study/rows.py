"""What a study asks of its rows, in memory or streamed: the figures of one calibrator on them."""

from typing import Any

import torch
from torch import Tensor

from focalkern import metrics
from focalkern.calibrators import Calibrator, FocalTemperatureScaling, TemperatureScaling
from focalkern.files import LogitSet
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.study.contest import log_proba
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
    rows: Rows, gamma: float | None, temperature: float | None, n_bins: int, other: Any = None
) -> dict[str, float]:
    """The figures of one calibrator on one set, computed in float64; gamma = 0 and T = 1 is uncalibrated.

    Correct is what the largest *input* says of a scaling: a calibrated row may saturate and tie, the input does not.

    Args:
        other: a fitted calibrator that is no (focal) temperature scaling; then ``gamma`` and ``temperature`` say
            nothing.
    """
    if isinstance(rows, StreamedSet):
        assert gamma is not None
        assert temperature is not None
        rows.measure([(gamma, temperature)], n_bins)
        found = rows.measured(gamma, temperature, n_bins).figures
        return {name: found[name] for name in FIGURES}
    log_probs = calibrated(rows, gamma, temperature, other)
    correct = is_correct(rows, other)
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


def calibrated(rows: LogitSet, gamma: float | None, temperature: float | None, other: Any = None) -> Tensor:
    """Log-probabilities [N, C] in float64."""
    if other is not None:
        return log_proba(other, rows.input)
    assert gamma is not None
    assert temperature is not None
    return focal_calibration_map(rows.input.to(torch.float64), gamma, temperature, input_kind=rows.kind, log=True)


def is_correct(rows: LogitSet, other: Any = None) -> Tensor:
    """[N] bool."""
    if other is None or isinstance(other, TemperatureScaling | FocalTemperatureScaling):
        predicted = rows.input.argmax(-1)
    elif isinstance(other, Calibrator):
        predicted = other.predict(rows.input.to(torch.float64))
    else:
        predicted = log_proba(other, rows.input).argmax(-1)
    return predicted == rows.labels


def reliability(
    rows: Rows, gamma: float | None, temperature: float | None, n_bins: int, other: Any = None
) -> metrics.ReliabilityBins:
    """Bins of equal width."""
    if isinstance(rows, StreamedSet):
        assert gamma is not None
        assert temperature is not None
        return rows.measured(gamma, temperature, n_bins).bins
    confidence = calibrated(rows, gamma, temperature, other).amax(-1).exp()
    return metrics.reliability_bins(confidence=confidence, correct=is_correct(rows, other), n_bins=n_bins)
