"""How the commands print what has to be said besides their figures."""

import textwrap
from typing import TextIO

__all__ = ["print_note", "print_wrapped"]

_COLUMNS = 100


def print_note(text: str, file: TextIO | None = None) -> None:
    """As wide as the tables, with its further lines below the first word; no name of a file is broken."""
    print_wrapped(f"Note: {text}", file)


def print_wrapped(text: str, file: TextIO | None = None) -> None:
    lines = textwrap.wrap(text, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print("\n".join(lines), file=file)
