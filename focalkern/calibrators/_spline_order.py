"""The fit of the scalar curve with the constraint that it keeps the order of the classes of every row."""

import functools

import numpy as np
import torch
from torch import Tensor

from focalkern.calibrators._spline_curve import NaturalSpline
from focalkern.calibrators._spline_fit import Derivatives, Fit, Map, curve_derivatives
from focalkern.calibrators._spline_rows import SplineRows

__all__ = ["fit_ordered", "keeps_order", "order_conditions"]

_MARGIN = 1e-3
"""The constraints hold for h - 0.001 log q, so that the order is strict and rounding cannot change it."""

_POINTS, _MIRRORED = 240, 160
_CHECKED = 2000
_PASSES = 10
_DONE = 1e-7  # of J / W
_ROUNDING = 1e-13  # a constraint that is violated by less holds


@functools.lru_cache(maxsize=4)  # the folds of a cross-validation share their spline
def order_conditions(spline: NaturalSpline, n_classes: int, points: int, mirrored: int) -> tuple[Tensor, Tensor]:
    r"""Rows A [n, m + 1] and c [n] such that A (a, f) + c >= 0 keeps the order of the classes of every row.

    The score of a class is :math:`h(u) = -(1 + a)\, \text{softplus}(-u) + f(u)` of its log-odds. The probabilities of
    two classes of a row sum to at most 1, so the order is kept if h increases on u <= 0 and h(u) >= h(-u) for u > 0.
    With two classes, the log-odds are opposite, and the second condition suffices.
    """
    u, sizes = _points(spline, points, mirrored)
    # h(u) as rows of factors of (a, f); that of a is also the constant.
    of_score = torch.cat([-torch.nn.functional.softplus(-u).unsqueeze(1), spline.rows(u)], 1)
    of_left, of_right, of_mirrored = of_score.split(sizes)
    rows = [of_left.diff(dim=0)] if n_classes > 2 else []
    rows.append(of_right - of_mirrored)
    # Beyond the last points, the slopes of the linear tails decide.
    of_a = torch.ones(1, 1, dtype=torch.float64)
    start, end = spline.basis[0, 1:2], spline.basis[-1, 1:2]
    tails = torch.cat([torch.cat([of_a, start], 1), torch.cat([of_a, start + end], 1)])
    rows.append(tails if n_classes > 2 else tails[1:])
    conditions = torch.cat(rows)
    constant = (1 - _MARGIN) * conditions[:, 0]
    size = conditions.abs().sum(1)
    return conditions / size.unsqueeze(1), constant / size


def _points(spline: NaturalSpline, points: int, mirrored: int) -> tuple[Tensor, list[int]]:
    """The u of the conditions: u <= 0, u > 0 and the latter mirrored; and their numbers."""
    first, last = float(spline.knots[0]), float(spline.knots[-1])
    low = min(first - 3, -1.0)
    left = torch.linspace(low, 0, points + 1, dtype=torch.float64)
    right = torch.linspace(0, max(-low, last + 3, 1.0), mirrored + 1, dtype=torch.float64)[1:]
    return torch.cat([left, right, -right]), [points + 1, mirrored, mirrored]


