"""The tables of a grid out of the sums of its cells, and how far they can be off."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from focalkern.ops.calibration_sums import CalibrationSums
from focalkern.streaming._bins import Bins

__all__ = ["Cut", "bounds_of", "tables_of"]

# Numbers that are cumulated at a time.
_AT_ONCE = 2**15


@dataclass(frozen=True)
class Cut:
    """How the samples of a cell become bins.

    Attributes:
        n_bins, estimator: of the ECE.
        sketched: whether the sums have buckets to be cut in place of the bins.
        n_samples: rows seen.
    """

    n_bins: int
    estimator: str
    sketched: bool
    n_samples: int


def tables_of(sums: CalibrationSums, cut: Cut) -> dict[str, Tensor]:
    """Every criterion that is summed: [Gg, Gt] for ``nll`` and ``brier``, [Gg Gt] for ``ece`` and ``mce``."""
    tables = {name: tensor / cut.n_samples for name, tensor in sums.items() if name in ("nll", "brier")}
    if sums.count is not None:
        parts = [bins.tables() for bins in _bins(sums, cut, limits=False)]
        tables |= {name: torch.cat([part[name] for part in parts]) for name in ("ece", "mce")}
    return tables


def bounds_of(sums: CalibrationSums, cut: Cut) -> dict[str, Tensor]:
    """[Gg Gt] each: how far ``ece`` and ``mce`` can be off."""
    parts = [bins.bounds() for bins in _bins(sums, cut, limits=True)]
    return {name: torch.cat([part[name] for part in parts]) for name in ("ece", "mce")}


def _bins(sums: CalibrationSums, cut: Cut, *, limits: bool) -> Iterator[Bins]:
    """A few cells at a time: the cumulated sums of all would take as much memory as the state."""
    assert sums.count is not None
    assert sums.confidence is not None
    assert sums.correct is not None
    flat = [tensor.flatten(0, 1) for tensor in (sums.count, sums.confidence, sums.correct)]
    at_once = max(1, _AT_ONCE // flat[0].shape[1])
    for begin in range(0, len(flat[0]), at_once):
        count, confidence, correct = (tensor[begin : begin + at_once] for tensor in flat)
        if cut.sketched:
            yield Bins.of_sketch(
                count,
                confidence,
                correct,
                cut.n_samples,
                cut.n_bins,
                interpolated=cut.estimator == "equal_mass_interp",
                limits=limits,
            )
        else:
            yield Bins.of_bins(count, confidence, correct, cut.n_samples)
