"""Losses that call the fused focal loss with their own gamma."""

import math
from typing import Any, get_args

import torch
from torch import Tensor, nn

from focalkern._checks import check_floating, dense, flag, one_of
from focalkern._tracing import is_readable
from focalkern._types import Reduction
from focalkern.gamma import GammaTable
from focalkern.losses._base import Loss, described, digits, number
from focalkern.ops._row_loss import Modulation
from focalkern.ops.focal_loss import focal_loss
from focalkern.ops.softmax_losses import poly_focal_loss


class FocalFamily(Loss):
    """Base of the losses that are a function of logits, target and their own gamma."""

    # Options of FocalLoss and LinearFocalLoss only.
    z_loss: float = 0.0
    return_stats: bool = False

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
        modulation: Modulation | None = None,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.detach_modulation = flag(self._name, "detach_modulation", detach_modulation)
        if modulation is not None:
            one_of(self._name, "modulation", modulation, get_args(Modulation))
        self.modulation: Modulation | None = modulation

    def _gamma(self) -> float | Tensor | GammaTable:
        raise NotImplementedError

    def _table(self) -> GammaTable:
        """The table in the module's buffers. Reading ``_buffers`` directly saves a microsecond of attribute look-up."""
        first, second = self._exact_buffers
        edges, gammas = self._buffers[first], self._buffers[second]
        assert edges is not None and gammas is not None
        return GammaTable._unchecked(edges, gammas)

    def _table_beside(self, input: Tensor, table: GammaTable) -> GammaTable:
        """The module's table on the device of the logits. The buffers move there automatically: code written for
        ``nn.CrossEntropyLoss()``, which has no buffers, does not call ``.to(device)`` on the loss."""
        if table.edges.is_cpu and input.is_cpu:
            return table
        devices = (table.edges.device, input.device)
        if devices[0] == devices[1] or any(device.type == "meta" for device in devices):
            return table
        if torch.compiler.is_compiling():  # a graph must not have side effects
            return GammaTable._unchecked(table.edges.to(input.device), table.gammas.to(input.device))
        with torch.inference_mode(False):  # training must be able to save the buffers
            for name in self._exact_buffers:
                self._buffers[name] = self.get_buffer(name).to(input.device)
        return GammaTable._unchecked(*(self.get_buffer(name) for name in self._exact_buffers))

    def _set_extras(self, z_loss: float, return_stats: bool) -> None:
        self.z_loss = number(self._name, "z_loss", z_loss, low=0.0)
        self.return_stats = flag(self._name, "return_stats", return_stats)

    def _extras(self) -> dict[str, Any]:
        """Arguments of the function that differ from its defaults."""
        if self.z_loss == 0 and not self.return_stats:
            return {}
        return {"z_loss": self.z_loss, "return_stats": self.return_stats}

    def forward(self, input: Tensor, target: Tensor) -> Any:
        gamma = self._gamma()
        if isinstance(gamma, GammaTable) and isinstance(input, Tensor):
            gamma = self._table_beside(input, gamma)
        return self._loss(input, target, gamma)

    def _loss(self, input: Tensor, target: Tensor, gamma: float | Tensor | GammaTable) -> Any:
        return focal_loss(
            input,
            target,
            gamma,
            weight=self._buffers["weight"],
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            detach_modulation=self.detach_modulation,
            modulation=self.modulation,
            z_loss=self.z_loss,
            return_stats=self.return_stats,
        )

    def extra_repr(self) -> str:
        modulation = f", modulation={self.modulation}" if self.modulation else ""
        extras = "".join(f", {name}={value}" for name, value in self._extras().items() if value)
        detached = ", detach_modulation=True" if self.detach_modulation else ""
        return super().extra_repr() + modulation + detached + extras


