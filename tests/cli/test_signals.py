"""SIGTERM and Ctrl-C at any moment: no partial file is left, and files that belong together are all new or all old."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# Child processes that keep writing three files are stopped at random moments, by both signals. A fork takes a
# millisecond, a process that imports torch seconds, so the test forks and tries many moments.
MANY_KILLS = """
import os, random, signal, sys, time
from pathlib import Path
from focalkern import cli
from focalkern._atomic import write_atomically, write_together

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
names = ["table.csv", "report.json", "report.html"]

def write_for_ever(parsed):
    generation = 0
    while True:
        generation += 1
        data = str(generation).encode() * 5000
        write_together(folder, dict.fromkeys(names, data))
        write_atomically(folder / "calibrator.json", data)

cli.demo._run = write_for_ever
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
os.environ["COLUMNS"] = "100"
draw = random.Random(int(sys.argv[3]))
for kill in range(kills):
    child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")
        os._exit(cli.main(["demo"]))
    while not (folder / "calibrator.json").exists():
        time.sleep(0.001)
    time.sleep(0.03 * draw.random())
    number = draw.choice([signal.SIGTERM, signal.SIGINT])
    os.kill(child, number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 128 + number, (code, number)
    left = sorted(os.listdir(folder))
    assert left == sorted([*names, "calibrator.json"]), left
    found = {(folder / name).read_bytes() for name in names}
    assert len(found) == 1, [one[:9] for one in found]
    for name in left:
        (folder / name).unlink()
"""


def test_a_stop_at_any_moment_leaves_no_partial_and_no_mixed_files(tmp_path):
    command = [
        sys.executable,
        "-c",
        MANY_KILLS,
        tmp_path,
        os.environ.get("FOCALKERN_FUZZ", "100"),
        "0",
    ]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# A shell's background job ignores Ctrl-C, and so do its children.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from focalkern.cli import main
sys.exit(main())
"""


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sweep_ends_with_its_workers_and_goes_on(number, tmp_path):
    """SIGTERM goes to the command only, as from a batch system; Ctrl-C goes to all its processes, as from a
    terminal."""
    pytest.importorskip("tabulate")
    rng = np.random.default_rng(0)
    for place in range(6):
        labels = rng.integers(10, size=4000)
        logits = 2 * rng.normal(size=(4000, 10)) + 2 * np.eye(10)[labels]
        np.savez(tmp_path / f"{place}.npz", logits=logits, labels=labels)
    files = sorted(tmp_path.glob("*.npz"))
    running = start("sweep", *files, "--report", tmp_path / "sweep", "--jobs", "2")
    while not list(tmp_path.glob("sweep/networks/*.json")):
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.02)
    group = os.getpgid(running.pid)
    if number == signal.SIGINT:
        os.killpg(group, number)
    else:
        running.send_signal(number)
    _, said = running.communicate(timeout=600)
    assert running.returncode == 128 + number
    assert said.splitlines()[-1] == f"focalkern sweep: {'interrupted' if number == signal.SIGINT else 'terminated'}"
    assert "Traceback" not in said
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".part")]
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # the workers are ending
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("workers of the sweep outlive it")
    kept = list(tmp_path.glob("sweep/networks/*.json"))
    assert 0 < len(kept) < len(files)
    assert all(json.loads(path.read_text())["network"]["figures"] for path in kept)
