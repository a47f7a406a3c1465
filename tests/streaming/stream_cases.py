"""Common parts of the tests of streamed searches: shards, a command, and the comparison of two results."""

import json

import numpy as np
import pytest
import torch

from focalkern.study import samples

AXES = ("--temperatures", "0.5:4:0.5", "--gammas=0,0.5,1")
GRID = ("--method", "focal-temperature", "--criterion", "ece", *AXES)  # the paper's choice


def sample(n, seed, n_classes=5):
    """Over-confident logits in float64, in which the search in memory is done, with their labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return (logits * 2).numpy(), target.numpy()


def write_shards(folder, name, n, seed, parts, **options):
    logits, labels = sample(n, seed, **options)
    for i, rows in enumerate(np.array_split(np.arange(n), parts)):
        # Twelve shards: sorted by name, the tenth would be the second.
        np.save(folder / f"{name}_logits-{i}.npy", logits[rows])
        np.save(folder / f"{name}_labels-{i}.npy", labels[rows])
    np.save(folder / f"{name}_logits.npy", logits)
    np.save(folder / f"{name}_labels.npy", labels)


def shards_in(tmp_path, monkeypatch):
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
                without = name in ("nll", "brier", "classwise_ece_equal_width")  # bins need all probabilities
                assert found["intervals"][name] == (None if without else pytest.approx(ends, abs=digits))
    assert streamed["chosen"] == whole["chosen"]
    assert streamed["remarks"] == [remark.replace("logits.npy", "logits-*.npy") for remark in whole["remarks"]]
