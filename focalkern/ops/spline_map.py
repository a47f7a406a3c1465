"""The map of spline scaling: a natural cubic spline of the log-odds of every class, in the softmax."""

import itertools
import math
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.overrides import has_torch_function

from focalkern._arrays import as_array, as_tensor
from focalkern._checks import dense, flag, number, reworded, short
from focalkern._devices import autocast_is_on
from focalkern._types import HALVES, INPUT_KINDS, PLAIN_TENSORS, InputKind
from focalkern.fallback.spline_map import spline_coefficients
from focalkern.ops._backend import backend_for, fallback, has_kernels

__all__ = ["map_by_pieces", "spline_calibration_map"]

_OP = "spline_calibration_map"
_MOST_KNOTS = 255
_PLAIN = {bool, type(None), *PLAIN_TENSORS}

Array = np.ndarray[Any, Any]


@overload
def spline_calibration_map(
    input: Tensor,
    temperature: float | Tensor,
    floor: float | Tensor,
    slope: float | Tensor,
    knots: Tensor | Array,
    values: Tensor | Array,
    *,
    weight: Tensor | Array | None = None,
    bias: Tensor | Array | None = None,
    input_kind: InputKind = "logits",
    keep_zeros: bool = False,
    keep_order: bool = False,
    log: bool = False,
) -> Tensor: ...
@overload
def spline_calibration_map(
    input: Array,
    temperature: float | Tensor,
    floor: float | Tensor,
    slope: float | Tensor,
    knots: Tensor | Array,
    values: Tensor | Array,
    *,
    weight: Tensor | Array | None = None,
    bias: Tensor | Array | None = None,
    input_kind: InputKind = "logits",
    keep_zeros: bool = False,
    keep_order: bool = False,
    log: bool = False,
) -> Array: ...
def spline_calibration_map(
    input: Tensor | Array,
    temperature: float | Tensor,
    floor: float | Tensor,
    slope: float | Tensor,
    knots: Tensor | Array,
    values: Tensor | Array,
    *,
    weight: Tensor | Array | None = None,
    bias: Tensor | Array | None = None,
    input_kind: InputKind = "logits",
    keep_zeros: bool = False,
    keep_order: bool = False,
    log: bool = False,
) -> Tensor | Array:
    r"""The map of spline scaling: a natural cubic spline of the log-odds of every class, in the softmax.

    .. math::
        \hat p = \mathrm{softmax}\big((1 + a) x + f(u) + W x + b\big), \qquad
        x = \log\big((1 - e)\, \mathrm{softmax}(z / T) + e / C\big), \quad u = \mathrm{logit}(\exp x)

    f goes through (knots, values) and is a straight line beyond the first and the last knot. With a = 0, f = 0, W = 0
    and b = 0 the result is exp(x). :func:`focal_calibration_map` is the member with
    :math:`f(u) = \gamma\, \mathrm{softplus}(u) - \log(1 + \gamma\phi)`; :class:`SplineScaling` fits all of them.

    The computation is in float64 for every dtype of ``input``; float32 results differ from those of float64 by at most
    one unit in the last place. The kernels give the same bits on every run, and for every number of threads (except the
    gradient of a matrix W, which torch multiplies).

    Args:
        input: [..., C] logits, or probabilities with ``input_kind="probs"``; float16, bfloat16, float32 or float64, C
            >= 2; a tensor, or an array. A logit of -inf, or a probability of 0, counts as e / C in x, and its gradient
            is 0.
        temperature: T, a number or a 0-dim tensor; finite and > 0.
        floor: e, as temperature; between 0 and 1, both excluded.
        slope: a, as temperature; finite.
        knots: [m] floating point, 2 <= m <= 255; finite and ascending.
        values: [m] floating point, f at the knots.
        weight: W [C, C], or its diagonal [C]; None is 0.
        bias: b [C]; None is 0.
        input_kind: ``"logits"`` or ``"probs"``; focalkern does not infer it. Rows of probabilities must sum to 1 within
            1e-3 (and the rounding of float16 or bfloat16) and are renormalised.
        keep_zeros: a logit of -inf, or a probability of 0, is a class that cannot occur: its result is 0 (-inf with
            ``log``).
        keep_order: correct rounding, so that equal inputs have equal results to the bit, and a larger input never has a
            smaller result. Only for a curve that keeps the order of the classes, with a slope of at least 0.001 in
            log P. Compiled graphs and torch.func ignore it.
        log: return log-probabilities.

    Returns:
        [..., C] probabilities or log-probabilities in the dtype of ``input``, an array for an array; under autocast in
        float32 for a half-precision input. Differentiable to any order in ``input`` and in all numbers of the map.

    Raises:
        TypeError: dtype or kind of an argument.
        ValueError: shape, option or value of an argument; fewer than two classes; a row with NaN or +inf, without any
            class that can occur, with a negative probability or another sum. The error names the row, its index into
            the flattened leading dimensions. Where :func:`focal_calibration_map` returns NaN for invalid rows instead
            of raising, this function does too.

    Source: Green & Silverman, Nonparametric Regression and Generalized Linear Models, 1994, section 2.1, for the
    spline; Berta et al., AISTATS 2026 (arXiv 2511.03685), for x.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]])
        >>> knots, values = torch.tensor([-2.0, -1.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 0.1, 0.5])
        >>> fk.spline_calibration_map(logits, 1.0, 1e-3, 0.0, knots, torch.zeros(4))
        tensor([[0.8433, 0.1144, 0.0423]])
        >>> fk.spline_calibration_map(logits, 1.0, 1e-3, 0.0, knots, values)
        tensor([[0.9244, 0.0551, 0.0205]])
        >>> fk.spline_calibration_map(logits, 1.0, 1e-3, 0.0, knots, values, weight=torch.zeros(3), bias=-logits[0])
        tensor([[0.5303, 0.2334, 0.2363]])
    """
    if not isinstance(input, Tensor):
        of_array = spline_calibration_map(
            as_tensor(input, f"{_OP}: input"),
            temperature,
            floor,
            slope,
            knots,
            values,
            weight=weight,
            bias=bias,
            input_kind=input_kind,
            keep_zeros=keep_zeros,
            keep_order=keep_order,
            log=log,
        )
        result: Array = as_array(of_array)
        return result
    if not isinstance(input_kind, str) or input_kind not in INPUT_KINDS:
        raise ValueError(f"{_OP}: input_kind must be 'logits' or 'probs', got {short(input_kind)}")
    flags = [
        input_kind == "probs",
        flag(_OP, "keep_zeros", keep_zeros),
        flag(_OP, "keep_order", keep_order),
        flag(_OP, "log", log),
    ]
    numbers = [
        _number(name, value) for name, value in (("slope", slope), ("temperature", temperature), ("floor", floor))
    ]
    parameters = torch.stack([1 + numbers[0], *numbers[1:]])
    positions, heights = _vector("knots", knots), _vector("values", values)
    if not 2 <= len(positions) <= _MOST_KNOTS:
        raise ValueError(f"{_OP}: knots must be [m] with m from 2 to {_MOST_KNOTS}, got {list(positions.shape)}")
    if heights.shape != positions.shape:
        raise ValueError(f"{_OP}: values must be [m] = [{len(positions)}], got {list(heights.shape)}")
    of_x, of_class = (
        None if value is None else _of_classes(name, value, input)
        for name, value in (("weight", weight), ("bias", bias))
    )
    _check_values(parameters, positions, heights, of_x, of_class)
    coefficients = spline_coefficients(positions, heights)
    try:
        return map_by_pieces(input, parameters, positions, coefficients, of_x, of_class, *flags)
    except (TypeError, RuntimeError) as error:
        raise reworded(_OP, error, input=input) from None


