"""Who sees torch's operations beside the caller: compiled graphs, dispatch modes and torch.func."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor

from focalkern._types import PLAIN_TENSORS

__all__ = [
    "are_kept",
    "are_seen",
    "are_traced",
    "constant_in_graphs",
    "functionalizes",
    "has_values",
    "is_exporting",
    "is_fake",
    "is_readable",
    "needs_gradient",
    "values_of",
]

_Function = TypeVar("_Function", bound=Callable[..., object])
_key = torch._C._TorchDispatchModeKey
# The modes of selective activation checkpointing in the forward pass and in the recomputation. Their names are private.
_names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
_KEEPING: tuple[type, ...] = tuple(
    getattr(torch.utils.checkpoint, name) for name in _names if hasattr(torch.utils.checkpoint, name)
)


def constant_in_graphs(function: _Function) -> _Function:
    """Marks a function of constants: torch.compile runs it and keeps its result in the graph.

    Before each call a graph checks every global that was read for it, which takes a visible part of a small call, but
    not those that a marked function reads. torch.compiler.assume_constant_result does the same; importing it would load
    all of torch.compile."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def is_exporting() -> bool:
    """Whether torch.export records the operations. It records the forward pass of a torch.autograd.Function, but not
    its backward pass, so that its gradient would be missing."""
    # torch.compiler.is_exporting is always true in a compiled graph of torch 2.11.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def needs_gradient(tensor: Tensor | None) -> bool:
    """Whether the gradient of a tensor may be asked for. The caller of an exported graph may ask for any gradient."""
    return tensor is not None and (is_exporting() or (torch.is_grad_enabled() and tensor.requires_grad))


def are_seen() -> bool:
    """Whether a graph or a dispatch mode sees every operation. The result of a kernel that is called directly would be
    missing there, so an operator or torch operations compute it."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return torch._C._get_tracing_state() is not None  # torch.jit.trace


def are_traced() -> bool:
    """Whether a graph records the operations (torch.compile, make_fx), or fake tensors stand for all tensors."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in (_key.PROXY, _key.FAKE))


def are_kept() -> bool:
    """Whether results of operations are kept, in a graph or by selective activation checkpointing, which both forbid to
    overwrite them."""
    if are_traced():
        return True
    modes = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
    return any(isinstance(mode, _KEEPING) for mode in modes)


def functionalizes(op: str = "") -> bool:
    """Whether torch.func.functionalize is active, which has no rule for a torch.autograd.Function.

    Args:
        op: function with a custom operator for it, which other transforms of torch.func do not transform.

    Raises:
        NotImplementedError: ``op`` is given and another transform is active, too.
    """
    keys = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
    functionalize = torch._C._functorch.TransformType.Functionalize
    if functionalize not in keys:
        return False
    if op and any(key != functionalize for key in keys):
        raise NotImplementedError(
            f"{op}: torch.func.functionalize does not combine with grad, vmap and jvp here; leave functionalize out"
        )
    return True


def has_values(tensor: Tensor) -> bool:
    """Whether Python may read the tensor's values: not in a graph, under torch.func, on the meta device, or of a fake
    tensor."""
    return values_of(tensor) is not None and not torch._C._are_functorch_transforms_active()


def values_of(tensor: Tensor) -> Tensor | None:
    """The values of a tensor that Python may read, or None. Unlike ``has_values``, it takes a tensor from within
    torch.func's grad, jvp and vmap, and returns what they have wrapped: for vmap, all samples."""
    if are_traced():
        return None
    if torch._C._are_functorch_transforms_active():
        functorch = torch._C._functorch
        while functorch.is_batchedtensor(tensor) or functorch.is_gradtrackingtensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
        if functorch.is_functionaltensor(tensor):
            return None
    return None if tensor.is_meta or is_fake(tensor) else tensor


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor is a FakeTensor, which has a shape, a dtype and a device, but no memory."""
    return type(tensor) not in PLAIN_TENSORS and getattr(tensor, "fake_mode", None) is not None


def is_readable(tensor: Tensor) -> bool:
    """Whether Python may read the tensor's values without waiting for a device."""
    return tensor.device.type == "cpu" and has_values(tensor)
