"""Columns of frames: the classes of the frame that ``fit`` took, and the order of their names in later frames."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from focalkern._arrays import columns_of_frame
from focalkern._columns import ClassColumns, column_misfit

__all__ = ["check_columns", "check_label_columns", "expected_columns", "given_columns", "with_names"]

_MOST_SHOWN = 8


def given_columns(name: str, logits: Any) -> ClassColumns | None:
    """The columns of a frame that are the classes; None for arrays and tensors."""
    return None if isinstance(logits, Tensor) else columns_of_frame(logits, f"{name}: logits")


def with_names(columns: ClassColumns | None) -> ClassColumns | None:
    """The columns if they have names; None for numbered columns, whose order is that of the numbers in every frame."""
    return None if columns is None or columns.numbers is not None else columns


def expected_columns(
    of_fit: ClassColumns | None, classes: np.ndarray[Any, Any] | None, found: Sequence[str]
) -> Sequence[str]:
    """The names that the columns ``found`` must have, in this order; empty if any names will do.

    Args:
        of_fit: the columns of ``fit``; None if they had no names.
        classes: names of the classes; None if they are numbers. Columns with other names may be these classes, but
            columns with the same names in another order are not those of ``fit``.
        found: names of columns, without the prefix ``logit_`` or ``prob_``.
    """
    if of_fit is not None:
        return of_fit.classes
    return classes.tolist() if classes is not None and set(classes.tolist()) == set(found) else ()


def check_columns(name: str, columns: ClassColumns, wanted: Sequence[str]) -> None:
    """Raises ValueError for columns with other names than ``wanted``, or in another order; numbers are no names."""
    misfit = "" if columns.numbers is not None else column_misfit(wanted, columns.classes)
    if misfit:
        called = dict(zip(columns.classes, columns.names, strict=True))
        remedy = f"pass frame[[{_listed([called.get(one, one) for one in wanted])}]]"
        if not set(wanted) <= set(called):
            remedy += ", or frame.to_numpy() if its columns are these classes in this order"
        raise ValueError(f"{name}: logits must have the columns of fit in their order, {misfit}; {remedy}")


def check_label_columns(name: str, columns: ClassColumns | None, target: Any) -> None:
    """Raises ValueError for a frame of labels [N, L] with the names of ``columns`` in another order."""
    labels = None if columns is None or isinstance(target, Tensor) else columns_of_frame(target, f"{name}: target")
    if columns is None or labels is None or sorted(labels.classes) != sorted(columns.classes):
        return
    misfit = column_misfit(columns.classes, labels.classes)
    if misfit:
        called = dict(zip(labels.classes, labels.names, strict=True))
        remedy = f"pass target[[{_listed([called[one] for one in columns.classes])}]]"
        raise ValueError(f"{name}: target must have the columns of the logits in their order, {misfit}; {remedy}")


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _MOST_SHOWN else ""
    return f"{', '.join(map(repr, names[:_MOST_SHOWN]))}{more}"
