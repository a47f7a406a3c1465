"""AutoCalibrator, which makes the comparison's choice, and candidates from other libraries."""

import json

import numpy as np
import pytest
import torch
from compare_cases import FAST, Half, sample
from conftest import peer

import focalkern as fk
from focalkern.calibrators import RobustTemperatureScaling, SplineScaling, TemperatureScaling
from focalkern.calibrators._candidates import DEFAULT_CANDIDATES
from focalkern.calibrators._folds import fold_of

pytest.importorskip("tabulate", reason="tabulate is not installed")


# -- AutoCalibrator --------------------------------------------------------------------------------------------------


def test_auto_is_the_calibrator_it_chose(tmp_path):
    logits, labels = sample(300, 0)
    auto = fk.AutoCalibrator(folds=3).fit(logits, labels)
    assert auto.chosen_ == "spline"
    same = SplineScaling().fit(logits, labels)
    assert torch.equal(auto.predict_proba(logits), same.predict_proba(logits))
    assert torch.equal(auto.predict(logits), logits.argmax(-1))
    assert [row["name"] for row in auto.table_] == list(DEFAULT_CANDIDATES)
    assert auto.verdict_.use == "spline scaling"
    assert auto.verdict_.costs == "No predicted class changes."
    auto.save(tmp_path / "auto.json")
    loaded = fk.load_calibrator(tmp_path / "auto.json")
    assert isinstance(loaded, SplineScaling) and loaded.temperature_ == auto.calibrator_.temperature_
    evidence = json.loads((tmp_path / "auto.json").read_text())["fit"]["evidence"]
    assert evidence["candidates"] == auto.table_ and evidence["because"] == auto.verdict_.because
    assert torch.equal(auto.as_module()(logits), same.as_module()(logits))


