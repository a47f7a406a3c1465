"""L-BFGS for a preconditioned problem. A search can start with the curvature pairs of a similar problem."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Minimum", "Pairs", "Vector", "minimise", "product", "tensor", "vector"]

Vector = Any
"""[n] float64: a NumPy array, whose operations take less time than torch's, or a tensor on another device."""

HISTORY = 10

_DECREASE, _CURVATURE = 1e-4, 0.9  # of the strong Wolfe conditions
_TRIALS = 25  # of one line search
_ROUNDING = 1e-14  # relative rounding error of a value

_SMALL = 8192  # elements of a matrix for which NumPy's BLAS starts no threads

_Trial = tuple[float, float, float]
"""The size of a step, the value at its end and the slope along it."""


@dataclass(frozen=True)
class Minimum:
    """The result of a search.

    Attributes:
        point: the last point.
        value: the value at the last point.
        evaluations: number of evaluations of value and gradient.
        converged: whether the search ended before its last permitted step.
        pairs: the last :data:`HISTORY` pairs, for a search on a similar function.
    """

    point: Vector
    value: float
    evaluations: int
    converged: bool
    pairs: "Pairs"


def vector(tensor: Tensor) -> Vector:
    """The tensor, or a view of it as an array."""
    return tensor.numpy() if tensor.is_cpu else tensor


def tensor(of: Vector) -> Tensor:
    """The vector as a tensor that shares its memory."""
    return torch.from_numpy(of) if isinstance(of, np.ndarray) else of


def product(matrix: Vector, of: Vector) -> Vector:
    """``matrix @ of``, or the inner product of two vectors. A large array does not go to NumPy's BLAS, whose threads
    would take processors from torch's."""
    if isinstance(of, Tensor) or matrix.size <= _SMALL:
        return matrix @ of
    return np.einsum("...i,i->...", matrix, of)


def minimise(
    objective: Callable[[Vector], tuple[float, Vector]],
    start: Vector,
    *,
    done: float,
    steps: int,
    pairs: "Pairs | None" = None,
    norm: float = math.inf,
    brief: bool = False,
    first: tuple[float, Vector] | None = None,
) -> Minimum:
    """Minimise a smooth function whose Hessian is near the identity, from ``start``.

    Args:
        objective: from a point to its value and gradient.
        start: [n].
        done: the search ends if the norm of the gradient is at most ``done``, or if the norm of a step or the change of
            the value is less than ``1e-5 * done``.
        steps: largest number of steps.
        pairs: pairs from a search on nearly the same function.
        norm: the order of the norms, 2 or infinity, which is the largest entry.
        brief: take a last step without an evaluation at its end if it would leave at most ``done / 2`` of the gradient,
            should it shrink the gradient as much as the step before. The value is then that of the quadratic model.
        first: value and gradient at ``start``, if known.

    Source: Nocedal & Wright, Numerical Optimization, 2nd edition, 2006, algorithms 7.4, 7.5, 3.5 and 3.6.
    """
    point = start
    value, gradient = objective(point) if first is None else first
    evaluations, memory, previous = int(first is None), Pairs(start, pairs), 0.0
    for _ in range(steps):
        size = _length(gradient, norm)
        if size <= done:
            break
        direction = memory.direction(gradient)
        slope = float(product(gradient, direction))
        if not slope < 0:  # the gradient is only rounding errors
            break
        if brief and 2 * size * size <= done * previous:
            point, value = point + direction, value + slope / 2
            break
        previous = size
        size, there, of_there, trials = _line_search(objective, point, direction, value, slope)
        evaluations += trials
        if of_there is None:
            break
        step, change = size * direction, of_there - gradient
        fallen = value - there
        point, value, gradient = point + step, there, of_there
        memory.add(step, change)
        if abs(fallen) < 1e-5 * done or _length(step, norm) < 1e-5 * done:
            break
    else:
        return Minimum(point, value, evaluations, False, memory)
    return Minimum(point, value, evaluations, True, memory)


def _length(of: Vector, norm: float) -> float:
    return float(abs(of).max()) if norm == math.inf else math.sqrt(float(product(of, of)))


def _zeros(n: int, like: Vector) -> Vector:
    """[n, len(like)]."""
    return like.new_zeros(n, len(like)) if isinstance(like, Tensor) else np.zeros((n, len(like)))


def _filled(numbers: Sequence[float], like: Vector) -> Vector:
    return like.new_tensor(numbers) if isinstance(like, Tensor) else np.array(numbers)


