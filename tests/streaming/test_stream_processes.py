"""Streamed searches of several processes, and their cross-validation."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from stream_cases import AXES, GRID, assert_same, result, shards_in

import focalkern as fk
from focalkern.streaming import CalibrationGridState
from focalkern.study import cross_validation, samples

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("tabulate", reason="tabulate is not installed")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return shards_in(tmp_path, monkeypatch)


def launch(*arguments, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


needs_distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")


@needs_distributed
def test_two_processes_of_torchrun_give_what_one_gives(folder, run):
    files = ("val_logits-*.npy", "--test", "test_logits-*.npy")
    one = result(run, *files)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone", "-m", "focalkern")
    process = launch(*torchrun, "calibrate", *files, *GRID, "--json", "--out", "c.json", "--state", "s.state")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert_same(json.loads(out), one)
    assert json.loads((folder / "c.json").read_text())["fit"]["n_samples"] == 500
    assert not list(folder.glob("s.state*"))


@needs_distributed
def test_two_processes_of_torchrun_choose_what_one_chooses(folder, run):
    files = ("val_logits-*.npy", "--test", "test_logits-*.npy", "--json", "--accept-risk", "0.3")
    one = json.loads(run("calibrate", *files)[1])
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone", "-m", "focalkern")
    out, err = launch(*torchrun, "calibrate", *files).communicate(timeout=240)
    two = json.loads(out)
    assert two["verdict"] == one["verdict"], err
    assert two["accept"] == one["accept"]
    assert one["accept"]["n_accepted"] > 0
    for found, expected in zip(two["rows"], one["rows"], strict=True):
        assert found["method"] == expected["method"]
        assert found["test"] == pytest.approx(expected["test"], abs=1e-9)


@needs_distributed
@pytest.mark.parametrize(("end", "timeout"), [(signal.SIGKILL, 60), (signal.SIGSTOP, 20)])
def test_a_process_that_dies_or_stops_is_told_by_the_other_and_nothing_is_written(end, timeout, folder):
    """Starts the processes as torchrun does, but without torchrun, which would also end the other process."""
    store = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 10_000)}
    dies = (
        "import os, sys; from focalkern.cli import main; from focalkern.study import Processes\n"
        f"Processes.reduce = lambda *_: os.kill(os.getpid(), {int(end)})\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = ("calibrate", "val_logits-*.npy", *GRID, "--out", "c.json", "--report", "r", "--timeout", timeout)
    start = time.monotonic()
    both = [launch("-m", "focalkern", *command, RANK="0", **store), launch("-c", dies, *command, RANK="1", **store)]
    try:
        out, err = both[0].communicate(timeout=120)
        if end == signal.SIGSTOP:
            assert both[1].poll() is None
            both[1].kill()
        both[1].communicate(timeout=60)
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [2, -signal.SIGKILL]
    assert time.monotonic() - start < 100
    assert out == ""
    assert f"focalkern calibrate: rank 0 of 2: another process has died, or did not answer within {timeout} s" in err
    assert not (folder / "c.json").exists() and not (folder / "r").exists()
    assert [path for path in folder.iterdir() if path.name.endswith(".part")] == []


# ---- the cross-validation ------------------------------------------------------------------------------------------


def verdict_of(run, *arguments):
    code, out, err = run("calibrate", *arguments, *AXES, "--json", "--bootstrap", "0")
    assert code == 0, err
    document = json.loads(out)
    return document["verdict"], document["cross_validation"]


def test_the_verdict_of_shards_is_that_of_one_file(folder, run):
    one = verdict_of(run, "val_logits.npy", "--test", "test_logits.npy", "--stream")
    shards = verdict_of(run, "val_logits-*.npy", "--test", "test_logits-*.npy")
    assert shards[0] == one[0]
    for found, expected in zip(shards[1]["candidates"], one[1]["candidates"], strict=True):
        assert (found["name"], found["chosen"]) == (expected["name"], expected["chosen"])
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert one[0]["use"].startswith("temperature scaling, T = 1.98")


@pytest.mark.parametrize("kept", ["all rows in memory", "batches"])
def test_streamed_samples_choose_among_the_candidates_of_memory(folder, run, monkeypatch, kept):
    """Table and cross-validation are equal to those of the same samples in memory."""
    logits = np.load("val_logits.npy") + np.linspace(-2, 2, 5)  # class biases, which a vector corrects
    np.save("val_logits.npy", logits)
    for i, part in enumerate(np.array_split(np.arange(500), 12)):
        np.save(f"val_logits-{i}.npy", logits[part])
    if kept == "batches":
        monkeypatch.setattr(cross_validation, "fits_in_memory", lambda numbers: False)
    whole = json.loads(run("calibrate", "val_logits.npy", "--test", "test_logits.npy", "--json")[1])
    streamed = json.loads(run("calibrate", "val_logits-*.npy", "--test", "test_logits-*.npy", "--json")[1])
    assert streamed["verdict"]["costs"] == whole["verdict"]["costs"] != "No predicted class changes."
    found, expected = (one["cross_validation"]["candidates"] for one in (streamed, whole))
    assert [one["name"] for one in found] == [one["name"] for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["chosen"] == theirs["chosen"]
        if kept == "batches" and ours["name"] == "spline-matrix":
            assert ours["excluded"] == "needs all rows in memory"
        else:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
    by_name = {row["method"]: row for row in whole["rows"] if row["criterion"] is None}
    for row in streamed["rows"]:
        if row["method"].startswith(("spline", "temperature")) and row["criterion"] is None and row["test"]:
            assert row["test"] == pytest.approx(by_name[row["method"]]["test"], abs=1e-9)
            ends = row["intervals"]["ece_equal_width"]
            assert ends == pytest.approx(by_name[row["method"]]["intervals"]["ece_equal_width"], abs=1e-9)


def test_a_saved_spline_is_evaluated_on_shards(folder, run, monkeypatch):
    fk.SplineScaling(kind="vector").fit(np.load("val_logits.npy"), np.load("val_labels.npy")).save("c.json")
    whole = json.loads(run("evaluate", "test_logits.npy", "--calibrator", "c.json", "--json")[1])
    for most_kept, digits in ((400, 1e-12), (300, 2e-4)):
        monkeypatch.setattr(samples, "MOST_KEPT", most_kept)
        streamed = json.loads(run("evaluate", "test_logits-*.npy", "--calibrator", "c.json", "--json")[1])
        for found, expected in zip(streamed["sets"][0]["rows"], whole["sets"][0]["rows"], strict=True):
            assert found["figures"] == pytest.approx(expected["figures"], abs=digits)


def test_a_search_that_was_stopped_has_the_same_verdict(folder, run, monkeypatch):
    expected = verdict_of(run, "val_logits-*.npy")
    update = CalibrationGridState.update
    calls = []

    def interrupted(self, *batch):
        calls.append(1)
        if len(calls) == 17:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(CalibrationGridState, "update", interrupted)
        code, _, err = run("calibrate", "val_logits-*.npy", *AXES, "--state", "s.state")
    assert code == 130 and "84 of 500 rows are done" in err
    code, _, err = run("calibrate", "val_logits-*.npy", *GRID, "--state", "s.state")
    assert code == 2 and "other folds" in err  # the sums belong to another command
    assert verdict_of(run, "val_logits-*.npy", "--state", "s.state") == expected
