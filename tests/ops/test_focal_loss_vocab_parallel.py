"""Losses over a vocabulary that is split over ranks: gloo processes compared with one process with all classes."""

import datetime
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from conftest import assert_close
from torch import nn
from vocab_cases import CASES, SLICES, STATISTICS, C, D, N, of_logits, problem, slices, with_head

import focalkern as fk

# Not a measurement: a limit far above the time of these tests on a busy machine.
TIMEOUT = datetime.timedelta(minutes=15)
SHORT = datetime.timedelta(seconds=1)  # of a group, one of whose ranks never answers

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
    pytest.mark.usefixtures("one_thread"),
]


def statistics(name, world, rank=None, group=None):
    """The statistics of the rows, from the head and from its logits."""
    x, w, b, target, options = problem(name, world)
    part = slice(None)
    if rank is not None:
        begin = sum(slices(world)[:rank])
        part = slice(begin, begin + slices(world)[rank])
    options = {"return_stats": True, **options}
    of_head = fk.linear_focal_loss(x, w[part], target, linear_bias=b[part], process_group=group, **options).stats
    options.pop("softcap", None)
    z = F.linear(x, w, b)
    if rank is None:
        rows = fk.focal_loss(z.flatten(0, 1), target.flatten(), **options).stats
        return [*of_head, *(values.reshape(target.shape) for values in rows)]
    return [*of_head, *fk.focal_loss_vocab_parallel(z[..., part], target, **options).stats]


