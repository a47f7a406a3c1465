"""Launch geometry (csrc/cuda/launch.h): the assignment of work to threads, for every size."""

import ctypes
import subprocess
from ctypes import c_int64

import pytest

build = pytest.importorskip("tools.cuda.build", reason="the tools are in the source tree only")


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        compiler = build.compiler()
    except build.ToolMissingError as problem:
        pytest.skip(str(problem))
    library = tmp_path_factory.mktemp("cuda_geometry") / "geometry.so"
    source = build.HERE / "shim/geometry.cpp"
    flags = [*build.HOST_FLAGS, "-O2", "-shared", f"-I{build.CSRC}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in ("row_plans", "chunks", "map_plans", "grid_plans"):
        getattr(loaded, f"check_all_{name}").restype = ctypes.c_char_p
    return loaded


# No threshold lies above these classes and rows.
def test_every_size_has_a_valid_launch(geometry):
    assert geometry.check_all_row_plans(c_int64(70_000)) is None


def test_every_class_of_a_long_row_is_in_one_chunk(geometry):
    assert geometry.check_all_chunks(c_int64(300_000)) is None


def test_every_size_of_the_map_has_a_valid_launch(geometry):
    assert geometry.check_all_map_plans(c_int64(20_000)) is None


def test_every_size_of_the_grid_has_a_valid_launch(geometry):
    assert geometry.check_all_grid_plans(c_int64(10_000)) is None
