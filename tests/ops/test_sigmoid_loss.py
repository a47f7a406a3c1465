"""The losses of independent logits against definitions at 300 digits, and their operators against themselves."""

import functools

import oracle
import pytest
import torch
import torch._dynamo
from conftest import assert_close, no_waiting

import focalkern as fk
from focalkern import reference

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAMES = ["sigmoid_focal_loss", "asymmetric_loss", "quality_focal_loss"]
# Far beyond where exp under- and overflows in float32 and float64, where 1 - p rounds to 1, and the middle.
SCORES = [-1000.0, -745.0, -100.0, -88.0, -17.0, -3.0, -0.5, 0.0, 0.25, 2.0, 17.0, 90.0, 104.0, 800.0, 1000.0]
SHARES = [0.0, 1.0, 0.3, 0.75, 2.0**-20, 1 - 2.0**-20]


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def grads(loss, inputs, upstream=None):
    upstream = torch.ones_like(loss) if upstream is None else upstream
    return torch.autograd.grad(loss, inputs, upstream, retain_graph=True)


# ---- values --------------------------------------------------------------------------------------------------------


def check_at_many_digits(function, definition, dtype, device):
    """Value and slopes in the logit and in the gammas, for every score and share."""
    pairs = [(x, t) for x in SCORES for t in SHARES]
    x, t = (torch.tensor(list(column), dtype=dtype, device=device) for column in zip(*pairs, strict=True))
    x = leaf(x)
    with oracle.precision():
        expected = [definition(x, t) for x, t in pairs]
        slopes = [oracle.gradient(lambda v, t=t: definition(v[0], t), [x])[0] for x, t in pairs]
    loss = function(x, t)
    assert loss.isfinite().all()
    assert_close(loss, torch.tensor([float(v) for v in expected], dtype=torch.float64))
    (slope,) = grads(loss, x)
    assert slope.isfinite().all()
    assert_close(slope, torch.tensor([float(v) for v in slopes], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
# Cross-entropy, a steep slope at u = 0, the common small powers, and one that is none.
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.0, 3.5])
def test_sigmoid_focal_loss_at_300_digits(device, dtype, gamma):
    for alpha in (None, 0.25):
        check_at_many_digits(
            lambda x, t, alpha=alpha: fk.sigmoid_focal_loss(x, t, gamma, alpha),
            lambda x, t, alpha=alpha: oracle.sigmoid_focal(x, t, gamma, alpha),
            dtype,
            device,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gammas", [(4.0, 1.0), (0.0, 0.0), (0.3, 2.5)])
def test_asymmetric_loss_at_300_digits(device, dtype, gammas):
    for margin in (0.0, 0.0625, 0.4375):  # exact in float32, and at no score equal to p, where the slope jumps
        check_at_many_digits(
            lambda x, t, margin=margin: fk.asymmetric_loss(x, t, *gammas, margin),
            lambda x, t, margin=margin: oracle.asymmetric(x, t, *gammas, margin),
            dtype,
            device,
        )


@pytest.mark.parametrize("dtype", FLOATS)
# Halves and doubles of 1, its neighbours, numbers with one bit, zeros of both signs; what is no share at all.
@pytest.mark.parametrize("share", [0.5, 2.0, 0.75, 1.5, "below", "above", 2.0**-14, -0.0, -1.0, -2.0, float("-inf")])
def test_one_soft_target_among_hard_ones_is_seen(dtype, share):
    eps = torch.finfo(dtype).eps
    share = {"below": 1 - eps / 2, "above": 1 + eps}.get(share, share)
    x, t = torch.randn(1100).to(dtype), torch.randint(2, (1100,)).to(dtype)
    for at in (0, 700, 1099):  # in whole tiles and in the last
        t_with = t.clone()
        t_with[at] = share
        for function in (fk.sigmoid_focal_loss, fk.asymmetric_loss, fk.quality_focal_loss):
            found, expected = function(x, t_with), function(x, t)
            alone = function(x[at : at + 1].double(), t_with[at : at + 1].double())
            assert_close(found[at : at + 1], alone)
            expected[at] = found[at]
            assert_close(found, expected.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.5, 2.0])
