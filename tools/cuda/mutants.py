"""Planted faults: proves, one fault at a time, that tools.cuda.cases detect them.

    python -m tools.cuda.mutants [--out FOLDER] [--csv FILE] [WORD ...]    faults whose name or file holds a WORD

Every barrier, fence and atomic of csrc/cuda is a fault by itself (``synchronization``): it is deleted, or made a plain
read and write. ``FAULTS`` are the others: tails, strides, counts. A fault is text to replace; test_mutants.py fails if
the source no longer has this text. Each is compiled to PTX, for float, and has to fail its cases on the emulator,
unless ``REDUNDANT`` says in a line why nothing can depend on it.
"""

import argparse
import csv
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import focalkern  # noqa: F401  (for the children)
from tools.cuda import build
from tools.cuda.faults import FAULTS, REDUNDANT, Fault

ROOT = Path(__file__).parents[2]
CUDA = ROOT / "csrc/cuda"
FOCAL_LOSS = "focal_loss+focal_chunks+focal_pixels"
# The cases that run a file's kernels, or those that use a header.
CASES = {
    "common.cuh": f"{FOCAL_LOSS}+blind_spots",
    "grid_sum.cuh": f"{FOCAL_LOSS}+blind_spots",
    "focal_loss.cu": f"{FOCAL_LOSS}+blind_spots",
    "focal_loss_row.cuh": f"{FOCAL_LOSS}+blind_spots",
    "focal_loss_tiles.cuh": f"{FOCAL_LOSS}+blind_spots+shared_rows",
    "focal_loss_rows.cuh": f"{FOCAL_LOSS}+blind_spots",
    "focal_loss_thread_per_row.cuh": f"{FOCAL_LOSS}+blind_spots",
    "focal_loss_two_rows_per_thread.cuh": f"{FOCAL_LOSS}+blind_spots",
    "focal_loss_split_rows.cuh": f"{FOCAL_LOSS}+blind_spots",
    "calibration_map.cu": "calibration_map+blind_spots",
    "map_group.cuh": "calibration_map+blind_spots",
    "map_row.cuh": "calibration_map+blind_spots",
    "binary_map.cuh": "calibration_map+blind_spots",
    "calibration_grid.cu": "calibration_grid+blind_spots",
    "grid_confidence.cuh": "calibration_grid+blind_spots",
    "grid_row.cuh": "calibration_grid+blind_spots",
    "grid_bins.cuh": "calibration_grid+blind_spots",
    "calibration_sums.cu": "calibration_sums",
    "spline_map.cu": "spline",
    "spline_sums.cu": "spline",
    "spline_row.cuh": "spline",
    "sigmoid_loss_strided.cu": "sigmoid_loss",
    "sigmoid_loss_vectorized.cu": "sigmoid_loss",
    "sigmoid_loss_pack.cuh": "sigmoid_loss",
    "row_loss.cu": f"row_loss+{FOCAL_LOSS}",
    "row_loss_numbers.cuh": "row_loss",
    "row_loss_shared.cu": "row_loss+row_statistics+smoothed_rows+shared_rows",
    "row_loss_smoothed.cu": "smoothed_rows+row_loss+row_statistics",
    "row_in_registers.cuh": "smoothed_rows+shared_rows",
    "largest_logit.cuh": "smoothed_rows+shared_rows",
    "smoothed_gradient.cuh": "smoothed_rows+shared_rows+row_loss",
    "short_row.cuh": "smoothed_rows+shared_rows",
    "smoothed_numbers.cuh": "smoothed_rows",
    "smoothed_twice.cuh": "smoothed_rows",
    "row_statistics.cu": "row_statistics",
    "row_statistics.cuh": "row_statistics",
    "shared_row.cuh": "row_loss+row_statistics+shared_rows",
    "shared_numbers.cuh": "shared_rows",
    "shared_tile.cuh": "shared_rows+row_statistics",
    "smoothed_row.cuh": "row_loss+row_statistics",
    "soft_focal.cuh": "row_loss+row_statistics",
    "row_loss_soft.cu": f"row_loss+row_statistics+{FOCAL_LOSS}",
    "soft_row.cuh": f"row_loss+{FOCAL_LOSS}",
    "soft_shares.cuh": f"row_loss+{FOCAL_LOSS}",
    "row_groups.cuh": f"row_loss+row_statistics+{FOCAL_LOSS}",
    "row_loss.cuh": f"row_loss+row_statistics+{FOCAL_LOSS}",
}
# Files that are compiled again if a header changes: together they use all of it.
COMPILED = {
    "common.cuh": ("focal_loss.cu", "row_loss.cu", "row_loss_soft.cu"),
    "row_groups.cuh": (
        "row_loss.cu",
        "row_loss_soft.cu",
        "row_loss_smoothed.cu",
        "row_loss_shared.cu",
        "row_statistics.cu",
    ),
    "row_loss_numbers.cuh": ("row_loss.cu", "row_statistics.cu"),
    "row_statistics.cuh": ("row_statistics.cu", "row_loss_smoothed.cu", "row_loss_shared.cu"),
    "row_in_registers.cuh": ("row_loss_smoothed.cu", "row_loss_shared.cu"),
    "largest_logit.cuh": ("row_loss_smoothed.cu", "row_loss_shared.cu"),
    "shared_row.cuh": ("row_loss_shared.cu",),
    "shared_numbers.cuh": ("row_loss_shared.cu",),
    "shared_tile.cuh": ("row_loss_shared.cu",),
    "short_row.cuh": ("row_loss_smoothed.cu", "row_loss_shared.cu"),
    "smoothed_gradient.cuh": ("row_loss_smoothed.cu", "row_loss_shared.cu"),
    "smoothed_numbers.cuh": ("row_loss_smoothed.cu",),
    "smoothed_twice.cuh": ("row_loss_smoothed.cu",),
    "smoothed_row.cuh": ("row_loss_smoothed.cu", "row_loss_shared.cu"),
    "soft_focal.cuh": ("row_loss_smoothed.cu", "row_loss_shared.cu", "row_statistics.cu"),
    "soft_row.cuh": ("row_loss_soft.cu", "row_loss_smoothed.cu", "row_loss_shared.cu"),
    "soft_shares.cuh": ("row_loss_soft.cu", "row_loss_shared.cu"),
    "row_loss.cuh": ("focal_loss.cu", "row_loss.cu", "row_loss_soft.cu"),
    "grid_sum.cuh": ("focal_loss.cu",),
    "focal_loss_row.cuh": ("focal_loss.cu",),
    "focal_loss_tiles.cuh": ("focal_loss.cu", "row_loss_shared.cu"),
    "focal_loss_rows.cuh": ("focal_loss.cu",),
    "focal_loss_thread_per_row.cuh": ("focal_loss.cu",),
    "focal_loss_two_rows_per_thread.cuh": ("focal_loss.cu",),
    "focal_loss_split_rows.cuh": ("focal_loss.cu",),
    "map_group.cuh": ("calibration_map.cu",),
    "map_row.cuh": ("calibration_map.cu",),
    "binary_map.cuh": ("calibration_map.cu",),
    "grid_confidence.cuh": ("calibration_grid.cu",),
    "grid_row.cuh": ("calibration_grid.cu",),
    "grid_bins.cuh": ("calibration_grid.cu",),
    "spline_row.cuh": ("spline_map.cu", "spline_sums.cu"),
    "sigmoid_loss_pack.cuh": ("sigmoid_loss_vectorized.cu",),
}
# pytest -k expressions for files whose cases are in a module with other cases.
CHOICE = {
    "common.cuh": "not (map or grid)",
    "grid_sum.cuh": "not (map or grid)",
    "focal_loss.cu": "not (map or grid)",
    "focal_loss_row.cuh": "not (map or grid)",
    "focal_loss_tiles.cuh": "not (map or grid)",
    "focal_loss_rows.cuh": "not (map or grid)",
    "focal_loss_thread_per_row.cuh": "not (map or grid)",
    "focal_loss_two_rows_per_thread.cuh": "not (map or grid)",
    "focal_loss_split_rows.cuh": "not (map or grid)",
    "calibration_map.cu": "map",
    "map_group.cuh": "map",
    "map_row.cuh": "map",
    "binary_map.cuh": "map",
    "calibration_grid.cu": "grid",
    "grid_confidence.cuh": "grid",
    "grid_row.cuh": "grid",
    "grid_bins.cuh": "grid",
}


