"""The cross-validation of candidates and the rule that picks one."""

import math

import pytest
import torch

import focalkern as fk
from focalkern.calibrators import TemperatureScaling
from focalkern.study.contest import (
    Entry,
    as_candidates,
    decide,
    fit_one,
    hold_contest,
    identity,
    log_proba,
    losses_of,
    stratified_folds,
)


def entries(*losses, **excluded):
    return [
        Entry(str(place), None, float(loss.mean()), excluded=excluded.get(f"e{place}", ""))
        for place, loss in enumerate(losses)
    ]


def outcome(*losses, **excluded):
    losses = [torch.as_tensor(loss, dtype=torch.float64) for loss in losses]
    return decide(entries(*losses, **excluded), torch.stack(losses), criterion="nll", folds=5)


def test_the_rule_by_hand():
    """A difference of mean 0.1 and standard error 0.2 / sqrt(3): the simpler one; one of 0.1 +- 0: the better one."""
    noisy = [1.3, 0.9, 1.3, 0.9]
    found = outcome(noisy, [1.0, 1.0, 1.0, 1.0])
    assert found.chosen == 0 and found.best == 1
    assert found.entries[0].difference == pytest.approx(0.1)
    assert found.entries[0].error == pytest.approx(torch.tensor([0.3, -0.1, 0.3, -0.1]).std().item() / 2)
    assert outcome([1.1] * 4, [1.0] * 4).chosen == 1


def test_the_simplest_within_one_standard_error_of_the_best_is_used():
    base = torch.linspace(1, 2, 50, dtype=torch.float64)
    wobble = torch.tensor([0.1, -0.1] * 25, dtype=torch.float64)
    found = outcome(base, base - 0.2, base - 0.205 + wobble)
    assert (found.best, found.chosen) == (2, 1)


@pytest.mark.parametrize("why", ["has its optimum at the end of the search", "could not be fitted"])
def test_what_is_excluded_is_never_chosen_nor_the_measure(why):
    found = outcome([1.0] * 4, [0.9] * 4, [0.1] * 4, e2=why)
    assert (found.best, found.chosen) == (1, 1)
    assert found.entries[2].excluded == why


def test_a_candidate_that_is_worse_than_none_or_infinite_anywhere_is_never_chosen():
    found = outcome([1.0] * 4, [1.001] * 4, [0.0, 0.0, 0.0, math.inf])
    assert found.chosen == found.best == 0
    assert found.entries[1].excluded == "is worse than no calibration"
    assert found.entries[2].excluded == "has an infinite NLL in a fold"


def test_infinite_without_calibration_too():
    found = outcome([math.inf, 1.0], [math.inf, 0.5])
    assert found.chosen == 0
    assert outcome([math.inf, 1.0], [2.0, 0.5]).chosen == 1


def test_folds_are_stratified_and_repeatable():
    labels = torch.arange(7).repeat_interleave(torch.tensor([1, 2, 5, 11, 20, 33, 31]))
    fold = stratified_folds(labels, 5, 3)
    assert torch.equal(fold, stratified_folds(labels, 5, 3))
    assert not torch.equal(fold, stratified_folds(labels, 5, 4))
    for part in (torch.ones(len(labels), dtype=torch.bool), *(labels == c for c in range(7))):
        sizes = torch.bincount(fold[part], minlength=5)
        assert int(sizes.max() - sizes.min()) <= 1


@pytest.mark.parametrize("criterion", ["nll", "brier"])
def test_losses_are_those_of_fits_that_did_not_see_the_row(sharp, criterion):
    logits, labels = sharp
    found = hold_contest(logits, labels, as_candidates(None, criterion, "logits"), criterion=criterion, folds=4, seed=1)
    fold = stratified_folds(labels, 4, 1)
    total = 0.0
    for k in range(4):
        part = TemperatureScaling(criterion=criterion).fit(logits[fold != k], labels[fold != k])
        total += float(losses_of(log_proba(part, logits[fold == k]), labels[fold == k], criterion).sum())
    assert found.entries[1].loss == pytest.approx(total / len(labels), rel=1e-12)
    assert found.winner.name == "temperature" and found.folds == 4
    assert [row["name"] for row in found.table()] == ["none", "temperature", "focal-temperature"]


def test_a_candidate_without_an_optimum_outside_of_a_fold_is_not_chosen():
    """One mistake in 60 rows: without the fold that has it temperature scaling stops where its search does."""
    labels = torch.arange(60) % 3
    logits = torch.eye(3, dtype=torch.float64)[labels]
    logits[0] = torch.tensor([0.0, 0.1, 0.0])
    assert TemperatureScaling().fit_quietly(logits, labels).at_border_ == ()
    found = hold_contest(logits, labels, as_candidates(None, "nll", "logits"), criterion="nll", folds=5, seed=0)
    temperature = found.entries[1]
    assert temperature.loss < found.entries[0].loss
    assert temperature.excluded.startswith("has its optimum at the end of the search without a fold: temperature = ")
    assert found.winner.name == "none"


def test_brier_is_the_brier_score(sharp):
    logits, labels = sharp
    found = losses_of(logits.double().log_softmax(-1), labels, "brier").mean()
    assert float(found) == pytest.approx(float(fk.metrics.brier_score(logits.double().softmax(-1), labels)))


def test_a_row_that_is_impossible_leaves_no_calibration(sharp):
    logits, labels = sharp
    logits = logits.clone()
    logits[0, labels[0]] = -math.inf
    found = hold_contest(logits, labels, as_candidates(None, "nll", "logits"), criterion="nll", folds=5, seed=0)
    assert found.winner.name == "none"
    assert all("infinite" in entry.excluded or "could not be fitted" in entry.excluded for entry in found.entries[1:])


def test_one_row_is_too_few_for_any_fold():
    found = hold_contest(
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([0]),
        as_candidates(None, "nll", "logits"),
        criterion="nll",
        folds=5,
        seed=0,
    )
    assert found.folds == 0 and found.winner.name == "none"


class Half:
    """Scikit-learn-shaped, in NumPy: what it has learnt is a temperature of 2."""

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
    found = hold_contest(logits, labels, made, criterion="nll", folds=5, seed=0)
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
