"""The operators on a GPU, against the bytes per second of a copy: python -m benchmarks.speed.gpu --out FILE.csv

A case is checked against the reference, then timed with CUDA events by triton.testing.do_bench (medians; the cache is
emptied between calls). The bytes are the minimum that the case must move: the logits or their gradient, a label per
row, and the three numbers per row that the forward pass saves. A case that cannot run is a row without a time, with the
reason."""

import argparse
import csv
import functools
import importlib
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import focalkern as fk
from benchmarks.speed import gpu_options
from benchmarks.speed.calibration_grid import SAMPLE, cell, validation_set
from benchmarks.speed.focal_loss import GAMMA, composite
from benchmarks.speed.gpu_rows import BYTES, GpuRow, Providers, as_text, copy_gb_per_s, markdown, median_us, step, timed

# Goals for forward and backward, as fractions of the bytes per second of a copy.
LOSS_TARGETS = {10: (0.8, 0.8), 100: (0.8, 0.8), 1000: (0.85, 0.85), 32000: (0.9, 0.85), 128256: (0.9, 0.85)}
MAP_TARGET = 0.8
GRID_TARGETS_MS = {(10000, 100): 10.0, (50000, 1000): 1500.0}
LOOP_TARGET = 500.0  # goal: how many times longer the per-cell loop takes


