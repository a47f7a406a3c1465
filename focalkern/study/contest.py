"""Which candidate to use: cross-validation on a proper loss, and the rule that prefers the simple ones.

Every candidate is fitted on all folds but one and judged on that one; all of them on the same folds. Used is the
simplest whose mean loss lies within one standard error of the best one's, the standard error being that of the paired
difference (Breiman et al. 1984, section 3.4.3).
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
from focalkern.calibrators import (
    Calibrator,
    FocalTemperatureScaling,
    InputKind,
    IsotonicCalibration,
    StructuredScaling,
    TemperatureScaling,
)

__all__ = [
    "CANDIDATES",
    "DEFAULT_CANDIDATES",
    "LOSS_NAMES",
    "PROPER",
    "Contest",
    "Entry",
    "Proper",
    "as_candidates",
    "check_folds",
    "decide",
    "decide_from_sums",
    "fit_one",
    "hold_contest",
    "identity",
    "log_proba",
    "losses_of",
    "stratified_folds",
]

Proper = Literal["nll", "brier"]
PROPER: tuple[Proper, ...] = get_args(Proper)
LOSS_NAMES: dict[str, str] = {"nll": "NLL", "brier": "Brier score"}

_SMALLEST = torch.finfo(torch.float64).tiny

CANDIDATES: dict[str, Callable[[Proper, InputKind], Any]] = {
    "none": lambda criterion, kind: identity(kind),
    "temperature": lambda criterion, kind: TemperatureScaling(criterion=criterion, input_kind=kind),
    "focal-temperature": lambda criterion, kind: FocalTemperatureScaling(criterion=criterion, input_kind=kind),
    "structured-vector": lambda criterion, kind: StructuredScaling(kind="vector", input_kind=kind),
    "structured-matrix": lambda criterion, kind: StructuredScaling(kind="matrix", input_kind=kind),
    "structured-focal": lambda criterion, kind: StructuredScaling(kind="matrix", focal=True, input_kind=kind),
    "isotonic": lambda criterion, kind: IsotonicCalibration(input_kind=kind),
}
"""Candidates by name, from the simplest to the richest: what makes one for a criterion and a kind of input."""

DEFAULT_CANDIDATES = ("none", "temperature", "focal-temperature")


@dataclass(frozen=True)
class Entry:
    """What became of one candidate.

    Attributes:
        name: as it was given.
        calibrator: fitted on all rows; None where that failed, or rows are streamed and no calibrator is needed yet.
        loss: mean loss of the rows, each judged by a fit that did not see it; NaN where that failed.
        difference, error: the mean paired difference from the best candidate, and its standard error.
        excluded: why it cannot be chosen, as the end of a sentence that begins with its name; nothing where it can.
    """

    name: str
    calibrator: Any
    loss: float
    difference: float = math.nan
    error: float = math.nan
    excluded: str = ""


@dataclass(frozen=True)
class Contest:
    """The outcome of a cross-validation.

    Attributes:
        criterion: the loss.
        entries: one per candidate, from the simplest to the richest; the first is no calibration.
        chosen, best: the places of the one to use, and of the one with the lowest mean loss that can be used.
        folds: how many there were; 0 where there were too few rows for any.
        n_samples: rows.
        left_out: names of candidates that could not take part, with the reason.
    """

    criterion: Proper
    entries: tuple[Entry, ...]
    chosen: int
    best: int
    folds: int
    n_samples: int
    left_out: tuple[str, ...] = ()

    @property
    def winner(self) -> Entry:
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
    """No calibration, as a calibrator that can be saved: a temperature that is searched at 1 only.

    By the Brier score, which is finite on whatever rows.
    """
    return TemperatureScaling(search="grid", temperatures=(1.0,), criterion="brier", input_kind=input_kind)


def as_candidates(
    candidates: Sequence[str] | Mapping[str, Any] | None, criterion: Proper, input_kind: InputKind
) -> dict[str, Any]:
    """Unfitted calibrators by name, ``"none"`` first.

    Args:
        candidates: names out of :data:`CANDIDATES`, which are put into their order; or anything with ``fit`` and
            ``predict_proba`` (or ``transform``) by name, from the simplest to the richest; None for
            :data:`DEFAULT_CANDIDATES`.

    Raises:
        ValueError: an unknown name; a candidate called "none" that is not None.
        TypeError: a candidate without ``fit`` or ``predict_proba``.
    """
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


# More folds than that are a mistake, and would take days.
MOST_FOLDS = 1000


def check_folds(op: str, folds: Any, seed: Any) -> tuple[int, int]:
    return integer(op, "folds", folds, 2, MOST_FOLDS), integer(op, "seed", seed)


def stratified_folds(labels: Tensor, folds: int, seed: int) -> Tensor:
    """[N] int64: the fold of every row. Sizes differ by at most one, and so do those of every class."""
    rows = len(labels)
    random = np.random.default_rng(seed % 2**63).random(rows)
    order = torch.from_numpy(np.lexsort((random, labels.cpu().numpy())))
    fold = torch.empty(rows, dtype=torch.int64)
    fold[order] = torch.arange(rows) % folds
    return fold


def fit_one(candidate: Any, input: Tensor, labels: Tensor, near: Any = None, weight: Tensor | None = None) -> Any:
    """A fitted copy, without warnings: what is doubtful, the verdict says. What is not one of ours gets NumPy arrays.

    Args:
        near: a copy that was fitted on nearly the same rows: the search begins where that one ended.
        weight: [N] float64; None where every row counts once.

    Raises:
        TypeError: weights for what has no ``sample_weight`` in its ``fit``.
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


