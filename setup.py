"""Builds focalkern._C. Everything that is not compilation is declared in pyproject.toml.

Environment: FOCALKERN_CUDA=auto|0|1 (auto builds the CUDA kernels where torch is a CUDA build and nvcc is found; no GPU
is needed), TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CPP_FLAGS = ["-O3", "-g0", "-fvisibility=hidden"]
# -fopenmp: at::parallel_for is silently serial without it. It is not a link flag: the OpenMP calls must bind to the
# runtime that torch has loaded, or torch.set_num_threads would not reach these kernels.
# -fno-trapping-math: the loops over classes vectorize only with it. It changes no result.
HOST_FLAGS = [*CPP_FLAGS, "-fopenmp", "-fno-trapping-math"]
DEFAULT_ARCH_LIST = "8.0;9.0+PTX"
INSTALL = "pip install --no-build-isolation ."


def fail(message: str) -> None:
    sys.exit(f"focalkern: {message}")


def toolkit_folder() -> Path | None:
    """The folder that holds bin/nvcc. nvcc is asked, because the one on PATH may be a wrapper script elsewhere."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(named, "bin", "nvcc") if named else shutil.which("nvcc")
    if nvcc is None or not Path(nvcc).is_file():
        return None
    if named:
        return Path(named)
    dry_run = subprocess.run([nvcc, "-v", "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", dry_run.stdout + dry_run.stderr, re.MULTILINE)
    return (Path(top[1].strip()) if top else Path(nvcc).resolve().parent.parent).resolve()


def toolkit_version(toolkit: Path) -> str:
    answer = subprocess.run([toolkit / "bin" / "nvcc", "--version"], capture_output=True, text=True)
    found = re.search(r"release (\d+\.\d+)", answer.stdout)
    return found[1] if found else "unknown"


def cuda_toolkit(torch_cuda: str | None) -> Path | None:
    """The toolkit to build the CUDA kernels with, or None for a build without them."""
    wanted = os.environ.get("FOCALKERN_CUDA") or "auto"
    if wanted not in ("auto", "0", "1"):
        fail(f"FOCALKERN_CUDA must be auto, 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    toolkit = toolkit_folder()
    problem = None
    if torch_cuda is None:
        problem = "the installed torch is a CPU-only build"
    elif toolkit is None:
        problem = "nvcc was not found (put it on PATH or set CUDA_HOME)"
    elif toolkit_version(toolkit).split(".")[0] != torch_cuda.split(".")[0]:
        problem = f"nvcc is CUDA {toolkit_version(toolkit)} and torch was built with CUDA {torch_cuda}"
    if problem and wanted == "1":
        fail(f"FOCALKERN_CUDA=1, but {problem}")
    if problem:
        print(f"focalkern: building without CUDA kernels: {problem}")
    return None if problem else toolkit


def extension() -> tuple[Extension, type[build_ext]]:
    host_sources = sorted(glob("csrc/bindings*.cpp") + glob("csrc/cpu/*.cpp"))
    try:
        import torch
    except ImportError:  # an sdist needs no torch; a build does
        return Extension("focalkern._C", host_sources), BuildWithoutTorch

    toolkit = cuda_toolkit(torch.version.cuda)
    if toolkit:
        os.environ["CUDA_HOME"] = str(toolkit)  # torch reads it when cpp_extension is imported
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCH_LIST)
    # BuildExtension starts ninja by name; pip does not put the environment's scripts on PATH.
    os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", "")
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    class BuildAndRecord(BuildExtension):
        """Writes focalkern/_build_info.py beside the module, for the check before its import."""

        def run(self) -> None:
            # Otherwise the old module would do for another torch or another FOCALKERN_CUDA. ninja still compiles
            # nothing twice, also for pip install --editable, whose own temporary folder is a new one every time.
            self.force = True
            if self.editable_mode:
                self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
            super().run()
            arch_list = os.environ["TORCH_CUDA_ARCH_LIST"].replace(" ", ";").split(";") if toolkit else []
            Path(self.get_ext_fullpath("focalkern._C")).with_name("_build_info.py").write_text(
                '"""What focalkern._C was built with. Written by setup.py."""\n\n'
                f"TORCH = {str(torch.__version__)!r}\nCUDA: str | None = {torch.version.cuda if toolkit else None!r}\n"
                f"ARCH_LIST: list[str] = {arch_list!r}\n"
            )

    settings = {
        "name": "focalkern._C",
        "include_dirs": [os.path.abspath("csrc")],
        "depends": sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/**/*.cuh", recursive=True)),
        "define_macros": [("FOCALKERN_WITH_CUDA", None)] if toolkit else [],
    }
    if not toolkit:
        return CppExtension(sources=host_sources, extra_compile_args={"cxx": HOST_FLAGS}, **settings), BuildAndRecord
    flags = {"cxx": HOST_FLAGS, "nvcc": ["-O3", "-Xcompiler=-fvisibility=hidden"]}
    sources = host_sources + sorted(glob("csrc/cuda/*.cu"))
    return CUDAExtension(sources=sources, extra_compile_args=flags, **settings), BuildAndRecord


class BuildWithoutTorch(build_ext):
    def run(self) -> None:
        fail(f"building needs the torch it will run with: install torch, then run: {INSTALL}")


module, build_command = extension()
setup(license="MIT", ext_modules=[module], cmdclass={"build_ext": build_command})
