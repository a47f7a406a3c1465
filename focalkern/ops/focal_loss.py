"""The fused focal and inverse focal loss."""

import math
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor
from torch.overrides import has_torch_function

from focalkern._arrays import as_tensor
from focalkern._checks import finite, integer, label, label_range, no_float8, reduction_code, reworded
from focalkern._types import LABELS, PLAIN_TENSORS, STEEPEST_INVERSE_GAMMA, Reduction
from focalkern.gamma import GammaTable
from focalkern.ops._backend import backend_for, has_kernels
from focalkern.ops._dtensor import is_dtensor, loss_over_mesh
from focalkern.ops._loss_extras import loss_with_extras
from focalkern.ops._loss_stats import LossWithStats
from focalkern.ops._row_loss import (
    FOCAL,
    Modulation,
    call_operator,
    check_modulation,
    check_shapes,
    check_tensor,
    check_types,
    kind_of,
    needs_float64,
    row_loss,
    warn_if_steep,
)
from focalkern.ops.focal_loss_vocab_parallel import extras_of, loss_of_slices

__all__ = ["check_labels", "focal_loss"]

_DFT = kind_of("confidence")


@overload
def focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = ...,
    *,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    label_smoothing: float = ...,
    detach_modulation: bool = ...,
    modulation: Modulation | None = ...,
    z_loss: float = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...
