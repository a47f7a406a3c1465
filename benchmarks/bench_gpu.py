"""The operators on a GPU, against the bytes per second of a copy: python -m benchmarks.bench_gpu --out FILE.csv

A case is checked against the reference, then timed with CUDA events by triton.testing.do_bench (medians; the cache is
emptied between calls). The bytes are those that the case must move at least. What could not be had is a row without
time that says why.
"""

import argparse
import csv
import datetime
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

import focalkern as fk
from benchmarks.bench_calibration_grid import SAMPLE, cell, validation_set
from benchmarks.bench_focal_loss import GAMMA, composite
from benchmarks.harness import commit, device_name

BYTES = 2**28  # of the logits of a case: several times the cache of any GPU
CLASSES = (10, 100, 1000, 32000, 128256)
# Fractions of the bytes per second of a copy that forward and backward are to reach.
LOSS_TARGETS = {10: (0.8, 0.8), 100: (0.8, 0.8), 1000: (0.85, 0.85), 32000: (0.9, 0.85), 128256: (0.9, 0.85)}
MAP_TARGET = 0.8
GRID_TARGETS_MS = {(10000, 100): 10.0, (50000, 1000): 1500.0}
LOOP_TARGET = 500.0  # how many times the per-cell loop is to take


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
    met: str = ""  # yes or no, where there is a target
    note: str = ""
    device: str = field(default_factory=lambda: device_name("cuda"))
    torch: str = torch.__version__
    cuda: str = str(torch.version.cuda)
    commit: str = field(default_factory=commit)
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())


Providers = dict[str, Callable[[], object] | str]  # a string says why there is none


