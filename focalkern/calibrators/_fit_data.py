"""The arguments of ``fit`` as rows: [N, C] of logits or probabilities, labels and weights."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import as_tensor, flat_rows, refuse_masked
from focalkern._checks import ONE_HOT, count_rows, label, label_range, not_floating, one_image, parsed_float, short
from focalkern._columns import ClassColumns, other_order
from focalkern._diagnostics import may_be_logits, remedy_for_sum
from focalkern.calibrators._inputs import renormalized
from focalkern.fallback._checks import sum_tolerance

__all__ = [
    "FitData",
    "as_binary",
    "as_floating",
    "as_rows",
    "as_weight",
    "check_input",
    "check_scored",
    "check_values",
    "classes_misfit",
    "labels_like_fit",
    "no_rows",
    "weighted_mean",
]

# Bounds of a sum of weights. Within them, shares, their squares and 1 / (N + 1) neither overflow nor underflow.
_MOST_WEIGHT = 1e100

# Labels that other libraries and data sets give to rows without a label.
_IGNORED = (-100, -1, 255)


@dataclass(frozen=True)
class FitData:
    """Checked rows of a fit, without ignored rows and rows of weight 0.

    Attributes:
        input: [N, C], N >= 1; probabilities of half precision as float32, renormalized.
        target: [N] int64 in [0, C).
        weight: [N] float64 > 0; None if every row has weight 1.
        names: [C] names of the classes; None if the labels are numbers.
        one_logit: whether the user passed one logit per row.
        dense: whether the user passed [N, C, d1, ...].
    """

    input: Tensor
    target: Tensor
    weight: Tensor | None
    names: np.ndarray[Any, Any] | None = None
    one_logit: bool = False
    dense: bool = False


def as_rows(
    name: str,
    input: Tensor,
    target: Any,
    sample_weight: Any,
    ignore_index: int | None,
    *,
    input_kind: str,
    one_logit: bool,
    columns: ClassColumns | None = None,
    empty: bool = False,
) -> FitData:
    """Rows of :meth:`Calibrator.fit`; ``name`` is the calibrator's, ``input`` [N, C] or [N, C, d1, ...].

    ``columns`` are those of a frame; ``empty`` permits 0 rows, for batches.
    """
    check_input(name, input, any_rank=input.dim() > 2, class_axis=1 if input.dim() > 2 else -1)
    n_classes = input.shape[1]
    expected = (input.shape[0], *input.shape[2:])
    labels, names = _as_target(name, target, expected, n_classes, one_logit, columns)
    labels = labels.to(input.device)
    weight = None if sample_weight is None else as_weight(name, sample_weight, expected).to(input.device)
    dense = input.dim() > 2
    if dense:
        input, labels = flat_rows(input), labels.reshape(-1)
        weight = None if weight is None else weight.reshape(-1)
    if ignore_index is not None:
        ignore_index = label(name, "ignore_index", ignore_index, " or None")

    counts = None if ignore_index is None else labels != ignore_index
    try:
        label_range(name, labels, n_classes, ignore_index)
    except IndexError as error:
        raise IndexError(f"{error}{_ignore_remedy(labels, n_classes, ignore_index)}") from None
    if weight is not None:
        counts = weight > 0 if counts is None else counts & (weight > 0)
    check_values(name, input, input_kind, counts)
    if counts is not None and not bool(counts.all()):
        input, labels = input[counts], labels[counts]
        weight = None if weight is None else weight[counts]
    if len(input) == 0 and not empty:
        raise no_rows(name, math.prod(expected), sample_weight is not None, ignore_index is not None)
    if input_kind == "probs":
        input = renormalized(input)
    if weight is not None and bool((weight == 1).all()):
        weight = None
    return FitData(input, labels, weight, names, one_logit, dense)


def _ignore_remedy(labels: Tensor, n_classes: int, ignore_index: int | None) -> str:
    """The remedy for labels that are outside of the classes because they mark rows without a label."""
    outside = labels[(labels < 0) | (labels >= n_classes)]
    value = int(outside[0])
    if ignore_index is not None or value not in _IGNORED or not bool((outside == value).all()):
        return ""
    return f"; to leave such rows out, pass ignore_index={value}"


def no_rows(name: str, n_rows: int, weighted: bool, ignoring: bool) -> ValueError:
    """The error of a fit to ``n_rows`` rows of which none counts."""
    causes = ["of weight 0"] * weighted + ["whose label is ignore_index"] * ignoring
    found = f"{count_rows(n_rows)} {' or '.join(causes)}" if n_rows else "none"
    return ValueError(f"{name}: fit needs at least one row that counts, got {found}")


def check_input(name: str, input: Tensor, *, any_rank: bool = False, class_axis: int = -1) -> None:
    as_floating(name, input)
    if input.dim() < 1 or (not any_rank and input.dim() != 2):
        raise ValueError(
            f"{name}: logits must be [N, C], [N, C, d1, ...], or [N] for one logit per row, got shape "
            f"{list(input.shape)}"
        )
    if input.shape[class_axis] < 2:
        hint = "; one logit per row is [N]" if input.shape[class_axis] == 1 else ""
        raise ValueError(f"{name}: logits must have at least 2 classes, got shape {list(input.shape)}{hint}")


def check_values(name: str, input: Tensor, input_kind: str, counts: Tensor | None = None) -> None:
    """Raise for the first row that is not a distribution. All calibrators use this rule in ``fit`` and ``predict``.

    Args:
        name: name of the calibrator.
        input: [..., C] of ``input_kind``.
        counts: [...] bool, the rows to check; None checks all.

    Raises:
        ValueError: a row with NaN or +inf, or without a class that can occur; for probabilities also a negative number
            or a sum other than 1. The error names the row, its index into the flattened leading dimensions.
    """
    rows = input.detach()
    if rows.numel() == 0:
        return
    if input_kind == "probs":
        tolerance, least = sum_tolerance(rows.dtype), rows.amin(-1)
        total = rows.sum(-1, dtype=torch.float32 if rows.dtype != torch.float64 else None)
        low, high = map(float, total.aminmax())
        if max(1 - low, high - 1) <= tolerance and float(least.amin()) >= 0:
            return
        good = ((total - 1).abs() <= tolerance) & (least >= 0)
    else:
        top = rows.amax(-1)  # the maximum of a row with NaN is NaN
        if math.isfinite(top.sum()):
            return
        good = top.abs() < math.inf
    bad = (~good if counts is None else ~good & counts).reshape(-1).nonzero()
    if len(bad) == 0:
        return
    row = int(bad[0])
    values = rows.reshape(-1, rows.shape[-1])[row].cpu().double()
    other_kind = "; pass input_kind='logits' if these are logits" if may_be_logits(rows) else ""
    for column, value in enumerate(values.tolist()):
        where = f"at row {row}, class {column}"
        if math.isnan(value):
            raise ValueError(f"{name}: logits must not be NaN, got NaN {where}")
        if value == math.inf:
            raise ValueError(f"{name}: logits must not be +inf, got inf {where}")
        if input_kind == "probs" and value < 0:
            raise ValueError(f"{name}: logits must be probabilities, got {value:g} {where}{other_kind}")
    if input_kind == "probs":
        raise ValueError(
            f"{name}: logits must be probabilities that sum to 1 within {sum_tolerance(rows.dtype):g}, got a sum of "
            f"{float(values.sum()):g} at row {row}{other_kind}{remedy_for_sum(values)}"
        )
    raise ValueError(f"{name}: logits must have a logit above -inf in every row, got none at row {row}")


def classes_misfit(
    name: str, shape: tuple[int, ...], n_classes: int, dense: bool, argument: str = "logits"
) -> ValueError:
    """The error of logits without the classes of fit in their place, with the remedy if one dimension may have them."""
    pixels = dense and len(shape) > 2
    expected = f"the {n_classes} classes of fit{' in dimension 1' if pixels else ''}"
    remedy = ""
    if shape.count(n_classes) == 1:
        place = shape.index(n_classes)
        remedy = f"; move dimension {place} to {'dimension 1' if pixels else 'the end'}"
        remedy = f"; {one_image(argument)}" if pixels and place == 0 else remedy
    return ValueError(f"{name}: {argument} must have {expected}, got shape {list(shape)}{remedy}")


def as_floating(name: str, input: Tensor) -> Tensor:
    if not input.is_floating_point():
        raise TypeError(f"{name}: logits must be floating point, got {not_floating(input.dtype)}")
    return input


def _as_target(
    name: str,
    values: Any,
    expected: tuple[int, ...],
    n_classes: int,
    one_logit: bool,
    columns: ClassColumns | None = None,
) -> tuple[Tensor, np.ndarray[Any, Any] | None]:
    """Labels of shape ``expected``, int64, and the names of the classes."""
    names = None
    array = None if isinstance(values, Tensor) else _labels_array(name, values)
    if array is not None and _are_strings(name, array):
        names, array = _named_labels(name, array.astype(str), n_classes, columns)
    elif array is not None and array.dtype.kind == "O":
        array = np.array(array.tolist())
    target = as_tensor(values if array is None else array, f"{name}: target")
    if tuple(target.shape) != expected:
        letters = ", ".join(["N", *(f"d{i}" for i in range(1, len(expected)))])
        remedy = _misfit_remedy(tuple(target.shape), expected, n_classes, one_logit)
        raise ValueError(f"{name}: target must be [{letters}] = {list(expected)}, got {list(target.shape)}{remedy}")
    if target.is_complex():
        raise TypeError(f"{name}: target must be integer class indices, got {target.dtype}")
    if target.is_floating_point():
        # The comparison is false for NaN and infinity, so they raise too.
        odd = ~(target == target.round()) | ~target.isfinite()
        if bool(odd.any()):
            value = target[odd][0].item()
            raise ValueError(f"{name}: target must be whole numbers where it is {target.dtype}, got {value}")
    return target.to(torch.int64), names


def _are_strings(name: str, labels: np.ndarray[Any, Any]) -> bool:
    """Whether labels are strings; raises TypeError if they are neither strings nor numbers."""
    if labels.dtype.kind not in "USO":
        return False
    kinds = {type(value) for value in labels.flat}
    if all(issubclass(kind, str) for kind in kinds):
        return True
    if not all(issubclass(kind, int | float | np.integer | np.floating | np.bool_) for kind in kinds):
        found = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"{name}: target must be integer class indices or strings, got {found}")
    return False


def _named_labels(
    name: str, labels: np.ndarray[Any, Any], n_classes: int, columns: ClassColumns | None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Names of the classes [C], and the labels as class indices."""
    names, index = np.unique(labels, return_inverse=True)
    of_columns = None if columns is None else columns.names_of_labels(names.tolist())
    if of_columns is not None:
        places = np.array([of_columns.index(one) for one in names.tolist()], dtype=np.int64)
        return np.array(of_columns), places[index]
    if len(names) != n_classes:
        raise ValueError(
            f"{name}: target must name each of the {n_classes} classes of the logits, got {len(names)} "
            "names; integers 0 to C - 1 may leave classes out"
        )
    misfit = "" if columns is None else other_order(columns, names.tolist())
    if misfit:
        raise ValueError(f"{name}: target must name columns of the logits, got labels {misfit}")
    _check_order(name, names)
    return names, index