def test_quality_focal_loss_at_300_digits(device, dtype, beta):
    check_at_many_digits(
        lambda x, t: fk.quality_focal_loss(x, t, beta), lambda x, t: oracle.quality(x, t, beta), dtype, device
    )


def test_alpha_and_gamma_per_class_at_300_digits(device):
    alpha = torch.tensor([0.1, 0.5, 0.9, 0.25], dtype=torch.float64, device=device)
    gamma = torch.tensor([0.0, 0.3, 2.0, 5.0], dtype=torch.float64, device=device)
    x = torch.tensor([[-1000.0, 3.0, 0.5, 1000.0], [1000.0, -40.0, 0.0, -1000.0]], device=device)
    t = torch.tensor([[0.0, 1.0, 0.5, 1.0], [1.0, 1.0, 0.25, 0.0]], device=device)
    found = fk.sigmoid_focal_loss(x, t, gamma, alpha)
    with oracle.precision():
        expected = [
            [float(oracle.sigmoid_focal(*v)) for v in zip(*rows, gamma.tolist(), alpha.tolist(), strict=True)]
            for rows in zip(x.tolist(), t.tolist(), strict=True)
        ]
    assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_slope_in_gamma_at_300_digits(device):
    x = torch.tensor(SCORES, device=device, dtype=torch.float64)
    for t in (0.0, 1.0, 0.3):
        for gamma in (0.3, 2.0):
            g = leaf(torch.tensor(gamma, dtype=torch.float64, device=device).expand(len(SCORES)).clone())
            for function, definition in (
                (fk.sigmoid_focal_loss, lambda v, x, t: oracle.sigmoid_focal(x, t, v[0], 0.25)),
                (fk.quality_focal_loss, lambda v, x, t: oracle.quality(x, t, v[0])),
                (fk.asymmetric_loss, lambda v, x, t: oracle.asymmetric(x, t, v[0], 1.0, 0.05)),
            ):
                (found,) = grads(function(x, torch.full_like(x, t), g), g)
                with oracle.precision():
                    expected = [
                        float(oracle.gradient(lambda v, x=x, d=definition, t=t: d(v, x, t), [gamma])[0]) for x in SCORES
                    ]
                assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_finite_at_every_logit(device, dtype, name):
    magnitudes = torch.cat([torch.linspace(80, 110, 61), torch.linspace(700, 750, 51), torch.tensor([1e4, 6e4])])
    x = leaf(torch.cat([magnitudes, -magnitudes, torch.zeros(1)]).to(device, dtype))
    for gamma in (0.0, 0.3, 2.0):
        for t in (0.0, 1.0, 0.5):
            loss = getattr(fk, name)(x, torch.full_like(x, t), gamma)
            assert loss.dtype == dtype
            assert loss.isfinite().all()
            assert grads(loss, x)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.5])  # hard targets, and a soft one that makes all others soft, too
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_slopes_at_enormous_logits(device, dtype, share, sign):
    """A probability of 0 times any logit is 0, up to half of the largest number."""
    sizes = torch.tensor([1e4, 1e30, 1e36, 1e37, 1e38, 1.6e38], dtype=dtype, device=device)
    if dtype == torch.float64:
        sizes = sizes**8
    x = leaf(sign * torch.cat([sizes, sizes]))
    t = torch.zeros_like(x)
    t[6:] = 1
    t[0] = share
    # Where sigmoid(x) is 1, the distance to the target t is 1 - t; where it is 0, it is t. The loss is linear there.
    distance = 1 - t if sign > 0 else t
    for function, expected in (
        (lambda: fk.sigmoid_focal_loss(x, t, 2.0, 0.25), (0.25 * t + 0.75 * (1 - t)) * distance**3),
        (lambda: fk.quality_focal_loss(x, t, 2.0), distance**3),
        (lambda: fk.asymmetric_loss(x, t, 4.0, 1.0, 0.0), distance),
    ):
        (slope,) = grads(function(), x)
        assert_close(slope, sign * expected.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.25, 0.9])  # of the largest number: gamma |x| is beyond it
