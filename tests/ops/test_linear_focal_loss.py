"""linear_focal_loss: against the pair that it replaces, in value and every derivative, and what its chunks take."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import TOLERANCE, assert_close, no_waiting
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import focalkern as fk
from focalkern.ops._linear_chunks import blocks, default_chunk_rows

pytestmark = [
    # torch's own decompositions still use torch.jit.script, whose deprecation is torch's matter.
    pytest.mark.filterwarnings("ignore:`torch.jit.script"),
    pytest.mark.usefixtures("one_thread"),
]

N, D, C = 23, 5, 19  # no power of two, and more rows than a chunk


def pair(input, linear_weight, target, gamma=2.0, *, linear_bias=None, softcap=None, chunk_rows=None, **options):
    """What the operator is to be, with all logits at once."""
    z = F.linear(input, linear_weight, linear_bias)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    leading = input.shape[:-1]
    if isinstance(gamma, torch.Tensor) and gamma.dim():
        gamma = gamma.expand(leading).reshape(-1)
    target = target.reshape(-1, z.shape[-1]) if target.is_floating_point() else target.reshape(-1)
    loss = fk.focal_loss(z.reshape(-1, z.shape[-1]), target, gamma, **options)
    return loss.reshape(leading) if options.get("reduction") == "none" else loss


def problem(dtype=torch.float64, device="cpu", ignored=True, leading=(N,)):
    """Leaves: input, weight, bias; and labels, some of them ignored."""
    x, w, b = (torch.randn(*size, dtype=torch.float64) for size in ((*leading, D), (C, D), (C,)))
    target = torch.randint(C, leading)
    if ignored:
        target.view(-1)[::3] = -100
    leaves = [t.to(device=device, dtype=dtype).requires_grad_() for t in (x, w, b)]
    return (*leaves, target.to(device))


def derivatives(loss, leaves, retain_graph=False):
    upstream = torch.randn(loss.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return torch.autograd.grad(loss, leaves, upstream.to(loss), retain_graph=retain_graph)


def compare(x, w, b, target, *arguments, more=(), dtype=None, **options):
    """Values and gradients of both; ``more`` are leaves beside the three."""
    leaves = [t for t in (x, w, b, *more) if t is not None]
    found = fk.linear_focal_loss(x, w, target, *arguments, linear_bias=b, **options)
    expected = pair(x, w, target, *arguments, linear_bias=b, **options)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert_close(found, expected, dtype)
    for actual, wanted in zip(derivatives(found, leaves), derivatives(expected, leaves), strict=True):
        assert actual.dtype == wanted.dtype
        assert_close(actual, wanted, dtype)


# ---- the pair, option by option --------------------------------------------------------------------------------------

OPTIONS = {
    "cross-entropy": {"gamma": 0.0},
    "focal": {"gamma": 2.0},
    "inverse": {"gamma": -1.5},
    "between 0 and 1": {"gamma": 0.5},
    "table": {"gamma": fk.FLSD_53},
    "class weights": {"weight": torch.linspace(0.0, 2.0, C, dtype=torch.float64)},
    "smoothing": {"label_smoothing": 0.1},
    "detached": {"detach_modulation": True},
    "capped": {"softcap": 1.5},
    "all at once": {
        "gamma": fk.GammaTable([0, 0.1, 1], [2.0, -1.0]),
        "weight": torch.linspace(0.1, 2.0, C, dtype=torch.float64),
        "label_smoothing": 0.1,
        "softcap": 2.0,
    },
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("chunk_rows", [None, 4])  # one chunk, and many with a part left over
def test_it_is_the_pair(device, options, reduction, chunk_rows):
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


def test_what_ignored_rows_hold_does_not_come_through(device):
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
    # Logits and their gradients are rounded to the dtype: a few of its roundings, and sums over D or C of them.
    tolerance = 20 * (TOLERANCE[dtype][0] if dtype != torch.float32 else 2.0**-23)
    for actual, wanted in zip(
        (found, *derivatives(found, (x, w, b))), (expected, *derivatives(expected, exact)), strict=True
    ):
        assert actual.dtype == dtype
        scale = wanted.abs().max().item()
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance * scale)


def test_a_half_precision_weight_has_a_gradient_summed_in_float32():
    # 512 chunks of one row: summed in bfloat16, the total would stop growing at 256 of the same term.
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


def test_products_without_instructions_for_a_half_type_run_in_float32(monkeypatch):
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    x, w, b, target = problem(torch.bfloat16)
    with Products() as seen:
        fk.linear_focal_loss(x, w, target, linear_bias=b, chunk_rows=4).backward()
    assert {dtype for _, _, dtype in seen.products} == {torch.float32}
    assert x.grad.dtype == w.grad.dtype == torch.bfloat16


# ---- chunks: what they compute and what they hold --------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Matrix products (rows in their first factor or sum, ...) and the largest tensor that anything made."""

    def __init__(self):
        super().__init__()
        self.products, self.largest, self.fetched = [], 0, 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        result = operator(*arguments, **(options or {}))
        name = operator.name().split("::")[1].split(".")[0]
        if name in ("mm", "addmm", "addmm_"):
            first, second = (arguments[0], arguments[1]) if name == "mm" else arguments[1:3]
            self.products.append((tuple(first.shape), tuple(second.shape), first.dtype))
        self.fetched += name == "_local_scalar_dense"
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def step(needed=(True, True, True), grad=True, classes=64, rows=96, chunk_rows=16, share=0.0, **options):
    """One training step, with what it did."""
    x, w, b = torch.randn(rows, 8), torch.randn(classes, 8), torch.randn(classes)
    target = torch.randint(classes, (rows,))
    target[: int(share * rows)] = -100
    leaves = [t.requires_grad_(n) for t, n in zip((x, w, b), needed, strict=True)]
    with Products() as seen, torch.set_grad_enabled(grad):
        loss = fk.linear_focal_loss(*leaves[:2], target, linear_bias=leaves[2], chunk_rows=chunk_rows, **options)
        if loss.requires_grad:
            loss.sum().backward()
    return seen


