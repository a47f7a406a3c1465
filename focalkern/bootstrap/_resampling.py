"""Sums over weighted rows: the metrics of many resamples at once."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern.bootstrap._figures import CLASSWISE
from focalkern.metrics._bins import equal_width_edges, interp_places
from focalkern.metrics._inputs import check_log_probs, confidence_and_correct, probs_and_target

__all__ = ["ClasswiseSums", "ResampledRows", "chunks", "prefix_sums", "resample_weights", "uniform_draws"]

# Number of row weights in memory at once; the work space is a few times as many float64 values.
_CHUNK = 1 << 22


def chunks(n_resamples: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of resamples that are in memory together. ``width`` is the work space of one resample, in
    float64 values."""
    size = max(1, _CHUNK // max(1, width))
    for first in range(0, n_resamples, size):
        yield first, min(first + size, n_resamples)


class ResampledRows:
    """One calibrator, prepared so that its metrics are weighted sums over rows."""

    def __init__(
        self,
        op: str,
        name: str,
        probs: Mapping[str, Any] | None,
        target: Any,
        log: bool,
        confidence: Mapping[str, Any] | None,
        correct: Any,
        figures: tuple[str, ...],
        n_bins: int,
    ) -> None:
        op = f"{op}: {name!r}"
        if isinstance(correct, Mapping):
            if name not in correct:
                raise ValueError(
                    f"{op}: correct must have an entry for every calibrator, got {', '.join(map(str, correct))[:80]}"
                )
            correct = correct[name]
        per_row: dict[str, Tensor] = {}
        self.classwise: ClasswiseSums | None = None
        if probs is not None:
            given = as_tensor(probs[name], f"{op}: probs")
            if given.dim() > 2:
                raise ValueError(
                    f"{op}: probs must be [N, C], got shape {list(given.shape)}; pass pixels as rows: "
                    "probs.movedim(1, -1).flatten(0, -2) and target.flatten()"
                )
            given, labels = probs_and_target(op, given, target, log=log)
            if log:
                check_log_probs(op, given)
            if correct is None:
                correct = given.argmax(-1) == labels
            if "nll" in figures:
                of_target = given.gather(-1, labels.unsqueeze(-1)).squeeze(-1).to(torch.float64)
                per_row["nll"] = -of_target if log else -of_target.log()
            given = given.exp() if log else given
            top: Any = given.amax(-1)
            if "brier" in figures or CLASSWISE in figures:
                residual = given.to(torch.float64, copy=True)
                index = labels.unsqueeze(-1)
                residual.scatter_add_(-1, index, residual.new_full((), -1.0).expand(index.shape))
                if "brier" in figures:
                    per_row["brier"] = residual.square().sum(-1)
                if CLASSWISE in figures:
                    self.classwise = ClasswiseSums(given, residual, n_bins)
        else:
            assert confidence is not None
            if target is not None:
                raise ValueError(f"{op}: confidence needs correct in place of target, got target")
            top = confidence[name]
        top, hits = confidence_and_correct(op, None, None, top, correct)
        if top.dim() != 1:
            raise ValueError(f"{op}: confidence must be [N], got shape {list(top.shape)}")
        if "accuracy" in figures:
            per_row["accuracy"] = hits
        self.figures = figures
        self.n_bins = n_bins
        self.n_samples = len(top)
        self.device = top.device
        # The mean is infinite if a row with an infinite term is drawn. If it is not drawn, 0 * inf must not be NaN.
        columns = torch.stack(list(per_row.values()), 1) if per_row else top.new_empty(len(top), 0, dtype=torch.float64)
        infinite = columns == math.inf
        self.columns = torch.where(infinite, 0.0, columns)
        self.infinite = infinite.to(torch.float64) if bool(infinite.any()) else None
        self.names = tuple(per_row)
        self.sorted, self.order = top.sort(stable=True)
        self.gap = (hits - top.to(torch.float64))[self.order]

    @property
    def width(self) -> int:
        """Size of the work space per resample, in float64 values, up to a small factor."""
        return max(self.n_samples, self.classwise.width if self.classwise else 0)

    def figures_of(self, weights: Tensor) -> Tensor:
        """The metrics [F, R] with row i counted weights[r, i] times; weights is [R, N] float64, each row sums to N."""
        if self.n_samples == 0:
            return weights.new_full((len(self.figures), len(weights)), math.nan)
        found: dict[str, Tensor] = {}
        means = weights @ self.columns / self.n_samples
        if self.infinite is not None:
            means = torch.where(weights @ self.infinite > 0, math.inf, means)
        found.update(zip(self.names, means.unbind(1), strict=True))
        if any(figure.startswith("ece_") for figure in self.figures):
            # Row i of the sorted confidences has the places count[:, i] to count[:, i + 1] in the sorted resample.
            ordered = weights[:, self.order]
            count = prefix_sums(ordered)
            gap = prefix_sums(ordered.mul_(self.gap))
            for figure in self.figures:
                if figure.startswith("ece_"):
                    cuts = getattr(self, f"_{figure.removeprefix('ece_')}")(count, gap)
                    found[figure] = cuts.diff(dim=1).abs().sum(1) / self.n_samples
        if self.classwise is not None:
            found[CLASSWISE] = self.classwise.error(weights)
        return torch.stack([found[figure] for figure in self.figures])

    # Each function returns the sum of correct - confidence up to every edge between bins, [R, M + 1].

    def _equal_width(self, count: Tensor, gap: Tensor) -> Tensor:
        edges = equal_width_edges(self.sorted, self.n_bins)[1:-1]
        inner = torch.searchsorted(self.sorted, edges, right=True)
        return gap[:, torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=self.n_samples)]

    def _equal_mass(self, count: Tensor, gap: Tensor) -> Tensor:
        size, larger = divmod(self.n_samples, self.n_bins)
        places = torch.arange(self.n_bins + 1, device=self.device)
        places = (places * size + places.clamp(max=larger)).to(torch.float64)
        row = self._row_at(places, count)
        # An edge may fall between the copies of one row.
        inside = (places - count.gather(1, row)) * torch.nn.functional.pad(self.gap, (0, 1))[row]
        return gap.gather(1, row) + inside

    def _equal_mass_interp(self, count: Tensor, gap: Tensor) -> Tensor:
        left, right, fraction = interp_places(self.n_samples, self.n_bins, self.device)
        ordered = self.sorted.to(torch.float64)
        low, high = (ordered[self._row_at(places.to(torch.float64), count)] for places in (left, right))
        edges = ((high - low) * fraction + low).to(self.sorted.dtype)
        return gap.gather(1, torch.searchsorted(self.sorted, edges, right=True))

    def _row_at(self, places: Tensor, count: Tensor) -> Tensor:
        """[R, n]: the sorted row at each place of the sorted resample; N for the position N after the last."""
        inclusive = count[:, 1:].contiguous()
        return torch.searchsorted(inclusive, places.expand(len(count), -1).contiguous(), right=True)


