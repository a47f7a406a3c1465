"""The table of a comparison as text, its cells, the text around it; the tables of a spline scaling's classes."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from focalkern._checks import count_rows, counted
from focalkern._types import LOSS_NAMES
from focalkern.calibrators import Search, SplineScaling
from focalkern.study.report import html
from focalkern.study.results import (
    SCALINGS,
    CalibratorResult,
    Comparison,
    Intervals,
    JudgedComparison,
    print_score,
)
from focalkern.study.samples import SCORES, describe_samples, describe_source

__all__ = [
    "class_tables",
    "describe",
    "describe_search",
    "floor_cells",
    "format_table",
    "headline",
    "legend_of",
    "on_validation",
    "table_cells",
    "table_in_html",
]

_MOST_CLASSES = 20
_MOST_PAIRS = 10


def headline(estimator: str) -> tuple[str, ...]:
    """The scores of a table of at most 100 columns, with the ECE of one estimator."""
    return ("accuracy", "nll", "brier", f"ece_{estimator}")


def format_table(
    results: Sequence[CalibratorResult],
    chosen: CalibratorResult | None = None,
    intervals: Intervals | None = None,
    *,
    names: Sequence[str] | None = None,
    hidden: Sequence[CalibratorResult] = (),
    legend: bool = True,
) -> str:
    """The table as text, with four digits after the point and an arrow before the chosen row.

    With ``intervals``, every row has a second line: half the width of the interval, and the mark.

    Args:
        results: the rows.
        chosen: the result with the arrow.
        intervals: intervals of the results.
        names: names of the scores in the columns; None shows all.
        hidden: results that are left out.
        legend: whether a legend of the intervals and marks follows the table.
    """
    shown = tuple(SCORES) if names is None else tuple(names)
    from tabulate import tabulate  # an optional dependency

    body = [
        [("-> " if result is chosen else "   ") + label, *cells]
        for result, (label, *cells) in table_cells(results, intervals, names=shown)
        if not any(result is one for one in hidden)
    ]
    if intervals is not None:
        label, *cells = floor_cells(results, chosen, intervals, names=shown)
        body.append([f"   {label}", *cells])
    table: str = tabulate(
        body,
        headers=["", "gamma", "T", *(_heading(name, names) for name in shown)],
        tablefmt="simple",
        disable_numparse=True,
        colalign=("left", *["right"] * (len(shown) + 2)),
        preserve_whitespace=True,
    )
    if intervals is None or not legend:
        return table
    return f"{table}\n\n{textwrap.fill(legend_of(intervals), 118 if names is None else 100)}"


def _heading(name: str, names: Sequence[str] | None) -> str:
    """A heading, in fewer lines if the table has few columns."""
    return SCORES[name] if names is None else SCORES[name].replace("_\n", "_")


def legend_of(intervals: Intervals, plus_minus: str = "+-") -> str:
    bootstrap = intervals.bootstrap
    return (
        f"{plus_minus} is half the {100 * bootstrap.level:g} % interval of {bootstrap.n_resamples} resamples of the "
        "test rows. * marks a better score, ! a worse one: the interval of the paired difference excludes 0. "
        "Temperature scaling is compared with no calibration; focal temperature scaling, with temperature scaling by "
        "the same criterion"
        f"{'; the other candidates, with temperature scaling' if intervals.others else ''}"
        f"{'; bins, with the same calibrator without bins' if intervals.binned else ''}. Bias "
        "floor: the mean calibration error of a perfectly calibrated model with the same confidences and number of "
        "rows; the number with < is its 95 % quantile."
    )


def table_cells(
    results: Sequence[CalibratorResult],
    intervals: Intervals | None = None,
    attribute: str = "test",
    plus_minus: str = "+-",
    names: Sequence[str] = tuple(SCORES),
) -> list[tuple[CalibratorResult, list[str]]]:
    """Every result with its label, gamma, T and scores as text."""
    rows = []
    for index, result in enumerate(results):
        scaled = result.method in SCALINGS
        values = getattr(result, attribute)
        cells = [
            result.label,
            _print_parameter(result.gamma, result.search) if scaled else "",
            _print_parameter(result.temperature, result.search) if scaled else "",
            *("-" if values is None else print_score(values[name]) for name in names),
        ]
        if intervals is not None:
            for column, name in enumerate(names, start=3):
                interval = intervals.interval(index, name)
                if interval is not None and math.isfinite(interval.low):
                    half = max(interval.high - interval.estimate, interval.estimate - interval.low)
                    cells[column] += f"\n{plus_minus}{_print_half(half)}{intervals.mark(index, name)}"
        rows.append((result, cells))
    return rows


def floor_cells(
    results: Sequence[CalibratorResult],
    chosen: CalibratorResult | None,
    intervals: Intervals,
    *,
    names: Sequence[str] = tuple(SCORES),
) -> list[str]:
    """The last row of the table: the bias floor of the chosen result, or of no calibration."""
    floors = intervals.floors[0 if chosen is None else results.index(chosen)]
    assert floors is not None
    cells = [f"bias floor of {'the first row' if chosen is None else 'the row ->'}", "", ""]
    for name in names:
        floor = floors.get(name)
        cells.append("" if floor is None else f"{floor.mean:.4f}\n<{_print_half(floor.quantile(0.95))}")
    return cells


def _print_half(value: float) -> str:
    """Half the width of an interval, without the leading zero, because the column also holds a mark."""
    return f"{value:.4f}".removeprefix("0") if value < 1 else f"{value:.3g}"


def _print_parameter(value: float | None, search: Search) -> str:
    """A parameter with two digits, or more if the grid is finer; with four digits off the grid."""
    if value is None:
        return "-"
    if search != "grid" and value != 0:
        return f"{value:.4f}"
    text = f"{value:.10g}"
    return text if len(text.partition(".")[2]) > 1 else f"{value:.2f}"


def table_in_html(comparison: JudgedComparison) -> str:
    """The verdict and the table, for a notebook."""
    names = headline(comparison.estimator)
    rows = table_cells(comparison.results, comparison.intervals, plus_minus="\u00b1", names=names)
    head = ["", "gamma", "T", *(SCORES[name].replace("_\n", "_").replace("\n", " ") for name in names)]
    # A notebook lacks the style sheet of the page, so an arrow marks the chosen row.
    body = [[("\u2192 " if result is comparison.chosen else "") + label, *cells] for result, (label, *cells) in rows]
    lines = [
        *map(html.typeset, comparison.verdict.sentences()),
        f"Metrics on {describe_samples(comparison.test)}. \u2192 marks the recommended row.",
    ]
    return html.render_table(html.Table(head, body), lines)


def describe(comparison: Comparison) -> str:
    """The text above the table: the data and the search."""
    lines = [f"validation   {describe_source(comparison.validation)}"]
    lines.append(f"test         {'the same rows' if comparison.same_samples else describe_source(comparison.test)}")
    if comparison.cross_validation is not None and comparison.cross_validation.folds:
        loss = LOSS_NAMES[comparison.cross_validation.criterion]
        folds = comparison.cross_validation.folds
        lines.append(f"compared by  {loss} of {folds}-fold cross-validation on the validation rows")
    grid = comparison.grid
    low, high = float(grid.temperatures.min()), float(grid.temperatures.max())
    lines.append(
        f"grid         {counted(len(grid.gammas), 'gamma')} x {counted(len(grid.temperatures), 'temperature')} from "
        f"{low:g} to {high:g}; ECE of {counted(grid.n_bins, 'bin')}, {grid.estimator}"
    )
    return "\n".join(lines)


def describe_search(comparison: Comparison) -> str:
    """Sentences about the grid and the other searches."""
    grid = comparison.grid
    gammas = ", ".join(f"{gamma:g}" for gamma in grid.gammas.tolist())
    low, high = float(grid.temperatures.min()), float(grid.temperatures.max())
    besides = []
    for result in comparison.results:
        if result.binning is not None:
            besides.append(
                f"For {result.label} each confidence becomes the accuracy of its bin, one of "
                f"{counted(len(result.binning.values_), 'bin')} of {result.binning.binning.replace('_', ' ')}."
            )
        elif result.search != "grid" and result.scaling is not None:
            n_pairs = result.scaling.n_cells_
            besides.append(f"For {result.label} the search computed {n_pairs} pairs of gamma and T, also off the grid.")
    return (
        f"{counted(len(grid.gammas), 'gamma')} ({gammas}) x {counted(len(grid.temperatures), 'temperature')} from "
        f"{low:g} to {high:g}, {counted(len(grid.gammas) * len(grid.temperatures), 'cell')}, each with its ECE "
        f"({grid.estimator}, {counted(grid.n_bins, 'bin')}) and NLL {on_validation(comparison)}. "
        f"Temperature scaling is the row gamma = 0.{''.join(f' {words}' for words in besides)}"
    )


def on_validation(comparison: Comparison) -> str:
    """``on the 5,000 validation rows``."""
    return f"on the {count_rows(len(comparison.validation), 'validation ')}"


def class_tables(calibrator: Any) -> list[html.Table]:
    """Tables of v and b of each class, and of the largest D_jk; empty for a calibrator without them."""
    if not isinstance(calibrator, SplineScaling) or calibrator.weight_ is None or calibrator.bias_ is None:
        return []
    weight, bias = calibrator.weight_, calibrator.bias_
    names = [f"class {name}" for name in calibrator.classes_]
    slopes = weight if weight.ndim == 1 else weight.diagonal()
    largest = np.argsort(-(np.abs(slopes) + np.abs(bias)), kind="stable")[:_MOST_CLASSES]
    rows = [[names[j], f"{slopes[j]:+.4f}", f"{bias[j]:+.4f}"] for j in sorted(largest)]
    shown = (
        "Each class" if len(names) == len(rows) else f"The {len(rows)} of {len(names)} classes with the largest terms"
    )
    symbol = "v" if weight.ndim == 1 else "D_jj"
    caption = f"{shown}: slope {symbol} and intercept b, added to the curve. In plain spline scaling they are 0."
    tables = [html.Table(["class", f"slope {symbol}", "intercept b"], rows, caption)]
    if weight.ndim == 2:
        tables.append(_table_of_pairs(weight, names))
    return tables


def _table_of_pairs(weight: np.ndarray[Any, Any], names: list[str]) -> html.Table:
    beside = np.abs(weight - np.diag(weight.diagonal()))
    places = np.argsort(-beside, axis=None, kind="stable")[: min(_MOST_PAIRS, beside.size - len(weight))]
    rows = []
    for j, k in zip(*np.unravel_index(places, weight.shape), strict=True):
        does = "raises" if weight[j, k] > 0 else "lowers"
        rows.append([f"{names[k]} {does} {names[j]}", f"{weight[j, k]:+.4f}"])
    caption = f"The {len(rows)} largest D_jk: class k raises or lowers the score of class j."
    return html.Table(["pair", "D_jk"], rows, caption)
