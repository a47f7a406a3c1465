"""Debiased and smooth calibration errors, AURC, AUROC, and scores; arrays and bad input."""

import itertools
import math

import numpy as np
import pytest
import torch
from conftest import assert_close
from metric_cases import BINNED, UNBINNED, numpy_bins, sample

from focalkern import metrics


def numpy_debiased(confidence, correct, n_bins, estimator, norm, draws):
    """The estimator of Kumar et al.; for l1 the normal variables are drawn."""
    total = 0.0
    for rows in numpy_bins(confidence, n_bins, estimator):
        if not len(rows):
            continue
        p, gap = correct[rows].mean(), correct[rows].mean() - confidence[rows].mean()
        if norm == "l2":
            value = gap**2 - p * (1 - p) / (len(rows) - 1) if len(rows) > 1 else 0.0
        else:
            value = 2 * abs(gap) - np.abs(gap + math.sqrt(p * (1 - p) / len(rows)) * draws).mean()
        total += len(rows) / len(confidence) * value
    return math.sqrt(max(total, 0)) if norm == "l2" else total


@pytest.mark.parametrize("n", [1500, 40, 7, 1])
@pytest.mark.parametrize("estimator", metrics.ESTIMATORS)
@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_debiased_error_equals_its_definition(n, estimator, norm, device):
    probs, target = sample(n, dtype=torch.float64, device=device)
    confidence, prediction = probs.cpu().max(-1)
    correct = (prediction == target.cpu()).numpy()
    # 20000 quantiles of the normal distribution replace the draws.
    draws = torch.special.ndtri((torch.arange(20000, dtype=torch.float64) + 0.5) / 20000).numpy()
    expected = numpy_debiased(confidence.numpy(), correct, 15, estimator, norm, draws)
    found = metrics.debiased_calibration_error(probs, target, estimator=estimator, norm=norm)
    assert float(found) == pytest.approx(expected, abs=1e-12 if norm == "l2" else 1e-5)


def test_debiasing_takes_the_bias_of_a_calibrated_model_away():
    """In 400 sets of 500 rows of a calibrated model, plain errors are far above 0, and debiased ones are not."""
    confidence = 0.5 + 0.5 * torch.rand(400, 500, dtype=torch.float64)
    correct = torch.rand(400, 500, dtype=torch.float64) < confidence
    given = {"confidence": confidence, "correct": correct, "estimator": "equal_mass"}
    plain = metrics.rms_calibration_error(**given).square()
    # Before clipping at 0: RMSCE^2 minus the variances, whose mean is 0 within three standard errors.
    bins = metrics.reliability_bins(**given)
    squares = plain - (bins.weight * bins.accuracy * (1 - bins.accuracy) / (bins.count - 1)).sum(-1)
    assert abs(float(squares.mean())) < 3 * float(squares.std()) / 20 < 0.1 * float(plain.mean())
    assert_close(metrics.debiased_calibration_error(**given), squares.clamp(min=0).sqrt())
    l1 = metrics.debiased_calibration_error(**given, norm="l1")
    # Twice the half-normal mean of one standard deviation, minus that of sqrt(2) standard deviations.
    assert float(l1.mean() / metrics.expected_calibration_error(**given).mean()) == pytest.approx(2 - 2**0.5, rel=0.1)
    assert bool((l1 < 0).any())


def direct_smooth_error(confidence, correct, sigma, n_points=40001):
    """The integral by the midpoint rule, with the kernel reflected five times at each end."""
    t = (np.arange(n_points) + 0.5) / n_points
    total = np.zeros(n_points)
    for c, hit in zip(confidence, correct, strict=True):
        for shift in range(-4, 6, 2):
            for image in (shift + c, shift - c):
                total += (hit - c) * np.exp(-0.5 * ((t - image) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
    return np.abs(total / len(confidence)).mean()


@pytest.mark.parametrize(("sigma", "rel"), [(0.001, 1e-2), (0.01, 1e-4), (0.1, 1e-5), (0.8, 1e-5)])
def test_smooth_error_equals_its_integral(sigma, rel, device):
    # Both ends and values next to them, an edge of bins, a tie.
    confidence = torch.tensor([0.0, 1.0, 1.0, 0.003, 0.998, 1 / 3, 0.6, 0.6, 0.71], dtype=torch.float64)
    correct = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.25])
    found = metrics.smooth_calibration_error(
        confidence=confidence.to(device), correct=correct.to(device), bandwidth=sigma
    )
    assert float(found) == pytest.approx(direct_smooth_error(confidence.tolist(), correct.tolist(), sigma), rel=rel)


