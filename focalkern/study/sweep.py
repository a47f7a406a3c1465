"""The same comparison for many networks, resumable, on any executor."""

import hashlib
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from focalkern._atomic import write_atomically, write_together
from focalkern._checks import flag, integer, one_of, path_text, short
from focalkern._progress import ProgressBar
from focalkern._types import PROPER, Proper
from focalkern.calibrators import InputKind
from focalkern.calibrators._folds import check_folds
from focalkern.files.paths import expanded, name_of, size_of
from focalkern.files.samples import check_options
from focalkern.study.engines import LocalPool, run_tasks
from focalkern.study.network import Task, record_of, stamp_of
from focalkern.study.report.sweep import METHODS, SCORES, Sweep, missing_keys

__all__ = ["METHODS", "SCORES", "Sweep", "report_files", "run_sweep", "sweep", "sweep_one", "sweep_settings"]

_FORMAT = 3


def sweep(
    files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    folder: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    batch: int = 1,
    criterion: Proper = "nll",
    folds: int = 5,
    seed: int = 0,
    labels: str | os.PathLike[str] | None = None,
    input_kind: InputKind | None = None,
    logits_key: str | None = None,
    labels_key: str | None = None,
    ignore_index: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    all: bool = False,
    progress: bool | None = None,
) -> Sweep:
    """Compare the calibrators on each of many files.

    One thread computes each network, so the results have the same bits with any number of processes and on any
    executor. If a worker dies, its network is tried once more, alone. After Ctrl-C, finished results are kept.

    Args:
        files: files with validation and test rows, one or any iterable; if a file has one set of rows, a random half is
            used for validation. A folder stands for its files, a pattern for its matches, ``"@LIST"`` for the names in
            a text file, one per line. URLs that fsspec opens are permitted: ``"s3://bucket/runs/*.npz"``.
        folder: folder for ``sweep.csv``, ``sweep.json``, ``sweep.html`` and, with pyarrow, ``sweep.parquet``, and for
            the result of every file as soon as it is computed, from which a later sweep of the same files continues.
            None writes no files.
        jobs: number of processes on this machine.
        executor: any :class:`concurrent.futures.Executor` in place of ``jobs``: dask's ``Client.get_executor()``,
            loky, ``mpi4py.futures.MPIPoolExecutor``, :class:`focalkern.integrations.ray.RayExecutor`. Its workers need
            access to the files and to focalkern. The caller shuts it down.
        batch: number of networks per task, for engines with a large overhead per task.
        criterion, folds, seed: as :func:`focalkern.compare_calibrators`.
        labels, input_kind, logits_key, labels_key, ignore_index, storage_options: options for reading the files, as
            :func:`focalkern.files.read_sets`. The storage options are sent to the workers but written to no file.
        all: also the methods ``"temperature, ECE"`` and ``"focal, ECE"``, the lowest ECE of the paper's grid, which
            take more time than the focal fit.
        progress: True shows a bar; None shows it after two seconds in a terminal; False shows none.

    Returns:
        A :class:`focalkern.Sweep`. ``failed`` lists files that cannot be used or that killed their worker.

    Raises:
        TypeError, ValueError: an invalid option; files that are no paths; both ``jobs`` and ``executor``.
        InputError: a list that cannot be read; worker processes do not start.
        OSError: the folder cannot be written.

    Example:
        >>> found = fk.sweep(["absent.npz"])
        >>> found.failed
        {'absent.npz': 'expected a file, found nothing there'}
    """
    progress = None if progress is None else flag("sweep", "progress", progress)
    settings = sweep_settings(
        "sweep", criterion, folds, seed, labels, input_kind, logits_key, labels_key, ignore_index, storage_options, all
    )
    names = _names("sweep", files, storage_options)
    with ProgressBar(len(names), "sweep", "network", progress) as bar:
        return run_sweep(
            names,
            settings,
            folder=folder,
            jobs=jobs,
            executor=executor,
            batch=batch,
            done=lambda name, fresh: bar.update(1),
        )


def sweep_one(
    path: str | os.PathLike[str],
    *,
    criterion: Proper = "nll",
    folds: int = 5,
    seed: int = 0,
    labels: str | os.PathLike[str] | None = None,
    input_kind: InputKind | None = None,
    logits_key: str | None = None,
    labels_key: str | None = None,
    ignore_index: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    all: bool = False,
) -> dict[str, Any]:
    """Compare the calibrators on one file: the task of a worker of :func:`sweep`.

    A batch system or Spark calls it once per file; :meth:`Sweep.from_records` joins the records.

    Args:
        path: a file as in :func:`sweep`.
        criterion, folds, seed, labels, input_kind, logits_key, labels_key, ignore_index, storage_options, all: as
            :func:`sweep`.

    Returns:
        A record of strings, numbers, None and dictionaries, for JSON and pickle: ``path``, ``error`` (None, or the
        reason for which the file cannot be used), ``criterion``; and without an error the keys of
        :attr:`Sweep.networks`.

    Raises:
        TypeError, ValueError: an invalid option. A file that cannot be used raises no error.

    Example:
        >>> labels = np.arange(400) % 3
        >>> np.savez("small.npz", logits=4 * np.eye(3)[(labels + (np.arange(400) % 5 == 0)) % 3], labels=labels)
        >>> records = [fk.sweep_one("small.npz"), fk.sweep_one("absent.npz")]
        >>> [(record["path"], record["error"]) for record in records]
        [('small.npz', None), ('absent.npz', 'expected a file, found nothing there')]
        >>> fk.Sweep.from_records(records) == fk.sweep(["small.npz", "absent.npz"])
        True
    """
    settings = sweep_settings(
        "sweep_one",
        criterion,
        folds,
        seed,
        labels,
        input_kind,
        logits_key,
        labels_key,
        ignore_index,
        storage_options,
        all,
    )
    return record_of(path_text("sweep_one", "path", path), settings, str)


