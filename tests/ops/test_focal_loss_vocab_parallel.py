"""Losses over a vocabulary that is split over ranks: gloo processes against one process with all classes."""

import datetime
import math
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from conftest import assert_close
from torch import nn

import focalkern as fk
from focalkern.ops._row_kernels import slice_gradient

# No measurement: a limit far above the time of any of these tests on a busy machine.
TIMEOUT = datetime.timedelta(minutes=15)
SHORT = datetime.timedelta(seconds=1)  # of a group, one of whose ranks never answers

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
    pytest.mark.usefixtures("one_thread"),
]

N, D = 26, 6
# Number of ranks -> sizes of their slices. Slices differ in size; one rank has no target; one has no class.
SLICES = {2: (9, 4), 3: (5, 0, 8)}
C = 13
NOT_TARGETS = {2: range(9), 3: range(5)}

TABLE = fk.GammaTable([0, 0.1, 0.4, 1], [2.0, -1.0, 0.5])
CASES = {
    "mean": {},
    "sum, cross-entropy": {"gamma": 0.0, "reduction": "sum"},
    "none, inverse": {"gamma": -1.5, "reduction": "none"},
    "table": {"gamma": TABLE},
    "class weights, detached": {"weight": torch.linspace(0, 2, C).double(), "detach_modulation": True},
    "other index ignored": {"ignore_index": 3},
    "capped": {"softcap": 1.5},
    "capped, none": {"softcap": 1.5, "reduction": "none"},
    "gamma per row": {"gamma": "rows", "reduction": "none"},
    "gamma, one tensor": {"gamma": "one"},
    "far apart": {"scale": 300.0},
    "a rank without a target": {"targets": True},
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "all ignored": {"ignored": True},
    "chunks": {"chunk_rows": 4},
    "DFT": {"gamma": 1.0, "modulation": "confidence", "detach_modulation": True},
    "weight p^gamma, none": {"gamma": "one", "modulation": "confidence", "reduction": "none"},
    "smoothing": {"label_smoothing": 0.1, "weight": torch.linspace(0, 2, C).double()},
    "smoothing, capped, none": {"label_smoothing": 0.3, "softcap": 1.5, "gamma": "rows", "reduction": "none"},
    "smoothing, float32, chunks": {"label_smoothing": 0.1, "dtype": torch.float32, "chunk_rows": 4},
    "smoothing, far apart": {"label_smoothing": 0.1, "scale": 300.0, "gamma": -1.0},
    "smoothing, table, sum": {"label_smoothing": 0.1, "gamma": TABLE, "reduction": "sum"},
    "probabilities": {"soft": True, "gamma": "one", "weight": torch.linspace(0, 2, C).double()},
    "probabilities, none": {"soft": True, "reduction": "none", "label_smoothing": 0.1, "softcap": 1.5},
    "probabilities, bfloat16": {"soft": True, "dtype": torch.bfloat16, "reduction": "sum"},
    "probabilities, DFT": {"soft": True, "gamma": 1.0, "modulation": "confidence", "detach_modulation": True},
    "weight p^gamma, far apart": {"gamma": 0.5, "modulation": "confidence", "scale": 300.0},
    "z-loss": {"z_loss": 0.1, "gamma": "one", "weight": torch.linspace(0, 2, C).double()},
    "z-loss, none, capped": {"z_loss": 0.3, "reduction": "none", "softcap": 1.5, "chunk_rows": 4},
    "z-loss, far apart": {"z_loss": 0.1, "scale": 300.0, "reduction": "sum"},
    "z-loss, all ignored": {"z_loss": 0.1, "ignored": True},
    "z-loss, bfloat16": {"z_loss": 0.1, "dtype": torch.bfloat16},
    "z-loss, smoothing": {"z_loss": 0.1, "label_smoothing": 0.1, "weight": torch.linspace(0, 2, C).double()},
    "z-loss, probabilities": {"z_loss": 0.1, "soft": True, "reduction": "none"},
}
STATISTICS = ("mean", "other index ignored", "far apart", "float32", "all ignored", "smoothing", "capped, none")


