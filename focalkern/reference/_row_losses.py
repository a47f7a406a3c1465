"""The losses of rows: one entry per loss, from which the operators, plain torch, the tests, the CUDA cases, the counts
and the benchmarks take what they know of it. csrc/math/row_losses.def is the list of the compiled module.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from focalkern.gamma import GammaTable
from focalkern.reference import _softmax_losses as losses

__all__ = ["ROW_LOSSES", "RowLossSpec", "number_of", "row_loss_of", "take_numbers"]


@dataclass(frozen=True)
class RowLossSpec:
    """What a loss of rows is. A test, a case or a benchmark leaves a loss out by one of its properties, never by its
    name."""

    name: str  # in error messages, and in csrc/math/row_losses.def
    short: str  # in the names of cases, counts and benchmarks
    definition: Callable[..., Tensor]  # of focalkern.reference
    module: str  # the class, in focalkern
    parameters: tuple[Literal["gamma", "epsilon"], ...] = ()  # of the definition, beside the options of cross-entropy
    example: Mapping[str, Any] = field(default_factory=dict)  # arguments of the module, with which tests compute
    # Of losses -f log p the factor f(log p, log(1 - p), gamma): labels then need the probability of one class.
    factor: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    detachable: bool = False  # it takes detach_modulation
    soft_target: bool = True  # it takes class probabilities
    has_inverse: bool = False  # a negative gamma has a formula of its own; otherwise its loss is NaN
    infinite_at_zero: bool = True  # the loss of a target with probability 0
    keeps_class: bool = False  # another class than the target has a gradient of its own, and a row saves which
    of_batch: bool = False  # the module adds a term of the whole batch; the definition here is the rest

    def loss(
        self,
        input: Tensor,
        target: Tensor,
        gamma: float | Tensor | GammaTable,
        epsilon: float,
        detach_modulation: bool = False,
        **options: Any,
    ) -> Tensor:
        """The definition with what it takes of the operator's arguments."""
        values = {"gamma": gamma, "epsilon": epsilon}
        given: dict[str, Any] = {name: values[name] for name in self.parameters}
        if self.detachable:
            given["detach_modulation"] = detach_modulation
        return self.definition(input, target, **given, **options)


ROW_LOSSES: dict[str, RowLossSpec] = {
    spec.name: spec
    for spec in (
        RowLossSpec(
            name="focal_loss",
            short="focal",
            definition=losses.focal_loss,
            module="FocalLoss",
            parameters=("gamma",),
            example={"gamma": 2.0},
            factor=losses.modulating_factor,
            detachable=True,
            has_inverse=True,
        ),
        RowLossSpec(
            name="poly_focal_loss",
            short="poly",
            definition=losses.poly_focal_loss,
            module="PolyFocalLoss",
            parameters=("gamma", "epsilon"),
            example={"gamma": 2.0, "epsilon": 1.5},
        ),
        RowLossSpec(
            name="DualFocalLoss",
            short="dual",
            definition=losses.dual_focal_loss,
            module="DualFocalLoss",
            parameters=("gamma",),
            example={"gamma": 2.5},
            detachable=True,
            soft_target=False,
            keeps_class=True,
        ),
        RowLossSpec(
            name="BrierLoss",
            short="brier",
            definition=losses.brier_loss,
            module="BrierLoss",
            infinite_at_zero=False,
            keeps_class=True,
        ),
        RowLossSpec(
            name="MMCELoss",
            short="mmce",
            definition=functools.partial(losses.focal_loss, gamma=0.0),
            module="MMCELoss",
            factor=losses.modulating_factor,
            soft_target=False,
            keeps_class=True,
            of_batch=True,
        ),
    )
}

# In the order of their numbers.
_numbered = list(ROW_LOSSES)


def take_numbers(names: Sequence[str]) -> None:
    """Numbers the losses as the compiled module does.

    Raises:
        ValueError: the module has other losses than this table.
    """
    if sorted(names) != sorted(ROW_LOSSES):
        differing = sorted(set(names) ^ set(ROW_LOSSES))
        raise ValueError(f"the compiled module and focalkern/reference/_row_losses.py differ in {', '.join(differing)}")
    _numbered[:] = names


def number_of(name: str) -> int:
    """The number of a loss, by which the operators tell it: ``kind``."""
    return _numbered.index(name)


def row_loss_of(number: int) -> RowLossSpec:
    """The loss of a number."""
    return ROW_LOSSES[_numbered[number]]
