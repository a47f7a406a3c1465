"""What a saved state holds, checked."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from focalkern.ops.calibration_sums import CalibrationSums
from focalkern.streaming._checks import short

__all__ = ["saved_rows", "saved_sums"]


def saved_sums(subject: str, tensors: Any, zeros: CalibrationSums, n_samples: int) -> CalibrationSums:
    """``zeros``, filled with what was saved.

    Raises:
        ValueError: other tensors than those of ``zeros``.
    """
    wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in zeros.items()}
    found = _shapes(tensors)
    if found != wanted:
        raise ValueError(f"{subject} must have the tensors of this grid, got {short(found)}")
    zeros.rows.fill_(n_samples)
    for name, tensor in zeros.items():
        tensor.copy_(tensors[name])
    return zeros


def saved_rows(subject: str, tensors: Any) -> tuple[Tensor, Tensor]:
    """Input and target of an exact state, on the CPU.

    Raises:
        ValueError: others, or none.
    """
    found = _shapes(tensors)
    if set(found) != {"input", "target"} or None in found.values():
        raise ValueError(f"{subject} must have the rows of an exact state, got {short(found)}")
    return tensors["input"].cpu(), tensors["target"].cpu()


def _shapes(tensors: Any) -> dict[str, Any]:
    return {
        name: (tensor.shape, tensor.dtype) if isinstance(tensor, Tensor) else None
        for name, tensor in (tensors.items() if isinstance(tensors, Mapping) else ())
    }
