"""Sums over rows for the fit of spline scaling on the kernels of the stable module.

Arguments and results are those of :mod:`focalkern.fallback.spline_sums`.
"""

import torch
from torch import Tensor

from focalkern.fallback._spline_arguments import FEW_CLASSES, check_curve, check_input, check_rows
from focalkern.fallback.spline_sums import spline_histogram as plain_histogram
from focalkern.fallback.spline_sums import spline_matrix_hessian as plain_hessian
from focalkern.fallback.spline_sums import spline_row_losses as plain_losses
from focalkern.fallback.spline_sums import spline_spread as plain_spread

__all__ = [
    "spline_curve_sums",
    "spline_features",
    "spline_histogram",
    "spline_linear_sums",
    "spline_log_probs",
    "spline_matrix_hessian",
    "spline_row_losses",
    "spline_spread",
    "spline_temperature_sums",
]

_N_BINS = 7680
_WIDE = torch.float64
_kernels = torch.ops.focalkern_stable


def spline_temperature_sums(
    input: Tensor, target: Tensor, weight: Tensor, betas: Tensor, floor: float, is_probs: bool
) -> Tensor:
    rows = _rows("spline_temperature_sums", input, target, weight)
    result = torch.empty(2, betas.numel(), dtype=_WIDE, device="cpu")
    _kernels.spline_temperature_sums_out(*rows, _wide(betas, input.device), result, floor, is_probs)
    return result


def spline_spread(input: Tensor, weight: Tensor, scale: float, lowest: float, is_probs: bool) -> float:
    if not input.is_cpu:
        return plain_spread(input, weight, scale, lowest, is_probs)
    rows, _, weights = _rows("spline_spread", input, None, weight)
    found: float = _kernels.spline_spread(rows, weights, scale, lowest, is_probs)
    return found


def spline_histogram(input: Tensor, weight: Tensor, temperature: float, floor: float, is_probs: bool) -> Tensor:
    if not input.is_cpu:
        return plain_histogram(input, weight, temperature, floor, is_probs)
    rows, _, weights = _rows("spline_histogram", input, None, weight)
    result = torch.empty(_N_BINS, dtype=_WIDE, device="cpu")
    _kernels.spline_histogram_out(rows, weights, result, temperature, floor, is_probs)
    return result


def spline_log_probs(input: Tensor, temperature: float, floor: float, is_probs: bool) -> Tensor:
    check_input("spline_log_probs", input)
    output = input.new_empty(input.shape, dtype=_WIDE)
    _kernels.spline_log_probs_out(input.contiguous(), output, temperature, floor, is_probs)
    return output


def spline_features(input: Tensor, temperature: float, floor: float, is_probs: bool) -> Tensor:
    check_input("spline_features", input)
    output = torch.empty(2, *input.shape, dtype=_WIDE, device="cpu")
    _kernels.spline_features_out(input.contiguous(), output, temperature, floor, is_probs)
    return output


def spline_curve_sums(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    temperature: float,
    floor: float,
    knots: Tensor,
    basis: Tensor,
    slope: float,
    values: Tensor,
    of_x: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
) -> tuple[float, Tensor, Tensor]:
    op, n = "spline_curve_sums", knots.numel() + 1
    rows = _rows(op, input, target, weight, of_curve=True)
    curve = _curve(op, input, knots, basis, values, of_x, bias, extra)
    gradient, hessian = torch.empty(n, dtype=_WIDE, device="cpu"), torch.empty(n, n, dtype=_WIDE, device="cpu")
    settings = (temperature, floor, slope, is_probs, keep_zeros)
    value: float = _kernels.spline_curve_sums_out(*rows, *curve, gradient, hessian, *settings)
    return value, gradient, hessian


