"""``focalkern info``: versions, and the kernels that are available on this machine."""

import argparse
import importlib.metadata
import os
import platform
from typing import Any

import torch

import focalkern
from focalkern._version import __version__
from focalkern.ops._backend import rocm

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="print versions, kernels and hardware",
        description="Prints versions, the targets of the compiled module, and the hardware of this machine. Reads no "
        "data and sends nothing.",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    built = dict(focalkern.build_info())
    cpu, cuda = built.pop("cpu_kernels", ()), built.pop("cuda_kernels", ())
    lines = {
        "focalkern": f"{__version__}  ({os.path.dirname(focalkern.__file__)})",
        "Python": f"{platform.python_version()}  ({platform.system()} {platform.machine()})",
        "torch": f"{torch.__version__}  ({_built_for(built.pop('torch'))})",
        "CUDA build": _cuda(built.pop("cuda"), built.pop("arch_list")),
        "GPU": _gpu(),
        "CPU": f"{torch.get_num_threads()} threads; torch sees {torch.backends.cpu.get_cpu_capability()}",
        "CPU kernels": _words(cpu),
        "CUDA kernels": _words(cuda),
        # The other entries of build_info.
        **{name.replace("_", " "): _words(value) for name, value in built.items()},
        "packages": ", ".join(
            _installed(name) for name in ("numpy", "tabulate", "tqdm", "matplotlib", "safetensors", "scikit-learn")
        ),
    }
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
    return 0


def _built_for(version: str | None) -> str:
    return f"focalkern was built for {version}" if version else "no compiled module of focalkern"


def _cuda(version: str | None, architectures: list[str]) -> str:
    if version is None and rocm():
        return f"none (torch was built {rocm()}: its GPUs compute with plain torch)"
    if version is None:
        return "none (set FOCALKERN_CUDA=1 while building to have one)"
    return f"for CUDA {version}, {', '.join(architectures) or 'no architecture named'}"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(dict.fromkeys(names))


def _words(value: object) -> str:
    if isinstance(value, dict):
        value = [f"{key}: {word}" for key, word in value.items()]
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _installed(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} missing"
