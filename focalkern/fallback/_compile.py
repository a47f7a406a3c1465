"""Compiles definitions of losses by torch.compile, on devices without kernels.

A definition in eager torch reads and writes its logits some twenty times. ``compilable`` adds a compiled form, one per
dtype and options, with sizes and gamma as variables. Compiled graphs, transforms, tensor subclasses, small batches and
second derivatives, which torch.compile does not support, use the definition itself.
"""

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from focalkern._types import PLAIN_TENSORS

__all__ = ["compilable", "compile_on", "compiles_on"]

Definition = Callable[..., Tensor]

# Least number of logits: for fewer, checking the guards of the compiled form costs more than it saves.
_LEAST = 2**16
_BACKEND = "inductor"
_devices: frozenset[str] = frozenset()
_forms: dict[Any, Definition] = {}  # by definition, dtypes and options


def compile_on(devices: Iterable[str]) -> None:
    """Uses the compiled forms on these device types from now on."""
    global _devices
    _devices = frozenset(devices)


def compiles_on(device_type: str) -> bool:
    return device_type in _devices


def compilable(*numbers: str) -> Callable[[Definition], Definition]:
    """A decorator for a definition whose first tensor is the logits. Floats with the names ``numbers`` become tensors,
    so that a new value causes no recompilation. All other arguments that are not tensors are constants of the compiled
    code."""

    def decorate(definition: Definition) -> Definition:
        places = [list(inspect.signature(definition).parameters).index(name) for name in numbers]

        @functools.wraps(definition)
        def choose(*arguments: Any) -> Tensor:
            if not _devices or not _may_compile(arguments):
                return definition(*arguments)
            values = list(arguments)
            for place in places:
                if isinstance(values[place], float | int):
                    values[place] = torch.tensor(values[place], dtype=torch.float64)
            key = (definition, *(_key(value) for value in values))
            if key not in _forms:
                _forms[key] = _form(definition, values, len(_forms))
            form = _forms[key]
            tensors = [value for value in values if isinstance(value, Tensor)]
            needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            try:
                if not needs_gradient:
                    with torch.no_grad():
                        return form(*tensors)
                result: Tensor = _Compiled.apply(form, _bound(definition, values), *tensors)  # type: ignore[no-untyped-call]
                return result
            except Exception as error:
                found = definition(*arguments)  # raises if the arguments are invalid
                _give_up(error)
                return found

        return choose

    return decorate


def _may_compile(arguments: tuple[Any, ...]) -> bool:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    logits = next(value for value in arguments if isinstance(value, Tensor))
    if logits.device.type not in _devices or logits.numel() < _LEAST:
        return False
    if torch.autograd.forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if logits.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return all(type(value) in PLAIN_TENSORS for value in arguments if isinstance(value, Tensor))


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.dim(), value.device.type
    return (type(value), value) if isinstance(value, bool | int | float | None) else id(value)


def _bound(definition: Definition, values: list[Any]) -> Definition:
    """The definition as a function of its tensor arguments alone."""
    is_tensor = [isinstance(value, Tensor) for value in values]
    constants = [None if here else value for here, value in zip(is_tensor, values, strict=True)]

    def bound(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        return definition(*(next(given) if here else value for here, value in zip(is_tensor, constants, strict=True)))

    return bound


def _form(definition: Definition, values: list[Any], number: int) -> Definition:
    """The form that torch.compile compiles at its first call. torch.compile recompiles one code object at most eight
    times, so each form gets a code object of its own."""
    bound = _bound(definition, values)
    assert isinstance(bound, types.FunctionType)
    code = bound.__code__.replace(co_name=f"{definition.__name__}_{number}")
    own = types.FunctionType(code, bound.__globals__, code.co_name, bound.__defaults__, bound.__closure__)
    compiled: Definition = torch.compile(own, dynamic=True, backend=_BACKEND)
    return compiled


class _Compiled(torch.autograd.Function):
    """A compiled form with its compiled gradient. With ``create_graph``, the definition computes the gradient."""

    @staticmethod
    def forward(ctx: Any, form: Definition, definition: Definition, *tensors: Tensor) -> Tensor:
        ctx.definition, ctx.needed = definition, ctx.needs_input_grad[2:]
        leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, ctx.needed, strict=True)]
        with torch.enable_grad():
            result = form(*leaves)
        ctx.save_for_backward(*tensors)
        ctx.graph = (result, leaves)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        again, (graph, ctx.graph) = torch.is_grad_enabled(), (ctx.graph, None)
        if again or graph is None:  # None after the first backward pass, which frees the graph
            tensors = ctx.saved_tensors
            if not again:
                tensors = [t.detach().requires_grad_(need) for t, need in zip(tensors, ctx.needed, strict=True)]
            with torch.enable_grad():
                graph = (ctx.definition(*tensors), tensors)
        result, leaves = graph
        wanted = [leaf for leaf, need in zip(leaves, ctx.needed, strict=True) if need]
        found = iter(torch.autograd.grad(result, wanted, upstream, create_graph=again, allow_unused=True))
        return None, None, *(next(found) if need else None for need in ctx.needed)


def _give_up(error: Exception) -> None:
    """Stops using compiled forms after torch.compile failed: no compiler, or no support for the device."""
    compile_on(())
    text = " ".join(str(error).split())[:200]
    warnings.warn(
        f"focalkern computes with uncompiled plain torch, because torch.compile failed: {type(error).__name__}: {text} "
        "(FOCALKERN_KERNELS=0 avoids torch.compile and this warning)",
        stacklevel=5,
    )
