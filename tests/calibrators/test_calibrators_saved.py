"""Calibrator files: saving, loading, and errors of invalid files."""

import functools
import json
import os
import pickle
import stat

import numpy as np
import pytest
import torch
from conftest import assert_close, peer
from scaling_cases import BOTH, COARSE, fitted, sample

from focalkern.calibrators import (
    Calibrator,
    HistogramBinning,
    IsotonicCalibration,
    RobustTemperatureScaling,
    SplineScaling,
    StructuredScaling,
    TemperatureScaling,
    load_calibrator,
)
from focalkern.calibrators._fitted import BY_METHOD

# The data are small or odd, so many fits warn; test_calibrators_warnings.py tests the warnings.
pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")


@pytest.mark.parametrize("cls", BOTH)
def test_what_was_saved_comes_back(cls, tmp_path):
    logits, target = sample(100)
    options = {"temperatures": torch.tensor(COARSE), "criterion": "ece", "estimator": "equal_mass_interp", "n_bins": 11}
    calibrator = cls(**options).fit(logits, target)
    path = tmp_path / "calibrator.json"
    calibrator.save(path)
    for loaded in (cls.load(path), load_calibrator(path)):
        assert type(loaded) is cls
        for name in ("gamma_", "temperature_", "best_value_", "n_samples_", "n_classes_", "at_border_"):
            assert getattr(loaded, name) == getattr(calibrator, name)
        assert (loaded.estimator, loaded.n_bins, loaded.criterion) == ("equal_mass_interp", 11, "ece")
        assert torch.equal(loaded.predict_proba(logits), calibrator.predict_proba(logits))
        loaded.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    other = BOTH[1 - BOTH.index(cls)]
    with pytest.raises(ValueError, match=f"expected a calibrator of method '{other.method}', found '{cls.method}'"):
        other.load(path)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(step, tmp_path, monkeypatch):
    path = tmp_path / "calibrator.json"
    path.write_text("precious")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"):
        fitted().save(path)
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == ["calibrator.json"]


