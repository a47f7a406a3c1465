"""The focal loss in place of a transformers model's own, also fused with its output head."""

import contextlib
import warnings
from typing import Any

import torch
from torch import Tensor

from focalkern._devices import float32_loss
from focalkern.gamma import GammaTable
from focalkern.integrations import _own_loss
from focalkern.losses import FocalLoss, SigmoidFocalLoss
from focalkern.ops.linear_focal_loss import linear_focal_loss

OP = "use_focal_loss"
# Settings by which some models change the logits after their head, and the value that changes nothing. With
# linear=True they would change the features.
_AFTER_THE_HEAD = {
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "output_logit_soft_cap": None,
    "logit_scale": 1,
    "logits_scaling": 1,
    "output_multiplier": 1,
    "lm_head_multiplier": 1,
    "z_loss_coefficient": 0,
}


class FocalLossOfModel:
    """Its methods are the hooks, not closures, so that a deep copy of the model has the loss of its own head."""

    def __init__(self, model: Any, kind: str, gamma: float | GammaTable, options: dict[str, Any]) -> None:
        self.model, self.kind, self.gamma, self.options = model, kind, gamma, options
        self.loss = FocalLoss(gamma, reduction="sum", **options)
        self.features: FeaturesInTraining | None = None
        self.shift: bool | None = None  # of a model that computes its own loss, once known
        self.warned = False
        self.n_items: Any = None  # num_items_in_batch of the current forward pass
        self.before: Any = None  # the loss function that this one replaces
        self.ended = False

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """In place of ``model.loss_function``: logits and labels by keyword, or by position and type."""
        names = ("labels", "logits") if self.kind in _own_loss.ROW else ("logits", "labels")
        given = dict(zip(names, args, strict=False)) | kwargs
        logits = given["pooled_logits"] if given.get("pooled_logits") is not None else given["logits"]
        labels: Any = given.get("labels")
        shifted: Any = given.get("shift_labels")
        if self.kind in _own_loss.NEXT_TOKEN:
            if shifted is None:
                _own_loss.remember_shift(self.model, True)
                shifted = _own_loss.next_tokens(labels)
            elif labels is None or shifted is labels:
                _own_loss.remember_shift(self.model, False)
            labels = shifted
        self._check_labels(labels)
        n_items, self.n_items = self.n_items, None
        return self.mean(logits, labels, given.get("num_items_in_batch", n_items))

    def mean(self, logits: Tensor, labels: Tensor, n_items: Any) -> Tensor:
        labels = labels.to(logits.device)
        features = self.features if self.features is not None and self.features.active else None
        if features is not None:
            features.check(logits)
        rows = logits.reshape(-1, logits.shape[-1])
        with float32_loss(rows):  # as the model's own loss; the sum of many tokens exceeds float16
            if labels.is_floating_point():
                total = SigmoidFocalLoss(float(self.gamma), None, reduction="sum")(logits, labels)  # type: ignore[arg-type]
            elif features is not None:
                head = features.head
                total = linear_focal_loss(
                    rows,
                    head.weight,
                    labels.reshape(-1),
                    self.gamma,
                    linear_bias=head.bias,
                    reduction="sum",
                    **self.options,
                )
            else:
                total = self.loss(rows, labels.reshape(-1))
        if n_items is None:
            n_items = (labels != -100).sum()
        elif isinstance(n_items, Tensor):
            n_items = n_items.to(total.device)
        mean: Tensor = total / n_items
        return mean

    def replace(self, whole: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook of a model that computes its own loss: replaces the loss of the output."""
        labels = _own_loss.argument(whole, args, kwargs, "labels")
        if labels is None:
            return output
        self._check_labels(labels)
        own, logits = _own_loss.loss_and_logits(output)
        if own is None or logits is None:
            raise ValueError(
                f"{OP}: the output of {type(self.model).__name__} must have a loss and logits, got "
                f"{type(output).__name__}; use focal_loss in a training loop of your own"
            )
        n_items = kwargs.get("num_items_in_batch")
        if self.shift is None:
            shift = _own_loss.shift_of_own_loss(self.model, logits, labels, own, n_items)
            if shift is None:
                raise ValueError(
                    f"{OP}: {type(self.model).__name__} computes a loss of its own, {float(own.detach()):.6g}, which "
                    "is no cross-entropy of its logits and labels, shifted or not; use focal_loss in a training loop "
                    "of your own"
                )
            self.shift = _own_loss.known_shift(self.model)
        else:
            shift = self.shift
        loss = self.mean(logits, _own_loss.next_tokens(labels) if shift else labels, n_items)
        if isinstance(output, tuple):
            return (loss, *output[1:])
        output["loss"] = loss
        return output

    def refuse_losses_outside(self, whole: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: a trainer that computes the loss outside of the model would ignore this one."""
        # Some models (LlamaForSequenceClassification) do not pass it on to their loss.
        self.n_items = kwargs.get("num_items_in_batch")
        if kwargs.get("fused_lm_head"):
            raise ValueError(
                f"{OP}: TRL's trainers do not use the loss of the model; pass the trainer in place of the model: "
                f"{OP}(trainer, ...)"
            )
        if kwargs.get("shift_labels") is not None or _own_loss.argument(whole, args, kwargs, "labels") is not None:
            return
        if kwargs.get("num_items_in_batch") is not None:
            raise ValueError(
                f"{OP}: Trainer computes the loss outside of the model, without the focal loss, because of "
                "label_smoothing_factor or compute_loss_func; leave both out, and pass label_smoothing to "
                f"{OP} instead"
            )
        trains = whole.training and torch.is_grad_enabled()
        if trains and not self.warned and not _own_loss.takes_number_of_items(self.model):
            self.warned = True
            warnings.warn(
                f"{OP}: the model got no labels in training mode, so that the focal loss is not used; with Trainer, "
                f"leave out label_smoothing_factor and compute_loss_func, and pass label_smoothing to {OP} instead",
                stacklevel=2,
            )

    def _check_labels(self, labels: Tensor) -> None:
        if self.kind not in _own_loss.ROW:
            return
        config = self.model.config
        several = labels.is_floating_point()
        if config.problem_type == "regression" or config.num_labels == 1:
            raise ValueError(
                f"{OP}: labels must be classes, got regression: config.num_labels {config.num_labels} and "
                f"problem_type {config.problem_type!r}"
            )
        if several and config.problem_type not in (None, "multi_label_classification"):
            raise ValueError(f"{OP}: labels must be classes, got numbers for problem_type {config.problem_type!r}")
        if several and (isinstance(self.gamma, GammaTable) or any(self.options.values())):
            raise ValueError(
                f"{OP}: several labels per row take a number gamma, and none of label_smoothing, detach_modulation "
                "and modulation"
            )


class FeaturesInTraining:
    """Makes the output head of a model return its input while ``whole``, which is the model or PEFT's wrapper of it, is
    called in training mode with labels.
    """

    def __init__(self, model: Any, whole: Any, kind: str, undo: contextlib.ExitStack) -> None:
        configs = (model.config, model.config.get_text_config(), model.config.get_text_config(decoder=True))
        for config in configs:
            for name, neutral in _AFTER_THE_HEAD.items():
                if getattr(config, name, None) not in (None, neutral):
                    raise ValueError(
                        f"{OP}: linear=True needs the logits of the head as they are, but config.{name} "
                        f"is {getattr(config, name)}; use linear_focal_loss on model.model(...).last_hidden_state"
                    )
        self.head = model.get_output_embeddings()
        if kind not in (*_own_loss.NEXT_TOKEN, "ForMaskedLM"):
            raise ValueError(f"{OP}: linear=True is for language models, got {type(model).__name__}; leave out linear")
        if not isinstance(self.head, torch.nn.Linear):
            found = type(self.head)
            raise ValueError(
                f"{OP}: linear=True needs an nn.Linear as output head, got {found.__module__}.{found.__name__}; "
                "leave out linear, or leave the head out of PEFT's target_modules and modules_to_save"
            )
        self.active = self.checked = False
        self.returned: Tensor | None = None
        undo.callback(whole.register_forward_pre_hook(self.before, with_kwargs=True).remove)
        undo.callback(whole.register_forward_hook(self.after, always_call=True).remove)

    def before(self, whole: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if whole.training and _own_loss.argument(whole, args, kwargs, "labels") is not None:
            self.active = True
            self.head.forward = self.keep

    def keep(self, features: Tensor) -> Tensor:
        self.returned = features
        return features

    def check(self, logits: Tensor) -> None:
        """The model must pass the output of its head to the loss as it is, or in another dtype."""
        returned = self.returned
        if logits is returned or self.checked:
            return
        same = False
        if returned is not None and logits.shape[-1] == returned.shape[-1]:
            same = logits.untyped_storage().data_ptr() == returned.untyped_storage().data_ptr()  # a slice of the tokens
            same = same or (logits.shape == returned.shape and torch.equal(logits, returned.to(logits.dtype)))
        if not same:
            raise ValueError(
                f"{OP}: linear=True needs the logits of the head as they are, but the model changes them after its "
                "head; leave out linear, or use linear_focal_loss on the features of the model"
            )
        self.checked = True

    def after(self, *_: Any) -> None:
        if self.active:
            self.active, self.returned = False, None
            del self.head.forward
