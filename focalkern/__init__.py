"""Fused focal losses and focal calibration for PyTorch."""

from focalkern.gamma import FLSD_53, GammaTable
from focalkern.ops._extension import build_info

__version__ = "0.1.0"

__all__ = ["FLSD_53", "GammaTable", "build_info"]
