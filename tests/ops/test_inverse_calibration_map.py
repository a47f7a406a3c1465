"""The inverse calibration maps compared with their definitions, and the properized loss."""

from typing import Any

import mpmath
import oracle
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, no_waiting
from mpmath import mpf
from torch import Tensor

import focalkern as fk
from focalkern import reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Equal logits, ordinary ones, saturated ones in both precisions (1 - p is 1e-9 and 1e-35), equal classes.
ROWS = ((0.3, -1.0, 2.0), (20.0, 0.0, -3.0), (80.0, 0.0, -3.0), (0.0, 0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def solved() -> list[tuple[tuple[float, ...], float, list[float]]]:
    """(row, gamma, log q): on both sides of gamma = 1, where the two branches of the equation change roles."""
    result = []
    # Enough digits for 1 - q of the saturated row.
    with mpmath.workdps(80):
        for row in ROWS:
            for gamma in (0.25, 3.0):
                result.append((row, gamma, [float(v) for v in oracle.log_inverse_map(row, gamma)]))
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_definition(device: torch.device, dtype: torch.dtype, solved) -> None:
    for row, gamma, expected in solved:
        result = fk.inverse_focal_calibration_map(torch.tensor(row, dtype=dtype, device=device), gamma, log=True)
        assert_close(result, torch.tensor(expected, dtype=torch.float64), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_classes_equal_the_definition(device: torch.device, dtype: torch.dtype) -> None:
    # Near 0, where the equation is a difference of nearly equal terms; ordinary; saturated.
    logits = [-3.0, 0.0, 1e-6, 0.5, 30.0]
    with mpmath.workdps(80):
        expected = []
        for t in logits:
            low, high = oracle.log_inverse_map([0.0, t], 2.0)
            expected.append(float(high - low))
    result = fk.binary_inverse_focal_calibration_map(
        torch.tensor(logits, dtype=dtype, device=device), 2.0, log_odds=True
    )
    assert_close(result, torch.tensor(expected, dtype=torch.float64), dtype)


@pytest.mark.parametrize("n_classes", [2, 3, 10, 1000])
@pytest.mark.parametrize("gamma", [1e-8, 0.05, 1.0, 5.0, 100.0, 1000.0])
def test_the_map_of_the_inverse_is_the_input(device: torch.device, n_classes: int, gamma: float) -> None:
    # Logits from nearly uniform to saturated; the larger gammas are the hardest for the iteration.
    for scale in (0.1, 1.0, 5.0, 50.0):
        logits = scale * torch.randn(20, n_classes, dtype=torch.float64, device=device)
        log_q = fk.inverse_focal_calibration_map(logits, gamma, log=True)
        back = fk.focal_calibration_map(log_q, gamma, log=True)
        # A root x has an error of a few units in the last place, which the map back multiplies by up to 1 + gamma.
        torch.testing.assert_close(back, logits.log_softmax(-1), rtol=1e-14 * (20 + gamma), atol=1e-14 * (20 + gamma))
        assert_close(log_q.exp().sum(-1), torch.ones(20))


def test_the_inverse_of_the_map_is_the_input(device: torch.device) -> None:
    logits = 3 * torch.randn(50, 10, dtype=torch.float64, device=device)
    gamma = 4 * torch.rand(50, dtype=torch.float64, device=device)
    mapped = reference.focal_calibration_map(logits, gamma, log=True)
    assert_close(fk.inverse_focal_calibration_map(mapped, gamma, log=True), logits.log_softmax(-1))


def test_gamma_zero_changes_nothing(device: torch.device) -> None:
    logits = torch.randn(7, 5, device=device)
    assert_close(fk.inverse_focal_calibration_map(logits, 0.0), logits.softmax(-1))
    assert torch.equal(fk.binary_inverse_focal_calibration_map(logits, 0.0, log_odds=True), logits)
    # Also if only some rows have gamma 0.
    gamma = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 3.0, 0.0], device=device)
    result = fk.inverse_focal_calibration_map(logits, gamma)
    assert_close(result[::2], logits[::2].softmax(-1))


def test_two_classes_equal_the_general_map(device: torch.device) -> None:
    logits = 5 * torch.randn(4, 6, dtype=torch.float64, device=device)
    gamma = 3 * torch.rand(6, dtype=torch.float64, device=device)
    two = fk.inverse_focal_calibration_map(torch.stack([torch.zeros_like(logits), logits], -1), gamma)
    assert_close(fk.binary_inverse_focal_calibration_map(logits, gamma), two[..., 1])


def test_extremes(device: torch.device) -> None:
    inf = torch.inf
    logits = torch.tensor(
        [[1e4, 0.0, -1e4], [0.0, -inf, 0.0], [5.0, -inf, -inf], [1e-30, 0.0, 0.0]], device=device, requires_grad=True
    )
    for gamma in (0.5, 3.0):
        log_q = fk.inverse_focal_calibration_map(logits, gamma, log=True)
        assert not log_q.isnan().any()
        assert_close(log_q.exp().sum(-1), torch.ones(4))
        # Two equal classes stay equal, an impossible one stays impossible, a certain one certain.
        assert_close(log_q[1].exp(), torch.tensor([0.5, 0.0, 0.5]))
        assert torch.equal(log_q[2].exp(), torch.tensor([1.0, 0.0, 0.0], device=device))
        # Saturated: 1 - q = (r / (1 + gamma))^(1 / (1 + gamma)), where r = e^-10000 is the odds of the other classes.
        expected = -(1e4 + torch.tensor(1 + gamma).log()) / (1 + gamma)
        assert_close(log_q[0, 1], expected)
        (grad,) = torch.autograd.grad(log_q[log_q.isfinite()].sum(), logits)
        assert grad.isfinite().all()
        assert (grad[2] == 0).all()


def test_probabilities(device: torch.device) -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0], [0.5, 0.0, 0.5]], dtype=torch.float64, device=device)
    result = fk.inverse_focal_calibration_map(probs, 2.0, input_kind="probs")
    assert_close(fk.focal_calibration_map(result, 2.0, input_kind="probs"), probs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(device: torch.device, dtype: torch.dtype) -> None:
    logits = torch.randn(6, 9, device=device).to(dtype)
    for result in (fk.inverse_focal_calibration_map(logits, 1.5), fk.binary_inverse_focal_calibration_map(logits, 1.5)):
        assert result.dtype == dtype
    expected = fk.inverse_focal_calibration_map(logits.double(), 1.5)
    assert_close(fk.inverse_focal_calibration_map(logits, 1.5), expected)
    assert_close(
        fk.binary_inverse_focal_calibration_map(logits, 1.5),
        fk.binary_inverse_focal_calibration_map(logits.double(), 1.5),
    )


def test_autocast(device: torch.device) -> None:
    logits = torch.randn(6, 9, device=device).bfloat16()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert fk.inverse_focal_calibration_map(logits, 1.5).dtype == torch.float32
        assert fk.properized_focal_loss(logits, torch.zeros(6, dtype=torch.int64, device=device)).dtype == torch.float32


def test_derivatives(device: torch.device) -> None:
    def inverse(z: Tensor, gamma: Tensor) -> Tensor:
        return fk.inverse_focal_calibration_map(z, gamma, log=True)

    def binary(t: Tensor, gamma: Tensor) -> Tensor:
        return fk.binary_inverse_focal_calibration_map(t, gamma, log_odds=True)

    def properized(z: Tensor, gamma: Tensor) -> Tensor:
        return fk.properized_focal_loss(z, torch.tensor([0, 3, 1], device=device), gamma)

    z = (2 * torch.randn(3, 4, dtype=torch.float64, device=device)).requires_grad_()
    gamma = (3 * torch.rand(3, dtype=torch.float64, device=device)).requires_grad_()
    t = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    for function, first in ((inverse, z), (binary, t), (properized, z)):
        assert torch.autograd.gradcheck(function, (first, gamma))
        assert torch.autograd.gradgradcheck(function, (first, gamma))


# 1 - p is denormal, and 0.
@pytest.mark.parametrize(
    ("dtype", "gap"), [(torch.float32, 95.0), (torch.float32, 110.0), (torch.float64, 720.0), (torch.float64, 760.0)]
)
@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.5, 2.0])
def test_derivatives_of_a_row_that_is_nearly_certain(
    device: torch.device, dtype: torch.dtype, gap: float, gamma: float
) -> None:
    direction = torch.tensor([[0.5, -1.25, 2.0]], dtype=dtype, device=device)

    def derivatives(function: Any, z: Tensor) -> list[Tensor]:
        z, number = z.detach().requires_grad_(), torch.tensor([gamma], dtype=z.dtype, device=device, requires_grad=True)
        first = torch.autograd.grad(function(z, number), (z, number), create_graph=True)
        whole = (first[0] * direction).sum() + first[1].sum()
        return [*first, *torch.autograd.grad(whole, (z, number))]

    z = torch.tensor([[gap, 0.25, -0.5]], dtype=dtype, device=device)
    label, number = torch.tensor([1], device=device), torch.tensor([gamma], dtype=dtype, device=device)
    for function in (
        lambda z, g: fk.inverse_focal_calibration_map(z, g, log=True)[0, 1],
        lambda z, g: fk.inverse_focal_calibration_map(z, g, log=True)[0, 0],
        lambda z, g: fk.properized_focal_loss(z, label, g),
    ):
        found = derivatives(function, z)
        assert all(values.isfinite().all() for values in found)
        if dtype == torch.float32:
            for actual, expected in zip(found, derivatives(function, z.double()), strict=True):
                torch.testing.assert_close(actual.double(), expected, rtol=3e-5, atol=3e-5)
        else:
            assert torch.autograd.gradgradcheck(lambda z, f=function: f(z, number), z.clone().requires_grad_())


