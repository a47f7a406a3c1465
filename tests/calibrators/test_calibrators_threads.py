"""Fits and predictions in several threads at once, and under autocast, have the bits of one thread without it."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import focalkern as fk

# Small sets are enough for what these tests show.
pytestmark = pytest.mark.filterwarnings("ignore:.*rows per class are few:focalkern.CalibrationWarning")

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

EVERY = [
    fk.TemperatureScaling(),
    fk.RobustTemperatureScaling(),
    fk.FocalTemperatureScaling(),
    fk.SplineScaling(kind="scalar"),
    fk.SplineScaling(kind="matrix"),
    fk.StructuredScaling(),
    fk.HistogramBinning(n_bins=5),
    fk.IsotonicCalibration(),
    fk.AutoCalibrator(),
]
THREADS, ROUNDS = 6, 4


def rows(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (250,), generator=generator)
    logits = torch.randn(250, 4, generator=generator)
    logits[torch.arange(250), labels] += 1.5
    return 2 * logits, labels


def of_threads(function) -> list[Tensor]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, range(THREADS * ROUNDS)))


@pytest.mark.parametrize("calibrator", EVERY, ids=repr)
def test_a_fitted_calibrator_is_read_by_threads(calibrator):
    fitted = copy.deepcopy(calibrator).fit(*rows(0))
    sizes = [1 + 40 * (k % 5) for k in range(THREADS * ROUNDS)]
    expected = [copy.deepcopy(fitted).predict_proba(rows(k)[0][: sizes[k]]) for k in range(THREADS * ROUNDS)]
    found = of_threads(lambda k: fitted.predict_proba(rows(k)[0][: sizes[k]]))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("calibrator", EVERY, ids=repr)
def test_threads_fit_calibrators_of_their_own(calibrator):
    test, _ = rows(100)
    expected = [copy.deepcopy(calibrator).fit(*rows(k)).predict_proba(test) for k in range(3)]
    found = of_threads(lambda k: copy.deepcopy(calibrator).fit(*rows(k % 3)).predict_proba(test))
    assert all(torch.equal(one, expected[k % 3]) for k, one in enumerate(found))


@pytest.mark.parametrize(
    ("make", "n", "threads"),
    [
        (fk.TemperatureScaling, 1000, 1),
        (fk.TemperatureScaling, 2**20 // 4 + 1, 3),
        (fk.IsotonicCalibration, 2**20 // 4 + 1, 1),  # in blocks
    ],
)
def test_a_small_fit_takes_one_thread_and_gives_the_others_back(monkeypatch, make, n, threads):
    seen, fit = [], make._fit
    monkeypatch.setattr(make, "_fit", lambda *rows: (seen.append(torch.get_num_threads()), fit(*rows))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        make().fit_quietly(torch.randn(n, 4), torch.arange(n) % 4)
        assert seen == [threads] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("calibrator", EVERY, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_fit_under_autocast_is_the_same(calibrator, dtype):
    logits, labels = rows(0)
    for given in (logits, logits.half()):  # of another half type than autocast's, too
        expected = copy.deepcopy(calibrator).fit(given, labels).predict_proba(logits)
        with torch.autocast("cpu", dtype=dtype):
            found = copy.deepcopy(calibrator).fit(given, labels)
        assert torch.equal(found.predict_proba(logits), expected)
