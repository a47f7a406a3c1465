"""The scripts in examples/, run as users run them, on less data if they take long."""

import ast
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
# One for each kind of other people's code: flat programs.
SHORT = [
    "accept.py",
    "detr_criterion.py",
    "dft.py",
    "fine_tune.py",
    "log_training.py",
    "other_gpu.py",
    "torchtitan_focal.py",
]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a script in an empty folder, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(name, *arguments):
        state = torch.random.get_rng_state()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        finally:
            torch.random.set_rng_state(state)
        return capsys.readouterr().out

    return call


def numbers(name, text):
    """The numbers that follow a name."""
    return [float(number) for number in re.findall(rf"{name} +(-?[\d.]+)", text)]


def test_are_named():
    assert sorted([*SHORT, "calibrate.py", "compare.py", "detect.py", "language_model.py", "train.py"]) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_are_short(name):
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= (40 if name in SHORT else 90)
    assert f" examples/{name}" in text


@pytest.mark.parametrize("name", SHORT)
def test_statements_are_few(name):
    """Statements that are neither imports nor docstrings, toy data included; `for` and `if` count as one."""
    nodes = list(ast.walk(ast.parse((EXAMPLES / name).read_text())))
    texts = [node for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert sum(isinstance(node, ast.stmt) for node in nodes) - len(texts) - len(imports) <= 20


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


def test_detr_criterion(run):
    said = run("detr_criterion.py")
    loss, overlap = numbers("loss", said), numbers("overlap", said)
    assert loss[-1] < loss[0]
    assert overlap[-1] > 0.7 > overlap[0]


def test_dft(run):
    cross_entropy, dft = numbers("token", run("dft.py"))
    assert 0.8 < cross_entropy < 0.95 < dft  # one token in ten is an error


def test_language_model(run):
    said = run("language_model.py", "--steps", "20")
    nlls, eces = numbers("test NLL", said), numbers("ECE", said)
    assert len(nlls) == len(eces) == 3
    assert nlls[2] < nlls[0]
    assert all(0 <= ece <= 1 for ece in eces)
    assert "on 8192 words" in said


def test_log_training(run):
    said = run("log_training.py")
    for name, rises in (("loss", False), ("log_p", True), ("entropy", False), ("accuracy", True)):
        values = numbers(name, said)
        assert len(values) == 4
        assert (values[-1] > values[0]) == rises


def test_accept(run):
    said = run("accept.py")
    bound = float(re.search(r"below ([\d.]+) with", said).group(1))
    (coverage,), (_, accepted, everything) = numbers("coverage", said), numbers("risk", said)
    assert bound <= 0.05
    assert coverage > 0.2
    assert accepted < 0.05 < everything


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")
def test_fine_tune(run):
    peer("transformers")
    peer("accelerate")
    said = run("fine_tune.py")
    before, after = re.search(r"nll +([\d.]+) -> ([\d.]+)", said).groups()
    assert float(after) < 0.7 * float(before)
    assert "temperature" in said


@pytest.mark.parametrize("setting", ["auto", "0", "compile"])
def test_other_gpu(setting, tmp_path):
    """FOCALKERN_KERNELS is read once in a process; on the CPU "compile" does what ROCm and XPU do."""
    environment = {**os.environ, "FOCALKERN_KERNELS": setting, "CUDA_VISIBLE_DEVICES": ""}
    arguments = [sys.executable, "-W", "ignore", str(EXAMPLES / "other_gpu.py")]
    done = subprocess.run(arguments, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("cpu: torch.compile" in done.stdout) == (setting == "compile")
    losses = numbers("loss", done.stdout)
    assert losses[4] < losses[2] < losses[0]
