"""Cases of focal_loss whose rows are taken in chunks."""

from ctypes import c_int64

import pytest
import torch

from tools.cuda.cases.common import (
    DTYPES,
    NAN,
    real_of,
)
from tools.cuda.cases.focal_loss import check_focal_loss, labels_for, run_focal_loss


# Few long rows, one block per chunk of a row: slightly more than three of the smallest chunks, off the vector width.
def long_rows(library, dtype):
    classes = 50_000 // dtype.itemsize + 5
    chunk = library.chunk_of_a_row(c_int64(9), c_int64(classes), c_int64(dtype.itemsize))
    assert 0 < 3 * chunk < classes
    return (3 * torch.randn(9, classes)).to(dtype), chunk


@pytest.mark.parametrize("dtype", DTYPES)
def test_focal_loss_in_chunks(library, dtype):
    logits, chunk = long_rows(library, dtype)
    classes = logits.shape[1]
    # The first and last class of a chunk, and of a vector in it.
    target = torch.tensor([0, chunk - 1, chunk, 2 * chunk + 15, classes - 1, -100, 3 * chunk + 8, classes, 7])
    logits[5] = NAN  # ignored, so never read
    weight = torch.rand(classes)
    for reduction, rows in (("none", 9), ("mean", 7)):
        finite = logits[:rows].nan_to_num()
        check_focal_loss(library, finite, target[:rows], 1.5, reduction=reduction, weight=weight)
    actual = run_focal_loss(library, logits, target, 2.0, torch.ones(9, dtype=real_of(dtype)), reduction="none")
    assert actual["loss"].isnan().nonzero().tolist() == [[7]]
    assert (actual["grad_logits"][5] == 0).all()
    gammas = 3 * torch.rand(9)
    check_focal_loss(library, logits.nan_to_num(), target, gammas, reduction="none")
    grad = torch.rand(9, dtype=real_of(dtype))
    both, one = (
        run_focal_loss(library, logits, target, gammas, grad, reduction="none", gradients=wanted)["grad_gamma"]
        for wanted in (True, False)
    )
    torch.testing.assert_close(both, one, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_focal_loss_in_chunks_at_the_edges(library, dtype):
    logits, chunk = long_rows(library, dtype)
    target = torch.tensor([2 * chunk, 0, chunk, 1, chunk + 1, 2, 2, 2, chunk])
    logits[0, : 2 * chunk] = -torch.inf
    logits[1, chunk:] = -torch.inf
    logits[2, :chunk] = -torch.inf
    logits[3, 1] = 1000  # certain and right
    logits[4, 1] = 1000  # certain and wrong, by another chunk
    logits[5, -1] = 40
    logits[6] *= 1e-3
    logits[7, 2] = -1000
    logits[8, :chunk] = -1000
    check_focal_loss(library, logits.clone(), target, 0.5, reduction="none")
    for at, value in ((0, NAN), (chunk, torch.inf), (-1, NAN)):
        broken = logits.clone()
        broken[6, at] = value
        actual = run_focal_loss(library, broken, target, 2.0, torch.ones(9, dtype=real_of(dtype)), reduction="none")
        assert actual["loss"].isnan().nonzero().tolist() == [[6]]
        assert actual["grad_logits"].isnan().any(1).nonzero().tolist() == [[6]]
    logits[6] = -torch.inf
    assert run_focal_loss(library, logits, target, 2.0, torch.ones(9, dtype=real_of(dtype)), reduction="none")["loss"][
        6
    ].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_focal_loss_in_chunks_of_other_layouts(library, dtype):
    logits, chunk = long_rows(library, dtype)
    target = labels_for(logits[:3]) + chunk
    sources = [
        torch.stack((logits[:3], logits[3:6]), 2).flatten(1)[:, ::2],  # every second element
        torch.cat((logits[0, :1], logits[:3].flatten()))[1:].reshape(3, -1),  # not on a 16-byte boundary
    ]
    for source in sources:
        for grad_like in (source, torch.empty_like(logits[:3])):
            check_focal_loss(library, source, target, 2.0, grad_like=grad_like)
    columns = logits[:2].reshape(1, 2, -1).transpose(1, 2)  # [1, classes, 2], channels last
    check_focal_loss(library, columns, target[:2].reshape(1, 2), 2.0, reduction="sum")


# More chunks than a warp has lanes; and more rows than one step of the second kernel combines.
@pytest.mark.parametrize(("rows", "classes"), [(1, 140_000), (65, 8_200)])
def test_focal_loss_in_many_chunks(library, rows, classes):
    logits = 3 * torch.randn(rows, classes)
    logits[:, -1] = 15  # most of it in the last chunk
    chunks = -(-classes // library.chunk_of_a_row(c_int64(rows), c_int64(classes), c_int64(4)))
    assert chunks > 32 or (chunks > 2 and rows > 64)
    target = labels_for(logits)
    first = check_focal_loss(library, logits, target, 2.0, reduction="mean")
    again = run_focal_loss(library, logits, target, 2.0, torch.ones(1))
    for name in ("loss", "divisor", "saved"):
        assert torch.equal(first[name], again[name])
