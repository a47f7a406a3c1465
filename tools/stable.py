"""Builds the module behind torch's stable ABI, one file for every torch from 2.11 and every Python on (csrc/stable)."""

from collections.abc import Sequence
from pathlib import Path

from tools.compiler import BUILD, ROOT, Compiler, link, release_of, sources, stand_ins
from tools.toolchain import CPP_FLAGS, host_compiler

__all__ = ["build_stable", "stable_command"]

# The headers then offer no function that torch 2.11 lacks.
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"


def stable_command(torch_headers: Path, tools: str = "") -> list[str | Path]:
    """Compiles csrc/stable. ``tools`` is the prefix of a cross-compiler's programs."""
    command = [*host_compiler(tools), "-std=c++20", "-fPIC", "-DNDEBUG", *CPP_FLAGS, "-O2", TARGET]
    return [*command, f"-I{ROOT / 'csrc'}", f"-isystem{torch_headers}"]


def build_stable(
    compiler: Compiler,
    folder: Path,
    torch_headers: Path,
    torch: str,
    kernels: Sequence[str | Path],
    toolkit: Path | None = None,
    tools: str = "",
) -> Path:
    """Compiles csrc/stable and links it with the kernels: objects, archives or -l flags; with CUDA's if given nvcc's
    folder."""
    command = stable_command(torch_headers, tools)
    command += ["-DUSE_CUDA"] if toolkit else []  # declares what torch has for CUDA alone
    macros = {"FOCALKERN_WITH_CUDA": "1"} if toolkit else {}
    objects = compiler.objects(sources("stable/*.cpp"), command, macros, f"stable {release_of(torch)}")
    names = ["c10", "torch", "torch_cpu", *(["torch_cuda"] if toolkit else [])]
    target = folder / ("_C_stable_cuda.abi3.so" if toolkit else "_C_stable.abi3.so")
    torch_libraries = stand_ins(BUILD / f"{tools}stand_ins", names, tools)
    link(target, objects, *kernels, *torch_libraries, tools=tools)
    return target
