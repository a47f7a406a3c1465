"""Every CUDA kernel on the host shim over shapes and layouts (shim/driver.cpp), under ThreadSanitizer and
AddressSanitizer. The formulas that host and device share run under UndefinedBehaviorSanitizer.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

build = pytest.importorskip("tools.cuda.build", reason="the tools are in the source tree only")

# ThreadSanitizer misses a struct that a call stores into shared memory; it sees stores of single members.
STORE = "gradients[thread] = row_gradient(args, first + thread, offset);"
MEMBERS = (
    "{ const auto q = row_gradient(args, first + thread, offset); volatile auto& w = gradients[thread];"
    " w.max = q.max; w.scale = q.scale; w.at_target = q.at_target; w.target = q.target; }"
)


def result(program: Path, seed: int, poison: int) -> str:
    """The hash of all results; a sanitizer's report is a failure."""
    options = {
        "TSAN_OPTIONS": "history_size=2 exitcode=66",
        "ASAN_OPTIONS": "detect_leaks=0 detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    # Without address randomization, because gcc 12's ThreadSanitizer supports no other memory layout.
    command = ["setarch", "-R", str(program), str(seed), str(poison)]
    done = subprocess.run(command, env={**os.environ, **options}, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[:3000]
    return done.stdout.strip()


def built_and_run(folder: Path, flags: tuple[str, ...], runs: list[tuple[int, int]]) -> list[str]:
    """The hash of each run, by seed and poison, with half of the processors."""
    shutil.copytree(build.CSRC, folder / "csrc")
    focal_loss = folder / "csrc/cuda/focal_loss_rows.cuh"
    assert STORE in focal_loss.read_text()
    focal_loss.write_text(focal_loss.read_text().replace(STORE, MEMBERS))
    half = max(1, (os.cpu_count() or 1) // 2)
    program = build.build_shim(folder, folder / "csrc", ("-g1", *flags), "driver.cpp", half)
    return [result(program, seed, poison) for seed, poison in runs]


@pytest.fixture(scope="module")
def hashes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[list[str]]]]:
    """The runs by sanitizer. Both sanitizers are built and run at the same time, as they take about equally long."""
    try:
        build.compiler()
        build.tool("setarch")
    except build.ToolMissingError as problem:
        pytest.skip(str(problem))
    # -O0: optimization would take longer than the run.
    how = {
        "address": (("-fsanitize=address", "-O0"), [(1, 0xFF), (2, 0)]),
        "thread": (("-fsanitize=thread",), [(3, 0x7F)]),
    }
    with ThreadPoolExecutor(len(how)) as pool:
        yield {name: pool.submit(built_and_run, tmp_path_factory.mktemp(name), *what) for name, what in how.items()}


def test_address_sanitizer_has_no_report_and_results_depend_on_no_order_and_no_poison(hashes):
    assert len(set(hashes["address"].result())) == 1


def test_thread_sanitizer_has_no_report(hashes):
    assert set(hashes["thread"].result()) == set(hashes["address"].result())


def test_formulas_are_defined_everywhere(tmp_path):
    """For every argument, no integer overflows and no negative integer is shifted."""
    try:
        compiler = build.compiler()
    except build.ToolMissingError as problem:
        pytest.skip(str(problem))
    flags = ["-std=c++17", "-O1", "-fsanitize=undefined", "-fno-sanitize=float-divide-by-zero", f"-I{build.CSRC}"]
    source = build.HERE / "shim/formulas.cpp"
    subprocess.run([compiler, *flags, str(source), "-o", str(tmp_path / "run")], check=True)
    done = subprocess.run([str(tmp_path / "run")], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr[:2000]
