"""Writes the focal losses as a kernel of the Kernel Hub: ``python -m tools.hub FOLDER [--build]``.

The folder has the layout that the Hub's kernel-builder expects: build.toml, csrc and torch-ext/focal_loss. C++ and CUDA
sources are copied. focalkern's Python modules are rewritten: relative imports, operator names from the builder's
``_ops.py``, syntax of Python 3.9. The other Python files are kept in tools/hub_package. The kernel imports only torch
and the standard library.

``--build`` also compiles the variant for this machine's CPU into FOLDER/build, as the builder would.
``kernels.get_local_kernel(Path(FOLDER))`` then loads it. ``--build`` needs g++ and torch. Nothing is uploaded.
"""

import argparse
import ast
import hashlib
import json
import platform
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.compiler import BUILD, ROOT, Compiler, kernel_command, link, sources, stand_ins
from tools.long_description import version_of
from tools.stable import stable_command

NAME = "focal_loss"
BY_HAND = ROOT / "tools" / "hub_package"
# Modules of focalkern that the kernel needs; the modules that they import are added.
MODULES = ("stable/row_loss", "stable/sigmoid_loss", "ops/_row_loss", "ops/sigmoid_loss")
COMPILED = (".cpp", ".cu", ".h", ".cuh", ".def")
BINDINGS = ("stable/row_loss.cpp", "stable/sigmoid_loss.cpp")
CPU = (
    *(f"cpu/row_loss/{path.name}" for path in sources("cpu/row_loss/*.cpp")),
    "cpu/row_sums.cpp",
    "cpu/sigmoid_loss.cpp",
)
CUDA = tuple(
    f"cuda/{path.name}"
    for op in ("focal_loss", "row_loss", "row_statistics", "sigmoid_loss")
    for path in sources(f"cuda/{op}*.cu")
)


# -- Python -----------------------------------------------------------------------------------------------------------


def python_parts() -> dict[Path, Path]:
    """Path in the kernel -> source file, for the hand-written modules and the imported modules of focalkern."""
    parts = {path.relative_to(BY_HAND): path for path in BY_HAND.rglob("*.py")}
    waiting = [*parts.values(), *(ROOT / "focalkern" / f"{module}.py" for module in MODULES)]
    parts |= {path.relative_to(ROOT / "focalkern"): path for path in waiting[len(parts) :]}
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("focalkern."):
                continue
            place = Path(*str(node.module).split(".")[1:]).with_suffix(".py")
            if place not in parts and (ROOT / "focalkern" / place).is_file():
                parts[place] = ROOT / "focalkern" / place
                waiting.append(parts[place])
    return parts


def hub_module(text: str, depth: int) -> str:
    """The text of a module of focalkern, rewritten for the Hub; it is ``depth`` folders below the kernel's root."""
    tree, result, dots = ast.parse(text), text.encode(), "." * (depth + 1)
    starts = [0]
    for line in result.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> slice:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return slice(starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)

    def source(node: ast.expr | ast.stmt, whole: bytes = result) -> str:
        return whole[span(node)].decode()

    edits = [(span(node), new) for node in ast.walk(tree) for new in _replacement(node, source, dots)]
    prelude = "from __future__ import annotations\n\n"
    if "torch.ops.focalkern" in text or "focalkern::" in text:
        prelude += f"from {dots}_ops import add_op_namespace_prefix, ops\n"
    first = span(next(node for node in tree.body if not isinstance(node, ast.Expr))).start
    edits.append((slice(first, first), prelude))
    end = len(result)
    for place, new in sorted(edits, key=lambda edit: (edit[0].start, edit[0].stop), reverse=True):  # from the end
        assert place.stop <= end, f"one replacement is within another: {new}"
        end = place.start
        result = result[: place.start] + new.encode() + result[place.stop :]
    return result.decode()


def _replacement(node: ast.AST, source: Callable[[ast.expr | ast.stmt], str], dots: str) -> Iterator[str]:
    """Yields the replacement text of a syntax node, or nothing if the node is unchanged."""
    if isinstance(node, ast.ImportFrom) and re.match(r"(focalkern|tools\.hub_package)(\.|$)", node.module or ""):
        yield re.sub(r"^from (focalkern|tools\.hub_package)\.?", f"from {dots}", source(node))
    elif isinstance(node, ast.Import) and node.names[0].name == "numpy":
        yield f"from {dots} import _numpy as np"
    elif isinstance(node, ast.Attribute) and source(node) in ("torch.ops.focalkern", "torch.ops.focalkern_stable"):
        yield "ops"
    elif isinstance(node, ast.JoinedStr) and source(node).startswith('f"focalkern::'):
        yield f"add_op_namespace_prefix({source(node).replace('focalkern::', '', 1)})"
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "zip":
        yield re.sub(r", strict=(True|False)\)$", ")", source(node))
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance" and " | " in source(node.args[1]):
        kinds = source(node.args[1])
        several = ", ".join("type(None)" if kind == "None" else kind for kind in kinds.split(" | "))
        yield f"{source(node).removesuffix(f'{kinds})')}({several}))"


# -- C++ --------------------------------------------------------------------------------------------------------------


def included(names: tuple[str, ...]) -> list[str]:
    """The headers of csrc that these sources include, directly or through other headers."""
    found: set[str] = set()
    waiting = [ROOT / "csrc" / name for name in names]
    while waiting:
        for name in re.findall(r'^#include "(.+)"', waiting.pop().read_text(encoding="utf-8"), re.MULTILINE):
            if name not in found and (ROOT / "csrc" / name).is_file():
                found.add(name)
                waiting.append(ROOT / "csrc" / name)
    return sorted(found)


