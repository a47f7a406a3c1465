"""Properties of fk.focal_loss on random logits and gammas."""

import torch
import torch._dynamo
import torch.utils.checkpoint
from conftest import assert_close
from focal_cases import TABLE, leaf
from hypothesis import given, settings
from hypothesis import strategies as st

import focalkern as fk

# Deterministic: a failure does not depend on chance. The loss takes microseconds, so many examples are possible.
PROPERTY = settings(deadline=None, derandomize=True, max_examples=60, database=None)

# ---- properties -----------------------------------------------------------------------------------------------------

# Logits up to 30 saturate float32 (1 - p = 1e-13) but keep sums of two losses exact.
logits_strategy = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=6)

gamma_strategy = st.floats(-6, 6, width=32)


@PROPERTY
@given(logits_strategy, gamma_strategy, st.data())
def test_property_loss_is_nonnegative_and_invariant_to_shifts_and_permutations(row, gamma, data):
    z = torch.tensor([row], dtype=torch.float64)
    y = data.draw(st.integers(0, len(row) - 1))
    loss = fk.focal_loss(z, torch.tensor([y]), torch.tensor(gamma, dtype=torch.float64))
    assert loss >= 0
    assert loss.isfinite()
    # Adding sixteenths to these logits is exact in float64.
    shift = data.draw(st.integers(-1000, 1000)) / 16
    shifted = fk.focal_loss(z + shift, torch.tensor([y]), torch.tensor(gamma, dtype=torch.float64))
    torch.testing.assert_close(shifted, loss, rtol=1e-10, atol=1e-12)
    order = data.draw(st.permutations(range(len(row))))
    x, permuted = leaf(z), leaf(z[:, order])
    g = torch.tensor(gamma, dtype=torch.float64)
    a, b = fk.focal_loss(x, torch.tensor([y]), g), fk.focal_loss(permuted, torch.tensor([order.index(y)]), g)
    assert_close(b, a)
    assert_close(torch.autograd.grad(b, permuted)[0], torch.autograd.grad(a, x)[0][:, order])


@PROPERTY
@given(logits_strategy, st.lists(gamma_strategy, min_size=2, max_size=5), st.data())
def test_property_loss_falls_with_gamma(row, gammas, data):
    y = data.draw(st.integers(0, len(row) - 1))
    g = torch.tensor(sorted(gammas), dtype=torch.float64)
    z = torch.tensor([row], dtype=torch.float64).expand(len(g), -1)
    losses = fk.focal_loss(z, torch.full((len(g),), y), g, reduction="none")
    assert (losses[1:] <= losses[:-1] * (1 + 1e-12)).all()


@PROPERTY
@given(logits_strategy, gamma_strategy, st.data())
def test_property_gradient_over_classes_sums_to_zero_and_scales_with_the_upstream(row, gamma, data):
    y = data.draw(st.integers(0, len(row) - 1))
    z = torch.tensor([row], dtype=torch.float64, requires_grad=True)
    loss = fk.focal_loss(z, torch.tensor([y]), torch.tensor(gamma, dtype=torch.float64))
    (grad,) = torch.autograd.grad(loss, z, retain_graph=True)
    assert abs(grad.sum().item()) <= 1e-13 * (1 + grad.abs().sum().item())
    (twice,) = torch.autograd.grad(loss, z, torch.tensor(-2.0, dtype=torch.float64))
    assert_close(twice, -2 * grad)


@PROPERTY
@given(st.lists(logits_strategy.filter(lambda r: len(r) >= 3).map(lambda r: r[:3]), min_size=1, max_size=5), st.data())
def test_property_a_batch_is_its_rows(rows, data):
    z = torch.tensor(rows)
    target = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    gamma = data.draw(st.sampled_from([2.0, 0.5, 0.0, -1.0, TABLE]))
    whole = fk.focal_loss(z, target, gamma, reduction="none")
    alone = torch.stack([fk.focal_loss(r, t, gamma) for r, t in zip(z, target, strict=True)])
    assert_close(whole, alone)
