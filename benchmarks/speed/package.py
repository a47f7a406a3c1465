"""Cost of the package: seconds of its build, milliseconds of its import."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.harness import Provider, Row, measure

ROOT = Path(__file__).parents[2]


def python(*arguments: str, folder: Path = ROOT, **environment: str) -> None:
    # An installed package has its bytecode, so imports may write it.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, check=True, capture_output=True)


def build() -> None:
    """Compiles the CPU extension from scratch, two files at a time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        shutil.copytree(ROOT / "focalkern", folder / "focalkern", ignore=shutil.ignore_patterns("_C*", "__pycache__"))
        for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, folder)
        python("setup.py", "build_ext", "--inplace", folder=folder, FOCALKERN_CUDA="0", MAX_JOBS="2")


def run(
    device: str = "cpu", quick: bool = False, seconds: float = 2.0, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[list[Row]]:
    fixed = {
        "op": "package",
        "n": 0,
        "classes": 0,
        "dtype": torch.float32,
        "bytes_moved": float("nan"),
        "copy": None,
        "seconds": seconds,
    }
    if quick:  # twenty imports of torch take as long as all other cases
        return
    if wanted("import"):
        yield measure(
            case="import, torch included",
            providers=[
                Provider("focalkern", lambda: python("-c", "import torch, focalkern")),
                Provider("torch alone", lambda: python("-c", "import torch")),
            ],
            **fixed,
        )
    if wanted("build"):
        yield measure(case="build of the CPU extension", providers=[Provider("focalkern", build)], once=True, **fixed)
