"""The choice of validation samples and test samples from files."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from focalkern._columns import listed
from focalkern._diagnostics import repeated_rows
from focalkern.files import Hint, InputError, LogitSet
from focalkern.files.tables import check_column_names
from focalkern.study.samples import Samples, as_samples

__all__ = ["check_alike", "select_samples"]


def select_samples(
    read: Callable[..., Mapping[str, LogitSet | Samples]],
    source: str,
    *,
    labels: str | None = None,
    test: str | None = None,
    test_labels: str | None = None,
    split: float | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[Samples, Samples]:
    """Validation samples and test samples; the same object if the files have one set that is not split.

    Args:
        read: :func:`focalkern.files.read_sets`, or :func:`focalkern.study.stream_sets`.
        source, labels: a file for ``read``. Its ``val`` set, or its only set, has the validation samples, and its
            ``test`` set the test samples.
        test, test_labels: another file for the test samples: its ``test`` set, or its only set.
        split, seed: fraction of the only set that becomes the validation samples, at random; the others become the test
            samples. If many rows in memory are copies, all copies of a row are in one part.
        options: options of ``read``.

    Raises:
        InputError: the options exclude each other, or the sets differ in kind or number of classes.
    """
    sets = _as_samples(read(source, labels=labels, **options))
    if test is not None and split is not None:
        raise InputError(source, "either a file of test rows or a share to split off", "both")
    if test_labels is not None and test is None:
        raise InputError(test_labels, "a file of test rows for these labels", "none", hint=Hint("test", "FILE"))
    if split is not None:
        if len(sets) > 1:
            raise InputError(
                f"{source}: expected one set to split, found {' and '.join(map(_named, sets))}; leave out the split"
            )
        (rows,) = sets.values()
        first = round(split * len(rows))
        if not 0 < first < len(rows):
            raise InputError(
                f"{source}: expected enough rows for a split of {split:g} to leave some on both sides, "
                f"found {len(rows)}"
            )
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        copy_of = None if rows.memory is None else repeated_rows(rows.memory.input, rows.memory.labels)
        if copy_of is not None:
            order, first = _copies_together(order, torch.from_numpy(copy_of), first)
        share = f"a random share of {split:g}, seed {seed}"
        validation, reported = rows.subset(order[:first], share), rows.subset(order[first:], "the other rows")
        validation.name, reported.name = "val", "test"
        return validation, reported
    if test is not None:
        validation = _one(source, sets, "val")
        try:
            others = _as_samples(read(test, labels=test_labels, **options))
        except InputError as error:
            raise error._renamed(labels="test_labels") from None
        reported = _one(test, others, "test")
        of_val, of_test = (() if rows.memory is None else rows.memory.classes for rows in (validation, reported))
        if reported.n_classes != validation.n_classes:
            more = [name for name in of_test if of_val and name not in of_val]
            besides = f", with {listed(more)} besides" if more else ""
            expected = f"the {validation.n_classes} classes of {source}"
            raise InputError(test, expected, f"{reported.n_classes}{besides}")
        if reported.kind != validation.kind:
            raise InputError(f"{test}: expected {validation.kind} as in {source}, found {reported.kind}")
        if of_val and of_test:
            check_column_names(f"the columns of {source}", of_val, test, of_test)
        return validation, reported
    if "val" in sets and "test" in sets:
        validation, reported = sets["val"], sets["test"]
        check_alike(source, validation, reported)
        return validation, reported
    rows = _one(source, sets, "val")
    return rows, rows


def check_alike(source: str, validation: Samples | LogitSet, test: Samples | LogitSet) -> None:
    """Raises InputError unless both sets of one file have the same classes and kind."""
    if (test.n_classes, test.kind) != (validation.n_classes, validation.kind):
        raise InputError(
            f"{source}: expected val and test to be alike, found {validation.kind} of {validation.n_classes} "
            f"classes and {test.kind} of {test.n_classes}"
        )


def _copies_together(order: Tensor, copy_of: Tensor, first: int) -> tuple[Tensor, int]:
    """The order with all copies of a row, which have one number in ``copy_of``, after the first of them; and the number
    of rows, near ``first``, after which no copy of them follows."""
    places = torch.full_like(order, len(order)).scatter_reduce(0, copy_of[order], torch.arange(len(order)), "amin")
    order = order[places[copy_of[order]].argsort(stable=True)]
    number = copy_of[order]
    borders = (number[1:] != number[:-1]).nonzero().flatten() + 1
    return order, int(borders[(borders - first).abs().argmin()])


def _as_samples(sets: Mapping[str, LogitSet | Samples]) -> dict[str, Samples]:
    return {name: as_samples(rows) for name, rows in sets.items()}


def _one(source: str, sets: Mapping[str, Samples], wanted: str) -> Samples:
    if wanted in sets:
        return sets[wanted]
    if len(sets) > 1:
        raise InputError(f"{source}: expected {wanted}_* or a single set, found {' and '.join(map(_named, sets))}")
    (rows,) = sets.values()
    return rows


def _named(prefix: str) -> str:
    return f"{prefix}_*" if prefix else "logits and labels without a prefix"
