"""Checks and conversions of the arguments of linear_focal_loss."""

import math
from typing import Any

import torch
from torch import Tensor

from focalkern._checks import SOFT_ONE_HOT, dense, finite, flag, integer, label, number, sizes, smoothing
from focalkern._devices import autocast_is_on
from focalkern._types import FLOATS, HALVES, LABELS, STEEPEST_INVERSE_GAMMA
from focalkern.gamma import GammaTable
from focalkern.ops._backend import backend_for, module_or_fallback
from focalkern.ops._row_loss import warn_if_steep

__all__ = [
    "check_gamma_shape",
    "check_numbers",
    "check_target",
    "check_tensors",
    "dtypes_of",
    "fits_one_product",
    "gamma_of",
]

_OP = "linear_focal_loss"

# Bytes of logits up to which one matrix product and focal_loss are faster than chunks, which cost Python calls each.
_FEW_LOGITS = 2**20


def fits_one_product(
    input: object,
    linear_weight: object,
    target: object,
    gamma: object,
    linear_bias: object,
    ignore_index: object,
    label_smoothing: object,
    detach_modulation: object,
) -> bool:
    """Whether no option and no tensor needs chunks, for a small batch of rows and labels on the CPU.

    A call with another invalid argument fails in the product or in ``focal_loss``. The checks that name the argument
    take longer than a small batch.
    """
    return (
        type(gamma) is float
        and STEEPEST_INVERSE_GAMMA <= gamma < math.inf
        and type(ignore_index) is int
        and type(label_smoothing) is float
        and type(detach_modulation) is bool
        and not torch.compiler.is_compiling()
        and module_or_fallback().is_small_head(input, linear_weight, target, linear_bias, ignore_index, _FEW_LOGITS)
    )


def are_few(input: Tensor, linear_weight: Tensor, target: Tensor, ignore_index: int) -> bool:
    """Whether the rows have few logits and none is ignored: ignored rows may hold NaN, and must stay out of the
    products."""
    rows = input.shape[:-1].numel()
    if rows * linear_weight.shape[0] * input.element_size() > _FEW_LOGITS:
        return False
    return target.is_floating_point() or not backend_for(target).has_label(target, ignore_index)


def check_numbers(
    ignore_index: object, label_smoothing: Any, detach_modulation: object, chunk_rows: Any, softcap: Any
) -> None:
    label(_OP, "ignore_index", ignore_index)
    smoothing(_OP, label_smoothing)
    if isinstance(softcap, bool | Tensor):
        raise TypeError(f"{_OP}: softcap must be a number, got {type(softcap).__name__}")
    flag(_OP, "detach_modulation", detach_modulation)
    if chunk_rows is not None:
        integer(_OP, "chunk_rows", chunk_rows, 1, 2**63 - 1, " or None")
    if softcap is not None and not 0 < number(_OP, "softcap", softcap, "a number or None") < math.inf:
        raise ValueError(f"{_OP}: softcap must be positive and finite, got {softcap}")


