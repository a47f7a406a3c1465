"""The page of the report: the values of its template, its pictures, and the other files of the folder."""

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from focalkern import metrics
from focalkern._atomic import write_together
from focalkern._checks import counted
from focalkern._devices import cpu_by_default
from focalkern._types import LOSS_NAMES, InputKind
from focalkern.calibrators import Calibrator, SplineScaling
from focalkern.calibrators._spline_shown import describe_curve
from focalkern.calibrators._verdict import sentence
from focalkern.study.report import html
from focalkern.study.report.explorer import Cells, cells_on, make_explorer, subsampled_grid
from focalkern.study.report.export import evidence, to_csv
from focalkern.study.report.tables import (
    class_tables,
    describe_search,
    floor_cells,
    headline,
    legend_of,
    on_validation,
    table_cells,
)
from focalkern.study.results import CalibratorResult, Intervals, JudgedComparison
from focalkern.study.samples import SCORES, describe_test
from focalkern.study.scores import facts, reliability

__all__ = ["cells_of", "python_lines", "write_report"]


@cpu_by_default()
def write_report(
    comparison: JudgedComparison,
    folder: Path,
    document: dict[str, Any],
    *,
    title: str = "Calibration report",
    cells: Cells | None = None,
    saved: Path | None = None,
    commands: Sequence[str] = (),
) -> list[Path]:
    """Write the page, and its diagrams, maps, tables and calibrator as files.

    Args:
        comparison: the result of :func:`run_study`.
        folder: created if missing; files of the same names are replaced when all new ones are complete.
        document: the content of ``report.json``.
        title: heading of the page.
        cells: the result of :func:`cells_of`, which several processes must call together; None calls it.
        saved: the file of the calibrator, if it is already saved; otherwise ``calibrator.json`` is one of the files.
        commands: shell commands that use the calibrator, for the box under the verdict.

    Returns:
        The files, in the order in which they were written; the page is ``report.html``.
    """
    bins = bins_before_and_after(comparison)
    images = draw_all(comparison, bins)
    explorer = make_explorer(comparison, cells or cells_of(comparison))
    folder.mkdir(parents=True, exist_ok=True)
    calibrator = None if comparison.chosen is None else comparison.chosen.calibrator
    files, next_steps = {}, {}
    if isinstance(calibrator, Calibrator):
        if saved is None:
            files["calibrator.json"] = calibrator._to_bytes(evidence(comparison))
        python = python_lines(saved or folder / "calibrator.json", comparison.validation.kind)
        next_steps = {**({"Next": commands} if commands else {}), "In Python": python}
    files |= {
        "table.csv": to_csv(comparison).encode(),
        "report.json": (json.dumps(document, indent=2, allow_nan=False) + "\n").encode(),
        **images,
        "report.html": make_page(comparison, title, images, bins, explorer, next_steps),
    }
    return write_together(folder, files)


def python_lines(saved: str | os.PathLike[str], kind: InputKind = "logits") -> list[str]:
    """Three lines of Python that apply the saved calibrator, which was fitted to this kind of rows."""
    name = str(saved)
    quoted = json.dumps(name, ensure_ascii=not name.isprintable())  # a name that is not UTF-8 cannot be printed
    return [
        "import focalkern as fk",
        f"calibrator = fk.load_calibrator({quoted})",
        f"{'probs' if kind == 'logits' else 'calibrated'} = calibrator.predict_proba({kind})",
    ]


def cells_of(comparison: JudgedComparison) -> Cells:
    """Scores and bins of every cell of the map, on the test samples. All processes that share them must call it."""
    kept = [one.temperature for one in comparison.results if one.temperature is not None]
    n_bins = comparison.grid.n_bins
    gammas, temperatures, stride = subsampled_grid(comparison.grid, comparison.test, n_bins, kept)
    return cells_on(comparison.test, gammas, temperatures, n_bins, stride)


