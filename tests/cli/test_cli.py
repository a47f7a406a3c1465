"""The command: its tables against the library, its files, and one line for every mistake."""

import json
import os
import re
from pathlib import Path

import cli_cases
import numpy as np
import pytest
import torch

import focalkern
from focalkern import files, metrics
from focalkern.calibrators import (
    FocalTemperatureScaling,
    TemperatureScaling,
    load_calibrator,
)
from focalkern.ops.calibration_grid import PAPER_GAMMAS
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.study import evaluate_rows

pytest.importorskip("tabulate", reason="tabulate is not installed")
from cli_cases import GRID, SCORES, row_of, run_json, sample

both = cli_cases.both  # fixture
single = cli_cases.single  # fixture


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
            # The criterion is the metric on the validation rows.
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
        # NLL takes another search than the default, because the temperatures are given.
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
    # The grid adds gamma = 0 for plain temperature scaling; focal temperature scaling does not choose it.
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
    # evaluate applies the calibrator and gets the same metrics.
    evaluated = run_json(run, "evaluate", both, "--calibrator", out)
    (test,) = [one for one in evaluated["sets"] if one["set"] == "test"]
    assert test["rows"][1]["figures"] == pytest.approx(row["test"])
    assert test["rows"][0]["figures"] == pytest.approx(document["rows"][0]["test"])


def test_huge_metrics_fit_into_the_table(tmp_path, run):
    logits, labels = sample(400, 0)
    np.savez(tmp_path / "huge.npz", logits=logits.astype(np.float64) * 1e200, labels=labels)
    code, out, err = run("evaluate", tmp_path / "huge.npz")
    assert code == 0, err
    assert "e+" in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) < 120


def test_few_rows_per_bin_cause_a_note(tmp_path, run):
    logits, labels = sample(6, 0)
    np.savez(tmp_path / "few.npz", logits=logits, labels=labels)
    code, out, err = run("calibrate", tmp_path / "few.npz", *GRID)
    assert code == 0, err
    assert "6 validation rows in 15 bins are about 0.4 per bin" in out


def test_a_single_row_is_singular(tmp_path, run):
    logits, labels = sample(400, 0)
    one = {"test_logits": logits[:1], "test_labels": labels[:1]}
    np.savez(tmp_path / "one.npz", val_logits=logits, val_labels=labels, **one)
    code, out, err = run("calibrate", tmp_path / "one.npz", *GRID)
    assert code == 0, err
    text = " ".join(out.split())
    assert "on 1 test row. " in text and "test 1 row of 5 classes" in text
    assert "Note: 1 test row in 15 bins is about 0.067 per bin" in text
    assert "1 rows" not in text and "1 test rows" not in text


# -- the other commands ----------------------------------------------------------------------------------------------
def test_evaluate_prints_every_set(both, run):
    code, out, err = run("evaluate", both)
    assert (code, err) == (0, "")
    assert "400 validation rows" in out
    assert "500 test rows" in out
    assert out.count("uncalibrated") == 2


def test_evaluate_notes_rows_of_the_fit(both, single, tmp_path, run):
    def notes(source, *options):
        assert run("calibrate", source, *options, *GRID, "--out", path)[0] == 0
        return [document["remarks"] for document in run_json(run, "evaluate", source, "--calibrator", path)["sets"]]

    path = tmp_path / "c.json"
    words = "{} was fitted to {}, so its metrics on them are optimistic. Measure it on other rows."
    assert words.format(path, "300 of these 400 rows") in notes(single, "--split", "0.75")[0]
    assert words.format(path, "these 400 rows") in notes(single)[0]
    of_validation, of_test = notes(both)
    assert words.format(path, "these 400 rows") in of_validation
    assert not any("was fitted to" in words for words in of_test)
    same_rows = run_json(run, "evaluate", single, "--calibrator", path)["sets"][0]["remarks"]
    assert words.format(path, "these 400 rows") in same_rows
    # The content counts: the same rows under another name, and other rows under the same name.
    copied = tmp_path / "copied.npz"
    assert run("calibrate", single, "--split", "0.75", *GRID, "--out", path)[0] == 0
    copied.write_bytes(Path(single).read_bytes())
    document = run_json(run, "evaluate", copied, "--calibrator", path)
    assert words.format(path, "300 of these 400 rows") in document["sets"][0]["remarks"]
    assert run("calibrate", copied, *GRID, "--out", path)[0] == 0
    arrays = dict(np.load(copied))
    np.savez(copied, **{**arrays, "logits": arrays["logits"] + np.float32(0.5)})
    assert not any(
        "was fitted to" in one for one in run_json(run, "evaluate", copied, "--calibrator", path)["sets"][0]["remarks"]
    )
    assert run("calibrate", both, *GRID, "--out", path)[0] == 0
    loaded = load_calibrator(path)
    (rows, _) = files.read_sets(both).values()
    assert words.format("the calibrator", "these 400 rows") in evaluate_rows(rows, loaded).remarks
    loaded.fit(rows.input[:300], rows.labels[:300])
    assert not any("was fitted to" in words for words in evaluate_rows(rows, loaded).remarks)


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


