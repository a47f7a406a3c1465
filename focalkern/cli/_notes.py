"""Prints the notes that accompany a command's results."""

import re
import textwrap
from typing import TextIO

__all__ = ["print_note", "print_wrapped"]

_COLUMNS = 100
_OPTIONS = {
    "input_kind": "--input-kind",
    "keep_predictions": "--keep-predictions",
    "n_bins": "--n-bins",
    "resamples": "--bootstrap",
}
_ARGUMENTS = re.compile(rf"\b({'|'.join(_OPTIONS)})=(\w+)")


def print_note(text: str, file: TextIO | None = None) -> None:
    """Prints a note as wide as the tables, with a hanging indent; names of files are not broken.

    Arguments of functions in the text become options of the command.
    """
    text = text.replace("kind='scalar'", "keep_predictions=True")  # the spline that a calibrator without options has
    print_wrapped(f"Note: {_ARGUMENTS.sub(_as_option, text)}", file)


def _as_option(match: re.Match[str]) -> str:
    value = "" if match[2] == "True" else f" {match[2]}"
    return f"{_OPTIONS[match[1]]}{value}"


def print_wrapped(text: str, file: TextIO | None = None) -> None:
    lines = textwrap.wrap(text, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print("\n".join(lines), file=file)
