"""Inputs of the wrong kind: probabilities, percentages and one-hot rows instead of logits."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from conftest import peer

import focalkern as fk

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

EVERY = [
    fk.TemperatureScaling(),
    fk.FocalTemperatureScaling(search="refine"),
    fk.StructuredScaling(kind="vector", solver="lbfgs"),
    fk.IsotonicCalibration(),
    fk.HistogramBinning(n_bins=4, scaling=fk.TemperatureScaling()),
    fk.SplineScaling(),
    fk.AutoCalibrator(("temperature",), folds=2),
]
every = pytest.mark.parametrize("calibrator", EVERY, ids=lambda one: type(one).__name__)


def sample(n=300, n_classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return 2 * logits, target


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
def test_probabilities_are_refused_unless_logits_was_said(calibrator, dtype):
    logits, target = sample()
    probs = logits.softmax(-1).to(dtype)
    fitted = copy.deepcopy(calibrator).fit(logits, target)
    before = fitted.predict_proba(logits)
    words = "logits must not be probabilities .*, got non-negative rows that sum to 1; pass input_kind='probs', or "
    for again in (fitted, pickle.loads(pickle.dumps(fitted)), type(calibrator)(**fitted.get_params(deep=False))):
        with pytest.raises(ValueError, match=f"^{type(calibrator).__name__}: {words}input_kind='logits'"):
            again.fit(probs, target)
        with pytest.raises(ValueError, match=words):
            again.fit(probs.numpy(), target.numpy())
    assert torch.equal(fitted.predict_proba(logits), before)
    said = copy.deepcopy(calibrator).set_params(input_kind="logits")
    assert said.fit(probs, target).predict_proba(probs[:1]).shape == (1, 4)
    # A prediction is not checked, because one row alone does not show its kind.
    assert fitted.predict_proba(probs[:1]).shape == (1, 4)


@pytest.mark.parametrize(
    "calibrator", [*EVERY, fk.TemperatureScaling(criterion="brier"), fk.FocalTemperatureScaling()], ids=repr
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", ["classes", "one per row"])
@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
def test_the_sum_of_half_precision_probabilities_may_be_rounded(calibrator, dtype, rows):
    logits, target = sample(n_classes=4 if rows == "classes" else 2)
    probs = (logits / 4).softmax(-1).to(dtype)  # none is rounded to 0 or 1
    if rows == "one per row":
        probs = probs[:, 1]
        wide = probs.float()
    else:
        wide = probs.float() / probs.float().sum(-1, keepdim=True)
    found, expected = (copy.deepcopy(calibrator).set_params(input_kind="probs") for _ in range(2))
    if "scaling" in calibrator.get_params(deep=False):
        found.scaling, expected.scaling = (fk.TemperatureScaling(input_kind="probs") for _ in range(2))
    found.fit(probs, target), expected.fit(wide, target)
    assert torch.equal(found.predict_proba(wide), expected.predict_proba(wide))
    assert found.predict_proba(probs).dtype == dtype
    assert torch.allclose(found.as_module()(probs).float(), found.as_module()(wide), rtol=0.02, atol=0.02)


def test_a_clone_checks_the_input_kind_and_a_loaded_calibrator_does_not(tmp_path):
    base = peer("sklearn.base")
    logits, target = sample()
    assert repr(fk.TemperatureScaling()) == repr(fk.TemperatureScaling(input_kind="logits"))
    with pytest.raises(ValueError, match="got non-negative rows that sum to 1"):
        base.clone(fk.TemperatureScaling()).fit(logits.softmax(-1), target)
    base.clone(fk.TemperatureScaling(input_kind="logits")).fit_quietly(logits.softmax(-1), target)
    fk.TemperatureScaling().fit(logits, target).save(tmp_path / "calibrator.json")
    assert '"input_kind": "logits"' in (tmp_path / "calibrator.json").read_text()
    fk.load_calibrator(tmp_path / "calibrator.json").fit_quietly(logits.softmax(-1), target)


def test_logits_of_every_kind_are_taken():
    logits, target = sample()
    for good in (logits, logits.log_softmax(-1), logits - logits.amin(-1, keepdim=True), logits.softmax(-1) + 1):
        with warnings.catch_warnings():
            warnings.simplefilter("error" if good is not None and float(good.amin()) < 0 else "ignore")
            fk.TemperatureScaling().fit(good, target)


def said(calibrator, *rows):
    with pytest.warns(fk.CalibrationWarning) as caught:
        calibrator.fit(*rows)
    return str(caught[0].message)


@every
def test_percentages_are_refused_unless_logits_was_said(calibrator):
    logits, target = sample()
    percent = 100 * logits.softmax(-1)
    words = (
        "logits must not be percentages without input_kind, got non-negative rows that sum to 100; divide each row "
        "by its sum and pass input_kind='probs', or input_kind='logits'"
    )
    with pytest.raises(ValueError, match=f"^{type(calibrator).__name__}: {words}"):
        copy.deepcopy(calibrator).fit(percent, target)
    of_probs = copy.deepcopy(calibrator).set_params(input_kind="probs")
    if isinstance(of_probs, fk.HistogramBinning):
        of_probs.set_params(scaling__input_kind="probs")
    with pytest.raises(ValueError, match=r"got a sum of 100 at row 0; divide each row by its sum$"):
        of_probs.fit(percent, target)
    words = said(copy.deepcopy(calibrator).set_params(input_kind="logits"), percent, target)
    assert words.count("the rows are non-negative and sum to 100: divide percentages by 100") == 1


@every
@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_one_hot_rows_cause_a_warning(calibrator, kind):
    logits, target = sample()
    decisions = torch.eye(4, dtype=torch.float64)[logits.argmax(-1)]
    if kind == "logits":
        with pytest.raises(ValueError, match="got one-hot rows; pass the model's logits"):
            copy.deepcopy(calibrator).fit(decisions, target)
    changed = copy.deepcopy(calibrator).set_params(input_kind=kind)
    if isinstance(changed, fk.HistogramBinning):
        changed.set_params(scaling__input_kind=kind, scaling__criterion="brier")
    if kind == "probs" and hasattr(changed, "floor"):
        changed.set_params(floor=0.01)
    words = said(changed, decisions, target)
    assert words.count("every row is one-hot, like a predicted class") == 1


@every
def test_rows_in_the_unit_interval_cause_a_warning(calibrator):
    """Rounded probabilities of many classes do not sum to 1, and scores of single classes have no sum."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(500, 60, generator=generator, dtype=torch.float64)
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    for rows in ((logits.softmax(-1) * 50).round() / 50, logits.sigmoid()):
        words = said(copy.deepcopy(calibrator), rows, target)
        assert words.count("all logits lie in [0, 1], like probabilities, but the rows do not sum to 1") == 1
        asked = copy.deepcopy(calibrator).set_params(input_kind="logits")
        if isinstance(asked, fk.HistogramBinning):
            asked.set_params(scaling__input_kind="logits")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asked.fit(rows, target)
        assert not any("lie in [0, 1]" in words for words in asked.warnings_)
    similarities = 0.1 + 0.25 * logits.sigmoid()  # of images and texts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not any("lie in [0, 1]" in one for one in calibrator.fit(similarities, target).warnings_)


