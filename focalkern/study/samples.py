"""The samples of a study: a protocol for samples in memory and for samples that are read from files in batches."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import count_rows, short
from focalkern._diagnostics import label_problems, pair_problems, rows_digest, sampled_parts
from focalkern._progress import ProgressBar
from focalkern.calibrators import FocalTemperatureScaling, InputKind, TemperatureScaling
from focalkern.files import LogitSet
from focalkern.files.paths import files_of, is_several, size_of, suffix_of
from focalkern.files.shards import STREAMED, ShardedRows, open_shards
from focalkern.study.distributed import Processes, Progress

__all__ = [
    "CALIBRATION_ERRORS",
    "MOST_KEPT",
    "SCORES",
    "Batch",
    "Facts",
    "MemorySamples",
    "Samples",
    "Scaling",
    "StreamedSamples",
    "about_rows",
    "as_samples",
    "data_problem",
    "describe_samples",
    "describe_source",
    "describe_test",
    "digest_of",
    "fits_in_memory",
    "overlap_problem",
    "scaling_or_none",
    "stream_sets",
    "wants_streaming",
]

SCORES = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece_equal_width": "ECE\nequal_\nwidth",
    "ece_equal_mass": "ECE\nequal_\nmass",
    "ece_equal_mass_interp": "ECE\nequal_\nmass_\ninterp",
    "classwise_ece_equal_width": "classwise\nECE equal_\nwidth",
}
"""The scores of a table: name in CSV and JSON, and heading in the printed table."""

CALIBRATION_ERRORS = tuple(name for name in SCORES if "ece_" in name)

Scaling = TemperatureScaling | FocalTemperatureScaling


def scaling_or_none(calibrator: Any) -> Scaling | None:
    """The calibrator if gamma and T are its only parameters, else None."""
    if not isinstance(calibrator, TemperatureScaling | FocalTemperatureScaling):
        return None
    return None if calibrator.floor or getattr(calibrator, "input_floor_", 0.0) else calibrator


class Batch(NamedTuple):
    """Some of the samples of this process.

    Attributes:
        done: number of rows of this process that are read after this batch, including rows that a subset leaves out.
        input: [n, C], in the dtype of the file.
        target: [n] int64.
        number: [n] int64, the indices of the samples in the file or files.
    """

    done: int
    input: Tensor
    target: Tensor
    number: Tensor


@dataclass(frozen=True)
class Facts:
    """Counts over the samples of all processes.

    Attributes:
        class_counts: [C] int64, samples per class.
        impossible_targets: number of samples whose true class has probability 0.
        looks_like_probs: whether logits are all positive and sum to 1, as probabilities do.
    """

    class_counts: Tensor
    impossible_targets: int
    looks_like_probs: bool


class Samples(Protocol):
    """Inputs [N, C] and labels [N], in memory or in files, for the functions of ``scores`` and ``grid_search``.

    Attributes:
        kind: ``"logits"`` or ``"probs"``.
        name: ``""``, ``"val"`` or ``"test"``.
        source: the name of the file, or of the argument.
        part: description of the subset of the source; empty for all samples.
        n_classes: C.
        processes: the processes that share the samples.
        facts: counts over the samples; None until the first pass.
        scored: cached results of earlier passes over files. A key is the calibrator or (gamma, T), and the number of
            bins.
    """

    kind: InputKind
    name: str
    source: str
    part: str
    n_classes: int
    processes: Processes
    facts: Facts | None
    scored: dict[tuple[Any, int], Any]

    def __len__(self) -> int:
        """N, the number of samples of all processes."""

    @property
    def memory(self) -> LogitSet | None:
        """The samples if all of them are in memory, else None."""

    @property
    def n_local(self) -> int:
        """Number of samples of this process."""

    @property
    def keeps_confidences(self) -> bool:
        """Whether the confidences of all samples fit into memory, as intervals and equal-mass bins need."""

    def batches(self, what: str, *, wide: bool = True, done: int = 0) -> Iterator[Batch]:
        """The samples of this process, after the first ``done`` rows; ``what`` names the pass in a progress bar.

        Batches are smaller if ``wide``, for work in float64.
        """

    def sample(self) -> tuple[Tensor, Tensor]:
        """Input and labels of all samples, or of a part that is large enough for checks."""

    def subset(self, index: Tensor, part: str) -> "Samples":
        """The samples at ``index``, described as ``part``."""


class MemorySamples:
    """:class:`Samples` in memory: one batch."""

    keeps_confidences = True

    def __init__(self, memory: LogitSet) -> None:
        self.memory = memory
        self.kind: InputKind = memory.kind
        self.name, self.source, self.part = memory.name, memory.source, memory.part
        self.n_classes = memory.n_classes
        self.processes = Processes()
        self.facts: Facts | None = None
        self.scored: dict[tuple[Any, int], Any] = {}

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def n_local(self) -> int:
        return len(self.memory)

    def batches(self, what: str, *, wide: bool = True, done: int = 0) -> Iterator[Batch]:
        yield Batch(len(self), self.memory.input, self.memory.labels, torch.arange(len(self)))

    def sample(self) -> tuple[Tensor, Tensor]:
        return self.memory.input, self.memory.labels

    def subset(self, index: Tensor, part: str) -> "MemorySamples":
        return MemorySamples(self.memory.rows(index, part))


def as_samples(given: LogitSet | Samples) -> Samples:
    """The samples of a study from a set of a file or a user."""
    return MemorySamples(given) if isinstance(given, LogitSet) else given


# Largest number of samples whose confidences are kept (8 bytes each). For more, scores come from 6 MB of buckets.
MOST_KEPT = 1 << 19
# Number of logits in a batch: for the search in float32, and for passes in float64, which need several copies.
_SEARCH_BATCH = 1 << 23
_FLOAT64_BATCH = 1 << 21
_MOST_ROWS = 1 << 16


class StreamedSamples:
    """:class:`Samples` in files, read in batches for each pass.

    Args:
        shards: the files.
        processes, progress: the processes that share the work, and the state file.
        kept: [len(shards)] bool, the samples that are used; None uses all.
        part: description of these samples.
    """

    memory = None

    def __init__(
        self,
        shards: ShardedRows,
        processes: Processes,
        progress: Progress,
        kept: np.ndarray[Any, Any] | None = None,
        part: str = "",
    ) -> None:
        self.shards, self._kept = shards, kept
        self.processes, self.progress = processes, progress
        self.kind: InputKind = shards.kind
        self.name, self.source, self.part = shards.name, shards.source, part
        self.n_classes = shards.n_classes
        self.facts: Facts | None = None
        self.scored: dict[tuple[Any, int], Any] = {}

    def __len__(self) -> int:
        return self._count(0, len(self.shards))

    @property
    def n_local(self) -> int:
        return self._count(*self.share)

    @property
    def share(self) -> tuple[int, int]:
        """The rows [begin, end) of this process, including rows that a subset leaves out."""
        return self.processes.share(len(self.shards))

    @property
    def keeps_confidences(self) -> bool:
        return len(self) <= MOST_KEPT

    def subset(self, index: Tensor, part: str) -> Self:
        kept = np.zeros(len(self.shards), dtype=np.bool_)
        kept[index.numpy()] = True
        return type(self)(self.shards, self.processes, self.progress, kept, part)

    def sample(self) -> tuple[Tensor, Tensor]:
        """Input and labels of all samples, or of 65,536 of them (at most two million logits)."""
        inputs, labels = [], []
        for begin, end in sampled_parts(len(self.shards), self.n_classes):
            for first, input, target in self.shards.batches(begin, end, end - begin):
                kept: slice | Tensor = slice(None)
                if self._kept is not None:
                    kept = torch.from_numpy(self._kept[first : first + len(target)])
                inputs.append(input[kept].clone())
                labels.append(target[kept].to(torch.int64))
        return torch.cat(inputs), torch.cat(labels)

    def batches(self, what: str, *, wide: bool = True, done: int = 0) -> Iterator[Batch]:
        numbers = _FLOAT64_BATCH if wide else _SEARCH_BATCH
        begin, end = self.share
        at_once = max(1, min(_MOST_ROWS, numbers // self.n_classes))
        wanted = None if self.processes.rank == 0 else False
        with ProgressBar(end - begin, f"{what} {self.name or self.source}", "row", wanted, done) as bar:
            for first, input, target in self.shards.batches(begin + done, end, at_once):
                after = first + len(target)
                number = torch.arange(first, after)
                if self._kept is not None:
                    kept = torch.from_numpy(self._kept[first:after])
                    input, target, number = input[kept], target[kept], number[kept]
                yield Batch(after - begin, input, target, number)
                bar.update(after - first)

    def _count(self, begin: int, end: int) -> int:
        return end - begin if self._kept is None else int(np.count_nonzero(self._kept[begin:end]))


# In memory the input needs several copies, some of them in float64.
_SHARE_OF_MEMORY = 8


def stream_sets(
    path: str, *, processes: Processes | None = None, progress: Progress | None = None, **options: Any
) -> dict[str, StreamedSamples]:
    """The sets of files whose rows are read a few at a time; only shapes are read now.

    Args:
        path: a .npy, .safetensors or .zarr file, or a folder, pattern (``"val_logits-*.npy"``) or ``@LIST`` of them,
            whose rows are concatenated in the order of the names and their numbers; or URLs. The labels of
            ``val_logits-3.npy`` are in ``val_labels-3.npy``.
        processes: the processes that share the rows; None is this process alone.
        progress: a state file that is written at intervals, from which the same call resumes; None writes none.
        options: ``labels``, ``input_kind``, ``logits_key``, ``labels_key``, ``ignore_index`` and ``storage_options``
            of :func:`focalkern.files.read_sets`.

    Returns:
        By prefix, ``""``, ``"val"`` or ``"test"``, rows for :func:`focalkern.compare_calibrators` and
        :func:`evaluate_rows`.

    Raises:
        InputError: any problem with names or shapes.

    Example:
        >>> for part in range(2):
        ...     np.save(f"logits-{part}.npy", 2 * np.eye(4, dtype=np.float32))
        ...     np.save(f"labels-{part}.npy", np.arange(4))
        >>> rows = fk.study.stream_sets("logits-*.npy")[""]
        >>> len(rows), rows.n_classes
        (8, 4)
    """
    if not isinstance(processes, Processes | None) or not isinstance(progress, Progress | None):
        raise TypeError(
            f"stream_sets: processes and progress must be Processes and Progress of focalkern.study, or None, got "
            f"{short(processes)} and {short(progress)}"
        )
    processes = processes or Processes()
    progress = progress or Progress(None, 0, processes)
    sets = open_shards(path, **options)
    return {prefix: StreamedSamples(rows, processes, progress) for prefix, rows in sets.items()}


def _memory() -> int:
    """The memory of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fits_in_memory(numbers: int) -> bool:
    """Whether this many float32 values of all samples may be held in memory."""
    return 4 * numbers <= _memory() / _SHARE_OF_MEMORY


