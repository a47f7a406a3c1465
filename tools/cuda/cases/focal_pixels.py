"""Cases of focal_loss whose rows are columns of memory: pixels."""

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import c_int64

import pytest
import torch

from focalkern import GammaTable
from tools.cuda.cases.common import (
    DTYPES,
    NAN,
    real_of,
)
from tools.cuda.cases.focal_loss import check_focal_loss, labels_for, run_focal_loss


@contextlib.contextmanager
def many_pixels(library: ctypes.CDLL) -> Iterator[None]:
    """Sets the threshold so that even for few pixels one thread computes a pixel by itself."""
    before = library.many_pixels()
    library.set_many_pixels(c_int64(0))
    try:
        yield
    finally:
        library.set_many_pixels(c_int64(before))


def pixels(images, classes, size, dtype, *, step=1, gap=0, image_gap=0, skip=0) -> torch.Tensor:
    """Logits with `gap` elements after each plane, some more after each image, and `skip` before the first plane."""
    plane = size * step + gap
    strides = (classes * plane + image_gap, plane, step)
    memory = (3 * torch.randn(images * strides[0] + skip)).to(dtype)[skip:]
    return memory.as_strided((images, classes, size), strides)


# Each remainder of the classes, on both sides of a step; two images; and a last pair of a block on its own.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [*range(2, 19), 24, 25, 32, 33, 40])
def test_focal_loss_pixels(library, dtype, classes):
    logits = pixels(2, classes, 34, dtype)
    with many_pixels(library):
        check_focal_loss(library, logits, labels_for(logits), 2.0)
        check_focal_loss(library, logits, labels_for(logits, torch.uint8), torch.rand(2, 34), reduction="none")


@pytest.mark.parametrize("dtype", DTYPES)
def test_focal_loss_pixels_of_many_tiles(library, dtype):
    """More pixels than three blocks take in one round, in pairs."""
    logits = pixels(2, 3, 1030, dtype)
    target = labels_for(logits)
    target[:, ::7] = -100
    for reduction in ("none", "mean"):
        check_focal_loss(library, logits, target, 1.5, reduction=reduction, weight=torch.rand(3) + 0.1)


# Two pixels that do not form an aligned word of memory: an odd plane, an odd distance of planes or images, an odd first
# offset. The same for the gradient, while the logits form words.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "odd",
    [
        {"size": 35},
        {"size": 35, "gap": 1},
        {"gap": 1, "image_gap": 1},
        {"step": 2},
        {"gap": 1},
        {"gap": 2},
        {"image_gap": 1},
        {"image_gap": 2},
        {"skip": 1},
        {"skip": 2},
    ],
)
def test_focal_loss_pixels_off_the_boundary_of_a_pair(library, dtype, odd):
    odd = dict(odd)
    size = odd.pop("size", 34)
    with many_pixels(library):
        logits = pixels(2, 5, size, dtype, **odd)
        check_focal_loss(library, logits, labels_for(logits), 2.0)
        check_focal_loss(library, logits, labels_for(logits), 2.0, grad_like=pixels(2, 5, size, dtype))
        logits = pixels(2, 5, size, dtype)
        check_focal_loss(library, logits, labels_for(logits), 2.0, grad_like=pixels(2, 5, size, dtype, **odd))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_focal_loss_options_of_pixels(library, dtype):
    logits = pixels(2, 9, 22, dtype)
    target = labels_for(logits)
    target[0, ::3] = -100
    table = GammaTable([0.0, 0.013, 0.27, 1.0], [5.0, -1.5, 3.0])
    with many_pixels(library):
        for gamma in (0.0, -2.0, torch.tensor(1.5), 4 * torch.rand(2, 22) - 1, table):
            for reduction in ("none", "mean", "sum"):
                options = {"reduction": reduction, "detach_modulation": gamma is table}
                check_focal_loss(library, logits, target, gamma, weight=torch.rand(9), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [3, 20])
@pytest.mark.parametrize("as_rows", [False, True])
def test_focal_loss_edges_of_neighbours(library, dtype, classes, as_rows):
    """A pixel or a short row next to one that is certain, ignored, out of range, or NaN."""
    logits = pixels(1, classes, 24, dtype)
    target = torch.zeros(1, 24, dtype=torch.int64)
    rows = logits[0].t()  # [pixels, classes]
    if as_rows:
        rows = logits = (3 * torch.randn(24, classes)).to(dtype)
        target = target[0]
    rows[0, 0] = 1e4
    rows[2, 1] = 1e4
    rows[5, 0] = 80
    rows[6, 1:] = -torch.inf
    rows[9, 1] = -torch.inf
    rows[10] += 1000
    rows[13] -= 1000
    target[..., 14] = target[..., 17] = -100
    target[..., 18] = classes
    target[..., 21] = -1
    target[..., 22:] = classes - 1
    with many_pixels(library):
        check_focal_loss(library, logits.clone(), target, 0.5, reduction="none")
        rows[14] = rows[17] = NAN  # ignored, so never read
        for value in (NAN, torch.inf):
            rows[3, classes - 1] = rows[8, classes - 1] = value
            grad = torch.ones(24, dtype=real_of(dtype))
            actual = run_focal_loss(library, logits, target, 2.0, grad, reduction="none")
            wrong = [3, 8, 18, 21]
            assert actual["loss"].isnan().nonzero().flatten().tolist() == wrong
            gradients = actual["grad_logits"] if as_rows else actual["grad_logits"][0].t()
            assert gradients.isnan().any(1).nonzero().flatten().tolist() == wrong
            assert (gradients[[14, 17]] == 0).all()
        rows[12] = -torch.inf
        actual = run_focal_loss(library, logits, target, 2.0, grad, reduction="none")
        assert actual["loss"][12].isnan()
        assert not actual["loss"][13].isnan()
