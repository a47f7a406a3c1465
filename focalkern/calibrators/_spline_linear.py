"""Fits of the slopes, intercepts and matrices of spline scaling: preconditioned L-BFGS."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from focalkern.calibrators._lbfgs import Pairs, Vector, minimise, product, tensor, vector
from focalkern.calibrators._spline_curvature import linear_hessian, of_vector, softmax_of
from focalkern.calibrators._spline_curve import NaturalSpline
from focalkern.calibrators._spline_fit import (
    Fit,
    Map,
    added,
    arguments,
    blocks_in_memory,
    joined,
    parts_of,
    squares_of,
    strengths,
)
from focalkern.calibrators._spline_rows import SplineRows
from focalkern.ops.spline_sums import spline_sums_for

__all__ = [
    "LBFGS_DONE",
    "LBFGS_DONE_IN_A_FOLD",
    "LBFGS_STEPS",
    "Preconditioner",
    "fit_linear",
    "linear_sums",
    "precondition",
]

# With more classes, the Hessian takes longer than the evaluations that it saves.
_FEW_CLASSES = 15

_PRODUCT_ROWS, _PRODUCT_CLASSES = 256, 256

LBFGS_STEPS = 300
LBFGS_DONE = 1e-4  # of the largest entry of the preconditioned gradient
LBFGS_DONE_IN_A_FOLD = 3e-4
# With a root, the bound is on the length of the gradient and 3 times as large, because the largest entry depends on the
# order of the classes. The square of the length is twice the distance to the optimal value.
_OF_LENGTH = 3.0


class LinearObjective:
    """J / W with its gradient in the parameters of a vector or matrix, as one vector: the curve, v or the rows of D, b.

    Args:
        rows: the rows. If they are in memory, the x of a matrix are kept between evaluations.
        like: parameters with the shapes of these.
    """

    def __init__(self, rows: SplineRows, like: Map) -> None:
        assert like.weight is not None
        self._rows, self._shape = rows, like.weight.shape
        self._n_curve, self._n_before_bias = len(like.curve), len(like.curve) + like.weight.numel()
        self._blocks = None if like.weight.dim() == 1 or rows.takes_matrix else blocks_in_memory(rows)

    @functools.cached_property
    def _penalty(self) -> "Scales":
        """The quadratic form of the penalty of J in the curve, and its factors of the other squares."""
        rows = self._rows
        return _penalty_of(rows.spline, rows.factor, rows.n_classes, len(self._shape) == 2, rows.device)

    def point(self, map: Map) -> Vector:
        assert map.weight is not None and map.bias is not None
        return vector(torch.cat([map.curve.to(self._rows.device), map.weight.reshape(-1), map.bias]))

    def map(self, point: Vector) -> Map:
        n, end = self._n_curve, self._n_before_bias
        curve, weight, bias = point[:n], point[n:end].reshape(self._shape), point[end:]
        return Map(tensor(curve).cpu(), tensor(weight), tensor(bias))

    def __call__(self, point: Vector) -> tuple[float, Vector]:
        return self.of_sums(point, self.sums(self.map(point)))

    def sums(self, map: Map) -> Tensor:
        """The summed loss without penalties and its gradient, as one tensor."""
        rows, found = self._rows, []
        for part, x, extra in parts_of(rows, map, self._blocks):
            sums_of = spline_sums_for(part.input).spline_linear_sums
            value, of_curve, of_classes, of_one, slopes = sums_of(*arguments(rows, part, map, extra), x is not None)
            of_linear = of_classes if x is None else _sum_of_products(slopes, x)
            found.append(joined(value, of_curve, of_linear, of_one, like=of_one))
        return rows.source.add_up(added(found, 1 + self._n_before_bias + rows.n_classes, rows.device))

    def of_sums(self, point: Vector, sums: Tensor) -> tuple[float, Vector]:
        """Value and gradient from :meth:`sums` at a point."""
        sums, pull, weight_sum = vector(sums), self._penalty.step(point), self._rows.weight_sum
        return float(sums[0] + product(point, pull)) / weight_sum, (sums[1:] + 2 * pull) / weight_sum


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """``left.T @ right`` [C, C], with the same bits for any number of threads.

    For few classes MKL divides the sum over rows among its threads; sums over blocks are too short for that.
    """
    n_rows, n_classes = left.shape
    whole = n_rows - n_rows % _PRODUCT_ROWS if left.is_cpu and n_classes <= _PRODUCT_CLASSES else 0
    found = left[whole:].T @ right[whole:]
    if whole:
        of_left, of_right = (one[:whole].reshape(-1, _PRODUCT_ROWS, n_classes) for one in (left, right))
        found += torch.bmm(of_left.mT, of_right).sum(0)
    return found


class Preconditioner(Protocol):
    """Maps a point r linearly to a step in all parameters, and the gradient in the parameters to the gradient in r."""

    def step(self, point: Vector) -> Vector: ...

    def gradient(self, slopes: Vector) -> Vector: ...


@dataclass(frozen=True)
class Scales:
    """A preconditioner: a root of the inverse Hessian for the curve, one number for each other parameter.

    ``others`` has any numbers in the places of the curve.
    """

    curve: Vector
    others: Vector

    @classmethod
    def of(cls, curve: Tensor, others: Tensor) -> Self:
        return cls(vector(curve), vector(torch.cat([others.new_zeros(len(curve)), others])))

    def step(self, point: Vector) -> Vector:
        return self._product(self.curve, point)

    def gradient(self, slopes: Vector) -> Vector:
        return self._product(self.curve.T, slopes)

    def _product(self, curve: Vector, point: Vector) -> Vector:
        found, n = self.others * point, len(curve)
        found[:n] = curve @ point[:n]
        return found


@functools.lru_cache(maxsize=4)  # the folds of a cross-validation share their spline
def _penalty_of(spline: NaturalSpline, factor: float, n_classes: int, is_matrix: bool, device: torch.device) -> Scales:
    return Scales.of(factor * spline.penalty.to(device), factor * squares_of(n_classes, is_matrix).to(device))


@dataclass(frozen=True)
class Root:
    """A preconditioner: a root [P, P] of the inverse Hessian in all parameters, and its transpose."""

    root: Vector
    transposed: Vector

    def step(self, point: Vector) -> Vector:
        return product(self.root, point)

    def gradient(self, slopes: Vector) -> Vector:
        return product(self.transposed, slopes)


def precondition(rows: SplineRows, map: Map, hessian: Tensor, kinds: Sequence[str]) -> dict[str, Preconditioner]:
    """The preconditioners by kind, at the scalar optimum ``map`` with its Hessian in the curve: a root of the Hessian
    in all parameters for few classes, else scales."""
    n_curve, n_classes = len(map.curve), rows.n_classes
    if kinds and n_classes <= _FEW_CLASSES:
        whole = linear_hessian(rows, map, hessian)
        places = of_vector(n_curve, n_classes).to(whole.device)
        of_vectors = whole.index_select(0, places).index_select(1, places)
        wanted = {kind: of_vectors if kind == "vector" else whole for kind in kinds}
        found = {kind: _root(one) for kind, one in wanted.items()}
        roots: dict[str, Preconditioner] = {kind: one for kind, one in found.items() if one is not None}
        if len(roots) == len(kinds):
            return roots
    return {kind: _scales(rows, map, hessian, kind) for kind in kinds}


def _root(hessian: Tensor) -> Root | None:
    """The root of the Hessian; None if rounding made the Hessian indefinite."""
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if bool(failed):
        return None
    one = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    transposed = torch.linalg.solve_triangular(factor, one, upper=False)
    return Root(vector(transposed.T.contiguous()), vector(transposed))


def _scales(rows: SplineRows, map: Map, hessian: Tensor, kind: str) -> Scales:
    """Scales at ``map``, with the Hessian in the curve."""
    n_classes, device = rows.n_classes, rows.device
    root = torch.linalg.inv(torch.linalg.cholesky(hessian)).T
    shape = (n_classes,) if kind == "vector" else (n_classes, n_classes)
    curvature = torch.zeros(shape, dtype=torch.float64, device=device)
    of_one = torch.zeros(n_classes, dtype=torch.float64, device=device)
    for block in rows.blocks():
        x = rows.log_probs(block)
        p = softmax_of(rows, block, map, x)
        p = p * (1 - p) * (block.weight / rows.weight_sum).unsqueeze(1)
        of_one += p.sum(0)
        square = x.square()
        curvature += (p * square).sum(0) if kind == "vector" else _sum_of_products(p, square)
    curvature, of_one = rows.source.add_up(curvature), rows.source.add_up(of_one)
    others = torch.cat([curvature.reshape(-1), of_one]).add_(strengths(rows, kind == "matrix"), alpha=2)
    return Scales.of(root.to(device), others.rsqrt_())


def fit_linear(
    rows: SplineRows,
    start: Map,
    scales: Preconditioner,
    done: float = LBFGS_DONE,
    pairs: Pairs | None = None,
    brief: bool = False,
    sums: Tensor | None = None,
) -> Fit:
    """Preconditioned L-BFGS in all parameters of a vector or matrix, from ``start``, which has weight and bias.

    ``pairs`` are the curvature pairs of a fit with the same preconditioner to nearly the same rows; ``brief`` as for
    :func:`minimise`; ``sums`` is the result of :func:`linear_sums` at ``start``, if known.
    """
    objective = LinearObjective(rows, start)
    origin = objective.point(start)

    def scaled(point: Vector) -> tuple[float, Vector]:
        return preconditioned(*objective(origin + scales.step(point)))

    def preconditioned(value: float, slopes: Vector) -> tuple[float, Vector]:
        return value, scales.gradient(slopes)

    first = None if sums is None else preconditioned(*objective.of_sums(origin, sums))
    norm, done = (2.0, _OF_LENGTH * done) if isinstance(scales, Root) else (torch.inf, done)
    found = minimise(scaled, 0 * origin, done=done, steps=LBFGS_STEPS, pairs=pairs, norm=norm, brief=brief, first=first)
    optimum = objective.map(origin + scales.step(found.point))
    return Fit(optimum, found.value, found.evaluations, found.converged, pairs=found.pairs)


def linear_sums(rows: SplineRows, map: Map) -> Tensor:
    """The summed loss without penalties and its gradient in the curve, v or the rows of D, and b, as one tensor."""
    return LinearObjective(rows, map).sums(map)
