"""Shared by the definitions of the row losses: factors of log p, gammas and reductions."""

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
]


def modulating_factor(log_p: Tensor, log_u: Tensor, gamma: Tensor) -> Tensor:
    """f(p) = (1 - p)^gamma for gamma >= 0 and (1 + p)^-gamma below; log_u = log(1 - p), gamma broadcasts to log_p."""
    # A NaN gamma must stay NaN, even where f is known from a comparison.
    absent = (log_p == -torch.inf) & (gamma == gamma)
    certain = log_u == -torch.inf
    # Not clamp: the derivative in gamma at 0 is the one from the right, which torch's own convention there need not be.
    zero = torch.zeros_like(gamma)
    gamma_focal, gamma_inverse = torch.where(gamma < 0, zero, gamma), torch.where(gamma < 0, -gamma, zero)
    p = torch.where(log_p == -torch.inf, 0.0, log_p).exp()
    factor = (gamma_focal * torch.where(certain, 0.0, log_u) + gamma_inverse * p.log1p()).exp()
    return torch.where(absent, 1.0, torch.where(certain & (gamma_focal > 0), 0.0, factor))


def times_log(factor: Tensor, log_p: Tensor) -> Tensor:
    """f log p, with its limit 0 where p and f are 0."""
    return factor * torch.where((log_p == -torch.inf) & (factor == 0), 0.0, log_p)


def gamma_tensor(gamma: float | Tensor | GammaTable, p: Tensor) -> Tensor:
    """Gamma for the probabilities p [..., C]: a table is looked up at each p, a tensor has the shape [...]."""
    if isinstance(gamma, GammaTable):
        edges = gamma.edges.to(p.device, p.dtype)
        # right=True gives bins [lo, hi); the outer edges are not compared.
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
    """The loss: the losses of the classes [..., C], weighted by the shares of the target."""
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
    """The labels that count, and 1 in their place among the classes."""
    valid = target != ignore_index
    index = torch.where(valid, target, 0).long().unsqueeze(-1)
    return valid, (torch.arange(like.shape[-1], device=like.device) == index).to(like.dtype)


def reduce_rows(loss: Tensor, input: Tensor, row_weight: Tensor | None, reduction: str) -> Tensor:
    """The mean is over the weights of the rows, or their number."""
    divisor = loss.numel() if row_weight is None else row_weight.sum()
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / divisor
    autocast = autocast_is_on(input.device.type)
    return loss if autocast else loss.to(input.dtype)


def _weighted_sum(weight: Tensor, target: Tensor, class_loss: Tensor) -> Tensor:
    # A class with no share in the target contributes 0, also where its own loss is infinite.
    share = weight * target
    nothing = (share == 0) & (class_loss == torch.inf)
    product = share * torch.where(nothing, 0.0, class_loss)
    if share.requires_grad:
        # The slope in the share is the loss of the class, infinite: a square root has it at 0. Without weight it is 0.
        steep = nothing & (weight != 0)
        product = torch.where(steep, torch.where(steep, share, 1.0).sqrt(), product)
    return product.sum(-1)
