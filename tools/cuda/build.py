"""Builds the CUDA launchers and kernels of csrc/cuda as a library that runs on the CPU: their source on the host shim,
the PTX that nvcc makes of them on ptxrun, or machine code on sassrun.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from ctypes import c_char_p, c_double, c_int64, c_void_p
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
# Stricter than a build: without implicit conversions of half types.
NVCC_FLAGS = [
    "-O3", "-std=c++17", "-w", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fno-gnu-unique", "--no-compress",
    "-DFOCALKERN_TEST_GRID", "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__",
]  # fmt: skip
# Several of these libraries may be loaded in one process, each with its own state; so their symbols must not be unique.
HOST_FLAGS = ["-std=c++17", "-fPIC", "-fno-gnu-unique"]
MACHINE_CODE = {"machine_code": "90", "machine_code_100": "100"}
# Sources that take more than a few seconds to compile.
LONGEST = ("row_loss_soft", "sassrun", "calibration_map", "sigmoid_loss_vectorized", "focal_loss", "runtime")
EXACT = ["-O3", "-march=native", "-fno-strict-aliasing", "-ffp-contract=off"]


class ToolMissingError(Exception):
    """The missing tools, and where they were searched."""


def tool(name: str) -> str:
    """A program: on PATH, of a CUDA toolkit, or as pip or Triton bring it."""
    places = [Path(found)] if (found := shutil.which(name)) else []
    places += [Path(os.environ[key], name) for key in ("CUDA_TOOLS",) if os.environ.get(key)]
    places += [Path(os.environ[key], "bin", name) for key in ("CUDA_HOME",) if os.environ.get(key)]
    site = Path(sysconfig.get_path("purelib"))
    places += [*site.glob(f"nvidia/*/bin/{name}"), site / "triton/backends/nvidia/bin" / name]
    for place in places:
        if place.is_file():
            return str(place)
    raise ToolMissingError(f"{name} is neither on PATH nor in CUDA_HOME, CUDA_TOOLS or the Python environment")


def compiler() -> str:
    if platform.machine() != "x86_64" or not CSRC.is_dir():
        raise ToolMissingError("needs x86-64 and the sources")
    return tool("g++")


def run_all(commands: Iterable[list[str]], at_once: int | None = None) -> None:
    """Runs the commands, one per processor at a time, the longest first; raises at the first failure."""

    def place(command: list[str]) -> int:
        stem = Path(command[command.index("-o") + 1]).stem if "-o" in command else ""
        return LONGEST.index(stem) if stem in LONGEST else len(LONGEST)

    with ThreadPoolExecutor(at_once or os.cpu_count() or 1) as pool:
        jobs = {pool.submit(subprocess.call, command): command for command in sorted(commands, key=place)}
        for job in as_completed(jobs):
            if job.result() != 0:
                pool.shutdown(cancel_futures=True)
                raise RuntimeError(f"failed: {' '.join(jobs[job])}")


def kernels(csrc: Path = CSRC) -> list[Path]:
    return sorted((csrc / "cuda").glob("*.cu"))


def link(folder: Path, flags: tuple[str, ...] = (), executable: bool = False) -> Path:
    """The object files in the folder."""
    target = folder / ("run" if executable else "kernels.so")
    # -Bsymbolic: the library calls its own CUDA runtime, even if a CUDA build of torch has loaded the real one.
    kind = [] if executable else ["-shared", "-Wl,-Bsymbolic"]
    subprocess.run([compiler(), *kind, *flags, *sorted(map(str, folder.glob("*.o"))), "-o", str(target)], check=True)
    return target


def harness_command(folder: Path, csrc: Path) -> list[str]:
    """The launchers as C functions, for ptxrun."""
    include = [f"-I{HERE / 'ptx/stub'}", f"-I{csrc}", "-DFOCALKERN_TEST_GRID"]
    harness = str(HERE / "shim/harness.cpp")
    return [compiler(), *HOST_FLAGS, "-O1", *include, "-c", harness, "-o", str(folder / "harness.o")]


def build_shim(
    folder: Path,
    csrc: Path = CSRC,
    flags: tuple[str, ...] = (),
    program: str | None = None,
    at_once: int | None = None,
) -> Path:
    """The source of the kernels, compiled by g++: a fiber for each thread (shim/cuda_runtime.h). With `program`, a
    source next to the harness, it builds an executable in place of a library.
    """
    shim, objcopy = HERE / "shim", tool("objcopy")
    options = [*HOST_FLAGS, "-O1", "-fno-trapping-math", *flags, f"-I{shim}", f"-I{csrc}", "-DFOCALKERN_TEST_GRID"]
    sources = [*kernels(csrc), shim / "machine.cpp", shim / (program or "harness.cpp")]
    run_all(
        (
            [compiler(), *options, "-x", "c++", "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
            for source in sources
        ),
        at_once,
    )
    for kernel in kernels(csrc):
        # Zeroed statics are the shared memory. They go into one section, which is filled with poison at the start of a
        # block.
        section = ["--set-section-flags", ".bss=alloc,load,data,contents", "--rename-section", ".bss=shim_shared"]
        subprocess.run([objcopy, *section, str(folder / f"{kernel.stem}.o")], check=True)
    return link(folder, flags, executable=program is not None)


def nvcc_command(source: Path, folder: Path, csrc: Path, code: str) -> list[str]:
    return [tool("nvcc"), *NVCC_FLAGS, f"-gencode={code}", f"-I{csrc}", "-c", str(source), "-o",
            str(folder / f"{source.stem}.o")]  # fmt: skip


def interpreter_commands(folder: Path, csrc: Path = CSRC, sass: bool = False) -> list[list[str]]:
    sources = ["ptx/runtime.cpp", *(["sass/sassrun.cpp", "sass/simulate.cpp"] if sass else [])]
    return [harness_command(folder, csrc)] + [
        [compiler(), *HOST_FLAGS, *EXACT, f"-I{HERE}", "-c", str(HERE / source), "-o",
         str(folder / f"{Path(source).stem}.o")]
        for source in sources
    ]  # fmt: skip


def build_ptx(folder: Path, arch: str = "90", csrc: Path = CSRC) -> Path:
    """The launchers as nvcc compiles them, and the PTX that it embeds in them, on ptxrun."""
    code = f"arch=compute_{arch},code=compute_{arch}"
    run_all([nvcc_command(k, folder, csrc, code) for k in kernels(csrc)] + interpreter_commands(folder, csrc))
    return link(folder)


def build_machine_code(folder: Path, arch: str = "90", csrc: Path = CSRC) -> tuple[Path, Path]:
    """As build_ptx, with machine code in addition to the PTX: the library, and the code as text for sassrun_load."""
    from tools.cuda.sass.extract import extract

    objdump, _ = tool("cuobjdump"), tool("nvdisasm")
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(tool("nvdisasm")).parent), os.environ["PATH"]])}
    code = f"arch=compute_{arch},code=[compute_{arch},sm_{arch}]"
    run_all(
        [nvcc_command(k, folder, csrc, code) for k in kernels(csrc)] + interpreter_commands(folder, csrc, sass=True)
    )

    def dump(kernel: Path) -> None:
        target = folder / f"{kernel.stem}.o"
        with (folder / f"{kernel.stem}.sass").open("w") as file:
            subprocess.run([objdump, "-sass", str(target)], stdout=file, env=environment, check=True)
        cubins = folder / f"{kernel.stem}.cubins"
        cubins.mkdir(exist_ok=True)
        subprocess.run(
            [objdump, "-xelf", "all", str(target)], cwd=cubins, env=environment, check=True, stdout=subprocess.DEVNULL
        )

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(dump, sorted(kernels(csrc), key=lambda kernel: -(folder / f"{kernel.stem}.o").stat().st_size)))
    extract(folder, folder / "code.txt")
    return link(folder), folder / "code.txt"


def build(folder: Path, kind: str) -> tuple[Path, Path | None]:
    """The library for the architecture of PTX or for a name in MACHINE_CODE, and the code that it runs."""
    if kind in MACHINE_CODE:
        return build_machine_code(folder, MACHINE_CODE[kind])
    return build_ptx(folder, kind), None


def load(path: Path) -> ctypes.CDLL:
    """The library, with blocks that take several tiles each."""
    library = ctypes.CDLL(str(path))
    library.guarded.restype = c_void_p
    for name in ("focal_loss_workspace", "calibration_grid_workspace", "size_of"):
        getattr(library, name).restype = c_int64
    for name in ("max_grid", "many_pixels", "rows_of_a_tile", "chunk_of_a_row"):
        getattr(library, name).restype = c_int64
    if hasattr(library, "ptxrun_error_count"):
        library.ptxrun_error_count.restype = c_int64
        library.ptxrun_error.restype = c_char_p
        assert library.ptxrun_parse_all() == 0
    if hasattr(library, "sassrun_simulate"):
        library.sassrun_simulate.restype = c_double
    library.set_seed(c_int64(20260121))
    library.set_max_grid(c_int64(3))
    return library
