"""compare_calibrators and its verdict."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from compare_cases import FAST, Half, sample

import focalkern as fk
from focalkern.calibrators import FocalTemperatureScaling, RobustTemperatureScaling
from focalkern.calibrators._candidates import DEFAULT_CANDIDATES
from focalkern.calibrators._verdict import describe_method
from focalkern.files import LogitSet
from focalkern.study.compare import run_study

pytest.importorskip("tabulate", reason="tabulate is not installed")


@pytest.fixture(scope="module")
def study():
    return fk.compare_calibrators(sample(400, 0), sample(500, 1), resamples=40, folds=4)


def test_accepted_rows_are_those_of_accept_threshold():
    test = sample(500, 1)
    study = fk.compare_calibrators(sample(400, 0), test, accept_risk=0.3, **FAST)
    expected = fk.accept_threshold(study.calibrator.predict_proba(test[0]), test[1], max_risk=0.3)
    assert study.accept.threshold == pytest.approx(expected.threshold, abs=1e-12)  # as probabilities of batches are
    assert study.accept == replace(expected, threshold=study.accept.threshold)
    assert 0 < expected.n_accepted < 500
    assert study.verdict.accepts == str(expected) == str(study.verdict).splitlines()[-1]
    assert study.verdict.sentences()[-1] == str(expected)
    assert fk.compare_calibrators(sample(400, 0), test, **FAST).accept is None
    for value, error in ((1.5, ValueError), ("much", TypeError)):
        with pytest.raises(error, match="compare_calibrators: accept_risk must be"):
            fk.compare_calibrators(sample(400, 0), accept_risk=value)


def test_the_next_step_of_probabilities_takes_probabilities():
    logits, labels = sample(400, 0)
    study = fk.compare_calibrators(
        (logits.softmax(-1), labels), input_kind="probs", candidates=["temperature"], resamples=0
    )
    assert "\nNext:\n  calibrated = study.calibrator.predict_proba(probs)\n" in str(study)


def test_the_verdict_of_over_confident_rows_is_temperature_scaling(study):
    fitted = RobustTemperatureScaling().fit(*sample(400, 0))
    assert isinstance(study.calibrator, RobustTemperatureScaling)
    assert study.calibrator.temperature_ == pytest.approx(fitted.temperature_, rel=1e-6)
    lines = str(study.verdict).splitlines()
    assert 1 <= len(lines) <= 3
    assert lines[0].startswith(f"Use temperature scaling, T = {fitted.temperature_:.4g}: NLL ")
    assert "on 500 test rows" in " ".join(lines)
    assert max(map(len, lines)) <= 100
    assert re.match(r"Cross-validated NLL 0\.\d+ \+-0\.\d+ below no calibration", study.verdict.because)
    assert study.verdict.costs == "No predicted class changes."
    assert str(study).startswith(f"{study.verdict}\nNext:\n  probs = study.calibrator.predict_proba(logits)\n")
    before, after = study.results[0].test["nll"], study.chosen.test["nll"]
    assert f"NLL {before:.4f} -> {after:.4f}" in lines[0]


def test_the_table_keeps_the_papers_rows(study):
    rows = [(row.method, row.criterion, row.search) for row in study.results]
    assert [row[:2] for row in rows] == [
        ("none", None),
        ("temperature", None),
        ("spline", None),
        ("spline-vector", None),
        ("spline-matrix", None),
        ("focal-temperature", "nll"),
        ("temperature", "ece"),
        ("focal-temperature", "ece"),
    ]
    paper = FocalTemperatureScaling(search="grid", criterion="ece", estimator="equal_mass").fit(*sample(400, 0))
    assert (study.results[-1].gamma, study.results[-1].temperature) == (paper.gamma_, paper.temperature_)
    text = study.table()
    assert max(map(len, text.splitlines())) <= 100
    assert "equal_width" in text and "equal_mass" not in text
    assert "ECE-optimal" not in text
    assert "classwise" in study.table(all=True) and "focal temperature, ECE-optimal" in study.table(all=True)


def test_a_study_for_machines_and_for_notebooks(study, tmp_path):
    document = json.loads(json.dumps(study.to_dict(), allow_nan=False))
    assert document["verdict"]["use"] == study.verdict.use
    assert document["rows"][document["chosen"]]["method"] == "temperature"
    candidates = document["cross_validation"]["candidates"]
    assert [one["name"] for one in candidates] == list(DEFAULT_CANDIDATES)
    assert [one["chosen"] for one in candidates] == [False, True, False, False, False]
    assert candidates[0]["excluded"] is None
    html = study._repr_html_()
    assert "Use temperature scaling" in html and "<table" in html and html.count("<tr") == 9
    assert [row.split("<")[0] for row in html.split('role="rowheader">')[1:]] == [
        "uncalibrated",
        "\u2192 temperature",
        "spline",
        "spline-vector",
        "spline-matrix",
        "focal temperature, NLL-optimal",
        "temperature, ECE-optimal",
        "focal temperature, ECE-optimal",
    ]
    shown = html.replace("NLL-optimal", "").replace("ECE-optimal", "")
    assert "-&gt;" not in shown and not re.search(r">-[.\d]", shown)  # minus signs are typographic


def test_a_data_frame(study):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = study.to_dataframe()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 8
    assert frame.loc[frame.chosen, "method"].tolist() == ["temperature"]
    low, high = frame.loc[1, ["nll_low", "nll_high"]]
    assert low < frame.loc[1, "nll"] < high


def test_the_report_is_written(study, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    files = study.write_report(tmp_path / "report", title="A title")
    assert {"report.html", "report.json", "table.csv"} <= {file.name for file in files}
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == study.to_dict()


def test_calibrated_rows_are_left_as_they_are():
    study = fk.compare_calibrators(sample(300, 0, temperature=1.0), sample(300, 1, temperature=1.0), **FAST)
    assert study.chosen.method == "none"
    assert str(study.verdict).startswith("Use no calibration: NLL ")
    logits, _ = sample(5, 2)
    assert torch.allclose(study.calibrator.predict_proba(logits), logits.softmax(-1))


def test_test_rows_never_choose():
    validation = sample(300, 0)
    studies = [fk.compare_calibrators(validation, sample(200, 1, temperature=t), **FAST) for t in (0.5, 2.0)]
    assert studies[0].chosen.method == studies[1].chosen.method != "none"
    assert studies[0].calibrator.temperature_ == studies[1].calibrator.temperature_
    assert studies[0].cross_validation.table() == studies[1].cross_validation.table()


def test_ece_is_the_papers_choice_with_its_price():
    study = fk.compare_calibrators(sample(300, 0), sample(300, 1), criterion="ece", resamples=30, folds=3)
    assert (study.chosen.method, study.chosen.criterion, study.chosen.search) == ("focal-temperature", "ece", "grid")
    words = describe_method(study.cross_validation.winner.name)
    assert study.verdict.because == f"The criterion is the ECE; the NLL chooses {words}."
    costs = study.verdict.costs
    assert costs.startswith("Against no calibration: NLL ") and "; against temperature scaling: NLL " in costs
    plain, place = study.results[1], study.results.index(study.chosen)
    interval = study.intervals.between(place, 1, "nll")
    difference = study.chosen.test["nll"] - plain.test["nll"]
    half = max(interval.high - difference, difference - interval.low)
    assert f"NLL {difference:+.4f} +-{half:.4f}" in costs


def test_brier_is_a_criterion():
    study = fk.compare_calibrators(sample(300, 0), sample(300, 1), criterion="brier", **FAST)
    assert study.cross_validation.criterion == "brier"
    assert study.results[1].criterion == "brier"
    assert "Brier" in study.verdict.use


def test_few_rows_cause_a_warning():
    study = fk.compare_calibrators(sample(12, 3, temperature=1.3), sample(300, 1), **FAST)
    assert any("rows are few" in warning or "too few" in warning for warning in study.verdict.warnings)
    changing = fk.compare_calibrators(mixed(100, 0), mixed(300, 1), candidates=("spline-matrix",), **FAST)
    assert changing.chosen.method == "spline-matrix"
    assert "keep_predictions=True is safer" in changing.verdict.warnings[0]
    changed = int((changing.calibrator.changed(mixed(300, 1)[0])).sum())
    before, after = changing.results[0].test["accuracy"], changing.chosen.test["accuracy"]
    costs = f"{changed} of 300 predictions change (accuracy {after - before:+.4f}), none with keep_predictions=True."
    assert changing.verdict.costs == costs


def mixed(n, seed):
    """Logits after a mixture of classes, which a matrix inverts."""
    logits, labels = sample(n, seed)
    return logits @ (torch.eye(4, dtype=torch.float64) + 0.6 * torch.eye(4, dtype=torch.float64).roll(1, 0)), labels


def test_predictions_can_be_kept():
    kept = fk.compare_calibrators(mixed(300, 0), mixed(300, 1), keep_predictions=True, **FAST)
    assert [one.name for one in kept.cross_validation.entries] == ["none", "temperature", "spline"]
    assert kept.verdict.costs == "No predicted class changes."
    free = fk.compare_calibrators(mixed(300, 0), mixed(300, 1), **FAST)
    assert free.chosen.method in ("spline-vector", "spline-matrix")
    assert "For data from another source, keep_predictions=True is safer." in free.verdict.notes()
    with pytest.raises(ValueError, match="compare_calibrators: candidates: isotonic may change predicted classes"):
        fk.compare_calibrators(mixed(300, 0), candidates=("isotonic",), keep_predictions=True)


def test_one_row_is_too_few():
    alone = fk.compare_calibrators((np.array([[1.0, 0.0]]), np.array([0])), **FAST)
    assert alone.chosen.method == "none" and "too few for cross-validation" in alone.verdict.because


def test_an_impossible_row_leaves_what_has_a_floor():
    logits, labels = sample(100, 0)
    logits[3, labels[3]] = -math.inf
    study = fk.compare_calibrators((logits, labels), **FAST)
    assert study.chosen.method in ("temperature", "spline")
    assert math.isfinite(study.chosen.test["nll"])
    assert "gives probability 0 to classes that occur in other rows" in " ".join(study.verdict.warnings)
    json.dumps(study.to_dict(), allow_nan=False)
    assert "Validation and test rows are the same" in str(study.verdict) or study.verdict.warnings


def test_a_candidate_from_elsewhere():
    study = fk.compare_calibrators(sample(300, 0), sample(300, 1), candidates={"half": Half()}, **FAST)
    assert isinstance(study.calibrator, Half)
    assert study.verdict.use.startswith("half: NLL ")
    assert [row.method for row in study.results] == ["none", "half", "temperature", "focal-temperature"]
    logits, labels = sample(300, 1)
    assert study.chosen.test["nll"] == pytest.approx(float(fk.metrics.nll((logits / 2).softmax(-1), labels)))
    study.table()
    json.dumps(study.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"validation": 3}, TypeError, "validation must be a pair"),
        ({"criterion": "mce"}, ValueError, "criterion must be one of nll, brier, ece"),
        ({"estimator": "guo"}, ValueError, "estimator must be one of"),
        ({"folds": 1}, ValueError, "folds must be at least 2, got 1"),
        ({"candidates": ("platt",)}, ValueError, "got 'platt'"),
        ({"candidates": {"platt": 3}}, TypeError, "platt must have fit and predict_proba"),
        ({"test": (np.zeros((2, 7)), np.zeros(2, int))}, ValueError, "test must have logits of 4 classes"),
        ({"validation": (np.zeros((2, 4)), np.array([0, 4]))}, ValueError, "class numbers from 0 to 3"),
    ],
)
def test_mistakes(arguments, error, words):
    options = {"validation": sample(20, 0), **FAST, **arguments}
    with pytest.raises(error, match=words):
        fk.compare_calibrators(options.pop("validation"), **options)


# -- the texts and files of a verdict ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["temperature scaling", "x" * 90, " ".join(["word"] * 70), "y" * 500])
@pytest.mark.parametrize("because", ["", "Because.", " ".join(["because"] * 20) + "."])
@pytest.mark.parametrize("costs", ["", "Costs " + "much " * 25 + "."])
def test_a_verdict_is_three_lines_of_a_hundred_columns_and_loses_nothing(use, because, costs):
    verdict = fk.Verdict(use, because, costs, ("one warning", "another"))
    lines = str(verdict).splitlines()
    assert 1 <= len(lines) <= 3 and max(map(len, lines)) <= 100
    assert str(verdict).startswith("Use ")
    said = " ".join(lines)
    for sentence in (because, costs, "One warning.", "Another."):
        assert not sentence or (sentence in said) != (sentence in verdict.notes())


def test_a_study_saves_its_calibrator_with_the_evidence(study, tmp_path):
    study.save(tmp_path / "calibrator.json")
    loaded = fk.load_calibrator(tmp_path / "calibrator.json")
    assert loaded.temperature_ == study.calibrator.temperature_
    evidence = json.loads((tmp_path / "calibrator.json").read_text())["fit"]["evidence"]
    assert (evidence["use"], evidence["because"]) == (study.verdict.use, study.verdict.because)
    assert evidence["candidates"] == study.cross_validation.table() and evidence["folds"] == 4
    (chosen,) = [row for row in evidence["table"] if row["chosen"]]
    assert chosen["test"] == study.chosen.test and len(evidence["table"]) == len(study.results)
    assert evidence["data"]["test"]["n_samples"] == 500 and not evidence["data"]["same_rows"]
    study.calibrator.save(tmp_path / "alone.json")
    alone = json.loads((tmp_path / "alone.json").read_text())
    assert "evidence" not in alone["fit"]
    other = fk.compare_calibrators(sample(300, 0), sample(300, 1), candidates={"half": Half()}, **FAST)
    with pytest.raises(TypeError, match="save needs a calibrator of this library, but the one to use is a Half"):
        other.save(tmp_path / "no.json")


def test_the_legend_says_what_a_richer_candidate_is_compared_with():
    for candidates, said in ((["temperature"], False), (["temperature", "structured-vector"], True)):
        table = str(fk.compare_calibrators(sample(200, 0), sample(200, 1), candidates=candidates, resamples=10).table())
        assert ("other candidates, with temperature scaling" in " ".join(table.split())) == said


def test_pixels_are_the_flattened_rows():
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (8, 5, 6), generator=generator)
    logits = 3 * torch.randn(8, 3, 5, 6, generator=generator)
    logits += 3 * torch.nn.functional.one_hot(labels, 3).movedim(-1, 1)
    labels[:, 0] = 255
    rows = logits.movedim(1, -1).reshape(-1, 3), labels.flatten()
    counts = rows[1] != 255
    options = {"resamples": 0, "candidates": ["none", "temperature"]}
    expected = fk.compare_calibrators((rows[0][counts], rows[1][counts]), **options).to_dict()["rows"]
    for pair in ((logits, labels), (logits.numpy(), labels.numpy()), rows):
        assert fk.compare_calibrators(pair, ignore_index=255, **options).to_dict()["rows"] == expected
    words = r"compare_calibrators: validation: labels: .* found 255 in pixel \[0, 0, 0\].*; pass ignore_index=255"
    with pytest.raises(ValueError, match=words):
        fk.compare_calibrators((logits, labels))
    samples = fk.study.share_rows(rows[0][counts], rows[1][counts], fk.study.Processes())
    with pytest.raises(
        ValueError, match=r"ignore_index goes with a pair .*, got .* as validation; pass it to read_sets"
    ):
        fk.compare_calibrators(samples, ignore_index=255)


@pytest.mark.parametrize("brief", [False, True])
def test_a_verdict_begins_with_the_rows_that_both_sets_have(brief):
    (logits, labels), (others, other_labels) = sample(400, 0), sample(400, 1)
    validation = LogitSet(logits, labels, "logits", "val", "a.npz")
    both = torch.cat([others, logits[:100]]), torch.cat([other_labels, labels[:100]])
    found = run_study(validation, LogitSet(*both, "logits", "test", "b.npz"), brief=brief, **FAST)
    first = "100 of the 500 test rows are also validation rows, with the same label, so the metrics are optimistic"
    assert found.verdict.check_data
    lines = str(found.verdict).splitlines()
    assert " ".join(lines[:2]).startswith(f"Check the data first: {first}")
    assert lines[2].startswith("Use ")
    assert [words for words in (*found.verdict.warnings, *found.remarks) if "also validation" in words] == [
        f"{first}: use sets without common rows."
    ]
    apart = run_study(validation, LogitSet(others, other_labels, "logits", "test", "b.npz"), brief=brief, **FAST)
    assert not apart.verdict.check_data
    # All rows: the verdict calls itself optimistic.
    equal = run_study(validation, replace(validation, name="test"), brief=brief, **FAST)
    assert equal.verdict.optimistic and not equal.verdict.check_data


def test_the_default_device_changes_nothing(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    logits, labels = sample(200, 0)
    path = tmp_path / "rows.npz"
    np.savez(path, logits=logits, labels=labels)
    spline = fk.SplineScaling().fit(logits, labels)
    (tmp_path / "report").mkdir()

    def results():
        study = fk.compare_calibrators((logits, labels), candidates=["none", "spline"], resamples=20)
        files = study.write_report(tmp_path / "report")
        fk.study.apply_calibrator(spline, str(path), tmp_path / "probs.npz")
        found = [re.sub(rb"..:.. UTC", b"", file.read_bytes()) for file in files if file.suffix in (".html", ".csv")]
        found.append(dict(np.load(tmp_path / "probs.npz"))["probs"].tobytes())
        found.append(str(fk.study.evaluate_rows(fk.files.read_sets(path)[""], spline)))
        return [*found, fk.sweep_one(path), fk.plots.calibration_curve(spline)._repr_png_()]

    expected = results()
    with torch.device("meta"):
        assert results() == expected
