"""Sources of rows for fits by sums over rows: in memory or read in batches, of one process or of several."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from focalkern.calibrators._fit_data import FitData

__all__ = [
    "BLOCK",
    "Batch",
    "BatchedRows",
    "MemoryRows",
    "PartOf",
    "RowSource",
    "class_counts",
    "ends_all_ranks",
    "fold_by_fold",
    "memory_rows",
    "rank_and_size",
    "rows_of",
    "sum_over_group",
]

BLOCK = 1 << 19
"""Number of float64 values in a block of rows."""

Batch = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""Input [n, C], target [n], weight [n] or None, and the indices [n] of the rows among the rows of all processes."""

Wanted = Callable[[Tensor], Tensor]
"""Maps row indices to a mask."""

PartOf = Callable[[Tensor], Tensor]
"""Maps row indices to the numbers of their parts."""


class RowSource(Protocol):
    """The rows of all processes; this process holds a part of them. Counts and sums are over all processes."""

    @property
    def n_classes(self) -> int:
        """C, the number of classes."""

    @property
    def n_rows(self) -> int:
        """N, the number of rows of all processes."""

    @property
    def weight_sum(self) -> float:
        """W, the sum of the weights of all processes."""

    @property
    def device(self) -> torch.device:
        """The device of the rows."""

    def parts(self) -> Iterator["MemoryRows"]:
        """The rows of this process in non-empty parts."""

    def add_up(self, sums: Tensor) -> Tensor:
        """The sum of ``sums`` over the processes, the same on each."""

    def select(self, wanted: Wanted) -> "RowSource":
        """The rows whose indices are wanted."""

    def every(self, stride: int) -> "RowSource":
        """The rows whose indices are multiples of the stride, in memory."""


_CPU = torch.device("cpu")


def unchanged(sums: Tensor) -> Tensor:
    """The sum over a single process: the argument itself."""
    return sums


def sum_over_group(sums: Tensor) -> Tensor:
    """The sum over the processes of the default group of torch.distributed, with the same bits on each.

    Without a group, or with one process, it is the tensor itself. RuntimeError if a process has left
    :func:`ends_all_ranks` by an error.
    """
    if rank_and_size()[1] == 1:
        return sums
    import torch.distributed as dist

    if failed := _last_failed_rank(False):
        raise RuntimeError(f"rank {failed - 1} raised an error, which its own output shows; no rank has a result")
    moved = sums.to(_device_of_group(), copy=True)
    dist.all_reduce(moved)
    dist.broadcast(moved, 0)
    return moved.to(sums.device)


@contextlib.contextmanager
def ends_all_ranks() -> Iterator[None]:
    """After an error in this block, the next sum of every other process raises: else it would wait until its timeout.

    The processes must have the same number of sums before the block, and one after it.
    """
    try:
        yield
    except Exception:
        if rank_and_size()[1] > 1:
            _last_failed_rank(True)
        raise


def _last_failed_rank(failed: bool) -> int:
    """1 + the highest rank that passes True, 0 if none does."""
    import torch.distributed as dist

    highest = torch.tensor(dist.get_rank() + 1 if failed else 0, device=_device_of_group())
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int(highest)


def _device_of_group() -> torch.device:
    import torch.distributed as dist

    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else _CPU


