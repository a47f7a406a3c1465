"""The command: its tables against the library, its files, and one line for every mistake."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import focalkern
from focalkern import bootstrap, metrics
from focalkern.calibrators import (
    FocalTemperatureScaling,
    HistogramBinning,
    MultiLabelScaling,
    TemperatureScaling,
    load_calibrator,
)
from focalkern.ops.calibration_grid import PAPER_GAMMAS
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.study import intervals

pytest.importorskip("tabulate", reason="tabulate is not installed")

# A tenth of the paper's temperatures: the tests are about what is said of a grid, not about its size. Most of them are
# not about intervals either. They ask for the paper's choice; the verdict of a cross-validation has tests below.
PAPER = ("--method", "focal-temperature", "--criterion", "ece", "--temperatures", "0.1:5:0.1")
GRID = (*PAPER, "--bootstrap", "0")
INTERVALS = (*PAPER, "--bootstrap", "40")
SCORES = [
    "accuracy",
    "nll",
    "brier",
    "ece_equal_width",
    "ece_equal_mass",
    "ece_equal_mass_interp",
    "classwise_ece_equal_width",
]


def sample(n, seed, n_classes=5):
    """Over-confident logits with their labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return (logits * 2).numpy(), target.numpy()


@pytest.fixture
def both(tmp_path):
    """A file with validation and test rows."""
    (val_logits, val_labels), (test_logits, test_labels) = sample(400, 0), sample(500, 1)
    path = tmp_path / "both.npz"
    np.savez(path, val_logits=val_logits, val_labels=val_labels, test_logits=test_logits, test_labels=test_labels)
    return path


@pytest.fixture
def single(tmp_path):
    logits, labels = sample(400, 0)
    path = tmp_path / "single.npz"
    np.savez(path, logits=logits, labels=labels)
    return path


def run_json(run, *arguments):
    code, out, err = run(*arguments, "--json")
    assert code == 0, err

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(out, parse_constant=refuse)


def row_of(document, method, criterion):
    return next(row for row in document["rows"] if (row["method"], row["criterion"]) == (method, criterion))


# -- calibrate -------------------------------------------------------------------------------------------------------


def test_the_rows_are_what_the_library_computes(both, run):
    document = run_json(run, "calibrate", both, *GRID)
    arrays = {name: torch.from_numpy(array) for name, array in np.load(both).items()}
    temperatures = [index / 10 for index in range(1, 51)]
    assert document["grid"]["temperatures"] == temperatures
    assert document["grid"]["gammas"] == [0.0, *PAPER_GAMMAS]
    assert [(row["method"], row["criterion"]) for row in document["rows"]] == [
        ("none", None),
        ("temperature", "ece"),
        ("focal-temperature", "ece"),
        ("temperature", "nll"),
        ("focal-temperature", "nll"),
    ]
    for cls in (TemperatureScaling, FocalTemperatureScaling):
        for criterion in ("ece", "nll"):
            fitted = cls(criterion=criterion, temperatures=temperatures).fit(
                arrays["val_logits"].double(), arrays["val_labels"]
            )
            row = row_of(document, cls.method, criterion)
            assert (row["gamma"], row["temperature"]) == (fitted.gamma_, fitted.temperature_)
            assert row["criterion_value"] == pytest.approx(fitted.best_value_)
            # The criterion is the figure on the validation rows.
            figure = {"ece": "ece_equal_mass", "nll": "nll"}[criterion]
            assert row["validation"][figure] == pytest.approx(fitted.best_value_, rel=1e-6)
    for row in document["rows"]:
        for part, prefix in (("validation", "val"), ("test", "test")):
            logits, labels = arrays[f"{prefix}_logits"].double(), arrays[f"{prefix}_labels"]
            probs = focal_calibration_map(logits, row["gamma"], row["temperature"])
            assert list(row[part]) == SCORES
            assert row[part]["accuracy"] == float((logits.argmax(-1) == labels).double().mean())
            assert row[part]["nll"] == pytest.approx(float(metrics.nll(probs, labels)))
            assert row[part]["brier"] == pytest.approx(float(metrics.brier_score(probs, labels)))
            classwise = metrics.classwise_calibration_error(probs, labels)
            assert row[part]["classwise_ece_equal_width"] == pytest.approx(float(classwise))
            for estimator in metrics.ESTIMATORS:
                ece = metrics.expected_calibration_error(probs, labels, estimator=estimator)
                assert row[part][f"ece_{estimator}"] == pytest.approx(float(ece))
    assert document["chosen"] == 2
    assert document["data"]["validation"]["n_samples"] == 400
    assert document["data"]["test"]["n_samples"] == 500
    assert document["data"]["same_rows"] is False


def test_the_printed_table_is_the_json(both, run):
    document = run_json(run, "calibrate", both, *GRID)
    code, out, err = run("calibrate", both, *GRID, "--all")
    assert code == 0
    assert err == ""
    lines = out.splitlines()
    labels = {
        "none": "uncalibrated",
        "temperature": "temperature{}, {}-optimal",
        "focal-temperature": "focal temperature{}, {}-optimal",
    }
    for row in document["rows"]:
        # By another search than the usual one for NLL: the temperatures are not the default.
        search = " (grid)" if row["criterion"] == "nll" else ""
        label = re.escape(labels[row["method"]].format(search, (row["criterion"] or "").upper()))
        (line,) = [line for line in lines if re.match(rf"(-> |   ){label} ", line)]
        numbers = re.findall(r"-?\d+\.\d+", line)
        if row["method"] != "none":
            assert float(numbers.pop(0)) == row["gamma"]
            assert float(numbers.pop(0)) == pytest.approx(row["temperature"])
        assert numbers == [f"{row['test'][name]:.4f}" for name in SCORES]
    assert next(line for line in lines if line.startswith("-> ")).startswith("-> focal temperature, ECE-optimal")
    for words in (
        "validation   400 rows",
        "500 test rows",
        "10 gammas x 50 temperatures",
        "ECE of 15 bins, equal_mass",
    ):
        assert words in out


