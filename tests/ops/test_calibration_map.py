"""fk.focal_calibration_map and its binary form against the reference in float64 and definitions at 300 digits."""

import functools
import math

import mpmath
import oracle
import pytest
import torch
import torch._dynamo
from conftest import TOLERANCE, assert_close, no_waiting
from hypothesis import given, settings
from hypothesis import strategies as st

import focalkern as fk
from focalkern import reference

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# -0.99 is the edge of the domain, -0.5 and 5 the ends of the paper's grid, 0 plain temperature scaling.
GAMMAS = [5.0, 1.0, 0.25, 0.0, -0.5, -0.99]
# torch's own decompositions and inductor still use torch.jit.script, whose deprecation is torch's matter.
torch_jit_warns = pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script")
PROPERTY = settings(deadline=None, derandomize=True, max_examples=60, database=None)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def check_against_reference(function, reference_function, inputs, dtype=None, **options):
    """Value and every gradient, for a random upstream gradient, against the reference in float64."""
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
        # Gradients are sums over classes, and over rows, of terms of either sign: accurate beside the largest of them.
        scale = max(1.0, e.abs().max().item(), upstream.double().square().sum().sqrt().item()) if e.numel() else 1.0
        assert_close(a.double() / scale, e / scale, dtype)


check_map = functools.partial(check_against_reference, fk.focal_calibration_map, reference.focal_calibration_map)
check_binary = functools.partial(
    check_against_reference, fk.binary_focal_calibration_map, reference.binary_focal_calibration_map
)


# ---- the edges, at 300 digits ---------------------------------------------------------------------------------------

# 80 is the largest gap of the contract; 18 is where 1 - q leaves float32's digits, 40 where it leaves float64's. 7.5
# and 12 are just past the place where a series must replace -q log(q) / (1 - q), in float32 and in float64.
EDGE_GAPS = [0.0, 1.0, 7.5, 12.0, 18.0, 40.0, 80.0]


def edge_row(gap: float) -> list[float]:
    # Multiples of 1/4: exact in float32.
    return [0.25 - gap, 0.25, -0.75 - gap] if gap else [0.25, 0.25, 0.25]


@functools.cache
def edge_oracle(gap: float, gamma: float, temperature: float):
    """log map, and the gradients of three fixed combinations of it, for [z, gamma, T]."""
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
            # -0.99 is not a float32: the row's own gamma is kept in float64 there.
            g = torch.tensor([gamma], dtype=torch.float64, device=device, requires_grad=True)
            t = torch.tensor([temperature], dtype=dtype, device=device, requires_grad=True)
            exact_log, exact_p, exact_grads = edge_oracle(gap, gamma, temperature)
            log_p = fk.focal_calibration_map(z, g, t, log=True)
            p = fk.focal_calibration_map(z, g, t)
            upstream = torch.tensor([[0.5, -1.25, 2.0]], dtype=dtype, device=device)
            grads = torch.autograd.grad(log_p, (z, g, t), upstream)
            # Gradients are sums of terms of the size of the largest.
            scale = max(abs(v) for v in exact_grads)
            # gamma within 0.01 of the pole at -1: the output's slope in gamma is 100 times steeper.
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
    # Both signs, because the two phi trade places; 0 where a derivative of |s| would jump; 80 as above.
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
    # p_hat is proportional to q / G(q), and G is the coefficient of the focal loss's gradient.
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
        # Neither bound is the map itself.
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
    # Above p0, the root of G(p0) = 1, the confidence does not fall.
    for gamma, p0 in ((1.0, math.exp(-1)), (2.0, 0.2976), (3.0, 0.2526)):
        for n_classes in (2, 10, 100):
            for q_top in (p0 + 1e-3, 0.5, 0.9, 0.999):
                if q_top > 1 / n_classes:
                    q = with_top(q_top, n_classes, device)
                    assert fk.focal_calibration_map(q, gamma, input_kind="probs")[0] >= q_top - 1e-12
    # Below it, it may.
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
            # Differences of one rounding may tie or turn; the float64 map itself does not turn them.
            slack = 0 if dtype == torch.float64 else mapped.abs() * 4 * torch.finfo(dtype).eps
            assert (mapped.diff(dim=-1) >= -(slack[:, 1:] if dtype != torch.float64 else 1e-12)).all()
        assert torch.equal(fk.focal_calibration_map(z[:, :2], gamma)[2:].argmax(-1), z[2:, :2].argmax(-1))


