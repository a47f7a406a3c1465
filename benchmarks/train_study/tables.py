"""Scores per run from its logits, and the tables of the papers from the scores.

[1] Komisarenko & Kull 2024, [2] Mukhoti et al. 2020, [3] Ghosh et al. 2022, [4] Wang et al. 2021. Calibrators are
fitted on validation rows and evaluated on test rows. Everything is a fraction; means and sample standard deviations are
over seeds."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from benchmarks.train_study import objectives, records
from benchmarks.train_study.records import Run
from benchmarks.train_study.run_rows import PER_RUN, Row

_SIGNIFICANT = 0.05


# ---------------------------------------------------------------------------------------------------------------------
# Over seeds
# ---------------------------------------------------------------------------------------------------------------------
def focal_temperature_table(rows: Sequence[Row]) -> list[Row]:
    """[1]: a loss, with temperature scaling and with focal temperature scaling, chosen by ECE (equal_mass)."""
    table = []
    for loss in _losses(rows):
        for method, criterion in (
            ("none", ""),
            ("temperature", "ece equal_mass"),
            ("focal temperature", "ece equal_mass"),
        ):
            chosen = _select(rows, loss, method, criterion)
            table.append(
                {
                    "loss": loss,
                    "method": method,
                    "seeds": len(chosen),
                    **_mean_std(chosen, "accuracy", "nll", "ece_equal_mass", "temperature"),
                    "gammas": " ".join(f"{row['gamma']:g}" for row in chosen),
                }
            )
    return table


def temperature_table(rows: Sequence[Row]) -> list[Row]:
    """[2]: before and after temperature scaling, the temperature chosen by ECE (equal_width)."""
    table = []
    for loss in _losses(rows):
        before, after = _select(rows, loss, "none", ""), _select(rows, loss, "temperature", "ece equal_width")
        row: Row = {"loss": loss, "seeds": len(before)}
        error = [{"error": 1 - one["accuracy"]} for one in before]
        row.update(_mean_std(error, "error"), **_mean_std(after, "temperature"))
        for name in ("ece_equal_width", "ece_equal_mass_interp", "classwise_ece"):
            for when, chosen in (("before", before), ("after", after)):
                row.update({f"{key}_{when}": value for key, value in _mean_std(chosen, name).items()})
        table.append(row)
    return table


def post_hoc_table(rows: Sequence[Row]) -> list[Row]:
    """[4]: after temperature scaling and after histogram binning, from the strongest focal to inverse focal loss.

    p is that of a paired two-sided t-test over seeds against cross-entropy; no multiple-test correction.
    """
    from scipy.stats import ttest_rel

    losses = sorted(_losses(rows), key=_by_gamma)
    table = []
    for loss in losses:
        row: Row = {"loss": loss, "gamma": objectives.gamma(loss)}
        uncalibrated = _select(rows, loss, "none", "")
        row |= {"seeds": len(uncalibrated), **_mean_std(uncalibrated, "accuracy")}
        row.update({f"{key}_uncalibrated": value for key, value in _mean_std(uncalibrated, "ece_equal_width").items()})
        scaled = _select(rows, loss, "temperature", "ece equal_width")
        row.update(_mean_std(scaled, "temperature"))
        for short, method, criterion in (
            ("temperature", "temperature", "ece equal_width"),
            ("histogram", "histogram binning", ""),
        ):
            calibrated = _select(rows, loss, method, criterion)
            chosen = {one["seed"]: one["ece_equal_width"] for one in calibrated}
            baseline = {
                one["seed"]: one["ece_equal_width"] for one in _select(rows, "cross-entropy", method, criterion)
            }
            values = _mean_std([{"ece": value} for value in chosen.values()], "ece")
            row.update({f"{key}_{short}": value for key, value in values.items()})
            row[f"ece_floor_{short}"] = _mean_std(calibrated, "ece_equal_width_floor")["ece_equal_width_floor_mean"]
            common = sorted(chosen.keys() & baseline.keys())
            row[f"p_{short}"] = math.nan
            if loss != "cross-entropy" and len(common) > 1:
                pair = [[found[seed] for seed in common] for found in (chosen, baseline)]
                row[f"p_{short}"] = float(ttest_rel(*pair).pvalue)
        table.append(row)
    return table


def selection_table(rows: Sequence[Row]) -> list[Row]:
    """[1]: test ECE (equal_mass) of the parameters chosen by validation ECE, compared with those chosen by NLL.

    p is that of a paired two-sided t-test over runs.
    """
    from scipy.stats import ttest_rel

    table = []
    for loss in ("all losses", *_losses(rows)):
        for method in ("temperature", "focal temperature"):
            by_ece, by_nll = (
                {
                    (row["loss"], row["seed"]): row["ece_equal_mass"]
                    for row in rows
                    if (row["method"], row["criterion"]) == (method, criterion) and loss in ("all losses", row["loss"])
                }
                for criterion in ("ece equal_mass", "nll")
            )
            pairs = np.array([[by_ece[run], by_nll[run]] for run in by_ece])
            ece, nll = pairs.mean(0).tolist()
            row = {"loss": loss, "method": method, "ece_chosen_by_ece": ece, "ece_chosen_by_nll": nll}
            row |= {"gain": 1 - ece / nll, "runs": len(pairs), "runs_better": int((pairs[:, 0] < pairs[:, 1]).sum())}
            differ = len(pairs) > 1 and bool(np.ptp(pairs[:, 0] - pairs[:, 1]) > 0)
            table.append({**row, "p": float(ttest_rel(*pairs.T).pvalue) if differ else math.nan})
    return table


def ood_table(rows: Sequence[Row]) -> list[Row]:
    """AUROC per set, with and without temperature scaling."""
    table = []
    for loss in _losses(rows):
        row: Row = {"loss": loss}
        for name in sorted({one["set"] for one in rows}):
            for scaled, suffix in (("no", "before"), ("yes", "after")):
                chosen = [one for one in rows if one["loss"] == loss and one["set"] == name and one["scaled"] == scaled]
                row["seeds"] = len(chosen)
                row.update({f"{key}_{name}_{suffix}": value for key, value in _mean_std(chosen, "auroc").items()})
        table.append(row)
    return table


TABLES: dict[str, tuple[str, str, Callable[[Sequence[Row]], list[Row]]]] = {
    "table_focal_temperature": (
        "Each loss, with temperature and with focal temperature scaling, both chosen by validation ECE (equal_mass)",
        "calibration",
        focal_temperature_table,
    ),
    "table_temperature": (
        "Before -> after temperature scaling, T chosen by validation ECE (equal_width)",
        "calibration",
        temperature_table,
    ),
    "table_post_hoc": (
        "ECE (equal_width) after temperature scaling and after histogram binning; + worse, - better than "
        "cross-entropy with p < 0.05 (paired t-test over seeds); floor: what perfect calibration would score with the "
        "confidences of either",
        "calibration",
        post_hoc_table,
    ),
    "table_selection": (
        "Test ECE (equal_mass) of parameters chosen by validation ECE and by validation NLL; in how many runs the "
        "former is lower, and p of a paired t-test over them",
        "calibration",
        selection_table,
    ),
    "table_out_of_distribution": (
        "AUROC of confidence against out-of-distribution inputs, before -> after temperature scaling",
        "out_of_distribution",
        ood_table,
    ),
}
"""Printed tables by their stem: heading, the CSV it is made of, and the function that formats it."""


def format_table(name: str, rows: Sequence[Row], tablefmt: str = "simple") -> str:
    """A table as it is printed: mean ± standard deviation."""
    shown = []
    for row in rows:
        cells: dict[str, Any]
        if name == "table_focal_temperature":
            label = {"none": "", "temperature": " + TS", "focal temperature": " + FTS"}[row["method"]]
            chosen = ""
            if row["method"] != "none":
                chosen = f" ({row['temperature_mean']:.2f})"
            gammas = row["gammas"] if row["method"] == "focal temperature" else ""
            cells = {
                "loss": row["loss"] + label,
                "seeds": row["seeds"],
                "accuracy": _cell(row, "accuracy"),
                "NLL": _cell(row, "nll"),
                "ECE equal_mass (T)": _cell(row, "ece_equal_mass") + chosen,
                "gamma of each seed": gammas,
            }
        elif name == "table_temperature":
            cells = {"loss": row["loss"], "seeds": row["seeds"], "error": _cell(row, "error")}
            for key, heading in (
                ("ece_equal_width", "ECE equal_width"),
                ("ece_equal_mass_interp", "adaptive ECE"),
                ("classwise_ece", "classwise ECE"),
            ):
                cells[heading] = " -> ".join(_cell(row, key, f"_{when}") for when in ("before", "after"))
            cells["T"] = f"{row['temperature_mean']:.2f}"
        elif name == "table_post_hoc":
            cells = {
                "loss": row["loss"],
                "seeds": row["seeds"],
                "accuracy": _cell(row, "accuracy"),
                "T": f"{row['temperature_mean']:.2f}",
                "ECE": _cell(row, "ece_equal_width", "_uncalibrated"),
            }
            reference = next((one for one in rows if one["loss"] == "cross-entropy"), None)
            for short, heading in (("temperature", "with temperature"), ("histogram", "with histogram binning")):
                mark = ""
                if reference is not None and row[f"p_{short}"] < _SIGNIFICANT:
                    mark = " +" if row[f"ece_mean_{short}"] > reference[f"ece_mean_{short}"] else " -"
                cells[heading] = _cell(row, "ece", f"_{short}") + mark
            cells["floor"] = " / ".join(f"{row[f'ece_floor_{short}']:.4f}" for short in ("temperature", "histogram"))
        elif name == "table_selection":
            cells = {
                "loss": row["loss"],
                "method": row["method"],
                "chosen by ECE": f"{row['ece_chosen_by_ece']:.4f}",
                "chosen by NLL": f"{row['ece_chosen_by_nll']:.4f}",
                "gain": f"{row['gain']:+.1%}",
                "runs": f"{row['runs_better']:g} of {row['runs']:g}",
                "p": "" if math.isnan(row["p"]) else f"{row['p']:.2g}",
            }
        else:
            sets = sorted({key.split("_")[2] for key in row if key.startswith("auroc_mean")})
            cells = {"loss": row["loss"], "seeds": row["seeds"]}
            for one in sets:
                cells[one] = " -> ".join(_cell(row, "auroc", f"_{one}_{when}") for when in ("before", "after"))
        shown.append(cells)
    return tabulate(shown, headers="keys", tablefmt=tablefmt, disable_numparse=True)


def format_summary(rows: Sequence[Row], tablefmt: str = "simple") -> str:
    """``table_focal_temperature`` with a line per loss: means only, except accuracy and ECE before calibration."""
    shown = []
    for loss in _losses(rows):
        none, scaled, focal = (
            next(row for row in rows if (row["loss"], row["method"]) == (loss, method))
            for method in ("none", "temperature", "focal temperature")
        )
        cells = {"loss": loss, "accuracy": _cell(none, "accuracy"), "ECE": _cell(none, "ece_equal_mass")}
        for row, heading in ((scaled, "ECE with TS (T)"), (focal, "ECE with FTS (T)")):
            cells[heading] = f"{row['ece_equal_mass_mean']:.4f} ({row['temperature_mean']:.2f})"
        cells["NLL"] = f"{none['nll_mean']:.4f}"
        cells["with TS"], cells["with FTS"] = (f"{row['nll_mean']:.4f}" for row in (scaled, focal))
        shown.append(cells)
    return tabulate(shown, headers="keys", tablefmt=tablefmt, disable_numparse=True)


def _cell(row: Row, name: str, suffix: str = "") -> str:
    mean, std = row[f"{name}_mean{suffix}"], row[f"{name}_std{suffix}"]
    return f"{mean:.4f}" + ("" if math.isnan(std) else f" ± {std:.4f}")


def _mean_std(rows: Sequence[Row], *names: str) -> Row:
    result: Row = {}
    for name in names:
        values = np.array([row[name] for row in rows], dtype=np.float64)
        result[f"{name}_mean"] = float(values.mean()) if len(values) else math.nan
        # One infinite value makes the standard deviation undefined.
        spread = len(values) > 1 and bool(np.isfinite(values).all())
        result[f"{name}_std"] = float(values.std(ddof=1)) if spread else math.nan
    return result


def _select(rows: Iterable[Row], loss: str, method: str, criterion: str) -> list[Row]:
    wanted = (loss, method, criterion)
    return [row for row in rows if (row["loss"], row["method"], row["criterion"]) == wanted]


def _losses(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["loss"] for row in rows))


def _by_gamma(loss: str) -> tuple[bool, float]:
    gamma = objectives.gamma(loss)
    return (True, 0.0) if gamma is None else (False, -gamma)


def write(runs: Sequence[Run], folder: Path) -> dict[str, list[Row]]:
    """All CSV files of a set of runs. Returns the rows of each by its stem."""
    from tqdm import tqdm

    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[Row]] = {name: [] for name in PER_RUN}
    for run in tqdm(runs, unit="run", desc="calibrating", disable=None, leave=False):
        for name, rows_of in PER_RUN.items():
            files[name] += rows_of(run)
    for name, (_, source, make) in TABLES.items():
        files[name] = make(files[source])
    for name, rows in files.items():
        # With some hundred samples per bin, more than four digits are not significant, and bins are many.
        records.write_csv(folder / f"{name}.csv", rows, digits=4 if name == "bins" else 6)
    return files