def map_by_pieces(
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
    """The map for checked arguments. All but ``input`` are float64 on the CPU; ``parameters`` is (1 + a, T, e)."""
    arguments = (input, parameters, knots, coefficients, weight, bias, is_probs, keep_zeros)
    if not has_kernels(input):
        result: Tensor = fallback.spline_map(*arguments, keep_order, log)
        return result
    compiling = torch.compiler.is_compiling()
    if compiling or (not _PLAIN.issuperset(map(type, arguments)) and has_torch_function(arguments[:6])):
        wide = input.dtype in HALVES and autocast_is_on(input.device.type)
        operators = torch.ops.focalkern
        if torch._C._are_functorch_transforms_active():
            return operators.spline_map_composite(*arguments, log, wide)
        return operators.spline_map_forward(*arguments, log, wide, keep_order, not compiling)
    result = backend_for(input).spline_map(*arguments, keep_order, log)
    return result


def _number(name: str, value: Any) -> Tensor:
    """A number as a 0-dim tensor, in float64."""
    if isinstance(value, Tensor):
        if value.is_nested or value.dim() != 0 or not value.is_floating_point():
            raise TypeError(f"{_OP}: {name} must be a number or a 0-dim floating-point tensor, got {short(value)}")
        return _on_host(name, value)
    found = number(_OP, name, value, "a number or a tensor")
    # A tensor, not a constant of a compiled graph, so that another value does not compile again.
    return torch.zeros((), dtype=torch.float64, device="cpu") + found


def _vector(name: str, value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else as_tensor(value, f"{_OP}: {name}")
    on_host = _on_host(name, tensor)
    if tensor.dim() != 1:
        raise ValueError(f"{_OP}: {name} must be [m], got {list(tensor.shape)}")
    return on_host


def _of_classes(name: str, value: Any, input: Tensor) -> Tensor:
    tensor = value if isinstance(value, Tensor) else as_tensor(value, f"{_OP}: {name}")
    on_host = _on_host(name, tensor)
    n_classes = input.shape[-1] if input.dim() else 0
    shapes = [[n_classes], [n_classes, n_classes]] if name == "weight" else [[n_classes]]
    if list(tensor.shape) not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{_OP}: {name} must be {expected} for {n_classes} classes, got {list(tensor.shape)}")
    return on_host


def _on_host(name: str, tensor: Tensor) -> Tensor:
    """The tensor in float64 on the CPU, differentiably."""
    dense(_OP, name, tensor)
    if not tensor.is_floating_point():
        raise TypeError(f"{_OP}: {name} must be floating point, got {short(tensor)}")
    if tensor.is_meta:
        raise ValueError(f"{_OP}: {name} must have values, got {short(tensor)} on the device meta")
    return tensor.cpu().to(torch.float64)


def _check_values(
    parameters: Tensor, knots: Tensor, values: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Checks the values of the parameters, except in compiled graphs and under torch.func, which cannot read them."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or parameters.is_meta:
        return
    factor, temperature, floor = parameters.tolist()
    if not math.isfinite(factor):
        raise ValueError(f"{_OP}: slope must be finite, got {factor - 1}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"{_OP}: temperature must be finite and positive, got {temperature}")
    if not 1e-290 <= floor < 1:
        raise ValueError(f"{_OP}: floor must be above 0 (at least 1e-290) and below 1, got {floor}")
    positions = knots.tolist()
    if not all(map(math.isfinite, positions)) or any(a >= b for a, b in itertools.pairwise(positions)):
        raise ValueError(f"{_OP}: knots must be finite and ascending, got {short(positions)}")
    for name, tensor in (("values", values), ("weight", weight), ("bias", bias)):
        if tensor is not None and not bool(tensor.isfinite().all()):
            raise ValueError(f"{_OP}: {name} must be finite, got a NaN or an infinity")
