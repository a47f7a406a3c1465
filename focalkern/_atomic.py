"""Writing a file so that a failure leaves whatever was there before."""

import errno
import os
import uuid
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write ``data`` to ``path``, all of it or nothing.

    The bytes go to a new file in the same folder, are flushed to the disk, and take the place of ``path`` in one step
    of the file system. When anything fails, the new file is removed and ``path`` is as it was.

    Args:
        path: the file to write; a symbolic link is followed, and what it points to is replaced.
        data: the whole contents.

    Raises:
        OSError: the folder is missing or not writable, the disk is full, ``path`` is a folder.
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
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if final.exists():
            os.chmod(partial, final.stat().st_mode & 0o7777)
        os.replace(partial, final)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
