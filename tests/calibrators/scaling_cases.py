"""Samples and a coarse search for the tests of temperature and focal temperature scaling."""

import torch

from focalkern.calibrators import (
    FocalTemperatureScaling,
    TemperatureScaling,
)

BOTH = [TemperatureScaling, FocalTemperatureScaling]
# 0.05 to 4: wide enough that no optimum of the data below is at a bound.
COARSE = [index * 0.05 for index in range(1, 81)]


def sample(n=400, n_classes=5, scale=2.0, seed=0, dtype=torch.float32):
    """Logits that are ``scale`` times too large for their labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return (logits * scale).to(dtype), target


def fitted():
    return TemperatureScaling(temperatures=COARSE).fit(*sample(50))
