"""DualFocalLoss with label smoothing: every class has its own next lower class. The CPU kernels sort each row."""

import math

import pytest
import torch
from conftest import assert_close
from row_loss_cases import near

import focalkern as fk
from focalkern.reference import dual_focal_loss
from focalkern.reference._softmax_losses import number_of

KIND = number_of("DualFocalLoss")


def compare(z, target, gamma=5.0, upstream=None, **options):
    """Loss and gradient beside the definition in float64."""
    options = {"label_smoothing": 0.1, "reduction": "none", **options}
    z = z.detach().requires_grad_()
    found = fk.DualFocalLoss(gamma, **options)(z, target)
    upstream = torch.randn(found.shape) if upstream is None else upstream
    (gradient,) = torch.autograd.grad(found, z, upstream.to(found.dtype))
    exact = z.detach().double().requires_grad_()
    expected = dual_focal_loss(exact, target.long(), gamma, **options)
    (slope,) = torch.autograd.grad(expected, exact, upstream.to(found.dtype).double())
    factor = 20 if z.dtype in (torch.float32, torch.float64) else 2
    near(found, expected, factor=factor)
    near(gradient, slope, factor=factor)
    return gradient


# Up to 400 classes the kernel compares all pairs, beyond it sorts; 512 terms form a partial sum. Multiples of 1/2 have
# many ties; in half precision so has any row.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [1, 2, 17, 100, 400, 401, 5000])
def test_rows_of_every_length_with_and_without_ties(classes, dtype):
    z = 3 * torch.randn(6, classes, dtype=torch.float64)
    z[::2] = (2 * z[::2]).round() / 2
    z[3, classes // 2] = 30.0  # certain
    target = torch.randint(classes, (6,), dtype=torch.int32)
    target[1] = -100
    compare(z.to(dtype), target)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("detach", [False, True])
def test_gamma_weights_and_reductions(gamma, detach):
    z, target = torch.randn(70, 12), torch.randint(12, (70,))
    weight = torch.rand(12, dtype=torch.float64)
    weight[3] = 0.0
    for reduction in ("none", "mean", "sum"):
        upstream = None if reduction == "none" else torch.tensor(1.5)
        options = {"weight": weight, "ignore_index": 5, "reduction": reduction, "detach_modulation": detach}
        compare(z, target, gamma, upstream, **options)


def test_layouts():
    pixels = torch.randn(2, 6, 5, 7)
    images = [pixels, pixels.to(memory_format=torch.channels_last), torch.randn(2, 5, 6, 7).transpose(1, 2)]
    for z in (*images, torch.randn(6), torch.randn(6, 90).t()):
        shape = z.shape[:1] + z.shape[2:] if z.dim() > 1 else ()
        compare(z, torch.randint(6, shape))


def test_infinite_logits():
    z = torch.randn(5, 9)
    z[0, 4] = -math.inf
    z[1, :8] = -math.inf
    z[2, 3] = math.nan
    z[3, 3] = math.inf
    z[4] = -math.inf
    target = torch.full((5,), 8)
    gradient = compare(z, target)
    assert gradient[:2].isfinite().all()
    assert gradient[2:].isnan().all()
    without_class = torch.ones(9)
    without_class[4] = 0.0
    assert compare(z[:1], target[:1], weight=without_class.double()).isfinite().all()


@pytest.mark.kernels
@pytest.mark.parametrize("classes", [7, 500])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_cpu_kernels_compute_every_form_of_gamma(smoothing, classes):
    """The module takes a number. The operator also takes a gamma per sample, with its derivative, and a table."""
    z = torch.randn(4, classes, dtype=torch.float64, requires_grad=True)
    target = torch.randint(classes, (4,))
    table = fk.GammaTable([0.0, 0.1, 0.5, 1.0], [4.0, 0.0, 2.5])
    per_sample = (3 * torch.rand(4, dtype=torch.float64)).requires_grad_()
    for gamma in (per_sample, table):
        values, edges = (table.gammas, table.edges) if gamma is table else (gamma, None)
        loss, _ = torch.ops.focalkern.focal_loss_forward(
            z, target, values, edges, None, 0, -100, smoothing, False, False, KIND, 0.0
        )
        expected = dual_focal_loss(z, target, gamma, reduction="none", label_smoothing=smoothing)
        assert_close(loss, expected)
        upstream = torch.randn(4, dtype=torch.float64)
        inputs = (z,) if gamma is table else (z, per_sample)
        for found, wanted in zip(
            torch.autograd.grad(loss, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
        ):
            assert_close(found, wanted)


@pytest.mark.kernels
def test_opcheck_and_one_node_in_the_graph():
    z, target = torch.randn(6, 5, requires_grad=True), torch.randint(5, (6,))
    gamma = torch.tensor(2.0, dtype=torch.float64)
    options = (1, -100, 0.1, False)
    arguments = (z, target, gamma, None, None, *options, False, KIND, 0.0)
    torch.library.opcheck(torch.ops.focalkern.focal_loss_forward, arguments)
    with torch.no_grad():
        loss, saved = torch.ops.focalkern.focal_loss_forward(*arguments)
    rest = (z.detach(), target, gamma, None, None, saved, *options, [True, False, True], KIND, 0.0)
    torch.library.opcheck(torch.ops.focalkern.focal_loss_backward, (torch.randn_like(loss), *rest))
    node = fk.DualFocalLoss(label_smoothing=0.1)(z, target).grad_fn
    assert "Composite" not in type(node).__name__
    assert [edge.name() for edge, _ in node.next_functions if edge is not None] == ["torch::autograd::AccumulateGrad"]
