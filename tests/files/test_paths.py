"""Files by name, folder, pattern or list."""

from pathlib import Path

import numpy as np
import pytest

import focalkern as fk
from focalkern.files.paths import NamedFiles, expanded, matches


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/deep").mkdir(parents=True)
    for name in ("a.npz", "b_logits.npy", "b_labels.npy", "c.CSV", "notes.txt", "deep/d.npz", "deep/[1].npz"):
        Path("runs", name).touch()
    return tmp_path


def test_names_patterns_and_folders(folder):
    here = ["runs/a.npz", "runs/b_logits.npy", "runs/c.CSV"]
    assert expanded(["runs"]) == here
    assert expanded(["runs/*"]) == here
    assert expanded(["runs/**/*.npz"]) == ["runs/a.npz", "runs/deep/[1].npz", "runs/deep/d.npz"]
    assert expanded(["runs/c.CSV", "runs", "runs/a.npz"]) == ["runs/c.CSV", "runs/a.npz", "runs/b_logits.npy"]
    # An existing file with such a name is no pattern; a pattern without a match stays.
    assert expanded(["runs/deep/[1].npz"]) == ["runs/deep/[1].npz"]
    assert expanded(["x.npz", "y*.npz", "runs/deep/e?"]) == ["x.npz", "y*.npz", "runs/deep/e?"]
    assert expanded(["runs/notes.txt"]) == ["runs/notes.txt"]


def test_a_file_that_is_named_twice_is_read_once(folder):
    twice = ["runs/a.npz", "./runs/a.npz", str(folder / "runs" / "a.npz"), "s3://r/a.npz", "s3://r/a.npz"]
    assert expanded(twice) == ["runs/a.npz", "s3://r/a.npz"]
    assert matches(NamedFiles(["runs/a.npz", "./runs/a.npz"])) == ["runs/a.npz"]
    assert str(NamedFiles(["runs/a.npz", "./runs/a.npz"])) == "runs/a.npz"
    assert str(NamedFiles(["runs/a.npz", "runs/c.CSV", "./runs/a.npz"])) == "runs/a.npz ... runs/c.CSV (2 files)"


def test_a_list_of_files(folder):
    Path("files.txt").write_text("# networks\nruns/a.npz\n\n  runs/deep/d*  \n@files.txt\n")
    assert expanded(["@files.txt", "runs/a.npz"]) == ["runs/a.npz", "runs/deep/d.npz"]
    with pytest.raises(fk.files.InputError, match=r"^@none.txt: expected a list of files, one per line, found: No "):
        expanded(["@none.txt"])
    Path("bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(fk.files.InputError, match=r"^@bytes.txt: expected a list .* found: bytes that are no UTF-8$"):
        expanded(["@bytes.txt"])


@pytest.mark.parametrize("name", ["run 3.00\u202fPM", "caf\udce9", "two\nlines"])  # \udce9: no UTF-8
def test_a_name_may_have_any_character(name, tmp_path):
    labels = np.arange(90) % 3
    np.save(tmp_path / f"{name}_logits.npy", 3 * np.eye(3)[(labels + (np.arange(90) % 5 == 0)) % 3])
    np.save(tmp_path / f"{name}_labels.npy", labels)
    path = tmp_path / f"{name}_logits.npy"
    for given in (path, str(path)):
        study = fk.compare_calibrators(given, candidates=["none", "temperature"], resamples=0)
        assert study.calibrator.n_samples_ == 90


def test_a_sweep_takes_them(tmp_path, monkeypatch, run):
    pytest.importorskip("tabulate")
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    labels = np.arange(90) % 3
    for name in "ab":
        np.savez(f"runs/{name}.npz", logits=3 * np.eye(3)[(labels + (np.arange(90) % 5 == 0)) % 3], labels=labels)
    Path("files.txt").write_text("runs/b.npz\n")
    assert [one["path"] for one in fk.sweep(["@files.txt", "runs/*.npz"]).networks] == ["runs/b.npz", "runs/a.npz"]
    code, _, err = run("sweep", "runs", "--jobs", "1")
    assert code == 0 and err.splitlines() == ["1 of 2: runs/a.npz", "2 of 2: runs/b.npz"]
