"""NumPy arrays as arguments: NumPy converts arguments that are not tensors, and the results are then NumPy arrays."""

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import short
from focalkern._columns import ClassColumns, ColumnsError, class_columns
from focalkern._devices import where_float64
from focalkern._types import FLOATS

__all__ = [
    "arrays_for_arrays",
    "as_array",
    "as_tensor",
    "columns_of_frame",
    "flat_rows",
    "numbers_of_frame",
    "refuse_masked",
    "with_tensors",
]


P = ParamSpec("P")
R = TypeVar("R")


def as_tensor(
    values: Any, what: str = "an argument", check_columns: Callable[[ClassColumns], None] | None = None
) -> Tensor:
    """A tensor, detached; anything else converted by NumPy, without a copy where that is safe.

    focalkern computes with such values in float64, so a tensor of a device without float64 is copied to the
    CPU. ``check_columns`` may raise for the columns of a frame.

    Raises:
        TypeError: NumPy cannot make an array of numbers of it, or masks some of its values; ``what`` names the operator
            and the argument.
        ValueError: a frame with columns that may not be classes.
    """
    if isinstance(values, Tensor):
        if values.is_nested or values.layout != torch.strided or values.is_quantized:
            raise TypeError(f"{what} must be a dense tensor that is not quantized, got {short(values)}")
        if values.dtype not in FLOATS and values.is_floating_point():  # float8 has no arithmetic
            raise TypeError(f"{what} must be float16, bfloat16, float32 or float64, got {values.dtype}")
        if values.requires_grad:
            values = values.detach()
        if values.is_meta:
            raise ValueError(f"{what} must have values, got {short(values)} on the device meta")
        return where_float64(values)
    refuse_masked(values, what)
    columns = None if isinstance(values, np.ndarray) else columns_of_frame(values, what)
    if columns is not None:
        if check_columns is not None:
            check_columns(columns)
        values = numbers_of_frame(values, columns, what)
    array = None
    try:
        array = np.asarray(values, order="C")
        # torch supports only the machine's byte order.
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        # torch warns about read-only memory, because a tensor could write to it.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except Exception as error:  # objects, text, dates; rows of several lengths
        found = f"{type(values).__name__} of {values.dtype}" if hasattr(values, "dtype") else type(values).__name__
        are_names = array is not None and array.size > 0 and isinstance(array.flat[0], str)
        remedy = "; pass the number of each class in place of its name" if are_names and what.endswith("target") else ""
        raise TypeError(f"{what} must be a tensor or an array of numbers, got {found}{remedy}") from error


def refuse_masked(values: Any, what: str) -> None:
    """Raises TypeError for a NumPy array with masked values: the conversion to a tensor would unmask them."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        labels = ", or pass labels as target.filled(-100) with ignore_index=-100" if values.dtype.kind in "iu" else ""
        raise TypeError(
            f"{what} must have no masked values, got {int(np.sum(values.mask)):,} of {values.size:,}; leave these "
            f"rows out{labels}"
        )


def columns_of_frame(values: Any, what: str) -> ClassColumns | None:
    """The columns of a frame that are the classes, which may be in any order; None for anything else.

    Raises:
        ValueError: columns that may not be classes.
    """
    if not hasattr(values, "columns") or not hasattr(values, "to_numpy"):
        return None
    try:
        return class_columns([str(name) for name in values.columns])
    except ColumnsError as error:
        raise ValueError(f"{what}: {error}; pass the array of the classes: .to_numpy()") from error


def numbers_of_frame(frame: Any, columns: ClassColumns, what: str) -> np.ndarray[Any, Any]:
    """The columns of the classes as an array [N, C].

    Raises:
        TypeError: a column that is not of numbers; the error names it.
    """
    values: np.ndarray[Any, Any] = frame.to_numpy()[:, columns.places]
    if values.dtype != np.object_:
        return values
    # Text, or columns of which pandas makes no common array, as those of Float64.
    names = list(frame.columns)
    parts = [np.asarray(frame[names[place]]) for place in columns.places]
    for name, part in zip(columns.names, parts, strict=True):
        if part.dtype.kind not in "fiu":
            raise TypeError(
                f"{what} must have columns of numbers, got {name!r} of {part.dtype}; leave out columns that are no "
                "classes, and convert numbers with .astype(float)"
            )
    return np.stack(parts, axis=1)


def flat_rows(input: Tensor) -> Tensor:
    """[N, C, d1, ...] to [N d1 ..., C], in the order of the flattened labels [N, d1, ...]; [N, C] as it is."""
    return input if input.dim() == 2 else input.movedim(1, -1).flatten(0, -2)


def as_array(result: Any) -> Any:
    """A tensor as an array, or as a NumPy number if it has no dimensions. A dataclass is converted field by field."""
    if isinstance(result, Tensor):
        array = result.detach().cpu().numpy()
        return array if array.ndim else array[()]
    if isinstance(result, dict):
        return {key: as_array(value) for key, value in result.items()}
    if is_dataclass(result) and not isinstance(result, type):
        return replace(result, **{field.name: as_array(getattr(result, field.name)) for field in fields(result)})
    return result


def with_tensors(result: R) -> R:
    """The inverse of as_array, for code that computes with a dataclass of results."""
    if isinstance(result, np.ndarray):
        converted: Any = torch.from_numpy(result)
    elif isinstance(result, dict):
        converted = {key: with_tensors(value) for key, value in result.items()}
    elif is_dataclass(result) and not isinstance(result, type):
        converted = replace(
            result, **{field.name: with_tensors(getattr(result, field.name)) for field in fields(result)}
        )
    else:
        converted = result
    return converted


def arrays_for_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the function returns arrays instead of tensors if no argument is a tensor."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        result = function(*arguments, **options)
        if any(isinstance(value, Tensor) for value in (*arguments, *options.values())):
            return result
        converted: R = as_array(result)
        return converted

    return call
