"""Selection of a calibrator: cross-validation on a proper loss, and the rule of one standard error.

Every candidate is fitted on all folds but one and judged on that one; all of them on the same folds. Among those that
change no predicted class the one with the lowest mean loss is used; a richer one takes its place if its mean loss is
lower by more than half a standard error of the paired difference.
"""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import integer, short
from focalkern.calibrators._base import Calibrator, InputKind
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._isotonic import IsotonicCalibration
from focalkern.calibrators._robust_temperature import RobustTemperatureScaling
from focalkern.calibrators._row_source import RowSource, rows_of
from focalkern.calibrators._scaling import FocalTemperatureScaling, TemperatureScaling
from focalkern.calibrators._spline import SplineScaling
from focalkern.calibrators._spline_features import masks_zeros
from focalkern.calibrators._spline_folds import FoldOf, Predict, SplineFolds, why_not
from focalkern.calibrators._structured import StructuredScaling
from focalkern.ops.calibration_grid import CalibrationGrid

__all__ = [
    "CANDIDATES",
    "DEFAULT_CANDIDATES",
    "LOSS_NAMES",
    "PROPER",
    "ZEROS",
    "CandidateScore",
    "CrossValidation",
    "Proper",
    "SplinesByPenalty",
    "as_candidates",
    "check_folds",
    "cross_validate",
    "decide",
    "decide_from_sums",
    "fit_one",
    "fitted_identity",
    "identity",
    "keeps_predictions",
    "log_proba",
    "losses_of",
    "stratified_folds",
    "zeros_are_possible",
]

Proper = Literal["nll", "brier"]
PROPER: tuple[Proper, ...] = get_args(Proper)
LOSS_NAMES: dict[str, str] = {"nll": "NLL", "brier": "Brier score"}

_SMALLEST = torch.finfo(torch.float64).tiny

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


@dataclass(frozen=True)
class CandidateScore:
    """The cross-validated loss of one candidate.

    Attributes:
        name: as it was given.
        calibrator: fitted on all rows; None where that failed, or rows are streamed and no calibrator is needed yet.
        loss: mean loss of the rows, each judged by a fit that did not see it; NaN where that failed.
        difference, error: the mean paired difference from the chosen candidate, and its standard error.
        excluded: why it cannot be chosen, as the end of a sentence that begins with its name; nothing where it can.
        keeps_predictions: whether it changes no predicted class.
    """

    name: str
    calibrator: Any
    loss: float
    difference: float = math.nan
    error: float = math.nan
    excluded: str = ""
    keeps_predictions: bool = False


