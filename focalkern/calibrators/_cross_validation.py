"""Cross-validation of candidates on samples in memory: each is fitted on all folds but one, evaluated on that."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from focalkern._diagnostics import repeated_rows
from focalkern._types import InputKind, Proper
from focalkern.calibrators._candidates import fit_one, fit_to_source, fitted_identity, keeps_predictions, log_proba
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._folds import folds_of_all
from focalkern.calibrators._inputs import losses_of
from focalkern.calibrators._robust_temperature import (
    Floored,
    RobustTemperatureScaling,
    floored_folds,
    floored_losses,
    floored_map,
)
from focalkern.calibrators._row_source import MemoryRows, RowSource, class_counts, fold_by_fold, rows_of
from focalkern.calibrators._selection import NO_ERRORS, CandidateScore, CrossValidation, decide, weighted_pairs
from focalkern.calibrators._spline import SplineScaling
from focalkern.calibrators._spline_features import masks_zeros
from focalkern.calibrators._spline_folds import FoldOf, Predict, SplineFolds, why_not
from focalkern.calibrators._temperature_bound import no_row_is_wrong
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = [
    "ZEROS",
    "FoldFits",
    "cross_validate",
    "fits_by_sums",
    "zeros_are_possible",
]


def cross_validate(
    input: Tensor,
    labels: Tensor,
    candidates: Mapping[str, Any],
    *,
    criterion: Proper,
    folds: int,
    seed: int,
    weight: Tensor | None = None,
    only_chosen: bool = False,
) -> CrossValidation:
    """Cross-validate the candidates on samples in memory. If many rows are copies, a fold has all or none of them.

    Args:
        input: [N, C].
        labels: [N] int64.
        candidates: result of :func:`as_candidates`.
        weight: [N] float64 > 0, for the fits and the mean losses; None for equal weights.
        only_chosen: leave out the calibrators of spline scalings that are not chosen.
    """
    rows, device = len(labels), input.device
    names = (criterion, "brier")
    number, n_distinct = repeated_rows(input, labels), rows
    if number is not None:
        n_distinct = int(number.max()) + 1
    folds = min(folds, n_distinct)
    fold = folds_of_all(n_distinct, folds, seed)
    fold = fold if number is None else fold[torch.from_numpy(number)]
    folds = folds if folds > 1 else 0
    on_device = fold.to(device)
    source = rows_of(FitData(input, labels, weight))
    order, sizes = fold.argsort(stable=True).to(device), torch.bincount(fold, minlength=folds).tolist()
    places = order.split(sizes)
    fits = FoldFits(source, candidates, lambda number: on_device[number], folds)
    entries, losses, unfinished = [], [], []
    for name, candidate in candidates.items():
        loss = torch.full((2, rows), math.nan, dtype=torch.float64, device=device)
        excluded, fitted = "", None
        stopped: tuple[str, ...] = ()
        try:
            excluded = fits.why_not(candidate)
            if name == "none":  # which has nothing to fit
                fitted, of_none = _without_calibration(input, labels, candidate.input_kind, criterion, weight)
                loss = of_none if folds else loss
            elif not excluded:
                takes = fits_by_sums(candidate)
                fitted = fits.fit(candidate) if takes else fit_one(candidate, input, labels, None, weight)
                unfinished += [name] if fitted is None else []
            found, of_folds = [], []
            for k, place in enumerate(places if folds and name != "none" and not excluded else ()):
                if fits_by_sums(candidate):
                    of_folds.append(fits.losses(candidate, k))
                else:
                    kept = on_device != k
                    of_fit = None if weight is None else weight[kept]
                    part = fit_one(candidate, input[kept], labels[kept], fitted, of_fit)
                    stopped = stopped or getattr(part, "at_border_", ())
                    found.append(log_proba(part, input[place]))
            if of_folds or found:
                of_rows = torch.cat(of_folds, 1) if of_folds else losses_of(torch.cat(found), labels[order], names)
                of_rows = of_rows[1].expand(2, -1) if of_folds and criterion == "brier" else of_rows
                loss.scatter_(1, order.expand(2, -1), of_rows)  # an index would start threads
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
        loss = loss.cpu()
        mean = loss[0].mean() if weight is None else (loss[0] * weight.cpu()).sum() / weight.cpu().sum()
        keeps = keeps_predictions(candidate)
        entries.append(CandidateScore(name, fitted, float(mean), excluded=excluded, keeps_predictions=keeps))
        losses.append(loss)
    decided = decide(entries, torch.stack([one[0] for one in losses]), criterion=criterion, folds=folds, weight=weight)
    finished = tuple(
        replace(entry, calibrator=fits.fitted(candidates[entry.name]))
        if entry.name in unfinished and (place == decided.chosen or not only_chosen)
        else entry
        for place, entry in enumerate(decided.entries)
    )
    difference = (losses[decided.chosen] - losses[0])[1:]
    pairs = weighted_pairs(difference, torch.ones(rows, dtype=torch.float64) if weight is None else weight.cpu())
    brier = pairs(0, None) if folds else decided.brier
    return replace(decided, entries=finished, brier=brier, n_copies=rows - n_distinct)


def _without_calibration(
    input: Tensor, labels: Tensor, input_kind: InputKind, criterion: Proper, weight: Tensor | None
) -> tuple[Any, Tensor]:
    """No calibration as a fitted calibrator, and the losses and Brier scores [2, N] of all rows."""
    log_probs = focal_calibration_map(input.to(torch.float64), 0.0, 1.0, input_kind=input_kind, log=True)
    losses = losses_of(log_probs, labels, (criterion, "brier"))
    mean = losses[1].mean() if weight is None else (losses[1] * weight).sum() / weight.sum()
    rows, n_classes = input.shape
    return fitted_identity(input_kind, float(mean), n_samples=rows, n_classes=n_classes), losses


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


def fits_by_sums(candidate: Any) -> bool:
    """Whether :class:`FoldFits` fits the candidate."""
    return isinstance(candidate, SplineScaling | RobustTemperatureScaling)


class FoldFits:
    """Robust temperature scaling and spline scalings, fitted to all rows and without each fold.

    The spline scalings with one penalty are fitted together at the first request. Each kind of input has one robust
    temperature of all rows, from which the fits of the folds and of the splines start.
    """

    def __init__(
        self,
        source: RowSource,
        candidates: Mapping[str, Any],
        fold_of: FoldOf,
        folds: int,
        why_not_matrix: str = "",
    ) -> None:
        self._source, self._fold_of, self._folds, self._class_counts = source, fold_of, folds, class_counts(source)
        self._why_not_matrix = why_not_matrix
        self._no_errors = no_row_is_wrong(source)
        self._kinds_of_temperature = {
            one.input_kind for one in candidates.values() if isinstance(one, RobustTemperatureScaling)
        }
        self._splines = [one for one in candidates.values() if isinstance(one, SplineScaling) and not self.why_not(one)]
        self._fits: dict[tuple[float, str], SplineFolds] = {}
        self._temperatures: dict[str, RobustTemperatureScaling] = {}
        self._folds_of_temperature: dict[str, list[Floored]] = {}

    def why_not(self, candidate: Any) -> str:
        if not isinstance(candidate, SplineScaling):
            return ""
        if candidate.input_kind in self._kinds_of_temperature and self._no_errors:
            return NO_ERRORS
        source = self._source
        found = why_not(candidate, source.weight_sum, source.n_rows, source.n_classes)
        return found or (self._why_not_matrix if candidate.kind == "matrix" else "")

    def fitted(self, candidate: Any) -> Any:
        """The candidate fitted to all rows."""
        found = self.fit(candidate)
        if found is None:
            found = self._fits[float(candidate.penalty), candidate.input_kind].fitted(candidate, self._class_counts)
        return found

    def fit(self, candidate: Any) -> Any:
        """Fits the candidate to all rows and without each fold.

        Returns:
            The candidate fitted to all rows; None for a spline scaling, for which :meth:`fitted` computes more.
        """
        candidate._check_parameters()
        kind = candidate.input_kind
        if isinstance(candidate, RobustTemperatureScaling):
            self._temperatures[kind] = fit_to_source(candidate, self._source, self._class_counts)
            return self._temperatures[kind]
        key = (float(candidate.penalty), kind)
        if key not in self._fits:
            alike = [one for one in self._splines if (float(one.penalty), one.input_kind) == key]
            temperature = getattr(self._temperatures.get(kind), "temperature_", None)
            self._fits[key] = SplineFolds(self._source, alike, self._fold_of, self._folds, temperature)
        return None

    def losses(self, candidate: Any, k: int) -> Tensor:
        """[2, n]: NLL and Brier score of each row of fold k by the fit without it. The rows are in memory."""
        kind = candidate.input_kind
        if not isinstance(candidate, RobustTemperatureScaling):
            found = self._fits[float(candidate.penalty), kind].losses(candidate, k)
            if found is not None:
                return found
        rows = self._part(k, True)
        assert isinstance(rows, MemoryRows)
        if isinstance(candidate, RobustTemperatureScaling):
            return floored_losses(self._floored(kind)[k], kind, rows)
        return losses_of(self.held_out(candidate, k)(rows.input.to(torch.float64)), rows.target, ("nll", "brier"))

    def held_out(self, candidate: Any, k: int) -> Predict:
        """The fit without fold k, a function of input [n, C] float64 to log-probabilities."""
        kind = candidate.input_kind
        if isinstance(candidate, RobustTemperatureScaling):
            return floored_map(self._floored(kind)[k], kind)
        return self._fits[float(candidate.penalty), kind].held_out(candidate, k)

    def _floored(self, kind: InputKind) -> list[Floored]:
        """Robust temperature scaling without each fold."""
        if kind not in self._folds_of_temperature:
            of_folds = floored_folds(self._source, self._part, self._folds, kind, self._temperatures[kind])
            self._folds_of_temperature[kind] = of_folds
        return self._folds_of_temperature[kind]

    @functools.cached_property
    def _part(self) -> Callable[[int, bool], RowSource]:
        return fold_by_fold(self._source, self._fold_of, self._folds)
