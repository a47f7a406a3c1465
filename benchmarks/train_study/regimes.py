"""python -m benchmarks.train_study.regimes DIR --out DIR: one study at several numbers of epochs, and its tables.

DIR holds a folder per number of epochs, each the --out of a study with that --epochs. Each complete run is calibrated
on its validation samples in four ways: no calibration, temperature, and the scalar and the vector spline. The scores
are those of the test samples, with 95 % bootstrap intervals of the paired difference to cross-entropy of the same seed.
Means and sample standard deviations are over seeds; everything is a fraction.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import focalkern as fk
from benchmarks.train_study import objectives, records
from benchmarks.train_study.records import Run
from benchmarks.train_study.run_rows import ABOUT, Row
from focalkern import bootstrap
from focalkern._atomic import write_atomically

METHODS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "temperature": fk.TemperatureScaling,
    "spline": fk.SplineScaling,
    "spline vector": lambda: fk.SplineScaling(kind="vector"),
}
SCORES = ("accuracy", "nll", "brier", "ece_equal_width", "ece_equal_mass")
FLOOR = ("ece_equal_width",)
SHOWN = {"nll": "NLL", "brier": "Brier score", "ece_equal_width": "ECE", "ece_floor": "bias floor"}
EPOCH_COLUMNS = ("train_nll", "train_error", "test_nll", "test_error", "test_confidence", "test_ece_equal_width")
BASE = "cross-entropy"
N_RESAMPLES = 500


def studies(folder: Path) -> Iterator[tuple[int, list[Run]]]:
    """(number of epochs, complete runs), ascending."""
    for path in sorted((one for one in folder.iterdir() if one.name.isdigit()), key=lambda one: int(one.name)):
        yield int(path.name), records.read_runs(path, objectives.rank)


def complete_seeds(runs: Sequence[Run]) -> list[int]:
    """The seeds that all losses have finished: means over other seeds would compare different splits."""
    losses = {run.loss for run in runs}
    return [seed for seed in sorted({run.seed for run in runs}) if {r.loss for r in runs if r.seed == seed} == losses]


def calibrated(run: Run) -> dict[str, tuple[Tensor, dict[str, Tensor], float]]:
    """Method -> test probabilities, probabilities of the out-of-distribution sets, and the temperature (NaN: none)."""
    logits, found = run.logits, {}
    outside = run.out_of_distribution
    for name, make in METHODS.items():
        calibrator = make()
        if calibrator is None:
            found[name] = (softmax(logits["test_logits"]), {key: softmax(z) for key, z in outside.items()}, 1.0)
            continue
        calibrator.fit_quietly(logits["val_logits"].double(), logits["val_labels"])
        probs = calibrator.predict_proba(logits["test_logits"].double())
        others = {key: calibrator.predict_proba(z.double()) for key, z in outside.items()}
        found[name] = (probs, others, getattr(calibrator, "temperature_", math.nan))
    return found


def softmax(logits: Tensor) -> Tensor:
    return logits.double().softmax(-1)


def rows_of(epochs: int, runs: Sequence[Run]) -> tuple[list[Row], list[Row]]:
    """A row of scores per run and method, and a row of paired differences to cross-entropy of the same seed."""
    scores, differences = [], []
    for seed in complete_seeds(runs):
        of_seed = [run for run in runs if run.seed == seed]
        every = {run.loss: calibrated(run) for run in of_seed}
        labels = of_seed[0].logits["test_labels"]
        for method in METHODS:
            probs = {loss: found[method][0] for loss, found in every.items()}
            compared = bootstrap.paired_bootstrap(
                probs, labels, figures=SCORES, n_resamples=N_RESAMPLES, progress=False
            )
            for run in of_seed:
                test, outside, temperature = every[run.loss][method]
                confidence = test.amax(-1)
                row: Row = {"epochs": epochs, "loss": run.loss, "seed": seed, "method": method}
                row |= {"temperature": temperature, "confidence": float(confidence.mean())}
                row |= {name: compared.interval(run.loss, name).estimate for name in SCORES}
                floors = bootstrap.bias_floor(test, figures=FLOOR, n_resamples=200, progress=False)
                row["ece_floor"] = floors[FLOOR[0]].mean
                for name, other in sorted(outside.items()):
                    row[f"auroc_{name}"] = float(fk.metrics.auroc(confidence, other.amax(-1)))
                scores.append({**row, **{key: run.about[key] for key in ABOUT}})
                if run.loss == BASE or BASE not in every:
                    continue
                pair: Row = {"epochs": epochs, "loss": run.loss, "seed": seed, "method": method}
                for name in SCORES:
                    found = compared.difference(run.loss, BASE, name)
                    pair |= {name: found.estimate, f"{name}_low": found.low, f"{name}_high": found.high}
                differences.append(pair)
    return scores, differences


def mean_std(rows: Sequence[Row], name: str) -> tuple[float, float]:
    values = torch.tensor([row[name] for row in rows], dtype=torch.float64)
    return float(values.mean()), float(values.std()) if len(values) > 1 else math.nan


def select(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def with_gap(scores: Sequence[Row]) -> list[Row]:
    return [{**row, "confidence - accuracy": row["confidence"] - row["accuracy"]} for row in scores]


def losses_of(rows: Sequence[Row]) -> list[str]:
    return sorted({row["loss"] for row in rows}, key=objectives.rank)


def number(value: float) -> str:
    return f"{value:.4f}"


def by_epochs(scores: Sequence[Row], score: str, method: str = "none") -> str:
    """A line per loss, a column per number of epochs: mean and standard deviation over seeds."""
    lengths = sorted({int(row["epochs"]) for row in scores})
    lines = []
    for loss in losses_of(scores):
        cells = []
        for epochs in lengths:
            found = select(scores, loss=loss, epochs=epochs, method=method)
            mean, std = mean_std(found, score) if found else (math.nan, math.nan)
            cells.append("" if math.isnan(mean) else number(mean) + ("" if math.isnan(std) else f" ± {std:.4f}"))
        lines.append([loss, *cells])
    return _table(lines, [SHOWN.get(score, score), *(f"{epochs} epochs" for epochs in lengths)])


def by_method(scores: Sequence[Row], differences: Sequence[Row], epochs: int, score: str) -> str:
    """A line per loss, a column per method, with the signs of the differences to cross-entropy (_signs)."""
    lines = []
    for loss in losses_of(scores):
        cells = []
        for method in METHODS:
            found = select(scores, loss=loss, epochs=epochs, method=method)
            pairs = select(differences, loss=loss, epochs=epochs, method=method)
            cell = number(mean_std(found, score)[0]) if found else ""
            cells.append(f"{cell} {_signs(pairs, score)}".strip())
        lines.append([loss, *cells])
    return _table(lines, [f"{SHOWN.get(score, score)}, {epochs} epochs", "uncalibrated", *list(METHODS)[1:]])


def outside_table(scores: Sequence[Row], epochs: int) -> str:
    """AUROC of the confidence, test samples against each out-of-distribution set."""
    sets = sorted(key for key in scores[0] if key.startswith("auroc_"))
    lines = []
    for loss in losses_of(scores):
        cells = []
        for name in sets:
            for method in ("none", "temperature"):
                found = select(scores, loss=loss, epochs=epochs, method=method)
                cells.append(number(mean_std(found, name)[0]) if found else "")
        lines.append([loss, *cells])
    names = [name.removeprefix("auroc_") for name in sets]
    header = [f"AUROC, {epochs} epochs", *(f"{name}{how}" for name in names for how in ("", ", temperature"))]
    return _table(lines, header)


def _signs(pairs: Sequence[Row], score: str) -> str:
    """A - for each seed whose interval of the difference to cross-entropy is below 0, a + for each above 0."""
    below = sum(pair[f"{score}_high"] < 0 for pair in pairs)
    above = sum(pair[f"{score}_low"] > 0 for pair in pairs)
    return "−" * below + "+" * above


def _table(lines: list[list[str]], header: list[str]) -> str:
    columns = ("left", *["right"] * (len(header) - 1))
    return tabulate(lines, header, tablefmt="github", colalign=columns, disable_numparse=True)


def tables(scores: Sequence[Row], differences: Sequence[Row]) -> dict[str, str]:
    """Name -> table in Markdown."""
    longest = int(max(row["epochs"] for row in scores))
    made = {
        "ece": by_epochs(scores, "ece_equal_width"),
        "nll": by_epochs(scores, "nll"),
        "accuracy": by_epochs(scores, "accuracy"),
        "floor": by_epochs(scores, "ece_floor", "spline"),
        "gap": by_epochs(with_gap(scores), "confidence - accuracy"),
        "temperatures": by_epochs(scores, "temperature", "temperature"),
    }
    for epochs in sorted({int(row["epochs"]) for row in scores}):
        for score in ("nll", "brier", "ece_equal_width"):
            made[f"{score}_{epochs}"] = by_method(scores, differences, epochs, score)
    made["outside"] = outside_table(scores, longest)
    return made


def tables_of(folder: Path) -> str:
    """Writes all tables of the recorded rows in ``folder``, between marks with their names."""
    rows = (records.read_csv(folder / name) for name in ("scores.csv", "differences.csv"))
    return "\n".join(f"<!-- table: {name} -->\n\n{table}\n\n<!-- end -->\n" for name, table in tables(*rows).items())


def picture(epochs: Sequence[Row], path: Path) -> None:
    """Confidence minus accuracy, and NLL, of the test samples by epoch, for the longest study."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from benchmarks.train_study.figure_parts import STYLES

    styles = {**STYLES, "focal-1": ("#CC79A7", (0, (3, 1, 1, 1)))}
    figure = Figure(figsize=(9, 4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    longest = max(row["epochs"] for row in epochs)
    for axis, name in zip(panels, ("gap", "test_nll"), strict=True):
        for loss in losses_of(epochs):
            chosen = select(epochs, loss=loss, epochs=longest)
            steps = sorted({row["epoch"] for row in chosen})
            lines = [[row[name] for row in chosen if row["epoch"] == step] for step in steps]
            colour, dashes = styles.get(loss, ("#8C8C8C", "-"))
            axis.plot(steps, [sum(one) / len(one) for one in lines], color=colour, linestyle=dashes, label=loss)
            axis.fill_between(steps, [min(v) for v in lines], [max(v) for v in lines], color=colour, alpha=0.15, lw=0)
        axis.set_xscale("log")
        axis.set_xticks([1, 2, 5, 10, 20, 60], ["1", "2", "5", "10", "20", "60"])
        axis.minorticks_off()
        axis.grid(color="#E8E8E8", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("epoch")
    panels[0].axhline(0, color="#1f2328", linewidth=1)
    panels[0].set_title("test: mean confidence minus accuracy")
    panels[1].set_title("test: NLL")
    panels[1].set_yscale("log")
    panels[1].set_yticks([0.4, 0.5, 0.6, 0.8, 1.0], ["0.4", "0.5", "0.6", "0.8", "1.0"])
    panels[1].minorticks_off()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def epoch_rows(epochs: int, runs: Sequence[Run]) -> list[Row]:
    seeds = complete_seeds(runs)
    return [
        {
            "epochs": epochs,
            "loss": run.loss,
            "seed": run.seed,
            "epoch": int(row["epoch"]),
            **{name: row[name] for name in EPOCH_COLUMNS},
            "gap": row["test_confidence"] - (1 - row["test_error"]),
        }
        for run in runs
        if run.seed in seeds
        for row in run.epochs
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_study.regimes", description=__doc__)
    parser.add_argument("runs", type=Path, metavar="DIR", help="a folder per number of epochs")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the tables and the picture")
    arguments = parser.parse_args(argv)
    scores: list[Row] = []
    differences: list[Row] = []
    epochs: list[Row] = []
    for length, runs in tqdm(list(studies(arguments.runs)), unit="study", disable=None):
        if runs:
            found, pairs = rows_of(length, runs)
            scores, differences, epochs = scores + found, differences + pairs, epochs + epoch_rows(length, runs)
    if not scores:
        print(f"regimes: {arguments.runs} holds no complete run", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    records.write_csv(arguments.out / "scores.csv", scores)
    records.write_csv(arguments.out / "differences.csv", differences, digits=4)
    records.write_csv(arguments.out / "epochs.csv", epochs, digits=4)
    picture(epochs, arguments.out / "over_the_epochs.png")
    text = tables_of(arguments.out)
    write_atomically(arguments.out / "tables.md", text.encode())
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
