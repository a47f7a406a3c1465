"""The training study: runs that go on where they were stopped, what they record, and the tables made of it.

Everything is trained on the digits with a few samples and epochs: what is tested is the machinery, and nothing about
which loss is better.
"""

import gzip
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import focalkern as fk

pytest.importorskip("sklearn", reason="the study's default data come with scikit-learn")
training = pytest.importorskip("benchmarks.train_study.training", reason="the benchmarks are in the source tree only")

from benchmarks.train_study import data, networks, objectives, records, run_rows, sweep, tables  # noqa: E402
from benchmarks.train_study.__main__ import main  # noqa: E402
from benchmarks.train_study.errors import DataError, SettingsError, StudyError  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "train_study"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


def settings(digits, **changes):
    chosen = training.Settings(
        data=digits.fingerprint(),
        network="small-cnn",
        width=4,
        epochs=3,
        batch_size=64,
        lr=0.1,
        momentum=0.9,
        weight_decay=5e-4,
        val_fraction=0.1,
        train_size=200,
        augment=False,
        device="cpu",
    )
    return replace(chosen, **changes)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def adafocal_run(digits, tmp_path_factory):
    """One uninterrupted run of the loss that has a state of its own."""
    out = tmp_path_factory.mktemp("study")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert training.run(digits, settings(digits), "adafocal", 0, records.folder_of(out, "adafocal", 0))
    torch.set_num_threads(before)
    (run,) = records.read_runs(out, objectives.rank)
    return run


# ---------------------------------------------------------------------------------------------------------------------
# Stopping and going on
# ---------------------------------------------------------------------------------------------------------------------


class StoppedError(Exception):
    pass


def test_a_run_stopped_after_every_epoch_ends_with_the_same_files(digits, adafocal_run, tmp_path):
    seen = []
    for stop in (1, 2, 3):

        def on_epoch(epoch, row, stop=stop):
            seen.append(epoch)
            if epoch == stop:
                raise StoppedError

        with pytest.raises(StoppedError):
            training.run(digits, settings(digits), "adafocal", 0, tmp_path / "seed-0", on_epoch)
        assert not records.is_complete(tmp_path / "seed-0")
    training.run(digits, settings(digits), "adafocal", 0, tmp_path / "seed-0", lambda epoch, row: seen.append(epoch))
    # Each start begins with the last epoch that is saved, and trains none twice.
    assert seen == [1, 1, 2, 2, 3, 3]
    assert contents(tmp_path / "seed-0") == contents(adafocal_run.folder)


