"""Fitted calibrators as modules, to append to a network."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern import reference
from focalkern._checks import flag, number, one_of
from focalkern._types import HALVES, InputKind
from focalkern.ops.calibration_map import binary_focal_calibration_map, focal_calibration_map

__all__ = [
    "CalibratedLogProbs",
    "CalibratedLogits",
    "ClassAxis",
    "FlooredInput",
    "HistogramLogProbs",
    "IsotonicLogProbs",
    "MultiLabelLogits",
    "StructuredLogProbs",
    "bin_top_class",
]


class _Constants(torch.nn.Module):
    """gamma and temperature, as Python numbers, and which implementation of the map is used."""

    def __init__(
        self, gamma: float, temperature: float, input_kind: InputKind = "logits", *, fused: bool = True
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.gamma = number(name, "gamma", gamma)
        self.temperature = number(name, "temperature", temperature)
        one_of(name, "input_kind", input_kind, ("logits", "probs"))
        self.input_kind = input_kind
        self.fused = flag(name, "fused", fused)
        if not (math.isfinite(self.gamma) and self.gamma > -1):
            raise ValueError(f"{name}: gamma must be finite and greater than -1, got {self.gamma}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"{name}: temperature must be finite and positive, got {self.temperature}")

    def _plain(self) -> bool:
        """Whether to spell the map out in torch's own operators: ONNX has no other."""
        return not self.fused or torch.onnx.is_in_onnx_export()

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.gamma, self.temperature], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.gamma, self.temperature = state.tolist()

    def extra_repr(self) -> str:
        fused = "" if self.fused else ", fused=False"
        return f"gamma={self.gamma}, temperature={self.temperature}, input_kind={self.input_kind!r}{fused}"


class CalibratedLogProbs(_Constants):
    r"""Logits (or probabilities) to calibrated log-probabilities, with the constants of a fitted calibrator.

    .. math:: q = \text{softmax}(z / T), \quad \hat p_j \propto \frac{q_j}{(1 - q_j)^\gamma (1 + \gamma \varphi(q_j))}

    with phi(q) = -q log q / (1 - q). Both constants are Python numbers, not buffers, so that ``module.half()`` does
    not round them; ``torch.export`` and ``torch.compile`` take them as constants. ``state_dict`` has them as one
    float64 tensor [gamma, temperature].

    ``torch.onnx.export(..., dynamo=True)`` gets the same map in operators that ONNX has, as does everything with
    ``fused=False``.

    Args:
        gamma: > -1, put straight into the formula; 0 is temperature scaling.
        temperature: > 0.
        input_kind: ``"logits"`` or ``"probs"``, what ``forward`` will be given.
        fused: the compiled operator; False spells the map out in torch's own operators, for exporters that know no
            others. It looks at no values: a row with NaN or +inf gives NaN.

    Source: Komisarenko & Kull 2024 (arXiv 2408.11598), section 4.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., C], floating point -> log-probabilities [..., C]."""
        if self._plain():
            return plain_map(input, self.gamma, self.temperature, self.input_kind)
        return focal_calibration_map(input, self.gamma, self.temperature, input_kind=self.input_kind, log=True)


class CalibratedLogits(CalibratedLogProbs):
    r"""One logit per sample to the calibrated logit, whose sigmoid is the calibrated probability of class 1.

    .. math::
        g(s) = (1 + \gamma) s - \log(1 + \gamma\varphi(\sigma(s))) + \log(1 + \gamma\varphi(\sigma(-s))), \quad s = z/T

    Args: as :class:`CalibratedLogProbs`; with ``input_kind="probs"`` ``forward`` takes probabilities of class 1.

    Source: Komisarenko & Kull 2024 (arXiv 2408.11598), section 4.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [...], floating point -> calibrated logits [...]."""
        if self.input_kind == "probs":
            # Both probabilities, so that 1 is as good as 0.
            log_probs = super().forward(as_pairs(input, "probs"))
            return log_probs[..., 1] - log_probs[..., 0]
        if self._plain():
            return reference.binary_focal_calibration_map(input, self.gamma, self.temperature, log_odds=True)
        return binary_focal_calibration_map(input, self.gamma, self.temperature, log_odds=True)


