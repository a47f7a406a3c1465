"""Copies among rows that are read in batches: their number, and folds that keep them together."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from focalkern._diagnostics import copies_of, row_hashes
from focalkern.calibrators._folds import fold_of, fold_of_hash
from focalkern.calibrators._row_source import MemoryRows, RowSource, rank_and_size

__all__ = ["CopiesFold", "HashSample"]

# Up to so many rows of all processes every hash is kept; of more rows, about half as many.
_MOST = 1 << 20


@dataclass(frozen=True)
class CopiesFold:
    """Folds that keep copies together.

    Attributes:
        fold: int16, fold of each row of this process.
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


class HashSample:
    """Hashes of the rows of a source, collected in a pass over them; the same for all processes.

    If the rows are many, only rows with some hashes are kept, and so all copies of a row or none.
    """

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self._stride = 1 if source.n_rows <= _MOST else -(-2 * source.n_rows // _MOST)
        self._parts: list[np.ndarray] = []
        self._kept, self._first, self._n_local = 0, 0, 0

    def keep(self, part: MemoryRows) -> None:
        """Adds a part; the rows of the parts have consecutive indices."""
        if self._n_local == 0:
            self._first = int(part.number[0])
        self._n_local += len(part.target)
        hashes = row_hashes(part.input, part.target)
        hashes = hashes[:, self._is_kept(hashes[0])]
        self._kept += hashes.shape[1]
        if self._kept <= 4 * _MOST:  # more only if one output is most frequent, which is no copy
            self._parts.append(hashes)

    def folds(self, folds: int, seed: int) -> CopiesFold | None:
        """The folds, or None if few rows are copies. Many rows are read again."""
        source, (rank, size) = self._source, rank_and_size()
        counts = torch.zeros(size, dtype=torch.int64)
        counts[rank] = self._kept
        counts = source.add_up(counts)
        if int(counts.max()) > 4 * _MOST:
            return None
        of_all = torch.zeros(2, int(counts.sum()), dtype=torch.int64)
        if self._parts:
            mine = torch.from_numpy(np.concatenate(self._parts, 1).view(np.int64))
            begin = int(counts[:rank].sum())
            of_all[:, begin : begin + self._kept] = mine
        of_inputs, of_rows = source.add_up(of_all).numpy().view(np.uint64)
        number = copies_of(of_inputs, of_rows)
        if number is None:
            return None
        n_distinct = int(number.max()) + 1
        if self._stride == 1:
            n_folds = min(folds, n_distinct)
            mine = torch.from_numpy(number[self._first : self._first + self._n_local])
            fold = fold_of(mine, n_distinct, n_folds, seed).to(torch.int16)
            return CopiesFold(fold, self._first, n_folds, source.n_rows - n_distinct)
        share = 1 - n_distinct / len(number)
        fold = torch.empty(self._n_local, dtype=torch.int16)
        for part in source.parts():
            place = int(part.number[0]) - self._first
            of_part = fold_of_hash(row_hashes(part.input, part.target)[1], folds, seed)
            fold[place : place + len(part.target)] = torch.from_numpy(of_part)
        return CopiesFold(fold, self._first, folds, int(float(f"{share * source.n_rows:.1e}")))

    def _is_kept(self, hashes: np.ndarray) -> np.ndarray | slice:
        return slice(None) if self._stride == 1 else (hashes >> np.uint64(33)) % np.uint64(self._stride) == 0
