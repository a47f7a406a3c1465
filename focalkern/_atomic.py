"""Writing a file so that a failure leaves whatever was there before."""

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["opened_atomically", "write_atomically"]


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path``, all of it or nothing; see :func:`opened_atomically`."""
    with opened_atomically(path) as stream:
        stream.write(data)


@contextlib.contextmanager
def opened_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A stream whose bytes become ``path`` at the end of the block, all of them or none.

    They go to a new file in the same folder, are flushed to the disk, and take the place of ``path`` in one step of the
    file system. When anything fails, the new file is removed and ``path`` is as it was.

    Args:
        path: the file to write; a symbolic link is followed, and what it points to is replaced.

    Raises:
        OSError: the folder is missing or not writable, the disk is full, ``path`` is a folder. It names the file.
    """
    final = Path(os.path.realpath(path))
    if final.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    if not final.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    # open(), not tempfile: the file gets the permissions that any new file of this user gets.
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex}.part")
    try:
        with open(partial, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if final.exists():
            os.chmod(partial, final.stat().st_mode & 0o7777)
        os.replace(partial, final)
    except OSError as error:
        _remove(partial)
        if error.errno is None or error.filename not in (None, os.fspath(partial)):  # of what was written, not of this
            raise
        # A full disk has no name in the system's words, and the new file is none of the user's.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    except BaseException:
        _remove(partial)
        raise


def _remove(partial: Path) -> None:
    with contextlib.suppress(OSError):  # a folder that became read-only; the first error is the one to tell
        partial.unlink(missing_ok=True)
