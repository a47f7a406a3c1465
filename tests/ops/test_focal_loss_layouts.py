"""Shapes, strides, layouts and dtypes of focal_loss."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from focal_cases import FLOATS, check_against_reference, gammas_for, leaf

import focalkern as fk

# (C), one row, (N, C), one and two extra dimensions, an extra dimension of size 1, and five dimensions.
SHAPES = [(4,), (1, 3), (6, 5), (3, 4, 5), (2, 3, 4, 5), (2, 3, 1, 4), (2, 3, 2, 1, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["index", "smoothed", "probabilities"])
def test_shapes(device, shape, kind):
    class_dim = 0 if len(shape) == 1 else 1
    rows = shape[:class_dim] + shape[class_dim + 1 :]
    z = torch.randn(shape, dtype=torch.float64, device=device)
    target = torch.randint(shape[class_dim], rows, device=device)
    if kind == "probabilities":
        target = torch.randn_like(z).softmax(class_dim)
    for gamma in gammas_for(rows, device):
        for reduction in ("none", "mean"):
            smoothing = 0.1 if kind == "smoothed" else 0.0
            check_against_reference(z, target, gamma, reduction=reduction, label_smoothing=smoothing)


LAYOUTS = {
    "channels last": lambda z: z.contiguous(memory_format=torch.channels_last),
    "classes outermost": lambda z: z.transpose(0, 1).contiguous().transpose(0, 1),
    "dimensions reversed": lambda z: z.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "every second row": lambda z: z.repeat_interleave(2, 0)[::2],
    "every second class": lambda z: z.repeat_interleave(2, 1)[:, ::2],
    "every second column": lambda z: z.repeat_interleave(2, 3)[..., ::2],
    "an inner window": lambda z: F.pad(z, (1, 2, 2, 1, 1, 1))[:, 1:-1, 2:-1, 1:-2],
    "a window of channels last": lambda z: F.pad(z, (1, 2, 2, 1)).contiguous(memory_format=torch.channels_last)[
        ..., 2:-1, 1:-2
    ],
    "transposed pixels": lambda z: z.transpose(2, 3).contiguous().transpose(2, 3),
    "a window of transposed pixels": lambda z: (
        F.pad(z, (1, 2, 2, 1)).transpose(2, 3).contiguous().transpose(2, 3)[..., 2:-1, 1:-2]
    ),
    "rows repeated by a stride of 0": lambda z: z[:1].expand(z.shape),
    "columns repeated by a stride of 0": lambda z: z[..., :1].expand(z.shape),
    "an offset into storage": lambda z: torch.cat([z.new_zeros(3), z.flatten()])[3:].view(z.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layouts_give_the_bits_of_the_contiguous_case(device, layout, dtype):
    dense = LAYOUTS[layout](torch.randn(4, 7, 3, 5, device=device).to(dtype))
    target = torch.randint(7, (4, 3, 5), device=device)
    target[0, 0] = -100
    soft = torch.rand(4, 7, 3, 5, device=device).to(dtype)
    for t in (target, soft, LAYOUTS[layout](soft)):
        for gamma in (2.0, torch.rand(4, 3, 5, device=device).to(dtype), torch.rand(5, device=device).to(dtype)):
            upstream = torch.randn(4, 3, 5, device=device).to(dtype)
            results = []
            for z, t_ in ((dense, t), (dense.contiguous(), t.contiguous())):
                x = leaf(z)
                loss = fk.focal_loss(x, t_, gamma, reduction="none")
                results.append((loss, torch.autograd.grad(loss, x, upstream)[0]))
            # The order of a sum over classes may follow the layout, so the tolerance applies, not bitwise equality.
            for actual, expected in zip(*results, strict=True):
                assert_close(actual, expected)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("classes", "size"), [(3, (7, 9)), (20, (37, 70)), (40, (5, 300))])
def test_crops_of_images(dtype, memory_format, classes, size):
    """Lines longer and shorter than a tile; tiles end at a line or an image, or span several."""
    whole = torch.randn(3, classes, size[0] + 3, size[1] + 5).to(dtype).contiguous(memory_format=memory_format)
    crop = whole[..., 1:-2, 2:-3]
    target = torch.randint(classes, (3, *size))
    target[1, 2, 3:] = -100
    for options in ({}, {"label_smoothing": 0.1}, {"weight": torch.rand(classes).to(dtype)}):
        results = []
        for z in (crop, crop.contiguous()):
            x = leaf(z)
            loss = fk.focal_loss(x, target, 2.0, reduction="none", **options)
            results.append((loss, torch.autograd.grad(loss.float().sum(), x)[0]))
        for actual, expected in zip(*results, strict=True):
            # The order of a sum may follow the layout, so bfloat16 results may round to the neighbour.
            rtol = 2**-7 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6)


def test_a_wrong_label_of_transposed_pixels_names_its_row():
    z, target = torch.randn(2, 4, 3, 5), torch.zeros(2, 3, 5, dtype=torch.int64)
    target[0, 1, 2] = 9
    for values in (z, z.transpose(2, 3).contiguous().transpose(2, 3)):
        with pytest.raises(IndexError, match="got 9 at row 7"):
            fk.focal_loss(values, target)


def test_strides_and_lazy_negation_of_the_other_arguments(device):
    z = torch.randn(6, 4, device=device)
    target = torch.tensor([0, 1, 2, 3, 0, 1], device=device)
    weight, gamma, soft = torch.rand(8, device=device), torch.rand(6, device=device), torch.rand(6, 4, device=device)
    edges, gammas = torch.linspace(0, 1, 9, device=device), torch.rand(8, device=device)

    def negated(x):
        """x, stored as -x with torch's lazy negation bit set."""
        return torch._neg_view((-x).clone())

    def same(*arguments, **options):
        return assert_close(fk.focal_loss(*arguments, **options), expected)

    expected = fk.focal_loss(z, target, weight=weight[::2].clone())
    same(z, target, weight=weight[::2])
    same(z, target, weight=negated(weight[::2]))
    same(negated(z), target, weight=weight[::2])
    expected = fk.focal_loss(z, target, fk.GammaTable(edges[::2].clone(), gammas[::2].clone()))
    same(z, target, fk.GammaTable(edges[::2], gammas[::2]))
    same(z, target, fk.GammaTable(edges[::2].double(), gammas[::2]))
    expected = fk.focal_loss(z, soft, gamma)
    same(z, negated(soft), negated(gamma))
    x = leaf(z)
    loss = fk.focal_loss(x, target, reduction="none")
    plain, lazy = (torch.autograd.grad(loss, x, u, retain_graph=True)[0] for u in (gamma, negated(gamma)))
    assert_close(lazy, plain)
    expected = fk.focal_loss(z, target, weight=weight[:1].expand(4).clone())
    same(z, target, weight=weight[:1].expand(4))


