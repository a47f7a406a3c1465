"""The quadratic program of the curve that keeps the order of the classes."""

import numpy as np
import pytest
import torch

from focalkern.calibrators._spline_fit import Derivatives
from focalkern.calibrators._spline_order import _non_negative, _quadratic_program


# None or one binds; several bind; as many as a curve has.
@pytest.mark.parametrize("n_constraints", [1, 30, 400])
@pytest.mark.parametrize("seed", range(5))
def test_the_minimum_under_constraints_has_multipliers(n_constraints, seed):
    """Karush, Kuhn and Tucker: the gradient is a sum of normals of binding constraints with factors >= 0."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    n = 11
    root, at, gradient = draw(n, n), draw(n), draw(n)
    hessian = root @ root.T + 0.1 * torch.eye(n, dtype=torch.float64)
    conditions = draw(n_constraints, n)
    conditions[n_constraints // 2 :] = conditions[: n_constraints - n_constraints // 2] + 1e-3  # nearly parallel
    constant = torch.rand(n_constraints, generator=random, dtype=torch.float64) + 0.1  # 0 is feasible
    here = Derivatives(0.0, gradient, hessian, 0.0)
    found = _quadratic_program(here, at, conditions, constant)
    slack, slope = conditions @ found + constant, gradient + hessian @ (found - at)
    assert float(slack.min()) >= -1e-10
    normals, wanted = np.vstack([conditions.T, slack.clamp(min=0)]), np.append(slope, 0)  # only binding ones count
    factors = _non_negative(normals, wanted)
    assert (factors >= 0).all()
    assert normals @ factors == pytest.approx(wanted, abs=1e-8)
