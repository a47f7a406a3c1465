"""Calibrators: fitted on held-out logits, applied to new ones, saved as JSON, appended to a network as a module."""

from focalkern.calibrators._base import (
    Calibrator,
    Criterion,
    Estimator,
    InputKind,
    NotFittedError,
    load_calibrator,
)
from focalkern.calibrators._histogram import Binning, HistogramBinning
from focalkern.calibrators._isotonic import IsotonicCalibration
from focalkern.calibrators._modules import (
    CalibratedLogits,
    CalibratedLogProbs,
    ClassAxis,
    HistogramLogProbs,
    IsotonicLogProbs,
    MultiLabelLogits,
    StructuredLogProbs,
)
from focalkern.calibrators._multilabel import MultiLabelScaling
from focalkern.calibrators._per_class import per_class_report
from focalkern.calibrators._scaling import FocalTemperatureScaling, TemperatureScaling
from focalkern.calibrators._search import DEFAULT_GAMMAS, GAMMA_BOUNDS, TEMPERATURE_BOUNDS, Search, grid_border
from focalkern.calibrators._structured import Structure, StructuredScaling
from focalkern.calibrators._warnings import CalibrationWarning

__all__ = [
    "DEFAULT_GAMMAS",
    "GAMMA_BOUNDS",
    "TEMPERATURE_BOUNDS",
    "Binning",
    "CalibratedLogProbs",
    "CalibratedLogits",
    "CalibrationWarning",
    "Calibrator",
    "ClassAxis",
    "Criterion",
    "Estimator",
    "FocalTemperatureScaling",
    "HistogramBinning",
    "HistogramLogProbs",
    "InputKind",
    "IsotonicCalibration",
    "IsotonicLogProbs",
    "MultiLabelLogits",
    "MultiLabelScaling",
    "NotFittedError",
    "Search",
    "Structure",
    "StructuredLogProbs",
    "StructuredScaling",
    "TemperatureScaling",
    "grid_border",
    "load_calibrator",
    "per_class_report",
]
