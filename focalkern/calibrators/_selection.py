"""The rule of selection by cross-validated losses and half a standard error.

The rule starts with the candidate of lowest mean loss among those that change no predicted class. A richer candidate
replaces it if its mean loss is lower by more than half a standard error of the paired difference.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from focalkern._types import LOSS_NAMES, Proper

__all__ = ["NO_ERRORS", "CandidateScore", "CrossValidation", "decide", "decide_from_sums", "weighted_pairs"]


NO_ERRORS = "adds nothing to temperature scaling on rows without an error"
"""Why a spline scaling is excluded if no row is wrong."""

_SMALLEST = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class CandidateScore:
    """The cross-validated loss of one candidate.

    Attributes:
        name: name of the candidate.
        calibrator: the candidate fitted on all rows; None if the fit failed or the calibrator is not needed.
        loss: mean loss, each row with a fit that did not see it; NaN if a fit failed.
        difference, error: the mean paired difference from the chosen candidate, and its standard error.
        excluded: the reason for exclusion, as the end of a sentence that begins with the name; empty if the candidate
            is not excluded.
        keeps_predictions: whether the candidate changes no predicted class.
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
        chosen, best: indices of the chosen candidate, and of the candidate with the lowest mean loss that is not
            excluded.
        folds: number of folds; 0 if the rows are too few for a cross-validation.
        n_samples: number of rows.
        left_out: names of candidates that could not be cross-validated, with the reason.
        brier: the mean paired difference in Brier score between the choice and no calibration, and its standard error;
            NaN if they were not compared.
        n_copies: number of rows that are copies of others, if they are many. The folds keep equal rows together.
    """

    criterion: Proper
    entries: tuple[CandidateScore, ...]
    chosen: int
    best: int
    folds: int
    n_samples: int
    left_out: tuple[str, ...] = ()
    brier: tuple[float, float] = (math.nan, math.nan)
    n_copies: int = 0

    @property
    def winner(self) -> CandidateScore:
        return self.entries[self.chosen]

    def table(self) -> list[dict[str, Any]]:
        """One dictionary per candidate, for JSON; infinite numbers become null."""

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


def decide(
    entries: Sequence[CandidateScore], losses: Tensor, *, criterion: Proper, folds: int, weight: Tensor | None = None
) -> CrossValidation:
    """Apply the rule to ``losses`` [candidates, N]; NaN marks a fit that failed."""
    rows = losses.shape[1]
    # Differences to a candidate with finite losses: an infinite loss of no calibration must not affect the others.
    finite = losses.isfinite().all(1).nonzero().squeeze(1).tolist()
    differences = losses - losses[finite[0] if finite else 0]
    if weight is not None:
        return _decided(entries, rows, weighted_pairs(differences, weight.cpu()), criterion=criterion, folds=folds)
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

    total, product = sums.tolist(), products.tolist()

    def pair(place: int, best: int) -> tuple[float, float]:
        mean = (total[place] - total[best]) / rows
        square = (product[place][place] + product[best][best] - 2 * product[place][best]) / rows
        variance = max(0.0, square - mean * mean) * rows / max(1, rows - 1)
        return mean, math.sqrt(variance / rows)

    return _decided(entries, rows, pair, criterion=criterion, folds=folds, left_out=left_out)


def weighted_pairs(differences: Tensor, weight: Tensor) -> Callable[[int, int | None], tuple[float, float]]:
    """Mean and standard error of paired differences of weighted rows.

    The standard error is that of a weighted mean of independent samples. It does not depend on the scale of the
    weights, and equal weights give the usual standard error.
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
            # The difference is NaN if a loss is infinite; the finite loss is then lower.
            if mean < -error / 2 or (math.isinf(loss(chosen)) and math.isfinite(loss(place))):
                chosen = place
    for place, entry in enumerate(entries):
        mean, error = pair(place, chosen)
        entries[place] = replace(entry, difference=mean, error=error)
    return CrossValidation(criterion, tuple(entries), chosen, best, folds, rows, tuple(left_out))
