"""Rows without labels, a few at a time where the format allows it: what a saved calibrator is applied to."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._columns import ColumnsError, class_columns
from focalkern.calibrators import InputKind
from focalkern.files.checks import KINDS, InputError, as_tensor, check_options, check_rows
from focalkern.files.read import ARCHIVES, DAMAGE, damaged
from focalkern.files.shards import map_npy, matches, npy_header, safe_open, safetensors_arrays
from focalkern.files.tables import arrow_table

__all__ = ["UnlabelledRows", "open_unlabelled"]

_LABELS = ("label", "labels", "target")
_FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class _Part:
    """What one file has of a set; ``read`` takes the rows [begin, end)."""

    source: str
    kind: InputKind
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]


@dataclass(frozen=True)
class UnlabelledRows:
    """One set of rows.

    Attributes:
        kind: ``"logits"`` or ``"probs"``.
        name: ``""``, ``"val"``, ``"test"`` or another word in front of the array's name.
        source: the file or pattern.
        n_rows, n_classes: N and C.
        columns: the names of the classes where the file has some.
    """

    kind: InputKind
    name: str
    source: str
    n_rows: int
    n_classes: int
    columns: tuple[str, ...]
    _parts: tuple["_Part", ...]

    def batches(self, rows_at_once: int) -> Iterator[Tensor]:
        """[n, C] float32 or float64, checked."""
        for part in self._parts:
            for begin in range(0, part.shape[0], rows_at_once):
                try:
                    input = part.read(begin, min(begin + rows_at_once, part.shape[0]))
                except DAMAGE as error:
                    raise damaged(part.source, f"rows from {begin} on", error) from error
                nowhere = torch.zeros(len(input), dtype=torch.int64)
                check_rows(part.source, self.kind, self.kind, input, "labels", nowhere, begin)
                yield input if input.dtype == torch.float64 else input.to(torch.float32)


def open_unlabelled(
    path: str, input_kind: InputKind | None = None, logits_key: str | None = None
) -> dict[str, UnlabelledRows]:
    """The sets of a file, or of the files of a pattern, by what stands in front of the array's name.

    Labels that are there are not read. ``.npy`` and ``.safetensors`` are read a few rows at a time, the others at once.

    Args:
        path: .npz, .npy, .pt, .pth, .safetensors, .csv, .parquet or .feather; or a pattern of .npy or .safetensors.
        input_kind: ``"logits"`` or ``"probs"``; None takes what the name of the array or of the file says, and logits
            where it says nothing.
        logits_key: the name of the array; of tables, a pattern for the columns of the classes.

    Raises:
        InputError: anything at all that is wrong with the files.
    """
    path = check_options("open_unlabelled", input_kind, path, logits_key=logits_key)
    names = matches(path)
    suffix = Path(names[0]).suffix.lower()
    if suffix == ".npy":
        names = [name for name in names if "labels" not in Path(name).stem] or names
    if any(Path(name).suffix.lower() != suffix for name in names):
        raise InputError(f"{path}: expected files of one format, found {suffix} and others")
    if len(names) > 1 and suffix not in (".npy", ".safetensors"):
        raise InputError(f"{path}: expected .npy or .safetensors for several files, found {suffix}")
    sets: dict[str, list[_Part]] = {}
    columns: tuple[str, ...] = ()
    for name in names:
        if suffix == ".npy":
            shape, dtype = npy_header(name)
            _check(name, "array", shape, dtype.kind == "f", str(dtype))
            said = _kind_in(Path(name).stem)
            if None not in (said, input_kind) and said != input_kind:
                raise InputError(
                    f"{name}: expected {input_kind} (as --input-kind says), found a file that is called {said}"
                )
            sets.setdefault("", []).append(_Part(name, said or input_kind or "logits", shape, _of_npy(name)))
        elif suffix == ".safetensors":
            arrays = safetensors_arrays(name)
            for prefix, (kind, key) in _find(name, arrays, input_kind, logits_key).items():
                found = arrays[key]
                _check(name, key, found.shape, str(found.dtype) in _FLOATS, str(found.dtype))
                sets.setdefault(prefix, []).append(_Part(name, kind, found.shape, _of_safetensors(name, key)))
        elif suffix in (".csv", ".parquet", ".feather"):
            columns, table = _read_table(name, logits_key)
            sets[""] = [_Part(name, input_kind or "logits", tuple(table.shape), _slices(table))]
        elif suffix in ARCHIVES:
            content = ARCHIVES[suffix](name)
            for prefix, (kind, key) in _find(name, content, input_kind, logits_key).items():
                tensor = as_tensor(name, key, content[key])
                _check(name, key, tuple(tensor.shape), tensor.is_floating_point(), str(tensor.dtype))
                sets[prefix] = [_Part(name, kind, tuple(tensor.shape), _slices(tensor))]
        else:
            known = ", ".join((".npy", ".safetensors", ".csv", ".parquet", ".feather", *ARCHIVES))
            raise InputError(f"{name}: expected {known}, found {suffix or 'no suffix'!r}")
    opened = {}
    for prefix, parts in sets.items():
        first = parts[0]
        for part in parts:
            if (part.kind, part.shape[1]) != (first.kind, first.shape[1]):
                raise InputError(
                    f"{part.source}: expected {first.kind} of {first.shape[1]} classes as in {first.source}, found "
                    f"{part.kind} of {part.shape[1]}"
                )
        rows = sum(part.shape[0] for part in parts)
        opened[prefix] = UnlabelledRows(first.kind, prefix, str(path), rows, first.shape[1], columns, tuple(parts))
    return opened


def _find(
    source: str, arrays: Mapping[str, Any], input_kind: InputKind | None, logits_key: str | None
) -> dict[str, tuple[InputKind, str]]:
    """By prefix, kind and name of every array that is called logits or probs, or of the one that is named."""
    if logits_key is not None:
        if logits_key not in arrays:
            raise InputError(f"{source}: expected an array called {logits_key}, found {', '.join(arrays) or 'nothing'}")
        return {"": (input_kind or _kind_in(logits_key) or "logits", logits_key)}
    found: dict[str, tuple[InputKind, str]] = {}
    for key in arrays:
        prefix, _, last = key.rpartition("_")
        for kind in KINDS:
            if last != kind or (input_kind is not None and kind != input_kind):
                continue
            if prefix in found:
                raise InputError(
                    f"{source}: expected one of {found[prefix][1]} and {key}, found both; say --input-kind"
                )
            found[prefix] = (kind, key)
    if not found:
        wanted = input_kind or "logits or probs"
        raise InputError(f"{source}: expected an array called {wanted}, found {', '.join(arrays) or 'nothing'}")
    return found


def _kind_in(stem: str) -> InputKind | None:
    words = stem.replace("-", "_").replace(".", "_").split("_")
    return next((kind for kind in KINDS if kind in words), None)


def _check(source: str, key: str, shape: tuple[int, ...], floating: bool, dtype: str) -> None:
    if not floating:
        raise InputError(f"{source}: {key}: expected floating point, found {dtype.removeprefix('torch.')}")
    if len(shape) != 2 or shape[1] < 2:
        raise InputError(f"{source}: {key}: expected [N, C] with C >= 2 classes, found {list(shape)}")


def _of_npy(name: str) -> Callable[[int, int], Tensor]:
    # Mapped anew each time: what was read before leaves the memory with the mapping.
    return lambda begin, end: as_tensor(name, "array", map_npy(name)[begin:end].copy())


def _of_safetensors(name: str, key: str) -> Callable[[int, int], Tensor]:
    def read(begin: int, end: int) -> Tensor:
        with safe_open(name) as stream:
            rows: Tensor = stream.get_slice(key)[begin:end]
            return rows

    return read


def _slices(tensor: Tensor) -> Callable[[int, int], Tensor]:
    return lambda begin, end: tensor[begin:end]


def _read_table(source: str, logits_key: str | None) -> tuple[tuple[str, ...], Tensor]:
    """Names and values of the classes; a column of labels is none of them."""
    if source.lower().endswith(".csv"):
        header, columns = _csv_columns(source)
    else:
        header, columns = _arrow_columns(source)
    kept = [place for place, name in enumerate(header) if name.lower() not in _LABELS]
    try:
        found = class_columns([header[place] for place in kept], logits_key)
    except ColumnsError as error:
        raise InputError(f"{source}: {error}; say which are the classes: --logits-key PATTERN") from error
    try:
        values = [np.asarray(columns[kept[place]], dtype=np.float64) for place in found.places]
    except (TypeError, ValueError) as error:
        raise InputError(f"{source}: expected numbers, found: {error}") from error
    table = torch.from_numpy(np.stack(values, axis=1)) if values else torch.zeros(0, 0)
    _check(source, "the columns", tuple(table.shape), True, "")
    return tuple(found.names), table


def _csv_columns(source: str) -> tuple[list[str], Sequence[Any]]:
    try:
        with open(source, newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            header = [name.strip() for name in next(reader, [])]
            rows = []
            for row in reader:
                if row and len(row) != len(header):
                    raise InputError(
                        f"{source}: line {reader.line_num}: expected {len(header)} columns as in the header, "
                        f"found {len(row)}"
                    )
                rows += [row] if row else []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{source}: expected a text file with comma-separated values, found: {error}") from error
    return header, list(zip(*rows, strict=True)) if rows else [()] * len(header)


def _arrow_columns(source: str) -> tuple[list[str], Sequence[Any]]:
    frame = arrow_table(source)
    return [str(name) for name in frame.column_names], [column.to_numpy() for column in frame.columns]
