"""Arguments of the metrics: probabilities, labels, confidences, estimators."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._checks import MOST_BINS, from_one, integer, one_image, one_of
from focalkern._diagnostics import remedy_for_sum, warn_outside
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
    "look_at_sums",
    "probs_and_target",
]


# Permitted difference of the sum of a row of probabilities to 1, in the whole library. So an entry may exceed 1 by as
# much; it counts as 1 when its bin is chosen.
_ABOVE_ONE = 1e-3
# The sums of at most so many rows, and numbers, are looked at; a larger difference to 1 is no rounding of softmax.
_ROWS, _NUMBERS, _ROUNDING = 32, 1 << 14, 1e-2
# For fewer probabilities, the look at the sums would take more than 2 % of the time of a score.
_MANY = 1 << 20


class MetricInput(NamedTuple):
    """The unchecked arguments of a metric: probabilities or confidences, labels or correctness.

    ``sums`` says whether to look at the sums of the rows of ``probs``.
    """

    probs: Any = None
    target: Any = None
    confidence: Any = None
    correct: Any = None
    sums: bool = True

    def of_each(self, function: Callable[[Tensor], Tensor]) -> "MetricInput":
        """The function of every tensor."""
        probs, target, confidence, correct = (None if one is None else function(one) for one in self[:-1])
        return MetricInput(probs, target, confidence, correct, self.sums)


def check_bins(op: str, n_bins: object, estimator: object) -> int:
    one_of(op, "estimator", estimator, ESTIMATORS)
    return integer(op, "n_bins", n_bins, 1, MOST_BINS)


def confidence_and_correct(
    op: str, probs: Any, target: Any, confidence: Any, correct: Any, sums: bool = True
) -> tuple[Tensor, Tensor]:
    """confidence [..., N] in its own dtype, checked, and correct [..., N] as float64."""
    if (probs is None) == (confidence is None):
        found = "neither" if probs is None else "both"
        raise ValueError(f"{op}: expected either probs or confidence, got {found}")
    if (target is None) == (correct is None):
        found = "neither" if target is None else "both"
        raise ValueError(f"{op}: expected either target or correct, got {found}")
    if probs is not None:
        if target is not None:
            probs, target = probs_and_target(op, probs, target, sums=sums)
            confidence, top = probs.max(-1)
            correct = top == target
        else:
            confidence = as_probs(op, probs, sums=sums).amax(-1)
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
    if probs is None:
        _check_fractions(op, "confidence", confidence)
    return confidence.contiguous(), correct


def as_correct(op: str, correct: Any) -> Tensor:
    """Whether each row is correct as float64, checked."""
    correct = as_tensor(correct, f"{op}: correct")
    if correct.is_complex():
        raise TypeError(f"{op}: correct must be bool or real, got {correct.dtype}")
    correct = correct.to(torch.float64)
    _check_fractions(op, "correct", correct)
    return correct


def _check_fractions(op: str, name: str, values: Tensor) -> None:
    inside = (values >= 0) & (values <= 1 + _ABOVE_ONE)  # false for NaN
    if bool(inside.all()):
        return
    where = (~inside).nonzero()[0].tolist()
    at = f" at row {where[-1]}" if where else ""
    raise ValueError(f"{op}: {name} must be in [0, 1], got {values[tuple(where)].item()}{at}")


def as_probs(op: str, probs: Any, *, log: bool = False, sums: bool = True) -> Tensor:
    probs = as_tensor(probs, f"{op}: probs")
    if not probs.is_floating_point():
        raise TypeError(f"{op}: probs must be floating point, got {probs.dtype}")
    if probs.dim() < 2 or probs.shape[-1] < 1:
        remedy = "; for one probability p of class 1 per row, pass the columns 1 - p and p" if probs.dim() == 1 else ""
        raise ValueError(f"{op}: probs must be [N, C], got shape {list(probs.shape)}{remedy}")
    if not log and probs.numel():
        low, high = torch.aminmax(probs)
        some = _some_rows(probs).sum(-1) if sums else None
        if probs.is_cpu or some is None:
            of_rows = [] if some is None else some.tolist()
        else:  # one wait for the device
            low, high, *of_rows = torch.cat([torch.stack([low, high]), some]).tolist()
        # The comparison is false for NaN, so NaN raises too.
        if not (float(low) >= 0 and float(high) <= 1 + _ABOVE_ONE):
            inside = ((probs >= 0) & (probs <= 1 + _ABOVE_ONE)).all(-1)
            row = (~inside).nonzero()[0].tolist()
            found = probs[tuple(row)]
            if bool(found.isnan().any()):
                raise ValueError(f"{op}: probs must be in [0, 1], got NaN in row {row[-1]}")
            remedy = remedy_for_sum(found) or "; are these logits? Pass logits.softmax(-1)"
            raise ValueError(
                f"{op}: probs must be in [0, 1], got values from {found.amin().item():g} to {found.amax().item():g} in "
                f"row {row[-1]}{remedy}"
            )
        if sums:
            _warn_about_sums(op, of_rows, "rows", "the softmax of the logits, or divide each row by its sum")
    result: Tensor = probs
    return result


def _some_rows(probs: Tensor) -> Tensor:
    """[n, C], evenly spaced rows of the first set of [..., N, C]."""
    rows = probs if probs.dim() == 2 else probs[(0,) * (probs.dim() - 2)]
    n_rows, n_classes = rows.shape
    step = -(-n_rows // max(1, min(_ROWS, _NUMBERS // n_classes)))
    return rows if step == 1 else rows[::step]


def _warn_about_sums(op: str, sums: list[float], what: str, remedy: str) -> None:
    """Warns if most rows do not sum to 1 and one exceeds it. Rows of only the largest classes have sums below 1."""
    if max(sums) <= 1 + _ROUNDING:
        return
    if 2 * sum(abs(one - 1) > _ROUNDING for one in sums) > len(sums):
        warn_outside(
            f"{op}: probs must have {what} that sum to 1, got sums from {min(sums):.3g} to {max(sums):.3g}; pass "
            f"{remedy} (sigmoids of independent labels are no distribution over classes)",
            UserWarning,
        )


def look_at_sums(rows: MetricInput) -> bool:
    """Whether a score that takes little time should look at the sums of the probabilities."""
    return rows.sums and isinstance(rows.probs, Tensor) and rows.probs.numel() >= _MANY


def check_log_probs(op: str, log_probs: Tensor, *, sums: bool = True) -> None:
    """Raises for values that no log-probability has. NaN passes: the score is NaN."""
    if not log_probs.numel():
        return
    high = float(log_probs.amax())
    if high > math.log1p(_ABOVE_ONE):
        raise ValueError(
            f"{op}: probs must be log-probabilities, at most 0, with log=True, got values up to {high}; are these "
            "probabilities or logits?"
        )
    if sums:
        of_rows = _some_rows(log_probs).to(torch.float64).exp().sum(-1).tolist()
        _warn_about_sums(op, of_rows, "exponentials of rows", "the log_softmax of the logits")


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


def probs_and_target(
    op: str, probs: Any, target: Any, *, log: bool = False, sums: bool = True
) -> tuple[Tensor, Tensor]:
    """Checked; ``log`` permits any value in ``probs``, ``sums`` says whether to look at the sums of its rows."""
    probs = as_probs(op, probs, log=log, sums=sums)
    target = as_labels(op, target, probs)
    if target.shape != probs.shape[:-1]:
        pixels = f" or [N, d1, ...] = {[len(probs), *probs.shape[2:]]}" if probs.dim() > 2 else ""
        remedy = "; for one-hot rows pass target.argmax(-1)" if target.shape == probs.shape else ""
        if probs.dim() > 2 and target.shape == probs.shape[1:]:
            remedy = f"; {one_image('probs', 'target')}"
        raise ValueError(
            f"{op}: target must be [N] = {list(probs.shape[:-1])}{pixels}, got {list(target.shape)}{remedy}"
        )
    if target.dtype != torch.int64:
        target = target.to(torch.int64)
    low, high = torch.aminmax(target) if target.numel() else (0, 0)
    if not 0 <= int(low) <= int(high) < max(1, probs.shape[-1]):
        outside = (target < 0) | (target >= probs.shape[-1])
        where = outside.nonzero()[0].tolist()
        found = f"got {target[tuple(where)].item()} at row {where[-1]}{from_one(target, probs.shape[-1])}"
        raise IndexError(f"{op}: target must be in [0, {probs.shape[-1]}), {found}")
    return probs, target
