"""Searches of gamma and temperature: the base of temperature scaling and focal temperature scaling."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from focalkern._checks import MOST_BINS, flag, integer, short
from focalkern._types import CRITERIA, LOSS_NAMES, PROPER, Criterion, Estimator, InputKind, Proper
from focalkern.calibrators._base import Calibrator
from focalkern.calibrators._document import as_count, as_list, as_map, as_number
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._fitted import Layout
from focalkern.calibrators._modules import CalibratedLogits, CalibratedLogProbs
from focalkern.calibrators._newton_search import check_finite_nll
from focalkern.calibrators._parameters import as_numbers, kept_axis
from focalkern.calibrators._row_source import rows_of
from focalkern.calibrators._search import (
    WIDENINGS,
    Search,
    SearchResult,
    every_row_grid,
    extend_axes,
    extended,
    from_grid,
    search_line,
    search_refine,
)
from focalkern.calibrators._temperature_bound import (
    NO_OPTIMUM,
    bound_remedy,
    justified_confidence,
    no_row_is_wrong,
    succession_bound,
)
from focalkern.calibrators._warnings import worse_than_uncalibrated
from focalkern.calibrators._weighted import weighted_grid
from focalkern.ops.calibration_grid import PAPER_TEMPERATURES, CalibrationGrid
from focalkern.ops.calibration_map import focal_calibration_map

__all__ = ["Scaling"]


class Scaling(Calibrator):
    """Base of both scalings, which differ only in the gammas that they search."""

    _searches: ClassVar[tuple[Search, ...]]

    search: Search | None
    temperatures: Iterable[float] | Tensor | None
    criterion: Criterion
    estimator: Estimator
    n_bins: int
    widen: bool
    floor: float
    input_kind: InputKind

    # Set by fit and load.
    gamma_: float
    temperature_: float
    best_value_: float
    search_: Search
    criterion_: Criterion
    n_cells_: int
    at_border_: tuple[str, ...]
    grid_: CalibrationGrid

    def choose(self, grid: CalibrationGrid, *, n_samples: int, n_classes: int) -> Self:
        """Uses the optimum of a grid that was already computed, in place of ``fit``, which would compute it again.

        Args:
            grid: a grid with the table of ``criterion``. Its gammas and temperatures replace those of the calibrator.
            n_samples, n_classes: shape of the logits that the grid was computed on.

        Returns:
            The calibrator itself, fitted as by ``fit`` with ``search="grid"``.

        Raises:
            ValueError: the criterion is not in the grid, or no cell of it is finite.

        Example:
            >>> logits, labels = torch.tensor([[4.0, 0.0]]).repeat(10, 1), torch.tensor([0] * 8 + [1] * 2)
            >>> grid = fk.calibration_grid(logits, labels, gammas=[0.0], temperatures=[1.0, 2.0, 3.0, 4.0])
            >>> calibrator = fk.TemperatureScaling().choose(grid, n_samples=10, n_classes=2)
            >>> calibrator.temperature_
            3.0
        """
        name, criterion = type(self).__name__, self.criterion
        if not isinstance(grid, CalibrationGrid):
            raise TypeError(f"{name}: grid must be a CalibrationGrid, got {short(grid)}")
        n_samples, n_classes = integer(name, "n_samples", n_samples, 1), integer(name, "n_classes", n_classes, 2, 2**32)
        found = self._fitted(from_grid(name, grid, criterion), "grid", criterion)
        if self.floor:
            raise ValueError(f"{name}: floor must be 0 for a grid that is already computed, got {self.floor}")
        self._become(found, Layout(n_classes), n_samples=n_samples)
        return self

    # -- private ------------------------------------------------------------------------------------------------

    def _module(self, fused: bool = True, *, one_logit: bool = False) -> torch.nn.Module:
        module = CalibratedLogits if one_logit else CalibratedLogProbs
        return module(self.gamma_, self.temperature_, self.input_kind, fused=fused)

    def _gammas(self) -> Any:
        raise NotImplementedError

    def _search(self) -> Search:
        if self.search is not None:
            return self.search
        given = self.temperatures is not None or getattr(self, "gammas", None) is not None
        return "grid" if given or self.criterion == "ece" else self.criterion

    def _temperatures(self) -> Any:
        if self.temperatures is None:
            return PAPER_TEMPERATURES
        return as_numbers(type(self).__name__, "temperatures", self.temperatures)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        name = type(self).__name__
        self._check_option("search", (None, *self._searches))
        self._check_option("criterion", CRITERIA)
        self._check_estimator()
        integer(name, "n_bins", self.n_bins, 1, MOST_BINS)
        flag(name, "widen", self.widen)
        for axis, least in (("gammas", -1.0), ("temperatures", 0.0)):
            values = kept_axis(getattr(self, axis, None))
            if values is not None:
                setattr(self, axis, values)
                _check_axis(name, axis, as_numbers(name, axis, values), least)
        search = self._search()
        if search in PROPER:
            if self.criterion != search:
                raise ValueError(f"{name}: criterion must be {search!r} with search={search!r}, got {self.criterion!r}")
            for axis in ("gammas", "temperatures"):
                if getattr(self, axis, None) is not None:
                    raise ValueError(f"{name}: {axis} must be None with search={search!r}, which has no grid")

    def _fit(self, rows: FitData) -> dict[str, Any]:
        input, target, weight = rows.input, rows.target, rows.weight
        name, search, criterion = type(self).__name__, self._search(), self.criterion

        def grid(gammas: Any, temperatures: Any) -> CalibrationGrid:
            options: Any = {
                "n_bins": self.n_bins,
                "criteria": (criterion,),
                "estimator": self.estimator,
                "input_kind": self.input_kind,
            }
            if weight is None:
                return every_row_grid(name, input, target, gammas, temperatures, **options)
            return weighted_grid(name, input, target, weight, gammas, temperatures, **options)

        def table(gammas: Any, temperatures: Any) -> Any:
            return grid(gammas, temperatures).tables[criterion].cpu().numpy()

        if criterion == "nll":
            check_finite_nll(name, input, target, self.input_kind, "; criterion='brier' and 'ece' need none")
        if search in PROPER:
            return self._fitted(self._search_smooth(rows, search), search, criterion)

        gammas, temperatures = tuple(self._gammas()), tuple(self._temperatures())
        cells = grid(gammas, temperatures) if search == "grid" else None
        spent = 0
        for widening in range(1 + WIDENINGS):
            if cells is not None:
                found = from_grid(name, cells, criterion)
            else:
                try:
                    found = (search_line if search == "line" else search_refine)(table, gammas, temperatures)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
                spent += found.n_cells
                found = replace(found, n_cells=spent)
            more = extend_axes(found, gammas, temperatures)
            if not self.widen or widening == WIDENINGS or not any(more):
                break
            if cells is not None:
                cells = extended(cells, *more, grid)
            # Extended gammas are sorted to the ends, because the first and the last gamma are the ends of the line.
            gammas, temperatures = _with(gammas, more[0]), (*temperatures, *more[1])
        return self._fitted(found, search, criterion)

    def _search_smooth(self, rows: FitData, criterion: Proper) -> SearchResult:
        raise NotImplementedError

    def _fit_warnings(self, rows: FitData) -> list[str]:
        warnings, limits = [], self._limit_warnings(rows)
        if self.at_border_:
            last = self.at_border_[-1]
            if self.search_ in PROPER and last.startswith(("temperature", NO_OPTIMUM)):
                remedy = bound_remedy(last)
            elif self.search_ in PROPER:
                remedy = "TemperatureScaling is nearly as good, or more rows are needed"
            elif self.widen:
                remedy = "no search goes beyond this bound; try criterion='nll'"
            else:
                remedy = "widen=True extends the search"
            warnings.append(", and ".join(self.at_border_) + ("" if limits else f" ({remedy})"))
        warnings += limits
        if self.search_ == "nll" and math.isfinite(self.best_value_):
            return warnings  # no NLL is infinite, and none is worse than without calibration
        if self.search_ in PROPER:
            by, remedy = [], ""  # by their own criterion never worse than no calibration
        elif self.criterion_ == "ece":
            by, remedy = ["nll", "brier"], "an ECE can fall while the probabilities get worse; criterion='nll' does not"
        else:
            by, remedy = [self.criterion_], "include gamma = 0 and temperature = 1 in the search"
        worse = worse_than_uncalibrated(rows, self._apply, by=by, input_kind=self.input_kind, remedy=remedy)
        return [*warnings, *worse]

    def _limit_warnings(self, rows: FitData) -> list[str]:
        """A warning if no row is wrong and a grid has gone below the T at which the search by NLL stops."""
        source = rows_of(rows)
        if self.search_ in PROPER or not no_row_is_wrong(source):
            return []
        bound = succession_bound(source, self.gamma_, self.input_kind)
        if self.temperature_ >= bound:
            return []
        return [
            f"no row of fit is wrong, so the {LOSS_NAMES.get(self.criterion_, 'ECE')} gives no upper limit of the "
            f"confidence: temperature = {self.temperature_:.4g} is below {bound:.4g}, where the mean confidence is "
            f"{justified_confidence(source.weight_sum):.4g} (criterion='nll' without temperatures stops there)"
        ]

    def _keeps_predictions(self) -> bool:
        return True

    def _fitted(self, found: SearchResult, search: Search, criterion: Criterion) -> dict[str, Any]:
        fitted = {
            "gamma_": found.gamma,
            "temperature_": found.temperature,
            "best_value_": found.value,
            "search_": search,
            "criterion_": criterion,
            "n_cells_": found.n_cells,
            "at_border_": found.at_border,
        }
        return fitted if found.grid is None else {**fitted, "grid_": found.grid}

    def _invalid_rows_are(self) -> Literal["rejected"]:
        return "rejected"

    def _apply(self, input: Tensor, *, log: bool) -> Tensor:
        return focal_calibration_map(input, self.gamma_, self.temperature_, input_kind=self.input_kind, log=log)

    def _fitted_to_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"gamma": self.gamma_, "temperature": self.temperature_}, {
            "search": self.search_,
            "criterion": self.criterion_,
            "n_cells": self.n_cells_,
            "best_value": self.best_value_,
            "at_border": list(self.at_border_),
        }

    def _fitted_from_json(self, document: Mapping[str, Any], fit: Mapping[str, Any]) -> dict[str, Any]:
        gamma, temperature = as_map(document["gamma"], document["temperature"])
        search, criterion = fit["search"], fit["criterion"]
        if search not in self._searches or criterion not in CRITERIA:
            raise ValueError(
                f"expected a search and a criterion that are known, found {short(search)} and {short(criterion)}"
            )
        border, n_cells = tuple(as_list("at_border", fit["at_border"], str)), as_count("n_cells", fit["n_cells"])
        found = SearchResult(gamma, temperature, as_number("best_value", fit["best_value"]), n_cells, border)
        return self._fitted(found, search, criterion)


def _check_axis(name: str, axis: str, values: Sequence[float], least: float) -> None:
    if not values:
        raise ValueError(f"{name}: {axis} must have at least one value, got none")
    for value in values:
        if not least < value < math.inf:
            raise ValueError(f"{name}: {axis} must be finite and greater than {least:g}, got {value}")


def _with(axis: Sequence[float], more: Sequence[float]) -> tuple[float, ...]:
    """The axis with more values, added at the end that they extend."""
    up = not more or more[-1] > axis[0]
    first_is_low = axis[0] <= axis[-1]
    return (*axis, *more) if up == first_is_low else (*reversed(more), *axis)
