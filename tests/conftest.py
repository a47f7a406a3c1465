"""The device fixture, the seed, and the one tolerance table."""

import importlib
import os
from typing import Any

import pytest
import torch

# (relative, absolute) error allowed against a float64 result, by the dtype of the computation's input and output.
#   float64   a few hundred roundings: sums over up to 4097 classes, and quotients near u = 0.1 that lose two digits.
#   float32   the contract for log-probabilities; values below 1e-6 count as near 0.
#   bfloat16, float16   computed in float32, so one rounding of the result: half a unit in the last place, and the
#             smallest subnormal of float16.
TOLERANCE = {
    torch.float64: (1e-11, 1e-13),
    torch.float32: (1e-6, 1e-6),
    torch.bfloat16: (2.0**-8, 1e-6),
    torch.float16: (2.0**-10, 1e-6),
}


def cuda_skip_reason() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    import focalkern

    if not focalkern.build_info()["cuda"]:
        return "focalkern was built without CUDA kernels"
    return None


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that has kernels; a test that uses it runs on all of them."""
    if request.param == "cuda" and (reason := cuda_skip_reason()) is not None:
        pytest.skip(reason)
    return torch.device(request.param)


@pytest.fixture
def cuda() -> torch.device:
    """For tests of what only CUDA has."""
    if (reason := cuda_skip_reason()) is not None:
        pytest.skip(reason)
    return torch.device("cuda")


def peer(name: str) -> Any:
    """A library that a test compares with; without it the test is skipped, or fails where all of them must be there."""
    if os.environ.get("FOCALKERN_REQUIRE_PEERS") == "1":
        return importlib.import_module(name)
    return pytest.importorskip(name, exc_type=ImportError)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20260121)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal within the table's tolerance for ``dtype`` (by default that of ``actual``); NaN equals NaN."""
    rtol, atol = TOLERANCE[dtype or actual.dtype]
    torch.testing.assert_close(
        actual.detach().cpu().double(), expected.detach().cpu().double(), rtol=rtol, atol=atol, equal_nan=True
    )
