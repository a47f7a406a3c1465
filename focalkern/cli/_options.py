"""Options that several commands share."""

import argparse
import errno
import json
import math
import os
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from focalkern._atomic import is_device
from focalkern._checks import MOST_BINS, label, parsed_float, parsed_int
from focalkern._types import INPUT_KINDS
from focalkern.files import Hint, InputError
from focalkern.files.paths import NamedFiles, distinct, located
from focalkern.ops.calibration_grid import PAPER_GAMMAS

__all__ = [
    "OneOrMany",
    "add_ignore_index",
    "add_input_arguments",
    "add_storage_options",
    "as_options",
    "at_least_one",
    "bins",
    "check_out",
    "check_out_folder",
    "gammas_of",
    "in_options",
    "locate",
    "not_negative",
    "path_of",
    "same_file",
    "seconds",
    "seed",
    "share",
    "temperature_range",
]

Number = TypeVar("Number", int, float)

_OPTIONS = {"resamples": "bootstrap"}  # the options with another name than their argument
_WITH_OPTION = "criterion|ignore_index|input_kind|keep_predictions|labels_key|logits_key|n_bins|resamples"
_PYTHON_ONLY = "floor|widen"
_ARGUMENT = re.compile(rf"\b(?:({_WITH_OPTION})|(?<!in Python, )(?:{_PYTHON_ONLY}))=('[^']*'|-?\w+(?:\.\w+)*)")


def in_options(error: Exception) -> str:
    """The error in one line; hints name options of the command."""
    return error._spelled(_option, between=" ") if isinstance(error, InputError) else as_options(str(error))


def _option(hint: Hint) -> str:
    return f"--{hint.argument.replace('_', '-')} {hint.value}"


def as_options(text: str) -> str:
    """The text with options of the command in place of arguments of functions."""
    text = text.replace("kind='scalar'", "keep_predictions=True")  # the spline that a calibrator without options has
    return _ARGUMENT.sub(_as_option, text)


def _as_option(match: re.Match[str]) -> str:
    if not match[1]:
        return f"in Python, {match[0]}"
    option, value = _OPTIONS.get(match[1], match[1]), match[2].strip("'")
    return _option(Hint(option, shlex.quote(value))) if value != "True" else f"--{option.replace('_', '-')}"


class OneOrMany(argparse.Action):
    """Parser action for a file, or for several files to which the shell has expanded a pattern."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        names = distinct(values)
        setattr(namespace, self.dest, names[0] if len(names) == 1 else NamedFiles(names))


def add_input_arguments(parser: argparse.ArgumentParser, name: str, what: str) -> None:
    """Adds the positional file and the options for reading it, shared by several commands."""
    parser.add_argument(
        "input",
        metavar=name,
        nargs="+",
        action=OneOrMany,
        help=f"{what}: .npz, .npy, .pt, .safetensors, .zarr, .csv, .parquet or .feather (see below); or several, a "
        "folder, a pattern, @LIST (a text file with a name per line); or URLs",
    )
    parser.add_argument(
        "--labels", metavar="FILE.npy", nargs="+", action=OneOrMany, help=f"labels of a .npy {name}, or of several"
    )
    parser.add_argument(
        "--logits-key",
        metavar="NAME",
        help="name of the array of logits or probabilities; in tables, a pattern for the columns of the classes, "
        "or several: 'p_*', 'cat,dog', '*,!file'",
    )
    parser.add_argument("--labels-key", metavar="NAME", help="name of the array or column of labels")
    add_ignore_index(parser)
    add_storage_options(parser)
    parser.add_argument(
        "--input-kind",
        choices=INPUT_KINDS,
        help="kind of the values in the files. By default the name of the array decides; other names mean logits. "
        "Without this option, logits that look like probabilities (not negative, sum 1) are an error",
    )


def add_ignore_index(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ignore-index", type=_label, metavar="LABEL", help="leave out rows, or pixels, with this label: 255"
    )


def _label(text: str) -> int:
    try:
        return label("", "", parsed_int(text))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"expected a whole number of at most 64 bits, found {text!r}") from None


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage-options",
        type=_storage_options,
        metavar="JSON",
        help="options for the fsspec file system of URLs: '{\"anon\": true}'",
    )


def _storage_options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected an object in JSON, found {text!r}")
    return found


def locate(arguments: argparse.Namespace, *names: str) -> None:
    """Attaches the storage options to the URLs among these arguments, and replaces ``@LIST`` by the names in it."""
    for name in names:
        path = getattr(arguments, name)
        setattr(arguments, name, None if path is None else located(path, arguments.storage_options))


def path_of(text: str) -> Path:
    """The type of an option for a file or folder. An empty text, as of a shell variable that is not set, is refused,
    because ``Path("")`` is the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, found an empty text")
    return Path(text)


