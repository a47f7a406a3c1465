"""Calls of the operators whose instructions are counted (instruction_counts.py)."""

import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_int64

import torch

from focalkern.fallback.spline_map import spline_coefficients
from focalkern.reference._softmax_losses import ROW_LOSSES, number_of
from tools.cuda.cases.calibration_grid import run_grid
from tools.cuda.cases.calibration_map import run_map
from tools.cuda.cases.common import real_of
from tools.cuda.cases.focal_loss import run_focal_loss
from tools.cuda.cases.sigmoid_loss import FOCAL, run_sigmoid_loss
from tools.cuda.cases.spline import curve_of
from tools.cuda.cases.spline import run_map as run_spline_map
from tools.cuda.cases.spline import run_sums as run_spline_sums
from tools.cuda.counting import Count, count, executed, short, simulate

MAX_GRID = 2048  # blocks, as in csrc/cuda/launch.h

# (dtype, shape, blocks that fit one multiprocessor for --cycles). The rows fill an H100 with whole tiles; only the
# first blocks run.
FOCAL_LOSS = [
    ("float32", (16896, 1000), 4), ("bfloat16", (16896, 1000), 4), ("float32", (1056, 32000), 4),
    ("bfloat16", (1056, 32000), 4), ("float32", (2112, 4097), 4), ("bfloat16", (2112, 4097), 4),
    ("float32", (135168, 10), 5), ("bfloat16", (135168, 10), 4), ("float32", (16896, 100), 5),
    ("bfloat16", (16896, 100), 4), ("float32", (2, 19, 67584), 5), ("bfloat16", (2, 19, 67584), 5),
    ("float64", (16896, 1000), 2), ("float32", (8, 128256), 2), ("bfloat16", (8, 128256), 2),
]  # fmt: skip
# Labels, label smoothing, or class probabilities of the type of the logits, which share the kernels of smoothing. Gamma
# is 2 for losses that have one.
ROW_LOSS = [
    ("poly", "float32", (16896, 1000), ""), ("poly", "bfloat16", (16896, 1000), ""),
    ("poly", "float32", (135168, 10), ""), ("dual", "float32", (16896, 1000), ""),
    ("brier", "float32", (16896, 1000), ""), ("focal", "float32", (16896, 1000), " smooth"),
    ("focal", "bfloat16", (16896, 1000), " smooth"), ("focal", "float32", (135168, 10), " smooth"),
    ("focal", "float32", (16896, 1000), " smooth gamma 0"),
    ("focal", "bfloat16", (135168, 10), " smooth"), ("focal", "float32", (16896, 100), " smooth"),
    ("focal", "bfloat16", (16896, 100), " smooth"), ("focal", "bfloat16", (512, 32000), " smooth"),
    ("focal", "float32", (16896, 400), " smooth"),
    ("focal", "bfloat16", (33792, 100), " smooth"), ("focal", "bfloat16", (270336, 10), " smooth"),
    ("focal", "float32", (16896, 1000), " probabilities"), ("focal", "bfloat16", (16896, 1000), " probabilities"),
    ("focal", "float32", (16896, 100), " probabilities"), ("focal", "bfloat16", (16896, 100), " probabilities"),
    ("focal", "float32", (135168, 10), " probabilities"), ("focal", "bfloat16", (135168, 10), " probabilities"),
]  # fmt: skip
# Targets of the type of the logits, hard or soft; a label for each row; or a label for each pixel of 128 images. The
# sizes give several rounds of the grid.
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


