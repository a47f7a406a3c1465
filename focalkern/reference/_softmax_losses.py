"""The losses of the softmax of a row and its target: their definitions, and a table of their properties.

The operators, the fallback, the tests, the CUDA cases, the instruction counts, the benchmarks and the reference page
read the properties of a loss from the table. csrc/math/row_losses.def is the list of the compiled module."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from focalkern._types import compute_dtype
from focalkern.gamma import GammaTable
from focalkern.reference._log_space import log_softmax_and_complement
from focalkern.reference._rows import gamma_tensor, modulating_factor, one_hot, reduce_classes, reduce_rows, times_log

__all__ = [
    "ROW_LOSSES",
    "RowLossSpec",
    "brier_loss",
    "dual_focal_loss",
    "focal_loss",
    "number_of",
    "poly_focal_loss",
    "row_loss_of",
    "take_numbers",
]


def focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = 2.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    detach_modulation: bool = False,
    modulation: Literal["confidence"] | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    r"""Focal loss (inverse focal for gamma < 0); cross-entropy for gamma = 0.

    .. math::
        L = -\sum_i w_i t_i f(p_i) \log p_i, \qquad
        f(p) = (1 - p)^\gamma \text{ for } \gamma \ge 0, \quad (1 + p)^{|\gamma|} \text{ for } \gamma < 0

    with t = (1 - e) onehot(target) + e / C, or (1 - e) target + e / C for probability targets.

    Args:
        input: logits (C), (N, C) or (N, C, d1, ...), floating point.
        target: class indices, the shape of ``input`` without its class axis; or probabilities, the shape of ``input``.
        gamma: a number; a tensor broadcastable to the unreduced loss; or a table, looked up at each p without gradient.
        weight: [C], the class weights w.
        ignore_index: index targets equal to it contribute nothing.
        reduction: ``"none"``, ``"sum"``, or ``"mean"``: the sum over the summed weight of the valid targets (index
            targets) or over their number (probability targets).
        label_smoothing: e in [0, 1].
        detach_modulation: take f(p) as a constant.
        modulation: None, or ``"confidence"``: f(p) = p^gamma, gamma >= 0; below, the loss is NaN.
        z_loss: c: adds c times the squared log-sum-exp to each row, times the row's weight in the mean.

    Returns:
        The loss: a scalar, or [N, d1, ...] unreduced; in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.focal_loss(logits, torch.tensor([0]), gamma=2.0)
        tensor(0.0041, dtype=torch.float64)
    """
    z = input.to(compute_dtype(input.dtype)).movedim(0 if input.dim() == 1 else 1, -1)
    log_p, log_u = log_softmax_and_complement(z)

    factor_of = modulating_factor if modulation is None else confidence_factor
    factor = factor_of(log_p, log_u, gamma_tensor(gamma, log_p.exp()))
    if detach_modulation:
        factor = factor.detach()
    class_loss = -times_log(factor, log_p)
    loss = reduce_classes(class_loss, input, target, weight, ignore_index, reduction, label_smoothing)
    if z_loss:
        square = z_loss * torch.logsumexp(z, -1).square()
        if target.is_floating_point():
            return loss + reduce_rows(square, input, None, reduction)
        # As the loss of every class, the term gets the weight of the label, and ignore_index.
        of_class = square.unsqueeze(-1).expand_as(class_loss)
        loss = loss + reduce_classes(of_class, input, target, weight, ignore_index, reduction, 0.0)
    return loss


def confidence_factor(log_p: Tensor, log_u: Tensor, gamma: Tensor) -> Tensor:
    """f(p) = p^gamma for gamma >= 0, with 0^0 = 1; NaN for gamma < 0. log_u is not used."""
    # At p = 0 the derivatives in p and gamma are defined as 0; computed, they would be 0 * inf.
    absent = log_p == -torch.inf
    at_zero = torch.where(gamma > 0, 0.0, torch.where(gamma == 0, 1.0, torch.nan)).to(log_p.dtype)
    factor = torch.where(absent, at_zero, (gamma * torch.where(absent, 0.0, log_p)).exp())
    return torch.where(gamma < 0, torch.nan, factor)


def poly_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = 2.0,
    epsilon: float = 1.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Poly-1 focal loss, gamma >= 0.

    .. math:: L = \sum_i w_i t_i \left(-(1 - p_i)^\gamma \log p_i + \epsilon (1 - p_i)^{\gamma + 1}\right)

    Args:
        input: logits (C), (N, C) or (N, C, d1, ...), floating point.
        target: class indices, the shape of ``input`` without its class axis; or probabilities, the shape of ``input``.
        gamma: as of :func:`focal_loss`, >= 0; below, the loss is NaN.
        epsilon: the weight of the second term.
        weight: [C], the class weights w.
        ignore_index: index targets equal to it contribute nothing.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, as of :func:`focal_loss`.
        label_smoothing: e in [0, 1].

    Returns:
        The loss: a scalar, or [N, d1, ...] unreduced; in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.poly_focal_loss(logits, torch.tensor([0]), gamma=2.0, epsilon=1.0)
        tensor(0.0080, dtype=torch.float64)
    """
    z = input.to(compute_dtype(input.dtype)).movedim(0 if input.dim() == 1 else 1, -1)
    log_p, log_u = log_softmax_and_complement(z)
    gamma = gamma_tensor(gamma, log_p.exp())
    class_loss = modulating_factor(log_p, log_u, gamma) * (epsilon * log_u.exp() - log_p)
    class_loss = torch.where(gamma < 0, torch.nan, class_loss)
    return reduce_classes(class_loss, input, target, weight, ignore_index, reduction, label_smoothing)


