"""Code shared by the definitions: softmax and its complement in log space, and parameters as tensors."""

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from focalkern._devices import as_parameter

__all__ = [
    "SATURATED",
    "exact_log_sigmoids",
    "exact_second_derivatives",
    "log_softmax_and_complement",
    "number_tensor",
    "parameter_tensor",
    "phi_of",
    "second_derivatives_are_exact",
]

# Beyond this logit, sigmoid is 0 or 1 in every dtype. Its derivative is set to 0, because 0 * inf would be NaN.
SATURATED = 1e4


_transform = torch._C._functorch.TransformType


class _Exact(threading.local):
    second_derivatives = False


_exact = _Exact()


@contextlib.contextmanager
def exact_second_derivatives() -> Iterator[None]:
    """Within it, definitions use :func:`exact_log_sigmoids` in place of torch's logsigmoid, which is faster. The second
    derivative of torch's is p (p - 1), which cancels for p near 1. One transform of torch.func takes no second
    derivative."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    is_first = sum(level.key() in (_transform.Grad, _transform.Jvp) for level in levels) == 1
    before, _exact.second_derivatives = _exact.second_derivatives, not is_first
    try:
        yield
    finally:
        _exact.second_derivatives = before


def second_derivatives_are_exact() -> bool:
    # torch.compile cannot trace the attribute, and its graphs have no second derivatives.
    return not torch.compiler.is_compiling() and _exact.second_derivatives


def exact_log_sigmoids(x: Tensor) -> tuple[Tensor, Tensor]:
    """log p and log(1 - p) of p = sigmoid(x), made of e^-|x|, whose derivatives of any order keep its digits."""
    positive, saturated = x > 0, x.abs() > SATURATED
    size = torch.where(saturated, 0.0, torch.where(positive, -x, x))
    log_sum = torch.where(saturated, 0.0, size.exp().log1p())
    return torch.where(positive, 0.0, x) - log_sum, torch.where(positive, -x, 0.0) - log_sum


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
    # The shift needs no gradient.
    shifted = z - z_top.detach()
    others = torch.where(is_top, -torch.inf, shifted)
    zero = z_top - z_top.detach()

    # The only possible class of a row (all others -inf, or C = 1) has q = 1 for any logit, so its gradient is 0.
    alone = (others == -torch.inf).all(-1, keepdim=True) & z_top.isfinite()
    log_others = _logsumexp(torch.where(alone, 0.0, others))
    # d <= log(C - 1), so exp(d) never overflows.
    d = log_others - zero
    log1p_exp_d = d.exp().log1p()
    log_q_top = torch.where(alone, 0.0, -log1p_exp_d)
    # For q_top <= 1/2 other forms are needed: d - log(1 + e^d) cancels, and the gradient of log(1 + e^d) + zero in the
    # largest logit is a difference of two sums over all classes, which cancels too.
    above_half = d < 0
    log_u_below = -(-torch.where(above_half, 0.0, d)).exp().log1p()
    log_u_top = torch.where(above_half, d - log1p_exp_d, log_u_below)
    log_u_top = torch.where(alone, -torch.inf, log_u_top)
    log_sum_below = (log_others.exp() + (zero.exp() - 1.0)).log1p()
    log_sum = torch.where(alone, zero, torch.where(above_half, zero + log1p_exp_d, log_sum_below))

    # z_top - z_top is NaN if the largest logit is NaN or infinite; adding it makes all classes of the row NaN.
    log_q = torch.where(is_top, log_q_top, shifted - log_sum) + (z_top - z_top)
    absent = log_q == -torch.inf
    log_u_below_half = torch.where(absent, 0.0, torch.log1p(-torch.where(is_top | absent, -1.0, log_q).exp()))
    log_u = torch.where(is_top, log_u_top + (z_top - z_top), log_u_below_half)
    return log_q, log_u


def _logsumexp(z: Tensor) -> Tensor:
    # Not torch.logsumexp, because the version of ONNX runtimes underflows.
    largest = z.detach().amax(-1, keepdim=True)
    return (z - largest).exp().sum(-1, keepdim=True).log() + largest


def phi_of(log_q: Tensor, log_u: Tensor) -> Tensor:
    r"""phi = -q log(q) / (1 - q): 0 at q = 0, 1 at q = 1, increasing between.

    Near q = 1 the quotient and its derivatives cancel, so phi is computed by the series -log(1 - u) / u = 1 + u/2 +
    u^2/3 + ....
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


def number_tensor(value: float | Tensor, like: Tensor) -> Tensor:
    """A number or tensor in the dtype of ``like``. A number is rounded once, directly to that dtype."""
    if not isinstance(value, Tensor) and torch.compiler.is_compiling():
        # A tensor, not a constant of the graph, so that a new value causes no recompilation.
        return (torch.zeros((), dtype=torch.float64) + value).to(like.dtype).to(like.device)
    return value.to(like) if isinstance(value, Tensor) else torch.tensor(value, dtype=like.dtype, device=like.device)


def parameter_tensor(value: float | Tensor, like: Tensor) -> Tensor:
    """As number_tensor, but a 0-dimensional tensor on the host stays there."""
    return as_parameter(value, like) if isinstance(value, Tensor) else number_tensor(value, like)
