"""Samples and checks shared by the tests of focal_loss."""

import pytest
import torch
from conftest import assert_close

import focalkern as fk
from focalkern import reference

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

TABLE = fk.GammaTable([0.0, 0.1, 0.2, 0.2, 0.6, 1.0], [5.0, -1.0, 9.0, 0.5, 2.0])

# torch's own decompositions and inductor still use torch.jit.script, which is deprecated.
torch_jit_warns = pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script")


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, strides included, that requires grad."""
    return tensor.detach().requires_grad_()


# ---- the edges, at 300 digits ---------------------------------------------------------------------------------------

# 80 is the largest gap of the contract. At 18, 1 - p falls below float32's digits, at 40 below float64's. 7.5 and 12
# are just past the point where a series must replace -p log(p) / (1 - p), in float32 and in float64.
EDGE_GAPS = [0.0, 1.0, 7.5, 12.0, 18.0, 40.0, 80.0]

# 5 and 2: common; 0.25: infinite derivative at p = 1; 0: cross-entropy; -0.5, -5: inverse, -5 with a negative
# coefficient.
EDGE_GAMMAS = [5.0, 2.0, 0.25, 0.0, -0.5, -5.0]


def edge_row(gap: float) -> list[float]:
    # Multiples of 1/4 are exact in float32.
    return [0.25 - gap, 0.25, -0.75 - gap] if gap else [0.25, 0.25, 0.25]


# ---- compile, export, autocast, subclasses --------------------------------------------------------------------------
@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


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


# ---- every option, shape, layout and dtype --------------------------------------------------------------------------
def gammas_for(shape, device, dtype=torch.float64):
    """Each form of gamma for an unreduced loss of this shape."""
    yield 2.0
    yield 0
    yield -1.5
    yield TABLE.to(device)
    yield torch.tensor(0.7, dtype=dtype, device=device)
    if shape:
        # Gammas of both signs and 0, one per row.
        yield torch.randint(-4, 8, shape, device=device).to(dtype) / 2
        yield torch.rand(1, *shape[1:], dtype=dtype, device=device)
    if len(shape) > 1:
        yield torch.rand(shape[-1], dtype=dtype, device=device) * 3
        yield torch.rand(shape[0], *[1] * (len(shape) - 1), dtype=dtype, device=device).expand(shape)
