"""Interrupted searches resume, and errors name invalid shards."""

import functools
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from stream_cases import GRID, result, shards_in

from focalkern.files.shards import open_shards
from focalkern.streaming import CalibrationGridState

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("tabulate", reason="tabulate is not installed")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return shards_in(tmp_path, monkeypatch)


@pytest.fixture
def stopped(folder, run, monkeypatch):
    """The state file of a search that was interrupted in its fourth batch."""
    update = CalibrationGridState.update
    calls = []

    def interrupted(self, *batch):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(CalibrationGridState, "update", interrupted)
        code, out, err = run("calibrate", "val_logits-*.npy", *GRID, "--state", "s.state", "--out", "c.json")
    assert (code, out) == (130, "")
    # Shards of 42 rows: batches of 30 and 12.
    assert err == "s.state: 84 of 500 rows are done; the same command continues\nfocalkern calibrate: interrupted\n"
    assert not (folder / "c.json").exists()
    return folder / "s.state"


def test_the_same_command_goes_on(stopped, run, monkeypatch):
    expected = result(run, "val_logits-*.npy")
    code, out, err = run("calibrate", "val_logits-*.npy", *GRID, "--state", "s.state", "--json")
    assert code == 0
    assert err.startswith("resumed from s.state: 84 of 500 rows are done\n")
    assert json.loads(out)["rows"] == expected["rows"]  # bitwise
    assert not stopped.exists()  # the state is deleted after use


def change_a_file(folder):
    path = folder / "val_logits-3.npy"
    os.utime(path, ns=(1, 1))
    return ()


def change_a_part(folder, key, value):
    path = folder / "s.state"
    torch.save({**torch.load(path, weights_only=True), key: value}, path)
    return ()


def other_files(folder):
    """Files with the same names, sizes and times, in another folder."""
    (folder / "b").mkdir()
    for path in folder.glob("*.npy"):
        shutil.copy2(path, folder / "b")
    os.chdir(folder / "b")
    return ("--state", "../s.state")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_files, r"expected the state of this command, found one of other data"),
        (change_a_file, r"expected the state of this command, found one of other data"),
        (lambda folder: ("--n-bins", "10"), "it must have n_bins = 10, got 15; delete it, or name another file"),
        (lambda folder: "--gammas=0,2", "it must have gammas"),
        (lambda folder: ("--split", "0.5"), "found one of other rows"),
        (lambda folder: (folder / "s.state").write_bytes(b"PK\3\4 no") and (), "that this command has written"),
        (
            lambda folder: (folder / "s.state").write_bytes((folder / "s.state").read_bytes()[:5000]) and (),
            "expected a state that this command has written, found something else",
        ),
        (lambda folder: torch.save({"a": 1}, folder / "s.state") or (), "that this command has written"),
        *(
            (functools.partial(change_a_part, key=key, value=value), "found something else; delete it, or name another")
            for key, value in (
                ("task", 3),
                ("done", -1),
                ("done", None),
                ("totals", torch.zeros(9)),
                ("totals", "x"),
            )
        ),
        (functools.partial(change_a_part, key="task", value={}), "found one of other"),
        *(
            (functools.partial(change_a_part, key="state", value=value), "it must be what state_dict() returns, got")
            for value in ([1], {"tensors": 3})
        ),
    ],
)
def test_a_state_of_something_else_is_refused(stopped, run, change, message):
    options = change(stopped.parent)
    options = (options,) if isinstance(options, str) else options
    before = stopped.read_bytes()
    code, out, err = run("calibrate", "val_logits-*.npy", *GRID, "--state", "s.state", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert stopped.read_bytes() == before


def test_options_that_cannot_be(folder, run):
    (folder / "plain.csv").write_text("label,a,b\n0,1,2\n")
    for arguments, message in (
        (("val_logits.npy", "--state", "val_logits.npy"), "expected another file for --state, found one that is read"),
        (("val_logits-*.npy", "--out", "val_logits-3.npy"), "expected another file for --out, found one that is read"),
        (("val_logits.npy", "--state", "no/s"), "expected a file in an existing folder for --state"),
        (("val_logits.npy", "--state", "x", "--out", "x"), "expected different files for --state and --out"),
        (("val_logits.npy", "--state-every", "0"), "--state-every: expected a number of seconds greater than 0"),
        (
            ("plain.csv", "--stream"),
            "plain.csv: expected .npy, .safetensors or .zarr for reading in parts, found .csv; other formats are "
            "read without stream, all rows in memory (focalkern.files.read_sets)",
        ),
    ):
        code, out, err = run("calibrate", *arguments)
        assert (code, out) == (2, "")
        assert message in err


# ---- bad shards ----------------------------------------------------------------------------------------------------


def bad(name, **changes):
    """Changes an array of a shard."""
    array = np.load(name)
    if "row" in changes:
        array[changes["row"]] = changes["value"]
    if "shape" in changes:
        array = array[: changes["shape"][0]] if array.ndim == 1 else array[: changes["shape"][0], : changes["shape"][1]]
    np.save(name, array.astype(changes.get("dtype", array.dtype)))


def truncate(name):
    with open(name, "r+b") as stream:
        stream.truncate(os.path.getsize(name) - 8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda: os.remove("val_labels-5.npy"), r"val_logits-5.npy: expected its labels in val_labels-5.npy, found n"),
        (lambda: bad("val_logits-4.npy", shape=(99, 4)), r"val_logits-4.npy: logits: expected logits of 5 classes as"),
        (lambda: bad("val_labels-4.npy", shape=(9,)), r"val_labels-4.npy: expected labels [N] = [42] to go with [42,"),
        (lambda: truncate("val_logits-2.npy"), r"val_logits-2.npy: expected 1808 bytes for float64 [42, 5], found a "),
        (lambda: truncate("val_labels-2.npy"), r"val_labels-2.npy: expected 464 bytes for int64 [42], found a trunca"),
        (lambda: open("val_logits-2.npy", "wb").close(), r"val_logits-2.npy: expected an array (.npy), found a damag"),
        (lambda: bad("val_logits-7.npy", row=40, value=np.nan), r"val_logits-7.npy: logits: expected finite logits, "),
        (lambda: bad("val_logits-7.npy", row=40, value=np.nan), r"found NaN in row 40"),
        (lambda: bad("val_labels-11.npy", row=33, value=5), r"labels: expected class numbers from 0 to 4, found 5 in"),
        (lambda: bad("val_logits-1.npy", dtype=np.int32), r"val_logits-1.npy: expected floating point, found int32"),
        (lambda: bad("val_labels-1.npy", dtype=np.float64), r"val_labels-1.npy: expected integer class numbers, foun"),
    ],
)  # fmt: skip
def test_a_bad_shard_is_named_and_nothing_is_written(folder, run, damage, message):
    damage()
    code, out, err = run("calibrate", "val_logits-*.npy", *GRID, "--out", "c.json", "--state", "s.state")
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1
    assert not (folder / "c.json").exists()


