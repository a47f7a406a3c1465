"""The (gamma, T) grid of streamed samples, refined where its ECE is lowest and summed per fold."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern.calibrators import (
    DEFAULT_GAMMAS,
    Criterion,
    Estimator,
    FocalTemperatureScaling,
    RobustTemperatureScaling,
    TemperatureScaling,
)
from focalkern.calibrators._search import Found, beyond
from focalkern.calibrators._selection import (
    CandidateScore,
    CrossValidation,
    Proper,
    decide_from_sums,
    fitted_identity,
    losses_of,
)
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES, CalibrationGrid
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.streaming import CalibrationGridState
from focalkern.study.distributed import stopping_between_batches
from focalkern.study.samples import About, Scaling, scaling_or_none
from focalkern.study.scores import StreamedScores

__all__ = ["StreamedGrid", "cross_validate_streamed", "scalings_of_grid"]

# After the search, a pass in float64 with many buckets (100 MB) recomputes the cells with the lowest ECE. Another pass
# follows if other cells are then the lowest.
_REFINEMENTS = 4
_REFINED_CELLS = 32  # of plain temperature scaling, and as many of the others
_REFINED_BUCKETS = 1 << 16
# The lowest of those get exact scores.
_MEASURED_CELLS = 4


class StreamedGrid(StreamedScores):
    """Streamed samples with the search over the (gamma, T) grid."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._searched: tuple[CalibrationGrid, Tensor] | None = None
        self._totals: Tensor | None = None

    def grid(
        self,
        gammas: Sequence[float],
        temperatures: Sequence[float],
        *,
        n_bins: int,
        estimator: Estimator,
        criterion: Proper = "nll",
        folds: int = 0,
    ) -> CalibrationGrid:
        """ECE (with the error bound :meth:`bound_of`) and NLL of every (gamma, T), and the Brier score if it is the
        ``criterion``. ``folds`` adds up :meth:`fold_totals` in the same pass."""
        criteria = ("ece", "nll") if criterion == "nll" else ("ece", "nll", criterion)
        state = self._state(gammas, temperatures, n_bins, estimator, criteria=criteria)
        totals = torch.zeros(folds, len(gammas), len(temperatures), dtype=torch.float64)
        begin, end = self._processes.share(len(self._rows))
        task = {
            "data": [part for shard in self._rows.shards for part in (*shard.stamp(), shard.rows)],
            "classes": [self.n_classes, self.kind],
            "rows": [begin, end, self.part],
            "folds": [folds, criterion],
        }
        done = self._progress.load(state, task, totals)
        if done and self._processes.rank == 0:
            self._progress.say(f"resumed from {self._progress.path}: {done} of {end - begin} rows are done")
        with stopping_between_batches(self._progress.path is not None) as asked_to_stop:
            for over, input, target, number in self._batches("fit", wide=False, done=done):
                self._add(state, totals, input, target, number, criterion)
                done = over
                stop = asked_to_stop()
                self._progress.save(state, task, done, totals, now=stop or done == end - begin)
                if stop:
                    self._progress.say(
                        f"{self._progress.path}: {done} of {end - begin} rows are done; the same command goes on"
                    )
                    raise KeyboardInterrupt
        self._processes.reduce(state)
        self._totals = self._processes.add_up(totals) if folds else None
        grid, bound = state.compute(), state.error_bound("ece")
        del state
        # The tables of rank 0, to the bit, so that all processes choose the same cells.
        for table in (*grid.tables.values(), bound):
            self._processes.from_first(table)
        self._refine(grid, bound)
        self._measure_lowest(grid, bound)
        self._searched = grid, bound
        return grid

    def identity(self, n_bins: int) -> TemperatureScaling:
        """No calibration, as a calibrator fitted on these samples."""
        self.measure([(0.0, 1.0)], n_bins)  # known already after a grid
        brier = self.measured(0.0, 1.0, n_bins).scores["brier"]
        return fitted_identity(self.kind, brier, n_samples=len(self), n_classes=self.n_classes)

    def _refine(self, grid: CalibrationGrid, bound: Tensor) -> None:
        """Recompute the lowest ECEs with more buckets, until all of the lowest are recomputed."""
        ece = grid.tables["ece"]
        refined = torch.zeros_like(ece, dtype=torch.bool)
        for _ in range(_REFINEMENTS):
            lowest = _lowest(grid, "ece", _REFINED_CELLS)
            if all(bool(refined.view(-1)[found[0]]) for found in lowest):
                return
            wanted = torch.zeros_like(refined)
            wanted.view(-1)[torch.cat(lowest)] = True
            wanted &= ~refined
            states = {
                i: self._state(
                    grid.gammas[i : i + 1],
                    grid.temperatures[wanted[i]],
                    grid.n_bins,
                    grid.estimator,
                    n_buckets=_REFINED_BUCKETS,
                )
                for i in wanted.any(1).nonzero().flatten().tolist()
            }
            for _, input, target, _ in self._batches("refine"):
                for state in states.values():
                    state.update(input.to(torch.float64), target)
            for i, state in states.items():
                self._processes.reduce(state)
                ece[i, wanted[i]] = state.compute().tables["ece"][0]
                bound[i, wanted[i]] = state.error_bound("ece")[0]
            self._processes.from_first(ece)
            self._processes.from_first(bound)
            refined |= wanted

    def _measure_lowest(self, grid: CalibrationGrid, bound: Tensor) -> None:
        """One pass for the exact scores of all cells that may be chosen; their ECEs replace those of the buckets."""
        lowest = [*_lowest(grid, "ece", _MEASURED_CELLS), *_lowest(grid, "nll", 1)]
        n_temperatures = len(grid.temperatures)
        places = [divmod(place, n_temperatures) for place in torch.cat(lowest).unique().tolist()]
        cells = {(float(grid.gammas[i]), float(grid.temperatures[j])): (i, j) for i, j in places}
        self.measure([(0.0, 1.0), *cells], grid.n_bins)
        for cell, place in cells.items():
            found = self.measured(*cell, grid.n_bins)
            grid.tables["ece"][place] = found.scores[f"ece_{grid.estimator}"]
            bound[place] = 0.0 if grid.estimator == "equal_width" else found.bound
        self._processes.from_first(grid.tables["ece"])

    def bound_of(self, gamma: float, temperature: float) -> float:
        """Error bound of an ECE of the last :meth:`grid`."""
        assert self._searched is not None
        grid, bound = self._searched
        return float(bound[grid.gammas.tolist().index(gamma), grid.temperatures.tolist().index(temperature)])

    # ---- cross-validation ------------------------------------------------------------------------------------------

    def fold_totals(self) -> Tensor:
        """[folds, Gg, Gt] float64: sums of the criterion over the samples of each fold, from the last :meth:`grid`.

        The fold of a sample is its number modulo ``folds``.
        """
        assert self._totals is not None
        return self._totals

    def wider(
        self, gammas: Sequence[float], temperatures: Sequence[float], like: CalibrationGrid, criterion: Proper
    ) -> CalibrationGrid:
        """One more pass, for the criterion alone, on longer axes; the folds are those of :meth:`grid`."""
        state = self._state(gammas, temperatures, like.n_bins, "equal_width", criteria=(criterion,))
        totals = torch.zeros(len(self.fold_totals()), len(gammas), len(temperatures), dtype=torch.float64)
        for _, input, target, number in self._batches("widen", wide=False):
            self._add(state, totals, input, target, number, criterion)
        self._processes.reduce(state)
        self._totals = self._processes.add_up(totals)
        tables: dict[str, Tensor] = {criterion: self._processes.from_first(state.compute().tables[criterion])}
        first, second = (torch.tensor(axis, dtype=torch.float64) for axis in (gammas, temperatures))
        return CalibrationGrid(first, second, tables, n_bins=like.n_bins, estimator=like.estimator)

    @staticmethod
    def _add(
        state: CalibrationGridState, totals: Tensor, input: Tensor, target: Tensor, number: Tensor, criterion: Proper
    ) -> None:
        """Add a batch to the state, fold by fold, and its part of the criterion to the totals."""
        before = state.total(criterion) if len(totals) else None
        for fold in range(len(totals) or 1):
            part = number % len(totals) == fold if len(totals) else slice(None)
            state.update(input[part], target[part])
            if before is not None:
                after = state.total(criterion)
                totals[fold] += after - before
                before = after

    def held_out(self, cells: Sequence[Sequence[tuple[float, float]]], criterion: Proper) -> tuple[Tensor, Tensor]:
        """One pass for the losses of every sample, each under the cells of its fold.

        Args:
            cells: [folds][candidates] (gamma, temperature).
            criterion: the loss.

        Returns:
            [candidates + 1] float64: sums of the losses minus those of no calibration; last, the sum of the losses of
            no calibration. [candidates, candidates] float64: sums of the products of those differences.
        """
        n = len(cells[0])
        sums = torch.zeros(n + 1, dtype=torch.float64)
        products = torch.zeros(n, n, dtype=torch.float64)
        for _, input, target, number in self._batches("cross-validate"):
            for fold, of_fold in enumerate(cells):
                part = number % len(cells) == fold
                rows, labels = input[part].to(torch.float64), target[part]
                losses = torch.stack(
                    [
                        losses_of(focal_calibration_map(rows, *cell, input_kind=self.kind, log=True), labels, criterion)
                        for cell in ((0.0, 1.0), *of_fold)
                    ]
                )
                differences = losses[1:] - losses[0]
                sums += torch.cat([differences, losses[:1]]).sum(1)
                products += differences @ differences.T
        return self._processes.add_up(sums), self._processes.add_up(products)


