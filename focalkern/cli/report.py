"""The study behind ``calibrate`` and ``demo``: search the grid, compare the choices, print and write the result."""

import csv
import io
import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from focalkern import metrics
from focalkern._atomic import write_atomically
from focalkern.bootstrap import BiasFloor, Interval, PairedBootstrap, bias_floor, paired_bootstrap
from focalkern.calibrators import (
    DEFAULT_GAMMAS,
    Binning,
    Criterion,
    Estimator,
    FocalTemperatureScaling,
    HistogramBinning,
    Search,
    TemperatureScaling,
)
from focalkern.cli import html
from focalkern.cli.files import LogitSet
from focalkern.cli.stream import StreamedSet
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES, CalibrationGrid, calibration_grid
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = [
    "FIGURES",
    "Choice",
    "Study",
    "Trust",
    "bin_remarks",
    "default_resamples",
    "describe",
    "figures",
    "finite_or_none",
    "format_table",
    "read_remarks",
    "rows_in_words",
    "run_study",
    "to_json",
    "write_report",
]

Calibrator = TemperatureScaling | FocalTemperatureScaling
Rows = LogitSet | StreamedSet

FIGURES = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece_equal_width": "ECE\nequal_\nwidth",
    "ece_equal_mass": "ECE\nequal_\nmass",
    "ece_equal_mass_interp": "ECE\nequal_\nmass_\ninterp",
    "classwise_ece_equal_width": "classwise\nECE equal_\nwidth",
}
"""The figures of a table, by their name in CSV and JSON, with the heading they have in print."""

_CALIBRATION_ERRORS = tuple(name for name in FIGURES if "ece_" in name)

_IN_WORDS = {"temperature": "temperature", "focal-temperature": "focal temperature"}


@dataclass(frozen=True)
class Choice:
    """One row of the table.

    Attributes:
        method: ``"none"``, ``"temperature"``, ``"focal-temperature"`` or ``"histogram"``.
        criterion: ``"ece"`` or ``"nll"``; None for the uncalibrated row, for histogram binning without a scaling, and
            for a calibrator from a file.
        gamma, temperature: the chosen cell, 0 and 1 without a scaling; None where no cell had a finite criterion.
        calibrator: the scaling; None where there is none, and where there is no cell.
        selection, report: the figures on the rows that chose, and on the rows that report.
        search: how the cell was found.
        binning: histogram binning, after the scaling; None where there is none.
    """

    method: str
    criterion: str | None
    gamma: float | None
    temperature: float | None
    calibrator: Calibrator | None
    selection: dict[str, float] | None
    report: dict[str, float] | None
    search: Search = "grid"
    binning: HistogramBinning | None = None

    @property
    def label(self) -> str:
        name = _IN_WORDS.get(self.method, "histogram binning" if self.binning else "uncalibrated")
        name += f" ({self.search})" if self.search != "grid" else ""
        name += " + bins" if self.binning and self.method in _IN_WORDS else ""
        return f"{name}, {self.criterion.upper()}-optimal" if self.criterion else name

    @property
    def parameters(self) -> str:
        """gamma and T in words; nothing without a scaling."""
        if self.method not in _IN_WORDS or self.gamma is None or self.temperature is None:
            return ""
        gamma = f"gamma = {self.gamma:g}, " if self.method == "focal-temperature" else ""
        return f"{gamma}T = {self.temperature:g}"

    @property
    def saved(self) -> Calibrator | HistogramBinning | None:
        return self.binning or self.calibrator


@dataclass(frozen=True)
class Trust:
    """How far to trust the figures on the reported rows.

    Attributes:
        names: the name in ``bootstrap`` of every choice; None for one without a cell. Equal cells share a name.
        bootstrap: the paired resamples.
        floors: by choice, the bias floor of each calibration error; None for one without a cell.
        against: by choice, the index of the choice that it has to beat: nothing for the uncalibrated row, which
            temperature scaling has to beat, which focal temperature scaling by the same criterion has to beat. Bins
            have to beat what stands before them: the scaling, or nothing.
        binned: whether there are bins among the choices.
    """

    names: tuple[str | None, ...]
    bootstrap: PairedBootstrap
    floors: tuple[dict[str, BiasFloor] | None, ...]
    against: tuple[int | None, ...]
    binned: bool = False

    def interval(self, index: int, figure: str) -> Interval | None:
        name = self.names[index]
        if name is None or figure not in self.bootstrap.figures:
            return None
        return self.bootstrap.interval(name, figure)

    def difference(self, index: int, figure: str) -> Interval | None:
        """Of this choice and the one that it has to beat; None where there is none."""
        other = self.against[index]
        if other is None or (name := self.names[index]) is None or (beaten := self.names[other]) is None:
            return None
        if figure not in self.bootstrap.figures:
            return None
        return self.bootstrap.difference(name, beaten, figure)

    def mark(self, index: int, figure: str) -> str:
        """``*`` for a win, ``!`` for a loss, nothing while the interval of the difference contains 0."""
        difference = self.difference(index, figure)
        if difference is None or not difference.excludes_zero:
            return ""
        return "*" if (difference.low > 0) == (figure == "accuracy") else "!"


@dataclass(frozen=True)
class Study:
    """Everything that ``calibrate`` says.

    Attributes:
        selection, report: the rows that chose and the rows that report; the same object when they are the same.
        grid: all gammas that were searched by either method.
        choices: the rows of the table; the first is uncalibrated.
        chosen: the row that was asked for, None when its criterion is finite nowhere.
        remarks: sentences that the reader of the table needs.
        trust: intervals of the figures; None where they were not asked for.
    """

    selection: Rows
    report: Rows
    grid: CalibrationGrid
    choices: tuple[Choice, ...]
    chosen: Choice | None
    remarks: tuple[str, ...]
    trust: Trust | None = None


