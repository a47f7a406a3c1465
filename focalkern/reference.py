"""Every operator in plain torch: the oracle of the tests, the baseline of the benchmarks, the documentation.

The functions take the arguments of the public operators and compute, in float64 for float64 inputs, what the compiled
kernels must compute. They are written to be read: every class of a row is treated alike, nothing is fused, arguments
are not checked, and the derivatives of any order come from autograd. None of them uses an epsilon or a clamp: where a
formula would meet ``0 * inf`` or cancel, the limit is written out instead.

Notation: ``z`` logits, ``q = softmax(z / T)``, ``lq = log q``, ``u = 1 - q``, ``phi = -q * lq / u``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from focalkern._devices import as_parameter, autocast_is_on
from focalkern.gamma import GammaTable

__all__ = [
    "assign_bins",
    "asymmetric_loss",
    "binary_focal_calibration_map",
    "brier_loss",
    "calibration_error",
    "calibration_grid",
    "dual_focal_loss",
    "focal_calibration_map",
    "focal_loss",
    "poly_focal_loss",
    "quality_focal_loss",
    "sigmoid_focal_loss",
    "spline_calibration_map",
]


# ---------------------------------------------------------------------------------------------------------------------
# Shared pieces
# ---------------------------------------------------------------------------------------------------------------------


def log_softmax_and_complement(z: Tensor) -> tuple[Tensor, Tensor]:
    r"""log q and log(1 - q) of every class, without cancellation.

    For the largest class of a row, 1 - q cancels when q is near 1. With d = log-sum-exp of the other logits - z_top,

    .. math:: \log q_{top} = -\log(1 + e^d), \qquad \log(1 - q_{top}) = d - \log(1 + e^d).

    Every other class has q <= 1/2, where log1p(-q) is accurate.

    Args:
        z: logits [..., C], floating point. -inf is a class with q = 0; a row whose largest logit is not finite is NaN.

    Returns:
        (log q, log(1 - q)), both [..., C].
    """
    top = z.argmax(-1, keepdim=True)
    z_top = z.gather(-1, top)
    is_top = torch.arange(z.shape[-1], device=z.device) == top
    # The shift is a constant.
    shifted = z - z_top.detach()
    others = torch.where(is_top, -torch.inf, shifted)
    zero = z_top - z_top.detach()

    # A class alone in its row, all others -inf (or C = 1), has q = 1 whatever its logit: constants, no gradient.
    alone = (others == -torch.inf).all(-1, keepdim=True) & z_top.isfinite()
    log_others = _logsumexp(torch.where(alone, 0.0, others))
    # d <= log(C - 1), so exp(d) never overflows.
    d = log_others - zero
    log1p_exp_d = d.exp().log1p()
    log_q_top = torch.where(alone, 0.0, -log1p_exp_d)
    # Where q <= 1/2 the first forms of log u and of the sum's logarithm lose digits: one is a difference, and the slope
    # of the other in the largest logit is a difference of two sums over all classes.
    above_half = d < 0
    log_u_below = -(-torch.where(above_half, 0.0, d)).exp().log1p()
    log_u_top = torch.where(above_half, d - log1p_exp_d, log_u_below)
    log_u_top = torch.where(alone, -torch.inf, log_u_top)
    log_sum_below = (log_others.exp() + (zero.exp() - 1.0)).log1p()
    log_sum = torch.where(alone, zero, torch.where(above_half, zero + log1p_exp_d, log_sum_below))

    # inf - inf: a row whose largest logit is NaN or infinite has no softmax, and says so in all its classes.
    log_q = torch.where(is_top, log_q_top, shifted - log_sum) + (z_top - z_top)
    absent = log_q == -torch.inf
    log_u_below_half = torch.where(absent, 0.0, torch.log1p(-torch.where(is_top | absent, -1.0, log_q).exp()))
    log_u = torch.where(is_top, log_u_top + (z_top - z_top), log_u_below_half)
    return log_q, log_u


def _logsumexp(z: Tensor) -> Tensor:
    # Written out, because runtimes to which this exports (ONNX) have one that underflows.
    largest = z.detach().amax(-1, keepdim=True)
    return (z - largest).exp().sum(-1, keepdim=True).log() + largest


def phi_of(log_q: Tensor, log_u: Tensor) -> Tensor:
    r"""phi = -q log(q) / (1 - q): 0 at q = 0, 1 at q = 1, increasing between.

    Near q = 1 the quotient and its derivatives cancel, and the series of -log(1 - u) / u = 1 + u/2 + u^2/3 + ... is
    summed instead.
    """
    absent = log_q == -torch.inf
    log_q = torch.where(absent, -1.0, log_q)
    u = log_u.exp()
    near_one = u < 0.1
    quotient = -log_q / torch.where(near_one, 0.5, u)
    # The first term left out, u^17 / 18, is below 1e-18.
    small_u = torch.where(near_one, u, 0.0)
    series = torch.zeros_like(u)
    for n in range(17, 0, -1):
        series = series * small_u + 1.0 / n
    return torch.where(absent, 0.0, log_q.exp() * torch.where(near_one, series, quotient))


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# Focal loss
# ---------------------------------------------------------------------------------------------------------------------


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


def _number_tensor(value: float | Tensor, like: Tensor) -> Tensor:
    """A number or tensor in the dtype of ``like``; a number is rounded once, and not to float32 on its way."""
    if not isinstance(value, Tensor) and torch.compiler.is_compiling():
        # Not a constant of the graph: another value must not compile again.
        return (torch.zeros((), dtype=torch.float64) + value).to(like.dtype).to(like.device)
    return value.to(like) if isinstance(value, Tensor) else torch.tensor(value, dtype=like.dtype, device=like.device)


def _parameter(value: float | Tensor, like: Tensor) -> Tensor:
    """As _number_tensor, but a number on the host stays there."""
    return as_parameter(value, like) if isinstance(value, Tensor) else _number_tensor(value, like)


def _gamma_tensor(gamma: float | Tensor | GammaTable, p: Tensor) -> Tensor:
    """Gamma for the probabilities p [..., C]: a table is looked up at each p, a tensor has the shape [...]."""
    if isinstance(gamma, GammaTable):
        edges = gamma.edges.to(p.device, p.dtype)
        # right=True gives bins [lo, hi); the outer edges are not compared.
        bins = torch.bucketize(p.detach(), edges[1:-1].contiguous(), right=True)
        return gamma.gammas.to(p.device, p.dtype)[bins]
    gamma = _parameter(gamma, p)
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
    z = input.to(_compute_dtype(input.dtype)).movedim(class_dim, -1)
    log_p, log_u = log_softmax_and_complement(z)

    factor = modulating_factor(log_p, log_u, _gamma_tensor(gamma, log_p.exp()))
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
    z = input.to(_compute_dtype(input.dtype)).movedim(0 if input.dim() == 1 else 1, -1)
    log_p, log_u = log_softmax_and_complement(z)
    gamma = _gamma_tensor(gamma, log_p.exp())
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
    z = input.to(_compute_dtype(input.dtype)).movedim(0 if input.dim() == 1 else 1, -1)
    log_p, log_u = log_softmax_and_complement(z)
    # In ascending order, of equal ones the last first, the next lower class is the one before all of its own logit.
    ascending, order = z.detach().flip(-1).sort(dim=-1, stable=True)
    n_below = torch.searchsorted(ascending.contiguous(), z.detach().contiguous())
    in_order = log_p.gather(-1, z.shape[-1] - 1 - order)
    log_p_below = torch.nn.functional.pad(in_order, (1, 0), value=_NOTHING).gather(-1, n_below).clamp(min=_NOTHING)
    # log(u + p_below), where p_below <= u = 1 - p. (logaddexp has no second derivative for p_below = 0.)
    log_u = log_u.clamp(min=_NOTHING)
    log_m = log_u - torch.nn.functional.logsigmoid(log_u - log_p_below)
    factor = (_gamma_tensor(gamma, log_p.exp()) * log_m).exp()
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
    z = input.to(_compute_dtype(input.dtype)).movedim(class_dim, -1)
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


# ---------------------------------------------------------------------------------------------------------------------
# Losses of one logit
# ---------------------------------------------------------------------------------------------------------------------


def _shares(input: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits and targets in the type of the computation, and which elements count (None: all of them).

    Labels become one-hot rows, with label C a row of zeros; everything outside of its domain becomes NaN.
    """
    x = input.to(_compute_dtype(input.dtype))
    if target.dim() == input.dim():
        t = target.to(x.dtype)
        return x, torch.where((t >= 0) & (t <= 1), t, torch.nan), None
    class_dim = 0 if input.dim() == 1 else 1
    n_classes = input.shape[class_dim]
    labels = target.long().unsqueeze(class_dim)
    classes = torch.arange(n_classes, device=x.device).view(n_classes, *[1] * (input.dim() - class_dim - 1))
    counts = (labels != ignore_index).expand(x.shape)
    valid = ((labels >= 0) & (labels <= n_classes)) | ~counts
    x = torch.where(counts, x, 0.0)  # so that a NaN in them stays there
    return x, torch.where(valid, (labels == classes).to(x.dtype), torch.nan), counts


