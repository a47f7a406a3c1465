"""Shared by the tests of the spline map: its parameters."""

import torch

KNOTS = torch.tensor([-6.0, -4.5, -3.0, -1.0, -0.5, 1.0, 3.0], dtype=torch.float64)
# Both slopes are small enough to keep the order of the classes.
VALUES = torch.tensor([0.3, 0.1, 0.0, 0.2, 0.4, 0.9, 3.0], dtype=torch.float64)
MAP = (1.3, 1e-4, 0.1, KNOTS, VALUES)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def parameters_of(n_classes: int, kind: str) -> dict[str, torch.Tensor]:
    if kind == "scalar":
        return {}
    shape = (n_classes,) if kind == "vector" else (n_classes, n_classes)
    return {
        "weight": torch.randn(shape, dtype=torch.float64) * 0.1,
        "bias": torch.randn(n_classes, dtype=torch.float64) * 0.3,
    }
