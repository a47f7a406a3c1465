"""The rows of the table: the choices of the grid, and those of another search or of bins."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

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
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES, CalibrationGrid
from focalkern.study.contest import PROPER, Contest
from focalkern.study.rows import About, Applied, Rows

__all__ = ["IN_WORDS", "Calibrator", "Choice", "beyond_the_grid", "measured", "of_contest", "of_grid", "part_of_grid"]

Calibrator = TemperatureScaling | FocalTemperatureScaling
IN_WORDS = {"temperature": "temperature", "focal-temperature": "focal temperature"}


@dataclass(frozen=True)
class Choice:
    """One row of the table.

    Attributes:
        method: ``"none"``, ``"temperature"``, ``"focal-temperature"``, ``"histogram"``, or the name of a candidate.
        criterion: ``"ece"``, ``"nll"`` or ``"brier"``; None for the uncalibrated row, for histogram binning without a
            scaling, for a candidate of another class than the two scalings, and for a calibrator from a file.
        gamma, temperature: the chosen cell, 0 and 1 without a scaling; None where no cell had a finite criterion.
        calibrator: the scaling; None where there is none, and where there is no cell.
        validation, test: the figures on the validation rows and on the test rows.
        search: how the cell was found.
        binning: histogram binning, after the scaling; None where there is none.
        other: a fitted candidate that is no scaling; None where there is none.
        contested: whether it took part in the cross-validation.
    """

    method: str
    criterion: str | None
    gamma: float | None
    temperature: float | None
    calibrator: Calibrator | None
    validation: dict[str, float] | None
    test: dict[str, float] | None
    search: Search = "grid"
    binning: HistogramBinning | None = None
    other: Any = None
    contested: bool = False

    @property
    def label(self) -> str:
        name = IN_WORDS.get(self.method, "histogram binning" if self.binning else self.method)
        if self.method == "none":
            name = "uncalibrated"
        name += f" ({self.search})" if self.search != "grid" and not self.contested else ""
        name += " + bins" if self.binning and self.method in IN_WORDS else ""
        return f"{name}, {self.criterion.upper()}-optimal" if self.criterion else name

    @property
    def parameters(self) -> str:
        """gamma and T in words; nothing without a scaling."""
        if self.method not in IN_WORDS or self.gamma is None or self.temperature is None:
            return ""
        gamma = f"gamma = {self.gamma:g}, " if self.method == "focal-temperature" else ""
        return f"{gamma}T = {self.temperature:g}"

    @property
    def applied(self) -> Any:
        """What gives the probabilities where gamma and T do not."""
        return self.other if self.binning is None else self.binning

    @property
    def what(self) -> Applied:
        """As :class:`Rows` takes it."""
        return self.gamma, self.temperature, self.applied

    @property
    def saved(self) -> Any:
        return self.calibrator if self.applied is None else self.applied


def measured(choice: Choice, validation: Rows, test: Rows, n_bins: int) -> Choice:
    """The row with its figures; one without a cell has none."""
    if choice.gamma is None and choice.applied is None:
        return choice
    on_validation = validation.figures(choice.what, n_bins)
    on_test = on_validation if test is validation else test.figures(choice.what, n_bins)
    return replace(choice, validation=on_validation, test=on_test)


def of_scaling(scaling: Calibrator, method: str, criterion: str, **more: Any) -> Choice:
    """The row of a fitted scaling, without figures yet."""
    return Choice(method, criterion, scaling.gamma_, scaling.temperature_, scaling, None, None, **more)


def of_grid(
    grid: CalibrationGrid,
    gammas: Sequence[float],
    criteria: Sequence[Criterion],
    rows: About,
) -> list[Choice]:
    """By each of the criteria, the best cell of temperature scaling and the best one of focal temperature scaling."""
    # A saved calibrator says that it was the default that was searched, rather than 500 numbers.
    found = []
    temperatures = tuple(grid.temperatures.tolist())
    for wanted in criteria:
        options: Any = {
            "search": "grid",
            "temperatures": None if temperatures == PAPER_TEMPERATURES else temperatures,
            "criterion": wanted,
            "estimator": grid.estimator,
            "n_bins": grid.n_bins,
            "input_kind": rows.kind,
        }
        candidates: tuple[tuple[Calibrator, Sequence[float]], ...] = (
            (TemperatureScaling(**options), (0.0,)),
            (
                FocalTemperatureScaling(gammas=None if tuple(gammas) == DEFAULT_GAMMAS else tuple(gammas), **options),
                gammas,
            ),
        )
        for calibrator, part in candidates:
            searched = part_of_grid(grid, part)
            if bool(searched.tables[wanted].isfinite().any()):
                calibrator.choose(searched, n_samples=len(rows), n_classes=rows.n_classes)
                found.append(of_scaling(calibrator, calibrator.method, wanted))
            else:
                found.append(Choice(calibrator.method, wanted, None, None, None, None, None))
    return found


def of_contest(contest: Contest) -> list[Choice]:
    """The rows of the candidates, the uncalibrated one first."""
    rows = []
    for entry in contest.entries:
        fitted = entry.calibrator
        if entry.name == "none":
            rows.append(Choice("none", None, 0.0, 1.0, fitted, None, None, contested=True))
        elif isinstance(fitted, TemperatureScaling | FocalTemperatureScaling):
            search: Any = fitted.search_ if hasattr(fitted, "search_") else "grid"
            rows.append(of_scaling(fitted, entry.name, fitted.criterion_, search=search, contested=True))
        elif fitted is not None:
            rows.append(Choice(entry.name, None, None, None, None, None, None, other=fitted, contested=True))
        else:
            rows.append(Choice(entry.name, None, None, None, None, None, None, contested=True))
    return rows


def beyond_the_grid(
    validation: Rows,
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
    memory = validation.memory
    assert memory is not None
    input, labels = memory.input.to(torch.float64), memory.labels
    scaling: Calibrator | None = None
    if method != "histogram":
        smooth = search in PROPER  # by derivatives, without a grid
        axes: Any = {} if smooth else {"temperatures": temperatures}
        options: Any = {"search": search, "criterion": criterion, "estimator": estimator, "n_bins": n_bins, **axes}
        options["input_kind"] = validation.kind
        if method == "temperature":
            scaling = TemperatureScaling(**options)
        else:
            scaling = FocalTemperatureScaling(gammas=None if smooth else gammas, **options)
    wanted = None if scaling is None else criterion
    if scaling is not None and not _can_be_fitted(scaling, input, labels):
        return [Choice(method, wanted, None, None, None, None, None, search)] if search != "grid" else []
    found: list[Calibrator | HistogramBinning] = []
    if search != "grid" and scaling is not None:
        found.append(scaling)
    if binning is not None:
        found.append(HistogramBinning(n_bins=n_bins, binning=binning, scaling=scaling, input_kind=validation.kind))
    rows = []
    for one in found:
        one.fit_quietly(input, labels)
        bins = one if isinstance(one, HistogramBinning) else None
        fitted = one.scaling_ if isinstance(one, HistogramBinning) else one
        assert fitted is None or isinstance(fitted, TemperatureScaling | FocalTemperatureScaling)
        cell = (0.0, 1.0) if fitted is None else (fitted.gamma_, fitted.temperature_)
        rows.append(Choice(method, wanted, *cell, fitted, None, None, search, bins))
    return rows


def _can_be_fitted(scaling: Calibrator, input: Tensor, labels: Tensor) -> bool:
    """Whether its criterion is finite anywhere: the NLL is not where a true class cannot occur."""
    impossible = 0.0 if scaling.input_kind == "probs" else -math.inf
    return scaling.criterion != "nll" or not bool((input.gather(1, labels.unsqueeze(1)) == impossible).any())


def part_of_grid(grid: CalibrationGrid, gammas: Sequence[float]) -> CalibrationGrid:
    known = grid.gammas.tolist()
    rows = torch.tensor([known.index(gamma) for gamma in gammas])
    return CalibrationGrid(
        gammas=grid.gammas[rows],
        temperatures=grid.temperatures,
        tables={name: table[rows.to(table.device)] for name, table in grid.tables.items()},
        n_bins=grid.n_bins,
        estimator=grid.estimator,
    )