def _check_name(path: Path, option: str) -> None:
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"{path}: expected a shorter name for {option}, found one that is too long") from None


def check_out(path: Path, option: str) -> None:
    """Raises InputError unless the file can be written; called before anything is computed."""
    _check_name(path, option)
    if os.path.isdir(path):
        raise InputError(f"{path}: expected a file for {option}, found a folder")
    folder = os.path.dirname(os.path.realpath(path))
    if not is_device(path) and not os.path.isdir(folder):
        raise InputError(f"{path}: expected a file in an existing folder for {option}, found no such folder")
    existing = path if os.path.exists(path) else folder
    may_replace = is_device(path) or os.access(folder, os.W_OK | os.X_OK)
    if not os.access(existing, os.W_OK) or not may_replace:
        raise InputError(
            f"{path}: expected a file that can be written for {option}, found: {os.strerror(errno.EACCES)}"
        )


def check_out_folder(path: Path, option: str) -> None:
    """Raises InputError unless files can be written into the folder, which may not exist yet."""
    _check_name(path, option)
    if os.path.exists(path) and not os.path.isdir(path):
        raise InputError(f"{path}: expected a folder for {option}, found a file")
    folder = os.path.realpath(path)
    while not os.path.exists(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        found = os.strerror(errno.EACCES)
        raise InputError(f"{path}: expected a folder that can be written for {option}, found: {found}")


def same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether both paths exist and are the same file."""
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def gammas_of(words: list[str]) -> tuple[float, ...]:
    gammas: list[float] = []
    for word in (part for argument in words for part in argument.split(",") if part.strip()):
        if word.strip() == "paper":
            gammas.extend(PAPER_GAMMAS)
            continue
        try:
            gamma = parsed_float(word)
        except ValueError:
            raise InputError(f"--gammas: expected numbers or the word paper, found {word!r}") from None
        if not (gamma > -1 and math.isfinite(gamma)):
            raise InputError(f"--gammas: expected numbers > -1, found {word}")
        gammas.append(gamma)
    if not gammas:
        raise InputError("--gammas: expected at least one number, found none")
    return tuple(dict.fromkeys(gammas))


def temperature_range(text: str) -> tuple[float, ...]:
    """The temperatures of ``LO:HI:STEP``, both ends included. Multiples of the step, so rounding does not add up."""
    try:
        low, high, step = (parsed_float(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected LO:HI:STEP, found {text!r}") from None
    if not (0 < low <= high and step > 0 and math.isfinite(high) and math.isfinite(step)):
        raise argparse.ArgumentTypeError(f"expected 0 < LO <= HI and STEP > 0, found {text!r}")
    first, last = round(low / step), math.floor(high / step + 1e-9)
    if abs(first * step - low) > 1e-9 * low:
        raise argparse.ArgumentTypeError(f"expected LO to be a multiple of STEP, found {text!r}")
    if last - first >= 1_000_000:
        raise argparse.ArgumentTypeError(f"expected at most a million temperatures, found {last - first + 1}")
    # Hundredths are index / 100: index * 0.01 would print as 2.7600000000000002.
    parts = round(1 / step)
    if parts and abs(parts * step - 1) < 1e-12:
        return tuple(index / parts for index in range(first, last + 1))
    return tuple(index * step for index in range(first, last + 1))


def _bounded(parsed: Callable[[str], Number], expected: str, fits: Callable[[Number], bool]) -> Callable[[str], Number]:
    """The type of an option for argparse: a number for which ``fits`` holds; ``expected`` describes it in the error."""

    def number_of(text: str) -> Number:
        with suppress(ValueError):
            number = parsed(text)
            if fits(number):
                return number
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")

    return number_of


share = _bounded(parsed_float, "a number between 0 and 1", lambda number: 0 < number < 1)
seconds = _bounded(parsed_float, "a number of seconds greater than 0", lambda number: 0 < number < math.inf)
# A seed for torch's generators.
seed = _bounded(parsed_int, "a whole number of at most 64 bits", lambda number: -(2**63) <= number < 2**63)
not_negative = _bounded(parsed_int, "a whole number of at least 0", lambda number: number >= 0)
bins = _bounded(parsed_int, f"a whole number from 1 to {MOST_BINS}", lambda number: 1 <= number <= MOST_BINS)
at_least_one = _bounded(parsed_int, "a whole number of at least 1", lambda number: number >= 1)
