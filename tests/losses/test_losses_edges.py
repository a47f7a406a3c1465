"""Training losses at extreme and masked logits, in half precision, and their derivatives."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from loss_cases import LOSSES, NAMES, PER_SAMPLE, batch, gradient

from focalkern.reference._softmax_losses import ROW_LOSSES

FINITE_AT_ZERO = {spec.short for spec in ROW_LOSSES.values() if not spec.infinite_at_zero}

# The norm of a row with a logit of -inf is infinite.
INFINITE_AT_ZERO = [name for name in PER_SAMPLE if name not in FINITE_AT_ZERO and name != "norm"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_logits_are_finite_in_every_dtype(name, dtype, device):
    """Logits of +-1e4, far beyond exp's range: the target has probability 1 or 0. Also checks the dtype of the loss."""
    input = torch.tensor([[1e4, -1e4, 0.0], [0.0, 1e4, -1e4], [1e4, 1e4, -1e4]], dtype=dtype, device=device)
    input.requires_grad_()
    for target in ([0, 1, 0], [1, 2, 2]):
        loss = LOSSES[name](label_smoothing=0.1).to(device)
        found = loss(input, torch.tensor(target, device=device))
        assert found.dtype == dtype
        assert found.isfinite()
        assert gradient(found, input).isfinite().all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "norm"])
@pytest.mark.parametrize("z", [[[3.0]], [[3.0, -torch.inf, -torch.inf]]])
def test_a_class_without_rivals_is_certain(name, z):
    input = torch.tensor(z, requires_grad=True)
    found = LOSSES[name]()(input, torch.tensor([0]))
    assert found == 0
    assert gradient(found, input).count_nonzero() == 0


@pytest.mark.parametrize("name", INFINITE_AT_ZERO)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z", [[1.0, -torch.inf, 0.0], [-torch.inf, -torch.inf, 0.0], [-torch.inf, 2.0, -torch.inf]])
@pytest.mark.parametrize("y", [0, 1, 2])
def test_masked_classes_have_a_gradient_also_as_the_target(name, z, y, smoothing):
    """A target with p = 0 has an infinite loss and the gradient of cross-entropy; logits of -inf give no NaN."""
    input = torch.tensor([z], requires_grad=True)
    found = LOSSES[name](label_smoothing=smoothing)(input, torch.tensor([y]))
    slope = gradient(found, input)
    assert slope.isfinite().all()
    if z[y] == -torch.inf or smoothing:
        assert found == torch.inf
    if z[y] == -torch.inf and not smoothing and name != "adafocal":  # whose first bin has another factor at p = 0
        assert_close(slope, gradient(F.cross_entropy(input, torch.tensor([y])), input))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype, device):
    input, target = batch(dtype=dtype, device=device)
    loss = LOSSES[name](label_smoothing=0.1).to(device)
    wide = input.detach().double().requires_grad_()
    exact = loss(wide, target)
    assert_close(loss(input, target), exact, dtype)
    with torch.autocast(device.type, dtype=dtype):
        found = loss(input, target)
    assert found.dtype == torch.float32
    assert_close(found, exact)
    # The gradient is rounded once.
    slope = gradient(found, input)
    assert slope.dtype == dtype
    assert_close(slope, gradient(exact, wide))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("flsd", "focal, table", "adafocal")])
def test_gradcheck(name):
    input, target = batch(6, 4)
    loss = LOSSES[name](weight=torch.rand(4), label_smoothing=0.1)
    assert torch.autograd.gradcheck(lambda z: loss(z, target), input)


@pytest.mark.parametrize("name", PER_SAMPLE)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_of_single_rows_with_class_weights(name, smoothing):
    input, target = batch(5, 4)
    target[1] = -100
    loss = LOSSES[name](weight=torch.tensor([1.0, 0.5, 0.0, 2.0]), label_smoothing=smoothing, reduction="sum")
    found = torch.func.vmap(torch.func.grad(loss))(input.detach(), target)
    assert_close(found, gradient(loss(input, target), input))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # a warning of torch, in jvp
@pytest.mark.parametrize("name", ["dual", "brier", "norm", "mmce", "mmce, weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_second_derivatives_and_function_transforms(name, smoothing):
    """test_focal_loss_derivatives.py has those of the fused losses."""
    input, target = batch(6, 4)
    loss = LOSSES[name](label_smoothing=smoothing)
    assert torch.autograd.gradgradcheck(lambda z: loss(z, target), input)
    inputs, targets = torch.randn(3, 6, 4, dtype=torch.float64), torch.randint(4, (3, 6))
    found = torch.func.vmap(torch.func.grad(loss))(inputs, targets)
    expected = [gradient(loss(z, y), z) for z, y in zip(inputs.requires_grad_(), targets, strict=True)]
    assert_close(found, torch.stack(expected))
    direction = torch.randn(6, 4, dtype=torch.float64)
    _, slope = torch.func.jvp(lambda z: loss(z, targets[0]), (inputs[0].detach(),), (direction,))
    assert_close(slope, (expected[0] * direction).sum())
