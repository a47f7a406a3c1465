"""The z-loss in the saved numbers of a row loss: the kernel compared with torch operations, and where terms cancel.
Losses and gradients: test_loss_extras."""

import math

import pytest
import torch
from conftest import assert_close

import focalkern as fk
from focalkern import fallback
from focalkern.ops._backend import backend_for, has_kernels

N, C = 133, 7  # rows: two tiles of the kernel and a remainder

pytestmark = pytest.mark.skipif(not has_kernels(torch.zeros(1)), reason="plain torch saves no numbers")


def row_loss_of(z, target, reduction=0, weight=None, smoothing=0.0, ignored=-100):
    """The arguments of z_loss for a row loss: the loss, its saved numbers, and its own arguments."""
    gamma, soft = torch.tensor(2.0, dtype=torch.float64), target.is_floating_point() or smoothing > 0
    options = (weight, reduction, ignored, smoothing, False, True, 0, 0.0)
    loss, saved = torch.ops.focalkern.focal_loss_forward(z, target, gamma, None, *options)
    return loss, saved, z, target, weight, ignored, soft, reduction, 0.3


# smoothing: without it the saved numbers are others, and the backward pass multiplies with the class weights.
@pytest.mark.parametrize("weight", [None, torch.linspace(0, 2, C, dtype=torch.float64)], ids=["", "weight"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("labels", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_is_the_torch_operations(dtype, labels, smoothing, weight):
    target, ignored = torch.randint(C, (N,)).to(labels), 255 if labels == torch.uint8 else -100
    target[::5] = ignored
    z = (3 * torch.randn(N, C)).to(dtype)
    z[0] = torch.nan  # ignored
    for reduction in range(3):
        arguments = row_loss_of(z, target, reduction, weight, smoothing, ignored)
        found, expected = (function(*arguments) for function in (backend_for(z).z_loss, fallback.z_loss))
        for value, wanted in zip(found, expected, strict=True):
            assert value.dtype == wanted.dtype
        assert_close(found[0], expected[0])
        rows = (target != ignored) if weight is None else (target != ignored) & (target != 0)  # class 0 has weight 0
        assert_close(found[1][:-1].view(3, N)[:, rows], expected[1][:-1].view(3, N)[:, rows])
        assert found[1][-1] == expected[1][-1]


# Rows along the classes, across adjacent pixels, in images, and in strides that want a copy.
@pytest.mark.parametrize(
    "z",
    [
        torch.randn(C),
        torch.randn(5, C, 4, 6),
        torch.randn(5, C, 4, 6).to(memory_format=torch.channels_last),
        torch.randn(5, C, 9, 12)[..., 1:5, ::2],
        torch.randn(C, 40).t(),
    ],
    ids=["one row", "pixels", "channels last", "every second pixel", "transposed"],
)
def test_layouts(z):
    target = torch.randint(C, z.shape[:1] + z.shape[2:] if z.dim() > 1 else ())
    arguments = row_loss_of(z, target)
    found, expected = (function(*arguments) for function in (backend_for(z).z_loss, fallback.z_loss))
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_class_probabilities():
    z, target = torch.randn(N, C, dtype=torch.float64), torch.rand(N, C, dtype=torch.float64)
    arguments = row_loss_of(z, target)
    loss, numbers = backend_for(z).z_loss(*arguments)
    assert_close(loss, arguments[0] + 0.3 * z.logsumexp(1).square())
    assert_close(numbers, fallback.z_loss(*arguments)[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["kernel", "torch"])
def test_terms_that_cancel(name, dtype):
    """The coefficient of all classes is 0, that of the target is not: their product is the gradient of the target."""
    z = torch.full((1, 2), -2.0, dtype=dtype)
    # m = -2, S = 2, c_f / S = 0.5, and c is such that 2 c lse / S = -0.5.
    c = 0.5 / (2.0 - math.log(2.0))
    saved, loss = torch.tensor([-2.0, 0.5, -1.0, 1.0], dtype=dtype), torch.zeros(1, dtype=dtype)
    function = backend_for(z).z_loss if name == "kernel" else fallback.z_loss
    _, (shift, second, third, divisor) = function(loss, saved, z, torch.tensor([0]), None, -100, False, 0, c)
    assert shift == -2 and divisor == 1
    assert 0 < abs(float(second)) < 1e-6
    assert_close(second * third, torch.tensor(-1.0, dtype=dtype))


def test_a_step_reads_the_logits_as_often_as_without_it(monkeypatch):
    """Labels, smoothing and probabilities take one forward and one backward pass of the kernel."""
    calls = []
    for name in ("focal_loss_forward", "focal_loss_backward"):
        operator = getattr(torch.ops.focalkern, name)
        monkeypatch.setattr(
            torch.ops.focalkern, name, lambda *a, f=operator, n=name: (calls.append(n), f(*a))[1], raising=False
        )
    for target, options in (
        (torch.randint(C, (N,)), {}),
        (torch.randint(C, (N,)), {"label_smoothing": 0.1}),
        (torch.rand(N, C).softmax(1), {}),
    ):
        calls.clear()
        z = torch.randn(N, C, requires_grad=True)
        fk.focal_loss(z, target, z_loss=0.1, **options).backward()
        assert calls == ["focal_loss_forward", "focal_loss_backward"]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_of_gamma(smoothing):
    z, target = torch.randn(N, C, dtype=torch.float64, requires_grad=True), torch.randint(C, (N,))
    gamma = torch.linspace(0.5, 3, N, dtype=torch.float64, requires_grad=True)
    found, expected = (
        torch.autograd.grad(fk.focal_loss(z, target, gamma, z_loss=c, label_smoothing=smoothing), gamma)[0]
        for c in (0.3, 0.0)
    )
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: torch.zeros(4, dtype=torch.int64)}, r"saved must be the numbers \[3 N \+ 1\] = \[4\] of a row loss"),
        ({1: torch.zeros(5)}, "saved must be"),
        ({0: torch.zeros(2)}, "loss must be"),
        ({3: torch.zeros(2, dtype=torch.int64)}, r"target must be labels \[N\] = \[1\]"),
        ({4: torch.zeros(2)}, r"weight must be \[C\] = \[3\]"),
    ],
    ids=["dtype", "length", "loss", "target", "weight"],
)
def test_errors(change, message):
    if fk.build_info()["kernels"] != "compiled":
        pytest.skip("torch operations check nothing")
    arguments = [torch.zeros(1), torch.zeros(4), torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), None]
    arguments = [change.get(i, argument) for i, argument in enumerate(arguments)]
    with pytest.raises(ValueError, match=f"z_loss: {message}"):
        backend_for(torch.zeros(1)).z_loss(*arguments, -100, False, 0, 0.1)
