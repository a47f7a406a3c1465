"""The inverse of the focal calibration map, solved and differentiated.

The solver's unknown is the log-odds x = log(q / (1 - q)) of the result. As a function of x, the term of one class in
the forward map,

    a(x) = log q - gamma log(1 - q) - log(1 + gamma phi),

is close to two straight lines, of slope 1 on the left and gamma on the right, and does not cancel at either end. A
safeguarded Newton iteration therefore converges in a few steps for any gamma.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from focalkern._tracing import functionalizes
from focalkern.reference._calibration import in_order

__all__ = ["elements_in_order", "inverse_logits", "inverse_rows"]

# On the CPU the iterations end on convergence. On other devices a test of convergence would synchronise, so all steps
# are done. Gammas up to 10000 and up to 1000 classes needed at most 12 outer steps, each with at most 8 inner steps.
_OUTER_STEPS, _INNER_STEPS = 16, 10


# -- one class --------------------------------------------------------------------------------------------------------


def _phi(x: Tensor) -> Tensor:
    """phi = -q log q / (1 - q) of the log-odds x: log(1 + e^-x) e^x, in which nothing cancels."""
    # For x > 40, phi is 1 in double precision; the clamp keeps e^x from overflowing.
    phi = -F.logsigmoid(x) * x.clamp(max=40).exp()
    return torch.where(x > 40, 1.0, torch.where(x == -math.inf, 0.0, phi))


def _share(x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a(x), its derivative, log q and log(1 - q) of classes with log-odds x."""
    log_q, log_u = F.logsigmoid(x), F.logsigmoid(-x)
    phi, q = _phi(x), log_q.exp()
    a = log_q - gamma * log_u - torch.log1p(gamma * phi)
    return a, log_u.exp() + gamma * (q - (phi - q) / (1 + gamma * phi)), log_q, log_u


def _converged(step: Tensor, x: Tensor, tolerance: float) -> bool:
    """Whether all steps are below the tolerance (on the CPU only). NaN steps count as converged: they stay NaN."""
    return step.device.type == "cpu" and not bool((step.abs() > tolerance * (1 + x.abs())).any())


# -- several classes --------------------------------------------------------------------------------------------------


