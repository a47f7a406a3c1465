"""Tasks on any ``concurrent.futures.Executor``: results in order of completion, retries of lost tasks, Ctrl-C."""

import contextlib
import errno
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, resource_tracker
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from focalkern.files import Hint, InputError

__all__ = ["LocalPool", "run_tasks"]

_SCRIPT = "every worker imports the script, which must call sweep below if __name__ == '__main__'"


def run_tasks(
    executor: Executor,
    function: Callable[[Sequence[str], int], Sequence[Any]],
    tasks: Sequence[Sequence[str]],
    keep: Callable[[str, Any], None],
    lost: Callable[[str, str], None],
    window: int | None = None,
) -> None:
    """Call ``function(task, attempt)`` for every task and yield its results.

    A task is lost if its future raises, because its worker or another worker of the pool died. Every part of a lost
    task is tried once more, alone, after all other tasks. A part that is lost again is taken as the cause.

    Args:
        executor: an object with ``submit``.
        function: returns one result per name of a task. ``attempt`` is 0 or 1, because some schedulers return the same
            result for equal calls.
        tasks: lists of names.
        keep: called with a name and its result, in this thread, in order of completion.
        lost: called with a name and the reason.
        window: largest number of tasks submitted at a time; None submits all.

    Raises:
        KeyboardInterrupt: Ctrl-C. Waiting tasks are cancelled; results of finished tasks are kept.
    """
    suspects = _run(executor, function, tasks, 0, keep, window)
    alone = [[name] for task, _ in suspects for name in task]
    for (name,), error in _run(executor, function, alone, 1, keep, 1):
        lost(name, _reason(error))


def _run(
    executor: Executor,
    function: Callable[[Sequence[str], int], Sequence[Any]],
    tasks: Sequence[Sequence[str]],
    attempt: int,
    keep: Callable[[str, Any], None],
    window: int | None,
) -> list[tuple[Sequence[str], BaseException | None]]:
    """Runs all tasks; returns the lost ones with their errors."""
    finished: SimpleQueue[Future[Any]] = SimpleQueue()
    running: dict[Future[Any], Sequence[str]] = {}
    waiting = deque(tasks)
    failures: list[tuple[Sequence[str], BaseException | None]] = []

    def take(future: Future[Any]) -> None:
        task = running.pop(future)
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or error is not None:
            failures.append((task, error))
            return
        for name, result in zip(task, future.result(), strict=True):
            keep(name, result)

    try:
        while waiting or running:
            while waiting and (window is None or len(running) < window):
                task = waiting.popleft()
                try:
                    future = executor.submit(function, task, attempt)
                except RuntimeError as error:  # the executor is broken or shut down
                    future = Future()
                    future.set_exception(error)
                running[future] = task
                future.add_done_callback(finished.put)
            take(finished.get())
    except KeyboardInterrupt:
        for future in list(running):
            if not future.cancel() and future.done():
                take(future)
        raise
    finally:
        for future in running:
            future.cancel()
    return failures


def _reason(error: BaseException | None) -> str:
    if isinstance(error, BrokenProcessPool):
        return "its worker process was killed (the system does so when memory runs out)"
    if error is None:
        return "its task was cancelled"
    return f"its task failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})"


def _no_start(reason: str) -> InputError:
    return InputError(f"the worker processes do not start: {reason}", hint=Hint("jobs", "1"))


def _reason_of_no_start() -> str:
    """The likely reason why all workers die: what they import depends on how this program was started."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program is not None and not os.path.exists(program):
        return f"{program} is no file; save the program as a script: {_SCRIPT}"
    # python -c, a console and a notebook have no program; the command's has the condition.
    has_condition = program is None or "__main__" in Path(program).read_text(errors="replace")
    return "stderr has their own errors" if has_condition else _SCRIPT


class LocalPool(Executor):
    """Processes of this machine, as in :class:`concurrent.futures.ProcessPoolExecutor`, with two differences.

    ``submit`` replaces a pool with a dead worker. The workers ignore Ctrl-C, which a terminal sends to all processes of
    a command; only this process handles it.

    Args:
        jobs: number of processes.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        try:
            return ProcessPoolExecutor(self._jobs, get_context("spawn"))
        except (OSError, ImportError, NotImplementedError) as error:  # no semaphores, as without a writable /dev/shm
            raise _no_start(str(error)) from error

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        with _without_ctrl_c():  # this call may start a worker, which inherits the signal mask
            try:
                return self._submitted(fn, *args, **kwargs)
            except BrokenProcessPool:
                self._end()
                self._pool = self._new()
            except RuntimeError:  # this process is a worker that imports the script
                raise _no_start(_SCRIPT) from None
            try:
                self._submitted(int).result()
                return self._submitted(fn, *args, **kwargs)
            except BrokenProcessPool:
                self._end()
                raise _no_start(_reason_of_no_start()) from None

    def _submitted(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return self._pool.submit(fn, *args, **kwargs)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise _no_start(str(error)) from error
            # A worker has died during the call, and the pool has closed its pipe.
            raise BrokenProcessPool(str(error)) from None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def terminate(self) -> None:
        """Kill the workers. This is safe, because they write no files."""
        for worker in self._shut():
            worker.terminate()

    def _end(self) -> None:
        """Wait for the workers of a broken pool, which are being killed: they may still write to stderr."""
        for worker in self._shut():
            worker.join(10)

    def _shut(self) -> list[Any]:
        """Shut the pool down without waiting; returns its workers."""
        workers = list((getattr(self._pool, "_processes", None) or {}).values())  # shutdown clears them
        self._pool.shutdown(wait=False, cancel_futures=True)
        return workers

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.terminate()


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Context in which Ctrl-C waits until the end of the block, and never reaches a process started in the block."""
    resource_tracker.ensure_running()  # its start unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
