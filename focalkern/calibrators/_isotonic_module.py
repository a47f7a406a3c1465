"""The module of isotonic regression."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern._types import InputKind
from focalkern.calibrators._inputs import cannot_occur, probabilities
from focalkern.calibrators._modules import RowMap, exports_to_onnx

__all__ = ["IsotonicLogProbs"]


class IsotonicLogProbs(RowMap):
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
    _pieces: Tensor
    _starts: Tensor
    _of_fit = ("points", "values")

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
        self._cut()

    def _cut(self) -> None:
        """Makes the table of the pieces between the points: [C * (points + 1), 4], with epsilon mixed in.

        A piece is x -> first + (x - low) / width * rise; those before the first and after the last point are constant.
        """
        n_classes, longest = self.points.shape
        mixed = (1 - self.epsilon) * self.values + self.epsilon / n_classes
        pieces = mixed.new_zeros(n_classes, longest + 1, 4)
        low, width, first, rise = pieces.unbind(-1)
        low.copy_(torch.cat([self.points[:, :1], self.points], 1))
        first.copy_(torch.cat([mixed[:, :1], mixed], 1))
        width.fill_(1)
        inner = self.points[:, 1:].isfinite()
        width[:, 1:-1] = torch.where(inner, self.points.diff(), 1.0)
        rise[:, 1:-1] = torch.where(inner, mixed.diff(), 0.0)
        self.register_buffer("_pieces", pieces.flatten(0, 1), persistent=False)
        starts = torch.arange(n_classes, device=pieces.device) * (longest + 1)
        self.register_buffer("_starts", starts.unsqueeze(1), persistent=False)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.epsilon], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        (self.epsilon,) = state.tolist()
        self._cut()

    def mapped(self, input: Tensor, *, log: bool) -> Tensor:
        """Log-probabilities [..., C], or probabilities, of ``input`` [..., C], in its dtype; computed in float64."""
        wide = input.to(torch.float64)
        probs = probabilities(wide, self.input_kind)
        columns = probs.reshape(-1, probs.shape[-1]).T.contiguous()
        if exports_to_onnx():  # ONNX has no searchsorted: count the points below
            piece = (self.points.unsqueeze(1) < columns.unsqueeze(-1)).sum(-1)
        else:
            piece = torch.searchsorted(self.points, columns)
        low, width, first, rise = self._pieces.index_select(0, (piece + self._starts).flatten()).unbind(-1)
        regressed = torch.addcmul(first, (columns.flatten() - low) / width, rise)
        regressed = regressed.view_as(columns).T.reshape(probs.shape)
        regressed = regressed.masked_fill(cannot_occur(wide, self.input_kind), 0.0)
        result = regressed / regressed.sum(-1, keepdim=True)
        return (result.log() if log else result).to(input.dtype)
