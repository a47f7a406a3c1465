"""The focal calibration map in plain torch, for rows of classes and for one logit.

The quantities are those of csrc/math/calibration_map.h, under the same names: everything of the top class comes from
the sum over the others, and products that would be 0 * inf are not formed.
"""

import math

import torch
from torch import Tensor

from focalkern.plain._checks import (
    autocasts,
    check_dense,
    check_floating,
    check_same_device,
    compute_dtype,
    fits,
    scalar_name,
    sum_tolerance,
    values_may_be_read,
    widest_dtype,
)

__all__ = ["calibration_map", "calibration_map_scalar"]

_LOGITS, _PROBS, _BINARY = 0, 1, 2  # the codes of the compiled module


def calibration_map_scalar(input: Tensor, gamma: float, temperature: float, kind: int, log: bool) -> Tensor:
    """The map with one gamma and one temperature, numbers of the host."""
    wide = torch.float64  # on the host, which has it
    return calibration_map(input, torch.tensor(gamma, dtype=wide), torch.tensor(temperature, dtype=wide), kind, log)


def calibration_map(input: Tensor, gamma: Tensor, temperature: Tensor, kind: int, log: bool) -> Tensor:
    """As the compiled module's calibration_map."""
    _check_arguments(input, gamma, temperature, kind)
    dtype = torch.float32 if autocasts(input) else input.dtype
    if kind == _BINARY:
        output = _binary(input, gamma, temperature, log)
    else:
        output = _rows(input, gamma, temperature, kind == _PROBS, log)
    if values_may_be_read(input):
        first = output.detach() if kind == _BINARY else output.detach()[..., 0]
        invalid = first.isnan().reshape(-1).nonzero()
        if len(invalid):
            _raise_invalid_row(input, gamma, temperature, kind, int(invalid[0]))
    return output.to(dtype)


def _one_minus_phi_of_odds(t: Tensor, u: Tensor) -> Tensor:
    """1 - phi of a class with the odds 1 : t and u = 1 - q: 1 - log(1 + t) / t.

    As gamma -> -1 it is all that is left of 1 + gamma phi, so for small u it is the sum of u^k / (k (k + 1)), and no
    difference.
    """
    small = u < 0.125
    u_small, t_large = torch.where(small, u, 0.0), torch.where(small, 1.0, t)
    terms = 17 if t.dtype == torch.float64 else 8
    series = torch.full_like(u, 1 / (terms * (terms + 1)))
    for k in range(terms - 1, 0, -1):
        series = series * u_small + 1 / (k * (k + 1))
    return torch.where(small, series * u_small, 1 - t_large.log1p() / t_large)


