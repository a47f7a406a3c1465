"""The sums for fits of spline scaling: compiled kernels against focalkern.fallback.

tests/calibrators/test_spline_fit.py has the fallback's against autograd of the objective.
"""

import math

import pytest
import torch

from focalkern import fallback
from focalkern.fallback.spline_map import spline_coefficients
from focalkern.ops.spline_sums import spline_sums_for

pytestmark = pytest.mark.kernels("stable")

KERNELS = spline_sums_for(torch.empty(0))


class OnDevice:
    """Parameters are always on the CPU."""

    def __init__(self, device):
        self.device, self.module = device, spline_sums_for(torch.empty(0, device=device))

    def __getattr__(self, name):
        def call(*arguments):
            rows = [one.to(self.device) if isinstance(one, torch.Tensor) else one for one in arguments[:3]]
            return on_the_cpu(getattr(self.module, name)(*rows, *arguments[3:]))

        return call


def on_the_cpu(found):
    if isinstance(found, tuple):
        return tuple(map(on_the_cpu, found))
    return found.cpu() if isinstance(found, torch.Tensor) else found


# 2: the smallest; 3, 10: less than one vector; 32, 33: the layouts of a tile; 100, 300: off the vector width; 2100: one
# row is a tile.
N_CLASSES = [2, 3, 10, 32, 33, 100, 300, 2100]


def problem(n_rows, n_classes, dtype=torch.float64, input_kind="logits"):
    """Rows of all scales with ties, a saturated row and impossible classes; labels, weights."""
    random = torch.Generator().manual_seed(n_classes)
    z = torch.randn(n_rows, n_classes, generator=random) * torch.linspace(0.1, 8, n_rows).unsqueeze(1)
    target = torch.randint(n_classes, (n_rows,), generator=random)
    target[::2] = z[::2].argmax(1)
    z[0], z[1, 0] = 0.25, 200.0
    if n_classes > 2:
        lowest = z[2:].argmin(1)
        z[2:][target[2:] != lowest, lowest[target[2:] != lowest]] = -math.inf
    z = z.softmax(-1) if input_kind == "probs" else z
    weight = torch.rand(n_rows, dtype=torch.float64, generator=random)
    weight[n_rows // 2] = 0
    return z.to(dtype), target, weight


def curve(m):
    random = torch.Generator().manual_seed(m)
    knots = torch.linspace(-7, 3, m, dtype=torch.float64) + 0.2 * torch.rand(m, dtype=torch.float64, generator=random)
    basis = spline_coefficients(knots, torch.eye(m, dtype=torch.float64))
    return knots, basis, 0.2, torch.randn(m, dtype=torch.float64, generator=random)


def close(ours, theirs, rtol=1e-11):
    if isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=rtol)
    elif theirs is None:
        assert ours is None
    else:
        atol = rtol * max(1e-3, theirs.abs().max().item() if theirs.numel() else 0)  # of cancelling terms
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def sums(module, z, target, weight, m=10, kind="scalar", is_probs=False, keep_zeros=False):
    """Results of the functions, in one list; the Hessian in a matrix for few classes."""
    n_rows, n_classes = z.shape[-2:]
    random = torch.Generator().manual_seed(1)
    vector, bias = torch.randn(2, n_classes, dtype=torch.float64, generator=random) * 0.1
    extra = torch.randn(n_rows, n_classes, dtype=torch.float64, generator=random) * 0.1
    more = {"scalar": (None, None, None), "vector": (vector, bias, None), "matrix": (None, bias, extra)}[kind]
    arguments = (z, target, weight, 1.3, 1e-4, *curve(m), *more, is_probs, keep_zeros)
    found = [*module.spline_curve_sums(*arguments), *module.spline_linear_sums(*arguments, kind == "matrix")]
    found.append(module.spline_row_losses(*arguments))
    return [*found, module.spline_matrix_hessian(*arguments)] if n_classes <= 32 else found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_classes", N_CLASSES)
