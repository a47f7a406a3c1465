"""Codes that Python shares with the compiled module."""

from enum import IntEnum

__all__ = ["ROW_LOSS_NAMES", "RowLoss"]


class RowLoss(IntEnum):
    """The losses of rows, by their numbers in csrc/math/row_losses.def."""

    FOCAL = 0
    POLY_FOCAL = 1
    DUAL_FOCAL = 2
    BRIER = 3
    MMCE = 4


# In error messages, in the order of the numbers: `row_losses()` of the compiled module.
ROW_LOSS_NAMES = ("focal_loss", "poly_focal_loss", "DualFocalLoss", "BrierLoss", "MMCELoss")
