"""Samples and axes shared by the tests of calibration_grid."""

import torch

ESTIMATORS = ["equal_width", "equal_mass", "equal_mass_interp"]
CRITERIA = ("ece", "mce", "nll", "brier")
# Flatter, plain temperature scaling, slightly, moderately and much sharper; low, neutral and high temperatures.
GAMMAS = [-0.5, 0.0, 0.37, 1.0, 5.0]
TEMPERATURES = [0.25, 1.0, 2.5]


def samples(n, n_classes, dtype=torch.float64, device="cpu", scale=2.0):
    """Logits of a model with an accuracy above one half."""
    target = torch.randint(n_classes, (n,), device=device)
    z = torch.randn(n, n_classes, dtype=torch.float64, device=device) * scale
    z[torch.arange(n, device=device), target] += 2.0
    return z.to(dtype), target