def dual_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor | GammaTable = 5.0,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    detach_modulation: bool = False,
) -> Tensor:
    r"""Dual focal loss of labels.

    .. math:: L = -\sum_i w_i t_i (1 - p_i + p_{j(i)})^\gamma \log p_i

    p_j(i) is the largest probability strictly below p_i, of equal ones the first; 0 if there is none.

    Args:
        input: logits (C), (N, C) or (N, C, d1, ...), floating point.
        target: class indices, the shape of ``input`` without its class axis.
        gamma: as of :func:`focal_loss`, >= 0.
        weight: [C], the class weights w.
        ignore_index: index targets equal to it contribute nothing.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, as of :func:`focal_loss`.
        label_smoothing: e in [0, 1].
        detach_modulation: take the factor of log p as a constant.

    Returns:
        The loss: a scalar, or [N, d1, ...] unreduced; in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.dual_focal_loss(logits, torch.tensor([0]), gamma=5.0)
        tensor(0.0002, dtype=torch.float64)
    """
    z = input.to(compute_dtype(input.dtype)).movedim(0 if input.dim() == 1 else 1, -1)
    log_p, log_u = log_softmax_and_complement(z)
    # Ascending, equal logits in reverse: the next lower class then directly precedes all classes with the same logit.
    ascending, order = z.detach().flip(-1).sort(dim=-1, stable=True)
    n_below = torch.searchsorted(ascending.contiguous(), z.detach().contiguous())
    in_order = log_p.gather(-1, z.shape[-1] - 1 - order)
    log_p_below = torch.nn.functional.pad(in_order, (1, 0), value=_NOTHING).gather(-1, n_below).clamp(min=_NOTHING)
    # log(u + p_below), where p_below <= u = 1 - p. (logaddexp has no second derivative for p_below = 0.)
    log_u = log_u.clamp(min=_NOTHING)
    log_m = log_u - torch.nn.functional.logsigmoid(log_u - log_p_below)
    factor = (gamma_tensor(gamma, log_p.exp()) * log_m).exp()
    if detach_modulation:
        factor = factor.detach()
    # At p = 0 the derivative of the factor times log p is 0; computed, it would be 0 * inf.
    class_loss = -torch.where(log_p == -torch.inf, 1.0, factor) * log_p
    return reduce_classes(class_loss, input, target, weight, ignore_index, reduction, label_smoothing)


# Stands for log 0, because -inf - (-inf) would be NaN.
_NOTHING = -1e30


