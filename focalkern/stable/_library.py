"""Loads the stable module and registers its operators with torch."""

import ctypes
from pathlib import Path
from typing import Any

import torch

from focalkern import fallback
from focalkern.fallback.spline_map import spline_map_composite
from focalkern.stable import calibration_map, row_loss, sigmoid_loss
from focalkern.stable._autograd import Operator

__all__ = ["PLAIN_OPERATORS", "build_info", "load", "row_losses"]

# Registered, but computed by the fallback: the module has no kernel of these.
PLAIN_OPERATORS = ("calibration_grid",)

_info: dict[str, Any] = {}
_names: list[str] = []
_registered: list[torch.library.Library] = []  # operators live as long as this


def load(path: Path) -> None:
    """Registers the operators of a stable module, whose library torch has loaded."""
    losses = ctypes.CDLL(str(path)).focalkern_row_losses
    losses.restype = ctypes.c_char_p
    numbers = {name: int(saved) for name, saved in (entry.split(":") for entry in losses().decode().split())}
    row_loss.SAVED_NUMBERS.update(numbers)
    _names[:] = numbers
    _info.update(torch="2.11 or newer (stable ABI)", cuda="cuda" in path.name)
    keys = ("CPU", "CUDA") if _info["cuda"] else ("CPU",)
    library = torch.library.Library("focalkern", "IMPL")
    for name, operator in (row_loss.OPERATORS | sigmoid_loss.OPERATORS | calibration_map.OPERATORS).items():
        for key in keys:
            library.impl(name, operator.kernel, key)
        _describe(library, name, operator)
    grid = Operator(fallback.calibration_grid, lambda *arguments: fallback.calibration_grid(*arguments))
    for key in keys:
        library.impl("calibration_grid", grid.kernel, key)
    _describe(library, "calibration_grid", grid)
    library.impl("spline_map_forward", _spline_map, "CompositeImplicitAutograd")
    _registered.append(library)


def _describe(library: torch.library.Library, name: str, operator: Operator) -> None:
    torch.library.register_fake(f"focalkern::{name}", operator.shapes, lib=library)
    if operator.derivative is not None:
        torch.library.register_autograd(
            f"focalkern::{name}", operator.derivative, setup_context=operator.keep, lib=library
        )


def _spline_map(*arguments: Any) -> torch.Tensor:
    given: Any = (*arguments[:8], *arguments[9:11])  # without keep_order and validate
    result: torch.Tensor = spline_map_composite(*given)
    return result


def row_losses() -> list[str]:
    """The names of the losses of rows, in the order of their numbers."""
    return _names


def build_info() -> dict[str, Any]:
    """As the compiled module's."""
    return _info
