"""Losses for training: modules to put in the place of ``torch.nn.CrossEntropyLoss``.

Called with logits [C], [N, C] or [N, C, d1, ...] and labels [], [N] or [N, d1, ...] (int64, int32, uint8) or class
probabilities of the shape of the logits. Four options mean in all of them what they mean in cross-entropy:

weight
    [C] class weights, a buffer. Where a loss is no sum over the classes of the target (Brier, the norm of the logits),
    a sample has the weight of its label, or the mean of the weights under its class probabilities.
ignore_index
    Samples of this label count neither in the loss nor in the mean, whatever their logits hold.
reduction
    "none", "mean" or "sum"; the mean divides by the summed weight of the samples that count.
label_smoothing
    Mixes the target with the uniform distribution. Label smoothing as a baseline is thus
    ``FocalLoss(0.0, label_smoothing=0.05)``, or torch's own cross-entropy, and has no class here.

The focal family runs in the fused kernel, and its schedules are tables that are looked up there: a step neither waits
for the device nor loops in Python, and other values in a table compile nothing again. The baselines are plain torch.
Nowhere is an epsilon or a clamp on a probability; half-precision logits are computed in float32, and the loss has the
dtype of the logits (float32 under autocast). Labels out of range are treated as in :func:`focalkern.focal_loss`.

A module's state loads whole or not at all: what does not fit leaves it as it was.
"""

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from focalkern.gamma import GammaTable
from focalkern.metrics import as_tensor, reliability_bins
from focalkern.ops.focal_loss import check_labels, focal_loss
from focalkern.reference import _weighted_sum, log_softmax_and_complement, modulating_factor

__all__ = [
    "AdaFocalLoss",
    "AdaFocalRecord",
    "BrierLoss",
    "DualFocalLoss",
    "FLSDLoss",
    "FocalLoss",
    "InverseFocalLoss",
    "LogitNormPenalty",
    "MMCELoss",
    "SigmoidFocalLoss",
    "sigmoid_focal_loss",
]

Reduction = Literal["none", "mean", "sum"]

_LABEL_DTYPES = (torch.int64, torch.int32, torch.uint8)
_STEEPEST_INVERSE_GAMMA = -3.591  # below it the slope of the inverse focal loss changes sign; see focal_loss


# ---------------------------------------------------------------------------------------------------------------------
# What the losses share
# ---------------------------------------------------------------------------------------------------------------------


