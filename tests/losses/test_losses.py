"""The training losses: definitions at 300 digits, the options of cross-entropy, and no look at the device.

AdaFocal's bins and updates are in test_adafocal.py; that gamma tables are looked up right is in test_focal_loss.py.
"""

import copy
import functools
import io
import pickle

import mpmath
import oracle
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, no_waiting, peer
from mpmath import mpf
from torch._subclasses.fake_tensor import FakeTensorMode

import focalkern as fk
from focalkern.ops import _backend
from focalkern.reference._softmax_losses import ROW_LOSSES

DTYPES = [torch.float32, torch.float64]

# One row each: ordinary; the target certain, and hopeless, by 80; saturated far beyond exp's range, both ways; the
# target first by a hair; a tie with the target (no rival strictly below it but one); all equal; two classes.
ROWS = [
    ([0.3, -1.2, 0.9, 2.0], 2),
    ([80.0, 0.0, -3.0, 1.5], 0),
    ([80.0, 0.0, -3.0, 1.5], 1),
    ([1e4, -1e4, 3.0, 0.5], 0),
    ([1e4, -1e4, 3.0, 0.5], 1),
    ([2.0, 2.0 - 2.0**-12, -1.0, 0.0], 0),
    ([1.5, 1.5, 0.25, -2.0], 0),
    ([0.5, 0.5, 0.5, 0.5], 3),
    ([-0.7, 1.1], 1),
]


LOSSES = {
    **{spec.short: functools.partial(getattr(fk, spec.module), **spec.example) for spec in ROW_LOSSES.values()},
    "focal, tensor": lambda **o: fk.FocalLoss(torch.tensor(1.5), **o),
    "focal, table": lambda **o: fk.FocalLoss(fk.GammaTable([0.0, 0.4, 1.0], [-1.0, 2.0]), **o),
    "inverse": lambda **o: fk.InverseFocalLoss(1.5, **o),
    "flsd": lambda **o: fk.FLSDLoss(**o),
    "adafocal": lambda **o: fk.AdaFocalLoss(**o),
    "norm": lambda **o: fk.LogitNormPenalty(0.05, **o),
    "mmce, weighted": lambda **o: fk.MMCELoss(weighted=True, **o),
}
NAMES = list(LOSSES)
OF_BATCH = {spec.module for spec in ROW_LOSSES.values() if spec.of_batch}
ONLY_LABELS = {spec.short for spec in ROW_LOSSES.values() if not spec.soft_target and not spec.of_batch}
FINITE_AT_ZERO = {spec.short for spec in ROW_LOSSES.values() if not spec.infinite_at_zero}
PER_SAMPLE = [name for name in NAMES if type(LOSSES[name]()).__name__ not in OF_BATCH]
# The norm of logits of -inf is infinite everywhere.
INFINITE_AT_ZERO = [name for name in PER_SAMPLE if name not in FINITE_AT_ZERO and name != "norm"]


def batch(n=60, c=7, dtype=torch.float64, device="cpu"):
    input = torch.randn(n, c, dtype=dtype, device=device).mul_(2).requires_grad_()
    return input, torch.randint(c, (n,), device=device)


def gradient(loss, input):
    return torch.autograd.grad(loss, input)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Definitions
# ---------------------------------------------------------------------------------------------------------------------


def shares(n, y, smoothing):
    return [(1 - mpf(smoothing)) * (k == y) + mpf(smoothing) / n for k in range(n)]


def focal_by(gamma_of):
    def loss(z, y, smoothing):
        p = oracle.softmax(z)
        t = shares(len(z), y, smoothing)
        return -mpmath.fsum(
            t[k] * oracle.factor(p[k], mpf(gamma_of(p[k]))) * mpmath.log(p[k]) for k in range(len(z)) if t[k]
        )

    return loss


def dual(gamma):
    def loss(z, y, smoothing):
        p = oracle.softmax(z)
        t = shares(len(z), y, smoothing)
        total = mpf(0)
        for k in range(len(z)):
            # By the logits: equal ones stay equal when a third is moved for a derivative.
            below = max((p[j] for j in range(len(z)) if z[j] < z[k]), default=mpf(0))
            total -= t[k] * (1 - p[k] + below) ** mpf(gamma) * mpmath.log(p[k]) if t[k] else 0
        return total

    return loss


def poly(gamma, epsilon):
    def loss(z, y, smoothing):
        p = oracle.softmax(z)
        t = shares(len(z), y, smoothing)
        return mpmath.fsum(
            share * (1 - q) ** mpf(gamma) * (mpf(epsilon) * (1 - q) - mpmath.log(q))
            for share, q in zip(t, p, strict=True)
            if share
        )

    return loss


def dft(gamma):
    def loss(z, y, smoothing):
        p = oracle.softmax(z)
        t = shares(len(z), y, smoothing)
        return -mpmath.fsum(share * q ** mpf(gamma) * mpmath.log(q) for share, q in zip(t, p, strict=True) if share)

    return loss


def brier(z, y, smoothing):
    return mpmath.fsum((p - t) ** 2 for p, t in zip(oracle.softmax(z), shares(len(z), y, smoothing), strict=True))


def norm(coefficient):
    def loss(z, y, smoothing):
        return oracle.loss(z, y, 0.0, smoothing) + mpf(coefficient) * mpmath.fsum(abs(v) for v in z)

    return loss


DEFINED = {
    "focal 3": (lambda **o: fk.FocalLoss(3.0, **o), focal_by(lambda p: 3)),
    "focal 0.5": (lambda **o: fk.FocalLoss(0.5, **o), focal_by(lambda p: 0.5)),
    "inverse 2": (lambda **o: fk.InverseFocalLoss(2.0, **o), focal_by(lambda p: -2)),
    "flsd": (lambda **o: fk.FLSDLoss(**o), focal_by(lambda p: 5 if p < mpf("0.2") else 3)),
    "flsd, published code": (
        lambda **o: fk.FLSDLoss([0, 0.3, 0.5, 1], [5, 3, 1], **o),
        focal_by(lambda p: 5 if p < mpf("0.3") else 3 if p < 0.5 else 1),
    ),
    "adafocal": (
        lambda **o: adafocal([0.1, 0.4, 0.4, 0.9], [3.0, 7.0, -1.5], **o),
        focal_by(lambda p: 3 if p < mpf("0.4") else -1.5),
    ),
    "poly": (lambda **o: fk.PolyFocalLoss(2.0, 1.0, **o), poly(2, 1)),
    "poly cross-entropy": (lambda **o: fk.PolyFocalLoss(0.0, 3.5, **o), poly(0, 3.5)),
    "poly, the two terms cancel": (lambda **o: fk.PolyFocalLoss(0.5, -1.0, **o), poly(0.5, -1)),
    "dual 5": (lambda **o: fk.DualFocalLoss(5.0, **o), dual(5)),
    "dual 0.7": (lambda **o: fk.DualFocalLoss(0.7, **o), dual(0.7)),
    "dft": (lambda **o: fk.DFTLoss(detach_modulation=False, **o), dft(1)),
    "dft 0.5": (lambda **o: fk.DFTLoss(0.5, detach_modulation=False, **o), dft(0.5)),
    "brier": (lambda **o: fk.BrierLoss(**o), brier),
    "norm": (lambda **o: fk.LogitNormPenalty(0.01, **o), norm(0.01)),
}


