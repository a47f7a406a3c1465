"""What a state has seen of its rows: sums, whose size does not depend on their number, or the rows themselves."""

import copy
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from focalkern.ops.calibration_grid import CalibrationGrid, calibration_grid
from focalkern.ops.calibration_sums import CalibrationSums, add_calibration_sums, check_rows
from focalkern.streaming._config import GridConfig
from focalkern.streaming._saved import saved_rows, saved_sums
from focalkern.streaming._spill import Spill
from focalkern.streaming._tables import Cut, bounds_of, tables_of

__all__ = ["Seen", "SeenRows", "SeenSums"]


class Seen(Protocol):
    """Both kinds. A batch or another one's rows are added all of them or, when an error is raised, none."""

    @property
    def n_rows(self) -> int: ...
    @property
    def device(self) -> torch.device | None: ...
    def add(self, input: Tensor, target: Tensor) -> None: ...
    def merge(self, other: Self) -> None:
        """Add what another one has seen, which is not nothing."""

    def grid(self) -> CalibrationGrid: ...
    def error_bound(self, criterion: str) -> Tensor:
        """[Gg, Gt]: how far :meth:`grid` can be off."""

    def tensors(self) -> dict[str, Tensor]:
        """What is saved."""

    def load(self, subject: str, tensors: Any, n_rows: int) -> None:
        """Have what was saved in place of what was seen."""


class SeenSums:
    """The sums of the cells."""

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

    def merge(self, other: "SeenSums") -> None:
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

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.sums is None else dict(self.sums.items())

    def load(self, subject: str, tensors: Any, n_rows: int) -> None:
        self.sums = None if n_rows == 0 else saved_sums(subject, tensors, self.zeros(torch.device("cpu")), n_rows)

    @property
    def _cut(self) -> Cut:
        return Cut(self.config.n_bins, self.config.estimator, self.config.sketched, self.n_rows)


class SeenRows:
    """The rows, in a temporary file in ``folder``."""

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

    def merge(self, other: "SeenRows") -> None:
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

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.rows is None else dict(zip(("input", "target"), self.rows.load(), strict=True))

    def load(self, subject: str, tensors: Any, n_rows: int) -> None:
        if n_rows == 0:
            self.rows = None
            return
        input, target = saved_rows(subject, tensors)
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
    """New sums, which take the place of the old ones in one step."""
    with torch.inference_mode(False):  # as in CalibrationSums.zeros
        total = CalibrationSums(sums.rows + others.rows)
        for (name, mine), (_, other) in zip(sums.items(), others.items(), strict=True):
            setattr(total, name, mine + other.to(mine.device))
    return total
