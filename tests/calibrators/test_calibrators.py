"""Calibrators: their choices, their errors, and saving and loading."""

import pickle

import numpy as np
import pytest
import torch
from conftest import assert_close
from scaling_cases import BOTH, COARSE, fitted, sample

from focalkern import reference
from focalkern.calibrators import (
    DEFAULT_GAMMAS,
    CalibratedLogProbs,
    FocalTemperatureScaling,
    NotFittedError,
    TemperatureScaling,
)
from focalkern.ops.calibration_grid import PAPER_GAMMAS, PAPER_TEMPERATURES, calibration_grid

# The data are small or odd, so many fits warn; test_calibrators_warnings.py tests the warnings.
pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")


@pytest.mark.parametrize("criterion", ["ece", "nll"])
@pytest.mark.parametrize("estimator", ["equal_width", "equal_mass", "equal_mass_interp"])
def test_the_choice_is_the_first_minimum_of_the_reference(criterion, estimator):
    logits, target = sample(150, dtype=torch.float64)
    gammas, temperatures = [0.0, -0.5, 1.0], COARSE[::8]
    calibrator = FocalTemperatureScaling(
        gammas=gammas, temperatures=temperatures, criterion=criterion, estimator=estimator
    ).fit(logits, target)
    table = reference.calibration_grid(
        logits, target, gammas, temperatures, criteria=(criterion,), estimator=estimator
    )[criterion]
    row, column = divmod(int(table.argmin()), len(temperatures))
    assert (calibrator.gamma_, calibrator.temperature_) == (gammas[row], temperatures[column])
    assert_close(torch.tensor(calibrator.best_value_, dtype=torch.float64), table[row, column])
    assert calibrator.n_samples_ == 150
    assert calibrator.n_classes_ == 5


def test_the_temperature_undoes_a_known_scale():
    logits, target = sample(20_000, scale=2.0)
    calibrator = TemperatureScaling(criterion="nll", temperatures=COARSE).fit(logits, target)
    # The standard deviation of the optimum at 20,000 rows is about 0.02; the step of the grid is 0.05.
    assert calibrator.temperature_ == pytest.approx(2.0, abs=0.1)
    assert calibrator.gamma_ == 0.0


@pytest.mark.parametrize("criterion", ["ece", "nll"])
@pytest.mark.parametrize("seed", range(4))
def test_focal_is_never_worse_than_plain_where_both_were_fitted(criterion, seed):
    logits, target = sample(200, scale=0.5 + seed, seed=seed)
    options = {"criterion": criterion, "temperatures": COARSE}
    plain = TemperatureScaling(**options).fit(logits, target)
    focal = FocalTemperatureScaling(**options).fit(logits, target)
    assert focal.best_value_ <= plain.best_value_


def test_plain_temperature_scaling_wins_ties():
    """Saturated rows have confidence 1 at every gamma and T, so all cells tie."""
    logits, target = torch.zeros(20, 4), torch.arange(20) % 4
    logits[:, 0] = 1e4
    calibrator = FocalTemperatureScaling(temperatures=[0.5, 1.0], criterion="ece").fit(logits, target)
    assert (calibrator.gamma_, calibrator.temperature_) == (0.0, 0.5)
    assert (0.0, *PAPER_GAMMAS) == DEFAULT_GAMMAS


def test_the_papers_grid_can_be_asked_for():
    logits, target = sample(50)
    calibrator = FocalTemperatureScaling(gammas=PAPER_GAMMAS).fit(logits, target)
    assert calibrator.grid_.gammas.tolist() == list(PAPER_GAMMAS)
    assert calibrator.grid_.temperatures.tolist() == list(PAPER_TEMPERATURES)
    assert calibrator.gamma_ in PAPER_GAMMAS


