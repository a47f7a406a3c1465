"""Arrays in files that are read a few rows at a time."""

import io
import json
import math
import os
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from focalkern.files import urls
from focalkern.files.arrays import READ_ERRORS, ArrayRows, unreadable
from focalkern.files.errors import InputError
from focalkern.files.paths import Url, open_file
from focalkern.files.samples import as_tensor

__all__ = ["BY_NAME", "open_npy", "open_safetensors", "open_zarr"]

_SAFETENSORS_FLOATS = ("F16", "BF16", "F32", "F64")
_SAFETENSORS_INTEGERS = ("I8", "I16", "I32", "I64", "U8")
_TORCH_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
_NUMBERS: dict[str, Any] = {"f": "float", "i": "integer", "u": "integer"}
# Number of bytes that contain the header of any .npy file, except one with hundreds of fields.
_NPY_HEADER = 1 << 12


def open_npy(source: str, name: str = "array") -> ArrayRows:
    """The array of a .npy file; ``name`` is its name in errors.

    Raises:
        InputError: the file is not an array of numbers, or is truncated.
    """
    if isinstance(source, Url):
        return _open_remote_npy(source, name)
    with open_file(source) as stream:
        shape, dtype, _, _ = _npy_header(source, stream, os.path.getsize(source))

    def read(begin: int, end: int) -> Tensor:
        # A new map for each read, so that pages of earlier reads are released with their map.
        return as_tensor(source, name, _map_npy(source)[begin:end].copy())

    return ArrayRows(source, name, shape, str(dtype), _NUMBERS.get(dtype.kind, "other"), read)


def _open_remote_npy(source: Url, name: str) -> ArrayRows:
    head = urls.part(source, 0, _NPY_HEADER)
    shape, dtype, by_columns, first = _npy_header(source, io.BytesIO(head), urls.size(source))

    def read(begin: int, end: int) -> Tensor:
        if by_columns:  # rows are not contiguous
            return as_tensor(source, name, np.load(io.BytesIO(urls.contents(source)), allow_pickle=False)[begin:end])
        data = _rows_of_bytes(source, first, shape, dtype.itemsize, begin, end)
        return as_tensor(source, name, np.frombuffer(data, dtype).reshape(-1, *shape[1:]))

    return ArrayRows(source, name, shape, str(dtype), _NUMBERS.get(dtype.kind, "other"), read)


def _rows_of_bytes(source: Url, first: int, shape: tuple[int, ...], itemsize: int, begin: int, end: int) -> bytearray:
    """The rows [begin, end) of an array whose bytes begin at ``first``."""
    row = math.prod(shape[1:]) * itemsize
    end = min(end, shape[0])
    wanted = max(0, end - begin) * row
    data = bytearray(urls.part(source, first + begin * row, first + begin * row + wanted) if wanted else b"")
    if len(data) != wanted:
        raise InputError(f"{source}: expected {wanted} bytes for rows {begin} to {end - 1}, found {len(data)}")
    return data


def open_safetensors(source: str) -> dict[str, ArrayRows]:
    """The arrays of a .safetensors file by name.

    Raises:
        InputError: safetensors is not installed, or the file is damaged.
    """

    if isinstance(source, Url):
        return _open_remote_safetensors(source)

    def rows_of(key: str, part: Any) -> ArrayRows:
        dtype = str(part.get_dtype())
        numbers: Any = "integer" if dtype in _SAFETENSORS_INTEGERS else "other"

        def read(begin: int, end: int) -> Tensor:
            with _safe_open(source) as stream:
                whole = len(shape) == 0
                rows: Tensor = stream.get_tensor(key) if whole else stream.get_slice(key)[begin:end]
                return rows

        shape = tuple(part.get_shape())
        return ArrayRows(source, key, shape, dtype, "float" if dtype in _SAFETENSORS_FLOATS else numbers, read)

    try:
        with _safe_open(source) as stream:
            return {key: rows_of(key, stream.get_slice(key)) for key in stream.keys()}  # noqa: SIM118  # no mapping
    except InputError:
        raise
    except Exception as error:  # safetensors raises its own error for damaged files, and OSError for others
        raise unreadable(source, "a .safetensors file", error) from error


