"""Modules to append to a network: the focal calibration map, and layers around any map (floor, class dimension)."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern._checks import flag, number, one_of
from focalkern._types import INPUT_KINDS, InputKind
from focalkern.calibrators._fit_data import classes_misfit
from focalkern.calibrators._inputs import as_pairs, floored_input, traces
from focalkern.calibrators._plain_map import plain_binary_map, plain_map
from focalkern.ops.calibration_map import binary_focal_calibration_map, focal_calibration_map

__all__ = [
    "CalibratedLogProbs",
    "CalibratedLogits",
    "ClassAxis",
    "ExactBuffers",
    "FlooredInput",
    "MultiLabelLogits",
    "PerLabelLogits",
    "RowMap",
    "exports_to_onnx",
    "in_each_dtype",
]


def exports_to_onnx() -> bool:
    """Whether this call is part of an export to ONNX."""
    # torch's function imports two modules in each call. Every exporter traces.
    return (torch.compiler.is_compiling() or traces()) and torch.onnx.is_in_onnx_export()


class _Constants(torch.nn.Module):
    """Base of the maps with gamma and temperature as Python numbers; ``fused`` selects the implementation."""

    def __init__(
        self, gamma: float, temperature: float, input_kind: InputKind = "logits", *, fused: bool = True
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.gamma = number(name, "gamma", gamma)
        self.temperature = number(name, "temperature", temperature)
        one_of(name, "input_kind", input_kind, INPUT_KINDS)
        self.input_kind = input_kind
        self.fused = flag(name, "fused", fused)
        if not (math.isfinite(self.gamma) and self.gamma > -1):
            raise ValueError(f"{name}: gamma must be finite and greater than -1, got {self.gamma}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"{name}: temperature must be finite and positive, got {self.temperature}")

    def _plain(self) -> bool:
        """Whether to compute the map in torch's own operators, because ONNX has no others."""
        return not self.fused or exports_to_onnx()

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

    with phi(q) = -q log q / (1 - q). gamma and T are Python numbers, not buffers, so that ``module.half()`` does not
    round them. ``torch.export`` and ``torch.compile`` treat them as constants. ``state_dict`` stores them as one
    float64 tensor [gamma, temperature]. ``torch.onnx.export(..., dynamo=True)`` exports the same map in ONNX operators;
    ``fused=False`` computes it in torch's own operators everywhere. In ONNX rounding may exchange nearly equal classes.

    Args:
        gamma: > -1; 0 is temperature scaling. A negative gamma uses the same formula.
        temperature: > 0.
        input_kind: ``"logits"`` or ``"probs"``, the kind of the input of ``forward``.
        fused: the compiled operator; False computes the map in torch's own operators, for exporters that support only
            these. It does not check values: a row with NaN or +inf gives NaN.

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
            # The map gets both probabilities, so that one near 1 is as precise as one near 0.
            log_probs = super().forward(as_pairs(input, "probs"))
            return (log_probs[..., 1] - log_probs[..., 0]).to(input.dtype)
        if self._plain():
            return plain_binary_map(input, self.gamma, self.temperature)
        return binary_focal_calibration_map(input, self.gamma, self.temperature, log_odds=True)


class ClassAxis(torch.nn.Module):
    """Applies a module for [..., C] to [N, C, d1, ...], with the classes in dimension 1; [N, C] and [C] are unchanged.

    Args:
        module: maps logits or probabilities [..., C] to log-probabilities.
        n_classes: C.
    """

    def __init__(self, module: torch.nn.Module, n_classes: int) -> None:
        super().__init__()
        self.module = module
        self.n_classes = n_classes

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [N, C, d1, ...], floating point -> log-probabilities of its shape."""
        place = 1 if input.dim() > 2 else -1
        if not traces() and (input.dim() < 1 or input.shape[place] != self.n_classes):
            raise classes_misfit("ClassAxis", tuple(input.shape), self.n_classes, dense=True, argument="input")
        result: Tensor = self.module(input.movedim(place, -1)).movedim(-1, place)
        return result

    def extra_repr(self) -> str:
        return f"n_classes={self.n_classes}"


class FlooredInput(torch.nn.Module):
    r"""A floor, then the module of a calibrator: probabilities p become (1 - floor) p + floor / C before the module.

    Args:
        module: maps logits or probabilities [..., C] to log-probabilities, or one logit per sample to one logit.
        floor: between 0 and 1.
        input_kind: ``"logits"`` or ``"probs"``, the kind of the input of ``forward``.
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
        """The output of the module, in the dtype of ``input``."""
        pairs = as_pairs(input, self.input_kind) if self.one_logit else input
        rows = floored_input(pairs, self.floor, self.input_kind)
        if self.one_logit:
            rows = rows[..., 1] if self.input_kind == "probs" else rows[..., 1] - rows[..., 0]
        result: Tensor = self.module(rows)
        return result.to(input.dtype)

    def extra_repr(self) -> str:
        return f"floor={self.floor}"


