"""NumPy arrays instead of tensors: the same numbers, as arrays."""

import numpy as np
import pytest
import torch

import focalkern as fk
from focalkern import metrics

rng = np.random.default_rng(0)
LOGITS = rng.normal(size=(40, 5)) * 3
LABELS = rng.integers(5, size=40)
PROBS = torch.from_numpy(LOGITS).softmax(-1).numpy()

OPERATORS = {
    "map": lambda z: fk.focal_calibration_map(z, 1.5, 2.0),
    "map of half": lambda z: fk.focal_calibration_map(half(z), 1.5, log=True),
    "map, arrays as parameters": lambda z: fk.focal_calibration_map(z, np.linspace(0, 2, 40), np.array(2.0)),
    "binary map": lambda z: fk.binary_focal_calibration_map(z, 0.5, log_odds=True),
    "inverse map": lambda z: fk.inverse_focal_calibration_map(z, np.linspace(0, 2, 40), log=True),
    "binary inverse map": lambda z: fk.binary_inverse_focal_calibration_map(z, 1.5),
}


def half(z):
    return z.astype(np.float16) if isinstance(z, np.ndarray) else z.half()


@pytest.mark.parametrize("name", OPERATORS)
def test_maps(name):
    result = OPERATORS[name](LOGITS)
    expected = OPERATORS[name](torch.from_numpy(LOGITS))
    assert isinstance(result, np.ndarray) and isinstance(expected, torch.Tensor)
    assert result.dtype == expected.numpy().dtype
    np.testing.assert_array_equal(result, expected.numpy())


def test_masked_values_are_refused():
    """NumPy's conversion would unmask them."""
    mask = np.arange(40) < 7
    labels, logits = np.ma.masked_array(LABELS, mask), np.ma.masked_array(LOGITS, np.repeat(mask[:, None], 5, 1))
    calls = {
        "expected_calibration_error: target": lambda: metrics.expected_calibration_error(PROBS, labels),
        "TemperatureScaling: target": lambda: fk.TemperatureScaling().fit(LOGITS, labels),
        "TemperatureScaling: logits": lambda: fk.TemperatureScaling().fit(logits, LABELS),
        "focal_calibration_map: input": lambda: fk.focal_calibration_map(logits, 1.0),
        "compare_calibrators: labels of validation": lambda: fk.compare_calibrators((LOGITS, labels), (LOGITS, LABELS)),
        "compare_calibrators: logits of test": lambda: fk.compare_calibrators((LOGITS, LABELS), (logits, LABELS)),
    }
    for words, call in calls.items():
        # Logits have no ignore_index.
        end = "(, or pass labels as .*)" if "target" in words or "labels" in words else ""
        found = "(7 of 40|35 of 200); leave these rows out"
        with pytest.raises(TypeError, match=rf"^{words} must have no masked values, got {found}{end}$"):
            call()
    kept = metrics.expected_calibration_error(PROBS[7:], LABELS[7:])
    assert metrics.expected_calibration_error(PROBS, labels.filled(-100), ignore_index=-100) == kept
    assert metrics.expected_calibration_error(PROBS[7:], labels[7:]) == kept  # masked nowhere


def test_what_numpy_makes_an_array_of():
    expected = fk.focal_calibration_map(LOGITS, 1.0)
    frozen = LOGITS.copy()
    frozen.flags.writeable = False
    for given in (
        LOGITS.tolist(),
        np.asfortranarray(LOGITS),
        LOGITS.astype(">f8"),
        frozen,
        np.repeat(LOGITS, 2, 0)[::2],
    ):
        np.testing.assert_array_equal(fk.focal_calibration_map(given, 1.0), expected)


def test_grid():
    axes = np.array([0.0, 1.0]), np.array([1.0, 2.0])
    grid = fk.calibration_grid(LOGITS, LABELS, *axes, criteria=("ece", "nll"))
    expected = fk.calibration_grid(torch.from_numpy(LOGITS), torch.from_numpy(LABELS), *axes, criteria=("ece", "nll"))
    for name, table in grid.tables.items():
        assert isinstance(table, np.ndarray)
        np.testing.assert_array_equal(table, expected.tables[name].numpy())
        assert grid.best(name) == expected.best(name)
    assert isinstance(grid.gammas, np.ndarray) and isinstance(grid.temperatures, np.ndarray)
    with pytest.raises(TypeError, match="calibration_grid: target must be a tensor, got ndarray"):
        fk.calibration_grid(torch.from_numpy(LOGITS), LABELS, *axes)


