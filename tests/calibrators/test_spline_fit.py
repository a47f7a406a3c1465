"""The parts of spline scaling: its spline, features and knots, its derivatives, and the optima of its fits."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import assert_close

import focalkern as fk
from focalkern import reference
from focalkern.calibrators import _row_source, _spline_curvature, _spline_fit, _spline_linear
from focalkern.calibrators import _spline_features as parts
from focalkern.calibrators._spline_curvature import linear_hessian, of_vector
from focalkern.calibrators._spline_curve import NaturalSpline
from focalkern.calibrators._spline_family import fit_family
from focalkern.calibrators._spline_features import find_knots, robust_temperature
from focalkern.calibrators._spline_fit import Map, curve_derivatives, fit_curve
from focalkern.calibrators._spline_linear import LinearObjective, fit_linear
from focalkern.calibrators._spline_order import keeps_order, order_conditions
from focalkern.calibrators._spline_rows import SplineRows
from focalkern.fallback import spline_sums

MEMBERS = ("free", "scalar", "vector", "matrix")


def draw(n=400, n_classes=4, seed=0, scale=2.0):
    """Logits of an over-confident network, and labels drawn from the correct probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, n_classes, generator=generator, dtype=torch.float64) * 2
    target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return scale * logits, target


def rows_of(logits, target, weight=None, kind="logits"):
    return SplineRows.of(_row_source.memory_rows(logits, target, weight), kind)


def log_probs(rows, map, logits, kind="logits"):
    return reference.spline_calibration_map(
        logits,
        rows.temperature,
        rows.floor,
        map.curve[0],
        rows.spline.knots,
        map.curve[1:],
        weight=map.weight,
        bias=map.bias,
        input_kind=kind,
        log=True,
    )


# -- the spline ------------------------------------------------------------------------------------------------------


def test_a_natural_spline_interpolates_smoothly_and_is_straight_beyond_its_ends():
    knots = torch.tensor([-3.0, -1.5, -1.25, 0.5, 2.0, 6.0], dtype=torch.float64)
    spline = NaturalSpline(knots)
    values = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(spline.rows(knots) @ values, values)

    def derivative(u, order):
        u = torch.as_tensor([u], dtype=torch.float64).requires_grad_()
        piece, offset = spline.locate(u.detach())
        c = spline.coefficients(values)[piece[0]]
        s = u - (u.detach() - offset)
        value = sum(c[k] * s**k for k in range(4))
        for _ in range(order):
            (value,) = torch.autograd.grad(value.sum(), u, create_graph=True)
        return value.item()

    step = 1e-9
    for knot in knots.tolist():  # pieces meet with equal f, f' and f''
        for order in range(3):
            assert derivative(knot - step, order) == pytest.approx(derivative(knot + step, order), abs=1e-6)
    for end in (-9.0, -3.0, 6.0 + step, 30.0):
        assert derivative(end, 2) == pytest.approx(0, abs=1e-12)
    # The penalty is the integral of f''^2. Simpson's rule is exact for it on each piece, because f'' is linear.
    integral = 0.0
    for low, high in zip(knots[:-1].tolist(), knots[1:].tolist(), strict=True):
        ends = derivative(low + step, 2), derivative((low + high) / 2, 2), derivative(high - step, 2)
        integral += (high - low) / 6 * (ends[0] ** 2 + 4 * ends[1] ** 2 + ends[2] ** 2)
    away = knots - knots.mean()
    slope, mean = float(away @ values / away.square().sum()), float(values.mean())
    curve = torch.cat([torch.tensor([0.7], dtype=torch.float64), values])
    expected = 5 * 0.7**2 + 5 * integral + 5 * slope**2 + 0.005 * mean**2
    assert float(curve @ spline.penalty @ curve) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("gamma", [-0.5, 1.0, 3.0])
