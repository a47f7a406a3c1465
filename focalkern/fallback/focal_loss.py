"""The focal and inverse focal loss in plain torch.

Labels without smoothing need one number per row: d, the log-sum-exp of the logits of the other classes minus the logit
of the target. Then log p = -softplus(d) and log(1 - p) = -softplus(-d), without cancellation for any target. Class
probabilities and label smoothing give every class a weight; they call :func:`focalkern.reference.focal_loss`.
"""

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from focalkern._checks import label_range, labels_to_check, probabilities_misfit, sizes, target_misfit
from focalkern._devices import as_parameter, has_float64, is_host_number
from focalkern._types import LABELS, REDUCTIONS, compute_dtype
from focalkern.fallback._checks import (
    autocasts,
    check_dense,
    check_floating,
    check_same_device,
    fits,
)
from focalkern.fallback._compile import compilable
from focalkern.gamma import GammaTable
from focalkern.reference._log_space import exact_log_sigmoids, second_derivatives_are_exact
from focalkern.reference._rows import gamma_tensor, times_log, weight_of_labels
from focalkern.reference._softmax_losses import ROW_LOSSES, RowLossSpec, confidence_factor

__all__ = ["check_arguments", "check_range", "focal_loss", "host_numbers"]

_FOCAL = ROW_LOSSES["focal_loss"]


def focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
) -> Tensor:
    """The compiled module's focal_loss in plain torch. With ``edges``, gamma is the gammas [n_bins] of a table."""
    ignore_index, label_smoothing = host_numbers("focal_loss", weight, ignore_index, label_smoothing)
    check_arguments("focal_loss", input, target, gamma, edges, weight, ignore_index, label_smoothing)
    input, dtype = promoted(input, target)
    check_range("focal_loss", target, input.shape[0 if input.dim() == 1 else 1], ignore_index)
    options = (reduction, ignore_index, label_smoothing, detach_modulation)
    return focal_definition(input, target, gamma, edges, weight, *options).to(dtype)


@compilable("gamma")
def focal_definition(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    spec: RowLossSpec = _FOCAL,
) -> Tensor:
    """The loss -f log p of checked arguments in the dtype of the computation. It does not synchronise."""
    real = compute_dtype(input.dtype)
    z = input.to(real).movedim(0 if input.dim() == 1 else 1, -1)
    if spec.factor is confidence_factor and has_float64(z.device):
        z = z.to(torch.float64)  # f = p^gamma, and p would inherit the rounding of log p
    gammas = gammas_of(gamma, edges, z)
    divisor: Tensor | float
    if target.is_floating_point():
        loss, divisor = _of_probabilities(z, target, gammas, weight, label_smoothing, detach_modulation, spec)
    else:
        loss, divisor = _of_labels(z, target, gammas, weight, ignore_index, label_smoothing, detach_modulation, spec)
    if reduction:
        loss = loss.sum()
    return (loss / divisor if REDUCTIONS[reduction] == "mean" else loss).to(real)


def promoted(input: Tensor, target: Tensor) -> tuple[Tensor, torch.dtype]:
    """The input, converted to float64 if the target is float64, and the dtype of the loss."""
    dtype = torch.float32 if autocasts(input) else input.dtype
    if target.is_floating_point() and target.dtype != input.dtype:
        # The loss has the dtype that logits and target probabilities promote to, as in torch.
        dtype = torch.promote_types(input.dtype, target.dtype)
        input = input.to(torch.float64) if dtype == torch.float64 else input
    return input, dtype


