"""Sets of rows larger than memory: searched, measured, shared between processes, and resumed where they were left."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern import metrics
from focalkern.calibrators import Estimator, InputKind
from focalkern.files import ShardedRows, is_pattern, open_shards
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.ops.calibration_sums import CalibrationSums, add_calibration_sums
from focalkern.streaming import CalibrationGridState
from focalkern.study.contest import Proper, losses_of
from focalkern.study.processes import Processes, Progress, stopping_between_batches
from focalkern.study.sums import Measured, Sums

__all__ = ["MOST_KEPT", "StreamedSet", "stream_sets", "wants_streaming"]

# Numbers in a batch: of the search, and of what is done in float64 and needs several copies.
_SEARCH_BATCH = 1 << 23
_FLOAT64_BATCH = 1 << 21
_MOST_ROWS = 1 << 16
_NOTHING = torch.iinfo(torch.int64).min  # no label is ignored: every row counts
# After the search the cells with the lowest ECE are counted once more, in float64 and in many buckets, 100 MB together.
# They may not be the lowest any more then, and there is another pass.
_REFINEMENTS = 4
_REFINED_CELLS = 32  # of plain temperature scaling, and as many of the others
_REFINED_BUCKETS = 1 << 16
# The lowest of those are measured as what is reported is: from the confidences of all rows, 8 bytes each, or, where
# there are more rows than this, from 6 MB of buckets.
_MEASURED_CELLS = 4
MOST_KEPT = 1 << 19
_FIGURE_BUCKETS = 1 << 18
# In memory there are several copies of the input, some of them in float64.
_SHARE_OF_MEMORY = 8


class StreamedSet:
    """As :class:`focalkern.files.LogitSet`, with rows that are read when they are needed, and then forgotten.

    Args:
        rows: where they are.
        processes, progress: who shares the work, and where it is saved.
        kept: [len(rows)] bool, those that count; all of them when None.
        part: in words, which rows these are.

    Attributes:
        correct: [N] bool on rank 0, once something was measured; nothing where there are too many rows.
        class_counts: [C] int64, rows per class, once something was measured.
        impossible_targets: how many rows rule out their own class; likewise.
        looks_like_probs: whether all logits are positive and sum to 1; likewise.
    """

    def __init__(
        self,
        rows: ShardedRows,
        processes: Processes,
        progress: Progress,
        kept: np.ndarray[Any, Any] | None = None,
        part: str = "",
    ) -> None:
        self._rows, self._kept = rows, kept
        self._processes, self._progress = processes, progress
        self.kind: InputKind = rows.kind
        self.name, self.source, self.part = rows.name, rows.source, part
        self.n_classes = rows.n_classes
        self._searched: tuple[CalibrationGrid, Tensor] | None = None
        self._totals: Tensor | None = None
        self._measured: dict[tuple[float, float, int], Measured] = {}
        self.correct = torch.zeros(0, dtype=torch.bool)
        self.class_counts = torch.zeros(0, dtype=torch.int64)
        self.impossible_targets = 0
        self.looks_like_probs = False

    def __len__(self) -> int:
        return len(self._rows) if self._kept is None else int(np.count_nonzero(self._kept))

    @property
    def keeps_confidences(self) -> bool:
        """Whether there are few enough rows for that, which intervals need."""
        return len(self) <= MOST_KEPT

    def rows(self, index: Tensor, part: str) -> "StreamedSet":
        """The rows of ``index``, called ``part``."""
        kept = np.zeros(len(self._rows), dtype=np.bool_)
        kept[index.numpy()] = True
        return StreamedSet(self._rows, self._processes, self._progress, kept, part)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def _batches(self, what: str, numbers: int, done: int = 0) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """(rows of the share that are over after it, input, labels, numbers of the rows) of the batches after the first
        ``done`` rows."""
        begin, end = self._processes.share(len(self._rows))
        at_once = max(1, min(_MOST_ROWS, numbers // self.n_classes))
        bar = _bar(f"{what} {self.name or self.source}", end - begin, done) if self._processes.rank == 0 else None
        try:
            for first, input, target in self._rows.batches(begin + done, end, at_once):
                after = first + len(target)
                number = torch.arange(first, after)
                if self._kept is not None:
                    kept = torch.from_numpy(self._kept[first:after])
                    input, target, number = input[kept], target[kept], number[kept]
                yield after - begin, input, target, number
                if bar is not None:
                    bar.update(after - begin - bar.n)
        finally:
            if bar is not None:
                bar.close()

    # ---- the grid --------------------------------------------------------------------------------------------------

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
            for over, input, target, number in self._batches("fit", _SEARCH_BATCH, done):
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
            for _, input, target, _ in self._batches("refine", _FLOAT64_BATCH):
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

    def _state(
        self,
        gammas: Sequence[float] | Tensor,
        temperatures: Sequence[float] | Tensor,
        n_bins: int,
        estimator: str,
        *,
        criteria: Sequence[str] = ("ece",),
        n_buckets: int = 1024,
    ) -> CalibrationGridState:
        return CalibrationGridState(
            gammas,
            temperatures,
            n_bins=n_bins,
            criteria=criteria,
            estimator=estimator,  # type: ignore[arg-type]  # a str in a grid
            input_kind=self.kind,
            ignore_index=_NOTHING,
            n_buckets=n_buckets,
        )

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
        for _, input, target, number in self._batches("widen", _SEARCH_BATCH):
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
        for _, input, target, number in self._batches("cross-validate", _FLOAT64_BATCH):
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

    def remove_progress(self) -> None:
        """The state file is of no use any more."""
        self._progress.remove()

    def cell_sums(self, gammas: Tensor, temperatures: Tensor, n_bins: int) -> CalibrationSums:
        """In one pass, in float64: what the map of the report needs of every cell. On every process."""
        criteria = ("ece", "nll", "brier")
        sums = CalibrationSums.zeros(len(gammas), len(temperatures), n_bins, criteria, torch.device("cpu"))
        for _, input, target, _ in self._batches("map", _FLOAT64_BATCH):
            if len(target):
                add_calibration_sums(
                    sums,
                    input.to(torch.float64),
                    target,
                    gammas,
                    temperatures,
                    criteria=criteria,
                    sketch=False,
                    is_probs=self.kind == "probs",
                    ignore_index=_NOTHING,
                )
        for _, tensor in sums.items():
            self._processes.add_up(tensor)
        return sums

    # ---- figures ---------------------------------------------------------------------------------------------------

    def measure(self, cells: Sequence[tuple[float, float]], n_bins: int) -> None:
        """One pass over the rows, in float64, for everything that is later asked of these (gamma, temperature)."""
        wanted = [cell for cell in dict.fromkeys(cells) if (*cell, n_bins) not in self._measured]
        if not wanted:
            return
        begin, end = self._processes.share(len(self._rows))
        n_kept = 0
        if self.keeps_confidences:
            n_kept = end - begin if self._kept is None else int(np.count_nonzero(self._kept[begin:end]))
        found = {}
        for gamma, temperature in wanted:
            sketch = None
            if not self.keeps_confidences:
                sketch = self._state([gamma], [temperature], n_bins, "equal_mass", n_buckets=_FIGURE_BUCKETS)
            found[gamma, temperature] = Sums(self.n_classes, n_bins, n_kept, sketch)
        correct = torch.zeros(n_kept, dtype=torch.uint8)
        done = 0
        facts = torch.zeros(2, dtype=torch.int64)  # rows that rule out their class, rows that look like probabilities
        per_class = torch.zeros(self.n_classes, dtype=torch.int64)
        impossible = -torch.inf if self.kind == "logits" else 0.0
        for _, input, target, _ in self._batches("measure", _FLOAT64_BATCH):
            if not len(target):
                continue
            ruled_out = input.gather(1, target.unsqueeze(1)) == impossible
            alike = (input >= 0).all(1) & ((input.sum(1, dtype=torch.float64) - 1).abs() <= 1e-3)
            facts += torch.stack([ruled_out.sum(), alike.sum()])
            per_class += torch.bincount(target, minlength=self.n_classes)
            hit = input.argmax(-1) == target
            if self.keeps_confidences:
                correct[done : done + len(hit)] = hit
            input = input.to(torch.float64)
            for (gamma, temperature), sums in found.items():
                log_probs = focal_calibration_map(input, gamma, temperature, input_kind=self.kind, log=True)
                sums.add(done, log_probs, target, hit)
                if sums.sketch is not None:
                    sums.sketch.update(input, target)
            done += len(target)
        self.correct = self._processes.to_first(correct).bool()
        self.class_counts = self._processes.add_up(per_class)
        self.impossible_targets, alike_rows = self._processes.add_up(facts).tolist()
        self.looks_like_probs = self.kind == "logits" and alike_rows == len(self)
        for cell, sums in found.items():
            self._measured[*cell, n_bins] = self._all_together(sums, n_bins)

    def _all_together(self, sums: Sums, n_bins: int) -> Measured:
        n = len(self)
        for tensor in (sums.means, sums.bins, sums.excess):
            self._processes.add_up(tensor)
        count, confidences, hits = sums.bins
        edges = torch.arange(n_bins + 1, dtype=torch.float64) / n_bins
        bins = metrics.ReliabilityBins(
            lower=edges[:-1],
            upper=edges[1:],
            count=count.to(torch.int64),
            confidence=confidences / count,
            accuracy=hits / count,
            n_samples=n,
            estimator="equal_width",
        )
        figures = {
            "accuracy": float(hits.sum()) / n,
            "nll": float(sums.means[0]) / n,
            "brier": float(sums.means[1]) / n,
            "ece_equal_width": float(metrics.expected_error(bins)),
            "classwise_ece_equal_width": float(sums.excess.abs().sum()) / (n * self.n_classes),
        }
        confidence = self._processes.to_first(sums.confidence)
        bound = 0.0
        if sums.sketch is not None:
            self._processes.reduce(sums.sketch)
        for estimator in ("equal_mass", "equal_mass_interp"):
            if sums.sketch is None:
                ece = metrics.expected_calibration_error(
                    confidence=confidence, correct=self.correct, n_bins=n_bins, estimator=estimator
                )
            else:
                # The same buckets, cut as this one cuts.
                content = sums.sketch.state_dict()
                content["config"]["estimator"] = estimator
                state = CalibrationGridState.from_state_dict(content)
                ece = state.compute().tables["ece"]
                bound = max(bound, float(state.error_bound("ece")))
            figures[f"ece_{estimator}"] = float(ece)
        return Measured(figures, bins, confidence, bound)

    def measured(self, gamma: float, temperature: float, n_bins: int) -> Measured:
        """What :meth:`measure` has found."""
        return self._measured[gamma, temperature, n_bins]


def stream_sets(
    path: str, *, processes: Processes | None = None, progress: Progress | None = None, **options: Any
) -> dict[str, StreamedSet]:
    """What stands for :func:`focalkern.files.read_sets` where rows are read a few at a time; with its options."""
    processes = processes or Processes()
    progress = progress or Progress(None, 0, processes)
    sets = open_shards(path, **options)
    return {prefix: StreamedSet(rows, processes, progress) for prefix, rows in sets.items()}


def wants_streaming(paths: Sequence[str | None]) -> bool:
    """Whether one of the files is a pattern, or so large that what is done in memory might not fit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in paths:
        if path is None:
            continue
        if is_pattern(path):
            return True
        readable = path.lower().endswith((".npy", ".safetensors"))
        if readable and os.path.isfile(path) and os.path.getsize(path) > memory / _SHARE_OF_MEMORY:
            return True
    return False


def _lowest(grid: CalibrationGrid, criterion: str, n: int) -> list[Tensor]:
    """Of plain temperature scaling, and of the others: where in the table the n lowest are, from the lowest on."""
    table = grid.tables[criterion]
    plain = (grid.gammas == 0)[:, None].expand_as(table)
    found = [torch.where(group, table, torch.inf).flatten().sort(stable=True) for group in (plain, ~plain)]
    return [index[: min(n, int(value.isfinite().sum()))] for value, index in found if bool(value[0].isfinite())]


def _bar(what: str, total: int, done: int) -> Any:
    """A progress bar on stderr where that is a terminal and tqdm is installed."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=what, total=total, initial=done, unit="row", unit_scale=True, leave=False)