def test_the_focal_map_is_a_member(gamma):
    logits = 4 * torch.randn(300, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    knots = torch.linspace(-20, 20, 161, dtype=torch.float64)
    phi = knots.exp() * torch.nn.functional.softplus(-knots)
    values = gamma * torch.nn.functional.softplus(knots) - (gamma * phi).log1p()
    found = reference.spline_calibration_map(logits, 1.3, 1e-15, 0.0, knots, values, log=True)
    assert found.numpy() == pytest.approx(fk.focal_calibration_map(logits, gamma, 1.3, log=True).numpy(), abs=1e-5)
    # Without a curve the score is x.
    x = parts.features(logits, 1.3, 0.01)[0]
    found = reference.spline_calibration_map(logits, 1.3, 0.01, 0.0, knots, torch.zeros(161), log=True)
    assert found.numpy() == pytest.approx(x.numpy(), abs=1e-14)


# -- features --------------------------------------------------------------------------------------------------------


def test_features_keep_their_digits_near_one_and_at_zero():
    scores = torch.tensor([[30.0, 0.0, -5.0], [0.0, -math.inf, -800.0]], dtype=torch.float64)
    x, u = parts.features(scores, 1.0, 1e-6)
    # 1 - p of the largest class is the sum over the others.
    assert float(u[0, 0]) == pytest.approx(
        -math.log(math.exp(-30) * (1 + math.exp(-5)) + 2e-6 / 3) + math.log1p(-1e-6), rel=1e-6
    )
    assert x[1, 1:].tolist() == pytest.approx([math.log(1e-6 / 3)] * 2)
    assert x.exp().sum(-1).tolist() == pytest.approx([1, 1], abs=1e-15)


def test_the_robust_temperature_minimises_its_definition():
    logits, target = draw(120, 5, scale=3.0)
    weight = torch.rand(120, dtype=torch.float64) + 0.5
    total = float(weight.sum())
    floor = 0.1 / (total + 1)

    def loss(log_t):
        p = (1 - floor) * (logits / math.exp(log_t)).softmax(-1) + floor / 5
        nll = -p.gather(1, target.unsqueeze(1)).squeeze(1).log()
        return float((weight * nll).sum() / total) + log_t**2 / (2 * total)

    found = math.log(robust_temperature(_row_source.memory_rows(logits, target, weight), "logits"))
    assert all(loss(found) <= loss(found + step) for step in (-1e-4, 1e-4))
    assert found == pytest.approx(min(np.linspace(-6, 6, 4801), key=loss), abs=3e-3)


@pytest.mark.parametrize("case", ["all right", "zeros on the target", "all wrong", "constant"])
def test_the_robust_temperature_is_finite_on_any_rows(case):
    logits, target = draw(50, 3)
    if case == "all right":
        target = logits.argmax(-1)
    elif case == "all wrong":
        target = logits.argmin(-1)
    elif case == "constant":
        logits = torch.zeros_like(logits)
    else:
        logits[torch.arange(10), target[:10]] = -math.inf
    temperature = robust_temperature(_row_source.memory_rows(logits, target), "logits")
    assert math.exp(-6) <= temperature <= math.exp(6)
    if case == "all right":
        assert 0.01 < temperature < 1
    if case == "constant":
        assert temperature == pytest.approx(1)


def test_the_temperature_of_x_is_capped_where_the_scores_run_against_the_labels():
    logits, target = draw(400, 2)
    rows = rows_of(logits, 1 - target)
    centred = logits - logits.mean(-1, keepdim=True)
    assert rows.temperature == pytest.approx(2 * float(centred.square().mean().sqrt()))


def test_knots_are_spread_quantiles():
    logits, target = draw(500, 10)
    knots = rows_of(logits, target).spline.knots
    assert 4 <= len(knots) <= 10
    assert float(knots.diff().min()) >= 0.25
    # Votes of few trees have few distinct values; four knots are still found.
    votes = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64).repeat(50, 1)
    few = rows_of(votes, torch.arange(100) % 2, kind="probs").spline.knots
    assert len(few) == 4
    assert few.diff().tolist() == pytest.approx([2 / 3] * 3)


