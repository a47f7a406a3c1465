"""The searches of focal temperature scaling: compared with independent optima, and the number of evaluations."""

import math

import numpy as np
import pytest
import torch
from conftest import assert_close

from focalkern import reference
from focalkern.calibrators import (
    DEFAULT_GAMMAS,
    GAMMA_BOUNDS,
    TEMPERATURE_BOUNDS,
    FocalTemperatureScaling,
    TemperatureScaling,
)
from focalkern.ops.calibration_grid import PAPER_GAMMAS, PAPER_TEMPERATURES

# The data are small or odd, so many fits warn; test_calibrators_warnings.py tests the warnings.
pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")

SEARCHES = ["grid", "line", "refine", "nll", "brier"]


def sample(n=400, n_classes=5, gamma=0.0, temperature=2.0, seed=0, dtype=torch.float64):
    """Logits whose labels are drawn from their focal calibration map with these parameters."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2 * temperature
    probs = reference.focal_calibration_map(logits, gamma, temperature)
    target = torch.multinomial(probs, 1, generator=generator).squeeze(1)
    return logits.to(dtype), target


def nll(logits, target, gamma, temperature):
    log_probs = reference.focal_calibration_map(logits.double(), gamma, temperature, log=True)
    return -log_probs.gather(1, target.unsqueeze(1)).mean().item()


def few(search):
    """Small axes, if the search takes axes."""
    if search in ("nll", "brier"):
        return {"criterion": search}
    return {"temperatures": [0.5 * index for index in range(1, 10)]}


# -- nll -------------------------------------------------------------------------------------------------------------


# The standard deviation of gamma and T over seeds at 20,000 rows is a few percent.
@pytest.mark.parametrize(("gamma", "temperature"), [(0.0, 1.0), (1.0, 1.5), (-0.4, 0.7), (-0.4, 20.0), (3.0, 0.05)])
def test_nll_finds_the_parameters_that_made_the_labels(gamma, temperature):
    logits, target = sample(20_000, 4, gamma, temperature)
    calibrator = FocalTemperatureScaling(search="nll").fit(logits, target)
    assert math.log((1 + calibrator.gamma_) / (1 + gamma)) == pytest.approx(0, abs=0.25)
    assert calibrator.temperature_ == pytest.approx(temperature, rel=0.2)
    assert calibrator.best_value_ <= nll(logits, target, gamma, temperature)
    assert calibrator.at_border_ == ()
    assert (calibrator.search_, calibrator.criterion_) == ("nll", "nll")


@pytest.mark.parametrize(("n_classes", "seed"), [(2, 0), (3, 1), (10, 0), (10, 1)])
def test_nll_is_the_minimum_of_the_reference(n_classes, seed):
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    logits, target = sample(200, n_classes, gamma=1.0 - seed, temperature=1.5, seed=seed)
    calibrator = FocalTemperatureScaling(search="nll").fit(logits, target)
    point = np.array([math.log1p(calibrator.gamma_), math.log(calibrator.temperature_)])

    def value(x):
        return nll(logits, target, math.expm1(x[0]), math.exp(x[1]))

    assert calibrator.best_value_ == pytest.approx(value(point), rel=1e-12)
    slope = [(value(point + step) - value(point - step)) / 2e-4 for step in np.eye(2) * 1e-4]
    assert slope == pytest.approx([0, 0], abs=1e-7)
    # No lower value exists elsewhere: neither in a wide coarse grid, nor by a search without derivatives from its best
    # cell.
    gammas, temperatures = np.expm1(np.linspace(-3, 4, 12)), calibrator.temperature_ * np.geomspace(0.1, 10, 15)
    table = reference.calibration_grid(logits, target, gammas.tolist(), temperatures.tolist(), criteria=("nll",))["nll"]
    assert calibrator.best_value_ <= float(table.min())
    row, column = divmod(int(table.argmin()), len(temperatures))
    start = [math.log1p(gammas[row]), math.log(temperatures[column])]
    box = [np.log1p(GAMMA_BOUNDS), np.log(TEMPERATURE_BOUNDS)]
    other = optimize.minimize(
        value, start, method="Nelder-Mead", bounds=box, options={"xatol": 1e-7, "fatol": 1e-13, "maxiter": 400}
    )
    assert calibrator.best_value_ <= other.fun + 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_nll_is_never_worse_than_temperature_scaling(seed):
    logits, target = sample(60, 3 + seed, temperature=0.5 + seed, seed=seed)
    plain = TemperatureScaling().fit(logits, target)
    focal = FocalTemperatureScaling(search="nll").fit(logits, target)
    assert focal.best_value_ <= plain.best_value_
    assert focal.n_cells_ > plain.n_cells_
    assert type(focal.best_value_) is float


@pytest.mark.parametrize("labels", ["argmax", "argmin"])
def test_nll_without_an_optimum_in_t_is_temperature_scaling(labels):
    logits, _ = sample(100)
    calibrator = FocalTemperatureScaling(search="nll").fit(logits, getattr(logits, labels)(-1))
    assert calibrator.gamma_ == 0
    assert calibrator.temperature_ == TemperatureScaling().fit(logits, getattr(logits, labels)(-1)).temperature_
    assert (calibrator.temperature_ == TEMPERATURE_BOUNDS[1]) == (labels == "argmin")
    assert "bound of the search" in calibrator.at_border_[0]


def test_nll_keeps_gamma_zero_where_it_is_not_determined():
    """Rows with only two confidences, symmetric to each other, determine only one of the two parameters."""
    logits = torch.tensor([[1.0, -1.0]] * 8, dtype=torch.float64)
    calibrator = FocalTemperatureScaling(search="nll").fit(logits, torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]))
    assert calibrator.best_value_ == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert calibrator.gamma_ == 0


@pytest.mark.parametrize(("gamma", "bound", "words"), [(3.0, 0.5, "upper"), (-0.7, -0.3, "lower")])
def test_a_bound_of_gamma_causes_a_warning(gamma, bound, words, monkeypatch):
    logits, target = sample(5000, 4, gamma=gamma, temperature=1.0)
    monkeypatch.setattr("focalkern.calibrators._newton_search.GAMMA_BOUNDS", (-0.3, 0.5))
    calibrator = FocalTemperatureScaling(search="nll").fit(logits, target)
    assert calibrator.gamma_ == pytest.approx(bound, abs=1e-12)
    assert calibrator.at_border_ == (
        f"gamma = {bound:g} is the {words} bound of the search: the NLL falls all the way to it",
    )
    # At this gamma, T is the optimum.
    best = calibrator.best_value_
    for factor in (0.999, 1.001):
        assert best < nll(logits, target, calibrator.gamma_, calibrator.temperature_ * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nll_of_lower_precision_is_that_of_its_float64(dtype):
    logits, target = sample(300, gamma=1.0, dtype=dtype)
    low, wide = (FocalTemperatureScaling(search="nll").fit(z, target) for z in (logits, logits.double()))
    assert low.best_value_ == pytest.approx(wide.best_value_, rel=1e-9)
    assert low.gamma_ == pytest.approx(wide.gamma_, abs=1e-4)


def test_nll_of_probabilities_with_zeros():
    logits, target = sample(300, gamma=1.0)
    logits[torch.arange(300), (target + 1) % 5] = -math.inf
    from_logits = FocalTemperatureScaling(search="nll").fit(logits, target)
    from_probs = FocalTemperatureScaling(search="nll", input_kind="probs").fit(logits.softmax(-1), target)
    assert from_probs.gamma_ == pytest.approx(from_logits.gamma_, abs=1e-5)
    assert from_probs.best_value_ == pytest.approx(from_logits.best_value_, rel=1e-10)
    with pytest.raises(ValueError, match=r"1 of 300 rows .* give their target a logit of -inf"):
        FocalTemperatureScaling(search="nll").fit(logits, target.index_copy(0, torch.tensor([0]), (target[:1] + 1) % 5))


# -- brier -----------------------------------------------------------------------------------------------------------


def brier(logits, target, gamma, temperature):
    probs = reference.focal_calibration_map(logits.double(), gamma, temperature)
    return float((probs - torch.nn.functional.one_hot(target, logits.shape[1])).square().sum(-1).mean())


@pytest.mark.parametrize(("n_classes", "seed"), [(2, 0), (3, 1), (10, 1)])
@pytest.mark.parametrize("focal", [False, True])
def test_brier_is_the_minimum_of_the_reference(n_classes, seed, focal):
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    logits, target = sample(200, n_classes, gamma=1.0 - seed, temperature=1.5, seed=seed)
    cls = FocalTemperatureScaling if focal else TemperatureScaling
    calibrator = cls(criterion="brier").fit(logits, target)
    assert (calibrator.search_, calibrator.criterion_, calibrator.at_border_) == ("brier", "brier", ())
    assert calibrator.best_value_ == pytest.approx(brier(logits, target, calibrator.gamma_, calibrator.temperature_))
    gammas = np.expm1(np.linspace(-3, 4, 12)).tolist() if focal else [0.0]
    temperatures = (calibrator.temperature_ * np.geomspace(0.02, 50, 30)).tolist()
    table = reference.calibration_grid(logits, target, gammas, temperatures, criteria=("brier",))["brier"]
    assert calibrator.best_value_ <= float(table.min())
    row, column = divmod(int(table.argmin()), len(temperatures))

    def value(x):
        return brier(logits, target, math.expm1(x[1]) if focal else 0.0, math.exp(x[0]))

    start = [math.log(temperatures[column]), *([math.log1p(gammas[row])] if focal else [])]
    box = [np.log(TEMPERATURE_BOUNDS), np.log1p(GAMMA_BOUNDS)][: len(start)]
    other = optimize.minimize(value, start, method="Nelder-Mead", bounds=box, options={"xatol": 1e-7, "fatol": 1e-13})
    assert calibrator.best_value_ <= other.fun + 1e-12
    # The score is proper, so a grid has no lower value.
    grid = cls(criterion="brier", search="grid").fit_quietly(logits, target)
    assert calibrator.best_value_ <= grid.best_value_ + 1e-12


@pytest.mark.parametrize("labels", ["argmax", "argmin"])
def test_brier_without_an_optimum_ends_at_a_bound(labels):
    logits, _ = sample(100)
    target = getattr(logits, labels)(-1)
    bound = TemperatureScaling().fit(logits, target).temperature_  # the rows determine the bound, not the criterion
    for cls in (TemperatureScaling, FocalTemperatureScaling):
        calibrator = cls(criterion="brier").fit(logits, target)
        assert (calibrator.gamma_, calibrator.temperature_) == (0.0, bound)
        assert "the Brier score falls all the way to it" in calibrator.at_border_[0]
        assert calibrator.best_value_ == pytest.approx(brier(logits, target, 0.0, bound))


def test_brier_keeps_the_temperature_where_it_is_not_determined():
    calibrator = FocalTemperatureScaling(criterion="brier").fit(torch.full((20, 4), 3.0), torch.arange(20) % 4)
    assert (calibrator.gamma_, calibrator.temperature_) == (0.0, 1.0)
    assert calibrator.best_value_ == pytest.approx(0.75)
    assert calibrator.at_border_[0].startswith("all temperatures are equally good")


def test_brier_takes_impossible_targets():
    logits, target = sample(300)
    logits[torch.arange(5), target[:5]] = -math.inf
    calibrator = FocalTemperatureScaling(criterion="brier").fit(logits, target)
    assert calibrator.best_value_ == pytest.approx(brier(logits, target, calibrator.gamma_, calibrator.temperature_))


# -- line ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("criterion", ["ece", "nll"])
def test_line_is_the_best_of_its_own_cells(criterion):
    logits, target = sample(150, 4)
    temperatures = [0.25 * index for index in range(1, 15)]
    calibrator = FocalTemperatureScaling(search="line", temperatures=temperatures, criterion=criterion)
    calibrator.fit(logits, target)

    def column(gamma, ts):
        return reference.calibration_grid(logits, target, [gamma], ts, criteria=(criterion,), estimator="equal_mass")[
            criterion
        ][0]

    cells = []
    ends = {}
    for gamma in (DEFAULT_GAMMAS[0], DEFAULT_GAMMAS[-1]):
        values = column(gamma, temperatures)
        ends[gamma] = temperatures[int(values.argmin())]
        cells += [(float(v), gamma, t) for v, t in zip(values, temperatures, strict=True)]
    for gamma in np.linspace(-0.5, 5.0, len(temperatures)):
        temperature = ends[0.0] + (ends[5.0] - ends[0.0]) * gamma / 5.0
        if 0.25 <= temperature <= 3.5:
            cells.append((float(column(gamma, [temperature])), gamma, temperature))
    best = min(cells, key=lambda cell: cell[0])
    assert calibrator.n_cells_ == len(cells) <= 3 * len(temperatures)
    assert calibrator.best_value_ == pytest.approx(best[0], rel=1e-9, abs=1e-12)
    assert (calibrator.gamma_, calibrator.temperature_) == pytest.approx(best[1:], abs=1e-12)


def test_line_with_the_papers_temperatures_has_at_most_1500_cells():
    logits, target = sample(60, 3)
    calibrator = FocalTemperatureScaling(search="line", criterion="ece").fit(logits, target)
    assert 1000 < calibrator.n_cells_ <= 1500
    plain = TemperatureScaling(criterion="ece").fit(logits, target)
    assert calibrator.best_value_ <= plain.best_value_


def test_a_line_through_the_last_temperature_causes_a_warning():
    logits, target = sample(300, 4)
    temperatures = [0.05 * index for index in range(1, 200)]
    whole = FocalTemperatureScaling(search="line", temperatures=temperatures, criterion="nll").fit(logits, target)
    assert not any("line" in words for words in whole.at_border_)
    at_five = FocalTemperatureScaling(gammas=[5.0], temperatures=temperatures, criterion="nll").fit(logits, target)
    short = [temperature for temperature in temperatures if temperature < at_five.temperature_ - 0.1]
    cut = FocalTemperatureScaling(search="line", temperatures=short, criterion="nll").fit(logits, target)
    assert f"the line goes through T = {max(short):g} at gamma = 5, the largest that was searched" in cut.at_border_


def test_line_with_one_gamma_is_a_column():
    logits, target = sample(60, 3)
    line = FocalTemperatureScaling(search="line", gammas=[0.5], temperatures=[1.0, 2.0, 3.0]).fit(logits, target)
    grid = FocalTemperatureScaling(gammas=[0.5], temperatures=[1.0, 2.0, 3.0]).fit(logits, target)
    assert line.n_cells_ == 3
    assert (line.temperature_, line.best_value_) == (grid.temperature_, grid.best_value_)


# -- refine ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [-0.3, 0.6])
def test_refine_comes_close_to_the_optimum_of_a_smooth_criterion(gamma):
    logits, target = sample(1500, 4, gamma=gamma, temperature=1.3)
    refined = FocalTemperatureScaling(search="refine", criterion="nll").fit(logits, target)
    exact = FocalTemperatureScaling(search="nll").fit(logits, target)
    assert exact.best_value_ <= refined.best_value_ <= exact.best_value_ + 1e-5
    assert refined.n_cells_ < 700


def test_refine_stays_within_its_bounds_and_warns_at_one():
    logits, target = sample(500, temperature=4.0)
    options = {"criterion": "nll", "gammas": [0.0], "temperatures": [0.5, 2.0]}
    calibrator = FocalTemperatureScaling(search="refine", **options).fit(logits, target)
    assert calibrator.temperature_ == 2.0
    assert calibrator.at_border_ == ("temperature = 2 is the largest that was searched",)
    one = FocalTemperatureScaling(search="refine", gammas=[0.3], temperatures=[1.5]).fit(logits, target)
    assert (one.gamma_, one.temperature_, one.at_border_) == (0.3, 1.5, ())
    plain = TemperatureScaling(search="refine", temperatures=[0.5, 20.0]).fit(logits, target)
    assert plain.temperature_ == pytest.approx(TemperatureScaling().fit(logits, target).temperature_, rel=0.01)


# -- all -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    "options",
    [
        {"n": 1, "n_classes": 2},
        {"n": 7, "n_classes": 1000},
        {"n": 50, "n_classes": 3, "dtype": torch.float16},
        {"n": 50, "n_classes": 3, "dtype": torch.float32},
    ],
)
def test_small_and_odd_data(search, options):
    logits, target = sample(**options)
    calibrator = FocalTemperatureScaling(search=search, **few(search)).fit(logits, target)
    assert calibrator.gamma_ > -1
    assert calibrator.temperature_ > 0
    probs = calibrator.predict_proba(logits)
    assert bool(probs.isfinite().all())
    assert_close(probs.double().sum(-1), torch.ones(len(logits)), dtype=logits.dtype)


@pytest.mark.parametrize("search", SEARCHES)
def test_saturated_rows(search):
    logits, target = torch.zeros(40, 4), torch.arange(40) % 4
    logits[torch.arange(40), (target + (torch.arange(40) % 5 == 0)) % 4] = 1e4
    calibrator = FocalTemperatureScaling(search=search, **few(search)).fit(logits, target)
    assert bool(calibrator.predict_proba(logits).isfinite().all())
    assert math.isfinite(calibrator.best_value_)


@pytest.mark.parametrize("search", SEARCHES)
def test_every_device(search, device):
    logits, target = (tensor.to(device) for tensor in sample(100))
    found, on_cpu = (
        FocalTemperatureScaling(search=search, **few(search)).fit(z, y)
        for z, y in ((logits, target), (logits.cpu(), target.cpu()))
    )
    assert found.best_value_ == pytest.approx(on_cpu.best_value_, rel=1e-6)


@pytest.mark.parametrize("search", SEARCHES)
def test_one_logit_per_row_is_two_classes(search):
    logits, target = sample(200, 2)
    margin = logits[:, 1] - logits[:, 0]
    options = few(search)
    one = FocalTemperatureScaling(search=search, **options).fit(margin, target)
    two = FocalTemperatureScaling(search=search, **options).fit(
        torch.stack([torch.zeros_like(margin), margin], -1), target
    )
    assert one.one_logit_
    assert not two.one_logit_
    assert (one.gamma_, one.temperature_) == (two.gamma_, two.temperature_)
    expected = reference.binary_focal_calibration_map(margin, one.gamma_, one.temperature_)
    assert_close(one.predict_proba(margin)[:, 1], expected)
    assert_close(one.as_module()(margin).sigmoid(), expected)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"search": "newton"}, ValueError, "search must be one of grid, line, refine, nll, brier, got 'newton'"),
        ({"search": "nll", "criterion": "ece"}, ValueError, "criterion must be 'nll' with search='nll', got 'ece'"),
        ({"search": "brier"}, ValueError, "criterion must be 'brier' with search='brier', got 'nll'"),
        ({"search": "nll", "gammas": [0.0]}, ValueError, "gammas must be None with search='nll'"),
        ({"search": "line", "temperatures": [1.0, -1.0]}, ValueError, "temperatures"),
        ({"search": "refine", "temperatures": []}, ValueError, "temperatures"),
        ({"search": "refine", "gammas": [0.0, -2.0]}, ValueError, "gammas"),
        ({"search": "line", "gammas": []}, ValueError, "gammas"),
        ({"search": "line", "n_bins": 0}, ValueError, "n_bins"),
    ],
)
def test_bad_options_are_named_and_leave_the_fitted_calibrator(options, error, words):
    logits, target = sample(50)
    calibrator = FocalTemperatureScaling(temperatures=[1.0, 2.0]).fit(logits, target)
    fitted = {name: value for name, value in vars(calibrator).items() if name.endswith("_")}
    calibrator.set_params(**{"temperatures": None, **options})
    with pytest.raises(error) as caught:
        calibrator.fit(logits, target)
    assert words in str(caught.value)
    assert {name: value for name, value in vars(calibrator).items() if name.endswith("_")} == fitted


@pytest.mark.parametrize("search", ["line", "refine", "nll", "brier"])
def test_bad_rows_are_named_by_every_search(search):
    logits, target = sample(50)
    calibrator = FocalTemperatureScaling(search=search, criterion="brier" if search == "brier" else "nll")
    with pytest.raises(ValueError, match="7"):
        calibrator.fit(logits.index_fill(0, torch.tensor(7), math.nan), target)
    with pytest.raises(IndexError, match="5"):
        calibrator.fit(logits, target + 1)


def test_the_paper_axes_are_the_default():
    assert (0.0, *PAPER_GAMMAS) == DEFAULT_GAMMAS
    assert PAPER_TEMPERATURES[0] == 0.01
    calibrator = FocalTemperatureScaling(criterion="ece").fit(*sample(40, 3))
    assert (calibrator.search_, calibrator.criterion_, calibrator.n_cells_) == ("grid", "ece", 5000)
