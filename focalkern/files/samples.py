"""Samples of logits or probabilities with their labels, and checks of their values."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import TO_INT, label, not_floating, one_of, parsed_float, path_text, short
from focalkern._diagnostics import likely_sum, may_be_logits, remedy_for_sum
from focalkern._types import FLOATS, INPUT_KINDS, InputKind
from focalkern.files.errors import Hint, InputError
from focalkern.files.pixels import class_misfit, label_misfit, place_of_counted, rows_that_count

__all__ = [
    "LogitSet",
    "as_tensor",
    "check_input_kind",
    "check_options",
    "check_rows",
    "checked_set",
    "label_numbers",
    "no_names",
]

_IGNORED = (-100, -1, 255)  # common labels of data sets for unlabelled samples


@dataclass(frozen=True)
class LogitSet:
    """One set of rows.

    Attributes:
        input: [N, C] float, logits or probabilities, checked: N >= 1, C >= 2, no NaN.
        labels: [N] int64, checked: in [0, C).
        kind: ``"logits"`` or ``"probs"``.
        name: ``""``, ``"val"`` or ``"test"``, from the prefix of the arrays' names.
        source: the file, as the user wrote it.
        part: description of the subset of the file; empty for all rows.
        classes: names of the columns of ``input`` in a table with named columns, else empty.
        assumed_classes: whether ``classes`` are all columns but the labels, without a number, prefix or argument that
            says so.

    Example:
        >>> np.savez("logits.npz", logits=4 * np.eye(3, dtype=np.float32), labels=np.arange(3))
        >>> rows = fk.files.read_sets("logits.npz")[""]
        >>> len(rows), rows.n_classes, rows.kind
        (3, 3, 'logits')
        >>> rows.rows(torch.tensor([2, 0]), "two of them").labels
        tensor([2, 0])
    """

    input: Tensor
    labels: Tensor
    kind: InputKind
    name: str
    source: str
    part: str = ""
    classes: tuple[str, ...] = ()
    assumed_classes: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def n_classes(self) -> int:
        """C, the number of columns of ``input``."""
        return self.input.shape[1]

    def rows(self, index: Tensor, part: str) -> "LogitSet":
        """A subset of the rows.

        Args:
            index: int64 indices in the wanted order, or a bool mask.
            part: description of the subset for messages.

        Returns:
            A new set of the same kind, name and source.

        Raises:
            IndexError: an index out of range.
        """
        return replace(self, input=self.input[index], labels=self.labels[index], part=part)


def check_options(
    op: str, input_kind: Any, path: Any = "", storage_options: Any = None, ignore_index: Any = None, **names: Any
) -> str:
    """Raises unless the kind is known, the storage options are a dict, the ignored label is an integer or None, and the
    names are strings or None; returns the path as a string.

    A ``NamedFiles``, from a pattern that the shell expanded, is returned unchanged.
    """
    text = path if isinstance(path, str) and "\0" not in path else path_text(op, "path", path)
    if input_kind is not None:
        one_of(op, "input_kind", input_kind, INPUT_KINDS)
    if ignore_index is not None:
        label(op, "ignore_index", ignore_index, " or None")
    for name, value in names.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{op}: {name} must be a name or None, got {short(value)}")
    options = {} if storage_options is None else storage_options
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise TypeError(
            f"{op}: storage_options must be a dict with names as keys, or None, got {short(storage_options)}"
        )
    return text


def no_names(source: str) -> InputError:
    """The error of a key for a .npy file, whose array has no name."""
    return InputError(source, "named arrays or columns to go with a key", ".npy; leave out the key")


def check_input_kind(
    source: str, input_name: str, kind: InputKind, input_kind: InputKind | None, input: Tensor
) -> None:
    """Raises if ``input_kind`` is None and the logits look like probabilities or percentages."""
    total = likely_sum(input) if input_kind is None and kind == "logits" else 0
    if total:
        what, first = ("probabilities", []) if total == 1 else ("percentages", ["each row divided by its sum with"])
        raise InputError(
            f"{source}: {input_name}",
            "logits",
            f"non-negative rows that sum to {total}, as {what} do",
            hint=(*first, Hint("input_kind", "probs"), "or, if they are logits,", Hint("input_kind", "logits")),
        )


def checked_set(
    source: str,
    prefix: str,
    kind: InputKind,
    input_name: str,
    values: Any,
    label_name: str,
    labels: Any,
    ignore_index: int | None = None,
) -> LogitSet:
    """The rows of logits [N, C] or [N, C, d1, ...] with labels [N] or [N, d1, ...] that are not ``ignore_index``.

    Raises:
        InputError: shapes, dtypes or values that cannot be used; the error names the first such value.
    """
    input = as_tensor(source, input_name, values)
    if not isinstance(labels, Tensor):
        n_classes = input.shape[1] if input.dim() >= 2 else 0
        labels = label_numbers(source, label_name, np.asarray(labels), n_classes)
    target = as_tensor(source, label_name, labels)
    if input.dtype not in FLOATS:
        raise InputError(f"{source}: {input_name}: expected floating point, found {not_floating(_dtype(input))}")
    if input.dim() < 2 or input.shape[1] < 2:
        raise InputError(f"{source}: {input_name}: {class_misfit(input.shape)}")
    if target.is_floating_point() and bool((target == target.floor()).all()) and bool((target.abs() < 2**53).all()):
        target = target.to(torch.int64)
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        remedy = TO_INT if target.dtype == torch.bool else ""
        raise InputError(f"{source}: {label_name}: expected integer class numbers, found {_dtype(target)}{remedy}")
    misfit = label_misfit(input.shape, target.shape, f"{input_name} {list(input.shape)}")
    if misfit:
        raise InputError(f"{source}: {label_name}: {misfit}")
    # torch cannot compare all uint64 values. Valid class numbers fit into int64.
    target = target.to(torch.int64)
    rows, counted = rows_that_count(input, target, ignore_index)
    if len(rows) == 0:
        which = "" if len(target) == 0 else f" with another label than {ignore_index}"
        raise InputError(f"{source}: {input_name}: expected at least one row{which}, found none")
    place = functools.partial(place_of_counted, labels=target, ignore_index=ignore_index)
    check_rows(source, kind, input_name, rows, label_name, counted, place=place)
    return LogitSet(rows.contiguous(), counted, kind, prefix, source)


def label_numbers(
    source: str,
    label_name: str,
    labels: np.ndarray[Any, Any],
    n_classes: int,
    *,
    names: Sequence[str] | None = None,
    first: int = 0,
) -> np.ndarray[Any, Any]:
    """Labels as class indices, from class numbers (also floats and text of numbers) or names.

    Args:
        names: names of the classes, or None. Without names, text labels are the classes in alphabetical order, as in
            scikit-learn, and all classes must occur.
        first: the number of class 0 in the labels.
    """
    if labels.ndim != 1 or labels.dtype.kind not in "OUSfiu":
        return labels
    numbers = labels
    if labels.dtype.kind in "OUS":
        words = [word.decode(errors="replace") if isinstance(word, bytes) else word for word in labels.tolist()]
        odd = sorted({type(word).__name__ for word in words if not isinstance(word, str | int | float | np.number)})
        if odd:
            raise InputError(f"{source}: {label_name}: expected class numbers or names, found {' and '.join(odd)}")
        text = [str(word).strip() for word in words]
        for row, word in enumerate(text):
            if not word or word.lower() == "nan":
                raise InputError(f"{source}: {label_name}: expected a label in every row, found none in row {row}")
        try:
            numbers = np.array([parsed_float(word) for word in text])
        except ValueError:
            return _named_labels(source, label_name, text, n_classes, names)
    if numbers.dtype.kind == "f":
        # Objects that are not numbers compare as False.
        odd_rows = ~((numbers == np.floor(numbers)) & (np.abs(numbers) < 2**53))
        if odd_rows.any():
            row = int(odd_rows.argmax())
            raise InputError(
                f"{source}: {label_name}: expected class numbers or names, found {labels[row]} in row {row}"
            )
    if numbers.dtype == np.uint64:
        numbers = np.minimum(numbers, 2**62)  # valid class numbers fit into int64
    numbers = numbers.astype(np.int64)
    if first:
        odd_rows = (numbers < first) | (numbers >= first + n_classes)
        if odd_rows.any():
            row = int(odd_rows.argmax())
            raise InputError(
                f"{source}: {label_name}: expected {first} to {first + n_classes - 1}, as the columns are numbered, "
                f"found {numbers[row]} in row {row}"
            )
    return numbers - first


def _named_labels(
    source: str, label_name: str, text: Sequence[str], n_classes: int, names: Sequence[str] | None
) -> np.ndarray[Any, Any]:
    if names is None:
        names = sorted(set(text))
        if len(names) != n_classes:
            shown = ", ".join(short(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
            raise InputError(
                f"{source}: {label_name}: expected class numbers, or the names of all {n_classes} classes, found "
                f"{len(names)}: {shown}"
            )
    place = {name.strip(): number for number, name in enumerate(names)}
    for row, word in enumerate(text):
        if word not in place:
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise InputError(
                f"{source}: {label_name}: expected one of the columns {shown}, found {short(word)} in row {row}"
            )
    return np.array([place[word] for word in text], dtype=np.int64)


def check_rows(
    source: str,
    kind: InputKind,
    input_name: str,
    input: Tensor,
    label_name: str = "",
    target: Tensor | None = None,
    first_row: int = 0,
    place: Callable[[int], str] = "row {}".format,
) -> None:
    """Raises InputError for the first row that cannot be used.

    ``first_row`` is the index of the first row in the file, and ``place`` describes an index in words.
    """

    def refuse(name: str, refused: Tensor, expected: str, describe: Any, hint: Sequence[Hint] = ()) -> None:
        row = int(refused.nonzero()[0])
        others = int(refused.sum()) - 1
        more = f" (and {others} more such row{'s' * (others > 1)})" if others else ""
        where = f"{source}: {name}"
        remedy = remedy_for_sum(input[row]) if kind == "probs" and name == input_name else ""
        raise InputError(where, expected, f"{describe(row)} in {place(first_row + row)}{more}{remedy}", hint=hint)

    if target is not None:
        labels = target
        refused = (labels < 0) | (labels >= input.shape[1])
        if bool(refused.any()):
            found = labels[refused].unique().tolist()
            hint = [Hint("ignore_index", str(*found))] if len(found) == 1 and found[0] in _IGNORED else []
            from_one = found == [input.shape[1]] and int(labels.min()) == 1
            instead = f", not from 1 to {input.shape[1]} (save labels - 1)" if from_one else ""
            expected = f"class numbers from 0 to {input.shape[1] - 1}{instead}"
            refuse(label_name, refused, expected, lambda row: f"{int(labels[row])}", hint)
    if kind == "logits":
        # -inf is an impossible class; a row needs a possible one. The maximum of a row with NaN is NaN.
        refused = ~(input.amax(1).abs() < math.inf)
        expected = "finite logits, or -inf for some of a row"
    else:
        total = input.sum(1, dtype=torch.float64)
        refused = ~((input.amin(1) >= 0) & ((total - 1).abs() <= 1e-3))
        expected = "probabilities that sum to 1 within 0.001"
    if bool(refused.any()):
        hint = [Hint("input_kind", "logits")] if kind == "probs" and may_be_logits(input) else []
        refuse(input_name, refused, expected, lambda row: _describe_row(input[row]), hint)


def _describe_row(row: Tensor) -> str:
    for word, odd in (("NaN", row.isnan()), ("+inf", row == math.inf)):
        if bool(odd.any()):
            return word
    if bool((row == -math.inf).all()):
        return "only -inf"
    return f"values from {float(row.min()):g} to {float(row.max()):g} that sum to {float(row.double().sum()):g}"


def as_tensor(source: str, name: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.is_quantized or values.is_nested or values.is_meta:
            kind = "a quantized tensor" if values.is_quantized else f"a tensor of layout {values.layout}"
            kind = "a tensor of the meta device, which has no values" if values.is_meta else kind
            raise InputError(f"{source}: {name}: expected a plain dense tensor, found {kind}")
        return values.detach()
    try:
        array = np.ascontiguousarray(values)
        # torch supports only the machine's byte order.
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable))
    except TypeError as error:
        found = not_floating(np.asarray(values).dtype)
        raise InputError(f"{source}: {name}: expected an array of numbers, found {found}") from error


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
