"""The Metric classes compared with their functions: batch by batch, and in a collection."""

import functools
import math
import pickle
import sys

import pytest
import torch
from conftest import assert_close, peer

from focalkern import metrics

torchmetrics = peer("torchmetrics")
ours = pytest.importorskip("focalkern.integrations.torchmetrics", exc_type=ImportError)

FUNCTIONS = {
    "expected": metrics.expected_calibration_error,
    "maximum": metrics.maximum_calibration_error,
    "rms": metrics.rms_calibration_error,
    "debiased": metrics.debiased_calibration_error,
}


def sample(n=230, n_classes=4, device="cpu"):
    logits = 3 * torch.randn(n, n_classes)
    target = (logits + 2 * torch.randn(n, n_classes)).argmax(-1)
    return logits.to(device), target.to(device)


def fill(metric, scores, target, sizes=(100, 1, 129)):
    for part, labels in zip(scores.split(sizes), target.split(sizes), strict=True):
        metric.update(part, labels)
    return metric


@pytest.mark.parametrize("estimator", metrics.ESTIMATORS)
@pytest.mark.parametrize("error", FUNCTIONS)
def test_batches_give_the_error_of_all_rows(estimator, error, device):
    logits, target = sample(device=device)
    probs = logits.softmax(-1)
    metric = fill(ours.CalibrationError(estimator=estimator, error=error).to(device), probs, target)
    expected = FUNCTIONS[error](probs, target, estimator=estimator)
    assert metric.compute().dtype == torch.float64
    assert_close(metric.compute(), expected)
    from_logits = fill(
        ours.CalibrationError(estimator=estimator, error=error, input_kind="logits").to(device), logits, target
    )
    assert_close(from_logits.compute(), expected)
    assert metric.bins().count.sum() == (230 if estimator != "equal_mass_interp" else 229)


def test_the_others_give_the_figures_of_all_rows(device):
    logits, target = sample(device=device)
    probs = logits.softmax(-1)
    for metric, expected in (
        (ours.ClasswiseCalibrationError(4), metrics.classwise_calibration_error(probs, target)),
        (
            ours.ClasswiseCalibrationError(4, reduction="none"),
            metrics.classwise_calibration_error(probs, target, reduction="none"),
        ),
        (ours.NegativeLogLikelihood(), metrics.nll(probs, target)),
        (ours.BrierScore(), metrics.brier_score(probs, target)),
    ):
        assert_close(fill(metric.to(device), probs, target).compute(), expected)
    log_probs = logits.double().log_softmax(-1)
    metric = fill(ours.NegativeLogLikelihood(input_kind="logits").to(device), logits, target)
    assert_close(metric.compute(), metrics.nll(log_probs, target, log=True))
    metric = fill(ours.BrierScore(input_kind="logits").to(device), logits, target)
    assert_close(metric.compute(), metrics.brier_score(probs, target))


def test_memory_does_not_grow_with_equal_width():
    logits, target = sample()
    metric = ours.CalibrationError()
    before = len(pickle.dumps(metric.metric_state))
    for _ in range(20):
        metric.update(logits.softmax(-1), target)
    assert len(pickle.dumps(metric.metric_state)) == before
    assert int(metric.count.sum()) == 20 * 230


@pytest.mark.parametrize("estimator", metrics.ESTIMATORS)
def test_bins_stay_as_they_were(estimator):
    logits, target = sample()
    probs = logits.softmax(-1)
    metric = ours.CalibrationError(estimator=estimator)
    metric.update(probs[:100], target[:100])
    bins, expected = metric.bins(), metrics.reliability_bins(probs[:100], target[:100], estimator=estimator)
    metric.update(probs, target)
    assert torch.equal(bins.count, expected.count)
    assert_close(bins.weight, expected.weight)


def test_pixels_are_rows_and_ignored_ones_are_none():
    scores = torch.randn(2, 3, 4, 5)
    target = torch.randint(3, (2, 4, 5))
    target[0, :2] = 255
    rows, labels = scores.movedim(1, -1).reshape(-1, 3).softmax(-1), target.reshape(-1)
    kept = labels != 255
    metric = ours.CalibrationError(input_kind="logits", ignore_index=255)
    metric.update(scores, target)
    assert_close(metric.compute(), metrics.expected_calibration_error(rows[kept], labels[kept]))
    metric.update(scores[:1, :, :2], target[:1, :2])  # only ignored pixels
    assert int(metric.count.sum()) == int(kept.sum())


