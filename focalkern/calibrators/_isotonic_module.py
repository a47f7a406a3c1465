"""The module of isotonic regression."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern._types import InputKind
from focalkern.calibrators._inputs import as_pairs, can_occur
from focalkern.calibrators._modules import ExactBuffers, exports_to_onnx

__all__ = ["IsotonicLogProbs"]


class IsotonicLogProbs(ExactBuffers):
    """Logits (or probabilities) to the log-probabilities of isotonic regression, class by class.

    The points of the regressions are float64 buffers; ``module.half()`` does not round them.

    Args:
        steps: [C] pairs of arrays: ascending points, and the values at the points.
        epsilon: epsilon of :class:`IsotonicCalibration`, between 0 and 1.
        input_kind: ``"logits"`` or ``"probs"``, the kind of the input of ``forward``.
        one_logit: ``forward`` takes one logit (or probability of class 1) per sample and returns the calibrated logit.

    Source: Zadrozny & Elkan, KDD 2002.
    """

    points: Tensor
    values: Tensor

    def __init__(
        self,
        steps: Sequence[tuple[Any, Any]],
        epsilon: float,
        input_kind: InputKind = "logits",
        *,
        one_logit: bool = False,
    ) -> None:
        super().__init__()
        self.epsilon = float(epsilon)
        self.input_kind = input_kind
        self.one_logit = one_logit
        # All regressions have the length of the longest, at least two; the last value is repeated after the last point.
        longest = max(2, *(len(x) for x, _ in steps))
        points = torch.full((len(steps), longest), math.inf, dtype=torch.float64)
        values = torch.zeros_like(points)
        for k, (x, y) in enumerate(steps):
            points[k, : len(x)] = torch.as_tensor(x)
            values[k, : len(y)] = torch.as_tensor(y)
            values[k, len(y) :] = float(y[-1])
        self.register_buffer("points", points)
        self.register_buffer("values", values)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.epsilon], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        (self.epsilon,) = state.tolist()

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., C], floating point -> log-probabilities [..., C]; one logit [...] -> calibrated logit."""
        pairs = (as_pairs(input, self.input_kind) if self.one_logit else input).to(torch.float64)
        possible = can_occur(pairs, self.input_kind)
        probs = pairs / pairs.sum(-1, keepdim=True) if self.input_kind == "probs" else pairs.softmax(-1)
        columns = probs.movedim(-1, 0).reshape(probs.shape[-1], -1).contiguous()
        last = torch.where(self.points.isfinite(), self.points, -math.inf).amax(-1, keepdim=True)
        inside = columns.clamp(min=self.points[:, :1], max=last)
        if exports_to_onnx():  # ONNX has no searchsorted: count the points below
            after = (self.points.unsqueeze(1) < inside.unsqueeze(-1)).sum(-1)
        else:
            after = torch.searchsorted(self.points, inside)
        after = after.clamp(min=1, max=self.points.shape[1] - 1)
        low, high = self.points.gather(1, after - 1), self.points.gather(1, after)
        first, second = self.values.gather(1, after - 1), self.values.gather(1, after)
        regressed = first + (inside - low) / (high - low) * (second - first)
        regressed = regressed.reshape(probs.shape[-1], *probs.shape[:-1]).movedim(0, -1)
        mixed = (1 - self.epsilon) * regressed + self.epsilon / probs.shape[-1]
        mixed = torch.where(possible, mixed, 0.0)
        # The search put NaN rows into the last step; they become NaN again.
        log_probs = torch.where(probs.isnan(), math.nan, (mixed / mixed.sum(-1, keepdim=True)).log())
        return (log_probs[..., 1] - log_probs[..., 0] if self.one_logit else log_probs).to(input.dtype)
