"""Searches for (gamma, T): on a grid, along a line, from coarse to fine, and by the derivatives of the NLL."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from focalkern.ops.calibration_grid import PAPER_GAMMAS, CalibrationGrid, calibration_grid
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = [
    "DEFAULT_GAMMAS",
    "GAMMA_BOUNDS",
    "TEMPERATURE_BOUNDS",
    "Found",
    "Search",
    "grid_border",
    "nll_focal",
    "nll_temperature",
    "search_line",
    "search_refine",
]

Search = Literal["grid", "line", "refine", "nll"]

DEFAULT_GAMMAS: tuple[float, ...] = (0.0, *PAPER_GAMMAS)
"""What :class:`FocalTemperatureScaling` searches: the paper's nine values, and before them 0, plain temperature
scaling. First, because of two equal cells the earlier one is taken: the plainer calibrator wins a tie."""

TEMPERATURE_BOUNDS: tuple[float, float] = (1e-4, 1e4)
"""Where the search by derivatives looks for T. An optimum outside, or at 0 or infinity, becomes the nearer bound."""

GAMMA_BOUNDS: tuple[float, float] = (-0.99, 100.0)
"""Where the search by derivatives looks for gamma. The map is defined for gamma > -1; for gamma towards infinity, with
the temperature that fits, it becomes temperature scaling again."""

# Rows are converted to float64 so many numbers at a time.
_BLOCK = 1 << 22

_NO_LABEL = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        gamma, temperature, value: the optimum, and the criterion there.
        n_cells: evaluations of the criterion.
        at_border: in words, each parameter that lies where the search ended.
        grid: all cells, where they are a grid.
    """

    gamma: float
    temperature: float
    value: float
    n_cells: int
    at_border: tuple[str, ...] = ()
    grid: CalibrationGrid | None = None


def grid_border(grid: CalibrationGrid, gamma: float, temperature: float) -> tuple[str, ...]:
    """In words, each parameter of a chosen cell that is the smallest or largest of those searched.

    Args:
        grid: the grid that was searched.
        gamma, temperature: the chosen cell.

    Returns:
        Up to two sentences without a full stop, such as ``"gamma = 5 is the largest that was searched"``. Nothing is
        said of a parameter of which only one value was searched.
    """
    words = []
    for name, value, axis in (("gamma", gamma, grid.gammas), ("temperature", temperature, grid.temperatures)):
        low, high = float(axis.min()), float(axis.max())
        if low < high and value in (low, high):
            words.append(f"{name} = {value:g} is the {'smallest' if value == low else 'largest'} that was searched")
    return tuple(words)


def from_grid(grid: CalibrationGrid, criterion: str) -> Found:
    gamma, temperature, value = grid.best(criterion)
    border = grid_border(grid, gamma, temperature)
    return Found(gamma, temperature, value, grid.tables[criterion].numel(), border, grid)


def every_row_grid(
    input: Tensor, target: Tensor, gammas: object, temperatures: object, **options: object
) -> CalibrationGrid:
    """:func:`calibration_grid` in which no label means "leave this row out"."""
    try:
        return calibration_grid(input, target, gammas, temperatures, ignore_index=_NO_LABEL, **options)  # type: ignore[arg-type]
    except IndexError as error:
        raise IndexError(str(error).replace(" or ignore_index", "")) from None


# -- fewer cells than a grid -----------------------------------------------------------------------------------------

# Computes the table [gammas, temperatures] of the criterion.
Table = Callable[[Sequence[float], Sequence[float]], "np.ndarray[tuple[int, int], np.dtype[np.float64]]"]

# Neighbours on a line are computed together, as a small grid of which the diagonal is looked at: a grid of one cell
# costs nearly as much as one of many, because every call prepares the rows anew.
_TOGETHER = 10

# The coarsest temperatures of "refine", and the temperatures between two neighbours in each round after that.
_COARSE, _FINE = 24, 9


