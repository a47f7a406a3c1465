"""linear_focal_loss compared with the two operations that it replaces: value, derivatives, options and dtypes."""

import pytest
import torch
from conftest import TOLERANCE, assert_close
from linear_cases import OPTIONS, C, N, Products, derivatives, pair, problem

import focalkern as fk

pytestmark = [
    # torch's own decompositions still use torch.jit.script, which is deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.usefixtures("one_thread", "chunks"),
]


def compare(x, w, b, target, *arguments, more=(), dtype=None, **options):
    """Compares values and gradients of both; ``more`` are additional leaves."""
    leaves = [t for t in (x, w, b, *more) if t is not None]
    found = fk.linear_focal_loss(x, w, target, *arguments, linear_bias=b, **options)
    expected = pair(x, w, target, *arguments, linear_bias=b, **options)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert_close(found, expected, dtype)
    for actual, wanted in zip(derivatives(found, leaves), derivatives(expected, leaves), strict=True):
        assert actual.dtype == wanted.dtype
        assert_close(actual, wanted, dtype)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunk_rows", [None, 4])  # one chunk, or many with an incomplete last one
def test_it_equals_the_two_operations(device, options, reduction, chunk_rows):
    options = {k: v.to(device) if hasattr(v, "to") else v for k, v in options.items()}
    x, w, b, target = problem(device=device)
    compare(x, w, b, target, reduction=reduction, chunk_rows=chunk_rows, **options)
    compare(x, w, None, target, reduction=reduction, chunk_rows=chunk_rows, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("target_dtype", [torch.float64, torch.float32])
def test_class_probabilities_have_a_gradient_too(device, reduction, target_dtype):
    x, w, b, _ = problem(device=device)
    target = torch.rand(N, C, dtype=torch.float64).to(device=device, dtype=target_dtype).requires_grad_()
    compare(x, w, b, target, 1.5, more=[target], reduction=reduction, chunk_rows=4, dtype=target_dtype)


@pytest.mark.parametrize("shape", [(), (1,), (N,)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gamma_may_be_a_tensor(device, shape, reduction):
    x, w, b, target = problem(device=device)
    gamma = torch.linspace(-1, 3, N, dtype=torch.float64)[: shape[0]] if shape else torch.tensor(1.5).double()
    gamma = gamma.clone().to(device).requires_grad_()
    compare(x, w, b, target, gamma, more=[gamma], reduction=reduction, chunk_rows=4)
    compare(x, w, b, target, gamma.detach(), reduction=reduction, chunk_rows=4)


@pytest.mark.parametrize("leading", [(), (7,), (3, 5), (2, 0), (0,)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_shapes(leading, reduction):
    x, w, b, target = problem(leading=leading, ignored=False)
    compare(x, w, b, target, reduction=reduction)
    if leading:
        gamma = torch.linspace(0, 2, leading[-1], dtype=torch.float64)  # broadcast over the rest
        compare(x, w, b, target, gamma, reduction=reduction)
    probabilities = torch.rand(*leading, C, dtype=torch.float64)
    compare(x, w, b, probabilities, reduction=reduction)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_labels_of_other_types(dtype):
    x, w, b, target = problem(ignored=False)
    compare(x, w, b, target.to(dtype), ignore_index=3, chunk_rows=4)


def test_all_rows_ignored_is_nan_with_a_zero_gradient(device):
    x, w, b, target = problem(device=device)
    loss = fk.linear_focal_loss(x, w, torch.full_like(target, -100), linear_bias=b)
    assert loss.isnan()
    for gradient in torch.autograd.grad(loss, (x, w, b)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_saturated_rows():
    x, w, b, target = problem()
    compare((x.detach() * 1e4).requires_grad_(), w, b, target, chunk_rows=4)


def test_values_of_ignored_rows_have_no_effect(device):
    x, w, b, target = problem(device=device)
    with torch.no_grad():
        x[target == -100] = torch.nan if device.type == "cpu" else 1e30
    loss = fk.linear_focal_loss(x, w, target, linear_bias=b)
    for gradient in (loss, *torch.autograd.grad(loss, (x, w, b))):
        assert gradient.isfinite().all()


# ---- dtypes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_narrow_dtypes_against_float64(device, dtype, reduction):
    x, w, b, target = problem(dtype, device)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    found = fk.linear_focal_loss(x, w, target, linear_bias=b, reduction=reduction, chunk_rows=4)
    expected = pair(exact[0], exact[1], target, linear_bias=exact[2], reduction=reduction)
    assert found.dtype == dtype
    # Logits and their gradients are rounded to the dtype, and then summed over D or C: an error of a few roundings.
    tolerance = 20 * (TOLERANCE[dtype][0] if dtype != torch.float32 else 2.0**-23)
    for actual, wanted in zip(
        (found, *derivatives(found, (x, w, b))), (expected, *derivatives(expected, exact)), strict=True
    ):
        assert actual.dtype == dtype
        scale = wanted.abs().max().item()
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance * scale)


def test_a_half_precision_weight_has_a_gradient_summed_in_float32():
    # 512 chunks of one row: a bfloat16 total would stop growing at 256 times the same term.
    x = torch.ones(512, 1, dtype=torch.bfloat16)
    w = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss = fk.linear_focal_loss(x, w, torch.zeros(512, dtype=torch.long), 0.0, reduction="sum", chunk_rows=1)
    (gradient,) = torch.autograd.grad(loss, w)
    assert gradient.flatten().tolist() == [-256.0, 256.0]


def test_float16_keeps_small_probabilities():
    # p = 1 / 30000 of the other classes is below float16's normal numbers.
    x, w = torch.ones(1, 1, dtype=torch.float16), torch.zeros(30000, 1, dtype=torch.float16, requires_grad=True)
    loss = fk.linear_focal_loss(x, w, torch.zeros(1, dtype=torch.long), 0.0)
    (gradient,) = torch.autograd.grad(loss, w, torch.tensor(1024.0, dtype=torch.float16))
    torch.testing.assert_close(gradient[1].item(), 1024 / 30000, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_and_returns_float32(device, dtype):
    x, w, b, target = problem(dtype, device)
    w, b = (t.detach().float().requires_grad_() for t in (w, b))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = fk.linear_focal_loss(x, w, target, linear_bias=b)
        expected = pair(x, w, target, linear_bias=b)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    for leaf, a, e in zip((x, w, b), derivatives(found, (x, w, b)), derivatives(expected, (x, w, b)), strict=True):
        assert a.dtype == leaf.dtype
        torch.testing.assert_close(a, e, rtol=3e-2, atol=3e-2 * e.abs().max().item())


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_products_without_instructions_for_a_half_type_run_in_float32(monkeypatch, half, autocast):
    monkeypatch.setattr("focalkern.ops._linear_chunks._SLOW_HALVES", (torch.float16, torch.bfloat16))
    x, w, b, target = problem(torch.float32 if autocast else half)
    with torch.autocast("cpu", half, enabled=autocast), Products() as seen:
        fk.linear_focal_loss(x, w, target, linear_bias=b, chunk_rows=4).backward()
    assert {dtype for _, _, dtype in seen.products} == {torch.float32}
    assert x.grad.dtype == w.grad.dtype == x.dtype
