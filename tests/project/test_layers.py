"""The order of the layers: a file imports only from those above its own, and no import is circular."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the top down: each layer imports from those before it. Files that start with an underscore, and gamma.py, are
# "shared".
LAYERS = (
    "shared",
    "reference",
    "fallback",
    "stable",
    "metrics",
    "bootstrap",
    "ops",
    "losses",
    "streaming",
    "calibrators",
    "files",
    "plots",
    "integrations",
    "study",
    "cli",
)
STUDY = (
    "distributed",
    "samples",
    "partitions",
    "given",
    "split",
    "scores",
    "grid_search",
    "cross_validation",
    "results",
    "intervals",
    "verdict",
    "remarks",
    "report",
    "study",
    "choices",
    "compare",
    "evaluate",
    "apply",
    "card",
    "engines",
    "network",
    "sweep",
)
REPORT = ("html", "tables", "export", "explorer", "page", "sweep")
# Folders outside the package, and the folders from which each may import.
BESIDE = {"focalkern": set(), "tools": {"focalkern"}, "benchmarks": {"focalkern", "tools"}, "examples": {"focalkern"}}

# Folders of csrc, and those whose headers each may include beside its own.
CSRC = {
    "math": set(),
    "kernels": {"math"},
    "cpu": {"math", "kernels"},
    "cuda": {"math", "kernels"},
    "bindings": {"math", "kernels", "cpu", "cuda"},
    "stable": {"math", "kernels", "cpu", "cuda", "bindings"},
}

pytestmark = pytest.mark.skipif(not (ROOT / "tools").is_dir(), reason="not in the source tree")


def modules(folder):
    """Path by name of every module in a folder."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path, known):
    """(module, whether inside a function) of every import of a file; imports for type checkers are left out."""

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                assert child.level == 0, f"{path}: a relative import"
                for alias in child.names:
                    name = f"{child.module}.{alias.name}"
                    yield (name if name in known else child.module), inside
            else:
                yield from visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    return list(visit(ast.parse(path.read_text(encoding="utf-8")), False))


PACKAGE = modules("focalkern")
EDGES = {name: imports(path, PACKAGE) for name, path in PACKAGE.items()}


def layer(name):
    """The layer of a module of the package; None for the package itself and __main__."""
    parts = name.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return None
    return "shared" if parts[1].startswith("_") or parts[1] == "gamma" else parts[1]


def runs_back(order, place_of):
    """Imports whose target stands below the file, in an order of places."""
    return [
        f"{name} imports {target}"
        for name, targets in EDGES.items()
        for target, _ in targets
        if place_of(name) is not None
        and target.startswith("focalkern.")
        and place_of(target) is not None
        and order.index(place_of(target)) > order.index(place_of(name))
    ]


def inside(package):
    """The part of a package that a module belongs to; None for other modules and the package itself."""

    def place_of(name):
        return name.removeprefix(f"{package}.").split(".")[0] if name.startswith(f"{package}.") else None

    return place_of


def test_every_folder_has_its_layer():
    assert {layer(name) for name in PACKAGE} - {None} == set(LAYERS)
    assert {inside("focalkern.study")(name) for name in PACKAGE} - {None} == set(STUDY)
    assert {inside("focalkern.study.report")(name) for name in PACKAGE} - {None} == set(REPORT)


def test_no_layer_imports_one_below():
    assert runs_back(LAYERS, layer) == []
    assert runs_back(STUDY, inside("focalkern.study")) == []
    assert runs_back(REPORT, inside("focalkern.study.report")) == []


def test_files_import_nothing_but_shared_modules():
    wanted = {"shared", "files", None}
    found = [(name, target) for name in PACKAGE if layer(name) == "files" for target, _ in EDGES[name]]
    assert [pair for pair in found if pair[1].startswith("focalkern") and layer(pair[1]) not in wanted] == []


def test_no_import_is_circular():
    graph = {
        name: {target for target, _ in targets if target in PACKAGE and target != name}
        for name, targets in EDGES.items()
        if PACKAGE[name].name != "__init__.py"  # packages re-export names
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, whose message has the cycle


@pytest.mark.parametrize("folder", [name for name in LAYERS if name not in ("shared", "reference", "fallback", "ops")])
def test_files_import_only_names_in_all(folder):
    """``__all__`` says what other files of the package use. The folders of operators also share private functions."""
    exported = {}
    for path in (ROOT / "focalkern" / folder).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                exported[".".join(path.relative_to(ROOT).with_suffix("").parts)] = ast.literal_eval(node.value)
    assert exported or folder in ("losses", "integrations")
    imported = {
        (node.module, alias.name)
        for path in (ROOT / "focalkern").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in exported
        for alias in node.names
    }
    assert not {(module, name) for module, name in imported if name not in exported[module]}


def test_imports_in_functions_are_of_extras():
    """An import inside a function is for an optional package; it never hides a cycle."""
    found = {target for targets in EDGES.values() for target, in_function in targets if in_function}
    assert {layer(name) for name in found if name.startswith("focalkern")} <= {"plots", "integrations"}


@pytest.mark.parametrize("folder", BESIDE)
def test_folders_beside_the_package(folder):
    others = {"focalkern", "tools", "benchmarks", "examples", "tests"} - BESIDE[folder] - {folder}
    known = modules(folder)
    found = {name: {target.partition(".")[0] for target, _ in imports(path, known)} for name, path in known.items()}
    assert {name: targets & others for name, targets in found.items() if targets & others} == {}


def includes():
    """The sources and headers of csrc that each of them includes, relative to csrc."""
    csrc = ROOT / "csrc"
    return {
        path.relative_to(csrc).as_posix(): set(re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8")))
        for path in sorted(csrc.rglob("*.*"))
    }


def folder_of(name):
    return name.partition("/")[0]


def test_no_folder_of_csrc_includes_one_below():
    found = includes()
    assert {folder_of(name) for name in found} == set(CSRC)
    pairs = [(name, target) for name, targets in found.items() for target in targets]
    assert {target for _, target in pairs} <= set(found)
    allowed = {folder: {folder, *others} for folder, others in CSRC.items()}
    assert [pair for pair in pairs if folder_of(pair[1]) not in allowed[folder_of(pair[0])]] == []


def test_no_include_is_circular():
    list(TopologicalSorter(includes()).static_order())  # raises CycleError, which names the circle


def test_an_import_that_runs_back_is_found():
    """Tests the check itself on a package with a wrong import."""
    EDGES["focalkern.ops.wrong"] = [("focalkern.study.sweep", True)]
    try:
        assert runs_back(LAYERS, layer) == ["focalkern.ops.wrong imports focalkern.study.sweep"]
    finally:
        del EDGES["focalkern.ops.wrong"]