def test_a_killed_process_is_taken_up_again(digits, adafocal_run, tmp_path):
    script = f"""
import os, pathlib, signal, torch
from benchmarks.train_study import data
from benchmarks.train_study.training import Settings, run

def kill(epoch, row):
    if epoch == 2:
        os.kill(os.getpid(), signal.SIGKILL)

torch.set_num_threads(1)
run(data.load("digits"), {settings(digits)!r}, "adafocal", 0, pathlib.Path("seed-0"), kill)
"""
    (tmp_path / "killed.py").write_text(script)
    # The package of this process comes before the tree, whose module may be that of another torch.
    paths = os.pathsep.join([str(Path(fk.__file__).parents[1]), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "killed.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, timeout=300
    )
    assert done.returncode == -signal.SIGKILL
    folder = tmp_path / "seed-0"
    assert not records.is_complete(folder)
    seen = []
    training.run(digits, settings(digits), "adafocal", 0, folder, lambda epoch, row: seen.append(epoch))
    assert seen == [2, 3]
    assert contents(folder) == contents(adafocal_run.folder)


def test_a_complete_run_is_not_trained_again(digits, adafocal_run):
    before = {path.name: path.stat().st_mtime_ns for path in adafocal_run.folder.iterdir()}

    def fail(epoch, row):
        raise AssertionError

    assert training.run(digits, settings(digits), "adafocal", 0, adafocal_run.folder, fail)
    assert {path.name: path.stat().st_mtime_ns for path in adafocal_run.folder.iterdir()} == before


def test_a_run_that_another_process_has_is_left_to_it(digits, tmp_path):
    def inside(epoch, row):
        # A second descriptor meets the lock as another process would.
        assert not training.run(digits, settings(digits), "focal-2", 0, tmp_path / "seed-0")
        raise StoppedError

    with pytest.raises(StoppedError):
        training.run(digits, settings(digits), "focal-2", 0, tmp_path / "seed-0", inside)


def test_only_the_process_that_sees_all_runs_complete_reports(digits, tmp_path, capsys, monkeypatch):
    """Two processes share the runs. A report of some of them must not come after the report of all."""
    arguments = ["--losses", "brier", "--seeds", "0", "--epochs", "1", "--width", "4", "--threads", "1", "--out"]

    def busy(*_):
        return False

    with monkeypatch.context() as other:
        other.setattr(training, "run", busy)
        assert main([*arguments, str(tmp_path)]) == 0
    assert "1 runs are with another process" in capsys.readouterr().out
    assert not (tmp_path / "report").exists()

    trained = training.run

    def finished_meanwhile(*run):
        trained(*run)
        return False

    monkeypatch.setattr(training, "run", finished_meanwhile)
    monkeypatch.setattr("benchmarks.train_study.report.write", lambda out, folder: f"report of {out}")
    assert main([*arguments, str(tmp_path)]) == 0
    assert f"report of {tmp_path}" in capsys.readouterr().out


def test_other_settings_are_an_error(digits, tmp_path):
    settings(digits).claim(tmp_path)
    settings(digits).claim(tmp_path)
    with pytest.raises(SettingsError, match=r"other settings \(lr 0.1, now 0.05\): choose another --out"):
        settings(digits, lr=0.05).claim(tmp_path)


def test_settings_are_checked(digits):
    for name, value, what in (
        ("epochs", 0, "at least 1"),
        ("val_fraction", 1.0, "between 0 and 1"),
        ("lr", math.nan, "above 0 and finite"),
        ("momentum", 1.0, "at least 0 and below 1"),
        ("weight_decay", -1.0, "at least 0 and finite"),
    ):
        with pytest.raises(StudyError, match=f"{name} must be {what}, got {value}"):
            settings(digits, **{name: value})


def test_divergence_is_said(digits, tmp_path):
    with pytest.raises(training.DivergedError, match="not finite after 1 epochs"):
        training.run(digits, settings(digits, lr=1e30), "cross-entropy", 0, tmp_path)


def test_the_learning_rate_drops_where_the_papers_drop_it(digits):
    whole = settings(digits, epochs=350)
    rates = [whole.learning_rate(epoch) for epoch in (1, 150, 151, 250, 251, 350)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


# ---------------------------------------------------------------------------------------------------------------------
# What is recorded
# ---------------------------------------------------------------------------------------------------------------------


def test_the_last_epoch_is_what_the_saved_logits_say(adafocal_run):
    row, logits = adafocal_run.epochs[-1], adafocal_run.logits
    z, labels = logits["test_logits"].double(), logits["test_labels"]
    probs = z.softmax(-1)
    right = z.argmax(-1) == labels
    entropy = torch.distributions.Categorical(logits=z).entropy()
    nll = F.cross_entropy(z, labels, reduction="none")
    temperature = row["temperature_ece"]
    expected = {
        "test_nll": nll.mean(),
        "test_error": 1 - right.double().mean(),
        "test_nll_correct": nll[right].mean(),
        "test_nll_incorrect": nll[~right].mean(),
        "test_entropy": entropy.mean(),
        "test_confidence": probs.amax(-1).mean(),
        "test_entropy_correct": entropy[right].mean(),
        "test_entropy_incorrect": entropy[~right].mean(),
        "val_nll": F.cross_entropy(logits["val_logits"].double(), logits["val_labels"]),
        "test_ece_equal_width": fk.metrics.expected_calibration_error(probs, labels),
        "test_ece_equal_mass": fk.metrics.expected_calibration_error(probs, labels, estimator="equal_mass"),
        "test_ece_at_temperature_ece_equal_width": fk.metrics.expected_calibration_error(
            (z / temperature).softmax(-1), labels
        ),
    }
    # Six digits are written.
    assert {key: row[key] for key in expected} == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-5)
    scaling = fk.TemperatureScaling(criterion="ece", estimator="equal_width", temperatures=fk.PAPER_TEMPERATURES).fit(
        logits["val_logits"], logits["val_labels"]
    )
    assert temperature == pytest.approx(scaling.temperature_)


def test_gammas_follow_the_recorded_calibration_errors(adafocal_run):
    epochs = {}
    for row in adafocal_run.bins:
        epochs.setdefault(row["epoch"], []).append(row)
    assert [row["gamma"] for row in epochs[1]] == [1.0] * 15
    for epoch in (1, 2):
        for now, then in zip(epochs[epoch], epochs[epoch + 1], strict=True):
            # An empty bin keeps its gamma; lambda is 1, and nothing comes near a clip here.
            error = 0.0 if math.isnan(now["calibration_error"]) else now["calibration_error"]
            sign = 1 if now["gamma"] > 0 else -1
            expected = now["gamma"] * math.exp(sign * error)
            expected = -sign * 0.2 if abs(expected) < 0.2 else expected
            assert then["gamma"] == pytest.approx(expected, rel=1e-4)
    assert any(row["gamma"] != 1 for row in epochs[3])


def test_learned_epochs_and_training_error_agree(digits, tmp_path):
    """In the first epoch the samples that are right are those learned then: later ones cannot be told from outside."""
    training.run(digits, settings(digits), "cross-entropy", 0, tmp_path / "cross-entropy" / "seed-0")
    (run,) = records.read_runs(tmp_path, objectives.rank)
    learned = run.training_samples["learned_epoch"]
    assert len(learned) == 200
    assert 1 - float((learned == 1).double().mean()) == pytest.approx(run.epochs[0]["train_error"], rel=1e-5)
    assert set(learned.tolist()) <= {0, 1, 2, 3}
    assert bool((run.training_samples["top_logit"] >= run.training_samples["label_logit"]).all())


def test_all_losses_begin_with_the_same_weights_and_batches(digits, tmp_path):
    """Inverse focal loss with gamma 0 is cross-entropy: with the same start they have the same records."""
    rows = {}
    for loss in ("cross-entropy", "inverse-focal-0"):
        folder = tmp_path / loss / "seed-0"
        training.run(digits, settings(digits, epochs=1), loss, 0, folder)
        rows[loss] = records.read_csv(folder / "epochs.csv")[0]
    assert rows["inverse-focal-0"]["test_nll"] == pytest.approx(rows["cross-entropy"]["test_nll"], rel=1e-3)


def test_the_split_is_seeded_and_does_not_depend_on_the_training_size(digits):
    def parts(seed, size=None):
        return data.split(digits, seed=seed, val_fraction=0.25, train_size=size, device=torch.device("cpu"))

    whole = parts(0)
    assert len(whole.val_labels) == 300
    assert len(whole.val_labels) + len(whole.train_labels) == len(digits.train_labels)
    images = torch.cat([whole.val_inputs, whole.train_inputs]).flatten(1)
    assert torch.equal(images.unique(dim=0), digits.train_inputs.flatten(1).unique(dim=0))
    assert torch.equal(parts(0, 50).val_inputs, whole.val_inputs)
    assert torch.equal(parts(0, 50).train_inputs, whole.train_inputs[:50])
    assert not torch.equal(parts(1).val_inputs, whole.val_inputs)
    prepared = whole.prepare(whole.train_inputs)
    assert float(prepared.mean()) == pytest.approx(0, abs=1e-4)
    assert float(prepared.std()) == pytest.approx(1, abs=1e-3)
    with pytest.raises(DataError, match="train_size must be at most 898, what validation leaves, got 1000"):
        parts(0, 1000)


def test_augmentation_crops_and_flips():
    images = torch.arange(1, 17, dtype=torch.uint8).reshape(1, 1, 4, 4).repeat(500, 2, 1, 1)
    images[:, 1] += 100
    moved = data.augment(images, torch.Generator().manual_seed(0))
    padded = F.pad(images[0], (4, 4, 4, 4))
    views = [padded[:, i : i + 4, j : j + 4] for i in range(9) for j in range(9)]
    possible = {view.numpy().tobytes() for one in views for view in (one.contiguous(), one.flip(-1).contiguous())}
    found = {one.contiguous().numpy().tobytes() for one in moved}
    assert found <= possible
    assert len(found) > 80


# ---------------------------------------------------------------------------------------------------------------------
# Data, networks, losses
# ---------------------------------------------------------------------------------------------------------------------


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def idx_folder(tmp_path):
    rng = np.random.default_rng(0)
    for part, n in (("train", 7), ("t10k", 3)):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(rng.integers(256, size=(n, 5, 6)))))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(rng.integers(4, size=n)))
    return tmp_path


