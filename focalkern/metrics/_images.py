"""Conversion of pixels [N, C, d1, ...], one distribution per pixel, to rows; means over images."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from focalkern._arrays import as_tensor, flat_rows
from focalkern._checks import label, label_range, one_image, one_of
from focalkern.metrics._inputs import MetricInput, as_labels, as_probs, confidence_and_correct

__all__ = ["Per", "flattened", "measured"]

Per = Literal["set", "image"]


def measured(
    op: str,
    metric: Callable[[MetricInput], Tensor],
    given: MetricInput,
    ignore_index: int | None,
    per: Per,
    *,
    log: bool = False,
) -> Tensor:
    """``metric`` of all rows, or its mean over the images that have rows. ``log`` permits any value in probs."""
    one_of(op, "per", per, ("set", "image"))
    if per == "set":
        return metric(flattened(op, given, ignore_index, log=log))
    given = _tensors(op, given)
    labels = _labels(op, given)
    if labels.dim() < 2:
        raise ValueError(
            f"{op}: per='image' must have probs [N, C, d1, ...], or confidence and correct [N, d1, ...], got "
            f"{'target' if given.target is not None else 'correct'} of shape {list(labels.shape)}"
        )
    rows, counts = _pixels(op, given, ignore_index, log=log)
    pixels = labels[0].numel() if len(labels) else 0
    places = [slice(first, first + pixels) for first in range(0, len(counts), pixels or 1)]
    parts = (_part(rows, counts, place) for place in places if bool(counts[place].any()))
    # The first image tells whether rows of probabilities sum to 1.
    errors = [metric(part._replace(sums=number == 0)) for number, part in enumerate(parts)]
    return torch.stack(errors).mean(0) if errors else metric(_part(rows, counts, slice(None)))


def flattened(op: str, given: MetricInput, ignore_index: int | None = None, *, log: bool = False) -> MetricInput:
    """Pixels as rows without ignored pixels. Rows and batches of sets are returned unchanged."""
    if ignore_index is None:
        if given.probs is None or (isinstance(given.probs, Tensor) and given.probs.dim() == 2):
            return given
        given = _tensors(op, given)
        if not _is_dense(op, given):
            return given
    return _part(*_pixels(op, _tensors(op, given), ignore_index, log=log), slice(None))


def _tensors(op: str, given: MetricInput) -> MetricInput:
    probs, target, confidence, correct = (
        None if one is None else as_tensor(one, f"{op}: {name}")
        for name, one in zip(MetricInput._fields[:-1], given[:-1], strict=True)
    )
    return MetricInput(probs, target, confidence, correct, given.sums)


def _labels(op: str, given: MetricInput) -> Tensor:
    labels: Tensor | None = given.correct if given.target is None else given.target
    if labels is None:
        raise ValueError(f"{op}: expected either target or correct, got neither")
    return labels


def _is_dense(op: str, given: MetricInput) -> bool:
    """Whether the arguments are pixels (classes in dimension 1 of more than two), by the shape of the labels."""
    probs, labels = given.probs, given.correct if given.target is None else given.target
    if probs.dim() < 3 or labels is None or labels.shape != _shape_of_pixels(probs):
        return False
    if labels.shape == probs.shape[:-1]:
        raise ValueError(
            f"{op}: probs must be pixels [N, C, d1, ...] or a batch of sets [..., N, C], got {list(probs.shape)}, "
            f"which labels {list(labels.shape)} fit as both; for pixels pass ignore_index=-100, of a batch pass one "
            "set at a time"
        )
    return True


def _shape_of_pixels(probs: Tensor) -> tuple[int, ...]:
    return (*probs.shape[:1], *probs.shape[2:])


def _pixels(op: str, given: MetricInput, ignore_index: int | None, *, log: bool) -> tuple[MetricInput, Tensor]:
    """The pixels as rows, and [rows] bool, False for ignored ones. Errors give the index among all rows."""
    labels, values = _labels(op, given), given.confidence if given.probs is None else given.probs
    if given.probs is not None and (values.dim() < 2 or labels.shape != _shape_of_pixels(values)):
        name = "correct" if given.target is None else "target"
        is_one = values.dim() > 2 and labels.shape == values.shape[1:]
        remedy = one_image("probs", name) if is_one else "ignore_index and per='image' take no batch of sets"
        raise ValueError(
            f"{op}: {name} must be [N, d1, ...] for probs [N, C, d1, ...] = {list(values.shape)}, got "
            f"{list(labels.shape)}; {remedy}"
        )
    if given.probs is None and values is not None and labels.shape != values.shape:
        raise ValueError(f"{op}: correct must be [N, d1, ...] = {list(values.shape)}, got {list(labels.shape)}")
    rows = given._replace(probs=None).of_each(lambda one: one.reshape(-1))
    rows = rows._replace(probs=None if given.probs is None else flat_rows(given.probs))
    counts = torch.ones(labels.numel(), dtype=torch.bool, device=labels.device)
    if ignore_index is not None:
        ignore_index = label(op, "ignore_index", ignore_index, " or None")
        if given.probs is None or given.target is None:
            raise ValueError(f"{op}: ignore_index goes with probs and target, got correct; leave the rows out of it")
        target = as_labels(op, rows.target, rows.probs)
        label_range(op, target, rows.probs.shape[1], ignore_index)
        counts = target.long() != ignore_index
    if rows.probs is not None:
        checked = rows.probs if bool(counts.all()) else rows.probs.masked_fill(~counts.unsqueeze(-1), 0)
        as_probs(op, checked, log=log, sums=False)
    elif rows.confidence is not None:
        confidence_and_correct(op, *rows)  # which has no probabilities
    return rows, counts


def _part(rows: MetricInput, counts: Tensor, place: slice) -> MetricInput:
    """The rows at ``place`` that are not ignored."""
    part, kept = rows.of_each(lambda one: one[place]), counts[place]
    return part if bool(kept.all()) else part.of_each(lambda one: one[kept])
