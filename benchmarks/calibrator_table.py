"""python -m benchmarks.calibrator_table --logits DIR: every calibrator on every network, ours and the peers'.

Fits each on validation rows and measures it on test rows: NLL, Brier score, ECE (equal_width and equal_mass, 15
bins), smooth ECE, and the seconds of one fit. Peers, where they are installed: probmetrics' SVS and SMS,
netcal's temperature scaling, scikit-learn's temperature, isotonic and sigmoid calibration. They are given probabilities
where they want such.

Reads every .npz with logits or probabilities and labels: ``val_*`` are validation rows, ``test_*`` test rows; where
there is one set only, a random half of it each (seed 0). Computes in float64, in one process. Writes a CSV and a
Markdown table with the means over the files, and how often focal temperature scaling has a lower NLL than temperature
scaling.
"""

import argparse
import csv
import datetime
import importlib
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

import focalkern as fk
from benchmarks.harness import RESULTS, commit, device_name
from benchmarks.search_table import two_sets
from focalkern.files import LogitSet

FIGURES = ("nll", "brier", "ece_equal_width", "ece_equal_mass", "smooth_ece")


def structured(input_kind: Any, kind: Any, focal: bool = False) -> Any:
    """By our own solver: what probmetrics finds is a row of its own."""
    return fk.StructuredScaling(kind=kind, focal=focal, solver="lbfgs", input_kind=input_kind)


# Given the kind of the input: something with fit and predict_proba of it.
OURS: dict[str, Callable[[Any], Any]] = {
    "temperature": lambda kind: fk.TemperatureScaling(input_kind=kind),
    "focal temperature, nll": lambda kind: fk.FocalTemperatureScaling(input_kind=kind),
    "focal temperature, brier": lambda kind: fk.FocalTemperatureScaling(criterion="brier", input_kind=kind),
    "focal temperature, ece": lambda kind: fk.FocalTemperatureScaling(criterion="ece", input_kind=kind),
    "structured vector": lambda kind: structured(kind, "vector"),
    "structured matrix": lambda kind: structured(kind, "matrix"),
    "structured vector, focal": lambda kind: structured(kind, "vector", focal=True),
    "structured matrix, focal": lambda kind: structured(kind, "matrix", focal=True),
    "histogram": lambda kind: fk.HistogramBinning(input_kind=kind),
    "isotonic": lambda kind: fk.IsotonicCalibration(input_kind=kind),
    "auto": lambda kind: fk.AutoCalibrator(input_kind=kind),
}


class Given:
    """A classifier whose features are its logits or probabilities, for scikit-learn."""

    _estimator_type = "classifier"

    def __init__(self, n_classes: int) -> None:
        self.classes_ = np.arange(n_classes)

    def fit(self, X: Any, y: Any) -> "Given":
        return self

    def decision_function(self, X: Any) -> Any:
        return X[:, 1] - X[:, 0] if X.shape[1] == 2 else X

    def predict(self, X: Any) -> Any:
        return X.argmax(1)

    def __sklearn_tags__(self) -> Any:
        return fk.TemperatureScaling().__sklearn_tags__()

    def __sklearn_is_fitted__(self) -> bool:
        return True


def of_sklearn(method: str) -> Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    def fit(logits: np.ndarray, labels: np.ndarray) -> Any:
        frozen = importlib.import_module("sklearn.frozen").FrozenEstimator(Given(logits.shape[1]))
        cv = importlib.import_module("sklearn.calibration").CalibratedClassifierCV
        return cv(frozen, method=method, ensemble=False).fit(logits, labels).predict_proba

    return fit


def of_probmetrics(name: str) -> Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    def fit(logits: np.ndarray, labels: np.ndarray) -> Any:
        one = getattr(importlib.import_module("probmetrics.calibrators"), name)()
        one.fit(softmax(logits), labels)
        return lambda new: one.predict_proba(softmax(new))

    return fit


def of_netcal(logits: np.ndarray, labels: np.ndarray) -> Any:
    one = importlib.import_module("netcal.scaling").TemperatureScaling()
    one.fit(softmax(logits), labels)
    return lambda new: one.transform(softmax(new))


def softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(-1).numpy()


PEERS: dict[str, Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "probmetrics SVS": of_probmetrics("SVSCalibrator"),
    "probmetrics SMS": of_probmetrics("SMSCalibrator"),
    "netcal temperature": of_netcal,
    "scikit-learn temperature": of_sklearn("temperature"),
    "scikit-learn isotonic": of_sklearn("isotonic"),
    "scikit-learn sigmoid": of_sklearn("sigmoid"),
}


def figures(probs: torch.Tensor, rows: LogitSet) -> dict[str, float]:
    probs = probs.double()
    return {
        "nll": float(fk.metrics.nll(probs, rows.labels)),
        "brier": float(fk.metrics.brier_score(probs, rows.labels)),
        "ece_equal_width": float(fk.metrics.expected_calibration_error(probs, rows.labels)),
        "ece_equal_mass": float(fk.metrics.expected_calibration_error(probs, rows.labels, estimator="equal_mass")),
        "smooth_ece": float(fk.metrics.smooth_calibration_error(probs, rows.labels)),
    }


