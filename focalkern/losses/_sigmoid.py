"""Modules of the losses of independent logits: sigmoid focal, asymmetric and quality focal loss."""

import math
from typing import Any

from torch import Tensor, nn

from focalkern._checks import check_floating, dense
from focalkern._tracing import is_readable
from focalkern._types import Reduction, ScoredTarget
from focalkern.losses._base import Loss, number
from focalkern.ops.sigmoid_loss import asymmetric_loss, quality_focal_loss, sigmoid_focal_loss


class ElementLoss(Loss):
    """Base of the elementwise losses; parameters and weights are numbers or tensors that broadcast to the logits."""

    def __init__(self, reduction: Reduction, weight: Tensor | None, ignore_index: int) -> None:
        super().__init__(None, ignore_index=ignore_index, reduction=reduction)
        if weight is not None:
            self._check_tensor("weight", weight)
            self.register_buffer("weight", weight)

    def forward(self, input: Tensor, target: Any) -> Tensor:
        """The loss of a batch.

        Args:
            input: logits of any shape [N, C, d1, ...], floating point.
            target: in [0, 1], with the shape of ``input``; or labels [N, d1, ...], where label C is the background. See
                :func:`focalkern.sigmoid_focal_loss`. Some losses also take ``(labels, scores)``: see
                :func:`focalkern.quality_focal_loss`.

        Returns:
            The loss in the dtype of ``input`` (float32 for half-precision logits under autocast): a scalar, or of the
            shape of ``input`` with ``reduction="none"``.

        Raises:
            TypeError, ValueError, IndexError: as :func:`focalkern.sigmoid_focal_loss`.
        """
        raise NotImplementedError

    def _keep(self, name: str, value: object, high: float = math.inf) -> None:
        """Registers a number as an attribute, a tensor as a buffer, and a parameter as a parameter."""
        if not isinstance(value, Tensor):
            setattr(self, name, number(self._name, name, value, low=0.0, high=high))
            return
        self._check_tensor(name, value)
        if is_readable(value) and not bool(((value >= 0) & (value <= high) & value.isfinite()).all()):
            bounds = "at least 0" if math.isinf(high) else f"in [0, {high:g}]"
            raise ValueError(f"{self._name}: {name} must be finite and {bounds}")
        if isinstance(value, nn.Parameter):
            setattr(self, name, value)
        else:
            self.register_buffer(name, value)

    def _check_tensor(self, name: str, value: object) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{self._name}: {name} must be a tensor, got {type(value).__name__}")
        dense(self._name, name, value)
        check_floating(self._name, name, value)

    def _constructor_words(self, *names: str) -> str:
        shown = {name: getattr(self, name) for name in names}
        shown["reduction"] = self.reduction
        if self.weight is not None:
            shown["weight"] = self.weight
        if self.ignore_index != -100:
            shown["ignore_index"] = self.ignore_index
        return ", ".join(
            f"{name}={list(value.shape) if isinstance(value, Tensor) else value}" for name, value in shown.items()
        )


