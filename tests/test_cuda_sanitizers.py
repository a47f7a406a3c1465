"""The source of the CUDA kernels on the host shim, every kernel over shapes and layouts (cuda_shim/driver.cpp), under
ThreadSanitizer and AddressSanitizer; and under UndefinedBehaviorSanitizer the formulas that host and device share.
"""

import os
import shutil
import subprocess
from pathlib import Path

import cuda_build
import pytest

# ThreadSanitizer misses a struct that a call stores into shared memory; member by member it sees the store.
STORE = "gradients[thread] = row_gradient(args, first + thread, offset);"
MEMBERS = (
    "{ const auto q = row_gradient(args, first + thread, offset); volatile auto& w = gradients[thread];"
    " w.max = q.max; w.scale = q.scale; w.at_target = q.at_target; w.target = q.target; }"
)


def result(program: Path, seed: int, poison: int) -> str:
    """The hash of all results; a report of a sanitizer fails."""
    options = {
        "TSAN_OPTIONS": "history_size=2 exitcode=66",
        "ASAN_OPTIONS": "detect_leaks=0 detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    # Without address randomization: ThreadSanitizer of gcc 12 knows no other layout of memory.
    command = ["setarch", "-R", str(program), str(seed), str(poison)]
    done = subprocess.run(command, env={**os.environ, **options}, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[:3000]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory):
    def make(name: str, *flags: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        shutil.copytree(cuda_build.CSRC, folder / "csrc")
        focal_loss = folder / "csrc/cuda/focal_loss_rows.cuh"
        assert STORE in focal_loss.read_text()
        focal_loss.write_text(focal_loss.read_text().replace(STORE, MEMBERS))
        return cuda_build.build_shim(folder, folder / "csrc", ("-g1", *flags), "driver.cpp")

    try:
        cuda_build.compiler()
        cuda_build.tool("setarch")
    except cuda_build.ToolMissingError as problem:
        pytest.skip(str(problem))
    return make


@pytest.fixture(scope="module")
def address(build) -> Path:
    # -O0: optimizing would take longer than the run.
    return build("address", "-fsanitize=address", "-O0")


def test_address_sanitizer_has_no_report_and_results_depend_on_no_order_and_no_poison(address):
    assert result(address, 1, 0xFF) == result(address, 2, 0)


def test_thread_sanitizer_has_no_report(build, address):
    assert result(build("thread", "-fsanitize=thread"), 2, 0) == result(address, 3, 0x7F)


def test_formulas_are_defined_everywhere(tmp_path):
    """Whatever the argument: no overflow of an integer, no shift of a negative one."""
    try:
        compiler = cuda_build.compiler()
    except cuda_build.ToolMissingError as problem:
        pytest.skip(str(problem))
    flags = ["-std=c++17", "-O1", "-fsanitize=undefined", "-fno-sanitize=float-divide-by-zero", f"-I{cuda_build.CSRC}"]
    source = cuda_build.TESTS / "cuda_shim/formulas.cpp"
    subprocess.run([compiler, *flags, str(source), "-o", str(tmp_path / "run")], check=True)
    done = subprocess.run([str(tmp_path / "run")], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr[:2000]
