"""Newton steps as a generator: it yields points and receives the function and its derivatives at them."""

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import numpy as np

__all__ = ["Steps", "newton_steps", "valleys", "vertices"]

# Size of a last step, in logarithms of the variables: with an exact Hessian the error after it is its square. Nothing
# is evaluated at its end: the value there is that of the quadratic model to the last digit.
_NEWTON_STEP = 1e-6
# Points closer than this to a known minimum, in the same variables, are taken to lead to it.
_NEAR = 0.01

_Found = TypeVar("_Found")
# A search yields a point [log T] or [log(1 + gamma), log T] and receives (value, gradient, Hessian or None); or it
# yields a number, 1/T, and receives the sums of the NLL at it.
Steps = Generator[Any, Any, _Found]


def valleys(values: np.ndarray) -> list[int]:
    """Indices of the local minima, the lowest first."""
    padded = np.concatenate([[np.inf], values, [np.inf]])
    bottoms = np.flatnonzero((values <= padded[:-2]) & (values <= padded[2:]))
    return sorted(bottoms.tolist(), key=values.__getitem__)


def vertices(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place and value of the vertex of the parabola through the smallest number of each row and its neighbours."""
    places = cells.argmin(1)
    padded = np.pad(cells, ((0, 0), (1, 1)), constant_values=np.inf)
    before, lowest, after = (padded[np.arange(len(cells)), places + side] for side in range(3))
    with np.errstate(invalid="ignore", divide="ignore"):  # at an end and in a flat row, the place of the number itself
        fall = (before - after) / 2
        moved = np.nan_to_num(fall / (before - 2 * lowest + after)).clip(-0.5, 0.5)
        return places + moved, lowest - np.nan_to_num(fall * moved) / 2


def newton_steps(
    point: np.ndarray, low: np.ndarray, high: np.ndarray, bottoms: Sequence[tuple[np.ndarray, float]] = ()
) -> Steps[tuple[np.ndarray, float]]:
    """A local minimum of a smooth function of a few variables between bounds. No step raises the function.

    ``bottoms`` are the minima found from other starts. The search ends at one of them if it comes near.
    """
    value, slope, known = yield point
    for _ in range(60):
        # A variable at a bound stays fixed if its step would cross the bound.
        free = ~(((point <= low) & (slope > 0)) | ((point >= high) & (slope < 0)))
        if not free.any():
            break
        if known is not None:
            curvature = known[np.ix_(free, free)]
        else:  # the Hessian as differences of the exact gradient
            width = 1e-5
            columns = []
            for i in np.flatnonzero(free):
                moved = point.copy()
                moved[i] += width if point[i] + width <= high[i] else -width
                columns.append(((yield moved)[1][free] - slope[free]) / (moved[i] - point[i]))
            curvature = np.stack(columns)
        sizes, directions = np.linalg.eigh((curvature + curvature.T) / 2)
        # Absolute eigenvalues make the step a descent direction, also if the Hessian is not positive definite.
        sizes = np.maximum(np.abs(sizes), 1e-8 * max(1e-300, float(np.abs(sizes).max())))
        step = np.zeros_like(point)
        step[free] = -directions @ ((directions.T @ slope[free]) / sizes)
        step /= max(1.0, float(np.abs(step).max()))
        if known is not None and float(np.abs(step).max()) <= _NEWTON_STEP:
            return np.clip(point + step, low, high), value + float(slope @ step) / 2
        for _ in range(30):
            moved = np.clip(point + step, low, high)
            trial, trial_slope, trial_known = yield moved
            if trial <= value:
                break
            step /= 2
        else:
            break
        travelled = float(np.abs(moved - point).max())
        point, value, slope, known = moved, trial, trial_slope, trial_known
        if travelled <= 1e-9:
            break
        near = [bottom for bottom in bottoms if float(np.abs(bottom[0] - point).max()) <= _NEAR]
        if near:
            return near[0]
    return point, value
