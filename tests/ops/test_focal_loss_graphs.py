"""fk.focal_loss in compiled and exported graphs, under autocast, as an operator and with subclasses."""

import copy
import functools
import math
import re

import focal_cases
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import torch.utils.checkpoint
from conftest import assert_close
from focal_cases import TABLE, leaf, torch_jit_warns
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import focalkern as fk
from focalkern import reference
from focalkern.ops import _row_loss

dynamo = focal_cases.dynamo  # fixture


def test_compiles_as_one_graph_without_recompilation_when_gamma_changes(device, dynamo):
    z = torch.randn(6, 5, device=device, requires_grad=True)
    target = torch.randint(5, (6,), device=device)

    def step(z, target, gamma):
        return fk.focal_loss(z * 2, target, gamma)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    # torch treats every number as a constant until it sees a second value; that first change costs one compilation.
    compiled(z, target, 3.0)
    compiled(z, target, 2.5)
    with dynamo.config.patch(error_on_recompile=True):
        for gamma in (2.0, 0.5, 0.0, -1.5, 3.25, 1.0, 4.0, 5.0, 6.0, 7.0):
            loss, expected = compiled(z, target, gamma), step(z, target, gamma)
            assert_close(loss, expected)
            upstream = torch.randn((), device=device)
            grads = [torch.autograd.grad(v, z, upstream)[0] for v in (loss, expected)]
            assert_close(grads[0], grads[1])


def test_every_form_of_the_arguments_compiles(device, dynamo):
    z = torch.randn(6, 5, 3, device=device, requires_grad=True)
    target = torch.randint(5, (6, 3), device=device)
    soft = torch.rand(6, 5, 3, device=device)
    weight = torch.rand(5, device=device)
    cases = [
        (target, torch.rand(6, 1, device=device, requires_grad=True), {}),
        (target, TABLE.to(device), {"weight": weight, "reduction": "sum"}),
        (soft, 2.0, {"label_smoothing": 0.1, "reduction": "none"}),
        (target.int(), 1, {"detach_modulation": True, "ignore_index": 1}),
    ]
    for t, gamma, options in cases:
        function = functools.partial(fk.focal_loss, **options)
        compiled = torch.compile(
            lambda z, t, g, function=function: function(z, t, g), fullgraph=True, backend="aot_eager"
        )
        inputs = [z, gamma] if isinstance(gamma, torch.Tensor) else [z]
        results = []
        for f in (compiled, function):
            loss = f(z, t, gamma)
            results.append((loss, *torch.autograd.grad(loss.sum(), inputs)))
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected)


def test_compiles_with_dynamic_shapes(device, dynamo):
    compiled = torch.compile(fk.focal_loss, fullgraph=True, backend="aot_eager", dynamic=True)
    with dynamo.config.patch(error_on_recompile=True):
        for n in (4, 9, 17):
            z = torch.randn(n, 5, device=device, requires_grad=True)
            target = torch.randint(5, (n,), device=device)
            loss = compiled(z, target)
            assert_close(loss, fk.focal_loss(z, target))
            loss.backward()
            assert z.grad.isfinite().all()


@torch_jit_warns
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # advice, on every GPU that has them
def test_compiles_with_inductor(device, dynamo):
    # The default backend, once: it calls a C++ compiler, which takes seconds.
    z = torch.randn(6, 5, device=device, requires_grad=True)
    target = torch.randint(5, (6,), device=device)
    compiled = torch.compile(lambda z, t: fk.focal_loss(z, t, 1.5), fullgraph=True)
    grads = []
    for function in (compiled, lambda z, t: fk.focal_loss(z, t, 1.5)):
        loss = function(z, target)
        grads.append(torch.autograd.grad(loss, z)[0])
    assert_close(loss, compiled(z, target))
    assert_close(*grads)


@pytest.mark.kernels
@pytest.mark.parametrize("strict", [False, True])
def test_exports(device, dynamo, strict):
    class Loss(torch.nn.Module):
        def forward(self, z, target):
            return fk.focal_loss(z, target, 2.0, label_smoothing=0.1)

    z, target = torch.randn(4, 5, device=device, requires_grad=True), torch.tensor([0, 4, 1, 2], device=device)
    exported = torch.export.export(Loss(), (z, target), strict=strict)
    names = [str(node.target) for node in exported.graph.nodes if "focalkern" in str(node.target)]
    assert names == ["focalkern.focal_loss_forward.default"]  # the graph may go to another device
    assert_close(exported.module()(z, target), fk.focal_loss(z, target, 2.0, label_smoothing=0.1))