class Pairs:
    """The last pairs (a step, the change of the gradient along it) and their inner products. With these, a direction
    costs two matrix-vector products.

    Args:
        start: a vector with the shape and device of the points.
        known: initial pairs, which are copied.
    """

    def __init__(self, start: Vector, known: "Pairs | None" = None) -> None:
        self._rows = _zeros(2 * HISTORY, start)  # steps, then changes
        if known is None:
            self._order: list[int] = []  # indices of the pairs in _rows, the oldest first
            self._of_step = [[0.0] * HISTORY for _ in range(HISTORY)]  # [i][j]: inner product of change i and step j
            self._of_change = [[0.0] * HISTORY for _ in range(HISTORY)]  # [i][j]: inner product of changes i and j
        else:
            self._rows[:] = known._rows
            self._order = list(known._order)
            self._of_step, self._of_change = ([list(row) for row in one] for one in (known._of_step, known._of_change))

    def __len__(self) -> int:
        return len(self._order)

    def add(self, step: Vector, change: Vector) -> None:
        """Adds a pair, unless its curvature is only rounding errors; replaces the oldest one if the memory is full."""
        if not float(product(step, change)) > 1e-10 * float(product(change, change)):
            return
        place = self._order.pop(0) if len(self._order) == HISTORY else len(self._order)
        self._order.append(place)
        self._rows[place], self._rows[HISTORY + place] = step, change
        of_step, of_change = (product(self._rows, one).tolist() for one in (step, change))
        self._of_step[place], self._of_change[place] = of_change[:HISTORY], of_change[HISTORY:]
        for other in self._order:
            self._of_step[other][place] = of_step[HISTORY + other]
            self._of_change[other][place] = of_change[HISTORY + other]

    def direction(self, gradient: Vector) -> Vector:
        """Minus the product of the pairs' inverse Hessian and the gradient.

        The two loops compute only the coefficients of the pairs, not vectors.
        """
        if not self._order:
            return -gradient
        of_gradient = product(self._rows, gradient).tolist()
        factors, last = [0.0] * (2 * HISTORY), self._order[-1]
        scale = self._of_step[last][last] / self._of_change[last][last]
        later: list[tuple[int, float]] = []
        for i in reversed(self._order):
            rise = of_gradient[i]
            for j, factor in later:
                rise += factor * self._of_step[j][i]
            later.append((i, -rise / self._of_step[i][i]))
        earlier: list[tuple[int, float]] = []
        for i, factor in reversed(later):
            change = of_gradient[HISTORY + i]
            for j, of_change in later:
                change += of_change * self._of_change[i][j]
            change *= -scale
            for j, of_step in earlier:
                change += of_step * self._of_step[i][j]
            earlier.append((i, factor - change / self._of_step[i][i]))
            factors[i], factors[HISTORY + i] = earlier[-1][1], -scale * factor
        return product(self._rows.T, _filled(factors, gradient)) - scale * gradient


def _line_search(
    objective: Callable[[Vector], tuple[float, Vector]], point: Vector, direction: Vector, value: float, slope: float
) -> tuple[float, float, Vector | None, int]:
    """A step size that meets the strong Wolfe conditions, value and gradient at it, and the number of evaluations.

    The gradient is None if no step size lowers the value.
    """
    low: _Trial = (0.0, value, slope)
    high: _Trial | None = None
    of_low: Vector | None = None
    rounding = _ROUNDING * (1 + abs(value))
    size = 1.0
    for trial in range(1, _TRIALS + 1):
        there, gradient = objective(point + size * direction)
        at = float(product(gradient, direction))
        if not (there <= value + _DECREASE * size * slope + rounding and there <= low[1] + rounding):
            high = (size, there, at)
        elif abs(at) <= -_CURVATURE * slope:
            return size, there, gradient, trial
        else:
            if (at >= 0) if high is None else (at * (high[0] - size) >= 0):
                high = low
            low, of_low = (size, there, at), gradient
        size = 4 * size if high is None else _between(low, high)
        if high is not None and size in (low[0], high[0]):  # no number lies between the ends
            break
    return low[0], low[1], of_low, trial


def _between(low: _Trial, high: _Trial) -> float:
    """The minimum of the cubic through two values and slopes, at least a tenth of the interval from either end."""
    (a, of_a, slope_a), (b, of_b, slope_b) = low, high
    first = slope_a + slope_b - 3 * (of_a - of_b) / (a - b)
    square = first * first - slope_a * slope_b
    middle = (a + b) / 2
    if square >= 0:
        root = square**0.5 if b > a else -(square**0.5)
        below = slope_b - slope_a + 2 * root
        middle = b - (b - a) * (slope_b + root - first) / below if below else middle
    least, most = sorted((a + 0.1 * (b - a), b - 0.1 * (b - a)))
    return min(max(middle, least), most)
