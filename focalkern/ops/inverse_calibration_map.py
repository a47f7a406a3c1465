"""The inverse of the focal calibration map, and the proper loss that it makes of the focal loss: plain torch.

Both maps are solved for the log-odds x = log(q / (1 - q)) of the result. There a class's share of the forward map,

    a(x) = log q - gamma log(1 - q) - log(1 + gamma phi),

is close to two straight lines, of slope 1 on the left and gamma on the right, and nothing cancels at either end, so a
safeguarded Newton iteration needs a handful of steps for any gamma.
"""

import math
from typing import Any, NamedTuple, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from focalkern._arrays import as_array, as_tensor
from focalkern._checks import dense, flag, number
from focalkern._devices import autocast_is_on, on_device
from focalkern._types import FLOATS, HALVES, InputKind, Reduction
from focalkern.ops.calibration_map import binary_focal_calibration_map, focal_calibration_map
from focalkern.ops.focal_loss import focal_loss
from focalkern.reference._calibration import in_order

__all__ = ["binary_inverse_focal_calibration_map", "inverse_focal_calibration_map", "properized_focal_loss"]

# On the CPU the iterations end when they have converged. Elsewhere, where looking would wait for the device, they are
# all done: gammas up to 10000 and up to 1000 classes were seen to need 12 outer steps and at most 8 inner ones in each.
_OUTER_STEPS, _INNER_STEPS = 16, 10


Array = np.ndarray[Any, Any]


@overload
def inverse_focal_calibration_map(
    input: Tensor,
    gamma: float | Tensor | Array,
    *,
    input_kind: InputKind = "logits",
    log: bool = False,
) -> Tensor: ...
@overload
def inverse_focal_calibration_map(
    input: Array,
    gamma: float | Tensor | Array,
    *,
    input_kind: InputKind = "logits",
    log: bool = False,
) -> Array: ...
def inverse_focal_calibration_map(
    input: Tensor | Array,
    gamma: float | Tensor | Array,
    *,
    input_kind: InputKind = "logits",
    log: bool = False,
) -> Tensor | Array:
    r"""The probabilities that the focal calibration map turns into the given ones.

    With G(q) = u^gamma (1 + gamma phi), u = 1 - q and phi = -q log q / u, the result q solves

    .. math:: \frac{q_j / G(q_j)}{\sum_k q_k / G(q_k)} = p_j, \qquad \sum_j q_j = 1

    so that ``focal_calibration_map(q, gamma, input_kind="probs")`` is p, and q is what a network trained with a focal
    loss of parameter gamma is drawn to where p are the true probabilities. gamma = 0 is the identity.

    Args:
        input: [..., C] logits of p, or p itself with ``input_kind="probs"``; float16, bfloat16, float32 or float64,
            C >= 2; a tensor, or an array. Classes with p = 0 have q = 0.
        gamma: a number or a floating-point tensor broadcastable to [...]; finite and >= 0. (Below 0 the map of a
            single class, q / G(q), is not monotone, and is not inverted here.)
        input_kind: ``"logits"`` or ``"probs"``; never guessed. Rows of probabilities must sum to 1 within 1e-3 and are
            renormalised.
        log: return log q.

    Returns:
        [..., C] q or log q in the dtype of ``input``, an array for an array; under autocast in float32 for a
        half-precision input. Half types are computed in float32. Differentiable in ``input`` and gamma, twice, also
        under torch.func and in forward mode.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`focal_calibration_map`; also ValueError for a gamma < 0.
            Values inside CUDA tensors are not looked at: such rows are NaN.

    Source: the function r* of Charoenphakdee et al. 2021 (arXiv 2011.09172), inverted; Komisarenko and Kull, ECAI 2024
    (arXiv 2408.11598).

    Example:
        >>> probs = torch.tensor([[0.7, 0.2, 0.1]])
        >>> q = fk.inverse_focal_calibration_map(probs, gamma=2.0, input_kind="probs")
        >>> q
        tensor([[0.5352, 0.2927, 0.1721]])
        >>> fk.focal_calibration_map(q, gamma=2.0, input_kind="probs")
        tensor([[0.7000, 0.2000, 0.1000]])
    """
    op = "inverse_focal_calibration_map"
    if not isinstance(input, Tensor):
        of_array: Array = as_array(
            inverse_focal_calibration_map(as_tensor(input, f"{op}: input"), gamma, input_kind=input_kind, log=log)
        )
        return of_array
    log = flag(op, "log", log)
    log_p, gamma = _log_probabilities(op, input, gamma, input_kind)
    log_q = _inverse_rows(log_p, gamma.expand(log_p.shape[:-1]))
    return _as_input(log_q if log else log_q.exp(), input)


