"""Definitions at 300 digits, for extreme inputs where no floating-point oracle is reliable.

Everything is written directly from the definitions (probabilities as quotients of exponentials, 1 - p as a
subtraction), and every derivative is a numerical one: at 300 digits neither cancels. So the oracle shares no formula
with the stable forms under test.
"""

import contextlib
from collections.abc import Iterator, Sequence

import mpmath
from mpmath import mpf

DIGITS = 300


@contextlib.contextmanager
def precision() -> Iterator[None]:
    with mpmath.workdps(DIGITS):
        yield


def softmax(z: Sequence[mpf]) -> list[mpf]:
    top = max(z)
    e = [mpmath.exp(v - top) for v in z]
    total = mpmath.fsum(e)
    return [v / total for v in e]


def factor(p: mpf, gamma: mpf) -> mpf:
    return (1 - p) ** gamma if gamma >= 0 else (1 + p) ** -gamma


def loss(z: Sequence[float], target: int | Sequence[float], gamma: float, smoothing: float = 0.0) -> mpf:
    """Focal loss of one row; target is a class or one probability per class."""
    p = softmax([mpf(v) for v in z])
    n = len(p)
    share = [mpf(i == target) for i in range(n)] if isinstance(target, int) else [mpf(t) for t in target]
    share = [(1 - mpf(smoothing)) * t + mpf(smoothing) / n for t in share]
    return -mpmath.fsum(t * factor(q, mpf(gamma)) * mpmath.log(q) for t, q in zip(share, p, strict=True) if t != 0)


def g(q: mpf, gamma: mpf) -> mpf:
    """G(q; gamma) = (1 - q)^gamma (1 + gamma phi), phi = -q log q / (1 - q)."""
    return (1 - q) ** gamma * (1 - gamma * q * mpmath.log(q) / (1 - q))


def log_map(z: Sequence[float], gamma: float, temperature: float = 1.0) -> list[mpf]:
    """Log-probabilities of the focal calibration map of one row of logits."""
    q = softmax([mpf(v) / mpf(temperature) for v in z])
    weights = [v / g(v, mpf(gamma)) for v in q]
    total = mpmath.fsum(weights)
    return [mpmath.log(w / total) for w in weights]


def binary_log_odds(s: float, gamma: float, temperature: float = 1.0) -> mpf:
    low, high = log_map([mpf(0), mpf(s)], gamma, temperature)
    return high - low


def log_inverse_map(z: Sequence[float], gamma: float) -> list[mpf]:
    """log q, where the map of q at gamma is softmax(z), gamma > 0: the definition, by bracketed root finding.

    Call it with about 80 digits (``mpmath.workdps``): with 300 digits it takes seconds per row.
    """
    p, gamma = softmax([mpf(v) for v in z]), mpf(gamma)
    far = mpf(mpmath.mp.dps)  # 1 - q still has half of the digits there

    def class_probability(log_weight):
        # q / G(q) grows from 0 to infinity; as a function of the log-odds of q, its logarithm is nearly two straight
        # lines.
        def excess(x):
            return mpmath.log(sigmoid(x) / g(sigmoid(x), gamma)) - log_weight

        return sigmoid(mpmath.findroot(excess, (-far, far), solver="anderson", maxsteps=200))

    def excess_sum(log_scale):
        return mpmath.log(mpmath.fsum(class_probability(mpmath.log(v) + log_scale) for v in p))

    log_scale = mpmath.findroot(excess_sum, (-far / 2, far / 2 * min(gamma, 1)), solver="anderson", maxsteps=200)
    return [mpmath.log(class_probability(mpmath.log(v) + log_scale)) for v in p]


def sigmoid(x: mpf) -> mpf:
    return 1 / (1 + mpmath.exp(-x))


def gradient(function, arguments: Sequence[float]) -> list[mpf]:
    """Central differences of a function of several numbers : truncated beyond 80 digits."""
    x = [mpf(v) for v in arguments]
    step = mpf(10) ** -40
    result = []
    for i in range(len(x)):
        plus, minus = list(x), list(x)
        plus[i] += step
        minus[i] -= step
        result.append((function(plus) - function(minus)) / (2 * step))
    return result


def hessian_product(function, arguments: Sequence[float], direction: Sequence[float]) -> list[mpf]:
    """The Hessian times a direction, by differences of gradients."""
    x = [mpf(v) for v in arguments]
    step = mpf(10) ** -20
    plus = gradient(function, [a + step * mpf(v) for a, v in zip(x, direction, strict=True)])
    minus = gradient(function, [a - step * mpf(v) for a, v in zip(x, direction, strict=True)])
    return [(a - b) / (2 * step) for a, b in zip(plus, minus, strict=True)]


def _shares_of_logit(x: float) -> tuple[mpf, mpf]:
    """p and 1 - p. At a logit of 1000 even 300 digits do not suffice for a subtraction."""
    return 1 / (1 + mpmath.exp(-mpf(x))), 1 / (1 + mpmath.exp(mpf(x)))


def _binary_cross_entropy(p: mpf, q: mpf, t: mpf) -> mpf:
    return -(t * mpmath.log(p) if t else mpf(0)) - ((1 - t) * mpmath.log(q) if t != 1 else mpf(0))


def sigmoid_focal(x: float, t: float, gamma: float, alpha: float | None = None) -> mpf:
    (p, q), t = _shares_of_logit(x), mpf(t)
    a = 1 if alpha is None else mpf(alpha) * t + (1 - mpf(alpha)) * (1 - t)
    return a * (t * q + (1 - t) * p) ** mpf(gamma) * _binary_cross_entropy(p, q, t)


def asymmetric(x: float, t: float, gamma_negative: float, gamma_positive: float, margin: float) -> mpf:
    (p, q), t = _shares_of_logit(x), mpf(t)
    v = max(p - mpf(margin), mpf(0))
    positive = -(q ** mpf(gamma_positive)) * mpmath.log(p) if t else mpf(0)
    rest = q if margin == 0 else 1 - v
    negative = -(v ** mpf(gamma_negative)) * mpmath.log(rest) if t != 1 and v > 0 else mpf(0)
    return t * positive + (1 - t) * negative


def quality(x: float, t: float, beta: float) -> mpf:
    (p, q), t = _shares_of_logit(x), mpf(t)
    gap = q - (1 - t) if p > q else t - p
    return abs(gap) ** mpf(beta) * _binary_cross_entropy(p, q, t)


def scored(name: str, x: float, t: float, gamma: float, alpha: float, constant: float | None = None) -> mpf:
    """The varifocal, the matchability and the IoU-aware loss. If `constant` is a logit, the modulation of the
    background and the soft target of the IoU-aware loss are computed from it and not from x."""
    (p, q), t, gamma, alpha = _shares_of_logit(x), mpf(t), mpf(gamma), mpf(alpha)
    fixed = p if constant is None else _shares_of_logit(constant)[0]
    if not t:
        modulation = p if name == "ia_bce_loss" else fixed
        return (1 if name == "ia_bce_loss" else alpha) * modulation**gamma * -mpmath.log(q)
    if name == "varifocal_loss":
        return t * _binary_cross_entropy(p, q, t)
    mixed = max(fixed**alpha * t ** (1 - alpha), mpf(0.01))
    return _binary_cross_entropy(p, q, t**gamma if name == "matchability_loss" else mixed)
