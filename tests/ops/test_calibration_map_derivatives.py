"""Derivatives of the calibration maps: first, second, torch.func, forward mode."""

import mpmath
import oracle
import pytest
import torch
import torch._dynamo
from conftest import assert_close
from map_cases import EDGE_GAPS, edge_row, leaf

import focalkern as fk
from focalkern import reference

# torch's own decompositions and inductor still use torch.jit.script, which is deprecated.
torch_jit_warns = pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script")


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
        # Finite differences leave the simplex by 1e-6, which the check of row sums accepts.
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
    # Each input separately, also with gradients off, where a shortcut would drop the tangent.
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


# The logarithm of a denormal probability has a derivative beyond the largest number: infinite, not NaN.
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
