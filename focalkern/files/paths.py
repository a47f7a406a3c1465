"""Files by name, folder, pattern, list or URL, and reading their bytes."""

import glob
import hashlib
import io
import os
import re
import shlex
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from focalkern.files import urls
from focalkern.files.errors import InputError
from focalkern.files.urls import Url, is_url

__all__ = [
    "NamedFiles",
    "Url",
    "beside",
    "check_file",
    "distinct",
    "exists",
    "expanded",
    "files_of",
    "fingerprint",
    "is_several",
    "is_url",
    "located",
    "matches",
    "name_of",
    "open_file",
    "size_of",
    "suffix_of",
]

_SUFFIXES = (".npz", ".npy", ".pt", ".pth", ".safetensors", ".csv", ".parquet", ".feather", ".zarr")
# Suffixes of folders that are a single set of rows.
_DATA_SETS = (".parquet", ".zarr")


class NamedFiles(str):
    """Several names for one argument, for example from a pattern that the shell expanded, each once. ``str()`` has the
    first and the last.

    Attributes:
        names: all names.
    """

    names: tuple[str, ...]

    def __new__(cls, names: Sequence[str]) -> "NamedFiles":
        once = distinct(names)
        text = f"{once[0]} ... {once[-1]} ({len(once)} files)" if len(once) > 1 else once[0]
        made = super().__new__(cls, text)
        made.names = tuple(once)
        return made

    def __getnewargs__(self) -> tuple[Sequence[str]]:  # type: ignore[override]  # str has another signature
        return (self.names,)


def located(path: str, storage_options: Mapping[str, Any] | None = None) -> str:
    """The path; a URL gets the options of its file system, and ``@LIST`` becomes the names in the list.

    Raises:
        InputError: a list that cannot be read.
    """
    if isinstance(path, NamedFiles):
        return NamedFiles([located(name, storage_options) for name in path.names])
    if isinstance(path, Url) and storage_options is None:
        return path
    if is_url(path):
        return Url(path, storage_options)
    if path.startswith("@") and not os.path.exists(path):
        return NamedFiles([located(name, storage_options) for name in _lines(path[1:], storage_options)])
    return path


# ---- names ---------------------------------------------------------------------------------------------------------


def name_of(name: str) -> PurePosixPath:
    """The last part of a path or URL, without the query of a web address."""
    if is_url(name):
        name = re.split(r"[?#]", str(name))[0] if name.lower().startswith("http") else str(name)
        name = name.rstrip("/").rpartition("/")[2]
    return PurePosixPath(PurePosixPath(name).name)


def suffix_of(name: str) -> str:
    """``.npz``, in lower case."""
    return name_of(name).suffix.lower()


def beside(name: str, other: str) -> str:
    """The path of another file in the same folder."""
    if not is_url(name):
        return str(Path(name).with_name(other))
    address, query = name.partition("?")[::2] if name.lower().startswith("http") else (str(name), "")
    text = f"{address.rpartition('/')[0]}/{other}" + (f"?{query}" if query else "")
    return located(text, getattr(name, "options", None))


def is_several(path: str) -> bool:
    """Whether a located path may stand for several files: a folder, a pattern, a list."""
    if isinstance(path, NamedFiles):
        return True
    if is_url(path):
        return _is_pattern(path) or suffix_of(path) not in _SUFFIXES or suffix_of(path) == ".parquet"
    if os.path.exists(path):
        return os.path.isdir(path) and suffix_of(path) != ".zarr"
    return _is_pattern(path)


def _is_pattern(name: str) -> bool:
    # In a web address a question mark begins the query.
    return "*" in name if name.lower().startswith("http") else glob.has_magic(name)


# ---- the files that a name stands for ------------------------------------------------------------------------------


def files_of(path: str) -> list[str]:
    """The files that a located path stands for, in the order of their names and numbers; a file stands for itself.

    A folder stands for its readable files, a folder with the suffix .zarr or .parquet for itself, and a pattern for its
    matches; ``**`` matches all folders below. An existing file is never a pattern. .npy files of labels are left out if
    the result has other .npy files. A name in a list that matches no file is kept.

    Raises:
        InputError: a server does not answer.
    """
    if isinstance(path, NamedFiles):
        return [file for name in path.names for file in (files_of(name) or [name])]
    if is_url(path):
        url = path if isinstance(path, Url) else Url(path)
        if _is_pattern(path):
            return _usable(urls.matching(url))
        held = urls.inside(url) if suffix_of(path) not in _SUFFIXES else None
        return [url] if held is None else _usable(held)
    if os.path.exists(path):
        if not os.path.isdir(path) or suffix_of(path) in _DATA_SETS:
            return [path]
        return _usable(os.path.join(path, one) for one in os.listdir(path))
    return _usable(glob.glob(path, recursive=True)) if _is_pattern(path) else [path]