class ClasswiseSums:
    """Classwise ECE, equal width, of weighted rows.

    Most of the N * C probabilities are in the first bin. Only the others are scattered into their bins. The first bin
    of a class is the sum of the class, by a matrix product, minus the other bins.
    """

    def __init__(self, probs: Tensor, residual: Tensor, n_bins: int) -> None:
        n_classes = probs.shape[1]
        edges = equal_width_edges(probs, n_bins)
        row, of_class = (probs > edges[1]).nonzero(as_tuple=True)
        above = probs[row, of_class]
        index = (torch.searchsorted(edges, above) - 1).clamp_(0, n_bins - 1)
        self.residual = residual
        self.shape = (n_classes, n_bins)
        self.row, self.bin, self.value = row, of_class * n_bins + index, residual[row, of_class].unsqueeze(1)

    @property
    def width(self) -> int:
        return max(self.shape[0] * self.shape[1], len(self.row))

    def error(self, weights: Tensor) -> Tensor:
        bins = weights.new_zeros(self.shape[0] * self.shape[1], len(weights))
        bins.index_add_(0, self.bin, weights.T.contiguous()[self.row] * self.value)
        bins = bins.view(*self.shape, len(weights))
        bins[:, 0] += (weights @ self.residual).T - bins.sum(1)
        result: Tensor = bins.abs_().sum((0, 1)) / (len(self.residual) * self.shape[0])
        return result


def prefix_sums(values: Tensor) -> Tensor:
    """[R, N + 1] from [R, N]: the sum of the first i values at i."""
    result = values.new_zeros(values.shape[0], values.shape[1] + 1)
    torch.cumsum(values, 1, out=result[:, 1:])
    return result


def resample_weights(n_samples: int, resamples: range, seed: int) -> Tensor:
    """[R, N] float64 on the CPU: the number of times that each row is in each resample.

    Every resample has its own random stream, so it does not depend on the division into blocks.
    """
    result = torch.zeros(len(resamples), n_samples, dtype=torch.float64, device="cpu")
    if n_samples:
        for row, resample in zip(result.numpy(), resamples, strict=True):
            drawn = np.random.default_rng((seed, resample)).integers(n_samples, size=n_samples)
            row[:] = np.bincount(drawn, minlength=n_samples)
    return result


def uniform_draws(n_samples: int, resamples: range, seed: int) -> Tensor:
    """[R, N] float64 on the CPU, in [0, 1)."""
    result = torch.empty(len(resamples), n_samples, dtype=torch.float64, device="cpu")
    for row, resample in zip(result.numpy(), resamples, strict=True):
        np.random.default_rng((seed, resample)).random(out=row)
    return result
