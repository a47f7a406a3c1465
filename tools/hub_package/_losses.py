"""The public losses."""

import torch
from torch import Tensor

from focalkern._checks import finite
from focalkern.ops._row_loss import kind_of, row_loss, warn_if_steep
from focalkern.ops.sigmoid_loss import sigmoid_focal_loss

__all__ = ["focal_loss", "sigmoid_focal_loss"]


def focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor = 2.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    detach_modulation: bool = False,
) -> Tensor:
    r"""Multiclass focal loss (gamma > 0), cross-entropy (gamma = 0) and inverse focal loss (gamma < 0) from logits.

    ``L = -(1 - p)^gamma log p`` for gamma >= 0 and ``L = -(1 + p)^|gamma| log p`` for gamma < 0, p being the softmax
    probability of the target class. Everything else is as in :func:`torch.nn.functional.cross_entropy`.

    Args:
        input: logits [C], [N, C] or [N, C, d1, ...], float16, bfloat16, float32 or float64.
        target: labels of shape [], [N] or [N, d1, ...], int64, int32 or uint8; or class probabilities of the shape of
            ``input``, floating point.
        gamma: a number, or a floating-point tensor broadcastable to the unreduced loss, which is differentiable.
        weight: [C] class weights, floating point, constant.
        ignore_index: samples with this label have loss 0 and do not count in the mean.
        reduction: "none", "mean" or "sum".
        label_smoothing: in [0, 1].
        detach_modulation: treat the factor of log p as a constant.

    Returns:
        The loss, scalar or of shape [N, d1, ...], in the dtype of ``input`` (float32 for half-precision logits under
        autocast). Differentiable to any order.

    Raises:
        TypeError, ValueError: dtype, shape, value or device of an argument.
        IndexError: a label outside [0, C) that is not ``ignore_index``. On CUDA its row is NaN instead.

    Source: Lin et al. 2017 (arXiv 1708.02002); Mukhoti et al. 2020 (arXiv 2002.09437).
    """
    if not isinstance(gamma, Tensor) and not torch.compiler.is_compiling():
        gamma = finite("focal_loss", "gamma", gamma, "a number or a tensor")
        warn_if_steep("focal_loss", gamma, stacklevel=3)
    options = (weight, ignore_index, reduction, label_smoothing, detach_modulation)
    return row_loss("focal_loss", kind_of(None), input, target, gamma, 0.0, *options)
