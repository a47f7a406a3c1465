"""Registers and memory of the compiled kernels, and the reader of cuobjdump's table."""

import pytest

resources = pytest.importorskip("tools.cuda.resources", reason="the benchmarks are in the source tree only")

DUMP = """
Fatbin elf code:
================
arch = sm_80
code version = [1,7]

Resource usage:
 Common:
  GLOBAL:0
 Function _ZN9focalkern4cuda6kernelIfEEvT_:
  REG:40 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:400 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_parses_the_table():
    (row,) = resources.parse(DUMP)
    assert (row.kernel, row.arch) == ("_ZN9focalkern4cuda6kernelIfEEvT_", "sm_80")
    assert (row.registers, row.stack_bytes, row.local_bytes, row.shared_bytes) == (40, 16, 8, 1024)


@pytest.fixture(scope="module")
def kernels():
    try:
        return resources.read()
    except resources.ResourcesUnavailableError as reason:
        pytest.skip(str(reason))


def test_no_kernel_has_a_stack_frame_or_spills(kernels):
    assert [row for row in kernels if row.stack_bytes or row.local_bytes] == []


def test_blocks_fit_every_gpu(kernels):
    # 48 KiB of shared memory need no opt-in on any architecture; 256 threads of 255 registers fill a multiprocessor.
    assert [row for row in kernels if row.shared_bytes > 48 * 1024 or row.registers > 255] == []
    assert {row.arch for row in kernels} >= {"sm_80", "sm_90"} or len({row.arch for row in kernels}) == 1


def test_every_operator_has_its_kernels(kernels):
    for name in ("focal_loss_forward", "focal_loss_backward", "calibration_map_forward", "calibration_map_backward"):
        assert any(f"{name}_kernel" in row.kernel for row in kernels), name
    assert any("calibration_grid" in row.kernel for row in kernels)
