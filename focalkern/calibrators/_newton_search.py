"""Searches for (gamma, T) by derivatives of the NLL (for gamma = 0 convex in 1/T) and of the Brier score (smooth).

A search is a generator: it yields points and receives the criterion and its derivatives at them, so that the searches
of many networks share the passes over their logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from focalkern._types import LOSS_NAMES, InputKind, Proper
from focalkern.calibrators._newton_steps import Steps, newton_steps, valleys, vertices
from focalkern.calibrators._row_source import memory_rows
from focalkern.calibrators._search import GAMMA_BOUNDS, TEMPERATURE_BOUNDS, SearchResult
from focalkern.calibrators._smooth_losses import BrierOfRows, NllOfNetworks, check_finite_nll, coarse_table
from focalkern.calibrators._temperature_bound import BEYOND, NO_OPTIMUM, describe_bound, succession_bound

__all__ = [
    "brier_temperature",
    "check_finite_nll",
    "minimize_focal",
    "nll_focal_scalings",
    "nll_temperature",
    "nll_temperatures",
]

_LOG_T = (math.log(TEMPERATURE_BOUNDS[0]), math.log(TEMPERATURE_BOUNDS[1]))
# Temperatures between the bounds, 8 per factor of 10.
_WIDE_RATIO, _WIDE_AXIS = 10**0.125, np.geomspace(*TEMPERATURE_BOUNDS, 65).tolist()
# Relative size of a last step in 1/T: the error after a Newton step is its square.
_CONVERGED = 1e-7
# Factor by which the bracket of 1/T grows per step towards an unknown end.
_GROWTH = 16.0


@dataclass(frozen=True)
class _Rows:
    """The rows of one network."""

    input: Tensor
    target: Tensor
    input_kind: InputKind
    weight: Tensor | None
    criterion: Proper

    def table(self, gammas: Sequence[float], temperatures: Sequence[float]) -> np.ndarray:
        """The criterion [gammas, temperatures] for starting points."""
        rows = self.input, self.target, self.input_kind, self.criterion
        return coarse_table(*rows, gammas, temperatures, self.weight)

    def low_end(self, gamma: float, why: str) -> tuple[float, tuple[str, ...]]:
        """The result (temperature, sentences) if the criterion falls all the way to T = 0."""
        rows = memory_rows(self.input, self.target, self.weight)
        temperature = succession_bound(rows, gamma, self.input_kind)
        return temperature, (describe_bound(temperature, rows.n_rows, rows.weight_sum, why),)

    def words(self, name: str, value: float, bounds: tuple[float, float]) -> list[str]:
        if value not in bounds:
            return []
        end = "lower" if value == bounds[0] else "upper"
        found = f"{math.expm1(value) if name == 'gamma' else math.exp(value):g}"
        return [
            f"{name} = {found} is the {end} bound of the search: "
            f"the {LOSS_NAMES[self.criterion]} falls all the way to it"
        ]


# ---- temperature by NLL --------------------------------------------------------------------------------------------


def nll_temperature(input: Tensor, target: Tensor, input_kind: InputKind, weight: Tensor | None = None) -> SearchResult:
    """:func:`nll_temperatures` of one network: [N, C], [N], [N]."""
    (found,) = nll_temperatures(*_as_batch(input, target, input_kind, weight))
    return found


def nll_temperatures(
    input: Tensor, target: Tensor, input_kind: InputKind, weight: Tensor | None = None
) -> list[SearchResult]:
    r"""The temperatures with the smallest mean NLL of softmax(z / T).

    In beta = 1/T the NLL is convex: with q = softmax(beta z),

    .. math:: f'(\beta) = \overline{E_q[z] - z_y}, \qquad f''(\beta) = \overline{\mathrm{Var}_q[z]}

    Newton steps inside a bracket find the root of f'; every step narrows the bracket. A step that leaves the bracket,
    or that is longer than half of the step before although that one did not halve f', is replaced by the geometric mean
    of the bracket, or by a step towards an end whose sign is not yet known. The signs of f' at 0 and at infinity decide
    whether a root exists.

    Args:
        input: [B, N, C] of ``input_kind``, checked; every target is a possible class.
        target: [B, N] int64.
        weight: [B, N] float64, weight of each row; None is 1.
    """
    rows = _rows_of(input, target, input_kind, "nll", weight)
    return _run(NllOfNetworks(input, target, input_kind, weight), [_nll_temperature(one) for one in rows])


def _nll_temperature(rows: _Rows) -> Steps[SearchResult]:
    _, at_zero, spread, at_infinity, *_ = yield 0.0  # beta = 0, the uniform distribution
    low, high = 1 / TEMPERATURE_BOUNDS[1], 1 / TEMPERATURE_BOUNDS[0]
    n_cells = 1

    def at_low_end(why: str) -> Steps[SearchResult]:
        temperature, words = rows.low_end(0.0, why)
        value = (yield 1 / temperature)[0]
        return SearchResult(0.0, temperature, float(value), n_cells + 1, words)

    def at_high_end(why: str) -> Steps[SearchResult]:
        words = f"temperature = {TEMPERATURE_BOUNDS[1]:g} is the upper bound of the search: {why}"
        value = (yield 1 / TEMPERATURE_BOUNDS[1])[0]
        return SearchResult(0.0, TEMPERATURE_BOUNDS[1], float(value), n_cells + 1, (words,))

    if spread == 0:
        words = f"{NO_OPTIMUM}: all possible classes of a row have the same logit"
        value = (yield 1.0)[0]
        return SearchResult(0.0, 1.0, float(value), n_cells + 1, (words,))
    if at_infinity == 0:
        words = "the target has the largest logit of every row, and the NLL falls all the way to temperature 0"
        return (yield from at_low_end(words))
    if at_zero >= 0:
        words = (
            "the targets have no higher logits than the other classes on average, and the NLL falls all the way to an "
            "infinite temperature"
        )
        return (yield from at_high_end(words))

    beta, previous, travelled, ends = 1.0, math.inf, math.inf, (low, high)
    is_known = [False, False]  # whether f' was evaluated, below 0 at `low` and above 0 at `high`
    for _ in range(200):
        value, first, second, *_ = yield beta
        n_cells += 1
        if beta == ends[0] and first >= 0:
            return (yield from at_high_end(BEYOND))
        if beta == ends[1] and first <= 0:
            return (yield from at_low_end(BEYOND))
        low, high = (low, beta) if first > 0 else (beta, high)
        is_known[1 if first > 0 else 0] = True
        newton = beta - first / second if second > 0 else math.nan
        if abs(newton - beta) <= _CONVERGED * beta:
            value += first * (newton - beta) / 2
            beta = newton
            break
        halves = abs(first) <= 0.5 * previous or abs(newton - beta) <= 0.5 * travelled
        useful, previous = low < newton < high and halves, abs(first)
        if useful:
            following = newton
        elif first > 0 and not is_known[0]:
            following = max(low, beta / _GROWTH)
        elif first <= 0 and not is_known[1]:
            following = min(high, beta * _GROWTH)
        else:
            following = math.sqrt(low * high)
            if not low < following < high:  # low and high are neighbouring floats
                break
        beta, travelled = following, abs(following - beta)
    return SearchResult(0.0, 1 / beta, float(value), n_cells)


# ---- temperature by Brier score ------------------------------------------------------------------------------------


def brier_temperature(
    input: Tensor, target: Tensor, input_kind: InputKind, weight: Tensor | None = None
) -> SearchResult:
    """The temperature with the smallest mean Brier score of softmax(z / T).

    The score is smooth in T but not convex. A coarse grid between the bounds finds the local minima, and Newton steps
    in log T refine them.

    Args: as :func:`nll_temperature`.
    """
    return _run_alone(input, target, input_kind, weight, "brier", _brier_temperature)


def _brier_temperature(rows: _Rows) -> Steps[SearchResult]:
    axis = _WIDE_AXIS
    cells = rows.table((0.0,), axis)[0]
    if float(np.ptp(cells)) <= 1e-12:
        words = f"{NO_OPTIMUM}: the Brier score is the same at all of them"
        return SearchResult(0.0, 1.0, float(cells[32]), 65, (words,))
    low, high = np.array(_LOG_T[:1]), np.array(_LOG_T[1:])
    best_point, best_value = np.array([math.nan]), math.inf
    for i in valleys(cells)[:3]:
        point, value = yield from newton_steps(np.clip([math.log(axis[i])], low, high), low, high)
        if value < best_value - 1e-12:
            best_point, best_value = point, value
    if float(best_point[0]) == _LOG_T[0]:
        return (yield from _at_low_end(rows, 0.0))
    at_border = rows.words("temperature", float(best_point[0]), _LOG_T)
    return SearchResult(0.0, _temperature(float(best_point[0])), float(best_value), 65, tuple(at_border))


def _at_low_end(rows: _Rows, gamma: float) -> Steps[SearchResult]:
    """The result if the criterion falls all the way to T = 0."""
    temperature, words = rows.low_end(gamma, f"the {LOSS_NAMES[rows.criterion]} falls all the way to it")
    value = (yield np.array([math.log1p(gamma), math.log(temperature)]))[0]
    return SearchResult(gamma, temperature, float(value), 0, words)


# ---- gamma and temperature -----------------------------------------------------------------------------------------

# Starts of the Newton steps of minimize_focal. As a function of gamma, each with its best T, the NLL may have a local
# minimum on either side of a maximum, so that one start is not enough.
_START_GAMMAS = (-0.95, -0.8, -0.6, -0.4, -0.2, 0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_START_RATIO = 1.17
_START_FACTORS = [0.2 * _START_RATIO**index for index in range(32)]  # of T at gamma = 0: 0.2 to 26
_ROUNDING = 1e-6  # bound of the rounding of the table, which is in float32
_N_SMOOTH = 7  # for the first of these gammas the NLL is smooth enough in T for every second factor


def minimize_focal(
    input: Tensor,
    target: Tensor,
    input_kind: InputKind,
    criterion: Proper,
    weight: Tensor | None = None,
    near: tuple[float, float] | None = None,
) -> SearchResult:
    r"""gamma and T with the smallest mean NLL, or Brier score, of the focal calibration map.

    Both are smooth in gamma and T but not convex. A coarse grid around the optimum of temperature scaling finds the
    local minima. From each, Newton steps in (log(1 + gamma), log T) by the derivatives of the map follow, shortened
    until they lower the criterion. The lowest minimum is the result, or gamma = 0 if none is lower.

    Args: as :func:`nll_temperature`; the criterion; and a start (gamma, T) in place of the grid, such as the optimum of
        nearly the same rows.
    """
    return _run_alone(input, target, input_kind, weight, criterion, lambda rows: _focal_scaling(rows, near))


def nll_focal_scalings(
    input: Tensor, target: Tensor, input_kind: InputKind, weight: Tensor | None = None
) -> list[SearchResult]:
    """:func:`minimize_focal` of many networks by NLL. Args: as :func:`nll_temperatures`."""
    rows = _rows_of(input, target, input_kind, "nll", weight)
    return _run(NllOfNetworks(input, target, input_kind, weight), [_focal_scaling(one, None) for one in rows])


def _focal_scaling(rows: _Rows, near: tuple[float, float] | None) -> Steps[SearchResult]:
    plain = yield from (_nll_temperature if rows.criterion == "nll" else _brier_temperature)(rows)
    if plain.at_border and rows.criterion == "nll" and plain.temperature < TEMPERATURE_BOUNDS[1]:
        return plain  # no gamma has a lower NLL than T = 0
    bounds = (math.log1p(GAMMA_BOUNDS[0]), math.log1p(GAMMA_BOUNDS[1])), _LOG_T
    low, high = np.array(bounds).T

    starts, n_cells = ([near], 0) if near is not None else _starts(rows, plain)
    if not plain.at_border:
        starts.append((0.0, plain.temperature))
    plain = replace(plain, n_cells=plain.n_cells + n_cells)

    best_point, best_value = None, plain.value
    bottoms: list[tuple[np.ndarray, float]] = []
    for gamma, temperature in starts:
        start = np.clip([math.log1p(gamma), math.log(temperature)], low, high)
        point, value = yield from newton_steps(start, low, high, bottoms)
        bottoms.append((point, value))
        # Only a difference above rounding counts, so gamma stays 0 if the data do not determine it.
        if value < best_value - 1e-12 * abs(best_value):
            best_point, best_value = point, value
    if best_point is None:
        return plain
    if float(best_point[1]) == _LOG_T[0]:
        found = yield from _at_low_end(rows, math.expm1(best_point[0]))
        # The result at the bound may be worse than temperature scaling, whose optimum is inside the bounds.
        return replace(found, n_cells=plain.n_cells) if found.value < plain.value else plain
    words = [
        text
        for name, value, ends in zip(("gamma", "temperature"), best_point, bounds, strict=True)
        for text in rows.words(name, float(value), ends)
    ]
    temperature = _temperature(float(best_point[1]))
    return SearchResult(math.expm1(best_point[0]), temperature, float(best_value), plain.n_cells, tuple(words))


def _starts(rows: _Rows, plain: SearchResult) -> tuple[list[tuple[float, float]], int]:
    """The lowest local minima (gamma, T) of a table, and the number of its cells.

    If the criterion has no minimum in T at gamma = 0, it may have one at another gamma, at any T.
    """
    axis, ratio = _WIDE_AXIS, _WIDE_RATIO
    if not plain.at_border:
        axis, ratio = [factor * plain.temperature for factor in _START_FACTORS], _START_RATIO
        axis = [temperature for temperature in axis if TEMPERATURE_BOUNDS[0] <= temperature <= TEMPERATURE_BOUNDS[1]]
    lowest_of, n_cells = [], 0
    smooth, others = _START_GAMMAS[:_N_SMOOTH], _START_GAMMAS[_N_SMOOTH:]
    for gammas, stride in ((smooth, 2 if rows.criterion == "nll" and not plain.at_border else 1), (others, 1)):
        cells = rows.table(gammas, axis[::stride])
        n_cells += cells.size
        places, lowest = vertices(cells)
        if plain.at_border:  # only minima between the ends
            lowest[cells.min(1) >= cells[:, [0, -1]].min(1) - _ROUNDING] = math.inf
        lowest_of += [*zip(lowest, gammas, axis[0] * ratio ** (stride * places), strict=True)]
    values = np.array([value for value, *_ in lowest_of])
    return [lowest_of[i][1:] for i in valleys(values)[:3] if values[i] < math.inf], n_cells


def _temperature(log: float) -> float:
    """exp(log), or exactly the bound for the logarithm of a bound."""
    return TEMPERATURE_BOUNDS[_LOG_T.index(log)] if log in _LOG_T else math.exp(log)


# ---- running searches ----------------------------------------------------------------------------------------------


def _as_batch(input: Tensor, target: Tensor, input_kind: InputKind, weight: Tensor | None) -> tuple[Any, ...]:
    return input[None], target[None], input_kind, None if weight is None else weight[None]


def _rows_of(
    input: Tensor, target: Tensor, input_kind: InputKind, criterion: Proper, weight: Tensor | None
) -> list[_Rows]:
    weights: list[Tensor | None] = [None] * len(input) if weight is None else list(weight)
    return [
        _Rows(rows, labels, input_kind, of_rows, criterion)
        for rows, labels, of_rows in zip(input, target, weights, strict=True)
    ]


def _run_alone(
    input: Tensor, target: Tensor, input_kind: InputKind, weight: Tensor | None, criterion: Proper, search: Any
) -> SearchResult:
    steps = search(_Rows(input, target, input_kind, weight, criterion))
    if criterion == "nll":
        (found,) = _run(NllOfNetworks(*_as_batch(input, target, input_kind, weight)), [steps])
        return found
    score, asked, answer = BrierOfRows(input, target, input_kind, weight), 0, None
    while True:
        try:
            point = steps.send(answer)
        except StopIteration as end:
            result: SearchResult = end.value
            return replace(result, n_cells=result.n_cells + asked)
        answer, asked = (*score(point), None), asked + 1


def _run(nll: NllOfNetworks, searches: Sequence[Steps[SearchResult]]) -> list[SearchResult]:
    """Runs one search by NLL per network; the searches share passes over the logits. Returns their results."""
    results: list[SearchResult | None] = [None] * len(nll)
    points: dict[int, Any] = {}
    asked = np.zeros(len(nll), dtype=np.int64)

    def advance(network: int, answer: Any) -> None:
        try:
            points[network] = searches[network].send(answer)
        except StopIteration as end:
            points.pop(network, None)
            results[network] = replace(end.value, n_cells=end.value.n_cells + int(asked[network]))

    for network in range(len(nll)):
        advance(network, None)
    while points:
        answers: dict[int, Any] = {}
        scalars = {network: beta for network, beta in points.items() if isinstance(beta, float)}
        if scalars:
            betas = np.full(len(nll), math.nan)
            betas[list(scalars)] = list(scalars.values())
            sums = nll(None, betas)
            answers |= {network: sums[network].tolist() for network in scalars}
        pairs = {network: point for network, point in points.items() if network not in scalars}
        if pairs:
            gammas, betas = np.zeros(len(nll)), np.full(len(nll), math.nan)
            for network, point in pairs.items():
                gammas[network], betas[network] = math.expm1(point[0]), math.exp(-point[1])
                asked[network] += 1
            sums = nll(gammas, betas)
            answers |= {network: _in_logs(sums[network], gammas[network], betas[network]) for network in pairs}
        for network, answer in answers.items():
            advance(network, answer)
    return [result for result in results if result is not None]


def _in_logs(sums: np.ndarray, gamma: float, beta: float) -> tuple[float, np.ndarray, np.ndarray]:
    """Value, gradient and Hessian in (log(1 + gamma), log T)."""
    value, by_beta, beta_beta, _, by_gamma, gamma_beta, gamma_gamma = sums.tolist()
    shifted = 1 + gamma
    mixed = -shifted * beta * gamma_beta
    curvature = [
        [shifted * (shifted * gamma_gamma + by_gamma), mixed],
        [mixed, beta * (beta * beta_beta + by_beta)],
    ]
    return value, np.array([shifted * by_gamma, -beta * by_beta]), np.array(curvature)
