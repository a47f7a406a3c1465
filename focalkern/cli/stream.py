"""Sets of rows larger than memory: searched, measured, shared between processes, and resumed where they were left."""

import contextlib
import datetime
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from focalkern import metrics
from focalkern._atomic import write_atomically
from focalkern.calibrators import InputKind
from focalkern.cli.files import InputError
from focalkern.cli.shards import ShardedRows, is_pattern
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.streaming import CalibrationGridState

__all__ = ["Processes", "Progress", "StreamedSet", "wants_streaming"]

_INPUT_BYTES = 32 << 20  # of a batch, as it is in the file
_FLOAT64_BYTES = 16 << 20  # of a batch in float64, of which the figures need several
_MOST_ROWS = 1 << 16

_STATE_FORMAT = 1
_NOTHING = torch.iinfo(torch.int64).min  # no label is ignored: every row counts

# After the search the cells that look best are found more exactly: in another pass these few have many buckets each,
# 100 MB together. A pass may bring down what looked best, and then there is another one.
_REFINEMENTS = 4
_ENOUGH = 1e-6
_REFINED_CELLS = 32  # of plain temperature scaling, and as many of the others
_REFINED_BUCKETS = 1 << 16

# In memory there are several copies of the input, some of them in float64.
_SHARE_OF_MEMORY = 8


