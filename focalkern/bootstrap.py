r"""How far to trust a figure: paired bootstrap intervals, and the calibration error of a perfectly calibrated model.

Rows are drawn again with replacement, N out of N, and every figure is computed anew on each such set. All calibrators
see the same sets (the sets depend on N and the seed only), so the spread of a *difference* between two of them is free
of the luck that they share.

What an interval of a calibration error means
---------------------------------------------
ECE cannot be negative, so noise raises it: a perfectly calibrated model scores above 0, the more the fewer rows there
are per bin (:func:`bias_floor` says how much). Resampling adds the same noise once more, so the replicates of an ECE
lie above the ECE itself, and their plain quantiles hardly ever contain the ECE that infinitely many rows would have
when that is small. ``method`` chooses what is done about it, with t the figure on the rows as they are:

``"symmetric"`` (default)
    t -+ the ``level`` quantile of \|replicate - t\|. What noise may do, bias included, is allowed for on both sides, so
    the interval contains t, and a difference between two calibrators excludes 0 only where it is larger than what
    resampling does to it. Conservative for small calibration errors, and for large ones and for means (accuracy, NLL,
    Brier score) no different from the others.
``"basic"``
    [2 t - high quantile, 2 t - low quantile]: what resampling added to t is taken off t. Nearest of the three to the
    ECE of infinitely many rows, but it may lie below t, and of two calibrators that are equally good it calls one
    better far too often.
``"percentile"``
    The quantiles themselves.

There is no bias-corrected (BCa) interval: its correction is estimated by how many replicates lie below t, which for a
small ECE are next to none.

None of them reaches 0 as often as it should where a model *is* perfectly calibrated, because the bootstrap fails on
the border of what a figure can be. That question has its own answer, :meth:`BiasFloor.p_value`. For the same reason the
difference between a calibrated and a miscalibrated model comes out too small, and its interval with it: that errs on
the side of no win. Where two calibrators differ in how sharp their confidences are, so do their floors, and with them
the ECEs that are compared: look at both. ``python -m benchmarks.bench_bootstrap`` counts all of this.

Equal-mass bins are made anew in every resample, as they would be for another set of rows; equal-width bins are where
they are.

Sources: Efron & Tibshirani, "An Introduction to the Bootstrap", 1993; Davison & Hinkley, "Bootstrap Methods and their
Application", 1997, section 5.2 (the basic interval); Hall 1988, "On symmetric bootstrap confidence intervals"; Kumar,
Liang & Ma 2019 (arXiv 1909.10155) and Roelofs et al. 2022 (arXiv 2012.08668) on the bias of ECE; Broecker & Smith,
"Increasing the Reliability of Reliability Diagrams", 2007 (the figure of a calibrated model, by drawing the outcomes
from the forecasts).
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from focalkern import metrics
from focalkern._checks import MOST_BINS, MOST_RESAMPLES, flag, integer, number, one_of, short

__all__ = ["FIGURES", "METHODS", "BiasFloor", "Interval", "PairedBootstrap", "bias_floor", "paired_bootstrap"]

FIGURES = (
    "accuracy",
    "nll",
    "brier",
    "ece_equal_width",
    "ece_equal_mass",
    "ece_equal_mass_interp",
    "classwise_ece_equal_width",
)
"""The figures that can be resampled. Of these, confidences alone (without probabilities) have accuracy and ECE."""

_WORDS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier score",
    "ece_equal_width": "ECE (equal_width)",
    "ece_equal_mass": "ECE (equal_mass)",
    "ece_equal_mass_interp": "ECE (equal_mass_interp)",
    "classwise_ece_equal_width": "classwise ECE (equal_width)",
}

Method = Literal["symmetric", "basic", "percentile"]
METHODS: tuple[Method, ...] = get_args(Method)

_CLASSWISE = "classwise_ece_equal_width"
_TOP_ONLY = ("accuracy", "ece_equal_width", "ece_equal_mass", "ece_equal_mass_interp")
_HIGHER_IS_BETTER = ("accuracy",)

_PATIENCE = 2.0  # seconds before the progress bar shows

# Weights of rows that are in memory together; the work space is a few times as many float64 numbers.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Interval:
    """A figure and how far it may be off. ``low <= high``; both are NaN where the figure is not finite.

    Attributes:
        estimate: the figure on the rows as they are.
        low, high: the ends of the interval. Under ``"basic"`` the estimate of an ECE may lie above ``high``.

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
    """What :func:`paired_bootstrap` found for K calibrators, F figures and R resamples.

    Attributes:
        names: K names of calibrators.
        figures: F names out of :data:`FIGURES`.
        estimates: [K, F] float64 on the CPU, the figures on the rows as they are.
        replicates: [K, F, R] float64 on the CPU, the figures on each resample; resample r is the same rows for every
            calibrator.
        n_samples, n_bins, level, method, seed: as they were asked for.

    Example:
        >>> logits, target = torch.tensor([[4.0, 0.0]]).repeat(200, 1), (torch.arange(200) >= 160).long()
        >>> probs = {"as it is": logits.softmax(-1), "T = 2.9": (logits / 2.9).softmax(-1)}
        >>> found = fk.bootstrap.paired_bootstrap(probs, target, n_resamples=200)
        >>> found.n_resamples, found.wins("T = 2.9", "as it is", "nll")
        (200, True)
        >>> found.difference("T = 2.9", "as it is", "nll").high < 0 < found.interval("as it is", "nll").low
        True
        >>> found.in_words("T = 2.9", "as it is", "accuracy").startswith("accuracy does not tell")
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
        """The interval of one calibrator's figure. Ends that no figure can have (an ECE below 0) are cut.

        Args:
            name: of ``names``.
            figure: of ``figures``.

        Returns:
            The :class:`Interval`.

        Raises:
            ValueError: an unknown name or figure.
        """
        i, j = self._index("interval", name), self._figure("interval", figure)
        found = self._interval(float(self.estimates[i, j]), self.replicates[i, j])
        highest = {"nll": math.inf, "brier": 2.0}.get(figure, 1.0)
        return Interval(found.estimate, *(min(max(end, 0.0), highest) for end in (found.low, found.high)))

    def difference(self, name: str, other: str, figure: str) -> Interval:
        """The interval of (figure of ``name``) - (figure of ``other``), over the same resamples.

        Args:
            name, other: of ``names``.
            figure: of ``figures``.

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
        """Whether ``name`` is better than ``other`` beyond doubt: the interval of the difference excludes 0.

        Better is higher for accuracy and lower for everything else. One pair and one figure at a time: among many,
        one in 1 / (1 - level) excludes 0 by chance. Ask for a higher ``level`` where many are compared.

        Args:
            name, other: of ``names``.
            figure: of ``figures``.

        Returns:
            True or False; False for a difference that is NaN.

        Raises:
            ValueError: an unknown name or figure.
        """
        difference = self.difference(name, other, figure)
        return difference.low > 0 if figure in _HIGHER_IS_BETTER else difference.high < 0

    def in_words(self, name: str, other: str, figure: str) -> str:
        """One sentence on whether ``name`` and ``other`` differ in a figure, for the reader of a table.

        Args:
            name, other: of ``names``.
            figure: of ``figures``.

        Returns:
            The sentence.

        Raises:
            ValueError: an unknown name or figure.
        """
        difference = self.difference(name, other, figure)
        words = _WORDS[figure]
        if math.isnan(difference.low):
            return f"{words} of {name} and {other} cannot be compared: it is not finite for both, or has no rows."
        interval = f"{100 * self.level:g} % interval {difference.low:+.4f} to {difference.high:+.4f}"
        if not difference.excludes_zero:
            return (
                f"{words} does not tell {name} and {other} apart: the difference is {difference.estimate:+.4f}, "
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


@dataclass(frozen=True, eq=False)
class BiasFloor:
    """The calibration error that a perfectly calibrated model with the same confidences scores.

    Attributes:
        figure: its name.
        samples: [R] float64 on the CPU, one score per simulated set of labels.

    Example:
        >>> floor = fk.bootstrap.bias_floor(torch.tensor([[0.8, 0.2]]).repeat(200, 1))["ece_equal_width"]
        >>> round(floor.mean, 2), floor.quantile(0.95) > floor.mean
        (0.02, True)
        >>> round(floor.p_value(0.5), 3), "is more than noise" in floor.in_words(0.5)
        (0.001, True)
    """

    figure: str
    samples: Tensor

    @property
    def mean(self) -> float:
        """The mean of the simulated scores, a fraction."""
        return float(self.samples.mean())

    def quantile(self, q: float) -> float:
        """The score that a fraction ``q`` of the simulated sets does not exceed.

        Args:
            q: a fraction, in [0, 1].

        Returns:
            The score, a fraction; NaN without rows.

        Raises:
            ValueError: ``q`` outside [0, 1].
        """
        return float(np.quantile(self.samples.numpy(), q))

    def p_value(self, observed: float) -> float:
        """How often a perfectly calibrated model scores ``observed`` or more: (1 + how many do) / (1 + R).

        Small: ``observed`` is no mere noise, the model is miscalibrated. Not small: it may be calibrated.

        Args:
            observed: an error of the same figure, a fraction.

        Returns:
            The p-value, in (0, 1]; NaN without rows.
        """
        if math.isnan(observed) or bool(self.samples.isnan().any()):
            return math.nan
        return (1 + int((self.samples >= observed).sum())) / (1 + len(self.samples))

    def in_words(self, observed: float) -> str:
        """One sentence on whether ``observed`` is more than noise, for the reader of a table.

        Args:
            observed: an error of the same figure, a fraction.

        Returns:
            The sentence.
        """
        if math.isnan(self.p_value(observed)):
            return f"{_WORDS[self.figure]}: there are no rows."
        floor = (
            f"a perfectly calibrated model with these confidences scores {self.mean:.4f} on average, and at most "
            f"{self.quantile(0.95):.4f} on 95 of 100 sets of this size"
        )
        verdict = "more than noise" if self.p_value(observed) <= 0.05 else "not to be told from noise"
        return f"{_WORDS[self.figure]} of {observed:.4f} is {verdict}: {floor}."


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
    r"""Intervals for every figure of every calibrator, and for the differences between them.

    Resample r draws N rows with replacement; a figure is computed on those rows as :mod:`focalkern.metrics` would,
    which gives the replicates that :class:`PairedBootstrap` makes intervals of. The resamples depend on N and ``seed``
    only: they are the same for every calibrator, device, and amount of memory.

    What is a sample's correctness is said as in :mod:`focalkern.metrics`: by ``probs`` and ``target``; or by ``probs``,
    ``target`` and ``correct``, where the argmax of the logits decided (a saturated row may tie); or, without
    probabilities, by ``confidence`` and ``correct``, which have no NLL, Brier score and classwise ECE.

    Memory: the per-row figures and a few times 32 MiB; beside that, for the classwise ECE, two copies of one
    calibrator's probabilities in float64. Each item of the mapping is asked for once and dropped before the next, so a
    mapping that computes its items on access never has all of them in memory.

    Args:
        probs: {name: [N, C] probabilities}, floating point, or log-probabilities with ``log=True``.
        target: [N] class indices, integer.
        log: what ``probs`` holds.
        confidence: {name: [N] in [0, 1]}, floating point, in place of ``probs``.
        correct: [N], bool or numbers in [0, 1], or {name: [N]} where calibrators change the predicted class.
        figures: from :data:`FIGURES`; by default all that the inputs have.
        n_bins: M of every calibration error, at least 1.
        n_resamples: R, at least 1; a few hundred for a look, 1000 or more for a table.
        level: the fraction of such intervals that contain what they are for, in (0, 1).
        method: ``"symmetric"``, ``"basic"`` or ``"percentile"``; see the top of this module.
        seed: of the resamples, at least 0.
        progress: a tqdm bar on stderr: True, False, or None for one after two seconds where stderr is a terminal.

    Returns:
        :class:`PairedBootstrap`. Every figure and interval is NaN for N = 0.

    Raises:
        TypeError: dtype or kind of an argument.
        ValueError: shape, value or option of an argument; a figure that the inputs do not have.
        IndexError: a target outside [0, C).

    Source: Efron & Tibshirani 1993, "An Introduction to the Bootstrap"; see the top of this module.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0]]).repeat(200, 1)
        >>> target = (torch.arange(200) >= 160).long()  # right in 160 of 200 rows
        >>> probs = {"as it is": logits.softmax(-1), "T = 2.9": (logits / 2.9).softmax(-1)}
        >>> found = fk.bootstrap.paired_bootstrap(probs, target, n_resamples=200)
        >>> found.wins("T = 2.9", "as it is", "nll")
        True
        >>> round(found.interval("T = 2.9", "nll").estimate, 4)
        0.5004
    """
    op = "paired_bootstrap"
    names = _names(op, probs, confidence)
    figures = _figures(op, figures, FIGURES if probs is not None else _TOP_ONLY)
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
    estimates = torch.empty(len(names), len(figures), dtype=torch.float64)
    replicates = torch.empty(len(names), len(figures), n_resamples, dtype=torch.float64)
    n_samples = None
    bar = _Progress(len(names) * n_resamples, "bootstrap", "resample", progress)
    with bar:
        for k, name in enumerate(names):
            rows = _Rows(op, name, probs, target, log, confidence, correct, figures, n_bins)
            if n_samples is not None and rows.n_samples != n_samples:
                raise ValueError(
                    f"{op}: every calibrator must have the same rows, got {rows.n_samples} for {name!r} and "
                    f"{n_samples} for {names[0]!r}"
                )
            n_samples = rows.n_samples
            whole = torch.ones(1, n_samples, dtype=torch.float64, device=rows.device)
            estimates[k] = rows.figures_of(whole)[:, 0].cpu()
            chunk = max(1, _CHUNK // max(1, rows.width))
            for first in range(0, n_resamples, chunk):
                last = min(first + chunk, n_resamples)
                weights = _weights(n_samples, range(first, last), seed).to(rows.device)
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

    Labels are drawn from the model's own word, R times, and scored against it: ECE with correct ~
    Bernoulli(confidence), classwise ECE with label ~ probabilities. What comes out is noise and nothing else: an ECE
    near it cannot be told from 0, and two ECEs near it cannot be told apart by their size.

    Args:
        probs: [N, C] probabilities, floating point; rows are renormalised.
        confidence: [N] in [0, 1], floating point, in place of ``probs``; has no classwise ECE.
        figures: ECEs from :data:`FIGURES`; by default all that the input has.
        n_bins: M, at least 1.
        n_resamples: R, at least 1.
        seed: of the labels, at least 0. The result does not depend on device and memory.
        progress: as :func:`paired_bootstrap`.

    Returns:
        {figure: :class:`BiasFloor`}; NaN for N = 0.

    Raises:
        TypeError, ValueError: as :func:`paired_bootstrap`.

    Source: Broecker & Smith 2007, "Increasing the Reliability of Reliability Diagrams" (consistency resampling, here
    with the confidences as they are); Vaicenavicius et al. 2019 (arXiv 1902.06977).

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
    errors = tuple(name for name in (FIGURES if confidence is None else _TOP_ONLY) if "ece" in name)
    figures = _figures(op, figures, errors)
    n_resamples, n_bins, seed = (
        integer(op, "n_resamples", n_resamples, 1, MOST_RESAMPLES),
        integer(op, "n_bins", n_bins, 1, MOST_BINS),
        integer(op, "seed", seed, 0),
    )
    floors: dict[str, Tensor] = {figure: torch.empty(n_resamples, dtype=torch.float64) for figure in figures}
    if probs is not None:
        probs = metrics._as_probs(op, probs)
        if probs.dim() != 2:
            raise ValueError(f"{op}: probs must be [N, C], got shape {list(probs.shape)}")
        confidence = probs.amax(-1)
    confidence = metrics.as_tensor(confidence, f"{op}: confidence")
    if confidence.dim() != 1:
        raise ValueError(f"{op}: confidence must be [N], got shape {list(confidence.shape)}")
    confidence, _ = metrics._confidence_and_correct(op, None, None, confidence, torch.zeros_like(confidence))
    top = tuple(figure for figure in figures if figure != _CLASSWISE)
    with _Progress(n_resamples * (bool(top) + (_CLASSWISE in figures)), "bias floor", "set", progress) as bar:
        if top:
            for first, last, values in _top_floor(confidence, top, n_bins, n_resamples, seed):
                for figure, value in zip(top, values, strict=True):
                    floors[figure][first:last] = value.cpu()
                bar.update(last - first)
        if _CLASSWISE in figures:
            for first, last, value in _classwise_floor(probs, n_bins, n_resamples, seed):
                floors[_CLASSWISE][first:last] = value.cpu()
                bar.update(last - first)
    return {figure: BiasFloor(figure, samples) for figure, samples in floors.items()}


class _Rows:
    """One calibrator, in the form in which its figures are sums over weighted rows."""

    def __init__(
        self,
        op: str,
        name: str,
        probs: Mapping[str, Any] | None,
        target: Any,
        log: bool,
        confidence: Mapping[str, Any] | None,
        correct: Any,
        figures: tuple[str, ...],
        n_bins: int,
    ) -> None:
        op = f"{op}: {name!r}"
        if isinstance(correct, Mapping):
            if name not in correct:
                raise ValueError(
                    f"{op}: correct must have an entry for every calibrator, got {', '.join(map(str, correct))[:80]}"
                )
            correct = correct[name]
        per_row: dict[str, Tensor] = {}
        self.classwise: _Classwise | None = None
        if probs is not None:
            given, labels = metrics._probs_and_target(op, probs[name], target, log=log)
            if given.dim() != 2:
                raise ValueError(f"{op}: probs must be [N, C], got shape {list(given.shape)}")
            if correct is None:
                correct = given.argmax(-1) == labels
            if "nll" in figures:
                of_target = given.gather(-1, labels.unsqueeze(-1)).squeeze(-1).to(torch.float64)
                per_row["nll"] = -of_target if log else -of_target.log()
            given = given.exp() if log else given
            top: Any = given.amax(-1)
            if "brier" in figures or _CLASSWISE in figures:
                residual = given.to(torch.float64, copy=True)
                index = labels.unsqueeze(-1)
                residual.scatter_add_(-1, index, residual.new_full((), -1.0).expand(index.shape))
                if "brier" in figures:
                    per_row["brier"] = residual.square().sum(-1)
                if _CLASSWISE in figures:
                    self.classwise = _Classwise(given, residual, n_bins)
        else:
            assert confidence is not None
            if target is not None:
                raise ValueError(f"{op}: confidence goes with correct, got target")
            top = confidence[name]
        top, hits = metrics._confidence_and_correct(op, None, None, top, correct)
        if top.dim() != 1:
            raise ValueError(f"{op}: confidence must be [N], got shape {list(top.shape)}")
        if "accuracy" in figures:
            per_row["accuracy"] = hits
        self.figures = figures
        self.n_bins = n_bins
        self.n_samples = len(top)
        self.device = top.device
        # One infinite term makes an infinite mean, where it is drawn; 0 * inf must not make a NaN where it is not.
        columns = torch.stack(list(per_row.values()), 1) if per_row else top.new_empty(len(top), 0, dtype=torch.float64)
        infinite = columns == math.inf
        self.columns = torch.where(infinite, 0.0, columns)
        self.infinite = infinite.to(torch.float64) if bool(infinite.any()) else None
        self.names = tuple(per_row)
        self.sorted, self.order = top.sort(stable=True)
        self.gap = (hits - top.to(torch.float64))[self.order]

    @property
    def width(self) -> int:
        """Numbers of work space per resample, but for a small factor."""
        return max(self.n_samples, self.classwise.width if self.classwise else 0)

    def figures_of(self, weights: Tensor) -> Tensor:
        """[F, R]: the figures with row i taken weights[r, i] times; weights is [R, N] float64 and sums to N."""
        if self.n_samples == 0:
            return weights.new_full((len(self.figures), len(weights)), math.nan)
        found: dict[str, Tensor] = {}
        means = weights @ self.columns / self.n_samples
        if self.infinite is not None:
            means = torch.where(weights @ self.infinite > 0, math.inf, means)
        found.update(zip(self.names, means.unbind(1), strict=True))
        if any(figure.startswith("ece_") for figure in self.figures):
            # Row i of the sorted confidences fills the places count[:, i] to count[:, i + 1] of the sorted resample.
            ordered = weights[:, self.order]
            count = _prefix_sums(ordered)
            gap = _prefix_sums(ordered.mul_(self.gap))
            for figure in self.figures:
                if figure.startswith("ece_"):
                    cuts = getattr(self, f"_{figure.removeprefix('ece_')}")(count, gap)
                    found[figure] = cuts.diff(dim=1).abs().sum(1) / self.n_samples
        if self.classwise is not None:
            found[_CLASSWISE] = self.classwise.error(weights)
        return torch.stack([found[figure] for figure in self.figures])

    # Each returns the sum of correct - confidence up to every cut between bins, [R, M + 1].

    def _equal_width(self, count: Tensor, gap: Tensor) -> Tensor:
        edges = metrics._equal_width_edges(self.sorted, self.n_bins)[1:-1]
        inner = torch.searchsorted(self.sorted, edges, right=True)
        return gap[:, torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=self.n_samples)]

    def _equal_mass(self, count: Tensor, gap: Tensor) -> Tensor:
        size, larger = divmod(self.n_samples, self.n_bins)
        places = torch.arange(self.n_bins + 1, device=self.device)
        places = (places * size + places.clamp(max=larger)).to(torch.float64)
        row = self._row_at(places, count)
        # A cut may fall among the copies of one row.
        inside = (places - count.gather(1, row)) * torch.nn.functional.pad(self.gap, (0, 1))[row]
        return gap.gather(1, row) + inside

    def _equal_mass_interp(self, count: Tensor, gap: Tensor) -> Tensor:
        left, right, fraction = metrics._interp_places(self.n_samples, self.n_bins, self.device)
        ordered = self.sorted.to(torch.float64)
        low, high = (ordered[self._row_at(places.to(torch.float64), count)] for places in (left, right))
        edges = ((high - low) * fraction + low).to(self.sorted.dtype)
        return gap.gather(1, torch.searchsorted(self.sorted, edges, right=True))

    def _row_at(self, places: Tensor, count: Tensor) -> Tensor:
        """[R, n]: the sorted row at each place of the sorted resample; N for the place N, behind the last."""
        inclusive = count[:, 1:].contiguous()
        return torch.searchsorted(inclusive, places.expand(len(count), -1).contiguous(), right=True)


class _Classwise:
    """Classwise ECE, equal width, of weighted rows.

    Of the N * C probabilities most are in the first bin. Only the others are scattered into their bins; the first bin
    of a class is the rest of the class's sum, which is a product of matrices.
    """

    def __init__(self, probs: Tensor, residual: Tensor, n_bins: int) -> None:
        n_classes = probs.shape[1]
        edges = metrics._equal_width_edges(probs, n_bins)
        row, of_class = (probs > edges[1]).nonzero(as_tuple=True)
        above = probs[row, of_class]
        index = (torch.searchsorted(edges, above) - 1).clamp_(0, n_bins - 1)
        self.residual = residual
        self.shape = (n_classes, n_bins)
        self.row, self.bin, self.value = row, of_class * n_bins + index, residual[row, of_class].unsqueeze(1)

    @property
    def width(self) -> int:
        return max(self.shape[0] * self.shape[1], len(self.row))

    def error(self, weights: Tensor) -> Tensor:
        bins = weights.new_zeros(self.shape[0] * self.shape[1], len(weights))
        bins.index_add_(0, self.bin, weights.T.contiguous()[self.row] * self.value)
        bins = bins.view(*self.shape, len(weights))
        bins[:, 0] += (weights @ self.residual).T - bins.sum(1)
        result: Tensor = bins.abs_().sum((0, 1)) / (len(self.residual) * self.shape[0])
        return result


def _prefix_sums(values: Tensor) -> Tensor:
    """[R, N + 1] from [R, N]: the sum of the first i values at i."""
    result = values.new_zeros(values.shape[0], values.shape[1] + 1)
    torch.cumsum(values, 1, out=result[:, 1:])
    return result


def _weights(n_samples: int, resamples: range, seed: int) -> Tensor:
    """[R, N] float64 on the CPU: how often each row is in each resample.

    A resample has a random stream of its own, so that it is the same whatever it is computed together with.
    """
    result = torch.zeros(len(resamples), n_samples, dtype=torch.float64)
    if n_samples:
        for row, resample in zip(result.numpy(), resamples, strict=True):
            drawn = np.random.default_rng((seed, resample)).integers(n_samples, size=n_samples)
            row[:] = np.bincount(drawn, minlength=n_samples)
    return result


def _uniform(n_samples: int, resamples: range, seed: int) -> Tensor:
    """[R, N] float64 on the CPU, in [0, 1)."""
    result = torch.empty(len(resamples), n_samples, dtype=torch.float64)
    for row, resample in zip(result.numpy(), resamples, strict=True):
        np.random.default_rng((seed, resample)).random(out=row)
    return result


def _top_floor(
    confidence: Tensor, figures: tuple[str, ...], n_bins: int, n_resamples: int, seed: int
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """(first, last, one [last - first] tensor per figure) of labels with P(correct) = confidence."""
    n_samples = len(confidence)
    confidence = confidence.sort().values
    chance = confidence.to(torch.float64)
    # The bins are those of the confidences, whatever the labels are: runs of the sorted rows.
    cuts = []
    for figure in figures:
        estimator: Any = figure.removeprefix("ece_")
        count = metrics.reliability_bins(
            confidence=confidence, correct=chance, n_bins=n_bins, estimator=estimator
        ).count
        # Rows in no bin are the lowest.
        cuts.append(torch.nn.functional.pad(count.cumsum(0), (1, 0)) + (n_samples - count.sum()))
    chunk = max(1, _CHUNK // max(1, n_samples))
    for first in range(0, n_resamples, chunk):
        last = min(first + chunk, n_resamples)
        correct = _uniform(n_samples, range(first, last), seed).to(confidence.device) < chance
        gap = _prefix_sums(correct.to(torch.float64).sub_(chance))
        yield first, last, [gap[:, cut].diff(dim=1).abs().sum(1) / (n_samples or math.nan) for cut in cuts]


def _classwise_floor(probs: Tensor, n_bins: int, n_resamples: int, seed: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first, last, [last - first]) of labels drawn from the probabilities."""
    n_samples, n_classes = probs.shape
    edges = metrics._equal_width_edges(probs, n_bins)
    flat = (torch.searchsorted(edges, probs.contiguous()) - 1).clamp_(0, n_bins - 1)
    flat += torch.arange(n_classes, device=probs.device) * n_bins
    chance = probs.to(torch.float64)
    expected = chance.new_zeros(n_classes * n_bins).scatter_add_(0, flat.flatten(), chance.flatten())
    ladder = chance.cumsum(1)
    ladder /= ladder[:, -1:].clone()
    chunk = max(1, _CHUNK // max(1, n_samples, n_classes * n_bins))
    for first in range(0, n_resamples, chunk):
        last = min(first + chunk, n_resamples)
        draws = _uniform(n_samples, range(first, last), seed).to(probs.device)
        label = torch.searchsorted(ladder, draws.T.contiguous(), right=True).clamp_(max=n_classes - 1)
        index = flat.gather(1, label).T
        count = expected.new_zeros(last - first, len(expected))
        count.scatter_add_(1, index, expected.new_ones(()).expand(index.shape))
        yield first, last, (count - expected).abs_().sum(1) / (n_samples * n_classes or math.nan)


class _Progress:
    """A bar on stderr that shows once it has outlasted the patience of a user; nothing without a terminal or tqdm."""

    def __init__(self, total: int, description: str, unit: str, wanted: bool | None) -> None:
        self._bar: Any = None
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        if wanted or (wanted is None and on_terminal):
            try:
                from tqdm import tqdm
            except ImportError:
                if wanted:
                    raise ImportError("focalkern: progress=True needs tqdm: pip install tqdm") from None
            else:
                delay = 0.0 if wanted else _PATIENCE
                self._bar = tqdm(total=total, desc=description, unit=unit, delay=delay, leave=False)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, n: int) -> None:
        if self._bar is not None:
            self._bar.update(n)


def _names(op: str, probs: Any, confidence: Any) -> tuple[str, ...]:
    if (probs is None) == (confidence is None):
        raise ValueError(f"{op}: expected either probs or confidence, got {'neither' if probs is None else 'both'}")
    given = probs if confidence is None else confidence
    if not isinstance(given, Mapping):
        kind = "probs" if confidence is None else "confidence"
        raise TypeError(f"{op}: {kind} must map names to tensors, got {type(given).__name__}")
    if not given:
        raise ValueError(f"{op}: expected at least one calibrator, got none")
    return tuple(given)


def _figures(op: str, figures: Sequence[str] | None, possible: tuple[str, ...]) -> tuple[str, ...]:
    if figures is None:
        return possible
    try:
        names = (figures,) if isinstance(figures, str) else tuple(figures)
    except Exception:  # no iterable; or what its class does there
        raise TypeError(f"{op}: figures must be a sequence of names, got {short(figures)}") from None
    for name in names:
        if not isinstance(name, str) or name not in possible:
            raise ValueError(f"{op}: figures must be from {', '.join(possible)}, got {short(name)}")
    if not names:
        raise ValueError(f"{op}: figures must name at least one of {', '.join(possible)}, got none")
    return tuple(dict.fromkeys(names))
