"""The features of spline scaling: temperature, floored log-probabilities x, their log-odds u, and the knots."""

import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from focalkern._types import InputKind
from focalkern.calibrators._inputs import as_scores
from focalkern.calibrators._row_source import RowSource
from focalkern.calibrators._temperature_bound import succession_bound
from focalkern.ops.spline_sums import spline_sums_for

__all__ = [
    "KNOT_GAP",
    "LEAST_KNOTS",
    "MOST_KNOTS",
    "features",
    "find_knots",
    "floor_of",
    "floored",
    "fold_temperatures",
    "has_unit",
    "histogram",
    "logit_scale",
    "masks_zeros",
    "robust_temperature",
    "spread",
    "temperature_sums",
]

MOST_KNOTS = 10
LEAST_KNOTS = 4
KNOT_GAP = 0.25

_LOG_T = 6.0  # the search is for log T on [-6, 6]
_GRID_STEP = 0.5
_NEAR_STEP = 0.03  # from T of nearly the same rows
_DONE, _DONE_NEAR = 1e-9, 1e-6  # length of a last step, whose end is not evaluated; its error is about the square
_NODES = tuple(-0.045 * math.cos(math.pi * (2 * i + 1) / 10) for i in range(5))  # Chebyshev's, from T of all rows
_GRID_SIZE, _GRID_ROWS = 200_000, 1000  # numbers and rows of the grid, about
_FLAT = 0.05  # log T of logits that differ less may lie below -6
_LOWEST = 1000.0  # a logit further below the maximum of its row counts as this far below

_BINS_PER_UNIT, _HISTOGRAM_END = 64, 60


def floor_of(weight_sum: float) -> float:
    """e = 0.1 / (W + 1), the share of the uniform distribution in x."""
    return 0.1 / (weight_sum + 1)


def floored(scores: Tensor, temperature: float, floor: float) -> Tensor:
    """(1 - e) softmax(z / T) + e / C."""
    # A tensor, because a tracer sees C as an integer tensor: a number divided by it would be float32.
    share = scores.new_full((), floor) / scores.shape[-1]
    return (scores / temperature).softmax(-1) * (1 - floor) + share


def log_odds(probs: Tensor, x: Tensor) -> Tensor:
    """u = x - log(1 - p). For p > 1/2, 1 - p would cancel; it is computed as the sum of the other classes."""
    large = probs > 0.5
    others = probs.masked_fill(large, 0.0).sum(-1, keepdim=True)
    return x - torch.where(large, others, 1 - probs).log()


def features(scores: Tensor, temperature: float, floor: float) -> tuple[Tensor, Tensor]:
    """x and u of logits [..., C] float64."""
    probs = floored(scores, temperature, floor)
    x = probs.log()
    return x, log_odds(probs, x)


def masks_zeros(source: RowSource, input_kind: str) -> bool:
    """Whether a logit of -inf means probability 0: no row has its label there."""
    if input_kind != "logits":
        return False
    count = torch.zeros(1, dtype=torch.float64)
    for part in source.parts():
        count += (part.input.gather(1, part.target.unsqueeze(1)) == -torch.inf).sum().cpu()
    return float(source.add_up(count)) == 0


def _sizes(source: RowSource, input_kind: str) -> tuple[bool, bool]:
    """Whether a finite logit is above 1000 or below -1000; whether all logits are within 0.05 of each other."""
    counts = torch.zeros(2, dtype=torch.float64)
    for part in source.parts():
        low, high = as_scores(torch.stack(torch.aminmax(part.input)), input_kind).tolist()
        counts[1] += high - low >= _FLAT
        if input_kind == "probs" or (low >= -_LOWEST and high <= _LOWEST):  # the smallest double has a log of -745
            continue
        for block in part.blocks():
            size = as_scores(block.input, input_kind).abs()
            counts[0] += ((size > _LOWEST) & (size < torch.inf)).any().cpu()
    large, wide = source.add_up(counts).tolist()
    return large != 0, wide == 0


def has_unit(source: RowSource, input_kind: str) -> bool:
    """Whether the unit of T (:func:`logit_scale`) may differ from 1."""
    return any(_sizes(source, input_kind))


def logit_scale(source: RowSource, input_kind: str) -> float:
    """The unit of T in the search. With g the mean difference of the two largest logits of a row: g / 100 if g is over
    100, g / 5 if all logits are within 0.05 of each other, else 1."""
    is_large, is_flat = _sizes(source, input_kind)
    if not (is_large or is_flat):
        return 1.0
    sums = torch.zeros(2, dtype=torch.float64)
    for part in source.parts():
        for block in part.blocks():
            gap = as_scores(block.input, input_kind).topk(2).values.diff(dim=-1).squeeze(-1).neg()
            w = block.weight * gap.isfinite()
            sums += torch.stack([w @ gap.nan_to_num(posinf=0.0), w.sum()]).cpu()
    total, weights = source.add_up(sums).tolist()
    if not total > 0:
        return 1.0
    return float(total / weights / 5 if is_flat else max(1.0, total / weights / 100))


