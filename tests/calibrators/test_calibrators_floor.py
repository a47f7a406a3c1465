"""A floor under the probabilities: calibrators fit, save and export rows whose target has probability 0."""

import copy
import math
import re

import numpy as np
import pytest
import torch
from conftest import assert_close

import focalkern as fk

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")

FLOOR = 0.01
CALIBRATORS = [
    fk.TemperatureScaling(floor=FLOOR),
    fk.TemperatureScaling(temperatures=[0.5, 1.0, 2.0], floor=FLOOR),
    fk.FocalTemperatureScaling(floor=FLOOR),
    fk.StructuredScaling(kind="vector", solver="lbfgs", floor=FLOOR),
    fk.StructuredScaling(focal=True, solver="lbfgs", floor=FLOOR),
    fk.IsotonicCalibration(floor=FLOOR),
    fk.HistogramBinning(n_bins=3, scaling=fk.TemperatureScaling(floor=FLOOR)),
]
every = pytest.mark.parametrize("calibrator", CALIBRATORS, ids=repr)
kinds = pytest.mark.parametrize("kind", ["logits", "probs"])


def votes(n=500, n_classes=4, seed=0):
    """Logarithms of the shares of ten votes; some labels have no vote."""
    rng = np.random.default_rng(seed)
    truth = rng.dirichlet(np.full(n_classes, 0.4), n)
    shares = np.array([rng.multinomial(10, p) for p in truth]) / 10
    labels = np.array([rng.choice(n_classes, p=p) for p in truth])
    assert (shares[np.arange(n), labels] == 0).any()
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(shares)), torch.from_numpy(labels)


def of_kind(logits, kind):
    return logits.softmax(-1) if kind == "probs" else logits


def with_kind(calibrator, kind):
    changed = copy.deepcopy(calibrator).set_params(input_kind=kind)
    return changed.set_params(scaling__input_kind=kind) if isinstance(changed, fk.HistogramBinning) else changed


def by_hand(logits, floor=FLOOR):
    return ((1 - floor) * logits.softmax(-1) + floor / logits.shape[-1]).log()


