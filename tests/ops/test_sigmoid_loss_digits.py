"""The losses of independent logits at 300 digits and at enormous logits."""

import oracle
import pytest
import torch
import torch._dynamo
from conftest import assert_close
from sigmoid_cases import FLOATS, NAMES, SCORED, SCORES, grads, leaf

import focalkern as fk
from focalkern import reference

SHARES = [0.0, 1.0, 0.3, 0.75, 2.0**-20, 1 - 2.0**-20]


# ---- values --------------------------------------------------------------------------------------------------------
def check_at_many_digits(function, definition, dtype, device):
    """Compares value and derivatives in the logit and in the gammas, for every score and share."""
    pairs = [(x, t) for x in SCORES for t in SHARES]
    x, t = (torch.tensor(list(column), dtype=dtype, device=device) for column in zip(*pairs, strict=True))
    x = leaf(x)
    with oracle.precision():
        expected = [definition(x, t) for x, t in pairs]
        slopes = [oracle.gradient(lambda v, t=t: definition(v[0], t), [x])[0] for x, t in pairs]
    loss = function(x, t)
    assert loss.isfinite().all()
    assert_close(loss, torch.tensor([float(v) for v in expected], dtype=torch.float64))
    (slope,) = grads(loss, x)
    assert slope.isfinite().all()
    assert_close(slope, torch.tensor([float(v) for v in slopes], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
# Gammas: cross-entropy, an infinite derivative at u = 0, the common small powers, and a gamma that is not whole.
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.0, 3.5])
def test_sigmoid_focal_loss_at_300_digits(device, dtype, gamma):
    for alpha in (None, 0.25):
        check_at_many_digits(
            lambda x, t, alpha=alpha: fk.sigmoid_focal_loss(x, t, gamma, alpha),
            lambda x, t, alpha=alpha: oracle.sigmoid_focal(x, t, gamma, alpha),
            dtype,
            device,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gammas", [(4.0, 1.0), (0.0, 0.0), (0.3, 2.5)])
def test_asymmetric_loss_at_300_digits(device, dtype, gammas):
    for margin in (0.0, 0.0625, 0.4375):  # exact in float32; p never equals one, where the derivative jumps
        check_at_many_digits(
            lambda x, t, margin=margin: fk.asymmetric_loss(x, t, *gammas, margin),
            lambda x, t, margin=margin: oracle.asymmetric(x, t, *gammas, margin),
            dtype,
            device,
        )


@pytest.mark.parametrize("dtype", FLOATS)
# Half and double of 1, its neighbours, numbers with one bit set, zeros of both signs; and negative numbers, which are
# no shares.
@pytest.mark.parametrize("share", [0.5, 2.0, 0.75, 1.5, "below", "above", 2.0**-14, -0.0, -1.0, -2.0, float("-inf")])
def test_one_soft_target_among_hard_ones_is_seen(dtype, share):
    eps = torch.finfo(dtype).eps
    share = {"below": 1 - eps / 2, "above": 1 + eps}.get(share, share)
    x, t = torch.randn(1100).to(dtype), torch.randint(2, (1100,)).to(dtype)
    for at in (0, 700, 1099):  # in whole tiles and in the last tile
        t_with = t.clone()
        t_with[at] = share
        for function in (getattr(fk, name) for name in NAMES):
            found, expected = function(x, t_with), function(x, t)
            alone = function(x[at : at + 1].double(), t_with[at : at + 1].double())
            assert_close(found[at : at + 1], alone)
            expected[at] = found[at]
            assert_close(found, expected.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.5, 2.0])
def test_quality_focal_loss_at_300_digits(device, dtype, beta):
    check_at_many_digits(
        lambda x, t: fk.quality_focal_loss(x, t, beta), lambda x, t: oracle.quality(x, t, beta), dtype, device
    )


