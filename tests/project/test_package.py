"""The package as a whole: time and modules of an import, and allowed dependencies."""

import ast
import importlib.metadata
import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import focalkern as fk

PACKAGE = Path(fk.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
CSRC = Path(__file__).resolve().parents[2] / "csrc"


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


def modules_after(code):
    command = f"{code}\nimport json, sys; print(json.dumps(list(sys.modules)))"
    return set(json.loads(subprocess.run([sys.executable, "-c", command], capture_output=True, check=True).stdout))


def test_processes_of_the_tests_import_the_focalkern_of_the_tests(tmp_path):
    command = [sys.executable, "-c", "import focalkern; print(focalkern.__file__)"]
    assert subprocess.check_output(command, cwd=tmp_path, text=True).strip() == fk.__file__


def test_import_adds_no_foreign_package():
    """Plots, tables and progress bars are imported by the functions that need them."""
    added = {
        name.partition(".")[0] for name in modules_after("import torch, focalkern") - modules_after("import torch")
    }
    assert added - set(sys.stdlib_module_names) == {"focalkern"}


def test_calibrators_studies_and_files_are_loaded_at_their_first_use():
    later = {"focalkern.calibrators", "focalkern.study.sweep", "focalkern.files"}
    assert not later & modules_after("import focalkern")
    assert later <= modules_after("import focalkern; focalkern.sweep; focalkern.files.read_sets")
    assert later <= modules_after("import focalkern; focalkern.study.Processes")
    for name in ("TemperatureScaling", "calibrators.TemperatureScaling"):
        assert later & modules_after(f"import focalkern; focalkern.{name}") == {"focalkern.calibrators"}


def test_two_threads_may_load_the_same_package_at_their_first_use():
    """The second thread asks for ``sweep`` while the first one imports the package of its module."""
    code = """
import importlib.machinery, sys, threading, time
import focalkern as fk

def start_second(spec):
    threads.append(threading.Thread(target=lambda: found.append(fk.sweep)))
    threads[0].start()
    time.sleep(0.5)

class Slow(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        if name == "focalkern.study":
            spec.loader.create_module = start_second  # sys.modules has no package yet
        return spec

threads, found = [], []
sys.meta_path.insert(0, Slow)
fk.compare_calibrators
threads[0].join()
assert found == [fk.sweep]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_torch_the_import_says_so_in_one_line():
    code = "import sys; sys.modules['torch'] = None; import focalkern"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    message = "ImportError: focalkern needs torch, which is not installed: pip install torch"
    assert done.stderr.splitlines()[-1] == message
    assert "During handling" not in done.stderr


def test_public_names():
    assert len(set(fk.__all__)) == len(fk.__all__)
    assert [name for name in fk.__all__ if not hasattr(fk, name)] == []


def test_dir_shows_what_is_public_and_nothing_else():
    on_first_use = {"CalibratedClassifier", "plots"}  # they need packages that may be missing
    assert set(dir(fk)) == {*fk.__all__, "__version__", *on_first_use}


def test_public_functions_and_classes_are_documented():
    callables = [name for name in fk.__all__ if callable(getattr(fk, name))]
    assert [name for name in callables if not inspect.getdoc(getattr(fk, name))] == []


def test_citation_names_the_version():
    citation = Path(__file__).resolve().parents[2] / "CITATION.cff"
    assert f"\nversion: {fk.__version__}\n" in citation.read_text()


def test_the_page_about_wheels_names_the_packages_of_the_command():
    folder = Path(__file__).parents[2]
    extra = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cli"]
    assert f"pip install {' '.join(extra)}\n" in (folder / "docs" / "install.md").read_text()


def test_version_is_the_one_installed():
    try:
        installed = importlib.metadata.version("focalkern")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("focalkern is imported from a folder, not installed")
    assert fk.__version__ == installed


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name != "cli"], ids=name_of)
def test_library_code_does_not_print(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"] == []


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name != "ops"], ids=name_of)
def test_only_the_operators_use_the_compiled_module(path):
    imported = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
    assert [name for name in imported if name.split(".")[-1] == "_C"] == []


@pytest.mark.parametrize("folder", ["math", "kernels", "cpu", "cuda"])
def test_kernels_include_no_torch(folder):
    sources = [path for path in (CSRC / folder).rglob("*.*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert sources or folder == "cuda"
    lines = [line for path in sources for line in path.read_text().splitlines()]
    includes = [line for line in lines if line.lstrip().startswith("#include")]
    assert [line for line in includes if any(word in line for word in ("torch", "ATen", "c10", "pybind"))] == []
