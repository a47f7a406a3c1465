"""Spline scaling: the calibration map as a smooth curve fitted to the rows, optionally with a vector or matrix."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import flag, number
from focalkern._types import InputKind
from focalkern.calibrators._document import as_array, as_count, as_number
from focalkern.calibrators._fit_batches import FitsBatches
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._parameters import LOGITS
from focalkern.calibrators._robust_temperature import temperature_from_json
from focalkern.calibrators._row_source import RowSource, rows_of
from focalkern.calibrators._spline_curve import NaturalSpline
from focalkern.calibrators._spline_family import fit_family
from focalkern.calibrators._spline_features import KNOT_GAP, LEAST_KNOTS, MOST_KNOTS
from focalkern.calibrators._spline_fit import Fit, curve_derivatives, predictor
from focalkern.calibrators._spline_linear import LBFGS_STEPS
from focalkern.calibrators._spline_module import MapArguments, SplineLogProbs
from focalkern.calibrators._spline_order import keeps_order
from focalkern.calibrators._spline_rows import SplineRows
from focalkern.calibrators._temperature_bound import justified_confidence, limit_warnings
from focalkern.calibrators._warnings import UNMASKED, unseen_classes
from focalkern.ops.spline_map import map_by_pieces

__all__ = ["SplineKind", "SplineScaling"]

SplineKind = Literal["scalar", "vector", "matrix"]
SPLINE_KINDS: tuple[SplineKind, ...] = get_args(SplineKind)

# Least sum of weights: with fewer rows, the floor and the penalties determine the fit.
_FEW_ROWS = 10

_Array = np.ndarray[Any, np.dtype[np.float64]]


class SplineScaling(FitsBatches):
    r"""Temperature scaling followed by a smooth curve fitted to the rows: a calibration map without a fixed form.

    .. math::
        \hat p = \text{softmax}\big((1 + a) x + f(u)\big), \qquad
        x = \log\big((1 - e)\, \text{softmax}(z / T) + e / C\big), \quad u = \text{logit}(\exp x)

    with one natural cubic spline f on at most ten knots for all classes. kind="vector" adds :math:`v_j x_j + b_j`,
    kind="matrix" adds :math:`\sum_k D_{jk} x_k + b_j`. The focal calibration map is the special case in which f is the
    curve of one gamma; temperature scaling is the special case f = 0. W is the number of rows (the sum of their
    weights) and e = 0.1 / (W + 1). The parameters minimise the summed NLL plus

    .. math::
        5 a^2 + 5 \int f''(u)^2 du + 5 s(f)^2 + 0.005\, \text{mean}(f)^2
            + 2 C \sum_j (D_{jj}^2 + b_j^2) + 2 C (C - 1) \sum_{j \ne k} D_{jk}^2

    (s is the slope of f; for a vector, :math:`v_j` replaces :math:`D_{jj}`). The problem is convex and has one optimum,
    which is finite on any rows. With few rows the penalties shrink the map towards temperature scaling. If every row is
    correct, the map is that of :class:`RobustTemperatureScaling`, which limits the confidence, and ``fit`` warns.

    A probability of 0 counts as e / C in x, so that the class stays possible: forests and nearest neighbours give 0
    because they have a finite number of votes. A logit of -inf marks an impossible class and gives exactly 0, unless a
    row of ``fit`` has its label there: then -inf is the logarithm of such a zero and counts as e / C too.

    Args:
        kind: ``"scalar"``, ``"vector"`` or ``"matrix"``. ``fit`` of a matrix keeps more than 20 matrices [C, C] of
            float64: over 2.5 GB for 4000 classes.
        keep_order: keep the order of the classes of every row, so that no predicted class changes. None is True for
            ``"scalar"`` and False for the other kinds, which cannot keep it. False fits the free curve, which may
            reverse a binary classifier that is wrong in more than half of the rows.
        penalty: a factor of all penalties.
        input_kind: ``"logits"`` or ``"probs"``; focalkern does not infer it. Without it ``fit`` rejects logits that
            look like probabilities.

    A row with weight w counts as w rows. Importance weights are not counts: first scale them to the sum
    :math:`(\sum w)^2 / \sum w^2`.

    ``fit`` sets the map: ``temperature_`` (T), ``floor_`` (e), ``slope_`` (a), ``knots_`` and ``values_`` of f [m],
    ``weight_`` (None, v [C] or D [C, C]), ``bias_`` (None or [C]) and ``masks_`` (whether a logit of -inf means
    probability 0). It also sets facts of the fit: ``best_value_`` (the mean NLL of its rows), ``objective_`` (the mean
    NLL plus the penalties divided by W), ``weight_sum_`` (W), ``n_changed_`` (rows of ``fit`` whose predicted class
    changed), ``passes_`` (passes over the rows), ``converged_``, ``degrees_of_freedom_`` (effective, of a and f) and
    ``covariance_`` of (a, f), [m + 1, m + 1].

    Raises:
        TypeError, ValueError, IndexError: in ``fit``, which checks the arguments of the constructor too.

    Source: arXiv 2511.03685 (Berta et al., AISTATS 2026) for x and the penalties of the matrix; Rahimi et al. 2020
    (arXiv 2003.06820) for maps that keep the order; Hastie & Tibshirani, Generalized Additive Models, 1990.

    Example:
        >>> labels = torch.arange(300) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(300) >= 240)) % 3]  # correct in 240 of 300 rows
        >>> calibrator = fk.SplineScaling().fit(logits, labels)
        >>> calibrator.predict_proba(logits[:1]).round(decimals=2)
        tensor([[0.8000, 0.1000, 0.1000]])
        >>> calibrator.n_changed_
        0
        >>> list(calibrator.as_module()(logits).shape)  # log-probabilities
        [300, 3]
    """

    method = "spline"

    temperature_: float
    floor_: float
    slope_: float
    knots_: _Array
    values_: _Array
    weight_: _Array | None
    bias_: _Array | None
    masks_: bool
    best_value_: float
    objective_: float
    weight_sum_: float
    n_changed_: int
    passes_: int
    converged_: bool
    degrees_of_freedom_: float
    covariance_: _Array

    _limit: float | None = None  # of the mean confidence, if no row of the fit is wrong

    def __init__(
        self,
        *,
        kind: SplineKind = "scalar",
        keep_order: bool | None = None,
        penalty: float = 1.0,
        input_kind: InputKind = LOGITS,
    ) -> None:
        self.kind = kind
        self.keep_order = keep_order
        self.penalty = penalty
        self.input_kind = input_kind

    # -- private ------------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._check_option("kind", SPLINE_KINDS)
        name = type(self).__name__
        if self.keep_order is not None:
            flag(name, "keep_order", self.keep_order)
        if self.keep_order and self.kind != "scalar":
            raise ValueError(
                f"{name}: keep_order must be None or False with kind={self.kind!r}, whose classes differ, got True"
            )
        if isinstance(self.penalty, bool | Tensor):
            raise TypeError(f"{name}: penalty must be a number, got {type(self.penalty).__name__}")
        if not 1e-6 <= number(name, "penalty", self.penalty) <= 1e6:
            raise ValueError(f"{name}: penalty must be from 1e-6 to 1e6, got {self.penalty}")

    def _keeps_predictions(self) -> bool:
        return self.kind == "scalar" and self.keep_order is not False

    def _module(self, fused: bool = True, *, one_logit: bool = False) -> SplineLogProbs:
        of = vars(self)
        names = ("knots_", "values_", "weight_", "bias_")
        knots, values, weight, bias = (
            None if of[name] is None else torch.from_numpy(of[name]).clone() for name in names
        )
        assert knots is not None and values is not None
        return SplineLogProbs(
            of["temperature_"],
            of["floor_"],
            of["slope_"],
            knots,
            values,
            weight,
            bias,
            self.input_kind,
            masks=of["masks_"],
            keep_order=self._keeps_predictions(),
            one_logit=one_logit,
            fused=fused,
        )

    def _fit(self, rows: FitData) -> dict[str, Any]:
        return self._fit_source(rows_of(rows))

    def _fit_source(self, source: RowSource) -> dict[str, Any]:
        of_rows = SplineRows.of(source, self.input_kind, float(self.penalty))
        return self._fitted(of_rows, fit_family(of_rows, (self._member(),))[self._member()])

    def _member(self) -> str:
        """The name of the fit in its family."""
        return "free" if self.kind == "scalar" and not self._keeps_predictions() else self.kind

    def _fitted(self, rows: SplineRows, found: Fit) -> dict[str, Any]:
        """The attributes that ``fit`` sets after a fit to ``rows``."""
        map, here, passes = found.map, found.derivatives, found.passes
        if here is None:
            here, passes = curve_derivatives(rows, map), passes + 1
        covariance = torch.linalg.inv(here.hessian)
        fitted = {
            "temperature_": rows.temperature,
            "floor_": rows.floor,
            "slope_": float(map.curve[0]),
            "knots_": rows.spline.knots.numpy(),
            "values_": map.curve[1:].numpy(),
            "weight_": None if map.weight is None else map.weight.cpu().numpy(),
            "bias_": None if map.bias is None else map.bias.cpu().numpy(),
            "masks_": rows.masks,
            "best_value_": here.nll,
            "objective_": here.value,
            "weight_sum_": rows.weight_sum,
            "passes_": passes,
            "converged_": found.converged,
            "degrees_of_freedom_": float((covariance @ (here.hessian - 2 * rows.quadratic)).trace()),
            "covariance_": (covariance / rows.weight_sum).numpy(),
            "_limit": justified_confidence(rows.weight_sum) if rows.no_errors else None,
        }
        changed = torch.zeros(1, dtype=torch.float64)
        if not self._keeps_predictions():
            predict = predictor(rows, map)
            for part in rows.source.parts():
                for block in part.blocks():
                    changed += (predict(block.input).argmax(-1) != block.input.argmax(-1)).sum().cpu()
        return {**fitted, "n_changed_": int(rows.source.add_up(changed))}

    def _warnings_of(self, class_counts: Tensor) -> list[str]:
        found = limit_warnings(self._limit)
        if self.weight_sum_ < _FEW_ROWS:
            found.append(
                f"{self.weight_sum_:g} row{'s' * (self.weight_sum_ != 1)} of fit may be too few for a spline (fit on "
                "more rows, or TemperatureScaling; importance weights should sum to (sum w)^2 / sum w^2)"
            )
        if self.kind != "scalar":
            found += unseen_classes(class_counts, self.classes_, "kind='scalar'")
        if self.input_kind == "logits" and not self.masks_:
            found.append(UNMASKED)
        if not self.converged_:
            found.append(f"the fit ended after {LBFGS_STEPS} steps short of its optimum (a larger penalty)")
        return found

    def _invalid_rows_are(self) -> Literal["rejected"]:
        return "rejected"

    def _made(self, device: torch.device) -> MapArguments:
        return self._module().to(device).arguments()

    def _apply(self, input: Tensor, *, log: bool) -> Tensor:
        arguments: MapArguments = self._kept(input.device)
        return map_by_pieces(input, *arguments, log=log)

    def _fitted_to_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        top = {name[:-1]: getattr(self, name) for name in ("temperature_", "floor_", "slope_", "masks_")}
        for name in ("knots_", "values_", "weight_", "bias_"):
            value = getattr(self, name)
            top[name[:-1]] = None if value is None else value.tolist()
        fit = {name[:-1]: getattr(self, name) for name in (*_FIT_NUMBERS, "n_changed_", "passes_", "converged_")}
        return top, {**fit, "covariance": self.covariance_.tolist()}

    def _fitted_from_json(self, document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
        n_classes = as_count("n_classes", fit["n_classes"])
        knots = _array(document, "knots")
        m = len(knots)
        if knots.ndim != 1 or not LEAST_KNOTS <= m <= MOST_KNOTS or not (np.diff(knots) >= KNOT_GAP - 1e-9).all():
            raise ValueError(
                f"expected {LEAST_KNOTS} to {MOST_KNOTS} knots that rise by {KNOT_GAP} at least, found {knots.tolist()}"
            )
        shapes: dict[str, tuple[int, ...]] = {"values": (m,)}
        if self.kind != "scalar":
            shapes |= {"weight": (n_classes,) * (2 if self.kind == "matrix" else 1), "bias": (n_classes,)}
        arrays = {name: _array(document, name) for name in shapes}
        arrays["covariance"] = _array(fit, "covariance")
        shapes["covariance"] = (m + 1, m + 1)
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(f"expected {name} {list(shape)}, found {list(arrays[name].shape)}")
        slope = as_number("slope", document["slope"])
        if abs(slope) > _LARGEST or not isinstance(fit["converged"], bool):
            raise ValueError(
                f"expected slope up to {_LARGEST:g} and converged true or false, found {slope} and {fit['converged']!r}"
            )
        if self._keeps_predictions():
            spline, curve = NaturalSpline(torch.from_numpy(knots)), torch.from_numpy(np.append(slope, arrays["values"]))
            if not keeps_order(spline, n_classes, curve * (1 - 1e-6)):  # the fit meets its constraints up to rounding
                raise ValueError("expected a curve that keeps the order of the classes, found another")
        return {
            **temperature_from_json(document),
            "slope_": slope,
            "knots_": knots,
            "weight_": None,
            "bias_": None,
            **{f"{name}_": array for name, array in arrays.items()},
            **{name: as_number(name, fit[name[:-1]]) for name in _FIT_NUMBERS},
            "n_changed_": as_count("n_changed", fit["n_changed"], least=0),
            "passes_": as_count("passes", fit["passes"]),
            "converged_": fit["converged"],
        }


_FIT_NUMBERS = ("best_value_", "objective_", "weight_sum_", "degrees_of_freedom_")

_LARGEST = 1e6
"""Bound of the parameters in a file: far above any fitted parameter, and below an overflow of the scores."""


def _array(document: Mapping[str, Any], name: str) -> _Array:
    array = as_array(name, document[name])
    if not (np.abs(array) <= _LARGEST).all():
        raise ValueError(f"expected {name} to be numbers up to {_LARGEST:g}, found others")
    return array
