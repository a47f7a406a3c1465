"""The calibration maps in compiled and exported graphs, under autocast, as operators, on CUDA."""

import functools
import math

import pytest
import torch
import torch._dynamo
from conftest import assert_close, no_waiting
from map_cases import leaf

import focalkern as fk
from focalkern import reference


# ---- compile, export, autocast --------------------------------------------------------------------------------------
@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


def test_compiles_as_one_graph_without_recompilation_when_numbers_change(device, dynamo):
    z = torch.randn(6, 5, device=device, requires_grad=True)

    def step(z, gamma, temperature):
        return fk.focal_calibration_map(z * 2, gamma, temperature, log=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    # torch treats every number as a constant until it sees a second value; that first change costs one compilation.
    compiled(z, 3.0, 2.0)
    compiled(z, 2.5, 1.5)
    with dynamo.config.patch(error_on_recompile=True):
        for gamma, temperature in ((2.0, 1.0), (0.5, 0.7), (0.0, 3.0), (-0.5, 0.25), (1.0, 1.25), (4.0, 5.0)):
            actual, expected = compiled(z, gamma, temperature), step(z, gamma, temperature)
            assert_close(actual, expected)
            upstream = torch.randn_like(actual)
            assert_close(torch.autograd.grad(actual, z, upstream)[0], torch.autograd.grad(expected, z, upstream)[0])


def test_every_form_of_the_arguments_compiles(device, dynamo):
    z = torch.randn(2, 3, 5, device=device, requires_grad=True)
    gamma = torch.rand(2, 3, device=device, requires_grad=True)
    temperature = torch.tensor(1.5, device=device, requires_grad=True)
    cases = [
        (fk.focal_calibration_map, (z, gamma, temperature), {}),
        (fk.focal_calibration_map, (z.softmax(-1).detach().requires_grad_(), 0.5), {"input_kind": "probs"}),
        (fk.binary_focal_calibration_map, (z, 1.0, temperature), {"log_odds": True}),
        (fk.binary_focal_calibration_map, (z, leaf(gamma[..., None])), {}),
    ]
    for function, arguments, options in cases:
        function = functools.partial(function, **options)
        compiled = torch.compile(lambda *a, function=function: function(*a), fullgraph=True, backend="aot_eager")
        inputs = [a for a in arguments if isinstance(a, torch.Tensor)]
        results = []
        for f in (compiled, function):
            out = f(*arguments)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected)


def test_values_outside_the_domain_give_nan_rows_in_compiled_tensors(device, dynamo):
    z = torch.randn(3, 4, device=device)
    gamma = torch.tensor([-1.0, 0.5, -2.0], device=device)
    temperature = torch.tensor([1.0, 1.0, 1.0], device=device)
    compiled = torch.compile(lambda z, g, t: fk.focal_calibration_map(z, g, t), fullgraph=True, backend="aot_eager")
    if device.type == "cuda":
        assert fk.focal_calibration_map(z, gamma, temperature).isnan().all(-1).tolist() == [True, False, True]
    good = compiled(z[1:2], gamma[1:2], temperature[1:2])
    assert_close(good, fk.focal_calibration_map(z[1:2], 0.5))


@pytest.mark.kernels
def test_exports(device):
    class Map(torch.nn.Module):
        def forward(self, z):
            return fk.focal_calibration_map(z, 1.5, 2.0, log=True)

    z = torch.randn(4, 5, device=device)
    exported = torch.export.export(Map(), (z,))
    assert any("focalkern" in str(node.target) for node in exported.graph.nodes)
    assert_close(exported.module()(z), fk.focal_calibration_map(z, 1.5, 2.0, log=True))


def test_autocast_gives_float32_as_softmax_does(device):
    z = torch.randn(6, 5, device=device).bfloat16().requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        p = fk.focal_calibration_map(z, 1.0)
        assert p.dtype == torch.float32
        assert fk.binary_focal_calibration_map(z, 1.0).dtype == torch.float32
        assert fk.focal_calibration_map(z.double(), 1.0).dtype == torch.float64
    assert_close(p, reference.focal_calibration_map(z.double(), 1.0))
    (grad,) = torch.autograd.grad(p.square().sum(), z)
    assert grad.dtype == torch.bfloat16


