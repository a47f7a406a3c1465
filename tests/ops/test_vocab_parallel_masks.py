"""Losses over a split vocabulary with impossible classes: 2,400 random rows over 1 to 4 ranks."""

import pytest
import torch
import torch.distributed as dist
from conftest import assert_close
from test_focal_loss_vocab_parallel import TIMEOUT, start

import focalkern as fk

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"),
    pytest.mark.usefixtures("one_thread"),
]

MOST_RANKS, CALLS, N, D = 4, 300, 8, 3
GAMMAS = (2.0, 0.0, 0.5, -1.5, 5.0)


def problem(call):
    """Sizes of the slices, and logits or a head with masked classes: padding, whole slices, single entries."""
    random = torch.Generator().manual_seed(call)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=random))

    world = 1 + call % MOST_RANKS
    sizes = [number(0, 6) for _ in range(world)]
    sizes[number(0, world)] += 1
    dtype = torch.float64 if call % 3 else torch.float32
    head = call % 5 == 0
    x, w = torch.randn(N, D, generator=random), torch.randn(sum(sizes), D, generator=random)
    mask = torch.zeros(N, sum(sizes), dtype=torch.bool)
    for row in range(N):
        kind = number(0, 4)
        if kind == 0:  # the slice of one rank
            rank = number(0, world)
            mask[row, sum(sizes[:rank]) : sum(sizes[: rank + 1])] = True
        elif kind == 1:  # padding at the end
            mask[row, number(0, sum(sizes)) + 1 :] = True
        elif kind == 2:
            mask[row] = torch.rand(sum(sizes), generator=random) < 0.6
    if head:
        mask[:] = mask[0]
    target = torch.randint(sum(sizes), (N,), generator=random)
    for row in range(N):
        allowed = (~mask[row]).nonzero().reshape(-1)
        if len(allowed):
            target[row] = allowed[number(0, len(allowed))]
        else:
            target[row] = -100
    target[number(0, N)] = -100
    bias = torch.where(mask[0], -torch.inf, torch.zeros(sum(sizes))).to(dtype)
    # For equal logits the loss does not depend on their value.
    scale = (1.0, 1.0, 50.0, 0.0)[number(0, 4)]
    shift = (0.0, 0.0, 1e20, -1e20)[number(0, 4)] if scale == 0 else 0.0
    logits = (scale * (x @ w.T) + shift).masked_fill(mask, -torch.inf).to(dtype)
    leaves = ((scale * x).to(dtype), w.to(dtype), bias) if head else (logits,)
    return sizes, head, leaves, target, GAMMAS[number(0, len(GAMMAS))]


def results(call, group=None, rank=None):
    """The losses and the gradients of the logits, or of input and head."""
    sizes, head, leaves, target, gamma = problem(call)
    if rank is not None:
        here = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        leaves = (leaves[0], leaves[1][here], leaves[2][here]) if head else (leaves[0][:, here],)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    options = {"reduction": "none"}
    if rank is not None:
        options["process_group"] = group
    if head:
        loss = fk.linear_focal_loss(leaves[0], leaves[1], target, gamma, linear_bias=leaves[2], **options)
    else:
        function = fk.focal_loss if rank is None else fk.focal_loss_vocab_parallel
        loss = function(leaves[0], target, gamma, **options)
    upstream = torch.linspace(1, 2, N).to(loss)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


def process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=MOST_RANKS, timeout=TIMEOUT
    )
    groups = [dist.new_group(list(range(world + 1))) for world in range(MOST_RANKS)]
    found = {}
    for call in range(CALLS):
        world = 1 + call % MOST_RANKS
        if rank < world:
            found[call] = results(call, groups[world - 1], rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    start(process, (str(folder),), MOST_RANKS, lambda context: context.join(timeout=1))
    return [torch.load(folder / f"{rank}.pt") for rank in range(MOST_RANKS)]


def test_masked_classes_over_ranks(ranks):
    for call in range(CALLS):
        sizes, head, *_ = problem(call)
        expected = results(call)
        found = [ranks[rank][call] for rank in range(len(sizes))]
        for result in found:
            assert_close(result[0], expected[0])
        if head:
            assert_close(found[0][1], expected[1])
        for i in range(2 if head else 1, len(expected)):
            assert_close(torch.cat([result[i] for result in found], dim=0 if head else 1), expected[i])
