"""Stages of gpu_check.py: each runs in its own process and returns a result."""

import argparse
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARGIN = 15  # time that a stage leaves for its own end
# The compiled files; a wheel for several releases of torch also has the libraries.
COMPILED = ("_build_info.py", "_C*.so", "libfocalkern_*.so")
# pytest-benchmark, where it is installed, warns beside xdist, and warnings are errors here.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
Result = dict[str, Any]


class StageError(Exception):
    """A stage failed; the message is one line."""


# ---- stages: each runs in its own process and returns what it found -------------------------------------------------


def device(_: argparse.Namespace) -> Result:
    import torch
    from triton.testing import do_bench

    properties = torch.cuda.get_device_properties(0)
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    copy_ms = do_bench(lambda: target.copy_(source), return_mode="median")
    return {
        "summary": f"{properties.name}, {2 * source.nbytes / copy_ms / 1e9:.2f} TB/s copy",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "copy_tb_per_s": 2 * source.nbytes / copy_ms / 1e9,
    }


def take_prebuilt(place: Path, package: Path) -> None:
    """Replaces the compiled files of the package by files that were compiled elsewhere.

    From a wheel, or a folder with the files of one: those of a build for one torch, or of a wheel for several, whose
    modules share libraries.
    """
    folder = zipfile.Path(place, "focalkern/") if place.is_file() else place
    found = {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if any(fnmatch.fnmatch(file.name, pattern) for pattern in COMPILED)
    }
    if "_build_info.py" not in found or not any(name.startswith("_C") for name in found):
        raise StageError(f"{place}: expected _build_info.py and a module _C*.so, found {sorted(found)}")
    for pattern in COMPILED:
        for old in package.glob(pattern):
            old.unlink()
    for name, content in found.items():
        (package / name).write_bytes(content)


def build(arguments: argparse.Namespace) -> Result:
    import torch

    if arguments.prebuilt is not None:
        take_prebuilt(arguments.prebuilt, ROOT / "focalkern")
    else:
        major, minor = torch.cuda.get_device_capability()
        settings = {
            "FOCALKERN_CUDA": "1",
            "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}",
            "MAX_JOBS": str(os.cpu_count() or 1),
        }
        _run([sys.executable, "setup.py", "build_ext", "--inplace"], **settings)
    info = _run(
        [sys.executable, "-c", "import json, focalkern; print(json.dumps(focalkern.build_info()))"],
    )
    built = json.loads(info.splitlines()[-1])
    if not built["cuda_kernels"]:
        raise StageError(f"no CUDA kernels: {built['why']}")
    return {"summary": f"CUDA {built['cuda']} for {', '.join(built['arch_list'])}", **built}


def resources(arguments: argparse.Namespace) -> Result:
    from tools.cuda import resources

    rows = resources.read()
    with (arguments.out / "kernel_resources.csv").open("w") as file:
        file.write("kernel,arch,registers,stack_bytes,local_bytes,shared_bytes\n")
        for row in rows:
            file.write(
                f'"{row.kernel}",{row.arch},{row.registers},{row.stack_bytes},{row.local_bytes},{row.shared_bytes}\n'
            )
    spilling = [row.kernel for row in rows if row.stack_bytes or row.local_bytes]
    if spilling:
        raise StageError(f"{len(spilling)} kernels spill or have a stack frame, the first {spilling[0]}")
    return {"summary": f"{len(rows)} kernels, none spills, at most {max(row.registers for row in rows)} registers"}


