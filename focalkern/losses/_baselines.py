"""Dual focal loss and the baselines of the papers. The logit norm is plain torch, as is MMCE if it has no kernel."""

from typing import Literal

from torch import Tensor

from focalkern._checks import flag
from focalkern._types import Reduction
from focalkern.fallback.mmce_loss import batch_error
from focalkern.losses._base import Batch, Loss, in_dtype_of, number, rows_of
from focalkern.ops.focal_loss import focal_loss
from focalkern.ops.softmax_losses import brier_loss, dual_focal_loss, mmce_loss


class DualFocalLoss(Loss):
    r"""Dual focal loss: the factor also depends on the next lower probability p_j.

    .. math:: L = -(1 - p_y + p_j)^\gamma \log p_y

    p_j is the largest probability strictly below p_y, or 0 if no probability is below. The gradient goes through p_y
    and p_j.

    Args:
        gamma: a number, at least 0. 0 is cross-entropy.
        weight: [C] class weights, floating point; None for equal weights.
        ignore_index: samples with this label have loss 0 and do not count in the mean.
        reduction: "none", "mean" or "sum". The mean divides by the summed weight of the samples.
        label_smoothing: e in [0, 1]. With it ``L = -sum_i w_i t_i (1 - p_i + p_j(i))^gamma log p_i`` with t = (1 - e)
            onehot + e / C, as in the focal loss. Each class i has its own next lower probability p_j(i).
        detach_modulation: treat the factor before log p as a constant.

    Raises:
        TypeError, ValueError, IndexError: an argument of the wrong kind, value or shape; a label out of range. Targets
            are labels only: class probabilities raise TypeError.

    Source: Tao, Dong & Xu, Dual Focal Loss for Calibration, ICML 2023.

    Example:
        >>> criterion = fk.DualFocalLoss(gamma=5.0, reduction="none")
        >>> logits = torch.tensor([[1.0, 0.8, -2.0], [1.0, -2.0, 0.8]])
        >>> criterion(logits, torch.tensor([0, 1]))
        tensor([0.3753, 3.1672])
    """

    def __init__(
        self,
        gamma: float = 5.0,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.gamma = number("DualFocalLoss", "gamma", gamma, low=0.0)
        self.detach_modulation = flag("DualFocalLoss", "detach_modulation", detach_modulation)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return dual_focal_loss(
            input,
            target,
            self.gamma,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            detach_modulation=self.detach_modulation,
        )

    def _settings(self) -> dict[str, object]:
        return {"gamma": self.gamma}


class BrierLoss(Loss):
    r"""Brier score of the softmax.

    .. math:: L = w \sum_k (p_k - t_k)^2

    with t the target after label smoothing and w the weight of the sample. The score is between 0 and 2. It is a sum
    over the classes, as in :func:`focalkern.metrics.brier_score` (``torch.nn.MSELoss`` would divide it by C).

    Args:
        weight: [C] class weights, floating point; None for equal weights.
        ignore_index: samples with this label have loss 0 and do not count in the mean.
        reduction: "none", "mean" or "sum". The mean divides by the summed weight of the samples.
        label_smoothing: e in [0, 1]; the target becomes (1 - e) t + e / C.

    Raises:
        TypeError, ValueError, IndexError: an argument of the wrong kind, value or shape; a label out of range.

    Source: Brier 1950; as a training loss in Mukhoti et al. 2020 (arXiv 2002.09437).

    Example:
        >>> logits, target = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]]), torch.tensor([0, 2])
        >>> fk.BrierLoss()(logits, target)
        tensor(0.5261)
        >>> fk.metrics.brier_score(logits.softmax(-1), target)
        tensor(0.5261, dtype=torch.float64)
    """

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return brier_loss(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class MMCELoss(Loss):
    r"""Cross-entropy plus the maximum mean calibration error of the batch.

    .. math::
        L = \text{CE} + \lambda \sqrt{\sum_{ij} a_i a_j e^{-|r_i - r_j| / h}}, \qquad a_i = (c_i - r_i) / m

    over the m samples that are not ignored, with r the top-1 confidence, and c = 1 if the top class is the target and 0
    if not (with class probabilities: the target's probability of the top class). ``weighted=True`` balances correct and
    incorrect samples:

    .. math:: a_i = c_i (1 - r_i) / m_{correct} - (1 - c_i) r_i / m_{incorrect}

    The balanced term is 0 for a batch without correct or without incorrect samples, as in the published code. Both
    forms take O(N log N) time and O(N) memory, although the sum has N^2 terms, and are summed in float64.

    Args:
        coefficient: lambda, at least 0.
        weighted: use the balanced form.
        bandwidth: h, at least 0.01.
        weight: [C] class weights, floating point, in the cross-entropy only; None for equal weights.
        ignore_index: samples with this label have loss 0 and do not count in the mean.
        reduction: "mean" or "sum". With "sum", the loss is the summed cross-entropy plus m times the second term. There
            is no "none", because the error is a property of the batch.
        label_smoothing: e in [0, 1], in the cross-entropy only.

    At 0, the derivative of the square root is defined as 0. Under ``torch.use_deterministic_algorithms`` CUDA raises an
    error, because its prefix sums are not deterministic.

    Raises:
        TypeError, ValueError, IndexError: an argument of the wrong kind, value or shape; a label out of range.

    Source: Kumar, Sarawagi & Jain, Trainable Calibration Measures for Neural Networks from Kernel Mean Embeddings, ICML
    2018. (The code of Mukhoti et al. omits the square root in the plain form, and divides the weighted sums twice.)

    Example:
        >>> logits, target = torch.tensor([[4.0, 0.0], [3.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1, 0])
        >>> fk.MMCELoss(coefficient=2.0)(logits, target)
        tensor(1.6238)
        >>> fk.MMCELoss(coefficient=0.0)(logits, target)  # the cross-entropy alone
        tensor(1.0646)
    """

    def __init__(
        self,
        coefficient: float = 2.0,
        *,
        weighted: bool = False,
        bandwidth: float = 0.4,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        if reduction == "none":  # type: ignore[comparison-overlap]
            raise ValueError("MMCELoss: reduction must be 'mean' or 'sum', got 'none': the error belongs to the batch")
        self.coefficient = number("MMCELoss", "coefficient", coefficient, low=0.0)
        self.bandwidth = number("MMCELoss", "bandwidth", bandwidth, low=0.01)  # e^(1/h) stays far from overflow
        self.weighted = flag("MMCELoss", "weighted", weighted)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if self.weight is None and self.label_smoothing == 0:
            fused = mmce_loss(
                input, target, self.coefficient, self.weighted, self.bandwidth, self.reduction, self.ignore_index
            )
            if fused is not None:
                return fused
        rows = rows_of(self, input, target)
        cross_entropy = cross_entropy_of(self, rows, target)
        top = rows.z.detach().argmax(-1, keepdim=True)
        mmce, count = batch_error(rows.z, top, rows.share_of(top), rows.valid, self.weighted, self.bandwidth)
        if self.reduction == "sum":
            mmce = mmce * count
        return in_dtype_of(cross_entropy + self.coefficient * mmce.to(cross_entropy), input)

    def _settings(self) -> dict[str, object]:
        return {"coefficient": self.coefficient, "weighted": self.weighted, "bandwidth": self.bandwidth}


class LogitNormPenalty(Loss):
    r"""Cross-entropy plus the L1 norm of the logits.

    .. math:: L = \text{CE} + \alpha w \sum_k |z_k|

    with w the weight of the sample. A logit of -inf (a masked class) makes the norm and the loss infinite.

    Args:
        coefficient: alpha, at least 0; the paper searches 0.001 to 0.1.
        weight: [C] class weights, floating point; None for equal weights.
        ignore_index: samples with this label have loss 0 and do not count in the mean.
        reduction: "none", "mean" or "sum". The mean divides by the summed weight of the samples.
        label_smoothing: e in [0, 1], in the cross-entropy only.

    Raises:
        TypeError, ValueError, IndexError: an argument of the wrong kind, value or shape; a label out of range.

    Source: Wang, Feng & Zhang, NeurIPS 2021.

    Example:
        >>> logits, target = torch.tensor([[4.0, -1.0], [3.0, 0.0]]), torch.tensor([0, 1])
        >>> fk.LogitNormPenalty(coefficient=0.01)(logits, target)
        tensor(1.5677)
        >>> torch.nn.functional.cross_entropy(logits, target) + 0.01 * logits.abs().sum(-1).mean()
        tensor(1.5677)
    """

    def __init__(
        self,
        coefficient: float = 0.01,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.coefficient = number("LogitNormPenalty", "coefficient", coefficient, low=0.0)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        rows = rows_of(self, input, target)
        cross_entropy = cross_entropy_of(self, rows, target)
        penalty = rows.reduce(rows.z.abs().sum(-1), self.reduction)
        return in_dtype_of(cross_entropy + self.coefficient * penalty, input)

    def _settings(self) -> dict[str, object]:
        return {"coefficient": self.coefficient}


def cross_entropy_of(loss: Loss, rows: Batch, target: Tensor) -> Tensor:
    # From the float32 rows: gradients of the half-precision logits would be rounded before they are added.
    return focal_loss(
        rows.z.movedim(-1, min(rows.z.dim() - 1, 1)),
        target,
        0.0,
        weight=loss.weight,
        ignore_index=loss.ignore_index,
        reduction=loss.reduction,
        label_smoothing=loss.label_smoothing,
    )
