"""The module of the sigmoid focal loss: 300 digits, edges, errors."""

import re

import mpmath
import oracle
import pytest
import torch
from conftest import assert_close, assert_same, peer
from loss_cases import DTYPES, gradient
from mpmath import mpf

import focalkern as fk
from focalkern.ops import _backend

# ---------------------------------------------------------------------------------------------------------------------
# One logit per class
# ---------------------------------------------------------------------------------------------------------------------
SCORES = [-1e4, -200.0, -90.0, -17.0, -1.3, 0.0, 0.4, 5.0, 17.0, 90.0, 200.0, 1e4]


@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 2.0, 3.5])
@pytest.mark.parametrize("t", [0.0, 1.0, 0.3])
def test_sigmoid_focal_loss_at_300_digits(gamma, t):
    def definition(x):
        p = 1 / (1 + mpmath.exp(-x))
        q = 1 / (1 + mpmath.exp(x))
        share = mpf(t)
        cross_entropy = -(share * mpmath.log(p) if t else 0) - ((1 - share) * mpmath.log(q) if t < 1 else 0)
        alpha = mpf("0.25") * share + mpf("0.75") * (1 - share)
        return alpha * (share * q + (1 - share) * p) ** mpf(gamma) * cross_entropy

    with oracle.precision():
        step = mpf(10) ** -40
        expected = [float(definition(mpf(v))) for v in SCORES]
        slope = [float((definition(mpf(v) + step) - definition(mpf(v) - step)) / (2 * step)) for v in SCORES]
    for dtype in DTYPES:
        input = torch.tensor(SCORES, dtype=dtype, requires_grad=True)
        found = fk.sigmoid_focal_loss(input, torch.full_like(input, t), gamma)
        assert_close(found, torch.tensor(expected, dtype=torch.float64))
        assert_close(gradient(found.sum(), input), torch.tensor(slope, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 2.0])
def test_sigmoid_focal_loss_is_finite(dtype, gamma, device):
    """Includes logits for which 1 - p_t is subnormal: magnitudes of 88 to 104 in float32 and 708 to 746 in float64."""
    magnitudes = torch.cat([torch.linspace(80, 110, 61), torch.linspace(700, 750, 51), torch.tensor([1e4])])
    input = torch.cat([magnitudes, -magnitudes]).to(device, dtype).requires_grad_()
    for t in (0.0, 1.0, 0.5):
        found = fk.sigmoid_focal_loss(input, torch.full_like(input, t), gamma)
        assert found.dtype == dtype
        assert found.isfinite().all()
        assert gradient(found.sum(), input).isfinite().all()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("alpha", [0.25, 0.0, -1])
@pytest.mark.parametrize("gamma", [0.0, 0.7, 2.0])
def test_sigmoid_focal_loss_is_torchvisions(reduction, alpha, gamma):
    """With gradients in the logits and in the targets, which are 0, 1 and values between."""
    theirs = peer("torchvision.ops").sigmoid_focal_loss
    input = torch.randn(50, 3, dtype=torch.float64).mul_(4).requires_grad_()
    target = torch.rand(50, 3, dtype=torch.float64)
    target[:20] = target[:20].round()
    target.requires_grad_()
    expected = theirs(input, target, alpha=alpha, gamma=gamma, reduction=reduction)
    found = fk.sigmoid_focal_loss(input, target, gamma, alpha, reduction)
    constant = fk.sigmoid_focal_loss(input, target.detach(), gamma, alpha, reduction)
    assert found.shape == expected.shape
    assert_close(found, expected)
    assert_close(constant, expected)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (input, target), upstream)
    for ours, exact in zip(torch.autograd.grad(found, (input, target), upstream), wanted, strict=True):
        assert_close(ours, exact)
    assert_close(torch.autograd.grad(constant, input, upstream)[0], wanted[0])


