"""Processes that share the samples, and the state file of a search."""

import atexit
import contextlib
import datetime
import io
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from focalkern._atomic import write_atomically
from focalkern._checks import short
from focalkern.files import InputError
from focalkern.streaming import CalibrationGridState

__all__ = ["Processes", "Progress", "stopping_between_batches"]

_STATE_FORMAT = 2


class Processes:
    """The processes of a gloo group: started by torchrun, connected by an address, or a single process.

    Every rank reads its share of the samples. Rank 0 gets all results, prints and writes. An existing group, as in a
    worker of Ray Train, is reused, and :meth:`close` leaves it open.

    Args:
        timeout: seconds that a process waits for the others; None for a single process, also under torchrun.
        rank, size: rank of this process and number of processes; None uses the values of torchrun.
        address: ``"HOST:PORT"`` at which rank 0 listens; needs ``rank`` and ``size``.

    Raises:
        InputError: the other processes did not start in time, or have died.
        ValueError: one of ``rank``, ``size`` and ``address`` without the others, or without ``timeout``.

    Example:
        >>> processes = fk.study.Processes(60, rank=0, size=1, address="127.0.0.1:29500")
        >>> processes.rank, processes.size
        (0, 1)
        >>> processes.close()
    """

    def __init__(
        self,
        timeout: float | None = None,
        *,
        rank: int | None = None,
        size: int | None = None,
        address: str | None = None,
    ) -> None:
        self.rank, self.size, self._ends = 0, 1, False
        given = (rank is not None, size is not None, address is not None)
        if any(given) and (timeout is None or not all(given)):
            raise ValueError(f"Processes: rank, size, address and timeout go together, got {rank}, {size}, {address}")
        if timeout is None:
            return
        import torch.distributed as dist

        self.timeout = timeout
        wait = datetime.timedelta(seconds=timeout)
        if rank is None and dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            return
        self.size = int(os.environ.get("WORLD_SIZE", "1")) if size is None else size
        if self.size == 1:
            return
        with self._clearly("start"):
            if rank is None:
                dist.init_process_group("gloo", timeout=wait)
            else:
                dist.init_process_group(
                    "gloo", init_method=f"tcp://{address}", rank=rank, world_size=self.size, timeout=wait
                )
        self.rank, self._ends = dist.get_rank(), True

    @contextlib.contextmanager
    def _clearly(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            # If another process has died, closing the group at exit may abort the interpreter.
            atexit.register(os._exit, 2)
            reason = str(error.__cause__ or error).strip().partition("\n")[0].partition(". This is")[0]
            raise InputError(
                f"rank {self.rank} of {self.size}: another process has died, or did not answer within "
                f"{self.timeout:g} s ({what}); no result was written: {reason}"
            ) from error

    def share(self, rows: int) -> tuple[int, int]:
        """The samples [begin, end) of this process."""
        return rows * self.rank // self.size, rows * (self.rank + 1) // self.size

    def reduce(self, state: CalibrationGridState) -> None:
        if self.size > 1:
            with self._clearly("sums of the grid"):
                state.all_reduce()

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, on every process."""
        if self.size > 1:
            import torch.distributed as dist

            with self._clearly("sums of the scores"):
                dist.all_reduce(tensor)
        return tensor

    def from_first(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0 on every process, with the same bits."""
        if self.size > 1:
            import torch.distributed as dist

            with self._clearly("the tables"):
                dist.broadcast(tensor, 0)
        return tensor

    def to_first(self, tensor: Tensor) -> Tensor:
        """On rank 0, the tensors [n_i] of all processes, concatenated by rank; empty on other ranks."""
        if self.size == 1:
            return tensor
        import torch.distributed as dist

        with self._clearly("confidences"):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(tensor)]))
            longest = max(int(length) for length in lengths)
            padded = torch.nn.functional.pad(tensor, (0, longest - len(tensor)))
            parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
            dist.gather(padded, parts)
        if parts is None:
            return tensor[:0]
        return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])

    def close(self) -> None:
        """End the group if this object has started it."""
        if self._ends:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


class Progress:
    """A state file that is written at intervals, so that the same command can resume from it.

    Args:
        path: the file; None writes none. Each of several processes writes its own, FILE.0-of-2 and FILE.1-of-2.
        every: seconds between two writes.
        processes: the processes that share the work.
        say: function that is called with a sentence when the work resumes and when it stops.
    """

    def __init__(
        self, path: Path | None, every: float, processes: Processes, say: Callable[[str], None] = lambda _: None
    ) -> None:
        if path is not None and processes.size > 1:
            path = path.with_name(f"{path.name}.{processes.rank}-of-{processes.size}")
        self.path, self.every, self.say = path, every, say
        self._written = time.monotonic()

    def load(self, state: CalibrationGridState, task: dict[str, Any], totals: Tensor) -> int:
        """Load the file into ``state`` and ``totals``; returns the number of samples done, 0 without a file."""
        if self.path is None or not self.path.exists():
            return 0
        remedy = "delete it, or name another file"
        other = InputError(
            f"{self.path}: expected a state that this command has written, found something else; {remedy}"
        )
        try:
            found = torch.load(io.BytesIO(self.path.read_bytes()), weights_only=True)
            if found["format"] != _STATE_FORMAT:
                expected = f"format {_STATE_FORMAT} of a state"
                raise InputError(f"{self.path}: expected {expected}, found {short(found['format'])}; {remedy}")
            known, content, done, kept = dict(found["task"]), found["state"], int(found["done"]), found["totals"]
        except InputError:
            raise
        except Exception as error:  # torch.load may raise any error for a file of another kind
            raise other from error
        for name, value in task.items():
            if known.get(name) != value:
                raise InputError(
                    f"{self.path}: expected the state of this command, found one of other {name}, "
                    f"{_first_difference(known.get(name), value)}; {remedy}"
                )
        try:
            state.load_state_dict(content)
        except ValueError as error:
            reason = str(error).partition("state_dict ")[2]
            raise InputError(f"{self.path}: expected the state of this grid: it {reason}; {remedy}") from error
        if done < 0 or not isinstance(kept, Tensor) or kept.shape != totals.shape:
            raise other
        totals.copy_(kept)
        return done

    def save(self, state: CalibrationGridState, task: dict[str, Any], done: int, totals: Tensor, *, now: bool) -> None:
        if self.path is None or not (now or time.monotonic() - self._written >= self.every):
            return
        stream = io.BytesIO()
        content = {"task": task, "done": done, "totals": totals, "state": state.state_dict()}
        torch.save({"format": _STATE_FORMAT, **content}, stream)
        write_atomically(self.path, stream.getvalue())
        self._written = time.monotonic()

    def remove(self) -> None:
        """Remove the file, after the result has been written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _first_difference(found: Any, expected: Any) -> str:
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        found, expected = next(pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1])
    shown = [text if len(text) <= 60 else f"{text[:57]}..." for text in (repr(found), repr(expected))]
    return f"{shown[0]} in place of {shown[1]}"


@contextlib.contextmanager
def stopping_between_batches(resumable: bool) -> Iterator[Callable[[], bool]]:
    """Context in which the first Ctrl-C or SIGTERM requests a save and a stop; a second one stops at once."""
    asked: list[int] = []
    if not resumable:
        yield lambda: False
        return

    def ask(number: int, _frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
