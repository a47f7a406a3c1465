"""The call of a row loss's kernel, shared by all of them: arguments, dispatcher, errors."""

import math
import warnings
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from focalkern._checks import (
    finite,
    flag,
    label,
    no_float8,
    number,
    one_of,
    probabilities_misfit,
    reduction_code,
    reworded,
    target_misfit,
)
from focalkern._devices import autocast_is_on, has_float64
from focalkern._tracing import constant_in_graphs, is_exporting
from focalkern._types import LABELS, PLAIN_TENSORS, STEEPEST_INVERSE_GAMMA
from focalkern.fallback._checks import fits
from focalkern.fallback.focal_loss import check_arguments
from focalkern.gamma import GammaTable
from focalkern.ops._backend import backend_for, has_kernels
from focalkern.reference._softmax_losses import ROW_LOSSES, number_of, row_loss_of

__all__ = [
    "FOCAL",
    "MOST_SMOOTHING",
    "Modulation",
    "call_operator",
    "check_modulation",
    "check_shapes",
    "check_tensor",
    "check_types",
    "finite_number",
    "kind_of",
    "needs_float64",
    "row_loss",
    "warn_if_steep",
]

Modulation = Literal["confidence"]

MOST_SMOOTHING = 0.5  # with more label smoothing, float32 logits are computed in float64

FOCAL = number_of("focal_loss")
_MEAN = 1
_MOST_IN_ONE_CALL = 1 << 16  # logits
_loss_with_gradient: Any = getattr(torch.ops.focalkern, "focal_loss_with_gradient", None)


def finite_number(op: str, name: str, value: object, low: float = -math.inf) -> float:
    if torch.compiler.is_compiling() and type(value) is float:
        return value  # a compiled graph must not depend on the value of gamma
    number = finite(op, name, value, f"a number{_OR_TENSOR[name]}")
    if number < low:
        raise ValueError(f"{op}: {name} must be at least {low:g}, got {number}")
    return number


_OR_TENSOR = {"gamma": ", a tensor or a GammaTable", "epsilon": ""}


def row_loss(
    op: str,
    kind: int,
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable,
    epsilon: float,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    detach_modulation: bool,
) -> Tensor:
    """The row loss number ``kind`` by kernels, through torch's dispatcher or in plain torch; errors name ``op``."""
    code = reduction_code(op, reduction)
    compiling = torch.compiler.is_compiling()
    if not compiling and type(input) in PLAIN_TENSORS and type(target) in PLAIN_TENSORS:
        function = backend_for(input).row_loss
    else:
        check_tensor(op, "input", input)
        check_tensor(op, "target", target)
        dispatched = (compiling or has_torch_function((input, target))) and has_kernels(input)
        function = call_operator if dispatched else backend_for(input).row_loss
        if compiling:
            check_shapes(op, kind, input, target, gamma, weight)
    if needs_float64(input, target, label_smoothing):
        given = (weight, ignore_index, reduction, label_smoothing, detach_modulation)
        return row_loss(op, kind, input.double(), target, gamma, epsilon, *given).to(input.dtype)
    edges = None
    if isinstance(gamma, GammaTable):
        edges, gamma = gamma.edges, gamma.gammas.detach()
    options = (code, ignore_index, label_smoothing, detach_modulation, kind, epsilon)
    try:
        if function is call_operator:
            return function(input, target, gamma, edges, weight, *options, compiling)
        return function(input, target, gamma, edges, weight, *options)
    # Arguments are checked only after an error, for speed.
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        check_types(op, weight, ignore_index, label_smoothing, detach_modulation)
        named, labels_only = _of(op, kind, error), not row_loss_of(kind).soft_target
        raise reworded(op, named, labels_only, input=input, target=target, gamma=gamma, weight=weight) from None


def needs_float64(input: Tensor, target: Tensor, label_smoothing: object) -> bool:
    """Whether the gradient p_j - t_j loses too many digits in float32: for similar logits it cancels if the target t of
    the label is below one half."""
    return (
        isinstance(label_smoothing, float | int)
        and MOST_SMOOTHING < label_smoothing <= 1
        and input.dtype == torch.float32
        and target.dtype != torch.float64
        and has_float64(input.device)
    )


def _of(op: str, kind: int, error: Exception) -> Exception:
    """The error with the name of the called function in place of the name of the row loss."""
    name = row_loss_of(kind).name
    return error if name == op or not str(error).startswith(name) else type(error)(str(error).replace(name, op, 1))


def check_modulation(
    op: str, modulation: Modulation | None, gamma: float | Tensor | GammaTable
) -> float | Tensor | GammaTable:
    """Returns gamma; raises unless ``modulation`` is known and allows this gamma."""
    no_float8(op, "gamma", gamma)
    if modulation is None:
        return gamma
    one_of(op, "modulation", modulation, get_args(Modulation))
    return gamma if isinstance(gamma, Tensor | GammaTable) else finite_number(op, "gamma", gamma, low=0.0)


