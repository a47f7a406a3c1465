"""Dynamic fine-tuning, ``modulation="confidence"``: the formulas of TRL and Liger, p = 0, and gamma = 0."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close

import focalkern as fk


def trl(logits, labels, num_items_in_batch=None):
    """TRL's ``loss_type="dft"`` as documented: labels are shifted, and -100 is ignored."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    counts = labels != -100
    log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    per_token = -log_p.exp().detach() * log_p
    return (per_token * counts).sum() / (counts.sum() if num_items_in_batch is None else num_items_in_batch)


def liger(hidden, weight, target):
    """Liger's fused linear cross-entropy with ``use_token_scaling``: the loss of a row times its detached p."""
    loss = F.cross_entropy(hidden @ weight.T, target, ignore_index=-100, reduction="none")
    scale = torch.exp(-loss).detach()
    return (scale * loss).sum() / (target != -100).sum()


def token_batch(dtype):
    logits = (3 * torch.randn(2, 9, 40, dtype=dtype)).requires_grad_()
    labels = torch.randint(40, (2, 9))
    labels[0, :3] = -100
    labels[1, 7:] = -100
    return logits, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("items", [None, 31])
def test_dft_is_that_of_trl(dtype, items):
    logits, labels = token_batch(dtype)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    found = fk.DFTLoss(reduction="mean" if items is None else "sum")(logits.flatten(0, 1), shifted.flatten())
    found = found if items is None else found / items
    expected = trl(logits, labels, items)
    assert_close(found, expected.double())
    assert_close(torch.autograd.grad(found, logits)[0], torch.autograd.grad(expected, logits)[0].double())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_rows", [None, 3])
def test_dft_of_a_linear_head_is_that_of_liger(reduction, chunk_rows):
    hidden, weight = torch.randn(11, 6, requires_grad=True), torch.randn(40, 6, requires_grad=True)
    target = torch.randint(40, (11,))
    target[::4] = -100
    dft = {"modulation": "confidence", "detach_modulation": True, "chunk_rows": chunk_rows}
    found = fk.linear_focal_loss(hidden, weight, target, 1.0, reduction=reduction, **dft)
    counts = (target != -100).sum()
    expected = liger(hidden, weight, target)
    mean = {"mean": found, "sum": found / counts, "none": found.sum() / counts}[reduction]
    assert_close(mean, expected.double())
    for ours, theirs in zip(
        torch.autograd.grad(mean, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dft_of_a_linear_head_and_of_its_logits_are_the_same(gamma, detached, smoothing):
    x, w = torch.randn(7, 5, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    x.requires_grad_()
    w.requires_grad_()
    target = torch.randint(9, (7,))
    options = {"modulation": "confidence", "detach_modulation": detached, "label_smoothing": smoothing}
    upstream = torch.randn(7, dtype=torch.float64)
    found = fk.linear_focal_loss(x, w, target, gamma, reduction="none", **options)
    expected = fk.focal_loss(x @ w.T, target, gamma, reduction="none", **options)
    assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, w), upstream), torch.autograd.grad(expected, (x, w), upstream), strict=True
    ):
        assert_close(ours, theirs)


def test_second_derivatives_of_the_dft_of_a_linear_head():
    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    target, gamma = torch.tensor([0, 4, 2, 2]), torch.tensor(1.5, dtype=torch.float64)
    inputs = tuple(t.requires_grad_() for t in (x, w, gamma))

    def loss(x, w, gamma):
        return fk.linear_focal_loss(x, w, target, gamma, modulation="confidence")

    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


def test_dft_of_a_linear_head_compiles():
    torch._dynamo.reset()
    hidden, weight, target = torch.randn(6, 4), torch.randn(9, 4, requires_grad=True), torch.randint(9, (6,))
    options = {"modulation": "confidence", "detach_modulation": True}
    compiled = torch.compile(
        lambda h, w: fk.linear_focal_loss(h, w, target, 1.0, **options), fullgraph=True, backend="aot_eager"
    )
    expected = fk.linear_focal_loss(hidden, weight, target, 1.0, **options)
    found = compiled(hidden, weight)
    assert_close(found, expected.double())
    assert_close(torch.autograd.grad(found, weight)[0], torch.autograd.grad(expected, weight)[0].double())


def test_the_factor_of_dft_is_a_constant():
    z, target = torch.randn(8, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (8,))
    p = z.detach().softmax(1)
    p_y = p.gather(1, target.unsqueeze(1))
    onehot = F.one_hot(target, 5)
    for gamma in (0.5, 1.0, 2.0):
        for detached in (True, False):
            loss = fk.DFTLoss(gamma, reduction="sum", detach_modulation=detached)(z, target)
            coefficient = p_y**gamma * (1 if detached else 1 + gamma * p_y.log())
            assert_close(torch.autograd.grad(loss, z)[0], coefficient * (p - onehot))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0, torch.tensor([1.5, 1.5, 1.5])])
