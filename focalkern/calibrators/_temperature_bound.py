"""The lower bound of the temperature if the criterion falls all the way to T = 0."""

import math

import torch
from torch import Tensor

from focalkern._checks import count_rows
from focalkern._types import InputKind
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._row_source import RowSource, rows_of
from focalkern.calibrators._search import TEMPERATURE_BOUNDS
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = [
    "BEYOND",
    "NO_OPTIMUM",
    "bound_remedy",
    "confidence_limit",
    "describe_bound",
    "justified_confidence",
    "limit_warnings",
    "no_error_warnings",
    "no_row_is_wrong",
    "succession_bound",
]

BEYOND = "the optimum lies beyond it"
NO_OPTIMUM = "all temperatures are equally good"
"""Ends and beginnings of sentences of ``at_border_``."""

# Number of bisections: the bounds are 8 powers of ten apart, and this many halvings reach rounding.
_HALVINGS = 60
# Rows of the first look for a wrong one, and factor of each next look: most sets have a wrong row among the first.
_FIRST_ROWS, _MORE_ROWS = 64, 16
# Rows of batches with at most so many numbers are read once and kept for the bisections.
_KEPT = 1 << 24


def justified_confidence(weight_sum: float) -> float:
    """(N + 1) / (N + 2): Laplace's estimate of the probability that the next row is correct after N of N correct rows.

    A row with weight 2 counts as two rows.
    """
    return (weight_sum + 1) / (weight_sum + 2)


def no_row_is_wrong(source: RowSource) -> bool:
    """Whether the target of every row has the largest input: then the NLL falls all the way to T = 0."""
    wrong = torch.zeros(1, dtype=torch.float64)
    for part in source.parts():
        if _has_wrong_row(part.input, part.target):
            wrong += 1
            break
    return float(source.add_up(wrong)) == 0


def _has_wrong_row(input: Tensor, target: Tensor) -> bool:
    begin, n = 0, _FIRST_ROWS
    while begin < len(target):
        block, labels = input[begin : begin + n], target[begin : begin + n]
        if bool((block.gather(1, labels[:, None]) < block.amax(1, True)).any()):
            return True
        begin, n = begin + n, n * _MORE_ROWS
    return False


def succession_bound(
    source: RowSource,
    gamma: float,
    input_kind: InputKind,
    bounds: tuple[float, float] = TEMPERATURE_BOUNDS,
) -> float:
    """The smallest T within the bounds at which the mean confidence is at most :func:`justified_confidence`.

    Rows with only one possible class have confidence 1 at every temperature and are left out.

    Args:
        source: the rows.
        gamma: gamma of the focal calibration map.
        input_kind: ``"logits"`` or ``"probs"``.

    Source: the rule of succession, Laplace 1774.
    """
    ceiling = justified_confidence(source.weight_sum)
    source = source.every(1) if source.n_rows * source.n_classes <= _KEPT else source

    def confidence(log_temperature: float) -> float:
        sums = torch.zeros(2, dtype=torch.float64)
        for part in source.parts():
            for block in part.blocks():
                log_probs = focal_calibration_map(
                    block.input.to(torch.float64), gamma, math.exp(log_temperature), input_kind=input_kind, log=True
                )
                open_rows = block.weight * ((log_probs > -math.inf).sum(-1) > 1)
                sums += torch.stack([log_probs.amax(-1).exp() @ open_rows, open_rows.sum()]).cpu()
        total, rows = source.add_up(sums).tolist()
        return total / rows if rows else 0.0

    low, high = (math.log(bound) for bound in bounds)
    if confidence(low) <= ceiling:
        return bounds[0]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if confidence(middle) <= ceiling else (middle, high)
    return math.exp(high)


def describe_bound(temperature: float, n_rows: int, weight_sum: float, why: str) -> str:
    """The sentence of ``at_border_`` for the temperature of :func:`succession_bound`."""
    if temperature == TEMPERATURE_BOUNDS[0]:
        return f"temperature = {temperature:g} is the lower bound of the search: {why}"
    return (
        f"temperature = {temperature:g} is the lower bound of the search on {count_rows(n_rows)}, with a mean "
        f"confidence of at most {justified_confidence(weight_sum):.4g}: {why}"
    )


def confidence_limit(source: RowSource) -> float | None:
    """:func:`justified_confidence` if no row is wrong, else None."""
    return justified_confidence(source.weight_sum) if no_row_is_wrong(source) else None


def limit_warnings(limit: float | None) -> list[str]:
    """The warning of a fit to rows with a :func:`confidence_limit`."""
    if limit is None:
        return []
    return [
        f"no row of fit is wrong, so fit raises the mean confidence to {limit:.4g} at most (fit on more rows, some of "
        "them wrong)"
    ]


def no_error_warnings(rows: FitData) -> list[str]:
    """The warning of a fit to rows without an error, for calibrators whose epsilon limits the confidence."""
    if not no_row_is_wrong(rows_of(rows)):
        return []
    return [
        "no row of fit is wrong, so the rows give no upper limit of the confidence (fit on more rows, some of them "
        "wrong)"
    ]


def bound_remedy(words: str) -> str:
    """The remedy for a temperature at a bound of the search; ``words`` are the sentence of ``at_border_``."""
    if words.endswith(BEYOND) or words.startswith(NO_OPTIMUM):
        return (
            "divide logits whose differences are far from 1 by their size, or take RobustTemperatureScaling, which has "
            "no bounds; else fit on rows with an accuracy above chance"
        )
    return "fit on rows with some wrong predictions and an accuracy above chance"