def wants_streaming(paths: Sequence[str | None]) -> bool:
    """Whether a path stands for several files that can be read in parts, or for data too large for memory."""
    for path in paths:
        if path is None:
            continue
        if is_several(path):
            suffixes = {suffix_of(file) for file in files_of(path)}
            if suffixes and suffixes <= set(STREAMED):
                return True
        elif suffix_of(path) in STREAMED and size_of(path) > _memory() / _SHARE_OF_MEMORY:
            return True
    return False


def describe_samples(samples: Samples | LogitSet) -> str:
    """``5,000 validation rows``."""
    return count_rows(len(samples), {"val": "validation ", "test": "test "}.get(samples.name, ""))


def describe_source(samples: Samples, name: str = "") -> str:
    """``5,000 rows of 10 classes, logits: logits.npz``; ``name`` replaces the first two words."""
    part = f" ({samples.part})" if samples.part else ""
    subject = name or count_rows(len(samples))
    return f"{subject}{part} of {samples.n_classes} classes, {samples.kind}: {samples.source}"


def describe_test(test: Samples, same_samples: bool) -> str:
    """``on 5,000 test rows``."""
    return f"on {count_rows(len(test), 'validation ' if same_samples else 'test ')}"


def data_problem(samples: Samples) -> str:
    """A sentence on labels or columns that cannot be right; empty if there is none."""
    return "".join(f"{about_rows(samples)}: {words}." for words in label_problems(*samples.sample()))


def overlap_problem(validation: Samples, test: Samples) -> str:
    """A sentence on rows that are in both sets; empty if there are none."""
    (input, labels), (other, other_labels) = validation.sample(), test.sample()
    part = f"of {len(other_labels):,} compared rows: " if len(other_labels) < len(test) else ""
    return "".join(f"{part}{words}." for words in pair_problems(input, labels, other, other_labels))


def digest_of(samples: Samples) -> int | None:
    """:func:`rows_digest` of samples in memory, else None: others would need a pass over their files."""
    return None if samples.memory is None else rows_digest(samples.memory.input, samples.memory.labels)


def about_rows(samples: Samples) -> str:
    """The rows that a remark is about."""
    of_rows = f"{samples.source}{f' ({samples.part})' if samples.part else f', {samples.name}' if samples.name else ''}"
    n_rows = len(samples.sample()[1])
    return f"{of_rows} ({n_rows:,} of its rows)" if n_rows < len(samples) else of_rows
