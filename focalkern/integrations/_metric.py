"""The base of the metrics for torchmetrics."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from focalkern._arrays import flat_rows
from focalkern._checks import short
from focalkern.metrics._inputs import probs_and_target

__all__ = ["FocalkernMetric"]

_INPUT_KINDS = ("probs", "logits")
# The dtypes of lists, by their codes. No rows are bool, to which any other dtype is promoted.
_GATHERED = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class FocalkernMetric(Metric):
    """Base of the four metrics: checks, the conversion of inputs of any shape to rows, and states of fixed dtypes."""

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 0.0

    # In the class, for metrics that an earlier version pickled.
    _result_dtype = torch.float64
    _sums_seen = False  # whether the sums of rows of probabilities were looked at

    def __init__(self, input_kind: str, ignore_index: int | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._check("input_kind", input_kind, _INPUT_KINDS)
        self.input_kind = input_kind
        self.ignore_index = ignore_index
        # MetricCollection shares the states of metrics whose states are equal after the first batch, as two zeros are.
        settings = f"{type(self).__name__} {input_kind} {ignore_index}"
        self.add_state("settings", torch.tensor(list(settings.encode())), dist_reduce_fx="max")

    def _check(self, name: str, value: Any, options: Any) -> None:
        if value not in options:
            raise ValueError(f"{type(self).__name__}: {name} must be one of {', '.join(options)}, got {value!r}")

    def _bins_of(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{type(self).__name__}: {name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{type(self).__name__}: {name} must be at least 1, got {value}")
        return value

    def _rows(self, preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [rows, C] and targets [rows] without ignored rows."""
        op = type(self).__name__
        for name, one in (("preds", preds), ("target", target)):
            if not isinstance(one, Tensor):
                raise TypeError(f"{op}: {name} must be a tensor, got {short(one)}; torch.as_tensor converts arrays")
        if preds.dim() < 2:
            raise ValueError(f"{op}: preds must be [N, C, ...], got shape {list(preds.shape)}")
        expected = preds.shape[:1] + preds.shape[2:]
        if target.shape != expected:
            raise ValueError(f"{op}: target must be [N, ...] = {list(expected)}, got {list(target.shape)}")
        scores, target = (preds, target) if preds.dim() == 2 else (flat_rows(preds), target.reshape(-1))
        if self.ignore_index is not None:
            kept = target.long() != self.ignore_index
            scores, target = scores[kept], target[kept]
        look = self.input_kind == "probs" and not self._sums_seen and len(scores) > 0
        self._sums_seen = self._sums_seen or look
        return probs_and_target(op, scores, target, log=self.input_kind == "logits", sums=look)

    def _log_probs(self, scores: Tensor) -> Tensor:
        return scores.to(torch.float64).log_softmax(-1)

    def _probs(self, scores: Tensor) -> Tensor:
        """The given probabilities, or the softmax of logits, in at least float32."""
        if self.input_kind == "probs":
            return scores
        probs = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        without = probs[:, 0].isnan()  # NaN, +inf or only -inf in a row make all of it NaN
        if bool(without.any()):
            row = int(without.nonzero()[0])
            raise ValueError(f"{type(self).__name__}: preds must have a finite softmax, got {scores[row]} at row {row}")
        return probs

    def _sync_dist(self, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
        """Gathers lists in one dtype; a process without rows gathers no row of this dtype."""
        lists = {name: getattr(self, name) for name in self._defaults if isinstance(getattr(self, name), list)}
        for name, parts in lists.items():
            mine = torch.cat(parts) if parts else torch.empty(0, device=self.device, dtype=torch.bool)
            code = torch.tensor(_GATHERED.index(mine.dtype), device=mine.device)
            codes = dist_sync_fn(code, group=process_group or self.process_group)
            of_all = functools.reduce(torch.promote_types, (_GATHERED[int(one)] for one in codes))
            setattr(self, name, [mine.to(of_all)])
        super()._sync_dist(dist_sync_fn, process_group)

    def set_dtype(self, dst_type: str | torch.dtype) -> Self:
        """Sets the dtype of the result. The states keep theirs: sums float64, counts int64, confidences as given.

        Args:
            dst_type: a floating-point dtype, or its name as for ``torch.nn.Module.type``.

        Returns:
            The metric.

        Raises:
            TypeError: not a floating-point dtype.

        Example:
            >>> from focalkern.integrations.torchmetrics import BrierScore
            >>> metric = BrierScore().set_dtype(torch.float32)
            >>> metric.update(torch.tensor([[0.8, 0.2]]), torch.tensor([0]))
            >>> metric.compute()
            tensor(0.0800)
        """
        found = dst_type if isinstance(dst_type, torch.dtype) else torch.empty(0).type(dst_type).dtype
        if not found.is_floating_point:
            raise TypeError(f"{type(self).__name__}: dst_type must be a floating-point dtype, got {found}")
        super().set_dtype(dst_type)
        self._result_dtype = found
        self._computed = None  # the last result, in the dtype before
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ()) -> Self:
        """Moves states and results without a change of dtype: sums in half precision would lose their digits."""

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return [moved(part) for part in value]
            found = fn(value)
            return found if found.dtype == value.dtype else value.to(found.device)

        results = {name: getattr(self, name) for name in ("_computed", "_forward_cache")}
        super()._apply(fn, [*exclude_state, *self._defaults])
        for name, result in results.items():
            setattr(self, name, moved(result) if isinstance(result, Tensor) else result)
        for name in self._defaults.keys() - set(exclude_state):
            self._defaults[name] = moved(self._defaults[name])
            setattr(self, name, moved(getattr(self, name)))
        return self

    def plot(self, val: Tensor | Sequence[Tensor] | None = None, ax: Any = None) -> Any:
        """Draws the value, or several values over their index, as the plots of torchmetrics' own metrics do.

        Args:
            val: results of ``compute`` or ``forward``; None for the value of ``compute``.
            ax: axes of matplotlib; None for new ones.

        Returns:
            Figure and axes.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.

        Example:
            >>> from focalkern.integrations.torchmetrics import BrierScore
            >>> metric = BrierScore()
            >>> values = [metric(torch.tensor([[0.8, 0.2]]), torch.tensor([label])) for label in (0, 1)]
            >>> figure, axes = metric.plot(values)
            >>> axes.get_xlabel()
            'Step'
        """
        return self._plot(val, ax)