def median_us(function: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return 1e3 * do_bench(function, warmup=10, rep=40, return_mode="median")


def copy_gb_per_s() -> float:
    source = torch.randn(BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * BYTES / median_us(lambda: target.copy_(source)) / 1e3


def timed(
    op: str, case: str, dtype: torch.dtype, providers: Providers, n_bytes: float, copy: float, target: float | None
) -> Iterator[GpuRow]:
    """A row for each provider; the first is focalkern."""
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
        yield row


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


def loss_rows(copy: float, deadline: float) -> Iterator[GpuRow]:
    for classes in (*CLASSES, 19):
        for dtype in (torch.bfloat16, torch.float32):
            if time.monotonic() > deadline:
                yield GpuRow("focal_loss", f"{classes} classes", str(dtype), "focalkern", note="not run: out of time")
                continue
            torch.manual_seed(0)
            elements = BYTES // dtype.itemsize
            pixels = (elements // (19 * 256 * 256), 19, 256, 256)
            shape = pixels if classes == 19 else (elements // classes, classes)
            logits = (3 * torch.randn(shape, device="cuda", dtype=torch.float32)).to(dtype).requires_grad_()
            target = torch.randint(classes, (shape[0], *shape[2:]), device="cuda")
            size = logits.numel() * dtype.itemsize
            case = "x".join(map(str, shape))
            check(logits, target)
            forward_target, backward_target = LOSS_TARGETS.get(classes, (None, None))

            own = fk.focal_loss(logits, target, GAMMA)
            plain = F.cross_entropy(logits, target)
            forward: Providers = {
                "focalkern": lambda z=logits, y=target: fk.focal_loss(z, y, GAMMA),
                "cross_entropy": lambda z=logits, y=target: F.cross_entropy(z, y),
            }
            yield from timed("focal_loss", f"forward {case}", dtype, forward, size, copy, forward_target)
            both: Providers = {"focalkern": backward(own, logits), "cross_entropy": backward(plain, logits)}
            yield from timed("focal_loss", f"backward {case}", dtype, both, 2 * size, copy, backward_target)
            del own, plain

            functions: dict[str, Callable[[Tensor, Tensor], Tensor] | str] = {
                "focalkern": lambda z, y: fk.focal_loss(z, y, GAMMA),
                "cross_entropy": F.cross_entropy,
                "cross_entropy, compiled": torch.compile(F.cross_entropy, dynamic=False),
                "composite, compiled": torch.compile(composite, dynamic=False),
                **(peers() if len(shape) == 2 else {}),
            }
            steps: Providers = {}
            for name, function in functions.items():
                if isinstance(function, str):
                    steps[name] = function
                    continue
                try:
                    # Some of them write the gradient over the logits: each has its own.
                    own_logits = logits.detach().clone().requires_grad_()
                    steps[name] = lambda f=function, z=own_logits, y=target: torch.autograd.grad(f(z, y).mean(), z)
                    steps[name]()
                except Exception as error:
                    steps[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            yield from timed("focal_loss", f"forward+backward {case}", dtype, steps, 3 * size, copy, None)
            torch._dynamo.reset()


def check(logits: Tensor, target: Tensor) -> None:
    """Loss and gradient of the first rows within the whole batch, against the reference."""
    rows = slice(0, 2)
    exact = logits[rows].detach().double().requires_grad_()
    expected = fk.reference.focal_loss(exact, target[rows], GAMMA, reduction="sum") / target.numel()
    (wanted,) = torch.autograd.grad(expected, exact)
    (grad,) = torch.autograd.grad(fk.focal_loss(logits, target, GAMMA), logits)
    tolerance = 1e-5 if logits.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(grad[rows].double(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


def map_rows(copy: float) -> Iterator[GpuRow]:
    for classes in (10, 100, 1000):
        logits = 3 * torch.randn(BYTES // 4 // classes, classes, device="cuda")
        expected = fk.reference.focal_calibration_map(logits[:100].double(), GAMMA, 1.5)
        torch.testing.assert_close(
            fk.focal_calibration_map(logits, GAMMA, 1.5)[:100].double(), expected, rtol=1e-5, atol=1e-6
        )
        case = f"forward {logits.shape[0]}x{classes}"
        providers: Providers = {
            "focalkern": lambda z=logits: fk.focal_calibration_map(z, GAMMA, 1.5),
            "composite": lambda z=logits: fk.reference.focal_calibration_map(z, GAMMA, 1.5),
        }
        yield from timed("calibration_map", case, torch.float32, providers, 2 * logits.nbytes, copy, MAP_TARGET)


def grid_rows() -> Iterator[GpuRow]:
    for (n, classes), limit in GRID_TARGETS_MS.items():
        logits, target = (tensor.cuda() for tensor in validation_set(n, classes))

        def whole(z=logits, y=target):
            return fk.calibration_grid(z, y, fk.PAPER_GAMMAS, fk.PAPER_TEMPERATURES)

        def loop(z=logits, y=target):
            return [cell(z, y, gamma, temperature) for gamma, temperature in SAMPLE]

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
    """Time until a step of a tiny batch is queued, the device not waited for."""
    logits = torch.randn(32, 10, device="cuda", requires_grad=True)
    target = torch.randint(10, (32,), device="cuda")
    medians = {}
    steps = {
        "focalkern": lambda: torch.autograd.grad(fk.focal_loss(logits, target), logits),
        "cross_entropy": lambda: torch.autograd.grad(F.cross_entropy(logits, target), logits),
    }
    for name, step in steps.items():
        samples = []
        for _ in range(60):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(20):
                step()
            samples.append((time.perf_counter() - began) / 20 * 1e6)
        medians[name] = sorted(samples)[len(samples) // 2]
    for name, value in medians.items():
        row = GpuRow(
            "focal_loss", "host time of a step 32x10", "float32", name, value, ratio=value / medians["focalkern"]
        )
        if name == "focalkern":
            row.target, row.met = "cross_entropy's", "yes" if value <= medians["cross_entropy"] else "no"
        yield row


def run(file: Path, deadline: float) -> list[GpuRow]:
    """Measures, appends every row to ``file`` as soon as it is there, and returns them."""
    copy = copy_gb_per_s()
    rows = [GpuRow("copy", "256 MiB", "float32", "Tensor.copy_", 2 * BYTES / copy / 1e3, copy, 1.0)]
    fresh = not file.exists()
    with file.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, [f.name for f in fields(GpuRow)], lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(_text(rows[0]))
        for source in (host_rows(), grid_rows(), map_rows(copy), loss_rows(copy, deadline)):
            for row in source:
                rows.append(row)
                writer.writerow(_text(row))
                stream.flush()
    return rows


def _text(row: GpuRow) -> dict[str, object]:
    return {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in asdict(row).items()}


def markdown(file: Path) -> str:
    """The timings of a result file as a table."""
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    shown = ("op", "case", "dtype", "provider", "median_us", "gb_per_s", "of_copy", "ratio", "target", "met", "note")
    return tabulate([[row[name] for name in shown] for row in rows], shown, tablefmt="github", disable_numparse=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.csv", help="rows are appended")
    parser.add_argument("--seconds", type=float, default=300, help="no further case begins after this (default 300)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu: torch sees no GPU", file=sys.stderr)
        return 3
    run(arguments.out, time.monotonic() + arguments.seconds)
    print(markdown(arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