@functools.lru_cache(maxsize=4)
def _checked(spline: NaturalSpline) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces, offsets and softplus(-u) of the points of :func:`keeps_order`."""
    u, _ = _points(spline, _CHECKED, _CHECKED)
    piece, offset = spline.locate(u)
    return piece.numpy(), offset.numpy(), torch.nn.functional.softplus(-u).numpy()


def keeps_order(spline: NaturalSpline, n_classes: int, curve: Tensor) -> bool:
    """Whether :func:`order_conditions` hold at many points, by the scores at these points."""
    piece, offset, falls = _checked(spline)
    factor = 1 - _MARGIN + float(curve[0])
    coefficients = spline.coefficients(curve[1:]).numpy()
    start, end = factor + coefficients[0, 1], factor + coefficients[0, 1] + coefficients[-1, 1]
    if end < 0 or (start < 0 and n_classes > 2):
        return False
    c0, c1, c2, c3 = coefficients.T
    scores = c3.take(piece)
    for column in (c2, c1, c0):
        scores *= offset
        scores += column.take(piece)
    scores -= factor * falls
    left, right, mirrored = np.split(scores, (_CHECKED + 1, 2 * _CHECKED + 1))
    return (n_classes == 2 or bool((left[1:] >= left[:-1]).all())) and bool((right >= mirrored).all())


def fit_ordered(rows: SplineRows, free: Fit) -> Fit:
    """The optimum under the constraints, by sequential quadratic programming from the free optimum."""
    conditions, constant = order_conditions(rows.spline, rows.n_classes, _POINTS, _MIRRORED)
    curve, here, passes = free.map.curve, free.derivatives, free.passes
    if bool((conditions @ curve + constant < 0).any()):
        if here is None:
            here, passes = curve_derivatives(rows, free.map), passes + 1
        for turn in range(_PASSES):
            step = _quadratic_program(here, curve, conditions, constant) - curve
            there = curve_derivatives(rows, Map(curve + step))
            passes += 1
            # A full step may raise the objective; near the optimum, the rise is only rounding.
            while turn > 0 and there.value > here.value + _DONE:
                step = step / 2
                there = curve_derivatives(rows, Map(curve + step))
                passes += 1
            done = turn > 0 and abs(here.value - there.value) < _DONE
            if not done or there.value <= here.value:
                curve, here = curve + step, there
            if done:
                break
    if not keeps_order(rows.spline, rows.n_classes, curve):
        fine, constant = order_conditions(rows.spline, rows.n_classes, _CHECKED, _CHECKED)
        moved = fine @ curve
        # Shrink the curve by the largest factor for which constant + factor * moved >= 0; the constant is positive.
        factor = float((constant / -moved).where(moved < 0, torch.inf).min())
        curve = curve * min(1.0, factor) * (1 - 1e-9)
        here, passes = curve_derivatives(rows, Map(curve)), passes + 1
    return Fit(Map(curve), free.value if here is None else here.value, passes, free.converged, here)


def _quadratic_program(here: Derivatives, at: Tensor, conditions: Tensor, constant: Tensor) -> Tensor:
    """The minimum of the quadratic model at ``at`` under the constraints, to rounding.

    In the coordinates of a root of the Hessian, it is the point of a polyhedron nearest to the free minimum. The
    residual of non-negative least squares gives this point.

    Source: Lawson & Hanson, Solving Least Squares Problems, 1974, algorithm 23.27.
    """
    hessian, normals = here.hessian.numpy(), conditions.numpy()
    root, free = np.linalg.cholesky(hessian), at.numpy() - np.linalg.solve(hessian, here.gradient.numpy())
    sides = np.vstack([np.linalg.solve(root, normals.T), -(normals @ free + constant.numpy())])
    unit = np.zeros(len(sides))
    unit[-1] = 1
    residual = sides @ _non_negative(sides, unit) - unit
    return torch.from_numpy(free - np.linalg.solve(root.T, residual[:-1] / residual[-1]))


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 with the smallest norm of ``matrix @ x - target``.

    Source: Lawson & Hanson, Solving Least Squares Problems, 1974, algorithm 23.10.
    """
    x, positive = np.zeros(matrix.shape[1]), np.zeros(0, dtype=np.int64)
    for _ in range(10 * len(matrix)):
        slopes = matrix.T @ (target - matrix @ x)
        slopes[positive] = 0
        if slopes.max() <= _ROUNDING:
            break
        positive = np.append(positive, slopes.argmax())
        while True:
            before, after = x[positive], np.linalg.lstsq(matrix[:, positive], target, rcond=None)[0]
            if (after > 0).all():
                x[positive] = after
                break
            shares = np.divide(before, before - after, out=np.ones_like(after), where=after <= 0)
            first = shares.argmin()  # the first to become 0 on the way
            x[positive] = before + shares[first] * (after - before)
            x[positive[first]] = 0
            positive = np.delete(positive, first)
    return x
