"""The pictures of the report: reliability diagrams, maps of the grid, and the ridge."""

import io
from typing import Any

from focalkern import metrics
from focalkern.calibrators import SplineScaling
from focalkern.study.results import CalibratorResult, JudgedComparison

__all__ = ["draw_all", "shown_bins"]


def shown_bins(comparison: JudgedComparison) -> dict[str, metrics.ReliabilityBins]:
    """Reliability bins on the test samples before and after calibration, by the names of the results."""
    shown = [comparison.results[0], *([comparison.chosen] if comparison.chosen is not None else [])]
    return {result.short_label: _bins(comparison, result) for result in shown}


def draw_all(comparison: JudgedComparison, bins: dict[str, metrics.ReliabilityBins]) -> dict[str, bytes]:
    """PNG pictures by the names of their files; ``bins`` are those of :func:`shown_bins`."""
    from focalkern import plots  # needs matplotlib, an extra

    images: dict[str, bytes] = {}

    def draw(name: str, figure: Any) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        images[name] = buffer.getvalue()

    rows = f"{'validation' if comparison.same_samples else 'test'} rows"
    names = list(bins)
    before = {names[0]: bins[names[0]]}
    draw("reliability_before.png", plots.reliability_diagram(before, title=f"Before calibration, {rows}"))
    if comparison.chosen is not None and comparison.chosen is not comparison.results[0]:
        after = {names[-1]: bins[names[-1]]}
        draw("reliability_after.png", plots.reliability_diagram(after, title=f"After calibration, {rows}"))
        panels = {row.label: _bins(comparison, row) for row in comparison.results if row.test is not None}
        draw("reliability_compared.png", plots.reliability_diagram(panels, title=f"Every choice, {rows}"))
    if comparison.chosen is not None and isinstance(comparison.chosen.calibrator, SplineScaling):
        draw("calibration_curve.png", plots.calibration_curve(comparison.chosen.calibrator))
    finite = [name for name, table in comparison.grid.tables.items() if bool(table.isfinite().any())]
    for criterion in finite:
        draw(f"grid_{criterion}.png", plots.grid_heatmap(comparison.grid, criterion))
    if finite:
        draw("ridge.png", plots.ridge_diagram(comparison.grid))
    return images


def _bins(comparison: JudgedComparison, result: CalibratorResult) -> metrics.ReliabilityBins:
    """With the estimator of the report; of equal width if there are too many samples to keep."""
    return comparison.test.reliability(result.calibrator, comparison.grid.n_bins, comparison.estimator)
