"""Derivatives, graphs, modules and errors of the losses of independent logits."""

import functools
import re

import pytest
import torch
import torch._dynamo
from conftest import assert_close, no_waiting
from sigmoid_cases import NAMES, SCORED, SCORES, grads, leaf

import focalkern as fk
from focalkern import reference


# ---- derivatives and transforms ------------------------------------------------------------------------------------
# test_scored_losses.py has the IoU-aware loss, because its soft target is detached.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "ia_bce_loss"])
@pytest.mark.parametrize("gamma", [0.0, 0.7, 2.0])
def test_first_and_second_derivatives(device, name, gamma):
    x = leaf(torch.randn(4, 3, device=device, dtype=torch.float64) * 2)
    soft = torch.rand(4, 3, device=device, dtype=torch.float64)
    labels = torch.tensor([0, 3, 2, -100], device=device)
    g = leaf(torch.full((3,), gamma + 0.1, device=device, dtype=torch.float64))
    options = {"detach_modulation": False} if name in SCORED else {}
    function = functools.partial(getattr(fk, name), **options)
    for t in (soft, soft.round(), labels):
        assert torch.autograd.gradcheck(lambda x, t=t: function(x, t, gamma), x)
        assert torch.autograd.gradgradcheck(lambda x, t=t: function(x, t, gamma), x)
        assert torch.autograd.gradcheck(lambda x, g, t=t: function(x, t, g, reduction="mean"), (x, g))
        assert torch.autograd.gradgradcheck(lambda x, g, t=t: function(x, t, g, reduction="mean"), (x, g))
    assert torch.autograd.gradgradcheck(lambda t: function(x, t, gamma), leaf(soft))


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_of_saturated_logits_are_finite(device, name):
    for dtype in (torch.float32, torch.float64):
        x = leaf(torch.tensor(SCORES, dtype=dtype, device=device))
        for gamma in (0.0, 0.3, 2.0):
            for t in (0.0, 1.0, 0.5):
                loss = getattr(fk, name)(x, torch.full_like(x, t), gamma)
                (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
                assert slope.isfinite().all()
                (curvature,) = torch.autograd.grad(slope.sum(), x)
                assert curvature.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_that_is_differentiated_again_is_that_of_the_kernel(device, name):
    x = leaf(torch.randn(30, 4, device=device, dtype=torch.float64) * 4)
    t = torch.rand(30, 4, device=device, dtype=torch.float64)
    t[:10] = t[:10].round()
    for gamma in (0.5, 2.0):
        loss = getattr(fk, name)(x, t, gamma, reduction="mean")
        (kernel,) = torch.autograd.grad(loss, x, retain_graph=True)
        (composite,) = torch.autograd.grad(loss, x, create_graph=True)
        assert_close(composite, kernel)


# torch's own decompositions still use torch.jit.script, which is deprecated.
@pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script")
@pytest.mark.parametrize("name", NAMES)
def test_function_transforms(device, name):
    x = torch.randn(3, 6, 4, dtype=torch.float64, device=device)
    t = torch.rand(3, 6, 4, dtype=torch.float64, device=device)
    function = functools.partial(getattr(fk, name), reduction="mean")
    found = torch.func.vmap(torch.func.grad(function))(x, t)
    z = leaf(x)
    expected = torch.stack([grads(function(z[i], t[i]), z)[0][i] for i in range(3)])
    assert_close(found, expected)
    direction = torch.randn_like(x[0])
    _, slope = torch.func.jvp(lambda z: function(z, t[0]), (x[0],), (direction,))
    assert_close(slope, (expected[0] * direction).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[0], direction)
        tangent = torch.autograd.forward_ad.unpack_dual(function(dual, t[0])).tangent
    assert_close(tangent, slope)
    hessian = torch.func.hessian(lambda z: function(z, t[0, :1]))(x[0, :1])
    assert hessian.isfinite().all()


# ---- compile, export -----------------------------------------------------------------------------------------------
@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["function", "module"])
def test_compiles_as_one_graph_without_recompilation_when_gamma_and_alpha_change(device, dynamo, kind):
    x = torch.randn(6, 5, device=device, requires_grad=True)
    t = torch.rand(6, 5, device=device)
    module = fk.SigmoidFocalLoss()

    def step(x, t, gamma, alpha):
        if kind == "function":
            return fk.sigmoid_focal_loss(x * 2, t, gamma, alpha, "sum")
        return module(x * 2, t)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    # torch treats every number as a constant until it sees a second value; that first change costs one compilation.
    for gamma, alpha in ((3.0, 0.1), (2.5, 0.3)):
        module.gamma, module.alpha = gamma, alpha
        compiled(x, t, gamma, alpha)
    with dynamo.config.patch(error_on_recompile=True):
        for gamma in (2.0, 0.5, 0.0, 3.25, 1.0, 4.0, 5.0, 6.0, 7.0):
            alpha = gamma / 10 + 0.05
            module.gamma, module.alpha = gamma, alpha
            loss, expected = compiled(x, t, gamma, alpha), step(x, t, gamma, alpha)
            assert_close(loss, expected)
            assert_close(grads(loss, x)[0], grads(expected, x)[0])


