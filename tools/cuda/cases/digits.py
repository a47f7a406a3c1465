"""Sums over many classes keep their digits, for every share of a row per thread."""

import math

import pytest
import torch

from tools.cuda.cases.focal_loss import run_focal_loss
from tools.cuda.cases.focal_pixels import many_pixels
from tools.cuda.cases.row_loss import SPECS, number

CLASSES = 200_000
KINDS_OF_LOGITS = ["near", "ties", "equal"]


def rows(kind):
    """[2, classes, 2], a row is a column of memory."""
    logits = torch.randn(2, CLASSES, 2)
    if kind == "near":
        return 0.01 * logits
    if kind == "ties":
        return logits.round()
    # One logit above all others, which are equal: all rounding errors have the same sign.
    logits[:] = torch.tensor([0.1, 0.2])
    logits[:, 7] = torch.tensor([0.8, 1.7])
    return logits


def worst_error(library, loss, logits, target, gamma=2.0, **options):
    """Errors of the losses (relative), and of the gradients (relative to the largest of their row)."""
    spec = SPECS[loss]
    z = logits.double().requires_grad_()
    expected = spec.loss(z, target, gamma, 1.5, reduction="none", **options)
    (slope,) = torch.autograd.grad(expected.sum(), z)
    given = gamma if "gamma" in spec.parameters else 0.0
    actual = run_focal_loss(library, logits, target, given, torch.ones(target.numel()), reduction="none",
                            kind=number(loss), epsilon=1.5, **options)  # fmt: skip
    error = (actual["loss"].double().reshape(expected.shape) / expected.detach() - 1).abs().max()
    of_slope = (actual["grad_logits"].double() - slope).abs() / slope.abs().amax(1, keepdim=True)
    return float(error), float(of_slope.max())


def bound(loss, gamma=2.0):
    """The relative tolerance. A power of p is exp(gamma log p), and log p of a class among many is rounded to half a
    unit."""
    spec = SPECS[loss]
    power_of_p = spec.factor is not None and not spec.infinite_at_zero
    return 1e-6 + (gamma * 2.0**-24 * math.log(CLASSES) if power_of_p else 0.0)


# One thread has all classes of a pixel, or of two pixels; or several warps share a pixel.
@pytest.mark.parametrize("loss", SPECS)
@pytest.mark.parametrize("kind", KINDS_OF_LOGITS)
@pytest.mark.parametrize("alone", [False, True])
def test_digits_of_pixels(library, loss, kind, alone):
    torch.manual_seed(3)
    logits = rows(kind)
    target = torch.randint(CLASSES, (2, 2))
    if alone:
        with many_pixels(library):
            errors = worst_error(library, loss, logits, target)
    else:
        errors = worst_error(library, loss, logits, target)
    assert max(errors) < bound(loss), errors


@pytest.mark.parametrize("loss", ["focal", "poly"])
@pytest.mark.parametrize("kind", KINDS_OF_LOGITS)
def test_digits_of_smoothed_pixels(library, loss, kind):
    torch.manual_seed(4)
    target = torch.randint(CLASSES, (2, 2))
    errors = worst_error(library, loss, rows(kind), target, label_smoothing=0.1)
    assert max(errors) < 1e-6, errors