class Processes:
    """The processes that share the work, as torchrun starts them; one where it did not.

    Every rank reads its share of the rows. Rank 0 gets all results, prints and writes.

    Args:
        timeout: seconds that a process waits for the others.
        alone: one, whatever torchrun has started.
    """

    def __init__(self, timeout: float, *, alone: bool = False) -> None:
        self.rank, self.size = 0, 1 if alone else int(os.environ.get("WORLD_SIZE", "1"))
        self.timeout = timeout
        if self.size == 1:
            return
        import torch.distributed as dist

        with self._clearly("start"):
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
        self.rank = dist.get_rank()

    @contextlib.contextmanager
    def _clearly(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise InputError(
                f"rank {self.rank} of {self.size}: another process has died, or did not answer within "
                f"{self.timeout:g} s ({what}); nothing was written: {reason}"
            ) from error

    def share(self, rows: int) -> tuple[int, int]:
        """The rows [begin, end) of this process."""
        return rows * self.rank // self.size, rows * (self.rank + 1) // self.size

    def reduce(self, state: CalibrationGridState) -> None:
        if self.size > 1:
            with self._clearly("sums of the grid"):
                state.all_reduce()

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, on each of them."""
        if self.size > 1:
            import torch.distributed as dist

            with self._clearly("sums of the figures"):
                dist.all_reduce(tensor)
        return tensor

    def from_first(self, tensor: Tensor) -> Tensor:
        """What rank 0 has, to the bit, on each of them."""
        if self.size > 1:
            import torch.distributed as dist

            with self._clearly("the tables"):
                dist.broadcast(tensor, 0)
        return tensor

    def to_first(self, tensor: Tensor) -> Tensor:
        """[n_i] of every process in the order of the ranks, on rank 0; nothing on the others."""
        if self.size == 1:
            return tensor
        import torch.distributed as dist

        with self._clearly("confidences"):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(tensor)]))
            longest = max(int(length) for length in lengths)
            padded = torch.nn.functional.pad(tensor, (0, longest - len(tensor)))
            parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
            dist.gather(padded, parts)
        if parts is None:
            return tensor[:0]
        return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])

    def close(self) -> None:
        if self.size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


class Progress:
    """A state file that is written now and then, so that the same command can go on where it was stopped.

    Args:
        path: the file, or None for none. With several processes each has its own, FILE.0-of-2 and FILE.1-of-2.
        every: seconds between two writes.
        processes: who shares the work.
    """

    def __init__(self, path: Path | None, every: float, processes: Processes) -> None:
        self.path = path
        if path is not None and processes.size > 1:
            self.path = path.with_name(f"{path.name}.{processes.rank}-of-{processes.size}")
        self.every = every
        self._written = time.monotonic()

    def load(self, state: CalibrationGridState, task: dict[str, Any]) -> int:
        """Puts what the file has into ``state``; returns how many rows of the task that is, 0 without a file."""
        if self.path is None or not self.path.exists():
            return 0
        try:
            found = torch.load(io.BytesIO(self.path.read_bytes()), weights_only=True)
            if found["format"] != _STATE_FORMAT:
                raise InputError(f"{self.path}: expected format {_STATE_FORMAT} of a state, found {found['format']!r}")
            known, content, done = found["task"], found["state"], int(found["done"])
        except InputError:
            raise
        except Exception as error:  # whatever torch.load says of a file of another kind
            raise InputError(
                f"{self.path}: expected a state that this command has written, found something else"
            ) from error
        for name, value in task.items():
            if known.get(name) != value:
                raise InputError(
                    f"{self.path}: expected the state of this command, found one of other {name}, "
                    f"{_first_difference(known.get(name), value)}; delete it, or name another file"
                )
        try:
            state.load_state_dict(content)
        except ValueError as error:
            reason = str(error).partition("state_dict ")[2]
            raise InputError(
                f"{self.path}: expected the state of this grid: it {reason}; delete it, or name another file"
            ) from error
        return done

    def save(self, state: CalibrationGridState, task: dict[str, Any], done: int, *, now: bool) -> None:
        if self.path is None or not (now or time.monotonic() - self._written >= self.every):
            return
        stream = io.BytesIO()
        torch.save({"format": _STATE_FORMAT, "task": task, "done": done, "state": state.state_dict()}, stream)
        write_atomically(self.path, stream.getvalue())
        self._written = time.monotonic()


def _first_difference(found: Any, expected: Any) -> str:
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        found, expected = next(pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1])
    shown = [text if len(text) <= 60 else f"{text[:57]}..." for text in (repr(found), repr(expected))]
    return f"{shown[0]} in place of {shown[1]}"


@dataclass
class _Measured:
    """What one calibrator does to the rows of this process, and in the end of all of them."""

    nll: float = 0.0
    brier: float = 0.0
    excess: Tensor = field(default_factory=lambda: torch.zeros(0))  # [C M]: probability - [target = class], per bin
    confidence: Tensor = field(default_factory=lambda: torch.zeros(0))  # [N]


class StreamedSet:
    """As :class:`focalkern.cli.files.LogitSet`, with rows that are read when they are needed, and then forgotten.

    Args:
        rows: where they are.
        processes, progress: who shares the work, and where it is saved.
        kept: [len(rows)] bool, those that count; all of them when None.
        part: in words, which rows these are.
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
        self._bounds: CalibrationGrid | None = None
        self._measured: dict[tuple[float, float], _Measured] = {}
        self._n_bins = 0
        self.correct = torch.zeros(0, dtype=torch.bool)
        self.class_counts = torch.zeros(0, dtype=torch.int64)
        self.impossible_targets = 0
        self.looks_like_probs = False

    def __len__(self) -> int:
        return len(self._rows) if self._kept is None else int(np.count_nonzero(self._kept))

    def rows(self, index: Tensor, part: str) -> "StreamedSet":
        """The rows of ``index``, called ``part``."""
        kept = np.zeros(len(self._rows), dtype=np.bool_)
        kept[index.numpy()] = True
        return StreamedSet(self._rows, self._processes, self._progress, kept, part)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def _batches(
        self, what: str, bytes_per_class: int, most_bytes: int, done: int = 0
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(rows of the share that are over after it, input, labels) of the batches after the first ``done`` rows."""
        begin, end = self._processes.share(len(self._rows))
        at_once = max(1, min(_MOST_ROWS, most_bytes // (bytes_per_class * self.n_classes)))
        bar = _bar(f"{what} {self.name or self.source}", end - begin, done) if self._processes.rank == 0 else None
        try:
            for first, input, target in self._rows.batches(begin + done, end, at_once):
                after = first + len(target)
                if self._kept is not None:
                    kept = torch.from_numpy(self._kept[first:after])
                    input, target = input[kept], target[kept]
                yield after - begin, input, target
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
        estimator: Literal["equal_width", "equal_mass", "equal_mass_interp"],
    ) -> CalibrationGrid:
        """ECE and NLL of every cell; ``bound_of`` says how far the ECE can be off."""
        state = CalibrationGridState(
            gammas,
            temperatures,
            n_bins=n_bins,
            criteria=("ece", "nll"),
            estimator=estimator,
            input_kind=self.kind,
            ignore_index=_NOTHING,
        )
        begin, end = self._processes.share(len(self._rows))
        task = {
            "data": [part for shard in self._rows.shards for part in (*shard.stamp(), shard.rows)],
            "classes": [self.n_classes, self.kind],
            "rows": [begin, end, self.part],
        }
        done = self._progress.load(state, task)
        if done and self._processes.rank == 0:
            print(f"resumed from {self._progress.path}: {done} of {end - begin} rows are done", file=sys.stderr)
        with _stopping_between_batches(self._progress.path is not None) as asked_to_stop:
            for over, input, target in self._batches("fit", 4, _INPUT_BYTES, done):
                state.update(input, target)
                done = over
                stop = asked_to_stop()
                self._progress.save(state, task, done, now=stop or done == end - begin)
                if stop:
                    print(
                        f"{self._progress.path}: {done} of {end - begin} rows are done; the same command goes on",
                        file=sys.stderr,
                    )
                    raise KeyboardInterrupt
        self._processes.reduce(state)
        grid, bound = state.compute(), state.error_bound("ece")
        del state
        for _ in range(_REFINEMENTS):
            if not self._refine(grid, bound):
                break
        for table in grid.tables.values():
            self._processes.from_first(table)
        self._bounds = CalibrationGrid(grid.gammas, grid.temperatures, {"ece": bound}, n_bins, estimator)
        return grid

    def _refine(self, grid: CalibrationGrid, bound: Tensor) -> bool:
        """Another pass over the rows for the cells that look best; changes both in place, unless all is known well."""
        ece = grid.tables["ece"]
        wanted = torch.zeros_like(ece, dtype=torch.bool)
        known = True
        plain = grid.gammas == 0
        for group in (plain, ~plain):
            if bool(group.any()):
                cells = torch.where(group[:, None], ece, torch.inf).flatten()
                first = cells.topk(min(_REFINED_CELLS, int(group.sum()) * ece.shape[1]), largest=False, sorted=True)
                wanted.view(-1)[first.indices] = True
                known = known and bool(bound.flatten()[first.indices[0]] <= _ENOUGH)
        # From the first process, so that all of them take part in the same sums.
        agreed = self._processes.from_first(torch.tensor([int(known)]))
        wanted = self._processes.from_first((wanted & (bound > _ENOUGH)).to(torch.uint8)).bool()
        if bool(agreed):
            return False
        states = [
            CalibrationGridState(
                grid.gammas[i : i + 1],
                grid.temperatures[wanted[i]],
                n_bins=grid.n_bins,
                criteria=("ece",),
                estimator=grid.estimator,  # type: ignore[arg-type]  # a str there
                input_kind=self.kind,
                ignore_index=_NOTHING,
                n_buckets=_REFINED_BUCKETS,
            )
            if bool(wanted[i].any())
            else None
            for i in range(len(grid.gammas))
        ]
        for _, input, target in self._batches("refine", 4, _INPUT_BYTES):
            for state in states:
                if state is not None:
                    state.update(input, target)
        for i, state in enumerate(states):
            if state is None:
                continue
            self._processes.reduce(state)
            ece[i, wanted[i]] = state.compute().tables["ece"][0]
            bound[i, wanted[i]] = state.error_bound("ece")[0]
        return True

    def bound_of(self, gamma: float, temperature: float) -> float:
        """How far the ECE of that cell of the grid can be off."""
        assert self._bounds is not None
        i = self._bounds.gammas.tolist().index(gamma)
        j = self._bounds.temperatures.tolist().index(temperature)
        return float(self._bounds.tables["ece"][i, j])

    # ---- figures ---------------------------------------------------------------------------------------------------

    def measure(self, cells: Sequence[tuple[float, float]], n_bins: int) -> None:
        """One pass over the rows, in float64, for everything that is later asked of these (gamma, temperature)."""
        wanted = [cell for cell in dict.fromkeys(cells) if cell not in self._measured or self._n_bins != n_bins]
        if not wanted:
            return
        n_places = self.n_classes * n_bins
        edges = torch.tensor([k / n_bins for k in range(1, n_bins)], dtype=torch.float64)
        offsets = torch.arange(self.n_classes) * n_bins
        found = {cell: _Measured(excess=torch.zeros(n_places, dtype=torch.float64)) for cell in wanted}
        confidences: dict[tuple[float, float], list[Tensor]] = {cell: [] for cell in wanted}
        correct = []
        facts = torch.zeros(3, dtype=torch.int64)  # impossible targets, rows, rows that look like probabilities
        per_class = torch.zeros(self.n_classes, dtype=torch.int64)
        for _, input, target in self._batches("measure", 8, _FLOAT64_BYTES):
            if not len(target):
                continue
            rows = torch.arange(len(target))
            impossible = -torch.inf if self.kind == "logits" else 0.0
            alike = (input >= 0).all(1) & ((input.sum(1, dtype=torch.float64) - 1).abs() <= 1e-3)
            facts += torch.tensor([int((input[rows, target] == impossible).sum()), len(target), int(alike.sum())])
            per_class += torch.bincount(target, minlength=self.n_classes)
            correct.append(input.argmax(-1) == target)
            input = input.to(torch.float64)
            for (gamma, temperature), one in found.items():
                log_probs = focal_calibration_map(input, gamma, temperature, input_kind=self.kind, log=True)
                one.nll += float(metrics.nll(log_probs, target, log=True)) * len(target)
                probs = log_probs.exp_()
                one.brier += float(metrics.brier_score(probs, target)) * len(target)
                confidences[gamma, temperature].append(probs.amax(-1))
                place = torch.bucketize(probs, edges).add_(offsets)
                one.excess += torch.bincount(place.view(-1), weights=probs.view(-1), minlength=n_places)
                one.excess -= torch.bincount(place[rows, target], minlength=n_places)
        add_up, to_first = self._processes.add_up, self._processes.to_first
        for cell, one in found.items():
            one.nll, one.brier = add_up(torch.tensor([one.nll, one.brier], dtype=torch.float64)).tolist()
            add_up(one.excess)
            one.confidence = to_first(_joined(confidences.pop(cell), torch.float64))
        self.correct = to_first(_joined(correct, torch.bool).to(torch.uint8)).bool()
        self.class_counts = add_up(per_class)
        self.impossible_targets, rows_seen, alike_rows = add_up(facts).tolist()
        self.looks_like_probs = self.kind == "logits" and rows_seen == alike_rows
        self._measured.update(found)
        self._n_bins = n_bins

    def confidence(self, gamma: float, temperature: float) -> Tensor:
        """[N] float64, of a measured cell."""
        return self._measured[gamma, temperature].confidence

    def figures(self, gamma: float, temperature: float, n_bins: int) -> dict[str, Any]:
        """The figures of one calibrator, as :func:`focalkern.cli.report.figures`."""
        self.measure([(gamma, temperature)], n_bins)
        one = self._measured[gamma, temperature]
        n = len(self)
        result: dict[str, Any] = {
            "accuracy": metrics.accuracy(correct=self.correct),
            "nll": one.nll / n,
            "brier": one.brier / n,
            "classwise_ece_equal_width": one.excess.abs().sum() / (n * self.n_classes),
        }
        for estimator in metrics.ESTIMATORS:
            result[f"ece_{estimator}"] = metrics.expected_calibration_error(
                confidence=one.confidence, correct=self.correct, n_bins=n_bins, estimator=estimator
            )
        return result


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


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)


def _bar(what: str, total: int, done: int) -> Any:
    """A progress bar on stderr where that is a terminal and tqdm is installed."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=what, total=total, initial=done, unit="row", unit_scale=True, leave=False)


@contextlib.contextmanager
def _stopping_between_batches(resumable: bool) -> Iterator[Callable[[], bool]]:
    """Takes the first Ctrl-C or SIGTERM as a wish to save and stop; a second one stops at once."""
    asked: list[int] = []
    if not resumable:
        yield lambda: False
        return

    def ask(number: int, _frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
