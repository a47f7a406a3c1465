"""fk.spline_calibration_map compared with the float64 reference and the definition at 300 digits."""

import itertools
import math

import mpmath
import oracle
import pytest
import torch
from conftest import TOLERANCE, assert_close
from spline_map_cases import KNOTS, MAP, VALUES, leaf, parameters_of

import focalkern as fk
from focalkern import reference
from focalkern.fallback.spline_map import spline_coefficients

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def check(z: torch.Tensor, kind: str = "scalar", **options) -> None:
    """Compares value and every gradient, for a random upstream gradient, with the float64 reference.

    The reference computes on the CPU.
    """
    numbers = [torch.tensor(v, dtype=torch.float64) for v in MAP[:3]] + [KNOTS, VALUES]
    of_classes = parameters_of(z.shape[-1], kind)
    found = []
    upstream = torch.randn(z.shape, dtype=torch.float64).to(z.dtype)
    for function, source in ((fk.spline_calibration_map, z), (reference.spline_calibration_map, z.double().cpu())):
        leaves = [leaf(v.to(source.device)) for v in (source, *numbers)]
        extra = {name: leaf(v.to(source.device)) for name, v in of_classes.items()}
        output = function(*leaves, **extra, **options)
        inputs = [*leaves, *extra.values()]
        grads = torch.autograd.grad(output, inputs, upstream.to(output), allow_unused=True)
        found.append((output.cpu(), [grad.cpu() for grad in grads]))
    (ours, grads), (theirs, exact) = found
    assert ours.dtype == z.dtype
    assert_close(ours, theirs, z.dtype)
    for a, e in zip(grads, exact, strict=True):
        scale = max(1.0, e.abs().max().item() if e.numel() else 0.0, upstream.double().norm().item())
        assert_close(a.double() / scale, e / scale, z.dtype)


# ---- the definition at 300 digits -----------------------------------------------------------------------------------


def exact_log_map(z, temperature, floor, slope, knots, values, weight, bias):
    n = len(z)
    q = oracle.softmax([mpmath.mpf(v) / temperature for v in z])
    p = [(1 - floor) * v + floor / n for v in q]
    x = [mpmath.log(v) for v in p]
    u = [mpmath.log(v / (1 - v)) for v in p]
    h = [b - a for a, b in itertools.pairwise(knots)]
    m = len(knots)
    # Second derivatives at the knots: 0 at both ends; the rest follow from the continuity of the first derivative.
    system, right = mpmath.zeros(m, m), mpmath.zeros(m, 1)
    system[0, 0] = system[m - 1, m - 1] = 1
    for i in range(1, m - 1):
        system[i, i - 1], system[i, i], system[i, i + 1] = h[i - 1] / 6, (h[i - 1] + h[i]) / 3, h[i] / 6
        right[i] = (values[i + 1] - values[i]) / h[i] - (values[i] - values[i - 1]) / h[i - 1]
    second = mpmath.lu_solve(system, right)

    def curve(at):
        i = min(max(sum(at > knot for knot in knots) - 1, 0), m - 2)
        inside = min(max(at, knots[0]), knots[-1])
        far = (inside - knots[i]) / h[i]
        near = 1 - far
        value = near * values[i] + far * values[i + 1]
        value += ((near**3 - near) * second[i] + (far**3 - far) * second[i + 1]) * h[i] ** 2 / 6
        rise = (values[i + 1] - values[i]) / h[i]
        rise += ((1 - 3 * near**2) * second[i] + (3 * far**2 - 1) * second[i + 1]) * h[i] / 6
        return value + rise * (at - inside)

    scores = [(1 + slope) * a + curve(b) + w * a + c for a, b, w, c in zip(x, u, weight, bias, strict=True)]
    top = max(scores)
    norm = top + mpmath.log(mpmath.fsum(mpmath.exp(s - top) for s in scores))
    return [s - norm for s in scores]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
