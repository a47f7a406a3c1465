"""The command, tables and figures of the training study."""

import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import focalkern as fk

pytest.importorskip("sklearn", reason="the study's default data come with scikit-learn")
training = pytest.importorskip("benchmarks.train_study.training", reason="the benchmarks are in the source tree only")
import study_cases  # noqa: E402
from study_cases import ROOT, settings  # noqa: E402

from benchmarks.train_study import objectives, records, run_rows, sweep, tables  # noqa: E402
from benchmarks.train_study.__main__ import main  # noqa: E402

digits = study_cases.digits  # fixture

RESULTS = ROOT / "benchmarks" / "results" / "train_study"

pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------------------------------------------------------------
# The command, tables, figures
# ---------------------------------------------------------------------------------------------------------------------
def test_quick_study(tmp_path, capsys):
    out = tmp_path / "study"
    assert main(["--quick", "--width", "4", "--threads", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "focal-3 + FTS" in printed
    rows = records.read_csv(out / "report" / "calibration.csv")
    assert {(row["loss"], row["seed"]) for row in rows} == {("cross-entropy", 0), ("focal-3", 0)}
    for name in (
        *run_rows.PER_RUN,
        *tables.TABLES,
    ):
        assert (out / "report" / f"{name}.csv").stat().st_size > 100
    pictures = {path.stem for path in (out / "report").glob("*.png")}
    # The study omits figures that need AdaFocal, three losses between focal and inverse focal, or other families.
    assert pictures == {
        *("training_curves", "correct_and_incorrect", "scaled_ece", "validation_size", "learned"),
        *("optimal_temperature", "out_of_distribution", "reliability"),
    }
    # focalkern calibrate reads the logits and finds the study's results.
    from focalkern.cli import main as focalkern

    logits = out / "focal-3" / "seed-0" / "logits.npz"
    papers = ("--method", "focal-temperature", "--criterion", "ece")
    assert focalkern(["calibrate", str(logits), *papers, "--out", str(tmp_path / "c.json")]) == 0
    found = json.loads((tmp_path / "c.json").read_text())
    (own,) = [
        row
        for row in rows
        if (row["loss"], row["method"], row["criterion"]) == ("focal-3", "focal temperature", "ece equal_mass")
    ]
    assert (found["gamma"], found["temperature"]) == pytest.approx((own["gamma"], own["temperature"]))
    assert main(["--quick", "--width", "8", "--out", str(out)]) == 2
    assert "width 4, now 8" in capsys.readouterr().err


def test_quick_sweep(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "FAMILIES", {"label-smoothing": (0.05,), "l1-norm": (0.01,), "focal": (1, 3)})
    arguments = ["sweep", "--sizes", "40", "80", "--epochs", "1", "--seeds", "0", "--width", "4", "--threads", "1"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "with histogram binning" in capsys.readouterr().out
    rows = records.read_csv(tmp_path / "report" / "table_coefficients.csv")
    assert [row["train_size"] for row in rows] == [40] * 5 + [80] * 5
    assert {path.stem for path in (tmp_path / "report").glob("*.png")} >= {"coefficients", "best_coefficient"}


def test_a_report_of_nothing_is_an_error(tmp_path, capsys):
    assert main(["report", "--out", str(tmp_path)]) == 2
    assert "no complete run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--losses hinge", "got 'hinge'"),
        ("--losses label-smoothing-1.5", "label-smoothing-1.5: .*label_smoothing must be between 0.0 and 1.0"),
        ("--val-fraction 0.0001", "leave none to train on or to validate with"),
        ("--train-size 2000", "at most 1078, what validation leaves"),
        ("--threads 0", "threads must be at least 1, got 0"),
        ("--seeds 0 -1", "seeds must be from 0 to 2147483647, got -1"),
        ("--sizes 50", "sizes: they are the sweep's"),
        ("sweep --losses brier", "losses: the sweep has its own"),
        ("--out file/out", "Not a directory"),
    ],
)
def test_the_command_refuses_before_it_writes(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(arguments.split()) == 2
    assert re.search(f"^train_study: .*{said}", capsys.readouterr().err)
    assert os.listdir() == ["file"]


def calibration_row(loss, seed, method, criterion, ece, temperature=1.0):
    figures = dict.fromkeys(("accuracy", "nll", "brier", "ece_equal_mass_interp", "classwise_ece"), 0.5)
    chosen = {"loss": loss, "seed": seed, "method": method, "criterion": criterion, "temperature": temperature}
    floor = {"ece_equal_width_floor": 0.005}
    return {**figures, **chosen, **floor, "gamma": 0.0, "ece_equal_width": ece, "ece_equal_mass": ece}


def test_means_marks_and_gains():
    from scipy.stats import ttest_1samp

    rows = []
    ece = {"cross-entropy": [0.010, 0.011, 0.012], "focal-3": [0.021, 0.0211, 0.0230]}
    for loss, values in ece.items():
        for seed, value in enumerate(values):
            rows += [
                calibration_row(loss, seed, "none", "", 0.1),
                calibration_row(loss, seed, "temperature", "ece equal_width", value, 1.5 + seed),
                calibration_row(loss, seed, "temperature", "ece equal_mass", 0.02),
                calibration_row(loss, seed, "temperature", "nll", 0.025),
                calibration_row(loss, seed, "focal temperature", "ece equal_mass", 0.03),
                calibration_row(loss, seed, "focal temperature", "nll", 0.024),
                calibration_row(loss, seed, "histogram binning", "", 0.01 + 0.001 * seed),
            ]
    focal, plain = tables.post_hoc_table(rows)
    assert (focal["loss"], plain["loss"]) == ("focal-3", "cross-entropy")
    assert focal["ece_mean_temperature"] == pytest.approx(0.0217)
    assert focal["ece_std_temperature"] == pytest.approx(np.std(ece["focal-3"], ddof=1))
    assert focal["temperature_mean"] == pytest.approx(2.5)
    # A paired test is a test of the mean difference.
    differences = np.subtract(ece["focal-3"], ece["cross-entropy"])
    assert focal["p_temperature"] == pytest.approx(ttest_1samp(differences, 0).pvalue)
    assert focal["p_temperature"] < 0.05
    text = tables.format_table("table_post_hoc", [focal, plain])
    assert "0.0217 ± 0.0011 +" in text
    assert math.isnan(plain["p_temperature"])
    gains = {row["method"]: row["gain"] for row in tables.selection_table(rows) if row["loss"] == "all losses"}
    assert gains == pytest.approx({"temperature": 1 - 0.02 / 0.025, "focal temperature": 1 - 0.03 / 0.024})


# ---------------------------------------------------------------------------------------------------------------------
# The recorded study
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("loss", ["cross-entropy", "focal-3"])
def test_the_recorded_figures_come_from_the_recorded_logits(loss, tmp_path):
    """tests/data has the logits of seed 0; computing from them gives every recorded number."""
    with np.load(ROOT / "tests" / "data" / f"fashion_mnist_{loss}.npz") as file:
        logits = {key: torch.from_numpy(file[key]) for key in file.files}
    assert [len(logits[f"{part}_labels"]) for part in ("val", "test")] == [6000, 10000]
    recorded = [
        row
        for row in records.read_csv(RESULTS / "fashion_mnist" / "calibration.csv")
        if (row["loss"], row["seed"]) == (loss, 0)
    ]
    run = records.Run(tmp_path, loss, 0, {key: recorded[0][key] for key in run_rows.ABOUT})
    run.__dict__["logits"] = logits
    computed = run_rows.calibration_rows(run)
    assert len(computed) == len(recorded) == 7
    for now, then in zip(computed, recorded, strict=True):
        assert (now["method"], now["criterion"]) == (then["method"], then["criterion"])
        for name in ("gamma", "temperature", "ece_equal_width_floor", *run_rows.FIGURES):
            # The records have six digits.
            assert now[name] == pytest.approx(then[name], rel=1e-5, nan_ok=True), (now["method"], name)


def test_the_recorded_tables_come_from_the_recorded_rows():
    folder = RESULTS / "fashion_mnist"
    assert len({row["seed"] for row in records.read_csv(folder / "calibration.csv")}) == 3
    for name, (_, source, make) in tables.TABLES.items():
        rows = make(records.read_csv(folder / f"{source}.csv"))
        recorded = records.read_csv(folder / f"{name}.csv")
        assert len(rows) == len(recorded)
        for now, then in zip(rows, recorded, strict=True):
            numbers = {key: value for key, value in now.items() if isinstance(value, float)}
            # A small standard deviation or difference of means has fewer digits than the numbers themselves.
            expected = pytest.approx(numbers, rel=1e-2, abs=2e-6, nan_ok=True)
            assert {key: then[key] for key in numbers} == expected


def test_the_page_has_the_recorded_numbers():
    """The page's table, and every number in its sentences."""
    folder = RESULTS / "fashion_mnist"
    read = {path.stem: records.read_csv(path) for path in folder.glob("*.csv")}
    pages = " ".join((ROOT / "docs" / "evidence" / "training.md").read_text().split())
    focal = read["table_focal_temperature"]
    table = tables.format_summary(focal, tablefmt="github")
    assert table in (ROOT / "docs" / "evidence" / "training.md").read_text(), f"the table should be\n{table}"

    def value(name, loss, column, **chosen):
        (row,) = [row for row in read[name] if row["loss"] == loss and chosen.items() <= row.items()]
        return row[column]

    def curve(loss, column):
        found = [[row[column] for row in read["epochs"] if (row["loss"], row["epoch"]) == (loss, e)] for e in (1, 14)]
        return " to ".join(f"{np.mean(values):.2f}" for values in found)

    def top(loss, epoch):
        chosen = [row["top_logit"] for row in read["learned"] if (row["loss"], row["learned_epoch"]) == (loss, epoch)]
        return f"{np.mean(chosen):.1f}"

    def ece(loss, method="none"):
        return f"{value('table_focal_temperature', loss, 'ece_equal_mass_mean', method=method):.4f}"

    gain = next(row for row in read["table_selection"] if (row["loss"], row["method"]) == ("all losses", "temperature"))
    p_values = [row[f"p_{short}"] for row in read["table_post_hoc"] for short in ("temperature", "histogram")]
    p_values = [p for p in p_values if not math.isnan(p)]
    temperatures = {row["loss"]: f"{row['temperature_mean']:.2f}" for row in read["table_post_hoc"]}
    for said in (
        f"{curve('focal-3', 'test_nll_incorrect')} under focal 3. The weight norm of the last layer rises from "
        f"{curve('cross-entropy', 'head_weight_norm')} and from {curve('focal-3', 'head_weight_norm')} (Mukhoti",
        f"from {temperatures['focal-7']} for focal 7 over {temperatures['cross-entropy']} for cross-entropy to "
        f"{temperatures['inverse-focal-3']} for inverse focal 3",
        f"{top('cross-entropy', 1)} for samples first right in epoch 1 and {top('cross-entropy', 10)} for samples "
        f"first right in epoch 10; under focal 3 they are {top('focal-3', 1)} and {top('focal-3', 10)}.",
        f"and a lower one in {gain['runs_better']:g} of {gain['runs']:g} runs",
        f"Of {len(p_values)} paired t-tests",
    ):
        assert said in pages
    assert sum(p < 0.05 for p in p_values) == 1
    assert value("table_post_hoc", "label-smoothing-0.05", "p_temperature") < 0.05
    assert min(ece(row["loss"]) for row in focal) == ece("adafocal")
    for method in ("temperature", "focal temperature"):
        assert value("table_selection", "cross-entropy", "gain", method=method) < 0

    swept = records.read_csv(RESULTS / "digits_sweep" / "table_coefficients.csv")

    def best(family, size):
        rows = [row for row in swept if row["train_size"] == size and row["loss"].startswith((family, "cross-entropy"))]
        return min(rows, key=lambda row: row["ece_equal_width_mean_uncalibrated"])["loss"]

    families = ("label-smoothing", "l1-norm", "focal")
    assert [best(family, 99) for family in families] == ["label-smoothing-0.03", "l1-norm-0.01", "focal-3"]
    assert "falls to 0: from 0.03 for label smoothing, 0.01 for the L1 norm and 3 for focal loss" in pages
    assert {best(family, 799) for family in families} == {"cross-entropy"}


# ---------------------------------------------------------------------------------------------------------------------
# Several lengths of training
# ---------------------------------------------------------------------------------------------------------------------
def test_regimes_compare_the_losses_of_complete_seeds(digits, tmp_path):
    regimes = pytest.importorskip("benchmarks.train_study.regimes")
    runs = tmp_path / "runs"
    for epochs, losses_and_seeds in {1: [("cross-entropy", 0), ("focal-3", 0), ("cross-entropy", 1)], 2: []}.items():
        for loss, seed in losses_and_seeds:
            folder = records.folder_of(runs / str(epochs), loss, seed)
            assert training.run(digits, settings(digits, epochs=epochs), loss, seed, folder)
    assert regimes.main([str(runs), "--out", str(tmp_path / "out")]) == 0
    scores = records.read_csv(tmp_path / "out" / "scores.csv")
    assert {(row["loss"], row["seed"]) for row in scores} == {("cross-entropy", 0), ("focal-3", 0)}
    assert {row["method"] for row in scores} == set(regimes.METHODS)
    (run,) = [run for run in records.read_runs(runs / "1", objectives.rank) if run.loss == "focal-3"]
    probs = run.logits["test_logits"].double().softmax(-1)
    (row,) = [row for row in scores if (row["loss"], row["method"]) == ("focal-3", "none")]
    assert row["nll"] == pytest.approx(float(fk.metrics.nll(probs, run.logits["test_labels"])), rel=1e-5)
    (base,) = [row for row in scores if (row["loss"], row["method"]) == ("cross-entropy", "none")]
    (pair,) = [r for r in records.read_csv(tmp_path / "out" / "differences.csv") if r["method"] == "none"]
    assert pair["nll"] == pytest.approx(row["nll"] - base["nll"], abs=1e-5 * row["nll"])  # six digits are written
    assert pair["nll_low"] <= pair["nll"] <= pair["nll_high"]
    assert f"{row['nll']:.4f}" in (tmp_path / "out" / "tables.md").read_text()
    assert (tmp_path / "out" / "over_the_epochs.png").stat().st_size > 1000


def test_regimes_of_nothing(tmp_path, capsys):
    regimes = pytest.importorskip("benchmarks.train_study.regimes")
    assert regimes.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no complete run" in capsys.readouterr().err


def test_recorded_regimes_are_those_of_the_rows():
    regimes = pytest.importorskip("benchmarks.train_study.regimes")
    folder = RESULTS / "fashion_mnist_4000"
    assert (folder / "tables.md").read_text() == regimes.tables_of(folder)


def test_figures_of_the_readme_are_recorded():
    section = (ROOT / "README.md").read_text().split("## When it pays")[1].split("## ")[0]
    recorded = (RESULTS / "fashion_mnist_4000" / "tables.md").read_text()
    recorded += "".join(path.read_text() for path in (ROOT / "benchmarks" / "results").glob("spline_acceptance_*.md"))
    figures = re.findall(r"\d\.\d{4}", section)
    assert len(figures) >= 8
    assert [figure for figure in figures if figure not in recorded] == []
