"""AdaFocalLoss on several ranks."""

import datetime
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from adafocal_cases import NAN, extra_of, snapshot, validation
from conftest import assert_close

import focalkern as fk

# ---------------------------------------------------------------------------------------------------------------------
# Two processes. (Training in two processes is in test_distributed_training.py.)
# ---------------------------------------------------------------------------------------------------------------------
TIMEOUT = datetime.timedelta(seconds=90)


def shards(rank):
    """200 samples, in parts of 137 and 63."""
    torch.manual_seed(5)
    logits, target = validation()
    rows = slice(0, 137) if rank == 0 else slice(137, 200)
    return (logits, target) if rank is None else (logits[rows], target[rows])


def message_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=TIMEOUT)
    results = {}
    uneven = fk.AdaFocalLoss()
    uneven.accumulate(*shards(rank))
    uneven.update()
    results["uneven"] = uneven.state_dict()

    empty = fk.AdaFocalLoss()
    if rank == 1:
        empty.accumulate(*shards(None))
    empty.update()
    results["one rank empty"] = empty.state_dict()

    alone = fk.AdaFocalLoss()
    alone.update(*shards(rank), distributed=False)
    results["not distributed"] = alone.state_dict()

    # If one rank has an error, both raise and stay unchanged.
    before = snapshot(uneven)
    logits, target = shards(rank)
    logits[0] = NAN if rank == 1 else 0.0
    results["one rank fails"] = message_of(lambda: uneven.update(logits, target))
    results["nobody has samples"] = message_of(uneven.update)
    results["unchanged"] = snapshot(uneven) == before

    own = dist.new_group([0]), dist.new_group([1])
    grouped = fk.AdaFocalLoss()
    grouped.update(*shards(rank), group=own[rank])
    results["group"] = grouped.state_dict()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Both processes start once for all tests, because their start takes longer than the tests."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no gloo processes")
    folder = tmp_path_factory.mktemp("ranks")
    context = mp.spawn(process, args=(str(folder),), nprocs=2, join=False)
    end = time.monotonic() + TIMEOUT.total_seconds()
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, "the processes wait for each other"
    finally:
        for child in context.processes:
            child.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def assert_state(state, loss):
    for name in ("bin_edges", "bin_gammas"):
        assert_close(state[name], getattr(loss, name))
    assert len(extra_of(state)["history"]) == 1


@pytest.mark.parametrize("case", ["uneven", "one rank empty"])
def test_every_rank_ends_as_one_process_with_all_samples(ranks, case):
    one = fk.AdaFocalLoss()
    one.update(*shards(None))
    assert len(one.bin_gammas.unique()) > 5
    for rank in ranks:
        assert_state(rank[case], one)
        extra = extra_of(rank[case])
        assert extra["history"][0]["count"].sum() == 199  # all bins but the lowest
        assert len(extra["confidence"]) == 0
    assert torch.equal(ranks[0][case]["bin_gammas"], ranks[1][case]["bin_gammas"])
    assert torch.equal(ranks[0][case]["bin_edges"], ranks[1][case]["bin_edges"])


@pytest.mark.parametrize("case", ["not distributed", "group"])
def test_a_rank_can_stay_alone(ranks, case):
    for number, rank in enumerate(ranks):
        one = fk.AdaFocalLoss()
        one.update(*shards(number))
        assert_state(rank[case], one)


def test_an_error_on_one_rank_is_one_on_all(ranks):
    assert ranks[1]["one rank fails"].startswith("ValueError: AdaFocalLoss.update: logits must not be NaN")
    assert ranks[0]["one rank fails"].startswith("RuntimeError: AdaFocalLoss.update: rank 1 failed: AdaFocal")
    for rank in ranks:
        assert rank["nobody has samples"].startswith("ValueError: AdaFocalLoss.update: no validation sample")
        assert rank["unchanged"]


def test_a_distributed_checkpoint_has_the_whole_state(tmp_path):
    """The loader fills tensors of known size. History and accumulated samples have none: they go through a file."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    loss, again = fk.AdaFocalLoss(n_bins=3), fk.AdaFocalLoss(n_bins=3)
    logits, target = torch.randn(60, 5), torch.randint(5, (60,))
    loss.update(logits, target)
    loss.accumulate(logits, target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning about a checkpoint of one process
        dcp.save({"model": loss.state_dict()}, checkpoint_id=str(tmp_path / "checkpoint"))
        dcp_to_torch_save(str(tmp_path / "checkpoint"), str(tmp_path / "checkpoint.pt"))
    again.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"])
    assert torch.equal(again.bin_gammas, loss.bin_gammas)
    assert len(again.history) == 1
    assert again.n_accumulated == 60
