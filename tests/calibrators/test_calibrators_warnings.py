"""The warning of a fit: its cause, its words, that it appears once, and that its remedy works."""

import copy
import math
import pathlib
import pickle
import warnings

import numpy as np
import pytest
import torch
from conftest import assert_close

import focalkern as fk
from focalkern import metrics
from focalkern.calibrators import GAMMA_BOUNDS, FocalTemperatureScaling, HistogramBinning, TemperatureScaling

DATA = pathlib.Path(__file__).parents[1] / "data"
COARSE = [index * 0.05 for index in range(1, 81)]


def sample(n=2000, n_classes=5, gamma=0.0, temperature=2.0, seed=0):
    """Logits whose labels are drawn from their focal calibration map with these parameters."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2 * temperature
    probs = fk.focal_calibration_map(logits, gamma, temperature)
    return logits, torch.multinomial(probs, 1, generator=generator).squeeze(1)


def mean_losses(logits, target, gamma=0.0, temperature=1.0):
    probs = fk.focal_calibration_map(logits, gamma, temperature)
    return float(metrics.nll(probs, target)), float(metrics.brier_score(probs, target))


def said(calibrator, *rows):
    """The text of a fit's only warning."""
    with pytest.warns(fk.CalibrationWarning) as caught:
        calibrator.fit(*rows)
    (one,) = caught
    assert one.filename == __file__
    text = str(one.message)
    assert text == f"{type(calibrator).__name__}: {', and '.join(calibrator.warnings_)}"
    return text


@pytest.mark.parametrize("cls", [TemperatureScaling, FocalTemperatureScaling])
@pytest.mark.parametrize("criterion", ["nll", "brier"])
@pytest.mark.parametrize("search", [None, "grid", "refine"])
def test_a_good_fit_causes_no_warning(cls, criterion, search):
    axes = {} if search is None else {"temperatures": COARSE}
    assert cls(criterion=criterion, search=search, **axes).fit(*sample()).warnings_ == ()


@pytest.mark.parametrize(
    "calibrator",
    [
        TemperatureScaling(),
        FocalTemperatureScaling(),
        fk.StructuredScaling(kind="vector"),
        HistogramBinning(scaling=TemperatureScaling()),
        fk.AutoCalibrator(("temperature",), folds=2),
    ],
    ids=lambda calibrator: type(calibrator).__name__,
)
def test_unlikely_labels_cause_one_warning(calibrator):
    logits, target = sample(300)
    kept = target < 4
    words = said(calibrator, logits[kept], target[kept] + 1)
    assert words.count("if the labels are one too high (the first class is 0)") == 1
    # Only fit warns. A study fits its folds quietly and warns once for all its rows.
    assert not any(
        "too high" in warning for warning in calibrator.fit_quietly(logits[kept], target[kept] + 1).warnings_
    )


@pytest.mark.parametrize("search", ["grid", "line", "refine"])
def test_a_bound_causes_a_warning_and_widening_passes_it(search):
    # The optimum lies at gamma = 2 and T = 3.
    rows = sample(20_000, gamma=2.0, temperature=3.0)
    options = {"gammas": [0.0, 0.5, 1.0], "temperatures": [0.1 * index for index in range(5, 26)], "search": search}
    narrow = FocalTemperatureScaling(**options)
    words = said(narrow, *rows)
    assert "gamma = 1 is the largest that was searched" in words
    assert words.endswith("(widen=True extends the search)")
    wide = FocalTemperatureScaling(**options, widen=True).fit(*rows)
    assert (wide.warnings_, wide.at_border_) == ((), ())
    assert wide.gamma_ == pytest.approx(2, abs=0.8)
    assert wide.temperature_ == pytest.approx(3, abs=0.6)
    assert wide.best_value_ < narrow.best_value_
    assert wide.n_cells_ > narrow.n_cells_