@every
@kinds
def test_it_is_the_fit_of_floored_logits(calibrator, kind):
    logits, labels = votes()
    if calibrator.method == "histogram":  # the cuts lie between confidences; rounding would split equal ones
        logits = logits + torch.rand(logits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    input = of_kind(logits, kind)
    found = with_kind(calibrator, kind).fit(input, labels)
    plain = copy.deepcopy(calibrator)
    plain = plain.set_params(**{"scaling__floor" if isinstance(plain, fk.HistogramBinning) else "floor": 0.0})
    plain.fit(by_hand(logits), labels)
    probs = found.predict_proba(input)
    assert probs.numpy() == pytest.approx(plain.predict_proba(by_hand(logits)).numpy(), abs=1e-6)
    assert_close(found.predict_log_proba(input).exp(), probs)
    if calibrator.method != "histogram":  # whose bins may have accuracy 1
        assert bool((probs > 0).all())
    assert_close(found.as_module()(input).exp(), probs)
    assert_close(found.as_module(**({} if calibrator.method == "isotonic" else {"fused": False}))(input).exp(), probs)
    if found._keeps_predictions():
        assert torch.equal(found.predict(input), input.argmax(-1))


@every
def test_it_is_saved_and_travels(calibrator, tmp_path):
    logits, labels = votes()
    fitted = copy.deepcopy(calibrator).fit(logits, labels)
    fitted.save(tmp_path / "calibrator.json")
    loaded = fk.load_calibrator(tmp_path / "calibrator.json")
    assert torch.equal(loaded.predict_proba(logits), fitted.predict_proba(logits))
    assert loaded.get_params().keys() == fitted.get_params().keys()
    assert loaded.input_floor_ == fitted.input_floor_ == (0.0 if calibrator.method == "histogram" else FLOOR)
    module = fitted.as_module()
    other = copy.deepcopy(module)
    for part in other.modules():
        if isinstance(part, fk.calibrators.FlooredInput):
            part.floor = 0.5
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(logits), module(logits))
    exported = torch.export.export(module, (logits,)).module()
    assert_close(exported(logits), module(logits))


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_one_logit_and_labels(kind):
    generator = torch.Generator().manual_seed(0)
    margin = torch.randn(300, 2, generator=generator, dtype=torch.float64) * 2
    target = torch.bernoulli(margin.sigmoid(), generator=generator).long()
    margin[:3] = -math.inf
    target[0] = 1
    input = margin.sigmoid() if kind == "probs" else margin
    scaling = fk.TemperatureScaling(input_kind=kind, floor=FLOOR)
    one = copy.deepcopy(scaling).fit(input[:, 0], target[:, 0])
    floored = (1 - FLOOR) * margin[:, 0].sigmoid() + FLOOR / 2
    plain = fk.TemperatureScaling().fit(floored.logit(), target[:, 0])
    assert one.temperature_ == pytest.approx(plain.temperature_)
    probs = one.predict_proba(input[:, 0])
    assert_close(probs[:, 1], plain.predict_proba(floored.logit())[:, 1])
    assert_close(one.as_module()(input[:, 0]).sigmoid(), probs[:, 1])
    structured = fk.StructuredScaling(kind="vector", solver="lbfgs", input_kind=kind, floor=FLOOR)
    for each in (scaling, structured):
        alone = copy.deepcopy(each).fit(input[:, 0], target[:, 0]).predict_proba(input[:, 0])
        heads = fk.MultiLabelScaling(scaling=each, input_kind=kind).fit(input, target)
        assert heads.input_floor_ == FLOOR
        assert_close(heads.predict_proba(input)[:, 0], alone[:, 1])
        assert_close(heads.as_module()(input).sigmoid(), heads.predict_proba(input))
        assert_close(heads.predict_log_proba(input).exp(), heads.predict_proba(input))
    with pytest.raises(ValueError, match=r"MultiLabelScaling: label 0: StructuredScaling: the NLL .* floor="):
        fk.MultiLabelScaling(input_kind=kind).fit(input, target)


@kinds
@pytest.mark.parametrize(
    "calibrator",
    [
        fk.TemperatureScaling(),
        fk.TemperatureScaling(search="grid"),
        fk.FocalTemperatureScaling(),
        fk.FocalTemperatureScaling(search="refine"),
        fk.StructuredScaling(),
    ],
    ids=repr,
)
def test_without_a_floor_the_error_names_the_argument(calibrator, kind):
    logits, labels = votes()
    with pytest.raises(ValueError, match=rf"{type(calibrator).__name__}: the NLL .* floor=0\.0002 gives every class"):
        with_kind(calibrator, kind).fit(of_kind(logits, kind), labels)
    with_kind(calibrator, kind).set_params(floor=0.0002).fit(of_kind(logits, kind), labels)


def named(words):
    """The calibrator with a floor that a remedy names."""
    call = re.search(r"\w+\([^()]*floor=0\.0002\)", words)[0]
    return eval(f"fk.{call}")


