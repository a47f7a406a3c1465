"""Builds focalkern._C. Everything that is not compilation is declared in pyproject.toml.

It compiles for the installed torch. Environment: FOCALKERN_CUDA=auto|0|1 (auto builds the CUDA kernels if torch is a
CUDA build and nvcc is found; no GPU is needed), TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS. FOCALKERN_NATIVE=none
compiles nothing; then plain torch computes. FOCALKERN_NATIVE=folder uses the modules that tools/wheel.py compiled for
several releases of torch. FOCALKERN_REPOSITORY is the address for the links of the package's page
(tools/long_description.py).
"""

import os
import shutil
import sys
from glob import glob
from importlib.util import find_spec
from pathlib import Path

from setuptools import Command, Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.dist_info import dist_info

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tools.bindings import build_binding
from tools.compiler import Compiler, cuda_command, kernel_command, run, sources
from tools.long_description import long_description, version_of
from tools.stable import build_stable
from tools.toolchain import COMPILERS, fail, toolkit_folder, toolkit_version

DEFAULT_ARCH_LIST = "8.0;9.0+PTX"
INSTALL = "pip install --no-build-isolation ."
NO_TORCH = (
    "building needs the torch it will run with, and sees none: pip's build isolation hides an installed one. With "
    f"torch installed, run: {INSTALL}"
)
PLAIN = f"or, to compute with plain torch: FOCALKERN_NATIVE=none {INSTALL}"


def cuda_toolkit(torch_cuda: str | None, torch_hip: str | None) -> Path | None:
    """The toolkit to build the CUDA kernels with, or None for a build without them."""
    wanted = os.environ.get("FOCALKERN_CUDA") or "auto"
    if wanted not in ("auto", "0", "1"):
        fail(f"FOCALKERN_CUDA must be auto, 0 or 1, got {wanted!r}")
    if wanted == "0":
        return None
    toolkit = toolkit_folder()
    problem = None
    if torch_hip is not None:
        problem = (
            f"the installed torch is a ROCm build (HIP {torch_hip}), for which focalkern has no kernels; its GPUs "
            "compute with plain torch, its CPU with the compiled kernels"
        )
    elif torch_cuda is None:
        problem = "the installed torch is built without CUDA"
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
    bindings = sorted(glob("csrc/bindings/*.cpp"))
    try:
        import torch
    except ImportError:  # an sdist needs no torch; a build does
        return Extension("focalkern._C", bindings), BuildWithoutTorch

    toolkit = cuda_toolkit(torch.version.cuda, getattr(torch.version, "hip", None))
    arch_list, runtime = [], []
    if toolkit:
        arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCH_LIST).replace(" ", ";").split(";")
        runtime = [f"-L{path}" for path in (toolkit / "lib64", toolkit / "lib") if path.is_dir()] + ["-lcudart"]
        print(f"focalkern: building with CUDA kernels for {';'.join(arch_list)}, by {toolkit}")

    class BuildAndRecord(build_ext):
        """Compiles and links the modules, and writes focalkern/_build_info.py for the check before the import."""

        def run(self) -> None:
            compiler, target = Compiler(), Path(self.get_ext_fullpath("focalkern._C"))
            headers, release = Path(torch.__file__).parent / "include", str(torch.__version__)
            # The linker takes the needed objects of an archive, and can hide their symbols.
            kernels = Path(self.build_temp, "libfocalkern_kernels.a")
            for folder in (kernels.parent, target.parent):
                folder.mkdir(parents=True, exist_ok=True)
            kernels.unlink(missing_ok=True)
            objects = compiler.objects(sources("cpu/**/*.cpp"), kernel_command(), {}, "")
            if toolkit:
                objects += compiler.objects(sources("cuda/*.cu"), cuda_command(toolkit, arch_list), {}, "")
            run(["ar", "rcs", kernels, *objects])
            flags = [kernels, f"-Wl,--exclude-libs,{kernels.name}", *runtime]
            build_binding(compiler, target, headers, release, toolkit, *flags)
            build_stable(compiler, target.parent, headers, release, [kernels])
            if toolkit:
                build_stable(compiler, target.parent, headers, release, [kernels, *runtime], toolkit)
            target.with_name("_build_info.py").write_text(
                '"""The settings with which focalkern._C was built. Written by setup.py."""\n\n'
                f"TORCH = {release!r}\nCUDA: str | None = {torch.version.cuda if toolkit else None!r}\n"
                f"ARCH_LIST: list[str] = {arch_list!r}\n"
            )

    return Extension("focalkern._C", bindings), BuildAndRecord


class BuildWithoutTorch(build_ext):
    def run(self) -> None:
        fail(NO_TORCH)


class CheckedDistInfo(dist_info):
    """Checks the requirements in the first step of every installation from source, before pip collects dependencies."""

    def initialize_options(self) -> None:
        super().initialize_options()
        if not (find_spec("setuptools.command.bdist_wheel") or find_spec("wheel")):
            fail(f"building needs the package wheel: pip install wheel, then run: {INSTALL}")
        if native is None and find_spec("torch") is None:
            fail(NO_TORCH)
        compilers = [os.environ["CXX"].split()[0]] if os.environ.get("CXX") else COMPILERS
        if native is None and not any(map(shutil.which, compilers)):
            fail(f"building needs a C++ compiler ({' or '.join(compilers)}): install one, then run: {INSTALL}; {PLAIN}")


class PrebuiltFiles(build_py):
    """Adds the compiled files of tools/wheel.py to the package."""

    def run(self) -> None:
        super().run()
        for file in Path(str(native)).iterdir():
            shutil.copy(file, Path(self.build_lib, "focalkern", file.name))


class PlatformWheel(Distribution):
    def has_ext_modules(self) -> bool:
        return True


native = os.environ.get("FOCALKERN_NATIVE") or None
commands: dict[str, type[Command]] = {"dist_info": CheckedDistInfo}
texts = {
    "license": "MIT",
    "long_description": long_description(
        Path("README.md").read_text(encoding="utf-8"),
        os.environ.get("FOCALKERN_REPOSITORY", ""),
        version_of(Path("focalkern/_version.py").read_text(encoding="utf-8")),
    ),
    "long_description_content_type": "text/markdown",
}
if native == "none":
    setup(**texts, cmdclass=commands)
elif native:
    # Modules for one Python are stored beside the module for all of them (tools/stable.py).
    settings = {"bdist_wheel": {"py_limited_api": "cp311"}}
    setup(**texts, cmdclass=commands | {"build_py": PrebuiltFiles}, distclass=PlatformWheel, options=settings)
else:
    module, build_command = extension()
    setup(**texts, ext_modules=[module], cmdclass=commands | {"build_ext": build_command})
