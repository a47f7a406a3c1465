"""Code shared by the losses: the options of cross-entropy, and batches in the form of the losses in plain torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from focalkern._checks import (
    ONE_LOGIT,
    check_floating,
    dense,
    float_labels,
    label,
    label_range,
    labels_expected,
    labels_to_check,
    reduction_code,
    short,
    sizes,
    target_misfit,
)
from focalkern._checks import number as any_number
from focalkern._devices import autocast_is_on, has_float64, on_device
from focalkern._tracing import has_values
from focalkern._types import FLOATS, HALVES, LABELS, Reduction, compute_dtype
from focalkern.ops._dtensor import is_dtensor
from focalkern.reference._rows import weight_of_labels


class Loss(nn.Module):
    """Base of the losses with the options of cross-entropy. It checks them once, and loads a state all or nothing."""

    weight: Tensor | None

    # Buffers that keep their dtype when a model that contains the loss is cast to half precision.
    _exact_buffers: tuple[str, ...] = ()
    # Entries in states of earlier versions that this version does not have.
    _optional_state: frozenset[str] = frozenset()

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
            dense(self._name, "weight", weight)
            check_floating(self._name, "weight", weight)
            if weight.dim() != 1:
                raise ValueError(f"{self._name}: weight must be [C], got shape {list(weight.shape)}")
        ignore_index = label(self._name, "ignore_index", ignore_index)
        reduction_code(self._name, reduction)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction: Reduction = reduction
        self.label_smoothing = number(self._name, "label_smoothing", label_smoothing, low=0.0, high=1.0)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def __setattr__(self, name: str, value: Any) -> None:
        # Torch would put a Parameter in place of the buffer.
        if isinstance(value, nn.Parameter) and name in ("weight", *self._exact_buffers):
            raise ValueError(
                f"{self._name}: {name} must not be a Parameter, because it is a constant of the loss; assign a tensor, "
                "such as the parameter's .detach()"
            )
        super().__setattr__(name, value)

    def _settings(self) -> dict[str, object]:
        """The settings of the loss other than the common options, for its printed form."""
        return {}

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of a batch.

        Args:
            input: logits [C], [N, C] or [N, C, d1, ...], floating point.
            target: labels [], [N] or [N, d1, ...], int64, int32 or uint8; or class probabilities of the shape of
                ``input``, floating point.

        Returns:
            The loss in the dtype of ``input`` (float32 for half-precision logits under autocast): a scalar, or of
            the shape of the labels with ``reduction="none"``.

        Raises:
            TypeError: dtype or kind of an argument.
            ValueError: shape or device of an argument.
            IndexError: a label outside [0, C) that is not ``ignore_index``. On CUDA, where a check would synchronise
                the device, such a row is NaN unless FOCALKERN_VALIDATE=1.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        shown = self._settings()
        if self.weight is not None:
            shown["weight"] = f"[{len(self.weight)}]"
        for name, default in (("ignore_index", -100), ("reduction", "mean"), ("label_smoothing", 0.0)):
            if getattr(self, name) != default:
                shown[name] = getattr(self, name)
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Loss":
        if any(buffer is not None and buffer.dtype == torch.float64 for buffer in self._buffers.values()):
            there = fn(torch.empty(0, device="cpu")).device
            if not has_float64(there):
                self._buffers.update(
                    {name: b if b is None else on_device(b, there) for name, b in self._buffers.items()}
                )
        before = {name: self._buffers[name] for name in self._exact_buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, kept in before.items():
            moved = self._buffers[name]
            if kept is not None and moved is not None and moved.dtype != kept.dtype:
                self._buffers[name] = kept.to(moved.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata[_KIND] = _kind_of(self)

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
        # torch copies the valid entries before it reports the invalid ones. A half-loaded schedule must not happen, so
        # check all entries first.
        given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        own = {name: value for name, value in given.items() if self._owns(name)}
        current = [name for name in self.state_dict() if self._owns(name)]
        expected = {*current, *(own.keys() & self._optional_state)}
        # A state without the name of its class (a checkpoint of cross-entropy, a .safetensors file) is matched by the
        # names of its entries.
        kind = local_metadata.get(_KIND, _kind_of(self))
        if kind != _kind_of(self):
            # Reported as missing and unexpected keys, because strict=False permits only those.
            missing_keys += [prefix + name for name in current]
            unexpected_keys += [prefix + name for name in own]
            unexpected_keys.append(
                f"{prefix}{self._name}: the checkpoint has another loss, {kind}; strict=False loads all but the loss"
            )
            return
        missing, unexpected = expected - own.keys(), own.keys() - expected
        if missing or unexpected:
            missing_keys += [prefix + name for name in current if name in missing]
            unexpected_keys += [prefix + name for name in own if name in unexpected]
            return
        try:
            self._check_state(given)
        except (TypeError, ValueError) as error:
            error_msgs.append(str(error))
            return
        state_dict = {prefix + name: own[name] for name in current}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _owns(self, name: str) -> bool:
        """Whether an entry of a state is of the loss itself. Torch loads and reports those of a layer in it."""
        return name.partition(".")[0] not in self._modules

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raises unless the state can be loaded. The names of its own entries are already checked."""
        for name, current in self.state_dict().items():
            if name == "_extra_state" or (name not in state and not self._owns(name)):
                continue
            if not isinstance(state[name], Tensor):
                raise TypeError(f"{self._name}: {name} must be a tensor, got {type(state[name]).__name__}")
            if state[name].shape != current.shape:
                raise ValueError(
                    f"{self._name}: {name} must have shape {list(current.shape)}, got {list(state[name].shape)}"
                )


