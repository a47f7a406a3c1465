"""Runs of fk.focal_loss: determinism, memory, and CUDA without synchronisation."""

import focal_cases
import pytest
import torch
import torch._dynamo
import torch.utils.checkpoint
from conftest import no_waiting
from focal_cases import TABLE, leaf

import focalkern as fk
from focalkern import reference

threads = focal_cases.threads  # fixture


# ---- determinism and memory -----------------------------------------------------------------------------------------
def results_for_bits(z, target, gamma, **options):
    z = leaf(z)
    gamma = leaf(gamma) if isinstance(gamma, torch.Tensor) else gamma
    loss = fk.focal_loss(z, target, gamma, **options)
    inputs = [z, gamma] if isinstance(gamma, torch.Tensor) else [z]
    return [loss, *torch.autograd.grad(loss.sum(), inputs)]


# Many short rows (classes of a model), and few long ones (a vocabulary); both are divided into several units of work.
@pytest.mark.parametrize(("n", "n_classes"), [(20000, 10), (61, 4097)])
def test_the_same_bits_on_every_run_and_for_every_number_of_threads(device, threads, n, n_classes):
    z = torch.randn(n, n_classes, device=device)
    target = torch.randint(n_classes, (n,), device=device)
    soft = torch.rand(n, n_classes, device=device)
    one_gamma = torch.tensor(0.7, device=device)
    cases = [(target, 2.0, {}), (target, one_gamma, {"reduction": "sum"}), (soft, 2.0, {"label_smoothing": 0.1})]
    for t, gamma, options in cases:
        threads(1)
        expected = results_for_bits(z, t, gamma, **options)
        for count in (1, 2, 3):
            threads(count)
            for actual, bits in zip(results_for_bits(z, t, gamma, **options), expected, strict=True):
                assert torch.equal(actual, bits)


def test_reduced_sums_of_many_rows_are_exact_enough(device):
    # A float32 running sum over 200000 rows would be off by more than the tolerance.
    z = torch.randn(200_000, 4, device=device)
    target = torch.randint(4, (200_000,), device=device)
    for reduction in ("mean", "sum"):
        expected = reference.focal_loss(z.double(), target, 0.5, reduction=reduction)
        actual = fk.focal_loss(z, target, 0.5, reduction=reduction)
        assert abs(actual.item() - expected.item()) <= 2.0**-23 * expected.item()


def allocated_bytes(function):
    """The memory that the operators of a call allocate on the CPU, including freed memory."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        function()
    allocations = [e.self_cpu_memory_usage for e in profile.events() if e.name.startswith(("aten::", "focalkern::"))]
    assert sum(allocations) > 0
    return sum(a for a in allocations if a > 0)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(256, 500),
        lambda: torch.randn(256, 500).bfloat16(),
        lambda: torch.randn(8, 100, 16, 10),
        lambda: torch.randn(8, 100, 16, 10).contiguous(memory_format=torch.channels_last),
    ],
    ids=["rows", "bfloat16", "channels first", "channels last"],
)
def test_no_temporary_of_the_size_of_the_logits(make):
    z = leaf(make())
    rows = z.numel() // z.shape[1]
    target = torch.randint(z.shape[1], z.shape[:1] + z.shape[2:])
    for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1}):
        kept = []
        forward = allocated_bytes(lambda options=options, kept=kept: kept.append(fk.focal_loss(z, target, **options)))
        # Three float32 numbers per row, the unreduced loss in float32 and in the dtype of the logits, and a small
        # remainder.
        assert forward <= rows * 5 * 4 + 4096
        upstream = torch.ones_like(kept[0])
        backward = allocated_bytes(lambda kept=kept, upstream=upstream: torch.autograd.grad(kept[0], z, upstream))
        # The gradient, and an upstream gradient per row in float32.
        gradient = z.numel() * z.element_size()
        assert gradient <= backward <= gradient + rows * 5 * 4 + 4096


# ---- CUDA only ------------------------------------------------------------------------------------------------------
def test_cuda_step_does_not_wait_for_the_device(cuda):
    z = torch.randn(64, 10, device=cuda, requires_grad=True)
    target = torch.randint(10, (64,), device=cuda)
    gamma = torch.rand(64, device=cuda)
    table = TABLE.to(cuda)
    fk.focal_loss(z, target).backward()
    with no_waiting():
        for g in (2.0, gamma, table):
            for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}):
                fk.focal_loss(z, target, g, **options).sum().backward()


def test_cuda_graph_capture(cuda):
    z = torch.randn(64, 10, device=cuda, requires_grad=True)
    target = torch.randint(10, (64,), device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm = z.detach().requires_grad_()
        torch.autograd.grad(fk.focal_loss(warm, target), warm)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = fk.focal_loss(z, target)
        (grad,) = torch.autograd.grad(loss, z)
    with torch.no_grad():
        z.copy_(torch.randn_like(z))
    graph.replay()
    twin = z.detach().requires_grad_()
    expected = fk.focal_loss(twin, target)
    assert torch.equal(loss, expected)
    assert torch.equal(grad, torch.autograd.grad(expected, twin)[0])


def test_cuda_labels_out_of_range_give_nan_rows(cuda):
    z = torch.randn(4, 5, device=cuda, requires_grad=True)
    target = torch.tensor([0, 5, -1, 2**40], device=cuda)
    loss = fk.focal_loss(z, target, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, True]
    (grad,) = torch.autograd.grad(loss.nan_to_num().sum(), z, retain_graph=True)
    (grad,) = torch.autograd.grad(loss.sum(), z)
    assert grad.isnan().all(1).tolist() == [False, True, True, True]
    assert fk.focal_loss(z, target).isnan()
