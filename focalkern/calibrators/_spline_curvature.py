"""The Hessian of spline scaling in all parameters of a small matrix, for the preconditioner of L-BFGS."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from focalkern.calibrators._row_source import MemoryRows
from focalkern.calibrators._spline_fit import Map, arguments, strengths
from focalkern.calibrators._spline_rows import SplineRows
from focalkern.ops.spline_sums import spline_sums_for

__all__ = ["linear_hessian", "of_vector", "softmax_of"]

_BLOCK = 1 << 13  # entries, each with m + 1 derivatives


def softmax_of(rows: SplineRows, block: MemoryRows, map: Map, x: Tensor) -> Tensor:
    """The calibrated probabilities, float64 [n, C], of a block with its x [n, C]."""
    full = map.weight is not None and map.weight.dim() == 2
    extra = x @ map.weight.T if full and map.weight is not None else None
    once = replace(block, weight=torch.ones_like(block.weight))
    sums_of = spline_sums_for(block.input).spline_linear_sums
    p: Tensor = sums_of(*arguments(rows, once, map, extra), True)[-1]  # minus one-hot
    labels = block.target.unsqueeze(1)
    return p.scatter_add_(1, labels, torch.ones_like(labels, dtype=p.dtype))


def linear_hessian(rows: SplineRows, map: Map, of_curve: Tensor) -> Tensor:
    r"""[P, P] second derivatives of J / W at ``map``: in the curve, in the rows of D, in b.

    With F_j the derivative of a score in the curve, E_j = F_j minus its mean over the classes, and z = (x, 1), the
    derivative in the parameters of a class, the blocks are the sums over rows of

    .. math::
        w \sum_j p_j E_j E_j', \qquad w p_j E_j z', \qquad w p_j (\delta_{jk} - p_k) z z'.

    Args:
        rows: the rows.
        map: the parameters; those of the classes may be None.
        of_curve: the first block, with its penalty.
    """
    n_classes, n_curve = rows.n_classes, len(map.curve)
    of_classes, of_terms = _pairs(n_classes, rows.device), _pairs(n_classes + 1, rows.device)
    # The sums are symmetric in pairs of classes and in pairs of terms of z, so each pair is computed once.
    of_pairs = torch.zeros(_n_pairs(n_classes), _n_pairs(n_classes + 1), dtype=torch.float64, device=rows.device)
    cross = torch.zeros(n_classes * n_curve, n_classes + 1, dtype=torch.float64, device=rows.device)
    for block in _small_blocks(rows):
        of_rows, odds = rows.features(block)
        p = softmax_of(rows, block, map, of_rows).T.contiguous()
        weighted = p * (block.weight / rows.weight_sum)
        x, u = of_rows.T.contiguous(), odds.T.contiguous()
        z = torch.cat([x, torch.ones_like(x[:1])])
        # [C, m + 1, n]: w p F, then w p E.
        slopes = torch.cat([x.unsqueeze(1), rows.spline.columns(u)], 1).mul_(weighted.unsqueeze(1))
        slopes.addcmul_(p.unsqueeze(1), slopes.sum(0, keepdim=True), value=-1)
        cross += slopes.reshape(-1, len(block.target)) @ z.T
        products = _products(z, z).T
        of_pairs -= _products(p, weighted) @ products
        of_pairs[of_classes.diagonal()] += weighted @ products
    sums = rows.source.add_up(torch.cat([of_pairs.reshape(-1), cross.reshape(-1)]))
    of_pairs, cross = sums[: of_pairs.numel()].reshape(of_pairs.shape), sums[of_pairs.numel() :]
    size = n_classes * (n_classes + 1)
    cross = cross.reshape(n_classes, n_curve, -1).transpose(0, 1).reshape(n_curve, size)
    own = of_pairs[of_classes[:, None, :, None], of_terms[None, :, None, :]].reshape(size, size)
    places = torch.arange(size, device=own.device).reshape(n_classes, -1)
    order = torch.cat([places[:, :-1].reshape(-1), places[:, -1]])  # from class by class to D, b
    own, cross = own[order][:, order], cross[:, order]
    own.diagonal().add_(strengths(rows, True), alpha=2)
    return torch.cat([torch.cat([of_curve.to(own.device), cross], 1), torch.cat([cross.T, own], 1)])


def of_vector(n_curve: int, n_classes: int) -> Tensor:
    """Indices of the curve, D_jj and b_j: the parameters of a vector, D = diag(v)."""
    classes = torch.arange(n_classes)
    of_bias = n_curve + n_classes**2 + classes
    return torch.cat([torch.arange(n_curve), n_curve + (n_classes + 1) * classes, of_bias])


def _small_blocks(rows: SplineRows) -> Iterator[MemoryRows]:
    n = max(1, _BLOCK // rows.n_classes)
    for part in rows.parts():
        columns = (part.input.split(n, -2), part.target.split(n), part.weight.split(n))
        for input, target, weight in zip(*columns, strict=True):
            yield replace(part, input=input.contiguous(), target=target, weight=weight)


def _n_pairs(n: int) -> int:
    return n * (n + 1) // 2


def _pairs(n: int, device: torch.device) -> Tensor:
    """The index of each pair i <= j, [n, n]: row by row."""
    pairs = torch.triu_indices(n, n, device=device)
    places = torch.empty(n, n, dtype=torch.int64, device=device)
    places[pairs[0], pairs[1]] = places[pairs[1], pairs[0]] = torch.arange(pairs.shape[1], device=device)
    return places


def _products(first: Tensor, second: Tensor) -> Tensor:
    """[n (n + 1) / 2, k]: row i of ``first`` times row j of ``second``, both [n, k], for each pair i <= j."""
    n = len(first)
    found = first.new_empty(_n_pairs(n), first.shape[1])
    for i, part in enumerate(found.split([*range(n, 0, -1)])):  # indexing with all pairs takes many times as long
        torch.mul(first[i], second[i:], out=part)
    return found
