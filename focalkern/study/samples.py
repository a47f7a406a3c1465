"""The samples of a study: the protocol, and batches of samples that are read from files as they are needed."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from focalkern.bootstrap import BiasFloor, PairedBootstrap
from focalkern.calibrators import Estimator, FocalTemperatureScaling, InputKind, TemperatureScaling
from focalkern.calibrators._selection import CrossValidation, Proper
from focalkern.files import LogitSet
from focalkern.files.shards import ShardedRows
from focalkern.metrics import ReliabilityBins
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.ops.calibration_sums import CalibrationSums
from focalkern.study.distributed import Processes, Progress

__all__ = [
    "CALIBRATION_ERRORS",
    "SCORES",
    "About",
    "Samples",
    "Scaling",
    "StreamedBatches",
    "describe_samples",
    "describe_source",
    "describe_test",
    "scaling_or_none",
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
"""Scores of a table, by their name in CSV and JSON, with their heading in print."""

CALIBRATION_ERRORS = tuple(name for name in SCORES if "ece_" in name)

Scaling = TemperatureScaling | FocalTemperatureScaling


def scaling_or_none(calibrator: Any) -> Scaling | None:
    """The calibrator, if gamma and T are all it has."""
    if not isinstance(calibrator, TemperatureScaling | FocalTemperatureScaling):
        return None
    return None if calibrator.floor or getattr(calibrator, "input_floor_", 0.0) else calibrator


class About(Protocol):
    """Facts about samples that need no pass over them."""

    @property
    def kind(self) -> InputKind:
        """``"logits"`` or ``"probs"``."""

    @property
    def name(self) -> str:
        """``""``, ``"val"`` or ``"test"``."""

    @property
    def source(self) -> str:
        """The name of the file, or of the argument."""

    @property
    def part(self) -> str:
        """Which samples of the source, in words; nothing for all."""

    @property
    def n_classes(self) -> int:
        """C."""

    def __len__(self) -> int:
        """N."""


class Samples(About, Protocol):
    """Inputs [N, C] and labels [N], in memory or in files: what a study asks of them.

    :class:`focalkern.study.MemorySamples` and :class:`focalkern.study.StreamedSamples` implement it. A calibrator is
    fitted; streamed samples take temperature and focal temperature scaling only.
    """

    @property
    def memory(self) -> LogitSet | None:
        """The samples, where all of them are in memory."""

    @property
    def keeps_confidences(self) -> bool:
        """Whether the confidences of all samples fit into memory: intervals and bins of equal mass need them."""

    @property
    def resampled_in_seconds(self) -> bool:
        """Whether a bootstrap of all scores takes seconds."""

    @property
    def class_counts(self) -> Tensor:
        """[C] int64, samples per class. This and the next two are known after :meth:`measure`."""

    @property
    def impossible_targets(self) -> int:
        """Number of samples whose own class has probability 0."""

    @property
    def looks_like_probs(self) -> bool:
        """Whether logits are all positive and sum to 1, as probabilities do."""

    def sample(self) -> tuple[Tensor, Tensor]:
        """Input and labels of all samples, or of a part that is large enough to look for problems."""

    def subset(self, index: Tensor, part: str) -> "Samples":
        """The samples of ``index``, called ``part``."""

    def identity(self, n_bins: int) -> TemperatureScaling:
        """No calibration, as a calibrator fitted on these samples."""

    def grid(
        self,
        gammas: Sequence[float],
        temperatures: Sequence[float],
        *,
        n_bins: int,
        estimator: Estimator,
        criterion: Proper = "nll",
        folds: int = 0,
    ) -> CalibrationGrid:
        """ECE and NLL of every (gamma, T), and the Brier score if it is the ``criterion``.

        ``folds`` prepares :meth:`cross_validate`.
        """

    def cross_validate(
        self,
        candidates: Mapping[str, Any],
        grid: CalibrationGrid,
        gammas: Sequence[float],
        *,
        criterion: Proper,
        folds: int,
        seed: int,
    ) -> CrossValidation:
        """Cross-validation of the unfitted ``candidates``; ``grid`` and ``gammas`` are of the last :meth:`grid`."""

    def measure(self, cells: Sequence[tuple[float, float]], n_bins: int) -> None:
        """One pass over the samples for all scores and bins of these (gamma, T)."""

    def scores(self, calibrator: Any, n_bins: int) -> dict[str, float]:
        """:data:`SCORES` of a calibrator, in float64.

        The accuracy of a scaling is that of the input: calibrated probabilities may saturate and tie.
        """

    def reliability(self, calibrator: Any, n_bins: int, estimator: Estimator = "equal_width") -> ReliabilityBins:
        """Reliability bins; of equal width if another ``estimator`` needs confidences that are not kept."""

    def resampled(
        self, calibrators: Mapping[str, Any], *, n_bins: int, n_resamples: int, seed: int
    ) -> tuple[PairedBootstrap, dict[str, dict[str, BiasFloor]]]:
        """The paired bootstrap of the scores and the bias floors, by the names of the calibrators."""

    def bound_of(self, gamma: float, temperature: float) -> float:
        """Error bound of an ECE of the last :meth:`grid`."""

    def bound_of_scores(self, gamma: float, temperature: float, n_bins: int) -> float:
        """Error bound of the equal-mass ECEs among the scores."""

    def cell_sums(self, gammas: Tensor, temperatures: Tensor, n_bins: int) -> CalibrationSums:
        """Sums of every (gamma, T) in one pass, in float64, for the map of the report."""

    def remove_progress(self) -> None:
        """Remove the state file, if there is one."""


def describe_samples(samples: About) -> str:
    """``5000 validation rows``."""
    name = {"val": "validation ", "test": "test "}.get(samples.name, "")
    return f"{len(samples)} {name}rows"


def describe_source(samples: About, name: str = "") -> str:
    """``5000 rows of 10 classes, logits: logits.npz``; ``name`` takes the place of the first two words."""
    part = f" ({samples.part})" if samples.part else ""
    subject = name or f"{len(samples)} rows"
    return f"{subject}{part} of {samples.n_classes} classes, {samples.kind}: {samples.source}"


def describe_test(test: About, same_samples: bool) -> str:
    """``on 5000 test rows``."""
    return f"on {len(test)} {'validation' if same_samples else 'test'} rows"


# Numbers in a batch: of the search in float32, and of passes in float64, which need several copies.
_SEARCH_BATCH = 1 << 23
_FLOAT64_BATCH = 1 << 21
_MOST_ROWS = 1 << 16
# Samples to look for problems in: blocks of neighbours, evenly spaced; fewer where a sample has many numbers.
_SAMPLED_ROWS, _SAMPLED_NUMBERS = 1 << 16, 1 << 21
_SAMPLED_BLOCKS = 16


class StreamedBatches:
    """Samples in files, read in batches.

    Args:
        rows: the files.
        processes, progress: the processes that share the work, and the state file.
        kept: [len(rows)] bool, the samples that count; all of them when None.
        part: which samples these are, in words.
    """

    def __init__(
        self,
        rows: ShardedRows,
        processes: Processes,
        progress: Progress,
        kept: np.ndarray[Any, Any] | None = None,
        part: str = "",
    ) -> None:
        self._rows, self._kept = rows, kept
        self._processes, self._progress = processes, progress
        self.kind: InputKind = rows.kind
        self.name, self.source, self.part = rows.name, rows.source, part
        self.n_classes = rows.n_classes

    def __len__(self) -> int:
        return len(self._rows) if self._kept is None else int(np.count_nonzero(self._kept))

    def subset(self, index: Tensor, part: str) -> Self:
        """The samples of ``index``, called ``part``."""
        kept = np.zeros(len(self._rows), dtype=np.bool_)
        kept[index.numpy()] = True
        return type(self)(self._rows, self._processes, self._progress, kept, part)

    def sample(self) -> tuple[Tensor, Tensor]:
        """Input and labels of all samples, or of 65,536 of them (two million numbers)."""
        n_rows = len(self._rows)
        block = max(1, min(_SAMPLED_ROWS, _SAMPLED_NUMBERS // self.n_classes) // _SAMPLED_BLOCKS)
        if n_rows <= _SAMPLED_BLOCKS * block:
            parts = [(0, n_rows)]
        else:
            starts = [(n_rows - block) * place // (_SAMPLED_BLOCKS - 1) for place in range(_SAMPLED_BLOCKS)]
            parts = [(start, start + block) for start in starts]
        inputs, labels = [], []
        for begin, end in parts:
            for first, input, target in self._rows.batches(begin, end, end - begin):
                kept: slice | Tensor = slice(None)
                if self._kept is not None:
                    kept = torch.from_numpy(self._kept[first : first + len(target)])
                inputs.append(input[kept].clone())
                labels.append(target[kept].to(torch.int64))
        return torch.cat(inputs), torch.cat(labels)

    def _batches(self, what: str, *, wide: bool = True, done: int = 0) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Batches of this process, after its first ``done`` samples.

        Yields:
            Number of samples done after the batch, input, labels, and the numbers of the samples. Batches are smaller
            if ``wide``, for work in float64.
        """
        numbers = _FLOAT64_BATCH if wide else _SEARCH_BATCH
        begin, end = self._processes.share(len(self._rows))
        at_once = max(1, min(_MOST_ROWS, numbers // self.n_classes))
        bar = _bar(f"{what} {self.name or self.source}", end - begin, done) if self._processes.rank == 0 else None
        try:
            for first, input, target in self._rows.batches(begin + done, end, at_once):
                after = first + len(target)
                number = torch.arange(first, after)
                if self._kept is not None:
                    kept = torch.from_numpy(self._kept[first:after])
                    input, target, number = input[kept], target[kept], number[kept]
                yield after - begin, input, target, number
                if bar is not None:
                    bar.update(after - begin - bar.n)
        finally:
            if bar is not None:
                bar.close()


def _bar(what: str, total: int, done: int) -> Any:
    """A progress bar on stderr where that is a terminal and tqdm is installed."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=what, total=total, initial=done, unit="row", unit_scale=True, leave=False)
