"""What calibrators do to rows larger than memory: their figures, in one pass for several of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern import metrics
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.streaming import CalibrationGridState
from focalkern.study.passes import Passes
from focalkern.study.sums import NO_LABEL, Measured, Sums

__all__ = ["MOST_KEPT", "StreamedFigures"]

# What is reported comes from the confidences of all rows, 8 bytes each, or, where there are more rows than this, from
# 6 MB of buckets.
MOST_KEPT = 1 << 19
_FIGURE_BUCKETS = 1 << 18


class StreamedFigures(Passes):
    """Passes that measure.

    Attributes:
        correct: [N] bool on rank 0, once something was measured; nothing where there are too many rows.
        class_counts: [C] int64, rows per class, once something was measured.
        impossible_targets: how many rows rule out their own class; likewise.
        looks_like_probs: whether all logits are positive and sum to 1; likewise.
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
        """Whether there are few enough rows for that, which intervals need."""
        return len(self) <= MOST_KEPT

    def measure(self, cells: Sequence[tuple[float, float]], n_bins: int) -> None:
        """One pass over the rows, in float64, for everything that is later asked of these (gamma, temperature)."""
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
        facts = torch.zeros(2, dtype=torch.int64)  # rows that rule out their class, rows that look like probabilities
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
        figures = {
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
                # The same buckets, cut as this one cuts.
                content = sums.sketch.state_dict()
                content["config"]["estimator"] = estimator
                state = CalibrationGridState.from_state_dict(content)
                ece = state.compute().tables["ece"]
                bound = max(bound, float(state.error_bound("ece")))
            figures[f"ece_{estimator}"] = float(ece)
        return Measured(figures, bins, confidence, bound)

    def measured(self, gamma: float, temperature: float, n_bins: int) -> Measured:
        """What :meth:`measure` has found."""
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
