"""Results of a comparison as data: fitted calibrators, their scores, and intervals of the scores."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from focalkern._types import PROPER
from focalkern.bootstrap import BiasFloor, Interval, PairedBootstrap
from focalkern.calibrators import Criterion, Estimator, HistogramBinning, RobustTemperatureScaling, Search, Verdict
from focalkern.calibrators._selection import CrossValidation
from focalkern.metrics import AcceptThreshold
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.study.grid_search import GridSearch
from focalkern.study.samples import Samples, Scaling, scaling_or_none
from focalkern.study.scores import Scored, score

__all__ = [
    "SCALINGS",
    "CalibratorResult",
    "Comparison",
    "Intervals",
    "JudgedComparison",
    "at_bound",
    "hidden_results",
    "print_score",
    "scored",
]

SCALINGS = {"temperature": "temperature", "focal-temperature": "focal temperature"}
"""The methods with gamma and T, with their names in print."""


@dataclass(frozen=True)
class CalibratorResult:
    """A fitted calibrator and its scores: one row of the table.

    Attributes:
        method: ``"none"``, ``"temperature"``, ``"focal-temperature"``, ``"histogram"``, or the name of a candidate.
        criterion: ``"ece"``, ``"nll"`` or ``"brier"``, the loss that chose gamma and T; None for results without such a
            choice: no calibration, histogram binning alone, other candidates, and calibrators from a file.
        calibrator: the fitted calibrator; for no calibration a temperature scaling with T = 1. None if the criterion is
            infinite everywhere, or if the fit failed.
        validation, test: scores by name, on the validation samples and on the test samples. They are None without a
            calibrator; ``validation`` is also None in a sweep.
        search: name of the search for gamma and T.
        cross_validated: whether it was a candidate of the cross-validation.
        error_bound: error bound of the equal-mass ECEs on the test samples; 0 if they are exact.

    Example:
        >>> labels = torch.arange(600) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(600) % 5 == 0)) % 3]  # confident, wrong in 1 of 5 rows
        >>> study = fk.compare_calibrators((logits[:300], labels[:300]), (logits[300:], labels[300:]), resamples=0)
        >>> result = study.results[1]
        >>> result.label, result.short_label, result.parameters
        ('temperature', 'temperature, T = 1.91669', 'T = 1.91669')
        >>> result.gamma, round(result.temperature, 2), result.scaling, result.is_scaling, result.binning
        (0.0, 1.92, None, False, None)
    """

    method: str
    criterion: str | None
    calibrator: Any
    validation: dict[str, float] | None = None
    test: dict[str, float] | None = None
    search: Search = "grid"
    cross_validated: bool = False
    error_bound: float = 0.0

    @property
    def binning(self) -> HistogramBinning | None:
        """The requested histogram binning, alone or after a scaling."""
        asked_for = isinstance(self.calibrator, HistogramBinning) and not self.cross_validated
        return self.calibrator if asked_for else None

    @property
    def scaling(self) -> Scaling | None:
        """The temperature or focal temperature scaling, with or without bins after it."""
        return scaling_or_none(self.calibrator if self.binning is None else self.binning.scaling_)

    @property
    def is_scaling(self) -> bool:
        """Whether the calibrator is only a scaling; True without a calibrator."""
        return self.calibrator is self.scaling

    @property
    def gamma(self) -> float | None:
        """Gamma of the scaling; 0 for robust temperature scaling and bins without scaling; None for others."""
        if self.scaling is not None:
            return self.scaling.gamma_
        if isinstance(self.calibrator, RobustTemperatureScaling):
            return 0.0
        return None if self.binning is None else 0.0

    @property
    def temperature(self) -> float | None:
        """Temperature of the scaling or robust temperature scaling; 1 for bins without a scaling; None for others."""
        if self.scaling is not None:
            return self.scaling.temperature_
        if isinstance(self.calibrator, RobustTemperatureScaling):
            return self.calibrator.temperature_
        return None if self.binning is None else 1.0

    @property
    def label(self) -> str:
        """The name of the row."""
        name = SCALINGS.get(self.method, "histogram binning" if self.binning else self.method)
        if self.method == "none":
            name = "uncalibrated"
        # The default search (derivatives for a proper loss, the grid for the ECE) is not named; others are.
        usual = self.criterion if self.criterion in PROPER else "grid"
        named = self.scaling is not None and self.method in SCALINGS and self.search != usual
        name += f" ({self.search})" if named else ""
        name += " + bins" if self.binning and self.method in SCALINGS else ""
        return f"{name}, {self.criterion.upper()}-optimal" if self.criterion else name

    @property
    def short_label(self) -> str:
        """The name of the row without the criterion, with gamma and T."""
        name = self.label.partition(", ")[0]
        return f"{name}, {self.parameters}" if self.parameters else name

    @property
    def parameters(self) -> str:
        """gamma and T as text; empty without a scaling."""
        if self.method not in SCALINGS or self.gamma is None or self.temperature is None:
            return ""
        at = at_bound(self)
        gamma = f"gamma = {self.gamma:g}{at['gamma']}, " if self.method == "focal-temperature" else ""
        return f"{gamma}T = {self.temperature:g}{at['temperature']}"


def at_bound(result: CalibratorResult) -> dict[str, str]:
    """Parameter -> `` (at the bound)`` if the optimum is at a bound of the search."""
    border = () if result.scaling is None else result.scaling.at_border_
    return {
        name: " (at the bound)" if any(words.startswith(f"{name} = ") for words in border) else ""
        for name in ("gamma", "temperature")
    }


def scored(
    results: Sequence[CalibratorResult],
    validation: Samples,
    test: Samples,
    n_bins: int,
    only_test: Collection[str] | None = None,
) -> list[CalibratorResult]:
    """The results with their scores; a result without a calibrator is unchanged.

    Args:
        results: without scores.
        validation, test, n_bins: samples for the scores, and number of bins.
        only_test: names of scores; only these are computed, and only on the test samples. None computes all on both.
    """
    fitted = [one.calibrator for one in results if one.calibrator is not None]
    on_validation: Sequence[Scored | None] = [None] * len(fitted)
    if only_test is None:
        on_validation = of_both = score(validation, fitted, n_bins)
        on_test = of_both if test is validation else score(test, fitted, n_bins)
    else:
        on_test = score(test, fitted, n_bins, only_test)
    found = iter(zip(on_validation, on_test, strict=True))

    def with_scores(result: CalibratorResult) -> CalibratorResult:
        of_validation, of_test = next(found)
        before = None if of_validation is None else of_validation.scores
        return replace(result, validation=before, test=of_test.scores, error_bound=of_test.bound)

    return [one if one.calibrator is None else with_scores(one) for one in results]


@dataclass(frozen=True)
class Intervals:
    """Bootstrap intervals of the scores on the test samples.

    Attributes:
        names: for each result, its name in ``bootstrap``; None without a calibrator. Equal calibrators share a name.
        bootstrap: the paired resamples.
        floors: for each result, the bias floor of each calibration error; None without a calibrator.
        baseline: for each result, the index of its baseline. The baseline of temperature scaling is no calibration; of
            focal temperature scaling, temperature scaling by the same criterion; of bins, the scaling before them or no
            calibration.
        binned: whether a result has bins.
        others: whether a result is neither a scaling nor bins.
    """

    names: tuple[str | None, ...]
    bootstrap: PairedBootstrap
    floors: tuple[dict[str, BiasFloor] | None, ...]
    baseline: tuple[int | None, ...]
    binned: bool = False
    others: bool = False

    def interval(self, index: int, score: str) -> Interval | None:
        """The interval of a score; None if the score has none."""
        name = self.names[index]
        if name is None or score not in self.bootstrap.figures:
            return None
        return self.bootstrap.interval(name, score)

    def difference(self, index: int, score: str) -> Interval | None:
        """The paired difference of a result and its baseline; None without a baseline."""
        other = self.baseline[index]
        return None if other is None else self.between(index, other, score)

    def between(self, index: int, other: int, score: str) -> Interval | None:
        """The paired difference of two results; None if it has no interval."""
        name, other_name = self.names[index], self.names[other]
        if name is None or other_name is None or score not in self.bootstrap.figures:
            return None
        return self.bootstrap.difference(name, other_name, score)

    def mark(self, index: int, score: str) -> str:
        """``*`` if better than the baseline, ``!`` if worse, empty if the interval of the difference contains 0."""
        difference = self.difference(index, score)
        if difference is None or not difference.excludes_zero:
            return ""
        return "*" if (difference.low > 0) == (score == "accuracy") else "!"


@dataclass(frozen=True)
class Comparison:
    """Calibrators fitted on validation samples and scored on test samples.

    Attributes:
        validation, test: the samples; the same object without a test set.
        search: the scores of every (gamma, T) searched, on the validation samples, with their error bounds.
        results: the rows of the table; the first is no calibration.
        chosen: the recommended one of ``results``; None if its criterion is infinite in every cell.
        intervals: bootstrap intervals on the test samples; None without a bootstrap.
        cross_validation: results for the candidates; None if the user named a method.
        estimator: estimator of the ECE in the verdict and in the table; ``grid.estimator`` is that of the search.
        criterion: the loss by which ``chosen`` was chosen.
    """

    validation: Samples
    test: Samples
    search: GridSearch
    results: tuple[CalibratorResult, ...]
    chosen: CalibratorResult | None
    intervals: Intervals | None
    cross_validation: CrossValidation | None
    estimator: Estimator
    criterion: Criterion

    @property
    def grid(self) -> CalibrationGrid:
        """The scores of every (gamma, T) searched, on the validation samples.

        Returns:
            A grid with a table of ECEs and a table of NLLs, [gammas, temperatures] each.

        Example:
            >>> labels = torch.arange(60) % 3
            >>> study = fk.compare_calibrators((4.0 * torch.eye(3)[labels // 2], labels), resamples=0)
            >>> study.grid.tables["nll"].shape
            torch.Size([10, 500])
        """
        return self.search.grid

    @property
    def same_samples(self) -> bool:
        """Whether the test samples are the validation samples."""
        return self.test is self.validation

    @property
    def chosen_index(self) -> int | None:
        """The index of ``chosen`` in ``results``."""
        return next((index for index, result in enumerate(self.results) if result is self.chosen), None)


@dataclass(frozen=True)
class JudgedComparison(Comparison):
    """A comparison with its verdict and its remarks: everything that the renderers need.

    Attributes:
        verdict: the recommendation, its reason and its cost.
        remarks: sentences for the reader of the table.
        accept: with ``accept_risk``, the threshold on the confidence of ``chosen``, from the test samples.
    """

    verdict: Verdict
    remarks: tuple[str, ...]
    accept: AcceptThreshold | None = None


def hidden_results(comparison: Comparison) -> list[CalibratorResult]:
    """The results that the printed table leaves out, the last ones: the paper's choices by ECE beside the automatic."""
    is_shown = comparison.criterion == "ece" or comparison.cross_validation is None
    return [] if is_shown else [one for one in comparison.results if one.criterion == "ece"]


def print_score(value: float) -> str:
    """A score with four digits after the point; large numbers, such as the NLL of huge logits, in exponent notation."""
    return f"{value:.4f}" if not abs(value) >= 1e6 or math.isinf(value) else f"{value:.4g}"
