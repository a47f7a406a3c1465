"""The z-loss in the saved numbers of a row loss: the kernel compared with torch operations, and where terms cancel.
Losses and gradients: test_loss_extras."""

import pytest
import torch
from conftest import assert_close

import focalkern as fk
from focalkern import fallback
from focalkern.ops._backend import backend_for, has_kernels

N, C = 133, 7  # rows: two tiles of the kernel and a remainder

pytestmark = pytest.mark.skipif(not has_kernels(torch.zeros(1)), reason="plain torch saves no numbers")


def saved_of(dtype, target, **options):
    z, gamma = (3 * torch.randn(N, C)).to(dtype), torch.tensor(2.0, dtype=torch.float64)
    smoothing = options.get("label_smoothing", 0.0)
    arguments = (z, target, gamma, None, options.get("weight"), 1, -100, smoothing, False, True, 0, 0.0)
    return z, torch.ops.focalkern.focal_loss_forward(*arguments)[1]


# smoothing: without it, the saved numbers are others, and the backward pass multiplies with the class weights.
@pytest.mark.parametrize("weight", [None, torch.linspace(0, 2, C, dtype=torch.float64)], ids=["", "weight"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("labels", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_kernel_is_the_torch_operations(dtype, labels, smoothing, weight):
    target = torch.randint(C, (N,)).to(labels)
    ignored = 255 if labels == torch.uint8 else -100
    z, saved = saved_of(dtype, target, label_smoothing=smoothing)
    logit = None if smoothing else z.gather(1, target.long().unsqueeze(1)).squeeze(1).double()
    target[::5] = ignored
    arguments = (saved, logit, target, weight, ignored, 0.3)
    for found, expected in zip(backend_for(z).z_loss(*arguments), fallback.z_loss(*arguments), strict=True):
        assert found.dtype == expected.dtype
        assert_close(found, expected)


def test_class_probabilities():
    z, saved = saved_of(torch.float64, torch.rand(N, C, dtype=torch.float64))
    arguments = (saved, None, None, None, -100, 0.3)
    loss, numbers = backend_for(z).z_loss(*arguments)
    assert_close(loss, 0.3 * z.logsumexp(1).square())
    assert_close(numbers, fallback.z_loss(*arguments)[1])


@pytest.mark.parametrize(
    "function", [lambda *a: backend_for(a[0]).z_loss(*a), fallback.z_loss], ids=["kernel", "torch"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_terms_that_cancel(function, dtype):
    """The coefficient of all classes is 0, that of the target is not: their product is the gradient of the target."""
    lse = torch.tensor([0.0, 0.0], dtype=dtype).logsumexp(0)  # logits (-lse, -lse) have the log-sum-exp 0
    logit = torch.zeros(1, dtype=torch.float64) - 2.0
    # m = -2, S = 2, c_f / S = 0.5 and 2 c lse / S = -0.5.
    c = float(0.5 / (2.0 - lse.double()))
    saved = torch.tensor([-2.0, 0.5, -1.0, 1.0], dtype=dtype)
    _, (shift, second, third, divisor) = function(saved, logit, torch.tensor([0]), None, -100, c)
    assert shift == -2 and divisor == 1
    assert abs(float(second)) < 1e-6
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
        ({0: torch.zeros(4, dtype=torch.int64)}, "saved must be"),
        ({0: torch.zeros(5)}, "saved must be"),
        ({1: torch.zeros(1)}, "target_logit must be float64"),
        ({2: torch.zeros(2, dtype=torch.int64)}, r"target must be contiguous labels \[N\] = \[1\]"),
    ],
    ids=["dtype", "length", "logit", "target"],
)
def test_errors(change, message):
    if fk.build_info()["kernels"] != "compiled":
        pytest.skip("torch operations check nothing")
    arguments = [torch.zeros(4), torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)]
    arguments = [change.get(i, argument) for i, argument in enumerate(arguments)]
    with pytest.raises(ValueError, match=f"z_loss: {message}"):
        backend_for(torch.zeros(1)).z_loss(*arguments, None, -100, 0.1)
