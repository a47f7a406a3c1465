"""The card of a saved calibrator, whose contents all come from the file."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern.cli import main
from focalkern.study import calibrator_card


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with logits.npz and the calibrator.json of a study of them."""
    folder = tmp_path_factory.mktemp("card")
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for part, rows in (("val", 400), ("test", 350)):
        logits = torch.randn(rows, 4, generator=generator) * 2
        arrays[f"{part}_labels"] = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1).numpy()
        arrays[f"{part}_logits"] = (logits * 2).numpy()
    np.savez(folder / "logits.npz", **arrays)
    pytest.importorskip("tabulate", reason="tabulate is not installed")
    command = ["calibrate", str(folder / "logits.npz"), "--bootstrap", "30", "--keep-predictions"]
    assert main([*command, "--out", str(folder / "calibrator.json")]) == 0
    return folder


def rows_of(card, heading):
    """The cells of the first table below a heading."""
    _, _, part = card.partition(f"## {heading}\n\n")
    lines = part.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_card_says_data_date_rows_and_metrics_with_intervals(saved):
    path = saved / "calibrator.json"
    card, evidence = calibrator_card(path), json.loads(path.read_text())["fit"]["evidence"]
    assert evidence["made"].endswith(" UTC") and f"| made | {evidence['made']} |" in card
    assert f"`{saved / 'logits.npz'}`" in card
    assert [row[4] for row in rows_of(card, "Data")[2:]] == ["400", "350"]
    assert "95 % intervals of 30 bootstrap resamples" in card and "on 350 test rows" in card
    chosen = next(row for row in evidence["table"] if row["chosen"])
    scores = next(row for row in rows_of(card, "Evaluation") if row[0].startswith("**"))[1:]
    for cell, name in zip(scores, ("accuracy", "nll", "brier", "ece_equal_width"), strict=True):
        low, high = chosen["intervals"][name]
        assert cell == f"{chosen['test'][name]:.4f} ({low:.4f} to {high:.4f})"
    assert "| predicted classes | unchanged |" in card
    for heading in ("Details", "Uses", "How to start", "Data", "Evaluation", "Limits", "Source"):
        assert f"\n## {heading}\n" in card
    assert card.count("\n- Not for: ") == 3
    assert card.startswith("---\nlibrary_name: focalkern\n")


@pytest.mark.parametrize("name", ["plain.json", 'it\'s "new".json', "a\\next.json"])
def test_the_python_of_the_card_runs(saved, tmp_path, name):
    shutil.copy(saved / "calibrator.json", tmp_path / name)
    code = calibrator_card(tmp_path / name).partition("```python\n")[2].partition("```")[0]
    names = {"logits": np.load(saved / "logits.npz")["test_logits"]}
    exec(code, names)
    assert np.allclose(names["probs"].sum(1), 1)


def test_a_calibrator_without_evidence_says_what_is_not_recorded(tmp_path):
    labels = torch.arange(30) % 3
    logits = 4 * torch.eye(3)[(labels + (torch.arange(30) % 5 == 0)) % 3]
    fk.TemperatureScaling().fit(logits, labels).save(tmp_path / "alone.json")
    card = calibrator_card(tmp_path / "alone.json")
    assert "| made | not recorded |" in card and "## Data\n\nNot recorded." in card
    assert "arXiv 1706.04599" in card
    names = np.array(["cat", "dog\nor wolf", "eel"])[labels.numpy()]
    fk.TemperatureScaling().fit(logits.numpy(), names).save(tmp_path / "named.json")
    assert "| classes | cat, dog or wolf, eel |" in calibrator_card(tmp_path / "named.json")


