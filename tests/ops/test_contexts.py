"""Results do not depend on torch's default device, nor on inference mode or autocast around a calibrator."""

import pytest
import torch
from conftest import assert_close

import focalkern as fk

C = 5
TARGET = torch.arange(60) % C
LOGITS = 2 * torch.randn(60, C, generator=torch.Generator().manual_seed(1)) + torch.nn.functional.one_hot(TARGET, C)
WIDE = torch.randn(C, C, generator=torch.Generator().manual_seed(2))
ADAPTIVE = fk.AdaFocalLoss(n_bins=3)


def adapted():
    """The state of a loss before and after its update."""
    ADAPTIVE.history.clear()
    ADAPTIVE.bin_gammas.fill_(1.0)
    ADAPTIVE.accumulate(LOGITS, TARGET)
    waiting = ADAPTIVE.state_dict()["_extra_state"]
    ADAPTIVE.update()
    ADAPTIVE.update_bins([0.0, 0.2, 0.5, 1.0], [0.1, 0.3, 0.7], [0.1, 0.4, 0.6])
    return torch.cat([waiting, ADAPTIVE.state_dict()["_extra_state"]])


CALLS = {
    "z-loss": lambda: fk.focal_loss(LOGITS, TARGET, 2.0, z_loss=0.1, return_stats=True).loss,
    "statistics": lambda: fk.focal_loss(LOGITS, TARGET, 2.0, return_stats=True).stats.log_p,
    "confidence": lambda: fk.focal_loss(LOGITS, TARGET, 1.0, modulation="confidence", z_loss=0.1),
    "linear": lambda: fk.linear_focal_loss(LOGITS, WIDE, TARGET, 2.0, z_loss=0.1),
    "linear, chunks": lambda: fk.linear_focal_loss(LOGITS, WIDE, TARGET, 2.0, chunk_rows=7, label_smoothing=0.1),
    "sigmoid": lambda: fk.asymmetric_loss(LOGITS, TARGET, reduction="mean"),
    "map": lambda: fk.focal_calibration_map(LOGITS, 2.0, 1.5),
    "grid": lambda: fk.calibration_grid(LOGITS, TARGET, [0.0, 1.0], [1.0, 2.0]).tables["ece"],
    "adaptive": adapted,
    "bootstrap": lambda: fk.bootstrap.paired_bootstrap({"a": LOGITS.softmax(1)}, TARGET, n_resamples=3).replicates,
    "bias floor": lambda: fk.bootstrap.bias_floor(LOGITS.softmax(1), n_resamples=3)["ece_equal_width"].samples,
    "threshold": lambda: fk.accept_threshold(LOGITS.softmax(1), TARGET, max_risk=0.9).bound,
    "study": lambda: fk.compare_calibrators((LOGITS, TARGET), resamples=3).calibrator.predict_proba(LOGITS),
}


@pytest.mark.filterwarnings("ignore::focalkern.CalibrationWarning")
@pytest.mark.parametrize("name", CALLS)
def test_tensors_on_the_cpu_need_no_other_device(name):
    """A tensor that is made on the meta device by mistake has no values, and its use raises."""
    expected = torch.as_tensor(CALLS[name]())
    with torch.device("meta"):
        found = CALLS[name]()
    assert torch.equal(torch.as_tensor(found), expected)


@pytest.mark.parametrize(
    "calibrator", [fk.SplineScaling(), fk.SplineScaling(kind="matrix"), fk.RobustTemperatureScaling()], ids=repr
)
def test_modules_of_splines_keep_the_device_of_the_calibrator(calibrator):
    module = calibrator.fit_quietly(LOGITS, TARGET).as_module()
    expected = module(LOGITS)
    with torch.device("meta"):
        assert torch.equal(module(LOGITS), expected)
        assert torch.equal(calibrator.as_module()(LOGITS), expected)


BRIER = {"search": "brier", "criterion": "brier"}


@pytest.mark.parametrize(
    "calibrator",
    [fk.TemperatureScaling(**BRIER), fk.FocalTemperatureScaling(**BRIER), fk.StructuredScaling(), fk.AutoCalibrator()],
    ids=repr,
)
def test_fit_in_inference_mode(calibrator):
    expected = calibrator.fit_quietly(LOGITS, TARGET).predict_proba(LOGITS)
    with torch.inference_mode():
        weight = torch.ones(len(TARGET))
        found = calibrator.fit_quietly(LOGITS + 0, TARGET + 0, weight).predict_proba(LOGITS)
    assert_close(found, expected)


@pytest.mark.parametrize("kind", ["vector", "matrix"])
@pytest.mark.parametrize("make", [fk.StructuredScaling, fk.SplineScaling])
def test_autocast_does_not_round_the_products_of_a_calibrator(make, kind):
    calibrator = make(kind=kind).fit_quietly(LOGITS, TARGET)
    expected = calibrator.as_module()(LOGITS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(calibrator.as_module()(LOGITS), expected)
        assert torch.equal(calibrator.predict_log_proba(LOGITS), expected)
