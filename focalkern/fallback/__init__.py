"""The compiled module's functions in plain torch operations, which autograd differentiates to any order.

If no kernel supports the input, an operator calls the function of this package instead of the compiled one. Names,
arguments, results and errors are the same (:func:`focalkern.ops._backend.backend_for`). The operators ``*_composite``
are these functions, too. The compiled module calls them through torch's dispatcher for second derivatives, torch.func
transforms and forward-mode derivatives.
"""

from focalkern.fallback._compile import compile_on, compiles_on
from focalkern.fallback._operators import register_composites
from focalkern.fallback.calibration_grid import CalibrationGridRun, calibration_grid
from focalkern.fallback.calibration_map import calibration_map, calibration_map_scalar
from focalkern.fallback.focal_loss import focal_loss
from focalkern.fallback.map_nll_sums import map_nll_sums
from focalkern.fallback.row_loss import row_loss
from focalkern.fallback.row_sums import has_label, is_small_head, row_statistics, row_sums
from focalkern.fallback.sigmoid_loss import sigmoid_loss
from focalkern.fallback.spline_map import spline_map
from focalkern.fallback.spline_sums import (
    spline_curve_sums,
    spline_features,
    spline_histogram,
    spline_linear_sums,
    spline_log_probs,
    spline_matrix_hessian,
    spline_row_losses,
    spline_spread,
    spline_temperature_sums,
)
from focalkern.fallback.z_loss import z_loss

__all__ = [
    "CalibrationGridRun",
    "calibration_grid",
    "calibration_map",
    "calibration_map_scalar",
    "compile_on",
    "compiles_on",
    "empty_cache",
    "focal_loss",
    "has_label",
    "is_small_head",
    "map_nll_sums",
    "register_composites",
    "row_loss",
    "row_statistics",
    "row_sums",
    "sigmoid_loss",
    "spline_curve_sums",
    "spline_features",
    "spline_histogram",
    "spline_linear_sums",
    "spline_log_probs",
    "spline_map",
    "spline_matrix_hessian",
    "spline_row_losses",
    "spline_spread",
    "spline_temperature_sums",
    "z_loss",
]


def empty_cache() -> None:
    """Does nothing, because plain torch keeps no cache."""
