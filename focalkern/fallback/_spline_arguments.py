"""Arguments of spline scaling's map and of the sums for its fit: checks, in the words of the compiled module."""

import torch
from torch import Tensor

from focalkern.fallback._checks import check_dense, check_floating, check_same_device

__all__ = ["FEW_CLASSES", "check_curve", "check_gradient", "check_input", "check_map", "check_rows"]

_OP = "spline_calibration_map"
_MOST_KNOTS, _MOST_FIT_KNOTS = 255, 15

FEW_CLASSES = 32
"""Largest number of classes with which the sums take a matrix; with more, a matrix product outside takes less time."""


def check_map(
    input: Tensor,
    parameters: Tensor,
    knots: Tensor,
    coefficients: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Dtypes, devices and shapes of the map's arguments, for real and for fake tensors."""
    check_dense(_OP, input)
    check_floating(_OP, "input", input)
    if input.dim() < 1 or input.shape[-1] < 2:
        raise ValueError(f"{_OP}: input must be [..., C] with C >= 2, got shape {list(input.shape)}")

    def check(name: str, expected: str, tensor: Tensor, fits: bool) -> None:
        check_dense(_OP, tensor, name)
        device = tensor.device
        if not fits or tensor.dtype != torch.float64 or not (tensor.is_cpu or device == input.device):
            found = f"{list(tensor.shape)} {tensor.dtype} on {device}"
            raise ValueError(f"{_OP}: {name} must be {expected}, got {found}")

    def is_of_classes(tensor: Tensor, most_dims: int) -> bool:
        return 1 <= tensor.dim() <= most_dims and all(size == input.shape[-1] for size in tensor.shape)

    known = parameters.is_cpu or parameters.is_meta
    check("parameters", "[3] float64 on the CPU", parameters, parameters.shape == (3,) and known)
    place, is_curve = "float64 on the CPU or with the input", knots.dim() == 1 and 2 <= knots.shape[0] <= _MOST_KNOTS
    check("knots", f"[m] float64, m from 2 to {_MOST_KNOTS}, on the CPU or with the input", knots, is_curve)
    check("coefficients", f"[m + 1, 4] {place}", coefficients, coefficients.shape == (knots.shape[0] + 1, 4))
    if weight is not None:
        check("weight", f"[C] or [C, C] {place}", weight, is_of_classes(weight, 2))
    if bias is not None:
        check("bias", f"[C] {place}", bias, is_of_classes(bias, 1))


def check_gradient(grad: Tensor, input: Tensor) -> None:
    """The upstream gradient of the map."""
    check_floating(_OP, "grad", grad)
    check_same_device(_OP, "grad", grad, input)
    if grad.shape != input.shape:
        found = list(grad.shape)
        raise ValueError(f"{_OP}: grad must have the shape of the output, {list(input.shape)}, got {found}")


def check_input(op: str, input: Tensor) -> None:
    """Rows of logits or probabilities, [N, C], with values."""
    check_dense(op, input)
    check_floating(op, "input", input)
    if input.is_meta:
        raise NotImplementedError(f"{op}: input must have values, on a CPU or CUDA device, got meta")
    if input.dim() != 2 or input.shape[1] < 2:
        raise ValueError(f"{op}: input must be [N, C] with C >= 2, got {list(input.shape)}")


def check_rows(op: str, input: Tensor, target: Tensor | None, weight: Tensor, *, of_curve: bool = False) -> None:
    """Rows of a sum: input [N, C], target [N] int64 and weight [N], on one device.

    ``of_curve`` permits features [2, N, C] as the input.
    """
    if of_curve and input.dim() == 3:
        if not input.is_cpu or input.dtype != torch.float64 or input.shape[0] != 2 or input.shape[2] < 2:
            found = f"{list(input.shape)} {input.dtype} on {input.device}"
            raise ValueError(f"{op}: features must be [2, N, C] float64 on the CPU with C >= 2, got {found}")
    else:
        check_input(op, input)
    n_rows, n_classes = input.shape[-2:]
    check_same_device(op, "weight", weight, input)
    if weight.shape != (n_rows,):
        raise ValueError(f"{op}: weight must be [N] = [{n_rows}], got {list(weight.shape)}")
    if target is None:
        return
    check_same_device(op, "target", target, input)
    if target.dtype != torch.int64 or target.shape != (n_rows,):
        raise ValueError(f"{op}: target must be [N] = [{n_rows}] int64, got {list(target.shape)} {target.dtype}")
    # On CUDA this check would wait for the device; a kernel treats such a label as no class.
    if target.is_cpu and n_rows and not 0 <= int(target.min()) <= int(target.max()) < n_classes:
        row = int(((target < 0) | (target >= n_classes)).nonzero()[0])
        raise IndexError(f"{op}: target must be from 0 to {n_classes - 1}, got {int(target[row])} at row {row}")


def check_curve(
    op: str,
    input: Tensor,
    knots: Tensor,
    basis: Tensor,
    values: Tensor,
    of_x: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
) -> None:
    """The curve of a sum: knots [m], basis [m + 1, 4, m], values [m], of_x [C] or [C, C], bias [C], extra [N, C]."""
    m = knots.numel()
    if knots.dim() != 1 or not 2 <= m <= _MOST_FIT_KNOTS:
        raise ValueError(f"{op}: knots must be [m] with m from 2 to {_MOST_FIT_KNOTS}, got {list(knots.shape)}")
    if basis.shape != (m + 1, 4, m):
        raise ValueError(f"{op}: basis must be [m + 1, 4, m], got {list(basis.shape)}")
    if values.shape != (m,):
        raise ValueError(f"{op}: values must be [m] = [{m}], got {list(values.shape)}")
    n_rows, n_classes = input.shape[-2:]
    matrix = of_x is not None and of_x.dim() == 2
    if of_x is not None and matrix and not (input.dim() == 3 and len(of_x) == n_classes <= FEW_CLASSES):
        raise ValueError(
            f"{op}: of_x must be [C], or [C, C] for features of at most {FEW_CLASSES} classes, got {list(of_x.shape)} "
            f"for C = {n_classes}"
        )
    numbers_of_x = n_classes**2 if matrix else n_classes
    for tensor, numbers in ((of_x, numbers_of_x), (bias, n_classes), (extra, n_rows * n_classes)):
        if tensor is not None and tensor.numel() != numbers:
            raise ValueError(
                f"{op}: vectors must be [C], matrices [C, C] and extra scores [N, C], got {list(tensor.shape)}"
            )
