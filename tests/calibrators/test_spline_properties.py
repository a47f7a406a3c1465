"""Properties of whole fits of spline scaling: folds that start warm, memory."""

import subprocess
import sys

import pytest
import torch
from test_spline_fit import crossing, draw

from focalkern.calibrators import _spline_folds
from focalkern.calibrators._candidates import as_candidates
from focalkern.calibrators._cross_validation import cross_validate


@pytest.mark.parametrize("case", ["scale", "bias", "crossing", "few rows", "two classes"])
def test_warm_and_cold_folds_choose_the_same(case, monkeypatch):
    """A fold that starts at the fit to all rows must not have seen its own test rows."""
    logits, target = {
        "scale": lambda: draw(600, 6, scale=3.0),
        "bias": lambda: draw(800, 5),
        "crossing": lambda: crossing(1500),
        "few rows": lambda: draw(100, 3),
        "two classes": lambda: draw(300, 2, scale=0.5),
    }[case]()
    if case == "bias":
        logits = logits + torch.linspace(-1.5, 1.5, 5, dtype=torch.float64)
    candidates = as_candidates(None, "nll", "logits")
    warm = cross_validate(logits, target, candidates, criterion="nll", folds=5, seed=0)
    fit_family = _spline_folds.fit_family
    starts = []

    def cold_family(rows, members, near=None):
        starts.append(near)
        return fit_family(rows, members)

    monkeypatch.setattr(_spline_folds, "fit_family", cold_family)
    cold = cross_validate(logits, target, candidates, criterion="nll", folds=5, seed=0)
    assert sum(near is not None for near in starts) == 5
    assert cold.winner.name == warm.winner.name
    for ours, theirs in zip(warm.entries, cold.entries, strict=True):
        assert ours.excluded == theirs.excluded
        if not ours.excluded.startswith("adds nothing"):
            assert ours.loss == pytest.approx(theirs.loss, abs=1e-3)


MEMORY = """
import resource
import torch
import focalkern as fk

generator = torch.Generator().manual_seed(0)
logits = torch.randn(40_000, 500, generator=generator).mul_(4)  # 76 MiB
target = torch.randint(500, (40_000,), generator=generator)
fk.SplineScaling().fit_quietly(logits[:2000], target[:2000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fk.SplineScaling().fit_quietly(logits, target)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.kernels
def test_float32_rows_are_fitted_without_a_float64_copy():
    """A float64 copy alone takes 153 MiB."""
    out = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True).stdout
    assert float(out) < 76