def _top_and_next(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., 1] index of the largest logit, [..., C] mask of that class, [..., 1] index of the largest of the others."""
    top = z.argmax(-1, keepdim=True)
    is_top = torch.arange(z.shape[-1], device=z.device) == top
    return top, is_top, torch.where(is_top, -math.inf, z).argmax(-1, keepdim=True)


# Below this log q_next, ratios of probabilities are computed from the logits: the difference of two log q of large
# magnitude has lost its digits.
_FAR_BELOW = -8.0


@torch.library.custom_op("focalkern::inverse_calibration_map", mutates_args=())
def _inverse(z: Tensor, log_p: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """log q [..., C] and log(q_j / q_next) [..., C], next the second largest class, for the logits z and log p [..., C]
    of p, and gamma [...].
    """
    if log_p.numel() == 0:
        return torch.empty_like(log_p), torch.empty_like(log_p)
    g = gamma.unsqueeze(-1)
    tolerance = 4 * torch.finfo(log_p.dtype).eps
    top, is_top, next_class = _top_and_next(z)
    # Logits relative to the top class, which is masked out.
    below = torch.where(is_top, -math.inf, z - z.gather(-1, top))
    absent = below == -math.inf
    log_odds = -below.logsumexp(-1, keepdim=True)

    # The unknown is the log-odds x of the top class. x determines a(x), a(x) determines the q of every other class, and
    # their sum must be 1 - q_top. The sum grows with x and 1 - q_top falls, so the root is unique.
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
            # Newton's error is squared at each step: after a step below sqrt(tolerance), the error is below tolerance.
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
    # log q_j = log p_j + bend_j + a term that all classes share; bend_j -> 0 as q_j -> 0.
    bend = g * F.logsigmoid(-others) + torch.log1p(g * _phi(others))
    log_q_next = log_q.gather(-1, next_class)
    from_logits = (z - z.gather(-1, next_class)) + (bend - bend.gather(-1, next_class))
    ratios = torch.where(is_top | (log_q_next > _FAR_BELOW), log_q - log_q_next, from_logits)
    ratios = torch.where(absent & ~is_top, -math.inf, ratios)
    # A row with one possible class has q = 1 for every gamma; gamma = 0 is the identity.
    certain = absent.all(-1, keepdim=True)
    log_q = torch.where(certain | (g == 0), log_p, in_order(log_q, log_p))
    ratios = torch.where(certain, log_p, torch.where(g == 0, z - z.gather(-1, next_class), ratios))
    in_domain = (g >= 0) & g.isfinite() & (log_p.gather(-1, top) <= 0)
    return torch.where(in_domain, log_q, math.nan), torch.where(in_domain, ratios, math.nan)


@_inverse.register_fake
def _(z: Tensor, log_p: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(log_p), torch.empty_like(log_p)


def _inverse_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], *output, inputs[2])


class _Slopes(NamedTuple):
    """Terms of the derivatives of a row. "Others" are the possible classes except the top class."""

    top: Tensor  # [..., 1] the top class
    others: Tensor  # [..., C] which classes are others
    inverse_h: Tensor  # [..., C] d(log q) / da
    weight: Tensor  # [..., C] of the others, q inverse_h / (1 - q_top)
    slope_top: Tensor  # [..., 1] da / dx of the top class, x its log-odds
    u_top: Tensor  # [..., 1] 1 - q_top
    divisor: Tensor  # [..., 1] q_top + slope_top sum(weight)
    da_dgamma: Tensor  # [..., C]


def _inverse_slopes(z: Tensor, log_q: Tensor, ratios: Tensor, gamma: Tensor) -> _Slopes:
    """The terms from the result in differentiable operations, for second derivatives.

    a_j = log p_j + c with c such that sum q = 1, and da = h d(log q) + (da/dgamma) dgamma. Let e = d(log p) -
    (da/dgamma) dgamma, relative to the top class. From sum(q d(log q)) = 0:

        d(log q_top) = -u_top sum(weight e) / divisor
        d(log q_j) = (e_j - slope_top sum(weight e) / divisor) / h_j

    Nothing is divided by u_top, which may be denormal or 0.
    """
    g = gamma.unsqueeze(-1)
    absent = log_q == -math.inf
    # Log-odds of every class; 1 - q_top is computed as the sum of the others, which does not cancel.
    finite = torch.where(absent, -1.0, log_q)
    top, is_top, next_class = _top_and_next(z)
    others = ~(absent | is_top)
    # In a row with one possible class q = 1, and every derivative is 0.
    certain = ~others.any(-1, keepdim=True)
    below_next = torch.where(others, ratios, -math.inf).masked_fill(certain, 0.0)
    rest = below_next.logsumexp(-1, keepdim=True)  # over q_next
    log_rest = rest + torch.where(certain, 0.0, finite.gather(-1, next_class))
    log_u = torch.where(is_top, log_rest, torch.log1p(-torch.where(is_top, -1.0, finite).exp()))
    x = finite - log_u
    phi, q, u = _phi(x), finite.exp(), log_u.exp()
    slope = u + g * (q - (phi - q) / (1 + g * phi))
    inverse_h = torch.where(others, u / torch.where(others, slope, 1.0), 0.0)
    weight = torch.where(others, below_next - rest, -math.inf).exp() * inverse_h
    slope_top, q_top, u_top = (values.gather(-1, top) for values in (slope, q, u))
    divisor = q_top + slope_top * weight.sum(-1, keepdim=True)
    return _Slopes(top, others, inverse_h, weight, slope_top, u_top, divisor, -log_u - phi / (1 + g * phi))


def _inverse_backward(ctx: Any, grad: Tensor, grad_ratios: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
    saved = ctx.saved_tensors  # checkpoints unpack them once
    row = _inverse_slopes(*saved)
    _, _, next_class = _top_and_next(saved[0])
    # The ratios are log q_j - log q_next, so their gradients become gradients of log q.
    grad = grad + grad_ratios.scatter_add(-1, next_class, -grad_ratios.sum(-1, keepdim=True))
    kept = torch.where(row.others, grad, 0.0) * row.inverse_h
    grad_top = torch.where(row.others.any(-1, keepdim=True), grad.gather(-1, row.top), 0.0)
    pull = (row.slope_top * kept.sum(-1, keepdim=True) + row.u_top * grad_top) / row.divisor
    grad_e = kept - row.weight * pull
    grad_log_p = grad_e.scatter(-1, row.top, -grad_e.sum(-1, keepdim=True))
    grad_gamma = None
    if ctx.needs_input_grad[2]:
        grad_gamma = -(grad_log_p * row.da_dgamma).sum(-1)
    return None, grad_log_p, grad_gamma


_inverse.register_autograd(_inverse_backward, setup_context=_inverse_setup)


class _InverseRows(torch.autograd.Function):
    """The operator for eager callers, with forward-mode derivatives and torch.func, which custom operators lack."""

    @staticmethod
    def forward(z: Tensor, log_p: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        log_q, ratios = torch.ops.focalkern.inverse_calibration_map(z, log_p, gamma)
        return log_q, ratios

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], *output, inputs[2])
        ctx.save_for_forward(inputs[0], *output, inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_ratios: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        return _inverse_backward(ctx, grad, grad_ratios)

    @staticmethod
    def jvp(ctx: Any, d_z: Tensor | None, d_log_p: Tensor, d_gamma: Tensor) -> tuple[Tensor, Tensor]:
        saved = ctx.saved_tensors
        row = _inverse_slopes(*saved)
        e = d_log_p - row.da_dgamma * d_gamma.unsqueeze(-1)
        e = torch.where(row.others, e - e.gather(-1, row.top), 0.0)
        pull = (row.weight * e).sum(-1, keepdim=True) / row.divisor
        d_log_q = torch.where(row.others, (e - row.slope_top * pull) * row.inverse_h, 0.0)
        d_log_q = d_log_q.scatter(-1, row.top, -row.u_top * pull)
        _, _, next_class = _top_and_next(saved[0])
        return d_log_q, d_log_q - d_log_q.gather(-1, next_class)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        # Any number of leading dimensions is a batch, so the batch of vmap becomes one more.
        batched = (_batch_first(values, dim, info) for values, dim in zip(inputs, in_dims, strict=True))
        return _InverseRows.apply(*batched), (0, 0)  # type: ignore[no-untyped-call]


def _batch_first(values: Tensor, dim: int | None, info: Any) -> Tensor:
    return values.expand(info.batch_size, *values.shape) if dim is None else values.movedim(dim, 0)


def inverse_rows(op: str, z: Tensor, log_p: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """log q and log(q_j / q_next); errors name ``op``."""
    if torch.compiler.is_compiling() or functionalizes(op):
        log_q, ratios = torch.ops.focalkern.inverse_calibration_map(z, log_p, gamma)
    else:
        log_q, ratios = _InverseRows.apply(z, log_p, gamma)  # type: ignore[no-untyped-call]
    return log_q, ratios


# -- two classes, one logit -------------------------------------------------------------------------------------------


@torch.library.custom_op("focalkern::inverse_calibration_map_binary", mutates_args=())
def _inverse_binary(t: Tensor, gamma: Tensor) -> Tensor:
    """s [...] for the logit t [...] and gamma [...]."""
    tolerance = 4 * torch.finfo(t.dtype).eps
    size = t.abs()
    # The map is odd; for |t| its root lies in this bracket. At 0 and at infinity both ends equal the root.
    low, high = size / (1 + gamma), (size + torch.log1p(gamma)) / (1 + gamma)
    s = low
    for _ in range(_OUTER_STEPS):
        step = torch.where(size.isfinite(), (size - _binary_map(s, gamma)) / _binary_slope(s, gamma), 0.0)
        # The map is convex or concave over the whole bracket, so a step that leaves the bracket is clamped to its end.
        moved = torch.minimum(torch.maximum(s + step, low), high)
        step, s = moved - s, moved
        if _converged(torch.where(size.isfinite(), step, 0.0), s, tolerance):
            break
    s = torch.where(size.isfinite(), s, size) * t.sign()
    return torch.where((gamma >= 0) & gamma.isfinite(), torch.where(gamma == 0, t, s), math.nan)


def elements_in_order(result: Tensor, given: Tensor, gamma: Tensor) -> Tensor:
    """Corrects the rounding of ``result``, which is an increasing function of ``given`` for each gamma.

    Each element becomes the largest result among the elements of its gamma whose ``given`` is not larger. So equal
    ``given`` have equal results, and a larger ``given`` never has a smaller result. Derivatives are those of
    ``result``.
    """
    value, t, g = (x.detach().reshape(-1) for x in (result, given, gamma))
    if value.numel() < 2:
        return result
    order = t.argsort()
    order = order[g[order].argsort(stable=True)]
    value, t, g = value[order], t[order], g[order]
    same_gamma = g[1:] == g[:-1]
    # One running maximum over ranks serves all gammas: ranks of a later gamma exceed those of the gammas before it.
    ascending = value.argsort()
    of_gamma = F.pad((~same_gamma).cumsum(0), (1, 0))
    ascending = ascending[of_gamma[ascending].argsort(stable=True)]
    place = torch.arange(value.numel(), device=value.device)
    highest = torch.empty_like(place).scatter(0, ascending, place).cummax(0).values
    goes_on = F.pad((t[1:] == t[:-1]) & same_gamma, (0, 1))
    last_equal = place.masked_fill(goes_on, value.numel()).flip(0).cummin(0).values.flip(0)
    ordered = torch.empty_like(value).scatter(0, order, value[ascending[highest[last_equal]]]).reshape(result.shape)
    return torch.where(ordered == result, result, result + (ordered - result.detach()))


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
    """The binary operator for eager callers; see _InverseRows."""

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


def inverse_logits(op: str, t: Tensor, gamma: Tensor) -> Tensor:
    """s for the logit t; errors name ``op``."""
    if torch.compiler.is_compiling() or functionalizes(op):
        return torch.ops.focalkern.inverse_calibration_map_binary(t, gamma)
    return _InverseLogits.apply(t, gamma)  # type: ignore[no-untyped-call]
