"""A sweep on executors: bitwise equal results on all of them, workers that die, files that kill their worker."""

import errno
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from conftest import peer

import focalkern as fk
from focalkern.study import engines, network
from focalkern.study import sweep as sweep_module
from focalkern.study.network import Task
from focalkern.study.sweep import run_sweep, sweep_settings

BAD = 3  # position of the file that cannot be read
GUARD = "every worker imports the script, which must call sweep below if __name__ == '__main__'"


class Killing:
    """A worker's handler for an unusable file that kills the worker the first ``times`` times."""

    def __init__(self, folder, times):
        self.folder, self.times = folder, times

    def __call__(self, error):
        died = len(os.listdir(self.folder))
        if died < self.times:
            Path(self.folder, str(died)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return f"read after {died} deaths"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Six files of the same size; the fourth is not a network."""
    monkeypatch.chdir(tmp_path)
    names = [f"{place}.npz" for place in range(6)]
    for place, name in enumerate(names):
        rng = np.random.RandomState(place)
        labels = rng.randint(3, size=60)
        np.savez(name, logits=(2 * np.eye(3)[labels] + rng.standard_normal((60, 3))).round(3), labels=labels)
    Path(names[BAD]).write_bytes(b"x" * os.path.getsize(names[0]))
    Path("deaths").mkdir()
    return names


@pytest.fixture
def written(monkeypatch):
    """The names of the results, in the order in which they are written."""
    names = []
    write = sweep_module.write_atomically

    def count(path, data):
        names.append(path.name)
        write(path, data)

    monkeypatch.setattr(sweep_module, "write_atomically", count)
    return names


@pytest.fixture
def expected(files):
    """The results of one process."""
    return fk.sweep(files).networks


def check(found, files, expected, written):
    """All five results exist, are equal, and are written once."""
    assert found.networks == expected
    assert len(expected) == len(files) - 1
    assert sorted(written) == sorted(f"{network['name']}.json" for network in expected)


def swept(files, tmp_path, deaths, **options):
    words = Killing(str(tmp_path / "deaths"), deaths)
    return run_sweep(files, sweep_settings(), folder=tmp_path / "report", words=words, **options)


def test_a_worker_that_dies_once_costs_nothing(files, tmp_path, expected, written):
    found = swept(files, tmp_path, 1, jobs=2, batch=4)  # the whole batch is lost with its worker
    check(found, files, expected, written)
    assert found.failed == {files[BAD]: "read after 1 deaths"}


def test_a_file_that_kills_its_worker_costs_that_network(files, tmp_path, expected, written):
    found = swept(files, tmp_path, 99, jobs=2)
    check(found, files, expected, written)
    assert found.failed == {files[BAD]: "its worker process was killed (the system does so when memory runs out)"}


def test_an_executor_that_breaks_keeps_what_is_done_and_the_next_goes_on(files, tmp_path, expected, written):
    order = [*(name for name in files if name != files[BAD]), files[BAD]]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        first = swept(order, tmp_path, 1, executor=pool)
    assert set(first.failed) >= {files[BAD]} and "BrokenProcessPool" not in str(first.networks)
    with ThreadPoolExecutor(1) as threads:
        second = swept(files, tmp_path, 1, executor=threads)
    check(second, files, expected, written)


def test_dask(files, tmp_path, expected, written):
    distributed = peer("distributed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "local_directory": str(tmp_path)}
    with distributed.LocalCluster(silence_logs=50, **options) as cluster, distributed.Client(cluster) as client:
        found = swept(files, tmp_path, 1, executor=client.get_executor())
    check(found, files, expected, written)
    assert found.failed == {files[BAD]: "read after 1 deaths"}


class NoPickle:
    def __reduce__(self):
        raise AssertionError("pickled")


def test_dask_names_a_task_without_its_settings():
    """dask names a task by hashing the call: with pickled settings, hashing each of thousands of tasks takes long."""
    tokenize = peer("dask.tokenize").tokenize
    one, other = (Task({**sweep_settings(), "labels": NoPickle()}, str, None) for _ in range(2))
    assert tokenize(one, ["a.npz"], 0) == tokenize(one, ["a.npz"], 0)
    assert len({tokenize(one, ["a.npz"], 0), tokenize(one, ["a.npz"], 1), tokenize(other, ["a.npz"], 0)}) == 3


@pytest.mark.filterwarnings("ignore")
def test_ray(files, tmp_path, expected, written, monkeypatch):
    ray = peer("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the workers unpickle a class of this file
    from focalkern.integrations.ray import RayExecutor

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        found = swept(files, tmp_path, 1, executor=RayExecutor())
    finally:
        ray.shutdown()
    check(found, files, expected, written)
    assert found.failed == {files[BAD]: "read after 1 deaths"}


def test_loky(files, tmp_path, expected, written):
    loky = peer("loky")
    with loky.ProcessPoolExecutor(2, context=get_context("spawn")) as executor:
        found = swept(files, tmp_path, 0, executor=executor)
    check(found, files, expected, written)


def test_records_of_one_file_each_make_the_sweep(files):
    records = [pickle.loads(pickle.dumps(fk.sweep_one))(name) for name in files]
    whole = fk.sweep(files)
    assert fk.Sweep.from_records(records) == whole
    # If a task was repeated, the record without an error counts.
    lost = {"path": files[0], "error": "preempted", "criterion": "nll"}
    assert fk.Sweep.from_records([lost, *records, lost]) == whole
    with pytest.raises(ValueError, match=r"^from_records: records must have one criterion, got nll, brier$"):
        fk.Sweep.from_records([records[0], {**records[1], "criterion": "brier"}])
    with pytest.raises(ValueError, match=r"^from_records: records must have path, error, got "):
        fk.Sweep.from_records([{"criterion": "nll"}])
    with pytest.raises(TypeError, match=r"^from_records: records must be dictionaries from sweep_one, got 3$"):
        fk.Sweep.from_records([3])


def test_the_frame_and_the_table_have_a_row_for_every_failure(files):
    pytest.importorskip("pandas")
    found = fk.sweep([files[0], "absent.npz", files[BAD]])
    frame = found.to_frame()
    assert frame.shape[0] == len(found.methods) + 2
    assert frame.path.tolist()[-2:] == ["absent.npz", files[BAD]]
    assert frame.error.iloc[-2] == "expected a file, found nothing there" and frame.error.iloc[:-2].isna().all()
    assert frame.nll.iloc[0] == found.networks[0]["figures"]["auto"]["nll"]
    assert found.to_csv().splitlines()[-2] == 'absent,absent.npz,,,,,,,,,"expected a file, found nothing there"'


def test_a_network_has_one_thread_and_the_process_gets_its_own_back(files, monkeypatch):
    seen = []
    run_study = network.run_study
    monkeypatch.setattr(
        network, "run_study", lambda *a, **b: (seen.append(torch.get_num_threads()), run_study(*a, **b))[1]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        fk.sweep(files[:1])
        assert seen == [1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_networks_of_several_threads_leave_new_threads_their_number(files, monkeypatch):
    """Each thread sets its own number, but torch keeps one number for all threads that start later."""
    seen, together = [], Barrier(2)
    run_study = network.run_study

    def wait(*arguments, **options):
        together.wait(60)  # both networks have begun
        with ThreadPoolExecutor(1) as new:
            seen.append((torch.get_num_threads(), new.submit(torch.get_num_threads).result()))
        return run_study(*arguments, **options)

    monkeypatch.setattr(network, "run_study", wait)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(2) as executor:
            fk.sweep(files[:2], executor=executor)
            seen += executor.map(lambda _: (torch.get_num_threads(), together.wait(60))[0], range(2))
        with ThreadPoolExecutor(1) as new:
            seen.append(new.submit(torch.get_num_threads).result())
    finally:
        torch.set_num_threads(before)
    assert seen == [(1, 3), (1, 3), 3, 3, 3]


def test_any_error_of_a_file_is_its_row(files, monkeypatch):
    def no_memory(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(network, "run_study", no_memory)
    found = fk.sweep(files[:2])
    assert found.failed[files[0]] == "RuntimeError DefaultCPUAllocator: can't allocate memory"


class Pending(ThreadPoolExecutor):
    """Runs the first ``n`` tasks immediately; raises KeyboardInterrupt at the next one."""

    def __init__(self, n):
        super().__init__(1)
        self.n, self.left = n, []

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        if self.n > 0:
            self.n -= 1
            future.set_result(fn(*args, **kwargs))
        elif self.left:
            raise KeyboardInterrupt
        else:
            self.left.append(future)
        return future


def test_ctrl_c_keeps_what_is_finished_and_cancels_the_rest(files, tmp_path, expected, written):
    executor = Pending(2)
    with pytest.raises(KeyboardInterrupt):
        fk.sweep(files, folder=tmp_path / "report", executor=executor)
    assert sorted(written) == ["0.json", "1.json"] and executor.left[0].cancelled()
    check(fk.sweep(files, folder=tmp_path / "report"), files, expected, written)


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOMEM])
def test_a_pool_that_closes_its_pipe_during_a_call_is_replaced(monkeypatch, number):
    real, errors = ProcessPoolExecutor.submit, [OSError(number, "once")]

    def submit(self, *arguments, **options):
        if errors:
            raise errors.pop()
        return real(self, *arguments, **options)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    with engines.LocalPool(1) as pool:
        if number == errno.EBADF:
            assert pool.submit(int, 7).result() == 7
        else:
            reason = r"^the worker processes do not start: \[Errno 12\] once; pass jobs=1$"
            with pytest.raises(fk.files.InputError, match=reason):
                pool.submit(int, 7)


def test_a_system_without_semaphores_names_the_remedy(files, monkeypatch):
    """A container without a writable /dev/shm."""

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(engines, "ProcessPoolExecutor", refuse)
    with pytest.raises(fk.files.InputError, match=r"start: \[Errno 30\] Read-only file system; pass jobs=1$"):
        fk.sweep(files[:2], jobs=2)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("script.py", GUARD),
        ("-", f"<stdin> is no file; save the program as a script: {GUARD}"),
        ("-c", "stderr has their own errors"),
        ("command.py", "stderr has their own errors"),
    ],
)
def test_workers_that_never_start_end_the_sweep(files, tmp_path, way, reason):
    """A script without the guard is imported by its own workers, which then call sweep themselves. Workers of stdin
    have nothing to import; those of ``-c`` and of the command start, unless their Python is broken. A worker that is
    killed within a line leaves the error behind that line."""
    program = f"import focalkern as fk\nfk.sweep({files[:2]}, jobs=2)\n"
    if way == "command.py":
        words = ["sweep", *files[:2], "--jobs", "2"]
        program = (
            f"import sys\nfrom focalkern.cli import main\nif __name__ == '__main__':\n    sys.exit(main({words}))\n"
        )
    if way in ("-c", "command.py"):
        program = f"import os\nos.environ['PYTHONHOME'] = '/absent'\n{program}"
    (tmp_path / way).write_text(program)
    arguments = [way, program] if way == "-c" else [way]
    done = subprocess.run([sys.executable, *arguments], input=program, capture_output=True, text=True)
    expected = f"the worker processes do not start: {reason}; pass "
    if way == "command.py":
        assert done.returncode == 2
        assert f"focalkern sweep: {expected}--jobs 1\n" in done.stderr
    else:
        assert done.returncode == 1
        assert f"focalkern.files.errors.InputError: {expected}jobs=1\n" in done.stderr


def test_jobs_beside_an_executor(files):
    with ThreadPoolExecutor(1) as executor, pytest.raises(ValueError, match=r"^sweep: jobs must be 1 with an executor"):
        fk.sweep(files, executor=executor, jobs=2)


def test_engines_of_the_command(files, run):
    pytest.importorskip("tabulate")
    for address in ("spark", "dask://", "ray"):
        code, _, err = run("sweep", files[0], "--engine", address)
        assert code == 2 and err.startswith("focalkern sweep: --engine: expected local, dask://HOST:PORT, ")
    code, _, err = run("sweep", files[0], "--engine", "dask://a:1", "--jobs", "2")
    assert (code, err) == (
        2,
        "focalkern sweep: --jobs: expected none with --engine dask://a:1, which has its own workers\n",
    )


def test_the_command_on_dask(files, run, tmp_path):
    pytest.importorskip("tabulate")
    distributed = peer("distributed")
    local = run("sweep", *files[:2], "--jobs", "1")
    options = {"threads_per_worker": 1, "dashboard_address": None, "local_directory": str(tmp_path)}
    with distributed.LocalCluster(n_workers=1, silence_logs=50, **options) as cluster:
        address = cluster.scheduler_address.replace("tcp", "dask")
        assert run("sweep", *files[:2], "--engine", address)[:2] == local[:2]


def test_the_pool_of_many_tasks(tmp_path):
    """The client handles every task once, for any number of tasks."""
    kept = []
    with ThreadPoolExecutor(2) as executor:
        engines.run_tasks(
            executor,
            lambda task, attempt: [len(name) for name in task],
            [["a" * n] for n in range(1, 3000)],
            lambda name, result: kept.append((name, result)),
            lambda name, reason: kept.append(reason),
        )
    assert sorted(result for _, result in kept) == list(range(1, 3000))
