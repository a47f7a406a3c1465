"""Prints the notes that accompany a command's results."""

import textwrap
from typing import TextIO

from focalkern.cli._options import as_options

__all__ = ["print_note", "print_wrapped"]

_COLUMNS = 100


def print_note(text: str, file: TextIO | None = None) -> None:
    """Prints a note as wide as the tables, with a hanging indent; names of files are not broken.

    Arguments of functions in the text become options of the command.
    """
    print_wrapped(f"Note: {as_options(text)}", file)


def print_wrapped(text: str, file: TextIO | None = None) -> None:
    lines = textwrap.wrap(text, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print("\n".join(lines), file=file)
