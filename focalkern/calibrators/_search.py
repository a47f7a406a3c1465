"""Searches for (gamma, T) that evaluate the criterion: on a grid, along a line, from coarse to fine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from focalkern.ops.calibration_grid import PAPER_GAMMAS, CalibrationGrid, calibration_grid

__all__ = [
    "DEFAULT_GAMMAS",
    "GAMMA_BOUNDS",
    "TEMPERATURE_BOUNDS",
    "WIDENINGS",
    "Search",
    "SearchResult",
    "every_row_grid",
    "extend_axes",
    "extended",
    "from_grid",
    "grid_border",
    "search_line",
    "search_refine",
]

Search = Literal["grid", "line", "refine", "nll", "brier"]

DEFAULT_GAMMAS: tuple[float, ...] = (0.0, *PAPER_GAMMAS)
"""The gammas of :class:`FocalTemperatureScaling`: 0, which is temperature scaling, and the paper's nine values. 0 is
first, because the first of equal cells is used: ties give the simpler calibrator."""

TEMPERATURE_BOUNDS: tuple[float, float] = (1e-4, 1e4)
"""Bounds of T in the search by derivatives. An optimum above the upper bound becomes the upper bound. If the criterion
falls all the way to T = 0, the result is the T at which the mean confidence of the N rows is (N + 1) / (N + 2), or the
lower bound if that is larger.
"""

GAMMA_BOUNDS: tuple[float, float] = (-0.99, 100.0)
"""Bounds of gamma in the search by derivatives. The map is defined for gamma > -1. As gamma grows to infinity, with
the best T of each, the map approaches temperature scaling."""

_NO_LABEL = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        gamma, temperature, value: the optimum, and the criterion at the optimum.
        n_cells: number of evaluations of the criterion.
        at_border: a sentence for each parameter at a bound of the search.
        grid: all cells, if the search was a grid.
        clipped_ends: temperatures at the ends of the line that lie at an end of the axis.
    """

    gamma: float
    temperature: float
    value: float
    n_cells: int
    at_border: tuple[str, ...] = ()
    grid: CalibrationGrid | None = None
    clipped_ends: tuple[float, ...] = ()


def grid_border(grid: CalibrationGrid, gamma: float, temperature: float) -> tuple[str, ...]:
    """A sentence for each parameter of a chosen cell that is the smallest or largest of those searched.

    Args:
        grid: the grid that was searched.
        gamma, temperature: the chosen cell.

    Returns:
        Up to two sentences without a full stop, such as ``"gamma = 5 is the largest that was searched"``. A parameter
        with a single searched value gets no sentence.
    """
    return _at_ends(gamma, temperature, grid.gammas.tolist(), grid.temperatures.tolist())


def _at_ends(
    gamma: float, temperature: float, gammas: Sequence[float], temperatures: Sequence[float]
) -> tuple[str, ...]:
    words = []
    for name, value, axis in (("gamma", gamma, gammas), ("temperature", temperature, temperatures)):
        low, high = min(axis), max(axis)
        if low < high and value in (low, high):
            words.append(f"{name} = {value:g} is the {'smallest' if value == low else 'largest'} that was searched")
    return tuple(words)


def from_grid(name: str, grid: CalibrationGrid, criterion: str) -> SearchResult:
    try:
        gamma, temperature, value = grid.best(criterion)
    except ValueError as error:
        raise ValueError(str(error).replace("CalibrationGrid.best", name)) from None
    border = grid_border(grid, gamma, temperature)
    return SearchResult(gamma, temperature, value, math.prod(grid.tables[criterion].shape), border, grid)


def every_row_grid(
    name: str, input: Tensor, target: Tensor, gammas: object, temperatures: object, **options: object
) -> CalibrationGrid:
    """:func:`calibration_grid` in which no label means "leave this row out" and errors name the calibrator."""
    try:
        return calibration_grid(input, target, gammas, temperatures, ignore_index=_NO_LABEL, **options)  # type: ignore[arg-type]
    except (TypeError, ValueError, IndexError) as error:
        words = str(error).replace(" or ignore_index", "")
        raise type(error)(
            words.replace("calibration_grid: ", f"{name}: ").replace("input must", "logits must")
        ) from None


# -- extension of the axes -------------------------------------------------------------------------------------------

