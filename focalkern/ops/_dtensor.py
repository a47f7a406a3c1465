"""Losses and maps of DTensor logits: the local tensors, the collectives between them, and the placements of the result.

torch cannot place what the operators save for the backward pass (one flat tensor), so the placements are decided here
and the operators see local tensors only:

    rows sharded      the local kernel; "sum" is Partial, "none" stays sharded, "mean" adds (sum, weight) over the ranks
    classes sharded   the loss over ranks with the group of that mesh dimension; without one the classes are gathered

The gradient of the logits has the placements of the logits. ``torch.distributed.tensor`` is imported by the functions:
a DTensor has imported it already.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from focalkern._checks import reduction_code
from focalkern._devices import autocast_is_on, float32_loss, has_float64
from focalkern._types import HALVES
from focalkern.gamma import GammaTable

__all__ = [
    "is_dtensor",
    "linear_loss_over_mesh",
    "loss_of_elements_over_mesh",
    "loss_over_mesh",
    "map_over_mesh",
]

Placements = tuple[Any, ...]
Parameter = float | Tensor | GammaTable | None


def is_dtensor(value: object) -> bool:
    return hasattr(value, "device_mesh") and isinstance(value, Tensor)


def loss_over_mesh(
    op: str,
    local: Callable[..., Any],
    over_ranks: Callable[..., Any] | None,
    input: Any,
    target: Any,
    gamma: Parameter,
    weight: Any,
    ignore_index: int,
    reduction: str,
) -> Any:
    """A loss of rows: ``local(logits, target, gamma, weight, reduction)`` of whole rows,
    ``over_ranks(logits, target, gamma, weight, reduction, group)`` of a slice of the classes, classes last."""
    reduction_code(op, reduction)
    if input.dim() < 1:
        raise ValueError(f"{op}: input must be [C], [N, C] or [N, C, d1, ...], got a single number")
    class_dim = min(input.dim() - 1, 1)
    soft = isinstance(target, Tensor) and target.is_floating_point()
    input = _settled(input, class_dim, over_ranks is not None)
    mesh, placements = input.device_mesh, input.placements
    of_rows = tuple(_without_class(placement, class_dim) for placement in placements)
    leading = torch.Size(size for i, size in enumerate(input.shape) if i != class_dim)
    z = input.to_local(grad_placements=placements)
    y = _local(op, "target", target, mesh, placements if soft else of_rows)
    gamma, weight = parameter_over_mesh(gamma, mesh, leading, of_rows), _whole(weight)
    summed = reduction == "mean" and any(placement.is_shard() for placement in of_rows)
    how = "sum" if summed else reduction
    of_classes = next((i for i, placement in enumerate(placements) if placement.is_shard(class_dim)), None)
    with float32_loss(z) if summed else contextlib.nullcontext():
        if of_classes is None:
            loss = local(z, y, gamma, weight, how)
        else:
            group, last = mesh.get_group(of_classes), z.movedim(class_dim, -1)
            y = y.movedim(class_dim, -1) if soft else y
            loss = over_ranks(last, y, gamma, weight, how, group)  # type: ignore[misc]
    found, stats = loss if isinstance(loss, tuple) else (loss, None)
    if summed:
        rows = z.numel() // max(1, z.shape[class_dim])
        found = _mean(found, _divisor(y, rows, weight, ignore_index), z, mesh, of_rows)
    else:
        found = _placed(found, reduction, mesh, of_rows, leading)
    return found if stats is None else _with_stats(found, loss, mesh, of_rows, leading)


def linear_loss_over_mesh(
    op: str,
    local: Callable[..., Any],
    input: Any,
    linear_weight: Any,
    linear_bias: Any,
    target: Any,
    gamma: Parameter,
    weight: Any,
    ignore_index: int,
    reduction: str,
) -> Any:
    """The loss of a head: ``local(input, linear_weight, linear_bias, target, gamma, weight, reduction, group)``.
    ``group`` is the group over which the head's classes are sharded, or None."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    reduction_code(op, reduction)
    mesh = input.device_mesh
    for name, value in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if value is not None and not (is_dtensor(value) and value.device_mesh == mesh):
            kind = "one of another mesh" if is_dtensor(value) else "a plain tensor"
            raise TypeError(f"{op}: {name} must be a DTensor on the mesh of input, got {kind}; see distribute_tensor")
    if linear_weight.dim() != 2:
        raise ValueError(f"{op}: linear_weight that is a DTensor must be [C, D], got shape {list(linear_weight.shape)}")
    of_classes = next((i for i, p in enumerate(linear_weight.placements) if type(p) is Shard and p.is_shard(0)), None)
    of_rows, of_head, sums = [], [], []
    for i, placement in enumerate(input.placements):
        rows = type(placement) is Shard and not placement.is_shard(input.dim() - 1) and i != of_classes
        of_rows.append(placement if rows else Replicate())
        of_head.append(Shard(0) if i == of_classes else Replicate())
        sums.append(Shard(0) if i == of_classes else Partial() if rows else Replicate())
    # Each rank of the head has a partial gradient of the input; the backward redistribution sums or scatters them.
    of_input = [Partial() if i == of_classes else placement for i, placement in enumerate(of_rows)]
    x = input.redistribute(placements=of_rows).to_local(grad_placements=of_input)
    w = linear_weight.redistribute(placements=of_head).to_local(grad_placements=sums)
    b = linear_bias
    if b is not None:
        b = b.redistribute(placements=of_head).to_local(grad_placements=sums)
    soft = isinstance(target, Tensor) and target.is_floating_point()
    leading = input.shape[:-1]
    last = [Shard(len(leading)) if i == of_classes else placement for i, placement in enumerate(of_rows)]
    y = _local(op, "target", target, mesh, tuple(last if soft else of_rows))
    gamma, weight = parameter_over_mesh(gamma, mesh, leading, tuple(of_rows)), _whole(weight)
    summed = reduction == "mean" and any(placement.is_shard() for placement in of_rows)
    group = None if of_classes is None else mesh.get_group(of_classes)
    with float32_loss(x) if summed else contextlib.nullcontext():
        loss = local(x, w, b, y, gamma, weight, "sum" if summed else reduction, group)
    found, stats = loss if isinstance(loss, tuple) else (loss, None)
    if summed:
        divisor = _divisor(y, math.prod(x.shape[:-1]), weight, ignore_index)
        found = _mean(found, divisor, x, mesh, tuple(of_rows))
    else:
        found = _placed(found, reduction, mesh, tuple(of_rows), leading)
    return found if stats is None else _with_stats(found, loss, mesh, tuple(of_rows), leading)


