"""The oracle of the other tests, itself tested against definitions at 300 digits (oracle.py)."""

import math

import mpmath
import numpy
import oracle
import pytest
import torch
from conftest import TOLERANCE

from focalkern import reference
from focalkern.gamma import FLSD_53, GammaTable

# Rows of logits by the gap of the two largest. 0: no unique largest class; 1: nothing extreme; 12: past the switch to
# the series for phi; 40: 1 - p is below the rounding of 1; 80: the largest gap of the contract.
GAPS = [0.0, 1.0, 12.0, 40.0, 80.0]
# 5: the largest of FLSD-53; 2: the default; 0.25: (1 - p)^gamma has an infinite derivative at p = 1; 0: cross-entropy;
# -0.5, -2, -5: inverse focal, with a negative coefficient at -5.
LOSS_GAMMAS = [5.0, 2.0, 0.25, 0.0, -0.5, -2.0, -5.0]
# The map's domain is gamma > -1: -0.99 is near its edge, -0.5 and 5 are the ends of the paper's grid.
MAP_GAMMAS = [5.0, 1.0, 0.25, 0.0, -0.5, -0.99]


def row(gap: float) -> list[float]:
    return [0.3 - gap, 0.3, -0.7 - gap] if gap else [0.3, 0.3, 0.3]


def check(actual: torch.Tensor, expected: list, what: str) -> None:
    """Compares the relative error in float64 for every magnitude; only values below 1e-290 count as near 0."""
    rtol = TOLERANCE[torch.float64][0]
    for a, e in zip(actual.flatten().tolist(), expected, strict=True):
        assert abs(mpmath.mpf(a) - e) <= rtol * abs(e) + mpmath.mpf("1e-290"), (what, a, mpmath.nstr(e, 17))


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("gamma", LOSS_GAMMAS)
# Class 1 is the largest (p -> 1), class 0 is one of the others (p -> 0).
@pytest.mark.parametrize("target", [0, 1])
def test_focal_loss_value_and_gradients_at_300_digits(gap, gamma, target):
    z = torch.tensor(row(gap), dtype=torch.float64, requires_grad=True)
    g = torch.tensor(gamma, dtype=torch.float64, requires_grad=True)
    value = reference.focal_loss(z, torch.tensor(target), g)
    grad_z, grad_gamma = torch.autograd.grad(value, (z, g), create_graph=True)
    direction = torch.tensor([0.5, -1.25, 2.0], dtype=torch.float64)
    (product,) = torch.autograd.grad(grad_z @ direction, z)
    with oracle.precision():
        check(value, [oracle.loss(row(gap), target, gamma)], "loss")
        of_z = lambda x: oracle.loss(x, target, gamma)  # noqa: E731
        check(grad_z, oracle.gradient(of_z, row(gap)), "gradient")
        check(product, oracle.hessian_product(of_z, row(gap), direction.tolist()), "Hessian product")
        # At gamma = 0 the derivative is the one from the right.
        p = oracle.softmax(list(map(mpmath.mpf, row(gap))))[target]
        slope = -mpmath.log(p) * (mpmath.log(1 - p) if gamma >= 0 else -mpmath.log(1 + p))
        check(grad_gamma, [slope * oracle.factor(p, mpmath.mpf(gamma))], "d/dgamma")


# Smoothing and soft targets process every class of a row: a target with a zero, and one that does not sum to 1.
@pytest.mark.parametrize("target", [[0.0, 1.0, 0.0], [0.7, 0.1, 0.3]])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("gamma", LOSS_GAMMAS)
def test_focal_loss_of_probability_targets_at_300_digits(target, smoothing, gamma):
    z = torch.tensor(row(12.0), dtype=torch.float64, requires_grad=True)
    t = torch.tensor(target, dtype=torch.float64, requires_grad=True)
    value = reference.focal_loss(z, t, gamma, label_smoothing=smoothing)
    grad_z, grad_t = torch.autograd.grad(value, (z, t))
    with oracle.precision():
        check(value, [oracle.loss(row(12.0), target, gamma, smoothing)], "loss")
        check(grad_z, oracle.gradient(lambda x: oracle.loss(x, target, gamma, smoothing), row(12.0)), "gradient")
        p = oracle.softmax(list(map(mpmath.mpf, row(12.0))))
        slopes = [-(1 - mpmath.mpf(smoothing)) * oracle.factor(q, mpmath.mpf(gamma)) * mpmath.log(q) for q in p]
        check(grad_t, slopes, "d/dtarget")