def _open_remote_safetensors(source: Url) -> dict[str, ArrayRows]:
    """The arrays of a remote file. Its header is a length of 8 bytes and JSON: https://huggingface.co/docs/safetensors,
    "Format"."""

    def rows_of(key: str, entry: dict[str, Any]) -> ArrayRows:
        dtype, shape = str(entry["dtype"]), tuple(int(length) for length in entry["shape"])
        begins, ends = (8 + length + int(offset) for offset in entry["data_offsets"])

        def read(begin: int, end: int) -> Tensor:
            kind = _TORCH_DTYPES[dtype]
            if not shape:
                return torch.frombuffer(bytearray(urls.part(source, begins, ends)), dtype=kind).reshape(())
            data = _rows_of_bytes(source, begins, shape, kind.itemsize, begin, end)
            rows = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
            return rows.reshape(max(0, min(end, shape[0]) - begin), *shape[1:])

        numbers: Any = "integer" if dtype in _SAFETENSORS_INTEGERS else "other"
        return ArrayRows(source, key, shape, dtype, "float" if dtype in _SAFETENSORS_FLOATS else numbers, read)

    try:
        length = int.from_bytes(urls.part(source, 0, 8), "little")
        if length > 1 << 27:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(urls.part(source, 8, 8 + length))
        return {key: rows_of(key, entry) for key, entry in header.items() if key != "__metadata__"}
    except READ_ERRORS as error:
        raise unreadable(source, "a .safetensors file", error) from error


def open_zarr(source: str) -> dict[str, ArrayRows]:
    """The arrays in the top group of a zarr store by name.

    Raises:
        InputError: zarr is not installed, or the store is damaged.
    """
    try:
        import zarr
    except ImportError as error:
        raise InputError(f"{source}: zarr is needed to read it: pip install zarr") from error

    def rows_of(key: str, array: Any) -> ArrayRows:
        def read(begin: int, end: int) -> Tensor:
            return as_tensor(source, key, np.asarray(array[begin:end] if array.shape else array[()]))

        numbers = _NUMBERS.get(array.dtype.kind, "other")
        return ArrayRows(source, key, tuple(array.shape), str(array.dtype), numbers, read)

    try:
        options: dict[str, Any] = {"storage_options": dict(source.options)} if isinstance(source, Url) else {}
        return {key: rows_of(key, array) for key, array in zarr.open_group(str(source), mode="r", **options).arrays()}
    except READ_ERRORS as error:
        raise unreadable(source, "a group of arrays (zarr)", error) from error


# Functions that open the arrays of a file by name, by suffix.
BY_NAME: dict[str, Callable[[str], dict[str, ArrayRows]]] = {".safetensors": open_safetensors, ".zarr": open_zarr}


def _npy_header(name: str, stream: BinaryIO, found: int | None) -> tuple[tuple[int, ...], np.dtype[Any], bool, int]:
    """Shape, dtype, Fortran order, and offset of the first byte of the array in a file of ``size`` bytes."""
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(stream)
        first = stream.tell()
        expected = first + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    except READ_ERRORS as error:
        raise unreadable(name, "an array (.npy)", error) from error
    if dtype.hasobject:
        raise InputError(f"{name}: expected an array of numbers, found pickled Python objects; they are refused")
    if found is not None and found < expected:
        raise InputError(
            f"{name}: expected {expected} bytes for {dtype} {list(shape)}, found a truncated file of {found}"
        )
    return shape, dtype, by_columns and len(shape) > 1, first


def _map_npy(name: str) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.load(name, mmap_mode="r", allow_pickle=False)
    return array


def _safe_open(name: str) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise InputError(f"{name}: safetensors is needed to read it: pip install safetensors") from error
    return safe_open(name, framework="pt")
