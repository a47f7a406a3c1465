"""The inverse of the focal calibration map, and the properized focal loss. Plain torch.

:mod:`focalkern.ops._inverse_solver` solves the equation of the inverse map.
"""

import math
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import as_array, as_tensor
from focalkern._checks import check_floating, dense, flag, number
from focalkern._devices import autocast_is_on, on_device
from focalkern._tracing import is_readable
from focalkern._types import HALVES, InputKind, Reduction
from focalkern.ops._inverse_solver import elements_in_order, inverse_logits, inverse_rows
from focalkern.ops._row_loss import needs_float64
from focalkern.ops.calibration_map import binary_focal_calibration_map, focal_calibration_map
from focalkern.ops.focal_loss import focal_loss

__all__ = ["binary_inverse_focal_calibration_map", "inverse_focal_calibration_map", "properized_focal_loss"]

Array = np.ndarray[Any, Any]


@overload
def inverse_focal_calibration_map(
    input: Tensor,
    gamma: float | Tensor | Array,
    *,
    input_kind: InputKind = "logits",
    log: bool = False,
) -> Tensor: ...
@overload
def inverse_focal_calibration_map(
    input: Array,
    gamma: float | Tensor | Array,
    *,
    input_kind: InputKind = "logits",
    log: bool = False,
) -> Array: ...
def inverse_focal_calibration_map(
    input: Tensor | Array,
    gamma: float | Tensor | Array,
    *,
    input_kind: InputKind = "logits",
    log: bool = False,
) -> Tensor | Array:
    r"""The probabilities that the focal calibration map turns into the given ones.

    With G(q) = u^gamma (1 + gamma phi), u = 1 - q and phi = -q log q / u, the result q solves

    .. math:: \frac{q_j / G(q_j)}{\sum_k q_k / G(q_k)} = p_j, \qquad \sum_j q_j = 1

    so that ``focal_calibration_map(q, gamma, input_kind="probs")`` is p, and q is the optimum of a network trained with
    focal loss gamma if p are the true probabilities. gamma = 0 is the identity.

    Args:
        input: [..., C] logits of p, or p itself with ``input_kind="probs"``; float16, bfloat16, float32 or float64,
            C >= 2; a tensor, or an array. Classes with p = 0 have q = 0.
        gamma: a number or a floating-point tensor broadcastable to [...]; finite and >= 0. (For gamma < 0 the term of a
            class, q / G(q), is not monotone; the inverse is not supported.)
        input_kind: ``"logits"`` or ``"probs"``; focalkern does not infer it. Rows of probabilities must sum to 1 within
            1e-3 and are renormalised.
        log: return log q.

    Returns:
        [..., C] q or log q in the dtype of ``input``, an array for an array; under autocast in float32 for a
        half-precision input. Half types are computed in float32. Differentiable in ``input`` and gamma, twice, also
        under torch.func and in forward mode.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`focal_calibration_map`; also ValueError for a gamma < 0.
            Values inside CUDA tensors are not checked; invalid rows give NaN.

    Source: the function r* of Charoenphakdee et al. 2021 (arXiv 2011.09172), inverted; Komisarenko and Kull, ECAI 2024
    (arXiv 2408.11598).

    Example:
        >>> probs = torch.tensor([[0.7, 0.2, 0.1]])
        >>> q = fk.inverse_focal_calibration_map(probs, gamma=2.0, input_kind="probs")
        >>> q
        tensor([[0.5352, 0.2927, 0.1721]])
        >>> fk.focal_calibration_map(q, gamma=2.0, input_kind="probs")
        tensor([[0.7000, 0.2000, 0.1000]])
    """
    op = "inverse_focal_calibration_map"
    if not isinstance(input, Tensor):
        of_array: Array = as_array(
            inverse_focal_calibration_map(as_tensor(input, f"{op}: input"), gamma, input_kind=input_kind, log=log)
        )
        return of_array
    log = flag(op, "log", log)
    z, log_p, gamma = _log_probabilities(op, input, gamma, input_kind)
    log_q, _ = inverse_rows(op, z, log_p, gamma.expand(log_p.shape[:-1]))
    return _as_input(log_q if log else log_q.exp(), input)


