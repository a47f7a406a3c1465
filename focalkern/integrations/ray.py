"""An executor on Ray, for :func:`focalkern.sweep`."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import ray

__all__ = ["RayExecutor"]


class RayExecutor(Executor):
    """An executor whose calls are tasks of Ray. Ray runs a task again if its worker or machine is lost.

    Args:
        **options: options of ``ray.remote``, such as ``num_cpus=1``, ``max_retries=3``, ``memory=2e9``,
            ``runtime_env={...}``.

    Example:
        >>> import ray  # doctest: +SKIP
        >>> ray.init()  # doctest: +SKIP
        >>> RayExecutor(num_cpus=1).submit(pow, 2, 10).result()  # doctest: +SKIP
        1024
    """

    def __init__(self, **options: Any) -> None:
        self._remote = ray.remote(_call).options(**options)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run a function on Ray.

        Args:
            fn, *args, **kwargs: function and arguments that can be pickled.

        Returns:
            A future. Cancelling it cancels the task.

        Raises:
            RuntimeError: Ray is not running.
        """
        reference = self._remote.remote(fn, *args, **kwargs)
        future: Future[Any] = reference.future()
        future.add_done_callback(lambda ended: ray.cancel(reference) if ended.cancelled() else None)
        return future


def _call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)
