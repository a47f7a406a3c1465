"""A linear layer that computes its logits for a chunk of rows at a time. :mod:`focalkern.ops.linear_focal_loss` and the
loss over a split vocabulary share it.

    for rows, z in head.chunks():        z [rows, C] = input[rows] W^T + bias, always in the same buffer
        ...                              the caller overwrites z with dL/dz
        head.accumulate(rows, z)         adds to the gradients of input, W and bias

The caller processes the buffer in blocks that stay in the cache (:func:`blocks`). For each block it computes the loss
and the gradient, and copies the gradient over the logits. Only one block's gradient exists in addition to the buffer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from focalkern._tracing import are_traced
from focalkern._types import HALVES, PLAIN_TENSORS

__all__ = ["Head", "blocks", "default_chunk_rows", "is_plain"]

_CHUNK_BYTES = 256 * 2**20
# Bytes of one block of logits: on the CPU it stays in the second-level cache, elsewhere it bounds the extra memory.
_BLOCK_BYTES = {"cpu": 2 * 2**20}
_OTHER_BLOCK_BYTES = 32 * 2**20
# Bytes of one piece of the float32 gradient of a half-precision weight: products of pieces are added in float32. On the
# CPU a piece stays in the cache; on other devices it is large enough to use the device fully. CUDA needs no pieces.
_PIECE_BYTES = {"cpu": 4 * 2**20}
_OTHER_PIECE_BYTES = 16 * 2**20
# The small probabilities of a large vocabulary underflow in float16, so gradients of logits are kept at this scale.
FLOAT16_SCALE = 32.0


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's values can be read without waiting for a device: on the CPU, no subclass, in no graph."""
    return tensor.device.type == "cpu" and type(tensor) in PLAIN_TENSORS and not are_traced()