def slices(world):
    return SLICES.get(world, (C,))


def problem(name, world, device="cpu"):
    torch.manual_seed(5)
    options = dict(CASES[name])
    dtype = options.pop("dtype", torch.float64)
    x, w, b = (torch.randn(*size, dtype=torch.float64) for size in ((2, N // 2, D), (C, D), (C,)))
    x = x * options.pop("scale", 1.0)
    target = torch.randint(C, (2, N // 2))
    if options.pop("targets", False):
        target = torch.randint(len(NOT_TARGETS.get(world, ())), C, (2, N // 2))
    target[0, ::4] = options.get("ignore_index", -100)
    if options.pop("ignored", False):
        target[:] = -100
    if options.pop("soft", False):
        target = torch.softmax(3 * torch.randn(2, N // 2, C, dtype=torch.float64), -1).to(dtype)
        target[0, 0] = F.one_hot(torch.tensor(C - 1), C)
    gamma = options.get("gamma")
    if gamma == "rows":
        options["gamma"] = torch.linspace(-1, 3, N // 2, dtype=torch.float64, device=device).requires_grad_()
    if gamma == "one":
        options["gamma"] = torch.tensor(1.5, dtype=torch.float64, device=device, requires_grad=True)
    if "weight" in options:
        options["weight"] = options["weight"].to(device)
    return *(t.to(device, dtype) for t in (x, w, b)), target.to(device), options


def upstream_of(loss):
    return torch.linspace(1, 2, loss.numel(), dtype=torch.float64).reshape(loss.shape).to(loss)


def gradients(loss, leaves):
    return torch.autograd.grad(loss, leaves, upstream_of(loss))


def with_head(name, world, rank=None, group=None, device="cpu", **more):
    """Loss and gradients of input, weight, bias (slices, with a rank) and gamma."""
    x, w, b, target, options = problem(name, world, device)
    if rank is not None:
        begin = sum(slices(world)[:rank])
        part = slice(begin, begin + slices(world)[rank])
        w, b = w[part].clone(), b[part].clone()
        more["process_group"] = group
        target = target[..., part].clone() if target.is_floating_point() else target
    leaves = [t.requires_grad_() for t in (x, w, b)]
    leaves += [target.requires_grad_()] if target.is_floating_point() else []
    if isinstance(options.get("gamma"), torch.Tensor):
        leaves.append(options["gamma"])
    loss = fk.linear_focal_loss(x, w, target, linear_bias=b, **{**options, **more})
    return [loss.detach(), *gradients(loss, leaves)]


def of_logits(name, world, rank=None, group=None, device="cpu"):
    """Loss and gradients of the logits (a slice, with a rank) and gamma."""
    x, w, b, target, options = problem(name, world, device)
    options.pop("softcap", None)
    options.pop("chunk_rows", None)
    z = F.linear(x, w, b)
    gamma = options.pop("gamma", 2.0)
    begin = sum(slices(world)[: rank or 0])
    part = slice(None) if rank is None else slice(begin, begin + slices(world)[rank])
    if target.is_floating_point():
        target = target[..., part].clone().requires_grad_()
    leaves = [t for t in (target, gamma) if isinstance(t, torch.Tensor) and t.requires_grad]
    if rank is None:
        z = z.requires_grad_()
        flat = gamma.expand(z.shape[:-1]).reshape(-1) if isinstance(gamma, torch.Tensor) else gamma
        rows = target.flatten(0, 1) if target.is_floating_point() else target.flatten()
        loss = fk.focal_loss(z.flatten(0, 1), rows, flat, **options)
        loss = loss.reshape(z.shape[:-1]) if options.get("reduction") == "none" else loss
    else:
        z = z[..., part].clone().requires_grad_()
        loss = fk.focal_loss_vocab_parallel(z, target, gamma, process_group=group, **options)
    return [loss.detach(), *gradients(loss, [z, *leaves])]


def statistics(name, world, rank=None, group=None):
    """The statistics of the rows, by the head and by its logits."""
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
    # A gradient of the input that is left to the caller.
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
    """A head that torch splits over its classes, whose logits stay a DTensor, as loss_parallel wants them."""
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
    torch.save(out, f"{folder}/{rank}.pt")
    dist.barrier()  # none leaves while another may still speak to it
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
        time.sleep(60)  # unreachable for the other rank, until the test kills it
    # Set the timeout only now, because the rendezvous may take any time.
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
    """(number of ranks, what each of them got): one start for all tests, because it takes longer than all of them."""
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    start(process, (world, str(folder)), world, lambda context: context.join(timeout=1))
    return world, [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def close(found, expected):
    """bfloat16 rounds logits, and the parts of sums over ranks, before they are added."""
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
        close(of_rank[1], expected[1])  # the input's gradient is that of all ranks
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


def test_a_rank_that_does_not_answer_is_an_error_after_the_timeout(tmp_path):
    def is_told(context):
        time.sleep(0.2)
        return (tmp_path / "0.pt").exists()

    start(dying, (str(tmp_path),), 2, is_told)  # the other rank lives on: only the group's timeout can end the wait
    assert torch.load(tmp_path / "0.pt").startswith("RuntimeError")


# ---- one process -----------------------------------------------------------------------------------------------------


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


COMPILED = {
    "number": {"gamma": 2.0},
    "tensor": {"gamma": torch.tensor(1.5)},
    "table": {"gamma": TABLE},
    "weights": {"weight": torch.linspace(0, 2, 40), "reduction": "none"},
    "confidence": {"gamma": 1.0, "modulation": "confidence", "reduction": "sum"},
}


# Dynamo reads .grad of the inputs and outputs of the graphs.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_into_one_graph(alone, name):
    options = COMPILED[name]
    z, target = torch.randn(7, 40, requires_grad=True), torch.randint(40, (7,))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda z: fk.focal_loss_vocab_parallel(z * 2, target, **options) + 1, fullgraph=True, backend="aot_eager"
    )
    found, expected = compiled(z), fk.focal_loss(z * 2, target, **options) + 1
    assert_close(found, expected)
    assert_close(gradients(found, [z])[0], gradients(expected, [z])[0])


HEADS = {
    **COMPILED,
    "number, none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1, "weight": torch.linspace(0, 2, 40)},
    "probabilities": {"soft": True, "gamma": torch.tensor(1.5, requires_grad=True)},
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


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_graph_ends_at_smoothing(alone):
    z, target = torch.randn(7, 40, requires_grad=True), torch.randint(40, (7,))
    torch._dynamo.reset()
    options = {"label_smoothing": 0.1}
    compiled = torch.compile(lambda z: fk.focal_loss_vocab_parallel(z * 2, target, **options) + 1, backend="eager")
    found, expected = compiled(z), fk.focal_loss(z * 2, target, **options) + 1
    assert_close(found, expected)
    assert_close(gradients(found, [z])[0], gradients(expected, [z])[0])


def test_what_does_not_go_with_ranks(alone):
    x, w, target = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match="a K-dimensional head does not go with process_group"):
        fk.linear_focal_loss(x, w.unsqueeze(1), target, process_group=alone)
    with pytest.raises(ValueError, match=r"target must be \[4, 5\], got \[4, 6\]"):
        fk.linear_focal_loss(x, w, torch.zeros(4, 6), process_group=alone)
    with pytest.raises(NotImplementedError, match=r"torch.func does not transform"):
        torch.func.grad(lambda x: fk.linear_focal_loss(x, w, target, process_group=alone))(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slope_of_a_slice_far_below_the_others(dtype):
    """The label's p is e^-d, its u 1, for sums of exponentials that do not fit into a float32."""
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
