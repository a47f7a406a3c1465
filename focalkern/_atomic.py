"""Writes files atomically: after a failure the old file is unchanged."""

import contextlib
import errno
import os
import signal
import stat
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["is_device", "opened_atomically", "write_atomically", "write_together"]


def is_device(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a device or a pipe, such as /dev/null or /dev/stdout, which no file may replace."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path``, all of it or nothing; see :func:`opened_atomically`."""
    with opened_atomically(path) as stream:
        stream.write(data)


def write_together(folder: str | os.PathLike[str], files: Mapping[str, bytes]) -> list[Path]:
    """Write several files of one folder, in their order: all of them, or none where anything fails or interrupts.

    All bytes are on the disk before the first file takes its place. Ctrl-C and SIGTERM wait until the last one has.
    Only SIGKILL or a power cut within these few renames leaves old and new files side by side, each of them whole.

    Raises:
        OSError: as :func:`opened_atomically`.
    """
    paths = [Path(folder, name) for name in files]
    with contextlib.ExitStack() as begun:
        partials = [begun.enter_context(_partial(path, data)) for path, data in zip(paths, files.values(), strict=True)]
        with _signals_wait():
            for path, partial in zip(paths, partials, strict=True):
                _take_place(partial, path)
    return paths


@contextlib.contextmanager
def opened_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A stream whose bytes become ``path`` at the end of the block, all of them or none.

    The bytes go to a new file in the same folder, are flushed to the disk, and replace ``path`` in one atomic rename.
    On any error the new file is removed and ``path`` stays unchanged.

    Args:
        path: the file to write; for a symbolic link, its target is replaced. A device or a pipe gets the bytes.

    Raises:
        OSError: the folder is missing, the folder or the old file is not writable, the disk is full, ``path`` is a
            folder. It names the file.
    """
    if is_device(path):
        with open(path, "wb") as stream:
            yield stream
        return
    partial = _name_of_partial(path)
    with _cleaned_up(path, partial):
        with open(partial, "xb") as stream:
            yield stream
            _to_disk(stream)
        _take_place(partial, path)


@contextlib.contextmanager
def _partial(path: Path, data: bytes) -> Iterator[Path]:
    """Writes the data to a new file next to ``path``; removes it at the end if it did not replace ``path``."""
    partial = _name_of_partial(path)
    with _cleaned_up(path, partial):
        with open(partial, "xb") as stream:
            stream.write(data)
            _to_disk(stream)
        yield partial


def _name_of_partial(path: str | os.PathLike[str]) -> Path:
    final = Path(os.path.realpath(path))
    if final.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file in it", os.fspath(path))
    if not final.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "its folder does not exist; create it first", os.fspath(path))
    if final.exists() and not os.access(final, os.W_OK):  # the file is read-only; its folder would permit to replace it
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    # Of a long name only the beginning: names have at most 255 bytes, and a character up to 4.
    return final.with_name(f".{final.name[:50]}.{uuid.uuid4().hex}.part")


def _to_disk(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _take_place(partial: Path, path: str | os.PathLike[str]) -> None:
    final = os.path.realpath(path)
    # open(), not tempfile: the file gets the permissions that any new file of this user gets.
    if os.path.exists(final):
        os.chmod(partial, os.stat(final).st_mode & 0o7777)
    os.replace(partial, final)


@contextlib.contextmanager
def _cleaned_up(path: str | os.PathLike[str], partial: Path) -> Iterator[None]:
    """Removes the new file when anything fails, and names the user's file in the error."""
    try:
        yield
    except OSError as error:
        _remove(partial)
        # an error of the caller's code, not of the file
        if error.errno is None or error.filename not in (None, os.fspath(partial)):
            raise
        # The system's error for a full disk names no file, and the temporary file is not the user's.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    except BaseException:
        _remove(partial)
        raise


def _remove(partial: Path) -> None:
    with contextlib.suppress(OSError):  # a folder that became read-only; report the first error
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Python's handlers of Ctrl-C and SIGTERM run at the end of the block. (They run in the main thread only.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: dict[int, Any] = {}
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {int(number): handler for number, handler in found.items() if callable(handler)}
    try:
        for number in before:
            signal.signal(number, lambda number, frame: arrived.update({number: frame}))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in arrived.items():
            before[number](number, frame)
