"""Focal losses and calibration metrics in Hugging Face transformers."""

import contextlib
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from focalkern._checks import MOST_BINS, flag, integer
from focalkern.calibrators import TemperatureScaling
from focalkern.calibrators._row_source import ends_all_ranks, rank_and_size, sum_over_group
from focalkern.gamma import GammaTable
from focalkern.integrations import _own_loss
from focalkern.integrations._focal_of_model import FeaturesInTraining, FocalLossOfModel
from focalkern.integrations._sft_trainer import use_in_sft_trainer
from focalkern.losses import FocalLoss
from focalkern.metrics import expected_calibration_error, nll
from focalkern.ops._row_loss import Modulation

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        f"focalkern.integrations.transformers needs transformers and its Trainer: pip install transformers accelerate "
        f"({error})"
    ) from error

__all__ = ["CalibrationCallback", "use_focal_loss"]

# Bounds of the logits that CalibrationCallback keeps by default: targets, and float32 numbers.
_MOST_SAMPLES = 20_000
_MOST_LOGITS = 1 << 27


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

    over the targets that are not -100; n is their number, or ``num_items_in_batch`` if ``Trainer`` passes it. The
    labels are shifted to the next token if the model's own loss shifts them. For several labels per row
    (``config.problem_type="multi_label_classification"``) the loss is the sigmoid focal loss without alpha.

    Some models (BERT, T5) compute their loss without ``loss_function``; then a forward hook replaces ``outputs.loss``.
    At the first forward pass with labels, the hook compares the model's own loss with the cross-entropy of the labels,
    as they are and shifted. It raises if neither is equal.

    For PEFT, wrap the model first, then pass the wrapped model. A deep copy of the model keeps the focal loss.

    TRL's ``SFTTrainer`` ignores the loss of its model: it takes log-probabilities from an output head of its own. Pass
    the trainer in place of the model, also with PEFT. Its options, metrics and number of tokens are then TRL's.

    Args:
        model: a model for causal or masked language modelling, for sequence-to-sequence generation, or for the
            classification of rows or tokens, or PEFT's wrapper of one; or an ``SFTTrainer`` (tested with TRL 1.16)
            with ``loss_type="nll"``, its default.
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
            changes its logits after the head, or is not a language model; an ``SFTTrainer`` with another loss. The
            first step raises it if the model's own loss is no cross-entropy of its logits (ProphetNet), if ``Trainer``
            has ``label_smoothing_factor`` or ``compute_loss_func``, and if a trainer of TRL is given the model.

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
        return use_in_sft_trainer(model, FocalLoss(gamma, reduction="none", **options), linear)
    whole, model = model, _own_loss.base_model(model)  # older wrappers of PEFT call no hook of their model
    if not hasattr(type(model), "loss_function"):
        wraps = hasattr(model, "_orig_mod") or isinstance(getattr(model, "module", None), torch.nn.Module)
        remedy = f"; call {op} on the model before {type(model).__name__} wraps it" if wraps else ""
        raise TypeError(
            f"{op}: model must be a transformers model with a loss_function, or an SFTTrainer of TRL, got "
            f"{type(model).__name__}{remedy}"
        )
    kind = _own_loss.loss_kind(model)
    if kind not in _own_loss.KINDS:
        raise ValueError(
            f"{op}: model must be for one of {', '.join(_own_loss.KINDS)}, got {type(model).__name__} "
            f"with loss_type {kind!r}; use focal_loss in a training loop of your own"
        )
    focal = FocalLossOfModel(model, kind, gamma, options)
    undo = contextlib.ExitStack()
    asks_for_its_loss = _own_loss.asks_for_its_loss(model)
    if linear and not asks_for_its_loss:
        raise ValueError(
            f"{op}: linear=True needs a model that calls loss_function, but {type(model).__name__} computes its own "
            "loss; use linear_focal_loss on its features"
        )
    if linear:
        focal.features = FeaturesInTraining(model, whole, kind, undo)
    undo.callback(whole.register_forward_pre_hook(focal.refuse_losses_outside, with_kwargs=True).remove)
    if asks_for_its_loss:
        focal.before = vars(model).get("_loss_function")
        model.loss_function = focal
        undo.callback(_restore, focal)
    else:
        undo.callback(whole.register_forward_hook(focal.replace, with_kwargs=True).remove)
    return undo


