"""Many networks in one go: the same comparison for each, resumable, in several processes."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from focalkern._atomic import write_atomically, write_together
from focalkern._checks import integer, one_of, path_text, short
from focalkern._version import __version__
from focalkern.calibrators._selection import PROPER, Proper, check_folds
from focalkern.files import InputError, LogitSet, read_sets
from focalkern.files.read import labels_of_npy
from focalkern.study.compare import run_study
from focalkern.study.report.export import finite_or_none
from focalkern.study.report.sweep import METHODS, SCORES, Sweep
from focalkern.study.split import check_alike
from focalkern.study.study import Study

__all__ = ["METHODS", "SCORES", "Sweep", "sweep"]

_FORMAT = 2


def sweep(
    files: Sequence[str],
    *,
    folder: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    criterion: Proper = "nll",
    folds: int = 5,
    seed: int = 0,
    done: Callable[[str, bool], None] = lambda name, fresh: None,
    words: Callable[[Exception], str] = str,
    **options: Any,
) -> Sweep:
    """Compare the calibrators on every one of many files.

    Args:
        files: each with validation and test rows; of a file with one set of rows a random half is for validation.
        folder: for ``sweep.csv``, ``sweep.json`` and ``sweep.html``, and for the result of every file as soon as it is
            there: a sweep with the same files goes on where it was stopped. Nothing is written when None.
        jobs: processes.
        criterion, folds, seed: as :func:`focalkern.compare_calibrators`.
        done: is told of every file that is over, and whether it was computed now.
        words: makes the reason of a file that cannot be used from its error; with several jobs a function of a module.
        options: for the reader of the files, ``input_kind`` and others.

    Returns:
        A :class:`Sweep`. A file that cannot be used is in ``failed``, and no reason to stop.

    Raises:
        TypeError, ValueError: an option that does not fit; files that are no list of paths.
        OSError: the folder cannot be written.

    Example:
        >>> found = fk.study.sweep.sweep(["absent.npz"])
        >>> found.failed
        {'absent.npz': 'expected a file, found nothing there'}
    """
    if isinstance(files, str | bytes | os.PathLike) or not isinstance(files, Sequence):
        raise TypeError(f"sweep: files must be a list of paths, got {short(files)}")
    names = list(dict.fromkeys(path_text("sweep", "files", name) for name in files))
    if folder is not None:
        folder = path_text("sweep", "folder", folder)
    jobs = integer("sweep", "jobs", jobs, 1)
    one_of("sweep", "criterion", criterion, PROPER)
    folds, seed = check_folds("sweep", folds, seed)
    kept = None if folder is None else Path(folder)
    tasks = {}
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    settings = {"criterion": criterion, "folds": folds, "seed": seed, **options}
    for name in names:
        place = None if kept is None else kept / "networks" / f"{_short_name(name, names)}.json"
        stamp = _stamp(name, settings)
        known = _known(place, stamp)
        if known is None:
            tasks[name] = (place, stamp)
        else:
            found[name] = {**known, "source": name, "name": _short_name(name, names)}
            done(name, False)
    if kept is not None:
        (kept / "networks").mkdir(parents=True, exist_ok=True)

    def keep(name: str, result: dict[str, Any] | str) -> None:
        place, stamp = tasks[name]
        if isinstance(result, str):
            failed[name] = result
        else:
            found[name] = {**result, "name": _short_name(name, names)}
            if place is not None:
                content = {"format": _FORMAT, "stamp": stamp, "network": found[name]}
                write_atomically(place, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())
        done(name, True)

    if jobs <= 1 or len(tasks) <= 1:
        for name in tasks:
            keep(name, _one(name, settings, None, words))
    else:
        threads = max(1, torch.get_num_threads() // jobs)
        with ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn")) as pool, _workers_end_too(pool):
            # The largest first, so that none of them is left at the end.
            order = sorted(tasks, key=lambda name: -os.path.getsize(name) if os.path.exists(name) else 0)
            running = {pool.submit(_one, name, settings, threads, words): name for name in order}
            for future in as_completed(running):
                keep(running[future], future.result())
    result = Sweep(tuple(found[name] for name in names if name in found), failed, criterion)
    if kept is not None:
        document = json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n"
        pages = {"sweep.csv": result.to_csv().encode(), "sweep.json": document.encode(), "sweep.html": result.to_html()}
        write_together(kept, pages)
    return result


@contextlib.contextmanager
def _workers_end_too(pool: ProcessPoolExecutor) -> Iterator[None]:
    """Ends the workers, which write nothing, where this process is to end; the pool alone would wait for them.

    Raises:
        OSError: a worker was ended from outside.
    """
    try:
        yield
    except BrokenProcessPool:
        raise OSError(
            "a worker process was killed (the system does so when memory runs out: fewer jobs need less); the networks "
            "that were done are kept, and the same command goes on"
        ) from None
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in list((getattr(pool, "_processes", None) or {}).values()):
            worker.terminate()
        raise


def _one(
    name: str, settings: dict[str, Any], threads: int | None, words: Callable[[Exception], str]
) -> dict[str, Any] | str:
    """The result of one file, or why there is none."""
    if threads is not None:
        torch.set_num_threads(threads)
    reader = {key: value for key, value in settings.items() if key not in ("criterion", "folds", "seed")}
    try:
        validation, test, split = _halves(read_sets(name, **reader), settings["seed"])
        study = run_study(
            validation,
            test,
            criterion=settings["criterion"],
            folds=settings["folds"],
            seed=settings["seed"],
            resamples=0,
        )
    except (InputError, ValueError, OSError, MemoryError) as error:
        return " ".join(words(error).removeprefix(f"{name}: ").split()) or type(error).__name__
    return {
        "source": name,
        "n_classes": validation.n_classes,
        "n_validation": len(validation),
        "n_test": len(test),
        "split": split,
        "chosen": None if study.chosen is None else study.chosen.method,
        "use": study.verdict.use,
        "figures": {method: finite_or_none(value) for method, value in _figures(study).items()},
    }


def _halves(sets: dict[str, LogitSet], seed: int) -> tuple[LogitSet, LogitSet, bool]:
    if "val" in sets and "test" in sets:
        check_alike(sets["val"].source, sets["val"], sets["test"])
        return sets["val"], sets["test"], False
    (rows, *others) = sets.values()
    if others or len(rows) < 2:
        raise InputError(f"{rows.source}: expected val_* and test_*, or one set of at least 2 rows")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    first, second = order.tensor_split(2)
    return rows.rows(first, "a random half"), rows.rows(second, "the other half"), True


def _figures(study: Study) -> dict[str, dict[str, float] | None]:
    rows = {(row.method, row.criterion == "ece"): row.test for row in study.results}
    every = {
        "auto": None if study.chosen is None else study.chosen.test,
        "none": rows["none", False],
        "temperature": rows.get(("temperature", False)),
        "focal": rows.get(("focal-temperature", False)),
        "temperature, ECE": rows.get(("temperature", True)),
        "focal, ECE": rows.get(("focal-temperature", True)),
    }
    return {
        method: None if found is None else {name: found[name] for name in SCORES} for method, found in every.items()
    }


def _stamp(name: str, settings: dict[str, Any]) -> list[Any]:
    """What tells one task from another: the contents of the files. (Other files may have their size and their time.)"""
    try:
        files = [name]
        if name.lower().endswith(".npy"):
            files.append(os.fspath(labels_of_npy(name, settings.get("labels"))))
        digests = [_digest(file) for file in files]
    except (InputError, OSError):
        return []  # what is wrong the reader says
    known = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in settings.items()}
    return [__version__, digests, json.loads(json.dumps(known, sort_keys=True))]


def _digest(file: str) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def _known(place: Path | None, stamp: list[Any]) -> dict[str, Any] | None:
    """What an earlier sweep has found for the same task."""
    if place is None or not place.exists() or not stamp:
        return None
    try:
        content = json.loads(place.read_text())
    except ValueError:
        return None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("stamp") != stamp:
        return None
    network: dict[str, Any] = content["network"]
    return network


def _short_name(name: str, names: Sequence[str]) -> str:
    """The name of the file without folder and suffix; with a mark where others are called the same."""
    stem = Path(name).stem
    if sum(Path(other).stem == stem for other in names) > 1:
        return f"{stem}-{hashlib.sha256(os.path.abspath(name).encode()).hexdigest()[:6]}"
    return stem
