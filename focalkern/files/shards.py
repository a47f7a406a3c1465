"""Reads logits with their labels a few rows at a time, from one large file or from many files."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from focalkern._arrays import flat_rows
from focalkern._checks import TO_INT, not_floating, path_text
from focalkern._types import INPUT_KINDS, InputKind
from focalkern.files.arrays import ArrayRows, find_sets, kind_of_file
from focalkern.files.errors import Hint, InputError
from focalkern.files.parts import BY_NAME, open_npy
from focalkern.files.paths import (
    NamedFiles,
    Url,
    beside,
    exists,
    fingerprint,
    located,
    matches,
    name_of,
    suffix_of,
)
from focalkern.files.pixels import PixelRows, class_misfit, label_misfit
from focalkern.files.samples import check_input_kind, check_options, check_rows, no_names

__all__ = [
    "LOOK",
    "STREAMED",
    "Shard",
    "ShardedRows",
    "open_shards",
]

# Formats that are read a few rows at a time.
STREAMED = (".npy", *BY_NAME)

# Number of rows that are checked to distinguish probabilities from logits.
LOOK = 1024


@dataclass(frozen=True)
class Shard:
    """One file of rows; only its shapes are known until :meth:`read`.

    Attributes:
        input: [N, C] logits or probabilities; without labels also [N, C, d1, ...].
        labels: [N] class indices, from the same file or another; None for rows without labels.
        kind: ``"logits"`` or ``"probs"``.
        place: describes the index of a row in words, for errors.
        ignored: label of ignored rows.
    """

    input: ArrayRows
    labels: ArrayRows | None
    kind: InputKind
    place: Callable[[int], str] = "row {}".format
    ignored: int | None = None

    @property
    def source(self) -> str:
        """The file of the input."""
        return self.input.source

    @property
    def rows(self) -> int:
        """N, the number of rows."""
        return self.input.shape[0]

    @property
    def n_classes(self) -> int:
        """C, the number of classes."""
        return self.input.shape[1]

    def read(self, begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        """The checked rows [begin, end), or the pixels of these images, and their int64 labels; only these are read."""
        input = flat_rows(self.input.rows(begin, end))
        target = None if self.labels is None else self.labels.rows(begin, end).to(torch.int64)
        label_name = "" if self.labels is None else self.labels.name
        first = begin * math.prod(self.input.shape[2:])
        check_rows(self.source, self.kind, self.input.name, input, label_name, target, first, self.place)
        return input, target

    def stamp(self) -> list[Any]:
        """A fingerprint of the files: path, size and time of local files, which are not read; :func:`fingerprint` of
        URLs and folders."""
        names = (self.source, *(() if self.labels is None else (self.labels.source,)))
        ignored = [] if self.ignored is None else [self.ignored]
        return [*ignored, *(part for name in dict.fromkeys(names) for part in _stamp(name))]


@dataclass(frozen=True)
class ShardedRows:
    """The rows of all shards, concatenated.

    Attributes:
        shards: in the order of their names.
        kind: ``"logits"`` or ``"probs"``.
        name: ``""``, ``"val"`` or ``"test"``, from the prefix of the arrays' names.
        source: the file or pattern, as the user wrote it.
    """

    shards: tuple[Shard, ...]
    kind: InputKind
    name: str
    source: str

    def __len__(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def n_classes(self) -> int:
        return self.shards[0].n_classes

    def batches(self, begin: int, end: int, rows_at_once: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Batches (index of the first row, input, labels) of the rows [begin, end), of at most ``rows_at_once``."""
        first = 0
        for shard in self.shards:
            low, high = max(begin, first) - first, min(end, first + shard.rows) - first
            for row in range(low, high, rows_at_once):
                input, target = shard.read(row, min(row + rows_at_once, high))
                assert target is not None  # open_shards finds labels for every shard
                yield first + row, input, target
            first += shard.rows


def open_shards(
    path: str,
    *,
    labels: str | None = None,
    input_kind: InputKind | None = None,
    logits_key: str | None = None,
    labels_key: str | None = None,
    ignore_index: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, ShardedRows]:
    """The sets of one or several files by prefix, as in ``read_sets``. Only shapes and a few rows are read; with
    ``ignore_index`` all labels, to count the rows.

    Raises:
        InputError: any problem with names or shapes.
    """
    keys = {"logits_key": logits_key, "labels_key": labels_key}
    path = check_options("open_shards", input_kind, path, storage_options, ignore_index, **keys)
    path = located(path, storage_options)
    if labels is not None:
        labels = labels if isinstance(labels, NamedFiles) else path_text("open_shards", "labels", labels)
        labels = located(labels, storage_options)
    names = matches(path)
    suffixes = {suffix_of(name) for name in names}
    if len(suffixes) == 1 and suffixes <= set(BY_NAME):
        (suffix,) = suffixes
        if labels is not None:
            raise InputError(path, f"no other files of labels, because {suffix} files have them in them", labels)
        found = [_shards_by_name(name, suffix, input_kind, logits_key, labels_key, ignore_index) for name in names]
    elif suffixes == {".npy"}:
        if logits_key or labels_key:
            raise no_names(path)
        found = [{"": shard} for shard in _npy_shards(path, names, labels, input_kind, ignore_index)]
    else:
        raise InputError(
            f"{path}: expected .npy, .safetensors or .zarr for reading in parts, found {', '.join(sorted(suffixes))}; "
            "other formats are read without stream, all rows in memory (focalkern.files.read_sets)"
        )
    sets = {}
    for prefix, first in found[0].items():
        shards = []
        for name, by_prefix in zip(names, found, strict=False):
            if prefix not in by_prefix or len(by_prefix) != len(found[0]):
                raise InputError(f"{name}: expected the sets of {first.source}, found others")
            shard = by_prefix[prefix]
            if (shard.n_classes, shard.kind) != (first.n_classes, first.kind):
                raise InputError(
                    f"{shard.source}: {shard.input.name}: expected {first.kind} of {first.n_classes} classes as in "
                    f"{first.source}, found {shard.kind} of {shard.n_classes}"
                )
            shards.append(shard)
        sets[prefix] = ShardedRows(tuple(shards), first.kind, prefix, path)
        if not len(sets[prefix]):
            which = "" if ignore_index is None else f" with another label than {ignore_index}"
            raise InputError(f"{path}: {first.input.name}: expected at least one row{which}, found none")
        if input_kind is None and first.kind == "logits":
            filled = next(shard for shard in shards if shard.rows)
            start, _ = filled.read(0, min(filled.rows, LOOK))
            check_input_kind(filled.source, filled.input.name, first.kind, input_kind, start)
    return sets