@pytest.mark.parametrize(
    ("needed", "per_chunk"),
    [
        ((True, True, True), 3),
        ((True, False, False), 2),  # frozen head
        ((False, True, False), 2),  # frozen body
        ((False, False, False), 1),
    ],
)
def test_only_the_products_that_are_needed(needed, per_chunk):
    assert len(step(needed).products) == 6 * per_chunk
    assert len(step(needed, grad=False).products) == 6


def test_an_unreduced_loss_computes_the_logits_twice():
    assert len(step(reduction="none").products) == 6 * 4


def test_ignored_rows_take_no_part_in_the_products():
    seen = step(share=0.75)
    assert len(seen.products) == 2 * 3  # 24 of 96 rows
    assert sum(first[0] for first, second, _ in seen.products if second == (8, 64)) == 24


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_grows_with_rows_times_classes(reduction):
    few, many = (step(classes=512, rows=rows, reduction=reduction).largest for rows in (256, 1024))
    assert few == many == 512 * 16 * 4  # a chunk of logits; the gradient of the weight is smaller


def test_the_default_chunk():
    assert default_chunk_rows(2048, 512, 32000, 4) == 256  # half of the sum of the weight's gradient
    assert default_chunk_rows(2048, 512, 32000, 8) == 256
    assert default_chunk_rows(2048, 512, 32000, 2) == 512  # which is in float32
    assert default_chunk_rows(10**6, 512, 10, 4) * 10 * 4 <= 256 * 2**20  # the input, bounded
    assert default_chunk_rows(8192, 4096, 128256, 2) * 128256 * 2 <= 256 * 2**20
    assert default_chunk_rows(5, 4, 3, 4) == 5
    assert default_chunk_rows(0, 4, 3, 4) == 1
    assert default_chunk_rows(1000, 1, 10**9, 8) == 1


