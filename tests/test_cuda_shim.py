"""The CUDA kernels on the CPU: blocks and threads run as fibers (tests/cuda_shim), so that indexing, reductions, tails
and launch geometry are tested on every machine. What they compute shares its formulas with the CPU kernels.

Inputs end at a page that nobody may touch, outputs start as NaN, and the threads of a block run in a random order.
"""

import ctypes

import cuda_build
import cuda_cases
import pytest


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        return cuda_build.load(cuda_build.build_shim(tmp_path_factory.mktemp("cuda_shim")))
    except cuda_build.ToolMissingError as problem:
        pytest.skip(str(problem))


globals().update(cuda_cases.collect())
