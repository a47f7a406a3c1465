"""The calibration metrics as ``torchmetrics.Metric``: updated batch by batch, synchronised between processes.

The results equal those of :mod:`focalkern.metrics` on all batches together. The metrics work in a
``MetricCollection``, with Lightning's ``self.log`` and with ``torch.distributed``. Input is ``[N, C]`` or
``[N, C, d1, ...]``, class scores in dimension 1, with targets ``[N]`` or ``[N, d1, ...]``. ``input_kind`` states
whether the scores are logits or probabilities; it is not inferred. Sums are float64. Without any row, ``compute``
returns NaN. ``set_dtype`` chooses the dtype of the results, float64 by default; the sums stay float64, also in a model
that is cast to another dtype.

Memory: with ``equal_width`` bins only sums per bin are kept, for any number of rows. Equal-mass bins depend on all
rows, so all confidences (for the classwise error, all probabilities) are kept.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from focalkern import metrics
from focalkern.metrics._bins import equal_width_bin

try:
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat

    from focalkern.integrations._metric import FocalkernMetric
except ImportError as error:
    raise ImportError(
        f"focalkern.integrations.torchmetrics needs torchmetrics: pip install torchmetrics ({error})"
    ) from error

__all__ = ["BrierScore", "CalibrationError", "ClasswiseCalibrationError", "NegativeLogLikelihood"]

_ERRORS: dict[str, Callable[[metrics.ReliabilityBins], Tensor]] = {
    "expected": metrics.expected_error,
    "maximum": metrics.maximum_error,
    "rms": metrics.rms_error,
    "debiased": metrics.debiased_error,
}


class CalibrationError(FocalkernMetric):
    """Calibration error of the top class; see :func:`focalkern.metrics.expected_calibration_error`.

    Args:
        n_bins: M, at least 1.
        estimator: ``"equal_width"`` (constant memory), ``"equal_mass"`` or ``"equal_mass_interp"``.
        error: ``"expected"``, ``"maximum"``, ``"rms"`` or ``"debiased"`` (l2).
        input_kind: ``"probs"`` or ``"logits"``; logits go through a softmax.
        ignore_index: label of ignored rows.
        **kwargs: arguments of ``torchmetrics.Metric``.

    ``compute`` returns a float64 0-dim tensor, a fraction; NaN without rows.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.metrics.expected_calibration_error`.

    Example:
        >>> from focalkern.integrations.torchmetrics import CalibrationError
        >>> metric = CalibrationError(input_kind="logits")
        >>> for labels in ([0] * 5, [0, 0, 0, 1, 1]):  # batches
        ...     metric.update(torch.tensor([[4.0, 0.0]]).repeat(5, 1), torch.tensor(labels))
        >>> metric.compute()
        tensor(0.1820, dtype=torch.float64)
        >>> metric.bins().count.sum()
        tensor(10)
    """

    plot_upper_bound = 1.0

    count: Tensor
    confidence_sum: Tensor
    correct_sum: Tensor
    confidence: list[Tensor]
    correct: list[Tensor]

    def __init__(
        self,
        n_bins: int = 15,
        estimator: metrics.Estimator = "equal_width",
        error: Literal["expected", "maximum", "rms", "debiased"] = "expected",
        *,
        input_kind: Literal["probs", "logits"] = "probs",
        ignore_index: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_kind, ignore_index, **kwargs)
        self._check("estimator", estimator, metrics.ESTIMATORS)
        self._check("error", error, _ERRORS)
        self.n_bins = self._bins_of("n_bins", n_bins)
        self.estimator = estimator
        self.error = error
        if estimator == "equal_width":
            _add_bin_sums(self, (self.n_bins,))
        else:
            self.add_state("confidence", [], dist_reduce_fx="cat")
            self.add_state("correct", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Adds a batch.

        Args:
            preds: [N, C, ...] probabilities or logits, as ``input_kind`` says.
            target: [N, ...] class indices.

        Raises:
            TypeError, ValueError, IndexError: as :func:`focalkern.metrics.expected_calibration_error`.
        """
        scores, target = self._rows(preds, target)
        if self.input_kind == "probs":
            confidence, top = scores.max(-1)
        else:  # the softmax may round two logits to equal probabilities
            confidence, top = self._probs(scores).amax(-1), scores.argmax(-1)
        correct = top == target
        if self.estimator == "equal_width":
            _add_to_bin_sums(self, confidence, correct)
        else:
            self.confidence.append(confidence)
            self.correct.append(correct)

    def bins(self) -> metrics.ReliabilityBins:
        """The bins of the batches so far on this process, for a reliability diagram.

        Returns:
            :class:`focalkern.metrics.ReliabilityBins`.
        """
        if self.estimator == "equal_width":
            return _bins_from_sums(self, int(self.count.sum()))
        if len(self.confidence) == 0:  # a list of batches, or one tensor of all processes
            empty = torch.empty(0, device=self.device)
            return metrics.reliability_bins(
                confidence=empty, correct=empty, n_bins=self.n_bins, estimator=self.estimator
            )
        return metrics.reliability_bins(
            confidence=dim_zero_cat(self.confidence),
            correct=dim_zero_cat(self.correct),
            n_bins=self.n_bins,
            estimator=self.estimator,
        )

    def compute(self) -> Tensor:
        """The error over all batches, of all processes.

        Returns:
            A fraction, float64 or the dtype of ``set_dtype``; see the class.
        """
        return _ERRORS[self.error](self.bins()).to(self._result_dtype)


class ClasswiseCalibrationError(FocalkernMetric):
    """Classwise ECE; see :func:`focalkern.metrics.classwise_calibration_error`.

    Args:
        num_classes: C.
        n_bins: bins per class, at least 1.
        reduction: ``"mean"`` over the classes or ``"none"``.
        input_kind, ignore_index, kwargs: as :class:`CalibrationError`.

    The bins are ``equal_width``. ``compute`` returns a float64 tensor, 0-dim or with ``"none"`` [C]; NaN without rows.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.metrics.classwise_calibration_error`; ValueError also
            for another number of classes.

    Example:
        >>> from focalkern.integrations.torchmetrics import ClasswiseCalibrationError
        >>> metric = ClasswiseCalibrationError(num_classes=3, reduction="none")
        >>> metric.update(torch.tensor([[0.9, 0.1, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1, 2]))
        >>> metric.compute().round(decimals=4)
        tensor([0.1000, 0.0000, 0.1000], dtype=torch.float64)
    """

    plot_upper_bound = 1.0

    count: Tensor
    confidence_sum: Tensor
    correct_sum: Tensor

    def __init__(
        self,
        num_classes: int,
        n_bins: int = 15,
        reduction: str = "mean",
        *,
        input_kind: Literal["probs", "logits"] = "probs",
        ignore_index: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_kind, ignore_index, **kwargs)
        self._check("reduction", reduction, ("mean", "none"))
        self.num_classes = self._bins_of("num_classes", num_classes)
        self.n_bins = self._bins_of("n_bins", n_bins)
        self.reduction = reduction
        _add_bin_sums(self, (self.num_classes, self.n_bins))

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Adds a batch.

        Args:
            preds: [N, C, ...] probabilities or logits, as ``input_kind`` says.
            target: [N, ...] class indices.

        Raises:
            TypeError, ValueError, IndexError: as :func:`focalkern.metrics.expected_calibration_error`.
        """
        scores, target = self._rows(preds, target)
        if scores.shape[-1] != self.num_classes:
            raise ValueError(
                f"ClasswiseCalibrationError: preds must have num_classes = {self.num_classes} classes, "
                f"got {scores.shape[-1]}"
            )
        classes = torch.arange(self.num_classes, device=target.device).unsqueeze(-1)
        _add_to_bin_sums(self, self._probs(scores).T.contiguous(), target == classes)

    def compute(self) -> Tensor:
        """The error over all batches, of all processes.

        Returns:
            A fraction, float64 or the dtype of ``set_dtype``; see the class.
        """
        errors = metrics.expected_error(_bins_from_sums(self, int(self.count[0].sum())))
        return (errors.mean() if self.reduction == "mean" else errors).to(self._result_dtype)


class _Mean(FocalkernMetric):
    total: Tensor
    n_samples: Tensor

    def __init__(
        self, *, input_kind: Literal["probs", "logits"] = "probs", ignore_index: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(input_kind, ignore_index, **kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("n_samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _mean_of(self, scores: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Adds a batch.

        Args:
            preds: [N, C, ...] probabilities or logits, as ``input_kind`` says.
            target: [N, ...] class indices.

        Raises:
            TypeError, ValueError, IndexError: as :func:`focalkern.metrics.expected_calibration_error`.
        """
        scores, target = self._rows(preds, target)
        if len(target):
            _make_changeable(self, "total", "n_samples")
            self.total += self._mean_of(scores, target) * len(target)
            self.n_samples += len(target)

    def compute(self) -> Tensor:
        """The mean over all rows, of all processes.

        Returns:
            0-dim, float64 or the dtype of ``set_dtype``; see the class.
        """
        return (self.total / self.n_samples).to(self._result_dtype)


class NegativeLogLikelihood(_Mean):
    """Mean negative log-likelihood; see :func:`focalkern.metrics.nll`.

    Args:
        input_kind, ignore_index, kwargs: as :class:`CalibrationError`.

    ``compute`` returns a float64 0-dim tensor, in nats; infinite if a target had probability 0, NaN without rows.

    Example:
        >>> from focalkern.integrations.torchmetrics import NegativeLogLikelihood
        >>> metric = NegativeLogLikelihood()
        >>> metric.update(torch.tensor([[0.8, 0.2]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2))
        >>> metric.compute()
        tensor(0.5004, dtype=torch.float64)
    """

    def _mean_of(self, scores: Tensor, target: Tensor) -> Tensor:
        if self.input_kind == "logits":
            return metrics.nll(self._log_probs(scores), target, log=True)
        return metrics.nll(scores, target)


class BrierScore(_Mean):
    """Brier score, summed over the classes; see :func:`focalkern.metrics.brier_score`.

    Args:
        input_kind, ignore_index, kwargs: as :class:`CalibrationError`.

    ``compute`` returns a float64 0-dim tensor, between 0 and 2; NaN without rows.

    Example:
        >>> from focalkern.integrations.torchmetrics import BrierScore
        >>> metric = BrierScore()
        >>> metric.update(torch.tensor([[0.8, 0.2]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2))
        >>> metric.compute()
        tensor(0.3200, dtype=torch.float64)
    """

    plot_upper_bound = 2.0

    def _mean_of(self, scores: Tensor, target: Tensor) -> Tensor:
        return metrics.brier_score(self._probs(scores), target)


def _add_bin_sums(metric: Metric, shape: tuple[int, ...]) -> None:
    metric.add_state("count", torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")
    metric.add_state("confidence_sum", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
    metric.add_state("correct_sum", torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")


def _make_changeable(metric: Metric, *states: str) -> None:
    """Copies states that were made within torch.inference_mode(), where a reset may be: outside of it torch forbids to
    change them."""
    if not torch.is_inference_mode_enabled():
        for name in states:
            state = getattr(metric, name)
            if state.is_inference():
                setattr(metric, name, state.clone())


def _add_to_bin_sums(metric: Any, confidence: Tensor, correct: Tensor) -> None:
    """Adds confidences [..., rows] to the sums [..., M] of equal-width bins."""
    _make_changeable(metric, "count", "confidence_sum", "correct_sum")
    index = equal_width_bin(confidence, metric.n_bins)
    metric.count.scatter_add_(-1, index, torch.ones_like(index))
    metric.confidence_sum.scatter_add_(-1, index, confidence.to(torch.float64))
    metric.correct_sum.scatter_add_(-1, index, correct.to(torch.float64))


def _bins_from_sums(metric: Any, n_samples: int) -> metrics.ReliabilityBins:
    weight = torch.where(metric.count > 0, metric.count, torch.nan).to(torch.float64)
    edges = torch.arange(metric.n_bins + 1, dtype=torch.float64, device=weight.device) / metric.n_bins
    return metrics.ReliabilityBins(
        lower=edges[:-1].expand(weight.shape),
        upper=edges[1:].expand(weight.shape),
        count=metric.count.clone(),  # the next update adds to it in place
        confidence=metric.confidence_sum / weight,
        accuracy=metric.correct_sum / weight,
        n_samples=n_samples,
        estimator="equal_width",
    )