@pytest.mark.parametrize(
    "module", [fk.SigmoidFocalLoss(0.5), fk.AsymmetricLoss(), fk.QualityFocalLoss(), fk.VarifocalLoss(), fk.IABCELoss()]
)
def test_modules_compile_and_export(device, dynamo, module):
    x = torch.randn(6, 5, device=device, requires_grad=True)
    for t in (torch.rand(6, 5, device=device), torch.randint(6, (6,), device=device)):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        loss = compiled(x, t)
        assert_close(loss, module(x, t))
        assert_close(grads(loss, x)[0], grads(module(x, t), x)[0])
        exported = torch.export.export(module, (x, t))
        assert_close(exported.module()(x, t), module(x, t))


@pytest.mark.parametrize(
    ("shape", "target", "remedy"),
    [
        ((7, 1), torch.rand(7), "pass target.view_as(input)"),
        ((2, 3, 4), torch.ones(2, 1, 4).long(), "pass target.squeeze(1)"),
        ((7, 3), torch.ones(7), "labels are integers: target.long()"),
        ((3, 4, 5), torch.ones(4, 5).long(), "for one image [C, d1, ...] pass input[None] and target[None]"),
    ],
)
def test_an_error_of_a_graph_has_the_remedy(dynamo, shape, target, remedy):
    with pytest.raises(ValueError, match=f"^quality_focal_loss: target .*{re.escape(remedy)}$"):
        torch.compile(fk.quality_focal_loss, backend="eager")(torch.zeros(shape), target)
    dynamo.reset()
    whole_graph = torch.compile(fk.quality_focal_loss, backend="eager", fullgraph=True, dynamic=True)
    with pytest.raises(dynamo.exc.Unsupported, match=f"quality_focal_loss: target .*{re.escape(remedy)}"):
        whole_graph(torch.zeros(shape), target)


def test_compiles_with_dynamic_shapes(device, dynamo):
    compiled = torch.compile(fk.sigmoid_focal_loss, fullgraph=True, backend="aot_eager", dynamic=True)
    with dynamo.config.patch(error_on_recompile=True):
        for n in (4, 9, 17):
            x = torch.randn(n, 5, device=device, requires_grad=True)
            t = torch.rand(n, 5, device=device)
            loss = compiled(x, t)
            assert_close(loss, fk.sigmoid_focal_loss(x, t))
            loss.sum().backward()
            assert x.grad.isfinite().all()