def test_a_bad_shard_costs_only_itself(folder, run):
    """The rows before the error are saved; with corrected data the command continues there."""
    good = np.load("val_labels-11.npy")
    bad("val_labels-11.npy", row=33, value=5)
    stamp = os.stat("val_labels-11.npy").st_mtime_ns
    arguments = ("calibrate", "val_logits-*.npy", *GRID, "--state", "s.state", "--state-every", "1e-9")
    assert run(*arguments)[0] == 2
    np.save("val_labels-11.npy", good)
    os.utime("val_labels-11.npy", ns=(stamp, stamp))
    code, _, err = run(*arguments)
    assert code == 0 and err.startswith("resumed from s.state: 489 of 500 rows are done")


def test_names_of_shards_and_labels(folder):
    opened = open_shards("val_logits-*.npy", labels=None, input_kind=None)[""]
    assert [shard.source for shard in opened.shards] == [f"val_logits-{i}.npy" for i in range(12)]
    assert (len(opened), opened.n_classes, opened.kind) == (500, 5, "logits")
    for i in range(2):
        os.rename(f"test_logits-{i}.npy", f"part{i}.npy")
        os.rename(f"test_labels-{i}.npy", f"part_labels{i}.npy")
    by_number = open_shards("part?.npy", labels=None, input_kind="probs")[""]
    assert by_number.kind == "probs" and [shard.labels.source for shard in by_number.shards] == [
        "part_labels0.npy",
        "part_labels1.npy",
    ]
    # A pattern that matches the labels, too.
    assert len(open_shards("part*.npy", labels=None, input_kind=None)[""].shards) == 2
    assert len(open_shards("part*.npy", labels="part_labels*.npy", input_kind=None)[""].shards) == 2
    os.mkdir("empty")
    for path, labels, message in (
        ("part?.npy", "val_labels-*.npy", "expected as many files as part.*npy has, 2, found 12"),
        ("none-*.npy", None, "expected at least one file, found none that matches"),
        ("val_logits-0.npy", "nothing.npy", "nothing.npy: expected a file, found nothing there"),
        ("val_*-1*.npy", None, "labels"),
        ("empty", None, "expected at least one file, found a folder without any"),
        ("part?.npy", None, None),
    ):
        if message is None:
            open_shards(path, labels=labels, input_kind=None)
            continue
        if path == "val_*-1*.npy":  # logits and labels of 1, 10, 11: the labels are recognised
            assert len(open_shards(path, labels=None, input_kind=None)[""].shards) == 3
            continue
        with pytest.raises(Exception, match=message):
            open_shards(path, labels=labels, input_kind=None)


def test_fortran_order_and_byte_order(folder):
    logits = np.load("val_logits.npy")
    np.save("val_logits.npy", np.asfortranarray(logits.astype(">f4")))
    opened = open_shards("val_logits.npy", labels=None, input_kind=None)[""]
    read = torch.cat([input for _, input, _ in opened.batches(100, 500, 77)])
    assert torch.equal(read, torch.from_numpy(logits.astype(np.float32))[100:])
