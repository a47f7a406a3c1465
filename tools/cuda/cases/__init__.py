"""The cases of the CUDA kernels without a GPU: on the host shim (test_cuda_shim.py), as the PTX that nvcc makes of
them, and as machine code (test_cuda_ptx.py).

One module for each operator: the ctypes structures of its arguments in csrc/kernels, a function that runs its
launchers, one that compares everything they write with the reference, and tests that take the fixture ``library``. To
add an operator: a module here, its line in ``MODULES``, and for each launcher FK_SIZE and FK_ENTRY in shim/harness.cpp.
"""

import importlib
from typing import Any

MODULES = (
    "focal_loss",
    "focal_chunks",
    "focal_pixels",
    "calibration_map",
    "calibration_grid",
    "calibration_sums",
    "sigmoid_loss",
    "row_loss",
    "smoothed_rows",
    "shared_rows",
    "row_statistics",
    "spline",
    "blind_spots",
    "digits",
)


def collect(*modules: str) -> dict[str, Any]:
    """The tests of these modules, or of all, for the globals of a test module."""
    found: dict[str, Any] = {}
    for module in modules or MODULES:
        for name, value in vars(importlib.import_module(f"tools.cuda.cases.{module}")).items():
            if name.startswith("test_"):
                assert name not in found, f"two cases are called {name}"
                found[name] = value
    return found
