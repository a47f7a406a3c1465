"""The search for the CUDA kernels that a change concerns (tools/cuda/since.py)."""

import shutil

import pytest

since = pytest.importorskip("tools.cuda.since", reason="the tools are in the source tree only")
build = pytest.importorskip("tools.cuda.build", reason="the tools are in the source tree only")
pytestmark = pytest.mark.skipif(not build.CSRC.is_dir(), reason="needs the sources")


def test_a_kernel_has_one_name_for_all_compilers():
    end = "29smoothed_focal_forward_kernelIfLi2EEEvNS_14RowLossForwardIT_EE"
    names = [
        f"_ZN9focalkern4cuda58_GLOBAL__N__ab070c95_20_row_loss_smoothed_cu_52e92f7c_7555{end}",  # nvcc
        f"_ZN9focalkern4cuda57_GLOBAL__N__f68237d6_20_row_loss_smoothed_cu_307206e8_294{end}",
        f"_ZN9focalkern4cuda12_GLOBAL__N_1{end}",  # g++
    ]
    assert {since.plain(name) for name in names} == {f"_ZN9focalkern4cuda{end}"}
    assert since.plain("add.s32 %r1, %r12, 48;") == "add.s32 %r1, %r12, 48;"


def test_a_changed_header_concerns_the_sources_that_include_it(tmp_path):
    before = tmp_path / "csrc"
    shutil.copytree(build.CSRC, before)
    assert since.changed_sources(before) == []
    header = before / "cuda/smoothed_row.cuh"
    header.write_text(header.read_text() + "// another line\n")
    assert since.changed_sources(before) == ["row_loss_shared.cu", "row_loss_smoothed.cu"]
    (before / "cuda/spline_map.cu").unlink()
    assert "spline_map.cu" in since.changed_sources(before)


def test_ptx_is_compared_without_comments_and_order_of_declarations(tmp_path):
    def kernels(declared, code):
        path = tmp_path / "kernels.o"
        path.write_bytes(
            b"\0ELF\0" + (".version 9.0\n" + declared + f"\n.entry kernel(\n) {{ {code} }}\n").encode() + b"\0"
        )
        return since.kernels_of(path)

    first, second = ".shared .b8 a[4];\n", ".shared .b8 b[4];\n"
    before = kernels(first + "// c has been demoted\n\n" + second, "ret;")
    assert kernels(second + first + "  // c has been demoted\n", "ret;") == before
    assert kernels(first, "ret;") != before
    assert kernels(first + second, "exit;") != before
