"""The device fixture, the seed, and the tolerance table of all tests."""

import contextlib
import importlib
import importlib.util
import os
import runpy
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
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


pytest.register_assert_rewrite("tools.cuda.cases")

os.environ.pop("FOCALKERN_CACHE_MIB", None)  # read once per process; the tests expect its default

# Processes that a test starts, in any folder, import the focalkern of this process.
_package = Path(importlib.util.find_spec("focalkern").origin).absolute().parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(_package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


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
    """For tests that need CUDA."""
    if (reason := cuda_skip_reason()) is not None:
        pytest.skip(reason)
    return torch.device("cuda")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="rewrite tests/study/golden (tests/study/test_golden.py)")
    parser.addoption(
        "--one-in", type=int, default=1, metavar="N", help="run one in N cases, others with another release of torch"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels(also): about the compiled module, or also the stable one; else skipped")
    config.addinivalue_line("markers", "gpu: runs on CUDA (set by the fixtures of a test, never by hand)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """-m gpu selects the tests that run on CUDA, by their parameters; the tests of the CUDA kernels depend on it."""
    import focalkern

    kernels = focalkern.build_info()["kernels"]
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        fixtures = set(getattr(item, "fixturenames", ())) - set(parameters)
        if "cuda" in fixtures or parameters.get("device") == "cuda":
            item.add_marker("gpu")
        marker = item.get_closest_marker("kernels")
        if marker and kernels not in ("compiled", *marker.args):
            item.add_marker(pytest.mark.skip(reason=f"focalkern's kernels are {kernels}"))
    one_in = config.getoption("--one-in")
    if one_in > 1:
        sample(config, items, one_in)


def sample(config: pytest.Config, items: list[pytest.Item], one_in: int) -> None:
    """Deselects cases by a hash of their names and of torch's release, so that every run has the same ones."""
    release = torch.__version__.partition("+")[0]
    kept, others = [], []
    for item in items:
        name = f"{item.nodeid.rpartition('/')[2]} {release}"
        (others if zlib.crc32(name.encode()) % one_in else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Raises if anything waits for the device, as copies between host and device do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peer(name: str) -> Any:
    """A library to compare with. Without it the test is skipped, or fails if all libraries are required."""
    if os.environ.get("FOCALKERN_REQUIRE_PEERS") == "1":
        return importlib.import_module(name)
    spec = importlib.util.find_spec(name.partition(".")[0])  # of a.b it would import a
    if spec is not None and spec.origin is None:  # a folder of tests with the library's name, not the library
        pytest.skip(f"{name} is not installed")
    return pytest.importorskip(name, exc_type=ImportError)


# By its path: the tests of an installed wheel run in a folder where benchmarks cannot be imported.
_names = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/torchvision_names.py"))
torchvision_names = _names["import_torchvision_beside_any_torch"]()  # the names exist as long as this library object


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(20260121)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal within the table's tolerance for ``dtype`` (by default that of ``actual``); NaN equals NaN."""
    rtol, atol = TOLERANCE[dtype or actual.dtype]
    torch.testing.assert_close(
        actual.detach().cpu().double(), expected.detach().cpu().double(), rtol=rtol, atol=atol, equal_nan=True
    )


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """Run the command in this process: (exit code, stdout, stderr)."""
    from focalkern.cli import main

    def call(*arguments: Any) -> tuple[Any, str, str]:
        code: Any
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests that are too small for a second thread, or whose bits depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes linear_focal_loss compute even few logits in chunks."""
    monkeypatch.setattr("focalkern.ops._linear_arguments._FEW_LOGITS", -1)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bitwise equal on the CPU; nearly equal on CUDA, where each loop over the elements is compiled separately."""
    if actual.is_cuda:
        assert_close(actual, expected)
    else:
        assert torch.equal(actual, expected)
