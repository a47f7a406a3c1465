"""Tests one wheel with several releases of torch and several Pythons: ``python -m tools.release_check``.

This Python gets an environment for every release of torch, each other Python one with the newest release. There is no
compiler on PATH. ``build_info()`` must name the module that the wheel has for the pair, and the tests of the operators
run with that module and with FOCALKERN_KERNELS=stable. An environment with a CUDA build of torch takes about 6 GB; it
is deleted before the next one is made. Words after ``--`` go to pytest in place of the names of these tests.
"""

import argparse
import datetime
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.toolchain import fail

ROOT = Path(__file__).resolve().parent.parent
TORCHES = ("2.11.0", "2.13.0", "2.15.0")
OTHER_PYTHONS = ("python3.12", "python3.13", "python3.14", "python3.15")
# The packages that the tests of the operators import.
FEW_PACKAGES = ("pytest", "hypothesis", "mpmath", "expecttest")
# tests/ops/test_{name}*.py
OPERATORS = (
    "focal_loss",
    "sigmoid_loss",
    "row_loss",
    "mmce",
    "calibration_map",
    "inverse_calibration_map",
    "calibration_grid",
    "spline_calibration_map",
    "spline_sums",
    "map_nll_sums",
    "row_sums",
    "z_loss",
)


def wheel_in(folder: Path) -> Path:
    """The path of the folder's wheel with compiled modules for this machine."""
    pattern = f"focalkern-*-manylinux*_{platform.machine()}.whl"
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        fail(f"{folder} must hold one wheel {pattern}, found {len(found)}; make it with: make wheel")
    return found[0]


def module_for(names: Iterable[str], cache_tag: str, torch: str) -> str:
    """``"compiled"`` if these files of a wheel include the module of a Python and a torch, else ``"stable"``."""
    minor = "_".join(torch.split(".")[:2])
    return "compiled" if any(name.startswith(f"focalkern/_C_{minor}.{cache_tag}-") for name in names) else "stable"


def pairs(here: str, others: Sequence[str], torches: Sequence[str]) -> list[tuple[str, str]]:
    """(interpreter, torch) of each environment. The last torch is the newest."""
    return [(here, torch) for torch in torches] + [(other, torches[-1]) for other in others]


def of_the_day(pythons: Sequence[str], day: datetime.date) -> list[str]:
    """One of the Pythons, a different one each day; an empty list for no Pythons."""
    return [pythons[day.toordinal() % len(pythons)]] if pythons else []


def cache_tag_of(python: str) -> str | None:
    """Such as ``cpython-312``; None where the interpreter does not start."""
    if not shutil.which(python):
        return None
    done = subprocess.run(
        [python, "-c", "import sys; print(sys.implementation.cache_tag)"], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else None


def interpreter(python: str) -> str:
    """The path of a Python: a program on PATH, or a version in pyenv."""
    if cache_tag_of(python):
        return python
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = sorted(versions.glob(f"{python.removeprefix('python')}.*/bin/python"))
    return str(found[-1]) if found else python


def operator_tests() -> list[str]:
    files = sorted(path for name in OPERATORS for path in (ROOT / "tests/ops").glob(f"test_{name}*.py"))
    return [
        "-k",
        "not inductor",
        *(str(path) for path in files if not path.stem.endswith(("_vocab_parallel", "_digits"))),
    ]


def check(wheel: Path, python: str, torch: str, kernels: str, words: Sequence[str], few: bool = False) -> bool:
    """Installs the wheel in a new environment and tests it there; exits at the first failure. With ``few`` it installs
    only the packages that the operators' tests import, and returns False if pip finds no such torch."""
    with tempfile.TemporaryDirectory() as work:
        # With the tree on PYTHONPATH, pip would consider the package installed.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def run(*command: str, **variables: str) -> None:
            print(f"--- {' '.join(command[:4])} {variables or ''}", flush=True)
            # In an empty folder: the tree would hide the installed package.
            done = subprocess.run(command, cwd=work, env=environment | variables)
            if done.returncode:
                fail(f"python {python}, torch {torch}: the command above failed with {done.returncode}")

        run(python, "-m", "venv", "environment")
        inside = str(Path(work, "environment/bin/python"))
        path = {"PATH": str(Path(inside).parent)}
        pip = (inside, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        if few and subprocess.run((*pip, f"torch=={torch}"), cwd=work, env=environment).returncode:
            print(f"{python} was not tested: pip finds no torch {torch} for it")
            return False
        run(*pip, f"torch=={torch}")
        extra = "" if few else "[test]"
        run(*pip, f"focalkern{extra} @ file://{wheel}", f"torch=={torch}", *(FEW_PACKAGES if few else ()))
        for setting, expected in (("require", kernels), ("stable", "stable")):
            code = (
                f"import focalkern as fk; i = fk.build_info(); print(i['why']); assert i['kernels'] == {expected!r}, i"
            )
            run(inside, "-c", code, FOCALKERN_KERNELS=setting, **path)
            if setting == "require" and expected == "stable":
                continue  # the same tests follow
            suite = (
                "-m",
                "pytest",
                "--rootdir",
                str(ROOT),
                "-c",
                str(ROOT / "pyproject.toml"),
                "-p",
                "no:cacheprovider",
            )
            run(inside, *suite, "-q", *words, FOCALKERN_KERNELS=setting, **path)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.release_check", description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="the wheel (default: the one in dist)")
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION", help="releases, the newest one last")
    parser.add_argument(
        "--python", nargs="*", metavar="PROGRAM", help="other Pythons (default: those on PATH or of pyenv)"
    )
    parser.add_argument("--others-only", action="store_true", help="leave out the environments of this Python")
    parser.add_argument(
        "--today", action="store_true", help="test one other Python only, a different one each day, with few packages"
    )
    parser.add_argument(
        "pytest", nargs="*", metavar="-- WORD", help="arguments of pytest (default: the operators' tests)"
    )
    arguments = parser.parse_args()
    wheel = (arguments.wheel or wheel_in(ROOT / "dist")).resolve()
    names = zipfile.ZipFile(wheel).namelist()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    wanted = [interpreter(python) for python in arguments.python or OTHER_PYTHONS]
    others = [python for python in wanted if cache_tag_of(python)]
    for python in set(wanted) - set(others):
        print(f"{python} is not here and was not tested")
    if arguments.today:
        others = of_the_day(others, datetime.date.today())
    alone = arguments.others_only or arguments.today
    checked = pairs(sys.executable, others, arguments.torch)[len(arguments.torch) if alone else 0 :]
    passed = 0
    for python, torch in checked:
        tag = str(cache_tag_of(python))
        kernels = module_for(names, tag, torch)
        print(f"=== {tag}, torch {torch}: the {kernels} module of {wheel.name}, sha256 {digest}", flush=True)
        passed += check(wheel, python, torch, kernels, arguments.pytest or operator_tests(), arguments.today)
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != digest:
        fail(f"{wheel} changed while it was tested")
    print(f"{passed} environments passed")


if __name__ == "__main__":
    main()
