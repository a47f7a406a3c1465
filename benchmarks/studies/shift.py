"""python -m benchmarks.studies.shift --data DIR: calibrators on other models, and on rows of other sources.

The models are 59 of scikit-learn, trained on small data (Fashion-MNIST and TREC from DIR, digits, synthetic blobs),
rows whose labels are drawn from their probabilities, and the published networks of ``--logits DIR``. Calibrators are
fitted on 100, 200, 500 and all validation rows. They are measured on test rows of the same source and of other sources:
noisy, blurred or dark images, moved features, other class priors, TREC's test file. The metrics are NLL, Brier score,
ECE (equal width, 15 bins) and test error, in float64. Calibrators whose NLL would be infinite get probabilities of at
least 1e-7; the others get the models' own. ``vs_temperature`` is the mean paired difference of the NLL from temperature
scaling on the same rows, and ``vs_temperature_error`` is its standard error. The command writes every row to a CSV and
tables to a page beside it; ``--summary`` rewrites the page of the latest CSV.
"""

import argparse
import datetime
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import focalkern as fk
from benchmarks.harness import RESULTS, in_threads
from benchmarks.studies.calibrator_pages import read
from benchmarks.studies.networks import about_run, markdown, two_sets, write_rows
from benchmarks.studies.small_models import CALIBRATED, SAME, Model, models, other_priors

CALIBRATORS: dict[str, Callable[[], Any]] = {
    "temperature": lambda: fk.TemperatureScaling(input_kind="probs"),  # first: the others are compared with it
    "temperature, robust": lambda: fk.RobustTemperatureScaling(input_kind="probs"),
    "structured matrix, focal": lambda: fk.StructuredScaling(focal=True, solver="lbfgs", input_kind="probs"),
    "automatic": lambda: fk.AutoCalibrator(input_kind="probs"),
    "automatic, keep_predictions": lambda: fk.AutoCalibrator(input_kind="probs", keep_predictions=True),
    "spline": lambda: fk.SplineScaling(input_kind="probs"),
    "spline-vector": lambda: fk.SplineScaling(kind="vector", input_kind="probs"),
    "spline-matrix": lambda: fk.SplineScaling(kind="matrix", input_kind="probs"),
}
CLIPPED = ("none", "temperature", "structured matrix, focal")
"""Their NLL is infinite where the label has probability 0, so they get probabilities of at least 1e-7."""
SIZES = (100, 200, 500)
DRAWS = 2
FIGURES = ("nll", "brier", "ece", "error")
FIELDS = ("model", "source", "n_fit", "draw", "classes", "calibrator", "chosen", *FIGURES)
PAIRED = ("vs_temperature", "vs_temperature_error")


def published(folder: Path) -> Iterator[Model]:
    """The networks of a folder of logits, tested on rows of their source and with other class priors."""
    for path in sorted(folder.glob("*.npz")):
        sets = two_sets(path)
        if sets is None:
            continue
        validation, test = ((s.input if s.kind == "probs" else s.input.softmax(-1), s.labels) for s in sets)
        drawn = tuple(map(torch.from_numpy, other_priors((test[0].numpy(), test[1].numpy()))))
        yield Model(path.stem, validation, {SAME: test, "other priors": (drawn[0], drawn[1])})


def clipped(probs: Tensor) -> Tensor:
    at_least = probs.clip(1e-7)
    return at_least / at_least.sum(-1, keepdim=True)


def measure(model: Model) -> list[dict[str, Any]]:
    given, labels = model.validation
    about = {"model": model.name, "classes": given.shape[1]}
    rows = []
    for source, (new, target) in model.tests.items():
        found, _ = figures(clipped(new).log(), target)
        rows.append({**about, "source": source, "n_fit": len(labels), "calibrator": "none", **found})
    parts = [(len(labels), 0, torch.arange(len(labels)))]
    for n in SIZES:
        for draw in range(DRAWS if n < len(labels) else 0):
            order = np.random.default_rng([n, draw]).permutation(len(labels))
            parts.append((n, draw, torch.from_numpy(order[:n])))
    for n, draw, part in parts:
        of_temperature: dict[str, Tensor] = {}
        for name, make in CALIBRATORS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", fk.CalibrationWarning)
                chosen = clipped(given[part]) if name in CLIPPED else given[part]
                calibrator = make().fit_quietly(chosen, labels[part])
            for source, (probs, target) in model.tests.items():
                if n < len(labels) and source not in (SAME, CALIBRATED):
                    continue
                new = clipped(probs) if name in CLIPPED else probs
                found, losses = figures(torch.as_tensor(calibrator.predict_log_proba(new)), target)
                difference = losses - of_temperature.setdefault(source, losses)
                error = float(difference.std()) / len(losses) ** 0.5
                paired = dict(zip(PAIRED, (float(difference.mean()), error), strict=True))
                of_fit = {"source": source, "n_fit": n, "draw": draw, "calibrator": name}
                rows.append({**about, **of_fit, "chosen": getattr(calibrator, "chosen_", ""), **found, **paired})
    return rows