def figures(
    rows: Rows, gamma: float, temperature: float, n_bins: int, binning: HistogramBinning | None = None
) -> dict[str, float]:
    """The figures of one calibrator on one set, computed in float64; gamma = 0 and T = 1 is uncalibrated.

    Correct is what the largest *input* says: a calibrated row may saturate and tie, the input does not. Only bins
    change the predicted class.
    """
    if isinstance(rows, StreamedSet):
        rows.measure([(gamma, temperature)], n_bins)
        found = rows.measured(gamma, temperature, n_bins).figures
        return {name: found[name] for name in FIGURES}
    log_probs = _calibrated(rows, gamma, temperature, binning)
    correct = _correct(rows, binning)
    result = {"accuracy": metrics.accuracy(correct=correct), "nll": metrics.nll(log_probs, rows.labels, log=True)}
    probs = log_probs.exp_()
    result["brier"] = metrics.brier_score(probs, rows.labels)
    confidence = probs.amax(-1)
    for estimator in metrics.ESTIMATORS:
        result[f"ece_{estimator}"] = metrics.expected_calibration_error(
            confidence=confidence, correct=correct, n_bins=n_bins, estimator=estimator
        )
    result["classwise_ece_equal_width"] = metrics.classwise_calibration_error(probs, rows.labels, n_bins=n_bins)
    return {name: float(result[name]) for name in FIGURES}


def run_study(
    selection: Rows,
    report: Rows,
    *,
    gammas: Sequence[float],
    temperatures: Sequence[float],
    method: str = "focal-temperature",
    search: Search = "grid",
    binning: Binning | None = None,
    criterion: Criterion = "ece",
    estimator: Estimator = "equal_mass",
    n_bins: int = 15,
    resamples: int | None = None,
    seed: int = 0,
) -> Study:
    """Search the grid on ``selection`` and compare the choices on ``report``.

    Plain temperature scaling is the row gamma = 0 of the same grid, searched whether or not 0 is among ``gammas``;
    focal temperature scaling is chosen among ``gammas`` only. What was asked for beyond the grid, another search or
    bins, are rows after those of the grid; for them both sets must be in memory.

    Args:
        selection: rows that choose.
        report: rows that report; ``selection`` itself when there are no others.
        gammas, temperatures: the grid; of equal cells the first wins.
        method, criterion: which choice the user asked for.
        search: how its gamma and T are found.
        binning: the bins after it, or those of the method ``"histogram"``; None for none.
        estimator, n_bins: of the ECE that chooses; ``n_bins`` also of those that report, and of ``binning``.
        resamples: of the bootstrap on ``report``; 0 for none, :func:`default_resamples` when None.
        seed: of the resamples.
    """
    searched = tuple(gammas) if 0.0 in gammas else (0.0, *gammas)
    if isinstance(selection, StreamedSet):
        grid = selection.grid(searched, tuple(temperatures), n_bins=n_bins, estimator=estimator)
    else:
        # float64, whatever the file holds: a float32 confidence that lands on the other side of a cut moves an ECE
        # cell, and with it the choice between near-equal cells.
        grid = calibration_grid(
            selection.input.to(torch.float64),
            selection.labels,
            searched,
            tuple(temperatures),
            n_bins=n_bins,
            criteria=("ece", "nll"),
            estimator=estimator,
            input_kind=selection.kind,
        )
    # A saved calibrator says that it was the default that was searched, rather than 500 numbers.
    axis = None if tuple(temperatures) == PAPER_TEMPERATURES else tuple(temperatures)
    focal_axis = None if tuple(gammas) == DEFAULT_GAMMAS else tuple(gammas)
    criteria: tuple[Criterion, ...] = ("ece", "nll")
    fitted: list[tuple[Calibrator, Criterion, bool]] = []
    for wanted in criteria:
        options: Any = {
            "temperatures": axis,
            "criterion": wanted,
            "estimator": estimator,
            "n_bins": n_bins,
            "input_kind": selection.kind,
        }
        candidates: tuple[tuple[Calibrator, Sequence[float]], ...] = (
            (TemperatureScaling(**options), (0.0,)),
            (FocalTemperatureScaling(gammas=focal_axis, **options), gammas),
        )
        for calibrator, part in candidates:
            searched_by_it = _rows_of(grid, part)
            finite = bool(searched_by_it.tables[wanted].isfinite().any())
            if finite:
                calibrator.choose(searched_by_it, n_samples=len(selection), n_classes=selection.n_classes)
            fitted.append((calibrator, wanted, finite))
    cells = [(0.0, 1.0), *((one.gamma_, one.temperature_) for one, _, finite in fitted if finite)]
    for rows in (selection, report):
        if isinstance(rows, StreamedSet):
            rows.measure(cells, n_bins)  # one pass for all
    choices = [_choice("none", None, None, 0.0, 1.0, selection, report, n_bins)]
    for calibrator, wanted, finite in fitted:
        if not finite:
            choices.append(Choice(calibrator.method, wanted, None, None, None, None, None))
            continue
        cell = (calibrator.gamma_, calibrator.temperature_)
        choices.append(_choice(calibrator.method, wanted, calibrator, *cell, selection, report, n_bins))
    more = _beyond_the_grid(
        selection,
        report,
        gammas=focal_axis,
        temperatures=axis,
        method=method,
        search=search,
        binning=binning,
        criterion=criterion,
        estimator=estimator,
        n_bins=n_bins,
    )
    asked = next((row for row in choices if (row.method, row.criterion) == (method, criterion)), None)
    if search != "grid" or binning is not None:
        asked = more[-1] if more else None
    choices.extend(more)
    chosen = None if asked is None or asked.saved is None else asked
    wanted_resamples = default_resamples(report) if resamples is None else resamples
    trust = _trust(choices, report, n_bins, wanted_resamples, seed) if wanted_resamples else None
    remarks = [
        *read_remarks(selection),
        *(read_remarks(report) if report is not selection else ()),
        *_remarks(choices, selection, report, n_bins, trust),
        *(
            _doubts(choices, choices.index(chosen), estimator, trust)
            if trust is not None and chosen is not None
            else ()
        ),
        *_streaming_remarks(choices, selection, report, grid),
    ]
    if resamples is None and trust is None:
        remedy = f"Say --bootstrap {_DEFAULT_RESAMPLES} to have them, --bootstrap 0 not to be told."
        if isinstance(report, StreamedSet) and not report.keeps_confidences:
            remedy = "So many rows leave little to chance."
        remarks.append(
            f"no intervals: on {_name_of(report)} of {report.n_classes} classes they would take longer than all the "
            f"rest. {remedy}"
        )
    # Two halves of one file say the same of their file.
    return Study(selection, report, grid, tuple(choices), chosen, tuple(dict.fromkeys(remarks)), trust)


