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
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from ctypes import c_double, c_int64
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from focalkern.fallback.spline_map import spline_coefficients
from focalkern.reference._softmax_losses import ROW_LOSSES, number_of
from tools.cuda import build
from tools.cuda.cases.calibration_grid import run_grid
from tools.cuda.cases.calibration_map import run_map
from tools.cuda.cases.common import real_of
from tools.cuda.cases.focal_loss import run_focal_loss
from tools.cuda.cases.sigmoid_loss import FOCAL, run_sigmoid_loss
from tools.cuda.cases.spline import curve_of
from tools.cuda.cases.spline import run_map as run_spline_map
from tools.cuda.cases.spline import run_sums as run_spline_sums

CLOCK, MULTIPROCESSORS, MEMORY = 1.755e9, 132, 3.35e12  # of the H100 SXM: Hz, count, bytes per second
MEMORY_LATENCY = 650  # cycles
MAX_GRID = 2048  # blocks, as in csrc/cuda/launch.h
BYTES_PER_CYCLE = 0.93 * MEMORY / MULTIPROCESSORS / CLOCK  # what a copy reaches of the memory's rate
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TABLE = RESULTS / "kernel_counts.csv"
TABLES = {"90": TABLE, "100": RESULTS / "kernel_counts_sm_100.csv"}
MORE = 1.03  # how many times the table's instructions a kernel may take before --check fails

PIPES = {
    "fma": "FADD FMUL FFMA HADD2 HFMA2",
    "imad": "IMAD",
    "fp64": "DADD DMUL DFMA DSETP",
    "special": "MUFU I2F F2I F2F FRND POPC FCHK",
    "memory": "LD LDG STG LDS STS ATOMS ATOMG REDG SHFL LDC",
    "control": "BRA BSSY BSYNC EXIT CALL RET BAR WARPSYNC NOP BREAK YIELD MEMBAR BRX BRXU ERRBAR CCTL CGAERRBAR "
    "ENDCOLLECTIVE",
}
PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}

# (dtype, shape, blocks that fit one multiprocessor for --cycles). As many rows as fill an H100 with whole tiles; the
# first blocks alone are run.
FOCAL_LOSS = [
    ("float32", (16896, 1000), 4), ("bfloat16", (16896, 1000), 4), ("float32", (1056, 32000), 4),
    ("bfloat16", (1056, 32000), 4), ("float32", (2112, 4097), 4), ("bfloat16", (2112, 4097), 4),
    ("float32", (135168, 10), 5), ("bfloat16", (135168, 10), 4), ("float32", (16896, 100), 5),
    ("bfloat16", (16896, 100), 4), ("float32", (2, 19, 67584), 5), ("bfloat16", (2, 19, 67584), 5),
    ("float64", (16896, 1000), 2), ("float32", (8, 128256), 2), ("bfloat16", (8, 128256), 2),
]  # fmt: skip
# Labels, and for the focal loss label smoothing, which shares the kernels of class probabilities.
ROW_LOSS = [
    ("poly", "float32", (16896, 1000)), ("poly", "bfloat16", (16896, 1000)), ("poly", "float32", (135168, 10)),
    ("dual", "float32", (16896, 1000)), ("brier", "float32", (16896, 1000)), ("focal", "float32", (16896, 1000)),
    ("focal", "float32", (135168, 10)),
]  # fmt: skip
# Targets of the type of the logits, hard or soft, or a label for each row, or for each pixel of 128 images. Enough for
# several rounds of the grid.
SIGMOID_LOSS = [
    ("float32", "hard"), ("bfloat16", "hard"), ("float32", "soft"), ("bfloat16", "soft"), ("float32", "labels"),
    ("bfloat16", "labels"), ("float64", "hard"), ("float32", "labels of pixels"), ("bfloat16", "labels of pixels"),
]  # fmt: skip
SIGMOID_SHAPE = (131072, 80)
MAP = [
    ("float32", (64, 1000)), ("float32", (4, 32000)), ("bfloat16", (64, 1000)), ("float32", (4000, 10)),
    ("bfloat16", (4000, 10)), ("float32", (512, 100)), ("bfloat16", (512, 100)), ("float32", (16, 4096)),
    ("bfloat16", (16, 4096)), ("bfloat16", (4, 32000)), ("float64", (64, 1000)),
]  # fmt: skip

SPLINE = [("float32", (64, 1000)), ("bfloat16", (64, 1000)), ("float32", (4000, 10)), ("float32", (512, 100))]


