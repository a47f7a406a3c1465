"""The definitions of the sigmoid losses, for plain torch."""

from focalkern.reference._scored_losses import ia_bce_loss, matchability_loss, varifocal_loss
from focalkern.reference._sigmoid_losses import asymmetric_loss, quality_focal_loss, sigmoid_focal_loss

__all__ = [
    "asymmetric_loss",
    "ia_bce_loss",
    "matchability_loss",
    "quality_focal_loss",
    "sigmoid_focal_loss",
    "varifocal_loss",
]