def test_blocks_cover_a_chunk():
    for rows, classes in ((1, 1), (7, 10**6), (300, 17)):
        found = [row for block in blocks(torch.empty(rows, classes)) for row in range(rows)[block]]
        assert found == list(range(rows))


def test_the_chunk_changes_nothing_but_rounding():
    x, w, b, target = problem()
    losses = [fk.linear_focal_loss(x, w, target, linear_bias=b, chunk_rows=k) for k in (1, 4, 1000)]
    assert_close(losses[1], losses[0])
    assert_close(losses[2], losses[0])


def test_nothing_waits_for_the_device(cuda):
    x, w, b, target = problem(torch.float32, cuda)
    with no_waiting():
        fk.linear_focal_loss(x, w, target, linear_bias=b, chunk_rows=4).backward()
        fk.linear_focal_loss(x, w, target, linear_bias=b, chunk_rows=4, reduction="none").sum().backward()


# ---- in training -----------------------------------------------------------------------------------------------------


def test_a_second_backward_pass():
    x, w, b, target = problem()
    loss = fk.linear_focal_loss(x, w, target, linear_bias=b, chunk_rows=4)
    first = derivatives(loss, (x, w, b), retain_graph=True)
    kept = [g.clone() for g in first]
    for gradient in first:
        gradient.zero_()  # they are the caller's
    for again, before in zip(derivatives(loss, (x, w, b), retain_graph=True), kept, strict=True):
        assert_close(again, before)
    loss = fk.linear_focal_loss(x, w, target)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    x, w, b, target = problem()
    direct = derivatives(fk.linear_focal_loss(x, w, target, linear_bias=b), (x, w, b))
    loss = checkpoint(
        lambda x, w, b: fk.linear_focal_loss(x.tanh().atanh(), w, target, linear_bias=b),
        x.detach().mul(0.1).requires_grad_(),
        w,
        b,
        use_reentrant=use_reentrant,
    )
    loss.backward()
    expected = fk.linear_focal_loss(x * 0.1, w, target, linear_bias=b)
    assert_close(w.grad, torch.autograd.grad(expected, w)[0])
    assert len(direct) == 3


def test_accumulation_over_micro_batches_and_a_tied_weight():
    embedding = nn.Embedding(C, D).double()
    criterion = fk.LinearFocalLoss(D, C, reduction="sum", dtype=torch.float64)
    criterion.linear.weight = embedding.weight
    tokens, target = torch.randint(C, (12,)), torch.randint(C, (12,))
    for rows in torch.arange(12).split(5):
        (criterion(embedding(tokens[rows]).tanh(), target[rows]) / 12).backward()
    weight = embedding.weight.detach().clone().requires_grad_()
    pair(F.embedding(tokens, weight).tanh(), weight, target).backward()
    assert_close(embedding.weight.grad, weight.grad)
    assert len(list(nn.ModuleList([embedding, criterion]).parameters())) == 1


def test_the_weight_may_change_between_the_passes():
    x, w, _, target = problem()
    expected = torch.autograd.grad(pair(x, w, target), x)[0]
    loss = fk.linear_focal_loss(x, w, target, reduction="mean")
    assert_close(torch.autograd.grad(loss, x, retain_graph=True)[0], expected)
    with torch.no_grad():
        w.mul_(2)
    # The logits would be computed anew, from another weight: as everywhere in torch, an error and no wrong gradient.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


@pytest.mark.parametrize("leading", [(6,), (2, 3)])
def test_the_order_of_other_libraries_is_recognized(leading):
    """Weight first: the hidden states would be a head of 6 classes, or of 2 x 3."""
    hidden, weight, target = torch.randn(*leading, 4), torch.randn(5, 4), torch.randint(5, leading)
    expected = (
        r"linear_focal_loss: target of labels must be .* The order is linear_focal_loss\(input, linear_weight, target"
    )
    for labels in (target, target.reshape(-1)):
        with pytest.raises(ValueError, match=expected):
            fk.linear_focal_loss(weight, hidden, labels)