@pytest.mark.parametrize("cls", BOTH)
def test_results_have_the_type_of_the_input(cls):
    logits, target = sample(60)
    calibrator = cls(temperatures=COARSE).fit(logits.numpy(), target.numpy())
    from_tensor = calibrator.predict_proba(logits)
    from_array = calibrator.predict_proba(logits.numpy())
    assert isinstance(from_tensor, torch.Tensor)
    assert isinstance(from_array, np.ndarray)
    assert from_array.dtype == np.float32
    assert isinstance(calibrator.predict_proba(logits.tolist()), np.ndarray)
    assert np.array_equal(from_tensor.numpy(), from_array)
    assert_close(from_tensor.sum(-1), torch.ones(60))
    assert_close(calibrator.predict_log_proba(logits).exp(), from_tensor)
    assert torch.equal(calibrator.predict(logits), logits.argmax(-1))
    assert isinstance(calibrator.predict(logits.numpy()), np.ndarray)
    expected = reference.focal_calibration_map(logits, calibrator.gamma_, calibrator.temperature_)
    assert_close(from_tensor, expected)


def test_fit_and_predict_on_every_device(device):
    logits, target = (tensor.to(device) for tensor in sample(100))
    calibrator = FocalTemperatureScaling(temperatures=COARSE).fit(logits, target)
    assert calibrator.predict_proba(logits).device == logits.device
    on_cpu = FocalTemperatureScaling(temperatures=COARSE).fit(logits.cpu(), target.cpu())
    assert calibrator.best_value_ == pytest.approx(on_cpu.best_value_, abs=2 / 100)


def test_read_only_arrays_are_taken():
    logits, target = (tensor.numpy() for tensor in sample(60))
    logits.flags.writeable = target.flags.writeable = False
    assert TemperatureScaling(temperatures=COARSE).fit(logits, target).predict_proba(logits).shape == (60, 5)


