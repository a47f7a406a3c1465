"""Rows without labels, for a saved calibrator: a few at a time if the format permits it."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from focalkern._arrays import flat_rows
from focalkern._checks import not_floating
from focalkern._types import INPUT_KINDS, InputKind
from focalkern.files.arrays import ARCHIVES, BARE, ArrayRows, kind_of_file, rows_of_tensor
from focalkern.files.errors import Hint, InputError
from focalkern.files.parts import BY_NAME, open_npy
from focalkern.files.paths import located, matches, name_of, suffix_of
from focalkern.files.pixels import class_misfit, images_at_once, place_of
from focalkern.files.samples import as_tensor, check_input_kind, check_options
from focalkern.files.shards import LOOK, STREAMED, Shard
from focalkern.files.tables import OtherColumns, read_unlabelled

__all__ = ["UnlabelledRows", "open_unlabelled"]


@dataclass(frozen=True)
class UnlabelledRows:
    """One set of rows.

    Attributes:
        kind: ``"logits"`` or ``"probs"``.
        name: prefix of the name of the array: ``""``, ``"val"``, ``"test"`` or another word.
        source: the file or pattern.
        n_rows, n_classes: N and C.
        pixels: (d1, ...) of [N, C, d1, ...]; empty for [N, C].
        table: for a table, the names of the classes and all other columns; else None.
    """

    kind: InputKind
    name: str
    source: str
    n_rows: int
    n_classes: int
    pixels: tuple[int, ...]
    table: OtherColumns
    _parts: tuple[Shard, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, C, d1, ...]."""
        return (self.n_rows, self.n_classes, *self.pixels)

    def batches(self, numbers: int) -> Iterator[Tensor]:
        """Checked batches [n, C], float32 or float64, of rows or pixels, with about ``numbers`` values each."""
        at_once = images_at_once(self.shape, numbers)
        for part in self._parts:
            for begin in range(0, part.rows, at_once):
                input, _ = part.read(begin, min(begin + at_once, part.rows))
                yield input if input.dtype == torch.float64 else input.to(torch.float32)


def open_unlabelled(
    path: str,
    input_kind: InputKind | None = None,
    logits_key: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    labels_key: str | None = None,
) -> dict[str, UnlabelledRows]:
    """The sets of one or several files, by the prefix of the array's name.

    Labels in the files are not read. ``.npy``, ``.safetensors`` and ``.zarr`` are read a few rows at a time, other
    formats at once.

    Args:
        path: a file .npz, .npy, .pt, .pth, .safetensors, .zarr, .csv, .parquet or .feather; a folder, pattern or list
            of files of one of these formats except .csv.
        input_kind: ``"logits"`` or ``"probs"``; None: the name of the array or of the file decides; other names mean
            logits.
        logits_key: the name of the array; for tables, a pattern for the columns of the classes.
        storage_options: options of the file system of URLs.
        labels_key: the column of labels of a table; None is ``label``, ``labels`` or ``target``.

    Raises:
        InputError: any problem with the files.
    """
    keys = {"logits_key": logits_key, "labels_key": labels_key}
    path = check_options("open_unlabelled", input_kind, path, storage_options, **keys)
    path = located(path, storage_options)
    names = matches(path)
    suffix = suffix_of(names[0])
    if suffix == ".npy":
        names = [name for name in names if "labels" not in name_of(name).stem] or names
    if any(suffix_of(name) != suffix for name in names):
        raise InputError(f"{path}: expected files of one format, found {suffix} and others")
    if len(names) > 1 and suffix == ".csv":
        raise InputError(f"{path}: expected one .csv file, found {len(names)}; several may be .parquet")
    sets: dict[str, list[Shard]] = {}
    table = OtherColumns()
    if suffix in (".csv", ".parquet", ".feather"):
        kind, values, table = read_unlabelled(path, names, logits_key, input_kind, labels_key)
        sets[""] = [_part(rows_of_tensor(path, kind, torch.from_numpy(values)), kind, "the columns")]
        names = []
    for name in names:
        if suffix == ".npy":
            kind = kind_of_file(name, _kind_in(name_of(name).stem), input_kind)
            sets.setdefault("", []).append(_part(open_npy(name, kind), kind, "array"))
        elif suffix in BY_NAME:
            arrays = BY_NAME[suffix](name)
            for prefix, (kind, key) in _find(name, arrays, input_kind, logits_key).items():
                sets.setdefault(prefix, []).append(_part(arrays[key], kind, key))
        elif suffix in ARCHIVES:
            content = ARCHIVES[suffix](name)
            for prefix, (kind, key) in _find(name, content, input_kind, logits_key).items():
                tensor = as_tensor(name, key, content[key])
                sets.setdefault(prefix, []).append(_part(rows_of_tensor(name, kind, tensor), kind, key or "the tensor"))
        else:
            known = ", ".join((*STREAMED, ".csv", ".parquet", ".feather", *ARCHIVES))
            raise InputError(f"{name or 'an empty name'}: expected {known}, found {suffix or 'no suffix'!r}")
    opened = {}
    for prefix, parts in sets.items():
        first = parts[0]
        for part in parts:
            if (part.kind, part.input.shape[1:]) != (first.kind, first.input.shape[1:]):
                raise InputError(
                    f"{part.source}: expected {first.kind} of {_classes(first)} as in {first.source}, found "
                    f"{part.kind} of {_classes(part)}"
                )
        rows = sum(part.rows for part in parts)
        if input_kind is None and first.kind == "logits":
            filled = next((part for part in parts if part.rows), first)
            images = min(filled.rows, images_at_once(filled.input.shape, LOOK * first.n_classes))
            start = flat_rows(filled.input.rows(0, images))
            check_input_kind(filled.source, first.kind, first.kind, input_kind, start)
        classes, *pixels = first.input.shape[1:]
        opened[prefix] = UnlabelledRows(first.kind, prefix, path, rows, classes, tuple(pixels), table, tuple(parts))
    return opened


