"""Memory of ``focalkern calibrate`` by the number of rows, streamed and in memory.

``python -m benchmarks.speed.streaming`` writes files of random logits, calibrates each in a separate process, and
records the peak resident memory of that process. The seconds are of one run each on a shared machine. ``--summary``
prints the last records as a table.
"""

import argparse
import csv
import datetime
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate

import focalkern as fk
from benchmarks.harness import RESULTS, commit, device_name

SHARD_BYTES = 64 << 20
# name: (classes, dtype, rows, options of the search, whether it also runs in memory)
CASES = {
    "10 classes": (10, "float32", (1 << 17, 1 << 19, 1 << 21), "1 1:2:1", True),
    "1000 classes": (1000, "float32", (1 << 14, 1 << 16, 1 << 17), "1 1:2:1", True),
    "128256 classes": (128_256, "bfloat16", (512, 2048), "1 1:2:1", False),
    "10 classes, all 5000 cells": (10, "float32", (5_000, 20_000, 80_000), "", True),
}
# The process reports its own peak; measured by its parent, it would include the parent's memory before the start.
CHILD = """
import sys
from focalkern.cli import main
code = main(sys.argv[1:])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) / 1024, file=sys.stderr)
sys.exit(code)
"""


def write_shards(folder: Path, rows: int, n_classes: int, dtype: str) -> tuple[str, float]:
    """Files of logits of a model that is often right, and over-confident; their pattern and size in MiB."""
    generator = torch.Generator().manual_seed(rows)
    at_once = max(1, SHARD_BYTES // (n_classes * getattr(torch, dtype).itemsize))
    for number, first in enumerate(range(0, rows, at_once)):
        n = min(at_once, rows - first)
        target = torch.randint(n_classes, (n,), generator=generator)
        logits = 2 * torch.randn(n, n_classes, generator=generator)
        logits[torch.arange(n), target] += 1.5 * math.log(n_classes)
        if dtype == "bfloat16":  # which .npy does not have
            from safetensors.torch import save_file

            save_file({"logits": logits.bfloat16(), "labels": target}, folder / f"val-{number}.safetensors")
        else:
            np.save(folder / f"val_logits-{number}.npy", logits.numpy())
            np.save(folder / f"val_labels-{number}.npy", target.numpy())
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    return str(folder / ("val-*.safetensors" if dtype == "bfloat16" else "val_logits-*.npy")), size


def calibrate(files: str, search: str) -> tuple[float, float]:
    """Peak resident memory in MiB and seconds of one run."""
    options = ["--bootstrap", "0", "--json"]
    if search:
        gammas, temperatures = search.split()
        options += [f"--gammas={gammas}", "--temperatures", temperatures]
    commit()  # a copy, so that later edits do not affect it
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CHILD, "calibrate", files, *options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stderr.split()[-1]), time.monotonic() - start


def measure(name: str, rows: int) -> list[dict[str, object]]:
    n_classes, dtype, _, search, in_memory = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        pattern, size = write_shards(Path(folder), rows, n_classes, dtype)
        ways = {"streamed": pattern}
        # Rows that fit in memory; in memory they exist in float64, some of them more than once.
        if in_memory and size < 1100:
            for kind in ("logits", "labels"):
                parts = sorted(Path(folder).glob(f"val_{kind}-*.npy"))
                np.save(Path(folder) / f"{kind}.npy", np.concatenate([np.load(part) for part in parts]))
            ways["in memory"] = str(Path(folder) / "logits.npy")
        found = []
        for way, files in ways.items():
            peak, seconds = calibrate(files, search)
            found.append(
                {
                    "case": name,
                    "rows": rows,
                    "classes": n_classes,
                    "dtype": dtype,
                    "way": way,
                    "data_mib": size,
                    "peak_rss_mib": peak,
                    "seconds": seconds,
                    "device": device_name(),
                    "threads": torch.get_num_threads(),
                    "torch": torch.__version__,
                    "focalkern": fk.__version__,
                    "commit": commit(),
                    "date": datetime.date.today().isoformat(),
                }
            )
            print(f"{name}, {rows} rows, {way}: {peak:.0f} MiB, {seconds:.1f} s", flush=True)
    return found


def write(found: list[dict[str, object]], path: Path) -> None:
    new = not path.exists()
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, found[0], lineterminator="\n")
        if new:
            writer.writeheader()
        for one in found:
            writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in one.items()})


def summary(out: Path = RESULTS) -> str:
    """A Markdown table of the last records."""
    files = sorted(out.glob("streaming_memory_*.csv"))
    if not files:
        return f"nothing recorded in {out}"
    with files[-1].open() as stream:
        records = list(csv.DictReader(stream))
    table = []
    for one in records:
        if one["way"] != "streamed":
            continue
        key = one["case"], one["rows"]
        whole = next((other for other in records if (other["case"], other["rows"]) == key and other is not one), None)
        memory = f"{float(whole['peak_rss_mib']):,.0f} MiB" if whole else ""
        table.append(
            [
                f"{int(one['rows']):,} x {one['case']}, {one['dtype']}",
                f"{float(one['data_mib']):,.0f} MiB",
                f"{float(one['peak_rss_mib']):,.0f} MiB",
                memory,
            ]
        )
    header = ["rows", "files", "peak, streamed", "peak, in memory"]
    return tabulate(table, header, tablefmt="github", colalign=("left", "right", "right", "right"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.streaming", description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="these cases (repeatable)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("--summary", action="store_true", help="measure nothing: print the last records")
    arguments = parser.parse_args()
    if arguments.summary:
        print(summary(arguments.out))
        return
    path = arguments.out / f"streaming_memory_{datetime.date.today().isoformat()}.csv"
    for name in arguments.case or CASES:
        for rows in CASES[name][2]:
            write(measure(name, rows), path)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
