"""spline_calibration_map keeps the order of the classes."""

import math

import pytest
import torch
from spline_map_cases import KNOTS, VALUES

import focalkern as fk

# ---- order ----------------------------------------------------------------------------------------------------------


def rows_with_neighbours(n_classes: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of all scales, each with a tie and with classes one unit in the last place apart."""
    z = torch.randn(10_000, n_classes, dtype=torch.float64) * torch.logspace(-4, 2, 10_000).unsqueeze(1)
    z = z.to(dtype)
    first, tied, near = torch.rand(10_000, n_classes).argsort(1)[:, :3].unbind(1)
    rows = torch.arange(10_000)
    z[::2] = z[::2].scatter(1, first[::2, None], z[::2].amax(1, keepdim=True))
    z[rows, tied] = z[rows, first]
    z[rows, near] = (
        torch.nextafter(z[rows, first].float(), torch.tensor(9e9)).to(dtype)
        if dtype.itemsize < 4
        else (torch.nextafter(z[rows, first], torch.tensor(9e9, dtype=dtype)))
    )
    return z


def assert_in_order(z: torch.Tensor, p: torch.Tensor) -> None:
    """Checks that larger inputs have no smaller results, and equal inputs bitwise equal results."""
    order = z.argsort(1)
    sorted_z, sorted_p = z.gather(1, order), p.gather(1, order)
    assert (sorted_p[:, 1:] >= sorted_p[:, :-1]).all()
    assert (sorted_p[:, 1:] == sorted_p[:, :-1])[sorted_z[:, 1:] == sorted_z[:, :-1]].all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
# 40: rows are in vectors, and log(1 - P) of small P is a polynomial; 120: off the vector width.
@pytest.mark.parametrize("n_classes", [3, 10, 40, 120])
@pytest.mark.parametrize("log", [False, True])
def test_keep_order_keeps_it_to_the_bit(dtype, n_classes, log):
    z = rows_with_neighbours(n_classes, dtype)
    # Scores of 0.1 and 0.001 log q; 0.001 is the smallest slope that a fit allows an ordered curve.
    few, many = torch.linspace(-8, 4, 15, dtype=torch.float64), torch.linspace(-20, 20, 161, dtype=torch.float64)
    softplus = torch.nn.functional.softplus
    for knots, values in ((KNOTS, VALUES), (few, 0.9 * softplus(-few)), (many, 0.999 * softplus(-many))):
        for temperature in (0.3, 1.0, 7.0):
            p = fk.spline_calibration_map(z, temperature, 1e-4, 0.0, knots, values, keep_order=True, log=log)
            assert_in_order(z, p)
            free = fk.spline_calibration_map(z, temperature, 1e-4, 0.0, knots, values, log=log)
            rtol = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
            torch.testing.assert_close(p, free, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("n_classes", [3, 40])
@pytest.mark.parametrize("case", ["large scores", "a small floor"])
def test_keep_order_where_rounding_is_large(n_classes, case):
    """If rounding of the scores exceeds the steps between them, the kernel restores the order of each row
    afterwards."""
    z = rows_with_neighbours(n_classes, torch.float64)[::10]
    floor, values = (1e-4, VALUES + 1e6) if case == "large scores" else (1e-280, VALUES)
    p = fk.spline_calibration_map(z, 1.0, floor, 0.0, KNOTS, values, keep_order=True, log=True)
    assert_in_order(z, p)
    torch.testing.assert_close(
        p, fk.spline_calibration_map(z, 1.0, floor, 0.0, KNOTS, VALUES, log=True), rtol=1e-8, atol=1e-8
    )


def rows_of_many_classes(case: str) -> torch.Tensor:
    """Rows that buckets of equal width sort completely, or not at all (all in one bucket)."""
    n_rows = 200 if case == "even" else 6  # rounding exchanges neighbours in few rows
    z = torch.randn(n_rows, 450, dtype=torch.float64).mul_(3)
    z[:, 100:200] = z[:, :100]  # ties
    z[:, 200:300] = torch.nextafter(z[:, :100], torch.full((n_rows, 100), math.inf, dtype=torch.float64))
    z[:, 300:310] = -math.inf
    if case == "an outlier":
        z[:, 7] = 1e9
    if case == "the whole range":
        z[:, 7], z[:, 8] = 1.7e308, -1.7e308
    if case == "denormal differences":
        z = torch.where(z > 0, 5e-324, 0.0)
    if case == "all equal":
        z = torch.full_like(z, -3.5)
    return z


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("case", ["even", "an outlier", "the whole range", "denormal differences", "all equal"])
# 15 knots fill the tables of the vector code, which needs no sort; with 40 knots rows of so many classes are sorted.
@pytest.mark.parametrize("n_knots", [15, 40])
def test_keep_order_of_many_double_classes(case, kind, n_knots):
    """Scores of 0.1 log q: rounding may exchange neighbours."""
    z = rows_of_many_classes(case)
    if kind == "probs":
        z = z.softmax(-1)
    knots = torch.linspace(-8, 4, n_knots, dtype=torch.float64)
    curve = (knots, 0.9 * torch.nn.functional.softplus(-knots))
    options = {"input_kind": kind, "log": True}
    p = fk.spline_calibration_map(z, 1.0, 1e-4, 0.0, *curve, keep_order=True, **options)
    assert_in_order(z, p)
    free = fk.spline_calibration_map(z, 1.0, 1e-4, 0.0, *curve, **options)
    torch.testing.assert_close(p, free, rtol=1e-12, atol=1e-12)
    if case == "even":  # without the sort, neighbours do change places
        assert not (free.gather(1, z.argsort(1)).diff(dim=1) >= 0).all()
