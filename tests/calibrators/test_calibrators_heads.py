"""Heads with one logit, heads with independent labels, and reports per class."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import assert_close

from focalkern import metrics, reference
from focalkern.calibrators import (
    CalibratedLogits,
    FocalTemperatureScaling,
    HistogramBinning,
    MultiLabelScaling,
    NotFittedError,
    RobustTemperatureScaling,
    SplineScaling,
    StructuredScaling,
    TemperatureScaling,
    load_calibrator,
    per_class_report,
)

# The data are small or odd, so many fits warn; test_calibrators_warnings.py tests the warnings.
pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")


def margins(n=400, scale=2.0, seed=0, dtype=torch.float64):
    """Logits of class 1, ``scale`` times too large for their labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, generator=generator, dtype=torch.float64) * 2
    target = torch.bernoulli(logits.sigmoid(), generator=generator).to(torch.int64)
    return (logits * scale).to(dtype), target


# -- one logit -------------------------------------------------------------------------------------------------------


def test_the_temperature_of_one_logit_is_that_of_the_binary_cross_entropy():
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    logits, target = margins()
    calibrator = TemperatureScaling().fit(logits, target)

    def loss(log_t):
        scaled = logits / math.exp(log_t)
        return float(torch.nn.functional.binary_cross_entropy_with_logits(scaled, target.double()))

    expected = optimize.minimize_scalar(loss, bounds=(-3, 3), options={"xatol": 1e-10})
    assert math.log(calibrator.temperature_) == pytest.approx(expected.x, abs=1e-6)
    assert calibrator.best_value_ == pytest.approx(expected.fun, rel=1e-12)
    assert (calibrator.one_logit_, calibrator.n_classes_, calibrator.classes_.tolist()) == (True, 2, [0, 1])


@pytest.mark.parametrize(
    "calibrator",
    [
        TemperatureScaling(),
        FocalTemperatureScaling(search="nll"),
        HistogramBinning(n_bins=5, scaling=TemperatureScaling()),
    ],
)
def test_shapes_of_one_logit(calibrator, tmp_path):
    logits, target = margins()
    calibrator = type(calibrator)(**calibrator.get_params(deep=False)).fit(logits.numpy(), target.numpy())
    probs = calibrator.predict_proba(logits)
    assert probs.shape == (400, 2)
    assert_close(probs.sum(-1), torch.ones(400, dtype=torch.float64))
    assert calibrator.predict_proba(logits.numpy()).shape == (400, 2)
    assert calibrator.predict_proba(logits.reshape(20, 20)).shape == (20, 20, 2)
    assert calibrator.predict_proba(logits[0]).shape == (2,)
    assert torch.equal(calibrator.predict(logits), probs.argmax(-1))
    module = calibrator.as_module()
    assert module(logits).shape == logits.shape
    assert_close(module(logits).sigmoid(), probs[:, 1])
    assert_close(calibrator.as_module(fused=False)(logits).sigmoid(), probs[:, 1])
    path = tmp_path / "calibrator.json"
    calibrator.save(path)
    loaded = load_calibrator(path)
    assert loaded.one_logit_
    assert torch.equal(loaded.predict_proba(logits), probs)
    with pytest.raises(TypeError, match=r"must be floating point, got torch\.int64"):
        calibrator.predict_proba(target)