@overload
def binary_inverse_focal_calibration_map(
    logits: Tensor, gamma: float | Tensor | Array, *, log_odds: bool = False
) -> Tensor: ...
@overload
def binary_inverse_focal_calibration_map(
    logits: Array, gamma: float | Tensor | Array, *, log_odds: bool = False
) -> Array: ...
def binary_inverse_focal_calibration_map(
    logits: Tensor | Array, gamma: float | Tensor | Array, *, log_odds: bool = False
) -> Tensor | Array:
    r"""The inverse map of two classes, on one logit each: :func:`inverse_focal_calibration_map` of [0, logit].

    The result s solves

    .. math:: (1 + \gamma) s - \log(1 + \gamma\phi(\sigma(s))) + \log(1 + \gamma\phi(\sigma(-s))) = t

    for the logit t, elementwise; s is odd and strictly increasing in t.

    Args:
        logits: any shape, t, the logit of class 1 against class 0; float16, bfloat16, float32 or float64; a tensor, or
            an array.
        gamma: a number or a floating-point tensor broadcastable to the shape of ``logits``; finite and >= 0.
        log_odds: return s instead of the probability of class 1, sigma(s).

    Returns:
        The shape and dtype of ``logits``, an array for an array; under autocast float32 for half-precision logits.
        Differentiable in ``logits`` and gamma, twice, also under torch.func and in forward mode.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`binary_focal_calibration_map`; also ValueError for a
            gamma < 0.

    Source: as :func:`inverse_focal_calibration_map`.

    Example:
        >>> s = fk.binary_inverse_focal_calibration_map(torch.tensor([-1.0, 0.5, 2.0]), gamma=2.0, log_odds=True)
        >>> s
        tensor([-0.3736,  0.1868,  0.7465])
        >>> fk.binary_focal_calibration_map(s, gamma=2.0, log_odds=True)
        tensor([-1.0000,  0.5000,  2.0000])
    """
    op = "binary_inverse_focal_calibration_map"
    if not isinstance(logits, Tensor):
        of_array: Array = as_array(
            binary_inverse_focal_calibration_map(as_tensor(logits, f"{op}: logits"), gamma, log_odds=log_odds)
        )
        return of_array
    log_odds = flag(op, "log_odds", log_odds)
    # gamma = 0 and T = 1 leave the logit as it is: this only checks it.
    t = _renamed(op, binary_focal_calibration_map, _widened(logits), 0.0, log_odds=True)
    gamma = _gamma_tensor(op, gamma, t)
    if not _broadcasts(gamma, t.shape):
        raise ValueError(f"{op}: gamma must broadcast to the shape of logits, {list(t.shape)}, got {list(gamma.shape)}")
    s = _inverse_logits(t, gamma.expand(t.shape))
    return _as_input(s if log_odds else s.sigmoid(), logits)


