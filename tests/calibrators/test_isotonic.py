"""Isotonic regression of many rows: the steps of scikit-learn, without copies of the rows."""

import numpy as np
import pytest
import torch
from conftest import peer
from torch.utils._python_dispatch import TorchDispatchMode

import focalkern as fk

# Small sets are enough for what these tests show.
pytestmark = pytest.mark.filterwarnings("ignore:.*rows per class are few:focalkern.CalibrationWarning")

ROWS, CLASSES = 12000, 100  # more logits than the largest temporary of a block has numbers


def sample(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    logits = 2 * torch.randn(ROWS, CLASSES, generator=generator)
    logits[torch.arange(ROWS), target] += 4
    return logits.to(dtype), target


@pytest.mark.parametrize("weighted", [False, True])
def test_the_steps_have_the_bits_of_scikit_learn(weighted):
    """Every row occurs four times: the order of equal probabilities decides the last bits of a sum of weights."""
    isotonic = peer("sklearn.isotonic")
    logits, target = sample()
    logits = logits[: ROWS // 4].repeat(4, 1)
    weight = torch.rand(ROWS, dtype=torch.float64) + 0.5 if weighted else None
    found = fk.IsotonicCalibration().fit_quietly(logits, target, weight)
    probs = logits.double().softmax(-1).numpy()
    for k, (x, y) in enumerate(found.steps_):
        regression = isotonic.IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        regression.fit(probs[:, k], target.numpy() == k, None if weight is None else weight.numpy())
        assert np.array_equal(x, regression.X_thresholds_) and np.array_equal(y, regression.y_thresholds_)


class LargeFloat64(TorchDispatchMode):
    """The places of the float64 tensors of at least as many numbers as the rows have."""

    def __init__(self):
        super().__init__()
        self.places = set()

    def __torch_dispatch__(self, function, types, args=(), options=None):
        result = function(*args, **(options or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64 and result.numel() >= ROWS * CLASSES:
            self.places.add(result.data_ptr())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_temporary_has_the_size_of_the_rows(dtype):
    peer("sklearn")
    logits, target = sample(dtype)
    with LargeFloat64() as fit:
        calibrator = fk.IsotonicCalibration().fit(logits, target)
    assert len(fit.places) == 1  # the probabilities by class
    with LargeFloat64() as predict:
        probs = calibrator.predict_proba(logits)
    assert not predict.places
    assert torch.equal(probs, torch.cat([calibrator.predict_proba(part) for part in logits.split(1000)]))
    pixels = logits.view(120, 100, CLASSES)
    assert torch.equal(calibrator.predict_proba(pixels), probs.view(120, 100, CLASSES))