@pytest.mark.parametrize("fused", [True, False])
def test_one_probability_of_exactly_zero_or_one(fused):
    logits, target = margins(100)
    probs = logits.sigmoid()
    probs[:2], target[:2] = torch.tensor([0.0, 1.0]), torch.tensor([0, 1])
    calibrator = TemperatureScaling(input_kind="probs").fit(probs, target)
    assert calibrator.predict_proba(probs)[:2].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    module = calibrator.as_module(fused=fused)
    assert isinstance(module, CalibratedLogits)
    assert module(probs)[:2].tolist() == [-math.inf, math.inf]
    assert_close(module(probs).sigmoid(), calibrator.predict_proba(probs)[:, 1])
    with pytest.raises(ValueError, match="1 of 100 rows"):
        TemperatureScaling(input_kind="probs").fit(probs, target.index_fill(0, torch.tensor(0), 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_half_precision_probabilities_are_rounded_once(dtype, floor):
    """1 - p of p = 0.1 in float16 would have an error of 2e-4, and then the odds too."""
    logits, target = margins()
    scaling = FocalTemperatureScaling(gammas=[1.0], temperatures=[1.3], input_kind="probs", floor=floor)
    labels = MultiLabelScaling(scaling=scaling, input_kind="probs")
    labels.fit_quietly(logits.sigmoid().unsqueeze(1), target.unsqueeze(1))
    one = scaling.fit_quietly(logits.sigmoid(), target)
    probs = torch.linspace(0.01, 0.99, 400).to(dtype)
    wide, column = probs.double(), probs.unsqueeze(1)
    for found, exact in (
        (one.predict_proba(probs), one.predict_proba(wide)),
        (one.as_module()(probs), one.as_module()(wide)),
        (one.as_module(fused=False)(probs), one.as_module()(wide)),
        (labels.predict_proba(column), labels.predict_proba(wide.unsqueeze(1))),
        (labels.as_module()(column), labels.as_module()(wide.unsqueeze(1))),
    ):
        assert found.dtype == dtype
        error = (found.double() - exact).abs()
        # Half a step, and the rounding of float32 before it: that of p / (1 - p) for logits near 0.
        assert bool((error <= 0.501 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all())
    array = one.predict_proba(probs.half().numpy())
    assert array.dtype == np.float16 and np.array_equal(array, one.predict_proba(probs.half()).numpy())


def test_a_column_of_logits_is_told_to_be_a_row():
    logits, target = margins(50)
    with pytest.raises(ValueError, match=r"at least 2 classes, got shape \[50, 1\]; one logit per row is \[N\]"):
        TemperatureScaling().fit(logits.unsqueeze(1), target)


# -- independent labels ----------------------------------------------------------------------------------------------


def heads(n=300, scales=(0.5, 1.0, 3.0, 6.0), dtype=torch.float64):
    columns = [margins(n, scale, seed) for seed, scale in enumerate(scales)]
    return torch.stack([z for z, _ in columns], 1).to(dtype), torch.stack([y for _, y in columns], 1)


SCALINGS = [
    None,
    TemperatureScaling(),
    FocalTemperatureScaling(search="nll"),
    RobustTemperatureScaling(),
    SplineScaling(kind="vector"),
    StructuredScaling(focal=True, solver="lbfgs"),
]
scalings = pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: type(scaling).__name__)


@scalings
def test_every_label_is_calibrated_on_its_own(scaling):
    logits, target = heads()
    calibrator = MultiLabelScaling(scaling=scaling).fit(logits, target)
    template = StructuredScaling(kind="vector", solver="lbfgs") if scaling is None else scaling
    for label in range(4):
        alone = type(template)(**template.get_params(deep=False))
        alone.fit(logits[:, label], target[:, label])
        assert_close(calibrator.predict_proba(logits)[:, label], alone.predict_proba(logits[:, label])[:, 1])
        if hasattr(calibrator, "gammas_"):
            assert (calibrator.gammas_[label], calibrator.temperatures_[label]) == (alone.gamma_, alone.temperature_)
    assert hasattr(calibrator, "gammas_") == isinstance(scaling, TemperatureScaling | FocalTemperatureScaling)
    assert calibrator.n_positive_.tolist() == target.sum(0).tolist()
    assert calibrator.remarks_ == ()
    probs = calibrator.predict_proba(logits)
    assert torch.equal(calibrator.predict(logits), (probs > 0.5).long())
    assert torch.equal(calibrator.changed(logits), (probs > 0.5) != (logits > 0))
    assert calibrator.score(logits, target) == pytest.approx(float(((probs > 0.5) == target).all(1).double().mean()))
    assert_close(calibrator.predict_log_proba(logits).exp(), probs)
    assert calibrator.predict_proba(logits.numpy()).shape == (300, 4)


def test_the_default_corrects_scores_that_are_too_low_on_average():
    generator = torch.Generator().manual_seed(0)
    margin = torch.randn(20_000, 2, generator=generator, dtype=torch.float64) * 2 - 4
    target = torch.bernoulli(margin.sigmoid(), generator=generator)
    shifted = margin - torch.tensor([2.0, -1.0])
    probs = MultiLabelScaling().fit(shifted, target).predict_proba(shifted)
    assert probs.mean(0) == pytest.approx(target.mean(0).numpy(), rel=0.01)
    assert float((probs.logit() - margin).abs().mean()) < 0.1
    without = MultiLabelScaling(scaling=TemperatureScaling()).fit(shifted, target).predict_proba(shifted)
    assert float(without.mean(0)[0] / target.mean(0)[0]) < 0.9


@pytest.mark.parametrize("convert", [torch.Tensor.bool, torch.Tensor.float, torch.Tensor.numpy])
def test_targets_of_other_types(convert):
    logits, target = heads()
    found, expected = MultiLabelScaling().fit(logits, convert(target)), MultiLabelScaling().fit(logits, target)
    assert torch.equal(found.predict_proba(logits), expected.predict_proba(logits))


@scalings
@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_labels_without_positives_or_negatives_stay_and_are_named(scaling, kind):
    logits, target = heads()
    target[:, 1], target[:, 3] = 0, 1
    input = logits if kind == "logits" else logits.sigmoid()
    if scaling is not None:
        scaling = type(scaling)(**{**scaling.get_params(deep=False), "input_kind": kind})
    calibrator = MultiLabelScaling(scaling=scaling, input_kind=kind).fit(input, target)
    assert calibrator.remarks_ == (
        "label 1: not calibrated, because its 300 rows have no positive",
        "label 3: not calibrated, because its 300 rows have no negative",
    )
    assert calibrator.scalings_[1] is None
    if hasattr(calibrator, "gammas_"):
        assert calibrator.temperatures_[[1, 3]].tolist() == [1.0, 1.0]
    assert_close(calibrator.predict_proba(input)[:, 1], logits[:, 1].sigmoid())
    assert_close(calibrator.as_module()(input).sigmoid(), calibrator.predict_proba(input))


def test_a_label_at_a_border_is_named():
    logits, target = heads()
    target[:, 2] = (logits[:, 2] > 0).long()
    (words,) = MultiLabelScaling(scaling=TemperatureScaling()).fit(logits, target).remarks_
    assert words.startswith("label 2: temperature = ")
    assert "is the lower bound of the search on 300 rows" in words


def test_one_label_is_a_head_too():
    logits, target = heads(scales=(2.0,))
    calibrator = MultiLabelScaling().fit(logits, target)
    assert calibrator.predict_proba(logits).shape == (300, 1)


@scalings
@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the number of labels
def test_the_module_of_independent_labels(scaling, kind, fused, device):
    logits, target = heads()
    input = logits if kind == "logits" else logits.sigmoid()
    if scaling is not None:
        scaling = type(scaling)(**{**scaling.get_params(deep=False), "input_kind": kind})
    calibrator = MultiLabelScaling(scaling=scaling, input_kind=kind).fit(input, target)
    module = calibrator.as_module(fused=fused).to(device)
    assert_close(module(input.to(device)).sigmoid(), calibrator.predict_proba(input))
    if hasattr(calibrator, "gammas_"):
        assert module.half().temperatures.tolist() == calibrator.temperatures_.tolist()
    program = torch.export.export(module.eval(), (input.to(device),))
    assert_close(program.module()(input.to(device)), module(input.to(device)))
    if not fused:
        assert_close(torch.jit.trace(module, input.to(device))(input.to(device)), module(input.to(device)))
    if fused or not hasattr(calibrator, "gammas_"):
        with pytest.raises(ValueError, match=r"\[300, 8\]"):
            module(input.to(device).repeat(1, 2))


@scalings
def test_independent_labels_are_saved(tmp_path, scaling):
    logits, target = heads()
    target[:, 1] = 0
    calibrator = MultiLabelScaling(scaling=scaling).fit(logits, target)
    path = tmp_path / "calibrator.json"
    calibrator.save(path)
    loaded = load_calibrator(path)
    assert isinstance(loaded, MultiLabelScaling)
    assert torch.equal(loaded.predict_proba(logits), calibrator.predict_proba(logits))
    assert (loaded.remarks_, loaded.n_samples_) == (calibrator.remarks_, 300)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    document = json.loads(path.read_text())
    document["labels"][0] = {**document["labels"][2], "method": "isotonic"}
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"calibrator\.json: not a"):
        load_calibrator(path)
    document = json.loads((tmp_path / "again.json").read_text())
    document["labels"].pop()
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"calibrator\.json: not a valid calibrator: expected 4 labels, found 3"):
        load_calibrator(path)


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda z, y: (z, y[:, 0]), ValueError, "got [300]; for one class per row use another calibrator"),
        (lambda z, y: (z, y[:, :3]), ValueError, "target must be [N, L] = [300, 4], got [300, 3]"),
        (lambda z, y: (z, y + 1), ValueError, "target must be 0 or 1, got 2 at row"),
        (lambda z, y: (z, y.double() * math.nan), ValueError, "target must be 0 or 1, got nan at row 0, label 0"),
        (lambda z, y: (z.long(), y), TypeError, "must be floating point"),
        (lambda z, y: (z[:, 0], y[:, 0]), ValueError, "must be [N, L]"),
        (lambda z, y: (z[:0], y[:0]), ValueError, "at least one row"),
        (lambda z, y: (z.index_fill(0, torch.tensor(5), math.nan), y), ValueError, "got nan at row 5, label 0"),
    ],
)
def test_bad_heads_are_named_and_leave_the_fitted_calibrator(spoil, error, words):
    logits, target = heads()
    calibrator = MultiLabelScaling().fit(logits, target)
    before = dict(vars(calibrator))
    with pytest.raises(error) as caught:
        calibrator.fit(*spoil(logits, target))
    assert words in str(caught.value)
    assert vars(calibrator) == before


