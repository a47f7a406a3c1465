"""Forged and damaged calibrator files: each loads and predicts probabilities, or raises one ValueError."""

import copy
import json
import math
import random
import re
import tracemalloc

import pytest
import torch

import focalkern as fk

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")

CALIBRATORS = [
    fk.TemperatureScaling(floor=1e-3),
    fk.TemperatureScaling(temperatures=[0.5, 1.0, 2.0], input_kind="probs"),
    fk.FocalTemperatureScaling(),
    fk.FocalTemperatureScaling(gammas=[0.0, 1.0], temperatures=[0.5, 1.0, 2.0], criterion="ece"),
    fk.StructuredScaling(kind="vector", solver="lbfgs"),
    fk.StructuredScaling(focal=True, solver="lbfgs"),
    fk.IsotonicCalibration(),
    fk.SplineScaling(),
    fk.SplineScaling(kind="matrix"),
    fk.HistogramBinning(n_bins=3, scaling=fk.FocalTemperatureScaling(floor=1e-3)),
    fk.HistogramBinning(n_bins=3, binning="equal_width", input_kind="probs"),
    fk.MultiLabelScaling(scaling=fk.TemperatureScaling(criterion="brier")),
    fk.MultiLabelScaling(),
    fk.AutoCalibrator(("temperature",), folds=2),
]
MOST_MEMORY = 16 << 20


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A valid file of every method, also with named classes, and with one logit per row where that is supported."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 3, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    path = tmp_path_factory.mktemp("valid") / "calibrator.json"
    found = []
    for calibrator in CALIBRATORS:
        input = logits.softmax(-1) if calibrator.input_kind == "probs" else logits
        if isinstance(calibrator, fk.MultiLabelScaling):
            sets = [(input, torch.nn.functional.one_hot(target, 3))]
        else:
            sets = [(input, [("ape", "bee", "cat")[label] for label in target.tolist()]), (input[:, 0], target == 0)]
        for rows, labels in sets:
            calibrator.fit(rows, labels).save(path)
            found.append(json.loads(path.read_text()))
    return found


DEEP = "a list that is nested 100,000 deep"
ODD = (0, -1, 1, 2, 3, 0.5, -0.5, 1e-320, 1e-30, 1e-200, 1e308, -1e308, 1e30, math.nan, math.inf, 2**31, 200_000_000)
ODD += (10**30, 10**400, "", "x", "probs", "logits", "grid", "ece", None, True, False, [], {}, [[]], [1.0, 2.0], DEEP)


def places(part):
    """Every (container, key) of a document."""
    keys = part.keys() if isinstance(part, dict) else range(len(part))
    for key in keys:
        yield part, key
        if isinstance(part[key], dict | list):
            yield from places(part[key])


