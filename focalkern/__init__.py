"""Fused focal losses and focal calibration for PyTorch.

The contents, by purpose::

    Train: modules that replace torch.nn.CrossEntropyLoss
        FocalLoss, InverseFocalLoss, PolyFocalLoss, DFTLoss, FLSDLoss, AdaFocalLoss, DualFocalLoss
        BrierLoss, MMCELoss, LogitNormPenalty                        baselines
        SigmoidFocalLoss, AsymmetricLoss, QualityFocalLoss           a sigmoid per class: detectors, several labels
        VarifocalLoss, MatchabilityLoss, IABCELoss                   the same, for box scores that are overlaps
        LinearFocalLoss, LinearFLSDLoss, LinearAdaFocalLoss          with the last linear layer: large vocabularies
        GammaTable, FLSD_53                                          gamma as a function of the probability
        class_balanced_weight                                        class weights from class counts

    Calibrate: fitted on validation logits, applied to others
        compare_calibrators (gives a Study with its Verdict)         which one to use, and why
        AutoCalibrator                                               the same choice as one calibrator
        TemperatureScaling, FocalTemperatureScaling                  one or two parameters
        RobustTemperatureScaling, SplineScaling                      finite on any rows; the map as a learned curve
        StructuredScaling, IsotonicCalibration, HistogramBinning     more parameters, for more rows
        MultiLabelScaling, CalibratedClassifier                      several labels per row; scikit-learn's classifiers
        fit_temperatures, fit_focal_temperatures                     of many networks, in one call
        sweep, sweep_one (give a Sweep, and one of its records)      the comparison for many networks, on any engine
        load_calibrator, CalibrationWarning

    Measure
        metrics      calibration errors, NLL, Brier score, AURC, AUROC, reliability bins
        bootstrap    confidence intervals, and the ECE of a perfectly calibrated model
        plots        reliability diagrams, maps of (gamma, T)        needs matplotlib
        per_class_report, check_labels
        accept_threshold                                             which predictions to accept, with a bounded risk

    Operators: one function each, differentiable, on CPU and CUDA
        focal_loss, poly_focal_loss, linear_focal_loss, focal_loss_vocab_parallel
        LossWithStats, LossStats                                     of return_stats=True: entropy, accuracy, log p
        sigmoid_focal_loss, asymmetric_loss, quality_focal_loss, properized_focal_loss
        varifocal_loss, matchability_loss, ia_bce_loss
        focal_calibration_map, inverse_focal_calibration_map
        binary_focal_calibration_map, binary_inverse_focal_calibration_map
        spline_calibration_map
        calibration_grid (gives a CalibrationGrid), CalibrationGridState, PAPER_GAMMAS, PAPER_TEMPERATURES

    Other
        reference    every operator in plain torch
        losses       the modules again, and what their options mean
        focalkern.integrations.torchmetrics, focalkern.files
        build_info, empty_cache

Errors, confidences and accuracies are fractions, never percent. Logits are [N, C] and labels [N], unless the docstring
states other shapes. The examples begin with ``import numpy as np``, ``import torch`` and ``import focalkern as fk``.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("torch") is None:  # installed with --no-deps
    raise ImportError("focalkern needs torch, which is not installed: pip install torch")

from focalkern import bootstrap, losses, metrics, reference
from focalkern._version import __version__ as __version__
from focalkern.gamma import FLSD_53, GammaTable
from focalkern.losses import (
    AdaFocalLoss,
    AsymmetricLoss,
    BrierLoss,
    DFTLoss,
    DualFocalLoss,
    FLSDLoss,
    FocalLoss,
    IABCELoss,
    InverseFocalLoss,
    LinearAdaFocalLoss,
    LinearFLSDLoss,
    LinearFocalLoss,
    LogitNormPenalty,
    MatchabilityLoss,
    MMCELoss,
    PolyFocalLoss,
    QualityFocalLoss,
    SigmoidFocalLoss,
    VarifocalLoss,
    class_balanced_weight,
)
from focalkern.metrics import accept_threshold
from focalkern.ops._backend import build_info
from focalkern.ops._loss_stats import LossStats, LossWithStats
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
from focalkern.ops.scored_losses import ia_bce_loss, matchability_loss, varifocal_loss
from focalkern.ops.sigmoid_loss import asymmetric_loss, quality_focal_loss, sigmoid_focal_loss
from focalkern.ops.softmax_losses import poly_focal_loss
from focalkern.ops.spline_map import spline_calibration_map
from focalkern.streaming import CalibrationGridState

if TYPE_CHECKING:  # at run time, __getattr__ has them
    from focalkern import calibrators as calibrators
    from focalkern import files as files
    from focalkern import plots as plots
    from focalkern import study as study
    from focalkern.calibrators import (
        AutoCalibrator,
        CalibrationWarning,
        FocalTemperatureScaling,
        HistogramBinning,
        IsotonicCalibration,
        MultiLabelScaling,
        RobustTemperatureScaling,
        SplineScaling,
        StructuredScaling,
        TemperatureScaling,
        Verdict,
        fit_focal_temperatures,
        fit_temperatures,
        load_calibrator,
        per_class_report,
    )
    from focalkern.integrations.sklearn import CalibratedClassifier as CalibratedClassifier
    from focalkern.study import Study, Sweep, compare_calibrators
    from focalkern.study.sweep import sweep, sweep_one

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
    "DFTLoss",
    "DualFocalLoss",
    "FLSDLoss",
    "FocalLoss",
    "FocalTemperatureScaling",
    "GammaTable",
    "HistogramBinning",
    "IABCELoss",
    "InverseFocalLoss",
    "IsotonicCalibration",
    "LinearAdaFocalLoss",
    "LinearFLSDLoss",
    "LinearFocalLoss",
    "LogitNormPenalty",
    "LossStats",
    "LossWithStats",
    "MMCELoss",
    "MatchabilityLoss",
    "MultiLabelScaling",
    "PolyFocalLoss",
    "QualityFocalLoss",
    "RobustTemperatureScaling",
    "SigmoidFocalLoss",
    "SplineScaling",
    "StructuredScaling",
    "Study",
    "Sweep",
    "TemperatureScaling",
    "VarifocalLoss",
    "Verdict",
    "accept_threshold",
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
    "fit_focal_temperatures",
    "fit_temperatures",
    "focal_calibration_map",
    "focal_loss",
    "focal_loss_vocab_parallel",
    "ia_bce_loss",
    "inverse_focal_calibration_map",
    "linear_focal_loss",
    "load_calibrator",
    "losses",
    "matchability_loss",
    "metrics",
    "per_class_report",
    "poly_focal_loss",
    "properized_focal_loss",
    "quality_focal_loss",
    "reference",
    "sigmoid_focal_loss",
    "spline_calibration_map",
    "sweep",
    "sweep_one",
    "varifocal_loss",
]


# Loaded at their first use, because training needs none of them, and scikit-learn or matplotlib may be absent.
_MODULES = ("calibrators", "files", "plots", "study")
_NAMES = {
    "CalibratedClassifier": "focalkern.integrations.sklearn",
    "Study": "focalkern.study",
    "Sweep": "focalkern.study",
    "compare_calibrators": "focalkern.study",
    "sweep": "focalkern.study.sweep",
    "sweep_one": "focalkern.study.sweep",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "CalibratedClassifier", "__version__", "plots"])


if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"focalkern.{name}")
        if name in _NAMES or name in __all__:
            module = _NAMES.get(name, "focalkern.calibrators")
            # The package before its module: threads that lock them in different orders are a deadlock of importlib.
            importlib.import_module(module.rpartition(".")[0])
            globals()[name] = getattr(importlib.import_module(module), name)
            return globals()[name]
        raise AttributeError(f"module 'focalkern' has no attribute {name!r}")
