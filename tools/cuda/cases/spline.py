"""The map of spline scaling, forward and backward, and the sums for its fit, compared with plain torch."""

import ctypes
import math
from ctypes import c_bool, c_double, c_int32, c_int64, c_void_p

import pytest
import torch

from focalkern import fallback
from focalkern.fallback.spline_map import spline_coefficients, spline_map_composite
from tools.cuda.cases.common import DTYPES, NAN, Memory, assert_near, nan_like, structure

STORAGE = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
INPUT = [
    ("input", c_void_p), ("storage", c_int32), ("is_probs", c_bool), ("rows", c_int64), ("classes", c_int64),
    ("temperature", c_double), ("floor", c_double), ("in_steps", c_bool),
]  # fmt: skip
CURVE = [("knots", c_int64), ("positions", c_void_p), ("coefficients", c_void_p)]
SCORES = [
    ("factor", c_double), ("weight", c_void_p), ("bias", c_void_p), ("extra", c_void_p), ("keep_zeros", c_bool),
    ("first_row", c_int64),
]  # fmt: skip
FORWARD = [
    *INPUT, *CURVE, *SCORES, ("log_output", c_bool), ("keep_order", c_bool), ("output", c_void_p), ("to", c_int32),
    ("tolerance", c_double),
]  # fmt: skip
BACKWARD = [
    *INPUT, *CURVE, *SCORES, ("log_output", c_bool), ("grad_output", c_void_p), ("of_grad", c_int32),
    ("of_x", c_void_p), ("grad_scores", c_void_p), ("grad_input", c_void_p),
]  # fmt: skip
FIT = [*INPUT, *CURVE, *SCORES, ("target", c_void_p), ("row_weight", c_void_p)]
TEMPERATURE, FLOOR, FACTOR = 1.3, 1e-4, 1.2
OF_ROWS, OF_PIECE = 3, 16  # numbers of csrc/kernels/spline.h

# Classes for one thread, some lanes, a warp, the block, a block whose classes do not fit shared memory; one class fewer
# or more than each. With the last two, a block takes several rows.
SHAPES = [(1, 2), (300, 3), (700, 8), (65, 10), (33, 33), (17, 256), (30, 257), (30, 2049)]


def rows_of(n_rows, n_classes, dtype=torch.float64, kind="logits"):
    """Rows of all scales with ties, a saturated row and impossible classes."""
    z = torch.randn(n_rows, n_classes) * torch.linspace(0.1, 8, n_rows).unsqueeze(1)
    z[0] = 0.25
    if n_rows > 2:
        # From probabilities of 1e-17 and 1 plain torch computes a gradient with an error of 1e-7, the kernel of 3e-8.
        z[1, 0] = 40.0 if kind == "logits" else 20.0
        z[2:, -1] = -math.inf
    return (z.softmax(-1) if kind == "probs" else z).to(dtype)


def curve_of(m=10):
    knots = torch.linspace(-7, 3, m).double() + 0.2 * torch.rand(m).double()
    return knots, torch.randn(m).double()


class Call:
    """The memory of one launch, with the arguments that all launches share."""

    def __init__(self, library, memory, z):
        self.library, self.memory, self.z = library, memory, z

    def fill(self, args, kind="logits", in_steps=False):
        args.input, args.storage = self.memory.put(self.z), STORAGE[self.z.dtype]
        args.rows, args.classes = self.z.shape
        args.is_probs, args.in_steps, args.temperature, args.floor = kind == "probs", in_steps, TEMPERATURE, FLOOR
        return args

    def fill_scores(self, args, knots, coefficients, weight, bias, extra=None, keep_zeros=False):
        args.knots, args.factor, args.keep_zeros = len(knots), FACTOR, keep_zeros
        args.positions, args.coefficients = self.memory.put(knots), self.memory.put(coefficients)
        args.weight, args.bias, args.extra = (self.memory.put(one) for one in (weight, bias, extra))

    def sums(self, numbers=0, by_class=False):
        """Memory for the sums of threads and of classes, scratch memory, and a function that reads the sums."""
        sizes = (c_int64 * 3)()
        self.library.spline_sizes(*map(c_int64, (*self.z.shape, numbers)), int(by_class), sizes)
        threads, groups, scratch = sizes
        of_threads = torch.zeros(numbers, threads, dtype=torch.float64)
        of_classes = torch.zeros(groups, 2, self.z.shape[1], dtype=torch.float64)
        places = [self.memory.put(of_threads), self.memory.put(of_classes) if by_class else None]

        def read():
            return [
                self.memory.get(place, like).sum(dim) if place is not None else None
                for place, like, dim in zip(places, (of_threads, of_classes), (1, 0), strict=True)
            ]

        return *map(c_void_p, places), c_void_p(self.memory.scratch(8 * scratch)), read


