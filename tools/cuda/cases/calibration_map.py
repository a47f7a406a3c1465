"""The focal calibration map and its binary form, forward and backward."""

import ctypes
import os
from ctypes import c_bool, c_double, c_int64, c_void_p

import pytest
import torch

from focalkern import reference
from tools.cuda.cases.common import DTYPES, NAN, Memory, assert_near, nan_like, real_of, structure

PARAMETERS = [
    ("gamma", c_void_p), ("gamma_stride", c_int64), ("gamma_value", c_double),
    ("temperature", c_void_p), ("temperature_stride", c_int64), ("temperature_value", c_double),
]  # fmt: skip
MAP = [
    ("rows", c_int64), ("classes", c_int64), ("input", c_void_p), ("input_is_probs", c_bool), ("log_output", c_bool),
    *PARAMETERS,
]  # fmt: skip
OUTPUTS = [("output", c_void_p), ("output_wide", c_void_p)]
GRADIENTS = [(n, c_void_p) for n in ("grad_output", "grad_output_wide", "grad_input", "grad_gamma", "grad_temperature")]


def run_map(library, values, gamma, temperature, grad, *, kind="logits", log=False, wide=False):
    dtype = values.dtype
    binary = kind == "binary"
    rows = values.numel() if binary else len(values)
    with Memory(library) as memory:
        forward = structure(library, "CalibrationMapForward", dtype, MAP + OUTPUTS)
        backward = structure(library, "CalibrationMapBackward", dtype, MAP + GRADIENTS)
        output = nan_like(values, real_of(dtype) if wide else dtype)
        row_numbers = torch.full((rows,), NAN, dtype=torch.float64)
        for args in (forward, backward):
            args.rows, args.classes, args.input_is_probs = rows, 1 if binary else values.shape[1], kind == "probs"
            args.input, args.log_output = memory.put(values), log
            for name, value in (("gamma", gamma), ("temperature", temperature)):
                if isinstance(value, torch.Tensor):
                    setattr(args, name, memory.put(value))
                    setattr(args, name + "_stride", 1)
                else:
                    setattr(args, name + "_value", value)
        setattr(forward, "output_wide" if wide else "output", memory.out(output))
        setattr(backward, "grad_output_wide" if wide else "grad_output", memory.put(grad.to(output.dtype)))
        backward.grad_input = memory.out(nan_like(values))
        backward.grad_gamma, backward.grad_temperature = memory.out(row_numbers), memory.out(row_numbers)
        for direction, args in (("forward", forward), ("backward", backward)):
            assert getattr(library, "calibration_map_" + direction)(DTYPES.index(dtype), ctypes.byref(args)) == 0
        return (
            memory.get(forward.output_wide if wide else forward.output, output),
            memory.get(backward.grad_input, values),
            memory.get(backward.grad_gamma, row_numbers),
            memory.get(backward.grad_temperature, row_numbers),
        )