def test_alpha_and_gamma_per_class_at_300_digits(device):
    alpha = torch.tensor([0.1, 0.5, 0.9, 0.25], dtype=torch.float64, device=device)
    gamma = torch.tensor([0.0, 0.3, 2.0, 5.0], dtype=torch.float64, device=device)
    x = torch.tensor([[-1000.0, 3.0, 0.5, 1000.0], [1000.0, -40.0, 0.0, -1000.0]], device=device)
    t = torch.tensor([[0.0, 1.0, 0.5, 1.0], [1.0, 1.0, 0.25, 0.0]], device=device)
    found = fk.sigmoid_focal_loss(x, t, gamma, alpha)
    with oracle.precision():
        expected = [
            [float(oracle.sigmoid_focal(*v)) for v in zip(*rows, gamma.tolist(), alpha.tolist(), strict=True)]
            for rows in zip(x.tolist(), t.tolist(), strict=True)
        ]
    assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_slope_in_gamma_at_300_digits(device):
    x = torch.tensor(SCORES, device=device, dtype=torch.float64)
    for t in (0.0, 1.0, 0.3):
        for gamma in (0.3, 2.0):
            g = leaf(torch.tensor(gamma, dtype=torch.float64, device=device).expand(len(SCORES)).clone())
            for function, definition in (
                (fk.sigmoid_focal_loss, lambda v, x, t: oracle.sigmoid_focal(x, t, v[0], 0.25)),
                (fk.quality_focal_loss, lambda v, x, t: oracle.quality(x, t, v[0])),
                (fk.asymmetric_loss, lambda v, x, t: oracle.asymmetric(x, t, v[0], 1.0, 0.05)),
            ):
                (found,) = grads(function(x, torch.full_like(x, t), g), g)
                with oracle.precision():
                    expected = [
                        float(oracle.gradient(lambda v, x=x, d=definition, t=t: d(v, x, t), [gamma])[0]) for x in SCORES
                    ]
                assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
# The kernels' formulas; the definition, which is differentiated twice; and the definition with a target that requires
# grad.
@pytest.mark.parametrize("form", ["kernel", "definition", "differentiable target"])
@pytest.mark.parametrize("name", ["sigmoid_focal_loss", "quality_focal_loss", "asymmetric_loss"])
def test_slope_in_gamma_keeps_its_digits_where_the_logit_is_confidently_wrong(device, dtype, form, name):
    """u, |t - p| and p - margin are near 1 there, so their logarithm is small. The targets are hard, or nearly."""
    pairs = [(x, t) for x in (2.0, 8.0, 16.0, 18.0, 40.0) for t in (0.0, 2.0**-20, 2.0**-10)]
    if name != "asymmetric_loss":  # its gamma is that of negatives
        pairs += [(-x, 1 - t) for x, t in pairs]
    x, t = (torch.tensor(list(column), dtype=dtype, device=device) for column in zip(*pairs, strict=True))
    with oracle.precision():
        of = {
            "sigmoid_focal_loss": oracle.sigmoid_focal,
            "quality_focal_loss": oracle.quality,
            "asymmetric_loss": lambda x, t, gamma: oracle.asymmetric(x, t, gamma, 1.0, 2.0**-20),
        }[name]
        expected = [float(oracle.gradient(lambda v, x=x, t=t: of(x, t, v[0]), [1.5])[0]) for x, t in pairs]
    options = {"sigmoid_focal_loss": {"alpha": None}, "asymmetric_loss": {"margin": 2.0**-20}}.get(name, {})
    if form == "differentiable target":
        t = leaf(t)
    gamma = leaf(torch.full_like(x, 1.5))
    loss = getattr(fk, name)(x, t, gamma, **options)
    (slope,) = torch.autograd.grad(loss.sum(), gamma, create_graph=form == "definition")
    relative = torch.tensor(expected, dtype=torch.float64) / slope.detach().cpu().double() - 1
    assert relative.abs().max() < (1e-6 if dtype == torch.float32 else 2e-15)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_finite_at_every_logit(device, dtype, name):
    magnitudes = torch.cat([torch.linspace(80, 110, 61), torch.linspace(700, 750, 51), torch.tensor([1e4, 6e4])])
    x = leaf(torch.cat([magnitudes, -magnitudes, torch.zeros(1)]).to(device, dtype))
    for gamma in (0.0, 0.3, 2.0):
        for t in (0.0, 1.0, 0.5):
            loss = getattr(fk, name)(x, torch.full_like(x, t), gamma)
            assert loss.dtype == dtype
            assert loss.isfinite().all()
            assert grads(loss, x)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.5])  # hard targets, and a soft one that makes its whole tile soft
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_slopes_at_enormous_logits(device, dtype, share, sign):
    """A probability of 0 times a logit is 0, for logits up to half of the largest number."""
    sizes = torch.tensor([1e4, 1e30, 1e36, 1e37, 1e38, 1.6e38], dtype=dtype, device=device)
    if dtype == torch.float64:
        sizes = sizes**8
    x = leaf(sign * torch.cat([sizes, sizes]))
    t = torch.zeros_like(x)
    t[6:] = 1
    t[0] = share
    # Where sigmoid(x) is 1, the distance to the target t is 1 - t; where it is 0, it is t. The loss is linear there.
    distance = 1 - t if sign > 0 else t
    for function, expected in (
        (lambda: fk.sigmoid_focal_loss(x, t, 2.0, 0.25), (0.25 * t + 0.75 * (1 - t)) * distance**3),
        (lambda: fk.quality_focal_loss(x, t, 2.0), distance**3),
        (lambda: fk.asymmetric_loss(x, t, 4.0, 1.0, 0.0), distance),
    ):
        (slope,) = grads(function(), x)
        assert_close(slope, sign * expected.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.25, 0.9])  # a fraction of the largest number: gamma |x| exceeds it