def test_idx_files(idx_folder):
    found = data.load(str(idx_folder))
    expected = np.random.default_rng(0).integers(256, size=(7, 5, 6))
    assert found.train_inputs.shape == (7, 1, 5, 6)
    assert found.test_inputs.shape == (3, 1, 5, 6)
    assert np.array_equal(found.train_inputs[:, 0].numpy(), expected)
    assert found.test_labels.dtype == torch.int64


def test_idx_errors(idx_folder):
    path = idx_folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"expected 11 bytes for shape \[3\], got 10"):
        data.load(str(idx_folder))
    path.write_bytes(b"no idx file")
    with pytest.raises(DataError, match="not an IDX file of unsigned bytes"):
        data.load(str(idx_folder))
    path.unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte \(.gz or not\) is missing"):
        data.load(str(idx_folder))


def test_npz_files(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(256, size=(20, 8, 8, 3), dtype=np.uint8), rng.integers(3, size=(20, 1))
    path = tmp_path / "set.npz"
    for names in (
        ("train_images", "train_labels", "test_images", "test_labels"),
        ("x_train", "y_train", "x_test", "y_test"),
    ):
        np.savez(path, **dict(zip(names, (x[:15], y[:15], x[15:], y[15:]), strict=True)))
        found = data.load(str(path))
        assert np.array_equal(found.train_inputs.numpy(), np.moveaxis(x[:15], -1, 1))
        assert np.array_equal(found.test_labels.numpy(), y[15:, 0])
    np.savez(path, images=x, labels=y)
    cut = data.load(str(path))
    assert (len(cut.train_labels), len(cut.test_labels)) == (16, 4)
    np.savez(path, images=x.astype(np.float32), labels=y)
    with pytest.raises(DataError, match=r"images must be uint8 \[N, H, W\] or \[N, H, W, C\], got float32"):
        data.load(str(path))
    np.savez(path, something=x)
    with pytest.raises(DataError, match=r"expected images and labels, .* found something"):
        data.load(str(path))
    np.savez(path, train_images=x, train_labels=y, test_images=x[:, :4], test_labels=y)
    with pytest.raises(DataError, match=r"the same shape, got \[3, 8, 8\] and \[3, 4, 8\]"):
        data.load(str(path))
    np.savez(path, images=x, labels=0 * y)
    with pytest.raises(DataError, match="at least two classes, got only 0"):
        data.load(str(path))
    np.savez(path, images=np.array([object()]), labels=y)
    with pytest.raises(DataError, match=r"not an .npz file of plain arrays: Object arrays"):
        data.load(str(path))
    for broken in (b"no zip file", path.read_bytes()[:-30]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"not an .npz file of plain arrays: File is not a zip file"):
            data.load(str(path))


def test_trec_takes_its_vocabulary_from_the_training_file(tmp_path):
    (tmp_path / "TREC.train.all").write_text("0 what is a tree ?\n1 who is it ?\n0 what is once\n")
    (tmp_path / "TREC.test.all.gz").write_bytes(gzip.compress(b"1 what is unseen unseen ?\n"))
    found = data.load(str(tmp_path))
    # "?", "is" and "what" come twice or more in the training file; the rest, "unseen" included, is one unknown word.
    assert found.n_tokens == 2 + 3
    assert found.train_labels.tolist() == [0, 1, 0]
    what, is_, unknown, question = found.test_inputs[0, [0, 1, 2, 4]].tolist()
    assert found.train_inputs[0, :5].tolist() == [what, is_, unknown, unknown, question]
    assert unknown == 1
    assert found.test_inputs[0, 5:].eq(0).all()
    assert networks.build("text-cnn", found)(found.test_inputs).shape == (1, 2)


def test_unknown_data(tmp_path):
    with pytest.raises(DataError, match="no such data set"):
        data.load(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="expected train-images-idx3-ubyte or TREC"):
        data.load(str(tmp_path))


# Weights as published: He et al. 2016 (in the form for small images), Zagoruyko & Komodakis 2016 (36.5 million).
@pytest.mark.parametrize(
    ("name", "weights"), [("resnet-18", 11_173_962), ("resnet-50", 23_520_842), ("wrn-28-10", 36_479_194)]
)
def test_networks_have_the_published_size(name, weights):
    images, labels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.tensor([9])
    dataset = data.Dataset("cifar", images, labels, images, labels)
    with torch.device("meta"):
        network = networks.build(name, dataset)
        assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in network.parameters()) == weights


