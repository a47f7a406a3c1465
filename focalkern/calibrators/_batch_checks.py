"""Checks of batches: whether every pass gives the same rows, and the checks of rows and labels of ``fit``."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from focalkern._diagnostics import input_problems, label_problems, likely_sum, sampled_parts
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._row_source import MemoryRows, RowSource

__all__ = ["RowSample", "SameRows"]

# Relative to the largest logit that is compared: above the rounding errors of a model in half precision, which may
# differ between passes, and far below the differences of other rows.
_TOLERANCE = 0.02


class _Checksum(NamedTuple):
    """The sum of the labels of a batch times their places, the number of rows, and logits of a few rows."""

    labels: int
    n_rows: int
    logits: list[list[float]]

    def agrees(self, other: "_Checksum") -> bool:
        if self == other:
            return True
        both = [pair for rows in zip(self.logits, other.logits, strict=False) for pair in zip(*rows, strict=True)]
        scale = max((abs(one) for one, _ in both if math.isfinite(one)), default=0.0)
        near = (math.isclose(one, two, rel_tol=0.0, abs_tol=_TOLERANCE * scale) for one, two in both)
        return self[:2] == other[:2] and all(near)


class SameRows:
    """A function that reads the batches, and raises if a pass does not give the rows of the first pass.

    A fit needs the same rows in the same order in every pass: folds are chosen by row number, and a search compares the
    sums of different passes. The second pass compares every batch, which finds a loader that shuffles. Each later pass
    compares one batch, and the number of batches.

    Args:
        name: the calibrator that the error names.
        read: reads the batches.
    """

    def __init__(self, name: str, read: Callable[[], Iterator[FitData]]) -> None:
        self._name, self._read = name, read
        self._first: list[_Checksum] = []
        self._passes = 0

    def __call__(self) -> Iterator[FitData]:
        first, number, found = self._first, self._passes, 0
        self._passes += 1
        for data in self._read():
            if number == 0:
                first.append(_checksum(data))
            elif found == len(first):
                raise self._error(f"more than the {len(first)} batches of the first pass")
            elif (number == 1 or found == number % len(first)) and not _checksum(data).agrees(first[found]):
                raise self._error(f"other rows in batch {found} than in the first pass")
            found += 1
            yield data
        if found < len(first):
            raise self._error(f"{found} batches after {len(first)} in the first pass")

    def _error(self, got: str) -> ValueError:
        return ValueError(
            f"{self._name}: batches must give the same rows in the same order in every pass, got {got}; pass a "
            "DataLoader with shuffle=False, a list, or a function that returns a new iterator over the same rows"
        )


def _checksum(data: FitData) -> _Checksum:
    n_rows, places = len(data.target), _places(len(data.target), data.target.device)
    # torch has no inner product of integers on CUDA.
    labels = data.target.dot(places) if data.target.is_cpu else (data.target * places).sum()
    # Few rows and classes, because sums of all would take as long as the pass over a small batch.
    return _Checksum(int(labels), n_rows, data.input[:: max(1, n_rows // 8), :4].tolist())


@functools.lru_cache(2)
def _places(n_rows: int, device: torch.device) -> Tensor:
    return torch.arange(1, n_rows + 1, device=device)


class RowSample:
    """The rows of a source that the checks of ``fit`` read, the same for all processes. They are kept during a pass.

    Args:
        source: the rows.
    """

    def __init__(self, source: RowSource) -> None:
        self._parts = sampled_parts(source.n_rows, source.n_classes)
        self._n_rows = source.n_rows
        kept = sum(end - begin for begin, end in self._parts)
        # Input and label of each row: rows of other processes stay 0, so that a sum over the processes collects all.
        self._table = torch.zeros(kept, source.n_classes + 1, dtype=torch.float64, device=source.device)

    def keep(self, part: MemoryRows) -> None:
        """Copies the sampled rows of a part; its rows have consecutive indices."""
        first, place = int(part.number[0]), 0
        for begin, end in self._parts:
            low, high = max(begin, first), min(end, first + len(part.target))
            if low < high:
                to, of = slice(place + low - begin, place + high - begin), slice(low - first, high - first)
                self._table[to, :-1], self._table[to, -1] = part.input[of], part.target[of]
            place += end - begin

    def gather(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Collects the rows of all processes."""
        self._table = add_up(self._table)

    def problems(self, input_kind: str, *, assumed: bool) -> list[str]:
        """The sentences of the warning of ``fit`` on rows and labels."""
        input, labels = self._table[:, :-1], self._table[:, -1].to(torch.int64)
        words = [*input_problems(input, input_kind, assumed=assumed), *label_problems(input, labels)]
        if len(labels) == self._n_rows:
            return words
        return [f"in a sample of {len(labels):,} of the {self._n_rows:,} rows, {one}" for one in words]

    def looks_like_probs(self) -> bool:
        return likely_sum(self._table[:, :-1]) != 0
