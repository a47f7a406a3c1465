"""Rows without labels, a few at a time where the format allows it: what a saved calibrator is applied to."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from focalkern._types import InputKind
from focalkern.files.checks import KINDS, Hint, InputError, as_tensor, check_options, check_rows, check_said
from focalkern.files.read import ARCHIVES, BARE, DAMAGE, damaged
from focalkern.files.shards import LOOK, map_npy, matches, npy_header, safe_open, safetensors_arrays
from focalkern.files.tables import OtherColumns, read_unlabelled

__all__ = ["UnlabelledRows", "open_unlabelled"]

_FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class _Part:
    """What one file has of a set; ``read`` takes the rows [begin, end)."""

    source: str
    kind: InputKind
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor]

    def rows(self, begin: int, end: int) -> Tensor:
        try:
            return self.read(begin, end)
        except DAMAGE as error:
            raise damaged(self.source, f"rows from {begin} on", error) from error


@dataclass(frozen=True)
class UnlabelledRows:
    """One set of rows.

    Attributes:
        kind: ``"logits"`` or ``"probs"``.
        name: ``""``, ``"val"``, ``"test"`` or another word in front of the array's name.
        source: the file or pattern.
        n_rows, n_classes: N and C.
        table: of a table, the names of the classes and all other columns.
    """

    kind: InputKind
    name: str
    source: str
    n_rows: int
    n_classes: int
    table: OtherColumns
    _parts: tuple["_Part", ...]

    def batches(self, rows_at_once: int) -> Iterator[Tensor]:
        """[n, C] float32 or float64, checked."""
        for part in self._parts:
            for begin in range(0, part.shape[0], rows_at_once):
                input = part.rows(begin, min(begin + rows_at_once, part.shape[0]))
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
    table = OtherColumns()
    for name in names:
        if suffix == ".npy":
            shape, dtype = npy_header(name)
            _check(name, "array", shape, dtype.kind == "f", str(dtype))
            sets.setdefault("", []).append(_Part(name, _kind_of_file(name, input_kind), shape, _of_npy(name)))
        elif suffix == ".safetensors":
            arrays = safetensors_arrays(name)
            for prefix, (kind, key) in _find(name, arrays, input_kind, logits_key).items():
                found = arrays[key]
                _check(name, key, found.shape, str(found.dtype) in _FLOATS, str(found.dtype))
                sets.setdefault(prefix, []).append(_Part(name, kind, found.shape, _of_safetensors(name, key)))
        elif suffix in (".csv", ".parquet", ".feather"):
            kind, values, table = read_unlabelled(name, logits_key, input_kind)
            _check(name, "the columns", values.shape, True, "")
            sets[""] = [_Part(name, kind, values.shape, _slices(torch.from_numpy(values)))]
        elif suffix in ARCHIVES:
            content = ARCHIVES[suffix](name)
            for prefix, (kind, key) in _find(name, content, input_kind, logits_key).items():
                tensor = as_tensor(name, key, content[key])
                _check(name, key or "the tensor", tuple(tensor.shape), tensor.is_floating_point(), str(tensor.dtype))
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
        if input_kind is None and first.kind == "logits":
            filled = next((part for part in parts if part.shape[0]), first)
            start = filled.rows(0, min(filled.shape[0], LOOK))
            check_said(filled.source, first.kind, first.kind, input_kind, start)
        opened[prefix] = UnlabelledRows(first.kind, prefix, str(path), rows, first.shape[1], table, tuple(parts))
    return opened


def _find(
    source: str, arrays: Mapping[str, Any], input_kind: InputKind | None, logits_key: str | None
) -> dict[str, tuple[InputKind, str]]:
    """By prefix, kind and name of every array that is called logits or probs, or of the one that is named."""
    if list(arrays) == [BARE]:
        return {"": (_kind_of_file(source, input_kind), BARE)}
    if logits_key is not None:
        if logits_key not in arrays:
            found_names = ", ".join(arrays) or "nothing"
            raise InputError(source, f"an array called {logits_key}", found_names, hint=Hint("logits_key", "NAME"))
        return {"": (input_kind or _kind_in(logits_key) or "logits", logits_key)}
    found: dict[str, tuple[InputKind, str]] = {}
    for key in arrays:
        prefix, _, last = key.rpartition("_")
        for kind in KINDS:
            if last != kind or (input_kind is not None and kind != input_kind):
                continue
            if prefix in found:
                both = (Hint("input_kind", "logits"), "or", Hint("input_kind", "probs"))
                raise InputError(source, f"one of {found[prefix][1]} and {key}", "both", hint=both)
            found[prefix] = (kind, key)
    if not found:
        wanted = input_kind or "logits or probs"
        found_names = ", ".join(arrays) or "nothing"
        raise InputError(source, f"an array called {wanted}", found_names, hint=Hint("logits_key", "NAME"))
    return found


def _kind_of_file(name: str, input_kind: InputKind | None) -> InputKind:
    said = _kind_in(Path(name).stem)
    if None not in (said, input_kind) and said != input_kind:
        raise InputError(name, str(input_kind), f"a file that is called {said}", hint=Hint("input_kind", str(said)))
    return said or input_kind or "logits"


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
