"""Rows of one run of the training study: calibration, temperatures, set sizes, learned gammas, other data, epochs."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import focalkern as fk
from benchmarks.train_study.records import Run
from focalkern.bootstrap import bias_floor
from focalkern.calibrators import DEFAULT_GAMMAS

Row = dict[str, Any]

# Columns of every CSV that identify the run and the machine.
ABOUT = ("device", "threads", "torch", "focalkern", "commit", "date")

FIGURES = ("accuracy", "nll", "brier", "ece_equal_width", "ece_equal_mass", "ece_equal_mass_interp", "classwise_ece")

FLOORS = ("ece_equal_width", "ece_equal_mass")


def calibration_rows(run: Run) -> list[Row]:
    """A row per calibrator of the run: the parameters chosen on validation samples, and the scores on test samples."""
    logits = run.logits
    val, val_labels = logits["val_logits"], logits["val_labels"]
    by_mass = fk.calibration_grid(val, val_labels, DEFAULT_GAMMAS, fk.PAPER_TEMPERATURES, estimator="equal_mass")
    by_width = fk.calibration_grid(val, val_labels, [0.0], fk.PAPER_TEMPERATURES, estimator="equal_width")
    choices = [("none", "", 0.0, 1.0)]
    for criterion in ("ece", "nll"):
        name = "ece equal_mass" if criterion == "ece" else "nll"
        choices.append(("temperature", name, 0.0, best_temperature(by_mass, 0.0, criterion)))
        choices.append(("focal temperature", name, *by_mass.best(criterion)[:2]))
    choices.append(("temperature", "ece equal_width", 0.0, by_width.best("ece")[1]))
    rows = []
    for method, criterion, gamma, temperature in choices:
        log_probs = fk.focal_calibration_map(logits["test_logits"].double(), gamma, temperature, log=True)
        chosen = {"gamma": gamma, "temperature": temperature}
        rows.append({"method": method, "criterion": criterion, **chosen, **_figures(log_probs, logits)})
    binning = fk.HistogramBinning().fit_quietly(val.double(), val_labels)
    probs = binning.predict_proba(logits["test_logits"].double())
    chosen = {"gamma": math.nan, "temperature": math.nan}
    rows.append({"method": "histogram binning", "criterion": "", **chosen, **_figures(probs.log(), logits)})
    return [{"loss": run.loss, "seed": run.seed, **row, **_about(run)} for row in rows]


def best_temperature(grid: fk.CalibrationGrid, gamma: float, criterion: str) -> float:
    """The first best temperature in the row of one gamma."""
    row = grid.tables[criterion][int((grid.gammas == gamma).nonzero()[0])]
    return float(grid.temperatures[torch.where(row.isfinite(), row, math.inf).argmin()])


def _figures(log_probs: Tensor, logits: Mapping[str, Tensor]) -> Row:
    labels = logits["test_labels"]
    predicted = logits["test_logits"].argmax(-1)
    probs = log_probs.exp()
    # The probability of the class that the network predicts; after histogram binning another class may have a larger
    # one.
    confidence = probs.gather(-1, predicted[:, None]).squeeze(-1)
    figures: Row = {
        "accuracy": float((predicted == labels).double().mean()),
        "nll": float(fk.metrics.nll(log_probs, labels, log=True)),
        "brier": float(fk.metrics.brier_score(probs, labels)),
    }
    for estimator in fk.metrics.ESTIMATORS:
        figures[f"ece_{estimator}"] = float(
            fk.metrics.expected_calibration_error(
                confidence=confidence, correct=predicted == labels, estimator=estimator
            )
        )
    # The expected ECE of a perfectly calibrated classifier with these confidences and this number of rows.
    floors = bias_floor(confidence=confidence, figures=FLOORS, n_resamples=500, progress=False)
    figures.update({f"{name}_floor": floors[name].mean for name in FLOORS})
    figures["classwise_ece"] = float(fk.metrics.classwise_calibration_error(probs, labels))
    return figures


def temperature_rows(run: Run) -> list[Row]:
    """[1] Figure 8: the best temperature for every gamma of the calibration map."""
    logits = run.logits
    gammas = tuple(sorted(DEFAULT_GAMMAS))
    arguments = (logits["val_logits"], logits["val_labels"], gammas, fk.PAPER_TEMPERATURES)
    grid = fk.calibration_grid(*arguments, estimator="equal_mass")
    return [
        {
            "loss": run.loss,
            "seed": run.seed,
            "gamma_evaluated": gamma,
            "temperature_ece": best_temperature(grid, gamma, "ece"),
            "temperature_nll": best_temperature(grid, gamma, "nll"),
            **_about(run),
        }
        for gamma in gammas
    ]


def validation_size_rows(run: Run, repeats: int = 5) -> list[Row]:
    """[4] Figure 3: test ECE after calibration on a part of the validation rows, a mean over random parts."""
    logits = run.logits
    n = len(logits["val_labels"])
    sizes = sorted({size for size in (100, 200, 500, 1000, 2000, 5000, 10000) if size < n} | {n})
    predicted = logits["test_logits"].argmax(-1)
    correct = predicted == logits["test_labels"]
    rows = []
    for size in sizes:
        found: dict[str, list[float]] = {"temperature": [], "histogram binning": []}
        for repeat in range(repeats if size < n else 1):
            order = torch.randperm(n, generator=torch.Generator().manual_seed(repeat))[:size]
            val, labels = logits["val_logits"][order], logits["val_labels"][order]
            grid = fk.calibration_grid(val, labels, [0.0], fk.PAPER_TEMPERATURES, estimator="equal_width")
            temperature = grid.best("ece")[1]
            binning = fk.HistogramBinning().fit_quietly(val.double(), labels)
            for method, probs in (
                ("temperature", (logits["test_logits"].double() / temperature).softmax(-1)),
                ("histogram binning", binning.predict_proba(logits["test_logits"].double())),
            ):
                confidence = probs.gather(-1, predicted[:, None]).squeeze(-1)
                ece = fk.metrics.expected_calibration_error(confidence=confidence, correct=correct)
                found[method].append(float(ece))
        for method, values in found.items():
            mean = float(np.mean(values))
            rows.append(
                {
                    "loss": run.loss,
                    "seed": run.seed,
                    "validation_samples": size,
                    "method": method,
                    "repeats": len(values),
                    "ece_equal_width": mean,
                    **_about(run),
                }
            )
    return rows


def learning_rows(run: Run) -> list[Row]:
    """[4] Figure 5: the largest logit after training, by the epoch in which a training sample was first right."""
    samples = run.training_samples
    learned = samples["learned_epoch"]
    rows = []
    for epoch in range(len(run.epochs) + 1):
        chosen = learned == epoch
        if not bool(chosen.any()):
            continue
        top = samples["top_logit"][chosen].double()
        rows.append(
            {
                "loss": run.loss,
                "seed": run.seed,
                "learned_epoch": epoch,  # 0: never
                "samples": int(chosen.sum()),
                "top_logit": float(top.mean()),
                "label_logit": float(samples["label_logit"][chosen].double().mean()),
                **_about(run),
            }
        )
    return rows


def ood_rows(run: Run) -> list[Row]:
    """AUROC of confidence, in-distribution test rows against each other set, at T = 1 and at the best temperature."""
    logits = run.logits
    arguments = (logits["val_logits"], logits["val_labels"], [0.0], fk.PAPER_TEMPERATURES)
    best = fk.calibration_grid(*arguments, estimator="equal_width").best("ece")[1]
    rows = []
    for name, outside in sorted(run.out_of_distribution.items()):
        for scaled, temperature in (("no", 1.0), ("yes", best)):
            confidence_in, confidence_out = (
                (z.double() / temperature).softmax(-1).amax(-1) for z in (logits["test_logits"], outside)
            )
            rows.append(
                {
                    "loss": run.loss,
                    "seed": run.seed,
                    "set": name,
                    "scaled": scaled,
                    "temperature": temperature,
                    "auroc": float(fk.metrics.auroc(confidence_in, confidence_out)),
                    "mean_confidence_in": float(confidence_in.mean()),
                    "mean_confidence_out": float(confidence_out.mean()),
                    **_about(run),
                }
            )
    return rows


def epoch_rows(run: Run) -> list[Row]:
    return [{"loss": run.loss, "seed": run.seed, **row, **_about(run)} for row in run.epochs]


def bin_rows(run: Run) -> list[Row]:
    return [{"loss": run.loss, "seed": run.seed, **row} for row in run.bins]


PER_RUN: dict[str, Callable[[Run], list[Row]]] = {
    "calibration": calibration_rows,
    "temperatures": temperature_rows,
    "validation_size": validation_size_rows,
    "learned": learning_rows,
    "out_of_distribution": ood_rows,
    "epochs": epoch_rows,
    "bins": bin_rows,
}
"""CSV files by their stem: the rows of a run for each."""


def _about(run: Run) -> Row:
    return {key: run.about[key] for key in ABOUT}
