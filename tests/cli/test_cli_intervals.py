"""The command's intervals and marks are the library's."""

import csv

import cli_cases
import numpy as np
import pytest
import torch

from focalkern import bootstrap
from focalkern.ops.calibration_map import focal_calibration_map
from focalkern.study import intervals

pytest.importorskip("tabulate", reason="tabulate is not installed")
from cli_cases import GRID, INTERVALS, SCORES, row_of, run_json

both = cli_cases.both  # fixture


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
    # Temperature scaling is compared with no calibration, focal temperature scaling with temperature scaling.
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
    # Logits that are twice too large: scaling lowers the loss, and not every difference between the scalings is
    # significant.
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
        assert any("Pass --bootstrap 200 to compute them" in remark for remark in document["remarks"])
        assert run_json(run, "calibrate", both, *INTERVALS)["bootstrap"]["resamples"] == 40
        monkeypatch.setattr(intervals, name, limit)
    assert run_json(run, "calibrate", both, *GRID[:2])["bootstrap"]["resamples"] == 200


def test_choices_without_a_significant_difference_are_reported(both, run):
    document = run_json(run, "calibrate", both, *INTERVALS)
    focal = row_of(document, "focal-temperature", "ece")
    found = focal["difference"]["figures"]["ece_equal_mass"]
    assert found["verdict"] == "undecided"
    (remark,) = [remark for remark in document["remarks"] if "cannot be distinguished" in remark]
    assert f"{found['low']:+.4f} to {found['high']:+.4f}, contains 0" in remark
    said = any("within chance of a perfectly calibrated model" in remark for remark in document["remarks"])
    assert said == (focal["bias_floor"]["ece_equal_mass"]["p_value"] > 0.05)
    # For the same cell twice, no difference is reported.
    same = run_json(run, "calibrate", both, *INTERVALS, "--gammas", "0")
    assert not any("cannot be distinguished" in remark for remark in same["remarks"])
    assert row_of(same, "focal-temperature", "ece")["difference"]["figures"]["nll"]["estimate"] == 0


def test_a_choice_that_is_better_beyond_noise_gets_its_mark(tmp_path, run):
    """Temperature scaling cannot correct labels that follow the focal map with gamma = 5."""
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
    assert not any("cannot be distinguished" in remark for remark in document["remarks"])
    assert any("within chance of a perfectly calibrated model" in remark for remark in document["remarks"])
