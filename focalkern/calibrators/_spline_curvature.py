"""The Hessian of spline scaling in all parameters of a vector or of a small matrix, by which its L-BFGS is scaled."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from focalkern.calibrators._row_source import MemoryRows
from focalkern.calibrators._spline_features import log_odds
from focalkern.calibrators._spline_fit import Map, arguments, strengths
from focalkern.calibrators._spline_rows import SplineRows
from focalkern.ops.spline_sums import spline_sums_for

__all__ = ["linear_hessian", "softmax_of"]

_BLOCK = 1 << 14  # entries, each with m + 1 derivatives


def softmax_of(rows: SplineRows, block: MemoryRows, map: Map, x: Tensor) -> Tensor:
    """[n, C] float64, the calibrated probabilities of a block with its x [n, C]."""
    full = map.weight is not None and map.weight.dim() == 2
    extra = x @ map.weight.T if full and map.weight is not None else None
    once = replace(block, weight=torch.ones_like(block.weight))
    sums_of = spline_sums_for(block.input).spline_linear_sums
    p: Tensor = sums_of(*arguments(rows, once, map, extra), True)[-1]  # minus one-hot
    labels = block.target.unsqueeze(1)
    return p.scatter_add_(1, labels, torch.ones_like(labels, dtype=p.dtype))


def linear_hessian(rows: SplineRows, map: Map, of_curve: Tensor, kind: str) -> Tensor:
    r"""[P, P] second derivatives of J / W at ``map``: in the curve, then, class by class, in its v or row of D and in
    its b.

    With F_j the derivative of a score in the curve, E_j = F_j minus its mean over the classes, and z_j that in the
    parameters of class j, (x_j, 1) for a vector and (x, 1) for a matrix, the blocks are the sums over rows of

    .. math::
        w \sum_j p_j E_j E_j', \qquad w p_j E_j z_j', \qquad w p_j (\delta_{jk} - p_k) z_j z_k'.

    Args:
        rows: the rows.
        map: the parameters; those of the classes may be None.
        of_curve: the first block, with its penalty.
        kind: ``"vector"`` or ``"matrix"``.
    """
    n_classes, n_curve = rows.n_classes, len(map.curve)
    n_own = 2 if kind == "vector" else n_classes + 1  # parameters of a class
    blocks_of = _of_vector if kind == "vector" else _of_matrix
    size = n_curve + n_classes * n_own
    sums = torch.zeros(size, size, dtype=torch.float64, device=rows.device)
    for block in _small_blocks(rows):
        log_probs = rows.log_probs(block)
        p = softmax_of(rows, block, map, log_probs).T.contiguous()
        weighted = p * (block.weight / rows.weight_sum)
        x, u = log_probs.T.contiguous(), log_odds(log_probs.exp(), log_probs).T.contiguous()
        # [C, m + 1, n]: w p F, then w p E.
        slopes = torch.cat([x.unsqueeze(1), rows.spline.columns(u)], 1).mul_(weighted.unsqueeze(1))
        slopes.addcmul_(p.unsqueeze(1), slopes.sum(0, keepdim=True), value=-1)
        cross, own = blocks_of(x, p, weighted, slopes)
        sums[:n_curve, n_curve:] += cross
        sums[n_curve:, n_curve:] += own
    sums = rows.source.add_up(sums)
    sums[n_curve:, :n_curve] = sums[:n_curve, n_curve:].T
    sums[:n_curve, :n_curve] = of_curve.to(sums.device)
    of_weight, of_bias = strengths(rows, sums.new_zeros(n_classes, n_own - 1).squeeze(1))
    of_class = torch.nn.functional.pad(of_weight.reshape(n_classes, -1), (0, 1), value=of_bias)
    sums.diagonal()[n_curve:] += 2 * of_class.reshape(-1)
    return sums


def _small_blocks(rows: SplineRows) -> Iterator[MemoryRows]:
    n = max(1, _BLOCK // rows.n_classes)
    for part in rows.source.parts():
        for start in range(0, len(part.target), n):
            yield part.at(slice(start, start + n))


def _of_vector(x: Tensor, p: Tensor, weighted: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of curve and classes, and of classes and classes, from x, p and w p [C, n] and w p E [C, m + 1, n]."""
    n_classes, n_curve, _ = slopes.shape
    cross = torch.stack([torch.bmm(slopes, x.unsqueeze(-1)).squeeze(-1), slopes.sum(-1)], -1)
    weighted_x = weighted * x
    own = torch.cat([weighted_x, weighted]) @ -torch.cat([p * x, p]).T
    own = own.reshape(2, n_classes, 2, n_classes)
    of_x = weighted_x.sum(1)
    for i, j, of_one in ((0, 0, (weighted_x * x).sum(1)), (0, 1, of_x), (1, 0, of_x), (1, 1, weighted.sum(1))):
        own[i, :, j].diagonal().add_(of_one)
    own = own.permute(1, 0, 3, 2).reshape(2 * n_classes, 2 * n_classes)
    return cross.transpose(0, 1).reshape(n_curve, -1), own


def _of_matrix(x: Tensor, p: Tensor, weighted: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`_of_vector`. Pairs of classes and pairs of terms of z commute, so each is computed once."""
    n_classes, n_curve, n = slopes.shape
    z = torch.cat([x, x.new_ones(1, n)])
    cross = (slopes.reshape(-1, n) @ z.T).reshape(n_classes, n_curve, -1).transpose(0, 1)
    (i, j), of_classes = _pairs(n_classes, x.device)
    (first, second), of_terms = _pairs(n_classes + 1, x.device)
    sums = (weighted[i] * ((i == j).unsqueeze(1).to(p.dtype) - p[j])) @ (z[first] * z[second]).T
    own = sums[of_classes[:, None, :, None], of_terms[None, :, None, :]]
    return cross.reshape(n_curve, -1), own.reshape(n_classes * len(z), -1)


def _pairs(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[2, n (n + 1) / 2], i <= j; and [n, n], the place of each pair."""
    pairs = torch.triu_indices(n, n, device=device)
    places = torch.empty(n, n, dtype=torch.int64, device=device)
    places[pairs[0], pairs[1]] = places[pairs[1], pairs[0]] = torch.arange(pairs.shape[1], device=device)
    return pairs, places
