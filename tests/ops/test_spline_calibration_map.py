"""fk.spline_calibration_map against the reference in float64 and the definition at 300 digits."""

import itertools
import math

import mpmath
import oracle
import pytest
import torch
import torch._dynamo.testing
from conftest import TOLERANCE, assert_close

import focalkern as fk
from focalkern import fallback, reference
from focalkern.fallback.spline_map import spline_coefficients
from focalkern.ops._backend import backend_for

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
torch_jit_warns = pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script")

KNOTS = torch.tensor([-6.0, -4.5, -3.0, -1.0, -0.5, 1.0, 3.0], dtype=torch.float64)
# Both fall slowly enough to keep the order of the classes.
VALUES = torch.tensor([0.3, 0.1, 0.0, 0.2, 0.4, 0.9, 3.0], dtype=torch.float64)
MAP = (1.3, 1e-4, 0.1, KNOTS, VALUES)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def parameters_of(n_classes: int, kind: str) -> dict[str, torch.Tensor]:
    if kind == "scalar":
        return {}
    shape = (n_classes,) if kind == "vector" else (n_classes, n_classes)
    return {
        "weight": torch.randn(shape, dtype=torch.float64) * 0.1,
        "bias": torch.randn(n_classes, dtype=torch.float64) * 0.3,
    }


def check(z: torch.Tensor, kind: str = "scalar", **options) -> None:
    """Value and every gradient, for a random upstream gradient, against the reference in float64.

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
    # Second derivatives at the knots: 0 at both ends, the rest from the continuity of the first.
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
# 0: a tie of all; 0.75 and 1.25 on both sides of the P above which 1 - P comes from the others; 18 and 40 where 1 - q
# leaves the digits of float32 and float64; 900 where exp underflows.
@pytest.mark.parametrize("gap", [0.0, 0.75, 1.25, 7.5, 18.0, 40.0, 900.0])
# 0.5: a floor beyond all else; 1e-200: u up to 460.
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
    # 15 knots are the most that fit the tables of the vector code; 2 make a straight line.
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


# ---- order ----------------------------------------------------------------------------------------------------------


def rows_with_neighbours(n_classes: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all scales, each with a tie and with neighbours one unit in the last place apart."""
    z = torch.randn(10_000, n_classes, dtype=torch.float64) * torch.logspace(-4, 2, 10_000).unsqueeze(1)
    z = z.to(dtype)
    first, tied, near = torch.rand(10_000, n_classes).argsort(1)[:, :3].unbind(1)
    rows = torch.arange(10_000)
    z[::2] = z[::2].scatter(1, first[::2, None], z[::2].amax(1, keepdim=True))
    z[rows, tied] = z[rows, first]
    z[rows, near] = (
        torch.nextafter(z[rows, first].float(), torch.tensor(9e9)).to(dtype)
        if dtype.itemsize < 4
        else (torch.nextafter(z[rows, first], torch.tensor(9e9, dtype=dtype)))
    )
    return z


def assert_in_order(z: torch.Tensor, p: torch.Tensor) -> None:
    """Larger inputs have no smaller results, and equal ones equal results to the bit."""
    order = z.argsort(1)
    sorted_z, sorted_p = z.gather(1, order), p.gather(1, order)
    assert (sorted_p[:, 1:] >= sorted_p[:, :-1]).all()
    assert (sorted_p[:, 1:] == sorted_p[:, :-1])[sorted_z[:, 1:] == sorted_z[:, :-1]].all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
