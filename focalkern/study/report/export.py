"""A comparison as JSON, CSV and records."""

import csv
import io
import math
from datetime import UTC, datetime
from typing import Any

from focalkern._version import __version__
from focalkern.bootstrap import Interval
from focalkern.study.results import SCALINGS, CalibratorResult, Intervals, JudgedComparison
from focalkern.study.samples import SCORES, Samples, digest_of

__all__ = ["evidence", "finite_or_none", "to_csv", "to_json", "to_records"]


def to_json(comparison: JudgedComparison, *, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of ``report.json``. An infinite score is null; the remarks give the reason."""
    intervals = comparison.intervals

    def row(index: int, result: CalibratorResult) -> dict[str, Any]:
        scaling = result.scaling if result.method in SCALINGS else None
        return {
            "method": result.method,
            "criterion": result.criterion,
            "search": result.search if result.method in SCALINGS else None,
            "binning": result.binning.binning if result.binning else None,
            "gamma": result.gamma,
            "temperature": result.temperature,
            "n_cells": scaling.n_cells_ if scaling else None,
            "criterion_value": scaling.best_value_ if scaling else None,
            "at_border": list(scaling.at_border_) if scaling else [],
            "solver": getattr(result.calibrator, "solver_", None),
            "validation": finite_or_none(result.validation),
            "test": finite_or_none(result.test),
            "intervals": None if intervals is None else _intervals_to_json(intervals, index),
            "difference": None if intervals is None else _difference_to_json(intervals, index),
            "bias_floor": None if intervals is None else _floors_to_json(intervals, index, result),
        }

    return {
        "focalkern": __version__,
        **(more or {}),
        "data": _data_to_json(comparison),
        "grid": {
            "gammas": comparison.grid.gammas.tolist(),
            "temperatures": comparison.grid.temperatures.tolist(),
            "estimator": comparison.grid.estimator,
            "n_bins": comparison.grid.n_bins,
        },
        "bootstrap": _bootstrap_to_json(intervals),
        "rows": [row(index, result) for index, result in enumerate(comparison.results)],
        "chosen": None if comparison.chosen is None else comparison.results.index(comparison.chosen),
        "criterion": comparison.criterion,
        "estimator": comparison.estimator,
        "verdict": {
            "use": comparison.verdict.use,
            "because": comparison.verdict.because,
            "costs": comparison.verdict.costs,
            "warnings": list(comparison.verdict.warnings),
        },
        **_accept_to_json(comparison),
        "cross_validation": _cross_validation_to_json(comparison),
        "remarks": list(comparison.remarks),
    }


def _accept_to_json(comparison: JudgedComparison) -> dict[str, Any]:
    """The accept threshold; empty if it was not requested. A threshold that no row reaches is None."""
    if comparison.accept is None:
        return {}
    return {"accept": finite_or_none(vars(comparison.accept))}


def evidence(comparison: JudgedComparison) -> dict[str, Any]:
    """The evidence for the file of a saved calibrator: data, date, cross-validation, verdict, table with intervals."""
    intervals = comparison.intervals
    cross_validation = _cross_validation_to_json(comparison) or {}
    return {
        **cross_validation,
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "data": _data_to_json(comparison, with_digest=True),
        "use": comparison.verdict.use,
        "because": comparison.verdict.because,
        "costs": comparison.verdict.costs,
        "warnings": list(comparison.verdict.warnings),
        "estimator": comparison.estimator,
        "bootstrap": _bootstrap_to_json(intervals),
        "table": [
            {
                "method": result.method,
                "criterion": result.criterion,
                "gamma": result.gamma if result.method in SCALINGS else None,
                "temperature": result.temperature if result.method in SCALINGS else None,
                "chosen": result is comparison.chosen,
                "test": finite_or_none(result.test),
                "intervals": None if intervals is None else _intervals_to_json(intervals, index),
            }
            for index, result in enumerate(comparison.results)
        ],
    }


def _data_to_json(comparison: JudgedComparison, with_digest: bool = False) -> dict[str, Any]:
    def data(rows: Samples) -> dict[str, Any]:
        digest = digest_of(rows) if with_digest else None
        return {
            "source": rows.source,
            "set": rows.name,
            "input_kind": rows.kind,
            "n_samples": len(rows),
            "n_classes": rows.n_classes,
            **({} if digest is None else {"digest": f"{digest:016x}"}),
            **({"classes": list(rows.memory.classes)} if rows.memory is not None and rows.memory.classes else {}),
        }

    return {
        "validation": data(comparison.validation),
        "test": data(comparison.test),
        "same_rows": comparison.same_samples,
    }


def _bootstrap_to_json(intervals: Intervals | None) -> dict[str, Any] | None:
    if intervals is None:
        return None
    bootstrap = intervals.bootstrap
    return {
        "resamples": bootstrap.n_resamples,
        "level": bootstrap.level,
        "method": bootstrap.method,
        "seed": bootstrap.seed,
    }


def _cross_validation_to_json(comparison: JudgedComparison) -> dict[str, Any] | None:
    if comparison.cross_validation is None:
        return None
    return {
        "criterion": comparison.cross_validation.criterion,
        "folds": comparison.cross_validation.folds,
        "n_samples": comparison.cross_validation.n_samples,
        "candidates": comparison.cross_validation.table(),
        "left_out": list(comparison.cross_validation.left_out),
    }


def to_records(comparison: JudgedComparison) -> list[dict[str, Any]]:
    """One dictionary per result, with the scores on the test samples and the ends of their intervals."""
    records = []
    for index, result in enumerate(comparison.results):
        record: dict[str, Any] = {
            "method": result.method,
            "criterion": result.criterion,
            "gamma": result.gamma if result.method in SCALINGS else None,
            "temperature": result.temperature if result.method in SCALINGS else None,
            "chosen": result is comparison.chosen,
        }
        record |= {name: math.nan if result.test is None else result.test[name] for name in SCORES}
        if comparison.intervals is not None:
            for name in SCORES:
                low, high = _ends(comparison.intervals.interval(index, name))
                record |= {f"{name}_low": low, f"{name}_high": high}
        records.append(record)
    return records


def _intervals_to_json(intervals: Intervals, index: int) -> dict[str, list[float] | None] | None:
    """Lower and upper end by score; null if the score is infinite."""
    if intervals.names[index] is None:
        return None
    found = {name: intervals.interval(index, name) for name in SCORES}
    return {name: [one.low, one.high] if one and math.isfinite(one.low) else None for name, one in found.items()}


def _difference_to_json(intervals: Intervals, index: int) -> dict[str, Any] | None:
    """The differences of a result from its baseline, by score."""
    if intervals.baseline[index] is None:
        return None
    found = {name: intervals.difference(index, name) for name in SCORES}
    figures = {
        name: {
            "estimate": one.estimate,
            "low": one.low,
            "high": one.high,
            "verdict": {"*": "better", "!": "worse"}.get(intervals.mark(index, name), "undecided"),
        }
        if one and math.isfinite(one.low)
        else None
        for name, one in found.items()
    }
    return {"against_row": intervals.baseline[index], "figures": figures}


def _floors_to_json(intervals: Intervals, index: int, result: CalibratorResult) -> dict[str, dict[str, float]] | None:
    """Mean and 95 % quantile of the scores of a perfectly calibrated model, and the p-value of the result's score."""
    floors = intervals.floors[index]
    if floors is None or result.test is None:
        return None
    return {
        name: {"mean": one.mean, "quantile_95": one.quantile(0.95), "p_value": one.p_value(result.test[name])}
        for name, one in floors.items()
    }


def finite_or_none(values: dict[str, float] | None) -> dict[str, float | None] | None:
    """The values, with None for infinity and NaN, which JSON cannot express."""
    if values is None:
        return None
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def to_csv(comparison: JudgedComparison) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    intervals = comparison.intervals
    ends = [f"{name}_{end}" for name in SCORES for end in ("low", "high")] if intervals is not None else []
    writer.writerow(
        ["rows", "method", "criterion", "search", "binning", "gamma", "temperature", "chosen", *SCORES, *ends]
    )
    same = comparison.same_samples
    for rows, attribute in (("same", "test"),) if same else (("validation", "validation"), ("test", "test")):
        for index, result in enumerate(comparison.results):
            values = getattr(result, attribute)
            scaled = result.method in SCALINGS
            # The intervals are those of the test rows.
            found = (
                [intervals.interval(index, name) if attribute == "test" else None for name in SCORES]
                if intervals
                else []
            )
            writer.writerow(
                [
                    rows,
                    result.method,
                    result.criterion or "",
                    result.search if scaled else "",
                    result.binning.binning if result.binning else "",
                    result.gamma if scaled and result.gamma is not None else "",
                    result.temperature if scaled and result.temperature is not None else "",
                    int(result is comparison.chosen),
                    *("" if values is None else repr(values[name]) for name in SCORES),
                    *(repr(end) if one and math.isfinite(end) else "" for one in found for end in _ends(one)),
                ]
            )
    return stream.getvalue()


def _ends(interval: Interval | None) -> tuple[float, float]:
    return (math.nan, math.nan) if interval is None else (interval.low, interval.high)
