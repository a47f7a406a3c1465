"""Shared by the benchmarks: providers, checks before timing, interleaved timing, memory, and result files.

The machines are shared and their speed drifts, so the providers of a case take turns within one process, and the
tables show medians and ratios of one run, never single times.
"""

import csv
import ctypes
import datetime
import functools
import gc
import platform
import random
import resource
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch

import focalkern
from benchmarks.torchvision_names import import_torchvision_beside_any_torch

torchvision_names = import_torchvision_beside_any_torch()  # the names exist as long as this library object

RESULTS = Path(__file__).parent / "results"


def readable(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, never with an exponent of 10: 0.127, 22.6, 9,480."""
    text = f"{value:.{digits}g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def in_threads(count: float | str) -> str:
    """``1 thread``, ``2 threads``; a column of a CSV is text."""
    return f"{float(count):g} {'thread' if float(count) == 1 else 'threads'}"


@dataclass
class Provider:
    """One way of computing a case: a function without arguments, or the reason why it is not available."""

    name: str
    run: Callable[[], object] | None
    absent: str = ""
    check: Callable[[object], None] | None = None
    scale: float = 1.0  # factor of one call's time, if only part of the work is timed


@dataclass
class Row:
    """One provider's result in one case: a row of the result file."""

    op: str
    case: str
    n: int
    classes: int
    dtype: str
    provider: str
    median_ms: float = float("nan")
    low_ms: float = float("nan")  # first and third quartile of the repeats
    high_ms: float = float("nan")
    repeats: int = 0
    gb_per_s: float = float("nan")  # for the minimum of bytes that the case must move
    ratio_to_copy: float = float("nan")  # median over that of a copy of the logits in the same run
    # How many times slower than focalkern this provider is: the median over the turns of the ratio of their times. The
    # machine's speed changes from turn to turn; it cancels within one.
    speedup: float = float("nan")
    peak_extra_mib: float = float("nan")
    note: str = ""
    device: str = field(default_factory=lambda: device_name())
    threads: int = field(default_factory=torch.get_num_threads)
    torch: str = torch.__version__
    focalkern: str = focalkern.__version__
    commit: str = field(default_factory=lambda: commit())
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())


@functools.cache
def device_name(device: str = "cpu") -> str:
    if device == "cuda":
        return torch.cuda.get_device_name().replace(" ", "-")
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip().replace(" ", "-")
    return platform.processor() or platform.machine()


@functools.cache
def commit() -> str:
    """The measured commit, with the mark "-dirty" if anything but results differs from it."""

    apart = ("benchmarks/results", "README.md", "docs")

    def git(*arguments: str) -> str:
        folder = Path(__file__).parents[1]
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True).stdout.strip()

    try:
        found = git("describe", "--always", "--abbrev=9")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{name}" for name in apart))
    except OSError:
        return "unknown"
    return (found or "unknown") + ("-dirty" if changed else "")


def why_absent(error: ImportError | RuntimeError) -> str:
    """The error as one line. A RuntimeError comes from a module compiled for another torch."""
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def time_in_turns(providers: list[Provider], *, seconds: float, max_repeats: int = 60) -> dict[str, list[float]]:
    """Milliseconds per call of each provider, which take turns until ``seconds`` are spent.

    Each round has another order, by a fixed seed, because the state of memory, caches and threads depends on the
    provider before. A sample is as many calls as fill half a millisecond, so that the resolution of the clock does not
    matter. At least five samples each, or three where a turn takes more than five seconds."""
    calls = {}
    turn = 0.0
    for provider in providers:
        provider.run()
        _synchronize()
        start = time.perf_counter()
        provider.run()
        _synchronize()
        once = time.perf_counter() - start
        turn += once
        calls[provider.name] = max(1, int(5e-4 / max(once, 1e-7)))
    samples: dict[str, list[float]] = {provider.name: [] for provider in providers}
    order, shuffled = list(providers), random.Random(0)
    enabled = gc.isenabled()
    gc.disable()
    try:
        begin = time.perf_counter()
        for repeat in range(max_repeats):
            if repeat >= (5 if turn < 5 else 3) and time.perf_counter() - begin > seconds:
                break
            shuffled.shuffle(order)
            for provider in order:
                n = calls[provider.name]
                # Untimed warm-up calls. The provider before may have evicted caches or freed memory; the first calls
                # then have page faults that a loop of this provider alone would not have. The third call has none. For
                # calls that take seconds the effect is negligible.
                for _ in range(3 if turn < 5 else 0):
                    provider.run()
                _synchronize()
                start = time.perf_counter()
                for _ in range(n):
                    provider.run()
                _synchronize()
                samples[provider.name].append((time.perf_counter() - start) / n * 1e3 * provider.scale)
    finally:
        if enabled:
            gc.enable()
    return samples


