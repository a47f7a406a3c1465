"""Derivatives, transforms, compilation and errors of spline_calibration_map."""

import math

import pytest
import torch
import torch._dynamo.testing
from conftest import assert_close
from spline_map_cases import KNOTS, MAP, VALUES, leaf, parameters_of

import focalkern as fk
from focalkern import fallback
from focalkern.fallback.spline_map import spline_coefficients
from focalkern.ops._backend import backend_for

torch_jit_warns = pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script")


# ---- derivatives, transforms, compilation ---------------------------------------------------------------------------


@pytest.mark.parametrize("input_kind", ["logits", "probs"])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("kind", ["vector", "matrix"])
def test_first_and_second_derivatives(input_kind, log, kind):
    z = torch.randn(3, 4, dtype=torch.float64)
    numbers = [leaf(torch.tensor(v, dtype=torch.float64)) for v in (1.3, 1e-2, 0.1)]
    of_classes = [leaf(v) for v in parameters_of(4, kind).values()]
    inputs = [leaf(z.softmax(-1) if input_kind == "probs" else z), *numbers, leaf(KNOTS), leaf(VALUES), *of_classes]

    def function(*arguments):
        *first, weight, bias = arguments
        return fk.spline_calibration_map(*first, weight=weight, bias=bias, input_kind=input_kind, log=log)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_weight_or_bias_alone_has_a_derivative(name):
    z, of_class = torch.randn(3, 4, dtype=torch.float64), leaf(parameters_of(4, "vector")[name])

    def function(of_class):
        return fk.spline_calibration_map(z, 1.3, 1e-2, 0.1, KNOTS, VALUES, **{name: of_class})

    assert torch.autograd.gradcheck(function, of_class)


@torch_jit_warns
def test_torch_func_is_that_of_autograd():
    z, direction = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)

    def function(row):
        return fk.spline_calibration_map(row, *MAP, log=True)[..., 0].sum()

    expected = torch.autograd.functional.jacobian(function, z)
    assert_close(torch.func.grad(function)(z), expected)
    assert_close(torch.func.vmap(torch.func.grad(function))(z), expected)
    assert_close(torch.func.jvp(function, (z,), (direction,))[1], (expected * direction).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(z, direction)
        tangent = torch.autograd.forward_ad.unpack_dual(function(dual)).tangent
    assert_close(tangent, (expected * direction).sum())


@torch_jit_warns
def test_compiles_with_inductor_to_one_graph_for_every_number():
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, backend=counter)
    def function(z, temperature):
        return fk.spline_calibration_map(z, temperature, 1e-4, 0.1, KNOTS, VALUES, log=True)

    for temperature in (1.0, 1.5, 2.25, 3.0):
        z = leaf(torch.randn(5, 4))
        found, eager = (
            function(z, temperature),
            fk.spline_calibration_map(z, temperature, 1e-4, 0.1, KNOTS, VALUES, log=True),
        )
        assert_close(found, eager)
        upstream = torch.randn(5, 4)
        assert_close(torch.autograd.grad(found, z, upstream)[0], torch.autograd.grad(eager, z, upstream)[0])
    assert counter.frame_count <= 2


@pytest.mark.kernels("stable")
@pytest.mark.parametrize("with_classes", [False, True])
def test_opcheck(with_classes):
    z = leaf(torch.randn(5, 4))
    numbers = leaf(torch.tensor([1.1, 1.3, 1e-3], dtype=torch.float64))
    coefficients = leaf(spline_coefficients(KNOTS, VALUES))
    of_classes = [leaf(torch.randn(4, dtype=torch.float64)) if with_classes else None for _ in range(2)]
    arguments = (z, numbers, leaf(KNOTS), coefficients, *of_classes, False, False)
    torch.library.opcheck(torch.ops.focalkern.spline_map_forward, (*arguments, True, False, False, True))
    detached = [v.detach() if isinstance(v, torch.Tensor) else v for v in arguments]
    torch.library.opcheck(torch.ops.focalkern.spline_map_backward, (torch.randn(5, 4), *detached, True, [True] * 6))