def test_smooth_error_is_its_own_bandwidth():
    probs, target = sample(400, dtype=torch.float64)
    found = metrics.smooth_calibration_error((3 * probs.log()).softmax(-1), target)
    at_it = metrics.smooth_calibration_error((3 * probs.log()).softmax(-1), target, bandwidth=float(found))
    assert float(at_it) == pytest.approx(float(found), abs=1e-6)


def test_smooth_error_at_the_ends():
    one = torch.ones(3)
    assert metrics.smooth_calibration_error(confidence=one, correct=one) == 0
    # All confidences equal and wrong by 1: the result is the total residual for every kernel.
    assert float(metrics.smooth_calibration_error(confidence=one, correct=0 * one)) == pytest.approx(1, abs=1e-6)
    # Unlike the ECE it does not jump where residuals of both signs cross an edge of bins.
    correct = torch.tensor([1.0, 0.0])
    beside = [torch.tensor([2 / 3, 2 / 3 + step], dtype=torch.float64) for step in (0, 1e-6)]
    smooth = [float(metrics.smooth_calibration_error(confidence=c, correct=correct)) for c in beside]
    binned = [float(metrics.expected_calibration_error(confidence=c, correct=correct)) for c in beside]
    assert abs(smooth[0] - smooth[1]) < 1e-5 and abs(binned[0] - binned[1]) > 0.3


def test_smooth_error_in_blocks_is_smooth_error_at_once(monkeypatch):
    confidence = torch.rand(2, 3, 20, dtype=torch.float64)
    correct = torch.rand(2, 3, 20) < confidence
    at_once = metrics.smooth_calibration_error(confidence=confidence, correct=correct)
    assert at_once.shape == (2, 3)
    monkeypatch.setattr("focalkern.metrics._smooth._BLOCK", 4)
    assert_close(metrics.smooth_calibration_error(confidence=confidence, correct=correct), at_once)


def test_aurc_is_the_mean_risk_over_all_orders_of_ties(device):
    confidence = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.2], device=device)
    correct = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], device=device)
    loss = (1 - correct).tolist()
    areas = []
    for middle in itertools.permutations([1, 2, 3]):
        order = [0, *middle, 4]
        areas.append(np.mean([np.mean([loss[j] for j in order[: i + 1]]) for i in range(5)]))
    assert float(metrics.aurc(confidence=confidence, correct=correct)) == pytest.approx(np.mean(areas))
    # The best order has its two errors last: (1/4 + 2/5) / 5.
    excess = metrics.aurc(confidence=confidence, correct=correct, excess=True)
    assert float(excess) == pytest.approx(np.mean(areas) - (1 / 4 + 2 / 5) / 5)
    ranked = metrics.aurc(confidence=torch.tensor([0.9, 0.8, 0.7]), correct=torch.tensor([1, 1, 0]), excess=True)
    assert float(ranked) == 0
    assert metrics.aurc(confidence=confidence, correct=torch.ones(5, device=device)) == 0


def test_classwise_in_blocks_is_classwise_at_once(monkeypatch):
    probs, target = sample(50, n_classes=9)
    at_once = metrics.classwise_calibration_error(probs, target)
    monkeypatch.setattr("focalkern.metrics._errors._BLOCK", 100)
    assert_close(metrics.classwise_calibration_error(probs, target), at_once)


def test_scores_equal_their_definitions(device):
    probs, target = sample(400, n_classes=5, dtype=torch.float64, device=device)
    p, y = probs.cpu().numpy(), target.cpu().numpy()
    assert float(metrics.nll(probs, target)) == pytest.approx(-np.log(p[np.arange(400), y]).mean(), rel=1e-12)
    assert float(metrics.nll(probs.log(), target, log=True)) == pytest.approx(float(metrics.nll(probs, target)))
    brier = ((p - np.eye(5)[y]) ** 2).sum(1).mean()
    assert float(metrics.brier_score(probs, target)) == pytest.approx(brier, rel=1e-12)
    assert float(metrics.accuracy(probs, target)) == (p.argmax(1) == y).mean()
    assert float(metrics.accuracy(correct=probs.argmax(-1) == target)) == (p.argmax(1) == y).mean()