def test_every_loss_of_rows_has_a_definition_here():
    defined = {type(make()).__name__ for make, _ in DEFINED.values()}
    assert {spec.module for spec in ROW_LOSSES.values()} - OF_BATCH <= defined


def adafocal(edges, gammas, **options):
    loss = fk.AdaFocalLoss(len(gammas), **options)
    loss.bin_edges.copy_(torch.tensor(edges))
    loss.bin_gammas.copy_(torch.tensor(gammas))
    return loss


@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("name", DEFINED)
def test_value_and_gradient_at_300_digits(name, smoothing):
    make, definition = DEFINED[name]
    loss = make(label_smoothing=smoothing, reduction="none")
    for z, y in ROWS:
        with oracle.precision():
            exact = definition([mpf(v) for v in z], y, smoothing)
            slope = oracle.gradient(lambda row, y=y: definition(row, y, smoothing), z)
            tied = len(set(z)) < len(z)
            expected, expected_slope = float(exact), [float(v) for v in slope]
        for dtype in DTYPES:
            input = torch.tensor([z], dtype=dtype, requires_grad=True)
            found = loss(input, torch.tensor([y]))
            assert_close(found, torch.tensor([expected], dtype=torch.float64))
            if not (tied and name.startswith("dual")):  # no derivative exists there
                assert_close(gradient(found.sum(), input)[0], torch.tensor(expected_slope, dtype=torch.float64))


@pytest.mark.parametrize("name", ["dual 5", "brier", "focal 3", "poly", "poly, the two terms cancel"])
def test_small_values_keep_their_relative_precision(name):
    """1 - p taken from the other classes: near p = 1 no digit is lost that an absolute tolerance would hide."""
    make, definition = DEFINED[name]
    z, y = [12.0, 0.0, -3.0, 1.5], 0
    with oracle.precision():
        exact = float(definition([mpf(v) for v in z], y, 0))
        slope = [float(v) for v in oracle.gradient(lambda row: definition(row, y, 0), z)]
    assert exact < 1e-7
    input = torch.tensor([z], requires_grad=True)
    found = make(reduction="sum")(input, torch.tensor([y]))
    assert found.item() == pytest.approx(exact, rel=1e-5)
    assert gradient(found, input)[0].tolist() == pytest.approx(slope, rel=1e-5)


def mmce_by_definition(z, y, weighted):
    p = [oracle.softmax(row) for row in z]
    tops = [max(range(len(row)), key=lambda k, row=row: row[k]) for row in z]
    r = [row[k] for row, k in zip(p, tops, strict=True)]
    c = [mpf(k == label) for k, label in zip(tops, y, strict=True)]
    m, correct = len(y), mpmath.fsum(c)

    def kernel(i, j):
        return mpmath.exp(-abs(r[i] - r[j]) / mpf("0.4"))

    if not weighted:
        total = mpmath.fsum((c[i] - r[i]) * (c[j] - r[j]) * kernel(i, j) for i in range(m) for j in range(m)) / m**2
    elif correct in (0, m):
        total = mpf(0)
    else:  # as printed by Kumar et al.: three sums
        total = mpf(0)
        for i in range(m):
            for j in range(m):
                if c[i] and c[j]:
                    total += (1 - r[i]) * (1 - r[j]) * kernel(i, j) / correct**2
                elif not c[i] and not c[j]:
                    total += r[i] * r[j] * kernel(i, j) / (m - correct) ** 2
                elif c[i]:
                    total -= 2 * (1 - r[i]) * r[j] * kernel(i, j) / (correct * (m - correct))
    cross_entropy = mpmath.fsum(oracle.loss(row, label, 0.0) for row, label in zip(z, y, strict=True)) / m
    return cross_entropy + 2 * mpmath.sqrt(total)