# ---- every option, shape, layout and dtype --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
# 2: the smallest; 3, 10: under one vector; 17: a vector and one; 100, 1000; 4097: many vectors and one.
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


# ---- derivatives ----------------------------------------------------------------------------------------------------


# Probabilities as an argument too: their derivative runs through the renormalisation.
@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("log", [False, True])
def test_first_and_second_derivatives(device, kind, log):
    z = torch.randn(3, 4, dtype=torch.float64, device=device)
    z = leaf(z.softmax(-1) if kind == "probs" else z)
    gamma = torch.tensor([0.7, -0.3, 2.0], dtype=torch.float64, device=device, requires_grad=True)
    temperature = torch.tensor(1.3, dtype=torch.float64, device=device, requires_grad=True)

    def function(z, gamma, temperature):
        # Finite differences leave the simplex by 1e-6, which the check of the row sums allows.
        return fk.focal_calibration_map(z, gamma, temperature, input_kind=kind, log=log)

    assert torch.autograd.gradcheck(function, (z, gamma, temperature))
    assert torch.autograd.gradgradcheck(function, (z, gamma, temperature))


@pytest.mark.parametrize("log_odds", [False, True])
def test_first_and_second_derivatives_of_the_binary_map(device, log_odds):
    s = torch.tensor([-2.0, 0.0, 0.5, 3.0], dtype=torch.float64, device=device, requires_grad=True)
    gamma = torch.tensor([0.7, -0.3, 2.0, 0.0], dtype=torch.float64, device=device, requires_grad=True)
    temperature = torch.tensor(1.3, dtype=torch.float64, device=device, requires_grad=True)

    def function(s, gamma, temperature):
        return fk.binary_focal_calibration_map(s, gamma, temperature, log_odds=log_odds)

    assert torch.autograd.gradcheck(function, (s, gamma, temperature))
    assert torch.autograd.gradgradcheck(function, (s, gamma, temperature))


@pytest.mark.parametrize("gamma", [1.0, 0.25, -0.5])
def test_second_derivatives_of_saturated_rows(device, gamma):
    upstream = torch.tensor([[0.5, -1.25, 2.0]], dtype=torch.float64, device=device)
    direction = [1.5, 0.25, -2.0]
    for gap in EDGE_GAPS:
        z = torch.tensor([edge_row(gap)], dtype=torch.float64, device=device, requires_grad=True)
        log_p = fk.focal_calibration_map(z, gamma, log=True)
        (grad,) = torch.autograd.grad(log_p, z, upstream, create_graph=True)
        (product,) = torch.autograd.grad(grad @ torch.tensor(direction, dtype=torch.float64, device=device), z)
        with oracle.precision():
            exact = oracle.hessian_product(
                lambda x: mpmath.fdot(oracle.log_map(x, gamma), upstream.flatten().tolist()), edge_row(gap), direction
            )
        assert_close(product, torch.tensor([[float(v) for v in exact]], dtype=torch.float64))


def test_gradient_where_only_some_inputs_need_it(device):
    values = [torch.randn(4, 3, device=device), torch.rand(4, device=device), torch.rand((), device=device) + 0.5]
    everything = [leaf(v) for v in values]
    expected = torch.autograd.grad(fk.focal_calibration_map(*everything).square().sum(), everything)
    for i in range(3):
        inputs = list(values)
        inputs[i] = leaf(inputs[i])
        (grad,) = torch.autograd.grad(fk.focal_calibration_map(*inputs).square().sum(), inputs[i])
        assert_close(grad, expected[i])
    assert not fk.focal_calibration_map(*values).requires_grad
    with torch.inference_mode():
        assert_close(fk.focal_calibration_map(*values), fk.focal_calibration_map(*everything))


@pytest.mark.parametrize("gamma", [-0.5, -0.99, -0.9999, -0.999999])
def test_torch_func_keeps_the_digits_of_float32_as_gamma_approaches_minus_one(gamma):
    z = torch.randn(100, 10) * 8
    s = torch.linspace(-20, 20, 101)
    of_rows, of_logits = fk.focal_calibration_map, fk.binary_focal_calibration_map
    for found, expected in [
        (torch.func.vmap(lambda z: of_rows(z, gamma, log=True))(z), of_rows(z.double(), gamma, log=True)),
        (
            torch.func.vmap(lambda s: of_logits(s, gamma, log_odds=True))(s),
            of_logits(s.double(), gamma, log_odds=True),
        ),
    ]:
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-9)


