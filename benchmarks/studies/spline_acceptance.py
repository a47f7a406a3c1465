"""python -m benchmarks.studies.spline_acceptance --data DIR: spline scaling and its neighbours on published networks.

Fits each calibrator on validation rows and measures it on test rows: NLL, Brier score, ECE (equal width, 15 bins), test
error and the seconds of the fit, all in float64 and in one process. A file with one set of probabilities is divided: a
random half of its rows (torch.randperm, seed 0) for the fit, the rest for the test, its probabilities at least 1e-7.
``--few`` fits on the first N rows of two random permutations as well, seeded by (N, i). Prints tables of means, of the
NLL of every file and of few rows, and writes every row to a CSV.
"""

import argparse
import csv
import datetime
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

import focalkern as fk
from benchmarks.harness import RESULTS, commit, device_name

CALIBRATORS: dict[str, Callable[[], Any]] = {
    "temperature": fk.TemperatureScaling,
    "temperature, robust": fk.RobustTemperatureScaling,
    "structured matrix, focal": lambda: fk.StructuredScaling(focal=True, solver="lbfgs"),
    "spline": fk.SplineScaling,
    "spline-vector": lambda: fk.SplineScaling(kind="vector"),
    "spline-matrix": lambda: fk.SplineScaling(kind="matrix"),
}
FEW = (50, 100, 200, 1000)
FIGURES = ("nll", "brier", "ece", "error")


def two_sets(path: Path) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Logits and labels of the fit and of the test, float64; None for a file of something else."""
    with np.load(path, allow_pickle=False) as file:
        numbers = {name: file[name] for name in file.files if file[name].dtype.kind in "fiu"}
    arrays = {name: torch.from_numpy(array) for name, array in numbers.items()}
    if "val_logits" in arrays:
        fit, test = ((arrays[f"{name}_logits"].double(), arrays[f"{name}_labels"]) for name in ("val", "test"))
        return *fit, *test
    probs = next((array for name, array in arrays.items() if "probs" in name and array.dim() == 2), None)
    labels = next((array for name, array in arrays.items() if "labels" in name), None)
    if probs is None or labels is None:
        return None
    clipped = probs.double().clip(1e-7)
    logits = (clipped / clipped.sum(-1, keepdim=True)).log()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, second = order[: len(order) // 2], order[len(order) // 2 :]
    return logits[first], labels[first].long(), logits[second], labels[second].long()


def figures(log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    probs = log_probs.exp()
    return {
        "nll": -float(log_probs.gather(1, labels.unsqueeze(1)).mean()),
        "brier": float(fk.metrics.brier_score(probs, labels)),
        "ece": float(fk.metrics.expected_calibration_error(probs, labels)),
        "error": float((log_probs.argmax(-1) != labels).double().mean()),
    }


def measure(path: Path, names: list[str], few: tuple[int, ...]) -> list[dict[str, Any]]:
    sets = two_sets(path)
    if sets is None:
        return []
    logits, labels, new, new_labels = sets
    about = {"file": path.stem, "classes": logits.shape[1]}
    rows = [{**about, "rows": len(labels), "calibrator": "none", **figures(new.log_softmax(-1), new_labels)}]
    parts = [(len(labels), torch.arange(len(labels)))]
    for n in few:
        for i in range(2):
            parts.append((n, torch.from_numpy(np.random.default_rng([n, i]).permutation(len(labels))[:n])))
    for n, part in parts:
        for name in names:
            if name == "structured matrix, focal" and n < len(labels):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", fk.CalibrationWarning)
                begin = time.perf_counter()
                calibrator = CALIBRATORS[name]().fit_quietly(logits[part], labels[part])
                seconds = time.perf_counter() - begin
            found = figures(torch.as_tensor(calibrator.predict_log_proba(new)), new_labels)
            rows.append({**about, "rows": n, "calibrator": name, **found, "seconds": seconds})
    return rows


def tables(rows: list[dict[str, Any]], few: tuple[int, ...]) -> str:
    """Means of all rows, the NLL of every file, and means of few rows."""
    names = list(dict.fromkeys(row["calibrator"] for row in rows))
    files = list(dict.fromkeys(row["file"] for row in rows))
    whole = [row for row in rows if row["rows"] not in few]
    found = {(row["file"], row["calibrator"]): row for row in whole}

    def mean(name: str, figure: str) -> str:
        return f"{statistics.fmean(found[file, name][figure] for file in files):.4f}"

    first = [[name, *(mean(name, figure) for figure in FIGURES)] for name in names]
    second = [[file, *(f"{found[file, name]['nll']:.4f}" for name in names)] for file in files]
    parts = [
        tabulate(first, ["all rows, mean", "NLL", "Brier", "ECE", "test error"], "github", disable_numparse=True),
        tabulate(second, ["NLL", *names], "github", disable_numparse=True),
    ]
    if few:
        of = [name for name in names if any(row["calibrator"] == name and row["rows"] in few for row in rows)]
        third = []
        for n in few:
            of_rows = [row for row in rows if row["rows"] == n]
            means = (statistics.fmean(row["nll"] for row in of_rows if row["calibrator"] == name) for name in of)
            third.append([f"{n:,}", *(f"{value:.4f}" for value in means)])
        parts.append(tabulate(third, ["rows, NLL", *of], "github", disable_numparse=True))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.spline_acceptance",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a folder of .npz files")
    parser.add_argument("--few", action="store_true", help=f"fit on {', '.join(map(str, FEW))} rows as well")
    parser.add_argument("--only", nargs="*", choices=list(CALIBRATORS), help="these calibrators")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the CSV goes")
    args = parser.parse_args()
    few = FEW if args.few else ()
    rows: list[dict[str, Any]] = []
    for path in sorted(args.data.glob("*.npz")):
        print(path.stem, flush=True)
        rows += measure(path, args.only or list(CALIBRATORS), few)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    about = {"device": device_name(), "threads": torch.get_num_threads(), "commit": commit()}
    target = args.out / f"spline_acceptance_{date}.csv"
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, ["file", "classes", "rows", "calibrator", *FIGURES, "seconds", *about], lineterminator="\n"
        )
        writer.writeheader()
        for row in rows:
            values = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow({**values, **about})
    text = tables(rows, few)
    target.with_suffix(".md").write_text(
        f"Spline scaling on published networks, {date}, {about['device']}, {about['threads']} threads, commit "
        f"{about['commit']}; test rows.\n\n{text}\n"
    )
    print(f"\n{text}\n\n{target}")


if __name__ == "__main__":
    main()
