"""The losses by their names on the command line."""

import re
from collections.abc import Callable

import torch
from torch import nn

import focalkern as fk
from benchmarks.train_study.errors import StudyError

# Name of the family: the function that makes the loss from its coefficient, and the default coefficient (None: no
# coefficient).
_FAMILIES: dict[str, tuple[Callable[..., nn.Module], float | None]] = {
    "cross-entropy": (nn.CrossEntropyLoss, None),
    "focal": (fk.FocalLoss, 3),
    "flsd-53": (fk.FLSDLoss, None),
    "adafocal": (fk.AdaFocalLoss, None),
    "inverse-focal": (fk.InverseFocalLoss, 2),
    "dual-focal": (fk.DualFocalLoss, 5),
    "brier": (fk.BrierLoss, None),
    "mmce": (fk.MMCELoss, 2),
    "label-smoothing": (lambda epsilon: nn.CrossEntropyLoss(label_smoothing=epsilon), 0.05),
    "l1-norm": (fk.LogitNormPenalty, 0.01),
}

# The six losses of the recorded study come first, so that an interrupted study has them.
ALL = (
    "cross-entropy",
    "focal-3",
    "flsd-53",
    "adafocal",
    "inverse-focal-2",
    "brier",
    "focal-1",
    "focal-2",
    "focal-5",
    "focal-7",
    "inverse-focal-1",
    "inverse-focal-3",
    "dual-focal-5",
    "mmce-2",
    "label-smoothing-0.05",
    "l1-norm-0.01",
)


def parse(name: str) -> tuple[str, float | None]:
    """``focal-3`` is ("focal", 3.0). A family without a coefficient has None; a missing coefficient is the default.

    Raises:
        StudyError: no such loss.
    """
    if name in _FAMILIES:
        default = _FAMILIES[name][1]
        return name, None if default is None else float(default)
    found = re.fullmatch(r"([a-z0-9-]+?)-(\d+\.?\d*|\.\d+)", name)
    if found and found[1] in _FAMILIES and _FAMILIES[found[1]][1] is not None:
        return found[1], float(found[2])
    known = ", ".join(family if default is None else f"{family}-X" for family, (_, default) in _FAMILIES.items())
    raise StudyError(f"loss: expected one of {known} (X is a number), got {name!r}")


def canonical(name: str) -> str:
    """The canonical name of a loss: ``focal-3`` for ``focal-3.0`` and ``focal``."""
    family, coefficient = parse(name)
    return family if coefficient is None else f"{family}-{coefficient:g}"


def build(name: str) -> nn.Module:
    """The loss called ``name``, from logits [N, C] and labels [N] to a mean.

    Raises:
        StudyError: no such loss, or a coefficient that it does not take.
    """
    family, coefficient = parse(name)
    try:
        loss = _FAMILIES[family][0](*(() if coefficient is None else (coefficient,)))
        loss(torch.zeros(2, 2), torch.tensor([0, 1]))  # torch's losses check their options only when they are called
    except (ValueError, RuntimeError) as error:
        raise StudyError(f"loss: {name}: {error}") from error
    return loss


def gamma(name: str) -> float | None:
    """The gamma of a focal loss (> 0), cross-entropy (0) or inverse focal loss (< 0); None for all other losses."""
    family, coefficient = parse(name)
    if family == "cross-entropy":
        return 0.0
    if family not in ("focal", "inverse-focal") or coefficient is None:
        return None
    return coefficient if family == "focal" else -coefficient


def rank(name: str) -> tuple[int, str, float]:
    """The sort key of a loss: its position in ``ALL``, then family and coefficient."""
    family, coefficient = parse(name)
    return (ALL.index(name) if name in ALL else len(ALL), family, coefficient or 0.0)