def synchronization() -> Iterator[Fault]:
    """A fault for every barrier and fence, which is deleted, and every atomic, which is made a plain update."""
    for path in sorted([*CUDA.glob("*.cu"), *CUDA.glob("*.cuh")]):
        text = path.read_text()
        seen: dict[str, int] = {}
        for match in re.finditer(r"__sync(?:threads|warp)\(\);|__threadfence\(\);|atomicAdd\(|atomicMin\(", text):
            what = match[0].rstrip("();")
            nth = seen[what] = seen.get(what, -1) + 1
            new = "" if what.startswith("__") else f"mutant::{what}("
            yield Fault(f"{path.name}: {what} {nth + 1}", path.name, match[0], new, nth)


def all_faults() -> list[Fault]:
    return [*synchronization(), *FAULTS]


# The plain update that replaces an atomic.
PLAIN = """namespace mutant {
template <typename T, typename U>
__device__ inline T atomicAdd(T* at, U value) {
  const T old = *at;
  *at = old + static_cast<T>(value);
  return old;
}
template <typename T>
__device__ inline T atomicMin(T* at, T value) {
  const T old = *at;
  *at = value < old ? value : old;
  return old;
}
}  // namespace mutant
"""


class Workshop:
    """A copy of the sources, their objects without a fault, and the library with one fault at a time."""

    def __init__(self, folder: Path) -> None:
        self.build, self.folder, self.csrc, self.base = build, folder, folder / "csrc", folder / "base"
        self.is_new = not (self.base / "kernels.so").is_file()
        shutil.rmtree(self.csrc, ignore_errors=True)
        shutil.copytree(CUDA.parent, self.csrc)
        for kernel in self.build.kernels(self.csrc):
            # The other types have the same barriers, tails and strides.
            others_than_float = r"FK_INSTANTIATE\((Formula, )?(Half|BFloat16|double)\)"
            kernel.write_text(re.sub(others_than_float, "", kernel.read_text()))
        common = self.csrc / "cuda/common.cuh"  # which all of them include first
        common.write_text(common.read_text().replace("namespace focalkern", PLAIN + "namespace focalkern", 1))
        if self.is_new:
            shutil.rmtree(self.base, ignore_errors=True)
            self.base.mkdir()
            others = self.build.interpreter_commands(self.base, self.csrc)
            self.compile(self.build.kernels(self.csrc), self.base, others)

    def compile(self, kernels: list[Path], folder: Path, others: list[list[str]] = []) -> Path:  # noqa: B006
        code = "arch=compute_90,code=compute_90"
        few = "-DFOCALKERN_ONLY_FLOAT"
        others = [[*command, few] if "harness.cpp" in " ".join(command) else command for command in others]
        self.build.run_all([self.build.nvcc_command(k, folder, self.csrc, code) for k in kernels] + others)
        return self.build.link(folder)

    def library(self, fault: Fault) -> Path:
        file = self.csrc / "cuda" / fault.file
        text = file.read_text()
        mutant = self.folder / "mutant"
        shutil.rmtree(mutant, ignore_errors=True)
        shutil.copytree(self.base, mutant)
        file.write_text(fault.plant(text))
        try:
            return self.compile([file.with_name(name) for name in COMPILED.get(fault.file, (fault.file,))], mutant)
        finally:
            file.write_text(text)

    def run(self, library: Path, cases: str | None, choice: str | None, settings: str = "") -> tuple[bool, str]:
        """Whether all cases pass; and the emulator's first report, or the last line of pytest."""
        chosen = f",cases={cases}" if cases else ""
        code, output = self.in_a_child(
            ["-p", "no:cacheprovider", "-q", "-x", "--tb=line", *(["-k", choice] if choice else []),
             str(ROOT / "tests/kernels/test_cuda_ptx.py")],
            f"library={library}{chosen}{settings}",
        )  # fmt: skip
        if code < 0:
            return False, f"ended by signal {-code}"
        if code not in (0, 1):  # interrupted, misused, or nothing was collected
            raise RuntimeError(f"pytest ended with {code}: {output[-2000:]}")
        report = re.search(r"ptxrun: \S+?: (block.*)", output) or re.search(r"^E +(.*)", output, re.MULTILINE)
        return code == 0, report[1][:120] if report else output.strip().splitlines()[-1]

    def in_a_child(self, arguments: list[str], settings: str) -> tuple[int, str]:
        """Runs pytest in a fork of this process, which has already imported torch."""
        path = self.folder / "output"
        if (child := os.fork()) == 0:
            with path.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ["FOCALKERN_PTX"] = settings
            os.chdir(ROOT)
            code = int(pytest.main(arguments))
            sys.stdout.flush()
            os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), path.read_text()


