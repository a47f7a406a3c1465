"""The losses that share the focal loss's kernels against their definitions, in every layout and dtype, with kernels and
in plain torch.
Their definitions at 300 digits and their options are in test_losses.py.
"""

import math

import oracle
import pytest
import torch
from conftest import assert_close
from mpmath import mpf
from row_loss_cases import LOSSES, SPECS, near

import focalkern as fk
from focalkern import reference
from focalkern.reference._softmax_losses import number_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
COMPILED = fk.build_info()["kernels"] == "compiled"
TABLE = fk.GammaTable([0.0, 0.1, 0.5, 1.0], [4.0, 0.0, 2.5])


def check(name, z, target, **options):
    """Compares value and gradient with the float64 reference, for a random upstream gradient."""
    loss, defined = LOSSES[name]
    z = z.detach().requires_grad_()
    found = loss(z, target, reduction="none", **options)
    upstream = torch.randn(found.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(found, z, upstream.to(found.dtype))
    exact = z.detach().double().requires_grad_()
    weight = options.get("weight")
    wide = {**options, "weight": weight.double()} if weight is not None else options
    target = target.double() if target.is_floating_point() else target.long()
    expected = defined(exact, target, reduction="none", **wide)
    (slope,) = torch.autograd.grad(expected, exact, upstream.to(found.dtype).double())
    # Half-precision logits are exact in float64, and the gradient of a sample has the magnitude of its upstream
    # gradient.
    factor = 20 if z.dtype in (torch.float32, torch.float64) else 2
    near(found, expected, factor=factor)
    near(gradient, slope, factor=factor)
    if COMPILED:  # plain torch gives a gradient the layout of its last operation
        assert gradient.stride() == z.stride() or not z.is_contiguous()
    return found, gradient


# Classes below and above a vector, a tile of few classes (32) and a block of a long row (4096), and off their
# multiples.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("classes", [1, 2, 10, 31, 33, 100, 4099, 9001])
def test_rows_of_every_length(name, dtype, classes):
    n = 70 if classes < 1000 else 5
    z = (3 * torch.randn(n, classes)).to(dtype)
    target = torch.randint(classes, (n,))
    target[::2] = z.argmax(1)[::2]
    check(name, z, target)


# Few classes, where vectors run across rows; more than a vector; more than a block of a long row.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("classes", [3, 40, 5000])
def test_class_of_weight_zero_adds_nothing_even_where_it_cannot_occur(device, name, dtype, classes):
    n = 70 if classes < 1000 else 6
    z, target = (3 * torch.randn(n, classes, device=device)).to(dtype), torch.randint(classes, (n,), device=device)
    target[::3] = 1
    left_out = target == 1
    z[left_out, 1] = -math.inf
    z.requires_grad_()
    weight = torch.rand(classes, device=device) + 0.5
    weight[1] = 0
    loss, _ = LOSSES[name]
    losses = loss(z, target, reduction="none", weight=weight)
    assert (losses[left_out] == 0).all()
    mean, rest = loss(z, target, weight=weight), loss(z[~left_out], target[~left_out], weight=weight)
    near(mean, rest, factor=4)
    (gradient,) = torch.autograd.grad(mean, z)
    assert (gradient[left_out] == 0).all()
    near(gradient[~left_out], torch.autograd.grad(rest, z)[0][~left_out], factor=4)
    with torch.no_grad():
        z[0, 0] = math.nan
    assert loss(z, target, reduction="none", weight=weight)[0].isnan()


def as_slices(z):
    return torch.cat([z, z], 1)[:, : z.shape[1]]


def as_pixels(z):  # [2, classes, 1, rows / 2]
    return z.reshape(2, -1, 1, z.shape[1]).permute(0, 3, 2, 1).contiguous()


def as_channels_last(z):
    return as_pixels(z).to(memory_format=torch.channels_last)


# Below and above words of four classes, or of eight in half precision; 32, above which labels are not compared with
# every class; 64 and 128, up to which rows are processed as one run; 256, the largest size.
ROWS = [16, 38, 64, 82]
CLASSES = [2, 3, 4, 5, 7, 8, 9, 10, 13, 16, 17, 31, 32, 33, 40, 55, 63, 64, 65, 97, 127, 128, 129, 255, 256, 257]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [torch.clone, as_slices, as_pixels, as_channels_last])
def test_rows_that_are_taken_together(layout, dtype, name):
    for i, classes in enumerate(CLASSES):
        rows = ROWS[i % len(ROWS)]
        z = layout(3 * torch.randn(rows, classes)).to(dtype)
        target = torch.randint(classes, (rows,))
        target[[0, 1, 3, rows - 1]] = torch.tensor([0, classes - 1, -100, 0])  # the first number, an ignored row
        check(name, z, target.reshape(2, 1, -1) if z.dim() == 4 else target)


