"""The compiled module's functions in plain torch: the road where no kernel fits.

Each function has the name, the arguments, the results and the errors of the compiled one, so that an operator only
chooses between two modules (:func:`focalkern.ops._extension.kernels_for`). They run wherever torch does, under
torch.compile and torch.func, and autograd differentiates them to any order.
"""

from focalkern.plain.calibration_grid import CalibrationGridRun, calibration_grid
from focalkern.plain.calibration_map import calibration_map, calibration_map_scalar
from focalkern.plain.focal_loss import focal_loss
from focalkern.plain.row_loss import row_loss
from focalkern.plain.sigmoid_loss import sigmoid_loss

__all__ = [
    "CalibrationGridRun",
    "calibration_grid",
    "calibration_map",
    "calibration_map_scalar",
    "empty_cache",
    "focal_loss",
    "row_loss",
    "sigmoid_loss",
]


def empty_cache() -> None:
    """Nothing is kept here."""
