"""Short rows of class probabilities, which lie in tiles of shared memory."""

import math

import pytest
import torch

from focalkern import reference
from tools.cuda.cases.blind_spots import most_blocks, off_boundary
from tools.cuda.cases.common import NAN, NARROW
from tools.cuda.cases.focal_loss import check_focal_loss, run_focal_loss

GAMMAS = [0.0, 1.0, 2.0]
TYPES = [(torch.float32, torch.float32), *((dtype, target) for dtype in NARROW for target in (dtype, torch.float32))]
with_types = pytest.mark.parametrize(("dtype", "target_type"), TYPES)


def shares_for(logits, target_type):
    return (2 * torch.randn(logits.shape)).softmax(1).to(target_type)


def saved_classes(result, rows):  # number_as_class of math/row_loss.h
    return (result["saved"][:rows].view(torch.int32) - 1).tolist()


# Few and many classes for a thread and for lanes, also where rows begin in few banks of shared memory; odd numbers and
# rows that are too long for a tile, which other kernels take; the last tile is not full.
@with_types
@pytest.mark.parametrize("first", [1, 15, 29, 60, 98, 127, 253, 509])
def test_short_shared_rows(library, dtype, target_type, first):
    for classes in range(first, first + 5):
        gamma = GAMMAS[classes % 3]
        logits = (3 * torch.randn(75, classes)).to(dtype)
        check_focal_loss(library, logits, shares_for(logits, target_type), gamma, reduction="none")
        if classes % 4 == 2:
            logits = logits.repeat(4, 1)
            check_focal_loss(library, logits, shares_for(logits, target_type), gamma, detach_modulation=True)


# A block takes several tiles, with as many rows as fit, or fewer if the rows are few for so many blocks; without
# gradients of the target and with them.
@with_types
@pytest.mark.parametrize(
    ("rows", "classes"),
    [(1, 10), (257, 16), (500, 10), (1100, 10), (300, 64), (60, 64), (30, 128), (33, 100), (90, 200)],
)
def test_tiles_of_shared_rows(library, dtype, target_type, rows, classes):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    for blocks, reduction in ((1, "mean"), (2, "sum"), (64, "mean")):
        with most_blocks(library, blocks):
            check_focal_loss(library, logits, shares_for(logits, target_type), 2.0, reduction=reduction)


# Logits, targets or gradients with gaps between rows or beside a vector, label smoothing, class weights: other kernels.
@with_types
@pytest.mark.parametrize("classes", [10, 100])
def test_shared_rows_outside_tiles(library, dtype, target_type, classes):
    logits = (3 * torch.randn(70, classes)).to(dtype)
    target = shares_for(logits, target_type)
    with_gaps = torch.empty(70, classes + 8, dtype=dtype)[:, :classes]
    shifted = torch.zeros(70 * classes + 1, dtype=target_type)[1:].reshape(70, classes).copy_(target)
    wide = torch.zeros(70, classes + 8, dtype=target_type)[:, :classes].copy_(target)
    for grad_like in (with_gaps, off_boundary(70, classes, dtype, 1)):
        check_focal_loss(library, logits, target, 2.0, grad_like=grad_like)
    # The gradient of the target, in float32, must have the strides of the target.
    for other in (shifted, wide) if target_type == torch.float32 else (shifted,):
        check_focal_loss(library, logits, other, 1.0)
    check_focal_loss(library, with_gaps.copy_(logits), target, 2.0, reduction="none")
    check_focal_loss(library, logits, target, 2.0, label_smoothing=0.1)
    check_focal_loss(library, logits, target, 2.0, weight=torch.rand(classes))


# A confident row: the gradient of its largest class is far smaller than the slope of that class.
@pytest.mark.parametrize("classes", [6, 16, 100, 250])
def test_gradient_of_the_likely_class_of_shared_rows(library, classes):
    logits = torch.randn(3, classes)
    logits[:, 1] += 20
    target = torch.full((3, classes), 1e-6)
    target[:2, 1] = 0.9
    target[2, 0] = 0.9
    for gamma in GAMMAS:
        actual = run_focal_loss(library, logits, target, gamma, torch.ones(3), reduction="none")
        z = logits.double().requires_grad_()
        reference.focal_loss(z, target.double(), gamma, reduction="sum").backward()
        for name in ("grad_logits", "grad_logits_alone"):
            torch.testing.assert_close(actual[name][:, 1].double(), z.grad[:, 1], rtol=1e-4, atol=0)