class SigmoidFocalLoss(ElementLoss):
    r"""The module form of :func:`focalkern.sigmoid_focal_loss`.

    .. math:: L = -\alpha_t (1 - p_t)^\gamma \log p_t, \qquad p = \text{sigmoid of the logit}

    Args:
        gamma: a number, at least 0; or a floating-point tensor that broadcasts to the logits: a buffer, or an
            ``nn.Parameter``.
        alpha: a number in [0, 1], such a tensor, or None (or -1, as in torchvision).
        reduction: "mean" by default; :func:`focalkern.sigmoid_focal_loss` defaults to "none".
        weight, ignore_index: as in :func:`focalkern.sigmoid_focal_loss`. ``weight`` is a buffer.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.sigmoid_focal_loss`.

    Source: Lin et al. 2017 (arXiv 1708.02002), equation 5.

    Example:
        >>> criterion = fk.SigmoidFocalLoss(gamma=2.0, alpha=0.25)
        >>> logits = torch.tensor([[1.0, -1.0], [0.5, -2.0]])
        >>> criterion(logits, torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        tensor(0.0768)
        >>> criterion(logits, torch.tensor([0, 2]))  # labels: class 0, and the background
        tensor(0.0768)
    """

    gamma: float | Tensor
    alpha: float | Tensor | None

    def __init__(
        self,
        gamma: float | Tensor = 2.0,
        alpha: float | Tensor | None = 0.25,
        reduction: Reduction = "mean",
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(reduction, weight, ignore_index)
        self._keep("gamma", gamma)
        if alpha is None or (isinstance(alpha, int | float) and alpha == -1):
            self.alpha = None
        else:
            self._keep("alpha", alpha, high=1.0)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return sigmoid_focal_loss(
            input,
            target,
            self.gamma,
            self.alpha,
            self.reduction,
            weight=self.weight,
            ignore_index=self.ignore_index,
        )

    def extra_repr(self) -> str:
        return self._constructor_words("gamma", "alpha")


class AsymmetricLoss(ElementLoss):
    r"""The module form of :func:`focalkern.asymmetric_loss`.

    .. math:: L = -t\,(1 - p)^{\gamma_+} \log p - (1 - t)\,v^{\gamma_-} \log(1 - v), \qquad
        v = \max(p - \text{margin}, 0)

    Args:
        gamma_negative, gamma_positive: numbers, at least 0, or floating-point tensors that broadcast to the logits:
            buffers, or ``nn.Parameter`` s.
        margin: a number in [0, 1).
        reduction: "mean" by default; :func:`focalkern.asymmetric_loss` defaults to "none".
        weight, ignore_index: as in :func:`focalkern.sigmoid_focal_loss`. ``weight`` is a buffer.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.asymmetric_loss`.

    Source: Ridnik et al., Asymmetric Loss for Multi-Label Classification, ICCV 2021.

    Example:
        >>> criterion = fk.AsymmetricLoss(gamma_negative=4.0, gamma_positive=1.0)
        >>> logits = torch.tensor([[2.0, -4.0, 0.5], [-1.0, 1.0, -3.0]])
        >>> criterion(logits, torch.tensor([[1, 0, 0], [0, 1, 1]]))
        tensor(0.5159)
    """

    gamma_negative: float | Tensor
    gamma_positive: float | Tensor

    def __init__(
        self,
        gamma_negative: float | Tensor = 4.0,
        gamma_positive: float | Tensor = 1.0,
        margin: float = 0.05,
        reduction: Reduction = "mean",
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(reduction, weight, ignore_index)
        self._keep("gamma_negative", gamma_negative)
        self._keep("gamma_positive", gamma_positive)
        self.margin = number("AsymmetricLoss", "margin", margin, low=0.0, high=1.0)
        if self.margin == 1.0:
            raise ValueError("AsymmetricLoss: margin must be below 1, got 1.0")

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return asymmetric_loss(
            input,
            target,
            self.gamma_negative,
            self.gamma_positive,
            self.margin,
            self.reduction,
            weight=self.weight,
            ignore_index=self.ignore_index,
        )

    def extra_repr(self) -> str:
        return self._constructor_words("gamma_negative", "gamma_positive", "margin")


class QualityFocalLoss(ElementLoss):
    r"""The module form of :func:`focalkern.quality_focal_loss`.

    .. math:: L = |t - p|^\beta \; \text{BCE}(p, t), \qquad p = \text{sigmoid of the logit}

    Args:
        beta: a number, at least 0; or a floating-point tensor that broadcasts to the logits: a buffer, or an
            ``nn.Parameter``.
        reduction: "mean" by default; :func:`focalkern.quality_focal_loss` defaults to "none".
        weight, ignore_index: as in :func:`focalkern.sigmoid_focal_loss`. ``weight`` is a buffer.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.quality_focal_loss`.

    Source: Li et al., Generalized Focal Loss, NeurIPS 2020.

    Example:
        >>> criterion = fk.QualityFocalLoss(beta=2.0)
        >>> overlap = torch.tensor([[0.0, 0.8], [0.6, 0.0]])
        >>> criterion(torch.tensor([[-2.0, 1.0], [0.5, -1.0]]), overlap)
        tensor(0.0068)
    """

    beta: float | Tensor

    def __init__(
        self,
        beta: float | Tensor = 2.0,
        reduction: Reduction = "mean",
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(reduction, weight, ignore_index)
        self._keep("beta", beta)

    def forward(self, input: Tensor, target: ScoredTarget) -> Tensor:
        return quality_focal_loss(
            input, target, self.beta, self.reduction, weight=self.weight, ignore_index=self.ignore_index
        )

    def extra_repr(self) -> str:
        return self._constructor_words("beta")
