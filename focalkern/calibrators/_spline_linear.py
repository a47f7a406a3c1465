"""Fits of the slopes, intercepts and matrices of spline scaling: preconditioned L-BFGS."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from focalkern.calibrators._lbfgs import Pair, minimise
from focalkern.calibrators._spline_fit import (
    Fit,
    Map,
    arguments,
    blocks_in_memory,
    linear_gradient,
    strengths,
)
from focalkern.calibrators._spline_rows import SplineRows
from focalkern.ops.spline_sums import spline_sums_for

__all__ = ["LBFGS_DONE", "LBFGS_DONE_IN_A_FOLD", "LBFGS_STEPS", "Preconditioner", "fit_linear", "precondition"]

LBFGS_STEPS = 300
LBFGS_DONE = 1e-4  # of the largest entry of the preconditioned gradient
LBFGS_DONE_IN_A_FOLD = 3e-4


@dataclass(frozen=True)
class Preconditioner:
    """Scales of the parameters: the curve by a root of its inverse Hessian, the others one by one."""

    curve: Tensor
    weight: Tensor
    bias: Tensor


def precondition(rows: SplineRows, map: Map, hessian: Tensor, kind: str) -> Preconditioner:
    """Scales at the scalar optimum ``map``, with its Hessian."""
    n_classes, device = rows.n_classes, rows.device
    root = torch.linalg.inv(torch.linalg.cholesky(hessian)).T
    shape = (n_classes,) if kind == "vector" else (n_classes, n_classes)
    curvature = torch.zeros(shape, dtype=torch.float64, device=device)
    of_one = torch.zeros(n_classes, dtype=torch.float64, device=device)
    for part in rows.source.parts():
        sums_of = spline_sums_for(part.input).spline_linear_sums
        for block in part.blocks():
            once = replace(block, weight=torch.ones_like(block.weight))
            p = sums_of(*arguments(rows, once, map, None), True)[-1]  # softmax minus one-hot
            labels = block.target.unsqueeze(1)
            p.scatter_add_(1, labels, torch.ones_like(labels, dtype=p.dtype))
            p = p * (1 - p) * (block.weight / rows.weight_sum).unsqueeze(1)
            of_one += p.sum(0)
            square = rows.log_probs(block).square()
            curvature += (p * square).sum(0) if kind == "vector" else p.T @ square
    curvature, of_one = rows.source.add_up(curvature), rows.source.add_up(of_one)
    of_weight, of_bias = strengths(rows, curvature)
    return Preconditioner(root, (curvature + 2 * of_weight).rsqrt(), (of_one + 2 * of_bias).rsqrt())


def fit_linear(
    rows: SplineRows, start: Map, scales: Preconditioner, done: float = LBFGS_DONE, pairs: Sequence[Pair] = ()
) -> Fit:
    """Preconditioned L-BFGS in all parameters of a vector or matrix, from ``start``, which has both.

    ``pairs`` come from a fit with the same scales to nearly the same rows.
    """
    assert start.weight is not None and start.bias is not None
    device, n_curve = rows.device, len(start.curve)
    sizes = [n_curve, start.weight.numel(), rows.n_classes]
    blocks = None if start.weight.dim() == 1 else blocks_in_memory(rows)
    penalties = strengths(rows, start.weight)

    def at(point: Tensor) -> Map:
        assert start.weight is not None and start.bias is not None
        curve, weight, bias = point.split(sizes)
        return Map(
            start.curve + scales.curve @ curve.cpu(),
            start.weight + scales.weight * weight.reshape(start.weight.shape),
            start.bias + scales.bias * bias,
        )

    def objective(point: Tensor) -> tuple[float, Tensor]:
        value, slopes = linear_gradient(rows, at(point), blocks, penalties)
        assert slopes.weight is not None and slopes.bias is not None
        of_curve = (scales.curve.T @ slopes.curve).to(device)
        return value, torch.cat([of_curve, (slopes.weight * scales.weight).reshape(-1), slopes.bias * scales.bias])

    zero = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    found = minimise(objective, zero, done=done, steps=LBFGS_STEPS, pairs=pairs)
    return Fit(at(found.point), found.value, found.evaluations, found.converged, pairs=found.pairs)
