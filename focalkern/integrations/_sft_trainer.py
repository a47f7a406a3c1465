"""TRL's ``SFTTrainer`` with the focal loss. TRL takes log-probabilities from an output head of its own."""

import contextlib
from typing import Any

import torch

from focalkern.losses import FocalLoss


def use_in_sft_trainer(trainer: Any, loss: FocalLoss, linear: bool) -> contextlib.ExitStack:
    """Makes TRL's trainer sum the focal losses of its log-probabilities, in place of the log-probabilities."""
    op, args = "use_focal_loss", trainer.args
    loss_type = getattr(args, "loss_type", None)
    if loss_type != "nll" or trainer.compute_loss_func or args.label_smoothing_factor:
        raise ValueError(
            f"{op}: a trainer must be TRL's SFTTrainer with loss_type='nll', without compute_loss_func and "
            f"label_smoothing_factor, got {type(trainer).__name__} with loss_type {loss_type!r}; for the "
            "Trainer of transformers pass its model"
        )
    if linear or loss.label_smoothing:
        raise ValueError(
            f"{op}: an SFTTrainer takes neither linear=True, because TRL fuses the head itself, nor label_smoothing, "
            "because TRL returns only the log-probability of the target; leave them out"
        )
    own = trainer.compute_loss

    def focal(_model: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not kwargs.get("fused_lm_head"):
            raise ValueError(f"{op}: this version of TRL uses the loss of the model; pass the model, not the trainer")
        # As the first of two classes. The bound keeps the derivative of log(1 - p) finite where p rounds to 1.
        log_p = output.log_probs.float().clamp(max=-(2.0**-24))
        logits = torch.stack([log_p, torch.log(-torch.expm1(log_p))], -1)
        target = torch.where(output.label_mask, 0, -100)
        output["log_probs"] = -loss(logits.flatten(0, -2), target.flatten()).view_as(log_p)
        return output

    def compute_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
        hook = model.register_forward_hook(focal, with_kwargs=True)
        try:
            return own(model, *args, **kwargs)
        finally:
            hook.remove()

    trainer.compute_loss = compute_loss
    undo = contextlib.ExitStack()
    undo.callback(delattr, trainer, "compute_loss")
    return undo