def temperature_sums(source: RowSource, input_kind: str, betas: Tensor, floor: float) -> Tensor:
    """[2, B]: the mean NLL of (1 - e) softmax(z beta) + e / C for each beta, and its derivative in beta."""
    sums = torch.zeros(2, len(betas), dtype=torch.float64)
    for part in source.parts():
        sums_of = spline_sums_for(part.input).spline_temperature_sums
        sums += sums_of(part.input, part.target, part.weight, betas, floor, input_kind == "probs")
    return source.add_up(sums) / source.weight_sum


def robust_temperature(
    source: RowSource, input_kind: InputKind, scale: float = 1.0, near: float | None = None, no_errors: bool = False
) -> float:
    r"""The temperature of robust temperature scaling and of the features of spline scaling, finite on any rows.

    .. math::
        \min_T \overline{-\log\big((1 - e)\, \text{softmax}(z / T)_y + e / C\big)} + \frac{(\log T)^2}{2 W},
        \qquad e = \frac{0.1}{W + 1}

    The floor bounds the loss of rows whose target has a probability of 0 or near 0. The second term is a normal prior
    on log T with standard deviation 1.

    Args:
        source: the rows; W is the sum of their weights.
        input_kind: ``"logits"`` or ``"probs"``.
        scale: result of :func:`logit_scale`; T is found in this unit.
        near: T of nearly the same rows, at which the search starts in place of a grid.
        no_errors: result of :func:`no_row_is_wrong`. If no row is wrong, the rows give no upper limit of the
            confidence, and the prior alone permits an error rate far below 1 / N: then T is at least ``scale`` or, if
            that is smaller, the result of :func:`succession_bound`.

    Returns:
        T, log(T / scale) within [-6, 6] and exact to 1e-8, with ``near`` to 1e-6.
    """
    weight_sum = source.weight_sum
    floor = floor_of(weight_sum)

    def objective(log_ts: list[float], rows: RowSource) -> tuple[list[float], list[float]]:
        """The losses and their derivatives in log T."""
        betas = [math.exp(-log_t) / scale for log_t in log_ts]
        sums = temperature_sums(rows, input_kind, torch.tensor(betas, dtype=torch.float64), floor).tolist()
        terms = list(zip(log_ts, betas, *sums, strict=True))
        return (
            [value + log_t**2 / (2 * weight_sum) for log_t, _, value, _ in terms],
            [log_t / weight_sum - beta * slope for log_t, beta, _, slope in terms],
        )

    step = _GRID_STEP
    if near is not None:
        start, step = min(max(math.log(near / scale), -_LOG_T), _LOG_T), _NEAR_STEP
    else:
        few = source.every(max(1, -(-source.n_rows * source.n_classes // _GRID_SIZE), source.n_rows // _GRID_ROWS))
        grid = [-_LOG_T + _GRID_STEP * i for i in range(round(2 * _LOG_T / _GRID_STEP) + 1)]
        losses = objective(grid, few)[0]
        start = grid[losses.index(min(losses))]
    done = _DONE if near is None else _DONE_NEAR
    log_t = _root(lambda log_t: objective([log_t], source)[1][0], start, step, done)
    temperature = scale * math.exp(log_t)
    if no_errors and log_t < 0:
        return succession_bound(source, 0.0, input_kind, (temperature, scale))
    return temperature


def fold_temperatures(folds: Sequence[RowSource], input_kind: InputKind, near: float) -> list[float | None]:
    """:func:`robust_temperature` of the rows outside of each fold, in the unit 1, from sums over the folds.

    The derivatives at five temperatures are those of all folds without those of the fold. T is the zero of the
    polynomial through them, exact to 1e-6.

    Args:
        folds: the rows of each fold.
        input_kind: ``"logits"`` or ``"probs"``.
        near: T of all rows.

    Returns:
        T for each fold; None if it is not between the five temperatures.
    """
    log_ts = [math.log(near) + node for node in _NODES]
    betas = torch.tensor([math.exp(-log_t) for log_t in log_ts], dtype=torch.float64)
    weight_sum = sum(fold.weight_sum for fold in folds)
    floors = [floor_of(weight_sum - fold.weight_sum) for fold in folds]
    if max(map(abs, log_ts)) > _LOG_T or len(set(floors)) > 2:  # folds of equal rows have two sizes
        return [None] * len(folds)
    found: list[float | None] = [None] * len(folds)
    for floor in set(floors):
        of_fold = [betas * fold.weight_sum * temperature_sums(fold, input_kind, betas, floor)[1] for fold in folds]
        of_all = torch.stack(of_fold).sum(0)
        for k, sums in enumerate(of_fold):
            if floors[k] == floor:
                found[k] = _zero_between(log_ts, (torch.tensor(log_ts, dtype=torch.float64) - of_all + sums).tolist())
    return [None if log_t is None else math.exp(log_t) for log_t in found]


def _zero_between(points: Sequence[float], values: Sequence[float]) -> float | None:
    """The point at which increasing values are 0, by the polynomial of points through all values; else None."""
    if not (values[0] < 0 < values[-1] and all(map(operator.lt, values, values[1:]))):
        return None
    found = list(points)
    for width in range(1, len(found)):  # Neville's scheme
        for i, (low, high) in enumerate(zip(values, values[width:], strict=False)):
            found[i] = (high * found[i] - low * found[i + 1]) / (high - low)
    return found[0]


def _root(slope: Callable[[float], float], start: float, step: float, done: float) -> float:
    """The point near ``start`` at which the slope changes from negative to positive; an end of the range if no such
    point exists. Each step towards a bracket is twice as long as the one before, up to the step of the grid.

    Source: T. R. Chandrupatla, A new hybrid quadratic/bisection algorithm for finding the zero of a nonlinear function
    without using derivatives, Advances in Engineering Software 28, 1997.
    """
    low = high = start
    of_low = of_high = slope(start)
    while of_low > 0:
        if low <= -_LOG_T:
            return -_LOG_T
        high, of_high = low, of_low
        low, step = low - step, min(2 * step, _GRID_STEP)
        of_low = slope(low)
    while of_high <= 0:
        if high >= _LOG_T:
            return _LOG_T
        low, of_low = high, of_high
        high, step = high + step, min(2 * step, _GRID_STEP)
        of_high = slope(high)
    # The bracket is from `last` to `other`; `third` is the point before.
    last, of_last, other, of_other = low, of_low, high, of_high
    share = of_last / (of_last - of_other)
    for _ in range(100):
        moved = last + share * (other - last)
        if abs(moved - last) < done:
            return moved
        found = slope(moved)
        if (found > 0) == (of_last > 0):
            third, of_third = last, of_last
        else:
            third, of_third, other, of_other = other, of_other, last, of_last
        last, of_last = moved, found
        if of_last == 0 or abs(other - last) < done:
            break
        x, y = (last - other) / (third - other), (of_last - of_other) / (of_third - of_other)
        share = 0.5
        if y * y < x and (1 - y) ** 2 < 1 - x:  # the inverse of the parabola through the three points is monotone
            share = of_last / (of_other - of_last) * of_third / (of_other - of_third)
            share += (third - last) / (other - last) * of_last / (of_third - of_last) * of_other / (of_third - of_other)
    return last


def spread(source: RowSource, input_kind: str, scale: float = 1.0) -> float:
    """The root mean square of logits minus the mean of their row, each raised to at least its row's maximum - 1000.

    Logits are divided by ``scale`` first.
    """
    sums = torch.zeros(1, dtype=torch.float64)
    for part in source.parts():
        sums += spline_sums_for(part.input).spline_spread(
            part.input, part.weight, scale, _LOWEST, input_kind == "probs"
        )
    return math.sqrt(float(source.add_up(sums)) / source.weight_sum)


def histogram(source: RowSource, input_kind: str, temperature: float, floor: float) -> Tensor:
    """[7680] float64: the weighted histogram of the log-odds in bins of 1/64 from -60 to 60, divided by W."""
    counts = torch.zeros(2 * _HISTOGRAM_END * _BINS_PER_UNIT, dtype=torch.float64)
    for part in source.parts():
        sums_of = spline_sums_for(part.input).spline_histogram
        counts += sums_of(part.input, part.weight, temperature, floor, input_kind == "probs").cpu()
    return source.add_up(counts) / source.weight_sum


def find_knots(counts: Tensor) -> Tensor:
    """[m] float64, 4 <= m <= 10: quantiles of the weighted log-odds at least 0.25 apart.

    ``counts`` [7680] is their histogram in bins of 1/64 from -60 to 60.
    """
    sums = counts.cumsum(0)
    levels = torch.linspace(0.02, 0.98, MOST_KNOTS, dtype=torch.float64) * sums[-1]
    # A small tolerance, so that rounding does not change the knots when all rows are repeated.
    first = torch.searchsorted(sums, levels * (1 - 1e-12)).clamp(max=len(counts) - 1)
    centres = (first.to(torch.float64) + 0.5) / _BINS_PER_UNIT - _HISTOGRAM_END
    kept: list[float] = []
    for centre in centres.tolist():
        if not kept or centre >= kept[-1] + KNOT_GAP:
            kept.append(centre)
    if len(kept) < LEAST_KNOTS:
        return torch.linspace(kept[0] - 1, kept[-1] + 1, LEAST_KNOTS, dtype=torch.float64)
    return torch.tensor(kept, dtype=torch.float64)
