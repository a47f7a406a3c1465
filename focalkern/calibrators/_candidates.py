"""Candidates of a selection: their names, their fits and their log-probabilities."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import short
from focalkern._types import InputKind, Proper
from focalkern.calibrators._base import Calibrator
from focalkern.calibrators._fitted import Layout
from focalkern.calibrators._focal_temperature import FocalTemperatureScaling
from focalkern.calibrators._isotonic import IsotonicCalibration
from focalkern.calibrators._robust_temperature import RobustTemperatureScaling
from focalkern.calibrators._row_source import RowSource
from focalkern.calibrators._spline import SplineScaling
from focalkern.calibrators._structured import StructuredScaling
from focalkern.calibrators._temperature import TemperatureScaling
from focalkern.ops.calibration_grid import CalibrationGrid

__all__ = [
    "CANDIDATES",
    "DEFAULT_CANDIDATES",
    "as_candidates",
    "fit_one",
    "fit_to_source",
    "fitted_identity",
    "identity",
    "keeps_predictions",
    "log_proba",
]


CANDIDATES: dict[str, Callable[[Proper, InputKind], Any]] = {
    "none": lambda criterion, kind: identity(kind),
    "temperature": lambda criterion, kind: temperature(criterion, kind),
    "focal-temperature": lambda criterion, kind: FocalTemperatureScaling(criterion=criterion, input_kind=kind),
    "spline": lambda criterion, kind: SplineScaling(input_kind=kind),
    "spline-vector": lambda criterion, kind: SplineScaling(kind="vector", input_kind=kind),
    "spline-matrix": lambda criterion, kind: SplineScaling(kind="matrix", input_kind=kind),
    "structured-vector": lambda criterion, kind: StructuredScaling(kind="vector", input_kind=kind),
    "structured-matrix": lambda criterion, kind: StructuredScaling(kind="matrix", input_kind=kind),
    "structured-focal": lambda criterion, kind: StructuredScaling(kind="matrix", focal=True, input_kind=kind),
    "isotonic": lambda criterion, kind: IsotonicCalibration(input_kind=kind),
}
"""Candidates by name, from the simplest to the richest: functions of the criterion and the kind of input."""

DEFAULT_CANDIDATES = ("none", "temperature", "spline", "spline-vector", "spline-matrix")


def identity(input_kind: InputKind) -> TemperatureScaling:
    """No calibration as a calibrator that can be saved: temperature scaling with T = 1 as its only grid point.

    Its criterion is the Brier score, which is always finite.
    """
    return TemperatureScaling(search="grid", temperatures=(1.0,), criterion="brier", input_kind=input_kind)


def fitted_identity(input_kind: InputKind, brier: float, *, n_samples: int, n_classes: int) -> TemperatureScaling:
    """:func:`identity`, fitted without a pass over the samples, whose Brier score is given."""
    one = torch.ones(1, dtype=torch.float64)
    grid = CalibrationGrid(one - 1, one, {"brier": torch.full((1, 1), brier, dtype=torch.float64)}, 15, "equal_mass")
    return identity(input_kind).choose(grid, n_samples=n_samples, n_classes=n_classes)


def temperature(criterion: Proper, input_kind: InputKind) -> Calibrator:
    """The candidate "temperature". For the NLL it has a floor, so that the NLL is finite on any rows."""
    if criterion == "nll":
        return RobustTemperatureScaling(input_kind=input_kind)
    return TemperatureScaling(criterion=criterion, input_kind=input_kind)


def as_candidates(
    candidates: Sequence[str] | Mapping[str, Any] | None,
    criterion: Proper,
    input_kind: InputKind,
    keep_predictions: bool = False,
) -> dict[str, Any]:
    """Unfitted calibrators by name, ``"none"`` first.

    Args:
        candidates: names out of :data:`CANDIDATES`, sorted into its order; or a mapping of names to anything with
            ``fit`` and ``predict_proba`` (or ``transform``), from the simplest to the richest; None for
            :data:`DEFAULT_CANDIDATES`.
        keep_predictions: only candidates that change no predicted class. Default candidates that may are left out.

    Raises:
        ValueError: an unknown name; a candidate called "none" that is not None; one that may change predictions with
            ``keep_predictions``.
        TypeError: a candidate without ``fit`` or ``predict_proba``.
    """
    made = _as_candidates(candidates, criterion, input_kind)
    changing = (
        [name for name, candidate in made.items() if not keeps_predictions(candidate)] if keep_predictions else []
    )
    if changing and candidates is not None:
        raise ValueError(
            f"candidates: {', '.join(changing)} may change predicted classes; leave out either them or keep_predictions"
        )
    return {name: candidate for name, candidate in made.items() if name not in changing}


def keeps_predictions(candidate: Any) -> bool:
    """Whether a candidate, fitted or not, changes no predicted class."""
    return isinstance(candidate, Calibrator) and candidate._keeps_predictions()


def _as_candidates(
    candidates: Sequence[str] | Mapping[str, Any] | None, criterion: Proper, input_kind: InputKind
) -> dict[str, Any]:
    candidates = (candidates,) if isinstance(candidates, str) else candidates
    made: dict[str, Any] = {"none": identity(input_kind)}
    if isinstance(candidates, Mapping):
        for name, candidate in candidates.items():
            if candidate is None and name == "none":
                continue
            if not isinstance(name, str) or name == "none":
                raise ValueError(f"candidates: names must be strings other than 'none', got {short(name)}")
            if not (
                hasattr(candidate, "fit") and (hasattr(candidate, "predict_proba") or hasattr(candidate, "transform"))
            ):
                raise TypeError(f"candidates: {name} must have fit and predict_proba, got {type(candidate).__name__}")
            made[name] = candidate
        return made
    try:
        names = DEFAULT_CANDIDATES if candidates is None else tuple(candidates)
    except Exception:  # not iterable, or its class raises something else
        raise TypeError(f"candidates: expected a sequence of names or a mapping, got {short(candidates)}") from None
    for name in names:
        if not isinstance(name, str) or name not in CANDIDATES:
            remedy = "" if isinstance(name, str) else "; pass an object in a mapping, {'name': object}"
            raise ValueError(f"candidates: expected names out of {', '.join(CANDIDATES)}, got {short(name)}{remedy}")
    for name, make in CANDIDATES.items():
        if name in names and name != "none":
            made[name] = make(criterion, input_kind)
    return made


def fit_one(candidate: Any, input: Tensor, labels: Tensor, near: Any = None, weight: Tensor | None = None) -> Any:
    """A fitted copy of a candidate, without warnings. Candidates of other libraries get NumPy arrays.

    Args:
        near: a copy fitted on nearly the same samples (for a fold: on all samples). The search starts at its optimum.
        weight: [N] float64; None for equal weights.

    Raises:
        TypeError: there are weights, and the candidate's ``fit`` has no ``sample_weight``.
    """
    fresh = copy.deepcopy(candidate)
    if isinstance(fresh, FocalTemperatureScaling) and near is not None:
        fresh.fit_quietly(input, labels, weight, near=(near.gamma_, near.temperature_))
    elif isinstance(fresh, Calibrator):
        fresh.fit_quietly(input, labels, weight)
    elif weight is None:
        fresh.fit(input.cpu().numpy(), labels.cpu().numpy())
    elif _takes_weights(fresh):
        fresh.fit(input.cpu().numpy(), labels.cpu().numpy(), sample_weight=weight.cpu().numpy())
    else:
        raise TypeError("its fit has no sample_weight")
    return fresh


def fit_to_source(candidate: Any, source: RowSource, counts: Tensor) -> Any:
    """A fitted copy of a robust temperature scaling or a spline scaling, without warnings.

    Args:
        source: checked rows.
        counts: [C], rows per class.
    """
    fresh = copy.deepcopy(candidate)
    fresh._become(fresh._fit_source(source), Layout(source.n_classes), n_samples=source.n_rows)
    fresh.warnings_ = tuple(fresh._warnings_of(counts))
    return fresh


def _takes_weights(candidate: Any) -> bool:
    try:
        parameters = inspect.signature(candidate.fit).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return True
    return "sample_weight" in parameters


def log_proba(calibrator: Any, input: Tensor) -> Tensor:
    """[N, C] float64 calibrated log-probabilities."""
    if isinstance(calibrator, Calibrator):
        return torch.as_tensor(calibrator.predict_log_proba(input.to(torch.float64)))
    # netcal's name of the method is transform.
    predict = calibrator.predict_proba if hasattr(calibrator, "predict_proba") else calibrator.transform
    probs = torch.as_tensor(np.asarray(predict(input.cpu().numpy())), dtype=torch.float64)
    if probs.shape != input.shape:
        raise ValueError(f"predict_proba must give {list(input.shape)}, got {list(probs.shape)}")
    return (probs / probs.sum(-1, keepdim=True)).log()