METRICS = {
    "ece": lambda p, y: metrics.expected_calibration_error(p, y),
    "mce": lambda p, y: metrics.maximum_calibration_error(p, y),
    "rms": lambda p, y: metrics.rms_calibration_error(p, y),
    "debiased": lambda p, y: metrics.debiased_calibration_error(p, y),
    "smooth": lambda p, y: metrics.smooth_calibration_error(p, y),
    "classwise": lambda p, y: metrics.classwise_calibration_error(p, y, reduction="none"),
    "nll": lambda p, y: metrics.nll(p, y),
    "brier": lambda p, y: metrics.brier_score(p, y),
    "accuracy": lambda p, y: metrics.accuracy(p, y),
    "aurc": lambda p, y: metrics.aurc(p, y),
    "auroc": lambda p, y: metrics.auroc(p[:, 0], p[:, 1]),
    "ece, keywords": lambda p, y: metrics.expected_calibration_error(confidence=p[:, 0], correct=y == 0),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics(name):
    result = METRICS[name](PROBS, LABELS)
    expected = METRICS[name](torch.from_numpy(PROBS), torch.from_numpy(LABELS))
    assert isinstance(expected, torch.Tensor)
    assert isinstance(result, np.ndarray if name == "classwise" else np.float64)
    np.testing.assert_array_equal(result, expected.numpy())
    # One tensor among the arguments makes the results tensors.
    assert isinstance(METRICS[name](torch.from_numpy(PROBS), LABELS), torch.Tensor)


def test_bins_and_their_diagrams():
    pytest.importorskip("matplotlib")
    bins = metrics.reliability_bins(PROBS, LABELS, n_bins=5)
    expected = metrics.reliability_bins(torch.from_numpy(PROBS), torch.from_numpy(LABELS), n_bins=5)
    for name in ("lower", "upper", "count", "confidence", "accuracy", "gap", "weight"):
        assert isinstance(getattr(bins, name), np.ndarray)
        np.testing.assert_array_equal(getattr(bins, name), getattr(expected, name).numpy())
    bands = fk.plots.reliability_bands(bins, replicates=20)
    assert torch.equal(bands.inside(bins), bands.inside(expected))
    assert fk.plots.reliability_diagram(bins).axes
    grid = fk.calibration_grid(LOGITS, LABELS, [0.0, 1.0], [1.0, 2.0, 3.0])
    assert fk.plots.grid_heatmap(grid, "nll").axes and fk.plots.ridge_diagram(grid).axes


def test_labels():
    assert fk.check_labels(LABELS, 5) is None
    with pytest.raises(IndexError, match=r"target must be in \[0, 3\)"):
        fk.check_labels(LABELS, 3)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("text", "str"),
        (None, "NoneType"),
        ([[1.0, 2.0], [3.0]], "list"),
        (np.array([None, 1.0]), "ndarray of object"),
        (np.array(["a", "b"]), "ndarray of <U1"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), r"ndarray of datetime64\[D\]"),
    ],
)
def test_what_is_no_array_of_numbers_is_named(wrong, found):
    with pytest.raises(
        TypeError, match=f"focal_calibration_map: input must be a tensor or an array of numbers, got {found}"
    ):
        fk.focal_calibration_map(wrong, 1.0)
    with pytest.raises(TypeError, match=f"nll: target must be a tensor or an array of numbers, got {found}"):
        metrics.nll(PROBS, wrong)


def test_names_of_classes_are_no_labels_of_a_metric():
    for names in (["a", "b"], np.array(["a", "b"]), np.array(["a", "b"], dtype=object)):
        with pytest.raises(TypeError, match=r"nll: target .*; pass the number of each class in place of its name$"):
            metrics.nll(PROBS, names)


def test_a_grid_of_arrays_chooses_what_one_of_tensors_does():
    rng = np.random.default_rng(0)
    logits, target = rng.normal(size=(50, 4)), rng.integers(4, size=50)
    arrays = fk.calibration_grid(logits, target, [0.0, 1.0], [0.5, 1.0, 2.0])
    tensors = fk.calibration_grid(torch.from_numpy(logits), torch.from_numpy(target), [0.0, 1.0], [0.5, 1.0, 2.0])
    assert isinstance(arrays.tables["ece"], np.ndarray)
    options = {"criterion": "ece", "gammas": [0.0, 1.0], "temperatures": [0.5, 1.0, 2.0]}
    sizes = {"n_samples": 50, "n_classes": 4}
    chosen = [fk.FocalTemperatureScaling(**options).choose(grid, **sizes) for grid in (arrays, tensors)]
    assert (chosen[0].gamma_, chosen[0].temperature_) == (chosen[1].gamma_, chosen[1].temperature_)