@pytest.mark.parametrize("gamma", [5.0, 100.0])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in SCORED])
def test_derivatives_where_gamma_times_the_logit_overflows(device, dtype, size, gamma, name):
    """p is 0 or 1. If A is the share of the other side, the loss is A^gamma A |x|, and the asymmetric loss A |x|."""
    share = torch.tensor([0.3, 0.75, 0.999, 0.999], dtype=dtype, device=device)
    x = leaf(torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=dtype, device=device) * size * torch.finfo(dtype).max)
    against = torch.where(x > 0, 1 - share, share).detach().double()
    power = 1.0 if name == "asymmetric_loss" else against**gamma
    options = {"sigmoid_focal_loss": {"alpha": None}, "asymmetric_loss": {"margin": 0.0}}.get(name, {})
    for differentiable in (False, True):
        t, number = share.clone().requires_grad_(differentiable), leaf(torch.tensor(gamma, dtype=dtype))
        loss = getattr(fk, name)(x, t, number, **options)
        assert_close(loss / x.abs(), power * against)
        inputs = [x, number, *([t] if differentiable else [])]
        for again in (False, True):  # by the kernel, and by the definition, which is differentiated twice
            slopes = torch.autograd.grad(loss.sum(), inputs, retain_graph=True, create_graph=again)
            assert_close(slopes[0], x.detach().sign().double() * power * against)
            assert not any(slope.isnan().any() for slope in slopes)
        (second,) = torch.autograd.grad(slopes[0].sum(), x)
        assert (second == 0).all()


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 0x7FC00000), (torch.float64, 0x7FF8000000000000)])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 2.0, 7.0])
def test_every_nan_stays_nan(dtype, bits, gamma):
    """Includes NaNs with a payload, which the exponential of hard targets could treat as numbers."""
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    nans = torch.tensor([bits + k for k in (0, 1, 2, 3, 255, 12345)] + [-1], dtype=integer).view(dtype)
    for share in (0.0, 1.0, 0.5):
        x = leaf(nans.repeat(3))
        loss = fk.sigmoid_focal_loss(x, torch.full_like(x, share), gamma)
        assert loss.isnan().all()
        assert grads(loss, x)[0].isnan().all()


@pytest.mark.parametrize("reduction", ["sum", "none"])
# Sizes around the blocks (64) and tiles (512) of the CPU loops.
@pytest.mark.parametrize("size", [63, 64, 65, 511, 512, 513, 577, 1024, 1087])
def test_every_element_of_a_tile_counts(size, reduction):
    x, target = torch.randn(size) * 5, (torch.rand(size) < 0.3).float()
    values = []
    for dtype in (torch.float32, torch.float64):
        logits = leaf(x.to(dtype))
        loss = fk.sigmoid_focal_loss(logits, target.to(dtype), reduction=reduction)
        values.append((loss.detach(), *grads(loss, logits)))
    for found, expected in zip(*values, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_targets_outside_of_0_and_1_are_nan(device, name):
    x = torch.randn(5, device=device, requires_grad=True)
    loss = getattr(fk, name)(x, torch.tensor([0.5, -0.1, 1.5, float("nan"), 1.0], device=device))
    assert loss.isnan().tolist() == [False, True, True, True, False]
    assert grads(loss, x)[0].isnan().tolist() == [False, True, True, True, False]


def test_without_gamma_it_is_binary_cross_entropy(device):
    x, t = torch.randn(40, device=device, dtype=torch.float64) * 5, torch.rand(40, device=device, dtype=torch.float64)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(x, t, reduction="none")
    assert_close(fk.sigmoid_focal_loss(x, t, 0.0, None), expected)
    assert_close(fk.quality_focal_loss(x, t, 0.0), expected)
    assert_close(fk.asymmetric_loss(x, t, 0.0, 0.0, 0.0), expected)


@pytest.mark.parametrize("alpha", [float("nan"), -0.5, -1.0])
def test_alpha_of_a_tensor_without_dimensions_counts_whatever_it_is(device, alpha):
    """It is passed as a number; None means no alpha."""
    x, labels = torch.randn(7, 33, device=device), torch.randint(34, (7,), device=device)
    for target in (torch.rand(7, 33, device=device), torch.randint(2, (7, 33), device=device), labels):
        found, expected = leaf(x), leaf(x.double())
        loss = fk.sigmoid_focal_loss(found, target, alpha=torch.tensor(alpha))
        exact = reference.sigmoid_focal_loss(expected, target, alpha=torch.tensor(alpha))
        assert_close(loss, exact)
        assert_close(grads(loss, found)[0], grads(exact, expected)[0])
