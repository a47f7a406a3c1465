"""A network, its samples and a comparison, shared by the tests of training loops."""

import torch
from conftest import assert_close
from torch import nn


def network(seed=0, inputs=6, classes=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, classes))


def samples(n=48, inputs=6, classes=4):
    """A problem that a small network learns, but not in the first steps."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, inputs, generator=generator)
    return x, (x @ torch.randn(inputs, classes, generator=generator)).argmax(1)


def assert_same_parameters(model, expected):
    assert model.state_dict().keys() == expected.state_dict().keys()
    for actual, parameter in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(actual, parameter)
