"""Cross-validation of candidates that are fitted by sums over rows; no process needs all rows in memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from focalkern._types import Proper
from focalkern.calibrators._candidates import keeps_predictions, log_proba
from focalkern.calibrators._cross_validation import ZEROS, FoldFits, fits_by_sums, zeros_are_possible
from focalkern.calibrators._inputs import losses_of
from focalkern.calibrators._row_source import MemoryRows, RowSource
from focalkern.calibrators._selection import CandidateScore, CrossValidation, decide_from_sums
from focalkern.calibrators._spline_folds import FoldOf, Predict

__all__ = ["FoldedFit", "HeldOut", "cross_validate_source", "fit_in_folds", "held_out"]


@dataclass(frozen=True)
class FoldedFit:
    """A candidate, fitted to all rows and to all rows except each fold.

    Attributes:
        calibrator: fitted to all rows; None if the candidate is excluded.
        predict: for each fold, the fit without its rows, a function of input [n, C] float64 to log-probabilities.
        excluded: why it cannot be chosen, as the end of a sentence that begins with its name; empty if it can.
    """

    calibrator: Any
    predict: tuple[Predict, ...] = ()
    excluded: str = ""


def fit_in_folds(
    source: RowSource, candidates: Mapping[str, Any], fold_of: FoldOf, folds: int
) -> tuple[dict[str, FoldedFit], list[str]]:
    """Fits of robust temperature scaling and spline scalings among ``candidates``, and the names of the others.

    A spline matrix needs all rows in memory, because its fit takes many passes.
    """
    no_matrix = "" if isinstance(source, MemoryRows) else "needs all rows in memory"
    fits = FoldFits(source, candidates, fold_of, folds, no_matrix)
    found: dict[str, FoldedFit] = {}
    others = []
    for name, candidate in candidates.items():
        excluded = fits.why_not(candidate)
        if excluded:
            found[name] = FoldedFit(None, excluded=excluded)
        elif fits_by_sums(candidate):
            fitted = fits.fitted(candidate)
            found[name] = FoldedFit(fitted, tuple(fits.held_out(candidate, k) for k in range(folds)))
        else:
            others.append(name)
    return found, others


@dataclass(frozen=True)
class HeldOut:
    """Sums over rows of the losses l of K candidates; the fit for a row has not seen the row's fold.

    Attributes:
        losses: [K] float64, sums of l.
        sums, products: [K] and [K, K], of d and d d', where d is l minus the loss of a candidate with finite losses.
        brier: [K, 2], sums of b and b^2, where b is the Brier score minus the Brier score of the first candidate.
    """

    losses: Tensor
    sums: Tensor
    products: Tensor
    brier: Tensor


def held_out(
    source: RowSource, predict: Sequence[Sequence[Predict]], fold_of: FoldOf, folds: int, criterion: Proper, finite: int
) -> HeldOut:
    """The sums of the losses of every row, in one pass.

    Args:
        source: the rows.
        predict: [K][folds]; the first candidate is no calibration.
        fold_of, folds: maps row indices to folds; number of folds.
        criterion: the loss.
        finite: index of a candidate whose losses are finite.
    """
    n = len(predict)
    losses, sums = torch.zeros(2, n, dtype=torch.float64)
    products, brier = torch.zeros(n, n, dtype=torch.float64), torch.zeros(n, 2, dtype=torch.float64)
    for part in source.parts():
        for block in part.blocks():
            fold = fold_of(block.number)
            for k in range(folds):
                rows = block.at(fold == k)
                if not len(rows.target):
                    continue
                wide = rows.input.to(torch.float64)
                log_probs = [torch.as_tensor(of_candidate[k](wide)) for of_candidate in predict]
                both = [losses_of(one, rows.target, (criterion, "brier")) for one in log_probs]
                loss, score = torch.stack(both, 1).cpu()
                difference = loss - loss[finite]
                losses += loss.sum(1)
                sums += difference.sum(1)
                products += difference @ difference.T
                score = score - score[0]
                brier += torch.stack([score.sum(1), score.square().sum(1)], 1)
    of = source.add_up(torch.cat([losses, sums, products.reshape(-1), brier.reshape(-1)]))
    losses, sums, products, brier = of.split([n, n, n * n, 2 * n])
    return HeldOut(losses, sums, products.reshape(n, n), brier.reshape(n, 2))


def cross_validate_source(
    source: RowSource,
    candidates: Mapping[str, Any],
    none: Any,
    fold_of: FoldOf,
    folds: int,
    *,
    criterion: Proper,
    others: Mapping[str, FoldedFit] | None = None,
) -> CrossValidation:
    """:func:`cross_validate` for rows of equal weights, which may be in files or belong to several processes.

    Args:
        source: the rows.
        candidates: as for :func:`cross_validate`. Only robust temperature scaling, spline scaling and the entries of
            ``others`` are compared.
        none: no calibration, fitted.
        fold_of, folds: maps row indices to folds; number of folds.
        criterion: the loss.
        others: candidates that are already fitted.
    """
    given = dict(others or {})
    tried, unknown = fit_in_folds(
        source, {name: one for name, one in candidates.items() if name not in ("none", *given)}, fold_of, folds
    )
    of_none = FoldedFit(
        none,
        (lambda input: log_proba(none, input),) * folds,
        excluded=ZEROS if len(candidates) > 1 and zeros_are_possible(source, none.input_kind) else "",
    )
    fits = {"none": of_none, **{name: given.get(name) or tried[name] for name in candidates if name in given | tried}}
    able = [name for name, one in fits.items() if one.predict]
    finite = next((name for name in reversed(able) if name in tried), "none")  # finite by their floor
    n, rows = len(fits), source.n_rows
    losses, sums = torch.full((2, n), math.nan, dtype=torch.float64)
    products, brier = torch.full((n, n), math.nan, dtype=torch.float64), torch.full((n, 2), math.nan).double()
    if folds > 1:
        predict = [fits[name].predict for name in able]
        found = held_out(source, predict, fold_of, folds, criterion, able.index(finite))
        places = torch.tensor([list(fits).index(name) for name in able])
        losses[places], sums[places], brier[places] = found.losses, found.sums, found.brier
        products[places.unsqueeze(1), places] = found.products
    entries = [
        CandidateScore(
            name,
            one.calibrator,
            float(losses[place]) / rows,
            excluded=one.excluded,
            keeps_predictions=name == "none" or keeps_predictions(candidates[name]),
        )
        for place, (name, one) in enumerate(fits.items())
    ]
    left_out = [f"{name}, which needs all rows in memory" for name in unknown]
    decided = decide_from_sums(
        entries, rows, sums, products, criterion=criterion, folds=folds if folds > 1 else 0, left_out=left_out
    )
    mean, square = (brier[decided.chosen] / rows).tolist()
    return replace(decided, brier=(mean, math.sqrt(max(0.0, square - mean**2) / max(1, rows - 1))))
