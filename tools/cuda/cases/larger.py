"""More and larger cases than the tests run every time: realistic sizes, and as many blocks as on a GPU."""

import contextlib
from ctypes import c_int64

import pytest
import torch

from focalkern import GammaTable, reference
from tools.cuda.cases.blind_spots import most_blocks, off_boundary
from tools.cuda.cases.calibration_grid import ESTIMATORS, run_grid
from tools.cuda.cases.calibration_map import check_map
from tools.cuda.cases.common import DTYPES, assert_near, real_of
from tools.cuda.cases.focal_loss import check_focal_loss, labels_for

SIZES = [
    (1, 1), (70, 1), (1, 2), (700, 2), (300, 3), (257, 10), (1030, 16), (40, 100), (3, 1000), (33, 1000), (5, 4097),
    (2, 32000),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("rows", "classes"), SIZES)
def test_sizes(library, dtype, rows, classes, reduction):
    torch.manual_seed(rows * 131 + classes)
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    target = torch.randint(classes, (rows,))
    if rows > 4:
        target[::5] = -100
    weight = torch.rand(classes) + 0.1
    table = GammaTable([0.0, 0.2, 0.5, 1.0], [5.0, 3.0, 1.0])
    check_focal_loss(library, logits, target, 2.0, reduction=reduction, weight=weight)
    for gamma in (torch.tensor(0.5), 3 * torch.rand(rows), table):
        check_focal_loss(library, logits, target, gamma, reduction=reduction)


# Odd rows start off every boundary in turn.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1001, 4097, 9001])
@pytest.mark.parametrize("elements", [0, 1, 3])
def test_longer_rows_off_every_boundary(library, dtype, classes, elements):
    logits = off_boundary(9, classes, dtype, elements)
    check_focal_loss(library, logits, labels_for(logits), 2.0)
    check_focal_loss(library, logits, labels_for(logits), 2.0, grad_like=off_boundary(9, classes, dtype, elements + 1))


@contextlib.contextmanager
def as_on_a_gpu(library):
    """The grid of a GPU, without the check for races between blocks, whose memory would be many times that of the
    tensors."""
    library.ptxrun_set(b"global_races", c_int64(0))
    with most_blocks(library, 2048):
        yield
    library.ptxrun_set(b"global_races", c_int64(1))


def test_thousands_of_tiles(library):
    """More tiles than blocks: 2048 blocks of 256 rows are 524288."""
    logits = torch.randn(524288 + 700, 3).to(torch.bfloat16)
    for reduction in ("none", "mean"):
        with as_on_a_gpu(library):
            check_focal_loss(library, logits, labels_for(logits), 2.0, reduction=reduction)


def test_many_tiles_of_rows(library):
    # The last case has so many rows that a warp takes a row that otherwise the block would take.
    for rows, classes in ((70 * 64 + 5, 520), (264 * 8 + 5, 2100)):
        logits = torch.randn(rows, classes)
        with as_on_a_gpu(library):
            check_focal_loss(library, logits, labels_for(logits), 2.0, reduction="mean")


# So many short rows with label smoothing that a tile holds twice as many.
@pytest.mark.parametrize(
    ("dtype", "rows", "classes"),
    [
        (torch.bfloat16, 16896 + 70, 100),
        (torch.bfloat16, 135168 + 500, 10),
        (torch.float16, 135168 + 500, 7),
        (torch.float32, 67584 + 300, 18),
    ],
)
def test_large_tiles_of_smoothed_rows(library, dtype, rows, classes):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    target = labels_for(logits)
    target[100:200:7] = -100
    with most_blocks(library, 24):
        check_focal_loss(library, logits, target, 2.0, reduction="mean", label_smoothing=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes"), [(5, 2), (70, 3), (65, 10), (40, 100), (3, 1000), (2, 4097), (1, 32000)])
@pytest.mark.parametrize("log", [False, True])
def test_map_sizes(library, dtype, rows, classes, log):
    logits = (3 * torch.randn(rows, classes)).to(dtype)
    of_rows = (4 * torch.rand(rows).double() - 0.9, 0.3 + torch.rand(rows).double())
    for gamma, temperature in ((0.0, 1.0), (2.0, 0.7), of_rows):
        check_map(library, logits, gamma, temperature, log=log, wide=log)


# More rows than 2^16: a row number has three digits.
def test_grid_many_rows(library):
    rows = 66000
    logits = 3 * torch.randn(rows, 3)
    logits[::3] = logits[0].clone()  # ties
    target = torch.where(torch.rand(rows) < 0.6, logits.argmax(1), torch.randint(3, (rows,)))
    for estimator in ESTIMATORS:
        tables, confidence, correct = run_grid(library, logits, target, [1.0], [0.8], n_bins=11, estimator=estimator)
        ece, _ = reference.calibration_error(confidence[0, 0], correct, 11, estimator)
        assert abs(tables["ece"][0, 0].item() - ece) < 1e-11
    expected = reference.calibration_grid(logits.double(), target, [1.0], [0.8], criteria=("nll", "brier"))
    for name in ("nll", "brier"):
        assert_near(tables[name], expected[name], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [1, 5, 300])
def test_more_layouts_of_all_dtypes(library, dtype, classes):
    for source in (
        torch.randn(2, classes, 37),
        torch.randn(3, 2, classes).transpose(1, 2),
        torch.randn(classes, 50).t(),
    ):
        logits = torch.empty_strided(source.shape, source.stride(), dtype=dtype).copy_(3 * source)
        target = labels_for(logits)
        target[0, ...] = -100
        for gamma in (2.0, -1.0, GammaTable([0.0, 0.3, 1.0], [5.0, 1.0])):
            check_focal_loss(library, logits, target, gamma, reduction="mean", weight=torch.rand(classes) + 0.1)
            check_focal_loss(library, logits, target, gamma, reduction="none", label_smoothing=0.1)
        real = real_of(dtype)
        soft = torch.empty_like(logits, dtype=real).copy_(torch.randn(logits.shape).softmax(1))
        check_focal_loss(library, logits, soft, 2.0, label_smoothing=0.1)
        options = {"weight": torch.rand(classes), "detach_modulation": True}
        check_focal_loss(library, logits, soft, torch.tensor(1.5), reduction="sum", **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("classes", [3, 200, 3000])
def test_edges_of_all_dtypes(library, dtype, classes):
    logits = torch.randn(9, classes)
    target = torch.zeros(9, dtype=torch.int32)
    logits[0, 0] = 1e4
    logits[1, 1] = 1e4
    logits[2, 0] = 80
    logits[3, 1:] = -torch.inf
    logits[4, 1] = -torch.inf
    target[5] = -100
    target[7] = classes
    logits = logits.to(dtype)
    for smoothing in (0.0, 0.1):
        if smoothing and classes > 2:
            logits = torch.where(logits.isinf(), torch.zeros_like(logits), logits)
        check_focal_loss(library, logits, target, 0.5, reduction="none", label_smoothing=smoothing)
