"""Checks of what comes in, with the name of the state in front of what the operator says."""

from typing import Any

import torch
from torch import Tensor

from focalkern.ops.calibration_grid import _axis

__all__ = ["adds_nothing", "as_ours", "checked_axis", "short"]


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


def adds_nothing(logits: Tensor, target: Tensor, ignore_index: int) -> bool:
    """Whether a batch of the right form has no row that counts, which the operator would refuse."""
    fits = logits.dim() == 2 and target.dim() == 1 and len(logits) == len(target) and logits.is_floating_point()
    if not fits or target.dtype not in (torch.int64, torch.int32, torch.uint8) or target.device != logits.device:
        return False
    return len(target) == 0 or bool((target.to(torch.int64) == ignore_index).all())


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
