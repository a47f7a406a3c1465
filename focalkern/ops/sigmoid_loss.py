"""The fused losses of independent logits: sigmoid focal, asymmetric and quality focal loss."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from focalkern import fallback
from focalkern._checks import (
    float_labels,
    label,
    number,
    one_image,
    reduction_code,
    reworded,
    sizes,
    without_class_dim,
)
from focalkern._devices import autocast_is_on
from focalkern._types import PLAIN_TENSORS, Reduction, ScoredTarget
from focalkern.fallback.sigmoid_loss import check_scores, check_target
from focalkern.ops._backend import backend_for, has_kernels
from focalkern.ops._dtensor import is_dtensor, loss_of_elements_over_mesh

__all__ = ["asymmetric_loss", "element_loss", "element_parameter", "quality_focal_loss", "sigmoid_focal_loss"]

_FOCAL, _ASYMMETRIC, _QUALITY = 0, 1, 2  # the codes of the compiled module
# Parameter names of the losses that do not call them gamma and alpha.
_TENSORS = {_ASYMMETRIC: ("gamma_negative", "gamma_positive"), _QUALITY: ("beta",)}


def sigmoid_focal_loss(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor = 2.0,
    alpha: float | Tensor | None = 0.25,
    reduction: Reduction = "none",
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""Focal loss of independent logits, for one-logit and multi-label heads.

    Elementwise, with p = sigmoid(input), t the target and BCE the binary cross-entropy:

    .. math::
        L = (\alpha t + (1 - \alpha)(1 - t)) \; (1 - p_t)^\gamma \; \text{BCE}(p, t), \qquad
        1 - p_t = t (1 - p) + (1 - t) p

    Value and gradient equal those of ``torchvision.ops.sigmoid_focal_loss`` (whose positional order is alpha, gamma).
    Here 1 - p_t does not cancel, so both are finite and precise for finite logits of any size. (The gradient is NaN at
    infinite logits with the wrong sign for the target.) The forward and the backward pass each read memory once; no
    tensor of the size of ``input`` is saved between them.

    Args:
        input: logits of any shape [N, C, d1, ...], floating point, in any memory format.
        target: in [0, 1], with the shape of ``input``: hard or soft, floating point, bool or integer (outside of [0, 1]
            the loss is NaN). Or integer labels without the class dimension, [N, d1, ...] for [N, C, d1, ...] and [] for
            [C]: the class with target 1, all others have target 0; label C is the background, a row of zeros. So with
            one class, label 0 has target 1 and label 1 target 0; binary targets go as ``target.view_as(input)``.
        gamma: a number, at least 0, or a floating-point tensor broadcastable to ``input``, which is differentiable.
        alpha: weight of t = 1; t = 0 has 1 - alpha. A number in [0, 1], or a constant floating-point tensor
            broadcastable to ``input``; None (or -1, as in torchvision) for no weights.
        reduction: "none" (the default, as in torchvision; the default of :class:`SigmoidFocalLoss` is "mean"), "mean"
            (over all elements that are not ignored) or "sum".
        weight: floating point, broadcastable to ``input``; multiplies the loss of each element, and is a constant. It
            does not count in the mean.
        ignore_index: label whose elements count neither in the loss nor in the mean. Label targets only.

    Returns:
        The loss, scalar or of the shape of ``input``, in its dtype (float32 for half-precision logits under autocast).
        Differentiable to any order in ``input``, tensor ``gamma`` and floating-point ``target``. (Second derivatives in
        a ``target`` that requires grad may be NaN where 1 - p_t underflows. In plain torch, without the kernels, second
        derivatives of float32 logits beyond 14 in magnitude are wrong: pass float64 logits.)

    Raises:
        TypeError, ValueError: an argument of the wrong kind, value, shape or device.
        IndexError: a label outside [0, C] that is not ``ignore_index``, with its row. On CUDA such a row is NaN, unless
            FOCALKERN_VALIDATE=1.

    Source: Lin et al. 2017 (arXiv 1708.02002), equation 5.

    Example:
        >>> logits = torch.tensor([[1.0, -1.0], [0.5, -2.0]])
        >>> target = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> fk.sigmoid_focal_loss(logits, target)
        tensor([[0.0057, 0.0170],
                [0.2831, 0.0014]])
        >>> labels = torch.tensor([0, 2])  # class 0, and the background
        >>> fk.sigmoid_focal_loss(logits, labels)
        tensor([[0.0057, 0.0170],
                [0.2831, 0.0014]])
    """
    op = "sigmoid_focal_loss"
    second = None
    if alpha is not None and not (type(alpha) in (float, int) and alpha == -1):  # torchvision's -1: no weights
        second = element_parameter(op, "alpha", alpha, high=1.0)
    gamma = element_parameter(op, "gamma", gamma)
    return element_loss(op, _FOCAL, input, target, gamma, second, 0.0, reduction, weight, ignore_index)


