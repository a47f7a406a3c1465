"""Second derivatives of float32 losses at confident logits, where 1 - p cancels in those of torch's logsigmoid.

The kernels leave second derivatives to torch operations. Plain torch has those of logsigmoid.
"""

import mpmath
import oracle
import pytest
import torch

import focalkern as fk

pytestmark = pytest.mark.kernels("stable")

LOGITS = [sign * size for size in (0.0, 0.5, 3.0, 9.0, 13.5, 15.0, 16.0, 17.0, 18.0, 21.0, 30.0) for sign in (-1, 1)]
RTOL = 3e-5  # differences of derivatives that agree in a digit or two; before, all digits were lost

SIGMOID = {
    "focal": lambda x, t: fk.sigmoid_focal_loss(x, t),
    "cross-entropy": lambda x, t: fk.sigmoid_focal_loss(x, t, gamma=0.0, alpha=None),
    "asymmetric": lambda x, t: fk.asymmetric_loss(x, t),
    "quality": lambda x, t: fk.quality_focal_loss(x, t),
    "varifocal": lambda x, t: fk.varifocal_loss(x, t),
    "matchability": lambda x, t: fk.matchability_loss(x, t),
    "ia_bce": lambda x, t: fk.ia_bce_loss(x, t),
}


def second_derivative(loss, x):
    (slope,) = torch.autograd.grad(loss(x).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.sum(), x)[0]


def check(found, expected):
    """Relative to the value, down to the smallest normal number of float32."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=RTOL, atol=2.0**-126)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", SIGMOID)
def test_sigmoid_losses(name, share):
    def loss(x):
        return SIGMOID[name](x, torch.full_like(x, share))

    x = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    narrow = x.detach().float().requires_grad_()
    expected = second_derivative(loss, x)
    check(second_derivative(loss, narrow), expected)
    slope = torch.func.grad(lambda x: loss(x).sum())
    check(torch.func.grad(lambda x: slope(x).sum())(narrow.detach()), expected)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 2.0, 3.5])
def test_sigmoid_focal_loss_at_300_digits(gamma, share):
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(LOGITS, dtype=dtype, requires_grad=True)
        found = second_derivative(lambda x: fk.sigmoid_focal_loss(x, torch.full_like(x, share), gamma, None), x)
        with oracle.precision():
            expected = [
                float(mpmath.diff(lambda v: oracle.sigmoid_focal(v, share, gamma, None), mpmath.mpf(v), 2))
                for v in LOGITS
            ]
        check(found, torch.tensor(expected, dtype=torch.float64))


# Every formula of labels, whose derivative in the logits goes through log p and log(1 - p) of the label.
@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: fk.focal_loss(z, y, 2.0, reduction="none"),
        lambda z, y: fk.focal_loss(z, y, 0.0, reduction="none"),
        lambda z, y: fk.focal_loss(z, y, 0.5, reduction="none"),
        lambda z, y: fk.focal_loss(z, y, -1.0, reduction="none"),
        lambda z, y: fk.focal_loss(z, y, 2.0, reduction="none", z_loss=0.1),
        lambda z, y: fk.FLSDLoss(reduction="none")(z, y),
    ],
    ids=["focal", "cross-entropy", "half", "inverse", "z-loss", "table"],
)
def test_softmax_losses_of_labels(loss, direction):
    def product(dtype):
        x = torch.tensor(LOGITS, dtype=dtype)
        z = torch.stack([x, torch.zeros_like(x), torch.full_like(x, -1.0)], 1).requires_grad_()
        (slope,) = torch.autograd.grad(loss(z, torch.zeros(len(x), dtype=torch.int64)).sum(), z, create_graph=True)
        return torch.autograd.grad(slope[:, direction].sum(), z)[0].double()

    found, expected = product(torch.float32), product(torch.float64)
    error = (found - expected).abs().amax(1) / expected.abs().amax(1).clamp(min=2.0**-126)
    assert error.max() < RTOL
