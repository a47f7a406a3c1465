"""The Hessian of spline scaling in all parameters of a small matrix, for the preconditioner of L-BFGS."""

from dataclasses import replace

import torch
from torch import Tensor

from focalkern.calibrators._row_source import MemoryRows
from focalkern.calibrators._spline_fit import Map, arguments, parts_of, strengths
from focalkern.calibrators._spline_rows import SplineRows
from focalkern.ops.spline_sums import spline_sums_for

__all__ = ["linear_hessian", "of_vector", "softmax_of"]


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
    """[P, P] second derivatives of J / W at ``map``: in the curve, in the rows of D, in b.

    Args:
        rows: the rows.
        map: the parameters; those of the classes may be None.
        of_curve: the first block, with its penalty.
    """
    n_curve = len(map.curve)
    size = n_curve + rows.n_classes * (rows.n_classes + 1)
    sums = torch.zeros(size, size, dtype=torch.float64, device=rows.device)
    for part, _, extra in parts_of(rows, map):
        sums += spline_sums_for(part.input).spline_matrix_hessian(*arguments(rows, part, map, extra))
    found = rows.source.add_up(sums) / rows.weight_sum
    found[:n_curve, :n_curve] = of_curve
    found.diagonal()[n_curve:].add_(strengths(rows, True), alpha=2)
    return found


def of_vector(n_curve: int, n_classes: int) -> Tensor:
    """Indices of the curve, D_jj and b_j: the parameters of a vector, D = diag(v)."""
    classes = torch.arange(n_classes)
    of_bias = n_curve + n_classes**2 + classes
    return torch.cat([torch.arange(n_curve), n_curve + (n_classes + 1) * classes, of_bias])
