"""Rows without an error: they give no upper limit of the confidence, so no calibrator may raise it without a bound."""

import pytest
import torch
from test_spline_fit import draw

import focalkern as fk
from focalkern.calibrators._candidates import as_candidates
from focalkern.calibrators._cross_validation import cross_validate
from focalkern.calibrators._verdict import cross_validation_warnings

METHODS = {
    "robust": fk.RobustTemperatureScaling,
    "scalar": fk.SplineScaling,
    "free": lambda: fk.SplineScaling(keep_order=False),
    "vector": lambda: fk.SplineScaling(kind="vector"),
    "matrix": lambda: fk.SplineScaling(kind="matrix"),
    "auto": fk.AutoCalibrator,
}
ORDINARY = {name: method for name, method in METHODS.items() if name != "auto"}


def noisy(n, seed, margin=4.6, n_classes=5, noise=0.01):
    """Rows whose largest logit is right but for the noise of the labels."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(n_classes, (n,), generator=generator)
    logits = 0.7 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(n), label] = 0.0
    top = logits.amax(-1) + margin + 0.7 * torch.randn(n, generator=generator, dtype=torch.float64).abs()
    logits[torch.arange(n), label] = top
    shift = torch.randint(1, n_classes, (n,), generator=generator) * (torch.rand(n, generator=generator) < noise)
    return logits, (label + shift) % n_classes


def all_right(n, seed=0, scale=2.0):
    logits, _ = draw(n, 5, seed=seed, scale=scale)
    return logits, logits.argmax(-1)


def mean_confidence(probs):
    return float(probs.amax(-1).mean())


@pytest.mark.parametrize("margin", [2.0, 5.5, 9.0])
@pytest.mark.parametrize("n", [30, 100])
@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
def test_new_rows_with_noisy_labels_do_not_suffer(n, margin):
    """The mean NLL of new rows after fits to 60 sets without an error, against no calibration. The networks are
    under-confident, calibrated (with margin 5.5 the confidence is 0.99) and over-confident."""
    new, labels = noisy(4000, 1000, margin)
    without = float(fk.metrics.nll(new.softmax(-1), labels))
    for name in ("robust", "vector", "auto"):
        losses, seed = [], 0
        while len(losses) < 60:
            logits, target = noisy(n, seed, margin)
            seed += 1
            if bool((logits.argmax(-1) == target).all()):
                losses.append(float(fk.metrics.nll(METHODS[name]().fit(logits, target).predict_proba(new), labels)))
        assert sum(losses) / 60 <= without + 1e-3, name
        if margin == 2.0:  # under-confident: the rows show it, and every calibrator mends most of it
            assert sum(losses) / 60 <= 0.6 * without, name


@pytest.mark.parametrize("scale", [0.5, 2.0, 20.0])
@pytest.mark.parametrize("name", ORDINARY)
def test_the_confidence_rises_to_that_of_laplace_at_most(name, scale):
    logits, target = all_right(100, scale=scale)
    with pytest.warns(fk.CalibrationWarning, match=r"no row of fit is wrong, .* confidence to 0\.9902 at most"):
        fitted = METHODS[name]().fit(logits, target)
    before, after = (mean_confidence(probs) for probs in (logits.softmax(-1), fitted.predict_proba(logits)))
    assert before - 1e-3 <= after <= max(before, 101 / 102)
    of_plain = fk.TemperatureScaling().fit_quietly(logits, target).temperature_
    assert of_plain >= 1 or fitted.temperature_ >= of_plain * (1 - 1e-9)
    assert fitted.predict_proba(logits).argmax(-1).equal(target)


@pytest.mark.parametrize("name", ORDINARY)
def test_the_rows_determine_no_curve(name):
    logits, target = all_right(100)
    fitted = METHODS[name]().fit_quietly(logits, target)
    temperature = fk.RobustTemperatureScaling().fit_quietly(logits, target)
    torch.testing.assert_close(fitted.predict_proba(logits), temperature.predict_proba(logits), rtol=0, atol=1e-12)
    for part in ("slope_", "values_", "weight_", "bias_"):
        value = vars(fitted).get(part)
        assert value is None or not torch.as_tensor(value).any()


@pytest.mark.parametrize("name", ORDINARY)
def test_one_error_is_an_ordinary_set(name):
    logits, target = all_right(100)
    target[0] = logits[0].argsort()[-2]
    fitted = METHODS[name]().fit(logits, target)  # and no warning
    assert name == "robust" or torch.as_tensor(fitted.values_).any()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
def test_batches_weights_and_the_place_of_the_rows(name):
    logits, target = all_right(300)
    whole = METHODS[name]().fit(logits, target)
    batches = METHODS[name]()
    batches.fit_batches([(logits[:100], target[:100]), (logits[100:], target[100:])])
    expected = whole.predict_proba(logits)
    torch.testing.assert_close(batches.predict_proba(logits), expected, rtol=0, atol=1e-12)
    if name != "auto":  # whose folds differ
        assert any("no row of fit is wrong" in words for words in batches.warnings_)
        twice = METHODS[name]().fit(logits, target, torch.full((300,), 2.0)).predict_proba(logits)
        repeated = METHODS[name]().fit(logits.repeat(2, 1), target.repeat(2)).predict_proba(logits)
        torch.testing.assert_close(twice, repeated, rtol=0, atol=1e-9)
    # A wrong row is found at any place.
    target[299] = logits[299].argmin(-1)
    assert not any("no row" in words for words in METHODS[name]().fit(logits, target).warnings_)


RICH = {
    "vector": lambda: fk.StructuredScaling(kind="vector", solver="lbfgs"),
    "matrix": lambda: fk.StructuredScaling(solver="lbfgs"),
    "focal": lambda: fk.StructuredScaling(focal=True, solver="lbfgs"),
    "isotonic": fk.IsotonicCalibration,
}


@pytest.mark.parametrize("scale", [0.5, 2.0, 20.0])
@pytest.mark.parametrize("name", RICH)
def test_the_epsilon_of_other_calibrators_bounds_the_confidence(name, scale):
    """The floor 1 / (N + 1) is close to Laplace's bound; these calibrators have their own curve, and warn."""
    logits, target = all_right(100, scale=scale)
    with pytest.warns(fk.CalibrationWarning, match="no row of fit is wrong, so the rows give no upper limit"):
        fitted = RICH[name]().fit(logits, target)
    assert mean_confidence(fitted.predict_proba(logits)) <= 101 / 102 + 0.003
    target[0] = logits[0].argsort()[-2]
    assert not any("no row" in words for words in RICH[name]().fit_quietly(logits, target).warnings_)


