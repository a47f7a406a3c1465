"""Arguments that only the modules' own functions and torch.ops can receive: each is an error, none is read."""

import pytest
import torch
from spline_map_cases import KNOTS, VALUES

from focalkern.fallback.spline_map import spline_coefficients
from focalkern.ops._backend import backend_for

pytestmark = pytest.mark.kernels("stable")

Z = torch.zeros(5, 4)
PARAMETERS = torch.tensor([1.1, 1.3, 1e-3], dtype=torch.float64)
COEFFICIENTS = spline_coefficients(KNOTS, VALUES)
TENSORS = {"input": Z, "parameters": PARAMETERS, "knots": KNOTS, "coefficients": COEFFICIENTS, "weight": None}
BIAS = torch.zeros(4, dtype=torch.float64)
KERNELS = backend_for(Z)


def forward(**changes):
    tensors = {**TENSORS, "bias": None, **changes}
    return torch.ops.focalkern.spline_map_forward(*tensors.values(), False, False, False, False, False, True)


def backward(grad, **changes):
    tensors = {**TENSORS, "bias": None, **changes}
    return torch.ops.focalkern.spline_map_backward(grad, *tensors.values(), False, False, False, [True] * 6)


# Tensors of the wrong device, dtype, layout or shape. A real input beside one on `meta` dispatches to the meta device.
WRONG = {
    "parameters": [PARAMETERS.to("meta"), PARAMETERS.float(), PARAMETERS[:2]],
    "knots": [KNOTS.to("meta"), KNOTS.float(), KNOTS[:1]],
    "coefficients": [COEFFICIENTS.to("meta"), COEFFICIENTS[:3]],
    "weight": [BIAS.to("meta"), BIAS[:3], torch.zeros((), dtype=torch.float64)],
    "bias": [BIAS.to("meta"), BIAS.float(), BIAS.diag()],
}


@pytest.mark.parametrize("name", WRONG)
def test_parameters_of_the_map(name):
    for wrong in WRONG[name]:
        found = rf"got \[[\d, ]*\] torch.float(64|32) on {wrong.device.type}$"
        for call in (forward, lambda **changes: backward(torch.zeros(5, 4), **changes)):
            with pytest.raises(ValueError, match=rf"^spline_calibration_map: {name} must be .* float64.*{found}"):
                call(**{name: wrong})


@pytest.mark.parametrize(
    ("grad", "error", "message"),
    [
        (Z.to(torch.float8_e4m3fn), TypeError, "grad must be float16, .* or float64, got torch.float8_e4m3fn"),
        (Z.long(), TypeError, "grad must be float16, bfloat16, float32 or float64, got torch.int64"),
        (Z[:3], ValueError, r"grad must have the shape of the output, \[5, 4\], got \[3, 4\]"),
        (Z.to("meta"), ValueError, "grad must be on the device of input, cpu, got meta"),
    ],
)
def test_gradient_of_the_map(grad, error, message):
    with pytest.raises(error, match=f"^spline_calibration_map: {message}$"):
        backward(grad)


def test_meta_tensors_have_shapes():
    everything = {name: None if one is None else one.to("meta") for name, one in TENSORS.items()}
    assert forward(**everything, bias=BIAS.to("meta")).shape == Z.shape
    assert [one.shape[0] for one in backward(Z.to("meta"), **everything, bias=BIAS.to("meta"))] == [5, 3, 7, 8, 0, 4]


LABELS, WEIGHT = torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.float64)
CURVE = (KNOTS, spline_coefficients(KNOTS, torch.eye(7, dtype=torch.float64)), 0.1, VALUES, None, None, None)
SUMS = {
    "spline_curve_sums": lambda z, w: KERNELS.spline_curve_sums(z, LABELS, w, 1.0, 1e-3, *CURVE, False, False),
    "spline_linear_sums": lambda z, w: KERNELS.spline_linear_sums(z, LABELS, w, 1.0, 1e-3, *CURVE, False, False, True),
    "spline_temperature_sums": lambda z, w: KERNELS.spline_temperature_sums(z, LABELS, w, WEIGHT, 1e-3, False),
    "spline_histogram": lambda z, w: KERNELS.spline_histogram(z, w, 1.0, 1e-3, False),
    "spline_spread": lambda z, w: KERNELS.spline_spread(z, w, 1.0, 10.0, False),
    "spline_log_probs": lambda z, w: KERNELS.spline_log_probs(z, 1.0, 1e-3, False),
    "spline_features": lambda z, w: KERNELS.spline_features(z, 1.0, 1e-3, False),
}


@pytest.mark.parametrize("op", SUMS)
def test_rows_of_a_fit(op):
    for wrong in (torch.zeros(5, 0), torch.zeros(5, 1), torch.zeros(5), torch.zeros(())):
        with pytest.raises(ValueError, match=rf"^{op}: input must be \[N, C\] with C >= 2, got \["):
            SUMS[op](wrong, WEIGHT)
    with pytest.raises(TypeError, match=rf"^{op}: input must be a dense \(strided\) tensor, got layout Sparse"):
        SUMS[op](Z.to_sparse(), WEIGHT)
    if op not in ("spline_log_probs", "spline_features"):
        with pytest.raises(TypeError, match=rf"^{op}: weight must be a dense \(strided\) tensor, got layout Sparse"):
            SUMS[op](Z, WEIGHT.to_sparse())
        with pytest.raises(ValueError, match=f"^{op}: weight must be on the device of input, cpu, got meta"):
            SUMS[op](Z, WEIGHT.to("meta"))


@pytest.mark.parametrize("op", SUMS)
def test_rows_without_values(op):
    with pytest.raises((NotImplementedError, ValueError), match=f"^{op}: input must (have values|be on the CPU).*meta"):
        SUMS[op](Z.to("meta"), WEIGHT)


def test_running_sums_without_buckets():
    grid = [torch.zeros(2, dtype=torch.float64) + 1.0] * 2
    run = KERNELS.CalibrationGridRun(Z, LABELS, *grid, 15, 15, 0, False, -100)
    counts, sums = torch.zeros(2, 2, 0, dtype=torch.int64), torch.zeros(2, 2, 0, dtype=torch.float64)
    of_cells = [torch.zeros(2, 2, dtype=torch.float64)] * 2
    with pytest.raises(ValueError, match=r"^calibration_grid: count must have a bucket, got \[2, 2, 0\]"):
        run.add_to(torch.zeros(1, dtype=torch.int64), counts, sums, counts, *of_cells, False)