def rank_and_size() -> tuple[int, int]:
    """Rank and size of the default group; (0, 1) without a group."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


@dataclass(frozen=True)
class MemoryRows:
    """:class:`RowSource` in memory.

    Attributes:
        input: [n, C] logits or probabilities, or features [2, n, C] of spline scaling.
        target: [n] int64.
        weight: [n] float64.
        number: [n] int64, the indices of the rows among the rows of all processes.
        n_rows, weight_sum: totals over all processes.
        add_up: the sum over the processes.
    """

    input: Tensor
    target: Tensor
    weight: Tensor
    number: Tensor
    n_rows: int
    weight_sum: float
    add_up: Callable[[Tensor], Tensor] = unchanged

    @property
    def n_classes(self) -> int:
        return self.input.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.input.device

    def parts(self) -> Iterator["MemoryRows"]:
        if len(self.target):
            yield self

    def blocks(self) -> Iterator["MemoryRows"]:
        """The rows in blocks of about :data:`BLOCK` values."""
        n = max(1, BLOCK // self.n_classes)
        for start in range(0, len(self.target), n):
            yield self.at(slice(start, start + n))

    def at(self, rows: Tensor | slice) -> "MemoryRows":
        """A part of the rows of this process, with the totals of all processes."""
        if isinstance(rows, slice):
            columns = (self.input[rows], self.target[rows], self.weight[rows], self.number[rows])
        else:
            columns = self._columns(rows)
        return MemoryRows(*columns, self.n_rows, self.weight_sum, self.add_up)

    def _columns(self, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # A mask would be searched once per column, and indexing takes several times as long.
        places = mask.nonzero().squeeze(1) if mask.dtype == torch.bool else mask
        target, weight = self.target.index_select(0, places), self.weight.index_select(0, places)
        return self.input.index_select(-2, places), target, weight, self.number.index_select(0, places)

    def select(self, wanted: Wanted) -> "MemoryRows":
        return _counted(*self._columns(wanted(self.number)), self.add_up)

    def partition(self, part_of: PartOf, n: int) -> Callable[[Sequence[int]], "MemoryRows"]:
        """A function from the numbers of some of n parts to their rows, in the order of the parts."""
        part = part_of(self.number)
        sizes = torch.bincount(part, minlength=n).tolist()
        input, target, weight, number = self._columns(part.argsort(stable=True))
        columns = (input.split(sizes, -2), target.split(sizes), weight.split(sizes), number.split(sizes))

        def rows_of(parts: Sequence[int]) -> MemoryRows:
            of_input, *others = ([column[k] for k in parts] for column in columns)
            labels, weights, numbers = (one[0] if len(one) == 1 else torch.cat(one) for one in others)
            return _counted(torch.cat(of_input, -2), labels, weights, numbers, self.add_up)

        return rows_of

    def every(self, stride: int) -> "MemoryRows":
        return self if stride == 1 else self.select(lambda number: number % stride == 0)


def fold_by_fold(source: RowSource, fold_of: PartOf, folds: int) -> Callable[[int, bool], RowSource]:
    """A function of k and ``inside`` that returns the rows of fold k, or all others. Few rows are sorted once."""
    if isinstance(source, MemoryRows) and source.input.numel() <= 2 * BLOCK:
        rows_of, all_folds = source.partition(fold_of, folds), range(folds)
        return functools.cache(lambda k, inside: rows_of([k] if inside else [one for one in all_folds if one != k]))
    return lambda k, inside: source.select(lambda number: (fold_of(number) == k) == inside)


def _counted(
    input: Tensor, target: Tensor, weight: Tensor, number: Tensor, add_up: Callable[[Tensor], Tensor]
) -> MemoryRows:
    """The rows with totals computed from them."""
    n_rows, weight_sum = float(len(target)), float(weight.sum())
    if add_up is not unchanged:
        n_rows, weight_sum = add_up(torch.tensor([n_rows, weight_sum], dtype=torch.float64)).tolist()
    return MemoryRows(input, target, weight, number, round(n_rows), weight_sum, add_up)


def memory_rows(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    number: Tensor | None = None,
    add_up: Callable[[Tensor], Tensor] = unchanged,
) -> MemoryRows:
    """:class:`MemoryRows` with totals computed from the rows."""
    if weight is None:
        weight = torch.ones(len(input), dtype=torch.float64, device=input.device)
    if number is None:
        number = torch.arange(len(input), device=input.device)
    return _counted(input, target, weight, number, add_up)


def rows_of(data: FitData) -> MemoryRows:
    """:class:`MemoryRows` of the rows of a fit."""
    return memory_rows(data.input, data.target, data.weight)


class BatchedRows:
    """A :class:`RowSource` that reads the batches again for every pass.

    Args:
        read: a function that returns the batches of this process.
        n_classes: C.
        add_up: the sum over the processes, the same on each.
        wanted: selects rows by their index; None selects all.
        device: device of the rows.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Batch]],
        n_classes: int,
        add_up: Callable[[Tensor], Tensor] = unchanged,
        wanted: Wanted | None = None,
        device: torch.device = _CPU,
    ) -> None:
        self._read, self._wanted = read, wanted
        self.n_classes, self.add_up, self.device = n_classes, add_up, device
        mine = torch.zeros(2, dtype=torch.float64)
        for part in self.parts():
            mine += torch.tensor([float(len(part.target)), float(part.weight.sum())], dtype=torch.float64)
        n_rows, self.weight_sum = add_up(mine).tolist()
        self.n_rows = round(n_rows)

    def parts(self) -> Iterator[MemoryRows]:
        for input, target, weight, number in self._read():
            if weight is None:
                weight = torch.ones(len(input), dtype=torch.float64, device=input.device)
            part = MemoryRows(input, target, weight, number, 0, 0.0)
            if self._wanted is not None:
                part = part.at(self._wanted(number))
            if len(part.target):
                yield part

    def select(self, wanted: Wanted) -> "BatchedRows":
        before = self._wanted
        both = wanted if before is None else lambda number: before(number) & wanted(number)
        return BatchedRows(self._read, self.n_classes, self.add_up, both, self.device)

    def every(self, stride: int) -> MemoryRows:
        parts = [part.at(part.number % stride == 0) for part in self.parts()]
        if not parts:
            no_label = torch.zeros(0, dtype=torch.int64)
            return memory_rows(torch.zeros(0, self.n_classes), no_label, None, no_label, self.add_up)

        def column(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts])

        return memory_rows(column("input"), column("target"), column("weight"), column("number"), self.add_up)


def class_counts(source: RowSource, look: Callable[[MemoryRows], object] = lambda part: None) -> Tensor:
    """[C] int64, rows per class. ``look`` gets every part of the pass."""
    counts = torch.zeros(source.n_classes, dtype=torch.float64)
    for part in source.parts():
        look(part)
        counts += torch.bincount(part.target, minlength=source.n_classes).cpu()
    return source.add_up(counts).to(torch.int64)