def test_forward_returns_the_batch_and_keeps_the_rest():
    logits, target = sample()
    probs = logits.softmax(-1)
    for metric, function in (
        (ours.CalibrationError(), metrics.expected_calibration_error),
        (
            ours.CalibrationError(estimator="equal_mass"),
            lambda p, y: metrics.expected_calibration_error(p, y, estimator="equal_mass"),
        ),
        (ours.BrierScore(), metrics.brier_score),
    ):
        assert_close(metric(probs[:80], target[:80]), function(probs[:80], target[:80]))
        assert_close(metric(probs[80:], target[80:]), function(probs[80:], target[80:]))
        assert_close(metric.compute(), function(probs, target))
        metric.reset()
        metric.update(probs[:9], target[:9])
        assert_close(metric.compute(), function(probs[:9], target[:9]))


@pytest.mark.parametrize(
    "metric",
    [ours.BrierScore(), ours.NegativeLogLikelihood(), ours.CalibrationError(), ours.ClasswiseCalibrationError(4)],
    ids=lambda metric: type(metric).__name__,
)
def test_a_reset_within_inference_mode_does_not_end_updates(metric):
    probs, target = sample()[0].softmax(-1), sample()[1]
    expected = type(metric).compute(fill(metric, probs, target))
    with torch.inference_mode():
        metric.reset()
    assert torch.equal(type(metric).compute(fill(metric, probs, target)), expected)


@pytest.mark.filterwarnings("ignore:The ``compute`` method:UserWarning")  # torchmetrics: before the first update
def test_no_rows_are_nan():
    for metric in (
        *(ours.CalibrationError(estimator=estimator) for estimator in metrics.ESTIMATORS),
        ours.ClasswiseCalibrationError(3),
        ours.NegativeLogLikelihood(),
        ours.BrierScore(),
    ):
        assert metric.compute().isnan()
        metric.reset()
        metric.update(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))
        assert metric.compute().isnan()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("metric", [ours.CalibrationError, functools.partial(ours.ClasswiseCalibrationError, 3)])
def test_logits_without_a_softmax_are_an_error(metric, value):
    logits = torch.zeros(4, 3)
    logits[2, 1] = value
    found = metric(input_kind="logits")
    with pytest.raises(ValueError, match=r"CalibrationError: preds must have a finite softmax, got .* at row 2"):
        found.update(logits, torch.zeros(4, dtype=torch.int64))
    assert not found.count.any() and not found.confidence_sum.any()


def test_a_collection_and_its_state_dict():
    logits, target = sample()
    probs = logits.softmax(-1)

    def collection():
        made = torchmetrics.MetricCollection(
            {
                "ece": ours.CalibrationError(),
                "mce": ours.CalibrationError(error="maximum"),
                "ada": ours.CalibrationError(estimator="equal_mass"),
                "classwise": ours.ClasswiseCalibrationError(4),
                "brier": ours.BrierScore(),
            }
        )
        made.persistent(True)
        return made

    first = collection()
    first.update(probs[:100], target[:100])
    second = collection()
    second.load_state_dict(first.state_dict())
    second.update(probs[100:], target[100:])
    found = second.compute()
    assert_close(found["ece"], metrics.expected_calibration_error(probs, target))
    assert_close(found["mce"], metrics.maximum_calibration_error(probs, target))
    assert_close(found["ada"], metrics.expected_calibration_error(probs, target, estimator="equal_mass"))
    assert_close(found["classwise"], metrics.classwise_calibration_error(probs, target))
    assert_close(found["brier"], metrics.brier_score(probs, target))
    copy = pickle.loads(pickle.dumps(second))
    assert copy.compute() == found


