"""Rows for the fits of spline scaling, with their features: temperature, floor and knots, shared by all folds."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from focalkern._types import InputKind
from focalkern.calibrators._row_source import BLOCK, MemoryRows, PartOf, RowSource, fold_by_fold
from focalkern.calibrators._spline_curve import NaturalSpline
from focalkern.calibrators._spline_features import (
    find_knots,
    floor_of,
    histogram,
    logit_scale,
    masks_zeros,
    robust_temperature,
    spread,
)
from focalkern.calibrators._temperature_bound import no_row_is_wrong
from focalkern.fallback._spline_arguments import FEW_CLASSES
from focalkern.ops.spline_sums import spline_sums_for

__all__ = ["SplineRows"]


@dataclass(frozen=True)
class SplineRows:
    """Rows with the temperature, the floor and the knots of a spline scaling.

    Attributes:
        source: the rows.
        input_kind: ``"logits"`` or ``"probs"``.
        temperature, floor: T and e of x = log((1 - e) softmax(z / T) + e / C).
        masks: whether a logit of -inf means probability 0.
        spline: the knots.
        factor: factor for all penalties.
        no_errors: whether no row is wrong. The rows then determine no curve: only T differs from the identity.
        kept: the rows with their features x and u, [2, n, C] float64, as input, so that the sums do not compute them
            again; None if the rows are not in memory on the CPU, fill more than a block, or have an impossible class.
    """

    source: RowSource
    input_kind: InputKind
    temperature: float
    floor: float
    masks: bool
    spline: NaturalSpline
    factor: float
    no_errors: bool = False
    kept: MemoryRows | None = None

    @classmethod
    def of(
        cls, source: RowSource, input_kind: InputKind, penalty: float = 1.0, temperature: float | None = None
    ) -> Self:
        """The rows of ``source``; finds temperature, floor and knots.

        Args:
            source: the rows.
            penalty: the factor of all penalties.
            temperature: result of :func:`robust_temperature`, if known.
        """
        floor = floor_of(source.weight_sum)
        scale, no_errors = logit_scale(source, input_kind), no_row_is_wrong(source)
        if temperature is None:
            temperature = robust_temperature(source, input_kind, scale, no_errors=no_errors)
        # At the upper bound of T all x would be nearly equal, and the penalties would keep the map there.
        temperature = min(temperature, 2 * scale * max(1.0, spread(source, input_kind, scale)))
        spline = NaturalSpline(find_knots(histogram(source, input_kind, temperature, floor)))
        impossible = masks_zeros(source, input_kind)
        rows = cls(source, input_kind, temperature, floor, impossible, spline, float(penalty), no_errors)
        return rows.on(source)

    @functools.cached_property
    def quadratic(self) -> Tensor:
        """The quadratic form of the penalty of J / W in (a, f)."""
        return self.factor / self.weight_sum * self.spline.penalty

    @property
    def n_classes(self) -> int:
        return self.source.n_classes

    @property
    def takes_matrix(self) -> bool:
        """Whether the sums take a matrix; else they need its products with x."""
        return self.kept is not None and self.n_classes <= FEW_CLASSES

    @property
    def weight_sum(self) -> float:
        return self.source.weight_sum

    @property
    def device(self) -> torch.device:
        return self.source.device

    def on(self, source: RowSource) -> Self:
        """Other rows with the same temperature, floor and knots."""
        kept = None
        if isinstance(source, MemoryRows) and source.device.type == "cpu" and 0 < source.input.numel() <= BLOCK:
            input = source.input
            if not (self.masks and float(input.min()) == -torch.inf):
                is_probs = self.input_kind == "probs"
                found = spline_sums_for(input).spline_features(input, self.temperature, self.floor, is_probs)
                kept = replace(source, input=found)
        return replace(self, source=source, kept=kept)

    def fold_by_fold(self, fold_of: PartOf, folds: int) -> "Callable[[int, bool], SplineRows]":
        """:func:`fold_by_fold` with the same temperature, floor and knots; kept features are copied."""
        part = fold_by_fold(self.kept or self.source, fold_of, folds)

        def rows_of(k: int, inside: bool) -> SplineRows:
            found = part(k, inside)
            if self.kept is None:
                return self.on(found)
            assert isinstance(found, MemoryRows)
            return replace(self, source=found, kept=found)

        return rows_of

    def parts(self) -> Iterator[MemoryRows]:
        """The parts of the source for sums: the kept rows, or those of the source."""
        return (self.source if self.kept is None else self.kept).parts()

    def blocks(self) -> Iterator[MemoryRows]:
        """The rows of :meth:`parts` in blocks."""
        for part in self.parts():
            yield from part.blocks() if self.kept is None else (part,)

    def log_probs(self, part: MemoryRows) -> Tensor:
        """x [n, C] float64 of a part or block."""
        if self.kept is not None:
            return part.input[0]
        is_probs = self.input_kind == "probs"
        found: Tensor = spline_sums_for(part.input).spline_log_probs(part.input, self.temperature, self.floor, is_probs)
        return found