def expanded(names: Iterable[str], storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """The files that the names stand for (:func:`files_of`), each once. A name without files is kept.

    Raises:
        InputError: a list cannot be read, or a server does not answer.
    """
    places = [located(name, storage_options) for name in names]
    return distinct(str(file) for name in places for file in (files_of(name) or [name]))


def distinct(names: Iterable[str]) -> list[str]:
    """The names without those of a file that was named before: ``a.npz`` and ``./a.npz`` are one file."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(str(name) if is_url(name) else os.path.abspath(name), name)
    return list(found.values())


def matches(path: str) -> list[str]:
    """The files of one set of rows; at least one.

    A folder with the suffix .parquet stands for the .parquet files in it and below.

    Raises:
        InputError: the path does not exist, or no file matches.
    """
    if not is_several(path):
        check_file(path)
        return [path]
    found = sorted(distinct(part for file in files_of(path) for part in _parts_of(file)), key=_numbers)
    for file in found:
        check_file(file)
    if not found:
        what = "none that matches"
        if not is_url(path) and os.path.isdir(path):
            below = shlex.quote(os.path.join(path, "**", "*"))
            what = f"a folder without any of {', '.join(_SUFFIXES)}; for files in its folders pass {below}"
        raise InputError(f"{path}: expected at least one file, found {what}")
    return found


def _parts_of(file: str) -> list[str]:
    """The file itself, or the files of a parquet data set."""
    if suffix_of(file) != ".parquet":
        return [file]
    if isinstance(file, Url):
        held = urls.inside(file)
        return [file] if held is None else _usable(urls.matching(_below(file)))
    return _usable(glob.glob(_below(glob.escape(file)), recursive=True)) if os.path.isdir(file) else [file]


def _below(folder: Any) -> Any:
    pattern = f"{folder.rstrip('/')}/**/*.parquet"
    return Url(pattern, folder.options) if isinstance(folder, Url) else pattern


def _lines(name: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    try:
        content = urls.contents(Url(name, storage_options)) if is_url(name) else Path(name).read_bytes()
        lines = content.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "bytes that are no UTF-8"
        raise InputError(f"@{name}: expected a list of files, one per line, found: {why}") from None
    found = [line.strip() for line in lines if line.strip() and not line.strip().startswith(("#", "@"))]
    if not found:
        raise InputError(f"@{name}: expected a list of files, one per line, found none")
    return found


def _usable(names: Iterable[str]) -> list[str]:
    """The readable files among these, in natural order: val-10 comes after val-9. Files of labels are included only if
    there are no others."""
    readable = sorted((name for name in names if _is_readable(name)), key=_numbers)
    return [name for name in readable if not _is_of_labels(name)] or readable


def _numbers(name: str) -> list[Any]:
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", name))]


def _is_readable(name: str) -> bool:
    suffix = suffix_of(name)
    return suffix in _SUFFIXES and (is_url(name) or suffix in _DATA_SETS or os.path.isfile(name))


def _is_of_labels(name: str) -> bool:
    return suffix_of(name) == ".npy" and "labels" in re.split(r"[^a-zA-Z]+", name_of(name).stem)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def exists(name: str) -> bool:
    return urls.exists(name) if isinstance(name, Url) else os.path.exists(name)


def check_file(source: str, expected: str = "a file") -> None:
    """Raises InputError unless the file exists and its folder can be read. URLs are checked by their reader."""
    if is_url(source):
        return
    try:
        mode = os.stat(source).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{source}: expected {expected}, found nothing there") from None
    except OSError as error:
        raise InputError(f"{source}: expected {expected}, found: {error.strerror}") from None
    if stat.S_ISDIR(mode) and suffix_of(source) != ".zarr":
        raise InputError(f"{source}: expected {expected}, found a folder")


def open_file(source: str) -> BinaryIO:
    """A stream of the file. A URL is downloaded completely."""
    if is_url(source):
        return io.BytesIO(urls.contents(source if isinstance(source, Url) else Url(source)))
    try:
        return open(source, "rb")
    except OSError as error:
        raise InputError(f"{source}: expected a file that can be read, found: {error.strerror}") from error


def size_of(name: str) -> int:
    """The size of a file in bytes; 0 if unknown."""
    if isinstance(name, Url):
        return urls.size(name) or 0
    try:
        return os.path.getsize(name)
    except OSError:
        return 0


def fingerprint(name: str) -> str:
    """A fingerprint that changes with the content of a file or folder.

    Raises:
        InputError, OSError: the file cannot be read.
    """
    if isinstance(name, Url):
        return urls.fingerprint(name)
    if os.path.isdir(name):
        digest = hashlib.blake2b()
        for file in sorted(path for path in Path(name).rglob("*") if path.is_file()):
            digest.update(f"{file.relative_to(name)} {fingerprint(str(file))}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()
    with open(name, "rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()
