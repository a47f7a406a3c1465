"""Losses of independent logits whose target is the score of a matched box, or 0 for the background."""

import math

import torch
from torch import Tensor

from focalkern._types import ScoredTarget
from focalkern.reference._log_space import parameter_tensor
from focalkern.reference._sigmoid_losses import log_sigmoids, of_share, power, reduce_elements, shares

__all__ = ["IA_BCE_FLOOR", "ia_bce_loss", "matchability_loss", "varifocal_loss"]

IA_BCE_FLOOR = 0.01  # of the soft target, as in the published code


def varifocal_loss(
    input: Tensor,
    target: ScoredTarget,
    gamma: float | Tensor = 2.0,
    alpha: float | Tensor | None = 0.75,
    reduction: str = "none",
    *,
    detach_modulation: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""Varifocal loss of independent logits.

    .. math::
        L = t (-t \log p - (1 - t) \log(1 - p)) \text{ for } t > 0, \qquad
        -\alpha p^\gamma \log(1 - p) \text{ for } t = 0

    Args:
        input: logits of any shape.
        target: the same shape, in [0, 1]; or integer labels without the class dimension, the last one background; or
            such labels and the scores of their classes.
        gamma: the exponent, a number or a tensor that broadcasts to ``input``.
        alpha: weight of the background, a number or such a tensor; None for 1.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the elements that are not ignored.
        detach_modulation: treat p^gamma as a constant.
        weight: broadcasts to ``input``.
        ignore_index: rows with this label have loss 0 and do not count in the mean.

    Returns:
        The loss, in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not broadcast. Nothing else is checked.

    Source: Zhang et al., VarifocalNet, CVPR 2021 (arXiv 2008.13367), equation 2.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.varifocal_loss(logits, torch.tensor([[0.9, 0.5, 0.0]], dtype=torch.float64))
        tensor([[0.2942, 0.3466, 0.0170]], dtype=torch.float64)
    """
    x, t, counts = shares(input, target, ignore_index)
    log_p, log_q = log_sigmoids(x)
    background = _background(log_p, log_q, parameter_tensor(gamma, x), alpha, detach_modulation)
    matched = of_share(t, -log_p) + of_share(1.0 - t, -log_q)
    loss = _chosen(t, t * matched, background)
    return reduce_elements(loss, input, weight, counts, reduction)


def matchability_loss(
    input: Tensor,
    target: ScoredTarget,
    gamma: float | Tensor = 1.5,
    alpha: float | Tensor | None = None,
    reduction: str = "none",
    *,
    detach_modulation: bool = True,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""Matchability-aware loss of independent logits.

    .. math::
        L = -t^\gamma \log p - (1 - t^\gamma) \log(1 - p) \text{ for } t > 0, \qquad
        -\alpha p^\gamma \log(1 - p) \text{ for } t = 0

    Args:
        input: logits of any shape.
        target: the same shape, in [0, 1]; or integer labels without the class dimension, the last one background; or
            such labels and the scores of their classes.
        gamma: the exponent, a number or a tensor that broadcasts to ``input``.
        alpha: weight of the background, a number or such a tensor; None for 1.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the elements that are not ignored.
        detach_modulation: treat p^gamma as a constant.
        weight: broadcasts to ``input``.
        ignore_index: rows with this label have loss 0 and do not count in the mean.

    Returns:
        The loss, in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not broadcast. Nothing else is checked.

    Source: Huang et al., DEIM, CVPR 2025 (arXiv 2412.04234), and its code.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.matchability_loss(logits, torch.tensor([[0.9, 0.5, 0.0]], dtype=torch.float64))
        tensor([[0.4193, 0.6931, 0.0437]], dtype=torch.float64)
    """
    x, t, counts = shares(input, target, ignore_index)
    log_p, log_q = log_sigmoids(x)
    gamma = parameter_tensor(gamma, x)
    log_score = gamma * _log_of_matched(t)
    background = _background(log_p, log_q, gamma, alpha, detach_modulation)
    loss = _chosen(t, _cross_entropy(log_p, log_q, log_score), background)
    return reduce_elements(loss, input, weight, counts, reduction)


def ia_bce_loss(
    input: Tensor,
    target: ScoredTarget,
    gamma: float | Tensor = 2.0,
    alpha: float | Tensor = 0.25,
    reduction: str = "none",
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""IoU-aware binary cross-entropy of independent logits.

    .. math::
        L = -s \log p - (1 - s) \log(1 - p) \text{ for } t > 0, \quad s = \max(p^\alpha t^{1 - \alpha}, 0.01),
        \qquad -p^\gamma \log(1 - p) \text{ for } t = 0

    Args:
        input: logits of any shape.
        target: the same shape, in [0, 1]; or integer labels without the class dimension, the last one background; or
            such labels and the scores of their classes.
        gamma: the exponent of the background, a number or a tensor that broadcasts to ``input``.
        alpha: exponent of p in s, a number or such a tensor. s is detached.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the elements that are not ignored.
        weight: broadcasts to ``input``.
        ignore_index: rows with this label have loss 0 and do not count in the mean.

    Returns:
        The loss, in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not broadcast. Nothing else is checked.

    Source: Cai et al., Align-DETR (arXiv 2304.07527); Chen et al., LW-DETR (arXiv 2406.03459), and its code.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.ia_bce_loss(logits, torch.tensor([[0.9, 0.5, 0.0]], dtype=torch.float64))
        tensor([[0.3366, 0.6931, 0.0227]], dtype=torch.float64)
    """
    x, t, counts = shares(input, target, ignore_index)
    log_p, log_q = log_sigmoids(x)
    alpha = parameter_tensor(alpha, x)
    log_mixed = of_share(alpha, log_p.detach()) + (1.0 - alpha) * _log_of_matched(t.detach())
    log_score = log_mixed.clamp(min=math.log(IA_BCE_FLOOR))
    background = _background(log_p, log_q, parameter_tensor(gamma, x), None, detach_modulation=False)
    loss = _chosen(t, _cross_entropy(log_p, log_q, log_score), background)
    return reduce_elements(loss, input, weight, counts, reduction)


def _log_of_matched(t: Tensor) -> Tensor:
    return torch.where(t > 0, t, 1.0).log()


def _cross_entropy(log_p: Tensor, log_q: Tensor, log_score: Tensor) -> Tensor:
    """Cross-entropy whose value uses expm1 for 1 - score, which does not cancel for scores near 1.

    The gradient goes through 1 - score: torch computes the gradient of expm1 as its value plus 1, which cancels for
    scores near 0.
    """
    score = log_score.exp()
    cancels = 1 - score
    rest = cancels + (-log_score.expm1() - cancels).detach()
    return of_share(score, -log_p) + of_share(rest, -log_q)


def _background(
    log_p: Tensor, log_q: Tensor, gamma: Tensor, alpha: float | Tensor | None, detach_modulation: bool
) -> Tensor:
    factor = power(log_p.detach() if detach_modulation else log_p, gamma)
    return (factor if alpha is None else factor * parameter_tensor(alpha, log_p)) * -log_q


def _chosen(t: Tensor, matched: Tensor, background: Tensor) -> Tensor:
    """The loss of each element; NaN for a NaN target. The target stays in the graph even where its gradient is 0."""
    return torch.where(t > 0, matched, background) * (1.0 + 0.0 * t)
