"""Temperature scaling with a floor and a prior, which is finite on any rows."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from focalkern._types import InputKind
from focalkern.calibrators._document import as_number
from focalkern.calibrators._fit_batches import FitsBatches
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._parameters import LOGITS
from focalkern.calibrators._row_source import MemoryRows, RowSource, rows_of
from focalkern.calibrators._spline_features import (
    floor_of,
    fold_temperatures,
    has_unit,
    logit_scale,
    masks_zeros,
    robust_temperature,
    temperature_sums,
)
from focalkern.calibrators._spline_module import FlooredLogProbs, MapArguments
from focalkern.calibrators._temperature_bound import confidence_limit, limit_warnings
from focalkern.calibrators._warnings import UNMASKED, few_by_weight
from focalkern.ops.spline_map import map_by_pieces
from focalkern.ops.spline_sums import spline_sums_for

__all__ = [
    "Floored",
    "RobustTemperatureScaling",
    "floored_folds",
    "floored_losses",
    "floored_map",
    "temperature_from_json",
]


class RobustTemperatureScaling(FitsBatches):
    r"""Temperature scaling with a floor and a prior: finite on any rows, and robust with few rows.

    .. math:: \hat p = (1 - e)\, \text{softmax}(z / T) + e / C, \qquad e = \frac{0.1}{W + 1}

    T minimises the mean NLL plus :math:`(\log T)^2 / (2 W)`, with W the number of rows (the sum of their weights). The
    floor bounds the loss of a row whose target has probability 0, which forests and nearest neighbours give. The second
    term keeps T above 0 with few rows. In this term T is relative to the size of the logits if all are within 0.05 of
    each other, or if the two largest of a row are over 100 apart on average. If every row is correct, the rows give no
    upper limit of the confidence: T then raises the mean confidence to (W + 1) / (W + 2) at most (see
    :class:`TemperatureScaling`), never lowers it, and ``fit`` warns. With thousands of rows and no zeros the result is
    close to :class:`TemperatureScaling`. It is the candidate ``"temperature"`` of :class:`AutoCalibrator` and
    :func:`focalkern.compare_calibrators`.

    As in :class:`SplineScaling`, a logit of -inf gives exactly 0, unless a row of ``fit`` has its label there.

    Args:
        input_kind: ``"logits"`` or ``"probs"``; focalkern does not infer it. Without it ``fit`` rejects logits that
            look like probabilities.

    ``fit`` sets ``temperature_`` (T), ``floor_`` (e), ``masks_`` (whether a logit of -inf means probability 0) and
    ``best_value_`` (the NLL of the rows of ``fit``).

    Raises:
        TypeError, ValueError, IndexError: in ``fit``, which checks the arguments of the constructor too.

    Source: Guo et al. 2017 (arXiv 1706.04599); the floor of Berta et al., AISTATS 2026 (arXiv 2511.03685).

    Example:
        >>> labels = torch.arange(300) % 3
        >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(300) >= 240)) % 3]  # correct in 240 of 300 rows
        >>> calibrator = fk.RobustTemperatureScaling().fit(logits, labels)
        >>> calibrator.predict_proba(logits[:1]).round(decimals=2)
        tensor([[0.8000, 0.1000, 0.1000]])
        >>> calibrator.as_module()(logits[:1]).exp().round(decimals=2)  # as the last layer of a network
        tensor([[0.8000, 0.1000, 0.1000]])
    """

    method = "robust-temperature"

    temperature_: float
    floor_: float
    masks_: bool
    best_value_: float

    _limit: float | None = None  # of the mean confidence, if no row of the fit is wrong

    def __init__(self, *, input_kind: InputKind = LOGITS) -> None:
        self.input_kind = input_kind

    # -- private ------------------------------------------------------------------------------------------------

    def _keeps_predictions(self) -> bool:
        return True

    def _module(self, fused: bool = True, *, one_logit: bool = False) -> FlooredLogProbs:
        return FlooredLogProbs(
            self.temperature_, self.floor_, self.input_kind, masks=self.masks_, one_logit=one_logit, fused=fused
        )

    def _fit(self, rows: FitData) -> dict[str, Any]:
        return self._fit_source(rows_of(rows))

    def _fit_source(self, source: RowSource) -> dict[str, Any]:
        floor = floor_of(source.weight_sum)
        limit, scale = confidence_limit(source), logit_scale(source, self.input_kind)
        temperature = robust_temperature(source, self.input_kind, scale, no_errors=limit is not None)
        beta = torch.tensor([1 / temperature], dtype=torch.float64)
        return {
            "temperature_": temperature,
            "floor_": floor,
            "masks_": masks_zeros(source, self.input_kind),
            "_limit": limit,
            "best_value_": float(temperature_sums(source, self.input_kind, beta, floor)[0]),
        }

    def _fit_warnings(self, rows: FitData) -> list[str]:
        return [*few_by_weight(rows), *super()._fit_warnings(rows)]

    def _warnings_of(self, class_counts: Tensor) -> list[str]:
        unmasked = [UNMASKED] if self.input_kind == "logits" and not self.masks_ else []
        return [*limit_warnings(self._limit), *unmasked]

    def _invalid_rows_are(self) -> Literal["rejected"]:
        return "rejected"

    def _made(self, device: torch.device) -> MapArguments:
        return self._module().to(device).arguments()

    def _apply(self, input: Tensor, *, log: bool) -> Tensor:
        arguments: MapArguments = self._kept(input.device)
        return map_by_pieces(input, *arguments, log=log)

    def _fitted_to_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        names = ("temperature_", "floor_", "masks_")
        return {name[:-1]: getattr(self, name) for name in names}, {"best_value": self.best_value_}

    def _fitted_from_json(self, document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
        return {**temperature_from_json(document), "best_value_": as_number("best_value", fit["best_value"])}


class Floored(NamedTuple):
    """The fitted parameters of a robust temperature scaling."""

    temperature: float
    floor: float
    masks: bool


def floored_folds(
    source: RowSource,
    part: Callable[[int, bool], RowSource],
    folds: int,
    input_kind: InputKind,
    near: RobustTemperatureScaling,
) -> list[Floored]:
    """The fits to ``source`` without each fold; ``near`` is the fit to all of it, ``part`` as :func:`fold_by_fold`."""
    inside = [part(k, True) for k in range(folds)]
    # The fits of the folds stand for the fit to all rows, so they are bounded only if that is.
    no_errors = near._limit is not None
    by_search = no_errors or has_unit(source, input_kind)
    known = [None] * folds if by_search else fold_temperatures(inside, input_kind, near.temperature_)
    found = []
    for k, temperature in enumerate(known):
        if temperature is None:
            scale = logit_scale(part(k, False), input_kind)
            temperature = robust_temperature(part(k, False), input_kind, scale, near.temperature_, no_errors)
        floor = floor_of(source.weight_sum - inside[k].weight_sum)
        found.append(Floored(temperature, floor, near.masks_ or masks_zeros(part(k, False), input_kind)))
    return found


def floored_map(fitted: Floored, input_kind: InputKind) -> Callable[[Tensor], Tensor]:
    """The fitted map: input [n, C] to log-probabilities of its dtype."""
    arguments = FlooredLogProbs(fitted.temperature, fitted.floor, input_kind, masks=fitted.masks).arguments()
    return lambda input: map_by_pieces(input, *arguments, log=True)


def floored_losses(fitted: Floored, input_kind: InputKind, rows: MemoryRows) -> Tensor:
    """[2, n]: NLL and Brier score of each of the rows by the :func:`floored_map`."""
    input, is_probs = rows.input.to(torch.float64), input_kind == "probs"
    zeros, wide = fitted.masks and not is_probs, torch.float64
    no_curve = (torch.arange(2, dtype=wide), torch.zeros(3, 4, 2, dtype=wide), 0.0, torch.zeros(2, dtype=wide))
    of_rows = (input, rows.target, rows.weight, fitted.temperature, fitted.floor)
    losses: Tensor = spline_sums_for(input).spline_row_losses(*of_rows, *no_curve, None, None, None, is_probs, zeros)
    return losses


def temperature_from_json(document: Mapping[str, Any]) -> dict[str, Any]:
    """``temperature_``, ``floor_`` and ``masks_`` of a saved calibrator, checked."""
    temperature, floor = as_number("temperature", document["temperature"]), as_number("floor", document["floor"])
    if not (1e-305 < temperature < 1e305 and 1e-100 <= floor < 1):
        raise ValueError(
            f"expected 1e-305 < temperature < 1e305 and 1e-100 <= floor < 1, found {temperature} and {floor}"
        )
    if not isinstance(document["masks"], bool):
        raise ValueError(f"expected masks to be true or false, found {document['masks']!r}")
    return {"temperature_": temperature, "floor_": floor, "masks_": document["masks"]}
