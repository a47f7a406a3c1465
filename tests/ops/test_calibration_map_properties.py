"""Properties of the calibration maps on random logits, gammas and temperatures."""

import torch
import torch._dynamo
from conftest import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

import focalkern as fk

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60, database=None)

# ---- properties -----------------------------------------------------------------------------------------------------
logits_strategy = st.lists(st.floats(-40, 40, width=32), min_size=2, max_size=6)

# Down to the edge of the domain, and beyond the paper's grid.
gamma_strategy = st.floats(-0.984375, 8, width=32)

temperature_strategy = st.floats(0.0625, 16, width=32)


@PROPERTY
@given(logits_strategy, gamma_strategy, temperature_strategy, st.integers(-1000, 1000), st.data())
def test_property_a_distribution_in_the_order_of_the_logits(row, gamma, temperature, sixteenths, data):
    z = torch.tensor(row, dtype=torch.float64)
    p = fk.focal_calibration_map(z, gamma, temperature)
    log_p = fk.focal_calibration_map(z, gamma, temperature, log=True)
    assert p.isfinite().all()
    assert (p >= 0).all()
    assert abs(p.sum().item() - 1) <= 1e-12
    assert_close(log_p.exp(), p)
    order = z.argsort()
    assert (log_p[order].diff() >= -1e-9).all()
    # Shifts of the logits (exact in float64 here) and permutations of the classes change nothing.
    shifted = fk.focal_calibration_map(z + sixteenths / 16, gamma, temperature)
    torch.testing.assert_close(shifted, p, rtol=1e-10, atol=1e-12)
    permutation = data.draw(st.permutations(range(len(row))))
    assert_close(fk.focal_calibration_map(z[permutation], gamma, temperature), p[permutation])


@PROPERTY
@given(st.floats(-60, 60, width=32), gamma_strategy, temperature_strategy)
def test_property_binary_map_is_odd_increasing_and_on_the_right_side(s, gamma, temperature):
    x = torch.tensor([s, -s, s + 0.5], dtype=torch.float64)
    odds = fk.binary_focal_calibration_map(x, gamma, temperature, log_odds=True)
    assert_close(odds[1], -odds[0])
    assert odds[2] > odds[0]
    assert odds[0] * s >= 0
    # Sharper than plain temperature scaling for gamma > 0, flatter for gamma < 0. But from about -0.885 towards -1 the
    # slope at 0 is above 1 again: at gamma = -15/16, s = 1 becomes 1.0604.
    plain = x[0] / temperature
    if gamma >= 0:
        assert odds[0].abs() >= plain.abs() * (1 - 1e-12)
    elif gamma >= -0.875:
        assert odds[0].abs() <= plain.abs() * (1 + 1e-12)
