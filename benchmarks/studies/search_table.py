"""python -m benchmarks.studies.search_table --logits DIR: the results of each search of focal temperature scaling.

[1] chooses gamma and T among some thousand cells of a grid, proposes a search of 3m cells along a line instead, and
leaves open whether that finds equally good cells. This command measures it on the networks in a folder of logits, for
the other searches, too: cells, seconds, ECE (equal_mass, 15 bins) and NLL on validation and on test rows, and the
paired bootstrap interval (1000 resamples, level 0.95) of each search's criterion on test rows minus that of the full
grid. The line goes through the best T at gamma = 0 and 5, the ends of the default axis, and once more through those at
0 and 1, because the best T at 5 may lie beyond the searched temperatures.

Reads every .npz with logits or probabilities and labels: ``val_*`` are validation rows, ``test_*`` test rows; a single
set is split into random halves (seed 0). Computes in float64, in one process; the seconds are the smallest of
``--repeats`` fits, which take turns. Writes a CSV and a Markdown table.

[1] Komisarenko & Kull, Improving Calibration by Relating Focal Loss, Temperature Scaling, and Properness, ECAI 2024
    (arXiv 2408.11598), sections 5.2 and 6
"""

import argparse
import datetime
import itertools
import math
import statistics
import time
from pathlib import Path
from typing import Any

from torch import Tensor

import focalkern as fk
from benchmarks.harness import RESULTS, in_threads
from benchmarks.studies.networks import about_run, markdown, two_sets, write_rows
from focalkern.bootstrap import paired_bootstrap
from focalkern.calibrators import Calibrator
from focalkern.files import LogitSet

NEAR_LINE = {"search": "line", "gammas": (0.0, -0.5, 5.0, 1.0)}  # through the best T at the first and at the last
SEARCHES: list[tuple[str, type[Calibrator], dict[str, Any]]] = [
    ("T, nll", fk.TemperatureScaling, {"criterion": "nll"}),
    ("T grid, ece", fk.TemperatureScaling, {"criterion": "ece"}),
    *[
        (f"{name}, {criterion}", fk.FocalTemperatureScaling, {**options, "criterion": criterion})
        for criterion in ("ece", "nll")
        for name, options in (
            ("grid", {"search": "grid"}),
            ("line", {"search": "line"}),
            ("line by 0 and 1", NEAR_LINE),
            ("refine", {"search": "refine"}),
        )
    ],
    ("derivatives, nll", fk.FocalTemperatureScaling, {"search": "nll"}),
]
FIGURES = {"ece": "ece_equal_mass", "nll": "nll"}


def criterion_of(name: str) -> str:
    return name.rpartition(", ")[2]


def calibrated(rows: LogitSet, calibrator: Calibrator | None) -> Tensor:
    """Log-probabilities after calibration; uncalibrated ones for None."""
    gamma, temperature = (0.0, 1.0) if calibrator is None else (calibrator.gamma_, calibrator.temperature_)
    return fk.focal_calibration_map(rows.input, gamma, temperature, input_kind=rows.kind, log=True)


def fits(selection: LogitSet, repeats: int) -> tuple[dict[str, Calibrator], dict[str, float]]:
    """Every search with a result, and its seconds."""
    seconds: dict[str, float] = {}
    fitted: dict[str, Calibrator] = {}
    for repeat in range(repeats):
        for name, cls, options in SEARCHES:
            calibrator = cls(**options, input_kind=selection.kind)
            begin = time.perf_counter()
            try:
                calibrator.fit_quietly(selection.input, selection.labels)
            except ValueError as error:  # no finite NLL; the row in the table stays empty
                if repeat == 0:
                    print(f"{name}: {error}")
                continue
            seconds[name] = min(seconds.get(name, math.inf), time.perf_counter() - begin)
            fitted[name] = calibrator
    return fitted, seconds


def measure(path: Path, repeats: int) -> list[dict[str, Any]]:
    sets = two_sets(path)
    if sets is None:
        return []
    selection, report = sets
    fitted, seconds = fits(selection, repeats)
    of: dict[str, Calibrator | None] = {"uncalibrated": None, **fitted}
    shared = {"file": path.stem, "classes": selection.n_classes, "n_val": len(selection), "n_test": len(report)}
    found = {}
    for part, rows in (("val", selection), ("test", report)):
        # Only the test rows get intervals.
        found[part] = paired_bootstrap(
            {name: calibrated(rows, calibrator) for name, calibrator in of.items()},
            rows.labels,
            log=True,
            correct=rows.input.argmax(-1) == rows.labels,
            figures=tuple(FIGURES.values()),
            n_resamples=1000 if part == "test" else 1,
        )
    table = []
    for name in ("uncalibrated", *(name for name, _, _ in SEARCHES)):
        row: dict[str, Any] = {**shared, "search": name}
        calibrator = of.get(name)
        if calibrator is not None:
            row |= {"gamma": calibrator.gamma_, "temperature": calibrator.temperature_, "cells": calibrator.n_cells_}
            row |= {"seconds": seconds[name], "at_border": "; ".join(calibrator.at_border_)}
        if name in of:
            for part, short in itertools.product(found, FIGURES):
                row[f"{part}_{short}"] = found[part].interval(name, FIGURES[short]).estimate
        grid = f"grid, {criterion_of(name)}"
        if calibrator is not None and name != grid and grid in fitted:
            for short, figure in FIGURES.items():
                difference = found["test"].difference(name, grid, figure)
                ends = {"low": difference.low, "high": difference.high}
                row[f"test_{short}_minus_grid"] = difference.estimate
                row |= {f"test_{short}_minus_grid_{end}": value for end, value in ends.items()}
        table.append(row)
    return table


