"""What spline scaling reads of a row: its temperature, the floored log-probabilities x, their log-odds u, the knots."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from focalkern.ops.spline_sums import spline_sums_for

__all__ = [
    "as_scores",
    "features",
    "find_knots",
    "floor_of",
    "floored",
    "log_odds",
    "logit_scale",
    "robust_temperature",
    "spread",
]

BLOCK = 1 << 19
"""Numbers of a block of rows in float64."""

MOST_KNOTS = 10
LEAST_KNOTS = 4
KNOT_GAP = 0.25

_LOG_T = 6.0  # the search is for log T on [-6, 6]
_GRID_STEP = 0.5
_GRID_SIZE = 200_000
_LOWEST = 1000.0  # below the maximum of its row a logit counts no further

_BINS_PER_UNIT, _HISTOGRAM_END = 64, 60


def floor_of(weight_sum: float) -> float:
    """e = 0.1 / (W + 1), the share of the uniform distribution in x."""
    return 0.1 / (weight_sum + 1)


def as_scores(input: Tensor, input_kind: str) -> Tensor:
    """Logits, or logarithms of probabilities, in float64."""
    wide = input.to(torch.float64)
    return wide.log() if input_kind == "probs" else wide


def floored(scores: Tensor, temperature: float, floor: float) -> Tensor:
    """(1 - e) softmax(z / T) + e / C."""
    return (scores / temperature).softmax(-1) * (1 - floor) + floor / scores.shape[-1]


def log_odds(probs: Tensor, x: Tensor) -> Tensor:
    """u = x - log(1 - p). Where p is above 1/2, 1 - p cancels, and the sum of the other classes takes its place."""
    large = probs > 0.5
    others = probs.masked_fill(large, 0.0).sum(-1, keepdim=True)
    return x - torch.where(large, others, 1 - probs).log()


def features(scores: Tensor, temperature: float, floor: float) -> tuple[Tensor, Tensor]:
    """x and u of logits [..., C] float64."""
    probs = floored(scores, temperature, floor)
    x = probs.log()
    return x, log_odds(probs, x)


def row_blocks(input: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of [N, C] and of what has a number per row, about :data:`BLOCK` entries at a time."""
    rows = max(1, BLOCK // input.shape[1])
    return zip(input.split(rows), *(column.split(rows) for column in columns), strict=True)


def logit_scale(input: Tensor, share: Tensor, input_kind: str) -> float:
    """The unit of the search for T: 1, and more where rows have their two largest logits hundreds apart on average."""
    largest = max(
        float(as_scores(block, input_kind).where(block.isfinite(), 0.0).nan_to_num(neginf=0.0).abs().max())
        for (block,) in row_blocks(input)
    )
    if largest <= _LOWEST:
        return 1.0
    total, weights = 0.0, 0.0
    for block, w in row_blocks(input, share):
        gap = as_scores(block, input_kind).topk(2).values.diff(dim=-1).squeeze(-1).neg()
        w = w * gap.isfinite()
        total += float(w @ gap.nan_to_num(posinf=0.0))
        weights += float(w.sum())
    return max(1.0, total / weights / 100) if weights > 0 else 1.0


def robust_temperature(
    input: Tensor,
    target: Tensor,
    share: Tensor,
    weight_sum: float,
    input_kind: str,
    scale: float = 1.0,
    near: float | None = None,
) -> float:
    r"""The temperature that spline scaling and the automatic choice start from: finite on any rows.

    .. math::
        \min_T \overline{-\log\big((1 - e)\, \text{softmax}(z / T)_y + e / C\big)} + \frac{(\log T)^2}{2 W},
        \qquad e = \frac{0.1}{W + 1}

    The floor bounds the loss of a row whose target has probability 0, and of a few hopeless rows. The second term,
    a normal prior on log T of deviation 1, keeps T finite where every row is right.

    Args:
        input: [N, C], logits or probabilities.
        target: [N] int64.
        share: [N] float64, what a row weighs; sums to 1.
        weight_sum: W, how many rows that is.
        input_kind: ``"logits"`` or ``"probs"``.
        scale: of :func:`logit_scale`; T is found in this unit.
        near: T of nearly the same rows, where the search starts in place of a grid.

    Returns:
        T, log(T / scale) within [-6, 6] and exact to 1e-8.
    """
    floor, is_probs = floor_of(weight_sum), input_kind == "probs"
    sums_of = spline_sums_for(input).spline_temperature_sums

    def objective(log_ts: list[float], rows: slice) -> tuple[Tensor, Tensor]:
        """The losses and their slopes in log T."""
        log_t, part = torch.tensor(log_ts, dtype=torch.float64), share[rows]
        of_all = 1.0 if rows == slice(None) else 1 / float(part.sum())
        beta = (-log_t).exp() / scale
        value, slope = of_all * sums_of(input[rows], target[rows], part, beta, floor, is_probs)
        return value + log_t**2 / (2 * weight_sum), log_t / weight_sum - beta * slope

    if near is not None:
        start = min(max(math.log(near / scale), -_LOG_T), _LOG_T)
    else:
        few = slice(None) if input.numel() <= _GRID_SIZE else slice(None, None, -(-input.numel() // _GRID_SIZE))
        grid = [-_LOG_T + _GRID_STEP * i for i in range(round(2 * _LOG_T / _GRID_STEP) + 1)]
        start = grid[int(objective(grid, few)[0].argmin())]
    return scale * math.exp(_root(lambda log_t: float(objective([log_t], slice(None))[1]), start))


def _root(slope: Callable[[float], float], start: float) -> float:
    """Where a slope turns from - to + near ``start``, by secants inside a bracket; else an end of the search."""
    low = high = start
    of_low = of_high = slope(start)
    while of_low > 0:
        if low <= -_LOG_T:
            return -_LOG_T
        high, of_high = low, of_low
        low -= _GRID_STEP
        of_low = slope(low)
    while of_high <= 0:
        if high >= _LOG_T:
            return _LOG_T
        low, of_low = high, of_high
        high += _GRID_STEP
        of_high = slope(high)
    side, middle = 0, start
    for _ in range(100):
        previous, middle = middle, (low * of_high - high * of_low) / (of_high - of_low)
        found = slope(middle)
        if found == 0 or abs(middle - previous) < 1e-9:
            break
        # Illinois: the value at an end that stays twice counts half, so that both ends close in.
        if found > 0:
            high, of_high, of_low = middle, found, of_low / 2 if side > 0 else of_low
            side = 1
        else:
            low, of_low, of_high = middle, found, of_high / 2 if side < 0 else of_high
            side = -1
    return middle


def spread(input: Tensor, share: Tensor, input_kind: str, scale: float = 1.0) -> float:
    """The root mean square of logits minus the mean of their row, each raised to at least its row's maximum - 1000.

    Logits are divided by ``scale`` first.
    """
    return math.sqrt(spline_sums_for(input).spline_spread(input, share, scale, _LOWEST, input_kind == "probs"))


def find_knots(counts: Tensor) -> Tensor:
    """[m] float64, 4 <= m <= 10: quantiles of the weighted log-odds at least 0.25 apart.

    ``counts`` [7680] is their histogram in bins of 1/64 from -60 to 60.
    """
    sums = counts.cumsum(0)
    levels = torch.linspace(0.02, 0.98, MOST_KNOTS, dtype=torch.float64) * sums[-1]
    # A level that is met up to rounding is met: repeated rows give the same knots.
    first = torch.searchsorted(sums, levels * (1 - 1e-12)).clamp(max=len(counts) - 1)
    centres = (first.to(torch.float64) + 0.5) / _BINS_PER_UNIT - _HISTOGRAM_END
    kept: list[float] = []
    for centre in centres.tolist():
        if not kept or centre >= kept[-1] + KNOT_GAP:
            kept.append(centre)
    if len(kept) < LEAST_KNOTS:
        return torch.linspace(kept[0] - 1, kept[-1] + 1, LEAST_KNOTS, dtype=torch.float64)
    return torch.tensor(kept, dtype=torch.float64)