def _parameters(gamma: Tensor, temperature: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gamma, 1 + gamma and 1 / T in the dtype of the computation, the last two rounded once."""
    wide = widest_dtype(z)
    gamma = gamma.to(wide)  # once, so that a gradient in half precision is rounded once
    one_plus_gamma, beta = gamma + 1, temperature.to(wide).reciprocal()
    return gamma.to(z), one_plus_gamma.to(z), beta.to(z)


def _in_domain(gamma: Tensor, temperature: Tensor, device: torch.device) -> Tensor:
    legal_gamma = (gamma > -1) & (gamma < math.inf)
    legal_temperature = (temperature > 0) & (temperature < math.inf)
    return legal_gamma.to(device) & legal_temperature.to(device)


def _binary(logits: Tensor, gamma: Tensor, temperature: Tensor, log_odds: bool) -> Tensor:
    s = logits.to(compute_dtype(logits.dtype))
    g, one_plus_g, beta = _parameters(gamma, temperature, s)
    # The map is odd. At 0 the sign must not be 0, or the slope would vanish with it.
    infinite = s.isinf()
    x = torch.where(infinite, 0.0, s) * beta
    sign = torch.where(x < 0, -1.0, torch.ones_like(x))
    a = sign * x
    t = (-a).exp()
    q = (1 + t).reciprocal()
    one_minus_phi = _one_minus_phi_of_odds(t, t * q)
    # phi of the other class minus phi of this one, which tend to each other as a -> 0.
    difference = t * a + torch.expm1(-a) * q * (1 - one_minus_phi) / (q * q)
    result = sign * (one_plus_g * a + (g * difference / (one_plus_g - g * one_minus_phi)).log1p())
    result = torch.where(infinite, s.detach(), result)
    if not log_odds:
        result = result.sigmoid()
    return torch.where(_in_domain(gamma, temperature, s.device) & (s < math.inf), result, math.nan)


def _rows(input: Tensor, gamma: Tensor, temperature: Tensor, probs: bool, log: bool) -> Tensor:
    given = input.to(compute_dtype(input.dtype))
    g, one_plus_g, beta = (parameter.unsqueeze(-1) for parameter in _parameters(gamma, temperature, given))

    # Classes of probability zero take part in no arithmetic, so that no gradient meets 0 * inf.
    absent = given == (0 if probs else -math.inf)
    x = torch.where(absent, 1.0, given).log() if probs else torch.where(absent, 0.0, given)

    # `following` is the largest of the others: a shift, which nothing depends on.
    top = torch.where(absent, -math.inf, x).detach().argmax(-1, keepdim=True)
    is_top = torch.arange(x.shape[-1], device=x.device) == top
    apart = absent | is_top
    x_top = x.gather(-1, top)
    largest_other = torch.where(apart, -math.inf, x).detach().amax(-1, keepdim=True)
    alone = largest_other == -math.inf
    following = torch.where(alone, x_top.detach(), largest_other)
    y = torch.where(apart, 0.0, (x - following) * beta)
    gap = (following - x_top) * beta
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
    log_ratio = y + ratio_offset - (g * torch.log1p(-q) + (g * phi).log1p())
    log_norm = torch.where(apart, 0.0, log_ratio.exp()).sum(-1, keepdim=True).log1p()
    result = torch.where(absent, -math.inf, torch.where(is_top, -log_norm, log_ratio - log_norm))
    if not log:
        result = result.exp()

    valid = _in_domain(gamma, temperature, x.device).unsqueeze(-1)
    valid = valid & ~absent.all(-1, keepdim=True) & (given < math.inf).all(-1, keepdim=True)
    if probs:
        total = given.detach().sum(-1, keepdim=True)
        valid = valid & ((total - 1).abs() <= sum_tolerance(input.dtype)) & (given >= 0).all(-1, keepdim=True)
    return torch.where(valid, result, math.nan)


# -- arguments --------------------------------------------------------------------------------------------------------


def _name(kind: int) -> str:
    return "binary_focal_calibration_map" if kind == _BINARY else "focal_calibration_map"


def _check_arguments(input: Tensor, gamma: Tensor, temperature: Tensor, kind: int) -> None:
    op = _name(kind)
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
        if not parameter.is_floating_point():
            raise TypeError(
                f"{op}: {name} must be a number or a floating-point tensor, got a tensor of "
                f"{scalar_name(parameter.dtype)}"
            )
        if parameter.dim() == 0 and parameter.device.type == "cpu":  # one number may stay on the host
            continue
        check_same_device(op, name, parameter, input)
        if not fits(parameter, shape):
            of = "shape of logits" if kind == _BINARY else "leading shape of input"
            raise ValueError(
                f"{op}: {name} must be broadcastable to the {of} {list(shape)}, got {list(parameter.shape)}"
            )


def _raise_invalid_row(input: Tensor, gamma: Tensor, temperature: Tensor, kind: int, row: int) -> None:
    """Says why a row has no answer."""
    op, name = _name(kind), "logits" if kind == _BINARY else "input"
    shape = input.shape if kind == _BINARY else input.shape[:-1]

    def of_row(parameter: Tensor) -> float:
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
