"""Shared by the tests of other libraries' losses: gammas, and the comparison of two losses."""

import torch
from conftest import assert_close

# gamma is not only 0 or 2, because these hide half of the mistakes in gamma or alpha; for the same reason alpha is not
# 1/2.
GAMMAS = [0.0, 0.7, 2.0, 3.5]
C = 4


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def assert_equal(theirs, ours, z, dtype=None):
    """Compares two losses, and their gradients for the same random upstream gradient."""
    z_theirs, z_ours = leaf(z), leaf(z)
    expected, loss = theirs(z_theirs), ours(z_ours)
    assert loss.shape == expected.shape
    assert expected.detach().abs().max() > 0.01
    assert_close(loss, expected, dtype)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    loss.backward(upstream.to(loss.dtype))
    assert z_theirs.grad.abs().max() > 1e-4
    assert_close(z_ours.grad, z_theirs.grad, dtype)


def per_class(values):
    return torch.tensor(values, dtype=torch.float64)
