"""Every path through the CUDA kernels once, with small shapes, for memory checkers, which slow a program down."""

import pytest
import torch
from conftest import assert_close

import focalkern as fk
from focalkern import reference

# (rows, classes): the tile in shared memory; a warp with one row or several at a time; a block per row; one block and
# many; an incomplete last tile; row lengths off the vector width; few rows, in chunks.
ROWS = [(3, 10), (700, 10), (65, 17), (300, 100), (33, 130), (20, 1000), (3, 5001), (3, 20_011)]


def both_ways(function, logits):
    loss = function(logits)
    (grad,) = torch.autograd.grad(loss, logits, torch.rand_like(loss) if loss.dim() else None)
    return loss, grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "classes"), ROWS)
def test_focal_loss(cuda, rows, classes, dtype):
    logits = torch.randn(rows, classes, device=cuda).to(dtype).requires_grad_()
    target = torch.randint(classes, (rows,), device=cuda)
    target[0] = -100
    for reduction in ("mean", "none"):
        torch.manual_seed(0)
        loss, grad = both_ways(lambda z, r=reduction: fk.focal_loss(z, target, 2.0, reduction=r), logits)
        torch.manual_seed(0)
        expected, expected_grad = both_ways(
            lambda z, r=reduction: reference.focal_loss(z, target, 2.0, reduction=r),
            logits.double().detach().requires_grad_(),
        )
        if reduction == "mean":  # an upstream gradient of another dtype would draw other numbers
            assert_close(grad, expected_grad, dtype)
        assert_close(loss, expected, dtype)


def test_focal_loss_layouts(cuda):
    target = torch.randint(5, (2, 9, 7), device=cuda)
    pixels = torch.randn(2, 5, 9, 7, device=cuda)
    for logits in (
        pixels,
        pixels.contiguous(memory_format=torch.channels_last),
        pixels.transpose(2, 3).transpose(2, 3),
    ):
        z = logits.detach().requires_grad_()
        loss, grad = both_ways(lambda z: fk.focal_loss(z, target), z)
        expected, expected_grad = both_ways(
            lambda z: reference.focal_loss(z, target), z.detach().double().requires_grad_()
        )
        assert_close(loss, expected)
        assert_close(grad, expected_grad)


@pytest.mark.parametrize("classes", [10, 3000])
def test_focal_loss_general_targets(cuda, classes):
    logits = torch.randn(40, classes, device=cuda, requires_grad=True)
    probs = torch.randn(40, classes, device=cuda).softmax(1)
    table = fk.GammaTable(torch.tensor([0.0, 0.2, 1.0], device=cuda), torch.tensor([5.0, 3.0], device=cuda))
    weight = torch.rand(classes, device=cuda)
    for target, options in (
        (probs, {"gamma": 1.5, "weight": weight}),
        (torch.randint(classes, (40,), device=cuda), {"gamma": torch.rand(40, device=cuda), "label_smoothing": 0.1}),
        (torch.randint(classes, (40,), device=cuda), {"gamma": table, "weight": weight}),
    ):
        loss, grad = both_ways(lambda z, t=target, o=options: fk.focal_loss(z, t, **o), logits)
        exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in {**options, "target": target}.items()}
        exact["target"] = exact["target"] if target.is_floating_point() else target
        expected, expected_grad = both_ways(
            lambda z, o=exact: reference.focal_loss(z, **o), logits.detach().double().requires_grad_()
        )
        assert_close(loss, expected, torch.float32)
        assert_close(grad, expected_grad, torch.float32)


@pytest.mark.parametrize(("rows", "classes"), [(1, 2), (300, 10), (40, 100), (9, 600), (3, 9000)])
def test_calibration_map(cuda, rows, classes):
    logits = torch.randn(rows, classes, dtype=torch.float64, device=cuda, requires_grad=True)
    gamma = torch.rand(rows, dtype=torch.float64, device=cuda, requires_grad=True)
    result = fk.focal_calibration_map(logits, gamma, 0.8)
    expected = reference.focal_calibration_map(logits, gamma, 0.8)
    assert_close(result, expected)
    upstream = torch.rand_like(result)
    for grad, wanted in zip(
        torch.autograd.grad(result, (logits, gamma), upstream),
        torch.autograd.grad(expected, (logits, gamma), upstream),
        strict=True,
    ):
        assert_close(grad, wanted)
    assert_close(
        fk.binary_focal_calibration_map(logits[:, 0], gamma),
        reference.binary_focal_calibration_map(logits[:, 0], gamma),
    )


@pytest.mark.parametrize("estimator", ["equal_mass", "equal_mass_interp", "equal_width"])
def test_calibration_grid(cuda, estimator):
    logits = 3 * torch.randn(200, 7, dtype=torch.float64, device=cuda)
    target = torch.randint(7, (200,), device=cuda)
    gammas, temperatures = [0.0, 0.5, 2.0], [0.3, 1.0, 2.5]
    criteria = ("ece", "mce", "nll", "brier")
    grid = fk.calibration_grid(logits, target, gammas, temperatures, criteria=criteria, estimator=estimator)
    expected = reference.calibration_grid(
        logits.cpu(), target.cpu(), gammas, temperatures, criteria=criteria, estimator=estimator
    )
    for name in criteria:
        assert_close(grid.tables[name], expected[name])


def test_runs_on_the_current_stream(cuda):
    logits = torch.zeros(64, 10, device=cuda)
    target = torch.zeros(64, dtype=torch.int64, device=cuda)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # work on another stream would read the logits before they are written
        logits.add_(torch.eye(10, device=cuda)[0], alpha=5.0)
        loss = fk.focal_loss(logits, target)
        mapped = fk.focal_calibration_map(logits, 2.0)
        grid = fk.calibration_grid(logits, target, [0.0], [1.0])
    torch.cuda.synchronize()
    assert_close(loss, reference.focal_loss(logits.double(), target))
    assert_close(mapped, reference.focal_calibration_map(logits.double(), 2.0))
    assert_close(
        grid.tables["nll"], torch.nn.functional.cross_entropy(logits.double(), target).reshape(1, 1), torch.float32
    )


def test_two_streams_at_once(cuda):
    logits = torch.randn(2000, 50, device=cuda)
    target = torch.randint(50, (2000,), device=cuda)
    expected = [fk.focal_loss(logits * k, target) for k in (1, 2)]
    streams = [torch.cuda.Stream() for _ in expected]
    found = []
    for _ in range(20):
        for k, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append((k, fk.focal_loss(logits * (k + 1), target)))
    torch.cuda.synchronize()
    assert all(torch.equal(loss, expected[k]) for k, loss in found)


def test_runs_on_the_device_of_its_input(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    # The current device stays the first.
    logits = torch.randn(100, 10, device="cuda:1", requires_grad=True)
    target = torch.randint(10, (100,), device="cuda:1")
    loss, grad = both_ways(lambda z: fk.focal_loss(z, target), logits)
    expected, expected_grad = both_ways(lambda z: reference.focal_loss(z, target), logits)
    assert loss.device == grad.device == logits.device
    assert_close(loss, expected)
    assert_close(grad, expected_grad)
    assert_close(fk.focal_calibration_map(logits, 2.0), reference.focal_calibration_map(logits, 2.0))
    grid = fk.calibration_grid(logits.detach(), target, [0.0, 1.0], [1.0])
    expected_grid = reference.calibration_grid(logits.detach().cpu(), target.cpu(), [0.0, 1.0], [1.0])
    assert_close(grid.tables["nll"], expected_grid["nll"], torch.float32)
    assert torch.cuda.current_device() == 0
