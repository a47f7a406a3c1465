"""FLSDLoss: a gamma per bin of the target's probability; the table is a setting of the constructor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from focalkern._devices import cpu_by_default
from focalkern._tracing import is_readable
from focalkern._types import Reduction
from focalkern.gamma import GammaTable
from focalkern.losses._base import described, digits
from focalkern.losses._focal import FocalLoss
from focalkern.losses._known_table import KnownTable

_FLSD_53_GAMMAS = (5.0, 3.0)


class FLSDLoss(KnownTable, FocalLoss):
    r"""Focal loss whose gamma is a step function of the probability p of the target class.

    .. math:: L = -(1 - p)^{\gamma(p)} \log p, \qquad
        \gamma(p) = \text{gammas}[b] \text{ for } \text{edges}[b] \le p < \text{edges}[b + 1]

    The default is FLSD-53: gamma = 5 for p < 0.2, gamma = 3 otherwise. (The published code has a third step at p = 0.5,
    to the gamma of its constructor: ``FLSDLoss([0, 0.2, 0.5, 1], [5, 3, gamma])``.) No gradient flows through gamma(p).

    Args:
        edges: [n_bins + 1] numbers or floating-point tensor, ascending; the first and the last bin are open-ended.
        gammas: [n_bins], one per bin; a negative one is an inverse focal loss.
        weight: [C] class weights, floating point; None for equal weights.
        ignore_index: label whose samples count neither in the loss nor in the mean.
        reduction: "none", "mean" or "sum". The mean divides by the summed weight of the samples.
        label_smoothing: e in [0, 1]; the target becomes (1 - e) t + e / C. With it, or with class probabilities, gamma
            is looked up at the probability of each class.
        detach_modulation: treat the factor before log p as a constant.

    The state does not contain the table, so that a checkpoint of cross-entropy loads with ``strict=True``.
    ``FocalLoss(GammaTable(edges, gammas))`` is the same loss with the table in its state.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, value or shape; edges that do not ascend.

    Source: Mukhoti et al. 2020 (arXiv 2002.09437), section 4.

    Example:
        >>> criterion = fk.FLSDLoss(reduction="none")
        >>> criterion
        FLSDLoss(edges=[0, 0.2, 1], gammas=[5, 3], reduction=none)
        >>> logits, target = torch.tensor([[1.4, 0.0], [1.4, 0.0]]), torch.tensor([0, 1])  # p = 0.802 and 0.198
        >>> criterion(logits, target)  # gamma is 3 and 5
        tensor([0.0017, 0.5383])
    """

    _table_in_state = False
    _optional_state = frozenset(("edges", "gammas"))
    _numbers: tuple[list[float], list[float]] | None = None  # of the table, where the constructor may read them

    def __init__(
        self,
        edges: Tensor | Sequence[float] = (0.0, 0.2, 1.0),
        gammas: Tensor | Sequence[float] = _FLSD_53_GAMMAS,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
    ) -> None:
        if isinstance(edges, Tensor) and gammas is _FLSD_53_GAMMAS:
            raise ValueError(f"{self._name}: gammas must be given with edges, got edges alone: {described(edges)}")
        table = GammaTable(edges, gammas)
        super().__init__(
            table,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
        )
        if table.edges.is_meta and not isinstance(edges, Tensor) and not isinstance(gammas, Tensor):
            with cpu_by_default():
                table = GammaTable(edges, gammas)
        if is_readable(table.edges) and is_readable(table.gammas):
            self._numbers = (table.edges.tolist(), table.gammas.tolist())
        self._mark_if_meta()

    def _known_table(self) -> tuple[Tensor, Tensor] | None:
        if self._numbers is None:
            return None
        edges, gammas = (
            torch.tensor(numbers, dtype=self.get_buffer(name).dtype, device="cpu")
            for name, numbers in zip(self._exact_buffers, self._numbers, strict=True)
        )
        return edges, gammas

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        self._table()  # fills the buffers
        # A checkpoint with another table belongs to another loss.
        for name in self._optional_state & state.keys():
            own, found = self.get_buffer(name), state[name]
            if not isinstance(found, Tensor):
                raise TypeError(f"{self._name}: {name} must be a tensor, got {type(found).__name__}")
            if not torch.equal(own.to(found), found):
                raise ValueError(
                    f"{self._name}: the checkpoint has the {name} {digits(found)}, and this loss was made with "
                    f"{digits(own)}; give them to the constructor"
                )
