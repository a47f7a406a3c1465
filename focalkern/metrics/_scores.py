"""Scores that need no bins: NLL, Brier score, accuracy, AURC, AUROC."""

from typing import Any

import torch
from torch import Tensor

from focalkern._arrays import arrays_for_arrays, as_tensor
from focalkern._checks import flag
from focalkern.metrics._images import Per, measured
from focalkern.metrics._inputs import (
    MetricInput,
    as_correct,
    check_log_probs,
    confidence_and_correct,
    look_at_sums,
    probs_and_target,
)

__all__ = ["accuracy", "aurc", "auroc", "brier_score", "nll"]


@arrays_for_arrays
@torch.no_grad()
def nll(probs: Any, target: Any, *, log: bool = False, ignore_index: int | None = None, per: Per = "set") -> Tensor:
    r"""Mean negative log-likelihood of the target class, natural logarithm.

    .. math:: -\frac{1}{N} \sum_i \log p_{i, y_i}

    Args:
        probs: [..., N, C] or [N, C, d1, ...] probabilities, or log-probabilities with ``log=True`` (more precise for
            probabilities near 1).
        target: [..., N] or [N, d1, ...] class indices, integer.
        log: whether ``probs`` holds log-probabilities.
        ignore_index, per: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape, in nats; infinite if a target has probability 0; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`.

    Example:
        >>> probs, target = torch.tensor([[0.8, 0.2]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> fk.metrics.nll(probs, target)
        tensor(0.5004, dtype=torch.float64)
    """
    log = flag("nll", "log", log)

    def of_rows(rows: MetricInput) -> Tensor:
        sums = look_at_sums(rows)
        probs, target = probs_and_target("nll", rows.probs, rows.target, log=log, sums=sums)
        if log:
            check_log_probs("nll", probs, sums=sums)
        of_target = probs.gather(-1, target.unsqueeze(-1)).squeeze(-1).to(torch.float64)
        log_probs = of_target if log else of_target.log_()
        # + 0, so that a perfect score is 0.0, not -0.0.
        return log_probs.neg_().mean(-1).add_(0.0)

    return measured("nll", of_rows, MetricInput(probs, target), ignore_index, per, log=log)


@arrays_for_arrays
@torch.no_grad()
def brier_score(probs: Any, target: Any, *, ignore_index: int | None = None, per: Per = "set") -> Tensor:
    r"""Mean squared distance between the probabilities and the one-hot target, summed over the classes.

    .. math:: \frac{1}{N} \sum_i \sum_k (p_{ik} - [k = y_i])^2

    The score is between 0 and 2. (The binary Brier score of one class is half of it.)

    Args:
        probs, target, ignore_index, per: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`.

    Source: Brier 1950, "Verification of forecasts expressed in terms of probability".

    Example:
        >>> probs, target = torch.tensor([[0.8, 0.2]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> fk.metrics.brier_score(probs, target)
        tensor(0.3200, dtype=torch.float64)
    """

    def of_rows(rows: MetricInput) -> Tensor:
        probs, target = probs_and_target("brier_score", rows.probs, rows.target, sums=look_at_sums(rows))
        index = target.unsqueeze(-1)
        residual = probs.to(torch.float64, copy=True)
        residual.scatter_add_(-1, index, residual.new_full((), -1.0).expand(index.shape))
        result: Tensor = residual.square_().sum(-1).mean(-1)
        return result

    return measured("brier_score", of_rows, MetricInput(probs, target), ignore_index, per)


@arrays_for_arrays
@torch.no_grad()
def accuracy(
    probs: Any = None,
    target: Any = None,
    *,
    correct: Any = None,
    ignore_index: int | None = None,
    per: Per = "set",
) -> Tensor:
    r"""Fraction of the rows whose largest entry is that of the target; of equal largest entries the first counts.

    .. math:: \frac{1}{N} \sum_i [\arg\max_k p_{ik} = y_i]

    Args:
        probs: [..., N, C] or [N, C, d1, ...] probabilities or logits, floating point.
        target: [..., N] or [N, d1, ...] class indices, integer.
        correct: [..., N], bool, in place of ``probs`` and ``target``.
        ignore_index, per: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`, but logits, except NaN, are also
            accepted.

    Example:
        >>> logits, target = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
        >>> fk.metrics.accuracy(logits, target)
        tensor(0.8000, dtype=torch.float64)
    """
    if correct is None and (probs is None or target is None):
        raise ValueError("accuracy: expected probs and target, or correct")
    if correct is not None and (probs is not None or target is not None):
        raise ValueError("accuracy: correct replaces probs and target, got both")

    def of_rows(rows: MetricInput) -> Tensor:
        if rows.correct is not None:
            return as_correct("accuracy", rows.correct).mean(-1)
        scores, target = probs_and_target("accuracy", rows.probs, rows.target, log=True)
        top, predicted = scores.max(-1)
        if bool(top.isnan().any()):  # the largest of a row with NaN is NaN
            row = top.isnan().nonzero()[0].tolist()[-1]
            raise ValueError(f"accuracy: probs must not be NaN, got NaN in row {row}")
        return (predicted == target).to(torch.float64).mean(-1)

    return measured("accuracy", of_rows, MetricInput(probs, target, None, correct), ignore_index, per, log=True)


