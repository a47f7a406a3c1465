"""Samples in memory."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern import _diagnostics, metrics
from focalkern.bootstrap import BiasFloor, PairedBootstrap, bias_floor, paired_bootstrap
from focalkern.calibrators import Calibrator, Estimator, InputKind, TemperatureScaling
from focalkern.calibrators._selection import CrossValidation, Proper, cross_validate, fitted_identity, log_proba
from focalkern.files import LogitSet
from focalkern.ops.calibration_grid import CalibrationGrid, calibration_grid
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.ops.calibration_sums import CalibrationSums
from focalkern.study.samples import CALIBRATION_ERRORS, SCORES, Samples, scaling_or_none
from focalkern.study.scores import sums_of_cells

__all__ = ["MemorySamples", "as_samples"]

# A bootstrap of more numbers (N times C) takes minutes.
_MOST_RESAMPLED_NUMBERS = 20_000_000


class MemorySamples:
    """:class:`Samples` of a set in memory."""

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
        return self.kind == "logits" and _diagnostics.looks_like_probs(self.memory.input)

    def sample(self) -> tuple[Tensor, Tensor]:
        return self.memory.input, self.memory.labels

    def subset(self, index: Tensor, part: str) -> "MemorySamples":
        return MemorySamples(self.memory.rows(index, part))

    def identity(self, n_bins: int) -> TemperatureScaling:
        probs = focal_calibration_map(self._wide(), 0.0, 1.0, input_kind=self.kind)
        brier = float(metrics.brier_score(probs, self.memory.labels))
        return fitted_identity(self.kind, brier, n_samples=len(self), n_classes=self.n_classes)

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
        # In float64 for every dtype: a float32 confidence on the other side of an edge changes an ECE, and with it the
        # choice between nearly equal cells.
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
    ) -> CrossValidation:
        return cross_validate(self._wide(), self.memory.labels, candidates, criterion=criterion, folds=folds, seed=seed)

    def measure(self, cells: Sequence[tuple[float, float]], n_bins: int) -> None:
        """No-op: samples in memory need no pass."""

    def scores(self, calibrator: Any, n_bins: int) -> dict[str, float]:
        labels = self.memory.labels
        log_probs, correct = self._calibrated(calibrator), self._correct(calibrator)
        found = {"accuracy": metrics.accuracy(correct=correct), "nll": metrics.nll(log_probs, labels, log=True)}
        probs = log_probs.exp_()
        found["brier"] = metrics.brier_score(probs, labels)
        confidence = probs.amax(-1)
        for estimator in metrics.ESTIMATORS:
            found[f"ece_{estimator}"] = metrics.expected_calibration_error(
                confidence=confidence, correct=correct, n_bins=n_bins, estimator=estimator
            )
        found["classwise_ece_equal_width"] = metrics.classwise_calibration_error(probs, labels, n_bins=n_bins)
        return {name: float(found[name]) for name in SCORES}

    def reliability(
        self, calibrator: Any, n_bins: int, estimator: Estimator = "equal_width"
    ) -> metrics.ReliabilityBins:
        confidence = self._calibrated(calibrator).amax(-1).exp()
        return metrics.reliability_bins(
            confidence=confidence, correct=self._correct(calibrator), n_bins=n_bins, estimator=estimator
        )

    def resampled(
        self, calibrators: Mapping[str, Any], *, n_bins: int, n_resamples: int, seed: int
    ) -> tuple[PairedBootstrap, dict[str, dict[str, BiasFloor]]]:
        options: Any = {"n_bins": n_bins, "n_resamples": n_resamples, "seed": seed}
        calibrated = _Calibrated(self, calibrators)
        bootstrap = paired_bootstrap(
            calibrated,
            self.memory.labels,
            log=True,
            correct={name: self._correct(calibrator) for name, calibrator in calibrators.items()},
            figures=tuple(SCORES),
            **options,
        )
        return bootstrap, {
            name: bias_floor(calibrated[name].exp_(), figures=CALIBRATION_ERRORS, **options) for name in calibrators
        }

    @property
    def resampled_in_seconds(self) -> bool:
        return self.memory.input.numel() <= _MOST_RESAMPLED_NUMBERS

    def bound_of(self, gamma: float, temperature: float) -> float:
        return 0.0  # exact

    def bound_of_scores(self, gamma: float, temperature: float, n_bins: int) -> float:
        return 0.0  # exact

    def cell_sums(self, gammas: Tensor, temperatures: Tensor, n_bins: int) -> CalibrationSums:
        return sums_of_cells([(self.memory.input, self.memory.labels)], gammas, temperatures, n_bins, self.kind)

    def remove_progress(self) -> None:
        """No-op: there is no state file."""

    # -- private ------------------------------------------------------------------------------------------------

    def _wide(self) -> Tensor:
        return self.memory.input.to(torch.float64)

    def _calibrated(self, calibrator: Any) -> Tensor:
        """Log-probabilities [N, C] in float64."""
        scaling = scaling_or_none(calibrator)
        if scaling is None:
            return log_proba(calibrator, self.memory.input)
        gamma, temperature = scaling.gamma_, scaling.temperature_
        return focal_calibration_map(self._wide(), gamma, temperature, input_kind=self.kind, log=True)

    def _correct(self, calibrator: Any) -> Tensor:
        """[N] bool."""
        if scaling_or_none(calibrator) is not None:
            predicted = self.memory.input.argmax(-1)
        elif isinstance(calibrator, Calibrator):
            predicted = torch.as_tensor(calibrator.predict(self._wide()))
        else:
            predicted = log_proba(calibrator, self.memory.input).argmax(-1)
        return predicted == self.memory.labels


class _Calibrated(Mapping[str, Tensor]):
    """Log-probabilities by name, computed on access: one tensor is in memory at a time."""

    def __init__(self, samples: MemorySamples, calibrators: Mapping[str, Any]) -> None:
        self._samples, self._calibrators = samples, calibrators

    def __getitem__(self, name: str) -> Tensor:
        return self._samples._calibrated(self._calibrators[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._calibrators)

    def __len__(self) -> int:
        return len(self._calibrators)


def as_samples(given: LogitSet | Samples) -> Samples:
    """A set from a file or a user, as a study takes it."""
    return MemorySamples(given) if isinstance(given, LogitSet) else given
