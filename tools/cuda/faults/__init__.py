"""The planted faults by kernel, and the redundant ones, which no case can detect."""

from tools.cuda.faults import calibration, focal_loss, row_loss, sigmoid_loss, soft_focal, spline
from tools.cuda.faults.fault import Fault as Fault

MODULES = (focal_loss, row_loss, soft_focal, sigmoid_loss, calibration, spline)
FAULTS = [fault for module in MODULES for fault in module.FAULTS]

# Name of a fault -> why no result can depend on it.
REDUNDANT = {
    "calibration_sums.cu: __syncthreads 3": "a thread clears no bucket but those that it has written out itself",
    "the last row of a tile lends its neighbour's gradient": "a whole vector ends with the last row at the latest, and "
    "what its last element fetches is for no other",
    "rows beyond a tile are read": "in 32 bits they lie within the tile's memory, and their sum goes nowhere; "
    "in double, which is not compiled for the faults, they lie beyond it",
    "an ignored row is read": "what it brings is not looked at: leaving it out saves time",
}
