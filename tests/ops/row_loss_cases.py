"""Common parts of the tests of the losses of rows: every loss with its definition, and tolerances."""

import functools

import torch
from conftest import TOLERANCE

import focalkern as fk
from focalkern.reference._softmax_losses import ROW_LOSSES

SPECS = {spec.short: spec for spec in ROW_LOSSES.values() if not spec.of_batch}


def module_of(name):
    spec = SPECS[name]
    return functools.partial(getattr(fk, spec.module), **spec.example)


def both(spec):
    """The loss with the arguments of its example, and its definition."""
    given = {"gamma": 0.0, "epsilon": 0.0, **spec.example}
    return (
        lambda z, t, **options: module_of(spec.short)(**options)(z, t),
        lambda z, t, **options: spec.loss(z, t, **given, **options),
    )


LOSSES = {name: both(spec) for name, spec in SPECS.items()}


def near(actual, expected, factor):
    """assert_close with a multiple of its tolerance, for losses with terms or upstream gradients larger than one."""
    rtol, atol = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual.detach().double(), expected.detach().double(), rtol=factor * rtol, atol=factor * atol, equal_nan=True
    )
