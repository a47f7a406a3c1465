"""Coverage of the bootstrap intervals for a known truth, and their results on real logits.

``python -m benchmarks.speed.bootstrap`` draws data sets from models of known calibration error. For each kind of
interval it counts how often the interval contains the true error, and how often an interval of a difference excludes 0.
With ``--logits DIR`` it compares focal temperature scaling with temperature scaling for every network in a folder of
validation and test logits. Both minimise the ECE of the validation rows over the paper's grid. Nothing is timed here.
"""

import argparse
import csv
import dataclasses
import datetime
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

import focalkern as fk
from benchmarks.harness import RESULTS, commit
from focalkern import bootstrap
from focalkern.bootstrap import bias_floor, paired_bootstrap

# Rows have a logit s = |normal(2.5, 1.6)| and are correct with probability sigmoid(s); a model that divides s by T is
# calibrated for T = 1.
PAIRS = {
    "calibrated, and all but the same": (1.0, 1.0001),
    "calibrated, and 10 % too unsure": (1.0, 1.1),
    "both off, opposite signs": (0.85, 1.2),
    "both off, same sign": (0.9, 0.8),
    "calibrated, and far too sure": (1.0, 0.6),
}
FIGURE = "ece_equal_width"


def true_error(temperature: float, n_bins: int = 15) -> float:
    """ECE, equal width, of infinitely many rows: the midpoint rule over the density of s."""
    s = (torch.arange(2_000_000, dtype=torch.float64) + 0.5) * (12 / 2_000_000)
    density = torch.exp(-0.5 * ((s - 2.5) / 1.6) ** 2) + torch.exp(-0.5 * ((s + 2.5) / 1.6) ** 2)
    density /= density.sum()
    confidence = (s / temperature).sigmoid()
    index = (confidence * n_bins).ceil().long() - 1
    gap = torch.zeros(n_bins, dtype=torch.float64)
    gap.scatter_add_(0, index, density * (s.sigmoid() - confidence))
    return float(gap.abs().sum())


def coverage(n: int, temperatures: tuple[float, float], n_sets: int, level: float) -> list[dict[str, object]]:
    truth = [true_error(temperature) for temperature in temperatures]
    generator = torch.Generator().manual_seed(n)
    counts = {method: np.zeros(5, dtype=int) for method in bootstrap.METHODS}
    estimates = np.zeros(2)
    for trial in range(n_sets):
        s = (2.5 + 1.6 * torch.randn(n, generator=generator, dtype=torch.float64)).abs()
        correct = torch.rand(n, generator=generator, dtype=torch.float64) < s.sigmoid()
        found = paired_bootstrap(
            confidence={"a": (s / temperatures[0]).sigmoid(), "b": (s / temperatures[1]).sigmoid()},
            correct=correct,
            n_resamples=300,
            level=level,
            seed=trial,
            figures=FIGURE,
        )
        estimates += found.estimates[:, 0].numpy()
        for method, count in counts.items():
            by_method = dataclasses.replace(found, method=method)
            a, b = (by_method.interval(name, FIGURE) for name in "ab")
            difference = by_method.difference("a", "b", FIGURE)
            count += (
                a.low <= truth[0] <= a.high,
                b.low <= truth[1] <= b.high,
                difference.low <= truth[0] - truth[1] <= difference.high,
                by_method.wins("a", "b", FIGURE),
                by_method.wins("b", "a", FIGURE),
            )
    return [
        {
            "method": method,
            "true_a": truth[0],
            "true_b": truth[1],
            "mean_a": estimates[0] / n_sets,
            "mean_b": estimates[1] / n_sets,
            "contains_a": count[0] / n_sets,
            "contains_b": count[1] / n_sets,
            "contains_difference": count[2] / n_sets,
            "a_wins": count[3] / n_sets,
            "b_wins": count[4] / n_sets,
        }
        for method, count in counts.items()
    ]


