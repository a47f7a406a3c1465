"""The training study: interrupted runs continue, their records, and the tables.

Networks are trained on few digits for few epochs. These tests check the program, not which loss is better.
"""

import math
import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import focalkern as fk

pytest.importorskip("sklearn", reason="the study's default data come with scikit-learn")
training = pytest.importorskip("benchmarks.train_study.training", reason="the benchmarks are in the source tree only")
import study_cases  # noqa: E402
from study_cases import ROOT, settings  # noqa: E402

from benchmarks.train_study import data, objectives, records  # noqa: E402
from benchmarks.train_study.__main__ import main  # noqa: E402
from benchmarks.train_study.errors import DataError, SettingsError, StudyError  # noqa: E402

digits = study_cases.digits  # fixture

pytestmark = pytest.mark.usefixtures("one_thread")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def adafocal_run(digits, tmp_path_factory):
    """An uninterrupted run of AdaFocal, the loss with a state."""
    out = tmp_path_factory.mktemp("study")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert training.run(digits, settings(digits), "adafocal", 0, records.folder_of(out, "adafocal", 0))
    torch.set_num_threads(before)
    (run,) = records.read_runs(out, objectives.rank)
    return run


# ---------------------------------------------------------------------------------------------------------------------
# Interrupted and resumed runs
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
    # Each start first reports the last saved epoch and trains no epoch twice.
    assert seen == [1, 1, 2, 2, 3, 3]
    assert contents(tmp_path / "seed-0") == contents(adafocal_run.folder)


def test_a_run_resumes_after_its_process_was_killed(digits, adafocal_run, tmp_path):
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
    # The package of this process comes before the source tree, whose module may be for another torch.
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])
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
        # A second file descriptor meets the lock, as another process would.
        assert not training.run(digits, settings(digits), "focal-2", 0, tmp_path / "seed-0")
        raise StoppedError

    with pytest.raises(StoppedError):
        training.run(digits, settings(digits), "focal-2", 0, tmp_path / "seed-0", inside)


def test_only_the_process_that_sees_all_runs_complete_reports(digits, tmp_path, capsys, monkeypatch):
    """Two processes share the runs. A report on some of them must not replace the report on all."""
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


def test_divergence_is_an_error(digits, tmp_path):
    with pytest.raises(training.DivergedError, match="not finite after 1 epochs"):
        training.run(digits, settings(digits, lr=1e30), "cross-entropy", 0, tmp_path)


def test_the_learning_rate_drops_where_the_papers_drop_it(digits):
    whole = settings(digits, epochs=350)
    rates = [whole.learning_rate(epoch) for epoch in (1, 150, 151, 250, 251, 350)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


# ---------------------------------------------------------------------------------------------------------------------
# The records
# ---------------------------------------------------------------------------------------------------------------------
def test_the_last_epoch_follows_from_the_saved_logits(adafocal_run):
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
    # The records have six digits.
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
            # An empty bin keeps its gamma; lambda is 1, and no gamma comes near a clip here.
            error = 0.0 if math.isnan(now["calibration_error"]) else now["calibration_error"]
            sign = 1 if now["gamma"] > 0 else -1
            expected = now["gamma"] * math.exp(sign * error)
            expected = -sign * 0.2 if abs(expected) < 0.2 else expected
            assert then["gamma"] == pytest.approx(expected, rel=1e-4)
    assert any(row["gamma"] != 1 for row in epochs[3])


def test_learned_epochs_and_training_error_agree(digits, tmp_path):
    """In the first epoch the correct samples are the learned ones; the records do not show later epochs."""
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
