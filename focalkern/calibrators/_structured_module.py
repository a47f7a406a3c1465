"""The module of structured scaling."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from focalkern._devices import without_autocast
from focalkern._types import InputKind
from focalkern.calibrators._inputs import cannot_occur, floored, widened
from focalkern.calibrators._modules import RowMap, exports_to_onnx
from focalkern.calibrators._plain_map import plain_map
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = ["StructuredLogProbs"]


class StructuredLogProbs(RowMap):
    r"""Logits (or probabilities) to the log-probabilities of structured scaling, with the numbers of a fitted one.

    .. math::
        \hat p = \text{softmax}(W x + b), \qquad x = \log\big((1 - \epsilon)\, \text{softmax}(z / T) + \epsilon / C\big)

    over the possible classes. If a focal map was fitted, the focal calibration map of W x + b replaces the softmax. The
    weight and the bias are float64 buffers; ``module.half()`` does not round them.

    Args:
        temperature: T > 0.
        epsilon: between 0 and 1.
        weight: W [C, C], or its diagonal [C].
        bias: b [C].
        focal: gamma and temperature of the focal map; (0, 1) is none.
        input_kind: ``"logits"`` or ``"probs"``, the kind of the input of ``forward``.
        one_logit: ``forward`` takes one logit (or probability of class 1) per sample and returns the calibrated logit.
        fused: the compiled operator; False computes in torch's own operators, for exporters that support only these.

    Source: Berta et al., AISTATS 2026 (arXiv 2511.03685).
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        temperature: float,
        epsilon: float,
        weight: Tensor,
        bias: Tensor,
        focal: tuple[float, float],
        input_kind: InputKind = "logits",
        *,
        one_logit: bool = False,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.temperature = float(temperature)
        self.epsilon = float(epsilon)
        self.focal = focal
        self.input_kind = input_kind
        self.one_logit = one_logit
        self.fused = fused
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.temperature, self.epsilon, *self.focal], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.temperature, self.epsilon, *focal = state.tolist()
        self.focal = (focal[0], focal[1])

    def mapped(self, input: Tensor, *, log: bool) -> Tensor:
        """Log-probabilities [..., C], or probabilities, of ``input`` [..., C], in its dtype."""
        return self.finished(self.scores(widened(input)), log=log).to(input.dtype)

    def features(self, input: Tensor) -> Tensor:
        """x [..., C], the floored log-probabilities after the temperature."""
        scores = input.log() if self.input_kind == "probs" else input
        scores = (scores - scores.amax(-1, keepdim=True)) / self.temperature
        return floored(scores.log_softmax(-1), self.epsilon)

    def scores(self, input: Tensor) -> Tensor:
        """W x + b, -inf for classes that cannot occur."""
        features = self.features(input)
        weight, bias = self.weight.to(features), self.bias.to(features)
        is_vector = weight.dim() == 1
        with without_autocast(features.device.type):
            scores = torch.addcmul(bias, features, weight) if is_vector else F.linear(features, weight, bias)
        return scores.masked_fill(cannot_occur(input, self.input_kind), -math.inf)

    def finished(self, scores: Tensor, *, log: bool) -> Tensor:
        """Log-probabilities, or probabilities, from the scores W x + b."""
        gamma, temperature = self.focal
        if (gamma, temperature) == (0.0, 1.0):
            return scores.log_softmax(-1) if log else scores.softmax(-1)
        if not self.fused or exports_to_onnx():
            log_probs = plain_map(scores, gamma, temperature, "logits")
            return log_probs if log else log_probs.exp()
        return focal_calibration_map(scores, gamma, temperature, log=log)

    def extra_repr(self) -> str:
        return (
            f"temperature={self.temperature}, epsilon={self.epsilon}, weight={list(self.weight.shape)}, "
            f"focal={self.focal}, input_kind={self.input_kind!r}"
        )