@pytest.mark.kernels
def test_opcheck(device):
    x = torch.randn(6, 5, 2, device=device, requires_grad=True)
    soft = torch.rand(6, 5, 2, device=device, requires_grad=True)
    labels = torch.randint(6, (6, 2), device=device)
    number = torch.tensor(2.0, dtype=torch.float64)
    gamma = torch.rand(5, 1, device=device, requires_grad=True)
    forward = torch.ops.focalkern.sigmoid_loss_forward.default
    channels_last = leaf(x.movedim(1, -1).contiguous().movedim(-1, 1))
    for arguments in [
        (x, soft, number, torch.tensor(0.25, dtype=torch.float64), None, None, 0, 0.0, 1, -100, False),
        (x, labels, gamma, None, torch.rand(2, device=device), None, 0, 0.0, 0, -100, False),
        (x, soft, gamma, torch.rand(2, device=device, requires_grad=True), None, None, 1, 0.05, 2, -100, False),
        (channels_last, soft, number, None, None, None, 2, 0.0, 0, -100, False),
        (x.detach().bfloat16().requires_grad_(), soft, gamma, None, None, None, 2, 0.0, 0, -100, True),
        (x, soft, number, torch.tensor(0.75, dtype=torch.float64), None, None, 3, 0.0, 1, -100, False),
        (x, labels, gamma, None, None, None, 4, 1.0, 0, -100, False),
        (channels_last, soft, gamma, torch.rand(5, 1, device=device), None, None, 5, 0.01, 2, -100, False),
    ]:
        torch.library.opcheck(forward, arguments)
    scores = torch.rand(6, 2, device=device)
    torch.library.opcheck(forward, (x, labels, number, None, None, scores, 2, 0.0, 1, -100, False))
    grad = torch.randn(6, 5, 2, device=device)
    arguments = (
        grad,
        x.detach(),
        soft.detach(),
        gamma.detach(),
        None,
        None,
        None,
        torch.ones(1, device=device),
        2,
        0.0,
        0,
    )
    torch.library.opcheck(
        torch.ops.focalkern.sigmoid_loss_backward.default, (*arguments, -100, [True, True, True, False])
    )


def test_autocast_and_meta(device):
    x = torch.randn(64, 40, device=device).bfloat16().requires_grad_()
    t = torch.rand(64, 40, device=device)
    for reduction in ("none", "mean"):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = fk.quality_focal_loss(x, t, reduction=reduction)
        assert loss.dtype == torch.float32
        assert_close(loss, reference.quality_focal_loss(x.double(), t.double(), reduction=reduction))
        assert grads(loss, x)[0].dtype == torch.bfloat16
    z = torch.empty(4, 5, device="meta", requires_grad=True)
    loss = fk.asymmetric_loss(z, torch.empty(4, dtype=torch.int64, device="meta"))
    assert loss.shape == (4, 5)
    assert grads(loss, z)[0].shape == (4, 5)


def test_cuda_step_does_not_wait_for_the_device(cuda):
    x, t = torch.randn(64, 10, device=cuda, requires_grad=True), torch.rand(64, 10, device=cuda)
    labels, gamma = torch.randint(11, (64,), device=cuda), torch.rand(10, device=cuda)
    fk.sigmoid_focal_loss(x, t, reduction="mean").backward()
    with no_waiting():
        for target in (t, labels):
            for g in (2.0, gamma):
                fk.sigmoid_focal_loss(x, target, g, reduction="mean").backward()


def test_cuda_graph_capture(cuda):
    x, labels = torch.randn(64, 10, device=cuda, requires_grad=True), torch.randint(11, (64,), device=cuda)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fk.sigmoid_focal_loss(leaf(x), labels, reduction="mean").backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = fk.sigmoid_focal_loss(x, labels, reduction="mean")
        loss.backward()
    with torch.no_grad():
        x.copy_(torch.randn(64, 10, device=cuda))
    graph.replay()
    twin = leaf(x)
    expected = fk.sigmoid_focal_loss(twin, labels, reduction="mean")
    assert_close(loss, expected)
    assert_close(x.grad, grads(expected, twin)[0])


# ---- modules and errors --------------------------------------------------------------------------------------------
def test_modules_are_their_functions(device):
    x, t = torch.randn(6, 5, device=device), torch.randint(6, (6,), device=device)
    weight = torch.rand(5, device=device)
    pairs = [
        (
            fk.SigmoidFocalLoss(1.5, 0.3, "sum", weight=weight),
            fk.sigmoid_focal_loss(x, t, 1.5, 0.3, "sum", weight=weight),
        ),
        (fk.AsymmetricLoss(3.0, 0.5, 0.1), fk.asymmetric_loss(x, t, 3.0, 0.5, 0.1, "mean")),
        (fk.QualityFocalLoss(1.0, ignore_index=2), fk.quality_focal_loss(x, t, 1.0, "mean", ignore_index=2)),
        (fk.VarifocalLoss(1.0, None, "sum"), fk.varifocal_loss(x, t, 1.0, None, "sum")),
        (fk.MatchabilityLoss(2.0, 0.5), fk.matchability_loss(x, t, 2.0, 0.5, "mean")),
        (fk.IABCELoss(1.0, 0.5, weight=weight), fk.ia_bce_loss(x, t, 1.0, 0.5, "mean", weight=weight)),
    ]
    for module, expected in pairs:
        assert torch.equal(module.to(device)(x, t), expected)


