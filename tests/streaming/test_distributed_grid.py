"""The calibration grid over several processes: the sums of one process, and clear errors if a process is lost."""

import datetime
import json
import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

import focalkern as fk

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")

GAMMAS, TEMPERATURES = [-0.5, 0.0, 1.0], [0.5, 1.0, 2.0]
CRITERIA = ("ece", "mce", "nll", "brier")
PATIENCE = 60  # seconds a test waits for its processes


def rows():
    generator = torch.Generator().manual_seed(7)
    target = torch.randint(6, (1001,), generator=generator)
    logits = 2 * torch.randn(1001, 6, generator=generator)
    logits[torch.arange(1001), target] += 3
    return logits, target


def state_of(logits, target, **options):
    state = fk.CalibrationGridState(GAMMAS, TEMPERATURES, criteria=CRITERIA, **options)
    for batch in zip(logits.split(150), target.split(150), strict=True):
        state.update(*batch)
    return state


def process(rank, store, folder):
    """The work of each of two processes; it writes its result to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=PATIENCE)
    )
    found = {}
    logits, target = rows()
    part = slice(0, 333) if rank == 0 else slice(333, None)
    for estimator in ("equal_width", "equal_mass"):
        state = state_of(logits[part], target[part], estimator=estimator).all_reduce()
        torch.save(state.state_dict(), f"{folder}/{estimator}-{rank}.pt")

    # One of them has no samples.
    state = state_of(*(x[:0] if rank == 0 else x for x in (logits, target))).all_reduce()
    torch.save(state.state_dict(), f"{folder}/one-{rank}.pt")
    nothing = fk.CalibrationGridState(GAMMAS, TEMPERATURES).all_reduce()
    found["of nothing"] = nothing.n_samples

    for name, other in (
        ("bins", state_of(logits, target, n_bins=15 + rank)),
        ("classes", state_of(logits[:, : 6 - rank], target % (6 - rank))),
        ("exact", state_of(logits, target, exact=True)),
    ):
        before = other.n_samples
        try:
            other.all_reduce()
        except ValueError as error:
            found[name] = str(error)
        assert other.n_samples == before

    # The second process dies. The first one gets an error in time and keeps its sums.
    state = state_of(logits[part], target[part])
    sums = state.state_dict()["tensors"]["nll"].clone()
    if rank == 1:
        os._exit(3)
    start = time.monotonic()
    try:
        state.all_reduce(timeout=datetime.timedelta(seconds=20))
    except RuntimeError as error:
        found["death"] = str(error)
    found["seconds"] = time.monotonic() - start
    found["unchanged"] = bool((state.state_dict()["tensors"]["nll"] == sums).all()) and state.n_samples == 333
    with open(f"{folder}/found.json", "w") as stream:
        json.dump(found, stream)
    os._exit(0)  # not through a process group whose other rank is gone


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=process, args=(rank, str(folder / "store"), str(folder))) for rank in (0, 1)]
    for one in both:
        one.start()
    for one in both:
        one.join(PATIENCE)
    codes = [one.exitcode for one in both]
    for one in both:
        if one.is_alive():
            one.kill()
    assert codes == [0, 3]
    return folder


@pytest.mark.parametrize("name", ["equal_width", "equal_mass", "one"])
def test_two_processes_have_the_sums_of_one(folder, name):
    estimator = "equal_mass" if name == "one" else name
    whole = state_of(*rows(), estimator=estimator)
    loaded = [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert [part["n_samples"] for part in loaded] == [1001, 1001]
    for key, tensor in whole.state_dict()["tensors"].items():
        for part in loaded:
            found = part["tensors"][key]
            assert found.dtype == tensor.dtype
            if tensor.dtype == torch.int64:
                assert torch.equal(found, tensor)
            else:
                torch.testing.assert_close(found, tensor, rtol=1e-12, atol=0)
    reduced = fk.CalibrationGridState.from_state_dict(loaded[0])
    for criterion, table in whole.compute().tables.items():
        torch.testing.assert_close(reduced.compute().tables[criterion], table, rtol=1e-12, atol=1e-14)


def test_states_that_differ_are_refused_and_a_death_is_told(folder):
    found = json.loads((folder / "found.json").read_text())
    assert found["of nothing"] == 0
    for name in ("bins", "classes", "exact"):
        assert "every process must have a state for the same grid" in found[name]
    assert found["death"].startswith("CalibrationGridState.all_reduce: another process has died or did not answer")
    assert found["seconds"] < 30
    assert found["unchanged"]


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"all_reduce: torch\.distributed must be initialized: call init_p"):
        fk.CalibrationGridState(GAMMAS, TEMPERATURES).all_reduce()
