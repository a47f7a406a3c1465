"""Sums over rows for the fit of spline scaling: by compiled kernels if the device has them, else in plain torch."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from focalkern.ops._backend import backend_for, fallback, has_kernels

__all__ = ["spline_sums_for"]

# A fit calls these only once, so they have no CUDA kernel.
_PLAIN_ON_CUDA = ("spline_histogram", "spline_matrix_hessian", "spline_row_losses", "spline_spread")


def spline_sums_for(input: Tensor) -> Any:
    """The module with the functions of :mod:`focalkern.fallback.spline_sums` for the device of ``input``."""
    found = backend_for(input)
    if not input.is_cuda or not has_kernels(input):
        return found
    names = [name for name in vars(fallback) if name.startswith("spline_") and hasattr(found, name)]
    return SimpleNamespace(**{name: getattr(fallback if name in _PLAIN_ON_CUDA else found, name) for name in names})