@dataclass(frozen=True)
class Count:
    case: str
    kernel: str
    instructions: float  # per element; the next three likewise
    float64: float
    regions: float
    special: float
    wide: float  # part of the bytes
    bound: str  # these two of an H100: empty for another architecture
    pipes: float | None
    cycles: float | None = None  # per element and multiprocessor
    tb_per_s: float | None = None  # of the simulated chip


class CountsUnavailableError(Exception):
    """Why nothing can be counted here."""


def load(folder: Path, arch: str = "90") -> ctypes.CDLL:
    """The library that runs machine code. Files that the folder already has are used."""
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


def pipe(instruction: str) -> str:
    name = re.sub(r"^@!?U?P\w+ +", "", instruction).split()[0].split(".")[0]
    if name in PIPE_OF:
        return PIPE_OF[name]
    return "uniform" if name.startswith("U") or name in ("R2UR", "S2UR", "LDCU", "VOTEU") else "alu"


def executed(library: ctypes.CDLL) -> dict[str, list[tuple[int, int, str]]]:
    """Kernel -> how many warps and lanes ran each instruction, and its text. Forgets them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "counts")
        library.sassrun_write_counts(str(path).encode())
        lines = path.read_text().splitlines() if path.exists() else []
    library.sassrun_clear_counts()
    found: dict[str, list[tuple[int, int, str]]] = {}
    for line in lines:
        kind, *rest = line.split("\t")
        if kind == "K":
            found[rest[0]] = code = []
        else:
            code.append((int(rest[1]), int(rest[2]), rest[4]))
    return dict(sorted(found.items()))


def short(name: str) -> str:
    """focal_loss_backward tile, of a mangled name."""
    found = re.search(r"\d((?:[a-z]+_)+)kernel(?:I|E|$)", name)
    path = re.search(r"RowPathE(\d)", name)
    return (found[1].strip("_") if found else name[-30:]) + (
        f" {('tile', 'rows', 'pixels')[int(path[1])]}" if path else ""
    )


def count(code: list[tuple[int, int, str]], elements: float, moved: float) -> dict[str, float | str]:
    warps = dict.fromkeys([*PIPES, "uniform", "alu"], 0)
    memory_cycles = wide = narrow = 0
    for times, lanes, text in code:
        kind, mnemonic = pipe(text), re.sub(r"^@!?U?P\w+ +", "", text).split()[0]
        warps[kind] += times
        parts = mnemonic.split(".")
        size = 16 if "128" in parts else 8 if "64" in parts else 2 if "U16" in parts or "S16" in parts else 4
        if kind == "memory":
            memory_cycles += times * max(1, size // 4)
        if parts[0] in ("LD", "LDG", "STG"):
            wide += lanes * size if size == 16 else 0
            narrow += lanes * size if size < 16 else 0
    cycles = {
        "issue": sum(warps.values()) / 4,
        "alu": 2 * warps["alu"] / 4,
        "fma": max(2 * warps["imad"], warps["imad"] + warps["fma"]) / 4,
        "special": 8 * warps["special"] / 4,
        "float64": 2 * warps["fp64"] / 4,
        "memory": memory_cycles,
    }
    bound = max(cycles, key=lambda name: cycles[name])

    def each(times: float) -> float:
        return round(32 * times / elements, 2)

    return {
        "instructions": each(sum(warps.values())),
        "float64": each(warps["fp64"]),
        "regions": each(sum(times for times, _, text in code if "BSSY" in text)),
        "special": each(warps["special"]),
        "wide": round(wide / (wide + narrow), 2) if wide + narrow else 0.0,
        "bound": bound,
        "pipes": round(cycles[bound] / MULTIPROCESSORS / CLOCK / (moved / MEMORY), 2),
    }


def simulate(library: ctypes.CDLL, resident: int, elements: float) -> dict[str, float]:
    """The counts of the launch that was traced last."""
    issued, moved, idle = c_double(), c_double(), c_double()
    cycles = library.sassrun_simulate(
        resident, c_double(BYTES_PER_CYCLE), MEMORY_LATENCY, *map(ctypes.byref, (issued, moved, idle))
    )
    rate = moved.value / cycles * MULTIPROCESSORS * CLOCK / 1e12
    return {"cycles": round(cycles / elements, 3), "tb_per_s": round(rate, 2)}


class ForwardOnly:
    """The library, but the backward launches nothing: the trace is that of the last launch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> object:
        return (lambda *_: 0) if name.endswith("backward") else getattr(self._library, name)