def test_focal_loss_with_gamma_0_is_cross_entropy_option_by_option():
    z = torch.randn(6, 5, 3, dtype=torch.float64, requires_grad=True)
    hard = torch.randint(5, (6, 3))
    hard[0, 1] = hard[4, 2] = -100
    soft = torch.rand(6, 5, 3, dtype=torch.float64)
    weight = torch.rand(5, dtype=torch.float64)
    # Every combination: each option changes the divisor of the mean.
    for target in (hard, soft):
        for w in (None, weight):
            for smoothing in (0.0, 0.2):
                for reduction in ("none", "sum", "mean"):
                    options = {"weight": w, "label_smoothing": smoothing, "reduction": reduction}
                    ours = reference.focal_loss(z, target, 0.0, **options)
                    theirs = torch.nn.functional.cross_entropy(z, target, **options)
                    torch.testing.assert_close(ours, theirs)
                    upstream = torch.randn_like(ours)
                    ours, theirs = (torch.autograd.grad(v, z, upstream)[0] for v in (ours, theirs))
                    torch.testing.assert_close(ours, theirs)


def test_focal_loss_table_is_looked_up_at_each_p_without_gradient():
    table = GammaTable([0.0, 0.5, 0.5, 0.75, 1.0], [4.0, 9.0, 2.0, -1.0])
    z = torch.tensor([[0.0, 0.0, -800.0, -800.0], [3.0, 0.0, 0.0, 0.0], [-2.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    z.requires_grad_()
    # p = 0.5 exactly, on a double edge: the bin that begins there; p = 0.87; p = 0.04.
    expected_gamma = torch.tensor([2.0, -1.0, 4.0], dtype=torch.float64)
    target = torch.zeros(3, dtype=torch.int64)
    by_table = reference.focal_loss(z, target, table, reduction="none")
    by_row = reference.focal_loss(z, target, expected_gamma, reduction="none")
    assert by_table.tolist() == by_row.tolist()
    upstream = torch.randn(3, dtype=torch.float64)
    assert torch.equal(torch.autograd.grad(by_table, z, upstream)[0], torch.autograd.grad(by_row, z, upstream)[0])
    soft = reference.focal_loss(z[2:], torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64), FLSD_53)
    with oracle.precision():
        # p = (0.04, 0.32, 0.32, 0.32): gamma 5 for the first class, 3 for the second.
        p = oracle.softmax([mpmath.mpf(v) for v in z[2].tolist()])
        expected = -sum(oracle.factor(p[i], mpmath.mpf(g)) * mpmath.log(p[i]) / 2 for i, g in ((0, 5), (1, 3)))
        check(soft, [expected], "soft target")


def test_focal_loss_detached_modulation_keeps_the_value_and_drops_the_factor_from_the_gradient():
    z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 3, 1, 4])
    p = z.softmax(-1)
    for gamma in (2.0, -2.0):
        detached = reference.focal_loss(z, target, gamma, detach_modulation=True, reduction="none")
        assert torch.equal(detached, reference.focal_loss(z, target, gamma, reduction="none"))
        upstream = torch.randn(4, dtype=torch.float64)
        (grad,) = torch.autograd.grad(detached, z, upstream)
        p_y = p.gather(1, target[:, None])
        f = (1 - p_y) ** gamma if gamma >= 0 else (1 + p_y) ** -gamma
        expected = upstream[:, None] * f * (p - torch.nn.functional.one_hot(target, 5))
        torch.testing.assert_close(grad, expected)