# The saved log S keeps its digits where the other classes are small beside the largest.
@with_types
@pytest.mark.parametrize("classes", [6, 16, 100, 250])
def test_digits_of_confident_shared_rows(library, dtype, target_type, classes):
    logits = torch.randn(5, classes)
    logits[torch.arange(5), torch.arange(5)] = torch.tensor([8.0, 13.0, 18.0, 25.0, 36.0])
    logits = logits.to(dtype)
    expected = logits.double().scatter(1, torch.arange(5)[:, None], -torch.inf).logsumexp(1) - logits.double().amax(1)
    actual = run_focal_loss(library, logits, shares_for(logits, target_type), 2.0, torch.ones(5), reduction="none")
    assert saved_classes(actual, 5) == list(range(5))
    torch.testing.assert_close(actual["saved"][5:10].double(), expected.exp().log1p(), rtol=1e-5, atol=0)


# Of equal classes any is the largest, in one lane and in several. With masks of a large finite number the loss is
# large and finite. A class without a share may be impossible.
@with_types
@pytest.mark.parametrize("classes", [6, 16, 100, 250])
def test_ties_and_masks_of_shared_rows(library, dtype, target_type, classes):
    logits = torch.randn(6, classes).to(dtype)
    logits[0] = 0.25
    logits[1, [1, 3]] = 20
    logits[2, -2:] = 3
    logits[3, ::3] = 5
    logits[4, 1:] = max(torch.finfo(dtype).min, -1e36)
    logits[5, 2:4] = -torch.inf
    target = shares_for(logits, target_type)
    target[5, 2:4] = 0
    for gamma in GAMMAS:
        actual = check_focal_loss(library, logits, target, gamma, reduction="none")
        of_rows = torch.arange(6), saved_classes(actual, 6)
        assert (logits[of_rows] == logits.amax(1)).all()


# Rows far from 0, below and above the magnitude up to which one fused operation gives the exponent. Impossible classes
# without a share lie in some lanes of a row only, which then sum another way than the others.
@with_types
@pytest.mark.parametrize("classes", [10, 16, 100, 250])
def test_large_logits_of_shared_rows(library, dtype, target_type, classes):
    logits = (
        3 * torch.randn(8, classes) + torch.tensor([0.0, 0.3, 700.7, -700.7, 1000.1, 1030.0, -3000.0, 60000.0])[:, None]
    )
    logits = logits.to(dtype)
    target = shares_for(logits, target_type)
    for impossible in (0, 2):
        logits[:, :impossible] = -torch.inf
        target[:, :impossible] = 0
        for gamma in GAMMAS:
            check_focal_loss(library, logits, target, gamma, reduction="none")


# The loss keeps its digits where the largest logit, times log2 e, has a rounding error.
@pytest.mark.parametrize("classes", [6, 30])
def test_digits_of_large_logits_of_shared_rows(library, classes):
    logits = 0.1 * torch.randn(64, classes) + 700 + 300 * torch.rand(64, 1)
    labels = torch.randint(classes, (64,))
    target = torch.nn.functional.one_hot(labels, classes).float()
    actual = run_focal_loss(library, logits, target, 0.0, torch.ones(64), reduction="none")
    expected = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close(actual["loss"].double(), expected, rtol=4e-6, atol=0)


# Adjacent logits around the bound from which a class is likely.
@pytest.mark.parametrize("classes", [10, 100])
def test_bound_of_the_likely_class_of_shared_rows(library, classes):
    logits = torch.zeros(81, classes)
    middle = torch.tensor(math.log(0.55 / 0.45 * (classes - 1)))
    logits[:, 3] = middle.view(torch.int32).add(torch.arange(-40, 41, dtype=torch.int32)).view(torch.float32)
    check_focal_loss(library, logits, shares_for(logits, torch.float32), 2.0, reduction="none")


# A NaN or an infinite logit makes its row NaN, and so does a NaN in the target; an impossible class with a share has an
# infinite loss. A row that does not count has a zero gradient, even if its target is NaN.
@with_types
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("classes", [6, 16, 100, 250])
def test_infinite_logits_of_shared_rows(library, dtype, target_type, gamma, classes):
    logits = torch.randn(5, classes).to(dtype)
    target = shares_for(logits, target_type)
    counts = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    for value, is_expected in ((NAN, torch.isnan), (torch.inf, torch.isnan), (-torch.inf, torch.isinf)):
        for place in (0, classes // 2, classes - 1):
            rows, shares = logits.clone(), target.clone()
            rows[1:3, place] = value
            shares[1] = NAN
            shares[4, place] = NAN
            if place == 0:
                rows[4, place] = 9  # the largest class
            result = run_focal_loss(library, rows, shares, gamma, counts, reduction="none")
            loss, alone, with_target = result["loss"], result["grad_logits_alone"], result["grad_logits"]
            assert is_expected(loss[2]) and loss[[0, 3]].isfinite().all() and loss[4].isnan()
            assert alone[[0, 3]].isfinite().all() and (alone[1] == 0).all()
            assert alone[2].isfinite().all() if value == -torch.inf else alone[2].isnan().all()
            torch.testing.assert_close(alone, with_target, rtol=1e-2, atol=1e-3, equal_nan=True)