def _lowest(grid: CalibrationGrid, criterion: str, n: int) -> list[Tensor]:
    """Indices of the n lowest cells of the table in ascending order: of gamma = 0, and of the other gammas."""
    table = grid.tables[criterion]
    plain = (grid.gammas == 0)[:, None].expand_as(table)
    found = [torch.where(group, table, torch.inf).flatten().sort(stable=True) for group in (plain, ~plain)]
    return [index[: min(n, int(value.isfinite().sum()))] for value, index in found if bool(value[0].isfinite())]


# Each is a pass over the samples.
_WIDENINGS = 3


def cross_validate_streamed(
    samples: StreamedGrid,
    candidates: Mapping[str, Any],
    grid: CalibrationGrid,
    gammas: Sequence[float],
    *,
    criterion: Proper,
) -> CrossValidation:
    """:func:`cross_validate` for streamed samples: the two scalings, by their sums over the grid.

    The optimum without a fold is the cell with the smallest sum over the other folds; the pass over the grid has added
    up the sums of each fold. One more pass computes the losses of each fold at its cells.

    Args:
        samples: after :meth:`StreamedGrid.grid` with folds.
        candidates: as for ``cross_validate``; those that need all samples in memory are left out, with a reason.
        grid: the result of that call.
        gammas: those of focal temperature scaling; temperature scaling has gamma 0.
    """
    scalings, grid, gammas = _optima_inside(samples, grid, tuple(gammas), criterion)
    totals = samples.fold_totals()
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
    none = samples.identity(grid.n_bins)
    sums = torch.full((len(tried) + 1,), math.inf, dtype=torch.float64)
    products = torch.full((len(tried), len(tried)), math.nan, dtype=torch.float64)
    if usable:
        sums, products = samples.held_out([[cell for cell in of_fold if cell] for of_fold in cells], criterion)
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


