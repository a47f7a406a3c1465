"""Arguments of the calibration grid: checks, in the words of the compiled module, and the rows that count."""

from typing import NoReturn

import torch
from torch import Tensor

from focalkern._types import LABELS, compute_dtype
from focalkern.fallback._checks import (
    check_dense,
    check_floating,
    check_same_device,
    sum_tolerance,
)

__all__ = ["axis_on_host", "check_arguments", "check_has_data", "checked_rows", "kept_rows", "raise_row_problem"]

_OP = "calibration_grid"


def check_arguments(
    input: Tensor,
    target: Tensor,
    gammas: Tensor,
    temperatures: Tensor,
    n_bins: int,
    criteria: int,
    estimator: int,
) -> None:
    """Dtypes, shapes and options, for real and for fake tensors."""
    check_floating(_OP, "input", input)
    if input.dim() != 2:
        raise ValueError(f"{_OP}: input must be [N, C], got {list(input.shape)}")
    if input.shape[1] < 2:
        raise ValueError(f"{_OP}: input must have at least two classes, got [N, C] = {list(input.shape)}")
    if target.dtype not in LABELS:
        raise TypeError(f"{_OP}: target must be int64, int32 or uint8, got {target.dtype}")
    if target.dim() != 1 or target.shape[0] != input.shape[0]:
        raise ValueError(f"{_OP}: target must be [N] = [{input.shape[0]}], got {list(target.shape)}")
    check_same_device(_OP, "target", target, input)
    for name, axis in (("gammas", gammas), ("temperatures", temperatures)):
        if axis.dtype != torch.float64:
            raise TypeError(f"{_OP}: {name} must be float64, got {axis.dtype}")
        if axis.dim() != 1 or axis.shape[0] < 1:
            raise ValueError(f"{_OP}: {name} must be one-dimensional and not empty, got shape {list(axis.shape)}")
    if n_bins < 1:
        raise ValueError(f"{_OP}: n_bins must be at least 1, got {n_bins}")
    if not 0 < criteria < 16:
        raise ValueError(f"{_OP}: criteria must name at least one table, got {criteria}")
    if not 0 <= estimator <= 2:
        raise ValueError(f"{_OP}: estimator must be 0, 1 or 2, got {estimator}")
    check_dense(_OP, input)


def check_has_data(input: Tensor) -> None:
    if input.device.type == "meta":
        raise ValueError(f"{_OP}: input must hold data, got a meta tensor")


def axis_on_host(name: str, axis: Tensor, above: float) -> Tensor:
    """The axis, [n] float64 on the CPU; raises for invalid values."""
    axis = axis.cpu()
    bad = (~(axis.isfinite() & (axis > above))).nonzero()
    if len(bad):
        i = int(bad[0])
        raise ValueError(
            f"{_OP}: {name} must be finite and greater than {above:g}, got {float(axis[i]):g} at index {i}"
        )
    return axis


def kept_rows(input: Tensor, target: Tensor, ignore_index: int) -> Tensor | None:
    """The indices of the rows that count; None for all of them."""
    if len(input) == 0:
        raise ValueError(f"{_OP}: input must have at least one row, got [N, C] = {list(input.shape)}")
    valid = target.long() != ignore_index
    if bool(valid.all()):
        return None
    rows = valid.nonzero().squeeze(1)
    if len(rows) == 0:
        raise ValueError(f"{_OP}: target must have at least one label other than ignore_index = {ignore_index}")
    return rows


def checked_rows(input: Tensor, target: Tensor, is_probs: bool, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The rows that are not ignored, and their labels; raises for the first invalid row."""
    rows = kept_rows(input, target, ignore_index)
    kept, labels = (input, target.long()) if rows is None else (input[rows], target.long()[rows])
    largest = kept.amax(-1)
    problems = [kept.isnan().any(-1), (kept == torch.inf).any(-1), largest == (0 if is_probs else -torch.inf)]
    if is_probs:
        total = kept.to(compute_dtype(kept.dtype)).sum(-1, dtype=torch.float64)
        problems += [(kept < 0).any(-1), (total - 1).abs() > sum_tolerance(kept.dtype)]
    else:
        problems += [torch.zeros_like(problems[0])] * 2
    bad = torch.stack([*problems, (labels < 0) | (labels >= kept.shape[1])])
    first = bad.any(0).nonzero()
    if len(first):
        row = int(first[0])
        raise_row_problem(bad[:, row].tolist().index(True), input, target, row if rows is None else int(rows[row]))
    return kept, labels


# In the order of the compiled module's codes; the last one is an IndexError.
_ROW_PROBLEMS = (
    "input must not contain NaN, got one in row {row}",
    "input must not contain +inf, got one in row {row}",
    "input must give some class a positive probability, got none in row {row}",
    "input must not contain negative probabilities, got one in row {row}",
    "input must have rows that sum to 1 within {tolerance:g}, got {total:g} in row {row}",
    "target must be in [0, {n_classes}) or ignore_index, got {label} at row {row}",
)


def raise_row_problem(problem: int, input: Tensor, target: Tensor, row: int) -> NoReturn:
    message = _ROW_PROBLEMS[problem].format(
        row=row,
        tolerance=sum_tolerance(input.dtype),
        total=float(input[row].double().sum()),
        n_classes=input.shape[1],
        label=int(target[row]),
    )
    raise (IndexError if problem == len(_ROW_PROBLEMS) - 1 else ValueError)(f"{_OP}: {message}")
