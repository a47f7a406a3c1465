"""Calibration class by class."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._checks import MOST_BINS, integer, label_range, one_of, short
from focalkern.metrics import ESTIMATORS, Estimator, expected_calibration_error

__all__ = ["per_class_report"]

_OP = "per_class_report"


@torch.no_grad()
def per_class_report(
    probs: Any,
    target: Any,
    *,
    calibrated: Any = None,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    names: Sequence[Any] | None = None,
) -> list[dict[str, Any]]:
    r"""Calibration of the probability of each class, before and after a calibrator.

    Args:
        probs: [N, C] probabilities of the classes or of independent labels, floating point.
        target: [N] class indices; or [N, C] of 0 and 1, for independent labels.
        calibrated: [N, C] probabilities after calibration; None reports only ``probs``.
        n_bins: bins of each ECE.
        estimator: as :func:`focalkern.metrics.expected_calibration_error`.
        names: [C] names of the classes; None uses their indices.

    Returns:
        One dict per class, for ``tabulate(rows, headers="keys")`` or ``pandas.DataFrame(rows)``. All are fractions, NLL
        in nats:

        * ``class``, ``n`` (number of its rows) and ``frequency`` = n / N;
        * ``mean_prob``: the mean probability of the class over all N rows; calibrated, it equals the frequency;
        * ``ece``: the ECE of that probability against [target = class], over all N rows; the mean over the classes is
          the classwise calibration error;
        * ``nll``: mean of -log p over the n rows of the class; weighted by frequency it sums to the NLL of all rows.
          For independent labels: the binary cross-entropy over all N rows;
        * ``recall``: the fraction of the n rows that are predicted as the class (p > 1/2 for independent labels). If
          n = 0, recall and NLL are NaN;
        * with ``calibrated``, the last four of the calibrated probabilities as ``mean_prob_after``, ....

    Raises:
        TypeError: dtype of an argument.
        ValueError: shape, value or option of an argument; no rows.
        IndexError: a class index outside [0, C).

    Example:
        >>> probs, labels = torch.tensor([[0.98, 0.02]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> report = fk.per_class_report(probs, labels, names=["cat", "dog"])
        >>> [(row["class"], row["n"], round(row["mean_prob"], 2), round(row["ece"], 2)) for row in report]
        [('cat', 8, 0.98, 0.18), ('dog', 2, 0.02, 0.18)]
    """
    before = _as_probs("probs", probs)
    n_rows, n_classes = before.shape
    if n_rows == 0:
        raise ValueError("per_class_report: expected at least one row, got none")
    if names is not None:
        try:
            names = list(names)
        except Exception:  # not iterable, or its class raises something else
            raise TypeError(f"{_OP}: names must be a sequence, got {short(names)}") from None
        if len(names) != n_classes:
            raise ValueError(f"{_OP}: names must be [C] = [{n_classes}], got {len(names)}")
    one_of(_OP, "estimator", estimator, ESTIMATORS)
    n_bins = integer(_OP, "n_bins", n_bins, 1, MOST_BINS)
    is_class, independent = _membership(as_tensor(target, f"{_OP}: target"), before)
    sets = {"": before}
    if calibrated is not None:
        after = _as_probs("calibrated", calibrated)
        if after.shape != before.shape:
            raise ValueError(f"per_class_report: calibrated must be {list(before.shape)}, got {list(after.shape)}")
        sets["_after"] = after.to(before.device)

    number = is_class.sum(0)
    count = number.to(torch.float64)
    columns: dict[str, list[Any]] = {
        "class": list(range(n_classes)) if names is None else list(names),
        "n": number.tolist(),
        "frequency": (count / n_rows).tolist(),
    }
    weight = torch.where(count > 0, count, math.nan)
    for suffix, p in sets.items():
        wide = p.to(torch.float64)
        error = expected_calibration_error(
            confidence=p.T.contiguous(), correct=is_class.T, n_bins=n_bins, estimator=estimator
        )
        if independent:
            chosen = p > 0.5
            nll = torch.where(is_class, -wide.log(), -(1 - wide.clamp(max=1)).log()).mean(0)
        else:
            chosen = torch.nn.functional.one_hot(p.argmax(-1), n_classes) == 1
            nll = torch.where(is_class, -wide.log(), 0.0).sum(0) / weight
        columns[f"mean_prob{suffix}"] = wide.mean(0).tolist()
        columns[f"ece{suffix}"] = error.tolist()
        columns[f"nll{suffix}"] = (nll + 0.0).tolist()  # avoids -0.0
        columns[f"recall{suffix}"] = ((chosen & is_class).sum(0) / weight).tolist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _as_probs(name: str, values: Any) -> Tensor:
    probs = as_tensor(values, f"{_OP}: {name}")
    if not probs.is_floating_point():
        raise TypeError(f"per_class_report: {name} must be floating point, got {probs.dtype}")
    if probs.dim() != 2:
        raise ValueError(f"per_class_report: {name} must be [N, C], got shape {list(probs.shape)}")
    # The comparisons are false for NaN, so NaN raises too.
    if not bool(((probs >= 0) & (probs <= 1 + 1e-3)).all()):
        raise ValueError(f"per_class_report: {name} must be in [0, 1]; are these logits? Pass logits.softmax(-1)")
    return probs


def _membership(target: Tensor, probs: Tensor) -> tuple[Tensor, bool]:
    """[N, C] bool, and whether the labels are independent."""
    n_rows, n_classes = probs.shape
    target = target.to(probs.device)
    if target.shape == probs.shape:
        if not bool(((target == 0) | (target == 1)).all()):
            raise ValueError("per_class_report: target must be 0 or 1 where it is [N, C]")
        return target == 1, True
    if target.shape != (n_rows,):
        raise ValueError(
            f"per_class_report: target must be [N] = [{n_rows}] or [N, C] = [{n_rows}, {n_classes}], "
            f"got {list(target.shape)}"
        )
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"per_class_report: target must be integer class indices, got {target.dtype}")
    target = target.to(torch.int64)
    label_range("per_class_report", target, n_classes)
    return torch.nn.functional.one_hot(target, n_classes) == 1, False
