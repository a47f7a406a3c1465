"""The CUDA kernels on the CPU: blocks and threads run as fibers (tools/cuda/shim), so that indexing, reductions, tails
and launch geometry are tested on every machine. The CPU kernels share their formulas.

Inputs end at a protected page, outputs start as NaN, and the threads of a block run in a random order.
"""

import ctypes

import pytest

build = pytest.importorskip("tools.cuda.build", reason="the tools are in the source tree only")
cases = pytest.importorskip("tools.cuda.cases", reason="the tools are in the source tree only")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        return build.load(build.build_shim(tmp_path_factory.mktemp("cuda_shim")))
    except build.ToolMissingError as problem:
        pytest.skip(str(problem))


globals().update(cases.collect())
