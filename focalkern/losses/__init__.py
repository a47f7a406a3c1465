"""Losses for training: modules that replace ``torch.nn.CrossEntropyLoss``.

Called with logits [C], [N, C] or [N, C, d1, ...] and labels [], [N] or [N, d1, ...] (int64, int32, uint8) or class
probabilities of the shape of the logits. Four options have the same meaning as in cross-entropy:

weight
    [C] class weights, a buffer. Where a loss is no sum over the classes of the target (Brier, the norm of the logits),
    a sample has the weight of its label, or the mean of the weights under its class probabilities.
ignore_index
    Samples with this label count neither in the loss nor in the mean; their logits may be NaN.
reduction
    "none", "mean" or "sum"; the mean divides by the summed weight of the samples that count.
label_smoothing
    Mixes the target with the uniform distribution. Label smoothing as a baseline is thus
    ``FocalLoss(0.0, label_smoothing=0.05)``, or torch's own cross-entropy, and has no class here.

The focal family and the Brier score run in fused kernels, and schedules are tables that are looked up there: a step
neither waits for the device nor loops in Python, and other values in a table compile nothing again. MMCE and the norm
of the logits are plain torch around them.
Nowhere is an epsilon or a clamp on a probability; half-precision logits are computed in float32, and the loss has the
dtype of the logits (float32 under autocast). Labels out of range are treated as in :func:`focalkern.focal_loss`.

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
