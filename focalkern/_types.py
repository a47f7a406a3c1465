"""Facts that the whole package shares, each written once: kinds of arguments, dtypes, codes of the operators."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

__all__ = [
    "CRITERIA",
    "ESTIMATORS",
    "FLOATS",
    "HALVES",
    "INPUT_KINDS",
    "LABELS",
    "LOGITS",
    "LOSS_NAMES",
    "PLAIN_TENSORS",
    "PROPER",
    "REDUCTIONS",
    "STEEPEST_INVERSE_GAMMA",
    "Criterion",
    "Estimator",
    "InputKind",
    "Proper",
    "Reduction",
    "ScoredTarget",
    "compute_dtype",
    "is_assumed",
]

InputKind = Literal["logits", "probs"]
Reduction = Literal["none", "mean", "sum"]
ScoredTarget = Tensor | tuple[Tensor, Tensor]  # dense, labels, or (labels, scores)
Proper = Literal["nll", "brier"]  # proper scores: the searches by derivatives and the cross-validation minimise them
Criterion = Literal["nll", "brier", "ece"]
Estimator = Literal["equal_width", "equal_mass", "equal_mass_interp"]


class _Assumed(str):
    """A string that marks a default: equal to the same word from the user, but distinguishable by its type."""


def is_assumed(input_kind: str) -> bool:
    """Whether the value is a default that the user did not set."""
    return isinstance(input_kind, _Assumed)


LOGITS: Any = _Assumed("logits")
"""The default of ``input_kind``: rows that look like probabilities raise an error unless the user passed "logits"."""

INPUT_KINDS: tuple[InputKind, ...] = get_args(InputKind)
PROPER: tuple[Proper, ...] = get_args(Proper)
CRITERIA: tuple[Criterion, ...] = get_args(Criterion)
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
"""The estimators of the ECE, by name."""
LOSS_NAMES = {"nll": "NLL", "brier": "Brier score"}

# In the order of the compiled module's codes.
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

# Logits and parameters: float8 and the like have no arithmetic in torch.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
LABELS = (torch.int64, torch.int32, torch.uint8)

# Tensor classes that do not override torch's operators.
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)

# psi = -p log p / (1 + p) is at most W(1/e) = 0.27846: the inverse focal loss falls with p everywhere while
# |gamma| psi < 1. Below this gamma its gradient changes sign near p = 0.28.
STEEPEST_INVERSE_GAMMA = -3.591


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of computations with logits of a dtype: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32
