"""A rank of a split vocabulary is stopped (SIGSTOP): the others wait, or raise an error after the timeout."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import assert_close

import focalkern as fk

pytestmark = pytest.mark.skipif(
    not (hasattr(os, "fork") and dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)
CLASSES, STOPPED = 10, 1


def problem():
    random = torch.Generator().manual_seed(5)
    return torch.randn(6, CLASSES, generator=random), torch.randint(CLASSES, (6,), generator=random)


def rank_of(rank, folder, seconds):
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=seconds))
    logits, target = problem()
    half = logits.chunk(2, dim=1)[rank].clone().requires_grad_()
    if rank == STOPPED:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        loss = fk.focal_loss_vocab_parallel(half, target, 2.0, process_group=dist.group.WORLD)
        loss.backward()
        torch.save((loss.detach(), half.grad), f"{folder}/{rank}.pt")
    except RuntimeError as error:
        torch.save(str(error), f"{folder}/{rank}.pt")
    os._exit(0)  # a broken group is not destroyed


def start(folder, seconds):
    """The ranks, one of them stopped."""
    context = mp.spawn(rank_of, args=(str(folder), seconds), nprocs=2, join=False)
    _, status = os.waitpid(context.processes[STOPPED].pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    return context.processes


def test_a_rank_that_goes_on_gives_the_loss_of_all(tmp_path):
    processes = start(tmp_path, 300)
    os.kill(processes[STOPPED].pid, signal.SIGCONT)
    for process in processes:
        process.join()
    logits, target = problem()
    logits.requires_grad_()
    expected = fk.focal_loss(logits, target, 2.0)
    expected.backward()
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for loss, _ in results:
        assert_close(loss, expected.detach())
    assert_close(torch.cat([gradient for _, gradient in results], 1), logits.grad)


def test_a_rank_that_stays_stopped_is_an_error_after_the_timeout(tmp_path):
    processes = start(tmp_path, 2)
    try:
        processes[1 - STOPPED].join()
        assert "imed out" in torch.load(tmp_path / f"{1 - STOPPED}.pt")
    finally:
        processes[STOPPED].kill()