def test_focal_loss_where_a_logit_is_infinite():
    z = torch.tensor([0.0, -math.inf, 1.0], dtype=torch.float64, requires_grad=True)
    for gamma in (2.0, 0.5, 0.0, -2.0):
        g = torch.tensor(gamma, dtype=torch.float64, requires_grad=True)
        # The target itself: infinite loss, the gradient of cross-entropy because f(0) = 1, and none for gamma.
        value = reference.focal_loss(z, torch.tensor(1), g)
        grad_z, grad_gamma = torch.autograd.grad(value, (z, g))
        assert value == math.inf
        torch.testing.assert_close(grad_z, z.detach().softmax(-1) - torch.tensor([0.0, 1.0, 0.0]))
        assert grad_gamma == 0
        # As if the class did not exist.
        soft = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
        for target in (torch.tensor(0), soft):
            value = reference.focal_loss(z, target, g)
            without = reference.focal_loss(z[[0, 2]], target if target.dim() == 0 else target[[0, 2]], g)
            torch.testing.assert_close(value, without)
            (grad,) = torch.autograd.grad(value, z, create_graph=True)
            torch.testing.assert_close(grad, torch.autograd.grad(without, z, create_graph=True)[0])
            (product,) = torch.autograd.grad(grad[0], z)
            assert product.isfinite().all()
            assert product[1] == 0
    for bad in (math.nan, math.inf):
        broken = torch.tensor([0.0, bad, -1.0], dtype=torch.float64, requires_grad=True)
        value = reference.focal_loss(broken, torch.tensor(0))
        assert value.isnan()
        assert torch.autograd.grad(value, broken)[0].isnan().all()