def tests(_: argparse.Namespace) -> Result:
    # tests/conftest.py marks these tests. The others need no GPU and run in continuous integration.
    parallel = ["-n", str(min(8, (os.cpu_count() or 2) // 2))] if _has("xdist") else []
    command = [*PYTEST, "-m", "gpu", "-rfE", "--durations=10", "--continue-on-collection-errors", *parallel, "tests"]
    settings = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    line = _pytest_line(done.stdout)
    counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", line)}
    passed = done.returncode == 0 and counts.get("passed", 0) > 0
    return {
        "status": "passed" if passed else "failed",
        "summary": line or f"pytest ended with {done.returncode}",
        "failures": re.findall(r"^(?:FAILED|ERROR) .*$", done.stdout, re.MULTILINE),
        **counts,
    }


def determinism(_: argparse.Namespace) -> Result:
    import torch

    import focalkern as fk

    torch.manual_seed(0)
    checked = 0
    for rows, classes in ((4096, 10), (2000, 100), (700, 1000), (40, 50000)):
        logits = (3 * torch.randn(rows, classes, device="cuda")).requires_grad_()
        target = torch.randint(classes, (rows,), device="cuda")

        def loss(logits=logits, target=target):
            value = fk.focal_loss(logits, target)
            return value, *torch.autograd.grad(value, logits)

        def mapped(logits=logits):
            value = fk.focal_calibration_map(logits, 2.0, 0.7)
            return value, *torch.autograd.grad(value.square().sum(), logits)

        for function in (loss, mapped):
            first = function()
            for _ in range(9):
                for a, b in zip(first, function(), strict=True):
                    if not torch.equal(a, b):
                        raise StageError(f"{function.__name__} of [{rows}, {classes}] differs between two runs")
            checked += 1
    logits, target = 3 * torch.randn(5000, 20, device="cuda"), torch.randint(20, (5000,), device="cuda")
    for estimator in ("equal_mass", "equal_mass_interp", "equal_width"):
        grids = [
            fk.calibration_grid(logits, target, fk.PAPER_GAMMAS, fk.PAPER_TEMPERATURES[::20], estimator=estimator)
            for _ in range(10)
        ]
        if any(not torch.equal(g.tables[name], grids[0].tables[name]) for g in grids for name in g.tables):
            raise StageError(f"calibration_grid, {estimator}, differs between two runs")
        checked += 1
    return {"summary": f"{checked} cases have the same bits ten times"}


def graphs(_: argparse.Namespace) -> Result:
    import torch
    import torch.nn.functional as F

    import focalkern as fk

    logits = torch.randn(512, 100, device="cuda", requires_grad=True)
    target = torch.randint(100, (512,), device="cuda")
    table = fk.FLSD_53.to("cuda")

    def step():
        loss = fk.focal_loss(logits, target, table)
        calibrated = fk.focal_calibration_map(logits, 2.0)
        return loss, calibrated, *torch.autograd.grad(loss + calibrated.square().mean(), logits)

    def waits_for_nothing():
        step()
        torch.cuda.set_sync_debug_mode("error")  # raises where something waits for the device
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def captured_and_replayed():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            logits.copy_(torch.randn_like(logits))
        graph.replay()
        torch.cuda.synchronize()
        if not all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True)):
            raise StageError("a replayed graph differs from the same step without it")

    def two_streams_at_once():
        expected = [fk.focal_loss(logits * k, target) for k in (1, 2)]
        streams = [torch.cuda.Stream() for _ in range(2)]
        results = [None, None]
        for _ in range(50):
            for k, stream in enumerate(streams):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    results[k] = fk.focal_loss(logits * (k + 1), target)
        torch.cuda.synchronize()
        if any(not torch.equal(a, b) for a, b in zip(expected, results, strict=True)):
            raise StageError("two streams at once give another result than one after the other")

    launches: dict[str, list[str]] = {"focal_loss": [], "cross_entropy": []}

    def count_launches():
        for function, names in zip((fk.focal_loss, F.cross_entropy), launches.values(), strict=True):
            for _ in range(2):  # the first one starts the profiler
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    function(logits, target)
                    torch.cuda.synchronize()
            names += [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]

    failures = []
    for check in (waits_for_nothing, captured_and_replayed, two_streams_at_once, count_launches):
        try:
            check()
        except Exception as error:
            traceback.print_exc()
            failures.append(f"{check.__name__}: {error}".splitlines()[0])
    own, plain = launches.values()
    return {
        "status": "failed" if failures else "passed",
        "summary": f"{'; '.join(failures) or 'captured, replayed, no wait'}; "
        f"{len(own)} launches forward (cross_entropy {len(plain)})",
        "forward_launches": launches,
    }


def sanitizer(arguments: argparse.Namespace) -> Result:
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"status": "skipped", "summary": "compute-sanitizer is not on PATH"}
    # PyTorch's caching allocator would hide reads beyond an allocation inside a block that it keeps.
    settings = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    # initcheck must see the writes of torch's kernels, but does not check these kernels themselves.
    own = ["--kernel-name", "kernel_substring=focalkern"]
    options = {"memcheck": [*own, "--report-api-errors", "no"], "racecheck": own, "initcheck": []}
    running = {}
    for number, (tool, chosen) in enumerate(options.items()):
        command = [program, "--tool", tool, *chosen, "--error-exitcode", "86", "--port", str(49152 + 100 * number)]
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command += [*PYTEST, "-rs", "tests/kernels/test_cuda_paths.py"]
        running[tool] = log, subprocess.Popen(command, cwd=ROOT, env=settings, stdout=log, stderr=subprocess.STDOUT)
    end = time.monotonic() + arguments.stage_seconds - MARGIN
    found, failed = {}, []
    for tool, (log, process) in running.items():
        try:
            code = process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None  # run_stage ends what is left of this stage
        log.seek(0)
        text = log.read()
        print(f"---- {tool}\n{text}")
        summaries = re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*", text)
        counts = _pytest_line(text)
        found[tool] = "not finished in time" if code is None else "; ".join([*summaries[-1:], counts or f"exit {code}"])
        # Without a summary nothing was checked; without a passed test there was nothing to check.
        if code != 0 or not summaries or "passed" not in counts:
            failed.append(tool)
    if failed:
        raise StageError("; ".join(f"{tool}: {found[tool]}" for tool in failed))
    return {"summary": "; ".join(f"{tool}: {text}" for tool, text in found.items()), **found}