def real(path: Path, n_resamples: int) -> list[dict[str, object]]:
    """Focal temperature scaling against temperature scaling on one network's test rows."""
    with np.load(path, allow_pickle=False) as arrays:
        if "val_logits" not in arrays:
            return []
        read = {key: torch.from_numpy(arrays[key]) for key in arrays}
    val, test = read["val_logits"].double(), read["test_logits"].double()
    val_labels, labels = read["val_labels"], read["test_labels"]
    grid = fk.calibration_grid(val, val_labels, (0.0, *fk.PAPER_GAMMAS), fk.PAPER_TEMPERATURES, criteria=("ece",))
    plain = fk.CalibrationGrid(
        grid.gammas[:1], grid.temperatures, {"ece": grid.tables["ece"][:1]}, grid.n_bins, grid.estimator
    ).best("ece")
    chosen = {"uncalibrated": (0.0, 1.0), "temperature": plain[:2], "focal temperature": grid.best("ece")[:2]}
    log_probs: dict[str, Tensor] = {
        name: fk.focal_calibration_map(test, gamma, temperature, log=True)
        for name, (gamma, temperature) in chosen.items()
    }
    found = paired_bootstrap(log_probs, labels, log=True, correct=test.argmax(-1) == labels, n_resamples=n_resamples)
    floors = {name: bias_floor(values.exp(), n_resamples=n_resamples) for name, values in log_probs.items()}
    rows = []
    for figure in found.figures:
        difference = found.difference("focal temperature", "temperature", figure)
        row: dict[str, object] = {"set": path.stem, "n": len(labels), "figure": figure}
        for name, (gamma, temperature) in chosen.items():
            interval = found.interval(name, figure)
            key = name.replace(" ", "_")
            row |= {f"{key}_gamma": gamma, f"{key}_T": temperature}
            row |= {key: interval.estimate, f"{key}_low": interval.low, f"{key}_high": interval.high}
            floor = floors[name].get(figure)
            row |= {
                f"{key}_floor": floor.mean if floor else "",
                f"{key}_p": floor.p_value(interval.estimate) if floor else "",
            }
        row |= {"difference": difference.estimate, "low": difference.low, "high": difference.high}
        for winner, loser in (("focal temperature", "temperature"), ("temperature", "focal temperature")):
            row[f"{winner.replace(' ', '_')}_wins"] = found.wins(winner, loser, figure)
        rows.append(row)
    return rows


def write(rows: list[dict[str, object]], path: Path) -> None:
    more = {"focalkern": fk.__version__, "commit": commit(), "date": datetime.date.today().isoformat()}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *more], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in {**row, **more}.items()})
    print(f"written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.bootstrap", description=__doc__)
    parser.add_argument("--logits", type=Path, help="folder of .npz files with validation and test logits")
    parser.add_argument("--sets", type=int, default=300, help="data sets per case (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    arguments = parser.parse_args()
    today = datetime.date.today().isoformat()
    if arguments.logits is None:
        rows: list[dict[str, object]] = []
        for n in (1000, 5000):
            for name, temperatures in PAIRS.items():
                shared = {"n": n, "a_and_b": name, "T_a": temperatures[0], "T_b": temperatures[1], "level": 0.95}
                rows += [
                    {**shared, "sets": arguments.sets, **row} for row in coverage(n, temperatures, arguments.sets, 0.95)
                ]
                print(tabulate(rows[-len(bootstrap.METHODS) :], headers="keys", floatfmt=".4f"), flush=True)
        write(rows, arguments.out / f"bootstrap_coverage_{today}.csv")
    else:
        rows = []
        for path in sorted(arguments.logits.glob("*.npz")):
            found = real(path, 2000)
            rows += found
            shown = [
                [
                    row["figure"],
                    *(row[key] for key in ("uncalibrated", "temperature", "focal_temperature", "temperature_floor")),
                    *(row[key] for key in ("difference", "low", "high", "focal_temperature_wins", "temperature_wins")),
                ]
                for row in found
            ]
            if shown:
                header = [
                    "",
                    "uncalibrated",
                    "T",
                    "(gamma, T)",
                    "floor of T",
                    "difference",
                    "from",
                    "to",
                    "wins",
                    "loses",
                ]
                print(f"\n{path.stem}\n{tabulate(shown, header, floatfmt='.5f')}", flush=True)
        write(rows, arguments.out / f"bootstrap_real_{today}.csv")


if __name__ == "__main__":
    main()
