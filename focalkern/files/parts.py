"""Arrays in files that are read a few rows at a time."""

import os
from typing import Any

import numpy as np
from torch import Tensor

from focalkern.files.arrays import READ_ERRORS, ArrayRows, unreadable
from focalkern.files.samples import InputError, as_tensor

__all__ = ["open_npy", "open_safetensors"]

_SAFETENSORS_FLOATS = ("F16", "BF16", "F32", "F64")
_SAFETENSORS_INTEGERS = ("I8", "I16", "I32", "I64", "U8")


def open_npy(source: str, name: str = "array") -> ArrayRows:
    """The array of a .npy file; ``name`` is its name in errors.

    Raises:
        InputError: not an array of numbers, or a truncated one.
    """
    shape, dtype = _npy_header(source)

    def read(begin: int, end: int) -> Tensor:
        # Mapped anew each time: what was read before leaves the memory with the mapping.
        return as_tensor(source, name, _map_npy(source)[begin:end].copy())

    numbers: Any = {"f": "float", "i": "integer", "u": "integer"}.get(dtype.kind, "other")
    return ArrayRows(source, name, shape, str(dtype), numbers, read)


def open_safetensors(source: str) -> dict[str, ArrayRows]:
    """By name, the arrays of a .safetensors file.

    Raises:
        InputError: safetensors is not installed, or the file is damaged.
    """

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
    except Exception as error:  # safetensors has an error of its own for damaged files, and OSError for others
        raise unreadable(source, "a .safetensors file", error) from error


def _npy_header(name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array, whose bytes are all there."""
    try:
        with open(name, "rb") as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
            expected = stream.tell() + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    except READ_ERRORS as error:
        raise unreadable(name, "an array (.npy)", error) from error
    if dtype.hasobject:
        raise InputError(f"{name}: expected an array of numbers, found pickled Python objects; they are refused")
    found = os.path.getsize(name)
    if found < expected:
        raise InputError(
            f"{name}: expected {expected} bytes for {dtype} {list(shape)}, found a truncated file of {found}"
        )
    return shape, dtype


def _map_npy(name: str) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.load(name, mmap_mode="r", allow_pickle=False)
    return array


def _safe_open(name: str) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise InputError(f"{name}: safetensors is needed to read it: pip install safetensors") from error
    return safe_open(name, framework="pt")