_EXPORTED = [
    {},
    {"z_loss": 1e-2},
    {"z_loss": 1.0, "label_smoothing": 0.1},
    {"return_stats": True},
    {"reduction": "none"},
]


@pytest.mark.parametrize("options", _EXPORTED, ids=repr)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch, in a strict export
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_exports_with_any_number_of_rows(device, dynamo, linear, strict, options):
    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(7, 5, device=device))

        def forward(self, x, target):
            if linear:
                return fk.linear_focal_loss(x, self.weight, target, **options)
            return fk.focal_loss(x @ self.weight.T, target, **options)

    def batch(n):
        return torch.randn(n, 5, device=device), torch.randint(7, (n,), device=device)

    n = torch.export.Dim("n", min=2, max=4096)
    loss, rows = Loss(), batch(300)
    exported = torch.export.export(loss, batch(6), dynamic_shapes=({0: n}, {0: n}), strict=strict).module()
    results = [x if isinstance(x, tuple) else (x,) for x in (exported(*rows), loss(*rows))]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    found, expected = (
        torch.autograd.grad(result[0].sum(), module.weight)[0]
        for result, module in zip(results, (exported, loss), strict=True)
    )
    torch.testing.assert_close(found, expected)


def test_autocast_takes_bfloat16_logits_as_they_are(device):
    z = torch.randn(64, 40, device=device).bfloat16().requires_grad_()
    target = torch.randint(40, (64,), device=device)
    for kind in (target, torch.rand(64, 40, device=device).bfloat16()):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = fk.focal_loss(z, kind, 1.5)
            assert loss.dtype == torch.float32
            unreduced = fk.focal_loss(z, kind, 1.5, reduction="none")
            assert unreduced.dtype == torch.float32
        expected = reference.focal_loss(leaf(z.double()), kind.double() if kind is not target else kind, 1.5)
        assert_close(loss, expected)
        (grad,) = torch.autograd.grad(loss, z)
        assert grad.dtype == torch.bfloat16
    # Outside autocast the loss has the dtype of the logits, as torch's.
    assert fk.focal_loss(z, target).dtype == torch.bfloat16
    # A loss computed in float64 stays there.
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert fk.focal_loss(z.double(), target).dtype == F.cross_entropy(z.double(), target).dtype


def _operators_of(function, *arguments, dynamic=None):
    """The results of the compiled function, and names of focalkern's operators in its graphs, forward and backward."""
    names = []

    def collect(graph, _inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if "focalkern" in str(node.target))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=collect, bw_compiler=collect)
    loss = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)(*arguments)
    return loss, names


_TOGETHER = ["focalkern.focal_loss_with_gradient.default"]
_APART = ["focalkern.focal_loss_forward.default", "focalkern.focal_loss_backward.default"]


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_operator_for_loss_and_gradient_of_a_small_batch(dynamo, dtype):
    z = torch.randn(6, 5, dtype=dtype, requires_grad=True)
    target, weight = torch.randint(5, (6,)), torch.rand(5)
    for t, gamma, options in (
        (target, 2.0, {}),
        (target, -1.5, {"weight": weight, "reduction": "sum"}),
        (torch.rand(6, 5).softmax(1).to(dtype), 0, {"label_smoothing": 0.1}),
        (target, 1.0, {"modulation": "confidence", "ignore_index": 1}),
    ):
        dynamo.reset()  # another gamma is no constant
        function = functools.partial(fk.focal_loss, target=t, gamma=gamma, **options)
        loss, names = _operators_of(lambda z, function=function: function(z), z)
        assert names == _TOGETHER
        expected = function(z)
        assert torch.equal(loss, expected)
        for upstream in (1.0, -3.0):
            given = torch.tensor(upstream, dtype=dtype)
            found, eager = (torch.autograd.grad(v, z, given, retain_graph=True)[0] for v in (loss, expected))
            assert_close(found, eager)


@pytest.mark.kernels
@pytest.mark.parametrize("upstream", [math.inf, math.nan, 0.0])
def test_ignored_rows_of_a_small_batch_have_no_gradient(dynamo, upstream):
    target = torch.tensor([0, -100, 2, -100])
    z = torch.randn(4, 3, requires_grad=True)
    broken = leaf(torch.where(target[:, None] == 2, math.nan, z.detach()))
    for logits in (z, broken):
        loss, names = _operators_of(lambda z: fk.focal_loss(z, target), logits)
        (found,) = torch.autograd.grad(loss, logits, torch.tensor(upstream))
        assert names == _TOGETHER
        (expected,) = torch.autograd.grad(fk.focal_loss(logits, target), logits, torch.tensor(upstream))
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert torch.equal(found[[1, 3]], torch.zeros(2, 3))


