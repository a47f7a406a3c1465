"""python -m benchmarks.studies.calibrator_table --logits DIR: every calibrator on every network, ours and the peers'.

Fits each on validation rows and measures it on test rows: NLL, Brier score, ECE (equal_width and equal_mass, 15
bins), smooth ECE, and the seconds of one fit. ``vs_auto`` is the mean paired difference of the NLL from that of
``fk.AutoCalibrator`` on the test rows, and ``vs_auto_error`` its standard error; a value above 0 means that the
automatic choice is better. Peers, where they are installed: probmetrics' calibrators, netcal's temperature scaling and
beta calibration, scikit-learn's temperature, isotonic and sigmoid calibration. Peers that need probabilities get them.

``--few`` fits on 50 to 2,000 random rows as well, two draws of each size, seeded by (size, draw); NLL, Brier score and
ECE only, and only the calibrators in FEW_CALIBRATORS.

Reads every .npz with logits or probabilities and labels: ``val_*`` are validation rows, ``test_*`` test rows; a single
set is split into random halves (seed 0). Computes in float64, in one process. Writes a CSV and a Markdown page.
``--summary`` writes the page of the latest CSV again.
"""

import argparse
import datetime
import importlib
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import focalkern as fk
from benchmarks.harness import RESULTS
from benchmarks.studies.calibrator_pages import DRAWS, FEW, FEW_CALIBRATORS, FIELDS, FIGURES, page
from benchmarks.studies.networks import about_run, two_sets, without_zeros, write_rows
from focalkern.files import LogitSet

FEW_FIGURES = FIGURES[:3]


def structured(input_kind: Any, kind: Any, focal: bool = False) -> Any:
    """With our own solver; the solver of probmetrics has a separate row."""
    return fk.StructuredScaling(kind=kind, focal=focal, solver="lbfgs", input_kind=input_kind)


# A function of the input kind that returns an object with fit and predict_proba.
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
    """For peers: the logarithms of probabilities; 0 is replaced by a very small probability."""
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
            # If a peer fails, or an NLL is finite nowhere, the command prints it and omits the row.
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