@torch_jit_warns
def test_torch_func_is_never_silently_wrong(device):
    from torch.func import grad, hessian, jacrev, jvp, vmap

    z = torch.randn(5, 4, dtype=torch.float64, device=device)
    gamma = torch.tensor([0.5, -0.5, 2.0, 0.1, 1.0], dtype=torch.float64, device=device)
    temperature = torch.tensor(1.5, dtype=torch.float64, device=device)
    direction = torch.randn_like(z)
    for kind in ("logits", "probs"):
        x = z.softmax(-1) if kind == "probs" else z
        tangents = (
            0.1 * (direction - direction.mean(-1, keepdim=True)),
            torch.randn_like(gamma),
            torch.ones_like(temperature),
        )
        results = []
        for f in (fk.focal_calibration_map, reference.focal_calibration_map):

            def of_all(x, g, t, f=f, kind=kind):
                return f(x, g, t, input_kind=kind)

            def scalar(x, g, t, of_all=of_all):
                return (of_all(x, g, t) * direction).sum()

            primal, tangent = jvp(of_all, (x, gamma, temperature), tangents)
            results.append(
                (
                    primal,
                    tangent,
                    *grad(scalar, argnums=(0, 1, 2))(x, gamma, temperature),
                    hessian(scalar)(x, gamma, temperature),
                    jacrev(grad(scalar, argnums=1), argnums=2)(x, gamma, temperature),
                    vmap(of_all, in_dims=(0, 0, None))(x, gamma, temperature),
                )
            )
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected)
    s = torch.randn(5, dtype=torch.float64, device=device)
    results = []
    for f in (fk.binary_focal_calibration_map, reference.binary_focal_calibration_map):
        primal, tangent = jvp(f, (s, gamma, temperature), (s, gamma, temperature))
        results.append((primal, tangent, vmap(grad(f))(s, gamma), hessian(lambda s, f=f: f(s, gamma).sum())(s)))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


def test_batched_upstream_gradients_and_lazy_negation(device):
    z = torch.randn(5, 4, dtype=torch.float64, device=device, requires_grad=True)
    gamma = torch.rand(5, dtype=torch.float64, device=device, requires_grad=True)
    p = fk.focal_calibration_map(z, gamma)
    upstream = torch.randn(3, 5, 4, dtype=torch.float64, device=device)
    batched = torch.autograd.grad(p, (z, gamma), upstream, is_grads_batched=True, retain_graph=True)
    for b, row in enumerate(upstream):
        for whole, one in zip(batched, torch.autograd.grad(p, (z, gamma), row, retain_graph=True), strict=True):
            assert_close(whole[b], one)
    # Stored as -z with torch's lazy negation bit set.
    negated = torch._neg_view((-z.detach()).clone())
    assert torch.equal(fk.focal_calibration_map(negated, gamma), p)
    assert torch.equal(fk.binary_focal_calibration_map(negated, 1.0), fk.binary_focal_calibration_map(z, 1.0))


@torch_jit_warns
def test_forward_mode(device):
    import torch.autograd.forward_ad as fwd

    values = [
        torch.randn(5, 4, dtype=torch.float64, device=device),
        torch.rand(5, dtype=torch.float64, device=device),
        torch.tensor(1.5, dtype=torch.float64, device=device),
    ]
    tangents = [torch.randn_like(v) for v in values]
    # Each input alone, and with gradients off, where a shortcut would lose the tangent.
    for i in range(3):
        for grad_mode in (True, False):
            results = []
            for function in (fk.focal_calibration_map, reference.focal_calibration_map):
                with torch.set_grad_enabled(grad_mode), fwd.dual_level():
                    inputs = list(values)
                    inputs[i] = fwd.make_dual(inputs[i], tangents[i])
                    results.append(fwd.unpack_dual(function(*inputs)))
            assert results[0].tangent is not None
            assert_close(results[0].tangent, results[1].tangent)
    s = leaf(torch.randn(4, dtype=torch.float64, device=device))
    assert torch.autograd.gradcheck(fk.binary_focal_calibration_map, (s, leaf(values[1][:4])), check_forward_ad=True)


