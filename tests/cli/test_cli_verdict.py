"""The command's verdict and candidates."""

import html
import json

import cli_cases
import numpy as np
import pytest
import torch

from focalkern.calibrators import (
    load_calibrator,
)

pytest.importorskip("tabulate", reason="tabulate is not installed")
from cli_cases import INTERVALS, run_json

from focalkern.cli._options import as_options

both = cli_cases.both  # fixture
single = cli_cases.single  # fixture


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
    assert (code, out) == (2, "") and "found isotonic; leave out isotonic, or --keep-predictions" in err
    code, out, err = run("calibrate", both, "--keep-predictions", "--method", "temperature")
    assert (code, out) == (2, "") and "--keep-predictions: expected only with --method auto, found temperature" in err


def test_a_forest_gets_a_calibrated_model(run, tmp_path):
    """Votes of ten trees: some true classes have probability 0, so the NLL of no calibration is infinite."""
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
    assert out.endswith("\n  calibrated = calibrator.predict_proba(probs)\n")
    code, card, _ = run("card", tmp_path / "c.json")
    assert "\ncalibrator = fk.load_calibrator(" in card and "\ncalibrated = calibrator.predict_proba(probs)\n" in card
    found = load_calibrator(tmp_path / "c.json").predict_proba(probs)
    assert float(found.min()) > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pass input_kind='probs'; of", "pass --input-kind probs; of"),
        ("or input_kind=probs.", "or --input-kind probs."),
        ("and keep_predictions=True is safer", "and --keep-predictions is safer"),
        ("(a scaling, or kind='scalar')", "(a scaling, or --keep-predictions)"),
        ("use fewer bins (n_bins=5).", "use fewer bins (--n-bins 5)."),
        ("Pass resamples=200, or resamples=0", "Pass --bootstrap 200, or --bootstrap 0"),
        ("criterion='nll' does not", "--criterion nll does not"),
        ("pass ignore_index=-1", "pass --ignore-index -1"),
        ("logits_key='*,!a b' takes", "--logits-key '*,!a b' takes"),
        ("floor=0.0005 gives every", "in Python, floor=0.0005 gives every"),
        ("widen=True extends the search", "in Python, widen=True extends the search"),
        ("none with keep_predictions=True.", "none with --keep-predictions."),
        ("Use criterion='brier', or", "Use --criterion brier, or"),
        ("T = 2, gamma=1", "T = 2, gamma=1"),
    ],
)
def test_words_of_the_command_are_its_options(text, expected):
    assert as_options(text) == as_options(expected) == expected


def test_notes_and_errors_name_options(run, tmp_path):
    logits, labels = cli_cases.sample(400, 0)
    np.savez(tmp_path / "scores.npz", logits=1 / (1 + np.exp(-logits)), labels=labels)
    options = ("--bootstrap", "0", "--candidates")
    out = " ".join(run("calibrate", tmp_path / "scores.npz", *options, "temperature")[1].split())
    assert "pass --input-kind probs; of sigmoid scores pass the logits." in out
    votes = np.exp(logits - logits.max(1, keepdims=True))
    votes[:9] = np.eye(5)[(labels[:9] + 1) % 5]
    np.savez(tmp_path / "votes.npz", probs=votes / votes.sum(1, keepdims=True), labels=labels)
    out = " ".join(run("calibrate", tmp_path / "votes.npz", *options, "temperature,structured-vector")[1].split())
    assert "probability 0: in Python, floor=" in out and "in Python, in Python" not in out
    code, _, err = run("calibrate", tmp_path / "scores.npz", *options, "isotonic", "--keep-predictions")
    assert (code, err.partition("; ")[2]) == (2, "leave out isotonic, or --keep-predictions\n")
    assert err.startswith("focalkern calibrate: --keep-predictions: expected only candidates that change no predicted ")
    assert "(none, temperature, focal-temperature, spline), found isotonic;" in err


