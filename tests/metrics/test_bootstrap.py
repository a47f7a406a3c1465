"""The bootstrap: replicates compared with metrics of resampled rows, intervals, pairing, and the bias floor."""

import math

import pytest
import torch
from bootstrap_cases import sample
from conftest import assert_close

from focalkern import bootstrap, metrics
from focalkern.bootstrap import bias_floor, paired_bootstrap
from focalkern.bootstrap._figures import NAMES_IN_WORDS
from focalkern.bootstrap._resampling import resample_weights

METRICS = {
    "accuracy": metrics.accuracy,
    "nll": metrics.nll,
    "brier": metrics.brier_score,
    "ece_equal_width": metrics.expected_calibration_error,
    "ece_equal_mass": lambda p, y, n_bins: metrics.expected_calibration_error(
        p, y, n_bins=n_bins, estimator="equal_mass"
    ),
    "ece_equal_mass_interp": lambda p, y, n_bins: metrics.expected_calibration_error(
        p, y, n_bins=n_bins, estimator="equal_mass_interp"
    ),
    "classwise_ece_equal_width": metrics.classwise_calibration_error,
}


def metric(figure, probs, target, n_bins):
    options = {"n_bins": n_bins} if "ece" in figure else {}
    return float(METRICS[figure](probs, target, **options))


