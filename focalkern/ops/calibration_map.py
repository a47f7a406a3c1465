"""The focal calibration map, for rows of classes and for one logit."""

import math
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.overrides import has_torch_function

from focalkern._arrays import as_array, as_tensor
from focalkern._checks import flag, no_float8, number, reworded, short
from focalkern._devices import autocast_is_on, on_device
from focalkern._types import HALVES, PLAIN_TENSORS, InputKind
from focalkern.ops._backend import backend_for, has_kernels
from focalkern.ops._dtensor import is_dtensor, map_over_mesh

__all__ = ["binary_focal_calibration_map", "focal_calibration_map"]

_LOGITS, _PROBS, _BINARY = 0, 1, 2
_KINDS = {"logits": _LOGITS, "probs": _PROBS}
_PLAIN = {float, *PLAIN_TENSORS}

Array = np.ndarray[Any, Any]


@overload
def focal_calibration_map(
    input: Tensor,
    gamma: float | Tensor | Array,
    temperature: float | Tensor | Array = 1.0,
    *,
    input_kind: InputKind = "logits",
    log: bool = False,
) -> Tensor: ...
@overload
def focal_calibration_map(
    input: Array,
    gamma: float | Tensor | Array,
    temperature: float | Tensor | Array = 1.0,
    *,
    input_kind: InputKind = "logits",
    log: bool = False,
) -> Array: ...
def focal_calibration_map(
    input: Tensor | Array,
    gamma: float | Tensor | Array,
    temperature: float | Tensor | Array = 1.0,
    *,
    input_kind: InputKind = "logits",
    log: bool = False,
) -> Tensor | Array:
    r"""Focal calibration with temperature: the true probabilities behind a network trained with focal loss gamma.

    With q = softmax(z / T), u = 1 - q, phi = -q log q / u and G(q) = u^gamma (1 + gamma phi):

    .. math:: \hat p_j = \frac{q_j / G(q_j)}{\sum_k q_k / G(q_k)}

    computed in log space, without an epsilon: log-probabilities keep their relative precision when a row saturates.
    gamma = 0 is temperature scaling, log p = log_softmax(z / T). The order of the classes is kept.

    A negative gamma uses the same formula. Unlike in :func:`focal_loss`, it does not stand for the inverse focal loss.

    float16, bfloat16 and float32 are computed in float32, float64 in float64. The kernels give the same bits on every
    run, and on the CPU for every number of threads.

    Args:
        input: [..., C] logits, or probabilities with ``input_kind="probs"``; float16, bfloat16, float32 or float64, C
            >= 2; a tensor, or an array. A logit of -inf, or a probability of 0, is a class that cannot occur: its
            result is 0 (-inf with ``log``), it changes no other class, and its gradient is 0. For a probability of 0
            the true derivative is not 0; it is not supported.
        gamma: a number, or a floating-point tensor broadcastable to [...]; finite and > -1.
        temperature: a number, or a floating-point tensor broadcastable to [...]; finite and > 0.
        input_kind: ``"logits"`` or ``"probs"``; focalkern does not infer it. Rows of probabilities must sum to 1 within
            1e-3 (and the rounding of float16 or bfloat16) and are renormalised.
        log: return log-probabilities.

    Returns:
        [..., C] probabilities or log-probabilities in the dtype of ``input``, an array for an array; under autocast in
        float32 for a half-precision input, as :func:`torch.softmax` does. Differentiable to any order in ``input``,
        gamma and temperature.

    Raises:
        TypeError: dtype or kind of an argument.
        ValueError: shape, option or device of an argument; fewer than two classes; gamma or temperature outside their
            domain; a row with NaN or +inf, without any class that can occur, with a negative probability or another
            sum. The error names the row, its index into the flattened leading dimensions. On CUDA, in compiled graphs
            and under torch.func such rows become NaN instead, because reading values would synchronise the device or
            break the graph; there the environment variable FOCALKERN_VALIDATE=1 makes the operator raise (not under
            torch.func).
        NotImplementedError: a device without a kernel.

    Source: Komisarenko and Kull, ECAI 2024 (arXiv 2408.11598).

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]])
        >>> fk.focal_calibration_map(logits, gamma=0.0)  # softmax
        tensor([[0.8438, 0.1142, 0.0420]])
        >>> fk.focal_calibration_map(logits, gamma=2.0)
        tensor([[0.9895, 0.0076, 0.0029]])
        >>> probs = (logits / 1.5).softmax(-1)
        >>> fk.focal_calibration_map(probs, gamma=2.0, input_kind="probs")
        tensor([[0.9317, 0.0458, 0.0225]])
        >>> fk.focal_calibration_map(logits, gamma=2.0, temperature=1.5)
        tensor([[0.9317, 0.0458, 0.0225]])
    """
    kind = _KINDS.get(input_kind) if isinstance(input_kind, str) else None
    if kind is None:
        raise ValueError(f"focal_calibration_map: input_kind must be 'logits' or 'probs', got {short(input_kind)}")
    return _map("focal_calibration_map", "input", input, gamma, temperature, kind, log)


