"""Focal losses from logits as fused kernels: focalkern's, for the Kernel Hub."""

from tools.hub_package import layers
from tools.hub_package._losses import focal_loss, sigmoid_focal_loss

__all__ = ["focal_loss", "layers", "sigmoid_focal_loss"]