@arrays_for_arrays
@torch.no_grad()
def aurc(
    probs: Any = None,
    target: Any = None,
    *,
    excess: bool = False,
    confidence: Any = None,
    correct: Any = None,
    ignore_index: int | None = None,
    per: Per = "set",
) -> Tensor:
    r"""Area under the risk-coverage curve: the mean error rate when only the most confident samples are answered.

    .. math:: \frac{1}{N} \sum_{i=1}^{N} \frac{1}{i} \sum_{j \le i} (1 - \text{correct}_{(j)})

    with the samples in descending order of confidence. For tied confidences it is the mean over all their orders, so it
    does not depend on the order of the rows.

    Args:
        probs, target: as :func:`expected_calibration_error`.
        excess: subtract the AURC of the best order of the same samples (all correct samples first). The excess is 0 if
            the confidences rank every correct sample above every wrong one.
        confidence, correct, ignore_index, per: as :func:`expected_calibration_error`.

    Returns:
        float64 tensor of the batch's shape, a fraction, lower is better; NaN for N = 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`expected_calibration_error`.

    Source: Geifman, Uziel & El-Yaniv 2019 (arXiv 1805.08206), section 3. Their E-AURC subtracts the approximation
    e + (1 - e) log(1 - e), with the error rate e; this function subtracts the exact area.

    Example:
        >>> confidence, correct = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([1, 1, 0, 1])
        >>> fk.metrics.aurc(confidence=confidence, correct=correct)
        tensor(0.1458, dtype=torch.float64)
        >>> fk.metrics.aurc(confidence=confidence, correct=correct, excess=True)
        tensor(0.0833, dtype=torch.float64)
    """
    excess = flag("aurc", "excess", excess)
    given = MetricInput(probs, target, confidence, correct)
    return measured("aurc", lambda rows: _risk_area(rows, excess=excess), given, ignore_index, per)


def _risk_area(rows: MetricInput, *, excess: bool) -> Tensor:
    confidence, correct = confidence_and_correct("aurc", *rows)
    n_samples = confidence.shape[-1]
    ordered, order = confidence.sort(dim=-1, descending=True)
    loss = 1 - correct.gather(-1, order)
    # Samples of equal confidence get their mean loss. The area is linear in the losses, so this is the mean over all
    # orders.
    tied = torch.zeros_like(order)
    tied[..., 1:] = (ordered[..., 1:] != ordered[..., :-1]).cumsum(-1)
    total = torch.zeros_like(loss).scatter_add_(-1, tied, loss)
    count = torch.zeros_like(loss).scatter_add_(-1, tied, torch.ones_like(loss))
    loss = total.gather(-1, tied) / count.gather(-1, tied)
    coverage = torch.arange(1, n_samples + 1, device=confidence.device)
    area = (loss.cumsum(-1) / coverage).mean(-1)
    if excess:
        area = area - ((1 - correct).sort(dim=-1).values.cumsum(-1) / coverage).mean(-1)
    return area


@arrays_for_arrays
@torch.no_grad()
def auroc(confidence_in: Any, confidence_out: Any) -> Tensor:
    r"""Area under the ROC curve of confidence as a detector of out-of-distribution inputs.

    .. math:: P(\text{in} > \text{out}) + \tfrac{1}{2} P(\text{in} = \text{out})

    1 if every in-distribution sample is more confident than every other, 1/2 if confidence is uninformative. With the
    confidences of correct and of wrong predictions it is the AUROC of failure prediction.

    Args:
        confidence_in: [..., N] confidences on in-distribution samples, floating point, any scale.
        confidence_out: [..., K] confidences on out-of-distribution samples, same dtype and batch.

    Returns:
        float64 tensor of the batch's shape, a fraction; NaN if either set is empty.

    Raises:
        TypeError: confidences that are not floating point, or have different dtypes.
        ValueError: a single number, different batches or devices, or NaN.

    Source: Hanley & McNeil 1982, "The meaning and use of the area under a ROC curve".

    Example:
        >>> known, unknown = torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0.75, 0.4])
        >>> fk.metrics.auroc(known, unknown)  # 5 of 6 pairs are in order
        tensor(0.8333, dtype=torch.float64)
    """
    sets = []
    for name, values in (("confidence_in", confidence_in), ("confidence_out", confidence_out)):
        values = as_tensor(values, f"auroc: {name}")
        if not values.is_floating_point():
            raise TypeError(f"auroc: {name} must be floating point, got {values.dtype}")
        if values.dim() < 1:
            raise ValueError(f"auroc: {name} must be [N], got a single number")
        if bool(values.isnan().any()):
            raise ValueError(f"auroc: {name} must not be NaN, got NaN at row {int(values.isnan().nonzero()[0, -1])}")
        sets.append(values.contiguous())
    inside, outside = sets
    if inside.dtype != outside.dtype:
        raise TypeError(
            f"auroc: confidence_out must have the dtype of confidence_in, {inside.dtype}, got {outside.dtype}"
        )
    if inside.device != outside.device:
        raise ValueError(
            f"auroc: confidence_out must be on the device of confidence_in, {inside.device}, got {outside.device}"
        )
    if inside.shape[:-1] != outside.shape[:-1]:
        raise ValueError(
            f"auroc: confidence_out must have the batch of confidence_in, {list(inside.shape[:-1])}, "
            f"got {list(outside.shape[:-1])}"
        )
    ordered = outside.sort(dim=-1).values
    below = torch.searchsorted(ordered, inside, right=False).sum(-1)
    not_above = torch.searchsorted(ordered, inside, right=True).sum(-1)
    # Exact int64 sums: (wins + (wins + ties)) / 2. Without pairs, 0 / 0 is NaN.
    return (below + not_above).to(torch.float64) / (2 * inside.shape[-1] * outside.shape[-1])
