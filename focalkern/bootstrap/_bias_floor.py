"""The calibration error that a perfectly calibrated model shows by chance."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._checks import MOST_BINS, MOST_RESAMPLES, flag, integer
from focalkern._progress import ProgressBar
from focalkern.bootstrap._figures import CLASSWISE, FIGURES, NAMES_IN_WORDS, TOP_CLASS_ONLY, chosen_figures
from focalkern.bootstrap._resampling import chunks, prefix_sums, uniform_draws
from focalkern.metrics import reliability_bins
from focalkern.metrics._bins import equal_width_edges
from focalkern.metrics._inputs import as_probs, confidence_and_correct

__all__ = ["BiasFloor", "bias_floor"]


@dataclass(frozen=True, eq=False)
class BiasFloor:
    """The calibration error of a perfectly calibrated model with the same confidences.

    Attributes:
        figure: name of the calibration error.
        samples: [R] float64 on the CPU, the error for each simulated set of labels.

    Example:
        >>> floor = fk.bootstrap.bias_floor(torch.tensor([[0.8, 0.2]]).repeat(200, 1))["ece_equal_width"]
        >>> round(floor.mean, 2), floor.quantile(0.95) > floor.mean
        (0.02, True)
        >>> round(floor.p_value(0.5), 3), "is more than noise" in floor.describe(0.5)
        (0.001, True)
    """

    figure: str
    samples: Tensor

    @property
    def mean(self) -> float:
        """The mean of the simulated scores, a fraction."""
        return float(self.samples.mean())

    def quantile(self, q: float) -> float:
        """The score that a fraction ``q`` of the simulated scores do not exceed.

        Args:
            q: a fraction, in [0, 1].

        Returns:
            The score, a fraction; NaN without rows.

        Raises:
            ValueError: ``q`` outside [0, 1].
        """
        return float(np.quantile(self.samples.numpy(), q))

    def p_value(self, observed: float) -> float:
        """The p-value of ``observed`` for a perfectly calibrated model: (1 + number of samples >= observed) / (1 + R).

        A small p-value means that the model is miscalibrated. A large one means that the data are compatible with
        perfect calibration.

        Args:
            observed: an error of the same figure, a fraction.

        Returns:
            The p-value, in (0, 1]; NaN without rows.
        """
        if math.isnan(observed) or bool(self.samples.isnan().any()):
            return math.nan
        return (1 + int((self.samples >= observed).sum())) / (1 + len(self.samples))

    def describe(self, observed: float) -> str:
        """One sentence for a report that says whether ``observed`` is more than noise.

        Args:
            observed: an error of the same figure, a fraction.

        Returns:
            The sentence.
        """
        if math.isnan(self.p_value(observed)):
            return f"{NAMES_IN_WORDS[self.figure]}: there are no rows."
        floor = (
            f"a perfectly calibrated model with these confidences scores {self.mean:.4f} on average, and at most "
            f"{self.quantile(0.95):.4f} on 95 of 100 sets of this size"
        )
        verdict = "more than noise" if self.p_value(observed) <= 0.05 else "not distinguishable from noise"
        return f"{NAMES_IN_WORDS[self.figure]} of {observed:.4f} is {verdict}: {floor}."


def bias_floor(
    probs: Any = None,
    *,
    confidence: Any = None,
    figures: Sequence[str] | None = None,
    n_bins: int = 15,
    n_resamples: int = 1000,
    seed: int = 0,
    progress: bool | None = None,
) -> dict[str, BiasFloor]:
    r"""The calibration error that a perfectly calibrated model with these confidences would score.

    Labels are sampled from the predicted probabilities R times, and the ECE of each sample is computed: correct ~
    Bernoulli(confidence) for the ECE, label ~ probabilities for the classwise ECE. These errors are noise alone. An ECE
    near them cannot be distinguished from 0, and two ECEs near them cannot be distinguished from each other.

    Args:
        probs: [N, C] probabilities, floating point. Labels are drawn from each row divided by its sum.
        confidence: [N] in [0, 1], floating point, in place of ``probs``; without classwise ECE.
        figures: ECEs from :data:`FIGURES`; None is all that the input permits.
        n_bins: M, at least 1.
        n_resamples: R, at least 1.
        seed: random seed of the labels, at least 0. The result does not depend on device and memory.
        progress: as :func:`paired_bootstrap`.

    Returns:
        {figure: :class:`BiasFloor`}; NaN for N = 0.

    Raises:
        TypeError, ValueError: as :func:`paired_bootstrap`.

    Source: Broecker & Smith 2007, "Increasing the Reliability of Reliability Diagrams" (consistency resampling, here
    with fixed confidences); Vaicenavicius et al. 2019 (arXiv 1902.06977).

    Example:
        >>> probs = torch.tensor([[0.8, 0.2]]).repeat(200, 1)
        >>> floor = fk.bootstrap.bias_floor(probs)["ece_equal_width"]
        >>> round(floor.mean, 2)  # the ECE of a perfectly calibrated model is not 0
        0.02
        >>> floor.p_value(0.1) < 0.05, floor.p_value(0.02) < 0.05
        (True, False)
    """
    op = "bias_floor"
    progress = None if progress is None else flag(op, "progress", progress)
    if (probs is None) == (confidence is None):
        raise ValueError(f"{op}: expected either probs or confidence, got {'neither' if probs is None else 'both'}")
    errors = tuple(name for name in (FIGURES if confidence is None else TOP_CLASS_ONLY) if "ece" in name)
    figures = chosen_figures(op, figures, errors)
    n_resamples, n_bins, seed = (
        integer(op, "n_resamples", n_resamples, 1, MOST_RESAMPLES),
        integer(op, "n_bins", n_bins, 1, MOST_BINS),
        integer(op, "seed", seed, 0),
    )
    floors: dict[str, Tensor] = {
        figure: torch.empty(n_resamples, dtype=torch.float64, device="cpu") for figure in figures
    }
    if probs is not None:
        probs = as_probs(op, probs)
        if probs.dim() != 2:
            raise ValueError(f"{op}: probs must be [N, C], got shape {list(probs.shape)}")
        confidence = probs.amax(-1)
    confidence = as_tensor(confidence, f"{op}: confidence")
    if confidence.dim() != 1:
        raise ValueError(f"{op}: confidence must be [N], got shape {list(confidence.shape)}")
    confidence, _ = confidence_and_correct(op, None, None, confidence, torch.zeros_like(confidence))
    top = tuple(figure for figure in figures if figure != CLASSWISE)
    with ProgressBar(n_resamples * (bool(top) + (CLASSWISE in figures)), "bias floor", "set", progress) as bar:
        if top:
            for first, last, values in _top_floor(confidence, top, n_bins, n_resamples, seed):
                for figure, value in zip(top, values, strict=True):
                    floors[figure][first:last] = value.cpu()
                bar.update(last - first)
        if CLASSWISE in figures:
            for first, last, value in _classwise_floor(probs, n_bins, n_resamples, seed):
                floors[CLASSWISE][first:last] = value.cpu()
                bar.update(last - first)
    return {figure: BiasFloor(figure, samples) for figure, samples in floors.items()}


def _top_floor(
    confidence: Tensor, figures: tuple[str, ...], n_bins: int, n_resamples: int, seed: int
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """(first, last, one [last - first] tensor per figure) of labels with P(correct) = confidence."""
    n_samples = len(confidence)
    confidence = confidence.sort().values
    chance = confidence.to(torch.float64)
    # Each bin is a range of the sorted rows, and depends only on the confidences.
    cuts = []
    for figure in figures:
        estimator: Any = figure.removeprefix("ece_")
        count = reliability_bins(confidence=confidence, correct=chance, n_bins=n_bins, estimator=estimator).count
        # Rows in no bin have the lowest confidences.
        cuts.append(torch.nn.functional.pad(count.cumsum(0), (1, 0)) + (n_samples - count.sum()))
    for first, last in chunks(n_resamples, n_samples):
        correct = uniform_draws(n_samples, range(first, last), seed).to(confidence.device) < chance
        gap = prefix_sums(correct.to(torch.float64).sub_(chance))
        yield first, last, [gap[:, cut].diff(dim=1).abs().sum(1) / (n_samples or math.nan) for cut in cuts]


def _classwise_floor(probs: Tensor, n_bins: int, n_resamples: int, seed: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first, last, [last - first]) of labels drawn from the probabilities."""
    n_samples, n_classes = probs.shape
    edges = equal_width_edges(probs, n_bins)
    flat = (torch.searchsorted(edges, probs.contiguous()) - 1).clamp_(0, n_bins - 1)
    flat += torch.arange(n_classes, device=probs.device) * n_bins
    chance = probs.to(torch.float64)
    expected = chance.new_zeros(n_classes * n_bins).scatter_add_(0, flat.flatten(), chance.flatten())
    ladder = chance.cumsum(1)
    ladder /= ladder[:, -1:].clone()
    for first, last in chunks(n_resamples, max(n_samples, n_classes * n_bins)):
        draws = uniform_draws(n_samples, range(first, last), seed).to(probs.device)
        label = torch.searchsorted(ladder, draws.T.contiguous(), right=True).clamp_(max=n_classes - 1)
        index = flat.gather(1, label).T
        count = expected.new_zeros(last - first, len(expected))
        count.scatter_add_(1, index, expected.new_ones(()).expand(index.shape))
        yield first, last, (count - expected).abs_().sum(1) / (n_samples * n_classes or math.nan)
