"""The map of spline scaling in plain torch. The quantities are those of csrc/math/spline.h, under the same names."""

import math

import torch
from torch import Tensor

from focalkern.fallback._checks import autocasts, sum_tolerance, values_may_be_read, widest_dtype
from focalkern.fallback._spline_arguments import check_map

__all__ = [
    "all_in_order",
    "in_order",
    "raise_invalid_row",
    "spline_coefficients",
    "spline_map",
    "spline_map_composite",
]

_OP = "spline_calibration_map"
_LARGE = 0.75  # above this P, 1 - P is computed as the sum of the other classes


def spline_coefficients(knots: Tensor, values: Tensor) -> Tensor:
    r"""The natural cubic spline through (knots, values), [m], as polynomials [m + 1, 4] on the pieces between knots.

    .. math:: f(u) = \sum_{k=0}^3 c_{ik} (u - o_i)^k

    on piece i, whose origin o_i is the knot to its left, or the first knot. Both outer pieces are straight lines.
    ``values`` [m, n] are n splines; the result is then [m + 1, 4, n]. Differentiable in knots and values.

    Source: Green & Silverman, Nonparametric Regression and Generalized Linear Models, 1994, section 2.1.
    """
    h = knots.diff().reshape(-1, *[1] * (values.dim() - 1))
    rise = values.diff(dim=0) / h
    ends = torch.zeros_like(values[:1])
    # Second derivatives at the knots.
    second = torch.cat([ends, ends])
    if len(knots) > 2:
        steps = knots.diff()
        system = ((steps[:-1] + steps[1:]) / 3).diag()
        system = system + (steps[1:-1] / 6).diag(1) + (steps[1:-1] / 6).diag(-1)
        second = torch.cat([ends, torch.linalg.solve(system, rise.diff(dim=0)), ends])
    slope = rise - h / 6 * (2 * second[:-1] + second[1:])
    last = rise[-1:] + h[-1:] / 6 * (second[-2:-1] + 2 * second[-1:])
    return torch.stack(
        [
            torch.cat([values[:1], values]),
            torch.cat([slope[:1], slope, last]),
            torch.cat([ends, second[:-1] / 2, ends]),
            torch.cat([ends, second.diff(dim=0) / (6 * h), ends]),
        ],
        dim=1,
    )


def in_order(input: Tensor, result: Tensor) -> Tensor:
    """Corrects the rounding of ``result`` [..., C], which is an increasing map of ``input``.

    Equal inputs get equal results to the bit, and a larger input never gets a smaller result. Rows in order are not
    changed; in other rows each class gets the largest result among the classes whose input is not larger.
    """
    n_classes = input.shape[-1]
    rows, results = input.reshape(-1, n_classes), result.reshape(-1, n_classes)
    order = rows.detach().argsort(-1)
    rows, ordered = rows.gather(-1, order), results.gather(-1, order)
    same = rows[:, 1:] == rows[:, :-1]
    off = (ordered[:, 1:] < ordered[:, :-1]) | (same & (ordered[:, 1:] != ordered[:, :-1]))
    bad = off.any(-1).nonzero().squeeze(1)
    if len(bad) == 0:
        return result
    return results.index_copy(0, bad, _raised(ordered[bad], same[bad], order[bad])).reshape(result.shape)


def all_in_order(input: Tensor, result: Tensor) -> Tensor:
    """As :func:`in_order`, without a look at the values: no wait for the device."""
    ordered, order = input.sort(-1)
    return _raised(result.gather(-1, order), ordered[..., 1:] == ordered[..., :-1], order)


def _raised(ordered: Tensor, same: Tensor, order: Tensor) -> Tensor:
    raised = ordered.cummax(-1).values
    last = torch.cat([~same, same.new_ones(*same.shape[:-1], 1)], -1)  # the last of each run of equal inputs
    raised = raised.where(last, torch.inf).flip(-1).cummin(-1).values.flip(-1)
    return torch.empty_like(raised).scatter_(-1, order, raised)


def spline_map(
    input: Tensor,
    parameters: Tensor,
    knots: Tensor,
    coefficients: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
    keep_order: bool,
    log: bool,
) -> Tensor:
    """The compiled module's spline_map in plain torch; ``weight`` may also be a matrix [C, C]."""
    check_map(input, parameters, knots, coefficients, weight, bias)
    output = _definition(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros, log)
    readable = values_may_be_read(input)
    if readable:
        invalid = output.detach()[..., 0].isnan().reshape(-1).nonzero()
        if len(invalid):
            raise_invalid_row(input, is_probs, int(invalid[0]))
    output = output.to(torch.float32 if autocasts(input) else input.dtype)
    return in_order(input, output) if keep_order and readable else output


