"""Many short runs: the effect of the coefficient of a regulariser, for training parts of several sizes.

[4] Figure 1 (calibration error against the coefficient, best coefficient against the size) and Figure 6 (from strong
focal to strong inverse focal loss).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.train_study import objectives
from benchmarks.train_study.data import Dataset, split
from benchmarks.train_study.errors import DataError
from benchmarks.train_study.training import Settings

FAMILIES = {
    "label-smoothing": (0.01, 0.03, 0.05, 0.07, 0.09),
    "l1-norm": (0.001, 0.003, 0.01, 0.03, 0.1),
    "focal": (1, 3, 5, 7, 9),
}
"""The regularisers of [4] Figure 1 and their coefficients; cross-entropy is the coefficient 0 of each."""

FROM_FOCAL_TO_INVERSE = (
    "focal-3",
    "focal-2",
    "focal-1",
    "cross-entropy",
    "inverse-focal-1",
    "inverse-focal-2",
    "inverse-focal-3",
)
"""[4] Figure 6, on the whole training part."""


def plan(dataset: Dataset, settings: Settings, sizes: Sequence[int] | None) -> dict[Settings, list[str]]:
    """The losses to train, by settings that differ in ``train_size``; by default an eighth, a third and all of the
    training part.

    Raises:
        DataError: a size that is out of range.
    """
    parts = split(dataset, seed=0, val_fraction=settings.val_fraction, train_size=None, device=torch.device("cpu"))
    n = len(parts.train_labels)
    swept = [objectives.canonical(f"{family}-{c}") for family, values in FAMILIES.items() for c in values]
    result = {}
    for size in sorted(set(sizes or (n // 8, n // 3, n))):
        if not 1 <= size <= n:
            raise DataError(f"sizes must be from 1 to {n}, got {size}")
        losses = ["cross-entropy", *swept]
        if size == n:
            losses += [loss for loss in FROM_FOCAL_TO_INVERSE if loss not in losses]
        result[replace(settings, train_size=size)] = losses
    return result


def folder_of(out: Path, settings: Settings) -> Path:
    return out / f"train-{settings.train_size}"