def test_networks_and_data_must_fit(digits):
    with pytest.raises(StudyError, match="text-cnn does not take images"):
        networks.build("text-cnn", digits)
    with pytest.raises(StudyError, match="expected one of small-cnn"):
        networks.build("large-cnn", digits)


@pytest.mark.parametrize("name", objectives.ALL)
def test_every_loss_is_one(name):
    logits = torch.randn(6, 4, requires_grad=True)
    loss = objectives.build(name)(logits, torch.tensor([0, 1, 2, 3, 0, 1]))
    loss.backward()
    assert loss.shape == ()
    assert bool(logits.grad.isfinite().all())
    assert bool(logits.grad.any())
    assert objectives.canonical(name) == name


def test_names_of_losses():
    assert objectives.canonical("focal") == "focal-3"
    assert objectives.canonical("label-smoothing-.050") == "label-smoothing-0.05"
    assert objectives.build("focal-1.5").gamma == 1.5
    assert [objectives.gamma(name) for name in ("focal-2", "cross-entropy", "inverse-focal-2", "brier")] == [
        2,
        0,
        -2,
        None,
    ]
    for wrong in ("focal-x", "brier-2", "hinge", "flsd-54"):
        with pytest.raises(StudyError, match="loss: expected one of cross-entropy, focal-X"):
            objectives.build(wrong)