def test_brier_does_not_change_its_input():
    probs, target = sample(5, dtype=torch.float64)
    before = probs.clone()
    metrics.brier_score(probs, target)
    assert torch.equal(probs, before)


def test_scores_at_the_ends():
    certain = torch.eye(3)
    assert metrics.nll(certain, torch.arange(3)).item() == 0.0
    assert math.copysign(1, metrics.nll(certain, torch.arange(3)).item()) == 1
    assert metrics.nll(certain, torch.tensor([1, 1, 2])).item() == math.inf
    assert metrics.brier_score(certain, torch.tensor([1, 2, 0])).item() == 2.0


def test_batches_are_independent_sets(device):
    probs, target = zip(*(sample(60, n_classes=c) for c in (4, 4)), strict=True)
    probs = torch.stack([probs[0], probs[1].flip(1)]).to(device)
    target = torch.stack(target).to(device)
    for function in BINNED:
        for estimator in metrics.ESTIMATORS:
            result = function(probs, target, estimator=estimator)
            one_by_one = torch.stack([function(p, t, estimator=estimator) for p, t in zip(probs, target, strict=True)])
            assert result.shape == (2,)
            assert_close(result, one_by_one)
    for function in (metrics.nll, metrics.brier_score, metrics.accuracy, *UNBINNED):
        assert_close(function(probs, target), torch.stack([function(probs[i], target[i]) for i in range(2)]))
    confidence = probs.amax(-1)
    assert_close(
        metrics.auroc(confidence, confidence[:, :20].square()),
        torch.stack([metrics.auroc(row, row[:20].square()) for row in confidence]),
    )


def test_auroc_equals_all_pairs_with_ties(device):
    inside = torch.randint(0, 12, (40,), device=device).to(torch.float32) / 12
    outside = torch.randint(0, 12, (25,), device=device).to(torch.float32) / 12
    difference = inside[:, None] - outside
    pairs = (difference > 0).double() + 0.5 * (difference == 0).double()
    assert_close(metrics.auroc(inside, outside), pairs.mean())
    assert metrics.auroc(torch.tensor([0.9, 0.8]), torch.tensor([0.1])) == 1.0


def test_numpy_numbers_and_byte_orders_are_taken():
    probs, target = np.array([[0.6, 0.4], [0.1, 0.9], [0.7, 0.3]]), np.array([0, 1, 1])
    expected = metrics.expected_calibration_error(probs, target, n_bins=2)
    assert metrics.expected_calibration_error(probs, target, n_bins=np.int64(2)) == expected
    assert metrics.expected_calibration_error(probs.astype(">f8"), target.astype(">i4"), n_bins=2) == expected


def test_numpy_arrays_are_taken_also_read_only_ones():
    probs, target = sample(20)
    array = probs.numpy().copy()
    array.flags.writeable = False
    expected = metrics.expected_calibration_error(probs, target)
    assert metrics.expected_calibration_error(array, target.numpy()) == expected
    assert metrics.expected_calibration_error(probs.tolist(), target.tolist()) == pytest.approx(expected.item())