def _takes_weights(candidate: Any) -> bool:
    try:
        parameters = inspect.signature(candidate.fit).parameters
    except (TypeError, ValueError):  # written in C, and says nothing
        return True
    return "sample_weight" in parameters


def log_proba(calibrator: Any, input: Tensor) -> Tensor:
    """[N, C] float64 calibrated log-probabilities."""
    if isinstance(calibrator, Calibrator):
        return torch.as_tensor(calibrator.predict_log_proba(input.to(torch.float64)))
    # netcal's classes call it transform.
    predict = calibrator.predict_proba if hasattr(calibrator, "predict_proba") else calibrator.transform
    probs = torch.as_tensor(np.asarray(predict(input.cpu().numpy())), dtype=torch.float64)
    if probs.shape != input.shape:
        raise ValueError(f"predict_proba must give {list(input.shape)}, got {list(probs.shape)}")
    return (probs / probs.sum(-1, keepdim=True)).log()


def losses_of(log_probs: Tensor, labels: Tensor, criterion: Proper) -> Tensor:
    """[N] float64."""
    of_target = log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    if criterion == "nll":
        return -of_target
    return log_probs.exp().square().sum(-1) - 2 * of_target.exp() + 1


def hold_contest(
    input: Tensor,
    labels: Tensor,
    candidates: Mapping[str, Any],
    *,
    criterion: Proper,
    folds: int,
    seed: int,
    weight: Tensor | None = None,
) -> Contest:
    """Cross-validate the candidates on rows in memory.

    Args:
        input: [N, C].
        labels: [N] int64.
        candidates: what :func:`as_candidates` returns.
        weight: [N] float64 > 0, of the rows in fits and mean losses; None where every row counts once.
    """
    rows = len(labels)
    folds = min(folds, rows)
    fold = stratified_folds(labels, folds, seed)
    entries, losses = [], []
    for name, candidate in candidates.items():
        loss = torch.full((rows,), math.nan, dtype=torch.float64)
        excluded, fitted = "", None
        stopped: tuple[str, ...] = ()
        try:
            fitted = fit_one(candidate, input, labels, weight=weight)
            for k in range(folds if folds > 1 else 0):
                held_out, part = fold == k, fitted
                if name != "none":  # which has nothing to fit
                    kept = ~held_out
                    of_fit = None if weight is None else weight[kept]
                    part = fit_one(candidate, input[kept], labels[kept], fitted, of_fit)
                    stopped = stopped or getattr(part, "at_border_", ())
                log_probs = log_proba(part, input[held_out])
                loss[held_out] = losses_of(log_probs, labels[held_out], criterion).cpu()
        except Exception as error:  # whatever a candidate from elsewhere raises: the others go on, and this is told
            if name == "none":
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            excluded = f"could not be fitted: {reason.removeprefix(f'{type(candidate).__name__}: ')}"
        border = getattr(fitted, "at_border_", ())
        if border and name != "none":
            excluded = excluded or f"has its optimum at the end of the search: {' and '.join(border)}"
        elif stopped:  # where a search ends says nothing of the candidate
            excluded = excluded or f"has its optimum at the end of the search without a fold: {' and '.join(stopped)}"
        mean = loss.mean() if weight is None else (loss * weight.cpu()).sum() / weight.cpu().sum()
        entries.append(Entry(name, fitted, float(mean), excluded=excluded))
        losses.append(loss)
    folds = folds if folds > 1 else 0
    return decide(entries, torch.stack(losses), criterion=criterion, folds=folds, weight=weight)


