"""The folds of a cross-validation, for rows in memory and rows that are read in batches."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import integer

__all__ = ["check_folds", "fold_of"]

# A larger number of folds would take days.
MOST_FOLDS = 1000

_ROUNDS = 8


def check_folds(op: str, folds: Any, seed: Any) -> tuple[int, int]:
    return integer(op, "folds", folds, 2, MOST_FOLDS), integer(op, "seed", seed)


def fold_of(number: Tensor, rows: int, folds: int, seed: int) -> Tensor:
    """The folds of some rows: their places in a random order of all rows, modulo the number of folds.

    A permutation that is computed by number needs no list of all rows, so that rows in memory and rows in files have
    the same folds. It is a Feistel network on the next power of 4, applied again where it leads beyond the last row.
    The folds do not depend on the labels: with folds stratified by class the rows of a fold would have the class
    frequencies of the rest, and a fit of class intercepts would look better than it is on new rows.

    Args:
        number: int64, the numbers of these rows, from 0 to rows - 1.
        rows: the number of all rows.
        folds: how many folds; their sizes differ by at most one.
        seed: of the order.

    Returns:
        int64, as number.
    """
    keys = np.random.default_rng(seed % 2**63).integers(2**62, size=_ROUNDS).tolist()
    bits = max(1, ((rows - 1).bit_length() + 1) // 2)
    mask = 2**bits - 1

    def permuted(place: Tensor) -> Tensor:
        left, right = place >> bits, place & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << bits | right

    place = permuted(number)
    while bool((beyond := place >= rows).any()):
        place = torch.where(beyond, permuted(place), place)
    return place % folds


def _mixed(value: Tensor) -> Tensor:
    """Bits that all depend on all bits of the value; the products wrap around."""
    for factor in (-0x61C8864680B583EB, -0x40A7B892E31B1A47):  # two odd numbers with about 32 of 64 bits set
        value = value * factor
        value = value ^ (value >> 32)
    return value