def make_page(
    comparison: JudgedComparison,
    title: str,
    images: dict[str, bytes],
    bins: dict[str, metrics.ReliabilityBins],
    explorer: dict[str, Any],
    next_steps: Mapping[str, Sequence[str]],
) -> bytes:
    """The page: the values of the template ``report.html.j2``."""
    test = describe_test(comparison.test, comparison.same_samples)
    short, everything = headline(comparison.estimator), tuple(SCORES)
    intervals = comparison.intervals
    all_scores = [_score_table(comparison, "test", f"All metrics {test}.", everything)]
    if intervals is not None:
        all_scores.append(_difference_table(comparison, intervals, everything))
    if not comparison.same_samples:
        caption = f"Metrics {on_validation(comparison)} (optimistic: used for fitting)."
        all_scores.append(_score_table(comparison, "validation", caption, everything))
    verdict = comparison.verdict
    remarks = [*map(sentence, verdict.warnings[int(verdict.check_data) :]), *comparison.remarks]
    caption = f"Metrics {test}. The shaded row is the recommended one."
    return html.render_page(
        "report.html.j2",
        title=title,
        sources=" and ".join(dict.fromkeys((comparison.validation.source, comparison.test.source))),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        verdict=verdict.sentences(),
        next_steps=next_steps,
        results=_score_table(comparison, "test", caption, short),
        legend="" if intervals is None else legend_of(intervals, plus_minus="\u00b1"),
        differences=None if intervals is None else _difference_table(comparison, intervals, short),
        remarks=list(dict.fromkeys(remarks)),
        explorer=explorer,
        images=images,
        curve=_curve(comparison, images),
        class_terms=[] if comparison.chosen is None else class_tables(comparison.chosen.calibrator),
        search=describe_search(comparison),
        maps=_maps(comparison, images),
        on_validation=on_validation(comparison),
        bins=[_bin_table(name, one) for name, one in bins.items()],
        all_scores=all_scores,
        data=_data_table(comparison),
    )


def _score_table(comparison: JudgedComparison, attribute: str, caption: str, names: Sequence[str]) -> html.Table:
    """The table of the results with the scores ``names`` on the samples ``attribute``."""
    intervals = comparison.intervals if attribute == "test" else None
    rows = table_cells(comparison.results, intervals, attribute, plus_minus="\u00b1", names=names)
    body = [cells for _, cells in rows]
    if intervals is not None:
        label, *cells = floor_cells(comparison.results, comparison.chosen, intervals, names=names)
        body.append([label.replace("the row ->", "the chosen row"), *cells])
    return html.Table(["row", "gamma", "T", *map(_heading, names)], body, caption, comparison.chosen_index)


def _heading(name: str) -> str:
    return SCORES[name].replace("_\n", "_").replace("\n", " ")


def _curve(comparison: JudgedComparison, images: dict[str, bytes]) -> str:
    """The sentence that describes the curve of a spline scaling; empty for other calibrators."""
    if comparison.chosen is None or "calibration_curve.png" not in images:
        return ""
    return describe_curve(comparison.chosen.calibrator)


def _maps(comparison: JudgedComparison, images: dict[str, bytes]) -> list[tuple[str, bytes]]:
    """The maps of the grid with the names of their criteria."""
    grid = comparison.grid
    words = {"ece": f"ECE ({grid.estimator}, {counted(grid.n_bins, 'bin')})", **LOSS_NAMES}
    return [(words[name], images[f"grid_{name}.png"]) for name in grid.tables if f"grid_{name}.png" in images]


def _difference_table(comparison: JudgedComparison, intervals: Intervals, names: Sequence[str]) -> html.Table:
    shown = {name: _heading(name) for name in names}
    if all(result.is_scaling for result in comparison.results):
        del shown["accuracy"]  # scalings do not change the accuracy
    rows = []
    for index, result in enumerate(comparison.results):
        other = intervals.baseline[index]
        if other is None or intervals.names[index] is None or intervals.names[other] is None:
            continue
        cells = [f"{result.label}\nminus {comparison.results[other].label}"]
        for name in shown:
            one = intervals.difference(index, name)
            if one is None or not math.isfinite(one.low):
                cells.append("")
                continue
            ends = f"{one.low:+.4f} to {one.high:+.4f}".replace(" ", "\u00a0")
            cells.append(f"{one.estimate:+.4f}{intervals.mark(index, name)}\n{ends}")
        rows.append(cells)
    caption = (
        f"Paired differences on the test rows. Each {100 * intervals.bootstrap.level:g} % interval is for one pair and "
        "one metric. * and ! mark intervals that exclude 0."
    )
    return html.Table(["row", *shown.values()], rows, caption)


