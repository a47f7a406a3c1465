"""Samples and checks shared by the tests of AdaFocal."""

import dataclasses

import torch

import focalkern as fk

NAN = float("nan")

EDGES = [0.0, 0.25, 0.5, 1.0]


def validation(n=200, c=5, sharpness=3.0, dtype=torch.float64, device="cpu"):
    target = torch.randint(c, (n,), device=device)
    logits = torch.randn(n, c, dtype=dtype, device=device)
    logits[torch.arange(n), target] += 1.0
    return sharpness * logits, target


def snapshot(loss):
    """Compares everything in two states exactly."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return str(value.dtype), value.tolist()
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, list) else value

    return repr(plain(dict(loss.state_dict())))


def extra_of(state):
    """The history and the accumulated samples of a state, in the format of version 0.1."""
    loss = fk.AdaFocalLoss()
    loss.set_extra_state(state["_extra_state"])
    return {
        "history": [dataclasses.asdict(record) for record in loss.history],
        "confidence": torch.cat(loss._confidence),
        "correct": torch.cat(loss._correct),
    }
