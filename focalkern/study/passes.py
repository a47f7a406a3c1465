"""One pass after another over rows larger than memory, shared between processes."""

import sys
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from focalkern.calibrators import InputKind
from focalkern.files.shards import ShardedRows
from focalkern.study.processes import Processes, Progress

__all__ = ["Passes"]

# Numbers in a batch: of the search, and of what is done in float64 and needs several copies.
_SEARCH_BATCH = 1 << 23
_FLOAT64_BATCH = 1 << 21
_MOST_ROWS = 1 << 16
# Rows that are looked at, in blocks of neighbours evenly spaced; fewer where that would be many numbers.
_SAMPLED_ROWS, _SAMPLED_NUMBERS = 1 << 16, 1 << 21
_SAMPLED_BLOCKS = 16


class Passes:
    """Rows that are read when they are needed, and then forgotten.

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

    def __len__(self) -> int:
        return len(self._rows) if self._kept is None else int(np.count_nonzero(self._kept))

    def rows(self, index: Tensor, part: str) -> Self:
        """The rows of ``index``, called ``part``."""
        kept = np.zeros(len(self._rows), dtype=np.bool_)
        kept[index.numpy()] = True
        return type(self)(self._rows, self._processes, self._progress, kept, part)

    def sample(self) -> tuple[Tensor, Tensor]:
        """Input and labels of all rows, or of 65,536 of them (of two million numbers)."""
        n_rows = len(self._rows)
        block = max(1, min(_SAMPLED_ROWS, _SAMPLED_NUMBERS // self.n_classes) // _SAMPLED_BLOCKS)
        if n_rows <= _SAMPLED_BLOCKS * block:
            parts = [(0, n_rows)]
        else:
            starts = [(n_rows - block) * place // (_SAMPLED_BLOCKS - 1) for place in range(_SAMPLED_BLOCKS)]
            parts = [(start, start + block) for start in starts]
        inputs, labels = [], []
        for begin, end in parts:
            for first, input, target in self._rows.batches(begin, end, end - begin):
                kept: slice | Tensor = slice(None)
                if self._kept is not None:
                    kept = torch.from_numpy(self._kept[first : first + len(target)])
                inputs.append(input[kept].clone())
                labels.append(target[kept].to(torch.int64))
        return torch.cat(inputs), torch.cat(labels)

    def _batches(self, what: str, *, wide: bool = True, done: int = 0) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """(rows of the share that are over after it, input, labels, numbers of the rows) of the batches after the first
        ``done`` rows; smaller ones for what is done in float64, which is ``wide``."""
        numbers = _FLOAT64_BATCH if wide else _SEARCH_BATCH
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


def _bar(what: str, total: int, done: int) -> Any:
    """A progress bar on stderr where that is a terminal and tqdm is installed."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=what, total=total, initial=done, unit="row", unit_scale=True, leave=False)