# ---------------------------------------------------------------------------------------------------------------------
# The command, tables, figures
# ---------------------------------------------------------------------------------------------------------------------


def test_quick_study(tmp_path, capsys):
    out = tmp_path / "study"
    assert main(["--quick", "--width", "4", "--threads", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "focal-3 + FTS" in printed
    rows = records.read_csv(out / "report" / "calibration.csv")
    assert {(row["loss"], row["seed"]) for row in rows} == {("cross-entropy", 0), ("focal-3", 0)}
    for name in (
        *run_rows.PER_RUN,
        *tables.TABLES,
    ):
        assert (out / "report" / f"{name}.csv").stat().st_size > 100
    pictures = {path.stem for path in (out / "report").glob("*.png")}
    # Those that need AdaFocal, three losses between focal and inverse focal, or other families are left out.
    assert pictures == {
        *("training_curves", "correct_and_incorrect", "scaled_ece", "validation_size", "learned"),
        *("optimal_temperature", "out_of_distribution", "reliability"),
    }
    # focalkern calibrate reads the logits, and finds what the study found.
    from focalkern.cli import main as focalkern

    logits = out / "focal-3" / "seed-0" / "logits.npz"
    papers = ("--method", "focal-temperature", "--criterion", "ece")
    assert focalkern(["calibrate", str(logits), *papers, "--out", str(tmp_path / "c.json")]) == 0
    found = json.loads((tmp_path / "c.json").read_text())
    (own,) = [
        row
        for row in rows
        if (row["loss"], row["method"], row["criterion"]) == ("focal-3", "focal temperature", "ece equal_mass")
    ]
    assert (found["gamma"], found["temperature"]) == pytest.approx((own["gamma"], own["temperature"]))
    assert main(["--quick", "--width", "8", "--out", str(out)]) == 2
    assert "width 4, now 8" in capsys.readouterr().err


def test_quick_sweep(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "FAMILIES", {"label-smoothing": (0.05,), "l1-norm": (0.01,), "focal": (1, 3)})
    arguments = ["sweep", "--sizes", "40", "80", "--epochs", "1", "--seeds", "0", "--width", "4", "--threads", "1"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "with histogram binning" in capsys.readouterr().out
    rows = records.read_csv(tmp_path / "report" / "table_coefficients.csv")
    assert [row["train_size"] for row in rows] == [40] * 5 + [80] * 5
    assert {path.stem for path in (tmp_path / "report").glob("*.png")} >= {"coefficients", "best_coefficient"}


def test_a_report_of_nothing_is_an_error(tmp_path, capsys):
    assert main(["report", "--out", str(tmp_path)]) == 2
    assert "no complete run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--losses hinge", "got 'hinge'"),
        ("--losses label-smoothing-1.5", "label-smoothing-1.5: .*label_smoothing must be between 0.0 and 1.0"),
        ("--val-fraction 0.0001", "leave none to train on or to validate with"),
        ("--train-size 2000", "at most 1078, what validation leaves"),
        ("--threads 0", "threads must be at least 1, got 0"),
        ("--seeds 0 -1", "seeds must be from 0 to 2147483647, got -1"),
        ("--sizes 50", "sizes: they are the sweep's"),
        ("sweep --losses brier", "losses: the sweep has its own"),
        ("--out file/out", "Not a directory"),
    ],
)
def test_the_command_refuses_before_it_writes(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(arguments.split()) == 2
    assert re.search(f"^train_study: .*{said}", capsys.readouterr().err)
    assert os.listdir() == ["file"]


def calibration_row(loss, seed, method, criterion, ece, temperature=1.0):
    figures = dict.fromkeys(("accuracy", "nll", "brier", "ece_equal_mass_interp", "classwise_ece"), 0.5)
    chosen = {"loss": loss, "seed": seed, "method": method, "criterion": criterion, "temperature": temperature}
    floor = {"ece_equal_width_floor": 0.005}
    return {**figures, **chosen, **floor, "gamma": 0.0, "ece_equal_width": ece, "ece_equal_mass": ece}


def test_means_marks_and_gains():
    from scipy.stats import ttest_1samp

    rows = []
    ece = {"cross-entropy": [0.010, 0.011, 0.012], "focal-3": [0.021, 0.0211, 0.0230]}
    for loss, values in ece.items():
        for seed, value in enumerate(values):
            rows += [
                calibration_row(loss, seed, "none", "", 0.1),
                calibration_row(loss, seed, "temperature", "ece equal_width", value, 1.5 + seed),
                calibration_row(loss, seed, "temperature", "ece equal_mass", 0.02),
                calibration_row(loss, seed, "temperature", "nll", 0.025),
                calibration_row(loss, seed, "focal temperature", "ece equal_mass", 0.03),
                calibration_row(loss, seed, "focal temperature", "nll", 0.024),
                calibration_row(loss, seed, "histogram binning", "", 0.01 + 0.001 * seed),
            ]
    focal, plain = tables.post_hoc_table(rows)
    assert (focal["loss"], plain["loss"]) == ("focal-3", "cross-entropy")
    assert focal["ece_mean_temperature"] == pytest.approx(0.0217)
    assert focal["ece_std_temperature"] == pytest.approx(np.std(ece["focal-3"], ddof=1))
    assert focal["temperature_mean"] == pytest.approx(2.5)
    # A paired test is a test of the differences.
    differences = np.subtract(ece["focal-3"], ece["cross-entropy"])
    assert focal["p_temperature"] == pytest.approx(ttest_1samp(differences, 0).pvalue)
    assert focal["p_temperature"] < 0.05
    text = tables.format_table("table_post_hoc", [focal, plain])
    assert "0.0217 ± 0.0011 +" in text
    assert math.isnan(plain["p_temperature"])
    gains = {row["method"]: row["gain"] for row in tables.selection_table(rows) if row["loss"] == "all losses"}
    assert gains == pytest.approx({"temperature": 1 - 0.02 / 0.025, "focal temperature": 1 - 0.03 / 0.024})


# ---------------------------------------------------------------------------------------------------------------------
# The recorded study
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["cross-entropy", "focal-3"])
def test_the_recorded_figures_come_from_the_recorded_logits(loss, tmp_path):
    """tests/data holds the logits of seed 0; all that was recorded about them is found again."""
    with np.load(ROOT / "tests" / "data" / f"fashion_mnist_{loss}.npz") as file:
        logits = {key: torch.from_numpy(file[key]) for key in file.files}
    assert [len(logits[f"{part}_labels"]) for part in ("val", "test")] == [6000, 10000]
    recorded = [
        row
        for row in records.read_csv(RESULTS / "fashion_mnist" / "calibration.csv")
        if (row["loss"], row["seed"]) == (loss, 0)
    ]
    run = records.Run(tmp_path, loss, 0, {key: recorded[0][key] for key in run_rows.ABOUT})
    run.__dict__["logits"] = logits
    computed = run_rows.calibration_rows(run)
    assert len(computed) == len(recorded) == 7
    for now, then in zip(computed, recorded, strict=True):
        assert (now["method"], now["criterion"]) == (then["method"], then["criterion"])
        for name in ("gamma", "temperature", "ece_equal_width_floor", *run_rows.FIGURES):
            # Six digits are written.
            assert now[name] == pytest.approx(then[name], rel=1e-5, nan_ok=True), (now["method"], name)