def test_probabilities_with_exact_zeros():
    logits, target = sample(200)
    probs = logits.softmax(-1)
    probs[0] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    target[0] = 1
    calibrator = FocalTemperatureScaling(input_kind="probs", temperatures=COARSE).fit(probs, target)
    calibrated = calibrator.predict_proba(probs)
    assert calibrated[0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert_close(calibrator.as_module()(probs).exp(), calibrated)


def test_a_zero_on_the_true_class_leaves_no_nll_optimum():
    probs = torch.tensor([[0.0, 1.0], [0.4, 0.6]])
    with pytest.raises(ValueError, match="finite"):
        TemperatureScaling(input_kind="probs", criterion="nll").fit(probs, torch.tensor([0, 1]))


@pytest.mark.parametrize("cls", BOTH)
def test_the_module_is_the_map_and_exports(cls):
    logits, target = sample(60)
    calibrator = cls(temperatures=COARSE).fit(logits, target)
    module = calibrator.as_module()
    assert torch.equal(module(logits), calibrator.predict_log_proba(logits))
    # Half precision of a network must not round gamma and T.
    assert module.half().temperature == calibrator.temperature_
    network = torch.nn.Sequential(torch.nn.Linear(3, 5), calibrator.as_module()).eval()
    batch = torch.randn(7, 3)
    program = torch.export.export(network, (batch,))
    assert_close(program.module()(batch), network(batch))


def test_parameters_in_scikit_learns_shape():
    sklearn_base = pytest.importorskip("sklearn.base", reason="scikit-learn is not installed")
    calibrator = FocalTemperatureScaling(gammas=(0.0, 1.0), criterion="nll", n_bins=10)
    copy = sklearn_base.clone(calibrator)
    assert copy is not calibrator
    assert copy.get_params() == calibrator.get_params()
    assert copy.set_params(n_bins=7, criterion="ece") is copy
    assert (copy.n_bins, copy.criterion, calibrator.n_bins) == (7, "ece", 10)
    with pytest.raises(ValueError, match="bins"):
        copy.set_params(bins=7)
    assert "gammas" not in TemperatureScaling().get_params()
    assert "criterion='nll'" in repr(calibrator)


def test_a_fit_warns_at_a_bound_of_the_search_and_only_there():
    logits, target = sample(400, scale=2.0)
    inside = TemperatureScaling(criterion="nll", temperatures=COARSE).fit(logits, target)
    assert inside.at_border_ == ()
    low = TemperatureScaling(criterion="nll", temperatures=[0.5, 1.0]).fit(logits, target)
    assert low.at_border_ == ("temperature = 1 is the largest that was searched",)
    both = FocalTemperatureScaling(criterion="nll", temperatures=[3.0, 4.0], gammas=[3.0, 0.0]).fit(logits, target)
    assert both.at_border_[0].startswith("gamma = ")
    one_value = TemperatureScaling(criterion="nll", temperatures=[1.0]).fit(logits, target)
    assert one_value.at_border_ == ()


def test_choose_takes_the_optimum_of_a_given_grid():
    logits, target = sample(100)
    grid = calibration_grid(logits, target, DEFAULT_GAMMAS, COARSE)
    chosen = FocalTemperatureScaling(temperatures=COARSE, criterion="ece").choose(grid, n_samples=100, n_classes=5)
    fitted = FocalTemperatureScaling(temperatures=COARSE, criterion="ece").fit(logits, target)
    assert (chosen.gamma_, chosen.temperature_, chosen.best_value_) == grid.best("ece")
    assert (chosen.gamma_, chosen.temperature_) == (fitted.gamma_, fitted.temperature_)
    only_ece = calibration_grid(logits, target, [0.0], COARSE, criteria=("ece",))
    with pytest.raises(ValueError, match="nll"):
        TemperatureScaling(criterion="nll").choose(only_ece, n_samples=100, n_classes=5)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize(
    "use",
    [
        lambda c: c.predict_proba(torch.zeros(1, 3)),
        lambda c: c.predict_log_proba(torch.zeros(1, 3)),
        lambda c: c.predict(torch.zeros(1, 3)),
        lambda c: c.as_module(),
        lambda c: c.save("never.json"),
    ],
)
def test_use_before_fit(cls, use):
    with pytest.raises(NotFittedError, match=f"{cls.__name__}: not fitted yet"):
        use(cls())


@pytest.mark.parametrize(
    ("options", "spoil", "error", "words"),
    [
        ({}, lambda z, y: (z[:0], y[:0]), ValueError, "at least one row that counts, got none"),
        ({}, lambda z, y: (z[:, :1], y * 0), ValueError, "at least 2 classes, got shape [50, 1]"),
        ({}, lambda z, y: (z[None], y), ValueError, "target must be [N, d1] = [1, 5], got [50]"),
        ({}, lambda z, y: (z[:, 0], y), IndexError, "[0, 2)"),
        ({}, lambda z, y: (z, y[:49]), ValueError, "target must be [N] = [50], got [49]"),
        ({}, lambda z, y: (z, y + 0.5), ValueError, "whole numbers where it is torch.float32, got"),
        ({}, lambda z, y: (z, y + 0j), TypeError, "integer class indices, got torch.complex64"),
        ({}, lambda z, y: (z.long(), y), TypeError, "must be floating point, got torch.int64"),
        ({}, lambda z, y: (z, y + 1), IndexError, "5"),
        ({}, lambda z, y: (z, y.index_fill(0, torch.tensor(7), -100)), IndexError, "in [0, 5), got -100"),
        ({}, lambda z, y: (z.index_fill(0, torch.tensor(7), float("nan")), y), ValueError, "7"),
        ({}, lambda z, y: (z.index_fill(0, torch.tensor(7), -float("inf")), y), ValueError, "7"),
        ({"criterion": "mce"}, None, ValueError, "criterion must be one of nll, brier, ece, got 'mce'"),
        ({"estimator": "adaptive"}, None, ValueError, "estimator must be one of"),
        ({"input_kind": "auto"}, None, ValueError, "input_kind must be one of logits, probs, got 'auto'"),
        ({"input_kind": "probs"}, None, ValueError, "row"),
        ({"n_bins": 0}, None, ValueError, "n_bins"),
        ({"temperatures": [1.0, 0.0]}, None, ValueError, "temperatures"),
        ({"temperatures": 1.0}, None, TypeError, "temperatures must be a sequence of numbers, got 1.0"),
        ({"gammas": 1.0}, None, TypeError, "gammas must be a sequence of numbers, got 1.0"),
        ({"temperatures": []}, None, ValueError, "temperatures"),
        ({"gammas": [-1.0]}, None, ValueError, "gammas"),
    ],
)
def test_bad_input_is_named(options, spoil, error, words):
    logits, target = sample(50)
    if spoil is not None:
        logits, target = spoil(logits, target)
    with pytest.raises(error) as caught:
        FocalTemperatureScaling(**options).fit(logits, target)
    assert words in str(caught.value)


def test_another_number_of_classes_is_refused():
    with pytest.raises(ValueError, match=r"must have the 5 classes of fit, got shape \[2, 7\]"):
        fitted().predict_proba(torch.zeros(2, 7))


def test_module_state_travels_with_a_checkpoint(tmp_path):
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), CalibratedLogProbs(0.37, 1.3))
    torch.save(network.half().state_dict(), tmp_path / "network.pt")
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), CalibratedLogProbs(0.0, 1.0))
    other.load_state_dict(torch.load(tmp_path / "network.pt", weights_only=True))
    assert (other[1].gamma, other[1].temperature) == (0.37, 1.3)


