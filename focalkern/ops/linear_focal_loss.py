"""The focal loss of a linear layer, without holding all of its logits."""

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from focalkern._checks import reduction_code
from focalkern._tracing import functionalizes
from focalkern._types import HALVES, Reduction
from focalkern.fallback.focal_loss import check_range
from focalkern.gamma import GammaTable
from focalkern.ops._backend import has_kernels
from focalkern.ops._dtensor import is_dtensor, linear_loss_over_mesh
from focalkern.ops._linear_arguments import (
    are_few,
    check_gamma_shape,
    check_numbers,
    check_target,
    check_tensors,
    dtypes_of,
    fits_one_product,
    gamma_of,
)
from focalkern.ops._linear_autograd import loss_of
from focalkern.ops._linear_chunks import default_chunk_rows, is_plain, product_dtype
from focalkern.ops._linear_pass import NONE, Options, capped, check_labels
from focalkern.ops._linear_vocab_operator import linear_focal_loss_over_ranks
from focalkern.ops._linear_vocab_parallel import slice_of_dtensor
from focalkern.ops._loss_stats import LossStats, LossWithStats, stats_of
from focalkern.ops._row_loss import Modulation, check_modulation
from focalkern.ops.focal_loss import focal_loss
from focalkern.ops.focal_loss_vocab_parallel import extras_of, refuse_stats_of_probabilities

__all__ = ["linear_focal_loss"]

_OP = "linear_focal_loss"


@overload
def linear_focal_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = ...,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    label_smoothing: float = ...,
    detach_modulation: bool = ...,
    modulation: Modulation | None = ...,
    chunk_rows: int | None = ...,
    softcap: float | None = ...,
    process_group: Any = ...,
    reduce_input_grad: bool = ...,
    z_loss: float = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...
