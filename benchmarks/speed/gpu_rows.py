"""Times on a GPU as rows of a result file, beside a copy and beside the counted instructions.

Times are medians of CUDA events (triton.testing.do_bench, which empties the cache between calls).
"""

import csv
import datetime
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.harness import commit, device_name

BYTES = 2**28  # of the logits of a case: several times the cache of any GPU


@dataclass
class GpuRow:
    op: str
    case: str
    dtype: str
    provider: str
    median_us: float = float("nan")
    gb_per_s: float = float("nan")
    of_copy: float = float("nan")  # bytes per second over those of a copy of 256 MiB in the same process
    ratio: float = float("nan")  # median over focalkern's
    target: str = ""
    met: str = ""  # yes or no, if there is a target
    note: str = ""
    device: str = field(default_factory=lambda: device_name("cuda"))
    cuda: str = str(torch.version.cuda)  # before the field that shadows the module
    torch: str = torch.__version__
    commit: str = field(default_factory=commit)
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())


@dataclass
class Comparison:
    """The counts of a kernel with its measurements."""

    op: str
    case: str
    dtype: str
    pipes: float  # time of the busiest pipe over that of the memory (kernel_counts.csv, this GPU's copy speed)
    expected_of_copy: float  # the fraction of a copy's speed that the pipes allow: 1 at most
    simulated_of_copy: float  # from the rough model of kernel_counts --cycles; NaN if the model has no result
    of_copy: float  # measured
    measured_over_expected: float


Providers = dict[str, Callable[[], object] | str]  # a string gives the reason why there is none


def median_us(function: Callable[[], object]) -> float:
    from triton.testing import do_bench

    function()
    first = _ms(function)
    if first > 100:  # do_bench would call it eight times, and the cache does not matter
        return 1e3 * statistics.median([first, _ms(function), _ms(function)])
    return 1e3 * do_bench(function, warmup=10, rep=40, return_mode="median")


def _ms(function: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def copy_gb_per_s() -> float:
    source = torch.randn(BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * BYTES / median_us(lambda: target.copy_(source)) / 1e3


def timed(
    op: str,
    case: str,
    dtype: torch.dtype,
    providers: Providers,
    n_bytes: float,
    copy: float,
    target: float | None,
    fastest: bool = False,
) -> Iterator[GpuRow]:
    """A row for each provider; the first is focalkern, which should be the ``fastest``."""
    own = float("nan")
    for name, run in providers.items():
        row = GpuRow(op, case, str(dtype).removeprefix("torch."), name)
        if isinstance(run, str):
            row.note = f"absent: {run}"
        else:
            row.median_us = median_us(run)
            row.gb_per_s = n_bytes / row.median_us / 1e3
            row.of_copy = row.gb_per_s / copy
            own = row.median_us if name == "focalkern" else own
            row.ratio = row.median_us / own
            if name == "focalkern" and target is not None:
                row.target, row.met = f"{target:g} of copy", "yes" if row.of_copy >= target else "no"
            if name != "focalkern" and fastest:
                row.target, row.met = "slower than focalkern", "yes" if row.ratio > 1 else "no"
        yield row


def step(loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor, target: object) -> object:
    """Forward and backward of the mean."""
    return torch.autograd.grad(loss(logits, target).mean(), logits)


def as_text(row: GpuRow | Comparison) -> dict[str, object]:
    return {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in asdict(row).items()}


def markdown(file: Path) -> str:
    """The timings of a result file as a table."""
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    shown = ("op", "case", "dtype", "provider", "median_us", "gb_per_s", "of_copy", "ratio", "target", "met", "note")
    return tabulate([[row[name] for name in shown] for row in rows], shown, tablefmt="github", disable_numparse=True)


def comparisons(measured: Path, counted: Path) -> list[Comparison]:
    """All measured kernels whose machine instructions were counted for the same dtype and number of classes.

    The counts are of an H100, whose memory moves 3.35 TB/s; the pipes of another GPU are assumed to be as fast.
    """
    with measured.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    with counted.open(newline="") as stream:
        counts = list(csv.DictReader(stream))
    copy = next((float(row["gb_per_s"]) for row in rows if row["op"] == "copy"), float("nan"))
    found = []
    for row in rows:
        direction, _, shape = row["case"].partition(" ")
        if row["provider"] != "focalkern" or direction not in ("forward", "backward") or row["note"]:
            continue
        for count in counts:
            *kind, dtype, size = count["case"].split(" ")
            same = (
                kind == (["map"] if row["op"] == "calibration_map" else [])
                and dtype == row["dtype"]
                and size.split("x")[1] == shape.split("x")[1]
                and f"{row['op']}_{direction}" in count["kernel"]  # no cases of few rows, which are cut into chunks
            )
            if not same:
                continue
            pipes = float(count["pipes"]) * copy / 3350
            expected, of_copy = min(1.0, 1 / pipes), float(row["of_copy"])
            simulated = float(count.get("tb_per_s") or "nan") / (0.93 * 3.35)  # a copy reaches 0.93 of it
            found.append(
                Comparison(row["op"], row["case"], dtype, pipes, expected, simulated, of_copy, of_copy / expected)
            )
    return found


def write_comparisons(measured: Path, counted: Path, out: Path) -> str:
    """The comparisons as a CSV file and as a table."""
    rows = [as_text(row) for row in comparisons(measured, counted)]
    names = [f.name for f in fields(Comparison)]
    with out.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return tabulate([list(row.values()) for row in rows], names, tablefmt="github", disable_numparse=True)