@overload
def binary_inverse_focal_calibration_map(
    logits: Tensor, gamma: float | Tensor | Array, *, log_odds: bool = False
) -> Tensor: ...
@overload
def binary_inverse_focal_calibration_map(
    logits: Array, gamma: float | Tensor | Array, *, log_odds: bool = False
) -> Array: ...
def binary_inverse_focal_calibration_map(
    logits: Tensor | Array, gamma: float | Tensor | Array, *, log_odds: bool = False
) -> Tensor | Array:
    r"""The inverse map of two classes, on one logit each: :func:`inverse_focal_calibration_map` of [0, logit].

    The result s solves

    .. math:: (1 + \gamma) s - \log(1 + \gamma\phi(\sigma(s))) + \log(1 + \gamma\phi(\sigma(-s))) = t

    for the logit t, elementwise; s is odd and increasing in t. Among the elements of one call with the same gamma,
    rounding keeps the order: equal logits have equal results to the bit, and a larger logit never has a smaller result.

    Args:
        logits: t, any shape: the logit of class 1 against class 0; float16, bfloat16, float32 or float64; a tensor, or
            an array.
        gamma: a number or a floating-point tensor broadcastable to the shape of ``logits``; finite and >= 0.
        log_odds: return s instead of the probability of class 1, sigma(s).

    Returns:
        The shape and dtype of ``logits``, an array for an array; under autocast float32 for half-precision logits.
        Differentiable in ``logits`` and gamma, twice, also under torch.func and in forward mode.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`binary_focal_calibration_map`; also ValueError for a
            gamma < 0.

    Source: as :func:`inverse_focal_calibration_map`.

    Example:
        >>> s = fk.binary_inverse_focal_calibration_map(torch.tensor([-1.0, 0.5, 2.0]), gamma=2.0, log_odds=True)
        >>> s
        tensor([-0.3736,  0.1868,  0.7465])
        >>> fk.binary_focal_calibration_map(s, gamma=2.0, log_odds=True)
        tensor([-1.0000,  0.5000,  2.0000])
    """
    op = "binary_inverse_focal_calibration_map"
    if not isinstance(logits, Tensor):
        of_array: Array = as_array(
            binary_inverse_focal_calibration_map(as_tensor(logits, f"{op}: logits"), gamma, log_odds=log_odds)
        )
        return of_array
    log_odds = flag(op, "log_odds", log_odds)
    # The map with gamma = 0 and T = 1 is the identity; the call only checks the logits.
    t = _renamed(op, binary_focal_calibration_map, _widened(logits), 0.0, log_odds=True)
    gamma = _gamma_tensor(op, gamma, t)
    if not _broadcasts(gamma, t.shape):
        raise ValueError(f"{op}: gamma must broadcast to the shape of logits, {list(t.shape)}, got {list(gamma.shape)}")
    gamma = gamma.expand(t.shape)
    s = inverse_logits(op, t, gamma)
    return _as_input(elements_in_order(s if log_odds else s.sigmoid(), t, gamma), logits)


