"""The stable module has the kernels of the compiled module, so results are bitwise equal."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

import focalkern as fk
from focalkern import fallback, stable
from focalkern.ops import _loss_extras, _row_kernels
from focalkern.ops.calibration_grid import _CRITERIA, _ESTIMATORS
from focalkern.reference._softmax_losses import ROW_LOSSES

pytestmark = pytest.mark.kernels

# One class, a row, rows that do not fill vectors, long rows, images, and an empty input.
SHAPES = [(9,), (33, 10), (3, 1000), (3, 7, 5, 4), (0, 4)]
REDUCTIONS = ["none", "mean", "sum"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def labels_and_logits(shape, dtype):
    class_dim = 0 if len(shape) == 1 else 1
    logits = torch.randn(shape).to(dtype)
    target = torch.randint(shape[class_dim], shape[:class_dim] + shape[class_dim + 1 :])
    return class_dim, logits, target


def computations(shape, dtype, reduction):
    """Functions, and the tensors in which they are differentiated."""
    class_dim, z, y = labels_and_logits(shape, dtype)
    options = {"reduction": reduction}
    probabilities = torch.rand(shape).softmax(class_dim).to(dtype)
    weight, gamma = torch.rand(shape[class_dim]), torch.rand(y.shape, dtype=torch.float64)
    of_class = torch.rand((shape[class_dim],) + (1,) * (len(shape) - 1 - class_dim))
    yield lambda z: fk.focal_loss(z, y, 2.0, **options), z
    yield lambda z: fk.focal_loss(z, y, -1.5, label_smoothing=0.1, **options), z
    yield lambda z: fk.focal_loss(z, y, 0.5, weight=weight, detach_modulation=True, **options), z
    yield lambda z, gamma: fk.focal_loss(z, y, gamma, **options), z, gamma
    yield lambda z, t: fk.focal_loss(z, t, 1.0, **options), z, probabilities
    yield lambda z: fk.focal_loss(z, y, fk.GammaTable([0.0, 0.5, 1.0], [2.0, 0.5]), **options), z
    for spec in ROW_LOSSES.values():
        if not spec.of_batch or reduction != "none":
            loss = getattr(fk, spec.module)(**spec.example, **options)
            yield lambda z, loss=loss: loss(z, y), z
    yield lambda z: fk.sigmoid_focal_loss(z, y, **options), z
    yield lambda z, t: fk.sigmoid_focal_loss(z, t, 1.5, None, **options), z, probabilities
    yield lambda z, gamma: fk.asymmetric_loss(z, probabilities, gamma, 1.0, **options), z, of_class
    yield lambda z: fk.quality_focal_loss(z, probabilities, 2.0, **options), z
    yield lambda z, t: fk.varifocal_loss(z, t, 1.5, 0.5, **options), z, probabilities
    yield lambda z, gamma: fk.matchability_loss(z, probabilities, gamma, **options), z, of_class
    yield lambda z: fk.ia_bce_loss(z, y, 1.5, 0.5, **options), z
    if len(shape) == 4:
        channels_last, strided = z.to(memory_format=torch.channels_last), z.transpose(2, 3)[:, :, ::2]
        yield lambda z: fk.focal_loss(z, y, 2.0, **options), channels_last
        yield lambda z: fk.sigmoid_focal_loss(z, y, **options), channels_last
        labels = y.transpose(1, 2)[:, ::2]
        yield lambda z: fk.focal_loss(z, labels, 2.0, **options), strided
        yield lambda z: fk.sigmoid_focal_loss(z, labels, **options), strided
    if reduction == "none":
        rows, temperature = z.movedim(class_dim, -1).contiguous(), torch.tensor(1.5, dtype=torch.float64)
        gammas = torch.rand(rows.shape[:-1], dtype=torch.float64)
        yield lambda z: fk.focal_calibration_map(z, 1.0, 1.5), rows
        yield lambda z, gamma, t: fk.focal_calibration_map(z, gamma, t, log=True), rows, gammas, temperature
        yield lambda z, t: fk.binary_focal_calibration_map(z, 2.0, t), rows, temperature


def values_and_gradients():
    torch.manual_seed(0)
    found = []
    for shape in SHAPES:
        for dtype in DTYPES:
            for reduction in REDUCTIONS:
                for function, *tensors in computations(shape, dtype, reduction):
                    variables = [tensor.detach().requires_grad_() for tensor in tensors]
                    result = function(*variables)
                    upstream = torch.randn(result.shape).to(result.dtype)
                    found += [result.detach(), *torch.autograd.grad(result, variables, upstream)]
    return found


def grids():
    """Tables of calibration grids: whole ones, of batches added up, and by the dispatcher."""
    torch.manual_seed(1)
    gammas, temperatures = [-0.5, 0.0, 1.0, 5.0, 80.0], [0.1 * i for i in range(1, 71)]
    found = []
    for dtype in DTYPES:
        logits, target = torch.randn(700, 9).mul(3).to(dtype), torch.randint(9, (700,))
        target[::7] = -100
        for input, kind in ((logits, "logits"), (logits.softmax(1), "probs"), (logits.T.contiguous().T, "logits")):
            for estimator in _ESTIMATORS:
                options = {"criteria": tuple(_CRITERIA), "input_kind": kind, "estimator": estimator}
                found += fk.calibration_grid(input, target, gammas, temperatures, **options).tables.values()
                state = fk.CalibrationGridState(gammas, temperatures, **options)
                state.update(input, target)
                state.update(input[:100], target[:100])
                found += state.compute().tables.values()
            nll = fk.calibration_grid(input, target.abs() % 9, gammas, temperatures, criteria="nll", input_kind=kind)
            found.append(nll.tables["nll"])
    axes = torch.tensor(gammas, dtype=torch.float64), torch.tensor(temperatures, dtype=torch.float64)
    found.append(torch.ops.focalkern.calibration_grid(logits, target, *axes, 15, 15, 0, False, -100))
    return found


def spline_maps():
    """The map with its gradients; the curve lies on either side of its knots."""
    torch.manual_seed(2)
    wide = torch.float64
    curve = [torch.tensor(v, dtype=wide) for v in (1.3, 1e-3, 0.1, [-3.0, 0.0, 2.0], [0.3, -0.2, 0.5])]
    found = []
    for shape in ((300, 10), (40, 7, 130), (0, 4)):
        n_classes = shape[-1]
        of_class, matrix = torch.randn(n_classes, dtype=wide), torch.randn(n_classes, n_classes, dtype=wide) / 10
        for dtype in DTYPES:
            logits = torch.randn(shape).mul(4).to(dtype)
            logits[..., 1:2].masked_fill_(logits[..., :1] > 3, -torch.inf)
            for input, kind in ((logits, "logits"), (logits.softmax(-1), "probs")):
                for given in ({}, {"weight": of_class}, {"bias": of_class}, {"weight": matrix, "bias": of_class}):
                    variables = [t.detach().clone().requires_grad_() for t in (input, *curve, *given.values())]
                    result = fk.spline_calibration_map(
                        *variables[:6],
                        **dict(zip(given, variables[6:], strict=True)),
                        input_kind=kind,
                        keep_zeros=True,
                        keep_order=not given,
                        log="bias" in given,
                    )
                    upstream = torch.where(result.isfinite(), torch.randn(shape).to(result.dtype), 0)
                    found += [result.detach(), *torch.autograd.grad(result, variables, upstream)]
    return found


def fits():
    """Results of fits, which take the sums over rows."""
    torch.manual_seed(3)
    found = []
    for dtype in (torch.float32, torch.float64):
        logits, target = torch.randn(900, 12).mul(3).to(dtype), torch.randint(12, (900,))
        target[::2] = logits[::2].argmax(1)
        for kind in ("scalar", "vector", "matrix"):
            found.append(fk.SplineScaling(kind=kind).fit(logits, target).predict_proba(logits))
        networks = logits.view(3, 300, 12), target.view(3, 300)
        found += [fk.fit_temperatures(*networks), *fk.fit_focal_temperatures(*networks)]
    return found


def batched_gradients():
    """Several upstream gradients at once."""
    torch.manual_seed(4)
    target = torch.randint(5, (20,))
    found = []
    for loss in (fk.FocalLoss(2.0), fk.MMCELoss(), fk.MMCELoss(reduction="sum")):
        logits = torch.randn(20, 5, requires_grad=True)
        found += torch.autograd.grad(loss(logits, target), logits, torch.randn(3), is_grads_batched=True)
    return found


def results_beside_another_default_device():
    """Results lie on the device of the input."""
    torch.manual_seed(5)
    logits, target = torch.randn(300, 5), torch.randint(5, (300,))
    target[::2] = logits[::2].argmax(1)
    with torch.device("meta"):
        loss = fk.MMCELoss()(logits, target)
        return [loss, fk.fit_temperatures(logits[None], target[None])]


def statistics():
    """Of losses and heads, from the loss's own read of the logits."""
    torch.manual_seed(6)
    found = []
    with (
        mock.patch.multiple(_loss_extras, statistics_of_input=None),
        mock.patch.multiple(_row_kernels, statistics_of_input=None),
    ):
        for shape in SHAPES:
            for dtype in DTYPES:
                _, z, y = labels_and_logits(shape, dtype)
                x, w = torch.randn(y.numel(), 3).to(dtype), torch.randn(9, 3).to(dtype)
                for options in ({"reduction": "none"}, {"label_smoothing": 0.1}, {"modulation": "confidence"}):
                    options = {**options, "return_stats": True}
                    z, x = z.detach().requires_grad_(), x.detach().requires_grad_()
                    of_logits = fk.focal_loss(z, y, 1.5, **options)
                    of_head = fk.linear_focal_loss(x, w, y.flatten() % 9, 1.5, **options)
                    for variable, (loss, stats) in ((z, of_logits), (x, of_head)):
                        upstream = torch.randn(loss.shape).to(loss.dtype)
                        found += [loss.detach(), *stats, *torch.autograd.grad(loss, variable, upstream)]
    return found


def everything():
    parts = (
        values_and_gradients,
        grids,
        spline_maps,
        fits,
        batched_gradients,
        results_beside_another_default_device,
        statistics,
    )
    return [found for part in parts for found in part()]


def test_the_stable_module_has_every_function_of_plain_torch():
    """Without one of them, an operator that gets it from the backend would fail with the stable module."""
    of_plain_torch = {"register_composites", "compile_on", "compiles_on"}  # no operators: the choice of the backend
    missing = set(fallback.__all__) - set(stable.__all__)
    assert missing == of_plain_torch, missing


def test_values_and_gradients_have_the_bits_of_the_compiled_module(tmp_path):
    assert fk.build_info()["kernels"] == "compiled"
    code = (
        "import sys, torch, focalkern as fk, test_stable\n"
        "assert fk.build_info()['kernels'] == 'stable'\n"
        "torch.save(test_stable.everything(), sys.argv[1])\n"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path / "found.pt")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "FOCALKERN_KERNELS": "stable"},
    )
    assert done.returncode == 0, done.stderr
    stable, compiled = torch.load(tmp_path / "found.pt"), everything()
    assert len(stable) == len(compiled) > 1000
    for one, other in zip(stable, compiled, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