@overload
def focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = ...,
    *,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    label_smoothing: float = ...,
    detach_modulation: bool = ...,
    modulation: Modulation | None = ...,
    z_loss: float = ...,
    return_stats: Literal[True],
) -> LossWithStats: ...
@overload
def focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = ...,
    *,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    label_smoothing: float = ...,
    detach_modulation: bool = ...,
    modulation: Modulation | None = ...,
    z_loss: float = ...,
    return_stats: bool,
) -> Tensor | LossWithStats: ...
def focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = 2.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    detach_modulation: bool = False,
    modulation: Modulation | None = None,
    z_loss: float = 0.0,
    return_stats: bool = False,
) -> Tensor | LossWithStats:
    r"""Multiclass focal loss (gamma > 0), cross-entropy (gamma = 0) and inverse focal loss (gamma < 0) from logits.

    With p the softmax probability of the target class, u = 1 - p, phi = -p log p / u and psi = -p log p / (1 + p):

    .. math::
        \gamma \ge 0:\quad & L = -u^\gamma \log p, &
        \partial L / \partial z_j &= u^\gamma (1 + \gamma\phi)\,(p_j - [j = y]) \\
        \gamma < 0:\quad & L = -(1 + p)^{|\gamma|} \log p, &
        \partial L / \partial z_j &= (1 + p)^{|\gamma|} (1 - |\gamma|\psi)\,(p_j - [j = y])

    and in general, with t = (1 - e) target + e / C, class weights w and f the factor of log p above,
    ``L = -sum_i w_i t_i f(p_i) log p_i``. Everything but gamma is the contract of
    :func:`torch.nn.functional.cross_entropy`, and gamma = 0 is equal to it. One difference: a class without target
    mass, or with weight 0, contributes 0 even where its logit is -inf, for which torch returns NaN.

    Nothing is clamped and no epsilon is added: 1 - p is computed from the other classes, so the loss and its gradient
    keep full relative precision as p -> 1. float16, bfloat16 and float32 are computed in float32, float64 in float64;
    sums over samples in float64. The kernels give the same bits on every run, and on the CPU for every number of
    threads.

    Args:
        input: logits [C], [N, C] or [N, C, d1, ...], float16, bfloat16, float32 or float64, in any memory format. A
            DTensor gives a DTensor: rows may be sharded, or the classes, over which :func:`focal_loss_vocab_parallel`
            computes; ``target`` then has the placements of the rows, as in torch's ``loss_parallel``.
        target: labels of shape [], [N] or [N, d1, ...], int64, int32 or uint8; or class probabilities of the shape of
            ``input``, floating point. A float32 gradient p_j - t_j then has an error of up to 4e-6 (p_j + t_j). Pass
            float64 logits where every t_j is almost equal to p_j.
        gamma: a number; a floating-point tensor broadcastable to the unreduced loss [N, d1, ...]; or a
            :class:`GammaTable`, looked up at each p inside the kernel and treated as a constant. A tensor is
            differentiable: dL/dgamma = -u^gamma log(u) log(p), at gamma = 0 the derivative from the right. (The
            derivative is meant for bilevel optimisation. Minimising the training loss itself over gamma is degenerate,
            because dL/dgamma <= 0.) Below -3.591 the slope of the
            inverse focal loss changes sign near p = 0.28; a number below that causes a warning.
        weight: [C] class weights, floating point; not differentiable.
        ignore_index: label whose samples count neither in the loss nor in the mean. Label targets only.
        reduction: "none", "mean" or "sum". The mean divides by the summed weight of the samples that are not ignored
            (labels) or by N * d1 * ... (probabilities); over no sample it is NaN, with a zero gradient.
        label_smoothing: e in [0, 1]. Above 0.5, float32 logits are computed in float64, because the gradient p_j - t_j
            of similar logits would cancel.
        detach_modulation: treat the factor f as a constant; the gradient is then f * (p_j - [j = y]), and gamma has
            none.
        modulation: None, or "confidence": f(p) = p^gamma for gamma >= 0, with dL/dz_j = p^gamma (1 + gamma log p)
            (p_j - [j = y]). gamma = 1 with ``detach_modulation=True`` is dynamic fine-tuning (:class:`DFTLoss`). A
            negative gamma in a tensor or a table makes the loss NaN.
        z_loss: c >= 0: adds c lse^2 to the loss of each row, lse being the log-sum-exp of its logits, and
            2 c lse p_j to its gradient (the z-loss of PaLM, Liger's ``lse_square_scale``). Both are multiplied by what
            the row adds to the divisor of the mean: the class weight of its label, also with ``label_smoothing``; 1
            for class probabilities, because ``weight`` belongs to their classes and not to the row; 0 for an ignored
            row. So with ``weight`` the z-losses of labels and of their one-hot class probabilities differ. On the CPU
            and CUDA the passes of the loss compute it, and it adds a few operations per row; on CUDA class
            probabilities take one more read, forward. On other devices, and on the CPU for labels with ``modulation``,
            operations for slices of the classes compute both terms in one pass over the logits, forward and backward;
            for smoothing and class probabilities on other devices, and under torch.func, the z-loss takes one more
            pass each.
        return_stats: return the :class:`LossStats` of the rows too. Labels only. The kernels compute the
            statistics without another read of the logits, also in compiled graphs. Plain torch reads the logits once
            more for them. On other devices torch operations compute both in blocks.

    Returns:
        The loss, scalar or of shape [N, d1, ...], in the dtype of ``input`` (float32 for half-precision logits under
        autocast; with class probabilities of another dtype, what the two promote to). Differentiable to any order in
        ``input``, class-probability ``target`` and tensor ``gamma``. (In plain torch, without the kernels, second
        derivatives in float32 are wrong where a label's probability is within 1e-6 of 1: pass float64 logits.) With
        ``return_stats=True`` a :class:`LossWithStats` (loss, stats).

    Raises:
        TypeError: dtype or kind of an argument.
        ValueError: shape, value or device of an argument.
        IndexError: a label outside [0, C) that is not ``ignore_index``, with its row; under ``torch.func.vmap`` its
            place among all labels. On CUDA, where this check would synchronise the device, the loss and gradient of
            such a row are NaN; :func:`check_labels` and the environment variable FOCALKERN_VALIDATE=1 raise there.
        NotImplementedError: a device without a kernel.

    Source: Lin et al. 2017 (arXiv 1708.02002); Mukhoti et al. 2020 (arXiv 2002.09437); Wang et al., NeurIPS 2021
    (inverse); the sign rule of Ghosh et al., NeurIPS 2022; Wu et al. 2025 (arXiv 2508.05629, "confidence");
    Chowdhery et al. 2022 (arXiv 2204.02311, z-loss).

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]])
        >>> target = torch.tensor([0, 2])
        >>> fk.focal_loss(logits, target, gamma=2.0)
        tensor(0.5583)
        >>> fk.focal_loss(logits, target, gamma=0.0)  # torch.nn.functional.cross_entropy(logits, target)
        tensor(0.9251)
        >>> fk.focal_loss(logits, target, gamma=torch.tensor([1.0, 3.0]), reduction="none")  # per sample
        tensor([0.0265, 0.9052])
        >>> fk.focal_loss(logits, target, z_loss=1e-4, return_stats=True).stats.correct
        tensor([ True, False])
    """
    if type(input) is not Tensor and is_dtensor(input):
        extras = {"z_loss": z_loss, "return_stats": return_stats}
        given = (weight, ignore_index, reduction, label_smoothing, detach_modulation, modulation)
        return _over_mesh(input, target, gamma, *given, extras)
    if return_stats is not False or type(z_loss) is not float or z_loss:
        z_loss, return_stats = extras_of("focal_loss", z_loss, return_stats)
        if z_loss or return_stats:
            gamma = check_modulation("focal_loss", modulation, gamma)
            return loss_with_extras(
                "focal_loss",
                kind_of(modulation),
                input,
                target,
                gamma,
                weight=weight,
                ignore_index=ignore_index,
                reduction=reduction,
                label_smoothing=label_smoothing,
                detach_modulation=detach_modulation,
                z_loss=z_loss,
                return_stats=return_stats,
            )
    if modulation is not None:
        gamma = check_modulation("focal_loss", modulation, gamma)
        options = (weight, ignore_index, reduction, label_smoothing, detach_modulation)
        return row_loss("focal_loss", _DFT, input, target, gamma, 0.0, *options)
    code = reduction_code("focal_loss", reduction)
    more: tuple[int, float, bool] | tuple[()] = ()
    compiling = torch.compiler.is_compiling()
    if not compiling and type(input) in PLAIN_TENSORS and type(target) in PLAIN_TENSORS:
        function = backend_for(input).focal_loss
    else:
        if type(input) is not Tensor or type(target) is not Tensor:
            check_tensor("focal_loss", "input", input)
            check_tensor("focal_loss", "target", target)
        dispatched = (compiling or has_torch_function((input, target))) and has_kernels(input)
        if dispatched:
            function, more = call_operator, (FOCAL, 0.0, compiling)
        else:
            function = backend_for(input).focal_loss
        if compiling:
            check_shapes("focal_loss", FOCAL, input, target, gamma, weight)
    edges = None
    if isinstance(gamma, GammaTable):
        edges, gamma = gamma.edges, gamma.gammas
        if gamma.requires_grad:
            gamma = gamma.detach()
    elif not compiling and (type(gamma) is not float or not STEEPEST_INVERSE_GAMMA <= gamma < math.inf):
        gamma = _check_gamma(gamma)  # a compiled graph must not depend on the value of gamma
    arguments = (gamma, edges, weight, code, ignore_index, label_smoothing, detach_modulation, *more)
    try:
        if label_smoothing and needs_float64(input, target, label_smoothing):
            return function(input.double(), target, *arguments).to(input.dtype)
        return function(input, target, *arguments)
    except (
        TypeError,
        ValueError,
        IndexError,
        RuntimeError,
    ) as error:  # arguments are checked only after an error, for speed
        check_types("focal_loss", weight, ignore_index, label_smoothing, detach_modulation)
        raise reworded("focal_loss", error, input=input, target=target, gamma=gamma, weight=weight) from None


