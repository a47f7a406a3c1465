"""Samples and checks shared by the tests of this folder."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("tabulate", reason="tabulate is not installed")


# A tenth of the paper's temperatures: the tests check the texts about a grid, not its size.
PAPER = ("--method", "focal-temperature", "--criterion", "ece", "--temperatures", "0.1:5:0.1")

GRID = (*PAPER, "--bootstrap", "0")

INTERVALS = (*PAPER, "--bootstrap", "40")

SCORES = [
    "accuracy",
    "nll",
    "brier",
    "ece_equal_width",
    "ece_equal_mass",
    "ece_equal_mass_interp",
    "classwise_ece_equal_width",
]


def sample(n, seed, n_classes=5):
    """Over-confident logits with their labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return (logits * 2).numpy(), target.numpy()


@pytest.fixture
def both(tmp_path):
    """A file with validation and test rows."""
    (val_logits, val_labels), (test_logits, test_labels) = sample(400, 0), sample(500, 1)
    path = tmp_path / "both.npz"
    np.savez(path, val_logits=val_logits, val_labels=val_labels, test_logits=test_logits, test_labels=test_labels)
    return path


@pytest.fixture
def single(tmp_path):
    logits, labels = sample(400, 0)
    path = tmp_path / "single.npz"
    np.savez(path, logits=logits, labels=labels)
    return path


def run_json(run, *arguments):
    code, out, err = run(*arguments, "--json")
    assert code == 0, err

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(out, parse_constant=refuse)


def row_of(document, method, criterion):
    return next(row for row in document["rows"] if (row["method"], row["criterion"]) == (method, criterion))
