"""Histogram binning: saved files, parameters and data that cannot be right."""

import json
import math

import pytest
import torch
from test_calibrators_histogram import sample

from focalkern.calibrators import HistogramBinning, NotFittedError, TemperatureScaling, load_calibrator

# The data are small, so fits warn; test_calibrators_warnings.py tests the warnings.
pytestmark = pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: d["edges"].pop(), "expected M + 1 edges, M values and M counts"),
        (lambda d: d.update(edges=[0, 0.7, 0.6, 1]), "expected ascending edges from 0 to 1"),
        (lambda d: d.update(values=[0.5, 1.5, 0.5]), "expected values in [0, 1]"),
        (lambda d: d.update(values=[0.5, None, 0.5]), "a value must be a finite number, found None"),
        (lambda d: d["fit"].update(counts=[1, 2, -1]), "a count must be a count of at least 0, found -1"),
        (lambda d: d.pop("values"), "'values' is missing"),
        (lambda d: d.pop("fit"), "'fit' is missing"),
        (lambda d: d["scaling"].update(temperature=-1.0), "expected gamma > -1 and temperature > 0"),
        (lambda d: d["scaling"].update(method="none"), "multi-label, found 'none'; fit and save it again"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(spoil, words, tmp_path):
    path = tmp_path / "calibrator.json"
    HistogramBinning(n_bins=3, scaling=TemperatureScaling()).fit(*sample(100)).save(path)
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"calibrator\.json: ") as caught:
        load_calibrator(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"n_bins": 0}, ValueError, "n_bins must be at least 1, got 0"),
        ({"n_bins": 2.0}, TypeError, "n_bins must be an int, got 2.0"),
        ({"n_bins": True}, TypeError, "n_bins must be an int, got True"),
        ({"binning": "quantile"}, ValueError, "binning must be one of equal_width, equal_mass, got 'quantile'"),
        ({"scaling": "temperature"}, TypeError, "scaling must be a TemperatureScaling"),
        ({"scaling": TemperatureScaling(input_kind="probs")}, ValueError, "input_kind of scaling must be 'logits'"),
        ({"scaling": TemperatureScaling(n_bins=0, criterion="ece")}, ValueError, "n_bins"),
        ({"input_kind": "auto"}, ValueError, "input_kind must be one of logits, probs"),
    ],
)
def test_bad_parameters_are_named(options, error, words):
    with pytest.raises(error) as caught:
        HistogramBinning(**options).fit(*sample(50))
    assert words in str(caught.value)


def test_bad_data_are_named_and_leave_the_fitted_bins():
    logits, target = sample(50)
    calibrator = HistogramBinning(n_bins=4).fit(logits, target)
    before = dict(vars(calibrator))
    for z, y, error in [
        (logits.index_fill(0, torch.tensor(7), math.nan), target, ValueError),
        (logits, target + 1, IndexError),
        (logits, target - 100, IndexError),
        (logits[:0], target[:0], ValueError),
        (logits, target + 0.5, ValueError),
    ]:
        with pytest.raises(error):
            calibrator.fit(z, y)
    assert vars(calibrator) == before
    with pytest.raises(ValueError, match="must have the 5 classes of fit"):
        calibrator.predict_proba(logits[:, :4])
    with pytest.raises(NotFittedError):
        HistogramBinning().changed(logits)
