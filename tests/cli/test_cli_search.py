"""The command's searches, bins, bounds and report."""

import csv
import json
import os
import re

import cli_cases
import numpy as np
import pytest
import torch

from focalkern import metrics
from focalkern.calibrators import (
    FocalTemperatureScaling,
    HistogramBinning,
    TemperatureScaling,
    load_calibrator,
)

pytest.importorskip("tabulate", reason="tabulate is not installed")
from cli_cases import GRID, INTERVALS, PAPER, SCORES, row_of, run_json

both = cli_cases.both  # fixture

FEW = [index * 0.1 for index in range(1, 51)]

BY_REFINE = FocalTemperatureScaling(search="refine", temperatures=FEW, criterion="ece")


# Every search, bins alone and after both kinds of search, and a criterion that the search implies.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--search refine", BY_REFINE),
        ("--search line --criterion nll", FocalTemperatureScaling(search="line", temperatures=FEW, criterion="nll")),
        ("--search nll --criterion nll", FocalTemperatureScaling(search="nll")),
        ("--search nll --criterion nll --method temperature", TemperatureScaling()),
        (
            "--search refine --method temperature",
            TemperatureScaling(search="refine", temperatures=FEW, criterion="ece"),
        ),
        ("--method histogram", HistogramBinning()),
        ("--method histogram --binning equal_width --n-bins 7", HistogramBinning(n_bins=7, binning="equal_width")),
        ("--search refine --binning equal_mass", HistogramBinning(scaling=BY_REFINE)),
        (
            "--binning equal_width --method temperature",
            HistogramBinning(binning="equal_width", scaling=TemperatureScaling(temperatures=FEW, criterion="ece")),
        ),
    ],
)
def test_another_search_and_bins_are_rows_beside_the_grids(options, expected, both, run, tmp_path):
    out = tmp_path / "calibrator.json"
    document = run_json(run, "calibrate", both, *INTERVALS, *options.split(), "--out", out)
    grid_only = run_json(run, "calibrate", both, *INTERVALS, *(("--n-bins", "7") if "7" in options else ()))
    assert document["rows"][:5] == grid_only["rows"]
    row = document["rows"][-1]
    assert document["chosen"] == len(document["rows"]) - 1 == (6 if "refine --binning" in options else 5)

    arrays = {name: torch.from_numpy(array) for name, array in np.load(both).items()}
    logits, labels = arrays["test_logits"].double(), arrays["test_labels"]
    expected.fit_quietly(arrays["val_logits"].double(), arrays["val_labels"])
    loaded = load_calibrator(out)
    assert type(loaded) is type(expected)
    assert torch.equal(loaded.predict_proba(logits), expected.predict_proba(logits))
    probs = expected.predict_proba(logits)
    right = expected.predict(logits) == labels
    assert row["test"]["accuracy"] == pytest.approx(float(right.double().mean()))
    nll = float(metrics.nll(probs, labels))
    assert row["test"]["nll"] == (pytest.approx(nll, rel=1e-6) if np.isfinite(nll) else None)
    assert row["test"]["brier"] == pytest.approx(float(metrics.brier_score(probs, labels)))
    n_bins = 7 if "7" in options else 15
    ece = metrics.expected_calibration_error(confidence=probs.amax(-1), correct=right, n_bins=n_bins)
    assert row["test"]["ece_equal_width"] == pytest.approx(float(ece))
    low, high = row["intervals"]["ece_equal_width"]
    assert low <= row["test"]["ece_equal_width"] <= high
    # Bins are compared with the scaling before them, other scalings with temperature scaling, and the rest with no
    # calibration.
    beaten = 0 if expected.method in ("temperature", "histogram") else {"ece": 1, "nll": 3}[row["criterion"]]
    if isinstance(expected, HistogramBinning) and expected.scaling is not None:
        beaten = {"focal-temperature": 5, "temperature": 1}[row["method"]]
    assert row["difference"]["against_row"] == beaten
    difference = row["difference"]["figures"]["brier"]["estimate"]
    assert difference == pytest.approx(row["test"]["brier"] - document["rows"][beaten]["test"]["brier"])

    evaluated = run_json(run, "evaluate", both, "--calibrator", out, "--n-bins", n_bins)
    assert evaluated["sets"][1]["rows"][1]["figures"] == pytest.approx(row["test"])


def test_another_search_and_bins_are_printed(both, run, tmp_path):
    code, out, _ = run("calibrate", both, *INTERVALS, "--search", "refine", "--binning", "equal_mass", "--all")
    assert code == 0
    assert re.search(r"\n   focal temperature \(refine\), ECE-optimal +-?\d\.\d{4}  \d\.\d{4} ", out)
    assert "\n-> focal temperature (refine) + bins, ECE-optimal " in out
    assert "bins, with the same calibrator without bins" in out
    code, out, _ = run("calibrate", both, *GRID, "--method", "histogram", "--report", tmp_path / "report")
    assert code == 0
    assert "\nChosen (->): histogram binning\n" in out
    page = (tmp_path / "report" / "report.html").read_text()
    assert "one of 15 bins of equal mass" in page
    assert "other calibrators may" in page
    with open(tmp_path / "report" / "table.csv", newline="") as stream:
        last = list(csv.DictReader(stream))[-1]
    assert (last["method"], last["binning"], last["search"], last["gamma"]) == ("histogram", "equal_mass", "", "")