class ClassAxis(torch.nn.Module):
    """[N, C, d1, ...] to log-probabilities of the same shape, by a module of [..., C]; [N, C] as they are."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self.module(input.movedim(1, -1)).movedim(-1, 1)
        return result


class FlooredInput(torch.nn.Module):
    r"""A module of a calibrator after a floor: probabilities p become (1 - floor) p + floor / C before it.

    Args:
        module: from logits or probabilities [..., C] to log-probabilities; or of one logit per sample.
        floor: between 0 and 1.
        input_kind: ``"logits"`` or ``"probs"``, what ``forward`` will be given.
        one_logit: ``forward`` takes one logit (or probability of class 1) per sample, and C is 2.
    """

    def __init__(
        self, module: torch.nn.Module, floor: float, input_kind: InputKind, *, one_logit: bool = False
    ) -> None:
        super().__init__()
        self.module = module
        self.floor = float(floor)
        self.input_kind = input_kind
        self.one_logit = one_logit

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.floor], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        (self.floor,) = state.tolist()

    def forward(self, input: Tensor) -> Tensor:
        """What the module gives, in the dtype of ``input``."""
        pairs = as_pairs(input, self.input_kind) if self.one_logit else input
        rows = floored_input(pairs, self.floor, self.input_kind)
        if self.one_logit:
            rows = rows[..., 1] if self.input_kind == "probs" else rows[..., 1] - rows[..., 0]
        result: Tensor = self.module(rows)
        return result.to(input.dtype)

    def extra_repr(self) -> str:
        return f"floor={self.floor}"


class _Exact(torch.nn.Module):
    """float64 buffers that move with the module and are never rounded with it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self