@overload
def linear_focal_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = ...,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    label_smoothing: float = ...,
    detach_modulation: bool = ...,
    modulation: Modulation | None = ...,
    chunk_rows: int | None = ...,
    softcap: float | None = ...,
    process_group: Any = ...,
    reduce_input_grad: bool = ...,
    z_loss: float = ...,
    return_stats: Literal[True],
) -> LossWithStats: ...
@overload
def linear_focal_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = ...,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    reduction: Reduction = ...,
    label_smoothing: float = ...,
    detach_modulation: bool = ...,
    modulation: Modulation | None = ...,
    chunk_rows: int | None = ...,
    softcap: float | None = ...,
    process_group: Any = ...,
    reduce_input_grad: bool = ...,
    z_loss: float = ...,
    return_stats: bool,
) -> Tensor | LossWithStats: ...
def linear_focal_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = 2.0,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    detach_modulation: bool = False,
    modulation: Modulation | None = None,
    chunk_rows: int | None = None,
    softcap: float | None = None,
    process_group: Any = None,
    reduce_input_grad: bool = True,
    z_loss: float = 0.0,
    return_stats: bool = False,
) -> Tensor | LossWithStats:
    r"""The focal loss of a linear layer's logits, without ever holding all of them.

    .. math:: L = \mathrm{focal\_loss}(z, \mathrm{target}, \gamma), \qquad z = x W^\top + b, \quad
        \text{with softcap } s\colon z = s \tanh((x W^\top + b) / s)

    up to rounding. With gamma = 0 it is :func:`torch.nn.functional.linear_cross_entropy`, option by option. Rows are
    processed in chunks. The logits of all chunks share one buffer, and their gradient overwrites it; no other memory
    grows with N * C. For "mean" and "sum" the forward pass also computes the gradients, with three matrix products in
    all (only those that are needed; one under ``no_grad``), and the first backward pass scales them in place. The
    logits are recomputed, chunk by chunk, in a second backward pass (``retain_graph``), for reduction "none", for
    second derivatives and under ``torch.func``.

    On the CPU rows with ``ignore_index`` are left out of the products and take no time. On CUDA, counting them would
    synchronise the device, so they stay in the products as zeros. If most rows are ignored, pass only the others:
    ``input[keep], target[keep]``, with ``keep`` computed where the batch is made.

    Args:
        input: [D], [N, D] or [B, S, D], float16, bfloat16, float32 or float64. If ``input``, ``linear_weight`` and
            ``linear_bias`` are DTensors of one mesh, the loss is a DTensor too. Rows of ``input`` and classes of the
            head may be sharded; if one mesh dimension shards both, as in sequence parallelism, the rows are gathered.
            ``target`` has the placements of the rows.
        linear_weight: [C, D], in the dtype of ``input`` (under autocast in any). A weight [C, d1, ..., D], for a
            K-dimensional head over an input [N, D], goes through :func:`focal_loss` with all its logits at once.
        target: labels of the shape of ``input`` without D (K-dimensional: [N, d1, ...]), int64, int32 or uint8; or
            class probabilities [C], [N, C] or [B, S, C] (K-dimensional: [N, C, d1, ...]), floating point.
        gamma: a number, a tensor broadcastable to the unreduced loss, or a :class:`GammaTable`, as in
            :func:`focal_loss`. Tensors are differentiable.
        linear_bias: [C], or [C, d1, ...].
        weight: [C] class weights; not differentiable.
        ignore_index: label whose rows count neither in the loss nor in the mean. Label targets only.
        reduction: "none", "mean" or "sum", as in :func:`focal_loss`.
        label_smoothing: e in [0, 1].
        detach_modulation: treat the factor of log p as a constant.
        modulation: None or "confidence", as in :func:`focal_loss`. With gamma = 1 and ``detach_modulation=True`` it is
            dynamic fine-tuning (DFT), for labels Liger's ``use_token_scaling=True``.
        chunk_rows: rows per chunk. By default the logits of a chunk take as much memory as the larger of ``input`` and
            half of the sum for the gradient of ``linear_weight``, and at most 256 MiB. On the CPU up to 1 MiB of
            float32 or float64 logits are computed at once, which is faster.
        softcap: s > 0: caps the logits at s in magnitude.
        process_group: the classes are split over its ranks. Rank r has the rows [C_r, D] of the weight (and of
            ``linear_bias``) that follow the rows of rank r - 1; C_r may differ between ranks. All other arguments are
            the same on all ranks; ``linear_weight`` may be a DTensor that is sharded over dimension 0. Every rank gets
            the same loss, bit by bit. The ranks exchange 24 bytes per row (see :func:`focal_loss_vocab_parallel`), and
            the gradient of ``input``. ``chunk_rows`` must be the same on every rank; by default it depends on D alone.
            Class probabilities are the slice [..., C_r] of the rank. The loss is differentiable once, and one operator
            of a compiled graph.
        reduce_input_grad: sum the gradient of ``input`` over the ranks. False returns each rank's partial gradient, for
            a caller that reduces it itself (sequence parallelism scatters it).
        z_loss: c >= 0: adds c lse^2 to the loss of each row, lse being the log-sum-exp of its logits, and
            2 c lse p_j to its gradient (the z-loss of PaLM, Liger's ``lse_square_scale``). Both have the class weight
            of the label, and the weight 1 for class probabilities, as in :func:`focal_loss`. It takes no matrix
            product and, with kernels, no further read of the logits. Exceptions: class probabilities take another read
            on CUDA; torch operations add the z-loss of labels with ``modulation`` and without smoothing on the CPU,
            and every z-loss in plain torch.
        return_stats: return the :class:`LossStats` of the rows too. Labels only. The kernels compute loss and
            statistics without another read of the logits; plain torch takes one.

    Returns:
        The loss, scalar or of the leading shape of ``input``, in the dtype of ``focal_loss(F.linear(...))``: the dtype
        of ``input``, or float32 for half-precision products under autocast. Products are computed in the dtype of
        ``input`` or of autocast. A processor without instructions for a half type computes them in float32, with a
        float32 copy of the weight. The gradient of a half-precision weight is summed in float32 over the chunks.
        Differentiable in ``input``, ``linear_weight``, ``linear_bias``, ``gamma`` and class probabilities, to any
        order; the second derivative also works chunk by chunk. Under ``torch.compile`` it is one operator of the graph.
        Forward-mode derivatives are an error: use ``focal_loss(F.linear(...))``. With ``return_stats=True`` a
        :class:`LossWithStats` (loss, stats), which torch.func does not transform.

    Raises:
        TypeError: dtype or kind of an argument.
        ValueError: shape, value or device of an argument.
        IndexError: a label outside [0, C) that is not ``ignore_index``, on the CPU; elsewhere as :func:`focal_loss`.

    Source: the chunks of torch.nn.functional.linear_cross_entropy and Liger-Kernel (Hsu et al. 2024, arXiv
    2410.10989); the loss of :func:`focal_loss`.

    Example:
        >>> hidden = torch.linspace(-1, 1, 8).reshape(2, 4)
        >>> head = torch.linspace(-2, 2, 20).reshape(5, 4)
        >>> target = torch.tensor([1, 4])
        >>> fk.linear_focal_loss(hidden, head, target, gamma=2.0)
        tensor(0.7996)
        >>> fk.focal_loss(hidden @ head.T, target, gamma=2.0)
        tensor(0.7996)
    """
    if (
        process_group is None
        and weight is None
        and modulation is None
        and chunk_rows is None
        and softcap is None
        and type(z_loss) is float
        and z_loss == 0
        and return_stats is False
    ):
        given: Any = (gamma, linear_bias, ignore_index, label_smoothing, detach_modulation)
        try:
            if fits_one_product(input, linear_weight, target, *given):
                return focal_loss(
                    F.linear(input, linear_weight, linear_bias),
                    target,
                    gamma,
                    ignore_index=ignore_index,
                    reduction=reduction,
                    label_smoothing=label_smoothing,
                    detach_modulation=detach_modulation,
                )
        except (TypeError, ValueError, IndexError, RuntimeError):
            pass  # the checks below name the invalid argument
    if process_group is None and is_dtensor(input):

        def local(
            x: Tensor, w: Tensor, b: Any, y: Tensor, gamma: Any, weight: Any, how: Any, group: Any
        ) -> Tensor | LossWithStats:
            return linear_focal_loss(
                x,
                w,
                y,
                gamma,
                linear_bias=b,
                weight=weight,
                ignore_index=ignore_index,
                reduction=how,
                label_smoothing=label_smoothing,
                detach_modulation=detach_modulation,
                modulation=modulation,
                chunk_rows=chunk_rows,
                softcap=softcap,
                process_group=group,
                reduce_input_grad=False,
                z_loss=z_loss,
                return_stats=return_stats,
            )

        heads = (input, linear_weight, linear_bias)
        return linear_loss_over_mesh(_OP, local, *heads, target, gamma, weight, ignore_index, reduction)
    code = reduction_code(_OP, reduction)  # MEAN, NONE or SUM
    check_numbers(ignore_index, label_smoothing, detach_modulation, chunk_rows, softcap)
    gamma = check_modulation(_OP, modulation, gamma)
    over_ranks = process_group is not None
    if over_ranks:
        linear_weight = slice_of_dtensor(linear_weight)
    check_tensors(input, linear_weight, target, linear_bias, weight, over_ranks)
    z_loss, return_stats = extras_of(_OP, z_loss, return_stats)
    refuse_stats_of_probabilities(_OP, target, return_stats)
    dtype, loss_dtype = dtypes_of(input, linear_weight, linear_bias)
    if over_ranks:
        if linear_weight.dim() > 2:
            raise ValueError(
                f"{_OP}: linear_weight must be [C_r, D] with process_group, got shape {list(linear_weight.shape)}; a "
                "K-dimensional head cannot be split over ranks"
            )
        loss, of_rows = linear_focal_loss_over_ranks(
            input,
            linear_weight,
            target,
            gamma,
            linear_bias=linear_bias,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
            modulation=modulation,
            chunk_rows=chunk_rows,
            softcap=0.0 if softcap is None else float(softcap),
            dtype=product_dtype(input.device, dtype),
            process_group=process_group,
            reduce_input_grad=reduce_input_grad,
            z_loss=z_loss,
            return_stats=return_stats,
        )
        return loss.to(loss_dtype) if of_rows is None else LossWithStats(loss.to(loss_dtype), of_rows)
    classes, leading = linear_weight.shape[0], input.shape[:-1]
    edges, gamma = gamma_of(gamma, input)
    check_target(target, leading, linear_weight.shape[:-1], ignore_index)
    check_gamma_shape(gamma, edges, [*leading, *linear_weight.shape[1:-1]])
    if torch._C._are_functorch_transforms_active():  # vmap calls the passes below once per sample
        check_range(_OP, target, classes, ignore_index)
    # Without kernels, and under a transform, a graph contains F.linear and focal_loss, which the compiler may fuse.
    compiling = torch.compiler.is_compiling()
    transformed = torch._C._are_functorch_transforms_active() and (compiling or return_stats or functionalizes())
    if target.is_floating_point():
        loss_dtype = torch.promote_types(loss_dtype, target.dtype)
    few = (
        not compiling
        and not torch._C._are_functorch_transforms_active()  # under vmap, any() has no Python value
        and chunk_rows is None
        and is_plain(input)
        and input.dtype == dtype == loss_dtype  # no autocast
        and dtype not in HALVES  # chunks round gradients of half types only once, after the sum over rows
        and are_few(input, linear_weight, target, ignore_index)
    )
    if linear_weight.dim() > 2 or transformed or few or (compiling and not has_kernels(input)):
        return _unfused(
            input,
            linear_weight,
            target,
            gamma if edges is None else GammaTable._unchecked(edges, gamma),
            linear_bias,
            None if softcap is None else float(softcap),
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
            modulation=modulation,
            z_loss=z_loss,
            return_stats=return_stats,
        )
    rows = input.reshape(-1, input.shape[-1])
    used = product_dtype(input.device, dtype)
    size = chunk_rows
    if size is None:  # in a compiled graph, whose rows may be dynamic, the operator chooses
        size = 0 if compiling else default_chunk_rows(rows.shape[0], rows.shape[1], classes, used.itemsize)
    targets = target.reshape(-1, classes) if target.is_floating_point() else target.reshape(-1)
    if edges is None and gamma.dim() > 0:
        gamma = gamma.expand(leading).reshape(-1)
    options = Options(
        reduction=code,
        ignore_index=int(ignore_index),
        label_smoothing=float(label_smoothing),
        detach_modulation=detach_modulation,
        modulation=modulation,
        softcap=0.0 if softcap is None else float(softcap),
        dtype=used,
        float64_loss=loss_dtype == torch.float64,
        chunk_rows=int(size),
        z_loss=z_loss,
    )
    loss, stats = loss_of((rows, linear_weight, linear_bias, targets, gamma, edges, weight), options, return_stats)
    if code == NONE:
        loss = loss.reshape(leading)
    loss = loss.to(loss_dtype)
    return LossWithStats(loss, stats_of(stats, leading)) if return_stats else loss