# Key in the metadata of a state. torch.save stores the metadata, but code that iterates over the state does not see it.
_KIND = "focalkern_loss"


def _kind_of(loss: Loss) -> str:
    """The name of the first class of focalkern among the class of the loss and its bases."""
    return next(kind.__name__ for kind in type(loss).__mro__ if kind.__module__.startswith("focalkern."))


def described(value: object) -> str:
    """A description of an invalid setting. A tensor may be class weights, the first argument of cross-entropy."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:
        return short(value)
    weights = "; class weights are weight=" if value.dim() == 1 else ""
    return f"a tensor of shape {list(value.shape)}{weights}"


def number(op: str, name: str, value: object, *, low: float = -math.inf, high: float = math.inf) -> float:
    # Tensors are refused, because float() would synchronise their device.
    if isinstance(value, bool | Tensor):
        raise TypeError(f"{op}: {name} must be a number, got {described(value)}")
    found = any_number(op, name, value)
    if not (math.isfinite(found) and low <= found <= high):  # NaN fails too
        bounds = "finite" if math.isinf(low) else f"at least {low:g}" if math.isinf(high) else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{op}: {name} must be {bounds}, got {found}")
    return found


@dataclass(frozen=True, eq=False)
class Batch:
    """Logits and targets of a batch in the form used by the losses in plain torch; "..." is N, d1, ..."""

    z: Tensor  # [..., C], float32 or float64; 0 in ignored rows, which may hold NaN
    index: Tensor | None  # [...] labels, 0 where ignored
    probabilities: Tensor | None  # [..., C] instead of labels
    weight: Tensor | None  # [...] weight of the sample: of its label, or the mean under its class probabilities
    valid: Tensor  # [...] bool: whether the sample is not ignored

    def target(self, smoothing: float) -> Tensor:
        """Target probabilities [..., C] after label smoothing."""
        n_classes = self.z.shape[-1]
        target = self.probabilities
        if target is None:
            assert self.index is not None
            target = (torch.arange(n_classes, device=self.z.device) == self.index.unsqueeze(-1)).to(self.z.dtype)
        return target if smoothing == 0 else (1.0 - smoothing) * target + smoothing / n_classes

    def share_of(self, index: Tensor) -> Tensor:
        """Probability [..., 1] that the target gives to the class ``index`` [..., 1], without smoothing."""
        if self.index is not None:
            return (self.index.unsqueeze(-1) == index).to(self.z.dtype)
        assert self.probabilities is not None
        return self.probabilities.gather(-1, index)

    def label(self) -> Tensor:
        """The class [..., 1] with the largest target probability."""
        if self.index is not None:
            return self.index.unsqueeze(-1)
        assert self.probabilities is not None
        return self.probabilities.argmax(-1, keepdim=True)

    def reduce(self, loss: Tensor, reduction: Reduction, *, weighted: bool = False) -> Tensor:
        """Reduces a loss per sample [...] as cross-entropy does. ``weighted``: the loss includes its weights."""
        weight = torch.ones_like(loss) if self.weight is None else self.weight
        weight = torch.where(self.valid, weight, 0.0)
        loss = torch.where(self.valid, loss if weighted else weight * loss, 0.0)
        if reduction == "none":
            return loss
        if reduction == "sum":
            return loss.sum()
        return loss.sum() / (loss.numel() if self.index is None else weight.sum())


def rows_of(loss: Loss, input: Tensor, target: Tensor) -> Batch:
    op = loss._name
    class_dim = check_pair(op, input, target)
    n_classes = input.shape[class_dim]
    weight = loss.weight
    if weight is not None and len(weight) != n_classes:
        raise ValueError(f"{op}: weight must be [C] = [{n_classes}], got [{len(weight)}]")
    if weight is not None and weight.device != input.device:
        raise ValueError(f"{op}: weight must be on the device of input, {input.device}, got {weight.device}")
    z = input.to(compute_dtype(input.dtype)).movedim(class_dim, -1)
    if weight is not None:
        weight = weight.to(z.dtype)
    if target.is_floating_point():
        if loss.ignore_index >= 0:
            raise ValueError(
                f"{op}: ignore_index must be negative (unused) for a target of class probabilities, "
                f"got {loss.ignore_index}"
            )
        given = target.to(z.dtype).movedim(class_dim, -1)
        sample_weight = None if weight is None else (weight * given).sum(-1)
        every = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device)
        return Batch(z, None, given, sample_weight, every)
    index = target.long()
    valid = index != loss.ignore_index
    labels = labels_to_check(target)
    if labels is not None:
        check_range(op, labels, n_classes, loss.ignore_index)
    # On CUDA labels are not read: a label out of range makes its row NaN, as in focal_loss.
    counts = valid & (index >= 0) & (index < n_classes)
    z = torch.where(counts.unsqueeze(-1), z, torch.where(valid, math.nan, 0.0).to(z.dtype).unsqueeze(-1))
    index = torch.where(counts, index, 0)
    return Batch(z, index, None, None if weight is None else weight_of_labels(weight, index), valid)


def check_pair(op: str, input: Tensor, target: Tensor, *, input_name: str = "input", labels_only: bool = False) -> int:
    """Checks types and shapes; returns the class dimension."""
    for name, value in ((input_name, input), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
        if is_dtensor(value):
            raise TypeError(
                f"{op}: {name} must be a tensor of this process, got a DTensor; pass {name}.full_tensor(), or "
                f"{name}.to_local() if its rows are sharded"
            )
        dense(op, name, value)
    check_floating(op, input_name, input)
    if input.dim() < 1:
        raise ValueError(f"{op}: {input_name} must be [C], [N, C] or [N, C, d1, ...], got a single number")
    class_dim = min(input.dim() - 1, 1)
    if input.shape[class_dim] < 1:
        raise ValueError(f"{op}: {input_name} must have at least one class, got shape {list(input.shape)}")
    if target.device != input.device:
        raise ValueError(f"{op}: target must be on the device of {input_name}, {input.device}, got {target.device}")
    if target.dtype in FLOATS:
        if labels_only:
            raise labels_expected(op, input, target)
        if target.shape != input.shape:
            expected = f"the shape of {input_name} = {sizes(input.shape)}"
            remedy = float_labels(input, target)
            raise ValueError(f"{op}: target must be {expected}, got {sizes(target.shape)}{remedy}")
    elif target.dtype in LABELS:
        misfit = target_misfit(op, input, target, input_name, labels_only=labels_only)
        if misfit is not None:
            raise misfit
    else:
        raise TypeError(
            f"{op}: target must be int64, int32 or uint8 labels or floating-point class probabilities, got "
            f"{target.dtype}"
        )
    return class_dim


def check_range(op: str, target: Tensor, n_classes: int, ignore_index: int) -> None:
    try:
        label_range(op, target, n_classes, ignore_index)
    except IndexError as error:
        remedy = f"; {ONE_LOGIT}" if n_classes == 1 else ""
        raise IndexError(f"{error}{remedy}") from None


def in_dtype_of(loss: Tensor, input: Tensor) -> Tensor:
    """The loss in the dtype of the logits; in float32 for half-precision logits under autocast."""
    is_half = input.dtype in HALVES
    return loss if is_half and autocast_is_on(input.device.type) else loss.to(input.dtype)


def digits(values: Tensor) -> str:
    """The numbers of a tensor, for errors and ``repr``."""
    if not has_values(values):
        return "meta" if values.is_meta else "fake"
    numbers = [f"{value:.4g}" for value in values.flatten().tolist()]
    return numbers[0] if values.dim() == 0 else f"[{', '.join(numbers)}]"
