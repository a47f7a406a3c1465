"""Rules for every calibrator: -inf means impossible, NaN and +inf are errors, and ties and order are kept."""

import math
import pickle

import numpy as np
import pytest
import torch
from conftest import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import focalkern as fk

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")

KEEP_THE_ORDER = {
    "temperature": fk.TemperatureScaling,
    "temperature by a grid": lambda **options: fk.TemperatureScaling(temperatures=[0.5, 1.0, 2.0], **options),
    "focal": fk.FocalTemperatureScaling,
    # Its default candidates apply a floor to probabilities of 0.
    "auto": lambda **options: fk.AutoCalibrator({"plain": fk.TemperatureScaling(**options)}, folds=2, **options),
}
EVERY = {
    **KEEP_THE_ORDER,
    "vector": lambda **options: fk.StructuredScaling(kind="vector", solver="lbfgs", **options),
    "matrix": lambda **options: fk.StructuredScaling(solver="lbfgs", **options),
    "focal matrix": lambda **options: fk.StructuredScaling(focal=True, solver="lbfgs", **options),
    "isotonic": fk.IsotonicCalibration,
    "bins": lambda **options: fk.HistogramBinning(n_bins=4, **options),
    "bins after a scaling": lambda **options: fk.HistogramBinning(
        n_bins=4, scaling=fk.TemperatureScaling(**options), **options
    ),
}
every = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
kinds = pytest.mark.parametrize("kind", ["logits", "probs"])


