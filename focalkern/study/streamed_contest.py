"""The cross-validation of rows that are read a few at a time: from the sums of the grid, fold by fold."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern.calibrators import FocalTemperatureScaling, TemperatureScaling
from focalkern.calibrators._search import Found, beyond
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.study.candidates import of_grid
from focalkern.study.contest import Contest, Entry, Proper, decide_from_sums, identity
from focalkern.study.streamed_search import StreamedSearch

__all__ = ["hold_streamed_contest"]

# Each is a pass over the rows.
_WIDENINGS = 3


def hold_streamed_contest(
    rows: StreamedSearch,
    candidates: Mapping[str, Any],
    grid: CalibrationGrid,
    gammas: Sequence[float],
    *,
    criterion: Proper,
) -> Contest:
    """What :func:`focalkern.study.contest.hold_contest` does of rows in memory, for the two scalings, on the grid.

    What a scaling would have chosen without a fold is the cell with the smallest sum over the other folds; the sums of
    each fold are there from the pass over the grid. One more pass takes the losses of each fold at its cells.

    Args:
        rows: after :meth:`StreamedSearch.grid` with folds.
        candidates: as for ``hold_contest``; those that need all rows at once are left out, and named.
        grid: what that returned.
        gammas: those of focal temperature scaling; of the grid's others, temperature scaling has 0.
    """
    own, grid, gammas = _inside(rows, grid, tuple(gammas), criterion)
    totals = rows.fold_totals()
    folds, n_rows = len(totals), len(rows)
    others = totals.sum(0) - totals  # of the rows outside of each fold
    known = grid.gammas.tolist()
    parts = {"temperature": [known.index(0.0)], "focal-temperature": [known.index(gamma) for gamma in gammas]}
    names, left_out = [], []
    for name, candidate in candidates.items():
        if isinstance(candidate, TemperatureScaling | FocalTemperatureScaling) and name in (*parts, "none"):
            names.append(name)
        else:
            left_out.append(f"{name}, which needs all rows in memory")
    tried = [name for name in names if name != "none"]
    cells = [[_lowest(others[fold], grid, parts[name]) for name in tried] for fold in range(folds)]
    usable = folds > 1 and all(cell is not None for of_fold in cells for cell in of_fold)
    none = identity(rows.kind)
    rows.measure([(0.0, 1.0)], grid.n_bins)  # there already, after the grid
    brier = rows.measured(0.0, 1.0, grid.n_bins).figures["brier"]
    none.choose(_one_cell(grid, brier), n_samples=n_rows, n_classes=rows.n_classes)
    sums = torch.full((len(tried) + 1,), math.inf, dtype=torch.float64)
    products = torch.full((len(tried), len(tried)), math.nan, dtype=torch.float64)
    if usable:
        sums, products = rows.held_out([[cell for cell in of_fold if cell] for of_fold in cells], criterion)
    base = float(sums[-1]) / n_rows
    entries = [Entry("none", none, base)]
    for place, name in enumerate(tried):
        calibrator = own[name]
        border = () if calibrator is None or not hasattr(calibrator, "at_border_") else calibrator.at_border_
        entries.append(
            Entry(
                name,
                calibrator if usable else None,
                base + float(sums[place]) / n_rows,
                excluded=f"has its optimum at the end of the search: {' and '.join(border)}" if border else "",
            )
        )
    return decide_from_sums(
        entries,
        n_rows,
        torch.nn.functional.pad(sums[:-1], (1, 0)),
        torch.nn.functional.pad(products, (1, 0, 1, 0)),
        criterion=criterion,
        folds=folds if folds > 1 else 0,
        left_out=left_out,
    )


def _inside(
    rows: StreamedSearch, grid: CalibrationGrid, gammas: tuple[float, ...], criterion: Proper
) -> tuple[dict[str, Any], CalibrationGrid, tuple[float, ...]]:
    """The scalings by method, with the grid and the gammas of focal scaling that they are the best of: wider ones than
    were given while the best cell lies at an end, each for one more pass."""
    for widening in range(_WIDENINGS + 1):
        own = {row.method: row.calibrator for row in of_grid(grid, gammas, (criterion,), rows)}
        temperatures = grid.temperatures.tolist()
        more_gammas: list[float] = []
        more_temperatures: list[float] = []
        for scaling in own.values():
            if scaling is None:
                continue
            found = Found(scaling.gamma_, scaling.temperature_, scaling.best_value_, 0, scaling.at_border_)
            axis = gammas if scaling.method == "focal-temperature" else (0.0,)
            new_gammas, new_temperatures = beyond(found, axis, temperatures)
            more_gammas += new_gammas
            more_temperatures += new_temperatures
        if widening == _WIDENINGS or not (more_gammas or more_temperatures):
            break
        gammas = (*gammas, *dict.fromkeys(more_gammas))
        # In ascending order, so that the first of equal cells is what it was.
        temperatures = sorted({*temperatures, *more_temperatures})
        searched = gammas if 0.0 in gammas else (0.0, *gammas)
        grid = rows.wider(searched, temperatures, grid, criterion)
    return own, grid, gammas


def _lowest(sums: Tensor, grid: CalibrationGrid, rows: Sequence[int]) -> tuple[float, float] | None:
    """The first cell with the smallest finite sum among some gammas."""
    part = sums[list(rows)].nan_to_num(nan=math.inf)
    if not bool(part.isfinite().any()):
        return None
    i, j = divmod(int(part.argmin()), part.shape[1])
    return float(grid.gammas[rows[i]]), float(grid.temperatures[j])


def _one_cell(grid: CalibrationGrid, brier: float) -> CalibrationGrid:
    """A grid of the one cell that changes nothing, for a calibrator to take."""
    return CalibrationGrid(
        gammas=torch.zeros(1, dtype=torch.float64),
        temperatures=torch.ones(1, dtype=torch.float64),
        tables={"brier": torch.full((1, 1), brier, dtype=torch.float64)},
        n_bins=grid.n_bins,
        estimator=grid.estimator,
    )