def _of_share(share: Tensor, value: Tensor) -> Tensor:
    """share * value, and 0 without a share, also of an infinite value. A share that is to be differentiated has a slope
    there all the same."""
    return share * value if share.requires_grad else torch.where(share == 0, 0.0, share * value)


# Beyond this logit, sigmoid is 0 or 1 in every dtype, and has no slope: 0 times a slope that overflows would be NaN.
_SATURATED = 1e4


def _log_sigmoid(x: Tensor) -> Tensor:
    zero = x > _SATURATED
    return torch.where(zero, 0.0, torch.nn.functional.logsigmoid(torch.where(zero, 0.0, x)))


def _sigmoid(x: Tensor) -> Tensor:
    saturated = x.abs() > _SATURATED
    inner = torch.nn.functional.logsigmoid(torch.where(saturated, 0.0, x)).exp()
    return torch.where(saturated, (x > 0).to(x.dtype), inner)


def _power(log_base: Tensor, exponent: Tensor) -> Tensor:
    """base^exponent from log base, with 0^0 = 1, and without a slope where the base is 0."""
    nothing = log_base == -torch.inf
    power = (exponent * torch.where(nothing, 0.0, log_base)).exp()
    return torch.where(nothing, (exponent == 0).to(power.dtype), power)


def _log(base: Tensor) -> Tensor:
    nothing = base == 0
    return torch.where(nothing, -torch.inf, torch.where(nothing, 1.0, base).log())


