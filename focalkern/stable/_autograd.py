"""Shared by the operators of the stable module: parameters of kernels, and derivatives composed of plain torch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from focalkern._devices import is_host_number
from focalkern._types import PLAIN_TENSORS

__all__ = [
    "Operator",
    "apply",
    "backward_kernel",
    "differentiable_gradients",
    "is_dense",
    "needs_composite",
    "parameter",
]


class Operator(NamedTuple):
    """An operator of the library "focalkern" as torch registers it."""

    kernel: Callable[..., Any]  # on the CPU and on CUDA
    shapes: Callable[..., Any]  # of fake tensors
    keep: Callable[..., None] | None = None  # for the derivative
    derivative: Callable[..., tuple[Any, ...]] | None = None


def apply(name: str, forward: Operator, backward: Operator, input: Tensor, *arguments: Any) -> Any:
    """The operator of this name. Plain tensors go past torch's dispatcher, which takes longer than a small batch."""
    if type(input) not in PLAIN_TENSORS or input.is_meta or torch._C._len_torch_dispatch_stack() > 0:
        return getattr(torch.ops.focalkern, name)(input, *arguments)
    return _Eager.apply(input, *arguments, forward, backward)  # type: ignore[no-untyped-call]


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *given, forward, backward = arguments
        output = forward.kernel(*given)
        forward.keep(ctx, given, output)
        ctx.derivative, ctx.kernel = forward.derivative, backward.kernel
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return (*ctx.derivative(ctx, *grads), None, None)


def needs_composite(*tensors: object) -> bool:
    """Whether a torch.func transform is active or a tensor has a forward-mode tangent, which kernels would drop."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def parameter(
    value: Tensor | None, absent: float, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> tuple[Tensor | None, float]:
    """A parameter as kernels take it: a tensor in their type, expanded to ``shape``, or none and a number."""
    if value is None:
        return None, absent
    if is_host_number(value):
        return None, value.item()
    if shape is not None:
        value = value.expand(shape)
    return value.to(dtype), 0.0


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements are contiguous in some order of dimensions."""
    return tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride()


def backward_kernel(ctx: Any, name: str, grad: Tensor) -> Callable[..., Any]:
    """The kernel of the derivative; the operator of this name in compiled graphs and for batched upstream gradients."""
    is_batched = torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(grad)
    if is_batched or not hasattr(ctx, "kernel"):
        return getattr(torch.ops.focalkern, name)
    return ctx.kernel


def differentiable_gradients(
    variables: Sequence[Tensor | None], needed: Sequence[bool], grad: Tensor, composite: Callable[..., Tensor]
) -> list[Tensor | None]:
    """Gradients that are themselves to be differentiated: those of the variables that need one, else None.

    ``composite`` computes the result from aliases of the variables, so that a hook on the user's tensor fires once.
    """
    aliases = [None if tensor is None else torch.ops.aten.alias(tensor) for tensor in variables]
    result = composite(*aliases)
    wanted = [alias for alias, need in zip(aliases, needed, strict=True) if need and alias is not None]
    found = iter(
        torch.autograd.grad(
            result, wanted, grad.to(result.dtype), retain_graph=True, create_graph=True, allow_unused=True
        )
    )
    return [next(found) if need else None for need in needed]
