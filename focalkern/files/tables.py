"""Tables with a column per class and one of labels: text, parquet, feather, and frames of pandas or polars."""

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from focalkern._checks import short
from focalkern._columns import ClassColumns, ColumnsError, class_columns
from focalkern.calibrators import InputKind
from focalkern.files.checks import InputError, LogitSet, check_options, checked_set, label_numbers, said_kind

__all__ = ["arrow_table", "from_frame", "read_arrow", "read_csv"]

_LABEL_COLUMNS = ("label", "labels", "target")

# Rows from which a column that counts them, or holds whole numbers among others that do not, is no coincidence.
_ENOUGH = 20


def from_frame(
    frame: Any,
    *,
    logits_key: str | None = None,
    labels_key: str | None = None,
    input_kind: InputKind | None = None,
    source: str = "frame",
) -> LogitSet:
    """The rows of a frame of pandas or polars, with the care that is taken of a .csv file.

    Args:
        frame: a column per class and one of labels. Columns that are numbers, or share a prefix and end in a number,
            are the classes in the order of the numbers; other names, in the order of the frame.
        logits_key: which columns are the classes, with ``*`` and ``?``: ``"p_*"``. All but the labels by default, and
            then a column that is none, such as an index, an id or a prediction, is an error.
        labels_key: the column of the labels; ``label``, ``labels`` or ``target`` by default. Labels are class numbers,
            also as floats, or the names of the columns; any other names are the classes in alphabetical order, and all
            of them must occur.
        input_kind: ``"logits"`` or ``"probs"``; by default what the prefix of the columns says, or else logits.
        source: what the frame is called in errors.

    Returns:
        A :class:`LogitSet`.

    Raises:
        InputError: columns that cannot be told apart, labels that are no classes, values that are no numbers.
        TypeError: ``source`` is no text.

    Example:
        >>> import pandas
        >>> frame = pandas.DataFrame({"cat": [2.0, -1.0], "dog": [0.5, 3.0], "label": ["cat", "dog"]})
        >>> rows = fk.files.from_frame(frame)
        >>> rows.input.shape, rows.labels
        (torch.Size([2, 2]), tensor([0, 1]))
    """
    check_options("from_frame", input_kind, logits_key=logits_key, labels_key=labels_key)
    if not isinstance(source, str):
        raise TypeError(f"from_frame: source must be a name, got {short(source)}")
    if not hasattr(frame, "columns") or not hasattr(frame, "to_numpy"):
        raise InputError(f"{source}: expected a frame with columns, found {type(frame).__name__}")
    table = _Table(
        source, [str(name) for name in frame.columns], logits_key, labels_key, options=("logits_key", "labels_key")
    )
    names = list(frame.columns)
    columns = [np.asarray(frame[names[place]]) for place in table.classes.places]
    if any(column.ndim != 1 for column in columns):
        raise InputError(f"{source}: expected every column once, found several of one name")
    return _set(table, columns, np.asarray(frame[names[table.label_place]]), input_kind)


def read_csv(source: str, *, logits_key: str | None, labels_key: str | None, input_kind: InputKind | None) -> LogitSet:
    try:
        with open(source, newline="", encoding="utf-8-sig") as stream:
            return _parse_csv(source, stream, logits_key, labels_key, input_kind)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{source}: expected a text file with comma-separated values, found: {error}") from error


def _parse_csv(
    source: str, stream: io.TextIOBase, logits_key: str | None, labels_key: str | None, input_kind: InputKind | None
) -> LogitSet:
    reader = csv.reader(stream)
    header = [name.strip() for name in next(reader, [])]
    table = _Table(source, header, logits_key, labels_key)
    inputs: list[list[float]] = []
    labels: list[str] = []
    for row in reader:
        if not row:
            continue
        if len(row) != len(header):
            raise InputError(
                f"{source}: line {reader.line_num}: expected {len(header)} columns as in the header, found {len(row)}"
            )
        try:
            inputs.append([float(row[place]) for place in table.classes.places])
        except ValueError as error:
            raise InputError(f"{source}: line {reader.line_num}: expected numbers, found: {error}") from error
        labels.append(row[table.label_place].strip())
    values = np.array(inputs, dtype=np.float64).reshape(len(inputs), len(table.classes.places))
    return _set(table, list(values.T), np.array(labels, dtype=str), input_kind)


def read_arrow(
    source: str, *, logits_key: str | None, labels_key: str | None, input_kind: InputKind | None
) -> dict[str, Any] | LogitSet:
    """The one set of a table with a column per class; or, where a column holds lists, all columns as arrays by name."""
    frame = arrow_table(source)
    import pyarrow

    names = [str(name) for name in frame.column_names]
    of_lists = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
    lists = [any(is_one(kind) for is_one in of_lists) for kind in frame.schema.types]
    if any(lists):
        return {name: _array_of(source, name, frame.column(place), lists[place]) for place, name in enumerate(names)}
    table = _Table(source, names, logits_key, labels_key)
    columns = [_array_of(source, names[place], frame.column(place), False) for place in table.classes.places]
    labels = _array_of(source, names[table.label_place], frame.column(table.label_place), False)
    return _set(table, columns, labels, input_kind)


