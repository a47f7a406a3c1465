"""Sums over the classes of each row, and statistics of rows, on the kernels of the stable module."""

import torch
from torch import Tensor

from focalkern._types import LABELS
from focalkern.fallback._checks import check_floating
from focalkern.stable.row_loss import empty_statistics

__all__ = ["row_statistics", "row_sums"]


def _checked(op: str, input: Tensor) -> Tensor:
    check_floating(op, "input", input)
    if input.dim() != 2 or input.shape[1] < 1:
        raise ValueError(f"{op}: input must be [N, C] with C >= 1, got {list(input.shape)}")
    return input.detach().contiguous()


def row_sums(input: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`focalkern.fallback.row_sums`, on the CPU."""
    if not input.is_cpu:
        raise ValueError(f"row_sums: input must be on the CPU, got {input.device}")
    rows = _checked("row_sums", input)
    sums = rows.new_empty(3, len(rows), dtype=torch.float64)
    index = rows.new_empty(len(rows), dtype=torch.int64)
    torch.ops.focalkern_stable.row_sums_out(rows, sums, index)
    return sums, index


def row_statistics(input: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, ...]:
    """As :func:`focalkern.fallback.row_statistics`, on the CPU and CUDA."""
    rows = _checked("row_statistics", input)
    n = len(rows)
    if target.device != input.device or target.dtype not in LABELS or target.shape != (n,):
        raise ValueError(
            f"row_statistics: target must be int64, int32 or uint8 labels [N] = [{n}] on {input.device}, got "
            f"{target.dtype} {list(target.shape)} on {target.device}"
        )
    results = empty_statistics(rows, n)
    torch.ops.focalkern_stable.row_statistics_out(rows, target.contiguous(), ignore_index, *results)
    return results
