"""Machine instructions per element of the CUDA kernels, counted while they run: python -m tools.cuda.instruction_counts

tools/cuda/sass executes the machine code of sm_90, or with --arch 100 of sm_100, block by block as a GPU would get
them. It needs no GPU, but nvcc, cuobjdump and nvdisasm (on PATH, in CUDA_HOME, or `pip install nvidia-cuda-cuobjdump
nvidia-cuda-nvdisasm`).

For each case and kernel it prints warp instructions x 32 per element: all instructions, those in double precision,
branch regions (a divergent `if`) and special functions. Next comes the share of loaded and stored bytes that moves in
accesses of 16 bytes per thread. `pipes` is the time of the busiest pipe of an H100 at full rate, over the time of the
memory traffic at 3.35 TB/s; below 1 the kernel is bound by memory. --cycles adds a rough simulation of one
multiprocessor. `pipes` and --cycles exist for the H100 only, not for sm_100.
"""

import argparse
import contextlib
import csv
import ctypes
import io
import sys
import tempfile
from collections.abc import Iterator
from ctypes import c_int64
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from tools.cuda import build
from tools.cuda.counted_operators import MAX_GRID, calibration, focal_loss, row_loss, sigmoid_loss, spline
from tools.cuda.counting import Count, executed

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TABLE = RESULTS / "kernel_counts.csv"
TABLES = {"90": TABLE, "100": RESULTS / "kernel_counts_sm_100.csv"}
MORE = 1.03  # --check fails if a kernel takes more than this times the instructions of the table


class CountsUnavailableError(Exception):
    """Counting is not possible here; the message gives the reason."""


def load(folder: Path, arch: str = "90") -> ctypes.CDLL:
    """The library that runs machine code. Files that exist in the folder are used."""
    try:
        path, code = folder / "kernels.so", folder / "code.txt"
        if not (path.is_file() and code.is_file()):
            folder.mkdir(parents=True, exist_ok=True)
            path, code = build.build_machine_code(folder, arch)
    except build.ToolMissingError as problem:
        raise CountsUnavailableError(str(problem)) from None
    library = build.load(path)
    if library.sassrun_load(str(code).encode()) <= 0:
        raise CountsUnavailableError("the machine code holds what the interpreter does not know")
    library.ptxrun_set(b"global_races", c_int64(0))
    library.set_max_grid(c_int64(MAX_GRID))
    return library


def counts(
    folder: Path,
    *,
    arch: str = "90",
    cycles: bool = False,
    words: list[str] = [],  # noqa: B006
) -> Iterator[Count]:
    """Raises CountsUnavailableError where a tool is missing."""
    for row in all_counts(load(folder, arch), cycles, words):
        yield row if arch == "90" else replace(row, bound="", pipes=None)


def all_counts(library: ctypes.CDLL, cycles: bool, words: list[str]) -> Iterator[Count]:

    executed(library)

    def wanted(case: str) -> bool:
        torch.manual_seed(0)
        return not words or any(word in case for word in words)

    yield from focal_loss(library, cycles, wanted)
    if not cycles:
        yield from row_loss(library, wanted)
        yield from sigmoid_loss(library, wanted)
        yield from calibration(library, wanted)
        yield from spline(library, wanted)


def problems(found: list[Count], table: list[Count]) -> list[str]:
    """Messages for counts that exceed the table, and for instructions that a kernel for float32 or narrower must not
    have."""
    before = {(row.case, row.kernel): row for row in table}
    wrong = [f"{row.case}, {row.kernel}: not in the table" for row in found if (row.case, row.kernel) not in before]
    for row in found:
        old = before.get((row.case, row.kernel))
        if old is not None and row.instructions > MORE * old.instructions:
            wrong.append(f"{row.case}, {row.kernel}: {row.instructions} instructions, were {old.instructions}")
        if old is not None and row.wide < old.wide - 0.02:
            wrong.append(f"{row.case}, {row.kernel}: {row.wide} of the bytes move 16 at a time, were {old.wide}")
        # A row's own arithmetic, and that of a vector, may be in double precision and may branch: per element it is
        # little.
        is_long = row.kernel.startswith("focal_loss") and row.kernel.endswith("rows") and "float64" not in row.case
        if is_long and row.float64 > 0.3:
            wrong.append(f"{row.case}, {row.kernel}: {row.float64} operations in double precision per element")
        if is_long and row.regions > 0.7:
            wrong.append(f"{row.case}, {row.kernel}: {row.regions} branch regions per element")
    return wrong


def read(path: Path) -> list[Count]:
    text = ("case", "kernel", "bound")
    with path.open() as file:
        return [
            Count(**{key: value if key in text else float(value) if value else None for key, value in row.items()})
            for row in csv.DictReader(file)
        ]


def as_csv(rows: list[Count]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [field.name for field in fields(Count)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return stream.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.cuda.instruction_counts", description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases whose name holds one of them")
    parser.add_argument("--out", type=Path, help="write the table to this CSV file; default: standard output")
    parser.add_argument("--build", type=Path, help="a folder for the library; what is there is taken as it is")
    parser.add_argument(
        "--arch", choices=sorted(TABLES, key=int), default="90", help="of the machine code (%(default)s)"
    )
    parser.add_argument("--cycles", action="store_true", help="simulate cycles of the focal loss, too")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a kernel got worse than the table")
    arguments = parser.parse_args()
    if arguments.cycles and arguments.arch != "90":
        parser.error("--cycles simulates an H100: sm_90 alone")
    with contextlib.ExitStack() as stack:
        folder = arguments.build or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            rows = []
            for row in counts(folder, arch=arguments.arch, cycles=arguments.cycles, words=arguments.words):
                rows.append(row)
                pipes = "" if row.pipes is None else f" {row.pipes:6.2f}"
                print(f"{row.case:24} {row.kernel:30} {row.instructions:8.2f}{pipes}", file=sys.stderr)
        except CountsUnavailableError as problem:
            print(f"instruction_counts: {problem}", file=sys.stderr)
            return 2
    if arguments.out:
        arguments.out.write_text(as_csv(rows))
    elif not arguments.check:
        print(as_csv(rows), end="")
    if arguments.check:
        for problem in (wrong := problems(rows, read(TABLES[arguments.arch]))):
            print(f"instruction_counts: {problem}", file=sys.stderr)
        return int(bool(wrong))
    return 0


if __name__ == "__main__":
    sys.exit(main())
