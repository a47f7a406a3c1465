"""The content of a state: sums over its rows, or the rows themselves in a temporary file."""

import copy
import tempfile
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from focalkern.ops.calibration_grid import CalibrationGrid, calibration_grid
from focalkern.ops.calibration_sums import CalibrationSums, add_calibration_sums, check_rows
from focalkern.streaming._config import GridConfig, short
from focalkern.streaming._packed import packed, unpacked
from focalkern.streaming._tables import Cut, bounds_of, tables_of

__all__ = ["Accumulator", "SampleStore", "SumAccumulator"]


class Accumulator(Protocol):
    """Accumulates batches; add() and merge() leave it unchanged when they raise."""

    @property
    def n_rows(self) -> int: ...
    @property
    def device(self) -> torch.device | None: ...
    def add(self, input: Tensor, target: Tensor) -> None: ...
    def merge(self, other: Self) -> None:
        """Add the rows of another accumulator, which has at least one."""

    def grid(self) -> CalibrationGrid: ...
    def error_bound(self, criterion: str) -> Tensor:
        """[Gg, Gt]: error bounds of :meth:`grid`."""

    def saved(self) -> dict[str, Tensor]:
        """The content, for a saved state; later batches do not change it."""

    def load(self, subject: str, tensors: Any, n_rows: int) -> None:
        """Replace the content with a saved state."""