def benchmarks(arguments: argparse.Namespace) -> Result:
    from benchmarks.speed import gpu as bench_gpu

    seconds = min(arguments.benchmark_seconds, arguments.stage_seconds - 2 * MARGIN)
    rows = bench_gpu.run(arguments.out / "gpu_check.csv", deadline=time.monotonic() + seconds)
    aimed = [row for row in rows if row.target]
    met = sum(row.met == "yes" for row in aimed)
    failures = [f"{row.op}, {row.case}: {row.note}" for row in rows if row.note.startswith("failed")]
    return {
        "status": "failed" if failures else "passed",
        "summary": f"{len(rows)} rows, {met} of {len(aimed)} targets met, {len(failures)} cases failed",
        "failures": failures,
    }


# Seconds after which a stage is stopped, and seconds that the stages before it leave for it.
STAGES: dict[Callable[[argparse.Namespace], Result], tuple[int, int]] = {
    device: (60, 0),
    build: (240, 0),
    resources: (30, 10),
    tests: (240, 100),
    determinism: (60, 20),
    graphs: (60, 20),
    benchmarks: (500, 120),
    sanitizer: (240, 60),
}


# ---- running them ---------------------------------------------------------------------------------------------------


def _run(command: list[str], **settings: str) -> str:
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    if done.returncode != 0:
        raise StageError(f"{' '.join(command[1:4])} ended with {done.returncode}: {_last_line(done.stderr)}")
    return done.stdout


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip(" =") if lines else ""


def _pytest_line(text: str) -> str:
    """The last line in which pytest counts: "3 passed, 1 skipped in 2.00s"."""
    lines = [line for line in text.splitlines() if re.search(r"\b\d+ (passed|failed|skipped|errors?)\b.* in ", line)]
    return lines[-1].strip(" =") if lines else ""
