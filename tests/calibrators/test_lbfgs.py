"""L-BFGS of spline scaling for a vector or a matrix: minima, line search, and memory reused by a later search."""

import pytest
import torch

from focalkern.calibrators._lbfgs import minimise


def quadratic(scales, middle):
    scales, middle = (torch.tensor(list(one), dtype=torch.float64) for one in (scales, middle))

    def objective(point):
        away = point - middle
        return float(away @ (scales * away) / 2), scales * away

    return objective


def zeros(n):
    return torch.zeros(n, dtype=torch.float64)


def test_a_quadratic_of_the_identity_takes_one_step():
    found = minimise(quadratic([1, 1, 1], [1, -2, 3]), zeros(3), done=1e-10, steps=10)
    assert found.point.tolist() == [1, -2, 3]
    assert found.evaluations == 2
    assert found.converged


@pytest.mark.parametrize("factor", [1e-4, 1.0, 1e4])
def test_the_line_search_finds_its_way_through_a_curved_valley(factor):
    """Rosenbrock's function: the first step is far too long or short, and later steps end beyond the minimum."""

    def objective(point):
        point = point.detach().requires_grad_()
        x, y = point
        value = factor * ((1 - x) ** 2 + 100 * (y - x * x) ** 2)
        (gradient,) = torch.autograd.grad(value, point)
        return value.item(), gradient

    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    found = minimise(objective, start, done=1e-9 * factor, steps=200)
    assert found.point.tolist() == pytest.approx([1, 1], abs=1e-5)
    assert found.converged
    assert found.evaluations < 100


def test_the_value_never_rises():
    values = []

    def objective(point):
        value, gradient = float((point.abs() ** 1.5).sum()), 1.5 * point.sign() * point.abs() ** 0.5
        values.append(value)
        return value, gradient

    start = torch.tensor([3.0, -40.0], dtype=torch.float64)
    found = minimise(objective, start, done=1e-6, steps=100)
    assert found.value == min(values) < values[0]


def test_pairs_of_a_search_nearby_save_evaluations():
    scales = [0.01, 0.1, 1, 3, 10, 30]
    first = minimise(quadratic(scales, [1, 2, 3, 4, 5, 6]), zeros(6), done=1e-6, steps=100)
    moved = quadratic([1.05 * scale for scale in scales], [1.1, 2, 3, 3.9, 5, 6])
    without = minimise(moved, first.point, done=1e-6, steps=100)
    warm = minimise(moved, first.point, done=1e-6, steps=100, pairs=first.pairs)
    assert len(first.pairs) <= 10
    assert warm.evaluations < without.evaluations
    assert warm.point.tolist() == pytest.approx(without.point.tolist(), abs=1e-3)


def test_a_search_that_ends_at_its_last_step_says_so():
    found = minimise(quadratic([0.01, 1, 50], [1, 2, 3]), zeros(3), done=1e-12, steps=2)
    assert not found.converged


def test_rounding_ends_a_search():
    """No step lowers the value as much as the gradient promises: the search ends and keeps its point."""

    def objective(point):
        return 1.0, torch.full_like(point, 1e-3)

    found = minimise(objective, zeros(2), done=1e-12, steps=5)
    assert found.value == 1
    assert found.evaluations < 200


def test_a_line_search_ends_where_no_number_lies_between_its_ends():
    """Beyond 1 the value jumps up, and a second evaluation at 1 has another rounding error."""
    seen = set()

    def objective(point):
        x = float(point[0])
        again = x in seen
        seen.add(x)
        return (1e30, torch.ones_like(point)) if x > 1 or again else (-x, -torch.ones_like(point))

    found = minimise(objective, zeros(1), done=1e-12, steps=1)
    assert (found.point.tolist(), found.value) == ([1.0], -1.0)


def test_at_the_minimum_nothing_moves():
    found = minimise(quadratic([1, 2], [0, 0]), zeros(2), done=1e-10, steps=10)
    assert (found.evaluations, found.converged, len(found.pairs)) == (1, True, 0)


def test_a_brief_search_takes_its_last_step_without_an_evaluation():
    objective, done = quadratic([0.8, 0.9, 1, 1.1, 1.2], [1, -2, 3, -4, 5]), 1e-4
    whole = minimise(objective, zeros(5), done=done, steps=10)
    brief = minimise(objective, zeros(5), done=done, steps=10, brief=True)
    assert brief.evaluations < whole.evaluations
    value, gradient = objective(brief.point)
    assert float(gradient.abs().max()) <= done
    assert brief.value == pytest.approx(value, abs=1e-3 * done)


@pytest.mark.parametrize("norm", [2, torch.inf])
def test_arrays_and_tensors_give_the_same_minimum(norm):
    of_tensor = quadratic([0.01, 0.1, 1, 3, 10, 30], [1, 2, 3, 4, 5, 6])

    def of_array(point):
        value, gradient = of_tensor(torch.from_numpy(point))
        return value, gradient.numpy()

    tensor = minimise(of_tensor, zeros(6), done=1e-8, steps=100, norm=norm)
    array = minimise(of_array, zeros(6).numpy(), done=1e-8, steps=100, norm=norm)
    assert array.evaluations == tensor.evaluations
    assert array.point == pytest.approx(tensor.point.numpy(), rel=1e-12)
