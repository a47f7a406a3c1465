"""Samples and checks shared by the tests of focal_loss."""

import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint

import focalkern as fk

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

TABLE = fk.GammaTable([0.0, 0.1, 0.2, 0.2, 0.6, 1.0], [5.0, -1.0, 9.0, 0.5, 2.0])

# torch's own decompositions and inductor still use torch.jit.script, whose deprecation is torch's matter.
torch_jit_warns = pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script")


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, strides included, that requires grad."""
    return tensor.detach().requires_grad_()


# ---- the edges, at 300 digits ---------------------------------------------------------------------------------------

# 80 is the largest gap of the contract; 18 is where 1 - p leaves float32's digits, 40 where it leaves float64's. 7.5
# and 12 are just past the place where a series must replace -p log(p) / (1 - p), in float32 and in float64.
EDGE_GAPS = [0.0, 1.0, 7.5, 12.0, 18.0, 40.0, 80.0]

# 5 and 2: common; 0.25: infinite slope at p = 1; 0: cross-entropy; -0.5, -5: inverse, -5 with a negative coefficient.
EDGE_GAMMAS = [5.0, 2.0, 0.25, 0.0, -0.5, -5.0]


def edge_row(gap: float) -> list[float]:
    # Multiples of 1/4: exact in float32.
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
