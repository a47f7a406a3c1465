"""python -m benchmarks.studies.calibrator_table --logits DIR: every calibrator on every network, ours and the peers'.

Fits each on validation rows and measures it on test rows: NLL, Brier score, ECE (equal_width and equal_mass, 15
bins), smooth ECE, and the seconds of one fit. ``vs_auto`` is the mean paired difference of the NLL from that of
``fk.AutoCalibrator`` on the test rows, and ``vs_auto_error`` its standard error; a value above 0 means that the
automatic choice is better. Peers, where they are installed: probmetrics' calibrators, netcal's temperature scaling and
beta calibration, scikit-learn's temperature, isotonic and sigmoid calibration. They are given probabilities where they
want such.

``--few`` fits on 50 to 2,000 random rows as well, two draws of each size, seeded by (size, draw); NLL, Brier score and
ECE only, and only the calibrators in FEW_CALIBRATORS.

Reads every .npz with logits or probabilities and labels: ``val_*`` are validation rows, ``test_*`` test rows; a single
set is split into random halves (seed 0). Computes in float64, in one process. Writes a CSV and a Markdown page.
``--summary`` writes the page of the latest CSV again.
"""

import argparse
import csv
import datetime
import importlib
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch

import focalkern as fk
from benchmarks.harness import RESULTS, in_threads, readable
from benchmarks.studies.networks import about_run, markdown, two_sets, without_zeros, write_rows
from focalkern.files import LogitSet

FIGURES = ("nll", "brier", "ece_equal_width", "ece_equal_mass", "smooth_ece")
FEW_FIGURES = FIGURES[:3]
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


def structured(input_kind: Any, kind: Any, focal: bool = False) -> Any:
    """With our own solver; the solver of probmetrics has a separate row."""
    return fk.StructuredScaling(kind=kind, focal=focal, solver="lbfgs", input_kind=input_kind)


