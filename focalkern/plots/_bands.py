"""Bands of a reliability diagram: the sampling error of each bin."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import with_tensors
from focalkern._checks import MOST_RESAMPLES, integer
from focalkern.metrics import ReliabilityBins
from focalkern.plots._figure import checked_bins, checked_level

__all__ = ["ReliabilityBands", "reliability_bands"]


@dataclass(frozen=True)
class ReliabilityBands:
    """Bands of the accuracy of each bin. All are float64 [M], NaN for an empty bin.

    Attributes:
        lower, upper: bootstrap interval of the bin's accuracy.
        calibrated_lower, calibrated_upper: interval of the bin's accuracy if the classifier is perfectly calibrated.
        level: confidence level of both, a fraction.

    Example:
        >>> confidence, correct = torch.full((100,), 0.8), torch.arange(100) < 77
        >>> bins = fk.metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=1)
        >>> bands = fk.plots.reliability_bands(bins)
        >>> bool(bands.calibrated_lower < 0.8), bool(bands.calibrated_upper > 0.8)
        (True, True)
        >>> bands.inside(bins)
        tensor([True])
    """

    lower: Tensor
    upper: Tensor
    calibrated_lower: Tensor
    calibrated_upper: Tensor
    level: float

    def inside(self, bins: ReliabilityBins) -> Tensor:
        """Whether the accuracy of each bin lies in the band of a perfectly calibrated classifier.

        Args:
            bins: the bins from which the bands were computed.

        Returns:
            bool [M], False for an empty bin.

        Raises:
            RuntimeError: bins and bands have different numbers of bins.
        """
        accuracy = with_tensors(bins).accuracy.cpu()
        return (self.calibrated_lower <= accuracy) & (accuracy <= self.calibrated_upper)


def reliability_bands(
    bins: ReliabilityBins, *, level: float = 0.95, replicates: int = 2000, seed: int = 0
) -> ReliabilityBands:
    r"""Bootstrap interval of every bin's accuracy, and the band of a perfectly calibrated classifier.

    .. math::
        \text{interval}_b: \text{quantiles of the accuracy of bin } b

        \text{band}_b: \text{quantiles of } \tfrac{1}{n_b} \text{Binomial}(n_b, \text{conf}_b)

    The accuracies come from bootstrap resamples: N samples drawn with replacement, with the edges of the bins fixed. So
    a replicate consists of new counts of correct and wrong samples per bin, which are multinomial with the observed
    fractions; the samples themselves are not needed. If all samples of a bin are correct, or all wrong, the interval is
    a single point. This is a weakness of the bootstrap, not a sign of certainty; the band does not have it. The
    binomial treats all samples of a bin as having its mean confidence; the spread of their confidences would make the
    accuracy vary slightly less.

    Args:
        bins: one set of bins, not a batch.
        level: fraction of the replicates inside the bands, 0 < level < 1.
        replicates: number of replicates.
        seed: random seed; the same seed gives the same bands.

    Returns:
        :class:`ReliabilityBands`, on the CPU.

    Raises:
        ValueError: bins of a batch or without samples; a level outside (0, 1); replicates < 1.

    Source: Efron & Tibshirani 1993, *An Introduction to the Bootstrap*, chapter 13 (the interval); Bröcker & Smith
    2007, "Increasing the reliability of reliability diagrams" (the band).

    Example:
        >>> confidence, correct = torch.linspace(0.5, 1.0, 100), torch.arange(100) % 4 > 0
        >>> bins = fk.metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=2, estimator="equal_mass")
        >>> bands = fk.plots.reliability_bands(bins)
        >>> bands.inside(bins)  # accuracy 0.75 in both bins, mean confidence 0.62 and 0.88
        tensor([ True, False])
    """
    bins = checked_bins("reliability_bands", bins)
    level = checked_level("reliability_bands", level)
    replicates = integer("reliability_bands", "replicates", replicates, 1, MOST_RESAMPLES)
    rng = np.random.default_rng(integer("reliability_bands", "seed", seed) % 2**63)
    count = bins.count.cpu().numpy()
    filled = count > 0
    confidence, accuracy = (
        values.cpu().to(torch.float64).numpy()[filled].clip(0, 1) for values in (bins.confidence, bins.accuracy)
    )
    right = accuracy * count[filled]
    # Samples in no bin (equal_mass_interp) are drawn too.
    shares = np.concatenate([right, count[filled] - right, [bins.n_samples - count.sum()]]) / bins.n_samples
    drawn = rng.multinomial(bins.n_samples, shares / shares.sum(), size=replicates)  # [replicates, 2 * filled + 1]
    drawn_right, drawn_wrong = drawn[:, : len(right)], drawn[:, len(right) : -1]
    with np.errstate(invalid="ignore"):  # a bin without samples in a replicate has no accuracy in it
        resampled = drawn_right / (drawn_right + drawn_wrong)
    calibrated = rng.binomial(count[filled], confidence, size=(replicates, len(right))) / count[filled]
    tail = (1 - level) / 2

    def spread(values: np.ndarray) -> tuple[Tensor, Tensor]:
        both = np.full((2, len(count)), np.nan)
        if values.shape[1]:
            both[:, filled] = np.nanquantile(values, (tail, 1 - tail), axis=0)
        lower, upper = torch.from_numpy(both)
        return lower, upper

    # A bin without samples in every replicate (only if replicates is tiny) gets its own accuracy.
    missed = np.isnan(resampled).all(axis=0)
    resampled[:, missed] = accuracy[missed]
    return ReliabilityBands(*spread(resampled), *spread(calibrated), level)
