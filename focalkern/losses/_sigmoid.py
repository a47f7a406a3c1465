"""The losses of independent logits as modules."""

import math

from torch import Tensor, nn

from focalkern.losses._base import Loss, Reduction, number
from focalkern.ops.sigmoid_loss import asymmetric_loss, quality_focal_loss, sigmoid_focal_loss


class ElementLoss(Loss):
    """Losses of each element by itself: parameters and weights are tensors that broadcast to the logits."""

    def __init__(self, reduction: Reduction, weight: Tensor | None, ignore_index: int) -> None:
        super().__init__(None, ignore_index=ignore_index, reduction=reduction)
        if weight is not None:
            self._check_tensor("weight", weight)
            self.register_buffer("weight", weight)

    def _keep(self, name: str, value: object, high: float = math.inf) -> None:
        """A number becomes an attribute, a tensor a buffer, a parameter a parameter."""
        if not isinstance(value, Tensor):
            setattr(self, name, number(self._name, name, value, low=0.0, high=high))
            return
        self._check_tensor(name, value)
        if value.device.type == "cpu" and not bool(((value >= 0) & (value <= high) & value.isfinite()).all()):
            bounds = "at least 0" if math.isinf(high) else f"in [0, {high:g}]"
            raise ValueError(f"{self._name}: {name} must be finite and {bounds}")
        if isinstance(value, nn.Parameter):
            setattr(self, name, value)
        else:
            self.register_buffer(name, value)

    def _check_tensor(self, name: str, value: object) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{self._name}: {name} must be a tensor, got {type(value).__name__}")
        if not value.is_floating_point():
            raise TypeError(f"{self._name}: {name} must be floating point, got {value.dtype}")

    def _shown(self, *names: str) -> str:
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
    """The module form of :func:`focalkern.sigmoid_focal_loss`, with the mean as default reduction.

    Args:
        gamma: a number, at least 0; or a floating-point tensor that broadcasts to the logits: a buffer, or an
            ``nn.Parameter``.
        alpha: a number in [0, 1], such a tensor, or None (or -1, as in torchvision).
        reduction, weight, ignore_index: as in :func:`focalkern.sigmoid_focal_loss`. ``weight`` is a buffer.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.sigmoid_focal_loss`.
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
        if alpha is None or (not isinstance(alpha, Tensor) and alpha == -1):
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
        return self._shown("gamma", "alpha")


class AsymmetricLoss(ElementLoss):
    """The module form of :func:`focalkern.asymmetric_loss`, with the mean as default reduction.

    Args:
        gamma_negative, gamma_positive: numbers, at least 0, or floating-point tensors that broadcast to the logits:
            buffers, or ``nn.Parameter`` s.
        margin: a number in [0, 1).
        reduction, weight, ignore_index: as in :func:`focalkern.sigmoid_focal_loss`. ``weight`` is a buffer.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.asymmetric_loss`.
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
        return self._shown("gamma_negative", "gamma_positive", "margin")


class QualityFocalLoss(ElementLoss):
    """The module form of :func:`focalkern.quality_focal_loss`, with the mean as default reduction.

    Args:
        beta: a number, at least 0; or a floating-point tensor that broadcasts to the logits: a buffer, or an
            ``nn.Parameter``.
        reduction, weight, ignore_index: as in :func:`focalkern.sigmoid_focal_loss`. ``weight`` is a buffer.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.quality_focal_loss`.
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

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return quality_focal_loss(
            input, target, self.beta, self.reduction, weight=self.weight, ignore_index=self.ignore_index
        )

    def extra_repr(self) -> str:
        return self._shown("beta")
