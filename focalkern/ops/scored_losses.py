"""The fused losses of detectors that score boxes by their overlap: varifocal, matchability and IoU-aware BCE."""

from torch import Tensor

from focalkern._checks import flag
from focalkern._types import Reduction, ScoredTarget
from focalkern.ops.sigmoid_loss import element_loss, element_parameter
from focalkern.reference._scored_losses import IA_BCE_FLOOR

__all__ = ["ia_bce_loss", "matchability_loss", "varifocal_loss"]

_VARIFOCAL, _MATCHABILITY, _IA_BCE = 3, 4, 5  # the codes of the compiled module


def varifocal_loss(
    input: Tensor,
    target: ScoredTarget,
    gamma: float | Tensor = 2.0,
    alpha: float | Tensor | None = 0.75,
    reduction: Reduction = "none",
    *,
    detach_modulation: bool = False,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""Varifocal loss, for detection heads that predict the quality (overlap) of a box as the score of its class.

    .. math::
        L = t \; \text{BCE}(p, t) \text{ for } t > 0, \qquad -\alpha p^\gamma \log(1 - p) \text{ for } t = 0

    with p = sigmoid(input) and t the target: the quality of a matched box at its class, 0 everywhere else.

    Args:
        input: as in :func:`sigmoid_focal_loss`.
        target: as in :func:`quality_focal_loss`. A label without a score has quality 1. In ``(labels, scores)``, a
            score of 0 is a match and not background.
        gamma: a number, at least 0, or a floating-point tensor broadcastable to ``input``, which is differentiable.
        alpha: weight of the background: a number, at least 0, or a constant floating-point tensor broadcastable to
            ``input``; None for 1.
        reduction: as in :func:`sigmoid_focal_loss`.
        detach_modulation: treat p^gamma as a constant in the gradient of ``input``, as RT-DETR and D-FINE do. VFNet,
            PP-YOLOE and ultralytics differentiate it.
        weight, ignore_index: as in :func:`sigmoid_focal_loss`.

    Returns:
        As :func:`sigmoid_focal_loss`. The gradient with respect to a target of 0 is 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`sigmoid_focal_loss`.

    Source: Zhang et al., VarifocalNet, CVPR 2021 (arXiv 2008.13367), equation 2.

    Example:
        >>> logits = torch.tensor([-2.0, 0.0, 2.0])
        >>> overlap = torch.tensor([0.0, 0.5, 0.7])
        >>> fk.varifocal_loss(logits, overlap)
        tensor([0.0014, 0.3466, 0.5088])
    """
    op = "varifocal_loss"
    return _scored_loss(op, _VARIFOCAL, input, target, gamma, alpha, reduction, detach_modulation, weight, ignore_index)


def matchability_loss(
    input: Tensor,
    target: ScoredTarget,
    gamma: float | Tensor = 1.5,
    alpha: float | Tensor | None = None,
    reduction: Reduction = "none",
    *,
    detach_modulation: bool = True,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""Matchability-aware loss (MAL): a varifocal loss in which boxes of low overlap keep their full weight.

    .. math::
        L = \text{BCE}(p, t^\gamma) \text{ for } t > 0, \qquad -\alpha p^\gamma \log(1 - p) \text{ for } t = 0

    with p = sigmoid(input) and t the target: the quality of a matched box at its class, 0 everywhere else.

    Args:
        input: as in :func:`sigmoid_focal_loss`.
        target: as in :func:`quality_focal_loss`. A label without a score has quality 1. In ``(labels, scores)``, a
            score of 0 is a match and not background. It is computed as 1.2e-38 (float64: 2.2e-308), whose power
            t^gamma is visible for gamma below 0.2.
        gamma: a number, at least 0, or a floating-point tensor broadcastable to ``input``, which is differentiable.
        alpha: weight of the background: a number, at least 0, or a constant floating-point tensor broadcastable to
            ``input``; None for 1.
        reduction: as in :func:`sigmoid_focal_loss`.
        detach_modulation: treat p^gamma as a constant in the gradient of ``input``, as DEIM does.
        weight, ignore_index: as in :func:`sigmoid_focal_loss`.

    Returns:
        As :func:`sigmoid_focal_loss`. The gradient with respect to a target of 0 is 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`sigmoid_focal_loss`.

    Source: Huang et al., DEIM, CVPR 2025 (arXiv 2412.04234), and its code.

    Example:
        >>> logits = torch.tensor([-2.0, 0.0, 2.0])
        >>> overlap = torch.tensor([0.0, 0.5, 0.7])
        >>> fk.matchability_loss(logits, overlap)
        tensor([0.0052, 0.6931, 0.9556])
    """
    op = "matchability_loss"
    return _scored_loss(
        op, _MATCHABILITY, input, target, gamma, alpha, reduction, detach_modulation, weight, ignore_index
    )


def ia_bce_loss(
    input: Tensor,
    target: ScoredTarget,
    gamma: float | Tensor = 2.0,
    alpha: float | Tensor = 0.25,
    reduction: Reduction = "none",
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""IoU-aware binary cross-entropy, the classification loss of LW-DETR and RF-DETR.

    .. math::
        L = \text{BCE}(p, s) \text{ for } t > 0, \quad s = \max(p^\alpha t^{1 - \alpha}, 0.01), \qquad
        -p^\gamma \log(1 - p) \text{ for } t = 0

    with p = sigmoid(input) and t the target: the quality of a matched box at its class, 0 everywhere else. s is
    detached: no gradient flows through it.

    Args:
        input: as in :func:`sigmoid_focal_loss`.
        target: as in :func:`quality_focal_loss`. A label without a score has quality 1. In ``(labels, scores)``, a
            score of 0 is a match and not background. It is computed as 1.2e-38 (float64: 2.2e-308), so that s can be
            above 0.01 where alpha is between 0.947 (float64: 0.993) and 1.
        gamma: a number, at least 0, or a floating-point tensor broadcastable to ``input``, which is differentiable.
        alpha: exponent of p in s: a number in [0, 1], or a constant floating-point tensor broadcastable to ``input``.
        reduction, weight, ignore_index: as in :func:`sigmoid_focal_loss`.

    Returns:
        As :func:`sigmoid_focal_loss`. The gradient with respect to the target is 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`sigmoid_focal_loss`.

    Source: Cai et al., Align-DETR (arXiv 2304.07527); Chen et al., LW-DETR (arXiv 2406.03459), and its code.

    Example:
        >>> logits = torch.tensor([-2.0, 0.0, 2.0])
        >>> overlap = torch.tensor([0.0, 0.5, 0.7])
        >>> fk.ia_bce_loss(logits, overlap)
        tensor([0.0018, 0.6931, 0.6442])
    """
    op = "ia_bce_loss"
    gamma, alpha = element_parameter(op, "gamma", gamma), element_parameter(op, "alpha", alpha, high=1.0)
    return element_loss(op, _IA_BCE, input, target, gamma, alpha, IA_BCE_FLOOR, reduction, weight, ignore_index)


def _scored_loss(
    op: str,
    kind: int,
    input: Tensor,
    target: ScoredTarget,
    gamma: float | Tensor,
    alpha: float | Tensor | None,
    reduction: str,
    detach_modulation: bool,
    weight: Tensor | None,
    ignore_index: int,
) -> Tensor:
    gamma = element_parameter(op, "gamma", gamma)
    alpha = None if alpha is None else element_parameter(op, "alpha", alpha)
    detached = 1.0 if flag(op, "detach_modulation", detach_modulation) else 0.0
    return element_loss(op, kind, input, target, gamma, alpha, detached, reduction, weight, ignore_index)