def focal_loss(library: ctypes.CDLL, cycles: bool, wanted: Callable[[str], bool]) -> Iterator[Count]:

    for kind, shape, resident in FOCAL_LOSS:
        case = f"{kind} {'x'.join(map(str, shape))}"
        if not wanted(case):
            continue
        dtype = getattr(torch, kind)
        logits = (3 * torch.randn(min(shape[0], 64), *shape[1:])).to(dtype)
        logits = logits.repeat(-(-shape[0] // len(logits)), *[1] * (len(shape) - 1))[: shape[0]]
        target = torch.randint(shape[1], (shape[0], *shape[2:]))
        rows = logits.numel() // shape[1]
        blocks = 3 * resident * (2 if shape[1] < 200 else 1) if cycles else 6
        pixels = len(shape) == 3
        tile = library.rows_of_a_tile(*map(c_int64, (rows, shape[1], dtype.itemsize, not pixels, pixels, pixels)))
        some = blocks * tile * shape[1]
        cut = not pixels and library.chunk_of_a_row(*map(c_int64, (rows, shape[1], dtype.itemsize))) > 0
        if cut:  # all blocks, because the sums of all chunks are combined
            blocks, some = 0, rows * shape[1]
        library.ptxrun_set(b"only_blocks", c_int64(blocks))
        library.sassrun_trace(c_int64(blocks if cycles else 0))
        for direction in ("forward", "backward") if cycles and not cut else ("ward",):
            runner = ForwardOnly(library) if direction == "forward" else library
            run_focal_loss(runner, logits, target, 2.0, torch.ones(1, dtype=real_of(dtype)))
            for name, code in executed(library).items():
                if direction in name or (cut and "total" in name):
                    moved = some * (dtype.itemsize * (2 if "backward" in name else 1) + 20 / shape[1])
                    more = simulate(library, resident, some) if cycles and not cut else {}
                    yield Count(case, short(name), **count(code, some, moved), **more)
        library.ptxrun_set(b"only_blocks", c_int64(0))
        library.sassrun_trace(c_int64(0))


def row_loss(library: ctypes.CDLL, wanted: Callable[[str], bool]) -> Iterator[Count]:

    specs = {spec.short: spec for spec in ROW_LOSSES.values()}
    for loss, kind, (rows, classes) in ROW_LOSS:
        smoothing = 0.1 if loss == "focal" else 0.0
        case = f"{loss} {kind} {rows}x{classes}{' smooth' if smoothing else ''}"
        if not wanted(case):
            continue
        dtype, blocks = getattr(torch, kind), 6
        logits = (3 * torch.randn(64, classes)).to(dtype).repeat(rows // 64, 1)
        library.ptxrun_set(b"only_blocks", c_int64(blocks))
        gamma = 2.0 if "gamma" in specs[loss].parameters else 0.0
        run_focal_loss(library, logits, torch.randint(classes, (rows,)), gamma,
                       torch.ones(1, dtype=real_of(dtype)), reduction="sum", label_smoothing=smoothing,
                       kind=number_of(specs[loss].name), epsilon=1.5)  # fmt: skip
        library.ptxrun_set(b"only_blocks", c_int64(0))
        lanes = min(32, 1 << (-(-classes // 16) - 1).bit_length())  # threads of a row
        some = taken_by(blocks, rows, 256 // lanes)
        for name, code in executed(library).items():
            moved = some * (classes * dtype.itemsize * (2 if "backward" in name else 1) + 20)
            yield Count(case, short(name), **count(code, some * classes, moved))


def sigmoid_loss(library: ctypes.CDLL, wanted: Callable[[str], bool]) -> Iterator[Count]:

    rows, classes = SIGMOID_SHAPE
    for kind, targets in SIGMOID_LOSS:
        case = f"sigmoid {kind} {rows}x{classes} {targets}"
        if not wanted(case):
            continue
        dtype, blocks = getattr(torch, kind), 6
        logits = (3 * torch.randn(64, classes)).to(dtype).repeat(rows // 64, 1)
        shares = torch.rand(64, classes)
        labels = torch.randint(classes + 1, (64,))
        target = (shares if targets == "soft" else shares.round()).to(dtype).repeat(rows // 64, 1)
        if targets == "labels":
            target = labels.repeat(rows // 64)
        elif targets == "labels of pixels":
            logits, target = logits.reshape(128, classes, -1), labels.repeat(rows // 64).reshape(128, -1)
        grad = torch.ones((1,) * logits.dim(), dtype=real_of(dtype))
        library.ptxrun_set(b"only_blocks", c_int64(blocks))
        run_sigmoid_loss(library, FOCAL, logits, target, 2.0, 0.25, grad, reduction="sum", all_gradients=False)
        library.ptxrun_set(b"only_blocks", c_int64(0))
        for name, code in executed(library).items():
            pack = 16 // dtype.itemsize if "plain" in name else 2 if kind == "float64" else 4
            if targets == "labels of pixels" and "plain" in name:
                pack *= 8  # a thread has so many classes
            some = taken_by(blocks, logits.numel(), 256 * pack)
            tensors = (1 if "labels" in targets else 2) + ("backward" in name)
            moved = some * (tensors * dtype.itemsize + (8 / classes if "labels" in targets else 0))
            yield Count(case, short(name), **count(code, some, moved))


def taken_by(blocks: int, size: int, of_a_block: int) -> int:
    """The part of `size` that the first blocks take, in all rounds of the grid."""
    grid = min(MAX_GRID, -(-size // of_a_block))
    firsts = [
        (start + block) * of_a_block for start in range(0, -(-size // of_a_block), grid) for block in range(blocks)
    ]
    return sum(max(0, min(of_a_block, size - first)) for first in firsts)


def calibration(library: ctypes.CDLL, wanted: Callable[[str], bool]) -> Iterator[Count]:

    for kind, shape in MAP:
        case = f"map {kind} {'x'.join(map(str, shape))}"
        if wanted(case):
            logits = (3 * torch.randn(shape)).to(getattr(torch, kind))
            run_map(library, logits, 1.0, 1.5, torch.randn(shape), log=False)
            for name, code in executed(library).items():
                moved = logits.numel() * logits.element_size() * (3 if "backward" in name else 2)
                yield Count(case, short(name), **count(code, logits.numel(), moved))
    gammas = [0.0, 1.0, 2.0, 3.0, 5.0]
    paper = [-0.5, -0.25, 0.05, 0.25, 0.37, 0.5, 0.75, 1.0, 5.0]
    all_of_them = ["ece", "mce", "nll", "brier"]
    # Confidences are an element for each class, bins one for each confidence.
    for title, estimator, rows, classes, temperatures, values, criteria, stage in (
        ("grid equal_width 64x100", "equal_width", 64, 100, 32, gammas, all_of_them, "confidence"),
        ("grid of the paper 64x100", "equal_width", 64, 100, 32, paper, ["ece", "nll"], "confidence"),
        ("grid equal_width 512x3", "equal_width", 512, 3, 1, gammas, all_of_them, "bins"),
        ("grid equal_mass 2048x3", "equal_mass", 2048, 3, 1, gammas, all_of_them, "bins"),
    ):
        if not wanted(title):
            continue
        logits, target = 3 * torch.randn(rows, classes), torch.randint(classes, (rows,))
        span = [0.5 + 0.1 * i for i in range(temperatures)]
        run_grid(library, logits, target, values, span, n_bins=15, estimator=estimator, criteria=criteria)
        cells = rows * len(values) * temperatures
        kernels = {"confidence": ("_confidence", "_shared"), "bins": ("_bins",)}[stage]
        for name, code in executed(library).items():
            if short(name).endswith(kernels):
                yield Count(title, short(name), **count(code, cells * (classes if stage != "bins" else 1), cells * 4))


def spline(library: ctypes.CDLL, wanted: Callable[[str], bool]) -> Iterator[Count]:
    """Everything is in double: the sums write numbers of their own instead of an output."""
    for kind, shape in SPLINE:
        case = f"spline {kind} {'x'.join(map(str, shape))}"
        if not wanted(case):
            continue
        logits, (knots, values) = (3 * torch.randn(shape)).to(getattr(torch, kind)), curve_of()
        coefficients = spline_coefficients(knots, values)
        target, weight = logits.argmax(1), torch.ones(len(logits), dtype=torch.float64)
        run_spline_map(library, logits, knots, coefficients, None, None, torch.randn(shape).to(logits.dtype))
        run_spline_sums(library, logits, target, weight, knots, values)
        for name, code in executed(library).items():
            tensors = 3 if "backward" in name else 2 if "map" in name else 1
            yield Count(case, short(name), **count(code, logits.numel(), tensors * logits.nbytes))


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
    """Counts that exceed the table, and instructions that no kernel for float32 or narrower may have."""
    before = {(row.case, row.kernel): row for row in table}
    wrong = [f"{row.case}, {row.kernel}: not in the table" for row in found if (row.case, row.kernel) not in before]
    for row in found:
        old = before.get((row.case, row.kernel))
        if old is not None and row.instructions > MORE * old.instructions:
            wrong.append(f"{row.case}, {row.kernel}: {row.instructions} instructions, were {old.instructions}")
        if old is not None and row.wide < old.wide - 0.02:
            wrong.append(f"{row.case}, {row.kernel}: {row.wide} of the bytes move 16 at a time, were {old.wide}")
        # A row's own arithmetic may be in double precision, and may branch, and so may a vector: per element little is
        # left of it.
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
