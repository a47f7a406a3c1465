"""Base of the losses that know the numbers of their table, so that they survive the meta device."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from focalkern._devices import on_device
from focalkern.gamma import GammaTable
from focalkern.losses._focal import FocalFamily


class KnownTable(FocalFamily):
    """A loss that fills its table again after a build on the meta device.

    Such a build leaves arbitrary memory in the buffers that no checkpoint fills: ``to_empty`` does, and so does
    ``from_pretrained`` of transformers.
    """

    _is_from_meta = False  # whether its buffers may be replaced by arbitrary memory
    _is_lost = False  # whether they were

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if self._is_from_meta and name in self._exact_buffers:
            self._is_lost = True

    def _known_table(self) -> tuple[Tensor, Tensor] | None:
        """Edges and gammas on the CPU; None if the loss was made from tensors without values."""
        raise NotImplementedError

    def _mark_if_meta(self) -> None:
        """Called after the buffers are made. Transformers replaces buffers with values, too, if the default device is
        meta."""
        is_meta = torch.get_default_device().type == "meta" or super()._table().edges.is_meta
        self._is_from_meta = is_meta and self._known_table() is not None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        had_no_values = super()._table().edges.is_meta
        if had_no_values:
            try:
                fn(torch.empty(0, device="meta"))
            except NotImplementedError:  # .to(device) copies values, as after load_state_dict(assign=True)
                self._filled(torch.device("cpu"))
        super()._apply(fn, recurse)
        device = super()._table().edges.device
        if device.type == "meta":
            self._is_from_meta = True
        elif had_no_values or self._is_lost:
            self._filled(device)
        return self

    def _table(self) -> GammaTable:
        table = super()._table()
        return self._filled(table.edges.device) if self._is_lost and not table.edges.is_meta else table

    def _table_beside(self, input: Tensor, table: GammaTable) -> GammaTable:
        if table.edges.is_meta and not input.is_meta:
            table = self._filled(input.device)
        return super()._table_beside(input, table)

    def _filled(self, device: torch.device) -> GammaTable:
        with torch.inference_mode(False):  # training must be able to save the buffers
            known = self._known_table()
            if known is None:
                return super()._table()
            table = GammaTable._unchecked(*(on_device(values, device) for values in known))
        if not torch.compiler.is_compiling():  # a graph must not have side effects
            self._buffers.update(zip(self._exact_buffers, (table.edges, table.gammas), strict=True))
            self._is_from_meta = self._is_lost = False
        return table