def test_gradient_of_a_saturated_row(device: torch.device) -> None:
    # The Jacobian of the inverse is the inverse of the map's Jacobian, so mapping J v back gives v.
    logits = torch.tensor([[30.0, 0.0, -3.0]], dtype=torch.float64, device=device, requires_grad=True)
    log_q = fk.inverse_focal_calibration_map(logits, 2.0, log=True)
    upstream = torch.tensor([[0.3, -1.0, 0.7]], dtype=torch.float64, device=device)
    (grad,) = torch.autograd.grad(log_q, logits, upstream)
    back = log_q.detach().requires_grad_()
    (again,) = torch.autograd.grad(fk.focal_calibration_map(back, 2.0, log=True), back, grad)
    # Gradients of a softmax do not depend on a constant in the logits: the map projects the upstream gradient
    # accordingly.
    expected = upstream - upstream.sum(-1, keepdim=True) * log_q.detach().exp()
    assert_close(again, expected)


def test_the_minimum_of_the_expected_loss_is_the_truth(device: torch.device) -> None:
    truth = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64, device=device)
    for gamma in (0.5, 2.0, 5.0):
        logits = truth.log().requires_grad_()
        loss = fk.properized_focal_loss(logits, truth, gamma)
        (grad,) = torch.autograd.grad(loss, logits)
        assert grad.abs().max() < 1e-14
        # The focal loss itself is not proper: its gradient there is not 0.
        (plain,) = torch.autograd.grad(fk.focal_loss(logits, truth, gamma), logits)
        assert plain.abs().max() > 1e-3
        for _ in range(20):
            nearby = truth.log() + 0.3 * torch.randn(4, dtype=torch.float64, device=device)
            assert fk.properized_focal_loss(nearby, truth, gamma) > loss


