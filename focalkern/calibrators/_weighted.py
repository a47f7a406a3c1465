"""The calibration grid for rows with sample weights, computed cell by cell."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from focalkern._types import InputKind
from focalkern.calibrators._inputs import losses_of
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = ["weighted_ece", "weighted_grid"]


def weighted_grid(
    name: str,
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    gammas: Sequence[float],
    temperatures: Sequence[float],
    *,
    n_bins: int,
    criteria: Sequence[str],
    estimator: str,
    input_kind: InputKind,
) -> CalibrationGrid:
    """:func:`calibration_grid` in which row i counts ``weight[i]`` times. The other arguments must have been checked.

    The bins of ``"equal_mass"`` have equal weights; a row on an edge is divided between both bins.
    """
    if estimator == "equal_mass_interp" and "ece" in criteria:
        raise ValueError(
            f"{name}: estimator must be 'equal_mass' or 'equal_width' with sample_weight, got 'equal_mass_interp'"
        )
    wide, share = input.to(torch.float64), weight / weight.sum()
    top = input.argmax(-1, keepdim=True)
    correct = (top.squeeze(1) == target).to(torch.float64)
    tables = {one: torch.empty(len(gammas), len(temperatures), dtype=torch.float64) for one in criteria}
    for i, gamma in enumerate(gammas):
        for j, temperature in enumerate(temperatures):
            log_probs = focal_calibration_map(wide, gamma, temperature, input_kind=input_kind, log=True)
            for one, table in tables.items():
                if one != "ece":
                    table[i, j] = (losses_of(log_probs, target, (one,)) * share).sum()
                else:
                    confidence = log_probs.gather(1, top).squeeze(1).exp()
                    table[i, j] = weighted_ece(confidence, correct, share, n_bins, estimator)
    first, second = (
        torch.tensor(list(axis), dtype=torch.float64, device=input.device) for axis in (gammas, temperatures)
    )
    on_device = {one: table.to(input.device) for one, table in tables.items()}
    return CalibrationGrid(first, second, on_device, n_bins, estimator)


def weighted_ece(confidence: Tensor, correct: Tensor, share: Tensor, n_bins: int, estimator: str) -> float:
    """The ECE of weighted rows; the weights ``share`` sum to 1."""
    gap = share * (correct - confidence)
    if estimator == "equal_width":
        edges = torch.arange(1, n_bins, dtype=torch.float64, device=gap.device) / n_bins
        index = (confidence.unsqueeze(-1) > edges).sum(-1)
        sums_of_bins = torch.zeros(n_bins, dtype=torch.float64, device=gap.device).scatter_add_(0, index, gap)
        return float(sums_of_bins.abs().sum())
    order = confidence.argsort(stable=True)
    # Cumulative sums are interpolated linearly between rows, which divides a row on an edge.
    up_to = np.concatenate([[0.0], share[order].cumsum(0).cpu().numpy()])
    sums = np.concatenate([[0.0], gap[order].cumsum(0).cpu().numpy()])
    cuts = np.interp(np.arange(n_bins + 1) / n_bins * up_to[-1], up_to, sums)
    return float(np.abs(np.diff(cuts)).sum())
