"""Copies among rows that are read in batches: their number, and folds that keep them together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from focalkern._diagnostics import copies_of, row_hashes
from focalkern.calibrators._folds import fold_of, fold_of_hash
from focalkern.calibrators._row_source import rank_and_size

__all__ = ["CopiesFold", "HashSample"]

# Up to so many rows of all processes every hash is kept; of more rows, about half as many.
_MOST = 1 << 20


@dataclass(frozen=True)
class CopiesFold:
    """Folds that keep copies together.

    Attributes:
        fold: int16, folds of the rows of this process, from its first row to its last.
        first: index of the first of these rows.
        folds: number of folds.
        n_copies: number of copies; two digits of an estimate if the rows are many.
    """

    fold: Tensor
    first: int
    folds: int
    n_copies: int

    def __call__(self, number: Tensor) -> Tensor:
        """int64, the folds of rows with these indices."""
        return self.fold.to(number.device)[number - self.first].to(torch.int64)


class _Rows(Protocol):
    """Rows [n, C], their labels [n], and their indices [n] among the rows of all processes."""

    @property
    def input(self) -> Tensor: ...

    @property
    def target(self) -> Tensor: ...

    @property
    def number(self) -> Tensor: ...


class HashSample:
    """Hashes of rows, collected in one pass over them; the same for all processes.

    If the rows are many, only rows with some hashes are kept, and so all copies of a row or none. The folds of these
    rows are computed from their hashes in the same pass.

    Args:
        n_rows: number of rows of all processes.
        folds, seed: as for :func:`fold_of`.
        add_up: the sum over the processes.
    """

    def __init__(self, n_rows: int, folds: int, seed: int, add_up: Callable[[Tensor], Tensor]) -> None:
        self._n_rows, self._folds, self._seed, self._add_up = n_rows, folds, seed, add_up
        self._stride = 1 if n_rows <= _MOST else -(-2 * n_rows // _MOST)
        self._first, self._end = 0, 0  # the indices of the rows of this process lie in [first, end)
        self._numbers: list[Tensor] = []
        self._hashes: list[np.ndarray] = []
        self._folds_of_hashes: list[Tensor] = []
        self._kept = 0

    def keep(self, rows: _Rows) -> None:
        """Adds rows whose indices ascend and exceed those before."""
        if len(rows.target) == 0:
            return
        number, hashes = rows.number.cpu(), row_hashes(rows.input, rows.target)
        if self._end == 0:
            self._first = self._end = int(number[0])
        end = int(number[-1]) + 1
        if self._stride == 1:
            self._numbers.append(number)
        else:
            fold = torch.from_numpy(fold_of_hash(hashes[1], self._folds, self._seed))
            self._folds_of_hashes.append(_placed(fold, number, self._end, end))
            hashes = hashes[:, (hashes[0] >> np.uint64(33)) % np.uint64(self._stride) == 0]
        self._end = end
        self._kept += hashes.shape[1]
        if self._kept <= 4 * _MOST:  # more only if one output is most frequent, which is no copy
            self._hashes.append(hashes)

    def found(self) -> CopiesFold | None:
        """The folds, or None if few rows are copies."""
        rank, size = rank_and_size()
        counts = torch.zeros(size, dtype=torch.int64)
        counts[rank] = self._kept
        counts = self._add_up(counts)
        if int(counts.max()) > 4 * _MOST:
            return None
        of_all, begin = torch.zeros(2, int(counts.sum()), dtype=torch.int64), int(counts[:rank].sum())
        mine = slice(begin, begin + self._kept)
        if self._hashes:
            of_all[:, mine] = torch.from_numpy(np.concatenate(self._hashes, 1).view(np.int64))
        of_inputs, of_rows = self._add_up(of_all).numpy().view(np.uint64)
        copy_of = copies_of(of_inputs, of_rows)
        if copy_of is None:
            return None
        n_distinct, folds = int(copy_of.max()) + 1, self._folds
        no_row = torch.empty(0, dtype=torch.int64)
        if self._stride == 1:
            folds, n_copies = min(folds, n_distinct), len(copy_of) - n_distinct
            fold = fold_of(torch.from_numpy(copy_of[mine]), n_distinct, folds, self._seed).to(torch.int16)
            fold = _placed(fold, torch.cat([no_row, *self._numbers]), self._first, self._end)
        else:
            n_copies = int(float(f"{(1 - n_distinct / len(copy_of)) * self._n_rows:.1e}"))
            fold = torch.cat([no_row.to(torch.int16), *self._folds_of_hashes])
        return CopiesFold(fold, self._first, folds, n_copies)


def _placed(fold: Tensor, number: Tensor, begin: int, end: int) -> Tensor:
    """The folds of the indices in [begin, end), from those of the rows; 0 for indices without a row."""
    placed = torch.zeros(end - begin, dtype=torch.int16)
    placed[number - begin] = fold
    return placed