def test_focal_loss_of_a_lone_class_is_that_of_a_certain_one():
    # p = 1 exactly: f = 0 for gamma > 0, 1 for 0, 2^|gamma| below; the loss and all its derivatives vanish.
    rows = [torch.tensor([2.0]), torch.tensor([-math.inf, 2.0, -math.inf])]
    for z in rows:
        for gamma in (2.0, 0.5, 0.0, -2.0):
            z = z.double().requires_grad_()
            g = torch.tensor(gamma, dtype=torch.float64, requires_grad=True)
            value = reference.focal_loss(z, torch.tensor(len(z) // 2), g)
            grads = torch.autograd.grad(value, (z, g))
            assert value == 0
            assert not torch.signbit(value + 0.0)
            assert (grads[0] == 0).all()
            assert grads[1] == 0


def test_focal_loss_without_valid_rows():
    z = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    ignored = torch.full((3,), -100)
    mean = reference.focal_loss(z, ignored)
    assert mean.isnan()
    assert (torch.autograd.grad(mean, z)[0] == 0).all()
    assert reference.focal_loss(z, ignored, reduction="sum") == 0
    assert reference.focal_loss(z[:0], ignored[:0]).isnan()


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("gamma", MAP_GAMMAS)
# 1 is the default, 0.37 enlarges the gaps, 2.5 is typical for over-confident networks.
@pytest.mark.parametrize("temperature", [1.0, 0.37, 2.5])
def test_calibration_map_at_300_digits(gap, gamma, temperature):
    z = torch.tensor(row(gap), dtype=torch.float64, requires_grad=True)
    g = torch.tensor(gamma, dtype=torch.float64, requires_grad=True)
    t = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    log_p = reference.focal_calibration_map(z, g, t, log=True)
    upstream = torch.tensor([0.5, -1.25, 2.0], dtype=torch.float64)
    grads = torch.autograd.grad(log_p @ upstream, (z, g, t))
    with oracle.precision():
        check(log_p, oracle.log_map(row(gap), gamma, temperature), "log map")
        check(
            reference.focal_calibration_map(z, g, t),
            [mpmath.exp(v) for v in oracle.log_map(row(gap), gamma, temperature)],
            "map",
        )

        def of(x):
            return mpmath.fdot(oracle.log_map(x[:3], x[3], x[4]), upstream.tolist())

        expected = oracle.gradient(of, [*row(gap), gamma, temperature])
        # Entries are sums of terms of the magnitude of the largest, so errors are relative to that, except where
        # nothing cancels.
        scale = max(map(abs, expected))
        for actual, exact in zip(torch.cat([grads[0], grads[1][None], grads[2][None]]).tolist(), expected, strict=True):
            assert abs(actual - exact) <= TOLERANCE[torch.float64][0] * scale


@pytest.mark.parametrize("gamma", MAP_GAMMAS)
# Both signs, because the two phi change roles; 0, where the derivative of |s| would jump; 80 as above.
@pytest.mark.parametrize("s", [-80.0, -3.0, 0.0, 0.4, 12.0, 80.0])
def test_binary_calibration_map_at_300_digits(gamma, s):
    x = torch.tensor(s, dtype=torch.float64, requires_grad=True)
    g = torch.tensor(gamma, dtype=torch.float64, requires_grad=True)
    t = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    log_odds = reference.binary_focal_calibration_map(x, g, t, log_odds=True)
    probability = reference.binary_focal_calibration_map(x, g, t)
    grads = torch.autograd.grad(log_odds, (x, g, t))
    with oracle.precision():
        exact = oracle.binary_log_odds(s, gamma, 1.5)
        assert abs(log_odds.item() - exact) <= 1e-12 * abs(exact)
        check(probability, [1 / (1 + mpmath.exp(-exact))], "probability")
        expected = oracle.gradient(lambda v: oracle.binary_log_odds(*v), [s, gamma, 1.5])
        for actual, e in zip(grads, expected, strict=True):
            assert abs(actual.item() - e) <= 1e-11 * max(abs(e), 1), (actual, e)


def test_calibration_map_of_probabilities_and_absent_classes():
    z = torch.tensor([[1.0, -math.inf, 0.5, -1.0], [0.0, -math.inf, -math.inf, -math.inf]], dtype=torch.float64)
    for gamma in (1.0, -0.5):
        for temperature in (1.0, 2.0):
            of_logits = reference.focal_calibration_map(z, gamma, temperature)
            assert (of_logits[:, 1] == 0).all()
            assert of_logits[1].tolist() == [1.0, 0.0, 0.0, 0.0]
            without = reference.focal_calibration_map(z[0, [0, 2, 3]], gamma, temperature)
            torch.testing.assert_close(of_logits[0, [0, 2, 3]], without)
            # Scaled by 1.0005: renormalised.
            of_probs = reference.focal_calibration_map(1.0005 * z.softmax(-1), gamma, temperature, input_kind="probs")
            torch.testing.assert_close(of_probs, of_logits)


def test_calibration_map_gradients_with_an_absent_class_are_those_without_it():
    z = torch.tensor([1.0, -math.inf, 0.5, -1.0], dtype=torch.float64, requires_grad=True)
    present = z[[0, 2, 3]]
    upstream = torch.randn(3, dtype=torch.float64)
    g = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    t = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    whole = reference.focal_calibration_map(z, g, t)[[0, 2, 3]]
    part = reference.focal_calibration_map(present, g, t)
    first = [torch.autograd.grad(v @ upstream, (z, g, t), create_graph=True) for v in (whole, part)]
    second = [torch.autograd.grad(sum((d * d).sum() for d in grads), (z, g, t)) for grads in first]
    for derivatives in (first, second):
        for actual, expected in zip(*derivatives, strict=True):
            torch.testing.assert_close(actual, expected)


def test_calibration_map_broadcasts_and_is_nan_outside_its_domain():
    z = torch.randn(2, 3, 4, dtype=torch.float64)
    gamma = torch.tensor([0.5, 1.0, -1.0], dtype=torch.float64)
    temperature = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    out = reference.focal_calibration_map(z, gamma, temperature)
    torch.testing.assert_close(out[0, 1], reference.focal_calibration_map(z[0, 1], 1.0, 1.0))
    assert out[:, 2].isnan().all()
    assert out[1].isnan().all()
    assert out[0, :2].isfinite().all()


def test_derivatives_of_the_map_agree_with_finite_differences():
    z = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    gamma = torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(reference.focal_calibration_map, (z, gamma, temperature))
    assert torch.autograd.gradgradcheck(reference.focal_calibration_map, (z, gamma, temperature))
    s = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(reference.binary_focal_calibration_map, (s, gamma[:1], temperature))


def test_half_types_are_computed_in_float32_and_keep_their_dtype():
    for dtype in (torch.float16, torch.bfloat16):
        z = torch.randn(5, 7).to(dtype)
        target = torch.randint(7, (5,))
        assert reference.focal_loss(z, target).dtype == dtype
        assert torch.equal(reference.focal_loss(z, target), reference.focal_loss(z.float(), target).to(dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert reference.focal_loss(z, target).dtype == torch.float32
        mapped = reference.focal_calibration_map(z, 1.0)
        assert torch.equal(mapped, reference.focal_calibration_map(z.float(), 1.0).to(dtype))


# N = 10 samples and 3 bins: sizes differ; 4 and 15: more bins than samples; 1: one bin; 30: all edges are samples; 50
# and 99: some edges are samples, at ranks that rounding may miss.
@pytest.mark.parametrize(("n", "n_bins"), [(10, 3), (4, 15), (7, 1), (30, 15), (50, 15), (99, 55)])
def test_bins_are_those_of_numpy(n, n_bins):
    confidence = torch.rand(n, dtype=torch.float64)
    confidence[-1] = confidence[0]
    order = numpy.argsort(confidence.numpy(), kind="stable")
    expected = numpy.empty(n, dtype=numpy.int64)
    for b, part in enumerate(numpy.array_split(order, n_bins)):
        expected[part] = b
    assert reference.assign_bins(confidence, n_bins, "equal_mass").tolist() == expected.tolist()

    edges = numpy.interp(numpy.linspace(0, n, n_bins + 1), numpy.arange(n), numpy.sort(confidence.numpy()))
    bins = reference.assign_bins(confidence, n_bins, "equal_mass_interp").numpy()
    assert (bins == numpy.searchsorted(edges, confidence.numpy(), side="left") - 1).all()
    assert (bins == -1).any()

    bins = reference.assign_bins(confidence, n_bins, "equal_width").numpy()
    assert (bins == numpy.ceil(confidence.numpy() * n_bins) - 1).all()


def test_equal_width_edges_belong_to_the_bin_below():
    for dtype in (torch.float32, torch.float64):
        edges = torch.tensor([k / 15 for k in range(16)], dtype=torch.float64).to(dtype)
        assert reference.assign_bins(edges, 15, "equal_width").tolist() == [0, *range(15)]
        above = torch.nextafter(edges[:-1], torch.ones_like(edges[:-1]))
        assert reference.assign_bins(above, 15, "equal_width").tolist() == list(range(15))


def test_calibration_error_by_hand():
    confidence = torch.tensor([0.55, 0.6, 0.9, 1.0], dtype=torch.float64)
    correct = torch.tensor([True, False, True, True])
    # Two bins of width 0.5: all samples in the second; |0.75 - 0.7625|.
    assert reference.calibration_error(confidence, correct, 2) == pytest.approx((0.0125, 0.0125))
    # Two halves: |0.5 - 0.575| and |1 - 0.95|.
    assert reference.calibration_error(confidence, correct, 2, "equal_mass") == pytest.approx((0.0625, 0.075))
    # Edges 0.55, 0.9, 1.0; 0.55 is in no bin but counts in N: {0.6, 0.9} |0.5 - 0.75|, {1.0} 0.
    assert reference.calibration_error(confidence, correct, 2, "equal_mass_interp") == pytest.approx((0.125, 0.25))
    assert all(math.isnan(v) for v in reference.calibration_error(confidence[:0], correct[:0]))


def test_grid_cell_by_hand():
    z = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]], dtype=torch.float64)
    target = torch.tensor([0, 0, 1])
    tables = reference.calibration_grid(
        torch.cat([z, z[:1]]), torch.cat([target, torch.tensor([-100])]), [0.0, 1.0], [0.5], n_bins=1,
        criteria=("ece", "mce", "nll", "brier"),
    )  # fmt: skip
    with oracle.precision():
        for i, gamma in enumerate((0.0, 1.0)):
            log_p = [oracle.log_map(r, gamma, 0.5) for r in z.tolist()]
            p = [[mpmath.exp(v) for v in r] for r in log_p]
            # Row 0 is correct, row 1 wrong; row 2 is a tie, which the first class wins, so it is wrong.
            gap = abs(mpmath.mpf(1) / 3 - sum(max(r) for r in p) / 3)
            expected = {
                "ece": gap,
                "mce": gap,
                "nll": -sum(r[y] for r, y in zip(log_p, target.tolist(), strict=True)) / 3,
                "brier": sum((r[k] - (k == y)) ** 2 for r, y in zip(p, target.tolist(), strict=True) for k in (0, 1))
                / 3,
            }
            for name, exact in expected.items():
                check(tables[name][i], [exact], name)
