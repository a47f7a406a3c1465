"""``focalkern sweep``: compare the calibrators on many networks."""

import argparse
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from focalkern._checks import counted
from focalkern._progress import ProgressBar
from focalkern._types import INPUT_KINDS, PROPER
from focalkern.cli._engines import engine
from focalkern.cli._notes import print_wrapped
from focalkern.cli._options import (
    add_ignore_index,
    add_storage_options,
    at_least_one,
    check_out_folder,
    in_options,
    path_of,
    seed,
)
from focalkern.files import InputError
from focalkern.files.paths import expanded
from focalkern.study.sweep import SCORES, Sweep, report_files, run_sweep, sweep_settings

__all__ = ["add_parser"]

_ENDS = 10  # number of networks shown from each end, if more than twice as many exist
_WIDEST = 60  # characters of a network's name in one line of the table
_LINES = 100  # largest number of networks with one progress line each


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "sweep",
        help="compare the calibrators on many networks",
        description="Runs calibrate for every file and prints a table of networks by methods: test\n"
        "NLL and ECE, means, mean ranks, and how many networks have a lower value than\n"
        "without calibration and than with temperature scaling.",
        epilog="columns:\n"
        "  auto                the choice of the cross-validation\n"
        "  none                no calibration\n"
        "  temperature, focal  the two scalings by the criterion\n"
        "  ... ECE             with --all: the lowest ECE of the paper's grid\n\n"
        "example:\n"
        "  focalkern sweep networks/*.npz --report sweep --jobs 2\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="files in the formats of calibrate, a folder, a quoted pattern, @LIST (a text file with a name per "
        "line), or URLs. A file with one set is split: a random half is for validation",
    )
    add_storage_options(parser)
    parser.add_argument(
        "--report",
        type=path_of,
        metavar="DIR",
        help="write sweep.html, sweep.csv, sweep.json and, with pyarrow, sweep.parquet. Each network is saved when it "
        "is done, so the same command continues after an interruption",
    )
    parser.add_argument("--jobs", type=at_least_one, metavar="N", help="number of processes (default: number of cores)")
    parser.add_argument(
        "--engine",
        default="local",
        metavar="ADDRESS",
        help="engine that computes: local (default), dask://HOST:PORT, ray://HOST:PORT or ray://auto; its workers need "
        "access to the files and to focalkern",
    )
    parser.add_argument("--criterion", choices=PROPER, default="nll", help="loss that chooses (default nll)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the folds and of the halves (default 0)")
    parser.add_argument("--input-kind", choices=INPUT_KINDS, help="kind of the values (default: from the names)")
    parser.add_argument("--logits-key", metavar="NAME", help="name of the array of logits or probabilities")
    parser.add_argument("--labels-key", metavar="NAME", help="name of the array of labels")
    add_ignore_index(parser)
    parser.add_argument("--all", action="store_true", help="also the ECE-optimal scalings, which take longer")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from tabulate import tabulate  # an optional dependency; main reports its absence

    if arguments.report is not None:
        check_out_folder(arguments.report, "--report")
    if arguments.engine != "local" and arguments.jobs is not None:
        raise InputError(f"--jobs: expected none with --engine {arguments.engine}, which has its own workers")
    settings = sweep_settings(
        criterion=arguments.criterion,
        seed=arguments.seed,
        input_kind=arguments.input_kind,
        logits_key=arguments.logits_key,
        labels_key=arguments.labels_key,
        ignore_index=arguments.ignore_index,
        storage_options=arguments.storage_options,
        all=arguments.all,
    )
    names = expanded(arguments.files, arguments.storage_options)
    with engine(arguments.engine) as executor, _Progress(len(names)) as progress:
        result = run_sweep(
            names,
            settings,
            folder=arguments.report,
            jobs=arguments.jobs or (len(os.sched_getaffinity(0)) if executor is None else 1),
            executor=executor,
            done=progress,
            words=in_options,
        )
    if not result.networks:
        print(f"No network could be compared: {len(result.failed)} of {counted(len(names), 'file')} failed.")
    parts = _best_and_worst(result)
    if len(parts) > 1:
        where = "sweep.csv has all" if arguments.report is not None else "--report DIR writes all"
        print(
            f"{len(result.networks)} networks: the {_ENDS} whose NLL falls most from none to auto, and the {_ENDS} "
            f"whose NLL falls least\n({where})\n"
        )
    heads = [method.replace(", ", ",\n") for method in result.methods]  # two lines, to leave room for long names
    for figure, heading in SCORES.items():
        if result.networks and figure != "brier":
            rows = result.table(figure)
            blank = [""] * len(rows[0])
            body = [row for part in parts for row in (*(rows[place] for place in part), blank)]
            body += rows[len(result.networks) :]
            columns = {
                "colalign": ("left", *["right"] * len(heads)),
                "maxcolwidths": [_WIDEST, *[None] * len(heads)],
            }
            print(f"{heading}, test rows\n")
            print(tabulate(body, headers=["", *heads], tablefmt="simple", disable_numparse=True, **columns))
            print()
    for network in (result.networks[place] for part in parts for place in part):
        infinite = math.isinf(result.value(network, "auto", "nll")) and arguments.criterion == "nll"
        hint = "; its NLL cannot be compared: --criterion brier" if infinite else ""
        print_wrapped(f"{network['name']}: {network['use']}{hint}")
    if arguments.report is not None:
        print(f"\nReport: {arguments.report}: {', '.join(report_files())}")
    for name, reason in list(result.failed.items())[: 2 * _ENDS]:
        print(f"focalkern sweep: {name}: {reason}", file=sys.stderr)
    if len(result.failed) > 2 * _ENDS:
        print(f"focalkern sweep: {len(result.failed)} of {len(names)} files failed", file=sys.stderr)
    return 2 if result.failed else 0


def _best_and_worst(result: Sweep) -> list[list[int]]:
    """Indices of the shown networks, in parts: all, or both ends by the change of the NLL from none to auto."""
    places = list(range(len(result.networks)))
    if len(places) <= 2 * _ENDS:
        return [places]

    def change(place: int) -> float:
        network = result.networks[place]
        found = result.value(network, "auto", "nll") - result.value(network, "none", "nll")
        return 0.0 if math.isnan(found) else found

    places.sort(key=change)
    return [places[:_ENDS], places[-_ENDS:]]


class _Progress:
    """Progress: a bar in a terminal; otherwise one line per network or, for many networks, one line per percent with
    speed and remaining time.

    Args:
        total: number of networks.
        clock: function that returns the time in seconds.
        bar: whether stderr is a terminal and shows a bar.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic, bar: bool | None = None) -> None:
        self._total, self._over, self._fresh = total, 0, 0
        self._clock, self._begin = clock, clock()
        self._bar: ProgressBar | None = None
        if bar is None:
            bar = sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
        if bar:
            self._bar = ProgressBar(total, "sweep", " networks", wanted=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def __call__(self, name: str, fresh: bool) -> None:
        self._over += 1
        self._fresh += fresh
        if self._bar is not None:
            self._bar.update(1)
        elif self._total <= _LINES:
            self._say(f"{self._over} of {self._total}: {name}{'' if fresh else ' (known)'}")
        elif self._over * 100 // self._total > (self._over - 1) * 100 // self._total:
            seconds = self._clock() - self._begin
            line = f"{self._over} of {self._total} networks"
            if self._fresh and seconds > 0:
                rate = self._fresh / seconds
                left = (self._total - self._over) / rate
                line += f", {rate:.3g} per second, {_duration(left)} left"
            self._say(line)

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