def test_focal_is_never_worse_where_it_was_chosen(both, run):
    document = run_json(run, "calibrate", both, *GRID)
    for criterion in ("ece", "nll"):
        plain, focal = (row_of(document, method, criterion) for method in ("temperature", "focal-temperature"))
        assert focal["criterion_value"] <= plain["criterion_value"]


def test_the_papers_gammas_and_ones_own(both, run):
    paper = run_json(run, "calibrate", both, *GRID, "--gammas", "paper")
    # Row 0 is there for plain temperature scaling, and is not among the choices of the other method.
    assert paper["grid"]["gammas"] == [0.0, *PAPER_GAMMAS]
    assert row_of(paper, "focal-temperature", "ece")["gamma"] in PAPER_GAMMAS
    own = run_json(run, "calibrate", both, *GRID, "--gammas", "-0.5", "2", "0.5,3")
    assert own["grid"]["gammas"] == [0.0, -0.5, 2.0, 0.5, 3.0]
    assert run_json(run, "calibrate", both, *GRID, "--gammas=-0.5,1")["grid"]["gammas"] == [0.0, -0.5, 1.0]


@pytest.mark.parametrize("estimator", metrics.ESTIMATORS)
def test_the_estimator_that_chooses(estimator, both, run):
    document = run_json(run, "calibrate", both, *GRID, "--estimator", estimator, "--n-bins", "10")
    row = row_of(document, "temperature", "ece")
    assert row["validation"][f"ece_{estimator}"] == pytest.approx(row["criterion_value"], rel=1e-6)
    assert (document["grid"]["estimator"], document["grid"]["n_bins"]) == (estimator, 10)


def test_temperatures_are_multiples_of_the_step(single, run):
    document = run_json(run, "calibrate", single, "--temperatures", "0.05:5:0.01", "--gammas", "0")
    assert document["grid"]["temperatures"] == [index / 100 for index in range(5, 501)]


@pytest.mark.parametrize("method", ["temperature", "focal-temperature"])
@pytest.mark.parametrize("criterion", ["ece", "nll"])
def test_what_is_saved_is_what_was_asked_for(method, criterion, both, run, tmp_path):
    out = tmp_path / "calibrator.json"
    arguments = ("calibrate", both, *GRID, "--method", method, "--criterion", criterion, "--out", out)
    code, said, _ = run(*arguments)
    assert code == 0
    assert f"Calibrator: {out}" in said
    document = run_json(run, *arguments)
    row = row_of(document, method, criterion)
    assert document["rows"][document["chosen"]] == row
    loaded = load_calibrator(out)
    assert loaded.method == method
    assert (loaded.gamma_, loaded.temperature_) == (row["gamma"], row["temperature"])
    assert (loaded.criterion, loaded.n_samples_, loaded.n_classes_) == (criterion, 400, 5)
    # evaluate applies it, and gets the same figures.
    evaluated = run_json(run, "evaluate", both, "--calibrator", out)
    (test,) = [one for one in evaluated["sets"] if one["set"] == "test"]
    assert test["rows"][1]["figures"] == pytest.approx(row["test"])
    assert test["rows"][0]["figures"] == pytest.approx(document["rows"][0]["test"])


FEW = [index * 0.1 for index in range(1, 51)]
BY_REFINE = FocalTemperatureScaling(search="refine", temperatures=FEW, criterion="ece")


# Every search, bins alone and after both kinds of search, a criterion that the search implies.
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
    # Bins are compared with what they follow, another scaling with temperature scaling, the rest with no calibration.
    beaten = 0 if expected.method in ("temperature", "histogram") else {"ece": 1, "nll": 3}[row["criterion"]]
    if isinstance(expected, HistogramBinning) and expected.scaling is not None:
        beaten = {"focal-temperature": 5, "temperature": 1}[row["method"]]
    assert row["difference"]["against_row"] == beaten
    difference = row["difference"]["figures"]["brier"]["estimate"]
    assert difference == pytest.approx(row["test"]["brier"] - document["rows"][beaten]["test"]["brier"])

    evaluated = run_json(run, "evaluate", both, "--calibrator", out, "--n-bins", n_bins)
    assert evaluated["sets"][1]["rows"][1]["figures"] == pytest.approx(row["test"])


def test_another_search_and_bins_are_said_in_print(both, run, tmp_path):
    code, out, _ = run("calibrate", both, *INTERVALS, "--search", "refine", "--binning", "equal_mass", "--all")
    assert code == 0
    assert re.search(r"\n   focal temperature \(refine\), ECE-optimal +-?\d\.\d{4}  \d\.\d{4} ", out)
    assert "\n-> focal temperature (refine) + bins, ECE-optimal " in out
    assert "bins with what stands before them" in out
    code, out, _ = run("calibrate", both, *GRID, "--method", "histogram", "--report", tmp_path / "report")
    assert code == 0
    assert "\nChosen (->): histogram binning\n" in out
    page = (tmp_path / "report" / "report.html").read_text()
    assert "one of 15 of equal mass" in page
    assert "histogram binning may" in page
    with open(tmp_path / "report" / "table.csv", newline="") as stream:
        last = list(csv.DictReader(stream))[-1]
    assert (last["method"], last["binning"], last["search"], last["gamma"]) == ("histogram", "equal_mass", "", "")