# ---- compile, export, autocast --------------------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


def test_compiles_as_one_graph_without_recompilation_when_numbers_change(device, dynamo):
    z = torch.randn(6, 5, device=device, requires_grad=True)

    def step(z, gamma, temperature):
        return fk.focal_calibration_map(z * 2, gamma, temperature, log=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    # torch takes every number for a constant until it sees a second value: that one change costs a compilation.
    compiled(z, 3.0, 2.0)
    compiled(z, 2.5, 1.5)
    with dynamo.config.patch(error_on_recompile=True):
        for gamma, temperature in ((2.0, 1.0), (0.5, 0.7), (0.0, 3.0), (-0.5, 0.25), (1.0, 1.25), (4.0, 5.0)):
            actual, expected = compiled(z, gamma, temperature), step(z, gamma, temperature)
            assert_close(actual, expected)
            upstream = torch.randn_like(actual)
            assert_close(torch.autograd.grad(actual, z, upstream)[0], torch.autograd.grad(expected, z, upstream)[0])


def test_every_form_of_the_arguments_compiles(device, dynamo):
    z = torch.randn(2, 3, 5, device=device, requires_grad=True)
    gamma = torch.rand(2, 3, device=device, requires_grad=True)
    temperature = torch.tensor(1.5, device=device, requires_grad=True)
    cases = [
        (fk.focal_calibration_map, (z, gamma, temperature), {}),
        (fk.focal_calibration_map, (z.softmax(-1).detach().requires_grad_(), 0.5), {"input_kind": "probs"}),
        (fk.binary_focal_calibration_map, (z, 1.0, temperature), {"log_odds": True}),
        (fk.binary_focal_calibration_map, (z, leaf(gamma[..., None])), {}),
    ]
    for function, arguments, options in cases:
        function = functools.partial(function, **options)
        compiled = torch.compile(lambda *a, function=function: function(*a), fullgraph=True, backend="aot_eager")
        inputs = [a for a in arguments if isinstance(a, torch.Tensor)]
        results = []
        for f in (compiled, function):
            out = f(*arguments)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected)


def test_values_outside_the_domain_give_nan_rows_in_compiled_tensors(device, dynamo):
    z = torch.randn(3, 4, device=device)
    gamma = torch.tensor([-1.0, 0.5, -2.0], device=device)
    temperature = torch.tensor([1.0, 1.0, 1.0], device=device)
    compiled = torch.compile(lambda z, g, t: fk.focal_calibration_map(z, g, t), fullgraph=True, backend="aot_eager")
    if device.type == "cuda":
        assert fk.focal_calibration_map(z, gamma, temperature).isnan().all(-1).tolist() == [True, False, True]
    good = compiled(z[1:2], gamma[1:2], temperature[1:2])
    assert_close(good, fk.focal_calibration_map(z[1:2], 0.5))


@pytest.mark.kernels
def test_exports(device):
    class Map(torch.nn.Module):
        def forward(self, z):
            return fk.focal_calibration_map(z, 1.5, 2.0, log=True)

    z = torch.randn(4, 5, device=device)
    exported = torch.export.export(Map(), (z,))
    assert any("focalkern" in str(node.target) for node in exported.graph.nodes)
    assert_close(exported.module()(z), fk.focal_calibration_map(z, 1.5, 2.0, log=True))


def test_autocast_gives_float32_as_softmax_does(device):
    z = torch.randn(6, 5, device=device).bfloat16().requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        p = fk.focal_calibration_map(z, 1.0)
        assert p.dtype == torch.float32
        assert fk.binary_focal_calibration_map(z, 1.0).dtype == torch.float32
        assert fk.focal_calibration_map(z.double(), 1.0).dtype == torch.float64
    assert_close(p, reference.focal_calibration_map(z.double(), 1.0))
    (grad,) = torch.autograd.grad(p.square().sum(), z)
    assert grad.dtype == torch.bfloat16


def test_meta_tensors_give_shapes():
    z = torch.empty(4, 5, device="meta", requires_grad=True)
    out = fk.focal_calibration_map(z, 1.0)
    assert out.shape == z.shape
    assert out.device.type == "meta"
    assert torch.autograd.grad(out.sum(), z)[0].shape == z.shape
    assert fk.binary_focal_calibration_map(z, 1.0).shape == z.shape