def build_toml(headers: list[str]) -> str:
    """The builder's settings (build.toml). With the stable ABI one build serves every torch from 2.11 on."""

    def listed(names: tuple[str, ...] | list[str]) -> str:
        return "[\n" + "".join(f'    "csrc/{name}",\n' for name in names) + "]"

    def kernel(backend: str, compiled: tuple[str, ...]) -> str:
        return (
            f'[kernel.{NAME}_{backend}]\nbackend = "{backend}"\ndepends = ["torch"]\ninclude = ["csrc"]\n'
            f'cxx-flags = ["-O3", "-fno-trapping-math"]\nsrc = {listed([*compiled, *headers])}\n'
        )

    general = (
        f'[general]\nname = "{NAME.replace("_", "-")}"\nversion = 0\nedition = 5\nlicense = "MIT"\n'
        'backends = ["cpu", "cuda"]\n\n[general.hub]\nrepo-id = "focalkern/focal-loss"\n'
    )
    binding = ["torch-ext/torch_binding.cpp", *(f"csrc/{name}" for name in (*BINDINGS, *headers))]
    torch = '[torch]\ninclude = ["csrc"]\nsrc = [\n' + "".join(f'    "{name}",\n' for name in binding) + "]\n"
    abi = '[torch.stable-abi]\ncpu = "2.11"\ncuda = "2.11"\n'
    return "\n".join([general, torch, abi, kernel("cpu", CPU), kernel("cuda", (*CPU, *CUDA))])


# -- the folder -------------------------------------------------------------------------------------------------------


def generate(folder: Path) -> None:
    """Writes the kernel's sources into a folder, which must be new or empty."""
    extension = folder / "torch-ext" / NAME
    parts = python_parts()
    for part, source in parts.items():
        target = extension / part
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(hub_module(source.read_text(encoding="utf-8"), len(part.parts) - 1), encoding="utf-8")
    shutil.copy(BY_HAND / "torch_binding.cpp", folder / "torch-ext")
    for package in {part.parent for part in parts}:
        (extension / package / "__init__.py").touch()
    headers = included((*BINDINGS, *CPU, *CUDA))
    headers = sorted({*headers, "bindings/schemas.h"})
    for name in (*BINDINGS, *CPU, *CUDA, *headers):
        target = folder / "csrc" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "csrc" / name, target)
    (folder / "build.toml").write_text(build_toml(headers), encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder)


def identity(folder: Path) -> str:
    """The name of a build: a hash of its sources, as in the builder. Several versions can then load in one process."""
    digest = hashlib.sha256()
    for path in sorted(path for part in ("csrc", "torch-ext") for path in (folder / part).rglob("*") if path.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return f"_{NAME}_cpu_{digest.hexdigest()[:7]}"


_OPS = """import torch

from . import {name}

ops = torch.ops.{name}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{name}::{{op_name}}"
"""
# A copy of kernel-builder's registration.h in meaning.
_REGISTRATION = """#pragma once
#include <Python.h>
#define FK_CONCATENATED_(a, b) a##b
#define FK_CONCATENATED(a, b) FK_CONCATENATED_(a, b)
#define FK_TEXT_(a) #a
#define FK_TEXT(a) FK_TEXT_(a)
#define REGISTER_EXTENSION(name)                                                                     \\
  PyMODINIT_FUNC FK_CONCATENATED(PyInit_, name)() {                                                  \\
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, FK_TEXT(name), nullptr, 0, nullptr}; \\
    return PyModule_Create(&module);                                                                 \\
  }
"""


def build(folder: Path) -> Path:
    """Compiles the variant for this machine's CPU in a generated folder. It shares the objects of csrc/cpu with
    tools/wheel.py, because sources and flags are the same."""
    import torch

    name = identity(folder)
    variant = folder / "build" / f"torch-stable-abi211-cpu-{platform.machine()}-linux"
    shutil.copytree(folder / "torch-ext" / NAME, variant)
    registration = BUILD / "hub"
    registration.mkdir(parents=True, exist_ok=True)
    (registration / "registration.h").write_text(_REGISTRATION)
    compiler, headers = Compiler(), Path(torch.__file__).parent / "include"
    kernels = compiler.objects([ROOT / "csrc" / source for source in CPU], kernel_command(), {}, "")
    command = [*stable_command(headers), f"-I{registration}", f"-I{sysconfig.get_path('include')}"]
    command += ["-DPy_LIMITED_API=0x03090000", f"-DTORCH_EXTENSION_NAME={name}", "-DCPU_KERNEL"]
    bindings = [folder / "torch-ext" / "torch_binding.cpp", *(folder / "csrc" / source for source in BINDINGS)]
    objects = compiler.objects(bindings, command, {}, f"stable {torch.__version__}")
    libraries = stand_ins(BUILD / "stand_ins", ["c10", "torch", "torch_cpu"])
    link(variant / f"{name}.abi3.so", [*objects, *kernels], "-Wl,-Bsymbolic", *libraries)
    (variant / "_ops.py").write_text(_OPS.format(name=name))
    version = version_of((ROOT / "focalkern/_version.py").read_text(encoding="utf-8"))
    metadata = {"id": name, "name": NAME.replace("_", "-"), "version": 0, "license": "MIT", "python-depends": []}
    metadata |= {"backend": {"type": "cpu"}, "upstream": None, "focalkern": version}
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.hub", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new folder, such as build/hub/focal-loss")
    parser.add_argument("--build", action="store_true", help="also compile the variant for this machine's CPU")
    arguments = parser.parse_args()
    generate(arguments.folder)
    print(arguments.folder)
    if arguments.build:
        print(build(arguments.folder))


if __name__ == "__main__":
    main()
