"""Coverage of the intervals, and the bias floor."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from bootstrap_cases import sample
from conftest import assert_close

from focalkern import bootstrap, metrics
from focalkern.bootstrap import bias_floor, paired_bootstrap
from focalkern.bootstrap._resampling import uniform_draws

# Confidences at the centres of bins, so that the ECE of infinitely many rows is a sum of nine terms.
LEVELS = torch.arange(9, dtype=torch.float64) / 20 + 0.525
SHARE = torch.arange(1, 10, dtype=torch.float64) / 45


def test_intervals_contain_the_truth_at_their_level():
    """120 data sets of known ECE. The number of covering intervals is binomial, with 3 standard deviations allowed."""
    generator = torch.Generator().manual_seed(7)
    n, trials, level = 800, 120, 0.9
    # Confidence minus accuracy of each level, with both signs and far from 0. Model b's confidences are 0.05 higher.
    gap = 0.1 * torch.tensor([-1.0, -1, -1, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
    chance = LEVELS - gap
    truth = {
        "accuracy": float((SHARE * chance).sum()),
        "ece_equal_width": float((SHARE * gap.abs()).sum()),
        "difference": float((SHARE * ((gap + 0.05).abs() - gap.abs())).sum()),
    }
    covered = dict.fromkeys(truth, 0)
    for trial in range(trials):
        row = torch.multinomial(SHARE, n, replacement=True, generator=generator)
        found = paired_bootstrap(
            confidence={"a": LEVELS[row], "b": LEVELS[row] + 0.05},
            correct=torch.rand(n, generator=generator, dtype=torch.float64) < chance[row],
            n_bins=20,
            n_resamples=200,
            level=level,
            seed=trial,
            figures=("ece_equal_width", "accuracy"),
        )
        intervals = {
            "accuracy": found.interval("a", "accuracy"),
            "ece_equal_width": found.interval("a", "ece_equal_width"),
            "difference": found.difference("b", "a", "ece_equal_width"),
        }
        for name, interval in intervals.items():
            covered[name] += interval.low <= truth[name] <= interval.high
    slack = 3 * math.sqrt(level * (1 - level) * trials)
    for name, count in covered.items():
        assert count >= level * trials - slack, (name, count)
    # Accuracy is a mean: its interval must not be too wide either.
    assert covered["accuracy"] <= level * trials + slack


def test_equally_good_calibrators_seldom_win():
    """With temperatures 1 and 1.0001, only a few rows are in different bins."""
    generator = torch.Generator().manual_seed(8)
    wins = dict.fromkeys(bootstrap.METHODS, 0)
    trials = 60
    for trial in range(trials):
        logit = (2.5 + 1.6 * torch.randn(1000, generator=generator, dtype=torch.float64)).abs()
        confidence, other = logit.sigmoid(), (logit / 1.0001).sigmoid()
        correct = torch.rand(1000, generator=generator, dtype=torch.float64) < confidence
        found = paired_bootstrap(
            confidence={"a": confidence, "b": other},
            correct=correct,
            n_resamples=200,
            seed=trial,
            figures="ece_equal_width",
        )
        for method in wins:
            difference = dataclasses.replace(found, method=method).difference("a", "b", "ece_equal_width")
            wins[method] += difference.excludes_zero
    # At level 0.95 three of sixty are expected; three standard deviations more make eight.
    assert wins["symmetric"] <= 8
    # The module's docstring states this about the basic interval.
    assert wins["basic"] > 8


@pytest.mark.parametrize("n_bins", [15, 1, 100])
def test_the_floor_is_the_metric_of_labels_drawn_from_the_model(n_bins, device):
    logits, _ = sample(90, device=device)
    probs = logits.softmax(-1)
    probs[20:40] = probs[0]
    floors = bias_floor(probs, n_bins=n_bins, n_resamples=6, seed=3)
    confidence = probs.amax(-1).sort().values
    ladder = probs.cumsum(-1)
    for r in range(6):
        draws = uniform_draws(90, range(r, r + 1), 3)[0].to(device)
        for estimator in metrics.ESTIMATORS:
            expected = metrics.expected_calibration_error(
                confidence=confidence, correct=draws < confidence, n_bins=n_bins, estimator=estimator
            )
            assert_close(floors[f"ece_{estimator}"].samples[r], expected)
        labels = (draws.unsqueeze(-1) >= ladder).sum(-1)
        expected = metrics.classwise_calibration_error(probs, labels, n_bins=n_bins)
        assert_close(floors["classwise_ece_equal_width"].samples[r], expected)


def test_the_floor_has_the_mean_of_theory():
    """One bin: the floor is |sum of centred Bernoulli variables| / N, its mean sqrt(2 / pi) standard deviations."""
    confidence = torch.linspace(0.5, 1, 3000, dtype=torch.float64)
    deviation = float((confidence * (1 - confidence)).sum().sqrt()) / 3000
    floor = bias_floor(confidence=confidence, n_bins=1, n_resamples=4000, figures="ece_equal_width")["ece_equal_width"]
    # 4000 half-normal samples: the mean is known to 1.2 %.
    assert floor.mean == pytest.approx(math.sqrt(2 / math.pi) * deviation, rel=0.05)
    assert floor.quantile(0.95) == pytest.approx(1.96 * deviation, rel=0.08)


def test_the_floor_of_a_model_that_cannot_err_is_zero():
    floors = bias_floor(torch.eye(3).repeat(5, 1), n_resamples=4)
    assert all(float(floor.samples.abs().max()) == 0 for floor in floors.values())


def test_p_values_tell_calibrated_from_overconfident():
    generator = torch.Generator().manual_seed(1)
    confidence = 0.5 + 0.5 * torch.rand(2000, generator=generator, dtype=torch.float64)
    floor = bias_floor(confidence=confidence, figures="ece_equal_mass", n_resamples=300)["ece_equal_mass"]
    drawn = torch.rand(40, 2000, generator=generator, dtype=torch.float64)
    calibrated = metrics.expected_calibration_error(
        confidence=confidence.expand(40, -1), correct=drawn < confidence, estimator="equal_mass"
    )
    p_values = np.array([floor.p_value(float(value)) for value in calibrated])
    # Uniform on (0, 1): a mean of 1/2 within 3 / sqrt(12 * 40).
    assert abs(p_values.mean() - 0.5) < 3 / math.sqrt(12 * 40)
    overconfident = metrics.expected_calibration_error(
        confidence=confidence, correct=drawn[0] < confidence - 0.1, estimator="equal_mass"
    )
    assert floor.p_value(float(overconfident)) == 1 / 301


def test_the_floor_does_not_depend_on_memory(monkeypatch):
    probs = sample(70)[0].softmax(-1)
    before = bias_floor(probs, n_resamples=20)
    monkeypatch.setattr("focalkern.bootstrap._resampling._CHUNK", 300)
    for figure, floor in bias_floor(probs, n_resamples=20).items():
        assert_close(floor.samples, before[figure].samples)