def dtypes_of(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the logits and of the loss."""
    dtype = input.dtype
    if dtype != torch.float64 and autocast_is_on(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        return dtype, torch.float32 if dtype in HALVES else dtype
    for name, tensor in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if tensor is not None and tensor.dtype != dtype:
            raise TypeError(f"{_OP}: {name} must have the dtype of input, {dtype}, got {tensor.dtype}")
    return dtype, dtype


def check_tensors(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    over_ranks: bool,
) -> None:
    for name, value, optional in (
        ("input", input, False),
        ("linear_weight", linear_weight, False),
        ("target", target, False),
        ("linear_bias", linear_bias, True),
        ("weight", weight, True),
    ):
        if value is None and optional:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{_OP}: {name} must be a tensor, got {type(value).__name__}")
        if name != "target" and value.dtype not in FLOATS:
            raise TypeError(f"{_OP}: {name} must be float16, bfloat16, float32 or float64, got {value.dtype}")
        if value.device != input.device:
            raise ValueError(f"{_OP}: {name} must be on the device of input, {input.device}, got {value.device}")
        dense(_OP, name, value)
    if hasattr(linear_weight, "device_mesh") or hasattr(input, "device_mesh"):
        raise TypeError(
            f"{_OP}: input and linear_weight must both be DTensors, or tensors of this process with process_group, got "
            "one DTensor. For a weight that FSDP shards, call the loss inside the forward pass of its module, where "
            "the weight is whole"
        )
    if not 1 <= input.dim() <= 3:
        raise ValueError(f"{_OP}: input must be [D], [N, D] or [B, S, D], got shape {list(input.shape)}")
    if linear_weight.dim() < 2:
        raise ValueError(f"{_OP}: linear_weight must be [C, D], got shape {list(linear_weight.shape)}")
    if linear_weight.dim() > 2 and input.dim() != 2:
        raise ValueError(
            f"{_OP}: input must be [N, D] for a K-dimensional linear_weight [C, d1, ..., D], got shape "
            f"{list(input.shape)}"
        )
    features, head = linear_weight.shape[-1], linear_weight.shape[:-1]
    if input.shape[-1] != features:
        raise ValueError(
            f"{_OP}: input and linear_weight must have the same last dimension D, got {input.shape[-1]} and {features}"
        )
    if head.numel() < 1 and not over_ranks:
        raise ValueError(f"{_OP}: linear_weight must have at least one class, got shape {list(linear_weight.shape)}")
    if linear_bias is not None and linear_bias.shape != head:
        names = "[C]" if len(head) == 1 else "[C, d1, ...]"
        raise ValueError(f"{_OP}: linear_bias must be {names} = {sizes(head)}, got {sizes(linear_bias.shape)}")
    if weight is not None:
        if weight.shape != head[:1] and not over_ranks:
            raise ValueError(f"{_OP}: weight must be [C] = {sizes(head[:1])}, got {sizes(weight.shape)}")
        if weight.requires_grad:
            raise ValueError(f"{_OP}: weight must not require grad: it is a constant of the loss")


def check_target(target: Tensor, leading: torch.Size, head: torch.Size, ignore_index: int) -> None:
    if target.is_floating_point():
        if target.dtype not in FLOATS:
            raise TypeError(f"{_OP}: target must be float16, bfloat16, float32 or float64, got {target.dtype}")
        expected, what = [*leading, *head], "class probabilities"
        name = "[N, C, d1, ...]" if len(head) > 1 else ("[C]", "[N, C]", "[B, S, C]")[len(leading)]
        if ignore_index >= 0:
            raise ValueError(
                f"{_OP}: ignore_index must be negative (unused) for a target of class probabilities, got {ignore_index}"
            )
    elif target.dtype in LABELS:
        expected, what = [*leading, *head[1:]], "labels"
        name = "[N, d1, ...]" if len(head) > 1 else ("[]", "[N]", "[B, S]")[len(leading)]
    else:
        raise TypeError(
            f"{_OP}: target must be int64, int32 or uint8 labels or floating-point class probabilities, got "
            f"{target.dtype}"
        )
    if list(target.shape) != expected:
        problem = f"{_OP}: target of {what} must be {name} = {sizes(expected)}, got {sizes(target.shape)}"
        if target.shape == (*leading, *head) and what == "labels":
            problem += f"; {SOFT_ONE_HOT}"
        elif target.shape == (*leading, *head[1:]):  # floating point
            problem += "; labels are integers: target.long()"
        elif target.numel() == head.numel() and what == "labels":  # one label per row of linear_weight
            problem += (
                ". Are the first two arguments swapped? The order is linear_focal_loss(input, linear_weight, target)"
            )
        raise ValueError(problem)


def gamma_of(gamma: float | Tensor | GammaTable, input: Tensor) -> tuple[Tensor | None, Tensor]:
    """Edges and gammas of a table, or None and a tensor: numbers become one, so that a graph does not hold them."""
    if isinstance(gamma, GammaTable):
        return gamma.edges, gamma.gammas.detach()
    if isinstance(gamma, Tensor):
        dense(_OP, "gamma", gamma)
        if gamma.dtype not in FLOATS:
            raise TypeError(
                f"{_OP}: gamma must be a float, a floating-point tensor or a GammaTable, got a tensor of {gamma.dtype}"
            )
        if gamma.device != input.device and not (gamma.dim() == 0 and gamma.device.type == "cpu"):
            raise ValueError(f"{_OP}: gamma must be on the device of input, {input.device}, got {gamma.device}")
        return None, gamma
    if torch.compiler.is_compiling():
        return None, torch.zeros((), dtype=torch.float64, device="cpu") + gamma
    found = finite(_OP, "gamma", gamma, "a number, a tensor or a GammaTable")
    warn_if_steep(_OP, found, stacklevel=4)
    return None, torch.tensor(found, dtype=torch.float64, device="cpu")


def check_gamma_shape(gamma: Tensor, edges: Tensor | None, rows: list[int]) -> None:
    if edges is not None:
        return
    pairs = zip(reversed(gamma.shape), reversed(rows), strict=False)
    if gamma.dim() > len(rows) or not all(size in (1, wanted) for size, wanted in pairs):
        found = sizes(gamma.shape)
        raise ValueError(f"{_OP}: gamma must be broadcastable to the unreduced loss {sizes(rows)}, got {found}")
