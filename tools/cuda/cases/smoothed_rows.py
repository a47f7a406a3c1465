"""Rows of label smoothing and class probabilities that warps keep in registers; short rows of label smoothing, and rows
of it that a warp or the block reads twice.
"""

import pytest
import torch

from focalkern import reference
from tools.cuda.cases.blind_spots import most_blocks, off_boundary
from tools.cuda.cases.common import NARROW
from tools.cuda.cases.focal_loss import check_focal_loss, run_focal_loss

GAMMAS = [0.0, 1.0, 2.0]


def labels_for(logits):
    return torch.randint(logits.shape[1], (len(logits),))


def shares_for(logits):
    return (2 * torch.randn(logits.shape)).softmax(1).to(logits.dtype)


# One, two or four rows for each warp of a block, which takes several tiles or one; a row is ignored, a label is wrong.
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize(("rows", "classes"), [(45, 520), (70, 1000), (45, 264), (70, 508)])
def test_rows_in_registers(library, dtype, gamma, rows, classes):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    target = labels_for(logits)
    target[-3:-1] = 7
    for grid in (1, 24, 2048):
        with most_blocks(library, grid):
            check_focal_loss(library, logits, target, gamma, label_smoothing=0.1, ignore_index=7)
            if dtype in NARROW and classes > 512:
                check_focal_loss(library, logits, shares_for(logits), gamma, label_smoothing=0.1)
    target[-1] = classes
    check_focal_loss(library, logits, target, gamma, label_smoothing=0.1, ignore_index=7, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_one_row_in_registers(library, dtype):
    for classes in (520, 1024):
        logits = (3 * torch.randn(1, classes)).to(dtype)
        for target in (labels_for(logits), shares_for(logits)):
            check_focal_loss(library, logits, target, 2.0, label_smoothing=0.1)


# Rows with gaps between them, and rows that begin beside a vector, which another kernel takes.
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("gap", [1, 8])
def test_registers_of_rows_with_gaps(library, dtype, gap):
    wide = (3 * torch.randn(9, 760 + gap)).to(dtype)
    for logits in (wide[:, :760], wide[:, gap:]):
        check_focal_loss(library, logits, labels_for(logits), 2.0, label_smoothing=0.1, reduction="none")
        shares = (2 * torch.randn(9, 760 + gap)).to(dtype)[:, gap:].softmax(1)
        check_focal_loss(library, logits, shares, 2.0, reduction="none")


# A warp reads a row twice, or the block (of more than 8192 bytes): rows that begin and end between vectors, with a few
# classes for each thread or with more than it adds without compensation; each block has several tiles, or one. Rows are
# ignored, and a label is wrong.
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize(("rows", "bytes_of_row"), [(45, 1030 * 4), (3, 8200), (2, 17 * 8192)])
def test_smoothed_rows_read_twice(library, dtype, rows, bytes_of_row):
    classes = bytes_of_row // dtype.itemsize
    for gamma, odd in zip(GAMMAS, (0, 1, 3), strict=True):
        logits = (3 * torch.randn(rows, classes + odd)).to(dtype)
        target = labels_for(logits)
        target[1] = -100
        check_focal_loss(library, logits, target, gamma, label_smoothing=0.1)
        with most_blocks(library, 1):
            check_focal_loss(library, logits, target, gamma, label_smoothing=0.1)
        target[0] = classes + odd
        check_focal_loss(library, logits, target, gamma, label_smoothing=0.1, reduction="none")


# Rows of 16 bits with gaps, which would lie in a tile without them, and one row.
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_other_smoothed_rows_read_twice(library, dtype):
    for rows, classes, gap in ((45, 300, 1), (45, 301, 4), (1, 1100, 0), (1, 9000, 0)):
        logits = (3 * torch.randn(rows, classes + gap)).to(dtype)[:, gap:]
        check_focal_loss(library, logits, labels_for(logits), 2.0, label_smoothing=0.1, reduction="none")


# Short rows with gaps, which lanes of a warp read once; each block has several tiles.
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_smoothed_rows_of_lanes(library, dtype):
    for gamma in GAMMAS:
        logits = (3 * torch.randn(70, 201)).to(dtype)[:, :200]
        target = labels_for(logits)
        target[3] = -100
        check_focal_loss(library, logits, target, gamma, label_smoothing=0.1)
        check_focal_loss(library, logits, target, gamma, label_smoothing=0.1, reduction="none")


# The fewest and the most classes of a thread and of lanes, and most between them, also where rows begin in few banks of
# shared memory, in one tile and in several for a block, with twice the rows in a tile and without.
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("first", [1, 9, 17, 25, 51, 98, 127, 254, 417])
def test_short_smoothed_rows(library, dtype, first):
    for classes in range(first, first + (8 if first < 30 else 4)):
        gamma = GAMMAS[classes % 3]
        logits = (3 * torch.randn(75, classes)).to(dtype)
        target = labels_for(logits)
        target[5], target[6] = -100, classes
        with most_blocks(library, 3 if classes % 4 < 2 else 2048):
            check_focal_loss(library, logits, target, gamma, label_smoothing=0.1, reduction="none")
        if classes % 4 == 2:
            logits = logits.repeat(4, 1)
            check_focal_loss(library, logits, labels_for(logits), gamma, label_smoothing=0.1)


# So many short rows that a tile holds twice as many.
def test_many_short_smoothed_rows(library):
    logits = 3 * torch.randn(264 * 32 + 70, 100)
    target = labels_for(logits)
    target[100:200:7] = -100
    with most_blocks(library, 24):
        check_focal_loss(library, logits, target, 2.0, reduction="mean", label_smoothing=0.1)


# Short rows whose gradient has gaps, or begins beside a vector, which other kernels write.
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("classes", [10, 100])
def test_gradients_of_short_smoothed_rows_with_gaps(library, dtype, classes):
    logits = (3 * torch.randn(70, classes)).to(dtype)
    with_gaps = torch.empty(70, classes + 8, dtype=dtype)[:, :classes]
    for grad_like in (with_gaps, off_boundary(70, classes, dtype, 1)):
        check_focal_loss(library, logits, labels_for(logits), 2.0, label_smoothing=0.1, grad_like=grad_like)


# Ties of the largest class in one lane and in several, the largest logit far from zero, classes far below it, confident
# rows whose other classes are smaller than the rounding error of 1.
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("classes", [6, 15, 16, 100, 400, 760, 1030, 4400])
def test_far_logits_of_smoothed_rows(library, dtype, classes):
    logits = torch.randn(14, classes)
    logits[0] = 0.25
    logits[1, :3] = 20
    logits[2, -2:] = 3
    logits[3, ::3] = 5
    for row, far in enumerate((1023, -1023, 1025, -1025, 3e4, -3e4), 4):
        logits[row] += far
    logits[10, 0] = 18
    logits[11, -1] = 40
    logits[12, 1:] = -6e4
    logits[13, 1:] -= 600
    logits = logits.to(dtype)
    target = labels_for(logits)
    target[10:14] = 0
    for gamma in GAMMAS:
        for smoothing in (1e-3, 0.4):
            check_focal_loss(library, logits, target, gamma, label_smoothing=smoothing, reduction="none")
        for shares in {shares.dtype: shares for shares in (shares_for(logits), shares_for(logits).float())}.values():
            check_focal_loss(library, logits, shares, gamma, reduction="none")


# The saved log S keeps its digits where the other classes are small beside the largest.
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("classes", [6, 16, 100, 400, 760, 1030, 4400])
def test_digits_of_confident_smoothed_rows(library, dtype, classes):
    logits = torch.randn(5, classes)
    logits[torch.arange(5), torch.arange(5)] = torch.tensor([8.0, 13.0, 18.0, 25.0, 36.0])
    logits = logits.to(dtype)
    expected = logits.double().scatter(1, torch.arange(5)[:, None], -torch.inf).logsumexp(1) - logits.double().amax(1)
    for target in (torch.zeros(5, dtype=torch.int64), shares_for(logits)):
        actual = run_focal_loss(library, logits, target, 2.0, torch.ones(5), reduction="none", label_smoothing=0.1)
        log_s = actual["saved"][5:10].double()
        torch.testing.assert_close(log_s, expected.exp().log1p(), rtol=1e-5, atol=0)


# Rows whose largest probability is the bound of the likely class (kUnlikely), or next to it: forward and backward agree
# on the side of the bound.
@pytest.mark.parametrize("classes", [2, 20, 600, 1500])
def test_bound_of_the_likely_class(library, classes):
    logits = torch.full((81, classes), -50.0)
    logits[:, 0] = 0
    bound = torch.tensor(1 / 0.55 - 1).log().view(torch.int32)
    logits[:, 1] = (bound + torch.arange(-40, 41, dtype=torch.int32)).view(torch.float32)
    shares = torch.zeros(81, classes)
    shares[:, 0], shares[:, 1] = 0.9, 0.1
    for target in (torch.zeros(81, dtype=torch.int64), shares):
        check_focal_loss(library, logits, target, 2.0, label_smoothing=0.1, reduction="none")


# A confident row under weak smoothing: the gradient of its largest class is far smaller than the slope of that class.
@pytest.mark.parametrize("classes", [6, 16, 100, 400, 760, 1030, 4400])
def test_gradient_of_the_likely_class(library, classes):
    logits = torch.randn(3, classes)
    logits[:, 1] += 20
    target = torch.tensor([1, 0, 1])
    for gamma in GAMMAS:
        actual = run_focal_loss(library, logits, target, gamma, torch.ones(3), reduction="none", label_smoothing=1e-6)[
            "grad_logits"
        ]
        z = logits.double().requires_grad_()
        reference.focal_loss(z, target, gamma, reduction="sum", label_smoothing=1e-6).backward()
        torch.testing.assert_close(actual[:, 1].double(), z.grad[:, 1], rtol=1e-4, atol=0)


# Masks of the least finite number under strong smoothing: the loss is large and finite.
@pytest.mark.parametrize("classes", [6, 100, 400, 760, 1030, 4400])
def test_masked_classes_of_smoothed_rows(library, classes):
    logits = torch.randn(3, classes)
    logits[1, 1:] = torch.finfo(torch.float32).min
    logits[2, classes // 2 :] = torch.finfo(torch.float32).min
    target = torch.zeros(3, dtype=torch.int64)
    for gamma in GAMMAS:
        check_focal_loss(library, logits, target, gamma, label_smoothing=0.8, reduction="none")


# A NaN makes its row NaN, an infinite logit too; an impossible class has an infinite loss. With any of them, the
# gradient of an ignored row is zero.
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("classes", [6, 16, 100, 400, 760, 1030, 4400])
def test_infinite_logits_of_smoothed_rows(library, dtype, classes):
    logits = torch.randn(4, classes).to(dtype)
    target = torch.tensor([0, -100, 0, 0])
    for value, is_expected in ((float("nan"), torch.isnan), (torch.inf, torch.isnan), (-torch.inf, torch.isinf)):
        for place in (0, classes // 2, classes - 1):
            rows = logits.clone()
            rows[1:3, place] = value
            result = run_focal_loss(
                library, rows, target, GAMMAS[place % 3], torch.ones(4), reduction="none", label_smoothing=0.1
            )
            loss, grad = result["loss"], result["grad_logits"]
            assert is_expected(loss[2]) and loss[[0, 3]].isfinite().all() and loss[1] == 0
            assert grad[[0, 3]].isfinite().all() and (grad[1] == 0).all()
            assert (grad[2].isfinite() if value == -torch.inf else grad[2].isnan()).all()
