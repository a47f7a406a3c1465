"""Errors about a dtype name it as Python prints it, with the kernels and in plain torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import focalkern as fk

Z, LABELS = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
DENSE, SCORES = torch.rand(6, 3), torch.rand(6)
X, HEAD = torch.randn(6, 4), torch.randn(3, 4)
SIGMOID = (fk.sigmoid_focal_loss, fk.asymmetric_loss, fk.varifocal_loss, fk.matchability_loss, fk.ia_bce_loss)
ROWS = (fk.focal_loss, fk.poly_focal_loss, fk.DualFocalLoss(), fk.BrierLoss(), fk.MMCELoss())
MAPS = (
    fk.focal_calibration_map,
    fk.binary_focal_calibration_map,
    fk.inverse_focal_calibration_map,
    fk.binary_inverse_focal_calibration_map,
)
FLOAT8 = torch.float8_e4m3fn
OF_INPUT = {
    **{f"row loss {i}": lambda z, loss=loss: loss(z, LABELS) for i, loss in enumerate(ROWS)},
    **{f"sigmoid loss {i}": lambda z, loss=loss: loss(z, DENSE) for i, loss in enumerate(SIGMOID)},
    **{f"map {i}": lambda z, of=of: of(z, 1.0) for i, of in enumerate(MAPS)},
    "smoothed": lambda z: fk.focal_loss(z, LABELS, label_smoothing=0.1),
    "statistics": lambda z: fk.focal_loss(z, LABELS, return_stats=True),
    "grid": lambda z: fk.calibration_grid(z, LABELS, [0.0], [1.0]),
    "head": lambda z: fk.linear_focal_loss(z, HEAD, LABELS),
    "metric": lambda z: fk.metrics.expected_calibration_error(z, LABELS),
    "fit": lambda z: fk.TemperatureScaling().fit(z, LABELS),
}
OF_LABELS = {
    **{f"row loss {i}": lambda y, loss=loss: loss(Z, y) for i, loss in enumerate(ROWS)},
    "grid": lambda y: fk.calibration_grid(Z, y, [0.0], [1.0]),
    "head": lambda y: fk.linear_focal_loss(X, HEAD, y),
    "check": lambda y: fk.check_labels(y, 3),
}
OF_PARAMETER = {
    "gamma of a loss": lambda g: fk.focal_loss(Z, LABELS, g),
    "gamma with z_loss": lambda g: fk.focal_loss(Z, LABELS, g, z_loss=0.1),
    "gamma of a poly loss": lambda g: fk.poly_focal_loss(Z, LABELS, g),
    "gamma over ranks": lambda g: fk.focal_loss_vocab_parallel(Z, LABELS, g),
    "class weight": lambda g: fk.focal_loss(Z, LABELS, weight=g[:3]),
    "gamma of a sigmoid loss": lambda g: fk.sigmoid_focal_loss(Z, DENSE, g),
    "weight of a sigmoid loss": lambda g: fk.sigmoid_focal_loss(Z, DENSE, weight=g),
    "scores": lambda g: fk.varifocal_loss(Z, (LABELS, g)),
    "gamma of a map": lambda g: fk.focal_calibration_map(Z, g),
    "temperature": lambda g: fk.focal_calibration_map(Z, 1.0, g),
    "gamma of a head": lambda g: fk.linear_focal_loss(X, HEAD, LABELS, g),
}
CASES = [
    *((name, call, Z.to(dtype)) for name, call in OF_INPUT.items() for dtype in (torch.int64, torch.int32, torch.bool)),
    *((name, call, LABELS.to(dtype)) for name, call in OF_LABELS.items() for dtype in (torch.int16, torch.bool)),
    *((name, call, torch.ones(6).to(dtype)) for name, call in OF_PARAMETER.items() for dtype in (torch.int64, FLOAT8)),
]


def messages():
    """The error of each case."""
    for name, call, given in CASES:
        with pytest.raises(TypeError) as raised:
            call(given)
        yield f"{name}, {given.dtype}: {raised.value}"


def test_names_are_those_of_python():
    for message in messages():
        assert re.search(r"got .*\btorch\.(int64|int32|int16|bool|float8_e4m3fn)\b", message), message


def test_dtypes_without_arithmetic_are_told_which_have_it():
    """Floating point is no reason to refuse them: the message lists the dtypes."""
    of_float8 = [message for message in messages() if str(FLOAT8) in message]
    assert len(of_float8) == len(OF_PARAMETER)
    for message in of_float8:
        assert " must be float16, bfloat16, float32 or float64, got" in message, message


@pytest.mark.kernels("stable")
def test_plain_torch_has_the_same_words():
    code = "import test_dtype_names; print(*test_dtype_names.messages(), sep='\\n')"
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(tests), str(tests / "ops")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "FOCALKERN_KERNELS": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == list(messages())