def spline_map_composite(
    input: Tensor,
    parameters: Tensor,
    knots: Tensor,
    coefficients: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
    log_output: bool,
    wide: bool,
) -> Tensor:
    """The operator ``spline_map_composite``. ``wide``: whether autocast makes the result float32."""
    check_map(input, parameters, knots, coefficients, weight, bias)
    output = _definition(input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros, log_output)
    return output.to(torch.float32 if wide else input.dtype)


def _definition(
    input: Tensor,
    parameters: Tensor,
    knots: Tensor,
    coefficients: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
    log: bool,
) -> Tensor:
    """The map of checked arguments in the widest dtype of the device. It does not synchronise."""
    z = input.to(widest_dtype(input))
    factor, temperature, floor = parameters.to(z).unbind()
    # Classes at -inf are masked, because their gradient would be 0 * inf.
    lowest = z == (0 if is_probs else -math.inf)
    z = z.masked_fill(lowest, 1.0 if is_probs else 0.0)
    scaled = (z.log() if is_probs else z) / temperature
    q = scaled.masked_fill(lowest, -math.inf).softmax(-1)
    p = (1 - floor) * q + floor / z.shape[-1]
    large = p > _LARGE
    others = p.masked_fill(large, 0.0).sum(-1, keepdim=True)
    x = p.log()
    u = x - torch.where(large, others, 1 - p).log()
    scores = factor * x + _curve(u, knots.to(z), coefficients.to(z))
    if weight is not None:
        weight = weight.to(z)
        scores = scores + (x * weight if weight.dim() == 1 else x @ weight.T)
    if bias is not None:
        scores = scores + bias.to(z)
    if keep_zeros:
        scores = scores.masked_fill(lowest, -math.inf)
    output = scores.log_softmax(-1) if log else scores.softmax(-1)
    if keep_zeros:  # constants, so that upstream gradients of these classes have no effect
        output = output.masked_fill(lowest & output.isfinite().any(-1, keepdim=True), -math.inf if log else 0.0)
    return output if not is_probs else output + _nan_where_no_probabilities(input, output)


def _nan_where_no_probabilities(input: Tensor, output: Tensor) -> Tensor:
    """[..., 1]: NaN for rows that are not probabilities, 0 for others."""
    p = input.detach().to(output)
    off = (p.sum(-1, keepdim=True) - 1).abs() <= sum_tolerance(input.dtype)
    legal = off & (p >= 0).all(-1, keepdim=True)
    return torch.zeros_like(p[..., :1]).masked_fill(~legal, math.nan)


def _curve(u: Tensor, knots: Tensor, coefficients: Tensor) -> Tensor:
    where = u.detach()
    if torch._C._are_functorch_transforms_active():  # torch.func has no rule for bucketize
        piece = (where.unsqueeze(-1) > knots.detach()).sum(-1)
    else:
        piece = torch.bucketize(where, knots.detach())
    s = u - torch.cat([knots[:1], knots])[piece]
    c0, c1, c2, c3 = (column[piece] for column in coefficients.unbind(1))
    return c0 + s * (c1 + s * (c2 + s * c3))


def raise_invalid_row(input: Tensor, is_probs: bool, row: int) -> None:
    """Raises the error that says why the result of a row is NaN."""
    values = input.detach().reshape(-1, input.shape[-1])[row].cpu().double()
    for c, value in enumerate(values.tolist()):
        where = f"row {row}, class {c}"
        if math.isnan(value):
            raise ValueError(f"{_OP}: input must not be NaN, got NaN at {where}")
        if value == math.inf:
            raise ValueError(f"{_OP}: input must not be +inf, got inf at {where}")
        if is_probs and value < 0:
            raise ValueError(f"{_OP}: input must be probabilities, got {value:g} at {where}")
    if is_probs:
        raise ValueError(
            f"{_OP}: input must be probabilities that sum to 1 within {sum_tolerance(input.dtype):g}, got a sum of "
            f"{float(values.sum()):g} at row {row}"
        )
    if bool((values == -math.inf).all()):
        raise ValueError(f"{_OP}: input must have a logit above -inf in every row, got none at row {row}")