# ---- derivatives of higher order, torch.func, torch.compile ----------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "options", [OPTIONS["focal"], OPTIONS["all at once"], {"detach_modulation": True}], ids=["focal", "all", "detached"]
)
def test_second_derivatives_go_by_chunks(reduction, options):
    results = []
    x, w, b, target = problem()
    for loss in (fk.linear_focal_loss, pair):
        value = loss(x, w, target, linear_bias=b, reduction=reduction, chunk_rows=16, **options)
        upstream = torch.linspace(1, 2, value.numel(), dtype=torch.float64).reshape(value.shape).requires_grad_()
        first = torch.autograd.grad(value, (x, w, b), upstream, create_graph=True)
        mixed = sum((g * torch.sin(torch.arange(g.numel()).double()).view_as(g)).sum() for g in first)
        results.append((*first, *torch.autograd.grad(mixed, (x, w, b, upstream))))
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected)


def test_second_derivatives_hold_one_chunk():
    x, w = torch.randn(64, 8, requires_grad=True), torch.randn(512, 8, requires_grad=True)
    target = torch.randint(512, (64,))
    with Products() as seen:
        loss = fk.linear_focal_loss(x, w, target, chunk_rows=16)
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.autograd.grad(g.square().sum(), w)
    assert seen.largest == 512 * 16 * 4


def test_third_derivatives_and_gammas():
    gamma = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    results = []
    for loss in (fk.linear_focal_loss, pair):
        x = torch.linspace(-1, 1, 2 * D, dtype=torch.float64).reshape(2, D).requires_grad_()
        w = torch.linspace(1, -2, 3 * D, dtype=torch.float64).reshape(3, D).cos().requires_grad_()
        (g,) = torch.autograd.grad(loss(x, w, torch.tensor([0, 2]), gamma), x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), w, create_graph=True)
        results.append(torch.autograd.grad(h.square().sum(), (x, gamma)))
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected)


def test_gradcheck():
    x, w = torch.randn(3, 2, dtype=torch.float64).requires_grad_(), torch.randn(4, 2).double().requires_grad_()
    probabilities = torch.rand(3, 4, dtype=torch.float64).requires_grad_()
    gamma = torch.rand(3, dtype=torch.float64).requires_grad_()
    for reduction in ("mean", "none"):

        def loss(x, w, target, gamma, reduction=reduction):
            return fk.linear_focal_loss(x, w, target, gamma, reduction=reduction, chunk_rows=2, label_smoothing=0.1)

        assert torch.autograd.gradcheck(loss, (x, w, probabilities, gamma))
        assert torch.autograd.gradgradcheck(loss, (x, w, probabilities, gamma))


