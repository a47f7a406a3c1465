"""Running sums of the calibration grid."""

import ctypes
from ctypes import c_bool, c_int64, c_void_p

import pytest
import torch

from tools.cuda.cases.common import DTYPES, Memory, structure

SUMS = [
    ("rows", c_int64), ("n_gammas", c_int64), ("n_temperatures", c_int64), ("confidence", c_void_p),
    ("correct", c_void_p), ("n_buckets", c_int64), ("sketch", c_bool), ("count", c_void_p),
    ("confidence_sum", c_void_p), ("correct_sum", c_void_p), ("cell_stride", c_int64),
]  # fmt: skip


# Buckets: fewer than threads, and more than one pass holds in shared memory. Rows: none, and more than a block.
@pytest.mark.parametrize(("rows", "n_buckets", "sketch"), [(0, 3, False), (300, 15, False), (300, 1030, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_added_per_cell_and_bucket(library, dtype, rows, n_buckets, sketch):
    n_gammas, n_temperatures, stride = 2, 3, 5
    confidence = torch.rand(n_temperatures, n_gammas, rows, dtype=dtype)
    confidence[..., ::7] = 1
    correct = torch.rand(rows) < 0.7
    before = torch.randint(100, (n_gammas, stride, n_buckets))
    with Memory(library) as memory:
        args = structure(library, "CalibrationSums", dtype, SUMS)
        args.rows, args.n_gammas, args.n_temperatures = rows, n_gammas, n_temperatures
        args.confidence, args.correct = memory.put(confidence), memory.put(correct.to(torch.uint8))
        args.n_buckets, args.sketch, args.cell_stride = n_buckets, sketch, stride
        args.count, args.correct_sum = memory.put(before), memory.put(before)
        args.confidence_sum = memory.put(before.double())
        assert library.calibration_sums(DTYPES.index(dtype), ctypes.byref(args)) == 0
        count, right = memory.get(args.count, before) - before, memory.get(args.correct_sum, before) - before
        total = memory.get(args.confidence_sum, before.double()) - before
    if sketch:
        root = torch.where(
            confidence <= 0.5, (2 * confidence).sqrt() / 3, 1 - 2 / 3 * (2 * (1 - confidence)).sqrt().sqrt()
        )
        place = (root * n_buckets).long().clamp(max=n_buckets - 1)
    else:
        place = (confidence * n_buckets).ceil().long().clamp(min=1) - 1
    one_hot = torch.nn.functional.one_hot(place, n_buckets).transpose(0, 1)  # [n_gammas, n_temperatures, rows, B]
    assert torch.equal(total[:, n_temperatures:], torch.zeros_like(total[:, n_temperatures:]))
    sums = [x[:, :n_temperatures] for x in (count, right, total)]
    if sketch and rows:  # the roots may round to the other side of an edge
        assert (sums[0] - one_hot.sum(2)).abs().sum() <= 4
        assert torch.equal(sums[0].sum(-1), torch.full((n_gammas, n_temperatures), rows))
        return
    assert torch.equal(sums[0], one_hot.sum(2))
    assert torch.equal(sums[1], (one_hot * correct[:, None]).sum(2))
    expected = (one_hot * confidence.transpose(0, 1).double()[..., None]).sum(2)
    torch.testing.assert_close(sums[2], expected, rtol=1e-12, atol=1e-11)