@dataclass(frozen=True)
class CrossValidation:
    """The result of a cross-validation.

    Attributes:
        criterion: the loss.
        entries: one per candidate, from the simplest to the richest; the first is no calibration.
        chosen, best: the places of the one to use, and of the one with the lowest mean loss that can be used.
        folds: how many there were; 0 where there were too few rows for any.
        n_samples: rows.
        left_out: names of candidates that could not take part, with the reason.
        brier: the mean paired difference of the Brier score of the chosen one from that of no calibration, and its
            standard error; NaN where they were not compared.
    """

    criterion: Proper
    entries: tuple[CandidateScore, ...]
    chosen: int
    best: int
    folds: int
    n_samples: int
    left_out: tuple[str, ...] = ()
    brier: tuple[float, float] = (math.nan, math.nan)

    @property
    def winner(self) -> CandidateScore:
        return self.entries[self.chosen]

    def table(self) -> list[dict[str, Any]]:
        """One dictionary per candidate, for JSON: an infinite number is null."""

        def plain(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return [
            {
                "name": entry.name,
                "loss": plain(entry.loss),
                "difference": plain(entry.difference),
                "standard_error": plain(entry.error),
                "excluded": entry.excluded or None,
                "chosen": place == self.chosen,
            }
            for place, entry in enumerate(self.entries)
        ]


def identity(input_kind: InputKind) -> TemperatureScaling:
    """No calibration, as a calibrator that can be saved: temperature scaling whose grid has T = 1 only.

    Its criterion is the Brier score, which is always finite.
    """
    return TemperatureScaling(search="grid", temperatures=(1.0,), criterion="brier", input_kind=input_kind)


def fitted_identity(input_kind: InputKind, brier: float, *, n_samples: int, n_classes: int) -> TemperatureScaling:
    """:func:`identity`, fitted on samples whose Brier score is known."""
    one = torch.ones(1, dtype=torch.float64)
    grid = CalibrationGrid(one - 1, one, {"brier": torch.full((1, 1), brier, dtype=torch.float64)}, 15, "equal_mass")
    return identity(input_kind).choose(grid, n_samples=n_samples, n_classes=n_classes)


def temperature(criterion: Proper, input_kind: InputKind) -> Calibrator:
    """Temperature scaling: by the NLL with the floor that makes it finite on any rows."""
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
        candidates: names out of :data:`CANDIDATES`, which are put into their order; or anything with ``fit`` and
            ``predict_proba`` (or ``transform``) by name, from the simplest to the richest; None for
            :data:`DEFAULT_CANDIDATES`.
        keep_predictions: only those that change no predicted class; of the default ones, the others are left out.

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
            f"candidates: {', '.join(changing)} may change predicted classes; leave out with keep_predictions"
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
    except Exception:  # no iterable; or what its class does there
        raise TypeError(f"candidates: expected a sequence of names or a mapping, got {short(candidates)}") from None
    for name in names:
        if not isinstance(name, str) or name not in CANDIDATES:
            raise ValueError(f"candidates: expected names out of {', '.join(CANDIDATES)}, got {short(name)}")
    for name, make in CANDIDATES.items():
        if name in names and name != "none":
            made[name] = make(criterion, input_kind)
    return made


# More folds would take days.
MOST_FOLDS = 1000


def check_folds(op: str, folds: Any, seed: Any) -> tuple[int, int]:
    return integer(op, "folds", folds, 2, MOST_FOLDS), integer(op, "seed", seed)


def stratified_folds(labels: Tensor, folds: int, seed: int) -> Tensor:
    """[N] int64: the fold of every sample. Sizes differ by at most one, in total and per class."""
    rows = len(labels)
    random = np.random.default_rng(seed % 2**63).random(rows)
    order = torch.from_numpy(np.lexsort((random, labels.cpu().numpy())))
    fold = torch.empty(rows, dtype=torch.int64)
    fold[order] = torch.arange(rows) % folds
    return fold


def fit_one(candidate: Any, input: Tensor, labels: Tensor, near: Any = None, weight: Tensor | None = None) -> Any:
    """A fitted copy of a candidate, without warnings. Candidates of other libraries get NumPy arrays.

    Args:
        near: a copy fitted on nearly the same samples; the search starts at its optimum.
        weight: [N] float64; None for equal weights.

    Raises:
        TypeError: there are weights, and the candidate's ``fit`` has no ``sample_weight``.
    """
    fresh = copy.deepcopy(candidate)
    if isinstance(fresh, FocalTemperatureScaling) and near is not None:
        fresh.fit_quietly(input, labels, weight, near=(near.gamma_, near.temperature_))
    elif isinstance(fresh, Calibrator):
        if isinstance(fresh, RobustTemperatureScaling) and near is not None:
            fresh._near = near.temperature_
        fresh.fit_quietly(input, labels, weight)
    elif weight is None:
        fresh.fit(input.cpu().numpy(), labels.cpu().numpy())
    elif _takes_weights(fresh):
        fresh.fit(input.cpu().numpy(), labels.cpu().numpy(), sample_weight=weight.cpu().numpy())
    else:
        raise TypeError("its fit has no sample_weight")
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
    # netcal names it transform.
    predict = calibrator.predict_proba if hasattr(calibrator, "predict_proba") else calibrator.transform
    probs = torch.as_tensor(np.asarray(predict(input.cpu().numpy())), dtype=torch.float64)
    if probs.shape != input.shape:
        raise ValueError(f"predict_proba must give {list(input.shape)}, got {list(probs.shape)}")
    return (probs / probs.sum(-1, keepdim=True)).log()


def losses_of(log_probs: Tensor, labels: Tensor, criterion: Proper) -> Tensor:
    """[N] float64: the loss of every sample."""
    of_target = log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    if criterion == "nll":
        return -of_target
    return log_probs.exp().square().sum(-1) - 2 * of_target.exp() + 1


def cross_validate(
    input: Tensor,
    labels: Tensor,
    candidates: Mapping[str, Any],
    *,
    criterion: Proper,
    folds: int,
    seed: int,
    weight: Tensor | None = None,
) -> CrossValidation:
    """Cross-validate the candidates on samples in memory.

    Args:
        input: [N, C].
        labels: [N] int64.
        candidates: what :func:`as_candidates` returns.
        weight: [N] float64 > 0, for the fits and the mean losses; None for equal weights.
    """
    rows = len(labels)
    folds = min(folds, rows)
    fold = stratified_folds(labels, folds, seed)
    folds = folds if folds > 1 else 0
    on_device, counts = fold.to(input.device), torch.bincount(labels, minlength=input.shape[1])
    source = rows_of(FitData(input, labels, weight))
    splines = SplinesByPenalty(source, candidates, lambda number: on_device[number], folds, counts)
    entries, losses, briers = [], [], []
    for name, candidate in candidates.items():
        loss, brier = torch.full((2, rows), math.nan, dtype=torch.float64)
        excluded, fitted = "", None
        stopped: tuple[str, ...] = ()
        try:
            excluded = splines.why_not(candidate)
            fitted = None if excluded else splines.fitted(candidate) or fit_one(candidate, input, labels, weight=weight)
            for k in range(0 if excluded else folds):
                held_out, part = fold == k, fitted
                if isinstance(candidate, SplineScaling):
                    log_probs = splines.held_out(candidate, k)(input[held_out].to(torch.float64))
                else:
                    if name != "none":  # which has nothing to fit
                        kept = ~held_out
                        of_fit = None if weight is None else weight[kept]
                        part = fit_one(candidate, input[kept], labels[kept], fitted, of_fit)
                        stopped = stopped or getattr(part, "at_border_", ())
                    log_probs = log_proba(part, input[held_out])
                loss[held_out] = losses_of(log_probs, labels[held_out], criterion).cpu()
                brier[held_out] = losses_of(log_probs, labels[held_out], "brier").cpu()
        except Exception as error:  # whatever a candidate from elsewhere raises: the others go on, and this is told
            if name == "none":
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            excluded = f"could not be fitted: {reason.removeprefix(f'{type(candidate).__name__}: ')}"
        border = getattr(fitted, "at_border_", ())
        if border and name != "none":
            excluded = excluded or f"has its optimum at the end of the search: {' and '.join(border)}"
        elif stopped:  # a bound of the search is no property of the candidate
            excluded = excluded or f"has its optimum at the end of the search without a fold: {' and '.join(stopped)}"
        elif name == "none" and len(candidates) > 1 and zeros_are_possible(source, candidate.input_kind):
            excluded = ZEROS
        mean = loss.mean() if weight is None else (loss * weight.cpu()).sum() / weight.cpu().sum()
        keeps = keeps_predictions(candidate)
        entries.append(CandidateScore(name, fitted, float(mean), excluded=excluded, keeps_predictions=keeps))
        losses.append(loss)
        briers.append(brier)
    found = decide(entries, torch.stack(losses), criterion=criterion, folds=folds, weight=weight)
    difference = (briers[found.chosen] - briers[0]).unsqueeze(0)
    pairs = _weighted_pairs(difference, torch.ones(rows, dtype=torch.float64) if weight is None else weight.cpu())
    return replace(found, brier=pairs(0, None)) if folds else found


ZEROS = "gives probability 0 to classes that are possible in other rows"


def zeros_are_possible(source: RowSource, input_kind: str) -> bool:
    """Whether a probability of 0 may fall on the true class: no calibration would have an infinite loss there."""
    if input_kind == "logits":  # -inf is impossible, unless a label says otherwise
        return not masks_zeros(source, input_kind)
    zeros = torch.zeros(source.n_classes, dtype=torch.float64)
    for part in source.parts():
        zeros += (part.input == 0).sum(0).cpu()
    zeros = source.add_up(zeros)
    return bool(((zeros > 0) & (zeros < source.n_rows)).any())


class SplinesByPenalty:
    """The spline scalings among the candidates, fitted together where they have one penalty, when one is wanted."""

    def __init__(
        self,
        source: RowSource,
        candidates: Mapping[str, Any],
        fold_of: FoldOf,
        folds: int,
        class_counts: Tensor,
        why_not_matrix: str = "",
    ) -> None:
        self._source, self._fold_of, self._folds, self._class_counts = source, fold_of, folds, class_counts
        self._why_not_matrix = why_not_matrix
        self._candidates = [
            one for one in candidates.values() if isinstance(one, SplineScaling) and not self.why_not(one)
        ]
        self._fits: dict[tuple[float, str], SplineFolds] = {}

    def why_not(self, candidate: Any) -> str:
        if not isinstance(candidate, SplineScaling):
            return ""
        source = self._source
        found = why_not(candidate, source.weight_sum, source.n_rows, source.n_classes)
        return found or (self._why_not_matrix if candidate.kind == "matrix" else "")

    def fitted(self, candidate: Any) -> SplineScaling | None:
        """None for what is no spline scaling."""
        if not isinstance(candidate, SplineScaling):
            return None
        candidate._check_parameters()
        key = (float(candidate.penalty), candidate.input_kind)
        if key not in self._fits:
            alike = [one for one in self._candidates if (float(one.penalty), one.input_kind) == key]
            self._fits[key] = SplineFolds(self._source, alike, self._fold_of, self._folds)
        return self._fits[key].fitted(candidate, self._class_counts)

    def held_out(self, candidate: SplineScaling, k: int) -> Predict:
        return self._fits[float(candidate.penalty), candidate.input_kind].held_out(candidate, k)


def decide(
    entries: Sequence[CandidateScore], losses: Tensor, *, criterion: Proper, folds: int, weight: Tensor | None = None
) -> CrossValidation:
    """Apply the rule to ``losses`` [candidates, N]; NaN where a fit failed."""
    rows = losses.shape[1]
    # From one that is finite everywhere: where no calibration is infinite, the others are compared all the same.
    finite = losses.isfinite().all(1).nonzero().squeeze(1).tolist()
    differences = losses - losses[finite[0] if finite else 0]
    if weight is not None:
        return _decided(entries, rows, _weighted_pairs(differences, weight.cpu()), criterion=criterion, folds=folds)
    return decide_from_sums(
        entries,
        rows,
        differences.sum(1),
        differences @ differences.T,
        criterion=criterion,
        folds=folds,
    )


def decide_from_sums(
    entries: Sequence[CandidateScore],
    rows: int,
    sums: Tensor,
    products: Tensor,
    *,
    criterion: Proper,
    folds: int,
    left_out: Sequence[str] = (),
) -> CrossValidation:
    """Apply the rule to sums over samples with equal weights.

    Args:
        entries: the first is no calibration.
        rows: N.
        sums, products: [candidates] and [candidates, candidates] float64, of the losses minus those of one candidate.
    """

    def pair(place: int, best: int) -> tuple[float, float]:
        mean = float(sums[place] - sums[best]) / rows
        square = float(products[place, place] + products[best, best] - 2 * products[place, best]) / rows
        variance = max(0.0, square - mean**2) * rows / max(1, rows - 1)
        return mean, math.sqrt(variance / rows)

    return _decided(entries, rows, pair, criterion=criterion, folds=folds, left_out=left_out)


def _weighted_pairs(differences: Tensor, weight: Tensor) -> Callable[[int, int | None], tuple[float, float]]:
    """Mean and standard error of paired differences of rows that do not all count the same.

    The error is that of a weighted mean of independent samples. It does not depend on the scale of the weights, and
    equal weights give the usual standard error.
    """
    share = weight / weight.sum()
    squares = float(share.square().sum())

    def pair(place: int, other: int | None) -> tuple[float, float]:
        difference = differences[place] - (0 if other is None else differences[other])
        mean = float((share * difference).sum())
        variance = float((share * (difference - mean)).square().sum())
        return mean, math.sqrt(max(0.0, variance) / max(1 - squares, _SMALLEST))

    return pair


def _decided(
    entries: Sequence[CandidateScore],
    rows: int,
    pair: Callable[[int, int], tuple[float, float]],
    *,
    criterion: Proper,
    folds: int,
    left_out: Sequence[str] = (),
) -> CrossValidation:
    """Apply the rule; ``pair`` returns the mean difference of two candidates and its standard error."""
    entries = list(entries)
    base = entries[0].loss
    for place, entry in enumerate(entries[1:], start=1):
        if entry.excluded or folds == 0:
            continue
        if not math.isfinite(entry.loss):
            entries[place] = replace(entry, excluded=f"has an infinite {LOSS_NAMES[criterion]} in a fold")
        elif entry.loss > base and not entries[0].excluded:
            entries[place] = replace(entry, excluded="is worse than no calibration")
    able = [] if folds == 0 else [place for place, entry in enumerate(entries) if not entry.excluded]
    able = able or [0]

    def loss(place: int) -> float:
        return entries[place].loss if math.isfinite(entries[place].loss) else math.inf

    best = min(able, key=lambda place: (loss(place), place))
    keeping = [place for place in able if place == 0 or entries[place].keeps_predictions]
    chosen = min(keeping or able[:1], key=lambda place: (loss(place), place))
    for place in able:
        if place not in keeping:
            mean, error = pair(place, chosen)
            # Not a number where a loss is infinite: the finite one is lower.
            if mean < -error / 2 or (math.isinf(loss(chosen)) and math.isfinite(loss(place))):
                chosen = place
    for place, entry in enumerate(entries):
        mean, error = pair(place, chosen)
        entries[place] = replace(entry, difference=mean, error=error)
    return CrossValidation(criterion, tuple(entries), chosen, best, folds, rows, tuple(left_out))