# Correct and not, confident and not; everything correct; everything wrong; one sample.
MMCE_BATCHES = [
    ([[0.3, -1.2, 0.9], [2.0, 0.1, -1.0], [30.0, 0.0, 1.0], [0.0, 20.0, 1.0], [1.0, 0.0, 0.25]], [2, 1, 0, 0, 0]),
    ([[0.3, -1.2, 0.9], [2.0, 0.1, -1.0]], [2, 0]),
    ([[0.3, -1.2, 0.9], [2.0, 0.1, -1.0]], [0, 2]),
    ([[0.3, -1.2, 0.9]], [1]),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("z, y", MMCE_BATCHES)
def test_mmce_at_300_digits(z, y, weighted):
    def definition(flat):
        return mmce_by_definition([flat[3 * i : 3 * i + 3] for i in range(len(y))], y, weighted)

    with oracle.precision():
        flat = [mpf(v) for row in z for v in row]
        expected = float(definition(flat))
        slope = [float(v) for v in oracle.gradient(definition, flat)]
    for dtype in DTYPES:
        input = torch.tensor(z, dtype=dtype, requires_grad=True)
        found = fk.MMCELoss(weighted=weighted)(input, torch.tensor(y))
        assert_close(found, torch.tensor(expected, dtype=torch.float64))
        assert_close(gradient(found, input).flatten(), torch.tensor(slope, dtype=torch.float64))


# Sorted by insertion, by short and by long digits; and by all digits of confidences that differ in their last ones
# only, beside one that is far away.
@pytest.mark.parametrize("n, apart", [(12, 1), (300, 1), (1500, 1), (300, 1e-10), (1500, 1e-10)])
def test_mmce_of_many_samples_is_its_double_sum(n, apart):
    """Ties included, which have a share in the value and none in the derivative."""
    input, target = batch(n)
    with torch.no_grad():
        input[2:] = input[1] + apart * (input[2:] - input[1])
        input[0, 0] = 30
        input[n - n // 3 :] = input[: n // 3]
    r, top = input.softmax(-1).max(-1)
    a = ((top == target).double() - r) / n
    expected = F.cross_entropy(input, target) + 3 * (a @ torch.exp(-(r[:, None] - r).abs() / 0.05) @ a).sqrt()
    found = fk.MMCELoss(3.0, bandwidth=0.05)(input, target)
    assert_close(found, expected)
    assert_close(gradient(found, input), gradient(expected, input))


def test_mmce_of_a_perfect_batch_has_a_gradient():
    input = torch.tensor([[200.0, 0.0], [-300.0, 0.0]], requires_grad=True)
    for weighted in (False, True):
        found = fk.MMCELoss(weighted=weighted)(input, torch.tensor([0, 1]))
        assert found == 0
        assert gradient(found, input).count_nonzero() == 0


def test_mmce_needs_no_memory_for_pairs():
    """250 000 pixels: their kernel matrix would have 500 GB."""
    input, target = torch.randn(1, 3, 500, 500), torch.randint(3, (1, 500, 500))
    assert fk.MMCELoss()(input, target) > F.cross_entropy(input, target)


def test_the_focal_family_is_focal_loss():
    input, target = batch()
    options = {"weight": torch.rand(7, dtype=torch.float64), "label_smoothing": 0.1, "ignore_index": 3}
    for detach in (False, True):
        for loss, gamma in [
            (fk.FocalLoss, 2.0),
            (fk.FocalLoss, torch.nn.Parameter(torch.rand(60))),
            (fk.FocalLoss, fk.FLSD_53),
            (fk.InverseFocalLoss, 1.5),
            (fk.InverseFocalLoss, torch.tensor(1.5)),
        ]:
            found = loss(gamma, detach_modulation=detach, **options)(input, target)
            gamma = -gamma if loss is fk.InverseFocalLoss else gamma
            expected = fk.focal_loss(input, target, gamma, detach_modulation=detach, **options)
            assert torch.equal(found, expected)
            assert torch.equal(gradient(found, input), gradient(expected, input))


@pytest.mark.parametrize("soft", [False, True])
def test_coefficients_of_zero_leave_cross_entropy(soft):
    input, target = batch()
    options = {"weight": torch.rand(7, dtype=torch.float64), "label_smoothing": 0.1}
    if soft:
        target = torch.rand(60, 7, dtype=torch.float64)
    else:
        options["ignore_index"] = 3
    losses = [fk.MMCELoss(0.0, **options), fk.LogitNormPenalty(0.0, **options), fk.FocalLoss(0.0, **options)]
    if not soft:
        losses += [fk.DualFocalLoss(0.0, **options), fk.DualFocalLoss(0.0, detach_modulation=True, **options)]
    expected = F.cross_entropy(input, target, **options)
    slope = gradient(expected, input)
    for loss in losses:
        found = loss(input, target)
        assert_close(found, expected)
        assert_close(gradient(found, input), slope)


def test_dual_detached_and_smoothed_near_zero():
    """A detached factor has the coefficient of cross-entropy. Smoothed labels take another path to the same limit."""
    input, target = batch()
    p = input.detach().softmax(-1)
    p_y = p.gather(1, target[:, None])
    p_j = torch.where(p < p_y, p, 0).amax(1, keepdim=True)
    expected = (1 - p_y + p_j) ** 2 * (p - F.one_hot(target, 7))
    found = fk.DualFocalLoss(2.0, reduction="sum", detach_modulation=True)(input, target)
    assert_close(gradient(found, input), expected)
    whole, smoothed = fk.DualFocalLoss(2.0), fk.DualFocalLoss(2.0, label_smoothing=1e-15)
    assert_close(whole(input, target), smoothed(input, target))
    assert_close(gradient(whole(input, target), input), gradient(smoothed(input, target), input))


def test_class_probabilities():
    input, _ = batch()
    target = torch.rand(60, 7, dtype=torch.float64)
    weight = torch.rand(7, dtype=torch.float64)
    w = (weight * target).sum(-1)
    t = 0.9 * target + 0.1 / 7
    options = {"weight": weight, "label_smoothing": 0.1, "reduction": "none"}
    assert_close(fk.BrierLoss(**options)(input, target), w * (input.softmax(-1) - t).square().sum(-1))
    cross_entropy = F.cross_entropy(input, target, **options)
    assert_close(fk.LogitNormPenalty(0.1, **options)(input, target), cross_entropy + 0.1 * w * input.abs().sum(-1))
    labels = torch.randint(7, (60,))
    hard = F.one_hot(labels, 7).double()
    for name in NAMES:
        if name not in ONLY_LABELS:
            loss = LOSSES[name](weight=weight, label_smoothing=0.1, reduction="sum")
            assert_close(loss(input, hard), loss(input, labels))
    # The mean of probabilities divides by N, as in cross-entropy.
    mean, total = fk.BrierLoss(weight), fk.BrierLoss(weight, reduction="sum")
    assert_close(mean(input, target), total(input, target) / 60)


# ---------------------------------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_reductions_weights_and_ignored_samples(name, device):
    """The mean divides by the summed weight of the samples that count; the ignored may hold anything."""
    input, target = batch(device=device)
    weight = torch.rand(7, dtype=torch.float64, device=device) + 0.5
    ignored = target == 3
    with torch.no_grad():
        input[ignored] = torch.nan
    options = {"weight": weight, "ignore_index": 3, "label_smoothing": 0.1}
    mean, total, each = (LOSSES[name](**options, reduction=r).to(device) for r in ("mean", "sum", "none"))
    losses = each(input, target)
    assert losses.shape == target.shape
    assert ignored.any()
    assert losses[ignored].count_nonzero() == 0
    assert_close(total(input, target), losses.sum())
    assert_close(mean(input, target), losses.sum() / weight[target[~ignored]].sum())
    assert gradient(mean(input, target), input)[ignored].count_nonzero() == 0
    # Without the ignored rows the same.
    assert_close(mean(input[~ignored], target[~ignored]), mean(input, target))


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_a_class_weight_scales_the_loss_of_its_samples(name):
    input, target = batch()
    weight = torch.rand(7, dtype=torch.float64)
    plain = LOSSES[name](reduction="none")(input, target)
    assert_close(LOSSES[name](reduction="none", weight=weight)(input, target), weight[target] * plain)


@pytest.mark.parametrize("weighted", [False, True])
def test_mmce_options(weighted):
    """Class weights and smoothing are in the cross-entropy; the sum counts the error once per sample."""
    input, target = batch()
    options = {"weight": torch.rand(7, dtype=torch.float64), "label_smoothing": 0.1, "ignore_index": 3}
    valid = target != 3
    plain = fk.MMCELoss(weighted=weighted)(input[valid], target[valid]) - F.cross_entropy(input[valid], target[valid])
    with torch.no_grad():
        input[~valid] = torch.nan
    expected = F.cross_entropy(input[valid], target[valid], **options) + plain
    found = fk.MMCELoss(weighted=weighted, **options)(input, target)
    assert_close(found, expected)
    assert gradient(found, input)[~valid].count_nonzero() == 0
    expected = F.cross_entropy(input[valid], target[valid], reduction="sum", **options) + valid.sum() * plain
    assert_close(fk.MMCELoss(weighted=weighted, reduction="sum", **options)(input, target), expected)


@pytest.mark.parametrize("name", NAMES)
def test_shapes(name, device):
    """Pixels and single samples are the same samples in other shapes; labels of any dtype; any memory format."""
    loss = LOSSES[name](label_smoothing=0.1, ignore_index=2).to(device)
    input = torch.randn(3, 5, 4, 6, dtype=torch.float64, device=device)
    target = torch.randint(5, (3, 4, 6), device=device)
    flat = input.movedim(1, -1).reshape(-1, 5), target.reshape(-1)
    expected = loss(*flat)
    assert_close(loss(input, target), expected)
    assert_close(loss(input.to(memory_format=torch.channels_last), target.to(torch.uint8)), expected)
    assert_close(loss(flat[0], flat[1].int()), expected)
    assert loss(flat[0][0], flat[1][0].clamp(max=1)).shape == ()
    assert_close(loss(flat[0][0], flat[1][0].clamp(max=1)), loss(flat[0][:1], flat[1][:1].clamp(max=1)))
    if name in PER_SAMPLE:
        each = LOSSES[name](label_smoothing=0.1, ignore_index=2, reduction="none").to(device)
        assert_close(each(input, target).reshape(-1), each(*flat))
        assert each(input[:0], target[:0]).shape == (0, 4, 6)
        assert each(flat[0][0], flat[1][0]).shape == ()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_average_is_nan_without_gradient(name, device):
    loss = LOSSES[name]().to(device)
    input = torch.randn(4, 3, device=device, requires_grad=True)
    found = loss(input, torch.full((4,), -100, device=device))
    assert found.isnan()
    assert gradient(found, input).count_nonzero() == 0
    assert loss(input[:0], torch.empty(0, dtype=torch.long, device=device)).isnan()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_logits_are_finite_in_every_dtype(name, dtype, device):
    """+-1e4, beyond exp's range by far, target certain or hopeless; and the dtype of the loss."""
    input = torch.tensor([[1e4, -1e4, 0.0], [0.0, 1e4, -1e4], [1e4, 1e4, -1e4]], dtype=dtype, device=device)
    input.requires_grad_()
    for target in ([0, 1, 0], [1, 2, 2]):
        loss = LOSSES[name](label_smoothing=0.1).to(device)
        found = loss(input, torch.tensor(target, device=device))
        assert found.dtype == dtype
        assert found.isfinite()
        assert gradient(found, input).isfinite().all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "norm"])
