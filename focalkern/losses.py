"""Losses for training: modules to put in the place of ``torch.nn.CrossEntropyLoss``.

All take logits [C], [N, C] or [N, C, d1, ...] and labels or class probabilities, and know the options ``weight``,
``ignore_index``, ``reduction`` and ``label_smoothing`` of cross-entropy. Label smoothing, a baseline of the papers, is
therefore an argument and no class: ``FocalLoss(0.0, label_smoothing=0.05)``, or torch's own cross-entropy.

The focal family runs in the fused kernel, and its schedules are tables that are looked up there: a step neither waits
for the device nor loops in Python, and other values in a table compile nothing again. The baselines are plain torch.
Nowhere is an epsilon or a clamp; half-precision logits are computed in float32, and the loss has the dtype of the
logits (float32 under autocast).
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
    """The options of cross-entropy, checked once."""

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


def _check_reduction(op: str, reduction: object) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{op}: reduction must be 'none', 'mean' or 'sum', got {reduction!r}")


def _number(op: str, name: str, value: object, *, low: float = -math.inf, high: float = math.inf) -> float:
    if isinstance(value, bool) or not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    number = float(value)  # type: ignore[arg-type]
    if not (math.isfinite(number) and low <= number <= high):  # NaN fails too
        bounds = "finite" if math.isinf(low) else f"at least {low:g}" if math.isinf(high) else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{op}: {name} must be {bounds}, got {number}")
    return number


@dataclass(frozen=True)
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
        if not isinstance(detach_modulation, bool):
            raise TypeError(f"{self._name}: detach_modulation must be a bool, got {type(detach_modulation).__name__}")
        self.detach_modulation = detach_modulation

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
    """Focal loss with a gamma that is a number, a tensor or a table; the module form of focal_loss."""

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

    def _settings(self) -> dict[str, object]:
        gamma = self._gamma()
        if isinstance(gamma, GammaTable):
            return {"edges": _shown(gamma.edges), "gammas": _shown(gamma.gammas)}
        return {"gamma": _shown(gamma) if isinstance(gamma, Tensor) else gamma}


class InverseFocalLoss(FocalLoss):
    """Inverse focal loss, -(1 + p)^gamma log p: gamma is given positive."""

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
    """Focal loss with gamma as a step function of p; by default FLSD-53, 5 where p < 0.2 and 3 elsewhere."""

    def __init__(
        self,
        edges: Tensor | Sequence[float] = (0.0, 0.2, 1.0),
        gammas: Tensor | Sequence[float] = (5.0, 3.0),
        weight: Tensor | None = None,
        *,
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


@dataclass(frozen=True)
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
    """AdaFocal: one gamma per confidence bin, adapted to the calibration error in validation after each epoch."""

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
    """Dual focal loss, -(1 - p_y + p_j)^gamma log p_y, p_j the largest probability below p_y."""

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
        self.detach_modulation = detach_modulation

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
        factor = modulating_factor(log_p, log_m, torch.tensor(self.gamma, dtype=log_p.dtype, device=log_p.device))
        return -(factor.detach() if self.detach_modulation else factor) * log_p

    def _settings(self) -> dict[str, object]:
        return {"gamma": self.gamma}


# ---------------------------------------------------------------------------------------------------------------------
# Baselines
# ---------------------------------------------------------------------------------------------------------------------


class BrierLoss(_Loss):
    """Brier score, sum_k (p_k - t_k)^2."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        rows = _rows(self, input, target)
        log_p, log_u = log_softmax_and_complement(rows.z)
        # p - t from the complements where p and t may both be near 1.
        t = rows.smoothed
        residual = torch.where(t > 0.5, (1.0 - t) - log_u.exp(), log_p.exp() - t)
        return _in_dtype_of(rows.reduce(residual.square().sum(-1), self.reduction), input)


class MMCELoss(_Loss):
    """Cross-entropy plus coefficient times the maximum mean calibration error of the batch."""

    def __init__(
        self,
        coefficient: float = 2.0,
        bandwidth: float = 0.4,
        weighted: bool = False,
        weight: Tensor | None = None,
        *,
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
        self.bandwidth = _number("MMCELoss", "bandwidth", bandwidth, low=0.0)
        self.weighted = weighted

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
    """Cross-entropy plus coefficient times the L1 norm of the logits."""

    def __init__(
        self,
        coefficient: float = 0.01,
        weight: Tensor | None = None,
        *,
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
    """Focal loss of independent logits, for one-logit and multi-label heads; elementwise, as torchvision's."""
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
    if alpha is not None and alpha != -1:
        alpha = _number(op, "alpha", alpha, low=0.0, high=1.0)
    x = input.to(_compute_dtype(input.dtype))
    t = target.to(x.dtype)
    # log(1 - p_t), of 1 - p_t = t (1 - p) + (1 - t) p: a sum of two positive numbers, one of them 0 for hard targets.
    log_u = torch.logaddexp(t.log() + F.logsigmoid(-x), torch.log1p(-t) + F.logsigmoid(x))
    # Not binary_cross_entropy_with_logits, whose gradient p - t rounds to 0 for x > 17 in float32.
    cross_entropy = -(t * F.logsigmoid(x) + (1.0 - t) * F.logsigmoid(-x))
    loss = (gamma * log_u).exp() * cross_entropy
    if alpha is not None and alpha != -1:
        loss = loss * (alpha * t + (1.0 - alpha) * (1.0 - t))
    if reduction != "none":
        loss = loss.sum() if reduction == "sum" else loss.mean()
    return _in_dtype_of(loss, input)


class SigmoidFocalLoss(nn.Module):
    """The module form of sigmoid_focal_loss."""

    def __init__(self, gamma: float = 2.0, alpha: float | None = 0.25, reduction: Reduction = "mean") -> None:
        super().__init__()
        _check_reduction("SigmoidFocalLoss", reduction)
        self.gamma = _number("SigmoidFocalLoss", "gamma", gamma, low=0.0)
        self.alpha = alpha
        self.reduction: Reduction = reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return sigmoid_focal_loss(input, target, self.gamma, self.alpha, self.reduction)

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, alpha={self.alpha}, reduction={self.reduction}"
