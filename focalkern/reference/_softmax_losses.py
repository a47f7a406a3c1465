"""The losses of the softmax of a row and its target."""

import torch
from torch import Tensor

from focalkern._devices import autocast_is_on
from focalkern._types import compute_dtype
from focalkern.gamma import GammaTable
from focalkern.reference._log_space import log_softmax_and_complement, parameter_tensor

__all__ = ["brier_loss", "dual_focal_loss", "focal_loss", "gamma_tensor", "modulating_factor", "poly_focal_loss"]


def modulating_factor(log_p: Tensor, log_u: Tensor, gamma: Tensor) -> Tensor:
    """f(p) = (1 - p)^gamma for gamma >= 0 and (1 + p)^-gamma below; log_u = log(1 - p), gamma broadcasts to log_p."""
    # f is 1 at p = 0, and f * log p keeps derivatives 0 * inf = 0 in p and gamma there. At p = 1, (1 - p)^gamma is 0
    # for gamma > 0 and 1 for gamma = 0.
    # A NaN gamma comes out of every comparison, also where f is known otherwise.
    absent = (log_p == -torch.inf) & (gamma == gamma)
    certain = log_u == -torch.inf
    # Not clamp: the derivative in gamma at 0 is the one from the right, which torch's own convention there need not be.
    zero = torch.zeros_like(gamma)
    gamma_focal, gamma_inverse = torch.where(gamma < 0, zero, gamma), torch.where(gamma < 0, -gamma, zero)
    p = torch.where(log_p == -torch.inf, 0.0, log_p).exp()
    factor = (gamma_focal * torch.where(certain, 0.0, log_u) + gamma_inverse * p.log1p()).exp()
    return torch.where(absent, 1.0, torch.where(certain & (gamma_focal > 0), 0.0, factor))


def gamma_tensor(gamma: float | Tensor | GammaTable, p: Tensor) -> Tensor:
    """Gamma for the probabilities p [..., C]: a table is looked up at each p, a tensor has the shape [...]."""
    if isinstance(gamma, GammaTable):
        edges = gamma.edges.to(p.device, p.dtype)
        # right=True gives bins [lo, hi); the outer edges are not compared.
        bins = torch.bucketize(p.detach(), edges[1:-1].contiguous(), right=True)
        return gamma.gammas.to(p.device, p.dtype)[bins]
    gamma = parameter_tensor(gamma, p)
    return gamma if gamma.dim() == 0 else gamma.expand(p.shape[:-1]).unsqueeze(-1)


def focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = 2.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    detach_modulation: bool = False,
) -> Tensor:
    r"""Focal loss (inverse focal for gamma < 0); cross-entropy for gamma = 0.

    .. math::
        L = -\sum_i w_i t_i f(p_i) \log p_i, \qquad
        f(p) = (1 - p)^\gamma \text{ for } \gamma \ge 0, \quad (1 + p)^{|\gamma|} \text{ for } \gamma < 0

    with t = (1 - e) onehot(target) + e / C, or (1 - e) target + e / C for probability targets.

    Args:
        input: logits (C), (N, C) or (N, C, d1, ...), floating point.
        target: class indices, the shape of ``input`` without its class axis; or probabilities, the shape of ``input``.
        gamma: a number; a tensor broadcastable to the unreduced loss; or a table, looked up at each p without gradient.
        weight: [C], the class weights w.
        ignore_index: index targets equal to it contribute nothing.
        reduction: ``"none"``, ``"sum"``, or ``"mean"``: the sum over the summed weight of the valid targets (index
            targets) or over their number (probability targets).
        label_smoothing: e in [0, 1].
        detach_modulation: take f(p) as a constant.

    Returns:
        The loss: a scalar, or [N, d1, ...] unreduced; in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.focal_loss(logits, torch.tensor([0]), gamma=2.0)
        tensor(0.0041, dtype=torch.float64)
    """
    class_dim = 0 if input.dim() == 1 else 1
    z = input.to(compute_dtype(input.dtype)).movedim(class_dim, -1)
    log_p, log_u = log_softmax_and_complement(z)

    factor = modulating_factor(log_p, log_u, gamma_tensor(gamma, log_p.exp()))
    if detach_modulation:
        factor = factor.detach()
    class_loss = -factor * log_p
    return _reduce_classes(class_loss, input, target, weight, ignore_index, reduction, label_smoothing)