def properized_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor = 2.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""The focal loss made proper: its expectation is smallest where the softmax is the true distribution.

    .. math:: L^*(p, y) = L(q, y) = -(1 - q_y)^\gamma \log q_y, \qquad q = \text{inverse map of } p = \text{softmax}(z)

    A network trained with it needs no calibration map afterwards; training with the focal loss and applying
    :func:`focal_calibration_map` is the other way to the same probabilities. gamma = 0 is cross-entropy.

    Args:
        input: logits z, (C), (N, C) or (N, C, d1, ...), float16, bfloat16, float32 or float64.
        target: class indices or class probabilities, as for :func:`focal_loss`.
        gamma: a number, or a floating-point tensor broadcastable to the unreduced loss (N, d1, ...); finite, >= 0.
        weight, ignore_index, reduction, label_smoothing: as for :func:`focal_loss`.

    Returns:
        The loss, as :func:`focal_loss`. Differentiable in ``input`` and gamma, twice.

    Raises:
        TypeError, ValueError, IndexError, NotImplementedError: as :func:`focal_loss`; also ValueError for a gamma < 0.
            NaN or infinite logits raise on the CPU and give NaN on CUDA.

    Source: Komisarenko and Kull, ECAI 2024 (arXiv 2408.11598), section 4.

    Example:
        >>> truth = torch.tensor([[0.7, 0.2, 0.1]])
        >>> logits = truth.log().requires_grad_()
        >>> loss = fk.properized_focal_loss(logits, truth, gamma=2.0)
        >>> bool(torch.autograd.grad(loss, logits)[0].abs().max() < 1e-6)  # smallest where softmax(logits) is the truth
        True
        >>> loss = fk.focal_loss(logits, truth, gamma=2.0)
        >>> torch.autograd.grad(loss, logits)[0]  # which the focal loss is not
        tensor([[ 0.1971, -0.1267, -0.0703]])
    """
    op = "properized_focal_loss"
    class_dim = 0 if isinstance(input, Tensor) and input.dim() == 1 else 1
    if not isinstance(input, Tensor) or input.dim() == 0:
        raise TypeError(f"{op}: input must be a tensor (C), (N, C) or (N, C, d1, ...), got {_kind(input)}")
    dense(op, "input", input)
    log_p, gamma = _log_probabilities(op, input.movedim(class_dim, -1), gamma, "logits")
    log_q = _inverse_rows(log_p, gamma.expand(log_p.shape[:-1]))
    loss = _renamed(
        op,
        focal_loss,
        log_q.movedim(-1, class_dim),
        target,
        gamma,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return _as_input(loss, input)


# -- arguments --------------------------------------------------------------------------------------------------------


def _log_probabilities(op: str, input: Tensor, gamma: float | Tensor | Array, input_kind: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities and gammas in the dtype of the computation, both checked."""
    # The forward map with gamma = 0 is log_softmax, with all its checks.
    log_p = _renamed(op, focal_calibration_map, _widened(input), 0.0, input_kind=input_kind, log=True)
    gamma = _gamma_tensor(op, gamma, log_p)
    leading = log_p.shape[:-1]
    if not _broadcasts(gamma, leading):
        raise ValueError(f"{op}: gamma must broadcast to {list(leading)}, got {list(gamma.shape)}")
    return log_p, gamma


def _gamma_tensor(op: str, gamma: float | Tensor | Array, like: Tensor) -> Tensor:
    if isinstance(gamma, np.ndarray):
        gamma = on_device(as_tensor(gamma, f"{op}: gamma"), like.device)
    if not isinstance(gamma, Tensor):
        if isinstance(gamma, bool):
            raise TypeError(f"{op}: gamma must be a number or a tensor, got bool")
        found = number(op, "gamma", gamma, "a number or a tensor")
        if not 0 <= found < math.inf:
            raise ValueError(f"{op}: gamma must be finite and at least 0, got {found}")
        return torch.full((), found, dtype=like.dtype, device=like.device)
    if not gamma.is_floating_point():
        raise TypeError(f"{op}: gamma must be floating point, got {gamma.dtype}")
    dense(op, "gamma", gamma)
    if gamma.dtype not in FLOATS:
        raise TypeError(f"{op}: gamma must be float16, bfloat16, float32 or float64, got {gamma.dtype}")
    if gamma.device != like.device and (gamma.dim() > 0 or gamma.device.type == "meta"):
        raise ValueError(f"{op}: gamma must be on the device of input, {like.device}, got {gamma.device}")
    values_are_there = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    if gamma.device.type == "cpu" and values_are_there:
        outside = ~((gamma >= 0) & gamma.isfinite())
        if bool(outside.any()):
            raise ValueError(f"{op}: gamma must be finite and at least 0, got {float(gamma[outside].reshape(-1)[0])}")
    return gamma.to(like)


def _broadcasts(gamma: Tensor, shape: torch.Size) -> bool:
    fits = (a in (1, b) for a, b in zip(reversed(gamma.shape), reversed(shape), strict=False))
    return gamma.dim() <= len(shape) and all(fits)


def _renamed(op: str, function: Any, *arguments: Any, **options: Any) -> Tensor:
    """Calls another operator, whose errors then carry the name that the user called."""
    try:
        result: Tensor = function(*arguments, **options)
        return result
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:
        text = str(error)
        name = f"{function.__name__}:"
        if not text.startswith(name):
            raise
        raise type(error)(f"{op}:{text[len(name) :]}") from None


def _widened(input: Any) -> Any:
    half = isinstance(input, Tensor) and input.dtype in HALVES
    return input.float() if half else input


def _as_input(result: Tensor, input: Tensor) -> Tensor:
    return result if autocast_is_on(input.device.type) else result.to(input.dtype)