# 40: a row is in vectors, whose small P have log(1 - P) by a polynomial; 120: off the vector width.
@pytest.mark.parametrize("n_classes", [3, 10, 40, 120])
@pytest.mark.parametrize("log", [False, True])
def test_keep_order_keeps_it_to_the_bit(dtype, n_classes, log):
    z = rows_with_neighbours(n_classes, dtype)
    # Scores of 0.1 and 0.001 log q; 0.001 is the least slope that a fit leaves an ordered curve.
    few, many = torch.linspace(-8, 4, 15, dtype=torch.float64), torch.linspace(-20, 20, 161, dtype=torch.float64)
    softplus = torch.nn.functional.softplus
    for knots, values in ((KNOTS, VALUES), (few, 0.9 * softplus(-few)), (many, 0.999 * softplus(-many))):
        for temperature in (0.3, 1.0, 7.0):
            p = fk.spline_calibration_map(z, temperature, 1e-4, 0.0, knots, values, keep_order=True, log=log)
            assert_in_order(z, p)
            free = fk.spline_calibration_map(z, temperature, 1e-4, 0.0, knots, values, log=log)
            rtol = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
            torch.testing.assert_close(p, free, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("n_classes", [3, 40])
@pytest.mark.parametrize("case", ["large scores", "a small floor"])
def test_keep_order_where_rounding_is_large(n_classes, case):
    """If rounding of the scores exceeds the steps between them, the kernel restores the order of each row
    afterwards."""
    z = rows_with_neighbours(n_classes, torch.float64)[::10]
    floor, values = (1e-4, VALUES + 1e6) if case == "large scores" else (1e-280, VALUES)
    p = fk.spline_calibration_map(z, 1.0, floor, 0.0, KNOTS, values, keep_order=True, log=True)
    assert_in_order(z, p)
    torch.testing.assert_close(
        p, fk.spline_calibration_map(z, 1.0, floor, 0.0, KNOTS, VALUES, log=True), rtol=1e-8, atol=1e-8
    )


def rows_of_many_classes(case: str) -> torch.Tensor:
    """Rows whose inputs an even division of their range puts in order, or all into one bucket."""
    z = torch.randn(6, 450, dtype=torch.float64).mul_(3)
    z[:, 100:200] = z[:, :100]  # ties
    z[:, 200:300] = torch.nextafter(z[:, :100], torch.full((6, 100), math.inf, dtype=torch.float64))
    z[:, 300:310] = -math.inf
    if case == "an outlier":
        z[:, 7] = 1e9
    if case == "the whole range":
        z[:, 7], z[:, 8] = 1.7e308, -1.7e308
    if case == "denormal differences":
        z = torch.where(z > 0, 5e-324, 0.0)
    if case == "all equal":
        z = torch.full_like(z, -3.5)
    return z


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("case", ["even", "an outlier", "the whole range", "denormal differences", "all equal"])
# 15 fill the tables of the vector code, which needs no sort; with 40 so many classes are sorted.
@pytest.mark.parametrize("n_knots", [15, 40])
def test_keep_order_of_many_double_classes(case, kind, n_knots):
    """Scores of 0.1 log q: neighbours round anyhow."""
    z = rows_of_many_classes(case)
    if kind == "probs":
        z = z.softmax(-1)
    knots = torch.linspace(-8, 4, n_knots, dtype=torch.float64)
    curve = (knots, 0.9 * torch.nn.functional.softplus(-knots))
    options = {"input_kind": kind, "log": True}
    p = fk.spline_calibration_map(z, 1.0, 1e-4, 0.0, *curve, keep_order=True, **options)
    assert_in_order(z, p)
    free = fk.spline_calibration_map(z, 1.0, 1e-4, 0.0, *curve, **options)
    torch.testing.assert_close(p, free, rtol=1e-12, atol=1e-12)
    if case == "even":  # without the sort neighbours do change places
        assert not (free.gather(1, z.argsort(1)).diff(dim=1) >= 0).all()


# ---- every option, shape, layout and dtype --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
# 2: the smallest; 3, 10: under one vector; 32, 33: the layouts of a tile; 100; 300: off the vector width; 2100: one row
# is a tile.
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
    # Without the option they count as e / C.
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


def test_arrays():
    z = torch.randn(4, 3)
    found = fk.spline_calibration_map(z.numpy(), 1.0, 1e-3, 0.0, KNOTS.numpy(), VALUES.numpy(), bias=[0.0, 0.5, 1.0])
    bias = torch.tensor([0.0, 0.5, 1.0])
    assert_close(torch.from_numpy(found), fk.spline_calibration_map(z, 1.0, 1e-3, 0.0, KNOTS, VALUES, bias=bias))


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
def test_compiles_to_one_graph_for_every_number():
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


@pytest.mark.kernels
@pytest.mark.parametrize("with_classes", [False, True])
def test_opcheck(with_classes):
    z = leaf(torch.randn(5, 4))
    numbers = leaf(torch.tensor([1.1, 1.3, 1e-3], dtype=torch.float64))
    coefficients = leaf(spline_coefficients(KNOTS, VALUES))
    of_classes = [leaf(torch.randn(4, dtype=torch.float64)) if with_classes else None for _ in range(2)]
    arguments = (z, numbers, leaf(KNOTS), coefficients, *of_classes, False, False)
    torch.library.opcheck(torch.ops.focalkern.spline_map_forward, (*arguments, False, True, False, True))
    detached = [v.detach() if isinstance(v, torch.Tensor) else v for v in arguments]
    torch.library.opcheck(torch.ops.focalkern.spline_map_backward, (torch.randn(5, 4), *detached, True, True))


@pytest.mark.kernels
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
    "input must be float16, bfloat16, float32 or float64, got (Long|torch.int64)": {"input": torch.zeros(3, 4).long()},
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


@pytest.mark.kernels
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
            # Slopes in a probability of 1e-300 are as large as 1e300, and a difference.
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
