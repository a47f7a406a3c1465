"""``focalkern sweep``: many networks in one go."""

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

from focalkern.calibrators._selection import PROPER
from focalkern.cli._engines import engine
from focalkern.cli._notes import print_wrapped
from focalkern.cli._options import at_least_one, check_out_folder, in_options, seed
from focalkern.files import InputError
from focalkern.study.sweep import METHODS, SCORES, run_sweep, sweep_settings

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "sweep",
        help="compare the calibrators on many networks",
        description="Does what calibrate does for every file and prints networks by methods: test NLL and ECE, means, "
        "mean ranks, and on how many networks a method is lower than no calibration and than temperature scaling.",
        epilog="columns: auto, what the cross-validation chooses; none, no calibration; temperature and focal, both "
        "scalings by the criterion; ECE, by the ECE from the paper's grid.\n\nexample:\n"
        "  focalkern sweep networks/*.npz --report sweep --jobs 2\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="as calibrate reads them; of a file with one set a random half is for validation",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="write sweep.html, sweep.csv and sweep.json, and every network as soon as it is done: the same command "
        "goes on where it was stopped",
    )
    parser.add_argument(
        "--jobs", type=at_least_one, metavar="N", help="processes (default: as many as there are cores)"
    )
    parser.add_argument(
        "--engine",
        default="local",
        metavar="ADDRESS",
        help="who computes: local (default), dask://HOST:PORT, ray://HOST:PORT or ray://auto; its workers must find "
        "the files and focalkern",
    )
    parser.add_argument("--criterion", choices=PROPER, default="nll", help="by which is chosen (default nll)")
    parser.add_argument("--seed", type=seed, default=0, help="of the folds and of the halves (default 0)")
    parser.add_argument("--input-kind", choices=("logits", "probs"), help="what the files hold, where names do not say")
    parser.add_argument("--logits-key", metavar="NAME", help="the array of the logits or probabilities")
    parser.add_argument("--labels-key", metavar="NAME", help="the array of the labels")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from tabulate import tabulate  # an extra; its absence is said by main

    if arguments.report is not None:
        check_out_folder(arguments.report, "--report")
    total = len(set(arguments.files))
    over = 0

    def done(name: str, fresh: bool) -> None:
        nonlocal over
        over += 1
        print(f"{over} of {total}: {name}{'' if fresh else ' (known)'}", file=sys.stderr)

    if arguments.engine != "local" and arguments.jobs is not None:
        raise InputError(f"--jobs: expected none with --engine {arguments.engine}, which has its own workers")
    settings = sweep_settings(
        criterion=arguments.criterion,
        seed=arguments.seed,
        input_kind=arguments.input_kind,
        logits_key=arguments.logits_key,
        labels_key=arguments.labels_key,
    )
    with engine(arguments.engine) as executor:
        result = run_sweep(
            list(dict.fromkeys(arguments.files)),
            settings,
            folder=arguments.report,
            jobs=arguments.jobs or (len(os.sched_getaffinity(0)) if executor is None else 1),
            executor=executor,
            done=done,
            words=in_options,
        )
    heads = [method.replace(", ", ",\n") for method in METHODS]  # two lines, so that there is room for long names
    for figure, heading in SCORES.items():
        if result.networks and figure != "brier":
            rows = result.table(figure)
            body = [*rows[: len(result.networks)], [""] * len(rows[0]), *rows[len(result.networks) :]]
            columns = ("left", *["right"] * len(METHODS))
            print(f"{heading}, test rows\n")
            print(tabulate(body, headers=["", *heads], tablefmt="simple", disable_numparse=True, colalign=columns))
            print()
    for network in result.networks:
        infinite = math.isinf(result.value(network, "auto", "nll")) and arguments.criterion == "nll"
        hint = "; its NLL cannot be compared: --criterion brier" if infinite else ""
        print_wrapped(f"{network['name']}: {network['use']}{hint}")
    if arguments.report is not None:
        print(f"\nReport: {arguments.report}: sweep.html, sweep.csv, sweep.json")
    for name, reason in result.failed.items():
        print(f"focalkern sweep: {name}: {reason}", file=sys.stderr)
    return 2 if result.failed else 0