def _beyond_the_grid(
    selection: Rows,
    report: Rows,
    *,
    gammas: Sequence[float] | None,
    temperatures: Sequence[float] | None,
    method: str,
    search: Search,
    binning: Binning | None,
    criterion: Criterion,
    estimator: Estimator,
    n_bins: int,
) -> list[Choice]:
    """The rows of another search than the grid, and of bins; the last one is what was asked for."""
    if search == "grid" and binning is None:
        return []
    assert isinstance(selection, LogitSet)
    assert isinstance(report, LogitSet)
    input = selection.input.to(torch.float64)
    scaling: Calibrator | None = None
    if method != "histogram":
        axes: Any = {} if search == "nll" else {"temperatures": temperatures}
        options: Any = {"search": search, "criterion": criterion, "estimator": estimator, "n_bins": n_bins, **axes}
        options["input_kind"] = selection.kind
        if method == "temperature":
            scaling = TemperatureScaling(**options)
        else:
            scaling = FocalTemperatureScaling(gammas=None if search == "nll" else gammas, **options)
    wanted = None if scaling is None else criterion
    if scaling is not None and not _can_be_fitted(scaling, input, selection.labels):
        return [Choice(method, wanted, None, None, None, None, None, search)] if search != "grid" else []
    found: list[Calibrator | HistogramBinning] = []
    if search != "grid" and scaling is not None:
        found.append(scaling)
    if binning is not None:
        found.append(HistogramBinning(n_bins=n_bins, binning=binning, scaling=scaling, input_kind=selection.kind))
    rows = []
    for one in found:
        one.fit(input, selection.labels)
        bins = one if isinstance(one, HistogramBinning) else None
        fitted = one.scaling_ if isinstance(one, HistogramBinning) else one
        assert fitted is None or isinstance(fitted, TemperatureScaling | FocalTemperatureScaling)
        cell = (0.0, 1.0) if fitted is None else (fitted.gamma_, fitted.temperature_)
        on_selection = figures(selection, *cell, n_bins, bins)
        on_report = on_selection if report is selection else figures(report, *cell, n_bins, bins)
        rows.append(Choice(method, wanted, *cell, fitted, on_selection, on_report, search, bins))
    return rows


def _can_be_fitted(scaling: Calibrator, input: Tensor, labels: Tensor) -> bool:
    """Whether its criterion is finite anywhere: the NLL is not where a true class cannot occur."""
    impossible = 0.0 if scaling.input_kind == "probs" else -math.inf
    return scaling.criterion != "nll" or not bool((input.gather(1, labels.unsqueeze(1)) == impossible).any())


_DEFAULT_RESAMPLES = 200
_MOST_RESAMPLED_ROWS = 200_000
_MOST_FIGURES = 20_000_000


def default_resamples(rows: Rows) -> int:
    """200, whose cost is of the order of the search's; 0 where it would take minutes."""
    # Streamed rows have one confidence each, whatever the number of classes.
    possible = rows.keeps_confidences if isinstance(rows, StreamedSet) else rows.input.numel() <= _MOST_FIGURES
    return _DEFAULT_RESAMPLES if possible and len(rows) <= _MOST_RESAMPLED_ROWS else 0