def run_map(library, z, knots, coefficients, weight, bias, grad, *, kind="logits", log=False, keep_zeros=False,
            in_steps=False, extra=None, of_x=None, want_sums=True):  # fmt: skip
    """The result, its gradients in the input and the scores, the sums of threads and the sums of classes."""
    with Memory(library) as memory:
        call = Call(library, memory, z)
        forward = call.fill(structure(library, "SplineMapForward", torch.float32, FORWARD), kind, in_steps)
        backward = call.fill(structure(library, "SplineMapBackward", torch.float32, BACKWARD), kind)
        for args in (forward, backward):
            call.fill_scores(args, knots, coefficients, weight, bias, extra, keep_zeros)
            args.log_output = log
        forward.output, forward.to, forward.tolerance = memory.out(nan_like(z, grad.dtype)), STORAGE[grad.dtype], 1e-2
        *_, scratch, _ = call.sums()
        assert library.spline_map_forward(ctypes.byref(forward), scratch) == 0
        output = memory.get(forward.output, grad)
        scores = torch.full(z.shape, NAN, dtype=torch.float64)
        backward.grad_output, backward.of_grad = memory.put(grad), STORAGE[grad.dtype]
        backward.grad_scores, backward.grad_input = memory.out(scores), memory.out(nan_like(z))
        backward.of_x = memory.put(of_x)
        numbers = OF_ROWS + 4 * (len(knots) + 1)
        of_threads, of_classes, scratch, read = call.sums(numbers, weight is not None)
        if not want_sums:
            of_threads = None
        done = library.spline_map_backward(
            ctypes.byref(backward), of_threads, of_classes, c_int64(numbers if want_sums else 0), scratch
        )
        assert done == 0
        return output, memory.get(backward.grad_input, z), memory.get(backward.grad_scores, scores), *read()


