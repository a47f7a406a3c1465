"""Reliability diagrams and maps of calibration grids, as matplotlib figures without pyplot.

The drawing functions return a ``matplotlib.figure.Figure`` with its own canvas: ``figure.savefig("name.png")`` writes
it, a notebook shows it. Axes are fractions. Colours are from the set of Okabe & Ito and the map ``cividis``. They
differ in lightness and are distinguishable with the common colour deficiencies; no information is in colour alone.
:func:`reliability_bands` and :func:`fit_ridge` return the numbers behind the bands and the fitted line."""

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
