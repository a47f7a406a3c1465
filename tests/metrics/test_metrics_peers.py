"""The metrics compared with other libraries: where they agree, and where they differ by definition."""

import numpy as np
import pytest
import torch
from conftest import peer

from focalkern import metrics

peers = pytest.importorskip("benchmarks.speed.metrics_peers", reason="the benchmarks are in the source tree only")


@pytest.fixture(scope="session")
def digits():
    """(probabilities [1197, 10] in float64, labels) of a small network, over-confident after training on 600 digits."""
    images, labels = peer("sklearn.datasets").load_digits(return_X_y=True)
    images, labels = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(40):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[:600]), labels[:600]).backward()
            optimizer.step()
    with torch.no_grad():
        return model(images[600:]).double().softmax(-1), labels[600:]


def test_the_network_is_worth_measuring(digits):
    probs, target = digits
    assert 0.85 < metrics.accuracy(probs, target) < 0.99
    assert metrics.expected_calibration_error(probs, target) > 0.01


@pytest.mark.parametrize("library", list(peers.LIBRARIES))
def test_figures_agree(library, digits):
    _, module, compare = peers.LIBRARIES[library]
    if module is not None:
        peer(module)
    probs, target = digits
    # Rows for which definitions differ (on an edge, next to 1, or tied) have their own tests below.
    confidence = probs.amax(-1)
    place = confidence.float() * peers.N_BINS
    plain = (confidence < 1 - 1e-3) & ((place - place.round()).abs() > 1e-5)
    _, first = np.unique(confidence.numpy(), return_index=True)
    unique = torch.zeros_like(plain)
    unique[torch.from_numpy(first)] = True
    plain &= unique
    assert int(plain.sum()) > 500
    comparisons = list(compare(probs[plain], target[plain]))
    assert comparisons
    for comparison in comparisons:
        assert comparison.difference <= comparison.allowed < 0.01, comparison


def test_torchmetrics_closes_the_other_side_of_its_bins():
    functional = peer("torchmetrics.functional.classification")
    # Confidences 2/3 and 0.7, one correct and one wrong: torchmetrics has both in [2/3, 11/15), focalkern in (9/15,
    # 2/3] and (2/3, 11/15].
    confidence = torch.tensor([10 / 15, 0.7])
    probs = torch.stack([confidence, 1 - confidence], -1)
    target = torch.tensor([0, 1])
    theirs = functional.multiclass_calibration_error(probs, target, num_classes=2, n_bins=15)
    assert float(theirs) == pytest.approx(abs(1 - 10 / 15 - 0.7) / 2, abs=1e-6)
    ours = metrics.expected_calibration_error(probs, target)
    assert float(ours) == pytest.approx((5 / 15 + 0.7) / 2, abs=1e-6)


def test_torchmetrics_gives_certainty_a_bin_of_its_own():
    functional = peer("torchmetrics.functional.classification")
    probs = torch.tensor([[1.0, 0.0], [0.96, 0.04]])
    target = torch.tensor([0, 1])
    theirs = functional.multiclass_calibration_error(probs, target, num_classes=2, n_bins=15)
    assert float(theirs) == pytest.approx(0.96 / 2, abs=1e-6)
    assert float(metrics.expected_calibration_error(probs, target)) == pytest.approx((1 + 0.96) / 2 - 0.5, abs=1e-6)


def test_netcal_closes_the_other_side_of_its_bins_but_the_last():
    library = peer("netcal.metrics")
    confidence = torch.tensor([10 / 15, 0.7, 1.0], dtype=torch.float64)
    probs = torch.stack([confidence, 1 - confidence, 0 * confidence], -1)
    target = torch.tensor([0, 1, 2])  # three classes, because netcal treats two as a binary problem
    theirs = library.ECE(15).measure(probs.numpy(), target.numpy())
    assert theirs == pytest.approx((abs(1 - 10 / 15 - 0.7) + 1) / 3)
    assert float(metrics.expected_calibration_error(probs, target)) == pytest.approx((5 / 15 + 0.7 + 1) / 3)


