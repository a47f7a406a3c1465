"""Frames whose columns have names: the classes they give, and their order after the fit."""

import pickle

import numpy as np
import pytest
import torch

import focalkern as fk

pandas = pytest.importorskip("pandas")

NAMES = ["zebra", "ape", "mule"]  # not in alphabetical order
_RNG = np.random.default_rng(0)
LABELS = _RNG.integers(3, size=300)
LOGITS = 1.5 * _RNG.normal(size=(300, 3)) + 2 * np.eye(3)[LABELS]
FRAME = pandas.DataFrame(LOGITS, columns=NAMES)
OTHER_ORDER = FRAME[["ape", "zebra", "mule"]]
ORDER = (
    r"^{}: logits must have the columns of fit in their order, 'zebra' as class 0, found 'ape'; "
    r"pass frame\[\['zebra', 'ape', 'mule'\]\]$"
)


def named(labels):
    return np.array(NAMES)[labels]


# One calibrator per fit: focal map, spline, bins, and one that fits others.
@pytest.mark.parametrize("kind", [fk.TemperatureScaling, fk.SplineScaling, fk.HistogramBinning, fk.AutoCalibrator])
def test_columns_in_another_order_are_refused_after_the_fit(kind):
    fitted = kind().fit_quietly(FRAME, LABELS)
    expected = kind().fit_quietly(LOGITS, LABELS).predict_proba(LOGITS)
    for given in (FRAME, LOGITS, torch.from_numpy(LOGITS), pandas.DataFrame(LOGITS), FRAME.add_prefix("logit_")):
        assert np.array_equal(np.asarray(fitted.predict_proba(given)), expected)
    order = ORDER.format(kind.__name__)
    for method in (fitted.predict, fitted.predict_proba, fitted.predict_log_proba, fitted.changed):
        with pytest.raises(ValueError, match=order):
            method(OTHER_ORDER)
    with pytest.raises(ValueError, match=order):
        fitted.score(OTHER_ORDER, LABELS)
    with pytest.raises(ValueError, match=order):
        pickle.loads(pickle.dumps(fitted)).predict(OTHER_ORDER)
    assert np.array_equal(fitted.classes_, [0, 1, 2])


