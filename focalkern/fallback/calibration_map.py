"""The focal calibration map in plain torch, for rows of classes and for one logit.

Quantities and names are those of csrc/math/calibration_map.h. The quantities of the top class are computed from the sum
over the other classes, and products 0 * inf are avoided. As in csrc/math, y is rounded to a grid, which keeps the order
of the inputs; a class that ties with the top class gets the same result."""

import math

import torch
from torch import Tensor

from focalkern._devices import as_parameter, is_host_number
from focalkern._types import compute_dtype
from focalkern.fallback._checks import (
    autocasts,
    check_dense,
    check_floating,
    check_same_device,
    fits,
    sum_tolerance,
    values_may_be_read,
    widest_dtype,
)

__all__ = [
    "calibration_map",
    "calibration_map_composite",
    "calibration_map_scalar",
    "check_arguments",
    "raise_invalid_row",
]

_LOGITS, _PROBS, _BINARY = 0, 1, 2  # the codes of the compiled module


def calibration_map_scalar(input: Tensor, gamma: float, temperature: float, kind: int, log: bool) -> Tensor:
    """The map with one gamma and one temperature as Python numbers."""
    # float64 on the host, also for devices without float64, and whatever the default device is.
    exponent, divisor = (torch.tensor(number, dtype=torch.float64, device="cpu") for number in (gamma, temperature))
    return calibration_map(input, exponent, divisor, kind, log)


def calibration_map(input: Tensor, gamma: Tensor, temperature: Tensor, kind: int, log: bool) -> Tensor:
    """The compiled module's calibration_map in plain torch."""
    check_arguments(input, gamma, temperature, kind)
    output = _definition(input, gamma, temperature, kind, log)
    if values_may_be_read(input):
        first = output.detach() if kind == _BINARY else output.detach()[..., 0]
        invalid = first.isnan().reshape(-1).nonzero()
        if len(invalid):
            raise_invalid_row(input, gamma, temperature, kind, int(invalid[0]))
    return output.to(torch.float32 if autocasts(input) else input.dtype)


def calibration_map_composite(
    input: Tensor, gamma: Tensor, temperature: Tensor, kind: int, log_output: bool, wide: bool
) -> Tensor:
    """The operator ``calibration_map_composite``. ``wide``: whether autocast makes the result float32."""
    check_arguments(input, gamma, temperature, kind)
    output = _definition(input, gamma, temperature, kind, log_output)
    return output if wide else output.to(input.dtype)


def _definition(input: Tensor, gamma: Tensor, temperature: Tensor, kind: int, log: bool) -> Tensor:
    """The map of checked arguments in the dtype of the computation. It does not synchronise.

    It has no compiled form (:mod:`focalkern.fallback._compile`): on the CPU inductor computes the last classes of a row
    by another exponential, and equal classes would have unequal probabilities.
    """
    if kind == _BINARY:
        return _binary(input, gamma, temperature, log)
    return _rows(input, gamma, temperature, kind == _PROBS, log)


def _one_minus_phi_of_odds(t: Tensor, u: Tensor) -> Tensor:
    """1 - phi of a class with the odds 1 : t and u = 1 - q: 1 - log(1 + t) / t.

    For gamma -> -1 it is the limit of 1 + gamma phi and must not cancel. So for small u it is the sum of
    u^k / (k (k + 1))."""
    small = u < 0.125
    u_small, t_large = torch.where(small, u, 0.0), torch.where(small, 1.0, t)
    terms = 17 if t.dtype == torch.float64 else 8
    series = torch.full_like(u, 1 / (terms * (terms + 1)))
    for k in range(terms - 1, 0, -1):
        series = series * u_small + 1 / (k * (k + 1))
    return torch.where(small, series * u_small, 1 - t_large.log1p() / t_large)


def _in_place_of(result: Tensor, value: Tensor) -> Tensor:
    """``value`` with the derivatives of ``result``."""
    now = result.detach()
    return torch.where(value == now, result, result + (value.detach() - now))


def _with_spare_bits(x: Tensor, bits: int) -> Tensor:
    """x rounded to fewer bits, with the derivatives of x. A function whose error is below the last remaining bit keeps
    the order of such numbers."""
    now = x.detach()
    multiple = now * float(2**bits + 1)
    return _in_place_of(x, torch.where(multiple.isfinite(), multiple - (multiple - now), now))