def test_other_misuse_of_heads():
    logits, target = heads()
    with pytest.raises(NotFittedError):
        MultiLabelScaling().predict_proba(logits)
    with pytest.raises(ValueError, match="must have the 4 labels of fit"):
        MultiLabelScaling().fit(logits, target).predict_proba(logits[:, :3])
    with pytest.raises(TypeError, match="scaling must be a TemperatureScaling"):
        MultiLabelScaling(scaling=HistogramBinning()).fit(logits, target)
    with pytest.raises(ValueError, match="input_kind of scaling must be 'probs', got 'logits'"):
        MultiLabelScaling(scaling=TemperatureScaling(), input_kind="probs").fit(logits.sigmoid(), target)


# -- per class -------------------------------------------------------------------------------------------------------


def classes(n=500, n_classes=4):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return (3 * logits).softmax(-1), logits.softmax(-1), target


def test_the_report_adds_up_to_the_metrics():
    before, after, target = classes()
    rows = per_class_report(before, target, calibrated=after)
    for suffix, probs in (("", before), ("_after", after)):
        error = np.mean([row[f"ece{suffix}"] for row in rows])
        assert error == pytest.approx(float(metrics.classwise_calibration_error(probs, target)))
        nll = sum(row["frequency"] * row[f"nll{suffix}"] for row in rows)
        assert nll == pytest.approx(float(metrics.nll(probs, target)))
        right = sum(row["frequency"] * row[f"recall{suffix}"] for row in rows)
        assert right == pytest.approx(float(metrics.accuracy(probs, target)))
        assert sum(row[f"mean_prob{suffix}"] for row in rows) == pytest.approx(1)
    assert [row["n"] for row in rows] == target.bincount().tolist()
    assert [row["class"] for row in rows] == [0, 1, 2, 3]
    assert "ece_after" not in per_class_report(before, target)[0]
    named = per_class_report(before.numpy(), target.numpy(), names=["a", "b", "c", "d"])
    assert [row["class"] for row in named] == ["a", "b", "c", "d"]


