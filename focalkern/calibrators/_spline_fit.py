"""The objective of spline scaling with its derivatives, and Newton steps for the curve."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern.calibrators._lbfgs import Pairs
from focalkern.calibrators._row_source import MemoryRows
from focalkern.calibrators._spline_rows import SplineRows
from focalkern.ops.spline_map import map_by_pieces
from focalkern.ops.spline_sums import spline_sums_for

__all__ = [
    "NEWTON_DONE_IN_A_FOLD",
    "Derivatives",
    "Fit",
    "Map",
    "Predict",
    "added",
    "arguments",
    "blocks_in_memory",
    "curve_derivatives",
    "curve_sums",
    "fit_curve",
    "joined",
    "parts_of",
    "predictor",
    "row_losses",
    "squares_of",
    "strengths",
]

# With more logits than this, Newton's method starts on a part of the rows.
_FEW = 4_000_000

_NEWTON_STEPS = 40
NEWTON_DONE = 1e-9  # of g' H^-1 g, on the scale of the mean loss
NEWTON_DONE_IN_A_FOLD = 1e-6  # the last step squares it

# Largest number of values of x that a fit keeps in memory between evaluations.
_KEPT = 1 << 24

Predict = Callable[[Tensor], Tensor]
"""Maps input [n, C] to log-probabilities of its dtype."""

Block = tuple[MemoryRows, Tensor]
"""Rows and their x [n, C]."""


@dataclass(frozen=True)
class Map:
    """The parameters of a spline scaling.

    Attributes:
        curve: [m + 1] on the CPU, a and the values of f at the knots.
        weight: v [C] or D [C, C]; None for scalar.
        bias: b [C]; None for scalar.
    """

    curve: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class Derivatives:
    """The penalised mean loss J / W, its gradient and Hessian in the curve, and the mean loss without the penalty."""

    value: float
    gradient: Tensor
    hessian: Tensor
    nll: float


@dataclass(frozen=True)
class Fit:
    """The result of a fit.

    Attributes:
        map: the parameters at the optimum.
        value: J / W at the optimum.
        passes: number of passes over the rows.
        converged: whether the fit ended before its last permitted step.
        derivatives: those in the curve at the optimum; None after L-BFGS and of a brief fit.
        pairs: the curvature pairs of L-BFGS; None after Newton's method.
    """

    map: Map
    value: float
    passes: int
    converged: bool = True
    derivatives: Derivatives | None = None
    pairs: Pairs | None = None


def curve_derivatives(rows: SplineRows, map: Map, sums: Tensor | None = None) -> Derivatives:
    """The objective J / W with its gradient and Hessian in the curve.

    ``sums`` is the result of :func:`curve_sums`, if known.
    """
    # In NumPy, whose operations on so few numbers take less time than torch's.
    curve, quadratic, n = map.curve.numpy(), rows.quadratic.numpy(), len(map.curve)
    means = (curve_sums(rows, map) if sums is None else sums).numpy() / rows.weight_sum
    nll, pull = float(means[0]), (rows.quadratic @ map.curve).numpy()
    value = nll + float(curve @ pull) + _linear_penalty(rows, map)
    gradient, hessian = means[1 : 1 + n] + 2 * pull, means[1 + n :].reshape(n, n) + 2 * quadratic
    return Derivatives(value, torch.from_numpy(gradient), torch.from_numpy(hessian), nll)


def curve_sums(rows: SplineRows, map: Map) -> Tensor:
    """[1 + n + n^2]: the summed loss without penalties, its gradient and Hessian in the curve [n]."""
    n, found = len(map.curve), []
    for part, _, extra in parts_of(rows, map):
        sums_of = spline_sums_for(part.input).spline_curve_sums
        value, slopes, curvature = sums_of(*arguments(rows, part, map, extra))
        found.append(joined(value, slopes, curvature, like=slopes))
    return rows.source.add_up(added(found, 1 + n + n * n))


def row_losses(rows: SplineRows, map: Map) -> Tensor:
    """[2, n]: NLL and Brier score of each row of this process."""
    found = []
    for part, _, extra in parts_of(rows, map):
        found.append(spline_sums_for(part.input).spline_row_losses(*arguments(rows, part, map, extra)))
    return torch.cat(found, 1) if found else torch.zeros(2, 0, dtype=torch.float64, device=rows.device)


def joined(value: float, *derivatives: Tensor, like: Tensor) -> Tensor:
    """The value and the entries of the derivatives as one vector on the device of ``like``."""
    if not like.is_cpu:
        return torch.cat([like.new_full((1,), value), *(one.reshape(-1).to(like.device) for one in derivatives)])
    # NumPy takes less time for so few numbers.
    return torch.from_numpy(np.concatenate([[value], *(one.numpy().ravel() for one in derivatives)]))


def added(sums: Sequence[Tensor], n: int, device: torch.device | None = None) -> Tensor:
    """The sum of vectors [n], zeros on ``device`` if there are none."""
    if not sums:
        return torch.zeros(n, dtype=torch.float64, device=device)
    return sums[0] if len(sums) == 1 else torch.stack([*sums]).sum(0)


def parts_of(
    rows: SplineRows, map: Map, blocks: Sequence[Block] | None = None
) -> Iterator[tuple[MemoryRows, Tensor | None, Tensor | None]]:
    """Blocks (rows, x, D x) for a matrix that the sums do not take; otherwise the parts as (rows, None, None)."""
    if map.weight is None or map.weight.dim() == 1 or rows.takes_matrix:
        for part in rows.parts():
            yield part, None, None
    else:
        transposed = map.weight.T.contiguous()  # x @ transposed takes two thirds of the time of x @ weight.T
        for block, x in _blocks_of(rows) if blocks is None else blocks:
            yield block, x, x @ transposed


def _blocks_of(rows: SplineRows) -> Iterator[Block]:
    return ((block, rows.log_probs(block)) for block in rows.blocks())


def blocks_in_memory(rows: SplineRows) -> Sequence[Block] | None:
    """Blocks of rows with their x, kept for many evaluations; None if the rows are not in memory or too many."""
    source = rows.source
    few = isinstance(source, MemoryRows) and len(source.target) * rows.n_classes <= _KEPT
    return list(_blocks_of(rows)) if few else None


def arguments(rows: SplineRows, part: MemoryRows, map: Map, extra: Tensor | None) -> tuple[Any, ...]:
    """The arguments of the functions of :mod:`focalkern.fallback.spline_sums`; ``extra`` is D x, or None."""
    of_x = map.weight if extra is None else None
    spline, is_probs = rows.spline, rows.input_kind == "probs"
    curve = (spline.knots, spline.basis, float(map.curve[0]), map.curve[1:])
    of_rows = (part.input, part.target, part.weight, rows.temperature, rows.floor)
    return (*of_rows, *curve, of_x, map.bias, extra, is_probs, rows.masks)


def predictor(rows: SplineRows, map: Map) -> Predict:
    """The map as a function, without the correction of rounding that keeps the order of nearly equal classes."""
    parameters = torch.tensor([1 + float(map.curve[0]), rows.temperature, rows.floor], dtype=torch.float64)
    knots, coefficients = rows.spline.knots.to(rows.device), rows.spline.coefficients(map.curve[1:]).to(rows.device)

    def predict(input: Tensor) -> Tensor:
        of_curve = (parameters, knots, coefficients, map.weight, map.bias)
        return map_by_pieces(input, *of_curve, rows.input_kind == "probs", rows.masks, keep_order=False, log=True)

    return predict


def strengths(rows: SplineRows, is_matrix: bool) -> Tensor:
    """The factors of the squares of v or the rows of D, and of b, in the penalty of J / W, as one tensor."""
    return squares_of(rows.n_classes, is_matrix).to(rows.device) * (rows.factor / rows.weight_sum)


@functools.lru_cache(maxsize=4)
def squares_of(n_classes: int, is_matrix: bool) -> Tensor:
    """As :func:`strengths` in the penalty of J, without the factor of all penalties."""
    n, usual = n_classes, 2.0 * n_classes
    found = torch.full((n * n + n if is_matrix else 2 * n,), usual, dtype=torch.float64)
    if is_matrix:
        found[: n * n].reshape(n, n).mul_(n - 1).fill_diagonal_(usual)
    return found


def _linear_penalty(rows: SplineRows, map: Map) -> float:
    if map.weight is None or map.bias is None:
        return 0.0
    parameters = torch.cat([map.weight.reshape(-1), map.bias])
    return float(strengths(rows, map.weight.dim() == 2) @ parameters.square())


def fit_curve(
    rows: SplineRows,
    start: Tensor | None = None,
    done: float = NEWTON_DONE,
    brief: bool = False,
    sums: Tensor | None = None,
) -> Fit:
    """Newton's method in (a, f) from ``start``; None starts from the identity.

    ``brief`` takes the last step without derivatives at its end, and its value from the quadratic model. ``sums`` is
    the result of :func:`curve_sums` at ``start``, if known.
    """
    curve, passes = torch.zeros(len(rows.spline.knots) + 1, dtype=torch.float64), 0
    if start is not None:
        curve = start
    elif rows.source.n_rows * rows.n_classes > _FEW:
        few = rows.on(rows.source.every(-(-rows.source.n_rows * rows.n_classes // _FEW)))
        if few.weight_sum > 0:
            curve = fit_curve(replace(few, factor=rows.factor * few.weight_sum / rows.weight_sum)).map.curve
    here = curve_derivatives(rows, Map(curve), sums)
    for _ in range(_NEWTON_STEPS):
        passes += 1
        step = newton_step(here.gradient, here.hessian)
        decrement = -float(here.gradient @ step)
        last = decrement < done
        if last and brief:
            return Fit(Map(curve + step), here.value - decrement / 2, passes)
        for _ in range(40):
            there = curve_derivatives(rows, Map(curve + step))
            if last or there.value <= here.value - 1e-4 * decrement:
                break
            passes, step, decrement = passes + 1, step / 2, decrement / 2
        else:
            break
        # Each step squares the error, so a further step would change only rounding errors.
        curve, here = curve + step, there
        if last:
            return Fit(Map(curve), here.value, passes + 1, derivatives=here)
    return Fit(Map(curve), here.value, passes + 1, converged=False, derivatives=here)


def newton_step(gradient: Tensor, hessian: Tensor) -> Tensor:
    curvature = hessian.numpy().copy()
    diagonal = curvature.reshape(-1)[:: len(curvature) + 1]
    diagonal += 1e-13 * diagonal.sum()
    return torch.from_numpy(np.linalg.solve(curvature, -gradient.numpy()))  # torch takes several times as long