@pytest.mark.parametrize("first", ["ignored", "perfect", "without class 0"])
def test_a_collection_keeps_metrics_apart_whose_first_states_are_equal(first):
    """torchmetrics would share the states of metrics that are equal after the first batch."""
    logits, target = sample()
    probs, places = logits.softmax(-1), torch.arange(230)
    begin = {"ignored": places[:0], "perfect": places[:9], "without class 0": (target != 0).nonzero().squeeze(1)}[first]
    some, labels = probs[begin], target[begin]
    if first == "perfect":
        some = torch.nn.functional.one_hot(labels, 4).to(probs)
    if first == "ignored":
        some, labels = probs[:5], torch.full((5,), -100)
    collected = {
        "nll": ours.NegativeLogLikelihood(ignore_index=-100),
        "brier": ours.BrierScore(ignore_index=-100),
        "ece": ours.CalibrationError(ignore_index=-100),
        "mce": ours.CalibrationError(ignore_index=-100, error="maximum"),
    }
    if first != "ignored":  # where it would meet label -100
        collected["ece without class 0"] = ours.CalibrationError(ignore_index=0)
    found = torchmetrics.MetricCollection(collected)
    found.update(some, labels)
    found.update(probs, target)
    rows, truth, ignored = torch.cat([some, probs]), torch.cat([labels, target]), {"ignore_index": -100}
    expected = {
        "nll": metrics.nll(rows, truth, **ignored),
        "brier": metrics.brier_score(rows, truth, **ignored),
        "ece": metrics.expected_calibration_error(rows, truth, **ignored),
        "mce": metrics.maximum_calibration_error(rows, truth, **ignored),
    }
    if first != "ignored":
        expected["ece without class 0"] = metrics.expected_calibration_error(rows, truth, ignore_index=0)
    for name, value in found.compute().items():
        assert_close(value, expected[name])
    assert any(sorted(group) == ["ece", "mce"] for group in found.compute_groups.values())


METRICS = {
    "equal width": lambda: ours.CalibrationError(n_bins=5),
    "equal mass": lambda: ours.CalibrationError(n_bins=5, estimator="equal_mass"),
    "classwise": lambda: ours.ClasswiseCalibrationError(4, n_bins=5),
    "nll": ours.NegativeLogLikelihood,
    "brier": ours.BrierScore,
}


def dtypes(metric):
    state = metric.metric_state.items()
    return {name: value.dtype if isinstance(value, torch.Tensor) else [t.dtype for t in value] for name, value in state}


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, "torch.HalfTensor"])
def test_set_dtype_is_the_dtype_of_the_result(name, dtype):
    """Before, between and after the batches; the sums keep their digits."""
    logits, target = sample()
    probs, wanted = logits.softmax(-1), dtype if isinstance(dtype, torch.dtype) else torch.float16
    plain = fill(METRICS[name](), probs, target)
    expected = plain.compute()
    assert expected.dtype == torch.float64
    first, between = METRICS[name]().set_dtype(dtype), METRICS[name]()
    between.update(probs[:100], target[:100])
    between.set_dtype(dtype).update(probs[100:], target[100:])
    for metric in (fill(first, probs, target), between, plain.set_dtype(dtype)):
        assert metric.dtype == metric.compute().dtype == wanted
        assert_close(metric.compute(), expected.to(wanted))
        again = pickle.loads(pickle.dumps(metric.clone()))
        assert again.compute().dtype == wanted
        metric.reset()
        assert fill(metric, probs, target).compute() == again.compute()
    assert dtypes(first) == dtypes(fill(METRICS[name](), probs, target))


# A module casts its metrics by .to(dtype); .half() and .double() of a metric have no effect in torchmetrics either.
@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("cast", ["half", "double", "float", "bfloat16", torch.float16, torch.bfloat16])
def test_a_cast_of_the_model_changes_no_metric(name, cast):
    logits, target = sample()
    model = torch.nn.Module()
    model.metric = fill(METRICS[name](), logits.softmax(-1), target)
    before, expected = dtypes(model.metric), model.metric.compute()
    for _ in range(2):  # with the kept result and without
        model.to(cast) if isinstance(cast, torch.dtype) else getattr(model, cast)()
        model.metric.to("cpu")
        assert dtypes(model.metric) == before
        assert torch.equal(model.metric.compute(), expected)
        model.metric.reset()
        fill(model.metric, logits.softmax(-1), target)


