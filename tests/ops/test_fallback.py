"""focalkern.fallback compared with the compiled kernels, and with definitions at 300 digits."""

import functools

import mpmath
import numpy as np
import oracle
import pytest
import torch
from conftest import assert_close

import focalkern as fk
from focalkern import fallback
from focalkern.ops.calibration_grid import _CRITERIA, _ESTIMATORS

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TABLE = fk.GammaTable([0.0, 0.2, 0.6, 1.0], [5.0, -1.0, 0.5])


def leaf(tensor):
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def rows(n=40, classes=7):
    # Saturated rows, equal logits and an impossible class among ordinary rows.
    z = torch.randn(n, classes, dtype=torch.float64) * torch.linspace(0.1, 30, n, dtype=torch.float64).unsqueeze(1)
    z[0], z[1, 2] = 0.0, -torch.inf
    return z


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["labels", "smoothed", "probabilities"])
def test_loss_is_that_of_the_kernels(dtype, kind):
    z = leaf(rows().to(dtype))
    target = torch.randint(7, (40,)) if kind != "probabilities" else leaf(rows().softmax(1).to(dtype))
    weight = torch.rand(7, dtype=torch.float64) + 0.5
    if kind == "labels":
        target[3] = -100
    smoothing = 0.1 if kind == "smoothed" else 0.0
    per_row = leaf(torch.linspace(-2, 5, 40, dtype=dtype))
    for gamma in (0.0, 2.0, -1.5, per_row, TABLE):
        edges, number = (TABLE.edges, TABLE.gammas) if gamma is TABLE else (None, gamma)
        ours = fallback.focal_loss(z, target, number, edges, weight, 0, -100, smoothing, False)
        theirs = fk.focal_loss(z, target, gamma, weight=weight, reduction="none", label_smoothing=smoothing)
        assert_close(ours, theirs)
        finite = torch.where(theirs.isfinite(), torch.randn_like(theirs), 0.0)
        inputs = [t for t in (z, target, number) if isinstance(t, torch.Tensor) and t.requires_grad]
        for mine, other in zip(
            torch.autograd.grad(ours, inputs, finite), torch.autograd.grad(theirs, inputs, finite), strict=True
        ):
            assert_close(mine, other)