@pytest.mark.parametrize("gamma", [5.0, 100.0])
@pytest.mark.parametrize("name", NAMES)
def test_derivatives_where_gamma_times_the_logit_overflows(device, dtype, size, gamma, name):
    """There p is 0 or 1, so that with A the share of the other side the loss is A^gamma A |x|, asymmetric A |x|."""
    share = torch.tensor([0.3, 0.75, 0.999, 0.999], dtype=dtype, device=device)
    x = leaf(torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=dtype, device=device) * size * torch.finfo(dtype).max)
    against = torch.where(x > 0, 1 - share, share).detach().double()
    power = 1.0 if name == "asymmetric_loss" else against**gamma
    options = {"sigmoid_focal_loss": {"alpha": None}, "asymmetric_loss": {"margin": 0.0}}.get(name, {})
    for differentiable in (False, True):
        t, number = share.clone().requires_grad_(differentiable), leaf(torch.tensor(gamma, dtype=dtype))
        loss = getattr(fk, name)(x, t, number, **options)
        assert_close(loss / x.abs(), power * against)
        inputs = [x, number, *([t] if differentiable else [])]
        for again in (False, True):  # by the kernel, and by the definition that is differentiated again
            slopes = torch.autograd.grad(loss.sum(), inputs, retain_graph=True, create_graph=again)
            assert_close(slopes[0], x.detach().sign().double() * power * against)
            assert not any(slope.isnan().any() for slope in slopes)
        (second,) = torch.autograd.grad(slopes[0].sum(), x)
        assert (second == 0).all()


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 0x7FC00000), (torch.float64, 0x7FF8000000000000)])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 2.0, 7.0])
def test_every_nan_stays_nan(dtype, bits, gamma):
    """Also those with a payload, which the exponential of a hard target's loss takes for numbers."""
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    nans = torch.tensor([bits + k for k in (0, 1, 2, 3, 255, 12345)] + [-1], dtype=integer).view(dtype)
    for share in (0.0, 1.0, 0.5):
        x = leaf(nans.repeat(3))
        loss = fk.sigmoid_focal_loss(x, torch.full_like(x, share), gamma)
        assert loss.isnan().all()
        assert grads(loss, x)[0].isnan().all()


