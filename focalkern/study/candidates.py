"""The rows of the table: the choices of the grid, and those of another search or of bins."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from focalkern.calibrators import (
    Binning,
    Criterion,
    Estimator,
    FocalTemperatureScaling,
    HistogramBinning,
    Search,
    TemperatureScaling,
)
from focalkern.files import LogitSet
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.study.rows import Rows, figures

__all__ = ["IN_WORDS", "Calibrator", "Choice", "beyond_the_grid", "choice_of", "part_of_grid"]

Calibrator = TemperatureScaling | FocalTemperatureScaling
IN_WORDS = {"temperature": "temperature", "focal-temperature": "focal temperature"}


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
        name = IN_WORDS.get(self.method, "histogram binning" if self.binning else "uncalibrated")
        name += f" ({self.search})" if self.search != "grid" else ""
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
    def saved(self) -> Calibrator | HistogramBinning | None:
        return self.binning or self.calibrator


def choice_of(
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


def beyond_the_grid(
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
        one.fit_quietly(input, selection.labels)
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