class FocalLoss(FocalFamily):
    r"""The module form of :func:`focalkern.focal_loss`.

    .. math:: L = -(1 - p)^\gamma \log p \;\; (\gamma \ge 0), \qquad L = -(1 + p)^{|\gamma|} \log p \;\; (\gamma < 0)

    Args:
        gamma: a number; a floating-point tensor without dimensions; an ``nn.Parameter`` that broadcasts to the
            unreduced loss; or a :class:`focalkern.GammaTable`. A tensor becomes a buffer, a parameter stays a
            parameter, and copies of a table become the buffers ``edges`` and ``gammas``. They move with the module (the
            buffers of a table also move to the device of the logits at a call) and are saved with it. Values written
            into them in place take effect at the next step. For a gamma per sample use :func:`focalkern.focal_loss`.
            The module rejects other tensors, because class weights, the first argument of cross-entropy, would be read
            as gamma.
        weight: [C] class weights, floating point; None for equal weights.
        ignore_index: label whose samples count neither in the loss nor in the mean.
        reduction: "none", "mean" or "sum". The mean divides by the summed weight of the samples.
        label_smoothing: e in [0, 1]; the target becomes (1 - e) t + e / C.
        detach_modulation: treat the factor before log p as a constant.
        modulation: None, or "confidence": the factor is p^gamma, gamma >= 0.
        z_loss: c >= 0: adds c lse^2 to the loss of each row, as in :func:`focalkern.focal_loss`.
        return_stats: the call returns a :class:`focalkern.LossWithStats` (loss, stats) in place of the loss.
        alpha: not an option; raises a TypeError that explains how to express the alpha of other libraries.

    Attributes:
        gamma: the number or tensor; None for a table.

    Raises:
        TypeError, ValueError: in the constructor for an argument of the wrong kind or value, in the call for a wrong
            shape. Values of tensors on other devices than the CPU are not checked, which would synchronise the device.

    Source: Lin et al. 2017 (arXiv 1708.02002); Mukhoti et al. 2020 (arXiv 2002.09437).

    Example:
        >>> criterion = fk.FocalLoss(gamma=2.0)  # in place of torch.nn.CrossEntropyLoss()
        >>> logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]])
        >>> criterion(logits, torch.tensor([0, 2]))
        tensor(0.5583)
        >>> fk.FocalLoss(gamma=fk.FLSD_53)
        FocalLoss(edges=[0, 0.2, 1], gammas=[5, 3])
        >>> loss, stats = fk.FocalLoss(gamma=2.0, z_loss=1e-4, return_stats=True)(logits, torch.tensor([0, 2]))
        >>> loss, stats.correct
        (tensor(0.5587), tensor([ True, False]))
    """

    _table_in_state = True
    _gamma_may_be_negative = True

    def __init__(
        self,
        gamma: float | Tensor | GammaTable = 2.0,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
        modulation: Modulation | None = None,
        z_loss: float = 0.0,
        return_stats: bool = False,
        alpha: None = None,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
            modulation=modulation,
        )
        self._set_extras(z_loss, return_stats)
        if modulation is not None:
            self._gamma_may_be_negative = False
        if alpha is not None:
            raise TypeError(
                f"{self._name}: alpha is not an argument. A weight per class is weight=alpha, a tensor [C]; "
                "one number for foreground and background is weight=torch.tensor([1 - alpha] + [alpha] * (C - 1)); the "
                "alpha of a binary or multi-label head is that of SigmoidFocalLoss"
            )
        self.gamma: float | Tensor | None
        if isinstance(gamma, GammaTable):
            self.gamma = None
            self._exact_buffers = ("edges", "gammas")
            # Copies, so that .to() and writes in place do not change a table that another module uses too.
            self.register_buffer("edges", gamma.edges.clone(), persistent=self._table_in_state)
            self.register_buffer("gammas", gamma.gammas.clone(), persistent=self._table_in_state)
        elif isinstance(gamma, Tensor):
            dense(self._name, "gamma", gamma)
            if gamma.dim() > 0 and not isinstance(gamma, nn.Parameter):
                raise ValueError(
                    f"{self._name}: gamma must be a number, a GammaTable, a tensor without dimensions or an "
                    f"nn.Parameter, got {described(gamma)}; gammas of samples are passed to focal_loss"
                )
            check_floating(self._name, "gamma", gamma)
            if is_readable(gamma) and not bool(gamma.isfinite().all()):  # elsewhere it would synchronise
                raise ValueError(f"{self._name}: gamma must be finite, got {digits(gamma.detach())}")
            if isinstance(gamma, nn.Parameter):
                self.gamma = gamma
            else:
                self.register_buffer("gamma", gamma)
        else:
            self.gamma = number(self._name, "gamma", gamma, low=-math.inf if self._gamma_may_be_negative else 0.0)
        self._check_signs(gamma.gammas if isinstance(gamma, GammaTable) else gamma)

    def _check_signs(self, gamma: object) -> None:
        values = gamma if isinstance(gamma, Tensor) and not self._gamma_may_be_negative else None
        if values is not None and is_readable(values) and not bool((values >= 0).all()):
            raise ValueError(f"{self._name}: gamma must be at least 0, got {digits(values.detach())}")

    def _gamma(self) -> float | Tensor | GammaTable:
        if self.gamma is None:
            return self._table()
        return self.gamma

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        if self.gamma is None and self._table_in_state:
            GammaTable(state["edges"], state["gammas"])
        self._check_signs(state.get("gamma", state.get("gammas")))

    def _settings(self) -> dict[str, object]:
        gamma = self._gamma()
        if isinstance(gamma, GammaTable):
            return {"edges": digits(gamma.edges), "gammas": digits(gamma.gammas)}
        return {"gamma": digits(gamma) if isinstance(gamma, Tensor) else gamma}


