"""Cross-validation of spline scalings: fitted together, in full and without each fold, from shared features."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._spline import SplineScaling
from focalkern.calibrators._spline_family import Family, fit_family
from focalkern.calibrators._spline_module import SplineLogProbs
from focalkern.calibrators._spline_rows import SplineRows

__all__ = ["SplineFolds", "why_not"]

# More would take minutes: N C^2.
_MOST_OF_A_MATRIX = 5e9


def why_not(candidate: SplineScaling, n_rows: float, n_samples: int, n_classes: int) -> str:
    """Why a matrix is not worth a trial on so many rows, as the end of a sentence that begins with its name."""
    if candidate.kind != "matrix":
        return ""
    if n_classes < 3:
        return "adds nothing to spline vector scaling with 2 classes"
    if n_rows < 2 * n_classes:
        return f"needs at least 2 rows per class, {2 * n_classes}"
    if n_samples * n_classes**2 > _MOST_OF_A_MATRIX:
        return f"would take minutes on {n_samples:,} rows of {n_classes:,} classes"
    return ""


class SplineFolds:
    """Fits of spline scalings with one penalty to all rows, and to those without each fold.

    The features (temperature, floor, knots) are those of all rows: they carry one number that the labels decide. Each
    fold starts from the fit to all rows.

    Args:
        rows: all of them.
        candidates: spline scalings with one ``penalty`` and one ``input_kind``.
        fold: [N] int64, the fold of every row.
        folds: how many there are; 0 for none.
    """

    def __init__(self, rows: FitData, candidates: Sequence[SplineScaling], fold: Tensor, folds: int) -> None:
        self._rows, self._fold = rows, fold.to(rows.input.device)
        first = candidates[0]
        members = {candidate._member() for candidate in candidates}
        self._all = SplineRows.of(rows, first.input_kind, float(first.penalty))
        self._family = fit_family(self._all, members)
        self._parts: list[Family] = [
            fit_family(self._all[self._fold != k], members, self._family) for k in range(folds)
        ]

    def fitted(self, candidate: SplineScaling) -> SplineScaling:
        """A copy that is fitted to all rows."""
        fresh = copy.deepcopy(candidate)
        fresh._known = fresh._fitted(self._all, self._family[fresh._member()])
        try:
            return fresh.fit_quietly(self._rows.input, self._rows.target, self._rows.weight)
        finally:
            del fresh._known

    def held_out(self, candidate: SplineScaling, k: int) -> Tensor:
        """[n, C] log-probabilities of the rows of fold k, by the fit without them."""
        map, rows = self._parts[k][candidate._member()].map, self._all
        module = SplineLogProbs(
            rows.temperature,
            rows.floor,
            float(map.curve[0]),
            rows.spline.knots,
            map.curve[1:],
            map.weight,
            map.bias,
            candidate.input_kind,
            masks=rows.masks,
        )
        log_probs: Tensor = module.to(rows.input.device)(rows.input[self._fold == k].to(torch.float64))
        return log_probs
