"""A split vocabulary in one process: errors, one rank, compiled graphs."""

import math

import pytest
import torch
import torch.distributed as dist
from conftest import assert_close
from vocab_cases import TABLE, gradients

import focalkern as fk
from focalkern import reference
from focalkern.ops._row_kernels import slice_gradient

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    store = tmp_path_factory.mktemp("alone") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"focal_loss_vocab_parallel: torch.distributed has no process group"):
        fk.focal_loss_vocab_parallel(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_one_rank(alone, scale):
    z = (torch.randn(7, 40) * scale).requires_grad_()
    target = torch.randint(40, (7,))
    found = fk.focal_loss_vocab_parallel(z, target, 1.5, reduction="none")
    expected = fk.focal_loss(z, target, 1.5, reduction="none")
    assert_close(found, expected)
    assert_close(gradients(found, [z])[0], gradients(expected, [z])[0])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("soft", [False, True])
def test_no_rows(alone, soft, reduction):
    z = torch.zeros(0, 3, requires_grad=True)
    target = torch.zeros(0, 3) if soft else torch.zeros(0, dtype=torch.long)
    options = {"reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.1 if soft else 0.0}
    found, expected = fk.focal_loss_vocab_parallel(z, target, **options), fk.focal_loss(z, target, **options)
    assert_close(found, expected)
    found.sum().backward()
    assert z.grad.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gamma", [2.0, 0.0, -1.0])
def test_a_target_beside_which_nothing_is_left(alone, dtype, gamma):
    z = torch.tensor([[900.0, 0.0, -5.0], [0.0, 900.0, 3.0]], dtype=dtype).requires_grad_()
    found = fk.focal_loss_vocab_parallel(z, torch.tensor([0, 0]), gamma, reduction="none")
    expected = fk.focal_loss(z, torch.tensor([0, 0]), gamma, reduction="none")
    assert_close(found, expected)
    assert_close(gradients(found, [z])[0], gradients(expected, [z])[0])
    one_class = torch.ones(2, 1, dtype=dtype)
    assert fk.focal_loss_vocab_parallel(one_class, torch.tensor([0, 0]), gamma).item() == 0


def by_head(z, target, group, **options):
    """The identity as the head; its bias makes classes impossible, because products with infinities would be NaN."""
    z, bias = torch.where(z == -math.inf, 0.0, z), torch.where(z[0] == -math.inf, z[0], 0.0)
    return fk.linear_focal_loss(z, torch.eye(len(bias)), target, 2.0, linear_bias=bias, process_group=group, **options)


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("of_head", [False, True])
def test_class_of_weight_zero_adds_nothing_even_where_it_cannot_occur(alone, z_loss, of_head):
    z, weight = torch.randn(20, 6), torch.rand(6) + 0.5
    weight[1], z[:, 1] = 0, -math.inf
    target = torch.randint(2, 6, (20,))
    target[::3] = 1
    z.requires_grad_()

    def loss(rows):
        options = {"weight": weight, "z_loss": z_loss}
        if of_head:
            return by_head(z[rows], target[rows], alone, **options)
        return fk.focal_loss_vocab_parallel(z[rows], target[rows], 2.0, **options)

    found, expected = loss(torch.arange(20)), loss(target != 1)
    assert_close(found, expected)
    of_found, of_expected = gradients(found, [z])[0], gradients(expected, [z])[0]
    assert (of_found[target == 1] == 0).all()
    assert_close(of_found, of_expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": 1}, TypeError, "logits must be a tensor, got int"),
        ({"logits": torch.zeros(4, 3, dtype=torch.long)}, TypeError, "logits must be float16"),
        ({"logits": torch.zeros(())}, ValueError, r"logits must be \[C_r\]"),
        ({"target": torch.zeros(4, 2)}, ValueError, r"target must be \[4, 3\], got \[4, 2\]"),
        ({"target": torch.zeros(4, 3), "ignore_index": 0}, ValueError, "ignore_index must be negative"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
        ({"label_smoothing": torch.tensor(0.1)}, TypeError, "label_smoothing must be a number, got Tensor"),
        ({"modulation": True}, ValueError, "modulation must be one of confidence, got True"),
        ({"weight": torch.ones(2)}, ValueError, r"weight must be \[C\], with the classes of all ranks, got \[2\]"),
        ({"target": torch.zeros(4, dtype=torch.bool)}, TypeError, "target must be int64"),
        ({"target": torch.zeros(3, dtype=torch.long)}, ValueError, r"target must be \[4\], got \[3\]"),
        ({"reduction": "max"}, ValueError, "reduction must be"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be an int"),
        ({"detach_modulation": 1}, TypeError, "detach_modulation must be a bool"),
        ({"gamma": torch.zeros(3)}, ValueError, r"gamma must be broadcastable to the unreduced loss \[4\]"),
    ],
)
def test_errors_name_the_argument(alone, change, error, message):
    good = {"logits": torch.zeros(4, 3), "target": torch.zeros(4, dtype=torch.long)}
    with pytest.raises(error, match=f"focal_loss_vocab_parallel: {message}"):
        fk.focal_loss_vocab_parallel(**{**good, **change})


@pytest.mark.parametrize("kind", ["labels", "probabilities"])
def test_digits_where_the_gradient_cancels(alone, kind):
    """p_j - t_j of similar logits and similar targets, where the one process computes in float64, too."""
    z, target, options = (1e-3 * torch.randn(5, 40)).requires_grad_(), torch.randint(40, (5,)), {"label_smoothing": 1.0}
    if kind == "probabilities":
        target, options = torch.full((5, 40), 1 / 40, dtype=torch.float64), {}
    wide = z.detach().double().requires_grad_()
    found = gradients(fk.focal_loss_vocab_parallel(z, target, 0.0, **options), [z])[0]
    expected = gradients(reference.focal_loss(wide, target, 0.0, **options), [wide])[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0.0)


COMPILED = {
    "number": {"gamma": 2.0},
    "tensor": {"gamma": torch.tensor(1.5)},
    "table": {"gamma": TABLE},
    "weights": {"weight": torch.linspace(0, 2, 40), "reduction": "none"},
    "confidence": {"gamma": 1.0, "modulation": "confidence", "reduction": "sum"},
    "smoothing": {"label_smoothing": 0.1, "weight": torch.linspace(0, 2, 40)},
    "smoothing, table, none": {"label_smoothing": 0.3, "gamma": TABLE, "reduction": "none"},
    "probabilities": {"soft": True, "gamma": torch.tensor(1.5, requires_grad=True)},
    "probabilities, DFT": {"soft": True, "gamma": 1.0, "modulation": "confidence", "detach_modulation": True},
    "gamma per row": {"label_smoothing": 0.1, "gamma": torch.linspace(-1, 3, 7).requires_grad_()},
}
Z_LOSSES = {"z-loss": {"z_loss": 0.1}, "z-loss, smoothing": {"z_loss": 0.1, "label_smoothing": 0.1}}


# Dynamo reads .grad of the inputs and outputs of the graphs.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", [*COMPILED, *Z_LOSSES])
def test_compiles_into_one_graph(alone, name):
    options = dict({**COMPILED, **Z_LOSSES}[name])
    z, target = torch.randn(7, 40, requires_grad=True), torch.randint(40, (7,))
    if options.pop("soft", False):
        target = torch.rand(7, 40).softmax(1).requires_grad_()
    leaves = [z, *(t for t in (target, options.get("gamma")) if isinstance(t, torch.Tensor) and t.requires_grad)]

    def loss(function, z, target):
        return function(z * 2, target, **options) + 1

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda z, target: loss(fk.focal_loss_vocab_parallel, z, target), fullgraph=True, backend="aot_eager"
    )
    found, expected = compiled(z, target), loss(fk.focal_loss, z, target)
    assert_close(found, expected)
    for gradient, wanted in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        assert_close(gradient, wanted)


HEADS = {
    **COMPILED,
    "number, none": {"reduction": "none"},
    "capped": {"softcap": 2.0, "chunk_rows": 3},
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", HEADS)
def test_a_head_compiles_into_one_graph(alone, name):
    options = dict(HEADS[name])
    x, w, b = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((7, 6), (40, 6), (40,)))
    soft = options.pop("soft", False)
    target = torch.rand(7, 40, requires_grad=True) if soft else torch.randint(40, (7,))
    leaves = [x, w, b, *(t for t in (target, options.get("gamma")) if isinstance(t, torch.Tensor) and t.requires_grad)]

    def loss(x, w, b, **group):
        return fk.linear_focal_loss(x * 2, w, target, linear_bias=b, **options, **group) + 1

    torch._dynamo.reset()
    found = torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w, b, process_group=alone)
    expected = loss(x, w, b)
    assert_close(found, expected)
    for gradient, wanted in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        assert_close(gradient, wanted)


class Loss(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_an_export_without_gradients_is_an_error(alone, strict):
    z, target = torch.randn(7, 40), torch.randint(40, (7,))
    module = Loss(lambda z, target: fk.focal_loss_vocab_parallel(z, target, 2.0))
    with pytest.raises(Exception, match=r"focal_loss_vocab_parallel: torch.export records no gradients .*no_grad"):
        torch.export.export(module, (z, target), strict=strict)
    with torch.no_grad():
        exported = torch.export.export(module, (z, target), strict=strict).module()
    assert_close(exported(z, target), module(z, target))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("over_ranks", [False, True])
def test_an_exported_head_has_gradients_of_inputs_that_needed_none(alone, over_ranks, reduction, strict):
    x, w, b = (torch.randn(size, dtype=torch.float64) for size in ((7, 6), (40, 6), (40,)))
    target, options = torch.randint(40, (7,)), {"reduction": reduction, "process_group": alone if over_ranks else None}

    def function(x, w, b):
        return fk.linear_focal_loss(x, w, target, 2.0, linear_bias=b, softcap=3.0, **options).square().sum()

    with torch.no_grad():
        exported = torch.export.export(Loss(function), (x, w, b), strict=strict).module()
    leaves = [tensor.requires_grad_() for tensor in (x, w, b)]
    found, expected = exported(*leaves), function(*leaves)
    assert_close(found, expected)
    for gradient, wanted in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        assert_close(gradient, wanted)


def test_statistics_with_smoothing_come_from_the_softmax_of_the_loss(alone, monkeypatch):
    z, w, target = 20 * torch.randn(7, 40), torch.randn(40, 6), torch.randint(40, (7,))
    options = {"label_smoothing": 0.1, "return_stats": True}
    expected = fk.focal_loss(z, target, **options).stats
    of_head = fk.focal_loss(z[:, :6] @ w.T, target, **options).stats

    def another_pass(*_):
        raise AssertionError("the slice was read for the statistics of the labels")

    monkeypatch.setattr("focalkern.ops._vocab_slices._statistics_of_slice", another_pass)
    found = fk.focal_loss_vocab_parallel(z, target, **options).stats
    from_head = fk.linear_focal_loss(z[:, :6], w, target, process_group=alone, **options).stats
    for values, wanted in zip((*found, *from_head), (*expected, *of_head), strict=True):
        assert_close(values, wanted, torch.float32)


def test_arguments_that_ranks_do_not_support(alone):
    x, w, target = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"must be \[C_r, D\] with process_group, got shape \[5, 1, 3\]"):
        fk.linear_focal_loss(x, w.unsqueeze(1), target, process_group=alone)
    with pytest.raises(ValueError, match=r"target must be \[4, 5\], got \[4, 6\]"):
        fk.linear_focal_loss(x, w, torch.zeros(4, 6), process_group=alone)
    with pytest.raises(NotImplementedError, match=r"torch.func does not transform"):
        torch.func.grad(lambda x: fk.linear_focal_loss(x, w, target, process_group=alone))(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slope_of_a_slice_far_below_the_others(dtype):
    """The label has p = e^-d and u = 1, where the sums of exponentials overflow float32."""
    for distance in (0.7, 50.0, 70.0, 100.0, 900.0, math.inf):
        logits = torch.randn(20, 50, dtype=dtype)
        label = torch.arange(20)
        top = logits.amax(1).double()
        log_sum = torch.full((20,), distance, dtype=torch.float64) + torch.logsumexp(logits.double() - top[:, None], 1)
        p = (logits.double() - (top + log_sum)[:, None]).exp()
        log_u = torch.log1p(-p[range(20), label])
        expected = 2 * p
        expected[range(20), label] = -2 * log_u.exp()
        found = slice_gradient(torch.full((20,), 2.0, dtype=torch.float64), logits, label, top, log_sum, log_u)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-11, atol=1e-30)