@pytest.mark.parametrize("name", METRICS)
def test_states_of_metrics_of_other_dtypes(name):
    """state_dict, merge_state and the synchronisation of two processes take a metric of another dtype."""
    logits, target = sample()
    probs = logits.softmax(-1)
    expected = fill(METRICS[name](), probs, target).compute()
    first, second, loaded = METRICS[name]().set_dtype(torch.float16), METRICS[name](), METRICS[name]()
    first.persistent(True)
    first.update(probs[:100], target[:100])
    second.update(probs[100:], target[100:])
    loaded.load_state_dict(first.state_dict())
    loaded.update(probs[100:], target[100:])
    assert_close(loaded.compute(), expected)
    second.merge_state(first)
    assert_close(second.compute(), expected)
    both = fill(METRICS[name]().set_dtype(torch.float32), probs, target)
    both.dist_sync_fn, both.distributed_available_fn = lambda state, group=None: [state, state], lambda: True
    assert_close(both.compute(), expected.float())
    moved = METRICS[name]().to("meta")
    assert all(value.is_meta for value in moved.metric_state.values() if isinstance(value, torch.Tensor))


def test_set_dtype_refuses_integers():
    metric = ours.BrierScore()
    with pytest.raises(TypeError, match=r"BrierScore: dst_type must be a floating-point dtype, got torch\.int64"):
        metric.set_dtype(torch.int64)
    assert metric.dtype == torch.float32


def test_plots():
    pytest.importorskip("matplotlib").use("Agg")
    logits, target = sample()
    for make in METRICS.values():
        metric = fill(make(), logits.softmax(-1), target)
        assert metric.plot()[1].lines or metric.plot()[1].collections
        assert len(metric.plot([metric.compute(), metric.compute()])[1].lines) >= 1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ours.CalibrationError(estimator="uniform"), ValueError, "estimator must be one of equal_width"),
        (
            lambda: ours.CalibrationError(error="l1"),
            ValueError,
            "error must be one of expected, maximum, rms, debiased",
        ),
        (lambda: ours.CalibrationError(n_bins=0), ValueError, "CalibrationError: n_bins must be at least 1, got 0"),
        (lambda: ours.CalibrationError(n_bins=1.0), TypeError, "n_bins must be an int, got 1.0"),
        (lambda: ours.BrierScore(input_kind="scores"), ValueError, "one of probs, logits, got 'scores'"),
        (lambda: ours.ClasswiseCalibrationError(3, reduction="sum"), ValueError, "one of mean, none, got 'sum'"),
        (
            lambda: ours.CalibrationError().update(torch.randn(3, 2), torch.tensor([0, 1, 0])),
            ValueError,
            "are these logits?",
        ),
        (
            lambda: ours.CalibrationError().update(torch.rand(3, 2, 4), torch.tensor([0, 1, 0])),
            ValueError,
            "CalibrationError: target must be [N, ...] = [3, 4], got [3]",
        ),
        (lambda: ours.CalibrationError().update(torch.rand(3), torch.tensor([0, 1, 0])), ValueError, "[N, C, ...]"),
        (
            lambda: ours.ClasswiseCalibrationError(3).update(torch.eye(2), torch.tensor([0, 1])),
            ValueError,
            "must have num_classes = 3 classes, got 2",
        ),
        (lambda: ours.BrierScore().update(torch.eye(2), torch.tensor([0, 2])), IndexError, "got 2 at row 1"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


def test_without_torchmetrics_the_import_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.delitem(sys.modules, "focalkern.integrations.torchmetrics")
    with pytest.raises(ImportError, match="needs torchmetrics: pip install torchmetrics"):
        __import__("focalkern.integrations.torchmetrics")


def test_arrays_are_told_to_be_converted():
    logits, target = sample()
    for metric in (ours.CalibrationError(), ours.ClasswiseCalibrationError(4), ours.BrierScore()):
        name = type(metric).__name__
        with pytest.raises(TypeError, match=f"^{name}: preds must be a tensor, got .*; torch.as_tensor converts"):
            metric.update(logits.softmax(-1).numpy(), target)
        with pytest.raises(TypeError, match=f"^{name}: target must be a tensor, got .*; torch.as_tensor converts"):
            metric.update(logits.softmax(-1), target.tolist())
