"""Rows on disk, for a state that is to be exact."""

import tempfile
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Spill"]


class Spill:
    """Rows in two unnamed temporary files, which the system removes with the process."""

    def __init__(self, n_classes: int, dtype: torch.dtype, folder: str | None) -> None:
        self.n_classes, self.dtype, self.folder = n_classes, dtype, folder
        self.n_rows = 0
        self.input, self.target = (tempfile.TemporaryFile(dir=folder) for _ in range(2))  # noqa: SIM115
        for stream in (self.input, self.target):
            weakref.finalize(self, stream.close)

    def append(self, input: Tensor, target: Tensor) -> None:
        """Add rows; when that fails, for want of disk space, those before them are still there."""
        if input.dtype != self.dtype:
            raise TypeError(
                f"calibration_grid: logits must be {self.dtype} as in the batches before with exact=True, "
                f"got {input.dtype}"
            )
        for stream, tensor in ((self.input, input), (self.target, target)):
            size = tensor.element_size() * (self.n_classes if tensor is input else 1)
            stream.seek(self.n_rows * size)
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            stream.flush()
        self.n_rows += len(target)

    def load(self) -> tuple[Tensor, Tensor]:
        """[N, C] and [N], mapped."""
        mapped = []
        for stream, dtype, width in ((self.input, self.dtype, self.n_classes), (self.target, torch.int64, 1)):
            data = np.memmap(stream, dtype=np.uint8, mode="r+", shape=(self.n_rows * width * dtype.itemsize,))
            mapped.append(torch.from_numpy(data).view(dtype))
        return mapped[0].view(self.n_rows, self.n_classes), mapped[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Spill":
        other = Spill(self.n_classes, self.dtype, self.folder)
        if self.n_rows:
            other.append(*self.load())
        return other

    def __reduce__(self) -> Any:
        raise TypeError("CalibrationGridState: a state with exact=True cannot be pickled; save its state_dict()")