@pytest.mark.parametrize("reduction", ["sum", "none"])
# Around the blocks (64) and tiles (512) of the CPU's loops.
@pytest.mark.parametrize("size", [63, 64, 65, 511, 512, 513, 577, 1024, 1087])
def test_every_element_of_a_tile_counts(size, reduction):
    x, target = torch.randn(size) * 5, (torch.rand(size) < 0.3).float()
    values = []
    for dtype in (torch.float32, torch.float64):
        logits = leaf(x.to(dtype))
        loss = fk.sigmoid_focal_loss(logits, target.to(dtype), reduction=reduction)
        values.append((loss.detach(), *grads(loss, logits)))
    for found, expected in zip(*values, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_targets_outside_of_0_and_1_are_nan(device, name):
    x = torch.randn(5, device=device, requires_grad=True)
    loss = getattr(fk, name)(x, torch.tensor([0.5, -0.1, 1.5, float("nan"), 1.0], device=device))
    assert loss.isnan().tolist() == [False, True, True, True, False]
    assert grads(loss, x)[0].isnan().tolist() == [False, True, True, True, False]


def test_without_gamma_it_is_binary_cross_entropy(device):
    x, t = torch.randn(40, device=device, dtype=torch.float64) * 5, torch.rand(40, device=device, dtype=torch.float64)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(x, t, reduction="none")
    assert_close(fk.sigmoid_focal_loss(x, t, 0.0, None), expected)
    assert_close(fk.quality_focal_loss(x, t, 0.0), expected)
    assert_close(fk.asymmetric_loss(x, t, 0.0, 0.0, 0.0), expected)


@pytest.mark.parametrize("alpha", [float("nan"), -0.5, -1.0])
def test_alpha_of_a_tensor_without_dimensions_counts_whatever_it_is(device, alpha):
    """It is handed over as a number, of which none means no alpha."""
    x, labels = torch.randn(7, 33, device=device), torch.randint(34, (7,), device=device)
    for target in (torch.rand(7, 33, device=device), torch.randint(2, (7, 33), device=device), labels):
        found, expected = leaf(x), leaf(x.double())
        loss = fk.sigmoid_focal_loss(found, target, alpha=torch.tensor(alpha))
        exact = reference.sigmoid_focal_loss(expected, target, alpha=torch.tensor(alpha))
        assert_close(loss, exact)
        assert_close(grads(loss, found)[0], grads(exact, expected)[0])


# ---- targets, layouts, dtypes --------------------------------------------------------------------------------------


def one_hot(labels, n_classes, ignore_index=-100):
    """The dense target that labels stand for, and which of its elements count."""
    counts = (labels != ignore_index).unsqueeze(1)
    classes = torch.arange(n_classes, device=labels.device).view(1, -1, *[1] * (labels.dim() - 1))
    return (labels.unsqueeze(1) == classes).double(), counts.expand(-1, n_classes, *[-1] * (labels.dim() - 1))


# Rows, pixels and voxels; fewer classes than a vector, and off its width.
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
    assert torch.equal(loss, expected)
    assert torch.equal(grads(loss, x)[0], grads(expected, x)[0])
    exact = reference.sigmoid_focal_loss(x.double(), hard.double())
    assert_close(loss, exact)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_hard_and_soft_tiles_agree(device, name, dtype):
    """A tile with one soft target takes the general formula for all of it."""
    for gamma in (2.0, 0.7):
        x = leaf((torch.randn(1000, device=device) * 6).to(dtype))
        t = torch.randint(2, (1000,), device=device).float()
        mixed = t.clone()
        mixed[::200] = 0.5
        same = mixed == t
        hard, soft = (getattr(fk, name)(x, v, gamma) for v in (t, mixed))
        assert_close(soft[same], hard[same])
        assert_close(grads(soft, x)[0][same], grads(hard, x)[0][same])


def layouts(x):
    padded = torch.zeros(x.shape[0], x.shape[1] * 2, *x.shape[2:], dtype=x.dtype, device=x.device)
    padded[:, ::2] = x
    yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield x.movedim(1, -1).contiguous().movedim(-1, 1)
    yield padded[:, ::2]
    yield x.flip(-1).contiguous().flip(-1)
    yield x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layouts_give_the_bits_of_the_contiguous_case(device, dtype):
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
            assert torch.equal(actual, bits)
    # An expanded input has a gradient of its own shape.
    one = torch.randn(1, 5, 1, 30, device=device)
    wide = one.expand(3, 5, 4, 30)
    assert torch.equal(fk.sigmoid_focal_loss(wide, t), fk.sigmoid_focal_loss(wide.contiguous(), t))


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
    """Large tensors of one thread look them up; parts of them do not, nor does a tile with a soft target."""
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
                # As long as tiles: a soft target changes how its neighbours in the tile are rounded.
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
# Labels along the classes, with parameters that are numbers and such that each element has its own; every element may
# be a one, and a tile may have more of them than a vector.
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


# ---- derivatives and transforms ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gamma", [0.0, 0.7, 2.0])
def test_first_and_second_derivatives(device, name, gamma):
    x = leaf(torch.randn(4, 3, device=device, dtype=torch.float64) * 2)
    soft = torch.rand(4, 3, device=device, dtype=torch.float64)
    labels = torch.tensor([0, 3, 2, -100], device=device)
    g = leaf(torch.full((3,), gamma + 0.1, device=device, dtype=torch.float64))
    function = getattr(fk, name)
    for t in (soft, soft.round(), labels):
        assert torch.autograd.gradcheck(lambda x, t=t: function(x, t, gamma), x)
        assert torch.autograd.gradgradcheck(lambda x, t=t: function(x, t, gamma), x)
        assert torch.autograd.gradcheck(lambda x, g, t=t: function(x, t, g, reduction="mean"), (x, g))
        assert torch.autograd.gradgradcheck(lambda x, g, t=t: function(x, t, g, reduction="mean"), (x, g))
    assert torch.autograd.gradgradcheck(lambda t: function(x, t, gamma), leaf(soft))


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_of_saturated_logits_are_finite(device, name):
    for dtype in (torch.float32, torch.float64):
        x = leaf(torch.tensor(SCORES, dtype=dtype, device=device))
        for gamma in (0.0, 0.3, 2.0):
            for t in (0.0, 1.0, 0.5):
                loss = getattr(fk, name)(x, torch.full_like(x, t), gamma)
                (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
                assert slope.isfinite().all()
                (curvature,) = torch.autograd.grad(slope.sum(), x)
                assert curvature.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_that_is_differentiated_again_is_that_of_the_kernel(device, name):
    x = leaf(torch.randn(30, 4, device=device, dtype=torch.float64) * 4)
    t = torch.rand(30, 4, device=device, dtype=torch.float64)
    t[:10] = t[:10].round()
    for gamma in (0.5, 2.0):
        loss = getattr(fk, name)(x, t, gamma, reduction="mean")
        (kernel,) = torch.autograd.grad(loss, x, retain_graph=True)
        (composite,) = torch.autograd.grad(loss, x, create_graph=True)
        assert_close(composite, kernel)


# torch's own decompositions still use torch.jit.script, whose deprecation is torch's matter.
@pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script")
@pytest.mark.parametrize("name", NAMES)
def test_function_transforms(device, name):
    x = torch.randn(3, 6, 4, dtype=torch.float64, device=device)
    t = torch.rand(3, 6, 4, dtype=torch.float64, device=device)
    function = functools.partial(getattr(fk, name), reduction="mean")
    found = torch.func.vmap(torch.func.grad(function))(x, t)
    z = leaf(x)
    expected = torch.stack([grads(function(z[i], t[i]), z)[0][i] for i in range(3)])
    assert_close(found, expected)
    direction = torch.randn_like(x[0])
    _, slope = torch.func.jvp(lambda z: function(z, t[0]), (x[0],), (direction,))
    assert_close(slope, (expected[0] * direction).sum())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[0], direction)
        tangent = torch.autograd.forward_ad.unpack_dual(function(dual, t[0])).tangent
    assert_close(tangent, slope)
    hessian = torch.func.hessian(lambda z: function(z, t[0, :1]))(x[0, :1])
    assert hessian.isfinite().all()


# ---- compile, export -----------------------------------------------------------------------------------------------


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["function", "module"])
def test_compiles_as_one_graph_without_recompilation_when_gamma_and_alpha_change(device, dynamo, kind):
    x = torch.randn(6, 5, device=device, requires_grad=True)
    t = torch.rand(6, 5, device=device)
    module = fk.SigmoidFocalLoss()

    def step(x, t, gamma, alpha):
        if kind == "function":
            return fk.sigmoid_focal_loss(x * 2, t, gamma, alpha, "sum")
        return module(x * 2, t)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    # torch takes every number for a constant until it sees a second value: that one change costs a compilation.
    for gamma, alpha in ((3.0, 0.1), (2.5, 0.3)):
        module.gamma, module.alpha = gamma, alpha
        compiled(x, t, gamma, alpha)
    with dynamo.config.patch(error_on_recompile=True):
        for gamma in (2.0, 0.5, 0.0, 3.25, 1.0, 4.0, 5.0, 6.0, 7.0):
            alpha = gamma / 10 + 0.05
            module.gamma, module.alpha = gamma, alpha
            loss, expected = compiled(x, t, gamma, alpha), step(x, t, gamma, alpha)
            assert_close(loss, expected)
            assert_close(grads(loss, x)[0], grads(expected, x)[0])


