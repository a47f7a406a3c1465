"""The lower bound of the temperature if the criterion falls all the way to T = 0."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from focalkern._checks import count_rows
from focalkern._types import InputKind
from focalkern.calibrators._search import TEMPERATURE_BOUNDS
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = ["describe_bound", "justified_confidence", "succession_bound"]

# Numbers per block that is converted to float64.
_BLOCK = 1 << 22
# Number of bisections: the bounds are 8 powers of ten apart, and this many halvings reach rounding.
_HALVINGS = 60


def justified_confidence(n_rows: int, weight: Tensor | None) -> float:
    """(N + 1) / (N + 2): Laplace's estimate of the probability that the next row is correct after N of N correct rows.

    A row with weight 2 counts as two rows.
    """
    n = float(n_rows) if weight is None else float(weight.sum())
    return (n + 1) / (n + 2)


def succession_bound(input: Tensor, gamma: float, input_kind: InputKind, weight: Tensor | None = None) -> float:
    """The smallest T within the bounds at which the mean confidence is at most :func:`justified_confidence`.

    Rows with only one possible class have confidence 1 at every temperature and are left out.

    Args:
        input: [N, C] of ``input_kind``.
        gamma: gamma of the focal calibration map.
        weight: [N] float64, weight of each row; None is 1.

    Source: the rule of succession, Laplace 1774.
    """
    ceiling = justified_confidence(len(input), weight)

    def confidence(log_temperature: float) -> float:
        total, rows = 0.0, 0.0
        for block, share in _blocks(input, weight):
            log_probs = focal_calibration_map(block, gamma, math.exp(log_temperature), input_kind=input_kind, log=True)
            open_rows = share * ((log_probs > -math.inf).sum(-1) > 1)
            total += float(log_probs.amax(-1).exp() @ open_rows)
            rows += float(open_rows.sum())
        return total / rows if rows else 0.0

    low, high = (math.log(bound) for bound in TEMPERATURE_BOUNDS)
    if confidence(low) <= ceiling:
        return TEMPERATURE_BOUNDS[0]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if confidence(middle) <= ceiling else (middle, high)
    return math.exp(high)


def describe_bound(temperature: float, n_rows: int, weight: Tensor | None, why: str) -> str:
    """The sentence of ``at_border_`` for the temperature of :func:`succession_bound`."""
    if temperature == TEMPERATURE_BOUNDS[0]:
        return f"temperature = {temperature:g} is the lower bound of the search: {why}"
    return (
        f"temperature = {temperature:g} is the lower bound of the search on {count_rows(n_rows)}, with a mean "
        f"confidence of at most {justified_confidence(n_rows, weight):.4g}: {why}"
    )


def _blocks(input: Tensor, weight: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(1, _BLOCK // input.shape[1])
    every = torch.ones(len(input), dtype=torch.float64, device=input.device) if weight is None else weight
    for block, share in zip(input.split(rows), every.split(rows), strict=True):
        yield block.to(torch.float64), share
