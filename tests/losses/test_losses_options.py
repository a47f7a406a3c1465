"""Options of the training losses: reductions, weights, ignored samples, shapes, targets."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from loss_cases import LOSSES, NAMES, PER_SAMPLE, batch, gradient

import focalkern as fk
from focalkern.reference._softmax_losses import ROW_LOSSES

ONLY_LABELS = {spec.short for spec in ROW_LOSSES.values() if not spec.soft_target and not spec.of_batch}


def test_the_focal_family_is_focal_loss():
    input, target = batch()
    options = {"weight": torch.rand(7, dtype=torch.float64), "label_smoothing": 0.1, "ignore_index": 3}
    for detach in (False, True):
        for loss, gamma in [
            (fk.FocalLoss, 2.0),
            (fk.FocalLoss, torch.nn.Parameter(torch.rand(60))),
            (fk.FocalLoss, fk.FLSD_53),
            (fk.InverseFocalLoss, 1.5),
            (fk.InverseFocalLoss, torch.tensor(1.5)),
        ]:
            found = loss(gamma, detach_modulation=detach, **options)(input, target)
            gamma = -gamma if loss is fk.InverseFocalLoss else gamma
            expected = fk.focal_loss(input, target, gamma, detach_modulation=detach, **options)
            assert torch.equal(found, expected)
            assert torch.equal(gradient(found, input), gradient(expected, input))


@pytest.mark.parametrize("soft", [False, True])
def test_coefficients_of_zero_leave_cross_entropy(soft):
    input, target = batch()
    options = {"weight": torch.rand(7, dtype=torch.float64), "label_smoothing": 0.1}
    if soft:
        target = torch.rand(60, 7, dtype=torch.float64)
    else:
        options["ignore_index"] = 3
    losses = [fk.MMCELoss(0.0, **options), fk.LogitNormPenalty(0.0, **options), fk.FocalLoss(0.0, **options)]
    if not soft:
        losses += [fk.DualFocalLoss(0.0, **options), fk.DualFocalLoss(0.0, detach_modulation=True, **options)]
    expected = F.cross_entropy(input, target, **options)
    slope = gradient(expected, input)
    for loss in losses:
        found = loss(input, target)
        assert_close(found, expected)
        assert_close(gradient(found, input), slope)


def test_dual_detached_and_smoothed_near_zero():
    """A detached factor has the coefficient of cross-entropy. Smoothed labels: another formula, the same limit."""
    input, target = batch()
    p = input.detach().softmax(-1)
    p_y = p.gather(1, target[:, None])
    p_j = torch.where(p < p_y, p, 0).amax(1, keepdim=True)
    expected = (1 - p_y + p_j) ** 2 * (p - F.one_hot(target, 7))
    found = fk.DualFocalLoss(2.0, reduction="sum", detach_modulation=True)(input, target)
    assert_close(gradient(found, input), expected)
    whole, smoothed = fk.DualFocalLoss(2.0), fk.DualFocalLoss(2.0, label_smoothing=1e-15)
    assert_close(whole(input, target), smoothed(input, target))
    assert_close(gradient(whole(input, target), input), gradient(smoothed(input, target), input))


def test_class_probabilities():
    input, _ = batch()
    target = torch.rand(60, 7, dtype=torch.float64)
    weight = torch.rand(7, dtype=torch.float64)
    w = (weight * target).sum(-1)
    t = 0.9 * target + 0.1 / 7
    options = {"weight": weight, "label_smoothing": 0.1, "reduction": "none"}
    assert_close(fk.BrierLoss(**options)(input, target), w * (input.softmax(-1) - t).square().sum(-1))
    cross_entropy = F.cross_entropy(input, target, **options)
    assert_close(fk.LogitNormPenalty(0.1, **options)(input, target), cross_entropy + 0.1 * w * input.abs().sum(-1))
    labels = torch.randint(7, (60,))
    hard = F.one_hot(labels, 7).double()
    for name in NAMES:
        if name not in ONLY_LABELS:
            loss = LOSSES[name](weight=weight, label_smoothing=0.1, reduction="sum")
            assert_close(loss(input, hard), loss(input, labels))
    # The mean of probabilities divides by N, as in cross-entropy.
    mean, total = fk.BrierLoss(weight), fk.BrierLoss(weight, reduction="sum")
    assert_close(mean(input, target), total(input, target) / 60)


# ---------------------------------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PER_SAMPLE)
def test_reductions_weights_and_ignored_samples(name, device):
    """The mean divides by the summed weight of the samples that count; ignored samples may have any value."""
    input, target = batch(device=device)
    weight = torch.rand(7, dtype=torch.float64, device=device) + 0.5
    ignored = target == 3
    with torch.no_grad():
        input[ignored] = torch.nan
    options = {"weight": weight, "ignore_index": 3, "label_smoothing": 0.1}
    mean, total, each = (LOSSES[name](**options, reduction=r).to(device) for r in ("mean", "sum", "none"))
    losses = each(input, target)
    assert losses.shape == target.shape
    assert ignored.any()
    assert losses[ignored].count_nonzero() == 0
    assert_close(total(input, target), losses.sum())
    assert_close(mean(input, target), losses.sum() / weight[target[~ignored]].sum())
    assert gradient(mean(input, target), input)[ignored].count_nonzero() == 0
    # Without the ignored rows the result is the same.
    assert_close(mean(input[~ignored], target[~ignored]), mean(input, target))


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_a_class_weight_scales_the_loss_of_its_samples(name):
    input, target = batch()
    weight = torch.rand(7, dtype=torch.float64)
    plain = LOSSES[name](reduction="none")(input, target)
    assert_close(LOSSES[name](reduction="none", weight=weight)(input, target), weight[target] * plain)


@pytest.mark.parametrize("weighted", [False, True])
def test_mmce_options(weighted):
    """Class weights and smoothing apply to the cross-entropy; the sum counts the error once per sample."""
    input, target = batch()
    options = {"weight": torch.rand(7, dtype=torch.float64), "label_smoothing": 0.1, "ignore_index": 3}
    valid = target != 3
    plain = fk.MMCELoss(weighted=weighted)(input[valid], target[valid]) - F.cross_entropy(input[valid], target[valid])
    with torch.no_grad():
        input[~valid] = torch.nan
    expected = F.cross_entropy(input[valid], target[valid], **options) + plain
    found = fk.MMCELoss(weighted=weighted, **options)(input, target)
    assert_close(found, expected)
    assert gradient(found, input)[~valid].count_nonzero() == 0
    expected = F.cross_entropy(input[valid], target[valid], reduction="sum", **options) + valid.sum() * plain
    assert_close(fk.MMCELoss(weighted=weighted, reduction="sum", **options)(input, target), expected)


@pytest.mark.parametrize("name", NAMES)
def test_shapes(name, device):
    """Pixels and single samples are the same samples in other shapes; labels of any dtype; any memory format."""
    loss = LOSSES[name](label_smoothing=0.1, ignore_index=2).to(device)
    input = torch.randn(3, 5, 4, 6, dtype=torch.float64, device=device)
    target = torch.randint(5, (3, 4, 6), device=device)
    flat = input.movedim(1, -1).reshape(-1, 5), target.reshape(-1)
    expected = loss(*flat)
    assert_close(loss(input, target), expected)
    assert_close(loss(input.to(memory_format=torch.channels_last), target.to(torch.uint8)), expected)
    assert_close(loss(flat[0], flat[1].int()), expected)
    assert loss(flat[0][0], flat[1][0].clamp(max=1)).shape == ()
    assert_close(loss(flat[0][0], flat[1][0].clamp(max=1)), loss(flat[0][:1], flat[1][:1].clamp(max=1)))
    if name in PER_SAMPLE:
        each = LOSSES[name](label_smoothing=0.1, ignore_index=2, reduction="none").to(device)
        assert_close(each(input, target).reshape(-1), each(*flat))
        assert each(input[:0], target[:0]).shape == (0, 4, 6)
        assert each(flat[0][0], flat[1][0]).shape == ()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_average_is_nan_without_gradient(name, device):
    loss = LOSSES[name]().to(device)
    input = torch.randn(4, 3, device=device, requires_grad=True)
    found = loss(input, torch.full((4,), -100, device=device))
    assert found.isnan()
    assert gradient(found, input).count_nonzero() == 0
    assert loss(input[:0], torch.empty(0, dtype=torch.long, device=device)).isnan()
