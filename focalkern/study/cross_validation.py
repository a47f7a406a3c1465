"""Cross-validation of candidates: by fits on folds for samples in memory, by sums for samples in files."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from focalkern._types import Proper
from focalkern.calibrators import InputKind
from focalkern.calibrators._cross_validation import cross_validate, fits_by_sums
from focalkern.calibrators._row_source import BatchedRows, RowSource, memory_rows
from focalkern.calibrators._search import SearchResult, extend_axes
from focalkern.calibrators._selection import CrossValidation
from focalkern.calibrators._source_selection import FoldedFit, cross_validate_source
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.study.grid_search import GridSearch, add_by_fold, grid_state, scalings_of_grid
from focalkern.study.samples import Samples, Scaling, StreamedSamples, fits_in_memory, scaling_or_none
from focalkern.study.scores import identity

__all__ = ["cross_validate_samples", "source_of"]

# Largest number of extensions of an axis whose end is an optimum; each extension is a pass over the samples.
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
    only_chosen: bool = False,
) -> CrossValidation:
    """Cross-validation of unfitted candidates.

    Args:
        samples: in memory, or in files. Samples in files use the folds of ``search``.
        candidates: by name. For samples in files only temperature, focal temperature and spline scaling are fitted; the
            others are left out, with a reason.
        search: the result of :func:`search_grid` with these folds.
        gammas: grid of focal temperature scaling.
        criterion, folds, seed: settings of the cross-validation.
        only_chosen: for samples in memory, leave out the calibrators of spline scalings that are not chosen.
    """
    if isinstance(samples, StreamedSamples):
        return _streamed_cross_validation(samples, candidates, search, gammas, criterion)
    assert samples.memory is not None
    input, labels = samples.memory.input, samples.memory.labels
    # The sums over rows are in float64 for every input; other candidates compute in the dtype of the input.
    by_sums = all(name == "none" or fits_by_sums(candidate) for name, candidate in candidates.items())
    if not by_sums or input.dtype != torch.float32:
        input = input.to(torch.float64)
    return cross_validate(
        input, labels, candidates, criterion=criterion, folds=folds, seed=seed, only_chosen=only_chosen
    )


def _streamed_cross_validation(
    samples: StreamedSamples,
    candidates: Mapping[str, Any],
    search: GridSearch,
    gammas: Sequence[float],
    criterion: Proper,
) -> CrossValidation:
    """Cross-validation by sums over the samples; temperature and focal temperature scaling use the sums of the grid.

    The optimum of a scaling without a fold is the cell with the smallest sum over the other folds. The search has the
    sums of each fold.
    """
    folds = len(search.fold_totals)
    of_grid = [
        name
        for name, candidate in candidates.items()
        if name in ("temperature", "focal-temperature") and scaling_or_none(candidate) is not None
    ]
    cross_validation = cross_validate_source(
        source_of(samples),
        candidates,
        identity(samples, search.grid.n_bins),
        search.folds_of_rows,
        folds if folds > 1 else 0,
        criterion=criterion,
        others=_fits_of_grid(samples, of_grid, search, gammas, criterion) if of_grid else None,
    )
    return replace(cross_validation, n_copies=search.n_copies)


def source_of(samples: StreamedSamples) -> RowSource:
    """The samples for a fit by sums: in memory if the samples of every process fit into memory, else in batches."""

    def add_up(sums: Tensor) -> Tensor:
        processes = samples.processes
        return sums if processes.size == 1 else processes.from_first(processes.add_up(sums.clone()))

    def read() -> Iterator[tuple[Tensor, Tensor, None, Tensor]]:
        for _, input, target, number in samples.batches("fit"):
            wide = input if input.dtype in (torch.float32, torch.float64) else input.to(torch.float32)
            yield wide, target.to(torch.int64), None, number

    if not fits_in_memory(len(samples) * samples.n_classes):
        return BatchedRows(read, samples.n_classes, add_up)
    inputs = torch.empty(0, samples.n_classes)
    targets, numbers = torch.empty(2, samples.n_local, dtype=torch.int64)
    done = 0
    for input, target, _, number in read():
        if done == 0:
            inputs = torch.empty(samples.n_local, samples.n_classes, dtype=input.dtype)
        after = done + len(target)
        inputs[done:after], targets[done:after], numbers[done:after] = input, target, number
        done = after
    return memory_rows(inputs, targets, None, numbers, add_up)


def _fits_of_grid(
    samples: StreamedSamples, names: Sequence[str], search: GridSearch, gammas: Sequence[float], criterion: Proper
) -> dict[str, FoldedFit]:
    """Fits of the named scalings, on all samples and without each fold."""
    scalings, search, gammas = _optima_inside(samples, search, tuple(gammas), criterion)
    grid, totals = search.grid, search.fold_totals
    outside = totals.sum(0) - totals  # sums over the samples outside of each fold
    known = grid.gammas.tolist()
    rows = {"temperature": [known.index(0.0)], "focal-temperature": [known.index(gamma) for gamma in gammas]}
    found = {}
    for name in names:
        scaling = scalings[name]
        cells = [_lowest_cell(of_fold, grid, rows[name]) for of_fold in outside]
        border = () if scaling is None else scaling.at_border_
        found[name] = FoldedFit(
            scaling,
            tuple(functools.partial(_apply, cell, samples.kind) for cell in cells if cell) if all(cells) else (),
            excluded=f"has its optimum at a bound of the search: {' and '.join(border)}" if border else "",
        )
    return found


def _apply(cell: tuple[float, float], kind: InputKind, input: Tensor) -> Tensor:
    return focal_calibration_map(input, *cell, input_kind=kind, log=True)


def _optima_inside(
    samples: StreamedSamples, search: GridSearch, gammas: tuple[float, ...], criterion: Proper
) -> tuple[dict[str, Scaling | None], GridSearch, tuple[float, ...]]:
    """The optimal scalings by method, with the search and the gammas from which they come.

    While an optimum lies at an end of an axis, another pass extends the axis.
    """
    for extension in range(_EXTENSIONS + 1):
        scalings = scalings_of_grid(search.grid, gammas, criterion, samples)
        temperatures = search.grid.temperatures.tolist()
        more_gammas: list[float] = []
        more_temperatures: list[float] = []
        for method, scaling in scalings.items():
            if scaling is None:
                continue
            found = SearchResult(scaling.gamma_, scaling.temperature_, scaling.best_value_, 0, scaling.at_border_)
            axis = gammas if method == "focal-temperature" else (0.0,)
            new_gammas, new_temperatures = extend_axes(found, axis, temperatures)
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
    """Another pass, only for the criterion, on longer axes with the folds of ``search``."""
    like, n_folds = search.grid, len(search.fold_totals)
    state = grid_state(samples, gammas, temperatures, like.n_bins, "equal_width", criteria=(criterion,))
    totals = torch.zeros(n_folds, len(gammas), len(temperatures), dtype=torch.float64)
    for _, input, target, number in samples.batches("widen", wide=False):
        add_by_fold(state, totals, input, target, number, search.folds_of_rows, criterion)
    samples.processes.reduce(state)
    totals = samples.processes.add_up(totals)
    tables: dict[str, Tensor] = {criterion: samples.processes.from_first(state.compute().tables[criterion])}
    first, second = (torch.tensor(axis, dtype=torch.float64) for axis in (gammas, temperatures))
    grid = CalibrationGrid(first, second, tables, n_bins=like.n_bins, estimator=like.estimator)
    return GridSearch(grid, torch.zeros(totals.shape[1:], dtype=torch.float64), totals, search.folds_of_rows)


def _lowest_cell(sums: Tensor, grid: CalibrationGrid, rows: Sequence[int]) -> tuple[float, float] | None:
    """(gamma, T) of the smallest finite sum (of equal ones the first) among some rows of the grid."""
    part = sums[list(rows)].nan_to_num(nan=math.inf)
    if not bool(part.isfinite().any()):
        return None
    i, j = divmod(int(part.argmin()), part.shape[1])
    return float(grid.gammas[rows[i]]), float(grid.temperatures[j])