def test_probabilities_of_heads_cause_a_warning():
    generator = torch.Generator().manual_seed(0)
    margin = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    target = torch.bernoulli(margin.sigmoid(), generator=generator).long()
    for calibrator, one in ((fk.TemperatureScaling(), 0), (fk.MultiLabelScaling(), slice(None))):
        words = said(calibrator, margin.sigmoid()[:, one], target[:, one])
        assert words.count("all logits lie in [0, 1]: for probabilities") == 1
        assert not any("lie in [0, 1]" in words for words in calibrator.fit(margin[:, one], target[:, one]).warnings_)
        few = type(calibrator)().fit_quietly(margin.sigmoid()[:20, one], target[:20, one])
        assert not any("lie in [0, 1]" in words for words in few.warnings_)


def test_a_comparison_has_the_same_check():
    logits, target = sample()
    probs = logits.softmax(-1)
    with pytest.raises(ValueError, match="compare_calibrators: validation must not be probabilities"):
        fk.compare_calibrators((probs, target), resamples=0)
    with pytest.raises(ValueError, match="compare_calibrators: test must not be probabilities"):
        fk.compare_calibrators((logits, target), (probs, target), resamples=0)
    options = {"candidates": ("temperature",), "folds": 2, "resamples": 0}
    assert fk.compare_calibrators((probs, target), input_kind="logits", **options).calibrator is not None
    percent = (100 * probs, target), (100 * probs[:150], target[:150])
    with pytest.raises(ValueError, match="compare_calibrators: validation must not be percentages"):
        fk.compare_calibrators(*percent, **options)
    percent = fk.compare_calibrators(*percent, input_kind="logits", **options)
    assert any("sum to 100: divide percentages" in words for words in percent.remarks)
    same = fk.compare_calibrators((logits, target), (logits.clone(), target.clone()), **options)
    assert any("the same 300 rows are validation and test rows" in words for words in same.remarks)
    assert str(same.verdict).startswith("Optimistic")
    apart = fk.compare_calibrators((logits[:150], target[:150]), (logits[150:], target[150:]), **options)
    assert str(apart.verdict).startswith("Use")


def test_logits_that_are_integers_by_value_are_no_decisions():
    target = np.arange(90) % 3
    logits = np.eye(3)[target] + 1.0
    assert not any("one-hot" in words for words in fk.TemperatureScaling().fit_quietly(logits, target).warnings_)
