"""The compiled module's functions on kernels behind torch's stable ABI, which serve every torch from 2.11 on.

``_C_stable.abi3.so`` has the kernels; this package checks the arguments, allocates the results, and has the derivatives
and the shapes of fake tensors. Operators, names, arguments and errors are those of the compiled module. Results use
torch's own memory: :func:`empty_cache` has nothing to free.
"""

from focalkern.fallback import empty_cache, has_label, is_small_head, z_loss
from focalkern.stable._library import build_info, load, row_losses
from focalkern.stable.calibration_grid import CalibrationGridRun, calibration_grid
from focalkern.stable.calibration_map import calibration_map, calibration_map_scalar
from focalkern.stable.map_nll_sums import map_nll_sums
from focalkern.stable.mmce_loss import mmce_loss
from focalkern.stable.row_loss import focal_loss, row_loss, row_loss_with_statistics
from focalkern.stable.row_sums import row_statistics, row_sums
from focalkern.stable.sigmoid_loss import sigmoid_loss
from focalkern.stable.spline_map import spline_map
from focalkern.stable.spline_sums import (
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

__all__ = [
    "CalibrationGridRun",
    "build_info",
    "calibration_grid",
    "calibration_map",
    "calibration_map_scalar",
    "empty_cache",
    "focal_loss",
    "has_label",
    "is_small_head",
    "load",
    "map_nll_sums",
    "mmce_loss",
    "row_loss",
    "row_loss_with_statistics",
    "row_losses",
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