@pytest.mark.parametrize("z", [[[3.0]], [[3.0, -torch.inf, -torch.inf]]])
def test_a_class_without_rivals_is_certain(name, z):
    input = torch.tensor(z, requires_grad=True)
    found = LOSSES[name]()(input, torch.tensor([0]))
    assert found == 0
    assert gradient(found, input).count_nonzero() == 0


@pytest.mark.parametrize("name", INFINITE_AT_ZERO)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z", [[1.0, -torch.inf, 0.0], [-torch.inf, -torch.inf, 0.0], [-torch.inf, 2.0, -torch.inf]])
@pytest.mark.parametrize("y", [0, 1, 2])
def test_masked_classes_have_a_gradient_also_as_the_target(name, z, y, smoothing):
    """A target with p = 0 costs infinitely much, and pulls as hard as in cross-entropy; logits of -inf are no NaN."""
    input = torch.tensor([z], requires_grad=True)
    found = LOSSES[name](label_smoothing=smoothing)(input, torch.tensor([y]))
    slope = gradient(found, input)
    assert slope.isfinite().all()
    if z[y] == -torch.inf or smoothing:
        assert found == torch.inf
    if z[y] == -torch.inf and not smoothing and name != "adafocal":  # whose first bin has another factor at p = 0
        assert_close(slope, gradient(F.cross_entropy(input, torch.tensor([y])), input))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype, device):
    input, target = batch(dtype=dtype, device=device)
    loss = LOSSES[name](label_smoothing=0.1).to(device)
    wide = input.detach().double().requires_grad_()
    exact = loss(wide, target)
    assert_close(loss(input, target), exact, dtype)
    with torch.autocast(device.type, dtype=dtype):
        found = loss(input, target)
    assert found.dtype == torch.float32
    assert_close(found, exact)
    # The gradient is rounded once.
    slope = gradient(found, input)
    assert slope.dtype == dtype
    assert_close(slope, gradient(exact, wide))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("flsd", "focal, table", "adafocal")])
def test_gradcheck(name):
    input, target = batch(6, 4)
    loss = LOSSES[name](weight=torch.rand(4), label_smoothing=0.1)
    assert torch.autograd.gradcheck(lambda z: loss(z, target), input)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own, in jvp
@pytest.mark.parametrize("name", ["dual", "brier", "norm", "mmce", "mmce, weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_second_derivatives_and_function_transforms(name, smoothing):
    """The fused losses have theirs in test_focal_loss.py."""
    input, target = batch(6, 4)
    loss = LOSSES[name](label_smoothing=smoothing)
    assert torch.autograd.gradgradcheck(lambda z: loss(z, target), input)
    inputs, targets = torch.randn(3, 6, 4, dtype=torch.float64), torch.randint(4, (3, 6))
    found = torch.func.vmap(torch.func.grad(loss))(inputs, targets)
    expected = [gradient(loss(z, y), z) for z, y in zip(inputs.requires_grad_(), targets, strict=True)]
    assert_close(found, torch.stack(expected))
    direction = torch.randn(6, 4, dtype=torch.float64)
    _, slope = torch.func.jvp(lambda z: loss(z, targets[0]), (inputs[0].detach(),), (direction,))
    assert_close(slope, (expected[0] * direction).sum())


# ---------------------------------------------------------------------------------------------------------------------
# One logit per class
# ---------------------------------------------------------------------------------------------------------------------

SCORES = [-1e4, -200.0, -90.0, -17.0, -1.3, 0.0, 0.4, 5.0, 17.0, 90.0, 200.0, 1e4]


@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 2.0, 3.5])
@pytest.mark.parametrize("t", [0.0, 1.0, 0.3])
def test_sigmoid_focal_loss_at_300_digits(gamma, t):
    def definition(x):
        p = 1 / (1 + mpmath.exp(-x))
        q = 1 / (1 + mpmath.exp(x))
        share = mpf(t)
        cross_entropy = -(share * mpmath.log(p) if t else 0) - ((1 - share) * mpmath.log(q) if t < 1 else 0)
        alpha = mpf("0.25") * share + mpf("0.75") * (1 - share)
        return alpha * (share * q + (1 - share) * p) ** mpf(gamma) * cross_entropy

    with oracle.precision():
        step = mpf(10) ** -40
        expected = [float(definition(mpf(v))) for v in SCORES]
        slope = [float((definition(mpf(v) + step) - definition(mpf(v) - step)) / (2 * step)) for v in SCORES]
    for dtype in DTYPES:
        input = torch.tensor(SCORES, dtype=dtype, requires_grad=True)
        found = fk.sigmoid_focal_loss(input, torch.full_like(input, t), gamma)
        assert_close(found, torch.tensor(expected, dtype=torch.float64))
        assert_close(gradient(found.sum(), input), torch.tensor(slope, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 2.0])