def test_effects_of_bins_on_predictions_and_nll_are_reported(tmp_path, run):
    # Below the median confidence class 0 is never correct when predicted; above it, always.
    logits = np.tile([[1.0, 0.0, -1.0], [4.0, 0.0, -1.0]], (100, 1))
    labels = np.tile([1, 0], 100)
    later = labels.copy()
    later[1] = 1
    path = tmp_path / "bins.npz"
    np.savez(path, val_logits=logits, val_labels=labels, test_logits=logits, test_labels=later)
    options = ("--method", "histogram", "--n-bins", "2")
    document = run_json(run, "calibrate", path, *GRID, *options, "--out", tmp_path / "c.json")
    assert document["rows"][-1]["test"]["accuracy"] == pytest.approx(0.995)
    assert document["rows"][-1]["test"]["nll"] is None
    said = [remark for remark in document["remarks"] if remark.startswith("histogram binning: ")]
    assert said[0] == "histogram binning: the bins change the predicted class of 100 of the 200 test rows."
    assert "makes the NLL infinite" in said[1]
    evaluated = run_json(run, "evaluate", path, "--calibrator", tmp_path / "c.json")
    assert evaluated["sets"][1]["remarks"] == said[:2]
    assert evaluated["sets"][0]["rows"][1]["figures"]["nll"] is not None


def test_a_bound_of_the_grid_causes_a_note(both, run):
    document = run_json(run, "calibrate", both, *PAPER[:4], "--temperatures", "0.5:1:0.1", "--gammas", "0")
    words = "temperature = 1 is the largest that was searched; the optimum may lie beyond the border of the grid"
    assert any(words in remark for remark in document["remarks"])
    assert row_of(document, "temperature", "nll")["at_border"] == ["temperature = 1 is the largest that was searched"]
    inside = run_json(run, "calibrate", both, *GRID, "--gammas", "0")
    assert row_of(inside, "temperature", "nll")["at_border"] == []


def test_a_disagreement_of_ece_and_nll_causes_a_note(tmp_path, run):
    """Confidence without information: the ECE is lowest where the NLL is high."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (600,), generator=generator)
    logits = torch.randn(600, 3, generator=generator) * 0.1
    hit = torch.arange(600) % 10 < 9
    # Nine tenths of the rows are correct with low confidence; the others are wrong with high confidence.
    logits[torch.arange(600), torch.where(hit, labels, (labels + 1) % 3)] += torch.where(hit, 1.0, 6.0)
    np.savez(tmp_path / "a.npz", logits=logits.numpy(), labels=labels.numpy())
    document = run_json(run, "calibrate", tmp_path / "a.npz", *GRID)
    before, ece, nll = (row_of(document, *key)["test"]["nll"]
                        for key in (("none", None), ("temperature", "ece"), ("temperature", "nll")))  # fmt: skip
    assert nll <= before < ece
    (remark,) = [r for r in document["remarks"] if r.startswith("temperature: ECE and NLL disagree")]
    assert f"RAISES the NLL from {before:.4f} to {ece:.4f}" in remark
    assert f"lowers it to {nll:.4f}" in remark


def test_the_report(both, run, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    folder = tmp_path / "new" / "report"
    code, out, _ = run("calibrate", both, *GRID, "--report", folder)
    assert code == 0
    assert sorted(os.listdir(folder)) == [
        "calibrator.json",
        "grid_ece.png",
        "grid_nll.png",
        "reliability_after.png",
        "reliability_before.png",
        "reliability_compared.png",
        "report.html",
        "report.json",
        "ridge.png",
        "table.csv",
    ]
    assert f"Report: {folder / 'report.html'}; beside it calibrator.json, table.csv, report.json and 6 pictures" in out
    for name in os.listdir(folder):
        if name.endswith(".png"):
            assert (folder / name).read_bytes().startswith(b"\x89PNG")
    document = json.loads((folder / "report.json").read_text())
    assert document == run_json(run, "calibrate", both, *GRID)
    with open(folder / "table.csv", newline="") as stream:
        table = list(csv.DictReader(stream))
    assert len(table) == 10
    for row, of in zip(table[5:], document["rows"], strict=True):
        assert (row["rows"], row["method"], row["criterion"]) == ("test", of["method"], of["criterion"] or "")
        assert {name: float(row[name]) for name in SCORES} == of["test"]
    assert [row["chosen"] for row in table[:5]] == ["0", "0", "1", "0", "0"]


def test_a_bound_of_the_search_is_shown_and_noted_once(both, run):
    for method in (("--method", "focal-temperature"), ()):
        _, out, _ = run("calibrate", both, *method, "--temperatures", "0.5:1:0.1", "--gammas", "0", "--bootstrap", "0")
        text = " ".join(out.split())
        assert text.count("ECE-optimal: temperature = 1 is the largest that was searched") <= 2
        if method:
            assert text.startswith("Use focal temperature scaling, gamma = 0, T = 1 (at the bound)")
            assert text.count("focal temperature (grid), NLL-optimal: temperature = 1 is the largest") == 1


def test_notes_describe_rows_of_the_printed_table(both, run):
    command = ("calibrate", both, "--temperatures", "0.5:1:0.1", "--gammas", "0", "--bootstrap", "0")
    words = "temperature, ECE-optimal: temperature = 1 is the largest that was searched"
    for options, is_shown in (((), False), (("--all",), True), (("--criterion", "ece"), True)):
        out = " ".join(run(*command, *options)[1].split())
        assert ("ECE-optimal" in out.split("validation 400 rows")[0]) == (words in out) == is_shown
    document = run_json(run, *command)
    assert any(words in remark for remark in document["remarks"])
    assert row_of(document, "temperature", "ece")["at_border"]
