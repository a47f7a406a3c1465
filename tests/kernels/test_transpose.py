"""Rows of few classes, which the CPU kernels transpose: conversions, and the look-up of gammas for a vector of rows."""

import math

import pytest
import torch
from conftest import assert_close

import focalkern as fk
from focalkern import reference

pytestmark = pytest.mark.kernels


def gradient(z, target, upstream, gamma):
    z = z.detach().requires_grad_()
    return torch.autograd.grad(fk.focal_loss(z, target, gamma, reduction="none"), z, upstream.to(z.dtype))[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_rounded(dtype):
    # Sizes around those that are transposed together (4 rows and classes, 8 classes, 16 rows, 64 rows), and odd numbers
    # of classes.
    for classes in (2, 4, 5, 7, 8, 9, 10, 16, 19, 31, 32):
        for n in (3, 4, 15, 16, 17, 63, 64, 65, 90):
            z = (4 * torch.randn(n, classes)).to(dtype)
            z[0, 0], z[n // 2, 1] = -math.inf, 300.0
            z[n - 1, classes - 1] = math.nan
            target = torch.randint(classes, (n,))
            target[1] = -100
            # Upstream gradients so small that some gradients are denormal, or so large that they overflow.
            upstream = (torch.randn(n) * 10.0 ** torch.randint(-6, 5, (n,))).to(dtype)
            expected = gradient(z.float(), target, upstream, 1.5).to(dtype)
            found = gradient(z, target, upstream, 1.5)
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("n_bins", [1, 2, 3, 15, 16, 17, 40])
def test_table_of_any_length(n_bins):
    # Equal edges, which make bins empty, and gammas of both signs.
    inner = torch.rand(n_bins - 1).sort().values
    if n_bins > 2:
        inner[1] = inner[0]
    edges = torch.cat([torch.zeros(1), inner, torch.ones(1)])
    table = fk.GammaTable(edges, 4 * torch.rand(n_bins) - 1)
    z = 3 * torch.randn(333, 10)
    target = torch.randint(10, (333,))
    p = z.double().softmax(1).gather(1, target.unsqueeze(1))
    decided = ((p - edges[1:-1].double()).abs() > 1e-5).all(1)
    assert decided.sum() > 300
    found = fk.focal_loss(z, target, table, reduction="none")
    expected = reference.focal_loss(z.double(), target, table, reduction="none")
    assert_close(found[decided], expected[decided].float())
    ones = torch.ones(333)
    exact = z.double().requires_grad_()
    (slopes,) = torch.autograd.grad(reference.focal_loss(exact, target, table, reduction="sum"), exact)
    assert_close(gradient(z, target, ones, table)[decided], slopes[decided].float())