def test_properized_loss_is_the_focal_loss_of_the_inverse(device: torch.device) -> None:
    logits = torch.randn(5, 4, 2, 3, device=device)
    target = torch.randint(4, (5, 2, 3), device=device)
    target[0, 0, 0] = -100
    options = {"weight": torch.rand(4, device=device), "label_smoothing": 0.1}
    for reduction in ("none", "mean", "sum"):
        q = fk.inverse_focal_calibration_map(logits.movedim(1, -1), 1.5, log=True).movedim(-1, 1)
        expected = reference.focal_loss(q, target, 1.5, reduction=reduction, **options)
        assert_close(fk.properized_focal_loss(logits, target, 1.5, reduction=reduction, **options), expected)
    assert_close(fk.properized_focal_loss(logits, target, 0.0, **options), F.cross_entropy(logits, target, **options))
    one = fk.properized_focal_loss(logits[1, :, 0, 0], target[1, 0, 0], 2.0)
    assert_close(one, fk.properized_focal_loss(logits[1:2, :, 0, 0], target[1:2, 0, 0], 2.0))


def test_empty(device: torch.device) -> None:
    logits = torch.empty(0, 5, device=device, requires_grad=True)
    result = fk.inverse_focal_calibration_map(logits, 2.0)
    assert result.shape == (0, 5)
    result.sum().backward()
    assert fk.binary_inverse_focal_calibration_map(torch.empty(0, device=device), 2.0).shape == (0,)