def test_auto_weights_its_fits_and_its_losses():
    """Compares with a direct computation. A weight of 0 equals a missing row, and equal weights equal no weights."""
    logits, labels = sample(300, 0)
    weight = torch.rand(300, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1
    auto = fk.AutoCalibrator(("temperature",), folds=3, seed=7).fit(logits, labels, weight)
    assert auto.calibrator_.temperature_ == RobustTemperatureScaling().fit(logits, labels, weight).temperature_
    fold = fold_of(torch.arange(300), 300, 3, 7)
    losses = torch.empty(2, 300, dtype=torch.float64)
    for k in range(3):
        part = RobustTemperatureScaling().fit(logits[fold != k], labels[fold != k], weight[fold != k])
        probs = [logits[fold == k].double().softmax(-1), part.predict_proba(logits[fold == k].double())]
        for row, of_all in zip(losses, probs, strict=True):
            row[fold == k] = -of_all.gather(1, labels[fold == k].unsqueeze(1)).squeeze(1).log()
    means, difference = np.average(losses, axis=1, weights=weight), (losses[0] - losses[1]).numpy()
    assert [row["loss"] for row in auto.table_] == pytest.approx(means.tolist(), rel=1e-9)
    share = (weight / weight.sum()).numpy()
    error = np.sqrt((share**2 * (difference - share @ difference) ** 2).sum() / (1 - (share**2).sum()))
    assert auto.table_[0]["standard_error"] == pytest.approx(error, rel=1e-6)

    none = (torch.arange(300) % 3 > 0).double()
    left = fk.AutoCalibrator(folds=3).fit(logits, labels, none)
    assert left.table_ == fk.AutoCalibrator(folds=3).fit(logits[none > 0], labels[none > 0]).table_
    plain = fk.AutoCalibrator(("temperature",), folds=3, seed=7).fit(logits, labels).table_
    equal = fk.AutoCalibrator(("temperature",), folds=3, seed=7).fit(logits, labels, 2 * torch.ones(300)).table_
    for one, other in zip(equal, plain, strict=True):
        for name in ("loss", "difference", "standard_error"):
            # A row of weight 2 counts as two rows; the prior on the temperature changes the result little.
            assert one[name] == pytest.approx(other[name], rel=1e-2, abs=1e-9), name


def test_auto_names_what_takes_no_weights():
    logits, labels = sample(100, 0)
    weight = torch.linspace(0.5, 1.5, 100)
    auto = fk.AutoCalibrator({"half": Half(), "T": TemperatureScaling()}, folds=2).fit(logits, labels, weight)
    assert [row["excluded"] for row in auto.table_] == [None, "could not be fitted: its fit has no sample_weight", None]
    assert any(words.startswith("half could not be fitted") for words in auto.verdict_.warnings)


def test_auto_in_numpy_with_names_and_with_one_logit():
    logits, labels = sample(200, 0, n_classes=2)
    names = np.array(["cat", "dog"])[labels.numpy()]
    auto = fk.AutoCalibrator(("temperature",), folds=2).fit(logits.numpy(), names)
    assert set(auto.predict(logits.numpy())) <= {"cat", "dog"}
    assert isinstance(auto.predict_proba(logits.numpy()), np.ndarray)
    one = fk.AutoCalibrator(folds=2).fit(logits[:, 1] - logits[:, 0], labels)
    assert one.predict_proba(logits[:5, 1] - logits[:5, 0]).shape == (5, 2)


@pytest.mark.parametrize("chosen", ["none", "temperature", "spline", "spline-vector", "focal-temperature"])
@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_auto_module_of_one_logit_maps_each_row(chosen, kind):
    logits, labels = sample(200, 0, n_classes=2)
    margin = (logits[:, 1] - logits[:, 0]).double()
    rows = margin.sigmoid() if kind == "probs" else margin
    auto = fk.AutoCalibrator((chosen,), folds=2, input_kind=kind).fit(rows, labels)
    assert auto.chosen_ == chosen
    expected = auto.predict_log_proba(rows)
    assert torch.allclose(auto.as_module()(rows[:3]), (expected[:, 1] - expected[:, 0])[:3])


def test_auto_module_of_pixels_has_their_layout():
    logits, labels = sample(240, 0)
    pixels = logits.reshape(6, 5, 8, -1).movedim(-1, 1)
    auto = fk.AutoCalibrator(("temperature",), folds=2).fit(pixels, labels.reshape(6, 5, 8))
    assert torch.allclose(auto.as_module()(pixels), auto.predict_log_proba(pixels))


def test_auto_checks_its_parameters_and_saves_only_ours(tmp_path):
    logits, labels = sample(100, 0)
    with pytest.raises(ValueError, match="folds must be at least 2"):
        fk.AutoCalibrator(folds=1).fit(logits, labels)
    with pytest.raises(ValueError, match="criterion must be one of nll, brier"):
        fk.AutoCalibrator(criterion="ece").fit(logits, labels)
    with pytest.raises(ValueError, match="got 'platt'"):
        fk.AutoCalibrator(("platt",)).fit(logits, labels)
    auto = fk.AutoCalibrator({"half": Half()}, folds=2).fit(logits, labels)
    assert auto.chosen_ == "half"
    assert torch.allclose(auto.predict_proba(logits), (logits / 2).softmax(-1))
    with pytest.raises(TypeError, match="save needs a calibrator of this library, but half was chosen"):
        auto.save(tmp_path / "no.json")
    assert fk.AutoCalibrator(seed=3).get_params()["seed"] == 3


# -- candidates of other libraries -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_candidates_of_netcal_probmetrics_and_scikit_learn():
    """They take probabilities, so the comparison gets probabilities; none of them needs an adapter."""
    scaling = peer("netcal.scaling")
    calibrators = peer("probmetrics.calibrators")
    linear_model = peer("sklearn.linear_model")
    (logits, labels), (test_logits, test_labels) = sample(200, 0), sample(200, 1)
    study = fk.compare_calibrators(
        (logits.softmax(-1), labels),
        (test_logits.softmax(-1), test_labels),
        input_kind="probs",
        candidates={
            "temperature": TemperatureScaling(input_kind="probs"),
            "netcal": scaling.TemperatureScaling(),
            "probmetrics": calibrators.SVSCalibrator(),
            "regression": linear_model.LogisticRegression(),
        },
        **FAST,
    )
    assert [row.method for row in study.results[:5]] == ["none", "temperature", "netcal", "probmetrics", "regression"]
    assert all(entry.excluded in ("", "is worse than no calibration") for entry in study.cross_validation.entries)
    ours, theirs = study.results[1].test, study.results[2].test
    assert theirs["nll"] == pytest.approx(ours["nll"], rel=1e-2)
    assert study.chosen.method in ("temperature", "netcal")  # the same map, to the last digits


def test_a_candidate_without_scores_has_a_reason():
    """With two classes the matrix has no parameters beside those of the vector, so its row of the table is empty."""
    logits, labels = sample(300, 0)
    words = "spline-matrix: no scores, because it adds nothing to spline vector scaling with 2 classes."
    two = fk.compare_calibrators((logits[:, :2], labels % 2), resamples=0)
    assert two.results[4].method == "spline-matrix" and two.results[4].test is None
    assert words in two.remarks
    assert not any("no scores" in one for one in fk.compare_calibrators((logits, labels), resamples=0).remarks)
