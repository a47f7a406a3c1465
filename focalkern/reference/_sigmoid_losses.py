"""The losses of one logit per class."""

import torch
from torch import Tensor

from focalkern._devices import as_parameter, autocast_is_on
from focalkern._types import HALVES, ScoredTarget, compute_dtype
from focalkern.reference._log_space import (
    SATURATED,
    exact_log_sigmoids,
    parameter_tensor,
    second_derivatives_are_exact,
)

__all__ = [
    "asymmetric_loss",
    "log_sigmoids",
    "of_share",
    "power",
    "quality_focal_loss",
    "reduce_elements",
    "shares",
    "sigmoid_focal_loss",
]


def shares(input: Tensor, target: ScoredTarget, ignore_index: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits and targets in the dtype of the computation, and whether each element counts (None: all of them do).

    Labels become one-hot rows; label C becomes a row of zeros. Values outside their domain become NaN. A score replaces
    the 1 of its label. A score of 0 becomes the smallest normal number, because a target of 0 means background.
    """
    x = input.to(compute_dtype(input.dtype))
    target, scores = (target, None) if isinstance(target, Tensor) else target
    if target.dim() == input.dim():
        t = target.to(x.dtype)
        return x, torch.where((t >= 0) & (t <= 1), t, torch.nan), None
    class_dim = 0 if input.dim() == 1 else 1
    n_classes = input.shape[class_dim]
    labels = target.long().unsqueeze(class_dim)
    classes = torch.arange(n_classes, device=x.device).view(n_classes, *[1] * (input.dim() - class_dim - 1))
    counts = (labels != ignore_index).expand(x.shape)
    valid = ((labels >= 0) & (labels <= n_classes)) | ~counts
    x = torch.where(counts, x, 0.0)  # a NaN in ignored rows must not reach loss or gradient
    share = (labels == classes).to(x.dtype)
    if scores is not None:
        of_class = scores.to(x.dtype).unsqueeze(class_dim)
        of_class = torch.where((of_class >= 0) & (of_class <= 1), of_class, torch.nan)
        tiny = torch.finfo(x.dtype).tiny
        share = torch.where(labels == classes, torch.where(of_class == 0, of_class + tiny, of_class), 0.0)
    return x, torch.where(valid, share, torch.nan), counts


def of_share(share: Tensor, value: Tensor) -> Tensor:
    """share * value, and 0 if share is 0, also for an infinite value. If share requires grad, it is the plain product,
    which keeps the derivative in share."""
    return share * value if share.requires_grad else torch.where(share == 0, 0.0, share * value)


def log_sigmoids(x: Tensor) -> tuple[Tensor, Tensor]:
    """log p and log(1 - p) of p = sigmoid(x)."""
    return exact_log_sigmoids(x) if second_derivatives_are_exact() else (_log_sigmoid(x), _log_sigmoid(-x))


def _log_sigmoid(x: Tensor) -> Tensor:
    zero = x > SATURATED
    return torch.where(zero, 0.0, torch.nn.functional.logsigmoid(torch.where(zero, 0.0, x)))


def power(log_base: Tensor, exponent: Tensor) -> Tensor:
    """base^exponent from log base, with 0^0 = 1. If the base is 0, the derivative is 0."""
    nothing = log_base == -torch.inf
    found = (exponent * torch.where(nothing, 0.0, log_base)).exp()
    return torch.where(nothing, (exponent == 0).to(found.dtype), found)


def _log(base: Tensor, rest: Tensor) -> Tensor:
    """log(base) for ``rest`` = 1 - base, which has the digits that base loses near 1."""
    nothing, near_one = base == 0, base > 0.5
    log_base = torch.where(nothing | near_one, 1.0, base).log()
    return torch.where(
        nothing, -torch.inf, torch.where(near_one, (-torch.where(near_one, rest, 0.0)).log1p(), log_base)
    )


def reduce_elements(
    loss: Tensor, input: Tensor, weight: Tensor | None, counts: Tensor | None, reduction: str
) -> Tensor:
    if weight is not None:
        loss = loss * as_parameter(weight, loss)
    if counts is not None:
        loss = torch.where(counts, loss, 0.0)
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / (loss.numel() if counts is None else counts.sum())
    is_half = input.dtype in HALVES
    return loss if is_half and autocast_is_on(input.device.type) else loss.to(input.dtype)


def sigmoid_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor = 2.0,
    alpha: float | Tensor | None = 0.25,
    reduction: str = "none",
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""Focal loss of independent logits.

    .. math::
        L = (\alpha t + (1 - \alpha)(1 - t)) u^\gamma b, \qquad u = t (1 - p) + (1 - t) p, \quad
        b = -t \log p - (1 - t) \log(1 - p)

    Args:
        input: logits of any shape.
        target: the same shape, in [0, 1]; or integer labels without the class dimension, the last one background.
        gamma: a number or a tensor that broadcasts to ``input``.
        alpha: as gamma, or None for no such factor.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the elements that are not ignored.
        weight: broadcasts to ``input``.
        ignore_index: rows with this label have loss 0 and do not count in the mean.

    Returns:
        The loss, in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Source: Lin et al. 2017 (arXiv 1708.02002), equation 5.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.sigmoid_focal_loss(logits, torch.tensor([0]))
        tensor([[0.0005, 0.1300, 0.0170]], dtype=torch.float64)
    """
    x, t, counts = shares(input, target, ignore_index)
    rest = 1.0 - t
    log_p, log_q = log_sigmoids(x)
    b = of_share(t, -log_p) + of_share(rest, -log_q)
    saturated, p, q = x.abs() > SATURATED, log_p.exp(), log_q.exp()
    u = torch.where(saturated, torch.where(x > 0, rest, t), t * q + rest * p)
    rest_of_u = torch.where(saturated, torch.where(x > 0, t, rest), t * p + rest * q)
    if t.requires_grad:
        # The derivative in the target needs u as the sum, also for hard targets.
        log_u = _log(u, rest_of_u)
    else:
        # For a hard target u is p or 1 - p. It may underflow, but log p and log(1 - p) do not.
        is_hard = (t == 0) | (t == 1)
        log_u = _log(torch.where(is_hard, 0.5, u), rest_of_u)
        log_u = torch.where(t == 1, log_q, torch.where(t == 0, log_p, log_u))
    loss = power(log_u, parameter_tensor(gamma, x)) * b
    if alpha is not None:
        alpha = parameter_tensor(alpha, x)
        loss = loss * (alpha * t + (1.0 - alpha) * rest)
    return reduce_elements(loss, input, weight, counts, reduction)


def asymmetric_loss(
    input: Tensor,
    target: Tensor,
    gamma_negative: float | Tensor = 4.0,
    gamma_positive: float | Tensor = 1.0,
    margin: float = 0.05,
    reduction: str = "none",
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""Asymmetric loss of independent logits.

    .. math::
        L = -t (1 - p)^{\gamma_+} \log p - (1 - t) v^{\gamma_-} \log(1 - v), \qquad v = \max(p - \text{margin}, 0)

    Args:
        input: logits of any shape.
        target: the same shape, in [0, 1]; or integer labels without the class dimension, the last one background.
        gamma_negative: the exponent of negatives, a number or a tensor that broadcasts to ``input``.
        gamma_positive: the exponent of positives, a number or a tensor that broadcasts to ``input``.
        margin: in [0, 1); negatives with p below it have loss 0.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the elements that are not ignored.
        weight: broadcasts to ``input``.
        ignore_index: rows with this label have loss 0 and do not count in the mean.

    Returns:
        The loss, in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Source: Ridnik et al., Asymmetric Loss for Multi-Label Classification, ICCV 2021.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.asymmetric_loss(logits, torch.tensor([0]))
        tensor([[0.0151, 0.0245, 0.0006]], dtype=torch.float64)
    """
    x, t, counts = shares(input, target, ignore_index)
    log_p, log_q = log_sigmoids(x)
    log_v, log_rest = log_p, log_q
    if margin > 0:
        v = log_p.exp() - margin
        rest = log_q.exp() + margin  # 1 - v = (1 - p) + margin does not cancel
        easy, small = v <= 0, v < 0.5
        log_v = torch.where(easy, 0.0, _log(torch.where(easy, 0.5, v), rest))
        log_rest = torch.where(small, (-torch.where(small, v, 0.0)).log1p(), torch.where(small, 1.0, rest).log())
        log_rest = torch.where(easy, 0.0, log_rest)
    positive = power(log_q, parameter_tensor(gamma_positive, x)) * -log_p
    negative = power(log_v, parameter_tensor(gamma_negative, x)) * -log_rest
    loss = of_share(t, positive) + of_share(1.0 - t, negative)
    return reduce_elements(loss, input, weight, counts, reduction)


def quality_focal_loss(
    input: Tensor,
    target: ScoredTarget,
    beta: float | Tensor = 2.0,
    reduction: str = "none",
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""Quality focal loss of independent logits.

    .. math:: L = |t - p|^\beta (-t \log p - (1 - t) \log(1 - p))

    Args:
        input: logits of any shape.
        target: the same shape, in [0, 1]; or integer labels without the class dimension, the last one background; or
            such labels and the scores of their classes.
        beta: the exponent, a number or a tensor that broadcasts to ``input``.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the elements that are not ignored.
        weight: broadcasts to ``input``.
        ignore_index: rows with this label have loss 0 and do not count in the mean.

    Returns:
        The loss, in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Source: Li et al., Generalized Focal Loss, NeurIPS 2020.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.quality_focal_loss(logits, torch.tensor([[0.9, 0.5, 0.0]], dtype=torch.float64))
        tensor([[0.0001, 0.0000, 0.0227]], dtype=torch.float64)
    """
    x, t, counts = shares(input, target, ignore_index)
    rest = 1.0 - t
    log_p, log_q = log_sigmoids(x)
    b = of_share(t, -log_p) + of_share(rest, -log_q)
    # For a hard target, this form of t - p does not cancel.
    positive = x > 0
    saturated = x.abs() > SATURATED
    smaller = torch.where(saturated, 0.0, torch.where(saturated, 0.0, torch.where(positive, log_q, log_p)).exp())
    gap = torch.where(positive, rest, t) - smaller
    size = torch.where(gap < 0, -gap, gap)
    rest_of_size = torch.where(positive, t, rest) + smaller
    if t.requires_grad:
        log_size = _log(size, rest_of_size)
    else:
        # Where the logit agrees with a hard target, the distance may underflow; its logarithm does not.
        agrees = torch.where(positive, t == 1, t == 0)
        log_size = _log(torch.where(agrees, 0.5, size), rest_of_size)
        log_size = torch.where(agrees, torch.where(positive, log_q, log_p), log_size)
    loss = power(log_size, parameter_tensor(beta, x)) * b
    return reduce_elements(loss, input, weight, counts, reduction)


# ---------------------------------------------------------------------------------------------------------------------
