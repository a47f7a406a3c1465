"""fk.focal_calibration_map and its binary form compared with the float64 reference and definitions at 300 digits."""

import functools
import math

import mpmath
import oracle
import pytest
import torch
import torch._dynamo
from conftest import TOLERANCE, assert_close
from map_cases import EDGE_GAPS, edge_row, leaf

import focalkern as fk
from focalkern import reference

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# -0.99 is near the edge of the domain, -0.5 and 5 are the ends of the paper's grid, 0 is plain temperature scaling.
GAMMAS = [5.0, 1.0, 0.25, 0.0, -0.5, -0.99]


def check_against_reference(function, reference_function, inputs, dtype=None, **options):
    """Compares value and every gradient, for a random upstream gradient, with the float64 reference."""
    ours = [leaf(v) if isinstance(v, torch.Tensor) else v for v in inputs]
    theirs = [leaf(v.double()) if isinstance(v, torch.Tensor) else v for v in inputs]
    actual, expected = function(*ours, **options), reference_function(*theirs, **options)
    assert actual.dtype == inputs[0].dtype
    assert actual.shape == expected.shape
    dtype = dtype or actual.dtype
    assert_close(actual, expected, dtype)
    upstream = torch.randn_like(actual)
    tensors = [v for v in ours if isinstance(v, torch.Tensor)]
    grads = torch.autograd.grad(actual, tensors, upstream)
    exact = torch.autograd.grad(expected, [v for v in theirs if isinstance(v, torch.Tensor)], upstream.double())
    for a, e, source in zip(grads, exact, tensors, strict=True):
        assert a.dtype == source.dtype
        assert a.shape == source.shape
        # Gradients are sums of terms of both signs; their error is relative to the largest term.
        scale = max(1.0, e.abs().max().item(), upstream.double().square().sum().sqrt().item()) if e.numel() else 1.0
        if source is tensors[-1] and len(tensors) == 3 and e.dim() and e.shape == exact[0].shape[:-1]:
            # dL/dT = sum_k dL/dz_k (z_t - z_k) / T, where each term has the error of a rounded dL/dz_k.
            z, temperature = (v.detach().double() for v in (tensors[0], source))
            away = (z.amax(-1, keepdim=True) - z) / temperature.unsqueeze(-1)
            scale = (exact[0] * away).norm(dim=-1).clamp(min=scale)
        assert_close(a.double() / scale, e / scale, dtype)


check_map = functools.partial(check_against_reference, fk.focal_calibration_map, reference.focal_calibration_map)

check_binary = functools.partial(
    check_against_reference, fk.binary_focal_calibration_map, reference.binary_focal_calibration_map
)


