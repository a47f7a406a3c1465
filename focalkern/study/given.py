"""The samples that a user passes to :func:`focalkern.compare_calibrators`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from focalkern._arrays import columns_of_frame, numbers_of_frame, refuse_masked
from focalkern._checks import short
from focalkern._columns import ClassColumns, other_order
from focalkern._diagnostics import refuse_probs
from focalkern.calibrators import InputKind
from focalkern.calibrators._parameters import is_assumed
from focalkern.files import InputError, LogitSet
from focalkern.files.samples import check_options, checked_set
from focalkern.study.samples import MemorySamples, Samples, StreamedSamples, as_samples, stream_sets

__all__ = ["given_samples"]


def given_samples(
    op: str,
    name: str,
    given: Any,
    prefix: str,
    kind: InputKind,
    ignore_index: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Samples:
    """The samples of a study from a pair, a pattern of files, or samples.

    Args:
        op, name: names of the function and the argument, for errors.
        given: the argument.
        prefix: ``"val"`` or ``"test"``: the set of a file with several.
        kind: kind of the logits in pairs.
        ignore_index: label of ignored rows.
        storage_options: options for a pattern that is a URL.

    Raises:
        InputError, TypeError, ValueError: samples that cannot be used.
    """
    check_options(op, None, ignore_index=ignore_index)
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if ignore_index is not None and not is_pair and not isinstance(given, str | Path):
        raise ValueError(
            f"{op}: ignore_index goes with a pair (logits, labels) or a pattern of files, got {type(given).__name__} "
            f"as {name}; pass it to read_sets or stream_sets"
        )
    if isinstance(given, LogitSet | MemorySamples | StreamedSamples):
        return as_samples(given)
    if isinstance(given, str | Path):
        if "\0" in str(given) or len(str(given)) > 4096:
            raise ValueError(f"{op}: {name} must be a path or a pattern of files, got {short(given)}")
        sets = stream_sets(str(given), ignore_index=ignore_index, storage_options=storage_options)
        if len(sets) > 1 and prefix not in sets:
            raise ValueError(f"{op}: {name} must be one set of rows, got {', '.join(sets)} in {given}")
        return sets.get(prefix, next(iter(sets.values())))
    if not is_pair:
        raise TypeError(
            f"{op}: {name} must be a pair (logits, labels), a pattern of files or a streamed set, got "
            f"{type(given).__name__}"
        )
    logits: Any
    for what, one in zip(("logits", "labels"), given, strict=True):
        refuse_masked(one, f"{op}: {what} of {name}")
    logits, labels = (one.detach().cpu() if isinstance(one, torch.Tensor) else one for one in given)
    assumed, kind = is_assumed(kind), "probs" if kind == "probs" else "logits"
    columns = None if isinstance(logits, torch.Tensor) else columns_of_frame(logits, f"{op}: {name}")
    if columns is not None:
        logits, labels = numbers_of_frame(logits, columns, f"{op}: {name}"), _labels_of(columns, labels, name)
    rows = checked_set(name, prefix, kind, kind, logits, "labels", labels, ignore_index)
    if columns is not None and columns.numbers is None:
        rows = replace(rows, classes=tuple(columns.classes))
    found = as_samples(rows)
    if assumed:
        refuse_probs(op, found.sample()[0], name)
    return found


def _labels_of(columns: ClassColumns, labels: Any, source: str) -> Any:
    """Names of columns as class indices, as ``fit`` takes them; other labels unchanged."""
    given = labels if isinstance(labels, torch.Tensor) else np.asarray(labels)
    if isinstance(given, torch.Tensor) or not all(isinstance(label, str) for label in given.ravel().tolist()):
        return labels
    names = columns.names_of_labels(set(given.ravel().tolist()))
    if names is None:
        misfit = other_order(columns, set(given.ravel().tolist()))
        if misfit:
            raise InputError(f"{source}: labels: expected names of columns, found labels {misfit}")
        return labels
    place = {name: number for number, name in enumerate(names)}
    return np.array([place[label] for label in given.ravel().tolist()], dtype=np.int64).reshape(given.shape)
