"""The CUDA kernels on the CPU: blocks and threads run as fibers (tools/cuda/shim), so that indexing, reductions, tails
and launch geometry are tested on every machine. The CPU kernels share their formulas.

Inputs end at a protected page, outputs start as NaN, and the threads of a block run in a random order.

FOCALKERN_SHIM="name=value,..." is for tools/cuda/since.py:
    library       an existing library
    cases         modules of tools.cuda.cases, joined by "+"
    launched      a file for the kernels of each case
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

build = pytest.importorskip("tools.cuda.build", reason="the tools are in the source tree only")
cases = pytest.importorskip("tools.cuda.cases", reason="the tools are in the source tree only")

SETTINGS = dict(item.split("=") for item in os.environ.get("FOCALKERN_SHIM", "").split(",") if item)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if "library" in SETTINGS:
        return build.load(Path(SETTINGS["library"]))
    try:
        return build.load(build.build_shim(tmp_path_factory.mktemp("cuda_shim")))
    except build.ToolMissingError as problem:
        pytest.skip(str(problem))


@pytest.fixture(autouse=True)
def launched(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "launched" in SETTINGS:
        library.shim_write_launched(SETTINGS["launched"].encode(), request.node.name.encode())


globals().update(cases.collect(*(SETTINGS["cases"].split("+") if "cases" in SETTINGS else ())))
