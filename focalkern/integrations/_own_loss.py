"""The loss that a transformers model computes itself: its kind, and whether it shifts the labels."""

import inspect
import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

NEXT_TOKEN = ("ForCausalLM", "ForConditionalGeneration")
TOKEN = ("ForMaskedLM", "ForTokenClassification")
ROW = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)
KINDS = (*NEXT_TOKEN, *TOKEN, *ROW)

_CHUNK = 4096  # rows whose float32 copy exists at a time
_SHIFTS: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


def base_model(model: Any) -> Any:
    """The model inside PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def asks_for_its_loss(model: Any) -> bool:
    """Whether the forward pass of a model calls ``loss_function``."""
    return "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names


def takes_number_of_items(model: Any) -> bool:
    """Whether ``Trainer`` passes ``num_items_in_batch`` to the model, by the rule of ``Trainer``."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return bool(getattr(model, "accepts_loss_kwargs", takes_any))


def loss_kind(model: Any) -> str | None:
    """``model.loss_type``. Language models with another name, such as GPT2LMHeadModel, are "ForCausalLM"."""
    kind: str | None = getattr(model, "loss_type", None)
    has_head = getattr(model, "get_output_embeddings", lambda: None)() is not None
    return "ForCausalLM" if kind is None and has_head else kind


def next_tokens(labels: Tensor) -> Tensor:
    return F.pad(labels[..., 1:], (0, 1), value=-100)


def argument(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of a forward pass, by keyword or by position; None if it is missing."""
    if name in kwargs or not args:
        return kwargs.get(name)
    for owner in (model, base_model(model)):  # some wrappers of PEFT take *args
        names = [
            parameter.name
            for parameter in inspect.signature(owner.forward).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        if name in names:
            return dict(zip(names, args, strict=False)).get(name)
    return None


def loss_and_logits(output: Any) -> tuple[Tensor | None, Tensor | None]:
    """Of a forward pass with labels; a tuple (``return_dict=False``) begins with both."""
    if isinstance(output, tuple):
        return (output[0], output[1]) if len(output) > 1 else (None, None)
    return getattr(output, "loss", None), getattr(output, "logits", None)


def shifts_by_name(model: Any) -> bool:
    """For a forward pass whose loss is no cross-entropy of the logits, such as one with the loss of a router."""
    encodes = getattr(model.config, "is_encoder_decoder", False)
    return loss_kind(model) in NEXT_TOKEN and asks_for_its_loss(model) and not encodes


def known_shift(model: Any) -> bool | None:
    return _SHIFTS.get(model)


def remember_shift(model: Any, shift: bool) -> None:
    _SHIFTS[model] = shift


@torch.compiler.disable  # type: ignore[untyped-decorator]
def shift_of_own_loss(model: Any, logits: Tensor, labels: Tensor, loss: Tensor | None, n_items: Any) -> bool | None:
    """Whether the cross-entropy of shifted labels is the loss of a forward pass; None if no cross-entropy is.

    The first clear answer holds for all further passes of the model.
    """
    if model in _SHIFTS:
        return _SHIFTS[model]
    found = _values(model, logits, labels, n_items)
    if loss is None or not found:
        return None
    own = float(loss.detach())
    if not math.isfinite(own):
        by_gradient = _shift_by_gradient(logits, labels, loss) if len(found) == 2 else None  # float16: inf
        return shifts_by_name(model) if by_gradient is None else by_gradient
    errors = {shift: min(abs(value - own) for value in values) for shift, values in found.items()}
    tolerance = max(1e-4, 2 * torch.finfo(model.dtype).eps) * max(1.0, abs(own))
    near = [shift for shift in errors if errors[shift] <= tolerance]
    if len(near) == 2:
        by_gradient = _shift_by_gradient(logits, labels, loss)
        if by_gradient is None:  # decided by a later pass
            return min(errors, key=errors.__getitem__)
        near = [by_gradient]
    if not near:
        return None
    _SHIFTS[model] = near[0]
    return near[0]


def _values(model: Any, logits: Tensor, labels: Tensor, n_items: Any) -> dict[bool, list[float]]:
    """The cross-entropies, by shift, as a mean and divided by the number of items in the accumulated batch."""
    kind = loss_kind(model)
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        if kind in ROW and labels.is_floating_point():
            if labels.shape != logits.shape:
                return {}
            return {False: [float(F.binary_cross_entropy_with_logits(logits.float(), labels.to(logits.device)))]}
        if labels.numel() * logits.shape[-1] != logits.numel():
            return {}
        rows, found = logits.reshape(-1, logits.shape[-1]), {}
        for shift in (False, True) if kind in NEXT_TOKEN else (False,):
            targets = (next_tokens(labels) if shift else labels).reshape(-1).to(rows.device)
            parts = zip(rows.split(_CHUNK), targets.split(_CHUNK), strict=True)
            total = sum(float(F.cross_entropy(part.float(), target, reduction="sum")) for part, target in parts)
            counts = {int((targets != -100).sum())} | ({float(n_items)} if n_items is not None else set())
            found[shift] = [total / count if count else math.nan for count in counts]
    return found


def _shift_by_gradient(logits: Tensor, labels: Tensor, loss: Tensor) -> bool | None:
    """By the gradient at the targets, p - 1, for logits whose two cross-entropies are equal, such as all zeros."""
    if not (loss.requires_grad and logits.requires_grad):
        return None
    gradient: Tensor | None = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)[0]
    if gradient is None:
        return None
    sums = {}
    for shift in (False, True):
        targets = (next_tokens(labels) if shift else labels).to(gradient.device).unsqueeze(-1)
        at_targets = gradient.float().gather(-1, targets.clamp(min=0))
        sums[shift] = float(at_targets.masked_fill(targets < 0, 0.0).sum())
    return min(sums, key=sums.__getitem__)
