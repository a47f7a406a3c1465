"""Samples and checks shared by test_losses.py and test_losses_*.py."""

import functools

import torch

import focalkern as fk
from focalkern.reference._softmax_losses import ROW_LOSSES

DTYPES = [torch.float32, torch.float64]

LOSSES = {
    **{spec.short: functools.partial(getattr(fk, spec.module), **spec.example) for spec in ROW_LOSSES.values()},
    "focal, tensor": lambda **o: fk.FocalLoss(torch.tensor(1.5), **o),
    "focal, table": lambda **o: fk.FocalLoss(fk.GammaTable([0.0, 0.4, 1.0], [-1.0, 2.0]), **o),
    "inverse": lambda **o: fk.InverseFocalLoss(1.5, **o),
    "flsd": lambda **o: fk.FLSDLoss(**o),
    "adafocal": lambda **o: fk.AdaFocalLoss(**o),
    "norm": lambda **o: fk.LogitNormPenalty(0.05, **o),
    "mmce, weighted": lambda **o: fk.MMCELoss(weighted=True, **o),
}

NAMES = list(LOSSES)

OF_BATCH = {spec.module for spec in ROW_LOSSES.values() if spec.of_batch}

PER_SAMPLE = [name for name in NAMES if type(LOSSES[name]()).__name__ not in OF_BATCH]


def batch(n=60, c=7, dtype=torch.float64, device="cpu"):
    input = torch.randn(n, c, dtype=dtype, device=device).mul_(2).requires_grad_()
    return input, torch.randint(c, (n,), device=device)


def gradient(loss, input):
    return torch.autograd.grad(loss, input)[0]
