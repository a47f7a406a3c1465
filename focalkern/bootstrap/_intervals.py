"""Bootstrap intervals, paired between calibrators."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import MOST_BINS, MOST_RESAMPLES, flag, integer, number, one_of, short
from focalkern._progress import ProgressBar
from focalkern.bootstrap._figures import FIGURES, HIGHER_IS_BETTER, NAMES_IN_WORDS, TOP_CLASS_ONLY, chosen_figures
from focalkern.bootstrap._resampling import ResampledRows, chunks, resample_weights

__all__ = ["METHODS", "Interval", "Method", "PairedBootstrap", "paired_bootstrap"]
Method = Literal["symmetric", "basic", "percentile"]

METHODS: tuple[Method, ...] = get_args(Method)
"""The names of the interval methods; the first is the default."""

# With fewer rows the true difference is outside of a bootstrap's interval far more often than 1 - level of the time.
_FEWEST = 20


@dataclass(frozen=True)
class Interval:
    """A metric with its interval. ``low <= high``; both are NaN if the metric is not finite.

    Attributes:
        estimate: the metric on the original rows.
        low, high: the ends of the interval. With ``"basic"`` the estimate of an ECE may lie above ``high``.

    Example:
        >>> interval = fk.bootstrap.Interval(estimate=-0.02, low=-0.03, high=-0.01)
        >>> interval.excludes_zero
        True
    """

    estimate: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of 0; False for NaN."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, eq=False)
class PairedBootstrap:
    """The result of :func:`paired_bootstrap` for K calibrators, F metrics and R resamples.

    Attributes:
        names: K names of calibrators.
        figures: F names of metrics from :data:`FIGURES`.
        estimates: [K, F] float64 on the CPU, the metrics on the original rows.
        replicates: [K, F, R] float64 on the CPU, the metrics on each resample; resample r has the same rows for every
            calibrator.
        n_samples, n_bins, level, method, seed: the arguments of the call.

    Example:
        >>> logits, target = torch.tensor([[4.0, 0.0]]).repeat(200, 1), (torch.arange(200) >= 160).long()
        >>> probs = {"as it is": logits.softmax(-1), "T = 2.9": (logits / 2.9).softmax(-1)}
        >>> found = fk.bootstrap.paired_bootstrap(probs, target, n_resamples=200)
        >>> found.n_resamples, found.wins("T = 2.9", "as it is", "nll")
        (200, True)
        >>> found.difference("T = 2.9", "as it is", "nll").high < 0 < found.interval("as it is", "nll").low
        True
        >>> found.describe("T = 2.9", "as it is", "accuracy").startswith("accuracy does not distinguish")
        True
    """

    names: tuple[str, ...]
    figures: tuple[str, ...]
    estimates: Tensor
    replicates: Tensor
    n_samples: int
    n_bins: int
    level: float
    method: str
    seed: int

    @property
    def n_resamples(self) -> int:
        """R, the number of resamples."""
        return self.replicates.shape[-1]

    def interval(self, name: str, figure: str) -> Interval:
        """The interval of a metric of one calibrator, clipped to the range of the metric (an ECE is at least 0).

        If all N rows are correct, or all are wrong, every resample has the same accuracy. The interval of the accuracy
        is then that of Clopper and Pearson, for example [((1 - level) / 2)^(1 / N), 1].

        Args:
            name: one of ``names``.
            figure: one of ``figures``.

        Returns:
            The :class:`Interval`.

        Raises:
            ValueError: an unknown name or figure.
        """
        i, j = self._index("interval", name), self._figure("interval", figure)
        found = self._interval(float(self.estimates[i, j]), self.replicates[i, j])
        if figure == "accuracy" and found.estimate in (0.0, 1.0):
            furthest = ((1 - self.level) / 2) ** (1 / self.n_samples)
            return Interval(found.estimate, *((furthest, 1.0) if found.estimate == 1 else (0.0, 1 - furthest)))
        highest = {"nll": math.inf, "brier": 2.0}.get(figure, 1.0)
        return Interval(found.estimate, *(min(max(end, 0.0), highest) for end in (found.low, found.high)))

    def difference(self, name: str, other: str, figure: str) -> Interval:
        """The interval of (metric of ``name``) - (metric of ``other``), over the same resamples.

        Args:
            name, other: two of ``names``.
            figure: one of ``figures``.

        Returns:
            The :class:`Interval`.

        Raises:
            ValueError: an unknown name or figure.
        """
        i, k = self._index("difference", name), self._index("difference", other)
        j = self._figure("difference", figure)
        return self._interval(
            float(self.estimates[i, j] - self.estimates[k, j]), self.replicates[i, j] - self.replicates[k, j]
        )

    def wins(self, name: str, other: str, figure: str) -> bool:
        """Whether ``name`` is better than ``other``: the interval of the difference excludes 0.

        Better means higher for accuracy and lower for all other metrics. The level holds for one pair and one metric:
        of many comparisons without a true difference, about the fraction 1 - level exclude 0 by chance. Use a higher
        ``level`` for many comparisons. With fewer than 20 rows intervals are too narrow, and nothing wins.

        Args:
            name, other: two of ``names``.
            figure: one of ``figures``.

        Returns:
            True or False; False for a difference that is NaN, and for fewer than 20 rows.

        Raises:
            ValueError: an unknown name or figure.
        """
        difference = self.difference(name, other, figure)
        if self.n_samples < _FEWEST:
            return False
        return difference.low > 0 if figure in HIGHER_IS_BETTER else difference.high < 0

    def describe(self, name: str, other: str, figure: str) -> str:
        """One sentence for a report that says whether ``name`` and ``other`` differ in a metric.

        Args:
            name, other: two of ``names``.
            figure: one of ``figures``.

        Returns:
            The sentence.

        Raises:
            ValueError: an unknown name or figure.
        """
        difference = self.difference(name, other, figure)
        words = NAMES_IN_WORDS[figure]
        if math.isnan(difference.low):
            return f"{words} of {name} and {other} cannot be compared: it is not finite for both, or has no rows."
        if self.n_samples < _FEWEST:
            return f"{words} of {name} and {other} cannot be compared: {self.n_samples} rows are too few."
        interval = f"{100 * self.level:g} % interval {difference.low:+.4f} to {difference.high:+.4f}"
        if not difference.excludes_zero:
            return (
                f"{words} does not distinguish {name} and {other}: the difference is {difference.estimate:+.4f}, "
                f"and its {interval} contains 0."
            )
        side = "better" if self.wins(name, other, figure) else "worse"
        return (
            f"{words} of {name} is {side} than that of {other} beyond chance: the difference is "
            f"{difference.estimate:+.4f}, {interval}."
        )

    def _interval(self, estimate: float, replicates: Tensor) -> Interval:
        if not math.isfinite(estimate) or not bool(replicates.isfinite().all()):
            return Interval(estimate, math.nan, math.nan)
        if self.method == "symmetric":
            spread = float(np.quantile((replicates - estimate).abs().numpy(), self.level))
            return Interval(estimate, estimate - spread, estimate + spread)
        tail = (1 - self.level) / 2
        low, high = np.quantile(replicates.numpy(), (tail, 1 - tail)).tolist()
        if self.method == "basic":
            low, high = 2 * estimate - high, 2 * estimate - low
        return Interval(estimate, low, high)

    def _index(self, op: str, name: str) -> int:
        if not isinstance(name, str) or name not in self.names:
            raise ValueError(f"PairedBootstrap.{op}: name must be one of {', '.join(self.names)}, got {short(name)}")
        return self.names.index(name)

    def _figure(self, op: str, figure: str) -> int:
        one_of(f"PairedBootstrap.{op}", "figure", figure, self.figures)
        return self.figures.index(figure)


def paired_bootstrap(
    probs: Mapping[str, Any] | None = None,
    target: Any = None,
    *,
    log: bool = False,
    confidence: Mapping[str, Any] | None = None,
    correct: Any = None,
    figures: Sequence[str] | None = None,
    n_bins: int = 15,
    n_resamples: int = 1000,
    level: float = 0.95,
    method: Method = "symmetric",
    seed: int = 0,
    progress: bool | None = None,
) -> PairedBootstrap:
    r"""Intervals for every metric of every calibrator, and for the differences between calibrators.

    Resample r draws N rows with replacement. The metrics of :mod:`focalkern.metrics` on those rows are the replicates
    from which :class:`PairedBootstrap` computes intervals. The resamples depend only on N and ``seed``: they are the
    same for every calibrator, device, and amount of memory.

    The correctness of a sample is given as in :mod:`focalkern.metrics`: by ``probs`` and ``target``; or by ``probs``,
    ``target`` and ``correct``, if the argmax of the logits decides (the probabilities of a saturated row may tie); or,
    without probabilities, by ``confidence`` and ``correct``, without NLL, Brier score and classwise ECE.

    Memory: the numbers per row and a few times 32 MiB. The classwise ECE also needs two float64 copies of the
    probabilities of one calibrator. Each item of the mapping is accessed once and released before the next, so a
    mapping that computes its items on access never holds all of them in memory.

    Args:
        probs: {name: [N, C] probabilities}, floating point, or log-probabilities with ``log=True``.
        target: [N] class indices, integer.
        log: whether ``probs`` holds log-probabilities.
        confidence: {name: [N] in [0, 1]}, floating point, in place of ``probs``.
        correct: [N], bool or numbers in [0, 1]; or {name: [N]} if calibrators change the predicted class.
        figures: metrics from :data:`FIGURES`; None is all that the inputs permit.
        n_bins: M of every calibration error, at least 1.
        n_resamples: R, at least 1; a few hundred for exploration, 1000 or more for publication.
        level: confidence level of the intervals, in (0, 1).
        method: ``"symmetric"``, ``"basic"`` or ``"percentile"``; see the top of this module.
        seed: random seed of the resamples, at least 0.
        progress: a tqdm bar on stderr: True shows it, False does not, None shows it after two seconds if stderr is a
            terminal.

    Returns:
        :class:`PairedBootstrap`. Every metric and interval is NaN for N = 0.

    Raises:
        TypeError: dtype or kind of an argument.
        ValueError: shape, value or option of an argument; a metric that the inputs do not permit.
        IndexError: a target outside [0, C).

    Source: Efron & Tibshirani 1993, "An Introduction to the Bootstrap"; see the top of this module.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]]).repeat(200, 1)
        >>> target = (torch.arange(200) >= 160).long()  # correct in 160 of 200 rows
        >>> probs = {"as it is": logits.softmax(-1), "T = 2.9": (logits / 2.9).softmax(-1)}
        >>> found = fk.bootstrap.paired_bootstrap(probs, target, n_resamples=200)
        >>> found.wins("T = 2.9", "as it is", "nll")
        True
        >>> round(found.interval("T = 2.9", "nll").estimate, 4)
        0.5004
    """
    op = "paired_bootstrap"
    names = _names(op, probs, confidence)
    figures = chosen_figures(op, figures, FIGURES if probs is not None else TOP_CLASS_ONLY)
    n_resamples, n_bins, seed = (
        integer(op, "n_resamples", n_resamples, 1, MOST_RESAMPLES),
        integer(op, "n_bins", n_bins, 1, MOST_BINS),
        integer(op, "seed", seed, 0),
    )
    level = number(op, "level", level)
    if not 0 < level < 1:
        raise ValueError(f"{op}: level must be in (0, 1), got {level}")
    one_of(op, "method", method, METHODS)
    log = flag(op, "log", log)
    progress = None if progress is None else flag(op, "progress", progress)
    estimates = torch.empty(len(names), len(figures), dtype=torch.float64, device="cpu")
    replicates = torch.empty(len(names), len(figures), n_resamples, dtype=torch.float64, device="cpu")
    n_samples = None
    bar = ProgressBar(len(names) * n_resamples, "bootstrap", "resample", progress)
    with bar:
        for k, name in enumerate(names):
            rows = ResampledRows(op, name, probs, target, log, confidence, correct, figures, n_bins)
            if n_samples is not None and rows.n_samples != n_samples:
                raise ValueError(
                    f"{op}: every calibrator must have the same rows, got {rows.n_samples} for {name!r} and "
                    f"{n_samples} for {names[0]!r}"
                )
            n_samples = rows.n_samples
            whole = torch.ones(1, n_samples, dtype=torch.float64, device=rows.device)
            estimates[k] = rows.figures_of(whole)[:, 0].cpu()
            for first, last in chunks(n_resamples, rows.width):
                weights = resample_weights(n_samples, range(first, last), seed).to(rows.device)
                replicates[k, :, first:last] = rows.figures_of(weights).cpu()
                bar.update(last - first)
            del rows
    return PairedBootstrap(
        names=names,
        figures=figures,
        estimates=estimates,
        replicates=replicates,
        n_samples=n_samples or 0,
        n_bins=n_bins,
        level=float(level),
        method=method,
        seed=seed,
    )


def _names(op: str, probs: Any, confidence: Any) -> tuple[str, ...]:
    if (probs is None) == (confidence is None):
        raise ValueError(f"{op}: expected either probs or confidence, got {'neither' if probs is None else 'both'}")
    given = probs if confidence is None else confidence
    if not isinstance(given, Mapping):
        kind = "probs" if confidence is None else "confidence"
        raise TypeError(f"{op}: {kind} must map names to tensors, got {type(given).__name__}; pass {{'name': {kind}}}")
    if not given:
        raise ValueError(f"{op}: expected at least one calibrator, got none")
    return tuple(given)
