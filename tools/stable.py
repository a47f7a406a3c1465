"""Builds the module behind torch's stable ABI, one file for every torch from 2.11 and every Python on (csrc/stable)."""

from collections.abc import Sequence
from pathlib import Path

from tools.compiler import BUILD, ROOT, Compiler, link, sources, stand_ins
from tools.toolchain import CPP_FLAGS

__all__ = ["build_stable"]

# The headers then offer no function that torch 2.11 lacks.
TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"


def build_stable(
    compiler: Compiler,
    folder: Path,
    torch_headers: Path,
    torch: str,
    kernels: Sequence[str | Path],
    toolkit: Path | None = None,
) -> Path:
    """Compiles csrc/stable and links it with the kernels: objects, archives or -l flags; with CUDA's if given nvcc's
    folder."""
    command = ["g++", "-std=c++20", "-fPIC", "-DNDEBUG", *CPP_FLAGS, "-O2", TARGET, f"-I{ROOT / 'csrc'}"]
    command += [f"-isystem{torch_headers}"]
    command += ["-DUSE_CUDA"] if toolkit else []  # declares what torch has for CUDA alone
    macros = {"FOCALKERN_WITH_CUDA": "1"} if toolkit else {}
    objects = compiler.objects(sources("stable/*.cpp"), command, macros, f"stable {torch}")
    names = ["c10", "torch", "torch_cpu", *(["torch_cuda"] if toolkit else [])]
    target = folder / ("_C_stable_cuda.abi3.so" if toolkit else "_C_stable.abi3.so")
    link(target, objects, *kernels, *stand_ins(BUILD / "stand_ins", names))
    return target
