"""Operators of the stable module: their registration with torch, and their derivatives."""

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
    "gradients",
    "is_dense",
    "is_transformed",
    "needs_composite",
    "needs_dispatcher",
    "parameter",
    "reduced",
    "register",
]


class Operator(NamedTuple):
    """An operator of the library "focalkern". Its arguments are ``inputs``, then ``options``, as in its schema."""

    name: str  # registered as {name}_forward and {name}_backward
    inputs: Callable[..., Any]  # makes the named tuple of tensors; parameters of eager calls may be numbers
    options: Callable[..., Any]  # the named tuple of all other arguments
    wide: int  # index of the option that backward lacks; its schema has `needed` in this place
    check: Callable[[Any, Any], object]
    forward: Callable[[Any, Any], tuple[Tensor, ...]]  # checked arguments to result and saved numbers
    forward_shapes: Callable[[Any, Any], tuple[Tensor, ...]]
    check_backward: Callable[[Tensor, Any, Sequence[Tensor], Any, Sequence[bool]], object]
    backward: Callable[[Tensor, Any, Sequence[Tensor], Any, Sequence[bool]], Sequence[Tensor | None]]
    backward_shapes: Callable[[Any, Sequence[bool]], Sequence[Tensor | None]]
    differentiable: Callable[[Any, Any], Sequence[bool]]  # whether each of the first inputs has a derivative
    composite: Callable[..., Tensor]  # the definition in torch operations, for transforms and double backward
    n_saved: int = 1
    n_forward_only: int = 0  # the last options, which only forward takes
    returns_all: bool = False  # whether `apply` returns everything of forward, not the result alone


def apply(operator: Operator, inputs: Any, options: Any) -> Any:
    """Calls the operator. Plain tensors bypass the dispatcher, which takes longer than a small batch."""
    input = inputs[0]
    if needs_composite(inputs):
        # Not through the dispatcher: vmap of torch 2.15 would run the operator once per element there.
        return operator.composite(*_tensors(inputs), *options[: len(options) - operator.n_forward_only])
    if needs_dispatcher(input):
        found = _registered(operator, "forward")(*_tensors(inputs), *options)
        return found[0] if operator.n_saved else found
    operator.check(inputs, options)
    if torch.is_grad_enabled():
        variables = inputs[: len(operator.differentiable(inputs, options))]
        return _Eager.apply(operator, inputs, options, *variables)  # type: ignore[no-untyped-call]
    found = operator.forward(inputs, options)
    return found if operator.returns_all else found[0]


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Operator, inputs: Any, options: Any, *_variables: Any) -> Any:
        found = operator.forward(inputs, options)
        saved = found[1 : 1 + operator.n_saved]
        are_tensors = [isinstance(value, Tensor) for value in inputs]
        ctx.save_for_backward(
            *[value if is_one else None for value, is_one in zip(inputs, are_tensors, strict=True)], *saved
        )
        numbers = [None if is_one else value for value, is_one in zip(inputs, are_tensors, strict=True)]
        ctx.call = operator, numbers, options
        ctx.set_materialize_grads(False)
        if not operator.returns_all:
            return found[0]
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_of_others: None) -> tuple[Any, ...]:
        operator, numbers, options = ctx.call
        kept = ctx.saved_tensors
        inputs = operator.inputs(*[n if t is None else t for t, n in zip(kept, numbers, strict=False)])
        asked = ctx.needs_input_grad[3:]
        if grad is None:
            return (None,) * (3 + len(asked))
        saved = kept[len(numbers) :]
        found = gradients(operator, grad, inputs, saved, options, asked, is_transformed(grad))
        return (None, None, None, *found)