def properized_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor = 2.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""The properized focal loss, a proper score: its expectation is smallest if the softmax is the true distribution.

    .. math:: L^*(p, y) = L(q, y) = -(1 - q_y)^\gamma \log q_y, \qquad q = \text{inverse map of } p = \text{softmax}(z)

    A network trained with it needs no calibration map. Training with the focal loss and then applying
    :func:`focal_calibration_map` has the same optimal probabilities. gamma = 0 is cross-entropy.

    Args:
        input: logits z, (C), (N, C) or (N, C, d1, ...), float16, bfloat16, float32 or float64.
        target: class indices or class probabilities, as for :func:`focal_loss`.
        gamma: a number, or a floating-point tensor broadcastable to the unreduced loss (N, d1, ...); finite, >= 0.
        weight, ignore_index, reduction, label_smoothing: as for :func:`focal_loss`.

    Returns:
        The loss, as :func:`focal_loss`. Differentiable in ``input`` and gamma, twice.

    Raises:
        TypeError, ValueError, IndexError, NotImplementedError: as :func:`focal_loss`; also ValueError for a gamma < 0.
            NaN or infinite logits raise on the CPU and give NaN on CUDA.

    Source: Komisarenko and Kull, ECAI 2024 (arXiv 2408.11598), section 4.

    Example:
        >>> truth = torch.tensor([[0.7, 0.2, 0.1]])
        >>> logits = truth.log().requires_grad_()
        >>> loss = fk.properized_focal_loss(logits, truth, gamma=2.0)
        >>> bool(torch.autograd.grad(loss, logits)[0].abs().max() < 1e-6)  # smallest where softmax(logits) is the truth
        True
        >>> loss = fk.focal_loss(logits, truth, gamma=2.0)
        >>> torch.autograd.grad(loss, logits)[0]  # the focal loss has its minimum elsewhere
        tensor([[ 0.1971, -0.1267, -0.0703]])
    """
    op = "properized_focal_loss"
    class_dim = 0 if isinstance(input, Tensor) and input.dim() == 1 else 1
    if not isinstance(input, Tensor) or input.dim() == 0:
        raise TypeError(f"{op}: input must be a tensor (C), (N, C) or (N, C, d1, ...), got {_kind(input)}")
    dense(op, "input", input)
    is_wide = isinstance(target, Tensor) and needs_float64(input, target, label_smoothing)
    rows = (input.double() if is_wide else input).movedim(class_dim, -1)
    z, log_p, gamma = _log_probabilities(op, rows, gamma, "logits")
    _, ratios = inverse_rows(op, z, log_p, gamma.expand(log_p.shape[:-1]))
    loss = _renamed(
        op,
        focal_loss,
        ratios.movedim(-1, class_dim),
        target,
        gamma,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return _as_input(loss.to(input.dtype) if is_wide else loss, input)


# -- arguments --------------------------------------------------------------------------------------------------------


def _log_probabilities(
    op: str, input: Tensor, gamma: float | Tensor | Array, input_kind: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits without derivatives, log-probabilities and gammas in the dtype of the computation, all checked."""
    # The forward map with gamma = 0 is log_softmax, with all its checks.
    given = _widened(input)
    log_p = _renamed(op, focal_calibration_map, given, 0.0, input_kind=input_kind, log=True)
    gamma = _gamma_tensor(op, gamma, log_p)
    leading = log_p.shape[:-1]
    if not _broadcasts(gamma, leading):
        raise ValueError(f"{op}: gamma must broadcast to {list(leading)}, got {list(gamma.shape)}")
    return (given.to(log_p.dtype) if input_kind == "logits" else log_p).detach(), log_p, gamma


def _gamma_tensor(op: str, gamma: float | Tensor | Array, like: Tensor) -> Tensor:
    if isinstance(gamma, np.ndarray):
        gamma = on_device(as_tensor(gamma, f"{op}: gamma"), like.device)
    if not isinstance(gamma, Tensor):
        if isinstance(gamma, bool):
            raise TypeError(f"{op}: gamma must be a number or a tensor, got bool")
        found = number(op, "gamma", gamma, "a number or a tensor")
        if not 0 <= found < math.inf:
            raise ValueError(f"{op}: gamma must be finite and at least 0, got {found}")
        return torch.full((), found, dtype=like.dtype, device=like.device)
    if not gamma.is_floating_point():
        raise TypeError(f"{op}: gamma must be floating point, got {gamma.dtype}")
    dense(op, "gamma", gamma)
    check_floating(op, "gamma", gamma)
    if gamma.device != like.device and (gamma.dim() > 0 or gamma.device.type == "meta"):
        raise ValueError(f"{op}: gamma must be on the device of input, {like.device}, got {gamma.device}")
    if is_readable(gamma):
        outside = ~((gamma >= 0) & gamma.isfinite())
        if bool(outside.any()):
            raise ValueError(f"{op}: gamma must be finite and at least 0, got {float(gamma[outside].reshape(-1)[0])}")
    return gamma.to(like)


def _broadcasts(gamma: Tensor, shape: torch.Size) -> bool:
    fits = (a == 1 or a == b for a, b in zip(reversed(gamma.shape), reversed(shape), strict=False))
    return gamma.dim() <= len(shape) and all(fits)


def _renamed(op: str, function: Any, *arguments: Any, **options: Any) -> Tensor:
    """Calls another operator and replaces its name in errors by the name of the function that the user called."""
    try:
        result: Tensor = function(*arguments, **options)
        return result
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:
        text = str(error)
        name = f"{function.__name__}:"
        if not text.startswith(name):
            raise
        raise type(error)(f"{op}:{text[len(name) :]}") from None


def _widened(input: Any) -> Any:
    half = isinstance(input, Tensor) and input.dtype in HALVES
    return input.float() if half else input


def _as_input(result: Tensor, input: Tensor) -> Tensor:
    return result if autocast_is_on(input.device.type) else result.to(input.dtype)


def _kind(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
