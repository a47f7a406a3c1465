"""Folders and files that an ordinary user may not read or write: one line names them, and no data is lost."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import focalkern as fk

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# Root may write anywhere, so the test forks a child process that becomes the user nobody. All imports come first,
# because nobody may not even read root's interpreter.
AS_NOBODY = """
import contextlib, encodings.cp437, io, json, os, sys
import matplotlib, numpy, tabulate
from focalkern import cli

for words in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setgroups([]), os.setgid(65534), os.setuid(65534)
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = cli.main(words)
        print(json.dumps([code, said.getvalue()]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""

READ, WRITE = "expected a file that can be read, found: Permission denied", "that can be written for"
CASES = [
    ("calibrate open/z.npz --bootstrap 0 --out locked/old.json", f"locked/old.json: expected a file {WRITE} --out"),
    ("calibrate open/z.npz --bootstrap 0 --out locked/new.json", f"locked/new.json: expected a file {WRITE} --out"),
    ("calibrate open/z.npz --bootstrap 0 --out open/kept.json", f"open/kept.json: expected a file {WRITE} --out"),
    ("calibrate open/z.npz --bootstrap 0 --state locked/s", f"locked/s: expected a file {WRITE} --state"),
    ("calibrate open/z.npz --bootstrap 0 --report locked/a/b", f"locked/a/b: expected a folder {WRITE} --report"),
    ("apply locked/old.json open/z_logits.npy --out locked/p.npy", f"locked/p.npy: expected a file {WRITE} --out"),
    ("sweep open/z.npz --report locked", f"locked: expected a folder {WRITE} --report"),
    ("demo --out locked/demo", f"locked/demo: expected a folder {WRITE} --out"),
    ("evaluate secret.npz", f"secret.npz: {READ}"),
    ("evaluate secret.csv", f"secret.csv: {READ}"),
    ("evaluate secret_logits.npy", f"secret_logits.npy: {READ}"),
    ("calibrate secret_logits.npy --stream", f"secret_logits.npy: {READ}"),
    ("apply locked/old.json secret_logits.npy --out open/p.npy", f"secret_logits.npy: {READ}"),
    ("evaluate hidden/z.npz", "hidden/z.npz: expected a file, found: Permission denied"),
]


@pytest.fixture
def folder():
    # Not below tmp_path, which only root can read.
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=400)
    logits = 2 * rng.normal(size=(400, 4)) + 2 * np.eye(4)[labels]
    for name in ("locked", "open", "hidden"):
        (path / name).mkdir()
    for name in ("open/z.npz", "hidden/z.npz", "secret.npz"):
        np.savez(path / name, logits=logits, labels=labels)
    for name in ("open/z_logits.npy", "secret_logits.npy"):
        np.save(path / name, logits)
        np.save(path / name.replace("logits", "labels"), labels)
    (path / "secret.csv").write_text("a,b,label\n1,2,0\n")
    fk.TemperatureScaling().fit(logits, labels).save(path / "locked" / "old.json")
    (path / "open" / "kept.json").write_text("kept")
    modes = {"secret.npz": 0, "secret.csv": 0, "secret_logits.npy": 0, "open/kept.json": 0o444}
    for name, mode in {**modes, "locked": 0o555, "hidden": 0, "open": 0o777}.items():
        (path / name).chmod(mode)
    yield path
    for name in ("locked", "hidden"):
        (path / name).chmod(0o755)
    shutil.rmtree(path)


def test_an_ordinary_user_is_told_in_one_line_and_loses_nothing(folder):
    pytest.importorskip("tabulate")
    pytest.importorskip("matplotlib")

    def contents():
        return {path: path.read_bytes() for part in ("locked", "open") for path in (folder / part).iterdir()}

    before = contents() if os.getuid() == 0 else None
    words = json.dumps([command.split() for command, _ in CASES])
    done = subprocess.run([sys.executable, "-c", AS_NOBODY, words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for (command, expected), (code, said) in zip(CASES, answers, strict=True):
        assert code == 2 and said.count("\n") <= 2 and expected in said.splitlines()[-1], (command, said)
    assert before is None or contents() == before