def figures(log_probs: Tensor, target: Tensor) -> tuple[dict[str, float], Tensor]:
    """The scores, and the NLL of every row."""
    probs = log_probs.exp()
    losses = -log_probs.gather(1, target.unsqueeze(1)).squeeze(1)
    found = {
        "nll": float(losses.mean()),
        "brier": float(fk.metrics.brier_score(probs, target)),
        "ece": float(fk.metrics.expected_calibration_error(probs, target)),
        "error": float((log_probs.argmax(-1) != target).double().mean()),
    }
    return found, losses


def by_size(rows: Sequence[dict[str, Any]], source: str) -> str:
    """Means over models and draws on one source of test rows, by the number of validation rows."""
    rows = [row for row in rows if row["source"] == source]
    parts = []
    for size in (*SIZES, None):
        lines = []
        for name in ("none", *CALIBRATORS):
            of = [row for row in rows if row["calibrator"] == name and (name == "none" or is_size(row, size))]
            lines.append(line_of(name, of))
        parts.append(markdown(lines, [f"{source}, {'all' if size is None else size} rows", *HEADS]))
    return "\n\n".join(parts)


def elsewhere(rows: Sequence[dict[str, Any]]) -> str:
    """Means over models of all validation rows, source by source."""
    parts = []
    for source in dict.fromkeys(row["source"] for row in rows if row["source"] not in (SAME, CALIBRATED)):
        lines, count = [], 0
        for name in ("none", *CALIBRATORS):
            of = [row for row in rows if row["source"] == source and row["calibrator"] == name and whole(row)]
            lines.append(line_of(name, of))
            count = len(of)
        parts.append(markdown(lines, [f"{source} ({count} models)", *HEADS]))
    return "\n\n".join(parts)


def line_of(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    counts = beyond_noise(rows) if name != "none" else ("", "", "")
    return [name, *(mean(rows, figure) for figure in FIGURES), *counts]


HEADS = ("NLL", "Brier", "ECE", "test error", "higher", "lower", "worst")


def whole(row: dict[str, Any]) -> bool:
    return row["n_fit"] not in SIZES


def is_size(row: dict[str, Any], size: int | None) -> bool:
    return whole(row) if size is None else row["n_fit"] == size


def mean(rows: Sequence[dict[str, Any]], figure: str) -> str:
    return f"{statistics.fmean(row[figure] for row in rows):.4f}"


def beyond_noise(rows: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    """Fits with a higher and a lower NLL than temperature scaling, beyond noise, and the largest rise."""
    signs = [math.copysign(1, row[PAIRED[0]]) if abs(row[PAIRED[0]]) > 1.96 * row[PAIRED[1]] else 0 for row in rows]
    return str(signs.count(1)), str(signs.count(-1)), f"{max(row[PAIRED[0]] for row in rows):+.4f}"


def page(path: Path) -> str:
    rows = read(path, {"model", "source", "calibrator", "chosen", "device", "torch", "commit"})
    about = rows[0]
    n_models = len({row["model"] for row in rows})
    about_page = (
        f"Calibrators on {n_models} models, {path.stem.rpartition('_')[2]}, {about['device']}, "
        f"{in_threads(about['threads'])}, commit {about['commit']}; "
        "means over models and draws of the validation rows. *Higher* and *lower* count the fits with an NLL higher or "
        "lower than that of temperature scaling by more than 1.96 standard errors of the paired difference. *Worst* is "
        "the largest rise."
    )
    return "\n\n".join([about_page, elsewhere(rows), by_size(rows, CALIBRATED), by_size(rows, SAME)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.shift",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder with fashion_mnist and trec")
    parser.add_argument("--logits", type=Path, metavar="DIR", help="a folder of .npz files of published networks")
    parser.add_argument("--summary", action="store_true", help="write the page of the latest CSV again")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    if arguments.summary:
        target = sorted(arguments.out.glob("shift_*.csv"))[-1]
    else:
        if arguments.data is None:
            parser.error("--data DIR is required")
        target = arguments.out / f"shift_{datetime.datetime.now(datetime.UTC):%Y-%m-%d}.csv"
        rows: list[dict[str, Any]] = []
        for source in (published(arguments.logits) if arguments.logits else (), models(arguments.data)):
            for model in source:
                print(model.name, flush=True)
                rows += measure(model)
        write_rows(target, (*FIELDS, *PAIRED), rows, about_run())
    text = page(target)
    target.with_suffix(".md").write_text(text)
    print(f"\n{text}\n{target}")


if __name__ == "__main__":
    main()
