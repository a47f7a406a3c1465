"""The losses of independent logits: labels and dense targets, layouts, dtypes, tiles and look-up tables."""

import functools

import pytest
import torch
import torch._dynamo
from conftest import assert_close, assert_same
from sigmoid_cases import FLOATS, NAMES, grads, leaf

import focalkern as fk
from focalkern import reference


# ---- targets, layouts, dtypes --------------------------------------------------------------------------------------
def one_hot(labels, n_classes, ignore_index=-100):
    """The dense target of labels, and a mask of its counted elements."""
    counts = (labels != ignore_index).unsqueeze(1)
    classes = torch.arange(n_classes, device=labels.device).view(1, -1, *[1] * (labels.dim() - 1))
    return (labels.unsqueeze(1) == classes).double(), counts.expand(-1, n_classes, *[-1] * (labels.dim() - 1))


# Rows, pixels and voxels; fewer classes than a vector, and off the vector width.
@pytest.mark.parametrize("shape", [(7, 80), (5, 3, 4, 6), (3, 19, 2), (2, 1, 5), (600, 3), (2, 3, 2, 2, 300)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("name", NAMES)
def test_labels_are_one_hot_rows(device, shape, dtype, name):
    ignored = 255
    x = leaf(torch.randn(shape, device=device))
    labels = torch.randint(shape[1] + 1, (shape[0], *shape[2:]), device=device)  # the last is background
    labels[torch.rand(labels.shape, device=device) < 0.2] = ignored
    labels = labels.to(dtype)
    t, counts = one_hot(labels, shape[1], ignored)
    for layout in ("contiguous", "channels last"):
        z = leaf(x.movedim(1, -1).contiguous().movedim(-1, 1)) if layout == "channels last" else x
        function = functools.partial(getattr(fk, name), ignore_index=ignored)
        loss = function(z, labels)
        dense = leaf(z)
        expected = torch.where(counts, getattr(fk, name)(dense, t), 0.0)
        assert_close(loss, expected)
        upstream = torch.randn(shape, device=device)
        assert_close(grads(loss, z, upstream)[0], grads(expected, dense, upstream)[0])
        assert_close(function(z, labels, reduction="sum"), expected.sum())
        assert_close(function(z, labels, reduction="mean"), expected.sum() / counts.sum())
        (grad,) = grads(function(z, labels, reduction="mean"), z)
        assert_close(grad, grads(expected.sum() / counts.sum(), dense)[0])


def test_ignored_rows_count_nothing_whatever_they_hold(device):
    x = torch.randn(6, 70, device=device)
    x[1], x[4, 3] = float("nan"), float("inf")
    x = leaf(x)
    labels = torch.tensor([0, -100, 69, 70, -100, 5], device=device)
    loss = fk.sigmoid_focal_loss(x, labels, reduction="mean")
    assert_close(loss, fk.sigmoid_focal_loss(x[[0, 2, 3, 5]], labels[[0, 2, 3, 5]], reduction="mean"))
    (grad,) = grads(loss, x)
    assert (grad[[1, 4]] == 0).all()
    assert grad.isfinite().all()
    nothing = fk.sigmoid_focal_loss(x, torch.full_like(labels, -100), reduction="mean")
    assert nothing.isnan()
    assert (grads(nothing, x)[0] == 0).all()


def test_labels_of_one_row():
    x = torch.randn(4)
    expected = fk.sigmoid_focal_loss(x, torch.tensor([0, 0, 1, 0]))
    assert torch.equal(fk.sigmoid_focal_loss(x, torch.tensor(2)), expected)


@pytest.mark.parametrize("bad", [-1, 21, 2**32, 2**40, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("shape", [(900, 1), (900, 5), (900, 20), (90, 5, 10)])
def test_labels_out_of_range_name_their_row(bad, shape):
    labels = torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    labels.view(-1)[[1, 500]] = torch.tensor([shape[1], -100])
    x = torch.randn(shape)
    assert fk.sigmoid_focal_loss(x, labels).isfinite().all()
    labels.view(-1)[802] = bad
    message = rf"sigmoid_focal_loss: target must be in \[0, {shape[1]}\].*got {bad} at row 802"
    with pytest.raises(IndexError, match=message):
        fk.sigmoid_focal_loss(x, labels)


@pytest.mark.parametrize("ignored", [0, 2, "background"])
@pytest.mark.parametrize("shape", [(700, 3), (700, 8), (700, 9), (70, 5, 10)])
def test_a_class_may_be_ignored(shape, ignored):
    ignored = shape[1] if ignored == "background" else ignored
    x = leaf(torch.randn(shape))
    labels = torch.randint(shape[1] + 1, (shape[0], *shape[2:]))
    t, counts = one_hot(labels, shape[1], ignored)
    dense = leaf(x)
    for name in NAMES:
        loss = getattr(fk, name)(x, labels, ignore_index=ignored)
        expected = torch.where(counts, getattr(fk, name)(dense, t), 0.0)
        assert_close(loss, expected)
        upstream = torch.randn(shape)
        assert_close(grads(loss, x, upstream)[0], grads(expected, dense, upstream)[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS])
@pytest.mark.parametrize("logits", FLOATS)
def test_dense_targets_of_every_dtype(device, dtype, logits):
    x = leaf(torch.randn(9, 130, device=device).to(logits))
    hard = torch.randint(2, (9, 130), device=device).to(dtype)
    loss = fk.sigmoid_focal_loss(x, hard)
    expected = fk.sigmoid_focal_loss(x, hard.double())
    assert_same(loss, expected)
    assert_same(grads(loss, x)[0], grads(expected, x)[0])
    exact = reference.sigmoid_focal_loss(x.double(), hard.double())
    assert_close(loss, exact)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_hard_and_soft_tiles_agree(device, name, dtype):
    """If one target of a tile is soft, the whole tile takes the general formula."""
    for gamma in (2.0, 0.7):
        x = leaf((torch.randn(1000, device=device) * 6).to(dtype))
        t = torch.randint(2, (1000,), device=device).float()
        mixed = t.clone()
        mixed[::200] = 0.5
        same = mixed == t
        hard, soft = (getattr(fk, name)(x, v, gamma) for v in (t, mixed))
        assert_close(soft[same], hard[same])
        assert_close(grads(soft, x)[0][same], grads(hard, x)[0][same])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("nonzero", [1, 128, 144, 145, 700])
@pytest.mark.parametrize("together", [False, True])
def test_dense_targets_of_which_few_are_not_0(device, name, dtype, nonzero, together):
    """The CPU kernel treats an eighth of a tile of 1024 elements, and 16 more, as labels with scores."""
    scores = torch.zeros(1500, device=device)
    places = torch.arange(1024, device=device).flip(0) if together else torch.randperm(1024, device=device)
    scores[places[:nonzero]] = torch.rand(nonzero, device=device)
    scores[1100], scores[1200], scores[1300], scores[-1] = 1.0, 0.75, -0.0, 0.25
    t, exact_t = leaf(scores.to(dtype)), leaf(scores.to(dtype).double())
    x = leaf((torch.randn(1500, device=device) * 6).to(dtype))
    exact = leaf(x.double())
    loss, expected = getattr(fk, name)(x, t, 2.0), getattr(reference, name)(exact, exact_t, 2.0)
    assert_close(loss, expected)
    inputs, exact_inputs = ([x], [exact]) if name == "ia_bce_loss" else ([x, t], [exact, exact_t])
    for found, wanted in zip(grads(loss, inputs), grads(expected, exact_inputs), strict=True):
        assert_close(found, wanted)


def layouts(x):
    padded = torch.zeros(x.shape[0], x.shape[1] * 2, *x.shape[2:], dtype=x.dtype, device=x.device)
    padded[:, ::2] = x
    yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield x.movedim(1, -1).contiguous().movedim(-1, 1)
    yield padded[:, ::2]
    yield x.flip(-1).contiguous().flip(-1)
    yield x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layouts_give_the_same_as_the_contiguous_case(device, dtype):
    x = torch.randn(3, 5, 4, 30, device=device).to(dtype)
    t = torch.rand(3, 5, 4, 30, device=device)
    gamma = torch.rand(5, 1, 1, device=device)
    weight = torch.rand(3, 1, 1, 30, device=device)

    def results(x, t, labels):
        x = leaf(x)
        loss = fk.sigmoid_focal_loss(x, t, gamma, weight=weight)
        of_labels = fk.sigmoid_focal_loss(x, labels, weight=weight)
        upstream = torch.linspace(-1, 1, x.numel(), device=device).view(x.shape).to(x.dtype)
        return loss, *grads(loss, x, upstream), of_labels, *grads(of_labels, x, upstream)

    labels = torch.randint(6, (3, 4, 30), device=device)
    expected = results(x, t, labels)
    for z, s in zip(layouts(x), reversed(list(layouts(t))), strict=True):
        for actual, bits in zip(
            results(z, s, labels.transpose(1, 2).contiguous().transpose(1, 2)), expected, strict=True
        ):
            assert_same(actual, bits)
    # The gradient of an expanded input has its shape.
    one = torch.randn(1, 5, 1, 30, device=device)
    wide = one.expand(3, 5, 4, 30)
    assert_same(fk.sigmoid_focal_loss(wide, t), fk.sigmoid_focal_loss(wide.contiguous(), t))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_broadcast(device, name):
    x = torch.randn(6, 4, 5, device=device, dtype=torch.float64)
    t = torch.rand(6, 4, 5, device=device, dtype=torch.float64)
    upstream = torch.randn(6, 4, 5, device=device, dtype=torch.float64)
    for shape in [(), (1,), (5,), (4, 1), (6, 1, 5), (6, 4, 5)]:
        gamma = leaf(torch.rand(shape, device=device, dtype=torch.float64) * 3)
        weight = torch.rand(shape, device=device, dtype=torch.float64)
        full = leaf(gamma.expand(x.shape).clone())
        z, w = leaf(x), leaf(x)
        loss = getattr(fk, name)(z, t, gamma, weight=weight)
        expected = getattr(fk, name)(w, t, full) * weight
        assert_close(loss, expected)
        found = grads(loss, (z, gamma), upstream)
        in_full = grads(expected, (w, full), upstream)
        assert_close(found[0], in_full[0])
        assert found[1].shape == gamma.shape
        assert_close(found[1], in_full[1].sum_to_size(shape))


def test_every_gamma_of_the_asymmetric_loss_has_a_slope(device):
    x, t = torch.randn(8, 5, device=device, dtype=torch.float64), torch.rand(8, 5, device=device, dtype=torch.float64)
    gammas = [leaf(torch.rand(5, device=device, dtype=torch.float64) * 4) for _ in range(2)]
    loss = fk.asymmetric_loss(x, t, *gammas, 0.1)
    exact = reference.asymmetric_loss(x, t, *gammas, 0.1)
    assert_close(loss, exact)
    upstream = torch.randn(8, 5, device=device, dtype=torch.float64)
    for found, expected in zip(grads(loss, gammas, upstream), grads(exact, gammas, upstream), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_slope_in_the_target(device, name):
    x = torch.randn(50, device=device, dtype=torch.float64) * 3
    for gamma in (0.0, 1.5, 2.0):
        t = leaf(torch.rand(50, device=device, dtype=torch.float64))
        twin = leaf(t)
        loss = getattr(fk, name)(x, t, gamma)
        exact = getattr(reference, name)(x, twin, gamma)
        assert_close(grads(loss, t)[0], grads(exact, twin)[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_empty(device, dtype, name):
    for shape in [(0, 3), (4, 0), (0, 3, 5)]:
        x = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
        t = torch.empty(shape, device=device)
        assert getattr(fk, name)(x, t).shape == shape
        assert getattr(fk, name)(x, t, reduction="sum") == 0
        mean = getattr(fk, name)(x, t, reduction="mean")
        assert mean.isnan()
        assert grads(mean, x)[0].shape == shape


@pytest.mark.kernels
def test_the_same_bits_for_every_number_of_threads(device):
    x = leaf(torch.randn(300, 170, device=device))
    t = torch.rand(300, 170, device=device)
    labels = torch.randint(171, (300,), device=device)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            losses = [fk.sigmoid_focal_loss(x, v, reduction="sum") for v in (t, labels)]
            found.append([v for loss in losses for v in (loss, *grads(loss, x))])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gamma", [2.0, 0.7])
@pytest.mark.parametrize("threads", [1, 2])
def test_bfloat16_results_that_are_looked_up_are_those_that_are_computed(name, gamma, threads):
    """On one thread, large tensors use a table of results, but parts of them and tiles with a soft target do not."""
    rows, classes, ignored = 32768 * threads, 33, 255  # above 2^20 elements per thread
    x = (torch.randn(rows, classes) * 8).bfloat16()
    x[0, :5] = torch.tensor([0.0, -0.0, 1000.0, -1000.0, float("nan")])
    labels = torch.randint(2 * classes, (rows,)).clamp(max=classes)
    dense = torch.nn.functional.one_hot(labels, classes + 1)[:, :classes]
    some_soft = dense.float()
    some_soft[rows // 2] = 0.5
    labels[5:9] = ignored
    function = functools.partial(getattr(fk, name), ignore_index=ignored)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for target in (labels, dense.bfloat16(), dense.bool(), some_soft):
            whole, parts = leaf(x), leaf(x)
            loss = function(whole, target, gamma)
            expected = torch.cat(
                # Longer than a tile: a soft target changes the rounding of its neighbours in the tile.
                [function(z, t, gamma) for z, t in zip(parts.split(512), target.split(512), strict=True)]
            )
            assert torch.equal(loss.nan_to_num(), expected.nan_to_num())
            assert torch.equal(loss.isnan(), expected.isnan())
            found = grads(function(whole, target, gamma, reduction="sum"), whole)[0]
            assert torch.equal(found.nan_to_num(), grads(expected.sum(), parts)[0].nan_to_num())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gamma", [2.0, 3.0, 0.7])
# Labels along the classes, with parameters that are numbers or one per element. Every element may be a one, and a tile
# may have more ones than a vector.
@pytest.mark.parametrize("classes", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 80, 700, 1500])
def test_labels_along_the_classes_are_their_dense_target(name, gamma, classes):
    rows = 5000 // classes
    x = torch.randn(rows, classes) * 5
    x[0], x[-1] = float("nan"), float("inf")
    labels = torch.randint(classes + 1, (rows,))
    labels[0] = labels[-1] = -100
    dense = torch.nn.functional.one_hot(labels.clamp(min=0), classes + 1)[:, :classes].float()
    counts = (labels != -100)[:, None].expand(-1, classes)
    weight = torch.rand(classes)
    gammas = torch.full((classes,), gamma) + torch.rand(classes)
    for options in ({}, {"weight": weight}, {"gamma": gammas}):
        gamma_of = options.pop("gamma", gamma)
        of_labels, of_dense = leaf(x), leaf(x.where(counts, 0.0).double())
        found = getattr(fk, name)(of_labels, labels, gamma_of, **options)
        doubled = {key: value.double() for key, value in options.items()}
        exponents = gamma_of.double() if isinstance(gamma_of, torch.Tensor) else gamma_of
        expected = getattr(fk, name)(of_dense, dense.double(), exponents, **doubled) * counts
        assert_close(found, expected)
        upstream = torch.randn(rows, classes)
        assert_close(grads(found, of_labels, upstream)[0], grads(expected, of_dense, upstream.double())[0])
        assert_close(grads(found, of_labels)[0], grads(expected, of_dense)[0])


@pytest.mark.parametrize("name", NAMES)
def test_labels_of_one_byte_with_more_classes(device, name):
    x = torch.randn(2, 300, 3, 4, device=device)
    labels = torch.randint(256, (2, 3, 4), device=device)
    found = getattr(fk, name)(x, labels.byte())
    assert torch.equal(found, getattr(fk, name)(x, labels))
