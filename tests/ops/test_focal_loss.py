"""fk.focal_loss compared with the float64 reference, torch's cross-entropy, and definitions at 300 digits."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from focal_cases import FLOATS, TABLE, check_against_reference, gammas_for, leaf

import focalkern as fk
from focalkern.ops._backend import has_kernels


def cross_entropy_samples(device, dtype):
    pytest.importorskip("expecttest", reason="expecttest, which torch.testing._internal imports, is not installed")
    from torch.testing._internal.common_modules import module_inputs_torch_nn_CrossEntropyLoss

    samples = module_inputs_torch_nn_CrossEntropyLoss(None, device, dtype, requires_grad=True, training=True)
    assert len(samples) > 80
    for sample in samples:
        yield sample.desc, *sample.forward_input.args, sample.constructor_input.kwargs


# torch tests its own loss in float32 and float64.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gamma_0_is_cross_entropy_on_every_sample_that_torch_ships(device, dtype):
    # One number, and one number per row: gamma reaches the kernel in these two ways.
    for desc, z, target, options in cross_entropy_samples(device, dtype):
        z, target = leaf(z), leaf(target) if target.is_floating_point() else target
        inputs = (z, target) if target.is_floating_point() else (z,)
        expected = F.cross_entropy(z, target, **options)
        upstream = torch.randn_like(expected)
        expected_grads = torch.autograd.grad(expected, inputs, upstream)
        shape = z.shape[:1] + z.shape[2:] if z.dim() > 1 else ()
        for gamma in (0.0, torch.zeros(shape, dtype=dtype, device=device)):
            loss = fk.focal_loss(z, target, gamma, **options)
            assert loss.dtype == expected.dtype, desc
            torch.testing.assert_close(loss, expected, msg=lambda m, desc=desc: f"{desc}: {m}")
            for actual, exact in zip(torch.autograd.grad(loss, inputs, upstream), expected_grads, strict=True):
                torch.testing.assert_close(actual, exact, msg=lambda m, desc=desc: f"{desc}: {m}")


def test_gamma_0_is_cross_entropy_at_the_edges(device):
    nan, inf = math.nan, math.inf
    rows = torch.tensor(
        [
            [1e4, -1e4, 0.0],  # the largest gap of float16's range, and beyond exp's range
            [-1e4, -1e4, -1e4],
            [1e4, 1e4, 1e4],
            [-inf, 0.0, 1.0],  # -inf at the target below
            [0.0, -inf, 1.0],  # -inf elsewhere
            [nan, 0.0, 1.0],  # NaN and inf at the target, and elsewhere
            [0.0, nan, 1.0],
            [inf, 0.0, 1.0],
            [0.0, inf, 1.0],
            [-inf, -inf, -inf],
            [inf, nan, -inf],
        ],
        device=device,
    )
    target = torch.zeros(len(rows), dtype=torch.int64, device=device)
    for dtype in FLOATS:
        z = leaf(rows.to(dtype))
        # torch rounds its half-precision log-probabilities before it differentiates, so the test uses torch's float64
        # result.
        exact = leaf(z.double())
        expected = F.cross_entropy(exact, target, reduction="none")
        loss = fk.focal_loss(z, target, 0.0, reduction="none")
        assert loss.dtype == dtype
        upstream = torch.rand_like(loss) + 0.5
        (expected_grad,) = torch.autograd.grad(expected, exact, upstream.double())
        assert_close(loss, expected)
        assert_close(torch.autograd.grad(loss, z, upstream)[0], expected_grad)
        # Another gamma changes neither which rows are NaN nor which are infinite.
        for gamma in (2.0, 0.5, -1.5):
            other = fk.focal_loss(z, target, gamma, reduction="none")
            assert torch.equal(other.isnan(), expected.isnan())
            assert torch.equal(other.isinf(), expected.isinf())
            (grad,) = torch.autograd.grad(other, z, upstream)
            assert torch.equal(grad.isnan(), expected_grad.isnan())


# Lengths that the kernels treat differently, with and without an incomplete last vector.
LONG_ROWS = [33, 40, 64, 100, 112, 113, 128, 250, 256, 257, 1000, 4096, 4097, 5001]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("classes", LONG_ROWS)
def test_numbers_that_stand_out_in_long_rows(device, classes, dtype):
    """Logits that are infinite, NaN, or far from all others, at every position of the first and last vectors, and next
    to the target."""
    places = sorted({*range(min(classes, 36)), *range(max(classes - 36, 0), classes)})
    target = torch.tensor(places, device=device)
    logits = torch.randn(len(places), classes, device=device)
    for value in (math.nan, math.inf, -math.inf, 1000.0, -1000.0):
        for distance in (0, 1, 17):
            z = logits.clone()
            z[range(len(places)), (target + distance) % classes] = value
            z = leaf(z.to(dtype))
            exact = leaf(z.double())
            expected = F.cross_entropy(exact, target, reduction="none")
            (expected_grad,) = torch.autograd.grad(expected.sum(), exact)
            for gamma in (0.0, 2.0):
                loss = fk.focal_loss(z, target, gamma, reduction="none")
                (grad,) = torch.autograd.grad(loss.sum(), z)
                assert torch.equal(loss.isnan(), expected.isnan())
                assert torch.equal(loss.isinf(), expected.isinf())
                assert torch.equal(grad.isnan(), expected_grad.isnan())
                if gamma == 0:
                    assert_close(loss, expected)
                    assert_close(grad, expected_grad)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("classes", [2, 10, *LONG_ROWS])
def test_a_gamma_that_is_nan_spoils_its_rows_alone(device, classes, dtype):
    """Includes a NaN with a payload that rounding to 16 bits could turn into a number."""
    z = leaf(torch.randn(40, classes, device=device).to(dtype))
    target = torch.arange(40, device=device) % classes
    gamma = torch.full((40,), 2.0)
    gamma[[3, 20]] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    loss = fk.focal_loss(z, target, gamma.to(device), reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), z)
    assert loss.isnan().nonzero().flatten().tolist() == [3, 20]
    assert torch.equal(grad.isnan(), gamma.isnan().to(device)[:, None].expand_as(grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [2, 8, 32, 64, 128, 256, 512, 4096, 8192])
def test_a_gradient_is_rounded_to_the_even_neighbour(classes, dtype):
    """Equal logits have the gradient weight / classes, here halfway between two numbers."""
    if not has_kernels(torch.empty(0)):
        pytest.skip("plain torch takes the probability from its logarithm, which is not exact")
    half_step = torch.finfo(dtype).eps / 2
    for steps in (1, 3, 5, 7):
        weight = torch.full((classes,), 1 + steps * half_step)
        z = leaf(torch.zeros(40, classes, dtype=dtype))
        target = torch.zeros(40, dtype=torch.int64)
        loss = fk.focal_loss(z, target, 0.0, weight=weight, reduction="sum")
        (grad,) = torch.autograd.grad(loss, z)
        assert (grad[:, 1:] == (weight[1:] / classes).to(dtype)).all()


def test_one_broken_row_spoils_no_other_row(device):
    z = torch.randn(6, 5, device=device)
    target = torch.arange(6, device=device) % 5
    clean = leaf(z)
    expected = fk.focal_loss(clean, target, reduction="none")
    (expected_grad,) = torch.autograd.grad(expected.sum(), clean)
    z[3, 1] = math.nan
    broken = leaf(z)
    loss = fk.focal_loss(broken, target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), broken)
    others = [0, 1, 2, 4, 5]
    assert torch.equal(loss[others], expected[others])
    assert torch.equal(grad[others], expected_grad[others])
    assert loss[3].isnan()
    assert grad[3].isnan().all()
    assert fk.focal_loss(broken, target).isnan()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("kind", ["index", "probabilities"])
# Every pair of options occurs in the loops below: each option alone is simple, but options share the divisor and the
# path for soft targets.
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_option_pairs(device, reduction, kind, smoothing):
    z = torch.randn(6, 5, dtype=torch.float64, device=device) * 3
    if kind == "index":
        target = torch.tensor([0, -100, 4, 2, 7, 1], device=device)
        ignore = [-100, 7]
    else:
        target = torch.rand(6, 5, dtype=torch.float64, device=device)
        target[:, 2] = 0
        ignore = [None]
    weight = torch.rand(5, dtype=torch.float64, device=device)
    weight[3] = 0
    for gamma in gammas_for((6,), device):
        for w in (None, weight):
            for detach in (False, True):
                for ignore_index in ignore:
                    options = {"reduction": reduction, "label_smoothing": smoothing, "detach_modulation": detach}
                    t = target
                    if ignore_index is not None:
                        options["ignore_index"] = ignore_index
                        t = torch.where((target == -100) | (target == 7), ignore_index, target)
                    check_against_reference(z, t, gamma, weight=w, **options)


def test_ignore_index_may_be_a_class(device):
    z = torch.randn(7, 4, dtype=torch.float64, device=device)
    target = torch.tensor([0, 1, 2, 3, 2, 1, 0], device=device)
    for reduction in ("none", "mean", "sum"):
        check_against_reference(z, target, 1.5, ignore_index=2, reduction=reduction)


@pytest.mark.parametrize("dtype", FLOATS)
def test_empty_and_ignored(device, dtype):
    z = torch.randn(3, 4, device=device).to(dtype)
    ignored = torch.full((3,), -100, device=device)
    none = {"mean": math.nan, "sum": 0.0}
    for logits, target in ((z[:0], ignored[:0]), (z, ignored), (z[:0], z[:0].softmax(-1))):
        for smoothing in (0.0, 0.1):
            for reduction, value in none.items():
                x = leaf(logits)
                g = torch.ones(len(x), dtype=dtype, device=device, requires_grad=True)
                loss = fk.focal_loss(x, target, g, reduction=reduction, label_smoothing=smoothing)
                assert loss.isnan() if math.isnan(value) else loss == value
                assert loss.dtype == dtype
                grads = torch.autograd.grad(loss, (x, g))
                assert all((v == 0).all() for v in grads)
            unreduced = fk.focal_loss(logits, target, reduction="none", label_smoothing=smoothing)
            assert unreduced.tolist() == [0.0] * len(logits)
    empty = torch.zeros(2, 3, 0, dtype=dtype, device=device)
    assert fk.focal_loss(empty, torch.zeros(2, 0, dtype=torch.int64, device=device), reduction="none").shape == (2, 0)


def test_a_table_is_looked_up_in_the_kernel(device):
    # p = 0.5 exactly belongs to the bin that begins there; the outer edges are not compared.
    table = fk.GammaTable([0.3, 0.5, 0.5, 0.7], [5.0, 9.0, -1.0]).to(device)
    for dtype in (torch.float32, torch.float64):
        z = torch.tensor([[0.0, 0.0], [-5.0, 0.0], [5.0, 0.0]], dtype=dtype, device=device)
        target = torch.zeros(3, dtype=torch.int64, device=device)
        per_row = torch.tensor([-1.0, 5.0, -1.0], dtype=dtype, device=device)
        by_table = fk.focal_loss(z, target, table, reduction="none")
        assert_close(by_table, fk.focal_loss(z, target, per_row, reduction="none"))
    # The next call sees values written in place, as a schedule requires.
    table.gammas[1:] = 0.0
    table.gammas[0] = 0.0
    assert_close(fk.focal_loss(z, target, table), F.cross_entropy(z, target))


def test_table_of_smoothed_targets_is_looked_up_at_each_class(device):
    z = torch.randn(8, 6, dtype=torch.float64, device=device) * 2
    check_against_reference(z, torch.randint(6, (8,), device=device), fk.FLSD_53.to(device), label_smoothing=0.2)
    check_against_reference(z, torch.rand(8, 6, dtype=torch.float64, device=device), TABLE.to(device))


def test_detached_modulation_changes_the_gradient_only(device):
    z = torch.randn(5, 4, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([0, 3, 1, 2, 0], device=device)
    for gamma in (2.0, -2.0):
        whole = fk.focal_loss(z, target, gamma)
        detached = fk.focal_loss(z, target, gamma, detach_modulation=True)
        assert whole == detached
        difference = torch.autograd.grad(whole, z)[0] - torch.autograd.grad(detached, z)[0]
        assert difference.abs().max() > 1e-3


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, target, **options: fk.focal_loss(z, target, 2.0, z_loss=1e-4, **options),
        lambda z, target, **options: fk.focal_loss(z, target, 2.0, return_stats=True, **options).loss,
        lambda z, target, **options: fk.focal_loss(z, target, 1.0, modulation="confidence", **options),
        lambda z, target, **options: fk.focal_loss(z, target, z.new_full(z.shape[:1], -1.5), **options),
        lambda z, target, **options: fk.focal_loss(z, target, TABLE.to(z.device), **options),
        lambda z, target, **options: fk.focal_loss(z, target, 2.0, label_smoothing=0.2, **options),
        lambda z, target, **options: fk.focal_loss(z, F.one_hot(target, 6).to(z.dtype), 2.0, **options),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_class_of_weight_zero_adds_nothing_even_where_no_row_can_have_it(device, loss, reduction):
    z, weight = torch.randn(20, 6, device=device), torch.rand(6, device=device) + 0.5
    weight[1], z[:, 1] = 0, -math.inf
    target = torch.randint(2, 6, (20,), device=device)
    target[::3] = 1
    z.requires_grad_()
    some = loss(z, target, weight=weight, reduction=reduction)
    assert some.isfinite()
    assert torch.autograd.grad(some, z)[0].isfinite().all()
    finite = torch.where(z == -math.inf, -200.0, z)  # p underflows to 0, with a finite logarithm
    assert_close(some, loss(finite, target, weight=weight, reduction=reduction))