def test_sigmoid_focal_loss_is_finite(dtype, gamma, device):
    """Also where 1 - p_t is subnormal, 88 to 104 from 0 in float32 and 708 to 746 in float64."""
    magnitudes = torch.cat([torch.linspace(80, 110, 61), torch.linspace(700, 750, 51), torch.tensor([1e4])])
    input = torch.cat([magnitudes, -magnitudes]).to(device, dtype).requires_grad_()
    for t in (0.0, 1.0, 0.5):
        found = fk.sigmoid_focal_loss(input, torch.full_like(input, t), gamma)
        assert found.dtype == dtype
        assert found.isfinite().all()
        assert gradient(found.sum(), input).isfinite().all()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("alpha", [0.25, 0.0, -1])
@pytest.mark.parametrize("gamma", [0.0, 0.7, 2.0])
def test_sigmoid_focal_loss_is_torchvisions(reduction, alpha, gamma):
    """With gradients in the logits and in the targets, which are 0, 1 and between."""
    theirs = peer("torchvision.ops").sigmoid_focal_loss
    input = torch.randn(50, 3, dtype=torch.float64).mul_(4).requires_grad_()
    target = torch.rand(50, 3, dtype=torch.float64)
    target[:20] = target[:20].round()
    target.requires_grad_()
    expected = theirs(input, target, alpha=alpha, gamma=gamma, reduction=reduction)
    found = fk.sigmoid_focal_loss(input, target, gamma, alpha, reduction)
    constant = fk.sigmoid_focal_loss(input, target.detach(), gamma, alpha, reduction)
    assert found.shape == expected.shape
    assert_close(found, expected)
    assert_close(constant, expected)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (input, target), upstream)
    for ours, exact in zip(torch.autograd.grad(found, (input, target), upstream), wanted, strict=True):
        assert_close(ours, exact)
    assert_close(torch.autograd.grad(constant, input, upstream)[0], wanted[0])


def test_sigmoid_focal_loss_alpha_none_and_labels_of_other_dtypes(device):
    input = torch.randn(9, device=device)
    target = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1], device=device)
    expected = fk.sigmoid_focal_loss(input, target.float(), 2.0, -1)
    assert torch.equal(fk.sigmoid_focal_loss(input, target.bool(), 2.0, None), expected)
    assert torch.equal(fk.SigmoidFocalLoss(2.0, None, "none")(input, target), expected)
    # The elements are added in another order.
    torch.testing.assert_close(fk.SigmoidFocalLoss(2.0, None)(input, target), expected.mean())
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert fk.sigmoid_focal_loss(input.bfloat16(), target).dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# Nothing waits for the device, nothing compiles again
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_step_does_not_depend_on_values(name):
    """On the meta device there are none: .item(), .cpu(), bool() and a mask as an index raise."""
    loss = LOSSES[name](weight=torch.ones(7), label_smoothing=0.1).to("meta")
    input = torch.empty(8, 7, device="meta", requires_grad=True)
    loss(input, torch.empty(8, dtype=torch.long, device="meta")).backward()
    assert input.grad.shape == (8, 7)


@pytest.mark.parametrize("name", [*NAMES, "sigmoid"])
def test_a_step_does_not_wait_for_the_device(name, cuda):
    input, target = batch(dtype=torch.float32, device=cuda)
    loss = fk.SigmoidFocalLoss() if name == "sigmoid" else LOSSES[name](weight=torch.ones(7)).to(cuda)
    if name == "sigmoid":
        target = F.one_hot(target, 7)
    loss(input, target).backward()  # loads kernels
    torch.cuda.synchronize()
    with no_waiting():
        loss(input, target).backward()


def test_labels_out_of_range_on_cuda_are_nan(cuda, monkeypatch):
    input, target = batch(dtype=torch.float32, device=cuda)
    target[4] = 7
    for name in PER_SAMPLE:
        loss = LOSSES[name](reduction="none").to(cuda)
        found = loss(input, target)
        assert found.isnan().nonzero().tolist() == [[4]]
        rows = gradient(found.sum(), input).isnan()
        assert rows[4].all()
        assert rows.sum() == 7
        with monkeypatch.context() as patch:
            patch.setenv("FOCALKERN_VALIDATE", "1")
            with pytest.raises(IndexError, match=r"got 7 at row 4"):
                loss(input, target)


@pytest.mark.parametrize("name", ["focal, tensor", "flsd", "adafocal", "dual", "brier", "mmce"])
def test_compiled_whole_and_not_again_for_other_gammas(name):
    loss = LOSSES[name](weight=torch.rand(7), label_smoothing=0.1)
    input, target = batch(dtype=torch.float32)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_close(compiled(input, target), loss(input, target))
    with torch.compiler.set_stance("fail_on_recompile"):
        for buffer in loss.buffers():
            with torch.no_grad():
                buffer.mul_(0.5)
            found = compiled(input, target)
            assert_close(found, loss(input, target))
            assert_close(gradient(found, input), gradient(loss(input, target), input))


@pytest.mark.parametrize("name", ["flsd", "adafocal", "dual", "mmce"])
def test_export(name):
    loss = LOSSES[name](label_smoothing=0.1)
    input, target = batch(dtype=torch.float32)
    exported = torch.export.export(loss, (input.detach(), target)).module()
    assert_close(exported(input, target), loss(input, target))


# ---------------------------------------------------------------------------------------------------------------------
# As modules
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_copies_pickles_and_checkpoints(name):
    loss = LOSSES[name](weight=torch.rand(7), label_smoothing=0.1, ignore_index=3)
    input, target = batch(dtype=torch.float32)
    expected = loss(input, target)
    for again in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert repr(again) == repr(loss)
        assert torch.equal(again(input, target), expected)
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    fresh = LOSSES[name](weight=torch.ones(7), label_smoothing=0.1, ignore_index=3)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(input, target), expected)


