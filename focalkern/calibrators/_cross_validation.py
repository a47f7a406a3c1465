"""Cross-validation of candidates on samples in memory: each is fitted on all folds but one, evaluated on that."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from focalkern._types import InputKind, Proper
from focalkern.calibrators._candidates import fit_one, fit_to_source, fitted_identity, keeps_predictions, log_proba
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._folds import fold_of
from focalkern.calibrators._robust_temperature import RobustTemperatureScaling
from focalkern.calibrators._row_source import RowSource, rows_of
from focalkern.calibrators._selection import CandidateScore, CrossValidation, decide, weighted_pairs
from focalkern.calibrators._spline import SplineScaling
from focalkern.calibrators._spline_features import masks_zeros
from focalkern.calibrators._spline_folds import FoldOf, Predict, SplineFolds, why_not
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = [
    "ZEROS",
    "SplinesByPenalty",
    "cross_validate",
    "losses_of",
    "zeros_are_possible",
]


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
        candidates: result of :func:`as_candidates`.
        weight: [N] float64 > 0, for the fits and the mean losses; None for equal weights.
    """
    rows = len(labels)
    folds = min(folds, rows)
    fold = fold_of(torch.arange(rows), rows, folds, seed)
    folds = folds if folds > 1 else 0
    on_device, counts = fold.to(input.device), torch.bincount(labels, minlength=input.shape[1])
    source = rows_of(FitData(input, labels, weight))
    order, sizes = fold.argsort(stable=True), torch.bincount(fold, minlength=folds).tolist()
    of_folds = [(places, input[places], labels[places]) for places in order.to(input.device).split(sizes)]
    splines = SplinesByPenalty(source, candidates, lambda number: on_device[number], folds, counts)
    entries, losses, briers = [], [], []
    for name, candidate in candidates.items():
        loss, brier = torch.full((2, rows), math.nan, dtype=torch.float64, device=input.device)
        excluded, fitted = "", None
        stopped: tuple[str, ...] = ()
        try:
            excluded = splines.why_not(candidate)
            if name == "none":  # which has nothing to fit
                fitted, *of_none = _without_calibration(input, labels, candidate.input_kind, criterion, weight)
                loss, brier = of_none if folds else (loss, brier)
            else:
                fitted = (
                    None if excluded else splines.fitted(candidate) or fit_one(candidate, input, labels, None, weight)
                )
            if isinstance(fitted, RobustTemperatureScaling):
                splines.temperatures[fitted.input_kind] = fitted.temperature_
            for k in range(0 if excluded or name == "none" else folds):
                places, held_out, truth = of_folds[k]
                if isinstance(candidate, SplineScaling):
                    log_probs = splines.held_out(candidate, k)(held_out.to(torch.float64))
                elif isinstance(candidate, RobustTemperatureScaling):
                    others = source.select(lambda number, k=k: on_device[number] != k)  # type: ignore[misc]
                    log_probs = log_proba(fit_to_source(candidate, others, counts, fitted), held_out)
                else:
                    kept = on_device != k
                    of_fit = None if weight is None else weight[kept]
                    part = fit_one(candidate, input[kept], labels[kept], fitted, of_fit)
                    stopped = stopped or getattr(part, "at_border_", ())
                    log_probs = log_proba(part, held_out)
                loss[places] = losses_of(log_probs, truth, criterion)
                brier[places] = losses_of(log_probs, truth, "brier")
        # A user's candidate may raise anything. The other candidates continue, and a warning names the error.
        except Exception as error:
            if name == "none":
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            excluded = f"could not be fitted: {reason.removeprefix(f'{type(candidate).__name__}: ')}"
        border = getattr(fitted, "at_border_", ())
        if border and name != "none":
            excluded = excluded or f"has its optimum at a bound of the search: {' and '.join(border)}"
        elif stopped:
            excluded = excluded or f"has its optimum at a bound of the search in a fold: {' and '.join(stopped)}"
        elif name == "none" and len(candidates) > 1 and zeros_are_possible(source, candidate.input_kind):
            excluded = ZEROS
        loss, brier = loss.cpu(), brier.cpu()
        mean = loss.mean() if weight is None else (loss * weight.cpu()).sum() / weight.cpu().sum()
        keeps = keeps_predictions(candidate)
        entries.append(CandidateScore(name, fitted, float(mean), excluded=excluded, keeps_predictions=keeps))
        losses.append(loss)
        briers.append(brier)
    found = decide(entries, torch.stack(losses), criterion=criterion, folds=folds, weight=weight)
    difference = (briers[found.chosen] - briers[0]).unsqueeze(0)
    pairs = weighted_pairs(difference, torch.ones(rows, dtype=torch.float64) if weight is None else weight.cpu())
    return replace(found, brier=pairs(0, None)) if folds else found


def _without_calibration(
    input: Tensor, labels: Tensor, input_kind: InputKind, criterion: Proper, weight: Tensor | None
) -> tuple[Any, Tensor, Tensor]:
    """No calibration as a fitted calibrator, and the losses [N] and Brier scores [N] of all rows."""
    log_probs = focal_calibration_map(input.to(torch.float64), 0.0, 1.0, input_kind=input_kind, log=True)
    brier = losses_of(log_probs, labels, "brier")
    loss = brier if criterion == "brier" else losses_of(log_probs, labels, criterion)
    mean = brier.mean() if weight is None else (brier * weight).sum() / weight.sum()
    rows, n_classes = input.shape
    return fitted_identity(input_kind, float(mean), n_samples=rows, n_classes=n_classes), loss, brier


ZEROS = "gives probability 0 to classes that occur in other rows"


def zeros_are_possible(source: RowSource, input_kind: str) -> bool:
    """Whether a class with probability 0 may be the true class of a row: uncalibrated, its loss would be infinite."""
    if input_kind == "logits":  # a logit of -inf is an impossible class, unless a row has its label there
        return not masks_zeros(source, input_kind)
    zeros = torch.zeros(source.n_classes, dtype=torch.float64)
    for part in source.parts():
        zeros += (part.input == 0).sum(0).cpu()
    zeros = source.add_up(zeros)
    return bool(((zeros > 0) & (zeros < source.n_rows)).any())


class SplinesByPenalty:
    """The spline scalings among the candidates. Those with the same penalty are fitted together at the first request.

    ``temperatures`` holds, by kind of input, the robust temperature of all rows if another candidate has fitted it.
    """

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
        self.temperatures: dict[str, float] = {}

    def why_not(self, candidate: Any) -> str:
        if not isinstance(candidate, SplineScaling):
            return ""
        source = self._source
        found = why_not(candidate, source.weight_sum, source.n_rows, source.n_classes)
        return found or (self._why_not_matrix if candidate.kind == "matrix" else "")

    def fitted(self, candidate: Any) -> SplineScaling | None:
        """The candidate fitted to all rows; None if it is not a spline scaling."""
        if not isinstance(candidate, SplineScaling):
            return None
        candidate._check_parameters()
        key = (float(candidate.penalty), candidate.input_kind)
        if key not in self._fits:
            alike = [one for one in self._candidates if (float(one.penalty), one.input_kind) == key]
            of_all = self.temperatures.get(candidate.input_kind)
            self._fits[key] = SplineFolds(self._source, alike, self._fold_of, self._folds, of_all)
        return self._fits[key].fitted(candidate, self._class_counts)

    def held_out(self, candidate: SplineScaling, k: int) -> Predict:
        return self._fits[float(candidate.penalty), candidate.input_kind].held_out(candidate, k)
