"""Sums over the classes of each row: one read of the logits for log-sum-exp, entropy and largest class.

On the CPU kernels compute them, on CUDA a kernel computes the statistics. The rest are torch operations.
"""

import math
from typing import Any

import torch
from torch import Tensor

from focalkern._devices import has_float64
from focalkern._tracing import are_seen
from focalkern._types import PLAIN_TENSORS, compute_dtype
from focalkern.ops._backend import backend_for, fallback
from focalkern.ops._linear_chunks import is_plain

__all__ = ["Statistics", "row_statistics", "row_sums", "statistics_of_input"]

Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def row_sums(input: Tensor) -> tuple[Tensor, Tensor]:
    """The sums [3, N] and classes [N] of :func:`focalkern.fallback.row_sums`, for any number of classes."""
    if is_plain(input) and not are_seen():
        return _sums(input)
    found: tuple[Tensor, Tensor] = torch.ops.focalkern.row_sums(input)
    return found


def row_statistics(input: Tensor, target: Tensor, ignore_index: int) -> Statistics:
    """As :func:`focalkern.fallback.row_statistics`."""
    if type(input) in PLAIN_TENSORS and not are_seen():
        return _statistics(input, target, ignore_index)
    found: Statistics = torch.ops.focalkern.row_statistics(input, target, ignore_index)
    return found


def statistics_of_input(input: Tensor, target: Tensor, ignore_index: int) -> Statistics:
    """:func:`row_statistics` of logits [C], [N, C] or [N, C, ...]. For class probabilities only lse and entropy."""
    z = input.movedim(min(input.dim() - 1, 1), -1)
    rows = z.reshape(math.prod(z.shape[:-1]), z.shape[-1])  # numel() would make a dynamic size a constant
    if target.is_floating_point():
        return row_statistics(rows, rows.new_zeros(rows.shape[0], dtype=torch.int64), -100)
    return row_statistics(rows, target.reshape(-1), ignore_index)


def _sums(input: Tensor) -> tuple[Tensor, Tensor]:
    if input.shape[1] == 0:
        sums, index = _empty_sums(input)
        sums[0] = -torch.inf
        sums[1:] = 0.0
        return sums, index.zero_()
    backend: Any = backend_for(input) if input.is_cpu else fallback
    found: tuple[Tensor, Tensor] = backend.row_sums(input)
    return found


def _statistics(
    input: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    backend: Any = backend_for(input) if input.is_cpu or input.is_cuda else fallback
    found: Statistics = backend.row_statistics(input, target, ignore_index)
    return found


def _empty_sums(input: Tensor) -> tuple[Tensor, Tensor]:
    real = torch.float64 if has_float64(input.device) else torch.float32
    rows = input.shape[0]
    return input.new_empty(3, rows, dtype=real), input.new_empty(rows, dtype=torch.int64)


def _empty_statistics(input: Tensor, target: Tensor, ignore_index: int) -> Statistics:
    def make(dtype: torch.dtype) -> Tensor:
        return input.new_empty(input.shape[0], dtype=dtype)

    real = compute_dtype(input.dtype)
    return make(real), make(real), make(real), make(torch.int64), make(torch.bool), make(torch.bool)


# A compiled graph holds the operators, which it does not trace.
torch.library.custom_op("focalkern::row_sums", _sums, mutates_args=()).register_fake(_empty_sums)
torch.library.custom_op("focalkern::row_statistics", _statistics, mutates_args=()).register_fake(_empty_statistics)
