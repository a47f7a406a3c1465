"""Reads comma-separated text, with pyarrow if it is installed and gives the same values, else with Python."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from focalkern._checks import parsed_float, short
from focalkern.files.errors import Hint, InputError
from focalkern.files.paths import open_file

__all__ = ["TextTable", "read_text_table"]


@dataclass(frozen=True)
class TextTable:
    """The contents of a .csv file.

    Attributes:
        source: name of the file.
        names: names of the columns.
        data: the bytes of the file.
    """

    source: str
    names: list[str]
    data: bytes

    def values(
        self, numbers: Sequence[int], others: Sequence[int], hint: Callable[[Sequence[str]], Sequence[Hint]]
    ) -> tuple[np.ndarray[Any, Any], list[list[str]]]:
        """The columns ``numbers`` as [N, C] float64, and the columns ``others`` as text.

        Args:
            numbers, others: positions of columns.
            hint: function of the names of columns whose first row holds text; it returns the remedy of the error.

        Raises:
            InputError: a row of another length, or a value that is not a number.
        """
        found = _by_arrow(self.data, len(self.names), numbers, others)
        return _by_python(self, numbers, others, hint) if found is None else found


def read_text_table(source: str) -> TextTable:
    """Reads a .csv file, and parses only its header.

    Raises:
        InputError: the file is not comma-separated text.
    """
    with open_file(source) as stream:
        data = stream.read()
    return TextTable(source, next(_rows(source, data))[1], data)


def _by_arrow(
    data: bytes, n_columns: int, numbers: Sequence[int], others: Sequence[int]
) -> tuple[np.ndarray[Any, Any], list[list[str]]] | None:
    """The columns by pyarrow; None if pyarrow is missing, rejects them, or may read them differently from Python.

    Both round decimals correctly. They have different rules for quotes and carriage returns.
    """
    try:
        import pyarrow
        from pyarrow.csv import ConvertOptions, ReadOptions, read_csv
    except ImportError:
        return None
    if b'"' in data or data.count(b"\r") != data.count(b"\r\n") or not numbers:
        return None
    types = {str(place): pyarrow.float64() for place in numbers} | {str(place): pyarrow.string() for place in others}
    try:
        table = read_csv(
            pyarrow.BufferReader(data),
            ReadOptions(use_threads=False, skip_rows=1, column_names=[str(place) for place in range(n_columns)]),
            convert_options=ConvertOptions(column_types=types, include_columns=list(types), null_values=[]),
        )
    except pyarrow.ArrowException:
        return None  # the error of Python names the line
    values = np.stack([table.column(str(place)).to_numpy() for place in numbers], axis=1)
    return values, [table.column(str(place)).to_pylist() for place in others]


def _by_python(
    text: TextTable,
    numbers: Sequence[int],
    others: Sequence[int],
    hint: Callable[[Sequence[str]], Sequence[Hint]],
) -> tuple[np.ndarray[Any, Any], list[list[str]]]:
    rows = _rows(text.source, text.data)
    next(rows)
    values: list[np.ndarray[Any, Any]] = []
    kept: list[list[str]] = [[] for _ in others]
    for line, row in rows:
        try:
            values.append(np.array([parsed_float(row[place]) for place in numbers]))
        except ValueError:
            no_numbers = [place for place in numbers if not _is_number(row[place])]
            are_text = not values and all(row[place].strip() for place in no_numbers)  # in the first row
            hints = hint([text.names[place] for place in no_numbers]) if are_text else ()
            found = short(row[no_numbers[0]]) if row[no_numbers[0]].strip() else "an empty cell"
            where = f"{text.source}: line {line}, column {short(text.names[no_numbers[0]])}"
            raise InputError(where, "a number such as 0.25", found, hint=hints) from None
        for column, place in zip(kept, others, strict=True):
            column.append(row[place])
    return np.array(values, dtype=np.float64).reshape(len(values), len(numbers)), kept


def _is_number(cell: str) -> bool:
    try:
        parsed_float(cell)
    except ValueError:
        return False
    return True


def _rows(source: str, data: bytes) -> Iterator[tuple[int, list[str]]]:
    """Header and rows as text, with their line numbers; raises if a row has another length than the header."""
    try:
        with io.TextIOWrapper(io.BytesIO(data), newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            header = [name.strip() for name in next(reader, [])]
            yield 1, header
            for row in reader:
                if row and len(row) != len(header):
                    expected = f"{len(header)} columns as in the header"
                    raise InputError(f"{source}: line {reader.line_num}: expected {expected}, found {len(row)}")
                if row:
                    yield reader.line_num, row
    except UnicodeDecodeError:
        expected = "a text file with comma-separated values in UTF-8"
        raise InputError(f"{source}: expected {expected}, found other bytes; save the table as CSV in UTF-8") from None
    except csv.Error as error:
        raise InputError(f"{source}: expected a text file with comma-separated values, found: {error}") from error