@pytest.mark.parametrize(
    "evidence",
    [
        {"data": "CIFAR-10", "table": "none", "because": 3},
        {"data": {"validation": {"source": "a.npz"}}, "table": [{"chosen": True}], "warnings": None},
        {"data": [], "table": [1], "estimator": None, "costs": {}},
    ],
)
def test_evidence_of_another_form_is_not_recorded(evidence, tmp_path):
    logits, labels = torch.randn(90, 3), torch.arange(90) % 3
    fk.TemperatureScaling().fit_quietly(logits, labels).save(tmp_path / "c.json", evidence=evidence)
    card = calibrator_card(tmp_path / "c.json")
    assert "# c.json: temperature scaling\n" in card
    assert "## Data\n\nNot recorded." in card and "## Evaluation\n\nNot recorded." in card


def test_any_value_of_the_evidence_gives_a_card(saved, tmp_path):
    document = json.loads((saved / "calibrator.json").read_text())
    for part, key in list(places(document["fit"]["evidence"])):
        right = part[key]
        for value in (None, [], {}, 3, "x", [None], [{}], 10**400):
            part[key] = value
            (tmp_path / "c.json").write_text(json.dumps(document))
            assert "\n## Evaluation\n" in calibrator_card(tmp_path / "c.json")
        part[key] = right


def places(part):
    """Every (container, key) of the evidence, the first of each list."""
    for key in part if isinstance(part, dict) else range(min(1, len(part))):
        yield part, key
        if isinstance(part[key], dict | list):
            yield from places(part[key])


def test_metrics_of_the_rows_of_the_fit_are_called_optimistic(tmp_path):
    labels = torch.arange(600) % 3
    logits = 4.0 * torch.eye(3)[(labels + (torch.arange(600) % 5 == 0)) % 3]
    fk.compare_calibrators((logits, labels), resamples=0).save(tmp_path / "same.json")
    card = calibrator_card(tmp_path / "same.json")
    assert "600 rows of the fit (optimistic)" in card
    assert [row[0] for row in rows_of(card, "Data")[2:]] == ["validation and test"]


def test_the_command_prints_or_writes_the_card(saved, tmp_path, capsys):
    path = str(saved / "calibrator.json")
    assert main(["card", path]) == 0
    assert capsys.readouterr().out == calibrator_card(path)
    assert main(["card", path, "--out", str(tmp_path / "card.md")]) == 0
    assert (tmp_path / "card.md").read_text() == calibrator_card(path)
    before = (saved / "calibrator.json").read_text()
    assert main(["card", path, "--out", path]) == 2
    assert "expected another file for --out" in capsys.readouterr().err
    assert (saved / "calibrator.json").read_text() == before
    assert main(["card", str(saved / "absent.json")]) == 2


def test_the_next_command_is_the_one_that_was_given_without_secrets(saved, capsys):
    given = ["calibrate", str(saved / "logits.npz"), "--bootstrap", "0", "--method", "temperature"]
    assert main([*given, "--storage-options", '{"key": "secret"}']) == 0
    out = capsys.readouterr().out
    assert (
        f"\n  focalkern {' '.join(given)} --storage-options JSON --out calibrator.json\n" in out and "secret" not in out
    )


def test_the_printed_card_is_the_file_in_every_locale(saved, tmp_path):
    """The card has an arrow, and the name of the calibrator a Greek letter and a byte that is not UTF-8."""
    path = os.path.join(os.fsencode(tmp_path), "λ-".encode() + b"\xff.json")
    shutil.copy(saved / "calibrator.json", path)
    command = [sys.executable, "-m", "focalkern", "card", path]
    for locale in ("C", "C.UTF-8"):
        environment = {**os.environ, "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        environment.pop("PYTHONIOENCODING", None)
        printed = subprocess.run(command, capture_output=True, env=environment)
        assert (printed.returncode, printed.stderr) == (0, b"")
        assert subprocess.run([*command, "--out", tmp_path / "card.md"], env=environment).returncode == 0
        assert printed.stdout == (tmp_path / "card.md").read_bytes()
        assert "→".encode() in printed.stdout and os.path.basename(path) in printed.stdout