def test_parameters_of_modules_train_and_are_saved():
    gamma = torch.nn.Parameter(torch.full((5,), 2.0))
    module = fk.SigmoidFocalLoss(gamma, torch.full((5,), 0.25))
    assert [name for name, _ in module.named_parameters()] == ["gamma"]
    module(torch.randn(3, 5), torch.rand(3, 5)).backward()
    assert gamma.grad.isfinite().all()
    twin = fk.SigmoidFocalLoss(torch.nn.Parameter(torch.zeros(5)), torch.zeros(5))
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin.gamma, gamma)
    assert torch.equal(twin.alpha, module.alpha)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, t: fk.sigmoid_focal_loss(x, t, -1.0), ValueError, r"sigmoid_focal_loss: gamma must be at least 0"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, "2"), TypeError, r"gamma must be a number or a tensor, got str"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, alpha=1.5), ValueError, r"alpha must be in \[0, 1\], got 1.5"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, float("nan")), ValueError, r"gamma must be finite, got nan"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, torch.ones(4)), ValueError, r"gamma must be broadcastable to input"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, weight=torch.ones(2, 1)), ValueError, r"weight must be broadcast"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, weight=[1.0]), TypeError, r"weight must be a tensor, got list"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, reduction="avg"), ValueError, r"reduction must be"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, alpha=torch.ones(5).requires_grad_()), ValueError, r"alpha must not"),
        (lambda x, t: fk.asymmetric_loss(x, t, margin=1.0), ValueError, r"asymmetric_loss: margin must be in \[0, 1\)"),
        (lambda x, t: fk.asymmetric_loss(x, t, 1.0, -1.0), ValueError, r"asymmetric_loss: gamma_positive must be at"),
        (lambda x, t: fk.quality_focal_loss(x, t, -2.0), ValueError, r"quality_focal_loss: beta must be at least 0"),
        (lambda x, t: fk.quality_focal_loss(x, t[0]), ValueError, r"target must be the shape of input = \[3, 5\]"),
        (lambda x, t: fk.quality_focal_loss(x, t[0].long()), ValueError, r"shape of input without its class dimens"),
        (lambda x, t: fk.quality_focal_loss(x, t.cfloat()), TypeError, r"target must be floating point, bool or int"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, ignore_index=1.5), TypeError, r"ignore_index must be an int"),
        (lambda x, t: fk.AsymmetricLoss(gamma_negative=-1), ValueError, r"AsymmetricLoss: gamma_negative must be at"),
        (lambda x, t: fk.AsymmetricLoss(margin=1), ValueError, r"AsymmetricLoss: margin must be below 1"),
        (lambda x, t: fk.SigmoidFocalLoss(torch.tensor(-1.0)), ValueError, r"gamma must be finite and at least 0"),
        (lambda x, t: fk.varifocal_loss(x, t, alpha=-1.0), ValueError, r"varifocal_loss: alpha must be at least 0"),
        (lambda x, t: fk.matchability_loss(x, t, detach_modulation=1), TypeError, r"detach_modulation must be a bool"),
        (lambda x, t: fk.ia_bce_loss(x, t, alpha=1.5), ValueError, r"ia_bce_loss: alpha must be in \[0, 1\], got 1.5"),
        (lambda x, t: fk.ia_bce_loss(x, t, alpha=torch.ones(5).requires_grad_()), ValueError, r"alpha must not requir"),
        (lambda x, t: fk.VarifocalLoss(alpha=float("nan")), ValueError, r"VarifocalLoss: alpha"),
        (lambda x, t: fk.QualityFocalLoss(weight=torch.ones(5).long()), TypeError, r"weight must be float16, bfloat16"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(3, 5), torch.rand(3, 5))
