"""Every cell of the map on the reported rows: its figures, and the bins behind its reliability diagram."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.study.rows import Rows

__all__ = ["CRITERIA", "Cells", "cells_on", "thinned"]

CRITERIA = ("ece", "nll", "brier")
# What the map may cost: numbers (rows times classes times cells) that are calibrated, a few seconds of two cores; but a
# sixteenth of the search, where that has taken so much longer already. And bytes of the page.
_NUMBERS = 5_000_000_000
_SHARE_OF_SEARCH = 16
_BYTES = 1_400_000
_PER_CELL, _PER_BIN = 36, 10  # at most, as the page keeps them


@dataclass(frozen=True)
class Cells:
    """What every cell of a map does to a set of rows.

    Attributes:
        gammas, temperatures: [G] and [T] float64, ascending.
        count, correct: [G, T, M] int64, rows in every bin of equal width, and how many of them are correct.
        confidence: [G, T, M] float64, the sum of their confidences.
        tables: [G, T] float64 each, by criterion: ece (of these bins), nll and brier.
        n_samples: rows.
        every: of the temperatures that were searched, the map has one in so many (and those that were chosen).
    """

    gammas: Tensor
    temperatures: Tensor
    count: Tensor
    correct: Tensor
    confidence: Tensor
    tables: dict[str, Tensor]
    n_samples: int
    every: int

    def place(self, gamma: float | None, temperature: float | None) -> tuple[int, int] | None:
        """Row and column of a cell; None where the map does not have it."""
        if gamma is None or temperature is None:
            return None
        row, column = (self.gammas == gamma).nonzero(), (self.temperatures == temperature).nonzero()
        return (int(row[0]), int(column[0])) if len(row) and len(column) else None


def thinned(grid: CalibrationGrid, rows: Rows, n_bins: int, kept: Sequence[float]) -> tuple[Tensor, Tensor, int]:
    """Gammas and temperatures of the map, ascending, and of how many temperatures it has one.

    All of those that were searched, where that costs seconds and less than 3 MB; else one temperature in so many, and
    in any case those that are to be ``kept``.
    """
    gammas, temperatures = grid.gammas.cpu().double().unique(), grid.temperatures.cpu().double().unique()
    searched = len(gammas) * len(temperatures)
    most = max(_NUMBERS // max(1, len(rows) * rows.n_classes), searched // _SHARE_OF_SEARCH)
    most = min(most, _BYTES // (_PER_CELL + _PER_BIN * n_bins))
    every = max(1, -(-searched // max(1, most)))
    wanted = torch.zeros(len(temperatures), dtype=torch.bool)
    wanted[every // 2 :: every] = True  # from the middle: neither border is more interesting
    wanted |= torch.isin(temperatures, torch.tensor(kept, dtype=torch.float64))
    return gammas, temperatures[wanted], every


def cells_on(rows: Rows, gammas: Tensor, temperatures: Tensor, n_bins: int, every: int = 1) -> Cells:
    """One pass over the rows, in float64, for all cells at once."""
    sums = rows.cell_sums(gammas, temperatures, n_bins)
    assert sums.count is not None
    assert sums.correct is not None
    assert sums.confidence is not None
    assert sums.nll is not None
    assert sums.brier is not None
    n = len(rows)
    tables = {
        "ece": (sums.correct - sums.confidence).abs().sum(-1) / n,
        "nll": sums.nll / n,
        "brier": sums.brier / n,
    }
    return Cells(gammas, temperatures, sums.count, sums.correct, sums.confidence, tables, n, every)
