"""Rows of probabilities that do not sum to 1: metrics warn of sigmoids in place of a softmax, and of nothing else."""

import warnings

import pytest
import torch

import focalkern as fk
from focalkern import metrics

TOP_CLASS = (
    metrics.expected_calibration_error,
    metrics.maximum_calibration_error,
    metrics.rms_calibration_error,
    metrics.debiased_calibration_error,
    metrics.smooth_calibration_error,
    metrics.aurc,
    metrics.reliability_bins,
    metrics.risk_coverage,
    fk.accept_threshold,
)
SCORES = (metrics.nll, metrics.brier_score, metrics.classwise_calibration_error)


def rows(n=100, n_classes=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, n_classes, generator=generator)
    return logits, torch.randint(n_classes, (n,), generator=generator)


def messages(call):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return said


@pytest.mark.parametrize("metric", TOP_CLASS)
def test_sigmoids_cause_one_warning(metric, device):
    logits, target = rows()
    probs, target = logits.sigmoid().to(device), target.to(device)
    for options in ({}, {"ignore_index": 3}):
        (said,) = messages(lambda options=options: metric(probs, target, **options))
        assert said.category is UserWarning and said.filename == __file__
        expected = f"{metric.__name__}: probs must have rows that sum to 1, got sums from "
        assert str(said.message).startswith(expected) and "pass the softmax of the logits" in str(said.message)
    (said,) = messages(lambda: metric(probs, correct=logits.argmax(-1).to(device) == target))


@pytest.mark.parametrize("metric", SCORES)
def test_scores_look_at_the_sums_of_many_probabilities(metric):
    logits, target = rows(1 << 18, 4)
    assert len(messages(lambda: metric(logits.sigmoid(), target))) == 1
    assert not messages(lambda: metric(logits.softmax(-1), target))
    assert not messages(lambda: metric(logits[:100].sigmoid(), target[:100]))


def test_log_probabilities():
    logits, target = rows(1 << 18, 4)
    (said,) = messages(lambda: metrics.nll(torch.nn.functional.logsigmoid(logits), target, log=True))
    assert "exponentials of rows that sum to 1" in str(said.message) and "log_softmax" in str(said.message)
    assert not messages(lambda: metrics.nll(logits.log_softmax(-1), target, log=True))


# Half precision rounds the probabilities; bfloat16 rows of 1,000 classes have the largest error of their sum.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n_classes", [2, 10, 1000])
def test_a_softmax_causes_no_warning(dtype, n_classes, device):
    logits, target = rows(300, n_classes)
    probs = logits.to(device, dtype).softmax(-1)
    for metric in TOP_CLASS:
        assert not messages(lambda metric=metric: metric(probs, target.to(device)))


def test_rows_whose_sums_are_no_mistake():
    logits, target = rows()
    probs, ece = logits.softmax(-1), metrics.expected_calibration_error
    top, index = probs.topk(3)
    assert not messages(lambda: ece(top, correct=index[:, 0] == target))  # the largest classes
    assert not messages(lambda: ece(probs[:, :4], target % 4))  # some of the classes
    assert not messages(lambda: ece((100 * probs).round() / 100, target))  # two digits
    assert not messages(lambda: metrics.accuracy(logits, target))  # logits
    assert not messages(lambda: ece(probs[:0], target[:0]))
    few = probs.clone()
    few[:40] = logits[:40].sigmoid()
    assert not messages(lambda: ece(few, target))
    few[:60] = logits[:60].sigmoid()
    assert len(messages(lambda: ece(few, target))) == 1


def test_pixels_and_batches_of_sets():
    logits, target = rows(6 * 20, 5)
    pixels, labels = logits.view(6, 20, 5).movedim(-1, 1).sigmoid(), target.view(6, 20)
    labels[0] = 4
    ece = metrics.expected_calibration_error
    for options in ({"ignore_index": 4}, {"ignore_index": 4, "per": "image"}, {"per": "image"}):
        assert len(messages(lambda options=options: ece(pixels, labels, **options))) == 1
        assert not messages(lambda options=options: ece(pixels / pixels.sum(1, keepdim=True), labels, **options))
    # Ignored pixels may hold anything that is a probability.
    good = logits.view(6, 20, 5).movedim(-1, 1).softmax(1)
    mixed = torch.where((labels < 4).unsqueeze(1), good, torch.ones_like(good))
    assert not messages(lambda: ece(mixed, labels, ignore_index=4))
    assert len(messages(lambda: ece(logits.view(2, 3, 20, 5).sigmoid(), target.view(2, 3, 20)))) == 1


def test_a_bootstrap_and_a_metric_of_batches_warn_once():
    logits, target = rows()
    probs = logits.sigmoid()
    assert len(messages(lambda: fk.bootstrap.bias_floor(probs, n_resamples=5))) == 1
    both = {"before": probs, "after": logits.softmax(-1)}
    assert len(messages(lambda: fk.bootstrap.paired_bootstrap(both, target, n_resamples=5))) == 1
    wrapped = pytest.importorskip("focalkern.integrations.torchmetrics")
    for make in (wrapped.CalibrationError, wrapped.BrierScore, wrapped.NegativeLogLikelihood):
        metric = make()

        def update(metric=metric):
            for part in (slice(0), slice(50), slice(50, 100)):
                metric.update(probs[part], target[part])

        (said,) = messages(update)
        assert str(said.message).startswith(f"{make.__name__}: probs must have rows that sum to 1")
        assert not messages(lambda make=make: make(input_kind="logits").update(logits, target))
