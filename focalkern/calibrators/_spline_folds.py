"""Cross-validation of spline scalings with shared features, each fitted to all rows and without each fold."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from focalkern.calibrators._fitted import Layout
from focalkern.calibrators._row_source import RowSource
from focalkern.calibrators._spline import SplineScaling
from focalkern.calibrators._spline_family import Family, fit_family
from focalkern.calibrators._spline_rows import SplineRows
from focalkern.ops.spline_map import map_by_pieces

__all__ = ["FoldOf", "Predict", "SplineFolds", "why_not"]

FoldOf = Callable[[Tensor], Tensor]
"""Maps row indices to folds."""

Predict = Callable[[Tensor], Tensor]
"""Maps input [n, C] float64 to log-probabilities."""

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
        fold_of: maps row indices to folds.
        folds: number of folds; 0 for no cross-validation.
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
        self._parts: list[Family] = []
        for k in range(folds):
            kept = source.select(lambda number, k=k: fold_of(number) != k)  # type: ignore[misc]
            self._parts.append(fit_family(self._all.on(kept), members, self._family))

    def fitted(self, candidate: SplineScaling, class_counts: Tensor) -> SplineScaling:
        """A copy of the candidate fitted to all rows; ``class_counts`` [C] is the number of rows per class."""
        fresh = copy.deepcopy(candidate)
        source = self._all.source
        fitted = fresh._fitted(self._all, self._family[fresh._member()])
        fresh._become(fitted, Layout(source.n_classes), n_samples=source.n_rows)
        fresh.warnings_ = tuple(fresh._warnings_of(class_counts))
        return fresh

    def held_out(self, candidate: SplineScaling, k: int) -> Predict:
        """The fit without fold k, a function of input [n, C] float64 to log-probabilities."""
        map, rows = self._parts[k][candidate._member()].map, self._all
        parameters = torch.tensor([1 + float(map.curve[0]), rows.temperature, rows.floor], dtype=torch.float64)
        # The computation of SplineLogProbs with the knots that all folds share.
        of_curve = (rows.spline.knots, rows.spline.coefficients(map.curve[1:]))
        knots, coefficients = (one.to(rows.device) for one in of_curve)
        is_probs = candidate.input_kind == "probs"
        keep_zeros = rows.masks and not is_probs

        def predict(input: Tensor) -> Tensor:
            arguments = (input, parameters, knots, coefficients, map.weight, map.bias, is_probs, keep_zeros)
            return map_by_pieces(*arguments, keep_order=False, log=True)

        return predict
