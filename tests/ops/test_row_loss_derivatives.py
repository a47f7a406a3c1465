"""Derivatives, compilation and edges of the losses that share the focal loss's kernels."""

import math

import pytest
import torch
from conftest import assert_close
from row_loss_cases import LOSSES, SPECS, module_of

import focalkern as fk
from focalkern import reference
from focalkern.reference._softmax_losses import number_of

SOFT = [name for name, spec in SPECS.items() if spec.soft_target]


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SOFT)
def test_derivative_of_class_probabilities(name):
    loss, defined = LOSSES[name]
    z, weight = torch.randn(6, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    target = torch.randn(6, 5, dtype=torch.float64).softmax(1).requires_grad_()
    options = {"weight": weight, "label_smoothing": 0.1, "reduction": "none"}
    upstream = torch.randn(6, dtype=torch.float64)
    (found,) = torch.autograd.grad(loss(z, target, **options), target, upstream)
    (expected,) = torch.autograd.grad(defined(z, target, **options), target, upstream)
    assert_close(found, expected)


@pytest.mark.parametrize("name", LOSSES)
def test_first_and_second_derivatives(name):
    loss, _ = LOSSES[name]
    z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4, 2, 2])
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none", "ignore_index": 4}):
        assert torch.autograd.gradcheck(lambda z, options=options: loss(z, target, **options), z)
        assert torch.autograd.gradgradcheck(lambda z, options=options: loss(z, target, **options), z)
    if SPECS[name].soft_target:
        soft = torch.randn(4, 5, dtype=torch.float64).softmax(1).requires_grad_()
        assert torch.autograd.gradcheck(loss, (z, soft))
        assert torch.autograd.gradgradcheck(loss, (z, soft))


def test_derivatives_in_gamma_of_the_poly_focal_loss():
    z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 4, 2, 2])
    gamma = torch.tensor([0.5, 1.0, 2.0, 3.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z, gamma: fk.poly_focal_loss(z, target, gamma, 1.5), (z, gamma))
    assert torch.autograd.gradgradcheck(lambda z, gamma: fk.poly_focal_loss(z, target, gamma, 1.5), (z, gamma))


@pytest.mark.parametrize("gamma", [2.0, 0.0, -1.5])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5], [1.0, 0.0, 0.5]])
def test_slopes_at_a_class_that_cannot_occur(weights, gamma):
    """The derivative in its share is its infinite loss times its weight, and 0 for weight 0."""
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    expected = 0.0 if weights is not None and weights[1] == 0 else math.inf
    losses = [lambda z, t: fk.focal_loss(z, t, gamma, weight=weight)]
    losses.append(lambda z, t: reference.focal_loss(z, t, gamma, weight=weight))
    if gamma >= 0:
        losses.append(lambda z, t: fk.poly_focal_loss(z, t, gamma, weight=weight))
        losses.append(lambda z, t: reference.poly_focal_loss(z, t, gamma, weight=weight))
    for loss in losses:
        for shares in ([0.25, 0.0, 0.75], 2):
            z = torch.tensor([[0.25, -math.inf, 2.5]], dtype=torch.float64, requires_grad=True)
            soft = isinstance(shares, list)
            target = torch.tensor([shares], dtype=torch.float64 if soft else torch.int64, requires_grad=soft)
            inputs = (z, target) if soft else (z,)
            once = torch.autograd.grad(loss(z, target), inputs)
            differentiable = torch.autograd.grad(loss(z, target), inputs, create_graph=True)
            for slopes in (once, differentiable):
                assert slopes[0].isfinite().all()
                if soft:
                    assert slopes[1][0, 1] == expected
                    assert slopes[1][0, [0, 2]].isfinite().all()
            assert_close(differentiable[0], once[0])
            (second,) = torch.autograd.grad(differentiable[0][0, 0], z)
            assert second.isfinite().all()


@pytest.mark.kernels
def test_opcheck(device):
    z = torch.randn(6, 5, 2, device=device, requires_grad=True)
    target = torch.randint(5, (6, 2), device=device)
    soft = torch.rand(6, 5, 2, device=device, requires_grad=True)
    weight, number = torch.rand(5, device=device), torch.tensor(2.0, dtype=torch.float64)
    for spec in SPECS.values():
        kind = number_of(spec.name)
        for arguments in (
            (z, target, number, None, weight, 1, -100, 0.0, False, False, kind, 1.5),
            (z, soft if spec.soft_target else target, number, None, None, 0, -100, 0.0, False, False, kind, 1.5),
        ):
            torch.library.opcheck(torch.ops.focalkern.focal_loss_forward, arguments)
            with torch.no_grad():
                loss, saved = torch.ops.focalkern.focal_loss_forward(*arguments)
                z_, t_, *others = (a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
                rest = (*others[:3], saved, *others[3:7], [True, t_.is_floating_point(), False], kind, 1.5)
                torch.library.opcheck(torch.ops.focalkern.focal_loss_backward, (torch.randn_like(loss), z_, t_, *rest))


@pytest.mark.parametrize("name", LOSSES)
def test_compiles_and_exports(device, dynamo, name):
    loss, _ = LOSSES[name]
    z = torch.randn(8, 5, device=device, requires_grad=True)
    target = torch.randint(5, (8,), device=device)
    for options in ({}, {"label_smoothing": 0.1}):
        expected = loss(z, target, **options)
        (slope,) = torch.autograd.grad(expected, z)
        compiled = torch.compile(
            lambda z, t, options=options: loss(z, t, **options), fullgraph=True, backend="aot_eager"
        )
        found = compiled(z, target)
        assert_close(found, expected.double())
        assert_close(torch.autograd.grad(found, z)[0], slope.double())
    module = module_of(name)()
    exported = torch.export.export(module, (z.detach(), target))
    assert_close(exported.module()(z.detach(), target), module(z.detach(), target).double())


@pytest.mark.kernels
def test_gamma_of_the_poly_focal_loss_compiles_once(dynamo):
    z, target = torch.randn(8, 5), torch.randint(5, (8,))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda z, t, gamma: fk.poly_focal_loss(z, t, gamma, 1.5), fullgraph=True, backend=counter)
    for gamma in (1.0, 2.0, 3.0, 4.5):
        assert_close(compiled(z, target, gamma), fk.poly_focal_loss(z.double(), target, gamma, 1.5))
    assert counter.frame_count <= 2  # the compiler treats the first number as a constant


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("name", LOSSES)
def test_torch_func_and_forward_mode(name):
    loss, _ = LOSSES[name]
    z, target = torch.randn(6, 5, dtype=torch.float64), torch.randint(5, (6,))
    expected = torch.autograd.grad(loss(z.requires_grad_(), target), z)[0]
    assert_close(torch.func.grad(lambda z: loss(z, target))(z.detach()), expected)
    direction = torch.randn_like(z.detach())
    _, tangent = torch.func.jvp(lambda z: loss(z, target), (z.detach(),), (direction,))
    assert_close(tangent, (expected * direction).sum())
    each = torch.func.vmap(lambda z, t: loss(z, t))(z.detach(), target)
    assert_close(each, loss(z.detach(), target, reduction="none"))


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_returns_float32(name):
    loss, _ = LOSSES[name]
    z, target = torch.randn(6, 5, dtype=torch.bfloat16), torch.randint(5, (6,))
    assert loss(z, target).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert loss(z, target).dtype == torch.float32
