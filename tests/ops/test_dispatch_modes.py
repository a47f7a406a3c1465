"""Losses under modes of torch that see every operation: selective activation checkpointing, which keeps results and
returns them in the backward pass; make_fx, whose graph holds only what it saw; and fake tensors, which have no memory.
"""

import contextlib
import functools

import pytest
import torch
from conftest import assert_close
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import focalkern as fk

N, C = 12, 5
FLSD, ADAPTIVE = fk.FLSDLoss(), fk.AdaFocalLoss(n_bins=3)


def with_statistics(found):
    return found.loss + found.stats.lse.sum() + found.stats.entropy.sum()


# Functions of logits, labels (one is ignored), class probabilities and class weights: every term that is added to the
# loss of a kernel, every loss that reads its labels, and one of each other kind.
LOSSES = {
    "focal": lambda z, y, p, w: fk.focal_loss(z, y, weight=w),
    "table": lambda z, y, p, w: FLSD(z, y),
    "adaptive": lambda z, y, p, w: ADAPTIVE(z, y),
    "z-loss": lambda z, y, p, w: fk.focal_loss(z, y, z_loss=0.3),
    "z-loss, none": lambda z, y, p, w: fk.focal_loss(z, y, z_loss=0.3, reduction="none").square().sum(),
    "z-loss, smoothing": lambda z, y, p, w: fk.focal_loss(z, y, z_loss=0.3, weight=w, label_smoothing=0.1),
    "z-loss, probabilities": lambda z, y, p, w: fk.focal_loss(z, p, z_loss=0.3),
    "z-loss, confidence": lambda z, y, p, w: fk.focal_loss(z, y, z_loss=0.3, modulation="confidence"),
    "statistics": lambda z, y, p, w: with_statistics(fk.focal_loss(z, y, return_stats=True)),
    "z-loss, statistics": lambda z, y, p, w: with_statistics(fk.focal_loss(z, y, z_loss=0.3, return_stats=True)),
    "MMCE": lambda z, y, p, w: fk.MMCELoss()(z, y),
    "MMCE, weighted": lambda z, y, p, w: fk.MMCELoss(weighted=True, reduction="sum")(z, y),
    "MMCE, probabilities": lambda z, y, p, w: fk.MMCELoss()(z, p),
    "logit norm": lambda z, y, p, w: fk.LogitNormPenalty()(z, y),
    "dual": lambda z, y, p, w: fk.DualFocalLoss()(z, y),
    "Brier": lambda z, y, p, w: fk.BrierLoss()(z, y),
    "linear": lambda z, y, p, w: fk.linear_focal_loss(z, w * w[:, None], y, z_loss=0.3, label_smoothing=0.1),
    "linear, statistics": lambda z, y, p, w: with_statistics(
        fk.linear_focal_loss(z, w * w[:, None], y, return_stats=True)
    ),
    "sigmoid": lambda z, y, p, w: fk.sigmoid_focal_loss(z, y, reduction="mean"),
    "varifocal": lambda z, y, p, w: fk.varifocal_loss(z, p, reduction="mean"),
    "map": lambda z, y, p, w: fk.focal_calibration_map(z, 0.5, 1.2).square().sum(),
    "inverse map": lambda z, y, p, w: fk.inverse_focal_calibration_map(z, 1.0).square().sum(),
}


def arguments(dtype=torch.float32):
    target = torch.randint(C, (N,))
    target[3] = -100
    return 2 * torch.randn(N, C, dtype=dtype), target, torch.randn(N, C).softmax(1).to(dtype), torch.rand(C) + 0.5


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
@pytest.mark.parametrize("name", LOSSES)
def test_a_checkpoint_that_keeps_every_result(name, policy):
    """The backward pass changes no value, and the gradient is that without a checkpoint."""
    loss, (z, *given) = LOSSES[name], arguments()
    z.requires_grad_()
    expected = loss(z, *given)
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy)
    found = checkpoint(loss, z, *given, use_reentrant=False, context_fn=contexts)
    before = found.detach().clone()
    (gradient,) = torch.autograd.grad(found, z)
    assert torch.equal(found, before)
    assert_close(found, expected)
    assert_close(gradient, torch.autograd.grad(expected, z)[0])