def test_the_recorded_tables_come_from_the_recorded_rows():
    folder = RESULTS / "fashion_mnist"
    assert len({row["seed"] for row in records.read_csv(folder / "calibration.csv")}) == 3
    for name, (_, source, make) in tables.TABLES.items():
        rows = make(records.read_csv(folder / f"{source}.csv"))
        recorded = records.read_csv(folder / f"{name}.csv")
        assert len(rows) == len(recorded)
        for now, then in zip(rows, recorded, strict=True):
            numbers = {key: value for key, value in now.items() if isinstance(value, float)}
            # A small standard deviation or difference of means keeps fewer digits than they have.
            expected = pytest.approx(numbers, rel=1e-2, abs=2e-6, nan_ok=True)
            assert {key: then[key] for key in numbers} == expected


def test_the_page_says_what_was_recorded():
    """Its table, and every figure in its sentences."""
    folder = RESULTS / "fashion_mnist"
    read = {path.stem: records.read_csv(path) for path in folder.glob("*.csv")}
    pages = " ".join((ROOT / "docs" / "evidence" / "training.md").read_text().split())
    focal = read["table_focal_temperature"]
    table = tables.format_summary(focal, tablefmt="github")
    assert table in (ROOT / "docs" / "evidence" / "training.md").read_text(), f"the table should be\n{table}"

    def value(name, loss, column, **chosen):
        (row,) = [row for row in read[name] if row["loss"] == loss and chosen.items() <= row.items()]
        return row[column]

    def curve(loss, column):
        found = [[row[column] for row in read["epochs"] if (row["loss"], row["epoch"]) == (loss, e)] for e in (1, 14)]
        return " to ".join(f"{np.mean(values):.2f}" for values in found)

    def top(loss, epoch):
        chosen = [row["top_logit"] for row in read["learned"] if (row["loss"], row["learned_epoch"]) == (loss, epoch)]
        return f"{np.mean(chosen):.1f}"

    def ece(loss, method="none"):
        return f"{value('table_focal_temperature', loss, 'ece_equal_mass_mean', method=method):.4f}"

    gain = next(row for row in read["table_selection"] if (row["loss"], row["method"]) == ("all losses", "temperature"))
    p_values = [row[f"p_{short}"] for row in read["table_post_hoc"] for short in ("temperature", "histogram")]
    p_values = [p for p in p_values if not math.isnan(p)]
    temperatures = {row["loss"]: f"{row['temperature_mean']:.2f}" for row in read["table_post_hoc"]}
    for said in (
        f"({curve('cross-entropy', 'head_weight_norm')}); under focal 3 they go",
        f"from {curve('focal-3', 'test_nll_incorrect')} and from {curve('focal-3', 'head_weight_norm')}",
        f"from {temperatures['focal-7']} for focal 7 over {temperatures['cross-entropy']} for cross-entropy to "
        f"{temperatures['inverse-focal-3']} for",
        f"{top('cross-entropy', 1)} for those first right in epoch 1 and {top('cross-entropy', 10)} for those first "
        f"right in epoch 10, under focal 3 {top('focal-3', 1)} and {top('focal-3', 10)} (Wang",
        f"and lower in {gain['runs_better']:g} of {gain['runs']:g} runs",
        f"Of {len(p_values)} paired t-tests",
    ):
        assert said in pages
    assert sum(p < 0.05 for p in p_values) == 1
    assert value("table_post_hoc", "label-smoothing-0.05", "p_temperature") < 0.05
    assert min(ece(row["loss"]) for row in focal) == ece("adafocal")
    for method in ("temperature", "focal temperature"):
        assert value("table_selection", "cross-entropy", "gain", method=method) < 0

    swept = records.read_csv(RESULTS / "digits_sweep" / "table_coefficients.csv")

    def best(family, size):
        rows = [row for row in swept if row["train_size"] == size and row["loss"].startswith((family, "cross-entropy"))]
        return min(rows, key=lambda row: row["ece_equal_width_mean_uncalibrated"])["loss"]

    families = ("label-smoothing", "l1-norm", "focal")
    assert [best(family, 99) for family in families] == ["label-smoothing-0.03", "l1-norm-0.01", "focal-3"]
    assert "from 0.03 (label smoothing), 0.01 (L1 norm) and 3 (focal) to 0" in pages
    assert {best(family, 799) for family in families} == {"cross-entropy"}


