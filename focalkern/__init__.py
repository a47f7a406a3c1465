"""Fused focal losses and focal calibration for PyTorch."""

import importlib
from typing import Any

from focalkern import bootstrap, losses, metrics, reference
from focalkern.calibrators import (
    CalibrationWarning,
    FocalTemperatureScaling,
    HistogramBinning,
    IsotonicCalibration,
    MultiLabelScaling,
    StructuredScaling,
    TemperatureScaling,
    load_calibrator,
    per_class_report,
)
from focalkern.gamma import FLSD_53, GammaTable
from focalkern.losses import (
    AdaFocalLoss,
    AsymmetricLoss,
    BrierLoss,
    DualFocalLoss,
    FLSDLoss,
    FocalLoss,
    InverseFocalLoss,
    LinearAdaFocalLoss,
    LinearFLSDLoss,
    LinearFocalLoss,
    LogitNormPenalty,
    MMCELoss,
    QualityFocalLoss,
    SigmoidFocalLoss,
    class_balanced_weight,
)
from focalkern.ops._extension import build_info
from focalkern.ops.calibration_grid import PAPER_GAMMAS, PAPER_TEMPERATURES, CalibrationGrid, calibration_grid
from focalkern.ops.calibration_map import binary_focal_calibration_map, focal_calibration_map
from focalkern.ops.focal_loss import check_labels, focal_loss
from focalkern.ops.focal_loss_vocab_parallel import focal_loss_vocab_parallel
from focalkern.ops.inverse_calibration_map import (
    binary_inverse_focal_calibration_map,
    inverse_focal_calibration_map,
    properized_focal_loss,
)
from focalkern.ops.linear_focal_loss import linear_focal_loss
from focalkern.ops.memory import empty_cache
from focalkern.ops.sigmoid_loss import asymmetric_loss, quality_focal_loss, sigmoid_focal_loss
from focalkern.streaming import CalibrationGridState
from focalkern.study import AutoCalibrator, Study, Verdict, compare_calibrators

__version__ = "0.2.0"

__all__ = [
    "FLSD_53",
    "PAPER_GAMMAS",
    "PAPER_TEMPERATURES",
    "AdaFocalLoss",
    "AsymmetricLoss",
    "AutoCalibrator",
    "BrierLoss",
    "CalibrationGrid",
    "CalibrationGridState",
    "CalibrationWarning",
    "DualFocalLoss",
    "FLSDLoss",
    "FocalLoss",
    "FocalTemperatureScaling",
    "GammaTable",
    "HistogramBinning",
    "InverseFocalLoss",
    "IsotonicCalibration",
    "LinearAdaFocalLoss",
    "LinearFLSDLoss",
    "LinearFocalLoss",
    "LogitNormPenalty",
    "MMCELoss",
    "MultiLabelScaling",
    "QualityFocalLoss",
    "SigmoidFocalLoss",
    "StructuredScaling",
    "Study",
    "TemperatureScaling",
    "Verdict",
    "asymmetric_loss",
    "binary_focal_calibration_map",
    "binary_inverse_focal_calibration_map",
    "bootstrap",
    "build_info",
    "calibration_grid",
    "check_labels",
    "class_balanced_weight",
    "compare_calibrators",
    "empty_cache",
    "focal_calibration_map",
    "focal_loss",
    "focal_loss_vocab_parallel",
    "inverse_focal_calibration_map",
    "linear_focal_loss",
    "load_calibrator",
    "losses",
    "metrics",
    "per_class_report",
    "properized_focal_loss",
    "quality_focal_loss",
    "reference",
    "sigmoid_focal_loss",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "CalibratedClassifier", "__version__", "plots"])


def __getattr__(name: str) -> Any:
    """On first use what needs packages that may be missing: matplotlib, scikit-learn."""
    if name == "plots":
        return importlib.import_module("focalkern.plots")
    if name == "CalibratedClassifier":
        return importlib.import_module("focalkern.integrations.sklearn").CalibratedClassifier
    raise AttributeError(f"module 'focalkern' has no attribute {name!r}")
