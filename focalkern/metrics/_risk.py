"""Selective classification: risk against coverage, and a confidence threshold with a bound on the risk."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from focalkern._arrays import arrays_for_arrays
from focalkern._checks import number
from focalkern.metrics._images import flattened
from focalkern.metrics._inputs import MetricInput, confidence_and_correct

__all__ = ["AcceptThreshold", "RiskCoverage", "accept_threshold", "risk_coverage", "threshold_digits"]

# Number of thresholds that accept_threshold compares; the error probability is divided equally among them.
_CANDIDATES = 20


@dataclass(frozen=True)
class RiskCoverage:
    """Coverage and risk of accepting every row with at least a confidence, per distinct confidence [K], descending.

    Attributes:
        threshold: the confidence; rows with at least this confidence are accepted.
        coverage: the accepted fraction of the rows.
        risk: the fraction of the accepted rows that are wrong.

    Example:
        >>> curve = fk.metrics.risk_coverage(confidence=torch.tensor([0.9, 0.6]), correct=torch.tensor([1, 0]))
        >>> curve.coverage.tolist(), curve.risk.tolist()
        ([0.5, 1.0], [0.0, 0.5])
    """

    threshold: Tensor
    coverage: Tensor
    risk: Tensor


@dataclass(frozen=True)
class AcceptThreshold:
    """A threshold on the confidence, with its result on the rows from which it was chosen.

    Attributes:
        threshold: accept a row if its confidence is at least this; infinite if no threshold keeps the bound.
        coverage: the accepted fraction of the rows.
        risk: the fraction of the accepted rows that are wrong; NaN without accepted rows.
        bound: upper confidence bound of the risk; NaN without accepted rows.
        n_accepted: number of accepted rows.
        n_errors: number of accepted rows that are wrong.
        max_risk: the argument of :func:`accept_threshold`.
        confidence: the argument of :func:`accept_threshold`.

    Example:
        >>> few = fk.accept_threshold(scores=torch.tensor([0.9, 0.6]), correct=torch.tensor([1, 0]))
        >>> few.threshold, few.n_accepted
        (inf, 0)
        >>> print(few)
        No threshold keeps the risk below 0.02 with 95% confidence.
    """

    threshold: float
    coverage: float
    risk: float
    bound: float
    n_accepted: int
    n_errors: int
    max_risk: float
    confidence: float

    def __str__(self) -> str:
        level = f"{100 * self.confidence:.12g}% confidence"
        if self.n_accepted == 0:
            return f"No threshold keeps the risk below {self.max_risk:g} with {level}."
        return (
            f"Accept confidence >= {threshold_digits(self.threshold)}: {self.coverage:.1%} of the rows, "
            f"risk {_risk_digits(self.risk)} (below {_risk_digits(self.bound)} with {level})."
        )


def threshold_digits(threshold: float) -> str:
    """Four digits, and more near 1, where the confidences of most rows differ in later digits."""
    digits = 4 if threshold >= 1 else 3 + max(1, math.floor(-math.log10(1 - threshold)))
    return f"{threshold:.{digits}f}"


def _risk_digits(risk: float) -> str:
    return f"{risk:.2g}" if 0 < risk < 0.001 else f"{risk:.4f}"


@arrays_for_arrays
@torch.no_grad()
def risk_coverage(
    probs: Any = None,
    target: Any = None,
    *,
    confidence: Any = None,
    correct: Any = None,
    ignore_index: int | None = None,
) -> RiskCoverage:
    r"""Risk against coverage: the error rate of the most confident rows, for every threshold.

    With c the confidence (the largest probability) of a row and a threshold t:

    .. math::
        \text{coverage}(t) = \frac{|\{c_i \ge t\}|}{N}, \qquad
        \text{risk}(t) = \frac{|\{c_i \ge t,\ \text{wrong}\}|}{|\{c_i \ge t\}|}

    :func:`aurc` is the area under this curve.

    Args:
        probs: [N, C] or [N, C, d1, ...] probabilities, or None with ``confidence``.
        target: [N] or [N, d1, ...] class indices, or None with ``correct``.
        confidence: [N] in [0, 1], instead of ``probs``.
        correct: [N] bool, instead of ``target``.
        ignore_index: as :func:`expected_calibration_error`.

    Returns:
        :class:`RiskCoverage`; float64, K the number of distinct confidences.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`; a batch of sets.

    Source: El-Yaniv & Wiener 2010, "On the foundations of noise-free selective classification".

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.8, 0.2], [0.6, 0.4]], dtype=torch.float64)
        >>> curve = fk.metrics.risk_coverage(probs, torch.tensor([0, 0, 1, 1]))
        >>> curve.threshold.tolist(), curve.coverage.tolist()
        ([0.9, 0.8, 0.6], [0.25, 0.75, 1.0])
        >>> curve.risk
        tensor([0.0000, 0.3333, 0.5000], dtype=torch.float64)
    """
    values, accepted, errors = _accepted("risk_coverage", MetricInput(probs, target, confidence, correct), ignore_index)
    rows = accepted[-1] if len(accepted) else 1.0
    return RiskCoverage(values, accepted / rows, errors / accepted)


@torch.no_grad()
def accept_threshold(
    probs: Any = None,
    target: Any = None,
    *,
    max_risk: float = 0.02,
    confidence: float = 0.95,
    scores: Any = None,
    correct: Any = None,
    ignore_index: int | None = None,
) -> AcceptThreshold:
    r"""The lowest confidence threshold above which predictions can be accepted with a bounded error rate.

    A threshold that accepts n rows, e of them wrong, has the upper Clopper-Pearson bound b on its risk, with

    .. math:: P(\text{Bin}(n, b) \le e) = \frac{1 - \text{confidence}}{20}

    20 thresholds are compared: those of equally spaced numbers of accepted rows, from the smallest number whose bound
    can be at most ``max_risk`` to N. The result is the threshold with the largest coverage whose bound is at most
    ``max_risk``. The division by 20 (Bonferroni) makes the bound valid for a threshold chosen on the same rows: if rows
    are independent and identically distributed, the risk on new rows exceeds ``max_risk`` with probability at most
    1 - ``confidence``. Use rows that neither training nor calibration has seen.

    Args:
        probs: [N, C] or [N, C, d1, ...] probabilities, or None with ``scores``.
        target: [N] or [N, d1, ...] class indices, or None with ``correct``.
        max_risk: the largest acceptable error rate of accepted rows, in (0, 1).
        confidence: confidence level of the bound, in (0, 1).
        scores: [N] confidences in [0, 1], instead of ``probs``.
        correct: [N] bool, or 0 and 1, instead of ``target``.
        ignore_index: as :func:`focalkern.metrics.expected_calibration_error`.

    Returns:
        :class:`AcceptThreshold`; its ``str()`` is one sentence.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.metrics.risk_coverage`; ``max_risk`` or ``confidence``
            outside (0, 1); ``correct`` between 0 and 1.

    Source: Clopper & Pearson 1934; the guarantee of selective classification, Geifman & El-Yaniv 2017 (arXiv
    1705.08500).

    Example:
        >>> scores = torch.linspace(0, 1, 2000)
        >>> chosen = fk.accept_threshold(scores=scores, correct=scores > 0.25)
        >>> print(chosen)
        Accept confidence >= 0.2691: 73.1% of the rows, risk 0.0000 (below 0.0041 with 95% confidence).
    """
    op, levels = "accept_threshold", {}
    for name, value in (("max_risk", max_risk), ("confidence", confidence)):
        levels[name] = number(op, name, value)
        if not 0 < levels[name] < 1:
            raise ValueError(f"{op}: {name} must be between 0 and 1, got {levels[name]}")
    level, risk = (1 - levels["confidence"]) / _CANDIDATES, levels["max_risk"]
    values, accepted, errors = _accepted(op, MetricInput(probs, target, scores, correct), ignore_index)
    if bool((errors.diff(prepend=errors.new_zeros(1)) % 1 != 0).any()):
        raise ValueError(f"{op}: correct must be bool, or 0 and 1, got numbers between 0 and 1")
    rows = int(accepted[-1]) if len(accepted) else 0
    least = math.ceil(math.log(level) / math.log1p(-risk))  # (1 - risk)^least <= level
    # Spaced by numbers of rows, which do not depend on the labels. Rows with equal confidence are accepted together.
    counts = [least + (rows - least) * i // (_CANDIDATES - 1) for i in range(_CANDIDATES)] if rows >= least else []
    for count in reversed(counts):
        place = int(torch.searchsorted(accepted, float(count)))
        n, e = int(accepted[place]), int(errors[place])
        if e <= n * risk and _log_tail(n, e, risk) <= math.log(level):
            bound = _upper_bound(n, e, level)
            return AcceptThreshold(float(values[place]), n / rows, e / n, bound, n, e, risk, levels["confidence"])
    return AcceptThreshold(math.inf, 0.0, math.nan, math.nan, 0, 0, risk, levels["confidence"])


def _accepted(op: str, given: MetricInput, ignore_index: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct confidences [K], descending; number of rows with at least this confidence; number of wrong ones."""
    confidence, correct = confidence_and_correct(op, *flattened(op, given, ignore_index))
    if confidence.dim() != 1:
        raise ValueError(f"{op}: expected one set of rows, got a batch of shape {list(confidence.shape[:-1])}")
    order = confidence.argsort(descending=True, stable=True)
    descending, wrong = confidence[order], 1.0 - correct[order]
    last = torch.ones_like(descending, dtype=torch.bool)
    last[:-1] = descending[1:] != descending[:-1]
    accepted = torch.arange(1, len(descending) + 1, dtype=torch.float64, device=descending.device)
    return descending[last], accepted[last], wrong.cumsum(0)[last]


def _log_tail(n: int, e: int, p: float) -> float:
    """log P(Bin(n, p) <= e)."""
    k = torch.arange(e + 1, dtype=torch.float64, device="cpu")
    whole = torch.tensor(float(n), dtype=torch.float64, device="cpu")
    ways = torch.lgamma(whole + 1) - torch.lgamma(k + 1) - torch.lgamma(whole - k + 1)
    return float(torch.logsumexp(ways + k * math.log(p) + (whole - k) * math.log1p(-p), 0))


def _upper_bound(n: int, e: int, level: float) -> float:
    """The p with P(Bin(n, p) <= e) = level."""
    if e >= n:
        return 1.0
    low, high = e / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _log_tail(n, e, middle) > math.log(level):
            low = middle
        else:
            high = middle
    return high
