"""The interactive map of the report: scores and reliability bins of every (gamma, T), as data for ``explorer.js``."""

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern import metrics
from focalkern._checks import count_rows
from focalkern._types import LOSS_NAMES
from focalkern.calibrators import SplineScaling
from focalkern.calibrators._spline_shown import ShownCurve, shown_curve
from focalkern.ops.calibration_grid import CalibrationGrid
from focalkern.ops.calibration_map import binary_focal_calibration_map
from focalkern.study.report.tables import on_validation
from focalkern.study.results import JudgedComparison
from focalkern.study.samples import Samples
from focalkern.study.scores import cell_sums, reliability

__all__ = ["CRITERIA", "Cells", "cells_on", "make_explorer", "subsampled_grid"]

CRITERIA = ("ece", "nll", "brier")
# Bounds of the map: the number of calibrated probabilities (samples times classes times cells), which takes a few
# seconds, or a sixteenth of the cells of the search if that is more; and the bytes of the page.
_NUMBERS = 5_000_000_000
_SHARE_OF_SEARCH = 16
_BYTES = 1_400_000
_CURVE_POINTS = 100
_PER_CELL, _PER_BIN = 42, 10  # bytes in the page, at most


@dataclass(frozen=True)
class Cells:
    """Scores and reliability bins of every (gamma, T) on the test samples.

    Attributes:
        gammas, temperatures: [G] and [T] float64, ascending.
        count, correct: [G, T, M] int64, number of samples in every bin of equal width, and of correct ones.
        confidence: [G, T, M] float64, the sum of the confidences in the bin.
        tables: [G, T] float64 each, by criterion: ece (of these bins), nll and brier.
        n_samples: N.
        stride: the map has every ``stride``-th temperature of the search, and those of the results.
    """

    gammas: Tensor
    temperatures: Tensor
    count: Tensor
    correct: Tensor
    confidence: Tensor
    tables: dict[str, Tensor]
    n_samples: int
    stride: int

    def place(self, gamma: float | None, temperature: float | None) -> tuple[int, int] | None:
        """Row and column of a cell; None if the map does not have the cell."""
        if gamma is None or temperature is None:
            return None
        row, column = (self.gammas == gamma).nonzero(), (self.temperatures == temperature).nonzero()
        return (int(row[0]), int(column[0])) if len(row) and len(column) else None


