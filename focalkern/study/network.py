"""One network of a sweep: its record, and the fingerprint of the task."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from focalkern._checks import count_rows
from focalkern._devices import cpu_by_default, one_thread
from focalkern._version import __version__
from focalkern.files import InputError, LogitSet, read_sets
from focalkern.files.paths import fingerprint, is_url, located, suffix_of
from focalkern.files.read import labels_of_npy
from focalkern.study.compare import run_study
from focalkern.study.report.export import finite_or_none
from focalkern.study.report.sweep import SCORES
from focalkern.study.split import check_alike
from focalkern.study.study import Study

__all__ = ["Task", "record_of", "stamp_of"]

_STUDY = ("criterion", "folds", "seed")
_NO_READER = (*_STUDY, "all")  # the settings that are not options of the reader


class Task:
    """The task of a sweep: maps files to [(record, stamp)]. It is a class, because pickle rejects nested functions.

    Args:
        settings, words: as :func:`run_sweep`.
        folder: folder of relative paths, for workers with another working directory.
    """

    def __init__(self, settings: dict[str, Any], words: Callable[[Exception], str], folder: str | None) -> None:
        self._settings, self._words, self._folder = settings, words, folder
        if folder is not None and settings["labels"] is not None:
            self._settings = {**settings, "labels": _in_folder(folder, settings["labels"])}

        self._name = uuid.uuid4().hex

    def __dask_tokenize__(self) -> str:
        """A name for dask, which would otherwise pickle the settings of every task to compare functions."""
        return self._name

    def __call__(self, names: Sequence[str], attempt: int = 0) -> list[tuple[dict[str, Any], list[Any]]]:
        found = []
        for name in names:
            place = _in_folder(self._folder, name)
            # Before the computation: a file that changes meanwhile is a new task.
            stamp = stamp_of(place, self._settings)
            found.append(({**record_of(place, self._settings, self._words), "path": name}, stamp))
        return found


def _in_folder(folder: str | None, name: str) -> str:
    return name if folder is None or is_url(name) else os.path.join(folder, name)


@cpu_by_default()
def record_of(name: str, settings: Mapping[str, Any], words: Callable[[Exception], str]) -> dict[str, Any]:
    """The record of one file, with its result or its error."""
    record = {"path": name, "error": None, "criterion": settings["criterion"]}
    reader = {key: value for key, value in settings.items() if key not in _NO_READER}
    study_options = {key: settings[key] for key in _STUDY}
    try:
        with one_thread():  # with several, some sums would round differently
            validation, test, split = _halves(read_sets(name, **reader), settings["seed"])
            study = run_study(validation, test, resamples=0, brief=True, paper=settings["all"], **study_options)
    except Exception as error:  # an error in one file must not stop the others
        expected = isinstance(error, InputError | ValueError | OSError)
        reason = " ".join(words(error).removeprefix(f"{name}: ").split())
        return {**record, "error": reason if expected and reason else f"{type(error).__name__} {reason}".strip()}
    return {
        **record,
        "n_classes": validation.n_classes,
        "n_validation": len(validation),
        "n_test": len(test),
        "split": split,
        "chosen": None if study.chosen is None else study.chosen.method,
        "use": f"check the data first; {study.verdict.use}" if study.verdict.check_data else study.verdict.use,
        "figures": {method: finite_or_none(value) for method, value in _figures(study, settings["all"]).items()},
    }


def _halves(sets: dict[str, LogitSet], seed: int) -> tuple[LogitSet, LogitSet, bool]:
    if "val" in sets and "test" in sets:
        check_alike(sets["val"].source, sets["val"], sets["test"])
        return sets["val"], sets["test"], False
    (rows, *others) = sets.values()
    if others or len(rows) < 2:
        found = f"{len(sets)} sets" if others else count_rows(len(rows))
        raise InputError(f"{rows.source}: expected val_* and test_*, or one set of at least 2 rows, found {found}")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    first, second = order.tensor_split(2)
    return rows.rows(first, "a random half"), rows.rows(second, "the other half"), True


def _figures(study: Study, all: bool) -> dict[str, dict[str, float] | None]:
    rows = {(row.method, row.criterion == "ece"): row.test for row in study.results}
    every = {
        "auto": None if study.chosen is None else study.chosen.test,
        "none": rows["none", False],
        "temperature": rows.get(("temperature", False)),
        "focal": rows.get(("focal-temperature", False)),
    }
    if all:
        every["temperature, ECE"] = rows.get(("temperature", True))
        every["focal, ECE"] = rows.get(("focal-temperature", True))
    return {
        method: None if found is None else {name: found[name] for name in SCORES} for method, found in every.items()
    }


def stamp_of(name: str, settings: Mapping[str, Any]) -> list[Any]:
    """A fingerprint of a task by the contents of its files, because size and time do not identify a file."""
    options = settings["storage_options"]
    try:
        files = [located(name, options)]
        if suffix_of(name) == ".npy":
            labels = settings["labels"]
            files.append(labels_of_npy(files[0], None if labels is None else located(labels, options)))
        known = {key: value for key, value in settings.items() if key not in ("labels", "storage_options")}
        return [__version__, [fingerprint(file) for file in files], known]
    except (InputError, OSError):
        return []  # the reader reports the error