def run_sweep(
    names: Sequence[str],
    settings: Mapping[str, Any],
    *,
    folder: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    batch: int = 1,
    done: Callable[[str, bool], None] = lambda name, fresh: None,
    words: Callable[[Exception], str] = str,
) -> Sweep:
    """:func:`sweep` with two further arguments, for the command.

    Args:
        done: called for every finished file; its argument says whether the file was computed now.
        words: a module-level function (for pickle) that turns the error of an unusable file into text.
    """
    if folder is not None:
        folder = path_text("sweep", "folder", folder)
    jobs, batch = integer("sweep", "jobs", jobs, 1), integer("sweep", "batch", batch, 1)
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise TypeError(f"sweep: executor must be a concurrent.futures.Executor or None, got {short(executor)}")
    if executor is not None and jobs != 1:
        raise ValueError(f"sweep: jobs must be 1 with an executor, which has its own workers, got {jobs}")
    kept = None if folder is None else Path(folder, "networks")
    called = _record_names(names)
    records: dict[str, dict[str, Any]] = {}
    if kept is not None:
        for name in names:
            known = _known(kept / f"{called[name]}.json", name, settings)
            if known is not None:
                records[name] = {**known, "path": name}
                done(name, False)
        kept.mkdir(parents=True, exist_ok=True)

    def keep(name: str, result: tuple[dict[str, Any], list[Any]]) -> None:
        record, stamp = result
        records[name] = record
        if kept is not None and record["error"] is None:
            content = {"format": _FORMAT, "stamp": stamp, "network": record}
            text = json.dumps(content, allow_nan=False) + "\n"  # with an indent, json uses its slower Python code
            write_atomically(kept / f"{called[name]}.json", text.encode())
        done(name, True)

    def lost(name: str, reason: str) -> None:
        keep(name, ({"path": name, "error": reason, "criterion": settings["criterion"]}, []))

    tasks = [name for name in names if name not in records]
    function = Task(dict(settings), words, None if executor is None else os.getcwd())
    if executor is None and (jobs == 1 or len(names) == 1):
        for name in tasks:
            keep(name, *function([name]))
    elif tasks:
        tasks.sort(key=size_of, reverse=True)  # largest first, so that no large task is left at the end
        batches = [tasks[begin : begin + batch] for begin in range(0, len(tasks), batch)]
        if executor is None:
            jobs = min(jobs, len(batches))
            with LocalPool(jobs) as pool:
                run_tasks(pool, function, batches, keep, lost, window=2 * jobs)
        else:
            run_tasks(executor, function, batches, keep, lost)
    result = Sweep.from_records(records[name] for name in names)
    if folder is not None:
        document = json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n"
        table = result.to_csv().encode(errors="surrogateescape")  # a path may contain bytes that are not UTF-8
        pages = {"sweep.csv": table, "sweep.json": document.encode(), "sweep.html": result.to_html()}
        if "sweep.parquet" in report_files():
            pages["sweep.parquet"] = result.to_parquet()
        write_together(folder, pages)
    return result


def report_files() -> tuple[str, ...]:
    """The names of the files that a sweep writes into its folder."""
    with_pyarrow = () if importlib.util.find_spec("pyarrow") is None else ("sweep.parquet",)
    return ("sweep.html", "sweep.csv", "sweep.json", *with_pyarrow)


def _record_names(paths: Sequence[str]) -> dict[str, str]:
    """A file name for the record of each path: that of the path, with a digest of the path if several have it or if it
    is too long with another suffix."""
    stems = {path: name_of(path).stem for path in paths}
    count = Counter(stems.values())

    def digest(path: str) -> str:
        return hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:12]

    def called(path: str, stem: str) -> str:
        return stem if count[stem] == 1 and len(os.fsencode(stem)) <= 200 else f"{stem[:50]}-{digest(path)}"

    return {path: called(path, stem) for path, stem in stems.items()}


def _names(op: str, files: Any, storage_options: Mapping[str, Any] | None) -> list[str]:
    if isinstance(files, str | os.PathLike):
        files = [files]
    if isinstance(files, bytes | Mapping) or not isinstance(files, Iterable):
        raise TypeError(f"{op}: files must be a path or an iterable of paths, got {short(files)}")
    return expanded([path_text(op, "files", name) for name in files], storage_options)


def sweep_settings(
    op: str = "sweep",
    criterion: Proper = "nll",
    folds: int = 5,
    seed: int = 0,
    labels: str | os.PathLike[str] | None = None,
    input_kind: InputKind | None = None,
    logits_key: str | None = None,
    labels_key: str | None = None,
    ignore_index: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    all: bool = False,
) -> dict[str, Any]:
    """The checked options of every network, for JSON."""
    one_of(op, "criterion", criterion, PROPER)
    folds, seed = check_folds(op, folds, seed)
    check_options(op, None, storage_options=storage_options, ignore_index=ignore_index)
    return {
        "criterion": criterion,
        "folds": folds,
        "seed": seed,
        "labels": None if labels is None else path_text(op, "labels", labels),
        "input_kind": input_kind,
        "logits_key": logits_key,
        "labels_key": labels_key,
        "ignore_index": ignore_index,
        "storage_options": None if storage_options is None else dict(storage_options),
        "all": flag(op, "all", all),
    }


def _known(place: Path, name: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of an earlier sweep for the same task; None without one."""
    try:
        content = json.loads(place.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not content.get("stamp"):
        return None
    network = content.get("network")
    known = isinstance(network, dict) and not missing_keys(network) and content["stamp"] == stamp_of(name, settings)
    return network if known else None
