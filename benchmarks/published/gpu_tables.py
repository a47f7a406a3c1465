"""The tables of the GPU's timings, from benchmarks/results/*_gpu_*.csv, which `make gpu-check` measures.

focalkern's times are of the newest day. Of several runs on it, the tables have the fastest median: a busy host can only
delay a step. The other libraries' times are the fastest of all days, for the cases of the newest.
"""

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


def measured(out: Path) -> dict[tuple[str, str, str], dict[str, dict[str, str]]]:
    """The rows that have a time: (operator, case, dtype) -> provider -> its fastest row."""
    files = {path: path.stem.split("_gpu_")[1][:10] for path in out.glob("*_gpu_*.csv")}
    newest = max(files.values())
    fastest: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for path in sorted(files, key=lambda path: (files[path] != newest, path)):  # the newest day first
        with path.open(newline="") as stream:
            for row in csv.DictReader(stream):
                case = (row["op"], row["case"], row["dtype"])
                is_old = files[path] != newest
                if row["median_us"] == "nan" or (is_old and (case not in fastest or row["provider"] not in OTHERS)):
                    continue
                providers = fastest.setdefault(case, {})
                known = providers.setdefault(row["provider"], row)
                if float(row["median_us"]) < float(known["median_us"]):
                    providers[row["provider"]] = row
    return fastest


def time_of(row: dict[str, str]) -> str:
    microseconds = float(row["median_us"])
    return f"{microseconds:,.0f} us" if microseconds < 10_000 else f"{microseconds / 1000:,.1f} ms"


def share_of_copy(row: dict[str, str]) -> str:
    return "" if row["of_copy"] == "nan" else f"{float(row['of_copy']):.2f}"


def steps(out: Path = RESULTS) -> str:
    """Forward and backward together: focalkern's time, and how many times longer each other way takes."""
    found = []
    for (op, case, dtype), providers in measured(out).items():
        option, is_step, shape = case.partition("forward+backward ")
        if not is_step or "focalkern" not in providers:
            continue
        own = providers["focalkern"]
        others = {
            OTHERS[name]: f"{float(row['median_us']) / float(own['median_us']):,.2f} x"
            for name, row in providers.items()
            if name in OTHERS
        }
        name = "linear_focal_loss" if op == "linear_focal_loss" else option.strip(", ") or "focal_loss"
        cells = [others.get(column, "") for column in COLUMNS]
        found.append([f"{name}, {shape}", dtype, time_of(own), share_of_copy(own), *cells])
    header = ["step", "dtype", "focalkern", "of a copy's speed", *COLUMNS]
    return tabulate(found, header, tablefmt="github", disable_numparse=True)


def passes(out: Path = RESULTS) -> str:
    """Forward and backward alone: focalkern's time, and its share of a copy's bytes per second."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for (op, case, dtype), providers in measured(out).items():
        match = re.fullmatch(r"(forward|backward) (\S+)", case)
        if match and "focalkern" in providers:
            own = providers["focalkern"]
            line = table.setdefault((f"{op}, {match[2]}", dtype), {})
            line[match[1]] = f"{time_of(own)}, {share_of_copy(own)}"
    found = [[name, dtype, line.get("forward", ""), line.get("backward", "")] for (name, dtype), line in table.items()]
    return tabulate(found, ["operator", "dtype", "forward", "backward"], tablefmt="github", disable_numparse=True)


def grids_and_fits(out: Path = RESULTS) -> str:
    """The grid of calibration error next to its loop, and fits of calibrators."""
    found = []
    for (op, case, _), providers in measured(out).items():
        for name, row in providers.items():
            if op == "calibration_grid" and name == "focalkern":
                slower = float(providers["per-cell loop"]["median_us"]) / float(row["median_us"])
                found.append([f"calibration_grid, {case}", time_of(row), f"per-cell loop: {slower:,.0f} x"])
            elif op == "fit":
                found.append([f"{name}().fit, {case}", time_of(row), ""])
    return tabulate(found, ["call", "time", ""], tablefmt="github", disable_numparse=True)