def test_channels_last_gradient_keeps_the_layout(device):
    z = leaf(torch.randn(2, 5, 4, 3, device=device).contiguous(memory_format=torch.channels_last))
    target = torch.randint(5, (2, 4, 3), device=device)
    (grad,) = torch.autograd.grad(fk.focal_loss(z, target), z)
    assert grad.is_contiguous(memory_format=torch.channels_last)


def test_label_layouts(device):
    z = torch.randn(6, 5, 4, dtype=torch.float64, device=device)
    target = torch.randint(5, (6, 4), device=device)
    expected = fk.focal_loss(z, target, reduction="none")
    for same in (
        target.t().contiguous().t(),
        target.repeat_interleave(3, 0)[::3],
        target.int(),
        target.to(torch.uint8),
        target.to(torch.uint8).repeat_interleave(2, 1)[:, ::2],
    ):
        assert torch.equal(fk.focal_loss(z, same, reduction="none"), expected)
    row = target[:1].expand(6, 4)
    assert torch.equal(fk.focal_loss(z, row), fk.focal_loss(z, row.contiguous()))


@pytest.mark.parametrize("dtype", FLOATS)
# 1: the loss is 0; 2, 3, 10: less than one vector; 17: a vector and one class; 100; 1000; 4097: many vectors and one
# class.
@pytest.mark.parametrize("n_classes", [1, 2, 3, 10, 17, 100, 1000, 4097])
def test_class_counts_and_dtypes(device, dtype, n_classes):
    z = (torch.randn(5, n_classes, device=device) * 3).to(dtype)
    target = torch.randint(n_classes, (5,), device=device)
    soft = torch.randn(5, n_classes, device=device).softmax(-1).to(dtype)
    for gamma in (2.0, 0.5, -1.0, torch.tensor([0.0, 0.5, 2.0, -2.0, 5.0], device=device).to(dtype)):
        check_against_reference(z, target, gamma, reduction="none")
        check_against_reference(z, target, gamma, label_smoothing=0.1)
        check_against_reference(z, soft, gamma)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_target_dtypes(device, dtype):
    z = torch.randn(9, 200, dtype=torch.float64, device=device)
    target = torch.randint(200, (9,), device=device)
    target[2] = 199
    expected = F.cross_entropy(z, target)
    assert_close(fk.focal_loss(z, target.to(dtype), 0.0), expected)
    # uint8 masks use 255 for "ignore".
    target[4] = 255
    check_against_reference(z, target.to(dtype), 2.0, ignore_index=255)