def test_netcal_measures_two_classes_on_the_second():
    """For C = 2 its ECE is that of P(class 1), ours of the top class: ``confidence=probs[:, 1], correct=target``."""
    library = peer("netcal.metrics")
    confidence = torch.linspace(0.05, 0.93, 40, dtype=torch.float64)
    probs = torch.stack([1 - confidence, confidence], -1)
    target = (torch.rand(40, dtype=torch.float64) < confidence).long()
    theirs = library.ECE(15).measure(probs.numpy(), target.numpy())
    ours = metrics.expected_calibration_error(confidence=confidence, correct=target)
    assert theirs == pytest.approx(float(ours))
    assert abs(theirs - float(metrics.expected_calibration_error(probs, target))) > 0.01


def test_scikit_learn_quantiles_are_other_cuts_where_bins_cannot_be_equal():
    calibration = peer("sklearn.calibration")
    confidence = torch.linspace(0.5, 1, 23, dtype=torch.float64)  # 15 bins of 23 rows: 8 of two, 7 of one
    correct = torch.arange(23) % 3 > 0
    _, mean = calibration.calibration_curve(correct.numpy(), confidence.numpy(), n_bins=15, strategy="quantile")
    bins = metrics.reliability_bins(confidence=confidence, correct=correct, estimator="equal_mass")
    assert bins.count.tolist() == [2] * 8 + [1] * 7
    assert np.abs(mean - bins.confidence.numpy()).max() > 0.01


def test_scikit_learn_counts_one_of_two_classes_in_the_brier_score():
    scores = peer("sklearn.metrics")
    chance = torch.rand(50, dtype=torch.float64)
    target = (torch.rand(50, dtype=torch.float64) < chance).long()
    theirs = scores.brier_score_loss(target.numpy(), chance.numpy())
    ours = metrics.brier_score(torch.stack([1 - chance, chance], -1), target)
    assert float(ours) == pytest.approx(2 * theirs)


@pytest.mark.parametrize("right", [False, True])
def test_monai_is_classwise_per_image(right):
    """It has no ignored labels, so all pixels count here."""
    library = peer("monai.metrics")
    probs = (2 * torch.randn(5, 4, 9, 7, generator=torch.Generator().manual_seed(0))).softmax(1)
    target = torch.randint(4, (5, 9, 7), generator=torch.Generator().manual_seed(1))
    metric = library.CalibrationErrorMetric(num_bins=15, right=right)
    metric(y_pred=probs, y=torch.nn.functional.one_hot(target, 4).movedim(-1, 1))
    ours = metrics.classwise_calibration_error(probs, target, per="image")
    assert metric.aggregate().item() == pytest.approx(ours.item(), rel=1e-5)


def test_relplot_loses_half_of_the_rows_that_are_certain():
    """With a bandwidth as wide as [0, 1] the error is |mean confidence - accuracy|, for all confidences."""
    relplot = peer("relplot")
    confidence, correct = np.array([1.0, 1.0, 1.0, 0.6]), np.array([1.0, 1.0, 1.0, 0.0])
    ours = metrics.smooth_calibration_error(confidence=confidence, correct=correct, bandwidth=5.0)
    assert float(ours) == pytest.approx(0.6 / 4)
    assert relplot.smECE_sigma(confidence, correct, sigma=0.3) > 1.3 * 0.6 / 4


def test_uncertainty_calibration_puts_tied_rows_into_one_bin():
    library = peer("calibration")
    confidence, correct = np.full(4, 0.7), np.array([1, 1, 0, 0])
    assert library.utils.get_ece_em(confidence, correct, num_bins=2) == pytest.approx(0.2)
    ours = metrics.expected_calibration_error(confidence=confidence, correct=correct, n_bins=2, estimator="equal_mass")
    assert float(ours) == pytest.approx((0.3 + 0.7) / 2)