# ---------------------------------------------------------------------------------------------------------------------
# Several lengths of training
# ---------------------------------------------------------------------------------------------------------------------


def test_regimes_compare_the_losses_of_complete_seeds(digits, tmp_path):
    regimes = pytest.importorskip("benchmarks.train_study.regimes")
    runs = tmp_path / "runs"
    for epochs, losses_and_seeds in {1: [("cross-entropy", 0), ("focal-3", 0), ("cross-entropy", 1)], 2: []}.items():
        for loss, seed in losses_and_seeds:
            folder = records.folder_of(runs / str(epochs), loss, seed)
            assert training.run(digits, settings(digits, epochs=epochs), loss, seed, folder)
    assert regimes.main([str(runs), "--out", str(tmp_path / "out")]) == 0
    scores = records.read_csv(tmp_path / "out" / "scores.csv")
    assert {(row["loss"], row["seed"]) for row in scores} == {("cross-entropy", 0), ("focal-3", 0)}
    assert {row["method"] for row in scores} == set(regimes.METHODS)
    (run,) = [run for run in records.read_runs(runs / "1", objectives.rank) if run.loss == "focal-3"]
    probs = run.logits["test_logits"].double().softmax(-1)
    (row,) = [row for row in scores if (row["loss"], row["method"]) == ("focal-3", "none")]
    assert row["nll"] == pytest.approx(float(fk.metrics.nll(probs, run.logits["test_labels"])), rel=1e-5)
    (base,) = [row for row in scores if (row["loss"], row["method"]) == ("cross-entropy", "none")]
    (pair,) = [r for r in records.read_csv(tmp_path / "out" / "differences.csv") if r["method"] == "none"]
    assert pair["nll"] == pytest.approx(row["nll"] - base["nll"], abs=1e-5 * row["nll"])  # six digits are written
    assert pair["nll_low"] <= pair["nll"] <= pair["nll_high"]
    assert f"{row['nll']:.4f}" in (tmp_path / "out" / "tables.md").read_text()
    assert (tmp_path / "out" / "over_the_epochs.png").stat().st_size > 1000


def test_regimes_of_nothing(tmp_path, capsys):
    regimes = pytest.importorskip("benchmarks.train_study.regimes")
    assert regimes.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "no complete run" in capsys.readouterr().err


def test_recorded_regimes_are_those_of_the_rows():
    regimes = pytest.importorskip("benchmarks.train_study.regimes")
    folder = RESULTS / "fashion_mnist_4000"
    assert (folder / "tables.md").read_text() == regimes.tables_of(folder)


def test_figures_of_the_readme_are_recorded():
    section = (ROOT / "README.md").read_text().split("## When it pays")[1].split("## ")[0]
    recorded = (RESULTS / "fashion_mnist_4000" / "tables.md").read_text()
    recorded += "".join(path.read_text() for path in (ROOT / "benchmarks" / "results").glob("spline_acceptance_*.md"))
    figures = re.findall(r"\d\.\d{4}", section)
    assert len(figures) >= 8
    assert [figure for figure in figures if figure not in recorded] == []
