"""Reliability diagrams and maps of calibration grids, as matplotlib figures without pyplot.

The drawing functions return a ``matplotlib.figure.Figure`` with its own canvas: ``figure.savefig("name.png")`` writes
it, and a notebook displays it. Axes are fractions. Colours are those of Okabe & Ito and the map ``cividis``. They
differ in lightness and are distinguishable with common colour vision deficiencies; colour is never the only
difference. :func:`reliability_bands` and :func:`fit_ridge` return the numbers of the bands and of the fitted line."""

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError("focalkern.plots needs matplotlib: pip install matplotlib") from error

from focalkern.plots._bands import ReliabilityBands, reliability_bands
from focalkern.plots._curve import calibration_curve
from focalkern.plots._grid import Ridge, fit_ridge, grid_heatmap, ridge_diagram
from focalkern.plots._grid import colour_range as colour_range
from focalkern.plots._reliability import reliability_diagram
from focalkern.plots._risk import risk_coverage
from focalkern.plots._training import adafocal_history

__all__ = [
    "ReliabilityBands",
    "Ridge",
    "adafocal_history",
    "calibration_curve",
    "fit_ridge",
    "grid_heatmap",
    "reliability_bands",
    "reliability_diagram",
    "ridge_diagram",
    "risk_coverage",
]
