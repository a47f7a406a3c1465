"""The command's input: several sets, splits, pairs of files, probabilities, labels."""

import re

import cli_cases
import numpy as np
import pytest
import torch

from focalkern.calibrators import (
    FocalTemperatureScaling,
)

pytest.importorskip("tabulate", reason="tabulate is not installed")
from cli_cases import GRID, row_of, run_json, sample

both = cli_cases.both  # fixture
single = cli_cases.single  # fixture


def test_the_same_rows_cause_a_note(single, run):
    code, out, _ = run("calibrate", single, *GRID)
    assert code == 0
    assert "test         the same rows" in out
    assert out.count("Note: The test set is the validation set") == 1
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
        # The accuracies of the parts add up to the accuracy of the whole, so the parts are disjoint and complete.
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
    # The option requests a calibrator that was not chosen.
    out_file = tmp_path / "calibrator.json"
    code, _, err = run("calibrate", path, *GRID, "--criterion", "nll", "--out", out_file)
    assert code == 2
    assert "not written, because no calibrator was chosen" in err
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
        assert (code, out) == (2, "") and "pass --input-kind probs or, if they are logits, --input-kind logits" in err
    document = run_json(run, "calibrate", tmp_path / "a.csv", *GRID, "--input-kind", "logits")
    assert any("pass --input-kind probs" in remark for remark in document["remarks"])
    document = run_json(run, "calibrate", tmp_path / "a.csv", *GRID, "--input-kind", "probs")
    assert document["data"]["validation"]["input_kind"] == "probs"
    assert not any("--input-kind" in remark for remark in document["remarks"])


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
