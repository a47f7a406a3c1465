"""Robust temperature scaling: finite if the likelihood has no optimum, close to temperature scaling if it has one."""

import math

import pytest
import torch
from conftest import assert_close
from test_spline_fit import draw

import focalkern as fk
from focalkern.calibrators._folds import folds_of_all
from focalkern.calibrators._robust_temperature import floored_folds
from focalkern.calibrators._row_source import fold_by_fold, memory_rows
from focalkern.calibrators._spline_features import floor_of, fold_temperatures, logit_scale, robust_temperature


def test_with_many_rows_it_is_temperature_scaling():
    logits, target = draw(5000, 5)
    plain, robust = fk.TemperatureScaling().fit(logits, target), fk.RobustTemperatureScaling().fit(logits, target)
    assert robust.temperature_ == pytest.approx(plain.temperature_, rel=2e-3)
    assert robust.predict_proba(logits).numpy() == pytest.approx(plain.predict_proba(logits).numpy(), abs=1e-3)
    assert torch.equal(robust.predict(logits), logits.argmax(-1))


def test_zeros_on_the_target_are_small_probabilities(tmp_path):
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.4, 0.0], [0.3, 0.3, 0.4]], dtype=torch.float64).repeat(20, 1)
    target = torch.tensor([0, 1, 2] * 15 + [1, 0, 0] * 5)
    fitted = fk.RobustTemperatureScaling(input_kind="probs").fit(probs, target)
    assert fitted.floor_ == 0.1 / 61
    q = (probs.log() / fitted.temperature_).softmax(-1)
    assert_close(fitted.predict_proba(probs), q * (1 - fitted.floor_) + fitted.floor_ / 3)
    of_target = fitted.predict_proba(probs).gather(1, target.unsqueeze(1))
    assert fitted.best_value_ == pytest.approx(-float(of_target.log().mean()), rel=1e-12)
    fitted.save(tmp_path / "a.json")
    assert torch.equal(fk.load_calibrator(tmp_path / "a.json").predict_proba(probs), fitted.predict_proba(probs))
    assert_close(fitted.as_module()(probs).exp(), fitted.predict_proba(probs))


def test_a_masked_logit_has_probability_zero():
    logits, target = draw(200, 4)
    logits[torch.arange(200), (target + 1) % 4] = -math.inf
    fitted = fk.RobustTemperatureScaling().fit(logits, target)
    probs = fitted.predict_proba(logits)
    assert torch.equal(probs == 0, logits == -math.inf)
    assert_close(probs.sum(-1), torch.ones(200, dtype=torch.float64))


def test_few_rows_that_are_all_right_justify_no_certainty():
    logits, _ = draw(50, 4)
    fitted = fk.RobustTemperatureScaling().fit_quietly(logits, logits.argmax(-1))
    assert float(fitted.predict_proba(logits).amin()) >= 0.1 / 51 / 4 * 0.99


@pytest.mark.parametrize("method", [fk.RobustTemperatureScaling, fk.SplineScaling, fk.AutoCalibrator])
@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_small_logits_are_calibrated_as_large_ones(method, kind, tmp_path):
    logits, target = draw(1000, 4)
    flat = 1e-3 * logits
    rows = [(flat * size).softmax(-1) if kind == "probs" else flat * size for size in (1.0, 1e-6)]
    one, other = (method(input_kind=kind).fit(row, target) for row in rows)
    torch.testing.assert_close(one.predict_proba(rows[0]), other.predict_proba(rows[1]), rtol=0, atol=1e-6)
    usual = method().fit(logits, target).predict_proba(logits)
    nll, expected = (float(fk.metrics.nll(probs, target)) for probs in (one.predict_proba(rows[0]), usual))
    assert nll == pytest.approx(expected, abs=1e-3)
    other.save(tmp_path / "a.json")
    assert torch.equal(fk.load_calibrator(tmp_path / "a.json").predict_proba(rows[1]), other.predict_proba(rows[1]))


@pytest.mark.parametrize(
    "case",
    [
        "equal folds",
        "two sizes",
        "weights",
        "one class each",
        "large logits",
        "small logits",
        "all right",
        "errors in one fold",
    ],
)
def test_a_fit_without_a_fold_is_that_of_the_other_rows(case):
    """By sums over the folds if the temperatures are near that of all rows, else by a search."""
    folds, n = 5, 1003 if case == "two sizes" else 1000
    logits, target = draw(n, 4, scale={"large logits": 1000.0, "small logits": 1e-5}.get(case, 2.0))
    fold = folds_of_all(n, folds, 0)
    if case == "one class each":
        fold = (target + (torch.arange(n) % 2 == 0)) % folds
    right = {"all right": fold >= 0, "errors in one fold": fold != 2}.get(case, fold < 0)
    target = torch.where(right, logits.argmax(-1), target)
    weight = torch.rand(n, dtype=torch.float64) + 0.5 if case == "weights" else None
    source = memory_rows(logits, target, weight)
    part, near = fold_by_fold(source, lambda number: fold[number], folds), fk.RobustTemperatureScaling()
    near.fit_quietly(logits, target, weight)
    found = floored_folds(source, part, folds, "logits", near)
    for k, one in enumerate(found):
        others = part(k, False)
        expected = robust_temperature(others, "logits", logit_scale(others, "logits"), no_errors=case == "all right")
        assert math.log(one.temperature) == pytest.approx(math.log(expected), abs=1e-6)
        assert one.floor == pytest.approx(floor_of(others.weight_sum), rel=1e-12)
        assert one.masks
    by_sums = fold_temperatures([part(k, True) for k in range(folds)], "logits", near.temperature_)
    by_search = ("weights", "one class each", "large logits", "small logits", "errors in one fold")
    assert case == "all right" or (None in by_sums) == (case in by_search)