class ExactBuffers(torch.nn.Module):
    """Base of modules with float64 buffers, which move with the module but keep their dtype."""

    # The buffers whose last dimension, the same for all, depends on the rows of the fit.
    _of_fit: tuple[str, ...] = ()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Makes room for the state of another fit; torch refuses tensors of other shapes."""
        own = [self.get_buffer(name) for name in self._of_fit]
        given = [state_dict.get(prefix + name) for name in self._of_fit]
        found = [value.shape if isinstance(value, Tensor) else None for value in given]
        shapes = [buffer.shape[:-1] + (found[0] or ())[-1:] for buffer in own]
        if found == shapes:
            for name, buffer, shape in zip(self._of_fit, own, shapes, strict=True):
                if shape != buffer.shape:
                    setattr(self, name, buffer.new_empty(shape))
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            device = getattr(self, name).device
            if buffer.is_meta and device.type != "meta":  # to_empty: NaN until load_state_dict
                unknown = torch.nan if buffer.is_floating_point() else 0
                setattr(self, name, torch.full_like(buffer, unknown, device=device))
            else:
                setattr(self, name, buffer.to(device))
        return self


class RowMap(ExactBuffers):
    """Base of the maps of rows that have one implementation for log-probabilities and probabilities, ``mapped``.

    Attributes:
        input_kind: ``"logits"`` or ``"probs"``, the kind of the input of ``forward``.
        one_logit: ``forward`` takes one logit (or probability of class 1) per sample and returns the calibrated logit.
    """

    input_kind: InputKind
    one_logit: bool

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., C], floating point -> log-probabilities [..., C]; one logit [...] -> calibrated logit."""
        if not self.one_logit:
            return self.mapped(input, log=True)
        log_probs = self.mapped(as_pairs(input.to(torch.float64), self.input_kind), log=True)
        return (log_probs[..., 1] - log_probs[..., 0]).to(input.dtype)

    def mapped(self, input: Tensor, *, log: bool) -> Tensor:
        """Log-probabilities [..., C], or probabilities, of ``input`` [..., C], in its dtype."""
        raise NotImplementedError


def in_each_dtype(module: RowMap) -> dict[torch.dtype, RowMap]:
    """The module per dtype of the computation, with its buffers in that dtype, so that no row waits for conversions."""
    made = {dtype: copy.copy(module) for dtype in (torch.float32, torch.float64)}
    for dtype, copied in made.items():
        copied._buffers = {name: buffer.to(dtype) for name, buffer in module.named_buffers(recurse=False)}
    return made


class MultiLabelLogits(ExactBuffers):
    """Logits of L labels to calibrated logits; each label has its own gamma and temperature.

    Both are float64 buffers; ``module.half()`` does not round them.

    Args:
        gammas, temperatures: [L].
        input_kind: ``"logits"`` or ``"probs"``, the kind of the input of ``forward``.
        fused: the compiled operator; False computes in torch's own operators, for exporters that support only these.

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
        """``input`` [..., L], floating point -> calibrated logits [..., L], whose sigmoids are the probabilities."""
        plain = not self.fused or exports_to_onnx()
        parameters = self.gammas, self.temperatures
        if self.input_kind == "probs":
            pairs = as_pairs(input, "probs")
            if plain:
                log_probs = plain_map(pairs, *parameters, "probs")
            else:
                log_probs = focal_calibration_map(pairs, *parameters, input_kind="probs", log=True)
            return (log_probs[..., 1] - log_probs[..., 0]).to(input.dtype)
        if plain:
            return plain_binary_map(input, *parameters)
        return binary_focal_calibration_map(input, *parameters, log_odds=True)


class PerLabelLogits(torch.nn.Module):
    """Logits of L labels to calibrated logits, by a module per label.

    Args:
        labels: [L] modules, each from one logit (or probability) per sample to the calibrated logit.
    """

    def __init__(self, labels: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.labels = torch.nn.ModuleList(labels)

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., L], floating point -> calibrated logits [..., L], whose sigmoids are the probabilities."""
        if not traces() and input.shape[-1] != len(self.labels):
            raise ValueError(f"PerLabelLogits: input must be [..., {len(self.labels)}], got {list(input.shape)}")
        return torch.stack([module(input[..., label]) for label, module in enumerate(self.labels)], dim=-1)