def check_range(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Raises for a label out of range, unless reading labels would synchronise the device; its row is NaN there."""
    labels = None if target.is_floating_point() else labels_to_check(target)
    if labels is not None:
        label_range(op, labels, classes, ignore_index)


def _of_labels(
    z: Tensor,
    target: Tensor,
    gamma: Tensor | GammaTable,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    spec: RowLossSpec,
) -> tuple[Tensor, Tensor]:
    """The loss per row, and the divisor of its mean."""
    classes = z.shape[-1]
    labels = target.long()
    valid = labels != ignore_index
    in_range = (labels >= 0) & (labels < classes)
    index = torch.where(in_range, labels, 0)
    row_weight = torch.ones_like(z[..., 0]) if weight is None else weight_of_labels(weight.to(z.dtype), index)
    divisor = torch.where(valid, row_weight, 0.0).sum()
    # Ignored rows become 0 first, so that a NaN in them does not reach loss or gradient.
    z = torch.where(valid.unsqueeze(-1), z, 0.0)
    if label_smoothing > 0:
        loss = spec.loss(
            *_classes_second(z, index, None),
            gamma,
            0.0,
            detach_modulation,
            weight=weight,
            ignore_index=-1,
            reduction="none",
            label_smoothing=label_smoothing,
        ).reshape(labels.shape)
    else:
        log_p, log_u = _log_probability_of(z, index)
        if isinstance(gamma, GammaTable):
            gamma = gamma_tensor(gamma, log_p.unsqueeze(-1).exp()).squeeze(-1)
        assert spec.factor is not None
        factor = spec.factor(log_p, log_u, gamma)
        if detach_modulation:
            factor = factor.detach()
        loss = -row_weight * times_log(factor, log_p)
        if weight is not None:  # a class with weight 0 has loss 0, even if its probability is 0
            loss = torch.where((row_weight == 0) & (log_p == -math.inf), 0.0, loss)
    loss = loss * torch.where(in_range | ~valid, 1.0, math.nan)  # a factor, so that the gradient is NaN too
    return torch.where(valid, loss, 0.0), divisor


def _log_probability_of(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """log p and log(1 - p) of one class per row."""
    index = index.unsqueeze(-1)
    z_target = z.gather(-1, index).squeeze(-1)
    is_target = torch.arange(z.shape[-1], device=z.device) == index
    # The shift needs no gradient. If it is +inf, inf - inf makes the row NaN, the required result.
    others = torch.where(is_target, -math.inf, z)
    largest = others.detach().amax(-1)
    # The only possible class of a row has p = 1 for any logit.
    alone = (largest == -math.inf) & z_target.isfinite()
    shift = torch.where(alone, 0.0, largest)
    total = (torch.where(is_target, -math.inf, z - shift.unsqueeze(-1))).exp().sum(-1)
    d = torch.where(alone, 1.0, total).log() + (shift - torch.where(alone, 0.0, z_target))
    # The softmax of a row with a +inf logit is not defined: NaN.
    d = d + torch.where(z_target == math.inf, z_target - z_target, 0.0)
    # At p = 0, log(1 - p) and its derivative are 0.
    absent = d == math.inf
    if second_derivatives_are_exact():
        log_u, log_p = exact_log_sigmoids(d)
        return torch.where(alone, 0.0, log_p), torch.where(alone, -math.inf, log_u)
    log_p = torch.where(alone, 0.0, F.logsigmoid(-d))
    log_u = torch.where(alone, -math.inf, torch.where(absent, 0.0, F.logsigmoid(torch.where(absent, 0.0, d))))
    return log_p, log_u


def _of_probabilities(
    z: Tensor,
    target: Tensor,
    gamma: Tensor | GammaTable,
    weight: Tensor | None,
    label_smoothing: float,
    detach_modulation: bool,
    spec: RowLossSpec,
) -> tuple[Tensor, Tensor | float]:
    class_dim = 0 if target.dim() == 1 else 1
    probabilities = target.to(z.dtype).movedim(class_dim, -1)
    loss = spec.loss(
        *_classes_second(z, None, probabilities),
        gamma,
        0.0,
        detach_modulation,
        weight=weight,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return loss.reshape(z.shape[:-1]), math.prod(z.shape[:-1])


def _classes_second(z: Tensor, labels: Tensor | None, probabilities: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits and target with the classes in dimension 1, as focal_loss expects: [C] or [N, C, d1, ...]."""
    target = labels if labels is not None else probabilities
    assert target is not None
    if z.dim() == 1:
        return z, target
    return z.movedim(-1, 1), target if labels is not None else target.movedim(-1, 1)


def gammas_of(gamma: float | Tensor, edges: Tensor | None, z: Tensor) -> Tensor | GammaTable:
    """A table, or gamma per row or for all rows. A host number stays there: copying it would synchronise the device."""
    if edges is not None:
        assert isinstance(gamma, Tensor)
        return GammaTable._unchecked(edges, gamma.detach())
    if isinstance(gamma, Tensor):
        return as_parameter(gamma, z)
    if torch.compiler.is_compiling():
        # A tensor, not a constant of the graph, so that a new value causes no recompilation.
        return torch.zeros((), dtype=z.dtype, device=z.device) + gamma
    return torch.full((), gamma, dtype=z.dtype, device=z.device)


# -- arguments --------------------------------------------------------------------------------------------------------


def check_arguments(
    op: str,
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    check_dense(op, input)
    check_floating(op, "input", input)
    if input.dim() < 1:
        raise ValueError(f"{op}: input must be [C], [N, C] or [N, C, d1, ...], got a scalar")
    classes = input.shape[0 if input.dim() == 1 else 1]
    if classes < 1:
        raise ValueError(f"{op}: input must have at least one class, got shape {list(input.shape)}")
    check_same_device(op, "target", target, input)
    _check_target(op, input, target, ignore_index)
    if isinstance(gamma, Tensor):
        _check_gamma(op, input, gamma, edges)
    if weight is not None:
        check_floating(op, "weight", weight)
        if weight.dim() != 1 or len(weight) != classes:
            raise ValueError(f"{op}: weight must be [C] = {sizes([classes])}, got {sizes(weight.shape)}")
        check_same_device(op, "weight", weight, input)
        if weight.requires_grad:
            raise ValueError(f"{op}: weight must not require grad: it is a constant of the loss")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {label_smoothing:g}")


def host_numbers(op: str, weight: object, ignore_index: Any, label_smoothing: Any) -> tuple[int, float]:
    """``ignore_index`` and ``label_smoothing`` as Python numbers.

    Raises:
        TypeError: ``weight``, ``ignore_index`` or ``label_smoothing`` has a type that pybind11 would reject. The caller
            turns it into an error that names the argument.
    """
    try:
        # Strings are refused, because float() would parse them.
        if not (weight is None or isinstance(weight, Tensor)) or isinstance(label_smoothing, str | bytes):
            raise TypeError
        index = ignore_index if type(ignore_index) is int else operator.index(ignore_index)
        smoothing = label_smoothing if type(label_smoothing) is float else float(label_smoothing)
        if not -(2**63) <= index < 2**63:
            raise OverflowError
    except Exception:  # an argument's class may raise anything
        raise TypeError(f"{op}: incompatible arguments") from None
    return index, smoothing


def _check_target(op: str, input: Tensor, target: Tensor, ignore_index: int) -> None:
    if target.is_floating_point():
        check_floating(op, "target", target)
        if target.shape != input.shape:
            raise probabilities_misfit(op, input, target)
        if ignore_index >= 0:
            raise ValueError(
                f"{op}: ignore_index must be negative (unused) for a target of class probabilities, got {ignore_index}"
            )
        return
    if target.dtype not in LABELS:
        raise TypeError(
            f"{op}: target must be int64, int32 or uint8 labels or floating-point class probabilities, got "
            f"{target.dtype}"
        )
    misfit = target_misfit(op, input, target)
    if misfit is not None:
        raise misfit


def _check_gamma(op: str, input: Tensor, gamma: Tensor, edges: Tensor | None) -> None:
    if not gamma.is_floating_point():
        raise TypeError(
            f"{op}: gamma must be a float, a floating-point tensor or a GammaTable, got a tensor of {gamma.dtype}"
        )
    if edges is not None:
        if not edges.is_floating_point():
            raise TypeError(f"{op}: gamma.edges must be floating point, got {edges.dtype}")
        if gamma.dim() != 1 or edges.dim() != 1 or len(gamma) < 1 or len(edges) != len(gamma) + 1:
            raise ValueError(
                f"{op}: gamma.edges must be [n_bins + 1] for gamma.gammas [n_bins], got {list(edges.shape)} and "
                f"{list(gamma.shape)}"
            )
        check_same_device(op, "gamma.edges", edges, input)
        check_same_device(op, "gamma.gammas", gamma, input)
        return
    if is_host_number(gamma):  # one number may stay on the host
        return
    check_same_device(op, "gamma", gamma, input)
    class_dim = 0 if input.dim() == 1 else 1
    rows = (*input.shape[:class_dim], *input.shape[class_dim + 1 :])
    if not fits(gamma, rows):
        raise ValueError(
            f"{op}: gamma must be broadcastable to the unreduced loss {sizes(rows)}, got {sizes(gamma.shape)}"
        )
