"""The calibration grid on the kernels of the stable module."""

from functools import cached_property

import torch
from torch import Tensor

from focalkern.fallback._grid_arguments import (
    axis_on_host,
    check_arguments,
    check_has_data,
    kept_rows,
    raise_row_problem,
)
from focalkern.fallback.calibration_grid import count_criteria, grid_shapes, whole_grid

__all__ = ["CalibrationGridRun", "calibration_grid", "grid_shapes"]

_OP = "calibration_grid"
_BINNED, _NLL, _BRIER = 1 | 2, 4, 8  # bits of the criteria
_LIMIT = 2**31 - 257  # of rows and classes: kernels count in int32
_NO_PROBLEM, _ROW_PROBLEMS = 2**63 - 1, 8
_kernels = torch.ops.focalkern_stable


class CalibrationGridRun:
    """As the compiled module's."""

    def __init__(
        self,
        input: Tensor,
        target: Tensor,
        gammas: Tensor,
        temperatures: Tensor,
        n_bins: int,
        criteria: int,
        estimator: int,
        input_is_probs: bool,
        ignore_index: int,
    ) -> None:
        check_arguments(input, target, gammas, temperatures, n_bins, criteria, estimator)
        check_has_data(input)
        gammas = axis_on_host("gammas", gammas, -1.0).contiguous()
        temperatures = axis_on_host("temperatures", temperatures, 0.0).contiguous().to(input.device)
        if max(input.shape) >= _LIMIT:
            raise ValueError(
                f"{_OP}: input must have fewer than 2^31 - 257 rows and classes, got [N, C] = {list(input.shape)}"
            )
        kept = kept_rows(input, target, ignore_index)
        input, target = (input if input.stride(1) == 1 else input.contiguous()), target.contiguous()
        rows = len(input) if kept is None else len(kept)
        top = input.new_empty(rows, dtype=torch.int32)
        correct = input.new_empty(rows, dtype=torch.uint8)
        problem = _kernels.calibration_grid_prepare(input, target, kept, top, correct, input_is_probs)
        if problem != _NO_PROBLEM:
            raise_row_problem(problem % _ROW_PROBLEMS, input, target, problem // _ROW_PROBLEMS)
        self._input, self._criteria, self._is_probs = input, criteria, input_is_probs
        self._cells = [len(gammas), len(temperatures)]
        self._samples = (input, target, kept, top, correct, gammas, temperatures)
        self._options = (n_bins, criteria, estimator, input_is_probs)

    @cached_property
    def _plan(self) -> tuple[Tensor, int, int]:
        """The sums that each gamma takes, temperatures per block, bytes of scratch memory."""
        found: tuple[Tensor, int, int] = _kernels.calibration_grid_plan(*self._samples, *self._options)
        return found

    @cached_property
    def _scratch(self) -> Tensor:
        return self._input.new_empty(self._plan[2], dtype=torch.uint8)

    @property
    def per_block(self) -> int:
        return self._plan[1]

    def run(self, begin: int, end: int) -> Tensor:
        """[n_criteria, n_gammas, end - begin], on the device of the input."""
        n_gammas, n_temperatures = self._cells
        if not 0 <= begin < end <= n_temperatures or end - begin > self.per_block:
            raise ValueError(f"{_OP}: no such block of temperatures: [{begin}, {end})")
        shape = (count_criteria(self._criteria), n_gammas, end - begin)
        tables = self._input.new_empty(shape, dtype=torch.float64)
        memory = (self._plan[0], tables, self._scratch)
        _kernels.calibration_grid_block_out(*self._samples, *memory, *self._options, begin, end)
        return tables

    def add_to(
        self,
        rows: Tensor,
        count: Tensor | None,
        confidence: Tensor | None,
        correct: Tensor | None,
        nll: Tensor | None,
        brier: Tensor | None,
        sketch: bool,
    ) -> None:
        """As the compiled module's, in one call: an interruption leaves no half of the sums updated."""
        if not rows.is_cpu or rows.dtype != torch.int64 or rows.numel() != 1:
            raise ValueError(f"{_OP}: rows must be one int64 on the CPU")
        buckets = [1 if count is None else count.shape[-1]]
        wide, whole = torch.float64, torch.int64
        self._check_sum("count", count, whole, _BINNED, buckets)
        self._check_sum("confidence", confidence, wide, _BINNED, buckets)
        self._check_sum("correct", correct, whole, _BINNED, buckets)
        self._check_sum("nll", nll, wide, _NLL, [])
        self._check_sum("brier", brier, wide, _BRIER, [])
        sums = (rows, count, confidence, correct, nll, brier)
        _kernels.calibration_grid_add_to(*self._samples, *sums, self._criteria, self._is_probs, sketch)

    def _check_sum(self, name: str, sum: Tensor | None, dtype: torch.dtype, criteria: int, buckets: list[int]) -> None:
        if (sum is not None) != bool(self._criteria & criteria):
            raise ValueError(f"{_OP}: {name} must be given where the criteria need it")
        shape = [*self._cells, *buckets]
        fits = sum is None or (list(sum.shape) == shape and sum.dtype == dtype and sum.is_contiguous())
        if not fits or (sum is not None and sum.device != self._input.device):
            raise ValueError(f"{_OP}: {name} must be contiguous {dtype} {shape} on the device of input")
        if sum is not None and buckets == [0]:
            raise ValueError(f"{_OP}: {name} must have a bucket, got {shape}")


def calibration_grid(
    input: Tensor,
    target: Tensor,
    gammas: Tensor,
    temperatures: Tensor,
    n_bins: int,
    criteria: int,
    estimator: int,
    input_is_probs: bool,
    ignore_index: int,
) -> Tensor:
    """The operator of this name: the whole grid."""
    options = (n_bins, criteria, estimator, input_is_probs, ignore_index)
    return whole_grid(CalibrationGridRun(input, target, gammas, temperatures, *options), len(temperatures))