# Sums relative to the target's logit may reach e^16.
@pytest.mark.parametrize("classes", [10, 50, 200, 1000, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSES)
def test_targets_of_any_probability(name, dtype, classes):
    below = torch.tensor([0.0, 1, 8, 11, 13, 15, 15.9, 16, 17, 20, 40, 80, 87, 88, 89, 100, 300, 705, 800, 9000, -90])
    z = torch.randn(len(below), classes)
    target = torch.randint(classes, (len(below),))
    rows = torch.arange(len(below))
    z[rows, target] = z.max(1).values - below
    z[:8, :3] = -below[-3]  # far below all targets
    target[:8].clamp_(min=3)
    check(name, z.to(dtype), target)
    check(name, z[3:].to(dtype), target[3:])
    one_by_one = [check(name, z[i : i + 1].to(dtype), target[i : i + 1])[0] for i in range(len(below))]
    assert torch.cat(one_by_one).isfinite().all()


@pytest.mark.parametrize("classes", [5, 19, 100])
def test_any_nan_stays_nan_in_half_precision(classes):
    """Includes a NaN with all bits set, which rounding by addition would turn into a number."""
    odd = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    target = torch.arange(40) % classes
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        z = torch.randn(40, classes, dtype=dtype, requires_grad=True)
        (gradient,) = torch.autograd.grad(fk.focal_loss(z, target, weight=odd.expand(classes)), z)
        assert gradient.isnan().all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("classes", [5, 40])
def test_layouts(name, classes):
    sources = [
        torch.randn(2, classes, 37),
        torch.randn(3, 35, classes).transpose(1, 2),
        torch.randn(classes, 70).t(),
        torch.randn(70, classes + 3)[:, :classes],
        torch.randn(2, classes, 3, 7).to(memory_format=torch.channels_last),
        torch.randn(5, 4, classes, 3).permute(1, 2, 3, 0),
        torch.randn(classes),
    ]
    for z in sources:
        shape = z.shape[:1] + z.shape[2:] if z.dim() > 1 else ()
        target = torch.randint(classes, shape)
        check(name, z, target)
        if SPECS[name].soft_target:
            check(name, z, torch.empty_like(z).copy_(torch.randn(z.shape).softmax(min(1, z.dim() - 1))))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_options_beside_the_reference(name, smoothing):
    z = 2 * torch.randn(50, 12)
    target = torch.randint(12, (50,), dtype=torch.int32)
    target[::7] = 3
    for weight in (None, torch.rand(12)):
        found, gradient = check(name, z, target, weight=weight, ignore_index=3, label_smoothing=smoothing)
        assert (found[target == 3] == 0).all()
        assert (gradient[target == 3] == 0).all()
        if SPECS[name].soft_target:
            check(name, z, torch.randn(50, 12).softmax(1), weight=weight, label_smoothing=smoothing)


def test_forms_of_gamma_of_the_poly_focal_loss():
    z, target = 2 * torch.randn(40, 6), torch.randint(6, (40,))
    for gamma in (0.0, 1.0, torch.tensor(1.5), 3 * torch.rand(40), TABLE):
        wide = gamma.double() if isinstance(gamma, torch.Tensor) else gamma
        expected = reference.poly_focal_loss(z.double(), target, wide, 0.7, reduction="none")
        near(fk.poly_focal_loss(z, target, gamma, 0.7, reduction="none"), expected, factor=2)
    found = fk.poly_focal_loss(z[:2], target[:2], torch.tensor([-0.5, 0.5]), reduction="none")
    assert found.isnan().tolist() == [True, False]
    no_poly = fk.poly_focal_loss(z, target, 2.0, 0.0)
    assert_close(no_poly, fk.focal_loss(z.double(), target, 2.0))


@pytest.mark.parametrize("epsilon", [-1.0, -0.999, 0.0, 2.5])
def test_poly_keeps_its_digits_where_its_terms_cancel(epsilon):
    """As p -> 1 the loss for epsilon = -1 is u^gamma (u^2 / 2 + ...), far below either term."""
    z = [30.0, 0.0, -1.0]

    def exact(row):
        p = oracle.softmax(row)[0]
        return (1 - p) * (mpf(epsilon) * (1 - p) - oracle.mpmath.log(p))

    with oracle.precision():
        value = float(exact([mpf(v) for v in z]))
        slope = [float(v) for v in oracle.gradient(exact, z)]
    for dtype in (torch.float32, torch.float64):
        input = torch.tensor([z], dtype=dtype, requires_grad=True)
        found = fk.poly_focal_loss(input, torch.tensor([0]), 1.0, epsilon, reduction="sum")
        (gradient,) = torch.autograd.grad(found, input)
        relative = 1e-5 if dtype == torch.float32 else 1e-12
        assert found.item() == pytest.approx(value, rel=relative)
        assert gradient[0].tolist() == pytest.approx(slope, rel=relative)


def test_a_certain_wrong_class_keeps_its_digits_in_the_brier_score():
    z, target = [40.0, 0.0, 3.0], 1

    def exact(row):
        return oracle.mpmath.fsum((p - (k == target)) ** 2 for k, p in enumerate(oracle.softmax(row)))

    with oracle.precision():
        slope = [float(v) for v in oracle.gradient(exact, z)]
    input = torch.tensor([z], requires_grad=True)
    (gradient,) = torch.autograd.grad(fk.BrierLoss()(input, torch.tensor([target])), input)
    assert gradient[0].tolist() == pytest.approx(slope, rel=1e-5)


def test_a_tied_rival_is_the_first():
    for classes in (4, 40, 5000):
        for smoothing in (0.0, 1e-9):
            z = torch.zeros(2, classes, dtype=torch.float64)
            z[:, 2] = 1.0
            z.requires_grad_()
            loss = fk.DualFocalLoss(2.0, label_smoothing=smoothing)(z, torch.tensor([2, 2]))
            (gradient,) = torch.autograd.grad(loss, z)
            assert (gradient[:, 0] > gradient[:, 1]).all()
            assert (gradient[:, 3] - gradient[:, 1]).abs().max() < 1e-8


@pytest.mark.parametrize("name", LOSSES)
def test_infinite_and_ignored_logits(name):
    loss, _ = LOSSES[name]
    for classes in (4, 12, 20, 50, 200, 5000):
        z = torch.randn(6, classes)
        z[0, 1:] = -math.inf  # certain
        z[1, 1] = -math.inf
        z[2] = math.nan  # ignored
        z[3, 2] = math.nan
        z[4, 1] = math.inf
        z[5] = -math.inf
        target = torch.tensor([0, 0, 9 % classes, 0, 0, 0])
        for copies in (1, 3):
            many = z.repeat(copies, 1).requires_grad_()
            found = loss(many, target.repeat(copies), ignore_index=9 % classes, reduction="none")
            gradients = torch.autograd.grad(found.sum(), many)[0].split(6)
            assert found.isnan().tolist() == [False, False, False, True, True, True] * copies
            for gradient in gradients:
                assert (gradient[:3].isfinite()).all()
                assert (gradient[[0, 2]] == 0).all()
                assert gradient[3].isnan().any()


@pytest.mark.parametrize("name", LOSSES)
def test_empty_and_all_ignored(name):
    loss, _ = LOSSES[name]
    for n in (0, 5):
        z = torch.randn(n, 3, requires_grad=True)
        target = torch.full((n,), -100)
        found = loss(z, target)
        assert found.isnan()
        (gradient,) = torch.autograd.grad(found, z)
        assert (gradient == 0).all()
        assert gradient.shape == z.shape
        assert loss(z, target, reduction="sum") == 0


@pytest.mark.kernels
@pytest.mark.parametrize("name", [spec.name for spec in SPECS.values() if spec.keeps_class])
@pytest.mark.parametrize("classes", [40, 5000])
def test_a_saved_class_beyond_the_row_is_none(name, classes):
    kind = number_of(name)
    z, target = torch.randn(20, classes), torch.randint(classes, (20,))
    numbers, options = (torch.tensor(2.0, dtype=torch.float64), None, None), (0, -100, 0.0, False)
    loss, saved = torch.ops.focalkern.focal_loss_forward(z, target, *numbers, *options, False, kind, 1.0)

    def gradient(saved: torch.Tensor) -> torch.Tensor:
        needed = [True, False, False]
        ones = torch.ones_like(loss)
        return torch.ops.focalkern.focal_loss_backward(ones, z, target, *numbers, saved, *options, needed, kind, 1.0)[0]

    def with_class(marked: int) -> torch.Tensor:
        forged = saved.clone()
        forged.view(torch.int32)[3 * 20 + 7] = marked + 1  # as the kernels encode it
        return gradient(forged)

    others = torch.arange(20) != 7
    for marked in (-classes, classes):  # class 0 of the next row
        assert torch.equal(with_class(marked), with_class(-1))
        assert torch.equal(with_class(marked)[others], gradient(saved)[others])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((-0.5,), {}, ValueError, r"gamma must be at least 0, got -0.5"),
        ((math.nan,), {}, ValueError, r"gamma must be finite, got nan"),
        (("2",), {}, TypeError, r"gamma must be a number, a tensor or a GammaTable, got str"),
        ((2.0, math.inf), {}, ValueError, r"epsilon must be finite, got inf"),
        ((2.0, None), {}, TypeError, r"epsilon must be a number, got NoneType"),
        ((2.0,), {"reduction": "avg"}, ValueError, r"reduction must be 'none', 'mean' or 'sum', got 'avg'"),
        ((2.0,), {"weight": torch.ones(4)}, ValueError, r"weight must be \[C\] = \[3\], got \[4\]"),
        ((2.0,), {"weight": 1.0}, TypeError, r"weight must be a tensor, got float"),
        ((2.0,), {"label_smoothing": 2.0}, ValueError, r"label_smoothing must be in \[0, 1\], got 2"),
        ((torch.ones(4),), {}, ValueError, r"gamma must be broadcastable to the unreduced loss \[2\], got \[4\]"),
    ],
)
def test_bad_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match=f"^poly_focal_loss: {message}"):
        fk.poly_focal_loss(torch.randn(2, 3), torch.tensor([0, 1]), *arguments, **options)


