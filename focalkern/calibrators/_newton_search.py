"""Searches for (gamma, T) by derivatives: of the NLL, convex in 1/T alone, and of the Brier score, which is smooth."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from focalkern._types import LOSS_NAMES, InputKind, Proper
from focalkern.calibrators._search import GAMMA_BOUNDS, TEMPERATURE_BOUNDS, SearchResult, every_row_grid
from focalkern.calibrators._temperature_bound import ceiling_in_words, succession_bound
from focalkern.ops._backend import fallback
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.ops.spline_sums import spline_sums_for

__all__ = ["brier_temperature", "check_finite_nll", "minimize_focal", "nll_temperature"]

# Rows are converted to float64 so many numbers at a time.
_BLOCK = 1 << 22

# Of a difference quotient in 1/T, relative: rounding and curvature leave an error of about 1e-6 each.
_WIDTH = 1e-6


def _blocks(input: Tensor, target: Tensor, weight: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Blocks of (input, float64; target [n, 1]; share of the sum of the weights [n])."""
    rows = max(1, _BLOCK // input.shape[1])
    shares = _shares(target, weight).split(rows)
    for block, labels, part in zip(input.split(rows), target.split(rows), shares, strict=True):
        yield block.to(torch.float64), labels.unsqueeze(-1), part


def _shares(target: Tensor, weight: Tensor | None) -> Tensor:
    """[N] float64, which sum to 1."""
    return torch.full_like(target, 1 / len(target), dtype=torch.float64) if weight is None else weight / weight.sum()


def _scores(
    input: Tensor, target: Tensor, input_kind: str, weight: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The same with logits minus the largest of their row, -inf where a class cannot occur."""
    for block, labels, share in _blocks(input, target, weight):
        scores = block.log() if input_kind == "probs" else block
        yield scores - scores.amax(-1, keepdim=True), labels, share


def check_finite_nll(name: str, input: Tensor, target: Tensor, input_kind: str, remedy: str = "") -> None:
    """Raises where no temperature has a finite NLL; the values of ``input`` must have been checked.

    Args:
        remedy: beside a floor.
    """
    of_target = input.gather(1, target.unsqueeze(1)).squeeze(1)
    impossible = of_target == (0 if input_kind == "probs" else -math.inf)
    if bool(impossible.any()):
        what = "probability 0" if input_kind == "probs" else "a logit of -inf"
        raise ValueError(
            f"{name}: the NLL must be finite for some temperature, but {int(impossible.sum())} of {len(input)} rows "
            f"(the first is {int(impossible.nonzero()[0])}) give their target {what}: "
            f"floor={0.1 / len(input):.2g} gives every class a little of the probability{remedy}"
        )


def nll_temperature(input: Tensor, target: Tensor, input_kind: InputKind, weight: Tensor | None = None) -> SearchResult:
    r"""The temperature with the smallest mean NLL of softmax(z / T).

    In beta = 1/T the NLL is convex: with q = softmax(beta z),

    .. math:: f'(\beta) = \overline{E_q[z] - z_y}, \qquad f''(\beta) = \overline{\mathrm{Var}_q[z]}

    The root of f' is found by Newton steps inside a bracket that every step narrows; a step that leaves it, or that
    halves neither it nor the derivative, is replaced by the bracket's geometric mean. Whether there is a root at all is
    read from the limits of f' at 0 and infinity, which need no search.

    Args:
        input: [N, C] of ``input_kind``, checked; no target impossible.
        target: [N] int64.
        weight: [N] float64, what a row counts; None is 1.
    """

    def by_kernel(beta: float) -> tuple[float, float, float]:
        # The kernel reads the rows once for several betas. The difference quotient is accurate to about 1e-6, which
        # leaves the steps as few.
        near = torch.tensor([beta, beta * (1 + _WIDTH)], dtype=torch.float64)
        values, slopes = sums_of(input, target, shares, near, 0.0, input_kind == "probs").tolist()
        return values[0], slopes[0], (slopes[1] - slopes[0]) / (beta * _WIDTH)

    def by_torch(beta: float) -> tuple[float, float, float]:
        sums = torch.zeros(3, dtype=torch.float64, device=input.device)
        for scores, labels, share in _scores(input, target, input_kind, weight):
            q = (beta * scores).exp()
            total = q.sum(-1, keepdim=True)
            q /= total
            finite = scores.masked_fill(scores == -math.inf, 0.0)
            mean = (q * finite).sum(-1, keepdim=True)
            of_target = finite.gather(1, labels)
            value = total.log() - beta * of_target
            variance = (q * (finite - mean).square()).sum(-1)
            sums += torch.stack([value.squeeze(1), (mean - of_target).squeeze(1), variance]) @ share
        value, first, second = sums.tolist()
        return value, first, second

    backend = spline_sums_for(input)
    derivatives = by_torch if backend is fallback else by_kernel
    sums_of = backend.spline_temperature_sums
    shares = _shares(target, weight)
    at_zero, at_infinity, spread = 0.0, 0.0, 0.0
    for scores, labels, share in _scores(input, target, input_kind, weight):
        possible = scores > -math.inf
        finite = scores.masked_fill(~possible, 0.0)
        of_target = finite.gather(1, labels).squeeze(1)
        at_zero += float((finite.sum(-1) / possible.sum(-1) - of_target) @ share)
        at_infinity -= float(of_target @ share)
        spread -= float(finite.sum(-1) @ share)

    def at_low_end(spent: int, why: str) -> SearchResult:
        temperature = succession_bound(input, 0.0, input_kind, weight)
        words = ceiling_in_words(temperature, len(input), weight, why)
        return SearchResult(0.0, temperature, derivatives(1 / temperature)[0], spent + 1, (words,))

    def at_high_end(spent: int, why: str) -> SearchResult:
        words = f"temperature = {TEMPERATURE_BOUNDS[1]:g} is the upper bound of the search: {why}"
        return SearchResult(0.0, TEMPERATURE_BOUNDS[1], derivatives(low)[0], spent + 1, (words,))

    low, high = 1 / TEMPERATURE_BOUNDS[1], 1 / TEMPERATURE_BOUNDS[0]
    if spread == 0:
        words = "every temperature is as good as another: all classes of a row that can occur have the same logit"
        return SearchResult(0.0, 1.0, derivatives(1.0)[0], 1, (words,))
    if at_infinity == 0:
        words = "the target has the largest logit of every row, and the NLL falls all the way to temperature 0"
        return at_low_end(0, words)
    if at_zero >= 0:
        words = (
            "the targets have no higher logits than the other classes on average, and the NLL falls all the way to an "
            "infinite temperature"
        )
        return at_high_end(0, words)

    beyond = "the optimum lies beyond it"
    if derivatives(high)[1] <= 0:
        return at_low_end(1, beyond)
    if derivatives(low)[1] >= 0:
        return at_high_end(2, beyond)
    beta, n_cells = 1.0, 2
    previous = math.inf
    for _ in range(200):
        value, first, second = derivatives(beta)
        n_cells += 1
        low, high = (low, beta) if first > 0 else (beta, high)
        newton = beta - first / second if second > 0 else math.nan
        if abs(newton - beta) <= 1e-9 * beta:
            # Quadratic convergence: this step leaves a relative error of about 1e-18.
            beta = newton
            value = derivatives(beta)[0]
            n_cells += 1
            break
        useful = low < newton < high and abs(first) <= 0.5 * previous
        previous = abs(first)
        beta = newton if useful else math.sqrt(low * high)
        if not low < beta < high:  # nothing is left between
            break
    return SearchResult(0.0, 1 / beta, value, n_cells)


class _Mean:
    """The mean NLL or Brier score of the focal calibration map, with its derivatives.

    A point is [log T], at gamma = 0, or [log(1 + gamma), log T].
    """

    def __init__(
        self, input: Tensor, target: Tensor, input_kind: InputKind, criterion: Proper, weight: Tensor | None
    ) -> None:
        self.input, self.target, self.input_kind, self.criterion = input, target, input_kind, criterion
        self.weight = weight
        self.n_cells = 0

    def __call__(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        self.n_cells += 1
        values = [math.expm1(point[0]) if len(point) == 2 else 0.0, math.exp(point[-1])]
        gamma, temperature = (
            torch.tensor(value, dtype=torch.float64, device=self.input.device, requires_grad=True) for value in values
        )
        total = np.zeros(3)
        for block, labels, share in _blocks(self.input, self.target, self.weight):
            with torch.enable_grad():
                log = self.criterion == "nll"
                probs = focal_calibration_map(block, gamma, temperature, input_kind=self.input_kind, log=log)
                of_target = probs.gather(1, labels).squeeze(1)
                loss = -of_target if log else probs.square().sum(-1) - 2 * of_target + 1
                value = loss @ share
            slopes = torch.autograd.grad(value, (gamma, temperature))
            total += [value.item(), *(slope.item() for slope in slopes)]
        slopes_of = total[1:] * [1 + gamma.item(), temperature.item()]
        return total[0], slopes_of[-len(point) :]

    def table(self, gammas: tuple[float, ...], temperatures: list[float]) -> np.ndarray:
        """[gammas, temperatures], for starts: every row counts the same."""
        self.n_cells += len(gammas) * len(temperatures)
        grid = every_row_grid(
            "fit", self.input, self.target, gammas, temperatures, criteria=(self.criterion,), input_kind=self.input_kind
        )
        return grid.tables[self.criterion].cpu().numpy()

    def words(self, name: str, value: float, bounds: tuple[float, float]) -> list[str]:
        if value not in bounds:
            return []
        end = "lower" if value == bounds[0] else "upper"
        found = f"{math.expm1(value) if name == 'gamma' else math.exp(value):g}"
        loss = LOSS_NAMES[self.criterion]
        return [f"{name} = {found} is the {end} bound of the search: the {loss} falls all the way to it"]

    def at_low_end(self, gamma: float) -> SearchResult:
        """Where the criterion falls all the way to T = 0."""
        temperature = succession_bound(self.input, gamma, self.input_kind, self.weight)
        why = f"the {LOSS_NAMES[self.criterion]} falls all the way to it"
        words = ceiling_in_words(temperature, len(self.input), self.weight, why)
        value, _ = self(np.array([math.log1p(gamma), math.log(temperature)]))
        return SearchResult(gamma, temperature, value, self.n_cells, (words,))


def _temperature(log: float) -> float:
    """exp, and exactly the bound at a bound."""
    return TEMPERATURE_BOUNDS[_LOG_T.index(log)] if log in _LOG_T else math.exp(log)


_LOG_T = (math.log(TEMPERATURE_BOUNDS[0]), math.log(TEMPERATURE_BOUNDS[1]))


def brier_temperature(
    input: Tensor, target: Tensor, input_kind: InputKind, weight: Tensor | None = None
) -> SearchResult:
    """The temperature with the smallest mean Brier score of softmax(z / T).

    It is smooth in T but not convex: a coarse grid between the bounds finds the valleys, Newton steps in log T their
    bottoms.

    Args: as :func:`nll_temperature`.
    """
    mean = _Mean(input, target, input_kind, "brier", weight)
    axis = np.geomspace(*TEMPERATURE_BOUNDS, 65).tolist()
    cells = mean.table((0.0,), axis)[0]
    if float(np.ptp(cells)) <= 1e-12:
        words = "every temperature is as good as another: the Brier score is the same at all of them"
        return SearchResult(0.0, 1.0, float(cells[32]), mean.n_cells, (words,))
    low, high = np.array(_LOG_T[:1]), np.array(_LOG_T[1:])
    best_point, best_value = np.array([math.nan]), math.inf
    for i in _valleys(cells)[:3]:
        point, value = _newton(mean, np.clip([math.log(axis[i])], low, high), low, high)
        if value < best_value - 1e-12:
            best_point, best_value = point, value
    if float(best_point[0]) == _LOG_T[0]:
        return mean.at_low_end(0.0)
    at_border = mean.words("temperature", float(best_point[0]), _LOG_T)
    return SearchResult(0.0, _temperature(float(best_point[0])), float(best_value), mean.n_cells, tuple(at_border))


# Where the Newton steps of minimize_focal may start: NLL over gamma, each with its best T, has valleys on both sides of
# a ridge, so that one start would not do.
_START_GAMMAS = (-0.95, -0.8, -0.6, -0.4, -0.2, 0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_START_FACTORS: tuple[float, ...] = tuple(0.2 * 1.17**index for index in range(32))  # of T at gamma = 0: 0.2 to 26


def minimize_focal(
    input: Tensor,
    target: Tensor,
    input_kind: InputKind,
    criterion: Proper,
    weight: Tensor | None = None,
    near: tuple[float, float] | None = None,
) -> SearchResult:
    r"""gamma and T with the smallest mean NLL, or Brier score, of the focal calibration map.

    Both are smooth in gamma and T but not convex. A coarse grid around the optimum of plain temperature scaling finds
    the valleys; in each, Newton steps in (log(1 + gamma), log T) follow the map's own derivatives to the bottom, a step
    is shortened until it lowers the criterion, and the smallest bottom wins. gamma = 0 wins where nothing is better.

    Args: as :func:`nll_temperature`; the criterion; and a (gamma, T) to start from in place of the grid's, such as the
        optimum of nearly the same rows.
    """
    of_temperature = nll_temperature if criterion == "nll" else brier_temperature
    plain = of_temperature(input, target, input_kind, weight)
    if plain.at_border:
        # No optimum in T: then none for any gamma.
        return plain
    mean = _Mean(input, target, input_kind, criterion, weight)
    bounds = (math.log1p(GAMMA_BOUNDS[0]), math.log1p(GAMMA_BOUNDS[1])), _LOG_T
    low, high = np.array(bounds).T

    starts = [(0.0, plain.temperature)]
    if near is not None:
        starts.insert(0, near)
    else:
        axis = [factor * plain.temperature for factor in _START_FACTORS]
        axis = [temperature for temperature in axis if TEMPERATURE_BOUNDS[0] <= temperature <= TEMPERATURE_BOUNDS[1]]
        cells = mean.table(_START_GAMMAS, axis)
        columns = cells.argmin(1)
        starts[:0] = [(_START_GAMMAS[i], axis[columns[i]]) for i in _valleys(cells.min(1))[:3]]

    best_point, best_value = np.array([0.0, math.log(plain.temperature)]), plain.value
    for gamma, temperature in starts:
        start = np.clip([math.log1p(gamma), math.log(temperature)], low, high)
        point, value = _newton(mean, start, low, high)
        # More than rounding: where gamma says nothing (two equal classes, say), 0 stays.
        if value < best_value - 1e-12 * abs(best_value):
            best_point, best_value = point, value
    if float(best_point[1]) == _LOG_T[0]:
        found = mean.at_low_end(math.expm1(best_point[0]))
        # What the rows justify may be worse than the optimum of plain temperature scaling, which is one.
        best = found if found.value < plain.value else plain
        return replace(best, n_cells=plain.n_cells + found.n_cells)
    words = [
        text
        for name, value, ends in zip(("gamma", "temperature"), best_point, bounds, strict=True)
        for text in mean.words(name, float(value), ends)
    ]
    return SearchResult(
        math.expm1(best_point[0]),
        _temperature(float(best_point[1])),
        float(best_value),
        plain.n_cells + mean.n_cells,
        tuple(words),
    )


def _valleys(values: np.ndarray) -> list[int]:
    """Indices of the local minima, the lowest first."""
    padded = np.concatenate([[np.inf], values, [np.inf]])
    bottoms = np.flatnonzero((values <= padded[:-2]) & (values <= padded[2:]))
    return sorted(bottoms.tolist(), key=values.__getitem__)


def _newton(
    gradient: Callable[[np.ndarray], tuple[float, np.ndarray]], point: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, float]:
    """A minimum of a smooth function of a few variables between bounds; from its gradient, never uphill."""
    value, slope = gradient(point)
    for _ in range(60):
        # A variable at a bound that it would cross takes no part.
        free = ~(((point <= low) & (slope > 0)) | ((point >= high) & (slope < 0)))
        if not free.any():
            break
        # Second derivatives as differences of the exact first ones.
        width = 1e-5
        columns = []
        for i in np.flatnonzero(free):
            moved = point.copy()
            moved[i] += width if point[i] + width <= high[i] else -width
            columns.append((gradient(moved)[1][free] - slope[free]) / (moved[i] - point[i]))
        curvature = np.stack(columns)
        sizes, directions = np.linalg.eigh((curvature + curvature.T) / 2)
        # Downhill along every axis of the quadratic form, also where it bends down.
        sizes = np.maximum(np.abs(sizes), 1e-8 * max(1e-300, float(np.abs(sizes).max())))
        step = np.zeros_like(point)
        step[free] = -directions @ ((directions.T @ slope[free]) / sizes)
        step /= max(1.0, float(np.abs(step).max()))
        for _ in range(30):
            moved = np.clip(point + step, low, high)
            trial, trial_slope = gradient(moved)
            if trial <= value:
                break
            step /= 2
        else:
            break
        travelled = float(np.abs(moved - point).max())
        point, value, slope = moved, trial, trial_slope
        if travelled <= 1e-9:
            break
    return point, value
