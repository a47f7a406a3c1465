"""Sums over rows for the fit of spline scaling on the kernels of the stable module.

Arguments and results are those of :mod:`focalkern.fallback.spline_sums`.
"""

import torch
from torch import Tensor

from focalkern.fallback._checks import check_floating, check_same_device
from focalkern.fallback.spline_sums import spline_histogram as plain_histogram
from focalkern.fallback.spline_sums import spline_spread as plain_spread

__all__ = [
    "spline_curve_sums",
    "spline_histogram",
    "spline_linear_sums",
    "spline_log_probs",
    "spline_spread",
    "spline_temperature_sums",
]

_MOST_KNOTS = 15
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
    check_floating("spline_log_probs", "input", input)
    output = input.new_empty(input.shape, dtype=_WIDE)
    _kernels.spline_log_probs_out(input.contiguous(), output, temperature, floor, is_probs)
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
    rows = _rows(op, input, target, weight)
    curve = _curve(op, input, knots, basis, values, of_x, bias, extra)
    gradient, hessian = torch.empty(n, dtype=_WIDE, device="cpu"), torch.empty(n, n, dtype=_WIDE, device="cpu")
    settings = (temperature, floor, slope, is_probs, keep_zeros)
    value: float = _kernels.spline_curve_sums_out(*rows, *curve, gradient, hessian, *settings)
    return value, gradient, hessian


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
    rows = _rows(op, input, target, weight)
    curve = _curve(op, input, knots, basis, values, of_x, bias, extra)
    gradient = torch.empty(knots.numel() + 1, dtype=_WIDE, device="cpu")
    of_weight, of_bias = (input.new_empty(input.shape[1], dtype=_WIDE) for _ in range(2))
    slopes = input.new_empty(input.shape, dtype=_WIDE) if want_slopes else None
    settings = (temperature, floor, slope, is_probs, keep_zeros)
    sums = (gradient, of_weight, of_bias, slopes)
    value: float = _kernels.spline_linear_sums_out(*rows, *curve, *sums, *settings)
    return value, gradient, of_weight, of_bias, slopes


def _wide(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, _WIDE).contiguous()


def _rows(op: str, input: Tensor, target: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Input, target and weight as the kernels take them."""
    check_floating(op, "input", input)
    if input.dim() != 2 or input.shape[1] < 2:
        raise ValueError(f"{op}: input must be [N, C] with C >= 2, got {list(input.shape)}")
    n_rows, n_classes = input.shape
    check_same_device(op, "weight", weight, input)
    if weight.shape != (n_rows,):
        raise ValueError(f"{op}: weight must be [N] = [{n_rows}], got {list(weight.shape)}")
    if target is not None:
        check_same_device(op, "target", target, input)
        if target.dtype != torch.int64 or target.shape != (n_rows,):
            raise ValueError(f"{op}: target must be [N] = [{n_rows}] int64, got {list(target.shape)}")
        # On CUDA this check would wait for the device; a kernel treats such a label as no class.
        if target.is_cpu and n_rows and not 0 <= int(target.min()) <= int(target.max()) < n_classes:
            row = int(((target < 0) | (target >= n_classes)).nonzero()[0])
            raise IndexError(f"{op}: target must be from 0 to {n_classes - 1}, got {int(target[row])} at row {row}")
        target = target.contiguous()
    return input.contiguous(), target, _wide(weight, input.device)


def _curve(
    op: str,
    input: Tensor,
    knots: Tensor,
    basis: Tensor,
    values: Tensor,
    of_x: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
) -> list[Tensor | None]:
    """Knots, coefficients, basis and the scores of classes as the kernels take them."""
    m, device = knots.numel(), input.device
    if knots.dim() != 1 or not 2 <= m <= _MOST_KNOTS:
        raise ValueError(f"{op}: knots must be [m] with m from 2 to {_MOST_KNOTS}, got {list(knots.shape)}")
    if basis.shape != (m + 1, 4, m):
        raise ValueError(f"{op}: basis must be [m + 1, 4, m], got {list(basis.shape)}")
    if values.shape != (m,):
        raise ValueError(f"{op}: values must be [m] = [{m}], got {list(values.shape)}")
    terms = basis.to(_WIDE).contiguous()
    vectors: list[Tensor | None] = []
    for tensor, numbers in ((of_x, input.shape[1]), (bias, input.shape[1]), (extra, input.numel())):
        if tensor is not None and tensor.numel() != numbers:
            raise ValueError(f"{op}: vectors must be [C] and extra scores [N, C], got {list(tensor.shape)}")
        vectors.append(None if tensor is None else _wide(tensor, device))
    return [_wide(knots, device), _wide(terms @ values.to(_WIDE), device), terms, *vectors]
