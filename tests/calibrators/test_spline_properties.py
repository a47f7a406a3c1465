"""Properties of complete fits of spline scaling: warm-started folds, memory, odd data."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from test_spline_fit import crossing, draw

import focalkern as fk
from focalkern.calibrators import _spline_folds, _spline_linear
from focalkern.calibrators._candidates import as_candidates
from focalkern.calibrators._cross_validation import cross_validate


def test_a_fold_starts_with_the_sums_of_the_rows_outside_it(monkeypatch):
    fit_family, compared = _spline_folds.fit_family, []

    def recorded(rows, members, near=None, sums=None):
        if near is not None:
            expected = _spline_folds.family_sums(rows, near)
            assert set(sums) == set(expected) == {"free", "vector", "matrix"}
            compared.extend((sums[name], expected[name]) for name in expected)
        return fit_family(rows, members, near, sums)

    monkeypatch.setattr(_spline_folds, "fit_family", recorded)
    logits, target = draw(203, 4)  # folds of different sizes
    weight = torch.rand(203, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    cross_validate(
        logits, target, as_candidates(None, "nll", "logits"), criterion="nll", folds=5, seed=0, weight=weight
    )
    assert len(compared) == 15
    for sums, expected in compared:
        assert sums.numpy() == pytest.approx(expected.numpy(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("case", ["scale", "bias", "crossing", "few rows", "two classes"])
def test_warm_and_cold_folds_choose_the_same(case, monkeypatch):
    """A fold that starts from the fit to all rows must give the result of a fit without its own test rows."""
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

    def cold_family(rows, members, near=None, sums=None):
        starts.append(near)
        return fit_family(rows, members)

    monkeypatch.setattr(_spline_folds, "fit_family", cold_family)
    cold = cross_validate(logits, target, candidates, criterion="nll", folds=5, seed=0)
    assert sum(near is not None for near in starts) == 5
    monkeypatch.undo()
    monkeypatch.setattr(_spline_linear, "_FEW_CLASSES", 0)  # scales of each parameter
    by_parameter = cross_validate(logits, target, candidates, criterion="nll", folds=5, seed=0)
    for other, close in ((cold, 1e-3), (by_parameter, 3e-4)):
        assert other.winner.name == warm.winner.name
        for ours, theirs in zip(warm.entries, other.entries, strict=True):
            assert ours.excluded == theirs.excluded
            if not ours.excluded.startswith("adds nothing"):
                assert ours.loss == pytest.approx(theirs.loss, abs=close)


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


# -- cases of the specification that only complete fits show -----------------------------------------------------------


def test_few_distinct_values_of_many_classes():
    """13 classes whose probabilities have four values: knots keep their distance, and the map still lowers the loss."""
    random = torch.Generator().manual_seed(0)
    target = torch.randint(13, (400,), generator=random)
    right = torch.rand(400, generator=random) < 0.6
    named = torch.where(right, target, torch.randint(13, (400,), generator=random))
    probs = torch.full((400, 13), 0.02, dtype=torch.float64)
    probs[torch.arange(400), named] = 0.55
    probs[torch.arange(400), (named + 1) % 13] = 0.15
    probs[torch.arange(400), (named + 2) % 13] = 0.10
    probs[torch.arange(400), (named + 3) % 13] = 0.02
    assert torch.allclose(probs.sum(1), torch.ones(400, dtype=torch.float64))
    before = float(-probs.gather(1, target.unsqueeze(1)).log().mean())
    for kind in ("scalar", "vector", "matrix"):
        calibrator = fk.SplineScaling(kind=kind, input_kind="probs").fit(probs, target)
        assert np.diff(calibrator.knots_).min() >= 0.25 - 1e-9
        assert calibrator.best_value_ < before


def test_scores_against_the_labels_are_turned_round_by_a_vector():
    """Without its cap, T would rise to its bound and make x constant; with it, the vector can reverse the scores."""
    logits, target = draw(400, 2, scale=1.0)
    for options in ({"kind": "vector"}, {"keep_order": False}):
        against, along = (fk.SplineScaling(**options).fit_quietly(logits, labels) for labels in (1 - target, target))
        assert against.best_value_ == pytest.approx(along.best_value_, abs=0.01)
        assert against.n_changed_ > 350 > 100 > along.n_changed_


def test_a_scale_of_the_logits_moves_a_fit_by_its_prior_alone():
    """The bounds are those of the specification, averaged over rows and classes."""
    for n_rows, bound in ((400, 0.03), (5000, 0.003)):
        logits, target = draw(n_rows, 4)
        one, other = (fk.SplineScaling().fit(scale * logits, target) for scale in (1.0, 1e4))
        found, expected = other.predict_log_proba(1e4 * logits), one.predict_log_proba(logits)
        assert float((found - expected).abs().mean()) <= bound
