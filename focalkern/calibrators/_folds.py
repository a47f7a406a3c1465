"""The folds of a cross-validation, for rows in memory and rows that are read in batches."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import integer

__all__ = ["check_folds", "fold_of", "fold_of_hash", "folds_of_all"]

Places = np.ndarray[tuple[int], np.dtype[np.int64]]

# More folds are a mistake: they would take days.
MOST_FOLDS = 1000

_ROUNDS = 8


def check_folds(op: str, folds: Any, seed: Any) -> tuple[int, int]:
    return integer(op, "folds", folds, 2, MOST_FOLDS), integer(op, "seed", seed)


@functools.lru_cache(maxsize=1)
def folds_of_all(rows: int, folds: int, seed: int) -> Tensor:
    """The folds of all rows, [rows] int16; kept, because networks of a sweep often have the same number of rows."""
    return fold_of(torch.arange(rows), rows, folds, seed).to(torch.int16)


def fold_of(number: Tensor, rows: int, folds: int, seed: int) -> Tensor:
    """The fold of each row: its position in a random permutation of all rows, modulo the number of folds.

    The permutation is a Feistel network on the next power of 4, applied again to results beyond the last row. It needs
    no list of all rows, so rows in memory and rows in files get the same folds. The folds do not depend on the labels:
    in folds stratified by class, each fold has the class frequencies of the others, and the cross-validated loss of
    class intercepts is too low.

    Args:
        number: int64, row numbers from 0 to rows - 1.
        rows: total number of rows.
        folds: number of folds; their sizes differ by at most one.
        seed: random seed of the permutation.

    Returns:
        int64, as number.
    """
    keys = np.random.default_rng(seed % 2**63).integers(2**62, size=_ROUNDS).tolist()
    bits = max(1, ((rows - 1).bit_length() + 1) // 2)
    mask = 2**bits - 1

    def permuted(place: Places) -> Places:
        left, right = place >> bits, place & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << bits | right

    # In NumPy: these are hundreds of operations on few numbers, and torch's take longer to call.
    place = permuted(number.cpu().numpy())
    beyond = np.flatnonzero(place >= rows)
    while beyond.size:
        place[beyond] = permuted(place[beyond])
        beyond = beyond[place[beyond] >= rows]
    return torch.from_numpy(place % folds).to(number.device)


def fold_of_hash(hashes: np.ndarray[Any, Any], folds: int, seed: int) -> np.ndarray[Any, Any]:
    """[N] int16: the fold of each row by its hash [N] uint64, so that copies of a row are in one fold."""
    key = np.random.default_rng(seed % 2**63).integers(2**62)
    return (_mixed(hashes.view(np.int64) ^ key) % folds).astype(np.int16)


def _mixed(value: Places) -> Places:
    """A hash of the value: every bit depends on all of its bits. The products overflow on purpose."""
    for factor in (-0x61C8864680B583EB, -0x40A7B892E31B1A47):  # two odd numbers with about 32 of 64 bits set
        value = value * factor
        value = value ^ (value >> 32)
    return value
