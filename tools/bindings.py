"""Compiles csrc/bindings for one release of torch: setup.py for the installed one, tools/wheel.py for several."""

import hashlib
import os
import re
import sys
import sysconfig
from pathlib import Path

from tools.compiler import (
    BUILD,
    EXPORTED,
    ROOT,
    TORCH_LIBRARIES,
    Compiler,
    link,
    locked,
    release_of,
    run,
    sources,
    stand_ins,
)
from tools.toolchain import host_compiler

__all__ = ["build_binding"]

# Their internal functions have the same names.
APART = ("row_loss", "sigmoid_loss", "spline_map")


def build_binding(
    compiler: Compiler, target: Path, headers: Path, torch: str, toolkit: Path | None, *flags: str | Path
) -> None:
    """Compiles and links the module ``target``, whose name begins with that of its initialisation function.

    Args:
        headers: the include folder of torch.
        torch: its release.
        toolkit: nvcc's folder, for a module with CUDA kernels.
        flags: link flags, with the kernels.
    """
    where = [f"-I{ROOT / 'csrc'}", f"-isystem{headers}", f"-isystem{headers}/torch/csrc/api/include"]
    where += [f"-isystem{sysconfig.get_path('include')}"]
    name = f"{release_of(torch)}-{sys.implementation.cache_tag}"
    # -O2: bindings check and launch, they have no loops over classes.
    command = [*host_compiler(), *EXPORTED, "-O2", "-fvisibility=hidden", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    command += [*_precompiled(command, where, name), *where]
    macros = {"TORCH_EXTENSION_NAME": target.name.split(".")[0]}
    libraries = list(TORCH_LIBRARIES)
    if toolkit:
        command.append(f"-isystem{toolkit / 'include'}")
        macros["FOCALKERN_WITH_CUDA"] = "1"
        libraries.append("c10_cuda")
    objects = compiler.objects(_units(), command, macros, name)
    link(target, objects, *stand_ins(BUILD / "stand_ins", libraries), *flags)


def _units() -> list[Path]:
    """The sources to compile: those of APART, and one that includes the others. The headers of torch and pybind11 take
    most of the compile time of a source, also precompiled."""
    apart, joined = [], []
    for path in sources("bindings/*.cpp"):
        (apart if path.stem in APART else joined).append(path)
    every = BUILD / "bindings.cpp"
    unfinished = every.with_suffix(f".{os.getpid()}")  # another process may be compiling it
    unfinished.write_text("".join(f'#include "bindings/{path.name}"\n' for path in joined))
    unfinished.rename(every)
    return [every, *apart]


def _precompiled(command: list[str], where: list[str], name: str) -> list[str | Path]:
    """Flags for a precompiled header of all torch headers that the bindings include, which take most of the compile
    time."""
    lines = {
        line
        for path in sources("bindings/*")
        for line in path.read_text().splitlines()
        if re.match(r"#include <(ATen|c10|torch|pybind11)/", line) and "cuda" not in line
    }
    text = "\n".join(sorted(lines, reverse=True)) + "\n"
    key = hashlib.sha256("\0".join([text, *command]).encode()).hexdigest()[:12]
    header = BUILD / "precompiled" / f"{name}-{key}" / "bindings_of_torch.h"
    compiled = header.with_suffix(".h.gch")
    header.parent.mkdir(parents=True, exist_ok=True)
    with locked(header.with_suffix(".lock")):
        if not compiled.is_file():
            header.write_text(text)
            unfinished = compiled.with_suffix(".tmp")
            run([*command, *where, "-x", "c++-header", header, "-o", unfinished])
            unfinished.rename(compiled)
    return ["-include", header]