@kinds
def test_a_calibrator_without_a_floor_names_one_that_has_it(kind):
    logits, labels = votes()
    input = of_kind(logits, kind)
    for scaling in (None, fk.TemperatureScaling(criterion="ece", search="grid", input_kind=kind)):
        with pytest.warns(fk.CalibrationWarning) as said:
            fk.HistogramBinning(scaling=scaling, input_kind=kind).fit(input, labels)
        remedy = named(str(said[0].message))
        assert (remedy.floor, remedy.input_kind) == (0.0002, kind)
        binning = fk.HistogramBinning(scaling=remedy, input_kind=kind).fit_quietly(input, labels)
        assert not any("infinite because" in words for words in binning.warnings_)

    for fit in (fk.fit_temperatures, fk.fit_focal_temperatures):
        with pytest.raises(ValueError, match=r": \w+\(.*floor=0\.0002\)\.fit\(logits, labels\) gives") as error:
            fit(input[None], labels[None], input_kind=kind)
        named(str(error.value)).fit_quietly(input, labels)

    heads, of_heads = input[:, :2], torch.nn.functional.one_hot(labels)[:, :2]
    for scaling in (None, fk.FocalTemperatureScaling(input_kind=kind)):
        with pytest.raises(ValueError, match=r"^MultiLabelScaling: label .*: scaling=\w+\(.*\) gives every") as error:
            fk.MultiLabelScaling(scaling=scaling, input_kind=kind).fit(heads, of_heads)
        fk.MultiLabelScaling(scaling=named(str(error.value)), input_kind=kind).fit_quietly(heads, of_heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_goes_in_and_out(dtype):
    logits, labels = votes()
    fitted = fk.TemperatureScaling(floor=FLOOR).fit(logits.to(dtype), labels)
    for found in (fitted.predict_proba(logits.to(dtype)), fitted.as_module()(logits.to(dtype)).exp()):
        assert found.dtype == dtype
        expected = fitted.predict_proba(logits.to(dtype).double())
        assert found.double().numpy() == pytest.approx(expected.numpy(), abs=8 * torch.finfo(dtype).eps)


@every
def test_a_row_that_does_not_sum_to_1_is_named(calibrator):
    logits, labels = votes()
    fitted = with_kind(calibrator, "probs").fit(logits.softmax(-1), labels)
    bad = logits.softmax(-1)
    bad[7] *= 0.9
    name = type(fitted).__name__
    for call in (fitted.predict_proba, fitted.predict_log_proba, fitted.predict):
        with pytest.raises(ValueError, match=rf"^{name}: logits must be probabilities .* a sum of 0\.9 at row 7"):
            call(bad)


@pytest.mark.parametrize(
    ("floor", "error", "words"),
    [
        (-1e-9, ValueError, "floor must be at least 0 and less than 1, got -1e-09"),
        (1.0, ValueError, "got 1.0"),
        (math.nan, ValueError, "got nan"),
        (True, ValueError, "got True"),
        ("0", TypeError, "floor must be a number, got str"),
    ],
)
def test_bad_floors_are_named(floor, error, words):
    with pytest.raises(error) as caught:
        fk.TemperatureScaling(floor=floor).fit(*votes())
    assert words in str(caught.value)
    grid = fk.calibration_grid(torch.zeros(2, 2), torch.tensor([0, 1]), gammas=[0.0], temperatures=[1.0])
    with pytest.raises(ValueError, match="floor must be 0 for a grid that is already computed"):
        fk.TemperatureScaling(floor=0.1).choose(grid, n_samples=2, n_classes=2)


def test_an_evaluation_knows_the_floor():
    logits, labels = votes()
    rows = fk.files.LogitSet(logits, labels, "logits", "", "rows")
    fitted = fk.TemperatureScaling(floor=FLOOR).fit(logits, labels)
    nll = float(-fitted.predict_log_proba(logits).gather(1, labels.unsqueeze(1)).mean())
    assert fk.study.evaluate_rows(rows, fitted).results[1].test["nll"] == pytest.approx(nll)


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_an_export_leaves_the_number_of_classes_open(kind):
    """As that of a scaling without a floor."""
    logits, labels = votes()
    calibrator = with_kind(fk.FocalTemperatureScaling(floor=FLOOR), kind).fit(of_kind(logits, kind), labels)
    module, dynamic = calibrator.as_module().eval(), {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    graph = torch.export.export(module, (of_kind(logits, kind),), dynamic_shapes=(dynamic,)).module()
    for n, n_classes in ((500, 4), (7, 9)):
        rows = of_kind(votes(n, n_classes, seed=1)[0], kind)
        assert_close(graph(rows), module(rows))
