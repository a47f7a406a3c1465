"""Cross-validation of spline scalings with shared features, each fitted to all rows and without each fold."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from focalkern.calibrators._fitted import Layout
from focalkern.calibrators._row_source import RowSource
from focalkern.calibrators._spline import SplineScaling
from focalkern.calibrators._spline_family import family_sums, fit_family
from focalkern.calibrators._spline_fit import Predict, predictor, row_losses
from focalkern.calibrators._spline_rows import SplineRows

__all__ = ["FoldOf", "Predict", "SplineFolds", "why_not"]

FoldOf = Callable[[Tensor], Tensor]
"""Maps row indices to folds."""

# Bound of N C^2: with a larger value, the fit of a matrix takes minutes.
_MOST_OF_A_MATRIX = 5e9


def why_not(candidate: SplineScaling, n_rows: float, n_samples: int, n_classes: int) -> str:
    """The reason not to try a matrix on this many rows, as the end of a sentence that begins with its name."""
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
    """Fits of spline scalings with one penalty to all rows and without each fold.

    All fits use the features (temperature, floor, knots) of all rows. Of these, only the temperature uses the
    labels. Each fold starts from the fit to all rows.

    Args:
        source: all rows.
        candidates: spline scalings with one ``penalty`` and one ``input_kind``.
        fold_of, folds: maps row indices to folds; number of folds. Each fit outside a fold starts from the sums at the
            fit to all rows, which are the totals of all folds without those of the fold.
        temperature: result of :func:`robust_temperature` of all rows, if known.
    """

    def __init__(
        self,
        source: RowSource,
        candidates: Sequence[SplineScaling],
        fold_of: FoldOf,
        folds: int,
        temperature: float | None = None,
    ) -> None:
        first = candidates[0]
        members = {candidate._member() for candidate in candidates}
        self._all = SplineRows.of(source, first.input_kind, float(first.penalty), temperature)
        self._family = fit_family(self._all, members)
        part = self._all.fold_by_fold(fold_of, folds)
        self._inside = [part(k, True) for k in range(folds)] if self._all.kept else []
        of_folds = [family_sums(part(k, True), self._family) for k in range(folds)]
        of_all = {name: torch.stack([one[name] for one in of_folds]).sum(0) for name in of_folds[0]} if folds else {}
        self._parts = []
        for k, own in enumerate(of_folds):
            others = {name: of_all[name] - sums for name, sums in own.items()}
            self._parts.append(fit_family(part(k, False), members, self._family, others))

    def fitted(self, candidate: SplineScaling, class_counts: Tensor) -> SplineScaling:
        """A copy of the candidate fitted to all rows; ``class_counts`` [C] is the number of rows per class."""
        fresh = copy.deepcopy(candidate)
        source = self._all.source
        fitted = fresh._fitted(self._all, self._family[fresh._member()])
        fresh._become(fitted, Layout(source.n_classes), n_samples=source.n_rows)
        fresh.warnings_ = tuple(fresh._warnings_of(class_counts))
        return fresh

    def losses(self, candidate: SplineScaling, k: int) -> Tensor | None:
        """[2, n]: NLL and Brier score of each row of fold k by the fit without it, from kept features.

        None if the features are not kept: then :meth:`held_out` gives the log-probabilities of the rows.
        """
        map = self._parts[k][candidate._member()].map
        return row_losses(self._inside[k], map) if self._inside else None

    def held_out(self, candidate: SplineScaling, k: int) -> Predict:
        """The fit without fold k, a function of input [n, C] float64 to log-probabilities."""
        return predictor(self._all, self._parts[k][candidate._member()].map)
