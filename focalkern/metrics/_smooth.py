"""The smooth calibration error."""

import math
from typing import Any

import torch
from torch import Tensor

from focalkern._arrays import arrays_for_arrays
from focalkern._checks import number
from focalkern.metrics._images import Per, measured
from focalkern.metrics._inputs import MetricInput, confidence_and_correct

__all__ = ["smooth_calibration_error"]

# Intervals between the grid points of smooth_calibration_error.
_GRID = 1 << 13


# Number of sets per block; a set takes about 128 KiB.
_BLOCK = 64


@arrays_for_arrays
@torch.no_grad()
def smooth_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    bandwidth: float | None = None,
    confidence: Any = None,
    correct: Any = None,
    ignore_index: int | None = None,
    per: Per = "set",
) -> Tensor:
    r"""Smooth ECE of the top class: a kernel in place of bins, so the error is continuous in the confidences.

    .. math::
        \text{smECE}_\sigma = \int_0^1 \Big| \frac{1}{N} \sum_i (\text{correct}_i - c_i)\, K_\sigma(t, c_i) \Big| dt

    K is the Gaussian kernel with standard deviation :math:`\sigma`, reflected repeatedly at 0 and at 1. Without
    ``bandwidth`` the result is the :math:`\sigma` at which :math:`\text{smECE}_\sigma = \sigma`. Exactly one exists,
    because smECE falls with :math:`\sigma`. It is a consistent measure of the distance to the nearest calibrated
    predictor: it lies between a constant times that distance and a constant times its square root.

    The computation uses a grid of 8193 points and finds :math:`\sigma` to 1e-7. The relative error is about 1e-2 for a
    kernel with :math:`\sigma` = 1e-3, and 1e-4 for :math:`\sigma` = 1e-2.

    Args:
        probs, target: as :func:`expected_calibration_error`.
        bandwidth: :math:`\sigma` > 0; None chooses it from the data as above.
        confidence, correct, ignore_index, per: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`; ValueError also for a bandwidth that
            is not positive.

    Source: Blasiok & Nakkiran 2023 (arXiv 2309.12236), sections 3 and 4; their package relplot.

    Example:
        >>> confidence, correct = torch.full((10,), 0.9), torch.arange(10) < 6
        >>> fk.metrics.smooth_calibration_error(confidence=confidence, correct=correct).round(decimals=3)
        tensor(0.3000, dtype=torch.float64)
    """
    op = "smooth_calibration_error"
    if bandwidth is not None:
        bandwidth = number(op, "bandwidth", bandwidth, "a number or None")
        if not bandwidth > 0:
            raise ValueError(f"{op}: bandwidth must be positive, got {bandwidth}")
    given = MetricInput(probs, target, confidence, correct)
    return measured(op, lambda rows: _of_rows(op, rows, bandwidth), given, ignore_index, per)


def _of_rows(op: str, rows: MetricInput, bandwidth: float | None) -> Tensor:
    confidence, correct = confidence_and_correct(op, *rows)
    *batch, n_samples = confidence.shape
    result = torch.full((math.prod(batch),), math.nan, dtype=torch.float64, device=confidence.device)
    if n_samples:
        confidence, correct = confidence.view(-1, n_samples), correct.reshape(-1, n_samples)
        for first in range(0, len(result), _BLOCK):
            part = slice(first, first + _BLOCK)
            result[part] = _smooth_errors(confidence[part].to(torch.float64), correct[part], bandwidth)
    return result.view(batch)


def _smooth_errors(confidence: Tensor, correct: Tensor, bandwidth: float | None) -> Tensor:
    """smECE of B sets, [B] from [B, N], in float64."""
    confidence = confidence.clamp(max=1.0)
    # Linear interpolation divides each residual between the two nearest grid points.
    place = confidence * _GRID
    left = place.long().clamp_(max=_GRID - 1)
    residual = (correct - confidence) / confidence.shape[-1]
    to_right = residual * (place - left)
    grid = confidence.new_zeros(len(confidence), _GRID + 1)
    grid.scatter_add_(-1, left, residual - to_right)
    grid.scatter_add_(-1, left + 1, to_right)
    # Reflection maps an end of the interval to itself, so the end points count twice.
    grid[:, 0] *= 2
    grid[:, -1] *= 2
    spectrum = torch.fft.rfft(torch.cat([grid, grid[:, 1:-1].flip(-1)], -1))
    frequency = math.pi * torch.arange(_GRID + 1, dtype=torch.float64, device=grid.device)

    def at(sigma: Tensor) -> Tensor:
        damping = (-0.5 * (sigma.unsqueeze(-1) * frequency).square()).exp()
        smoothed = torch.fft.irfft(spectrum * damping, 2 * _GRID)[:, : _GRID + 1].abs()
        # Trapezoidal rule; the values already contain the step of the grid.
        return smoothed.sum(-1) - 0.5 * (smoothed[:, 0] + smoothed[:, -1])

    low = grid.new_zeros(len(grid))
    if bandwidth is not None:
        return at(low + float(bandwidth))
    high = low + 1
    for _ in range(24):
        middle = 0.5 * (low + high)
        above = at(middle) > middle
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return torch.where(low > 0, 0.5 * (low + high), 0.0)