def test_sums_are_those_of_the_fallback(device, n_classes, dtype):
    rows = problem(90 if n_classes < 1000 else 7, n_classes, dtype)
    for kind in ("scalar", "vector", "matrix"):
        for keep_zeros in (False, True):
            ours, theirs = (
                sums(module, *rows, kind=kind, keep_zeros=keep_zeros) for module in (OnDevice(device), fallback)
            )
            for one, other in zip(ours, theirs, strict=True):
                close(one, other)
    probs = problem(90 if n_classes < 1000 else 7, n_classes, torch.float64, "probs")
    for one, other in zip(
        *(sums(module, *probs, is_probs=True) for module in (OnDevice(device), fallback)), strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("m", [2, 4, 9, 15])  # 15 knots fill the tables of the vector code
def test_numbers_of_knots(device, m):
    rows = problem(90, 40)
    for one, other in zip(*(sums(module, *rows, m=m) for module in (OnDevice(device), fallback)), strict=True):
        close(one, other)


@pytest.mark.parametrize("input_kind", ["logits", "probs"])
@pytest.mark.parametrize("n_classes", N_CLASSES)
def test_features_are_those_of_the_fallback(device, n_classes, input_kind):
    z, target, weight = problem(90 if n_classes < 1000 else 7, n_classes, torch.float64, input_kind)
    is_probs = input_kind == "probs"
    betas = torch.tensor([1.0, 0.002, 0.3, 5.0, 400.0], dtype=torch.float64)
    for name, arguments in {
        "spline_temperature_sums": (z, target, weight, betas, 1e-3),
        "spline_spread": (z, weight, 2.0, 1000.0),
        "spline_histogram": (z, weight, 1.7, 1e-4),
        "spline_log_probs": (z, 1.7, 1e-4),
    }.items():
        ours, theirs = (getattr(module, name)(*arguments, is_probs) for module in (OnDevice(device), fallback))
        if name == "spline_histogram":  # an u on the edge of a bin may fall on either side of it
            ours, theirs = ours.cumsum(0)[::8], theirs.cumsum(0)[::8]
            assert ((ours - theirs).abs() > 1e-9).sum() <= 2
        else:
            close(ours, theirs)


@pytest.mark.parametrize("module", [KERNELS, fallback], ids=["kernels", "fallback"])
@pytest.mark.parametrize("n_classes", N_CLASSES)
def test_sums_of_features_are_those_of_their_rows(n_classes, module):
    z, target, weight = problem(90 if n_classes < 1000 else 7, n_classes, torch.float32)
    z = z.clamp(min=-50)  # no impossible classes
    features = module.spline_features(z, 1.3, 1e-4, False)
    close(features, fallback.spline_features(z, 1.3, 1e-4, False))
    assert torch.equal(features[0], module.spline_log_probs(z, 1.3, 1e-4, False))
    for kind in ("scalar", "vector", "matrix"):
        ours, theirs = (sums(module, input, target, weight, kind=kind, keep_zeros=True) for input in (features, z))
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("module", [KERNELS, fallback], ids=["kernels", "fallback"])
@pytest.mark.parametrize("n_classes", [2, 3, 10, 32])  # 3: no whole group of products; 10: two of them; 32: the most
def test_a_matrix_stands_for_its_products(n_classes, module):
    z, target, weight = problem(90, n_classes)
    features = module.spline_features(z.clamp(min=-50), 1.3, 1e-4, False)
    random = torch.Generator().manual_seed(4)
    matrix = 0.1 * torch.randn(n_classes, n_classes, dtype=torch.float64, generator=random)
    bias, x = matrix[0], features[0]
    first = (features, target, weight, 1.3, 1e-4, *curve(10))
    given, outside = (matrix, bias, None, False, False), (None, bias, x @ matrix.T, False, False)
    for one, other in zip(
        module.spline_curve_sums(*first, *given), module.spline_curve_sums(*first, *outside), strict=True
    ):
        close(one, other)
    value, of_curve, of_matrix, of_bias, no_slopes = module.spline_linear_sums(*first, *given, False)
    *expected, _, of_one, slopes = module.spline_linear_sums(*first, *outside, True)
    assert no_slopes is None
    for one, other in zip((value, of_curve, of_bias, of_matrix), (*expected, of_one, slopes.T @ x), strict=True):
        close(one, other)


@pytest.mark.parametrize("n_classes", [3, 60])
def test_temperature_without_a_floor(device, n_classes):
    z, target, weight = problem(50, n_classes)
    z[2, target[2]] = z[2].max() - 900  # its probability underflows
    betas = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    losses = torch.nn.functional.cross_entropy(
        (betas[:, None, None] * z.clamp(min=-1e5)).flatten(0, 1), target.repeat(2), reduction="none"
    )
    expected = (losses.reshape(2, -1) * weight).sum(1)
    (slopes,) = torch.autograd.grad(expected.sum(), betas)
    for module in (OnDevice(device), fallback):
        found = module.spline_temperature_sums(z, target, weight, betas.detach(), 0.0, False)
        close(found, torch.stack([expected.detach(), slopes]))


def test_label_at_an_impossible_class(device):
    z, target, weight = problem(20, 5)
    z[3, target[3]] = -math.inf
    betas = torch.tensor([0.5, 2.0], dtype=torch.float64)
    arguments = (z, target, weight, betas, 1e-3, False)
    close(OnDevice(device).spline_temperature_sums(*arguments), fallback.spline_temperature_sums(*arguments))
    for one, other in zip(*(sums(module, z, target, weight) for module in (OnDevice(device), fallback)), strict=True):
        close(one, other)


@pytest.mark.parametrize("n_rows", [0, 1, 63, 64, 65])
def test_few_rows(device, n_rows):
    z, target, weight = (column[:n_rows] for column in problem(70, 4))
    ours, theirs = (sums(module, z, target, weight, kind="vector") for module in (OnDevice(device), fallback))
    for one, other in zip(ours, theirs, strict=True):
        close(one, other)
    assert OnDevice(device).spline_log_probs(z, 1.0, 1e-3, False).shape == (n_rows, 4)


def test_integer_weights_are_repeated_rows():
    z, target, _ = problem(80, 12)
    times = torch.randint(4, (80,), generator=torch.Generator().manual_seed(2))
    weighted = sums(KERNELS, z, target, times.double())
    repeated = sums(
        KERNELS, z.repeat_interleave(times, 0), target.repeat_interleave(times), torch.ones(int(times.sum()))
    )
    for one, other in zip(weighted[:3], repeated[:3], strict=True):
        close(one, other, 1e-12)


@pytest.mark.parametrize("n_classes", [7, 60])
def test_threads_do_not_change_a_bit(n_classes):
    z, target, weight = problem(300_000 // n_classes, n_classes, torch.float32)
    betas = torch.tensor([0.5, 2.0], dtype=torch.float64)
    found, before = [], torch.get_num_threads()
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            found.append(
                [
                    *sums(KERNELS, z, target, weight, kind="vector"),
                    KERNELS.spline_temperature_sums(z, target, weight, betas, 1e-3, False),
                    KERNELS.spline_histogram(z, weight, 1.5, 1e-4, False),
                    KERNELS.spline_spread(z, weight, 1.0, 1000.0, False),
                ]
            )
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


@pytest.mark.parametrize("module", [KERNELS, fallback], ids=["kernels", "fallback"])
def test_arguments_that_do_not_fit(module):
    z, target, weight = problem(9, 4)
    rows = (z, target, weight, 1.0, 1e-3)
    for arguments, message in {
        (z[0], target, weight, 1.0, 1e-3, *curve(4)): r"input must be \[N, C\]",
        (z, target[:3], weight, 1.0, 1e-3, *curve(4)): r"target must be \[N\] = \[9\] int64",
        (z, target, weight[:3], 1.0, 1e-3, *curve(4)): r"weight must be \[N\] = \[9\]",
        (
            z.expand(3, 9, 4),
            *rows[1:],
            *curve(4),
        ): r"features must be \[2, N, C\] float64 on the CPU with C >= 2, got \[3, 9",
        (z.float().expand(2, 9, 4), *rows[1:], *curve(4)): r"features must be .* got \[2, 9, 4\] torch.float32",
        (*rows, *curve(16)): r"knots must be \[m\] with m from 2 to 15",
    }.items():
        with pytest.raises(ValueError, match=message):
            module.spline_curve_sums(*arguments, None, None, None, False, False)
    bad = target.index_fill(0, torch.tensor(2), 4)
    with pytest.raises(IndexError, match="target must be from 0 to 3, got 4 at row 2"):
        module.spline_curve_sums(z, bad, weight, 1.0, 1e-3, *curve(4), None, None, None, False, False)
    many = (torch.zeros(9, 33), *rows[1:], *curve(4), None, None, None, False, False)
    with pytest.raises(ValueError, match="input must have at most 32 classes, got 33"):
        module.spline_matrix_hessian(*many)
    with pytest.raises(ValueError, match=r"vectors must be \[C\]"):
        module.spline_curve_sums(*rows, *curve(4), weight, None, None, False, False)
    with pytest.raises(
        ValueError, match=r"of_x must be \[C\], or \[C, C\] for features of at most 32 classes, got \[4, 4\]"
    ):
        module.spline_linear_sums(*rows, *curve(4), torch.eye(4), None, None, False, False, False)