def test_what_bins_do_to_predictions_and_nll_is_said(tmp_path, run):
    # In the lower half of the confidences class 0 is never right when it is on top; in the upper half it always is.
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


def test_the_same_rows_are_said(single, run):
    code, out, _ = run("calibrate", single, *GRID)
    assert code == 0
    assert "test         the same rows" in out
    assert out.count("Note: Validation and test rows are the same") == 1
    assert "validation and test rows are the same" not in out
    notes = out[out.index("Note: ") : out.index("Chosen (->)")].splitlines()
    assert max(map(len, notes)) <= 100 and all(line.startswith(("Note: ", "  ")) or not line for line in notes)
    document = run_json(run, "calibrate", single, *GRID)
    assert document["data"]["same_rows"] is True
    assert all(row["validation"] == row["test"] for row in document["rows"])


def test_a_split_is_seeded_and_leaves_no_row_out(single, run):
    documents = [
        run_json(run, "calibrate", single, *GRID, "--gammas", "0", "--split", "0.25", "--seed", seed)
        for seed in (1, 1, 2)
    ]
    assert documents[0] == documents[1]
    assert documents[0]["rows"] != documents[2]["rows"]
    for document in documents:
        assert document["data"]["validation"]["n_samples"] == 100
        assert document["data"]["test"]["n_samples"] == 300
        assert not any("same rows" in remark for remark in document["remarks"])
        # Accuracies of the parts add up to that of the whole: the parts are disjoint and cover it.
    whole = run_json(run, "evaluate", single)["sets"][0]["rows"][0]["figures"]["accuracy"]
    for document in documents:
        parts = document["rows"][0]
        assert 100 * parts["validation"]["accuracy"] + 300 * parts["test"]["accuracy"] == pytest.approx(400 * whole)


def test_pairs_of_npy_and_a_second_file(tmp_path, run):
    for name, seed in (("val", 0), ("test", 1)):
        logits, labels = sample(200, seed)
        np.save(tmp_path / f"{name}_logits.npy", logits)
        np.save(tmp_path / f"{name}_labels.npy", labels)
    beside = run_json(run, "calibrate", tmp_path / "val_logits.npy", "--test", tmp_path / "test_logits.npy", *GRID)
    assert beside["data"]["test"]["source"].endswith("test_logits.npy")
    assert beside["data"]["same_rows"] is False
    said = run_json(
        run, "calibrate", tmp_path / "val_logits.npy", "--labels", tmp_path / "val_labels.npy",
        "--test", tmp_path / "test_logits.npy", "--test-labels", tmp_path / "test_labels.npy", *GRID,
    )  # fmt: skip
    assert said["rows"] == beside["rows"]


def test_probabilities_with_a_zero_on_the_true_class(tmp_path, run):
    logits, labels = sample(300, 0)
    probs = torch.from_numpy(logits).softmax(-1).numpy()
    probs[5] = 0
    probs[5, (labels[5] + 1) % 5] = 1
    path = tmp_path / "zeros.npz"
    np.savez(path, test_probs=probs, test_labels=labels)
    code, out, _ = run("calibrate", path, *GRID)
    assert code == 0
    assert re.search(r"uncalibrated +0\.\d{4} +inf ", out)
    assert "Note: 1 of the 300 test rows of" in out
    assert "give their true class probability exactly 0" in " ".join(out.split())
    assert re.search(r"temperature, NLL-optimal +- +- ", out)
    document = run_json(run, "calibrate", path, *GRID)
    assert document["rows"][0]["test"]["nll"] is None
    assert row_of(document, "temperature", "nll")["gamma"] is None
    assert document["chosen"] == 2
    # Asked for the choice that does not exist.
    out_file = tmp_path / "calibrator.json"
    code, _, err = run("calibrate", path, *GRID, "--criterion", "nll", "--out", out_file)
    assert code == 2
    assert "not written, because nothing was chosen" in err
    assert not out_file.exists()
    for more in ((), ("--search", "refine"), ("--search", "nll"), ("--binning", "equal_mass")):
        document = run_json(run, "calibrate", path, *GRID, "--criterion", "nll", *more)
        assert document["chosen"] is None
        assert document["rows"][-1]["gamma"] is None


def test_logits_that_look_like_probabilities_are_refused_until_said(tmp_path, run):
    logits, labels = sample(300, 0)
    probs = torch.from_numpy(logits).double().softmax(-1)
    rows = [f"{label}," + ",".join(map(repr, row)) for label, row in zip(labels.tolist(), probs.tolist(), strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["label,a,b,c,d,e", *rows]))
    for command in (("calibrate", *GRID), ("evaluate",)):
        code, out, err = run(command[0], tmp_path / "a.csv", *command[1:])
        assert (code, out) == (2, "") and "say --input-kind probs or, if they are logits, --input-kind logits" in err
    document = run_json(run, "calibrate", tmp_path / "a.csv", *GRID, "--input-kind", "logits")
    assert any("pass input_kind=probs" in remark for remark in document["remarks"])
    document = run_json(run, "calibrate", tmp_path / "a.csv", *GRID, "--input-kind", "probs")
    assert document["data"]["validation"]["input_kind"] == "probs"
    assert not any("--input-kind" in remark for remark in document["remarks"])


def test_the_border_of_the_grid_is_said(both, run):
    document = run_json(run, "calibrate", both, *PAPER[:4], "--temperatures", "0.5:1:0.1", "--gammas", "0")
    words = "temperature = 1 is the largest that was searched; the optimum may lie beyond the border of the grid"
    assert any(words in remark for remark in document["remarks"])
    assert row_of(document, "temperature", "nll")["at_border"] == ["temperature = 1 is the largest that was searched"]
    inside = run_json(run, "calibrate", both, *GRID, "--gammas", "0")
    assert row_of(inside, "temperature", "nll")["at_border"] == []


