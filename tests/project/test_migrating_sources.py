"""Losses of projects that are not installed here, by the formulas of their sources; transformers, timm and mmdet."""

import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE, peer
from migrating_cases import GAMMAS, C, assert_equal, leaf, per_class

import focalkern as fk

# ---- Projects whose sources were read, and which cannot be installed here ------------------------------------------


@pytest.mark.parametrize("gamma", GAMMAS)
def test_mmcv_formulas(gamma):
    # The formula of its CUDA kernels, from their source; the library itself does not run here.
    z = torch.randn(9, C, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, C])  # C, one past the last class: background
    alpha, weight = 0.3, per_class([0.5, 1.0, 2.0, 0.25])
    rows, foreground = torch.arange(8), y[:8]

    def sigmoid(z):
        p = z.sigmoid()
        positive = y.unsqueeze(1) == torch.arange(C)
        return torch.where(positive, -alpha * (1 - p) ** gamma * p.log(), -(1 - alpha) * p**gamma * (1 - p).log())

    target = F.one_hot(y, C + 1)[:, :C]
    assert_equal(sigmoid, lambda z: fk.sigmoid_focal_loss(z, target, gamma=gamma, alpha=alpha), z)
    # Its mean divides by the number of rows. mmdet's FocalLoss calls it with "none" and divides by rows times classes.
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
    # clcarwin/focal_loss_pytorch and AdeelH/pytorch-multi-class-focal-loss, copied from their sources.
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
    if gamma:  # with class weights exp(-ce) is not a probability, and the loss differs
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
    # From a gap of 18, 1 - p is 0 in float32: so are other libraries' losses, and for gamma < 1 their gradients are
    # NaN.
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
        # u^gamma is the exponential of a float32 number, whose rounding is a relative error of the result, at most
        # 1e-5: exp(-87) is the smallest float32.
        rtol = TOLERANCE[torch.float32][0] + 2.0**-24 * min(gamma * gap, 87)
        assert rtol < 1e-5
        expected = torch.stack([-slope, slope]).unsqueeze(0)
        # The absolute tolerance is the smallest float32, because tiny values must be correct, too.
        torch.testing.assert_close(loss.detach().double(), u**gamma * minus_log_p, rtol=rtol, atol=1e-38)
        torch.testing.assert_close(z.grad.double(), expected, rtol=rtol, atol=1e-38)
