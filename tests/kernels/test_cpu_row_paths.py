"""The choice of the CPU loop for a tile of rows (csrc/cpu/row_loss/plan.h), for every size and without a kernel."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tools/cpu/row_paths.cpp"
pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("c++"), reason="compiles x86-64 code"),
    pytest.mark.skipif(not SOURCE.is_file(), reason="the tools are in the source tree only"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("row_paths") / "row_paths"
    subprocess.run(["c++", "-std=c++20", "-O1", "-fopenmp", f"-I{ROOT / 'csrc'}", SOURCE, "-o", program], check=True)
    return program


def test_every_size_has_a_loop_that_takes_it(program):
    found = subprocess.run([program], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


# The focal loss of contiguous logits with AVX-512, on both sides of each limit.
@pytest.mark.parametrize(
    ("classes", "size", "loops"),
    [
        (1, 4, "transposed_tile transposed_tile"),
        (2, 2, "transposed_registers dense_rows"),
        (5, 2, "transposed_tile dense_rows"),
        (10, 4, "transposed_registers dense_rows"),
        (10, 8, "transposed_tile transposed_tile"),
        (32, 4, "transposed_registers dense_rows"),
        (33, 4, "four_rows dense_rows"),
        (100, 2, "transposed_registers dense_rows"),
        (100, 4, "four_rows dense_rows"),
        (129, 4, "four_rows along_classes"),
        (193, 4, "along_classes along_classes"),
        (256, 2, "transposed_registers along_classes"),
        (257, 2, "along_classes along_classes"),
        (1000, 4, "along_classes along_classes"),
    ],
)
def test_loops_of_contiguous_rows(program, classes, size, loops):
    assert subprocess.check_output([program, str(classes), str(size)], text=True).strip() == loops