def _find(
    source: str, arrays: Mapping[str, Any], input_kind: InputKind | None, logits_key: str | None
) -> dict[str, tuple[InputKind, str]]:
    """For each prefix, kind and name of the array called logits or probs, or of the array that the user named."""
    if list(arrays) == [BARE]:
        return {"": (kind_of_file(source, _kind_in(name_of(source).stem), input_kind), BARE)}
    if logits_key is not None:
        if logits_key not in arrays:
            found_names = ", ".join(arrays) or "nothing"
            raise InputError(source, f"an array called {logits_key}", found_names, hint=Hint("logits_key", "NAME"))
        return {"": (input_kind or _kind_in(logits_key) or "logits", logits_key)}
    found: dict[str, tuple[InputKind, str]] = {}
    for key in arrays:
        prefix, _, last = key.rpartition("_")
        for kind in INPUT_KINDS:
            if last != kind or (input_kind is not None and kind != input_kind):
                continue
            if prefix in found:
                both = (Hint("input_kind", "logits"), "or", Hint("input_kind", "probs"))
                raise InputError(source, f"one of {found[prefix][1]} and {key}", "both", hint=both)
            found[prefix] = (kind, key)
    if not found and input_kind == "probs":  # probabilities under the name of logits, as the user says
        return {prefix: ("probs", key) for prefix, (_, key) in _find(source, arrays, "logits", None).items()}
    if not found:
        wanted = input_kind or "logits or probs"
        found_names = ", ".join(arrays) or "nothing"
        raise InputError(source, f"an array called {wanted}", found_names, hint=Hint("logits_key", "NAME"))
    return found


def _kind_in(stem: str) -> InputKind | None:
    words = stem.replace("-", "_").replace(".", "_").split("_")
    return next((kind for kind in INPUT_KINDS if kind in words), None)


def _part(input: ArrayRows, kind: InputKind, key: str) -> Shard:
    """The rows of one array; errors call it ``key``."""
    if input.numbers != "float":
        raise InputError(f"{input.source}: {key}: expected floating point, found {not_floating(input.dtype)}")
    if len(input.shape) < 2 or input.shape[1] < 2 or 0 in input.shape[2:]:
        raise InputError(f"{input.source}: {key}: {class_misfit(input.shape)}")
    if len(input.shape) == 2:
        return Shard(input, None, kind)
    return Shard(input, None, kind, functools.partial(place_of, shape=(input.shape[0], *input.shape[2:])))


def _classes(part: Shard) -> str:
    """``3 classes``, or ``3 classes [8, 8]`` of pixels."""
    classes, *pixels = part.input.shape[1:]
    return f"{classes} classes {pixels}" if pixels else f"{classes} classes"
