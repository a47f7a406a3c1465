"""Structured scaling and isotonic regression: compared with definitions and peers, saved, exported, and on odd data."""

import importlib.metadata
import itertools
import json
import math
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from conftest import assert_close, peer

import focalkern as fk
from focalkern import reference
from focalkern.calibrators import IsotonicCalibration, StructuredScaling, TemperatureScaling, load_calibrator

# Small sets are enough for what these tests show.
pytestmark = pytest.mark.filterwarnings("ignore:.*rows per class are few:focalkern.CalibrationWarning")

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

# "auto" would depend on the installed packages.
ALL = [
    StructuredScaling(kind="vector", solver="lbfgs"),
    StructuredScaling(kind="matrix", solver="lbfgs"),
    StructuredScaling(kind="matrix", focal=True, solver="lbfgs"),
    IsotonicCalibration(),
]


def sample(n=600, n_classes=4, seed=0, dtype=torch.float64):
    """Logits after scaling, shifts and a mixture of classes, which a matrix inverts."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    mixing = torch.eye(n_classes, dtype=torch.float64) + 0.2 * torch.randn(
        n_classes, n_classes, generator=generator, dtype=torch.float64
    )
    return (1.7 * logits @ mixing + torch.linspace(-1, 1, n_classes)).to(dtype), target


def copy(calibrator, **changes):
    return type(calibrator)(**{**calibrator.get_params(), **changes})


def nll(log_probs, target):
    return float(-log_probs.gather(1, target.unsqueeze(1)).mean())


# -- structured scaling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vector", "matrix"])
@pytest.mark.parametrize("n_classes", [2, 4])
def test_weight_and_bias_minimise_the_penalised_likelihood(kind, n_classes):
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    n, penalty = 80, 0.7
    logits, target = sample(n, n_classes)
    calibrator = StructuredScaling(kind=kind, penalty=penalty, solver="lbfgs").fit(logits, target)
    assert calibrator.temperature_ == TemperatureScaling().fit(logits, target).temperature_
    q = (logits / calibrator.temperature_).softmax(-1).numpy()
    x, y = np.log(n / (n + 1) * q + 1 / (n + 1) / n_classes), target.numpy()
    identity = np.eye(n_classes)

    def value(parameters):
        w, b = np.split(parameters, [-n_classes])
        w = identity + (np.diag(w) if kind == "vector" else w.reshape(n_classes, n_classes))
        a = x @ w.T + b
        loss = (np.log(np.exp(a).sum(1)) - a[np.arange(n), y]).mean()
        diagonal, rest = (np.diag(w) - 1) ** 2, (w * (1 - identity)) ** 2
        ridge = n_classes * (diagonal.sum() + (b**2).sum()) + n_classes * (n_classes - 1) * rest.sum()
        return loss + penalty * ridge / n

    size = n_classes * (1 if kind == "vector" else n_classes)
    other = optimize.minimize(value, np.zeros(size + n_classes), options={"gtol": 1e-7})
    w = calibrator.weight_ - (1 if kind == "vector" else identity)
    ours = np.concatenate([w.ravel(), calibrator.bias_])
    assert value(ours) <= other.fun + 1e-9
    assert ours == pytest.approx(other.x, abs=1e-4)
    assert calibrator.best_value_ == pytest.approx(nll(calibrator.predict_log_proba(logits), target), rel=1e-12)


@pytest.fixture
def probmetrics():
    peer("numba")  # a package that it imports
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        return peer("probmetrics.calibrators")


def like_a_network(seed):
    """Rows and labels: confident in a class that is correct in three quarters of the rows; some classes are rare."""
    generator = torch.Generator().manual_seed(seed)
    target = (torch.rand(1500, generator=generator).square() * 20).long()
    seen = torch.where(torch.rand(1500, generator=generator) < 0.75, target, target.roll(1))
    return 8 * torch.nn.functional.one_hot(seen, 20) + 2 * torch.randn(1500, 20, generator=generator), target


@pytest.mark.parametrize(("rows", "input_kind"), [(sample, "probs"), (like_a_network, "logits")])
@pytest.mark.parametrize("penalty", [0.2, 1.0])
@pytest.mark.parametrize("kind", ["vector", "matrix"])
def test_both_solvers_find_the_same(probmetrics, kind, penalty, rows, input_kind):
    (logits, target), (new, new_target) = rows(seed=0), rows(seed=1)
    if input_kind == "probs":
        logits, new = logits.softmax(-1), new.softmax(-1)
    options = {"kind": kind, "penalty": penalty, "input_kind": input_kind}
    ours, theirs = (
        StructuredScaling(solver=solver, **options).fit(logits, target) for solver in ("lbfgs", "probmetrics")
    )
    assert (ours.solver_, theirs.solver_.partition(" ")[0]) == ("lbfgs", "probmetrics")
    assert theirs.best_value_ == pytest.approx(ours.best_value_, abs=1e-3)
    found, expected = (one.predict_log_proba(new) for one in (theirs, ours))
    assert nll(found, new_target) == pytest.approx(nll(expected, new_target), abs=1e-3)
    assert found.exp().numpy() == pytest.approx(expected.exp().numpy(), abs=5e-3)


@pytest.mark.parametrize(("kind", "theirs"), [("vector", "SVSCalibrator"), ("matrix", "SMSCalibrator")])
def test_the_probabilities_are_probmetrics(probmetrics, kind, theirs):
    logits, target = sample(600, 5)
    new = sample(400, 5, seed=1)[0]
    other = getattr(probmetrics, theirs)().fit(logits.softmax(-1).numpy(), target.numpy())
    calibrator = StructuredScaling(kind=kind, solver="probmetrics").fit(logits, target)
    expected = other.predict_proba(new.softmax(-1).numpy())
    assert calibrator.predict_proba(new).numpy() == pytest.approx(expected, abs=1e-5)


def test_the_solver_is_reported_and_saved(probmetrics, tmp_path):
    logits, target = sample()
    calibrator = StructuredScaling().fit(logits, target)
    assert calibrator.solver_ == f"probmetrics {importlib.metadata.version('probmetrics')}"
    calibrator.save(tmp_path / "calibrator.json")
    document = json.loads((tmp_path / "calibrator.json").read_text())
    assert document["parameters"]["solver"] == "auto"
    assert document["fit"]["solver"] == calibrator.solver_
    assert load_calibrator(tmp_path / "calibrator.json").solver_ == calibrator.solver_


@pytest.mark.parametrize("case", ["weights", "zeros", "absent", "another version"])
def test_where_probmetrics_cannot_the_other_one_does(case, monkeypatch):
    logits, target = sample(100)
    weight = None
    if case == "weights":
        weight, error, words = torch.linspace(0.1, 2, 100), ValueError, "solver 'probmetrics' takes no sample_weight"
    elif case == "zeros":
        logits[3, (target[3] + 1) % 4] = -math.inf
        error, words = ValueError, r"takes probabilities above 0, got 0 at \(row, class\) \(3, "
    else:
        library = None if case == "absent" else types.ModuleType("of another version")
        monkeypatch.setitem(sys.modules, "probmetrics", library)
        monkeypatch.setitem(sys.modules, "probmetrics.calibrators", library)
        monkeypatch.setattr("focalkern.calibrators._probmetrics.version", lambda name: "9.9")
        error = ImportError
        words = "pip install" if case == "absent" else r"expected probmetrics 1\.3, found probmetrics 9\.9"
    auto, named = (StructuredScaling(solver=solver).fit(logits, target, weight) for solver in ("auto", "lbfgs"))
    assert auto.solver_ == "lbfgs"
    assert (auto.weight_ == named.weight_).all()
    with pytest.raises(error, match=f"^StructuredScaling: .*{words}"):
        StructuredScaling(solver="probmetrics").fit(logits, target, weight)


def test_rows_are_looked_at_in_blocks(monkeypatch):
    rows = sample(103)
    whole = StructuredScaling(solver="lbfgs").fit(*rows)
    monkeypatch.setattr("focalkern.calibrators._structured._BLOCK", 40)
    parts = StructuredScaling(solver="lbfgs").fit(*rows)
    assert parts.weight_ == pytest.approx(whole.weight_, abs=1e-6)


def test_a_large_penalty_leaves_temperature_scaling():
    logits, target = sample(300)
    calibrator = StructuredScaling(penalty=1e9).fit(logits, target)
    plain = TemperatureScaling().fit(logits, target).predict_proba(logits)
    # Except for the floor, which is a share of 1 / 301.
    assert float((calibrator.predict_proba(logits) - plain).abs().max()) < 1 / 301


def test_structure_that_is_there_is_found():
    logits, target = sample(3000)
    new, new_target = sample(3000, seed=0)
    values = {
        name: nll(calibrator.fit(logits, target).predict_log_proba(new), new_target)
        for name, calibrator in {
            "temperature": TemperatureScaling(),
            "vector": StructuredScaling(kind="vector"),
            "matrix": StructuredScaling(kind="matrix"),
        }.items()
    }
    assert values["matrix"] < values["vector"] < values["temperature"]


def test_the_focal_map_on_top_is_fitted_to_the_scores():
    logits, target = sample()
    below = StructuredScaling().fit(logits, target)
    both = StructuredScaling(focal=True).fit(logits, target)
    assert (both.weight_ == below.weight_).all()
    scores = below.predict_log_proba(logits)
    focal = fk.FocalTemperatureScaling().fit_quietly(scores, target)
    assert both.focal_gamma_ == pytest.approx(focal.gamma_, abs=1e-4)
    assert both.best_value_ == pytest.approx(focal.best_value_, rel=1e-9)
    assert both.best_value_ <= below.best_value_
    expected = reference.focal_calibration_map(scores, both.focal_gamma_, both.focal_temperature_)
    assert_close(both.predict_proba(logits), expected)


# -- isotonic regression ---------------------------------------------------------------------------------------------


def test_steps_are_the_least_squares_of_their_definition():
    isotonic = peer("sklearn.isotonic")
    logits, target = sample(200)
    calibrator = IsotonicCalibration().fit(logits, target)
    probs = logits.softmax(-1).numpy()
    columns = []
    for k in range(4):
        regression = isotonic.IsotonicRegression(out_of_bounds="clip")
        columns.append(regression.fit(probs[:, k], target.numpy() == k))
    new, _ = sample(300, seed=2)
    p = new.softmax(-1).numpy()
    raw = np.stack([one.predict(p[:, k]) for k, one in enumerate(columns)], 1)
    raw = raw * 200 / 201 + 1 / 201 / 4
    assert calibrator.predict_proba(new).numpy() == pytest.approx(raw / raw.sum(1, keepdims=True), abs=1e-12)


@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
def test_an_isotonic_fit_with_an_infinite_nll_is_saved(tmp_path):
    """The label of the first row has probability 0."""
    peer("sklearn.isotonic")
    probs = torch.tensor([[1.0, 0.0], [0.8, 0.2], [0.3, 0.7]])
    calibrator = IsotonicCalibration(input_kind="probs").fit(probs, torch.tensor([1, 0, 1]))
    calibrator.save(tmp_path / "calibrator.json")
    loaded = load_calibrator(tmp_path / "calibrator.json")
    assert loaded.best_value_ == calibrator.best_value_ == math.inf
    assert torch.equal(loaded.predict_proba(probs), calibrator.predict_proba(probs))


def test_only_what_cannot_occur_has_probability_zero():
    logits, target = sample(100)
    logits[0] = torch.tensor([800.0, 0.0, -900.0, -math.inf])
    target[0] = 0
    calibrator = IsotonicCalibration().fit(logits, target)
    probs = calibrator.predict_proba(logits)
    assert (probs == 0).nonzero().tolist() == [[0, 3]]
    assert_close(probs.sum(-1), torch.ones(100, dtype=torch.float64))


# -- all -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrator", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_types_files_and_exports(calibrator, dtype, tmp_path):
    logits, target = sample(dtype=dtype)
    calibrator = copy(calibrator).fit(logits, target)
    probs = calibrator.predict_proba(logits)
    assert probs.dtype == dtype
    assert_close(probs.double().sum(-1), torch.ones(600), dtype=dtype)
    assert np.array_equal(calibrator.predict_proba(logits.numpy()), probs.numpy())
    assert calibrator.n_changed_ == int(calibrator.changed(logits).sum()) > 0
    assert torch.equal(calibrator.predict(logits), calibrator.predict_log_proba(logits).argmax(-1))
    assert_close(calibrator.predict_proba(logits.reshape(6, 100, 4)).reshape(600, 4), probs)

    path = tmp_path / "calibrator.json"
    calibrator.save(path)
    loaded = load_calibrator(path)
    assert loaded.get_params() == calibrator.get_params()
    assert torch.equal(loaded.predict_proba(logits), probs)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()

    module = calibrator.as_module()
    assert_close(module(logits), calibrator.predict_log_proba(logits))
    cast = module.half().double()  # its numbers are not rounded
    wide = logits.float() if dtype == torch.float16 else logits  # the probabilities are rounded only at the end
    assert_close(cast(wide).exp(), probs, dtype=dtype)
    if dtype == torch.float32:
        network = torch.nn.Sequential(torch.nn.Linear(3, 4), calibrator.as_module()).eval()
        batch = torch.randn(7, 3)
        program = torch.export.export(network, (batch,))
        assert_close(program.module()(batch), network(batch))
        other = type(module)(*arguments_of(module))
        other.load_state_dict(calibrator.as_module().state_dict())
        assert torch.equal(other(logits), calibrator.as_module()(logits))


def arguments_of(module):
    """Whether a state dict of another module with the same shapes is refused."""
    if hasattr(module, "points"):
        c, m = module.points.shape
        return [(np.linspace(0, 1, m), np.linspace(0, 1, m))] * c, 0.5
    return 1.0, 0.5, torch.zeros_like(module.weight), torch.zeros_like(module.bias), (1.0, 2.0)


@pytest.mark.parametrize("calibrator", ALL, ids=repr)
def test_one_logit_per_row_is_two_classes(calibrator):
    logits, target = sample(400, 2)
    margin = logits[:, 1] - logits[:, 0]
    one = copy(calibrator).fit(margin, target)
    two = copy(calibrator).fit(torch.stack([torch.zeros_like(margin), margin], -1), target)
    assert torch.equal(
        one.predict_proba(margin), two.predict_proba(torch.stack([torch.zeros_like(margin), margin], -1))
    )
    assert_close(one.as_module()(margin).sigmoid(), one.predict_proba(margin)[:, 1])


@pytest.mark.parametrize("calibrator", ALL, ids=repr)
def test_probabilities_are_their_logarithms(calibrator):
    logits, target = sample()
    from_logits = copy(calibrator).fit(logits, target).predict_proba(logits)
    of_probs = copy(calibrator, input_kind="probs").fit(logits.softmax(-1), target)
    assert of_probs.predict_proba(logits.softmax(-1)).numpy() == pytest.approx(from_logits.numpy(), abs=1e-5)
    assert_close(of_probs.as_module()(logits.softmax(-1)).exp(), of_probs.predict_proba(logits.softmax(-1)))


@pytest.mark.parametrize("calibrator", ALL, ids=repr)
@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
def test_odd_data(calibrator):
    logits, target = sample(50)
    cases = {
        "one row": (logits[:1], target[:1]),
        "separable": (logits, logits.argmax(-1)),
        "one class only": (logits, target * 0),
        "constant": (logits * 0, target),
        "huge": (logits * 1e4, target),
        "cannot occur": (logits.masked_fill(torch.arange(4) == (target.unsqueeze(1) + 1) % 4, -math.inf), target),
    }
    for name, (z, y) in cases.items():
        probs = copy(calibrator).fit(z, y).predict_proba(z)
        assert bool(probs.isfinite().all()), name
        assert_close(probs.sum(-1), torch.ones(len(z), dtype=torch.float64))
    fitted = copy(calibrator).fit(logits, target)
    assert fitted.predict_proba(logits[:0]).shape == (0, 4)


def test_every_device(device):
    logits, target = sample(200)
    for calibrator in ALL:
        on_cpu = copy(calibrator).fit(logits, target).predict_proba(logits)
        found = copy(calibrator).fit(logits.to(device), target.to(device)).predict_proba(logits.to(device))
        assert found.device.type == torch.device(device).type
        assert found.cpu().numpy() == pytest.approx(on_cpu.numpy(), abs=1e-6)


@pytest.mark.parametrize(
    ("calibrator", "change", "words"),
    [
        (StructuredScaling(), {"weight": [1.0, 1.0]}, "expected weight [4, 4] and bias [4], found [2] and [4]"),
        (StructuredScaling(), {"bias": [1.0, math.nan, 1.0, 1.0]}, "finite"),
        (StructuredScaling(), {"temperature": -1.0}, "expected gamma > -1 and temperature > 0"),
        (StructuredScaling(), {"focal_gamma": -1.0}, "expected focal_gamma > -1 and focal_temperature > 0"),
        (StructuredScaling(), {"epsilon": 0.0}, "expected an epsilon between 1e-100 and 1, found 0.0"),
        (IsotonicCalibration(), {"epsilon": 1.0}, "expected an epsilon between 1e-100 and 1, found 1.0"),
        (IsotonicCalibration(), {"steps": []}, "expected steps of 4 classes, found 0"),
        (IsotonicCalibration(), {"steps": [{"from": [0.5, 0.1], "to": [0, 1]}] * 4}, "rise within [0, 1]"),
        (IsotonicCalibration(), {"steps": [{"from": [0.5], "to": [math.nan]}] * 4}, "rise within [0, 1]"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(calibrator, change, words, tmp_path):
    path = tmp_path / "calibrator.json"
    copy(calibrator).fit(*sample()).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=r"calibrator\.json: not a valid calibrator") as caught:
        load_calibrator(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kind": "diagonal"}, ValueError, "kind must be one of vector, matrix, got 'diagonal'"),
        ({"penalty": -1.0}, ValueError, "penalty must be at least 0 and finite, got -1.0"),
        ({"penalty": "1"}, TypeError, "penalty must be a number, got str"),
        ({"input_kind": "probs"}, ValueError, "StructuredScaling: logits must"),
    ],
)
def test_bad_options_are_named(options, error, words):
    with pytest.raises(error) as caught:
        StructuredScaling(**options).fit(*sample())
    assert words in str(caught.value)


def test_in_cross_validation():
    selection = peer("sklearn.model_selection")
    logits, target = (tensor.numpy() for tensor in sample())
    names = np.array(["ape", "bee", "cat", "dog"])[target]
    for calibrator, y in itertools.product((StructuredScaling(kind="vector"), IsotonicCalibration()), (target, names)):
        probs = selection.cross_val_predict(calibrator, logits, y, cv=3, method="predict_proba")
        assert probs.sum(1) == pytest.approx(np.ones(600))
