"""The page of calibrator_table.py: its tables and the sentences below them."""

import csv
import math
import statistics
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from benchmarks.harness import in_threads, readable
from benchmarks.studies.networks import markdown

FIGURES = ("nll", "brier", "ece_equal_width", "ece_equal_mass", "smooth_ece")
FEW = (50, 100, 200, 500, 1000, 2000)
DRAWS = 2
FEW_CALIBRATORS = (
    "auto",
    "temperature",
    "temperature, robust",
    "focal temperature, nll",
    "structured matrix, focal",
    "spline",
    "spline-vector",
    "spline-matrix",
    "isotonic",
    "probmetrics ETS",
    "probmetrics SVS",
    "probmetrics SMS",
    "scikit-learn isotonic",
)


def is_whole(row: dict[str, Any]) -> bool:
    """Whether all validation rows were used."""
    return row.get("draw") in (None, "")


def summary(rows: list[dict[str, Any]]) -> str:
    """Means over the files on which every calibrator has finite figures, and paired differences."""
    rows = [row for row in rows if is_whole(row)]
    found = {(row["file"], row["calibrator"]): row for row in rows}
    files = sorted({row["file"] for row in rows})
    names = list(dict.fromkeys(row["calibrator"] for row in rows))
    whole = [name for name in names if all((file, name) in found for file in files)]
    lines = []
    for name in whole:
        of = [found[file, name] for file in files]
        values = [statistics.fmean(row[figure] for row in of) for figure in FIGURES]
        seconds = "" if name == "none" else readable(statistics.median(row["seconds"] for row in of), 2)
        lines.append([name, *(printed(value) for value in values), *beyond_noise(of), seconds])
    heads = ["calibrator", "NLL", "Brier", "ECE equal_width", "ECE equal_mass", "smooth ECE", "higher", "lower", "s"]
    table = markdown(lines, heads)
    missing = [name for name in names if name not in whole]
    left_out = f" The table leaves out calibrators that do not fit every file: {', '.join(missing)}." if missing else ""
    return (
        f"Means over {len(files)} files ({', '.join(files)}). *Higher* and *lower* count the files on which the NLL is "
        "higher or lower than that of the automatic choice by more than 1.96 standard errors of the paired difference. "
        f"*s* is the median time of a fit in seconds.{left_out}\n\n{table}"
    )