def _kind(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


# -- one class --------------------------------------------------------------------------------------------------------


def _phi(x: Tensor) -> Tensor:
    """phi = -q log q / (1 - q) of the log-odds x: log(1 + e^-x) e^x, in which nothing cancels."""
    # From x = 40 on it is 1 to the last bit of a double; e^x overflows later.
    phi = -F.logsigmoid(x) * x.clamp(max=40).exp()
    return torch.where(x > 40, 1.0, torch.where(x == -math.inf, 0.0, phi))


def _share(x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a(x), its derivative, log q and log(1 - q) of classes with log-odds x."""
    log_q, log_u = F.logsigmoid(x), F.logsigmoid(-x)
    phi, q = _phi(x), log_q.exp()
    a = log_q - gamma * log_u - torch.log1p(gamma * phi)
    return a, log_u.exp() + gamma * (q - (phi - q) / (1 + gamma * phi)), log_q, log_u


def _converged(step: Tensor, x: Tensor, tolerance: float) -> bool:
    """Whether to stop; NaN rows stay NaN and are not waited for."""
    return step.device.type == "cpu" and not bool((step.abs() > tolerance * (1 + x.abs())).any())


# -- several classes --------------------------------------------------------------------------------------------------


@torch.library.custom_op("focalkern::inverse_calibration_map", mutates_args=())
def _inverse(log_p: Tensor, gamma: Tensor) -> Tensor:
    """log q [..., C] for log p [..., C] and gamma [...]."""
    if log_p.numel() == 0:
        return torch.empty_like(log_p)
    g = gamma.unsqueeze(-1)
    tolerance = 4 * torch.finfo(log_p.dtype).eps
    top = log_p.argmax(-1, keepdim=True)
    is_top = torch.arange(log_p.shape[-1], device=log_p.device) == top
    # Relative to the top class; it takes no part among the others.
    below = torch.where(is_top, -math.inf, log_p - log_p.gather(-1, top))
    absent = below == -math.inf
    log_odds = -below.logsumexp(-1, keepdim=True)

    # The unknown is the top class's log-odds x: it fixes its share, hence every other class's, hence their sum, which
    # has to be 1 - q_top. The sum grows with x and 1 - q_top falls.
    x = torch.where(log_odds > 0, log_odds / (1 + g), log_odds)
    low, high = torch.full_like(x, -math.inf), torch.full_like(x, math.inf)
    last_step = high
    others = torch.where(absent, -math.inf, x)
    for _ in range(_OUTER_STEPS):
        a_top, slope_top, log_q_top, log_u_top = _share(x, g)
        wanted = below + a_top
        others = torch.minimum(others, x)
        for _ in range(_INNER_STEPS):
            a, slope, _, _ = _share(others, g)
            step = torch.where(absent, 0.0, (wanted - a) / slope)
            # No other class exceeds the top class.
            others = torch.where(absent, -math.inf, torch.minimum(others + step, x))
            # Newton's error is squared by each step, so this one was the last that matters.
            if _converged(torch.where(absent, 0.0, step), torch.where(absent, 0.0, others), tolerance**0.5):
                break
        _, slope, log_q, log_u = _share(others, g)
        log_sum = log_q.logsumexp(-1, keepdim=True)
        excess = log_sum - log_u_top
        weight = torch.where(absent, 0.0, (log_q - log_sum).exp() * log_u.exp() / slope)
        newton = -excess / (slope_top * weight.sum(-1, keepdim=True) + log_q_top.exp())

        low = torch.where(excess < 0, torch.maximum(low, x), low)
        high = torch.where(excess > 0, torch.minimum(high, x), high)
        tiny = newton.abs() <= tolerance * (1 + x.abs())
        outside = (x + newton <= low) | (x + newton >= high) | (newton.abs() > 0.5 * last_step)
        bisect = outside & ~tiny & high.isfinite() & low.isfinite()
        step = torch.where(bisect, (low + high) / 2 - x, newton)
        x, last_step = x + step, step.abs()
        if _converged(step, x, tolerance):
            break
    log_q = torch.where(is_top, F.logsigmoid(x), F.logsigmoid(others))
    # A row with one class left is certain, whatever gamma; gamma = 0 changes nothing.
    log_q = torch.where(absent.all(-1, keepdim=True) | (g == 0), log_p, in_order(log_q, log_p))
    in_domain = (g >= 0) & g.isfinite() & (log_p.gather(-1, top) <= 0)
    return torch.where(in_domain, log_q, math.nan)


@_inverse.register_fake
def _(log_p: Tensor, gamma: Tensor) -> Tensor:
    return torch.empty_like(log_p)


def _inverse_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output, inputs[1])


class _Slopes(NamedTuple):
    """What the derivatives of a row are made of. "Others" are the classes beside the top class that can occur."""

    top: Tensor  # [..., 1] the top class
    others: Tensor  # [..., C] which classes are others
    inverse_h: Tensor  # [..., C] d(log q) / da
    weight: Tensor  # [..., C] of the others, q inverse_h / (1 - q_top)
    slope_top: Tensor  # [..., 1] da / dx of the top class, x its log-odds
    u_top: Tensor  # [..., 1] 1 - q_top
    divisor: Tensor  # [..., 1] q_top + slope_top sum(weight)
    da_dgamma: Tensor  # [..., C]


def _inverse_slopes(log_q: Tensor, gamma: Tensor) -> _Slopes:
    """Written in differentiable operators of the result, for second derivatives.

    a_j = log p_j + c with c such that sum q = 1, and da = h d(log q) + (da/dgamma) dgamma. With e = d(log p) -
    (da/dgamma) dgamma relative to the top class, whose d(log q) is what the others leave of sum(q d(log q)) = 0:

        d(log q_top) = -u_top sum(weight e) / divisor
        d(log q_j) = (e_j - slope_top sum(weight e) / divisor) / h_j

    Nothing is divided by u_top, which may be denormal or 0.
    """
    g = gamma.unsqueeze(-1)
    absent = log_q == -math.inf
    # log-odds of every class; 1 - q_top is the sum of the others.
    finite = torch.where(absent, -1.0, log_q)
    top = log_q.argmax(-1, keepdim=True)
    is_top = torch.arange(log_q.shape[-1], device=log_q.device) == top
    others = ~(absent | is_top)
    # A row with one class left depends on nothing.
    certain = ~others.any(-1, keepdim=True)
    log_rest = torch.where(others, finite, -math.inf).masked_fill(certain, 0.0).logsumexp(-1, keepdim=True)
    log_u = torch.where(is_top, log_rest, torch.log1p(-torch.where(is_top, -1.0, finite).exp()))
    x = finite - log_u
    phi, q, u = _phi(x), finite.exp(), log_u.exp()
    slope = u + g * (q - (phi - q) / (1 + g * phi))
    inverse_h = torch.where(others, u / torch.where(others, slope, 1.0), 0.0)
    weight = torch.where(others, finite - log_rest, -math.inf).exp() * inverse_h
    slope_top, q_top, u_top = (values.gather(-1, top) for values in (slope, q, u))
    divisor = q_top + slope_top * weight.sum(-1, keepdim=True)
    return _Slopes(top, others, inverse_h, weight, slope_top, u_top, divisor, -log_u - phi / (1 + g * phi))


def _inverse_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    row = _inverse_slopes(*ctx.saved_tensors)
    kept = torch.where(row.others, grad, 0.0) * row.inverse_h
    grad_top = torch.where(row.others.any(-1, keepdim=True), grad.gather(-1, row.top), 0.0)
    pull = (row.slope_top * kept.sum(-1, keepdim=True) + row.u_top * grad_top) / row.divisor
    grad_e = kept - row.weight * pull
    grad_log_p = grad_e.scatter(-1, row.top, -grad_e.sum(-1, keepdim=True))
    grad_gamma = None
    if ctx.needs_input_grad[1]:
        grad_gamma = -(grad_log_p * row.da_dgamma).sum(-1)
    return grad_log_p, grad_gamma


_inverse.register_autograd(_inverse_backward, setup_context=_inverse_setup)


class _InverseRows(torch.autograd.Function):
    """The same for eager callers, with what an operator in Python has not: forward mode and torch.func."""

    @staticmethod
    def forward(log_p: Tensor, gamma: Tensor) -> Tensor:
        return torch.ops.focalkern.inverse_calibration_map(log_p, gamma)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(output, inputs[1])
        ctx.save_for_forward(output, inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return _inverse_backward(ctx, grad)

    @staticmethod
    def jvp(ctx: Any, d_log_p: Tensor, d_gamma: Tensor) -> Tensor:
        row = _inverse_slopes(*ctx.saved_tensors)
        e = d_log_p - row.da_dgamma * d_gamma.unsqueeze(-1)
        e = torch.where(row.others, e - e.gather(-1, row.top), 0.0)
        pull = (row.weight * e).sum(-1, keepdim=True) / row.divisor
        d_log_q = torch.where(row.others, (e - row.slope_top * pull) * row.inverse_h, 0.0)
        return d_log_q.scatter(-1, row.top, -row.u_top * pull)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], log_p: Tensor, gamma: Tensor) -> tuple[Tensor, int]:
        # It takes any leading dimensions as they are.
        return _InverseRows.apply(_batch_first(log_p, in_dims[0], info), _batch_first(gamma, in_dims[1], info)), 0  # type: ignore[no-untyped-call]


def _batch_first(values: Tensor, dim: int | None, info: Any) -> Tensor:
    return values.expand(info.batch_size, *values.shape) if dim is None else values.movedim(dim, 0)


def _inverse_rows(log_p: Tensor, gamma: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.focalkern.inverse_calibration_map(log_p, gamma)
    return _InverseRows.apply(log_p, gamma)  # type: ignore[no-untyped-call]


# -- two classes, one logit -------------------------------------------------------------------------------------------


@torch.library.custom_op("focalkern::inverse_calibration_map_binary", mutates_args=())
def _inverse_binary(t: Tensor, gamma: Tensor) -> Tensor:
    """s [...] for the logit t [...] and gamma [...]."""
    tolerance = 4 * torch.finfo(t.dtype).eps
    size = t.abs()
    # The root of the odd function lies between these two; at 0 and at infinity they are the root.
    low, high = size / (1 + gamma), (size + torch.log1p(gamma)) / (1 + gamma)
    s = low
    for _ in range(_OUTER_STEPS):
        step = torch.where(size.isfinite(), (size - _binary_map(s, gamma)) / _binary_slope(s, gamma), 0.0)
        # Convex or concave over the whole bracket, so a step that leaves it is brought back to its end.
        moved = torch.minimum(torch.maximum(s + step, low), high)
        step, s = moved - s, moved
        if _converged(torch.where(size.isfinite(), step, 0.0), s, tolerance):
            break
    s = torch.where(size.isfinite(), s, size) * t.sign()
    return torch.where((gamma >= 0) & gamma.isfinite(), torch.where(gamma == 0, t, s), math.nan)


def _binary_map(s: Tensor, gamma: Tensor) -> Tensor:
    return (1 + gamma) * s - torch.log1p(gamma * _phi(s)) + torch.log1p(gamma * _phi(-s))


def _binary_slope(s: Tensor, gamma: Tensor) -> Tensor:
    return _share(s, gamma)[1] + _share(-s, gamma)[1]


def _binary_slope_in_gamma(s: Tensor, gamma: Tensor) -> Tensor:
    plus, minus = _phi(s), _phi(-s)
    return s - plus / (1 + gamma * plus) + minus / (1 + gamma * minus)


@_inverse_binary.register_fake
def _(t: Tensor, gamma: Tensor) -> Tensor:
    return torch.empty_like(t)


def _inverse_binary_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output, inputs[1])


def _inverse_binary_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    s, gamma = ctx.saved_tensors
    grad_t = grad / _binary_slope(s, gamma)
    grad_gamma = None
    if ctx.needs_input_grad[1]:
        grad_gamma = -grad_t * _binary_slope_in_gamma(s, gamma)
    return grad_t, grad_gamma


_inverse_binary.register_autograd(_inverse_binary_backward, setup_context=_inverse_binary_setup)


class _InverseLogits(torch.autograd.Function):
    """As _InverseRows."""

    @staticmethod
    def forward(t: Tensor, gamma: Tensor) -> Tensor:
        return torch.ops.focalkern.inverse_calibration_map_binary(t, gamma)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(output, inputs[1])
        ctx.save_for_forward(output, inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        return _inverse_binary_backward(ctx, grad)

    @staticmethod
    def jvp(ctx: Any, d_t: Tensor, d_gamma: Tensor) -> Tensor:
        s, gamma = ctx.saved_tensors
        return (d_t - _binary_slope_in_gamma(s, gamma) * d_gamma) / _binary_slope(s, gamma)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], t: Tensor, gamma: Tensor) -> tuple[Tensor, int]:
        return _InverseLogits.apply(_batch_first(t, in_dims[0], info), _batch_first(gamma, in_dims[1], info)), 0  # type: ignore[no-untyped-call]


def _inverse_logits(t: Tensor, gamma: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.focalkern.inverse_calibration_map_binary(t, gamma)
    return _InverseLogits.apply(t, gamma)  # type: ignore[no-untyped-call]
