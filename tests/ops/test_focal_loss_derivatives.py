"""Derivatives of fk.focal_loss: first, second, torch.func, forward mode."""

import oracle
import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from conftest import assert_close
from focal_cases import EDGE_GAMMAS, EDGE_GAPS, TABLE, edge_row, leaf, torch_jit_warns

import focalkern as fk
from focalkern import reference

# ---- derivatives ----------------------------------------------------------------------------------------------------

# Gamma 0.5 has an unbounded second derivative at p = 1, 3 a vanishing one, 0 none, and -1.5 takes the inverse branch.
DERIVATIVE_GAMMAS = [0.5, 3.0, 0.0, -1.5]


@pytest.mark.parametrize("gamma", DERIVATIVE_GAMMAS)
@pytest.mark.parametrize("kind", ["index", "smoothed", "probabilities"])
def test_first_and_second_derivatives(device, kind, gamma):
    z = torch.randn(3, 3, 2, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([[0, 2], [1, -100], [2, 1]], device=device)
    soft = torch.rand(3, 3, 2, dtype=torch.float64, device=device, requires_grad=kind == "probabilities")
    weight = torch.rand(3, dtype=torch.float64, device=device)
    # gamma = 0 as a tensor is a kink (the sign rule): finite differences there mix two branches.
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
    # detach_modulation makes the factor a constant. Finite differences ignore that; the reference does not.
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


@pytest.mark.kernels
def test_a_step_keeps_logits_labels_and_three_numbers_per_row(device):
    z = torch.randn(3, 4, device=device, requires_grad=True)
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = fk.focal_loss(z, torch.tensor([0, 1, 2], device=device), 2.0)
    assert sorted(kept) == [3, 3 * 3 + 1, 12]  # no tensor for gamma = 2
    loss.backward()
    assert z.grad is not None


@pytest.mark.kernels
def test_the_profiler_sees_the_operators_of_a_step(device):
    z = torch.randn(3, 4, device=device, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        fk.focal_loss(z, torch.tensor([0, 1, 2], device=device), 2.0).backward()
    names = {event.name for event in profile.events()}
    assert {"focalkern::focal_loss_forward", "focalkern::focal_loss_backward"} <= names


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
    # One sample at a time: per-sample gradients, as for differential privacy and influence functions.
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
    # Each input separately, also with gradients off, where a shortcut would drop the tangent.
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
    # Finite differences of the forward mode in float64, and forward over reverse.
    assert torch.autograd.gradcheck(lambda z: fk.focal_loss(z, target), (z,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda z: fk.focal_loss(z, target), (z,), check_fwd_over_rev=True)