def backward(loss: Tensor, logits: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(loss, logits, retain_graph=True)


def peers() -> dict[str, Callable[[Tensor, Tensor], Tensor] | str]:
    """Cross-entropy of other projects, each as (logits, target) -> loss."""
    found: dict[str, Callable[[Tensor, Tensor], Tensor] | str] = {}
    for name, module, function in (
        ("Liger-Kernel cross-entropy", "liger_kernel.transformers.functional", "liger_cross_entropy"),
        ("quack cross-entropy", "quack.cross_entropy", "cross_entropy"),
    ):
        try:
            found[name] = getattr(importlib.import_module(module), function)
        except Exception as error:  # not installed, or not for this torch or GPU
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def loss_data(classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    elements = BYTES // dtype.itemsize
    pixels = (elements // (19 * 256 * 256), 19, 256, 256)
    shape = pixels if classes == 19 else (elements // classes, classes)
    logits = (3 * torch.randn(shape, device="cuda", dtype=torch.float32)).to(dtype).requires_grad_()
    return logits, torch.randint(classes, (shape[0], *shape[2:]), device="cuda")


def loss_rows(classes: int, dtype: torch.dtype, copy: float) -> Iterator[GpuRow]:
    """Forward and backward, each alone."""
    logits, target = loss_data(classes, dtype)
    case = "x".join(map(str, logits.shape))
    check(logits, target)
    forward_target, backward_target = LOSS_TARGETS.get(classes, (None, None))
    forward: Providers = {
        "focalkern": lambda: fk.focal_loss(logits, target, GAMMA),
        "cross_entropy": lambda: F.cross_entropy(logits, target),
    }
    n_bytes = logits.nbytes + row_bytes(target, dtype)
    yield from timed("focal_loss", f"forward {case}", dtype, forward, n_bytes, copy, forward_target)
    both: Providers = {
        "focalkern": backward(fk.focal_loss(logits, target, GAMMA), logits),
        "cross_entropy": backward(F.cross_entropy(logits, target), logits),
    }
    yield from timed("focal_loss", f"backward {case}", dtype, both, logits.nbytes + n_bytes, copy, backward_target)


def row_bytes(target: Tensor, dtype: torch.dtype) -> int:
    """Labels, and the three numbers that a forward pass writes and a backward pass reads."""
    return target.nbytes + 3 * target.numel() * (8 if dtype == torch.float64 else 4)


def step_rows(classes: int, dtype: torch.dtype, copy: float) -> Iterator[GpuRow]:
    """Forward and backward together, compared with compiled code, which takes seconds per case, and other projects."""
    logits, target = loss_data(classes, dtype)
    functions: dict[str, Callable[[Tensor, Tensor], Tensor] | str] = {
        "focalkern": lambda z, y: fk.focal_loss(z, y, GAMMA),
        "cross_entropy": F.cross_entropy,
        "cross_entropy, compiled": torch.compile(F.cross_entropy, dynamic=False),
        "composite, compiled": torch.compile(composite, dynamic=False),
        **(peers() if logits.dim() == 2 else {}),
    }
    steps: Providers = {}
    for name, function in functions.items():
        if isinstance(function, str):
            steps[name] = function
            continue
        # Some of these write the gradient over the logits, so each has its own copy.
        own_logits = logits.detach().clone().requires_grad_()
        run = functools.partial(step, function, own_logits, target)
        try:
            run()
            steps[name] = run
        except Exception as error:
            steps[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    case = "forward+backward " + "x".join(map(str, logits.shape))
    n_bytes = 3 * logits.nbytes + 2 * row_bytes(target, dtype)
    yield from timed("focal_loss", case, dtype, steps, n_bytes, copy, None, fastest=True)
    torch.compiler.reset()


def check(logits: Tensor, target: Tensor) -> None:
    """Compares the gradients of the first and last rows of the whole batch with the reference."""
    loss = fk.focal_loss(logits, target, GAMMA)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    tolerance = 1e-5 if logits.dtype == torch.float32 else 2e-2
    for rows in (slice(0, 2), slice(-2, None)):
        exact = logits[rows].detach().double().requires_grad_()
        expected = fk.reference.focal_loss(exact, target[rows], GAMMA, reduction="sum") / target.numel()
        (wanted,) = torch.autograd.grad(expected, exact)
        atol = tolerance * wanted.abs().max().item()
        torch.testing.assert_close(grad[rows].double(), wanted, rtol=tolerance, atol=atol)


def map_rows(classes: int, dtype: torch.dtype, copy: float) -> Iterator[GpuRow]:
    """Forward and backward, each alone."""
    rows = BYTES // dtype.itemsize // classes
    logits = (3 * torch.randn(rows, classes, device="cuda")).to(dtype).requires_grad_()
    grad = torch.randn(rows, classes, device="cuda", dtype=dtype)
    exact = logits[:100].detach().double().requires_grad_()
    expected = fk.reference.focal_calibration_map(exact, GAMMA, 1.5)
    (wanted,) = torch.autograd.grad(expected, exact, grad[:100].double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    output = fk.focal_calibration_map(logits, GAMMA, 1.5)
    torch.testing.assert_close(output[:100].double(), expected, rtol=tolerance, atol=0.1 * tolerance)
    (found,) = torch.autograd.grad(output, logits, grad, retain_graph=True)
    torch.testing.assert_close(found[:100].double(), wanted, rtol=tolerance, atol=tolerance)
    size = f"{rows}x{classes}"
    values = logits.detach()  # no graph in the forward times
    forward: Providers = {
        "focalkern": lambda: fk.focal_calibration_map(values, GAMMA, 1.5),
        "composite": lambda: fk.reference.focal_calibration_map(values, GAMMA, 1.5),
    }
    yield from timed("calibration_map", f"forward {size}", dtype, forward, 2 * logits.nbytes, copy, MAP_TARGET)
    both: Providers = {"focalkern": lambda: torch.autograd.grad(output, logits, grad, retain_graph=True)}
    yield from timed("calibration_map", f"backward {size}", dtype, both, 3 * logits.nbytes, copy, None)


def grid_rows(n: int, classes: int) -> Iterator[GpuRow]:
    logits, target = (tensor.cuda() for tensor in validation_set(n, classes))
    limit = GRID_TARGETS_MS[n, classes]

    def whole():
        return fk.calibration_grid(logits, target, fk.PAPER_GAMMAS, fk.PAPER_TEMPERATURES)

    def loop():
        return [cell(logits, target, gamma, temperature) for gamma, temperature in SAMPLE]

    grid = whole()
    for (gamma, temperature), (ece, nll) in zip(SAMPLE, loop(), strict=True):
        place = grid.gammas.tolist().index(gamma), round(temperature / 0.01) - 1
        assert abs(ece - grid.tables["ece"][place].item()) <= 1e-6 + 4 / n  # a row of a tie may fall into the next bin
        assert abs(nll - grid.tables["nll"][place].item()) <= 1e-3 * nll  # the loop's clamps
    case = f"4500 cells {n}x{classes}"
    own, per_cell = median_us(whole), median_us(loop) * 4500 / len(SAMPLE)
    yield GpuRow(
        "calibration_grid", case, "float32", "focalkern", own, ratio=1.0,
        target=f"{limit:g} ms", met="yes" if own <= 1e3 * limit else "no",
    )  # fmt: skip
    yield GpuRow(
        "calibration_grid", case, "float32", "per-cell loop", per_cell, ratio=per_cell / own,
        target=f"{LOOP_TARGET:g} times as long", met="yes" if per_cell >= LOOP_TARGET * own else "no",
        note=f"one cell times {4500 / len(SAMPLE):g}",
    )  # fmt: skip


def host_rows() -> Iterator[GpuRow]:
    """Time until a step of a tiny batch is queued, without waiting for the device."""
    logits = torch.randn(32, 10, device="cuda", requires_grad=True)
    target = torch.randint(10, (32,), device="cuda")
    medians = {}
    steps = {
        "focalkern": lambda: torch.autograd.grad(fk.focal_loss(logits, target), logits),
        "cross_entropy": lambda: torch.autograd.grad(F.cross_entropy(logits, target), logits),
    }
    for name, run in steps.items():
        samples = []
        for _ in range(60):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(20):
                run()
            samples.append((time.perf_counter() - began) / 20 * 1e6)
        medians[name] = sorted(samples)[len(samples) // 2]
    for name, value in medians.items():
        row = GpuRow(
            "focal_loss", "host time of a step 32x10", "float32", name, value, ratio=value / medians["focalkern"]
        )
        if name == "focalkern":
            row.target, row.met = "cross_entropy's", "yes" if value <= medians["cross_entropy"] else "no"
        yield row


def cases(copy: float) -> Iterator[tuple[str, str, Callable[[], Iterator[GpuRow]]]]:
    """(operator, case, rows): first the cases with their own target, then those that take long."""
    yield "focal_loss", "host time", host_rows
    by_interest = (32000, 128256, 1000, 100, 10, 19)
    for classes, dtype in itertools.product(by_interest, (torch.bfloat16, torch.float32)):
        label = f"{classes} classes, {dtype}"
        yield "focal_loss", label, functools.partial(loss_rows, classes, dtype, copy)
    for classes, dtype in itertools.product((1000, 100, 10), (torch.float32, torch.bfloat16)):
        yield "calibration_map", f"{classes} classes, {dtype}", functools.partial(map_rows, classes, dtype, copy)
    for n, classes in GRID_TARGETS_MS:
        yield "calibration_grid", f"{n}x{classes}", functools.partial(grid_rows, n, classes)
    for classes, dtype in itertools.product(by_interest, (torch.bfloat16, torch.float32)):
        label = f"forward+backward, {classes} classes, {dtype}"
        yield "focal_loss", label, functools.partial(step_rows, classes, dtype, copy)
    yield from gpu_options.cases(copy)


def run(file: Path, deadline: float) -> list[GpuRow]:
    """Measures, appends every row to ``file`` at once, and returns all rows. A case that fails gives a row, too."""
    copy = copy_gb_per_s()
    rows: list[GpuRow] = []
    fresh = not file.exists()
    with file.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, [f.name for f in fields(GpuRow)], lineterminator="\n")
        if fresh:
            writer.writeheader()

        def keep(row: GpuRow) -> None:
            rows.append(row)
            writer.writerow(as_text(row))
            stream.flush()

        keep(GpuRow("copy", "256 MiB", "float32", "Tensor.copy_", 2 * BYTES / copy / 1e3, copy, 1.0))
        for op, label, measured in cases(copy):
            if time.monotonic() > deadline:
                keep(GpuRow(op, label, "", "focalkern", note="not run: out of time"))
                continue
            try:
                for row in measured():
                    keep(row)
            except Exception as error:
                traceback.print_exc()
                keep(
                    GpuRow(
                        op,
                        label,
                        "",
                        "focalkern",
                        note=f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
                    )
                )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.csv", help="rows are appended")
    parser.add_argument("--seconds", type=float, default=300, help="no further case begins after this (default 300)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu: torch finds no GPU", file=sys.stderr)
        return 3
    run(arguments.out, time.monotonic() + arguments.seconds)
    print(markdown(arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