def arrow_table(source: str) -> Any:
    """The table of a .parquet or .feather file."""
    try:
        from pyarrow import feather, parquet
    except ImportError as error:
        raise InputError(f"{source}: pyarrow is needed to read it: pip install pyarrow") from error
    try:
        with open(source, "rb") as stream:
            table = (parquet.read_table if source.lower().endswith(".parquet") else feather.read_table)(stream)
        table.validate(full=True)  # of text that is no UTF-8 it would say so only when it is asked for it
        return table.rename_columns(table.column_names)
    except Exception as error:  # of damaged bytes it raises errors of many kinds
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise InputError(f"{source}: expected a table of Arrow, found a damaged file, or another ({reason})") from error


def _array_of(source: str, name: str, column: Any, of_lists: bool) -> Any:
    if column.null_count:
        raise InputError(f"{source}: {name}: expected a value in every row, found {column.null_count} without")
    if not of_lists:
        return column.to_numpy()
    rows = column.combine_chunks()
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise InputError(f"{source}: {name}: expected lists of one length, found {min(lengths)} to {max(lengths)}")
    return rows.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), -1)


class _Table:
    """Which of the columns are the classes, and which the labels."""

    def __init__(
        self,
        source: str,
        names: Sequence[str],
        logits_key: str | None,
        labels_key: str | None,
        options: tuple[str, str] = ("--logits-key", "--labels-key"),
    ) -> None:
        self.source, self.options = source, options
        places = [
            place
            for place, name in enumerate(names)
            if (name == labels_key if labels_key is not None else name.strip().lower() in _LABEL_COLUMNS)
        ]
        if len(places) != 1:
            called = labels_key if labels_key is not None else "label, labels or target"
            shown = (", ".join(names[:8]) + (", ..." if len(names) > 8 else "")) or "an empty file"
            of_others = len(names) == 1 and any(separator in names[0] for separator in ";\t|")
            remedy = "; the separator must be a comma" if of_others else f"; say {options[1]} NAME" if names else ""
            raise InputError(
                f"{source}: expected a header line with one column called {called}, found "
                f"{'several' if places else 'none'} in: {shown}{remedy}"
            )
        self.label_place = places[0]
        self.label_name = names[self.label_place]
        others = [place for place in range(len(names)) if place != self.label_place]
        try:
            found = class_columns([names[place] for place in others], logits_key)
        except ColumnsError as error:
            remedy = f"; {self._remedy(names)}" if logits_key is None else ""
            raise InputError(f"{source}: {error}{remedy}") from error
        self.classes = ClassColumns([others[place] for place in found.places], found.names, found.numbers, found.prefix)

    def _remedy(self, names: Sequence[str]) -> str:
        numbered = [name.rstrip("0123456789") for name in names if name[-1:].isdigit()]
        prefix = max(numbered, key=numbered.count, default="")
        pattern = f"{prefix}*" if prefix else "[0-9]*" if numbered else "PATTERN"
        return f"say which are the classes: {self.options[0]} '{pattern}' {self.options[1]} {self.label_name}"

    def check_values(self, columns: Sequence[np.ndarray[Any, Any]]) -> None:
        """Named columns may hold something else than their neighbours: an index, or predicted classes."""
        if self.classes.numbers is not None or len(columns[0]) < _ENOUGH:
            return
        whole = [bool((column == np.floor(column)).all()) for column in columns]
        for name, column, is_whole in zip(self.classes.names, columns, whole, strict=True):
            if not is_whole or sum(whole) > len(columns) / 2:
                continue
            counts = bool((np.diff(column) == 1).all())
            if counts or len(np.unique(column)) > 2:
                what = "the numbers of the rows" if counts else "whole numbers only, as predicted classes are,"
                raise InputError(
                    f"{self.source}: expected classes alone beside the labels, found {what} in {name!r}; "
                    f"say which are the classes: {self.options[0]} PATTERN {self.options[1]} {self.label_name}"
                )


def _set(
    table: _Table, columns: Sequence[np.ndarray[Any, Any]], labels: np.ndarray[Any, Any], input_kind: InputKind | None
) -> LogitSet:
    source, classes = table.source, table.classes
    kind = input_kind or said_kind(classes.prefix) or "logits"
    for name, column in zip(classes.names, columns, strict=True):
        if column.dtype.kind not in "fiu":
            raise InputError(f"{source}: {name}: expected numbers, found {column.dtype}")
    if columns and len(columns[0]):
        table.check_values(columns)
    wide = [column if column.dtype.kind == "f" else column.astype(np.float64) for column in columns]
    values = np.stack(wide, axis=1) if wide else np.empty((len(labels), 0))
    names = None if classes.numbers is not None else classes.names
    if names is None and labels.dtype.kind in "OUS" and set(map(str, labels.tolist())) <= set(classes.names):
        names = classes.names  # p_3 as a label
    first = 0 if classes.numbers is None else classes.numbers[0]
    numbers = label_numbers(source, table.label_name, labels, len(classes.places), names=names, first=first)
    return checked_set(source, "", kind, kind, values, table.label_name, numbers)