def test_sigmoid_focal_loss_alpha_none_and_labels_of_other_dtypes(device):
    input = torch.randn(9, device=device)
    target = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1], device=device)
    expected = fk.sigmoid_focal_loss(input, target.float(), 2.0, -1)
    assert_same(fk.sigmoid_focal_loss(input, target.bool(), 2.0, None), expected)
    assert_same(fk.SigmoidFocalLoss(2.0, None, "none")(input, target), expected)
    # The elements are added in another order.
    torch.testing.assert_close(fk.SigmoidFocalLoss(2.0, None)(input, target), expected.mean())
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert fk.sigmoid_focal_loss(input.bfloat16(), target).dtype == torch.float32


@pytest.mark.parametrize(
    ("input", "target", "error", "message"),
    [
        ([0.0], torch.zeros(1), TypeError, r"input must be a tensor, got list"),
        (torch.zeros(1), 1.0, TypeError, r"target must be a tensor, got float"),
        (torch.zeros(1).long(), torch.zeros(1), TypeError, r"input must be floating point, got torch.int64"),
        (torch.zeros(2, 3), torch.zeros(2), ValueError, r"target must be the shape of input = \[2, 3\], got \[2\]"),
        (torch.zeros(1), torch.zeros(1, device="meta"), ValueError, r"target must be on the device of input"),
    ],
)
def test_bad_batches_of_sigmoid_focal_loss(input, target, error, message):
    with pytest.raises(error, match="sigmoid_focal_loss: " + message):
        fk.sigmoid_focal_loss(input, target)


@pytest.mark.parametrize("backend", ["kernels", "plain torch"])
@pytest.mark.parametrize(
    "loss", ["sigmoid_focal_loss", "asymmetric_loss", "quality_focal_loss", "varifocal_loss", "matchability_loss"]
)
@pytest.mark.parametrize(
    ("shape", "target", "words", "mend"),
    [
        ((1, 3, 4, 5), torch.rand(3, 4, 5), "pass target.view_as(input)", lambda z, t: (z, t.view_as(z))),
        ((3, 4, 5), torch.rand(1, 3, 4, 5), "pass target.view_as(input)", lambda z, t: (z, t.view_as(z))),
        ((7,), torch.rand(7, 1), "pass target.view_as(input)", lambda z, t: (z, t.view_as(z))),
        ((7, 1), torch.rand(7), "pass target.view_as(input)", lambda z, t: (z, t.view_as(z))),
        (
            (3, 4, 5),
            torch.ones(4, 5).long(),
            "for one image [C, d1, ...] pass input[None] and target[None]",
            lambda z, t: (z[None], t[None]),
        ),
        ((7, 3), torch.ones(7, 1).long(), "pass target.squeeze(-1)", lambda z, t: (z, t.squeeze(-1))),
        ((2, 3, 4), torch.ones(2, 1, 4).long(), "pass target.squeeze(1)", lambda z, t: (z, t.squeeze(1))),
        ((7, 3), torch.ones(7), "labels are integers: target.long()", lambda z, t: (z, t.long())),
        ((7, 3), torch.ones(4), "", None),
        ((2, 3, 4), torch.ones(3, 4).bool(), "", None),
    ],
)
def test_a_target_of_another_shape_is_told_what_fits(backend, loss, shape, target, words, mend, monkeypatch):
    if backend == "plain torch":
        monkeypatch.setattr(_backend, "_ON_CPU", False)
    call, input = getattr(fk, loss), torch.zeros(shape)
    got = f"got {list(target.shape)}{words and '; '}{words}"
    with pytest.raises(ValueError, match=f"^{loss}: target .*{re.escape(got)}$"):
        call(input, target)
    assert mend is None or call(*mend(input, target)).isfinite().all()


def test_labels_and_scores_of_one_image_are_told_to_be_a_batch():
    input, labels, scores = torch.zeros(3, 4, 5), torch.ones(4, 5).long(), torch.rand(4, 5)
    with pytest.raises(ValueError, match=r"pass input\[None\] and labels\[None\] and scores\[None\]$"):
        fk.ia_bce_loss(input, (labels, scores))
    assert fk.ia_bce_loss(input[None], (labels[None], scores[None])).isfinite().all()