def register(library: torch.library.Library, operator: Operator, keys: Sequence[str]) -> None:
    """Registers the implementations of an operator whose schema torch already has."""
    n, n_saved = len(operator.inputs._fields), operator.n_saved  # type: ignore[attr-defined]

    def checked(arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        inputs, options = operator.inputs(*arguments[:n]), operator.options(*arguments[n:])
        operator.check(inputs, options)
        return inputs, options

    def checked_backward(grad: Tensor, arguments: tuple[Any, ...]) -> tuple[Tensor, Any, Any, Any, list[bool]]:
        inputs, options = checked((*arguments[:n], *arguments[n + n_saved :]))
        saved, needed = arguments[n : n + n_saved], options[operator.wide]
        operator.check_backward(grad, inputs, saved, options, needed)
        return grad, inputs, saved, options, needed

    def outputs(found: tuple[Tensor, ...]) -> Any:
        return found if n_saved else found[0]

    def filled(gradients: Sequence[Tensor | None], input: Tensor) -> tuple[Tensor, ...]:
        return tuple(input.new_empty(0) if gradient is None else gradient for gradient in gradients)

    def forward(*arguments: Any) -> Any:
        return outputs(operator.forward(*checked(arguments)))

    def forward_shapes(*arguments: Any) -> Any:
        return outputs(operator.forward_shapes(*checked(arguments)))

    def backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        return filled(operator.backward(*checked_backward(grad, arguments)), arguments[0])

    def backward_shapes(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        _, inputs, _, _, needed = checked_backward(grad, arguments)
        return filled(operator.backward_shapes(inputs, needed), arguments[0])

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        saved = output[1:] if n_saved else ()
        ctx.save_for_backward(*inputs[:n], *saved)
        ctx.options = operator.options(*inputs[n:])
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)  # or a zero gradient of `saved` would be filled in for every backward pass

    def derivative(ctx: Any, grad: Tensor | None, *_of_saved: Tensor | None) -> tuple[Tensor | None, ...]:
        asked, kept = ctx.needs_input_grad, ctx.saved_tensors
        if grad is None:
            return (None,) * len(asked)
        found = gradients(operator, grad, operator.inputs(*kept[:n]), kept[n:], ctx.options, asked, True)
        return (*found, *(None,) * (len(asked) - len(found)))

    for key in keys:
        library.impl(f"{operator.name}_forward", forward, key)
        library.impl(f"{operator.name}_backward", backward, key)
    names = [f"focalkern::{operator.name}_{direction}" for direction in ("forward", "backward")]
    torch.library.register_fake(names[0], forward_shapes, lib=library)
    torch.library.register_fake(names[1], backward_shapes, lib=library)
    torch.library.register_autograd(names[0], derivative, setup_context=keep, lib=library)


def needs_dispatcher(input: Tensor) -> bool:
    """Whether the input is no plain tensor with memory, or a mode sees every operator."""
    return type(input) not in PLAIN_TENSORS or input.is_meta or torch._C._len_torch_dispatch_stack() > 0


def is_transformed(grad: Tensor) -> bool:
    """Whether a torch.func transform or a batched gradient needs the registered operator."""
    return torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(grad)


def gradients(
    operator: Operator,
    grad: Tensor,
    inputs: Any,
    saved: Sequence[Tensor],
    options: Any,
    asked: Sequence[bool],
    as_operator: bool,
) -> Sequence[Tensor | None]:
    """The gradients of the first inputs; None for inputs that need no gradient."""
    possible = operator.differentiable(inputs, options)
    needed = [one and other for one, other in zip(asked, possible, strict=False)]
    is_final = not torch.is_grad_enabled()
    if is_final and not as_operator:
        return operator.backward(grad, inputs, saved, options, needed)
    given = options[: len(options) - operator.n_forward_only]
    if not is_final:
        return _differentiable_gradients(operator, grad, _tensors(inputs), given, needed)
    given = (*given[: operator.wide], needed, *given[operator.wide + 1 :])
    found = _registered(operator, "backward")(grad, *_tensors(inputs), *saved, *given)
    return [gradient if need else None for gradient, need in zip(found, needed, strict=True)]


def _differentiable_gradients(
    operator: Operator, grad: Tensor, inputs: Sequence[Tensor | None], options: Sequence[Any], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Differentiable gradients.

    The definition gets aliases of the variables, so that a hook on the user's tensor fires once.
    """
    n = len(needed)
    aliases = [None if tensor is None else torch.ops.aten.alias(tensor) for tensor in inputs[:n]]
    result = operator.composite(*aliases, *inputs[n:], *options)
    wanted = [alias for alias, need in zip(aliases, needed, strict=True) if need and alias is not None]
    found = iter(
        torch.autograd.grad(
            result, wanted, grad.to(result.dtype), retain_graph=True, create_graph=True, allow_unused=True
        )
    )
    return [next(found) if need else None for need in needed]


def _registered(operator: Operator, direction: str) -> Any:
    return getattr(torch.ops.focalkern, f"{operator.name}_{direction}")


def _tensors(inputs: Sequence[Any]) -> list[Tensor | None]:
    """The inputs, with numbers converted to tensors."""
    wide = torch.float64
    return [
        v if v is None or isinstance(v, Tensor) else torch.scalar_tensor(v, dtype=wide, device="cpu") for v in inputs
    ]


def needs_composite(inputs: Sequence[object]) -> bool:
    """Whether a torch.func transform is active or a tensor has a forward-mode tangent, which kernels would drop."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in inputs)


# -- for the operators ------------------------------------------------------------------------------------------------


def parameter(
    value: float | Tensor | None, absent: float, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> tuple[Tensor | None, float]:
    """A parameter for kernels: a tensor in their dtype, expanded to ``shape``; or None and a number."""
    if value is None:
        return None, absent
    if not isinstance(value, Tensor):
        return None, value
    if is_host_number(value):
        return None, value.item()
    if shape is not None:
        value = value.expand(shape)
    return value.to(dtype), 0.0


def reduced(gradient: Tensor | None, value: float | Tensor | None) -> Tensor | None:
    """The gradient of a parameter, summed over the dimensions that were broadcast."""
    return gradient.sum_to_size(value.shape).to(value) if gradient is not None and isinstance(value, Tensor) else None


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements are contiguous in some order of dimensions."""
    return tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride()
