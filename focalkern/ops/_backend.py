"""Chooses between the compiled module and plain torch, and reports the reason and the command that repairs it.

Operators use a compiled module that fits the installed torch, the Python and the device. For another torch
:mod:`focalkern.stable` has the same kernels behind torch's stable ABI. Otherwise :mod:`focalkern.fallback` computes the
same in plain torch; on GPUs torch.compile compiles its losses. The environment variable FOCALKERN_KERNELS chooses:
0 is plain torch, compile is plain torch with the losses compiled on every device, stable is the stable module, and
require makes the use of plain torch an error.
"""

import contextlib
import importlib
import os
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from focalkern._tracing import constant_in_graphs
from focalkern.reference._softmax_losses import take_numbers

__all__ = ["backend_for", "build_info"]

_PACKAGE = Path(__file__).resolve().parents[1]
_ANOTHER_COPY = (
    "focalkern cannot be loaded: another copy of it is loaded in this process. Start a new one; if both copies are "
    "found there too, remove the installed one: pip uninstall focalkern"
)


class _DoesNotFitError(Exception):
    """No compiled module fits this torch, Python or system; the message gives the reason and the remedy."""


class _OtherSourcesError(_DoesNotFitError):
    """The compiled module is loaded and has registered its operators, but was built from other sources."""


def _rebuild() -> str:
    # In a source tree the module is next to the sources and would shadow an installed one.
    if (_PACKAGE.parent / "setup.py").is_file():
        return f"To build a module that fits, run in {_PACKAGE.parent}: python setup.py build_ext --inplace"
    return "To build a module that fits, run in the source folder of focalkern: pip install --no-build-isolation ."


def rocm() -> str:
    """``for ROCm (HIP 6.2)`` if torch is a ROCm build (its GPUs are called cuda too), else an empty string."""
    hip = getattr(torch.version, "hip", None)
    return f"for ROCm (HIP {hip})" if hip else ""


def _setting() -> str:
    value = os.environ.get("FOCALKERN_KERNELS") or "auto"
    if value not in ("auto", "0", "compile", "require", "stable"):
        raise ImportError(f"FOCALKERN_KERNELS must be auto, 0, compile, require or stable, got {value!r}")
    return value


def _candidates(built_for: ModuleType) -> list[str]:
    """The modules for this torch, the best one first.

    The versions of torch and of the build are compared first, because the loader would report only an undefined symbol.
    """
    here = str(torch.__version__)
    if hasattr(built_for, "MODULES"):  # the wheel with a module for every supported torch
        minor = ".".join(here.split(".")[:2])
        if minor not in built_for.MODULES:
            there = ", ".join(built_for.MODULES)
            raise _DoesNotFitError(
                f"focalkern has modules for torch {there}, but torch {here} is imported. {_rebuild()}"
            )
        name = f"_C_{minor.replace('.', '_')}"
        return [f"{name}_cuda", name] if _same_cuda(built_for) else [name]
    if here.split(".")[:2] != built_for.TORCH.split(".")[:2]:
        raise _DoesNotFitError(
            f"focalkern was built for torch {built_for.TORCH}, but torch {here} is imported. {_rebuild()}"
        )
    if built_for.CUDA is not None and torch.version.cuda != built_for.CUDA:
        found = f"for CUDA {torch.version.cuda}" if torch.version.cuda else rocm() or "without CUDA"
        raise _DoesNotFitError(
            f"focalkern was built for CUDA {built_for.CUDA}, but torch {here} was built {found}. {_rebuild()}"
        )
    return ["_C"]


def _same_cuda(built_for: ModuleType) -> bool:
    """Whether the major releases of CUDA agree. The module contains its CUDA runtime, so minor releases may differ."""
    return str(torch.version.cuda).split(".")[0] == str(built_for.CUDA).split(".")[0] != "None"


def _built_for_module() -> ModuleType:
    # Search only this folder: the finder of an editable installation would also find the modules of another copy.
    if not (_PACKAGE / "_build_info.py").is_file():
        in_source = (_PACKAGE.parent / "setup.py").is_file()
        lacks = "'s compiled module has not been built" if in_source else " was installed without compiled modules"
        raise _DoesNotFitError(f"focalkern{lacks} in {_PACKAGE}. {_rebuild()}")
    return importlib.import_module("focalkern._build_info")


def _on_gpus(built_for: ModuleType, module: ModuleType, failed: str) -> str:
    """A sentence to append that says why GPUs have no kernels; empty if they have kernels or torch supports no GPUs."""
    if module.build_info()["cuda"] or not (torch.version.cuda or rocm()):
        return ""
    reason = "this build has no CUDA kernels"
    if failed:
        reason = f"the module with CUDA kernels cannot be loaded: {failed}"
    elif built_for.CUDA:
        found = rocm() or f"for CUDA {torch.version.cuda}"
        needed = str(built_for.CUDA).split(".")[0]
        reason = f"the CUDA kernels need a torch for CUDA {needed}, and torch {torch.__version__} was built {found}"
    return f". GPUs use plain torch: {reason}"