@pytest.mark.parametrize("module", [fk.SigmoidFocalLoss(0.5), fk.AsymmetricLoss(), fk.QualityFocalLoss()])
def test_modules_compile_and_export(device, dynamo, module):
    x = torch.randn(6, 5, device=device, requires_grad=True)
    for t in (torch.rand(6, 5, device=device), torch.randint(6, (6,), device=device)):
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        loss = compiled(x, t)
        assert_close(loss, module(x, t))
        assert_close(grads(loss, x)[0], grads(module(x, t), x)[0])
        exported = torch.export.export(module, (x, t))
        assert_close(exported.module()(x, t), module(x, t))


def test_compiles_with_dynamic_shapes(device, dynamo):
    compiled = torch.compile(fk.sigmoid_focal_loss, fullgraph=True, backend="aot_eager", dynamic=True)
    with dynamo.config.patch(error_on_recompile=True):
        for n in (4, 9, 17):
            x = torch.randn(n, 5, device=device, requires_grad=True)
            t = torch.rand(n, 5, device=device)
            loss = compiled(x, t)
            assert_close(loss, fk.sigmoid_focal_loss(x, t))
            loss.sum().backward()
            assert x.grad.isfinite().all()


@pytest.mark.kernels
def test_opcheck(device):
    x = torch.randn(6, 5, 2, device=device, requires_grad=True)
    soft = torch.rand(6, 5, 2, device=device, requires_grad=True)
    labels = torch.randint(6, (6, 2), device=device)
    number = torch.tensor(2.0, dtype=torch.float64)
    gamma = torch.rand(5, 1, device=device, requires_grad=True)
    forward = torch.ops.focalkern.sigmoid_loss_forward.default
    channels_last = leaf(x.movedim(1, -1).contiguous().movedim(-1, 1))
    for arguments in [
        (x, soft, number, torch.tensor(0.25, dtype=torch.float64), None, 0, 0.0, 1, -100, False),
        (x, labels, gamma, None, torch.rand(2, device=device), 0, 0.0, 0, -100, False),
        (x, soft, gamma, torch.rand(2, device=device, requires_grad=True), None, 1, 0.05, 2, -100, False),
        (channels_last, soft, number, None, None, 2, 0.0, 0, -100, False),
        (x.detach().bfloat16().requires_grad_(), soft, gamma, None, None, 2, 0.0, 0, -100, True),
    ]:
        torch.library.opcheck(forward, arguments)
    grad = torch.randn(6, 5, 2, device=device)
    arguments = (grad, x.detach(), soft.detach(), gamma.detach(), None, None, torch.ones(1, device=device), 2, 0.0, 0)
    torch.library.opcheck(
        torch.ops.focalkern.sigmoid_loss_backward.default, (*arguments, -100, [True, True, True, False])
    )