class _Calibrated(Mapping[str, Tensor]):
    """Log-probabilities by name, computed when they are asked for: only one set is in memory at a time."""

    def __init__(self, rows: LogitSet, cells: dict[str, tuple[float, float, HistogramBinning | None]]) -> None:
        self._rows, self._cells = rows, cells

    def __getitem__(self, name: str) -> Tensor:
        return _calibrated(self._rows, *self._cells[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def _trust(choices: Sequence[Choice], rows: Rows, n_bins: int, resamples: int, seed: int) -> Trust:
    """Of rows that are not in memory there are confidences, but no probabilities: accuracy and ECE have intervals."""
    cells: dict[str, tuple[float, float, HistogramBinning | None]] = {}
    names: list[str | None] = []
    for choice in choices:
        if choice.gamma is None or choice.temperature is None:
            names.append(None)
            continue
        name = f"gamma = {choice.gamma!r}, T = {choice.temperature!r}{' + bins' if choice.binning else ''}"
        cells[name] = (choice.gamma, choice.temperature, choice.binning)
        names.append(name)
    # A seed of the command may be negative, numpy's may not.
    options: dict[str, Any] = {"n_bins": n_bins, "n_resamples": resamples, "seed": seed % 2**63}
    if isinstance(rows, StreamedSet):
        confidence = {name: rows.measured(*cell[:2], n_bins).confidence for name, cell in cells.items()}
        bootstrap = paired_bootstrap(confidence=confidence, correct=rows.correct, **options)
        floors = {name: bias_floor(confidence=confidence[name], **options) for name in cells}
    else:
        calibrated = _Calibrated(rows, cells)
        bootstrap = paired_bootstrap(
            calibrated,
            rows.labels,
            log=True,
            correct={name: _correct(rows, binning) for name, (_, _, binning) in cells.items()},
            figures=tuple(FIGURES),
            **options,
        )
        floors = {name: bias_floor(calibrated[name].exp_(), figures=_CALIBRATION_ERRORS, **options) for name in cells}
    place = {(row.method, row.criterion, row.search, row.binning is None): i for i, row in enumerate(choices)}

    def has_to_beat(choice: Choice) -> int | None:
        if choice.binning is not None and choice.calibrator is not None:
            return place[choice.method, choice.criterion, choice.search, True]
        beaten = {"none": None, "temperature": 0, "histogram": 0}
        return beaten.get(choice.method, place.get(("temperature", choice.criterion, "grid", True)))

    return Trust(
        names=tuple(names),
        bootstrap=bootstrap,
        floors=tuple(None if name is None else floors[name] for name in names),
        against=tuple(map(has_to_beat, choices)),
        binned=any(choice.binning for choice in choices),
    )


def _streaming_remarks(choices: Sequence[Choice], selection: Rows, report: Rows, grid: CalibrationGrid) -> list[str]:
    """What is known less well of rows that were read a few at a time."""
    remarks = []
    cells = [(one.criterion, one.gamma, one.temperature) for one in choices]
    bounds = [
        selection.bound_of(gamma, temperature)
        for criterion, gamma, temperature in cells
        if isinstance(selection, StreamedSet) and criterion == "ece" and gamma is not None and temperature is not None
    ]
    if any(bounds):
        remarks.append(
            f"the ECE ({grid.estimator}) that chose comes from counts of the confidences in buckets: for the chosen "
            f"cells it is at most {max(bounds):.1g} off."
        )
    if isinstance(report, StreamedSet) and not report.keeps_confidences:
        bound = max(
            report.measured(gamma, temperature, grid.n_bins).bound
            for _, gamma, temperature in cells
            if gamma is not None and temperature is not None
        )
        remarks.append(
            f"with so many rows the ECEs of equal mass in the table come from buckets too, and are at most {bound:.1g} "
            "off."
        )
    return remarks


def _calibrated(rows: LogitSet, gamma: float, temperature: float, binning: HistogramBinning | None = None) -> Tensor:
    """Log-probabilities [N, C]; gamma and temperature are those of the scaling before the bins."""
    if binning is not None:
        log_probs: Tensor = binning.predict_log_proba(rows.input.to(torch.float64))
        return log_probs
    return focal_calibration_map(rows.input.to(torch.float64), gamma, temperature, input_kind=rows.kind, log=True)


def _correct(rows: LogitSet, binning: HistogramBinning | None = None) -> Tensor:
    predicted = rows.input.argmax(-1) if binning is None else binning.predict(rows.input.to(torch.float64))
    return predicted == rows.labels


def _reliability(
    rows: Rows, gamma: float, temperature: float, n_bins: int, binning: HistogramBinning | None = None
) -> metrics.ReliabilityBins:
    """Bins of equal width."""
    if isinstance(rows, StreamedSet):
        return rows.measured(gamma, temperature, n_bins).bins
    confidence = _calibrated(rows, gamma, temperature, binning).amax(-1).exp()
    correct = _correct(rows, binning)
    return metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=n_bins)


def _choice(
    method: str,
    criterion: str | None,
    calibrator: Calibrator | None,
    gamma: float,
    temperature: float,
    selection: Rows,
    report: Rows,
    n_bins: int,
) -> Choice:
    on_selection = figures(selection, gamma, temperature, n_bins)
    on_report = on_selection if report is selection else figures(report, gamma, temperature, n_bins)
    return Choice(method, criterion, gamma, temperature, calibrator, on_selection, on_report)


def _rows_of(grid: CalibrationGrid, gammas: Sequence[float]) -> CalibrationGrid:
    known = grid.gammas.tolist()
    rows = torch.tensor([known.index(gamma) for gamma in gammas])
    return CalibrationGrid(
        gammas=grid.gammas[rows],
        temperatures=grid.temperatures,
        tables={name: table[rows.to(table.device)] for name, table in grid.tables.items()},
        n_bins=grid.n_bins,
        estimator=grid.estimator,
    )


def read_remarks(rows: Rows) -> list[str]:
    """What has to be said of a set, whatever is done with it."""
    remarks = []
    subject = "a logit of -inf" if rows.kind == "logits" else "probability exactly 0"
    if isinstance(rows, StreamedSet):
        zeros, alike = rows.impossible_targets, rows.looks_like_probs
    else:
        impossible = -math.inf if rows.kind == "logits" else 0.0
        zeros = int((rows.input.gather(1, rows.labels.unsqueeze(1)) == impossible).sum())
        alike = False
        if rows.kind == "logits" and bool((rows.input >= 0).all()):
            alike = bool(((rows.input.sum(1, dtype=torch.float64) - 1).abs() <= 1e-3).all())
    if zeros:
        where = f"({rows.part})" if rows.part else f"of {rows.source}"
        remarks.append(
            f"{zeros} of the {_name_of(rows)} {where} give their true class {subject}: its "
            "negative log-likelihood is infinite, and so is the mean NLL. No gamma and no temperature changes that, "
            "because the map keeps an exact zero; the NLL has no optimum on these rows. The other figures are not "
            "affected."
        )
    if alike:
        remarks.append(
            f"the rows of {rows.source} were read as logits, but are all positive and sum to 1: if they are "
            "probabilities, say --input-kind probs."
        )
    return remarks


def _remarks(choices: Sequence[Choice], selection: Rows, report: Rows, n_bins: int, trust: Trust | None) -> list[str]:
    remarks = []
    if report is selection:
        remarks.append(
            "the same rows choose and report: the figures of the calibrated rows are too good. Say --test FILE or "
            "--split 0.5 for an honest comparison."
        )
    if len(selection) < 20 * n_bins:
        remarks.append(
            f"{len(selection)} rows in {n_bins} bins are about {len(selection) / n_bins:.2g} per bin: an ECE of so few "
            "is mostly noise, and the ECE-optimal choice with it."
        )
    if report is not selection and len(report) < 20 * n_bins:
        remarks.append(
            f"{len(report)} reported rows in {n_bins} bins are about {len(report) / n_bins:.2g} per bin: their ECE is "
            "mostly noise."
        )
    before = choices[0].report
    assert before is not None  # the uncalibrated row always has figures
    on_grid = [choice for choice in choices if choice.search == "grid" and choice.binning is None]
    by_key = {(choice.method, choice.criterion): choice for choice in on_grid}
    for method, words in _IN_WORDS.items():
        ece, nll = by_key[method, "ece"], by_key[method, "nll"]
        for choice in (ece, nll):
            if choice.calibrator is not None and choice.calibrator.at_border_:
                remarks.append(
                    f"{choice.label}: {' and '.join(choice.calibrator.at_border_)}; the optimum may lie beyond the "
                    "border of the grid."
                )
        if ece.report is None or nll.report is None:
            continue
        was, with_ece, with_nll = before["nll"], ece.report["nll"], nll.report["nll"]
        if not all(map(math.isfinite, (was, with_ece, with_nll))):
            continue
        if with_nll <= was < with_ece:
            lowered = f"{with_nll:.4f}" != f"{was:.4f}"
            remarks.append(
                f"{words}: ECE and NLL disagree. The ECE-optimal choice RAISES the NLL from {was:.4f} to "
                f"{with_ece:.4f}; the NLL-optimal one {'lowers it to' if lowered else 'leaves it at'} {with_nll:.4f}."
            )
        elif with_ece > with_nll * 1.01:
            remarks.append(
                f"{words}: ECE and NLL disagree. The ECE-optimal choice leaves the NLL at {with_ece:.4f}, where the "
                f"NLL-optimal one gets {with_nll:.4f} (uncalibrated {was:.4f})."
            )
    for choice in choices:
        if choice.search != "grid" and choice.saved is choice.calibrator is not None and choice.calibrator.at_border_:
            remarks.append(f"{choice.label}: {' and '.join(choice.calibrator.at_border_)}.")
        if isinstance(report, LogitSet):
            remarks.extend(bin_remarks(choice, report))
    plain, focal = by_key["temperature", "ece"], by_key["focal-temperature", "ece"]
    if (
        report is not selection
        and plain.report is not None
        and focal.report is not None
        and focal.calibrator is not None
    ):
        name = f"ece_{focal.calibrator.estimator}"
        # Where the interval of the difference contains 0 there is nothing to say of which is higher; _doubts says that.
        decided = trust is None or trust.mark(choices.index(focal), name) == "!"
        if decided and focal.report[name] > plain.report[name]:
            remarks.append(
                f"on the reported rows focal temperature scaling has the higher ECE ({focal.calibrator.estimator}), "
                f"{focal.report[name]:.4f} against {plain.report[name]:.4f}: what it gained on the rows that chose "
                "does not carry over."
            )
    return remarks


def bin_remarks(choice: Choice, rows: LogitSet) -> list[str]:
    """What the bins of a choice do to the rows that it is reported on; nothing without bins."""
    if choice.binning is None or choice.report is None:
        return []
    remarks = []
    changed = int(choice.binning.changed(rows.input.to(torch.float64)).sum())
    if changed:
        remarks.append(f"{choice.label}: the bins change the predicted class of {changed} of the {_name_of(rows)}.")
    if math.isinf(choice.report["nll"]) and bool((choice.binning.values_ % 1 == 0).any()):
        remarks.append(
            f"{choice.label}: a bin in which all rows that chose were right (or all wrong) leaves a probability of 0, "
            "and a row that contradicts it makes the NLL infinite. Fewer bins (--n-bins) may mend it."
        )
    return remarks


def _doubts(choices: Sequence[Choice], chosen: int, estimator: str, trust: Trust) -> list[str]:
    """What the intervals say of the chosen row."""
    remarks = []
    choice, other = choices[chosen], trust.against[chosen]
    assert choice.report is not None  # it has a cell
    name = f"ece_{estimator}"
    level = f"{100 * trust.bootstrap.level:g} %"
    same_cell = other is not None and trust.names[chosen] == trust.names[other]
    difference = trust.difference(chosen, name)
    if other is not None and difference is not None and not same_cell and not difference.excludes_zero:
        remarks.append(
            f"{choice.label} and {choices[other].label} cannot be told apart by their ECE ({estimator}) on the "
            f"reported rows: the difference is {difference.estimate:+.4f}, and its {level} interval, "
            f"{difference.low:+.4f} to {difference.high:+.4f}, contains 0."
        )
    floors = trust.floors[chosen]
    if floors is not None and floors[name].p_value(choice.report[name]) > 1 - trust.bootstrap.level:
        remarks.append(
            f"{choice.label}: its ECE ({estimator}) of {choice.report[name]:.4f} on the reported rows cannot be told "
            f"from that of a perfectly calibrated model, which scores {floors[name].mean:.4f} on average with these "
            f"confidences. A smaller ECE would prove nothing."
        )
    return remarks


def _name_of(rows: Rows) -> str:
    """``5000 validation rows``."""
    name = {"val": "validation ", "test": "test "}.get(rows.name, "")
    return f"{len(rows)} {name}rows"


def format_table(choices: Sequence[Choice], chosen: Choice | None = None, trust: Trust | None = None) -> str:
    """The table as text, four digits after the point; an arrow stands before the chosen row.

    With ``trust``, every row has a second line, half the width of the interval and the mark; what they mean stands
    below the table.
    """
    from tabulate import tabulate  # an extra: not everybody who imports this package needs it

    body = [
        [("-> " if choice is chosen else "   ") + label, *cells] for choice, (label, *cells) in _cells(choices, trust)
    ]
    if trust is not None:
        label, *cells = _floor_cells(choices, chosen, trust)
        body.append([f"   {label}", *cells])
    table: str = tabulate(
        body,
        headers=["", "gamma", "T", *FIGURES.values()],
        tablefmt="simple",
        disable_numparse=True,
        colalign=("left", *["right"] * (len(FIGURES) + 2)),
        preserve_whitespace=True,
    )
    return table if trust is None else f"{table}\n\n{textwrap.fill(_legend(trust), 118)}"


def _legend(trust: Trust, plus_minus: str = "+-") -> str:
    bootstrap = trust.bootstrap
    return (
        f"{plus_minus} half the {100 * bootstrap.level:g} % interval, of {bootstrap.n_resamples} resamples of the "
        "reported rows. * better, ! worse: the interval of the paired difference excludes 0; temperature scaling is "
        "compared with no calibration, focal temperature scaling with temperature scaling by the same criterion"
        f"{', bins with what stands before them' if trust.binned else ''}. Bias "
        "floor: what a perfectly calibrated model with the same confidences would score; 95 % score less than the "
        "second line."
    )


def _cells(
    choices: Sequence[Choice], trust: Trust | None = None, attribute: str = "report", plus_minus: str = "+-"
) -> list[tuple[Choice, list[str]]]:
    """Every choice with its label, gamma, T and figures in print."""
    rows = []
    for index, choice in enumerate(choices):
        scaled = choice.method in _IN_WORDS
        values = getattr(choice, attribute)
        cells = [
            choice.label,
            _parameter_in_print(choice.gamma, choice.search) if scaled else "",
            _parameter_in_print(choice.temperature, choice.search) if scaled else "",
            *("-" if values is None else _figure_in_print(values[name]) for name in FIGURES),
        ]
        if trust is not None:
            for column, name in enumerate(FIGURES, start=3):
                interval = trust.interval(index, name)
                if interval is not None and math.isfinite(interval.low):
                    half = max(interval.high - interval.estimate, interval.estimate - interval.low)
                    cells[column] += f"\n{plus_minus}{_half_in_print(half)}{trust.mark(index, name)}"
        rows.append((choice, cells))
    return rows


def _floor_cells(choices: Sequence[Choice], chosen: Choice | None, trust: Trust) -> list[str]:
    """The last row of the table: the bias floor of the chosen row, or of the uncalibrated one."""
    floors = trust.floors[0 if chosen is None else choices.index(chosen)]
    assert floors is not None
    cells = [f"bias floor of {'the first row' if chosen is None else 'the row ->'}", "", ""]
    for name in FIGURES:
        floor = floors.get(name)
        cells.append("" if floor is None else f"{floor.mean:.4f}\n<{_half_in_print(floor.quantile(0.95))}")
    return cells


def _half_in_print(value: float) -> str:
    """As short as can be: it stands beside a mark."""
    return f"{value:.4f}".removeprefix("0") if value < 1 else f"{value:.3g}"


def _parameter_in_print(value: float | None, search: Search) -> str:
    """At least two digits, more where the grid is finer; four of what is on no grid."""
    if value is None:
        return "-"
    if search != "grid":
        return f"{value:.4f}"
    text = f"{value:.10g}"
    return text if len(text.partition(".")[2]) > 1 else f"{value:.2f}"


def _figure_in_print(value: float) -> str:
    """Absurd temperatures and logits have an NLL of hundreds of digits."""
    return f"{value:.4f}" if not abs(value) >= 1e6 or math.isinf(value) else f"{value:.4g}"


def describe(study: Study) -> str:
    """What the table is about, above it."""
    lines = [f"chosen on    {rows_in_words(study.selection)}"]
    if study.report is not study.selection:
        lines.append(f"reported on  {rows_in_words(study.report)}")
    else:
        lines.append("reported on  the same rows")
    grid = study.grid
    temperatures = grid.temperatures
    lines.append(
        f"grid         {len(grid.gammas)} gammas x {len(temperatures)} temperatures from {float(temperatures.min()):g} "
        f"to {float(temperatures.max()):g}; ECE of {grid.n_bins} bins, {grid.estimator}"
    )
    return "\n".join(lines)


def rows_in_words(rows: Rows) -> str:
    part = f" ({rows.part})" if rows.part else ""
    return f"{_name_of(rows)}{part} of {rows.n_classes} classes, {rows.kind}: {rows.source}"


def to_json(study: Study, *, version: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """The study for machines. A figure that is infinite is null; the remarks say why."""

    trust = study.trust

    def row(index: int, choice: Choice) -> dict[str, Any]:
        return {
            "method": choice.method,
            "criterion": choice.criterion,
            "search": choice.search if choice.method in _IN_WORDS else None,
            "binning": choice.binning.binning if choice.binning else None,
            "gamma": choice.gamma,
            "temperature": choice.temperature,
            "n_cells": choice.calibrator.n_cells_ if choice.calibrator else None,
            "criterion_value": choice.calibrator.best_value_ if choice.calibrator else None,
            "at_border": list(choice.calibrator.at_border_) if choice.calibrator else [],
            "selection": finite_or_none(choice.selection),
            "report": finite_or_none(choice.report),
            "intervals": None if trust is None else _intervals_to_json(trust, index),
            "difference": None if trust is None else _difference_to_json(trust, index),
            "bias_floor": None if trust is None else _floors_to_json(trust, index, choice),
        }

    def data(rows: Rows) -> dict[str, Any]:
        return {
            "source": rows.source,
            "set": rows.name,
            "input_kind": rows.kind,
            "n_samples": len(rows),
            "n_classes": rows.n_classes,
        }

    return {
        "focalkern": version,
        **(more or {}),
        "data": {
            "selection": data(study.selection),
            "report": data(study.report),
            "same_rows": study.report is study.selection,
        },
        "grid": {
            "gammas": study.grid.gammas.tolist(),
            "temperatures": study.grid.temperatures.tolist(),
            "estimator": study.grid.estimator,
            "n_bins": study.grid.n_bins,
        },
        "bootstrap": None
        if trust is None
        else {
            "resamples": trust.bootstrap.n_resamples,
            "level": trust.bootstrap.level,
            "method": trust.bootstrap.method,
            "seed": trust.bootstrap.seed,
        },
        "rows": [row(index, choice) for index, choice in enumerate(study.choices)],
        "chosen": None if study.chosen is None else study.choices.index(study.chosen),
        "remarks": list(study.remarks),
    }


def _intervals_to_json(trust: Trust, index: int) -> dict[str, list[float] | None] | None:
    """Lower and upper end by figure; null where the figure is infinite."""
    if trust.names[index] is None:
        return None
    found = {name: trust.interval(index, name) for name in FIGURES}
    return {name: [one.low, one.high] if one and math.isfinite(one.low) else None for name, one in found.items()}


def _difference_to_json(trust: Trust, index: int) -> dict[str, Any] | None:
    """What this row has over the one that it has to beat, by figure."""
    if trust.against[index] is None:
        return None
    found = {name: trust.difference(index, name) for name in FIGURES}
    figures = {
        name: {
            "estimate": one.estimate,
            "low": one.low,
            "high": one.high,
            "verdict": {"*": "better", "!": "worse"}.get(trust.mark(index, name), "undecided"),
        }
        if one and math.isfinite(one.low)
        else None
        for name, one in found.items()
    }
    return {"against_row": trust.against[index], "figures": figures}


def _floors_to_json(trust: Trust, index: int, choice: Choice) -> dict[str, dict[str, float]] | None:
    """Mean and 95 % quantile of what a perfectly calibrated model scores, and how often it scores as much as this."""
    floors = trust.floors[index]
    if floors is None or choice.report is None:
        return None
    return {
        name: {"mean": one.mean, "quantile_95": one.quantile(0.95), "p_value": one.p_value(choice.report[name])}
        for name, one in floors.items()
    }


def finite_or_none(values: dict[str, float] | None) -> dict[str, float | None] | None:
    """JSON has no infinity and no NaN."""
    if values is None:
        return None
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _to_csv(study: Study) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    trust = study.trust
    ends = [f"{name}_{end}" for name in FIGURES for end in ("low", "high")] if trust is not None else []
    writer.writerow(
        ["rows", "method", "criterion", "search", "binning", "gamma", "temperature", "chosen", *FIGURES, *ends]
    )
    same = study.report is study.selection
    for rows, attribute in (("same", "report"),) if same else (("selection", "selection"), ("report", "report")):
        for index, choice in enumerate(study.choices):
            values = getattr(choice, attribute)
            scaled = choice.method in _IN_WORDS
            # The intervals are those of the reported rows.
            found = (
                [trust.interval(index, name) if attribute == "report" else None for name in FIGURES] if trust else []
            )
            writer.writerow(
                [
                    rows,
                    choice.method,
                    choice.criterion or "",
                    choice.search if scaled else "",
                    choice.binning.binning if choice.binning else "",
                    choice.gamma if scaled and choice.gamma is not None else "",
                    choice.temperature if scaled and choice.temperature is not None else "",
                    int(choice is study.chosen),
                    *("" if values is None else repr(values[name]) for name in FIGURES),
                    *(repr(end) if one and math.isfinite(end) else "" for one in found for end in _ends(one)),
                ]
            )
    return stream.getvalue()


def _ends(interval: Interval | None) -> tuple[float, float]:
    return (math.nan, math.nan) if interval is None else (interval.low, interval.high)


def write_report(
    study: Study, folder: Path, document: dict[str, Any], *, title: str = "Calibration report"
) -> list[Path]:
    """A page with everything, and its diagrams, maps and tables one by one.

    Args:
        study: what :func:`run_study` returned.
        folder: created if it is not there; files of the same names are replaced, each in one step.
        document: what goes into ``report.json``.
        title: heading of the page.

    Returns:
        The files, in the order in which they were written; the page is ``report.html``.
    """
    from focalkern import plots  # needs matplotlib, an extra

    folder.mkdir(parents=True, exist_ok=True)
    written = []

    def write(name: str, data: bytes) -> None:
        write_atomically(folder / name, data)
        written.append(folder / name)

    images: dict[str, bytes] = {}

    def draw(name: str, figure: Any) -> None:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        images[name] = buffer.getvalue()
        write(name, images[name])

    write("table.csv", _to_csv(study).encode())
    write("report.json", (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())

    rows = "on the rows that chose" if study.report is study.selection else "on rows that did not choose"

    def bins(choice: Choice) -> metrics.ReliabilityBins:
        assert choice.gamma is not None
        assert choice.temperature is not None
        return _reliability(study.report, choice.gamma, choice.temperature, study.grid.n_bins, choice.binning)

    before = {"uncalibrated": bins(study.choices[0])}
    after: dict[str, metrics.ReliabilityBins] = {}
    draw("reliability_before.png", plots.reliability_diagram(before, title=f"Before calibration, {rows}"))
    if study.chosen is not None:
        after = {_short_name(study.chosen): bins(study.chosen)}
        draw("reliability_after.png", plots.reliability_diagram(after, title=f"After calibration, {rows}"))
        beside = [row for row in study.choices if row.criterion == study.chosen.criterion and row.saved]
        panels = {**before, **{_short_name(row): bins(row) for row in beside}}
        title_of_all = f"{study.chosen.criterion.upper() if study.chosen.criterion else ''}-optimal choices, {rows}"
        draw("reliability_compared.png", plots.reliability_diagram(panels, title=title_of_all))
    finite = [name for name, table in study.grid.tables.items() if bool(table.isfinite().any())]
    for criterion in finite:
        draw(f"grid_{criterion}.png", plots.grid_heatmap(study.grid, criterion))
    if finite:
        draw("ridge.png", plots.ridge_diagram(study.grid))
    write("report.html", _page(study, title, str(document["focalkern"]), images, {**before, **after}))
    return written


def _short_name(choice: Choice) -> str:
    if choice.method == "none":
        return "uncalibrated"
    name = choice.label.partition(", ")[0]
    return f"{name}, {choice.parameters}" if choice.parameters else name


def _page(
    study: Study, title: str, version: str, images: dict[str, bytes], bins: dict[str, metrics.ReliabilityBins]
) -> bytes:
    """The study as a page of HTML with the images inside."""
    same = study.report is study.selection
    reported = "on the rows that chose" if same else f"on the {_name_of(study.report)}, which did not choose"
    grid = study.grid
    estimator = f"{grid.estimator}, {grid.n_bins} bins"

    if study.chosen is None or study.chosen.report is None:
        lead = "Nothing was chosen: the criterion is finite nowhere on the grid."
    else:
        was, now = study.choices[0].report, study.chosen.report
        assert was is not None
        ece = f"ece_{grid.estimator}"
        changes = ", ".join(
            f"{words} {_figure_in_print(was[name])} \u2192 {_figure_in_print(now[name])}"
            for words, name in ((f"ECE ({grid.estimator})", ece), ("NLL", "nll"), ("Brier score", "brier"))
        )
        lead = f"Chosen: {_short_name(study.chosen)} ({study.chosen.label}). {changes}, {reported}."

    names = [heading.replace("_\n", "_").replace("\n", " ") for heading in FIGURES.values()]
    head = ["", "gamma", "T", *names]

    def choices(attribute: str, caption: str) -> str:
        trust = study.trust if attribute == "report" else None
        rows = _cells(study.choices, trust, attribute, plus_minus="\u00b1")
        marked = next((index for index, (choice, _) in enumerate(rows) if choice is study.chosen), None)
        body = [cells for _, cells in rows]
        if trust is not None:
            label, *cells = _floor_cells(study.choices, study.chosen, trust)
            body.append([label.replace("the row ->", "the chosen row"), *cells])
        return html.table(head, body, caption=caption, marked=marked)

    tables = [choices("report", f"Figures {reported}. The row with the shade is the one chosen.")]
    if study.trust is not None:
        tables.append(html.paragraph(_legend(study.trust, plus_minus="\u00b1"), "quiet"))
        tables.append(_difference_table(study, names))
    if not same:
        tables.append(choices("selection", f"Figures on the {_name_of(study.selection)}, which chose: too good."))

    def image(name: str, alt: str, caption: str, *, wide: bool = True) -> list[str]:
        return [html.figure(images[name], alt=alt, caption=caption, wide=wide)] if name in images else []

    reading = (
        "The height of a bar is the accuracy of the samples in the bin; the hatched part is the gap to their mean "
        "confidence. The grey band is where 95 % of perfectly calibrated classifiers with these confidences would "
        "have their accuracy: a bin outside of it is miscalibrated beyond chance (one in twenty is outside by "
        "chance). The whisker is the 95 % bootstrap interval of the accuracy."
    )
    diagrams = [
        html.paragraph(reading),
        html.figures(
            *image(
                "reliability_before.png",
                "Reliability diagram before calibration; its numbers are in the table of bins below.",
                "Before calibration.",
                wide=False,
            ),
            *image(
                "reliability_after.png",
                "Reliability diagram after calibration; its numbers are in the table of bins below.",
                "After calibration.",
                wide=False,
            ),
        ),
        *image(
            "reliability_compared.png",
            "Reliability diagrams of no calibration, temperature scaling and focal temperature scaling, side by side.",
            "The same, beside temperature scaling alone.",
        ),
    ]
    maps = [
        part
        for criterion in grid.tables
        for part in image(
            f"grid_{criterion}.png",
            f"Map of the {criterion.upper()} over gamma and T, with the best T of each gamma and the fitted line.",
            f"{'NLL' if criterion == 'nll' else f'ECE ({estimator})'} {_on_which(study)}, by gamma and T. "
            "The line is fitted to the best T of each gamma (dots).",
        )
    ]
    maps += image(
        "ridge.png",
        "Best temperature of each gamma against gamma, with fitted lines; the equations are in the legend.",
        "The ridge to scale: the best T of each gamma against gamma, by both criteria.",
    )
    sections = [
        html.section("Choices", *tables),
        html.section("What to know before trusting this", html.unordered(study.remarks))
        if study.remarks
        else html.section("What to know before trusting this", html.paragraph("Nothing stood out.")),
        html.section("Reliability", *diagrams),
        html.section("Search", html.paragraph(_search_in_words(study)), *maps),
        html.section("Bins", *(_bin_table(name, one) for name, one in bins.items())),
        html.section("Data", _data_table(study)),
        html.section("How to read the figures", html.unordered(_GLOSSARY)),
    ]
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    software = f"focalkern {version}, torch {torch.__version__}"
    foot = html.paragraph(
        f"Made by {software} on {made}. table.csv and report.json beside this page have every figure in full. Methods: "
        "Guo et al. 2017 (arXiv 1706.04599), temperature scaling; Komisarenko & Kull 2024 (arXiv 2408.11598), focal "
        "temperature scaling."
    )
    sources = " and ".join(dict.fromkeys((study.selection.source, study.report.source)))
    header = html.paragraph(f"{sources}; {made}; focalkern {version}", "quiet") + html.paragraph(lead, "lead")
    return html.page(title, lead=header, sections=sections, foot=foot, generator=f"focalkern {version}")


_GLOSSARY = (
    "All figures are fractions, never percent. Lower is better, but for accuracy, which scaling never changes and "
    "histogram binning may.",
    "ECE: the gap between accuracy and mean confidence, averaged over bins of the confidence. Its value depends on "
    "the bins: equal_width (15 ranges of the same width, the common one), equal_mass (the same number of samples in "
    "each), equal_mass_interp (interpolated quantiles, as in published code). Compare like with like.",
    "ECE is noisy and never negative: a perfectly calibrated classifier does not score 0 on a finite set.",
    "Classwise ECE: the same for the probability of every class, averaged over the classes.",
    "NLL (negative log-likelihood) and Brier score are proper: no classifier does better than the true probabilities. "
    "They judge sharpness too, so they and the ECE may prefer different calibrators.",
    "gamma = 0 is temperature scaling alone. gamma > 0 raises a confidence where it is high, gamma < 0 lowers it.",
)


def _difference_table(study: Study, names: list[str]) -> str:
    trust = study.trust
    assert trust is not None
    shown = dict(zip(FIGURES, names, strict=True))
    if all(choice.binning is None for choice in study.choices):
        del shown["accuracy"]  # all the same
    rows = []
    for index, choice in enumerate(study.choices):
        other = trust.against[index]
        if other is None or trust.names[index] is None or trust.names[other] is None:
            continue
        cells = [f"{choice.label}\nminus {study.choices[other].label}"]
        for name in shown:
            one = trust.difference(index, name)
            if one is None or not math.isfinite(one.low):
                cells.append("")
                continue
            ends = f"{one.low:+.4f} to {one.high:+.4f}".replace(" ", "\u00a0")
            cells.append(f"{one.estimate:+.4f}{trust.mark(index, name)}\n{ends}")
        rows.append(cells)
    caption = (
        f"Paired differences on the reported rows with their {100 * trust.bootstrap.level:g} % intervals, one pair and "
        "one figure at a time. * and ! are differences whose interval excludes 0."
    )
    return html.table(["", *shown.values()], rows, caption=caption)


def _on_which(study: Study) -> str:
    return f"on the {_name_of(study.selection)}, which chose"


def _search_in_words(study: Study) -> str:
    grid = study.grid
    gammas = ", ".join(f"{gamma:g}" for gamma in grid.gammas.tolist())
    low, high = float(grid.temperatures.min()), float(grid.temperatures.max())
    beyond = []
    for choice in study.choices:
        if choice.binning is not None:
            beyond.append(
                f"{choice.label}: the confidence of the top class becomes the accuracy of its bin, one of "
                f"{len(choice.binning.values_)} of {choice.binning.binning.replace('_', ' ')}."
            )
        elif choice.search != "grid" and choice.calibrator is not None:
            beyond.append(f"{choice.label}: {choice.calibrator.n_cells_} cells, which need not be of the grid.")
    return (
        f"{len(grid.gammas)} gammas ({gammas}) x {len(grid.temperatures)} temperatures from {low:g} to {high:g}, "
        f"{len(grid.gammas) * len(grid.temperatures)} cells, each with its ECE ({grid.estimator}, {grid.n_bins} bins) "
        f"and NLL {_on_which(study)}. Temperature scaling is the row gamma = 0."
        f"{''.join(f' {words}' for words in beyond)}"
    )


def _bin_table(name: str, bins: metrics.ReliabilityBins) -> str:
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
                # All right or all wrong: every resample says the same, which is no interval.
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
    return html.table(
        head, rows, caption=f"{name[0].upper()}{name[1:]}, {bins.estimator}. An empty bin has no figures."
    )


def _data_table(study: Study) -> str:
    same = study.report is study.selection
    sets = {"chose and report" if same else "chose": study.selection}
    if not same:
        sets["report"] = study.report
    rows = []
    for role, one in sets.items():
        if isinstance(one, StreamedSet):
            per_class = one.class_counts
        else:
            per_class = torch.bincount(one.labels, minlength=one.n_classes)
        absent = int((per_class == 0).sum())
        bins = _reliability(one, 0.0, 1.0, study.grid.n_bins)
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
    head = ["rows that", "file", "input", "rows", "classes", "rows per class", "accuracy", "mean confidence"]
    return html.table(head, rows)
