"""The package as a whole: what an import costs and brings, and who may use what."""

import ast
import importlib.metadata
import inspect
import json
import subprocess
import sys
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


def test_import_adds_no_foreign_package():
    """Plots, tables and progress bars are imported by the functions that need them."""
    added = {
        name.partition(".")[0] for name in modules_after("import torch, focalkern") - modules_after("import torch")
    }
    assert added - set(sys.stdlib_module_names) == {"focalkern"}


def test_without_torch_the_import_says_so_in_one_line():
    code = "import sys; sys.modules['torch'] = None; import focalkern"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: focalkern needs torch, and there is none: pip install torch"
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


# From the ground up: a file imports only from its own folder and from lines above. "_" are the private files.
FLOORS = (
    "_ gamma",
    "reference",
    "fallback",
    "metrics bootstrap",
    "ops",
    "losses streaming",
    "calibrators",
    "files",
    "plots integrations",
    "study",
    "__init__",
    "cli",
    "__main__",
)
# The same within the study.
STUDY = (
    "distributed engines",
    "samples",
    "scores",
    "grid_search",
    "memory streamed",
    "split results",
    "candidates intervals",
    "verdict remarks",
    "report",
    "study",
    "compare",
    "evaluate apply sweep",
    "__init__",
)
OPTIONAL = {"focalkern.integrations.ray", "focalkern.plots"}  # import ray, matplotlib


def module_name(path):
    return ".".join(["focalkern", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


NAMES = {module_name(path) for path in MODULES}


def imports_of(path):
    """(module, whether the import is inside a function) of all imports from this package."""

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names if alias.name in NAMES)
            elif isinstance(child, ast.ImportFrom) and child.module in NAMES:
                for alias in child.names:
                    name = f"{child.module}.{alias.name}"
                    yield name if name in NAMES else child.module, inside
            yield from visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return sorted(set(visit(ast.parse(path.read_text()), False)))


def floor_of(name, floors, depth):
    room = [*name.split("."), "__init__"][depth]
    room = "_" if depth == 1 and room.startswith("_") and not room.startswith("__") else room
    return next(place for place, rooms in enumerate(floors) if room in rooms.split())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down(path):
    """From lower floors of the package, and of the study; inside functions only for optional packages."""
    name, found = module_name(path), imports_of(path)
    assert [other for other, inside in found if inside and other not in OPTIONAL] == []
    floor = floor_of(name, FLOORS, 1)
    assert [other for other, _ in found if floor_of(other, FLOORS, 1) > floor] == []
    if name.startswith("focalkern.study"):
        floor = floor_of(name, STUDY, 2)
        inner = [other for other, _ in found if other.startswith("focalkern.study.")]
        assert [other for other in inner if floor_of(other, STUDY, 2) > floor] == []


def test_no_files_import_each_other():
    left = {module_name(path): {other for other, _ in imports_of(path)} for path in MODULES}
    while free := [name for name, others in left.items() if not others & left.keys() - {name}]:
        for name in free:
            del left[name]
    assert left == {}, "a circle, or files that import from one"
