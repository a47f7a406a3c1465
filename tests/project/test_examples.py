"""The scripts in examples/, run as users run them, on less data if they take long."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import peer

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


def test_there_are_eleven():
    assert SCRIPTS == [
        "accept.py",
        "calibrate.py",
        "compare.py",
        "detect.py",
        "detr_criterion.py",
        "fine_tune.py",
        "language_model.py",
        "log_training.py",
        "other_gpu.py",
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


def test_accept(run):
    said = run("accept.py", "--max-risk", "0.05")
    bound = float(re.search(r"below ([\d.]+) with", said).group(1))
    (coverage,), risk = numbers("coverage", said), numbers("risk", said)
    assert bound <= 0.05
    assert coverage > 0.2
    assert risk[1] < 0.05 < risk[-1]  # of the accepted test rows, and of all


@pytest.mark.parametrize("loss", ["cross-entropy", "focal", "dft"])
def test_fine_tune(run, loss):
    peer("transformers")
    peer("accelerate")
    said = run("fine_tune.py", "--loss", loss, "--steps", "30")
    before, after = re.search(r"nll +([\d.]+) -> ([\d.]+)", said).groups()
    assert float(after) < 0.7 * float(before)
    assert "temperature" in said


@pytest.mark.parametrize("setting", ["auto", "0", "compile"])
def test_other_gpu(setting, tmp_path):
    """FOCALKERN_KERNELS is read once in a process; on the CPU "compile" does what ROCm and XPU do."""
    environment = {**os.environ, "FOCALKERN_KERNELS": setting, "CUDA_VISIBLE_DEVICES": ""}
    arguments = [sys.executable, "-W", "ignore", str(EXAMPLES / "other_gpu.py"), "--steps", "3"]
    paths = [str(Path(fk.__file__).parents[1]), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(arguments, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("compiled by torch.compile" in done.stdout) == (setting == "compile")
    losses = numbers("loss", done.stdout)
    assert losses[2] < losses[1] < losses[0]
