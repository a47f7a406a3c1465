"""The training losses: definitions at 300 digits.

AdaFocal's bins and updates are in test_adafocal.py; the look-up of gamma tables is in test_focal_loss.py.
"""

import mpmath
import oracle
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close
from loss_cases import DTYPES, OF_BATCH, batch, gradient
from mpmath import mpf

import focalkern as fk
from focalkern.reference._softmax_losses import ROW_LOSSES

# Rows: an ordinary one; the target 80 above or below the others; saturated far beyond exp's range, in both directions;
# the target largest by a small margin; a tie with the target (only one class strictly below it); all equal; two
# classes.
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
            # Relative to the logits, so that equal logits stay equal when a third one is moved for a derivative.
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
            if not (tied and name.startswith("dual")):  # the derivative does not exist there
                assert_close(gradient(found.sum(), input)[0], torch.tensor(expected_slope, dtype=torch.float64))


@pytest.mark.parametrize("name", ["dual 5", "brier", "focal 3", "poly", "poly, the two terms cancel"])
def test_small_values_keep_their_relative_precision(name):
    """1 - p is a sum of the other classes and keeps its digits near p = 1. The tolerance is relative to show it."""
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
    else:  # three sums, as printed by Kumar et al.
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


# Sizes for insertion sort and for radix sort with short and with long digits; and confidences that differ only in their
# last digits, beside one that is far away.
@pytest.mark.parametrize("n, apart", [(12, 1), (300, 1), (1500, 1), (300, 1e-10), (1500, 1e-10)])
def test_mmce_of_many_samples_is_its_double_sum(n, apart):
    """Includes ties, which contribute to the value but not to the derivative."""
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
    """250,000 pixels, whose kernel matrix would take 500 GB."""
    input, target = torch.randn(1, 3, 500, 500), torch.randint(3, (1, 500, 500))
    assert fk.MMCELoss()(input, target) > F.cross_entropy(input, target)
