"""Files by name, folder, pattern or list."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from focalkern.files.samples import InputError

__all__ = ["expanded"]

_SUFFIXES = (".npz", ".npy", ".pt", ".pth", ".safetensors", ".csv", ".parquet", ".feather")


def expanded(names: Iterable[str]) -> list[str]:
    """The files that the names stand for, each once, in order.

    Args:
        names: files; folders, for the files in them that can be read; patterns of :mod:`glob`, ``**`` for all folders
            below; ``@LIST``, for the names in a text file, one per line. An existing file is never a pattern. Of .npy
            files, those of labels belong to others. A name that stands for nothing stays: its reader says so.

    Raises:
        InputError: a list that cannot be read.
    """
    found: list[str] = []
    for name in names:
        if name.startswith("@") and not os.path.exists(name):
            found += expanded(_lines(name[1:]))
        elif os.path.isdir(name):
            found += _usable(os.path.join(name, one) for one in os.listdir(name)) or [name]
        elif not os.path.exists(name) and glob.has_magic(name):
            found += _usable(glob.glob(name, recursive=True)) or [name]
        else:
            found.append(name)
    return list(dict.fromkeys(found))


def _lines(name: str) -> list[str]:
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "bytes that are no UTF-8"
        raise InputError(f"@{name}: expected a list of files, one per line, found: {why}") from None
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith(("#", "@"))]


def _usable(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if _is_of_rows(Path(name)) and os.path.isfile(name))


def _is_of_rows(path: Path) -> bool:
    suffix = path.suffix.lower()
    return suffix in _SUFFIXES and not (suffix == ".npy" and path.stem.endswith("labels"))