def sample(n=400, n_classes=5, seed=0):
    """Over-confident logits; every row has at least one impossible class."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    impossible = torch.rand(n, n_classes, generator=generator) < torch.linspace(0, 1, n).unsqueeze(1)
    impossible[torch.arange(n), target] = False
    return (2 * logits).masked_fill(impossible, -math.inf), target


def of_kind(logits, kind):
    return logits.softmax(-1) if kind == "probs" else logits


@every
@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_class_that_cannot_occur_keeps_probability_0(make, kind, dtype):
    logits, target = sample()
    input = of_kind(logits, kind).to(dtype)
    impossible = input == (0 if kind == "probs" else -math.inf)
    calibrator = make(input_kind=kind).fit(input, target)
    probs, log_probs = calibrator.predict_proba(input), calibrator.predict_log_proba(input)
    assert bool((probs[impossible] == 0).all())
    assert bool((log_probs[impossible] == -math.inf).all())
    assert_close(probs.sum(-1), torch.ones(len(probs), dtype=dtype))
    alone = (~impossible).sum(-1) == 1
    assert int(alone.sum()) > 10
    assert bool((probs[alone].amax(-1) == 1).all())
    module = calibrator.as_module()(input)
    assert bool((module[impossible] == -math.inf).all())
    assert_close(module.exp(), probs)


def test_the_weights_are_fitted_to_the_classes_that_can_occur():
    """The penalised likelihood of masked rows, against a descent by autograd."""
    logits, target = sample(60, 3)
    calibrator = fk.StructuredScaling(kind="vector", solver="lbfgs").fit(logits, target)
    module = calibrator.as_module()
    x, possible = module.features(logits), logits > -math.inf
    start = [torch.tensor(getattr(calibrator, f"{name}_"), requires_grad=True) for name in ("weight", "bias")]

    def loss(weight, bias):
        log_probs = (x * weight + bias).masked_fill(~possible, -math.inf).log_softmax(-1)
        penalty = 3 / 60 * ((weight - 1).square().sum() + bias.square().sum())
        return penalty - log_probs.gather(1, target.unsqueeze(1)).mean()

    for slope in torch.autograd.grad(loss(*start), start):
        assert slope.abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["vector", "matrix"])
def test_structured_scaling_refuses_an_impossible_target(kind):
    logits, target = sample()
    logits[7, target[7]] = -math.inf
    logits[7, (target[7] + 1) % 5] = 0.0
    with pytest.raises(ValueError, match=r"StructuredScaling: .* 1 of 400 rows \(the first is 7\) give their target"):
        fk.StructuredScaling(kind=kind).fit(logits, target)


BAD_LOGITS = [
    (math.nan, "NaN, got NaN at row 7, class 2"),
    (math.inf, r"\+inf, got inf at row 7, class 2"),
    (None, "above -inf in every row, got none at row 7"),
]
BAD_PROBS = [
    (math.nan, "NaN, got NaN at row 7, class 2"),
    (math.inf, r"\+inf, got inf at row 7, class 2"),
    (-0.1, "probabilities, got -0.1 at row 7, class 2; pass input_kind='logits' if these are logits$"),
    (1.5, r"sum to 1 within 0\.001, got a sum of .* at row 7$"),
    (None, r"sum to 1 within 0\.001, got a sum of 0 at row 7$"),
]


@every
@pytest.mark.parametrize(
    ("kind", "value", "words"), [("logits", *bad) for bad in BAD_LOGITS] + [("probs", *bad) for bad in BAD_PROBS]
)
def test_a_row_that_is_no_distribution_is_named_by_every_function(make, kind, value, words):
    logits, target = sample()
    input = of_kind(logits, kind)
    calibrator = make(input_kind=kind).fit(input, target)
    bad = input.clone()
    if value is None:
        bad[7] = 0 if kind == "probs" else -math.inf
    else:
        bad[7, 2] = value
    name = type(calibrator).__name__
    calls = [calibrator.predict, calibrator.predict_proba, calibrator.predict_log_proba, calibrator.changed]
    for call in (*calls, lambda rows: calibrator.score(rows, target), lambda rows: calibrator.fit(rows, target)):
        with pytest.raises(ValueError, match=f"^{name}: logits must .*{words}"):
            call(bad)
        if value is not None:
            with pytest.raises(ValueError, match=f"^{name}: logits must .*{words}"):
                call(bad.numpy())
    # Rows that do not count may hold anything, and row numbers in errors are those of the caller.
    weight = torch.ones(400)
    weight[:7], bad[:3] = 0, math.nan
    with pytest.raises(ValueError, match="at row 7"):
        calibrator.fit(bad, target, weight)
    weight[7] = 0
    calibrator.fit(bad, target, weight)


@pytest.mark.parametrize("name", ["vector", "matrix", "isotonic", "bins", "bins after a scaling"])
def test_modules_of_torch_operations_give_nan_for_a_row_that_is_no_distribution(name):
    """``predict_proba`` looks for such a row only if its result has NaN."""
    logits, target = sample()
    calibrator = EVERY[name]().fit(logits, target)
    assert calibrator._invalid_rows_are() == "nan"
    module = calibrator.as_module(fused=False)
    bad = logits.clone()
    bad[0, 1], bad[1, 2], bad[2] = math.nan, math.inf, -math.inf
    bad[3], bad[3, 4] = -math.inf, math.nan
    bad[4], bad[4, 3] = -math.inf, math.inf
    found = module(bad)
    assert bool(found[:5].isnan().any(-1).all())
    # The product of a matrix may depend on the number of rows in its last digits.
    assert_close(found[5:], module(logits[5:]))
    assert not bool(found[5:].isnan().any())


@kinds
@pytest.mark.parametrize("name", [*EVERY, "robust temperature", "spline", "default"])
@pytest.mark.filterwarnings("ignore:`torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_every_module_computes_in_torch_operations_if_asked(name, kind):
    makes = {
        **EVERY,
        "robust temperature": fk.RobustTemperatureScaling,
        "spline": lambda **options: fk.SplineScaling(kind="matrix", **options),
        "default": fk.AutoCalibrator,
    }
    logits, target = sample(800)
    input = of_kind(logits, kind)
    calibrator = makes[name](input_kind=kind).fit(input, target)
    module = calibrator.as_module(fused=False)
    assert_close(module(input).exp(), calibrator.predict_proba(input))
    traced = torch.jit.trace(module, input)
    assert_close(traced(input[:7]), module(input[:7]))
    assert {node.kind().split("::")[0] for node in traced.inlined_graph.nodes()} <= {"aten", "prim"}
    with pytest.raises(TypeError, match=f"^{type(calibrator).__name__}: fused must be a bool, got int"):
        calibrator.as_module(fused=1)


@kinds
def test_a_label_that_is_no_number_is_named_by_every_function(kind):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 3, generator=generator, dtype=torch.float64)
    target = torch.bernoulli(logits.sigmoid(), generator=generator)
    logits[4, 1], target[4, 1] = -math.inf, 0
    input = logits.sigmoid() if kind == "probs" else logits
    calibrator = fk.MultiLabelScaling(input_kind=kind).fit(input, target)
    assert calibrator.predict_proba(input)[4, 1] == 0
    assert calibrator.predict_log_proba(input)[4, 1] == -math.inf
    assert calibrator.as_module()(input)[4, 1] == -math.inf
    for value in (math.nan, math.inf, *((-0.1, 1.1) if kind == "probs" else ())):
        bad = input.clone()
        bad[7, 2] = value
        calls = [calibrator.predict, calibrator.predict_proba, calibrator.predict_log_proba, calibrator.changed]
        for call in (*calls, lambda z: calibrator.score(z, target), lambda z: calibrator.fit(z, target)):
            with pytest.raises(
                ValueError, match=f"^MultiLabelScaling: logits must be .* got {value:g} at row 7, label 2"
            ):
                call(bad)
        left_out = target.clone()
        left_out[7, 2] = -1
        calibrator.fit(bad, left_out, ignore_index=-1)


def with_ties(n=3000, n_classes=4):
    """Votes of trees and half-precision logits: largest entries that are equal or differ by one unit."""
    rng = np.random.default_rng(0)
    votes = rng.multinomial(10, rng.dirichlet(np.ones(n_classes), n)) / 10
    with np.errstate(divide="ignore"):
        logits = np.log(votes)
    near = np.arange(n) % 3 == 0
    logits[near, 1] = np.nextafter(logits[near, 1], np.where(logits[near, 1] > -np.inf, 0, -np.inf))
    return torch.from_numpy(logits), torch.from_numpy(rng.integers(n_classes, size=n))


@pytest.mark.parametrize("make", KEEP_THE_ORDER.values(), ids=KEEP_THE_ORDER)
@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_what_keeps_the_order_predicts_the_first_largest_input(make, kind, dtype):
    logits, target = with_ties()
    target = torch.where(
        torch.rand(len(target), generator=torch.Generator().manual_seed(0)) < 0.6, logits.argmax(-1), target
    )
    possible = logits.gather(1, target.unsqueeze(1)).squeeze(1) > -math.inf
    input = of_kind(logits, kind).to(dtype)
    calibrator = make(input_kind=kind).fit(input[possible], target[possible])
    assert calibrator._keeps_predictions()
    assert torch.equal(calibrator.predict(input), input.argmax(-1))
    assert not bool(calibrator.changed(input).any())
    accuracy = float((input.argmax(-1) == target).double().mean())
    assert calibrator.score(input, target) == pytest.approx(accuracy)


def test_what_changes_the_order_says_so():
    logits, target = sample()
    for make in (EVERY["matrix"], EVERY["isotonic"], EVERY["bins"]):
        calibrator = make().fit(logits, target)
        assert not calibrator._keeps_predictions()
        assert torch.equal(calibrator.changed(logits), calibrator.predict(logits) != logits.argmax(-1))


@pytest.mark.parametrize(
    "make",
    [
        *(EVERY[name] for name in ("vector", "focal matrix", "isotonic", "bins", "bins after a scaling")),
        fk.SplineScaling,
        fk.RobustTemperatureScaling,
    ],
)
def test_the_module_is_made_once_for_a_fit(make, monkeypatch):
    """To build the module of a regression with 1000 classes takes 40 ms, a row 0.2 ms."""
    logits, target = sample()
    calibrator = make().fit(logits, target)
    kind = type(calibrator._module())
    made = []
    monkeypatch.setattr(
        kind, "__init__", lambda self, *args, _old=kind.__init__, **kw: made.append(_old(self, *args, **kw))
    )
    fresh = pickle.loads(pickle.dumps(calibrator))
    assert "_modules" not in vars(fresh)
    for call in (fresh.predict_proba, fresh.predict_log_proba, fresh.predict, fresh.changed, fresh.predict_proba):
        call(logits)
    assert len(made) == 1
    found = fresh.predict_proba(logits)
    assert torch.equal(found, calibrator.predict_proba(logits))
    assert fresh.predict_proba(logits[:1].half()).dtype == torch.float16
    # A second fit makes a new module.
    other = fresh.fit(logits[:200], target[:200]).predict_proba(logits)
    assert torch.equal(other, make().fit(logits[:200], target[:200]).predict_proba(logits))
    assert not torch.equal(other, found)
    fresh.as_module()(logits)
    assert torch.equal(fresh.predict_proba(logits), other)


class Conversions(TorchDispatchMode):
    """Counts the tensors that are converted to another dtype."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [EVERY[name] for name in ("vector", "focal matrix", "bins", "bins after a scaling")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_row_does_not_wait_for_conversions_of_the_fitted_numbers(make, dtype):
    logits, target = sample()
    calibrator, logits = make().fit(logits, target), logits.to(dtype)
    module = calibrator.as_module()
    found = calibrator.predict_proba(logits)
    assert torch.equal(found, module.mapped(logits, log=False))
    with Conversions() as conversions:
        calibrator.predict_proba(logits[:1])
    # In half precision the row and the result.
    assert conversions.count == (2 if dtype == torch.float16 else 0)
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float64}
