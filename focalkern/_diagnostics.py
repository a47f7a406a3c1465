"""Warnings about rows and labels that are valid but unlikely to be right; each names the likely cause.

Every test compares with chance and skips small sets. Weak models, rare or missing labels and repeated rows cause no
warning."""

import contextlib
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._types import HALVES

__all__ = [
    "copies_of",
    "input_notes",
    "input_problems",
    "label_problems",
    "likely_sum",
    "may_be_logits",
    "one_logit_problems",
    "pair_problems",
    "refuse_probs",
    "remedy_for_sum",
    "repeated_rows",
    "row_hashes",
    "rows_digest",
    "sampled_parts",
    "warn_outside",
]

# Files whose lines no user wrote: this package, and the decorators of contextlib and torch.no_grad.
_INSIDE = (str(Path(__file__).resolve().parent), contextlib.__file__, torch.utils._contextlib.__file__)

# Sets with fewer rows are not tested.
_ENOUGH = 50
# With fewer rows outside the commonest class, labels are not called random: the model may be weak.
_ENOUGH_FOR_CHANCE = 200
# Threshold of the sign test, in standard deviations.
_CERTAIN = 5.0
# Rows per block.
_BLOCK = 1 << 22
# Rows that are tested first: most sets are told apart by them.
_FIRST = 64
# Fewer rows in common, or copies, are chance.
_FEWEST_SHARED, _SHARED, _CHANCE = 5, 0.05, 0.3
# A float32 of four decimals differs from them by less than this, in units of the last decimal.
_NEAR = 0.02
# The sample of a large set: at most this many rows and numbers, in blocks, because a shift of the labels shows only in
# neighbouring rows.
_SAMPLED_ROWS, _SAMPLED_NUMBERS, _SAMPLED_BLOCKS = 1 << 16, 1 << 21, 16
# Probabilities of many rows come closer to 0 and to 1 than this.
_END = 0.1
# Permitted relative errors of the sum of a row: of any probabilities, and of those that are rounded to two digits.
_EXACT, _ROUNDED = 1e-3, 0.05


