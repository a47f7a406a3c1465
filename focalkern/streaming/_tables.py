"""The tables of a grid from the sums of its cells, their error bounds, and quantile bins of cells."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from focalkern.ops.calibration_sums import CalibrationSums

__all__ = ["Cut", "bounds_of", "tables_of"]

# Number of values in a block of cumulative sums.
_AT_ONCE = 2**15


# Tolerance of the bounds of a bucket, because float32 confidences are rounded before their bucket is computed.
_SLACK = 1e-6


class _CellBins:
    """The bins of some cells by their M + 1 edges: number of samples below, and their sum of confidence - correct.

    If an edge falls into a bucket of the sketch, both are known only within bounds.
    """

    def __init__(self, rank: Tensor, most: Tensor, value: Tensor, low: Tensor, high: Tensor, n_samples: int) -> None:
        self.rank, self.most = rank, most  # [cells, M + 1] int64: the rank in use, and its upper bound
        self.value, self.low, self.high = value, low, high  # [cells, M + 1] float64
        self.n_samples = n_samples

    @classmethod
    def of_bins(cls, count: Tensor, confidence: Tensor, correct: Tensor, n_samples: int) -> "_CellBins":
        """From bins: ``count`` and the other sums are [cells, M]."""
        rank, value = (torch.nn.functional.pad(x.cumsum(1), (1, 0)) for x in (count, confidence - correct))
        return cls(rank, rank, value, value, value, n_samples)

    @classmethod
    def of_sketch(
        cls,
        count: Tensor,
        confidence: Tensor,
        correct: Tensor,
        n_samples: int,
        n_bins: int,
        *,
        interpolated: bool,
        limits: bool,
    ) -> "_CellBins":
        """From buckets: ``count`` and the other sums are [cells, n_buckets]. ``bounds`` needs ``limits``."""
        cells, n_buckets = count.shape
        ranks, following = _cuts(n_samples, n_bins, interpolated)
        excess = confidence - correct
        up_to, excess_up_to = count.cumsum(1), excess.cumsum(1)
        rank = ranks.to(count.device).expand(cells, -1).contiguous()

        def bucket_of(samples: Tensor) -> Tensor:
            """The bucket that contains the last of the ``samples`` lowest samples, [cells, M + 1]."""
            return torch.searchsorted(up_to, samples.contiguous()).clamp_(max=n_buckets - 1)

        def hull(place: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
            """Bounds of the excess of the m lowest samples of a bucket with n samples, for every m in [least, most]."""
            n, k = count.gather(1, place), correct.gather(1, place)
            total = confidence.gather(1, place)
            mean = total / n.clamp(min=1)
            base = excess_up_to.gather(1, place) - excess.gather(1, place)

            least_of, most_of = _bucket_limits(place, n_buckets)

            def upper(m: Tensor) -> Tensor:
                return m * mean - (m + k - n).clamp(min=0)

            def lower(m: Tensor) -> Tensor:
                of_lowest = torch.maximum(m * least_of, total - (n - m) * most_of)
                return of_lowest - torch.minimum(m, k)

            # The bounds are piecewise linear in m, so their extremes are at kinks or at the ends of the range.
            high = torch.stack([upper(m) for m in (least, most, (n - k).clamp(least, most))]).amax(0)
            low = torch.stack([m * least_of - torch.minimum(m, k) for m in (least, most, k.clamp(least, most))])
            low = torch.where(least == most, lower(least), low.amin(0))
            return base + low, base + high

        place = bucket_of(rank)
        inside = rank - up_to.gather(1, place) + count.gather(1, place)
        rest = 1 - inside.to(torch.float64) / count.gather(1, place).clamp(min=1)
        value = excess_up_to.gather(1, place) - rest * excess.gather(1, place)
        if not limits:
            return cls(rank, rank, value, value, value, n_samples)
        if not interpolated:
            low, high = hull(place, inside, inside)
            return cls(rank, rank, value, low, high, n_samples)
        # An edge includes all samples equal to it. If it rounds up to the next sample, it includes the samples equal to
        # that one too.
        low, high = hull(place, inside, count.gather(1, place))
        after = bucket_of(following.to(count.device).expand(cells, -1))
        next_low, next_high = hull(after, torch.zeros_like(inside), count.gather(1, after))
        apart = after != place
        low = torch.where(apart, torch.minimum(low, next_low), low)
        high = torch.where(apart, torch.maximum(high, next_high), high)
        return cls(rank, up_to.gather(1, after), value, low, high, n_samples)

    def tables(self) -> dict[str, Tensor]:
        """{criterion: [cells]}"""
        gap = self.value.diff(dim=1).abs()
        size = self.rank.diff(dim=1)
        return {
            "ece": gap.sum(1) / self.n_samples,
            "mce": torch.where(size > 0, gap / size.clamp(min=1), 0.0).amax(1),
        }

    def bounds(self) -> dict[str, Tensor]:
        """{criterion: [cells]}, the largest possible error of ``tables``."""
        tables = self.tables()
        least, most = (total / self.n_samples for total in self._total_gap())
        ece = torch.maximum(most - tables["ece"], tables["ece"] - least)
        # The excess of a bin lies in [from_low, from_high], its size in [smallest, largest].
        from_low, from_high = self.low[:, 1:] - self.high[:, :-1], self.high[:, 1:] - self.low[:, :-1]
        smallest = (self.rank[:, 1:] - self.most[:, :-1]).clamp(min=0)
        largest = self.most[:, 1:] - self.rank[:, :-1]
        widest = torch.maximum(from_low.abs(), from_high.abs()) / smallest
        narrowest = torch.maximum(from_low, -from_high).clamp(min=0) / largest.clamp(min=1)
        highest = torch.where(largest > 0, widest.nan_to_num(nan=1.0).clamp(max=1.0), 0.0).amax(1)
        lowest = torch.where(largest > 0, narrowest, 0.0).amax(1)
        mce = torch.maximum(highest - tables["mce"], tables["mce"] - lowest)
        return {"ece": ece.clamp(min=0), "mce": mce.clamp(min=0)}

    def _total_gap(self) -> tuple[Tensor, Tensor]:
        """The least and the largest sum of |x_(b+1) - x_b| over all x_b in [low_b, high_b]."""
        low, high = self.low.unbind(1), self.high.unbind(1)
        # |confidence - correct| is at most 1 per sample, so that of a bin is at most its number of samples.
        sizes = (self.most[:, 1:] - self.rank[:, :-1]).double().unbind(1)
        # The largest sum is attained at ends of the intervals: keep the best sum for each end of the last interval.
        at_low = at_high = torch.zeros_like(low[0])
        # The least sum: the x with least cost form an interval, and leaving the interval costs the distance to it.
        cost, left, right = torch.zeros_like(low[0]), low[0], high[0]
        for b in range(1, len(low)):
            at_low, at_high = (
                torch.maximum(
                    at_low + torch.minimum((end - low[b - 1]).abs(), sizes[b - 1]),
                    at_high + torch.minimum((end - high[b - 1]).abs(), sizes[b - 1]),
                )
                for end in (low[b], high[b])
            )
            up, down = (low[b] - right).clamp(min=0), (left - high[b]).clamp(min=0)
            cost = cost + up + down
            new_left = torch.where(down > 0, high[b], torch.maximum(left, low[b]))
            right = torch.where(up > 0, low[b], torch.minimum(right, high[b]))
            left = new_left
        return cost, torch.maximum(at_low, at_high).clamp(max=self.n_samples)


def _cuts(n_samples: int, n_bins: int, interpolated: bool) -> tuple[Tensor, Tensor]:
    """Ranks of the M + 1 edges, [M + 1] each: number of samples below, and rank of a sample that may equal the edge."""
    bins = range(n_bins + 1)
    if not interpolated:
        size, larger = divmod(n_samples, n_bins)
        ranks = [bin * size + min(bin, larger) for bin in bins]
        return _on_host(ranks), _on_host(ranks)
    # Positions in the sorted samples, as in numpy.interp; samples up to the position lie below the edge.
    positions = [n_samples if bin == n_bins else bin * (n_samples / n_bins) for bin in bins]
    at_end = [position >= n_samples - 1 for position in positions]
    ranks = [n_samples if end else math.floor(position) + 1 for position, end in zip(positions, at_end, strict=True)]
    return _on_host(ranks), _on_host([min(rank + 1, n_samples) for rank in ranks])


def _on_host(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, device="cpu")


def _bucket_limits(place: Tensor, n_buckets: int) -> tuple[Tensor, Tensor]:
    """float64, in the shape of ``place``: no confidence in these buckets is below the first or above the second."""

    def edge(index: Tensor) -> Tensor:
        x = index.to(torch.float64) / n_buckets
        return torch.where(x <= 1 / 3, (3 * x) ** 2 / 2, 1 - (1.5 * (1 - x)) ** 4 / 2)

    return (edge(place) - _SLACK).clamp(min=0), (edge(place + 1) + _SLACK).clamp(max=1)


@dataclass(frozen=True)
class Cut:
    """The rule for the bins of a cell.

    Attributes:
        n_bins, estimator: bins and estimator of the ECE.
        sketched: whether the sums are over buckets of the sketch instead of bins.
        n_samples: number of rows.
    """

    n_bins: int
    estimator: str
    sketched: bool
    n_samples: int


def tables_of(sums: CalibrationSums, cut: Cut) -> dict[str, Tensor]:
    """The summed criteria: [Gg, Gt] for ``nll`` and ``brier``, [Gg Gt] for ``ece`` and ``mce``."""
    tables = {name: tensor / cut.n_samples for name, tensor in sums.items() if name in ("nll", "brier")}
    if sums.count is not None:
        parts = [bins.tables() for bins in _bins(sums, cut, limits=False)]
        tables |= {name: torch.cat([part[name] for part in parts]) for name in ("ece", "mce")}
    return tables


def bounds_of(sums: CalibrationSums, cut: Cut) -> dict[str, Tensor]:
    """Error bounds of ``ece`` and ``mce``, [Gg Gt] each."""
    parts = [bins.bounds() for bins in _bins(sums, cut, limits=True)]
    return {name: torch.cat([part[name] for part in parts]) for name in ("ece", "mce")}


def _bins(sums: CalibrationSums, cut: Cut, *, limits: bool) -> Iterator[_CellBins]:
    """The bins of a few cells at a time; cumulative sums of all cells would take as much memory as the state."""
    assert sums.count is not None
    assert sums.confidence is not None
    assert sums.correct is not None
    flat = [tensor.flatten(0, 1) for tensor in (sums.count, sums.confidence, sums.correct)]
    at_once = max(1, _AT_ONCE // flat[0].shape[1])
    for begin in range(0, len(flat[0]), at_once):
        count, confidence, correct = (tensor[begin : begin + at_once] for tensor in flat)
        if cut.sketched:
            yield _CellBins.of_sketch(
                count,
                confidence,
                correct,
                cut.n_samples,
                cut.n_bins,
                interpolated=cut.estimator == "equal_mass_interp",
                limits=limits,
            )
        else:
            yield _CellBins.of_bins(count, confidence, correct, cut.n_samples)