def _reduce_classes(
    class_loss: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """The loss, from that of every class [..., C] by the class's share of the target."""
    n_classes = class_loss.shape[-1]
    w = torch.ones_like(class_loss) if weight is None else weight.to(class_loss.dtype).expand(class_loss.shape)
    if target.is_floating_point():
        probabilities = target.to(class_loss.dtype).movedim(0 if input.dim() == 1 else 1, -1)
        t = (1.0 - label_smoothing) * probabilities + label_smoothing / n_classes
        return _reduce_rows(_weighted_sum(w, t, class_loss), input, None, reduction)
    valid, onehot = _one_hot(target, class_loss, ignore_index)
    t = (1.0 - label_smoothing) * onehot + label_smoothing / n_classes
    loss = torch.where(valid, _weighted_sum(w, t, class_loss), 0.0)
    return _reduce_rows(loss, input, torch.where(valid, (w * onehot).sum(-1), 0.0), reduction)


def _one_hot(target: Tensor, like: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which labels count, and 1 in their place among the classes."""
    valid = target != ignore_index
    index = torch.where(valid, target, 0).long().unsqueeze(-1)
    return valid, (torch.arange(like.shape[-1], device=like.device) == index).to(like.dtype)


def _reduce_rows(loss: Tensor, input: Tensor, row_weight: Tensor | None, reduction: str) -> Tensor:
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


def poly_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = 2.0,
    epsilon: float = 1.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Poly-1 focal loss, gamma >= 0.

    .. math:: L = \sum_i w_i t_i \left(-(1 - p_i)^\gamma \log p_i + \epsilon (1 - p_i)^{\gamma + 1}\right)

    Args:
        input: logits (C), (N, C) or (N, C, d1, ...), floating point.
        target: class indices, the shape of ``input`` without its class axis; or probabilities, the shape of ``input``.
        gamma: as of :func:`focal_loss`, >= 0; below, the loss is NaN.
        epsilon: the weight of the second term.
        weight: [C], the class weights w.
        ignore_index: index targets equal to it contribute nothing.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, as of :func:`focal_loss`.
        label_smoothing: e in [0, 1].

    Returns:
        The loss: a scalar, or [N, d1, ...] unreduced; in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.poly_focal_loss(logits, torch.tensor([0]), gamma=2.0, epsilon=1.0)
        tensor(0.0080, dtype=torch.float64)
    """
    z = input.to(compute_dtype(input.dtype)).movedim(0 if input.dim() == 1 else 1, -1)
    log_p, log_u = log_softmax_and_complement(z)
    gamma = gamma_tensor(gamma, log_p.exp())
    class_loss = modulating_factor(log_p, log_u, gamma) * (epsilon * log_u.exp() - log_p)
    class_loss = torch.where(gamma < 0, torch.nan, class_loss)
    return _reduce_classes(class_loss, input, target, weight, ignore_index, reduction, label_smoothing)


def dual_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = 5.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    detach_modulation: bool = False,
) -> Tensor:
    r"""Dual focal loss of labels.

    .. math:: L = -\sum_i w_i t_i (1 - p_i + p_{j(i)})^\gamma \log p_i

    p_j(i) is the largest probability strictly below p_i, of equal ones the first; 0 if there is none.

    Args:
        input: logits (C), (N, C) or (N, C, d1, ...), floating point.
        target: class indices, the shape of ``input`` without its class axis.
        gamma: as of :func:`focal_loss`, >= 0.
        weight: [C], the class weights w.
        ignore_index: index targets equal to it contribute nothing.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, as of :func:`focal_loss`.
        label_smoothing: e in [0, 1].
        detach_modulation: take the factor of log p as a constant.

    Returns:
        The loss: a scalar, or [N, d1, ...] unreduced; in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.dual_focal_loss(logits, torch.tensor([0]), gamma=5.0)
        tensor(0.0002, dtype=torch.float64)
    """
    z = input.to(compute_dtype(input.dtype)).movedim(0 if input.dim() == 1 else 1, -1)
    log_p, log_u = log_softmax_and_complement(z)
    # In ascending order, of equal ones the last first, the next lower class is the one before all of its own logit.
    ascending, order = z.detach().flip(-1).sort(dim=-1, stable=True)
    n_below = torch.searchsorted(ascending.contiguous(), z.detach().contiguous())
    in_order = log_p.gather(-1, z.shape[-1] - 1 - order)
    log_p_below = torch.nn.functional.pad(in_order, (1, 0), value=_NOTHING).gather(-1, n_below).clamp(min=_NOTHING)
    # log(u + p_below), where p_below <= u = 1 - p. (logaddexp has no second derivative for p_below = 0.)
    log_u = log_u.clamp(min=_NOTHING)
    log_m = log_u - torch.nn.functional.logsigmoid(log_u - log_p_below)
    factor = (gamma_tensor(gamma, log_p.exp()) * log_m).exp()
    if detach_modulation:
        factor = factor.detach()
    # At p = 0 the slope of the factor is 0, also times log p; computed, it would be 0 * inf.
    class_loss = -torch.where(log_p == -torch.inf, 1.0, factor) * log_p
    return _reduce_classes(class_loss, input, target, weight, ignore_index, reduction, label_smoothing)


# The logarithm of a probability that is 0, where -inf would meet itself.
_NOTHING = -1e30


def brier_loss(
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Brier score of the softmax.

    .. math:: L = w \sum_k (p_k - t_k)^2

    with w the weight of the label, or the mean of the class weights under the target probabilities.

    Args:
        input: logits (C), (N, C) or (N, C, d1, ...), floating point.
        target: class indices, the shape of ``input`` without its class axis; or probabilities, the shape of ``input``.
        weight: [C], the class weights w.
        ignore_index: index targets equal to it contribute nothing.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, as of :func:`focal_loss`.
        label_smoothing: e in [0, 1].

    Returns:
        The loss: a scalar, or [N, d1, ...] unreduced; in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.brier_loss(logits, torch.tensor([0]))
        tensor(0.0392, dtype=torch.float64)
    """
    class_dim = 0 if input.dim() == 1 else 1
    z = input.to(compute_dtype(input.dtype)).movedim(class_dim, -1)
    log_p, log_u = log_softmax_and_complement(z)
    if target.is_floating_point():
        given, valid = target.to(z.dtype).movedim(class_dim, -1), None
    else:
        valid, given = _one_hot(target, z, ignore_index)
    t = (1.0 - label_smoothing) * given + label_smoothing / z.shape[-1]
    # Where p and t may both be near 1, p - t is (1 - t) - (1 - p).
    p = log_p.exp()
    loss = torch.where(p > 0.5, (1.0 - t) - log_u.exp(), p - t).square().sum(-1)
    row_weight = torch.ones_like(loss) if weight is None else (weight.to(z.dtype) * given).sum(-1)
    loss = row_weight * loss
    if valid is None:
        return _reduce_rows(loss, input, None, reduction)
    return _reduce_rows(torch.where(valid, loss, 0.0), input, torch.where(valid, row_weight, 0.0), reduction)
