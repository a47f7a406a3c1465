"""Cross-validation of candidates: fitted on folds in memory, by sums over the grid for samples in files."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern.calibrators import RobustTemperatureScaling
from focalkern.calibrators._search import Found, beyond
from focalkern.calibrators._selection import (
    CandidateScore,
    CrossValidation,
    Proper,
    cross_validate,
    decide_from_sums,
    losses_of,
)
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.study.grid_search import GridSearch, add_by_fold, grid_state, scalings_of_grid
from focalkern.study.samples import Samples, Scaling, StreamedSamples, scaling_or_none
from focalkern.study.scores import identity

__all__ = ["cross_validate_samples"]

# The axes of an optimum at their end become longer so many times; each time is a pass over the samples.
_EXTENSIONS = 3


def cross_validate_samples(
    samples: Samples,
    candidates: Mapping[str, Any],
    search: GridSearch,
    gammas: Sequence[float],
    *,
    criterion: Proper,
    folds: int,
    seed: int,
) -> CrossValidation:
    """Cross-validation of unfitted candidates.

    Args:
        samples: in memory, or in files; those of files have the folds of ``search``, by sample number.
        candidates: by name; of samples in files temperature and focal temperature scaling only, the others are left
            out with a reason.
        search: the result of :func:`search_grid` with these folds.
        gammas: of focal temperature scaling.
        criterion, folds, seed: of the cross-validation.
    """
    if isinstance(samples, StreamedSamples):
        return _streamed_cross_validation(samples, candidates, search, gammas, criterion)
    assert samples.memory is not None
    input, labels = samples.memory.input.to(torch.float64), samples.memory.labels
    return cross_validate(input, labels, candidates, criterion=criterion, folds=folds, seed=seed)


def _streamed_cross_validation(
    samples: StreamedSamples,
    candidates: Mapping[str, Any],
    search: GridSearch,
    gammas: Sequence[float],
    criterion: Proper,
) -> CrossValidation:
    """The two scalings, by their sums over the grid.

    The optimum without a fold is the cell with the smallest sum over the other folds; the search has the sums of each
    fold. One more pass computes the losses of each fold at its cells.
    """
    scalings, search, gammas = _optima_inside(samples, search, tuple(gammas), criterion)
    grid, totals = search.grid, search.fold_totals
    folds, n = len(totals), len(samples)
    outside = totals.sum(0) - totals  # sums over the samples outside of each fold
    known = grid.gammas.tolist()
    rows = {"temperature": [known.index(0.0)], "focal-temperature": [known.index(gamma) for gamma in gammas]}
    names, left_out = [], []
    for name, candidate in candidates.items():
        known_class = isinstance(candidate, RobustTemperatureScaling) or scaling_or_none(candidate) is not None
        if known_class and name in (*rows, "none"):
            names.append(name)
        else:
            left_out.append(f"{name}, which needs all rows in memory")
    tried = [name for name in names if name != "none"]
    cells = [[_lowest_cell(outside[fold], grid, rows[name]) for name in tried] for fold in range(folds)]
    usable = folds > 1 and all(cell is not None for of_fold in cells for cell in of_fold)
    none = identity(samples, grid.n_bins)
    sums = torch.full((len(tried) + 1,), math.inf, dtype=torch.float64)
    products = torch.full((len(tried), len(tried)), math.nan, dtype=torch.float64)
    if usable:
        sums, products = _held_out(samples, [[cell for cell in of_fold if cell] for of_fold in cells], criterion)
    base = float(sums[-1]) / n
    entries = [CandidateScore("none", none, base, keeps_predictions=True)]
    for place, name in enumerate(tried):
        scaling = scalings[name]
        border = () if scaling is None else scaling.at_border_
        entries.append(
            CandidateScore(
                name,
                scaling if usable else None,
                base + float(sums[place]) / n,
                excluded=f"has its optimum at the end of the search: {' and '.join(border)}" if border else "",
                keeps_predictions=True,
            )
        )
    return decide_from_sums(
        entries,
        n,
        torch.nn.functional.pad(sums[:-1], (1, 0)),
        torch.nn.functional.pad(products, (1, 0, 1, 0)),
        criterion=criterion,
        folds=folds if folds > 1 else 0,
        left_out=left_out,
    )


def _optima_inside(
    samples: StreamedSamples, search: GridSearch, gammas: tuple[float, ...], criterion: Proper
) -> tuple[dict[str, Scaling | None], GridSearch, tuple[float, ...]]:
    """The scalings by method, with the search and the gammas they are optima of.

    While an optimum lies at an end of an axis, one more pass extends the axis.
    """
    for extension in range(_EXTENSIONS + 1):
        scalings = scalings_of_grid(search.grid, gammas, criterion, samples)
        temperatures = search.grid.temperatures.tolist()
        more_gammas: list[float] = []
        more_temperatures: list[float] = []
        for method, scaling in scalings.items():
            if scaling is None:
                continue
            found = Found(scaling.gamma_, scaling.temperature_, scaling.best_value_, 0, scaling.at_border_)
            axis = gammas if method == "focal-temperature" else (0.0,)
            new_gammas, new_temperatures = beyond(found, axis, temperatures)
            more_gammas += new_gammas
            more_temperatures += new_temperatures
        if extension == _EXTENSIONS or not (more_gammas or more_temperatures):
            break
        gammas = (*gammas, *dict.fromkeys(more_gammas))
        # Ascending, so that the first of equal cells stays the first.
        temperatures = sorted({*temperatures, *more_temperatures})
        searched = gammas if 0.0 in gammas else (0.0, *gammas)
        search = _extended(samples, search, searched, temperatures, criterion)
    return scalings, search, gammas


def _extended(
    samples: StreamedSamples,
    search: GridSearch,
    gammas: Sequence[float],
    temperatures: Sequence[float],
    criterion: Proper,
) -> GridSearch:
    """One more pass, for the criterion alone, on longer axes; the folds are those of ``search``."""
    like, n_folds = search.grid, len(search.fold_totals)
    state = grid_state(samples, gammas, temperatures, like.n_bins, "equal_width", criteria=(criterion,))
    totals = torch.zeros(n_folds, len(gammas), len(temperatures), dtype=torch.float64)
    for _, input, target, number in samples.batches("widen", wide=False):
        add_by_fold(state, totals, input, target, number, criterion)
    samples.processes.reduce(state)
    totals = samples.processes.add_up(totals)
    tables: dict[str, Tensor] = {criterion: samples.processes.from_first(state.compute().tables[criterion])}
    first, second = (torch.tensor(axis, dtype=torch.float64) for axis in (gammas, temperatures))
    grid = CalibrationGrid(first, second, tables, n_bins=like.n_bins, estimator=like.estimator)
    return GridSearch(grid, torch.zeros(totals.shape[1:], dtype=torch.float64), totals)


def _held_out(
    samples: StreamedSamples, cells: Sequence[Sequence[tuple[float, float]]], criterion: Proper
) -> tuple[Tensor, Tensor]:
    """One pass for the losses of every sample, each under the cells of its fold.

    Args:
        samples: in files.
        cells: [folds][candidates] (gamma, temperature).
        criterion: the loss.

    Returns:
        [candidates + 1] float64: sums of the losses minus those of no calibration; last, the sum of the losses of
        no calibration. [candidates, candidates] float64: sums of the products of those differences.
    """
    n = len(cells[0])
    sums = torch.zeros(n + 1, dtype=torch.float64)
    products = torch.zeros(n, n, dtype=torch.float64)
    for _, input, target, number in samples.batches("cross-validate"):
        for fold, of_fold in enumerate(cells):
            part = number % len(cells) == fold
            rows, labels = input[part].to(torch.float64), target[part]
            losses = torch.stack(
                [
                    losses_of(focal_calibration_map(rows, *cell, input_kind=samples.kind, log=True), labels, criterion)
                    for cell in ((0.0, 1.0), *of_fold)
                ]
            )
            differences = losses[1:] - losses[0]
            sums += torch.cat([differences, losses[:1]]).sum(1)
            products += differences @ differences.T
    return samples.processes.add_up(sums), samples.processes.add_up(products)


def _lowest_cell(sums: Tensor, grid: CalibrationGrid, rows: Sequence[int]) -> tuple[float, float] | None:
    """(gamma, T) of the first smallest finite sum among some rows of the grid."""
    part = sums[list(rows)].nan_to_num(nan=math.inf)
    if not bool(part.isfinite().any()):
        return None
    i, j = divmod(int(part.argmin()), part.shape[1])
    return float(grid.gammas[rows[i]]), float(grid.temperatures[j])