def _misfit_remedy(found: tuple[int, ...], expected: tuple[int, ...], n_classes: int, one_logit: bool) -> str:
    """The remedy for a target of another shape, for the end of an error; empty if none is likely."""
    if found == (expected[0], n_classes, *expected[1:]):
        return f"; {ONE_HOT}"
    if found == (*expected, 1):
        return "; pass target.squeeze(-1)"
    if len(expected) > 1 and found == (expected[0], 1, *expected[1:]):
        return "; pass target.squeeze(1)"
    if len(expected) > 1 and found == (*expected[:1], n_classes, *expected[1:-1]):
        return "; classes must be dimension 1 of logits, not the last"
    if len(expected) > 1 and found == (n_classes, *expected[1:]):
        return f"; {one_image('logits', 'target')}"
    transposed = found == (n_classes,) and len(expected) == 1 and not one_logit
    return "; logits must be [N, C]: pass logits.T" if transposed else ""


def _check_order(name: str, names: np.ndarray[Any, Any]) -> None:
    """Raises if the names are numbers whose alphabetical order, scikit-learn's order of columns, is not their own."""
    try:
        numbers = [parsed_float(one) for one in names.tolist()]
    except ValueError:
        return
    if numbers != sorted(numbers):
        shown = ", ".join(map(repr, names[:4].tolist()))
        raise ValueError(
            f"{name}: target must be integers or names, got text of numbers, whose alphabetical order is {shown}, ...; "
            "pass target.astype(int) if column k of the logits is class k"
        )