# More rows than bins, fewer, one; and 15 bins, one, two (the first bin is summed in another way).
@pytest.mark.parametrize("n", [211, 6, 1])
@pytest.mark.parametrize("n_bins", [15, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replicates_are_the_metrics_of_rows_drawn_again(n, n_bins, dtype, device):
    logits, target = sample(n, dtype=dtype, device=device)
    probs = {"sharp": (2 * logits).softmax(-1), "flat": (logits / 2).softmax(-1)}
    probs["sharp"][n // 3 : n // 2] = probs["sharp"][0]  # ties, also across the cuts of equal-mass bins
    found = paired_bootstrap(probs, target, n_bins=n_bins, n_resamples=8, seed=5)
    weights = resample_weights(n, range(8), 5)
    assert weights.sum(1).tolist() == [n] * 8
    for k, name in enumerate(found.names):
        for j, figure in enumerate(found.figures):
            assert float(found.estimates[k, j]) == pytest.approx(
                metric(figure, probs[name], target, n_bins), rel=1e-12, abs=1e-13
            )
            for r in range(8):
                rows = torch.repeat_interleave(torch.arange(n), weights[r].long()).to(device)
                expected = metric(figure, probs[name][rows], target[rows], n_bins)
                assert float(found.replicates[k, j, r]) == pytest.approx(expected, rel=1e-12, abs=1e-13), figure


def test_confidences_alone_give_the_same_figures():
    logits, target = sample(80)
    probs = logits.softmax(-1)
    confidence, predicted = probs.max(-1)
    whole = paired_bootstrap({"a": probs}, target, n_resamples=5)
    top = paired_bootstrap(confidence={"a": confidence}, correct=predicted == target, n_resamples=5)
    assert top.figures == ("accuracy", "ece_equal_width", "ece_equal_mass", "ece_equal_mass_interp")
    for j, figure in enumerate(top.figures):
        assert_close(top.replicates[:, j], whole.replicates[:, whole.figures.index(figure)])
    by_name = paired_bootstrap(confidence={"a": confidence}, correct={"a": predicted == target}, n_resamples=5)
    assert torch.equal(by_name.replicates, top.replicates)


def test_log_probabilities_keep_the_likelihood_that_probabilities_lose():
    log_probs = torch.tensor([[-1e-20, -46.0], [-800.0, 0.0]], dtype=torch.float64)
    target = torch.tensor([0, 0])
    found = paired_bootstrap({"a": log_probs}, target, log=True, figures="nll", n_resamples=4)
    assert float(found.estimates[0, 0]) == 400.0
    logits, target = sample(50)
    plain = paired_bootstrap({"a": logits.softmax(-1)}, target, n_resamples=4)
    logged = paired_bootstrap({"a": logits.log_softmax(-1)}, target, log=True, n_resamples=4)
    assert_close(logged.replicates, plain.replicates)


def test_correct_may_come_from_the_logits():
    """In a saturated row the probabilities tie, while the logits differ."""
    probs = torch.tensor([[0.5, 0.5]])
    target = torch.tensor([1])
    assert paired_bootstrap({"a": probs}, target, n_resamples=1).interval("a", "accuracy").estimate == 0
    found = paired_bootstrap({"a": probs}, target, correct=torch.tensor([True]), n_resamples=1)
    assert found.interval("a", "accuracy").estimate == 1
    assert found.interval("a", "nll").estimate == pytest.approx(math.log(2))


def test_the_result_does_not_depend_on_memory_and_company(monkeypatch):
    logits, target = sample(60)
    probs = {"a": logits.softmax(-1), "b": (logits / 3).softmax(-1)}
    together = paired_bootstrap(probs, target, n_resamples=30, seed=1)
    monkeypatch.setattr("focalkern.bootstrap._resampling._CHUNK", 60 * 7)
    assert_close(paired_bootstrap(probs, target, n_resamples=30, seed=1).replicates, together.replicates)
    alone = paired_bootstrap({"b": probs["b"]}, target, n_resamples=30, seed=1)
    assert_close(alone.replicates[0], together.replicates[1])
    fewer = paired_bootstrap(probs, target, n_resamples=10, seed=1)
    assert_close(fewer.replicates, together.replicates[..., :10])
    other = paired_bootstrap(probs, target, n_resamples=30, seed=2)
    assert not torch.equal(other.replicates, together.replicates)


def test_one_calibrator_is_in_memory_at_a_time():
    logits, target = sample(30)
    asked = []

    class Lazy(dict):
        def __getitem__(self, name):
            asked.append(name)
            return (logits / super().__getitem__(name)).softmax(-1)

    paired_bootstrap(Lazy({"a": 1.0, "b": 2.0}), target, n_resamples=3)
    assert asked == ["a", "b"]


def test_intervals_are_what_their_names_say():
    estimate, replicates = 0.25, torch.linspace(0.2, 0.4, 101, dtype=torch.float64)

    def interval(method):
        found = bootstrap.PairedBootstrap(
            names=("a",),
            figures=("ece_equal_width",),
            estimates=torch.tensor([[estimate]]),
            replicates=replicates[None, None],
            n_samples=1,
            n_bins=15,
            level=0.9,
            method=method,
            seed=0,
        ).interval("a", "ece_equal_width")
        assert found.estimate == estimate
        return found.low, found.high

    assert interval("percentile") == pytest.approx((0.21, 0.39))
    assert interval("basic") == pytest.approx((0.11, 0.29))
    # |replicate - 0.25| is at most 0.05 for 51 of the 101, and then grows by 0.002 each: the 91st has 0.13.
    assert interval("symmetric") == pytest.approx((0.12, 0.38))


def test_ends_stay_where_the_figure_can_be():
    confidence = torch.linspace(0.5, 1, 100, dtype=torch.float64)
    correct = torch.rand(100) < confidence
    given = {"confidence": {"a": confidence, "b": confidence.sqrt()}, "correct": correct, "n_resamples": 200}
    for method in ("symmetric", "basic"):
        found = paired_bootstrap(**given, level=0.999, method=method)
        assert found.interval("a", "ece_equal_width").low == 0.0
        assert found.interval("a", "accuracy").high <= 1.0
        # A difference may have either sign.
        assert found.difference("a", "b", "ece_equal_width").low < 0


@pytest.mark.parametrize("method", bootstrap.METHODS)
@pytest.mark.parametrize("n", [1, 50])
def test_the_accuracy_of_rows_that_agree_has_the_exact_interval(method, n):
    """Clopper and Pearson: the accuracy at which all rows agree with probability (1 - level) / 2."""
    confidence = torch.linspace(0.5, 0.99, n, dtype=torch.float64)
    for right in (True, False):
        given = {"confidence": {"a": confidence}, "correct": torch.full((n,), right), "n_resamples": 20}
        found = paired_bootstrap(**given, level=0.9, method=method).interval("a", "accuracy")
        assert found.estimate == float(right)
        inner, outer = (found.low, found.high) if right else (1 - found.high, 1 - found.low)
        assert inner**n == pytest.approx(0.05) and outer == 1
    if n > 1:  # one row that differs is enough for the bootstrap
        mixed = paired_bootstrap(**{**given, "correct": torch.arange(n) > 0}, level=0.9, method=method)
        assert 0.9 < mixed.interval("a", "accuracy").low < 0.98


def test_a_better_calibrator_has_an_interval_beyond_zero():
    logits, target = sample(1000)
    probs = {"good": logits.softmax(-1), "bad": (20 * logits).softmax(-1), "same": logits.softmax(-1)}
    correct = {"good": torch.ones(1000), "bad": logits.argmax(-1) == target, "same": torch.ones(1000)}
    found = paired_bootstrap(probs, target, correct=correct, n_resamples=200)
    for figure in ("nll", "brier", "classwise_ece_equal_width", "accuracy"):
        assert found.difference("good", "bad", figure).excludes_zero
        assert found.wins("good", "bad", figure) and not found.wins("bad", "good", figure)
    for figure in found.figures:
        assert found.difference("good", "same", figure) == bootstrap.Interval(0.0, 0.0, 0.0)
        assert not found.wins("good", "same", figure)


def test_texts_follow_the_interval():
    logits, target = sample(1000)
    probs = {
        "T = 1": logits.softmax(-1),
        "T = 0.05": (20 * logits).softmax(-1),
        "T = 1.001": (logits / 1.001).softmax(-1),
    }
    found = paired_bootstrap(probs, target, n_resamples=200)
    difference = found.difference("T = 1", "T = 0.05", "brier")
    assert found.describe("T = 1", "T = 0.05", "brier") == (
        "Brier score of T = 1 is better than that of T = 0.05 beyond chance: the difference is "
        f"{difference.estimate:+.4f}, 95 % interval {difference.low:+.4f} to {difference.high:+.4f}."
    )
    assert "is worse than that of T = 1 beyond chance" in found.describe("T = 0.05", "T = 1", "nll")
    assert found.describe("T = 1", "T = 1", "accuracy") == (
        "accuracy does not distinguish T = 1 and T = 1: the difference is +0.0000, and its 95 % interval "
        "+0.0000 to +0.0000 contains 0."
    )
    certain = torch.eye(5, dtype=torch.float64)[(target + 1) % 5]
    found = paired_bootstrap({"a": probs["T = 1"], "b": certain}, target, n_resamples=5)
    assert "cannot be compared" in found.describe("a", "b", "nll")
    few = paired_bootstrap({"a": probs["T = 1"][:19], "b": probs["T = 0.05"][:19]}, target[:19], n_resamples=50)
    assert few.describe("a", "b", "nll") == "NLL of a and b cannot be compared: 19 rows are too few."
    assert not any(few.wins(one, other, "nll") for one, other in (("a", "b"), ("b", "a")))
    floor = bias_floor(probs["T = 1"], n_resamples=100)["ece_equal_mass"]
    assert floor.describe(0.4).startswith("ECE (equal_mass) of 0.4000 is more than noise: a perfectly calibrated model")
    assert f"scores {floor.mean:.4f} on average, and at most {floor.quantile(0.95):.4f} on" in floor.describe(0.4)
    assert "of 0.0100 is not distinguishable from noise" in floor.describe(0.01)
    assert set(NAMES_IN_WORDS) == set(bootstrap.FIGURES)


def test_pairing_removes_common_noise_from_the_difference():
    logits, target = sample(2000)
    found = paired_bootstrap({"a": logits.softmax(-1), "b": (1.05 * logits).softmax(-1)}, target, n_resamples=200)
    alone = found.interval("a", "nll")
    paired = found.difference("a", "b", "nll")
    assert paired.high - paired.low < (alone.high - alone.low) / 5


def test_an_infinite_nll_has_no_interval_and_changes_no_other():
    probs = torch.tensor([[0.7, 0.3], [1.0, 0.0], [0.2, 0.8], [0.6, 0.4]], dtype=torch.float64)
    target = torch.tensor([0, 1, 1, 0])
    found = paired_bootstrap({"a": probs, "b": probs.clamp(0.1, 0.9)}, target, n_resamples=20)
    nll = found.interval("a", "nll")
    assert nll.estimate == math.inf
    assert math.isnan(nll.low) and math.isnan(nll.high)
    assert not found.difference("a", "b", "nll").excludes_zero
    assert not found.wins("b", "a", "nll")
    # Resamples without this row are finite.
    drawn = resample_weights(4, range(20), 0)[:, 1] > 0
    replicates = found.replicates[0, found.figures.index("nll")]
    assert 0 < int(drawn.sum()) < 20
    assert torch.equal(replicates.isinf(), drawn) and not replicates.isnan().any()
    for figure in found.figures:
        if figure != "nll":
            assert math.isfinite(found.interval("a", figure).high)


def test_no_rows_are_nan():
    found = paired_bootstrap({"a": torch.empty(0, 3)}, torch.empty(0, dtype=torch.int64), n_resamples=3)
    assert found.replicates.isnan().all()
    for figure in found.figures:
        interval = found.interval("a", figure)
        assert math.isnan(interval.estimate) and math.isnan(interval.low) and not interval.excludes_zero
    for floor in bias_floor(torch.empty(0, 3), n_resamples=3).values():
        assert math.isnan(floor.mean) and math.isnan(floor.quantile(0.9)) and math.isnan(floor.p_value(0.1))


def test_a_bar_shows_when_it_is_asked_for(capsys):
    pytest.importorskip("tqdm")
    probs, target = sample(10)
    paired_bootstrap({"a": probs.softmax(-1)}, target, n_resamples=3)
    assert capsys.readouterr().err == ""
    paired_bootstrap({"a": probs.softmax(-1)}, target, n_resamples=3, progress=True)
    bias_floor(probs.softmax(-1), n_resamples=3, progress=True)
    shown = capsys.readouterr()
    assert "bootstrap" in shown.err and "bias floor" in shown.err
    assert shown.out == ""


# Each with words that the message must contain: expected and received.
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p, y: paired_bootstrap(None, y), ValueError, "either probs or confidence, got neither"),
        (lambda p, y: paired_bootstrap({"a": p}, y, confidence={"a": p[:, 0]}), ValueError, "got both"),
        (lambda p, y: paired_bootstrap(p, y), TypeError, "names to tensors, got Tensor; pass {'name': probs}"),
        (lambda p, y: paired_bootstrap({}, y), ValueError, "at least one calibrator, got none"),
        (lambda p, y: paired_bootstrap({"T": p.log()}, y), ValueError, "'T': probs must be in [0, 1]"),
        (lambda p, y: paired_bootstrap({"T": p}, y, log=True), ValueError, "'T': probs must be log-probabilities"),
        (lambda p, y: paired_bootstrap({"T": p[None]}, y[None]), ValueError, "'T': probs must be [N, C], got shape"),
        (lambda p, y: paired_bootstrap({"T": p}, y + 3), IndexError, "'T': target must be in [0, 3)"),
        (lambda p, y: paired_bootstrap({"a": p, "b": p[:3]}, y), ValueError, "'b': target must be [N] = [3], got [4]"),
        (
            lambda p, y: paired_bootstrap(
                confidence={"a": p[:, 0], "b": p[:3, 0]}, correct={"a": y > 0, "b": y[:3] > 0}
            ),
            ValueError,
            "every calibrator must have the same rows, got 3 for 'b' and 4 for 'a'",
        ),
        (lambda p, y: paired_bootstrap({"a": p}, y, correct={"b": y}), ValueError, "entry for every calibrator, got b"),
        (lambda p, y: paired_bootstrap(confidence={"a": p[:, 0]}, target=y), ValueError, "confidence needs correct"),
        (lambda p, y: paired_bootstrap(confidence={"a": p[:, 0]}), ValueError, "target or correct, got neither"),
        (lambda p, y: paired_bootstrap({"a": p}, y, figures=("mce",)), ValueError, "figures must be from accuracy,"),
        (lambda p, y: paired_bootstrap({"a": p}, y, figures=()), ValueError, "got none"),
        (
            lambda p, y: paired_bootstrap(confidence={"a": p[:, 0]}, correct=y > 0, figures="nll"),
            ValueError,
            "got 'nll'",
        ),
        (
            lambda p, y: paired_bootstrap({"a": p}, y, n_resamples=0),
            ValueError,
            "n_resamples must be at least 1, got 0",
        ),
        (lambda p, y: paired_bootstrap({"a": p}, y, n_bins=2.0), TypeError, "n_bins must be an int, got 2.0"),
        (lambda p, y: paired_bootstrap({"a": p}, y, seed=-1), ValueError, "seed must be at least 0, got -1"),
        (lambda p, y: paired_bootstrap({"a": p}, y, level=95), ValueError, "level must be in (0, 1), got 95"),
        (
            lambda p, y: paired_bootstrap({"a": p}, y, method="bca"),
            ValueError,
            "symmetric, basic, percentile, got 'bca'",
        ),
        (lambda p, y: bias_floor(), ValueError, "either probs or confidence, got neither"),
        (lambda p, y: bias_floor(p, confidence=p[:, 0]), ValueError, "got both"),
        (lambda p, y: bias_floor(p, figures="nll"), ValueError, "got 'nll'"),
        (lambda p, y: bias_floor(confidence=p), ValueError, "confidence must be [N], got shape [4, 3]"),
        (lambda p, y: bias_floor(p.log()), ValueError, "probs must be in [0, 1]"),
        (lambda p, y: paired_bootstrap({"a": p}, y, n_resamples=1).interval("b", "nll"), ValueError, "got 'b'"),
        (lambda p, y: paired_bootstrap({"a": p}, y, n_resamples=1).wins("a", "a", "ece"), ValueError, "got 'ece'"),
    ],
)
def test_bad_input_is_named(call, error, words):
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]])
    target = torch.tensor([0, 1, 2, 0])
    with pytest.raises(error) as caught:
        call(probs, target)
    assert words in str(caught.value)


def test_pixels_are_told_to_be_rows():
    probs, target = torch.randn(4, 3, 2, 2).softmax(1), torch.randint(3, (4, 2, 2))
    with pytest.raises(ValueError, match=r"'a': probs must be \[N, C\], got shape \[4, 3, 2, 2\]; pass pixels as rows"):
        paired_bootstrap({"a": probs}, target, n_resamples=10)
    rows = probs.movedim(1, -1).flatten(0, -2)  # the remedy of the error
    assert paired_bootstrap({"a": rows}, target.flatten(), n_resamples=10).n_samples == 16
