"""python -m benchmarks: checks and times every operator and appends the results to benchmarks/results."""

import argparse
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks import bench_calibration_grid, bench_calibration_map, bench_focal_loss, bench_losses
from benchmarks.harness import RESULTS, Row, append_rows, recorded_medians

BENCHMARKS = {
    "focal_loss": bench_focal_loss,
    "losses": bench_losses,
    "calibration_map": bench_calibration_map,
    "calibration_grid": bench_calibration_grid,
}


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
    """A Markdown table of the recorded medians: focalkern's time, and how many times longer the others took."""
    medians = recorded_medians(op, out)
    providers = list(dict.fromkeys(name for case in medians.values() for name in case if name != "focalkern"))
    table = []
    for (case, dtype), times in medians.items():
        own = times["focalkern"]
        ratios = (f"{times[name] / own:.3g} x" if name in times else "" for name in providers)
        table.append([case, dtype, f"{own:.3g} ms" if own < 1e3 else f"{own / 1e3:.3g} s", *ratios])
    return tabulate(table, ["case", "dtype", "focalkern", *providers], tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes, nothing compiled: under two minutes")
    parser.add_argument("--only", choices=sorted(BENCHMARKS), action="append", help="these operators (repeatable)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    parser.add_argument("--seconds", type=float, help="time to spend on each case (default 2, quick 0.5)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--summary", action="store_true", help="time nothing: print the recorded medians")
    arguments = parser.parse_args()
    if arguments.summary:
        for name in arguments.only or BENCHMARKS:
            print(f"{summary(name, arguments.out)}\n")
        return
    torch.set_num_threads(arguments.threads)
    seconds = arguments.seconds or (0.5 if arguments.quick else 2.0)
    written: set[Path] = set()
    for name in arguments.only or BENCHMARKS:
        for rows in BENCHMARKS[name].run(arguments.device, arguments.quick, seconds):
            print(f"\n{rows[0].op}, {rows[0].case}, {rows[0].dtype}, {rows[0].threads} threads")
            print(table(rows), flush=True)
            written.update(append_rows(rows, arguments.out))
    print("\nappended to " + ", ".join(str(path) for path in sorted(written)))


if __name__ == "__main__":
    main()
