"""The search over rows larger than memory: the grid, a closer look at its lowest cells, and its sums fold by fold."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern.calibrators import Estimator
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.streaming import CalibrationGridState
from focalkern.study.contest import Proper, losses_of
from focalkern.study.processes import stopping_between_batches
from focalkern.study.streamed_figures import StreamedFigures

__all__ = ["StreamedSearch"]

# After the search the cells with the lowest ECE are counted once more, in float64 and in many buckets, 100 MB together.
# They may not be the lowest any more then, and there is another pass.
_REFINEMENTS = 4
_REFINED_CELLS = 32  # of plain temperature scaling, and as many of the others
_REFINED_BUCKETS = 1 << 16
# The lowest of those are measured as what is reported is.
_MEASURED_CELLS = 4


class StreamedSearch(StreamedFigures):
    """Figures that are searched for their optimum."""

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
        """ECE and NLL of every cell, and its Brier score where that is the ``criterion``; ``bound_of`` says how far the
        ECE can be off. With ``folds``, what :meth:`fold_totals` needs besides, in the same pass."""
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
        # What rank 0 has, so that all processes take the same cells into the same sums.
        for table in (*grid.tables.values(), bound):
            self._processes.from_first(table)
        self._refine(grid, bound)
        self._measure_lowest(grid, bound)
        self._searched = grid, bound
        return grid

    def _refine(self, grid: CalibrationGrid, bound: Tensor) -> None:
        """Puts better values in place of those of the lowest ECE, until the lowest of all are among them."""
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
        """In one pass: the figures of all cells that may be chosen, and the ECE from them in place of the buckets'."""
        lowest = [*_lowest(grid, "ece", _MEASURED_CELLS), *_lowest(grid, "nll", 1)]
        n_temperatures = len(grid.temperatures)
        places = [divmod(place, n_temperatures) for place in torch.cat(lowest).unique().tolist()]
        cells = {(float(grid.gammas[i]), float(grid.temperatures[j])): (i, j) for i, j in places}
        self.measure([(0.0, 1.0), *cells], grid.n_bins)
        for cell, place in cells.items():
            found = self.measured(*cell, grid.n_bins)
            grid.tables["ece"][place] = found.figures[f"ece_{grid.estimator}"]
            bound[place] = 0.0 if grid.estimator == "equal_width" else found.bound
        self._processes.from_first(grid.tables["ece"])

    def bound_of(self, gamma: float, temperature: float) -> float:
        """How far the ECE of that cell of the grid can be off."""
        assert self._searched is not None
        grid, bound = self._searched
        return float(bound[grid.gammas.tolist().index(gamma), grid.temperatures.tolist().index(temperature)])

    # ---- cross-validation ------------------------------------------------------------------------------------------

    def fold_totals(self) -> Tensor:
        """[folds, Gg, Gt] float64: the sums of the criterion over the rows of each fold, from the last :meth:`grid`.

        The fold of a row is its number modulo ``folds``.
        """
        assert self._totals is not None
        return self._totals

    def wider(
        self, gammas: Sequence[float], temperatures: Sequence[float], like: CalibrationGrid, criterion: Proper
    ) -> CalibrationGrid:
        """One more pass, for the criterion alone, on other axes than those of :meth:`grid`, whose folds it keeps."""
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
        """A batch, fold by fold, to the state, and what it adds to the criterion to the totals."""
        before = state.total(criterion) if len(totals) else None
        for fold in range(len(totals) or 1):
            part = number % len(totals) == fold if len(totals) else slice(None)
            state.update(input[part], target[part])
            if before is not None:
                after = state.total(criterion)
                totals[fold] += after - before
                before = after

    def held_out(self, cells: Sequence[Sequence[tuple[float, float]]], criterion: Proper) -> tuple[Tensor, Tensor]:
        """In one pass, the losses of every row under cells that depend on its fold.

        Args:
            cells: [folds][candidates] (gamma, temperature).
            criterion: the loss.

        Returns:
            [candidates + 1] and [candidates, candidates] float64: the sums over the rows of the losses minus those of
            no calibration and, last, of the losses of no calibration; and the sums of the products of the former.
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
    """Of plain temperature scaling, and of the others: where in the table the n lowest are, from the lowest on."""
    table = grid.tables[criterion]
    plain = (grid.gammas == 0)[:, None].expand_as(table)
    found = [torch.where(group, table, torch.inf).flatten().sort(stable=True) for group in (plain, ~plain)]
    return [index[: min(n, int(value.isfinite().sum()))] for value, index in found if bool(value[0].isfinite())]
