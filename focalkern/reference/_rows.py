"""Code shared by the definitions of the row losses: factors of log p, gammas and reductions."""

import torch
from torch import Tensor

from focalkern._devices import autocast_is_on
from focalkern.gamma import GammaTable
from focalkern.reference._log_space import parameter_tensor

__all__ = [
    "gamma_tensor",
    "modulating_factor",
    "one_hot",
    "reduce_classes",
    "reduce_rows",
    "times_log",
    "weight_of_labels",
]


def modulating_factor(log_p: Tensor, log_u: Tensor, gamma: Tensor) -> Tensor:
    """f(p) = (1 - p)^gamma for gamma >= 0 and (1 + p)^-gamma below; log_u = log(1 - p), gamma broadcasts to log_p."""
    # A NaN gamma must give NaN, also at p = 0, where f would be 1 for any gamma.
    absent = (log_p == -torch.inf) & (gamma == gamma)
    certain = log_u == -torch.inf
    # Not clamp: the derivative in gamma at 0 must be the one from the right; clamp has another convention.
    zero = torch.zeros_like(gamma)
    gamma_focal, gamma_inverse = torch.where(gamma < 0, zero, gamma), torch.where(gamma < 0, -gamma, zero)
    p = torch.where(log_p == -torch.inf, 0.0, log_p).exp()
    factor = (gamma_focal * torch.where(certain, 0.0, log_u) + gamma_inverse * p.log1p()).exp()
    return torch.where(absent, 1.0, torch.where(certain & (gamma_focal > 0), 0.0, factor))


def times_log(factor: Tensor, log_p: Tensor) -> Tensor:
    """f log p, with the limit 0 if p and f are both 0."""
    return factor * torch.where((log_p == -torch.inf) & (factor == 0), 0.0, log_p)


def gamma_tensor(gamma: float | Tensor | GammaTable, p: Tensor) -> Tensor:
    """Gamma for the probabilities p [..., C]: a table is looked up at each p, a tensor has the shape [...]."""
    if isinstance(gamma, GammaTable):
        edges = gamma.edges.to(p.device, p.dtype)
        # right=True gives bins [lo, hi). The outer edges are left out, so the outer bins are open-ended.
        bins = torch.bucketize(p.detach(), edges[1:-1].contiguous(), right=True)
        return gamma.gammas.to(p.device, p.dtype)[bins]
    gamma = parameter_tensor(gamma, p)
    return gamma if gamma.dim() == 0 else gamma.expand(p.shape[:-1]).unsqueeze(-1)


def reduce_classes(
    class_loss: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """The loss from the losses of the classes [..., C], weighted by class weights and target probabilities."""
    n_classes = class_loss.shape[-1]
    w = torch.ones_like(class_loss) if weight is None else weight.to(class_loss.dtype).expand(class_loss.shape)
    if target.is_floating_point():
        probabilities = target.to(class_loss.dtype).movedim(0 if input.dim() == 1 else 1, -1)
        t = (1.0 - label_smoothing) * probabilities + label_smoothing / n_classes
        return reduce_rows(_weighted_sum(w, t, class_loss), input, None, reduction)
    valid, onehot = one_hot(target, class_loss, ignore_index)
    t = (1.0 - label_smoothing) * onehot + label_smoothing / n_classes
    loss = torch.where(valid, _weighted_sum(w, t, class_loss), 0.0)
    return reduce_rows(loss, input, torch.where(valid, (w * onehot).sum(-1), 0.0), reduction)


def one_hot(target: Tensor, like: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Whether each label is not ignored, [...], and the one-hot labels [..., C]."""
    valid = target.long() != ignore_index
    index = torch.where(valid, target, 0).long().unsqueeze(-1)
    return valid, (torch.arange(like.shape[-1], device=like.device) == index).to(like.dtype)


def weight_of_labels(weight: Tensor, index: Tensor) -> Tensor:
    """weight[index] of labels [...]. torch.vmap over rows has no rule for an index without dimensions."""
    return weight.index_select(0, index.reshape(-1)).reshape(index.shape)


def reduce_rows(loss: Tensor, input: Tensor, row_weight: Tensor | None, reduction: str) -> Tensor:
    """Reduces the losses of rows. The mean divides by the sum of ``row_weight``, or by the number of rows."""
    divisor = loss.numel() if row_weight is None else row_weight.sum()
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / divisor
    autocast = autocast_is_on(input.device.type)
    return loss if autocast else loss.to(input.dtype)


def _weighted_sum(weight: Tensor, target: Tensor, class_loss: Tensor) -> Tensor:
    # A class without target mass contributes 0, also if its loss is infinite.
    share = weight * target
    nothing = (share == 0) & (class_loss == torch.inf)
    product = share * torch.where(nothing, 0.0, class_loss)
    if share.requires_grad:
        # The derivative in the target probability is the infinite loss of the class. A square root has this derivative
        # at 0. With class weight 0 the derivative is 0.
        steep = nothing & (weight != 0)
        product = torch.where(steep, torch.where(steep, share, 1.0).sqrt(), product)
    return product.sum(-1)
