"""Loads the stable module and registers its operators with torch."""

import ctypes
from pathlib import Path
from typing import Any

import torch

from focalkern.stable import calibration_grid, calibration_map, row_loss, sigmoid_loss, spline_map
from focalkern.stable._autograd import register

__all__ = ["build_info", "load", "row_losses"]

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
    for operator in (row_loss.OPERATOR, sigmoid_loss.OPERATOR, calibration_map.OPERATOR, spline_map.OPERATOR):
        register(library, operator, keys)
    for key in keys:
        library.impl("calibration_grid", calibration_grid.calibration_grid, key)
    torch.library.register_fake("focalkern::calibration_grid", calibration_grid.grid_shapes, lib=library)
    _registered.append(library)


def row_losses() -> list[str]:
    """The names of the losses of rows, in the order of their numbers."""
    return _names


def build_info() -> dict[str, Any]:
    """The build information, as that of the compiled module."""
    return _info
