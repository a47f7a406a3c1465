"""Histogram binning: bins compared with a loop, samples on edges, and changed predictions."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import assert_close, peer

from focalkern import metrics
from focalkern.calibrators import (
    FocalTemperatureScaling,
    HistogramBinning,
    TemperatureScaling,
    load_calibrator,
)

# The data are small or odd, so many fits warn; test_calibrators_warnings.py tests the warnings.
pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")


def sample(n=400, n_classes=5, scale=2.0, seed=0, dtype=torch.float64):
    """Logits that are ``scale`` times too large for their labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return (logits * scale).to(dtype), target


def by_loop(probs, target, n_bins, binning):
    """Edges and values by the definition, bin by bin."""
    confidence, top = probs.max(1), probs.argmax(1)
    if binning == "equal_width":
        edges = [k / n_bins for k in range(n_bins + 1)]
    else:
        ordered = [*np.sort(confidence), 1.0]
        last = [-(-k * len(confidence) // n_bins) - 1 for k in range(1, n_bins)]
        edges = [0.0] + [(ordered[i] + ordered[i + 1]) / 2 for i in last] + [1.0]
    values = []
    for k in range(n_bins):
        inside = [i for i, c in enumerate(confidence) if edges[k] < c <= edges[k + 1] or (k == 0 and c == 0)]
        values.append(np.mean([top[i] == target[i] for i in inside]) if inside else (edges[k] + edges[k + 1]) / 2)
    return edges, values


# Votes of n trees, whose confidences lie on the edges k / M of many numbers of bins.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [5, 10, 15, 20, 49, 100])
def test_a_confidence_on_an_edge_is_in_the_lower_bin(n, dtype):
    votes = torch.arange(n // 2 + 1, n + 1)
    probs = torch.stack([votes, n - votes], 1).to(torch.float64).div(n).to(dtype)
    for n_bins in (2, 5, 7, 10, 15, 20, 50):
        calibrator = HistogramBinning(n_bins=n_bins, binning="equal_width", input_kind="probs")
        calibrator.fit(probs, torch.zeros(len(votes), dtype=torch.int64))
        index = [math.ceil(Fraction(k * n_bins, n)) - 1 for k in votes.tolist()]
        assert calibrator.counts_.tolist() == np.bincount(index, minlength=n_bins).tolist()
        calibrator = copy.deepcopy(calibrator)
        calibrator.values_ = np.arange(1, n_bins + 1) / (n_bins + 1)
        for module in (calibrator.as_module(), calibrator.as_module(fused=False)):
            # The last row has one possible class, which keeps probability 1.
            assert_close(module(probs)[:-1, 0].exp(), torch.tensor(calibrator.values_[index[:-1]]).to(dtype))


# One bin, a few, the default, and more bins than the data fill.
@pytest.mark.parametrize("n_bins", [1, 4, 15, 60])
@pytest.mark.parametrize("binning", ["equal_width", "equal_mass"])
def test_bins_and_rows_are_those_of_a_loop(binning, n_bins):
    logits, target = sample(200)
    calibrator = HistogramBinning(n_bins=n_bins, binning=binning).fit(logits, target)
    probs = logits.softmax(-1).numpy()
    edges, values = by_loop(probs, target.numpy(), n_bins, binning)
    assert calibrator.edges_ == pytest.approx(edges, abs=1e-12)
    assert calibrator.values_ == pytest.approx(values, abs=1e-12)
    assert calibrator.counts_.sum() == 200

    new, _ = sample(300, seed=1)
    p = new.softmax(-1).numpy()
    expected = np.empty_like(p)
    for i, row in enumerate(p):
        top = row.argmax()
        k = next(k for k in range(n_bins) if row[top] <= calibrator.edges_[k + 1])
        rest = row.sum() - row[top]
        expected[i] = row * (1 - calibrator.values_[k]) / rest
        expected[i, top] = calibrator.values_[k]
    found = calibrator.predict_proba(new)
    assert found.numpy() == pytest.approx(expected, abs=1e-10)
    assert_close(found.sum(-1), torch.ones(300, dtype=torch.float64))
    assert_close(calibrator.predict_log_proba(new).exp(), found)


@pytest.mark.parametrize("binning", ["equal_width", "equal_mass"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_on_its_own_data_the_calibration_error_is_gone(binning, dtype):
    logits, target = sample(500, scale=3.0, dtype=dtype)
    calibrator = HistogramBinning(n_bins=10, binning=binning).fit(logits, target)
    # All rows of a bin have the same confidence, which is their accuracy.
    confidence = calibrator.predict_log_proba(logits.double() if dtype == torch.float64 else logits.float())
    confidence = confidence.gather(1, logits.argmax(-1, keepdim=True)).squeeze(1).exp()
    correct = logits.argmax(-1) == target
    for value in confidence.unique():
        rows = confidence == value
        assert float(correct[rows].double().mean()) == pytest.approx(float(value), abs=1e-6)
    assert calibrator.predict_proba(logits).dtype == dtype


def test_an_empty_bin_keeps_its_centre():
    probs = torch.tensor([[0.9, 0.1], [0.95, 0.05]])
    calibrator = HistogramBinning(n_bins=4, binning="equal_width", input_kind="probs").fit(probs, torch.tensor([0, 1]))
    assert calibrator.counts_.tolist() == [0, 0, 0, 2]
    assert calibrator.values_.tolist() == [0.125, 0.375, 0.625, 0.5]
    assert calibrator.predict_proba(np.array([[0.7, 0.3]])).tolist() == [pytest.approx([0.625, 0.375])]


def test_a_confidence_on_an_edge_belongs_to_the_bin_below():
    probs = np.array([[0.5, 0.5], [0.75, 0.25], [0.75 + 1e-9, 0.25 - 1e-9], [1.0, 0.0]])
    calibrator = HistogramBinning(n_bins=4, binning="equal_width", input_kind="probs").fit(
        probs, np.array([0, 0, 1, 0])
    )
    assert calibrator.counts_.tolist() == [0, 1, 1, 2]
    assert calibrator.values_.tolist() == [0.125, 1.0, 1.0, 0.5]


def test_equal_confidences_stay_together():
    probs = np.array([[0.6, 0.4]] * 6 + [[0.8, 0.2]] * 2)
    target = np.array([0, 0, 0, 1, 1, 1, 0, 0])
    calibrator = HistogramBinning(n_bins=4, binning="equal_mass", input_kind="probs").fit(probs, target)
    # All three cuts fall between 0.6 and 0.8: the bins between them have width 0 and no rows.
    assert calibrator.edges_.tolist() == pytest.approx([0, 0.7, 0.7, 0.7, 1])
    assert calibrator.counts_.tolist() == [6, 0, 0, 2]
    assert calibrator.values_[[0, 3]].tolist() == [0.5, 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_cut_is_a_confidence_of_many_rows(dtype):
    """Shares of ten votes, which the map rounds: another dtype and another implementation must find the same bins."""
    votes = torch.randint(4, (600, 2), generator=torch.Generator().manual_seed(0))
    probs = torch.cat([votes, 10 - votes.sum(1, keepdim=True)], dim=1).to(dtype) / 10
    target = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(1)).squeeze(1)
    calibrator = HistogramBinning(input_kind="probs").fit(probs, target)
    expected = calibrator.predict_proba(probs).double()
    for found in (
        calibrator.predict_proba(probs.float()),
        calibrator.predict_proba(probs.double()),
        calibrator.as_module()(probs).exp(),
        calibrator.as_module(fused=False)(probs).exp(),
    ):
        assert found.double().numpy() == pytest.approx(expected.numpy(), abs=1e-6)


def test_confidences_outside_those_of_fit():
    probs = np.array([[0.6, 0.4], [0.7, 0.3]])
    calibrator = HistogramBinning(n_bins=2, binning="equal_mass", input_kind="probs").fit(probs, np.array([0, 0]))
    outside = calibrator.predict_proba(np.array([[0.5, 0.5], [0.999, 0.001], [1.0, 0.0]]))
    assert outside[:, 0].tolist() == [1.0, 1.0, 1.0]


# The unit in the last place of a float32 near -2000 is 1.2e-4.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2000 * 2.0**-24)])
def test_saturated_rows_share_the_rest_by_their_logits(dtype, tolerance):
    """Probabilities of exp(-2000) underflow, but the logits still have their ratio."""
    logits = torch.tensor([[2000.0, 1.0, 0.0]] * 4, dtype=dtype)
    calibrator = HistogramBinning(n_bins=3).fit(logits, torch.tensor([0, 0, 0, 1]))
    found = calibrator.predict_proba(logits[0])
    e = math.e
    assert found.tolist() == pytest.approx([0.75, 0.25 * e / (1 + e), 0.25 / (1 + e)], rel=tolerance)


def test_where_all_others_can_occur_and_are_too_small_they_share_equally():
    logits = torch.tensor([[0.0, -3e38, -3e38], [0.0, -3e38, -math.inf], [0.0, -math.inf, -math.inf]])
    scaling = TemperatureScaling(temperatures=[1e-3], criterion="brier")
    calibrator = HistogramBinning(n_bins=5, scaling=scaling)
    calibrator.fit(logits[:1].repeat(4, 1), torch.tensor([0, 0, 0, 2]))
    assert calibrator.predict_proba(logits).tolist() == [[0.75, 0.125, 0.125], [0.75, 0.25, 0.0], [1.0, 0.0, 0.0]]


def test_an_exact_zero_beside_others_stays_zero():
    probs = np.array([[0.5, 0.5, 0.0]] * 4)
    found = HistogramBinning(n_bins=2, input_kind="probs").fit(probs, np.array([0, 0, 0, 1])).predict_proba(probs)
    assert found[0].tolist() == pytest.approx([0.75, 0.25, 0.0])
    assert found[0, 2] == 0


def test_bins_that_are_always_or_never_right():
    probs = np.array([[0.55, 0.45], [0.9, 0.1]])
    calibrator = HistogramBinning(n_bins=2, binning="equal_mass", input_kind="probs").fit(probs, np.array([1, 0]))
    found = calibrator.predict_log_proba(probs)
    assert found.tolist() == [[-math.inf, 0.0], [0.0, -math.inf]]
    assert calibrator.predict(probs).tolist() == [1, 0]
    assert calibrator.n_changed_ == 1
    assert calibrator.changed(probs).tolist() == [True, False]


def test_changes_of_the_predicted_class_are_counted():
    logits, target = sample(300, 3, scale=3.0, seed=5)
    wrong = torch.where(torch.arange(300) % 4 == 0, target, (logits.argmax(-1) + 1) % 3)
    calibrator = HistogramBinning(n_bins=6).fit(logits, wrong)
    assert calibrator.n_changed_ > 0
    probs = calibrator.predict_proba(logits)
    assert calibrator.n_changed_ == int((probs.argmax(-1) != logits.argmax(-1)).sum())
    assert torch.equal(calibrator.predict(logits), probs.argmax(-1))
    assert torch.equal(calibrator.changed(logits), calibrator.predict(logits) != logits.argmax(-1))
    assert isinstance(calibrator.changed(logits.numpy()), np.ndarray)


def test_a_tie_changes_nothing():
    probs = np.array([[0.3, 0.7], [0.3, 0.7]])
    calibrator = HistogramBinning(n_bins=1, input_kind="probs").fit(probs, np.array([0, 1]))
    assert calibrator.predict_proba(probs)[0].tolist() == pytest.approx([0.5, 0.5])
    assert calibrator.predict(probs).tolist() == [1, 1]
    assert calibrator.n_changed_ == 0


def test_one_row_and_more_bins_than_rows():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for binning in ("equal_width", "equal_mass"):
        calibrator = HistogramBinning(n_bins=15, binning=binning).fit(logits, torch.tensor([0]))
        assert calibrator.counts_.sum() == 1
        assert calibrator.predict_proba(logits).tolist() == [[1.0, 0.0, 0.0]]
        assert np.isfinite(calibrator.values_).all()


# -- after a scaling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [TemperatureScaling(), FocalTemperatureScaling(criterion="nll")])
def test_after_a_scaling_the_bins_are_those_of_its_probabilities(scaling):
    logits, target = sample(400, scale=4.0)
    both = HistogramBinning(n_bins=7, scaling=scaling).fit(logits, target)
    assert not hasattr(scaling, "temperature_")
    alone = type(scaling)(**scaling.get_params()).fit(logits, target)
    assert both.scaling_.temperature_ == alone.temperature_
    after = HistogramBinning(n_bins=7, input_kind="probs").fit(alone.predict_proba(logits), target)
    assert both.values_ == pytest.approx(after.values_, abs=1e-12)
    new, _ = sample(100, seed=8)
    assert_close(both.predict_proba(new), after.predict_proba(alone.predict_proba(new)))


def test_the_parameters_of_the_scaling_are_reached_through_the_bins():
    sklearn_base = pytest.importorskip("sklearn.base", reason="scikit-learn is not installed")
    calibrator = HistogramBinning(n_bins=9, scaling=TemperatureScaling(criterion="ece", n_bins=11))
    assert calibrator.get_params()["scaling__n_bins"] == 11
    assert set(calibrator.get_params(deep=False)) == {"n_bins", "binning", "scaling", "input_kind"}
    copy = sklearn_base.clone(calibrator)
    assert copy.scaling is not calibrator.scaling
    copy.set_params(scaling__n_bins=7, n_bins=3)
    assert (copy.n_bins, copy.scaling.n_bins, calibrator.scaling.n_bins) == (3, 7, 11)
    copy.set_params(scaling__n_bins=5, scaling=TemperatureScaling())
    assert copy.scaling.n_bins == 5
    for name in ("scaling__bins", "bins", "n_bins__x"):
        with pytest.raises(ValueError, match=f"parameters are .*, got '{name.removeprefix('scaling__')}'"):
            copy.set_params(**{name: 1})


# -- module, file, errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [None, TemperatureScaling()])
@pytest.mark.parametrize("fused", [True, False])
def test_the_module_is_the_calibrator(scaling, fused):
    logits, target = sample(300, dtype=torch.float32)
    calibrator = HistogramBinning(n_bins=6, scaling=scaling).fit(logits, target)
    module = calibrator.as_module(fused=fused)
    assert_close(module(logits), calibrator.predict_log_proba(logits))
    assert module(logits.half()).dtype == torch.float16
    # Half precision of a network must not round edges and values.
    assert module.half().edges.tolist() == calibrator.edges_[1:-1].tolist()
    other = HistogramBinning(n_bins=6, scaling=scaling).fit(logits.flip(0) * 2, target).as_module()
    other.load_state_dict(module.state_dict())
    assert_close(other(logits), calibrator.predict_log_proba(logits))
    program = torch.export.export(module.eval(), (logits,), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert_close(program.module()(logits[:7]), module(logits[:7]))


def test_the_sum_of_half_precision_probabilities_may_be_rounded():
    logits, target = sample(300, 50)
    probs = logits.softmax(-1).bfloat16()
    assert float((probs.float().sum(-1) - 1).abs().max()) > 1e-3
    calibrator = HistogramBinning(n_bins=3, input_kind="probs").fit(probs, target)
    exact = probs.double() / probs.double().sum(-1, keepdim=True)
    for found in (calibrator.predict_proba(probs), calibrator.as_module()(probs).exp()):
        assert found.dtype == torch.bfloat16
        assert_close(found.double().sum(-1), torch.ones(300), dtype=torch.bfloat16)
    assert_close(calibrator.predict_proba(probs), calibrator.predict_proba(exact), dtype=torch.bfloat16)


def test_the_module_moves(device):
    logits, target = sample(100)
    calibrator = HistogramBinning(n_bins=6).fit(logits, target)
    module = calibrator.as_module().to(device)
    assert_close(module(logits.to(device)), calibrator.predict_log_proba(logits))
    assert calibrator.predict_proba(logits.to(device)).device.type == device.type
    on_device = HistogramBinning(n_bins=6).fit(logits.to(device), target.to(device))
    assert on_device.values_ == pytest.approx(calibrator.values_)


@pytest.mark.parametrize("scaling", [None, FocalTemperatureScaling(gammas=[0.0, 1.0], temperatures=[0.5, 1.0, 2.0])])
def test_what_was_saved_comes_back(scaling, tmp_path):
    logits, target = sample(200)
    path = tmp_path / "calibrator.json"
    calibrator = HistogramBinning(n_bins=np.int64(6), binning="equal_width", scaling=scaling).fit(logits, target)
    calibrator.save(path)
    for loaded in (HistogramBinning.load(path), load_calibrator(path)):
        assert torch.equal(loaded.predict_proba(logits), calibrator.predict_proba(logits))
        assert repr(loaded.get_params()) == repr(calibrator.get_params()).replace("np.int64(6)", "6")
        assert (loaded.n_changed_, loaded.counts_.tolist()) == (calibrator.n_changed_, calibrator.counts_.tolist())
        loaded.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="expected a calibrator of method 'temperature', found 'histogram'"):
        TemperatureScaling.load(path)


# -- peer ------------------------------------------------------------------------------------------------------------


def test_the_bins_are_those_of_netcal_on_confidences():
    """netcal bins the confidence of a binary problem, here whether the top class is correct. Its bins are (lo, hi] in
    transform and [lo, hi) in fit, so no confidence may lie on an edge. (Its equal-mass bins cannot be applied to new
    rows.)"""
    binning = peer("netcal.binning")
    logits, target = sample(500, scale=3.0)
    ours = HistogramBinning(n_bins=10, binning="equal_width").fit(logits, target)
    confidence, top = logits.softmax(-1).max(-1)
    theirs = binning.HistogramBinning(10).fit(confidence.numpy(), (top == target).numpy().astype(int))
    new, _ = sample(300, seed=2)
    found = ours.predict_proba(new).gather(1, new.argmax(-1, keepdim=True)).squeeze(1)
    assert found.numpy() == pytest.approx(theirs.transform(new.softmax(-1).amax(-1).numpy()), abs=1e-6)


def test_binning_improves_an_overconfident_classifier():
    logits, target = sample(4000, scale=3.0)
    fitted = HistogramBinning().fit(logits[:2000], target[:2000])
    before, after = (
        float(metrics.expected_calibration_error(p, target[2000:], correct=None))
        for p in (logits[2000:].softmax(-1), fitted.predict_proba(logits[2000:]))
    )
    assert after < before / 3