def scalings_of_grid(
    grid: CalibrationGrid, gammas: Sequence[float], criterion: Criterion, samples: About
) -> dict[str, Scaling | None]:
    """By method, the scaling with the lowest criterion in the grid; None if the criterion is finite nowhere.

    Temperature scaling takes the row gamma = 0 of the grid, focal temperature scaling the rows of ``gammas``.
    """
    # A saved calibrator names the default grid as such, not as 500 numbers.
    temperatures = tuple(grid.temperatures.tolist())
    options: Any = {
        "search": "grid",
        "temperatures": None if temperatures == PAPER_TEMPERATURES else temperatures,
        "criterion": criterion,
        "estimator": grid.estimator,
        "n_bins": grid.n_bins,
        "input_kind": samples.kind,
    }
    searched = None if tuple(gammas) == DEFAULT_GAMMAS else tuple(gammas)
    pairs: tuple[tuple[Scaling, Sequence[float]], ...] = (
        (TemperatureScaling(**options), (0.0,)),
        (FocalTemperatureScaling(gammas=searched, **options), gammas),
    )
    found: dict[str, Scaling | None] = {}
    for scaling, rows in pairs:
        part = _rows_of_grid(grid, rows)
        if bool(part.tables[criterion].isfinite().any()):
            found[scaling.method] = scaling.choose(part, n_samples=len(samples), n_classes=samples.n_classes)
        else:
            found[scaling.method] = None
    return found


def _optima_inside(
    samples: StreamedGrid, grid: CalibrationGrid, gammas: tuple[float, ...], criterion: Proper
) -> tuple[dict[str, Scaling | None], CalibrationGrid, tuple[float, ...]]:
    """The scalings by method, with the grid and the gammas they are optima of.

    While an optimum lies at an end of an axis, one more pass extends the axis.
    """
    for widening in range(_WIDENINGS + 1):
        scalings = scalings_of_grid(grid, gammas, criterion, samples)
        temperatures = grid.temperatures.tolist()
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
        if widening == _WIDENINGS or not (more_gammas or more_temperatures):
            break
        gammas = (*gammas, *dict.fromkeys(more_gammas))
        # Ascending, so that the first of equal cells stays the first.
        temperatures = sorted({*temperatures, *more_temperatures})
        searched = gammas if 0.0 in gammas else (0.0, *gammas)
        grid = samples.wider(searched, temperatures, grid, criterion)
    return scalings, grid, gammas


def _rows_of_grid(grid: CalibrationGrid, gammas: Sequence[float]) -> CalibrationGrid:
    known = grid.gammas.tolist()
    rows = torch.tensor([known.index(gamma) for gamma in gammas])
    return CalibrationGrid(
        gammas=grid.gammas[rows],
        temperatures=grid.temperatures,
        tables={name: table[rows.to(table.device)] for name, table in grid.tables.items()},
        n_bins=grid.n_bins,
        estimator=grid.estimator,
    )


def _lowest_cell(sums: Tensor, grid: CalibrationGrid, rows: Sequence[int]) -> tuple[float, float] | None:
    """(gamma, T) of the first smallest finite sum among some rows of the grid."""
    part = sums[list(rows)].nan_to_num(nan=math.inf)
    if not bool(part.isfinite().any()):
        return None
    i, j = divmod(int(part.argmin()), part.shape[1])
    return float(grid.gammas[rows[i]]), float(grid.temperatures[j])
