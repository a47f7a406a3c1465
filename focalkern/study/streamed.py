"""Samples in files larger than memory."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from focalkern import metrics
from focalkern._checks import short
from focalkern.bootstrap import BiasFloor, PairedBootstrap, bias_floor, paired_bootstrap
from focalkern.calibrators import Estimator
from focalkern.calibrators._selection import CrossValidation, Proper
from focalkern.files.shards import is_pattern, open_shards
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.ops.calibration_sums import CalibrationSums
from focalkern.study.distributed import Processes, Progress
from focalkern.study.grid_search import StreamedGrid, cross_validate_streamed
from focalkern.study.samples import SCORES, scaling_or_none
from focalkern.study.scores import MOST_KEPT, Measured, sums_of_cells

__all__ = ["MOST_KEPT", "StreamedSamples", "stream_sets", "wants_streaming"]

# In memory there are several copies of the input, some of them in float64.
_SHARE_OF_MEMORY = 8


class StreamedSamples(StreamedGrid):
    """:class:`Samples` in files, read in batches for each pass."""

    memory = None

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
        """The folds are those of :meth:`grid`, by sample number."""
        return cross_validate_streamed(self, candidates, grid, gammas, criterion=criterion)

    def scores(self, calibrator: Any, n_bins: int) -> dict[str, float]:
        self.measure([_cell(calibrator)], n_bins)
        found = self._of(calibrator, n_bins).scores
        return {name: found[name] for name in SCORES}

    def reliability(
        self, calibrator: Any, n_bins: int, estimator: Estimator = "equal_width"
    ) -> metrics.ReliabilityBins:
        found = self._of(calibrator, n_bins)
        if estimator == "equal_width" or not self.keeps_confidences:
            return found.bins
        return metrics.reliability_bins(
            confidence=found.confidence, correct=self.correct, n_bins=n_bins, estimator=estimator
        )

    def resampled(
        self, calibrators: Mapping[str, Any], *, n_bins: int, n_resamples: int, seed: int
    ) -> tuple[PairedBootstrap, dict[str, dict[str, BiasFloor]]]:
        """Of accuracy and ECE only: the probabilities of the other classes are not kept."""
        options: Any = {"n_bins": n_bins, "n_resamples": n_resamples, "seed": seed}
        confidence = {name: self._of(calibrator, n_bins).confidence for name, calibrator in calibrators.items()}
        bootstrap = paired_bootstrap(confidence=confidence, correct=self.correct, **options)
        return bootstrap, {name: bias_floor(confidence=confidence[name], **options) for name in calibrators}

    @property
    def resampled_in_seconds(self) -> bool:
        """One confidence per sample, for any number of classes."""
        return self.keeps_confidences

    def bound_of_scores(self, gamma: float, temperature: float, n_bins: int) -> float:
        return self.measured(gamma, temperature, n_bins).bound

    def cell_sums(self, gammas: Tensor, temperatures: Tensor, n_bins: int) -> CalibrationSums:
        """In one pass, in float64, for the map of the report. Every process gets the sums of all."""
        batches = ((input, target) for _, input, target, _ in self._batches("map"))
        sums = sums_of_cells(batches, gammas, temperatures, n_bins, self.kind)
        for _, tensor in sums.items():
            self._processes.add_up(tensor)
        return sums

    def remove_progress(self) -> None:
        """Remove the state file."""
        self._progress.remove()

    def _of(self, calibrator: Any, n_bins: int) -> Measured:
        return self.measured(*_cell(calibrator), n_bins)


def _cell(calibrator: Any) -> tuple[float, float]:
    """gamma and T of a scaling."""
    scaling = scaling_or_none(calibrator)
    assert scaling is not None  # other calibrators need samples in memory
    return scaling.gamma_, scaling.temperature_


def stream_sets(
    path: str, *, processes: Processes | None = None, progress: Progress | None = None, **options: Any
) -> dict[str, StreamedSamples]:
    """The sets of files whose rows are read a few at a time; only shapes are read now.

    Args:
        path: a .npy or .safetensors file, or a pattern of them (``"val_logits-*.npy"``), whose rows follow each other
            in the order of the names and their numbers. The labels of ``val_logits-3.npy`` are in ``val_labels-3.npy``.
        processes: who shares the rows; this process alone when None.
        progress: a file that is written now and then, from which the same call goes on; none when None.
        options: ``labels``, ``input_kind``, ``logits_key`` and ``labels_key`` of :func:`focalkern.files.read_sets`.

    Returns:
        By prefix, ``""``, ``"val"`` or ``"test"``, what :func:`focalkern.compare_calibrators` and
        :func:`evaluate_rows` take for rows.

    Raises:
        InputError: anything at all that is wrong with names and shapes.

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


def wants_streaming(paths: Sequence[str | None]) -> bool:
    """Whether one of the files is a pattern, or so large that what is done in memory might not fit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in paths:
        if path is None:
            continue
        if is_pattern(path):
            return True
        readable = path.lower().endswith((".npy", ".safetensors"))
        if readable and os.path.isfile(path) and os.path.getsize(path) > memory / _SHARE_OF_MEMORY:
            return True
    return False