def _stamp(name: str) -> list[Any]:
    if isinstance(name, Url) or os.path.isdir(name):
        return [str(name), fingerprint(name)]
    return [os.path.realpath(name), os.stat(name).st_size, os.stat(name).st_mtime_ns]


# ---- .npy ----------------------------------------------------------------------------------------------------------


def _npy_shards(
    path: str, names: Sequence[str], labels: str | None, input_kind: InputKind | None, ignore_index: int | None
) -> list[Shard]:
    if labels is not None:
        label_names = matches(labels)
        names = [name for name in names if name not in label_names]
        if len(label_names) != len(names):
            raise InputError(f"{labels}: expected as many files as {path} has, {len(names)}, found {len(label_names)}")
    else:
        # A pattern may also match files of labels.
        derived = {name: _labels_of(name) for name in names}
        names = [name for name in names if name not in derived.values()]
        label_names = [derived[name] for name in names]
        for name, label_name in zip(names, label_names, strict=True):
            if not exists(label_name):
                raise InputError(name, f"its labels in {label_name}", "nothing there", hint=Hint("labels", "FILES"))
    shards = []
    for name, label_name in zip(names, label_names, strict=True):
        kind = kind_of_file(name, _kind_of(name), input_kind)
        arrays = open_npy(name, kind), open_npy(label_name, "labels")
        shards.append(_shard(name, arrays[0], label_name, arrays[1], kind, ignore_index))
    return shards


def _kind_of(name: str) -> InputKind | None:
    """The kind of input by the name of the file: logits.npy, val_logits.npy, val_logits-003.npy."""
    words = re.split(r"[^a-zA-Z]+", name_of(name).stem)
    return next((kind for kind in INPUT_KINDS if kind in words), None)


def _labels_of(name: str) -> str:
    """The name of the file of labels: val_labels-003.npy for val_logits-003.npy and for val-003.npy."""
    path = name_of(name)
    kind = _kind_of(name)
    if kind is not None:
        stem = re.sub(rf"(?<![a-zA-Z]){kind}(?![a-zA-Z])", "labels", path.stem, count=1)
    else:
        match = re.fullmatch(r"(.*?)([-_.]?[0-9]+)", path.stem)
        if match is None:
            expected = (
                "a name with the word logits or probs in it or a number at its end, which tells where the labels are"
            )
            raise InputError(name, expected, "another", hint=Hint("labels", "FILES"))
        stem = f"{match[1]}_labels{match[2]}"
    return beside(name, f"{stem}{path.suffix}")


# ---- arrays by name ------------------------------------------------------------------------------------------------


def _shards_by_name(
    name: str,
    suffix: str,
    input_kind: InputKind | None,
    logits_key: str | None,
    labels_key: str | None,
    ignore_index: int | None,
) -> dict[str, Shard]:
    arrays = BY_NAME[suffix](name)
    return {
        prefix: _shard(f"{name}: {key}", arrays[key], f"{name}: {label_key}", arrays[label_key], kind, ignore_index)
        for prefix, (kind, key, label_key) in find_sets(name, arrays, input_kind, logits_key, labels_key).items()
    }


def _shard(
    where: str, input: ArrayRows, label_where: str, labels: ArrayRows, kind: InputKind, ignore_index: int | None
) -> Shard:
    """The shard of two arrays, which errors call ``where`` and ``label_where``."""
    if input.numbers != "float":
        raise InputError(f"{where}: expected floating point, found {not_floating(input.dtype)}")
    if len(input.shape) < 2 or input.shape[1] < 2:
        raise InputError(f"{where}: {class_misfit(input.shape, kind)}")
    misfit = label_misfit(input.shape, labels.shape, f"{list(input.shape)} in {where}", f"{labels.name} ")
    if misfit:
        raise InputError(f"{label_where}: {misfit}")
    if labels.numbers != "integer":
        raise InputError(f"{label_where}: expected integer class numbers, found {labels.dtype}{TO_INT}")
    if len(input.shape) == 2 and ignore_index is None:
        return Shard(input, labels, kind)
    rows = PixelRows(input.shape, input.rows, labels.rows, ignore_index)
    return Shard(
        replace(input, shape=(len(rows), input.shape[1]), read=rows.input),
        replace(labels, shape=(len(rows),), read=rows.labels),
        kind,
        rows.place,
        ignore_index,
    )
