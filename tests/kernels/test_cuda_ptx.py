"""The compiled CUDA kernels on the CPU, through the real launchers: tools/cuda/ptx runs the PTX that nvcc embeds in the
objects, tools/cuda/sass runs machine code. The cases are those of test_cuda_shim, which runs the source.

Beyond their results, every access is checked: bounds, alignment, races, and values that were never written.

FOCALKERN_PTX="name=value,..." sets other ways of running them (tools/cuda/proof.py tries all):
    arch          75, 80, 90 (the default), 100; or machine_code for that of sm_90, machine_code_100 of sm_100
    library an existing library; and code, the text of its machine code
    cases         modules of tools.cuda.cases, joined by "+"
    report a file for the amount of executed work: launches, blocks, instructions of warps and of threads
    random_lanes, resident, approx_error, global_races: see Settings in ptx/basics.h
"""

import ctypes
import os
from collections.abc import Iterator
from ctypes import c_int64
from pathlib import Path

import pytest

build = pytest.importorskip("tools.cuda.build", reason="the tools are in the source tree only")
cases = pytest.importorskip("tools.cuda.cases", reason="the tools are in the source tree only")

SETTINGS = dict(item.split("=") for item in os.environ.get("FOCALKERN_PTX", "").split(",") if item)


def built(folder: Path) -> tuple[Path, Path | None]:
    """The library, and the machine code that it runs."""
    if "library" in SETTINGS:
        return Path(SETTINGS["library"]), Path(SETTINGS["code"]) if "code" in SETTINGS else None
    return build.build(folder, SETTINGS.get("arch", "90"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    try:
        path, code = built(tmp_path_factory.mktemp("cuda_ptx"))
    except build.ToolMissingError as problem:
        pytest.skip(str(problem))
    loaded = build.load(path)
    if code is not None:
        assert loaded.sassrun_load(str(code).encode()) > 0
    for name in ("random_lanes", "resident", "approx_error", "global_races"):
        if name in SETTINGS:
            loaded.ptxrun_set(name.encode(), c_int64(int(SETTINGS[name])))
    yield loaded
    if "report" in SETTINGS:
        totals = (c_int64 * 4)()
        (loaded.ptxrun_totals if code is None else loaded.sassrun_totals)(totals)
        Path(SETTINGS["report"]).write_text(" ".join(map(str, totals)))


@pytest.fixture(autouse=True)
def nothing_to_report(library: ctypes.CDLL) -> Iterator[None]:
    """Fails if a launch left an error report."""
    library.ptxrun_clear_errors()
    yield
    assert library.ptxrun_error_count() == 0, library.ptxrun_error(c_int64(0)).decode()


globals().update(cases.collect(*(SETTINGS["cases"].split("+") if "cases" in SETTINGS else ())))
