"""fk.focal_loss against the reference in float64, torch's cross-entropy, and definitions at 300 digits."""

import copy
import functools
import math

import mpmath
import oracle
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from conftest import TOLERANCE, assert_close, no_waiting
from hypothesis import given, settings
from hypothesis import strategies as st

import focalkern as fk
from focalkern import reference
from focalkern.ops._backend import has_kernels

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TABLE = fk.GammaTable([0.0, 0.1, 0.2, 0.2, 0.6, 1.0], [5.0, -1.0, 9.0, 0.5, 2.0])
# torch's own decompositions and inductor still use torch.jit.script, whose deprecation is torch's matter.
torch_jit_warns = pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script")
# Deterministic: a failure does not depend on luck. The loss costs microseconds, so the examples are many enough.
PROPERTY = settings(deadline=None, derandomize=True, max_examples=60, database=None)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, strides included, that requires grad."""
    return tensor.detach().requires_grad_()


def to_double(value):
    return value.detach().double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def check_against_reference(z, target, gamma=2.0, dtype=None, **options):
    """Value and every gradient, for a random upstream gradient, against the reference in float64."""
    weight = options.pop("weight", None)
    ours, theirs = [], []
    for function, inputs, convert in ((fk.focal_loss, ours, lambda v: v), (reference.focal_loss, theirs, to_double)):
        logits = leaf(convert(z))
        inputs.append(logits)
        t, g = convert(target), convert(gamma)
        if t.is_floating_point():
            t = leaf(t)
            inputs.append(t)
        if isinstance(g, torch.Tensor):
            g = leaf(g)
            if not options.get("detach_modulation"):
                inputs.append(g)
        loss = function(logits, t, g, weight=convert(weight), **options)
        inputs.append(loss)
    loss, expected = ours.pop(), theirs.pop()
    assert loss.shape == expected.shape
    assert loss.dtype == z.dtype
    assert_close(loss, expected, dtype)
    upstream = torch.randn_like(loss)
    grads = torch.autograd.grad(loss, ours, upstream)
    expected_grads = torch.autograd.grad(expected, theirs, upstream.double())
    for actual, exact, source in zip(grads, expected_grads, ours, strict=True):
        assert actual.dtype == source.dtype
        assert actual.shape == source.shape
        assert_close(actual, exact, dtype or z.dtype)


# ---- cross-entropy --------------------------------------------------------------------------------------------------


def cross_entropy_samples(device, dtype):
    pytest.importorskip("expecttest", reason="expecttest, which torch.testing._internal imports, is not installed")
    from torch.testing._internal.common_modules import module_inputs_torch_nn_CrossEntropyLoss

    samples = module_inputs_torch_nn_CrossEntropyLoss(None, device, dtype, requires_grad=True, training=True)
    assert len(samples) > 80
    for sample in samples:
        yield sample.desc, *sample.forward_input.args, sample.constructor_input.kwargs


# float32 and float64 are what torch tests its own loss with.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gamma_0_is_cross_entropy_on_every_sample_that_torch_ships(device, dtype):
    # One number, and one number per row: the two ways in which gamma reaches the kernel.
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
        # torch rounds its half-precision log-probabilities before it differentiates, so: its float64 result.
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


# Lengths that the kernels treat differently, with and without a last vector that is not full.
LONG_ROWS = [33, 40, 64, 100, 112, 113, 128, 250, 256, 257, 1000, 4096, 4097, 5001]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("classes", LONG_ROWS)
def test_numbers_that_stand_out_in_long_rows(device, classes, dtype):
    """Not finite, or far from all others; at every place of the first and the last vectors, and beside the target."""
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
    """Also one with a payload, of which rounding to 16 bits makes a number."""
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
    """Equal logits have the slope weight / classes, here half way between two numbers."""
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


# ---- the edges, at 300 digits ---------------------------------------------------------------------------------------

# 80 is the largest gap of the contract; 18 is where 1 - p leaves float32's digits, 40 where it leaves float64's. 7.5
# and 12 are just past the place where a series must replace -p log(p) / (1 - p), in float32 and in float64.
EDGE_GAPS = [0.0, 1.0, 7.5, 12.0, 18.0, 40.0, 80.0]
# 5 and 2: common; 0.25: infinite slope at p = 1; 0: cross-entropy; -0.5, -5: inverse, -5 with a negative coefficient.
EDGE_GAMMAS = [5.0, 2.0, 0.25, 0.0, -0.5, -5.0]


def edge_row(gap: float) -> list[float]:
    # Multiples of 1/4: exact in float32.
    return [0.25 - gap, 0.25, -0.75 - gap] if gap else [0.25, 0.25, 0.25]


@functools.cache
def edge_oracle(gap: float, gamma: float, target: int) -> tuple[float, list[float], float]:
    with oracle.precision():
        row = edge_row(gap)
        loss = oracle.loss(row, target, gamma)
        grad = oracle.gradient(lambda x: oracle.loss(x, target, gamma), row)
        p = oracle.softmax([mpmath.mpf(v) for v in row])[target]
        slope = mpmath.log(p) * (-mpmath.log(1 - p) if gamma >= 0 else mpmath.log(1 + p))
        return float(loss), [float(v) for v in grad], float(slope * oracle.factor(p, mpmath.mpf(gamma)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", EDGE_GAMMAS)
def test_value_and_gradients_at_300_digits(device, dtype, gamma):
    rtol, atol = TOLERANCE[dtype]
    for gap in EDGE_GAPS:
        for target in (0, 1):  # p -> 0 and p -> 1
            z = torch.tensor([edge_row(gap)], dtype=dtype, device=device, requires_grad=True)
            g = torch.tensor([gamma], dtype=dtype, device=device, requires_grad=True)
            loss = fk.focal_loss(z, torch.tensor([target], device=device), g, reduction="sum")
            grads = torch.autograd.grad(loss, (z, g))
            exact_loss, exact_grad, exact_slope = edge_oracle(gap, gamma, target)
            actual = [loss.item(), *grads[0].flatten().tolist(), grads[1].item()]
            exact = [exact_loss, *exact_grad, exact_slope]
            for a, e in zip(actual, exact, strict=True):
                # float64 keeps its relative accuracy however small the number; float32 has its contract.
                floor = 1e-290 if dtype == torch.float64 else atol
                assert abs(a - e) <= rtol * abs(e) + floor, (gap, target, a, e)
            # The same through the second path, which visits every class.
            soft = F.one_hot(torch.tensor([target], device=device), 3).to(dtype)
            by_class = fk.focal_loss(z, soft, g, reduction="sum")
            actual = [by_class.item(), *torch.autograd.grad(by_class, z)[0].flatten().tolist()]
            for a, e in zip(actual, exact[:-1], strict=True):
                assert abs(a - e) <= rtol * abs(e) + floor, (gap, target, a, e)


@pytest.mark.parametrize("gamma", EDGE_GAMMAS)
def test_soft_targets_at_300_digits(device, gamma):
    target, row = [0.7, 0.1, 0.0], edge_row(18.0)
    z = torch.tensor([row], dtype=torch.float64, device=device, requires_grad=True)
    t = torch.tensor([target], dtype=torch.float64, device=device, requires_grad=True)
    loss = fk.focal_loss(z, t, torch.tensor(gamma, dtype=torch.float64), label_smoothing=0.25)
    grad_z, grad_t = torch.autograd.grad(loss, (z, t))
    with oracle.precision():
        assert_close(loss, torch.tensor(float(oracle.loss(row, target, gamma, 0.25)), dtype=torch.float64))
        exact = oracle.gradient(lambda x: oracle.loss(x, target, gamma, 0.25), row)
        assert_close(grad_z, torch.tensor([[float(v) for v in exact]], dtype=torch.float64))
        p = oracle.softmax([mpmath.mpf(v) for v in row])
        exact = [-0.75 * oracle.factor(q, mpmath.mpf(gamma)) * mpmath.log(q) for q in p]
        assert_close(grad_t, torch.tensor([[float(v) for v in exact]], dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:focal_loss. gamma = -5.0 is below")
@pytest.mark.parametrize("gamma", EDGE_GAMMAS)
def test_the_edges_of_every_form_of_gamma(device, gamma):
    # One gamma for all rows or many, rows that all count alike or not: the loops know. More than a vector of rows.
    edges = [(gap, target) for gap in EDGE_GAPS for target in (0, 1)] * 3
    exact = [edge_oracle(gap, gamma, target) for gap, target in edges]
    table = fk.GammaTable([0.0, 0.5, 1.0], [gamma, gamma]).to(device)
    for dtype in (torch.float32, torch.float64):
        rtol, atol = TOLERANCE[dtype]
        z = torch.tensor([edge_row(gap) for gap, _ in edges], dtype=dtype, device=device, requires_grad=True)
        labels = torch.tensor([target for _, target in edges], device=device)
        ignored = labels.masked_fill(torch.arange(len(edges), device=device) % 5 == 0, -100)
        weight = torch.tensor([0.5, 2.0, 1.0], dtype=dtype, device=device)
        for form in (gamma, torch.full((len(edges),), gamma, dtype=dtype, device=device), table):
            for target, of_class in ((labels, None), (ignored, None), (labels, weight)):
                counts = (target != -100).double()
                scale = counts if of_class is None else counts * of_class.double()[labels]
                losses = fk.focal_loss(z, target, form, weight=of_class, reduction="none")
                expected = torch.tensor([loss for loss, _, _ in exact], dtype=torch.float64, device=device) * scale
                torch.testing.assert_close(losses.double(), expected, rtol=rtol, atol=atol)
                total = fk.focal_loss(z, target, form, weight=of_class, reduction="sum")
                assert_close(total, expected.sum(), dtype)
                expected = torch.tensor([grad for _, grad, _ in exact], dtype=torch.float64, device=device)
                for loss in (losses.sum(), total):
                    (grad,) = torch.autograd.grad(loss, z)
                    torch.testing.assert_close(grad.double(), expected * scale[:, None], rtol=rtol, atol=atol)


def test_digits_of_a_certain_target():
    # The loss is in proportion to a power of 1 - p, which has all its digits.
    gaps = torch.arange(1, 26, dtype=torch.float64)
    z = torch.stack([gaps, torch.zeros_like(gaps)], dim=1).float().requires_grad_()
    u = torch.sigmoid(-gaps)
    losses = fk.focal_loss(z, torch.zeros(25, dtype=torch.int64), 2.0, reduction="none")
    minus_log_p = torch.nn.functional.softplus(-gaps)
    torch.testing.assert_close(losses.double(), u * u * minus_log_p, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(losses.sum(), z)
    slope = u * u * (u + 2 * (1 - u) * minus_log_p)
    torch.testing.assert_close(grad.double(), torch.stack([-slope, slope], dim=1), rtol=2e-6, atol=0)


def test_digits_of_the_slope_in_gamma_of_a_likely_class_among_many():
    # The target is the largest class, and p is small all the same: log(1 - p) is no difference of large logarithms.
    z = torch.zeros(20, 1000)
    g = torch.full((20,), 1.5, requires_grad=True)
    (grad,) = torch.autograd.grad(fk.focal_loss(z, torch.arange(20), g, reduction="sum"), g)
    assert_close(grad, torch.full((20,), 0.999**1.5 * math.log(1e3) * math.log(0.999), dtype=torch.float64))


def test_a_factor_that_vanishes_has_no_gradient_beside_an_inverse_gamma(device):
    z = torch.tensor([[40.0, 0.0], [40.0, 0.0]], dtype=torch.float64, device=device, requires_grad=True)
    gamma = torch.tensor([200.0, -1.0], dtype=torch.float64, device=device)
    fk.focal_loss(z, torch.zeros(2, dtype=torch.long, device=device), gamma, reduction="sum").backward()
    assert z.grad is not None
    assert (z.grad[0] == 0).all()  # u ** 200 of u = 4e-18
    assert (z.grad[1] != 0).all()


# (1 + p)^-gamma is finite, and gamma times it is not.
@pytest.mark.parametrize(("dtype", "gamma"), [(torch.float32, -160.0), (torch.float64, -1290.0)])
def test_slope_in_an_inverse_gamma_where_that_in_the_logits_is_infinite(dtype, gamma):
    z = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=dtype, requires_grad=True)
    gammas = torch.tensor([gamma, 2.0], dtype=dtype, requires_grad=True)
    fk.focal_loss(z, torch.zeros(2, dtype=torch.long), gammas, reduction="sum").backward()
    assert z.grad is not None and gammas.grad is not None
    log_p, log_base = -math.log1p(math.exp(-1)), math.log1p(1 / (1 + math.exp(-1)))
    expected = log_p * log_base * math.exp(-gamma * log_base)
    assert gammas.grad[0].item() == pytest.approx(expected, rel=1e-3 if dtype == torch.float32 else 1e-11)
    assert z.grad[0].tolist() == [math.inf, -math.inf]
    assert z.grad[1].isfinite().all()


@pytest.mark.parametrize("gamma", [126.5, 128.0])  # 2^-gamma is a denormal float
def test_a_row_does_not_depend_on_the_sign_of_another_gamma(gamma):
    def of_first(other: float) -> list[torch.Tensor]:
        z = torch.zeros(2, 2, requires_grad=True)
        gammas = torch.tensor([gamma, other], requires_grad=True)
        loss = fk.focal_loss(z, torch.zeros(2, dtype=torch.long), gammas, reduction="none")
        grads = torch.autograd.grad(loss.sum(), (z, gammas))
        return [loss[0], grads[0][0], grads[1][0]]

    for with_positive, with_negative in zip(of_first(1.0), of_first(-1.0), strict=True):
        assert torch.equal(with_positive, with_negative)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [10, 50, 100, 1000, 5000])
def test_a_row_does_not_depend_on_the_logits_of_another(classes, dtype):
    torch.manual_seed(classes)
    logits, target = torch.randn(32, classes, dtype=dtype), torch.arange(32) % classes
    changed = logits.clone()
    for row, value in zip(range(1, 32, 5), (-40.0, -math.inf, math.nan, 40.0, -200.0, math.inf, -20.0), strict=True):
        changed[row, target[row]] = value
    kept = torch.arange(32) % 5 != 1

    def of_kept(logits: torch.Tensor) -> list[torch.Tensor]:
        z = leaf(logits)
        loss = fk.focal_loss(z, target, gamma=2.0, reduction="none")
        loss.sum().backward()
        return [loss[kept], z.grad[kept]]

    for alone, beside in zip(of_kept(logits), of_kept(changed), strict=True):
        assert torch.equal(alone, beside)


def test_digits_of_the_slope_in_gamma_of_an_unlikely_target():
    gaps = torch.arange(1, 61, dtype=torch.float64)
    z = torch.stack([-gaps, torch.zeros_like(gaps), torch.zeros_like(gaps)], dim=1).float()
    target = torch.zeros(60, dtype=torch.int64)
    log_p = torch.nn.functional.logsigmoid(-gaps - math.log(2))
    p = log_p.exp()
    for gamma, slope in ((2.0, (1 - p) ** 2 * -log_p * torch.log1p(-p)), (-1.5, (1 + p) ** 1.5 * log_p * p.log1p())):
        g = torch.full((60,), gamma, requires_grad=True)
        (grad,) = torch.autograd.grad(fk.focal_loss(z, target, g, reduction="sum"), g)
        torch.testing.assert_close(grad.double(), slope, rtol=8e-7 if has_kernels(z) else 2e-6, atol=0)


def test_digits_of_a_high_power_of_a_target_of_any_share():
    gaps = torch.arange(97, dtype=torch.float64) / 32
    z = torch.stack([gaps, torch.zeros_like(gaps)], dim=1).float()
    losses = fk.focal_loss(z, torch.zeros(97, dtype=torch.int64), 5.0, reduction="none")
    expected = torch.sigmoid(-gaps) ** 5 * torch.nn.functional.softplus(-gaps)
    torch.testing.assert_close(losses.double(), expected, rtol=2e-6, atol=0)


def test_the_gradient_is_that_of_the_gamma_of_the_loss(device):
    # p is on an edge of the table, and rounding decides which gamma that is: once for both.
    for classes in range(2, 33):
        edges = torch.arange(classes + 1, dtype=torch.float64) / classes
        table = fk.GammaTable(edges, torch.arange(classes) % 2 * 2.0 - 0.5).to(device)
        for dtype in (torch.float32, torch.float64):
            z = torch.zeros(20, classes, dtype=dtype, device=device, requires_grad=True)
            target = torch.zeros(20, dtype=torch.int64, device=device)
            loss = fk.focal_loss(z, target, table)
            (grad,) = torch.autograd.grad(loss, z)
            matches = []
            for gamma in (-0.5, 1.5):
                of_one = fk.focal_loss(z, target, gamma)
                (expected,) = torch.autograd.grad(of_one, z)
                same = [torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in ((loss, of_one), (grad, expected))]
                assert same[0] == same[1], (classes, dtype, gamma)
                matches.append(same[0])
            assert sum(matches) == 1


def test_an_upstream_gradient_of_zero_is_zero_whatever_the_logits(device):
    if not has_kernels(torch.empty(0, device=device)):
        pytest.skip("plain torch multiplies 0 by NaN")
    z = torch.randn(40, 10, device=device)
    z[3, 4], z[20] = math.nan, math.inf
    target = torch.randint(10, (40,), device=device)
    for gamma in (2.0, 0.5, -1.0, TABLE.to(device)):
        for reduction in ("sum", "none"):
            x = leaf(z)
            (grad,) = torch.autograd.grad(fk.focal_loss(x, target, gamma, reduction=reduction).sum() * 0, x)
            assert (grad == 0).all()


def test_infinite_logits(device):
    z = torch.tensor([[0.0, -math.inf, 1.0]], dtype=torch.float64, device=device)
    for gamma in (2.0, 0.5, 0.0, -2.0):
        g = torch.tensor([gamma], dtype=torch.float64, device=device, requires_grad=True)
        # p = 0 at the target: an infinite loss with the gradient of cross-entropy, because f(0) = 1.
        x = leaf(z)
        (grad,) = torch.autograd.grad(fk.focal_loss(x, torch.tensor([1], device=device), g), x)
        assert_close(grad, z.softmax(-1) - torch.tensor([[0.0, 1.0, 0.0]], device=device))
        # p = 0 elsewhere, with no share in the target: contributes nothing.
        soft = torch.tensor([[0.4, 0.0, 0.6]], dtype=torch.float64, device=device)
        for target in (torch.tensor([2], device=device), soft):
            x, part = leaf(z), leaf(z[:, [0, 2]])
            loss = fk.focal_loss(x, target, g)
            part_target = target[:, [0, 2]] if target is soft else torch.tensor([1], device=device)
            expected = fk.focal_loss(part, part_target, g)
            assert_close(loss, expected)
            grad, expected_grad = torch.autograd.grad(loss, x)[0], torch.autograd.grad(expected, part)[0]
            assert_close(grad[:, [0, 2]], expected_grad)
            assert grad[0, 1] == 0
        # With a share, through smoothing, it is infinite as in torch.
        assert fk.focal_loss(z, torch.tensor([2], device=device), gamma, label_smoothing=0.1) == math.inf


def test_saturated_rows_have_a_finite_loss_and_gradient(device):
    # Gaps at which p rounds to 1 and to 0 in each dtype, up to the largest float16 logits.
    for dtype in FLOATS:
        for gap in (80.0, 1e3, 2e4):
            for gamma in (3.0, 0.5, 0.0, -0.5):
                z = torch.tensor([[gap, 0.0], [0.0, gap]], dtype=dtype, device=device, requires_grad=True)
                g = torch.full((2,), gamma, dtype=dtype, device=device, requires_grad=True)
                target = torch.zeros(2, dtype=torch.int64, device=device)
                loss = fk.focal_loss(z, target, g, reduction="none")
                grads = torch.autograd.grad(loss.sum(), (z, g))
                assert all(v.isfinite().all() for v in (loss, *grads))
                assert 0 <= loss[0].item() < 1e-8
                assert_close(loss[1], torch.tensor(gap))
                assert_close(grads[0][1], torch.tensor([-1.0, 1.0]))


# ---- every option, shape, layout and dtype --------------------------------------------------------------------------


def gammas_for(shape, device, dtype=torch.float64):
    """Each form of gamma for an unreduced loss of this shape."""
    yield 2.0
    yield 0
    yield -1.5
    yield TABLE
    yield torch.tensor(0.7, dtype=dtype, device=device)
    if shape:
        # Of either sign and with zeros, one per row.
        yield torch.randint(-4, 8, shape, device=device).to(dtype) / 2
        yield torch.rand(1, *shape[1:], dtype=dtype, device=device)
    if len(shape) > 1:
        yield torch.rand(shape[-1], dtype=dtype, device=device) * 3
        yield torch.rand(shape[0], *[1] * (len(shape) - 1), dtype=dtype, device=device).expand(shape)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("kind", ["index", "probabilities"])
# Every pair of options meets in the loops below: each is simple alone, the divisor and the second path mix them.
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


# (C), one row, (N, C), one and two extra dimensions, an extra dimension of size 1, and five dimensions.
SHAPES = [(4,), (1, 3), (6, 5), (3, 4, 5), (2, 3, 4, 5), (2, 3, 1, 4), (2, 3, 2, 1, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["index", "smoothed", "probabilities"])
def test_shapes(device, shape, kind):
    class_dim = 0 if len(shape) == 1 else 1
    rows = shape[:class_dim] + shape[class_dim + 1 :]
    z = torch.randn(shape, dtype=torch.float64, device=device)
    target = torch.randint(shape[class_dim], rows, device=device)
    if kind == "probabilities":
        target = torch.randn_like(z).softmax(class_dim)
    for gamma in gammas_for(rows, device):
        for reduction in ("none", "mean"):
            smoothing = 0.1 if kind == "smoothed" else 0.0
            check_against_reference(z, target, gamma, reduction=reduction, label_smoothing=smoothing)


LAYOUTS = {
    "channels last": lambda z: z.contiguous(memory_format=torch.channels_last),
    "classes outermost": lambda z: z.transpose(0, 1).contiguous().transpose(0, 1),
    "dimensions reversed": lambda z: z.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "every second row": lambda z: z.repeat_interleave(2, 0)[::2],
    "every second class": lambda z: z.repeat_interleave(2, 1)[:, ::2],
    "every second column": lambda z: z.repeat_interleave(2, 3)[..., ::2],
    "an inner window": lambda z: F.pad(z, (1, 2, 2, 1, 1, 1))[:, 1:-1, 2:-1, 1:-2],
    "rows repeated by a stride of 0": lambda z: z[:1].expand(z.shape),
    "columns repeated by a stride of 0": lambda z: z[..., :1].expand(z.shape),
    "an offset into storage": lambda z: torch.cat([z.new_zeros(3), z.flatten()])[3:].view(z.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layouts_give_the_bits_of_the_contiguous_case(device, layout, dtype):
    dense = LAYOUTS[layout](torch.randn(4, 7, 3, 5, device=device).to(dtype))
    target = torch.randint(7, (4, 3, 5), device=device)
    target[0, 0] = -100
    soft = torch.rand(4, 7, 3, 5, device=device).to(dtype)
    for t in (target, soft, LAYOUTS[layout](soft)):
        for gamma in (2.0, torch.rand(4, 3, 5, device=device).to(dtype), torch.rand(5, device=device).to(dtype)):
            upstream = torch.randn(4, 3, 5, device=device).to(dtype)
            results = []
            for z, t_ in ((dense, t), (dense.contiguous(), t.contiguous())):
                x = leaf(z)
                loss = fk.focal_loss(x, t_, gamma, reduction="none")
                results.append((loss, torch.autograd.grad(loss, x, upstream)[0]))
            # The order of a sum over classes may follow the layout, so: the tolerance, not the bits.
            for actual, expected in zip(*results, strict=True):
                assert_close(actual, expected)


def test_strides_and_lazy_negation_of_the_other_arguments(device):
    z = torch.randn(6, 4, device=device)
    target = torch.tensor([0, 1, 2, 3, 0, 1], device=device)
    weight, gamma, soft = torch.rand(8, device=device), torch.rand(6, device=device), torch.rand(6, 4, device=device)
    edges, gammas = torch.linspace(0, 1, 9, device=device), torch.rand(8, device=device)

    def negated(x):
        """x, stored as -x with torch's lazy negation bit set."""
        return torch._neg_view((-x).clone())

    def same(*arguments, **options):
        return assert_close(fk.focal_loss(*arguments, **options), expected)

    expected = fk.focal_loss(z, target, weight=weight[::2].clone())
    same(z, target, weight=weight[::2])
    same(z, target, weight=negated(weight[::2]))
    same(negated(z), target, weight=weight[::2])
    expected = fk.focal_loss(z, target, fk.GammaTable(edges[::2].clone(), gammas[::2].clone()))
    same(z, target, fk.GammaTable(edges[::2], gammas[::2]))
    same(z, target, fk.GammaTable(edges[::2].double(), gammas[::2]))
    expected = fk.focal_loss(z, soft, gamma)
    same(z, negated(soft), negated(gamma))
    x = leaf(z)
    loss = fk.focal_loss(x, target, reduction="none")
    plain, lazy = (torch.autograd.grad(loss, x, u, retain_graph=True)[0] for u in (gamma, negated(gamma)))
    assert_close(lazy, plain)
    expected = fk.focal_loss(z, target, weight=weight[:1].expand(4).clone())
    same(z, target, weight=weight[:1].expand(4))