def test_meta_tensors_give_shapes():
    z = torch.empty(4, 5, device="meta", requires_grad=True)
    out = fk.focal_calibration_map(z, 1.0)
    assert out.shape == z.shape
    assert out.device.type == "meta"
    assert torch.autograd.grad(out.sum(), z)[0].shape == z.shape
    assert fk.binary_focal_calibration_map(z, 1.0).shape == z.shape


@pytest.mark.kernels
def test_opcheck(device):
    z = torch.randn(3, 2, 5, device=device, requires_grad=True)
    gamma = torch.rand(3, 2, device=device, requires_grad=True)
    temperature = torch.tensor(1.5, device=device, requires_grad=True)
    number = torch.tensor(0.5, dtype=torch.float64)
    p = leaf(z.softmax(-1))
    # Each kind of input (0 logits, 1 probabilities, 2 binary), log output or not, and non-contiguous strides.
    for arguments in (
        (z, gamma, temperature, 0, False, False, True),
        (p, number, temperature, 1, True, False, True),
        (z, number, number, 2, False, False, True),
        (leaf(z.bfloat16()), number, number, 0, True, True, False),
        (leaf(z.permute(2, 1, 0).contiguous().permute(2, 1, 0)), gamma, number, 0, False, False, True),
    ):
        torch.library.opcheck(torch.ops.focalkern.calibration_map_forward, arguments)
        with torch.no_grad():
            detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
            out = torch.ops.focalkern.calibration_map_forward(*detached)
            backward = (torch.randn_like(out), *detached[:5], [True, True, True])
            torch.library.opcheck(torch.ops.focalkern.calibration_map_backward, backward)


class Marked(torch.Tensor):
    """A subclass that only changes the type."""


def test_subclasses_and_parameters(device):
    z = torch.randn(4, 5, device=device)
    expected = fk.focal_calibration_map(z, 1.0)
    marked = fk.focal_calibration_map(z.as_subclass(Marked), 1.0)
    assert isinstance(marked, Marked)
    assert_close(marked.as_subclass(torch.Tensor), expected)
    assert_close(fk.focal_calibration_map(torch.nn.Parameter(z), 1.0), expected)


# Many short rows, and few long ones; both are divided into several units of work.
@pytest.mark.kernels
@pytest.mark.parametrize(("n", "n_classes"), [(20000, 10), (61, 4097)])
def test_the_same_bits_on_every_run_and_for_every_number_of_threads(device, n, n_classes):
    z = torch.randn(n, n_classes, device=device)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(1)
            x = leaf(z)
            gamma = torch.tensor(0.7, device=device, requires_grad=True)
            temperature = torch.tensor(1.5, device=device, requires_grad=True)
            out = fk.focal_calibration_map(x, gamma, temperature)
            upstream = torch.randn(n, n_classes).to(device)
            results.append((out, *torch.autograd.grad(out, (x, gamma, temperature), upstream)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert torch.equal(actual, expected)


# ---- CUDA only ------------------------------------------------------------------------------------------------------
def test_cuda_does_not_wait_for_the_device_and_can_be_captured(cuda):
    z = torch.randn(64, 10, device=cuda, requires_grad=True)
    gamma = torch.rand(64, device=cuda)
    fk.focal_calibration_map(z, gamma).sum().backward()
    with no_waiting():
        fk.focal_calibration_map(z, gamma, 1.5).sum().backward()
        fk.focal_calibration_map(z, 1.0, log=True).sum().backward()
        fk.binary_focal_calibration_map(z, 1.0).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fk.focal_calibration_map(z.detach(), gamma)
    with torch.no_grad():
        z.copy_(torch.randn_like(z))
    graph.replay()
    assert torch.equal(out, fk.focal_calibration_map(z.detach(), gamma))


def test_cuda_bad_rows_are_nan(cuda):
    z = torch.zeros(5, 3, device=cuda)
    z[1, 0], z[2, 1] = math.nan, math.inf
    z[3] = -math.inf
    out = fk.focal_calibration_map(z, 1.0)
    assert out.isnan().all(-1).tolist() == [False, True, True, True, False]