def test_dft_of_an_impossible_target_is_0(dtype, gamma):
    for smallest in (-math.inf, -1e30, -3e4):
        z = torch.tensor([[smallest, 0.5, 1.0], [0.0, 0.5, smallest], [0.0, 0.5, 1.0]], dtype=dtype)
        for target in (torch.tensor([0, 2, 1]), F.one_hot(torch.tensor([0, 2, 1])).to(dtype)):
            z = z.detach().requires_grad_()
            loss = fk.focal_loss(z, target, gamma, reduction="none", modulation="confidence")
            assert loss[:2].abs().tolist() == [0.0, 0.0]
            (gradient,) = torch.autograd.grad(loss.sum(), z)
            assert (gradient[:2] == 0).all()
            assert gradient[2].isfinite().all()


def test_dft_with_gamma_0_is_cross_entropy():
    z, target = torch.randn(6, 5, dtype=torch.float64), torch.randint(5, (6,))
    z[0, 1] = -math.inf
    target[0] = 1
    for options in ({}, {"label_smoothing": 0.3}):
        expected = fk.focal_loss(z, target, 0.0, reduction="none", **options)
        assert_close(fk.DFTLoss(0.0, reduction="none", **options)(z, target), expected)


def test_a_negative_gamma_is_refused_by_dft_and_nan_in_a_tensor():
    z, target = torch.randn(2, 3), torch.tensor([0, 1])
    linear = torch.randn(5, 3)
    for call, op in (
        (lambda: fk.focal_loss(z, target, -1.0, modulation="confidence"), "focal_loss"),
        (lambda: fk.linear_focal_loss(z, linear, target, -1.0, modulation="confidence"), "linear_focal_loss"),
        (lambda: fk.DFTLoss(-1.0), "DFTLoss"),
        (lambda: fk.DFTLoss(torch.tensor(-1.0)), "DFTLoss"),
        (lambda: fk.FocalLoss(-1.0, modulation="confidence"), "FocalLoss"),
    ):
        with pytest.raises(ValueError, match=f"^{op}: gamma must be at least 0, got -1"):
            call()
    gamma = torch.tensor([-0.5, 0.5])
    for options in ({}, {"label_smoothing": 0.1}):
        found = fk.focal_loss(z, target, gamma, reduction="none", modulation="confidence", **options)
        assert found.isnan().tolist() == [True, False]


@pytest.mark.parametrize("modulation", ["focal", 1, ["confidence"]])
def test_an_unknown_modulation_of_dft_is_named(modulation):
    z, target = torch.randn(2, 3), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"^focal_loss: modulation must be one of confidence, got"):
        fk.focal_loss(z, target, modulation=modulation)
    with pytest.raises(ValueError, match=r"^FocalLoss: modulation must be one of confidence, got"):
        fk.FocalLoss(modulation=modulation)
    with pytest.raises(ValueError, match=r"^linear_focal_loss: modulation must be one of confidence, got"):
        fk.linear_focal_loss(z, torch.randn(5, 3), target, modulation=modulation)


def test_errors_of_dft_name_the_function_that_was_called():
    with pytest.raises(ValueError, match=r"^focal_loss: target must be \[N\] = \[2\], got \[3\]"):
        fk.focal_loss(torch.randn(2, 3), torch.tensor([0, 1, 2]), 1.0, modulation="confidence")
    with pytest.raises(IndexError, match=r"^focal_loss: target must be in \[0, 3\) or ignore_index, got 3 at row 1"):
        fk.DFTLoss()(torch.randn(2, 3), torch.tensor([0, 3]))


def test_dft_modules():
    assert repr(fk.DFTLoss()) == "DFTLoss(gamma=1.0)"
    assert repr(fk.DFTLoss(2.0, detach_modulation=False)) == "DFTLoss(gamma=2.0, detach_modulation=False)"
    made = fk.FocalLoss(1.0, modulation="confidence", detach_modulation=True)
    assert repr(made) == "FocalLoss(gamma=1.0, modulation=confidence, detach_modulation=True)"
    z, target = torch.randn(6, 4), torch.randint(4, (6,))
    assert torch.equal(made(z, target), fk.DFTLoss()(z, target))
    head = fk.LinearFocalLoss(4, 5, 1.0, modulation="confidence", detach_modulation=True)
    assert_close(head(z, target), fk.DFTLoss()(head.logits(z).double(), target))
    table = fk.GammaTable([0.0, 0.3, 1.0], [1.0, 2.0])
    assert_close(
        fk.DFTLoss(table)(z, target), fk.reference.focal_loss(z.double(), target, table, modulation="confidence")
    )