def _over_mesh(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    detach_modulation: bool,
    modulation: Modulation | None,
    extras: dict[str, Any],
) -> Tensor | LossWithStats:
    """The loss of logits that are a DTensor."""
    op = "focal_loss"
    gamma = check_modulation(op, modulation, gamma)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "detach_modulation": detach_modulation,
        **extras,
    }

    def local(z: Tensor, y: Tensor, gamma: Any, weight: Tensor | None, reduction: Any) -> Tensor | LossWithStats:
        given = {"weight": weight, "reduction": reduction, "modulation": modulation}
        found: Tensor | LossWithStats = focal_loss(z, y, gamma, **given, **options)
        return found

    def over_ranks(
        z: Tensor, y: Tensor, gamma: Any, weight: Tensor | None, reduction: Any, group: Any
    ) -> Tensor | LossWithStats:
        given = {"weight": weight, "reduction": reduction, **options}
        return loss_of_slices(op, kind_of(modulation), z, y, gamma, process_group=group, **given)

    return loss_over_mesh(op, local, over_ranks, input, target, gamma, weight, ignore_index, reduction)


def check_labels(target: Tensor | np.ndarray[Any, Any], n_classes: int, *, ignore_index: int = -100) -> None:
    """Raises unless every label is in [0, n_classes) or equal to ``ignore_index``.

    Use it for CUDA targets, whose labels :func:`focal_loss` does not check. It synchronises the device.

    Args:
        target: labels of any shape, int64, int32 or uint8; a tensor, or an array.
        n_classes: number of classes, at least 1.
        ignore_index: label of ignored samples, which is valid too.

    Raises:
        TypeError: ``target`` is not an integer tensor of these dtypes.
        ValueError: ``n_classes`` < 1.
        IndexError: names the first label out of range and its row (the index into the flattened target).

    Example:
        >>> labels = torch.tensor([0, 2, 7])
        >>> fk.check_labels(labels, n_classes=8)
        >>> fk.check_labels(labels, n_classes=3)
        Traceback (most recent call last):
            ...
        IndexError: check_labels: target must be in [0, 3) or ignore_index, got 7 at row 2
    """
    target = as_tensor(target, "check_labels: target")
    if target.dtype not in LABELS:
        raise TypeError(f"check_labels: target must be int64, int32 or uint8, got {target.dtype}")
    n_classes = integer("check_labels", "n_classes", n_classes, 1, 2**63 - 1)
    ignore_index = label("check_labels", "ignore_index", ignore_index)
    label_range("check_labels", target, n_classes, ignore_index)


def _check_gamma(gamma: object) -> float | Tensor:
    """Gamma if it is not an ordinary float: a tensor, an integer, or a float that is refused or causes a warning."""
    if isinstance(gamma, Tensor):
        no_float8("focal_loss", "gamma", gamma)
        return gamma
    found = finite("focal_loss", "gamma", gamma, "a number, a tensor or a GammaTable")
    warn_if_steep("focal_loss", found, stacklevel=4)
    return found