def subsampled_grid(
    grid: CalibrationGrid, rows: Samples, n_bins: int, kept: Sequence[float]
) -> tuple[Tensor, Tensor, int]:
    """Gammas and temperatures of the map, ascending, and the stride of the temperatures.

    The map has all temperatures of the search if that takes only seconds and less than 1.4 MB of the page;
    otherwise every ``stride``-th one. It always has the temperatures of ``kept``.
    """
    gammas, temperatures = grid.gammas.cpu().double().unique(), grid.temperatures.cpu().double().unique()
    searched = len(gammas) * len(temperatures)
    most = max(_NUMBERS // max(1, len(rows) * rows.n_classes), searched // _SHARE_OF_SEARCH)
    most = min(most, _BYTES // (_PER_CELL + _PER_BIN * n_bins))
    stride = max(1, -(-searched // max(1, most)))
    wanted = torch.zeros(len(temperatures), dtype=torch.bool)
    wanted[stride // 2 :: stride] = True  # centred, so that both ends are treated alike
    wanted |= torch.isin(temperatures, torch.tensor(kept, dtype=torch.float64))
    return gammas, temperatures[wanted], stride


def cells_on(rows: Samples, gammas: Tensor, temperatures: Tensor, n_bins: int, stride: int = 1) -> Cells:
    """One pass over the samples, in float64, for all cells."""
    sums = cell_sums(rows, gammas, temperatures, n_bins)
    assert sums.count is not None
    assert sums.correct is not None
    assert sums.confidence is not None
    assert sums.nll is not None
    assert sums.brier is not None
    n = len(rows)
    tables = {
        "ece": (sums.correct - sums.confidence).abs().sum(-1) / n,
        "nll": sums.nll / n,
        "brier": sums.brier / n,
    }
    return Cells(gammas, temperatures, sums.count, sums.correct, sums.confidence, tables, n, stride)


_SCORES = {**LOSS_NAMES, "ece": "ECE (equal_width)"}


@dataclass(frozen=True)
class LearnedCurve:
    """The learned curve of a spline scaling for two classes, and its differences from the focal maps.

    Both map the same logits z of two classes: the curve maps sigmoid(z / T0), T0 the temperature of the spline, and the
    focal map of gamma and T maps sigmoid(z / T).

    Attributes:
        shown: confidences before and after the curve, and the band.
        temperature: T0.
    """

    shown: ShownCurve
    temperature: float

    def differences(self, gammas: Tensor, temperatures: Tensor) -> Tensor:
        """The largest difference of each focal map from the curve, [G, T], as a fraction."""
        logits = torch.from_numpy(self.shown.confidence).logit() * self.temperature
        learned = torch.from_numpy(self.shown.calibrated)
        found = [
            (binary_focal_calibration_map(logits.expand(len(temperatures), -1), gamma, temperatures[:, None]) - learned)
            for gamma in gammas.tolist()
        ]
        return torch.stack(found).abs().amax(-1)


def learned_curve(comparison: JudgedComparison) -> LearnedCurve | None:
    """The curve of the chosen calibrator; None if that is not a spline scaling."""
    calibrator = None if comparison.chosen is None else comparison.chosen.calibrator
    if not isinstance(calibrator, SplineScaling):
        return None
    return LearnedCurve(shown_curve(calibrator, _CURVE_POINTS), calibrator.temperature_)


def describe_nearest(curve: LearnedCurve, cells: Cells) -> str:
    """One sentence on the focal map of the grid that is nearest to the curve."""
    differences = curve.differences(cells.gammas, cells.temperatures)
    row, column = divmod(int(differences.argmin()), len(cells.temperatures))
    gamma, temperature = float(cells.gammas[row]), float(cells.temperatures[column])
    return (
        f"The nearest focal map of the grid has gamma = {gamma:g}, T = {temperature:g}: its largest difference from "
        f"the curve is {float(differences[row, column]):.4f}."
    )


def make_explorer(comparison: JudgedComparison, cells: Cells) -> dict[str, Any]:
    """The values of the template ``_explorer.html.j2``."""
    curve = learned_curve(comparison)
    n_cells = len(cells.gammas) * len(cells.temperatures)
    thin = ""
    if cells.stride > 1:
        thin = (
            f" It shows one in {cells.stride} of the searched temperatures, and the chosen ones, to keep this page "
            "small."
        )
    introduction = (
        f"The map has {n_cells:,} cells. Choose one by pointer, with the arrow keys (Shift for ten at a time) or with "
        f"the sliders. Its metrics and its reliability diagram on the {_describe_rows(comparison)} "
        f"appear beside the map.{thin}"
    )
    return {
        "introduction": introduction,
        "scores": _SCORES,
        "nearest": "" if curve is None else describe_nearest(curve, cells),
        "data": json.dumps(payload(comparison, cells, curve), allow_nan=False, separators=(",", ":")),
    }


def payload(comparison: JudgedComparison, cells: Cells, curve: LearnedCurve | None) -> dict[str, Any]:
    """The data of ``explorer.js``. Counts are exact; the mean confidence of a bin is rounded to 2^-17 of its width."""
    wide = cells.n_samples > np.iinfo(np.uint16).max
    counts = np.uint32 if wide else np.uint16
    n_bins = comparison.grid.n_bins
    lower = torch.arange(n_bins, dtype=torch.float64) / n_bins
    mean = cells.confidence / cells.count.clamp(min=1)
    within = ((mean - lower) * n_bins).clamp(0, 1) * 65535
    choices = []
    for result in comparison.results:
        if result.test is None:
            continue
        of_choice = reliability(comparison.test, result.calibrator, n_bins)
        gamma, temperature = (result.gamma, result.temperature) if result.is_scaling else (None, None)
        parameters = f": {result.parameters}" if result.parameters else ""
        choices.append(
            {
                "label": f"{result.label}{parameters}",
                "gamma": gamma,
                "temperature": temperature,
                "at": cells.place(gamma, temperature),
                "chosen": result is comparison.chosen,
                "difference": None if curve is None else _difference(curve, gamma, temperature),
                **{name: _finite(result.test[_in_table(name)]) for name in _SCORES},
                "bins": _bins(of_choice),
            }
        )
    return {
        "gammas": cells.gammas.tolist(),
        "temperatures": cells.temperatures.tolist(),
        "bins": n_bins,
        "samples": cells.n_samples,
        "wide": wide,
        "count": _packed(cells.count, counts),
        "correct": _packed(cells.correct, counts),
        "confidence": _packed(within.round(), np.uint16),
        **{name: _packed(table, np.float64) for name, table in cells.tables.items()},
        "maps": [*_maps(comparison, cells), *([] if curve is None else [_map_of_differences(curve, cells)])],
        "curve": None if curve is None else _curve_to_json(curve),
        "choices": choices,
    }


def _maps(comparison: JudgedComparison, cells: Cells) -> list[dict[str, Any]]:
    """Colours of the scores on the test samples and, if the validation samples differ, of the grid on these."""
    reported = _describe_rows(comparison)
    found = []
    for name in ("nll", "brier", "ece"):
        words = {"name": _SCORES[name], "rows": f"on the {reported}"}
        found.append({**words, "figure": name, **_colours(cells.tables[name], name)})
    grid = comparison.grid
    rows = torch.stack([(grid.gammas.cpu() == gamma).nonzero()[0, 0] for gamma in cells.gammas])
    columns = torch.stack([(grid.temperatures.cpu() == one).nonzero()[0, 0] for one in cells.temperatures])
    for name, table in grid.tables.items():
        if comparison.same_samples and (name != "ece" or grid.estimator == "equal_width"):
            continue
        part = table.cpu().double()[rows][:, columns]
        words = {
            "name": {"ece": f"ECE ({grid.estimator})", **LOSS_NAMES}.get(name, name),
            "rows": on_validation(comparison),
        }
        found.append({**words, "table": _packed(part, np.float32), **_colours(part, name)})
    return [one for one in found if one["low"] is not None]


def _map_of_differences(curve: LearnedCurve, cells: Cells) -> dict[str, Any]:
    table = curve.differences(cells.gammas, cells.temperatures)
    words = {"name": "Largest difference from the learned curve", "rows": "for two classes", "differences": True}
    return {**words, "table": _packed(table, np.float32), **_colours(table, "ece")}


def _difference(curve: LearnedCurve, gamma: float | None, temperature: float | None) -> float | None:
    if gamma is None or temperature is None:
        return None
    one = torch.tensor([gamma, temperature], dtype=torch.float64)
    return float(curve.differences(one[:1], one[1:]))


def _curve_to_json(curve: LearnedCurve) -> dict[str, Any]:
    arrays = {name: one.round(6).tolist() for name, one in vars(curve.shown).items()}
    return {"temperature": curve.temperature, **arrays}


def _colours(table: Tensor, criterion: str) -> dict[str, Any]:
    if not bool(table.isfinite().any()):
        return {"low": None}
    from focalkern import plots  # needs matplotlib, an extra

    low, high, top = plots.colour_range(table.numpy(), criterion)
    return {"low": low, "high": high, "cut": top > high}


def _bins(bins: metrics.ReliabilityBins) -> list[tuple[int, int, float]]:
    """Number of samples, number of correct samples and mean confidence of every bin."""
    counts = bins.count.tolist()
    return [
        (count, round(accuracy * count), confidence) if count else (0, 0, 0.0)
        for count, accuracy, confidence in zip(counts, bins.accuracy.tolist(), bins.confidence.tolist(), strict=True)
    ]


def _describe_rows(comparison: JudgedComparison) -> str:
    return count_rows(len(comparison.test), "validation " if comparison.same_samples else "test ")


def _in_table(name: str) -> str:
    return "ece_equal_width" if name == "ece" else name


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _packed(values: Tensor, dtype: Any) -> str:
    array = values.cpu().numpy().astype(dtype)
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")
