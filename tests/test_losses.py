"""The training losses against definitions written out in float64."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close

import focalkern as fk


def batch(n=64, c=7, dtype=torch.float64, ignored=True):
    input = torch.randn(n, c, dtype=dtype).mul_(2).requires_grad_()
    target = torch.randint(c, (n,))
    if ignored:
        target[::9] = -100
    return input, target


def test_the_focal_family_is_focal_loss():
    input, target = batch()
    weight = torch.rand(7, dtype=torch.float64)
    options = {"weight": weight, "label_smoothing": 0.1, "ignore_index": 3}
    expected = {
        fk.FocalLoss(2.0, **options): 2.0,
        fk.FocalLoss(torch.tensor(-1.5), **options): -1.5,
        fk.FocalLoss(fk.FLSD_53, **options): fk.FLSD_53,
        fk.InverseFocalLoss(1.5, **options): -1.5,
        fk.FLSDLoss(**options): fk.FLSD_53,
        fk.AdaFocalLoss(gamma_init=1.5, **options): 1.5,
    }
    labels = target.clamp(min=0)
    for loss, gamma in expected.items():
        assert_close(loss(input, labels), fk.focal_loss(input, labels, gamma, **options))


@pytest.mark.parametrize("weighted", [False, True])
def test_mmce_is_its_double_sum(weighted):
    input, target = batch()
    valid = target != -100
    r, top = input[valid].softmax(-1).max(-1)
    correct = (top == target[valid]).double()
    a = (correct - r) / len(r)
    if weighted:
        a = torch.where(correct > 0, (1 - r) / correct.sum(), -r / (1 - correct).sum())
    kernel = torch.exp(-(r[:, None] - r[None]).abs() / 0.4)
    expected = F.cross_entropy(input, target) + 2 * (a @ kernel @ a).sqrt()
    loss = fk.MMCELoss(weighted=weighted)(input, target)
    assert_close(loss, expected)
    assert_close(torch.autograd.grad(loss, input)[0], torch.autograd.grad(expected, input)[0])
