"""Reads logits or probabilities with their labels from common file formats."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from focalkern._checks import path_text
from focalkern._types import INPUT_KINDS, InputKind
from focalkern.files.arrays import ARCHIVES, BARE, ArrayRows, find_sets, kind_of_file, load_numpy
from focalkern.files.errors import Hint, InputError
from focalkern.files.parts import BY_NAME
from focalkern.files.paths import (
    NamedFiles,
    beside,
    check_file,
    exists,
    is_several,
    located,
    matches,
    name_of,
    open_file,
    suffix_of,
)
from focalkern.files.samples import LogitSet, check_input_kind, check_options, checked_set, no_names
from focalkern.files.shards import open_shards
from focalkern.files.tables import check_column_names, read_arrow, read_csv

__all__ = ["labels_of_npy", "read_sets"]

_ARROW = (".parquet", ".feather")


def read_sets(
    path: str | os.PathLike[str],
    *,
    labels: str | os.PathLike[str] | None = None,
    input_kind: InputKind | None = None,
    logits_key: str | None = None,
    labels_key: str | None = None,
    ignore_index: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, LogitSet]:
    """Read every set of a file, or of several files whose rows are concatenated.

    Logits [N, C, d1, ...] with labels [N, d1, ...] become rows [N d1 ..., C], in the order of the flattened labels.

    Args:
        path: a file .npz, .npy, .pt, .pth, .safetensors, .zarr, .csv, .parquet or .feather. A folder, a pattern
            (``"val-*.npz"``) or ``"@LIST"``, a text file with one name per line, stands for files of one format, in the
            order of their names and numbers; a folder with the suffix ``.parquet`` for the files in it and below. URLs
            that fsspec opens are permitted: ``"s3://bucket/val.npz"``.
        labels: the .npy files with the labels, for .npy files only.
        input_kind: ``"logits"`` or ``"probs"``, which also reads an array called ``logits``. None: the name of the
            array (or of the .npy file) decides; other names mean logits, and rows that look like probabilities are then
            an error.
        logits_key, labels_key: the names of the arrays; for tables, a pattern for the columns of the classes
            (``"p_*"``) and the column of the labels.
        ignore_index: label of ignored rows or pixels.
        storage_options: options of the fsspec file system of URLs: ``{"anon": True}``.

    Returns:
        At least one :class:`LogitSet`, by prefix: ``""``, ``"val"`` or ``"test"``.

    Raises:
        InputError: any problem with the files; a missing package for a URL or a format.
        TypeError: ``storage_options`` is not a dict with names as keys; ``ignore_index`` is not an integer.

    Example:
        >>> val, test = 4 * np.eye(2), 3 * np.eye(2)
        >>> np.savez("logits.npz", val_logits=val, val_labels=[0, 1], test_logits=test, test_labels=[1, 1])
        >>> sets = fk.files.read_sets("logits.npz")
        >>> sorted(sets), sets["test"].labels
        (['test', 'val'], tensor([1, 1]))
    """
    keys: dict[str, Any] = {"logits_key": logits_key, "labels_key": labels_key}
    source = check_options("read_sets", input_kind, path, storage_options, ignore_index, **keys)
    source = located(source, storage_options)
    if labels is not None:
        labels = labels if isinstance(labels, NamedFiles) else path_text("read_sets", "labels", labels)
        labels = located(labels, storage_options)
    options: dict[str, Any] = {"input_kind": input_kind, "ignore_index": ignore_index, **keys}
    if not is_several(source):
        return _read_file(source, labels, **options)
    files = matches(source)
    suffixes = sorted({suffix_of(file) for file in files})
    if len(suffixes) > 1:
        raise InputError(f"{source}: expected files of one format, found {' and '.join(suffixes)}")
    if suffixes[0] in _ARROW:
        if labels is not None:
            raise InputError(source, f"no other file of labels, because {suffixes[0]} files have them in them", labels)
        return _sets_in(source, read_arrow(source, files, **options), **options)
    if suffixes[0] == ".npy":
        (rows,) = open_shards(source, labels=labels, **options).values()
        parts = list(rows.batches(0, len(rows), len(rows)))
        return {"": _joined(source, [LogitSet(input, target, rows.kind, "", source) for _, input, target in parts])}
    found = [_read_file(file, labels, **options) for file in files]
    for file, sets in zip(files, found, strict=True):
        if list(sets) != list(found[0]):
            raise InputError(f"{file}: expected the sets of {files[0]}, found others")
    return {prefix: _joined(source, [sets[prefix] for sets in found]) for prefix in found[0]}


def _joined(source: str, parts: Sequence[LogitSet]) -> LogitSet:
    """The rows of several sets with one prefix, concatenated."""
    first = parts[0]
    for one in parts:
        if (one.kind, one.n_classes) != (first.kind, first.n_classes):
            expected = f"{first.kind} of {first.n_classes} classes as in {first.source}"
            raise InputError(f"{one.source}: expected {expected}, found {one.kind} of {one.n_classes}")
        check_column_names(f"the columns of {first.source}", first.classes, one.source, one.classes)
    input, labels = torch.cat([one.input for one in parts]), torch.cat([one.labels for one in parts])
    return replace(first, input=input, labels=labels, source=str(source))


def _read_file(
    source: str,
    labels: str | None,
    *,
    input_kind: InputKind | None,
    logits_key: str | None,
    labels_key: str | None,
    ignore_index: int | None,
) -> dict[str, LogitSet]:
    suffix = suffix_of(source)
    readers: dict[str, Callable[[str], dict[str, Any] | LogitSet]] = {
        **ARCHIVES,
        **BY_NAME,
        ".npy": lambda p: _read_npy_pair(p, labels, input_kind),
    }
    options: dict[str, Any] = {
        "input_kind": input_kind,
        "logits_key": logits_key,
        "labels_key": labels_key,
        "ignore_index": ignore_index,
    }
    tables: dict[str, Callable[[str], dict[str, Any] | LogitSet]] = {
        ".csv": lambda p: read_csv(p, **options),
        **dict.fromkeys(_ARROW, lambda p: read_arrow(p, [p], **options)),
    }
    if suffix not in readers and suffix not in tables:
        known = ", ".join([*readers, *tables])
        raise InputError(f"{source or 'an empty name'}: expected {known}, found {suffix or 'no suffix'!r}")
    if labels is not None and suffix != ".npy":
        raise InputError(source, f"no other file of labels, because a {suffix} file has them in it", labels)
    check_file(source)
    if suffix == ".npy" and (logits_key or labels_key):
        raise no_names(source)
    return _sets_in(source, {**readers, **tables}[suffix](source), **options)


def _sets_in(
    source: str,
    arrays: dict[str, Any] | LogitSet,
    *,
    input_kind: InputKind | None,
    logits_key: str | None,
    labels_key: str | None,
    ignore_index: int | None,
) -> dict[str, LogitSet]:
    """The sets of a file, by prefix."""
    if isinstance(arrays, LogitSet):
        return {"": arrays}
    if list(arrays) == [BARE]:
        found = f"a tensor {list(arrays[BARE].shape)}"
        raise InputError(f"{source}: expected a dict of tensors with logits and labels, found {found}")
    sets = {}
    for prefix, (kind, name, label_name) in find_sets(source, arrays, input_kind, logits_key, labels_key).items():
        values, targets = (
            # Remove the arrays of the set from the dict, so that only one set at a time is in memory twice.
            one.whole() if isinstance(one, ArrayRows) else one
            for one in (arrays.pop(name), arrays.pop(label_name))
        )
        sets[prefix] = checked_set(source, prefix, kind, name, values, label_name, targets, ignore_index)
        check_input_kind(source, name, kind, input_kind, sets[prefix].input)
    return sets


def _kind_of_npy(source: str) -> InputKind | None:
    stem = name_of(source).stem
    return next((kind for kind in INPUT_KINDS if stem == kind or stem.endswith(f"_{kind}")), None)


def labels_of_npy(source: str, labels: str | None = None) -> str:
    """The file of the labels of a .npy file: the given one, or the one beside it."""
    if labels is not None:
        check_file(labels, f"the labels of {source}")
        return labels
    name, said = name_of(source).name, _kind_of_npy(source)
    if said is None:
        expected = "a name that ends in logits.npy or probs.npy, which tells where the labels are"
        raise InputError(source, expected, "another", hint=Hint("labels", "FILE.npy"))
    found = beside(source, name[: -len(f"{said}.npy")] + "labels.npy")
    if not exists(found):
        raise InputError(source, f"its labels in {found}", "nothing there", hint=Hint("labels", "FILE.npy"))
    return found


def _read_npy_pair(source: str, labels: str | None, input_kind: InputKind | None) -> dict[str, Any]:
    said = _kind_of_npy(source)
    labels = labels_of_npy(source, labels)
    loaded = []
    for name in (source, labels):
        with open_file(name) as stream:
            array = load_numpy(stream, name, "an array (.npy)")
        if not isinstance(array, np.ndarray):
            raise InputError(f"{name}: expected an array (.npy), found an archive of {', '.join(array.files)} (.npz)")
        loaded.append(array)
    return {kind_of_file(source, said, input_kind): loaded[0], "labels": loaded[1]}
