"""Spline scaling as a calibrator: invariances, order, odd data, files, modules, and calibrated rows."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import assert_close
from test_spline_fit import crossing, draw

import focalkern as fk
from focalkern import reference
from focalkern.calibrators import SplineScaling, load_calibrator

ALL = [SplineScaling(kind=kind) for kind in ("scalar", "vector", "matrix")] + [SplineScaling(keep_order=False)]
quiet = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")


def copy(calibrator, **changes):
    return type(calibrator)(**{**calibrator.get_params(), **changes})


def nll(log_probs, target):
    return float(-log_probs.gather(1, target.unsqueeze(1)).mean())


# -- invariances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrator", ALL, ids=repr)
def test_rows_classes_and_constants_change_nothing(calibrator):
    logits, target = draw(400, 5, scale=3.0)
    expected = copy(calibrator).fit(logits, target).predict_log_proba(logits)

    def assert_same(found):
        # L-BFGS takes the same steps up to rounding, which the steps amplify.
        assert found.numpy() == pytest.approx(expected.numpy(), abs=1e-10 if calibrator.kind == "scalar" else 1e-7)

    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    assert_same(copy(calibrator).fit(logits[order], target[order]).predict_log_proba(logits))
    shift = torch.linspace(-3, 3, 400, dtype=torch.float64).unsqueeze(1)
    assert_same(copy(calibrator).fit(logits + shift, target).predict_log_proba(logits - shift))
    classes = torch.tensor([3, 0, 4, 1, 2])
    permuted = copy(calibrator).fit(logits[:, classes], classes.argsort()[target])
    assert_same(permuted.predict_log_proba(logits[:, classes])[:, classes.argsort()])


@pytest.mark.parametrize("calibrator", ALL, ids=repr)
def test_a_weight_counts_rows(calibrator):
    logits, target = draw(300, 4)
    times = torch.arange(300) % 3
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    repeated = copy(calibrator).fit(logits.repeat_interleave(times, 0), target.repeat_interleave(times))
    weighted = copy(calibrator).fit(logits[order], target[order], times[order].double())
    assert (weighted.weight_sum_, weighted.n_samples_) == (300, 200)
    found, expected = (one.predict_log_proba(logits).numpy() for one in (weighted, repeated))
    assert found == pytest.approx(expected, abs=1e-10 if calibrator.kind == "scalar" else 1e-7)


def test_the_scale_of_the_logits_is_that_of_the_temperature():
    logits, target = draw(5000, 4)
    one, other = (SplineScaling().fit(scale * logits, target) for scale in (1.0, 1e4))
    found, expected = other.predict_log_proba(1e4 * logits), one.predict_log_proba(logits)
    assert found.numpy() == pytest.approx(expected.numpy(), rel=0, abs=0.02)


# -- order -----------------------------------------------------------------------------------------------------------


def assert_order_is_kept(input, probs):
    """Equal inputs have bitwise equal outputs, and larger inputs never smaller outputs."""
    order = input.argsort(-1)
    input, probs = input.gather(-1, order), probs.gather(-1, order)
    step = probs.diff(dim=-1)
    assert bool((step >= 0).all())
    assert bool((step[input.diff(dim=-1) == 0] == 0).all())


@quiet
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("n_classes", [2, 3, 10])
def test_a_scalar_curve_keeps_the_order_of_every_row(dtype, kind, n_classes):
    logits, target = crossing(n_classes=n_classes)
    new = 3 * torch.randn(10_000, n_classes, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    new[::3, 1] = new[::3, 0]  # ties
    new[1::3, 1] = torch.nextafter(new[1::3, 0], torch.tensor(math.inf, dtype=torch.float64))
    new[2::5] = (new[2::5] * 4).round() / 4
    if kind == "probs":
        logits, new = logits.softmax(-1), new.softmax(-1)
    calibrator = SplineScaling(input_kind=kind).fit(logits, target)
    new = new.to(dtype)
    if kind == "probs":
        new = new / new.sum(-1, keepdim=True)
    assert_order_is_kept(new, calibrator.predict_proba(new))
    assert_order_is_kept(new, calibrator.predict_log_proba(new))
    assert_order_is_kept(new, calibrator.as_module()(new))
    assert torch.equal(calibrator.predict(new), new.argmax(-1))
    assert calibrator.n_changed_ == 0
    assert not calibrator.changed(new).any()


def test_a_free_curve_turns_a_wrong_classifier_round():
    logits, target = draw(2000, 2)
    kept, free = (SplineScaling(keep_order=keep).fit_quietly(logits, 1 - target) for keep in (None, False))
    assert kept.n_changed_ == 0
    assert free.score(logits, 1 - target) > 0.7 > kept.score(logits, 1 - target)
    assert free.n_changed_ == int(free.changed(logits).sum()) > 1000
    assert free.best_value_ < kept.best_value_


# -- zeros and masks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrator", ALL, ids=repr)
def test_a_masked_logit_has_probability_zero(calibrator):
    logits, target = draw(400, 5)
    masked = logits.masked_fill(
        (torch.arange(5) == (target.unsqueeze(1) + 1 + torch.arange(400).unsqueeze(1) % 3) % 5), -math.inf
    )
    fitted = copy(calibrator).fit(masked, target)
    assert fitted.masks_
    for module in (fitted.predict_proba, lambda z: fitted.as_module()(z).exp()):
        probs = module(masked)
        assert torch.equal(probs == 0, masked == -math.inf)
        assert_close(probs.sum(-1), torch.ones(400, dtype=torch.float64))
    assert torch.equal(fitted.predict_log_proba(masked) == -math.inf, masked == -math.inf)


@pytest.mark.parametrize("calibrator", ALL, ids=repr)
def test_a_probability_of_zero_is_a_small_one(calibrator):
    """Votes of trees: a class without a vote is still possible, and is the target of some rows."""
    logits, target = draw(500, 4)
    votes = torch.multinomial(logits.softmax(-1), 10, replacement=True, generator=torch.Generator().manual_seed(0))
    probs = torch.nn.functional.one_hot(votes, 4).double().mean(1)
    assert bool((probs.gather(1, target.unsqueeze(1)) == 0).any())
    fitted = copy(calibrator, input_kind="probs").fit(probs, target)
    found = fitted.predict_proba(probs)
    assert float(found.min()) > 0
    assert nll(found.log(), target) < 1.2
    # Their logarithms as logits give the same fit, because the labels show that -inf does not mean impossible.
    with pytest.warns(fk.CalibrationWarning, match="its label at a logit of -inf"):
        of_logs = copy(calibrator).fit(probs.log(), target)
    assert not of_logs.masks_
    assert_close(of_logs.predict_proba(probs.log()), found)


# -- edges -----------------------------------------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize("calibrator", ALL, ids=repr)
@pytest.mark.parametrize("n_classes", [2, 4])
def test_odd_data(calibrator, n_classes):
    logits, target = draw(50, n_classes)
    cases = {
        "one row": (logits[:1], target[:1]),
        "two rows": (logits[:2], target[:2]),
        "fewer rows than classes": (draw(3, 20)[0], draw(3, 20)[1]),
        "separable": (logits, logits.argmax(-1)),
        "always wrong": (logits, logits.argmin(-1)),
        "one class only": (logits, target * 0),
        "constant": (logits * 0, target),
        "tiny": (logits * 1e-300, target),
        "huge": (logits * 1e300, target),
    }
    for name, (z, y) in cases.items():
        fitted = copy(calibrator).fit(z, y)
        new = torch.cat([z, 100 * z, -z])
        probs = fitted.predict_proba(new)
        assert bool(((probs > 0) & (probs < 1)).all()), name
        assert_close(probs.sum(-1), torch.ones(len(new), dtype=torch.float64))
        assert fitted.converged_, name
    assert copy(calibrator).fit(logits, target).predict_proba(logits[:0]).shape == (0, n_classes)


@quiet
@pytest.mark.parametrize("kind", ["scalar", "vector", "matrix"])
def test_random_labels_leave_no_less_than_chance(kind):
    logits = 3 * torch.randn(2000, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(1)
    first, second = (torch.randint(10, (2000,), generator=random) for _ in range(2))
    calibrator = SplineScaling(kind=kind).fit(logits, first)
    assert nll(calibrator.predict_log_proba(logits), second) == pytest.approx(math.log(10), abs=0.02)
    assert calibrator.best_value_ > math.log(10) - 0.03


@quiet
@pytest.mark.parametrize(
    ("n_rows", "scalar", "vector"), [(50, 0.025, 0.03), (200, 0.012, 0.015), (1000, 0.002, 0.008), (5000, 0.001, 0.004)]
)
def test_rows_that_are_calibrated_stay_so(n_rows, scalar, vector):
    """The mean excess of the NLL over that of the true probabilities; labels are drawn from softmax(z)."""
    for kind, bound in (("scalar", scalar), ("vector", vector)):
        excess = []
        for n_classes in (2, 10, 100):
            for seed in range(3 if n_rows < 1000 else 1):
                logits, target = draw(n_rows, n_classes, seed=seed, scale=1.0)
                new = draw(2000, n_classes, seed=100 + seed, scale=1.0)[0]
                truth = new.log_softmax(-1)
                found = SplineScaling(kind=kind).fit(logits, target).predict_log_proba(new)
                excess.append(float((truth.exp() * (truth - found)).sum(-1).mean()))
        assert sum(excess) / len(excess) <= bound, kind


def test_a_class_without_rows_is_named():
    logits, target = draw(300, 4)
    target = torch.where(target == 2, 0, target)
    assert SplineScaling().fit_quietly(logits, target).warnings_ == ()
    for kind in ("vector", "matrix"):
        with pytest.warns(fk.CalibrationWarning, match="no row of fit has class 2, so its probability falls"):
            fitted = SplineScaling(kind=kind).fit(logits, target)
        assert fitted.bias_.argmin() == 2
    with pytest.warns(fk.CalibrationWarning, match="5 rows of fit may be too few for a spline"):
        SplineScaling().fit(logits[:5], target[:5])


# -- numbers of the fit, files, modules ------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrator", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_types_files_and_exports(calibrator, dtype, tmp_path):
    logits, target = draw(600, 4, scale=3.0)
    logits = logits.to(dtype)
    calibrator = copy(calibrator).fit(logits, target)
    log_probs = calibrator.predict_log_proba(logits)
    assert log_probs.dtype == dtype
    expected = reference.spline_calibration_map(
        logits.double(),
        calibrator.temperature_,
        calibrator.floor_,
        calibrator.slope_,
        torch.from_numpy(calibrator.knots_),
        torch.from_numpy(calibrator.values_),
        weight=None if calibrator.weight_ is None else torch.from_numpy(calibrator.weight_),
        bias=None if calibrator.bias_ is None else torch.from_numpy(calibrator.bias_),
        log=True,
    )
    close = {"rel": 0, "abs": 1e-12 if dtype == torch.float64 else 1e-5}
    assert log_probs.numpy() == pytest.approx(expected.numpy(), **close)
    assert calibrator.best_value_ == pytest.approx(nll(expected, target), rel=1e-9)
    assert calibrator.n_changed_ == int(calibrator.changed(logits).sum())
    assert 1 < calibrator.degrees_of_freedom_ < len(calibrator.knots_) + 1
    assert np.linalg.eigvalsh(calibrator.covariance_).min() > 0

    path = tmp_path / "calibrator.json"
    calibrator.save(path)
    loaded = load_calibrator(path)
    assert loaded.get_params() == calibrator.get_params()
    assert torch.equal(loaded.predict_log_proba(logits), log_probs)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()

    module = calibrator.as_module()
    assert module(logits).numpy() == pytest.approx(log_probs.numpy(), rel=0, abs=1e-12)
    assert_close(module.half().double()(logits), log_probs)  # numbers that a cast to half precision must not round
    program = torch.export.export(module, (logits,))
    assert program.module()(logits).numpy() == pytest.approx(log_probs.numpy(), **close)
    loss = -module(logits.requires_grad_()).gather(1, target.unsqueeze(1)).mean()
    (slope,) = torch.autograd.grad(loss, logits)
    assert bool(slope.isfinite().all())
    assert float(slope.abs().max()) > 0
    arrays = (calibrator.knots_ * 0 + np.arange(len(calibrator.knots_)), calibrator.values_ * 0)
    linear = (calibrator.weight_, calibrator.bias_)
    other = type(module)(
        1.0,
        0.5,
        0.0,
        *map(torch.from_numpy, arrays),
        *(None if one is None else torch.from_numpy(one * 0) for one in linear),
        keep_order=module.keep_order,
    )
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(logits), module(logits))


@pytest.mark.parametrize("calibrator", ALL, ids=repr)
def test_one_logit_per_row_is_two_classes(calibrator):
    logits, target = draw(400, 2)
    margin = logits[:, 1] - logits[:, 0]
    pairs = torch.stack([torch.zeros_like(margin), margin], -1)
    one, two = copy(calibrator).fit(margin, target), copy(calibrator).fit(pairs, target)
    assert torch.equal(one.predict_proba(margin), two.predict_proba(pairs))
    assert_close(one.as_module()(margin).sigmoid(), one.predict_proba(margin)[:, 1])


@pytest.mark.parametrize("calibrator", ALL, ids=repr)
def test_probabilities_are_their_logarithms(calibrator):
    logits, target = draw()
    probs = logits.softmax(-1)
    expected = copy(calibrator).fit(probs.log(), target).predict_proba(probs.log())
    fitted = copy(calibrator, input_kind="probs").fit(probs, target)
    assert_close(fitted.predict_proba(probs), expected)
    assert_close(fitted.as_module()(probs).exp(), expected)


def test_every_device(device):
    logits, target = draw(200, 4)
    for calibrator in ALL:
        on_cpu = copy(calibrator).fit(logits, target).predict_proba(logits)
        found = copy(calibrator).fit(logits.to(device), target.to(device)).predict_proba(logits.to(device))
        assert found.device.type == torch.device(device).type
        assert found.cpu().numpy() == pytest.approx(on_cpu.numpy(), abs=1e-6)


@pytest.mark.parametrize(
    "calibrator",
    [*ALL, fk.TemperatureScaling(), fk.FocalTemperatureScaling(), fk.StructuredScaling(), fk.AutoCalibrator()],
    ids=repr,
)
def test_rows_stay_on_the_cpu_whatever_the_default_device_is(calibrator):
    """On the meta device numbers have no values, so a number that is made there by mistake raises."""
    logits, target = draw(200, 4)
    expected = copy(calibrator).fit(logits, target).predict_proba(logits)
    with torch.device("meta"):
        found = copy(calibrator).fit(logits, target).predict_proba(logits)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("n_threads", [2, 4])
def test_threads_change_nothing(n_threads):
    logits, target = draw(3000, 30)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, n_threads):
            torch.set_num_threads(threads)
            found.append([copy(one).fit(logits, target).predict_log_proba(logits) for one in ALL])
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"knots": [0.0, 1.0, 2.0]}, "4 to 10 knots"),
        ({"knots": [0.0, 0.1, 2.0, 3.0]}, "rise by 0.25"),
        ({"knots": [3.0, 2.0, 1.0, 0.0]}, "rise by 0.25"),
        ({"knots": [0.0, math.nan, 2.0, 3.0]}, "knots to be numbers"),
        ({"values": [0.0]}, "values"),
        ({"values": "x"}, "values must be a list of numbers, found .x.; fit and save it again"),
        ({"values": [1e308] * 9}, "values to be numbers up to 1e\\+06"),
        ({"weight": [1.0, 1.0]}, "weight"),
        ({"bias": [1e308] * 4}, "bias to be numbers"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1e308}, "1e-305 < temperature < 1e305"),
        ({"floor": 0.0}, "floor"),
        ({"floor": 1.0}, "floor"),
        ({"slope": 1e308}, "slope"),
        ({"masks": 1}, "masks"),
        ({"masks": None}, "masks"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(change, words, tmp_path):
    path = tmp_path / "bad.json"
    SplineScaling(kind="vector").fit(*draw()).save(path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **change}))
    with pytest.raises(ValueError, match=f"bad.json: not a valid calibrator: .*{words}"):
        load_calibrator(path)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kind": "tensor"}, ValueError, "kind must be one of scalar, vector, matrix"),
        ({"kind": "vector", "keep_order": True}, ValueError, "keep_order must be None or False"),
        ({"keep_order": 1}, TypeError, "keep_order"),
        ({"penalty": 0.0}, ValueError, "penalty must be from 1e-6 to 1e6"),
        ({"penalty": True}, TypeError, "penalty must be a number"),
        ({"input_kind": "votes"}, ValueError, "input_kind"),
    ],
)
def test_bad_options_are_named(options, error, words):
    with pytest.raises(error, match=f"^SplineScaling: .*{words}"):
        SplineScaling(**options).fit(*draw())
