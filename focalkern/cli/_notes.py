"""The notes that accompany a command's results, in the words of the command."""

import textwrap
from dataclasses import replace
from typing import TextIO

from focalkern.cli._options import as_options
from focalkern.study import Study

__all__ = ["print_note", "print_wrapped", "with_options"]

_COLUMNS = 100


def with_options(study: Study) -> Study:
    """The study with options of the command in place of arguments of functions, in its verdict and its remarks."""
    said = study.verdict
    verdict = replace(
        said,
        use=as_options(said.use),
        because=as_options(said.because),
        costs=as_options(said.costs),
        accepts=as_options(said.accepts),
        warnings=tuple(map(as_options, said.warnings)),
    )
    return replace(study, verdict=verdict, remarks=tuple(map(as_options, study.remarks)))


def print_note(text: str, file: TextIO | None = None) -> None:
    """Prints a note as wide as the tables, with a hanging indent; names of files are not broken.

    Arguments of functions in the text become options of the command.
    """
    print_wrapped(f"Note: {as_options(text)}", file)


def print_wrapped(text: str, file: TextIO | None = None) -> None:
    lines = textwrap.wrap(text, _COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print("\n".join(lines), file=file)
