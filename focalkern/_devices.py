"""Properties of devices: float64, autocast, threads, and numbers that stay on the host."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from focalkern._types import HALVES

__all__ = [
    "as_parameter",
    "autocast_is_on",
    "cpu_by_default",
    "float32_loss",
    "has_float64",
    "is_host_number",
    "on_device",
    "one_thread",
    "where_float64",
    "without_autocast",
]

# Types of devices without float64, and of those without autocast, for which torch.is_autocast_enabled would raise.
_WITHOUT_FLOAT64 = {"mps"}
_WITHOUT_AUTOCAST = {"meta", "fpga", "vulkan", "ve", "lazy"}
_CHANGING_THREADS = threading.Lock()


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64. (Some of Intel's GPUs do not.)"""
    if device.type == "xpu":
        return bool(getattr(torch.xpu.get_device_properties(device), "has_fp64", True))
    return device.type not in _WITHOUT_FLOAT64


def where_float64(tensor: Tensor) -> Tensor:
    """The tensor, or its copy on the CPU where its device has no float64."""
    return tensor if tensor.is_cpu or has_float64(tensor.device) else tensor.cpu()


def on_device(parameter: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; a float64 tensor becomes float32 if the device does not support float64."""
    narrows = parameter.dtype == torch.float64 and not has_float64(device)
    return parameter.to(device, torch.float32 if narrows else parameter.dtype)


def is_host_number(parameter: Tensor) -> bool:
    """Whether torch accepts the parameter as a number together with tensors of any device."""
    return parameter.dim() == 0 and parameter.device.type == "cpu"


def as_parameter(parameter: Tensor, like: Tensor) -> Tensor:
    """The parameter in the dtype and on the device of ``like``. A host number stays there: copying it would
    synchronise the device."""
    return parameter.to(like.dtype) if is_host_number(parameter) else parameter.to(like)


def autocast_is_on(device_type: str) -> bool:
    """Whether torch.autocast is on for this type of device."""
    return device_type not in _WITHOUT_AUTOCAST and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Matrix products keep the dtype of their factors. Without autocast it does nothing, also in exported graphs."""
    return torch.autocast(device_type, enabled=False) if autocast_is_on(device_type) else contextlib.nullcontext()


@contextlib.contextmanager
def float32_loss(z: Tensor) -> Iterator[None]:
    """Autocast for half-precision logits, so that the sum behind a mean is float32."""
    if z.dtype in HALVES and not autocast_is_on(z.device.type):
        with torch.autocast(z.device.type, dtype=z.dtype):
            yield
    else:
        yield


@contextlib.contextmanager
def cpu_by_default() -> Iterator[None]:
    """New tensors are on the CPU where no device is named, whatever torch's default device is."""
    with contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes in one thread: for work that is too small for several, which would wait for each other on a busy
    machine. Other threads keep their number."""
    with _CHANGING_THREADS:
        before = torch.get_num_threads()
        if before > 1:
            torch.set_num_threads(1)
            if threading.active_count() > 1:
                # torch also sets the number that new threads take. A thread that ends puts it back.
                restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
                restoring.start()
                restoring.join()
    try:
        yield
    finally:
        if before > 1:
            torch.set_num_threads(before)
