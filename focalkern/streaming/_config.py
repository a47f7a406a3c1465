"""What a grid over batches is of: its arguments, checked, and how two of them are compared."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from torch import Tensor

from focalkern._checks import MOST_BINS, integer, label
from focalkern.ops.calibration_grid import _ESTIMATORS, _INPUT_KINDS, Criterion, _check_option, _criteria
from focalkern.streaming._checks import as_ours, checked_axis, short

__all__ = ["GridConfig"]


@dataclass(frozen=True, eq=False)
class GridConfig:
    """The arguments of a :class:`CalibrationGridState`, as it documents them."""

    gammas: Tensor  # [Gg] float64
    temperatures: Tensor  # [Gt] float64
    n_bins: int
    criteria: tuple[Criterion, ...]
    estimator: Literal["equal_width", "equal_mass", "equal_mass_interp"]
    input_kind: Literal["logits", "probs"]
    ignore_index: int
    n_buckets: int
    exact: bool  # without effect on bins of equal width, which are exact anyway

    @classmethod
    def checked(
        cls,
        gammas: Sequence[float] | np.ndarray[Any, Any] | Tensor,
        temperatures: Sequence[float] | np.ndarray[Any, Any] | Tensor,
        *,
        n_bins: int,
        criteria: Sequence[str],
        estimator: Literal["equal_width", "equal_mass", "equal_mass_interp"],
        input_kind: Literal["logits", "probs"],
        ignore_index: int,
        n_buckets: int,
        exact: bool,
    ) -> Self:
        """The arguments, or the error of the one that cannot be."""
        with as_ours("CalibrationGridState"):
            axes = checked_axis("gammas", gammas, -1), checked_axis("temperatures", temperatures, 0)
            names = _criteria(criteria)
            _check_option("estimator", estimator, _ESTIMATORS)
            _check_option("input_kind", input_kind, _INPUT_KINDS)
        n_bins = integer("CalibrationGridState", "n_bins", n_bins, 1, MOST_BINS)
        n_buckets = integer("CalibrationGridState", "n_buckets", n_buckets, 16, MOST_BINS)
        ignore_index = label("CalibrationGridState", "ignore_index", ignore_index)
        if not isinstance(exact, bool):
            raise TypeError(f"CalibrationGridState: exact must be a bool, got {type(exact).__name__}")
        config = cls(*axes, n_bins, names, estimator, input_kind, ignore_index, n_buckets, exact)
        return replace(config, exact=exact and config.sketched)

    @property
    def sketched(self) -> bool:
        """Whether bins are cut at quantiles, so that buckets stand for them."""
        return self.estimator != "equal_width" and not {"ece", "mce"}.isdisjoint(self.criteria)

    @property
    def n_summed(self) -> int:
        """Bins or buckets of a cell."""
        return self.n_buckets if self.sketched else self.n_bins

    @property
    def of_rows(self) -> dict[str, Any]:
        """How rows are read, as the operators take it."""
        return {"is_probs": _INPUT_KINDS[self.input_kind], "ignore_index": self.ignore_index}

    def as_dict(self) -> dict[str, Any]:
        """The arguments in numbers and strings: what two states must share to be added up."""
        return {
            "gammas": self.gammas.tolist(),
            "temperatures": self.temperatures.tolist(),
            "n_bins": self.n_bins,
            "criteria": list(self.criteria),
            "estimator": self.estimator,
            "input_kind": self.input_kind,
            "ignore_index": self.ignore_index,
            "n_buckets": self.n_buckets,
            "exact": self.exact,
        }

    def digest(self) -> int:
        """56 bits of :meth:`as_dict`."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def check_same(self, subject: str, other: Mapping[str, Any]) -> None:
        """Raises a ValueError that names the first difference."""
        for name, value in self.as_dict().items():
            if other.get(name) != value:
                raise ValueError(f"{subject} must have {name} = {short(value)}, got {short(other.get(name))}")