def _load() -> tuple[ModuleType, ModuleType, str]:
    built_for = _built_for_module()
    candidates = _candidates(built_for)
    names = [name for name in candidates if any((_PACKAGE / (name + end)).is_file() for end in EXTENSION_SUFFIXES)]
    if not names:
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        raise _DoesNotFitError(f"focalkern has no compiled module for {python} in {_PACKAGE}. {_rebuild()}")
    failed = ""
    for name in names:
        try:
            module = importlib.import_module(f"focalkern.{name}")
            break
        except ImportError as error:
            if "single TORCH_LIBRARY" in str(error):
                raise ImportError(_ANOTHER_COPY) from error
            if name == names[-1]:
                raise _DoesNotFitError(
                    f"focalkern's compiled module does not fit torch {torch.__version__}: {error}. {_rebuild()}"
                ) from error
            failed = str(error)
    # pybind11 returns a module that was loaded under this name before, whatever file is requested.
    if Path(str(module.__file__)).resolve().parent != _PACKAGE:
        raise ImportError(_ANOTHER_COPY)
    try:
        take_numbers(module.row_losses())
    except (AttributeError, ValueError) as error:
        raise _OtherSourcesError(
            f"focalkern's compiled module was built from other sources: {error}. {_rebuild()}"
        ) from error
    why = f"{Path(str(module.__file__)).name} was compiled for torch {module.build_info()['torch']}"
    return built_for, module, why + _on_gpus(built_for, module, failed)


def _load_stable() -> tuple[ModuleType, ModuleType, str]:
    """The kernels behind torch's stable ABI, for a torch release without its own module."""
    built_for = _built_for_module()
    names = ["_C_stable_cuda", "_C_stable"] if _same_cuda(built_for) else ["_C_stable"]
    paths = [path for path in (_PACKAGE / f"{name}.abi3.so" for name in names) if path.is_file()]
    if not paths:
        raise _DoesNotFitError(f"focalkern has no {names[-1]}.abi3.so in {_PACKAGE}. {_rebuild()}")
    if any(name.startswith("focalkern::") for name in torch._C._dispatch_get_all_op_names()):
        raise ImportError(_ANOTHER_COPY)  # a second definition of the operators would end the process
    failed = ""
    for path in paths:
        try:
            torch.ops.load_library(path)
            break
        except OSError as error:
            if path == paths[-1]:
                raise _DoesNotFitError(
                    f"focalkern's {path.name} does not fit torch {torch.__version__}: {error.__cause__ or error}. "
                    f"{_rebuild()}"
                ) from error
            failed = str(error.__cause__ or error)
    module = importlib.import_module("focalkern.stable")
    module.load(path)
    try:
        take_numbers(module.row_losses())
    except ValueError as error:
        raise ImportError(f"focalkern's {path.name} was built from other sources: {error}. {_rebuild()}") from error
    why = f"{path.name} has kernels for every torch from 2.11 on"
    return built_for, module, why + _on_gpus(built_for, module, failed)


def _choose() -> tuple[ModuleType | None, ModuleType | None, str, str]:
    """The build of the module, the module, its kind, and the reason for the choice."""
    plain = "plain torch"
    if _SETTING == "0":
        return None, None, plain, "FOCALKERN_KERNELS=0 asks for plain torch"
    if _SETTING == "compile":
        return None, None, plain, "FOCALKERN_KERNELS=compile asks for plain torch, compiled by torch.compile"
    try:
        if _SETTING == "stable":
            built_for, module, why = _load_stable()
            return built_for, module, "stable", why
        built_for, module, why = _load()
        return built_for, module, "compiled", why
    except _DoesNotFitError as problem:
        if _SETTING in ("auto", "require") and not isinstance(problem, _OtherSourcesError):
            with contextlib.suppress(_DoesNotFitError):
                built_for, module, why = _load_stable()
                return built_for, module, "stable", f"{why}. A module for one torch is faster: {problem}"
        if _SETTING != "auto":
            raise ImportError(str(problem)) from problem.__cause__
        return None, None, plain, str(problem)


_SETTING = _setting()
_built_for: Any
_module: Any
_built_for, _module, _kind, _why = _choose()
_CUDA: str | None = _built_for.CUDA if _built_for is not None and _module.build_info()["cuda"] else None
# The compiled module has kernels for these; on the meta device it computes shapes.
_DEVICES = () if _module is None else ("cpu", "cuda", "meta") if _CUDA else ("cpu", "meta")
_ON_CPU = "cpu" in _DEVICES
_warned = False
# Imported after the compiled module, which must be the first to define the operator library focalkern.
fallback = importlib.import_module("focalkern.fallback")
# torch.compile fuses the losses well on these devices. On a CPU its compiler takes seconds, so users must ask for it.
_GPUS = ("cuda", "xpu")
if _SETTING == "compile":
    fallback.compile_on((*_GPUS, "cpu", "mps"))