class DFTLoss(FocalLoss):
    r"""Dynamic fine-tuning: cross-entropy with the probability of the target, taken as a constant, as the weight.

    .. math:: L = -\mathrm{sg}(p)^\gamma \log p, \qquad \partial L / \partial z_j = p^\gamma\,(p_j - [j = y])

    sg stops the gradient. The loss is ``FocalLoss(gamma, modulation="confidence", detach_modulation=True)``. TRL's
    ``loss_type="dft"`` and Liger's ``use_token_scaling`` are the same loss and divide by the same number of targets as
    "mean". Targets with a low predicted probability weigh less; in the focal loss they weigh more.

    Args:
        gamma: at least 0; a number, tensor, parameter or table, as :class:`FocalLoss` takes them. 1 is the paper's
            loss, 0 cross-entropy.
        weight: [C] class weights, floating point; None for equal weights.
        ignore_index: label whose samples count neither in the loss nor in the mean.
        reduction: "none", "mean" or "sum". The mean divides by the summed weight of the samples.
        label_smoothing: e in [0, 1]; the target becomes (1 - e) t + e / C. With it, or with class probabilities, each
            class has the weight of its own probability.
        detach_modulation: treat the weight p^gamma as a constant; with False the gradient goes through it too.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, value or shape; a gamma below 0.

    Source: Wu et al., On the Generalization of SFT, 2025 (arXiv 2508.05629).

    Example:
        >>> criterion = fk.DFTLoss()
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]]), torch.tensor([0, 2])
        >>> criterion(logits, target)
        tensor(0.2282)
    """

    def __init__(
        self,
        gamma: float | Tensor | GammaTable = 1.0,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = True,
    ) -> None:
        super().__init__(
            gamma,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
            modulation="confidence",
        )

    def extra_repr(self) -> str:
        return Loss.extra_repr(self) + ("" if self.detach_modulation else ", detach_modulation=False")


class InverseFocalLoss(FocalLoss):
    r"""Inverse focal loss, whose gamma is given as a positive number.

    .. math:: L = -(1 + p)^\gamma \log p

    It is ``FocalLoss(-gamma)``; the class only changes the sign of gamma.

    Args:
        gamma: a number, at least 0, or a floating-point tensor of such numbers. Above 3.591 the slope of the loss
            changes sign near p = 0.28; a number above it causes a warning.
        weight: [C] class weights, floating point; None for equal weights.
        ignore_index: label whose samples count neither in the loss nor in the mean.
        reduction: "none", "mean" or "sum". The mean divides by the summed weight of the samples.
        label_smoothing: e in [0, 1]; the target becomes (1 - e) t + e / C.
        detach_modulation: treat the factor before log p as a constant.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, value or shape; a gamma below 0.

    Source: Wang, Feng & Zhang, NeurIPS 2021.

    Example:
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]]), torch.tensor([0, 2])
        >>> fk.InverseFocalLoss(gamma=2.0)(logits, target)
        tensor(1.4711)
        >>> fk.FocalLoss(gamma=-2.0)(logits, target)
        tensor(1.4711)
    """

    _gamma_may_be_negative = False

    def __init__(
        self,
        gamma: float | Tensor = 2.0,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
    ) -> None:
        if not isinstance(gamma, Tensor):
            gamma = number("InverseFocalLoss", "gamma", gamma, low=0.0)
        super().__init__(
            gamma,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
        )

    def _gamma(self) -> float | Tensor | GammaTable:
        assert self.gamma is not None
        return -self.gamma

    def _settings(self) -> dict[str, object]:
        return {"gamma": digits(self.gamma) if isinstance(self.gamma, Tensor) else self.gamma}


class PolyFocalLoss(FocalLoss):
    r"""The module form of :func:`focalkern.poly_focal_loss`.

    .. math:: L = -(1 - p)^\gamma \log p + \epsilon (1 - p)^{\gamma + 1}

    Args:
        gamma: at least 0; a number, tensor, parameter or table, as :class:`FocalLoss` takes them.
        epsilon: a finite number, a setting of the constructor.
        weight: [C] class weights, floating point; None for equal weights.
        ignore_index: label whose samples count neither in the loss nor in the mean.
        reduction: "none", "mean" or "sum". The mean divides by the summed weight of the samples.
        label_smoothing: e in [0, 1]; the target becomes (1 - e) t + e / C.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, value or shape; a gamma below 0.

    Source: Leng et al., PolyLoss, ICLR 2022 (arXiv 2204.12511).

    Example:
        >>> criterion = fk.PolyFocalLoss(gamma=0.0, epsilon=2.0)  # Poly-1 cross-entropy
        >>> criterion
        PolyFocalLoss(gamma=0.0, epsilon=2.0)
        >>> criterion(torch.tensor([[1.5, 0.0]]), torch.tensor([0]))
        tensor(0.5663)
    """

    _gamma_may_be_negative = False

    def __init__(
        self,
        gamma: float | Tensor | GammaTable = 2.0,
        epsilon: float = 1.0,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(gamma, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.epsilon = number("PolyFocalLoss", "epsilon", epsilon)

    def _loss(self, input: Tensor, target: Tensor, gamma: float | Tensor | GammaTable) -> Tensor:
        return poly_focal_loss(
            input,
            target,
            gamma,
            self.epsilon,
            weight=self._buffers["weight"],
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "epsilon": self.epsilon}
