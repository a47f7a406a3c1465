"""Files behind URLs, through fsspec: the only module that imports it."""

import contextlib
import glob
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from focalkern.files.errors import InputError

__all__ = ["Url", "contents", "exists", "fingerprint", "inside", "is_url", "matching", "part", "size"]

# s3://bucket/key, and chains of fsspec such as simplecache::s3://bucket/key
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(://|::.*://)")
# Metadata that identify a version of a file without reading it.
_TAGS = ("ETag", "etag", "md5Hash", "blob_id")
_AT_ONCE = 1 << 26


class Url(str):
    """A URL, as the user wrote it.

    Attributes:
        options: options of the fsspec file system, such as credentials or the address of a server.
    """

    options: Mapping[str, Any]

    def __new__(cls, text: str, options: Mapping[str, Any] | None = None) -> "Url":
        made = super().__new__(cls, text)
        made.options = dict(options or {})
        return made

    def __getnewargs__(self) -> tuple[str, Mapping[str, Any]]:  # type: ignore[override]  # str has another signature
        return str(self), self.options


def is_url(name: str) -> bool:
    """Whether the text is a URL rather than a path."""
    return isinstance(name, Url) or _URL.match(name) is not None


def contents(url: Url) -> bytes:
    """All bytes of a file, in one request."""
    system, path = _opened(url)
    with _reading(url):
        return bytes(system.cat_file(path))


def part(url: Url, begin: int, end: int) -> bytes:
    """The bytes [begin, end) of a file; fewer if the file ends earlier."""
    system, path = _opened(url)
    with _reading(url):
        found = bytes(system.cat_file(path, start=begin, end=end))
    # A web server may answer with the whole file.
    return found if len(found) <= end - begin else found[begin:end]


def size(url: Url) -> int | None:
    """The size of a file in bytes; None if the server does not report it."""
    system, path = _opened(url)
    with _reading(url):
        found = system.size(path)
    return None if found is None else int(found)


def exists(url: Url) -> bool:
    system, path = _opened(url)
    with _reading(url):
        return bool(system.exists(path))


def matching(url: Url) -> list[Url]:
    """The files that match a pattern of fsspec, where ``**`` is any number of folders."""
    system, path = _opened(url)
    with _reading(url):
        system.invalidate_cache()
        return _urls(url, system.glob(path))


def inside(url: Url) -> list[Url] | None:
    """The files of a folder; None if the URL is not a folder."""
    system, path = _opened(url)
    with _reading(url):
        system.invalidate_cache()
        return _urls(url, system.ls(path, detail=False)) if system.isdir(path) else None


def fingerprint(url: Url) -> str:
    """A fingerprint that changes with the content of a file: the server's tag, or a digest of the bytes."""
    system, path = _opened(url)
    with _reading(url):
        system.invalidate_cache()
        found = system.info(path)
    tag = next((found[key] for key in _TAGS if found.get(key)), None)
    if tag is not None:
        return f"{found.get('size')} {tag}"
    digest, begin = hashlib.blake2b(), 0
    while chunk := part(url, begin, begin + _AT_ONCE):
        digest.update(chunk)
        begin += len(chunk)
        if len(chunk) < _AT_ONCE:
            break
    return digest.hexdigest()


def _opened(url: Url) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise InputError(f"{url}: fsspec is needed to read it: pip install fsspec") from None
    try:
        system, path = url_to_fs(str(url), **url.options)
    except ImportError as error:
        # The text of fsspec's error varies; its cause names the missing module.
        name = getattr(error.__cause__, "name", None) or error.name or str(error)
        package = name.partition(".")[0]
        raise InputError(f"{url}: {package} is needed to read it: pip install {package}") from None
    except Exception as error:  # an unknown protocol, or options that the file system rejects
        raise InputError(f"{url}: expected a URL that fsspec can open, found: {_line(error)}") from None
    return system, str(path)


@contextlib.contextmanager
def _reading(url: Url) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{url}: expected a file, found nothing there") from None
    except Exception as error:  # each file system raises its own errors
        raise InputError(f"{url}: expected a file that can be read, found: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _urls(url: Url, paths: list[str]) -> list[Url]:
    """Paths of the file system as URLs with the protocols of the given URL, also inside a chain."""
    links = str(url).split("::")
    place = next((at for at, link in enumerate(links) if glob.has_magic(link)), len(links) - 1)
    protocol = links[place].partition("://")[0]
    found = []
    for path in paths:
        links[place] = path if "://" in path else f"{protocol}://{path}"
        found.append(Url("::".join(links), url.options))
    return found