def test_a_wider_grid_holds_the_cells_it_began_with():
    rows = sample(temperature=3.0)
    narrow = TemperatureScaling(temperatures=[1.0, 2.0])
    said(narrow, *rows)
    wide = TemperatureScaling(temperatures=[1.0, 2.0], widen=True).fit(*rows)
    table, temperatures = wide.grid_.tables["nll"][0], wide.grid_.temperatures
    assert temperatures[:2].tolist() == [1.0, 2.0]
    assert_close(table[:2], narrow.grid_.tables["nll"][0])
    assert len(temperatures) == len(table) == len(set(temperatures.tolist())) == wide.n_cells_
    assert wide.best_value_ == float(table.min())
    # The search also widens downwards, and only as far as needed.
    low = TemperatureScaling(temperatures=[4.0, 5.0], widen=True).fit(*rows)
    assert low.temperature_ == pytest.approx(wide.temperature_, rel=0.02)
    assert float(low.grid_.temperatures.min()) == pytest.approx(2.0)


def test_widening_ends_where_there_is_no_optimum():
    logits, _ = sample(200)
    calibrator = FocalTemperatureScaling(criterion="nll", gammas=[0.0, 1.0], temperatures=[0.5, 1.0], widen=True)
    words = said(calibrator, logits, logits.argmax(-1))
    assert "that was searched" in words
    assert "widen=True" not in words
    assert GAMMA_BOUNDS[0] <= calibrator.gamma_ <= GAMMA_BOUNDS[1]


@pytest.mark.parametrize(("network", "worse"), [("cross-entropy", False), ("focal-3", True)])
def test_an_ece_that_costs_nll_and_brier(network, worse):
    """If the ECE's choice has a higher NLL and Brier score than no calibration, a warning gives both."""
    with np.load(DATA / f"fashion_mnist_{network}.npz") as data:
        logits, labels = (torch.from_numpy(data[f"val_{name}"]) for name in ("logits", "labels"))
    calibrator = FocalTemperatureScaling(criterion="ece")
    calibrator.fit_quietly(logits, labels)
    none = mean_losses(logits.double(), labels)
    found = mean_losses(logits.double(), labels, calibrator.gamma_, calibrator.temperature_)
    text = " ".join(calibrator.warnings_)
    for words, old, new in zip(("NLL", "Brier score"), none, found, strict=True):
        assert (f"the {words} rises from {old:.4f} to {new:.4f}" in text) == (worse and new > old)
    assert FocalTemperatureScaling().fit(logits, labels).warnings_ == ()


def test_a_loss_above_no_calibration_is_reported_with_a_remedy():
    logits, target = sample(temperature=1.0)
    calibrator = FocalTemperatureScaling(gammas=[5.0], temperatures=[1.0], criterion="ece")
    words = said(calibrator, logits, target)
    (old_nll, old_brier), (new_nll, new_brier) = mean_losses(logits, target), mean_losses(logits, target, 5.0)
    assert f"the NLL rises from {old_nll:.4f} to {new_nll:.4f}" in words
    assert f"the Brier score rises from {old_brier:.4f} to {new_brier:.4f}" in words
    assert "criterion='nll' does not" in words
    # The comparison uses the fit's own criterion if that is proper.
    words = said(calibrator.set_params(criterion="brier"), logits, target)
    assert "NLL" not in words and "include gamma = 0 and temperature = 1 in the search" in words


def test_a_difference_within_noise_causes_no_warning():
    """One grid step from the optimum the loss is higher, but by less than a standard error."""
    logits, target = sample(300, temperature=1.0)
    best = TemperatureScaling().fit(logits, target).temperature_
    calibrator = TemperatureScaling(temperatures=[best * 1.05], search="grid")
    near_best = logits / best
    assert TemperatureScaling(temperatures=[1.05]).fit(near_best, target).warnings_ == ()
    assert mean_losses(near_best, target, 0.0, 1.05)[0] > mean_losses(near_best, target)[0]
    assert calibrator.fit_quietly(logits, target) is calibrator


