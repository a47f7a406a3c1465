"""python -m benchmarks.sweep: CPU seconds of the client, and of all processes, per network of a sweep, by engine.

Writes small files, 200 rows of 3 classes each. ``client`` rows skip the comparison: every network gets the record of
the first, so the rest is the work of sweep itself (tables, pages, a file per network). ``executor`` rows submit the
same tasks to the executor alone. ``whole`` rows compute everything. Engines: this process, two worker processes, dask
with two processes and its scheduler in this process (LocalCluster) or in another one or with ten networks per task, Ray
with two workers.

``client_cpu_s`` is the CPU time of the process that calls sweep; ``cpu_s`` also includes all its child processes. For
``2 processes`` that includes their start, with an import of torch each. Appends a CSV to benchmarks/results. A folder
in memory (``TMPDIR=/dev/shm``) keeps the time of the disk out of ``wall_s``.

``fit`` rows are the CPU time of one thread for the parts of a comparison, per network of 2,000 validation rows (and for
``sweep_one`` 2,000 test rows) of 10 classes: the lowest of five runs.
"""

import argparse
import contextlib
import csv
import datetime
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

import focalkern as fk
from benchmarks.harness import RESULTS, commit, device_name
from focalkern.study import sweep as implementation

ENGINES = ("1 process", "2 processes", "dask", "dask scheduler elsewhere", "dask batch=10", "ray")


def write_files(folder: Path, n: int) -> list[str]:
    rng = np.random.default_rng(0)
    names = []
    for place in range(n):
        labels = rng.integers(3, size=200)
        logits = rng.normal(size=(200, 3)) + 2 * np.eye(3)[labels]
        names.append(str(folder / f"{place:05d}.npz"))
        np.savez(names[-1], logits=logits.astype(np.float32), labels=labels)
    return names