# Largest number of extensions of an axis whose end is the optimum; number of new values and factor of each extension.
WIDENINGS = 8
_GAMMA_STEPS, _GAMMA_FACTOR = 3, 1.5  # of 1 + gamma
_TEMPERATURE_STEPS, _TEMPERATURE_FACTOR = 50, 2 ** (1 / 50)


def extend_axes(
    found: SearchResult, gammas: Sequence[float], temperatures: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Further gammas and temperatures to search if the best cell lies at an end of an axis."""
    ends = {found.temperature, *found.clipped_ends}
    # The best T grows with gamma, so an extension of gamma needs an extension of T.
    if len(set(gammas)) > 1 and found.gamma in (min(gammas), max(gammas)):
        ends.add(max(temperatures) if found.gamma == max(gammas) else min(temperatures))
    shifted = [1 + gamma for gamma in gammas]
    shifted_bounds = 1 + GAMMA_BOUNDS[0], 1 + GAMMA_BOUNDS[1]
    more_gammas = _extended_axis(shifted, {1 + found.gamma}, _GAMMA_STEPS, _GAMMA_FACTOR, shifted_bounds)
    more_temperatures = _extended_axis(temperatures, ends, _TEMPERATURE_STEPS, _TEMPERATURE_FACTOR, TEMPERATURE_BOUNDS)
    return [value - 1 for value in more_gammas], more_temperatures


def _extended_axis(
    axis: Sequence[float], ends: set[float], steps: int, factor: float, bounds: tuple[float, float]
) -> list[float]:
    low, high = min(axis), max(axis)
    if low == high:
        return []
    up = [min(high * factor**step, bounds[1]) for step in range(1, steps + 1)] if high in ends else []
    down = [max(low / factor**step, bounds[0]) for step in range(1, steps + 1)] if low in ends else []
    return [new for new in dict.fromkeys([*down, *up]) if not low <= new <= high]


def extended(
    grid: CalibrationGrid,
    more_gammas: Sequence[float],
    more_temperatures: Sequence[float],
    compute: Callable[[Sequence[float], Sequence[float]], CalibrationGrid],
) -> CalibrationGrid:
    """The grid with more rows and columns after the old ones, so that an old cell is the first of equal cells."""
    if more_temperatures:
        grid = _joined(grid, compute(grid.gammas.tolist(), more_temperatures), dim=1)
    if more_gammas:
        grid = _joined(grid, compute(more_gammas, grid.temperatures.tolist()), dim=0)
    return grid


def _joined(grid: CalibrationGrid, more: CalibrationGrid, dim: int) -> CalibrationGrid:
    tables = {name: torch.cat([table, more.tables[name]], dim) for name, table in grid.tables.items()}
    if dim == 0:
        return replace(grid, gammas=torch.cat([grid.gammas, more.gammas]), tables=tables)
    return replace(grid, temperatures=torch.cat([grid.temperatures, more.temperatures]), tables=tables)


# -- fewer cells than a grid -----------------------------------------------------------------------------------------

# Computes the table [gammas, temperatures] of the criterion.
Table = Callable[[Sequence[float], Sequence[float]], "np.ndarray[tuple[int, int], np.dtype[np.float64]]"]

# Number of neighbours on a line that are computed together, as the diagonal of a small grid: every call prepares the
# rows again, so a grid of one cell costs nearly as much as one of many.
_TOGETHER = 10

# Number of coarse temperatures of "refine", and number of temperatures between two neighbours in each later round.
_COARSE, _FINE = 24, 9


class _Best:
    """The smallest finite value so far (the first of equal ones), and the number of values."""

    def __init__(self) -> None:
        self.gamma, self.temperature, self.value, self.n_cells = math.nan, math.nan, math.inf, 0

    def see(self, gamma: float, temperatures: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
        """Adds cells of one gamma; returns the best temperature among them and its value."""
        best = min(range(len(values)), key=lambda i: values[i] if math.isfinite(values[i]) else math.inf)
        self.n_cells += len(values)
        if math.isfinite(values[best]) and values[best] < self.value:
            self.gamma, self.temperature, self.value = gamma, temperatures[best], values[best]
        return temperatures[best], values[best]

    def found(self, gammas: Sequence[float], temperatures: Sequence[float]) -> SearchResult:
        """The result of a search between the ends of both axes."""
        if not math.isfinite(self.value):
            raise ValueError("the criterion must be finite in some cell, got none")
        words = _at_ends(self.gamma, self.temperature, gammas, temperatures)
        return SearchResult(self.gamma, self.temperature, self.value, self.n_cells, words)


def search_line(table: Table, gammas: Sequence[float], temperatures: Sequence[float]) -> SearchResult:
    """With m temperatures: the best T at the first and at the last gamma, and m points of the line through both.

    In the plane of gamma and T, the best T of each gamma lie on a nearly straight line. The searched line runs from the
    smallest gamma to the largest; its points outside the range of the temperatures are left out, so there are at most
    3m cells. If the best T of the first or last gamma is an end of the range, the line is wrong, and ``at_border_``
    reports it.

    Source: Komisarenko & Kull 2024 (arXiv 2408.11598), section 5.2, which proposes it and leaves it untested.
    """
    best = _Best()
    first, last = gammas[0], gammas[-1]
    ends: list[float] = []
    clipped_ends: list[tuple[float, float]] = []
    for gamma in (first, last) if first != last else (first,):
        ends.append(best.see(gamma, temperatures, table([gamma], temperatures)[0].tolist())[0])
    if first != last:
        slope = (ends[1] - ends[0]) / (last - first)
        points = [
            (gamma, temperature)
            for gamma in np.linspace(min(gammas), max(gammas), len(temperatures)).tolist()
            if min(temperatures) <= (temperature := ends[0] + slope * (gamma - first)) <= max(temperatures)
        ]
        for begin in range(0, len(points), _TOGETHER):
            few = points[begin : begin + _TOGETHER]
            cells = table([gamma for gamma, _ in few], [temperature for _, temperature in few])
            for (gamma, temperature), value in zip(few, cells.diagonal().tolist(), strict=True):
                best.see(gamma, [temperature], [value])
        low, high = min(temperatures), max(temperatures)
        clipped_ends = [
            (gamma, end) for gamma, end in zip((first, last), ends, strict=True) if low < high and end in (low, high)
        ]
    words = [
        f"the line goes through T = {end:g} at gamma = {gamma:g}, the "
        f"{'smallest' if end == min(temperatures) else 'largest'} that was searched"
        for gamma, end in clipped_ends
    ]
    found = best.found(gammas, temperatures)
    return replace(found, at_border=(*found.at_border, *words), clipped_ends=tuple(end for _, end in clipped_ends))


def search_refine(table: Table, gammas: Sequence[float], temperatures: Sequence[float]) -> SearchResult:
    """From coarse to fine: temperatures at every gamma, then gammas around the best one.

    For each gamma: temperatures a constant factor apart over the whole range, then three rounds of finer temperatures
    around the best one. Then three rounds of new gammas: the midpoints between the best gamma and its neighbours, with
    temperatures around the mean of the best temperatures of both.
    """
    best = _Best()
    low, high = min(temperatures), max(temperatures)
    coarse = np.geomspace(low, high, _COARSE).tolist() if low < high else [low]
    coarse[0], coarse[-1] = low, high
    factor = (high / low) ** (1 / max(1, len(coarse) - 1))

    def around(gamma: float, temperature: float, factor: float, rounds: int) -> float:
        for _ in range(rounds):
            window = np.geomspace(max(low, temperature / factor), min(high, temperature * factor), _FINE).tolist()
            window = [min(max(value, low), high) for value in window]
            temperature, _ = best.see(gamma, window, table([gamma], window)[0].tolist())
            factor **= 2 / (_FINE - 1)
        return temperature

    ridge: dict[float, float] = {}
    for gamma, values in zip(gammas, table(gammas, coarse).tolist(), strict=True):
        temperature, _ = best.see(gamma, coarse, values)
        ridge[gamma] = around(gamma, temperature, factor, 3) if low < high else temperature
    for _ in range(3):
        axis = sorted(ridge)
        place = axis.index(best.gamma) if best.gamma in ridge else 0
        for other in axis[max(0, place - 1) : place + 2]:
            if other != axis[place]:
                middle = (axis[place] + other) / 2
                suggested = (ridge[axis[place]] + ridge[other]) / 2
                ridge[middle] = around(middle, suggested, 1.1, 2) if low < high else low
    return best.found(gammas, temperatures)