def asymmetric_loss(
    input: Tensor,
    target: Tensor,
    gamma_negative: float | Tensor = 4.0,
    gamma_positive: float | Tensor = 1.0,
    margin: float = 0.05,
    reduction: Reduction = "none",
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""Asymmetric loss, for multi-label heads with few positives: a focal loss whose easy negatives do not count.

    .. math::
        L = -t\,(1 - p)^{\gamma_+} \log p - (1 - t)\,v^{\gamma_-} \log(1 - v), \qquad v = \max(p - \text{margin}, 0)

    with p = sigmoid(input) and t the target. The gradient goes through v, and is 0 where p <= margin.

    Args:
        input, target: as in :func:`sigmoid_focal_loss`.
        gamma_negative, gamma_positive: numbers, at least 0, or floating-point tensors broadcastable to ``input``,
            which are differentiable.
        margin: a number in [0, 1).
        reduction, weight, ignore_index: as in :func:`sigmoid_focal_loss`.

    Returns:
        As :func:`sigmoid_focal_loss`.

    Raises:
        TypeError, ValueError, IndexError: as :func:`sigmoid_focal_loss`.

    Source: Ridnik et al., Asymmetric Loss for Multi-Label Classification, ICCV 2021. (Its code adds 1e-8 within the
    logarithms; its optional ``disable_torch_grad_focal_loss`` has no counterpart.)

    Example:
        >>> logits = torch.tensor([-4.0, 0.0, 2.0])
        >>> target = torch.tensor([0.0, 0.0, 1.0])
        >>> fk.asymmetric_loss(logits, target)  # sigmoid(-4) = 0.018 is below the margin
        tensor([0.0000, 0.0245, 0.0151])
    """
    op = "asymmetric_loss"
    if type(margin) is not float or not 0.0 <= margin < 1.0:
        margin = _number(op, "margin", margin)
        if not 0.0 <= margin < 1.0:
            raise ValueError(f"{op}: margin must be in [0, 1), got {margin}")
    gamma_negative = element_parameter(op, "gamma_negative", gamma_negative)
    gamma_positive = element_parameter(op, "gamma_positive", gamma_positive)
    return element_loss(
        op, _ASYMMETRIC, input, target, gamma_negative, gamma_positive, margin, reduction, weight, ignore_index
    )


def quality_focal_loss(
    input: Tensor,
    target: ScoredTarget,
    beta: float | Tensor = 2.0,
    reduction: Reduction = "none",
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    r"""Quality focal loss, for detection heads whose targets are qualities (overlaps) between 0 and 1.

    .. math:: L = |t - p|^\beta \; \text{BCE}(p, t)

    with p = sigmoid(input) and t the target; for hard targets it is the focal loss without alpha.

    Args:
        input: as in :func:`sigmoid_focal_loss`.
        target: as in :func:`sigmoid_focal_loss`; or ``(labels, scores)``, two tensors [N, d1, ...]. Each score, in
            [0, 1], is the target at the class of its label; the other classes have target 0. The kernel makes no dense
            target of them.
        beta: a number, at least 0, or a floating-point tensor broadcastable to ``input``, which is differentiable.
        reduction, weight, ignore_index: as in :func:`sigmoid_focal_loss`.

    Returns:
        As :func:`sigmoid_focal_loss`. The gradient at p = t is 0.

    Raises:
        TypeError, ValueError, IndexError: as :func:`sigmoid_focal_loss`.

    Source: Li et al., Generalized Focal Loss, NeurIPS 2020.

    Example:
        >>> logits = torch.tensor([-2.0, 0.0, 2.0])
        >>> overlap = torch.tensor([0.0, 0.5, 0.7])
        >>> fk.quality_focal_loss(logits, overlap)
        tensor([0.0018, 0.0000, 0.0238])
        >>> boxes = torch.tensor([[-2.0, 0.5], [1.0, -1.0]])
        >>> fk.quality_focal_loss(boxes, (torch.tensor([1, 2]), torch.tensor([0.8, 0.0])))  # label 2 is background
        tensor([[0.0018, 0.0181],
                [0.7019, 0.0227]])
    """
    op = "quality_focal_loss"
    beta = element_parameter(op, "beta", beta)
    return element_loss(op, _QUALITY, input, target, beta, None, 0.0, reduction, weight, ignore_index)


def _number(op: str, name: str, value: object) -> float:
    if isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a number or a tensor, got bool")
    return number(op, name, value, "a number or a tensor")


def element_parameter(op: str, name: str, value: object, high: float = math.inf) -> float | Tensor:
    """Checks that a number is at least 0; does not check the values of a tensor."""
    if isinstance(value, Tensor):
        return value
    if torch.compiler.is_compiling() and type(value) is float:
        return value  # a compiled graph must not depend on the value
    found = _number(op, name, value)
    if not (0.0 <= found <= high and found < math.inf):  # NaN fails too
        bounds = "in [0, 1]" if high == 1.0 else "at least 0"
        raise ValueError(f"{op}: {name} must be {bounds if math.isfinite(found) else 'finite'}, got {found}")
    return found


def element_loss(
    op: str,
    kind: int,
    input: Tensor,
    target: ScoredTarget,
    gamma: float | Tensor,
    second: float | Tensor | None,
    constant: float,
    reduction: str,
    weight: Tensor | None,
    ignore_index: int,
) -> Tensor:
    """The loss number ``kind``; errors name ``op``."""
    scores = None
    if isinstance(target, tuple | list):
        target, scores = _labels_and_scores(op, kind, target)
    if type(input) is not Tensor and is_dtensor(input):

        def local(
            z: Tensor, y: ScoredTarget, given: Any, weight: Tensor | None, reduction: str, ignore_index: int
        ) -> Tensor:
            return element_loss(op, kind, z, y, given[0], given[1], constant, reduction, weight, ignore_index)

        if scores is not None:
            check_scores(op, input, target, scores, kind)
        options = (weight, ignore_index, reduction)
        return loss_of_elements_over_mesh(op, local, input, target, scores, (gamma, second), *options)
    code = reduction_code(op, reduction)
    if isinstance(input, Tensor) and not input.is_floating_point():
        raise TypeError(f"{op}: input must be floating point, got {input.dtype}")
    if torch.compiler.is_compiling():
        function = _traced
    elif type(input) in PLAIN_TENSORS and type(target) in PLAIN_TENSORS:
        function = backend_for(input).sigmoid_loss
    else:
        for name, value in (("input", input), ("target", target)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
        function = _traced if has_torch_function((input, target)) else backend_for(input).sigmoid_loss
    if scores is not None and scores.requires_grad:
        function = fallback.sigmoid_loss  # the kernels have no gradient for scores
    if weight is not None and not isinstance(weight, Tensor):
        raise TypeError(f"{op}: weight must be a tensor, got {type(weight).__name__}")
    if type(ignore_index) is not int and not hasattr(type(ignore_index), "__index__"):
        raise TypeError(f"{op}: ignore_index must be an int, got {type(ignore_index).__name__}")
    if torch.compiler.is_compiling() and not _fits(input, target):
        # Not in the try: a graph cannot read the text of an error to add the remedy.
        check_target(op, input, target, _shape_remedy(input, target, scores))
    try:
        return function(input, target, gamma, second, weight, scores, kind, constant, code, ignore_index)
    except (TypeError, RuntimeError) as error:  # arguments are checked only after an error, for speed
        label(op, "ignore_index", ignore_index)
        parameters = dict(zip(_TENSORS.get(kind, ("gamma", "alpha")), (gamma, second), strict=False))
        raise reworded(op, error, input=input, target=target, weight=weight, **parameters) from None
    except ValueError as error:
        if not str(error).startswith((f"{op}: target must be the shape", f"{op}: target of labels must be")):
            raise
        raise ValueError(f"{error}{_shape_remedy(input, target, scores)}") from None


def _fits(input: Tensor, target: Tensor) -> bool:
    """Whether the target has the shape of the logits, or is labels of theirs."""
    if target.shape == input.shape:
        return True
    class_dim = min(input.dim() - 1, 1)
    expected = input.shape[:class_dim] + input.shape[class_dim + 1 :]
    return target.shape == expected and not target.is_floating_point() and target.dtype != torch.bool


def _shape_remedy(input: Tensor, target: Tensor, scores: Tensor | None) -> str:
    """The remedy for a target whose shape does not fit; empty if none is likely."""
    shape, found = sizes(input.shape), sizes(target.shape)
    if [size for size in shape if size != 1] == [size for size in found if size != 1]:
        return "; pass target.view_as(input)"
    if target.is_floating_point():
        return float_labels(input, target)
    if target.dtype == torch.bool:  # never labels
        return ""
    if len(shape) > 2 and found == shape[1:]:
        return f"; {one_image('input', *(('target',) if scores is None else ('labels', 'scores')))}"
    squeezed = without_class_dim(shape[:1] + shape[2:], found)
    return squeezed and f"; pass {squeezed}"


def _labels_and_scores(op: str, kind: int, target: Any) -> tuple[Tensor, Tensor]:
    if kind in (_FOCAL, _ASYMMETRIC):
        raise TypeError(
            f"{op}: target must be a tensor, got {type(target).__name__}; labels with scores are a target of "
            "quality_focal_loss, varifocal_loss, matchability_loss and ia_bce_loss"
        )
    if len(target) != 2:
        raise ValueError(f"{op}: target must be a tensor, or labels and scores, got {len(target)} values")
    for name, value in zip(("labels", "scores"), target, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: the {name} of target must be a tensor, got {type(value).__name__}")
    labels, scores = target
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.is_complex():
        raise TypeError(f"{op}: the labels of target must be integer, got {labels.dtype}")
    if not scores.is_floating_point():
        raise TypeError(f"{op}: the scores of target must be floating point, got {scores.dtype}")
    return labels, scores


def _traced(
    input: Tensor,
    target: Tensor,
    gamma: float | Tensor,
    second: float | Tensor | None,
    weight: Tensor | None,
    scores: Tensor | None,
    kind: int,
    constant: float,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """The call through torch's dispatcher, for compiled and exported graphs and tensor subclasses, which see only
    operators."""
    if not has_kernels(input):
        return backend_for(input).sigmoid_loss(
            input, target, gamma, second, weight, scores, kind, constant, reduction, ignore_index
        )
    # Tensors, not constants of the graph, so that other values do not compile again.
    if not isinstance(gamma, Tensor):
        gamma = torch.zeros((), dtype=torch.float64, device="cpu") + gamma
    if second is not None and not isinstance(second, Tensor):
        second = torch.zeros((), dtype=torch.float64, device="cpu") + second
    is_half = input.element_size() == 2
    float32_loss = is_half and autocast_is_on(input.device.type)
    options = (kind, constant, reduction, ignore_index, float32_loss)
    if torch._C._are_functorch_transforms_active():
        return torch.ops.focalkern.sigmoid_loss_composite(input, target, gamma, second, weight, scores, *options)
    loss, _ = torch.ops.focalkern.sigmoid_loss_forward(input, target, gamma, second, weight, scores, *options)
    return loss