def _parameters(gamma: Tensor, temperature: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gamma, 1 + gamma and 1 / T in the dtype of the computation, the last two rounded once."""
    wide = widest_dtype(z)
    gamma = gamma.to(wide)  # one conversion, so that a half-precision gradient is rounded once
    one_plus_gamma, beta = gamma + 1, temperature.to(wide).reciprocal()
    return as_parameter(gamma, z), as_parameter(one_plus_gamma, z), as_parameter(beta, z)


def _along_rows(parameter: Tensor) -> Tensor:
    """The parameter with a dimension for the classes. A host number stays 0-dimensional: torch combines only those with
    tensors of other devices."""
    return parameter if is_host_number(parameter) else parameter.unsqueeze(-1)


def _in_domain(gamma: Tensor, temperature: Tensor) -> Tensor:
    return (gamma > -1) & (gamma < math.inf) & (temperature > 0) & (temperature < math.inf)


def _binary(logits: Tensor, gamma: Tensor, temperature: Tensor, log_odds: bool) -> Tensor:
    s = logits.to(compute_dtype(logits.dtype))
    g, one_plus_g, beta = _parameters(gamma, temperature, s)
    # The map is odd. The sign at 0 is 1, because with 0 the derivative would be 0.
    infinite = s.isinf()
    x = _with_spare_bits(torch.where(infinite, 0.0, s) * beta, 4)
    x = torch.where(g == 0, torch.where(infinite, 0.0, s) * beta, x)
    sign = torch.where(x < 0, -1.0, torch.ones_like(x))
    a = sign * x
    t = (-a).exp()
    # 1 - phi = 1 - log(1 + t) / t with log(1 + t) = 2 atanh(t / (2 + t)); the series does not cancel for t <= 1.
    w = (t / (2 + t)).square()
    terms = 16 if t.dtype == torch.float64 else 7
    series = torch.full_like(w, 1 / (2 * terms + 1))
    for k in range(terms - 1, 0, -1):
        series = series * w + 1 / (2 * k + 1)
    one_minus_phi = (t - 2 * w * series) / (2 + t)
    # phi of the other class minus phi of this class, in a form that does not cancel for a -> 0.
    difference = t * a + torch.expm1(-2 * a) * (1 - one_minus_phi)
    result = sign * (one_plus_g * a + (g * difference / (one_plus_g - g * one_minus_phi)).log1p())
    result = torch.where(infinite, s.detach(), result)
    if not log_odds:
        result = result.sigmoid()
    return torch.where(_in_domain(gamma, temperature) & (s < math.inf), result, math.nan)


def _rows(input: Tensor, gamma: Tensor, temperature: Tensor, probs: bool, log: bool) -> Tensor:
    given = input.to(compute_dtype(input.dtype))
    g, one_plus_g, beta = (_along_rows(parameter) for parameter in _parameters(gamma, temperature, given))

    # Classes with probability 0 are masked before any arithmetic, so that no gradient is 0 * inf.
    absent = given == (0 if probs else -math.inf)
    x = _with_spare_bits(torch.where(absent, 1.0, given), 2).log() if probs else torch.where(absent, 0.0, given)

    # `following` is the largest logit of the other classes. It is only a shift, so it needs no gradient.
    top = torch.where(absent, -math.inf, x).detach().argmax(-1, keepdim=True)
    is_top = torch.arange(x.shape[-1], device=x.device) == top
    apart = absent | is_top
    x_top = x.gather(-1, top)
    largest_other = torch.where(apart, -math.inf, x).detach().amax(-1, keepdim=True)
    alone = largest_other == -math.inf
    following = torch.where(alone, x_top.detach(), largest_other)
    grid = 8.0  # adding it rounds y to a multiple of 4 units in the last place of 1
    least = -torch.finfo(x.dtype).max / 16  # keeps an overflowing quotient finite; its exponential is 0
    y = torch.where(apart, 0.0, (((x - following) * beta).clamp(min=least) + grid) - grid)
    gap = ((following - x_top) * beta).clamp(min=least)
    e = torch.where(apart, 0.0, y.exp())
    rest = e.sum(-1, keepdim=True) + alone
    exp_gap = gap.exp()
    odds = rest * exp_gap
    minus_log_q = odds.log1p()
    q_top = (1 + odds).reciprocal()
    denominator = one_plus_g - g * _one_minus_phi_of_odds(odds, odds * q_top)
    ratio_offset = one_plus_g * gap + (g * (rest.log() - minus_log_q) + denominator.log())

    q = e * (exp_gap * q_top)
    phi = -q * (y + (gap - minus_log_q)) / (1 - q)
    log_ratio = (y - (g * torch.log1p(-q) + (g * phi).log1p())) + ratio_offset
    ties = (gap == 0) & (y == 0)
    log_ratio = _in_place_of(log_ratio, torch.where(ties, 0.0, log_ratio.detach().clamp(max=0)))
    log_norm = torch.where(apart, 0.0, log_ratio.exp()).sum(-1, keepdim=True).log1p()
    result = torch.where(absent, -math.inf, torch.where(is_top, -log_norm, log_ratio - log_norm))
    if not log:
        result = result.exp()

    valid = _along_rows(_in_domain(gamma, temperature))
    valid = valid & ~absent.all(-1, keepdim=True) & (given < math.inf).all(-1, keepdim=True)
    if probs:
        total = given.detach().sum(-1, keepdim=True)
        valid = valid & ((total - 1).abs() <= sum_tolerance(input.dtype)) & (given >= 0).all(-1, keepdim=True)
    return torch.where(valid, result, math.nan)


# -- arguments --------------------------------------------------------------------------------------------------------


def operator_name(kind: int) -> str:
    return "binary_focal_calibration_map" if kind == _BINARY else "focal_calibration_map"


def check_arguments(input: Tensor, gamma: float | Tensor, temperature: float | Tensor, kind: int) -> None:
    """Checks all arguments except the values of input and parameters."""
    if not _LOGITS <= kind <= _BINARY:
        raise ValueError(f"focal_calibration_map: kind must be 0, 1 or 2, got {kind}")
    op = operator_name(kind)
    check_dense(op, input)
    check_floating(op, "logits" if kind == _BINARY else "input", input)
    if kind != _BINARY:
        if input.dim() < 1:
            raise ValueError(f"{op}: input must be [..., C], got a scalar")
        if input.shape[-1] < 2:
            raise ValueError(
                f"{op}: input must have at least two classes in its last dimension, got shape {list(input.shape)}"
            )
    shape = tuple(input.shape if kind == _BINARY else input.shape[:-1])
    for name, parameter in (("gamma", gamma), ("temperature", temperature)):
        if not isinstance(parameter, Tensor):
            continue
        if not parameter.is_floating_point():
            raise TypeError(
                f"{op}: {name} must be a number or a floating-point tensor, got a tensor of {parameter.dtype}"
            )
        if is_host_number(parameter):  # a single number may be on the host
            continue
        check_same_device(op, name, parameter, input)
        if not fits(parameter, shape):
            of = "shape of logits" if kind == _BINARY else "leading shape of input"
            raise ValueError(
                f"{op}: {name} must be broadcastable to the {of} {list(shape)}, got {list(parameter.shape)}"
            )


def raise_invalid_row(input: Tensor, gamma: float | Tensor, temperature: float | Tensor, kind: int, row: int) -> None:
    """Raises the error that says why the result of a row is NaN."""
    op, name = operator_name(kind), "logits" if kind == _BINARY else "input"
    shape = input.shape if kind == _BINARY else input.shape[:-1]

    def of_row(parameter: float | Tensor) -> float:
        if not isinstance(parameter, Tensor):
            return parameter
        return float(parameter.detach().expand(shape).reshape(-1)[row])

    g, t = of_row(gamma), of_row(temperature)
    if not -1 < g < math.inf:
        raise ValueError(f"{op}: gamma must be finite and greater than -1, got {g:g} at row {row}")
    if not 0 < t < math.inf:
        raise ValueError(f"{op}: temperature must be finite and positive, got {t:g} at row {row}")
    values = input.detach().reshape(-1, 1 if kind == _BINARY else input.shape[-1])[row].cpu().double()
    for c, value in enumerate(values.tolist()):
        where = f"row {row}" if kind == _BINARY else f"row {row}, class {c}"
        if math.isnan(value):
            raise ValueError(f"{op}: {name} must not be NaN, got NaN at {where}")
        if value == math.inf:
            raise ValueError(f"{op}: {name} must not be +inf, got inf at {where}")
        if kind == _PROBS and value < 0:
            raise ValueError(f"{op}: {name} must be probabilities, got {value:g} at {where}")
    if kind == _PROBS:
        raise ValueError(
            f"{op}: {name} must be probabilities that sum to 1 within {sum_tolerance(input.dtype):g}, got a sum of "
            f"{float(values.sum()):g} at row {row}"
        )
    if kind == _LOGITS and bool((values == -math.inf).all()):
        raise ValueError(f"{op}: {name} must have a logit above -inf in every row, got none at row {row}")
