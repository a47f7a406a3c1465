"""Rows in memory, and what a study asks of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern import _doubts, metrics
from focalkern.bootstrap import BiasFloor, PairedBootstrap, bias_floor, paired_bootstrap
from focalkern.calibrators import Calibrator, Estimator, FocalTemperatureScaling, InputKind, TemperatureScaling
from focalkern.files import LogitSet
from focalkern.ops.calibration_grid import CalibrationGrid, calibration_grid
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.ops.calibration_sums import CalibrationSums
from focalkern.study.contest import Contest, Proper, hold_contest, log_proba
from focalkern.study.rows import CALIBRATION_ERRORS, FIGURES, Applied, Rows
from focalkern.study.sums import sums_of_cells

__all__ = ["MemorySet", "as_rows"]

# More figures than these take minutes to resample.
_MOST_RESAMPLED_FIGURES = 20_000_000


class MemorySet:
    """:class:`focalkern.study.rows.Rows` of a set in memory."""

    keeps_confidences = True

    def __init__(self, memory: LogitSet) -> None:
        self.memory = memory
        self.kind: InputKind = memory.kind
        self.name, self.source, self.part = memory.name, memory.source, memory.part
        self.n_classes = memory.n_classes

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def class_counts(self) -> Tensor:
        return torch.bincount(self.memory.labels, minlength=self.n_classes)

    @property
    def impossible_targets(self) -> int:
        impossible = -math.inf if self.kind == "logits" else 0.0
        of_target = self.memory.input.gather(1, self.memory.labels.unsqueeze(1))
        return int((of_target == impossible).sum())

    @property
    def looks_like_probs(self) -> bool:
        return self.kind == "logits" and _doubts.looks_like_probs(self.memory.input)

    def sample(self) -> tuple[Tensor, Tensor]:
        return self.memory.input, self.memory.labels

    def rows(self, index: Tensor, part: str) -> "MemorySet":
        return MemorySet(self.memory.rows(index, part))

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
        # float64, whatever the file holds: a float32 confidence that lands on the other side of a cut moves an ECE
        # cell, and with it the choice between near-equal cells.
        return calibration_grid(
            self._wide(),
            self.memory.labels,
            gammas,
            temperatures,
            n_bins=n_bins,
            criteria=("ece", "nll") if criterion == "nll" else ("ece", "nll", criterion),
            estimator=estimator,
            input_kind=self.kind,
        )

    def cross_validate(
        self,
        candidates: Mapping[str, Any],
        grid: CalibrationGrid,
        gammas: Sequence[float],
        *,
        criterion: Proper,
        folds: int,
        seed: int,
    ) -> Contest:
        return hold_contest(self._wide(), self.memory.labels, candidates, criterion=criterion, folds=folds, seed=seed)

    def measure(self, cells: Sequence[tuple[float, float]], n_bins: int) -> None:
        """Nothing: the rows are there."""

    def figures(self, what: Applied, n_bins: int) -> dict[str, float]:
        labels = self.memory.labels
        log_probs, correct = self._calibrated(what), self._correct(what[2])
        result = {"accuracy": metrics.accuracy(correct=correct), "nll": metrics.nll(log_probs, labels, log=True)}
        probs = log_probs.exp_()
        result["brier"] = metrics.brier_score(probs, labels)
        confidence = probs.amax(-1)
        for estimator in metrics.ESTIMATORS:
            result[f"ece_{estimator}"] = metrics.expected_calibration_error(
                confidence=confidence, correct=correct, n_bins=n_bins, estimator=estimator
            )
        result["classwise_ece_equal_width"] = metrics.classwise_calibration_error(probs, labels, n_bins=n_bins)
        return {name: float(result[name]) for name in FIGURES}

    def reliability(self, what: Applied, n_bins: int, estimator: Estimator = "equal_width") -> metrics.ReliabilityBins:
        confidence = self._calibrated(what).amax(-1).exp()
        return metrics.reliability_bins(
            confidence=confidence, correct=self._correct(what[2]), n_bins=n_bins, estimator=estimator
        )

    def resampled(
        self, cells: Mapping[str, Applied], *, n_bins: int, n_resamples: int, seed: int
    ) -> tuple[PairedBootstrap, dict[str, dict[str, BiasFloor]]]:
        options: Any = {"n_bins": n_bins, "n_resamples": n_resamples, "seed": seed}
        calibrated = _Calibrated(self, cells)
        bootstrap = paired_bootstrap(
            calibrated,
            self.memory.labels,
            log=True,
            correct={name: self._correct(other) for name, (_, _, other) in cells.items()},
            figures=tuple(FIGURES),
            **options,
        )
        return bootstrap, {
            name: bias_floor(calibrated[name].exp_(), figures=CALIBRATION_ERRORS, **options) for name in cells
        }

    @property
    def resampled_in_seconds(self) -> bool:
        return self.memory.input.numel() <= _MOST_RESAMPLED_FIGURES

    def bound_of(self, gamma: float, temperature: float) -> float:
        """The grid is exact."""
        return 0.0

    def bound_of_figures(self, gamma: float, temperature: float, n_bins: int) -> float:
        """So are the figures."""
        return 0.0

    def cell_sums(self, gammas: Tensor, temperatures: Tensor, n_bins: int) -> CalibrationSums:
        return sums_of_cells([(self.memory.input, self.memory.labels)], gammas, temperatures, n_bins, self.kind)

    def remove_progress(self) -> None:
        """There is none."""

    # -- private ------------------------------------------------------------------------------------------------

    def _wide(self) -> Tensor:
        return self.memory.input.to(torch.float64)

    def _calibrated(self, what: Applied) -> Tensor:
        """Log-probabilities [N, C] in float64."""
        gamma, temperature, other = what
        if other is not None:
            return log_proba(other, self.memory.input)
        assert gamma is not None
        assert temperature is not None
        return focal_calibration_map(self._wide(), gamma, temperature, input_kind=self.kind, log=True)

    def _correct(self, other: Any) -> Tensor:
        """[N] bool."""
        if other is None or isinstance(other, TemperatureScaling | FocalTemperatureScaling):
            predicted = self.memory.input.argmax(-1)
        elif isinstance(other, Calibrator):
            predicted = torch.as_tensor(other.predict(self._wide()))
        else:
            predicted = log_proba(other, self.memory.input).argmax(-1)
        return predicted == self.memory.labels


class _Calibrated(Mapping[str, Tensor]):
    """Log-probabilities by name, computed when they are asked for: only one set is in memory at a time."""

    def __init__(self, rows: MemorySet, cells: Mapping[str, Applied]) -> None:
        self._rows, self._cells = rows, cells

    def __getitem__(self, name: str) -> Tensor:
        return self._rows._calibrated(self._cells[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def as_rows(rows: LogitSet | Rows) -> Rows:
    """What a file or a user gave, as a study takes it."""
    return MemorySet(rows) if isinstance(rows, LogitSet) else rows
