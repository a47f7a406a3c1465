"""Layers of the Kernel Hub: modules without a constructor and without state."""

from typing import Any

import torch
from torch import Tensor, nn

from tools.hub_package._losses import focal_loss


class FocalForCausalLMLoss(nn.Module):
    """The focal loss of next-token prediction, with the arguments of transformers' ``ForCausalLMLoss``."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        gamma: float = 2.0,
        **kwargs: Any,
    ) -> Tensor:
        """-(1 - p)^gamma log p over the tokens whose label is not ``ignore_index``.

        Args:
            logits: [..., tokens, vocab_size], floating point. For half-precision logits the kernel computes and returns
                float32, without a float32 copy of the logits.
            labels: [..., tokens], int64, int32 or uint8. Each token predicts the next label.
            vocab_size: number of classes.
            num_items_in_batch: divisor of the sum over the tokens; without it, the number of tokens that count.
            ignore_index: label of the tokens that do not count.
            shift_labels: labels that are already shifted, in place of ``labels``.
            gamma: the focusing parameter; 0 is cross-entropy.
        """
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        target = shift_labels.reshape(-1).to(logits.device)
        rows = logits.reshape(-1, vocab_size)
        reduction = "mean" if num_items_in_batch is None else "sum"
        with torch.autocast(logits.device.type):  # so that half-precision logits give a float32 loss
            loss = focal_loss(rows, target, gamma, ignore_index=ignore_index, reduction=reduction)
        if num_items_in_batch is None:
            return loss
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss / num_items_in_batch
