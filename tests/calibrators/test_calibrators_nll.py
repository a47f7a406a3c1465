"""Temperature scaling by the derivative of the NLL: compared with other optimizers, and data without an optimum."""

import math
import sys

import mpmath
import numpy as np
import pytest
import torch
from conftest import peer

import focalkern as fk
from focalkern import fallback
from focalkern.calibrators import TEMPERATURE_BOUNDS, TemperatureScaling

# The data are small or odd, so many fits warn; test_calibrators_warnings.py tests the warnings.
pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")

LOW, HIGH = TEMPERATURE_BOUNDS


def sample(n=400, n_classes=5, scale=2.0, seed=0, dtype=torch.float64):
    """Logits that are ``scale`` times too large for their labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return (logits * scale).to(dtype), target


def nll(logits, target, temperature):
    log_probs = torch.log_softmax(logits.double() / temperature, -1)
    return -log_probs.gather(1, target.unsqueeze(1)).mean().item()


# Optima from 2e-3 to 2e3, with two classes and with a thousand. test_rows_are_looked_at_in_blocks has more rows than
# one float64 block.
@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0, 7.0, 1e3])
@pytest.mark.parametrize(("n", "n_classes"), [(300, 2), (300, 10), (200, 1000)])
def test_the_optimum_is_that_of_scipy(scale, n, n_classes):
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    logits, target = sample(n, n_classes, scale)
    calibrator = TemperatureScaling().fit(logits, target)

    z, y = logits.numpy(), target.numpy()

    def slope(log_beta):
        s = np.exp(log_beta) * z
        q = np.exp(s - s.max(1, keepdims=True))
        q /= q.sum(1, keepdims=True)
        return ((q * z).sum(1) - z[np.arange(n), y]).mean() / scale

    expected = np.exp(-optimize.brentq(slope, -12, 12, xtol=1e-14, rtol=1e-14))
    assert calibrator.temperature_ == pytest.approx(expected, rel=1e-9)
    assert calibrator.best_value_ == pytest.approx(nll(logits, target, calibrator.temperature_), rel=1e-12)
    assert calibrator.search_ == "nll"
    assert calibrator.at_border_ == ()
    assert not hasattr(calibrator, "grid_")
    assert calibrator.n_cells_ < 25


def test_the_optimum_at_fifty_digits():
    logits, target = sample(6, 3, scale=1.5, seed=3)
    rows = [[mpmath.mpf(value) for value in row] for row in logits.tolist()]

    def slope(beta):
        total = mpmath.mpf(0)
        for row, label in zip(rows, target.tolist(), strict=True):
            weights = [mpmath.exp(beta * value) for value in row]
            total += sum(w * v for w, v in zip(weights, row, strict=True)) / sum(weights) - row[label]
        return total

    with mpmath.workdps(50):
        expected = float(1 / mpmath.findroot(slope, (mpmath.mpf("0.05"), mpmath.mpf(20)), solver="anderson"))
    assert TemperatureScaling().fit(logits, target).temperature_ == pytest.approx(expected, rel=1e-13)


def test_no_grid_cell_is_better():
    logits, target = sample(1000, scale=1.7)
    analytic = TemperatureScaling().fit(logits, target)
    grid = TemperatureScaling(search="grid").fit(logits, target)
    assert analytic.best_value_ <= grid.best_value_ * (1 + 1e-12)
    assert abs(analytic.temperature_ - grid.temperature_) <= 0.01


def test_search_none_follows_the_other_options():
    logits, target = sample(50)
    for options, search, criterion in [
        ({}, "nll", "nll"),
        ({"temperatures": [1.0, 2.0]}, "grid", "nll"),
        ({"criterion": "ece"}, "grid", "ece"),
        ({"search": "grid"}, "grid", "nll"),
    ]:
        calibrator = TemperatureScaling(**options).fit(logits, target)
        assert (calibrator.search_, calibrator.criterion_) == (search, criterion)
    with pytest.raises(ValueError, match="criterion must be 'nll' with search='nll', got 'ece'"):
        TemperatureScaling(search="nll", criterion="ece").fit(logits, target)
    with pytest.raises(ValueError, match="temperatures must be None with search='nll'"):
        TemperatureScaling(search="nll", temperatures=[1.0]).fit(logits, target)
    with pytest.raises(ValueError, match="search must be one of grid, refine, nll, brier, got 'newton'"):
        TemperatureScaling(search="newton").fit(logits, target)


def test_rows_are_looked_at_in_blocks(monkeypatch):
    logits, target = sample(103, 7)
    whole = TemperatureScaling().fit(logits, target)
    monkeypatch.setattr("focalkern.calibrators._smooth_losses.map_nll_sums_for", lambda input: fallback.map_nll_sums)
    monkeypatch.setattr(sys.modules["focalkern.fallback.map_nll_sums"], "_BLOCK", {"cpu": 70})
    parts = TemperatureScaling().fit(logits, target)
    assert parts.temperature_ == pytest.approx(whole.temperature_, rel=1e-12)
    assert parts.best_value_ == pytest.approx(whole.best_value_, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision_is_computed_in_float64(dtype):
    logits, target = sample(300, dtype=dtype)
    low, wide = (TemperatureScaling().fit(z, target) for z in (logits, logits.double()))
    assert low.temperature_ == wide.temperature_
    assert low.best_value_ == wide.best_value_


def test_probabilities_have_the_optimum_of_their_logarithms():
    logits, target = sample(300, scale=1.5)
    from_logits = TemperatureScaling().fit(logits, target)
    from_probs = TemperatureScaling(input_kind="probs").fit(logits.softmax(-1), target)
    assert from_probs.temperature_ == pytest.approx(from_logits.temperature_, rel=1e-9)


# -- no optimum ------------------------------------------------------------------------------------------------------


def mean_confidence(logits, temperature):
    return float((logits.double() / temperature).softmax(-1).amax(-1).mean())


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
@pytest.mark.parametrize("rows", [3, 100])
def test_separable_data_end_where_so_many_rows_justify_it(scale, rows):
    """Laplace's rule: the expected accuracy on new rows is (N + 1) / (N + 2). T stops where the mean confidence equals
    this value."""
    logits, _ = sample(rows, scale=scale)
    calibrator = TemperatureScaling().fit(logits, logits.argmax(-1))
    assert LOW < calibrator.temperature_ < HIGH
    assert mean_confidence(logits, calibrator.temperature_) == pytest.approx((rows + 1) / (rows + 2), abs=1e-12)
    assert calibrator.best_value_ == pytest.approx(nll(logits, logits.argmax(-1), calibrator.temperature_), rel=1e-12)
    (words,) = calibrator.at_border_
    assert words.startswith(
        f"temperature = {calibrator.temperature_:g} is the lower bound of the search on {rows} rows"
    )
    assert words.endswith("and the NLL falls all the way to temperature 0")
    assert torch.equal(calibrator.predict_proba(logits).argmax(-1), logits.argmax(-1))
    (words,) = TemperatureScaling().fit(logits[:1], logits[:1].argmax(-1)).at_border_
    assert scale > 1 or "of the search on 1 row, with a mean confidence of at most 0.6667: " in words


def test_one_mistake_is_an_optimum_again():
    """The bound applies only to separable rows: a row with a large error keeps T away from 0."""
    logits, _ = sample(100)
    target = logits.argmax(-1)
    target[0] = logits[0].argmin(-1)
    calibrator = TemperatureScaling().fit(logits, target)
    assert calibrator.at_border_ == ()
    assert mean_confidence(logits, calibrator.temperature_) < 101 / 102


def nll_without_temperature():
    """Fifty right rows with margin 1 and a wrong row with margin 100."""
    margin = torch.tensor([1.0] * 50 + [100.0], dtype=torch.float64)
    return torch.stack([margin, 0 * margin], 1), (margin > 1).long()


def brier_without_temperature():
    """Confident rows and a quarter of wrong ones, with logits of very different sizes."""
    generator = torch.Generator().manual_seed(9)
    logits = 4 * torch.randn(150, 3, generator=generator, dtype=torch.float64)
    logits *= torch.randn(150, 1, generator=generator, dtype=torch.float64).exp()
    return logits, (logits.argmax(-1) + (torch.arange(150) % 4 == 0)) % 3


@pytest.mark.parametrize(
    ("criterion", "rows", "bound", "at_most"),
    [("nll", nll_without_temperature, "upper", 0.19), ("brier", brier_without_temperature, "lower", 0.494)],
)
def test_gamma_may_have_an_optimum_where_the_temperature_alone_has_none(criterion, rows, bound, at_most):
    logits, target = rows()
    plain = TemperatureScaling(criterion=criterion).fit(logits, target)
    assert f"is the {bound} bound of the search" in plain.at_border_[0]
    focal = fk.FocalTemperatureScaling(criterion=criterion).fit(logits, target)
    assert focal.best_value_ < at_most < plain.best_value_
    assert not any(words.startswith("temperature") for words in focal.at_border_)
    near = fk.FocalTemperatureScaling(criterion=criterion)
    near.fit_quietly(logits, target, near=(focal.gamma_, 1.1 * focal.temperature_))
    assert (near.gamma_, near.temperature_) == pytest.approx((focal.gamma_, focal.temperature_), rel=1e-4)


def test_the_bound_counts_a_row_as_often_as_its_weight_says():
    logits, _ = sample(100)
    target = logits.argmax(-1)
    times = torch.arange(100) % 4
    weighted = TemperatureScaling().fit_quietly(logits, target, times.double())
    repeated = TemperatureScaling().fit_quietly(logits.repeat_interleave(times, 0), target.repeat_interleave(times))
    assert weighted.temperature_ == pytest.approx(repeated.temperature_, rel=1e-9)


def test_rows_with_one_possible_class_are_sure_of_it():
    """Rows with one possible class have confidence 1 at every temperature, so the other rows determine the bound."""
    logits, _ = sample(50)
    sure = torch.full((50, logits.shape[1]), -torch.inf, dtype=logits.dtype)
    sure[:, 0] = 0
    both = torch.cat([logits, sure])
    calibrator = TemperatureScaling().fit_quietly(both, both.argmax(-1))
    assert mean_confidence(logits, calibrator.temperature_) == pytest.approx(101 / 102, abs=1e-12)


def test_a_tie_at_the_top_is_separable_too():
    logits = torch.tensor([[2.0, 2.0, 0.0], [0.0, 1.0, 5.0]])
    calibrator = TemperatureScaling().fit(logits, torch.tensor([1, 2]))
    # No temperature gives a mean confidence above (1/2 + 1) / 2, the limit for two rows.
    assert calibrator.temperature_ == LOW
    assert calibrator.best_value_ == pytest.approx(math.log(2) / 2)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_anti_informative_data_end_at_the_upper_bound(scale):
    logits, _ = sample(100, scale=scale)
    calibrator = TemperatureScaling().fit(logits, logits.argmin(-1))
    assert calibrator.temperature_ == HIGH
    (words,) = calibrator.at_border_
    assert words.startswith(f"temperature = {HIGH:g} is the upper bound of the search: the targets have no higher")
    assert calibrator.best_value_ == pytest.approx(nll(logits, logits.argmin(-1), HIGH), rel=1e-12)


@pytest.mark.parametrize(("scale", "bound"), [(1e-6, LOW), (1e6, HIGH)])
def test_an_optimum_beyond_the_bounds_causes_a_warning(scale, bound):
    logits, target = sample(400, scale=scale)
    calibrator = TemperatureScaling().fit(logits, target)
    assert calibrator.temperature_ == bound
    assert calibrator.at_border_[0].endswith("the optimum lies beyond it")


def test_equal_logits_keep_the_temperature():
    logits, target = torch.full((20, 4), 3.0), torch.arange(20) % 4
    calibrator = TemperatureScaling().fit(logits, target)
    assert calibrator.temperature_ == 1.0
    assert calibrator.best_value_ == pytest.approx(math.log(4))
    assert calibrator.at_border_[0].startswith("all temperatures are equally good")


@pytest.mark.parametrize("label", [0, 1, 2])
def test_one_row(label):
    calibrator = TemperatureScaling().fit(torch.tensor([[3.0, 1.0, -8.0]]), torch.tensor([label]))
    # Target with the largest logit: separable. Below the mean: worse than chance. Between: an inner optimum, where E[z]
    # = 1.
    assert (bool(calibrator.at_border_), calibrator.temperature_ == HIGH) == (label != 1, label == 2)
    if label == 0:  # one row, correct: the expected accuracy of the next is two in three
        assert float(calibrator.predict_proba(torch.tensor([[3.0, 1.0, -8.0]])).max()) == pytest.approx(2 / 3)
    if label == 1:
        q = torch.tensor([3.0, 1.0, -8.0], dtype=torch.float64).div(calibrator.temperature_).softmax(-1)
        assert float(q @ torch.tensor([3.0, 1.0, -8.0], dtype=torch.float64)) == pytest.approx(1.0, abs=1e-9)


def test_labels_of_one_class_only():
    logits, _ = sample(200, 4)
    target = torch.zeros(200, dtype=torch.int64)
    calibrator = TemperatureScaling().fit(logits, target)
    for neighbour in (calibrator.temperature_ * 0.99, calibrator.temperature_ * 1.01):
        if LOW < neighbour < HIGH:
            assert nll(logits, target, calibrator.temperature_) < nll(logits, target, neighbour)


def test_classes_that_cannot_occur_are_left_out():
    logits, target = sample(200, 5)
    masked = logits.clone()
    masked[torch.arange(200), (target + 1) % 5] = -math.inf
    calibrator = TemperatureScaling().fit(masked, target)
    # A class whose probability rounds to 0 at every temperature.
    near = masked.masked_fill(masked == -math.inf, -1e7)
    assert calibrator.temperature_ == pytest.approx(TemperatureScaling().fit(near, target).temperature_, rel=1e-9)


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_an_impossible_target_is_counted(kind):
    probs = torch.tensor([[0.4, 0.6], [0.0, 1.0], [0.3, 0.7], [1.0, 0.0]])
    input = probs if kind == "probs" else probs.log()
    words = (
        r"2 of 4 rows \(the first is 1\) give their target (probability 0|a logit of -inf): floor=0\.025 gives every"
    )
    with pytest.raises(ValueError, match=words):
        TemperatureScaling(input_kind=kind).fit(input, torch.tensor([0, 0, 1, 1]))


def test_an_error_leaves_the_fitted_calibrator():
    logits, target = sample(100)
    calibrator = TemperatureScaling().fit(logits, target)
    before = dict(vars(calibrator))
    for spoiled in (logits.index_fill(0, torch.tensor(3), math.nan), logits[:50], logits[:0]):
        with pytest.raises(ValueError, match=r"TemperatureScaling|calibration_grid"):
            calibrator.fit(spoiled, target)
    with pytest.raises(IndexError):
        calibrator.fit(logits, target + 5)
    assert vars(calibrator) == before


def test_another_search_leaves_nothing_of_the_one_before():
    logits, target = sample(100)
    calibrator = TemperatureScaling(search="grid").fit(logits, target)
    assert hasattr(calibrator, "grid_")
    calibrator.set_params(search="nll").fit(logits, target)
    assert not hasattr(calibrator, "grid_")


# -- peers -----------------------------------------------------------------------------------------------------------


def test_the_temperature_is_scikit_learns():
    base = peer("sklearn.base")
    frozen = peer("sklearn.frozen")
    calibration = peer("sklearn.calibration")

    class Given(base.ClassifierMixin, base.BaseEstimator):
        """The features are the logits."""

        def fit(self, X, y):
            self.classes_ = np.unique(y)
            return self

        def decision_function(self, X):
            return X

        def predict(self, X):
            return self.classes_[X.argmax(1)]

    logits, target = sample(500, 4, scale=3.0)
    # Logits far outside [0, 1] cannot be mistaken for probabilities.
    z, y = logits.numpy(), target.numpy()
    theirs = calibration.CalibratedClassifierCV(frozen.FrozenEstimator(Given().fit(z, y)), method="temperature").fit(
        z, y
    )
    ours = TemperatureScaling().fit(z, y)
    beta = theirs.calibrated_classifiers_[0].calibrators[0].beta_
    assert ours.temperature_ == pytest.approx(1 / beta, rel=1e-6)
    assert ours.predict_proba(z) == pytest.approx(theirs.predict_proba(z), abs=1e-6)


@pytest.mark.kernels  # plain torch converts blocks that are larger than these rows
@pytest.mark.parametrize("criterion", ["nll", "brier"])
def test_a_fit_makes_no_copy_of_its_rows_in_float64(criterion):
    """Memory beyond the input is limited to blocks and a few numbers per row. ``benchmarks.speed.fit_memory`` measures
    the process."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, function, types, args=(), options=None):
            result = function(*args, **(options or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                self.bytes = max(self.bytes, result.nbytes)
            return result

    n, classes = 6000, 100
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (n,), generator=generator)
    logits = 2 * torch.randn(n, classes, generator=generator) + 4 * torch.nn.functional.one_hot(labels, classes)
    with Largest() as largest:
        fk.FocalTemperatureScaling(criterion=criterion).fit(logits, labels)
    assert 0 < largest.bytes <= logits.nbytes