def test_compiles() -> None:
    logits = torch.randn(6, 5, requires_grad=True)

    def function(z: Tensor, gamma: Tensor) -> Tensor:
        return fk.inverse_focal_calibration_map(z, gamma, log=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for gamma in (torch.tensor(0.5), torch.tensor(2.0)):
        assert_close(compiled(logits, gamma), function(logits, gamma))
        (grad,) = torch.autograd.grad(compiled(logits, gamma)[:, 0].sum(), logits)
        (expected,) = torch.autograd.grad(function(logits, gamma)[:, 0].sum(), logits)
        assert_close(grad, expected)


@pytest.mark.parametrize("name", ["inverse_calibration_map", "inverse_calibration_map_binary"])
def test_opcheck(device: torch.device, name: str) -> None:
    gamma = torch.rand(4, dtype=torch.float64, device=device, requires_grad=True)
    shape = (4, 3) if name == "inverse_calibration_map" else (4,)
    first = torch.randn(shape, dtype=torch.float64, device=device)
    arguments = (first, first.log_softmax(-1)) if len(shape) == 2 else (first,)
    arguments[-1].requires_grad_()
    torch.library.opcheck(getattr(torch.ops.focalkern, name).default, (*arguments, gamma))


# Far below 1, two log q are large numbers: the gradient needs their difference.
@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("gap", [30.0, 300.0, 1e3, 1e4, 1e5])
def test_digits_of_the_gradient_at_a_large_gap(device: torch.device, gap: float, gamma: float) -> None:
    def of(dtype: torch.dtype, where: torch.device) -> list[torch.Tensor]:
        z = torch.tensor([[gap, 0.0, 0.3, -1.5]] * 2, dtype=dtype, device=where, requires_grad=True)
        g = torch.tensor([gamma, gamma], dtype=dtype, device=where, requires_grad=True)
        loss = fk.properized_focal_loss(z, torch.tensor([1, 2], device=where), g, reduction="none")
        log_q = fk.inverse_focal_calibration_map(z, g, log=True)
        # The gradients of the log-probabilities of the lower classes, whose differences equal those of the logits.
        pull = torch.autograd.grad((log_q * torch.tensor([0.0, 1.0, -0.5, -0.5], dtype=dtype, device=where)).sum(), z)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), (z, g)), *pull]

    for found, expected in zip(of(torch.float32, device), of(torch.float64, torch.device("cpu")), strict=True):
        scale = expected.abs() if expected.dim() == 1 else expected.abs().amax(1, keepdim=True)
        assert ((found.cpu().double() - expected).abs() <= 2e-6 * scale).all()


def test_result_on_cuda_equals_the_cpu(cuda: torch.device) -> None:
    # The number of iterations is fixed on CUDA, so nothing is read back.
    logits, gamma = 5 * torch.randn(50, 100), 30 * torch.rand(50)
    expected = fk.inverse_focal_calibration_map(logits.double(), gamma.double(), log=True).float()
    logits, gamma = logits.to(cuda), gamma.to(cuda)
    with no_waiting():
        result = fk.inverse_focal_calibration_map(logits, gamma, log=True)
    assert_close(result, expected)