class _Loss(nn.Module):
    """The options of cross-entropy, checked once, and a state that loads whole or not at all."""

    weight: Tensor | None

    # Buffers that keep their dtype when a model is cast to half precision with the loss inside.
    _exact_buffers: tuple[str, ...] = ()

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if weight is not None:
            if not isinstance(weight, Tensor):
                raise TypeError(f"{self._name}: weight must be a tensor, got {type(weight).__name__}")
            if not weight.is_floating_point():
                raise TypeError(f"{self._name}: weight must be floating point, got {weight.dtype}")
            if weight.dim() != 1:
                raise ValueError(f"{self._name}: weight must be [C], got shape {list(weight.shape)}")
        if isinstance(ignore_index, bool) or not hasattr(type(ignore_index), "__index__"):
            raise TypeError(f"{self._name}: ignore_index must be an int, got {ignore_index!r}")
        _check_reduction(self._name, reduction)
        self.register_buffer("weight", weight)
        self.ignore_index = int(ignore_index)
        self.reduction: Reduction = reduction
        self.label_smoothing = _number(self._name, "label_smoothing", label_smoothing, low=0.0, high=1.0)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _settings(self) -> dict[str, object]:
        """What the loss has beyond the common options, for its printed form."""
        return {}

    def extra_repr(self) -> str:
        shown = self._settings()
        if self.weight is not None:
            shown["weight"] = f"[{len(self.weight)}]"
        for name, default in (("ignore_index", -100), ("reduction", "mean"), ("label_smoothing", 0.0)):
            if getattr(self, name) != default:
                shown[name] = getattr(self, name)
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_Loss":
        before = {name: self._buffers[name] for name in self._exact_buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, kept in before.items():
            moved = self._buffers[name]
            if kept is not None and moved is not None and moved.dtype != kept.dtype:
                self._buffers[name] = kept.to(moved.device)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # torch copies what fits and complains about the rest afterwards; half a schedule would be worse than none.
        own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        current = self.state_dict()
        missing, unexpected = current.keys() - own.keys(), own.keys() - current.keys()
        if missing or unexpected:
            missing_keys += [prefix + name for name in current if name in missing]
            unexpected_keys += [prefix + name for name in own if name in unexpected]
            return
        try:
            self._check_state(own)
        except (TypeError, ValueError) as error:
            error_msgs.append(str(error))
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raises unless the state, which has the right names, can be loaded."""
        for name, current in self.state_dict().items():
            if isinstance(current, Tensor) and state[name].shape != current.shape:
                raise ValueError(
                    f"{self._name}: {name} must have shape {list(current.shape)}, got {list(state[name].shape)}"
                )


def _check_reduction(op: str, reduction: object) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{op}: reduction must be 'none', 'mean' or 'sum', got {reduction!r}")


def _flag(op: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {type(value).__name__}")
    return value


def _number(op: str, name: str, value: object, *, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, bool) or not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    number = float(value)  # type: ignore[arg-type]
    if not (math.isfinite(number) and low <= number <= high):  # NaN fails too
        bounds = "finite" if math.isinf(low) else f"at least {low:g}" if math.isinf(high) else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{op}: {name} must be {bounds}, got {number}")
    return number


@dataclass(frozen=True, eq=False)
class _Rows:
    """Logits and targets of a batch in the form that the plain losses compute with; "..." is N, d1, ..."""

    z: Tensor  # [..., C], float32 or float64; zeros where ignored, so that what stands there cannot come through
    given: Tensor  # [..., C] target probabilities
    smoothed: Tensor  # [..., C] the same after label smoothing
    index: Tensor | None  # [...] labels, 0 where ignored
    weight: Tensor | None  # [...] weight of the sample: that of its label, or the mean over its class probabilities
    valid: Tensor  # [...] bool

    def reduce(self, loss: Tensor, reduction: Reduction, *, weighted: bool = False) -> Tensor:
        """Reduces a loss per sample [...] as cross-entropy does; ``weighted`` says that it has its weights."""
        weight = torch.ones_like(loss) if self.weight is None else self.weight
        weight = torch.where(self.valid, weight, 0.0)
        loss = torch.where(self.valid, loss if weighted else weight * loss, 0.0)
        if reduction == "none":
            return loss
        if reduction == "sum":
            return loss.sum()
        return loss.sum() / (loss.numel() if self.index is None else weight.sum())


def _rows(loss: _Loss, input: Tensor, target: Tensor) -> _Rows:
    op = loss._name
    class_dim = _check_pair(op, input, target)
    n_classes = input.shape[class_dim]
    weight = loss.weight
    if weight is not None and len(weight) != n_classes:
        raise ValueError(f"{op}: weight must be [C] = [{n_classes}], got [{len(weight)}]")
    z = input.to(_compute_dtype(input.dtype)).movedim(class_dim, -1)
    if weight is not None:
        weight = weight.to(z.dtype)
    smoothing = loss.label_smoothing
    if target.is_floating_point():
        given = target.to(z.dtype).movedim(class_dim, -1)
        sample_weight = None if weight is None else (weight * given).sum(-1)
        smoothed = (1.0 - smoothing) * given + smoothing / n_classes
        every = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device)
        return _Rows(z, given, smoothed, None, sample_weight, every)
    index = target.long()
    valid = index != loss.ignore_index
    if not torch.compiler.is_compiling() and (target.device.type == "cpu" or _validating()):
        check_labels(target, n_classes, ignore_index=loss.ignore_index)
    # On CUDA nothing looks at the labels on the host: a row whose label is out of range becomes NaN, as in focal_loss.
    inside = (index >= 0) & (index < n_classes)
    z = torch.where((valid & ~inside).unsqueeze(-1), math.nan, torch.where(valid.unsqueeze(-1), z, 0.0))
    index = torch.where(valid & inside, index, 0)
    given = (torch.arange(n_classes, device=z.device) == index.unsqueeze(-1)).to(z.dtype)
    smoothed = (1.0 - smoothing) * given + smoothing / n_classes
    return _Rows(z, given, smoothed, index, None if weight is None else weight[index], valid)


def _check_pair(op: str, input: Tensor, target: Tensor) -> int:
    """Checks kinds and shapes; returns the class axis."""
    for name, value in (("input", input), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if not input.is_floating_point():
        raise TypeError(f"{op}: input must be floating point, got {input.dtype}")
    if input.dim() < 1:
        raise ValueError(f"{op}: input must be [C], [N, C] or [N, C, d1, ...], got a single number")
    class_dim = min(input.dim() - 1, 1)
    if input.shape[class_dim] < 1:
        raise ValueError(f"{op}: input must have at least one class, got shape {list(input.shape)}")
    if target.device != input.device:
        raise ValueError(f"{op}: target must be on the device of input, {input.device}, got {target.device}")
    if target.is_floating_point():
        expected, what = list(input.shape), "the shape of input"
    elif target.dtype in _LABEL_DTYPES:
        expected = list(input.shape[:class_dim] + input.shape[class_dim + 1 :])
        what = "[N, d1, ...]" if input.dim() > 2 else "[N]" if input.dim() == 2 else "[]"
    else:
        raise TypeError(f"{op}: target must be int64, int32, uint8 or floating point, got {target.dtype}")
    if list(target.shape) != expected:
        raise ValueError(f"{op}: target must be {what} = {expected}, got {list(target.shape)}")
    return class_dim


def _validating() -> bool:
    return os.environ.get("FOCALKERN_VALIDATE") == "1"


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _in_dtype_of(loss: Tensor, input: Tensor) -> Tensor:
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The focal family
# ---------------------------------------------------------------------------------------------------------------------


class _FocalFamily(_Loss):
    """Losses that are :func:`focalkern.focal_loss` with a gamma of their own."""

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.detach_modulation = _flag(self._name, "detach_modulation", detach_modulation)

    def _gamma(self) -> float | Tensor | GammaTable:
        raise NotImplementedError

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return focal_loss(
            input,
            target,
            self._gamma(),
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            detach_modulation=self.detach_modulation,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + (", detach_modulation=True" if self.detach_modulation else "")


class FocalLoss(_FocalFamily):
    r"""The module form of :func:`focalkern.focal_loss`.

    .. math:: L = -(1 - p)^\gamma \log p \;\; (\gamma \ge 0), \qquad L = -(1 + p)^{|\gamma|} \log p \;\; (\gamma < 0)

    Args:
        gamma: a number; a floating-point tensor that broadcasts to the unreduced loss; or a
            :class:`focalkern.GammaTable`. A tensor becomes a buffer (a parameter, if it is one) and the table's copies
            the buffers ``edges`` and ``gammas``: they move with the module, are saved with it, and new values written
            into them count from the next step on.
        weight, ignore_index, reduction, label_smoothing: as in cross-entropy; see the top of this module.
        detach_modulation: treat the factor before log p as a constant.

    Attributes:
        gamma: the number or tensor; None for a table.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or value, here; of the wrong shape, in the call.

    Source: Lin et al. 2017 (arXiv 1708.02002); Mukhoti et al. 2020 (arXiv 2002.09437).
    """

    def __init__(
        self,
        gamma: float | Tensor | GammaTable = 2.0,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
        )
        self.gamma: float | Tensor | None
        if isinstance(gamma, GammaTable):
            self.gamma = None
            self._exact_buffers = ("edges", "gammas")
            # Copies: the module's schedule is its own, and .to() must not move that of another.
            self.register_buffer("edges", gamma.edges.clone())
            self.register_buffer("gammas", gamma.gammas.clone())
        elif isinstance(gamma, Tensor):
            if not gamma.is_floating_point():
                raise TypeError(f"{self._name}: gamma must be floating point, got {gamma.dtype}")
            if isinstance(gamma, nn.Parameter):
                self.gamma = gamma
            else:
                self.register_buffer("gamma", gamma)
        else:
            self.gamma = _number(self._name, "gamma", gamma)

    def _gamma(self) -> float | Tensor | GammaTable:
        if self.gamma is None:
            return GammaTable._unchecked(self.get_buffer("edges"), self.get_buffer("gammas"))
        return self.gamma

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        if self.gamma is None:
            GammaTable(state["edges"], state["gammas"])

    def _settings(self) -> dict[str, object]:
        gamma = self._gamma()
        if isinstance(gamma, GammaTable):
            return {"edges": _shown(gamma.edges), "gammas": _shown(gamma.gammas)}
        return {"gamma": _shown(gamma) if isinstance(gamma, Tensor) else gamma}


class InverseFocalLoss(FocalLoss):
    r"""Inverse focal loss, whose gamma is given as a positive number.

    .. math:: L = -(1 + p)^\gamma \log p

    It is ``FocalLoss(-gamma)``, and the sign is all that this class is for.

    Args:
        gamma: a number, at least 0, or a floating-point tensor of such numbers. Above 3.591 the slope of the loss
            changes sign near p = 0.28, which is warned about for numbers.
        weight, ignore_index, reduction, label_smoothing, detach_modulation: as in :class:`FocalLoss`.

    Raises:
        TypeError, ValueError: as :class:`FocalLoss`; a number below 0.

    Source: Wang, Feng & Zhang, NeurIPS 2021.
    """

    def __init__(
        self,
        gamma: float | Tensor = 2.0,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
    ) -> None:
        if not isinstance(gamma, Tensor):
            gamma = _number("InverseFocalLoss", "gamma", gamma, low=0.0)
        super().__init__(
            gamma,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
        )

    def _gamma(self) -> float | Tensor | GammaTable:
        assert self.gamma is not None
        return -self.gamma

    def _settings(self) -> dict[str, object]:
        return {"gamma": _shown(self.gamma) if isinstance(self.gamma, Tensor) else self.gamma}


class FLSDLoss(FocalLoss):
    r"""Focal loss whose gamma is a step function of the probability p of the target class.

    .. math:: L = -(1 - p)^{\gamma(p)} \log p, \qquad
        \gamma(p) = \text{gammas}[b] \text{ for } \text{edges}[b] \le p < \text{edges}[b + 1]

    The default is FLSD-53: 5 where p < 0.2, 3 elsewhere. (The published code has a third step at p = 0.5, to the gamma
    of its constructor; ``FLSDLoss([0, 0.2, 0.5, 1], [5, 3, gamma])`` is that.) gamma(p) is a constant for the gradient.

    Args:
        edges: [n_bins + 1] numbers or floating-point tensor, ascending; the first and the last bin are open-ended.
        gammas: [n_bins], one per bin; a negative one is an inverse focal loss.
        weight, ignore_index, reduction, label_smoothing, detach_modulation: as in :class:`FocalLoss`. With label
            smoothing or class probabilities gamma is looked up at the probability of each class.

    Raises:
        TypeError, ValueError: as :class:`focalkern.GammaTable` and :class:`FocalLoss`.

    Source: Mukhoti et al. 2020 (arXiv 2002.09437), section 4.
    """

    def __init__(
        self,
        edges: Tensor | Sequence[float] = (0.0, 0.2, 1.0),
        gammas: Tensor | Sequence[float] = (5.0, 3.0),
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
    ) -> None:
        super().__init__(
            GammaTable(edges, gammas),
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
        )


def _shown(values: Tensor) -> str:
    if values.device.type == "meta":
        return "meta"
    numbers = [f"{value:.4g}" for value in values.flatten().tolist()]
    return numbers[0] if values.dim() == 0 else f"[{', '.join(numbers)}]"


@dataclass(frozen=True, eq=False)  # equality of tensors is no single answer
class AdaFocalRecord:
    """One update of an :class:`AdaFocalLoss`. All tensors are on the CPU; statistics are fractions, float64.

    Attributes:
        bin_edges: [n_bins + 1], the bins from here on.
        confidence: [n_bins], mean top-1 confidence of the validation samples in each bin, NaN for an empty bin.
        accuracy: [n_bins], the fraction of them that is correct, NaN for an empty bin.
        count: [n_bins], int64, how many they are; None when :meth:`AdaFocalLoss.update_bins` was not told.
        bin_gammas: [n_bins], after the update.
    """

    bin_edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor | None
    bin_gammas: Tensor


class AdaFocalLoss(_FocalFamily):
    r"""AdaFocal: one gamma per bin of confidence, which follows the calibration error of that bin in validation.

    .. math::
        L = -(1 - p)^{\gamma_b} \log p \;\; (\gamma_b \ge 0), \qquad
        L = -(1 + p)^{|\gamma_b|} \log p \;\; (\gamma_b < 0), \qquad b = \text{the bin of } p

    with p the probability of the target class. After each epoch, with E_b = mean confidence - accuracy of the
    validation samples whose *top-1* confidence is in bin b,

    .. math:: \gamma_b \leftarrow \gamma_b \exp(+\lambda E_b) \text{ if } \gamma_b > 0, \quad
        \gamma_b \exp(-\lambda E_b) \text{ otherwise};

    then, where abs(gamma_b) < switch, gamma_b becomes -switch if it was positive and +switch otherwise; then it is
    clipped to [gamma_min, gamma_max]. A bin without validation samples keeps its gamma. The bins are cut anew at each
    update, ``n_bins`` of equal mass (estimator ``equal_mass_interp``: statistics are over (lo, hi], so that the lowest
    confidence is in no bin); training looks p up in [lo, hi), outer bins open-ended. Until the first update there are
    ``n_bins`` uniform bins with ``gamma_init``.

    A training loop calls :meth:`accumulate` for each validation batch and :meth:`update` once after them.

    Args:
        n_bins: at least 1.
        lam: lambda, at least 0.
        gamma_init: gamma of all bins in the first epoch.
        gamma_max, gamma_min: what gamma is clipped to. Below -3.591 the slope of the inverse focal loss changes sign
            near p = 0.28, which is warned about.
        switch: the threshold S_th, at least 0.
        weight, ignore_index, reduction, label_smoothing, detach_modulation: as in :class:`FocalLoss`; the factor is
            not detached by default, as published. With label smoothing or class probabilities gamma is looked up at
            the probability of each class.

    Attributes:
        bin_edges: float64 [n_bins + 1], a buffer.
        bin_gammas: float64 [n_bins], a buffer.
        history: list of :class:`AdaFocalRecord`, one per update; ``focalkern.plots.adafocal_history`` draws it.
        n_accumulated: validation samples that wait for the next update.

    The state (``state_dict``) has the bins, the history and the samples that wait, so that training goes on from it at
    any point. It is this process's: in distributed training, samples that wait on other ranks are in their states.

    Raises:
        TypeError, ValueError: as :class:`FocalLoss`; gamma_init outside [gamma_min, gamma_max].

    Source: Ghosh, Schaaf & Gormley, NeurIPS 2022. Their code (github.com/3mcloud/adafocal) sums the loss
    over the batch where the default here is the mean, adds 1e-20 to 1 - p, and finds gamma on the host, sample by
    sample; bins, look-up by p, update, switch and clipping are the same.
    """

    bin_edges: Tensor
    bin_gammas: Tensor
    _exact_buffers = ("bin_edges", "bin_gammas")

    def __init__(
        self,
        n_bins: int = 15,
        lam: float = 1.0,
        gamma_init: float = 1.0,
        gamma_max: float = 20.0,
        gamma_min: float = -2.0,
        switch: float = 0.2,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
        )
        if isinstance(n_bins, bool) or not hasattr(type(n_bins), "__index__"):
            raise TypeError(f"AdaFocalLoss: n_bins must be an int, got {n_bins!r}")
        if n_bins < 1:
            raise ValueError(f"AdaFocalLoss: n_bins must be at least 1, got {n_bins}")
        self.n_bins = int(n_bins)
        self.lam = _number("AdaFocalLoss", "lam", lam, low=0.0)
        self.gamma_min = _number("AdaFocalLoss", "gamma_min", gamma_min)
        self.gamma_max = _number("AdaFocalLoss", "gamma_max", gamma_max, low=self.gamma_min)
        self.gamma_init = _number("AdaFocalLoss", "gamma_init", gamma_init, low=self.gamma_min, high=self.gamma_max)
        self.switch = _number("AdaFocalLoss", "switch", switch, low=0.0)
        if self.gamma_min < _STEEPEST_INVERSE_GAMMA:
            warnings.warn(
                f"AdaFocalLoss: gamma_min = {self.gamma_min} is below {_STEEPEST_INVERSE_GAMMA}, where the slope of "
                "the inverse focal loss changes sign near p = 0.28",
                stacklevel=2,
            )
        self.register_buffer("bin_edges", torch.arange(self.n_bins + 1, dtype=torch.float64) / self.n_bins)
        self.register_buffer("bin_gammas", torch.full((self.n_bins,), self.gamma_init, dtype=torch.float64))
        self.history: list[AdaFocalRecord] = []
        self._confidence: list[Tensor] = []
        self._correct: list[Tensor] = []

    def _gamma(self) -> GammaTable:
        return GammaTable._unchecked(self.bin_edges, self.bin_gammas)

    def _settings(self) -> dict[str, object]:
        names = ("n_bins", "lam", "gamma_init", "gamma_max", "gamma_min", "switch")
        return {name: getattr(self, name) for name in names}

    @property
    def n_accumulated(self) -> int:
        """Validation samples that wait for the next update, on this rank."""
        return sum(len(confidence) for confidence in self._confidence)

    def reset(self) -> None:
        """Forgets the validation samples that wait for the next update. Bins, gammas and history stay."""
        self._confidence, self._correct = [], []

    @torch.no_grad()
    def accumulate(self, logits: Tensor, target: Tensor) -> None:
        """Takes a validation batch into the statistics of the next update.

        Keeps, on the CPU, one confidence (float32; float64 for float64 logits) and one bool per sample. It looks at
        the values, and so waits for the device.

        Args:
            logits: [C], [N, C] or [N, C, d1, ...], floating point.
            target: labels [], [N] or [N, d1, ...]; those equal to ``ignore_index`` are left out.

        Raises:
            TypeError, ValueError: dtype, shape or device; logits whose softmax is NaN.
            IndexError: a label out of range. What was accumulated before stays as it was in every case.
        """
        confidence, correct = self._validation_samples("accumulate", logits, target)
        self._confidence.append(confidence)
        self._correct.append(correct)

    @torch.no_grad()
    def update(
        self,
        logits: Tensor | None = None,
        target: Tensor | None = None,
        *,
        distributed: bool = True,
        group: Any = None,
    ) -> AdaFocalRecord:
        """Cuts the bins anew and moves their gammas, by all that was accumulated, which is then forgotten.

        In distributed training every rank must call it, and every rank ends with the same bins and gammas: those of
        one process with all samples. The confidences of all ranks are gathered for that, in any number per rank, also
        none. Where each rank has the whole validation set, ``distributed=False`` does without.

        Args:
            logits, target: a batch to take into the statistics first, as :meth:`accumulate` does.
            distributed: gather the samples of all ranks, if torch.distributed is initialised.
            group: process group to gather over; default: all ranks.

        Returns:
            The record that was appended to ``history``.

        Raises:
            TypeError, ValueError, IndexError: as :meth:`accumulate`; no sample on any rank. Bins, gammas, history and
                accumulated samples stay as they were.
            RuntimeError: another rank has raised one of these.
        """
        confidence, correct = list(self._confidence), list(self._correct)
        problem: Exception | None = None
        if (logits is None) != (target is None):
            problem = ValueError("AdaFocalLoss.update: logits and target go together, got one of them")
        elif logits is not None and target is not None:
            try:
                batch = self._validation_samples("update", logits, target)
                confidence.append(batch[0])
                correct.append(batch[1])
            except (TypeError, ValueError, IndexError) as error:
                problem = error
        parts = (torch.cat([torch.empty(0), *confidence]), torch.cat([torch.empty(0, dtype=torch.bool), *correct]))
        if distributed and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            parts, problem = _gather(parts, problem, group)
        if problem is not None:
            raise problem
        if len(parts[0]) == 0:
            raise ValueError("AdaFocalLoss.update: no validation sample: call accumulate, or pass logits and target")
        bins = reliability_bins(
            confidence=parts[0], correct=parts[1], n_bins=self.n_bins, estimator="equal_mass_interp"
        )
        edges = torch.cat([bins.lower, bins.upper[-1:]])
        record = self._adapt(edges, bins.confidence, bins.accuracy, bins.count)
        self.reset()
        return record

    @torch.no_grad()
    def update_bins(
        self,
        bin_edges: Tensor | Sequence[float],
        mean_confidence: Tensor | Sequence[float],
        accuracy: Tensor | Sequence[float],
        counts: Tensor | Sequence[int] | None = None,
    ) -> AdaFocalRecord:
        """Moves the gammas by statistics that were computed elsewhere, the same on every rank.

        Args:
            bin_edges: [n_bins + 1], finite and ascending (equal neighbours are an empty bin): the bins from here on.
            mean_confidence: [n_bins], of the validation samples in each bin, a fraction.
            accuracy: [n_bins], a fraction.
            counts: [n_bins], samples in each bin. Where it is 0 the gamma is kept, and the other two may be NaN.

        Tensors, NumPy arrays or sequences of numbers. What :meth:`accumulate` has collected is left alone.

        Returns:
            The record that was appended to ``history``.

        Raises:
            TypeError: not numbers.
            ValueError: wrong lengths; edges that descend or are not finite; a statistic outside [0, 1] or NaN. The
                state stays as it was.
        """
        op = "AdaFocalLoss.update_bins"
        edges = _statistics(op, "bin_edges", bin_edges, self.n_bins + 1)
        _check_edges(op, edges)
        count = None
        full = torch.ones(self.n_bins, dtype=torch.bool)
        if counts is not None:
            numbers = _statistics(op, "counts", counts, self.n_bins)
            if not bool(((numbers >= 0) & (numbers == numbers.floor()) & numbers.isfinite()).all()):
                raise ValueError(f"{op}: counts must be whole numbers of at least 0, got {numbers.tolist()}")
            count = numbers.long()
            full = count > 0
        statistics = []
        for name, given in (("mean_confidence", mean_confidence), ("accuracy", accuracy)):
            values = _statistics(op, name, given, self.n_bins)
            # Written so that NaN fails too. A mean of float32 numbers may be above 1 by its rounding.
            wrong = full & ~((values >= 0) & (values <= 1 + 1e-3))
            if bool(wrong.any()):
                bin = int(wrong.nonzero()[0])
                raise ValueError(
                    f"{op}: {name} must be in [0, 1] in bins that are not empty, got {values[bin].item()} in bin {bin}"
                )
            statistics.append(torch.where(full, values, math.nan))
        return self._adapt(edges, statistics[0], statistics[1], count)

    def _validation_samples(self, method: str, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Top-1 confidence [K], float32 or float64, and correctness [K], bool, of the samples that are not ignored."""
        op = f"AdaFocalLoss.{method}"
        class_dim = _check_pair(op, logits, target)
        if target.is_floating_point():
            raise TypeError(f"{op}: target must be labels, int64, int32 or uint8, got {target.dtype}")
        check_labels(target, logits.shape[class_dim], ignore_index=self.ignore_index)
        z = logits.detach().to(_compute_dtype(logits.dtype)).movedim(class_dim, -1)
        valid = target != self.ignore_index
        confidence = z.softmax(-1).amax(-1)[valid]
        correct = (z.argmax(-1) == target)[valid]
        if bool(confidence.isnan().any()):
            row = int(confidence.isnan().nonzero()[0])
            raise ValueError(f"{op}: logits must not be NaN, +inf or all -inf, as in valid row {row}")
        return confidence.cpu(), correct.cpu()

    def _adapt(self, edges: Tensor, confidence: Tensor, accuracy: Tensor, count: Tensor | None) -> AdaFocalRecord:
        """The update rule. Everything was checked; statistics are float64 on the CPU, NaN in empty bins."""
        gamma = self.bin_gammas.detach().double().cpu()
        error = confidence - accuracy
        positive = gamma > 0
        change = (self.lam * torch.where(positive, error, -error)).exp()
        updated = torch.where(gamma == 0, 0.0, gamma * change)
        small = updated.abs() < self.switch
        updated = torch.where(small, torch.where(positive, -self.switch, self.switch), updated)
        updated = updated.clamp(self.gamma_min, self.gamma_max)
        updated = torch.where(error.isnan(), gamma, updated)
        # In place: compiled and captured steps read the same memory.
        self.bin_edges.copy_(edges)
        self.bin_gammas.copy_(updated)
        record = AdaFocalRecord(edges, confidence, accuracy, count, updated)
        self.history.append(record)
        return record

    # -- saved state ---------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "history": [asdict(record) for record in self.history],
            "confidence": torch.cat([torch.empty(0), *self._confidence]),
            "correct": torch.cat([torch.empty(0, dtype=torch.bool), *self._correct]),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.history = [AdaFocalRecord(**record) for record in state["history"]]
        self._confidence, self._correct = [state["confidence"]], [state["correct"]]

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        GammaTable(state["bin_edges"], state["bin_gammas"])
        extra = state["_extra_state"]
        if not isinstance(extra, dict) or extra.keys() != self.get_extra_state().keys():
            raise ValueError("AdaFocalLoss: _extra_state must hold history, confidence and correct")
        if extra["confidence"].shape != extra["correct"].shape:
            raise ValueError("AdaFocalLoss: _extra_state must hold one correctness per confidence")
        for record in extra["history"]:
            AdaFocalRecord(**record)


def _gather(
    parts: tuple[Tensor, Tensor], problem: Exception | None, group: Any
) -> tuple[tuple[Tensor, Tensor], Exception | None]:
    """The validation samples of all ranks, and the error of any: where one rank fails, all must, or they would wait."""
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, (*parts, None if problem is None else str(problem)), group=group)
    for rank, (_, _, message) in enumerate(everywhere):
        if problem is None and message is not None:
            problem = RuntimeError(f"AdaFocalLoss.update: rank {rank} failed: {message}")
    return (torch.cat([part[0] for part in everywhere]), torch.cat([part[1] for part in everywhere])), problem