def forged(document, rng):
    """The bytes of a file with one to three changes of values, or of bytes."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        every = list(places(document))
        part, key = rng.choice(every)
        how = rng.random()
        if how < 0.55:
            part[key] = copy.deepcopy(rng.choice(ODD))
        elif how < 0.65:
            del part[key]
        elif how < 0.75 and isinstance(part, list):
            part.insert(key, copy.deepcopy(part[key]))
        elif how < 0.9:
            other, place = rng.choice(every)
            part[key] = copy.deepcopy(other[place])
        elif isinstance(part[key], int | float) and abs(part[key]) < 1e300:
            part[key] = part[key] * rng.choice((-1, 1e-300, 1e-10, 1e10, 1e300))
    data = bytearray(json.dumps(document).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000).encode())
    if rng.random() < 0.2:
        for _ in range(rng.choice((1, 1, 5))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.03 else data)


ROWS = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.0, 0.0], [50.0, -50.0, 0.0], [1e4, -1e4, 3.0], [1.0, -math.inf, 0.5]])


def check_predictions(calibrator):
    """Ordinary, saturated, tied and masked rows of logits, in float32 and float64."""
    n_classes = calibrator.n_classes_
    if n_classes > 64:
        return
    rows = ROWS.repeat(1, 1 + n_classes // 3)
    labels = isinstance(calibrator, fk.MultiLabelScaling)
    rows = rows[:, 0] if calibrator.one_logit_ else rows[:, :n_classes]
    if calibrator.input_kind == "probs":
        rows = rows.sigmoid() if labels or calibrator.one_logit_ else rows.softmax(-1)
    for dtype in (torch.float32, torch.float64):
        probs, log_probs = calibrator.predict_proba(rows.to(dtype)), calibrator.predict_log_proba(rows.to(dtype))
        assert bool(((probs >= 0) & (probs <= 1)).all())
        assert bool((log_probs <= 0).all())
        if not labels:
            assert bool(((probs.sum(-1) - 1).abs() < 1e-5).all())
        assert len(calibrator.predict(rows.to(dtype))) == len(rows)


def test_a_forged_file_predicts_probabilities_or_is_refused(documents, tmp_path):
    rng = random.Random(0)
    path = tmp_path / "calibrator.json"
    loaded = 0
    tracemalloc.start()
    try:
        for number in range(3000):
            data = forged(documents[number % len(documents)], rng)
            path.write_bytes(data)
            tracemalloc.reset_peak()
            refused = None
            try:
                check_predictions(fk.load_calibrator(path))
            except ValueError as error:
                refused = str(error)
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}, of {data[:3000]!r}") from error
            # An error of predict begins with the name of the calibrator.
            assert refused is None or (refused.startswith(str(path)) and "\n" not in refused), data
            loaded += refused is None
            assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY, data
    finally:
        tracemalloc.stop()
    assert 300 < loaded < 2700  # both outcomes occur


def test_a_curve_that_changes_the_order_of_the_classes_is_refused(documents, tmp_path):
    """The map of such a curve corrects it as if it were rounding, and the sums of the probabilities would not be 1."""
    path = tmp_path / "calibrator.json"
    document = copy.deepcopy(next(one for one in documents if one["method"] == "spline"))
    path.write_text(json.dumps(document))
    check_predictions(fk.load_calibrator(path))
    document["values"][len(document["values"]) // 2] += 100
    path.write_text(json.dumps(document))
    with pytest.raises(
        ValueError, match="expected a curve that keeps the order of the classes, found another; fit and"
    ):
        fk.load_calibrator(path)
    document["parameters"]["keep_order"] = False
    path.write_text(json.dumps(document))
    check_predictions(fk.load_calibrator(path))


# The beginnings and ends of Python's and NumPy's own errors.
PYTHON = re.compile(
    r"object (has|is) |indices must|unhashable|argument must be|could not convert|inhomogeneous|unsized"
)


def test_a_value_of_another_kind_is_named_with_what_was_expected(documents, tmp_path):
    """Also null, for every key; the error names the file, the expected and the found value, and the remedy."""
    path = tmp_path / "calibrator.json"
    refused = {}
    for document in documents[::2]:  # those of named classes
        forged = copy.deepcopy(document)
        for part, key in [(part, key) for part, key in places(forged) if isinstance(part, dict) or key == 0]:
            right = part[key]
            for value in (None, [], {}, 3, "x", [{}]):
                part[key] = value
                path.write_text(json.dumps(forged))
                try:
                    fk.load_calibrator(path)
                except ValueError as error:
                    refused[str(key), str(value)] = text = str(error)
                    assert text.startswith(str(path)) and not PYTHON.search(text), text
                    assert "found" in text or "got" in text or "is missing" in text, text
                    assert "valid calibrator" not in text or text.endswith("; fit and save it again"), text
            part[key] = right
    not_valid = f"{path}: not a valid calibrator: "
    assert refused["fit", "None"] == f"{not_valid}fit must be an object, found None; fit and save it again"
    assert refused["classes", "3"] == f"{not_valid}classes must be a list, found 3; fit and save it again"
    assert refused["method", "[]"].endswith(", found []; fit and save it again")
    assert refused["weight", "{}"].startswith(f"{not_valid}weight must be a list")


@pytest.mark.parametrize("n_classes", [200_000_000, 2**31, 10**30])
def test_a_file_that_claims_a_large_size_takes_no_memory(documents, n_classes, tmp_path):
    path = tmp_path / "calibrator.json"
    for document in documents:
        forged = copy.deepcopy(document)
        forged["fit"]["n_classes"] = n_classes
        forged["fit"].pop("classes", None)
        path.write_text(json.dumps(forged))
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=f"{n_classes}"):
                fk.load_calibrator(path).predict(torch.zeros(2, 3))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_table_of_steps_is_no_larger_than_its_file(tmp_path):
    """Many classes with one step, and one class with many steps."""
    few, many = {"from": [0.5], "to": [0.5]}, {"from": [k / 2e4 for k in range(20_000)], "to": [0.5] * 20_000}
    document = {
        "format": "focalkern-calibrator",
        "format_version": 5,
        "method": "isotonic",
        "epsilon": 0.01,
        "steps": [few] * 20_000 + [many],
        "parameters": {"input_kind": "logits"},
        "fit": {"n_samples": 9, "n_classes": 20_001, "best_value": 1.0, "n_changed": 0},
    }
    (tmp_path / "calibrator.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="expected at most 67,108,864 steps, found 20,000 for 20,001 classes"):
        fk.load_calibrator(tmp_path / "calibrator.json")


@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        ("temperature", {"temperature": 1e308}, "temperature > 0, at most 1e+06 and 1e+30, found 0.0 and 1e+308"),
        ("focal-temperature", {"gamma": 1e308}, "found 1e+308 and"),
        ("structured", {"weight": [1e308] * 3}, "finite weights and biases of at most 1e+20"),
        ("structured", {"bias": [1e308] * 3}, "finite weights and biases of at most 1e+20"),
        ("structured", {"focal_gamma": 1e308}, "focal_gamma > -1 and focal_temperature > 0"),
        ("structured", {"epsilon": 1e-320}, "expected an epsilon between 1e-100 and 1"),
        ("isotonic", {"epsilon": 1e-320}, "expected an epsilon between 1e-100 and 1"),
        ("isotonic", {"input_floor": 1.0}, "expected an input_floor of at least 0 and less than 1, found 1.0"),
        ("temperature", {"input_floor": -1e-9}, "expected an input_floor of at least 0 and less than 1, found -1e-09"),
        ("temperature", {"parameters": {"temperatures": [1.0, 0.0]}}, "temperatures must be finite and greater than 0"),
        ("temperature", {"parameters": {"temperatures": [[1.0]]}}, "temperatures must be a sequence of numbers"),
        (
            "focal-temperature",
            {"parameters": {"gammas": [-1.0]}},
            "gammas must be finite and greater than -1",
        ),
        ("focal-temperature", {"parameters": {"gammas": []}}, "gammas must have at least one value, got none"),
        ("temperature", {"fit": {"classes": ["a", "a", "b"]}}, "expected every class once, found ['a', 'a', 'b']"),
        ("temperature", {"fit": {"n_classes": 1}}, "n_classes must be a count of at least 2, found 1"),
        ("temperature", {"fit": {"one_logit": True}}, "expected 2 classes where a row is one logit, found 3"),
    ],
)
def test_numbers_that_no_fit_can_have_are_named(documents, method, change, words, tmp_path):
    document = copy.deepcopy(next(one for one in documents if one["method"] == method))
    for key, value in change.items():
        document[key] = {**document[key], **value} if isinstance(value, dict) else value
    (tmp_path / "calibrator.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"calibrator\.json: not a valid calibrator: ") as caught:
        fk.load_calibrator(tmp_path / "calibrator.json")
    assert words in str(caught.value)


@pytest.mark.parametrize("wrap", ["[", '{"a":'])
def test_json_that_is_nested_deep_is_named(wrap, tmp_path):
    (tmp_path / "calibrator.json").write_text(wrap * 100_000)
    with pytest.raises(ValueError, match=r"calibrator\.json: expected the .json file of a calibrator, which save or"):
        fk.load_calibrator(tmp_path / "calibrator.json")
