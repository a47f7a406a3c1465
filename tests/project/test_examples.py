"""The scripts in examples/, run as users run them, on less data if they take long."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import focalkern as fk

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in an empty folder, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(name, *arguments):
        state = torch.random.get_rng_state()
        try:
            runpy.run_path(str(EXAMPLES / name))["main"](list(arguments))
        finally:
            torch.random.set_rng_state(state)
        return capsys.readouterr().out

    return call


def numbers(name, text):
    """The numbers that follow a name."""
    return [float(number) for number in re.findall(rf"{name} +(-?[\d.]+)", text)]


def test_there_are_eight():
    assert SCRIPTS == [
        "calibrate.py",
        "compare.py",
        "detect.py",
        "detr_criterion.py",
        "language_model.py",
        "log_training.py",
        "torchtitan_focal.py",
        "train.py",
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_are_short(name):
    text = (EXAMPLES / name).read_text()
    assert 40 <= len(text.splitlines()) <= 90
    assert f"python examples/{name}" in text


@pytest.mark.parametrize("loss", ["cross-entropy", "focal", "flsd", "adafocal"])
def test_train(run, loss):
    said = run("train.py", "--loss", loss, "--epochs", "4", "--out", "logits.npz")
    accuracy = numbers("accuracy", said)
    assert len(accuracy) == 2
    assert min(accuracy) > 0.6
    assert all(0 <= error <= 1 for error in numbers("ECE", said))


def test_calibrate(run, tmp_path):
    said = run("calibrate.py")
    before, after = numbers("  NLL", said)
    assert after < before / 2
    assert fk.load_calibrator(tmp_path / "calibrator.json").n_samples_ == 600


def test_calibrate_reads_what_train_writes(run, tmp_path):
    run("train.py", "--epochs", "2")
    said = run("calibrate.py", "logits.npz", "--out", "mine.json")
    assert "599 test rows" in said
    assert (tmp_path / "mine.json").is_file()


def test_compare(run):
    said = run("compare.py")
    assert said.startswith("Use ")
    assert "-> " in said
    rows = re.findall(r"^ +(\d)  +(\d+) +([\d.]+) +([\d.]+)$", said, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(10))
    assert sum(int(row[1]) for row in rows) == 797


def test_detect(run):
    said = run("detect.py", "--steps", "60")
    before, after = numbers("NLL per cell", said)
    assert after < before
    assert len(numbers("ECE", said)) == 2


@pytest.mark.parametrize("loss", ["varifocal", "matchability", "ia-bce"])
def test_detr_criterion(run, loss):
    said = run("detr_criterion.py", "--loss", loss, "--steps", "80")
    for name, rises in (("loss", False), ("overlap", True)):
        first, last = numbers(name, said)
        assert (last > first) == rises


def test_language_model(run):
    said = run("language_model.py", "--steps", "20")
    nlls, eces = numbers("test NLL", said), numbers("ECE", said)
    assert len(nlls) == len(eces) == 3
    assert nlls[2] < nlls[0]
    assert all(0 <= ece <= 1 for ece in eces)
    assert "on 8192 words" in said


def test_log_training(run):
    said = run("log_training.py", "--steps", "30")
    for name in ("loss", "entropy"):
        assert numbers(name, said)[-1] < numbers(name, said)[0]
    assert numbers("accuracy", said)[-1] > 0.2
    assert all(value < 0 for value in numbers("log_p", said))


# FSDP2 warns about outputs that are written in place; the example writes to none.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no process groups")
@pytest.mark.parametrize("way", ["dtensor", "group"])
def test_torchtitan_focal(run, way):
    """One process here; tests/ops/test_dtensor.py runs four."""
    said = run("torchtitan_focal.py", "--steps", "10", "--way", way)
    first, last = re.search(r"focal loss ([\d.]+) -> ([\d.]+) in 10 steps", said).groups()
    assert float(last) < float(first)