def error_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_checks(rank, world, group):
    """Checks other than the comparisons of cases: name -> a value to save."""
    x, w, _, target, _ = problem("mean", world)
    begin = sum(slices(world)[:rank])
    part = w[begin : begin + slices(world)[rank]]
    out = {}
    # A gradient of the input that the caller reduces.
    leaf = x.clone().requires_grad_()
    loss = fk.linear_focal_loss(leaf, part, target, process_group=group, reduce_input_grad=False)
    (mine,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    dist.all_reduce(mine)
    out["left to the caller"] = mine
    out["again"] = torch.autograd.grad(loss, leaf)[0]
    dist.all_reduce(out["again"])
    # Every rank raises the same error, so that no rank waits for the others.
    few = torch.zeros(4, 2) if rank else torch.zeros(3, 2)
    zeros = torch.zeros(len(few), dtype=torch.long)
    out["rows differ"] = error_of(lambda: fk.focal_loss_vocab_parallel(few, zeros, process_group=group))
    wrong = torch.full((4,), 2 * world)
    out["label"] = error_of(lambda: fk.focal_loss_vocab_parallel(torch.zeros(4, 2), wrong, process_group=group))
    z = torch.zeros(4, 2, requires_grad=True)
    once = fk.focal_loss_vocab_parallel(z, torch.zeros(4, dtype=torch.long), process_group=group)
    out["twice"] = error_of(lambda: torch.autograd.grad(once, z, create_graph=True))
    # NaN in one rank's slice is NaN everywhere.
    bad = torch.zeros(2, 3)
    bad[0, 0] = torch.nan if rank == world - 1 else 0.0
    labels = torch.tensor([0, 3 * world - 3])
    out["nan"] = fk.focal_loss_vocab_parallel(bad, labels, process_group=group, reduction="none")
    return out


def with_dtensor(rank, world):
    """A head that torch splits over its classes; its logits stay a DTensor, as loss_parallel requires."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(5)
    head, x, target = (
        nn.Linear(D, C, dtype=torch.float64),
        torch.randn(N, D, dtype=torch.float64),
        torch.randint(C, (N,)),
    )
    out = {}
    whole = fk.focal_loss(head(x), target)
    whole.backward()
    out["expected"] = [whole.detach(), head.weight.grad.clone()]
    head.zero_grad()
    parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
    loss = fk.focal_loss_vocab_parallel(head(x), target)
    loss.backward()
    out["logits"] = [loss.detach(), head.weight.grad.full_tensor()]
    head.zero_grad()
    loss = fk.linear_focal_loss(
        x, head.weight, target, linear_bias=head.bias.to_local(), process_group=mesh.get_group()
    )
    loss.backward()
    out["weight"] = [loss.detach(), head.weight.grad.full_tensor()]
    replicated = DTensor.from_local(torch.zeros(N, C), mesh, [Replicate()])
    out["not split"] = error_of(lambda: fk.focal_loss_vocab_parallel(replicated, target))
    return out


def in_training(rank, world):
    """DistributedDataParallel and FSDP2 over a model whose loss is its last module: gradients of all ranks' rows."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.loss = nn.Linear(D, D, dtype=torch.float64), fk.LinearFocalLoss(D, C, dtype=torch.float64)

        def forward(self, x, target):
            return self.loss(self.body(x).tanh(), target)

    torch.manual_seed(5)
    model, x, target = Model(), torch.randn(12, D, dtype=torch.float64), torch.randint(C, (12,))
    model(x, target).backward()
    out = {"expected": [p.grad.clone() for p in model.parameters()]}
    state, rows = model.state_dict(), slice(rank, None, world)
    for name in ("ddp", "fsdp"):
        model = Model()
        model.load_state_dict(state)
        if name == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            fully_shard(model.loss)
            wrapped = fully_shard(model)
        wrapped(x[rows], target[rows]).backward()
        found = [p.grad for p in wrapped.parameters()]
        out[name] = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
    return out


def compiled(rank, world):
    """Graphs over ranks, by name: the loss and gradients of compiled and of plain calls."""
    out, begin = {}, sum(slices(world)[:rank])
    x, w, b, target, _ = problem("mean", world)
    z = F.linear(x, w, b)
    part = slice(begin, begin + slices(world)[rank])
    for name, wanted in (("labels", target), ("smoothing", target), ("probabilities", z.softmax(-1)[..., part])):
        options = {"label_smoothing": 0.1 * (name == "smoothing")}
        torch._dynamo.reset()

        def loss(z, options=options, wanted=wanted):
            return fk.focal_loss_vocab_parallel(z, wanted, 1.5, **options)

        results = []
        for function in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
            leaf = z[..., part].clone().requires_grad_()
            found = function(leaf)
            results.append([found.detach(), *torch.autograd.grad(found, leaf)])
        out[name] = results
    return out


def process(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=TIMEOUT)
    out = {}
    for name in CASES:
        out["head", name] = with_head(name, world, rank, dist.group.WORLD)
        out["logits", name] = of_logits(name, world, rank, None)
    for name in STATISTICS:
        out["statistics", name] = statistics(name, world, rank, dist.group.WORLD)
    out["other"] = other_checks(rank, world, dist.group.WORLD)
    if world == 2:
        out["dtensor"] = with_dtensor(rank, world)
        out["training"] = in_training(rank, world)
        out["compiled"] = compiled(rank, world)
    torch.save(out, f"{folder}/{rank}.pt")
    dist.barrier()  # no rank leaves while another may still communicate with it
    dist.destroy_process_group()


def process_on_gpus(rank, world, folder):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=TIMEOUT)
    out = {}
    for name in CASES:
        out["head", name] = [t.cpu() for t in with_head(name, world, rank, dist.group.WORLD, "cuda")]
        out["logits", name] = [t.cpu() for t in of_logits(name, world, rank, None, "cuda")]
    torch.save(out, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def dying(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=TIMEOUT)
    z, target = torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    fk.focal_loss_vocab_parallel(z, target)
    while rank == 1:
        time.sleep(60)  # unreachable for the other rank until the test kills it
    # The timeout is set only now, because the rendezvous may take any time.
    dist.distributed_c10d._set_pg_timeout(SHORT, dist.group.WORLD)
    message = error_of(lambda: fk.focal_loss_vocab_parallel(z, target))
    torch.save(message, f"{folder}/part")
    Path(folder, "part").rename(f"{folder}/0.pt")


def start(function, arguments, world, wait_for):
    context = mp.spawn(function, args=arguments, nprocs=world, join=False)
    end = time.monotonic() + TIMEOUT.total_seconds()
    try:
        while not wait_for(context):
            assert time.monotonic() < end, "the processes wait for each other"
    finally:
        for child in context.processes:
            child.kill()


@pytest.fixture(scope="module", params=SLICES, ids=lambda world: f"{world} ranks")
def ranks(request, tmp_path_factory):
    """(number of ranks, results of each). All tests share one start, which takes longer than all of them."""
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    start(process, (world, str(folder)), world, lambda context: context.join(timeout=1))
    return world, [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def close(found, expected):
    """bfloat16 rounds logits, and partial sums of ranks before they are added."""
    assert found.dtype == expected.dtype
    if found.dtype == torch.bfloat16:
        scale = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03 * scale, equal_nan=True)
    else:
        assert_close(found, expected)


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_are_those_of_one_process(name, ranks):
    world, results = ranks
    expected = statistics(name, world)
    for result in results:
        for found, wanted in zip(result["statistics", name], expected, strict=True):
            assert found.dtype == wanted.dtype
            assert_close(found, wanted, torch.float32 if found.dtype == torch.float32 else torch.float64)


def check_head(name, world, results):
    expected, soft = with_head(name, world), "soft" in CASES[name]
    found = [result["head", name] for result in results]
    for of_rank in found:
        close(of_rank[0], expected[0])
        close(of_rank[1], expected[1])  # the gradient of the input is summed over all ranks
        for gradient, wanted in zip(of_rank[4 + soft :], expected[4 + soft :], strict=True):
            close(gradient, wanted)
    for place in (2, 3):
        close(torch.cat([of_rank[place] for of_rank in found]), expected[place])
    if soft:
        close(torch.cat([of_rank[4] for of_rank in found], -1), expected[4])


def check_logits(name, world, results):
    expected, soft = of_logits(name, world), "soft" in CASES[name]
    found = [result["logits", name] for result in results]
    for of_rank in found:
        close(of_rank[0], expected[0])
        for gradient, wanted in zip(of_rank[2 + soft :], expected[2 + soft :], strict=True):
            close(gradient, wanted)
    for place in (1, 2) if soft else (1,):
        close(torch.cat([of_rank[place] for of_rank in found], -1), expected[place])


def check_bits(results):
    first, *others = results
    for key in [key for key in first if key[0] in ("head", "logits")]:
        for other in others:
            assert torch.equal(first[key][0], other[key][0]) or bool(first[key][0].isnan())


@pytest.mark.parametrize("name", CASES)
def test_a_split_head_is_the_whole_head(name, ranks):
    check_head(name, *ranks)


@pytest.mark.parametrize("name", CASES)
def test_split_logits_are_all_logits(name, ranks):
    check_logits(name, *ranks)


def test_every_rank_has_the_same_bits(ranks):
    check_bits(ranks[1])


@pytest.mark.skipif(not (torch.cuda.is_available() and dist.is_nccl_available()), reason="no GPU, or no NCCL")
def test_over_nccl(tmp_path):
    world = min(torch.cuda.device_count(), 3)
    start(process_on_gpus, (world, str(tmp_path)), world, lambda context: context.join(timeout=1))
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    for name in CASES:
        check_head(name, world, results)
        check_logits(name, world, results)
    check_bits(results)


def test_the_gradient_of_the_input_may_be_left_to_the_caller(ranks):
    world, results = ranks
    x, w, _, target, _ = problem("mean", world)
    leaf = x.requires_grad_()
    (expected,) = torch.autograd.grad(fk.linear_focal_loss(leaf, w, target), leaf)
    for result in results:
        assert_close(result["other"]["left to the caller"], expected)
        assert_close(result["other"]["again"], expected)


def test_errors_are_those_of_every_rank(ranks):
    world, results = ranks
    for result in results:
        other = result["other"]
        assert other["rows differ"].startswith(
            "ValueError: focal_loss_vocab_parallel: every rank must have the same rows"
        )
        assert other["label"] == (
            f"IndexError: focal_loss_vocab_parallel: target must be in [0, {2 * world}) or ignore_index, "
            f"got {2 * world} at row 0"
        )
        assert "differentiable once" in other["twice"]
        assert other["nan"].isnan().tolist() == [True, False]


def test_dtensors(ranks):
    world, results = ranks
    if world != 2:
        pytest.skip("once is enough")
    for result in results:
        found = result["dtensor"]
        for name in ("logits", "weight"):
            for value, expected in zip(found[name], found["expected"], strict=True):
                assert_close(value, expected)
        assert "must be split over their last dimension, Shard(1)" in found["not split"]


def test_data_parallel_and_fully_sharded_training(ranks):
    world, results = ranks
    if world != 2:
        pytest.skip("once is enough")
    for result in results:
        found = result["training"]
        for name in ("ddp", "fsdp"):
            for gradient, expected in zip(found[name], found["expected"], strict=True):
                assert_close(gradient, expected)


def test_compiled_graphs_reduce_over_ranks(ranks):
    world, results = ranks
    if world != 2:
        pytest.skip("once is enough")
    for result in results:
        for found, expected in result["compiled"].values():
            for value, wanted in zip(found, expected, strict=True):
                assert_close(value, wanted)


def test_a_rank_that_does_not_answer_is_an_error_after_the_timeout(tmp_path):
    def is_told(context):
        time.sleep(0.2)
        return (tmp_path / "0.pt").exists()

    start(dying, (str(tmp_path),), 2, is_told)  # the other rank stays alive, so only the timeout ends the wait
    assert torch.load(tmp_path / "0.pt").startswith("RuntimeError")