def check_map(library, values, gamma, temperature, *, kind="logits", log=False, wide=False):
    dtype, real = values.dtype, real_of(values.dtype)
    grad = torch.randn(values.shape).to(real if wide else dtype)
    output, *gradients = run_map(library, values, gamma, temperature, grad, kind=kind, log=log, wide=wide)
    inputs = [values.double().requires_grad_()]
    parameters = [
        (
            p if isinstance(p, torch.Tensor) else torch.full((len(gradients[1]),), p, dtype=torch.float64)
        ).requires_grad_()
        for p in (gamma, temperature)
    ]
    if kind == "binary":
        expected = reference.binary_focal_calibration_map(inputs[0], *parameters, log_odds=log)
    else:
        expected = reference.focal_calibration_map(inputs[0], *parameters, input_kind=kind, log=log)
    exact = torch.autograd.grad(expected, inputs + parameters, torch.where(expected.isfinite(), grad.double(), 0.0))
    assert_near(output, expected.detach(), output.dtype, 4 if output.dtype == real else 1)
    # A gradient is a sum over the classes of terms of both signs; the largest term determines the rounding error.
    scale = max(1.0, float(exact[0].abs().max()))
    assert_near(gradients[0] / scale, exact[0] / scale, dtype, 20 if dtype == real else 2)
    for actual, wanted in zip(gradients[1:], exact[1:], strict=True):
        scale = max(1.0, float(wanted.abs().max()))
        assert_near(actual / scale, wanted / scale, real, 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "classes"),
    [(1, 2), (300, 3), (65, 10), (33, 17), (257, 33), (17, 66), (9, 129), (5, 513), (3, 2049), (2, 4097), (2, 8193)],
)
def test_map_rows(library, dtype, rows, classes):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    logits[0, 1 : classes // 2] = -torch.inf
    check_map(library, logits, 1.0, 1.5, log=True)
    check_map(library, logits, 4 * torch.rand(rows).double() - 0.9, 0.3 + torch.rand(rows).double(), wide=True)


# Vectors of 16 bytes, where every row begins on a 16-byte boundary: a thread's part is one vector, several, or part of
# a whole block's row; its last vector ends within the row or beyond it. Otherwise class by class: rows that do not fill
# vectors, and data off the boundary.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("classes", [8, 16, 32, 200, 1000, 1024, 1032, 4104, 8200])
def test_map_of_vectors(library, dtype, classes, off):
    rows = 19 if classes < 1000 else 9
    values = torch.full((rows * classes + off,), NAN, dtype=dtype)[off:].view(rows, classes)
    values.copy_(3 * torch.randn(rows, classes))
    values[0, classes // 2 :] = -torch.inf
    gamma, temperature = 4 * torch.rand(rows).double() - 0.9, 0.3 + torch.rand(rows).double()
    check_map(library, values, gamma, temperature, log=True, wide=off == 1)
    check_map(library, values, gamma, temperature, wide=off == 0)


# The sums exclude the largest class: at any position of a vector, in any thread, and only one of several equal classes.
@pytest.mark.parametrize("classes", [10, 1000, 1001, 9000])
@pytest.mark.parametrize("log", [False, True])
def test_map_of_the_largest_class_anywhere(library, classes, log):
    logits = torch.randn(16, classes)
    places = torch.linspace(0, classes - 1, 16).long()
    logits[torch.arange(16), places] = 6.0
    logits[::3, classes // 2] = 6.0
    logits[::5, classes - 1] = 6.0
    logits[15] = 1.0
    check_map(library, logits, 2.0, 1.0, log=log)


# The results keep their digits even if the largest class has all of the probability, and if no power is needed.
@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0, 3.0, 20.0, -0.99])
@pytest.mark.parametrize("classes", [10, 1000])
def test_map_of_saturated_rows(library, classes, gamma):
    logits = torch.randn(8, classes)
    logits[torch.arange(8), torch.arange(8)] += torch.tensor([0.0, 5.0, 20.0, 40.0, 60.0, 80.0, 100.0, 1000.0])
    check_map(library, logits, gamma, 1.0, log=True)
    check_map(library, logits, gamma, 1.0)


@pytest.mark.parametrize("classes", [2, 40, 1000, 5000])
def test_map_of_probabilities(library, classes):
    probs = torch.randn(3, classes).softmax(1)
    for log in (False, True):
        check_map(library, probs, 0.5, 2.0, kind="probs", log=log)


@pytest.mark.parametrize("dtype", DTYPES)
def test_binary_map(library, dtype):
    values = (5 * torch.randn(1000)).to(dtype)
    for log in (False, True):
        check_map(library, values, torch.rand(1000).double(), 0.7, kind="binary", log=log)


# 3 and 10 classes leave slots of a thread empty; 9000 do not fit the registers.
@pytest.mark.parametrize("classes", [3, 10, 1000, 5000, 9000])
@pytest.mark.parametrize("log", [False, True])
def test_map_rows_without_an_answer(library, classes, log):
    logits = torch.randn(21, classes)
    gamma, temperature = torch.ones(21).double(), torch.ones(21).double()
    logits[1, 2] = NAN
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    gamma[4] = -1
    gamma[6] = 1e39  # infinite in float32
    temperature[5] = 0
    logits[0] = logits[20] = NAN  # the kernel must not read before the first row, nor write beyond the last
    for result in run_map(library, logits, gamma, temperature, torch.ones(21, classes), log=log):
        bad = result.reshape(21, -1).isnan()
        assert bad.any(1).nonzero().reshape(-1).tolist() == [0, 1, 2, 3, 4, 5, 6, 20]
        assert bad[bad.any(1)].all()


# Temperatures at which 1/T is at a limit of float32: results of 0 stay 0, and equal classes stay equal.
@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-40, 1e-300, 1e38])
@pytest.mark.parametrize("classes", [3, 40, 9000])
def test_map_of_extreme_temperatures(library, classes, temperature):
    logits = torch.zeros(2, classes)
    logits[0] = torch.linspace(-3, 3, classes)
    grad = torch.linspace(-5, 5, 2 * classes).view(2, classes)
    flat = temperature > 1
    for log in (False, True):
        output, grad_logits, grad_gamma, grad_temperature = run_map(library, logits, 1.0, temperature, grad, log=log)
        chance = torch.full((classes,), 1 / classes).double()
        assert_near(output[1].exp() if log else output[1], chance, torch.float32, 4)
        if not log or flat:
            wanted = chance if flat else torch.eye(classes).double()[-1]
            assert_near(output[0].exp() if log else output[0], wanted, torch.float32, 4)
        if not log and not flat:
            assert grad_logits[0].tolist() == [0] * classes
        assert not (grad_logits.isnan().any() or grad_gamma.isnan().any() or grad_temperature.isnan().any())
        assert abs(grad_temperature[1]) <= (1e-5 / temperature**2 if flat else 0)


