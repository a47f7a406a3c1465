"""Which of the rows of some files are validation rows, and which are test rows."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from focalkern.files import InputError, LogitSet
from focalkern.study.memory import as_rows
from focalkern.study.rows import Rows

__all__ = ["select_rows"]


def select_rows(
    read: Callable[..., Mapping[str, LogitSet | Rows]],
    source: str,
    *,
    labels: str | None = None,
    test: str | None = None,
    test_labels: str | None = None,
    split: float | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[Rows, Rows]:
    """The validation rows and the test rows, the same object when nothing tells them apart.

    Args:
        read: :func:`focalkern.files.read_sets`, or :func:`focalkern.study.stream_sets`.
        source, labels: its file: ``val`` rows or the only set to choose by, ``test`` rows to measure on.
        test, test_labels: another file: ``test`` rows or the only set to measure on.
        split, seed: a random share of the only set to choose by, the others to measure on.
        options: for ``read``.

    Raises:
        InputError: sets that do not go together.
    """
    sets = _as_rows(read(source, labels=labels, **options))
    if test is not None and split is not None:
        raise InputError(f"{source}: expected either --test or --split, found both")
    if test_labels is not None and test is None:
        raise InputError(f"{test_labels}: --test-labels goes with --test")
    if split is not None:
        if len(sets) > 1:
            raise InputError(f"{source}: expected one set for --split, found {' and '.join(map(_named, sets))}")
        (rows,) = sets.values()
        first = round(split * len(rows))
        if not 0 < first < len(rows):
            raise InputError(
                f"{source}: expected enough rows for --split {split:g} to leave some on both sides, found {len(rows)}"
            )
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        share = f"a random share of {split:g}, seed {seed}"
        return rows.rows(order[:first], share), rows.rows(order[first:], "the other rows")
    if test is not None:
        validation = _one(source, sets, "val")
        others = _as_rows(read(test, labels=test_labels, labels_option="--test-labels", **options))
        reported = _one(test, others, "test")
        if reported.n_classes != validation.n_classes:
            raise InputError(
                f"{test}: expected the {validation.n_classes} classes of {source}, found {reported.n_classes}"
            )
        if reported.kind != validation.kind:
            raise InputError(f"{test}: expected {validation.kind} as in {source}, found {reported.kind}")
        return validation, reported
    if "val" in sets and "test" in sets:
        validation, reported = sets["val"], sets["test"]
        if (reported.n_classes, reported.kind) != (validation.n_classes, validation.kind):
            raise InputError(
                f"{source}: expected val and test to be alike, found {validation.kind} of {validation.n_classes} "
                f"classes and {reported.kind} of {reported.n_classes}"
            )
        return validation, reported
    rows = _one(source, sets, "val")
    return rows, rows


def _as_rows(sets: Mapping[str, LogitSet | Rows]) -> dict[str, Rows]:
    return {name: as_rows(rows) for name, rows in sets.items()}


def _one(source: str, sets: Mapping[str, Rows], wanted: str) -> Rows:
    if wanted in sets:
        return sets[wanted]
    if len(sets) > 1:
        raise InputError(f"{source}: expected {wanted}_* or a single set, found {' and '.join(map(_named, sets))}")
    (rows,) = sets.values()
    return rows


def _named(prefix: str) -> str:
    return f"{prefix}_*" if prefix else "logits and labels without a prefix"
