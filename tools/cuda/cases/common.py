"""Guarded memory, and common parts of the ctypes structures of csrc/kernels."""

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from types import TracebackType

import pytest
import torch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]  # in the order of harness.cpp
NARROW = [torch.bfloat16, torch.float16]
LABELS = [torch.int64, torch.int32, torch.uint8]
NAN = float("nan")


def real_of(dtype: torch.dtype) -> torch.dtype:
    """The types that the kernels compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Memory:
    """Tensors copied to guarded memory, and back."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.held: list[tuple[int, int, int]] = []
        self.gaps: list[tuple[int, torch.Tensor]] = []

    def __enter__(self) -> "Memory":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        untouched = [self._gaps_are_untouched(address, like) for address, like in self.gaps]
        clean = [self.library.unguard(c_void_p(at), c_int64(size), c_int64(byte)) for at, size, byte in self.held]
        assert kind is not None or all(clean + untouched), "a kernel wrote beside its memory"

    def put(self, tensor: torch.Tensor | None) -> int | None:
        """The address of a copy with the same strides, on the same byte of a 16-byte vector as the original."""
        if tensor is None:
            return None
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        flat = tensor.as_strided((span if tensor.numel() else 0,), (1,))
        size = flat.numel() * flat.element_size()
        byte = tensor.data_ptr() % 16
        address = int(self.library.guarded(c_int64(size), c_int64(byte)))
        self.held.append((address, size, byte))
        if size:
            ctypes.memmove(address, flat.data_ptr(), size)
        return address

    def out(self, like: torch.Tensor) -> int:
        """The address of memory for a result. It is filled with NaN or with a value that no result has, and marked as
        unwritten."""
        address = self.put(like)
        assert address is not None
        if like.is_contiguous() and like.numel():
            self.library.mark_undefined(c_void_p(address), c_int64(like.numel() * like.element_size()))
        elif like.numel():
            self.gaps.append((address, like))
        return address

    @staticmethod
    def _gaps_are_untouched(address: int, like: torch.Tensor) -> bool:
        span = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 1
        memory = torch.empty(span, dtype=like.dtype)
        ctypes.memmove(memory.data_ptr(), address, span * like.element_size())
        memory.as_strided(like.shape, like.stride()).fill_(NAN)
        return bool(memory.isnan().all())

    def scratch(self, size: int) -> int:
        return self.out(torch.full((size,), 255, dtype=torch.uint8))

    @staticmethod
    def get(address: int, like: torch.Tensor) -> torch.Tensor:
        result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        if like.numel():
            span = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 1
            ctypes.memmove(result.data_ptr(), address, span * like.element_size())
        return result


def nan_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """NaN in the layout of a tensor, on the same byte of a vector."""
    dtype = dtype or tensor.dtype
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    skip = tensor.data_ptr() % 16 // tensor.element_size()
    memory = torch.full((max(span, 0) + skip,), NAN, dtype=dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), skip)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 1) -> None:
    from conftest import TOLERANCE  # cases compare only under pytest; instruction counts do not

    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.double(), expected.double().reshape(actual.shape), rtol=factor * rtol, atol=factor * atol, equal_nan=True
    )


class Layout(ctypes.Structure):
    _fields_ = [
        (name, c_int64) for name in ("inner", "outer_stride", "inner_stride", "class_stride", "lines", "image_gap")
    ]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":  # [N, C] or [N, C, d]
        if tensor.dim() == 2:
            return cls(max(1, len(tensor)), 0, tensor.stride(0), tensor.stride(1))
        return cls(tensor.shape[2], tensor.stride(0), tensor.stride(2), tensor.stride(1))


class Labels(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("type", c_int32)]


def structure(library: ctypes.CDLL, name: str, dtype: torch.dtype, fields: list[tuple[str, object]]) -> object:
    """An empty struct; "real" stands for the compute type. Its size is compared with that of the C++ struct."""
    if not library.has_dtype(DTYPES.index(dtype)):
        pytest.skip(f"built without {dtype}")
    real = c_double if dtype == torch.float64 else c_float
    members = [(field, real if kind == "real" else kind) for field, kind in fields]
    kind = type(name, (ctypes.Structure,), {"_fields_": members})
    assert ctypes.sizeof(kind) == library.size_of(name.encode(), int(dtype == torch.float64))
    return kind()
