"""The pictures of a study: reliability diagrams, maps of the grid, and the ridge."""

import io
from typing import Any

from focalkern import metrics
from focalkern.study.candidates import Choice
from focalkern.study.result import Study
from focalkern.study.words import short_name

__all__ = ["draw_all", "shown_bins"]


def shown_bins(study: Study) -> dict[str, metrics.ReliabilityBins]:
    """The bins of the reported rows before calibration and after it, by what they are called."""
    shown = [study.choices[0], *([study.chosen] if study.chosen is not None else [])]
    return {short_name(choice): _bins(study, choice) for choice in shown}


def draw_all(study: Study, bins: dict[str, metrics.ReliabilityBins]) -> dict[str, bytes]:
    """By the names of their files, as PNG; ``bins`` are those of :func:`shown_bins`."""
    from focalkern import plots  # needs matplotlib, an extra

    images: dict[str, bytes] = {}

    def draw(name: str, figure: Any) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        images[name] = buffer.getvalue()

    rows = f"{'validation' if study.test is study.validation else 'test'} rows"
    names = list(bins)
    before = {names[0]: bins[names[0]]}
    draw("reliability_before.png", plots.reliability_diagram(before, title=f"Before calibration, {rows}"))
    if study.chosen is not None and study.chosen is not study.choices[0]:
        after = {names[-1]: bins[names[-1]]}
        draw("reliability_after.png", plots.reliability_diagram(after, title=f"After calibration, {rows}"))
        panels = {row.label: _bins(study, row) for row in study.choices if row.test is not None}
        draw("reliability_compared.png", plots.reliability_diagram(panels, title=f"Every choice, {rows}"))
    finite = [name for name, table in study.grid.tables.items() if bool(table.isfinite().any())]
    for criterion in finite:
        draw(f"grid_{criterion}.png", plots.grid_heatmap(study.grid, criterion))
    if finite:
        draw("ridge.png", plots.ridge_diagram(study.grid))
    return images


def _bins(study: Study, choice: Choice) -> metrics.ReliabilityBins:
    """By the one estimator of everything that is shown; of rows that are too many to keep, of equal width."""
    return study.test.reliability(choice.what, study.grid.n_bins, study.estimator)