def printed(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "inf"


def beyond_noise(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The numbers of fits with a higher and with a lower NLL than the automatic choice, with 95 % confidence."""
    signs = [
        0 if abs(row["vs_auto"]) <= 1.96 * row["vs_auto_error"] else math.copysign(1, row["vs_auto"]) for row in rows
    ]
    return str(signs.count(1)), str(signs.count(-1))


def pairs(rows: list[dict[str, Any]]) -> str:
    """Test NLL minus that of the automatic choice, with 95 % intervals, file by file."""
    rows = [row for row in rows if is_whole(row)]
    found = {(row["file"], row["calibrator"]): row for row in rows}
    shown = ("temperature, robust", "structured matrix, focal", "probmetrics SMS", "spline", "spline-vector")
    lines = []
    for file in sorted({row["file"] for row in rows}):
        cells = []
        for name in shown:
            row = found.get((file, name))
            cells.append("" if row is None else f"{row['vs_auto']:+.4f} +-{1.96 * row['vs_auto_error']:.4f}")
        lines.append([file, *cells])
    return markdown(lines, ["NLL minus automatic choice", *shown])


def few_rows(rows: list[dict[str, Any]]) -> str:
    """Means of the fits on few rows, and the cases in which the automatic choice is worse."""
    rows = [row for row in rows if not is_whole(row)]
    if not rows:
        return ""
    names = [name for name in ("none", *FEW_CALIBRATORS) if any(row["calibrator"] == name for row in rows)]
    parts = []
    for figure, words in (("nll", "NLL"), ("brier", "Brier"), ("ece_equal_width", "ECE")):
        lines = []
        for name in names:
            cells = []
            for n in FEW:
                of = [row for row in rows if row["calibrator"] == name and row["n_fit"] == n]
                fits = sum(row["calibrator"] == "none" and row["n_fit"] == n for row in rows)
                cells.append(printed(statistics.fmean(row[figure] for row in of)) if len(of) == fits else "failed")
            lines.append([name, *cells])
        heads = [f"{words}, mean over files and {DRAWS} draws", *(f"{n:,} rows" for n in FEW)]
        parts.append(markdown(lines, heads))
    worse = []
    for n in FEW:
        of = [row for row in rows if row["calibrator"] == "temperature, robust" and row["n_fit"] == n]
        higher, lower = beyond_noise(of)
        least = min(row["vs_auto"] for row in of)
        worse.append(
            f"{n:,} rows, {len(of)} fits: beyond noise, the NLL of temperature scaling (robust) is higher than that of "
            f"the automatic choice in {higher} and lower in {lower}"
            + (f" (by at most {-least:.4f})" if int(lower) else "")
        )
    return "\n\n".join(parts) + "\n\n" + "\n".join(f"- {words}." for words in worse)


def verdict(rows: list[dict[str, Any]]) -> str:
    """A table of the networks on which focal temperature scaling lowers the NLL, and the sentences below it."""
    found = {(row["file"], row["calibrator"]): row for row in rows if is_whole(row)}
    gains = {
        file: found[file, "temperature"]["nll"] - found[file, "focal temperature, nll"]["nll"]
        for file in sorted({row["file"] for row in rows})
        if (file, "temperature") in found and (file, "focal temperature, nll") in found
    }
    worth = [file for file, gain in gains.items() if gain > 0.01 * found[file, "temperature"]["nll"]]
    rest = [file for file in gains if file not in worth]
    ece = sum(
        found[file, "focal temperature, nll"]["ece_equal_width"] < found[file, "temperature"]["ece_equal_width"]
        for file in gains
    )
    gained = ", ".join(f"{gains[file]:.4f}" for file in worth) or "0"
    others = ", ".join(f"{gains[file]:+.4f}" for file in rest)
    return (
        "Focal temperature scaling by the NLL has a test NLL more than one percent below that of temperature scaling "
        f"on {', '.join(worth) or 'none of these files'} ({gained} below). On {', '.join(rest) or 'no other file'} it "
        f"has not ({others} below). Its ECE is lower on {ece} of all {len(gains)} files."
    )


FIELDS = (
    *("file", "n_fit", "draw", "n_test", "classes", "calibrator", *FIGURES, "vs_auto", "vs_auto_error", "seconds"),
    *("threads", "device", "torch", "commit"),
)


WORDS = frozenset({"file", "calibrator", "device", "torch", "commit"})


def read(path: Path, words: Set[str] = WORDS) -> list[dict[str, Any]]:
    """The rows of a CSV, in which the columns that are not ``words`` are numbers; empty cells are left out."""
    with path.open(newline="") as file:
        return [
            {key: value if key in words else float(value) for key, value in row.items() if value != ""}
            for row in csv.DictReader(file)
        ]


def page(path: Path) -> str:
    """The Markdown page of a CSV."""
    rows = read(path)
    about = rows[0]
    body = [
        [
            row["file"] if place == 0 or rows[place - 1]["file"] != row["file"] else "",
            row["calibrator"],
            *(printed(row[figure]) for figure in FIGURES),
            readable(row["seconds"], 2) if "seconds" in row else "",
        ]
        for place, row in enumerate(rows)
        if is_whole(row)
    ]
    heads = ["file", "calibrator", "NLL", "Brier", "ECE equal_width", "ECE equal_mass", "smooth ECE", "s"]
    parts = [
        f"Calibrators on published networks, {path.stem.rpartition('_')[2]}, {about['device']}, "
        f"{in_threads(about['threads'])}, commit {about['commit']}; test rows.",
        summary(rows),
        f"Paired differences, all validation rows, with 95 % intervals:\n\n{pairs(rows)}",
        verdict(rows),
        few_rows(rows),
        "<!-- each network -->",
        markdown(body, heads),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
