"""Imports the compiled module, or says what is wrong with it and which command mends that."""

import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["_C", "build_info", "has_kernels", "kernels_for"]

_PACKAGE = Path(__file__).resolve().parents[1]


def _rebuild() -> str:
    # In a source tree the module lies beside the sources and would shadow an installed one.
    if (_PACKAGE.parent / "setup.py").is_file():
        return f"To build it, run in {_PACKAGE.parent}: python setup.py build_ext --inplace"
    return "To build it, run in the source folder of focalkern: pip install --no-build-isolation ."


def _check(built_for: ModuleType) -> None:
    """Compares torch with the one of the build, because the loader's own error would be an undefined symbol."""
    here = str(torch.__version__)
    if here.split(".")[:2] != built_for.TORCH.split(".")[:2]:
        raise ImportError(
            f"focalkern was built for torch {built_for.TORCH}, but torch {here} is imported. {_rebuild()}"
        )
    if built_for.CUDA is not None and torch.version.cuda != built_for.CUDA:
        found = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise ImportError(
            f"focalkern was built for CUDA {built_for.CUDA}, but torch {here} was built {found}. {_rebuild()}"
        )


def _load() -> tuple[ModuleType, ModuleType]:
    another_copy = (
        "focalkern cannot be loaded: another copy of it is loaded in this process. Start a new one; if both copies are "
        "found there too, remove the installed one: pip uninstall focalkern"
    )
    # Looked for in this folder, because the finder of an editable installation would also find those of another copy.
    if not (_PACKAGE / "_build_info.py").is_file():
        raise ImportError(f"focalkern's compiled module has not been built in {_PACKAGE}. {_rebuild()}")
    built_for = importlib.import_module("focalkern._build_info")
    _check(built_for)
    if not any((_PACKAGE / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        raise ImportError(f"focalkern has no compiled module for {python} in {_PACKAGE}. {_rebuild()}")
    try:
        module = importlib.import_module("focalkern._C")
    except ImportError as error:
        if "single TORCH_LIBRARY" in str(error):
            raise ImportError(another_copy) from error
        raise ImportError(
            f"focalkern's compiled module does not fit torch {torch.__version__}: {error}. {_rebuild()}"
        ) from error
    # pybind11 hands out a module that was once loaded under this name, whatever file is asked for.
    if Path(str(module.__file__)).resolve().parent != _PACKAGE:
        raise ImportError(another_copy)
    return built_for, module


_built_for, _module = _load()
_C: Any = _module


def build_info() -> dict[str, Any]:
    """What the compiled module was built with, and what it brought.

    Returns:
        ``torch`` (str), ``cuda`` (str, or None without CUDA kernels), ``arch_list`` (the GPU architectures, as in
        TORCH_CUDA_ARCH_LIST), ``cpu_kernels`` and ``cuda_kernels`` (the names under which torch's dispatcher has
        kernels of this module).
    """
    kernels = {
        f"{key.lower()}_kernels": sorted(
            name.removeprefix("focalkern::")
            for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
            if name.startswith("focalkern::")
        )
        for key in ("CPU", "CUDA")
    }
    return {"torch": _built_for.TORCH, "cuda": _built_for.CUDA, "arch_list": _built_for.ARCH_LIST, **kernels}


def kernels_for(tensor: torch.Tensor) -> Any:
    """The module whose functions compute on this tensor's device."""
    return _C


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether the compiled module computes on this tensor's device."""
    return True
