"""The rows of Liger in docs/howto/migrate.md: its Triton kernels, interpreted on the CPU, in value and gradient.

Triton reads TRITON_INTERPRET when a kernel is defined, so another process runs Liger.
"""

import os
import subprocess
import sys

import pytest
import torch
from conftest import peer

import focalkern as fk

# The options of Liger's fused linear cross-entropy and of linear_focal_loss. Triton's interpreter cannot run softcap.
DFT = {"modulation": "confidence", "detach_modulation": True}
HEADS = {
    "cross-entropy": ({}, {"gamma": 0.0}),
    "smoothing": ({"label_smoothing": 0.1}, {"gamma": 0.0, "label_smoothing": 0.1}),
    "z-loss": ({"lse_square_scale": 0.01}, {"gamma": 0.0, "z_loss": 0.01}),
    "dft": ({"use_token_scaling": True}, {"gamma": 1.0, **DFT}),
    "dft, bias": ({"use_token_scaling": True}, {"gamma": 1.0, **DFT}),
    "dft, sum": ({"use_token_scaling": True, "reduction": "sum"}, {"gamma": 1.0, "reduction": "sum", **DFT}),
}
LIGER = """
import sys, torch
from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
x, w, b, z, y, heads, scale = torch.load(sys.argv[1])
found = {}
for name, options in heads.items():
    leaves = [t.clone().requires_grad_() for t in ((x, w, b) if "bias" in name else (x, w))]
    loss = LigerFusedLinearCrossEntropyLoss(**options)(leaves[1], leaves[0], y, *leaves[2:])
    found[name] = loss.detach(), torch.autograd.grad(loss, leaves)
for name, options in {"logits": {}, "logits, z-loss": {"lse_square_scale": scale}}.items():
    leaf = z.clone().requires_grad_()
    out = LigerCrossEntropyLoss(
        **options, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True
    )(leaf, y)
    fields = [f.detach() if torch.is_tensor(f) else None
              for f in (out.z_loss, out.token_accuracy, out.predicted_tokens)]
    found[name] = out.loss.detach(), torch.autograd.grad(out.loss, leaf), fields
torch.save(found, sys.argv[2])
"""


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(3)
    x, w, b, z = (torch.randn(*size, generator=generator) for size in ((11, 6), (40, 6), (40,), (11, 40)))
    y = torch.randint(40, (11,), generator=generator)
    y[::4] = -100
    y[1:3] = z[1:3].argmax(1)  # some rows are right
    return x, w, b, 3 * z, y


@pytest.fixture(scope="module")
def liger(inputs, tmp_path_factory):
    peer("liger_kernel")
    given, made = (str(tmp_path_factory.mktemp("liger") / name) for name in ("given.pt", "made.pt"))
    torch.save([*inputs, {name: theirs for name, (theirs, _) in HEADS.items()}, 0.01], given)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", LIGER, given, made]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(made)


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # both round to float32


@pytest.mark.parametrize("name", HEADS)
def test_head_is_that_of_liger(inputs, liger, name):
    x, w, b, _, y = inputs
    leaves = [t.clone().requires_grad_() for t in ((x, w, b) if "bias" in name else (x, w))]
    options = dict(HEADS[name][1], linear_bias=leaves[2] if "bias" in name else None)
    loss = fk.linear_focal_loss(leaves[0], leaves[1], y, **options)
    expected, slopes = liger[name]
    assert_near(loss.detach(), expected)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), slopes, strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("name, scale", [("logits", 0.0), ("logits, z-loss", 0.01)])
def test_loss_of_logits_and_its_statistics_are_those_of_liger(inputs, liger, name, scale):
    *_, z, y = inputs
    leaf = z.clone().requires_grad_()
    loss, stats = fk.focal_loss(leaf, y, 0.0, z_loss=scale, return_stats=True)
    expected, (slope,), (z_loss, accuracy, predicted) = liger[name]
    assert_near(loss.detach(), expected)
    assert_near(torch.autograd.grad(loss, leaf)[0], slope)
    assert_near((scale * stats.lse**2).sum() / stats.counts.sum(), z_loss)
    assert_near(stats.means()["accuracy"], accuracy)
    assert torch.equal(stats.predicted, predicted)
    assert 0 < accuracy < 1
