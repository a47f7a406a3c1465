"""The public function of every loss in the table of row losses, which the tests compare with its definition."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

import focalkern as fk
from focalkern.reference._softmax_losses import RowLossSpec


def takes_tensors(spec: RowLossSpec) -> bool:
    """Whether gamma may be a tensor with an entry per row: functions accept one, modules do not."""
    return hasattr(fk, _definition(spec).__name__)


def public_form(spec: RowLossSpec) -> Callable[..., Tensor]:
    """The loss as a function of logits, target, gamma (where it has one) and options: the function, or the module."""
    if takes_tensors(spec):
        return functools.partial(getattr(fk, _definition(spec).__name__), **getattr(spec.definition, "keywords", {}))

    def of_module(logits: Tensor, target: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return getattr(fk, spec.module)(*arguments, **options)(logits, target)

    return of_module


def _definition(spec: RowLossSpec) -> Callable[..., Tensor]:
    return getattr(spec.definition, "func", spec.definition)
