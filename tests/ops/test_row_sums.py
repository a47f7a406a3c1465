"""Sums over the classes of each row: the kernel and torch operations compared with mpmath and with float64."""

import math

import mpmath
import pytest
import torch
from conftest import assert_close

from focalkern import fallback
from focalkern.ops.row_sums import row_statistics, row_sums

FUNCTIONS = [row_sums, fallback.row_sums]


def expected(z):
    wide = z.double()
    largest = wide.amax(1)
    below = largest.unsqueeze(1) - wide
    rest = torch.where(torch.arange(z.shape[1], device=z.device) == z.argmax(1).unsqueeze(1), 0.0, (-below).exp()).sum(
        1
    )
    return torch.stack([largest, rest, (below.clamp(max=1e4) * (-below).exp()).sum(1)]), z.argmax(1)


# classes: one; fewer than a vector; below, at and above the width of a padded row; off the vector width; one block of
# the kernel, one block with a remainder, several blocks.
@pytest.mark.parametrize("classes", [1, 2, 7, 31, 32, 33, 100, 255, 257, 1000, 4096, 4101, 4128, 12345])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", FUNCTIONS, ids=["operator", "torch"])
def test_the_sums(function, classes, dtype, device):
    z = (3 * torch.randn(7, classes)).to(device, dtype)
    z[0] = 1.0  # ties
    z[1, -1] = z[1].max() + 1  # the last class
    z[2, classes // 2] = z[2, -1] = z[2].max() + 1  # ties far from each other
    z[3, 1::2] = -math.inf
    sums, index = function(z)
    wanted, classes_of = expected(z)
    assert sums.dtype == torch.float64 and index.dtype == torch.int64
    assert_close(sums, wanted, torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(index, classes_of)


@pytest.mark.parametrize("classes", [3, 40, 9000])
@pytest.mark.parametrize("function", FUNCTIONS, ids=["operator", "torch"])
def test_rows_without_a_largest_class(function, classes):
    """Rows with NaN, of -inf, of -inf and NaN, and with inf. In long rows they lie in different blocks."""
    z = torch.randn(8, classes)
    z[0, 0] = z[1, -1] = math.nan
    z[2] = -math.inf
    z[3], z[3, -1] = -math.inf, math.nan
    z[4], z[4, 1] = -math.inf, math.nan
    z[5], z[5, 1] = -math.inf, 2.0
    z[6, 2] = math.inf
    sums, index = function(z)
    assert sums[0].isnan().tolist() == [True, True, False, True, True, False, False, False]
    assert sums[:, 2].tolist() == [-math.inf, 0.0, 0.0]
    assert sums[:, 5].tolist() == [2.0, 0.0, 0.0]
    assert index[[2, 5, 6]].tolist() == [0, 1, 2]
    assert sums[0, 6] == math.inf and sums[1, 6].isnan()


@pytest.mark.parametrize("function", FUNCTIONS, ids=["operator", "torch"])
def test_logits_far_from_each_other(function):
    z = torch.tensor([[1e4, -1e4, 0.0, 1e4], [-1e4, -1e4, -3e38, 0.0]])
    sums, index = function(z)
    assert sums.tolist() == [[1e4, 0.0], [1.0, 0.0], [0.0, 0.0]]
    assert index.tolist() == [0, 3]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("classes", [5, 5000])
@pytest.mark.parametrize("function", FUNCTIONS, ids=["operator", "torch"])
def test_digits_beside_a_certain_class(function, classes, dtype, tolerance):
    """1 - p is 1e-13 and less: the sums over the other classes keep their digits."""
    z = torch.zeros(1, classes, dtype=dtype)
    z[0, 3], z[0, -1] = 60.0, 30.0
    sums, _ = function(z)
    with mpmath.workdps(40):
        rest = mpmath.exp(-30) + (classes - 2) * mpmath.exp(-60)
        fall = 30 * mpmath.exp(-30) + 60 * (classes - 2) * mpmath.exp(-60)
        assert abs(sums[1, 0].item() / rest - 1) < tolerance
        assert abs(sums[2, 0].item() / fall - 1) < tolerance


def test_any_strides_and_no_rows():
    z = torch.randn(50, 9).t()
    assert_close(row_sums(z)[0], row_sums(z.contiguous())[0], torch.float32)  # the dtype of the terms
    assert [tuple(part.shape) for part in row_sums(torch.zeros(0, 5))] == [(3, 0), (0,)]
    sums, index = row_sums(torch.zeros(2, 0))
    assert sums.tolist() == [[-math.inf] * 2, [0.0] * 2, [0.0] * 2]
    assert index.tolist() == [0, 0]


def test_the_operators_of_compiled_graphs():
    z, target = torch.randn(4, 6), torch.tensor([0, 1, -100, 5])
    torch.library.opcheck(torch.ops.focalkern.row_sums.default, (z,))
    torch.library.opcheck(torch.ops.focalkern.row_statistics.default, (z, target, -100))


# classes: below and above the width of a padded row, and more than a block. rows: two tiles and a remainder.
@pytest.mark.parametrize("labels", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [7, 100, 5000])
def test_the_statistics(classes, dtype, labels, device):
    z = (3 * torch.randn(133, classes)).to(device, dtype)
    target = torch.randint(min(classes, 200), (133,), device=device).to(labels)
    ignored = 255 if labels == torch.uint8 else -100
    target[::3], target[40:110] = ignored, ignored
    z[0], z[1, 3] = torch.nan, torch.nan  # the first is ignored
    found, expected = (f(z, target, ignored) for f in (row_statistics, fallback.row_statistics))
    for value, wanted in zip(found[:3], expected[:3], strict=True):
        assert value.dtype == wanted.dtype
        assert_close(value, wanted)
    for value, wanted in zip(found[3:], expected[3:], strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("function", [row_statistics, fallback.row_statistics], ids=["operator", "torch"])
def test_a_label_that_is_no_class(function):
    log_p, entropy, *_, correct, counts = function(torch.zeros(2, 3), torch.tensor([3, -1]), -100)
    assert log_p.isnan().all() and not entropy.isnan().any()
    assert correct.tolist() == [False, False] and counts.tolist() == [True, True]


@pytest.mark.parametrize(
    ("z", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"row_sums: input must be \[N, C\] with C >= 1, got \[3\]"),
        (torch.zeros(2, 3, dtype=torch.long), TypeError, "row_sums: input must be float16, bfloat16, float32 or float"),
    ],
    ids=["shape", "dtype"],
)
def test_errors(z, error, message):
    from focalkern.ops._backend import backend_for

    backend = backend_for(z)
    if backend is fallback:
        pytest.skip("plain torch leaves the checks to the losses")
    with pytest.raises(error, match=message):
        backend.row_sums(z)


@pytest.mark.parametrize("labels", [torch.int64, torch.int32, torch.uint8])
def test_whether_a_label_has_a_value(labels):
    from focalkern.ops._backend import backend_for

    target = torch.tensor([[3, 7, 3, 3], [3, 3, 3, 200]]).to(labels)
    for function in (backend_for(target).has_label, fallback.has_label):
        assert function(target, 200) and function(target[:1], 7)
        assert not function(target, 4) and not function(target, -100)
        assert not function(target[:, ::2], 7)
        assert not function(target[:0], 3)
    if backend_for(target).has_label is not fallback.has_label:
        with pytest.raises(ValueError, match=r"has_label: target must be int64, .* got torch.float32 on cpu"):
            backend_for(target).has_label(target.float(), 3)