def spline_matrix_hessian(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    temperature: float,
    floor: float,
    knots: Tensor,
    basis: Tensor,
    slope: float,
    values: Tensor,
    of_x: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
) -> Tensor:
    of_curve = (knots, basis, slope, values, of_x, bias, extra)
    if not input.is_cpu or input.shape[-1] > FEW_CLASSES:  # plain torch raises for too many
        return plain_hessian(input, target, weight, temperature, floor, *of_curve, is_probs, keep_zeros)
    op, n_classes = "spline_matrix_hessian", input.shape[-1]
    rows = _rows(op, input, target, weight, of_curve=True)
    curve = _curve(op, input, knots, basis, values, of_x, bias, extra)
    size = knots.numel() + 1 + n_classes * (n_classes + 1)
    hessian = torch.empty(size, size, dtype=_WIDE, device="cpu")
    _kernels.spline_matrix_hessian_out(*rows, *curve, hessian, temperature, floor, slope, is_probs, keep_zeros)
    return hessian


def spline_row_losses(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    temperature: float,
    floor: float,
    knots: Tensor,
    basis: Tensor,
    slope: float,
    values: Tensor,
    of_x: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
) -> Tensor:
    of_curve = (knots, basis, slope, values, of_x, bias, extra)
    if not input.is_cpu:
        return plain_losses(input, target, weight, temperature, floor, *of_curve, is_probs, keep_zeros)
    op = "spline_row_losses"
    rows = _rows(op, input, target, weight, of_curve=True)
    curve = _curve(op, input, knots, basis, values, of_x, bias, extra)
    losses = torch.empty(2, len(target), dtype=_WIDE, device="cpu")
    _kernels.spline_row_losses_out(*rows, *curve, losses, temperature, floor, slope, is_probs, keep_zeros)
    return losses


def spline_linear_sums(
    input: Tensor,
    target: Tensor,
    weight: Tensor,
    temperature: float,
    floor: float,
    knots: Tensor,
    basis: Tensor,
    slope: float,
    values: Tensor,
    of_x: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
    is_probs: bool,
    keep_zeros: bool,
    want_slopes: bool,
) -> tuple[float, Tensor, Tensor, Tensor, Tensor | None]:
    op = "spline_linear_sums"
    rows = _rows(op, input, target, weight, of_curve=True)
    curve = _curve(op, input, knots, basis, values, of_x, bias, extra)
    gradient = torch.empty(knots.numel() + 1, dtype=_WIDE, device="cpu")
    of_bias = input.new_empty(input.shape[-1], dtype=_WIDE)
    of_weight = torch.empty_like(of_bias if of_x is None else of_x, dtype=_WIDE)
    slopes = input.new_empty(input.shape[-2:], dtype=_WIDE) if want_slopes else None
    settings = (temperature, floor, slope, is_probs, keep_zeros)
    sums = (gradient, of_weight, of_bias, slopes)
    value: float = _kernels.spline_linear_sums_out(*rows, *curve, *sums, *settings)
    return value, gradient, of_weight, of_bias, slopes


def _wide(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, _WIDE).contiguous()


def _rows(
    op: str, input: Tensor, target: Tensor | None, weight: Tensor, *, of_curve: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Input, target and weight as the kernels take them."""
    check_rows(op, input, target, weight, of_curve=of_curve)
    target = None if target is None else target.contiguous()
    return input.contiguous(), target, _wide(weight, input.device)


def _curve(
    op: str,
    input: Tensor,
    knots: Tensor,
    basis: Tensor,
    values: Tensor,
    *vectors: Tensor | None,
) -> list[Tensor | None]:
    """Knots, coefficients, basis and the scores of classes as the kernels take them."""
    check_curve(op, input, knots, basis, values, *vectors)
    device, terms = input.device, basis.to(_WIDE).contiguous()
    of_classes = [None if tensor is None else _wide(tensor, device) for tensor in vectors]
    return [_wide(knots, device), _wide(_coefficients(terms, values.to(_WIDE)), device), terms, *of_classes]


def _coefficients(basis: Tensor, values: Tensor) -> Tensor:
    """basis @ values, added in the order of the compiled module: the results have the same bits."""
    first, *others = (basis * values).unbind(-1)
    return sum(others, start=first)
