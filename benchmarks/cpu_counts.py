"""Instructions per element of `focal_loss` on this processor, forward and backward: python -m benchmarks.cpu_counts

A small program steps through one chunk of rows, one instruction at a time (Linux, x86-64 with AVX-512, a C++
compiler). Counts do not depend on who else uses the machine. `--write` records them, `--summary` prints what is
recorded.

The floor of a shape is what its arithmetic needs in vectors of sixteen, without addresses, loops and spills:

- per element: the maximum, a difference and an exponential (13 instructions) twice, a comparison with the label twice,
  a sum, a product and a store: 34;
- up to 32 classes three transpositions, 28 instructions for sixteen rows and four words; of half precision, where a
  word has two classes, 8 more for the conversion, or 56 with rounding;
- per row two logarithms (22) and seven exponentials (14);
- of a half-precision row that is not transposed, one instruction to convert each class in each of three readings, and 7
  to round it.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks" / "results" / "cpu_counts.csv"
LANES = 16
FEW_CLASSES = 32  # as in csrc/cpu/row_loss.h
CASES = [
    (classes, dtype, gamma)
    for classes, gammas in ((10, ("number", "table")), (17, ("number",)), (100, ("number",)), (1000, ("number",)))
    for dtype in ("float32", "bfloat16")
    for gamma in gammas
]


@dataclass(frozen=True)
class Count:
    classes: int
    dtype: str
    gamma: str
    forward: float
    backward: float
    floor: float
    ratio: float


def floor(classes: int, dtype: str) -> float:
    """Instructions per element, forward and backward."""
    half = dtype == "bfloat16"
    needed = 34 / LANES + (2 * 22 + 7 * 14) / LANES / classes
    if classes <= FEW_CLASSES:
        turned = (36 + 36 + 84) / 128 if half else 3 * 28 / 64
        group = 8 if half else 4
        return needed + turned * (-(-classes // group) * group) / classes
    return needed + ((3 + 7) / LANES if half else 0)


def build(folder: Path) -> Path:
    sys.path.insert(0, str(ROOT))
    from tools.toolchain import HOST_FLAGS

    program = folder / "cpu_counts"
    source = ROOT / "benchmarks" / "cpu_counts.cpp"
    command = ["c++", "-std=c++20", "-fwrapv", *HOST_FLAGS, "-I", ROOT / "csrc", source, "-o", program]
    subprocess.run(command, check=True)
    return program


def count(program: Path, classes: int, dtype: str, gamma: str) -> Count:
    command = [program, str(classes), dtype, *(["table"] if gamma == "table" else [])]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows, forward, backward = map(int, answer.split())
    elements = rows * classes
    least = floor(classes, dtype)
    total = (forward + backward) / elements
    numbers = forward / elements, backward / elements, least, total / least
    return Count(classes, dtype, gamma, *(round(number, 2) for number in numbers))


def summary() -> str:
    lines = [
        "| classes | dtype | gamma | forward | backward | floor of both | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    with TABLE.open(newline="") as file:
        lines += ["| " + " | ".join(row.values()) + " |" for row in csv.DictReader(file)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"record in {TABLE.relative_to(ROOT)}")
    parser.add_argument("--summary", action="store_true", help="print the recorded table")
    arguments = parser.parse_args()
    if arguments.summary:
        print(summary())
        return
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        counts = [count(program, *case) for case in CASES]
    rows = [asdict(found) for found in counts]
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()), sep="  ")
    if arguments.write:
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Count)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
