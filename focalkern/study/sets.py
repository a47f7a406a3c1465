"""Which of the rows of some files choose, and which report."""

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
    """The rows that choose and the rows that report, the same object when nothing tells them apart.

    Args:
        read: :func:`focalkern.files.read_sets`, or :func:`focalkern.study.stream_sets`.
        source, labels: its file, whose ``val`` rows or only set chooses, and ``test`` rows report.
        test, test_labels: another file, whose ``test`` rows or only set reports.
        split, seed: a random share of the only set chooses, the others report.
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
        selection = _one(source, sets, "val")
        others = _as_rows(read(test, labels=test_labels, labels_option="--test-labels", **options))
        reported = _one(test, others, "test")
        if reported.n_classes != selection.n_classes:
            raise InputError(
                f"{test}: expected the {selection.n_classes} classes of {source}, found {reported.n_classes}"
            )
        if reported.kind != selection.kind:
            raise InputError(f"{test}: expected {selection.kind} as in {source}, found {reported.kind}")
        return selection, reported
    if "val" in sets and "test" in sets:
        selection, reported = sets["val"], sets["test"]
        if (reported.n_classes, reported.kind) != (selection.n_classes, selection.kind):
            raise InputError(
                f"{source}: expected val and test to be alike, found {selection.kind} of {selection.n_classes} classes "
                f"and {reported.kind} of {reported.n_classes}"
            )
        return selection, reported
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
