"""Checks and comparison of the arguments of a grid over batches; checks of a batch."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from focalkern._checks import MOST_BINS, integer, label
from focalkern._types import Estimator, InputKind
from focalkern.ops.calibration_grid import _ESTIMATORS, _INPUT_KINDS, Criterion, _axis, _check_option, _criteria

__all__ = ["GridConfig", "adds_nothing", "as_ours", "short"]


@dataclass(frozen=True, eq=False)
class GridConfig:
    """The checked arguments of a :class:`CalibrationGridState`."""

    gammas: Tensor  # [Gg] float64
    temperatures: Tensor  # [Gt] float64
    n_bins: int
    criteria: tuple[Criterion, ...]
    estimator: Estimator
    input_kind: InputKind
    ignore_index: int
    n_buckets: int
    exact: bool  # no effect with equal_width, which is always exact

    @classmethod
    def checked(
        cls,
        gammas: Sequence[float] | np.ndarray[Any, Any] | Tensor,
        temperatures: Sequence[float] | np.ndarray[Any, Any] | Tensor,
        *,
        n_bins: int,
        criteria: Sequence[str],
        estimator: Estimator,
        input_kind: InputKind,
        ignore_index: int,
        n_buckets: int,
        exact: bool,
    ) -> Self:
        """The checked arguments; raises for an invalid one."""
        with as_ours("CalibrationGridState"):
            axes = _checked_axis("gammas", gammas, -1), _checked_axis("temperatures", temperatures, 0)
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
        """Whether the edges of the bins are quantiles, which the buckets approximate."""
        return self.estimator != "equal_width" and not {"ece", "mce"}.isdisjoint(self.criteria)

    @property
    def n_summed(self) -> int:
        """Number of bins or buckets per cell."""
        return self.n_buckets if self.sketched else self.n_bins

    @property
    def of_rows(self) -> dict[str, Any]:
        """The options of the operators for rows."""
        return {"is_probs": _INPUT_KINDS[self.input_kind], "ignore_index": self.ignore_index}

    def as_dict(self) -> dict[str, Any]:
        """The arguments as numbers and strings; two states can be added only if these are equal."""
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
        """A digest of :meth:`as_dict`, 56 bits."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def check_same(self, subject: str, other: Mapping[str, Any]) -> None:
        """Raises a ValueError that names the first difference."""
        for name, value in self.as_dict().items():
            if other.get(name) != value:
                raise ValueError(f"{subject} must have {name} = {short(value)}, got {short(other.get(name))}")


class as_ours:  # noqa: N801  # reads as a statement
    """Context in which errors name the method of the state in place of the operator."""

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


def _checked_axis(name: str, values: Any, above: float) -> Tensor:
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
    """Whether all rows of a valid batch are ignored; the operator would raise for such a batch."""
    fits = logits.dim() == 2 and target.dim() == 1 and len(logits) == len(target) and logits.is_floating_point()
    if not fits or target.dtype not in (torch.int64, torch.int32, torch.uint8) or target.device != logits.device:
        return False
    return len(target) == 0 or bool((target.to(torch.int64) == ignore_index).all())


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