@pytest.mark.kernels
def test_two_operators_where_one_would_not_pay(dynamo, monkeypatch):
    z, target = torch.randn(6, 5, requires_grad=True), torch.randint(5, (6,))

    def names_of(z, gamma=2.0, dynamic=None, **options):
        dynamo.reset()
        loss, names = _operators_of(lambda z: fk.focal_loss(z, target, gamma, **options), z, dynamic=dynamic)
        loss.sum().backward()
        return names

    for gamma, expected in ((2.0, _TOGETHER), (3.0, _APART)):  # torch takes only the first number for a constant
        loss, names = _operators_of(lambda z, g=gamma: fk.focal_loss(z, target, g), z)
        loss.backward()
        assert names == expected
    assert names_of(leaf(z.bfloat16())) == _APART  # a gradient that is not yet scaled would lose digits
    assert names_of(z, reduction="none") == _APART
    assert names_of(z, gamma=torch.rand(6)) == names_of(z, gamma=TABLE) == _APART
    assert names_of(z, dynamic=True) == _APART
    assert _operators_of(lambda z: fk.focal_loss(z, target), z.detach())[1] == _APART[:1]  # no gradient is wanted
    monkeypatch.setattr(_row_loss, "_MOST_IN_ONE_CALL", 29)
    assert names_of(z) == _APART


@pytest.mark.parametrize("loss", [fk.focal_loss, fk.sigmoid_focal_loss])
def test_a_graph_checks_no_table_before_each_call(dynamo, loss):
    checked = []

    def keep(guards):
        checked.extend(guard.name for guard in guards)
        return [True] * len(guards)

    z, target = torch.randn(6, 5, requires_grad=True), torch.rand(6, 5)
    compiled = torch.compile(
        lambda: loss(z, target, reduction="mean"), backend="eager", options={"guard_filter_fn": keep}
    )
    assert_close(compiled(), loss(z, target, reduction="mean"))
    assert any("focalkern" in name for name in checked)
    assert not [name for name in checked if any(table in name for table in ("REDUCTIONS", "HALVES", "ROW_LOSSES"))]


def test_errors_of_a_compiled_loss(dynamo):
    z, target = torch.randn(6, 5), torch.randint(5, (6,))
    compiled = torch.compile(fk.focal_loss, backend="eager")
    with pytest.raises(ValueError, match=r"^focal_loss: reduction must be 'none', 'mean' or 'sum', got 'avg'$"):
        compiled(z, target, reduction="avg")
    with pytest.raises(TypeError, match=r"^focal_loss: gamma must be a number, a tensor or a GammaTable, got str$"):
        compiled(z.requires_grad_(), target, gamma="2")


# One shape for each remedy; gamma and weight have none.
MISFITS = {
    "squeezed": ((2, 3), torch.ones(2, 1).long(), {}),
    "classes last": ((2, 5, 4), torch.ones(2, 5).long(), {}),
    "one image": ((3, 4, 5), torch.ones(4, 5).long(), {}),
    "one-hot": ((7, 3), torch.ones(7, 3).long(), {}),
    "one logit": ((3,), torch.ones(3).long(), {}),
    "float labels": ((7, 3), torch.ones(7), {}),
    "gamma": ((7, 3), torch.ones(7).long(), {"gamma": torch.ones(3)}),
    "weight": ((7, 3), torch.ones(7).long(), {"weight": torch.ones(7)}),
}
LOSSES = {
    "focal_loss": fk.focal_loss,
    "modulation": functools.partial(fk.focal_loss, modulation="confidence"),
    "poly_focal_loss": fk.poly_focal_loss,
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_shape_error_of_a_graph_is_that_of_the_eager_loss(dynamo, loss, misfit):
    shape, target, options = MISFITS[misfit]
    with pytest.raises(ValueError, match=loss.replace("modulation", "focal_loss")) as eager:
        LOSSES[loss](torch.zeros(shape), target, **options)
    with pytest.raises(ValueError, match=f"^{re.escape(str(eager.value))}$"):
        torch.compile(LOSSES[loss], backend="eager")(torch.zeros(shape), target, **options)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_bool_target_of_a_graph_is_the_error_of_the_eager_loss(dynamo, loss):
    target = torch.ones(7, dtype=torch.bool)
    with pytest.raises(TypeError, match=loss.replace("modulation", "focal_loss")) as eager:
        LOSSES[loss](torch.zeros(7, 3), target)
    with pytest.raises(TypeError, match=f"^{re.escape(str(eager.value))}$"):
        torch.compile(LOSSES[loss], backend="eager")(torch.zeros(7, 3), target)


def test_a_shape_error_of_one_whole_graph_has_the_remedy(dynamo):
    compiled = torch.compile(fk.focal_loss, backend="eager", fullgraph=True, dynamic=True)
    for shape, target, remedy in (
        ((7, 3), torch.ones(7, 1).long(), "target.squeeze(-1)"),
        ((3,), torch.ones(3).long(), "use SigmoidFocalLoss"),
    ):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(remedy)):
            compiled(torch.zeros(shape), target)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_shape_error_of_a_subclass_is_that_of_the_eager_loss(loss):
    class Logits(torch.Tensor):
        pass

    with pytest.raises(ValueError, match=rf"^{loss.replace('modulation', 'focal_loss')}: .*; target.squeeze\(-1\)$"):
        LOSSES[loss](torch.zeros(7, 3).as_subclass(Logits), torch.ones(7, 1).long())


