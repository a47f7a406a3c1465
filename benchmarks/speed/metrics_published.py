"""Comparisons with published code and with packages for calibration errors (metrics_peers.py)."""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern import metrics

N_BINS = 15


@dataclass
class Comparison:
    """One figure, computed twice."""

    library: str
    theirs: str  # the call of the peer
    ours: str  # the equivalent call of focalkern
    their_value: float
    our_value: float
    allowed: float  # difference, absolute
    note: str = ""

    @property
    def difference(self) -> float:
        return abs(self.their_value - self.our_value)

    @property
    def agrees(self) -> str:
        """``yes`` or ``NO``; ``-`` if they differ by definition on these rows; the note then gives the reason."""
        if self.difference <= min(self.allowed, 1e-6) or self.difference <= self.allowed < np.inf:
            return "yes"
        return "-" if self.allowed == np.inf else "NO"


def relplot(probs: Tensor, target: Tensor) -> Iterator[Comparison]:
    """The peer searches the bandwidth in steps of 2^-10 and replaces the integral by a sum over 200 points, or 10 /
    bandwidth. Its reflection counts the last of 1000 grid points once instead of twice, so rows within 1/1000 of 0 or 1
    lose up to half of their weight. The comparison excludes them.
    """
    library = importlib.import_module("relplot")
    confidence, predicted = probs.double().max(-1)
    inside = (confidence > 1e-3) & (confidence < 1 - 1e-3)
    confidence, correct = confidence[inside], (predicted == target)[inside]
    arrays = confidence.numpy(), correct.double().numpy()
    given = {"confidence": confidence, "correct": correct}
    left_out = len(target) - len(confidence)
    note = f"without {left_out} rows within 1/1000 of 0 or 1" if left_out else ""
    yield Comparison(
        "relplot",
        "smECE",
        "smooth_calibration_error(probs)",
        float(library.smECE(*arrays)),
        float(metrics.smooth_calibration_error(**given)),
        2.0**-9,
        note,
    )
    for sigma in (0.01, 0.05):
        ours = float(metrics.smooth_calibration_error(**given, bandwidth=sigma))
        yield Comparison(
            "relplot",
            f"smECE_sigma(sigma={sigma})",
            f"smooth_calibration_error(probs, bandwidth={sigma})",
            float(library.smECE_sigma(*arrays, sigma=sigma)),
            ours,
            # relplot gives the ends of [0, 1] the weight of an inner point, and many confidences are near 1.
            max(2e-4, 0.04 * ours),
            note,
        )


def uncertainty_calibration(probs: Tensor, target: Tensor) -> Iterator[Comparison]:
    """Bins (lo, hi]; equal-mass cuts halfway between two rows."""
    library = importlib.import_module("calibration")
    arrays = probs.double().numpy(), target.numpy()
    probs = probs.double()
    ties = len(target) - len(probs.amax(-1).unique())
    note = f"{ties} rows tie with another" if ties else ""
    calls: list[tuple[str, Callable[[], Any], str, Callable[..., Tensor], dict[str, Any], float, str]] = [
        (
            "get_ece",
            lambda: library.utils.get_ece(*arrays),
            "expected_calibration_error(probs)",
            metrics.expected_calibration_error,
            {},
            1e-9,
            "",
        ),
        (
            "get_ece_em",
            lambda: library.utils.get_ece_em(*arrays),
            "expected_calibration_error(probs, estimator='equal_mass')",
            metrics.expected_calibration_error,
            {"estimator": "equal_mass"},
            1e-9 + 2 * ties / len(target),
            note,
        ),
        (
            "get_ece(mode='marginal')",
            lambda: library.utils.get_ece(*arrays, mode="marginal"),
            "classwise_calibration_error(probs)",
            metrics.classwise_calibration_error,
            {},
            1e-9,
            "",
        ),
        (
            "lower_bound_scaling_top_ce(p=2, debias=True)",
            lambda: library.utils.lower_bound_scaling_top_ce(*arrays),
            "debiased_calibration_error(probs, estimator='equal_mass')",
            metrics.debiased_calibration_error,
            {"estimator": "equal_mass"},
            np.inf if ties else 1e-9,
            note,
        ),
        (
            "lower_bound_scaling_top_ce(p=2, debias=True, binning_scheme=get_equal_prob_bins)",
            lambda: library.utils.lower_bound_scaling_top_ce(*arrays, binning_scheme=library.utils.get_equal_prob_bins),
            "debiased_calibration_error(probs)",
            metrics.debiased_calibration_error,
            {},
            1e-9,
            "",
        ),
        (
            "get_ece_em(debias=True)",
            lambda: library.utils.get_ece_em(*arrays, debias=True),
            "debiased_calibration_error(probs, norm='l1', estimator='equal_mass')",
            metrics.debiased_calibration_error,
            {"norm": "l1", "estimator": "equal_mass"},
            # The peer takes the mean of 1000 draws: the tolerance is four standard errors of it, for bins with accuracy
            # 1/2.
            np.inf if ties else 4 * 0.5 / (len(target) * 1000) ** 0.5,
            note or "random there",
        ),
    ]
    for theirs, call, ours, function, options, allowed, words in calls:
        np.random.seed(0)
        try:
            value = float(call())
        except (ValueError, AssertionError):
            continue  # the peer needs two rows in every bin, and equal-mass bins without ties
        yield Comparison(
            "uncertainty-calibration",
            theirs,
            ours,
            value,
            float(function(probs, target, n_bins=N_BINS, **options)),
            allowed,
            words,
        )


def published_code(probs: Tensor, target: Tensor) -> Iterator[Comparison]:
    """The loops of the code that came with Mukhoti et al. 2020 (after Guo et al. 2017), from their description."""
    confidence, predicted = probs.max(-1)
    correct = predicted == target

    def error(edges: Tensor, values: Tensor, hits: Tensor) -> float:
        total = 0.0
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            inside = (values > low) & (values <= high)
            if inside.any():
                gap = values[inside].double().mean() - hits[inside].double().mean()
                total += float(gap.abs()) * float(inside.double().mean())
        return total

    uniform = torch.linspace(0, 1, N_BINS + 1, dtype=torch.float64).to(probs.dtype)
    n = len(target)
    adaptive = np.interp(np.linspace(0, n, N_BINS + 1), np.arange(n), confidence.sort().values.double().numpy())
    zeros = int((confidence == 0).sum())
    yield Comparison(
        "Mukhoti et al.",
        "ECELoss",
        "expected_calibration_error(probs)",
        error(uniform, confidence, correct),
        float(metrics.expected_calibration_error(probs, target)),
        1e-9 + zeros / n,
    )
    yield Comparison(
        "Mukhoti et al.",
        "AdaptiveECELoss",
        "expected_calibration_error(probs, estimator='equal_mass_interp')",
        error(torch.from_numpy(adaptive).to(probs.dtype), confidence, correct),
        float(metrics.expected_calibration_error(probs, target, estimator="equal_mass_interp")),
        1e-9,
    )
    classes = [error(uniform, probs[:, k], target == k) for k in range(probs.shape[1])]
    yield Comparison(
        "Mukhoti et al.",
        "ClasswiseECELoss",
        "classwise_calibration_error(probs)",
        float(np.mean(classes)),
        float(metrics.classwise_calibration_error(probs, target)),
        1e-9 + float((probs == 0).double().mean()),
        "a probability of exactly 0 is in no bin there" if bool((probs == 0).any()) else "",
    )