def as_logits(rows: LogitSet) -> np.ndarray:
    """For peers: of probabilities their logarithms, a zero as a very small one."""
    return (rows.input.clip(1e-30).log() if rows.kind == "probs" else rows.input).numpy()


def measure(path: Path) -> list[dict[str, Any]]:
    sets = two_sets(path)
    if sets is None:
        return []
    selection, report = sets
    if selection.kind == "probs":  # a target of probability 0 has no NLL: zeros become a little, for all alike
        for rows in sets:
            rows.input.clip_(1e-7).div_(rows.input.sum(-1, keepdim=True))
    none = report.input if report.kind == "probs" else report.input.softmax(-1)
    about = {"file": path.stem, "n_fit": len(selection), "n_test": len(report), "classes": selection.n_classes}
    result = [{**about, "calibrator": "none", **figures(none, report)}]

    def add(name: str, fit: Callable[[], Callable[[Any], Any]], new: Any) -> None:
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                apply = fit()
                seconds = time.perf_counter() - begin
                probs = torch.as_tensor(apply(new))
        except ImportError:
            return
        except Exception as error:
            # A peer that fails, or an NLL that is finite nowhere: said, and the row is left out.
            print(f"  {name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            return
        result.append({**about, "calibrator": name, **figures(probs, report), "seconds": seconds})

    for name, make in OURS.items():
        calibrator = make(selection.kind)
        add(
            name,
            lambda calibrator=calibrator: calibrator.fit(selection.input, selection.labels).predict_proba,
            report.input,
        )
    for name, fit in PEERS.items():
        add(name, lambda fit=fit: fit(as_logits(selection), selection.labels.numpy()), as_logits(report))
    return result


def summary(rows: list[dict[str, Any]]) -> str:
    """Means over the files on which every calibrator has finite figures."""
    files = sorted({row["file"] for row in rows})
    names = list(dict.fromkeys(row["calibrator"] for row in rows))
    found = {(row["file"], row["calibrator"]): row for row in rows}
    whole = [file for file in files if all((file, name) in found for name in names)]
    lines = []
    for name in names:
        of = [found[file, name] for file in whole]
        values = [statistics.fmean(row[figure] for row in of) for figure in FIGURES]
        seconds = "" if name == "none" else f"{statistics.median(row['seconds'] for row in of):.2g}"
        lines.append([name, *(f"{value:.4f}" if math.isfinite(value) else "inf" for value in values), seconds])
    heads = ["calibrator", "NLL", "Brier", "ECE equal_width", "ECE equal_mass", "smooth ECE", "seconds (median)"]
    table = tabulate(lines, heads, tablefmt="github", disable_numparse=True)
    return f"Means over {len(whole)} files ({', '.join(whole)}):\n\n{table}"


def verdict(rows: list[dict[str, Any]]) -> str:
    """Where focal temperature scaling is worth having, and where not, out of the rows."""
    found = {(row["file"], row["calibrator"]): row for row in rows}
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
        f"Focal temperature scaling by the NLL is worth having on {', '.join(worth) or 'none of these files'}: there "
        f"its test NLL is {gained} below temperature scaling's, more than one percent. On "
        f"{', '.join(rest) or 'no other'} it is not ({others} below), and its ECE is the lower one on {ece} of all "
        f"{len(gains)} files."
    )


def write(rows: list[dict[str, Any]], target: Path, date: str, about: dict[str, Any]) -> str:
    """The CSV, and the Markdown beside it, which is returned."""
    with target.open("w", newline="") as file:
        names = list(dict.fromkeys(key for row in rows for key in row))
        writer = csv.DictWriter(file, [*names, *about], restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            values = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow({**values, **about})
    body = [
        [
            row["file"] if row["calibrator"] == "none" else "",
            row["calibrator"],
            *(f"{row[figure]:.4f}" for figure in FIGURES),
            f"{row['seconds']:.2g}" if "seconds" in row else "",
        ]
        for row in rows
    ]
    heads = ["file", "calibrator", "NLL", "Brier", "ECE equal_width", "ECE equal_mass", "smooth ECE", "s"]
    text = (
        f"Calibrators on published networks, {date}, {about['device']}, {about['threads']} threads, commit "
        f"{about['commit']}; test rows.\n\n{verdict(rows)}\n\n{summary(rows)}\n\n"
        f"{tabulate(body, heads, tablefmt='github', disable_numparse=True)}\n"
    )
    target.with_suffix(".md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibrator_table", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--logits", type=Path, required=True, metavar="DIR", help="a folder of .npz files")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    date = datetime.date.today().isoformat()
    about = {
        "threads": torch.get_num_threads(),
        "device": device_name(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"calibrator_table_{date}.csv"
    rows: list[dict[str, Any]] = []
    for path in sorted(arguments.logits.glob("*.npz")):
        print(path.name, flush=True)
        found = measure(path)
        rows.extend(found)
        if found:  # after every file, so that a run that is stopped leaves what it has
            text = write(rows, target, date, about)
    if not rows:
        parser.error(f"{arguments.logits}: no .npz file with logits and labels")
    print(f"\n{text}\nwritten: {target}, {target.with_suffix('.md')}")


if __name__ == "__main__":
    main()