@overload
def binary_focal_calibration_map(
    logits: Tensor,
    gamma: float | Tensor | Array,
    temperature: float | Tensor | Array = 1.0,
    *,
    log_odds: bool = False,
) -> Tensor: ...
@overload
def binary_focal_calibration_map(
    logits: Array,
    gamma: float | Tensor | Array,
    temperature: float | Tensor | Array = 1.0,
    *,
    log_odds: bool = False,
) -> Array: ...
def binary_focal_calibration_map(
    logits: Tensor | Array,
    gamma: float | Tensor | Array,
    temperature: float | Tensor | Array = 1.0,
    *,
    log_odds: bool = False,
) -> Tensor | Array:
    r"""The focal calibration map of two classes, on one logit each: :func:`focal_calibration_map` of [0, logit].

    With s = logit / T, sigma the logistic function and phi(q) = -q log q / (1 - q):

    .. math:: g(s) = (1 + \gamma) s - \log(1 + \gamma\phi(\sigma(s))) + \log(1 + \gamma\phi(\sigma(-s)))

    The map is elementwise, odd and strictly increasing in the logit. A negative gamma uses the same formula; it does
    not stand for the inverse focal loss.

    Args:
        logits: any shape, the logit of class 1 against class 0; float16, bfloat16, float32 or float64; a tensor, or an
            array. -inf is a class 1 that cannot occur.
        gamma: a number, or a floating-point tensor broadcastable to the shape of ``logits``; finite and > -1.
        temperature: as gamma; finite and > 0.
        log_odds: return g(s) instead of the probability of class 1, sigma(g(s)).

    Returns:
        The shape and dtype of ``logits``, an array for an array; under autocast float32 for half-precision logits.
        Differentiable to any order in ``logits``, gamma and temperature.

    Raises:
        TypeError: dtype or kind of an argument.
        ValueError: shape or device of an argument; gamma or temperature outside their domain; a logit that is NaN or
            +inf, named with its index into the flattened logits. Where :func:`focal_calibration_map` returns NaN for
            invalid values instead of raising, this function does too.
        NotImplementedError: a device without a kernel.

    Source: Komisarenko and Kull, ECAI 2024 (arXiv 2408.11598).

    Example:
        >>> logits = torch.tensor([-1.0, 0.0, 2.0])
        >>> fk.binary_focal_calibration_map(logits, gamma=2.0)
        tensor([0.0641, 0.5000, 0.9955])
        >>> pairs = torch.stack([torch.zeros(3), logits], dim=-1)
        >>> fk.focal_calibration_map(pairs, gamma=2.0)[:, 1]
        tensor([0.0641, 0.5000, 0.9955])
    """
    return _map("binary_focal_calibration_map", "logits", logits, gamma, temperature, _BINARY, log_odds)


def _map(
    op: str,
    name: str,
    input: Tensor | Array,
    gamma: float | Tensor | Array,
    temperature: float | Tensor | Array,
    kind: int,
    log: bool,
) -> Any:
    if not isinstance(input, Tensor):
        of_array = _map(op, name, as_tensor(input, f"{op}: {name}"), gamma, temperature, kind, log)
        return as_array(of_array)
    if type(gamma) is not float or not -1.0 < gamma < math.inf:
        gamma = _parameter(op, "gamma", gamma, -1.0, "greater than -1", input)
    if type(temperature) is not float or not 0.0 < temperature < math.inf:
        temperature = _parameter(op, "temperature", temperature, 0.0, "positive", input)
    if type(input) is not Tensor and is_dtensor(input):

        def local(z: Tensor, parameters: list[Any]) -> Tensor:
            return _map(op, name, z, parameters[0], parameters[1], kind, log)

        class_dim = None if kind == _BINARY else input.dim() - 1
        return map_over_mesh(local, input, class_dim, (gamma, temperature))
    try:
        return _through(input, gamma, temperature, kind, log)
    except (TypeError, ValueError, RuntimeError) as error:  # arguments are checked only after an error, for speed
        flag(op, "log_odds" if kind == _BINARY else "log", log)
        raise reworded(op, error, **{name: input}, gamma=gamma, temperature=temperature) from None


def _through(input: Tensor, gamma: float | Tensor, temperature: float | Tensor, kind: int, log: bool) -> Any:
    compiling = torch.compiler.is_compiling()
    is_plain = compiling or {type(input), type(gamma), type(temperature)} <= _PLAIN
    overridden = not is_plain and has_torch_function((input, gamma, temperature))
    if (compiling or overridden) and has_kernels(input):
        return _through_dispatcher(input, _as_tensor(gamma), _as_tensor(temperature), kind, log, not compiling)
    kernels = backend_for(input)
    if isinstance(gamma, Tensor) or isinstance(temperature, Tensor) or compiling:
        return kernels.calibration_map(input, _as_tensor(gamma), _as_tensor(temperature), kind, log)
    return kernels.calibration_map_scalar(input, gamma, temperature, kind, log)


def _parameter(op: str, name: str, value: object, bound: float, domain: str, input: Tensor) -> float | Tensor:
    """A parameter that is not an ordinary float: a tensor, an array, another number, or a float out of its domain."""
    if isinstance(value, np.ndarray):
        return on_device(as_tensor(value, f"{op}: {name}"), input.device)
    if isinstance(value, Tensor):
        no_float8(op, name, value)
        return value
    found = number(op, name, value, "a number or a tensor")
    if not bound < found < math.inf:
        raise ValueError(f"{op}: {name} must be finite and {domain}, got {found}")
    return found


def _as_tensor(value: float | Tensor) -> Tensor:
    # A tensor, not a constant of a compiled graph, so that another value does not compile again.
    return value if isinstance(value, Tensor) else torch.zeros((), dtype=torch.float64, device="cpu") + value


def _through_dispatcher(
    input: Tensor, gamma: Tensor, temperature: Tensor, kind: int, log: bool, validate: bool
) -> Tensor:
    """The call through torch's dispatcher, for compiled and exported graphs and tensor subclasses, which see only
    operators."""
    wide = input.dtype in HALVES and autocast_is_on(input.device.type)
    if torch._C._are_functorch_transforms_active():
        return torch.ops.focalkern.calibration_map_composite(input, gamma, temperature, kind, log, wide)
    return torch.ops.focalkern.calibration_map_forward(input, gamma, temperature, kind, log, wide, validate)
