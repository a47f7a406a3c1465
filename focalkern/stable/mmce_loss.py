"""MMCELoss on the kernels of the stable module: those of a row loss, and between them the error of the batch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from focalkern._devices import autocast_is_on
from focalkern._types import LABELS
from focalkern.fallback.mmce_loss import mmce_loss_composite
from focalkern.stable import row_loss
from focalkern.stable._autograd import gradients, is_transformed, needs_composite

__all__ = ["mmce_loss"]

_MEAN = 1
_kernels = torch.ops.focalkern_stable


class _Settings(NamedTuple):
    coefficient: float
    weighted: bool
    bandwidth: float
    reduction: int
    ignore_index: int


def mmce_loss(input: Tensor, target: Tensor, *settings: Any) -> Tensor | None:
    """As the compiled module's: None where torch's operations must compute the loss, which also report bad batches."""
    on_cpu = input.is_cpu and target.is_cpu and torch._C._len_torch_dispatch_stack() == 0
    dense = not input.is_nested and input.layout == torch.strided and input.dim() >= 1 and input.is_floating_point()
    if not on_cpu or not dense or target.dtype not in LABELS or needs_composite((input, target)):
        return None
    loss: Tensor = _Mmce.apply(input, target, _Settings(*settings))  # type: ignore[no-untyped-call]
    return loss if autocast_is_on("cpu") else loss.to(input.dtype)


class _Mmce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, target: Tensor, settings: _Settings) -> Tensor:
        coefficient, weighted, bandwidth, reduction, ignore_index = settings
        # Cross-entropy, whose saved numbers the error of the batch needs.
        arguments = row_loss.of_labels("MMCELoss", input, target, 0.0, reduction, ignore_index)
        row_loss.OPERATOR.check(*arguments)
        loss, saved = row_loss.OPERATOR.forward(*arguments)
        gamma = saved.new_empty(target.shape)
        options = (coefficient, weighted, bandwidth, reduction == _MEAN, ignore_index)
        _kernels.mmce_add_out(saved, target.contiguous(), gamma, loss, *options)
        ctx.save_for_backward(input, target, saved, gamma)
        ctx.settings = settings
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        input, target, saved, gamma = ctx.saved_tensors
        settings: _Settings = ctx.settings
        if torch.is_grad_enabled():  # the gradient is itself to be differentiated
            alias = torch.ops.aten.alias(input)
            result = mmce_loss_composite(alias, target, *settings)
            return torch.autograd.grad(result, alias, grad.to(result.dtype), create_graph=True)[0], None, None
        inputs, options = row_loss.of_labels(
            "MMCELoss", input, target, gamma, settings.reduction, settings.ignore_index
        )
        asked = (True, False, False)
        found = gradients(row_loss.OPERATOR, grad, inputs, (saved,), options, asked, is_transformed(grad))
        return found[0], None, None
