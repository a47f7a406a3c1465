"""Samples and a candidate, shared by the tests of compare_calibrators."""

import pytest
import torch

pytest.importorskip("tabulate", reason="tabulate is not installed")


FAST = {"resamples": 0, "folds": 3}


def sample(n, seed, temperature=2.0, n_classes=4):
    """Logits whose labels follow softmax(z / temperature)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(1)
    return logits, labels


class Half:
    def fit(self, logits, labels):
        return self

    def predict_proba(self, logits):
        return torch.from_numpy(logits / 2).softmax(-1).numpy()
