"""Class weights by the effective number of samples, compared with the formula at 60 digits."""

import mpmath
import pytest
import torch
from mpmath import mpf

import focalkern as fk


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999, 1 - 2.0**-40])
def test_formula_at_60_digits(beta):
    counts = [1, 3, 0, 10, 1000, 5_000_000]
    with mpmath.workdps(60):
        raw = [(1 - mpf(beta)) / (1 - mpf(beta) ** n) if n else mpf(0) for n in counts]
        scale = sum(n > 0 for n in counts) / mpmath.fsum(raw)
        expected = torch.tensor([float(v * scale) for v in raw], dtype=torch.float64)
    found = fk.class_balanced_weight(torch.tensor(counts, dtype=torch.float64), beta)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert found[2] == 0
    assert fk.class_balanced_weight(counts, beta).dtype == torch.float32


def test_limits_and_use():
    counts = torch.tensor([10, 20, 70])
    assert torch.equal(fk.class_balanced_weight(counts, 0.0), torch.ones(3))
    inverse = 1 / counts
    torch.testing.assert_close(fk.class_balanced_weight(counts, 1.0), inverse / inverse.mean())
    logits, target = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 2, 1])
    weight = fk.class_balanced_weight(target.bincount(minlength=3), 0.9)
    assert fk.FocalLoss(2.0, weight=weight)(logits, target).isfinite()


@pytest.mark.parametrize(
    ("counts", "beta", "error", "message"),
    [
        ([1, -1], 0.9, ValueError, "counts must be finite and at least 0"),
        ([1.0, float("nan")], 0.9, ValueError, "counts must be finite"),
        ([0, 0], 0.9, ValueError, "at least one class"),
        ([[1, 2]], 0.9, ValueError, r"counts must be \[C\], got \[1, 2\]"),
        ([True, False], 0.9, TypeError, "counts must be numbers"),
        ([1, 2], 1.5, ValueError, r"beta must be in \[0, 1\]"),
        ([1, 2], "0.9", TypeError, "beta must be a number"),
    ],
)
def test_bad_arguments_are_named(counts, beta, error, message):
    with pytest.raises(error, match="class_balanced_weight: " + message):
        fk.class_balanced_weight(counts, beta)