def test_errors() -> None:
    logits = torch.randn(4, 3)
    name = "inverse_focal_calibration_map"
    with pytest.raises(ValueError, match=f"^{name}: gamma must be finite and at least 0, got -0.5"):
        fk.inverse_focal_calibration_map(logits, -0.5)
    with pytest.raises(ValueError, match=f"^{name}: gamma must be finite and at least 0, got -1"):
        fk.inverse_focal_calibration_map(logits, torch.tensor([1.0, 2.0, -1.0, 0.0]))
    with pytest.raises(ValueError, match=rf"^{name}: gamma must broadcast to \[4\], got \[3\]"):
        fk.inverse_focal_calibration_map(logits, torch.ones(3))
    with pytest.raises(TypeError, match=f"^{name}: gamma must be a number or a tensor, got str"):
        fk.inverse_focal_calibration_map(logits, "2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"^{name}: gamma must be floating point, got torch.int64"):
        fk.inverse_focal_calibration_map(logits, torch.tensor(2))
    with pytest.raises(ValueError, match=f"^{name}: .*row 1"):
        fk.inverse_focal_calibration_map(torch.tensor([[0.0, 1.0], [torch.nan, 1.0]]), 1.0)
    with pytest.raises(ValueError, match=f"^{name}: input_kind must be 'logits' or 'probs', got 'odds'"):
        fk.inverse_focal_calibration_map(logits, 1.0, input_kind="odds")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{name}: "):
        fk.inverse_focal_calibration_map(torch.full((2, 3), 0.5), 1.0, input_kind="probs")
    with pytest.raises(ValueError, match=r"^binary_inverse_focal_calibration_map: gamma must broadcast"):
        fk.binary_inverse_focal_calibration_map(logits, torch.ones(4))
    with pytest.raises(TypeError, match=r"^properized_focal_loss: gamma must be a number or a tensor, got GammaTable"):
        fk.properized_focal_loss(logits, torch.zeros(4, dtype=torch.int64), fk.FLSD_53)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^properized_focal_loss: target must be"):
        fk.properized_focal_loss(logits, torch.zeros(3, dtype=torch.int64), 1.0)
    with pytest.raises(IndexError, match=r"^properized_focal_loss: "):
        fk.properized_focal_loss(logits, torch.full((4,), 3), 1.0)


def test_digits_of_the_definition_suffice() -> None:
    # Inserting the oracle's result into the definition of the forward map gives the input back.
    with mpmath.workdps(80):
        row = [20.0, 0.0, -3.0]
        q = [mpmath.exp(v) for v in oracle.log_inverse_map(row, 3.0)]
        weights = [v / oracle.g(v, mpf(3)) for v in q]
        for weight, p in zip(weights, oracle.softmax([mpf(v) for v in row]), strict=True):
            assert abs(weight / mpmath.fsum(weights) / p - 1) < 1e-20


@pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script:DeprecationWarning")  # torch's own, in jvp
def test_forward_mode_and_torch_func() -> None:
    """Every path gives the derivatives of ordinary autograd."""
    from torch.func import grad, hessian, jacfwd, jacrev, vmap

    torch.manual_seed(0)
    z, gamma = torch.randn(3, 4, dtype=torch.float64), torch.rand(3, dtype=torch.float64) * 3
    for f, x in [
        (fk.inverse_focal_calibration_map, z),
        (lambda s, g: fk.binary_inverse_focal_calibration_map(s, g, log_odds=True), z[:, 0]),
        (lambda z, g: fk.properized_focal_loss(z, torch.tensor([0, 3, 1]), g), z),
    ]:
        leaves = (x.clone().requires_grad_(), gamma.clone().requires_grad_())
        assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True)
        forwards, backwards = jacfwd(f, argnums=(0, 1))(x, gamma), jacrev(f, argnums=(0, 1))(x, gamma)
        expected = torch.autograd.functional.jacobian(f, (x, gamma))
        for found in (*forwards, *backwards):
            assert found.isfinite().all()
        torch.testing.assert_close(forwards, expected)
        torch.testing.assert_close(backwards, expected)

        def of_x(x, f=f):
            return f(x, gamma).square().sum()

        torch.testing.assert_close(hessian(of_x)(x), torch.autograd.functional.hessian(of_x, x))
    rows = vmap(fk.inverse_focal_calibration_map)(z, gamma)
    torch.testing.assert_close(rows, fk.inverse_focal_calibration_map(z, gamma))
    one = vmap(fk.inverse_focal_calibration_map, in_dims=(0, None))(z, gamma[0])
    torch.testing.assert_close(one, fk.inverse_focal_calibration_map(z, gamma[0]))
    per_sample = vmap(grad(lambda z, g: fk.inverse_focal_calibration_map(z, g)[0]))(z, gamma)
    assert per_sample.shape == z.shape and per_sample.isfinite().all()
