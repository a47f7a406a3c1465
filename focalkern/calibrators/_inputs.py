"""Functions of rows of logits or probabilities [..., C], shared by calibrators and their modules."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from focalkern._types import HALVES, InputKind

__all__ = [
    "as_pairs",
    "as_scores",
    "cannot_occur",
    "floored",
    "floored_input",
    "losses_of",
    "probabilities",
    "renormalized",
    "traces",
    "widened",
]


def traces() -> bool:
    """Whether torch.jit.trace, or an exporter that uses it, records this call."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()  # torch.compile does not support the second


def widened(input: Tensor) -> Tensor:
    """The input in the dtype of the computation: float32 for half precision."""
    return input.float() if input.dtype in HALVES else input


def renormalized(probs: Tensor) -> Tensor:
    """Probabilities [..., C] of half precision in float32, divided by their sum, because checks of wider types reject
    the rounding of the sum."""
    wide = widened(probs)
    return wide if wide is probs else wide / wide.sum(-1, keepdim=True)


def as_pairs(input: Tensor, input_kind: str) -> Tensor:
    """Inputs [...] of class 1 as [..., 2] of both classes; probabilities of half precision in float32, because 1 - p
    would be rounded."""
    one = widened(input) if input_kind == "probs" else input
    return torch.stack([1 - one if input_kind == "probs" else torch.zeros_like(one), one], dim=-1)


def as_scores(input: Tensor, input_kind: str) -> Tensor:
    """Logits, or logarithms of probabilities, in float64."""
    wide = input.to(torch.float64)
    return wide.log() if input_kind == "probs" else wide


def probabilities(input: Tensor, input_kind: InputKind) -> Tensor:
    """Logits or probabilities [..., C] as float64 probabilities that sum to 1."""
    wide = input.to(torch.float64)
    return wide / wide.sum(-1, keepdim=True) if input_kind == "probs" else wide.softmax(-1)


def cannot_occur(input: Tensor, input_kind: str) -> Tensor:
    """[..., C] bool: True for classes with a logit of -inf or a probability of 0."""
    return input <= (0 if input_kind == "probs" else -math.inf)


def floored(log_probs: Tensor, floor: float) -> Tensor:
    r"""\log((1 - \text{floor})\, p + \text{floor} / C), of log p [..., C]."""
    least = (log_probs.new_full((), floor) / log_probs.shape[-1]).log()  # exporters may leave C open
    shares = log_probs + math.log1p(-floor)
    if traces():  # for ONNX: torch's exporter by tracing has no logaddexp
        return torch.maximum(shares, least) + torch.log1p(torch.exp(-(shares - least).abs()))
    return torch.logaddexp(shares, least)


def floored_input(input: Tensor, floor: float, input_kind: str) -> Tensor:
    """Logits or probabilities [..., C] of (1 - floor) p + floor / C, in float32 for half precision."""
    wide = widened(input)
    if input_kind == "probs":
        return (1 - floor) * wide / wide.sum(-1, keepdim=True) + floor / wide.shape[-1]
    return floored(wide.log_softmax(-1), floor)


def losses_of(log_probs: Tensor, labels: Tensor, names: Sequence[str]) -> Tensor:
    """[losses, N]: the losses of every row, ``"nll"`` or ``"brier"`` by these names."""
    of_target = log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    found = {"nll": -of_target}
    if "brier" in names:
        found["brier"] = log_probs.exp().square().sum(-1) - 2 * of_target.exp() + 1
    return torch.stack([found[name] for name in names])
