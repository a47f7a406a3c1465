"""``calibrate`` and ``evaluate`` over rows that are read a few at a time: as in memory, in parts, stopped, resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern.files.shards import open_shards
from focalkern.streaming import CalibrationGridState
from focalkern.study import cross_validation, samples
from focalkern.study.scores import score

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("tabulate", reason="tabulate is not installed")

IN_SOURCE_TREE = "the benchmarks are in the source tree only"
AXES = ("--temperatures", "0.5:4:0.5", "--gammas=0,0.5,1")
GRID = ("--method", "focal-temperature", "--criterion", "ece", *AXES)  # the paper's choice; the verdict is below


def sample(n, seed, n_classes=5):
    """Over-confident logits in float64, in which the search in memory is done, with their labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return (logits * 2).numpy(), target.numpy()


def write_shards(folder, name, n, seed, parts, **options):
    logits, labels = sample(n, seed, **options)
    for i, rows in enumerate(np.array_split(np.arange(n), parts)):
        # Twelve of them: in the order of their names the tenth would be the second.
        np.save(folder / f"{name}_logits-{i}.npy", logits[rows])
        np.save(folder / f"{name}_labels-{i}.npy", labels[rows])
    np.save(folder / f"{name}_logits.npy", logits)
    np.save(folder / f"{name}_labels.npy", labels)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_shards(tmp_path, "val", 500, 0, 12)
    write_shards(tmp_path, "test", 400, 1, 2)
    monkeypatch.chdir(tmp_path)
    # Batches of 30 and of 20 rows.
    monkeypatch.setattr(samples, "_SEARCH_BATCH", 30 * 5)
    monkeypatch.setattr(samples, "_FLOAT64_BATCH", 20 * 5)
    return tmp_path


def result(run, *arguments):
    code, out, err = run("calibrate", *arguments, *GRID, "--json")
    assert code == 0, err
    return json.loads(out)


def assert_same(streamed, whole, digits=1e-12):
    """The same choices and the same metrics, up to the order of summation."""
    assert len(streamed["rows"]) == len(whole["rows"]) == 5
    for found, expected in zip(streamed["rows"], whole["rows"], strict=True):
        assert [found[key] for key in ("method", "criterion", "gamma", "temperature")] == [
            expected[key] for key in ("method", "criterion", "gamma", "temperature")
        ]
        for figures in ("validation", "test"):
            assert found[figures] == pytest.approx(expected[figures], abs=digits)
        if expected["criterion_value"] is not None:
            assert found["criterion_value"] == pytest.approx(expected["criterion_value"], rel=1e-12)
        if expected["intervals"] is not None:
            for name, ends in expected["intervals"].items():
                without = name in ("nll", "brier", "classwise_ece_equal_width")  # they need all probabilities
                assert found["intervals"][name] == (None if without else pytest.approx(ends, abs=digits))
    assert streamed["chosen"] == whole["chosen"]
    assert streamed["remarks"] == [remark.replace("logits.npy", "logits-*.npy") for remark in whole["remarks"]]


@pytest.mark.parametrize("estimator", ["equal_width", "equal_mass", "equal_mass_interp"])
def test_shards_give_what_one_file_gives_in_memory(folder, run, estimator):
    whole = result(run, "val_logits.npy", "--test", "test_logits.npy", "--estimator", estimator)
    streamed = result(run, "val_logits-*.npy", "--test", "test_logits-*.npy", "--estimator", estimator)
    assert_same(streamed, whole)
    assert streamed["data"]["validation"]["n_samples"] == 500


