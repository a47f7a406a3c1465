"""Poly-1 focal, dual focal, Brier and MMCE loss, which share the kernels of the focal loss."""

from typing import Any

from torch import Tensor

from focalkern._checks import labels_expected, no_float8, reduction_code, reworded
from focalkern._tracing import are_seen
from focalkern._types import PLAIN_TENSORS, Reduction
from focalkern.gamma import GammaTable
from focalkern.ops._backend import backend_for, fallback
from focalkern.ops._dtensor import is_dtensor, loss_over_mesh
from focalkern.ops._row_loss import finite_number, row_loss
from focalkern.ops.focal_loss_vocab_parallel import loss_of_slices
from focalkern.reference._softmax_losses import number_of

__all__ = ["brier_loss", "dual_focal_loss", "poly_focal_loss"]

_POLY_FOCAL, _DUAL_FOCAL, _BRIER = (number_of(name) for name in ("poly_focal_loss", "DualFocalLoss", "BrierLoss"))


def poly_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = 2.0,
    epsilon: float = 1.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Poly-1 focal loss from logits: the focal loss plus epsilon times the first term of its expansion in 1 - p.

    With p the softmax probability of the target class, u = 1 - p and phi = -p log p / u:

    .. math::
        L = -u^\gamma \log p + \epsilon u^{\gamma + 1}, \qquad
        \partial L / \partial z_j = u^\gamma (1 + \gamma\phi + \epsilon (\gamma + 1) p)\,(p_j - [j = y])

    gamma = 0 is Poly-1 cross-entropy, and epsilon = 0 the focal loss. The rest is as in :func:`focal_loss`: target,
    weight, ignore_index, reduction and label_smoothing, layouts and dtypes, derivatives of any order. For an epsilon
    near -1, the two terms do not cancel either.

    Args:
        input, target: as in :func:`focal_loss`.
        gamma: a number, at least 0; a floating-point tensor broadcastable to the unreduced loss; or a
            :class:`GammaTable`. A tensor is differentiable. A negative gamma in a tensor or a table makes the loss NaN.
        epsilon: a finite number. The paper searches about -1 to 8; below -1 the loss rises with p near 1.
        weight, ignore_index, reduction, label_smoothing: as in :func:`focal_loss`.

    Returns:
        The loss, scalar or of shape [N, d1, ...], in the dtype of ``input``.

    Raises:
        TypeError, ValueError, IndexError, NotImplementedError: as :func:`focal_loss`.

    Source: Leng et al., PolyLoss, ICLR 2022 (arXiv 2204.12511).

    Example:
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]]), torch.tensor([0, 2])
        >>> fk.poly_focal_loss(logits, target, gamma=2.0, epsilon=1.0)
        tensor(0.8296)
        >>> fk.poly_focal_loss(logits, target, gamma=2.0, epsilon=0.0), fk.focal_loss(logits, target, gamma=2.0)
        (tensor(0.5583), tensor(0.5583))
    """
    op = "poly_focal_loss"
    if not isinstance(gamma, Tensor | GammaTable):
        gamma = finite_number(op, "gamma", gamma, low=0.0)
    no_float8(op, "gamma", gamma)
    epsilon = finite_number(op, "epsilon", epsilon)
    options = (weight, ignore_index, reduction, label_smoothing, False)
    if type(input) is not Tensor and is_dtensor(input):
        return _over_mesh(op, _POLY_FOCAL, input, target, gamma, epsilon, *options)
    return row_loss(op, _POLY_FOCAL, input, target, gamma, epsilon, *options)


def dual_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float,
    *,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    label_smoothing: float,
    detach_modulation: bool,
) -> Tensor:
    """The operator of :class:`focalkern.DualFocalLoss`."""
    op = "DualFocalLoss"
    if isinstance(target, Tensor) and target.is_floating_point():
        raise labels_expected(op, input, target)
    options = (weight, ignore_index, reduction, label_smoothing, detach_modulation)
    if type(input) is not Tensor and is_dtensor(input):
        return _over_mesh(op, _DUAL_FOCAL, input, target, gamma, 0.0, *options)
    return row_loss(op, _DUAL_FOCAL, input, target, gamma, 0.0, *options)


def brier_loss(
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    label_smoothing: float,
) -> Tensor:
    """The operator of :class:`focalkern.BrierLoss`."""
    op, options = "BrierLoss", (weight, ignore_index, reduction, label_smoothing, False)
    if type(input) is not Tensor and is_dtensor(input):
        return _over_mesh(op, _BRIER, input, target, 0.0, 0.0, *options)
    return row_loss(op, _BRIER, input, target, 0.0, 0.0, *options)


def _over_mesh(
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
    """The loss of DTensor logits. The classes are gathered if the loss of a row needs more than the probability of its
    label."""

    def local(z: Tensor, y: Tensor, gamma: Any, weight: Tensor | None, reduction: str) -> Tensor:
        return row_loss(
            op, kind, z, y, gamma, epsilon, weight, ignore_index, reduction, label_smoothing, detach_modulation
        )

    def over_ranks(z: Tensor, y: Tensor, gamma: Any, weight: Tensor | None, reduction: str, group: Any) -> Any:
        options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
        return loss_of_slices(op, kind, z, y, gamma, process_group=group, epsilon=epsilon, **options)

    of_labels = kind == _POLY_FOCAL and label_smoothing == 0 and not target.is_floating_point()
    parts = (local, over_ranks if of_labels else None)
    found: Tensor = loss_over_mesh(op, *parts, input, target, gamma, weight, ignore_index, reduction)
    return found


def mmce_loss(
    input: Tensor,
    target: Tensor,
    coefficient: float,
    weighted: bool,
    bandwidth: float,
    reduction: Reduction,
    ignore_index: int,
) -> Tensor | None:
    """The operator of :class:`focalkern.MMCELoss` on the CPU, for labels without class weights and smoothing.

    Returns None for tensors without a kernel; the composite loss then computes the loss and raises the errors.
    """
    if are_seen() or type(input) not in PLAIN_TENSORS or type(target) not in PLAIN_TENSORS:
        return None
    kernels = backend_for(input)
    if not input.is_cpu or kernels is fallback:
        return None
    code = reduction_code("MMCELoss", reduction)
    try:
        result: Tensor = kernels.mmce_loss(input, target, coefficient, weighted, bandwidth, code, ignore_index)
    except (ValueError, IndexError) as error:
        raise reworded("MMCELoss", error, input=input, target=target) from None
    return result