def test_channels_last_gradient_keeps_the_layout(device):
    z = leaf(torch.randn(2, 5, 4, 3, device=device).contiguous(memory_format=torch.channels_last))
    target = torch.randint(5, (2, 4, 3), device=device)
    (grad,) = torch.autograd.grad(fk.focal_loss(z, target), z)
    assert grad.is_contiguous(memory_format=torch.channels_last)


def test_label_layouts(device):
    z = torch.randn(6, 5, 4, dtype=torch.float64, device=device)
    target = torch.randint(5, (6, 4), device=device)
    expected = fk.focal_loss(z, target, reduction="none")
    for same in (
        target.t().contiguous().t(),
        target.repeat_interleave(3, 0)[::3],
        target.int(),
        target.to(torch.uint8),
        target.to(torch.uint8).repeat_interleave(2, 1)[:, ::2],
    ):
        assert torch.equal(fk.focal_loss(z, same, reduction="none"), expected)
    row = target[:1].expand(6, 4)
    assert torch.equal(fk.focal_loss(z, row), fk.focal_loss(z, row.contiguous()))


@pytest.mark.parametrize("dtype", FLOATS)
# 1: the loss is 0; 2, 3, 10: under one vector; 17: a vector and one; 100; 1000; 4097: many vectors and one.
@pytest.mark.parametrize("n_classes", [1, 2, 3, 10, 17, 100, 1000, 4097])
def test_class_counts_and_dtypes(device, dtype, n_classes):
    z = (torch.randn(5, n_classes, device=device) * 3).to(dtype)
    target = torch.randint(n_classes, (5,), device=device)
    soft = torch.randn(5, n_classes, device=device).softmax(-1).to(dtype)
    for gamma in (2.0, 0.5, -1.0, torch.tensor([0.0, 0.5, 2.0, -2.0, 5.0], device=device).to(dtype)):
        check_against_reference(z, target, gamma, reduction="none")
        check_against_reference(z, target, gamma, label_smoothing=0.1)
        check_against_reference(z, soft, gamma)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_target_dtypes(device, dtype):
    z = torch.randn(9, 200, dtype=torch.float64, device=device)
    target = torch.randint(200, (9,), device=device)
    target[2] = 199
    expected = F.cross_entropy(z, target)
    assert_close(fk.focal_loss(z, target.to(dtype), 0.0), expected)
    # 255 is how uint8 masks say "ignore".
    target[4] = 255
    check_against_reference(z, target.to(dtype), 2.0, ignore_index=255)


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
    # p = 0.5 exactly lies in the bin that begins there; the outer edges are not compared.
    table = fk.GammaTable([0.3, 0.5, 0.5, 0.7], [5.0, 9.0, -1.0]).to(device)
    for dtype in (torch.float32, torch.float64):
        z = torch.tensor([[0.0, 0.0], [-5.0, 0.0], [5.0, 0.0]], dtype=dtype, device=device)
        target = torch.zeros(3, dtype=torch.int64, device=device)
        per_row = torch.tensor([-1.0, 5.0, -1.0], dtype=dtype, device=device)
        by_table = fk.focal_loss(z, target, table, reduction="none")
        assert_close(by_table, fk.focal_loss(z, target, per_row, reduction="none"))
    # Values written in place are seen by the next call, which is what a schedule needs.
    table.gammas[1:] = 0.0
    table.gammas[0] = 0.0
    assert_close(fk.focal_loss(z, target, table), F.cross_entropy(z, target))