def test_settings_are_shown():
    shown = [
        (fk.FocalLoss(1.5), "FocalLoss(gamma=1.5)"),
        (
            fk.FocalLoss(torch.nn.Parameter(torch.tensor([0.5, 2.0])), reduction="sum"),
            "FocalLoss(gamma=[0.5, 2], reduction=sum)",
        ),
        (fk.InverseFocalLoss(2), "InverseFocalLoss(gamma=2.0)"),
        (fk.FLSDLoss(ignore_index=255), "FLSDLoss(edges=[0, 0.2, 1], gammas=[5, 3], ignore_index=255)"),
        (
            fk.AdaFocalLoss(lam=0.5, detach_modulation=True),
            "AdaFocalLoss(n_bins=15, lam=0.5, gamma_init=1.0, gamma_max=20.0, gamma_min=-2.0, switch=0.2, "
            "detach_modulation=True)",
        ),
        (fk.DualFocalLoss(weight=torch.ones(3)), "DualFocalLoss(gamma=5.0, weight=[3])"),
        (fk.BrierLoss(label_smoothing=0.1), "BrierLoss(label_smoothing=0.1)"),
        (fk.MMCELoss(weighted=True), "MMCELoss(coefficient=2.0, weighted=True, bandwidth=0.4)"),
        (fk.LogitNormPenalty(), "LogitNormPenalty(coefficient=0.01)"),
        (fk.SigmoidFocalLoss(), "SigmoidFocalLoss(gamma=2.0, alpha=0.25, reduction=mean)"),
    ]
    for loss, text in shown:
        assert repr(loss) == text


def test_gammas_move_with_the_module_and_keep_their_precision(device):
    """Half precision would move the edges of the bins and stop small updates."""
    model = torch.nn.ModuleList([fk.FLSDLoss([0, 0.3, 1], [5.1, 3.1]), fk.AdaFocalLoss(), fk.FocalLoss(fk.FLSD_53)])
    model.append(fk.FocalLoss(torch.tensor(1.5)))
    model.to(device=device, dtype=torch.bfloat16)
    assert {buffer.device.type for buffer in model.buffers()} == {device.type}
    assert model[0].edges.dtype == model[0].gammas.dtype == torch.float64
    assert model[1].bin_edges.dtype == model[1].bin_gammas.dtype == torch.float64
    assert model[0].edges.tolist() == [0, 0.3, 1]
    assert fk.FLSD_53.edges.device.type == "cpu"
    for loss in model:
        assert loss(*batch(device=device)).isfinite()


@pytest.mark.parametrize("make", [fk.FLSDLoss, fk.AdaFocalLoss])
def test_a_schedule_goes_to_the_device_of_the_logits(make, monkeypatch):
    """As nn.CrossEntropyLoss() these take nothing from their user that would have to be moved."""
    given = []
    monkeypatch.setattr(make, "_function", staticmethod(lambda input, target, gamma, **_: given.append(gamma)))
    loss = make(weight=torch.ones(3))
    with FakeTensorMode(allow_non_fake_inputs=True):  # CUDA tensors without CUDA
        loss(torch.zeros(4, 3, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda"))
    assert given[0].edges.device.type == given[0].gammas.device.type == "cuda"
    kept = {name: buffer for name, buffer in loss.named_buffers() if name != "weight"}
    assert {(buffer.device.type, buffer.dtype) for buffer in kept.values()} == {("cuda", torch.float64)}
    assert loss.weight.device.type == "cpu"  # the user's own, as in cross-entropy


@pytest.mark.parametrize("make", [fk.FLSDLoss, fk.AdaFocalLoss])
def test_a_schedule_that_was_not_moved_works_on_cuda(make, cuda):
    loss, moved = make(), make().to(cuda)
    input, target = batch(device=cuda)
    for _ in range(2):
        assert torch.equal(loss(input, target), moved(input, target))
        if isinstance(loss, fk.AdaFocalLoss):
            for module in (loss, moved):
                module.update(input, target)
    assert {buffer.device.type for buffer in loss.buffers()} == {"cuda"}


def test_a_table_given_to_the_module_is_copied():
    table = fk.GammaTable(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([1.0, 2.0]))
    loss = fk.FocalLoss(table)
    loss.gammas[0] = 9.0
    assert table.gammas[0] == 1.0
    assert loss.gamma is None


def test_a_learned_gamma_is_a_parameter():
    gamma = torch.nn.Parameter(torch.tensor(2.0))
    loss = fk.FocalLoss(gamma)
    assert list(loss.parameters()) == [gamma]
    input, target = batch(dtype=torch.float32)
    loss(input, target).backward()
    assert gamma.grad < 0
    assert list(fk.FocalLoss(gamma.detach()).parameters()) == []


def table_loss(edges=(0, 0.2, 0.5, 1), gammas=(5, 3, 2)):
    return fk.FocalLoss(fk.GammaTable(edges, gammas))


def snapshot(loss):
    return {name: value.tolist() for name, value in loss.state_dict().items()}


@pytest.mark.parametrize(
    ("loss", "other", "message"),
    [
        (fk.FLSDLoss(), fk.AdaFocalLoss(), r"FLSDLoss: the checkpoint has another loss, AdaFocalLoss; strict=False"),
        (fk.FLSDLoss(), fk.FocalLoss(), r"FLSDLoss: the checkpoint has another loss, FocalLoss"),
        (fk.FocalLoss(), fk.DualFocalLoss(), r"FocalLoss: the checkpoint has another loss, DualFocalLoss"),
        (fk.InverseFocalLoss(torch.tensor(1.0)), fk.FocalLoss(torch.tensor(2.0)), r"has another loss, FocalLoss"),
        (fk.FocalLoss(fk.FLSD_53), fk.FocalLoss(), r"Missing key.*\"edges\", \"gammas\""),
        (fk.FocalLoss(), fk.FocalLoss(fk.FLSD_53), r"Unexpected key.*\"edges\""),
        (table_loss(), table_loss([0, 0.5, 1], [5, 3]), r"FocalLoss: edges must have shape \[4\], got \[3\]"),
        (fk.BrierLoss(torch.ones(3)), fk.BrierLoss(torch.ones(4)), r"weight must have shape \[3\], got \[4\]"),
    ],
)
def test_a_state_that_does_not_fit_leaves_the_module_as_it_was(loss, other, message):
    before = snapshot(loss)
    with pytest.raises(RuntimeError, match=message):
        loss.load_state_dict(other.state_dict())
    assert snapshot(loss) == before


def test_a_schedule_from_a_checkpoint_is_checked():
    loss = fk.FocalLoss(fk.FLSD_53)
    before = snapshot(loss)
    state = loss.state_dict()
    state["gammas"] = torch.tensor([7.0, 8.0])
    state["edges"] = torch.tensor([0.0, 1.2, 1.0])
    with pytest.raises(RuntimeError, match=r"edges must be ascending"):
        loss.load_state_dict(state)
    assert snapshot(loss) == before


def test_a_loss_inside_a_model_loads_with_it():
    def model():
        return torch.nn.ModuleDict({"net": torch.nn.Linear(2, 2), "criterion": table_loss()})

    one, two = model(), model()
    one["criterion"].gammas[0] = 4.0
    two.load_state_dict(one.state_dict())
    assert two["criterion"].gammas[0] == 4.0
    # A checkpoint from before the model had a loss.
    result = two.load_state_dict({"net.weight": torch.ones(2, 2), "net.bias": torch.ones(2)}, strict=False)
    assert result.missing_keys == ["criterion.edges", "criterion.gammas"]
    assert two["criterion"].gammas[0] == 4.0


def model_with(loss):
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"net": torch.nn.Linear(2, 2), "criterion": loss})