def test_a_disagreement_about_the_nll_is_said(tmp_path, run):
    """Confidence that says nothing: the ECE is best where the NLL is bad."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (600,), generator=generator)
    logits = torch.randn(600, 3, generator=generator) * 0.1
    hit = torch.arange(600) % 10 < 9
    # Nine tenths are right and a little sure; the others are wrong and very sure.
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


def calibrated_cells(document, logits):
    """{row index: log-probabilities} of a document's rows."""
    return {
        str(index): focal_calibration_map(logits, row["gamma"], row["temperature"], log=True)
        for index, row in enumerate(document["rows"])
    }


def test_the_intervals_are_those_of_the_library(both, run):
    document = run_json(run, "calibrate", both, *GRID, "--bootstrap", "50", "--seed", "3")
    assert document["bootstrap"] == {"resamples": 50, "level": 0.95, "method": "symmetric", "seed": 3}
    arrays = {name: torch.from_numpy(array) for name, array in np.load(both).items()}
    logits, labels = arrays["test_logits"].double(), arrays["test_labels"]
    probs = calibrated_cells(document, logits)
    expected = bootstrap.paired_bootstrap(probs, labels, log=True, n_resamples=50, seed=3)
    # Temperature scaling has to beat no calibration, focal temperature scaling temperature scaling.
    against = {1: 0, 2: 1, 3: 0, 4: 3}
    verdicts = set()
    for index, row in enumerate(document["rows"]):
        for name in SCORES:
            interval = expected.interval(str(index), name)
            assert row["intervals"][name] == pytest.approx([interval.low, interval.high])
            assert row["intervals"][name][0] <= row["test"][name] <= row["intervals"][name][1]
        if index == 0:
            assert row["difference"] is None
            continue
        assert row["difference"]["against_row"] == against[index]
        for name, found in row["difference"]["figures"].items():
            difference = expected.difference(str(index), str(against[index]), name)
            assert (found["low"], found["high"]) == pytest.approx((difference.low, difference.high))
            lower_is_better = name != "accuracy"
            better = found["high"] < 0 if lower_is_better else found["low"] > 0
            worse = found["low"] > 0 if lower_is_better else found["high"] < 0
            assert found["verdict"] == ("better" if better else "worse" if worse else "undecided")
            verdicts.add(found["verdict"])
        floor = bootstrap.bias_floor(probs[str(index)].exp(), n_resamples=50, seed=3)["ece_equal_mass"]
        assert row["bias_floor"]["ece_equal_mass"] == pytest.approx(
            {
                "mean": floor.mean,
                "quantile_95": floor.quantile(0.95),
                "p_value": floor.p_value(row["test"]["ece_equal_mass"]),
            }
        )
    # Logits that are twice too large: scaling wins, and what the two kinds of scaling differ by is not all decided.
    assert {"better", "undecided"} <= verdicts


def test_the_printed_intervals_and_marks_are_the_json(both, run):
    document = run_json(run, "calibrate", both, *INTERVALS)
    code, out, _ = run("calibrate", both, *INTERVALS, "--all")
    assert code == 0
    lines = out.splitlines()
    seconds = [line.split() for line in lines if line.strip().startswith("+-.")]
    assert len(seconds) == len(document["rows"])
    marks = {"better": "*", "worse": "!", "undecided": ""}
    for cells, row in zip(seconds, document["rows"], strict=True):
        for cell, name in zip(cells, SCORES, strict=True):
            low, high = row["intervals"][name]
            half = f"{max(high - row['test'][name], row['test'][name] - low):.4f}".removeprefix("0")
            verdict = "undecided" if row["difference"] is None else row["difference"]["figures"][name]["verdict"]
            assert cell == f"+-{half}{marks[verdict]}"
    (floor,) = [index for index, line in enumerate(lines) if "bias floor of the row ->" in line]
    chosen = document["rows"][document["chosen"]]["bias_floor"]
    errors = [name for name in SCORES if "ece" in name]
    assert lines[floor].split()[-4:] == [f"{chosen[name]['mean']:.4f}" for name in errors]
    assert lines[floor + 1].split() == ["<" + f"{chosen[name]['quantile_95']:.4f}"[1:] for name in errors]
    assert "40 resamples of the test rows" in " ".join(out.split())
    first = next(index for index, line in enumerate(lines) if line.startswith("   uncalibrated"))
    assert max(map(len, lines[first:floor])) <= 131