# dL/dT is finite in double even if 1/T^2 overflows in float32; log p_k = (x_k - x_t) / T. Classes whose difference,
# times T, exceeds float32 are possible.
@pytest.mark.parametrize("temperature", [1e-20, 1e-30, 1e25])
def test_map_slope_of_extreme_temperatures(library, temperature):
    logits, grad = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    _, grad_logits, _, slope = run_map(library, logits, 0.0, temperature, grad, log=True)
    share = 1.0 if temperature < 1 else 0.5  # of the other class
    torch.testing.assert_close(slope[0].item(), 2 * share / temperature**2, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad_logits[0, 1].item(), share / temperature, rtol=1e-6, atol=0)
    assert slope[1] == 0
    logits, grad = torch.tensor([[2.0, 2.0, 0.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    _, grad_logits, *_ = run_map(library, logits, 0.0, 1e-38, grad, log=True)
    torch.testing.assert_close(grad_logits, torch.tensor([[-0.5e38, -0.5e38, 1e38]]), rtol=1e-6, atol=0)


# The upstream gradient at an impossible class is not used, even if it is NaN.
@pytest.mark.parametrize("classes", [3, 40, 1000, 9000])
@pytest.mark.parametrize("log", [False, True])
def test_map_of_gradients_at_classes_that_cannot_occur(library, classes, log):
    logits = torch.randn(6, classes)
    logits[:, 1] = -torch.inf
    grad = torch.randn(6, classes)
    grad[:, 1] = 0
    expected = run_map(library, logits, 0.7, 1.2, grad, log=log)
    for value in (NAN, torch.inf):
        grad[:, 1] = value
        for result, wanted in zip(run_map(library, logits, 0.7, 1.2, grad, log=log), expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0)


# A larger input never gives a smaller result, and equal inputs give equal results, in every layout: one row per thread,
# warps, blocks, long rows. The chip's approximate functions are nearly monotone. With random errors as large as the ISA
# allows, no implementation would keep the order.
exact_enough = pytest.mark.skipif(
    "approx_error" in os.environ.get("FOCALKERN_PTX", ""), reason="approximate instructions err at random"
)


@exact_enough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [4, 31, 1000, 9000])
def test_map_keeps_the_order_of_classes(library, dtype, classes):
    from neighbours import broken_pairs, rows_of_neighbours  # part of the tests; instruction counts run without it

    logits = rows_of_neighbours(400 if classes < 1000 else 6, classes, dtype)
    probs = logits.double().softmax(1).to(dtype)
    for gamma in (-0.9, 0.3, 2.0, 30.0):
        for values, kind, log in ((logits, "logits", True), (logits, "logits", False), (probs, "probs", False)):
            output, *_ = run_map(library, values, gamma, 1.0, torch.zeros_like(values), kind=kind, log=log)
            assert broken_pairs(values, output) == 0


@exact_enough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [-0.99, 0.0, 2.0])
def test_binary_map_keeps_the_order(library, dtype, gamma):
    from neighbours import broken_pairs, consecutive

    start = 10 ** (8 * torch.rand(100, 1, dtype=torch.float64) - 6)
    values = consecutive(start.to(dtype).expand(100, 40).contiguous(), torch.arange(40))
    for log in (False, True):
        output, *_ = run_map(library, values.reshape(-1), gamma, 1.0, torch.zeros(4000), kind="binary", log=log)
        assert broken_pairs(values, output.reshape(100, 40)) == 0
