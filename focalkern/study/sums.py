"""The figures of a calibrator, and those of every cell of a map, out of sums over batches of rows."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from focalkern import metrics
from focalkern.calibrators import InputKind
from focalkern.ops.calibration_sums import CalibrationSums, add_calibration_sums
from focalkern.streaming import CalibrationGridState

__all__ = ["NO_LABEL", "Measured", "Sums", "sums_of_cells"]

NO_LABEL = torch.iinfo(torch.int64).min  # is ignored: every row counts


@dataclass(frozen=True)
class Measured:
    """What one calibrator does to the rows of all processes.

    Attributes:
        figures: those of a table.
        bins: equal_width.
        confidence: [N] float64 on rank 0; nothing where there are too many.
        bound: how far the ECEs of equal mass can be off; that of equal width is exact.
    """

    figures: dict[str, float]
    bins: metrics.ReliabilityBins
    confidence: Tensor
    bound: float


class Sums:
    """What becomes a :class:`Measured`, batch by batch."""

    def __init__(self, n_classes: int, n_bins: int, n_kept: int, sketch: CalibrationGridState | None) -> None:
        self.edges = torch.tensor([k / n_bins for k in range(1, n_bins)], dtype=torch.float64)
        self.offsets = torch.arange(n_classes) * n_bins
        self.n_places = n_classes * n_bins
        self.means = torch.zeros(2, dtype=torch.float64)  # times N: NLL and Brier score
        self.bins = torch.zeros(3, n_bins, dtype=torch.float64)  # rows, their confidences, how many are correct
        self.excess = torch.zeros(self.n_places, dtype=torch.float64)  # probability - [target = class], per class's bin
        self.sketch = sketch
        # Not a list of parts, each of which would keep the freed memory of its batch from being used again.
        self.confidence = torch.zeros(n_kept, dtype=torch.float64)

    def add(self, first: int, log_probs: Tensor, target: Tensor, correct: Tensor) -> None:
        """The rows from number ``first`` on."""
        index = target.unsqueeze(1)
        nll = -log_probs.gather(1, index).sum()
        probs = log_probs.exp_()
        brier = probs.square().sum() - 2 * probs.gather(1, index).sum() + len(target)
        self.means += torch.stack([nll, brier])
        place = torch.bucketize(probs, self.edges).add_(self.offsets)
        self.excess += torch.bincount(place.view(-1), weights=probs.view(-1), minlength=self.n_places)
        self.excess -= torch.bincount(place.gather(1, index).squeeze(1), minlength=self.n_places)
        confidence = probs.amax(-1)
        place = torch.bucketize(confidence, self.edges)
        for sums, weights in zip(self.bins, (torch.ones_like(confidence), confidence, correct.double()), strict=True):
            sums += torch.bincount(place, weights=weights, minlength=len(sums))
        if self.sketch is None:
            self.confidence[first : first + len(target)] = confidence


def sums_of_cells(
    batches: Iterable[tuple[Tensor, Tensor]], gammas: Tensor, temperatures: Tensor, n_bins: int, kind: InputKind
) -> CalibrationSums:
    """In float64, what the map of the report needs of every cell; a batch is input [n, C] and target [n]."""
    criteria = ("ece", "nll", "brier")
    sums = CalibrationSums.zeros(len(gammas), len(temperatures), n_bins, criteria, torch.device("cpu"))
    for input, target in batches:
        if len(target):
            add_calibration_sums(
                sums,
                input.to(torch.float64),
                target,
                gammas,
                temperatures,
                criteria=criteria,
                sketch=False,
                is_probs=kind == "probs",
                ignore_index=NO_LABEL,
            )
    return sums
