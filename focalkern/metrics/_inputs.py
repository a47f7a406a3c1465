"""Arguments of the metrics: probabilities, labels, confidences, estimators."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._checks import MOST_BINS, integer, one_of
from focalkern._types import ESTIMATORS, Estimator

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "MetricInput",
    "as_correct",
    "as_labels",
    "as_probs",
    "check_bins",
    "check_log_probs",
    "confidence_and_correct",
    "probs_and_target",
]


# Permitted difference of the sum of a row of probabilities to 1, in the whole library. So an entry may exceed 1 by as
# much; it counts as 1 when its bin is chosen.
_ABOVE_ONE = 1e-3


class MetricInput(NamedTuple):
    """The unchecked arguments of a metric: probabilities or confidences, labels or correctness."""

    probs: Any = None
    target: Any = None
    confidence: Any = None
    correct: Any = None


def check_bins(op: str, n_bins: object, estimator: object) -> int:
    one_of(op, "estimator", estimator, ESTIMATORS)
    return integer(op, "n_bins", n_bins, 1, MOST_BINS)


def confidence_and_correct(op: str, probs: Any, target: Any, confidence: Any, correct: Any) -> tuple[Tensor, Tensor]:
    """confidence [..., N] in its own dtype, checked, and correct [..., N] as float64."""
    if (probs is None) == (confidence is None):
        found = "neither" if probs is None else "both"
        raise ValueError(f"{op}: expected either probs or confidence, got {found}")
    if (target is None) == (correct is None):
        found = "neither" if target is None else "both"
        raise ValueError(f"{op}: expected either target or correct, got {found}")
    if probs is not None:
        if target is not None:
            probs, target = probs_and_target(op, probs, target)
            confidence, top = probs.max(-1)
            correct = top == target
        else:
            confidence = as_probs(op, probs).amax(-1)
    elif target is not None:
        raise ValueError(f"{op}: confidence needs correct in place of target, got target")
    confidence = as_tensor(confidence, f"{op}: confidence")
    if not confidence.is_floating_point():
        raise TypeError(f"{op}: confidence must be floating point, got {confidence.dtype}")
    if confidence.dim() < 1:
        raise ValueError(f"{op}: confidence must be [N], got a single number")
    correct = as_correct(op, correct)
    if correct.shape != confidence.shape:
        raise ValueError(f"{op}: correct must be [N] = {list(confidence.shape)}, got {list(correct.shape)}")
    if correct.device != confidence.device:
        raise ValueError(f"{op}: correct must be on {confidence.device}, got {correct.device}")
    _check_fractions(op, "confidence", confidence, "; are these logits?" if probs is not None else "")
    return confidence.contiguous(), correct


def as_correct(op: str, correct: Any) -> Tensor:
    """Whether each row is correct as float64, checked."""
    correct = as_tensor(correct, f"{op}: correct")
    if correct.is_complex():
        raise TypeError(f"{op}: correct must be bool or real, got {correct.dtype}")
    correct = correct.to(torch.float64)
    _check_fractions(op, "correct", correct)
    return correct


def _check_fractions(op: str, name: str, values: Tensor, remedy: str = "") -> None:
    inside = (values >= 0) & (values <= 1 + _ABOVE_ONE)  # false for NaN
    if bool(inside.all()):
        return
    where = (~inside).nonzero()[0].tolist()
    at = f" at row {where[-1]}" if where else ""
    raise ValueError(f"{op}: {name} must be in [0, 1], got {values[tuple(where)].item()}{at}{remedy}")


def as_probs(op: str, probs: Any, *, log: bool = False) -> Tensor:
    probs = as_tensor(probs, f"{op}: probs")
    if not probs.is_floating_point():
        raise TypeError(f"{op}: probs must be floating point, got {probs.dtype}")
    if probs.dim() < 2 or probs.shape[-1] < 1:
        remedy = "; for one probability p of class 1 per row, pass the columns 1 - p and p" if probs.dim() == 1 else ""
        raise ValueError(f"{op}: probs must be [N, C], got shape {list(probs.shape)}{remedy}")
    if not log and probs.numel():
        low, high = torch.aminmax(probs)
        # The comparison is false for NaN, so NaN raises too.
        if not (float(low) >= 0 and float(high) <= 1 + _ABOVE_ONE):
            inside = ((probs >= 0) & (probs <= 1 + _ABOVE_ONE)).all(-1)
            row = (~inside).nonzero()[0].tolist()
            raise ValueError(
                f"{op}: probs must be in [0, 1], got values from {probs[tuple(row)].amin().item()} to "
                f"{probs[tuple(row)].amax().item()} in row {row[-1]}; are these logits?"
            )
    result: Tensor = probs
    return result


def check_log_probs(op: str, log_probs: Tensor) -> None:
    """Raises for values that no log-probability has. NaN passes: the score is NaN."""
    high = float(log_probs.amax()) if log_probs.numel() else 0.0
    if high > math.log1p(_ABOVE_ONE):
        raise ValueError(
            f"{op}: probs must be log-probabilities, at most 0, with log=True, got values up to {high}; are these "
            "probabilities or logits?"
        )


def as_labels(op: str, target: Any, probs: Tensor) -> Tensor:
    """The labels as integers of any shape, on the device of ``probs``."""
    target = as_tensor(target, f"{op}: target")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        one_hot = target.shape == probs.shape
        remedy = (
            "pass class indices: the argmax of one-hot labels" if one_hot else "torch converts it with target.long()"
        )
        raise TypeError(f"{op}: target must be integer, got {target.dtype}; {remedy}")
    if target.device != probs.device:
        raise ValueError(f"{op}: target must be on the device of probs, {probs.device}, got {target.device}")
    labels: Tensor = target
    return labels


def probs_and_target(op: str, probs: Any, target: Any, *, log: bool = False) -> tuple[Tensor, Tensor]:
    probs = as_probs(op, probs, log=log)
    target = as_labels(op, target, probs)
    if target.shape != probs.shape[:-1]:
        pixels = f" or [N, d1, ...] = {[len(probs), *probs.shape[2:]]}" if probs.dim() > 2 else ""
        raise ValueError(f"{op}: target must be [N] = {list(probs.shape[:-1])}{pixels}, got {list(target.shape)}")
    if target.dtype != torch.int64:
        target = target.to(torch.int64)
    low, high = torch.aminmax(target) if target.numel() else (0, 0)
    if not 0 <= int(low) <= int(high) < max(1, probs.shape[-1]):
        outside = (target < 0) | (target >= probs.shape[-1])
        where = outside.nonzero()[0].tolist()
        raise IndexError(
            f"{op}: target must be in [0, {probs.shape[-1]}), got {target[tuple(where)].item()} at row {where[-1]}"
        )
    return probs, target
