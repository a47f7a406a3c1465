"""What a study asks of its rows, wherever they are: in memory, or in files of which a few rows are read at a time."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from focalkern.bootstrap import BiasFloor, PairedBootstrap
from focalkern.calibrators import Estimator, InputKind
from focalkern.files import LogitSet
from focalkern.metrics import ReliabilityBins
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.ops.calibration_sums import CalibrationSums
from focalkern.study.contest import Contest, Proper

__all__ = ["CALIBRATION_ERRORS", "FIGURES", "About", "Applied", "Rows"]

FIGURES = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece_equal_width": "ECE\nequal_\nwidth",
    "ece_equal_mass": "ECE\nequal_\nmass",
    "ece_equal_mass_interp": "ECE\nequal_\nmass_\ninterp",
    "classwise_ece_equal_width": "classwise\nECE equal_\nwidth",
}
"""The figures of a table, by their name in CSV and JSON, with the heading they have in print."""

CALIBRATION_ERRORS = tuple(name for name in FIGURES if "ece_" in name)

Applied = tuple[float | None, float | None, Any]
"""gamma, temperature, and a fitted calibrator that is no (focal) temperature scaling: then the first two say nothing.
gamma = 0 and T = 1 is uncalibrated."""


class About(Protocol):
    """Which rows they are."""

    @property
    def kind(self) -> InputKind: ...

    @property
    def name(self) -> str:
        """``""``, ``"val"`` or ``"test"``."""

    @property
    def source(self) -> str: ...

    @property
    def part(self) -> str:
        """In words, which rows of the source; nothing for all."""

    @property
    def n_classes(self) -> int: ...

    def __len__(self) -> int: ...


class Rows(About, Protocol):
    """:class:`focalkern.study.memory.MemorySet` and :class:`focalkern.study.StreamedSet` have all of this."""

    @property
    def memory(self) -> LogitSet | None:
        """The rows, where all of them are in memory."""

    @property
    def keeps_confidences(self) -> bool:
        """Whether there are few enough rows for that, which intervals and bins of equal mass need."""

    @property
    def resampled_in_seconds(self) -> bool:
        """Whether there are few enough numbers for a bootstrap of all figures."""

    @property
    def class_counts(self) -> Tensor:
        """[C] int64, rows per class. This and what follows is known once something was measured."""

    @property
    def impossible_targets(self) -> int:
        """How many rows rule out their own class."""

    @property
    def looks_like_probs(self) -> bool:
        """Whether what was read as logits is positive and sums to 1."""

    def sample(self) -> tuple[Tensor, Tensor]:
        """Input and labels of all rows, or of enough of them, to look at."""

    def rows(self, index: Tensor, part: str) -> "Rows":
        """The rows of ``index``, called ``part``."""

    def grid(
        self,
        gammas: Sequence[float],
        temperatures: Sequence[float],
        *,
        n_bins: int,
        estimator: Estimator,
        criterion: Proper = "nll",
        folds: int = 0,
    ) -> CalibrationGrid:
        """ECE and NLL of every cell, and its Brier score where that is the ``criterion``; with ``folds``, what
        :meth:`cross_validate` needs besides."""

    def cross_validate(
        self,
        candidates: Mapping[str, Any],
        grid: CalibrationGrid,
        gammas: Sequence[float],
        *,
        criterion: Proper,
        folds: int,
        seed: int,
    ) -> Contest:
        """``candidates`` as :func:`focalkern.study.contest.as_candidates` makes them; ``grid`` and its ``gammas`` are
        those of the last :meth:`grid`."""

    def measure(self, cells: Sequence[tuple[float, float]], n_bins: int) -> None:
        """One pass over the rows for everything that is later asked of these (gamma, temperature)."""

    def figures(self, what: Applied, n_bins: int) -> dict[str, float]:
        """The figures of one calibrator, computed in float64.

        Correct is what the largest *input* says of a scaling: a calibrated row may saturate and tie, the input does
        not.
        """

    def reliability(self, what: Applied, n_bins: int, estimator: Estimator = "equal_width") -> ReliabilityBins:
        """Bins of equal width also where another ``estimator`` needs confidences that are not kept."""

    def resampled(
        self, cells: Mapping[str, Applied], *, n_bins: int, n_resamples: int, seed: int
    ) -> tuple[PairedBootstrap, dict[str, dict[str, BiasFloor]]]:
        """By name, the paired bootstrap of the figures and the bias floors."""

    def bound_of(self, gamma: float, temperature: float) -> float:
        """How far the ECE of that cell of the grid can be off."""

    def bound_of_figures(self, gamma: float, temperature: float, n_bins: int) -> float:
        """How far the ECEs of equal mass among the figures can be off."""

    def cell_sums(self, gammas: Tensor, temperatures: Tensor, n_bins: int) -> CalibrationSums:
        """In one pass, in float64: what the map of the report needs of every cell."""

    def remove_progress(self) -> None:
        """The state file, where there is one, is of no use any more."""
