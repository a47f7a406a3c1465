"""The complete comparison with rows of several processes, on the engines that start them."""

import contextlib
import functools
import os
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from conftest import peer

import focalkern as fk
from focalkern.study import Processes, share_rows

needs_distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
CANDIDATES = ("none", "temperature", "spline")
GRID = ((0.0, 1.0), (0.8, 1.0, 1.5))  # gammas and temperatures


def rows(n, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=generator)
    return 3 * torch.randn(n, 3, generator=generator) + 3 * torch.nn.functional.one_hot(labels, 3), labels


def partitions():
    """Validation and test rows of each of two processes, of different sizes; some rows of both are copies."""
    (val, val_labels), (test, test_labels) = (column[torch.arange(230) % 160] for column in rows(160, 0)), rows(170, 1)
    return [
        ((val[:150], val_labels[:150]), (test[:40], test_labels[:40])),
        ((val[150:], val_labels[150:]), (test[40:], test_labels[40:])),
    ]


def address():
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def compared(part, rank=0, size=1, place=None):
    """Runs the comparison on the process of ``rank``: returns its record on rank 0, None elsewhere."""
    torch.set_num_threads(1)
    with contextlib.closing(Processes(60, rank=rank, size=size, address=place or "")) as processes:
        val, test = (share_rows(*one, processes, name=name) for one, name in zip(part, ("val", "test"), strict=True))
        study = fk.compare_calibrators(val, test, candidates=CANDIDATES, resamples=20)
        return study.to_dict() if rank == 0 else None


def one_process():
    first, second = partitions()
    return compared(tuple(tuple(map(torch.cat, zip(*pair, strict=True))) for pair in zip(first, second, strict=True)))


def same(found, expected):
    assert [row["method"] for row in found["rows"]] == [row["method"] for row in expected["rows"]]
    for one, other in zip(found["rows"], expected["rows"], strict=True):
        assert one["test"] == pytest.approx(other["test"], abs=1e-9)
    assert found["verdict"] == expected["verdict"]
    assert any("70 of the 230 validation rows are copies" in words for words in found["verdict"]["warnings"])


@needs_distributed
def test_two_processes_find_what_one_finds():
    place = address()
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found, nothing = pool.map(compared, partitions(), (0, 1), (2, 2), (place, place))
    assert nothing is None
    same(found, one_process())


@needs_distributed
def test_dask_workers_find_what_one_process_finds(tmp_path):
    """As in docs/howto/large_files.md: one task per worker, with the partitions of that worker."""
    distributed = peer("distributed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "local_directory": str(tmp_path)}
    with distributed.LocalCluster(silence_logs=50, **options) as cluster, distributed.Client(cluster) as client:
        workers, place = sorted(client.scheduler_info()["workers"]), address()
        tasks = [
            client.submit(compared, part, rank, 2, place, workers=[worker], pure=False)
            for rank, (part, worker) in enumerate(zip(partitions(), workers, strict=True))
        ]
        found = client.gather(tasks)[0]
    same(found, one_process())


@needs_distributed
@pytest.mark.filterwarnings("ignore")
def test_ray_tasks_find_what_one_process_finds(monkeypatch):
    """The grid alone, as one map over a data set of Ray, and the comparison, in two tasks at the same time."""
    ray = peer("ray")
    data = peer("ray.data")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the workers import this file
    data.DataContext.get_current().enable_progress_bars = False
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        place, of_task = address(), ray.remote(num_cpus=1)(compared)
        found = ray.get([of_task.remote(part, rank, 2, place) for rank, part in enumerate(partitions())])[0]
        items = [{"logits": val[0].numpy(), "labels": val[1].numpy()} for val, _ in partitions()]
        states = [row["state"] for row in data.from_items(items).map(with_state).iter_rows()]
    finally:
        ray.shutdown()
    same(found, one_process())
    whole = fk.CalibrationGridState(*GRID).update(*map(torch.cat, zip(*(val for val, _ in partitions()), strict=True)))
    grid, expected = functools.reduce(lambda one, other: one.merge(other), states).compute(), whole.compute()
    for name, table in expected.tables.items():
        torch.testing.assert_close(grid.tables[name], table, rtol=0, atol=1e-12)


def with_state(row):
    state = fk.CalibrationGridState(*GRID).update(torch.as_tensor(row["logits"]), torch.as_tensor(row["labels"]))
    return {"state": state}


def test_one_process_is_the_streamed_comparison(tmp_path, monkeypatch):
    import numpy as np

    monkeypatch.chdir(tmp_path)
    logits, labels = rows(120, 2)
    np.save("logits-0.npy", logits.numpy())
    np.save("labels-0.npy", labels.numpy())
    found, expected = (
        fk.compare_calibrators(given, candidates=CANDIDATES, resamples=0).to_dict()
        for given in (share_rows(logits, labels, Processes()), "logits-*.npy")
    )
    assert found["rows"] == expected["rows"]


def _classes(rank, place):
    with contextlib.closing(Processes(60, rank=rank, size=2, address=place)) as processes:
        try:
            share_rows(torch.zeros(2, 3 + rank), torch.zeros(2, dtype=torch.int64), processes)
        except ValueError as error:
            first = str(error)
        try:
            share_rows(torch.zeros(2, 3), torch.full((2,), 3 * rank), processes)
        except ValueError as error:
            second = str(error)
        empty = share_rows(torch.zeros(3 * rank, 3), torch.zeros(3 * rank, dtype=torch.int64), processes)
        return first, second, (len(empty), empty.n_local)


@needs_distributed
def test_every_process_raises_where_one_cannot_go_on():
    place = address()
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        (first, second, empty), (other, reason, filled) = pool.map(_classes, (0, 1), (place, place))
    assert first == other == "share_rows: logits must have one number of classes, got [3, 4] by rank"
    assert second == "share_rows: rows of rank 1 cannot be used; its error names the first"
    assert reason == "share_rows: labels: expected class numbers from 0 to 2, found 3 in row 0 (and 1 more such row)"
    assert (empty, filled) == ((3, 0), (3, 3))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(2), 2), TypeError, "processes must be Processes of focalkern.study, got 2"),
        ((torch.zeros(0, 3), torch.zeros(0), Processes()), ValueError, "at least one row on some process, got none"),
        ((torch.zeros(2, 3), torch.zeros(3), Processes()), ValueError, r"labels: expected \[N\] = \[2\]"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=f"share_rows: .*{message}"):
        share_rows(*arguments)


def test_rank_size_and_address_go_together():
    with pytest.raises(ValueError, match="Processes: rank, size, address and timeout go together, got 0, 2, None"):
        Processes(60, rank=0, size=2)
    with pytest.raises(ValueError, match="go together"):
        Processes(rank=0, size=2, address="127.0.0.1:1")