def test_intervals_are_in_the_csv(both, run, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    document = run_json(run, "calibrate", both, *INTERVALS, "--report", tmp_path)
    with open(tmp_path / "table.csv", newline="") as stream:
        table = list(csv.DictReader(stream))
    for index, row in enumerate(document["rows"]):
        for name in SCORES:
            assert [float(table[5 + index][f"{name}_{end}"]) for end in ("low", "high")] == row["intervals"][name]
            assert table[index][f"{name}_low"] == ""


def test_no_intervals_where_they_are_not_wanted(both, run):
    document = run_json(run, "calibrate", both, *GRID)
    assert document["bootstrap"] is None
    assert all(row["intervals"] is row["difference"] is row["bias_floor"] is None for row in document["rows"])
    _, out, _ = run("calibrate", both, *GRID)
    assert "+-" not in out
    assert "bias floor" not in out


def test_no_intervals_by_default_where_they_would_take_minutes(both, run, monkeypatch):
    # 500 rows of 5 classes report.
    for name, limit in (("_MOST_RESAMPLED_NUMBERS", 2500), ("_MOST_RESAMPLED_ROWS", 500)):
        monkeypatch.setattr(intervals, name, limit - 1)
        document = run_json(run, "calibrate", both, *GRID[:2])
        assert document["bootstrap"] is None
        assert any("Pass resamples=200 to have them" in remark for remark in document["remarks"])
        assert run_json(run, "calibrate", both, *INTERVALS)["bootstrap"]["resamples"] == 40
        monkeypatch.setattr(intervals, name, limit)
    assert run_json(run, "calibrate", both, *GRID[:2])["bootstrap"]["resamples"] == 200


def test_choices_that_cannot_be_told_apart_are_said(both, run):
    document = run_json(run, "calibrate", both, *INTERVALS)
    focal = row_of(document, "focal-temperature", "ece")
    found = focal["difference"]["figures"]["ece_equal_mass"]
    assert found["verdict"] == "undecided"
    (remark,) = [remark for remark in document["remarks"] if "cannot be told apart" in remark]
    assert f"{found['low']:+.4f} to {found['high']:+.4f}, contains 0" in remark
    said = any("from that of a perfectly calibrated model" in remark for remark in document["remarks"])
    assert said == (focal["bias_floor"]["ece_equal_mass"]["p_value"] > 0.05)
    # The same cell twice has no difference to speak of.
    same = run_json(run, "calibrate", both, *INTERVALS, "--gammas", "0")
    assert not any("cannot be told apart" in remark for remark in same["remarks"])
    assert row_of(same, "focal-temperature", "ece")["difference"]["figures"]["nll"]["estimate"] == 0


def test_a_choice_that_is_better_beyond_noise_gets_its_mark(tmp_path, run):
    """Temperature scaling cannot mend what the focal map can: labels that follow the map with gamma = 5."""
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for part in ("val", "test"):
        logits = torch.randn(8000, 4, generator=generator, dtype=torch.float64)
        probs = focal_calibration_map(logits, 5.0)
        arrays[f"{part}_labels"] = torch.multinomial(probs, 1, generator=generator).squeeze(1).numpy()
        arrays[f"{part}_logits"] = logits.numpy()
    np.savez(tmp_path / "a.npz", **arrays)
    document = run_json(run, "calibrate", tmp_path / "a.npz", *INTERVALS, "--criterion", "nll")
    focal = document["rows"][document["chosen"]]
    assert focal["gamma"] == 5.0
    assert focal["difference"]["figures"]["nll"]["verdict"] == "better"
    assert not any("cannot be told apart" in remark for remark in document["remarks"])
    assert any("from that of a perfectly calibrated model" in remark for remark in document["remarks"])


# -- mistakes --------------------------------------------------------------------------------------------------------


def one_line(code, out, err):
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train",), "invalid choice"),
        (("calibrate",), "the following arguments are required: VAL"),
        (("calibrate", "missing.npz"), "missing.npz: expected a file, found nothing there"),
        (("evaluate", "missing.npz"), "missing.npz: expected a file, found nothing there"),
        (("calibrate", "BOTH", "--split", "0.5"), "expected one set to split, found val_* and test_*"),
        (
            ("calibrate", "SINGLE", "--split", "0.5", "--test", "BOTH"),
            "expected either a file of test rows or a share to split off, found both",
        ),
        (("calibrate", "SINGLE", "--split", "1"), "expected a number between 0 and 1, found '1'"),
        (("calibrate", "SINGLE", "--split", "0.5", "--seed", str(2**63)), "expected a whole number of at most 64 bits"),
        (("demo", "--seed", "one"), "expected a whole number of at most 64 bits, found 'one'"),
        (("calibrate", "SINGLE", "--split", "0.0001"), "to leave some on both sides, found 400"),
        (
            ("calibrate", "SINGLE", "--test-labels", "a.npy"),
            "expected a file of test rows for these labels, found none; say --test FILE",
        ),
        (("calibrate", "SINGLE", "--test", "missing.npz"), "missing.npz: expected a file"),
        (
            ("calibrate", "SINGLE", "--test", "SOME.npy"),
            "which tells where the labels are, found another; say --test-labels FILE.npy",
        ),
        (
            ("calibrate", "SINGLE", "--test", "OTHER", "--test-labels", "a.npy"),
            "expected no other file of labels, because a .npz file has them in it, found",
        ),
        (("calibrate", "SINGLE", "--test", "OTHER"), "expected the 5 classes of"),
        (
            ("calibrate", "SINGLE", "--input-kind", "probs"),
            "expected probs, found logits [400, 5], labels [400]; say --input-kind logits",
        ),
        (("calibrate", "SINGLE", "--bootstrap", "-1"), "expected a whole number of at least 0, found '-1'"),
        (("calibrate", "SINGLE", "--search", "all"), "argument --search: invalid choice: 'all'"),
        (("calibrate", "SINGLE", "--binning", "quantile"), "argument --binning: invalid choice: 'quantile'"),
        (("calibrate", "SINGLE", "--search", "nll", "--criterion", "ece"), "--search nll: expected --criterion nll"),
        (
            ("calibrate", "SINGLE", "--search", "line", "--method", "temperature"),
            "--search line: expected --method focal-temperature, found temperature",
        ),
        (
            ("calibrate", "SINGLE", "--search", "refine", "--method", "histogram"),
            "--search refine: expected --method focal-temperature or temperature, found histogram",
        ),
        (
            ("calibrate", "SOME.npy", "--labels", "LABELS", "--stream", "--search", "line"),
            "expected rows in memory for --search line, found rows that are read in parts",
        ),
        (
            ("calibrate", "SOME.npy", "--labels", "LABELS", "--stream", "--method", "histogram"),
            "expected rows in memory for --binning or --method histogram",
        ),
        (
            ("evaluate", "SINGLE", "--calibrator", "LABELED"),
            "expected a calibrator of one label per row",
        ),
        (("evaluate", "OTHER", "--calibrator", "BINARY"), "found one of one logit per row"),
        (("calibrate", "SINGLE", "--n-bins", "0"), "expected a whole number of at least 1, found '0'"),
        (("calibrate", "SINGLE", "--estimator", "adaptive"), "invalid choice: 'adaptive'"),
        (("calibrate", "SINGLE", "--gammas", "-1"), "expected numbers > -1, found -1"),
        (("calibrate", "SINGLE", "--gammas", "nan"), "expected numbers > -1, found nan"),
        (("calibrate", "SINGLE", "--gammas", "all"), "expected numbers or the word paper, found 'all'"),
        (("calibrate", "SINGLE", "--gammas", ","), "expected at least one number, found none"),
        (("calibrate", "SINGLE", "--temperatures", "1"), "expected LO:HI:STEP, found '1'"),
        (("calibrate", "SINGLE", "--temperatures", "0:5:0.1"), "expected 0 < LO <= HI and STEP > 0"),
        (("calibrate", "SINGLE", "--temperatures", "0.5:5:0.2"), "expected LO to be a multiple of STEP"),
        (("calibrate", "SINGLE", "--temperatures", "1:9e9:1"), "at most a million temperatures"),
        (("calibrate", "SINGLE", "--out", "no/such/folder/a.json"), "expected a file in an existing folder"),
        (("calibrate", "SINGLE", "--out", "."), "expected a file for --out, found a folder"),
        (("calibrate", "SINGLE", "--report", "SINGLE"), "expected a folder for --report, found a file"),
        (("evaluate", "SINGLE", "--calibrator", "missing.json"), "missing.json: No such file or directory"),
        (("evaluate", "SINGLE", "--calibrator", "SINGLE"), "expected a calibrator in JSON"),
        (("evaluate", "OTHER", "--calibrator", "SAVED"), "expected the 5 classes of"),
        (("evaluate", "PROBS", "--calibrator", "SAVED"), "expected logits, for which"),
        (("demo", "--out", "SINGLE"), "expected a folder for --out, found a file"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, both, single, tmp_path, run):
    logits, labels = sample(30, 0, n_classes=3)
    np.savez(tmp_path / "other.npz", logits=logits, labels=labels)
    np.savez(tmp_path / "probs.npz", probs=np.full((4, 5), 0.2), labels=np.arange(4))
    TemperatureScaling(temperatures=[1.0, 2.0]).fit_quietly(*sample(50, 0)).save(tmp_path / "saved.json")
    names = {
        "BOTH": both,
        "SINGLE": single,
        "OTHER": tmp_path / "other.npz",
        "PROBS": tmp_path / "probs.npz",
        "SAVED": tmp_path / "saved.json",
        "LABELED": tmp_path / "labeled.json",
        "BINARY": tmp_path / "binary.json",
        "LABELS": tmp_path / "labels.npy",
        "SOME.npy": tmp_path / "some.npy",
    }
    np.save(names["SOME.npy"], logits)
    np.save(names["LABELS"], labels)
    one, zeros = np.linspace(-2.0, 2.0, 20), np.arange(20) % 2
    MultiLabelScaling().fit(one[:, None], zeros[:, None]).save(names["LABELED"])
    HistogramBinning(n_bins=2).fit_quietly(one, zeros).save(names["BINARY"])
    assert words in one_line(*run(*(names.get(argument, argument) for argument in arguments)))


def test_a_failed_write_keeps_the_old_calibrator(both, run, tmp_path, monkeypatch):
    out = tmp_path / "calibrator.json"
    out.write_text("precious")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, _, err = run("calibrate", both, *GRID, "--out", out)
    assert code == 2
    assert "No space left on device" in err
    assert out.read_text() == "precious"


@pytest.mark.parametrize("option", ["VAL", "--labels", "--test", "--test-labels"])
def test_the_calibrator_does_not_overwrite_what_is_read(option, tmp_path, run):
    logits, labels = sample(60, 0)
    names = {"VAL": "v.npy", "--labels": "v_labels.npy", "--test": "t.npy", "--test-labels": "t_labels.npy"}
    paths = {name: tmp_path / file for name, file in names.items()}
    for name, path in paths.items():
        np.save(path, labels if "labels" in name else logits)
    # Under another name for the same file, too.
    (tmp_path / "link").symlink_to(paths[option])
    before = paths[option].read_bytes()
    arguments = [paths["VAL"], *(part for name, path in list(paths.items())[1:] for part in (name, path))]
    said = one_line(*run("calibrate", *arguments, *GRID, "--out", tmp_path / "link"))
    assert "expected another file for --out, found one that is read" in said
    assert paths[option].read_bytes() == before


def test_absurd_figures_fit_into_the_table(tmp_path, run):
    logits, labels = sample(400, 0)
    np.savez(tmp_path / "huge.npz", logits=logits.astype(np.float64) * 1e200, labels=labels)
    code, out, err = run("evaluate", tmp_path / "huge.npz")
    assert code == 0, err
    assert "e+" in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) < 120