def test_table_of_smoothed_targets_is_looked_up_at_each_class(device):
    z = torch.randn(8, 6, dtype=torch.float64, device=device) * 2
    check_against_reference(z, torch.randint(6, (8,), device=device), fk.FLSD_53, label_smoothing=0.2)
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


# ---- derivatives ----------------------------------------------------------------------------------------------------

# Gamma 0.5 has an unbounded second derivative at p = 1, 3 a vanishing one, 0 none of its own, -1.5 the other branch.
DERIVATIVE_GAMMAS = [0.5, 3.0, 0.0, -1.5]


@pytest.mark.parametrize("gamma", DERIVATIVE_GAMMAS)
@pytest.mark.parametrize("kind", ["index", "smoothed", "probabilities"])
def test_first_and_second_derivatives(device, kind, gamma):
    z = torch.randn(3, 3, 2, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([[0, 2], [1, -100], [2, 1]], device=device)
    soft = torch.rand(3, 3, 2, dtype=torch.float64, device=device, requires_grad=kind == "probabilities")
    weight = torch.rand(3, dtype=torch.float64, device=device)
    # gamma = 0 as a tensor is a kink (the sign rule): finite differences there see two different branches.
    g = torch.full((3, 1), gamma, dtype=torch.float64, device=device, requires_grad=gamma != 0)

    def function(z, t, g, reduction):
        t = t if kind == "probabilities" else target
        smoothing = 0.1 if kind == "smoothed" else 0.0
        return fk.focal_loss(z, t, g, weight=weight, label_smoothing=smoothing, reduction=reduction)

    assert torch.autograd.gradcheck(function, (z, soft, g, "mean"))
    assert torch.autograd.gradcheck(function, (z, soft, g, "none"))
    assert torch.autograd.gradgradcheck(function, (z, soft, g, "none"))


@pytest.mark.parametrize("gamma", DERIVATIVE_GAMMAS)
def test_second_derivatives_of_the_detached_modulation(device, gamma):
    # The factor is a constant by decree, which finite differences cannot know: the reference can.
    z = torch.randn(4, 3, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([0, 1, -100, 2], device=device)
    direction = torch.randn_like(z)
    results = []
    for function in (fk.focal_loss, reference.focal_loss):
        loss = function(z, target, gamma, detach_modulation=True, label_smoothing=0.1)
        (first,) = torch.autograd.grad(loss, z, create_graph=True)
        results.append((first, torch.autograd.grad((first * direction).sum(), z)[0]))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


def test_derivatives_with_a_table(device):
    z = torch.randn(3, 3, dtype=torch.float64, device=device, requires_grad=True)
    soft = torch.rand(3, 3, dtype=torch.float64, device=device, requires_grad=True)
    table = TABLE.to(device)
    target = torch.tensor([0, 1, 2], device=device)
    assert torch.autograd.gradgradcheck(lambda z: fk.focal_loss(z, target, table, reduction="sum"), (z,))
    assert torch.autograd.gradgradcheck(lambda z, t: fk.focal_loss(z, t, table), (z, soft))


@pytest.mark.parametrize("gamma", EDGE_GAMMAS)
def test_second_derivatives_of_saturated_rows(device, gamma):
    direction = [0.5, -1.25, 2.0]
    for gap in EDGE_GAPS:
        for target in (0, 1):
            z = torch.tensor([edge_row(gap)], dtype=torch.float64, device=device, requires_grad=True)
            loss = fk.focal_loss(z, torch.tensor([target], device=device), torch.tensor(gamma, dtype=torch.float64))
            (grad,) = torch.autograd.grad(loss, z, create_graph=True)
            (product,) = torch.autograd.grad(grad @ torch.tensor(direction, dtype=torch.float64, device=device), z)
            with oracle.precision():
                exact = oracle.hessian_product(lambda x, t=target: oracle.loss(x, t, gamma), edge_row(gap), direction)
            assert_close(product, torch.tensor([[float(v) for v in exact]], dtype=torch.float64))


# 1 - p or p is denormal, and 0.
@pytest.mark.parametrize(
    ("dtype", "gap"), [(torch.float32, 95.0), (torch.float32, 110.0), (torch.float64, 720.0), (torch.float64, 760.0)]
)
@pytest.mark.parametrize("gamma", [*EDGE_GAMMAS, 1e-3])
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_second_derivatives_where_a_probability_is_denormal(device, dtype, gap, gamma, smoothing):
    direction = torch.tensor([0.5, -1.25, 2.0], dtype=dtype, device=device)
    for target in (0, 1):
        z = torch.tensor([edge_row(gap)], dtype=dtype, device=device, requires_grad=True)
        number = torch.tensor(gamma, dtype=dtype, device=device, requires_grad=True)
        label = torch.tensor([target], device=device)
        loss = fk.focal_loss(z, label, number, label_smoothing=smoothing)
        first = torch.autograd.grad(loss, (z, number), create_graph=True)
        products = torch.autograd.grad((first[0] @ direction).sum() + first[1], (z, number), materialize_grads=True)
        assert all(product.isfinite().all() for product in (*first, *products))
        (grad,) = torch.autograd.grad(fk.focal_loss(z, label, number.detach()), z, create_graph=True)
        (product,) = torch.autograd.grad(grad @ direction, z)
        with oracle.precision():
            exact = oracle.hessian_product(
                lambda x, t=target: oracle.loss(x, t, gamma), edge_row(gap), direction.tolist()
            )
        assert_close(product, torch.tensor([[float(v) for v in exact]], dtype=torch.float64))


def test_gradients_accumulate_and_parameters_train(device):
    z = torch.nn.Parameter(torch.randn(8, 5, device=device))
    target = torch.randint(5, (8,), device=device)
    fk.focal_loss(z, target).backward()
    once = z.grad.clone()
    fk.focal_loss(z, target).backward()
    assert torch.equal(z.grad, 2 * once)
    optimizer = torch.optim.SGD([z], lr=1.0)
    before = fk.focal_loss(z, target).item()
    optimizer.step()
    assert fk.focal_loss(z, target).item() < before


@pytest.mark.kernels
def test_backward_twice_and_a_changed_input_are_refused(device):
    z = torch.randn(3, 4, device=device, requires_grad=True)
    target = torch.tensor([0, 1, 2], device=device)
    loss = fk.focal_loss(z, target)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    x = z * 1.0
    loss = fk.focal_loss(x, target)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_where_only_some_inputs_need_it(device):
    z = torch.randn(4, 3, device=device)
    soft = torch.rand(4, 3, device=device)
    gamma = torch.rand(4, device=device)
    everything = {"z": leaf(z), "t": leaf(soft), "g": leaf(gamma)}
    loss = fk.focal_loss(everything["z"], everything["t"], everything["g"])
    expected = dict(zip(everything, torch.autograd.grad(loss, list(everything.values())), strict=True))
    for name in everything:
        inputs = {"z": z, "t": soft, "g": gamma}
        inputs[name] = leaf(inputs[name])
        loss = fk.focal_loss(inputs["z"], inputs["t"], inputs["g"])
        assert_close(torch.autograd.grad(loss, inputs[name])[0], expected[name])
    assert not fk.focal_loss(z, soft, gamma).requires_grad
    with torch.no_grad():
        assert not fk.focal_loss(leaf(z), soft, gamma).requires_grad
    with torch.inference_mode():
        assert_close(fk.focal_loss(z, soft, gamma), loss)


# ---- torch.func and forward mode ------------------------------------------------------------------------------------


@torch_jit_warns
def test_torch_func_is_never_silently_wrong(device):
    from torch.func import grad, hessian, jacrev, jvp, vmap

    z = torch.randn(5, 4, dtype=torch.float64, device=device)
    v = torch.randn(5, 4, dtype=torch.float64, device=device)
    target = torch.tensor([0, 3, 2, 1, -100], device=device)
    soft = torch.rand(5, 4, dtype=torch.float64, device=device)
    weight = torch.rand(4, dtype=torch.float64, device=device)
    gamma = torch.tensor([0.5, 2.0, 3.0, -1.0, 1.0], dtype=torch.float64, device=device)
    for t in (target, soft):
        for g in (2.0, gamma, TABLE.to(device)):
            for options in ({}, {"weight": weight, "label_smoothing": 0.1}, {"detach_modulation": True}):

                def ours(z, t=t, g=g, options=options):
                    return fk.focal_loss(z, t, g, **options)

                def theirs(z, t=t, g=g, options=options):
                    return reference.focal_loss(z, t, g, **options)

                assert_close(grad(ours)(z), grad(theirs)(z))
                for actual, expected in zip(jvp(ours, (z,), (v,)), jvp(theirs, (z,), (v,)), strict=True):
                    assert_close(actual, expected)
                assert_close(hessian(ours)(z), hessian(theirs)(z))
                assert_close(jacrev(grad(ours))(z), hessian(theirs)(z))
    # One sample at a time: the per-sample gradients of differential privacy and influence functions.
    rows = target.clamp(min=0)
    per_sample = vmap(grad(lambda z, t, g: fk.focal_loss(z, t, g)))(z, rows, gamma)
    expected = vmap(grad(lambda z, t, g: reference.focal_loss(z, t, g)))(z, rows, gamma)
    assert_close(per_sample, expected)
    batches = torch.randn(3, 5, 4, dtype=torch.float64, device=device)
    assert_close(
        vmap(lambda z: fk.focal_loss(z, target, reduction="none"))(batches),
        torch.stack([fk.focal_loss(b, target, reduction="none") for b in batches]),
    )
    by_gamma = vmap(lambda g: fk.focal_loss(z, target, g))(gamma)
    assert_close(by_gamma, torch.stack([fk.focal_loss(z, target, g) for g in gamma]))
    assert_close(
        grad(lambda g: fk.focal_loss(z, target, g))(gamma), grad(lambda g: reference.focal_loss(z, target, g))(gamma)
    )


def test_batched_upstream_gradients_and_checkpoints(device):
    z = torch.randn(5, 4, dtype=torch.float64, device=device, requires_grad=True)
    gamma = torch.rand(5, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, -100], device=device)
    loss = fk.focal_loss(z, target, gamma, reduction="none")
    upstream = torch.randn(3, 5, dtype=torch.float64, device=device)
    batched = torch.autograd.grad(loss, (z, gamma), upstream, is_grads_batched=True, retain_graph=True)
    for b, row in enumerate(upstream):
        for whole, one in zip(batched, torch.autograd.grad(loss, (z, gamma), row, retain_graph=True), strict=True):
            assert_close(whole[b], one)
    again = torch.utils.checkpoint.checkpoint(
        lambda z: fk.focal_loss(z, target, gamma, reduction="none"), z, use_reentrant=False
    )
    assert torch.equal(
        torch.autograd.grad(again, z, upstream[0])[0], torch.autograd.grad(loss, z, upstream[0], retain_graph=True)[0]
    )


@torch_jit_warns
def test_forward_mode(device):
    import torch.autograd.forward_ad as fwd

    names = ("z", "t", "g")
    values = {
        "z": torch.randn(5, 4, dtype=torch.float64, device=device),
        "t": torch.rand(5, 4, dtype=torch.float64, device=device),
        "g": torch.rand(5, dtype=torch.float64, device=device) + 0.5,
    }
    tangents = {name: torch.randn_like(value) for name, value in values.items()}
    # Each input alone, and with gradients off, where a shortcut would lose the tangent.
    for name in names:
        for grad_mode in (True, False):
            results = []
            for function in (fk.focal_loss, reference.focal_loss):
                with torch.set_grad_enabled(grad_mode), fwd.dual_level():
                    inputs = dict(values)
                    inputs[name] = fwd.make_dual(values[name], tangents[name])
                    results.append(fwd.unpack_dual(function(inputs["z"], inputs["t"], inputs["g"])))
            assert results[0].tangent is not None
            assert_close(results[0].primal, results[1].primal)
            assert_close(results[0].tangent, results[1].tangent)
    z = leaf(values["z"])
    target = torch.randint(4, (5,), device=device)
    # float64 finite differences of the forward mode, and forward over reverse.
    assert torch.autograd.gradcheck(lambda z: fk.focal_loss(z, target), (z,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda z: fk.focal_loss(z, target), (z,), check_fwd_over_rev=True)


# ---- compile, export, autocast, subclasses --------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


def test_compiles_as_one_graph_without_recompilation_when_gamma_changes(device, dynamo):
    z = torch.randn(6, 5, device=device, requires_grad=True)
    target = torch.randint(5, (6,), device=device)

    def step(z, target, gamma):
        return fk.focal_loss(z * 2, target, gamma)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    # torch takes every number for a constant until it sees a second value: that one change costs a compilation.
    compiled(z, target, 3.0)
    compiled(z, target, 2.5)
    with dynamo.config.patch(error_on_recompile=True):
        for gamma in (2.0, 0.5, 0.0, -1.5, 3.25, 1.0, 4.0, 5.0, 6.0, 7.0):
            loss, expected = compiled(z, target, gamma), step(z, target, gamma)
            assert_close(loss, expected)
            upstream = torch.randn((), device=device)
            grads = [torch.autograd.grad(v, z, upstream)[0] for v in (loss, expected)]
            assert_close(grads[0], grads[1])


def test_every_form_of_the_arguments_compiles(device, dynamo):
    z = torch.randn(6, 5, 3, device=device, requires_grad=True)
    target = torch.randint(5, (6, 3), device=device)
    soft = torch.rand(6, 5, 3, device=device)
    weight = torch.rand(5, device=device)
    cases = [
        (target, torch.rand(6, 1, device=device, requires_grad=True), {}),
        (target, TABLE.to(device), {"weight": weight, "reduction": "sum"}),
        (soft, 2.0, {"label_smoothing": 0.1, "reduction": "none"}),
        (target.int(), 1, {"detach_modulation": True, "ignore_index": 1}),
    ]
    for t, gamma, options in cases:
        function = functools.partial(fk.focal_loss, **options)
        compiled = torch.compile(
            lambda z, t, g, function=function: function(z, t, g), fullgraph=True, backend="aot_eager"
        )
        inputs = [z, gamma] if isinstance(gamma, torch.Tensor) else [z]
        results = []
        for f in (compiled, function):
            loss = f(z, t, gamma)
            results.append((loss, *torch.autograd.grad(loss.sum(), inputs)))
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected)


def test_compiles_with_dynamic_shapes(device, dynamo):
    compiled = torch.compile(fk.focal_loss, fullgraph=True, backend="aot_eager", dynamic=True)
    with dynamo.config.patch(error_on_recompile=True):
        for n in (4, 9, 17):
            z = torch.randn(n, 5, device=device, requires_grad=True)
            target = torch.randint(5, (n,), device=device)
            loss = compiled(z, target)
            assert_close(loss, fk.focal_loss(z, target))
            loss.backward()
            assert z.grad.isfinite().all()


@torch_jit_warns
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # advice, on every GPU that has them
def test_compiles_with_inductor(device, dynamo):
    # The default backend, once: it calls a C++ compiler, which takes seconds.
    z = torch.randn(6, 5, device=device, requires_grad=True)
    target = torch.randint(5, (6,), device=device)
    compiled = torch.compile(lambda z, t: fk.focal_loss(z, t, 1.5), fullgraph=True)
    grads = []
    for function in (compiled, lambda z, t: fk.focal_loss(z, t, 1.5)):
        loss = function(z, target)
        grads.append(torch.autograd.grad(loss, z)[0])
    assert_close(loss, compiled(z, target))
    assert_close(*grads)


@pytest.mark.kernels
def test_exports(device):
    class Loss(torch.nn.Module):
        def forward(self, z, target):
            return fk.focal_loss(z, target, 2.0, label_smoothing=0.1)

    z, target = torch.randn(4, 5, device=device), torch.tensor([0, 4, 1, 2], device=device)
    exported = torch.export.export(Loss(), (z, target))
    assert any("focalkern" in str(node.target) for node in exported.graph.nodes)
    assert_close(exported.module()(z, target), fk.focal_loss(z, target, 2.0, label_smoothing=0.1))


def test_autocast_takes_bfloat16_logits_as_they_are(device):
    z = torch.randn(64, 40, device=device).bfloat16().requires_grad_()
    target = torch.randint(40, (64,), device=device)
    for kind in (target, torch.rand(64, 40, device=device).bfloat16()):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = fk.focal_loss(z, kind, 1.5)
            assert loss.dtype == torch.float32
            unreduced = fk.focal_loss(z, kind, 1.5, reduction="none")
            assert unreduced.dtype == torch.float32
        expected = reference.focal_loss(leaf(z.double()), kind.double() if kind is not target else kind, 1.5)
        assert_close(loss, expected)
        (grad,) = torch.autograd.grad(loss, z)
        assert grad.dtype == torch.bfloat16
    # Outside autocast the loss has the dtype of the logits, as torch's.
    assert fk.focal_loss(z, target).dtype == torch.bfloat16
    # A loss computed in float64 stays there.
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert fk.focal_loss(z.double(), target).dtype == F.cross_entropy(z.double(), target).dtype


def test_meta_tensors_give_shapes():
    z = torch.empty(4, 5, 3, device="meta", requires_grad=True)
    target = torch.empty(4, 3, dtype=torch.int64, device="meta")
    assert fk.focal_loss(z, target).shape == ()
    loss = fk.focal_loss(z, target, reduction="none")
    assert loss.shape == (4, 3)
    assert loss.device.type == "meta"
    (grad,) = torch.autograd.grad(loss.sum(), z)
    assert grad.shape == z.shape


@pytest.mark.kernels
def test_opcheck(device):
    z = torch.randn(6, 5, 2, device=device, requires_grad=True)
    target = torch.randint(5, (6, 2), device=device)
    soft = torch.rand(6, 5, 2, device=device, requires_grad=True)
    gamma = torch.rand(6, 1, device=device, requires_grad=True)
    edges, gammas = TABLE.to(device).edges, TABLE.to(device).gammas
    weight = torch.rand(5, device=device)
    number = torch.tensor(2.0, dtype=torch.float64)
    # Each form of target and gamma, each reduction (0 none, 1 mean, 2 sum), and channels last.
    for arguments in (
        (z, target, number, None, None, 1, -100, 0.0, False, False),
        (z, target.int(), gamma, None, weight, 0, 2, 0.1, False, False),
        (z, soft, gamma, None, None, 2, -100, 0.0, True, False),
        (leaf(z.bfloat16()), target, gammas, edges, None, 0, -100, 0.0, False, True),
        (leaf(z.transpose(1, 2).contiguous().transpose(1, 2)), target, number, None, None, 0, -100, 0.0, False, False),
    ):
        torch.library.opcheck(torch.ops.focalkern.focal_loss_forward, arguments)
        z_, t_, *others = arguments
        with torch.no_grad():
            loss, saved = torch.ops.focalkern.focal_loss_forward(*arguments)
            z_, t_, *others = (a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
            gamma_, edges_, weight_, *rest = others
            needed = [True, t_.is_floating_point(), edges_ is None]
            backward = (torch.randn_like(loss), z_, t_, gamma_, edges_, weight_, saved, *rest[:4], needed)
            torch.library.opcheck(torch.ops.focalkern.focal_loss_backward, backward)


class Marked(torch.Tensor):
    """A subclass that only changes the type."""


def test_subclasses_and_copies(device):
    z = torch.randn(4, 5, device=device)
    target = torch.tensor([0, 1, 2, 3], device=device)
    expected = fk.focal_loss(z, target)
    marked = fk.focal_loss(z.as_subclass(Marked), target)
    assert isinstance(marked, Marked)
    assert_close(marked.as_subclass(torch.Tensor), expected)
    again = copy.deepcopy(leaf(z))
    assert_close(fk.focal_loss(again, target), expected)


# ---- determinism and memory -----------------------------------------------------------------------------------------


def results_for_bits(z, target, gamma, **options):
    z = leaf(z)
    gamma = leaf(gamma) if isinstance(gamma, torch.Tensor) else gamma
    loss = fk.focal_loss(z, target, gamma, **options)
    inputs = [z, gamma] if isinstance(gamma, torch.Tensor) else [z]
    return [loss, *torch.autograd.grad(loss.sum(), inputs)]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# Many short rows (a model's classes), and few long ones (a vocabulary); both are cut into several units of work.
@pytest.mark.parametrize(("n", "n_classes"), [(20000, 10), (61, 4097)])
def test_the_same_bits_on_every_run_and_for_every_number_of_threads(device, threads, n, n_classes):
    z = torch.randn(n, n_classes, device=device)
    target = torch.randint(n_classes, (n,), device=device)
    soft = torch.rand(n, n_classes, device=device)
    one_gamma = torch.tensor(0.7, device=device)
    cases = [(target, 2.0, {}), (target, one_gamma, {"reduction": "sum"}), (soft, 2.0, {"label_smoothing": 0.1})]
    for t, gamma, options in cases:
        threads(1)
        expected = results_for_bits(z, t, gamma, **options)
        for count in (1, 2, 3):
            threads(count)
            for actual, bits in zip(results_for_bits(z, t, gamma, **options), expected, strict=True):
                assert torch.equal(actual, bits)


def test_reduced_sums_of_many_rows_are_exact_enough(device):
    # A float32 running sum over 200000 rows would be off by more than the tolerance.
    z = torch.randn(200_000, 4, device=device)
    target = torch.randint(4, (200_000,), device=device)
    for reduction in ("mean", "sum"):
        expected = reference.focal_loss(z.double(), target, 0.5, reduction=reduction)
        actual = fk.focal_loss(z, target, 0.5, reduction=reduction)
        assert abs(actual.item() - expected.item()) <= 2.0**-23 * expected.item()


def allocated_bytes(function):
    """What the operators of a call allocate on the CPU, whether they free it again or not."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        function()
    allocations = [e.self_cpu_memory_usage for e in profile.events() if e.name.startswith(("aten::", "focalkern::"))]
    assert sum(allocations) > 0
    return sum(a for a in allocations if a > 0)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(256, 500),
        lambda: torch.randn(256, 500).bfloat16(),
        lambda: torch.randn(8, 100, 16, 10),
        lambda: torch.randn(8, 100, 16, 10).contiguous(memory_format=torch.channels_last),
    ],
    ids=["rows", "bfloat16", "channels first", "channels last"],
)
def test_no_temporary_of_the_size_of_the_logits(make):
    z = leaf(make())
    rows = z.numel() // z.shape[1]
    target = torch.randint(z.shape[1], z.shape[:1] + z.shape[2:])
    for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1}):
        kept = []
        forward = allocated_bytes(lambda options=options, kept=kept: kept.append(fk.focal_loss(z, target, **options)))
        # Three float32 numbers per row, the unreduced loss in float32 and in the dtype of the logits; and small change.
        assert forward <= rows * 5 * 4 + 4096
        upstream = torch.ones_like(kept[0])
        backward = allocated_bytes(lambda kept=kept, upstream=upstream: torch.autograd.grad(kept[0], z, upstream))
        # The gradient, and an upstream gradient per row in float32.
        gradient = z.numel() * z.element_size()
        assert gradient <= backward <= gradient + rows * 5 * 4 + 4096


# ---- CUDA only ------------------------------------------------------------------------------------------------------


def test_cuda_step_does_not_wait_for_the_device(cuda):
    z = torch.randn(64, 10, device=cuda, requires_grad=True)
    target = torch.randint(10, (64,), device=cuda)
    gamma = torch.rand(64, device=cuda)
    table = TABLE.to(cuda)
    fk.focal_loss(z, target).backward()
    with no_waiting():
        for g in (2.0, gamma, table):
            for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}):
                fk.focal_loss(z, target, g, **options).sum().backward()


def test_cuda_graph_capture(cuda):
    z = torch.randn(64, 10, device=cuda, requires_grad=True)
    target = torch.randint(10, (64,), device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(fk.focal_loss(z, target), z)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = fk.focal_loss(z, target)
        (grad,) = torch.autograd.grad(loss, z)
    with torch.no_grad():
        z.copy_(torch.randn_like(z))
    graph.replay()
    expected = fk.focal_loss(z, target)
    assert torch.equal(loss, expected)
    assert torch.equal(grad, torch.autograd.grad(expected, z)[0])


def test_cuda_labels_out_of_range_give_nan_rows(cuda):
    z = torch.randn(4, 5, device=cuda, requires_grad=True)
    target = torch.tensor([0, 5, -1, 2**40], device=cuda)
    loss = fk.focal_loss(z, target, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, True]
    (grad,) = torch.autograd.grad(loss.nan_to_num().sum(), z, retain_graph=True)
    (grad,) = torch.autograd.grad(loss.sum(), z)
    assert grad.isnan().all(1).tolist() == [False, True, True, True]
    assert fk.focal_loss(z, target).isnan()


# ---- bad input ------------------------------------------------------------------------------------------------------

Z = torch.zeros(4, 3)
T = torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        # Shapes.
        ((torch.zeros(()), T), {}, ValueError, r"input must .*got"),
        ((Z, T[:2]), {}, ValueError, r"target must be \[N\] = \[4\], got \[2\]"),
        ((Z, T[None]), {}, ValueError, r"target must be .*\[4\], got \[1, 4\]"),
        ((torch.zeros(4, 3, 2), T), {}, ValueError, r"target must be .*\[4, 2\], got \[4\]"),
        ((torch.zeros(3), T), {}, ValueError, r"target must be .*\[\], .* logits, got \[4\]"),
        ((Z, torch.zeros(4, 2)), {}, ValueError, r"target of class probabilities must .*\[4, 3\], got \[4, 2\]"),
        ((torch.zeros(4, 0), T), {}, ValueError, r"input must .*class"),
        ((Z, T), {"weight": torch.ones(4)}, ValueError, r"weight must be \[C\] = \[3\], got \[4\]"),
        ((Z, T), {"weight": torch.ones(3, 1)}, ValueError, r"weight must be \[C\] = \[3\], got \[3, 1\]"),
        ((Z, T, torch.ones(3)), {}, ValueError, r"gamma must be .*\[4\], got \[3\]"),
        # Along the class axis: refused also where it would broadcast by luck.
        ((Z, T, torch.ones(4, 3)), {}, ValueError, r"gamma must be .*\[4\], got \[4, 3\]"),
        ((Z, T, torch.ones(4, 1)), {}, ValueError, r"gamma must be .*\[4\], got \[4, 1\]"),
        ((Z, T, torch.ones(1, 4)), {}, ValueError, r"gamma must be .*\[4\], got \[1, 4\]"),
        # Dtypes and types.
        ((Z.int(), T), {}, TypeError, r"input must be .*got .*(Int|int32)"),
        ((Z.to(torch.complex64), T), {}, TypeError, r"input must be .*got .*[Cc]omplex"),
        ((Z, T.bool()), {}, TypeError, r"target must be .*got .*[Bb]ool"),
        ((Z, T.to(torch.int16)), {}, TypeError, r"target must be .*got .*(Short|int16)"),
        ((Z, torch.zeros(4, 3, dtype=torch.int64)), {}, ValueError, r"target must be .*\[4\], got \[4, 3\]"),
        ((Z, T, torch.tensor(2)), {}, TypeError, r"gamma must be .*got .*(Long|int64)"),
        ((Z, T, None), {}, TypeError, r"gamma must be .*got"),
        ((Z, T, [2.0] * 4), {}, TypeError, r"gamma must be .*got"),
        ((Z, T), {"weight": torch.ones(3, dtype=torch.int64)}, TypeError, r"weight must be .*got"),
        ((Z.tolist(), T), {}, TypeError, r"input must be .*got"),
        ((Z, T.tolist()), {}, TypeError, r"target must be .*got"),
        # Values.
        ((Z, T, math.nan), {}, ValueError, r"gamma must be .*got nan"),
        ((Z, T, math.inf), {}, ValueError, r"gamma must be .*got inf"),
        ((Z, T), {"label_smoothing": -0.1}, ValueError, r"label_smoothing must be .*got -0\.1"),
        ((Z, T), {"label_smoothing": 1.1}, ValueError, r"label_smoothing must be .*got 1\.1"),
        ((Z, T), {"label_smoothing": math.nan}, ValueError, r"label_smoothing must be .*got nan"),
        ((Z, T), {"reduction": "avg"}, ValueError, r"reduction must be .*got .*avg"),
        # Devices.
        ((Z, T.to("meta")), {}, ValueError, r"target must be on .*cpu, got meta"),
        ((Z, T), {"weight": torch.ones(3, device="meta")}, ValueError, r"weight must be on .*cpu, got meta"),
        ((Z, T, torch.ones(4, device="meta")), {}, ValueError, r"gamma must be on .*cpu, got meta"),
    ],
)
def test_bad_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match="^focal_loss: " + message):
        fk.focal_loss(*arguments, **options)


def test_options_are_keywords():
    with pytest.raises(TypeError):
        fk.focal_loss(Z, T, 2.0, None)


# The first label out of range, in row 2; below 0; ignored rows before it; and in a layout of several dimensions.
@pytest.mark.parametrize("bad", [3, -1, -99, 2**32, 2**32 + 1, 2**40, -(2**62), -(2**63)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_out_of_range_on_the_cpu_name_the_row(bad, smoothing):
    target = torch.tensor([0, -100, bad, 2, 7])
    for reduction in ("none", "mean", "sum"):
        with pytest.raises(IndexError, match=rf"^focal_loss: target.*\[0, 3\).*got {bad}.*row 2"):
            fk.focal_loss(torch.zeros(5, 3), target, reduction=reduction, label_smoothing=smoothing)
    spread = torch.zeros(5, 3, 2)
    with pytest.raises(IndexError, match=rf"got {bad}"):
        fk.focal_loss(spread, target[:, None].expand(5, 2), label_smoothing=smoothing)
    with pytest.raises(IndexError, match=rf"got {bad}"):
        fk.focal_loss(torch.zeros(3), torch.tensor(bad), label_smoothing=smoothing)


def test_a_large_batch_names_its_first_bad_label_on_any_number_of_threads(threads):
    target = torch.zeros(50_000, dtype=torch.int64)
    target[[40_000, 30_001, 49_999]] = torch.tensor([9, 8, 7])
    for count in (1, 2, 3):
        threads(count)
        with pytest.raises(IndexError, match=r"got 8.*row 30001"):
            fk.focal_loss(torch.zeros(50_000, 3), target)


def test_check_labels(device):
    good = torch.tensor([0, 2, -100, 1], device=device)
    assert fk.check_labels(good, 3) is None
    assert fk.check_labels(good[:0], 3) is None
    with pytest.raises(IndexError, match=r"target.*got 2.*row 1"):
        fk.check_labels(good, 2)
    with pytest.raises(IndexError, match=r"target.*got -100.*row 2"):
        fk.check_labels(good, 3, ignore_index=-1)
    assert fk.check_labels(torch.tensor([255, 1], dtype=torch.uint8, device=device), 2, ignore_index=255) is None
    with pytest.raises(TypeError, match="target"):
        fk.check_labels(good.double(), 3)


def test_validate_environment_checks_labels(device, monkeypatch):
    monkeypatch.setenv("FOCALKERN_VALIDATE", "1")
    z = torch.zeros(3, 4, device=device)
    assert_close(fk.focal_loss(z, torch.tensor([0, 3, -100], device=device), 0.0), torch.tensor(math.log(4)))
    with pytest.raises(IndexError, match=r"got 4.*row 1"):
        fk.focal_loss(z, torch.tensor([0, 4, 1], device=device))


def test_strong_inverse_focal_loss_warns_once_about_its_negative_coefficient():
    with pytest.warns(UserWarning, match=r"focal_loss: gamma .*-4"):
        fk.focal_loss(Z, T, -4.0)


# ---- properties -----------------------------------------------------------------------------------------------------

# Logits up to 30 saturate float32 (1 - p = 1e-13) without leaving the range where sums of two losses are exact.
logits_strategy = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=6)
gamma_strategy = st.floats(-6, 6, width=32)


@PROPERTY
@given(logits_strategy, gamma_strategy, st.data())
def test_property_loss_is_nonnegative_and_invariant_to_shifts_and_permutations(row, gamma, data):
    z = torch.tensor([row], dtype=torch.float64)
    y = data.draw(st.integers(0, len(row) - 1))
    loss = fk.focal_loss(z, torch.tensor([y]), torch.tensor(gamma, dtype=torch.float64))
    assert loss >= 0
    assert loss.isfinite()
    # Sixteenths are exact in float64 beside these logits.
    shift = data.draw(st.integers(-1000, 1000)) / 16
    shifted = fk.focal_loss(z + shift, torch.tensor([y]), torch.tensor(gamma, dtype=torch.float64))
    torch.testing.assert_close(shifted, loss, rtol=1e-10, atol=1e-12)
    order = data.draw(st.permutations(range(len(row))))
    x, permuted = leaf(z), leaf(z[:, order])
    g = torch.tensor(gamma, dtype=torch.float64)
    a, b = fk.focal_loss(x, torch.tensor([y]), g), fk.focal_loss(permuted, torch.tensor([order.index(y)]), g)
    assert_close(b, a)
    assert_close(torch.autograd.grad(b, permuted)[0], torch.autograd.grad(a, x)[0][:, order])


@PROPERTY
@given(logits_strategy, st.lists(gamma_strategy, min_size=2, max_size=5), st.data())
def test_property_loss_falls_with_gamma(row, gammas, data):
    y = data.draw(st.integers(0, len(row) - 1))
    g = torch.tensor(sorted(gammas), dtype=torch.float64)
    z = torch.tensor([row], dtype=torch.float64).expand(len(g), -1)
    losses = fk.focal_loss(z, torch.full((len(g),), y), g, reduction="none")
    assert (losses[1:] <= losses[:-1] * (1 + 1e-12)).all()


@PROPERTY
@given(logits_strategy, gamma_strategy, st.data())
def test_property_gradient_over_classes_sums_to_zero_and_scales_with_the_upstream(row, gamma, data):
    y = data.draw(st.integers(0, len(row) - 1))
    z = torch.tensor([row], dtype=torch.float64, requires_grad=True)
    loss = fk.focal_loss(z, torch.tensor([y]), torch.tensor(gamma, dtype=torch.float64))
    (grad,) = torch.autograd.grad(loss, z, retain_graph=True)
    assert abs(grad.sum().item()) <= 1e-13 * (1 + grad.abs().sum().item())
    (twice,) = torch.autograd.grad(loss, z, torch.tensor(-2.0, dtype=torch.float64))
    assert_close(twice, -2 * grad)


@PROPERTY
@given(st.lists(logits_strategy.filter(lambda r: len(r) >= 3).map(lambda r: r[:3]), min_size=1, max_size=5), st.data())
def test_property_a_batch_is_its_rows(rows, data):
    z = torch.tensor(rows)
    target = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    gamma = data.draw(st.sampled_from([2.0, 0.5, 0.0, -1.0, TABLE]))
    whole = fk.focal_loss(z, target, gamma, reduction="none")
    alone = torch.stack([fk.focal_loss(r, t, gamma) for r, t in zip(z, target, strict=True)])
    assert_close(whole, alone)


def test_infinite_logits_have_no_gradient_for_gamma(device):
    # log(1 - p) log p has the limit 0 at p = 0.
    z = torch.tensor([[0.0, -math.inf, 1.0]], dtype=torch.float64, device=device)
    for gamma in (2.0, 0.5, 0.0, -2.0):
        g = torch.tensor([gamma], dtype=torch.float64, device=device, requires_grad=True)
        for target in (torch.tensor([1], device=device), torch.tensor([[0.0, 1.0, 0.0]], device=device).double()):
            assert torch.autograd.grad(fk.focal_loss(z, target, g), g)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Z, T, "2"), {}, TypeError, r"gamma must be .*got"),
        ((Z, T), {"weight": [1.0, 1.0, 1.0]}, TypeError, r"weight must be .*got"),
        ((Z, T), {"ignore_index": 0.5}, TypeError, r"ignore_index must be .*got"),
        ((Z, T), {"label_smoothing": "0.1"}, TypeError, r"label_smoothing must be .*got"),
    ],
)
def test_bad_types_are_named(arguments, options, error, message):
    with pytest.raises(error, match="^focal_loss: " + message):
        fk.focal_loss(*arguments, **options)


def test_layouts_without_elements_in_memory_are_refused():
    for z in (Z.to_sparse(), Z.to_mkldnn()):
        with pytest.raises((NotImplementedError, TypeError, ValueError), match=r"^focal_loss: input"):
            fk.focal_loss(z, T)


@pytest.mark.kernels
def test_opcheck_of_a_layout_that_is_copied(device):
    # The gradient of the fake kernel and of the real one must have the same strides.
    z = torch.randn(2, 5, 6, device=device).permute(2, 1, 0)
    target = torch.randint(5, (6, 2), device=device)
    number = torch.tensor(2.0, dtype=torch.float64)
    loss, saved = torch.ops.focalkern.focal_loss_forward(z, target, number, None, None, 0, -100, 0.0, False, False)
    arguments = (torch.randn_like(loss), z, target, number, None, None, saved, 0, -100, 0.0, False)
    torch.library.opcheck(torch.ops.focalkern.focal_loss_backward, (*arguments, [True, False, False]))


# Every pair, and the two promotions, to float32 and to float64, on the compiled road too.
@pytest.mark.parametrize("logits_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("target_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_class_probabilities_of_another_dtype_promote_as_in_torch(device, dynamo, logits_dtype, target_dtype):
    z = torch.randn(4, 5, device=device).to(logits_dtype).requires_grad_()
    target = torch.rand(4, 5, device=device).softmax(1).to(target_dtype)
    roads = [fk.focal_loss]
    if (logits_dtype, target_dtype) in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        roads.append(torch.compile(fk.focal_loss, fullgraph=True, backend="aot_eager"))
    for road in roads:
        loss = road(z, target, 1.0)
        assert loss.dtype == F.cross_entropy(z.detach(), target).dtype
        assert torch.autograd.grad(loss, z)[0].dtype == logits_dtype


def test_infinite_logits_spoil_soft_targets_too(device):
    z = torch.tensor([[math.inf, 0.0, 0.0]], device=device, requires_grad=True)
    loss = fk.focal_loss(z, torch.tensor([[0.0, 0.5, 0.5]], device=device))
    assert loss.isnan()
    assert torch.autograd.grad(loss, z)[0].isnan().all()


def test_empty_batch_of_any_strides(device):
    z = torch.empty(4, 3, 5, 0, device=device).permute(3, 2, 1, 0).requires_grad_()
    loss = fk.focal_loss(z, torch.empty(0, 3, 4, dtype=torch.int64, device=device), reduction="none")
    assert loss.shape == (0, 3, 4)
    assert torch.autograd.grad(loss.sum(), z)[0].shape == z.shape


@pytest.mark.kernels
def test_backward_operator_takes_only_what_the_forward_pass_saved():
    z, target, number = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.tensor(2.0, dtype=torch.float64)
    _, saved = torch.ops.focalkern.focal_loss_forward(z, target, number, None, None, 1, -100, 0.0, False, False)
    strided = torch.stack([saved, saved], dim=1)[:, 0]
    for wrong in (strided, saved[:-1], saved.double()):
        with pytest.raises(ValueError, match=r"^focal_loss: saved must be"):
            torch.ops.focalkern.focal_loss_backward(
                torch.ones(()), z, target, number, None, None, wrong, 1, -100, 0.0, False, [True, False, False]
            )