def _restore(focal: FocalLossOfModel) -> None:
    """Ends a focal loss. Another one of the same model may still hold, or may have ended before."""
    focal.ended = True
    current = vars(focal.model).get("_loss_function")
    while isinstance(current, FocalLossOfModel) and current.ended:
        current = current.before
    if current is None:
        vars(focal.model).pop("_loss_function", None)
    else:
        focal.model.loss_function = current


class CalibrationCallback(TrainerCallback):  # type: ignore[misc]
    """Calibration at each evaluation of a ``Trainer``: ``eval_nll``, ``eval_ece`` and ``eval_temperature``.

    The callback reads the logits of the evaluation's forward passes. It adds three numbers to the result of
    ``trainer.evaluate()`` and to the last entry of ``trainer.state.log_history``: the mean negative log-likelihood in
    nats, the ECE (``equal_width``, a fraction) and the temperature with the lowest NLL. A temperature above 1 means
    that the model is over-confident. NaN logits make all three NaN. If a label has the logit -inf, the NLL is infinite
    and the temperature NaN. With several evaluation sets, the names have the prefix of the set, such as
    ``eval_name_nll``. Labels are shifted to the next token if the model's own loss shifts them. In distributed training
    every process has the numbers of the first, from its rows, so that all stop early or save at the same step. All
    processes need the callback.

    Callbacks that come after it log the numbers, too. Those of ``report_to`` come before it, so pass them yourself:
    ``report_to=[]`` and ``callbacks=[CalibrationCallback(), TensorBoardCallback()]``.

    Pass the callback as ``Trainer(callbacks=[...])``. If ``trainer.add_callback`` adds it, the first evaluation before
    training has no numbers. With ``compute_loss_func`` or ``label_smoothing_factor``, ``Trainer`` passes no labels to
    the model, and no evaluation has numbers; TRL's ``SFTTrainer`` computes no logits. One UserWarning says why.

    Args:
        n_bins: bins of the ECE.
        max_samples: number of targets whose logits are kept, the first ones of the evaluation. For language models a
            target is a token. The fit takes some 16 C bytes per target. None: 20,000, or fewer, so that their logits
            take at most 512 MiB.

    Raises:
        TypeError, ValueError: ``n_bins`` or ``max_samples`` is not a positive integer. An evaluation raises ValueError
            for regression and for several labels per row.

    Example:
        >>> from focalkern.integrations.transformers import CalibrationCallback
        >>> callback = CalibrationCallback(max_samples=2000)  # Trainer(..., callbacks=[callback])
        >>> callback.results
        {}
    """

    def __init__(self, n_bins: int = 15, max_samples: int | None = None) -> None:
        self.n_bins = integer("CalibrationCallback", "n_bins", n_bins, 1, MOST_BINS)
        given = max_samples is not None
        self.max_samples = integer("CalibrationCallback", "max_samples", max_samples, 1) if given else None
        self.results: dict[str, float] = {}
        self._last: tuple[Tensor, Tensor] | None = None
        self._model: Any = None
        self._handle: Any = None
        self._problem = ""
        self._warned = False
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._evaluates = False
        self._logged: dict[str, float] | None = None  # the numbers of an evaluation between its log and its end

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attach(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attach(kwargs["model"])  # trainer.add_callback() calls no on_init_end; model_init makes a new model

    def _attach(self, model: Any) -> bool:
        if model is self._model:
            return False
        if self._handle is not None:
            self._handle.remove()
        self._model, self._handle = model, model.register_forward_hook(self._see, with_kwargs=True)
        return True

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._attach(kwargs["model"]):
            self._problem = (
                "trainer.add_callback() came after the Trainer was built, so that the callback has missed the first "
                "batch of this evaluation; pass callbacks=[...] to Trainer, or evaluate again"
            )
        self._evaluates = True
        if self._last is not None:
            self._kept.append(self._last)
        self._last = None

    def _missing(self, n_classes: int) -> int:
        """Number of targets that this process still has to keep. Only the rows of the first process are used."""
        if rank_and_size()[0] != 0:
            return 0
        most = self.max_samples or min(_MOST_SAMPLES, max(1, _MOST_LOGITS // n_classes))
        return max(0, most - sum(len(labels) for _, labels in self._kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        # Trainer logs the result of an evaluation before on_evaluate: later callbacks, such as reporters, see this.
        if self._evaluates and any(name.endswith("_runtime") for name in logs or ()):
            self._logged = self._numbers(logs or {})
            self._add(self._logged, logs or {}, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        found = self._numbers(metrics) if self._logged is None else self._logged
        self._logged, self._evaluates = None, False
        self._add(found, metrics, state)

    def _add(self, found: dict[str, float], metrics: dict[str, float], state: Any) -> None:
        metrics.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def _numbers(self, metrics: dict[str, float]) -> dict[str, float]:
        """The three numbers of the evaluation with these metrics by their names, or none with a warning."""
        kept, problem, self._kept, self._problem = self._kept, self._problem, [], ""
        known, *figures = self._figures([] if problem else kept)
        if not known:
            if not self._warned and rank_and_size()[0] == 0:
                self._warned = True
                problem = problem or (
                    "no forward pass had labels that count and logits; with compute_loss_func or "
                    "label_smoothing_factor, Trainer passes no labels to the model"
                )
                warnings.warn(f"CalibrationCallback: no numbers for this evaluation: {problem}", stacklevel=3)
            return {}
        prefix = next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), "eval")
        self.results = dict(zip((f"{prefix}_nll", f"{prefix}_ece", f"{prefix}_temperature"), figures, strict=True))
        return self.results

    def _figures(self, kept: list[tuple[Tensor, Tensor]]) -> list[float]:
        """Whether there are numbers, and the three numbers: those of the first process, on every process."""
        found = torch.zeros(4, dtype=torch.float64)
        if kept and rank_and_size()[0] == 0:
            with ends_all_ranks():
                logits, labels = (torch.cat(parts) for parts in zip(*kept, strict=True))
                log_probs = logits.log_softmax(-1)
                found[0], found[1:] = 1.0, math.nan  # of a training that has diverged, which goes on
                if not bool(log_probs.isnan().any()):
                    found[1] = nll(log_probs, labels, log=True)
                    found[2] = expected_calibration_error(logits.softmax(-1), labels, n_bins=self.n_bins)
                    if bool(found[1].isfinite()):
                        found[3] = TemperatureScaling().fit_quietly(logits, labels).temperature_
        figures: list[float] = sum_over_group(found).tolist()
        return figures

    def on_predict(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        self._kept, self._problem, self._evaluates = [], "", False  # the rows of trainer.predict() are of no evaluation

    def _see(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if model.training:
            return
        if kwargs.get("fused_lm_head"):
            self._problem = "TRL's SFTTrainer computes no logits; evaluate the model by the Trainer of transformers"
            return
        labels = _own_loss.argument(model, args, kwargs, "labels")
        if labels is None:
            if kwargs.get("num_items_in_batch") is not None:
                self._problem = (
                    "Trainer keeps the labels from the model, because of compute_loss_func or "
                    "label_smoothing_factor; leave both out, for example with use_focal_loss"
                )
            return
        loss, logits = _own_loss.loss_and_logits(output)
        if logits is None:
            return
        if labels.is_floating_point() or logits.shape[-1] < 2:
            raise ValueError(
                "CalibrationCallback: labels must be classes, for logits of at least two classes, got labels of "
                f"{labels.dtype} and logits of shape {list(logits.shape)}; leave the callback out for regression and "
                "for several labels per row"
            )
        missing = self._missing(logits.shape[-1])
        if not missing:
            return
        base, shifted = _own_loss.base_model(model), kwargs.get("shift_labels")
        if shifted is not None:
            labels = shifted
        elif _own_loss.loss_kind(base) in _own_loss.NEXT_TOKEN:
            n_items = kwargs.get("num_items_in_batch")
            shift = _own_loss.shift_of_own_loss(base, logits, labels, loss, n_items)
            if _own_loss.shifts_by_name(base) if shift is None else shift:
                logits, labels = logits[..., :-1, :], labels[..., 1:]
        logits, labels = logits.detach().reshape(-1, logits.shape[-1]), labels.reshape(-1)
        counts = (labels >= 0).nonzero().squeeze(1)[:missing]
        self._last = logits[counts].cpu().float(), labels[counts].cpu()
