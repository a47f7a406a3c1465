"""Launch geometry (csrc/cuda/launch.h): which thread works on what, for every size."""

import ctypes
import subprocess
from ctypes import c_int64

import cuda_build
import pytest


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        compiler = cuda_build.compiler()
    except cuda_build.ToolMissingError as problem:
        pytest.skip(str(problem))
    library = tmp_path_factory.mktemp("cuda_geometry") / "geometry.so"
    source = cuda_build.TESTS / "cuda_shim/geometry.cpp"
    flags = [*cuda_build.HOST_FLAGS, "-O2", "-shared", f"-I{cuda_build.CSRC}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.check_all_row_plans.restype = ctypes.c_char_p
    return loaded


def test_every_size_has_a_valid_launch(geometry):
    assert geometry.check_all_row_plans(c_int64(200_000)) is None
