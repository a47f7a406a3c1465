"""Fits of the slopes, intercepts and matrices of spline scaling: preconditioned L-BFGS."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from focalkern.calibrators._lbfgs import Pair, minimise
from focalkern.calibrators._spline_curvature import linear_hessian, of_vector, softmax_of
from focalkern.calibrators._spline_fit import (
    Fit,
    Map,
    blocks_in_memory,
    linear_gradient,
    strengths,
)
from focalkern.calibrators._spline_rows import SplineRows

__all__ = ["LBFGS_DONE", "LBFGS_DONE_IN_A_FOLD", "LBFGS_STEPS", "Preconditioner", "fit_linear", "precondition"]

# With more classes, the Hessian takes longer than the evaluations that it saves.
_FEW_CLASSES = 15

LBFGS_STEPS = 300
LBFGS_DONE = 1e-4  # of the largest entry of the preconditioned gradient
LBFGS_DONE_IN_A_FOLD = 3e-4
# With a root, the bound is on the length of the gradient and 3 times as large, because the largest entry depends on the
# order of the classes. The square of the length is twice the distance to the optimal value.
_OF_LENGTH = 3.0


class Preconditioner(Protocol):
    """Maps a point r linearly to a step in all parameters, and the gradient in the parameters to the gradient in r."""

    def step(self, point: Tensor) -> Map: ...

    def gradient(self, slopes: Map) -> Tensor: ...


@dataclass(frozen=True)
class Scales:
    """A preconditioner: a root of the inverse Hessian for the curve, one number for each other parameter."""

    curve: Tensor
    weight: Tensor
    bias: Tensor

    def step(self, point: Tensor) -> Map:
        curve, weight, bias = point.split([len(self.curve), self.weight.numel(), len(self.bias)])
        return Map(self.curve @ curve.cpu(), self.weight * weight.reshape(self.weight.shape), self.bias * bias)

    def gradient(self, slopes: Map) -> Tensor:
        assert slopes.weight is not None and slopes.bias is not None
        of_curve = (self.curve.T @ slopes.curve).to(self.bias.device)
        return torch.cat([of_curve, (slopes.weight * self.weight).reshape(-1), slopes.bias * self.bias])


@dataclass(frozen=True)
class Root:
    """A preconditioner: a root of the inverse Hessian in all parameters, in the order of :func:`linear_hessian`.

    Attributes:
        root: [P, P].
        transposed: its transpose.
        n_curve: m + 1.
        n_classes: C.
    """

    root: Tensor
    transposed: Tensor
    n_curve: int
    n_classes: int

    def step(self, point: Tensor) -> Map:
        step = self.root @ point
        of_classes = step[self.n_curve :].reshape(self.n_classes, -1)
        weight = of_classes[:, :-1] if of_classes.shape[1] > 2 else of_classes[:, 0]
        return Map(step[: self.n_curve].cpu(), weight, of_classes[:, -1])

    def gradient(self, slopes: Map) -> Tensor:
        assert slopes.weight is not None and slopes.bias is not None
        of_classes = torch.cat([slopes.weight.reshape(self.n_classes, -1), slopes.bias.unsqueeze(1)], 1)
        return self.transposed @ torch.cat([slopes.curve.to(of_classes.device), of_classes.reshape(-1)])


def precondition(rows: SplineRows, map: Map, hessian: Tensor, kinds: Sequence[str]) -> dict[str, Preconditioner]:
    """The preconditioners by kind, at the scalar optimum ``map`` with its Hessian in the curve: a root of the Hessian
    in all parameters for few classes, else scales."""
    n_curve, n_classes = len(map.curve), rows.n_classes
    if kinds and n_classes <= _FEW_CLASSES:
        whole = linear_hessian(rows, map, hessian)
        places = of_vector(n_curve, n_classes).to(whole.device)
        wanted = {kind: whole[places][:, places] if kind == "vector" else whole for kind in kinds}
        found = {kind: _root(one, n_curve, n_classes) for kind, one in wanted.items()}
        roots: dict[str, Preconditioner] = {kind: one for kind, one in found.items() if one is not None}
        if len(roots) == len(kinds):
            return roots
    return {kind: _scales(rows, map, hessian, kind) for kind in kinds}


def _root(hessian: Tensor, n_curve: int, n_classes: int) -> Root | None:
    """The root of the Hessian; None if rounding made the Hessian indefinite."""
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if bool(failed):
        return None
    one = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    transposed = torch.linalg.solve_triangular(factor, one, upper=False)
    return Root(transposed.T.contiguous(), transposed, n_curve, n_classes)


def _scales(rows: SplineRows, map: Map, hessian: Tensor, kind: str) -> Scales:
    """Scales at ``map``, with the Hessian in the curve."""
    n_classes, device = rows.n_classes, rows.device
    root = torch.linalg.inv(torch.linalg.cholesky(hessian)).T
    shape = (n_classes,) if kind == "vector" else (n_classes, n_classes)
    curvature = torch.zeros(shape, dtype=torch.float64, device=device)
    of_one = torch.zeros(n_classes, dtype=torch.float64, device=device)
    for part in rows.source.parts():
        for block in part.blocks():
            x = rows.log_probs(block)
            p = softmax_of(rows, block, map, x)
            p = p * (1 - p) * (block.weight / rows.weight_sum).unsqueeze(1)
            of_one += p.sum(0)
            square = x.square()
            curvature += (p * square).sum(0) if kind == "vector" else p.T @ square
    curvature, of_one = rows.source.add_up(curvature), rows.source.add_up(of_one)
    of_weight, of_bias = strengths(rows, curvature)
    return Scales(root, (curvature + 2 * of_weight).rsqrt(), (of_one + 2 * of_bias).rsqrt())


def fit_linear(
    rows: SplineRows, start: Map, scales: Preconditioner, done: float = LBFGS_DONE, pairs: Sequence[Pair] = ()
) -> Fit:
    """Preconditioned L-BFGS in all parameters of a vector or matrix, from ``start``, which has weight and bias.

    ``pairs`` are the curvature pairs of a fit with the same preconditioner to nearly the same rows.
    """
    assert start.weight is not None and start.bias is not None
    blocks = None if start.weight.dim() == 1 else blocks_in_memory(rows)
    penalties = strengths(rows, start.weight)
    size = len(start.curve) + start.weight.numel() + rows.n_classes

    def at(point: Tensor) -> Map:
        assert start.weight is not None and start.bias is not None
        step = scales.step(point)
        assert step.weight is not None and step.bias is not None
        return Map(start.curve + step.curve, start.weight + step.weight, start.bias + step.bias)

    def objective(point: Tensor) -> tuple[float, Tensor]:
        value, slopes = linear_gradient(rows, at(point), blocks, penalties)
        return value, scales.gradient(slopes)

    zero = torch.zeros(size, dtype=torch.float64, device=rows.device)
    norm, done = (2.0, _OF_LENGTH * done) if isinstance(scales, Root) else (torch.inf, done)
    found = minimise(objective, zero, done=done, steps=LBFGS_STEPS, pairs=pairs, norm=norm)
    return Fit(at(found.point), found.value, found.evaluations, found.converged, pairs=found.pairs)