class MultiLabelLogits(_Exact):
    """Logits of L labels to calibrated logits, each label with a gamma and a temperature of its own.

    Both are float64 buffers; ``module.half()`` does not round them.

    Args:
        gammas, temperatures: [L].
        input_kind: ``"logits"`` or ``"probs"``, what ``forward`` will be given.
        fused: as :class:`CalibratedLogProbs`.

    Source: Komisarenko & Kull 2024 (arXiv 2408.11598), section 4, for each label.
    """

    gammas: Tensor
    temperatures: Tensor

    def __init__(
        self,
        gammas: Sequence[float],
        temperatures: Sequence[float],
        input_kind: InputKind = "logits",
        *,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.input_kind = input_kind
        self.fused = fused
        self.register_buffer("gammas", torch.tensor(gammas, dtype=torch.float64))
        self.register_buffer("temperatures", torch.tensor(temperatures, dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., L], floating point -> calibrated logits [..., L]; their sigmoid are the probabilities."""
        plain = not self.fused or torch.onnx.is_in_onnx_export()
        if self.input_kind == "probs":
            of_pairs = reference.focal_calibration_map if plain else focal_calibration_map
            log_probs = of_pairs(as_pairs(input, "probs"), self.gammas, self.temperatures, input_kind="probs", log=True)
            return log_probs[..., 1] - log_probs[..., 0]
        of_logits = reference.binary_focal_calibration_map if plain else binary_focal_calibration_map
        return of_logits(input, self.gammas, self.temperatures, log_odds=True)


class HistogramLogProbs(_Exact):
    """Logits (or probabilities) to the log-probabilities of histogram binning on the top class.

    The edges and values are float64 buffers; ``module.half()`` does not round them.

    Args:
        scaling: what comes before, from the input to log-probabilities [..., C].
        edges: [M - 1], the cuts between the M bins, ascending; bin (lo, hi].
        values: [M], what the confidence of a bin becomes.
        one_logit: ``forward`` takes one logit (or probability of class 1) per sample and returns the calibrated logit.

    Source: Zadrozny & Elkan 2001; Guo et al. 2017 (arXiv 1706.04599), section 4.1; on the top class as Wang et al.,
    NeurIPS 2021.
    """

    edges: Tensor
    values: Tensor

    def __init__(
        self,
        scaling: CalibratedLogProbs | FlooredInput,
        edges: Sequence[float],
        values: Sequence[float],
        *,
        one_logit: bool = False,
    ) -> None:
        super().__init__()
        self.scaling = scaling
        self.input_kind = scaling.input_kind
        self.one_logit = one_logit
        self.register_buffer("edges", torch.tensor(edges, dtype=torch.float64))
        self.register_buffer("values", torch.tensor(values, dtype=torch.float64))

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., C], floating point -> log-probabilities [..., C]; one logit [...] -> calibrated logit."""
        pairs = as_pairs(input, self.input_kind) if self.one_logit else input
        log_probs = self.scaling(widened(pairs))
        possible = can_occur(pairs, self.input_kind) | isinstance(self.scaling, FlooredInput)
        binned = bin_top_class(log_probs, pairs.argmax(-1, keepdim=True), possible, self.edges, self.values)
        return (binned[..., 1] - binned[..., 0] if self.one_logit else binned).to(input.dtype)


class StructuredLogProbs(_Exact):
    r"""Logits (or probabilities) to the log-probabilities of structured scaling, with the numbers of a fitted one.

    .. math::
        \hat p = \text{softmax}(W x + b), \qquad x = \log\big((1 - \epsilon)\, \text{softmax}(z / T) + \epsilon / C\big)

    over the classes that can occur, and, where there is one, the focal calibration map of W x + b in place of the
    softmax. The weight and the bias are float64 buffers; ``module.half()`` does not round them.

    Args:
        temperature: T > 0.
        epsilon: between 0 and 1.
        weight: W [C, C], or its diagonal [C].
        bias: b [C].
        focal: gamma and temperature of the focal map; (0, 1) is none.
        input_kind: ``"logits"`` or ``"probs"``, what ``forward`` will be given.
        one_logit: ``forward`` takes one logit (or probability of class 1) per sample and returns the calibrated logit.
        fused: as :class:`CalibratedLogProbs`.

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

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., C], floating point -> log-probabilities [..., C]; one logit [...] -> calibrated logit."""
        pairs = widened(as_pairs(input, self.input_kind) if self.one_logit else input)
        log_probs = self.finished(self.scores(pairs))
        return (log_probs[..., 1] - log_probs[..., 0] if self.one_logit else log_probs).to(input.dtype)

    def features(self, input: Tensor) -> Tensor:
        """x."""
        scores = input.log() if self.input_kind == "probs" else input
        scores = (scores - scores.amax(-1, keepdim=True)) / self.temperature
        return floored(scores.log_softmax(-1), self.epsilon)

    def scores(self, input: Tensor) -> Tensor:
        """W x + b, -inf for classes that cannot occur."""
        features = self.features(input)
        weight, bias = self.weight.to(features.dtype), self.bias.to(features.dtype)
        scores = (features * weight if weight.dim() == 1 else features @ weight.T) + bias
        return scores.masked_fill(~can_occur(input, self.input_kind), -math.inf)

    def finished(self, scores: Tensor) -> Tensor:
        """Log-probabilities of W x + b."""
        gamma, temperature = self.focal
        if (gamma, temperature) == (0.0, 1.0):
            return scores.log_softmax(-1)
        if not self.fused or torch.onnx.is_in_onnx_export():
            return plain_map(scores, gamma, temperature, "logits")
        return focal_calibration_map(scores, gamma, temperature, log=True)

    def extra_repr(self) -> str:
        return (
            f"temperature={self.temperature}, epsilon={self.epsilon}, weight={list(self.weight.shape)}, "
            f"focal={self.focal}, input_kind={self.input_kind!r}"
        )


class IsotonicLogProbs(_Exact):
    """Logits (or probabilities) to the log-probabilities of isotonic regression, class by class.

    The points of the regressions are float64 buffers; ``module.half()`` does not round them.

    Args:
        steps: [C] pairs of arrays: points, ascending, and the values there.
        epsilon: of :class:`IsotonicCalibration`, between 0 and 1.
        input_kind: ``"logits"`` or ``"probs"``, what ``forward`` will be given.
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
        # As long as the longest, and no shorter than two: behind the last point its value stays.
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
        if torch.onnx.is_in_onnx_export():  # ONNX has no such search: count the points below
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
        # NaN rows stay NaN: the search has put them into the last step.
        log_probs = torch.where(probs.isnan(), math.nan, (mixed / mixed.sum(-1, keepdim=True)).log())
        return (log_probs[..., 1] - log_probs[..., 0] if self.one_logit else log_probs).to(input.dtype)


def plain_map(input: Tensor, gamma: float, temperature: float, input_kind: str) -> Tensor:
    """The log-probabilities of the focal calibration map in torch's own operators; they export to anything."""
    return reference.focal_calibration_map(input, gamma, temperature, input_kind=input_kind, log=True)


def widened(input: Tensor) -> Tensor:
    """In the dtype of the computation: float32 for half precision."""
    return input.float() if input.dtype in HALVES else input


def as_pairs(input: Tensor, input_kind: str) -> Tensor:
    """[...] of class 1 to [..., 2] of both classes."""
    return torch.stack([1 - input if input_kind == "probs" else torch.zeros_like(input), input], dim=-1)


def can_occur(input: Tensor, input_kind: str) -> Tensor:
    """[..., C] bool: not the classes with a logit of -inf or a probability of 0."""
    return input > (0 if input_kind == "probs" else -math.inf)


def floored(log_probs: Tensor, floor: float) -> Tensor:
    r"""\log((1 - \text{floor})\, p + \text{floor} / C), of log p [..., C]."""
    least = log_probs.new_tensor(math.log(floor) - math.log(log_probs.shape[-1]))
    return torch.logaddexp(log_probs + math.log1p(-floor), least)


def floored_input(input: Tensor, floor: float, input_kind: str) -> Tensor:
    """Logits or probabilities [..., C] of (1 - floor) p + floor / C, in float32 for half precision."""
    wide = widened(input)
    if input_kind == "probs":
        return (1 - floor) * wide / wide.sum(-1, keepdim=True) + floor / wide.shape[-1]
    return floored(wide.log_softmax(-1), floor)


def bin_top_class(log_probs: Tensor, top: Tensor, possible: Tensor, edges: Tensor, values: Tensor) -> Tensor:
    """Replace the probability of the top class by the value of its bin and rescale the others to the rest.

    Args:
        log_probs: [..., C], normalised, float32 or float64.
        top: [..., 1] int64, the class whose probability is replaced.
        possible: [..., C] bool, the classes that can occur.
        edges: [M - 1] float64; bin (lo, hi], compared in the dtype of ``log_probs``.
        values: [M] float64 in [0, 1].

    Returns:
        Log-probabilities [..., C] in the dtype of ``log_probs``; -inf for classes that cannot occur. Where all the
        others that can have probability 0, they share the rest equally.
    """
    dtype = log_probs.dtype
    is_top = torch.arange(log_probs.shape[-1], device=log_probs.device) == top
    confidence = log_probs.gather(-1, top).exp()
    # The number of edges below: the bin (lo, hi]. A sum and no searchsorted, which ONNX does not have.
    index = (confidence > edges.to(dtype)).sum(-1, keepdim=True)
    value = values.to(dtype)[index]

    apart = is_top | ~possible
    alone = apart.all(-1, keepdim=True)
    others = log_probs.masked_fill(apart, -math.inf)
    largest = others.amax(-1, keepdim=True)
    nothing = largest == -math.inf
    others = torch.where(nothing, 0.0, others).masked_fill(apart, -math.inf)
    # In logs: probabilities that would underflow keep their ratios.
    shares = others - torch.where(nothing, 0.0, largest)
    shares = shares - torch.where(alone, 1.0, shares.exp().sum(-1, keepdim=True)).log()
    value = torch.where(alone, 1.0, value)
    rest = torch.where(alone, 0.0, (-value).log1p())
    result = torch.where(is_top, value.log(), shares + rest)
    # NaN rows stay NaN: the comparison above has put them into the first bin.
    return torch.where(confidence.isnan(), torch.nan, result)
