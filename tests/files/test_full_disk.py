"""A full disk and a read-only folder, for every writer: an error names the file, no partial file is left,
and the old file is unchanged.

A limit on the size of files stands for a full disk: the same calls of write fail.
"""

import builtins
import errno
import os
import resource
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern import cli, files, study

RNG = np.random.default_rng(0)
Y = RNG.integers(4, size=200)
Z = 3 * np.eye(4)[Y] + RNG.normal(size=(200, 4))
PROBLEM = "File too large|Permission denied"  # the system's message for either
FITTED = fk.TemperatureScaling().fit_quietly(Z, Y)


@contextmanager
def full_disk(monkeypatch):
    """Limits every file to 64 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # Python ignores the signal that the system sends
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(monkeypatch):
    """Makes the creation of files fail. (Folder permissions do not apply to root, who runs tests in containers.)"""
    real = builtins.open

    def refuse(name, mode="r", *arguments, **options):
        if set(mode) & set("wxa+"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(name))
        return real(name, mode, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "open", refuse)
        yield


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def small_study():
    pytest.importorskip("matplotlib")
    return fk.compare_calibrators((Z, Y), candidates=["temperature"], resamples=0)


def apply_to(suffix):
    return lambda folder: study.apply_calibrator(FITTED, str(folder / "z_logits.npy"), folder / f"out{suffix}")


def save_state(folder):
    state = fk.CalibrationGridState([0.0, 1.0], [1.0, 2.0])
    state.update(torch.from_numpy(Z), torch.from_numpy(Y))
    progress = study.Progress(folder / "state.pt", 0.0, study.Processes())
    progress.save(state, {"file": "x"}, 200, torch.zeros(3), now=True)


WRITERS = {
    "calibrator": lambda folder: FITTED.save(folder / "calibrator.json"),
    "apply .npy": apply_to(".npy"),
    "apply .npz": apply_to(".npz"),
    "apply .csv": apply_to(".csv"),
    "apply .pt": apply_to(".pt"),
    "state": save_state,
}


@pytest.mark.parametrize("trouble", [full_disk, read_only])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("again", [False, True], ids=["new", "replaced"])
def test_a_failed_write_leaves_everything(writer, trouble, again, tmp_path, monkeypatch):
    np.save(tmp_path / "z_logits.npy", Z)
    if again:
        WRITERS[writer](tmp_path)
        written = [path for path in tmp_path.iterdir() if path.name != "z_logits.npy"]
        assert len(written) == 1
    before = contents(tmp_path)
    with trouble(monkeypatch), pytest.raises(OSError, match=PROBLEM) as caught:
        WRITERS[writer](tmp_path)
    assert contents(tmp_path) == before
    assert Path(caught.value.filename).parent == tmp_path
    assert not Path(caught.value.filename).name.startswith("."), "the user knows no hidden file"
    WRITERS[writer](tmp_path)  # without the limit
    assert len(contents(tmp_path)) == 2


@pytest.mark.parametrize("trouble", [full_disk, read_only])
def test_a_report_that_cannot_be_written(trouble, tmp_path, monkeypatch, small_study):
    small_study.write_report(tmp_path)
    before = contents(tmp_path)
    with trouble(monkeypatch), pytest.raises(OSError, match=PROBLEM) as caught:
        small_study.write_report(tmp_path)
    assert contents(tmp_path) == before
    assert Path(caught.value.filename).parent == tmp_path


COMMANDS = {
    "calibrate --out": "calibrate {0}/val.npz --bootstrap 0 --method temperature --out {0}/out.json",
    "calibrate --report": "calibrate {0}/val.npz --bootstrap 0 --method temperature --report {0}/report",
    "apply": "apply {0}/c.json {0}/z_logits.npy --out {0}/out.npy",
    "sweep --report": "sweep {0}/val.npz --report {0}/sweep --jobs 1",
    "demo": "demo --out {0}/demo",
}


@pytest.mark.parametrize("trouble", [full_disk, read_only])
def test_a_table_of_the_training_study_that_cannot_be_written(trouble, tmp_path, monkeypatch):
    """All files of the study use this function or a function that it calls."""
    records = pytest.importorskip("benchmarks.train_study.records", reason="the benchmarks are in the source tree only")
    path = tmp_path / "epochs.csv"
    records.write_csv(path, [{"epoch": 0, "loss": 1.0}])
    before = contents(tmp_path)
    with trouble(monkeypatch), pytest.raises(OSError, match=PROBLEM) as caught:
        records.write_csv(path, [{"epoch": epoch, "loss": 1.0} for epoch in range(100)])
    assert contents(tmp_path) == before and caught.value.filename == str(path)


@pytest.mark.parametrize("trouble", [full_disk, read_only])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_reports_a_full_disk_in_one_line(command, trouble, tmp_path, monkeypatch, capsys):
    if "report" in command or command == "demo":
        pytest.importorskip("matplotlib")
    rows = files.LogitSet(torch.from_numpy(Z), torch.from_numpy(Y), "logits", "val", "digits")
    monkeypatch.setattr(cli.demo, "demo_rows", lambda seed: {"cross-entropy": (rows, replace(rows, name="test"), 0)})
    np.savez(tmp_path / "val.npz", logits=Z, labels=Y)
    np.save(tmp_path / "z_logits.npy", Z)
    FITTED.save(tmp_path / "c.json")
    before = contents(tmp_path)
    with trouble(monkeypatch):
        code = cli.main(COMMANDS[command].format(tmp_path).split())
    said = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert said[-1].startswith(f"focalkern {command.split()[0]}: {tmp_path}")
    assert os.strerror(errno.EFBIG if trouble is full_disk else errno.EACCES) in said[-1]
    assert contents(tmp_path) == before


def test_a_spilled_state_keeps_the_rows_before(tmp_path, monkeypatch):
    state = fk.CalibrationGridState([0.0, 1.0], [1.0, 2.0], exact=True, spill_dir=str(tmp_path))
    state.update(torch.from_numpy(Z[:1]), torch.from_numpy(Y[:1]))
    expected = state.compute().tables["nll"]
    with full_disk(monkeypatch), pytest.raises(OSError, match=r"File too large|No space"):
        state.update(torch.from_numpy(Z), torch.from_numpy(Y))
    assert torch.equal(state.compute().tables["nll"], expected)
    state.update(torch.from_numpy(Z[1:]), torch.from_numpy(Y[1:]))
    whole = fk.calibration_grid(torch.from_numpy(Z), torch.from_numpy(Y), [0.0, 1.0], [1.0, 2.0])
    assert torch.equal(state.compute().tables["nll"], whole.tables["nll"])