def _bin_table(name: str, bins: metrics.ReliabilityBins) -> html.Table:
    from focalkern import plots

    bands = plots.reliability_bands(bins)
    inside = bands.inside(bins).tolist()
    rows = []
    for index in range(bins.n_bins):
        count = int(bins.count[index])
        cells = [f"{float(bins.lower[index]):.3f}\u00a0\u2013\u00a0{float(bins.upper[index]):.3f}", f"{count:,}"]
        if count:
            accuracy, confidence = float(bins.accuracy[index]), float(bins.confidence[index])
            cells += [
                f"{confidence:.4f}",
                f"{accuracy:.4f}",
                # If all samples of a bin are correct, or all wrong, the interval is a point and is not shown.
                f"{float(bands.lower[index]):.4f}\u00a0\u2013\u00a0{float(bands.upper[index]):.4f}"
                if 0 < accuracy < 1
                else "",
                f"{accuracy - confidence:+.4f}",
                f"{float(bands.calibrated_lower[index]):.4f}\u00a0\u2013\u00a0{float(bands.calibrated_upper[index]):.4f}",
                "" if inside[index] else ("under-confident" if accuracy > confidence else "over-confident"),
            ]
        else:
            cells += [""] * 6
        rows.append(cells)
    head = [
        "confidence",
        "samples",
        "mean confidence",
        "accuracy",
        "bootstrap, 95 %",
        "gap",
        "if calibrated, 95 %",
        "beyond chance",
    ]
    return html.Table(head, rows, f"{name[0].upper()}{name[1:]}, {bins.estimator}. Empty bins have no values.")


def _data_table(comparison: JudgedComparison) -> html.Table:
    same = comparison.same_samples
    sets = {"validation and test" if same else "validation": comparison.validation}
    if not same:
        sets["test"] = comparison.test
    rows = []
    for role, one in sets.items():
        per_class = facts(one).class_counts
        absent = int((per_class == 0).sum())
        bins = reliability(one, comparison.results[0].calibrator, comparison.grid.n_bins)
        hit, confidence = (float((bins.weight * of_bin).nansum()) for of_bin in (bins.accuracy, bins.confidence))
        rows.append(
            [
                role,
                one.source + (f"\n{one.part}" if one.part else ""),
                one.kind,
                f"{len(one):,}",
                str(one.n_classes),
                f"{int(per_class.min()):,} to {int(per_class.max()):,}"
                + (f"\n{absent} without rows" if absent else ""),
                f"{hit:.4f}",
                f"{confidence:.4f}",
            ]
        )
    head = ["set", "file", "input", "rows", "classes", "rows per class", "accuracy", "mean confidence"]
    return html.Table(head, rows)


# ---- pictures ------------------------------------------------------------------------------------------------------


def bins_before_and_after(comparison: JudgedComparison) -> dict[str, metrics.ReliabilityBins]:
    """Reliability bins on the test samples before and after calibration, by the name of the result."""
    shown = [comparison.results[0], *([comparison.chosen] if comparison.chosen is not None else [])]
    return {result.short_label: _bins(comparison, result) for result in shown}


def draw_all(comparison: JudgedComparison, bins: dict[str, metrics.ReliabilityBins]) -> dict[str, bytes]:
    """PNG pictures by file name; ``bins`` are those of :func:`bins_before_and_after`."""
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
        draw("reliability_compared.png", plots.reliability_diagram(panels, title=f"All candidates, {rows}"))
    if comparison.chosen is not None and isinstance(comparison.chosen.calibrator, SplineScaling):
        draw("calibration_curve.png", plots.calibration_curve(comparison.chosen.calibrator))
    finite = [name for name, table in comparison.grid.tables.items() if bool(table.isfinite().any())]
    for criterion in finite:
        draw(f"grid_{criterion}.png", plots.grid_heatmap(comparison.grid, criterion))
    if finite:
        draw("ridge.png", plots.ridge_diagram(comparison.grid))
    return images


def _bins(comparison: JudgedComparison, result: CalibratorResult) -> metrics.ReliabilityBins:
    """Reliability bins by the estimator of the report; of equal width for too many samples."""
    return reliability(comparison.test, result.calibrator, comparison.grid.n_bins, comparison.estimator)
