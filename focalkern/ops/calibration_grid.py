"""Calibration criteria of every (gamma, temperature) of a grid, without storing probabilities."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import as_array, as_tensor, flat_rows
from focalkern._checks import MOST_BINS, ONE_HOT, dense, integer, label, one_of, short, target_misfit
from focalkern._diagnostics import refuse_probs
from focalkern._progress import ProgressBar
from focalkern._types import FLOATS, LABELS, LOGITS, Estimator, InputKind, is_assumed
from focalkern.ops._backend import backend_for, has_kernels

__all__ = ["PAPER_GAMMAS", "PAPER_TEMPERATURES", "CalibrationGrid", "calibration_grid"]

PAPER_GAMMAS: tuple[float, ...] = (-0.5, -0.25, 0.05, 0.25, 0.37, 0.5, 0.75, 1.0, 5.0)
"""The nine gammas that Komisarenko & Kull search (ECAI 2024, section 5)."""

# index / 100 instead of repeated addition, so that 0.35 is exactly the float 0.35.
PAPER_TEMPERATURES: tuple[float, ...] = tuple(index / 100 for index in range(1, 501))
"""The 500 temperatures that Komisarenko & Kull search, 0.01 to 5."""

# The codes of the compiled module.
_CRITERIA = {"ece": 1, "mce": 2, "nll": 4, "brier": 8}
_ESTIMATORS = {"equal_width": 0, "equal_mass": 1, "equal_mass_interp": 2}
_INPUT_KINDS = {"logits": False, "probs": True}

Criterion = Literal["ece", "mce", "nll", "brier"]


@dataclass(frozen=True, eq=False)
class CalibrationGrid:
    """The result of :func:`calibration_grid`.

    Attributes:
        gammas: [Gg] float64, on the device of ``input``, like every tensor of the result. Array inputs give arrays.
        temperatures: [Gt] float64.
        tables: {criterion: [Gg, Gt] float64}, as fractions (``nll`` in nats per sample).
        n_bins: number of bins behind ``ece`` and ``mce``.
        estimator: name of the estimator behind ``ece`` and ``mce``.

    Example:
        >>> logits, target = torch.tensor([[4.0, 0.0]]).repeat(5, 1), torch.tensor([0, 0, 0, 0, 1])
        >>> grid = fk.calibration_grid(logits, target, gammas=[0.0, 0.5], temperatures=[1.0, 2.0, 3.0])
        >>> grid.tables["nll"].shape
        torch.Size([2, 3])
        >>> gamma, temperature, nll = grid.best("nll")
        >>> gamma, temperature, round(nll, 4)
        (0.0, 3.0, 0.5006)
    """

    gammas: Tensor
    temperatures: Tensor
    tables: dict[str, Tensor]
    n_bins: int
    estimator: str

    def best(self, criterion: str) -> tuple[float, float, float]:
        """The cell with the smallest value; of equal cells the first in (gamma index, temperature index) order.

        Args:
            criterion: a key of ``tables``.

        Returns:
            (gamma, temperature, value). A NaN or infinite cell never wins.

        Raises:
            ValueError: ``criterion`` has no table, or no cell of it is finite.
        """
        one_of("CalibrationGrid.best", "criterion", criterion, self.tables)
        table: np.ndarray[Any, Any] = as_array(as_tensor(self.tables[criterion]))
        finite = np.isfinite(table)
        if not finite.any():
            raise ValueError(f"CalibrationGrid.best: {criterion} must be finite in some cell, got none")
        i, j = np.unravel_index(np.where(finite, table, np.inf).argmin(), table.shape)
        return float(self.gammas[i]), float(self.temperatures[j]), float(table[i, j])


def calibration_grid(
    input: Tensor | np.ndarray[Any, Any],
    target: Tensor | np.ndarray[Any, Any],
    gammas: Sequence[float] | np.ndarray[Any, Any] | Tensor,
    temperatures: Sequence[float] | np.ndarray[Any, Any] | Tensor,
    *,
    n_bins: int = 15,
    criteria: Sequence[Criterion] = ("ece", "nll"),
    estimator: Estimator = "equal_mass",
    input_kind: InputKind = LOGITS,
    ignore_index: int = -100,
) -> CalibrationGrid:
    r"""Calibration criteria of focal temperature scaling at every (gamma, T).

    With q = softmax(z / T), u = 1 - q and phi = -q log q / u, a cell is measured on

    .. math::
        \hat p_j \propto q_j / G(q_j), \qquad G(q) = u^\gamma (1 + \gamma\phi)

    Confidence is the probability of the class with the largest input (the first one of equals), and it is correct when
    that class is the target:

    * ``ece`` = sum over the bins of \|B\|/N \|acc - conf\|, ``mce`` = the largest \|acc - conf\| of a bin that is not
      empty; both over the bins of ``estimator``. Under ``equal_mass`` ties make ``mce`` depend on the order of rows.
    * ``nll`` = mean of -log p_target. It is infinite where a target has probability zero.
    * ``brier`` = mean of sum over the classes of (p_k - [k = target])^2.

    A negative gamma is used in the same formula; it is not the inverse focal loss. gamma = 0
    is plain temperature scaling. Both are the post-hoc map of :func:`focal_calibration_map`. The probabilities of a
    cell are never stored. The kernels give the same bits on every run, and on the CPU for every number of threads.

    A progress bar appears after two seconds if stderr is a terminal and tqdm is installed.

    Args:
        input: [N, C] or [N, C, d1, ...] logits or probabilities, C >= 2, float16, bfloat16, float32 or float64. Half
            precision is computed in float32. A tensor, or an array with an array as target. A logit of -inf, or a
            probability of 0, is a class that cannot occur. Probability rows must sum to 1 within 1e-3, and are
            renormalised.
        target: [N] or [N, d1, ...] labels, int64, int32 or uint8.
        gammas: [Gg] numbers, finite and greater than -1.
        temperatures: [Gt] numbers, finite and greater than 0.
        n_bins: M >= 1.
        criteria: from ``"ece"``, ``"mce"``, ``"nll"`` and ``"brier"``; the Brier score takes several times longer than
            the others.
        estimator: bins of ``ece`` and ``mce``. ``"equal_width"``: (k/M, (k+1)/M], k/M rounded to the dtype of the
            confidence, and 0 in the first bin. ``"equal_mass"``: the confidences in ascending order, ties by row,
            split as by numpy.array_split. ``"equal_mass_interp"``: edges interp(linspace(0, N, M + 1), arange(N),
            sorted), bins (lo, hi]; the lowest sample falls in no bin, as in the published code of adaptive ECE.
        input_kind: ``"logits"`` or ``"probs"``, the content of ``input``. Without it, rows that look like
            probabilities are an error (not in a compiled graph).
        ignore_index: label of ignored rows.

    Returns:
        A :class:`CalibrationGrid` with its tables in the order of ``criteria``. Arrays as input give arrays.

    Raises:
        TypeError: dtype or kind of an argument.
        ValueError: shape, value, option or device of an argument; no row left; NaN, +inf, negative probabilities, a
            row without a possible class, or a probability row that does not sum to 1, naming the first such row.
        IndexError: a label outside [0, C) that is not ``ignore_index``, naming the first such row.
        NotImplementedError: a device without a kernel.

    Source: Komisarenko & Kull, ECAI 2024 (arXiv 2408.11598), section 5; estimators of Guo et al. 2017 (arXiv
    1706.04599) and Mukhoti et al. 2020 (arXiv 2002.09437).

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]]).repeat(10, 1)  # class 0 with probability 0.98 in every row,
        >>> target = torch.tensor([0] * 8 + [1] * 2)  # correct in 8 of 10 rows
        >>> grid = fk.calibration_grid(logits, target, gammas=[0.0, 1.0], temperatures=[1.0, 3.0])
        >>> grid.tables["ece"].round(decimals=4)
        tensor([[0.2108, 0.3252],
                [0.2004, 0.2510]], dtype=torch.float64)
        >>> gamma, temperature, nll = grid.best("nll")
        >>> gamma, temperature, round(nll, 4)
        (0.0, 3.0, 0.5006)
    """
    if not isinstance(input, Tensor) and not isinstance(target, Tensor):
        of_tensors = calibration_grid(
            as_tensor(input, "calibration_grid: input"),
            as_tensor(target, "calibration_grid: target"),
            gammas,
            temperatures,
            n_bins=n_bins,
            criteria=criteria,
            estimator=estimator,
            input_kind=input_kind,
            ignore_index=ignore_index,
        )
        arrays: CalibrationGrid = as_array(of_tensors)
        return arrays
    for name, value in (("input", input), ("target", target)):
        _check_tensor(name, value)
    assert isinstance(input, Tensor) and isinstance(target, Tensor)
    names = _criteria(criteria)
    _check_option("estimator", estimator, _ESTIMATORS)
    _check_option("input_kind", input_kind, _INPUT_KINDS)
    n_bins = integer("calibration_grid", "n_bins", n_bins, 1, MOST_BINS)
    ignore_index = label("calibration_grid", "ignore_index", ignore_index)
    input, target = pixels_as_rows(input.detach(), target.detach())
    if is_assumed(input_kind) and not torch.compiler.is_compiling():
        refuse_rows_of_probs(input, "input")
    gamma_axis, temperature_axis = _axis("gammas", gammas), _axis("temperatures", temperatures)
    # Tables come in the order of their codes.
    present = sorted(names, key=_CRITERIA.__getitem__)
    options = (n_bins, sum(_CRITERIA[name] for name in names), _ESTIMATORS[estimator])
    kind = (_INPUT_KINDS[input_kind], ignore_index)
    if torch.compiler.is_compiling():
        function = torch.ops.focalkern.calibration_grid if has_kernels(input) else backend_for(input).calibration_grid
        tables = function(input, target, gamma_axis, temperature_axis, *options, *kind)
    else:
        run = backend_for(input).CalibrationGridRun(input, target, gamma_axis, temperature_axis, *options, *kind)
        n_temperatures = len(temperature_axis)
        blocks = [
            (begin, min(begin + run.per_block, n_temperatures)) for begin in range(0, n_temperatures, run.per_block)
        ]
        tables = torch.cat([run.run(*block) for block in _with_progress(blocks, len(gamma_axis))], dim=2)
    by_name = dict(zip(present, tables.unbind(0), strict=True))
    return CalibrationGrid(
        gammas=gamma_axis.to(tables.device),
        temperatures=temperature_axis.to(tables.device),
        tables={name: by_name[name] for name in names},
        n_bins=n_bins,
        estimator=estimator,
    )


def refuse_rows_of_probs(input: Tensor, name: str) -> None:
    """Raises for rows that look like probabilities; the backend refuses any other input than floating-point rows."""
    if input.dim() == 2 and input.dtype in FLOATS and not input.is_meta:
        refuse_probs("calibration_grid", input, name)


def pixels_as_rows(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """[N, C, d1, ...] and [N, d1, ...] as rows. Raises for labels that do not fit; the backend checks the input."""
    if input.dim() < 2 or input.shape[1] < 2:
        return input, target
    if target.dtype not in LABELS:
        remedy = ONE_HOT if target.shape == input.shape else "pass target.long(), in NumPy target.astype(int)"
        raise TypeError(f"calibration_grid: target must be int64, int32 or uint8, got {target.dtype}; {remedy}")
    misfit = target_misfit("calibration_grid", input, target, labels_only=True)
    if misfit is not None:
        raise misfit
    return flat_rows(input), target.reshape(-1)


def _with_progress(blocks: list[tuple[int, int]], n_gammas: int) -> Iterator[tuple[int, int]]:
    """The blocks [begin, end), with a progress bar that counts cells if there is more than one block."""
    total = n_gammas * (blocks[-1][1] if blocks else 0)
    with ProgressBar(total, "calibration grid", "cell", None if len(blocks) > 1 else False) as bar:
        for begin, end in blocks:
            yield begin, end
            bar.update(n_gammas * (end - begin))


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"calibration_grid: {name} must be a tensor, got {type(value).__name__}")
    dense("calibration_grid", name, value)


def _check_option(name: str, value: object, options: dict[str, Any]) -> None:
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"calibration_grid: {name} must be one of {', '.join(options)}, got {short(value)}")


def _criteria(criteria: Sequence[str]) -> tuple[Criterion, ...]:
    try:
        names = (criteria,) if isinstance(criteria, str) else tuple(criteria)
    except Exception:  # not iterable, or its class raises something else
        raise TypeError(f"calibration_grid: criteria must be a sequence of names, got {short(criteria)}") from None
    if not names:
        raise ValueError(f"calibration_grid: criteria must name at least one of {', '.join(_CRITERIA)}, got none")
    for name in names:
        _check_option("criteria", name, _CRITERIA)
    return cast(tuple[Criterion, ...], tuple(dict.fromkeys(names)))


def _axis(name: str, values: Sequence[float] | np.ndarray[Any, Any] | Tensor) -> Tensor:
    """[n] float64 on the CPU; the compiled module checks the numbers."""
    if isinstance(values, Tensor):
        axis = dense("calibration_grid", name, values.detach())
        if axis.device.type == "meta":
            raise ValueError(f"calibration_grid: {name} must have values, got {short(axis)} on the device meta")
    else:
        try:
            axis = torch.as_tensor(values, dtype=torch.float64, device="cpu")
        except Exception:  # text, gaps, numbers beyond float64, or its class raises something else
            raise TypeError(
                f"calibration_grid: {name} must be a sequence of numbers or a tensor, got {type(values).__name__}"
            ) from None
    if axis.dtype == torch.bool or axis.is_complex():
        raise TypeError(f"calibration_grid: {name} must hold real numbers, got {axis.dtype}")
    if axis.ndim != 1:
        raise ValueError(f"calibration_grid: {name} must be one-dimensional, got shape {list(axis.shape)}")
    return axis.to(torch.device("cpu"), torch.float64)
