"""The search over the (gamma, T) grid: exact in memory, refined and summed per fold for samples in files."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from focalkern._types import Proper
from focalkern.calibrators import DEFAULT_GAMMAS, Criterion, Estimator, FocalTemperatureScaling, TemperatureScaling
from focalkern.calibrators._copies import CopiesFold, HashSample
from focalkern.calibrators._folds import fold_of
from focalkern.calibrators._spline_folds import FoldOf
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES, CalibrationGrid, calibration_grid
from focalkern.streaming import CalibrationGridState
from focalkern.study.distributed import stopping_between_batches
from focalkern.study.samples import Samples, Scaling, StreamedSamples
from focalkern.study.scores import NO_LABEL, score

__all__ = ["GridSearch", "add_by_fold", "grid_state", "scalings_of_grid", "search_grid"]

# Largest number of passes; another pass is needed if other cells have the lowest values after one.
_REFINEMENTS = 4
_REFINED_CELLS = 32  # number of cells of temperature scaling, and of cells with other gammas
_REFINED_BUCKETS = 1 << 16
# Number of the lowest of these cells that get exact scores.
_MEASURED_CELLS = 4

# The error of a float32 confidence 1 / (1 + R) is R / (1 + R)^2 times the error of log R, and that is a few units of
# rounding (6e-8) times (1 + gamma) (1 + |log R|): below 1e-5 for the paper's gammas. The margin is ten times larger.
_FLOAT32_MARGIN = 1e-4
_FIRST_CELLS = 16  # number of temperatures that the kernel computes at once


@dataclass(frozen=True)
class GridSearch:
    """The grid with its error bounds and its folds.

    Attributes:
        grid: ECE and NLL of every (gamma, T), and the Brier score if it is the criterion.
        bound: [Gg, Gt] float64, error bounds of the ECEs; 0 where they are exact.
        fold_totals: [folds, Gg, Gt] float64, sums of the criterion over the samples of each fold; [0, Gg, Gt] for
            samples in memory.
        folds_of_rows: maps row indices to folds.
        n_copies: as in :class:`CrossValidation`, of samples in files.
    """

    grid: CalibrationGrid
    bound: Tensor
    fold_totals: Tensor
    folds_of_rows: FoldOf
    n_copies: int = 0

    def bound_of(self, gamma: float, temperature: float) -> float:
        """Error bound of one ECE; 0 outside the grid, where other searches compute exact ECEs."""
        gammas, temperatures = self.grid.gammas.tolist(), self.grid.temperatures.tolist()
        if gamma not in gammas or temperature not in temperatures:
            return 0.0
        return float(self.bound[gammas.index(gamma), temperatures.index(temperature)])


def search_grid(
    samples: Samples,
    gammas: Sequence[float],
    temperatures: Sequence[float],
    *,
    n_bins: int,
    estimator: Estimator,
    criterion: Proper = "nll",
    folds: int = 0,
    seed: int = 0,
    lowest_of: Sequence[Sequence[float]] | None = None,
) -> GridSearch:
    """The scores of every (gamma, T) on the samples.

    Args:
        samples: in memory, or in files.
        gammas, temperatures: the axes.
        n_bins, estimator: bins and estimator of the ECE.
        criterion: ``"nll"``, or ``"brier"`` for a table of Brier scores too.
        folds, seed: as in :func:`cross_validate_samples`. For samples in files the same pass sums the criterion of each
            fold.
        lowest_of: sets of gammas. If given, only the cell with the lowest ECE of each set is needed: for samples in
            memory the grid then has only the ECE, and it is infinite in cells that cannot be the lowest
            (without sets, in all cells).
    """
    criteria: tuple[Any, ...] = ("ece", "nll") if criterion == "nll" else ("ece", "nll", criterion)
    if isinstance(samples, StreamedSamples):
        return _streamed_search(samples, gammas, temperatures, n_bins, estimator, criterion, criteria, folds, seed)
    assert samples.memory is not None
    # float64 for every dtype: rounding a confidence to float32 may move it to another bin, which changes the ECE and
    # the choice between nearly equal cells.
    options: Any = {"n_bins": n_bins, "estimator": estimator, "input_kind": samples.kind}
    of_rows = samples.memory.input.to(torch.float64), samples.memory.labels
    if lowest_of is not None and estimator != "equal_mass_interp":  # the lowest sample is in no bin
        grid = _lowest_eces(*of_rows, gammas, temperatures, lowest_of, **options)
    else:
        grid = calibration_grid(*of_rows, gammas, temperatures, criteria=criteria, **options)
    shape = len(grid.gammas), len(grid.temperatures)
    no_bounds, no_totals = torch.zeros(shape, dtype=torch.float64), torch.zeros(0, *shape, dtype=torch.float64)
    folds_of_rows = functools.partial(fold_of, rows=len(samples), folds=folds, seed=seed)
    return GridSearch(grid, no_bounds, no_totals, folds_of_rows)


def _lowest_eces(
    input: Tensor,
    labels: Tensor,
    gammas: Sequence[float],
    temperatures: Sequence[float],
    lowest_of: Sequence[Sequence[float]],
    **options: Any,
) -> CalibrationGrid:
    r"""The float64 ECEs of the cells that may have the lowest ECE of a set of gammas; infinity in other cells.

    The bins of an ECE partition the samples, so that

    .. math:: \sum_B \frac{|B|}{N} |\text{acc}(B) - \text{conf}(B)| \ge |\text{acc} - \text{conf}|.

    The right side is the ECE of a single bin, computed in float32. A cell in which it exceeds the lowest ECE so far by
    more than the error of float32 cannot have the lowest ECE.
    """
    if not lowest_of:
        first, second = (torch.tensor(axis, dtype=torch.float64) for axis in (gammas, temperatures))
        nothing = torch.full((len(gammas), len(temperatures)), torch.inf, dtype=torch.float64)
        return CalibrationGrid(first, second, {"ece": nothing}, options["n_bins"], options["estimator"])
    # Differences to the largest logit, because float32 would round large logits.
    narrow = input - input.amax(1, keepdim=True) if options["input_kind"] == "logits" else input
    one_bin = {**options, "n_bins": 1, "estimator": "equal_width"}
    coarse = calibration_grid(narrow.to(torch.float32), labels, gammas, temperatures, criteria=("ece",), **one_bin)
    bound = coarse.tables["ece"] - _FLOAT32_MARGIN
    ece = torch.full_like(bound, torch.inf)

    def compute(i: int, wanted: Tensor) -> None:
        if bool(wanted.any()):
            found = calibration_grid(
                input, labels, coarse.gammas[i : i + 1], coarse.temperatures[wanted], criteria=("ece",), **options
            )
            ece[i, wanted] = found.tables["ece"][0]

    known = list(gammas)
    for one in lowest_of:
        rows = sorted({known.index(gamma) for gamma in one}, key=lambda i: float(bound[i].min()))
        promising = torch.zeros(len(temperatures), dtype=torch.bool)
        promising[bound[rows[0]].argsort()[:_FIRST_CELLS]] = True
        compute(rows[0], promising & ece[rows[0]].isinf())
        for i in rows:
            compute(i, (bound[i] <= ece[rows].min()) & ece[i].isinf())
    return CalibrationGrid(coarse.gammas, coarse.temperatures, {"ece": ece}, options["n_bins"], options["estimator"])


def scalings_of_grid(
    grid: CalibrationGrid, gammas: Sequence[float], criterion: Criterion, samples: Samples
) -> dict[str, Scaling | None]:
    """Method -> scaling with the lowest criterion in the grid; None if the criterion is infinite in every cell.

    Temperature scaling takes the row gamma = 0 of the grid, focal temperature scaling the rows of ``gammas``.
    """
    if not bool(grid.tables[criterion].isfinite().any()):
        return {scaling.method: None for scaling in (TemperatureScaling, FocalTemperatureScaling)}
    # None marks the default grid, so that a saved calibrator does not list its 500 temperatures.
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


# ---- samples in files ----------------------------------------------------------------------------------------------


def _streamed_search(
    samples: StreamedSamples,
    gammas: Sequence[float],
    temperatures: Sequence[float],
    n_bins: int,
    estimator: Estimator,
    criterion: Proper,
    criteria: Sequence[Any],
    folds: int,
    seed: int,
) -> GridSearch:
    processes, progress = samples.processes, samples.progress
    state = grid_state(samples, gammas, temperatures, n_bins, estimator, criteria=criteria)
    copies = _copies_among(samples, folds, seed) if folds else None
    folds, n_copies = (folds, 0) if copies is None else (copies.folds, copies.n_copies)
    totals = torch.zeros(folds, len(gammas), len(temperatures), dtype=torch.float64)
    # Row indices count all rows of the files, also if only a subset is used.
    folds_of_rows = copies or functools.partial(fold_of, rows=len(samples.shards), folds=folds, seed=seed)
    begin, end = samples.share
    task = {
        "data": [part for shard in samples.shards.shards for part in (*shard.stamp(), shard.rows)],
        "classes": [samples.n_classes, samples.kind],
        "rows": [begin, end, samples.part],
        "folds": [folds, seed, criterion, n_copies],
    }
    done = progress.load(state, task, totals)
    if done and processes.rank == 0:
        progress.say(f"resumed from {progress.path}: {done} of {end - begin} rows are done")
    with stopping_between_batches(progress.path is not None) as asked_to_stop:
        for over, input, target, number in samples.batches("fit", wide=False, done=done):
            add_by_fold(state, totals, input, target, number, folds_of_rows, criterion)
            done = over
            stop = asked_to_stop()
            progress.save(state, task, done, totals, now=stop or done == end - begin)
            if stop:
                progress.say(f"{progress.path}: {done} of {end - begin} rows are done; the same command continues")
                raise KeyboardInterrupt
    processes.reduce(state)
    totals = processes.add_up(totals) if folds else totals
    grid, bound = state.compute(), state.error_bound("ece")
    del state
    # All processes use the bits of rank 0, so that they choose the same cells.
    for table in (*grid.tables.values(), bound):
        processes.from_first(table)
    _refine(samples, grid, bound)
    _measure_lowest(samples, grid, bound)
    return GridSearch(grid, bound, totals, folds_of_rows, n_copies)


def _copies_among(samples: StreamedSamples, folds: int, seed: int) -> CopiesFold | None:
    """Folds that keep copies together, from one pass over the samples; None if few are copies."""
    hashes = HashSample(len(samples), folds, seed, samples.processes.add_up)
    for batch in samples.batches("find copies"):
        hashes.keep(batch)
    return hashes.found()


def _refine(samples: StreamedSamples, grid: CalibrationGrid, bound: Tensor) -> None:
    """Recomputes the lowest ECEs with more buckets, until the lowest cells are all recomputed ones."""
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
            i: grid_state(
                samples,
                grid.gammas[i : i + 1],
                grid.temperatures[wanted[i]],
                grid.n_bins,
                grid.estimator,  # type: ignore[arg-type]  # a str in a grid
                n_buckets=_REFINED_BUCKETS,
            )
            for i in wanted.any(1).nonzero().flatten().tolist()
        }
        for _, input, target, _ in samples.batches("refine"):
            for state in states.values():
                state.update(input.to(torch.float64), target)
        for i, state in states.items():
            samples.processes.reduce(state)
            ece[i, wanted[i]] = state.compute().tables["ece"][0]
            bound[i, wanted[i]] = state.error_bound("ece")[0]
        samples.processes.from_first(ece)
        samples.processes.from_first(bound)
        refined |= wanted


def _measure_lowest(samples: StreamedSamples, grid: CalibrationGrid, bound: Tensor) -> None:
    """One pass for the exact scores of all cells that may be chosen. Exact ECEs replace those from buckets."""
    lowest = [*_lowest(grid, "ece", _MEASURED_CELLS), *_lowest(grid, "nll", 1)]
    n_temperatures = len(grid.temperatures)
    places = [divmod(place, n_temperatures) for place in torch.cat(lowest).unique().tolist()]
    cells = {(float(grid.gammas[i]), float(grid.temperatures[j])): (i, j) for i, j in places}
    _, *scored = score(samples, [(0.0, 1.0), *cells], grid.n_bins)  # no calibration, for the table
    for found, place in zip(scored, cells.values(), strict=True):
        grid.tables["ece"][place] = found.scores[f"ece_{grid.estimator}"]
        bound[place] = 0.0 if grid.estimator == "equal_width" else found.bound
    samples.processes.from_first(grid.tables["ece"])


def _lowest(grid: CalibrationGrid, criterion: str, n: int) -> list[Tensor]:
    """Indices of the n lowest cells of the table in ascending order, for gamma = 0 and for the other gammas."""
    table = grid.tables[criterion]
    plain = (grid.gammas == 0)[:, None].expand_as(table)
    found = [torch.where(group, table, torch.inf).flatten().sort(stable=True) for group in (plain, ~plain)]
    return [index[: min(n, int(value.isfinite().sum()))] for value, index in found if bool(value[0].isfinite())]


def add_by_fold(
    state: CalibrationGridState,
    totals: Tensor,
    input: Tensor,
    target: Tensor,
    number: Tensor,
    folds_of_rows: FoldOf,
    criterion: Proper,
) -> None:
    """Adds a batch to the state, fold by fold, and the increase of the criterion to the totals of its fold."""
    before = state.total(criterion) if len(totals) else None
    fold = folds_of_rows(number) if len(totals) else None
    for k in range(len(totals) or 1):
        part = slice(None) if fold is None else fold == k
        state.update(input[part], target[part])
        if before is not None:
            after = state.total(criterion)
            totals[k] += after - before
            before = after


def grid_state(
    samples: StreamedSamples,
    gammas: Sequence[float] | Tensor,
    temperatures: Sequence[float] | Tensor,
    n_bins: int,
    estimator: Estimator,
    *,
    criteria: Sequence[str] = ("ece",),
    n_buckets: int = 1024,
) -> CalibrationGridState:
    return CalibrationGridState(
        gammas,
        temperatures,
        n_bins=n_bins,
        criteria=criteria,
        estimator=estimator,
        input_kind=samples.kind,
        ignore_index=NO_LABEL,
        n_buckets=n_buckets,
    )


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
