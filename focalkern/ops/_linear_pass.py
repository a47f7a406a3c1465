"""One pass over the chunks of linear_focal_loss, outside of autograd: losses, gradients, and their reduction."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from focalkern._checks import label_range
from focalkern._devices import has_float64
from focalkern._types import compute_dtype
from focalkern.ops._linear_chunks import FLOAT16_SCALE, Head, blocks, is_plain
from focalkern.ops._row_kernels import (
    Block,
    Saved,
    Settings,
    gradients_with_extras,
    losses_of_rows,
    losses_with_extras,
    row_weights,
)
from focalkern.ops._row_loss import kind_of

__all__ = [
    "MEAN",
    "NONE",
    "NO_GRADIENTS",
    "OP",
    "SUM",
    "Gradients",
    "Needed",
    "Options",
    "Tensors",
    "capped",
    "cast_gradient",
    "check_labels",
    "divisor_of",
    "gradients_needed",
    "loss_and_gradients",
    "loss_dtype",
    "reduce_losses",
    "sum_gradients",
    "total_of",
]

OP = "linear_focal_loss"
NONE, MEAN, SUM = 0, 1, 2


@dataclass(frozen=True)
class Options:
    reduction: int
    ignore_index: int
    label_smoothing: float
    detach_modulation: bool
    modulation: str | None  # by name, because custom operators take strings
    softcap: float  # 0 for none
    dtype: torch.dtype  # of the products
    float64_loss: bool  # the loss is float64 although the logits are narrower: the target probabilities are float64
    chunk_rows: int
    z_loss: float
    # Gradients that _Gradient returns: of input, linear_weight, linear_bias, target, gamma.
    wanted: tuple[bool, bool, bool, bool, bool] = (False, False, False, False, False)
    stats: tuple[Tensor, ...] = ()  # fields [N] of row_statistics, which the forward pass fills


# input [N, D], linear_weight [C, D], linear_bias [C], target [N] or [N, C], gamma [], [N] or [n_bins], edges, weight
Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]
# of input, linear_weight, linear_bias, target, gamma
Needed = tuple[bool, bool, bool, bool, bool]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NO_GRADIENTS: Needed = (False, False, False, False, False)


def check_labels(target: Tensor, classes: int, ignore_index: int) -> None:
    """Checks the labels before any matrix product, if their values can be read without synchronising."""
    if target.is_floating_point() or not is_plain(target):
        return
    label_range(OP, target, classes, ignore_index)


def loss_dtype(options: Options) -> torch.dtype:
    return torch.float64 if options.float64_loss else compute_dtype(options.dtype)


def gradients_needed(tensors: Tensors, requires: Any, options: Options) -> Needed:
    """For each gradient, whether it is needed. Labels, tabulated gammas and gammas of a detached factor have none."""
    gamma_is_variable = tensors[5] is None and not options.detach_modulation
    return (
        bool(requires[0]),
        bool(requires[1]),
        bool(requires[2]),
        bool(requires[3]) and tensors[3].is_floating_point(),
        bool(requires[4]) and gamma_is_variable,
    )


def _cap_(z: Tensor, softcap: float) -> None:
    if softcap:
        z.div_(softcap).tanh_().mul_(softcap)


def _uncap_(grad: Tensor, z: Tensor, softcap: float) -> None:
    """Turns dL/d(capped logits) into dL/d(uncapped logits); z holds the capped ones: d capped = (1 - (z / s)^2) d z."""
    if softcap:
        slope = (z / softcap).square_().neg_().add_(1)
        grad.mul_(slope)


def loss_and_gradients(
    tensors: Tensors, options: Options, upstream: Tensor | None, needed: Needed
) -> tuple[Tensor, Gradients]:
    """Losses [N], and the gradients of ``sum(upstream * losses)``, chunk by chunk; upstream is [N] or one number. The
    gradients of weight, bias and gamma have the dtype in which they are summed; the gradient of gamma is per row."""
    input, linear_weight, bias, target, gamma, edges, weight = tensors
    real, soft = loss_dtype(options), target.is_floating_point()
    n_rows, classes = input.shape[0], linear_weight.shape[0]
    check_labels(target, classes, options.ignore_index)
    kept = None
    if not soft and is_plain(target) and is_plain(input):
        counts = target.long() != options.ignore_index
        if not bool(counts.all()):
            kept = counts.nonzero().squeeze(1)
    any_needed = any(needed)
    scale = FLOAT16_SCALE if options.dtype == torch.float16 and any_needed else 1.0
    head = Head(input, linear_weight, bias, options.dtype, options.chunk_rows, needed[:3], kept, scale)
    losses = torch.zeros(n_rows, dtype=real, device=input.device)
    grad_target = torch.zeros(target.shape, dtype=real, device=input.device) if needed[3] else None
    grad_gamma = torch.zeros(n_rows, dtype=real, device=input.device) if needed[4] else None
    if upstream is not None:
        upstream = upstream.to(real)
        upstream = (upstream * scale if scale != 1 else upstream).expand(n_rows)
    per_row = edges is None and (gamma.dim() > 0 or needed[4])
    gamma_rows = gamma.expand(n_rows) if per_row else gamma
    for rows, z in head.chunks():
        for block in blocks(z):
            where = head.rows_of(slice(rows.start + block.start, rows.start + block.stop))
            part = z[block]
            _cap_(part, options.softcap)
            logits = part.to(real) if options.float64_loss else part
            here = Block(logits, target[where], gamma_rows[where] if per_row else gamma, edges, weight)
            settings = Settings(
                options.ignore_index,
                options.label_smoothing,
                options.detach_modulation,
                kind=kind_of(options.modulation),
            )
            if options.z_loss or options.stats:
                losses[where], saved, of_rows = losses_with_extras(here, settings, options.z_loss, bool(options.stats))
                for field, values in zip(options.stats, of_rows, strict=True):
                    field[where] = values.to(field.dtype)
            else:
                losses[where], numbers = losses_of_rows(here, settings)
                saved = Saved(numbers)
            if not any_needed:
                continue
            assert upstream is not None
            grad, of_target, of_gamma = gradients_with_extras(
                upstream[where], here, settings, saved, (any(needed[:3]), needed[3], needed[4])
            )
            if any(needed[:3]):
                _uncap_(grad, part, options.softcap)
                part.copy_(grad)
            if grad_target is not None:
                grad_target[where] = of_target.to(real)
            if grad_gamma is not None:
                grad_gamma[where] = of_gamma.to(real)
        if any(needed[:3]):
            head.accumulate(rows, z)
    if scale != 1:
        for total in (grad_target, grad_gamma):
            if total is not None:
                total.div_(scale)
    return losses, (*head.finish(), grad_target, grad_gamma)


def total_of(losses: Tensor) -> Tensor:
    return losses.sum(dtype=torch.float64) if has_float64(losses.device) else losses.sum()


def divisor_of(target: Tensor, weight: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    """The divisor of the mean and its reciprocal for gradients. If no row counts, the reciprocal is 0."""
    shares, counts = row_weights(target, weight, options.ignore_index, loss_dtype(options))
    divisor = total_of(shares)
    return divisor, torch.where(counts.any(), divisor.reciprocal(), 0.0).to(loss_dtype(options))


def reduce_losses(losses: Tensor, target: Tensor, weight: Tensor | None, options: Options) -> Tensor:
    """The reduction of the losses in differentiable operations."""
    if options.reduction == NONE:
        return losses
    total = total_of(losses)
    if options.reduction == MEAN:
        divisor, reciprocal = divisor_of(target, weight, options)
        # If no row counts: NaN with a gradient of 0.
        total = torch.where(divisor == 0, total.detach() / divisor + total * reciprocal, total * (1 / divisor))
    return total.to(losses.dtype)


def cast_gradient(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    """A gradient in the dtype and shape of its tensor. The gradient of a broadcast gamma is summed to its shape."""
    if gradient is None or like is None:
        return None
    return gradient.sum_to_size(like.shape).to(like.dtype)


def capped(z: Tensor, softcap: float | None) -> Tensor:
    return softcap * torch.tanh(z / softcap) if softcap else z


def sum_gradients(tensors: Tensors, options: Options) -> tuple[Tensor, Gradients]:
    """Losses per row and the gradients of their sum."""
    one = torch.ones((), dtype=loss_dtype(options), device=tensors[0].device) if any(options.wanted) else None
    return loss_and_gradients(tensors, options, one, options.wanted)
