"""Reading logits with their labels a few rows at a time, from one large file or from many."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import path_text
from focalkern._types import InputKind
from focalkern.files.checks import (
    KINDS,
    Hint,
    InputError,
    as_tensor,
    check_file,
    check_options,
    check_rows,
    check_said,
    find_sets,
)
from focalkern.files.read import DAMAGE, damaged

__all__ = [
    "NamedFiles",
    "Shard",
    "ShardedRows",
    "is_pattern",
    "map_npy",
    "matches",
    "npy_header",
    "open_shards",
    "safe_open",
    "safetensors_arrays",
]

# Rows that tell probabilities from logits.
LOOK = 1024

_SAFETENSORS_FLOATS = ("F16", "BF16", "F32", "F64")
_SAFETENSORS_INTEGERS = ("I8", "I16", "I32", "I64", "U8")


@dataclass(frozen=True)
class Shard:
    """One file of rows, of which only the shape is known until :meth:`read`.

    Attributes:
        source, label_source: the files of the input and of the labels; the same for .safetensors.
        input_name, label_name: the names of the arrays.
        kind: ``"logits"`` or ``"probs"``.
        rows, n_classes: N and C.
    """

    source: str
    label_source: str
    input_name: str
    label_name: str
    kind: InputKind
    rows: int
    n_classes: int

    def read(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The rows [begin, end) and their labels in int64, checked; in memory, and nothing else of the file."""
        expected = f"rows {begin} to {end - 1}"
        try:
            if self.source.lower().endswith(".npy"):
                # Mapped anew each time: what was read before leaves the memory with the mapping.
                input = as_tensor(self.source, self.input_name, map_npy(self.source)[begin:end].copy())
                target = as_tensor(self.label_source, self.label_name, map_npy(self.label_source)[begin:end].copy())
            else:
                with safe_open(self.source) as stream:
                    input = stream.get_slice(self.input_name)[begin:end]
                    target = stream.get_slice(self.label_name)[begin:end]
        except DAMAGE as error:
            raise damaged(self.source, expected, error) from error
        target = target.to(torch.int64)
        check_rows(self.source, self.kind, self.input_name, input, self.label_name, target, begin)
        return input, target

    def stamp(self) -> list[Any]:
        """What tells this file from another, without reading it."""
        return [
            part
            for name in dict.fromkeys((self.source, self.label_source))
            for part in (os.path.realpath(name), os.stat(name).st_size, os.stat(name).st_mtime_ns)
        ]


