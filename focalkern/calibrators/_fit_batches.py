"""Fits of calibrators to batches: rows that do not fit in memory, or that several processes share."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch

from focalkern._arrays import as_tensor
from focalkern._checks import short
from focalkern._devices import cpu_by_default
from focalkern._diagnostics import refuse_probs
from focalkern.calibrators._base import Calibrator
from focalkern.calibrators._batch_checks import RowSample, SameRows
from focalkern.calibrators._fit_data import FitData, as_rows
from focalkern.calibrators._fitted import Layout
from focalkern.calibrators._parameters import is_assumed
from focalkern.calibrators._row_source import (
    Batch,
    BatchedRows,
    class_counts,
    ends_all_ranks,
    rank_and_size,
    sum_over_group,
)
from focalkern.calibrators._warnings import warn

__all__ = ["FitsBatches"]


class FitsBatches(Calibrator):
    """A calibrator whose fit needs sums over rows only."""

    @cpu_by_default()
    def fit_batches(
        self, batches: Iterable[Any] | Callable[[], Iterable[Any]], *, ignore_index: int | None = None
    ) -> Self:
        """Fit on batches. Every pass reads all batches; a fit needs 10 to 50 passes, a cross-validation 100 to 200.

        If torch.distributed is initialized, every process of the default group passes its own batches, and all get the
        same calibrator. The result equals ``fit`` on all rows, up to rounding. :class:`AutoCalibrator` leaves out
        candidates that need all rows in memory (spline-matrix, and with ``criterion="brier"`` temperature), and
        ``verdict_.warnings`` names them.

        Args:
            batches: an iterable that can be iterated several times, or a function that returns an iterator. A batch is
                (logits [n, C], target [n]) or (logits, target, sample_weight [n]), as for ``fit``, with integer labels.
                Every pass must give the same rows in the same order, so a DataLoader must not shuffle.
            ignore_index: label of ignored rows; None ignores no row.

        Returns:
            The calibrator itself, fitted.

        Warns:
            CalibrationWarning: as ``fit``. The labels of more than 65,536 rows, or of two million logits, are checked
                in a sample of that size.

        Raises:
            TypeError: batches that can be iterated only once; a batch of another form.
            ValueError: no rows; other rows, or another order, in a later pass; batches or processes with different
                numbers of classes; NaN or +inf logits; an option or parameter outside its domain.
            IndexError: a target outside [0, C).
            RuntimeError: another process raised an error while it read its batches.

        Example:
            >>> labels = torch.arange(300) % 3
            >>> logits = 4.0 * torch.eye(3)[(labels + (torch.arange(300) >= 240)) % 3]  # right in 240 of 300 rows
            >>> batches = [(logits[:200], labels[:200]), (logits[200:], labels[200:])]
            >>> calibrator = fk.SplineScaling().fit_batches(batches)
            >>> calibrator.predict_proba(logits[:1]).round(decimals=2)
            tensor([[0.8000, 0.1000, 0.1000]])
        """
        name = type(self).__name__
        self._check_parameters()
        if isinstance(batches, Iterator):
            raise TypeError(
                f"{name}: batches must be iterated for every pass, got an iterator, {type(batches).__name__}; pass the "
                "list, the DataLoader or a function that returns the iterator"
            )
        if not isinstance(batches, Iterable) and not callable(batches):
            raise TypeError(f"{name}: batches must be an iterable or a function, got {type(batches).__name__}")

        def read() -> Iterator[FitData]:
            for place, batch in enumerate(batches() if callable(batches) else batches):
                yield _as_data(name, batch, place, ignore_index, self.input_kind)

        same = read if isinstance(batches, list | tuple) else SameRows(name, read)  # a list needs no check
        assumed = is_assumed(self.input_kind)
        source = _counted(name, same, assumed=assumed)
        sample = RowSample(source)
        counts = class_counts(source, sample.keep)
        sample.gather(source.add_up)
        self._become(self._fit_source(source), Layout(source.n_classes), n_samples=source.n_rows)
        self.warnings_ = (*sample.problems(self.input_kind, assumed=assumed), *self._warnings_of(counts))
        warn(name, self.warnings_)
        self._look_at_next(self.input_kind == "logits" and not sample.looks_like_probs())
        return self

    def _fit_source(self, source: Any) -> dict[str, Any]:
        """Fits by sums over the rows of a source and returns the fitted attributes by name."""
        raise NotImplementedError


def _as_data(name: str, batch: Any, place: int, ignore_index: int | None, input_kind: str) -> FitData:
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise TypeError(
            f"{name}: a batch must be (logits, target) or (logits, target, sample_weight), got {short(batch)} in batch "
            f"{place}"
        )
    logits, target = as_tensor(batch[0], f"{name}: logits"), batch[1]
    weight = batch[2] if len(batch) == 3 else None
    if logits.dim() != 2:
        raise ValueError(f"{name}: logits of a batch must be [n, C], got shape {list(logits.shape)} in batch {place}")
    where = f"{name}, batch {place}"  # rows are those of the batch
    data = as_rows(where, logits, target, weight, ignore_index, input_kind=input_kind, one_logit=False, empty=True)
    if data.names is not None:
        raise TypeError(f"{name}: target must be integer class indices in fit_batches, got strings in batch {place}")
    return data


def _counted(name: str, read: Callable[[], Iterator[FitData]], *, assumed: bool) -> BatchedRows:
    """The source of the rows of all processes, after one pass that counts rows and classes."""
    rank, size = rank_and_size()
    facts = torch.zeros(size, 2, dtype=torch.float64)  # rows and classes of every process
    device = torch.device("cpu")
    with ends_all_ranks():
        for place, data in enumerate(read()):
            n_classes = data.input.shape[1]
            if facts[rank, 1] not in (0, n_classes):
                raise ValueError(
                    f"{name}: every batch must have {int(facts[rank, 1])} classes as the first, got {n_classes} in "
                    f"batch {place}"
                )
            if place == 0:
                device = data.input.device
                if assumed:
                    refuse_probs(name, data.input)
            facts[rank] = torch.tensor([float(facts[rank, 0]) + len(data.target), float(n_classes)])
    facts = sum_over_group(facts)
    known = facts[:, 1][facts[:, 1] > 0].unique()
    if len(known) == 0 or float(facts[:, 0].sum()) == 0:
        raise ValueError(f"{name}: fit_batches needs at least one row, got none")
    if len(known) > 1:
        raise ValueError(f"{name}: all processes must have the same number of classes, got {known.int().tolist()}")
    first = int(facts[:rank, 0].sum())

    def numbered() -> Iterator[Batch]:
        number = first
        with ends_all_ranks():
            for data in read():
                after = number + len(data.target)
                yield data.input, data.target, data.weight, torch.arange(number, after, device=data.input.device)
                number = after

    return BatchedRows(numbered, int(known[0]), sum_over_group, device=device)
