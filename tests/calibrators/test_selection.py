"""The cross-validation of candidates and the rule that picks one."""

import copy
import math

import pytest
import torch
from test_spline_fit import draw

import focalkern as fk
from focalkern.calibrators import RobustTemperatureScaling, TemperatureScaling
from focalkern.calibrators._candidates import as_candidates, fit_one, identity, log_proba
from focalkern.calibrators._cross_validation import FoldFits, cross_validate
from focalkern.calibrators._fit_data import FitData
from focalkern.calibrators._folds import fold_of
from focalkern.calibrators._inputs import losses_of
from focalkern.calibrators._row_source import rows_of
from focalkern.calibrators._selection import CandidateScore, decide
from focalkern.calibrators._verdict import cross_validation_warnings


def entries(*losses, keeps=(), **excluded):
    return [
        CandidateScore(
            str(place),
            None,
            float(loss.mean()),
            excluded=excluded.get(f"e{place}", ""),
            keeps_predictions=place in keeps,
        )
        for place, loss in enumerate(losses)
    ]


def outcome(*losses, **excluded):
    losses = [torch.as_tensor(loss, dtype=torch.float64) for loss in losses]
    return decide(entries(*losses, **excluded), torch.stack(losses), criterion="nll", folds=5)


def test_the_rule_by_hand():
    """A difference of 0.05 with standard error 0.4 / sqrt(12) chooses the simpler candidate, 0.1 +- 0 the better."""
    noisy = [1.25, 0.85, 1.25, 0.85]
    found = outcome(noisy, [1.0, 1.0, 1.0, 1.0])
    assert found.chosen == 0 and found.best == 1
    assert found.entries[1].difference == pytest.approx(-0.05)
    assert found.entries[1].error == pytest.approx(torch.tensor([0.25, -0.15, 0.25, -0.15]).std().item() / 2)
    assert outcome([1.1] * 4, [1.0] * 4).chosen == 1
    # A difference above half a standard error decides: 0.1 against 0.115.
    assert outcome([1.3, 0.9, 1.3, 0.9], [1.0] * 4).chosen == 1


def test_what_changes_no_prediction_is_taken_by_its_mean_alone():
    noisy = torch.tensor([1.25, 0.85, 1.25, 0.85], dtype=torch.float64)
    assert outcome(noisy, [1.0] * 4, keeps=(1,)).chosen == 1
    assert outcome(noisy, noisy - 0.1, noisy - 0.05, keeps=(1, 2)).chosen == 1


def test_a_richer_candidate_is_compared_with_the_one_that_is_held():
    base = torch.linspace(1, 2, 50, dtype=torch.float64)
    wobble = torch.tensor([0.1, -0.1] * 25, dtype=torch.float64)
    found = outcome(base, base - 0.2, base - 0.205 + wobble)
    assert (found.best, found.chosen) == (2, 1)
    assert outcome(base, base - 0.2, base - 0.21 + wobble).chosen == 2
    # The current best may itself be a richer candidate.
    assert outcome(base, base - 0.205 + wobble, base - 0.22).chosen == 2


def test_no_calibration_is_not_eligible_where_it_may_be_infinite():
    found = outcome([1.0] * 4, [1.2] * 4, e0="gives probability 0")
    assert (found.best, found.chosen) == (1, 1)
    assert found.entries[1].excluded == ""
    assert outcome([math.inf, 1.0], [2.0, 1.0], [1.0, 1.0], e0="gives probability 0").chosen == 2


@pytest.mark.parametrize("why", ["has its optimum at a bound of the search", "could not be fitted"])
def test_an_excluded_candidate_is_neither_chosen_nor_the_baseline(why):
    found = outcome([1.0] * 4, [0.9] * 4, [0.1] * 4, e2=why)
    assert (found.best, found.chosen) == (1, 1)
    assert found.entries[2].excluded == why


def test_a_candidate_that_is_worse_than_none_or_infinite_anywhere_is_never_chosen():
    found = outcome([1.0] * 4, [1.001] * 4, [0.0, 0.0, 0.0, math.inf])
    assert found.chosen == found.best == 0
    assert found.entries[1].excluded == "is worse than no calibration"
    assert found.entries[2].excluded == "has an infinite NLL in a fold"


def test_an_infinite_loss_without_calibration():
    found = outcome([math.inf, 1.0], [math.inf, 0.5])
    assert found.chosen == 0
    assert outcome([math.inf, 1.0], [2.0, 0.5]).chosen == 1