def test_the_frequency_in_the_report_is_float64():
    rows = per_class_report(torch.full((5, 2), 0.5), torch.tensor([0, 0, 0, 1, 1]))
    assert [row["frequency"] for row in rows] == [0.6, 0.4]


def test_independent_labels_with_a_probability_rounded_above_one():
    row = per_class_report(torch.tensor([[1 + 1e-6], [0.5]]), torch.tensor([[0], [1]]))[0]
    assert row["nll"] == math.inf  # it is a probability of 1


def test_a_class_without_rows_in_the_report():
    before, _, target = classes()
    row = per_class_report(before, target.clamp(max=2))[3]
    assert (row["n"], row["frequency"]) == (0, 0.0)
    assert math.isnan(row["nll"])
    assert math.isnan(row["recall"])
    assert row["ece"] == pytest.approx(row["mean_prob"])  # this bin is empty


def test_the_report_of_independent_labels():
    logits, target = heads()
    rows = per_class_report(logits.sigmoid(), target, calibrated=reference.binary_focal_calibration_map(logits, 1.0))
    for label, row in enumerate(rows):
        p, y = logits[:, label].sigmoid(), target[:, label]
        assert row["nll"] == pytest.approx(float(torch.nn.functional.binary_cross_entropy(p, y.double())), rel=1e-9)
        assert row["recall"] == pytest.approx(float(((p > 0.5) & (y == 1)).sum() / y.sum()))
        expected = metrics.expected_calibration_error(confidence=p, correct=y == 1)
        assert row["ece"] == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"probs": torch.zeros(5, 3) + 2}, ValueError, "probs must be in [0, 1]; are these logits?"),
        ({"probs": torch.zeros(5)}, ValueError, "probs must be [N, C], got shape [5]"),
        ({"probs": torch.zeros(5, 3).long()}, TypeError, "must be floating point"),
        ({"target": torch.zeros(4).long()}, ValueError, "target must be [N] = [5] or [N, C] = [5, 3], got [4]"),
        ({"target": torch.full((5,), 3)}, IndexError, "target must be in [0, 3), got 3 at row 0"),
        ({"target": torch.zeros(5)}, TypeError, "integer class indices"),
        ({"target": torch.full((5, 3), 2)}, ValueError, "0 or 1"),
        ({"calibrated": torch.zeros(5, 2)}, ValueError, "calibrated must be [5, 3], got [5, 2]"),
        ({"names": ["a"]}, ValueError, "names must be [C] = [3], got 1"),
        ({"probs": torch.zeros(0, 3), "target": torch.zeros(0).long()}, ValueError, "at least one row"),
    ],
)
def test_bad_input_of_the_report_is_named(change, error, words):
    arguments = {"probs": torch.full((5, 3), 1 / 3), "target": torch.zeros(5).long(), **change}
    with pytest.raises(error) as caught:
        per_class_report(**arguments)
    assert words in str(caught.value)