TRANSFORMS = {
    "grad": lambda f, x, w, y: torch.func.grad(f)(w, x, y),
    "vmap": lambda f, x, w, y: torch.func.vmap(f, (None, 0, 0))(w, x, y),
    "gradients per sample": lambda f, x, w, y: torch.func.vmap(torch.func.grad(f), (None, 0, 0))(w, x, y),
    "gradient of vmap": lambda f, x, w, y: torch.func.grad(
        lambda w: torch.func.vmap(f, (None, 0, 0))(w, x, y).square().sum()
    )(w),
    "an ensemble of heads": lambda f, x, w, y: torch.func.vmap(torch.func.grad(f), (0, None, None))(
        torch.stack([w, 2 * w]), x, y
    ),
    "gradient of the gradient": lambda f, x, w, y: torch.func.grad(
        lambda w: torch.func.grad(f, 1)(w, x, y).square().sum()
    )(w),
    "jacobian of the gradient": lambda f, x, w, y: torch.func.jacrev(torch.func.grad(f, 1), 1)(w, x, y),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_torch_func(transform):
    x, w, _, target = (t.detach() for t in problem(ignored=False, leading=(6,)))
    found, expected = (
        transform(lambda w, x, y, loss=loss: loss(x, w, y, chunk_rows=4), x, w, target)
        for loss in (fk.linear_focal_loss, pair)
    )
    assert_close(found, expected)


def test_forward_mode_is_an_error_that_says_what_to_use():
    x, w, _, target = (t.detach() for t in problem())
    with pytest.raises(NotImplementedError, match=r"use focal_loss\(torch.nn.functional.linear"):
        torch.func.jvp(lambda x: fk.linear_focal_loss(x, w, target), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=r"use focal_loss\(torch.nn.functional.linear"):
            fk.linear_focal_loss(dual, w, target)


@pytest.mark.kernels  # without them a graph holds the pair
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_it_compiles_into_one_graph(reduction):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(fk.linear_focal_loss, fullgraph=True, backend="aot_eager")
    counted = torch.compile(fk.linear_focal_loss, fullgraph=True, backend=backend)
    x, w, b, target = problem(torch.float32)
    for gamma in (2.0, 1.0):
        expected = fk.linear_focal_loss(x, w, target, gamma, linear_bias=b, reduction=reduction)
        found = compiled(x, w, target, gamma, linear_bias=b, reduction=reduction)
        assert_close(found, expected)
        for a, e in zip(derivatives(found, (x, w, b)), derivatives(expected, (x, w, b)), strict=True):
            assert_close(a, e)
        assert_close(counted(x, w, target, gamma, linear_bias=b, reduction=reduction), expected)
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("linear_focal_loss" in name for name in names) == 1
    assert not any("linear." in name or "mm." in name for name in names)


@pytest.mark.kernels
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck(reduction):
    x, w, b, target = problem(torch.float32)
    code = {"none": 0, "mean": 1}[reduction]
    gamma = torch.tensor(2.0, dtype=torch.float64)
    settings = (-100, 0.0, False, None, 0.0, torch.float32, False, 4)
    needed = [True, True, True, False, False]
    arguments = (x, w, b, target, gamma, None, None)
    torch.library.opcheck(torch.ops.focalkern.linear_focal_loss.default, (*arguments, code, *settings, needed))
    detached = [t.detach() if t is not None else None for t in arguments]
    torch.library.opcheck(
        torch.ops.focalkern.linear_focal_loss_gradient.default, (torch.rand(N), *detached, *settings, needed)
    )


# ---- torch's own samples ---------------------------------------------------------------------------------------------

TORCH_HAS_IT = hasattr(nn, "LinearCrossEntropyLoss")
needs_torch = pytest.mark.skipif(not TORCH_HAS_IT, reason="this torch has no LinearCrossEntropyLoss")


def torch_samples(kind, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_modules
    make = getattr(common_modules, f"module_{kind}_torch_nn_LinearCrossEntropyLoss")
    return make(None, "cpu", torch.float64, training=True, **options)


def of_torch(arguments, settings):
    """The arguments of LinearCrossEntropyLoss as those of LinearFocalLoss with gamma = 0."""
    settings = dict(settings)
    options = settings.pop("options", None)
    if settings.get("ignore_index", 0) is None:
        del settings["ignore_index"]
    return fk.LinearFocalLoss(*arguments, 0.0, chunk_rows=getattr(options, "batch_chunk_size", None), **settings)


@needs_torch
@pytest.mark.filterwarnings("ignore:linear_cross_entropy")
def test_every_sample_of_torch():
    count = 0
    for sample in torch_samples("inputs", requires_grad=True):
        arguments, settings = sample.constructor_input.args, sample.constructor_input.kwargs
        theirs = nn.LinearCrossEntropyLoss(*arguments, **settings)
        ours = of_torch(arguments, settings)
        ours.load_state_dict(theirs.state_dict())
        input, target = sample.forward_input.args
        results = []
        for module in (theirs, ours):
            x = input.detach().clone().requires_grad_()
            loss = module(x, target)
            loss_gradient = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).reshape(loss.shape)
            results.append((loss, *torch.autograd.grad(loss, (x, *module.parameters()), loss_gradient)))
        for found, expected in zip(results[1], results[0], strict=True):
            assert_close(found, expected)
        count += 1
    assert count > 300


@needs_torch
def test_every_error_sample_of_torch():
    from torch.testing._internal.common_modules import ModuleErrorEnum

    samples = list(torch_samples("error_inputs", requires_grad=False))
    assert len(samples) >= 5
    for sample in samples:
        arguments = sample.module_error_input.constructor_input
        if sample.error_on == ModuleErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises((TypeError, ValueError), match="LinearFocalLoss"):
                of_torch(arguments.args, arguments.kwargs)
            continue
        module = of_torch(arguments.args, arguments.kwargs)
        with pytest.raises((TypeError, ValueError), match=r"linear_focal_loss: (input|target)"):
            module(*sample.module_error_input.forward_input.args)


@needs_torch
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gamma_0_is_torchs_chunked_linear_cross_entropy(reduction):
    x, w, b, target = problem()
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=4)
    expected = F.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction, options=options)
    found = fk.linear_focal_loss(x, w, target, 0.0, linear_bias=b, reduction=reduction, chunk_rows=4)
    assert_close(found, expected)
    for a, e in zip(derivatives(found, (x, w, b)), derivatives(expected, (x, w, b)), strict=True):
        assert_close(a, e)


