"""Calibration errors from bins: expected, maximum, root mean square, debiased, classwise."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from focalkern._arrays import arrays_for_arrays
from focalkern._checks import one_of
from focalkern.metrics._bins import bins_of, debiased_error, expected_error, maximum_error, rms_error
from focalkern.metrics._images import Per, measured
from focalkern.metrics._inputs import Estimator, MetricInput, check_bins, look_at_sums, probs_and_target

__all__ = [
    "classwise_calibration_error",
    "debiased_calibration_error",
    "expected_calibration_error",
    "maximum_calibration_error",
    "rms_calibration_error",
]

# Probabilities per block of classwise_calibration_error; the work space is a few times larger.
_BLOCK = 1 << 22


@arrays_for_arrays
def expected_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    confidence: Any = None,
    correct: Any = None,
    ignore_index: int | None = None,
    per: Per = "set",
) -> Tensor:
    r"""Expected calibration error of the top class.

    .. math:: \text{ECE} = \sum_b \frac{|B_b|}{N} \, |\text{acc}_b - \text{conf}_b|

    With ``probs`` and ``target``, the confidence is the largest probability, and a sample is correct if the class of
    that probability is the target. For calibrated probabilities pass ``correct`` in place of ``target``, from the
    argmax of the logits: the probabilities of a saturated row may tie although its logits do not. Or pass
    ``confidence`` and ``correct`` without probabilities.

    Args:
        probs: [..., N, C] probabilities, floating point; or [N, C, d1, ...], one distribution per pixel.
        target: [..., N] class indices, integer; of pixels [N, d1, ...]. Not needed with ``correct``.
        n_bins: M, at least 1.
        estimator: ``"equal_width"``, ``"equal_mass"`` or ``"equal_mass_interp"``; see :mod:`focalkern.metrics`.
        confidence: [..., N] in [0, 1], floating point, in place of ``probs``.
        correct: [..., N], bool, or numbers in [0, 1].
        ignore_index: label of ignored pixels (or rows of [N, C]); None ignores none.
        per: ``"set"`` is the error of all pixels together. ``"image"`` is the mean of the errors of the N images, each
            with its own bins; an image whose pixels are all ignored is skipped.

    Returns:
        float64 tensor of the batch's shape (a 0-dim tensor without a batch), a fraction; NaN for N = 0.

    Raises:
        TypeError: probabilities that are not floating point, targets that are not integers.
        ValueError: shapes that do not fit, or that fit both pixels and a batch of sets (C = d1 = ...; pass
            ``ignore_index=-100`` for pixels); a confidence outside [0, 1] or NaN; an unknown estimator;
            n_bins < 1; too few or too many of the four inputs; ``ignore_index`` without ``target``.
        IndexError: a target outside [0, C).

    Source: Guo et al. 2017 (arXiv 1706.04599), section 2; the estimators are named in :mod:`focalkern.metrics`.

    Example:
        >>> probs = torch.tensor([[0.98, 0.02]]).repeat(10, 1)  # confidence 0.98
        >>> target = torch.tensor([0] * 8 + [1] * 2)  # correct in 8 of 10 rows
        >>> fk.metrics.expected_calibration_error(probs, target)
        tensor(0.1800, dtype=torch.float64)
        >>> fk.metrics.expected_calibration_error(confidence=probs[:, 0], correct=target == 0, n_bins=20)
        tensor(0.1800, dtype=torch.float64)
    """
    op = "expected_calibration_error"
    return measured(
        op,
        lambda rows: expected_error(bins_of(op, rows, n_bins, estimator)),
        MetricInput(probs, target, confidence, correct),
        ignore_index,
        per,
    )


@arrays_for_arrays
def maximum_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    confidence: Any = None,
    correct: Any = None,
    ignore_index: int | None = None,
    per: Per = "set",
) -> Tensor:
    r"""Largest gap between accuracy and mean confidence over the bins that are not empty.

    .. math:: \text{MCE} = \max_b |\text{acc}_b - \text{conf}_b|

    Under ``equal_mass`` it depends on the order of tied confidences: compare it only for distinct confidences.

    Args:
        probs, target, n_bins, estimator, confidence, correct, ignore_index, per: as
            :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`.

    Source: Guo et al. 2017 (arXiv 1706.04599), section 2.

    Example:
        >>> confidence = torch.tensor([0.98, 0.98, 0.6, 0.6])
        >>> fk.metrics.maximum_calibration_error(confidence=confidence, correct=torch.tensor([1, 1, 1, 0]))
        tensor(0.1000, dtype=torch.float64)
    """
    op = "maximum_calibration_error"
    return measured(
        op,
        lambda rows: maximum_error(bins_of(op, rows, n_bins, estimator)),
        MetricInput(probs, target, confidence, correct),
        ignore_index,
        per,
    )


@arrays_for_arrays
def rms_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    confidence: Any = None,
    correct: Any = None,
    ignore_index: int | None = None,
    per: Per = "set",
) -> Tensor:
    r"""Root of the weighted mean of the squared gaps.

    .. math:: \text{RMSCE} = \sqrt{\sum_b \frac{|B_b|}{N} (\text{acc}_b - \text{conf}_b)^2}

    Args:
        probs, target, n_bins, estimator, confidence, correct, ignore_index, per: as
            :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`.

    Source: Hendrycks, Mazeika, Dietterich 2019 (arXiv 1812.04606), section 5.

    Example:
        >>> confidence = torch.tensor([0.98, 0.98, 0.6, 0.6])
        >>> fk.metrics.rms_calibration_error(confidence=confidence, correct=torch.tensor([1, 1, 1, 0]))
        tensor(0.0721, dtype=torch.float64)
    """
    op = "rms_calibration_error"
    return measured(
        op,
        lambda rows: rms_error(bins_of(op, rows, n_bins, estimator)),
        MetricInput(probs, target, confidence, correct),
        ignore_index,
        per,
    )


@arrays_for_arrays
def debiased_calibration_error(
    probs: Any = None,
    target: Any = None,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    norm: Literal["l1", "l2"] = "l2",
    confidence: Any = None,
    correct: Any = None,
    ignore_index: int | None = None,
    per: Per = "set",
) -> Tensor:
    r"""Calibration error of the top class, minus the expected contribution of noise in the bins' accuracies.

    With :math:`g_b = \text{acc}_b - \text{conf}_b`, :math:`n_b` samples in bin b and
    :math:`v_b = \text{acc}_b (1 - \text{acc}_b)`:

    .. math::
        \text{l2: } \sqrt{\max\Big(0, \sum_b \frac{|B_b|}{N} \big(g_b^2 - \tfrac{v_b}{n_b - 1}\big)\Big)}
        \qquad
        \text{l1: } 2\,\text{ECE} - \sum_b \frac{|B_b|}{N} \, \mathbb E\,|\mathcal N(g_b, v_b / n_b)|

    With ``"l2"`` the sum is an unbiased estimate of the squared RMSCE of infinitely many rows in the same bins; a bin
    with one sample contributes 0. ``"l1"`` is an approximate correction of the ECE: for a perfectly calibrated model it
    removes the fraction sqrt(2) - 1, about two fifths, of the bias. It is not clipped at 0: a negative value means that
    the ECE is below the noise level.

    Args:
        probs, target, n_bins, estimator: as :func:`expected_calibration_error`.
        norm: ``"l2"`` or ``"l1"``.
        confidence, correct, ignore_index, per: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`; ValueError also for another norm.

    Source: Kumar, Liang & Ma 2019 (arXiv 1909.10155), section 5, and their package uncertainty-calibration. For
    ``"l1"`` the package samples the normal variables; this function uses their mean in closed form. l2: Broecker 2012,
    "Estimating reliability and resolution of probability forecasts".

    Example:
        >>> confidence, correct = torch.full((10,), 0.98), torch.arange(10) < 8
        >>> fk.metrics.debiased_calibration_error(confidence=confidence, correct=correct)
        tensor(0.1209, dtype=torch.float64)
        >>> fk.metrics.rms_calibration_error(confidence=confidence, correct=correct)
        tensor(0.1800, dtype=torch.float64)
    """
    op = "debiased_calibration_error"
    one_of(op, "norm", norm, ("l1", "l2"))
    return measured(
        op,
        lambda rows: debiased_error(bins_of(op, rows, n_bins, estimator), norm),
        MetricInput(probs, target, confidence, correct),
        ignore_index,
        per,
    )


@arrays_for_arrays
@torch.no_grad()
def classwise_calibration_error(
    probs: Any,
    target: Any,
    *,
    n_bins: int = 15,
    estimator: Estimator = "equal_width",
    reduction: Literal["mean", "none"] = "mean",
    ignore_index: int | None = None,
    per: Per = "set",
) -> Tensor:
    r"""Mean over the classes of the ECE of the class's probability as a prediction of [target = class].

    .. math:: \frac{1}{C} \sum_k \sum_b \frac{|B_{bk}|}{N} \, |\text{freq}_{bk} - \text{prob}_{bk}|

    Args:
        probs, target: as :func:`expected_calibration_error`.
        n_bins: bins per class, at least 1.
        estimator: as :func:`expected_calibration_error`; the published figures are ``"equal_width"``.
        reduction: ``"mean"`` over the classes, or ``"none"`` for the error of each.
        ignore_index, per: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape, with ``"none"`` [..., C]; a fraction; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`; ValueError also for another reduction.

    Source: Kull et al. 2019 (arXiv 1910.12656), section 2; Mukhoti et al. 2020 (arXiv 2002.09437), table C.2.

    Example:
        >>> probs, target = torch.tensor([[0.9, 0.1, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1, 2])
        >>> fk.metrics.classwise_calibration_error(probs, target, reduction="none").round(decimals=4)
        tensor([0.1000, 0.0000, 0.1000], dtype=torch.float64)
        >>> fk.metrics.classwise_calibration_error(probs, target)
        tensor(0.0667, dtype=torch.float64)
    """
    name = "classwise_calibration_error"
    one_of(name, "reduction", reduction, ("mean", "none"))
    check_bins(name, n_bins, estimator)
    return measured(
        name,
        lambda rows: _classwise(name, rows, n_bins, estimator, reduction),
        MetricInput(probs, target),
        ignore_index,
        per,
    )


def _classwise(name: str, rows: MetricInput, n_bins: int, estimator: Estimator, reduction: str) -> Tensor:
    probs, target = probs_and_target(name, rows.probs, rows.target, sums=look_at_sums(rows))
    *batch, n_samples, n_classes = probs.shape
    errors = torch.empty(*batch, n_classes, dtype=torch.float64, device=probs.device)
    block = max(1, _BLOCK // max(1, n_samples * math.prod(batch)))
    for first in range(0, n_classes, block):
        classes = torch.arange(first, min(first + block, n_classes), device=probs.device)
        of_class = probs[..., first : first + block].transpose(-1, -2).contiguous()
        is_class = target.unsqueeze(-2) == classes.unsqueeze(-1)
        errors[..., first : first + block] = expected_calibration_error(
            confidence=of_class, correct=is_class, n_bins=n_bins, estimator=estimator
        )
    return errors.mean(-1) if reduction == "mean" else errors