def _statistics(op: str, name: str, values: Any, length: int) -> Tensor:
    try:
        vector = as_tensor(values).double().cpu()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name} must be a sequence of numbers, got {values!r}") from error
    if list(vector.shape) != [length]:
        raise ValueError(f"{op}: {name} must be [{length}], got {list(vector.shape)}")
    return vector


def _check_edges(op: str, edges: Tensor) -> None:
    # Written so that NaN fails too.
    ascending = (edges[1:] >= edges[:-1]) & edges[1:].isfinite() & edges[:-1].isfinite()
    if not bool(ascending.all()):
        raise ValueError(f"{op}: bin_edges must be finite and ascending, got {edges.tolist()}")


# ---------------------------------------------------------------------------------------------------------------------
# Dual focal loss
# ---------------------------------------------------------------------------------------------------------------------


class DualFocalLoss(_Loss):
    r"""Dual focal loss: the factor sees the strongest rival of the target class too.

    .. math:: L = -(1 - p_y + p_j)^\gamma \log p_y

    p_j is the largest probability strictly below p_y, 0 if there is none; the gradient goes through both.

    Args:
        gamma: a number, at least 0. 0 is cross-entropy.
        weight, ignore_index, reduction: as in cross-entropy.
        label_smoothing: e in [0, 1]. ``L = -sum_i w_i t_i (1 - p_i + p_j(i))^gamma log p_i`` then, with
            t = (1 - e) onehot + e / C, as in the focal loss: each class has a next lower one, and a factor of its own.
        detach_modulation: treat the factor before log p as a constant.

    Targets are labels; class probabilities raise TypeError.

    Raises:
        TypeError, ValueError, IndexError: an argument of the wrong kind, value or shape; a label out of range.

    Source: Tao, Dong & Xu, Dual Focal Loss for Calibration, ICML 2023.
    """

    def __init__(
        self,
        gamma: float = 5.0,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.gamma = _number("DualFocalLoss", "gamma", gamma, low=0.0)
        self.detach_modulation = _flag("DualFocalLoss", "detach_modulation", detach_modulation)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if isinstance(target, Tensor) and target.is_floating_point():
            raise TypeError(f"DualFocalLoss: target must be labels, int64, int32 or uint8, got {target.dtype}")
        rows = _rows(self, input, target)
        assert rows.index is not None
        log_p, log_u = log_softmax_and_complement(rows.z)
        if self.label_smoothing == 0:
            label = rows.index.unsqueeze(-1)
            is_below = rows.z < rows.z.gather(-1, label)
            log_p_below = torch.where(is_below, log_p, -math.inf).amax(-1, keepdim=True)
            loss = self._per_class(log_p.gather(-1, label), log_u.gather(-1, label), log_p_below).squeeze(-1)
            return _in_dtype_of(rows.reduce(loss, self.reduction), input)
        # Every class has a share in the target, and a next lower class of its own.
        ascending, order = rows.z.detach().contiguous().sort(dim=-1)
        n_below = torch.searchsorted(ascending, rows.z.detach().contiguous())
        log_p_below = F.pad(log_p.gather(-1, order), (1, 0), value=-math.inf).gather(-1, n_below)
        share = rows.smoothed if self.weight is None else rows.smoothed * self.weight.to(rows.z.dtype)
        loss = _weighted_sum(share, self._per_class(log_p, log_u, log_p_below))
        return _in_dtype_of(rows.reduce(loss, self.reduction, weighted=True), input)

    def _per_class(self, log_p: Tensor, log_u: Tensor, log_p_below: Tensor) -> Tensor:
        # log(1 - p + p_below); a class alone has neither, and logaddexp(-inf, -inf) no derivative.
        alone = (log_u == -math.inf) & (log_p_below == -math.inf)
        log_m = torch.where(alone, -math.inf, torch.logaddexp(torch.where(alone, 0.0, log_u), log_p_below))
        factor = modulating_factor(log_p, log_m, log_p.new_full((), self.gamma))
        return -(factor.detach() if self.detach_modulation else factor) * log_p

    def _settings(self) -> dict[str, object]:
        return {"gamma": self.gamma}


# ---------------------------------------------------------------------------------------------------------------------
# Baselines
# ---------------------------------------------------------------------------------------------------------------------


class BrierLoss(_Loss):
    r"""Brier score of the softmax.

    .. math:: L = w \sum_k (p_k - t_k)^2

    with t the target after label smoothing and w the weight of the sample. Between 0 and 2, a sum over the classes as
    in :func:`focalkern.metrics.brier_score` (``torch.nn.MSELoss`` would divide it by C).

    Args:
        weight, ignore_index, reduction, label_smoothing: as in cross-entropy; see the top of this module.

    Raises:
        TypeError, ValueError, IndexError: an argument of the wrong kind, value or shape; a label out of range.

    Source: Brier 1950; as a training loss in Mukhoti et al. 2020 (arXiv 2002.09437).
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        rows = _rows(self, input, target)
        log_p, log_u = log_softmax_and_complement(rows.z)
        # p - t from the complements where p and t may both be near 1.
        t = rows.smoothed
        residual = torch.where(t > 0.5, (1.0 - t) - log_u.exp(), log_p.exp() - t)
        return _in_dtype_of(rows.reduce(residual.square().sum(-1), self.reduction), input)


class MMCELoss(_Loss):
    r"""Cross-entropy plus the maximum mean calibration error of the batch.

    .. math::
        L = \text{CE} + \lambda \sqrt{\sum_{ij} a_i a_j e^{-|r_i - r_j| / h}}, \qquad a_i = (c_i - r_i) / m

    over the m samples that are not ignored, with r the top-1 confidence and c = 1 where the top class is the target,
    0 elsewhere (with class probabilities: the target's probability of the top class). ``weighted`` is the form that
    balances correct and incorrect samples:

    .. math:: a_i = c_i (1 - r_i) / m_{correct} - (1 - c_i) r_i / m_{incorrect}

    It is 0 for a batch without either, as in the published code. Both cost O(N log N) time and O(N) memory, although
    the sum has N^2 terms, and are summed in float64.

    Args:
        coefficient: lambda, at least 0.
        weighted: use the balanced form.
        bandwidth: h, at least 0.01.
        weight, ignore_index, label_smoothing: as in cross-entropy. Class weights and label smoothing are in the
            cross-entropy only.
        reduction: "mean" or "sum". The sum is that of the cross-entropy plus m times the second term. There is no
            "none": the error belongs to the batch.

    The derivative of the root at 0 is taken as 0. Under ``torch.use_deterministic_algorithms`` CUDA refuses the prefix
    sums in here.

    Raises:
        TypeError, ValueError, IndexError: an argument of the wrong kind, value or shape; a label out of range.

    Source: Kumar, Sarawagi & Jain, Trainable Calibration Measures for Neural Networks from Kernel Mean Embeddings, ICML
    2018. (The code of Mukhoti et al. leaves out the root in the plain form, and divides the weighted sums twice.)
    """

    def __init__(
        self,
        coefficient: float = 2.0,
        *,
        weighted: bool = False,
        bandwidth: float = 0.4,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        if reduction == "none":  # type: ignore[comparison-overlap]
            raise ValueError(
                "MMCELoss: reduction must be 'mean' or 'sum', got 'none': a batch has one error, a sample none"
            )
        self.coefficient = _number("MMCELoss", "coefficient", coefficient, low=0.0)
        self.bandwidth = _number("MMCELoss", "bandwidth", bandwidth, low=0.01)  # e^(1/h) stays far from overflow
        self.weighted = _flag("MMCELoss", "weighted", weighted)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        rows = _rows(self, input, target)
        cross_entropy = _cross_entropy(self, input, target)
        z = rows.z.reshape(-1, rows.z.shape[-1])
        top = z.detach().argmax(-1, keepdim=True)
        log_r, log_u = (values.gather(-1, top).squeeze(-1).double() for values in log_softmax_and_complement(z))
        correct = rows.given.reshape(z.shape).gather(-1, top).squeeze(-1).double()
        valid = rows.valid.reshape(-1)
        # c - r without cancellation: what the correct part lacks and the incorrect part has too much.
        lack = torch.where(valid, correct, 0.0) * log_u.exp()
        excess = torch.where(valid, 1.0 - correct, 0.0) * log_r.exp()
        count = valid.sum()
        if self.weighted:
            n_correct = torch.where(valid, correct, 0.0).sum()
            both = (n_correct > 0) & (n_correct < count)
            a = lack / torch.where(both, n_correct, math.inf) - excess / torch.where(both, count - n_correct, math.inf)
        else:
            a = (lack - excess) / torch.where(count > 0, count, 1)
        squared = _laplacian_form(a, log_r.exp(), self.bandwidth)
        # At 0 the root has no derivative; 0 is taken. Rounding may leave the square just below 0.
        positive = squared > 0
        mmce = torch.where(positive, torch.where(positive, squared, 1.0).sqrt(), 0.0)
        if self.reduction == "sum":
            mmce = mmce * count
        return cross_entropy + (self.coefficient * mmce).to(cross_entropy.dtype)

    def _settings(self) -> dict[str, object]:
        return {"coefficient": self.coefficient, "bandwidth": self.bandwidth, "weighted": self.weighted}


def _laplacian_form(a: Tensor, r: Tensor, h: float) -> Tensor:
    """sum_ij a_i a_j exp(-|r_i - r_j| / h) for r in [0, 1], float64, in O(N log N) and without an [N, N] matrix.

    The kernel is a product of exponentials on either side of r_i, so that prefix sums over the sorted r give both
    sides. Samples of equal r are a third part, to which r contributes no derivative, as for |r_i - r_j| at 0.
    """
    r, order = r.sort()
    a = a[order]
    sorted_r = r.detach().contiguous()
    first, behind = torch.searchsorted(sorted_r, sorted_r), torch.searchsorted(sorted_r, sorted_r, right=True)
    rise, fall = (r / h).exp(), (-r / h).exp()
    below = F.pad((a * rise).cumsum(0), (1, 0))[first] * fall
    above = F.pad((a * fall).flip(0).cumsum(0).flip(0), (0, 1))[behind] * rise
    mass = F.pad(a.cumsum(0), (1, 0))
    return (a * (below + (mass[behind] - mass[first]) + above)).sum()


class LogitNormPenalty(_Loss):
    r"""Cross-entropy plus the L1 norm of the logits.

    .. math:: L = \text{CE} + \alpha w \sum_k |z_k|

    with w the weight of the sample.

    Args:
        coefficient: alpha, at least 0; the paper searches 0.001 to 0.1.
        weight, ignore_index, reduction, label_smoothing: as in cross-entropy; see the top of this module. Label
            smoothing is in the cross-entropy only.

    Raises:
        TypeError, ValueError, IndexError: an argument of the wrong kind, value or shape; a label out of range.

    Source: Wang, Feng & Zhang, NeurIPS 2021.
    """

    def __init__(
        self,
        coefficient: float = 0.01,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.coefficient = _number("LogitNormPenalty", "coefficient", coefficient, low=0.0)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        rows = _rows(self, input, target)
        cross_entropy = _cross_entropy(self, input, target)
        penalty = self.coefficient * rows.reduce(rows.z.abs().sum(-1), self.reduction)
        return cross_entropy + penalty.to(cross_entropy.dtype)

    def _settings(self) -> dict[str, object]:
        return {"coefficient": self.coefficient}


def _cross_entropy(loss: _Loss, input: Tensor, target: Tensor) -> Tensor:
    return focal_loss(
        input,
        target,
        0.0,
        weight=loss.weight,
        ignore_index=loss.ignore_index,
        reduction=loss.reduction,
        label_smoothing=loss.label_smoothing,
    )


# ---------------------------------------------------------------------------------------------------------------------
# One logit per class
# ---------------------------------------------------------------------------------------------------------------------


def sigmoid_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float = 2.0,
    alpha: float | None = 0.25,
    reduction: Reduction = "none",
) -> Tensor:
    r"""Focal loss of independent logits, for one-logit and multi-label heads.

    Elementwise, with p = sigmoid(input), t the target and BCE the binary cross-entropy:

    .. math::
        L = (\alpha t + (1 - \alpha)(1 - t)) \; (1 - p_t)^\gamma \; \text{BCE}(p, t), \qquad
        p_t = p t + (1 - p)(1 - t)

    The value and gradient of ``torchvision.ops.sigmoid_focal_loss`` (whose positional order is alpha, gamma); but here
    1 - p_t does not cancel, so that both stay finite and exact for logits of any size.

    Args:
        input: logits of any shape, floating point.
        target: the same shape, in [0, 1]: 0 and 1, or soft targets. Outside of [0, 1] the loss is NaN.
        gamma: a number, at least 0.
        alpha: weight of t = 1 against 1 - alpha of t = 0, in [0, 1]; None (or -1, as in torchvision) for neither.
        reduction: "none", "mean" (over all elements) or "sum".

    Returns:
        The loss, scalar or of the shape of ``input``, in its dtype (float32 for half-precision logits under autocast).

    Raises:
        TypeError, ValueError: an argument of the wrong kind, value, shape or device.

    Source: Lin et al. 2017 (arXiv 1708.02002), equation 5.
    """
    op = "sigmoid_focal_loss"
    for name, value in (("input", input), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if not input.is_floating_point():
        raise TypeError(f"{op}: input must be floating point, got {input.dtype}")
    if target.shape != input.shape:
        raise ValueError(f"{op}: target must be the shape of input = {list(input.shape)}, got {list(target.shape)}")
    if target.device != input.device:
        raise ValueError(f"{op}: target must be on the device of input, {input.device}, got {target.device}")
    _check_reduction(op, reduction)
    gamma = _number(op, "gamma", gamma, low=0.0)
    alpha = _alpha(op, alpha)
    x = input.to(_compute_dtype(input.dtype))
    t = target.to(x.dtype)
    log_p, log_not_p = F.logsigmoid(x), F.logsigmoid(-x)
    # 1 - p_t = t (1 - p) + (1 - t) p: a sum of two numbers that are not negative, one of them 0 for hard targets. In
    # logarithms it does not underflow; its derivative in a hard target needs the sum itself.
    if t.requires_grad:
        factor = (t * log_not_p.exp() + (1.0 - t) * log_p.exp()).pow(gamma)
    else:
        factor = (gamma * torch.logaddexp(t.log() + log_not_p, torch.log1p(-t) + log_p)).exp()
    # Not binary_cross_entropy_with_logits, whose gradient p - t rounds to 0 for x > 17 in float32.
    loss = factor * -(t * log_p + (1.0 - t) * log_not_p)
    if alpha is not None:
        loss = loss * (alpha * t + (1.0 - alpha) * (1.0 - t))
    if reduction != "none":
        loss = loss.sum() if reduction == "sum" else loss.mean()
    return _in_dtype_of(loss, input)


def _alpha(op: str, alpha: float | None) -> float | None:
    # torchvision says -1 for none.
    return None if alpha is None or alpha == -1 else _number(op, "alpha", alpha, low=0.0, high=1.0)


class SigmoidFocalLoss(nn.Module):
    """The module form of :func:`sigmoid_focal_loss`, with the mean as default reduction.

    Args, Raises: as :func:`sigmoid_focal_loss`.
    """

    def __init__(self, gamma: float = 2.0, alpha: float | None = 0.25, reduction: Reduction = "mean") -> None:
        super().__init__()
        _check_reduction("SigmoidFocalLoss", reduction)
        self.gamma = _number("SigmoidFocalLoss", "gamma", gamma, low=0.0)
        self.alpha = _alpha("SigmoidFocalLoss", alpha)
        self.reduction: Reduction = reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return sigmoid_focal_loss(input, target, self.gamma, self.alpha, self.reduction)

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, alpha={self.alpha}, reduction={self.reduction}"
