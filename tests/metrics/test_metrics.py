"""The metrics compared with NumPy code in the form of the estimators' authors, and at edges where estimators differ."""

import math

import numpy as np
import pytest
import torch
from conftest import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_cases import BINNED, ERRORS, UNBINNED, numpy_bins, sample

from focalkern import metrics, reference


def numpy_gaps(confidence, correct, n_bins, estimator):
    """(weights, gaps) of the bins that are not empty."""
    bins = [rows for rows in numpy_bins(confidence, n_bins, estimator) if len(rows)]
    gaps = [abs(correct[rows].mean() - confidence[rows].astype(np.float64).mean()) for rows in bins]
    return np.array([len(rows) / len(confidence) for rows in bins]), np.array(gaps)


def numpy_error(confidence, correct, n_bins, estimator):
    weights, gaps = numpy_gaps(confidence, correct, n_bins, estimator)
    return (weights * gaps).sum(), gaps.max(initial=0.0), math.sqrt((weights * gaps**2).sum())


# Numbers of rows: a multiple of M, not a multiple, fewer than bins, one; the usual 15 bins, one, and many.
@pytest.mark.parametrize("n", [1500, 1499, 7, 1])
@pytest.mark.parametrize("n_bins", [15, 1, 40])
@pytest.mark.parametrize("estimator", metrics.ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_equal_numpy(n, n_bins, estimator, dtype, device):
    probs, target = sample(n, dtype=dtype, device=device)
    confidence, prediction = probs.cpu().max(-1)
    correct = (prediction == target.cpu()).numpy()
    expected = numpy_error(confidence.numpy(), correct, n_bins, estimator)
    for function, value in zip(ERRORS, expected, strict=True):
        result = function(probs, target, n_bins=n_bins, estimator=estimator)
        assert result.dtype == torch.float64
        assert result.device == probs.device
        assert_close(result, torch.tensor(value, dtype=torch.float64))


@pytest.mark.parametrize("estimator", metrics.ESTIMATORS)
def test_errors_equal_the_reference(estimator):
    probs, target = sample(700, dtype=torch.float64)
    confidence, prediction = probs.max(-1)
    ece, mce = reference.calibration_error(confidence, prediction == target, 15, estimator)
    assert_close(
        metrics.expected_calibration_error(probs, target, estimator=estimator), torch.tensor(ece, dtype=torch.float64)
    )
    assert_close(
        metrics.maximum_calibration_error(probs, target, estimator=estimator), torch.tensor(mce, dtype=torch.float64)
    )


# Confidences on a coarse lattice, so that ties, exact edges of 15 bins, 0 and 1 occur.
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=60),
    st.integers(1, 20),
    st.sampled_from(metrics.ESTIMATORS),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_errors_equal_numpy_with_ties_and_on_edges(rows, n_bins, estimator, dtype):
    confidence = (torch.tensor([step for step, _ in rows], dtype=torch.float64) / 30).to(dtype)
    correct = torch.tensor([flag for _, flag in rows])
    expected = numpy_error(confidence.numpy(), correct.numpy(), n_bins, estimator)
    for function, value in zip(ERRORS, expected, strict=True):
        result = function(confidence=confidence, correct=correct, n_bins=n_bins, estimator=estimator)
        assert float(result) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_equal_width_edges_are_rounded_to_the_dtype_of_the_confidence(dtype):
    """k/15 is no binary fraction: each edge, rounded to the dtype, belongs to the bin below it."""
    edges = (torch.arange(1, 16, dtype=torch.float64) / 15).to(dtype)
    bins = metrics.reliability_bins(confidence=edges, correct=torch.ones(15))
    assert bins.count.tolist() == [1] * 15
    # The next number above an edge is in the next bin.
    above = torch.nextafter(edges[:-1], torch.ones((), dtype=dtype)) if dtype.itemsize > 2 else edges[:-1] + 0.01
    bins = metrics.reliability_bins(confidence=above, correct=torch.ones(14))
    assert bins.count.tolist() == [0] + [1] * 14


def test_zero_is_in_the_first_bin_and_one_in_the_last():
    confidence = torch.tensor([0.0, 1.0, 1.0])
    bins = metrics.reliability_bins(confidence=confidence, correct=torch.tensor([True, True, False]), n_bins=4)
    assert bins.count.tolist() == [1, 0, 0, 2]
    assert bins.accuracy[[0, 3]].tolist() == [1.0, 0.5]
    assert bins.accuracy[1:3].isnan().all()
    assert bins.gap[[0, 3]].tolist() == [1.0, -0.5]
    assert bins.lower.tolist() == [0.0, 0.25, 0.5, 0.75]
    assert bins.upper.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_equal_mass_breaks_ties_by_row():
    confidence = torch.full((5,), 0.5)
    correct = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    bins = metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=2, estimator="equal_mass")
    assert bins.count.tolist() == [3, 2]
    assert bins.accuracy.tolist() == [1.0, 0.0]


