"""Samples for the tests of intervals."""

import torch


def sample(n, n_classes=5, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(n + n_classes)
    logits = 2 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    target = (logits + 2 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)).argmax(-1)
    return logits.to(dtype).to(device), target.to(device)