@pytest.mark.parametrize("command", ["", "calibrate", "evaluate", "apply", "card", "sweep", "demo", "info"])
def test_help_fits_into_80_columns(run, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(*command.split(), "--help")
    assert code == 0
    assert [line for line in out.splitlines() if len(line) > 79] == []


def test_without_a_command_there_is_help_and_the_version_is_told(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out.startswith("usage: focalkern") and "sweep" in out
    assert run("--version") == (0, f"focalkern {focalkern.__version__}\n", "")


def test_the_demo(run, tmp_path, monkeypatch):
    for package in ("sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    from focalkern.cli import _demo_data as networks
    from focalkern.cli import demo

    # Two epochs and a coarse grid: the same steps as a full run, in a fraction of the time.
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
        # The network has learned, and its saved logits give the metrics of the table.
        assert document["rows"][0]["test"]["accuracy"] > 0.3
        evaluated = run_json(run, "evaluate", tmp_path / "a" / name / "logits.npz")
        assert evaluated["sets"][1]["rows"][0]["figures"] == pytest.approx(document["rows"][0]["test"])
        with np.load(tmp_path / "a" / name / "logits.npz") as arrays:
            probs = torch.from_numpy(arrays["test_logits"]).double().softmax(-1)
            correct = probs.argmax(-1) == torch.from_numpy(arrays["test_labels"])
            gap = float(probs.amax(-1).mean() - correct.double().mean())
        assert f"{gap:+.4f}" in out.partition("Mean confidence minus accuracy")[2]
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


def test_only_the_command_knows_its_options():
    """In errors, remarks and docstrings, the library names arguments of its functions."""
    package = Path(focalkern.__file__).parent
    parser = "".join(path.read_text() for path in (package / "cli").glob("*.py"))
    options = set(re.findall(r'"(--[a-z-]+)"', parser))
    assert {"--input-kind", "--bootstrap", "--split"} <= options
    for path in package.rglob("*.py"):
        if path.parent.name != "cli":
            text = path.read_text()
            assert [option for option in options if re.search(rf"{option}(?![a-z-])", text)] == [], path


def test_the_longest_name_of_a_file_can_be_written(run, single, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "ü" * 125 + ".json"  # 255 bytes
    code, _, err = run("calibrate", single, "--bootstrap", "0", "--gammas", "0", "--out", name)
    assert (code, err) == (0, "")
    assert (tmp_path / name).is_file()


def test_a_name_that_begins_with_a_dash_is_no_option_in_the_next_commands(run, single, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("calibrate", single, "--bootstrap", "0", "--gammas", "0", "--out=-c.json")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("  focalkern card")]
    assert run(*line.split()[1:])[0] == 0


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="no pipes by name")
def test_a_device_or_a_pipe_gets_the_bytes_and_stays(run, single, tmp_path):
    pipe = tmp_path / "pipe"  # /dev/null belongs to the machine
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    unnamed, writer = os.pipe()  # as /dev/stdout in front of a "|"
    for name, end in ((pipe, reader), (f"/dev/fd/{writer}", unnamed)):
        code, _, err = run("calibrate", single, "--bootstrap", "0", "--gammas", "0", "--out", name)
        assert (code, err) == (0, "")
        assert json.loads(os.read(end, 1 << 16))["format"] == "focalkern-calibrator"
    assert pipe.is_fifo()
    for number in (reader, unnamed, writer):
        os.close(number)


def test_a_long_name_of_a_network_does_not_widen_the_table(run, single, tmp_path):
    path = single.rename(tmp_path / f"{'n' * 200}.npz")
    code, out, _ = run("sweep", path, "--jobs", "1")
    assert code == 0
    table = out.partition("mean rank")[0].splitlines()
    assert max(map(len, table)) <= 110
