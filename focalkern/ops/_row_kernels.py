"""Losses and gradients of a block of rows outside of autograd: by the kernels of focal_loss, or by plain torch.

Logits are [n, C]; labels and all other numbers per row are [n]. Results are float32, or float64 for float64 logits.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from focalkern._tracing import are_seen
from focalkern._types import PLAIN_TENSORS, compute_dtype
from focalkern.gamma import GammaTable
from focalkern.ops._backend import backend_for, fallback, has_kernels
from focalkern.ops._row_loss import kind_of, needs_float64, row_loss
from focalkern.ops.row_sums import statistics_of_input

__all__ = [
    "Block",
    "Saved",
    "Settings",
    "adds_z_loss",
    "forward_with_extras",
    "gradients_of_rows",
    "gradients_with_extras",
    "losses_of_margins",
    "losses_of_rows",
    "losses_with_extras",
    "row_weights",
    "slice_gradient",
    "slice_statistics",
]

_NO_REDUCTION = 0


class Block(NamedTuple):
    """Rows of logits with their options, in the order of the operators' arguments."""

    logits: Tensor  # [n, C]
    target: Tensor  # [n] labels, or [n, C] probabilities
    gamma: Tensor  # [], [n], or [n_bins] of a table
    edges: Tensor | None = None  # [n_bins + 1] of a table
    weight: Tensor | None = None  # [C]


class Settings(NamedTuple):
    """Options of the loss, in the order of the operators' arguments."""

    ignore_index: int
    label_smoothing: float
    detach_modulation: bool
    float32_loss: bool = True
    kind: int = kind_of(None)
    epsilon: float = 0.0


class Saved(NamedTuple):
    """Numbers of the forward pass for the gradients."""

    numbers: Tensor | None  # of the kernel, for the gradients in logits and target; None in plain torch
    of_gamma: Tensor | None = None  # of the kernel, for the gradient in gamma, if they differ
    lse: Tensor | None = None  # [n], if the kernel's numbers lack the z-loss
    of_lse: Tensor | None = None  # [n] 2 c w lse, its derivative in lse


def losses_of_rows(block: Block, settings: Settings) -> tuple[Tensor, Tensor | None]:
    """The losses [n], and the saved numbers that :func:`gradients_of_rows` needs (None in plain torch)."""
    if needs_float64(block.logits, block.target, settings.label_smoothing):
        losses, saved = losses_of_rows(block._replace(logits=block.logits.double()), settings)
        return losses.to(block.logits.dtype), saved
    if has_kernels(block.logits):
        losses, saved = torch.ops.focalkern.focal_loss_forward(*block, _NO_REDUCTION, *settings)
        return losses, saved
    return _plain_losses(block, settings), None


