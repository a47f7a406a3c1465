"""Digits of fk.focal_loss: 300 digits at the edges, certain and unlikely targets, saturated rows."""

import functools
import math

import mpmath
import oracle
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from conftest import TOLERANCE, assert_close
from focal_cases import EDGE_GAMMAS, EDGE_GAPS, FLOATS, TABLE, edge_row, leaf

import focalkern as fk
from focalkern.ops._backend import has_kernels


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
                # float64 keeps its relative accuracy for every magnitude; float32 has its contract.
                floor = 1e-290 if dtype == torch.float64 else atol
                assert abs(a - e) <= rtol * abs(e) + floor, (gap, target, a, e)
            # The same with soft targets, whose loop processes every class.
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
    # One gamma for all rows or one per row, rows with equal or different weights: each has its own loop. More rows than
    # a vector.
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
    # The loss is proportional to a power of 1 - p, which has all its digits.
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
    # The target is the largest class, but p is small: log(1 - p) is not a difference of large logarithms.
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
    # p is on an edge of the table, and rounding decides which gamma applies: the same one for loss and gradient.
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
        # p = 0 in another class without a share in the target: it contributes nothing.
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
        # With a share, through smoothing, the loss is infinite as in torch.
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


def test_infinite_logits_have_no_gradient_for_gamma(device):
    # log(1 - p) log p has the limit 0 at p = 0.
    z = torch.tensor([[0.0, -math.inf, 1.0]], dtype=torch.float64, device=device)
    for gamma in (2.0, 0.5, 0.0, -2.0):
        g = torch.tensor([gamma], dtype=torch.float64, device=device, requires_grad=True)
        for target in (torch.tensor([1], device=device), torch.tensor([[0.0, 1.0, 0.0]], device=device).double()):
            assert torch.autograd.grad(fk.focal_loss(z, target, g), g)[0] == 0
