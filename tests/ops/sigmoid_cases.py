"""Samples and checks shared by the tests of the sigmoid losses."""

import torch
import torch._dynamo

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

SCORED = ["varifocal_loss", "matchability_loss", "ia_bce_loss"]
NAMES = ["sigmoid_focal_loss", "asymmetric_loss", "quality_focal_loss", *SCORED]

# Far beyond the under- and overflow of exp in float32 and float64, where 1 - p rounds to 1, and ordinary values.
SCORES = [-1000.0, -745.0, -100.0, -88.0, -17.0, -3.0, -0.5, 0.0, 0.25, 2.0, 17.0, 90.0, 104.0, 800.0, 1000.0]


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def grads(loss, inputs, upstream=None):
    upstream = torch.ones_like(loss) if upstream is None else upstream
    return torch.autograd.grad(loss, inputs, upstream, retain_graph=True)