class _Best:
    """The first of the smallest finite values seen, and how many were seen."""

    def __init__(self) -> None:
        self.gamma, self.temperature, self.value, self.n_cells = math.nan, math.nan, math.inf, 0

    def see(self, gamma: float, temperatures: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
        """Cells of one gamma; returns the best temperature among them and its value."""
        best = min(range(len(values)), key=lambda i: values[i] if math.isfinite(values[i]) else math.inf)
        self.n_cells += len(values)
        if math.isfinite(values[best]) and values[best] < self.value:
            self.gamma, self.temperature, self.value = gamma, temperatures[best], values[best]
        return temperatures[best], values[best]

    def found(self, gammas: Sequence[float], temperatures: Sequence[float]) -> Found:
        """The result of a search between the ends of both axes."""
        words = []
        for name, value, axis in (("gamma", self.gamma, gammas), ("temperature", self.temperature, temperatures)):
            low, high = min(axis), max(axis)
            if low < high and value in (low, high):
                words.append(f"{name} = {value:g} is the {'smallest' if value == low else 'largest'} that was searched")
        if not math.isfinite(self.value):
            raise ValueError("fit: the criterion must be finite in some cell, got none")
        return Found(self.gamma, self.temperature, self.value, self.n_cells, tuple(words))


def search_line(table: Table, gammas: Sequence[float], temperatures: Sequence[float]) -> Found:
    """With m temperatures: the best T at the first and at the last gamma, and m points of the line through both.

    In the plane of gamma and T, where the best T per gamma form a nearly straight ridge; the line runs from the
    smallest gamma to the largest, and where it leaves the range of the temperatures there are no points: at most 3m
    cells. A best T that is itself the end of that range bends the line away from the ridge, which is said.

    Source: Komisarenko & Kull 2024 (arXiv 2408.11598), section 5.2, which proposes it and leaves it untested.
    """
    best = _Best()
    first, last = gammas[0], gammas[-1]
    ends = []
    for gamma in (first, last) if first != last else (first,):
        ends.append(best.see(gamma, temperatures, table([gamma], temperatures)[0].tolist())[0])
    bent = []
    if first != last:
        slope = (ends[1] - ends[0]) / (last - first)
        points = [
            (gamma, temperature)
            for gamma in np.linspace(min(gammas), max(gammas), len(temperatures)).tolist()
            if min(temperatures) <= (temperature := ends[0] + slope * (gamma - first)) <= max(temperatures)
        ]
        for begin in range(0, len(points), _TOGETHER):
            few = points[begin : begin + _TOGETHER]
            cells = table([gamma for gamma, _ in few], [temperature for _, temperature in few])
            for (gamma, temperature), value in zip(few, cells.diagonal().tolist(), strict=True):
                best.see(gamma, [temperature], [value])
        low, high = min(temperatures), max(temperatures)
        bent = [
            f"the line goes through T = {end:g} at gamma = {gamma:g}, the "
            f"{'smallest' if end == low else 'largest'} that was searched"
            for gamma, end in zip((first, last), ends, strict=True)
            if low < high and end in (low, high)
        ]
    found = best.found(gammas, temperatures)
    return replace(found, at_border=(*found.at_border, *bent))


def search_refine(table: Table, gammas: Sequence[float], temperatures: Sequence[float]) -> Found:
    """From coarse to fine: temperatures at every gamma, then gammas around the best one.

    At each gamma: temperatures a constant factor apart over the whole range, then three times as many finer ones
    between the neighbours of the best. Then three times: the middles between the best gamma and its neighbours, with
    temperatures around what the neighbours' best ones suggest.
    """
    best = _Best()
    low, high = min(temperatures), max(temperatures)
    coarse = np.geomspace(low, high, _COARSE).tolist() if low < high else [low]
    coarse[0], coarse[-1] = low, high
    factor = (high / low) ** (1 / max(1, len(coarse) - 1))

    def around(gamma: float, temperature: float, factor: float, rounds: int) -> float:
        for _ in range(rounds):
            window = np.geomspace(max(low, temperature / factor), min(high, temperature * factor), _FINE).tolist()
            window = [min(max(value, low), high) for value in window]
            temperature, _ = best.see(gamma, window, table([gamma], window)[0].tolist())
            factor **= 2 / (_FINE - 1)
        return temperature

    ridge: dict[float, float] = {}
    for gamma, values in zip(gammas, table(gammas, coarse).tolist(), strict=True):
        temperature, _ = best.see(gamma, coarse, values)
        ridge[gamma] = around(gamma, temperature, factor, 3) if low < high else temperature
    for _ in range(3):
        axis = sorted(ridge)
        place = axis.index(best.gamma) if best.gamma in ridge else 0
        for other in axis[max(0, place - 1) : place + 2]:
            if other != axis[place]:
                middle = (axis[place] + other) / 2
                suggested = (ridge[axis[place]] + ridge[other]) / 2
                ridge[middle] = around(middle, suggested, 1.1, 2) if low < high else low
    return best.found(gammas, temperatures)


# -- NLL by its derivatives ------------------------------------------------------------------------------------------


def _scores(input: Tensor, target: Tensor, input_kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of (logits minus the largest of their row, float64, -inf where a class cannot occur; target [n, 1])."""
    rows = max(1, _BLOCK // input.shape[1])
    for block, labels in zip(input.split(rows), target.split(rows), strict=True):
        scores = block.to(torch.float64)
        scores = scores.log() if input_kind == "probs" else scores
        yield scores - scores.amax(-1, keepdim=True), labels.unsqueeze(-1)


def check_finite_nll(name: str, input: Tensor, target: Tensor, input_kind: str) -> None:
    """Raises where no temperature has a finite NLL; the values of ``input`` must have been checked."""
    of_target = input.gather(1, target.unsqueeze(1)).squeeze(1)
    impossible = of_target == (0 if input_kind == "probs" else -math.inf)
    if bool(impossible.any()):
        what = "probability 0" if input_kind == "probs" else "a logit of -inf"
        raise ValueError(
            f"{name}: the NLL must be finite for some temperature, but {int(impossible.sum())} of {len(input)} rows "
            f"(the first is {int(impossible.nonzero()[0])}) give their target {what}; criterion='ece' can be fitted"
        )


def nll_temperature(input: Tensor, target: Tensor, input_kind: str) -> Found:
    r"""The temperature with the smallest mean NLL of softmax(z / T).

    In beta = 1/T the NLL is convex: with q = softmax(beta z),

    .. math:: f'(\beta) = \overline{E_q[z] - z_y}, \qquad f''(\beta) = \overline{\mathrm{Var}_q[z]}

    The root of f' is found by Newton steps inside a bracket that every step narrows; a step that leaves it, or that
    halves neither it nor the derivative, is replaced by the bracket's geometric mean. Whether there is a root at all is
    read from the limits of f' at 0 and infinity, which need no search.

    Args:
        input: [N, C] of ``input_kind``, checked; no target impossible.
        target: [N] int64.
    """

    def derivatives(beta: float) -> tuple[float, float, float]:
        sums = torch.zeros(3, dtype=torch.float64, device=input.device)
        for scores, labels in _scores(input, target, input_kind):
            q = (beta * scores).exp()
            total = q.sum(-1, keepdim=True)
            q /= total
            finite = scores.masked_fill(scores == -math.inf, 0.0)
            mean = (q * finite).sum(-1, keepdim=True)
            of_target = finite.gather(1, labels)
            value = total.log() - beta * of_target
            sums += torch.stack([value.sum(), (mean - of_target).sum(), (q * (finite - mean).square()).sum()])
        value, first, second = (sums / len(input)).tolist()
        return value, first, second

    at_zero, at_infinity, spread = 0.0, 0.0, 0.0
    for scores, labels in _scores(input, target, input_kind):
        possible = scores > -math.inf
        finite = scores.masked_fill(~possible, 0.0)
        of_target = finite.gather(1, labels).squeeze(1)
        at_zero += float((finite.sum(-1) / possible.sum(-1) - of_target).sum())
        at_infinity -= float(of_target.sum())
        spread -= float(finite.sum())

    low, high = 1 / TEMPERATURE_BOUNDS[1], 1 / TEMPERATURE_BOUNDS[0]
    if spread == 0:
        words = "every temperature is as good as another: all classes of a row that can occur have the same logit"
        return Found(0.0, 1.0, derivatives(1.0)[0], 1, (words,))
    if at_infinity == 0:
        words = "the target has the largest logit of every row, and the NLL falls all the way to temperature 0"
        return _at_bound(derivatives, high, 0, words)
    if at_zero >= 0:
        words = (
            "the targets have no higher logits than the other classes on average, and the NLL falls all the way to an "
            "infinite temperature"
        )
        return _at_bound(derivatives, low, 0, words)

    beyond = "the optimum lies beyond it"
    if derivatives(high)[1] <= 0:
        return _at_bound(derivatives, high, 1, beyond)
    if derivatives(low)[1] >= 0:
        return _at_bound(derivatives, low, 2, beyond)
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
    return Found(0.0, 1 / beta, value, n_cells)


def _at_bound(derivatives: Callable[[float], tuple[float, float, float]], beta: float, spent: int, why: str) -> Found:
    temperature = TEMPERATURE_BOUNDS[1] if beta < 1 else TEMPERATURE_BOUNDS[0]
    words = f"temperature = {temperature:g} is the {'upper' if beta < 1 else 'lower'} bound of the search: {why}"
    return Found(0.0, temperature, derivatives(beta)[0], spent + 1, (words,))


# Where the Newton steps of nll_focal may start: NLL over gamma, each with its best T, has valleys on both sides of a
# ridge, so that one start would not do.
_START_GAMMAS = (-0.95, -0.8, -0.6, -0.4, -0.2, 0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_START_FACTORS: tuple[float, ...] = tuple(0.2 * 1.17**index for index in range(32))  # of T at gamma = 0: 0.2 to 26


def nll_focal(input: Tensor, target: Tensor, input_kind: Literal["logits", "probs"]) -> Found:
    r"""gamma and T with the smallest mean NLL of the focal calibration map.

    The NLL is smooth in both but not convex. A coarse grid around the optimum of plain temperature scaling finds the
    valleys; in each, Newton steps in (log(1 + gamma), log T) follow the map's own derivatives to the bottom, a step
    is shortened until it lowers the NLL, and the smallest bottom wins. gamma = 0 wins where nothing is better.

    Args: as :func:`nll_temperature`.
    """
    plain = nll_temperature(input, target, input_kind)
    if plain.at_border:
        # No optimum in T: then none for any gamma.
        return plain
    of_target = target.unsqueeze(1)
    n_cells = plain.n_cells

    def gradient(point: np.ndarray) -> tuple[float, np.ndarray]:
        """The NLL and its derivatives at (log(1 + gamma), log T)."""
        nonlocal n_cells
        n_cells += 1
        gamma, temperature = (
            torch.tensor(value, dtype=torch.float64, device=input.device, requires_grad=True)
            for value in (math.expm1(point[0]), math.exp(point[1]))
        )
        total = np.zeros(3)
        rows = max(1, _BLOCK // input.shape[1])
        for block, labels in zip(input.split(rows), of_target.split(rows), strict=True):
            with torch.enable_grad():
                log_probs = focal_calibration_map(
                    block.to(torch.float64), gamma, temperature, input_kind=input_kind, log=True
                )
                value = -log_probs.gather(1, labels).sum()
            slopes = torch.autograd.grad(value, (gamma, temperature))
            total += [value.item(), *(slope.item() for slope in slopes)]
        total /= len(input)
        return total[0], total[1:] * [1 + gamma.item(), temperature.item()]

    low = np.array([math.log1p(GAMMA_BOUNDS[0]), math.log(TEMPERATURE_BOUNDS[0])])
    high = np.array([math.log1p(GAMMA_BOUNDS[1]), math.log(TEMPERATURE_BOUNDS[1])])

    axis = [factor * plain.temperature for factor in _START_FACTORS]
    axis = [temperature for temperature in axis if TEMPERATURE_BOUNDS[0] <= temperature <= TEMPERATURE_BOUNDS[1]]
    cells = every_row_grid(input, target, _START_GAMMAS, axis, criteria=("nll",), input_kind=input_kind).tables["nll"]
    n_cells += cells.numel()
    valley = cells.amin(1).cpu().numpy()
    columns = cells.argmin(1).cpu().numpy()
    padded = np.concatenate([[np.inf], valley, [np.inf]])
    bottoms = np.flatnonzero((valley <= padded[:-2]) & (valley <= padded[2:]))
    starts = [(_START_GAMMAS[i], axis[columns[i]]) for i in sorted(bottoms, key=valley.__getitem__)[:3]]
    starts.append((0.0, plain.temperature))

    best_point, best_value = np.array([0.0, math.log(plain.temperature)]), plain.value
    for gamma, temperature in starts:
        start = np.clip([math.log1p(gamma), math.log(temperature)], low, high)
        point, value = _newton(gradient, start, low, high)
        # More than rounding: where gamma says nothing (two equal classes, say), 0 stays.
        if value < best_value - 1e-12 * abs(best_value):
            best_point, best_value = point, value
    words = []
    for name, value, bounds in (
        ("gamma", best_point[0], (low[0], high[0])),
        ("temperature", best_point[1], (low[1], high[1])),
    ):
        if value in bounds:
            end = math.expm1(value) if name == "gamma" else math.exp(value)
            words.append(f"{name} = {end:g} is the {'lower' if value == bounds[0] else 'upper'} bound of the search")
    return Found(math.expm1(best_point[0]), math.exp(best_point[1]), float(best_value), n_cells, tuple(words))


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