class Known:
    """A task that already has its result: the record of another file."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record

    def __call__(self, names: list[str], attempt: int = 0) -> list[Any]:
        return [({**self.record, "path": name}, ["stamp"]) for name in names]

    def __dask_tokenize__(self) -> str:
        return "known"


def cpu_of_all() -> float:
    """CPU seconds of this process and of its child processes, including ended ones."""
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(stat.parent.name)] = int(fields[1])
        seconds[int(stat.parent.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    ours, found = {os.getpid()}, 1
    while found:
        below = {process for process, parent in parents.items() if parent in ours} - ours
        ours, found = ours | below, len(below)
    return sum(seconds[process] for process in ours)


@contextlib.contextmanager
def executor_of(engine: str) -> Iterator[Executor | None]:
    if engine.startswith("dask"):
        from distributed import Client, LocalCluster, SubprocessCluster

        cluster = (
            LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
            if engine != "dask scheduler elsewhere"
            else SubprocessCluster(n_workers=2, worker_kwargs={"nthreads": 1}, dashboard_address=":0")
        )
        with cluster, Client(cluster) as client:
            client.wait_for_workers(2)
            yield client.get_executor()
    elif engine == "ray":
        import ray

        from focalkern.integrations.ray import RayExecutor

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield RayExecutor()
        ray.shutdown()
    else:
        yield None


def measure(names: list[str], engine: str, client_only: bool, note: str) -> dict[str, Any]:
    made: Any = implementation.Task
    with executor_of(engine) as executor, tempfile.TemporaryDirectory() as report:
        jobs = 2 if engine == "2 processes" else 1
        batch = 10 if engine.endswith("batch=10") else 1
        if executor is not None or jobs > 1:  # the workers import torch before the clock starts
            fk.sweep(names[:4], executor=executor, jobs=jobs)
        if client_only:
            known = Known(fk.sweep_one(names[0]))
            implementation.Task = lambda *_: known  # type: ignore[assignment, misc]
        try:
            wall, cpu, every = time.perf_counter(), time.process_time(), cpu_of_all()
            found = fk.sweep(names, folder=report, jobs=jobs, executor=executor, batch=batch, progress=False)
            wall, cpu, every = time.perf_counter() - wall, time.process_time() - cpu, cpu_of_all() - every
        finally:
            implementation.Task = made  # type: ignore[misc]
    assert len(found.networks) == len(names)
    return row("client" if client_only else "whole", engine, len(names), wall, cpu, every, note)


def measure_executor(names: list[str], engine: str, note: str) -> Iterator[dict[str, Any]]:
    """The executor alone: the same tasks and results, without tables and files."""
    with executor_of(engine) as executor:
        if executor is None:
            return
        known = Known(fk.sweep_one(names[0]))
        for future in [executor.submit(known, [name]) for name in names[:4]]:
            future.result()
        wall, cpu, every = time.perf_counter(), time.process_time(), cpu_of_all()
        for future in as_completed([executor.submit(known, [name], 1) for name in names]):
            future.result()
        wall, cpu, every = time.perf_counter() - wall, time.process_time() - cpu, cpu_of_all() - every
    yield row("executor", engine, len(names), wall, cpu, every, note)


def row(measured: str, engine: str, n: int, wall: float, cpu: float, every: float, note: str) -> dict[str, Any]:
    return {
        "measured": measured,
        "engine": engine,
        "networks": n,
        "wall_s": f"{wall:.2f}",
        "client_cpu_s": f"{cpu:.2f}",
        "cpu_s": f"{every:.2f}",
        "client_cpu_ms_per_network": f"{1000 * cpu / n:.2f}",
        "cpu_ms_per_network": f"{1000 * every / n:.1f}",
        "device": device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "note": note,
    }


def paper_grid(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    """The grid as in a comparison: with gamma = 0, for ECE and NLL, in float64."""
    axes: Any = ((0.0, *fk.PAPER_GAMMAS), fk.PAPER_TEMPERATURES)
    return fk.calibration_grid(logits.double(), labels, *axes, criteria=("ece", "nll"), estimator="equal_mass")


def measure_fits(folder: Path, note: str) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    n, n_classes, n_networks = 2000, 10, 50
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(n_classes, (n_networks, n), generator=generator)
    logits = torch.randn(n_networks, n, n_classes, generator=generator)
    logits = 3 * (logits + 2.5 * torch.nn.functional.one_hot(labels, n_classes))
    validation, test = ((logits[place], labels[place]) for place in (0, 1))
    path = folder / "network.npz"
    sets = {"val_logits": validation[0], "val_labels": validation[1], "test_logits": test[0], "test_labels": test[1]}
    np.savez(path, **{name: array.numpy() for name, array in sets.items()})  # type: ignore[arg-type]
    whole = lambda calibrator: lambda: calibrator().fit(*validation)  # noqa: E731
    parts: dict[str, tuple[int, Callable[[], Any]]] = {
        "fit_temperatures": (n_networks, lambda: fk.fit_temperatures(logits, labels)),
        "TemperatureScaling": (1, whole(fk.TemperatureScaling)),
        "FocalTemperatureScaling": (1, whole(fk.FocalTemperatureScaling)),
        "AutoCalibrator": (1, whole(fk.AutoCalibrator)),
        "calibration_grid": (1, lambda: paper_grid(*validation)),
        "sweep_one": (1, lambda: fk.sweep_one(path)),
        "sweep_one, all": (1, lambda: fk.sweep_one(path, all=True)),
    }
    for name, (networks, call) in parts.items():
        call()
        seconds = []
        for _ in range(5):
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            seconds.append((time.process_time() - cpu, time.perf_counter() - wall))
        cpu, wall = min(seconds)
        yield row("fit", name, networks, wall, cpu, cpu, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", type=int, nargs="*", default=[200, 1000, 5000], help="networks of the client rows")
    parser.add_argument("--executor", type=int, nargs="*", default=[1000], help="networks of the executor rows")
    parser.add_argument("--whole", type=int, nargs="*", default=[40], help="networks of the whole rows")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--out", type=Path, default=RESULTS / f"sweep_{datetime.date.today().isoformat()}.csv")
    parser.add_argument("--fits", action=argparse.BooleanOptionalAction, default=True, help="the fit rows")
    parser.add_argument("--note", default="", help="about the machine")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = write_files(Path(folder), max([*arguments.client, *arguments.executor, *arguments.whole, 4]))
        rows: Iterator[dict[str, Any]] = (
            measure(names[:size], engine, client_only, arguments.note)
            for client_only, sizes in ((True, arguments.client), (False, arguments.whole))
            for engine in arguments.engines
            for size in sizes
        )
        alone = (
            found
            for engine in arguments.engines
            for size in arguments.executor
            for found in measure_executor(names[:size], engine, arguments.note)
        )
        rows = itertools.chain(rows, alone)
        if arguments.fits:
            rows = itertools.chain(rows, measure_fits(Path(folder), arguments.note))
        for found in rows:
            print(found, flush=True)
            new = not arguments.out.exists()
            with arguments.out.open("a", newline="") as stream:
                writer = csv.DictWriter(stream, found, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(found)


if __name__ == "__main__":
    main()
