"""The spline map for float32, half and bfloat16 results, in vectors of every width that the processor has."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

counts = pytest.importorskip("tools.cpu.instruction_counts", reason="the tools are in the source tree only")


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("c++"), reason="compiles x86-64 code")
def test_order_and_errors_in_vectors_of_every_width(tmp_path: Path):
    program = counts.build(tmp_path, "spline_widths", ())
    found = subprocess.run([program], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    flags = Path("/proc/cpuinfo").read_text().split()
    widths = ["16"] + ["32"] * ("avx2" in flags) + ["64"] * ("avx512bw" in flags)
    # A compiler without run-time dispatch has vectors of 16 bytes alone.
    assert found.stdout.split() in (widths, ["16"])
