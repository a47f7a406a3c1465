"""Tables with a column per class and a column of labels: text, parquet, feather, and frames of pandas or polars."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from focalkern._checks import parsed_float, short
from focalkern._columns import ClassColumns, ColumnsError, class_columns, column_misfit, pattern_of_classes
from focalkern._types import InputKind
from focalkern.files.csv_text import read_text_table
from focalkern.files.errors import Hint, InputError
from focalkern.files.paths import open_file, suffix_of
from focalkern.files.samples import LogitSet, check_input_kind, check_options, checked_set, label_numbers

__all__ = ["OtherColumns", "check_column_names", "from_frame", "read_arrow", "read_csv", "read_unlabelled"]

_LABEL_COLUMNS = ("label", "labels", "target")

# Least number of rows for the checks of columns: with fewer, a column of row numbers or integers may be a coincidence.
_ENOUGH = 20

_NO_LABEL = -(2**63)  # label of a row that is left out


def from_frame(
    frame: Any,
    *,
    logits_key: str | None = None,
    labels_key: str | None = None,
    input_kind: InputKind | None = None,
    ignore_index: int | None = None,
    source: str = "frame",
) -> LogitSet:
    """The rows of a frame of pandas or polars, with the same checks as a .csv file.

    Args:
        frame: a column per class and a column of labels. Columns whose names are numbers, or share a prefix and end in
            a number, are the classes in the order of the numbers; other columns, in the order of the frame.
        logits_key: a pattern with ``*`` and ``?`` for the columns of the classes, or several with commas between them;
            ``!`` leaves columns out: ``"p_*"``, ``"cat,dog"``, ``"*,!file"``. None is all columns except the labels; a
            column that is not a class (an index, an id, a prediction) is then an error.
        labels_key: the column of the labels; None is ``label``, ``labels`` or ``target``. Labels are class numbers,
            also as floats, or the names of the columns. Any other names are the classes in alphabetical order, and all
            classes must occur.
        input_kind: ``"logits"`` or ``"probs"``; None infers it from the prefix of the columns, else logits.
        ignore_index: label of ignored rows.
        source: name of the frame in errors.

    Returns:
        A :class:`LogitSet`.

    Raises:
        InputError: columns that cannot be identified, labels that are not classes, values that are not numbers.
        TypeError: ``source`` is not a string.

    Example:
        >>> import pandas
        >>> frame = pandas.DataFrame({"cat": [2.0, -1.0], "dog": [0.5, 3.0], "label": ["cat", "dog"]})
        >>> rows = fk.files.from_frame(frame)
        >>> rows.input.shape, rows.labels
        (torch.Size([2, 2]), tensor([0, 1]))
    """
    check_options("from_frame", input_kind, ignore_index=ignore_index, logits_key=logits_key, labels_key=labels_key)
    if not isinstance(source, str):
        raise TypeError(f"from_frame: source must be a name, got {short(source)}")
    if not hasattr(frame, "columns") or not hasattr(frame, "to_numpy"):
        raise InputError(f"{source}: expected a frame with columns, found {type(frame).__name__}")
    table = _Table(source, [str(name) for name in frame.columns], logits_key, labels_key)
    names = list(frame.columns)
    columns = [np.asarray(frame[names[place]]) for place in table.classes.places]
    if any(column.ndim != 1 for column in columns):
        raise InputError(f"{source}: expected unique column names, found a name that repeats")
    return _set(table, columns, np.asarray(frame[names[table.label_place]]), input_kind, ignore_index)


def read_csv(
    source: str,
    *,
    logits_key: str | None,
    labels_key: str | None,
    input_kind: InputKind | None,
    ignore_index: int | None = None,
) -> LogitSet:
    text = read_text_table(source)
    table = _Table(source, text.names, logits_key, labels_key)
    values, (labels,) = text.values(table.classes.places, [table.label_place], table.hint_without)
    return _set(
        table, list(values.T), np.array([label.strip() for label in labels], dtype=str), input_kind, ignore_index
    )


def read_arrow(
    source: str,
    files: Sequence[str],
    *,
    logits_key: str | None,
    labels_key: str | None,
    input_kind: InputKind | None,
    ignore_index: int | None = None,
) -> dict[str, Any] | LogitSet:
    """The set of a table with a column per class; if a column holds lists, all columns as arrays by name.

    The rows of several files are concatenated.
    """
    frame = arrow_table(source, files)
    import pyarrow

    names = [str(name) for name in frame.column_names]
    of_lists = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
    lists = [any(is_one(kind) for is_one in of_lists) for kind in frame.schema.types]
    if any(lists):
        return {name: _array_of(source, name, frame.column(place), lists[place]) for place, name in enumerate(names)}
    table = _Table(source, names, logits_key, labels_key)
    columns = [_array_of(source, names[place], frame.column(place), False) for place in table.classes.places]
    labels = _array_of(source, names[table.label_place], frame.column(table.label_place), False)
    return _set(table, columns, labels, input_kind, ignore_index)


@dataclass(frozen=True)
class OtherColumns:
    """The columns of a table other than its classes.

    Attributes:
        classes: the names of the classes, without the prefix ``logit_`` or ``prob_``.
        is_numbered: whether these names are numbers.
        before, after: names and values of the columns before the first class, and of all others: text for a .csv file,
            else columns of pyarrow.
    """

    classes: tuple[str, ...] = ()
    before: tuple[tuple[str, Any], ...] = ()
    after: tuple[tuple[str, Any], ...] = ()
    is_numbered: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """``classes``; empty if they are numbers."""
        return () if self.is_numbered else self.classes


def read_unlabelled(
    source: str,
    files: Sequence[str],
    logits_key: str | None,
    input_kind: InputKind | None,
    labels_key: str | None = None,
) -> tuple[InputKind, np.ndarray[Any, Any], OtherColumns]:
    """Kind and values [N, C] of the classes, and all other columns (including labels, if any) unchanged."""
    is_text = suffix_of(files[0]) == ".csv"
    if is_text:
        text = read_text_table(files[0])
        names = text.names
    else:
        frame = arrow_table(source, files)
        names = [str(name) for name in frame.column_names]
    _check_header(source, names)
    kept = [place for place, name in enumerate(names) if not _is_label(name, labels_key)]
    try:
        found = class_columns([names[place] for place in kept], logits_key)
    except ColumnsError as error:
        hint = Hint("logits_key", pattern_of_classes([names[place] for place in kept]))
        raise _columns_error(source, error, *(() if logits_key is not None else (hint,))) from error
    classes = [kept[place] for place in found.places]
    others = [place for place in range(len(names)) if place not in set(classes)]
    if is_text:
        values, columns = text.values(classes, others, lambda odd: _hint_without(found, logits_key, odd))
    else:
        parts = [_array_of(source, names[place], frame.column(place), False) for place in classes]
        for name, part in zip(found.names, parts, strict=True):
            if part.dtype.kind not in "fiu":
                raise _no_numbers(source, name, part, _hint_without(found, logits_key, [name]))
        values = np.stack([part.astype(np.float64) for part in parts], axis=1) if parts else np.zeros((len(frame), 0))
        columns = [frame.column(place) for place in others]
    first = min(classes, default=0)
    named = [(place, (names[place], column)) for place, column in zip(others, columns, strict=True)]
    rest = OtherColumns(
        tuple(found.classes),
        tuple(pair for place, pair in named if place < first),
        tuple(pair for place, pair in named if place > first),
        found.numbers is not None,
    )
    return input_kind or found.kind or "logits", values, rest


def _check_header(source: str, names: Sequence[str]) -> None:
    """Raises if there are no names, or a row of numbers. Names such as 0 and 1.0 are numbers of classes."""
    if not names:
        raise InputError(f"{source}: expected a header line with the names of the columns, found an empty file")
    try:
        is_row = not all(parsed_float(name).is_integer() for name in names)
    except ValueError:
        return
    if is_row:
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        raise InputError(f"{source}: expected a header line, found {shown}; begin with a line such as label,0,1,2")


def _is_label(name: str, labels_key: str | None) -> bool:
    return name == labels_key if labels_key is not None else name.strip().lower() in _LABEL_COLUMNS


def _hint_without(classes: ClassColumns, logits_key: str | None, others: Sequence[str]) -> tuple[Hint, ...]:
    """The hint that leaves columns out of named ``classes``; none if they are numbered, or fewer than two are left."""
    if classes.numbers is not None or len(classes.names) < len(others) + 2:
        return ()
    return (Hint("logits_key", pattern_of_classes(classes.names, others, logits_key or "*")),)


def _no_numbers(source: str, name: str, column: np.ndarray[Any, Any], hint: tuple[Hint, ...]) -> InputError:
    return InputError(f"{source}: {name}", "numbers", str(column.dtype), hint=hint)


def _columns_error(source: str, error: ColumnsError, *hint: Hint) -> InputError:
    """The error of columns in a table, with the hint if a pattern for the columns helps."""
    if error.remedy:
        return InputError(f"{source}: {error}; {error.remedy}")
    return InputError(f"{source}: {error}", hint=hint)


def arrow_table(source: str, files: Sequence[str]) -> Any:
    """The table of .parquet or .feather files, with concatenated rows."""
    try:
        import pyarrow
    except ImportError as error:
        raise InputError(f"{source}: pyarrow is needed to read it: pip install pyarrow") from error
    tables = [_arrow_table(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if table.column_names != tables[0].column_names:
            raise InputError(f"{file}: expected the columns of {files[0]}, found others")
    try:
        return pyarrow.concat_tables(tables, promote_options="permissive")
    except pyarrow.ArrowException as error:
        raise InputError(f"{source}: expected columns of the same types in all files, found: {error}") from error


def _arrow_table(source: str) -> Any:
    from pyarrow import feather, parquet

    try:
        with open_file(source) as stream:
            table = (parquet.read_table if suffix_of(source) == ".parquet" else feather.read_table)(stream)
        table.validate(full=True)  # otherwise text that is not UTF-8 raises only when it is accessed
        return table.rename_columns(table.column_names)
    except InputError:
        raise
    except Exception as error:  # pyarrow raises errors of many kinds for damaged bytes
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{source}: expected a table of Arrow, found a damaged or truncated file, or another format ({reason})"
        ) from error


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
    """The columns of the classes, and the column of the labels."""

    def __init__(
        self,
        source: str,
        names: Sequence[str],
        logits_key: str | None,
        labels_key: str | None,
    ) -> None:
        self.source, self.logits_key, self.assumed = source, logits_key, logits_key is None
        _check_header(source, names)
        places = [place for place, name in enumerate(names) if _is_label(name, labels_key)]
        if len(places) != 1:
            called = labels_key if labels_key is not None else "label, labels or target"
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            of_others = len(names) == 1 and any(separator in names[0] for separator in ";\t|")
            remedy = "; the separator must be a comma" if of_others else ""
            raise InputError(
                source,
                f"a header line with one column called {called}",
                f"{'several' if places else 'none'} in: {shown}{remedy}",
                hint=() if of_others else Hint("labels_key", "NAME"),
            )
        self.label_place = places[0]
        self.label_name = names[self.label_place]
        others = [place for place in range(len(names)) if place != self.label_place]
        try:
            found = class_columns([names[place] for place in others], logits_key)
        except ColumnsError as error:
            hint = () if logits_key is not None else self._hint([names[place] for place in others])
            raise _columns_error(source, error, *hint) from error
        self.classes = ClassColumns([others[place] for place in found.places], found.names, found.numbers, found.prefix)

    def _hint(self, names: Sequence[str], others: Sequence[str] = ()) -> tuple[Hint, Hint]:
        """The hint that tells the columns of the classes among ``names`` from the others."""
        return Hint("logits_key", pattern_of_classes(names, others)), Hint("labels_key", self.label_name)

    def hint_without(self, others: Sequence[str]) -> tuple[Hint, ...]:
        """The hint that leaves columns out of the classes; see :func:`_hint_without`."""
        hint = _hint_without(self.classes, self.logits_key, others)
        return (*hint, Hint("labels_key", self.label_name)) if hint else ()

    def check_values(self, columns: Sequence[np.ndarray[Any, Any]]) -> None:
        """Raises if a named column holds an index or predicted classes, unlike the other columns."""
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
                    self.source,
                    "only columns of classes and labels",
                    f"{what} in {name!r}",
                    hint=self._hint(self.classes.names, [name]),
                )


def _set(
    table: _Table,
    columns: Sequence[np.ndarray[Any, Any]],
    labels: np.ndarray[Any, Any],
    input_kind: InputKind | None,
    ignore_index: int | None,
) -> LogitSet:
    source, classes = table.source, table.classes
    kind = input_kind or classes.kind or "logits"
    for name, column in zip(classes.names, columns, strict=True):
        if column.dtype.kind not in "fiu":
            raise _no_numbers(source, name, column, table.hint_without([name]))
    if columns and len(columns[0]):
        table.check_values(columns)
    wide = [column if column.dtype.kind == "f" else column.astype(np.float64) for column in columns]
    values = np.stack(wide, axis=1) if wide else np.empty((len(labels), 0))
    kept = np.array([not _is_number(label, ignore_index) for label in labels.tolist()], dtype=np.bool_)
    if len(kept) and not kept.any():
        raise InputError(f"{source}: {table.label_name}: expected a label other than {ignore_index}, found none")
    every, labels = np.full(len(labels), _NO_LABEL), labels[kept]
    names = classes.names_of_labels(set(map(str, labels.tolist()))) if labels.dtype.kind in "OUS" else None
    if names is None and classes.numbers is None:
        names = classes.classes
    first = 0 if classes.numbers is None else classes.numbers[0]
    every[kept] = label_numbers(source, table.label_name, labels, len(classes.places), names=names, first=first)
    rows = checked_set(source, "", kind, kind, values, table.label_name, every, _NO_LABEL)
    check_input_kind(source, f"{classes.names[0]} to {classes.names[-1]}", kind, input_kind, rows.input)
    if classes.numbers is not None:
        return rows
    return replace(rows, classes=tuple(classes.classes), assumed_classes=table.assumed and classes.kind is None)


def check_column_names(expected: str, wanted: Sequence[str], source: str, names: Sequence[str]) -> None:
    """Raises InputError if the columns of the classes have names, and not the ``expected`` ones in their order."""
    misfit = column_misfit(wanted, names)
    if misfit:
        raise InputError(f"{source}: expected {expected}, {misfit}")


def _is_number(label: Any, number: int | None) -> bool:
    """Whether a label, given as a number or text, equals this number."""
    try:
        return number is not None and parsed_float(str(label)) == number
    except ValueError:
        return False
