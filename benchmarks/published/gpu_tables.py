"""The tables of the GPU's timings, from the newest benchmarks/results/*_gpu_*.csv, which `make gpu-check` measures."""

import csv
import re
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import RESULTS

# The column of each provider.
OTHERS = {
    "cross_entropy": "torch",
    "cross_entropy of linear": "torch",
    "cross_entropy, compiled": "torch, compiled",
    "cross_entropy of linear, compiled": "torch, compiled",
    "BCE, compiled": "torch, compiled",
    "composite, compiled": "same loss, compiled",
    "published formula, compiled": "same loss, compiled",
    "published algorithm, compiled": "same loss, compiled",
    "Liger-Kernel cross-entropy": "Liger-Kernel",
    "Liger-Kernel fused linear cross-entropy": "Liger-Kernel",
    "quack cross-entropy": "quack",
}
COLUMNS = ("torch", "torch, compiled", "same loss, compiled", "Liger-Kernel", "quack")


def measured(out: Path) -> list[dict[str, str]]:
    """The rows of the newest file that have a time."""
    newest = max(out.glob("*_gpu_*.csv"), key=lambda path: path.stem.rsplit("_", 1)[1])
    with newest.open(newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["median_us"] != "nan"]


def time_of(row: dict[str, str]) -> str:
    microseconds = float(row["median_us"])
    return f"{microseconds:,.0f} us" if microseconds < 10_000 else f"{microseconds / 1000:,.1f} ms"


def share_of_copy(row: dict[str, str]) -> str:
    return "" if row["of_copy"] == "nan" else f"{float(row['of_copy']):.2f}"


def steps(out: Path = RESULTS) -> str:
    """Forward and backward together: focalkern's time, and how many times longer each other way takes."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for row in measured(out):
        option, step, shape = row["case"].partition("forward+backward ")
        if not step:
            continue
        name = {"linear_focal_loss": "linear_focal_loss"}.get(row["op"], option.strip(", ") or "focal_loss")
        line = table.setdefault((f"{name}, {shape}", row["dtype"]), {})
        if row["provider"] == "focalkern":
            line.update(time=time_of(row), copy=share_of_copy(row))
        elif row["provider"] in OTHERS:
            line[OTHERS[row["provider"]]] = f"{float(row['ratio']):,.2f} x"
    found = [
        [name, dtype, line["time"], line["copy"], *(line.get(column, "") for column in COLUMNS)]
        for (name, dtype), line in table.items()
        if "time" in line
    ]
    header = ["step", "dtype", "focalkern", "of a copy's speed", *COLUMNS]
    return tabulate(found, header, tablefmt="github", disable_numparse=True)


def passes(out: Path = RESULTS) -> str:
    """Forward and backward alone: the share of a copy's bytes per second."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for row in measured(out):
        match = re.fullmatch(r"(forward|backward) (\S+)", row["case"])
        if match and row["provider"] == "focalkern":
            line = table.setdefault((f"{row['op']}, {match[2]}", row["dtype"]), {})
            line[match[1]] = f"{time_of(row)}, {share_of_copy(row)}"
    found = [[name, dtype, line.get("forward", ""), line.get("backward", "")] for (name, dtype), line in table.items()]
    return tabulate(found, ["operator", "dtype", "forward", "backward"], tablefmt="github", disable_numparse=True)