@pytest.mark.kernels("stable")
def test_threads_do_not_change_a_bit():
    z = leaf(torch.randn(3000, 60))
    of_classes = {name: leaf(v) for name, v in parameters_of(60, "vector").items()}
    upstream, values, found = torch.randn(3000, 60), leaf(VALUES), []
    before = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            output = fk.spline_calibration_map(z, *MAP[:4], values, **of_classes)
            found.append((output, *torch.autograd.grad(output, [z, values, *of_classes.values()], upstream)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_autocast_gives_float32():
    z = torch.randn(5, 4).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fk.spline_calibration_map(z, *MAP, log=True)
    assert found.dtype == torch.float32
    assert_close(found, fk.spline_calibration_map(z.float(), *MAP, log=True))


# ---- errors ---------------------------------------------------------------------------------------------------------

Z = torch.zeros(3, 4)
WRONG = {
    "temperature must be finite and positive, got 0.0": {"temperature": 0.0},
    "temperature must be finite and positive, got nan": {"temperature": math.nan},
    "floor must be above 0 .*, got 0.0": {"floor": 0.0},
    "floor must be above 0 .*, got 1.0": {"floor": 1.0},
    "slope must be finite, got inf": {"slope": math.inf},
    "temperature must be a number or a tensor, got str": {"temperature": "1"},
    r"temperature must be a number or a 0-dim floating-point tensor, got .*\[3\]": {"temperature": torch.ones(3)},
    r"knots must be finite and ascending, got \[0.0, 0.0": {"knots": torch.zeros(7)},
    r"knots must be \[m\] with m from 2 to 255, got \[1\]": {"knots": torch.zeros(1), "values": torch.zeros(1)},
    r"values must be \[m\] = \[7\], got \[3\]": {"values": torch.zeros(3)},
    "values must be finite": {"values": torch.full((7,), math.nan)},
    "knots must be floating point": {"knots": torch.arange(7)},
    r"weight must be \[4\] or \[4, 4\] for 4 classes, got \[3\]": {"weight": torch.zeros(3)},
    r"bias must be \[4\] for 4 classes, got \[4, 4\]": {"bias": torch.zeros(4, 4)},
    "bias must be finite": {"bias": torch.full((4,), math.inf)},
    "input_kind must be 'logits' or 'probs', got 'odds'": {"input_kind": "odds"},
    "keep_order must be a bool, got int": {"keep_order": 1},
    r"input must be \[..., C\] with C >= 2, got shape \[3, 1\]": {"input": torch.zeros(3, 1)},
    "input must be float16, bfloat16, float32 or float64, got torch.int64": {"input": torch.zeros(3, 4).long()},
    "input must not be NaN, got NaN at row 1, class 2": {
        "input": Z.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(math.nan))
    },
    r"input must not be \+inf, got inf at row 1, class 2": {
        "input": Z.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(math.inf))
    },
    "input must have a logit above -inf in every row, got none at row 0": {"input": Z - math.inf},
    "input must be probabilities that sum to 1 within 0.001, got a sum of 0 at row 0": {"input_kind": "probs"},
    "input must be probabilities, got -1 at row 0, class 3": {
        "input": torch.tensor([[1.0, 1.0, 0.0, -1.0]]),
        "input_kind": "probs",
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_errors(message):
    arguments = {"input": Z, "temperature": 1.0, "floor": 1e-3, "slope": 0.0, "knots": KNOTS, "values": VALUES}
    with pytest.raises((TypeError, ValueError), match=f"^spline_calibration_map: {message}"):
        fk.spline_calibration_map(**{**arguments, **WRONG[message]})


@pytest.mark.kernels("stable")
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("keep_zeros", [False, True])
@pytest.mark.parametrize("is_probs", [False, True])
@pytest.mark.parametrize("kind", ["vector", "matrix"])
def test_fallback_is_that_of_the_kernels(log, keep_zeros, is_probs, kind):
    for n_classes in (2, 3, 33, 100):
        z = torch.randn(7, n_classes, dtype=torch.float64) * 3
        z[0], z[1] = torch.linspace(0, -900, n_classes), 0.0
        z[2, 1] = -math.inf
        z = z.softmax(-1) if is_probs else z
        arguments = [z, torch.tensor([1.1, 1.4, 1e-3], dtype=torch.float64), KNOTS, spline_coefficients(KNOTS, VALUES)]
        arguments += parameters_of(n_classes, kind).values()
        found = []
        for module in (backend_for(z), fallback):
            leaves = [leaf(v) for v in arguments]
            output = module.spline_map(*leaves, is_probs, keep_zeros, False, log)
            upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
            found.append((output, *torch.autograd.grad(output, leaves, upstream)))
        for ours, theirs in zip(*found, strict=True):
            # Derivatives in a probability of 1e-300 are as large as 1e300, and differences of such numbers.
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.kernels("stable")
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, torch.zeros(2, dtype=torch.float64), r"parameters must be \[3\] float64 on .*, got \[2\] torch.float64"),
        (2, torch.zeros(256, dtype=torch.float64), r"knots must be .*, .* 255, .*, got \[256\] torch.float64"),
        (3, torch.zeros(4, 4, dtype=torch.float64), r"coefficients must be .* float64 .*, got \[4, 4\] torch.float64"),
        (4, torch.zeros(3, dtype=torch.float64), r"weight must be \[C\] or \[C, C\] .*, got \[3\] torch.float64"),
        (5, torch.zeros(4), r"bias must be \[C\] float64 .*, got \[4\] torch.float32 on cpu"),
    ],
)
def test_modules_refuse_other_shapes(place, value, message):
    parameters = torch.tensor([1.1, 1.4, 1e-3], dtype=torch.float64)
    arguments = [Z, parameters, KNOTS, spline_coefficients(KNOTS, VALUES), None, None]
    arguments[place] = value
    for module in (backend_for(Z), fallback):
        with pytest.raises(ValueError, match=f"^spline_calibration_map: {message}"):
            module.spline_map(*arguments, False, False, False, False)