@pytest.mark.kernels
def test_opcheck(device):
    z = torch.randn(3, 2, 5, device=device, requires_grad=True)
    gamma = torch.rand(3, 2, device=device, requires_grad=True)
    temperature = torch.tensor(1.5, device=device, requires_grad=True)
    number = torch.tensor(0.5, dtype=torch.float64)
    p = leaf(z.softmax(-1))
    # Each kind of input (0 logits, 1 probabilities, 2 binary), log and not, and strides that are not contiguous.
    for arguments in (
        (z, gamma, temperature, 0, False, False, True),
        (p, number, temperature, 1, True, False, True),
        (z, number, number, 2, False, False, True),
        (leaf(z.bfloat16()), number, number, 0, True, True, False),
        (leaf(z.permute(2, 1, 0).contiguous().permute(2, 1, 0)), gamma, number, 0, False, False, True),
    ):
        torch.library.opcheck(torch.ops.focalkern.calibration_map_forward, arguments)
        with torch.no_grad():
            detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
            out = torch.ops.focalkern.calibration_map_forward(*detached)
            backward = (torch.randn_like(out), *detached[:5], [True, True, True])
            torch.library.opcheck(torch.ops.focalkern.calibration_map_backward, backward)


class Marked(torch.Tensor):
    """A subclass that only changes the type."""


def test_subclasses_and_parameters(device):
    z = torch.randn(4, 5, device=device)
    expected = fk.focal_calibration_map(z, 1.0)
    marked = fk.focal_calibration_map(z.as_subclass(Marked), 1.0)
    assert isinstance(marked, Marked)
    assert_close(marked.as_subclass(torch.Tensor), expected)
    assert_close(fk.focal_calibration_map(torch.nn.Parameter(z), 1.0), expected)