def test_the_module_is_the_function():
    z, target = torch.randn(6, 5), torch.randint(5, (6,))
    module = fk.PolyFocalLoss(1.5, 2.0, weight=torch.rand(5), label_smoothing=0.1)
    expected = fk.poly_focal_loss(z, target, 1.5, 2.0, weight=module.weight, label_smoothing=0.1)
    assert torch.equal(module(z, target), expected)
    assert repr(module) == "PolyFocalLoss(gamma=1.5, epsilon=2.0, weight=[5], label_smoothing=0.1)"
    table = fk.PolyFocalLoss(TABLE, 0.5)
    assert torch.equal(table(z, target), fk.poly_focal_loss(z, target, TABLE, 0.5))
    for make in (lambda: fk.PolyFocalLoss(-1.0), lambda: fk.PolyFocalLoss(torch.tensor(-1.0))):
        with pytest.raises(ValueError, match=r"PolyFocalLoss: gamma must be at least 0, got -1"):
            make()
    with pytest.raises(ValueError, match=r"PolyFocalLoss: epsilon must be finite, got nan"):
        fk.PolyFocalLoss(2.0, math.nan)
    with pytest.raises(RuntimeError, match=r"PolyFocalLoss: gamma must be at least 0, got -2"):
        fk.PolyFocalLoss(torch.tensor(1.0)).load_state_dict({"gamma": torch.tensor(-2.0)})