@dataclass(frozen=True)
class Verdict:
    fault: str
    result: str  # caught, redundant, or MISSED; also REDUNDANT BUT CAUGHT
    report: str
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.result in ("caught", "redundant")


def verdicts(folder: Path, faults: list[Fault]) -> Iterator[Verdict]:
    workshop = Workshop(folder)
    began = time.monotonic()
    if workshop.is_new and faults:
        modules = sorted({name for fault in faults for name in CASES[fault.file].split("+")})
        passed, report = workshop.run(workshop.base / "kernels.so", "+".join(modules), None)
        if not passed:
            yield Verdict("no fault", "MISSED", f"the cases fail without one: {report}", time.monotonic() - began)
            return
    for fault in faults:
        began = time.monotonic()
        library = workshop.library(fault)
        cases, choice = CASES.get(fault.file), CHOICE.get(fault.file)
        passed, report = workshop.run(library, cases, choice)
        if passed:
            passed, report = workshop.run(library, cases, choice, ",random_lanes=1")
        reason = REDUNDANT.get(fault.name)
        result = (
            ("MISSED" if reason is None else "redundant")
            if passed
            else "caught"
            if reason is None
            else "REDUNDANT BUT CAUGHT"
        )
        yield Verdict(fault.name, result, reason if passed and reason else report, time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tools/cuda/mutants.py", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument(
        "--out", type=Path, help="keep what is built in this folder; the objects there are taken as they are"
    )
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    faults = [
        f
        for f in all_faults()
        if not arguments.words or any(word in f.name or word in f.file for word in arguments.words)
    ]
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary, "mutants")
        for verdict in verdicts(folder, faults):
            found.append(verdict)
            print(f"{verdict.result:9} {verdict.fault}: {verdict.report} ({verdict.seconds:.0f} s)", flush=True)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["fault", "result", "report"])
            writer.writerows([v.fault, v.result, v.report] for v in found)
    wrong = [v for v in found if not v.is_right]
    print(f"{len(found) - len(wrong)} of {len(found)} faults caught or redundant")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
