"""Sums of the NLL of the focal calibration map and its derivatives, for fits of many networks at once."""

from typing import Any

from torch import Tensor

from focalkern.ops._backend import backend_for, fallback

__all__ = ["map_nll_sums_for"]


def map_nll_sums_for(input: Tensor) -> Any:
    """The kernel for tensors on the CPU if it is compiled, else :func:`focalkern.fallback.map_nll_sums`."""
    return (backend_for(input) if input.is_cpu else fallback).map_nll_sums