# Given the kind of the input: something with fit and predict_proba of it.
OURS: dict[str, Callable[[Any], Any]] = {
    "auto": lambda kind: fk.AutoCalibrator(input_kind=kind),  # first: the others are compared with it
    "temperature": lambda kind: fk.TemperatureScaling(input_kind=kind),
    "temperature, robust": lambda kind: fk.RobustTemperatureScaling(input_kind=kind),
    "focal temperature, nll": lambda kind: fk.FocalTemperatureScaling(input_kind=kind),
    "focal temperature, brier": lambda kind: fk.FocalTemperatureScaling(criterion="brier", input_kind=kind),
    "focal temperature, ece": lambda kind: fk.FocalTemperatureScaling(criterion="ece", input_kind=kind),
    "structured vector": lambda kind: structured(kind, "vector"),
    "structured matrix": lambda kind: structured(kind, "matrix"),
    "structured vector, focal": lambda kind: structured(kind, "vector", focal=True),
    "structured matrix, focal": lambda kind: structured(kind, "matrix", focal=True),
    "spline": lambda kind: fk.SplineScaling(input_kind=kind),
    "spline-vector": lambda kind: fk.SplineScaling(kind="vector", input_kind=kind),
    "spline-matrix": lambda kind: fk.SplineScaling(kind="matrix", input_kind=kind),
    "histogram": lambda kind: fk.HistogramBinning(input_kind=kind),
    "isotonic": lambda kind: fk.IsotonicCalibration(input_kind=kind),
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


def of_netcal(name: str) -> Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    def fit(logits: np.ndarray, labels: np.ndarray) -> Any:
        one = getattr(importlib.import_module("netcal.scaling"), name)()
        one.fit(softmax(logits), labels)
        return lambda new: one.transform(softmax(new))

    return fit


def softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(-1).numpy()


PEERS: dict[str, Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "probmetrics temperature": of_probmetrics("TemperatureScalingCalibrator"),
    "probmetrics torch-uncertainty temperature": of_probmetrics("TorchUncertaintyTemperatureScalingCalibrator"),
    "probmetrics ETS": of_probmetrics("ETSCalibrator"),
    "probmetrics SVS": of_probmetrics("SVSCalibrator"),
    "probmetrics SMS": of_probmetrics("SMSCalibrator"),
    "probmetrics vector scaling": of_probmetrics("VectorScalingCalibrator"),
    "probmetrics matrix scaling": of_probmetrics("MatrixScalingCalibrator"),
    "probmetrics Dirichlet": of_probmetrics("DirichletCalibrator"),  # needs dirichletcal
    "netcal temperature": of_netcal("TemperatureScaling"),
    "netcal beta": of_netcal("BetaCalibration"),
    "scikit-learn temperature": of_sklearn("temperature"),
    "scikit-learn isotonic": of_sklearn("isotonic"),
    "scikit-learn sigmoid": of_sklearn("sigmoid"),
}


MOST_CLASSES = {"netcal beta": 20}
"""A fit of more classes takes minutes."""


def figures(probs: torch.Tensor, rows: LogitSet, names: Sequence[str] = FIGURES) -> dict[str, float]:
    probs = probs.double()
    every: dict[str, Callable[[], torch.Tensor]] = {
        "nll": lambda: fk.metrics.nll(probs, rows.labels),
        "brier": lambda: fk.metrics.brier_score(probs, rows.labels),
        "ece_equal_width": lambda: fk.metrics.expected_calibration_error(probs, rows.labels),
        "ece_equal_mass": lambda: fk.metrics.expected_calibration_error(probs, rows.labels, estimator="equal_mass"),
        "smooth_ece": lambda: fk.metrics.smooth_calibration_error(probs, rows.labels),
    }
    return {name: float(every[name]()) for name in names}


def as_logits(rows: LogitSet) -> np.ndarray:
    """For peers: of probabilities their logarithms, a zero as a very small one."""
    return (rows.input.clip(1e-30).log() if rows.kind == "probs" else rows.input).numpy()


def measure(path: Path, few: Sequence[int] = ()) -> list[dict[str, Any]]:
    sets = two_sets(path)
    if sets is None:
        return []
    selection, report = sets
    without_zeros(sets)
    result = measure_fits(selection, report, list(OURS | PEERS), FIGURES)
    for n in few:
        for draw in range(DRAWS if n < len(selection) else 0):
            part = np.random.default_rng([n, draw]).permutation(len(selection))[:n]
            found = measure_fits(selection.rows(torch.from_numpy(part), ""), report, FEW_CALIBRATORS, FEW_FIGURES)
            result += [{**row, "draw": draw} for row in found]
    return [{"file": path.stem, **row} for row in result]


def measure_fits(
    selection: LogitSet, report: LogitSet, names: Sequence[str], wanted: Sequence[str]
) -> list[dict[str, Any]]:
    """No calibration and each calibrator by name, fitted on ``selection``; the first one is the automatic choice."""
    about = {"n_fit": len(selection), "n_test": len(report), "classes": selection.n_classes}
    result = []
    index = report.labels.unsqueeze(1)
    of_auto: torch.Tensor | None = None

    def add(name: str, fit: Callable[[], Callable[[Any], Any]], new: Any) -> None:
        nonlocal of_auto
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                apply = fit()
                seconds = time.perf_counter() - begin
                probs = torch.as_tensor(apply(new)).double()
        except ImportError:
            return
        except Exception as error:
            # A peer that fails, or an NLL that is finite nowhere: said, and the row is left out.
            print(f"  {name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            return
        losses = -probs.gather(1, index).squeeze(1).log()
        of_auto = losses if of_auto is None else of_auto
        difference = losses - of_auto
        paired = {"vs_auto": float(difference.mean()), "vs_auto_error": float(difference.std()) / len(losses) ** 0.5}
        of_name = {"calibrator": name, "seconds": seconds} if name != "none" else {"calibrator": name}
        place = 0 if name == "none" else len(result)
        result.insert(place, {**about, **of_name, **figures(probs, report, wanted), **paired})

    for name, make in OURS.items():
        if name in names:
            calibrator = make(selection.kind)
            add(
                name,
                lambda calibrator=calibrator: calibrator.fit(selection.input, selection.labels).predict_proba,
                report.input,
            )
    add("none", lambda: lambda new: new if report.kind == "probs" else new.softmax(-1), report.input)
    for name, fit in PEERS.items():
        if name in names and selection.n_classes <= MOST_CLASSES.get(name, selection.n_classes):
            add(name, lambda fit=fit: fit(as_logits(selection), selection.labels.numpy()), as_logits(report))
    return result


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
    left_out = f" Not on every file, and so not in it: {', '.join(missing)}." if missing else ""
    return (
        f"Means over {len(files)} files ({', '.join(files)}). *Higher* and *lower*: on how many of them the NLL is "
        "higher or lower than that of the automatic choice by more than 1.96 standard errors of the paired difference. "
        f"Median seconds of a fit.{left_out}\n\n{table}"
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
    """Means of the fits on few rows, and where the automatic choice is the worse one."""
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
            f"{n:,} rows: of {len(of)} fits temperature scaling (robust) is worse than the automatic choice beyond "
            f"noise in {higher}, better in {lower}" + (f" (by at most {-least:.4f})" if int(lower) else "")
        )
    return "\n\n".join(parts) + "\n\n" + "\n".join(f"- {words}." for words in worse)


def verdict(rows: list[dict[str, Any]]) -> str:
    """A table of the networks on which focal temperature scaling helps, from the rows."""
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
        f"Focal temperature scaling by the NLL is worth having on {', '.join(worth) or 'none of these files'}: there "
        f"its test NLL is {gained} below temperature scaling's, more than one percent. On "
        f"{', '.join(rest) or 'no other'} it is not ({others} below), and its ECE is the lower one on {ece} of all "
        f"{len(gains)} files."
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
        markdown(body, heads),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write(rows: list[dict[str, Any]], target: Path, about: dict[str, Any]) -> str:
    """Writes the CSV and the page next to it, and returns the page."""
    write_rows(target, FIELDS, rows, about)
    text = page(target)
    target.with_suffix(".md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.calibrator_table",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--logits", type=Path, metavar="DIR", help="a folder of .npz files")
    parser.add_argument("--few", action="store_true", help=f"fit on {', '.join(map(str, FEW))} rows as well")
    parser.add_argument("--summary", action="store_true", help="write the page of the latest CSV again")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    if arguments.summary:
        latest = sorted(arguments.out.glob("calibrator_table_*.csv"))[-1]
        latest.with_suffix(".md").write_text(page(latest))
        print(page(latest))
        return
    if arguments.logits is None:
        parser.error("--logits DIR is required")
    date = datetime.date.today().isoformat()
    about = about_run()
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"calibrator_table_{date}.csv"
    rows: list[dict[str, Any]] = []
    text = ""
    for path in sorted(arguments.logits.glob("*.npz")):
        print(path.name, flush=True)
        found = measure(path, FEW if arguments.few else ())
        rows.extend(found)
        if found:  # after every file, so that an interrupted run keeps its rows
            text = write(rows, target, about)
    if not rows:
        parser.error(f"{arguments.logits}: no .npz file with logits and labels")
    print(f"\n{text}\nwritten: {target}, {target.with_suffix('.md')}")


if __name__ == "__main__":
    main()
