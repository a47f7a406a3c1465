"""Scores of calibrators, from sums over batches of samples."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from focalkern import metrics
from focalkern.calibrators import Calibrator, Estimator, InputKind, SplineScaling, TemperatureScaling
from focalkern.calibrators._candidates import fitted_identity, keeps_predictions, log_proba
from focalkern.calibrators._inputs import cannot_occur
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.ops.calibration_sums import CalibrationSums, add_calibration_sums
from focalkern.streaming import CalibrationGridState
from focalkern.study.samples import SCORES, Facts, Samples, scaling_or_none

__all__ = [
    "NO_LABEL",
    "Scored",
    "cell_sums",
    "confidences",
    "facts",
    "identity",
    "log_probabilities",
    "predictions",
    "reliability",
    "score",
]

NO_LABEL = torch.iinfo(torch.int64).min  # no label is ignored
# Number of buckets of the confidences for equal-mass scores of more than MOST_KEPT samples.
_BUCKETS = 1 << 18
_BY_CLASS = "classwise_ece_equal_width"

Cell = tuple[float, float]
"""(gamma, T) in place of a fitted scaling."""


def log_probabilities(calibrator: Any, input: Tensor, kind: InputKind) -> Tensor:
    """Calibrated log-probabilities of ``input`` [N, C], float64 [N, C]."""
    cell = _cell(calibrator)
    if cell is None:
        return log_proba(calibrator, input)
    return focal_calibration_map(input.to(torch.float64), *cell, input_kind=kind, log=True)


def predictions(calibrator: Any, input: Tensor, top: Tensor | None = None) -> Tensor | None:
    """[N] int64 predicted classes if they may differ from the argmax of the calibrated probabilities, else None.

    The predictions of a scaling are those of its input, because calibrated probabilities may saturate and tie.
    ``top`` is the argmax of the input, if known.
    """
    if _cell(calibrator) is not None or keeps_predictions(calibrator):
        return input.argmax(-1) if top is None else top
    if isinstance(calibrator, SplineScaling):
        return None
    if isinstance(calibrator, Calibrator):
        return torch.as_tensor(calibrator.predict(input.to(torch.float64)))
    return None


def score(
    samples: Samples, calibrators: Sequence[Any], n_bins: int, wanted: Collection[str] = tuple(SCORES)
) -> list["Scored"]:
    """Scores and reliability bins of every calibrator, in float64.

    Samples in files take one pass, or none if an earlier call computed the results.

    Args:
        samples: the samples.
        calibrators: fitted calibrators, or pairs (gamma, T).
        n_bins: number of bins of every ECE.
        wanted: names of the scores. For samples in files all scores are computed.
    """
    if samples.memory is not None:  # one after the other, because confidences take memory
        top = samples.memory.input.argmax(-1)
        found = (_pass(samples, [one], n_bins, wanted, top)[0] for one in calibrators)
        return [replace(one, confidence=torch.zeros(0), correct=torch.zeros(0)) for one in found]
    keys = [_cell(one) or one for one in calibrators]
    known = samples.scored
    missing = [key for key in dict.fromkeys(keys) if (key, n_bins) not in known]
    if missing:
        known |= {(key, n_bins): one for key, one in zip(missing, _pass(samples, missing, n_bins), strict=True)}
    return [known[key, n_bins] for key in keys]


def confidences(samples: Samples, calibrator: Any, n_bins: int) -> tuple[Tensor, Tensor]:
    """[N] float64 top probabilities, and [N] bool whether the predicted class is correct.

    For samples in files they come from :func:`score`, on rank 0 only, and are empty for too many samples.
    """
    if samples.memory is None:
        (found,) = score(samples, [calibrator], n_bins)
        return found.confidence, found.correct
    input, labels = samples.memory.input, samples.memory.labels
    log_probs = log_probabilities(calibrator, input, samples.kind)
    predicted = predictions(calibrator, input)
    if predicted is None:
        predicted = log_probs.argmax(-1)
    return log_probs.amax(-1).exp(), predicted == labels


def reliability(
    samples: Samples, calibrator: Any, n_bins: int, estimator: Estimator = "equal_width"
) -> metrics.ReliabilityBins:
    """Reliability bins; of equal width if ``estimator`` needs confidences that are not kept."""
    if samples.memory is None and (estimator == "equal_width" or not samples.keeps_confidences):
        return score(samples, [calibrator], n_bins)[0].bins
    confidence, correct = confidences(samples, calibrator, n_bins)
    return metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=n_bins, estimator=estimator)


def identity(samples: Samples, n_bins: int) -> TemperatureScaling:
    """No calibration as a calibrator, fitted on these samples."""
    (found,) = score(samples, [(0.0, 1.0)], n_bins)
    brier = found.scores["brier"]
    return fitted_identity(samples.kind, brier, n_samples=len(samples), n_classes=samples.n_classes)


def facts(samples: Samples) -> Facts:
    """Counts over the samples, from an earlier pass or else from another pass."""
    if samples.facts is None:
        counts = _Counts(samples)
        for _, input, target, _ in samples.batches("count"):
            counts.add(input, target)
        samples.facts = counts.total(samples)
    return samples.facts


def cell_sums(samples: Samples, gammas: Tensor, temperatures: Tensor, n_bins: int) -> CalibrationSums:
    """Float64 sums of every (gamma, T) in one pass, for the map of the report. Every process gets the totals."""
    criteria = ("ece", "nll", "brier")
    sums = CalibrationSums.zeros(len(gammas), len(temperatures), n_bins, criteria, torch.device("cpu"))
    for _, input, target, _ in samples.batches("map"):
        if len(target):
            add_calibration_sums(
                sums,
                input.to(torch.float64),
                target,
                gammas,
                temperatures,
                criteria=criteria,
                sketch=False,
                is_probs=samples.kind == "probs",
                ignore_index=NO_LABEL,
            )
    for _, tensor in sums.items():
        samples.processes.add_up(tensor)
    return sums


@dataclass(frozen=True)
class Scored:
    """Scores and reliability bins of one calibrator, over the samples of all processes.

    Attributes:
        scores: the wanted scores of :data:`SCORES`, by name.
        bins: reliability bins, ``equal_width``.
        confidence, correct: [N] float64 and [N] bool on rank 0, for samples in files; empty for too many samples.
        bound: error bound of the equal-mass ECEs; 0 if they are exact. The equal-width ECE is exact.
    """

    scores: dict[str, float]
    bins: metrics.ReliabilityBins
    confidence: Tensor
    correct: Tensor
    bound: float


# ---- private -------------------------------------------------------------------------------------------------------


def _cell(calibrator: Any) -> Cell | None:
    """gamma and T of a scaling; None for other calibrators."""
    if isinstance(calibrator, tuple):
        return calibrator
    scaling = scaling_or_none(calibrator)
    return None if scaling is None else (scaling.gamma_, scaling.temperature_)


def _pass(
    samples: Samples,
    calibrators: Sequence[Any],
    n_bins: int,
    wanted: Collection[str] = tuple(SCORES),
    top: Tensor | None = None,
) -> list[Scored]:
    """As :func:`score`, without results of earlier calls; ``top`` is the argmax of the input of samples in memory."""
    sums = [_Sums(samples, one, n_bins, wanted) for one in calibrators]
    # Samples in memory are counted when :func:`facts` is called; files need another pass then.
    counts = _Counts(samples) if samples.facts is None and samples.memory is None else None
    for _, input, target, _ in samples.batches("measure"):
        if not len(target):
            continue
        if counts is not None:
            counts.add(input, target)
        of_batch = input.argmax(-1) if top is None else top
        for one in sums:
            one.add(input, target, of_batch)
    if counts is not None:
        samples.facts = counts.total(samples)
    return [one.total(samples) for one in sums]


class _Counts:
    """Sums for :class:`Facts`."""

    def __init__(self, samples: Samples) -> None:
        self.kind = samples.kind
        self.numbers = torch.zeros(2, dtype=torch.int64)  # impossible targets; samples like probabilities
        self.per_class = torch.zeros(samples.n_classes, dtype=torch.int64)

    def add(self, input: Tensor, target: Tensor) -> None:
        impossible = cannot_occur(input.gather(1, target.unsqueeze(1)), self.kind)
        alike = (input >= 0).all(1) & ((input.sum(1, dtype=torch.float64) - 1).abs() <= 1e-3)
        self.numbers += torch.stack([impossible.sum(), alike.sum()])
        self.per_class += torch.bincount(target, minlength=len(self.per_class))

    def total(self, samples: Samples) -> Facts:
        impossible, alike = samples.processes.add_up(self.numbers).tolist()
        return Facts(
            class_counts=samples.processes.add_up(self.per_class),
            impossible_targets=impossible,
            looks_like_probs=samples.kind == "logits" and alike == len(samples),
        )


class _Sums:
    """Sums over the samples of this process, for :class:`Scored`."""

    def __init__(self, samples: Samples, calibrator: Any, n_bins: int, wanted: Collection[str]) -> None:
        self.wanted, self.by_class = wanted, _BY_CLASS in wanted
        self.calibrator, self.kind, self.n_bins = calibrator, samples.kind, n_bins
        self.edges = torch.tensor([k / n_bins for k in range(1, n_bins)], dtype=torch.float64)
        self.offsets = torch.arange(samples.n_classes) * n_bins
        self.losses = torch.zeros(2, dtype=torch.float64)  # NLL and Brier score
        self.bins = torch.zeros(3, n_bins, dtype=torch.float64)  # samples, sum of confidences, correct ones
        # Sums of probability - [target = class], by class and bin of the probability.
        self.excess = torch.zeros(samples.n_classes * n_bins, dtype=torch.float64)
        # One tensor for all batches, because a tensor per batch would keep the batch's memory from being reused.
        n_kept = samples.n_local if samples.keeps_confidences else 0
        self.confidence = torch.zeros(n_kept, dtype=torch.float64)
        self.correct = torch.zeros(n_kept, dtype=torch.uint8)
        self.n_added = 0
        # For calibrators other than scalings, the buckets get calibrated log-probabilities; the map (0, 1) keeps them.
        cell = _cell(calibrator)
        kind: InputKind = samples.kind if cell else "logits"
        self.buckets = None if samples.keeps_confidences else self._new_buckets(*cell or (0.0, 1.0), kind)

    def add(self, input: Tensor, target: Tensor, top: Tensor) -> None:
        log_probs = log_probabilities(self.calibrator, input, self.kind)
        predicted = predictions(self.calibrator, input, top)
        correct = (log_probs.argmax(-1) if predicted is None else predicted) == target
        if self.buckets is not None:
            self.buckets.update(input.to(torch.float64) if _cell(self.calibrator) else log_probs, target)
        index = target.unsqueeze(1)
        nll = -log_probs.gather(1, index).sum()
        probs = log_probs.exp_()
        confidence = probs.amax(-1)
        place = torch.bucketize(probs, self.edges).add_(self.offsets).view(-1) if self.by_class else None
        probs.scatter_add_(1, index, probs.new_tensor(-1.0).expand_as(index))  # now probability - [target = class]
        if place is not None:
            self.excess += torch.bincount(place, weights=probs.view(-1), minlength=len(self.excess))
        self.losses += torch.stack([nll, probs.square_().sum()])
        place = torch.bucketize(confidence, self.edges)
        for sums, weights in zip(self.bins, (torch.ones_like(confidence), confidence, correct.double()), strict=True):
            sums += torch.bincount(place, weights=weights, minlength=self.n_bins)
        if self.buckets is None:
            after = self.n_added + len(target)
            self.confidence[self.n_added : after] = confidence
            self.correct[self.n_added : after] = correct
            self.n_added = after

    def total(self, samples: Samples) -> Scored:
        n, processes = len(samples), samples.processes
        for tensor in (self.losses, self.bins, self.excess):
            processes.add_up(tensor)
        count, confidences, hits = self.bins
        edges = torch.arange(self.n_bins + 1, dtype=torch.float64) / self.n_bins
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
            "nll": float(self.losses[0]) / n,
            "brier": float(self.losses[1]) / n,
            "ece_equal_width": float(metrics.expected_error(bins)),
            _BY_CLASS: float(self.excess.abs().sum()) / (n * samples.n_classes),
        }
        confidence, correct = processes.to_first(self.confidence), processes.to_first(self.correct).bool()
        bound = 0.0
        if self.buckets is not None:
            processes.reduce(self.buckets)
        for estimator in ("equal_mass", "equal_mass_interp"):
            if f"ece_{estimator}" not in self.wanted:
                continue
            if self.buckets is None:
                ece = metrics.expected_calibration_error(
                    confidence=confidence, correct=correct, n_bins=self.n_bins, estimator=estimator
                )
            else:
                # The bins of this estimator from the same buckets.
                content = self.buckets.state_dict()
                content["config"]["estimator"] = estimator
                state = CalibrationGridState.from_state_dict(content)
                ece = state.compute().tables["ece"]
                bound = max(bound, float(state.error_bound("ece")))
            scores[f"ece_{estimator}"] = float(ece)
        return Scored({name: scores[name] for name in SCORES if name in self.wanted}, bins, confidence, correct, bound)

    def _new_buckets(self, gamma: float, temperature: float, kind: InputKind) -> CalibrationGridState:
        return CalibrationGridState(
            [gamma],
            [temperature],
            n_bins=self.n_bins,
            criteria=("ece",),
            estimator="equal_mass",
            input_kind=kind,
            ignore_index=NO_LABEL,
            n_buckets=_BUCKETS,
        )
