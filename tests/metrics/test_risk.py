"""Risk against coverage, and the threshold with a bounded risk."""

import math

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern import metrics


def scipy_beta():
    return pytest.importorskip("scipy.stats", reason="scipy is not installed").beta


def test_the_curve_is_that_of_every_threshold():
    probs = torch.softmax(torch.randn(200, 4, dtype=torch.float64), -1).round(decimals=2)  # with ties
    target = torch.randint(4, (200,))
    curve = metrics.risk_coverage(probs, target)
    confidence, wrong = probs.amax(-1), probs.argmax(-1) != target
    assert torch.equal(curve.threshold, confidence.unique().flip(0))
    for t, coverage, risk in zip(curve.threshold, curve.coverage, curve.risk, strict=True):
        accepted = confidence >= t
        assert coverage == accepted.double().mean()
        assert risk == wrong[accepted].double().mean()


def test_without_ties_its_mean_is_the_aurc():
    confidence, correct = torch.rand(300, dtype=torch.float64), torch.rand(300) < 0.8
    curve = metrics.risk_coverage(confidence=confidence, correct=correct)
    torch.testing.assert_close(curve.risk.mean(), metrics.aurc(confidence=confidence, correct=correct))


def test_arrays_give_arrays():
    curve = metrics.risk_coverage(np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
    assert isinstance(curve.risk, np.ndarray)
    assert curve.risk.tolist() == [0.0, 0.5]
    assert fk.accept_threshold(np.array([[0.9, 0.1]] * 1000), np.zeros(1000, int)).n_accepted == 1000


def test_a_row_is_correct_or_not():
    """The bound is that of a binomial distribution."""
    scores, halves = torch.linspace(0, 1, 400), torch.full((400,), 0.5)
    with pytest.raises(ValueError, match=r"^accept_threshold: correct must be bool, or 0 and 1, got numbers between"):
        fk.accept_threshold(scores=scores, correct=halves)
    ones = torch.ones(400)
    assert fk.accept_threshold(scores=scores, correct=ones) == fk.accept_threshold(scores=scores, correct=ones > 0)


def test_no_rows():
    curve = metrics.risk_coverage(confidence=torch.zeros(0), correct=torch.zeros(0))
    assert curve.threshold.shape == curve.coverage.shape == curve.risk.shape == (0,)
    chosen = fk.accept_threshold(scores=torch.zeros(0), correct=torch.zeros(0))
    assert chosen.threshold == math.inf
    assert math.isnan(chosen.risk)


@pytest.mark.parametrize(("max_risk", "confidence"), [(0.02, 0.95), (0.1, 0.9), (0.2, 0.99)])
def test_the_bound_is_that_of_clopper_and_pearson(max_risk, confidence):
    scores = torch.rand(3000, dtype=torch.float64)
    correct = torch.rand(3000) > (1 - scores) ** 2
    chosen = fk.accept_threshold(scores=scores, correct=correct, max_risk=max_risk, confidence=confidence)
    accepted = scores >= chosen.threshold
    n, e = int(accepted.sum()), int((~correct[accepted]).sum())
    assert (chosen.n_accepted, chosen.n_errors) == (n, e)
    assert (chosen.coverage, chosen.risk) == (n / 3000, e / n)
    level = (1 - confidence) / 20
    assert chosen.bound == pytest.approx(scipy_beta().ppf(1 - level, e + 1, n - e), rel=1e-9)
    assert chosen.risk < chosen.bound <= max_risk
    assert 0 < chosen.coverage < 1


def test_no_candidate_of_larger_coverage_passes():
    scores = torch.rand(2000, dtype=torch.float64)
    correct = torch.rand(2000) > 0.4 * (1 - scores)
    chosen = fk.accept_threshold(scores=scores, correct=correct, max_risk=0.1)
    level, order = 0.05 / 20, scores.argsort(descending=True)
    errors = (~correct[order]).cumsum(0)
    least = math.ceil(math.log(level) / math.log1p(-0.1))
    counts = [least + (2000 - least) * i // 19 for i in range(20)]
    beta = scipy_beta()
    passing = [n for n in counts if beta.ppf(1 - level, int(errors[n - 1]) + 1, n - int(errors[n - 1])) <= 0.1]
    assert chosen.n_accepted == max(passing)


def test_the_risk_bound_holds():
    """Rows with known risk: P(wrong | score s) = (1 - s) / 2, so the risk of rows with s >= t is (1 - t) / 4."""
    above, chosen_some = 0, 0
    for _ in range(400):
        scores = torch.rand(1500, dtype=torch.float64)
        correct = torch.rand(1500) > 0.5 * (1 - scores)
        chosen = fk.accept_threshold(scores=scores, correct=correct, max_risk=0.1, confidence=0.8)
        if chosen.n_accepted:
            chosen_some += 1
            above += (1 - chosen.threshold) / 4 > 0.1
    assert chosen_some > 300
    assert above <= 0.2 * 400


def test_rows_of_equal_confidence_are_accepted_together():
    scores = torch.tensor([0.9] * 500 + [0.6] * 500)
    correct = torch.tensor([True] * 500 + [False] * 500)
    chosen = fk.accept_threshold(scores=scores, correct=correct)
    assert (chosen.threshold, chosen.n_accepted, chosen.n_errors) == (pytest.approx(0.9), 500, 0)
    assert str(chosen).startswith("Accept confidence >= 0.9000: 50.0% of the rows, risk 0.0000 (below 0.0119")


@pytest.mark.parametrize("threshold", [0.25, 0.9, 0.987654, 0.99996123, 0.99999994, 1.0])
def test_the_printed_threshold_has_digits_near_one(threshold):
    """Most rows of a confident network differ after the fourth digit, where 1.0000 would accept none."""
    scores = torch.full((500,), threshold, dtype=torch.float64)
    chosen = fk.accept_threshold(scores=scores, correct=torch.ones(500))
    assert chosen.n_accepted == 500
    printed = float(str(chosen).split(">= ")[1].split(":")[0])
    assert 1 - printed == pytest.approx(1 - threshold, rel=0.01, abs=0)


def test_the_sentence_prints_the_level_and_small_risks():
    few = fk.accept_threshold(scores=torch.ones(2), correct=torch.ones(2), confidence=0.999)
    assert str(few) == "No threshold keeps the risk below 0.02 with 99.9% confidence."
    many = fk.accept_threshold(scores=torch.ones(200_000), correct=torch.arange(200_000) > 1, confidence=0.995)
    assert str(many).endswith("risk 1e-05 (below 6.4e-05 with 99.5% confidence).")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_risk": 0.0}, ValueError, "max_risk must be between 0 and 1, got 0.0"),
        ({"confidence": 1.0}, ValueError, "confidence must be between 0 and 1, got 1.0"),
        ({"max_risk": "2%"}, TypeError, "max_risk must be a number, got str"),
        (
            {"probs": torch.full((3, 4, 2), 0.5), "target": torch.zeros(3, 4, dtype=torch.long)},
            ValueError,
            "got a batch",
        ),
        ({"probs": torch.ones(2, 2)}, ValueError, "expected either target or correct"),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=f"accept_threshold: .*{message}"):
        fk.accept_threshold(**options)


def test_the_picture():
    plots = pytest.importorskip("focalkern.plots", reason="matplotlib is not installed", exc_type=ImportError)
    scores = torch.rand(3000, dtype=torch.float64)
    correct = torch.rand(3000) > 0.5 * (1 - scores)
    curve = metrics.risk_coverage(confidence=scores, correct=correct)
    chosen = fk.accept_threshold(scores=scores, correct=correct, max_risk=0.1)
    axes = plots.risk_coverage({"a": curve, "b": curve}, accept=chosen, title="two").axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["a", "b", "max_risk = 0.1", f"accept confidence >= {chosen.threshold:.4f}"]
    assert axes.lines[0].get_ydata().tolist() == curve.risk.tolist()
    assert [line.get_ydata()[0] for line in axes.lines[-2:]] == [chosen.risk, chosen.risk]
    assert plots.risk_coverage(curve).axes[0].get_legend() is None
    none = fk.accept_threshold(scores=scores, correct=correct, max_risk=1e-4)
    assert len(plots.risk_coverage(curve, accept=none).axes[0].lines) == 2
    with pytest.raises(TypeError, match=r"curves must be of metrics\.risk_coverage, got 3"):
        plots.risk_coverage(3)
    with pytest.raises(ValueError, match="curves must be 1 to 4, got 0"):
        plots.risk_coverage({})
    with pytest.raises(TypeError, match=r"accept must be an AcceptThreshold, got 0\.5"):
        plots.risk_coverage(curve, accept=0.5)
