"""Losses for training: modules that replace ``torch.nn.CrossEntropyLoss``.

A loss is called with logits [C], [N, C] or [N, C, d1, ...] and labels [], [N] or [N, d1, ...] (int64, int32, uint8), or
class probabilities of the shape of the logits. Four options have the same meaning as in cross-entropy:

weight
    [C] class weights, a buffer. In a loss that is not a sum over the classes of the target (Brier, the norm of the
    logits), a sample has the weight of its label, or the mean of the weights under its class probabilities.
ignore_index
    Samples with this label count neither in the loss nor in the mean; their logits may be NaN.
reduction
    "none", "mean" or "sum"; the mean divides by the summed weight of the samples that count.
label_smoothing
    Mixes the target with the uniform distribution. For label smoothing as a baseline use
    ``FocalLoss(0.0, label_smoothing=0.05)`` or torch's cross-entropy.

Fused kernels compute the focal family and the Brier score, and look up the tables of schedules. So a training step does
not synchronise the device or loop in Python, and new values in a table cause no recompilation. The norm of the logits,
and MMCE where it has no kernel, are plain torch.
No loss adds an epsilon to a probability or clamps it. Half-precision logits are computed in float32, and the loss has
the dtype of the logits (float32 under autocast). Labels out of range are treated as in :func:`focalkern.focal_loss`.

A module's state is loaded completely or, on an error, not at all.
"""

from focalkern.losses._adafocal import AdaFocalLoss
from focalkern.losses._adafocal_state import AdaFocalRecord
from focalkern.losses._baselines import BrierLoss, DualFocalLoss, LogitNormPenalty, MMCELoss
from focalkern.losses._flsd import FLSDLoss
from focalkern.losses._focal import DFTLoss, FocalLoss, InverseFocalLoss, PolyFocalLoss
from focalkern.losses._linear import LinearAdaFocalLoss, LinearFLSDLoss, LinearFocalLoss
from focalkern.losses._scored import IABCELoss, MatchabilityLoss, VarifocalLoss
from focalkern.losses._sigmoid import AsymmetricLoss, QualityFocalLoss, SigmoidFocalLoss
from focalkern.losses._weights import class_balanced_weight
from focalkern.ops.scored_losses import ia_bce_loss, matchability_loss, varifocal_loss
from focalkern.ops.sigmoid_loss import asymmetric_loss, quality_focal_loss, sigmoid_focal_loss

__all__ = [
    "AdaFocalLoss",
    "AdaFocalRecord",
    "AsymmetricLoss",
    "BrierLoss",
    "DFTLoss",
    "DualFocalLoss",
    "FLSDLoss",
    "FocalLoss",
    "IABCELoss",
    "InverseFocalLoss",
    "LinearAdaFocalLoss",
    "LinearFLSDLoss",
    "LinearFocalLoss",
    "LogitNormPenalty",
    "MMCELoss",
    "MatchabilityLoss",
    "PolyFocalLoss",
    "QualityFocalLoss",
    "SigmoidFocalLoss",
    "VarifocalLoss",
    "asymmetric_loss",
    "class_balanced_weight",
    "ia_bce_loss",
    "matchability_loss",
    "quality_focal_loss",
    "sigmoid_focal_loss",
    "varifocal_loss",
]
