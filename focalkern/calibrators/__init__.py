"""Calibrators: fit on held-out logits, apply to new logits, save as JSON, append to a network as a module."""

from focalkern._types import Criterion, Estimator, InputKind
from focalkern.calibrators._auto import AutoCalibrator
from focalkern.calibrators._base import Calibrator, load_calibrator
from focalkern.calibrators._batched import fit_focal_temperatures, fit_temperatures
from focalkern.calibrators._candidates import CANDIDATES
from focalkern.calibrators._focal_temperature import FocalTemperatureScaling
from focalkern.calibrators._histogram import Binning, HistogramBinning
from focalkern.calibrators._histogram_module import HistogramLogProbs
from focalkern.calibrators._isotonic import IsotonicCalibration
from focalkern.calibrators._isotonic_module import IsotonicLogProbs
from focalkern.calibrators._modules import (
    CalibratedLogits,
    CalibratedLogProbs,
    ClassAxis,
    FlooredInput,
    MultiLabelLogits,
)
from focalkern.calibrators._multilabel import MultiLabelScaling
from focalkern.calibrators._not_fitted import NotFittedError
from focalkern.calibrators._per_class import per_class_report
from focalkern.calibrators._robust_temperature import RobustTemperatureScaling
from focalkern.calibrators._search import DEFAULT_GAMMAS, GAMMA_BOUNDS, TEMPERATURE_BOUNDS, Search, grid_border
from focalkern.calibrators._spline import SplineKind, SplineScaling
from focalkern.calibrators._spline_module import FlooredLogProbs, SplineLogProbs
from focalkern.calibrators._structured import Structure, StructuredScaling
from focalkern.calibrators._structured_module import StructuredLogProbs
from focalkern.calibrators._temperature import TemperatureScaling
from focalkern.calibrators._verdict import Verdict
from focalkern.calibrators._warnings import CalibrationWarning

__all__ = [
    "CANDIDATES",
    "DEFAULT_GAMMAS",
    "GAMMA_BOUNDS",
    "TEMPERATURE_BOUNDS",
    "AutoCalibrator",
    "Binning",
    "CalibratedLogProbs",
    "CalibratedLogits",
    "CalibrationWarning",
    "Calibrator",
    "ClassAxis",
    "Criterion",
    "Estimator",
    "FlooredInput",
    "FlooredLogProbs",
    "FocalTemperatureScaling",
    "HistogramBinning",
    "HistogramLogProbs",
    "InputKind",
    "IsotonicCalibration",
    "IsotonicLogProbs",
    "MultiLabelLogits",
    "MultiLabelScaling",
    "NotFittedError",
    "RobustTemperatureScaling",
    "Search",
    "SplineKind",
    "SplineLogProbs",
    "SplineScaling",
    "Structure",
    "StructuredLogProbs",
    "StructuredScaling",
    "TemperatureScaling",
    "Verdict",
    "fit_focal_temperatures",
    "fit_temperatures",
    "grid_border",
    "load_calibrator",
    "per_class_report",
]
