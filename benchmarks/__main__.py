"""python -m benchmarks: checks and times every operator and appends the results to benchmarks/results."""

import argparse
import re
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.harness import RESULTS, Row, append_rows, in_threads, keep_freed_memory, readable, recorded_medians
from benchmarks.speed import (
    calibration_grid,
    calibration_map,
    calls,
    focal_loss,
    libraries,
    linear_focal_loss,
    losses,
    package,
    sigmoid_loss,
    soft_targets,
    spline,
)
from benchmarks.targets import target_lines

BENCHMARKS = {
    "calls": calls,
    "focal_loss": focal_loss,
    "libraries": libraries,
    "linear_focal_loss": linear_focal_loss,
    "losses": losses,
    "sigmoid_loss": sigmoid_loss,
    "soft_targets": soft_targets,
    "calibration_map": calibration_map,
    "calibration_grid": calibration_grid,
    "spline": spline,
    "package": package,
}
# Suffix of cases that are timed a second time with another allocator.
KEPT = ", memory kept"


def table(rows: list[Row]) -> str:
    shown = [
        [
            row.provider,
            f"{row.median_ms:.3g}" if row.median_ms < 1 else f"{row.median_ms:.1f}",
            f"{row.low_ms:.3g} to {row.high_ms:.3g}",
            f"{row.gb_per_s:.1f}",
            f"{row.ratio_to_copy:.2f}",
            f"{row.speedup:.2f}",
            f"{row.peak_extra_mib:.1f}",
            row.note,
        ]
        for row in rows
    ]
    header = ["provider", "median ms", "quartiles", "GB/s", "of copy", "times slower", "extra MiB", ""]
    return tabulate(shown, header)


def summary(op: str, out: Path) -> str:
    """A Markdown table of the recorded medians over the runs: focalkern's time, the same in copies of the input, and
    how many times longer the others took."""
    medians, copies = recorded_medians(op, out), recorded_medians(op, out, "ratio_to_copy")
    slower = recorded_medians(op, out, "speedup")
    providers = list(dict.fromkeys(name for case in medians.values() for name in case))[1:]
    table = []
    for key, times in medians.items():
        own = times["focalkern"]
        copy = copies[key]["focalkern"]
        ratios = (f"{readable(slower[key][name])} x" if name in times else "" for name in providers)
        time = f"{own:.3g} ms" if own < 1e3 else f"{own / 1e3:.3g} s"
        table.append([*key, time, readable(copy) if copy == copy else "", *ratios])
    header = ["case", "dtype", "focalkern", "copies", *providers]
    filled = [i for i in range(len(header)) if any(row[i] for row in table)]
    table = [[row[i] for i in filled] for row in table]
    return tabulate(table, [header[i] for i in filled], tablefmt="github", disable_numparse=True)


def targets_summary(out: Path) -> str:
    """A Markdown table of the targets with the recorded values."""
    lines = [(what, bound, found, "yes" if met else "no") for what, bound, found, met in target_lines(out)]
    return tabulate(lines, ["target", "wanted", "recorded", "met"], tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes, nothing compiled: under two minutes")
    parser.add_argument("--only", choices=sorted(BENCHMARKS), action="append", help="these operators (repeatable)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    parser.add_argument("--seconds", type=float, help="time to spend on each case (default 2, quick 0.5)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--match", metavar="REGEX", help="only the cases whose 'NxC dtype' it is found in")
    parser.add_argument("--keep-memory", action="store_true", help="let glibc keep freed memory: no page faults")
    parser.add_argument("--summary", action="store_true", help="time nothing: print recorded medians and targets")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="time nothing: draw the recorded medians")
    arguments = parser.parse_args()
    if arguments.summary:
        for name in arguments.only or BENCHMARKS:
            print(f"{summary(name, arguments.out)}\n")
        print(targets_summary(arguments.out))
        return
    if arguments.plots:
        from benchmarks.plots import draw  # only this path needs matplotlib

        print("\n".join(str(path) for path in draw(arguments.out, arguments.plots)))
        return
    torch.set_num_threads(arguments.threads)
    if arguments.keep_memory:
        keep_freed_memory()
    seconds = arguments.seconds or (0.5 if arguments.quick else 2.0)
    written: set[Path] = set()
    pattern = re.compile(arguments.match or "")
    options = {"wanted": lambda case: pattern.search(case) is not None} if arguments.match else {}
    for name in arguments.only or BENCHMARKS:
        for rows in BENCHMARKS[name].run(arguments.device, arguments.quick, seconds, **options):
            for row in rows if arguments.keep_memory else ():
                row.case += KEPT
            print(f"\n{rows[0].op}, {rows[0].case}, {rows[0].dtype}, {in_threads(rows[0].threads)}")
            print(table(rows), flush=True)
            written.update(append_rows(rows, arguments.out))
    print("\nappended to " + ", ".join(str(path) for path in sorted(written)))


if __name__ == "__main__":
    main()