# -- arguments that are easy to misread --------------------------------------------------------------------------------


def test_temperatures_of_the_paper_are_hundredths():
    assert PAPER_TEMPERATURES[34] == 0.35
    assert all(float(f"{value:.2f}") == value for value in PAPER_TEMPERATURES)


def test_an_axis_that_is_given_as_a_generator_is_kept(tmp_path):
    logits, target = sample(100)
    calibrator = TemperatureScaling(temperatures=(value for value in COARSE))
    first = calibrator.fit(logits, target).temperature_
    assert calibrator.fit(logits, target).temperature_ == first
    calibrator.save(tmp_path / "calibrator.json")
    assert TemperatureScaling.load(tmp_path / "calibrator.json").temperatures == COARSE
    focal = FocalTemperatureScaling(gammas=iter([0.0, 1.0]), temperatures=iter(COARSE)).fit(logits, target)
    assert focal.gammas == (0.0, 1.0)


def test_use_before_fit_is_scikit_learns_error_too():
    exceptions = pytest.importorskip("sklearn.exceptions", reason="scikit-learn is not installed")
    for error in (NotFittedError, exceptions.NotFittedError):
        with pytest.raises(error, match="TemperatureScaling: not fitted yet") as caught:
            TemperatureScaling().predict(torch.zeros(1, 3))
        again = pickle.loads(pickle.dumps(caught.value))  # a worker process sends its error
        assert isinstance(again, error) and str(again) == str(caught.value)


@pytest.mark.parametrize("cls", BOTH)
def test_errors_of_fit_name_the_calibrator(cls):
    logits, target = sample(50)
    for options, rows in [
        ({"temperatures": [0.0]}, (logits, target)),
        ({"n_bins": 0, "criterion": "ece"}, (logits, target)),
        ({}, (logits.index_fill(0, torch.tensor(3), float("nan")), target)),
        ({}, (logits, target + 1)),
    ]:
        with pytest.raises((ValueError, IndexError), match=f"^{cls.__name__}: "):
            cls(**options).fit(*rows)


def test_pickles_carry_a_version():
    calibrator = fitted()
    again = pickle.loads(pickle.dumps(calibrator))
    assert torch.equal(again.predict_proba(sample(5)[0]), calibrator.predict_proba(sample(5)[0]))
    assert vars(again).keys() == vars(calibrator).keys()
    newer = TemperatureScaling()
    with pytest.raises(ValueError, match=r"TemperatureScaling: expected a pickle .* found 99; load it with"):
        newer.__setstate__({**calibrator.__getstate__(), "_format_version": 99})
    with pytest.raises(ValueError, match="found None; load it with the focalkern that wrote it, or fit again"):
        newer.__setstate__(vars(calibrator))
