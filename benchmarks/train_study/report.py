"""The tables and figures of a folder of runs."""

import math
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks.train_study import figures, objectives, records, run_rows, tables
from benchmarks.train_study.errors import DataError
from benchmarks.train_study.run_rows import Row


def write(out: Path, folder: Path) -> str:
    """Write the CSV files and figures of the study or sweep in ``out`` into ``folder``; returns the tables as text.

    Raises:
        DataError: ``out`` holds no complete run.
    """
    return _study(out, folder) if (out / "settings.json").exists() else _sweep(out, folder)


def _study(out: Path, folder: Path) -> str:
    runs = records.read_runs(out, rank=objectives.rank)
    if not runs:
        raise DataError(f"{out}: no complete run to report on")
    files = tables.write(runs, folder)
    figures.write_study(files, runs, folder)
    parts = [(heading, tables.format_table(name, files[name])) for name, (heading, *_) in tables.TABLES.items()]
    parts.append(("In short: ECE (equal_mass) and NLL", tables.format_summary(files["table_focal_temperature"])))
    return "\n\n".join(f"{heading}\n{table}\n" for heading, table in parts)


def _sweep(out: Path, folder: Path) -> str:
    sizes = sorted(int(path.parent.name.removeprefix("train-")) for path in out.glob("train-*/settings.json"))
    runs = [(size, run) for size in sizes for run in records.read_runs(out / f"train-{size}", rank=objectives.parse)]
    rows = [{"train_size": size, **row} for size, run in runs for row in run_rows.calibration_rows(run)]
    if not rows:
        raise DataError(f"{out}: no complete run to report on")
    table = coefficient_table(rows)
    folder.mkdir(parents=True, exist_ok=True)
    temperatures = [row for size, run in runs if size == sizes[-1] for row in run_rows.temperature_rows(run)]
    records.write_csv(folder / "calibration.csv", rows)
    records.write_csv(folder / "temperatures.csv", temperatures)
    records.write_csv(folder / "table_coefficients.csv", table)
    figures.write_sweep(table, temperatures, folder)
    return f"ECE (equal_width) by size of the training part and coefficient\n{_format(table)}\n"


def coefficient_table(rows: Sequence[Row]) -> list[Row]:
    """[4] Figures 1 and 6: accuracy, temperature and ECE of every loss and size, means over seeds."""
    return [
        {"train_size": size, **row}
        for size in sorted({row["train_size"] for row in rows})
        for row in tables.post_hoc_table([row for row in rows if row["train_size"] == size])
    ]


def _format(table: Sequence[Row]) -> str:
    shown = [
        [
            row["train_size"],
            row["loss"],
            f"{row['accuracy_mean']:.4f}",
            f"{row['temperature_mean']:.2f}",
            *(_with_std(row, name) for name in ("ece_equal_width_{}_uncalibrated", "ece_{}_temperature")),
            _with_std(row, "ece_{}_histogram"),
        ]
        for row in table
    ]
    header = ["training samples", "loss", "accuracy", "T", "ECE", "with temperature", "with histogram binning"]
    return tabulate(shown, header, disable_numparse=True)


def _with_std(row: Row, name: str) -> str:
    mean, std = row[name.format("mean")], row[name.format("std")]
    return f"{mean:.4f}" + ("" if math.isnan(std) else f" ± {std:.4f}")
