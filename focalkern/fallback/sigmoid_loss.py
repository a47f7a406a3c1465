"""The losses of independent logits in plain torch: definitions of the reference, checks of the compiled module."""

import torch
from torch import Tensor

from focalkern import reference
from focalkern._checks import labels_to_check, sizes
from focalkern._devices import is_host_number
from focalkern._types import REDUCTIONS, compute_dtype
from focalkern.fallback._checks import (
    autocasts,
    check_dense,
    check_floating,
    check_reduction,
    check_same_device,
    fits,
)
from focalkern.fallback._compile import compilable
from focalkern.fallback.focal_loss import host_numbers
from focalkern.reference._log_space import exact_second_derivatives

__all__ = ["NAMES", "check_arguments", "check_range", "check_scores", "sigmoid_loss", "sigmoid_loss_composite"]

NAMES = (  # operator, gamma, second
    ("sigmoid_focal_loss", "gamma", "alpha"),
    ("asymmetric_loss", "gamma_negative", "gamma_positive"),
    ("quality_focal_loss", "beta", "none"),
    ("varifocal_loss", "gamma", "alpha"),
    ("matchability_loss", "gamma", "alpha"),
    ("ia_bce_loss", "gamma", "alpha"),
)
_FOCAL, _ASYMMETRIC, _QUALITY, _VARIFOCAL, _MATCHABILITY, _IA_BCE = range(6)
_SCORED = {_VARIFOCAL: reference.varifocal_loss, _MATCHABILITY: reference.matchability_loss}


def sigmoid_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    second: float | Tensor | None,
    weight: Tensor | None,
    scores: Tensor | None,
    kind: int,
    constant: float,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """The compiled module's sigmoid_loss in plain torch. ``second`` is gamma_positive for the asymmetric loss, alpha
    for the others. ``constant`` is the margin of the asymmetric loss, and 1 if the varifocal or matchability loss has a
    detached modulation."""
    check_arguments(input, target, gamma, second, weight, scores, kind, constant, reduction)
    ignore_index, _ = host_numbers(NAMES[kind][0], weight, ignore_index, 0.0)
    check_range(input, target, kind, ignore_index)
    dtype = torch.float32 if autocasts(input) else input.dtype
    return _definition(input, target, gamma, second, weight, scores, kind, constant, reduction, ignore_index).to(dtype)


def sigmoid_loss_composite(
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    second: Tensor | None,
    weight: Tensor | None,
    scores: Tensor | None,
    kind: int,
    constant: float,
    reduction: int,
    ignore_index: int,
    float32_loss: bool,
) -> Tensor:
    """The operator ``sigmoid_loss_composite``. ``float32_loss``: whether autocast makes the loss float32."""
    check_arguments(input, target, gamma, second, weight, scores, kind, constant, reduction)
    check_range(input, target, kind, ignore_index)
    with exact_second_derivatives():
        loss = _definition(input, target, gamma, second, weight, scores, kind, constant, reduction, ignore_index)
    return loss if float32_loss else loss.to(input.dtype)


