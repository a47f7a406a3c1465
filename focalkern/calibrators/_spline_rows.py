"""Rows as the fits of spline scaling read them, with the temperature, floor and knots that a fold shares with all."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._robust_temperature import masks
from focalkern.calibrators._spline_curve import NaturalSpline
from focalkern.calibrators._spline_features import BLOCK, find_knots, floor_of, logit_scale, robust_temperature, spread
from focalkern.ops.spline_sums import spline_sums_for

__all__ = ["SplineRows"]


@dataclass(frozen=True)
class SplineRows:
    """Rows with the temperature, the floor and the knots of a spline scaling.

    Attributes:
        input: [N, C] logits or probabilities.
        target: [N] int64.
        weight: [N] float64.
        input_kind: ``"logits"`` or ``"probs"``.
        temperature, floor: T and e of x = log((1 - e) softmax(z / T) + e / C).
        masks: whether a logit of -inf means probability 0.
        spline: the knots.
        penalty: the quadratic form of the penalty of (a, f), [m + 1, m + 1].
        factor: of all penalties.
    """

    input: Tensor
    target: Tensor
    weight: Tensor
    input_kind: str
    temperature: float
    floor: float
    masks: bool
    spline: NaturalSpline
    penalty: Tensor
    factor: float

    @classmethod
    def of(cls, rows: FitData, input_kind: str, penalty: float = 1.0, temperature: float | None = None) -> Self:
        """Find temperature, floor and knots.

        Args:
            penalty: the factor of all penalties.
            temperature: of :func:`robust_temperature`, where that is known.
        """
        input, target = rows.input, rows.target
        weight = rows.weight
        if weight is None:
            weight = torch.ones(len(input), dtype=torch.float64, device=input.device)
        total = float(weight.sum())
        share = weight / total
        floor = floor_of(total)
        scale = logit_scale(input, share, input_kind)
        if temperature is None:
            temperature = robust_temperature(input, target, share, total, input_kind, scale)
        # A temperature at its upper end would leave x flat, and the penalties would keep it so.
        temperature = min(temperature, 2 * scale * max(1.0, spread(input, share, input_kind, scale)))
        is_probs = input_kind == "probs"
        spline = NaturalSpline(
            find_knots(spline_sums_for(input).spline_histogram(input, share, temperature, floor, is_probs))
        )
        impossible = masks(input, target, input_kind)
        return cls(
            input, target, weight, input_kind, temperature, floor, impossible, spline, spline.penalty(), float(penalty)
        )

    @property
    def n_classes(self) -> int:
        return self.input.shape[1]

    @property
    def weight_sum(self) -> float:
        return float(self.weight.sum())

    def __getitem__(self, rows: Tensor | slice) -> "SplineRows":
        """The rows of a mask [N] or a slice, with the same features."""
        return replace(self, input=self.input[rows], target=self.target[rows], weight=self.weight[rows])

    def blocks(self) -> Iterator["SplineRows"]:
        """About :data:`BLOCK` entries at a time."""
        n = max(1, BLOCK // self.n_classes)
        for start in range(0, len(self.target), n):
            yield self[start : start + n]

    def log_probs(self) -> Tensor:
        """x [N, C] float64."""
        is_probs = self.input_kind == "probs"
        found: Tensor = spline_sums_for(self.input).spline_log_probs(self.input, self.temperature, self.floor, is_probs)
        return found
