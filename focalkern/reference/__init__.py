"""Every operator in plain torch: the oracle of the tests, the baseline of the benchmarks, the documentation.

The functions take the arguments of the public operators and define the results of the compiled kernels; float64 inputs
are computed in float64. They are written for reading: all classes of a row have the same formula, nothing is fused,
arguments are not checked, and autograd gives derivatives of any order. No function adds an epsilon or clamps a
probability. If a formula would cancel or become ``0 * inf``, the limit is written out.

Notation: ``z`` logits, ``q = softmax(z / T)``, ``lq = log q``, ``u = 1 - q``, ``phi = -q * lq / u``.
"""

from focalkern.reference._calibration import (
    assign_bins,
    binary_focal_calibration_map,
    calibration_error,
    calibration_grid,
    focal_calibration_map,
    spline_calibration_map,
)
from focalkern.reference._scored_losses import ia_bce_loss, matchability_loss, varifocal_loss
from focalkern.reference._sigmoid_losses import asymmetric_loss, quality_focal_loss, sigmoid_focal_loss
from focalkern.reference._softmax_losses import (
    brier_loss,
    dual_focal_loss,
    focal_loss,
    poly_focal_loss,
)

__all__ = [
    "assign_bins",
    "asymmetric_loss",
    "binary_focal_calibration_map",
    "brier_loss",
    "calibration_error",
    "calibration_grid",
    "dual_focal_loss",
    "focal_calibration_map",
    "focal_loss",
    "ia_bce_loss",
    "matchability_loss",
    "poly_focal_loss",
    "quality_focal_loss",
    "sigmoid_focal_loss",
    "spline_calibration_map",
    "varifocal_loss",
]
