"""The module of isotonic regression."""

from collections.abc import Sequence
from typing import Any

import numpy as np
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
        # All regressions have the length of the longest, at least two, by repeats of the last point. They are finite,
        # so that averages of models have no NaN.
        longest = max(2, *(len(x) for x, _ in steps))
        for place, name in enumerate(("points", "values")):
            padded = [np.pad(step[place], (0, longest - len(step[place])), mode="edge") for step in steps]
            self.register_buffer(name, torch.from_numpy(np.stack(padded)))
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
        gaps = self.points.diff()
        width[:, 1:-1] = torch.where(gaps > 0, gaps, 1.0)
        rise[:, 1:-1] = mixed.diff()
        self.register_buffer("_pieces", pieces.flatten(0, 1), persistent=False)

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
        # Not a buffer: an average of models in floating point may round a whole number down.
        starts = torch.arange(0, len(self._pieces), self.points.shape[1] + 1, device=piece.device)
        low, width, first, rise = self._pieces.index_select(0, (piece + starts.unsqueeze(1)).flatten()).unbind(-1)
        regressed = torch.addcmul(first, (columns.flatten() - low) / width, rise)
        regressed = regressed.view_as(columns).T.reshape(probs.shape)
        regressed = regressed.masked_fill(cannot_occur(wide, self.input_kind), 0.0)
        result = regressed / regressed.sum(-1, keepdim=True)
        return (result.log() if log else result).to(input.dtype)
