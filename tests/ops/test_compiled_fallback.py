"""The losses of plain torch, compiled: values, derivatives, and the cases in which nothing is compiled.

The test's backend counts the graphs and runs them without compilation; one test uses torch's own backend.
"""

import shutil

import pytest
import torch
from conftest import assert_close

import focalkern as fk
from focalkern import fallback
from focalkern.fallback import _compile
from focalkern.reference._softmax_losses import number_of

N, C = 12, 7
FLSD = (fk.FLSD_53.edges, fk.FLSD_53.gammas)
WEIGHT = torch.linspace(0.5, 2, C)

pytestmark = [
    # torch's own decompositions and inductor still use torch.jit.script, which is deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture
def graphs(monkeypatch):
    """The list of compiled graphs, while the CPU uses compiled losses for batches of any size."""
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(_compile, "_devices", frozenset({"cpu"}))
    monkeypatch.setattr(_compile, "_forms", {})
    monkeypatch.setattr(_compile, "_LEAST", 0)
    monkeypatch.setattr(_compile, "_BACKEND", backend)
    yield found
    torch.compiler.reset()


def focal(z, y, gamma=2.0, edges=None, weight=None, reduction=1, smoothing=0.0, detached=False):
    return fallback.focal_loss(z, y, gamma, edges, weight, reduction, -100, smoothing, detached)


def row(name, epsilon=0.0):
    def loss(z, y, gamma=2.0):
        return fallback.row_loss(z, y, gamma, None, None, 1, -100, 0.0, False, number_of(name), epsilon)

    return loss


def sigmoid(kind, second, margin=0.0):
    def loss(z, y):
        target = (y.unsqueeze(1) == torch.arange(C)).to(z.dtype)
        return fallback.sigmoid_loss(z, target, 2.0, second, None, None, kind, margin, 1, -100)

    return loss


CASES = {
    "focal": focal,
    "inverse, none": lambda z, y: focal(z, y, -1.5, reduction=0),
    "gamma, a tensor": lambda z, y: focal(z, y, torch.linspace(0, 3, N)),
    "table": lambda z, y: focal(z, y, FLSD[1], FLSD[0]),
    "smoothing, weights": lambda z, y: focal(z, y, smoothing=0.1, weight=WEIGHT),
    "probabilities": lambda z, y: focal(z, torch.softmax(torch.linspace(-1, 1, N * C).reshape(N, C), 1).to(z.dtype)),
    "detached": lambda z, y: focal(z, y, detached=True),
    "poly": row("poly_focal_loss", 1.5),
    "dual": row("DualFocalLoss"),
    "Brier": row("BrierLoss"),
    "sigmoid": sigmoid(0, 0.25),
    "asymmetric": sigmoid(1, 1.0, 0.05),
    "quality": sigmoid(2, None),
    "varifocal": sigmoid(3, 0.75),
    "matchability": sigmoid(4, None, 1.0),
    "IoU-aware": sigmoid(5, 0.25, 0.01),
}


def batch(dtype=torch.float32, rows=N):
    y = torch.randint(C, (rows,))
    y[0] = 3
    return (2 * torch.randn(rows, C)).to(dtype).requires_grad_(), y


def gradient(loss, z, **options):
    return torch.autograd.grad(loss, z, torch.ones_like(loss), **options)[0]


OTHER_DTYPES = [(name, dtype) for name in ("focal", "Brier") for dtype in (torch.float64, torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CASES), *OTHER_DTYPES])
def test_is_the_definition(name, dtype, graphs, monkeypatch):
    z, y = batch(dtype)
    found = CASES[name](z, y)
    assert len(graphs) == 1
    of_logits = gradient(found, z)
    with torch.no_grad():
        assert_close(CASES[name](z, y), found)
    monkeypatch.setattr(_compile, "_devices", frozenset())
    expected = CASES[name](z, y)
    assert found.dtype == expected.dtype
    assert_close(found, expected)
    assert_close(of_logits, gradient(expected, z))


def test_another_gamma_or_size_compiles_nothing(graphs):
    for gamma in (2.0, 1.5, 3, 0.0):
        for rows in (N, N + 3, 40):
            z, y = batch(rows=rows)
            gradient(focal(z, y, gamma), z)
    assert len(graphs) == 1
    z, y = batch(torch.float64)
    focal(z, y)
    focal(z, y, reduction=2)
    assert len(graphs) == 3  # another dtype, another reduction


def test_more_options_than_torch_compiles_of_one_function(graphs):
    z, y = batch()
    for place in range(9):  # torch.compile stops at eight
        focal(z, y, smoothing=0.01 * (place + 1))
    assert len(graphs) == 9


def test_gradients_by_gamma_again_and_twice(graphs):
    z, y = batch(torch.float64)
    gamma = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z, gamma: focal(z, y, gamma), (z, gamma))
    assert torch.autograd.gradgradcheck(lambda z, gamma: focal(z, y, gamma), (z, gamma))
    loss = focal(z, y, gamma)
    first = gradient(loss, z, retain_graph=True)
    assert_close(gradient(loss, z), first)


def test_where_nothing_is_compiled(graphs, monkeypatch):
    z, y = batch(torch.float64)
    expected = focal(z, y)
    graphs.clear()
    torch.func.grad(lambda z: focal(z, y))(z.detach())
    torch.func.jvp(lambda z: focal(z, y), (z.detach(),), (torch.ones_like(z),))
    with torch.autograd.forward_ad.dual_level():
        focal(torch.autograd.forward_ad.make_dual(z.detach(), torch.ones_like(z)), y)
    assert_close(torch.compile(focal, backend="eager")(z, y), expected)
    monkeypatch.setattr(_compile, "_LEAST", z.numel() + 1)
    focal(z, y)
    monkeypatch.setattr(_compile, "_LEAST", z.numel())
    assert not graphs
    focal(z, y)
    assert not graphs  # it was compiled in the first line
    monkeypatch.setattr(_compile, "_devices", frozenset({"cuda"}))
    focal(z, y, reduction=2)
    assert not graphs


def test_errors_are_those_of_plain_torch(graphs):
    z, y = batch()
    with pytest.raises(IndexError, match=r"focal_loss: target must be in \[0, 7\) or ignore_index, got 7 at row 1"):
        focal(z, torch.tensor([0, C] + [0] * (N - 2)))
    with pytest.raises(ValueError, match="focal_loss: target must be"):
        focal(z, y[1:])
    assert not graphs


def test_a_compiler_that_fails_is_said_once_and_plain_torch_goes_on(graphs, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    z, y = batch()
    expected = focal(z, y)
    monkeypatch.setattr(_compile, "_BACKEND", broken)
    with pytest.warns(UserWarning, match="uncompiled plain torch, because torch.compile failed: .*no compiler here"):
        found = focal(z, y, reduction=2)
    assert_close(found / N, expected)
    assert not fallback.compiles_on("cpu")
    assert_close(focal(z, y), expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a compiler")
def test_with_inductor(graphs, monkeypatch):
    z, y = batch()
    monkeypatch.setattr(_compile, "_BACKEND", "inductor")
    found = row("poly_focal_loss", 1.0)(z, y)
    of_logits = gradient(found, z)
    assert fallback.compiles_on("cpu")
    monkeypatch.setattr(_compile, "_devices", frozenset())
    expected = row("poly_focal_loss", 1.0)(z, y)
    assert_close(found, expected)
    assert_close(of_logits, gradient(expected, z))
