"""The part of the page that answers: the data of every cell, and the places that ``explorer.js`` fills."""

import base64
import json
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern import metrics
from focalkern.study import html
from focalkern.study.cells import Cells
from focalkern.study.result import Study
from focalkern.study.words import on_which

__all__ = ["make_explorer"]

_FIGURES = {"nll": "NLL", "brier": "Brier score", "ece": "ECE (equal_width)"}


def make_explorer(study: Study, cells: Cells) -> str:
    """Markup with the data inside."""
    n_cells = len(cells.gammas) * len(cells.temperatures)
    thin = ""
    if cells.every > 1:
        thin = (
            f" It has one temperature in {cells.every} of those that were searched, and those that were chosen: all "
            "would take too long, or make this page too large."
        )
    what = (
        f"The map has {n_cells:,} cells. Choose one by pointer, with the arrow keys (Shift for ten at a time) or with "
        f"the sliders: its figures and its reliability diagram on the {_rows_in_words(study)} "
        f"appear beside it.{thin}"
    )
    return html.explorer(
        json.dumps(payload(study, cells), allow_nan=False, separators=(",", ":")),
        introduction=what,
        figures=_FIGURES,
        n_bins=study.grid.n_bins,
    )


def payload(study: Study, cells: Cells) -> dict[str, Any]:
    """What ``explorer.js`` reads. Counts are exact, a bin's mean confidence is known to 2^-17 of its width."""
    wide = cells.n_samples > np.iinfo(np.uint16).max
    counts = np.uint32 if wide else np.uint16
    n_bins = study.grid.n_bins
    lower = torch.arange(n_bins, dtype=torch.float64) / n_bins
    mean = cells.confidence / cells.count.clamp(min=1)
    within = ((mean - lower) * n_bins).clamp(0, 1) * 65535
    choices = []
    for choice in study.choices:
        if choice.test is None:
            continue
        of_choice = study.test.reliability(choice.what, n_bins)
        scaling = choice.gamma is not None and choice.applied is None
        gamma, temperature = (choice.gamma, choice.temperature) if scaling else (None, None)
        parameters = f": {choice.parameters}" if choice.parameters else ""
        choices.append(
            {
                "label": f"{choice.label}{parameters}",
                "gamma": gamma,
                "temperature": temperature,
                "at": cells.place(gamma, temperature),
                "chosen": choice is study.chosen,
                **{name: _finite(choice.test[_in_table(name)]) for name in _FIGURES},
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
        "maps": _maps(study, cells),
        "choices": choices,
    }


def _maps(study: Study, cells: Cells) -> list[dict[str, Any]]:
    """The figures of the reported rows, and, where other rows have chosen, the criteria on those."""
    reported = _rows_in_words(study)
    found = []
    for name in ("ece", "nll", "brier"):
        words = {"name": _FIGURES[name], "rows": f"on the {reported}"}
        found.append({**words, "figure": name, **_colours(cells.tables[name], name)})
    grid = study.grid
    rows = torch.stack([(grid.gammas.cpu() == gamma).nonzero()[0, 0] for gamma in cells.gammas])
    columns = torch.stack([(grid.temperatures.cpu() == one).nonzero()[0, 0] for one in cells.temperatures])
    for name, table in grid.tables.items():
        if study.test is study.validation and (name != "ece" or grid.estimator == "equal_width"):
            continue
        part = table.cpu().double()[rows][:, columns]
        words = {
            "name": {"ece": f"ECE ({grid.estimator})", "nll": "NLL", "brier": "Brier score"}.get(name, name),
            "rows": on_which(study),
        }
        found.append({**words, "table": _packed(part, np.float32), **_colours(part, name)})
    return [one for one in found if one["low"] is not None]


def _colours(table: Tensor, criterion: str) -> dict[str, Any]:
    if not bool(table.isfinite().any()):
        return {"low": None}
    from focalkern import plots  # needs matplotlib, an extra

    low, high, top = plots.colour_range(table.numpy(), criterion)
    return {"low": low, "high": high, "cut": top > high}


def _bins(bins: metrics.ReliabilityBins) -> list[tuple[int, int, float]]:
    """Samples, how many of them are correct, and mean confidence, of every bin."""
    counts = bins.count.tolist()
    return [
        (count, round(accuracy * count), confidence) if count else (0, 0, 0.0)
        for count, accuracy, confidence in zip(counts, bins.accuracy.tolist(), bins.confidence.tolist(), strict=True)
    ]


def _rows_in_words(study: Study) -> str:
    return f"{len(study.test)} {'validation' if study.test is study.validation else 'test'} rows"


def _in_table(name: str) -> str:
    return "ece_equal_width" if name == "ece" else name


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _packed(values: Tensor, dtype: Any) -> str:
    array = values.cpu().numpy().astype(dtype)
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode("ascii")