@compilable("gamma", "second")
def _definition(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    second: float | Tensor | None,
    weight: Tensor | None,
    scores: Tensor | None,
    kind: int,
    constant: float,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """The loss of checked arguments in the dtype of the computation. It does not synchronise."""
    x, how = input.to(compute_dtype(input.dtype)), REDUCTIONS[reduction]
    scored = target if scores is None else (target, scores)
    if kind == _FOCAL:
        return reference.sigmoid_focal_loss(x, target, gamma, second, how, weight=weight, ignore_index=ignore_index)
    if kind == _QUALITY:
        return reference.quality_focal_loss(x, scored, gamma, how, weight=weight, ignore_index=ignore_index)
    if kind in _SCORED:
        return _SCORED[kind](
            x, scored, gamma, second, how, detach_modulation=constant > 0, weight=weight, ignore_index=ignore_index
        )
    assert second is not None
    if kind == _IA_BCE:
        return reference.ia_bce_loss(x, scored, gamma, second, how, weight=weight, ignore_index=ignore_index)
    return reference.asymmetric_loss(x, target, gamma, second, constant, how, weight=weight, ignore_index=ignore_index)


def check_arguments(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    second: float | Tensor | None,
    weight: Tensor | None,
    scores: Tensor | None,
    kind: int,
    constant: float,
    reduction: int,
) -> None:
    """Checks all arguments except the range of the labels."""
    if not 0 <= kind < len(NAMES):
        raise ValueError(f"sigmoid_loss: kind must be 0, 1, 2, 3, 4 or 5, got {kind}")
    op, gamma_name, second_name = NAMES[kind]
    check_dense(op, input)
    if not input.is_floating_point():
        raise TypeError(f"{op}: input must be floating point, got {input.dtype}")
    check_floating(op, "input", input)
    check_target(op, input, target)
    if scores is not None:
        check_scores(op, input, target, scores, kind)
    for name, value in ((gamma_name, gamma), (second_name, second), ("weight", weight)):
        if not isinstance(value, Tensor):
            continue
        check_floating(op, name, value)
        if not is_host_number(value):
            check_same_device(op, name, value, input)
            if not fits(value, tuple(input.shape)):
                raise ValueError(
                    f"{op}: {name} must be broadcastable to input, {sizes(input.shape)}, got {sizes(value.shape)}"
                )
        if value.requires_grad and name in ("alpha", "weight"):
            raise ValueError(f"{op}: {name} must not require grad: it is a constant of the loss")
    if kind == _QUALITY if second is not None else kind in (_ASYMMETRIC, _IA_BCE):
        raise ValueError(f"{op}: {'has no' if second is not None else 'needs'} {second_name}")
    if not (0 <= constant < 1 or (constant == 1 and kind >= _VARIFOCAL)):
        raise ValueError(f"{op}: margin must be in [0, 1), got {constant:g}")
    check_reduction(op, reduction)


def check_target(op: str, input: Tensor, target: Tensor, remedy: str = "") -> None:
    check_same_device(op, "target", target, input)
    if target.is_complex():
        raise TypeError(f"{op}: target must be floating point, bool or integer, got {target.dtype}")
    if target.shape == input.shape:
        return
    is_integer = not target.is_floating_point() and target.dtype != torch.bool
    if target.dim() + 1 != input.dim() or not is_integer:
        raise ValueError(
            f"{op}: target must be the shape of input = {sizes(input.shape)}, got {sizes(target.shape)}{remedy}"
        )
    class_dim = 0 if input.dim() == 1 else 1
    shape = [*input.shape[:class_dim], *input.shape[class_dim + 1 :]]
    if list(target.shape) != shape:
        raise ValueError(
            f"{op}: target of labels must be the shape of input without its class dimension, {sizes(shape)}, "
            f"got {sizes(target.shape)}{remedy}"
        )


def check_scores(op: str, input: Tensor, labels: Tensor, scores: Tensor, kind: int) -> None:
    if kind in (_FOCAL, _ASYMMETRIC):
        raise ValueError(f"{op}: target must be a tensor")
    check_floating(op, "the scores of target", scores)
    check_same_device(op, "the scores of target", scores, input)
    if labels.dim() + 1 != input.dim():
        raise ValueError(
            f"{op}: target must be labels and scores, with labels of the shape of input without its class dimension, "
            f"got labels {sizes(labels.shape)} of {labels.dtype}"
        )
    if scores.shape != labels.shape:
        raise ValueError(
            f"{op}: the scores of target must have the shape of its labels, {sizes(labels.shape)}, "
            f"got {sizes(scores.shape)}"
        )


def check_range(input: Tensor, target: Tensor, kind: int, ignore_index: int) -> None:
    found = labels_to_check(target) if target.dim() + 1 == input.dim() else None
    if found is None:
        return
    n_classes, labels = input.shape[0 if input.dim() == 1 else 1], found.reshape(-1).long()
    rows = (((labels < 0) | (labels > n_classes)) & (labels != ignore_index)).nonzero()
    if len(rows):
        row = int(rows[0])
        raise IndexError(
            f"{NAMES[kind][0]}: target must be in [0, {n_classes}] (the last is background) or ignore_index, got "
            f"{int(labels[row])} at row {row}"
        )