def test_folds_are_balanced_repeatable_and_those_of_any_batch():
    for rows, folds in ((1, 2), (2, 2), (10, 5), (103, 5), (4096, 7), (70_001, 1000)):
        number = torch.arange(rows)
        fold = fold_of(number, rows, folds, 3)
        sizes = torch.bincount(fold, minlength=folds)
        assert int(sizes.max() - sizes.min()) <= 1 and len(sizes) == folds
        some = number[number % 3 == 1]
        assert torch.equal(fold_of(some, rows, folds, 3), fold[some])
        assert torch.equal(fold_of(number, rows, folds, 3), fold)
        if rows > 100:
            assert not torch.equal(fold, fold_of(number, rows, folds, 4))
            assert not torch.equal(fold, fold_of(number, rows, folds, -3))


@pytest.mark.parametrize("rows", [12, 100, 1025])
def test_folds_are_random(rows):
    """Two rows, adjacent or distant, share a fold as often as in random folds."""
    number, seeds = torch.arange(rows), 4000
    folds = torch.stack([fold_of(number, rows, 4, seed) for seed in range(seeds)])
    together = (rows / 4 - 1) / (rows - 1)  # that two rows are in one fold; only 1025 is no multiple of 4
    error = (together * (1 - together) / seeds) ** 0.5
    for one, other in ((0, 1), (0, rows - 1), (3, 7), (rows // 2, rows // 2 + 4)):
        assert abs(float((folds[:, one] == folds[:, other]).double().mean()) - together) < 4.5 * error
    counts = (folds[:, : rows // 3] == 2).double().sum(1)  # hypergeometric
    share, n = rows / 4, rows // 3
    variance = n * (share / rows) * (1 - share / rows) * (rows - n) / (rows - 1)
    assert float(counts.mean()) == pytest.approx(n / 4, abs=5 * (variance / seeds) ** 0.5)
    assert float(counts.var()) == pytest.approx(variance, rel=0.12)


@pytest.mark.parametrize("criterion", ["nll", "brier"])
def test_losses_are_those_of_fits_that_did_not_see_the_row(sharp, criterion):
    logits, labels = sharp
    candidates = as_candidates(("temperature",), criterion, "logits")
    found = cross_validate(logits, labels, candidates, criterion=criterion, folds=4, seed=1)
    fold = fold_of(torch.arange(len(labels)), len(labels), 4, 1)
    total, brier = 0.0, 0.0
    for k in range(4):
        scaling = RobustTemperatureScaling() if criterion == "nll" else TemperatureScaling(criterion=criterion)
        part = log_proba(scaling.fit(logits[fold != k], labels[fold != k]), logits[fold == k])
        of_fold = losses_of(part, labels[fold == k], (criterion, "brier")).sum(1).tolist()
        total, brier = total + of_fold[0], brier + of_fold[1]
    assert found.entries[1].loss == pytest.approx(total / len(labels), rel=1e-9)
    assert found.winner.name == "temperature" and found.folds == 4
    assert [row["name"] for row in found.table()] == ["none", "temperature"]
    none = float(losses_of(logits.double().log_softmax(-1), labels, ("brier",)).sum())
    assert found.brier[0] == pytest.approx((brier - none) / len(labels), rel=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_splines_are_those_of_fits_that_did_not_see_the_row(weighted):
    """Their features come from all rows, which changes the loss only slightly."""
    logits, labels = draw(600, 5, scale=3.0)
    weight = 1 + torch.arange(600, dtype=torch.float64) % 3 if weighted else None
    candidates = as_candidates(None, "nll", "logits")
    found = cross_validate(logits, labels, candidates, criterion="nll", folds=5, seed=0, weight=weight)
    fold = fold_of(torch.arange(600), 600, 5, 0)
    for entry in found.entries[2:]:
        alone = copy.deepcopy(candidates[entry.name]).fit(logits, labels, weight)
        assert torch.equal(entry.calibrator.predict_proba(logits), alone.predict_proba(logits))
        loss = torch.empty(600, dtype=torch.float64)
        for k in range(5):
            kept = fold != k
            part = copy.deepcopy(alone).fit(logits[kept], labels[kept], None if weight is None else weight[kept])
            loss[~kept] = losses_of(log_proba(part, logits[~kept]), labels[~kept], ("nll",))[0]
        mean = loss.mean() if weight is None else (loss * weight).sum() / weight.sum()
        assert entry.loss == pytest.approx(float(mean), abs=1e-3)
    keeping = as_candidates(None, "nll", "logits", keep_predictions=True)
    assert list(keeping) == ["none", "temperature", "spline"]
    with pytest.raises(ValueError, match="spline-vector, isotonic may change predicted classes"):
        as_candidates(("temperature", "isotonic", "spline-vector"), "nll", "logits", keep_predictions=True)


def test_only_the_chosen_spline_is_completed_on_request():
    logits, labels = draw(300, 4)
    logits[:, 0] += 2  # which only an intercept corrects
    candidates = as_candidates(("temperature", "spline", "spline-vector"), "nll", "logits")
    every = cross_validate(logits, labels, candidates, criterion="nll", folds=5, seed=0)
    found = cross_validate(logits, labels, candidates, criterion="nll", folds=5, seed=0, only_chosen=True)
    assert found.table() == every.table() and found.winner.name == "spline-vector"
    assert [entry.calibrator is None for entry in found.entries] == [False, False, True, False]
    assert found.winner.calibrator.best_value_ == every.winner.calibrator.best_value_
    assert found.winner.calibrator.n_changed_ == every.winner.calibrator.n_changed_ > 0


def test_a_matrix_needs_three_classes_and_two_rows_for_each():
    found = cross_validate(*draw(200, 2), as_candidates(None, "nll", "logits"), criterion="nll", folds=5, seed=0)
    assert found.entries[4].excluded == "adds nothing to spline vector scaling with 2 classes"
    found = cross_validate(*draw(99, 50), as_candidates(None, "nll", "logits"), criterion="nll", folds=5, seed=0)
    assert found.entries[4].excluded == "needs at least 2 rows per class, 100"
    found = cross_validate(*draw(100, 50), as_candidates(None, "nll", "logits"), criterion="nll", folds=5, seed=0)
    assert not found.entries[4].excluded.startswith("needs")


def test_a_candidate_without_an_optimum_outside_of_a_fold_is_not_chosen():
    """One wrong prediction in 60 rows: without its fold, temperature scaling stops at its bound."""
    labels = torch.arange(60) % 3
    logits = torch.eye(3, dtype=torch.float64)[labels]
    logits[0] = torch.tensor([0.0, 0.1, 0.0])
    assert TemperatureScaling().fit_quietly(logits, labels).at_border_ == ()
    found = cross_validate(
        logits,
        labels,
        as_candidates({"plain": TemperatureScaling()}, "nll", "logits"),
        criterion="nll",
        folds=5,
        seed=0,
    )
    plain = found.entries[1]
    assert plain.loss < found.entries[0].loss
    assert plain.excluded.startswith("has its optimum at a bound of the search in a fold: temperature = ")
    assert found.winner.name == "none"


def test_brier_is_the_brier_score(sharp):
    logits, labels = sharp
    found = losses_of(logits.double().log_softmax(-1), labels, ("brier",)).mean()
    assert float(found) == pytest.approx(float(fk.metrics.brier_score(logits.double().softmax(-1), labels)))


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_zeros_on_the_true_class_leave_what_is_finite(sharp, kind):
    logits, labels = sharp
    logits = logits.clone()
    logits[0, labels[0]] = -math.inf
    input = logits if kind == "logits" else logits.double().softmax(-1)
    candidates = as_candidates(("temperature", "focal-temperature", "spline"), "nll", kind)
    found = cross_validate(input, labels, candidates, criterion="nll", folds=5, seed=0)
    assert found.winner.name in ("temperature", "spline")
    assert math.isfinite(found.winner.loss)
    assert found.entries[0].excluded == "gives probability 0 to classes that occur in other rows"
    assert "could not be fitted" in found.entries[2].excluded


def test_masked_logits_leave_no_calibration_eligible(sharp):
    logits, labels = sharp
    logits = logits.clone()
    logits[torch.arange(len(labels)), (labels + 1) % logits.shape[1]] = -math.inf
    found = cross_validate(logits, labels, as_candidates(None, "nll", "logits"), criterion="nll", folds=5, seed=0)
    assert found.entries[0].excluded == ""
    # Zero probabilities may come from a forest, where a later zero may be the true class.
    probs = logits.double().softmax(-1)
    found = cross_validate(probs, labels, as_candidates(None, "nll", "probs"), criterion="nll", folds=5, seed=0)
    assert found.entries[0].excluded


def test_one_row_is_too_few_for_any_fold():
    found = cross_validate(
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([0]),
        as_candidates(None, "nll", "logits"),
        criterion="nll",
        folds=5,
        seed=0,
    )
    assert found.folds == 0 and found.winner.name == "none"


class Half:
    """A calibrator with scikit-learn's interface, in NumPy: it learns a temperature of 2."""

    def fit(self, logits, labels):
        assert type(logits).__module__ == type(labels).__module__ == "numpy"
        return self

    def predict_proba(self, logits):
        return torch.from_numpy(logits / 2).softmax(-1).numpy()


class Fails(Half):
    def predict_proba(self, logits):
        raise RuntimeError("no such luck")


def test_candidates_from_elsewhere(sharp):
    logits, labels = sharp
    made = as_candidates({"half": Half(), "fails": Fails()}, "nll", "logits")
    found = cross_validate(logits, labels, made, criterion="nll", folds=5, seed=0)
    assert [entry.name for entry in found.entries] == ["none", "half", "fails"]
    assert found.winner.name == "half"
    expected = fk.metrics.nll((logits.double() / 2).softmax(-1), labels)
    assert found.entries[1].loss == pytest.approx(float(expected), rel=1e-6)
    assert found.entries[2].excluded == "could not be fitted: no such luck"


def test_candidates_by_name_come_in_their_order():
    assert list(as_candidates(("focal-temperature", "temperature"), "nll", "logits")) == [
        "none",
        "temperature",
        "focal-temperature",
    ]
    with pytest.raises(ValueError, match=r"expected names out of none, temperature, .* got 'platt'"):
        as_candidates(("platt",), "nll", "logits")
    with pytest.raises(TypeError, match="platt must have fit and predict_proba, got int"):
        as_candidates({"platt": 3}, "nll", "logits")
    with pytest.raises(ValueError, match="other than 'none'"):
        as_candidates({"none": Half()}, "nll", "logits")


def test_no_calibration_can_be_saved(sharp, tmp_path):
    logits, labels = sharp
    none = fit_one(identity("logits"), logits, labels)
    none.save(tmp_path / "none.json")
    loaded = fk.load_calibrator(tmp_path / "none.json")
    assert torch.allclose(loaded.predict_proba(logits), logits.softmax(-1))


@pytest.fixture
def sharp():
    """400 rows of 3 classes whose labels follow softmax(z / 2)."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(400, 3, generator=generator)
    labels = torch.multinomial((logits / 2).softmax(-1), 1, generator=generator).squeeze(1)
    return logits, labels


@pytest.mark.parametrize("case", ["logits", "impossible", "probs"])  # impossible: the features of the rows are not kept
def test_losses_of_a_fold_are_those_of_its_predictions(case):
    logits, labels = draw(300, 4)
    input_kind = "probs" if case == "probs" else "logits"
    input = logits.softmax(-1) if case == "probs" else logits
    if case == "impossible":
        input[labels != 1, 1] = -torch.inf
    fold = torch.arange(300) % 3
    candidates = as_candidates(None, "nll", input_kind)
    fits = FoldFits(rows_of(FitData(input, labels, None)), candidates, lambda number: fold[number], 3)
    for candidate in list(candidates.values())[1:]:
        fits.fit(candidate)
        for k in range(3):
            held_out = input[fold == k], labels[fold == k]
            expected = losses_of(fits.held_out(candidate, k)(held_out[0]), held_out[1], ("nll", "brier"))
            torch.testing.assert_close(fits.losses(candidate, k), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n", "names"), [(1, "1"), (2, "1 and 2"), (3, "1, 2 and 3")])
def test_worse_candidates_are_listed(n, names):
    found = outcome(*[[1.0 + place / 10] * 4 for place in range(n + 1)])
    words = f"{names}: the cross-validated NLL is higher than that of no calibration"
    assert words in cross_validation_warnings(found)


@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
def test_losses_whose_squares_overflow():
    logits, target = draw(100, 4, seed=0)
    calibrator = fk.AutoCalibrator().fit(1e200 * logits, target)
    assert calibrator.chosen_ != "none" and math.isfinite(min(one["loss"] for one in calibrator.table_))
