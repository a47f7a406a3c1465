"""The calibration grid for data in batches, from files larger than memory, or from several processes."""

from focalkern.streaming._state import CalibrationGridState

__all__ = ["CalibrationGridState"]