@pytest.mark.parametrize("estimator", ["equal_width", "equal_mass", "equal_mass_interp"])
def test_more_rows_than_confidences_are_kept_of(folder, run, monkeypatch, estimator):
    files = (("val_logits.npy", "--test", "test_logits.npy"), ("val_logits-*.npy", "--test", "test_logits-*.npy"))
    options = ("--estimator", estimator, "--bootstrap", "0")
    whole = result(run, *files[0], *options)
    monkeypatch.setattr(samples, "MOST_KEPT", 300)
    streamed = result(run, *files[1], *options)
    said = [
        float(remark.split("at most ")[1].split()[0].removesuffix("."))
        for remark in streamed["remarks"]
        if "at most" in remark
    ]
    assert len(said) == (1 if estimator == "equal_width" else 2) and 0 < max(said) < 2e-2
    for found, expected in zip(streamed["rows"], whole["rows"], strict=True):
        assert (found["gamma"], found["temperature"]) == (expected["gamma"], expected["temperature"])
        for name, value in expected["test"].items():
            off = 1.05 * max(said) if "equal_mass" in name else 1e-12  # the note has one digit
            assert found["test"][name] == pytest.approx(value, abs=off)
    code, _, err = run("calibrate", *files[1], *GRID, "--bootstrap", "50")
    assert code == 2 and "test_logits-*.npy: expected --bootstrap 0, or at most" in err
    assert any("With so many rows they would be narrow" in remark for remark in result(run, *files[1])["remarks"])


def test_one_file_split_and_the_same_rows(folder, run):
    # Resamples draw row by row, and a split in memory has its rows in another order.
    for options in ((), ("--split", "0.4", "--seed", "3", "--bootstrap", "0")):
        whole = result(run, "val_logits.npy", *options)
        assert_same(result(run, "val_logits.npy", "--stream", *options), whole)


def test_safetensors_of_both_sets(folder, run):
    save_file = pytest.importorskip("safetensors.torch").save_file
    (val, val_labels), (test, test_labels) = (map(torch.from_numpy, sample(200, seed)) for seed in (0, 1))
    both = {"val_logits": val, "val_labels": val_labels, "test_logits": test, "test_labels": test_labels}
    save_file(both, "both.safetensors")
    for i, part in enumerate((slice(0, 150), slice(150, None))):
        save_file({name: tensor[part].contiguous() for name, tensor in both.items()}, f"both-{i}.safetensors")
    whole = result(run, "both.safetensors")
    streamed = result(run, "both-*.safetensors")
    streamed["remarks"] = [text.replace("both-*", "both") for text in streamed["remarks"]]
    assert_same(streamed, whole)
    save_file({"logits": val.bfloat16(), "labels": val_labels.to(torch.uint8)}, "half.safetensors")
    assert result(run, "half.safetensors", "--stream")["data"]["validation"]["n_samples"] == 200


def test_probabilities_with_zeros_on_the_target(folder, run):
    probs = torch.from_numpy(sample(120, 2)[0]).softmax(1)
    labels = probs.argmax(1)
    probs[7] = torch.nn.functional.one_hot((labels[7] + 1) % 5, 5)
    np.save("val_probs.npy", probs.numpy())
    np.save("val_labels.npy", labels.numpy())
    whole = result(run, "val_probs.npy")
    streamed = result(run, "val_probs.npy", "--stream")
    assert any("1 of the 120 rows" in remark for remark in whole["remarks"])
    assert streamed["remarks"] == whole["remarks"]
    assert streamed["rows"][0]["test"] == pytest.approx(whole["rows"][0]["test"])
    np.save("val_logits.npy", probs.clamp(min=1e-9).numpy())
    for more in ((), ("--stream",)):
        code, _, err = run("calibrate", "val_logits.npy", *GRID, *more)
        assert code == 2 and "pass --input-kind probs or, if they are logits, --input-kind logits" in err
    said = result(run, "val_logits.npy", "--stream", "--input-kind", "logits")
    assert any("pass input_kind=probs" in remark for remark in said["remarks"])


