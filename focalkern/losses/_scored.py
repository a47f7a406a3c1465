"""Modules of the losses for detectors that score boxes by their overlap: varifocal, matchability and IoU-aware BCE."""

from torch import Tensor

from focalkern._checks import flag
from focalkern._types import Reduction, ScoredTarget
from focalkern.losses._sigmoid import ElementLoss
from focalkern.ops.scored_losses import ia_bce_loss, matchability_loss, varifocal_loss


class VarifocalLoss(ElementLoss):
    r"""The module form of :func:`focalkern.varifocal_loss`.

    .. math::
        L = t \; \text{BCE}(p, t) \text{ for } t > 0, \qquad -\alpha p^\gamma \log(1 - p) \text{ for } t = 0

    Args:
        gamma: a number, at least 0; or a floating-point tensor that broadcasts to the logits: a buffer, or an
            ``nn.Parameter``.
        alpha: weight of the background: a number, at least 0, such a tensor, or None for 1.
        reduction: "mean" by default; :func:`focalkern.varifocal_loss` defaults to "none".
        detach_modulation: treat p^gamma as a constant in the gradient of the logits, as RT-DETR and D-FINE do.
        weight, ignore_index: as in :func:`focalkern.sigmoid_focal_loss`. ``weight`` is a buffer.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.varifocal_loss`.

    Source: Zhang et al., VarifocalNet, CVPR 2021 (arXiv 2008.13367), equation 2.

    Example:
        >>> criterion = fk.VarifocalLoss(gamma=2.0, alpha=0.75, detach_modulation=True)
        >>> overlap = torch.tensor([[0.0, 0.8], [0.6, 0.0]])
        >>> criterion(torch.tensor([[-2.0, 1.0], [0.5, -1.0]]), overlap)
        tensor(0.2084)
    """

    gamma: float | Tensor
    alpha: float | Tensor | None

    _loss = staticmethod(varifocal_loss)

    def __init__(
        self,
        gamma: float | Tensor = 2.0,
        alpha: float | Tensor | None = 0.75,
        reduction: Reduction = "mean",
        *,
        detach_modulation: bool = False,
        weight: Tensor | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(reduction, weight, ignore_index)
        self._keep("gamma", gamma)
        if alpha is None:
            self.alpha = None
        else:
            self._keep("alpha", alpha)
        self.detach_modulation = flag(self._name, "detach_modulation", detach_modulation)

    def forward(self, input: Tensor, target: ScoredTarget) -> Tensor:
        return self._loss(
            input,
            target,
            self.gamma,
            self.alpha,
            self.reduction,
            detach_modulation=self.detach_modulation,
            weight=self.weight,
            ignore_index=self.ignore_index,
        )

    def extra_repr(self) -> str:
        return self._constructor_words("gamma", "alpha", "detach_modulation")


class MatchabilityLoss(VarifocalLoss):
    r"""The module form of :func:`focalkern.matchability_loss`.

    .. math::
        L = \text{BCE}(p, t^\gamma) \text{ for } t > 0, \qquad -\alpha p^\gamma \log(1 - p) \text{ for } t = 0

    Args:
        gamma: a number, at least 0; or a floating-point tensor that broadcasts to the logits: a buffer, or an
            ``nn.Parameter``.
        alpha: weight of the background: a number, at least 0, such a tensor, or None for 1.
        reduction: "mean" by default; :func:`focalkern.matchability_loss` defaults to "none".
        detach_modulation: treat p^gamma as a constant in the gradient of the logits, as DEIM does.
        weight, ignore_index: as in :func:`focalkern.sigmoid_focal_loss`. ``weight`` is a buffer.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.matchability_loss`.

    Source: Huang et al., DEIM, CVPR 2025 (arXiv 2412.04234), and its code.

    Example:
        >>> criterion = fk.MatchabilityLoss(gamma=1.5)
        >>> overlap = torch.tensor([[0.0, 0.8], [0.6, 0.0]])
        >>> criterion(torch.tensor([[-2.0, 1.0], [0.5, -1.0]]), overlap)
        tensor(0.3471)
    """

    _loss = staticmethod(matchability_loss)

    def __init__(
        self,
        gamma: float | Tensor = 1.5,
        alpha: float | Tensor | None = None,
        reduction: Reduction = "mean",
        *,
        detach_modulation: bool = True,
        weight: Tensor | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(
            gamma, alpha, reduction, detach_modulation=detach_modulation, weight=weight, ignore_index=ignore_index
        )


class IABCELoss(ElementLoss):
    r"""The module form of :func:`focalkern.ia_bce_loss`.

    .. math::
        L = \text{BCE}(p, s) \text{ for } t > 0, \quad s = \max(p^\alpha t^{1 - \alpha}, 0.01), \qquad
        -p^\gamma \log(1 - p) \text{ for } t = 0

    Args:
        gamma: a number, at least 0; or a floating-point tensor that broadcasts to the logits: a buffer, or an
            ``nn.Parameter``.
        alpha: exponent of p in s: a number in [0, 1], or such a tensor.
        reduction: "mean" by default; :func:`focalkern.ia_bce_loss` defaults to "none".
        weight, ignore_index: as in :func:`focalkern.sigmoid_focal_loss`. ``weight`` is a buffer.

    Raises:
        TypeError, ValueError, IndexError: as :func:`focalkern.ia_bce_loss`.

    Source: Cai et al., Align-DETR (arXiv 2304.07527); Chen et al., LW-DETR (arXiv 2406.03459), and its code.

    Example:
        >>> criterion = fk.IABCELoss(alpha=0.25)
        >>> overlap = torch.tensor([[0.0, 0.8], [0.6, 0.0]])
        >>> criterion(torch.tensor([[-2.0, 1.0], [0.5, -1.0]]), overlap)
        tensor(0.3067)
    """

    gamma: float | Tensor
    alpha: float | Tensor

    def __init__(
        self,
        gamma: float | Tensor = 2.0,
        alpha: float | Tensor = 0.25,
        reduction: Reduction = "mean",
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(reduction, weight, ignore_index)
        self._keep("gamma", gamma)
        self._keep("alpha", alpha, high=1.0)

    def forward(self, input: Tensor, target: ScoredTarget) -> Tensor:
        return ia_bce_loss(
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