elif _SETTING != "0":
    fallback.compile_on(device for device in _GPUS if device not in _DEVICES)
_composites = fallback.register_composites() if _module is not None else None


def backend_for(tensor: Tensor) -> Any:
    """The module whose functions compute on this tensor's device: the compiled one, or :mod:`focalkern.fallback`.

    An operator calls ``backend_for(input).focal_loss(...)``; both modules have the same names, arguments and errors.
    Under torch.compile, an operator with kernels (``has_kernels``) is called through torch.ops instead; the functions
    of the fallback are traced directly.
    """
    return _module if has_kernels(tensor) else fallback


def has_kernels(tensor: Tensor) -> bool:
    """Whether the compiled module computes on this tensor's device."""
    # Reading tensor.device takes as long as all other checks of a call; is_cpu is cheaper.
    return (_ON_CPU and tensor.is_cpu) or tensor.device.type in _DEVICES or _say_why(tensor.device.type)


def module_or_fallback() -> Any:
    """The compiled module, else the fallback, for functions without a device."""
    return _module or fallback


@constant_in_graphs
def _say_why(device_type: str) -> Literal[False]:
    """Warns once with the reason for plain torch; raises if FOCALKERN_KERNELS=require."""
    global _warned
    if _module is None:
        reason = _why
    elif device_type == "cuda" and rocm():
        reason = f"torch was built {rocm()}, and focalkern has compiled kernels for CUDA and the CPU only"
    elif device_type == "cuda":
        reason = f"focalkern has no CUDA kernels for CUDA {torch.version.cuda}. {_rebuild()} (with FOCALKERN_CUDA=1)"
    else:
        reason = f"focalkern has no kernel for device {device_type}; move the tensors to the CPU to use those it has"
    if _SETTING == "require":
        raise NotImplementedError(f"FOCALKERN_KERNELS=require, but {reason}")
    if _SETTING not in ("0", "compile") and not _warned:
        _warned = True
        backend = "plain torch"
        if fallback.compiles_on(device_type):
            backend += " and compiles the losses by torch.compile"
        warnings.warn(
            f"focalkern computes with {backend}, which is slower: {reason} (FOCALKERN_KERNELS=0 silences this)",
            stacklevel=5,
        )
    return False


def build_info() -> dict[str, Any]:
    """Whether the compiled kernels are used, the reason, and the targets they were built for.

    Returns:
        A dict with the keys

        * ``kernels``: ``"compiled"``; ``"stable"`` if no module was compiled for this torch and the module behind
          torch's stable ABI is used; ``"plain torch"`` if no module fits or FOCALKERN_KERNELS=0;
        * ``why``: the reason, str;
        * ``torch``: the torch of the build, str; None without a compiled module;
        * ``cuda``: the CUDA release of the kernels, str; None without CUDA kernels;
        * ``arch_list``: the GPU architectures, as in TORCH_CUDA_ARCH_LIST;
        * ``cpu_kernels`` and ``cuda_kernels``: names of the operators for which torch's dispatcher has kernels;
        * ``devices``: for each type of device of this machine, what computes the losses: ``"kernels"``,
          ``"torch.compile"`` (plain torch, compiled) or ``"plain torch"``.

    Example:
        >>> info = fk.build_info()
        >>> info["kernels"] in ("compiled", "stable", "plain torch")
        True
        >>> sorted(info)
        ['arch_list', 'cpu_kernels', 'cuda', 'cuda_kernels', 'devices', 'kernels', 'torch', 'why']
    """
    kernels = {
        f"{key.lower()}_kernels": sorted(
            op.removeprefix("focalkern::")
            for op in torch._C._dispatch_get_registrations_for_dispatch_key(key)
            if op.startswith("focalkern::") and _module is not None
        )
        for key in ("CPU", "CUDA")
    }
    return {
        "kernels": _kind,
        "why": _why,
        "torch": None if _module is None else _module.build_info()["torch"],
        "cuda": _CUDA,
        "arch_list": _built_for.ARCH_LIST if _built_for and _CUDA else [],
        **kernels,
        "devices": {device: _code_of(device) for device in ("cpu", *_GPUS, "mps") if _is_here(device)},
    }


def _code_of(device_type: str) -> str:
    if fallback.compiles_on(device_type):
        return "torch.compile"
    return "kernels" if device_type in _DEVICES else "plain torch"


def _is_here(device_type: str) -> bool:
    return device_type == "cpu" or bool(torch.get_device_module(device_type).is_available())