@dataclass(frozen=True)
class ShardedRows:
    """The rows of all shards, one after the other.

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
        """(number of the first row, input, labels) of the rows [begin, end), by at most ``rows_at_once``."""
        first = 0
        for shard in self.shards:
            low, high = max(begin, first) - first, min(end, first + shard.rows) - first
            for row in range(low, high, rows_at_once):
                yield first + row, *shard.read(row, min(row + rows_at_once, high))
            first += shard.rows


class NamedFiles(str):
    """Several files in the place of a pattern: those that a shell has made of one. As text, the first and the last.

    Attributes:
        names: all of them.
    """

    names: tuple[str, ...]

    def __new__(cls, names: Sequence[str]) -> "NamedFiles":
        made = super().__new__(cls, f"{names[0]} ... {names[-1]} ({len(names)} files)")
        made.names = tuple(names)
        return made


def is_pattern(path: str) -> bool:
    """Whether it stands for the files that it matches, rather than for one."""
    return isinstance(path, NamedFiles) or (glob.has_magic(path) and not os.path.exists(path))


def open_shards(
    path: str,
    *,
    labels: str | None = None,
    input_kind: InputKind | None = None,
    logits_key: str | None = None,
    labels_key: str | None = None,
) -> dict[str, ShardedRows]:
    """The sets of a file or of the files of a pattern, by prefix as ``read_sets``. Shapes are read, and a few rows.

    Raises:
        InputError: anything at all that is wrong with names and shapes.
    """
    path = check_options("open_shards", input_kind, path, logits_key=logits_key, labels_key=labels_key)
    labels = labels if labels is None or isinstance(labels, NamedFiles) else path_text("open_shards", "labels", labels)
    names = matches(path)
    suffixes = {Path(name).suffix.lower() for name in names}
    if suffixes == {".safetensors"}:
        if labels is not None:
            raise InputError(path, "no other files of labels, because .safetensors files have them in them", labels)
        found = [_safetensors_shards(name, input_kind, logits_key, labels_key) for name in names]
    elif suffixes == {".npy"}:
        if logits_key or labels_key:
            raise InputError(path, "arrays of a name for logits_key and labels_key", ".npy")
        found = [{"": shard} for shard in _npy_shards(path, names, labels, input_kind)]
    else:
        raise InputError(
            f"{path}: expected .npy or .safetensors for reading in parts, found {', '.join(sorted(suffixes))}"
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
                    f"{shard.source}: {shard.input_name}: expected {first.kind} of {first.n_classes} classes as in "
                    f"{first.source}, found {shard.kind} of {shard.n_classes}"
                )
            shards.append(shard)
        sets[prefix] = ShardedRows(tuple(shards), first.kind, prefix, path)
        if not len(sets[prefix]):
            raise InputError(f"{path}: {first.input_name}: expected at least one row, found none")
        if input_kind is None and first.kind == "logits":
            filled = next(shard for shard in shards if shard.rows)
            start, _ = filled.read(0, min(filled.rows, LOOK))
            check_said(filled.source, filled.input_name, first.kind, input_kind, start)
    return sets


def matches(path: str) -> list[str]:
    if not is_pattern(path):
        if os.path.isdir(path):
            raise InputError(
                f"{path}: expected a file or a pattern of files ('{path.rstrip('/')}/*.npy'), found a folder"
            )
        check_file(path)
        return [path]
    found = path.names if isinstance(path, NamedFiles) else glob.glob(path)
    for name in found:
        if not os.path.isdir(name):
            check_file(name)
    # Numbers in the order that they count in: val-10 comes after val-9.
    names = sorted(
        (name for name in found if not os.path.isdir(name)),
        key=lambda name: [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", name))],
    )
    if not names:
        raise InputError(f"{path}: expected at least one file, found none that matches")
    return names


# ---- .npy ----------------------------------------------------------------------------------------------------------


def _npy_shards(path: str, names: Sequence[str], labels: str | None, input_kind: InputKind | None) -> list[Shard]:
    if labels is not None:
        label_names = matches(labels)
        names = [name for name in names if name not in label_names]
        if len(label_names) != len(names):
            raise InputError(f"{labels}: expected as many files as {path} has, {len(names)}, found {len(label_names)}")
    else:
        # A pattern may match the labels too.
        derived = {name: _labels_of(name) for name in names}
        names = [name for name in names if name not in derived.values()]
        label_names = [derived[name] for name in names]
        for name, label_name in zip(names, label_names, strict=True):
            if not os.path.exists(label_name):
                raise InputError(name, f"its labels in {label_name}", "nothing there", hint=Hint("labels", "FILES"))
    shards = []
    for name, label_name in zip(names, label_names, strict=True):
        said = _kind_of(name)
        if input_kind is not None and said not in (None, input_kind):
            raise InputError(name, input_kind, f"a file that is called {said}", hint=Hint("input_kind", str(said)))
        kind = said or input_kind or "logits"
        shape, dtype = npy_header(name)
        label_shape, label_dtype = npy_header(label_name)
        if dtype.kind != "f":
            raise InputError(f"{name}: expected floating point, found {dtype}")
        _check_shapes(name, kind, shape, label_name, "labels", label_shape)
        if label_dtype.kind not in "iu":
            raise InputError(f"{label_name}: expected integer class numbers, found {label_dtype}")
        shards.append(Shard(name, label_name, kind, "labels", kind, shape[0], shape[1]))
    return shards


def _kind_of(name: str) -> InputKind | None:
    """What the name of a file says that it holds: logits.npy, val_logits.npy, val_logits-003.npy."""
    words = re.split(r"[^a-zA-Z]+", Path(name).stem)
    return next((kind for kind in KINDS if kind in words), None)


def _labels_of(name: str) -> str:
    """val_logits-003.npy: val_labels-003.npy. val-003.npy: val_labels-003.npy."""
    path = Path(name)
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
    return str(path.with_name(f"{stem}{path.suffix}"))


def npy_header(name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array, whose bytes are all there."""
    try:
        with open(name, "rb") as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
            expected = stream.tell() + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    except DAMAGE as error:
        raise damaged(name, "an array (.npy)", error) from error
    if dtype.hasobject:
        raise InputError(f"{name}: expected an array of numbers, found pickled Python objects; they are refused")
    found = os.path.getsize(name)
    if found < expected:
        raise InputError(
            f"{name}: expected {expected} bytes for {dtype} {list(shape)}, found a truncated file of {found}"
        )
    return shape, dtype


def map_npy(name: str) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.load(name, mmap_mode="r", allow_pickle=False)
    return array


# ---- .safetensors --------------------------------------------------------------------------------------------------


def safe_open(name: str) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise InputError(f"{name}: safetensors is needed to read it: pip install safetensors") from error
    return safe_open(name, framework="pt")


def safetensors_arrays(name: str) -> dict[str, Any]:
    """By name, ``shape`` and ``dtype`` of what a file has."""
    try:
        with safe_open(name) as stream:
            arrays = {}
            for key in stream.keys():  # noqa: SIM118  # no mapping
                part = stream.get_slice(key)
                arrays[key] = SimpleNamespace(shape=tuple(part.get_shape()), dtype=part.get_dtype())
            return arrays
    except InputError:
        raise
    except Exception as error:  # safetensors has an error of its own for damaged files, and OSError for others
        raise damaged(name, "a .safetensors file", error) from error


def _safetensors_shards(
    name: str, input_kind: InputKind | None, logits_key: str | None, labels_key: str | None
) -> dict[str, Shard]:
    arrays = safetensors_arrays(name)
    shards = {}
    for prefix, (kind, input_name, label_name) in find_sets(name, arrays, input_kind, logits_key, labels_key).items():
        input, target = arrays[input_name], arrays[label_name]
        if input.dtype not in _SAFETENSORS_FLOATS:
            raise InputError(f"{name}: {input_name}: expected floating point, found {input.dtype}")
        _check_shapes(f"{name}: {input_name}", kind, input.shape, f"{name}: {label_name}", label_name, target.shape)
        if target.dtype not in _SAFETENSORS_INTEGERS:
            raise InputError(f"{name}: {label_name}: expected integer class numbers, found {target.dtype}")
        shards[prefix] = Shard(name, name, input_name, label_name, kind, input.shape[0], input.shape[1])
    return shards


def _check_shapes(
    where: str, kind: str, shape: Sequence[int], label_where: str, label_name: str, label_shape: Sequence[int]
) -> None:
    if len(shape) != 2 or shape[1] < 2:
        raise InputError(f"{where}: expected {kind} [N, C] with C >= 2 classes, found {list(shape)}")
    if tuple(label_shape) != (shape[0],):
        raise InputError(
            f"{label_where}: expected {label_name} [N] = [{shape[0]}] to go with {list(shape)} in {where}, "
            f"found {list(label_shape)}"
        )