def test_a_level_that_is_met_up_to_rounding_is_met():
    counts = torch.zeros(7680, dtype=torch.float64)
    counts[[3000, 3100, 3500, 4000, 4400]] = torch.tensor([0.02, 0.38, 0.2, 0.2, 0.2], dtype=torch.float64)
    knots = find_knots(counts)
    assert torch.equal(knots, find_knots(counts * 3 * (1 - 1e-15)))
    assert float(knots[0]) == pytest.approx((3000 + 0.5) / 64 - 60)


# -- derivatives -----------------------------------------------------------------------------------------------------


def objective(rows, map, logits, kind="logits"):
    """J / W of section 2 of the specification, written out."""
    source, total, c = rows.source, rows.weight_sum, logits.shape[1]
    of_target = log_probs(rows, map, logits, kind).gather(1, source.target.unsqueeze(1)).squeeze(1)
    penalty = map.curve @ rows.spline.penalty @ map.curve
    if map.weight is not None:
        square = map.weight.square()
        diagonal = square if square.dim() == 1 else square.diagonal()
        penalty = penalty + 2 * c * (diagonal.sum() + map.bias.square().sum())
        if square.dim() == 2:
            penalty = penalty + 2 * c * (c - 1) * (square.sum() - diagonal.sum())
    return (-(source.weight @ of_target) + rows.factor * penalty) / total


def rows_of_case(n_classes, case):
    """Rows, their input and its kind."""
    logits, target = draw(60, n_classes)
    weight, kind = None, "logits"
    if case == "weights":
        weight = torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.1
    if case == "zeros":
        kind, logits = "probs", logits.softmax(-1)
        logits[::3, 0] = 0
        logits /= logits.sum(-1, keepdim=True)
    rows = rows_of(logits, target, weight, kind)
    if case == "few knots":
        spline = NaturalSpline(torch.tensor([-3.0, -1.0, 0.0, 2.0], dtype=torch.float64))
        rows = dataclasses.replace(rows, spline=spline)
    return rows, logits, kind