# Ordinary shares; a nearly certain row, correct and wrong; hard shares, whose other classes must not count.
ROWS_AND_SHARES = [
    ([0.25, -1.0, 2.5, 0.0], [0.125, 0.25, 0.5, 0.125]),
    ([0.25, -14.0, 21.5, 3.0], [0.125, 0.25, 0.625, 0.0]),
    ([40.0, -3.0, 1.0, 2.0], [1.0, 0.0, 0.0, 0.0]),
    ([40.0, -3.0, 1.0, 2.0], [0.0, 0.5, 0.5, 0.0]),
    ([0.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
]


@pytest.mark.parametrize("gamma", [2.0, 0.5, 0.0, -1.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["probabilities", "labels"])
def test_loss_that_weighs_every_class_at_300_digits(gamma, smoothing, kind):
    """Compares values, and derivatives in logits, gamma and shares."""
    weight = [0.5, 1.0, 2.0, 0.25]
    z = leaf(torch.tensor([row for row, _ in ROWS_AND_SHARES], dtype=torch.float64))
    shares = leaf(torch.tensor([share for _, share in ROWS_AND_SHARES], dtype=torch.float64))
    labels = shares.detach().argmax(1)
    per_row = leaf(torch.full((len(z),), gamma, dtype=torch.float64))
    weights = torch.tensor(weight, dtype=torch.float64)
    soft = kind == "probabilities"
    found = fallback.focal_loss(z, shares if soft else labels, per_row, None, weights, 0, -100, smoothing, False)
    slopes = torch.autograd.grad(found.sum(), (z, per_row, shares) if soft else (z, per_row))

    def loss(row, share, number):
        e = mpmath.mpf(smoothing)
        t = [w * ((1 - e) * s + e / 4) for w, s in zip(weight, share, strict=True)]
        terms = zip(t, oracle.softmax(row), strict=True)
        return -mpmath.fsum(s * oracle.factor(p, number) * mpmath.log(p) for s, p in terms if s != 0)

    with oracle.precision():
        for i, (row, share) in enumerate(ROWS_AND_SHARES):
            share = [mpmath.mpf(s) for s in (share if soft else [float(k == int(labels[i])) for k in range(4)])]
            row, number = [mpmath.mpf(v) for v in row], mpmath.mpf(gamma)
            step = mpmath.mpf(10) ** -60  # from the right at gamma = 0, where the formula changes
            expected = [
                [loss(row, share, number)],
                oracle.gradient(functools.partial(loss, share=share, number=number), row),
                [(loss(row, share, number + step) - loss(row, share, number)) / step],
                oracle.gradient(lambda t, row=row, number=number: loss(row, t, number), share),
            ]
            for mine, other in zip((found[i : i + 1], *(s[i].reshape(-1) for s in slopes)), expected, strict=False):
                assert_close(mine, torch.tensor([float(v) for v in other], dtype=torch.float64))


@pytest.mark.parametrize("gamma", [2.0, 0.0, -1.5])
def test_share_of_a_class_that_cannot_occur(gamma):
    """It adds 0, and its derivative is the loss that the class would have: the limit as the logit falls."""
    z = torch.tensor([[0.25, -torch.inf, 2.5]], dtype=torch.float64, requires_grad=True)
    shares = torch.tensor([[0.25, 0.0, 0.75]], dtype=torch.float64, requires_grad=True)
    loss = fallback.focal_loss(z, shares, gamma, None, None, 2, -100, 0.0, False)
    of_logits, of_shares = torch.autograd.grad(loss, (z, shares))
    with oracle.precision():
        expected = oracle.loss([0.25, 2.5], [0.25, 0.75], gamma)
        row = oracle.gradient(lambda x: oracle.loss(x, [0.25, 0.75], gamma), [0.25, 2.5])
    assert_close(loss, torch.tensor(float(expected), dtype=torch.float64))
    assert_close(of_logits[0], torch.tensor([float(row[0]), 0.0, float(row[1])], dtype=torch.float64))
    assert of_shares[0, 1] == torch.inf
    assert of_shares[0, [0, 2]].isfinite().all()


def test_cell_of_the_grid_at_300_digits():
    z = torch.tensor([[0.25, -1.0, 2.5], [3.0, 0.5, -7.0], [-0.5, 0.0, 0.25]], dtype=torch.float64)
    target = torch.tensor([2, 1, 0])
    axes = torch.tensor([-0.5, 5.0], dtype=torch.float64), torch.tensor([0.5, 2.0], dtype=torch.float64)
    found = fallback.CalibrationGridRun(z, target, *axes, 2, 15, _ESTIMATORS["equal_width"], False, -100).run(0, 2)
    with oracle.precision():
        for i, gamma in enumerate(axes[0].tolist()):
            for j, temperature in enumerate(axes[1].tolist()):
                log_p = [oracle.log_map(row, gamma, temperature) for row in z.tolist()]
                p = [[mpmath.exp(v) for v in row] for row in log_p]
                nll = -mpmath.fsum(row[y] for row, y in zip(log_p, target.tolist(), strict=True)) / 3
                brier = sum(
                    mpmath.fsum((v - (k == y)) ** 2 for k, v in enumerate(row))
                    for row, y in zip(p, target.tolist(), strict=True)
                )
                sure = [(max(row), row.index(max(row)) == y) for row, y in zip(p, target.tolist(), strict=True)]
                bins = [[c - right for c, right in sure if (c > 0.5) == upper] for upper in (False, True)]
                ece = sum(abs(sum(b)) for b in bins) / 3
                mce = max(abs(sum(b)) / len(b) for b in bins if b)
                expected = torch.tensor([float(v) for v in (ece, mce, nll, brier / 3)], dtype=torch.float64)
                torch.testing.assert_close(found[:, i, j], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.kernels("stable")
@pytest.mark.parametrize("estimator", _ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_grid_is_that_of_the_kernels(estimator, dtype):
    z, target = rows(203, 11).to(dtype), torch.randint(11, (203,))
    target[5] = -100
    gammas = torch.tensor([-0.9, -0.25, 0.0, 1.0, 5.0, 80.0], dtype=torch.float64)
    temperatures = torch.tensor([0.05, 0.4, 1.0, 3.0], dtype=torch.float64)
    options = (15, sum(_CRITERIA.values()), _ESTIMATORS[estimator])
    for input, is_probs in ((z, False), (z.softmax(1), True)):
        run = fallback.CalibrationGridRun(input, target, gammas, temperatures, *options, is_probs, -100)
        ours = torch.cat([run.run(t, min(t + run.per_block, 4)) for t in range(0, 4, run.per_block)], dim=2)
        theirs = fk.calibration_grid(
            input,
            target,
            gammas,
            temperatures,
            criteria=tuple(_CRITERIA),
            estimator=estimator,
            input_kind="probs" if is_probs else "logits",
        )
        for name, table in zip(_CRITERIA, ours, strict=True):
            # A sample within rounding of a cut may fall on either side; with ties, mce depends on the order of rows.
            atol = {"ece": 2 / 202 + 1e-6, "mce": 1.0}.get(name, 1e-6)
            torch.testing.assert_close(table, theirs.tables[name], rtol=1e-6, atol=atol)


@pytest.mark.kernels("stable")
@pytest.mark.parametrize("sketch", [False, True])
def test_sums_of_a_batch_are_those_of_the_kernels(sketch):
    from focalkern.ops._backend import backend_for
    from focalkern.ops.calibration_sums import CalibrationSums

    z, target = rows(150, 5), torch.randint(5, (150,))
    axes = torch.tensor([-0.5, 1.0], dtype=torch.float64), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    found = []
    for kernels in (fallback, backend_for(z)):
        sums = CalibrationSums.zeros(2, 3, 16, ("ece", "nll", "brier"), z.device)
        run = kernels.CalibrationGridRun(z, target, *axes, 1, 13, 0, False, -100)
        run.add_to(sums.rows, sums.count, sums.confidence, sums.correct, sums.nll, sums.brier, sketch)
        found.append(sums)
    assert int(found[0].rows) == int(found[1].rows) == 150
    for (name, ours), (_, theirs) in zip(found[0].items(), found[1].items(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("log", [False, True])
def test_map_is_that_of_the_kernels(dtype, log):
    z = leaf(rows().to(dtype))
    gamma, temperature = leaf(torch.linspace(-0.9, 5, 40, dtype=dtype)), torch.tensor(0.75, dtype=torch.float64)
    ours = fallback.calibration_map(z, gamma, temperature, 0, log)
    theirs = fk.focal_calibration_map(z, gamma, temperature, log=log)
    assert_close(ours, theirs)
    upstream = torch.where(theirs.isfinite(), torch.randn_like(theirs), 0.0)
    for mine, other in zip(
        torch.autograd.grad(ours, (z, gamma), upstream), torch.autograd.grad(theirs, (z, gamma), upstream), strict=True
    ):
        scale = other.double().abs().max().clamp(min=1)
        assert_close(mine.double() / scale, other.double() / scale, dtype)


def test_ignore_index_of_any_kind():
    z, labels, options = torch.zeros(2, 3), torch.tensor([0, 1]), (2.0, None, None, None, 0, 0.0, 0)
    losses = fallback.sigmoid_loss(z, labels, *options, np.array(1))
    assert_close(losses, fk.sigmoid_focal_loss(z, labels, alpha=None, ignore_index=1))
    for wrong in (2**63, 10**40, np.array([1, 2]), np.array(1.5)):
        with pytest.raises(TypeError, match="sigmoid_focal_loss: incompatible arguments"):
            fallback.sigmoid_loss(z, labels, *options, wrong)
