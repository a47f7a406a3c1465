"""Shared by the tests of metrics: bins in NumPy, and samples."""

import itertools

import numpy as np
import torch

from focalkern import metrics

ERRORS = (
    metrics.expected_calibration_error,
    metrics.maximum_calibration_error,
    metrics.rms_calibration_error,
)
BINNED = (*ERRORS, metrics.debiased_calibration_error, metrics.classwise_calibration_error)
UNBINNED = (metrics.smooth_calibration_error, metrics.aurc)


def numpy_bins(confidence, n_bins, estimator):
    """Row indices of each bin, by the definitions."""
    if estimator == "equal_mass":
        return np.array_split(np.argsort(confidence, kind="stable"), n_bins)
    if estimator == "equal_width":
        edges = (np.arange(n_bins + 1) / n_bins).astype(confidence.dtype)
        edges[0] = -1
    else:
        n = len(confidence)
        edges = np.interp(np.linspace(0, n, n_bins + 1), np.arange(n), np.sort(confidence)).astype(confidence.dtype)
    return [np.flatnonzero((confidence > low) & (confidence <= high)) for low, high in itertools.pairwise(edges)]


def sample(n, n_classes=10, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(n + n_classes)
    logits = 3 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    target = (logits + 2 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)).argmax(-1)
    return logits.softmax(-1).to(dtype).to(device), target.to(device)
