"""Registers the definitions of this package as the compiled module's operators ``*_composite``."""

import torch

from focalkern.fallback.calibration_map import calibration_map_composite
from focalkern.fallback.mmce_loss import mmce_loss_composite
from focalkern.fallback.row_loss import focal_loss_composite
from focalkern.fallback.sigmoid_loss import sigmoid_loss_composite
from focalkern.fallback.spline_map import spline_map_composite

__all__ = ["register_composites"]


def register_composites() -> torch.library.Library:
    """Registers the operators, which the compiled module must have declared. They stay registered while the result
    lives."""
    library = torch.library.Library("focalkern", "IMPL")
    for function in (
        calibration_map_composite,
        focal_loss_composite,
        mmce_loss_composite,
        sigmoid_loss_composite,
        spline_map_composite,
    ):
        # Without the second key, torch.func.vmap would call the operator once per sample, with a warning.
        for key in ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition"):
            # A second import of this package registers them again, which torch 2.11 refuses without allow_override.
            library.impl(function.__name__, function, key, allow_override=True)
    return library
