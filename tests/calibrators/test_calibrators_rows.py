"""Arguments of fit: weights as repeated rows, labels of every kind, ignored rows, and predictions of pixels."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from conftest import assert_close, peer

import focalkern as fk
from focalkern.calibrators import (
    FocalTemperatureScaling,
    HistogramBinning,
    IsotonicCalibration,
    MultiLabelScaling,
    SplineScaling,
    StructuredScaling,
    TemperatureScaling,
    load_calibrator,
)
from focalkern.calibrators._smooth_losses import coarse_table
from focalkern.calibrators._weighted import weighted_ece, weighted_grid

pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")

FEW = [0.5, 1.0, 1.5, 2.0, 3.0]
CALIBRATORS = [
    TemperatureScaling(),
    TemperatureScaling(criterion="brier"),
    FocalTemperatureScaling(),
    FocalTemperatureScaling(criterion="brier"),
    *(
        FocalTemperatureScaling(search=search, criterion=criterion, temperatures=FEW, estimator="equal_width")
        for search, criterion in itertools.product(("grid", "line", "refine"), ("nll", "brier", "ece"))
    ),
    HistogramBinning(n_bins=4, binning="equal_width", scaling=TemperatureScaling()),
    HistogramBinning(n_bins=3),
    HistogramBinning(n_bins=11),  # divides neither the rows nor the sum of their weights
    StructuredScaling(kind="vector", solver="lbfgs"),  # the other one takes no weights
    StructuredScaling(kind="matrix", focal=True, solver="lbfgs"),
    IsotonicCalibration(),
    *(SplineScaling(kind=kind) for kind in ("scalar", "vector", "matrix")),
]


def sample(n=150, n_classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return logits * 2, target


def copy(calibrator):
    peer("sklearn") if isinstance(calibrator, IsotonicCalibration) else None
    return type(calibrator)(**calibrator.get_params(deep=False))


@pytest.mark.parametrize("calibrator", CALIBRATORS, ids=repr)
def test_weights_are_repeated_rows(calibrator):
    logits, target = sample()
    times = torch.arange(150) % 4
    repeated = copy(calibrator).fit(logits.repeat_interleave(times, 0), target.repeat_interleave(times))
    weighted = copy(calibrator).fit(logits, target, times.numpy())
    found, expected = weighted.predict_proba(logits), repeated.predict_proba(logits)
    assert found.numpy() == pytest.approx(expected.numpy(), abs=2e-5)
    # A weight of 0 equals a missing row, and weights of 1 equal no weights.
    assert weighted.n_samples_ == int((times > 0).sum())
    ones = copy(calibrator).fit(logits, target, np.ones(150))
    assert torch.equal(ones.predict_proba(logits), copy(calibrator).fit(logits, target).predict_proba(logits))


@pytest.mark.parametrize("cls", [TemperatureScaling, FocalTemperatureScaling])
def test_a_search_starts_from_weighted_rows(cls):
    """Two of 100 rows are wrong and weigh 40: without their weights the Brier score falls all the way to T = 0."""
    logits, _ = sample(100)
    wrong = torch.arange(100) < 2
    target, times = (logits.argmax(-1) + wrong) % 3, torch.where(wrong, 40, 1)
    weighted = cls(criterion="brier").fit(logits, target, times)
    repeated = cls(criterion="brier").fit(logits.repeat_interleave(times, 0), target.repeat_interleave(times))
    assert weighted.best_value_ == pytest.approx(repeated.best_value_, abs=1e-9)
    assert weighted.temperature_ == pytest.approx(repeated.temperature_, rel=1e-4)
    assert weighted.at_border_ == ()


@pytest.mark.parametrize("criterion", ["nll", "brier"])
@pytest.mark.parametrize("n_classes", [3, 100])  # 2730 and 512 rows: fewer than the copies, and more
def test_the_table_of_starts_counts_a_row_as_often_as_its_weight_says(criterion, n_classes):
    logits, target = sample(400, n_classes)
    axes = (-0.5, 0.0, 2.0), (0.5, 1.0, 2.0)
    times = torch.arange(1, 401, dtype=torch.float64) % 7 + 1
    repeated = logits.repeat_interleave(times.long(), 0), target.repeat_interleave(times.long())
    expected = coarse_table(*repeated, "logits", criterion, *axes)
    for weight in (times, times * 1e-3):
        assert np.array_equal(coarse_table(logits, target, "logits", criterion, *axes, weight), expected)
    # Weights that are no multiples of the smallest.
    odd = (times / 2).exp()
    options = {"criteria": (criterion,), "n_bins": 1, "estimator": "equal_width", "input_kind": "logits"}
    exact = weighted_grid("", logits, target, odd, *axes, **options).tables[criterion].numpy()
    found = coarse_table(logits, target, "logits", criterion, *axes, odd)
    assert found == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("estimator", ["equal_width", "equal_mass"])
def test_the_weighted_ece_is_that_of_repeated_rows(estimator):
    rng = np.random.default_rng(0)
    confidence, correct = rng.random(60), rng.random(60) < 0.6
    times = rng.integers(1, 5, 60)
    times[0] += -times.sum() % 6  # with equal bin sizes
    share = torch.from_numpy(times / times.sum())
    found = weighted_ece(torch.from_numpy(confidence), torch.from_numpy(correct.astype(float)), share, 6, estimator)
    expected = fk.metrics.expected_calibration_error(
        confidence=np.repeat(confidence, times), correct=np.repeat(correct, times), n_bins=6, estimator=estimator
    )
    assert found == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [
        (torch.ones(149), ValueError, "sample_weight must be [150], got [149]"),
        (-torch.ones(150), ValueError, "sample_weight must be at least 0 and finite, got -1.0"),
        (torch.full((150,), torch.nan), ValueError, "at least 0 and finite, got nan"),
        (torch.zeros(150), ValueError, "fit needs at least one row that counts, got 150 rows of weight 0"),
        (torch.full((150,), 1e307, dtype=torch.float64), ValueError, "a sum between 1e-100 and 1e+100, got inf"),
        (torch.full((150,), 1e-161, dtype=torch.float64), ValueError, "got 1.5e-159; a weight says how often its row"),
        (["a"] * 150, TypeError, "sample_weight must be a tensor or an array of numbers, got list"),
    ],
)
def test_bad_weights_are_named(weight, error, words):
    with pytest.raises(error) as caught:
        TemperatureScaling().fit(*sample(), weight)
    assert "TemperatureScaling: " in str(caught.value) and words in str(caught.value)
    scaling = FocalTemperatureScaling(criterion="ece", estimator="equal_mass_interp", temperatures=FEW)
    with pytest.raises(ValueError, match="'equal_mass' or 'equal_width' with sample_weight"):
        scaling.fit(*sample(), torch.arange(150))


@pytest.mark.parametrize("calibrator", CALIBRATORS, ids=repr)
@pytest.mark.parametrize("size", [1e307, 1e-161, 5e-324])
def test_weights_beyond_all_counts_are_refused(calibrator, size):
    logits, target = sample()
    weight = torch.full((150,), size, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"{type(calibrator).__name__}: sample_weight must have a sum between"):
        copy(calibrator).fit(logits, target, weight)
    fitted = copy(calibrator).fit(logits, target)
    with pytest.raises(ValueError, match=f"{type(calibrator).__name__}: sample_weight must have a sum between"):
        fitted.score(logits, target, weight)
    with pytest.raises(ValueError, match="sample_weight must have a sum between"):
        MultiLabelScaling().fit(logits, torch.nn.functional.one_hot(target, 3), weight)


@pytest.mark.parametrize("scale", [1e-90, 1e-3, 1e90])
def test_the_optimum_does_not_know_the_scale_of_the_weights(scale):
    logits, target = sample()
    times = torch.arange(150, dtype=torch.float64) % 4
    for calibrator in (TemperatureScaling(), FocalTemperatureScaling(), FocalTemperatureScaling(criterion="brier")):
        one, other = (copy(calibrator).fit(logits, target, weight) for weight in (times, times * scale))
        assert other.temperature_ == pytest.approx(one.temperature_, rel=1e-6)
        assert other.gamma_ == pytest.approx(one.gamma_, rel=1e-5)


@pytest.mark.parametrize(
    "calibrator",
    [StructuredScaling(solver="lbfgs"), IsotonicCalibration(), fk.RobustTemperatureScaling(), fk.AutoCalibrator()],
    ids=repr,
)
def test_weights_that_count_as_few_rows_cause_a_warning(calibrator):
    logits, target = sample()
    fitted = copy(calibrator).fit(logits, target, torch.full((150,), 1 / 150))
    assert any("sum to 1, so the 150 rows count as only 1 (divide" in words for words in fitted.warnings_)
    assert not any("weights" in words for words in copy(calibrator).fit(logits, target, torch.arange(150)).warnings_)


def test_a_score_is_weighted():
    logits, target = sample()
    calibrator = TemperatureScaling().fit(logits, target)
    right = (logits.argmax(-1) == target).numpy()
    weight = np.arange(150.0)
    assert calibrator.score(logits, target, weight) == pytest.approx((right * weight).sum() / weight.sum())


def test_a_score_of_other_labels_than_those_of_the_fit_is_an_error():
    logits, target = sample()
    names = np.array(["ant", "bee", "cat"])[target]
    of_names, of_numbers = TemperatureScaling().fit(logits, names), TemperatureScaling().fit(logits, target)
    expected = of_numbers.score(logits, target)
    assert of_numbers.score(logits, target.double()) == of_numbers.score(logits, target.tolist()) == expected > 0
    assert of_names.score(logits, names) == of_names.score(logits, names.astype(object)) == expected
    for labels in (target, target.numpy().astype(object)):
        with pytest.raises(ValueError, match=r"^TemperatureScaling: target must be strings, as the labels of fit, got"):
            of_names.score(logits, labels)
    assert of_names.score(logits, of_names.classes_[target]) == expected  # the remedy of the error
    with pytest.raises(ValueError, match=r"^TemperatureScaling: target must be numbers, as the labels of fit"):
        of_numbers.score(logits, names)


@pytest.mark.parametrize("kind", [bool, np.uint8, np.int16, np.float32, np.float64, object, "bool tensor", "list"])
def test_labels_of_every_kind(kind):
    logits, target = sample(n_classes=2)
    expected = TemperatureScaling().fit(logits, target)
    if kind == "bool tensor":
        labels = target.bool()
    elif kind == "list":
        labels = target.tolist()
    else:
        labels = target.numpy().astype(kind)
    found = TemperatureScaling().fit(logits, labels)
    assert (found.temperature_, found.classes_.tolist()) == (expected.temperature_, [0, 1])


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        (np.array([0.5] * 150), ValueError, "target must be whole numbers where it is torch.float64, got 0.5"),
        (np.array([np.nan] * 150), ValueError, "got nan"),
        (np.array([None] * 150), TypeError, "integer class indices or strings, got NoneType"),
        (np.array(["a", 1.5] * 75, dtype=object), TypeError, "got float and str"),
        (np.array([3.0] * 150), IndexError, "target must be in [0, 3), got 3 at row 0"),
    ],
)
def test_bad_labels_are_named(target, error, words):
    with pytest.raises(error) as caught:
        TemperatureScaling().fit(sample()[0], target)
    assert "TemperatureScaling: " in str(caught.value) and words in str(caught.value)


def test_a_label_of_ignored_rows_is_no_mistake_of_the_score():
    logits, target = sample()
    out = torch.arange(150) % 5 == 0
    calibrator = TemperatureScaling().fit(logits, torch.where(out, 255, target), ignore_index=255)
    expected = calibrator.score(logits[~out], target[~out])
    for value in (255, -100):
        labels = torch.where(out, value, target)
        words = rf"target must be in \[0, 3\), got {value} at row 0; .* pass sample_weight=target != {value}$"
        for given in (labels, labels.double(), labels.numpy()):
            with pytest.raises(IndexError, match=words):
                calibrator.score(logits, given)
        assert calibrator.score(logits, labels, sample_weight=labels != value) == pytest.approx(expected)
        with pytest.raises(IndexError, match=f"got {value} at row 0; .* pass ignore_index={value}$"):
            TemperatureScaling().fit(logits, labels)
    heads = fk.MultiLabelScaling().fit(logits, torch.eye(3)[target])
    with pytest.raises(ValueError, match=r"^MultiLabelScaling: target must be 0 or 1, got -1 at row 0, label 0$"):
        heads.score(logits, torch.where(out[:, None], -1, torch.eye(3, dtype=torch.int64)[target]))


@pytest.mark.parametrize("logits", [np.array([["a", "b"]], dtype=object), [[0.1, None]], [[0.1], [0.2, 0.3]], None])
def test_logits_that_are_no_numbers_are_named(logits):
    with pytest.raises(TypeError, match="TemperatureScaling: logits must be"):
        TemperatureScaling().fit(logits, [0])
    with pytest.raises(TypeError, match="TemperatureScaling: logits must be"):
        TemperatureScaling().fit(*sample()).predict_proba(logits)


def test_rows_are_left_out():
    logits, target = sample()
    out = torch.arange(150) % 5 == 0
    expected = TemperatureScaling().fit(logits[~out], target[~out])
    for label in (-100, 255, 1_000_000):
        marked = target.masked_fill(out, label)
        found = TemperatureScaling().fit(logits, marked, ignore_index=label)
        assert (found.temperature_, found.n_samples_) == (expected.temperature_, 120)
        with pytest.raises(IndexError, match=rf"in \[0, 3\), got {label} at row 0"):
            TemperatureScaling().fit(logits, marked)
    with pytest.raises(ValueError, match=r"at least one row that counts, got 150 rows whose label is ignore_index$"):
        TemperatureScaling().fit(logits, target * 0 - 1, ignore_index=-1)
    with pytest.raises(ValueError, match=r"got 150 rows of weight 0 or whose label is ignore_index$"):
        TemperatureScaling().fit(logits, -out.long(), out.double(), ignore_index=-1)
    with pytest.raises(TypeError, match="ignore_index must be an int or None, got 'void'"):
        TemperatureScaling().fit(logits, target, ignore_index="void")


@pytest.mark.parametrize(
    "calibrator",
    [TemperatureScaling(), FocalTemperatureScaling(), HistogramBinning(n_bins=3), StructuredScaling(), SplineScaling()],
    ids=repr,
)
def test_segmentation_maps(calibrator, tmp_path):
    logits, target = sample(2 * 4 * 5)
    dense = logits.reshape(2, 4, 5, 3).movedim(-1, 1)  # [N, C, H, W]
    maps = target.reshape(2, 4, 5).clone()
    maps[0, 0] = 255
    flat = copy(calibrator).fit(logits[5:], target[5:])
    found = copy(calibrator).fit(dense, maps, ignore_index=255)
    assert found.n_samples_ == 35
    expected = flat.predict_proba(logits).reshape(2, 4, 5, 3).movedim(-1, 1)
    assert_close(found.predict_proba(dense), expected)
    assert np.array_equal(found.predict_proba(dense.numpy()), found.predict_proba(dense).numpy())
    assert_close(found.predict_log_proba(dense).exp(), expected)
    assert torch.equal(found.predict(dense), flat.predict(logits).reshape(2, 4, 5))
    assert found.score(dense, target.reshape(2, 4, 5)) == flat.score(logits, target)
    assert_close(found.predict_proba(logits), flat.predict_proba(logits))  # [N, C] is returned unchanged
    module = found.as_module()
    assert_close(module(dense).exp(), expected)
    assert_close(torch.export.export(module, (dense,)).module()(dense), module(dense))
    found.save(tmp_path / "calibrator.json")
    assert json.loads((tmp_path / "calibrator.json").read_text())["fit"]["dense"] is True
    assert_close(load_calibrator(tmp_path / "calibrator.json").predict_proba(dense), expected)
    # A weight per image, or per pixel.
    by_image, by_place = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0]).reshape(2, 1, 1).expand(2, 4, 5)
    one, other = (copy(calibrator).fit(dense, maps, weight, ignore_index=255) for weight in (by_image, by_place))
    assert torch.equal(one.predict_proba(dense), other.predict_proba(dense))


def test_a_map_of_other_classes_is_refused():
    logits, target = sample(40)
    calibrator = TemperatureScaling().fit(logits.reshape(2, 20, 3).movedim(-1, 1), target.reshape(2, 20))
    with pytest.raises(ValueError, match="must have the 3 classes of fit"):
        calibrator.predict_proba(torch.zeros(2, 4, 5))
    with pytest.raises(ValueError, match=r"target must be \[N, d1\] = \[2, 20\], got \[2, 19\]"):
        calibrator.fit(torch.zeros(2, 3, 20), torch.zeros(2, 19, dtype=torch.int64))


def test_labels_of_a_row_are_left_out():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 2, generator=generator, dtype=torch.float64) * 3
    target = torch.bernoulli((logits / 2).sigmoid(), generator=generator)
    out = torch.zeros(300, 2, dtype=torch.bool)
    out[:50, 0] = out[250:, 1] = True
    found = MultiLabelScaling().fit(logits, target.masked_fill(out, -1), ignore_index=-1).predict_proba(logits)
    for label in range(2):
        rows = ~out[:, label]
        alone = StructuredScaling(kind="vector", solver="lbfgs").fit(logits[rows, label], target[rows, label])
        assert_close(found[:, label], alone.predict_proba(logits[:, label])[:, 1])
    times = torch.arange(300) % 3
    weighted = MultiLabelScaling().fit(logits, target, times)
    repeated = MultiLabelScaling().fit(logits.repeat_interleave(times, 0), target.repeat_interleave(times, 0))
    torch.testing.assert_close(weighted.predict_proba(logits), repeated.predict_proba(logits), rtol=1e-5, atol=0)


def test_labels_of_a_row_of_weight_zero_are_left_out():
    logits, target = torch.tensor([[1.0], [2.0], [-1.0], [0.5]]), torch.tensor([[1], [0], [0], [0]])
    expected = MultiLabelScaling().fit(logits[1:], target[1:])
    logits[0] = math.nan
    found = MultiLabelScaling().fit(logits, target, [0, 1, 1, 1])
    assert (found.temperatures_.tolist(), found.n_positive_.tolist(), found.n_samples_) == ([1.0], [0], 3)
    assert found.remarks_ == expected.remarks_ == ("label 0: not calibrated, because its 3 rows have no positive",)
    with pytest.raises(ValueError, match=r"^MultiLabelScaling: fit needs .* row that counts, got 4 rows of weight 0$"):
        MultiLabelScaling().fit(logits, target, [0, 0, 0, 0])
    with pytest.raises(ValueError, match=r"^MultiLabelScaling: logits must be .* not NaN, got nan at row 0"):
        MultiLabelScaling().fit(logits, target, [1, 1, 1, 1])


def test_a_row_of_weight_zero_is_not_taken_for_a_logit():
    probs, target = torch.rand(200, 1, generator=torch.Generator().manual_seed(0)), torch.arange(200).unsqueeze(1) % 2
    probs[0] = 5.0  # outside [0, 1]
    found = MultiLabelScaling().fit(probs, target, torch.arange(200).clamp(max=1))
    assert "all logits lie in [0, 1]" in found.warnings_[0]
