"""The option ``--engine``: the executor of a sweep."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

from focalkern.files import InputError

__all__ = ["engine"]


@contextlib.contextmanager
def engine(text: str) -> Iterator[Executor | None]:
    """An executor for the engine at this address; None for processes of this machine.

    Args:
        text: ``local``, ``dask://HOST:PORT``, ``ray://HOST:PORT`` or ``ray://auto`` (the cluster that this machine
            belongs to, or a new one on this machine).

    Raises:
        InputError: an unknown address; a missing package; no server at the address.
    """
    kind, _, address = text.partition("://")
    if text == "local":
        yield None
    elif kind == "dask" and address:
        with _dask_client(text, address) as client:
            yield client.get_executor()
    elif kind == "ray" and address:
        with _ray(text, address) as executor:
            yield executor
    else:
        raise InputError(f"--engine: expected local, dask://HOST:PORT, ray://HOST:PORT or ray://auto, found {text!r}")


def _dask_client(text: str, address: str) -> Any:
    try:
        from distributed import Client
    except ImportError:
        raise _missing(text, "dask") from None
    try:
        return Client(f"tcp://{address}", timeout="10s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(f"--engine {text}: expected a scheduler of dask, found: {_line(error)}") from None


@contextlib.contextmanager
def _ray(text: str, address: str) -> Iterator[Executor]:
    try:
        import ray

        from focalkern.integrations.ray import RayExecutor
    except ImportError:
        raise _missing(text, "ray") from None
    try:
        ray.init(None if address == "auto" else text, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"--engine {text}: expected a cluster of Ray, found: {_line(error)}; a cluster with token authentication "
            "needs RAY_AUTH_MODE=token"
        ) from None
    try:
        yield RayExecutor()
    finally:
        ray.shutdown()


def _missing(text: str, extra: str) -> InputError:
    return InputError(f"--engine {text}: {extra} is needed for this: pip install 'focalkern[{extra}]'")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