def test_autocast_and_meta(device):
    x = torch.randn(64, 40, device=device).bfloat16().requires_grad_()
    t = torch.rand(64, 40, device=device)
    for reduction in ("none", "mean"):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = fk.quality_focal_loss(x, t, reduction=reduction)
        assert loss.dtype == torch.float32
        assert_close(loss, reference.quality_focal_loss(x.double(), t.double(), reduction=reduction))
        assert grads(loss, x)[0].dtype == torch.bfloat16
    z = torch.empty(4, 5, device="meta", requires_grad=True)
    loss = fk.asymmetric_loss(z, torch.empty(4, dtype=torch.int64, device="meta"))
    assert loss.shape == (4, 5)
    assert grads(loss, z)[0].shape == (4, 5)


def test_cuda_step_does_not_wait_for_the_device(cuda):
    x, t = torch.randn(64, 10, device=cuda, requires_grad=True), torch.rand(64, 10, device=cuda)
    labels, gamma = torch.randint(11, (64,), device=cuda), torch.rand(10, device=cuda)
    fk.sigmoid_focal_loss(x, t, reduction="mean").backward()
    with no_waiting():
        for target in (t, labels):
            for g in (2.0, gamma):
                fk.sigmoid_focal_loss(x, target, g, reduction="mean").backward()


def test_cuda_graph_capture(cuda):
    x, labels = torch.randn(64, 10, device=cuda, requires_grad=True), torch.randint(11, (64,), device=cuda)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fk.sigmoid_focal_loss(x, labels, reduction="mean").backward()
    torch.cuda.current_stream().wait_stream(stream)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = fk.sigmoid_focal_loss(x, labels, reduction="mean")
        loss.backward()
    with torch.no_grad():
        x.copy_(torch.randn(64, 10, device=cuda))
    graph.replay()
    twin = leaf(x)
    expected = fk.sigmoid_focal_loss(twin, labels, reduction="mean")
    assert_close(loss, expected)
    assert_close(x.grad, grads(expected, twin)[0])