def loss_of_elements_over_mesh(
    op: str,
    local: Callable[..., Tensor],
    input: Any,
    target: Any,
    scores: Any,
    parameters: tuple[Parameter, ...],
    weight: Any,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """A loss of independent logits: ``local(logits, target, parameters, weight, reduction, ignore_index)``, whose
    target is (labels, scores) if ``scores`` is given. Any dimension may be sharded, also the class dimension."""
    reduction_code(op, reduction)
    class_dim = min(input.dim() - 1, 1)
    input = _settled(input, None, False)
    mesh, placements = input.device_mesh, input.placements
    z = input.to_local(grad_placements=placements)
    is_labels = isinstance(target, Tensor) and target.dim() < input.dim()
    y: Any
    if is_labels:
        of_rows = tuple(_without_class(placement, class_dim) for placement in placements)
        y = _local(op, "target", target, mesh, of_rows)
        counted = (y.long() != ignore_index).sum() * z.shape[class_dim]
        if any(placement.is_shard(class_dim) for placement in placements):
            y, ignore_index = _labels_of_slice(op, y, input, class_dim, ignore_index), -100
        if scores is not None:
            y = (y, _scores(op, scores, mesh, of_rows, [placement.is_shard(class_dim) for placement in placements]))
    else:
        y = _local(op, "target", target, mesh, placements)
        counted = torch.full((), z.numel(), device=z.device)
    given = [parameter_over_mesh(parameter, mesh, input.shape, placements) for parameter in parameters]
    weight = parameter_over_mesh(weight, mesh, input.shape, placements)
    summed = reduction == "mean" and any(placement.is_shard() for placement in placements)
    with float32_loss(z) if summed else contextlib.nullcontext():
        loss = local(z, y, given, weight, "sum" if summed else reduction, ignore_index)
    if not summed:
        return _placed(loss, reduction, mesh, placements, input.shape)
    return _mean(loss, counted, z, mesh, placements)


def map_over_mesh(
    local: Callable[..., Tensor], input: Any, class_dim: int | None, parameters: tuple[Parameter, ...]
) -> Tensor:
    """A map of logits or probabilities to the same shape: ``local(logits, parameters)``. The classes are gathered, and
    the result is sharded again."""
    given = input.placements
    input = _settled(input, class_dim, False)
    mesh, placements = input.device_mesh, input.placements
    of_rows = placements if class_dim is None else tuple(_without_class(p, class_dim) for p in placements)
    leading = input.shape if class_dim is None else input.shape[:-1]
    z = input.to_local(grad_placements=placements)
    mapped = local(z, [parameter_over_mesh(parameter, mesh, leading, of_rows) for parameter in parameters])
    result: Any = _placed(mapped, "none", mesh, placements, input.shape)
    if given == placements or any(placement.is_partial() for placement in given):
        return result
    return result.redistribute(placements=given)


def parameter_over_mesh(parameter: Any, mesh: Any, leading: torch.Size, placements: Placements) -> Any:
    """The part of a parameter that belongs to a rank's rows, differentiable; numbers and tables as they are."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(parameter, Tensor):
        return parameter
    everywhere = [Replicate()] * mesh.ndim
    if not is_dtensor(parameter):
        if parameter.dim() == 0 and not parameter.requires_grad:
            return parameter
        parameter = DTensor.from_local(parameter, mesh, everywhere, run_check=False)
    if parameter.numel() == 1:
        # One number for all rows: each rank's gradient is a partial sum over its rows.
        sums = [Partial() if placement.is_shard() else placement for placement in placements]
        return parameter.redistribute(placements=everywhere).to_local(grad_placements=sums)
    expanded = parameter.redistribute(placements=everywhere).expand(leading)
    return expanded.redistribute(placements=placements).to_local(grad_placements=placements)


def _settled(input: Any, class_dim: int | None, keeps_classes: bool) -> Any:
    """The tensor, redistributed so that placements are Shard or Replicate and at most one mesh dimension shards the
    classes (none unless ``keeps_classes``)."""
    from torch.distributed.tensor import Replicate, Shard

    placements, classes_are_sharded = [], False
    for placement in input.placements:
        stays = placement.is_replicate() or type(placement) is Shard
        if stays and class_dim is not None and placement.is_shard(class_dim):
            stays, classes_are_sharded = keeps_classes and not classes_are_sharded, True
        placements.append(placement if stays else Replicate())
    return input if tuple(placements) == tuple(input.placements) else input.redistribute(placements=placements)


def _without_class(placement: Any, class_dim: int) -> Any:
    """The placement of labels or losses of rows, for a placement of the logits."""
    from torch.distributed.tensor import Replicate, Shard

    if not placement.is_shard() or placement.is_shard(class_dim):
        return Replicate()
    return Shard(placement.dim - 1) if placement.dim > class_dim else placement


def _local(op: str, name: str, value: Any, mesh: Any, placements: Placements) -> Tensor:
    """A rank's part of a target. A plain tensor counts as replicated, as in torch's ``loss_parallel``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if is_dtensor(value):
        placed: Any = value
        local: Tensor = placed.redistribute(placements=placements).to_local(grad_placements=placements)
        return local
    if any(placement.is_shard() for placement in placements):
        raise TypeError(
            f"{op}: {name} must be a DTensor where the rows of input are sharded, got a plain tensor; if it holds this "
            f"rank's rows, pass DTensor.from_local({name}, input.device_mesh, {list(placements)})"
        )
    return value


def _scores(op: str, scores: Any, mesh: Any, of_rows: Placements, classes_are_sharded: list[bool]) -> Tensor:
    """A rank's part of the scores of labels. Only the rank that has a label's class has the gradient of its score."""
    from torch.distributed.tensor import DTensor, Partial

    local = _local(op, "scores", scores, mesh, of_rows)
    if not scores.requires_grad:
        return local
    if not is_dtensor(scores):
        scores = DTensor.from_local(scores, mesh, of_rows, run_check=False)
    pairs = zip(of_rows, classes_are_sharded, strict=True)
    of_gradient = [Partial() if is_sharded else placement for placement, is_sharded in pairs]
    found: Tensor = scores.redistribute(placements=of_rows).to_local(grad_placements=of_gradient)
    return found


def _labels_of_slice(op: str, labels: Tensor, input: Any, class_dim: int, ignore_index: int) -> Tensor:
    """Labels within this rank's classes. A label of another rank becomes the background, the number of local classes;
    ``ignore_index`` becomes -100."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(input.shape, input.device_mesh, input.placements)
    labels = labels.long()
    classes, wrong = input.shape[class_dim], (labels < 0) | (labels > input.shape[class_dim])
    wrong &= labels != ignore_index
    if labels.device.type == "cpu" and not torch.compiler.is_compiling() and bool(wrong.any()):
        found = int(labels[wrong][0])
        raise IndexError(f"{op}: target must be in [0, {classes}] or ignore_index, got {found}")
    here = labels - offset[class_dim]
    here = torch.where((here >= 0) & (here < shape[class_dim]), here, shape[class_dim])
    # -1 is out of range and not ignored, so the kernel makes the row NaN.
    return torch.where(labels == ignore_index, -100, torch.where(wrong, -1, here))


def _whole(value: Any) -> Any:
    """A constant as a plain tensor with all its elements, on every rank."""
    return value.full_tensor() if is_dtensor(value) else value


def _divisor(target: Tensor, rows: int, weight: Tensor | None, ignore_index: int) -> Tensor:
    """This rank's part of the divisor of the mean."""
    if target.is_floating_point():
        return torch.full((), rows, device=target.device)
    counts = target.long() != ignore_index
    if weight is None:
        return counts.sum()
    index = torch.where(counts & (target >= 0) & (target < len(weight)), target, 0).long()
    wide = weight.double() if has_float64(weight.device) else weight.float()
    return torch.where(counts, wide[index], 0.0).sum()


def _placed(loss: Tensor, reduction: str, mesh: Any, placements: Placements, leading: torch.Size) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial

    if reduction == "none":
        strides = [math.prod(leading[i + 1 :]) for i in range(len(leading))]
        return DTensor.from_local(loss, mesh, placements, run_check=False, shape=leading, stride=tuple(strides))
    sums = [Partial() if placement.is_shard() else placement for placement in placements]
    return DTensor.from_local(loss, mesh, sums, run_check=False)


def _with_stats(loss: Tensor, local: Any, mesh: Any, placements: Placements, leading: torch.Size) -> Any:
    """The loss with the statistics of the local loss, sharded as the rows."""
    placed = (_placed(values, "none", mesh, placements, leading) for values in local.stats)
    return type(local)(loss, type(local.stats)(*placed))


def _mean(total: Tensor, divisor: Tensor, z: Tensor, mesh: Any, placements: Placements) -> Tensor:
    """The mean; its sum and divisor share one reduction over the ranks. If no row counts: NaN with a gradient of 0."""
    from torch.distributed.tensor import DTensor, Replicate

    wide = torch.float64 if has_float64(z.device) else torch.float32
    pair: Any = _placed(torch.stack([total.to(wide), divisor.to(wide)]), "sum", mesh, placements, torch.Size())
    everywhere = [Replicate()] * mesh.ndim
    sums = pair.redistribute(placements=everywhere).to_local(grad_placements=everywhere)
    some = sums[1] != 0
    mean = sums[0] / torch.where(some, sums[1], 1.0) + torch.where(some, 0.0, torch.nan)
    dtype = torch.float32 if z.dtype in HALVES and autocast_is_on(z.device.type) else z.dtype
    return DTensor.from_local(mean.to(dtype), mesh, everywhere, run_check=False)
