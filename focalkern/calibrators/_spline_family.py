"""Fits of the members of the spline family to the same rows, each started from a simpler member."""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from focalkern.calibrators._row_source import MemoryRows
from focalkern.calibrators._spline_fit import (
    NEWTON_DONE_IN_A_FOLD,
    Fit,
    Map,
    curve_derivatives,
    curve_sums,
    fit_curve,
)
from focalkern.calibrators._spline_linear import (
    LBFGS_DONE,
    LBFGS_DONE_IN_A_FOLD,
    Preconditioner,
    fit_linear,
    linear_sums,
    precondition,
)
from focalkern.calibrators._spline_order import fit_ordered
from focalkern.calibrators._spline_rows import SplineRows

__all__ = ["Family", "family_sums", "fit_family"]


@dataclass(frozen=True)
class Family:
    """Fits by member (``"free"``, ``"scalar"``, ``"vector"``, ``"matrix"``), and the preconditioners of these fits."""

    fits: Mapping[str, Fit]
    scales: Mapping[str, Preconditioner]

    def __getitem__(self, member: str) -> Fit:
        return self.fits[member]


def fit_family(
    rows: SplineRows,
    members: Collection[str],
    near: Family | None = None,
    sums: Mapping[str, Tensor] | None = None,
) -> Family:
    """Fit the given members and the members from which their fits start.

    The fits of scalar and vector start from the free curve; the fit of the matrix starts from the vector. If no row of
    the features is wrong, every fit is the identity on x: any other map would only raise the confidence further.

    Args:
        members: some of ``"free"``, ``"scalar"``, ``"vector"``, ``"matrix"``.
        near: the family fitted to nearly the same rows (for a fold: to all rows). Every fit starts from it.
        sums: those of :func:`family_sums` for these rows at ``near``.
    """
    with _without_autograd(rows):
        if rows.no_errors:
            return _identities(rows, members)
        return _fitted(rows, members, near, sums or {})


def family_sums(rows: SplineRows, family: Family) -> dict[str, Tensor]:
    """For each member that is fitted freely, the summed loss of the rows and its derivatives at a family's optimum."""
    with _without_autograd(rows):
        return {
            member: curve_sums(rows, fit.map) if member == "free" else linear_sums(rows, fit.map)
            for member, fit in family.fits.items()
            if member != "scalar"
        }


def _without_autograd(rows: SplineRows) -> contextlib.AbstractContextManager[Any]:
    """Without what autograd keeps of each operation. The rows of a user's function are read outside."""
    return torch.inference_mode() if isinstance(rows.source, MemoryRows) else contextlib.nullcontext()


def _identities(rows: SplineRows, members: Collection[str]) -> Family:
    """No curve, no slopes and no intercepts for every member."""
    n, curve = rows.n_classes, torch.zeros(len(rows.spline.knots) + 1, dtype=torch.float64)
    here = curve_derivatives(rows, Map(curve))
    alone = Fit(Map(curve), here.value, 1, derivatives=here)
    fits = dict.fromkeys(("free", *members), alone)
    for kind, shape in (("vector", (n,)), ("matrix", (n, n))):
        if kind in members:
            weight = torch.zeros(shape, dtype=torch.float64, device=rows.device)
            fits[kind] = Fit(Map(curve, weight, weight.new_zeros(n)), here.value, 1)
    return Family(fits, {})


def _fitted(rows: SplineRows, members: Collection[str], near: Family | None, sums: Mapping[str, Tensor]) -> Family:
    if near is None:
        free = fit_curve(rows)
    else:
        free = fit_curve(rows, near["free"].map.curve, NEWTON_DONE_IN_A_FOLD, True, sums.get("free"))
    fits = {"free": free}
    kinds = [kind for kind in ("vector", "matrix") if kind in members or (kind == "vector" and "matrix" in members)]
    if "scalar" in members:
        fits["scalar"] = fit_ordered(rows, free)
    if near is None:
        assert free.derivatives is not None
        scales: Mapping[str, Preconditioner] = precondition(rows, free.map, free.derivatives.hessian, kinds)
    else:
        scales = near.scales
    for kind in kinds:
        if near is None:
            start = fits["vector"].map if kind == "matrix" else free.map
            nothing = torch.zeros(rows.n_classes, dtype=torch.float64, device=rows.device)
            weight = nothing if start.weight is None else start.weight.diag()
            found = fit_linear(
                rows, Map(start.curve, weight, nothing if start.bias is None else start.bias), scales[kind], LBFGS_DONE
            )
        else:
            of_near = (near[kind].map, scales[kind], LBFGS_DONE_IN_A_FOLD, near[kind].pairs)
            found = fit_linear(rows, *of_near, brief=True, sums=sums.get(kind))
        fits[kind] = found
    return Family(fits, scales)
