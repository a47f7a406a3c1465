"""Sums over samples for the calibration criteria of a grid, accumulated batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from focalkern.ops._backend import backend_for
from focalkern.ops.calibration_grid import _CRITERIA

__all__ = ["CalibrationSums", "add_calibration_sums", "check_rows"]

_NO_BINS = 1  # placeholder for an estimator and its bins, if only the sums are wanted
_EQUAL_WIDTH = 0


@dataclass
class CalibrationSums:
    """Sums over the samples added so far, per cell of a grid; None for sums that no criterion needs.

    Attributes:
        rows: [1] int64 on the CPU, the number of samples.
        count: [Gg, Gt, B] int64, samples per bucket of their confidence.
        confidence: [Gg, Gt, B] float64, sum of these confidences.
        correct: [Gg, Gt, B] int64, number of these samples that are correct.
        nll: [Gg, Gt] float64, sum of -log p_target.
        brier: [Gg, Gt] float64, sum over the samples of sum over the classes of (p_k - [k = target])^2.
    """

    rows: Tensor
    count: Tensor | None = None
    confidence: Tensor | None = None
    correct: Tensor | None = None
    nll: Tensor | None = None
    brier: Tensor | None = None

    @classmethod
    def zeros(
        cls, n_gammas: int, n_temperatures: int, n_buckets: int, criteria: Sequence[str], device: torch.device
    ) -> "CalibrationSums":
        """The sums of zero samples."""
        cells = (n_gammas, n_temperatures)
        # Inside torch.inference_mode() too, the sums must be ordinary tensors, which later batches may change in place.
        with torch.inference_mode(False):
            sums = cls(torch.zeros(1, dtype=torch.int64, device="cpu"))
            if "ece" in criteria or "mce" in criteria:
                sums.count = torch.zeros(*cells, n_buckets, dtype=torch.int64, device=device)
                sums.confidence = torch.zeros(*cells, n_buckets, dtype=torch.float64, device=device)
                sums.correct = torch.zeros(*cells, n_buckets, dtype=torch.int64, device=device)
            if "nll" in criteria:
                sums.nll = torch.zeros(*cells, dtype=torch.float64, device=device)
            if "brier" in criteria:
                sums.brier = torch.zeros(*cells, dtype=torch.float64, device=device)
        return sums

    def items(self) -> list[tuple[str, Tensor]]:
        """The sums per cell that are not None, by name."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self)[1:])
        return [(name, tensor) for name, tensor in pairs if tensor is not None]


def check_rows(
    input: Tensor, target: Tensor, gammas: Tensor, temperatures: Tensor, *, is_probs: bool, ignore_index: int
) -> None:
    """Raises the errors of :func:`focalkern.calibration_grid` for invalid rows."""
    backend_for(input).CalibrationGridRun(
        input, target, gammas, temperatures, _NO_BINS, _CRITERIA["nll"], _EQUAL_WIDTH, is_probs, ignore_index
    )


def add_calibration_sums(
    sums: CalibrationSums,
    input: Tensor,
    target: Tensor,
    gammas: Tensor,
    temperatures: Tensor,
    *,
    criteria: Sequence[str],
    sketch: bool,
    is_probs: bool,
    ignore_index: int,
) -> None:
    """Add the rows of a batch to ``sums``: all of them or, if one is invalid, none.

    Args:
        sums: on the device of ``input``, changed in place.
        input, target: as for :func:`focalkern.calibration_grid`.
        gammas, temperatures: [Gg] and [Gt] float64 on the CPU.
        criteria: the criteria for which ``sums`` was made.
        sketch: True for the buckets of the quantile sketch, False for equally wide buckets.
        is_probs: whether ``input`` holds probabilities.
        ignore_index: as for :func:`focalkern.calibration_grid`.

    Raises:
        TypeError, ValueError, IndexError, NotImplementedError: as :func:`focalkern.calibration_grid`.
    """
    codes = sum(_CRITERIA[name] for name in criteria)
    run = backend_for(input).CalibrationGridRun(
        input, target, gammas, temperatures, _NO_BINS, codes, _EQUAL_WIDTH, is_probs, ignore_index
    )
    run.add_to(sums.rows, sums.count, sums.confidence, sums.correct, sums.nll, sums.brier, sketch)
