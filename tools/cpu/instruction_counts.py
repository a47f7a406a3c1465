"""Instructions per element of the losses on this processor, forward and backward.

    python -m tools.cpu.instruction_counts

A small program steps through one chunk of rows, one instruction at a time (Linux, x86-64 with AVX-512, a C++
compiler). Counts do not depend on the load of the machine. `--write` records them, `--summary` prints the recorded
ones, `--only splines` counts for one table. On a processor without AVX-512, `--write` records tables of AVX2. There is
none for `rows`, whose floor is that of AVX-512.

The floor of `focal_loss` is the number of instructions of its arithmetic in vectors of sixteen, without addresses,
loops and spills:

- Per element 34: the maximum (or a bound, from the target's logit); twice a difference and an exponential (13
  instructions, two fewer with the kernels' table of roots); twice a comparison with the label; a sum, a product and a
  store.
- Up to 32 classes three transpositions, 28 instructions for sixteen rows and four words (the kernels need one). In half
  precision, where a word has two classes, 8 more for the conversion, or 56 with rounding.
- With more classes a row has its own vectors; the last one is not full and costs as much as the others. The maximum and
  the sum are reduced, each in 13 instructions for four rows together.
- Per row two logarithms (22) and seven exponentials (14); for gamma = 2 the kernels need one of each.
- For a half-precision row that is not transposed, one instruction to convert each class in each of three readings, and
  7 to round it.
"""

import argparse
import csv
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tools.toolchain import HOST_FLAGS

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "cpu_counts.csv"
ELEMENTS_TABLE = ROOT / "benchmarks" / "results" / "cpu_counts_sigmoid.csv"
SOFT_TABLE = ROOT / "benchmarks" / "results" / "cpu_counts_soft.csv"
SPLINE_TABLE = ROOT / "benchmarks" / "results" / "cpu_counts_spline.csv"
LANES = 16
FEW_CLASSES = 32  # as in csrc/cpu/row_loss/tile.h
CASES = [
    (classes, dtype, gamma)
    for classes, gammas in ((10, ("number", "table")), (17, ("number",)), (100, ("number",)), (1000, ("number",)))
    for dtype in ("float32", "bfloat16")
    for gamma in gammas
]
# Label smoothing and class probabilities. 1.5 stands for every gamma that is not 0, 1, 2 or 3.
SOFT_CASES = [
    (target, classes, "float32", gamma)
    for target in ("smoothed", "probabilities")
    for classes in (10, 100, 1000)
    for gamma in ("0", "1", "2", "3", "1.5")
] + [("smoothed", classes, "bfloat16", "2") for classes in (10, 100, 1000)]
# The losses of independent logits, 80 classes, as in the head of a detector.
ELEMENT_CASES = [
    (loss, dtype, target)
    for loss in ("focal", "asymmetric")
    for dtype in ("float32", "bfloat16")
    for target in ("dense", "labels")
]

SPLINE_CASES = [(classes, dtype) for classes in (10, 100, 1000) for dtype in ("float32", "float64")]


@dataclass(frozen=True)
class Count:
    classes: int
    dtype: str
    gamma: str
    forward: float
    backward: float
    floor: float
    ratio: float


@dataclass(frozen=True)
class SoftCount:
    target: str
    classes: int
    dtype: str
    gamma: str
    forward: float
    backward: float
    both: float


@dataclass(frozen=True)
class ElementCount:
    loss: str
    dtype: str
    target: str
    forward: float
    backward: float


@dataclass(frozen=True)
class SplineCount:
    classes: int
    dtype: str
    temperature: float  # temperature scaling, forward
    forward: float  # the map that keeps the order
    ratio: float
    backward: float
    curve: float  # of a fit: value, gradient and Hessian of the curve
    vector: float  # value and gradient of spline-vector


