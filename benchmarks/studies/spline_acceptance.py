"""python -m benchmarks.studies.spline_acceptance --data DIR: spline scaling and related calibrators on published
networks.

Fits each calibrator on validation rows and measures it on test rows: NLL, Brier score, ECE (equal width, 15 bins), test
error and the seconds of the fit, all in float64 and in one process. A file with one set of probabilities is divided: a
random half of its rows (torch.randperm, seed 0) for the fit, the rest for the test, its probabilities at least 1e-7.
``--few`` also fits on the first N rows of two random permutations, seeded by (N, i). The command prints tables (means,
the NLL of every file, fits on few rows), and writes every row to a CSV.
"""

import argparse
import datetime
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import focalkern as fk
from benchmarks.harness import RESULTS, in_threads
from benchmarks.studies.networks import about_run, markdown, two_sets, without_zeros, write_rows

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
    without_zeros(sets)
    logits, new = (rows.input.log() if rows.kind == "probs" else rows.input for rows in sets)
    labels, new_labels = (rows.labels for rows in sets)
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
        markdown(first, ["all rows, mean", "NLL", "Brier", "ECE", "test error"]),
        markdown(second, ["NLL", *names]),
    ]
    if few:
        of = [name for name in names if any(row["calibrator"] == name and row["rows"] in few for row in rows)]
        third = []
        for n in few:
            of_rows = [row for row in rows if row["rows"] == n]
            means = (statistics.fmean(row["nll"] for row in of_rows if row["calibrator"] == name) for name in of)
            third.append([f"{n:,}", *(f"{value:.4f}" for value in means)])
        parts.append(markdown(third, ["rows, NLL", *of]))
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
    about = about_run()
    target = args.out / f"spline_acceptance_{date}.csv"
    write_rows(target, ["file", "classes", "rows", "calibrator", *FIGURES, "seconds"], rows, about)
    text = tables(rows, few)
    target.with_suffix(".md").write_text(
        f"Spline scaling on published networks, {date}, {about['device']}, {in_threads(about['threads'])}, commit "
        f"{about['commit']}; test rows.\n\n{text}\n"
    )
    print(f"\n{text}\n\n{target}")


if __name__ == "__main__":
    main()
