"""Scores of calibrators from sums over batches of samples."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern import metrics
from focalkern.calibrators import InputKind
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.ops.calibration_sums import CalibrationSums, add_calibration_sums
from focalkern.streaming import CalibrationGridState
from focalkern.study.samples import StreamedBatches

__all__ = ["MOST_KEPT", "NO_LABEL", "Measured", "StreamedScores", "Sums", "sums_of_cells"]

NO_LABEL = torch.iinfo(torch.int64).min  # no label is ignored


@dataclass(frozen=True)
class Measured:
    """Scores and reliability bins of one calibrator, over the samples of all processes.

    Attributes:
        scores: those of a table.
        bins: equal_width.
        confidence: [N] float64 on rank 0; empty if there are too many samples.
        bound: error bound of the equal-mass ECEs; the equal-width ECE is exact.
    """

    scores: dict[str, float]
    bins: metrics.ReliabilityBins
    confidence: Tensor
    bound: float


class Sums:
    """Sums over batches, from which :class:`Measured` is computed."""

    def __init__(self, n_classes: int, n_bins: int, n_kept: int, sketch: CalibrationGridState | None) -> None:
        self.edges = torch.tensor([k / n_bins for k in range(1, n_bins)], dtype=torch.float64)
        self.offsets = torch.arange(n_classes) * n_bins
        self.n_places = n_classes * n_bins
        self.means = torch.zeros(2, dtype=torch.float64)  # times N: NLL and Brier score
        self.bins = torch.zeros(3, n_bins, dtype=torch.float64)  # samples, their confidences, how many are correct
        self.excess = torch.zeros(self.n_places, dtype=torch.float64)  # probability - [target = class], per class's bin
        self.sketch = sketch
        # One tensor for all batches: a tensor per batch would keep the memory of its batch from being reused.
        self.confidence = torch.zeros(n_kept, dtype=torch.float64)

    def add(self, first: int, log_probs: Tensor, target: Tensor, correct: Tensor) -> None:
        """Add a batch, whose first sample has the number ``first``."""
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
    """Sums of every (gamma, T) for the map of the report, in float64. A batch is input [n, C] and target [n]."""
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


# Up to this many samples, scores come from all confidences (8 bytes each); beyond, from 6 MB of buckets.
MOST_KEPT = 1 << 19
_FIGURE_BUCKETS = 1 << 18


class StreamedScores(StreamedBatches):
    """Streamed samples with the scores of scalings, computed in one pass for several of them.

    Attributes:
        correct: [N] bool on rank 0; empty if there are too many samples. This and the others are known after
            :meth:`measure`.
        class_counts: [C] int64, samples per class.
        impossible_targets: number of samples whose own class has probability 0.
        looks_like_probs: whether all logits are positive and sum to 1.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._measured: dict[tuple[float, float, int], Measured] = {}
        self.correct = torch.zeros(0, dtype=torch.bool)
        self.class_counts = torch.zeros(0, dtype=torch.int64)
        self.impossible_targets = 0
        self.looks_like_probs = False

    @property
    def keeps_confidences(self) -> bool:
        """Whether the confidences of all samples are kept: intervals need them."""
        return len(self) <= MOST_KEPT

    def measure(self, cells: Sequence[tuple[float, float]], n_bins: int) -> None:
        """One pass over the samples, in float64, for the scores and bins of these (gamma, T)."""
        wanted = [cell for cell in dict.fromkeys(cells) if (*cell, n_bins) not in self._measured]
        if not wanted:
            return
        begin, end = self._processes.share(len(self._rows))
        n_kept = 0
        if self.keeps_confidences:
            n_kept = end - begin if self._kept is None else int(np.count_nonzero(self._kept[begin:end]))
        found = {}
        for gamma, temperature in wanted:
            sketch = None
            if not self.keeps_confidences:
                sketch = self._state([gamma], [temperature], n_bins, "equal_mass", n_buckets=_FIGURE_BUCKETS)
            found[gamma, temperature] = Sums(self.n_classes, n_bins, n_kept, sketch)
        correct = torch.zeros(n_kept, dtype=torch.uint8)
        done = 0
        facts = torch.zeros(2, dtype=torch.int64)  # impossible targets, samples that look like probabilities
        per_class = torch.zeros(self.n_classes, dtype=torch.int64)
        impossible = -torch.inf if self.kind == "logits" else 0.0
        for _, input, target, _ in self._batches("measure"):
            if not len(target):
                continue
            ruled_out = input.gather(1, target.unsqueeze(1)) == impossible
            alike = (input >= 0).all(1) & ((input.sum(1, dtype=torch.float64) - 1).abs() <= 1e-3)
            facts += torch.stack([ruled_out.sum(), alike.sum()])
            per_class += torch.bincount(target, minlength=self.n_classes)
            hit = input.argmax(-1) == target
            if self.keeps_confidences:
                correct[done : done + len(hit)] = hit
            input = input.to(torch.float64)
            for (gamma, temperature), sums in found.items():
                log_probs = focal_calibration_map(input, gamma, temperature, input_kind=self.kind, log=True)
                sums.add(done, log_probs, target, hit)
                if sums.sketch is not None:
                    sums.sketch.update(input, target)
            done += len(target)
        self.correct = self._processes.to_first(correct).bool()
        self.class_counts = self._processes.add_up(per_class)
        self.impossible_targets, alike_rows = self._processes.add_up(facts).tolist()
        self.looks_like_probs = self.kind == "logits" and alike_rows == len(self)
        for cell, sums in found.items():
            self._measured[*cell, n_bins] = self._all_together(sums, n_bins)

    def _all_together(self, sums: Sums, n_bins: int) -> Measured:
        n = len(self)
        for tensor in (sums.means, sums.bins, sums.excess):
            self._processes.add_up(tensor)
        count, confidences, hits = sums.bins
        edges = torch.arange(n_bins + 1, dtype=torch.float64) / n_bins
        bins = metrics.ReliabilityBins(
            lower=edges[:-1],
            upper=edges[1:],
            count=count.to(torch.int64),
            confidence=confidences / count,
            accuracy=hits / count,
            n_samples=n,
            estimator="equal_width",
        )
        scores = {
            "accuracy": float(hits.sum()) / n,
            "nll": float(sums.means[0]) / n,
            "brier": float(sums.means[1]) / n,
            "ece_equal_width": float(metrics.expected_error(bins)),
            "classwise_ece_equal_width": float(sums.excess.abs().sum()) / (n * self.n_classes),
        }
        confidence = self._processes.to_first(sums.confidence)
        bound = 0.0
        if sums.sketch is not None:
            self._processes.reduce(sums.sketch)
        for estimator in ("equal_mass", "equal_mass_interp"):
            if sums.sketch is None:
                ece = metrics.expected_calibration_error(
                    confidence=confidence, correct=self.correct, n_bins=n_bins, estimator=estimator
                )
            else:
                # The same buckets, with the bins of this estimator.
                content = sums.sketch.state_dict()
                content["config"]["estimator"] = estimator
                state = CalibrationGridState.from_state_dict(content)
                ece = state.compute().tables["ece"]
                bound = max(bound, float(state.error_bound("ece")))
            scores[f"ece_{estimator}"] = float(ece)
        return Measured(scores, bins, confidence, bound)

    def measured(self, gamma: float, temperature: float, n_bins: int) -> Measured:
        """Results of :meth:`measure`."""
        return self._measured[gamma, temperature, n_bins]

    def _state(
        self,
        gammas: Sequence[float] | Tensor,
        temperatures: Sequence[float] | Tensor,
        n_bins: int,
        estimator: str,
        *,
        criteria: Sequence[str] = ("ece",),
        n_buckets: int = 1024,
    ) -> CalibrationGridState:
        return CalibrationGridState(
            gammas,
            temperatures,
            n_bins=n_bins,
            criteria=criteria,
            estimator=estimator,  # type: ignore[arg-type]  # a str in a grid
            input_kind=self.kind,
            ignore_index=NO_LABEL,
            n_buckets=n_buckets,
        )
