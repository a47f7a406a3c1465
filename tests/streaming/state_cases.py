"""Samples, and a state of batches, for the tests of grid states."""

import io

import torch

import focalkern as fk

CRITERIA = ("ece", "mce", "nll", "brier")
# Flatter, plain temperature scaling, much sharper; saturated, low, neutral and high temperatures.
GAMMAS = [-0.5, 0.0, 5.0]
TEMPERATURES = [0.01, 0.3, 1.0, 2.5]


def samples(n, n_classes=10, dtype=torch.float32, device="cpu", scale=3.0):
    """Logits of a model with an accuracy above one half."""
    target = torch.randint(n_classes, (n,), device=device)
    z = torch.randn(n, n_classes, dtype=torch.float64, device=device) * scale
    z[torch.arange(n, device=device), target] += 1.5 * scale
    return z.to(dtype), target


def state_of(batches, **options):
    state = fk.CalibrationGridState(GAMMAS, TEMPERATURES, **options)
    for logits, target in batches:
        state.update(logits, target)
    return state


def batches_of(logits, target, sizes):
    return list(zip(logits.split(sizes), target.split(sizes), strict=True))


def snapshot(state):
    """Compares everything in two states bitwise."""
    content = state.state_dict()
    tensors = {name: tensor.cpu().numpy().tobytes() for name, tensor in content["tensors"].items()}
    return {**content, "tensors": tensors}


def through_a_file(state):
    stream = io.BytesIO()
    torch.save(state.state_dict(), stream)
    return torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