def warn_outside(message: str, category: type[Warning]) -> None:
    """Emits a warning whose location is the first line outside this package."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)


def likely_sum(logits: Tensor) -> int:
    """1 if the rows look like probabilities, 100 if they look like percentages, else 0.

    They do if no value is negative and every row has this sum. A few logits may have a sum near 1 by chance.
    """
    if len(logits) == 0 or not logits[:_FIRST].amin().item() >= 0:
        return 0
    tolerance = _EXACT if len(logits) < _ENOUGH else _ROUNDED
    return next((total for total in (1, 100) if _sum_to(logits, total, tolerance)), 0)


def remedy_for_sum(row: Tensor) -> str:
    """The remedy for probabilities [C] of a wrong sum, for the end of an error; empty if none is likely."""
    if _sum_to(row[None], 100, _ROUNDED):
        return "; divide each row by its sum"
    rounded = _sum_to(row[None], 1, _ROUNDED)
    return "; keep more digits of rounded probabilities, or divide each row by its sum" if rounded else ""


def may_be_logits(rows: Tensor) -> bool:
    """Whether one of the rows [..., C] that should be probabilities has a value that no rounding makes negative."""
    return bool(((rows < -_ROUNDED) & rows.isfinite()).any())


def refuse_probs(op: str, logits: Tensor, name: str = "logits") -> None:
    """Raises if the input kind was not given and the logits look like probabilities or percentages.

    Args:
        op: function that the error names.
        logits: [N, C].
        name: argument that the error names.
    """
    total = likely_sum(logits) if len(logits) > 1 else 0  # a single row may look like anything
    if total == 0:
        return
    if _are_one_hot(logits):
        raise ValueError(
            f"{op}: {name} must not be predicted classes, got one-hot rows; pass the model's logits or probabilities, "
            "or input_kind='logits' if these are logits"
        )
    what, first = ("probabilities", "pass") if total == 1 else ("percentages", "divide each row by its sum and pass")
    raise ValueError(
        f"{op}: {name} must not be {what} without input_kind, got non-negative rows that sum to {total}; {first} "
        "input_kind='probs', or input_kind='logits' if these are logits"
    )


def input_problems(input: Tensor, kind: str, *, assumed: bool = True) -> list[str]:
    """A warning about unlikely rows [N, C]: at most one sentence. ``assumed`` means that no user named the kind."""
    if len(input) < 2:
        return []
    if _are_one_hot(input):
        return [
            "every row is one-hot, like a predicted class: pass the model's logits or probabilities, because decisions "
            "cannot be calibrated"
        ]
    if kind == "logits" and _sum_to(input, 100, _EXACT):
        return ["the rows are non-negative and sum to 100: divide percentages by 100 to get probabilities"]
    if kind == "logits" and assumed and _fill_unit_interval(input) and not likely_sum(input):
        return [
            "all logits lie in [0, 1], like probabilities, but the rows do not sum to 1: divide each row of rounded "
            "probabilities by its sum and pass input_kind='probs'; of sigmoid scores pass the logits"
        ]
    return []


def one_logit_problems(logits: Tensor) -> list[str]:
    """The warning for one logit per row [N], or for independent labels [N, L]."""
    if len(logits) < _ENOUGH or not bool(((logits >= 0) & (logits <= 1)).all()):
        return []
    return ["all logits lie in [0, 1]: for probabilities, pass input_kind='probs'"]


def _every(input: Tensor, rule: Callable[[Tensor], Tensor]) -> bool:
    """Whether the rule is true for all rows; the first ones are tested first."""
    return bool(rule(input[:_FIRST]).all()) and bool(rule(input).all())


def _sum_to(input: Tensor, total: float, tolerance: float) -> bool:
    def sums_fit(rows: Tensor) -> Tensor:
        return (rows.sum(1, dtype=torch.float64) / total - 1).abs() <= tolerance

    return len(input) > 0 and _every(input, lambda rows: rows.amin() >= 0) and _every(input, sums_fit)


def _fill_unit_interval(input: Tensor) -> bool:
    """Whether all values are in [0, 1], down to near 0 and up to near 1. Few cosine similarities are."""
    if len(input) < _ENOUGH or not bool((input[:_FIRST] >= 0).all()):
        return False
    low, high = (float(bound) for bound in input.aminmax())
    return 0 <= low < _END and 1 - _END < high <= 1


def _are_one_hot(input: Tensor) -> bool:
    return _every(input, lambda rows: ((rows == 0) | (rows == 1)).all(-1) & ((rows == 1).sum(-1) == 1))


def input_notes(logits: Tensor) -> list[str]:
    """Notes on logits that are unusual but valid."""
    if not _are_log_probabilities(logits):
        return []
    return [
        "the logits are log-probabilities (each row's exponentials sum to 1), which is fine: calibrators use only the "
        "differences of logits"
    ]


def pair_problems(input: Tensor, labels: Tensor, other: Tensor, other_labels: Tensor) -> list[str]:
    """Rows that are both validation and test rows."""
    if input.shape[1:] != other.shape[1:] or len(other) == 0:
        return []
    if input.shape == other.shape and torch.equal(input, other) and torch.equal(labels, other_labels):
        return [f"the same {len(other):,} rows are validation and test rows, so the metrics are optimistic"]
    one, two = row_hashes(input, labels), row_hashes(other, other_labels)
    # The outputs of a tree have few distinct rows, so both sets may share them. Copies of rows are no such outputs.
    if any(len(np.unique(found[1])) < 0.9 * len(found[1]) and copies_of(*found) is None for found in (one, two)):
        return []
    two = two[1]
    both = two[np.isin(two, one[1])]
    shared, telling = len(both), int((both % 2).sum())
    # Rows of few digits may be equal by chance, but not so many of them if nearly all rows of a set differ.
    if telling < max(_FEWEST_SHARED, _SHARED * len(two)) and shared < max(_FEWEST_SHARED, _CHANCE * len(two)):
        return []
    return [
        f"{shared:,} of the {len(other):,} test rows are also validation rows, with the same label, so the metrics are "
        "optimistic: use sets without common rows"
    ]


def sampled_parts(n_rows: int, n_classes: int) -> list[tuple[int, int]]:
    """The parts [begin, end) of N rows that :func:`label_problems` should read: all rows, or evenly spaced blocks."""
    block = max(1, min(_SAMPLED_ROWS, _SAMPLED_NUMBERS // n_classes) // _SAMPLED_BLOCKS)
    if n_rows <= _SAMPLED_BLOCKS * block:
        return [(0, n_rows)]
    starts = [(n_rows - block) * place // (_SAMPLED_BLOCKS - 1) for place in range(_SAMPLED_BLOCKS)]
    return [(start, start + block) for start in starts]


def label_problems(input: Tensor, labels: Tensor) -> list[str]:
    """Labels that cannot be right: at most one sentence, the likeliest.

    Args:
        input: [N, C] floating point logits or probabilities, checked.
        labels: [N] int64 in [0, C).
    """
    n_rows, n_classes = input.shape
    if n_rows < _ENOUGH:
        return []
    if bool((labels == labels[0]).all()):
        return [
            f"all {n_rows:,} labels are class {int(labels[0])}: the rows of the other classes are missing, and a "
            "calibrator would only learn to predict this class"
        ]
    top = input.argmax(-1)
    own = top == labels
    right = int(own.sum())
    found = f"{right / n_rows:.1%} of the {n_rows:,} rows"

    # Another interpretation of the same numbers that explains the labels much better than the requested one.
    next_label, last_label = labels.roll(-1), labels.roll(1)
    readings = [
        (top == next_label, "each label belongs to the row before (the labels start one row too late)"),
        (top == last_label, "each label belongs to the next row (the labels start one row too early)"),
    ]
    if right <= 0.5 * n_rows:  # these are true in other rows than the requested one
        second = input.scatter(1, top.unsqueeze(1), -math.inf).argmax(-1)
        untied = input.amax(-1) > input.amin(-1)
        # Labels in which the first or the last class occurs cannot be shifted.
        if int(labels.amin()) > 0:
            readings.insert(0, (top + 1 == labels, "the labels are one too high (the first class is 0)"))
        if int(labels.amax()) < n_classes - 1:
            readings.insert(0, (top - 1 == labels, "the labels are one too low (the first class is 0)"))
        readings.append((second == labels, "two columns are swapped, or the logits of one class are too high"))
        reversed_sign = (input.argmin(-1) == labels) & untied
        readings.append((reversed_sign, "the sign of the logits is reversed (losses or distances)"))
    best = max(readings, key=lambda reading: int(reading[0].sum()))
    better = int(best[0].sum()) / n_rows
    order = _other_order(top, labels, n_classes, right)
    if _clearly_more(best[0], own) and (order is None or better > 0.7 * order):
        return [f"the label has the largest logit in {found}, but in {better:.1%} if {best[1]}"]
    if order is not None:
        return [
            f"the label has the largest logit in {found}, but in {order:.1%} if the columns are reordered: the columns "
            "are not in the order of the class numbers"
        ]

    predicted, present = (torch.bincount(values, minlength=n_classes) for values in (top, labels))
    share_predicted, share_present = predicted.double() / n_rows, present.double() / n_rows
    chance = float((share_predicted * share_present).sum())
    error = math.sqrt(chance * (1 - chance) / n_rows)
    of_minorities = n_rows - int(present.max())
    at_chance = right / n_rows < chance + min(2.5 * error, 0.05 * (1 - chance))
    if at_chance and of_minorities >= _ENOUGH_FOR_CHANCE and not _informative(input, labels):
        return [
            f"the label has the largest logit in {found}, no more than chance ({chance:.1%}): labels and logits have "
            "different row orders or come from different data sets, or the model is hardly better than chance"
        ]
    # A mostly accurate model predicts the class as often as the others, but the class never occurs as a label.
    never = (present == 0) & (predicted >= max(20.0, 0.7 * n_rows / n_classes))
    if bool(never.any()) and right >= 0.6 * (n_rows - int(predicted[never].sum())):
        classes = never.nonzero().flatten().tolist()
        shown = ", ".join(str(value) for value in classes[:5]) + (", ..." if len(classes) > 5 else "")
        times = int(predicted[never].sum())
        return [
            f"{'class' if len(classes) == 1 else 'the classes'} {shown} never occur{'s' if len(classes) == 1 else ''} "
            f"as a label, but {'has' if len(classes) == 1 else 'have'} the largest logit in {times:,} of the "
            f"{n_rows:,} rows: the labels may be shifted, or rows are missing"
        ]
    return []


def _clearly_more(other: Tensor, own: Tensor) -> bool:
    """Sign test on the rows where exactly one of the two is correct: whether ``other`` is significantly more often."""
    more, less = int((other & ~own).sum()), int((own & ~other).sum())
    return more - less > _CERTAIN * math.sqrt(more + less)


def _other_order(top: Tensor, labels: Tensor, n_classes: int, right: int) -> float | None:
    """The accuracy if the columns were reordered, each class to the most frequent prediction of its rows; None if this
    is no evidence of another order."""
    n_rows = len(labels)
    if n_rows < 20 * n_classes or n_classes > 4096 or right > 0.5 * n_rows:
        return None
    counts = torch.bincount(labels * n_classes + top, minlength=n_classes * n_classes).view(n_classes, n_classes)
    most, place = counts.max(-1)
    used = place[most > 0]
    # Classes with the same prediction for every row: a constant model is no permutation.
    best = int(most.sum())
    different = len(used.unique()) >= 0.8 * len(used) and len(used) > 1
    return best / n_rows if different and best > 2 * right and best > 0.5 * n_rows else None


def _informative(input: Tensor, labels: Tensor) -> bool:
    """Whether the logits of the labels are higher than for a random order of the labels, by their covariance."""
    n_rows, n_classes = input.shape
    shares = torch.bincount(labels, minlength=n_classes).double() / n_rows
    size = max(1, _BLOCK // n_classes)
    # Impossible classes count as low as the lowest class of their row.
    lowest = torch.where(input.isinf(), math.inf, input).amin(-1, keepdim=True)
    scores = []
    for block, low, of_block in zip(input.split(size), lowest.split(size), labels.split(size), strict=True):
        apart = torch.maximum(block, low).double()
        apart -= apart.mean(-1, keepdim=True)
        scores.append(torch.stack([apart.gather(1, of_block.unsqueeze(1)).squeeze(1), apart @ shares]))
    own, any_other = torch.cat(scores, 1)
    # Subtract the mean of each class: a class with high logits in every row is no evidence.
    mean_of_class = torch.zeros(n_classes, dtype=torch.float64, device=input.device)
    for block, low in zip(input.split(size), lowest.split(size), strict=True):
        apart = torch.maximum(block, low).double()
        mean_of_class += (apart - apart.mean(-1, keepdim=True)).sum(0) / n_rows
    score = own - mean_of_class[labels] - any_other + mean_of_class @ shares
    return bool(score.mean() > 2.5 * score.std() / math.sqrt(n_rows))


def _are_log_probabilities(input: Tensor) -> bool:
    slack = 1e-2 if input.dtype in HALVES else 1e-4
    first = input[:1000].double()
    for rows in (first, input.double() if bool((first <= slack).all()) else input[:0].double()):
        if not bool(((rows <= slack).all(-1) & (rows.logsumexp(-1).abs() <= slack)).all()):
            return False
    return True


def rows_digest(input: Tensor, labels: Tensor) -> int:
    """A sum of 64-bit hashes of the rows with their labels: the same in every order, and additive over parts."""
    return int(_hashes(input, labels).sum(dtype=np.uint64))


def repeated_rows(input: Tensor, labels: Tensor) -> np.ndarray[Any, Any] | None:
    """[N] int64: the number of each row among the distinct rows with their labels, if many rows are copies; else None.

    Many are 5 % of the rows. Equal rows of four decimals or of saturated probabilities are no copies and do not count.
    Nor are the equal outputs of a tree: then rows with equal logits have different labels, or one output is most
    frequent, and the result is None.

    Args:
        input: [N, C] floating point.
        labels: [N] int64.
    """
    n_rows = len(labels)
    least = max(_FEWEST_SHARED, _SHARED * n_rows)
    column = input[:, 0].sort().values
    if n_rows < 2 or int((column[1:] == column[:-1]).sum()) < least:  # copies agree in every column
        return None
    return copies_of(*row_hashes(input, labels))


def copies_of(of_inputs: np.ndarray[Any, Any], of_rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """:func:`repeated_rows` of hashes [N] of the rows without and with their labels."""
    n_rows = len(of_rows)
    least = max(_FEWEST_SHARED, _SHARED * n_rows)
    distinct, number, counts = np.unique(of_rows, return_inverse=True, return_counts=True)
    n_copies = n_rows - len(distinct)
    telling = of_rows[of_rows % 2 == 1]
    if len(telling) - len(np.unique(telling)) < least or counts.max() > 0.1 * n_rows:
        return None
    other_labels = len(distinct) - len(np.unique(of_inputs))
    return None if other_labels > 0.01 * n_copies else number.reshape(-1)


def _hashes(input: Tensor, labels: Tensor) -> np.ndarray[Any, Any]:
    """[N] 64-bit hashes of the rows with their labels."""
    return row_hashes(input, labels)[1]


def row_hashes(input: Tensor, labels: Tensor) -> np.ndarray[Any, Any]:
    """[2, N] 64-bit hashes of the rows without and with their labels, odd for rows that no other equals by chance."""
    odd = np.random.default_rng(0).integers(1 << 62, size=input.shape[1] + 1, dtype=np.uint64) | np.uint64(1)
    parts = []
    size = max(1, _BLOCK // input.shape[1])
    for block, of_block in zip(input.split(size), labels.split(size), strict=True):
        bits = np.ascontiguousarray(block.double().cpu().numpy()).view(np.uint64)
        mixed = bits ^ (bits >> np.uint64(29))
        with np.errstate(over="ignore"):
            of_inputs = (mixed * odd[:-1]).sum(-1, dtype=np.uint64)
            both = np.stack([of_inputs, of_inputs + of_block.cpu().numpy().astype(np.uint64) * odd[-1]])
        both ^= both >> np.uint64(32)
        parts.append(both & ~np.uint64(1) | _identify(block).cpu().numpy().astype(np.uint64))
    return np.concatenate(parts, 1) if parts else np.empty((2, 0), dtype=np.uint64)


def _identify(rows: Tensor) -> Tensor:
    """[N] bool: whether the largest values of a row identify it. They differ, and one has more than four decimals."""
    top = rows.topk(min(8, rows.shape[1])).values.double()
    n_values = (top[:, 1:] != top[:, :-1]).sum(-1) + 1
    scaled = 1e4 * top.where(top.isfinite(), 0.0)
    return (n_values >= min(5, rows.shape[1])) & ((scaled - scaled.round()).abs() > _NEAR).any(-1)