def test_a_link_and_the_permissions_of_a_file_stay(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    fitted().save(link)
    assert link.is_symlink()
    assert json.loads(real.read_text())["method"] == "temperature"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_numpy_number_of_bins_is_fitted_and_saved(tmp_path):
    path = tmp_path / "calibrator.json"
    TemperatureScaling(n_bins=np.int64(10), temperatures=[1.0, 2.0]).fit(*sample(50)).save(path)
    assert TemperatureScaling.load(path).n_bins == 10


def test_a_missing_folder_is_named_as_it_was_given(tmp_path):
    path = tmp_path / "nowhere" / "calibrator.json"
    with pytest.raises(FileNotFoundError) as caught:
        TemperatureScaling(temperatures=[1.0, 2.0]).fit(*sample(50)).save(path)
    assert caught.value.filename == str(path)


def test_a_folder_is_not_overwritten(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        fitted().save(tmp_path)
    with pytest.raises(FileNotFoundError, match="its folder does not exist; create it first"):
        fitted().save(tmp_path / "missing" / "calibrator.json")


def test_a_file_that_is_no_calibrator_is_named_with_what_is(tmp_path):
    wanted = "expected the .json file of a calibrator, which save or focalkern calibrate wrote, found"
    for error, content, found in (
        (FileNotFoundError, None, "nothing there"),
        (ValueError, b"", "an empty file"),
        (ValueError, b"PK\x03\x92", "bytes that are no text"),
        (ValueError, b"{", "something else"),
    ):
        path = tmp_path / "calibrator.json"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(error, match=f"{wanted} {found}"):
            load_calibrator(path)
    with pytest.raises(IsADirectoryError, match=f"{wanted} a folder"):
        load_calibrator(tmp_path)


def change(**changes):
    def apply(document):
        for key, value in changes.items():
            *path, last = key.split("__")
            part = document
            for step in path:
                part = part[step]
            if value is None:
                del part[last]
            else:
                part[last] = value
        return json.dumps(document).encode()

    return apply


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda document: b"", "expected the .json file of a calibrator"),
        (lambda document: json.dumps(document).encode()[:-40], "expected the .json file of a calibrator"),
        (lambda document: pickle.dumps(document), "expected the .json file of a calibrator"),
        (lambda document: b"[1, 2]", "found other JSON"),
        (change(format="other"), "found other JSON"),
        (change(format_version=99), "upgrade focalkern"),
        (change(format_version="1"), "found '1'"),
        (change(format_version=4), "; fit and save it again with this version"),
        (change(format_version=True), "found True"),
        (change(method="curve"), "found 'curve'"),
        (change(method="auto"), "histogram, multi-label, found 'auto'; fit and save it again"),
        (change(temperature=None), "'temperature' is missing"),
        (change(fit__n_classes=None), "'n_classes' is missing"),
        (change(temperature=0), "expected gamma > -1 and temperature > 0, at most 1e+06 and 1e+30, found 0.0 and 0.0"),
        (change(gamma=-1), "expected gamma > -1"),
        (change(temperature="2"), "temperature must be a finite number, found '2'"),
        (change(parameters="none"), "not a valid calibrator"),
        (change(parameters__criterion="mce"), "criterion must be one of nll, brier, ece, got 'mce'"),
        (change(fit__n_samples=0), "n_samples must be a count of at least 1, found 0"),
        (change(fit__best_value=float("nan")), "best_value must be a finite number"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(spoil, words, tmp_path):
    path = tmp_path / "calibrator.json"
    fitted().save(path)
    path.write_bytes(spoil(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=r"calibrator\.json: ") as caught:
        load_calibrator(path)
    assert words in str(caught.value)


class Mine(TemperatureScaling):
    """A user's calibrator with an argument of its own, and without most of those of its base class."""

    def __init__(self, *, floor=0.1, name="mine"):
        super().__init__(floor=floor, criterion="brier")
        self.name = name


class Required(TemperatureScaling):
    def __init__(self, note, **options):
        super().__init__(**options)
        self.note = note


def test_a_subclass_loads_its_own_class(tmp_path, monkeypatch):
    monkeypatch.setitem(BY_METHOD, "own", None)  # a class with a method enters itself

    class Own(Mine):
        method = "own"

    path, (logits, target) = tmp_path / "calibrator.json", sample(100)
    of_subclass = Mine(floor=0.2, name="cat")
    of_subclass.criterion = "nll"
    of_subclass.fit(logits, target).save(path)
    loaded = Mine.load(path)
    assert (type(loaded), loaded.floor, loaded.criterion, loaded.name) == (Mine, 0.2, "nll", "mine")
    assert torch.equal(loaded.predict_proba(logits), of_subclass.predict_proba(logits))
    assert type(load_calibrator(path)) is type(TemperatureScaling.load(path)) is TemperatureScaling
    assert type(Calibrator.load(path)) is TemperatureScaling
    words = "^Required: load expected a default for each argument that TemperatureScaling lacks, found none for note; "
    with pytest.raises(TypeError, match=words):
        Required.load(path)
    with pytest.raises(ValueError, match="expected a calibrator of method 'isotonic', found 'temperature'"):
        IsotonicCalibration.load(path)
    with pytest.raises(ValueError, match="expected a calibrator of method 'own', found 'temperature'"):
        Own.load(path)
    Own().fit(logits, target).save(path)
    assert {type(kind.load(path)) for kind in (Own, Mine, TemperatureScaling, Calibrator)} == {Own}


def test_a_missing_file_is_the_usual_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        TemperatureScaling.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    "make",
    [
        HistogramBinning,
        IsotonicCalibration,
        RobustTemperatureScaling,
        lambda: StructuredScaling(solver="lbfgs"),
        TemperatureScaling,
        *(functools.partial(SplineScaling, kind=kind) for kind in ("scalar", "vector", "matrix")),
    ],
)
def test_a_module_has_its_own_numbers(make):
    """load_state_dict writes into the buffers of a module: not into its calibrator, nor into another module of it."""
    logits, target = sample(300)
    peer("sklearn") if make is IsotonicCalibration else None
    calibrator = make().fit(logits, target)
    before, module, second = calibrator.predict_proba(logits), calibrator.as_module(), calibrator.as_module()
    module.load_state_dict({name: value * 1.001 for name, value in module.state_dict().items()})
    assert torch.equal(calibrator.predict_proba(logits), before)
    assert torch.equal(pickle.loads(pickle.dumps(calibrator)).predict_proba(logits), before)
    assert_close(second(logits).exp(), before)
