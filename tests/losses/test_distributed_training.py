"""Training in two gloo processes under DistributedDataParallel, compared with one process and the whole batch."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import assert_close
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import focalkern as fk

RANKS = 2
TIMEOUT = datetime.timedelta(seconds=90)  # reached only by a process that waits for another one

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo processes"
)


def problem():
    """The network, the training samples and the validation samples, equal in every process."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x = torch.randn(96, 6, dtype=torch.float64)
    y = (x @ torch.randn(6, 4, dtype=torch.float64)).argmax(1)
    return model, (x[:32], y[:32]), (x[32:], y[32:])


def share(values, rank):
    """Every second sample. The two processes together have the batches of one process."""
    return values if rank is None else values[rank::RANKS]


def train(model, criterion, rank, ignored=(), by_count=False):
    """Three epochs of two batches, with an update of the schedule after each; returns the results.

    With rank None one process has whole batches; otherwise each process has its share of every batch. A summed loss is
    divided by the count of all ranks and multiplied by RANKS, because DistributedDataParallel averages the ranks'
    gradients.
    """
    _, (x, y), (validation_x, validation_y) = problem()
    y[list(ignored)] = -100
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, gradients = [], []
    for _ in range(3):
        for batch in torch.arange(32).split(16):
            rows = share(batch, rank)
            loss = criterion(model(x[rows]), y[rows])
            if by_count:
                count = (y[rows] != -100).sum()
                if rank is not None:
                    dist.all_reduce(count)
                loss = loss / count * (1 if rank is None else RANKS)
            loss.backward()
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(criterion, fk.AdaFocalLoss):
            for batch in torch.arange(len(validation_y)).split(16):
                rows = share(batch, rank)
                criterion.accumulate(model(validation_x[rows]), validation_y[rows])
            criterion.update()
    return {
        "losses": torch.stack(losses),
        "gradients": torch.stack(gradients),
        "parameters": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
        "gammas": getattr(criterion, "bin_gammas", torch.zeros(0)),
    }


IGNORED = (0, 2, 4, 6, 8, 16, 17, 18)  # five of the first batch, all on rank 0; three of the second
CASES = {
    "mean": (lambda: fk.FocalLoss(2.0), {}),
    "sum, by count": (lambda: fk.FocalLoss(2.0, reduction="sum"), {"ignored": IGNORED, "by_count": True}),
    "mean, with ignored labels": (lambda: fk.FocalLoss(2.0), {"ignored": IGNORED}),
    "AdaFocal": (lambda: fk.AdaFocalLoss(n_bins=4), {}),
}


def process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    results = {}
    for name, (criterion, options) in CASES.items():
        results[name] = train(DistributedDataParallel(problem()[0]), criterion(), rank, **options)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The final states of the two processes. All cases share one start, which takes longer than all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    context = mp.spawn(process, args=(str(folder),), nprocs=RANKS, join=False)
    end = time.monotonic() + TIMEOUT.total_seconds()
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, "the processes wait for each other"
    finally:
        for child in context.processes:
            child.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone():
    return {name: train(problem()[0], criterion(), None, **options) for name, (criterion, options) in CASES.items()}


@pytest.mark.parametrize("name", ["mean", "sum, by count", "AdaFocal"])
def test_two_processes_train_as_one(name, ranks, alone):
    for rank in ranks:
        for kind in ("gradients", "parameters", "gammas"):
            assert_close(rank[name][kind], alone[name][kind])
    # Each rank has part of the batch; the mean of the ranks' losses is the loss of the batch.
    assert_close(torch.stack([rank[name]["losses"] for rank in ranks]).mean(0), alone[name]["losses"])
    assert not torch.equal(ranks[0][name]["losses"], ranks[1][name]["losses"])


def test_adafocal_ends_with_the_same_bits_on_every_rank(ranks):
    gammas = [rank["AdaFocal"]["gammas"] for rank in ranks]
    assert torch.equal(*gammas)
    assert len(gammas[0].unique()) > 1  # it has adapted


def test_the_mean_of_the_ranks_means_is_another_loss_where_labels_are_ignored(ranks, alone):
    # The reason why the page on training loops divides a sum: with "mean", the same step gives rank 0's three labels
    # the weight of eight.
    name = "mean, with ignored labels"
    difference = ranks[0][name]["gradients"][0] - alone[name]["gradients"][0]
    assert difference.norm() > 0.1 * alone[name]["gradients"][0].norm()
