"""Isotonic regression of every class against the rest."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from focalkern._types import InputKind
from focalkern.calibrators._base import Calibrator
from focalkern.calibrators._document import LEAST_EPSILON, as_array, as_count, as_list, as_number
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._inputs import probabilities
from focalkern.calibrators._isotonic_module import IsotonicLogProbs
from focalkern.calibrators._parameters import LOGITS
from focalkern.calibrators._temperature_bound import no_error_warnings
from focalkern.calibrators._warnings import few_by_weight, unseen_classes, worse_than_uncalibrated

__all__ = ["IsotonicCalibration"]

# With fewer rows per class, NLLs of new rows exceed those of temperature scaling for most networks.
_ENOUGH = 500

# Bound for a file: the module has a table [C, longest regression], which one long regression would make large.
_MOST_STEPS = 1 << 26

# Values per block of rows: float64 blocks stay in the cache, and no temporary has the size of the input.
_BLOCK = 1 << 18

Steps = tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]


class IsotonicCalibration(Calibrator):
    r"""Isotonic regression: the probability of each class becomes a non-decreasing function of itself.

    Each row is then divided by its sum:

    .. math::
        \hat p_k \propto (1 - \epsilon) f_k(p_k) + \epsilon / C, \qquad
        f_k = \text{argmin}_{f \text{ non-decreasing}} \sum_i (f(p_{ik}) - [y_i = k])^2

    scikit-learn fits f_k (only ``fit`` needs it). f_k is linear between its points and constant outside them. epsilon =
    1 / (N + 1) gives every possible class a probability above 0, so the NLL is finite. A class with logit -inf or
    probability 0 keeps probability 0.

    The method has no parameters to choose; the number of steps grows with the rows. With fewer than 500 rows per class
    it overfits, and ``fit`` warns. It may change the order of the classes.

    Args:
        floor: in [0, 1): first, the probabilities p of a row become (1 - floor) p + floor / C, so that the true class
            has a probability above 0.
        input_kind: ``"logits"`` or ``"probs"``; focalkern does not infer it. Without it ``fit`` rejects logits that
            look like probabilities.

    ``fit`` sets ``steps_``, for each class the arrays (p, f_k(p)); ``epsilon_``; ``best_value_``, the NLL of the rows
    of ``fit`` (inf if a label has probability 0); and ``n_changed_``, the number of rows of ``fit`` whose
    predicted class changed.

    Raises:
        TypeError, ValueError, IndexError: in ``fit``, which checks the arguments of the constructor too.

    Source: Zadrozny & Elkan, KDD 2002.

    Example:
        >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0]]).repeat(500, 1)  # confidence 0.98 and 0.88,
        >>> labels = torch.tensor([0] * 17 + [1] * 3).repeat(50)  # correct in 9 and in 8 of 10 rows
        >>> calibrator = fk.IsotonicCalibration().fit(logits, labels)
        >>> calibrator.predict_proba(logits[:2]).round(decimals=3)
        tensor([[0.9000, 0.1000],
                [0.8000, 0.2000]])
        >>> list(calibrator.as_module()(logits).shape)  # log-probabilities
        [1000, 2]
    """

    method = "isotonic"
    _few_logits = math.inf  # scikit-learn takes one thread for most of the fit, and the blocks are small

    steps_: tuple[Steps, ...]
    epsilon_: float
    best_value_: float
    n_changed_: int

    def __init__(self, *, floor: float = 0.0, input_kind: InputKind = LOGITS) -> None:
        self.floor = floor
        self.input_kind = input_kind

    # -- private ------------------------------------------------------------------------------------------------

    def _module(self, fused: bool = True, *, one_logit: bool = False) -> IsotonicLogProbs:
        return IsotonicLogProbs(self.steps_, self.epsilon_, self.input_kind, one_logit=one_logit)

    def _fit(self, rows: FitData) -> dict[str, Any]:
        input, target = rows.input, rows.target
        name = type(self).__name__
        try:
            from sklearn.isotonic import IsotonicRegression
        except ImportError as error:
            raise ImportError(f"{name}: fit needs scikit-learn; pip install scikit-learn") from error
        regression = IsotonicRegression(out_of_bounds="clip", y_min=0.0, y_max=1.0)
        steps = _regressions(regression, rows, self.input_kind)
        total = float(len(input) if rows.weight is None else rows.weight.sum())
        share = (torch.ones_like(target, dtype=torch.float64) if rows.weight is None else rows.weight) / total
        epsilon = 1 / (total + 1)
        module = IsotonicLogProbs(steps, epsilon, self.input_kind).to(input.device)
        nll, n_changed = [], 0
        for block, labels in zip(_blocks(input), _blocks(input, target), strict=True):
            log_probs = module(block.to(torch.float64))
            nll.append(-log_probs.gather(1, labels.unsqueeze(1)).squeeze(1))
            n_changed += int((log_probs.argmax(-1) != block.argmax(-1)).sum())
        return {
            "steps_": tuple(steps),
            "epsilon_": epsilon,
            "best_value_": float(torch.cat(nll) @ share),
            "n_changed_": n_changed,
        }

    def _fit_warnings(self, rows: FitData) -> list[str]:
        remedy = "more rows, or TemperatureScaling"
        worse = worse_than_uncalibrated(rows, self._apply, by=("nll",), input_kind=self.input_kind, remedy=remedy)
        return [
            *few_by_weight(rows),
            *super()._fit_warnings(rows),
            *_few_rows(rows),
            *no_error_warnings(rows),
            *worse,
        ]

    def _warnings_of(self, class_counts: Tensor) -> list[str]:
        return unseen_classes(class_counts, self.classes_, "TemperatureScaling")

    def _invalid_rows_are(self) -> Literal["nan"]:
        return "nan"

    def _apply(self, input: Tensor, *, log: bool) -> Tensor:
        module: IsotonicLogProbs = self._kept(input.device)
        if input.numel() <= _BLOCK or input.device.type != "cpu":
            return module.mapped(input, log=log)
        blocks = _blocks(input.reshape(-1, input.shape[-1]))
        return torch.cat([module.mapped(block, log=log) for block in blocks]).view(input.shape)

    def _fitted_to_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        steps = [{"from": x.tolist(), "to": y.tolist()} for x, y in self.steps_]
        return {"epsilon": self.epsilon_, "steps": steps}, {
            "best_value": self.best_value_ if math.isfinite(self.best_value_) else None,  # JSON has no infinity
            "n_changed": self.n_changed_,
        }

    def _fitted_from_json(self, document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
        of_classes = as_list("steps", document["steps"], dict)
        steps = [(as_array("from", one["from"]), as_array("to", one["to"])) for one in of_classes]
        if len(steps) != as_count("n_classes", fit["n_classes"]):
            raise ValueError(f"expected steps of {fit['n_classes']} classes, found {len(steps)}")
        longest = max(len(x) for x, _ in steps)
        if len(steps) * longest > _MOST_STEPS:
            raise ValueError(f"expected at most {_MOST_STEPS:,} steps, found {longest:,} for {len(steps):,} classes")
        for x, y in steps:
            # The comparisons are false for NaN, so NaN raises too.
            rising = bool((np.diff(x) > 0).all() and (np.diff(y) >= 0).all())
            inside = bool(((x >= 0) & (x <= 1 + 1e-6)).all() and ((y >= 0) & (y <= 1)).all())
            if x.shape != y.shape or x.ndim != 1 or not len(x) or not rising or not inside:
                raise ValueError("expected steps that rise within [0, 1], found others")
        epsilon = as_number("epsilon", document["epsilon"])
        if not LEAST_EPSILON <= epsilon < 1:
            raise ValueError(f"expected an epsilon between {LEAST_EPSILON:g} and 1, found {epsilon}")
        value = math.inf if fit["best_value"] is None else as_number("best_value", fit["best_value"])
        changed = as_count("n_changed", fit["n_changed"], least=0)
        return {"steps_": tuple(steps), "epsilon_": epsilon, "best_value_": value, "n_changed_": changed}


def _blocks(input: Tensor, values: Tensor | None = None) -> Sequence[Tensor]:
    """``input`` [N, C], or values [N], in blocks of rows."""
    return (input if values is None else values).split(max(1, _BLOCK // input.shape[1]))


def _regressions(regression: Any, rows: FitData, input_kind: InputKind) -> list[Steps]:
    """The steps of every class, by scikit-learn's ``IsotonicRegression``."""
    columns = torch.empty(rows.input.shape[::-1], dtype=torch.float64)  # [C, N]: contiguous for the sorts
    for column, block in zip(columns.split(len(_blocks(rows.input)[0]), 1), _blocks(rows.input), strict=True):
        column.copy_(probabilities(block, input_kind).T)
    labels = rows.target.cpu().numpy()
    weight = None if rows.weight is None else rows.weight.cpu().numpy()
    steps = []
    for k, column in enumerate(columns.numpy()):
        # scikit-learn sorts, too, by an algorithm that is fast only for sorted values. Equal values keep their order
        # if it decides the last bits of a sum of weights.
        order = column.argsort(kind=None if weight is None else "stable")
        is_class = (labels[order] == k).astype(np.float64)
        regression.fit(column[order], is_class, None if weight is None else weight[order])
        steps.append((regression.X_thresholds_, regression.y_thresholds_))
    return steps


def _few_rows(rows: FitData) -> list[str]:
    """A warning if the rows are so few that the regressions follow their noise, which the rows of fit do not show."""
    n_rows, n_classes = rows.input.shape
    total = n_rows if rows.weight is None else float(rows.weight.sum())
    if total >= _ENOUGH * n_classes:
        return []
    return [
        f"{total / n_classes:.3g} rows per class are few: the regressions follow their noise, and the NLL of new rows "
        f"is often higher than with TemperatureScaling (fit on {_ENOUGH} rows per class, or take SplineScaling)"
    ]