def test_a_checkpoint_of_another_loss_is_loaded_without_it_on_demand():
    one, two = model_with(fk.FocalLoss(torch.tensor(2.0))), model_with(fk.InverseFocalLoss(torch.tensor(1.0)))
    with torch.no_grad():
        one["net"].weight.fill_(3.0)
    with pytest.raises(RuntimeError, match=r"criterion\.InverseFocalLoss: the checkpoint has another loss, FocalLoss"):
        two.load_state_dict(through_a_file(one.state_dict()))
    result = two.load_state_dict(through_a_file(one.state_dict()), strict=False)
    assert result.missing_keys == result.unexpected_keys[:-1] == ["criterion.gamma"]
    assert result.unexpected_keys[-1].startswith("criterion.InverseFocalLoss: the checkpoint has another loss")
    assert (two["criterion"].gamma, two["net"].weight[0, 0]) == (1, 3)
    # A class of the user's own is the loss that it is derived from.
    derived = model_with(type("Own", (fk.FocalLoss,), {})(torch.tensor(5.0)))
    derived.load_state_dict(one.state_dict())
    assert derived["criterion"].gamma == 2


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_table_of_flsd_is_no_part_of_a_state():
    """So that cross-entropy's checkpoints load strictly; those of version 0.1, which had it, still do."""
    model = model_with(fk.FLSDLoss())
    model.load_state_dict(model_with(torch.nn.CrossEntropyLoss()).state_dict())
    assert model["criterion"].state_dict() == {}
    old = model.state_dict() | {
        "criterion.edges": torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64),
        "criterion.gammas": torch.tensor([5.0, 3.0], dtype=torch.float64),
    }
    model.load_state_dict(old)
    model.load_state_dict({name: value.half() for name, value in old.items()})
    before = model["criterion"].gammas.clone()
    for found, message in [
        (torch.tensor([5.0, 2.0]), r"has the gammas \[5, 2\], and this loss was made with \[5, 3\]"),
        (torch.tensor([5.0, 3.0, 2.0]), r"has the gammas \[5, 3, 2\]"),
        ([5.0, 3.0], r"gammas must be a tensor, got list"),
    ]:
        with pytest.raises(RuntimeError, match=f"FLSDLoss: (the checkpoint )?{message}"):
            model.load_state_dict(old | {"criterion.gammas": found})
    assert torch.equal(model["criterion"].gammas, before)


def test_an_inverse_focal_loss_takes_no_negative_gamma_from_a_state():
    loss = fk.InverseFocalLoss(torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="InverseFocalLoss: gamma must be at least 0, got -2"):
        loss.load_state_dict({"gamma": torch.tensor(-2.0)})
    assert loss.gamma == 1


@pytest.mark.parametrize("name", NAMES)
def test_safetensors_saves_and_loads_a_model_with_the_loss(name, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    loss = LOSSES[name](weight=torch.rand(7))
    input, target = batch(dtype=torch.float32)
    if isinstance(loss, fk.AdaFocalLoss):
        loss.update(input, target)
        loss.accumulate(input, target)
    safetensors.save_model(model_with(loss), str(tmp_path / "model.safetensors"))
    again = model_with(LOSSES[name](weight=torch.ones(7)))
    safetensors.load_model(again, str(tmp_path / "model.safetensors"))
    assert torch.equal(again["criterion"](input, target), loss(input, target))
    if isinstance(loss, fk.AdaFocalLoss):
        assert again["criterion"].n_accumulated == loss.n_accumulated > 0
        assert len(again["criterion"].history) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fk.FocalLoss("2"), TypeError, r"FocalLoss: gamma must be a number, got str"),
        (lambda: fk.FocalLoss(NAN), ValueError, r"FocalLoss: gamma must be finite, got nan"),
        (lambda: fk.FocalLoss(torch.tensor(2)), TypeError, r"FocalLoss: gamma must be floating point, got torch.int64"),
        (lambda: fk.FocalLoss(torch.nn.Parameter(torch.tensor([2.0, NAN]))), ValueError, r"finite, got \[2, nan\]"),
        (
            lambda: fk.FocalLoss(torch.ones(5)),
            ValueError,
            r"got a tensor of shape \[5\]; class weights are weight=; gam",
        ),
        (lambda: fk.InverseFocalLoss(torch.ones(5)), ValueError, r"InverseFocalLoss: gamma.*class weights are weight="),
        (lambda: fk.FLSDLoss(torch.ones(3)), ValueError, r"FLSDLoss: gammas must be given.*class weights are weight="),
        (lambda: fk.AdaFocalLoss(torch.ones(5)), TypeError, r"n_bins must be an int, got.*class weights are weight="),
        (lambda: fk.MMCELoss(torch.ones(5)), TypeError, r"coefficient must be a number, got.*weights are weight="),
        (
            lambda: fk.FocalLoss(alpha=0.25),
            TypeError,
            r"FocalLoss: alpha is no argument.*weight=torch.tensor\(.*Sigmoid",
        ),
        (lambda: fk.FocalLoss(2.0, [1.0]), TypeError, r"FocalLoss: weight must be a tensor, got list"),
        (lambda: fk.FocalLoss(2.0, torch.ones(2, 2)), ValueError, r"weight must be \[C\], got shape \[2, 2\]"),
        (lambda: fk.BrierLoss(torch.ones(2).int()), TypeError, r"BrierLoss: weight must be floating point"),
        (lambda: fk.BrierLoss(reduction="avg"), ValueError, r"reduction must be 'none', 'mean' or 'sum', got 'avg'"),
        (lambda: fk.BrierLoss(ignore_index=None), TypeError, r"ignore_index must be an int, got None"),
        (lambda: fk.FLSDLoss(label_smoothing=1.5), ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
        (lambda: fk.FLSDLoss(detach_modulation=1), TypeError, r"detach_modulation must be a bool, got int"),
        (lambda: fk.FLSDLoss([0, 0.5, 0.2, 1], [1, 2, 3]), ValueError, r"edges must be ascending"),
        (lambda: fk.FLSDLoss([0, 1], [1, 2]), ValueError, r"edges must have len\(gammas\) \+ 1 = 3 entries, got 2"),
        (lambda: fk.InverseFocalLoss(-1.0), ValueError, r"InverseFocalLoss: gamma must be at least 0, got -1.0"),
        (lambda: fk.InverseFocalLoss(torch.tensor(-1.0)), ValueError, r"gamma must be at least 0, got -1"),
        (lambda: fk.InverseFocalLoss(fk.FLSD_53), TypeError, r"InverseFocalLoss: gamma must be a number"),
        (lambda: fk.DualFocalLoss(-0.5), ValueError, r"DualFocalLoss: gamma must be at least 0, got -0.5"),
        (lambda: fk.DualFocalLoss(torch.ones(3)), TypeError, r"DualFocalLoss: gamma must be a number"),
        (lambda: fk.MMCELoss(reduction="none"), ValueError, r"MMCELoss: reduction must be 'mean' or 'sum', got 'none'"),
        (lambda: fk.MMCELoss(bandwidth=0.0), ValueError, r"MMCELoss: bandwidth must be at least 0.01"),
        (lambda: fk.MMCELoss(weighted="yes"), TypeError, r"MMCELoss: weighted must be a bool"),
        (lambda: fk.LogitNormPenalty(-1), ValueError, r"LogitNormPenalty: coefficient must be at least 0"),
        (lambda: fk.SigmoidFocalLoss(-1), ValueError, r"SigmoidFocalLoss: gamma must be at least 0"),
        (lambda: fk.SigmoidFocalLoss(alpha=2), ValueError, r"SigmoidFocalLoss: alpha must be in \[0, 1\]"),
        (lambda: fk.SigmoidFocalLoss(reduction="avg"), ValueError, r"reduction must be"),
    ],
)
def test_bad_settings_are_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_steep_inverse_gamma_is_warned_about():
    input, target = batch()
    with pytest.warns(UserWarning, match=r"gamma = -4.0 is below -3.591"):
        fk.InverseFocalLoss(4.0)(input, target)