def _reduce_elements(
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
    is_half = input.dtype in (torch.float16, torch.bfloat16)
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
        alpha: likewise, or None for no such factor.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the elements that are not ignored.
        weight: broadcasts to ``input``.
        ignore_index: label whose elements count nothing.

    Returns:
        The loss, in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.sigmoid_focal_loss(logits, torch.tensor([0]))
        tensor([[0.0005, 0.1300, 0.0170]], dtype=torch.float64)
    """
    x, t, counts = _shares(input, target, ignore_index)
    rest = 1.0 - t
    log_p, log_q = _log_sigmoid(x), _log_sigmoid(-x)
    b = _of_share(t, -log_p) + _of_share(rest, -log_q)
    u = torch.where(x.abs() > _SATURATED, torch.where(x > 0, rest, t), t * _sigmoid(-x) + rest * _sigmoid(x))
    gamma = _parameter(gamma, x)
    if t.requires_grad:
        # The slope in a hard target needs the sum itself.
        factor = torch.where(u == 0, (gamma == 0).to(x.dtype), torch.where(u == 0, 1.0, u).pow(gamma))
    else:
        # In a hard one u is one of the two, and may underflow where its logarithm does not.
        log_u = torch.where(t == 1, log_q, torch.where(t == 0, log_p, _log(torch.where((t == 0) | (t == 1), 1.0, u))))
        factor = _power(log_u, gamma)
    loss = factor * b
    if alpha is not None:
        alpha = _parameter(alpha, x)
        loss = loss * (alpha * t + (1.0 - alpha) * rest)
    return _reduce_elements(loss, input, weight, counts, reduction)


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
        gamma_positive: that of positives.
        margin: in [0, 1); negatives with p below it count nothing.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the elements that are not ignored.
        weight: broadcasts to ``input``.
        ignore_index: label whose elements count nothing.

    Returns:
        The loss, in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.asymmetric_loss(logits, torch.tensor([0]))
        tensor([[0.0151, 0.0245, 0.0006]], dtype=torch.float64)
    """
    x, t, counts = _shares(input, target, ignore_index)
    log_p, log_q = _log_sigmoid(x), _log_sigmoid(-x)
    log_v, log_rest = log_p, log_q
    if margin > 0:
        v = log_p.exp() - margin
        easy, small = v <= 0, v < 0.5
        log_v = torch.where(easy, 0.0, torch.where(easy, 1.0, v).log())
        # 1 - v = 1 - p + margin, of which one or the other form does not cancel.
        log_rest = torch.where(
            small, (-torch.where(small, v, 0.0)).log1p(), (torch.where(small, 1.0, log_q.exp() + margin)).log()
        )
        log_rest = torch.where(easy, 0.0, log_rest)
    positive = _power(log_q, _parameter(gamma_positive, x)) * -log_p
    negative = _power(log_v, _parameter(gamma_negative, x)) * -log_rest
    loss = _of_share(t, positive) + _of_share(1.0 - t, negative)
    return _reduce_elements(loss, input, weight, counts, reduction)


def quality_focal_loss(
    input: Tensor,
    target: Tensor,
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
        target: the same shape, in [0, 1]; or integer labels without the class dimension, the last one background.
        beta: the exponent, a number or a tensor that broadcasts to ``input``.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the elements that are not ignored.
        weight: broadcasts to ``input``.
        ignore_index: label whose elements count nothing.

    Returns:
        The loss, in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.quality_focal_loss(logits, torch.tensor([[0.9, 0.5, 0.0]], dtype=torch.float64))
        tensor([[0.0001, 0.0000, 0.0227]], dtype=torch.float64)
    """
    x, t, counts = _shares(input, target, ignore_index)
    rest = 1.0 - t
    log_p, log_q = _log_sigmoid(x), _log_sigmoid(-x)
    b = _of_share(t, -log_p) + _of_share(rest, -log_q)
    # Of the two forms of the difference, that in which a hard target does not cancel.
    positive = x > 0
    gap = torch.where(positive, rest - _sigmoid(-x), t - _sigmoid(x))
    size = torch.where(gap < 0, -gap, gap)
    beta = _parameter(beta, x)
    if t.requires_grad:
        factor = torch.where(size == 0, (beta == 0).to(x.dtype), torch.where(size == 0, 1.0, size).pow(beta))
    else:
        agrees = torch.where(positive, t == 1, t == 0)
        log_size = torch.where(agrees, torch.where(positive, log_q, log_p), _log(torch.where(agrees, 1.0, size)))
        factor = _power(log_size, beta)
    return _reduce_elements(factor * b, input, weight, counts, reduction)


# ---------------------------------------------------------------------------------------------------------------------
# Focal calibration map
# ---------------------------------------------------------------------------------------------------------------------


def _in_order(result: Tensor, given: Tensor) -> Tensor:
    """``result`` [..., C], an increasing function of ``given``, where rounding has not kept the order, or has made
    equals differ: the largest result of all classes up to the last of the equals. Derivatives stay those of ``result``.
    """
    if torch.onnx.is_in_onnx_export():  # ONNX has no running extrema, and its exponentials round in their own way
        return result
    value, order = result.detach(), given.detach().argsort(-1)
    ascending = given.detach().gather(-1, order)
    place = torch.arange(given.shape[-1], device=given.device).expand_as(order)
    goes_on = torch.nn.functional.pad(ascending[..., 1:] == ascending[..., :-1], (0, 1))
    last_equal = place.masked_fill(goes_on, given.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
    ordered = value.gather(-1, order).cummax(-1).values.gather(-1, last_equal)
    ordered = torch.empty_like(value).scatter(-1, order, ordered)
    return torch.where(ordered == value, result, result + (ordered - value))


def focal_calibration_map(
    input: Tensor,
    gamma: float | Tensor,
    temperature: float | Tensor = 1.0,
    *,
    input_kind: str = "logits",
    log: bool = False,
) -> Tensor:
    r"""The focal calibration map of tempered probabilities.

    .. math::
        \hat p_j = \frac{q_j / G(q_j)}{\sum_k q_k / G(q_k)}, \qquad
        G(q) = (1 - q)^\gamma (1 + \gamma\phi(q)), \quad q = \mathrm{softmax}(z / T)

    computed in log space, as the log-softmax of a_j = log q_j - gamma log(1 - q_j) - log(1 + gamma phi_j). A negative
    gamma is put into the same formula; it does not mean the inverse focal loss here.

    Args:
        input: [..., C] logits, or probabilities with ``input_kind="probs"``; -inf, or probability 0, is a class with
            q = 0 and output 0.
        gamma: a number or a tensor broadcastable to [...], > -1.
        temperature: a number or a tensor broadcastable to [...], > 0.
        input_kind: ``"logits"`` or ``"probs"``. Probabilities are renormalised.
        log: return log-probabilities.

    Returns:
        [..., C] calibrated probabilities in ``input``'s dtype; NaN rows outside the domain.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Source: Komisarenko & Kull, ECAI 2024 (arXiv 2408.11598).

    Example:
        >>> logits = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
        >>> fk.reference.focal_calibration_map(logits, gamma=2.0)
        tensor([0.9895, 0.0076, 0.0029], dtype=torch.float64)
    """
    z = input.to(_compute_dtype(input.dtype))
    gamma = _number_tensor(gamma, z).unsqueeze(-1)
    temperature = _number_tensor(temperature, z).unsqueeze(-1)

    # Absent classes take no part in any arithmetic, so that no gradient meets 0 * inf.
    if input_kind == "probs":
        absent = z == 0
        finite = torch.where(absent, 1.0, z).log()
    else:
        absent = z == -torch.inf
        finite = torch.where(absent, 0.0, z)
    log_q, log_u = log_softmax_and_complement(torch.where(absent, -torch.inf, finite / temperature))

    certain = log_u == -torch.inf  # q = 1: every other class is absent and the result is 1 again
    a = log_q - gamma * torch.where(certain, 0.0, log_u) - (gamma * phi_of(log_q, log_u)).log1p()
    log_p, _ = log_softmax_and_complement(a)
    log_p = _in_order(log_p, finite.masked_fill(absent, -torch.inf))
    log_p = torch.where((gamma > -1) & (temperature > 0), log_p, torch.nan)
    return (log_p if log else log_p.exp()).to(input.dtype)


def spline_calibration_map(
    input: Tensor,
    temperature: float,
    floor: float,
    slope: float,
    knots: Tensor,
    values: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    input_kind: str = "logits",
    log: bool = False,
) -> Tensor:
    r"""The map of spline scaling: a natural cubic spline of the log-odds of every class, in the softmax.

    .. math::
        \hat p = \mathrm{softmax}\big((1 + a) x + f(u) + W x + b\big), \qquad
        x = \log\big((1 - e)\, \mathrm{softmax}(z / T) + e / C\big), \quad u_j = x_j - \log \sum_{k \ne j} e^{x_k}

    With the second derivatives M of the spline at its knots, h_i = t_{i+1} - t_i and B = (u - t_i) / h_i = 1 - A,

    .. math::
        f(u) = A f_i + B f_{i+1} + \big((A^3 - A) M_i + (B^3 - B) M_{i+1}\big) h_i^2 / 6

    between t_i and t_{i+1}, and a straight line beyond the first and the last knot.

    Args:
        input: [..., C] logits, or probabilities with ``input_kind="probs"``; -inf, or probability 0, counts as e / C.
        temperature: T > 0.
        floor: e, between 0 and 1.
        slope: a.
        knots, values: [m] ascending t and f(t), m >= 3.
        weight: W [C, C], or its diagonal [C]; None is 0.
        bias: b [C]; None is 0.
        input_kind: ``"logits"`` or ``"probs"``.
        log: return log-probabilities.

    Returns:
        [..., C] calibrated probabilities in ``input``'s dtype.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Source: Green & Silverman, Nonparametric Regression and Generalized Linear Models, 1994, section 2.1.2.

    Example:
        >>> logits, knots = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64), torch.tensor([-2.0, -1.0, 0.0, 1.0])
        >>> fk.reference.spline_calibration_map(logits, 1.0, 1e-3, 0.0, knots, torch.zeros(4))
        tensor([0.8433, 0.1144, 0.0423], dtype=torch.float64)
        >>> fk.reference.spline_calibration_map(logits, 1.0, 1e-3, 0.0, knots, torch.tensor([0.0, 0.0, 0.1, 0.5]))
        tensor([0.9244, 0.0551, 0.0205], dtype=torch.float64)
    """
    z = input.to(_compute_dtype(input.dtype))
    t, f = knots.to(z), values.to(z)
    q = ((z.log() if input_kind == "probs" else z) / temperature).softmax(-1)
    x = ((1 - floor) * q + floor / z.shape[-1]).log()
    itself = torch.eye(z.shape[-1], dtype=torch.bool, device=z.device)
    others = x.unsqueeze(-2).masked_fill(itself, -torch.inf)
    u = x - others.logsumexp(-1)

    h = t.diff()
    middle = (h[:-1] + h[1:]).diag() / 3 + h[1:-1].diag(1) / 6 + h[1:-1].diag(-1) / 6
    inner = torch.linalg.solve(middle.double(), (f.diff() / h).diff().double()).to(z)
    second = torch.cat([f.new_zeros(1), inner, f.new_zeros(1)])
    i = torch.searchsorted(t[1:-1].contiguous(), u.contiguous())
    inside = u.clamp(t[0], t[-1])
    far = (inside - t[i]) / h[i]
    near = 1 - far
    cubic = ((near**3 - near) * second[i] + (far**3 - far) * second[i + 1]) * h[i] ** 2 / 6
    curve = near * f[i] + far * f[i + 1] + cubic
    first = (f[1] - f[0]) / h[0] - h[0] * second[1] / 6
    last = (f[-1] - f[-2]) / h[-1] + h[-1] * second[-2] / 6
    curve = curve + torch.where(u < t[0], first, last) * (u - inside)

    scores = (1 + slope) * x + curve
    if weight is not None:
        scores = scores + (x * weight.to(z) if weight.dim() == 1 else x @ weight.to(z).T)
    if bias is not None:
        scores = scores + bias.to(z)
    result = scores.log_softmax(-1) if log else scores.softmax(-1)
    return result.to(input.dtype)


def binary_focal_calibration_map(
    logits: Tensor, gamma: float | Tensor, temperature: float | Tensor = 1.0, *, log_odds: bool = False
) -> Tensor:
    r"""The focal calibration map of two classes, as a function of s = (z_1 - z_0) / T.

    .. math:: g(s) = (1 + \gamma) s - \log(1 + \gamma\phi(\sigma(s))) + \log(1 + \gamma\phi(\sigma(-s)))

    Args:
        logits: any shape, the difference of the two logits.
        gamma: a number or a tensor broadcastable to ``logits``, > -1.
        temperature: a number or a tensor broadcastable to ``logits``, > 0.
        log_odds: return g(s) instead of the probability sigmoid(g(s)).

    Returns:
        The shape and dtype of ``logits``; NaN outside the domain.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Source: Komisarenko & Kull, ECAI 2024 (arXiv 2408.11598).

    Example:
        >>> logits = torch.tensor([0.0, 2.0], dtype=torch.float64)
        >>> fk.reference.binary_focal_calibration_map(logits, gamma=2.0)
        tensor([0.5000, 0.9955], dtype=torch.float64)
    """
    z = logits.to(_compute_dtype(logits.dtype))
    gamma = _number_tensor(gamma, z)
    temperature = _number_tensor(temperature, z)
    s = z / temperature
    log_q, log_u = torch.nn.functional.logsigmoid(s), torch.nn.functional.logsigmoid(-s)
    g = (1 + gamma) * s - (gamma * phi_of(log_q, log_u)).log1p() + (gamma * phi_of(log_u, log_q)).log1p()
    g = torch.where((gamma > -1) & (temperature > 0), g, torch.nan)
    return (g if log_odds else g.sigmoid()).to(logits.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Calibration error and the grid
# ---------------------------------------------------------------------------------------------------------------------


def assign_bins(confidence: Tensor, n_bins: int, estimator: str) -> Tensor:
    """The bin of each sample.

    ``equal_width``
        (k/M, (k+1)/M], with 0 in the first bin; the edges are rounded to the confidence's dtype.
    ``equal_mass``
        sorted ascending, ties by row, and cut into M runs whose sizes differ by at most one, the longer ones first.
    ``equal_mass_interp``
        edges interpolated between the sorted confidences at the ranks 0, N/M, 2N/M, ..., N (the last edge is the
        largest confidence) and rounded to the confidence's dtype; bins (lo, hi]. Samples at the lowest edge fall in no
        bin.

    Args:
        confidence: [N] float32 or float64.
        n_bins: M >= 1.
        estimator: one of the three names.

    Returns:
        [N] int64, -1 for samples in no bin.

    Raises:
        ValueError: another estimator.

    Example:
        >>> confidence = torch.tensor([0.2, 0.9, 0.6])
        >>> fk.reference.assign_bins(confidence, 2, "equal_width")
        tensor([0, 1, 1])
    """
    n = len(confidence)
    bins = torch.full((n,), -1, dtype=torch.int64, device=confidence.device)
    if estimator == "equal_mass":
        order = confidence.argsort(stable=True)
        begin = 0
        for b in range(n_bins):
            end = begin + n // n_bins + (1 if b < n % n_bins else 0)
            bins[order[begin:end]] = b
            begin = end
        return bins
    if estimator == "equal_width":
        edges = [torch.tensor(k / n_bins, dtype=torch.float64).to(confidence.dtype) for k in range(n_bins + 1)]
        bins[confidence == 0] = 0
    elif estimator == "equal_mass_interp":
        sorted_confidence = confidence.double().sort().values
        edges = []
        for k in range(n_bins + 1):
            rank = min(k * (n / n_bins), n - 1)  # rounded as numpy.linspace rounds it
            low = int(rank)
            high = min(low + 1, n - 1)
            edge = sorted_confidence[low] + (rank - low) * (sorted_confidence[high] - sorted_confidence[low])
            edges.append(edge.to(confidence.dtype))
    else:
        raise ValueError(
            f"assign_bins: estimator must be equal_width, equal_mass or equal_mass_interp, got {estimator!r}"
        )
    for b in range(n_bins):
        bins[(confidence > edges[b]) & (confidence <= edges[b + 1])] = b
    return bins


def calibration_error(
    confidence: Tensor, correct: Tensor, n_bins: int = 15, estimator: str = "equal_width"
) -> tuple[float, float]:
    r"""Expected and maximum calibration error, as fractions.

    .. math::
        \mathrm{ECE} = \sum_b \frac{|B_b|}{N} |\mathrm{acc}_b - \mathrm{conf}_b|, \qquad
        \mathrm{MCE} = \max_{b: |B_b| > 0} |\mathrm{acc}_b - \mathrm{conf}_b|

    Args:
        confidence: [N] float32 or float64.
        correct: [N] bool.
        n_bins: number of bins.
        estimator: see :func:`assign_bins`.

    Returns:
        (ECE, MCE); NaN for N = 0.

    Raises:
        ValueError: another estimator.

    Example:
        >>> confidence, correct = torch.tensor([0.25, 0.75, 0.75]), torch.tensor([False, True, False])
        >>> fk.reference.calibration_error(confidence, correct, n_bins=2)
        (0.25, 0.25)
    """
    n = len(confidence)
    if n == 0:
        return float("nan"), float("nan")
    bins = assign_bins(confidence, n_bins, estimator)
    ece, mce = 0.0, 0.0
    for b in range(n_bins):
        members = bins == b
        size = int(members.sum())
        if size > 0:
            gap = abs(float(correct[members].double().mean()) - float(confidence[members].double().mean()))
            ece += size / n * gap
            mce = max(mce, gap)
    return ece, mce


def calibration_grid(
    input: Tensor,
    target: Tensor,
    gammas: Tensor | Sequence[float],
    temperatures: Tensor | Sequence[float],
    *,
    n_bins: int = 15,
    criteria: Sequence[str] = ("ece", "nll"),
    estimator: str = "equal_mass",
    input_kind: str = "logits",
    ignore_index: int = -100,
) -> dict[str, Tensor]:
    """Criteria of the calibrated probabilities at every (gamma, T): one call of the map per cell.

    Args:
        input: [N, C] logits or probabilities.
        target: [N] class indices; rows equal to ``ignore_index`` are dropped.
        gammas: Gg numbers > -1.
        temperatures: Gt numbers > 0.
        n_bins: bins of ``"ece"`` and ``"mce"``.
        criteria: from ``"ece"``, ``"mce"``, ``"nll"``, ``"brier"``.
        estimator: see :func:`assign_bins`.
        input_kind: ``"logits"`` or ``"probs"``.
        ignore_index: marks rows to drop.

    Returns:
        {criterion: [Gg, Gt] float64}. The confidence of a row is its largest calibrated probability; it is correct
        when the first largest entry of ``input`` is the target.

    Raises:
        RuntimeError: shapes that do not fit.
        ValueError: another estimator.

    Example:
        >>> logits, target = 3.0 * torch.eye(3, dtype=torch.float64)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 1])
        >>> fk.reference.calibration_grid(logits, target, [0.0], [1.0, 2.0])["nll"]
        tensor([[0.8449, 0.7440]], dtype=torch.float64)
    """
    keep = target != ignore_index
    input, target = input[keep], target[keep].long()
    correct = input.argmax(-1) == target
    onehot = torch.nn.functional.one_hot(target, input.shape[-1])
    tables = {name: torch.empty(len(gammas), len(temperatures), dtype=torch.float64) for name in criteria}
    for i, gamma in enumerate(gammas):
        for j, temperature in enumerate(temperatures):
            log_p = focal_calibration_map(input, float(gamma), float(temperature), input_kind=input_kind, log=True)
            p = log_p.exp()
            ece, mce = calibration_error(p.max(-1).values, correct, n_bins, estimator)
            cell = {
                "ece": ece,
                "mce": mce,
                "nll": -float(log_p.gather(-1, target.unsqueeze(-1)).double().mean()),
                "brier": float((p - onehot).double().square().sum(-1).mean()),
            }
            for name in criteria:
                tables[name][i, j] = cell[name]
    return tables
