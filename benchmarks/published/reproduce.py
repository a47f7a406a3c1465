"""python -m benchmarks.published.reproduce: the published values of the papers and the values that this project
computes.

Without options: the statements of [1] and [2] about the focal loss and its calibration map, which need no data, in
under a minute. With ``--logits DIR``: the tables about the networks of [2], from the files of their logits. Every line
has the published value, the computed one, their difference and the source. A published value that this script does not
have is called "not at hand"; the line then has only the computed value.

The exit code is 1 if a statement fails, or a figure differs from its printed digits where none was known to differ.

[1] Komisarenko & Kull, Improving Calibration by Relating Focal Loss, Temperature Scaling, and Properness, ECAI 2024
    (arXiv 2408.11598)
[2] Mukhoti et al., Calibrating Deep Neural Networks using Focal Loss, NeurIPS 2020 (arXiv 2002.09437)
"""

import argparse
import csv
import itertools
import sys
from dataclasses import astuple, fields
from pathlib import Path

import torch
from tabulate import tabulate

import focalkern as fk
from benchmarks.harness import RESULTS, commit
from benchmarks.published.lines import Line
from benchmarks.published.network_tables import networks
from benchmarks.published.statement_pictures import draw
from benchmarks.published.statements import STATEMENTS


def write_csv(lines: list[Line], path: Path) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*(field.name for field in fields(Line)), "focalkern", "torch", "commit"])
        writer.writerows([*astuple(line), fk.__version__, torch.__version__, commit()] for line in lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--logits", type=Path, metavar="DIR", help="the networks' logits, NAME.npz each; only these")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "reproduce", metavar="DIR", help="for the CSV file and the pictures"
    )
    parser.add_argument("--no-pictures", action="store_true")
    options = parser.parse_args(arguments)
    if options.logits is None:
        lines = [line for part in STATEMENTS for line in part()]
    else:
        lines = list(networks(options.logits))
    head = ["", "", "published", "computed", "difference", "", "source"]
    for figure, group in itertools.groupby(sorted(lines, key=lambda line: line.figure), lambda line: line.figure):
        rows = [astuple(line)[1:] for line in group]
        print(
            tabulate(
                rows, [figure, *head[2:]], disable_numparse=True, colalign=("left", *["right"] * 3, "left", "left")
            )
        )
        print()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ("statements.csv" if options.logits is None else "networks.csv")
    write_csv(lines, path)
    written = [path]
    if options.logits is None and not options.no_pictures:
        written += draw(options.out)
    print(f"written: {', '.join(map(str, written))}")
    counts = {
        verdict: sum(line.verdict == verdict for line in lines)
        for verdict in dict.fromkeys(line.verdict for line in lines)
    }
    print("; ".join(f"{verdict or 'without a verdict'}: {count}" for verdict, count in counts.items()))
    return 0 if all(line.good for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
