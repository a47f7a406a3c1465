"""The compilers: flags that every build of the kernels shares, and where the CUDA toolkit is."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

CPP_FLAGS = ["-O3", "-g0", "-fvisibility=hidden"]
# -fopenmp: at::parallel_for is silently serial without it. It is not a link flag: the OpenMP calls must bind to the
# runtime that torch has loaded, or torch.set_num_threads would not reach these kernels.
# -fno-trapping-math: the loops over classes vectorize only with it. It changes no result.
HOST_FLAGS = [*CPP_FLAGS, "-fopenmp", "-fno-trapping-math"]
COMPILERS = ["g++", "c++", "clang++"]


def fail(message: str) -> None:
    sys.exit(f"focalkern: {message}")


def host_compiler(tools: str = "") -> list[str]:
    """The C++ compiler: CXX, or the first that is installed. ``tools`` is the prefix of a cross-compiler's programs."""
    if tools:
        return [f"{tools}g++"]
    return shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, COMPILERS), COMPILERS[0])]


def toolkit_folder() -> Path | None:
    """The folder that holds bin/nvcc. nvcc itself reports it, because the one on PATH may be a wrapper script in
    another folder."""
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