class SumAccumulator:
    """Sums of the cells; their size does not depend on the number of rows."""

    def __init__(self, config: GridConfig) -> None:
        self.config = config
        self.sums: CalibrationSums | None = None

    @property
    def n_rows(self) -> int:
        return 0 if self.sums is None else int(self.sums.rows)

    @property
    def device(self) -> torch.device | None:
        return None if self.sums is None else self.sums.items()[0][1].device

    def zeros(self, device: torch.device) -> CalibrationSums:
        config = self.config
        sizes = (len(config.gammas), len(config.temperatures), config.n_summed)
        return CalibrationSums.zeros(*sizes, config.criteria, device)

    def add(self, input: Tensor, target: Tensor) -> None:
        sums, config = self.sums, self.config
        if sums is None or self.device != input.device:
            sums = self.zeros(input.device)
        options: dict[str, Any] = {"criteria": config.criteria, "sketch": config.sketched, **config.of_rows}
        add_calibration_sums(sums, input, target, config.gammas, config.temperatures, **options)
        if self.sums is None:
            self.sums = sums
        elif sums is not self.sums:
            self.sums = _added(self.sums, sums)

    def merge(self, other: "SumAccumulator") -> None:
        assert other.sums is not None
        self.sums = copy.deepcopy(other.sums) if self.sums is None else _added(self.sums, other.sums)

    def grid(self) -> CalibrationGrid:
        assert self.sums is not None
        config, tables = self.config, tables_of(self.sums, self._cut)
        return CalibrationGrid(
            gammas=config.gammas.to(self.device),
            temperatures=config.temperatures.to(self.device),
            tables={name: tables[name].view(len(config.gammas), -1) for name in config.criteria},
            n_bins=config.n_bins,
            estimator=config.estimator,
        )

    def error_bound(self, criterion: str) -> Tensor:
        assert self.sums is not None
        if criterion in ("ece", "mce") and self.config.sketched:
            return bounds_of(self.sums, self._cut)[criterion].view(len(self.config.gammas), -1)
        return _no_bound(self.config, self.device)

    def saved(self) -> dict[str, Tensor]:
        return {} if self.sums is None else {name: tensor.clone() for name, tensor in self.sums.items()}

    def __getstate__(self) -> dict[str, Any]:
        """The packed sums, for pickle."""
        return {"config": self.config, "sums": None if self.sums is None else packed(self.sums)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.config = state["config"]
        self.sums = None if state["sums"] is None else unpacked(state["sums"])

    def __deepcopy__(self, memo: dict[int, Any]) -> "SumAccumulator":
        other = SumAccumulator(self.config)
        other.sums = copy.deepcopy(self.sums, memo)
        return other

    def load(self, subject: str, tensors: Any, n_rows: int) -> None:
        self.sums = None if n_rows == 0 else _saved_sums(subject, tensors, self.zeros(torch.device("cpu")), n_rows)

    @property
    def _cut(self) -> Cut:
        return Cut(self.config.n_bins, self.config.estimator, self.config.sketched, self.n_rows)


class SampleStore:
    """The rows themselves, in a temporary file in ``folder``."""

    def __init__(self, config: GridConfig, folder: str | None) -> None:
        self.config, self.folder = config, folder
        self.rows: Spill | None = None

    @property
    def n_rows(self) -> int:
        return 0 if self.rows is None else self.rows.n_rows

    @property
    def device(self) -> torch.device | None:
        return None if self.rows is None else torch.device("cpu")

    def add(self, input: Tensor, target: Tensor) -> None:
        check_rows(input, target, self.config.gammas, self.config.temperatures, **self.config.of_rows)
        target = target.to(torch.int64)
        kept = target != self.config.ignore_index
        self._append(input[kept].cpu(), target[kept].cpu())

    def merge(self, other: "SampleStore") -> None:
        assert other.rows is not None
        self._append(*other.rows.load())

    def grid(self) -> CalibrationGrid:
        assert self.rows is not None
        config, (input, target) = self.config, self.rows.load()
        return calibration_grid(
            input,
            target,
            config.gammas,
            config.temperatures,
            n_bins=config.n_bins,
            criteria=config.criteria,
            estimator=config.estimator,
            input_kind=config.input_kind,
            ignore_index=config.ignore_index,
        )

    def error_bound(self, criterion: str) -> Tensor:
        return _no_bound(self.config, self.device)

    def saved(self) -> dict[str, Tensor]:
        return {} if self.rows is None else dict(zip(("input", "target"), self.rows.load(), strict=True))

    def load(self, subject: str, tensors: Any, n_rows: int) -> None:
        if n_rows == 0:
            self.rows = None
            return
        input, target = _saved_rows(subject, tensors)
        check_rows(input, target, self.config.gammas, self.config.temperatures, **self.config.of_rows)
        rows = Spill(input.shape[1], input.dtype, self.folder)
        rows.append(input, target)
        self.rows = rows

    def _append(self, input: Tensor, target: Tensor) -> None:
        rows = self.rows or Spill(input.shape[1], input.dtype, self.folder)
        rows.append(input, target)
        self.rows = rows


def _no_bound(config: GridConfig, device: torch.device | None) -> Tensor:
    return torch.zeros(len(config.gammas), len(config.temperatures), dtype=torch.float64, device=device)


def _added(sums: CalibrationSums, others: CalibrationSums) -> CalibrationSums:
    """New sums; the caller replaces the old ones in one step, so that an interruption leaves valid sums."""
    with torch.inference_mode(False):  # as in CalibrationSums.zeros
        total = CalibrationSums(sums.rows + others.rows)
        for (name, mine), (_, other) in zip(sums.items(), others.items(), strict=True):
            setattr(total, name, mine + other.to(mine.device))
    return total


class Spill:
    """Rows in two unnamed temporary files, which the system removes when the process ends."""

    def __init__(self, n_classes: int, dtype: torch.dtype, folder: str | None) -> None:
        self.n_classes, self.dtype, self.folder = n_classes, dtype, folder
        self.n_rows = 0
        self.input, self.target = (tempfile.TemporaryFile(dir=folder) for _ in range(2))  # noqa: SIM115
        for stream in (self.input, self.target):
            weakref.finalize(self, stream.close)

    def append(self, input: Tensor, target: Tensor) -> None:
        """Add rows. After an error, such as a full disk, the earlier rows are unchanged."""
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


def _saved_sums(subject: str, tensors: Any, zeros: CalibrationSums, n_samples: int) -> CalibrationSums:
    """``zeros`` filled from a saved state.

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


def _saved_rows(subject: str, tensors: Any) -> tuple[Tensor, Tensor]:
    """Input and target of an exact state, on the CPU.

    Raises:
        ValueError: other tensors, or none.
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