def _unfused(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    gamma: Tensor | GammaTable,
    linear_bias: Tensor | None,
    softcap: float | None,
    **options: Any,
) -> Tensor | LossWithStats:
    """All logits at once, classes last unless the head is K-dimensional."""
    features, head = linear_weight.shape[-1], linear_weight.shape[:-1]
    if len(head) > 1 and not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()):
        check_labels(target, head[0], options["ignore_index"])
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    z = capped(F.linear(input, linear_weight.reshape(-1, features), bias), softcap)
    if len(head) > 1:
        return focal_loss(z.reshape(-1, *head), target, gamma, **options)
    leading = input.shape[:-1]
    if isinstance(gamma, Tensor) and gamma.dim() > 0:
        gamma = gamma.expand(leading).reshape(-1)
    soft = target.is_floating_point()
    rows = target.reshape(-1, head[0]) if soft else target.reshape(-1)
    try:
        loss: Tensor | LossWithStats = focal_loss(z.reshape(-1, head[0]), rows, gamma, **options)
    except IndexError as error:  # a label out of range
        raise IndexError(str(error).replace("focal_loss", _OP, 1)) from None
    if isinstance(loss, Tensor):
        return loss.reshape(leading) if options["reduction"] == "none" else loss
    stats = LossStats(*(values.reshape(leading) for values in loss.stats))
    return LossWithStats(loss.loss.reshape(leading) if options["reduction"] == "none" else loss.loss, stats)