class ForwardOnly:
    """The library without the backward launch: a trace shows only the last launch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> object:
        return (lambda *_: 0) if name.endswith("backward") else getattr(self._library, name)


class WholeForward:
    """The library, whose forward launches run all blocks: the backward pass reads what they wrote."""

    def __init__(self, library: ctypes.CDLL, blocks: int) -> None:
        self._library, self._blocks = library, blocks

    def __getattr__(self, name: str) -> object:
        launch = getattr(self._library, name)

        def whole(*arguments: object) -> int:
            self._library.ptxrun_set(b"only_blocks", c_int64(0))
            status: int = launch(*arguments)
            self._library.ptxrun_set(b"only_blocks", c_int64(self._blocks))
            return status

        return whole if name.endswith("forward") else launch


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
    for loss, kind, (rows, classes), targets in ROW_LOSS:
        case = f"{loss} {kind} {rows}x{classes}{targets}"
        if not wanted(case):
            continue
        dtype, blocks = getattr(torch, kind), 6
        logits = (3 * torch.randn(64, classes)).to(dtype).repeat(rows // 64, 1)
        library.ptxrun_set(b"only_blocks", c_int64(blocks))
        gamma = 2.0 if "gamma" in specs[loss].parameters and not targets.endswith("gamma 0") else 0.0
        target = torch.randint(classes, (rows,))
        if soft := targets == " probabilities":
            target = (3 * torch.randn(64, classes)).softmax(1).to(dtype).repeat(rows // 64, 1)
        arguments = (logits, target, gamma, torch.ones(1, dtype=real_of(dtype)))
        options = {"reduction": "sum", "label_smoothing": 0.1 if "smooth" in targets else 0.0, "epsilon": 1.5,
                   "kind": number_of(specs[loss].name), "target_gradient": False}  # fmt: skip
        run_focal_loss(library, *arguments, **options)
        codes = executed(library)
        if any(
            rows_of_a_block(library, name, (rows, classes), dtype) != rows_of_lanes(classes, dtype) for name in codes
        ):
            run_focal_loss(WholeForward(library, blocks), *arguments, **options)
            codes |= {name: code for name, code in executed(library).items() if "backward" in name}
        library.ptxrun_set(b"only_blocks", c_int64(0))
        for name, code in codes.items():
            some = taken_by(blocks, rows, rows_of_a_block(library, name, (rows, classes), dtype))
            of_row = 12 if soft else 20  # three saved numbers, and the label
            moved = some * (classes * dtype.itemsize * (soft + (2 if "backward" in name else 1)) + of_row)
            yield Count(case, short(name), **count(code, some * classes, moved))


def rows_of_a_block(library: ctypes.CDLL, kernel: str, shape: tuple[int, int], dtype: torch.dtype) -> int:
    rows, classes = shape
    if "registers" in kernel or ("twice" in kernel and rows_of_lanes(classes, dtype) > 1):
        # rows_per_tile_of_warps of row_in_registers.cuh
        return next(tile for tile in (32, 16, 8) if tile == 8 or rows // tile >= MAX_GRID // 8)
    if "tile" in kernel:
        of_plan = library.rows_of_a_tile(*map(c_int64, (rows, classes, dtype.itemsize, True, False, False)))
        # In these kernels (row_loss_smoothed.cu, row_loss_shared.cu) each row of a tile has a thread of its own.
        has_thread = "backward" in kernel and ("smoothed_focal" in kernel or "shared_focal" in kernel)
        # plan_short_rows of short_row.cuh; bytes of a tile, numbers of a row
        if "smoothed_focal_forward" in kernel or "shared_focal_forward" in kernel:
            operands, most, numbers = (
                (1, 128 * (200 + 32), 32) if "smoothed" in kernel else (2, 2 * 16384 + 256 * 40, 40)
            )
            has_lanes = classes > (26 if dtype.itemsize == 2 and classes % 2 == 0 else 16)
            of_row = operands * classes * dtype.itemsize + (numbers if has_lanes else 0)
            if 2 * of_plan * of_row <= most and rows >= 2 * of_plan * (MAX_GRID // 8):
                of_plan *= 2
        return min(of_plan, 256) if has_thread else of_plan
    return rows_of_lanes(classes, dtype)


def rows_of_lanes(classes: int, dtype: torch.dtype) -> int:
    """The rows of a block if lanes of a warp, a warp or the block take one."""
    return 1 if classes * dtype.itemsize > 16384 else 256 // min(32, 1 << (-(-classes // 16) - 1).bit_length())


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
                pack *= 8  # classes per thread
            some = taken_by(blocks, logits.numel(), 256 * pack)
            tensors = (1 if "labels" in targets else 2) + ("backward" in name)
            moved = some * (tensors * dtype.itemsize + (8 / classes if "labels" in targets else 0))
            yield Count(case, short(name), **count(code, some, moved))


def taken_by(blocks: int, size: int, of_a_block: int) -> int:
    """The part of `size` that the first blocks take over all rounds of the grid."""
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
    # The confidences have one element per class, the bins one per confidence.
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