def check_map(library, z, m=10, *, vector=False, kind="logits", log=False, keep_zeros=False, wide=False):
    dtype, n_classes = torch.float32 if wide else z.dtype, z.shape[1]
    knots, values = curve_of(m)
    weight, bias = (0.1 * torch.randn(2, n_classes)).double() if vector else (None, None)
    grad = torch.randn(z.shape).to(dtype)
    coefficients = spline_coefficients(knots, values)
    options = {"kind": kind, "log": log, "keep_zeros": keep_zeros}
    output, of_input, _, sums, of_classes = run_map(library, z, knots, coefficients, weight, bias, grad, **options)
    parameters = torch.tensor([FACTOR, TEMPERATURE, FLOOR], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (z.double(), parameters, coefficients, weight, bias) if t is not None]
    more = leaves[3:] if vector else (None, None)
    expected = spline_map_composite(*leaves[:2], knots, leaves[2], *more, kind == "probs", keep_zeros, log, False)
    exact = torch.autograd.grad(expected, leaves, torch.where(expected.isfinite(), grad.double(), 0.0))
    assert_near(output, expected.detach(), dtype)
    found = [of_input, sums[:OF_ROWS], sums[OF_ROWS:].reshape(m + 1, 4), *(of_classes if vector else ())]
    for i, (actual, wanted) in enumerate(zip(found, exact, strict=True)):
        scale = max(1.0, float(wanted.abs().max()))
        assert_near(actual.double() / scale, wanted / scale, z.dtype if i == 0 else torch.float64, 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes"), SHAPES)
def test_spline_map_rows(library, dtype, rows, classes):
    z = rows_of(rows, classes, dtype)
    check_map(library, z, vector=True, log=True)
    check_map(library, z, m=2, wide=dtype != torch.float64)


# Numbers of knots: the smallest, one more than a power of two, the largest.
@pytest.mark.parametrize("m", [2, 9, 255])
def test_spline_map_knots(library, m):
    check_map(library, rows_of(40, 10), m)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize(("rows", "classes"), [(40, 5), (9, 300), (3, 2100)])
def test_spline_map_kinds(library, kind, log, rows, classes):
    z = rows_of(rows, classes, torch.float64, kind)
    check_map(library, z, kind=kind, log=log, keep_zeros=True, vector=log)


def test_spline_map_rows_without_an_answer(library):
    z = rows_of(40, 10, torch.float32)
    z[3, 4], z[5, 6], z[7] = NAN, math.inf, -math.inf
    knots, values = curve_of()
    bad = torch.zeros(40, dtype=torch.bool)
    bad[[3, 5, 7]] = True
    arguments = (knots, spline_coefficients(knots, values), None, None, torch.ones(40, 10))
    assert torch.equal(run_map(library, z, *arguments)[0].isnan().all(1), bad)
    assert torch.equal(run_map(library, z, *arguments)[0].isnan().any(1), bad)
    probs = rows_of(40, 10, torch.float32, "probs")
    probs[3] *= 1.02
    probs[5, :2] = torch.tensor([probs[5, :2].sum() + 0.1, -0.1])
    probs[7] *= 0.98
    assert torch.equal(run_map(library, probs, *arguments, kind="probs")[0].isnan().any(1), bad)


def test_spline_map_keeps_the_order_in_steps(library):
    """Equal inputs have equal results, larger ones never smaller, where rounding alone could exchange them."""
    z = torch.randn(300, 9, dtype=torch.float32)
    z[:, 1], z[:, 2] = z[:, 0], torch.nextafter(z[:, 0], torch.tensor(math.inf))
    knots = torch.linspace(-7, 3, 10).double()
    coefficients = spline_coefficients(knots, 0.0 * knots)
    output = run_map(library, z, knots, coefficients, None, None, torch.ones(z.shape), in_steps=True)[0]
    assert torch.equal(output[:, 0], output[:, 1])
    assert (output[:, 2] >= output[:, 1]).all()


def test_spline_map_of_a_matrix(library):
    """Scores and slopes that the caller passes, and no sums."""
    z = rows_of(37, 12)
    knots, values = curve_of()
    matrix, grad = 0.1 * torch.randn(12, 12).double(), torch.randn(37, 12).double()
    leaf, coefficients = z.clone().requires_grad_(), spline_coefficients(knots, values)
    with Memory(library) as memory:
        call = Call(library, memory, z)
        rows = call.fill(structure(library, "SplineInput", torch.float32, INPUT))
        address = memory.out(nan_like(z))
        *_, scratch, _ = call.sums()
        assert library.spline_log_probs(ctypes.byref(rows), c_void_p(address), scratch) == 0
        x = memory.get(address, z)
    assert_near(x, fallback.spline_log_probs(z, TEMPERATURE, FLOOR, False), z.dtype)
    arguments = (library, z, knots, coefficients, None, None, grad)
    scores = run_map(*arguments, extra=x @ matrix.T, want_sums=False)[2]
    output, of_input, *_ = run_map(*arguments, extra=x @ matrix.T, of_x=scores @ matrix)
    parameters = torch.tensor([FACTOR, TEMPERATURE, FLOOR], dtype=torch.float64)
    expected = spline_map_composite(leaf, parameters, knots, coefficients, matrix, None, False, False, False, False)
    assert_near(output, expected.detach(), z.dtype)
    assert_near(of_input, torch.autograd.grad(expected, leaf, grad)[0], z.dtype, 20)


def run_sums(library, z, target, weight, knots, values, of_x=None, bias=None, extra=None, *, kind="logits",
             keep_zeros=False, want_slopes=False):  # fmt: skip
    """Loss, gradient and Hessian by the curve sums; loss, gradients and slopes by the linear ones."""
    m = len(knots)
    basis = spline_coefficients(knots, torch.eye(m, dtype=torch.float64))
    with Memory(library) as memory:
        call = Call(library, memory, z)
        args = call.fill(structure(library, "SplineFit", torch.float32, FIT), kind)
        call.fill_scores(args, knots, basis @ values, of_x, bias, extra, keep_zeros)
        args.target, args.row_weight = memory.put(target), memory.put(weight)
        numbers = OF_ROWS + OF_PIECE * (m + 1)
        means = torch.full((len(z), m + 1), NAN, dtype=torch.float64)
        of_means = memory.out(means)
        of_threads, _, scratch, read = call.sums(numbers)
        done = library.spline_curve_sums(
            ctypes.byref(args), c_void_p(memory.put(basis)), c_void_p(of_means), of_threads, c_int64(numbers), scratch
        )
        assert done == 0
        curve, means = read()[0], memory.get(of_means, means)
        numbers = OF_ROWS + 4 * (m + 1)
        slopes = torch.full(z.shape, NAN, dtype=torch.float64)
        of_slopes = memory.out(slopes) if want_slopes else None
        of_threads, of_classes, scratch, read = call.sums(numbers, by_class=True)
        done = library.spline_linear_sums(
            ctypes.byref(args), c_void_p(of_slopes), of_threads, of_classes, c_int64(numbers), scratch
        )
        assert done == 0
        linear, by_class = read()
        slopes = memory.get(of_slopes, slopes) if want_slopes else None
    pieces = curve[OF_ROWS:].reshape(m + 1, OF_PIECE)
    moments, with_x, of_target = pieces[:, :7], pieces[:, 8:12], pieces[:, 12:]
    gradient = torch.cat([(with_x[:, :1].sum() - curve[2]).reshape(1), _of(moments[:, :4] - of_target, basis)])
    hessian = torch.zeros(m + 1, m + 1, dtype=torch.float64)
    hessian[0, 0], hessian[0, 1:] = curve[1], _of(with_x, basis)
    hessian[1:, 0] = hessian[0, 1:]
    hessian[1:, 1:] = torch.einsum("ikm,ikl,iln->mn", basis, moments.unfold(1, 4, 1), basis)
    hessian -= (means * weight.unsqueeze(1)).T @ means
    of_curve = torch.cat([linear[1:2], _of(linear[OF_ROWS:].reshape(m + 1, 4), basis)])
    return [curve[0], gradient, hessian, linear[0], of_curve, *by_class, slopes]


def _of(sums, basis):
    return torch.einsum("ik,ikm->m", sums, basis)


def check_sums(library, z, m=10, *, more=(None, None, None), kind="logits", keep_zeros=False):
    n_rows, n_classes = z.shape
    target = torch.randint(max(1, n_classes - 1), (n_rows,))  # the last class may be impossible
    weight = torch.rand(n_rows).double()
    weight[n_rows // 2] = 0 if n_rows > 1 else 1
    knots, values = curve_of(m)
    found = run_sums(library, z, target, weight, knots, values, *more, kind=kind, keep_zeros=keep_zeros,
                     want_slopes=more[2] is not None)  # fmt: skip
    basis = spline_coefficients(knots, torch.eye(m, dtype=torch.float64))
    arguments = (z, target, weight, TEMPERATURE, FLOOR, knots, basis, FACTOR - 1, values, *more)
    arguments += (kind == "probs", keep_zeros)
    expected = [*fallback.spline_curve_sums(*arguments)]
    expected += fallback.spline_linear_sums(*arguments, more[2] is not None)
    for actual, wanted in zip(found, expected, strict=True):
        if wanted is None:
            assert actual is None
            continue
        wanted = torch.as_tensor(wanted, dtype=torch.float64)
        scale = max(1e-3, float(wanted.abs().max()))
        assert_near(actual / scale, wanted / scale, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes"), SHAPES)
def test_spline_sums_of_rows(library, dtype, rows, classes):
    check_sums(library, rows_of(rows, classes, dtype))


@pytest.mark.parametrize("m", [2, 7, 15])
def test_spline_sums_of_knots(library, m):
    check_sums(library, rows_of(40, 10), m)


@pytest.mark.parametrize(("rows", "classes"), [(40, 5), (33, 20), (9, 300), (3, 2100)])
def test_spline_sums_of_vectors_and_matrices(library, rows, classes):
    vector, bias = (0.1 * torch.randn(2, classes)).double()
    z = rows_of(rows, classes)
    check_sums(library, z, more=(vector, bias, None), keep_zeros=True)
    check_sums(library, z, more=(None, bias, 0.1 * torch.randn(rows, classes).double()))
    check_sums(library, rows_of(rows, classes, torch.float64, "probs"), kind="probs")


@pytest.mark.parametrize("floor", [0.0, 1e-3])
@pytest.mark.parametrize(("rows", "classes"), [(1, 2), (300, 3), (33, 20), (9, 300), (3, 2100)])
def test_spline_sums_of_temperatures(library, rows, classes, floor):
    z = rows_of(rows, classes)
    target, weight = torch.randint(max(1, classes - 1), (rows,)), torch.rand(rows).double()
    betas = torch.tensor([1.0, 0.002, 0.3, 5.0, 40.0]).double()
    with Memory(library) as memory:
        call = Call(library, memory, z)
        args = call.fill(structure(library, "SplineInput", torch.float32, INPUT))
        args.floor = floor
        of_threads, _, scratch, read = call.sums(2 * len(betas))
        places = [c_void_p(memory.put(one)) for one in (target, weight, betas)]
        done = library.spline_temperature_sums(ctypes.byref(args), *places, c_int64(len(betas)), of_threads, scratch)
        assert done == 0
        found = read()[0].reshape(2, -1)
    expected = fallback.spline_temperature_sums(z, target, weight, betas, floor, False)
    for one, other in zip(found, expected, strict=True):
        assert_near(one / other.abs().max(), other / other.abs().max(), torch.float64)


def test_spline_kernels_of_no_rows(library):
    z = torch.zeros(0, 4)
    with Memory(library) as memory:
        rows = Call(library, memory, z).fill(structure(library, "SplineInput", torch.float32, INPUT))
        assert library.spline_log_probs(ctypes.byref(rows), None, None) == 0
