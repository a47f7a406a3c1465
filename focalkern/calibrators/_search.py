"""Searches for (gamma, T): on a grid, and by the derivatives of the NLL."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from focalkern.ops.calibration_grid import PAPER_GAMMAS, CalibrationGrid, calibration_grid

__all__ = ["DEFAULT_GAMMAS", "TEMPERATURE_BOUNDS", "Found", "Search", "grid_border", "nll_temperature"]

Search = Literal["grid", "nll"]

DEFAULT_GAMMAS: tuple[float, ...] = (0.0, *PAPER_GAMMAS)
"""What :class:`FocalTemperatureScaling` searches: the paper's nine values, and before them 0, plain temperature
scaling. First, because of two equal cells the earlier one is taken: the plainer calibrator wins a tie."""

TEMPERATURE_BOUNDS: tuple[float, float] = (1e-4, 1e4)
"""Where the search by derivatives looks for T. An optimum outside, or at 0 or infinity, becomes the nearer bound."""

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
    return calibration_grid(input, target, gammas, temperatures, ignore_index=_NO_LABEL, **options)  # type: ignore[arg-type]


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
