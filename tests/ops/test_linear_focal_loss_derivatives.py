"""Derivatives and graphs of linear_focal_loss."""

import pytest
import torch
from conftest import assert_close
from linear_cases import OPTIONS, D, N, Products, derivatives, pair, problem

import focalkern as fk

pytestmark = [
    # torch's own decompositions still use torch.jit.script, which is deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.usefixtures("one_thread", "chunks"),
]


# ---- derivatives of higher order, torch.func, torch.compile ----------------------------------------------------------
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "options", [OPTIONS["focal"], OPTIONS["all at once"], {"detach_modulation": True}], ids=["focal", "all", "detached"]
)
def test_second_derivatives_go_by_chunks(reduction, options):
    results = []
    x, w, b, target = problem()
    for loss in (fk.linear_focal_loss, pair):
        value = loss(x, w, target, linear_bias=b, reduction=reduction, chunk_rows=16, **options)
        upstream = torch.linspace(1, 2, value.numel(), dtype=torch.float64).reshape(value.shape).requires_grad_()
        first = torch.autograd.grad(value, (x, w, b), upstream, create_graph=True)
        mixed = sum((g * torch.sin(torch.arange(g.numel()).double()).view_as(g)).sum() for g in first)
        results.append((*first, *torch.autograd.grad(mixed, (x, w, b, upstream))))
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected)


def test_second_derivatives_hold_one_chunk():
    x, w = torch.randn(64, 8, requires_grad=True), torch.randn(512, 8, requires_grad=True)
    target = torch.randint(512, (64,))
    with Products() as seen:
        loss = fk.linear_focal_loss(x, w, target, chunk_rows=16)
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.autograd.grad(g.square().sum(), w)
    assert seen.largest == 512 * 16 * 4


def test_third_derivatives_and_gammas():
    gamma = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    results = []
    for loss in (fk.linear_focal_loss, pair):
        x = torch.linspace(-1, 1, 2 * D, dtype=torch.float64).reshape(2, D).requires_grad_()
        w = torch.linspace(1, -2, 3 * D, dtype=torch.float64).reshape(3, D).cos().requires_grad_()
        (g,) = torch.autograd.grad(loss(x, w, torch.tensor([0, 2]), gamma), x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), w, create_graph=True)
        results.append(torch.autograd.grad(h.square().sum(), (x, gamma)))
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected)


def test_gradcheck():
    x, w = torch.randn(3, 2, dtype=torch.float64).requires_grad_(), torch.randn(4, 2).double().requires_grad_()
    probabilities = torch.rand(3, 4, dtype=torch.float64).requires_grad_()
    gamma = torch.rand(3, dtype=torch.float64).requires_grad_()
    for reduction in ("mean", "none"):

        def loss(x, w, target, gamma, reduction=reduction):
            return fk.linear_focal_loss(x, w, target, gamma, reduction=reduction, chunk_rows=2, label_smoothing=0.1)

        assert torch.autograd.gradcheck(loss, (x, w, probabilities, gamma))
        assert torch.autograd.gradgradcheck(loss, (x, w, probabilities, gamma))


TRANSFORMS = {
    "grad": lambda f, x, w, y: torch.func.grad(f)(w, x, y),
    "vmap": lambda f, x, w, y: torch.func.vmap(f, (None, 0, 0))(w, x, y),
    "gradients per sample": lambda f, x, w, y: torch.func.vmap(torch.func.grad(f), (None, 0, 0))(w, x, y),
    "gradient of vmap": lambda f, x, w, y: torch.func.grad(
        lambda w: torch.func.vmap(f, (None, 0, 0))(w, x, y).square().sum()
    )(w),
    "an ensemble of heads": lambda f, x, w, y: torch.func.vmap(torch.func.grad(f), (0, None, None))(
        torch.stack([w, 2 * w]), x, y
    ),
    "gradient of the gradient": lambda f, x, w, y: torch.func.grad(
        lambda w: torch.func.grad(f, 1)(w, x, y).square().sum()
    )(w),
    "jacobian of the gradient": lambda f, x, w, y: torch.func.jacrev(torch.func.grad(f, 1), 1)(w, x, y),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_torch_func(transform):
    x, w, _, target = (t.detach() for t in problem(ignored=False, leading=(6,)))
    found, expected = (
        transform(lambda w, x, y, loss=loss: loss(x, w, y, chunk_rows=4), x, w, target)
        for loss in (fk.linear_focal_loss, pair)
    )
    assert_close(found, expected)


def test_forward_mode_is_an_error_that_says_what_to_use():
    x, w, _, target = (t.detach() for t in problem())
    with pytest.raises(NotImplementedError, match=r"use focal_loss\(torch.nn.functional.linear"):
        torch.func.jvp(lambda x: fk.linear_focal_loss(x, w, target), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=r"use focal_loss\(torch.nn.functional.linear"):
            fk.linear_focal_loss(dual, w, target)


@pytest.mark.kernels  # without gradients the graph contains the two operations
@pytest.mark.parametrize(("reduction", "z_loss"), [("mean", 0.0), ("none", 0.0), ("mean", 0.1)])
def test_it_compiles_into_one_graph(reduction, z_loss):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(fk.linear_focal_loss, fullgraph=True, backend="aot_eager")
    counted = torch.compile(fk.linear_focal_loss, fullgraph=True, backend=backend)
    x, w, b, target = problem(torch.float32)
    options = {"linear_bias": b, "reduction": reduction, "z_loss": z_loss}
    for gamma in (2.0, 1.0):
        expected = fk.linear_focal_loss(x, w, target, gamma, **options)
        found = compiled(x, w, target, gamma, **options)
        assert_close(found, expected)
        for a, e in zip(derivatives(found, (x, w, b)), derivatives(expected, (x, w, b)), strict=True):
            assert_close(a, e)
        assert_close(counted(x, w, target, gamma, **options), expected)
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("linear_focal_loss" in name for name in names) == 1
    assert not any("linear." in name or "mm." in name for name in names)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_compiles_into_one_graph(dtype, autocast):
    torch._dynamo.reset()
    compiled = torch.compile(fk.linear_focal_loss, fullgraph=True, backend="aot_eager")
    x, w, _, target = problem(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        found, expected = compiled(x, w, target, 2.0), fk.linear_focal_loss(x, w, target, 2.0)
    assert_close(found, expected)
    for a, e in zip(derivatives(found, (x, w)), derivatives(expected, (x, w)), strict=True):
        assert_close(a, e)


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction):
    x, w, b, target = problem(torch.float32)
    code = {"none": 0, "mean": 1}[reduction]
    gamma = torch.tensor(2.0, dtype=torch.float64)
    settings = (-100, 0.0, False, None, 0.0, torch.float32, False, 4, 0.1)  # the last is the factor of the z-loss
    needed = [True, True, True, False, False]
    arguments = (x, w, b, target, gamma, None, None)
    torch.library.opcheck(torch.ops.focalkern.linear_focal_loss.default, (*arguments, code, *settings, needed, True))
    detached = [t.detach() if t is not None else None for t in arguments]
    torch.library.opcheck(
        torch.ops.focalkern.linear_focal_loss_gradient.default, (torch.rand(N), *detached, *settings, needed)
    )
