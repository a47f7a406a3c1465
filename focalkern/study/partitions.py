"""The rows in memory of one process, as its share of a set that is distributed over several processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._checks import one_of, short
from focalkern._types import INPUT_KINDS
from focalkern.calibrators import InputKind
from focalkern.files import InputError
from focalkern.files.samples import checked_set
from focalkern.study.distributed import Processes, Progress
from focalkern.study.samples import StreamedSamples

__all__ = ["share_rows"]

_OP = "share_rows"
_LOOK = 1 << 16  # number of samples of this process that are checked for problems


@dataclass(frozen=True)
class _RowRange:
    """Rows [first, first + n) of a set, in memory, with the interface of ``ShardedRows``."""

    input: Tensor
    target: Tensor
    first: int
    total: int
    kind: InputKind
    name: str
    source: str
    shards: tuple[Any, ...] = ()  # no files

    def __len__(self) -> int:
        return self.total

    @property
    def n_classes(self) -> int:
        return self.input.shape[1]

    def batches(self, begin: int, end: int, rows_at_once: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        for row in range(begin, end, rows_at_once):
            place = slice(row - self.first, min(row + rows_at_once, end) - self.first)
            yield row, self.input[place], self.target[place]


class _SharedSamples(StreamedSamples):
    """Samples that are distributed over processes; each holds its own part in memory."""

    shards: Any

    @property
    def share(self) -> tuple[int, int]:
        return self.shards.first, self.shards.first + len(self.shards.target)

    def sample(self) -> tuple[Tensor, Tensor]:
        return self.shards.input[:_LOOK], self.shards.target[:_LOOK]


def share_rows(
    logits: Any, labels: Any, processes: Processes, *, input_kind: InputKind = "logits", name: str = "val"
) -> StreamedSamples:
    """The rows of this process as its share of a set, for a comparison on the workers of any engine.

    Every process calls it with its own rows (a partition of dask, Ray or Spark) and then
    :func:`focalkern.compare_calibrators` with the result. Each pass over the rows ends with one gloo sum over the
    processes. Rows do not leave their process, except the top probabilities of up to 524,288 test rows. All processes
    must run at the same time, because they wait for each other in each of about 100 passes.

    Rows are numbered in the order of the ranks, and these numbers determine the folds. Verdict, calibrator and scores
    equal those of one process with all rows; sums agree to 1e-12. The study of rank 0 has the results.

    Args:
        logits: [n, C], the rows of this process; n may be 0.
        labels: [n] class indices.
        processes: :class:`Processes`, the same group for every set.
        input_kind: ``"logits"`` or ``"probs"``.
        name: ``"val"`` or ``"test"``, for messages.

    Returns:
        Samples for :func:`focalkern.compare_calibrators` and :func:`evaluate_rows`.

    Raises:
        TypeError: ``processes`` is not a :class:`Processes`.
        ValueError: rows that cannot be used, naming the first; different numbers of classes on the processes; no rows
            on any process.

    Example:
        >>> labels = torch.arange(600) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(600) % 5 == 0)) % 3]
        >>> rows = fk.study.share_rows(logits, labels, fk.study.Processes())  # one process: all rows
        >>> fk.compare_calibrators(rows, resamples=0).chosen.method
        'spline-vector'
    """
    if not isinstance(processes, Processes):
        raise TypeError(f"{_OP}: processes must be Processes of focalkern.study, got {short(processes)}")
    one_of(_OP, "input_kind", input_kind, INPUT_KINDS)
    one_of(_OP, "name", name, ("val", "test"))
    input, target = as_tensor(logits, f"{_OP}: logits").cpu(), as_tensor(labels, f"{_OP}: labels").cpu()
    problem = ""
    if input.dim() != 2 or len(input):
        try:
            rows = checked_set(_OP, name, input_kind, "logits", input, "labels", target)
            input, target = rows.input, rows.labels
        except InputError as error:  # all processes raise together, so that none waits for another
            problem = error.words
    counts = torch.zeros(processes.size, 3, dtype=torch.int64)
    n_classes = input.shape[1] if input.dim() == 2 else 0
    counts[processes.rank] = torch.tensor([len(input), n_classes, bool(problem)])
    counts = processes.add_up(counts)
    if problem:
        raise ValueError(problem)
    if bool(counts[:, 2].any()):
        raise ValueError(f"{_OP}: rows of rank {int(counts[:, 2].argmax())} cannot be used; its error names the first")
    if len(counts[:, 1].unique()) > 1:
        raise ValueError(f"{_OP}: logits must have one number of classes, got {counts[:, 1].tolist()} by rank")
    total, first = int(counts[:, 0].sum()), int(counts[: processes.rank, 0].sum())
    if total == 0:
        raise ValueError(f"{_OP}: logits must have at least one row on some process, got none")
    source = "rows in memory" if processes.size == 1 else f"rows of {processes.size} processes"
    shared: Any = _RowRange(input, target.to(torch.int64), first, total, input_kind, name, source)
    return _SharedSamples(shared, processes, Progress(None, 0, processes))
