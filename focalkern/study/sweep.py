"""Many networks in one go: the same comparison for each, and who wins how often."""

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from focalkern._atomic import write_atomically
from focalkern._checks import integer, one_of, path_text, short
from focalkern.files import InputError, LogitSet, read_sets
from focalkern.study import html
from focalkern.study.comparison import run_study
from focalkern.study.contest import PROPER, Proper, check_folds
from focalkern.study.record import finite_or_none
from focalkern.study.result import Study

__all__ = ["FIGURES", "METHODS", "Sweep", "sweep"]

METHODS = ("auto", "none", "temperature", "focal", "temperature, ECE", "focal, ECE")
"""The columns of the tables: what the cross-validation chooses; no calibration; both scalings by the proper loss; the
paper's, by the ECE from its grid."""

FIGURES = {"nll": "NLL", "brier": "Brier score", "ece_equal_width": "ECE (equal_width)"}

_FORMAT = 1


@dataclass(frozen=True)
class Sweep:
    """What a sweep has found.

    Attributes:
        networks: one dictionary per file, in the order that they were named: ``name``, ``source``, ``n_validation``,
            ``n_test``, ``n_classes``, ``same_rows``, ``chosen``, ``use`` (the verdict), and ``figures``, by method and
            figure.
        failed: by file, why it could not be used.
        criterion: by which the candidates were compared.

    Example:
        >>> labels = np.arange(400) % 3
        >>> np.savez("small.npz", logits=4 * np.eye(3)[(labels + (np.arange(400) % 5 == 0)) % 3], labels=labels)
        >>> found = fk.study.sweep.sweep(["small.npz"])
        >>> found.wins("nll")["temperature"]["none"], found.ranks("nll")["none"]
        (1, 6.0)
        >>> found.value(*found.networks, "none", "nll") > 0.6
        True
        >>> len(found.table("nll")), len(found.to_csv().splitlines()), found.to_html()[:15], "wins" in found.to_dict()
        (5, 7, b'<!DOCTYPE html>', True)
    """

    networks: tuple[dict[str, Any], ...]
    failed: dict[str, str]
    criterion: Proper

    def value(self, network: dict[str, Any], method: str, figure: str) -> float:
        """One figure of one network.

        Args:
            network: one of ``networks``.
            method: ``"auto"``, ``"none"``, ``"temperature"``, ``"focal"``, ``"temperature, ECE"`` or ``"focal, ECE"``.
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``, of the test rows.

        Returns:
            The figure; NaN where a method has none, infinity where it has no end.

        Raises:
            KeyError: no such figure.
        """
        figures = network["figures"].get(method)
        if figures is None:
            return math.nan
        return math.inf if figures[figure] is None else float(figures[figure])

    def ranks(self, figure: str) -> dict[str, float]:
        """The mean rank of every method over the networks, 1 for the lowest; equal ones share the mean of theirs.

        Args:
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``.

        Returns:
            By method, its mean rank.

        Raises:
            KeyError: no such figure.
        """
        total = dict.fromkeys(METHODS, 0.0)
        for network in self.networks:
            values = {method: self.value(network, method, figure) for method in METHODS}
            for method, value in values.items():
                below = sum(other < value for other in values.values())
                equal = sum(other == value for other in values.values())
                total[method] += below + (equal + 1) / 2 if not math.isnan(value) else len(METHODS)
        return {method: rank / max(1, len(self.networks)) for method, rank in total.items()}

    def wins(self, figure: str) -> dict[str, dict[str, int]]:
        """How often one method is better than another.

        Args:
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``.

        Returns:
            By method a and method b, on how many networks a is lower than b.

        Raises:
            KeyError: no such figure.
        """
        return {
            one: {
                other: sum(
                    self.value(network, one, figure) < self.value(network, other, figure) for network in self.networks
                )
                for other in METHODS
            }
            for one in METHODS
        }

    def table(self, figure: str) -> list[list[str]]:
        """A figure as a table: a row per network, then means, mean ranks, and paired wins.

        Args:
            figure: ``"nll"``, ``"brier"`` or ``"ece_equal_width"``.

        Returns:
            Rows of cells under ``["network", *METHODS]``: the networks, the mean of those where every figure is finite,
            the mean ranks, and for each of none and temperature scaling on how many networks a method is lower.

        Raises:
            KeyError: no such figure.
        """
        rows = [
            [network["name"], *(_cell(self.value(network, method, figure)) for method in METHODS)]
            for network in self.networks
        ]
        finite = [
            network
            for network in self.networks
            if all(math.isfinite(self.value(network, method, figure)) for method in METHODS)
        ]
        means = [
            sum(self.value(network, method, figure) for network in finite) / len(finite) if finite else math.nan
            for method in METHODS
        ]
        ranks, wins = self.ranks(figure), self.wins(figure)
        everywhere = len(finite) == len(self.networks)
        rows.append(["mean" if everywhere else f"mean of the {len(finite)} that are finite", *map(_cell, means)])
        rows.append(["mean rank", *(f"{ranks[method]:.2f}" for method in METHODS)])
        for other in ("none", "temperature"):
            rows.append(
                [
                    f"lower than {other}",
                    *(
                        "" if method == other else f"{wins[method][other]} of {len(self.networks)}"
                        for method in METHODS
                    ),
                ]
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, as ``json.dumps`` takes it.

        Returns:
            Networks with their figures, mean ranks, wins, and files that failed. A figure that is infinite is None.
        """
        from focalkern import __version__  # which imports this module

        return {
            "focalkern": __version__,
            "criterion": self.criterion,
            "methods": list(METHODS),
            "networks": list(self.networks),
            "mean_ranks": {figure: self.ranks(figure) for figure in FIGURES},
            "wins": {figure: self.wins(figure) for figure in FIGURES},
            "failed": self.failed,
        }

    def to_csv(self) -> str:
        """The figures as a .csv file.

        Returns:
            One line per network and method, under a header.
        """
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["network", "classes", "validation_rows", "test_rows", "method", "chosen", *FIGURES])
        for network in self.networks:
            for method in METHODS:
                values = [self.value(network, method, figure) for figure in FIGURES]
                writer.writerow(
                    [
                        network["name"],
                        network["n_classes"],
                        network["n_validation"],
                        network["n_test"],
                        method,
                        network["chosen"] if method == "auto" else "",
                        *("" if math.isnan(value) else repr(value) for value in values),
                    ]
                )
        return stream.getvalue()

    def to_html(self) -> bytes:
        """The tables as a page that needs nothing but itself.

        Returns:
            HTML, in UTF-8.
        """
        from focalkern import __version__  # which imports this module

        head = ["network", *METHODS]
        sections = [
            html.section(heading, html.table(head, self.table(figure), caption="Test rows; lower is better."))
            for figure, heading in FIGURES.items()
        ]
        verdicts = [[network["name"], network["use"]] for network in self.networks]
        sections.append(html.section("What to use", html.table(["network", "verdict"], verdicts, text=True)))
        if self.failed:
            failed = [f"{name}: {reason}" for name, reason in self.failed.items()]
            sections.append(html.section("Not used", html.unordered(failed)))
        lead = html.paragraph(f"{len(self.networks)} networks; focalkern {__version__}", "quiet") + html.paragraph(
            "auto is what the cross-validation on the validation rows chooses; none, no calibration; temperature and "
            f"focal, temperature and focal temperature scaling by {self.criterion}; ECE, by the ECE from the paper's "
            "grid. Equal figures share a rank.",
            "lead",
        )
        foot = html.paragraph(f"focalkern {__version__}, torch {torch.__version__}.")
        page = html.page("Sweep", lead=lead, sections=sections, foot=foot, generator=f"focalkern {__version__}")
        return page


def sweep(
    files: Sequence[str],
    *,
    folder: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    criterion: Proper = "nll",
    folds: int = 5,
    seed: int = 0,
    done: Callable[[str, bool], None] = lambda name, fresh: None,
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
            found[name] = known
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
            keep(name, _one(name, settings, None))
    else:
        threads = max(1, torch.get_num_threads() // jobs)
        with ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn")) as pool:
            # The largest first, so that none of them is left at the end.
            order = sorted(tasks, key=lambda name: -os.path.getsize(name) if os.path.exists(name) else 0)
            running = {pool.submit(_one, name, settings, threads): name for name in order}
            for future in as_completed(running):
                keep(running[future], future.result())
    result = Sweep(tuple(found[name] for name in names if name in found), failed, criterion)
    if kept is not None:
        document = json.dumps(result.to_dict(), indent=2, allow_nan=False) + "\n"
        write_atomically(kept / "sweep.csv", result.to_csv().encode())
        write_atomically(kept / "sweep.json", document.encode())
        write_atomically(kept / "sweep.html", result.to_html())
    return result


def _one(name: str, settings: dict[str, Any], threads: int | None) -> dict[str, Any] | str:
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
        return " ".join(str(error).removeprefix(f"{name}: ").split()) or type(error).__name__
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
        return sets["val"], sets["test"], False
    (rows, *others) = sets.values()
    if others or len(rows) < 2:
        raise InputError(f"{rows.source}: expected val_* and test_*, or one set of at least 2 rows")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    first, second = order.tensor_split(2)
    return rows.rows(first, "a random half"), rows.rows(second, "the other half"), True


def _figures(study: Study) -> dict[str, dict[str, float] | None]:
    rows = {(row.method, row.criterion == "ece"): row.test for row in study.choices}
    every = {
        "auto": None if study.chosen is None else study.chosen.test,
        "none": rows["none", False],
        "temperature": rows.get(("temperature", False)),
        "focal": rows.get(("focal-temperature", False)),
        "temperature, ECE": rows.get(("temperature", True)),
        "focal, ECE": rows.get(("focal-temperature", True)),
    }
    return {
        method: None if found is None else {name: found[name] for name in FIGURES} for method, found in every.items()
    }


def _stamp(name: str, settings: dict[str, Any]) -> list[Any]:
    """What tells one task from another, without reading the file."""
    from focalkern import __version__  # which imports this module

    if not os.path.exists(name):
        return []
    about = os.stat(name)
    return [__version__, about.st_size, about.st_mtime_ns, json.loads(json.dumps(settings, sort_keys=True))]


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


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"
