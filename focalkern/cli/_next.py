"""The last lines of ``focalkern calibrate``: the next commands, and the use of the calibrator in Python."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from focalkern._types import InputKind
from focalkern.files.paths import NamedFiles, suffix_of
from focalkern.study import python_lines

__all__ = ["next_commands", "print_next", "saved_calibrator"]

_MOST_NAMES = 3  # largest number of files in a printed command


def saved_calibrator(arguments: argparse.Namespace) -> Path | None:
    """The file of the calibrator; None if the command saves none."""
    if arguments.out is not None:
        return Path(arguments.out)
    return None if arguments.report is None else Path(arguments.report) / "calibrator.json"


def next_commands(arguments: argparse.Namespace) -> list[str]:
    """Commands to copy, which apply and describe the saved calibrator, or save it."""
    saved = saved_calibrator(arguments)
    if saved is None:
        return [shlex.join(["focalkern", *_without_secrets(arguments.words), "--out", "calibrator.json"])]
    given = arguments.input if arguments.test is None else arguments.test
    names = list(given.names) if isinstance(given, NamedFiles) else [given]
    name = f"./{saved}" if str(saved).startswith("-") else str(saved)  # argparse would read it as an option
    words = ["focalkern", "apply", name, *(names if len(names) <= _MOST_NAMES else ["FILE"])]
    in_table = suffix_of(names[0]) in (".csv", ".parquet", ".feather")
    for option in ("input_kind", "logits_key", *(("labels_key",) if in_table else ())):
        if getattr(arguments, option) is not None:
            words += [f"--{option.replace('_', '-')}", getattr(arguments, option)]
    return [shlex.join([*words, "--out", "probs.npz"]), shlex.join(["focalkern", "card", name])]


def _without_secrets(words: list[str]) -> list[str]:
    """The words of a command, with the word JSON in place of storage options, which may hold a secret."""
    option, shown = "--storage-options", []
    for before, word in zip(["", *words], words, strict=False):
        shown.append("JSON" if before == option else f"{option}=JSON" if word.startswith(f"{option}=") else word)
    return shown


def print_next(arguments: argparse.Namespace, kind: InputKind, file: Any) -> None:
    """Prints the commands, and three lines of Python for rows of this kind."""
    python = python_lines(saved_calibrator(arguments) or "calibrator.json", kind)
    print("\n".join(["Next:", *(f"  {line}" for line in next_commands(arguments))]), file=file)
    print("\n".join(["In Python:", *(f"  {line}" for line in python)]), file=file)