def brier_loss(
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    r"""Brier score of the softmax.

    .. math:: L = w \sum_k (p_k - t_k)^2

    with w the weight of the label, or the mean of the class weights under the target probabilities.

    Args:
        input: logits (C), (N, C) or (N, C, d1, ...), floating point.
        target: class indices, the shape of ``input`` without its class axis; or probabilities, the shape of ``input``.
        weight: [C], the class weights w.
        ignore_index: index targets equal to it contribute nothing.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, as of :func:`focal_loss`.
        label_smoothing: e in [0, 1].

    Returns:
        The loss: a scalar, or [N, d1, ...] unreduced; in ``input``'s dtype, float32 under autocast.

    Raises:
        RuntimeError: shapes that do not fit. Nothing else is checked.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
        >>> fk.reference.brier_loss(logits, torch.tensor([0]))
        tensor(0.0392, dtype=torch.float64)
    """
    class_dim = 0 if input.dim() == 1 else 1
    z = input.to(compute_dtype(input.dtype)).movedim(class_dim, -1)
    log_p, log_u = log_softmax_and_complement(z)
    if target.is_floating_point():
        given, valid = target.to(z.dtype).movedim(class_dim, -1), None
    else:
        valid, given = one_hot(target, z, ignore_index)
    t = (1.0 - label_smoothing) * given + label_smoothing / z.shape[-1]
    # If p and t are both near 1, p - t is computed as (1 - t) - (1 - p), which does not cancel.
    p = log_p.exp()
    loss = torch.where(p > 0.5, (1.0 - t) - log_u.exp(), p - t).square().sum(-1)
    row_weight = torch.ones_like(loss) if weight is None else (weight.to(z.dtype) * given).sum(-1)
    loss = row_weight * loss
    if valid is None:
        return reduce_rows(loss, input, None, reduction)
    return reduce_rows(torch.where(valid, loss, 0.0), input, torch.where(valid, row_weight, 0.0), reduction)


@dataclass(frozen=True)
class RowLossSpec:
    """The properties of a loss of rows. Tests, cases and benchmarks select losses by property, never by name."""

    name: str  # in error messages, and in csrc/math/row_losses.def
    short: str  # in the names of cases, counts and benchmarks
    definition: Callable[..., Tensor]  # of this file
    module: str  # the class, in focalkern
    parameters: tuple[Literal["gamma", "epsilon"], ...] = ()  # of the definition, beside the options of cross-entropy
    example: Mapping[str, Any] = field(default_factory=dict)  # arguments of the module, with which tests compute
    # For losses -f log p, the factor f(log p, log(1 - p), gamma); with labels only one class's probability is needed.
    factor: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    modulation: str | None = ""  # of the focal losses: the argument of that name; "" for the others
    detachable: bool = False  # it takes detach_modulation
    soft_target: bool = True  # it takes class probabilities
    smooths_on_cpu: bool = False  # the CPU has kernels for label smoothing although soft_target is False
    has_inverse: bool = False  # a negative gamma has a formula of its own; otherwise its loss is NaN
    infinite_at_zero: bool = True  # the loss of a target with probability 0
    keeps_class: bool = False  # a class besides the target has a special gradient; each row saves its index
    of_batch: bool = False  # the module adds a term of the whole batch, which the definition does not contain

    def has_kernel(self, label_smoothing: float, device_type: str) -> bool:
        """Whether the kernels for this device compute the loss of labels with this smoothing."""
        return label_smoothing == 0 or self.smooths_on(device_type)

    def smooths_on(self, device_type: str) -> bool:
        """Whether the kernels for this device smooth the labels of the loss."""
        return self.soft_target or (self.smooths_on_cpu and device_type != "cuda")

    def loss(
        self,
        input: Tensor,
        target: Tensor,
        gamma: float | Tensor | GammaTable,
        epsilon: float,
        detach_modulation: bool = False,
        **options: Any,
    ) -> Tensor:
        """Calls the definition with those arguments of the operator that it accepts."""
        values = {"gamma": gamma, "epsilon": epsilon}
        given: dict[str, Any] = {name: values[name] for name in self.parameters}
        if self.detachable:
            given["detach_modulation"] = detach_modulation
        return self.definition(input, target, **given, **options)


ROW_LOSSES: dict[str, RowLossSpec] = {
    spec.name: spec
    for spec in (
        RowLossSpec(
            name="focal_loss",
            short="focal",
            definition=focal_loss,
            module="FocalLoss",
            parameters=("gamma",),
            example={"gamma": 2.0},
            factor=modulating_factor,
            modulation=None,
            detachable=True,
            has_inverse=True,
        ),
        RowLossSpec(
            name="poly_focal_loss",
            short="poly",
            definition=poly_focal_loss,
            module="PolyFocalLoss",
            parameters=("gamma", "epsilon"),
            example={"gamma": 2.0, "epsilon": 1.5},
        ),
        RowLossSpec(
            name="DualFocalLoss",
            short="dual",
            definition=dual_focal_loss,
            module="DualFocalLoss",
            parameters=("gamma",),
            example={"gamma": 2.5},
            detachable=True,
            soft_target=False,
            smooths_on_cpu=True,
            keeps_class=True,
        ),
        RowLossSpec(
            name="BrierLoss",
            short="brier",
            definition=brier_loss,
            module="BrierLoss",
            infinite_at_zero=False,
            keeps_class=True,
        ),
        RowLossSpec(
            name="MMCELoss",
            short="mmce",
            definition=functools.partial(focal_loss, gamma=0.0),
            module="MMCELoss",
            factor=modulating_factor,
            soft_target=False,
            keeps_class=True,
            of_batch=True,
        ),
        RowLossSpec(
            name="dft_loss",
            short="dft",
            definition=functools.partial(focal_loss, modulation="confidence"),
            module="DFTLoss",
            parameters=("gamma",),
            example={"gamma": 1.5, "detach_modulation": False},
            factor=confidence_factor,
            modulation="confidence",
            detachable=True,
            infinite_at_zero=False,
        ),
    )
}

# In the order of their numbers.
_numbered = list(ROW_LOSSES)


def take_numbers(names: Sequence[str]) -> None:
    """Takes over the numbers of the losses from the compiled module.

    Raises:
        ValueError: the module has other losses than this table.
    """
    if sorted(names) != sorted(ROW_LOSSES):
        differing = sorted(set(names) ^ set(ROW_LOSSES))
        raise ValueError(f"the compiled module and ROW_LOSSES differ in {', '.join(differing)}")
    _numbered[:] = names


def number_of(name: str) -> int:
    """The number by which the operators identify the loss: ``kind``."""
    return _numbered.index(name)


def row_loss_of(number: int) -> RowLossSpec:
    """The properties of the loss with this number."""
    if not 0 <= number < len(_numbered):
        raise ValueError(f"focal_loss: kind must be in [0, {len(_numbered)}), got {number}")
    return ROW_LOSSES[_numbered[number]]