def test_few_rows_per_bin_are_said(tmp_path, run):
    logits, labels = sample(6, 0)
    np.savez(tmp_path / "few.npz", logits=logits, labels=labels)
    code, out, err = run("calibrate", tmp_path / "few.npz", *GRID)
    assert code == 0, err
    assert "6 rows in 15 bins are about 0.4 per bin" in out


def test_a_closed_stdout_is_no_failure(both):
    # As in: focalkern evaluate FILE >&-
    command = [sys.executable, "-c", "import sys; sys.stdout = None; from focalkern.cli import main; sys.exit(main())"]
    done = subprocess.run([*command, "evaluate", str(both)], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("package", ["tabulate", "matplotlib", "sklearn"])
def test_a_missing_package_is_one_line_with_the_command(package, both, run, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name == "focalkern.plots"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    arguments = ("demo",) if package == "sklearn" else ("calibrate", both, "--report", tmp_path / "report")
    command = "pip install " + {"sklearn": "scikit-learn"}.get(package, package)
    assert command in one_line(*run(*arguments))


def test_the_reader_of_a_pipe_may_go(both):
    command = [sys.executable, "-m", "focalkern", "evaluate", str(both)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_files_are_written_before_the_reader_of_a_pipe_can_go(both, tmp_path):
    out, state = tmp_path / "calibrator.json", tmp_path / "state"
    np.save(tmp_path / "logits.npy", np.load(both)["test_logits"])
    np.save(tmp_path / "labels.npy", np.load(both)["test_labels"])
    command = [sys.executable, "-u", "-m", "focalkern", "calibrate", tmp_path / "logits.npy", *GRID, "--bootstrap", "0"]
    command += ["--out", out, "--state", state]
    with subprocess.Popen(map(str, command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.close()
    assert process.returncode == 0
    assert out.exists()
    assert not state.exists()


# -- the other commands ----------------------------------------------------------------------------------------------


def test_evaluate_prints_every_set(both, run):
    code, out, err = run("evaluate", both)
    assert (code, err) == (0, "")
    assert "400 validation rows" in out
    assert "500 test rows" in out
    assert out.count("uncalibrated") == 2


def test_info(run):
    code, out, err = run("info")
    assert (code, err) == (0, "")
    for words in (focalkern.__version__, torch.__version__, "CUDA kernels", "CPU kernels", "numpy"):
        assert words in out


def test_help_names_every_command_and_format(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in ("calibrate", "evaluate", "demo", "info"))
    code, out, _ = run("calibrate", "--help")
    assert code == 0
    for words in (".npz", ".npy", ".pt", ".safetensors", ".csv", "val_labels.npy", "--split", "equal_mass_interp"):
        assert words in out


def test_without_a_command_there_is_help_and_the_version_is_told(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out.startswith("usage: focalkern") and "sweep" in out
    assert run("--version") == (0, f"focalkern {focalkern.__version__}\n", "")


# -- the candidates --------------------------------------------------------------------------------------------------


def test_candidates_by_name_and_predictions_that_are_kept(both, run):
    document = run_json(run, "calibrate", both, "--bootstrap", "0", "--candidates", "structured-vector, temperature")
    names = [one["name"] for one in document["cross_validation"]["candidates"]]
    assert names == ["none", "temperature", "structured-vector"]
    document = run_json(run, "calibrate", both, "--bootstrap", "0", "--keep-predictions")
    assert [one["name"] for one in document["cross_validation"]["candidates"]] == ["none", "temperature", "spline"]
    assert document["verdict"]["costs"] == "No predicted class changes."
    code, out, err = run("calibrate", both, "--candidates", "platt")
    assert (code, out) == (2, "") and "expected names out of none, temperature, " in err and "got 'platt'" in err
    code, out, err = run("calibrate", both, "--keep-predictions", "--candidates", "isotonic")
    assert (code, out) == (2, "") and "isotonic may change predicted classes" in err
    code, out, err = run("calibrate", both, "--keep-predictions", "--method", "temperature")
    assert (code, out) == (2, "") and "--keep-predictions: expected --method auto beside it, found temperature" in err


def test_a_forest_gets_a_calibrated_model(run, tmp_path):
    """Votes of ten trees: probability 0 for the true class of some rows, where no calibration has an infinite NLL."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(800, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    votes = torch.multinomial((1.5 * logits).softmax(-1), 10, replacement=True, generator=generator)
    probs = torch.nn.functional.one_hot(votes, 4).float().mean(1)
    assert bool((probs.gather(1, labels.unsqueeze(1)) == 0).any())
    np.savez(tmp_path / "forest.npz", probs=probs.numpy(), labels=labels.numpy())
    command = ("calibrate", tmp_path / "forest.npz", "--split", "0.5", "--bootstrap", "0")
    code, out, err = run(*command, "--out", tmp_path / "c.json")
    assert (code, err) == (0, "")
    assert out.startswith(("Use spline ", "Use temperature scaling, T = "))
    assert "NLL inf -> " in out
    found = load_calibrator(tmp_path / "c.json").predict_proba(probs)
    assert float(found.min()) > 0


# -- the verdict -----------------------------------------------------------------------------------------------------


def test_the_verdict_is_said_first_and_what_is_saved_does_no_harm(both, run, tmp_path):
    out_file = tmp_path / "c.json"
    code, out, err = run("calibrate", both, "--bootstrap", "0", "--out", out_file)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("Use spline ")
    end = lines.index("")
    assert end <= 3 and max(map(len, lines[:end])) <= 100
    assert "on 500 test rows. Cross-validated NLL " in " ".join(lines[:end])
    assert lines[-7:] == [
        "Next:",
        f"  focalkern apply {out_file} {both} --out probs.npz",
        f"  focalkern card {out_file}",
        "In Python:",
        "  import focalkern as fk",
        f'  calibrator = fk.load_calibrator("{out_file}")',
        "  probs = calibrator.predict_proba(logits)",
    ]
    table = lines[end + 1 : lines.index("", end + 1)]
    assert max(map(len, table)) <= 100
    document = run_json(run, "calibrate", both, "--bootstrap", "0")
    assert document["verdict"]["use"] in " ".join(lines[:end])
    before, after = (document["rows"][place]["test"]["nll"] for place in (0, document["chosen"]))
    assert after < before
    chosen = document["rows"][document["chosen"]]
    assert load_calibrator(out_file).method == "spline" and chosen["method"].startswith("spline")
    evidence = json.loads(out_file.read_text())["fit"]["evidence"]
    assert evidence["candidates"] == document["cross_validation"]["candidates"]
    assert {name: evidence[name] for name in document["verdict"]} == document["verdict"]
    assert [(row["method"], row["criterion"]) for row in document["rows"][-2:]] == [
        ("temperature", "ece"),
        ("focal-temperature", "ece"),
    ]


def test_the_papers_choice_has_its_price_in_the_verdict(both, run):
    document = run_json(run, "calibrate", both, *INTERVALS)
    assert document["verdict"]["costs"].startswith("Against no calibration: NLL ")
    assert "; against temperature scaling: NLL " in document["verdict"]["costs"]


def test_the_demo(run, tmp_path, monkeypatch):
    for package in ("sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from focalkern.cli import _demo_data as networks
    from focalkern.cli import demo

    # Two epochs and a coarse grid: the same road as the real thing, in a fraction of its time.
    monkeypatch.setattr(networks, "_EPOCHS", 2)
    monkeypatch.setattr(demo, "PAPER_TEMPERATURES", [index * 0.25 for index in range(1, 21)])
    state = torch.get_rng_state()
    code, out, err = run("demo", "--out", tmp_path / "a")
    assert code == 0, err
    assert torch.equal(torch.get_rng_state(), state)
    assert err == ""
    for name in ("cross_entropy", "focal_loss_3", "focal_loss_1"):
        written = sorted(os.listdir(tmp_path / "a" / name))
        assert [one for one in written if one != "calibration_curve.png"] == [
            "calibrator.json",
            "grid_ece.png",
            "grid_nll.png",
            "logits.npz",
            "reliability_after.png",
            "reliability_before.png",
            "reliability_compared.png",
            "report.html",
            "report.json",
            "ridge.png",
            "table.csv",
        ]
        document = json.loads((tmp_path / "a" / name / "report.json").read_text())
        assert document["data"]["same_rows"] is False
        # It has learned something, and its saved logits give the figures of the table.
        assert document["rows"][0]["test"]["accuracy"] > 0.3
        evaluated = run_json(run, "evaluate", tmp_path / "a" / name / "logits.npz")
        assert evaluated["sets"][1]["rows"][0]["figures"] == pytest.approx(document["rows"][0]["test"])
    assert out.count("focal temperature, NLL-optimal") >= 3
    assert out.count("half the 95 % interval") == 1  # the legend
    index = tmp_path / "a" / "index.html"
    assert f"Report: {index}" in out
    page = index.read_text()
    for name in ("cross_entropy", "focal_loss_3", "focal_loss_1"):
        assert f'href="{name}/report.html"' in page
    monkeypatch.setattr(networks, "LOSSES", {"focal loss, gamma = 3": 3.0})
    run("demo", "--out", tmp_path / "b")
    assert (tmp_path / "a/focal_loss_3/table.csv").read_text() == (tmp_path / "b/focal_loss_3/table.csv").read_text()


def test_one_label_has_one_number_whatever_the_mode(both, run):
    """The automatic choice, a method by name and the calibrator in Python search alike; another search is named."""
    options = ("--bootstrap", "0")
    auto = run_json(run, "calibrate", both, *options)
    method = "focal-temperature"
    named = run_json(run, "calibrate", both, *options, "--method", method)
    expected, found = row_of(auto, method, "nll"), row_of(named, method, "nll")
    assert (found["gamma"], found["temperature"]) == (expected["gamma"], expected["temperature"])
    assert named["rows"][named["chosen"]] == found and found["search"] == "nll"
    with np.load(both) as arrays:
        fitted = FocalTemperatureScaling().fit_quietly(arrays["val_logits"], arrays["val_labels"])
    assert (fitted.gamma_, fitted.temperature_) == pytest.approx((found["gamma"], found["temperature"]), rel=1e-6)
    _, out, _ = run("calibrate", both, *options, "--method", "focal-temperature", "--search", "grid")
    assert "focal temperature (grid), NLL-optimal" in out and "focal temperature, NLL-optimal" not in out


def test_a_bound_of_the_search_is_shown_and_noted_once(both, run):
    for method in (("--method", "focal-temperature"), ()):
        _, out, _ = run("calibrate", both, *method, "--temperatures", "0.5:1:0.1", "--gammas", "0", "--bootstrap", "0")
        text = " ".join(out.split())
        assert text.count("ECE-optimal: temperature = 1 is the largest that was searched") <= 2
        if method:
            assert text.startswith("Use focal temperature scaling, gamma = 0, T = 1 (at the bound)")
            assert text.count("focal temperature (grid), NLL-optimal: temperature = 1 is the largest") == 1


def test_figures_on_the_rows_of_the_fit_are_called_optimistic_first(single, run):
    document = run_json(run, "calibrate", single, "--bootstrap", "0")
    assert document["data"]["same_rows"]
    _, out, _ = run("calibrate", single, "--bootstrap", "0")
    assert out.startswith("Optimistic, because the validation rows are the test rows: use ")


def test_only_the_command_knows_its_options():
    """The library names arguments of its functions in errors, remarks and docstrings."""
    package = Path(focalkern.__file__).parent
    parser = "".join(path.read_text() for path in (package / "cli").glob("*.py"))
    options = set(re.findall(r'"(--[a-z-]+)"', parser))
    assert {"--input-kind", "--bootstrap", "--split"} <= options
    for path in package.rglob("*.py"):
        if path.parent.name != "cli":
            text = path.read_text()
            assert [option for option in options if re.search(rf"{option}(?![a-z-])", text)] == [], path