# Many short rows, and few long ones; both are cut into several units of work.
@pytest.mark.kernels
@pytest.mark.parametrize(("n", "n_classes"), [(20000, 10), (61, 4097)])
def test_the_same_bits_on_every_run_and_for_every_number_of_threads(device, n, n_classes):
    z = torch.randn(n, n_classes, device=device)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(1)
            x = leaf(z)
            gamma = torch.tensor(0.7, device=device, requires_grad=True)
            temperature = torch.tensor(1.5, device=device, requires_grad=True)
            out = fk.focal_calibration_map(x, gamma, temperature)
            upstream = torch.randn(n, n_classes).to(device)
            results.append((out, *torch.autograd.grad(out, (x, gamma, temperature), upstream)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert torch.equal(actual, expected)


# ---- CUDA only ------------------------------------------------------------------------------------------------------


def test_cuda_does_not_wait_for_the_device_and_can_be_captured(cuda):
    z = torch.randn(64, 10, device=cuda, requires_grad=True)
    gamma = torch.rand(64, device=cuda)
    fk.focal_calibration_map(z, gamma).sum().backward()
    with no_waiting():
        fk.focal_calibration_map(z, gamma, 1.5).sum().backward()
        fk.focal_calibration_map(z, 1.0, log=True).sum().backward()
        fk.binary_focal_calibration_map(z, 1.0).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fk.focal_calibration_map(z.detach(), gamma)
    with torch.no_grad():
        z.copy_(torch.randn_like(z))
    graph.replay()
    assert torch.equal(out, fk.focal_calibration_map(z.detach(), gamma))


def test_cuda_bad_rows_are_nan(cuda):
    z = torch.zeros(5, 3, device=cuda)
    z[1, 0], z[2, 1] = math.nan, math.inf
    z[3] = -math.inf
    out = fk.focal_calibration_map(z, 1.0)
    assert out.isnan().all(-1).tolist() == [False, True, True, True, False]


# ---- bad input ------------------------------------------------------------------------------------------------------

Z = torch.zeros(4, 3)
P = torch.full((4, 3), 1 / 3)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.zeros(()), 1.0), {}, ValueError, r"input must .*got"),
        ((torch.zeros(4, 1), 1.0), {}, ValueError, r"input must .*(two|2).*got"),
        ((torch.zeros(4, 0), 1.0), {}, ValueError, r"input must .*got"),
        ((Z.int(), 1.0), {}, TypeError, r"input must .*got"),
        ((["text"], 1.0), {}, TypeError, r"input must .*got"),
        ((Z, torch.ones(3)), {}, ValueError, r"gamma must .*\[4\], got \[3\]"),
        ((Z, torch.ones(4, 3)), {}, ValueError, r"gamma must .*\[4\], got \[4, 3\]"),
        ((Z, torch.ones(4, 1)), {}, ValueError, r"gamma must .*\[4\], got \[4, 1\]"),
        ((Z, 1.0, torch.ones(3)), {}, ValueError, r"temperature must .*\[4\], got \[3\]"),
        ((Z, torch.tensor(1)), {}, TypeError, r"gamma must .*got"),
        ((Z, 1.0, torch.tensor(1)), {}, TypeError, r"temperature must .*got"),
        ((Z, None), {}, TypeError, r"gamma must .*got"),
        ((Z, 1.0, [1.0]), {}, TypeError, r"temperature must .*got"),
        # The domain.
        ((Z, -1.0), {}, ValueError, r"gamma must .*-1.*got -1"),
        ((Z, -3.0), {}, ValueError, r"gamma must .*-1.*got -3"),
        ((Z, math.nan), {}, ValueError, r"gamma must .*got nan"),
        ((Z, math.inf), {}, ValueError, r"gamma must .*got inf"),
        ((Z, 1.0, 0.0), {}, ValueError, r"temperature must .*got 0"),
        ((Z, 1.0, -1.0), {}, ValueError, r"temperature must .*got -1"),
        ((Z, 1.0, math.nan), {}, ValueError, r"temperature must .*got nan"),
        ((Z, 1.0, math.inf), {}, ValueError, r"temperature must .*got inf"),
        # Values.
        ((Z, 1.0), {"input_kind": "probabilities"}, ValueError, r"input_kind must .*got 'probabilities'"),
        ((Z, 1.0, torch.ones(4, device="meta")), {}, ValueError, r"temperature must .*cpu, got meta"),
        ((Z, torch.ones(4, device="meta")), {}, ValueError, r"gamma must .*cpu, got meta"),
    ],
)
def test_bad_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match="^focal_calibration_map: " + message):
        fk.focal_calibration_map(*arguments, **options)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ([0.0, math.nan, 1.0], "logits"),
        ([0.0, math.inf, 1.0], "logits"),
        ([-math.inf, -math.inf, -math.inf], "logits"),
        ([0.5, 0.5, math.nan], "probs"),
        ([0.5, 0.7, -0.2], "probs"),
        ([0.5, 0.502, 0.0], "probs"),
        ([0.5, 0.498, 0.0], "probs"),
        ([0.0, 0.0, 0.0], "probs"),
        ([math.inf, 0.0, 0.0], "probs"),
    ],
)
def test_bad_rows_on_the_cpu_are_named(row, kind):
    rows = torch.full((5, 3), 1 / 3)
    rows[3] = torch.tensor(row)
    with pytest.raises(ValueError, match=r"^focal_calibration_map: input .*row 3"):
        fk.focal_calibration_map(rows, 1.0, input_kind=kind)
    with pytest.raises(ValueError, match=r"^focal_calibration_map: input .*row 3"):
        fk.focal_calibration_map(rows.double(), 1.0, input_kind=kind)


def test_bad_tensor_values_give_nan_rows_or_raise_when_asked(device, monkeypatch):
    z = torch.zeros(4, 3, device=device)
    gamma = torch.tensor([0.5, -1.0, 2.0, -5.0], device=device)
    temperature = torch.tensor([1.0, 1.0, 0.0, 1.0], device=device)
    monkeypatch.setenv("FOCALKERN_VALIDATE", "1")
    with pytest.raises(ValueError, match=r"^focal_calibration_map: gamma must .*-1"):
        fk.focal_calibration_map(z, gamma, 1.0)
    with pytest.raises(ValueError, match=r"^focal_calibration_map: temperature must .*0"):
        fk.focal_calibration_map(z, 1.0, temperature)
    with pytest.raises(ValueError, match=r"^binary_focal_calibration_map: gamma must .*-1"):
        fk.binary_focal_calibration_map(z[:, 0], gamma, 1.0)