@pytest.mark.parametrize("name", LOSSES)
def test_a_checkpoint(name):
    loss, (z, *given) = LOSSES[name], arguments()
    z.requires_grad_()
    expected, found = loss(z, *given), checkpoint(loss, z, *given, use_reentrant=False)
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, z)[0], torch.autograd.grad(expected, z)[0])


# "symbolic" traces with fake tensors, which the buffers of a module would have to be, too.
@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_graph_of_make_fx_has_every_term(name, mode):
    if mode == "symbolic" and name in ("table", "adaptive"):
        pytest.skip("its tables are no arguments")
    loss = LOSSES[name]
    graph = make_fx(loss, tracing_mode=mode)(*arguments())
    others = arguments()  # with other labels
    others[1][:] = others[1].flip(0)
    assert_close(graph(*others), loss(*others))


def test_labels_are_checked_under_a_mode_that_has_values():
    z, _, _, weight = arguments()
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    for name in ("focal", "z-loss", "z-loss, confidence", "MMCE", "logit norm", "linear"):
        with pytest.raises(IndexError, match=f"target must be in .0, {C}. or ignore_index, got {C} at row 0"):
            checkpoint(LOSSES[name], z, torch.full((N,), C), None, weight, use_reentrant=False, context_fn=contexts)


def test_flops_of_the_products_are_counted():
    counter = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode(display=False)
    z, y, _, w = arguments()
    with counter:
        fk.linear_focal_loss(z.requires_grad_(), w * w[:, None], y, chunk_rows=4).backward()
    assert counter.get_total_flops() >= 2 * 2 * (N - 1) * C * C


# "outside": fake tensors whose mode is not active, as after loading a checkpoint as fake tensors.
@pytest.mark.parametrize("where", ["in the mode", "outside", "bfloat16"])
@pytest.mark.parametrize("name", LOSSES)
def test_fake_tensors(name, where):
    loss, dtype = LOSSES[name], torch.bfloat16 if where == "bfloat16" else torch.float32
    if dtype == torch.bfloat16 and name in ("linear", "linear, statistics"):
        pytest.skip("its head is float32")
    expected = loss(*arguments(dtype))
    # The tables of modules that were made before are real tensors.
    mode = FakeTensorMode(allow_non_fake_inputs=where == "outside" or name in ("table", "adaptive"))
    z, *given = (mode.from_tensor(tensor) for tensor in arguments(dtype))
    z = z.detach().requires_grad_()
    with contextlib.nullcontext() if where == "outside" else mode:
        found = loss(z, *given)
        (gradient,) = torch.autograd.grad(found, z)
    for fake, real in ((found, expected), (gradient, z)):
        assert isinstance(fake, FakeTensor)
        assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)


def test_modules_made_of_fake_tensors():
    real = 2 * torch.randn(N, C)
    with FakeTensorMode() as mode:
        z, y = mode.from_tensor(real).requires_grad_(), torch.zeros(N, dtype=torch.int64)
        for loss in (
            fk.FLSDLoss(),
            fk.FocalLoss(torch.tensor(2.0)),
            fk.FocalLoss(fk.GammaTable([0.0, 0.5, 1.0], [1.0, 2.0])),
            fk.PolyFocalLoss(torch.tensor(2.0)),
            fk.SigmoidFocalLoss(torch.tensor(2.0)),
            fk.AdaFocalLoss(),
        ):
            loss(z, y).sum().backward()
            assert type(loss).__name__ in repr(loss)
        assert repr(fk.GammaTable([0.0, 0.5, 1.0], [1.0, 2.0])) == "GammaTable(2 bins)"
        assert "gamma=fake" in repr(fk.FocalLoss(torch.tensor(2.0)))
    assert isinstance(z.grad, FakeTensor)