def keep_freed_memory() -> None:
    """Makes glibc's allocator keep freed memory until the process ends, as other allocators do.

    By default it may return the memory of large tensors to the system. The page faults of the next tensors can then
    take longer than the computation.
    """
    m_trim_threshold, m_mmap_max = -1, -4
    libc = ctypes.CDLL("libc.so.6")
    if not (libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, 2**31 - 1)):
        raise OSError("mallopt refused")


def page_faults(run: Callable[[], object]) -> int:
    """Pages that the system hands out during a call, the median of five."""
    counts = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        run()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return int(np.median(counts))


def peak_extra_mib(run: Callable[[], object]) -> float:
    """Additional memory of a call, results included, in MiB."""
    gc.collect()
    if torch.cuda.is_available():
        _synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        _synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    focalkern.empty_cache()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory that the allocator holds would hide the peak
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _high_water_kib()
        run()
        return (_high_water_kib() - before) / 2**10
    except OSError:
        return float("nan")


def _high_water_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    raise OSError("no high-water mark in /proc/self/status")


def measure(
    *,
    op: str,
    case: str,
    n: int,
    classes: int,
    dtype: torch.dtype,
    providers: list[Provider],
    bytes_moved: float,
    copy: Provider | None,
    seconds: float,
    device: str = "cpu",
    once: bool = False,
) -> list[Row]:
    """Checks every provider, then times them in turns. The first provider is focalkern; ratios refer to it.

    ``once`` is for cases that take a minute: one call each, timed without repeats or memory.
    """
    label = str(dtype).removeprefix("torch.")
    shared = {"op": op, "case": case, "n": n, "classes": classes, "dtype": label, "device": device_name(device)}
    present = [provider for provider in providers if provider.run is not None]
    for provider in present:
        if provider.check is not None:
            provider.check(provider.run())
    timed = present + ([copy] if copy is not None else [])
    samples = {provider.name: [_seconds(provider.run) * 1e3] for provider in timed} if once else {}
    samples = samples or time_in_turns(timed, seconds=seconds)
    medians = {name: float(np.median(values)) for name, values in samples.items()}
    rows = []
    for provider in providers:
        if provider.run is None:
            rows.append(Row(**shared, provider=provider.name, note=f"absent: {provider.absent}"))
            continue
        values = samples[provider.name]
        median = medians[provider.name]
        notes = [f"one call times {provider.scale:g}"] if provider.scale != 1 else []
        faults = page_faults(provider.run) if median < 1e3 and provider.scale == 1 and not once else 0
        if faults >= 100:
            notes.append(f"{faults} page faults")
        rows.append(
            Row(
                **shared,
                provider=provider.name,
                median_ms=median,
                low_ms=float(np.quantile(values, 0.25)),
                high_ms=float(np.quantile(values, 0.75)),
                repeats=len(values),
                gb_per_s=bytes_moved / median / 1e6,
                ratio_to_copy=median / medians[copy.name] if copy is not None else float("nan"),
                speedup=float(np.median(np.divide(values, samples[present[0].name]))),
                peak_extra_mib=float("nan") if once else peak_extra_mib(provider.run),
                note=", ".join(notes),
            )
        )
    return rows


def recorded_rows(op: str, out: Path = RESULTS) -> list[dict[str, str]]:
    """All recorded rows of an operator, oldest first."""
    rows: list[dict[str, str]] = []
    # Names are DEVICE_OP_DATE. The pattern also matches linear_focal_loss for focal_loss; a device has no "_".
    files = [path for path in out.glob(f"*_{op}_*.csv") if path.stem.partition("_")[2].rpartition("_")[0] == op]
    for path in sorted(files, key=lambda path: path.stem.rsplit("_", 1)[1]):
        with path.open(newline="") as file:
            rows.extend(csv.DictReader(file))
    return rows


def last_rows(op: str, out: Path = RESULTS) -> list[dict[str, str]]:
    """The recorded rows of the commit at which each case was measured last, without absent providers."""
    rows = recorded_rows(op, out)
    last = {(row["case"], row["dtype"]): row["commit"] for row in rows}
    return [row for row in rows if row["commit"] == last[row["case"], row["dtype"]] and row["repeats"] != "0"]


def recorded_medians(
    op: str, out: Path = RESULTS, column: str = "median_ms"
) -> dict[tuple[str, str], dict[str, float]]:
    """{(case, dtype): {provider: milliseconds}}: the median over the recorded runs of the latest commit that measured
    the case, so that a table does not depend on the state of the machine in one run."""
    runs: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in last_rows(op, out):
        providers = runs.setdefault((row["case"], row["dtype"]), {})
        providers.setdefault(row["provider"], []).append(float(row[column]))
    return {
        case: {provider: float(np.median(values)) for provider, values in providers.items()}
        for case, providers in runs.items()
    }


def append_rows(rows: Iterable[Row], out: Path = RESULTS) -> list[Path]:
    """Appends rows to one file per device, operator and date. Returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for row in rows:
        path = out / f"{row.device}_{row.op}_{row.date}.csv".replace("/", "-")
        fresh = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in asdict(row).items()})
        if path not in written:
            written.append(path)
    return written