def test_no_output_has_the_names_of_python(run, tmp_path):
    """The verdict, the notes, the report, the JSON, the calibrator's evidence and its card."""
    logits, labels = cli_cases.sample(300, 0)
    mixed = logits @ (np.eye(5) + 0.6 * np.roll(np.eye(5), 1, 0))  # which a matrix inverts
    np.savez(tmp_path / "mixed.npz", logits=mixed, labels=labels)
    command = ("calibrate", tmp_path / "mixed.npz", "--bootstrap", "0", "--candidates", "spline-matrix")
    code, out, _ = run(*command, "--report", tmp_path / "r", "--out", tmp_path / "c.json")
    card = run("card", tmp_path / "c.json")[1]
    written = [(tmp_path / name).read_text() for name in ("c.json", "r/report.html", "r/report.json")]
    assert code == 0
    for text in (out, card, *written):
        assert "none with --keep-predictions." in html.unescape(" ".join(text.split()))
        assert "keep_predictions" not in text


def test_a_column_without_a_label_begins_the_verdict(run, tmp_path):
    logits, labels = cli_cases.sample(400, 0)
    names = np.array(["ant", "bee", "cat", "dog", "eel"])
    rows = [f"{','.join(map(str, row))},0.5,{names[label]}\n" for row, label in zip(logits, labels, strict=True)]
    (tmp_path / "a.csv").write_text(f"{','.join(names)},light,label\n{''.join(rows)}")
    command = ("calibrate", tmp_path / "a.csv", "--split", "0.5", "--bootstrap", "0", "--candidates", "temperature")
    problem = " ".join(run(*command)[1].partition("\nUse ")[0].split())
    assert problem.startswith("Check the data first: ")
    assert problem.endswith("pass --logits-key '*,!light'; if it is, --logits-key '*' takes every column.")
    assert run(*command, "--logits-key", "ant,bee,cat,dog,eel")[1].startswith("Use temperature scaling")


def test_bins_without_a_scaling_have_no_temperature_and_one_bin_is_no_plural(single, run, tmp_path):
    options = ("--split", "0.5", "--bootstrap", "0", "--n-bins", "1", "--temperatures", "1:2:1", "--gammas", "0")
    code, out, err = run("calibrate", single, *options, "--method", "histogram", "--out", tmp_path / "c.json")
    assert (code, err) == (0, "")
    assert out.startswith("Use histogram binning: NLL ")
    assert "1 gamma x 2 temperatures from 1 to 2; ECE of 1 bin, equal_mass" in out
    assert "The options name the calibrator, without cross-validation." in " ".join(out.split())
    code, out, err = run("evaluate", single, "--n-bins", "1")
    assert out.startswith("400 rows of 5 classes, logits: ") and out.splitlines()[0].endswith("; 1 bin")


# -- accepted rows ---------------------------------------------------------------------------------------------------
def test_the_rows_that_can_be_accepted_are_one_line_of_the_verdict(both, run):
    arguments = ("calibrate", both, "--bootstrap", "0")
    plain, (code, out, err) = run(*arguments)[1].splitlines(), run(*arguments, "--accept-risk", "0.3")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    (line,) = [line for line in lines if line.startswith("Accept confidence >= ")]
    assert lines.index(line) == plain.index("")  # the last line of the verdict, before the table
    assert [other.replace(" --accept-risk 0.3", "") for other in lines if other != line] == plain
    document = run_json(run, *arguments, "--accept-risk", "0.3")
    found = document.pop("accept")
    assert document == run_json(run, *arguments)
    assert f">= {found['threshold']:.4f}: {found['coverage']:.1%} of the rows" in line
    assert found["risk"] < found["bound"] <= found["max_risk"] == 0.3
    none = run_json(run, *arguments, "--accept-risk", "0.001")["accept"]
    assert (none["threshold"], none["n_accepted"]) == (None, 0)
    assert "No threshold keeps the risk below 0.001" in run(*arguments, "--accept-risk", "0.001")[1]
    code, out, err = run(*arguments, "--accept-risk", "2")
    assert (code, out) == (2, "") and "--accept-risk: expected a number between 0 and 1, found '2'" in err


def test_the_bound_of_accepted_rows_needs_test_rows(single, run):
    code, out, err = run("calibrate", single, "--bootstrap", "0", "--accept-risk", "0.3")
    assert (code, err) == (0, "")
    assert "Note: The bound on accepted rows does not hold for new rows, because the calibrator was" in out


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


def test_figures_on_the_rows_of_the_fit_are_called_optimistic_first(single, run):
    document = run_json(run, "calibrate", single, "--bootstrap", "0")
    assert document["data"]["same_rows"]
    _, out, _ = run("calibrate", single, "--bootstrap", "0")
    assert out.startswith("Optimistic, because the validation rows are the test rows: use ")