def test_equal_mass_interp_leaves_the_lowest_sample_out_and_counts_it_in_n():
    confidence = torch.tensor([0.1, 0.4, 0.6, 0.9], dtype=torch.float64)
    correct = torch.tensor([1.0, 1.0, 1.0, 1.0])
    bins = metrics.reliability_bins(confidence=confidence, correct=correct, n_bins=2, estimator="equal_mass_interp")
    # Edges at the ranks 0, 2 and 4 (which means 3): 0.1, 0.6, 0.9.
    assert bins.count.tolist() == [2, 1]
    error = metrics.expected_calibration_error(
        confidence=confidence, correct=correct, n_bins=2, estimator="equal_mass_interp"
    )
    assert float(error) == pytest.approx((0.6 + 0.4 + 0.1) / 4)


def test_all_confidences_equal_have_no_interp_bin():
    error = metrics.expected_calibration_error(
        confidence=torch.full((9,), 0.7), correct=torch.zeros(9), estimator="equal_mass_interp"
    )
    assert float(error) == 0.0


@pytest.mark.parametrize("estimator", metrics.ESTIMATORS)
@pytest.mark.parametrize("function", BINNED)
def test_no_rows_are_nan(function, estimator, device):
    probs, target = torch.empty(0, 3, device=device), torch.empty(0, dtype=torch.int64, device=device)
    assert function(probs, target, estimator=estimator).isnan()


def test_no_rows_are_nan_for_scores():
    probs, target = torch.empty(0, 3), torch.empty(0, dtype=torch.int64)
    assert metrics.nll(probs, target).isnan()
    assert metrics.brier_score(probs, target).isnan()
    assert metrics.accuracy(probs, target).isnan()
    assert metrics.auroc(torch.empty(0), torch.rand(3)).isnan()
    assert metrics.auroc(torch.rand(2, 3), torch.empty(2, 0)).isnan().tolist() == [True, True]
    for function in UNBINNED:
        assert function(probs, target).isnan()
        assert function(confidence=torch.empty(2, 0), correct=torch.empty(2, 0)).isnan().tolist() == [True, True]
    assert metrics.smooth_calibration_error(probs, target, bandwidth=0.1).isnan()
    assert metrics.aurc(probs, target, excess=True).isnan()
    assert metrics.debiased_calibration_error(probs, target, norm="l1").isnan()


def test_correct_decides_when_it_is_given():
    """In a saturated row the probabilities tie, but the logits do not."""
    logits = torch.tensor([[200.0, 201.0, 0.0]])
    probs = torch.tensor([[0.5, 0.5, 0.0]])
    target = torch.tensor([1])
    assert metrics.expected_calibration_error(probs, target) == 0.5
    correct = logits.argmax(-1) == target
    assert metrics.reliability_bins(probs, correct=correct).accuracy.nansum() == 1.0
    assert metrics.reliability_bins(probs, target).accuracy.nansum() == 0.0


@pytest.mark.parametrize("estimator", ["equal_width", "equal_mass"])
def test_classwise_is_the_mean_over_classes(estimator, device):
    probs, target = sample(300, n_classes=7, device=device)
    per_class = [
        numpy_error(probs[:, k].cpu().numpy(), (target == k).cpu().numpy(), 15, estimator)[0] for k in range(7)
    ]
    result = metrics.classwise_calibration_error(probs, target, estimator=estimator)
    assert float(result) == pytest.approx(np.mean(per_class), abs=1e-12)


def test_classwise_without_reduction_is_each_class(device):
    probs, target = sample(300, n_classes=7, device=device)
    errors = metrics.classwise_calibration_error(probs, target, reduction="none")
    assert errors.shape == (7,)
    of_class = metrics.expected_calibration_error(confidence=probs[:, 3].contiguous(), correct=target == 3)
    assert_close(errors[3], of_class)
    assert_close(errors.mean(), metrics.classwise_calibration_error(probs, target))
    batch = metrics.classwise_calibration_error(probs.view(2, 150, 7), target.view(2, 150), reduction="none")
    assert_close(batch[1], metrics.classwise_calibration_error(probs[150:], target[150:], reduction="none"))


@pytest.mark.parametrize("name", ["expected", "maximum", "rms", "debiased", "classwise"])
def test_torchs_default_dtype_does_not_round_the_counts(name):
    """Libraries of language models set it to bfloat16, which rounds a count of 257 rows."""
    probs, target = sample(3001, dtype=torch.float64)
    function = getattr(metrics, f"{name}_calibration_error")
    expected = function(probs, target)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(function(probs, target), expected)
    finally:
        torch.set_default_dtype(before)