# ---- modules and errors --------------------------------------------------------------------------------------------


def test_modules_are_their_functions(device):
    x, t = torch.randn(6, 5, device=device), torch.randint(6, (6,), device=device)
    weight = torch.rand(5, device=device)
    pairs = [
        (
            fk.SigmoidFocalLoss(1.5, 0.3, "sum", weight=weight),
            fk.sigmoid_focal_loss(x, t, 1.5, 0.3, "sum", weight=weight),
        ),
        (fk.AsymmetricLoss(3.0, 0.5, 0.1), fk.asymmetric_loss(x, t, 3.0, 0.5, 0.1, "mean")),
        (fk.QualityFocalLoss(1.0, ignore_index=2), fk.quality_focal_loss(x, t, 1.0, "mean", ignore_index=2)),
    ]
    for module, expected in pairs:
        assert torch.equal(module.to(device)(x, t), expected)


def test_parameters_of_modules_train_and_are_saved():
    gamma = torch.nn.Parameter(torch.full((5,), 2.0))
    module = fk.SigmoidFocalLoss(gamma, torch.full((5,), 0.25))
    assert [name for name, _ in module.named_parameters()] == ["gamma"]
    module(torch.randn(3, 5), torch.rand(3, 5)).backward()
    assert gamma.grad.isfinite().all()
    twin = fk.SigmoidFocalLoss(torch.nn.Parameter(torch.zeros(5)), torch.zeros(5))
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin.gamma, gamma)
    assert torch.equal(twin.alpha, module.alpha)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, t: fk.sigmoid_focal_loss(x, t, -1.0), ValueError, r"sigmoid_focal_loss: gamma must be at least 0"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, "2"), TypeError, r"gamma must be a number or a tensor, got str"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, alpha=1.5), ValueError, r"alpha must be in \[0, 1\], got 1.5"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, float("nan")), ValueError, r"gamma must be finite, got nan"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, torch.ones(4)), ValueError, r"gamma must be broadcastable to input"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, weight=torch.ones(2, 1)), ValueError, r"weight must be broadcast"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, weight=[1.0]), TypeError, r"weight must be a tensor, got list"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, reduction="avg"), ValueError, r"reduction must be"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, alpha=torch.ones(5).requires_grad_()), ValueError, r"alpha must not"),
        (lambda x, t: fk.asymmetric_loss(x, t, margin=1.0), ValueError, r"asymmetric_loss: margin must be in \[0, 1\)"),
        (lambda x, t: fk.asymmetric_loss(x, t, 1.0, -1.0), ValueError, r"asymmetric_loss: gamma_positive must be at"),
        (lambda x, t: fk.quality_focal_loss(x, t, -2.0), ValueError, r"quality_focal_loss: beta must be at least 0"),
        (lambda x, t: fk.quality_focal_loss(x, t[0]), ValueError, r"target must be the shape of input = \[3, 5\]"),
        (lambda x, t: fk.quality_focal_loss(x, t[0].long()), ValueError, r"shape of input without its class dimens"),
        (lambda x, t: fk.quality_focal_loss(x, t.cfloat()), TypeError, r"target must be floating point, bool or int"),
        (lambda x, t: fk.sigmoid_focal_loss(x, t, ignore_index=1.5), TypeError, r"ignore_index must be an int"),
        (lambda x, t: fk.AsymmetricLoss(gamma_negative=-1), ValueError, r"AsymmetricLoss: gamma_negative must be at"),
        (lambda x, t: fk.AsymmetricLoss(margin=1), ValueError, r"AsymmetricLoss: margin must be below 1"),
        (lambda x, t: fk.SigmoidFocalLoss(torch.tensor(-1.0)), ValueError, r"gamma must be finite and at least 0"),
        (lambda x, t: fk.QualityFocalLoss(weight=torch.ones(5).long()), TypeError, r"weight must be floating point"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(3, 5), torch.rand(3, 5))