@pytest.mark.parametrize("criterion", ["ece", "brier"])
@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_an_impossible_target_causes_a_warning(criterion, kind):
    logits, target = sample(500)
    logits[[3, 8], target[[3, 8]]] = -math.inf
    input = logits if kind == "logits" else logits.softmax(-1)
    calibrator = FocalTemperatureScaling(criterion=criterion, input_kind=kind, temperatures=COARSE)
    words = said(calibrator, input, target)
    assert "the NLL is infinite because 2 of 500 rows (the first is 3) give their target probability 0" in words
    if kind == "probs":
        assert "infinite" not in " ".join(calibrator.fit_quietly(input.clip(1e-7), target).warnings_)


def test_bins_that_are_always_right_cause_a_warning():
    logits, target = sample(2000, temperature=1.0)
    logits, target = torch.cat([logits, torch.eye(5, dtype=torch.float64)[target] * 50]), torch.cat([target, target])
    words = said(HistogramBinning(n_bins=4), logits, target)
    assert "all rows of 1 of 4 bins are right, so that one mistake there makes the NLL infinite (fewer bins" in words
    assert HistogramBinning(n_bins=1).fit(*sample(2000, n_classes=2, temperature=0.1)).warnings_ == ()


def test_bins_after_a_scaling_at_its_bound_cause_one_warning():
    scaling = TemperatureScaling(temperatures=[0.5, 1.0])
    words = said(HistogramBinning(n_bins=1, scaling=scaling), *sample(temperature=3.0))
    assert words.startswith("HistogramBinning: of the scaling, temperature = 1 is the largest that was searched")


def test_many_labels_are_one_warning():
    logits, _ = sample(50, n_classes=7)
    calibrator = fk.MultiLabelScaling(scaling=TemperatureScaling())
    with pytest.warns(fk.CalibrationWarning) as caught:
        calibrator.fit(logits, logits > 0)
    assert len(caught) == 1
    assert len(calibrator.warnings_) == 7
    assert str(caught[0].message).startswith("MultiLabelScaling: label 0: temperature = ")
    assert "is the lower bound of the search on 50 rows" in str(caught[0].message)
    assert str(caught[0].message).endswith("and 4 more in warnings_")


def test_fit_quietly_is_the_same_fit_without_a_warning(tmp_path):
    logits, _ = sample(100)
    rows = logits, logits.argmax(-1)
    calibrator = TemperatureScaling()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrator.fit_quietly(*rows)
    aloud = TemperatureScaling()
    words = said(aloud, *rows)
    assert (aloud.temperature_, aloud.warnings_) == (calibrator.temperature_, calibrator.warnings_)
    assert "the target has the largest logit of every row" in words
    assert "fit on rows with some wrong predictions and an accuracy above chance" in words
    aloud.save(tmp_path / "calibrator.json")
    assert fk.load_calibrator(tmp_path / "calibrator.json").warnings_ == aloud.warnings_
    assert aloud.fit(*sample()).warnings_ == ()


@pytest.mark.parametrize("size", [1e-300, 1e-6, 1e6])
@pytest.mark.parametrize("method", [TemperatureScaling, fk.StructuredScaling])
def test_logits_of_a_size_beyond_the_search(method, size):
    """No temperature of the search makes such logits probabilities; the remedy does."""
    logits, target = sample(300)
    options = {"solver": "lbfgs"} if method is fk.StructuredScaling else {}
    words = said(method(**options), size * logits, target)
    assert "divide logits whose differences are far from 1 by their size, or take RobustTemperatureScaling" in words
    assert method(**options).fit(logits, target).warnings_ == ()
    assert fk.RobustTemperatureScaling().fit(size * logits, target).warnings_ == ()