def gradients_of_rows(
    upstream: Tensor, block: Block, settings: Settings, saved: Tensor | None, needed: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of sum(upstream * losses) in logits, target and gamma; those that are not needed are undefined."""
    if needs_float64(block.logits, block.target, settings.label_smoothing):
        wide = block._replace(logits=block.logits.double())
        exact = gradients_of_rows(upstream.double(), wide, settings, saved, needed)
        return exact[0].to(block.logits.dtype), exact[1].to(block.logits.dtype), exact[2].to(block.logits.dtype)
    if saved is not None:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.focalkern.focal_loss_backward(
            upstream, *block, saved, _NO_REDUCTION, *settings[:3], list(needed), *settings[4:]
        )
        return found
    with _recording():
        real = compute_dtype(block.logits.dtype)
        variables = [
            tensor.detach().to(real).requires_grad_() if need else tensor
            for tensor, need in zip(block[:3], needed, strict=True)
        ]
        losses = _plain_losses(block._replace(logits=variables[0], target=variables[1], gamma=variables[2]), settings)
        wanted = [variable for variable, need in zip(variables, needed, strict=True) if need]
        gradients = iter(torch.autograd.grad(losses, wanted, upstream))
    nothing = upstream.new_empty(0)
    of_logits, of_target, of_gamma = (next(gradients) if need else nothing for need in needed)
    return of_logits, of_target, of_gamma


def adds_z_loss(kind: int, input: Tensor, target: Tensor, label_smoothing: float) -> bool:
    """Whether the kernels save numbers to which :func:`forward_with_extras` can add those of the z-loss."""
    soft = target.is_floating_point() or label_smoothing > 0
    return (input.is_cuda or (input.is_cpu and (kind == kind_of(None) or soft))) and has_kernels(input)


def forward_with_extras(
    block: Block, reduction: int, settings: Settings, z_loss: float, return_stats: bool
) -> tuple[Tensor, Saved, tuple[Tensor, ...]]:
    """The loss by the kernels plus ``z_loss`` lse^2 (if :func:`adds_z_loss`), the saved numbers of both, and, if asked
    for, the statistics. Logits are [C], [N, C] or [N, C, ...]."""
    logits, target = block.logits, block.target
    soft = target.is_floating_point() or settings.label_smoothing > 0
    is_plain = type(logits) in PLAIN_TENSORS and not are_seen()
    of_rows: tuple[Tensor, ...] = ()
    if return_stats or (z_loss != 0 and soft and not logits.is_cpu):
        together = _loss_and_statistics if is_plain else torch.ops.focalkern.row_loss_with_statistics
        loss, saved, *rest = together(*block, reduction, *settings[:3], settings.kind)
        of_rows = tuple(rest)
    else:
        loss, saved = torch.ops.focalkern.focal_loss_forward(*block, reduction, *settings)
    if not z_loss:
        return loss, Saved(saved), of_rows
    arguments = (loss, saved, logits, target, block.weight, settings.ignore_index, soft, reduction, z_loss)
    if logits.is_cpu:
        backend: Any = backend_for(logits) if is_plain else fallback
        loss, edited = backend.z_loss(*arguments)
    else:
        loss, edited = fallback.z_loss(*arguments, of_rows[2] if soft else None)
    # On the CPU the derivative in gamma of labels without smoothing needs the numbers of the row loss.
    return loss, Saved(edited, saved if logits.is_cpu and not soft else None), of_rows if return_stats else ()


def _loss_and_statistics(
    input: Tensor,
    target: Tensor,
    gamma: Tensor,
    edges: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    detach_modulation: bool,
    kind: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss in the dtype of the computation, its saved numbers, and the statistics of the rows, by the kernels: for
    labels from one read of the logits."""
    tensors, options = (input, target, gamma, edges, weight), (reduction, ignore_index, label_smoothing)
    backend: Any = backend_for(input)
    found = backend.row_loss_with_statistics(*tensors, *options, detach_modulation, kind, True)
    if found is not None:
        return (*found[:2], *found[2])
    loss, saved = torch.ops.focalkern.focal_loss_forward(*tensors, *options, detach_modulation, True, kind)
    return loss, saved, *statistics_of_input(input, target, ignore_index)


def _empty_loss_and_statistics(input: Tensor, target: Tensor, *given: Any) -> Any:
    *arguments, kind = given
    loss, saved = torch.ops.focalkern.focal_loss_forward(input, target, *arguments, True, kind)
    return loss, saved, *statistics_of_input(input, target, -100)


# A compiled graph holds this operator. The caller has its derivatives.
_operator = torch.library.custom_op("focalkern::row_loss_with_statistics", _loss_and_statistics, mutates_args=())
_operator.register_fake(_empty_loss_and_statistics)


def losses_with_extras(
    block: Block, settings: Settings, z_loss: float, return_stats: bool
) -> tuple[Tensor, Saved, tuple[Tensor, ...]]:
    """The losses [n] plus ``z_loss`` w lse^2 with the weight w of the label, the saved numbers of both, and, if asked
    for, the statistics of the rows."""
    logits, target, *_, weight = block
    if needs_float64(logits, target, settings.label_smoothing):
        wide = block._replace(logits=logits.double())
        losses, numbers, statistics = losses_with_extras(wide, settings, z_loss, return_stats)
        return losses.to(logits.dtype), numbers, statistics
    adds = not z_loss or adds_z_loss(settings.kind, logits, target, settings.label_smoothing)
    if has_kernels(logits):
        of_kernels = (z_loss, return_stats) if adds else (0.0, True)
        losses, saved, statistics = forward_with_extras(block, _NO_REDUCTION, settings, *of_kernels)
    else:
        losses, saved = _plain_losses(block, settings), Saved(None)
        statistics = statistics_of_input(logits, target, settings.ignore_index)
    if not adds:
        lse = statistics[2]
        of_lse = z_loss * row_weights(target, weight, settings.ignore_index, lse.dtype)[0] * lse
        losses, saved = losses + of_lse * lse, saved._replace(lse=lse, of_lse=2.0 * of_lse)
    return losses, saved, statistics if return_stats else ()


def gradients_with_extras(
    upstream: Tensor, block: Block, settings: Settings, saved: Saved, needed: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`gradients_of_rows`, from what :func:`losses_with_extras` saved."""
    if saved.lse is not None and saved.of_lse is not None:
        z = block.logits.to(saved.lse.dtype)  # the sum of both gradients is rounded once
        found = gradients_of_rows(upstream.to(z.dtype), block._replace(logits=z), settings, saved.numbers, needed)
        if needed[0]:
            slope = (upstream * saved.of_lse).unsqueeze(1)
            found[0].add_(torch.where(slope == 0, 0.0, slope * (z - saved.lse.unsqueeze(1)).exp()))
        return found
    apart = needed[2] and saved.of_gamma is not None
    of_logits, of_target, of_gamma = gradients_of_rows(
        upstream, block, settings, saved.numbers, (needed[0], needed[1], needed[2] and not apart)
    )
    if apart:
        of_gamma = gradients_of_rows(upstream, block, settings, saved.of_gamma, (False, False, True))[2]
    return of_logits, of_target, of_gamma


def row_weights(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weight of each row [N] in the z-loss and in the divisor of the mean, and whether the row counts. A row of
    class probabilities has the weight 1."""
    if target.is_floating_point():
        every = torch.ones(target.shape[:1], dtype=dtype, device=target.device)
        return every, every > 0
    counts = target.long() != ignore_index
    if weight is None:
        return counts.to(dtype), counts
    index = torch.where((target >= 0) & (target < len(weight)), target, 0).long()
    return torch.where(counts, weight.to(dtype)[index], 0.0), counts


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Enables autograd, also inside a custom operator, where torch excludes the autograd dispatch keys."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if not torch.compiler.is_compiling():
            for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
                stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
            # The hooks of a checkpoint around the loss would run all of it again to unpack what is saved here.
            # Transforms of torch.func refuse hooks.
            if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _plain_losses(block: Block, settings: Settings) -> Tensor:
    logits, target, gamma, edges, weight = block
    real = compute_dtype(logits.dtype)
    return row_loss(
        "focal_loss",
        settings.kind,
        logits.to(real),
        target.to(real) if target.is_floating_point() else target,
        gamma if edges is None else GammaTable._unchecked(edges, gamma),
        settings.epsilon,
        weight,
        settings.ignore_index,
        "none",
        settings.label_smoothing,
        settings.detach_modulation,
    )


def losses_of_margins(
    margin: Tensor, gamma: float | Tensor | GammaTable, settings: Settings, needs_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, its derivative in d and, if needed, in gamma, all [n] float64, from d = log(1 - p) - log p of each row.
    They are those of a row with the two logits (-d, 0)."""
    # A row with one possible class has d = -inf. The clamp changes no value, because e^-_FAR is 0 in float64.
    d = margin.double().clamp(min=-_FAR)
    edges, device = None, d.device
    if isinstance(gamma, GammaTable):
        edges, gamma = gamma.edges, gamma.gammas
    elif isinstance(gamma, Tensor):
        gamma = gamma.double()
        gamma = gamma.expand(len(d)) if needs_gamma else gamma
    else:
        gamma = torch.tensor(gamma, dtype=torch.float64, device="cpu")
    first = torch.zeros(len(d), dtype=torch.int64, device=device)
    block = Block(torch.stack([-d, torch.zeros_like(d)], dim=1), first, gamma.detach(), edges)
    losses, saved = losses_of_rows(block, settings)
    found = gradients_of_rows(torch.ones_like(d), block, settings, saved, (True, False, needs_gamma))
    return losses, -found[0][:, 0], found[2] if needs_gamma else torch.zeros_like(d)


_FAR = 1e4


# ---- cross-entropy of a slice of the classes -------------------------------------------------------------------------


def _cross_entropy(logits: Tensor, label: Tensor) -> Block:
    return Block(logits, label, torch.zeros((), dtype=torch.float64, device="cpu"))


def slice_statistics(logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row, in float64: m, the largest logit or the label's logit; log sum_j exp(z_j - m); and log(1 - p) of
    the label."""
    if has_kernels(logits):
        block = _cross_entropy(logits, label)
        saved = torch.ops.focalkern.focal_loss_forward(*block, _NO_REDUCTION, -100, 0.0, False, True)[1].double()
        top, log_sum, log_u = saved[:-1].view(3, -1)
        if logits.is_cpu:  # saves 1 / sum_j exp(z_j - top), and minus the sum over the classes other than the label
            inv_sum_exp, minus_others = log_sum, log_u
            return top, -inv_sum_exp.log(), (-minus_others * inv_sum_exp).log()
        return top, log_sum, log_u
    z = logits.double()
    top = z.amax(1)
    shifted = z - torch.where(top == -torch.inf, 0.0, top).unsqueeze(1)
    is_label = torch.arange(z.shape[1], device=z.device) == label.unsqueeze(1)
    log_sum = shifted.logsumexp(1)
    rest = torch.where(is_label, -torch.inf, shifted).logsumexp(1)
    return top, log_sum, rest - log_sum


def slice_gradient(scale: Tensor, logits: Tensor, label: Tensor, top: Tensor, log_sum: Tensor, log_u: Tensor) -> Tensor:
    """scale * (p_j - [j = label]) with p_j = exp(z_j - top - log_sum); at the label it is -scale * exp(log_u), which
    does not cancel. If scale is 0 the result is 0 for any logits, NaN too. All arguments but the logits are float64;
    the result has the dtype of the logits, or a wider one."""
    real = compute_dtype(logits.dtype)
    if has_kernels(logits):
        numbers = (top, log_sum, log_u)
        if logits.is_cpu:
            # The logits of this slice may be far below those of other slices. Then exp(log_sum) would overflow, and
            # exp(-log_sum), which the kernel multiplies, would underflow even earlier. Add log_sum to top instead.
            is_far = log_sum > 30
            near = torch.where(is_far, 0.0, log_sum)
            numbers = (torch.where(is_far, top + log_sum, top), (-near).exp(), -(near + log_u).exp())
        saved = torch.cat([*numbers, top.new_ones(1)]).to(real)
        gradient: Tensor = torch.ops.focalkern.focal_loss_backward(
            scale.to(real),
            *_cross_entropy(logits, label),
            saved,
            _NO_REDUCTION,
            -100,
            0.0,
            False,
            [True, False, False],
        )[0]
        return gradient
    p = ((logits.double() - top.unsqueeze(1)) - log_sum.unsqueeze(1)).exp()
    is_label = torch.arange(logits.shape[1], device=logits.device) == label.unsqueeze(1)
    gradient = scale.unsqueeze(1) * torch.where(is_label, -log_u.exp().unsqueeze(1), p)
    return torch.where(scale.unsqueeze(1) == 0, 0.0, gradient).to(real)
