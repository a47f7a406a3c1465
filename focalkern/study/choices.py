"""Results that a study compares, without scores: of the grid, of the cross-validation, and of a named method."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from focalkern._types import PROPER
from focalkern.calibrators import (
    Binning,
    Criterion,
    Estimator,
    FocalTemperatureScaling,
    HistogramBinning,
    RobustTemperatureScaling,
    Search,
    TemperatureScaling,
)
from focalkern.calibrators._selection import CrossValidation
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.study.grid_search import scalings_of_grid
from focalkern.study.results import CalibratorResult
from focalkern.study.samples import Samples, Scaling, scaling_or_none

__all__ = ["of_cross_validation", "of_grid", "of_method"]


def of_grid(
    grid: CalibrationGrid, gammas: Sequence[float], criteria: Sequence[Criterion], samples: Samples
) -> list[CalibratorResult]:
    """The optima of both scalings by each criterion, without scores."""
    return [
        CalibratorResult(method, criterion, scaling)
        for criterion in criteria
        for method, scaling in scalings_of_grid(grid, gammas, criterion, samples).items()
    ]


def of_cross_validation(cross_validation: CrossValidation) -> list[CalibratorResult]:
    """Results for the candidates, no calibration first, without scores."""
    results = []
    for entry in cross_validation.entries:
        scaling = None if entry.name == "none" else scaling_or_none(entry.calibrator)
        criterion = None if scaling is None else scaling.criterion_
        search: Search = "nll" if isinstance(entry.calibrator, RobustTemperatureScaling) else "grid"
        if scaling is not None:
            search = scaling.search_
        results.append(CalibratorResult(entry.name, criterion, entry.calibrator, search=search, cross_validated=True))
    return results


def of_method(
    validation: Samples,
    *,
    gammas: Sequence[float] | None,
    temperatures: Sequence[float] | None,
    method: str,
    search: Search,
    binning: Binning | None,
    criterion: Criterion,
    estimator: Estimator,
    n_bins: int,
) -> list[CalibratorResult]:
    """Results in addition to the grid: the scaling by another search, and bins. The last is the requested calibrator.

    Args:
        validation: in memory.
        gammas, temperatures: None for the defaults.
        method: ``"temperature"``, ``"focal-temperature"`` or ``"histogram"``.
        search, binning, criterion, estimator, n_bins: as :func:`run_study`.
    """
    if search == "grid" and binning is None:
        return []
    memory = validation.memory
    assert memory is not None
    input, labels = memory.input.double(), memory.labels
    scaling: Scaling | None = None
    if method != "histogram":
        smooth = search in PROPER  # by derivatives, without a grid
        axes: Any = {} if smooth else {"temperatures": temperatures}
        options: Any = {"search": search, "criterion": criterion, "estimator": estimator, "n_bins": n_bins, **axes}
        options["input_kind"] = validation.kind
        if method == "temperature":
            scaling = TemperatureScaling(**options)
        else:
            scaling = FocalTemperatureScaling(gammas=None if smooth else gammas, **options)
    of_scaling = None if scaling is None else criterion
    if scaling is not None and not _can_be_fitted(scaling, input, labels):
        return [CalibratorResult(method, of_scaling, None, search=search)] if search != "grid" else []
    wanted: list[Scaling | HistogramBinning] = []
    if search != "grid" and scaling is not None:
        wanted.append(scaling)
    if binning is not None:
        wanted.append(HistogramBinning(n_bins=n_bins, binning=binning, scaling=scaling, input_kind=validation.kind))
    return [
        CalibratorResult(method, of_scaling, calibrator.fit_quietly(input, labels), search=search)
        for calibrator in wanted
    ]


def _can_be_fitted(scaling: Scaling, input: Tensor, labels: Tensor) -> bool:
    """Whether the criterion is finite in some cell. The NLL is infinite in all if a true class has probability 0."""
    impossible = 0.0 if scaling.input_kind == "probs" else -math.inf
    return scaling.criterion != "nll" or not bool((input.gather(1, labels.unsqueeze(1)) == impossible).any())