# Each with words that the message must contain: expected and received.
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p, y: metrics.expected_calibration_error(p), ValueError, "either target or correct, got neither"),
        (lambda p, y: metrics.expected_calibration_error(target=y), ValueError, "probs or confidence, got neither"),
        (lambda p, y: metrics.expected_calibration_error(p, y, confidence=p[:, 0]), ValueError, "got both"),
        (lambda p, y: metrics.expected_calibration_error(p, y, correct=y), ValueError, "got both"),
        (lambda p, y: metrics.expected_calibration_error(confidence=p[:, 0], target=y), ValueError, "needs correct"),
        (lambda p, y: metrics.expected_calibration_error(p, y, estimator="adaptive"), ValueError, "'adaptive'"),
        (lambda p, y: metrics.expected_calibration_error(p, y, n_bins=0), ValueError, "at least 1, got 0"),
        (lambda p, y: metrics.expected_calibration_error(p, y, n_bins=1.5), TypeError, "must be an int, got 1.5"),
        (lambda p, y: metrics.expected_calibration_error(p.log(), y), ValueError, "row 0; are these logits? Pass"),
        (lambda p, y: metrics.expected_calibration_error(p * math.nan, y), ValueError, "got NaN in row 0"),
        (lambda p, y: metrics.nll(100 * p, y), ValueError, "in row 0; divide each row by its sum"),
        (lambda p, y: metrics.nll(p, (p == 1).long()), ValueError, "for one-hot rows pass target.argmax(-1)"),
        (lambda p, y: metrics.nll(p, y * 0 + torch.tensor([1, 2, 1, 3])), IndexError, "from 0: target - 1"),
        (lambda p, y: metrics.expected_calibration_error(confidence=p[:, 0] + 1, correct=y > 0), ValueError, "row 0"),
        (lambda p, y: metrics.expected_calibration_error(confidence=p[:, 0], correct=p[:3, 0]), ValueError, "[4]"),
        (lambda p, y: metrics.expected_calibration_error(p, y[:3]), ValueError, "target must be [N] = [4], got [3]"),
        (lambda p, y: metrics.debiased_calibration_error(p, y, norm="max"), ValueError, "one of l1, l2, got 'max'"),
        (lambda p, y: metrics.smooth_calibration_error(p, y, bandwidth=0), ValueError, "must be positive, got 0"),
        (lambda p, y: metrics.smooth_calibration_error(p.log(), y), ValueError, "in row 0; are these logits?"),
        (lambda p, y: metrics.classwise_calibration_error(p, y, reduction="sum"), ValueError, "mean, none, got 'sum'"),
        (lambda p, y: metrics.nll(p, y.float()), TypeError, "got torch.float32; torch converts it with target.long()"),
        (lambda p, y: metrics.nll(p, p.round()), TypeError, "pass class indices: the argmax of one-hot labels"),
        (
            lambda p, y: metrics.nll(p, y, log=True),
            ValueError,
            "at most 0, with log=True, got values up to 1.0; are these",
        ),
        (lambda p, y: metrics.nll(y, y), TypeError, "probs must be floating point, got torch.int64"),
        (lambda p, y: metrics.nll(p[:, 0], y), ValueError, "got shape [4]; for one probability p of class 1"),
        (lambda p, y: metrics.brier_score(p, y + 2), IndexError, "target must be in [0, 3), got 3 at row 1"),
        (lambda p, y: metrics.classwise_calibration_error(p, y - 1), IndexError, "got -1 at row 0"),
        (lambda p, y: metrics.accuracy(p), ValueError, "expected probs and target, or correct"),
        (lambda p, y: metrics.accuracy(p, y, correct=y == 0), ValueError, "got both"),
        (lambda p, y: metrics.auroc(p[0, 0], p[0]), ValueError, "confidence_in must be [N], got a single number"),
        (lambda p, y: metrics.auroc(p, p[0]), ValueError, "must have the batch of confidence_in, [4], got []"),
        (lambda p, y: metrics.auroc(p[0], p[0].double()), TypeError, "must have the dtype of confidence_in"),
        (lambda p, y: metrics.auroc(p[0], p[0] * math.nan), ValueError, "must not be NaN, got NaN at row 0"),
        (lambda p, y: metrics.auroc(y, y), TypeError, "must be floating point, got torch.int64"),
    ],
)
def test_bad_input_is_named(call, error, words):
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]])
    target = torch.tensor([0, 1, 2, 0])
    with pytest.raises(error) as caught:
        call(probs, target)
    assert words in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bins_of_equal_width_are_found_without_a_search(dtype):
    """Confidences on every edge and next to it, for numbers of bins whose edges round up and down."""
    from focalkern.metrics._bins import _equal_width_index, equal_width_edges

    for n_bins in (*range(1, 120), 511, 777, 1023, 1024):
        edges = equal_width_edges(torch.zeros(1, dtype=dtype), n_bins)
        far = torch.tensor(math.inf, dtype=dtype)
        near = torch.cat([edges, torch.nextafter(edges, far), torch.nextafter(edges, -far), edges.new_tensor([1e-40])])
        assert torch.equal(_equal_width_index(near, edges), torch.searchsorted(edges, near)), n_bins


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"probs": torch.tensor([[0.5, 0.5], [0.2, math.nan]]), "target": torch.tensor([0, 1])}, "NaN in row 1"),
        ({"correct": torch.tensor([1, 3])}, r"correct must be in \[0, 1\], got 3\.0 at row 1"),
        ({"correct": torch.tensor([0.5, math.nan])}, r"correct must be in \[0, 1\], got nan at row 1"),
    ],
)
def test_accuracy_refuses_values_that_no_row_has(given, words):
    with pytest.raises(ValueError, match=f"^accuracy: .*{words}"):
        metrics.accuracy(**given)