def test_binary_bad_arguments_are_named():
    s = torch.zeros(4)
    for arguments, error, message in (
        ((s.int(), 1.0), TypeError, "logits must .*got"),
        (("0.0", 1.0), TypeError, "logits must .*got"),
        ((s, -1.0), ValueError, "gamma must .*got -1"),
        ((s, 1.0, 0.0), ValueError, "temperature must .*got 0"),
        ((s, torch.ones(3)), ValueError, r"gamma must .*\[4\], got \[3\]"),
        ((s, torch.ones(2, 4)), ValueError, r"gamma must .*\[4\], got \[2, 4\]"),
    ):
        with pytest.raises(error, match="^binary_focal_calibration_map: " + message):
            fk.binary_focal_calibration_map(*arguments)


# ---- properties -----------------------------------------------------------------------------------------------------

logits_strategy = st.lists(st.floats(-40, 40, width=32), min_size=2, max_size=6)
# Down to the edge of the domain, and beyond the paper's grid.
gamma_strategy = st.floats(-0.984375, 8, width=32)
temperature_strategy = st.floats(0.0625, 16, width=32)


@PROPERTY
@given(logits_strategy, gamma_strategy, temperature_strategy, st.integers(-1000, 1000), st.data())
def test_property_a_distribution_in_the_order_of_the_logits(row, gamma, temperature, sixteenths, data):
    z = torch.tensor(row, dtype=torch.float64)
    p = fk.focal_calibration_map(z, gamma, temperature)
    log_p = fk.focal_calibration_map(z, gamma, temperature, log=True)
    assert p.isfinite().all()
    assert (p >= 0).all()
    assert abs(p.sum().item() - 1) <= 1e-12
    assert_close(log_p.exp(), p)
    order = z.argsort()
    assert (log_p[order].diff() >= -1e-9).all()
    # Shifts, exact in float64 beside these logits, change nothing; neither does the order of the classes.
    shifted = fk.focal_calibration_map(z + sixteenths / 16, gamma, temperature)
    torch.testing.assert_close(shifted, p, rtol=1e-10, atol=1e-12)
    permutation = data.draw(st.permutations(range(len(row))))
    assert_close(fk.focal_calibration_map(z[permutation], gamma, temperature), p[permutation])


@PROPERTY
@given(st.floats(-60, 60, width=32), gamma_strategy, temperature_strategy)
def test_property_binary_map_is_odd_increasing_and_on_the_right_side(s, gamma, temperature):
    x = torch.tensor([s, -s, s + 0.5], dtype=torch.float64)
    odds = fk.binary_focal_calibration_map(x, gamma, temperature, log_odds=True)
    assert_close(odds[1], -odds[0])
    assert odds[2] > odds[0]
    assert odds[0] * s >= 0
    # Sharper than plain temperature scaling for gamma > 0, flatter below; but from about -0.885 on towards -1 the slope
    # at 0 is above 1 again: at gamma = -15/16, s = 1 becomes 1.0604.
    plain = x[0] / temperature
    if gamma >= 0:
        assert odds[0].abs() >= plain.abs() * (1 - 1e-12)
    elif gamma >= -0.875:
        assert odds[0].abs() <= plain.abs() * (1 + 1e-12)


def test_a_huge_temperature_leaves_an_impossible_class_impossible(device):
    z = torch.tensor([[1.0, 0.0, -math.inf]], device=device)
    found = fk.focal_calibration_map(z, 1.0, 1e46)
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.5, 0.0]], device=device))


# The logarithm of a denormal probability has a slope beyond the largest number: infinite, and not NaN.
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 2.0, -0.5])
def test_slope_at_denormal_probabilities(gamma, plain):
    probs = torch.tensor([[1 - 1e-6, 1e-6, 1e-40, 3e-39, 0.0]], requires_grad=True)
    if plain:
        log_q = fk.fallback.calibration_map(probs, torch.tensor(gamma), torch.tensor(0.5), 1, True)
    else:
        log_q = fk.focal_calibration_map(probs, gamma, 0.5, input_kind="probs", log=True)
    (slope,) = torch.autograd.grad(log_q[0, 2:4].sum() + log_q[0, 1], probs)
    assert slope[0, 2] == slope[0, 3] == torch.inf
    assert slope[0, [0, 1, 4]].isfinite().all()