@pytest.mark.kernels
def test_the_operator_of_loss_and_gradient_is_differentiable(device):
    if device.type != "cpu":
        pytest.skip("CPU only")
    z = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    target, options = torch.randint(5, (6,)), (2.0, None, 1, -100, 0.0, False, 0, 0.0)
    operator = torch.ops.focalkern.focal_loss_with_gradient
    torch.library.opcheck(operator, (z, target, *options))
    assert torch.autograd.gradcheck(lambda z: operator(z, target, *options)[0], z)
    assert torch.autograd.gradgradcheck(lambda z: operator(z, target, *options)[0], z)
    with pytest.raises(ValueError, match="only input may require grad"):
        operator(z, leaf(z.softmax(1)), *options)


def test_meta_tensors_give_shapes():
    z = torch.empty(4, 5, 3, device="meta", requires_grad=True)
    target = torch.empty(4, 3, dtype=torch.int64, device="meta")
    assert fk.focal_loss(z, target).shape == ()
    loss = fk.focal_loss(z, target, reduction="none")
    assert loss.shape == (4, 3)
    assert loss.device.type == "meta"
    (grad,) = torch.autograd.grad(loss.sum(), z)
    assert grad.shape == z.shape


@pytest.mark.kernels
def test_opcheck(device):
    z = torch.randn(6, 5, 2, device=device, requires_grad=True)
    target = torch.randint(5, (6, 2), device=device)
    soft = torch.rand(6, 5, 2, device=device, requires_grad=True)
    gamma = torch.rand(6, 1, device=device, requires_grad=True)
    edges, gammas = TABLE.to(device).edges, TABLE.to(device).gammas
    weight = torch.rand(5, device=device)
    number = torch.tensor(2.0, dtype=torch.float64)
    # Each form of target and gamma, each reduction (0 none, 1 mean, 2 sum), and channels last.
    for arguments in (
        (z, target, number, None, None, 1, -100, 0.0, False, False),
        (z, target.int(), gamma, None, weight, 0, 2, 0.1, False, False),
        (z, soft, gamma, None, None, 2, -100, 0.0, True, False),
        (leaf(z.bfloat16()), target, gammas, edges, None, 0, -100, 0.0, False, True),
        (leaf(z.transpose(1, 2).contiguous().transpose(1, 2)), target, number, None, None, 0, -100, 0.0, False, False),
    ):
        torch.library.opcheck(torch.ops.focalkern.focal_loss_forward, arguments)
        z_, t_, *others = arguments
        with torch.no_grad():
            loss, saved = torch.ops.focalkern.focal_loss_forward(*arguments)
            z_, t_, *others = (a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
            gamma_, edges_, weight_, *rest = others
            needed = [True, t_.is_floating_point(), edges_ is None]
            backward = (torch.randn_like(loss), z_, t_, gamma_, edges_, weight_, saved, *rest[:4], needed)
            torch.library.opcheck(torch.ops.focalkern.focal_loss_backward, backward)


class Marked(torch.Tensor):
    """A subclass that only changes the type."""


def test_subclasses_and_copies(device):
    z = torch.randn(4, 5, device=device)
    target = torch.tensor([0, 1, 2, 3], device=device)
    expected = fk.focal_loss(z, target)
    marked = fk.focal_loss(z.as_subclass(Marked), target)
    assert isinstance(marked, Marked)
    assert_close(marked.as_subclass(torch.Tensor), expected)
    again = copy.deepcopy(leaf(z))
    assert_close(fk.focal_loss(again, target), expected)