@functools.cache
def edge_oracle(gap: float, gamma: float, temperature: float):
    """The log map, and the gradients of three fixed combinations of it in [z, gamma, T]."""
    upstream = [0.5, -1.25, 2.0]
    with oracle.precision():
        row = edge_row(gap)
        log_map = oracle.log_map(row, gamma, temperature)

        def combined(x):
            return mpmath.fdot(oracle.log_map(x[:3], x[3], x[4]), upstream)

        grads = oracle.gradient(combined, [*row, gamma, temperature])
        return [float(v) for v in log_map], [float(mpmath.exp(v)) for v in log_map], [float(v) for v in grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_value_and_gradients_at_300_digits(device, dtype, gamma):
    rtol, atol = TOLERANCE[dtype]
    for gap in EDGE_GAPS:
        for temperature in (1.0, 2.5):
            z = torch.tensor([edge_row(gap)], dtype=dtype, device=device, requires_grad=True)
            # -0.99 is not a float32 number; the kernel keeps the row's gamma in float64.
            g = torch.tensor([gamma], dtype=torch.float64, device=device, requires_grad=True)
            t = torch.tensor([temperature], dtype=dtype, device=device, requires_grad=True)
            exact_log, exact_p, exact_grads = edge_oracle(gap, gamma, temperature)
            log_p = fk.focal_calibration_map(z, g, t, log=True)
            p = fk.focal_calibration_map(z, g, t)
            upstream = torch.tensor([[0.5, -1.25, 2.0]], dtype=dtype, device=device)
            grads = torch.autograd.grad(log_p, (z, g, t), upstream)
            # Gradients are sums of terms of the magnitude of the largest one.
            scale = max(abs(v) for v in exact_grads)
            # gamma is within 0.01 of the pole at -1, so the derivative in gamma is 100 times larger.
            condition = 1 / (1 + gamma) if gamma < 0 else 1.0
            for a, e in zip(log_p.flatten().tolist(), exact_log, strict=True):
                assert abs(a - e) <= condition * rtol * abs(e) + condition * atol, (gap, temperature, a, e)
            for a, e in zip(p.flatten().tolist(), exact_p, strict=True):
                assert abs(a - e) <= condition * atol, (gap, temperature, a, e)
            for a, e in zip(torch.cat([v.flatten().double() for v in grads]).tolist(), exact_grads, strict=True):
                assert abs(a - e) <= condition * (rtol * scale + atol), (gap, temperature, a, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [5.0, 1.0, 0.25, 0.0, -0.5])
def test_binary_value_and_gradients_at_300_digits(device, dtype, gamma):
    rtol, atol = TOLERANCE[dtype]
    # Both signs, because the two phi change roles; 0, where a derivative of |s| would jump; 80 as above.
    for s in (-80.0, -18.0, -3.0, 0.0, 0.375, 12.0, 40.0, 80.0):
        x = torch.tensor([s], dtype=dtype, device=device, requires_grad=True)
        g = torch.tensor(gamma, dtype=dtype, device=device, requires_grad=True)
        t = torch.tensor(1.5, dtype=dtype, device=device, requires_grad=True)
        with oracle.precision():
            exact = oracle.binary_log_odds(s, gamma, 1.5)
            expected = [float(v) for v in oracle.gradient(lambda v: oracle.binary_log_odds(*v), [s, gamma, 1.5])]
            probability = float(1 / (1 + mpmath.exp(-exact)))
        odds = fk.binary_focal_calibration_map(x, g, t, log_odds=True)
        assert abs(odds.item() - float(exact)) <= rtol * abs(float(exact)) + atol
        p = fk.binary_focal_calibration_map(x, g, t).item()
        # A small probability keeps its relative accuracy: that of exp at an argument of its size.
        slack = rtol * max(1.0, abs(float(exact)))
        assert abs(p - probability) <= slack * probability + 1e-38
        for a, e in zip(torch.autograd.grad(odds, (x, g, t)), expected, strict=True):
            assert abs(a.item() - e) <= rtol * abs(e) + atol * max(1, abs(s))


# ---- identities and theorems ----------------------------------------------------------------------------------------
def test_gamma_0_is_temperature_scaling(device):
    z = torch.randn(7, 5, dtype=torch.float64, device=device) * 4
    for temperature in (0.3, 1.0, 2.0):
        check = torch.log_softmax(z / temperature, -1)
        assert_close(fk.focal_calibration_map(z, 0.0, temperature, log=True), check)
        assert_close(fk.focal_calibration_map(z, 0.0, temperature), check.exp())


def test_it_inverts_the_slope_of_the_focal_loss(device):
    # p_hat is proportional to q / G(q), where G is the coefficient of the focal loss's gradient.
    z = torch.randn(6, dtype=torch.float64, device=device)
    for gamma in (0.5, 2.0):
        x = z.expand(6, 6).clone().requires_grad_()
        loss = fk.focal_loss(x, torch.arange(6, device=device), gamma, reduction="sum")
        (grad,) = torch.autograd.grad(loss, x)
        q = z.softmax(-1)
        coefficient = grad.diagonal() / (q - 1)
        expected = q / coefficient
        assert_close(fk.focal_calibration_map(z, gamma), expected / expected.sum())


def test_two_logits_are_the_binary_map(device):
    s = torch.linspace(-90, 90, 37, dtype=torch.float64, device=device)
    z = torch.stack([torch.full_like(s, 0.7), s + 0.7], -1)
    for gamma in GAMMAS:
        for temperature in (1.0, 0.4):
            two = fk.focal_calibration_map(z, gamma, temperature, log=True)
            log_odds = fk.binary_focal_calibration_map(s, gamma, temperature, log_odds=True)
            torch.testing.assert_close(two[:, 1] - two[:, 0], log_odds, rtol=1e-10, atol=1e-10)
            p = fk.binary_focal_calibration_map(s, gamma, temperature)
            assert_close(two[:, 1].exp(), p)
            # Odd in s.
            assert_close(fk.binary_focal_calibration_map(-s, gamma, temperature, log_odds=True), -log_odds)


def test_proposition_3_bounds(device):
    # sigma((gamma + 1 - log(gamma + 1) / 2) s) <= FC(s) <= sigma((gamma + 1) s) for s >= 0, reversed below.
    s = torch.linspace(0, 20, 41, dtype=torch.float64, device=device)
    for gamma in (0.1, 1.0, 3.0, 5.0):
        log_odds = fk.binary_focal_calibration_map(s, gamma, log_odds=True)
        low, high = (gamma + 1 - math.log(gamma + 1) / 2) * s, (gamma + 1) * s
        assert (log_odds >= low - 1e-12).all()
        assert (log_odds <= high + 1e-12).all()
        # Both bounds differ from the map itself.
        assert (log_odds[1:] > low[1:]).any()
        assert (log_odds[1:] < high[1:]).all()
        below = fk.binary_focal_calibration_map(-s, gamma, log_odds=True)
        assert (below <= -low + 1e-12).all()
        assert (below >= -high - 1e-12).all()


def with_top(q_top: float, n_classes: int, device) -> torch.Tensor:
    q = torch.full((n_classes,), (1 - q_top) / (n_classes - 1), dtype=torch.float64, device=device)
    q[0] = q_top
    return q


def test_proposition_5_and_its_counterexample(device):
    # Above p0, the root of G(p0) = 1, the map does not lower the confidence.
    for gamma, p0 in ((1.0, math.exp(-1)), (2.0, 0.2976), (3.0, 0.2526)):
        for n_classes in (2, 10, 100):
            for q_top in (p0 + 1e-3, 0.5, 0.9, 0.999):
                if q_top > 1 / n_classes:
                    q = with_top(q_top, n_classes, device)
                    assert fk.focal_calibration_map(q, gamma, input_kind="probs")[0] >= q_top - 1e-12
    # Below it, it may lower it.
    fallen = fk.focal_calibration_map(with_top(0.11, 10, device), 1.0, input_kind="probs")[0]
    assert abs(fallen.item() - 0.10975) < 5e-6


@pytest.mark.parametrize("dtype", FLOATS)
def test_order_is_preserved(device, dtype):
    z = (torch.randn(50, 30, device=device) * 3).to(dtype)
    # Ties and a saturated row.
    z[0, 3] = z[0, 7]
    z[1, 5] = z[1].max() + 60
    order = z.argsort(dim=-1, stable=True)
    for gamma in GAMMAS:
        for log in (False, True):
            mapped = fk.focal_calibration_map(z, gamma, 1.5, log=log).gather(-1, order)
            # A difference of one rounding may tie or change sign; the float64 map itself does not change it.
            slack = 0 if dtype == torch.float64 else mapped.abs() * 4 * torch.finfo(dtype).eps
            assert (mapped.diff(dim=-1) >= -(slack[:, 1:] if dtype != torch.float64 else 1e-12)).all()
        assert torch.equal(fk.focal_calibration_map(z[:, :2], gamma)[2:].argmax(-1), z[2:, :2].argmax(-1))


# ---- every option, shape, layout and dtype --------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", FLOATS)
# 2: the smallest; 3, 10: less than one vector; 17: a vector and one class; 100, 1000; 4097: many vectors and one class.
@pytest.mark.parametrize("n_classes", [2, 3, 10, 17, 100, 1000, 4097])
def test_class_counts_and_dtypes(device, dtype, n_classes):
    z = (torch.randn(4, n_classes, device=device) * 2).to(dtype)
    gamma = torch.tensor([-0.5, 0.0, 1.0, 5.0], device=device).to(dtype)
    temperature = torch.tensor([0.5, 1.0, 1.5, 3.0], device=device).to(dtype)
    for log in (False, True):
        check_map((z, 1.0), log=log)
        check_map((z, gamma, temperature), log=log)
    check_map((z.float().softmax(-1).to(dtype), 1.0, 1.5), input_kind="probs")


# One row, a batch, an empty batch, three and four dimensions.
@pytest.mark.parametrize("shape", [(3,), (5, 4), (0, 4), (2, 3, 4), (2, 1, 3, 5)])
def test_shapes_and_broadcasting(device, shape):
    z = torch.randn(shape, dtype=torch.float64, device=device)
    rows = shape[:-1]
    forms = [0.5, 1, torch.rand((), dtype=torch.float64, device=device)]
    forms.append(torch.rand(rows, dtype=torch.float64, device=device))
    if rows:
        forms.append(torch.rand(rows[-1], dtype=torch.float64, device=device))
        forms.append(torch.rand((1,) * len(rows), dtype=torch.float64, device=device))
        forms.append(torch.rand(rows[:1] + (1,) * (len(rows) - 1), dtype=torch.float64, device=device).expand(rows))
    for gamma in forms:
        for temperature in forms:
            temperature = temperature + 0.25 if isinstance(temperature, torch.Tensor) else temperature
            check_map((z, gamma, temperature), log=True)
    check_map((z, 0.5), log=False)


LAYOUTS = {
    "classes first": lambda z: z.transpose(0, -1).contiguous().transpose(0, -1),
    "dimensions reversed": lambda z: z.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "every second row": lambda z: z.repeat_interleave(2, 0)[::2],
    "every second class": lambda z: z.repeat_interleave(2, -1)[..., ::2],
    "rows repeated by a stride of 0": lambda z: z[:1].expand(z.shape),
    "an offset into storage": lambda z: torch.cat([z.new_zeros(3), z.flatten()])[3:].view(z.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout):
    z = LAYOUTS[layout](torch.randn(4, 3, 7, dtype=torch.float64, device=device))
    gamma = LAYOUTS[layout](torch.rand(4, 3, 2, dtype=torch.float64, device=device))[..., 0]
    check_map((z, gamma, 1.5))
    check_binary((z, gamma[..., None], 1.5))


@pytest.mark.parametrize("dtype", FLOATS)
def test_binary_shapes_and_dtypes(device, dtype):
    for shape in ((), (7,), (0,), (3, 4), (1000,)):
        s = (torch.randn(shape, device=device) * 4).to(dtype)
        for log_odds in (False, True):
            check_binary((s, 1.5), log_odds=log_odds)
            check_binary((s, -0.5, 0.7), log_odds=log_odds)
            gamma = torch.rand(shape[-1:], device=device).to(dtype)
            temperature = (torch.rand((), device=device) + 0.5).to(dtype)
            check_binary((s, gamma, temperature), log_odds=log_odds)


def test_a_log_odds_of_minus_infinity_is_a_class_that_cannot_occur(device):
    s = torch.tensor([-math.inf, 0.0], device=device, requires_grad=True)
    p = fk.binary_focal_calibration_map(s, 1.0)
    assert p.tolist() == [0.0, 0.5]
    assert fk.binary_focal_calibration_map(s, 1.0, log_odds=True).tolist() == [-math.inf, 0.0]
    assert torch.autograd.grad(p.sum(), s)[0][0] == 0
    with pytest.raises(ValueError, match=r"logits must not be \+inf, got inf at row 1"):
        fk.binary_focal_calibration_map(-s.detach().cpu().flip(0), 1.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_absent_classes(device, dtype):
    z = torch.tensor([[1.0, -math.inf, 0.5, -1.0], [0.0, -math.inf, -math.inf, -math.inf]], dtype=dtype, device=device)
    present = [0, 2, 3]
    for gamma in (1.0, 0.0, -0.5):
        x = leaf(z)
        p = fk.focal_calibration_map(x, gamma, 2.0)
        log_p = fk.focal_calibration_map(x, gamma, 2.0, log=True)
        assert p[:, 1].tolist() == [0.0, 0.0]
        assert p[1].tolist() == [1.0, 0.0, 0.0, 0.0]
        assert log_p[1].tolist() == [0.0, -math.inf, -math.inf, -math.inf]
        assert log_p[0, 1] == -math.inf
        without = leaf(z[0, present])
        expected = fk.focal_calibration_map(without, gamma, 2.0)
        assert_close(p[0, present], expected)
        upstream = torch.randn(4, device=device).to(dtype)
        (grad,) = torch.autograd.grad(p[0], x, upstream, retain_graph=True)
        assert_close(grad[0, present], torch.autograd.grad(expected, without, upstream[present])[0])
        assert grad[0, 1] == 0
        (alone,) = torch.autograd.grad(p[1], x, upstream)
        assert (alone == 0).all()


def test_probabilities_with_exact_zeros_and_ones(device):
    p = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64, device=device)
    mapped = fk.focal_calibration_map(p, 1.0, 0.5, input_kind="probs")
    assert_close(mapped, reference.focal_calibration_map(p, 1.0, 0.5, input_kind="probs"))
    assert mapped[1].tolist() == [0.0, 1.0, 0.0]
    assert_close(mapped[0], torch.tensor([0.5, 0.0, 0.5]))
    logs = fk.focal_calibration_map(p, 1.0, 0.5, input_kind="probs", log=True)
    assert_close(logs.exp(), mapped)
    # Sums within 1e-3 of 1 are renormalised.
    assert_close(fk.focal_calibration_map(p * 1.0009, 1.0, 0.5, input_kind="probs"), mapped)
    assert_close(fk.focal_calibration_map(p * 0.9991, 1.0, 0.5, input_kind="probs"), mapped)


def test_probabilities_are_never_guessed(device):
    p = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64, device=device)
    as_logits = fk.focal_calibration_map(p, 1.0)
    as_probs = fk.focal_calibration_map(p, 1.0, input_kind="probs")
    assert (as_logits - as_probs).abs().max() > 0.05
    assert_close(as_probs, fk.focal_calibration_map(p.log(), 1.0))


def test_huge_logits(device):
    for dtype in FLOATS:
        z = torch.tensor([[1e4, -1e4, 0.0], [1e4, 1e4, -1e4], [-1e4, -1e4, -1e4]], dtype=dtype, device=device)
        for gamma in (5.0, 0.0, -0.5):
            p = fk.focal_calibration_map(z, gamma)
            expected = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1 / 3] * 3], dtype=torch.float64)
            assert_close(p, expected)
            # The log-probability of -120000 is beyond float16.
            if dtype != torch.float16:
                check_map((z, gamma), log=True)


def test_a_huge_temperature_leaves_an_impossible_class_impossible(device):
    z = torch.tensor([[1.0, 0.0, -math.inf]], device=device)
    found = fk.focal_calibration_map(z, 1.0, 1e46)
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.5, 0.0]], device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_and_tensors_of_numbers_give_the_same_bits(device, dtype):
    """Numbers call the kernel directly where no gradient is wanted."""
    logits = torch.randn(5, 11, dtype=dtype, device=device)
    logits[:, 3] = -math.inf
    for gamma in (0.0, 1.7):
        number, tensor = (gamma, 1.3), torch.tensor([gamma, 1.3], dtype=torch.float64)
        expected = fk.focal_calibration_map(logits, *tensor)
        for z in (logits, logits.clone().requires_grad_()):
            assert torch.equal(fk.focal_calibration_map(z, *number), expected)
        assert torch.equal(
            fk.binary_focal_calibration_map(logits, *number), fk.binary_focal_calibration_map(logits, *tensor)
        )
