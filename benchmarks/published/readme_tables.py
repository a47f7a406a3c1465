"""python -m benchmarks.published.readme_tables: the README's tables (speed, memory, calibration), from recorded rows.

Measures nothing: prints what benchmarks/results holds; and tables of where focal scaling helps, of the loss modules, of
small calls and of a GPU, which pages of the documentation have. --write puts them into README.md and the pages,
between marks.
"""

import argparse
import csv
import functools
import re
import statistics
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import RESULTS, readable, recorded_rows
from benchmarks.published import gpu_tables

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SPEED_PAGE = ROOT / "docs" / "evidence" / "speed.md"
GPU_PAGE = ROOT / "docs" / "evidence" / "gpu.md"
HELPS = ROOT / "docs" / "explanation" / "when_focal_scaling_helps.md"

# (name, operator, recorded case, the same result in torch operations, torch's loss that does the same work)
SPEED = (
    ("`focal_loss`, 8192 x 1000", "focal_loss", "forward+backward 8192x1000", "composite", "cross_entropy"),
    ("`focal_loss`, 1024 x 32,000", "focal_loss", "forward+backward 1024x32000", "composite", "cross_entropy"),
    (
        "`focal_loss`, label smoothing, 4096 x 100",
        "soft_targets",
        "smoothed 4096x100",
        "composite",
        "cross_entropy",
    ),
    ("`focal_loss`, 32 x 10", "calls", "focal loss 32x10", "", "cross_entropy"),
    (
        "`sigmoid_focal_loss`, 160,000 x 80",
        "sigmoid_loss",
        "sigmoid focal 160000x80, memory kept",
        "published formula",
        "BCE",
    ),
    ("`focal_calibration_map`, 10,000 x 1000", "calibration_map", "forward+backward 10000x1000", "composite", ""),
    (
        "`calibration_grid`, 4500 cells, 10,000 x 1000",
        "calibration_grid",
        "4500 cells 10000x1000",
        "per-cell loop",
        "",
    ),
)
MEMORY = (
    (
        "`linear_focal_loss`, 1024 rows, 128,256 classes",
        "linear_focal_loss",
        "forward+backward 1024x256x128256",
        "cross_entropy of linear",
    ),
    ("`focal_loss`, 8192 rows of 1000 classes", "focal_loss", "forward+backward 8192x1000", "composite"),
    (
        "`focal_calibration_map`, 10,000 rows of 1000 classes",
        "calibration_map",
        "forward+backward 10000x1000",
        "composite",
    ),
    (
        "`calibration_grid`, 4500 cells, 50,000 rows of 1000 classes",
        "calibration_grid",
        "4500 cells 50000x1000",
        "per-cell loop",
    ),
    ("`MMCELoss`, 8192 rows of 20 classes", "losses", "MMCE 8192x20", "published algorithm"),
)
CALIBRATORS = {
    "none": "none",
    "temperature": "temperature scaling, maximum likelihood",
    "temperature, robust": "temperature scaling with a floor",
    "focal temperature, nll": "focal temperature scaling",
    "probmetrics SMS": "structured matrix scaling (probmetrics)",
    "structured matrix, focal": "structured matrix scaling, focal map on top",
    "spline": "spline scaling, no predicted class changes",
    "spline-vector": "spline vector scaling",
    "spline-matrix": "spline matrix scaling",
    "auto": "automatic choice",
}


def recorded(op: str, case: str, column: str, out: Path) -> dict[str, float]:
    """{provider: median} of a float32 case over the runs of the commit that measured it last."""
    rows = [row for row in recorded_rows(op, out) if (row["case"], row["dtype"]) == (case, "float32")]
    values: dict[str, list[float]] = {}
    for row in rows:
        if row["commit"] == rows[-1]["commit"] and row["repeats"] != "0":
            values.setdefault(row["provider"], []).append(float(row[column]))
    return {provider: statistics.median(found) for provider, found in values.items()}


def github(rows: list[list[str]], header: list[str]) -> str:
    columns = ("left", *["right"] * (len(header) - 1))
    return tabulate(rows, header, tablefmt="github", colalign=columns, disable_numparse=True)


def speed(out: Path = RESULTS) -> str:
    rows = []
    for words, op, case, formula, loss in SPEED:
        own, slower = recorded(op, case, "median_ms", out)["focalkern"], recorded(op, case, "speedup", out)
        time = f"{own * 1e3:.3g} us" if own < 0.1 else f"{own:.3g} ms" if own < 1e3 else f"{own / 1e3:.3g} s"
        ratios = [slower.get(formula), slower.get(f"{formula}, compiled")]
        ratios.append(min((slower[name] for name in (loss, f"{loss}, compiled") if name in slower), default=None))
        rows.append([words, time, *("" if ratio is None else f"{readable(ratio)} x" for ratio in ratios)])
    header = ["float32, rows x classes, with gradients", "focalkern", "same in plain torch", "compiled"]
    return github(rows, [*header, "torch's loss"])