def each_search(rows: list[dict[str, Any]]) -> str:
    def cell(row: dict[str, Any], key: str, form: str) -> str:
        return format(row[key], form) if key in row else "-"

    def against_grid(row: dict[str, Any]) -> str:
        key = f"test_{criterion_of(row['search'])}_minus_grid"
        return f"{row[key]:+.4f} ({row[f'{key}_low']:+.4f} to {row[f'{key}_high']:+.4f})" if key in row else ""

    body = [
        [
            row["file"] if row["search"] == "uncalibrated" else "",
            row["search"],
            cell(row, "gamma", ".3f"),
            cell(row, "temperature", ".3f"),
            cell(row, "cells", "d"),
            cell(row, "seconds", ".2g"),
            *(cell(row, key, ".4f") for key in ("val_ece", "val_nll", "test_ece", "test_nll")),
            against_grid(row),
        ]
        for row in rows
    ]
    heads = ["file", "search", "gamma", "T", "cells", "s", "val ECE", "val NLL", "test ECE", "test NLL"]
    return markdown(body, [*heads, "its criterion on test, minus the grid's"])


def summary(rows: list[dict[str, Any]]) -> str:
    """Each search compared with the full grid of its criterion, over the files."""
    by_file: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "cells" in row:
            by_file.setdefault(row["file"], {})[row["search"]] = row
    lines = []
    for name, _, _ in SEARCHES:
        short = criterion_of(name)
        grid = f"grid, {short}"
        pairs = [(found[name], found[grid]) for found in by_file.values() if name in found and grid in found]
        if name == grid or not pairs:
            continue
        key = f"test_{short}_minus_grid"
        on_val = [a[f"val_{short}"] - b[f"val_{short}"] for a, b in pairs]
        on_test = [a[key] for a, _ in pairs]
        lines.append(
            [
                name,
                len(pairs),
                f"{statistics.median(a['cells'] / b['cells'] for a, b in pairs):.3f}",
                f"{statistics.median(a['seconds'] / b['seconds'] for a, b in pairs):.2f}",
                f"{statistics.median(on_val):+.4f}, {min(on_val):+.4f} to {max(on_val):+.4f}",
                f"{statistics.median(on_test):+.4f}, {min(on_test):+.4f} to {max(on_test):+.4f}",
                f"{sum(a[f'{key}_high'] < 0 for a, _ in pairs)} / {sum(a[f'{key}_low'] > 0 for a, _ in pairs)}",
            ]
        )
    heads = ["search", "files", "cells", "seconds", "on val: median, range", "on test: median, range"]
    return markdown(lines, [*heads, "better / worse on test"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.search_table",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--logits", type=Path, required=True, metavar="DIR", help="a folder of .npz files")
    parser.add_argument("--repeats", type=int, default=2, help="fits of each search (default 2)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    rows = []
    for path in sorted(arguments.logits.glob("*.npz")):
        print(path.name, flush=True)
        rows.extend(measure(path, arguments.repeats))
    if not rows:
        parser.error(f"{arguments.logits}: no .npz file with logits and labels")
    date = datetime.date.today().isoformat()
    about = about_run()
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"search_table_{date}.csv"
    names = list(dict.fromkeys(key for row in rows for key in row))
    write_rows(target, names, rows, about)
    text = (
        f"Searches of focal temperature scaling, {date}, {about['device']}, {in_threads(about['threads'])}, commit "
        f"{about['commit']}; ECE: equal_mass, 15 bins.\n\nEach beside the full grid of the same criterion: cells and "
        "seconds as shares of the grid's (medians), its criterion minus\nthe grid's, and on how many files that is "
        f"below / above 0 by the whole 95 % interval.\n\n{summary(rows)}\n\n{each_search(rows)}\n"
    )
    target.with_suffix(".md").write_text(text)
    print(f"\n{text}\nwritten: {target}, {target.with_suffix('.md')}")


if __name__ == "__main__":
    main()