def floor(classes: int, dtype: str) -> float:
    """Instructions per element, forward and backward."""
    half = dtype == "bfloat16"
    finishing = (2 * 22 + 7 * 14) / LANES / classes
    if classes <= FEW_CLASSES:
        transposed = (36 + 36 + 84) / 128 if half else 3 * 28 / 64
        group = 8 if half else 4
        return 34 / LANES + finishing + transposed * (-(-classes // group) * group) / classes
    vectors = -(-classes // LANES)
    return (vectors * (34 + (3 + 7 if half else 0)) + 2 * 13 / 4) / classes + finishing


def build(folder: Path, name: str = "instruction_counts", kernels: Sequence[str] = ("sigmoid_loss",)) -> Path:
    program = folder / name
    sources = [Path(__file__).with_name(f"{name}.cpp"), *(ROOT / "csrc" / "cpu" / f"{one}.cpp" for one in kernels)]
    flags = ["-std=c++20", "-fwrapv", "-Wno-psabi", *HOST_FLAGS]
    subprocess.run(["c++", *flags, "-I", ROOT / "csrc", *sources, "-o", program], check=True)
    return program


def build_spline(folder: Path) -> Path:
    return build(folder, "spline_counts", ("spline_map", "spline_sums", "calibration_map"))


def steps(program: Path, *case: object) -> tuple[float, float]:
    """Instructions per element, forward and backward."""
    answer = subprocess.run([program, *map(str, case)], check=True, capture_output=True, text=True).stdout
    elements, forward, backward = map(int, answer.split())
    return forward / elements, backward / elements


def count(program: Path, classes: int, dtype: str, gamma: str) -> Count:
    forward, backward = steps(program, "rows", classes, dtype, gamma)
    least = floor(classes, dtype)
    numbers = forward, backward, least, (forward + backward) / least
    return Count(classes, dtype, gamma, *(round(number, 2) for number in numbers))


def count_soft(program: Path, target: str, classes: int, dtype: str, gamma: str) -> SoftCount:
    forward, backward = steps(program, target, classes, dtype, gamma)
    return SoftCount(target, classes, dtype, gamma, *(round(n, 2) for n in (forward, backward, forward + backward)))


def count_elements(program: Path, loss: str, dtype: str, target: str) -> ElementCount:
    return ElementCount(loss, dtype, target, *(round(n, 2) for n in steps(program, loss, 80, dtype, target)))


def count_spline(program: Path, classes: int, dtype: str) -> SplineCount:
    temperature, forward = steps(program, "maps", classes, dtype)
    backward, _ = steps(program, "backward", classes, dtype)
    fit = steps(program, "fit", classes, dtype)
    numbers = temperature, forward, forward / temperature, backward, *fit
    return SplineCount(classes, dtype, *(round(number, 2) for number in numbers))


def table(path: Path, header: list[str]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    with path.open(newline="") as file:
        lines += ["| " + " | ".join(row.values()) + " |" for row in csv.DictReader(file)]
    return "\n".join(lines)


def of_avx2(path: Path) -> Path:
    """The table of the counts with AVX2."""
    return path.with_stem(f"{path.stem}_avx2")


def summary() -> str:
    return table(TABLE, ["classes", "dtype", "gamma", "forward", "backward", "floor of both", "ratio"])


def soft_summary(path: Path = SOFT_TABLE) -> str:
    return table(path, ["target", "classes", "dtype", "gamma", "forward", "backward", "both"])


def element_summary() -> str:
    return table(ELEMENTS_TABLE, ["loss", "dtype", "target", "forward", "backward"])


def spline_summary() -> str:
    heads = ["classes", "dtype", "temperature scaling", "map", "ratio", "map, backward", "fit: curve", "fit: vector"]
    return table(SPLINE_TABLE, heads)


# Recorded table, kind of row, program, count of a case, cases.
TABLES: dict[str, tuple[Path, type, Callable[[Path], Path], Callable[..., Any], Sequence[tuple[Any, ...]]]] = {
    "rows": (TABLE, Count, build, count, CASES),
    "soft": (SOFT_TABLE, SoftCount, build, count_soft, SOFT_CASES),
    "elements": (ELEMENTS_TABLE, ElementCount, build, count_elements, ELEMENT_CASES),
    "splines": (SPLINE_TABLE, SplineCount, build_spline, count_spline, SPLINE_CASES),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"record in {TABLE.parent.relative_to(ROOT)}")
    parser.add_argument("--only", choices=sorted(TABLES), help="count for this table alone")
    parser.add_argument("--summary", action="store_true", help="print the recorded tables")
    arguments = parser.parse_args()
    if arguments.summary:
        print(summary(), soft_summary(), element_summary(), spline_summary(), sep="\n\n")
        print("\nWith AVX2:", soft_summary(of_avx2(SOFT_TABLE)), sep="\n\n")
        return
    has_avx512 = "avx512bw" in Path("/proc/cpuinfo").read_text()
    if arguments.only == "rows" and arguments.write and not has_avx512:
        parser.error("--only rows --write needs AVX-512, whose floor the table has")
    names = [arguments.only] if arguments.only else [name for name in TABLES if has_avx512 or name != "rows"]
    wanted = [TABLES[name] for name in names]
    if not has_avx512:
        wanted = [(of_avx2(path), *rest) for path, *rest in wanted]
    with tempfile.TemporaryDirectory() as folder:
        programs = {make: make(Path(folder)) for make in {one[2] for one in wanted}}
        found = [
            [asdict(count_case(programs[make], *case)) for case in cases] for _, _, make, count_case, cases in wanted
        ]
    for (path, kind, *_), rows in zip(wanted, found, strict=True):
        for row in rows:
            print(*(f"{name} {value}" for name, value in row.items()), sep="  ")
        if arguments.write:
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
