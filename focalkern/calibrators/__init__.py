"""Calibrators: fitted on held-out logits, applied to new ones, saved as JSON, appended to a network as a module."""

from focalkern.calibrators._base import (
    Calibrator,
    Criterion,
    Estimator,
    InputKind,
    NotFittedError,
    load_calibrator,
)
from focalkern.calibrators._histogram import HistogramBinning
from focalkern.calibrators._modules import CalibratedLogits, CalibratedLogProbs, HistogramLogProbs
from focalkern.calibrators._scaling import FocalTemperatureScaling, TemperatureScaling
from focalkern.calibrators._search import DEFAULT_GAMMAS, TEMPERATURE_BOUNDS, Search, grid_border

__all__ = [
    "DEFAULT_GAMMAS",
    "TEMPERATURE_BOUNDS",
    "CalibratedLogProbs",
    "CalibratedLogits",
    "Calibrator",
    "Criterion",
    "Estimator",
    "FocalTemperatureScaling",
    "HistogramBinning",
    "HistogramLogProbs",
    "InputKind",
    "NotFittedError",
    "Search",
    "TemperatureScaling",
    "grid_border",
    "load_calibrator",
]
