"""Memory that ``FocalTemperatureScaling().fit`` takes beyond its input.

``python -m benchmarks.speed.fit_memory`` fits float32 logits of several sizes with one thread and records the peak
resident memory during the call, minus the memory before it.
"""

import argparse
import datetime
from pathlib import Path

import torch
from tabulate import tabulate

import focalkern as fk
from benchmarks.harness import RESULTS, commit, device_name, peak_extra_mib
from benchmarks.speed.streaming import write

# Rows, classes.
CASES = ((100_000, 10), (20_000, 100), (100_000, 100), (20_000, 1000))
CRITERIA = ("nll", "brier")


def measure(criterion: str, rows: int, classes: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(rows)
    target = torch.randint(classes, (rows,), generator=generator)
    logits = 2 * torch.randn(rows, classes, generator=generator)
    logits[torch.arange(rows), target] += 3
    calibrator = fk.FocalTemperatureScaling(criterion=criterion)
    calibrator.fit(logits[:1000].clone(), target[:1000].clone())  # loads modules and threads before the measurement
    size = logits.numel() * 4 / 2**20
    peak = peak_extra_mib(lambda: calibrator.fit(logits, target))
    return {
        "criterion": criterion,
        "rows": rows,
        "classes": classes,
        "input_mib": round(size, 2),
        "peak_extra_mib": round(peak, 2),
        "times_input": round(peak / size, 2),
        "device": device_name(),
        "torch": torch.__version__,
        "focalkern": fk.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.fit_memory", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [measure(criterion, *case) for criterion in CRITERIA for case in CASES]
    write(found, arguments.out / f"fit_memory_{datetime.date.today().isoformat()}.csv")
    print(tabulate(found, headers="keys", tablefmt="github"))


if __name__ == "__main__":
    main()