def decide(
    entries: Sequence[Entry], losses: Tensor, *, criterion: Proper, folds: int, weight: Tensor | None = None
) -> Contest:
    """Apply the rule to ``losses`` [candidates, N]; NaN where there is none."""
    rows = losses.shape[1]
    differences = losses - losses[0]
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
    entries: Sequence[Entry],
    rows: int,
    sums: Tensor,
    products: Tensor,
    *,
    criterion: Proper,
    folds: int,
    left_out: Sequence[str] = (),
) -> Contest:
    """The rule where every row counts once.

    Args:
        entries: the first is no calibration.
        rows: N.
        sums, products: [candidates] and [candidates, candidates] float64, of the losses minus those of no calibration.
    """

    def pair(place: int, best: int) -> tuple[float, float]:
        mean = float(sums[place] - sums[best]) / rows
        square = float(products[place, place] + products[best, best] - 2 * products[place, best]) / rows
        variance = max(0.0, square - mean**2) * rows / max(1, rows - 1)
        return mean, math.sqrt(variance / rows)

    return _decided(entries, rows, pair, criterion=criterion, folds=folds, left_out=left_out)


def _weighted_pairs(differences: Tensor, weight: Tensor) -> Callable[[int, int], tuple[float, float]]:
    """Mean and standard error of paired differences of rows that do not all count the same.

    The error is that of a weighted mean of independent rows, which does not change with the scale of the weights. Of
    equal weights it is the usual one.
    """
    share = weight / weight.sum()
    squares = float(share.square().sum())

    def pair(place: int, best: int) -> tuple[float, float]:
        difference = differences[place] - differences[best]
        mean = float((share * difference).sum())
        variance = float((share * (difference - mean)).square().sum())
        return mean, math.sqrt(max(0.0, variance) / max(1 - squares, _SMALLEST))

    return pair


def _decided(
    entries: Sequence[Entry],
    rows: int,
    pair: Callable[[int, int], tuple[float, float]],
    *,
    criterion: Proper,
    folds: int,
    left_out: Sequence[str] = (),
) -> Contest:
    """The rule; ``pair`` has the mean difference of two candidates and its standard error."""
    entries = list(entries)
    base = entries[0].loss
    for place, entry in enumerate(entries[1:], start=1):
        if entry.excluded or folds == 0:
            continue
        if not math.isfinite(entry.loss):
            entries[place] = replace(entry, excluded=f"has an infinite {LOSS_NAMES[criterion]} in a fold")
        elif entry.loss > base:
            entries[place] = replace(entry, excluded="is worse than no calibration")
    able = [0] if folds == 0 else [place for place, entry in enumerate(entries) if not entry.excluded]
    best = min(able, key=lambda place: (entries[place].loss if math.isfinite(entries[place].loss) else math.inf, place))
    for place, entry in enumerate(entries):
        mean, error = pair(place, best)
        entries[place] = replace(entry, difference=mean, error=error)
    # Not a number where a loss is infinite: then the comparison is false, and the best remains.
    chosen = next((place for place in able if entries[place].difference <= entries[place].error), best)
    return Contest(criterion, tuple(entries), chosen, best, folds, rows, tuple(left_out))
