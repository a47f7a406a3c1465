"""Every equality of the table in docs/howto/migrate.md, in value and gradient.

A case is a library's call and the call that replaces it. Both get the same leaf and the same random upstream gradient
in float64, where the cancellation of 1 - p in the libraries stays below the tolerance. MONAI rounds its input to
float32.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import peer
from migrating_cases import GAMMAS, C, assert_equal, per_class

import focalkern as fk

ALPHAS = [None, 0.3]
IGNORED = 255


@pytest.fixture
def pixels():
    """Logits [N, C, H, W], labels [N, H, W], and the same labels with ignored ones among them."""
    z = torch.randn(3, C, 5, 6, dtype=torch.float64)
    y = torch.randint(C, (3, 5, 6))
    holes = torch.where(torch.rand(3, 5, 6) < 0.3, IGNORED, y)
    assert 0 < (holes == IGNORED).sum() < holes.numel()
    assert set(y.unique().tolist()) == set(range(C))
    return z, y, holes


def class_0_and_the_others(alpha):
    """alpha of kornia and MONAI with softmax, as class weights; class 0 is the background."""
    return None if alpha is None else torch.tensor([1 - alpha] + [alpha] * (C - 1), dtype=torch.float64)


def one_hot(y, valid=None):
    """One-hot targets [N, C, H, W], with zeros where not valid."""
    hot = F.one_hot(y if valid is None else y.where(valid, 0), C).movedim(-1, 1)
    return hot if valid is None else hot * valid.unsqueeze(1)


# ---- torchvision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("alpha", [-1, 0.3])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_torchvision(gamma, alpha, reduction):
    theirs = peer("torchvision.ops").sigmoid_focal_loss
    z = torch.randn(7, C, dtype=torch.float64)
    # Its targets may be fractions, which mix alpha and p_t; focalkern's do the same.
    for target in (torch.randint(2, (7, C)).double(), torch.rand(7, C, dtype=torch.float64)):
        assert_equal(
            lambda z, t=target: theirs(z, t, alpha=alpha, gamma=gamma, reduction=reduction),
            lambda z, t=target: fk.sigmoid_focal_loss(z, t, alpha=alpha, gamma=gamma, reduction=reduction),
            z,
        )
    assert_equal(lambda z: theirs(z, target), lambda z: fk.sigmoid_focal_loss(z, target), z)


# ---- kornia ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_weight", [None, [0.5, 1.0, 2.0, 0.25]])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_kornia_focal_loss(gamma, alpha, class_weight, pixels):
    theirs = peer("kornia").losses.focal_loss
    z, _, y = pixels
    given = None if class_weight is None else per_class(class_weight)
    options = {"alpha": alpha, "gamma": gamma, "weight": given, "ignore_index": IGNORED}
    weights = [w for w in (class_0_and_the_others(alpha), given) if w is not None]
    weight = torch.stack(weights).prod(0) if weights else None

    def ours(z, reduction):
        return fk.focal_loss(z, y, gamma, weight=weight, ignore_index=IGNORED, reduction=reduction)

    assert_equal(lambda z: theirs(z, y, reduction="sum", **options), lambda z: ours(z, "sum"), z)
    # The mean counts every class of every pixel, including ignored pixels.
    assert_equal(lambda z: theirs(z, y, reduction="mean", **options), lambda z: ours(z, "sum") / z.numel(), z)
    # "none" is a map over the classes.
    assert_equal(lambda z: theirs(z, y, reduction="none", **options).sum(1), lambda z: ours(z, "none"), z)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_kornia_binary_focal_loss_with_logits(gamma, alpha, pixels):
    theirs = peer("kornia").losses.binary_focal_loss_with_logits
    z, y, holes = pixels
    target = one_hot(y)
    for reduction in ("none", "mean", "sum"):
        assert_equal(
            lambda z, r=reduction: theirs(z, target, alpha=alpha, gamma=gamma, reduction=r),
            lambda z, r=reduction: fk.sigmoid_focal_loss(z, target, alpha=alpha, gamma=gamma, reduction=r),
            z,
        )
    # pos_weight, weight and ignored entries multiply the unreduced loss.
    weight, pos_weight = per_class([0.5, 1.0, 2.0, 0.25]), per_class([3.0, 1.0, 0.2, 5.0])
    valid = (holes != IGNORED).unsqueeze(1)
    marked = torch.where(valid, target, -100)
    factor = torch.where(target == 1, pos_weight.view(C, 1, 1), 1.0) * weight.view(C, 1, 1) * valid
    assert_equal(
        lambda z: theirs(z, marked, alpha=alpha, gamma=gamma, reduction="mean", weight=weight, pos_weight=pos_weight),
        lambda z: (factor * fk.sigmoid_focal_loss(z, target, alpha=alpha, gamma=gamma)).mean(),
        z,
    )


# ---- MONAI ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [None, 0.3, [0.1, 0.7, 0.4, 0.9]])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_monai_softmax(gamma, alpha, pixels):
    loss_class = peer("monai.losses").FocalLoss
    z, y, holes = pixels
    weight = per_class(alpha) if isinstance(alpha, list) else class_0_and_the_others(alpha)

    def theirs(z, y, reduction, **options):
        options = {"to_onehot_y": True, "use_softmax": True, "alpha": alpha, **options}
        return loss_class(gamma=gamma, reduction=reduction, **options)(z, y.unsqueeze(1))

    def ours(z, y=y, weight=weight, reduction="sum", **options):
        return fk.focal_loss(z, y, gamma, weight=weight, reduction=reduction, **options)

    float32 = torch.float32
    # The mean counts every class of every pixel; the sum is a sum of means over the pixels; "none" is a map.
    assert_equal(lambda z: theirs(z, y, "mean"), lambda z: ours(z) / z.numel(), z, float32)
    assert_equal(lambda z: theirs(z, y, "sum"), lambda z: ours(z) / y[0].numel(), z, float32)
    assert_equal(lambda z: theirs(z, y, "none").sum(1), lambda z: ours(z, reduction="none"), z, float32)
    # With ignore_index the mean is over the counted pixels, no longer over the classes.
    assert_equal(
        lambda z: theirs(z, holes, "mean", ignore_index=IGNORED),
        lambda z: ours(z, holes, ignore_index=IGNORED) / (holes != IGNORED).sum(),
        z,
        float32,
    )
    # weight multiplies alpha.
    given = [0.5, 1.0, 2.0, 0.25]
    both = per_class(given) if weight is None else weight * per_class(given)
    assert_equal(lambda z: theirs(z, y, "mean", weight=given), lambda z: ours(z, weight=both) / z.numel(), z, float32)
    # Without the background, the softmax and a list of alphas cover only the other classes; a scalar alpha is ignored.
    others = alpha[1:] if isinstance(alpha, list) else alpha
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*scalar `alpha` ignored when using softmax", UserWarning)
        assert_equal(
            lambda z: theirs(z, y, "mean", include_background=False, alpha=others),
            lambda z: (
                ours(z[:, 1:], y - 1, per_class(others) if isinstance(others, list) else None, ignore_index=-1)
                / z[:, 1:].numel()
            ),
            z,
            float32,
        )
    # Class probabilities as targets.
    soft = torch.rand_like(z).softmax(1)
    module = loss_class(use_softmax=True, gamma=gamma, alpha=alpha)
    assert_equal(lambda z: module(z, soft), lambda z: ours(z, soft) / z.numel(), z, float32)


@pytest.mark.parametrize("alpha", [None, 0.3, [0.1, 0.7, 0.4, 0.9]])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_monai_sigmoid(gamma, alpha, pixels):
    loss_class = peer("monai.losses").FocalLoss
    z, y, holes = pixels
    target, valid = one_hot(y), (holes != IGNORED).unsqueeze(1)
    listed = isinstance(alpha, list)  # alpha then weights only the positives; (1 - alpha) does not occur
    factor = torch.where(target == 1, per_class(alpha).view(C, 1, 1), 1.0) if listed else torch.ones_like(z)
    given = [0.5, 1.0, 2.0, 0.25]

    def theirs(z, y=y, **options):
        return loss_class(to_onehot_y=True, gamma=gamma, alpha=alpha, **options)(z, y.unsqueeze(1))

    def ours(z):
        return factor * fk.sigmoid_focal_loss(z, target, gamma=gamma, alpha=None if listed else alpha)

    float32 = torch.float32
    assert_equal(theirs, lambda z: ours(z).mean(), z, float32)
    assert_equal(lambda z: theirs(z, reduction="none"), ours, z, float32)
    assert_equal(lambda z: theirs(z, reduction="sum"), lambda z: ours(z).sum() / y[0].numel(), z, float32)
    assert_equal(
        lambda z: theirs(z, weight=given), lambda z: (per_class(given).view(C, 1, 1) * ours(z)).mean(), z, float32
    )
    assert_equal(
        lambda z: theirs(z, holes, ignore_index=IGNORED), lambda z: (valid * ours(z)).sum() / valid.sum(), z, float32
    )


# ---- segmentation_models_pytorch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_segmentation_models_multiclass_is_one_sigmoid_per_class(gamma, alpha, pixels):
    loss_class = peer("segmentation_models_pytorch").losses.FocalLoss
    z, y, holes = pixels
    valid = (holes != IGNORED).unsqueeze(1).expand_as(z)

    def theirs(z, y=y, **options):
        return loss_class("multiclass", alpha=alpha, gamma=gamma, **options)(z, y)

    def ours(z, reduction="mean"):
        return fk.sigmoid_focal_loss(z, one_hot(y), gamma=gamma, alpha=alpha, reduction=reduction)

    assert_equal(theirs, ours, z)
    assert_equal(lambda z: theirs(z, reduction="sum"), lambda z: ours(z, "sum") / C, z)
    assert_equal(lambda z: theirs(z, holes, ignore_index=IGNORED), lambda z: ours(z, "none")[valid].mean(), z)
    weights = [0.5, 1.0, 2.0, 0.25]
    assert_equal(
        lambda z: theirs(z, class_weights=weights),
        lambda z: ours(z, "none").mean((0, 2, 3)) @ (per_class(weights) / sum(weights)),
        z,
    )


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_segmentation_models_binary_and_multilabel(gamma, alpha, pixels):
    loss_class = peer("segmentation_models_pytorch").losses.FocalLoss
    z = pixels[0]
    target = torch.randint(2, z.shape)
    for mode in ("binary", "multilabel"):
        assert_equal(
            lambda z, m=mode: loss_class(m, alpha=alpha, gamma=gamma)(z, target),
            lambda z: fk.sigmoid_focal_loss(z, target, gamma=gamma, alpha=alpha, reduction="mean"),
            z,
        )
    holes = torch.where(torch.rand_like(z) < 0.3, IGNORED, target)
    assert_equal(
        lambda z: loss_class("binary", alpha=alpha, gamma=gamma, ignore_index=IGNORED)(z, holes),
        lambda z: fk.sigmoid_focal_loss(
            z[holes != IGNORED], target[holes != IGNORED], gamma=gamma, alpha=alpha, reduction="mean"
        ),
        z,
    )
