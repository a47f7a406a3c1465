"""Class probabilities: numbers of classes off the vector width, and half precision, read without a float32 copy."""

import pytest
import torch
from conftest import assert_close

import focalkern as fk
from focalkern import reference

HALVES = [torch.bfloat16, torch.float16]

# Vectors run across rows or along classes; probabilities have the layout of the logits, another one, or no row layout.
LAYOUTS = {
    "few classes": lambda p: p[:, :7],
    "many classes": lambda p: p,
    "gaps": lambda p: p[:, 3:-5],
    "adjacent rows": lambda p: p.t().contiguous().t(),
    "one row for all": lambda p: p[:1].expand(len(p), -1),
    "pixels": lambda p: p.reshape(4, 10, -1)[..., :33].transpose(1, 2),
    "every other class": lambda p: p[:, ::2],
}


def gradients(logits, target, **options):
    """The loss, and its gradients in logits and target, with row weights from 1 to 8."""
    leaves = logits.detach().requires_grad_(), target.detach().requires_grad_()
    loss = fk.focal_loss(*leaves, reduction="none", **options)
    upstream = 1 + torch.arange(loss.numel(), device=loss.device).reshape(loss.shape) % 8
    return loss, *torch.autograd.grad(loss, leaves, upstream.to(loss.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [9, 40, 41, 100, 8199])
# Without a likely class, with one in some rows, and with one in all. Logits of 200 are beyond the overflow of exp.
@pytest.mark.parametrize(("offset", "scale"), [(0, 0), (0, 1), (0, 8), (200, 0), (200, 60)])
def test_the_last_vector_of_classes_counts_once(device, dtype, classes, offset, scale):
    logits = (offset + scale * torch.randn(20, classes, device=device)).to(dtype)
    target = torch.randn(20, classes, device=device).softmax(1).to(dtype)
    gammas = torch.linspace(0.5, 4.0, 20, device=device, dtype=dtype)
    leaves = [x.detach().requires_grad_() for x in (logits, target, gammas)]
    exact = [x.detach().double().requires_grad_() for x in (logits, target, gammas)]
    loss = fk.focal_loss(*leaves, reduction="none")
    expected = reference.focal_loss(*exact, reduction="none")
    assert_close(loss, expected)
    found, wanted = (torch.autograd.grad(total.sum(), of) for total, of in ((loss, leaves), (expected, exact)))
    for actual, correct in zip(found, wanted, strict=True):
        assert_close(actual, correct)


@pytest.mark.kernels("stable")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("like_logits", [True, False])
@pytest.mark.parametrize("gamma", [0.0, 2.0, 1.5])
def test_half_probabilities_are_those_of_float32(device, layout, like_logits, dtype, gamma):
    probabilities = LAYOUTS[layout]((3 * torch.randn(40, 330, device=device)).softmax(1).to(dtype))
    logits = torch.randn(probabilities.shape, device=device).to(dtype)
    if like_logits:
        logits = torch.empty_like(probabilities).copy_(logits)
    found = gradients(logits, probabilities, gamma=gamma, label_smoothing=0.1)
    expected = gradients(logits, probabilities.float(), gamma=gamma, label_smoothing=0.1)
    assert [x.dtype for x in found] == [dtype] * 3
    assert [x.dtype for x in expected] == [torch.float32, dtype, torch.float32]
    for actual, exact in zip(found, expected, strict=True):
        assert actual.equal(exact.to(dtype))


@pytest.mark.kernels("stable")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("weight", [False, True])
def test_no_copy_of_half_probabilities(dtype, weight):
    logits = torch.randn(64, 1000).to(dtype).requires_grad_()
    target = torch.randn(64, 1000).softmax(1).to(dtype)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, record_shapes=True, acc_events=True) as profile:
        fk.focal_loss(logits, target, 2.0, weight=torch.ones(1000) if weight else None).backward()
    copies = [e.name for e in profile.events() if e.name == "aten::copy_" and list(target.shape) in e.input_shapes]
    assert not copies
