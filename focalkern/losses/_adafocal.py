"""AdaFocal: the fused focal loss with a gamma per confidence bin, adapted to validation statistics."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from focalkern._arrays import as_tensor
from focalkern._checks import MOST_BINS, flag, integer, short
from focalkern._types import STEEPEST_INVERSE_GAMMA, Reduction, compute_dtype
from focalkern.gamma import GammaTable
from focalkern.losses._adafocal_state import AdaFocalRecord, gathered, packed, unpacked
from focalkern.losses._base import check_pair, check_range, described, number
from focalkern.losses._known_table import KnownTable
from focalkern.metrics import reliability_bins


class AdaFocalLoss(KnownTable):
    r"""AdaFocal: one gamma per bin of confidence, adapted to the calibration error of the bin on validation samples.

    .. math::
        L = -(1 - p)^{\gamma_b} \log p \;\; (\gamma_b \ge 0), \qquad
        L = -(1 + p)^{|\gamma_b|} \log p \;\; (\gamma_b < 0), \qquad b = \text{the bin of } p

    with p the probability of the target class. After each epoch, with E_b = mean confidence - accuracy of the
    validation samples whose *top-1* confidence is in bin b,

    .. math:: \gamma_b \leftarrow \gamma_b \exp(+\lambda E_b) \text{ if } \gamma_b > 0, \quad
        \gamma_b \exp(-\lambda E_b) \text{ otherwise};

    then, where abs(gamma_b) < switch, gamma_b becomes -switch if it was positive and +switch otherwise; then it is
    clipped to [gamma_min, gamma_max]. A bin without validation samples keeps its gamma. Each update computes ``n_bins``
    new bins of equal mass (estimator ``equal_mass_interp``). Their statistics are over (lo, hi], so the lowest
    confidence is in no bin. Training looks p up in [lo, hi); the first and the last bin are open-ended. Before the
    first update the ``n_bins`` bins are uniform and have ``gamma_init``.

    A training loop calls :meth:`accumulate` for each validation batch and :meth:`update` once after them.

    Args:
        n_bins: at least 1.
        lam: lambda, at least 0.
        gamma_init: gamma of all bins in the first epoch.
        gamma_max, gamma_min: bounds to which gamma is clipped. A gamma_min below -3.591, where the slope of the inverse
            focal loss changes sign near p = 0.28, causes a warning.
        switch: the threshold S_th, at least 0.
        weight: [C] class weights, floating point; None for equal weights.
        ignore_index: label whose samples count neither in the loss nor in the mean.
        reduction: "none", "mean" or "sum". The mean divides by the summed weight of the samples.
        label_smoothing: e in [0, 1]; the target becomes (1 - e) t + e / C. With it, or with class probabilities, gamma
            is looked up at the probability of each class.
        detach_modulation: treat the factor before log p as a constant; False by default, as published.

    Attributes:
        bin_edges: float64 [n_bins + 1], a buffer.
        bin_gammas: float64 [n_bins], a buffer.
        history: list of :class:`AdaFocalRecord`, one per update; ``focalkern.plots.adafocal_history`` draws it.
        n_accumulated: number of validation samples accumulated for the next update.

    The ``state_dict`` holds the bins, the history and the accumulated samples, so that training can continue from any
    point. The settings come from the constructor; loading gammas outside its [gamma_min, gamma_max] raises an error.
    The state has three tensors; the third, ``_extra_state``, holds history and samples as bytes, so its length varies.
    The loader of ``torch.distributed.checkpoint`` refuses another length: convert its checkpoint with
    ``torch.distributed.checkpoint.format_utils.dcp_to_torch_save``, then call ``load_state_dict``.
    In distributed training, the ``state_dict`` of each rank holds only the samples of that rank. The buffers move to
    the device of the logits at the first call.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, value or shape; gamma_init outside [gamma_min, gamma_max].

    Source: Ghosh, Schaaf & Gormley, NeurIPS 2022. Their code (github.com/3mcloud/adafocal) sums the loss over the batch
    (the default here is the mean), adds 1e-20 to 1 - p, and looks up gamma on the host, sample by sample; bins, look-up
    by p, update, switch and clipping are the same.

    Example:
        >>> criterion = fk.AdaFocalLoss(n_bins=2)
        >>> logits, target = torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.5, 0.0]]), torch.tensor([0, 1, 0, 1])
        >>> criterion.accumulate(logits, target)  # for each validation batch
        >>> record = criterion.update()  # once after validation
        >>> record.confidence - record.accuracy
        tensor([ 0.3059, -0.0474], dtype=torch.float64)
        >>> criterion.bin_gammas  # gamma_init = 1 times exp of these errors; the gammas of the next epoch
        tensor([1.3579, 0.9537], dtype=torch.float64)
    """

    bin_edges: Tensor
    bin_gammas: Tensor
    _exact_buffers = ("bin_edges", "bin_gammas")

    def __init__(
        self,
        n_bins: int = 15,
        lam: float = 1.0,
        gamma_init: float = 1.0,
        gamma_max: float = 20.0,
        gamma_min: float = -2.0,
        switch: float = 0.2,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        detach_modulation: bool = False,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            detach_modulation=detach_modulation,
        )
        if isinstance(n_bins, Tensor):  # type: ignore[unreachable]
            raise TypeError(f"AdaFocalLoss: n_bins must be an int, got {described(n_bins)}")
        self.n_bins = integer("AdaFocalLoss", "n_bins", n_bins, 1, MOST_BINS)
        self.lam = number("AdaFocalLoss", "lam", lam, low=0.0)
        self.gamma_min = number("AdaFocalLoss", "gamma_min", gamma_min)
        self.gamma_max = number("AdaFocalLoss", "gamma_max", gamma_max, low=self.gamma_min)
        self.gamma_init = number("AdaFocalLoss", "gamma_init", gamma_init, low=self.gamma_min, high=self.gamma_max)
        self.switch = number("AdaFocalLoss", "switch", switch, low=0.0)
        if self.gamma_min < STEEPEST_INVERSE_GAMMA:
            warnings.warn(
                f"AdaFocalLoss: gamma_min = {self.gamma_min} is below {STEEPEST_INVERSE_GAMMA}, where the slope of "
                "the inverse focal loss changes sign near p = 0.28",
                stacklevel=2,
            )
        self.history: list[AdaFocalRecord] = []
        self._confidence: list[Tensor] = []
        self._correct: list[Tensor] = []
        for name, values in zip(self._exact_buffers, self._first_table(), strict=True):
            self.register_buffer(name, values)
        self._mark_if_meta()

    def _gamma(self) -> GammaTable:
        return self._table()

    def _first_table(self, device: str | None = None) -> tuple[Tensor, Tensor]:
        edges = torch.arange(self.n_bins + 1, dtype=torch.float64, device=device) / self.n_bins
        return edges, torch.full((self.n_bins,), self.gamma_init, dtype=torch.float64, device=device)

    def _known_table(self) -> tuple[Tensor, Tensor]:
        last = self.history[-1] if self.history else None
        return (last.bin_edges.clone(), last.bin_gammas.clone()) if last else self._first_table("cpu")

    def _settings(self) -> dict[str, object]:
        names = ("n_bins", "lam", "gamma_init", "gamma_max", "gamma_min", "switch")
        return {name: getattr(self, name) for name in names}

    @property
    def n_accumulated(self) -> int:
        """Number of validation samples accumulated on this rank for the next update.

        Example:
            >>> criterion = fk.AdaFocalLoss()
            >>> criterion.accumulate(torch.zeros(8, 10), torch.arange(8))
            >>> criterion.n_accumulated
            8
            >>> criterion.reset()
            >>> criterion.n_accumulated
            0
        """
        return sum(len(confidence) for confidence in self._confidence)

    def reset(self) -> None:
        """Discards the validation samples accumulated for the next update. Bins, gammas and history stay.

        Example:
            >>> criterion = fk.AdaFocalLoss()
            >>> criterion.accumulate(torch.zeros(8, 10), torch.arange(8))
            >>> criterion.reset()
            >>> criterion.n_accumulated
            0
        """
        self._confidence, self._correct = [], []

    @torch.no_grad()
    def accumulate(self, logits: Tensor, target: Tensor) -> None:
        """Adds a validation batch to the statistics of the next update.

        It keeps, on the CPU, one confidence (float32; float64 for float64 logits) and one bool per sample. It reads
        values, which synchronises the device.

        Args:
            logits: [C], [N, C] or [N, C, d1, ...], floating point.
            target: labels [], [N] or [N, d1, ...]; those equal to ``ignore_index`` are ignored.

        Raises:
            TypeError, ValueError: dtype, shape or device; logits whose softmax is NaN.
            IndexError: a label out of range. Samples that were accumulated before are never changed.
        """
        confidence, correct = self._validation_samples("accumulate", logits, target)
        self._confidence.append(confidence)
        self._correct.append(correct)

    @torch.no_grad()
    def update(
        self,
        logits: Tensor | None = None,
        target: Tensor | None = None,
        *,
        distributed: bool = True,
        group: Any = None,
    ) -> AdaFocalRecord:
        """Computes new bins and updates their gammas from the accumulated samples, then clears these samples.

        In distributed training every rank must call it. It gathers the confidences of all ranks (a rank may have
        none), so that all ranks get the same bins and gammas as one process with all samples. If each rank has the
        whole validation set, ``distributed=False`` skips the gathering.

        Args:
            logits, target: a batch that is passed to :meth:`accumulate` first.
            distributed: gather the samples of all ranks, if torch.distributed is initialised.
            group: process group to gather over; default: all ranks.

        Returns:
            The record that was appended to ``history``.

        Raises:
            TypeError, ValueError, IndexError: as :meth:`accumulate`; ValueError if no rank has a sample. Bins, gammas,
                history and accumulated samples stay unchanged.
            RuntimeError: another rank has raised one of these errors.
        """
        distributed = flag("AdaFocalLoss.update", "distributed", distributed)
        if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"AdaFocalLoss.update: group must be a process group or None, got {short(group)}")
        confidence, correct = list(self._confidence), list(self._correct)
        problem: Exception | None = None
        if (logits is None) != (target is None):
            problem = ValueError("AdaFocalLoss.update: logits and target must both be given or both None, got one")
        elif logits is not None and target is not None:
            try:
                batch = self._validation_samples("update", logits, target)
                confidence.append(batch[0])
                correct.append(batch[1])
            except (TypeError, ValueError, IndexError) as error:
                problem = error
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        parts = (torch.cat([none, *confidence]), torch.cat([none.bool(), *correct]))
        if distributed and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            parts, problem = gathered(parts, problem, group)
        if problem is not None:
            raise problem
        if len(parts[0]) == 0:
            raise ValueError("AdaFocalLoss.update: no validation sample: call accumulate, or pass logits and target")
        bins = reliability_bins(
            confidence=parts[0], correct=parts[1], n_bins=self.n_bins, estimator="equal_mass_interp"
        )
        edges = torch.cat([bins.lower, bins.upper[-1:]])
        record = self._adapt(edges, bins.confidence, bins.accuracy, bins.count)
        self.reset()
        return record

    @torch.no_grad()
    def update_bins(
        self,
        bin_edges: Tensor | Sequence[float],
        mean_confidence: Tensor | Sequence[float],
        accuracy: Tensor | Sequence[float],
        counts: Tensor | Sequence[int] | None = None,
    ) -> AdaFocalRecord:
        """Updates the gammas from given statistics, which must be the same on every rank.

        Args:
            bin_edges: [n_bins + 1], finite and ascending (equal neighbours are an empty bin): the new bins.
            mean_confidence: [n_bins], of the validation samples in each bin, a fraction.
            accuracy: [n_bins], a fraction.
            counts: [n_bins], number of samples in each bin. A bin with 0 samples keeps its gamma, and its confidence
                and accuracy may be NaN.

        The arguments are tensors, NumPy arrays or sequences of numbers. Samples added by :meth:`accumulate` stay.

        Returns:
            The record that was appended to ``history``.

        Raises:
            TypeError: not numbers.
            ValueError: wrong lengths; edges that descend or are not finite; a statistic outside [0, 1] or NaN. The
                state stays unchanged.

        Example:
            >>> criterion = fk.AdaFocalLoss(n_bins=2, lam=1.0)
            >>> record = criterion.update_bins([0.0, 0.5, 1.0], mean_confidence=[0.4, 0.9], accuracy=[0.4, 0.6])
            >>> record.bin_gammas  # the second bin is over-confident by 0.3: its gamma is multiplied by exp(0.3)
            tensor([1.0000, 1.3499], dtype=torch.float64)
        """
        op = "AdaFocalLoss.update_bins"
        edges = _statistics(op, "bin_edges", bin_edges, self.n_bins + 1)
        _check_edges(op, edges)
        count = None
        full = torch.ones(self.n_bins, dtype=torch.bool, device="cpu")
        if counts is not None:
            numbers = _statistics(op, "counts", counts, self.n_bins)
            if not bool(((numbers >= 0) & (numbers == numbers.floor()) & numbers.isfinite()).all()):
                raise ValueError(f"{op}: counts must be whole numbers of at least 0, got {numbers.tolist()}")
            count = numbers.long()
            full = count > 0
        statistics = []
        for name, given in (("mean_confidence", mean_confidence), ("accuracy", accuracy)):
            values = _statistics(op, name, given, self.n_bins)
            # The comparisons are false for NaN, so NaN raises too. Rounding may put a mean of float32 numbers above 1.
            wrong = full & ~((values >= 0) & (values <= 1 + 1e-3))
            if bool(wrong.any()):
                bin = int(wrong.nonzero()[0])
                raise ValueError(
                    f"{op}: {name} must be in [0, 1] in bins that are not empty, got {values[bin].item()} in bin {bin}"
                )
            statistics.append(torch.where(full, values, math.nan))
        return self._adapt(edges, statistics[0], statistics[1], count)

    def _validation_samples(self, method: str, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Top-1 confidence [K], float32 or float64, and correctness [K], bool, of the samples that are not ignored."""
        op = f"{self._name}.{method}"
        class_dim = check_pair(op, logits, target, input_name="logits", labels_only=True)
        check_range(op, target, logits.shape[class_dim], self.ignore_index)
        return sound(op, *self._top(logits.movedim(class_dim, -1), target))

    def _top(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The validation samples of logits [..., C] and labels [...] in range. A confidence may be NaN."""
        z = logits.detach().to(compute_dtype(logits.dtype))
        valid = target.long() != self.ignore_index
        return z.softmax(-1).amax(-1)[valid].cpu(), (z.argmax(-1) == target)[valid].cpu()

    def _adapt(self, edges: Tensor, confidence: Tensor, accuracy: Tensor, count: Tensor | None) -> AdaFocalRecord:
        """The update rule for checked arguments. Statistics are float64 on the CPU, NaN in empty bins."""
        gamma = self._table().gammas.detach().double().cpu()
        error = confidence - accuracy
        sign = torch.where(gamma > 0, 1.0, -1.0).double()
        updated = torch.where(gamma == 0, 0.0, gamma * (self.lam * sign * error).exp())
        updated = torch.where(updated.abs() < self.switch, -sign * self.switch, updated)
        updated = updated.clamp(self.gamma_min, self.gamma_max)
        updated = torch.where(error.isnan(), gamma, updated)
        # In place, because compiled graphs and CUDA graphs read this memory.
        self.bin_edges.copy_(edges)
        self.bin_gammas.copy_(updated)
        record = AdaFocalRecord(edges, confidence, accuracy, count, updated)
        self.history.append(record)
        return record

    # -- saved state ---------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._table()  # fills the buffers
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def get_extra_state(self) -> Tensor:
        return packed(self.n_bins, self.history, self._confidence, self._correct)

    def set_extra_state(self, state: Any) -> None:
        self.history, confidence, correct = unpacked(self.n_bins, state)
        self._confidence, self._correct = [confidence], [correct]
        self._is_from_meta = self._is_lost = False  # the state has a table, too

    def _check_state(self, state: dict[str, Any]) -> None:
        super()._check_state(state)
        gammas = GammaTable(state["bin_edges"], state["bin_gammas"]).gammas
        # Casting a state to half precision rounds gammas at the bounds.
        slack = torch.finfo(gammas.dtype).eps * max(-self.gamma_min, self.gamma_max)
        if bool(((gammas < self.gamma_min - slack) | (gammas > self.gamma_max + slack)).any()):
            raise ValueError(
                f"AdaFocalLoss: the bin_gammas of the checkpoint are from {gammas.min():.4g} to {gammas.max():.4g}, "
                f"outside of [gamma_min, gamma_max] = [{self.gamma_min:g}, {self.gamma_max:g}] of this loss; give the "
                "constructor the range that the checkpoint was made with"
            )
        unpacked(self.n_bins, state["_extra_state"])


def sound(op: str, confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """The validation samples; raises if a confidence is NaN."""
    if bool(confidence.isnan().any()):
        row = int(confidence.isnan().nonzero()[0])
        raise ValueError(f"{op}: logits must not be NaN, +inf or all -inf, as in valid row {row}")
    return confidence, correct


def _statistics(op: str, name: str, values: Any, length: int) -> Tensor:
    try:
        given = as_tensor(values)
        if given.is_complex():
            raise TypeError
        vector = given.to("cpu", torch.float64, copy=True)  # the caller's array may change
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name} must be a sequence of numbers, got {short(values)}") from error
    if list(vector.shape) != [length]:
        raise ValueError(f"{op}: {name} must be [{length}], got {list(vector.shape)}")
    return vector


def _check_edges(op: str, edges: Tensor) -> None:
    # The comparison is false for NaN, so NaN raises too.
    ascending = (edges[1:] >= edges[:-1]) & edges[1:].isfinite() & edges[:-1].isfinite()
    if not bool(ascending.all()):
        raise ValueError(f"{op}: bin_edges must be finite and ascending, got {edges.tolist()}")