# 0: all classes tie; 0.75 and 1.25: both sides of the P above which 1 - P comes from the other classes; 18 and 40: 1 -
# q falls below the digits of float32 and float64; 900: exp underflows.
@pytest.mark.parametrize("gap", [0.0, 0.75, 1.25, 7.5, 18.0, 40.0, 900.0])
# 0.5: a floor above all else; 1e-200: u up to 460.
@pytest.mark.parametrize("floor", [0.5, 1e-5, 1e-200])
def test_value_and_gradients_at_300_digits(dtype, gap, floor):
    rtol, atol = TOLERANCE[dtype]
    row = [0.25, 0.25 - gap, -0.75 - gap]
    weight, bias, upstream = [0.125, -0.25, 0.0], [0.5, 0.0, -0.25], [0.5, -1.25, 2.0]
    z = leaf(torch.tensor([row], dtype=dtype))
    numbers = [leaf(torch.tensor(v, dtype=torch.float64)) for v in (1.5, floor, 0.25)]
    of_classes = [leaf(torch.tensor(v, dtype=torch.float64)) for v in (weight, bias)]
    values = leaf(VALUES)
    log_p = fk.spline_calibration_map(z, *numbers, KNOTS, values, weight=of_classes[0], bias=of_classes[1], log=True)
    inputs = [z, numbers[0], numbers[2], values, *of_classes]
    grads = torch.autograd.grad(log_p, inputs, torch.tensor([upstream], dtype=dtype))
    with oracle.precision():
        knots = [mpmath.mpf(v) for v in KNOTS.tolist()]
        point = [*row, 1.5, 0.25, *VALUES.tolist(), *weight, *bias]

        def at(x):
            x = [mpmath.mpf(v) for v in x]
            m = len(knots)
            curve, v, b = x[5 : 5 + m], x[5 + m : 8 + m], x[8 + m :]
            return exact_log_map(x[:3], x[3], mpmath.mpf(floor), x[4], knots, curve, v, b)

        expected = [float(v) for v in at(point)]
        exact = [float(v) for v in oracle.gradient(lambda x: mpmath.fdot(at(x), upstream), point)]
    for a, e in zip(log_p.flatten().tolist(), expected, strict=True):
        assert abs(a - e) <= rtol * abs(e) + atol
    scale = max(abs(v) for v in exact)
    for a, e in zip(torch.cat([v.flatten().double() for v in grads]).tolist(), exact, strict=True):
        assert abs(a - e) <= rtol * scale + atol


# ---- identities -----------------------------------------------------------------------------------------------------


def test_nothing_but_the_floor_is_the_softmax_with_a_floor():
    z = torch.randn(50, 7, dtype=torch.float64) * 5
    found = fk.spline_calibration_map(z, 1.5, 1e-3, 0.0, KNOTS, torch.zeros(7), log=True)
    assert_close(found, ((1 - 1e-3) * (z / 1.5).softmax(-1) + 1e-3 / 7).log())


@pytest.mark.parametrize("gamma", [-0.5, 1.0, 3.0])
def test_focal_map_is_a_member(gamma):
    z = torch.randn(500, 10, dtype=torch.float64) * 4
    u = torch.linspace(-20, 20, 161, dtype=torch.float64)
    phi = u.exp() * torch.nn.functional.softplus(-u)
    values = gamma * torch.nn.functional.softplus(u) - (1 + gamma * phi).log()
    found = fk.spline_calibration_map(z, 1.5, 1e-12, 0.0, u, values, log=True)
    expected = fk.focal_calibration_map(z, gamma, 1.5, log=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_classes_permuted_and_logits_shifted():
    z = torch.randn(20, 12, dtype=torch.float64) * 3
    order = torch.randperm(12)
    found = fk.spline_calibration_map(z, *MAP, log=True)
    torch.testing.assert_close(fk.spline_calibration_map(z[:, order] + 3.75, *MAP, log=True), found[:, order])


@pytest.mark.parametrize("knots", [2, 3, 15, 16, 255])
def test_spline_is_natural(knots):
    # 15 knots are the most that the tables of the vector code hold; 2 make a straight line.
    t = torch.linspace(-5, 4, knots, dtype=torch.float64)
    f = torch.randn(knots, dtype=torch.float64)
    c, origin = spline_coefficients(t, f), torch.cat([t[:1], t])
    s = torch.cat([t, t[-1:] + 1]) - origin  # from the origin of every piece to its right end
    powers = s[:, None] ** torch.arange(4)
    value = (c * powers).sum(1)[:-1]
    slope = c[:, 1] + 2 * c[:, 2] * s + 3 * c[:, 3] * s * s
    second = 2 * c[:, 2] + 6 * c[:, 3] * s
    for left, right in ((value, c[1:, 0]), (slope[:-1], c[1:, 1]), (second[:-1], 2 * c[1:, 2])):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(c[1:, 0], f)
    assert (c[[0, -1], 2:] == 0).all()
    z = torch.randn(9, 40, dtype=torch.float64) * 3
    assert_close(
        fk.spline_calibration_map(z, 1.0, 1e-3, 0.0, t, f), reference.spline_calibration_map(z, 1.0, 1e-3, 0.0, t, f)
    )


# ---- every option, shape, layout and dtype --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
# 2: the smallest; 3, 10: less than one vector; 32, 33: the layouts of a tile; 100; 300: off the vector width; 2100: one
# row is a tile.
@pytest.mark.parametrize("n_classes", [2, 3, 10, 32, 33, 100, 300, 2100])
def test_class_counts_and_dtypes(device, dtype, n_classes):
    z = (torch.randn(5, n_classes) * 3).to(device, dtype)
    for kind in ("scalar", "vector", *(("matrix",) if n_classes < 300 else ())):
        for log in (False, True):
            check(z, kind, log=log)
    # 70 rows are more than a tile.
    p = (torch.randn(70, min(n_classes, 100)) * 3).softmax(-1).clamp(min=1e-4)  # above the denormal numbers of float16
    check((p / p.sum(-1, keepdim=True)).to(device, dtype), "vector", input_kind="probs")


# One row, a batch, an empty batch, three and four dimensions.
@pytest.mark.parametrize("shape", [(3,), (5, 4), (0, 4), (2, 3, 4), (2, 1, 3, 5)])
def test_shapes(device, shape):
    z = torch.randn(shape, dtype=torch.float64).to(device)
    for kind in ("scalar", "vector", "matrix"):
        check(z, kind, log=True)
    check(z.transpose(0, -1).contiguous().transpose(0, -1) if len(shape) > 1 and z.numel() else z)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["scalar", "vector", "matrix"])
