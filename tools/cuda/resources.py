"""Registers, stack and shared memory of every CUDA kernel in the compiled module: python -m tools.cuda.resources

They are read from the module that runs, with cuobjdump (of a CUDA toolkit, or of the Triton that comes with a CUDA
build of torch); no GPU is needed. A register spill takes a stack frame, so a stack of 0 bytes means no spill.

--compile SM ... reads them from objects that nvcc makes of csrc/cuda for these architectures, without torch.
"""

import argparse
import csv
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class KernelResources:
    kernel: str  # template arguments included
    arch: str  # sm_80, ...
    registers: int  # per thread
    stack_bytes: int  # per thread, in local memory
    local_bytes: int
    shared_bytes: int  # per block


class ResourcesUnavailableError(Exception):
    """The resources cannot be read; the message gives the reason."""


def compiled_module() -> Path:
    import focalkern

    if not focalkern.build_info()["cuda"]:
        raise ResourcesUnavailableError("focalkern was built without CUDA kernels")
    # A wheel for several releases of torch has the kernels in a separate library.
    several = hasattr(importlib.import_module("focalkern._build_info"), "MODULES")
    (found,) = Path(focalkern.__file__).parent.glob("libfocalkern_cuda.so" if several else "_C.*.so")
    return found


def cuobjdump() -> Path:
    places = [Path(found)] if (found := shutil.which("cuobjdump")) else []
    if tools := os.environ.get("CUDA_TOOLS"):
        places.append(Path(tools, "cuobjdump"))
    if home := os.environ.get("CUDA_HOME"):
        places.append(Path(home, "bin", "cuobjdump"))
    if (triton := importlib.util.find_spec("triton")) is not None and triton.origin is not None:
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    for place in places:
        if place.is_file():
            return place
    raise ResourcesUnavailableError("cuobjdump was found neither on PATH nor in CUDA_HOME nor beside Triton")


def compile_for(architectures: list[str], folder: Path) -> list[Path]:
    """The kernels as torch's build compiles them, a file of machine code for each source."""
    nvcc = shutil.which("nvcc") or str(Path(os.environ.get("CUDA_HOME", ""), "bin", "nvcc"))
    if not Path(nvcc).is_file():
        raise ResourcesUnavailableError("nvcc was found neither on PATH nor in CUDA_HOME")
    sources = Path(__file__).parents[2] / "csrc"
    flags = ["-O3", "-std=c++20", "-w", "--expt-relaxed-constexpr", "-D__CUDA_NO_HALF_OPERATORS__",
             "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__",
             *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures), f"-I{sources}"]  # fmt: skip
    found = []
    for kernel in sorted((sources / "cuda").glob("*.cu")):
        found.append(folder / f"{kernel.stem}.fatbin")
        subprocess.run([nvcc, *flags, "-fatbin", str(kernel), "-o", str(found[-1])], check=True)
    return found


def parse(dump: str) -> list[KernelResources]:
    """The output of ``cuobjdump --dump-resource-usage``, with mangled kernel names."""
    found, arch = [], ""
    for line in dump.splitlines():
        if match := re.match(r"\s*arch\s*=\s*(\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match[1]
        elif "REG:" in line:
            numbers = {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}
            found.append(
                KernelResources(name, arch, numbers["REG"], numbers["STACK"], numbers["LOCAL"], numbers["SHARED"])
            )
    return found


def demangle(names: list[str]) -> list[str]:
    """Demangled names without namespaces and parameters; mangled names if c++filt is missing."""
    if shutil.which("c++filt") is None:
        return names
    plain = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    short = [re.sub(r"focalkern::(cuda::)?|\(anonymous namespace\)::|^void ", "", name) for name in plain.splitlines()]
    return [
        re.sub(
            r"\((RowPath|Targets|bool|int)\)", r"\1 ", re.sub(r"(?<=[>a-z])\((?!RowPath|Targets|bool|int).*$", "", s)
        )
        for s in short
    ]


def read(*modules: Path) -> list[KernelResources]:
    """All kernels of the modules (default: the compiled module), for every architecture with machine code.

    Raises:
        ResourcesUnavailableError: there are no CUDA kernels, or cuobjdump is not there.
    """
    rows = []
    for module in modules or (compiled_module(),):
        done = subprocess.run([cuobjdump(), "--dump-resource-usage", module], capture_output=True, text=True)
        if not (of_module := parse(done.stdout)):
            raise ResourcesUnavailableError(
                f"cuobjdump found no kernel in {module.name}: {(done.stderr or done.stdout).strip()}"
            )
        rows += of_module
    names = demangle([row.kernel for row in rows])
    renamed = [KernelResources(**{**asdict(row), "kernel": name}) for row, name in zip(rows, names, strict=True)]
    return sorted(renamed, key=lambda row: (row.kernel, row.arch))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.cuda.resources", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table to this CSV file; default: standard output")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a kernel spills or has a stack frame")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--compile", nargs="+", metavar="SM", help="compile the sources for these, as 80 90, instead")
    instead.add_argument("--library", type=Path, help="read this library of instruction_counts --build instead")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            modules = [arguments.library] if arguments.library else []
            rows = read(*(compile_for(arguments.compile, Path(folder)) if arguments.compile else modules))
    except ResourcesUnavailableError as problem:
        print(f"resources: {problem}", file=sys.stderr)
        return 2
    stream = arguments.out.open("w", newline="") if arguments.out else sys.stdout
    with stream:
        writer = csv.DictWriter(stream, [f.name for f in fields(KernelResources)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    spilling = [f"{row.kernel} on {row.arch}" for row in rows if row.stack_bytes or row.local_bytes]
    if arguments.check and spilling:
        print(f"resources: a stack frame or spilled registers in {', '.join(spilling)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
