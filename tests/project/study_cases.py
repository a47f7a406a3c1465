"""Samples and checks shared by the tests of the training study."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the study's default data come with scikit-learn")
training = pytest.importorskip("benchmarks.train_study.training", reason="the benchmarks are in the source tree only")
from benchmarks.train_study import data  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


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
