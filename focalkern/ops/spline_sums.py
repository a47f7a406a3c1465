"""Sums over rows for the fit of spline scaling: by the compiled kernels on the CPU, in plain torch elsewhere."""

from typing import Any

from torch import Tensor

from focalkern.ops._backend import backend_for, fallback

__all__ = ["spline_sums_for"]


def spline_sums_for(input: Tensor) -> Any:
    """The module with the functions of :mod:`focalkern.fallback.spline_sums` for the device of ``input``."""
    return backend_for(input) if input.is_cpu else fallback