def test_the_error_names_the_columns_of_the_frame():
    fitted = fk.TemperatureScaling().fit(FRAME, LABELS)
    with pytest.raises(ValueError, match=r"pass frame\[\['logit_zebra', 'logit_ape', 'logit_mule'\]\]$"):
        fitted.predict(OTHER_ORDER.add_prefix("logit_"))
    with pytest.raises(
        ValueError, match=r"'ape' as class 1, found 'horse'; pass frame\[\[.*\]\], or frame.to_numpy\(\)"
    ):
        fitted.predict(FRAME.rename(columns={"ape": "horse"}))
    wide = pandas.DataFrame(4 * np.eye(9).repeat(2, 0), columns=[f"{letter}_" for letter in "ihgfedcba"])
    fitted.fit_quietly(wide, np.arange(18) // 2 % 8)
    with pytest.raises(ValueError, match=r"pass frame\[\['i_', .* 'b_', \.\.\.\]\]$"):
        fitted.predict(wide[wide.columns[::-1]])


def test_a_later_fit_forgets_the_columns():
    fitted = fk.TemperatureScaling().fit(FRAME, LABELS).fit(LOGITS, LABELS)
    expected = fitted.predict_proba(LOGITS[:, [1, 0, 2]])
    assert np.array_equal(fitted.predict_proba(OTHER_ORDER), expected)
    numbered = FRAME.set_axis(["logit_2", "logit_0", "logit_1"], axis=1)  # numbers decide the order
    expected = fitted.fit(numbered, np.array([2, 0, 1])[LABELS]).predict_proba(LOGITS[:, [1, 2, 0]])
    assert np.array_equal(fitted.predict_proba(numbered), expected)
    assert np.array_equal(fitted.predict_proba(numbered[["logit_0", "logit_1", "logit_2"]]), expected)


def test_labels_that_are_names_of_the_columns_give_the_classes():
    expected = fk.TemperatureScaling().fit(LOGITS, LABELS)
    prefixed = FRAME.add_prefix("logit_")
    for frame, labels in ((FRAME, named(LABELS)), (prefixed, named(LABELS)), (prefixed, "logit_" + named(LABELS))):
        fitted = fk.TemperatureScaling().fit(frame, pandas.Series(labels))
        assert fitted.temperature_ == expected.temperature_
        assert [name.removeprefix("logit_") for name in fitted.classes_] == NAMES
        assert fitted.score(frame, labels) == expected.score(LOGITS, LABELS)
    # A class of the columns may be without labels; other names are the classes in alphabetical order.
    rows = LABELS != 1
    fitted = fk.TemperatureScaling().fit(FRAME[rows], named(LABELS[rows]))
    assert fitted.temperature_ == fk.TemperatureScaling().fit(LOGITS[rows], LABELS[rows]).temperature_
    fitted = fk.TemperatureScaling().fit(FRAME, np.array(["a", "b", "c"])[LABELS])
    assert fitted.classes_.tolist() == ["a", "b", "c"] and fitted.temperature_ == expected.temperature_


def test_a_saved_calibrator_keeps_names_that_are_its_classes(tmp_path):
    path = tmp_path / "c.json"
    fk.AutoCalibrator().fit(FRAME, named(LABELS)).save(path)
    loaded = fk.load_calibrator(path)
    assert loaded.classes_.tolist() == NAMES
    assert loaded.score(FRAME, named(LABELS)) > 0.5
    with pytest.raises(ValueError, match=ORDER.format(type(loaded).__name__)):
        loaded.predict(OTHER_ORDER)
    # The file does not tell whether the columns of the fit had the names of the classes.
    other = FRAME.set_axis(["x_a", "x_b", "x_c"], axis=1)
    assert np.array_equal(loaded.predict_proba(other), loaded.predict_proba(LOGITS))


def test_the_columns_of_labels_of_a_multi_label_head():
    target = np.eye(3, dtype=int)[LABELS]
    fitted = fk.MultiLabelScaling().fit(FRAME, target)
    assert fitted.score(FRAME, target) == fitted.score(LOGITS, target)
    for call in (fitted.predict_proba, lambda frame: fitted.score(frame, target)):
        with pytest.raises(ValueError, match=ORDER.format("MultiLabelScaling")):
            call(OTHER_ORDER)


def test_labels_of_a_multi_label_head_in_another_order_than_the_logits():
    target = pandas.DataFrame(np.eye(3, dtype=int)[LABELS], columns=NAMES)
    order = (
        r"^MultiLabelScaling: target must have the columns of the logits in their order, 'zebra' as class 0, found "
        r"'ape'; pass target\[\['zebra', 'ape', 'mule'\]\]$"
    )
    fitted = fk.MultiLabelScaling().fit(FRAME.add_prefix("logit_"), target)
    with pytest.raises(ValueError, match=order):
        fk.MultiLabelScaling().fit(FRAME, target[OTHER_ORDER.columns])
    with pytest.raises(ValueError, match=order):
        fitted.score(LOGITS, target[OTHER_ORDER.columns])
    # Other names tell nothing about the order, and arrays have none.
    other = target.set_axis(["is_zebra", "is_ape", "is_mule"], axis=1)
    for labels in (target, other, other.to_numpy()):
        assert fk.MultiLabelScaling().fit(FRAME, labels).score(LOGITS, labels) == fitted.score(FRAME, target)


def test_a_column_that_is_not_of_numbers_is_named():
    words = "{} must have columns of numbers, got 'note' of .*; leave out columns that are no classes, and convert"
    text = FRAME.assign(note="text")
    with pytest.raises(TypeError, match=words.format("TemperatureScaling: logits")):
        fk.TemperatureScaling().fit(text, LABELS)
    with pytest.raises(TypeError, match=words.format("nll: probs")):
        fk.metrics.nll(text, LABELS)
    pytest.importorskip("tabulate", reason="tabulate is not installed")
    with pytest.raises(TypeError, match=words.format("compare_calibrators: validation")):
        fk.compare_calibrators((text, LABELS))


def test_nullable_columns_of_pandas_are_numbers():
    nullable = FRAME.astype("Float64")  # whose array has the dtype object
    expected = fk.TemperatureScaling().fit(FRAME, LABELS)
    fitted = fk.TemperatureScaling().fit(nullable, pandas.Series(LABELS, dtype="Int64"))
    assert fitted.temperature_ == expected.temperature_
    assert np.array_equal(fitted.predict_proba(nullable), expected.predict_proba(FRAME))


# Twelve classes, whose alphabetical order ("p_0", "p_1", "p_10", "p_11", "p_2", ...) is not that of their numbers.
TWELVE_LABELS = _RNG.integers(12, size=600)
TWELVE = 1.5 * _RNG.normal(size=(600, 12)) + 3 * np.eye(12)[TWELVE_LABELS]


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("prefix", ["", "p_"])
def test_numbered_columns_are_the_classes_of_labels_that_name_them(prefix, start):
    names = [f"{prefix}{number}" for number in range(start, 12 + start)]
    frame = pandas.DataFrame(TWELVE, columns=names)
    expected = fk.TemperatureScaling().fit(TWELVE, TWELVE_LABELS)
    for given in (frame, frame[names[::-1]]):  # the numbers decide the order
        fitted = fk.TemperatureScaling().fit(given, np.array(names)[TWELVE_LABELS])
        assert fitted.classes_.tolist() == names
        assert fitted.temperature_ == expected.temperature_
        assert np.array_equal(fitted.predict(given), np.array(names)[TWELVE.argmax(1)])
    numbers = np.array([str(number) for number in range(start, 12 + start)])
    assert fk.TemperatureScaling().fit(frame, numbers[TWELVE_LABELS]).temperature_ == expected.temperature_
    rows = TWELVE_LABELS != 7  # a class without labels
    fitted = fk.TemperatureScaling().fit(frame[rows], np.array(names)[TWELVE_LABELS[rows]])
    assert fitted.temperature_ == fk.TemperatureScaling().fit(TWELVE[rows], TWELVE_LABELS[rows]).temperature_


def test_labels_with_other_names_than_numbered_columns_have_no_clear_order():
    labels = np.array([f"p_{number}" for number in range(12)])[TWELVE_LABELS]
    words = (
        r"target must name columns .* is 'p_0', 'p_1', 'p_10', 'p_11', \.\.\., for the columns '{}0' to '{}11'; call"
    )
    for prefix in ("", "logit_"):
        frame = pandas.DataFrame(TWELVE, columns=[f"{prefix}{number}" for number in range(12)])
        with pytest.raises(ValueError, match=words.format(prefix, prefix)):
            fk.TemperatureScaling().fit(frame, labels)
    # Arrays have scikit-learn's order, and so have frames whose alphabetical order is that of the numbers.
    alphabetical = np.argsort([f"p_{number}" for number in range(12)])
    in_order = fk.TemperatureScaling().fit(TWELVE, TWELVE_LABELS).temperature_
    assert fk.TemperatureScaling().fit(TWELVE[:, alphabetical], labels).temperature_ == pytest.approx(in_order)
    padded = np.array([f"p_{number:02}" for number in range(12)])[TWELVE_LABELS]
    assert fk.TemperatureScaling().fit(pandas.DataFrame(TWELVE), padded).temperature_ == in_order


def test_a_comparison_keeps_the_columns_as_fit_does():
    pytest.importorskip("tabulate", reason="tabulate is not installed")
    options = {"resamples": 0, "candidates": ["temperature"]}
    expected = fk.compare_calibrators((LOGITS, LABELS), **options).calibrator.predict_proba(LOGITS)
    for labels in (LABELS, named(LABELS), pandas.Series(named(LABELS))):
        study = fk.compare_calibrators((FRAME, labels), (FRAME, labels), **options)
        assert np.array_equal(study.calibrator.predict_proba(FRAME), expected)
        assert study.validation.memory.classes == tuple(NAMES)
        with pytest.raises(ValueError, match=ORDER.format(type(study.calibrator).__name__)):
            study.calibrator.predict_proba(OTHER_ORDER)
    with pytest.raises(ValueError, match="test must have the columns of validation in their order, 'zebra' as class 0"):
        fk.compare_calibrators((FRAME, LABELS), (OTHER_ORDER, LABELS), **options)
    with pytest.raises(ValueError, match=r"compare_calibrators: validation: .* found 'label'; pass the array"):
        fk.compare_calibrators((FRAME.assign(label=LABELS), LABELS), **options)


def test_a_comparison_takes_numbered_columns_in_the_order_of_their_numbers():
    pytest.importorskip("tabulate", reason="tabulate is not installed")
    options = {"resamples": 0, "candidates": ["temperature"]}
    names = [f"p_{number}" for number in range(12)]
    expected = fk.compare_calibrators((TWELVE, TWELVE_LABELS), **options).results[0].test
    frame = pandas.DataFrame(TWELVE, columns=names)[names[::-1]]
    for labels in (TWELVE_LABELS, np.array(names)[TWELVE_LABELS], TWELVE_LABELS.astype(str)):
        assert fk.compare_calibrators((frame, labels), **options).results[0].test == expected
    with pytest.raises(ValueError, match="compare_calibrators: validation: labels: expected names of columns, found"):
        fk.compare_calibrators((frame, np.array([f"c{number}" for number in range(12)])[TWELVE_LABELS]), **options)