def labels_like_fit(name: str, values: Any, names: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """Labels to compare with predictions, as an array: strings if the classes have ``names``, else numbers."""
    labels = _labels_array(name, values)
    if labels.size and _are_strings(name, labels) != (names is not None):
        if names is None:
            expected = "numbers, as the labels of fit, got strings; pass the index of each class"
        else:
            expected = f"strings, as the labels of fit, got {labels.dtype}; pass classes_[target] for class indices"
        raise ValueError(f"{name}: target must be {expected}")
    return labels


def _labels_array(name: str, values: Any) -> np.ndarray[Any, Any]:
    """Labels, numbers or strings, as an array."""
    if isinstance(values, Tensor):
        labels = as_tensor(values, f"{name}: target").cpu()
        return (labels.double() if labels.is_floating_point() else labels).numpy()
    refuse_masked(values, f"{name}: target")
    try:
        return np.asarray(values)
    except Exception as error:  # rows of different lengths, or its class raises something else
        raise TypeError(f"{name}: target must be a tensor or an array of labels, got {short(values)}") from error


def check_scored(name: str, labels: np.ndarray[Any, Any], n_classes: int, sample_weight: Any) -> None:
    """Raises for a number of positive weight that is no class, such as that of ignored pixels; names pass."""
    if labels.dtype.kind not in "biuf":
        return
    outside = ~((labels >= 0) & (labels < n_classes))
    if outside.any() and sample_weight is not None:
        outside &= as_weight(name, sample_weight, tuple(labels.shape)).cpu().numpy() > 0
    if outside.any():
        row = int(outside.ravel().argmax())
        found = f"{labels.ravel()[row]:g}"
        raise IndexError(
            f"{name}: target must be in [0, {n_classes}), got {found} at row {row}; to leave such rows out, pass "
            f"sample_weight=target != {found}"
        )


def weighted_mean(name: str, right: np.ndarray[Any, Any], sample_weight: Any) -> float:
    """The weighted fraction of rows that are correct."""
    if sample_weight is None:
        return float(np.mean(right))
    weight = as_weight(name, sample_weight, tuple(right.shape)).cpu().numpy()
    if not weight.sum() > 0:
        raise ValueError(f"{name}: sample_weight must have a positive sum, got {weight.sum()}")
    return float(np.average(right, weights=weight))


def as_binary(name: str, target: Any, input: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Independent labels [N, L], int64, and which of them are not ignored, both on the device of ``input`` [N, L]."""
    labels = as_tensor(target, f"{name}: target")
    if ignore_index is not None:
        ignore_index = label(name, "ignore_index", ignore_index, " or None")
    if labels.shape != input.shape:
        remedy = "; for one class per row use another calibrator" if labels.dim() == 1 else ""
        raise ValueError(f"{name}: target must be [N, L] = {list(input.shape)}, got {list(labels.shape)}{remedy}")
    # The comparisons are false for NaN, so NaN raises too.
    good = (labels == 0) | (labels == 1)
    known = torch.ones_like(good) if ignore_index is None else labels != ignore_index
    good |= ~known
    if not bool(good.all()):
        place = (~good).nonzero()[0].tolist()
        found = labels[tuple(place)].item()
        raise ValueError(f"{name}: target must be 0 or 1, got {found} at row {place[0]}, label {place[-1]}")
    return labels.to(input.device, torch.int64), known.to(input.device)


def as_weight(name: str, values: Any, expected: tuple[int, ...]) -> Tensor:
    weight = as_tensor(values, f"{name}: sample_weight")
    if weight.is_complex():
        raise TypeError(f"{name}: sample_weight must be real, got {weight.dtype}")
    weight = weight.to(torch.float64)
    if tuple(weight.shape) == expected[:1]:
        weight = weight.reshape(-1, *[1] * (len(expected) - 1)).expand(expected)
    if tuple(weight.shape) != expected:
        raise ValueError(f"{name}: sample_weight must be {list(expected)}, got {list(weight.shape)}")
    bad = ~((weight >= 0) & weight.isfinite())
    if bool(bad.any()):
        raise ValueError(f"{name}: sample_weight must be at least 0 and finite, got {weight[bad][0].item()}")
    total = float(weight.sum())
    if total > 0 and not 1 / _MOST_WEIGHT <= total <= _MOST_WEIGHT:
        raise ValueError(
            f"{name}: sample_weight must have a sum between {1 / _MOST_WEIGHT:g} and {_MOST_WEIGHT:g}, got {total:g}; "
            "a weight says how often its row counts: divide the weights by their mean"
        )
    return weight
