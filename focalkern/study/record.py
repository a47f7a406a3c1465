"""A study for machines: JSON and CSV."""

import csv
import io
import math
from typing import Any

from focalkern.bootstrap import Interval
from focalkern.study.candidates import IN_WORDS, Choice
from focalkern.study.result import Study
from focalkern.study.rows import FIGURES, Rows
from focalkern.study.trust import Trust

__all__ = ["finite_or_none", "to_csv", "to_json", "to_records"]


def to_json(study: Study, *, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """The study for machines. A figure that is infinite is null; the remarks say why."""
    from focalkern import __version__  # which imports this module

    trust = study.trust

    def row(index: int, choice: Choice) -> dict[str, Any]:
        scaling = choice.calibrator if choice.method in IN_WORDS else None
        return {
            "method": choice.method,
            "criterion": choice.criterion,
            "search": choice.search if choice.method in IN_WORDS else None,
            "binning": choice.binning.binning if choice.binning else None,
            "gamma": choice.gamma,
            "temperature": choice.temperature,
            "n_cells": scaling.n_cells_ if scaling else None,
            "criterion_value": scaling.best_value_ if scaling else None,
            "at_border": list(scaling.at_border_) if scaling else [],
            "solver": getattr(choice.other, "solver_", None),
            "validation": finite_or_none(choice.validation),
            "test": finite_or_none(choice.test),
            "intervals": None if trust is None else _intervals_to_json(trust, index),
            "difference": None if trust is None else _difference_to_json(trust, index),
            "bias_floor": None if trust is None else _floors_to_json(trust, index, choice),
        }

    def data(rows: Rows) -> dict[str, Any]:
        return {
            "source": rows.source,
            "set": rows.name,
            "input_kind": rows.kind,
            "n_samples": len(rows),
            "n_classes": rows.n_classes,
        }

    return {
        "focalkern": __version__,
        **(more or {}),
        "data": {
            "validation": data(study.validation),
            "test": data(study.test),
            "same_rows": study.test is study.validation,
        },
        "grid": {
            "gammas": study.grid.gammas.tolist(),
            "temperatures": study.grid.temperatures.tolist(),
            "estimator": study.grid.estimator,
            "n_bins": study.grid.n_bins,
        },
        "bootstrap": None
        if trust is None
        else {
            "resamples": trust.bootstrap.n_resamples,
            "level": trust.bootstrap.level,
            "method": trust.bootstrap.method,
            "seed": trust.bootstrap.seed,
        },
        "rows": [row(index, choice) for index, choice in enumerate(study.choices)],
        "chosen": None if study.chosen is None else study.choices.index(study.chosen),
        "criterion": study.criterion,
        "estimator": study.estimator,
        "verdict": {
            "use": study.verdict.use,
            "because": study.verdict.because,
            "costs": study.verdict.costs,
            "doubts": list(study.verdict.doubts),
        },
        "cross_validation": _contest_to_json(study),
        "remarks": list(study.remarks),
    }


def evidence(study: Study) -> dict[str, Any]:
    """What the file of a saved calibrator says of why it is the one: as that of AutoCalibrator, and the table."""
    contest = _contest_to_json(study) or {}
    return {
        **contest,
        "use": study.verdict.use,
        "because": study.verdict.because,
        "costs": study.verdict.costs,
        "doubts": list(study.verdict.doubts),
        "table": [
            {
                "method": choice.method,
                "criterion": choice.criterion,
                "gamma": choice.gamma if choice.method in IN_WORDS else None,
                "temperature": choice.temperature if choice.method in IN_WORDS else None,
                "chosen": choice is study.chosen,
                "test": finite_or_none(choice.test),
            }
            for choice in study.choices
        ],
        "test_rows": {"n_samples": len(study.test), "same_rows": study.test is study.validation},
    }


def _contest_to_json(study: Study) -> dict[str, Any] | None:
    if study.contest is None:
        return None
    return {
        "criterion": study.contest.criterion,
        "folds": study.contest.folds,
        "n_samples": study.contest.n_samples,
        "candidates": study.contest.table(),
        "left_out": list(study.contest.left_out),
    }


def to_records(study: Study) -> list[dict[str, Any]]:
    """One dictionary per choice, with the figures on the reported rows and the ends of their intervals."""
    records = []
    for index, choice in enumerate(study.choices):
        record: dict[str, Any] = {
            "method": choice.method,
            "criterion": choice.criterion,
            "gamma": choice.gamma if choice.method in IN_WORDS else None,
            "temperature": choice.temperature if choice.method in IN_WORDS else None,
            "chosen": choice is study.chosen,
        }
        record |= {name: math.nan if choice.test is None else choice.test[name] for name in FIGURES}
        if study.trust is not None:
            for name in FIGURES:
                low, high = _ends(study.trust.interval(index, name))
                record |= {f"{name}_low": low, f"{name}_high": high}
        records.append(record)
    return records


def _intervals_to_json(trust: Trust, index: int) -> dict[str, list[float] | None] | None:
    """Lower and upper end by figure; null where the figure is infinite."""
    if trust.names[index] is None:
        return None
    found = {name: trust.interval(index, name) for name in FIGURES}
    return {name: [one.low, one.high] if one and math.isfinite(one.low) else None for name, one in found.items()}


def _difference_to_json(trust: Trust, index: int) -> dict[str, Any] | None:
    """What this row has over the one that it has to beat, by figure."""
    if trust.against[index] is None:
        return None
    found = {name: trust.difference(index, name) for name in FIGURES}
    figures = {
        name: {
            "estimate": one.estimate,
            "low": one.low,
            "high": one.high,
            "verdict": {"*": "better", "!": "worse"}.get(trust.mark(index, name), "undecided"),
        }
        if one and math.isfinite(one.low)
        else None
        for name, one in found.items()
    }
    return {"against_row": trust.against[index], "figures": figures}


def _floors_to_json(trust: Trust, index: int, choice: Choice) -> dict[str, dict[str, float]] | None:
    """Mean and 95 % quantile of what a perfectly calibrated model scores, and how often it scores as much as this."""
    floors = trust.floors[index]
    if floors is None or choice.test is None:
        return None
    return {
        name: {"mean": one.mean, "quantile_95": one.quantile(0.95), "p_value": one.p_value(choice.test[name])}
        for name, one in floors.items()
    }


def finite_or_none(values: dict[str, float] | None) -> dict[str, float | None] | None:
    """JSON has no infinity and no NaN."""
    if values is None:
        return None
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def to_csv(study: Study) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    trust = study.trust
    ends = [f"{name}_{end}" for name in FIGURES for end in ("low", "high")] if trust is not None else []
    writer.writerow(
        ["rows", "method", "criterion", "search", "binning", "gamma", "temperature", "chosen", *FIGURES, *ends]
    )
    same = study.test is study.validation
    for rows, attribute in (("same", "test"),) if same else (("validation", "validation"), ("test", "test")):
        for index, choice in enumerate(study.choices):
            values = getattr(choice, attribute)
            scaled = choice.method in IN_WORDS
            # The intervals are those of the test rows.
            found = [trust.interval(index, name) if attribute == "test" else None for name in FIGURES] if trust else []
            writer.writerow(
                [
                    rows,
                    choice.method,
                    choice.criterion or "",
                    choice.search if scaled else "",
                    choice.binning.binning if choice.binning else "",
                    choice.gamma if scaled and choice.gamma is not None else "",
                    choice.temperature if scaled and choice.temperature is not None else "",
                    int(choice is study.chosen),
                    *("" if values is None else repr(values[name]) for name in FIGURES),
                    *(repr(end) if one and math.isfinite(end) else "" for one in found for end in _ends(one)),
                ]
            )
    return stream.getvalue()


def _ends(interval: Interval | None) -> tuple[float, float]:
    return (math.nan, math.nan) if interval is None else (interval.low, interval.high)
