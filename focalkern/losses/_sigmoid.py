"""The focal loss of independent logits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from focalkern.losses._base import Reduction, check_reduction, compute_dtype, in_dtype_of, number


def sigmoid_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float = 2.0,
    alpha: float | None = 0.25,
    reduction: Reduction = "none",
) -> Tensor:
    r"""Focal loss of independent logits, for one-logit and multi-label heads.

    Elementwise, with p = sigmoid(input), t the target and BCE the binary cross-entropy:

    .. math::
        L = (\alpha t + (1 - \alpha)(1 - t)) \; (1 - p_t)^\gamma \; \text{BCE}(p, t), \qquad
        p_t = p t + (1 - p)(1 - t)

    The value and gradient of ``torchvision.ops.sigmoid_focal_loss`` (whose positional order is alpha, gamma); but here
    1 - p_t does not cancel, so that both stay finite and exact for finite logits of any size. The gradient at infinite
    ones is NaN, as there.

    Args:
        input: logits of any shape, floating point.
        target: the same shape, in [0, 1]: 0 and 1, or soft targets. Outside of [0, 1] the loss is NaN.
        gamma: a number, at least 0.
        alpha: weight of t = 1 against 1 - alpha of t = 0, in [0, 1]; None (or -1, as in torchvision) for neither.
        reduction: "none", "mean" (over all elements) or "sum".

    Returns:
        The loss, scalar or of the shape of ``input``, in its dtype (float32 for half-precision logits under autocast).

    Raises:
        TypeError, ValueError: an argument of the wrong kind, value, shape or device.

    Source: Lin et al. 2017 (arXiv 1708.02002), equation 5.
    """
    op = "sigmoid_focal_loss"
    for name, value in (("input", input), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if not input.is_floating_point():
        raise TypeError(f"{op}: input must be floating point, got {input.dtype}")
    if target.shape != input.shape:
        raise ValueError(f"{op}: target must be the shape of input = {list(input.shape)}, got {list(target.shape)}")
    if target.device != input.device:
        raise ValueError(f"{op}: target must be on the device of input, {input.device}, got {target.device}")
    check_reduction(op, reduction)
    gamma = number(op, "gamma", gamma, low=0.0)
    alpha = _alpha(op, alpha)
    x = input.to(compute_dtype(input.dtype))
    t = target.to(x.dtype)
    log_p, log_not_p = F.logsigmoid(x), F.logsigmoid(-x)
    # 1 - p_t = t (1 - p) + (1 - t) p: a sum of two numbers that are not negative, one of them 0 for hard targets. In
    # logarithms it does not underflow; its derivative in a hard target needs the sum itself.
    if t.requires_grad:
        factor = (t * log_not_p.exp() + (1.0 - t) * log_p.exp()).pow(gamma)
    else:
        factor = (gamma * torch.logaddexp(t.log() + log_not_p, torch.log1p(-t) + log_p)).exp()
    # Not binary_cross_entropy_with_logits, whose gradient p - t rounds to 0 for x > 17 in float32.
    loss = factor * -(t * log_p + (1.0 - t) * log_not_p)
    if alpha is not None:
        loss = loss * (alpha * t + (1.0 - alpha) * (1.0 - t))
    if reduction != "none":
        loss = loss.sum() if reduction == "sum" else loss.mean()
    return in_dtype_of(loss, input)


def _alpha(op: str, alpha: float | None) -> float | None:
    # torchvision says -1 for none.
    return None if alpha is None or alpha == -1 else number(op, "alpha", alpha, low=0.0, high=1.0)


class SigmoidFocalLoss(nn.Module):
    """The module form of :func:`sigmoid_focal_loss`, with the mean as default reduction.

    Args, Raises: as :func:`sigmoid_focal_loss`.
    """

    def __init__(self, gamma: float = 2.0, alpha: float | None = 0.25, reduction: Reduction = "mean") -> None:
        super().__init__()
        check_reduction("SigmoidFocalLoss", reduction)
        self.gamma = number("SigmoidFocalLoss", "gamma", gamma, low=0.0)
        self.alpha = _alpha("SigmoidFocalLoss", alpha)
        self.reduction: Reduction = reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return sigmoid_focal_loss(input, target, self.gamma, self.alpha, self.reduction)

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, alpha={self.alpha}, reduction={self.reduction}"