# ---- errors ----------------------------------------------------------------------------------------------------------

GOOD = {"input": torch.zeros(4, 3), "linear_weight": torch.zeros(5, 3), "target": torch.zeros(4, dtype=torch.long)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": 1}, TypeError, "input must be a tensor, got int"),
        ({"input": torch.zeros(4, 3, dtype=torch.long)}, TypeError, "input must be float16, .* got torch.int64"),
        ({"input": torch.zeros(())}, ValueError, r"input must be \[D\], \[N, D\] or \[B, S, D\], got shape \[\]"),
        ({"input": torch.zeros(4, 2)}, ValueError, "same last dimension D, got 2 and 3"),
        ({"input": torch.zeros(4, 3).double()}, TypeError, "linear_weight must have the dtype of input"),
        ({"linear_weight": torch.zeros(3)}, ValueError, r"linear_weight must be \[C, D\], got shape \[3\]"),
        ({"linear_weight": torch.zeros(0, 3)}, ValueError, "at least one class"),
        ({"linear_bias": torch.zeros(4)}, ValueError, r"linear_bias must be \[C\] = \[5\], got \[4\]"),
        ({"linear_bias": torch.zeros(5).double()}, TypeError, "linear_bias must have the dtype of input"),
        ({"target": torch.zeros(3, dtype=torch.long)}, ValueError, r"labels must be \[N\] = \[4\], got \[3\]"),
        ({"target": torch.zeros(4, 4)}, ValueError, r"class probabilities must be \[N, C\] = \[4, 5\], got \[4, 4\]"),
        ({"target": torch.zeros(4, dtype=torch.bool)}, TypeError, "target must be int64, .* got torch.bool"),
        ({"target": torch.full((4,), 5)}, IndexError, r"target must be in \[0, 5\) or ignore_index, got 5 at row 0"),
        ({"gamma": "2"}, TypeError, "gamma must be a number, a tensor or a GammaTable, got str"),
        ({"gamma": float("nan")}, ValueError, "gamma must be finite, got nan"),
        ({"gamma": torch.zeros(4, dtype=torch.long)}, TypeError, "gamma must be a float"),
        ({"gamma": torch.zeros(3)}, ValueError, r"broadcastable to the unreduced loss \[4\], got \[3\]"),
        ({"weight": torch.zeros(4)}, ValueError, r"weight must be \[C\] = \[5\], got \[4\]"),
        ({"weight": torch.zeros(5, requires_grad=True)}, ValueError, "weight must not require grad"),
        ({"reduction": "max"}, ValueError, "reduction must be 'none', 'mean' or 'sum', got 'max'"),
        ({"label_smoothing": 2}, ValueError, r"label_smoothing must be in \[0, 1\], got 2"),
        ({"label_smoothing": "0"}, TypeError, "label_smoothing must be a number, got str"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be an int, got 1.5"),
        ({"target": torch.zeros(4, 5), "ignore_index": 1}, ValueError, "ignore_index must be negative"),
        ({"detach_modulation": 1}, TypeError, "detach_modulation must be a bool, got int"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be at least 1, got 0"),
        ({"chunk_rows": 1.5}, TypeError, "chunk_rows must be an int or None, got 1.5"),
        ({"softcap": 0}, ValueError, "softcap must be positive and finite, got 0"),
        ({"softcap": "30"}, TypeError, "softcap must be a number or None, got str"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=f"^linear_focal_loss: .*{message}"):
        fk.linear_focal_loss(**{**GOOD, **change})


def test_a_steep_inverse_gamma_is_warned_about():
    with pytest.warns(UserWarning, match=r"linear_focal_loss: gamma = -4.0 is below -3.591"):
        fk.linear_focal_loss(**GOOD, gamma=-4.0)


# ---- modules ---------------------------------------------------------------------------------------------------------


def test_modules_are_the_pair():
    x, _, _, target = problem()
    for module, plain in (
        (fk.LinearFocalLoss(D, C, 1.0, bias=True, softcap=2.0, dtype=torch.float64), fk.FocalLoss(1.0)),
        (fk.LinearFLSDLoss(D, C, dtype=torch.float64, label_smoothing=0.1), fk.FLSDLoss(label_smoothing=0.1)),
        (fk.LinearAdaFocalLoss(D, C, dtype=torch.float64, n_bins=4), fk.AdaFocalLoss(n_bins=4)),
    ):
        assert_close(module(x, target), plain(module.logits(x), target))
        copied = copy.deepcopy(module)
        copied.load_state_dict(module.state_dict())
        assert_close(copied(x, target), module(x, target))


def test_adafocal_follows_features():
    x, _, _, target = problem()
    module = fk.LinearAdaFocalLoss(D, C, dtype=torch.float64, n_bins=4, chunk_rows=5)
    plain = fk.AdaFocalLoss(n_bins=4)
    module.accumulate(x, target)
    plain.accumulate(module.logits(x), target)
    assert module.n_accumulated == plain.n_accumulated == int((target != -100).sum())
    assert torch.equal(module.update().bin_gammas, plain.update().bin_gammas)
    assert_close(module(x, target), plain(module.logits(x), target))
    with pytest.raises(ValueError, match=r"LinearAdaFocalLoss.accumulate: input must be \[..., D\] with D = 5"):
        module.accumulate(x[:, :4], target)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"in_features": 0}, ValueError, "in_features must be at least 1, got 0"),
        ({"num_classes": 2.5}, TypeError, "num_classes must be an int, got 2.5"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be at least 1, got 0"),
        ({"softcap": -1}, ValueError, "softcap must be positive, got -1"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must be \[C\] = \[4\], got \[3\]"),
    ],
)
def test_modules_check_their_arguments(change, error, message):
    with pytest.raises(error, match=f"^LinearFocalLoss: {message}"):
        fk.LinearFocalLoss(**{"in_features": 3, "num_classes": 4, **change})


def test_modules_show_themselves():
    module = fk.LinearFocalLoss(3, 4, 1.5, chunk_rows=8, softcap=30.0)
    assert "gamma=1.5, chunk_rows=8, softcap=30.0" in repr(module)
    assert "Linear(in_features=3, out_features=4, bias=False)" in repr(module)
