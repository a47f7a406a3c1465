"""Sums of the NLL of the focal calibration map: the kernel compared with mpmath and with derivatives of plain torch."""

import math

import mpmath
import pytest
import torch

from focalkern import fallback
from focalkern.ops._backend import backend_for
from focalkern.ops.map_nll_sums import map_nll_sums_for


def batch(classes, scale=2.0, rows=37, dtype=torch.float64, probs=False):
    """Two networks; rows with equal logits, with two largest ones, with impossible classes, with one possible class."""
    generator = torch.Generator().manual_seed(classes)
    input = scale * torch.randn(2, rows, classes, generator=generator, dtype=torch.float64)
    target = torch.randint(classes, (2, rows), generator=generator)
    input[0, 1] = 0.5
    input[0, 2, 0] = input[0, 2, 1] = input[0, 2].max() + 1
    if classes > 2:
        input[1, 3, 1] = -math.inf
        target[1, 3] = 0
        input[1, 4, 1:] = -math.inf
        target[1, 4] = 0
    share = torch.rand(2, rows, generator=generator, dtype=torch.float64)
    share[:, -1] = 0
    input = input.softmax(-1) if probs else input
    return input.to(dtype), target, share / share.sum(1, keepdim=True)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


# classes: two; below, at and off the vector width; more than the small tile of rows holds in cache. gamma: none, zero,
# both signs, near -1, large.
@pytest.mark.parametrize("classes", [2, 3, 8, 101])
@pytest.mark.parametrize("gammas", [None, (0.0, 0.7), (-0.5, -0.97), (3.0, 60.0)])
@pytest.mark.parametrize("probs", [False, True])
def test_the_kernel_has_the_derivatives_of_torch(classes, gammas, probs):
    input, target, share = batch(classes, probs=probs)
    of_gamma = None if gammas is None else numbers(*gammas)
    arguments = input, target, share, of_gamma, numbers(1.0, 0.3), probs
    found, expected = map_nll_sums_for(input)(*arguments), fallback.map_nll_sums(*arguments)
    size = expected.abs().amax(1, keepdim=True)
    assert found.shape == (2, 7) and bool(((found - expected).abs() <= 1e-11 * size).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes_are_summed_in_float64(dtype):
    input, target, share = batch(5, dtype=dtype)
    rest = target, share, numbers(0.5, -0.4), numbers(1.0, 2.0), False
    found = map_nll_sums_for(input)
    assert torch.equal(found(input, *rest), found(input.double(), *rest))


def test_saturated_rows_have_the_digits_of_mpmath():
    """log p_t of a row with a far larger first logit; at gamma = 1 with its derivatives."""
    gap, gamma = 60.0, 1.0
    input = torch.tensor([[[gap, 0.0, -1.0]]], dtype=torch.float64)
    with mpmath.workdps(80):

        def log_p(beta, of, y):
            e = [mpmath.exp(beta * (z - gap)) for z in (gap, 0, -1)]
            q = [one / sum(e) for one in e]
            a = [p / ((1 - p) ** of * (1 - of * p * mpmath.log(p) / (1 - p))) for p in q]
            return mpmath.log(a[y] / sum(a))

        for label in range(3):
            point = (mpmath.mpf(1), mpmath.mpf(gamma))
            expected = [-log_p(*point, label)]
            for order in ((1, 0), (2, 0), (0, 1), (1, 1), (0, 2)):
                expected.append(-mpmath.diff(lambda b, g: log_p(b, g, label), point, order))  # noqa: B023
            found = map_nll_sums_for(input)(
                input, torch.tensor([[label]]), numbers(1.0)[None], numbers(gamma), numbers(1.0), False
            )[0]
            for one, other in zip(found[[0, 1, 2, 4, 5, 6]].tolist(), expected, strict=True):
                assert one == pytest.approx(float(other), rel=1e-9, abs=1e-40)


def test_single_networks_nan_and_beta_zero():
    input, target, share = batch(4, rows=300)
    sums, both = map_nll_sums_for(input), numbers(1.0, 2.0)
    whole = sums(input, target, share, None, both, False)
    assert torch.equal(sums(input[1:], target[1:], share[1:], None, both[1:], False), whole[1:])
    assert torch.equal(sums(input, target, share, None, numbers(math.nan, 2.0), False)[0], torch.zeros(7).double())
    # At beta = 0 all possible classes have the same probability.
    at_zero = sums(input[:1], target[:1], share[:1], None, numbers(0.0), False)[0]
    assert at_zero[0].item() == pytest.approx(math.log(4), rel=1e-14)
    below = input[0].amax(-1) - input[0].gather(1, target[0][:, None]).squeeze(1)
    assert whole[0, 3].item() == pytest.approx((share[0] * below).sum().item(), rel=1e-13)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda z, y, s: (z[0], y, s), ValueError, r"input must be \[B, N, C\] with C >= 2, got \[37, 3\]"),
        (lambda z, y, s: (z.int(), y, s), TypeError, "input must be"),
        (lambda z, y, s: (z, y[:, 1:], s), ValueError, r"target must be int64 \[B, N\] = \[2, 37\], got .*36"),
        (lambda z, y, s: (z, y, s.float()), ValueError, r"share must be float64 .* = \[2, 37\], got torch.float32"),
        (lambda z, y, s: (z, y.index_fill(1, torch.tensor(2), 3), s), IndexError, "target must be from 0 to 2, got 3"),
    ],
)
@pytest.mark.kernels("stable")
def test_the_kernel_refuses_what_does_not_fit(change, error, words):
    module = backend_for(torch.empty(0))
    with pytest.raises(error, match=rf"^map_nll_sums: {words}"):
        module.map_nll_sums(*change(*batch(3)), None, numbers(1.0, 1.0), False)
