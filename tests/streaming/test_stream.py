"""``calibrate`` and ``evaluate`` over rows that are read in batches: the results of rows in memory."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from stream_cases import GRID, assert_same, result, sample, shards_in

from focalkern.study import samples
from focalkern.study.scores import score

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("tabulate", reason="tabulate is not installed")

IN_SOURCE_TREE = "the benchmarks are in the source tree only"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return shards_in(tmp_path, monkeypatch)


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
    assert any(
        "With so many rows the intervals would be narrow" in remark for remark in result(run, *files[1])["remarks"]
    )


def test_one_file_split_and_the_same_rows(folder, run):
    # Resamples are drawn per row, and a split in memory has the rows in another order.
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
    assert any("pass --input-kind probs" in remark for remark in said["remarks"])


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
    """Batches take 8 MiB in float64. Without reuse of memory, each calibrator would keep one of every batch."""
    harness = pytest.importorskip("benchmarks.harness", reason=IN_SOURCE_TREE)
    monkeypatch.setattr(samples, "_FLOAT64_BATCH", 1 << 20)
    np.save(tmp_path / "logits.npy", np.zeros((512, 32768), np.float32))
    np.save(tmp_path / "labels.npy", np.arange(512))
    (rows,) = samples.stream_sets(str(tmp_path / "logits.npy"), labels=None, input_kind=None).values()
    extra = harness.peak_extra_mib(lambda: score(rows, [(0.0, 1.0), (1.0, 2.0)], 15))
    assert extra < 120  # 8 of them are in use at a time, plus 4 MiB per class and bin; out of 16 batches


def test_the_table_of_the_page_was_recorded():
    bench_streaming = pytest.importorskip("benchmarks.speed.streaming", reason=IN_SOURCE_TREE)
    page = (Path(__file__).parents[2] / "docs" / "evidence" / "memory.md").read_text()
    table = bench_streaming.summary()
    assert table.count("\n") > 6 and table in page