def memory(out: Path = RESULTS) -> str:
    rows = []
    for words, op, case, plain in MEMORY:
        peak = recorded(op, case, "peak_extra_mib", out)
        rows.append([words, f"{peak['focalkern']:,.0f} MiB", f"{peak[plain]:,.0f} MiB"])
    return github(rows, ["memory beyond the arguments, at the peak", "focalkern", "plain torch"])


def fits_of(out: Path) -> list[dict[str, str]]:
    """Fits on all validation rows."""
    with sorted(out.glob("calibrator_table_*.csv"))[-1].open() as stream:
        return [row for row in csv.DictReader(stream) if not row["draw"]]


def calibration(out: Path = RESULTS) -> str:
    fits = fits_of(out)
    rows = []
    for name, words in CALIBRATORS.items():
        means = [
            statistics.mean(float(row[figure]) for row in fits if row["calibrator"] == name)
            for figure in ("nll", "brier", "ece_equal_width")
        ]
        rows.append([words, *(f"{mean:.4f}" for mean in means)])
    files = len({row["file"] for row in fits})
    return github(rows, [f"mean of {files} published networks, test rows", "NLL", "Brier score", "ECE"])


def helps(out: Path = RESULTS) -> str:
    nll: dict[str, dict[str, float]] = {}
    for row in fits_of(out):
        nll.setdefault(row["file"], {})[row["calibrator"]] = float(row["nll"])
    rows = []
    names = ("none", "temperature", "temperature, robust", "focal temperature, nll", "spline")
    for name, found in sorted(nll.items(), key=lambda one: one[1]["focal temperature, nll"] - one[1]["temperature"]):
        rows.append([f"`{name}`", *(f"{found[key]:.4f}" for key in names)])
    header = ["test NLL", "uncalibrated", "temperature", "temperature, floor", "focal temperature", "spline"]
    return github(rows, header)


def modules(out: Path = RESULTS) -> str:
    """The loss modules; each case has its most recent timing."""
    last = {row["case"]: row["device"] for row in recorded_rows("losses", out) if row["dtype"] == "float32"}
    rows = []
    for case, device in last.items():
        own, slower = recorded("losses", case, "median_ms", out), recorded("losses", case, "speedup", out)
        copies = recorded("losses", case, "ratio_to_copy", out)["focalkern"]
        ratios = ("published algorithm", "published algorithm, compiled", "cross_entropy")
        shown = [f"{readable(slower[name])} x" if name in slower else "" for name in ratios]
        machine = "AMD EPYC" if "EPYC" in device else "Intel Xeon" if "Xeon" in device else device
        rows.append([case, machine, f"{readable(own['focalkern'])} ms", readable(copies), *shown])
    header = ["loss and shape", "machine", "focalkern", "copies", "as published", "compiled", "cross_entropy"]
    return github(rows, header)


def ways(op: str, out: Path = RESULTS) -> str:
    """Each other way of a case beside focalkern's."""
    rows = []
    for case in dict.fromkeys(row["case"] for row in recorded_rows(op, out)):
        own, slower = recorded(op, case, "median_ms", out), recorded(op, case, "speedup", out)
        if not own:  # a peer was absent
            continue
        time = own["focalkern"]
        shown = f"{time * 1e3:.3g} us" if time < 1 else f"{time:.3g} ms"
        rows.append(
            [case, shown, *(f"{name}: {ratio:,.2f} x" for name, ratio in slower.items() if name != "focalkern")]
        )
    columns = max(map(len, rows))
    header = ["call", "focalkern", "another way", *[""] * (columns - 3)]
    return github([row + [""] * (columns - len(row)) for row in rows], header)


TABLES = {
    "speed": (README, speed),
    "memory": (README, memory),
    "calibration": (README, calibration),
    "helps": (HELPS, helps),
    "modules": (SPEED_PAGE, modules),
    "calls": (SPEED_PAGE, functools.partial(ways, "calls")),
    "libraries": (SPEED_PAGE, functools.partial(ways, "libraries")),
    "gpu steps": (GPU_PAGE, gpu_tables.steps),
    "gpu passes": (GPU_PAGE, gpu_tables.passes),
    "gpu grids and fits": (GPU_PAGE, gpu_tables.grids_and_fits),
}


def marked(text: str, name: str) -> re.Match[str]:
    """The span of a table in a page."""
    found = re.search(rf"(?<=<!-- table: {name} -->\n\n).*?(?=\n\n<!-- end -->)", text, re.DOTALL)
    if found is None:
        raise ValueError(f"no marks for the table {name!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.readme_tables", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into their pages")
    arguments = parser.parse_args()
    for name, (path, make) in TABLES.items():
        print(f"{make()}\n")
        if arguments.write:
            text = path.read_text()
            place = marked(text, name)
            path.write_text(text[: place.start()] + make() + text[place.end() :])


if __name__ == "__main__":
    main()
