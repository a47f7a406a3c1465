"""Focal losses and calibration metrics in Hugging Face transformers."""

import contextlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from focalkern._checks import flag, integer
from focalkern._devices import float32_loss
from focalkern.calibrators import TemperatureScaling
from focalkern.gamma import GammaTable
from focalkern.losses import FocalLoss, SigmoidFocalLoss
from focalkern.metrics import expected_calibration_error, nll
from focalkern.ops._row_loss import Modulation
from focalkern.ops.linear_focal_loss import linear_focal_loss

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError("focalkern.integrations.transformers needs transformers: pip install transformers") from error

__all__ = ["CalibrationCallback", "use_focal_loss"]

_NEXT_TOKEN = ("ForCausalLM", "ForConditionalGeneration")
_TOKEN = ("ForMaskedLM", "ForTokenClassification")
_ROW = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)
# Settings by which some models change the logits after their head. With linear=True they would change the features.
_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def use_focal_loss(
    model: Any,
    gamma: float | GammaTable = 2.0,
    *,
    linear: bool = False,
    label_smoothing: float = 0.0,
    detach_modulation: bool = False,
    modulation: Modulation | None = None,
) -> contextlib.ExitStack:
    r"""Train a transformers model, or TRL's ``SFTTrainer``, with the focal loss: sets ``model.loss_function``.

    .. math:: L = -\frac{1}{n} \sum_i (1 - p_i)^\gamma \log p_i

    over the targets that are not -100; n is their number, or ``num_items_in_batch`` if ``Trainer`` passes it. Language
    models predict the next token, as with their own loss. For several labels per row
    (``config.problem_type="multi_label_classification"``) the loss is the sigmoid focal loss. Some models (BERT)
    compute their loss without ``loss_function``; then a forward hook replaces ``outputs.loss``.

    A model of PEFT is taken too: wrap it with PEFT first, then pass the wrapped model.

    TRL's ``SFTTrainer`` ignores the loss of its model: it takes log-probabilities from an output head of its own. Pass
    the trainer in place of the model, also with PEFT. Its options, metrics and number of tokens are then TRL's.

    Args:
        model: a model for causal or masked language modelling, or for the classification of rows or tokens, or
            PEFT's wrapper of one; or an ``SFTTrainer`` (tested with TRL 1.16) with ``loss_type="nll"``, its default.
        gamma: as :class:`focalkern.FocalLoss`; 0 is cross-entropy. For several labels per row: a number >= 0.
        linear: fuse the output head with the loss (:func:`focalkern.linear_focal_loss`), for language models. In
            training mode with labels, the model then does not compute logits, and ``outputs.logits`` holds the
            features. Evaluation and generation do not change. Not for an ``SFTTrainer``, which fuses its own head.
        label_smoothing: in [0, 1]; not for several labels per row, nor for an ``SFTTrainer``.
        detach_modulation: treat the factor as a constant in the gradient; not for several labels per row.
        modulation: None, or "confidence": p^gamma instead of (1 - p)^gamma; not for several labels per row. With
            ``gamma=1.0, detach_modulation=True`` it is TRL's ``loss_type="dft"``.

    Returns:
        An ``ExitStack``: its ``close()``, or the end of its ``with`` block, restores the model's own loss.

    Raises:
        TypeError: the model has no ``loss_function`` that can be set, or no output embeddings for ``linear``.
        ValueError: the model's loss is of another kind; an option outside its domain; ``linear`` for a model that
            changes its logits after the head, or is not a language model; an ``SFTTrainer`` with another loss. A
            trainer of TRL that is given a model with this loss raises it at its first step.

    Source: Mukhoti et al. 2020 (arXiv 2002.09437).

    Example:
        >>> import transformers
        >>> from focalkern.integrations.transformers import use_focal_loss
        >>> config = transformers.LlamaConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> model, tokens = transformers.LlamaForCausalLM(config), torch.arange(24).view(2, 12)
        >>> own, undo = model(input_ids=tokens, labels=tokens).loss, use_focal_loss(model, gamma=2.0)
        >>> bool(model(input_ids=tokens, labels=tokens).loss < own)  # undo.close() restores the model's own loss
        True
    """
    op = "use_focal_loss"
    linear = flag(op, "linear", linear)
    options: Any = {
        "label_smoothing": label_smoothing,
        "detach_modulation": detach_modulation,
        "modulation": modulation,
    }
    if isinstance(model, Trainer):
        return _use_in_sft_trainer(model, FocalLoss(gamma, reduction="none", **options), linear)
    whole = model  # the user calls it
    if hasattr(model, "get_base_model"):  # older wrappers of PEFT call no hook of their model
        model = model.get_base_model()
    if not hasattr(type(model), "loss_function"):
        raise TypeError(
            f"{op}: model must be a transformers model with a loss_function, or an SFTTrainer of TRL, got "
            f"{type(model).__name__}"
        )
    kind = getattr(model, "loss_type", None)
    if kind not in (*_NEXT_TOKEN, *_TOKEN, *_ROW):
        raise ValueError(
            f"{op}: model must be for one of {', '.join((*_NEXT_TOKEN, *_TOKEN, *_ROW))}, got {type(model).__name__} "
            f"with loss_type {kind!r}; use focal_loss in a training loop of your own"
        )
    loss = FocalLoss(gamma, reduction="sum", **options)
    undo = contextlib.ExitStack()
    asks_for_its_loss = "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names
    if linear and not asks_for_its_loss:
        raise ValueError(
            f"{op}: linear=True needs a model that calls loss_function, but {type(model).__name__} computes its own "
            "loss; use linear_focal_loss on its features"
        )
    features = _FeaturesInTraining(model, whole, undo) if linear else None
    undo.callback(whole.register_forward_pre_hook(_refuse_fused_head, with_kwargs=True).remove)

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        logits, labels = _logits_and_labels(kind, args, kwargs)
        n_items = kwargs.get("num_items_in_batch")
        if kind in _ROW and labels.is_floating_point():
            _check_several_labels(op, model.config, gamma, label_smoothing, detach_modulation, modulation)
            several: Tensor = SigmoidFocalLoss(float(gamma), reduction="mean")(logits, labels.to(logits.device))  # type: ignore[arg-type]
            return several
        if kind in _NEXT_TOKEN:
            shifted = kwargs.get("shift_labels")
            labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100) if shifted is None else shifted
        labels = labels.reshape(-1).to(logits.device)
        rows = logits.reshape(-1, logits.shape[-1])
        with float32_loss(rows):  # as the model's own loss; the sum of many tokens exceeds float16
            if features is not None and features.active:
                head = features.head
                total = linear_focal_loss(
                    rows, head.weight, labels, gamma, linear_bias=head.bias, reduction="sum", **options
                )
            else:
                total = loss(rows, labels)
        if n_items is None:
            n_items = (labels != -100).sum()
        elif isinstance(n_items, Tensor):
            n_items = n_items.to(total.device)
        mean: Tensor = total / n_items
        return mean

    if asks_for_its_loss:
        before = vars(model).get("_loss_function")
        model.loss_function = loss_function
        undo.callback(_restore, model, before)
    else:

        def replaced(_model: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            if kwargs.get("labels") is not None:
                items = kwargs.get("num_items_in_batch")
                output["loss"] = loss_function(**dict(output, **kwargs, num_items_in_batch=items))
            return output

        undo.callback(whole.register_forward_hook(replaced, with_kwargs=True).remove)
    return undo


def _use_in_sft_trainer(trainer: Any, loss: FocalLoss, linear: bool) -> contextlib.ExitStack:
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


def _refuse_fused_head(_model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("fused_lm_head"):
        raise ValueError(
            "use_focal_loss: TRL's trainers do not use the loss of the model; pass the trainer in place of the model: "
            "use_focal_loss(trainer, ...)"
        )


class _FeaturesInTraining:
    """Makes the output head of a model return its input while ``whole``, which is the model or PEFT's wrapper of it, is
    called in training mode with labels.
    """

    def __init__(self, model: Any, whole: Any, undo: contextlib.ExitStack) -> None:
        op = "use_focal_loss"
        changed = [name for name in _AFTER_THE_HEAD if getattr(model.config, name, None) not in (None, 1, 1.0)]
        if changed:
            raise ValueError(
                f"{op}: linear=True needs the logits of the head as they are, but config.{changed[0]} "
                f"is {getattr(model.config, changed[0])}; use linear_focal_loss on model.model(...).last_hidden_state"
            )
        self.head = model.get_output_embeddings()
        if model.loss_type not in (*_NEXT_TOKEN, "ForMaskedLM") or not isinstance(self.head, torch.nn.Linear):
            raise ValueError(
                f"{op}: linear=True is for language models with a linear output head, got {type(model).__name__}"
            )
        self.active = False
        undo.callback(whole.register_forward_pre_hook(self._before, with_kwargs=True).remove)
        undo.callback(whole.register_forward_hook(self._after, always_call=True).remove)

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if model.training and kwargs.get("labels") is not None:
            self.active = True
            self.head.forward = lambda features: features

    def _after(self, *_: Any) -> None:
        if self.active:
            self.active = False
            del self.head.forward


def _logits_and_labels(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The logits and labels in a model's call of its loss: by keyword, or by position and type."""
    names = ("labels", "logits") if kind in _ROW else ("logits", "labels")
    given = dict(zip(names, args, strict=False)) | kwargs
    logits = given["pooled_logits"] if given.get("pooled_logits") is not None else given["logits"]
    return logits, given["labels"]


def _check_several_labels(
    op: str, config: Any, gamma: Any, label_smoothing: float, detach_modulation: bool, modulation: object
) -> None:
    if config.problem_type not in (None, "multi_label_classification") or config.num_labels == 1:
        raise ValueError(f"{op}: labels must be classes, got numbers for problem_type {config.problem_type!r}")
    if isinstance(gamma, GammaTable) or label_smoothing or detach_modulation or modulation is not None:
        raise ValueError(
            f"{op}: several labels per row take a number gamma, and none of label_smoothing, detach_modulation "
            "and modulation"
        )


def _restore(model: Any, before: Callable[..., Tensor] | None) -> None:
    if before is None:
        del model._loss_function
    else:
        model.loss_function = before


class CalibrationCallback(TrainerCallback):  # type: ignore[misc]
    """Calibration at each evaluation of a ``Trainer``: ``eval_nll``, ``eval_ece`` and ``eval_temperature``.

    The callback reads the logits of the evaluation's forward passes. It adds three numbers to the result of
    ``trainer.evaluate()`` and to the last entry of ``trainer.state.log_history``: the mean negative log-likelihood in
    nats, the ECE (``equal_width``, a fraction) and the temperature with the lowest NLL. A temperature above 1 means
    that the model is over-confident. NaN logits make all three NaN. With several evaluation
    sets, the names have the prefix of the set, such as ``eval_name_nll``.

    Args:
        n_bins: bins of the ECE.
        max_samples: number of targets whose logits are kept, the first ones of the evaluation. For language models a
            target is a token, and its logits take 4 C bytes.

    Raises:
        TypeError, ValueError: ``n_bins`` or ``max_samples`` is not a positive integer. An evaluation raises ValueError
            for regression and for several labels per row.

    Example:
        >>> from focalkern.integrations.transformers import CalibrationCallback
        >>> callback = CalibrationCallback(max_samples=2000)  # Trainer(..., callbacks=[callback])
        >>> callback.results
        {}
    """

    def __init__(self, n_bins: int = 15, max_samples: int = 20_000) -> None:
        self.n_bins = integer("CalibrationCallback", "n_bins", n_bins, 1)
        self.max_samples = integer("CalibrationCallback", "max_samples", max_samples, 1)
        self.results: dict[str, float] = {}
        self._last: tuple[Tensor, Tensor] | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].register_forward_hook(self._see, with_kwargs=True)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._last is not None and sum(len(labels) for _, labels in self._kept) < self.max_samples:
            self._kept.append(self._last)
        self._last = None

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        if not self._kept:
            return
        logits = torch.cat([kept for kept, _ in self._kept])[: self.max_samples]
        labels = torch.cat([kept for _, kept in self._kept])[: self.max_samples]
        self._kept = []
        log_probs = logits.log_softmax(-1)
        figures = [math.nan] * 3  # of a training that has diverged, which goes on
        if not bool(log_probs.isnan().any()):
            figures = [
                float(nll(log_probs, labels, log=True)),
                float(expected_calibration_error(logits.softmax(-1), labels, n_bins=self.n_bins)),
                float(TemperatureScaling().fit_quietly(logits, labels).temperature_),
            ]
        prefix = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), "eval")
        self.results = dict(zip((f"{prefix}_nll", f"{prefix}_ece", f"{prefix}_temperature"), figures, strict=True))
        metrics.update(self.results)
        if state.log_history:
            state.log_history[-1].update(self.results)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        self._kept = []  # the rows of trainer.predict() are of no evaluation

    def _see(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        labels, logits = kwargs.get("labels"), getattr(output, "logits", None)
        if model.training or labels is None or logits is None:
            return
        if labels.is_floating_point() or logits.shape[-1] < 2:
            raise ValueError(
                "CalibrationCallback: labels must be classes, for logits of at least two classes, got labels of "
                f"{labels.dtype} and logits of shape {list(logits.shape)}; leave the callback out for regression and "
                "for several labels per row"
            )
        if getattr(model, "loss_type", None) in _NEXT_TOKEN:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        logits, labels = logits.detach().reshape(-1, logits.shape[-1]), labels.reshape(-1)
        counts = (labels >= 0).nonzero().squeeze(1)[: self.max_samples]
        self._last = logits[counts].float().cpu(), labels[counts].cpu()