@pytest.mark.parametrize("loss", [fk.DualFocalLoss(), fk.BrierLoss(), fk.MMCELoss(), fk.LogitNormPenalty()])
def test_bad_batches_are_named(loss):
    name = type(loss).__name__
    input, target = batch(5, 3)
    with pytest.raises(TypeError, match=rf"{name}: input must be a tensor, got list"):
        loss([0.0], target)
    fused = isinstance(loss, fk.DualFocalLoss | fk.BrierLoss)  # they have the words of focal_loss
    expected = "float16, bfloat16, float32 or float64, got Long" if fused else "floating point, got torch.int64"
    with pytest.raises(TypeError, match=rf"{name}: input must be {expected}"):
        loss(target, target)
    expected = (
        "int64, int32 or uint8 labels or floating-point class probabilities, got Bool"
        if fused
        else "int64, int32, uint8 or floating point, got torch.bool"
    )
    with pytest.raises(TypeError, match=rf"{name}: target must be {expected}"):
        loss(input, target.bool())
    with pytest.raises(ValueError, match=rf"{name}: target must be \[N\] = \[5\], got \[4\]"):
        loss(input, target[:4])
    with pytest.raises(ValueError, match=rf"{name}: target must be on the device of input, cpu, got meta"):
        loss(input, target.to("meta"))
    with pytest.raises(IndexError, match=rf"{name}: target must be in \[0, 3\) or ignore_index, got 3 at row 1"):
        loss(input, torch.tensor([0, 3, 0, 0, 0]))
    with pytest.raises(ValueError, match=rf"{name}: weight must be \[C\] = \[3\], got \[4\]"):
        type(loss)(weight=torch.ones(4))(input, target)
    if not isinstance(loss, fk.DualFocalLoss):
        with pytest.raises(ValueError, match=r"ignore_index must be negative \(unused\) for a target of class prob"):
            type(loss)(ignore_index=1)(input, input.softmax(-1))


def test_dual_takes_labels_only():
    with pytest.raises(TypeError, match=r"DualFocalLoss: target must be labels, int64, int32 or uint8, got"):
        fk.DualFocalLoss()(torch.randn(2, 3), torch.rand(2, 3))


@pytest.mark.parametrize(
    ("input", "target", "error", "message"),
    [
        ([0.0], torch.zeros(1), TypeError, r"input must be a tensor, got list"),
        (torch.zeros(1), 1.0, TypeError, r"target must be a tensor, got float"),
        (torch.zeros(1).long(), torch.zeros(1), TypeError, r"input must be floating point, got torch.int64"),
        (torch.zeros(2, 3), torch.zeros(2), ValueError, r"target must be the shape of input = \[2, 3\], got \[2\]"),
        (torch.zeros(1), torch.zeros(1, device="meta"), ValueError, r"target must be on the device of input"),
    ],
)
def test_bad_batches_of_sigmoid_focal_loss(input, target, error, message):
    with pytest.raises(error, match="sigmoid_focal_loss: " + message):
        fk.sigmoid_focal_loss(input, target)


_LOSSES_OF_LABELS = [
    *(getattr(fk, spec.module)() for spec in ROW_LOSSES.values()),
    fk.FLSDLoss(),
    fk.InverseFocalLoss(),
]


@pytest.mark.parametrize("road", ["kernels", "plain torch"])
@pytest.mark.parametrize("loss", _LOSSES_OF_LABELS, ids=repr)
@pytest.mark.parametrize(
    ("shape", "target", "kind", "words"),
    [
        (
            (8,),
            torch.ones(8).long(),
            ValueError,
            r"target must be one label, \[\], for one sample of \[C\] = \[8\] logits",
        ),
        ((8,), torch.ones(8).long(), ValueError, "got \\[8\\]; for one logit per sample use SigmoidFocalLoss"),
        ((8, 1), torch.ones(8).long(), IndexError, "got 1 at row 0; for one logit per sample use SigmoidFocalLoss"),
        ((8,), torch.ones(3).long(), ValueError, r"logits, got \[3\]$"),
        (
            (2, 5, 7),
            torch.ones(2, 5).long(),
            ValueError,
            r"\[N, d1, ...\] = \[2, 7\], got \[2, 5\]; classes are dimension 1",
        ),
        ((2, 5, 7), torch.ones(2, 5).long(), ValueError, r"input.flatten\(0, 1\), target.flatten\(0, 1\)"),
        ((2, 4, 5, 7), torch.ones(2, 4, 5).long(), ValueError, r"input.flatten\(0, 2\), target.flatten\(0, 2\)"),
        ((8, 3), torch.ones(8, 1).long(), ValueError, r"\[N\] = \[8\], got \[8, 1\]; target.squeeze\(-1\)"),
        ((8, 3), torch.ones(8, 3).long(), ValueError, r"got \[8, 3\]; one-hot rows are class probabilities: target.to"),
    ],
)
def test_a_target_that_does_not_fit_is_told_what_does(loss, road, shape, target, kind, words, monkeypatch):
    if road == "plain torch":
        monkeypatch.setattr(_backend, "_DEVICES", ())
        monkeypatch.setattr(_backend, "_SETTING", "0")
    with pytest.raises(kind, match=words):
        loss(torch.zeros(shape), target)