def test_table_calibrator_and_report(folder, run):
    pytest.importorskip("matplotlib")
    files = ("val_logits-*.npy", "--test", "test_logits-*.npy")
    code, out, err = run("calibrate", *files, *GRID, "--out", "c.json", "--report", "r")
    assert (code, err) == (0, "")
    assert "validation   500 rows of 5 classes, logits: val_logits-*.npy" in out
    assert (folder / "r/report.html").exists() and (folder / "r/reliability_after.png").exists()
    code, out, err = run("evaluate", "test_logits-*.npy", "--calibrator", "c.json", "--json")
    assert code == 0, err
    streamed = json.loads(out)["sets"][0]["rows"]
    _, out, _ = run("evaluate", "test_logits.npy", "--calibrator", "c.json", "--json")
    for found, expected in zip(streamed, json.loads(out)["sets"][0]["rows"], strict=True):
        assert found["figures"] == pytest.approx(expected["figures"], abs=1e-12)


def test_files_that_are_large_for_the_memory_are_streamed(folder, monkeypatch, run):
    assert not samples.wants_streaming(["val_logits.npy", None])
    monkeypatch.setattr(samples, "_SHARE_OF_MEMORY", 1 << 60)
    assert samples.wants_streaming([None, "val_logits.npy"])
    assert not samples.wants_streaming(["nothing.npy"])


def test_memory_does_not_grow_with_the_rows(tmp_path, monkeypatch):
    """Batches of 8 MiB in float64; each calibrator would keep one of every batch if its memory were not used again."""
    harness = pytest.importorskip("benchmarks.harness", reason=IN_SOURCE_TREE)
    monkeypatch.setattr(samples, "_FLOAT64_BATCH", 1 << 20)
    np.save(tmp_path / "logits.npy", np.zeros((512, 32768), np.float32))
    np.save(tmp_path / "labels.npy", np.arange(512))
    (rows,) = samples.stream_sets(str(tmp_path / "logits.npy"), labels=None, input_kind=None).values()
    extra = harness.peak_extra_mib(lambda: score(rows, [(0.0, 1.0), (1.0, 2.0)], 15))
    assert extra < 120  # 8 of them are in use at a time, and 4 MiB for each class and bin; of 16 batches


def test_the_table_of_the_page_was_recorded():
    bench_streaming = pytest.importorskip("benchmarks.speed.streaming", reason=IN_SOURCE_TREE)
    page = (Path(__file__).parents[2] / "docs" / "evidence" / "memory.md").read_text()
    table = bench_streaming.summary()
    assert table.count("\n") > 6 and table in page


# ---- stopping and going on -----------------------------------------------------------------------------------------


@pytest.fixture
def stopped(folder, run, monkeypatch):
    """A state file, of a search that was interrupted in its fourth batch."""
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
    assert err == "s.state: 84 of 500 rows are done; the same command goes on\nfocalkern calibrate: interrupted\n"
    assert not (folder / "c.json").exists()
    return folder / "s.state"


def test_the_same_command_goes_on(stopped, run, monkeypatch):
    expected = result(run, "val_logits-*.npy")
    code, out, err = run("calibrate", "val_logits-*.npy", *GRID, "--state", "s.state", "--json")
    assert code == 0
    assert err.startswith("resumed from s.state: 84 of 500 rows are done\n")
    assert json.loads(out)["rows"] == expected["rows"]  # to the bit
    assert not stopped.exists()  # it is of no use any more


def change_a_file(folder):
    path = folder / "val_logits-3.npy"
    os.utime(path, ns=(1, 1))
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
        (("plain.csv", "--stream"), "plain.csv: expected .npy, .safetensors or .zarr for reading in parts, found .csv"),
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
    """The rows read before the error are saved, and corrected data continue from there."""
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
    # A pattern that matches the labels too.
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


# ---- several processes ---------------------------------------------------------------------------------------------


def launch(*arguments, **variables):
    import focalkern

    paths = os.path.dirname(os.path.dirname(focalkern.__file__))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}
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
    """As torchrun starts them, but without torchrun, which would end the other one too."""
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
    """Table and cross-validation equal those of the same samples in memory."""
    logits = np.load("val_logits.npy") + np.linspace(-2, 2, 5)  # so that a vector has something to find
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
    assert code == 2 and "other folds" in err  # the sums of another command
    assert verdict_of(run, "val_logits-*.npy", "--state", "s.state") == expected