@pytest.mark.parametrize("n_classes", [2, 3, 50])
@pytest.mark.parametrize("case", ["plain", "weights", "zeros", "few knots"])
def test_gradient_and_hessian_are_those_of_the_definition(n_classes, case):
    rows, logits, kind = rows_of_case(n_classes, case)
    random = torch.Generator().manual_seed(5)
    curve = 0.3 * torch.randn(len(rows.spline.knots) + 1, dtype=torch.float64, generator=random)

    for shape in (None, (n_classes,), (n_classes, n_classes)):
        if shape is None:
            map = Map(curve)
        else:
            map = Map(
                curve,
                0.1 * torch.randn(*shape, dtype=torch.float64, generator=random),
                0.1 * torch.randn(n_classes, dtype=torch.float64, generator=random),
            )
        wanted = Map(
            *(None if one is None else one.clone().requires_grad_() for one in (map.curve, map.weight, map.bias))
        )
        value = objective(rows, wanted, logits, kind)
        slopes = torch.autograd.grad(
            value, [one for one in (wanted.curve, wanted.weight, wanted.bias) if one is not None]
        )
        found = curve_derivatives(rows, map)
        assert found.value == pytest.approx(value.item(), rel=1e-12)
        assert found.gradient.numpy() == pytest.approx(slopes[0].numpy(), rel=1e-8, abs=1e-10)
        hessian = torch.autograd.functional.hessian(
            lambda curve, map=map: objective(rows, Map(curve, map.weight, map.bias), logits, kind), map.curve
        )
        assert found.hessian.numpy() == pytest.approx(hessian.numpy(), rel=1e-8, abs=1e-9)
        if shape is not None:
            of_all = LinearObjective(rows, map)
            value, gradient = of_all(of_all.point(map))
            assert value == pytest.approx(found.value, rel=1e-12)
            expected = torch.cat([one.reshape(-1) for one in slopes])
            assert gradient == pytest.approx(expected.numpy(), rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("n_classes", [2, 3, 5])
@pytest.mark.parametrize("case", ["plain", "weights", "zeros", "few knots"])
def test_the_hessian_in_all_parameters_is_that_of_the_definition(n_classes, case, monkeypatch):
    """At the free curve, where it scales the search; by kernels and in plain torch, in blocks of rows too."""
    rows, logits, kind = rows_of_case(n_classes, case)
    free = fit_curve(rows)
    n_curve, kernels = len(free.map.curve), _spline_curvature.spline_sums_for(logits)
    for member, n_own in (("vector", 2), ("matrix", n_classes + 1)):

        def value(point, n_own=n_own):
            curve, weight, bias = point.split([n_curve, n_classes * (n_own - 1), n_classes])
            return objective(rows, Map(curve, weight.reshape(n_classes, n_own - 1).squeeze(1), bias), logits, kind)

        start = torch.cat([free.map.curve, torch.zeros(n_classes * n_own, dtype=torch.float64)])
        expected = torch.autograd.functional.hessian(value, start)
        for sums, block in ((kernels, 1), (spline_sums, 1 << 14), (spline_sums, 160)):
            monkeypatch.setattr(_spline_curvature, "spline_sums_for", lambda input, sums=sums: sums)
            monkeypatch.setattr(spline_sums, "_HESSIAN_BLOCK", block)
            found = linear_hessian(rows, free.map, free.derivatives.hessian)
            places = of_vector(n_curve, n_classes) if member == "vector" else torch.arange(len(found))
            assert found[places][:, places].numpy() == pytest.approx(expected.numpy(), rel=1e-8, abs=1e-9)


# -- optima ----------------------------------------------------------------------------------------------------------


def test_members_improve_on_each_other_and_on_the_identity():
    logits, target = draw(800, 5, scale=3.0)
    logits = logits + torch.linspace(-1, 1, 5, dtype=torch.float64)
    rows = rows_of(logits, target)
    found = fit_family(rows, MEMBERS)
    value = {member: found[member].value for member in MEMBERS}
    identity = curve_derivatives(rows, Map(torch.zeros(len(rows.spline.knots) + 1, dtype=torch.float64))).value
    assert (
        value["matrix"] <= value["vector"] + 1e-9 <= value["free"] + 1e-9 <= value["scalar"] + 1e-9 <= identity + 1e-9
    )
    # The objective equals its definition.
    for member in MEMBERS:
        assert value[member] == pytest.approx(float(objective(rows, found[member].map, logits)), rel=1e-9)


@pytest.mark.parametrize("n_classes", [2, 4])
def test_every_start_ends_at_one_optimum(n_classes):
    logits, target = draw(300, n_classes)
    rows = rows_of(logits, target)
    family = fit_family(rows, MEMBERS)
    random = torch.Generator().manual_seed(2)
    start = torch.randn(len(rows.spline.knots) + 1, dtype=torch.float64, generator=random)
    again = fit_curve(rows, start)
    close = {"rel": 0, "abs": 1e-6}
    assert log_probs(rows, again.map, logits).numpy() == pytest.approx(
        log_probs(rows, family["free"].map, logits).numpy(), **close
    )
    for kind in ("vector", "matrix"):
        known = family[kind].map
        moved = Map(known.curve + 0.1 * start, 0.5 + known.weight, known.bias - 0.3)
        optimum, other = (fit_linear(rows, one, family.scales[kind], 1e-10) for one in (known, moved))
        assert log_probs(rows, other.map, logits).numpy() == pytest.approx(
            log_probs(rows, optimum.map, logits).numpy(), rel=1e-6, abs=1e-6
        )
        assert family[kind].value == pytest.approx(optimum.value, abs=2e-6)


def test_the_scales_of_the_search_do_not_move_its_optimum(monkeypatch):
    """A root of the Hessian in all parameters, in few steps, and scales of each parameter, as many classes have."""
    logits, target = draw(500, 6)
    rows = rows_of(logits, target)
    few = fit_family(rows, MEMBERS)
    monkeypatch.setattr(_spline_linear, "_FEW_CLASSES", 0)
    many = fit_family(rows, MEMBERS)
    for kind in ("vector", "matrix"):
        assert few[kind].value == pytest.approx(many[kind].value, abs=2e-6)
        assert few[kind].passes <= 8 < many[kind].passes
        probs = [log_probs(rows, one[kind].map, logits).exp().numpy() for one in (few, many)]
        assert probs[0] == pytest.approx(probs[1], rel=0, abs=2e-3)


def crossing(n=3000, n_classes=3):
    """A free curve changes the order of classes: in confident rows the second class is correct more often."""
    logits, target = draw(n, n_classes, scale=1.0)
    top = logits.topk(2).indices
    swapped = torch.where(target == top[:, 0], top[:, 1], torch.where(target == top[:, 1], top[:, 0], target))
    sure = logits.softmax(-1).amax(-1) > 0.7
    return logits, torch.where(sure, swapped, target)


@pytest.mark.parametrize("n", [300, 350, 450])
def test_the_search_under_the_condition_ends_at_rounding(n):
    """A step that raises the objective by at most the tolerance of the search is not halved repeatedly."""
    family = fit_family(rows_of(*crossing(n)), ("scalar",))
    assert family["scalar"].passes - family["free"].passes <= 8


@pytest.mark.parametrize("n_classes", [2, 3, 20])
def test_the_condition_binds_and_its_optimum_is_the_best_that_keeps_the_order(n_classes):
    logits, target = crossing(n_classes=n_classes)
    rows = rows_of(logits, target)
    family = fit_family(rows, ("free", "scalar"))
    spline, curve = rows.spline, family["scalar"].map.curve
    assert not keeps_order(spline, n_classes, family["free"].map.curve)
    assert keeps_order(spline, n_classes, curve)
    # No feasible direction descends: a step to any other curve that keeps the order raises the objective.
    here = family["scalar"].derivatives
    conditions, constant = order_conditions(spline, n_classes, 240, 160)
    random = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(2000):
        step = (
            0.01
            * torch.randn(len(curve), dtype=torch.float64, generator=random)
            @ torch.linalg.cholesky(torch.linalg.inv(here.hessian)).T
        )
        if bool((conditions @ (curve + step) + constant >= 0).all()):
            inside += 1
            assert float(here.gradient @ step + step @ here.hessian @ step / 2) >= -1e-5
    assert inside > 20


def test_blocks_of_any_size_give_the_same(monkeypatch):
    logits, target = draw(700, 6)
    whole = fit_family(rows_of(logits, target), MEMBERS)
    monkeypatch.setattr(_row_source, "BLOCK", 6 * 64)
    monkeypatch.setattr(spline_sums, "_BLOCK", 6 * 100)
    rows = rows_of(logits, target)
    found = fit_family(rows, MEMBERS)
    for member in MEMBERS:
        expected = log_probs(rows, whole[member].map, logits).numpy()
        assert log_probs(rows, found[member].map, logits).numpy() == pytest.approx(expected, abs=1e-10)


def test_many_rows_start_from_a_part_of_them(monkeypatch):
    logits, target = draw(2000, 4)
    expected = fit_curve(rows_of(logits, target))
    monkeypatch.setattr(_spline_fit, "_FEW", 1000)
    found = fit_curve(rows_of(logits, target))
    assert found.map.curve.numpy() == pytest.approx(expected.map.curve.numpy(), abs=1e-7)


def test_warm_folds_are_cold_folds():
    logits, target = draw(600, 5)
    rows = rows_of(logits, target)
    full = fit_family(rows, MEMBERS)
    fold = rows.on(rows.source.select(lambda number: number % 5 != 0))
    warm, cold = fit_family(fold, MEMBERS, full), fit_family(fold, MEMBERS)
    for member in MEMBERS:
        assert warm[member].value == pytest.approx(cold[member].value, abs=2e-5)
        assert warm[member].passes <= cold[member].passes