def default_chunk_rows(rows: int, features: int, classes: int, item_size: int) -> int:
    """Rows per chunk. The logits of a chunk take as much memory as the larger of the input and half of the weight's
    gradient (summed in float32 for half types), and at most 256 MiB; all chunks have about the same size. With smaller
    chunks, reading and writing the gradient's sum would cost more than the products: at 512 features and 32000 classes,
    32 rows at a time take twice as long as 256."""
    half_of_sum = classes * features * max(4, item_size) // (2 * item_size)
    elements = min(max(rows * features, half_of_sum), _CHUNK_BYTES // item_size)
    largest = max(1, elements // max(1, classes))
    if largest >= rows:
        return max(1, rows)
    n_chunks = -(-rows // largest)
    chunk = -(-rows // n_chunks)
    return min(largest, -(-chunk // 16) * 16)


def blocks(z: Tensor) -> Iterator[slice]:
    """Runs of rows of a chunk that are processed together."""
    rows, classes = z.shape
    limit = _BLOCK_BYTES.get(z.device.type, _OTHER_BLOCK_BYTES)
    step = max(1, limit // max(1, classes * z.element_size()))
    if z.device.type == "cpu":
        step = max(step, min(rows, torch.get_num_threads()))
    for begin in range(0, rows, step):
        yield slice(begin, min(rows, begin + step))


def _slow_halves() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available():
        return HALVES
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return tuple(dtype for dtype in HALVES if not supported[dtype]())


# Half types without instructions of this processor. Found here, because torch.compile cannot trace the calls.
_SLOW_HALVES = _slow_halves()


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the matrix products: the dtype of the input, but float32 for half types on a processor without
    instructions for them, where half-precision products would take ten times as long."""
    return torch.float32 if device.type == "cpu" and dtype in _SLOW_HALVES else dtype


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """A product in the dtype of its factors. Autocast would cast the factors of a product without ``out``."""
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


@dataclass
class Head:
    """Products of rows [N, D] with a weight [C, D]. ``kept`` holds the indices of the rows that count, None for all."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype  # of the products
    chunk_rows: int
    needed: tuple[bool, bool, bool]  # gradients of input, weight and bias
    kept: Tensor | None = None
    scale: float = 1.0  # of the gradients of the logits; the gradients of input, weight and bias are divided by it

    rows: int = field(init=False)
    grad_input: Tensor | None = field(init=False, default=None)
    grad_weight: Tensor | None = field(init=False, default=None)
    grad_bias: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.rows = self.input.shape[0] if self.kept is None else len(self.kept)
        self._weight = self.weight.to(self.dtype)
        self._bias = None if self.bias is None else self.bias.to(self.dtype)
        accumulate = torch.float32 if self.dtype in HALVES else self.dtype
        if self.needed[0]:
            # Ignored rows are never written, so they need zeros.
            make = torch.empty_like if self.kept is None else torch.zeros_like
            self.grad_input = make(self.input, memory_format=torch.contiguous_format)
        if self.needed[1]:
            # The first chunk overwrites the memory; without any chunk it must be zero.
            make_weight = torch.empty if self.rows else torch.zeros
            self.grad_weight = make_weight(self.weight.shape, dtype=accumulate, device=self.weight.device)
        if self.needed[2]:
            self.grad_bias = torch.zeros(self.weight.shape[:1], dtype=accumulate, device=self.weight.device)

    def rows_of(self, rows: slice) -> slice | Tensor:
        """The rows of a chunk in the input, the target and all other tensors with N rows."""
        return rows if self.kept is None else self.kept[rows]

    def _input(self, rows: slice) -> Tensor:
        return self.input[self.rows_of(rows)].to(self.dtype)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        classes = self.weight.shape[0]
        size = min(self.chunk_rows, max(1, self.rows))
        buffer = torch.empty((size, classes), dtype=self.dtype, device=self.input.device)
        for begin in range(0, self.rows, size):
            rows = slice(begin, min(self.rows, begin + size))
            z = buffer[: rows.stop - rows.start]
            if self._bias is None:
                torch.mm(self._input(rows), self._weight.t(), out=z)
            else:
                torch.addmm(self._bias, self._input(rows), self._weight.t(), out=z)
            yield rows, z

    def accumulate(self, rows: slice, grad: Tensor) -> None:
        """Adds the contribution of a chunk's logit gradient to the gradients of input, weight and bias."""
        if self.grad_input is not None:
            same = self.kept is None and self.grad_input.dtype == self.dtype and self.scale == 1
            if same:
                torch.mm(grad, self._weight, out=self.grad_input[rows])
            else:
                product = _mm(grad, self._weight)
                if self.scale != 1:
                    product.div_(self.scale)
                self.grad_input[self.rows_of(rows)] = product.to(self.grad_input.dtype)
        if self.grad_weight is not None:
            if self.grad_weight.dtype == self.dtype:
                beta = 1 if rows.start else 0
                self.grad_weight.addmm_(grad.t(), self._input(rows), beta=beta)
            else:
                self._accumulate_half(rows, grad)
        if self.grad_bias is not None:
            self.grad_bias.add_(grad.sum(0, dtype=self.grad_bias.dtype))

    def _accumulate_half(self, rows: slice, grad: Tensor) -> None:
        """Products of half-precision factors, added in float32."""
        assert self.grad_weight is not None
        x = self._input(rows)
        if grad.is_cuda:  # one product that adds in float32
            beta = 1 if rows.start else 0
            torch.addmm(self.grad_weight, grad.t(), x, out_dtype=torch.float32, beta=beta, out=self.grad_weight)
            return
        limit = _PIECE_BYTES.get(grad.device.type, _OTHER_PIECE_BYTES)
        step = max(1, limit // max(1, x.shape[1] * self.grad_weight.element_size()))
        for begin in range(0, grad.shape[1], step):
            piece = slice(begin, begin + step)
            product = _mm(grad[:, piece].t(), x)
            if rows.start:
                self.grad_weight[piece].add_(product)
            else:
                self.grad_weight[piece].copy_(product)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients: of the input in its dtype, of weight and bias in the dtype of their sums."""
        if self.scale != 1:
            for total in (self.grad_weight, self.grad_bias):
                if total is not None:
                    total.div_(self.scale)
        return self.grad_input, self.grad_weight, self.grad_bias