def test_classes_that_cannot_occur(dtype, kind):
    z = (torch.randn(6, 5) * 3).to(dtype)
    z[1, 2] = z[2, 0] = -math.inf
    z[3, 1:] = -math.inf
    check(torch.nan_to_num(z, neginf=-math.inf)[:1], kind)
    of_classes = parameters_of(5, kind)
    kept = leaf(z)
    p = fk.spline_calibration_map(kept, *MAP, **of_classes, keep_zeros=True)
    assert (p[z == -math.inf] == 0).all()
    assert_close(p.sum(-1), torch.ones(6, dtype=dtype))
    (grad,) = torch.autograd.grad(p[:, 0].sum(), kept)
    assert (grad[z == -math.inf] == 0).all()
    assert grad.isfinite().all()
    log_p = fk.spline_calibration_map(z, *MAP, **of_classes, keep_zeros=True, log=True)
    assert torch.equal(log_p == -math.inf, z == -math.inf)
    # Without keep_zeros they have the probability e / C.
    counted = fk.spline_calibration_map(z, *MAP, **of_classes, log=True)
    assert counted.isfinite().all()
    low = fk.spline_calibration_map(z.double().clamp(min=-1e4), *MAP, **of_classes, log=True)
    assert_close(counted, low, dtype)


def test_zeros_of_probabilities():
    p = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    mapped = fk.spline_calibration_map(p, *MAP, input_kind="probs")
    assert_close(mapped, fk.spline_calibration_map(p.detach().log(), *MAP))
    (grad,) = torch.autograd.grad(mapped[:, 1].sum(), p)
    assert (grad[p == 0] == 0).all()
    kept = fk.spline_calibration_map(p, *MAP, input_kind="probs", keep_zeros=True)
    assert torch.equal(kept == 0, p == 0)


def test_no_rows_change_the_numbers_of_a_row():
    z = torch.randn(200, 12) * 3
    together = fk.spline_calibration_map(z, *MAP)
    alone = torch.cat([fk.spline_calibration_map(row, *MAP) for row in z.split(1)])
    assert torch.equal(together, alone)


# 2, 3: too few to be transposed; 10: columns; 40, 1003: rows in vectors, with and without a rest.
@pytest.mark.parametrize("n_classes", [2, 3, 10, 40, 1003])
@pytest.mark.parametrize("keep_order", [False, True])
def test_float32_results_are_within_a_unit_of_those_of_float64(n_classes, keep_order):
    """The kernels' functions for float32 have errors of 3e-9."""
    unit = torch.finfo(torch.float32).eps
    for scale in (0.1, 4.0, 30.0):
        z = torch.randn(67, n_classes) * scale
        z[0, 1] = -math.inf
        for floor in (1e-7, 1e-3):
            arguments = (1.3, floor, 0.1, KNOTS, VALUES)
            options = {"keep_order": keep_order, "keep_zeros": scale < 1}
            exact = fk.spline_calibration_map(z.double(), *arguments, **options)
            p = fk.spline_calibration_map(z, *arguments, **options)
            assert ((p - exact).abs() <= unit * exact).all()
            log_p = fk.spline_calibration_map(z, *arguments, log=True, **options)
            assert log_p.max() <= 0
            torch.testing.assert_close(log_p.double(), exact.log(), rtol=unit, atol=1e-8)
            # 1 - p of the largest class, which the logarithm keeps.
            exact = fk.spline_calibration_map(z.double(), *arguments, log=True, **options).amax(1)
            torch.testing.assert_close(log_p.amax(1).double(), exact, rtol=unit, atol=1e-14)


def test_arrays():
    z = torch.randn(4, 3)
    found = fk.spline_calibration_map(z.numpy(), 1.0, 1e-3, 0.0, KNOTS.numpy(), VALUES.numpy(), bias=[0.0, 0.5, 1.0])
    bias = torch.tensor([0.0, 0.5, 1.0])
    assert_close(torch.from_numpy(found), fk.spline_calibration_map(z, 1.0, 1e-3, 0.0, KNOTS, VALUES, bias=bias))
