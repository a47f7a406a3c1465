"""The results that a study compares, without scores, and the chosen one: the automatic choice, or a named method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from focalkern._types import PROPER, Proper
from focalkern.calibrators import (
    DEFAULT_GAMMAS,
    Binning,
    Criterion,
    Estimator,
    FocalTemperatureScaling,
    HistogramBinning,
    RobustTemperatureScaling,
    Search,
    TemperatureScaling,
)
from focalkern.calibrators._inputs import cannot_occur
from focalkern.calibrators._selection import CrossValidation
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES
from focalkern.study.cross_validation import cross_validate_samples
from focalkern.study.grid_search import GridSearch, scalings_of_grid
from focalkern.study.results import SCALINGS, CalibratorResult
from focalkern.study.samples import Samples, Scaling, scaling_or_none
from focalkern.study.scores import identity

__all__ = ["Choice", "Settings", "automatic_choice", "named_method"]

_FOCAL = "focal-temperature"
_SHOWN = ("none", "temperature")  # candidates that a sweep shows, beside the chosen one


@dataclass(frozen=True)
class Settings:
    """The grid, the method, its search and its loss; see :func:`focalkern.study.run_study`."""

    gammas: tuple[float, ...]
    temperatures: tuple[float, ...]
    method: str
    search: Search | None
    binning: Binning | None
    criterion: Criterion
    estimator: Estimator
    n_bins: int

    @property
    def proper(self) -> Proper:
        return "brier" if self.criterion == "brier" else "nll"

    def takes_derivatives(self, validation: Samples) -> bool:
        """Whether a scaling without a named search is searched by derivatives."""
        if self.search is not None or self.binning is not None or validation.memory is None:
            return False
        default_axes = self.gammas == DEFAULT_GAMMAS and self.temperatures == PAPER_TEMPERATURES
        return self.method in SCALINGS and self.criterion == self.proper and default_axes


@dataclass(frozen=True)
class Choice:
    """Results without scores; the place of the chosen one, or None; the cross-validation of an automatic choice."""

    results: list[CalibratorResult]
    chosen: int | None
    cross_validation: CrossValidation | None = None

    def brief(self) -> "Choice":
        """Without the candidates that a sweep does not show."""
        winner = None if self.chosen is None else self.results[self.chosen]
        shown = [one for one in self.results if one is winner or not one.cross_validated or one.method in _SHOWN]
        place = next((place for place, one in enumerate(shown) if one is winner), None)
        return replace(self, results=shown, chosen=place)


def automatic_choice(
    validation: Samples,
    settings: Settings,
    searched: GridSearch,
    candidates: Mapping[str, Any],
    *,
    folds: int,
    seed: int,
    with_focal: bool,
    brief: bool = False,
) -> Choice:
    """The candidates and the paper's two scalings. If the criterion is the ECE, the paper's focal scaling is chosen.

    Args:
        with_focal: add focal temperature scaling by the proper loss, for comparison with the candidates.
        brief: only the results that a sweep shows.
    """
    proper = settings.proper
    cross_validation = cross_validate_samples(
        validation, candidates, searched, settings.gammas, criterion=proper, folds=folds, seed=seed, only_chosen=brief
    )
    others = []
    if with_focal and validation.memory is None:
        others = [one for one in _of_grid(searched, settings, (proper,), validation) if one.method == _FOCAL]
    elif with_focal:
        focal = replace(settings, method=_FOCAL, search=proper, binning=None, criterion=proper)
        others = _of_method(validation, focal)
    of_paper = _of_grid(searched, settings, ("ece",), validation)
    results = [*_of_cross_validation(cross_validation), *others, *of_paper]
    chosen = len(results) - 1 if settings.criterion == "ece" else cross_validation.chosen
    choice = Choice(results, chosen, cross_validation)
    return choice.brief() if brief else choice


def named_method(validation: Samples, settings: Settings, searched: GridSearch) -> Choice:
    """No calibration, both scalings of the grid by the ECE and by the proper loss, and the method by its search."""
    none = CalibratorResult("none", None, identity(validation, settings.n_bins))
    proper = settings.proper
    if settings.takes_derivatives(validation):  # both scalings, because one is the baseline of the other
        by_proper = [replace(settings, method=name, search=proper) for name in SCALINGS]
        named = [one for scaling in by_proper for one in _of_method(validation, scaling)]
        results = [none, *_of_grid(searched, settings, ("ece",), validation), *named]
    else:
        settings = replace(settings, search=settings.search or "grid")
        named = _of_method(validation, settings)
        results = [none, *_of_grid(searched, settings, ("ece", proper), validation), *named]
        if settings.search != "grid" or settings.binning is not None:
            return Choice(results, len(results) - 1 if named else None)
    keys = [(one.method, one.criterion) for one in results]
    wanted = (settings.method, settings.criterion)
    return Choice(results, keys.index(wanted) if wanted in keys else None)


def _of_grid(
    searched: GridSearch, settings: Settings, criteria: Sequence[Criterion], samples: Samples
) -> list[CalibratorResult]:
    """The optima of both scalings by each criterion."""
    return [
        CalibratorResult(method, criterion, scaling)
        for criterion in criteria
        for method, scaling in scalings_of_grid(searched.grid, settings.gammas, criterion, samples).items()
    ]


def _of_cross_validation(cross_validation: CrossValidation) -> list[CalibratorResult]:
    """The candidates, no calibration first."""
    results = []
    for entry in cross_validation.entries:
        scaling = None if entry.name == "none" else scaling_or_none(entry.calibrator)
        criterion = None if scaling is None else scaling.criterion_
        search: Search = "nll" if isinstance(entry.calibrator, RobustTemperatureScaling) else "grid"
        if scaling is not None:
            search = scaling.search_
        results.append(CalibratorResult(entry.name, criterion, entry.calibrator, search=search, cross_validated=True))
    return results


def _of_method(validation: Samples, settings: Settings) -> list[CalibratorResult]:
    """Results in addition to the grid: the scaling by another search, and bins. The last is the requested calibrator.

    Args:
        validation: in memory, unless the search is the grid and there are no bins.
        settings: with a search.
    """
    search, binning, method = settings.search or "grid", settings.binning, settings.method
    if search == "grid" and binning is None:
        return []
    memory = validation.memory
    assert memory is not None
    input, labels = memory.input.double(), memory.labels
    scaling = None if method == "histogram" else _scaling(settings, search, validation)
    of_scaling = None if scaling is None else settings.criterion
    if scaling is not None and not _can_be_fitted(scaling, input, labels):
        return [CalibratorResult(method, of_scaling, None, search=search)] if search != "grid" else []
    wanted: list[Scaling | HistogramBinning] = []
    if search != "grid" and scaling is not None:
        wanted.append(scaling)
    if binning is not None:
        options: Any = {"n_bins": settings.n_bins, "binning": binning, "input_kind": validation.kind}
        wanted.append(HistogramBinning(scaling=scaling, **options))
    return [
        CalibratorResult(method, of_scaling, calibrator.fit_quietly(input, labels), search=search)
        for calibrator in wanted
    ]


def _scaling(settings: Settings, search: Search, validation: Samples) -> Scaling:
    """The unfitted scaling. A search by derivatives has no axes; the default axes are those of the class."""
    options: Any = {
        "search": search,
        "criterion": settings.criterion,
        "estimator": settings.estimator,
        "n_bins": settings.n_bins,
        "input_kind": validation.kind,
    }
    smooth = search in PROPER
    if not smooth and settings.temperatures != PAPER_TEMPERATURES:
        options["temperatures"] = settings.temperatures
    if settings.method == "temperature":
        return TemperatureScaling(**options)
    if not smooth and settings.gammas != DEFAULT_GAMMAS:
        options["gammas"] = settings.gammas
    return FocalTemperatureScaling(**options)


def _can_be_fitted(scaling: Scaling, input: Tensor, labels: Tensor) -> bool:
    """Whether the criterion is finite in some cell. The NLL is infinite in all if a true class has probability 0."""
    of_target = input.gather(1, labels.unsqueeze(1))
    return scaling.criterion != "nll" or not bool(cannot_occur(of_target, scaling.input_kind).any())
