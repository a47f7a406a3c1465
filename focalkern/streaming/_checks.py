"""Checks of what comes in, with the name of the state in front of what the operator says."""

from typing import Any

import numpy as np
from torch import Tensor

from focalkern.ops.calibration_grid import _axis

__all__ = ["as_ours", "checked_axis", "checked_int", "short"]


class as_ours:  # noqa: N801  # reads as a statement
    """Puts the name of the state's method in front of errors in place of the operator's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        text = str(error)
        if isinstance(error, TypeError | ValueError | IndexError | NotImplementedError) and text.startswith(
            "calibration_grid: "
        ):
            text = text.removeprefix("calibration_grid: ")
            if text.startswith("input "):
                text = "logits " + text.removeprefix("input ")
            raise type(error)(f"{self.name}: {text}") from None


def checked_axis(name: str, values: Any, above: float) -> Tensor:
    axis = _axis(name, values)
    if len(axis) == 0:
        raise ValueError(f"calibration_grid: {name} must have at least one value, got none")
    good = axis.isfinite() & (axis > above)
    if not bool(good.all()):
        index = int((~good).nonzero()[0])
        raise ValueError(
            f"calibration_grid: {name} must be finite and greater than {above}, got {float(axis[index]):g} at index "
            f"{index}"
        )
    return axis.clone()


def checked_int(name: str, value: Any, least: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"CalibrationGridState: {name} must be an int, got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"CalibrationGridState: {name} must be at least {least}, got {value}")
    return int(value)


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