def test_histogram_binning_gives_the_remedy_of_its_scaling():
    fitted = fk.HistogramBinning(scaling=fk.TemperatureScaling()).fit_quietly(*all_right(100))
    assert any(words.startswith("of the scaling, ") and "some wrong predictions" in words for words in fitted.warnings_)


def test_the_selection_prefers_what_the_rows_can_show():
    """Temperature scaling for an under-confident network, else no calibration; a verdict on that names the reason."""
    for margin, chosen in ((2.0, "temperature"), (9.0, "none")):
        logits, target = noisy(100, 0, margin, noise=0.0)
        found = cross_validate(logits, target, as_candidates(None, "nll", "logits"), criterion="nll", folds=5, seed=0)
        assert found.winner.name == chosen
        splines = [entry for entry in found.entries if entry.name.startswith("spline")]
        assert {entry.excluded for entry in splines} == {"adds nothing to temperature scaling on rows without an error"}
        said = any("cannot show that the confidence is too high" in text for text in cross_validation_warnings(found))
        assert said == (chosen == "none")
    alone = fk.AutoCalibrator(candidates=["spline"]).fit_quietly(*noisy(100, 0, 2.0, noise=0.0))
    assert alone.chosen_ == "spline"


@pytest.mark.parametrize("criterion", ["ece", "nll", "brier"])
@pytest.mark.parametrize("widen", [False, True])
@pytest.mark.parametrize("method", [fk.TemperatureScaling, fk.FocalTemperatureScaling])
def test_a_grid_that_goes_below_the_bound_warns(method, criterion, widen):
    logits, target = all_right(100)
    fitted = method(criterion=criterion, search="grid", widen=widen).fit_quietly(logits, target)
    *border, words = fitted.warnings_
    assert len(border) == bool(fitted.at_border_) and not any("widen" in one for one in border)
    name = {"ece": "ECE", "nll": "NLL", "brier": "Brier score"}[criterion]
    assert words.startswith(
        f"no row of fit is wrong, so the {name} gives no upper limit of the confidence: temperature"
    )
    assert "where the mean confidence is 0.9902 (criterion='nll' without temperatures stops there)" in words
    # A grid that ends above this temperature needs only its own remedy, and rows with an error give no such warning.
    (words,) = method(temperatures=[1.0, 2.0]).fit_quietly(logits, target).warnings_
    assert words.endswith("temperature = 1 is the smallest that was searched (widen=True extends the search)")
    target[0] = logits[0].argmin(-1)
    fitted.fit_quietly(logits, target)
    assert not any("no row" in one for one in fitted.warnings_)
