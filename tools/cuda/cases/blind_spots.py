"""Cases that the other modules do not have: tiles without a free byte, incomplete vectors, rows off every 16-byte
boundary, more blocks than a block has threads, and the kernels of every dtype in every layout.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import c_int64

import pytest
import torch

from focalkern import GammaTable, reference
from tools.cuda.cases.calibration_grid import ESTIMATORS, run_grid
from tools.cuda.cases.calibration_map import check_map
from tools.cuda.cases.common import DTYPES, NARROW, assert_near, real_of
from tools.cuda.cases.focal_loss import check_focal_loss, labels_for, run_focal_loss


def off_boundary(rows: int, classes: int, dtype: torch.dtype, elements: int) -> torch.Tensor:
    """Logits that start so many elements after a 16-byte boundary."""
    return (3 * torch.randn(rows * classes + elements)).to(dtype)[elements:].reshape(rows, classes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_bytes", [16, 64, 128, 1024])
def test_full_tiles(library, dtype, row_bytes):
    """One tile of shared memory without a free byte or row; and several tiles, the last of which has one row."""
    classes = min(row_bytes // dtype.itemsize, 512)
    full = min(256, 16384 // row_bytes)
    for rows in (full, 3 * full + 1):
        logits = torch.randn(rows, classes).to(dtype)
        check_focal_loss(library, logits, labels_for(logits), 1.5)


# The last vector of the tile is not full, and rows do not fill whole vectors.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (3, 3), (301, 5), (83, 33), (67, 101)])
def test_tails_of_tiles(library, dtype, rows, classes):
    for reduction in ("none", "mean"):
        logits = (3 * torch.randn(rows, classes)).to(dtype)
        check_focal_loss(library, logits, labels_for(logits), 2.0, reduction=reduction)


# Odd rows start off every boundary in turn.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [3, 515, 1001, 4099])
@pytest.mark.parametrize("elements", [0, 1, 3])
def test_rows_off_every_boundary(library, dtype, classes, elements):
    logits = off_boundary(9 if classes < 4000 else 3, classes, dtype, elements)
    check_focal_loss(library, logits, labels_for(logits), 2.0)
    # If the gradient lies on another boundary than the logits, the kernel writes it element by element.
    check_focal_loss(
        library, logits, labels_for(logits), 2.0, grad_like=off_boundary(*logits.shape, dtype, elements + 1)
    )


@contextlib.contextmanager
def most_blocks(library: ctypes.CDLL, blocks: int) -> Iterator[None]:
    before = library.max_grid()
    library.set_max_grid(c_int64(blocks))
    try:
        yield
    finally:
        library.set_max_grid(c_int64(before))


def test_more_blocks_than_threads(library):
    """The last block adds up the sums of more than 256 blocks."""
    logits = torch.randn(16 * 300 + 1, 2)
    with most_blocks(library, 2048):
        check_focal_loss(library, logits, labels_for(logits), 2.0, reduction="mean")


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_of_all_dtypes(library, dtype):
    for source in (
        torch.randn(2, 70, 37),
        torch.randn(3, 2, 5).transpose(1, 2),
        torch.randn(5, 300).t(),
        torch.randn(2000, 3)[:, :2],
    ):
        logits = torch.empty_strided(source.shape, source.stride(), dtype=dtype).copy_(3 * source)
        classes = logits.shape[1]
        target = labels_for(logits)
        target[0, ...] = -100
        for gamma in (2.0, GammaTable([0.0, 0.3, 1.0], [5.0, 1.0])):
            check_focal_loss(library, logits, target, gamma, reduction="mean", weight=torch.rand(classes) + 0.1)
            check_focal_loss(library, logits, target, gamma, reduction="none", label_smoothing=0.1)
        soft = torch.empty_like(logits, dtype=real_of(dtype)).copy_(torch.randn(logits.shape).softmax(1))
        check_focal_loss(library, logits, soft, 2.0, label_smoothing=0.1)
        options = {"weight": torch.rand(classes), "detach_modulation": True}
        check_focal_loss(library, logits, soft, torch.tensor(1.5), reduction="sum", **options)


# General kernels with one lane, a warp and the block per row; each block has several tiles.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes"), [(1300, 3), (70, 300), (9, 3000)])
def test_general_kernels_of_all_dtypes(library, dtype, rows, classes):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    logits[:, 1] = logits[:, 0]  # ties
    target = labels_for(logits)
    target[::7] = -100
    for reduction in ("none", "mean"):
        check_focal_loss(library, logits, target, 1.5, reduction=reduction, label_smoothing=0.1)
    soft = torch.randn(rows, classes, dtype=real_of(dtype)).softmax(1)
    check_focal_loss(library, logits, soft, torch.rand(rows), reduction="none")


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_but_the_loss_is_wanted(library, dtype):
    """Gradients that are not requested have null pointers and are not written."""
    logits = torch.randn(40, 7).to(dtype)
    for target in (labels_for(logits), torch.randn(40, 7, dtype=real_of(dtype)).softmax(1)):
        actual = run_focal_loss(library, logits, target, 2.0, torch.ones(1, dtype=real_of(dtype)), gradients=False)
        expected = reference.focal_loss(logits.double(), target.double() if target.is_floating_point() else target, 2.0)
        assert_near(actual["loss"], expected, real_of(dtype), 20)


# More rows than one round of the grid takes, with a lane, a warp and a block per row.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes"), [(6500, 2), (250, 200), (30, 4097)])
def test_map_of_many_rows(library, dtype, rows, classes):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    check_map(library, logits, 2.0, 0.7, log=rows == 250, wide=rows == 6500)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_grid_of_narrow_logits(library, dtype, estimator):
    rows, classes = 260, 11
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    target = torch.where(torch.rand(rows) < 0.6, logits.float().argmax(1), torch.randint(classes, (rows,)))
    gammas, temperatures = [0.0, 1.0, 3.0], [0.5, 1.0]
    tables, confidence, correct = run_grid(
        library, logits, target, gammas, temperatures, n_bins=15, estimator=estimator
    )
    expected = reference.calibration_grid(logits.double(), target, gammas, temperatures, criteria=("nll", "brier"))
    for name in ("nll", "brier"):
        assert_near(tables[name], expected[name], real_of(dtype))
    for g, gamma in enumerate(gammas):
        for t, temperature in enumerate(temperatures):
            probs = reference.focal_calibration_map(logits.double(), gamma, temperature)
            assert_near(confidence[t, g], probs.max(1).values, real_of(dtype))
            ece, _ = reference.calibration_error(confidence[t, g], correct, 15, estimator)
            assert abs(tables["ece"][g, t].item() - ece) < 1e-12


# Each subset of criteria takes another kernel or skips a stage.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("criteria", [("ece", "mce", "nll"), ("nll",), ("mce",), ("brier",)])
def test_grid_of_some_criteria(library, dtype, criteria):
    logits = (3 * torch.randn(70, 5)).to(dtype)
    target = labels_for(logits, torch.int32)
    gammas, temperatures = [0.5, 2.0], [1.0, 1.7]
    tables, confidence, correct = run_grid(
        library, logits, target, gammas, temperatures, n_bins=7, estimator="equal_mass", criteria=criteria
    )
    expected = reference.calibration_grid(
        logits.double(), target.long(), gammas, temperatures, criteria=("nll", "brier")
    )
    for name in {"nll", "brier"} & set(criteria):
        assert_near(tables[name], expected[name], real_of(dtype))
    for g, t in ((0, 0), (1, 1)):
        ece, mce = reference.calibration_error(confidence[t, g], correct, 7, "equal_mass")
        for name, value in {"ece": ece, "mce": mce}.items():
            assert name not in criteria or abs(tables[name][g, t].item() - value) < 1e-9


def test_grid_of_more_rows_than_a_digit_counts(library):
    """A row number has two digits, and more rows exist than one round of the grid checks."""
    logits = 3 * torch.randn(700, 3)
    logits[::3] = logits[0].clone()  # ties
    target = torch.where(torch.rand(700) < 0.6, logits.argmax(1), torch.randint(3, (700,)))
    for estimator in ESTIMATORS:
        tables, confidence, correct = run_grid(library, logits, target, [1.0], [0.8], n_bins=11, estimator=estimator)
        ece, _ = reference.calibration_error(confidence[0, 0], correct, 11, estimator)
        assert abs(tables["ece"][0, 0].item() - ece) < 1e-11