def kind_of(modulation: str | None) -> int:
    """The number of the row loss for the focal loss with this modulation."""
    return number_of(next(name for name, spec in ROW_LOSSES.items() if spec.modulation == modulation))


def warn_if_steep(op: str, gamma: float, stacklevel: int) -> None:
    if gamma < STEEPEST_INVERSE_GAMMA:
        warnings.warn(
            f"{op}: gamma = {gamma} is below {STEEPEST_INVERSE_GAMMA}, where the slope of the inverse focal loss "
            "changes sign near p = 0.28",
            stacklevel=stacklevel,
        )


def check_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")


def check_shapes(
    op: str, kind: int, input: Tensor, target: Tensor, gamma: float | Tensor | GammaTable, weight: Tensor | None
) -> None:
    """Raises before the operator of a compiled graph, because an operator's error would be torch's, without the remedy.

    A graph checks before each call the names that are read here, so only an error reads more of them."""
    class_dim = 1 if input.dim() > 1 else 0
    rows = (*input.shape[:class_dim], *input.shape[class_dim + 1 :])
    error, has_labels = None, target.dtype in LABELS
    if has_labels:
        if target.shape != rows:
            error = target_misfit(op, input, target, labels_only=not row_loss_of(kind).soft_target)
    elif target.is_floating_point() and target.shape != input.shape:
        error = probabilities_misfit(op, input, target)
    if error is not None:
        raise error
    if (
        not (has_labels or target.is_floating_point())
        or (isinstance(gamma, Tensor) and gamma.dim() > 0 and not fits(gamma, rows))
        or (isinstance(weight, Tensor) and weight.shape != input.shape[class_dim : class_dim + 1])
    ):
        check_arguments(op, input, target, gamma if isinstance(gamma, Tensor) else 0.0, None, weight, -100, 0.0)


def check_types(
    op: str, weight: object, ignore_index: object, label_smoothing: object, detach_modulation: object
) -> None:
    """Raises an error that names the argument whose type the compiled module rejects."""
    if weight is not None:
        check_tensor(op, "weight", weight)
    label(op, "ignore_index", ignore_index)
    number(op, "label_smoothing", label_smoothing)
    flag(op, "detach_modulation", detach_modulation)


def call_operator(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    kind: int,
    epsilon: float,
    compiling: bool,
) -> Tensor:
    """The call through torch's dispatcher, for compiled and exported graphs and tensor subclasses, which see only
    operators. A compiled graph checks before each call the names that are read here, so there are few."""
    device_type = input.device.type
    is_half = input.element_size() == 2
    float32_loss = is_half and autocast_is_on(device_type)
    if target.is_floating_point() and target.dtype != input.dtype:
        common = torch.promote_types(input.dtype, target.dtype)
        if common == torch.float64:
            input = input.to(common)
        float32_loss = is_half and common == torch.float32
    options = (reduction, ignore_index, label_smoothing, detach_modulation, float32_loss, kind, epsilon)
    has_kernel = label_smoothing == 0 or _smooths_on(kind, device_type)
    is_number = type(gamma) is float or type(gamma) is int
    if compiling and is_number and has_kernel and _computes_gradient(input, target, gamma, reduction):
        numbers = (reduction, ignore_index, label_smoothing, detach_modulation, kind, epsilon)
        loss, _ = _loss_with_gradient(input, target, float(gamma), weight, *numbers)
        return loss
    if not isinstance(gamma, Tensor):
        # A tensor, not a constant of the graph, so that another value does not compile again.
        gamma = torch.zeros((), dtype=torch.float64, device="cpu") + gamma
    if not has_kernel or torch._C._are_functorch_transforms_active():
        return torch.ops.focalkern.focal_loss_composite(input, target, gamma, edges, weight, *options)
    loss, _ = torch.ops.focalkern.focal_loss_forward(input, target, gamma, edges, weight, *options)
    return loss


@constant_in_graphs
def _smooths_on(kind: int, device_type: str) -> bool:
    return row_loss_of(kind).smooths_on(device_type)


def _computes_gradient(input: Tensor, target: Tensor, gamma: Any, reduction: int) -> bool:
    """Whether the forward pass of a compiled graph also computes the gradient, which the backward pass multiplies.

    For small batches on the CPU the second call of an operator takes more time than the multiplication. In half
    precision a gradient that is not yet scaled would lose digits."""
    most = _most_in_one_call(reduction)
    if not most:
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # its import takes long

    return (
        input.is_cpu
        and input.requires_grad
        and not target.requires_grad
        and input.element_size() > 2
        # A number that may change without a compilation is neither.
        and (statically_known_true(gamma < 1) or statically_known_true(gamma >= 1))
        and statically_known_true(input.numel() <= most)
    )


@constant_in_graphs
def _most_in_one_call(reduction: int) -> int:
    """The largest number of logits for which one operator of a compiled graph computes loss and gradient."""
    apart = reduction < _MEAN or _loss_with_gradient is None or is_exporting()
    apart = apart or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
    return 0 if apart else _MOST_IN_ONE_CALL