def test_isotonic_regression_of_few_rows():
    """The rows of fit do not show that it overfits: their NLL falls, and that of new rows rises. Calibrated logits."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(5000, 10, generator=generator)
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    calibrator = fk.IsotonicCalibration()
    words = said(calibrator, logits[:500], target[:500])
    assert "50 rows per class are few: the regressions follow their noise" in words
    assert "fit on 500 rows per class, or take SplineScaling" in words
    old, new = (fk.metrics.nll(one, target).item() for one in (logits.softmax(-1), calibrator.predict_proba(logits)))
    assert new > old + 0.05
    assert fk.IsotonicCalibration().fit(logits, target).warnings_ == ()
    weight = torch.full((500,), 10.0)
    assert fk.IsotonicCalibration().fit_quietly(logits[:500], target[:500], weight).warnings_ == ()


def test_a_start_near_the_optimum_finds_it_sooner():
    rows = sample(gamma=1.0)
    whole = FocalTemperatureScaling().fit(*rows)
    near = FocalTemperatureScaling().fit_quietly(*rows, near=(whole.gamma_ + 0.1, whole.temperature_ * 1.1))
    assert near.best_value_ == pytest.approx(whole.best_value_, rel=1e-12)
    assert near.n_cells_ < whole.n_cells_ / 5
    assert "near" not in " ".join(vars(near))


def test_probabilities_after_a_fit_on_logits_cause_one_warning(tmp_path):
    logits, target = sample(100)
    probs = logits.softmax(-1)
    for calibrator in (TemperatureScaling(), fk.RobustTemperatureScaling(), fk.AutoCalibrator()):
        calibrator.fit(logits, target)
        calibrator.predict_proba(probs[:1])  # a single row may look like anything
        with pytest.warns(fk.CalibrationWarning) as said:
            calibrator.predict_proba(probs)
        (words,) = [str(one.message) for one in said]
        assert words.startswith(f"{type(calibrator).__name__}: the rows to predict look like probabilities, but fit")
        again = pickle.loads(pickle.dumps(calibrator))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            calibrator.predict_proba(probs)
            again.predict_log_proba(probs)  # its fit has warned
            calibrator.fit_quietly(logits, target).predict(probs)
            calibrator.fit(logits, target)
        with pytest.warns(fk.CalibrationWarning, match="look like percentages"):
            calibrator.predict(100 * probs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrator = TemperatureScaling().fit(logits, target)
        calibrator.predict_proba(logits)
        calibrator.predict_proba(probs)  # only the first rows are looked at
        TemperatureScaling(input_kind="probs").fit(probs, target).predict_proba(probs)
        TemperatureScaling(input_kind="logits").fit(probs, target).predict_proba(probs)  # as asked for
    for copied in (pickle.loads(pickle.dumps(calibrator.fit(logits, target))), copy.deepcopy(calibrator)):
        with pytest.warns(fk.CalibrationWarning, match="look like probabilities"):
            copied.predict_proba(probs)
    calibrator.save(tmp_path / "calibrator.json")
    loaded = fk.load_calibrator(tmp_path / "calibrator.json")
    with pytest.warns(fk.CalibrationWarning, match="look like probabilities"):
        loaded.predict_proba(probs)


def test_a_choice_has_the_warnings_of_the_chosen_calibrator():
    logits, target = sample(600, 4)
    target = torch.where(target == 2, 0, target)
    for calibrator in (fk.IsotonicCalibration(), fk.StructuredScaling(solver="lbfgs"), fk.SplineScaling(kind="vector")):
        alone = copy.deepcopy(calibrator).fit_quietly(logits, target)
        assert any(
            "no row of fit has class 2, so its probability falls (fit on rows" in words for words in alone.warnings_
        )
        chosen = fk.AutoCalibrator(candidates={"only": calibrator}).fit_quietly(logits, target)
        assert chosen.chosen_ == "only"
        assert chosen.warnings_ == alone.warnings_
        assert set(alone.warnings_) <= set(chosen.verdict_.warnings)


def test_a_label_at_an_impossible_class_is_named():
    logits, target = sample(600, 4)
    logits[torch.arange(200), (target[:200] + 1) % 4] = -math.inf
    for method in (fk.RobustTemperatureScaling, fk.SplineScaling, fk.AutoCalibrator):
        assert not any("-inf" in words for words in method().fit_quietly(logits, target).warnings_)
        broken = logits.clone()
        broken[0, target[0]] = -math.inf
        assert any("its label at a logit of -inf" in words for words in method().fit_quietly(broken, target).warnings_)
