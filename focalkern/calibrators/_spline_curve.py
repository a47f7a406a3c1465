"""The curve of spline scaling: a natural cubic spline with straight tails, and its penalty."""

import functools

import numpy as np
import torch
from torch import Tensor

from focalkern.fallback.spline_map import spline_coefficients

__all__ = ["NaturalSpline", "evaluate"]


class NaturalSpline:
    r"""Natural cubic splines on given knots: cubic between two knots, straight lines beyond the first and last knot.

    A spline is determined by its values at the knots, [m]. The m knots divide the line into m + 1 pieces; on piece i
    with origin o_i (the knot to the left, or the first knot) the spline is the polynomial

    .. math:: f(u) = \sum_{k=0}^3 c_{ik} (u - o_i)^k

    whose coefficients are linear in the values: ``basis`` [m + 1, 4, m] has them.

    Args:
        knots: [m] float64, ascending, m >= 2.

    Source: Green & Silverman, Nonparametric Regression and Generalized Linear Models, 1994, section 2.1.
    """

    def __init__(self, knots: Tensor) -> None:
        self.knots = knots
        self.origins = torch.cat([knots[:1], knots])
        self.basis = spline_coefficients(knots, torch.eye(len(knots), dtype=knots.dtype))

    def coefficients(self, values: Tensor) -> Tensor:
        """Coefficients [m + 1, 4] of the spline with ``values`` [m]."""
        return self.basis @ values

    def locate(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The piece of every u, int64, and u minus the origin of the piece."""
        if u.is_cpu:  # torch starts threads for so few numbers, and waits for them
            piece = torch.from_numpy(np.searchsorted(self.knots.numpy(), u.numpy()))
        else:
            piece = torch.bucketize(u, self.knots.to(u.device))
        return piece, u - self.origins.to(u.device).index_select(0, piece)

    def rows(self, u: Tensor) -> Tensor:
        """The matrix [n, m] with f(u) = ``rows(u) @ values``, for a small number of u [n]."""
        piece, offset = self.locate(u)
        c0, c1, c2, c3 = (column.index_select(0, piece) for column in self.basis.unbind(1))
        offset = offset.unsqueeze(1)
        return c3.mul_(offset).add_(c2).mul_(offset).add_(c1).mul_(offset).add_(c0)

    @functools.cached_property
    def penalty(self) -> Tensor:
        r"""[m + 1, m + 1]: the quadratic form of the penalty of (a, f).

        .. math:: 5 a^2 + 5 \int f''(u)^2 du + 5 s(f)^2 + 0.005\, \text{mean}(f)^2

        with s the least-squares slope of the knot values.
        """
        m, h = len(self.knots), self.knots.diff()
        second = 2 * self.basis[1:, 2]  # second derivatives at the knots
        integral = torch.zeros(m, m, dtype=h.dtype)
        inner = torch.arange(m - 1)
        integral[inner, inner] += h / 3
        integral[inner + 1, inner + 1] += h / 3
        integral[inner, inner + 1] += h / 6
        integral[inner + 1, inner] += h / 6
        away = self.knots - self.knots.mean()
        slope = away / away.square().sum()
        mean = torch.full_like(slope, 1 / m)
        form = torch.zeros(m + 1, m + 1, dtype=h.dtype)
        form[0, 0] = 5
        form[1:, 1:] = 5 * second.T @ integral @ second + 5 * slope.outer(slope) + 0.005 * mean.outer(mean)
        return form


def evaluate(coefficients: Tensor, piece: Tensor, offset: Tensor) -> Tensor:
    """The spline with ``coefficients`` [m + 1, 4] at the pieces and offsets from :meth:`NaturalSpline.locate`."""
    c0, c1, c2, c3 = (column.contiguous() for column in coefficients.to(offset.device).unbind(1))
    result = c3[piece] * offset
    for column in (c2, c1):
        result = result.add_(column[piece]).mul_(offset)
    return result.add_(c0[piece])
