"""Every equality of the table in docs/howto/migrate.md, in value and gradient.

A case is a library's call and the call that replaces it. Both get the same leaf and the same random upstream gradient,
in float64, where the cancellation in the libraries' 1 - p stays below the tolerance. MONAI rounds its input to float32.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE, assert_close, peer

import focalkern as fk

# gamma is not only 0 or 2, because these hide half of the mistakes in gamma or alpha; alpha is not 1/2 for the same
# reason.
GAMMAS = [0.0, 0.7, 2.0, 3.5]
ALPHAS = [None, 0.3]
IGNORED = 255
C = 4


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def assert_equal(theirs, ours, z, dtype=None):
    """The same loss, and the same gradient for the same random upstream one."""
    z_theirs, z_ours = leaf(z), leaf(z)
    expected, loss = theirs(z_theirs), ours(z_ours)
    assert loss.shape == expected.shape
    assert expected.detach().abs().max() > 0.01
    assert_close(loss, expected, dtype)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    loss.backward(upstream.to(loss.dtype))
    assert z_theirs.grad.abs().max() > 1e-4
    assert_close(z_ours.grad, z_theirs.grad, dtype)


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
    """alpha of kornia and MONAI under softmax, as class weights: class 0 is the background."""
    return None if alpha is None else torch.tensor([1 - alpha] + [alpha] * (C - 1), dtype=torch.float64)


def per_class(values):
    return torch.tensor(values, dtype=torch.float64)


def one_hot(y, valid=None):
    """[N, C, H, W], all zeros where not valid."""
    hot = F.one_hot(y if valid is None else y.where(valid, 0), C).movedim(-1, 1)
    return hot if valid is None else hot * valid.unsqueeze(1)


# ---- torchvision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("alpha", [-1, 0.3])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_torchvision(gamma, alpha, reduction):
    theirs = peer("torchvision.ops").sigmoid_focal_loss
    z = torch.randn(7, C, dtype=torch.float64)
    # Its targets may be fractions; alpha and p_t are then mixed, and so they are here.
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
    # The mean counts every class of every pixel, ignored pixels too.
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
    # With ignore_index the mean is over the pixels that count, and no longer over the classes.
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
    # Without the background, the softmax and a list alpha cover only the other classes; a number alpha is ignored.
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
    listed = isinstance(alpha, list)  # then it weights only the positives, and (1 - alpha) does not occur
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


# ---- Sources that were read, and cannot be installed here -----------------------------------------------------------


@pytest.mark.parametrize("gamma", GAMMAS)
def test_mmcv_formulas(gamma):
    # The formula of its CUDA kernels, from their source: the library itself is not run.
    z = torch.randn(9, C, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, C])  # C, one past the classes: background
    alpha, weight = 0.3, per_class([0.5, 1.0, 2.0, 0.25])
    rows, foreground = torch.arange(8), y[:8]

    def sigmoid(z):
        p = z.sigmoid()
        positive = y.unsqueeze(1) == torch.arange(C)
        return torch.where(positive, -alpha * (1 - p) ** gamma * p.log(), -(1 - alpha) * p**gamma * (1 - p).log())

    target = F.one_hot(y, C + 1)[:, :C]
    assert_equal(sigmoid, lambda z: fk.sigmoid_focal_loss(z, target, gamma=gamma, alpha=alpha), z)
    # Its mean divides by the rows. mmdet's FocalLoss calls it with "none" and divides by rows times classes.
    assert_equal(
        lambda z: sigmoid(z).sum() / z.size(0),
        lambda z: fk.sigmoid_focal_loss(z, target, gamma=gamma, alpha=alpha, reduction="sum") / len(z),
        z,
    )

    def softmax(z):
        p = z.softmax(1)[rows, foreground]
        return -alpha * (1 - p) ** gamma * p.log() * weight[foreground]

    assert_equal(
        lambda z: softmax(z).sum() / z.size(0),
        lambda z: alpha * fk.focal_loss(z, foreground, gamma, weight=weight, reduction="sum") / len(z),
        z[:8],
    )


@pytest.mark.parametrize("gamma", GAMMAS)
def test_formulas_of_copied_files(gamma):
    # clcarwin/focal_loss_pytorch and AdeelH/pytorch-multi-class-focal-loss, written down from their source.
    z, y = torch.randn(9, C, dtype=torch.float64), torch.randint(C, (9,))
    alpha = per_class([0.5, 1.0, 2.0, 0.25])

    def copied(z, detached):
        log_p = z.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
        p = log_p.exp().detach() if detached else log_p.exp()
        return (-((1 - p) ** gamma) * alpha[y] * log_p).mean()

    for detached in (True, False):
        assert_equal(
            lambda z, d=detached: copied(z, d),
            lambda z, d=detached: (
                fk.focal_loss(z, y, gamma, weight=alpha, detach_modulation=d, reduction="sum") / y.numel()
            ),
            z,
        )


@pytest.mark.parametrize("gamma", GAMMAS)
def test_formula_of_the_published_flsd(gamma):
    # FocalLossAdaptive of torrvision/focal_calibration: its gamma argument is the third step.
    z, y = 3 * torch.randn(40, C, dtype=torch.float64), torch.randint(C, (40,))

    def published(z):
        log_p = z.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
        p = log_p.exp()
        steps = torch.where(p >= 0.5, torch.full_like(p, gamma), torch.where(p < 0.2, 5.0, 3.0))
        assert all(in_step.sum() > 3 for in_step in (p < 0.2, (p >= 0.2) & (p < 0.5), p >= 0.5))
        return -((1 - p) ** steps * log_p).sum()

    table = fk.GammaTable([0.0, 0.2, 0.5, 1.0], [5.0, 3.0, gamma])
    assert_equal(published, lambda z: fk.focal_loss(z, y, table, reduction="sum"), z)
    if gamma == 0:
        flsd_53 = fk.GammaTable([0.0, 0.2, 0.5, 1.0], [5.0, 3.0, 3.0])
        for ours in (fk.FLSDLoss(reduction="sum"), fk.FocalLoss(fk.FLSD_53, reduction="sum")):
            assert torch.equal(ours(z, y), fk.focal_loss(z, y, flsd_53, reduction="sum"))


# ---- transformers, timm, mmdet --------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [-1, 0.3])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_transformers_detectors(gamma, alpha):
    theirs = peer("transformers.loss.loss_for_object_detection").sigmoid_focal_loss
    z, boxes = torch.randn(2, 6, C, dtype=torch.float64), 5
    for target in (torch.randint(2, (2, 6, C)).double(), torch.rand(2, 6, C, dtype=torch.float64)):
        assert_equal(
            lambda z, t=target: theirs(z, t, boxes, alpha=alpha, gamma=gamma),
            lambda z, t=target: fk.sigmoid_focal_loss(z, t, gamma, alpha, "sum") / z.shape[1] / boxes,
            z,
        )


@pytest.mark.parametrize("gammas", [(4.0, 1.0), (2.0, 0.0)])
@pytest.mark.parametrize("clip", [0.05, 0.0])
def test_timm_asymmetric_loss(gammas, clip):
    module = peer("timm.loss").AsymmetricLossMultiLabel
    z, t = torch.randn(6, C, dtype=torch.float32), torch.randint(2, (6, C)).float()
    theirs = module(*gammas, clip)
    for z_, t_ in ((z, t), (3 * z, 1 - t)):
        x, y = leaf(z_), leaf(z_)
        expected, found = theirs(x, t_), fk.asymmetric_loss(y, t_, *gammas, clip, "sum") / len(z)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # it computes in float32, with an epsilon
        slopes = [torch.autograd.grad(v, w)[0] for v, w in ((found, y), (expected, x))]
        torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_five_lines_of_a_gist(gamma):
    z, y = torch.randn(9, C, dtype=torch.float64), torch.randint(C, (9,))
    y[2] = -100  # its mean counts ignored labels

    def gist(z, weight=None):
        ce = F.cross_entropy(z, y, weight=weight, reduction="none")
        return (0.3 * (1 - (-ce).exp()) ** gamma * ce).mean()

    assert_equal(gist, lambda z: 0.3 * fk.focal_loss(z, y, gamma, reduction="sum") / y.numel(), z)
    if gamma:  # with class weights exp(-ce) is no probability, and the loss is another one
        weight = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
        ours = 0.3 * fk.focal_loss(z, y, gamma, weight=weight, reduction="sum") / y.numel()
        assert (gist(z, weight) - ours).abs() > 1e-3


def test_mmdet_with_avg_factor_and_quality_focal_loss():
    # Its formulas, from mmdet/models/losses: the classes of label C are background.
    z, y = torch.randn(9, C, dtype=torch.float64), torch.randint(C + 1, (9,))
    t = F.one_hot(y, C + 1)[:, :C].double()

    def focal(z, gamma=1.5, alpha=0.3, avg_factor=4.0):
        p = z.sigmoid()
        p_t = (1 - p) * t + p * (1 - t)
        weight = (alpha * t + (1 - alpha) * (1 - t)) * p_t.pow(gamma)
        return (F.binary_cross_entropy_with_logits(z, t, reduction="none") * weight).sum() / avg_factor

    assert_equal(focal, lambda z: fk.sigmoid_focal_loss(z, y, 1.5, 0.3, "sum") / 4.0, z)
    score = torch.rand(9, dtype=torch.float64)

    def quality(z, beta=2.0, avg_factor=4.0):
        p = z.sigmoid()
        loss = F.binary_cross_entropy_with_logits(z, torch.zeros_like(z), reduction="none") * p.pow(beta)
        rows = (y < C).nonzero().squeeze(1)
        at = z[rows, y[rows]]
        scale = (score[rows] - at.sigmoid()).abs().pow(beta)
        loss[rows, y[rows]] = F.binary_cross_entropy_with_logits(at, score[rows], reduction="none") * scale
        return loss.sum(1).sum() / avg_factor

    assert_equal(quality, lambda z: fk.quality_focal_loss(z, (y, score), 2.0, "sum") / 4.0, z)


# ---- Where a difference 1 - p is not enough -------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("gap", [8.0, 12.0, 14.0, 20.0, 27.0, 40.0, 80.0])
def test_ours_stays_exact_where_p_rounds_to_one(gap, gamma):
    # From a gap of 18 on the difference 1 - p is 0 in float32: others' loss too, and for gamma < 1 their gradient NaN.
    y = torch.tensor([0])
    for ours in (
        lambda z: fk.focal_loss(z, y, gamma),
        lambda z: fk.sigmoid_focal_loss(z[:, :1] - z[:, 1:], torch.ones(1, 1), gamma=gamma, alpha=None).sum(),
    ):
        z = leaf(torch.tensor([[gap, 0.0]]))
        loss = ours(z)
        loss.backward()
        # u = 1 - p = 1 / (1 + exp(gap)) without a difference; -log p = -log1p(-u).
        u = torch.tensor(gap, dtype=torch.float64).neg().sigmoid()
        minus_log_p = -torch.log1p(-u)
        slope = u**gamma * (u + gamma * (1 - u) * minus_log_p)
        # u^gamma is the exponential of a float32 number, whose rounding is a relative error here. At most 1e-5: below
        # exp(-87) float32 ends.
        rtol = TOLERANCE[torch.float32][0] + 2.0**-24 * min(gamma * gap, 87)
        assert rtol < 1e-5
        expected = torch.stack([-slope, slope]).unsqueeze(0)
        # The absolute tolerance is the smallest float32, because tiny values must be right, too.
        torch.testing.assert_close(loss.detach().double(), u**gamma * minus_log_p, rtol=rtol, atol=1e-38)
        torch.testing.assert_close(z.grad.double(), expected, rtol=rtol, atol=1e-38)
